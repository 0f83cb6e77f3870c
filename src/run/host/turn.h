/* Turns of a built-in program on the devices that its role shares with others: leases that rank 0
 * holds for all of its ranks. Without shared devices nothing here waits, or costs anything.
 *
 * A program has its turn while it computes: from its first batch on, over all batches that are
 * there for it, until there is nothing more to do, or, where others wait, until the next step
 * begins. It never has it while it waits for samples or for weights; an update of weights needs no
 * turn. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct dray__host dray__host;
typedef struct dray__turn dray__turn;

/* leases: $DRAY_LEASES; "": none, and *out is NULL. */
int dray__turn_open(const char *leases, dray__turn **out, dray_error *error);
/* Before the context is closed. */
void dray__turn_close(dray__turn *turn);

/* On all ranks, before they compute. Waits for the turn when it is another program's. step is the
 * step of the coming work, or -1 for work under way. When the step differs from that of the work
 * before, others go first. */
int dray__turn_begin(dray__host *host, int64_t step, dray_error *error);
/* On all ranks, when none of them computes any more: others may. */
int dray__turn_end(dray__host *host, dray_error *error);

/* The same on rank 0 alone, while the other ranks wait for it. */
int dray__turn_give(dray__host *host, dray_error *error);
/* Rank 0's: is it this program's? */
bool dray__turn_is_mine(const dray__host *host);
