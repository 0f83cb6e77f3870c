/* The memory under chunks: memfds that one process maps writable and everybody else reads; the way
 * to them through the keeper; and this process's read-only mappings of others' chunks. */
#pragma once

#include "base/wire.h"
#include "control/channel.h"
#include "queue/messages.h"

#include <dray/dray.h>
#include <stdbool.h>
#include <sys/types.h>

/* Makes a memfd of `bytes`, maps it writable here (pages there already, not inherited by forks),
 * then seals it: nobody can map it writable again, shrink it or grow it. */
int dray__segment_new(uint64_t bytes, void **base, int *fd, dray_error *error);
/* That a descriptor from elsewhere is such a memfd of at least `bytes`: reading its mapping can
 * then never fail. DRAY_EINVALID. */
int dray__segment_check(int fd, uint64_t bytes, dray_error *error);

/* A connection to the keeper, made when first needed. One thread at a time. */
typedef struct dray__keeper_link {
    char *address; /* "unix:..."; NULL when the coordinator named none */
    dray__channel *channel;
    int64_t timeout_ns;
    uint64_t era; /* of the controller that chunks are put for; 0 until it is known */
} dray__keeper_link;

int dray__keeper_link_init(dray__keeper_link *link, const char *path, int64_t timeout_ns,
                           dray_error *error);
void dray__keeper_link_free(dray__keeper_link *link);
/* The keeper may be another one by now. */
void dray__keeper_link_break(dray__keeper_link *link);
/* Returns 0, or DRAY_ECLOSED when the controller of this era is gone, and another has come. */
int dray__keeper_put(dray__keeper_link *link, uint64_t id, uint64_t key, uint64_t bytes, int fd,
                     dray_error *error);
/* Returns 0 when the keeper has the chunk, DRAY_EGONE when it has not. */
int dray__keeper_has(dray__keeper_link *link, uint64_t id, dray_error *error);
/* Tells the keeper to forget some chunks. */
int dray__keeper_forget(dray__keeper_link *link, const dray__chunk_key *chunks, uint32_t count,
                        dray_error *error);
/* Tells the keeper to forget all chunks, and to take only chunks of the link's era from now on. */
int dray__keeper_reset(dray__keeper_link *link, dray_error *error);

/* A chunk as this process reads it: mapped once, shared by all queues and threads. */
typedef struct dray__mapping {
    uint64_t id;
    uint8_t *base; /* read-only */
    uint64_t size;
    uint32_t users; /* of batches */
    int dropped;    /* unmapped with its last user */
    int fd;         /* of the chunk; -1 while nobody asked for it, or too many are kept */
} dray__mapping;

/* Maps the chunk, or finds its mapping; give it back with dray__mapping_put. */
int dray__mapping_get(dray__keeper_link *link, uint64_t id, dray__mapping **out, dray_error *error);
void dray__mapping_put(dray__mapping *mapping);
/* The chunk's descriptor, for another mapping of it; give it back with dray__mapping_fd_put. */
int dray__mapping_fd(dray__keeper_link *link, dray__mapping *mapping, int *fd, dray_error *error);
void dray__mapping_fd_put(const dray__mapping *mapping, int fd);
/* The chunk is gone from the keeper: its memory should not be kept for a mapping's sake. */
void dray__mapping_drop(uint64_t id);
void dray__mapping_drop_unused(void);

/* ---- chunks that this process writes --------------------------------------------------------- */

/* A producer's chunks, to which outputs are written before a commit refers to them. A chunk is
 * filled from its beginning (current), then set aside until nothing uncommitted is left in it, and
 * closed (reported to the controller with the next message). When all its rows are freed and no
 * batch has it pinned, the controller may give it back at the next request for memory. */

typedef enum dray__written_state {
    DRAY__WRITTEN_CURRENT,
    DRAY__WRITTEN_FULL, /* not current any more, with values that are not committed yet */
    DRAY__WRITTEN_CLOSED,
    DRAY__WRITTEN_LOST /* its controller is gone, but values in it are not given up yet */
} dray__written_state;

typedef struct dray__written {
    uint64_t id, key, size, used; /* key: a secret that is needed to have it dropped */
    uint8_t *base;
    uint32_t pending; /* values set and neither committed nor given up */
    dray__written_state state;
    bool kept;     /* something in it was committed, or may have been */
    uint64_t told; /* CLOSED: the number of the message (storage.messages) that reported it; 0 when
                    * none has */
    struct dray__written *next;
} dray__written;

typedef struct dray__storage {
    pid_t pid;
    dray__written *chunks, *current;
    uint64_t count, bytes;
    uint64_t capacity; /* of the queue */
    uint64_t messages; /* that said which chunks are closed */
    const uint64_t *rooms;
    uint32_t room_count; /* bytes of the columns that are written next; 0 when not known */
} dray__storage;

typedef struct dray__storage_room { /* room for values, of a chunk */
    dray__written *chunk;
    uint64_t offset; /* of an object: its size */
    uint8_t *at;
    uint64_t object; /* not of a chunk, but this object of a store */
} dray__storage_room;

/* Takes `bytes` of the current chunk. false: another chunk is needed. */
bool dray__storage_take(dray__storage *storage, uint64_t bytes, dray__storage_room *out);
/* Makes the closed chunk that was given back current. false: there is none such. */
bool dray__storage_reuse(dray__storage *storage, uint64_t id);
/* Nothing more is put into the current chunk. */
void dray__storage_set_aside(dray__storage *storage);
/* Computes the size of a new chunk for `bytes` and later values, and the least size that it must
 * have. */
void dray__storage_size(const dray__storage *storage, uint64_t bytes, uint64_t *least,
                        uint64_t *size);
/* Computes how many bytes of new chunks such columns need, at least; 0 when they fit into the
 * current chunk. The current chunk may be set aside by this. */
int dray__storage_ahead(dray__storage *storage, const uint64_t *rooms, uint32_t count,
                        uint64_t *bytes, dray_error *error);
/* An id and a key for a new chunk. */
int dray__storage_name(uint64_t *id, uint64_t *key, dray_error *error);
/* Makes a new chunk, not yet one of the storage's. *fd is for the keeper. */
int dray__storage_make(uint64_t id, uint64_t key, uint64_t size, dray__written **out, int *fd,
                       dray_error *error);
void dray__storage_add(dray__storage *storage, dray__written *chunk); /* and makes it current */
void dray__storage_unmake(dray__written *chunk);
/* A span's values were committed, or given up (then its room is taken back where it can be). */
void dray__storage_done(dray__storage *storage, const dray__storage_room *span, bool given_up);
void dray__storage_dropped(dray__storage *storage, uint64_t id);
/* "u32 n, n * u64": chunks that were closed since the last time. */
void dray__storage_put_closed(dray__storage *storage, dray__writer *w);
/* Call it when the last message was not sent: its reports are repeated. With all, those of earlier
 * messages are repeated, too, because a chunk may have been given back by an answer that never
 * came. */
void dray__storage_untell(dray__storage *storage, bool all);
/* The controller that knew the chunks is gone. */
void dray__storage_lose(dray__storage *storage);
/* Returns true when a closed chunk was not reported yet. */
bool dray__storage_has_news(const dray__storage *storage);
void dray__storage_free(dray__storage *storage);
