/* Appends items to an array that grows (base/arena.h), and compares numbers. */
#pragma once

#include "base/arena.h"

#include <stdbool.h>
#include <stdint.h>

/* DRAY__PUSH(list->items, list->count, list->capacity, item). Is false when out of memory, with the
 * array unchanged. */
#define DRAY__PUSH(items, count, capacity, ...)                                                    \
    (dray__append(&(items), sizeof *(items), (count), &(capacity)) &&                              \
     ((items)[(count)++] = (__VA_ARGS__), true))

/* Comparisons of numbers for qsort and bsearch, in ascending order. */
#define DRAY__ORDER(name, type)                                                                    \
    static inline int dray__by_##name(const void *a, const void *b)                                \
    {                                                                                              \
        type x = *(const type *)a, y = *(const type *)b;                                           \
        return (x > y) - (x < y);                                                                  \
    }
DRAY__ORDER(u32, uint32_t)
DRAY__ORDER(u64, uint64_t)
DRAY__ORDER(i64, int64_t)
DRAY__ORDER(f64, double)
#undef DRAY__ORDER
