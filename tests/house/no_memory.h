/* Lets one allocation of libdray fail. A test program that includes this header is linked with
 * no_memory.c; in the others no_memory.c is preloaded, and the environment gives the number
 * (tests/house/soak_no_memory.py). Allocations of libjansson and libevent count as libdray's, as it
 * alone calls them. The code of the test never fails to allocate. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* The next allocation has number 1. number: which one fails, once; 0: none. */
void no_memory_at(uint64_t number);
/* How many there were since then. */
uint64_t no_memory_count(void);
/* Where the one was that failed, for addr2line of the program; 0: none has failed. */
uint64_t no_memory_failed(void);
/* The calling thread is a part of the test, not of the library. */
void no_memory_spare_thread(void);
