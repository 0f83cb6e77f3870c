/* What a benchmark's weights hold: each element is made from its tensor's name and its global index
 * alone, so that every rank can fill its own blocks and check them, whoever moved the bytes. */
#pragma once

#include <dray/memory.h>
#include <dray/model.h>
#include <stdbool.h>
#include <stdint.h>

/* Which values are meant from here on, in this process: those of `version`, where one of `every`
 * elements is another one in each version, by chance. every 0: all versions have the same. */
void bench_values_at(uint64_t version, uint64_t every);
/* The version and the number that were given. */
void bench_values_now(uint64_t *version, uint64_t *every);

/* Random values in all blocks, never zeros; of floats finite ones of moderate size. tied: the head
 * is another name of the embedding. */
void bench_fill(const dray_layout *layout, dray_region *const *regions, bool tied);

/* Counts the elements that do not hold what a source of these dtypes gives, element by element and
 * without the planner, the movers or their kernels. sources: any members of the source, of whom one
 * at least has each tensor; count 0: the destination's own dtypes. *first gets the name of the
 * first tensor that is wrong, borrowed from layout; NULL: none is. */
uint64_t bench_wrong(const dray_layout *layout, dray_region *const *regions, bool tied,
                     dray_layout *const *sources, uint32_t count, const char **first);

/* ---- for those who fill and look in another way -------------------------------------------------
 */

/* What a tensor's values are made from, with the global index of each. */
uint64_t bench_hash_of(const char *name, bool tied);
/* The value of that index, as a source of this dtype holds it. */
double bench_value_at(uint64_t hash, uint64_t index, dray_dtype dtype);
/* Of the bits of F64, F32, BF16 and F16. */
double bench_value_of(dray_dtype dtype, uint64_t bits);
/* In which dtype the sources have it. */
dray_dtype bench_source_dtype(const dray_tensor_info *tensor, bool tied,
                              dray_layout *const *sources, uint32_t count);
/* The blocks of each tensor: those of tensor t are [first[t]] to [first[t + 1] - 1] of what is
 * returned. The caller frees both. */
uint32_t *bench_blocks_by_tensor(const dray_layout *layout, uint32_t **first);
/* For each tensor: does it hold another one's scales, or is it a part of one that bench_formats.h
 * looks at? The caller frees it. */
bool *bench_scales_of(const dray_layout *layout);
