/* Checks whether tensors in the formats of engines (docs/formats.md) hold the values that their
 * sources' floats convert to: a sample of them, to within the formats' rounding. */
#pragma once

#include <dray/model.h>
#include <stdbool.h>

/* Reads an element of at most 8 bytes into *bits, which is 0 before. Returns false when it
 * fails. */
typedef bool (*bench_read_fn)(void *user, uint32_t region, uint64_t offset, uint64_t bytes,
                              uint64_t *bits);

/* Returns whether the tensor is quantised in such a format. */
bool bench_is_formatted(const dray_layout *layout, uint32_t tensor);
/* Counts wrong elements as bench_wrong does, in a sample of those tensors. If *first is NULL, it is
 * set to the name of the first wrong tensor. */
uint64_t bench_formats_wrong(const dray_layout *layout, bool tied, dray_layout *const *sources,
                             uint32_t count, bench_read_fn read, void *user, const char **first);
