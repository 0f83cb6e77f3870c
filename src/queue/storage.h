/* A producer's chunks: where its outputs are written before a commit refers to them. A chunk is
 * filled from its beginning (current), then set aside until nothing uncommitted is left in it,
 * closed (told to the controller with the next message), and comes back when all rows in it are
 * freed and nobody has it pinned. */
#ifndef DRAY_QUEUE_STORAGE_H
#define DRAY_QUEUE_STORAGE_H

#include "base/wire.h"
#include "queue/segment.h"

#include <stdbool.h>
#include <sys/types.h>

typedef enum dray__written_state {
    DRAY__WRITTEN_CURRENT,
    DRAY__WRITTEN_FULL, /* not current any more, with values that are not committed yet */
    DRAY__WRITTEN_CLOSED,
    DRAY__WRITTEN_FREE,
    DRAY__WRITTEN_LOST /* its controller is gone, but values in it are not given up yet */
} dray__written_state;

typedef struct dray__written {
    uint64_t id, key, size, used; /* key: what one must know to have it dropped */
    uint8_t *base;
    uint32_t pending; /* values set and neither committed nor given up */
    dray__written_state state;
    bool kept;     /* something in it was committed, or may have been */
    uint64_t told; /* CLOSED: by which message (storage.messages) it was told; 0: by none */
    uint64_t freed_at;
    struct dray__written *next;
} dray__written;

typedef struct dray__storage {
    pid_t pid;
    dray__written *chunks, *current;
    uint64_t count, bytes, clock; /* clock: chunks taken so far */
    uint64_t messages;            /* that said which chunks are closed */
} dray__storage;

typedef struct dray__span { /* room for values, of a chunk */
    dray__written *chunk;
    uint64_t offset; /* of an object: its size */
    uint8_t *at;
    uint64_t object; /* not of a chunk, but this object of a store */
} dray__span;

/* Takes `bytes` of the current chunk. false: another chunk is needed. */
bool dray__storage_take(dray__storage *storage, uint64_t bytes, dray__span *out);
/* Makes a free chunk of at least `bytes` current. false: there is none that suits. */
bool dray__storage_reuse(dray__storage *storage, uint64_t bytes);
/* Makes a new chunk of at least `bytes`, not yet one of the storage's. *fd is for the keeper. */
int dray__storage_make(const dray__storage *storage, uint64_t bytes, dray__written **out, int *fd,
                       dray_error *error);
void dray__storage_add(dray__storage *storage, dray__written *chunk); /* and makes it current */
void dray__storage_unmake(dray__written *chunk);
/* A span's values were committed, or given up (then its room is taken back where it can be). */
void dray__storage_done(dray__storage *storage, const dray__span *span, bool given_up);
void dray__storage_recycled(dray__storage *storage, uint64_t id);
void dray__storage_dropped(dray__storage *storage, uint64_t id);
/* "u32 n, n * u64": chunks that were closed since the last time. */
void dray__storage_put_closed(dray__storage *storage, dray__writer *w);
/* The last message was not sent: what it said is said again. all: so is what earlier ones said, for
 * a chunk may have been given back by an answer that never came. */
void dray__storage_untell(dray__storage *storage, bool all);
/* The controller that knew the chunks is gone. */
void dray__storage_lose(dray__storage *storage);
/* As put_closed: free chunks that were not used for long; they are unmapped. */
void dray__storage_put_surplus(dray__storage *storage, dray__writer *w);
void dray__storage_free(dray__storage *storage);

#endif
