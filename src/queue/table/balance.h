/* Arithmetic on the costs of samples: dividing them evenly, and packing them. */
#pragma once

#include <dray/dray.h>
#include <stdint.h>

#define DRAY__BALANCE_MAX (UINT64_C(1) << 24) /* items * bins */
/* Divides items among `bins` so that the sums of their costs differ little (Karmarkar and Karp's
 * largest differencing method), and none is empty if there are enough items. bin[i] is the bin
 * of item i. */
int dray__balance(const uint64_t *costs, uint32_t count, uint32_t bins, uint32_t *bin,
                  dray_error *error);
/* Packs items into bins of a total cost of at most `cap` and at most `rows` items (0: no limit), by
 * first-fit decreasing. bin[i] is the bin of item i, *bins their number. No item may cost more than
 * cap. */
int dray__pack(const uint64_t *costs, uint32_t count, uint64_t cap, uint32_t rows, uint32_t *bin,
               uint32_t *bins, dray_error *error);
