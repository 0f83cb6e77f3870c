/* The values of a benchmark's weights. Each element depends on its tensor's name, its global index
 * and the version alone, so that every rank can fill its own blocks and check them, however their
 * bytes were moved. */
#pragma once

#include <dray/memory.h>
#include <dray/model.h>
#include <stdbool.h>
#include <stdint.h>

/* Chooses the values that this process makes from here on: those of `version`, in which a random
 * one of `every` elements differs from the version before. With `every` 0, all versions have the
 * same values. */
void bench_values_at(uint64_t version, uint64_t every);
/* Sets the version and the number to those that bench_values_at was given. */
void bench_values_now(uint64_t *version, uint64_t *every);

/* Fills all blocks with random values. Those of F32, BF16 and F16 are finite, not zero, and of
 * moderate size. With `tied`, the head has the values of the embedding. */
void bench_fill(const dray_layout *layout, dray_region *const *regions, bool tied);

/* Counts the elements that differ from the value that a source of these dtypes converts to. It goes
 * element by element, without the planner, the movers or their kernels. `sources` are any members
 * of the source, at least one of which has each tensor. With count 0, the destination's own dtypes
 * are used. *first is the name of the first wrong tensor, borrowed from layout; NULL when none is
 * wrong. */
uint64_t bench_wrong(const dray_layout *layout, dray_region *const *regions, bool tied,
                     dray_layout *const *sources, uint32_t count, const char **first);

/* ---- for other ways to fill and to check ----------------------------------------------------- */

/* Returns the hash from which, with the global index of each, a tensor's values are made. */
uint64_t bench_hash_of(const char *name, bool tied);
/* Returns the value at that index, as a source of this dtype holds it. */
double bench_value_at(uint64_t hash, uint64_t index, dray_dtype dtype);
/* Returns the value of the bits of an F64, F32, BF16 or F16. */
double bench_value_of(dray_dtype dtype, uint64_t bits);
/* Returns the dtype in which the sources hold the tensor. */
dray_dtype bench_source_dtype(const dray_tensor_info *tensor, bool tied,
                              dray_layout *const *sources, uint32_t count);
/* Returns the indices of the blocks, ordered by tensor. The blocks of tensor t are at [first[t]] to
 * [first[t + 1] - 1]. The caller frees both arrays. */
uint32_t *bench_blocks_by_tensor(const dray_layout *layout, uint32_t **first);
/* Returns, for each tensor, whether it holds the scales of another one, or is a part of a tensor
 * that bench_formats.h checks. The caller frees the array. */
bool *bench_scales_of(const dray_layout *layout);
