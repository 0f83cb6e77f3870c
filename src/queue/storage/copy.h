/* Copies of many bytes into memory that this process will not read soon. */
#pragma once

#include <stddef.h>

/* As memcpy, but large copies use non-temporal stores: cache lines are not read before they are
 * written, and the caches keep their contents. */
void dray__copy_away(void *to, const void *from, size_t bytes);
