/* A table of checksums by tensor name: what publishers announce, what groups vote with. The sums
 * are those of mover/checksum.h, so tables of disjoint rectangles add up. */
#ifndef DRAY_CONTROL_SUMS_H
#define DRAY_CONTROL_SUMS_H

#include "base/hash.h"
#include "base/wire.h"

#include <dray/dray.h>
#include <stdbool.h>

#define DRAY__TENSOR_NAME_MAX 4096u

typedef struct dray__named_sum {
    char *name;
    int32_t dtype;
    bool mixed;        /* held in several dtypes: bits cannot be compared */
    uint64_t elements; /* covered */
    uint64_t sum;
} dray__named_sum;

typedef struct dray__sums {
    dray__map by_name;
    dray__named_sum *items;
    uint32_t count, capacity;
} dray__sums;

void dray__sums_free(dray__sums *sums);
/* Adds a partial sum; false: out of memory. */
bool dray__sums_add(dray__sums *sums, const char *name, int32_t dtype, uint64_t elements,
                    uint64_t sum);
bool dray__sums_add_all(dray__sums *sums, const dray__sums *more);
const dray__named_sum *dray__sums_find(const dray__sums *sums, const char *name);
void dray__sums_put(dray__writer *w, const dray__sums *sums);
/* Reads what dray__sums_put wrote, adding to `sums`; malformed input sticks to the reader. */
bool dray__sums_get(dray__reader *r, dray__sums *sums);
#endif
