/* Shared libraries that are opened at run time: their functions in a struct. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* One function: its symbol, and the offset of its pointer in the struct. */
typedef struct dray__symbol {
    const char *name;
    size_t at;
    bool optional; /* the pointer is NULL when the library lacks it */
} dray__symbol;

/* Fills `out`, the struct, from a library that dlopen returned. Returns NULL, or the name of the
 * first symbol that the library lacks and that is not optional. */
const char *dray__symbols_load(void *library, const dray__symbol *symbols, size_t count, void *out);
