/* Copies of many bytes into memory that this process will not read soon. */
#pragma once

#include <stddef.h>

/* As memcpy. Many bytes are written past the caches: their lines are not read before they are
 * written, and what the caches hold stays there. */
void dray__copy_away(void *to, const void *from, size_t bytes);
