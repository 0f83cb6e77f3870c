/* Whether tensors in the formats of engines (docs/formats.md) hold what their sources' floats
 * become: of a sample, to within what the format rounds away. */
#pragma once

#include <dray/model.h>
#include <stdbool.h>

/* Reads an element of at most 8 bytes into *bits, which is 0 before. */
typedef bool (*bench_read_fn)(void *user, uint32_t region, uint64_t offset, uint64_t bytes,
                              uint64_t *bits);

/* Is it quantised in such a format? */
bool bench_is_formatted(const dray_layout *layout, uint32_t tensor);
/* As bench_wrong, of a sample of those tensors. *first is set where it was NULL. */
uint64_t bench_formats_wrong(const dray_layout *layout, bool tied, dray_layout *const *sources,
                             uint32_t count, bench_read_fn read, void *user, const char **first);
