/* The division of an update's bytes in a cohort. A cohort is the ranks, of one engine or of
 * several, that update to the same version at the same time. The boundaries of all ranks' blocks
 * cut the tensors into cells, so that all of a cell is held by the same ranks. A cell that several
 * ranks hold is cut into stripes, which are divided evenly among them. Each stripe crosses the
 * publisher's link once, to the rank that fetches it. Each other host reads it from that rank
 * once, and the other ranks of a host read it from the rank of their host that has it. Every rank
 * computes the same division from the layouts alone. */
#pragma once

#include "weights/internal.h"

typedef struct dray__cohort dray__cohort;

#define DRAY__FROM_PUBLISHER UINT32_MAX

/* Returns true when a member of sources->cohort, which may be this rank, takes part. All ranks must
 * get the same result. */
typedef bool dray__cohort_fn(const dray__source *member, const dray__destination *destination);

/* sources->cohort are the members. sources and destination are borrowed until dray__cohort_free.
 * Fails with DRAY_ENOENT when this rank is not a member. */
int dray__cohort_new(const dray__sources *sources, const dray__destination *destination,
                     dray__cohort_fn *takes_part, dray__cohort **out, dray_error *error);
void dray__cohort_free(dray__cohort *cohort); /* NULL is fine */

/* Returns true when other members hold elements of the block, too. */
bool dray__cohort_shared(const dray__cohort *cohort, uint32_t block);
uint32_t dray__cohort_stripes(const dray__cohort *cohort, uint32_t block);
dray__rect dray__cohort_stripe(const dray__cohort *cohort, uint32_t block, uint32_t stripe);
/* Returns the source of a stripe for this rank: a member (its index, and its block), or
 * DRAY__FROM_PUBLISHER. Members on publisher_host do not share, as they reach the publisher without
 * a network. */
uint32_t dray__cohort_from(const dray__cohort *cohort, uint32_t block, uint32_t stripe,
                           uint64_t publisher_host, uint32_t *from_block);
/* Returns the same for members without a network between them: the member (and its block) that
 * fetches the stripe, which may be this rank. *round: the stripe's round, below `rounds` and the
 * same for all members; each member has about the same number of bytes in each round. */
uint32_t dray__cohort_turn(const dray__cohort *cohort, uint32_t block, uint32_t stripe,
                           uint32_t rounds, uint32_t *from_block, uint32_t *round,
                           uint32_t *holders);
uint32_t dray__cohort_self(const dray__cohort *cohort);
