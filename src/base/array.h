/* Items put behind others in an array that grows (base/arena.h), and the order of numbers. */
#pragma once

#include "base/arena.h"

#include <stdbool.h>
#include <stdint.h>

/* DRAY__PUSH(list->items, list->count, list->capacity, item). false: out of memory, and the array
 * is as it was. */
#define DRAY__PUSH(items, count, capacity, ...)                                                    \
    (dray__append(&(items), sizeof *(items), (count), &(capacity)) &&                              \
     ((items)[(count)++] = (__VA_ARGS__), true))

/* For qsort and bsearch: numbers, the least first. */
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
