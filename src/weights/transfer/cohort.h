/* Who fetches what, in a cohort: ranks, of one engine or of several, that update to the same
 * version at the same time. The blocks of all, whatever their shapes, cut each other into cells
 * that have the same holders everywhere; a cell that several hold is cut into stripes, dealt
 * evenly: each stripe crosses the publisher's link once, to the rank that fetches it; the other
 * hosts take it from that rank, once each; and the other ranks of a host from the one that did.
 * Every rank derives the same from the layouts alone. */
#pragma once

#include "weights/internal.h"

typedef struct dray__cohort dray__cohort;

#define DRAY__FROM_PUBLISHER UINT32_MAX

/* Does a member of sources->cohort take part, this rank too? The same for all who ask. */
typedef bool dray__cohort_fn(const dray__source *member, const dray__destination *destination);

/* sources->cohort are the members; both are borrowed until free. DRAY_ENOENT: this rank is not
 * among them. */
int dray__cohort_new(const dray__sources *sources, const dray__destination *destination,
                     dray__cohort_fn *takes_part, dray__cohort **out, dray_error *error);
void dray__cohort_free(dray__cohort *cohort); /* NULL is fine */

/* Is the block held by others, too? */
bool dray__cohort_shared(const dray__cohort *cohort, uint32_t block);
uint32_t dray__cohort_stripes(const dray__cohort *cohort, uint32_t block);
dray__rect dray__cohort_stripe(const dray__cohort *cohort, uint32_t block, uint32_t stripe);
/* Whom this rank takes a stripe from: a member (its index, and its block) or the publisher, which
 * is on `publisher_host`; members on that host do not share, they reach it without a network. */
uint32_t dray__cohort_from(const dray__cohort *cohort, uint32_t block, uint32_t stripe,
                           uint64_t publisher_host, uint32_t *from_block);
/* The same where no network lies between: the member (and its block) whose turn the stripe is,
 * maybe this one. round: below `rounds`, the same for all; each has about as much of each. */
uint32_t dray__cohort_turn(const dray__cohort *cohort, uint32_t block, uint32_t stripe,
                           uint32_t rounds, uint32_t *from_block, uint32_t *round,
                           uint32_t *holders);
uint32_t dray__cohort_self(const dray__cohort *cohort);
