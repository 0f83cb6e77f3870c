/* Arithmetic on the costs of samples: dividing them evenly, and packing them. */
#pragma once

#include <dray/dray.h>
#include <stdint.h>

#define DRAY__BALANCE_MAX (UINT64_C(1) << 24) /* items * bins */
/* Divides items among `bins` so that the sums of their costs differ little (Karmarkar and Karp's
 * largest differencing method), and none is empty while there are items enough. bin[i]: of item i.
 */
int dray__balance(const uint64_t *costs, uint32_t count, uint32_t bins, uint32_t *bin,
                  dray_error *error);
/* How many bins of at most `cap` (0: no limit) and `rows` items (0: no limit) first-fit decreasing
 * takes; bin[i]: of item i. No item costs more than cap. */
int dray__pack(const uint64_t *costs, uint32_t count, uint64_t cap, uint32_t rows, uint32_t *bin,
               uint32_t *bins, dray_error *error);
