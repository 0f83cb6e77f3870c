/* Inside arenas: shared by what allocates (cuda_arena.c) and what releases and resumes
 * (cuda_sleep.c). */
#pragma once

#include "memory/cuda_memory.h"
#include "memory/extents.h"

#include <pthread.h>

/* Pinned host memory, in pieces, each registered alone: taking more of it never moves what is
 * there, and copies of the first run while the next is pinned. */
#define DRAY__PINNED_PIECE ((uint64_t)1 << 30)

typedef struct dray__pinned_pieces {
    struct dray__pinned_piece {
        uint8_t *base;
        uint64_t bytes;
    } * pieces;
    uint64_t capacity;
    uint32_t count;
    uint64_t bytes; /* of all */
} dray__pinned_pieces;

/* Room for at least `bytes`: an error leaves what was there. */
int dray__pinned_pieces_grow(dray__pinned_pieces *p, uint64_t bytes, dray_error *error);
void dray__pinned_pieces_free(dray__pinned_pieces *p);

typedef struct dray__arena_part { /* a chunk, and what is allocated in it */
    dray__cuda_chunk chunk;
    dray__extents used; /* offsets in the chunk */
    dray__extents kept; /* released with content: what of it, one after the other in the pieces */
    uint64_t kept_from; /* where in the arena's pieces */
    uint64_t reach;     /* released: who could touch it */
    bool released;
} dray__arena_part;

struct dray_arena {
    dray_arena *next; /* under the list's lock, as refs */
    uint32_t refs;
    pthread_mutex_t lock; /* all below */
    dray__cuda_device *device;
    char tag[64];
    CUdeviceptr base;
    uint64_t address_bytes, chunk_bytes, unit;
    bool peers, closed;
    dray__arena_part **parts; /* by address */
    uint32_t count;
    uint64_t capacity;
    uint64_t used_bytes;
    uint32_t allocations;
    bool released;
    dray__pinned_pieces pinned;
    CUstream stream; /* of its copies; NULL: not yet */
};

/* The open arenas with the tag (NULL: all), held; *out: to be freed. DRAY_ENOENT: none. */
int dray__gpu_arenas(const char *tag, dray_arena ***out, uint32_t *count, dray_error *error);
/* Backs a chunk and lets everybody reach it who shall. */
int dray__arena_back(const dray_arena *arena, dray__arena_part *part, dray_error *error);
/* Takes a part out and frees it; its memory was dropped. */
void dray__arena_remove(dray_arena *arena, uint32_t index);
