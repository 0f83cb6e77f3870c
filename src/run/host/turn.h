/* Turns of a built-in program on the devices that its role shares with other roles. A turn is a set
 * of leases that rank 0 holds for all ranks. Without shared devices no function here waits or costs
 * anything.
 *
 * A program holds its turn while it computes: from its first batch on, over all batches that it can
 * claim, until there is nothing more to do, or, if other programs wait, until the next step begins.
 * It never holds the turn while it waits for samples or weights. An update of weights needs no
 * turn. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct dray__host dray__host;
typedef struct dray__turn dray__turn;

/* leases is the value of $DRAY_LEASES. When it is "", *out is NULL. */
int dray__turn_open(const char *leases, dray__turn **out, dray_error *error);
/* Call it before the context is closed. */
void dray__turn_close(dray__turn *turn);

/* Called on all ranks before they compute. Waits for the turn while another program has it. step is
 * the step of the coming work, or -1 for work under way. When the step differs from that of the
 * previous work, waiting programs go first. */
int dray__turn_begin(dray__host *host, int64_t step, dray_error *error);
/* Gives the turn back. Called on all ranks when none of them computes any more. */
int dray__turn_end(dray__host *host, dray_error *error);

/* The same on rank 0 alone, while the other ranks wait for it. */
int dray__turn_give(dray__host *host, dray_error *error);
/* Returns whether this program has the turn. On rank 0 alone. */
bool dray__turn_is_mine(const dray__host *host);
