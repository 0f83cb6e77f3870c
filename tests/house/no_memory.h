/* Lets one allocation of libdray fail. A test program that includes this header is linked with
 * no_memory.c; in the others no_memory.c is preloaded, and the environment gives the number
 * (tests/house/soak_no_memory.py). Allocations of libjansson and libevent count as libdray's, as it
 * alone calls them. The code of the test never fails to allocate. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* Begins to count allocations. The next one has number 1. The one with this number fails, once; 0
 * means none. */
void no_memory_at(uint64_t number);
/* Returns the number of allocations since then. */
uint64_t no_memory_count(void);
/* Returns the address of the code whose allocation failed, for addr2line of the program; 0 when
 * none has failed. */
uint64_t no_memory_failed(void);
/* Marks the calling thread as a part of the test, and not of the library. */
void no_memory_spare_thread(void);
