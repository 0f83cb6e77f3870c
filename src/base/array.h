/* Items put behind others in an array that grows (base/arena.h). */
#pragma once

#include "base/arena.h"

#include <stdbool.h>

/* DRAY__PUSH(list->items, list->count, list->capacity, item). false: out of memory, and the array
 * is as it was. */
#define DRAY__PUSH(items, count, capacity, ...)                                                    \
    (dray__append(&(items), sizeof *(items), (count), &(capacity)) &&                              \
     ((items)[(count)++] = (__VA_ARGS__), true))
