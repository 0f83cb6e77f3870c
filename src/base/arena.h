/* Memory that is only given, and taken back all at once: names and small records whose addresses
 * must not move while a growing array around them does. */
#ifndef DRAY_BASE_ARENA_H
#define DRAY_BASE_ARENA_H

#include <stddef.h>

typedef struct dray__arena_chunk dray__arena_chunk;

typedef struct dray__arena {
    dray__arena_chunk *chunks; /* newest first */
} dray__arena;

/* `size` bytes aligned for any object; NULL when out of memory. */
void *dray__arena_get(dray__arena *arena, size_t size);
/* A copy of the text, unaligned. */
char *dray__arena_text(dray__arena *arena, const char *text);
void dray__arena_free(dray__arena *arena);
/* Takes everything back, but keeps the newest chunk for what comes next. */
void dray__arena_reset(dray__arena *arena);

#endif
