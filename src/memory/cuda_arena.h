/* The inside of arenas, which allocating (cuda_arena.c) and releasing and resuming
 * (cuda_sleep.c) share. */
#pragma once

#include "memory/cuda_memory.h"
#include "memory/extents.h"

#include <pthread.h>

/* Pinned host memory in pieces that are registered one by one. Growing never moves the pieces
 * that are there, and copies of the first piece run while the next one is pinned. */
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

/* Makes room for at least `bytes`. After an error the pieces are as before. */
int dray__pinned_pieces_grow(dray__pinned_pieces *p, uint64_t bytes, dray_error *error);
void dray__pinned_pieces_free(dray__pinned_pieces *p);

typedef struct dray__arena_part { /* a chunk, and the allocations in it */
    dray__cuda_chunk chunk;
    dray__extents used; /* offsets in the chunk */
    /* When released with content: the parts of it that lie one after the other in the pieces. */
    dray__extents kept;
    uint64_t kept_from; /* where in the arena's pieces these begin */
    uint64_t reach;     /* when released: the GPUs that could access it */
    uint64_t content;   /* the number of its content, a new one after the content was dropped */
    bool released;
} dray__arena_part;

struct dray_arena {
    dray_arena *next; /* the list's lock guards `next` and `refs` */
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
    uint64_t contents; /* the last number of a part's content */
    bool released;
    dray__pinned_pieces pinned;
    CUstream stream; /* the stream of its copies; NULL before the first copy */
};

/* Lists the open arenas with the tag (NULL: all), and holds them. The caller frees *out. Fails
 * with DRAY_ENOENT when there are none. */
int dray__gpu_arenas(const char *tag, dray_arena ***out, uint32_t *count, dray_error *error);
/* Puts memory under a chunk, and gives access to all GPUs that should have it. */
int dray__arena_back(const dray_arena *arena, dray__arena_part *part, dray_error *error);
/* Removes a part and frees it. Its memory must have been dropped before. */
void dray__arena_remove(dray_arena *arena, uint32_t index);
