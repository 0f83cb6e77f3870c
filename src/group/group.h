/* src/group/: barrier, all-gather, reduce-scatter and all-reduce among processes of one host, over
 * shared memory. The reference engine uses them in place of NCCL, so that its tensor-parallel
 * generator and its sharded trainer run on any machine with CPUs. A rank that dies ends the waits
 * of the others. */

/* Collectives among the ranks of one host instance, over shared memory.
 *
 * One process makes the group as a memfd; each rank process gets the descriptor (inherited, or over
 * a Unix socket) and opens it under its own rank. All ranks then call the same operations in the
 * same order with the same sizes. Sums are taken in rank order, so results are the same bits on
 * every rank and in every run.
 *
 * An operation spins briefly, then sleeps. While it waits it checks its peers: a peer that died (or
 * closed the group) before its part of the operation aborts it within about 100 ms with DRAY_EDEAD,
 * which names the rank. A deadline that passes aborts with DRAY_ETIMEDOUT. An aborted group cannot
 * be used again: every later operation of any rank returns the same code.
 *
 * A group handle belongs to one thread at a time. All operations block until their deadline. */
#pragma once

#include <dray/dray.h>

#define DRAY__GROUP_MAX_WORLD 64

typedef struct dray__group dray__group;

/* Makes a group of `world` ranks (1..64) with `scratch_bytes` of transfer space a rank (0: 1 MiB;
 * rounded up to pages). *fd is close-on-exec and sealed against resizing; the caller owns it and
 * may close it once every rank has opened. */
int dray__group_create(uint32_t world, uint64_t scratch_bytes, int *fd, dray_error *error);

/* Joins as `rank`. The descriptor is borrowed: the group keeps its own mapping. timeout_ns is the
 * default deadline of every operation; 0 means 60 s. Does not wait for the other ranks: operations
 * do. Returns 0, DRAY_EINVALID (not a group, another world, rank outside it), DRAY_EEXIST (the rank
 * is taken), or DRAY_EDEAD (the group was aborted). */
int dray__group_open(int fd, uint32_t rank, uint32_t world, int64_t timeout_ns, dray__group **out,
                     dray_error *error);
/* Leaves. Peers that still wait for this rank get DRAY_EDEAD. NULL is fine. */
void dray__group_close(dray__group *group);
uint32_t dray__group_rank(const dray__group *group);
uint32_t dray__group_world(const dray__group *group);

/* Aborts the group for all ranks with DRAY_ECANCELED. `why` (at most 200 bytes are kept) becomes
 * part of every rank's message. A rank that failed and cannot take part any more calls it. */
void dray__group_abort(dray__group *group, const char *why);

/* timeout_ns of the operations below may be DRAY_WAIT_DEFAULT for the group's default. They
 * return DRAY_OK, DRAY_EDEAD, DRAY_ETIMEDOUT, DRAY_ECANCELED, DRAY_EPROTO when ranks are in
 * different operations (the group is aborted), or DRAY_EINVALID for wrong arguments (nothing was
 * done). */
int dray__group_barrier(dray__group *group, int64_t timeout_ns, dray_error *error);

/* Copies `bytes` of `data` at rank `root` to all other ranks. Any size is allowed, as the bytes
 * go through the scratch in pieces. */
int dray__group_broadcast(dray__group *group, uint32_t root, void *data, uint64_t bytes,
                          int64_t timeout_ns, dray_error *error);

/* out = the pieces of rank 0, 1, ... back to back; piece r has bytes[r] bytes (the same array on
 * all ranks; zero is fine). `in` is this rank's piece and may be at its place in `out`. */
int dray__group_all_gather(dray__group *group, const void *in, const uint64_t *bytes, void *out,
                           int64_t timeout_ns, dray_error *error);
/* The same with pieces of equal size. */
int dray__group_all_gather_equal(dray__group *group, const void *in, uint64_t bytes, void *out,
                                 int64_t timeout_ns, dray_error *error);

/* Replaces data[i] on all ranks by the sum of data[i] over the ranks, added in rank order. */
int dray__group_all_reduce_f32(dray__group *group, float *data, uint64_t count, int64_t timeout_ns,
                               dray_error *error);
/* `in` is cut in pieces of counts[0], counts[1], ... floats (the same array on all ranks);
 * out = piece `rank` summed over ranks in rank order. in and out must not overlap. */
int dray__group_reduce_scatter_f32(dray__group *group, const float *in, const uint64_t *counts,
                                   float *out, int64_t timeout_ns, dray_error *error);
