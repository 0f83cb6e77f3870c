/* The memory of chunks: memfds that one process maps writable and all others map read-only; the
 * connection to the keeper, which gives out their descriptors; and this process's read-only
 * mappings. */
#pragma once

#include "base/wire.h"
#include "control/channel.h"
#include "queue/messages.h"

#include <dray/dray.h>
#include <stdbool.h>
#include <sys/types.h>

/* Makes a memfd of `bytes` and maps it writable here, with its pages allocated, and not inherited
 * by forks. Then seals it: nobody can map it writable again, shrink it or grow it. */
int dray__segment_new(uint64_t bytes, void **base, int *fd, dray_error *error);
/* Checks that a descriptor of another process is such a memfd of at least `bytes`; then reading its
 * mapping can never fault. Returns DRAY_EINVALID when it is not. */
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
/* Closes the connection, so that the next use connects to the present keeper. */
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
    int fd;         /* of the chunk; -1 until it is needed, or when too many are kept */
} dray__mapping;

/* Returns the chunk's mapping, and makes it at first use; give it back with dray__mapping_put. */
int dray__mapping_get(dray__keeper_link *link, uint64_t id, dray__mapping **out, dray_error *error);
void dray__mapping_put(dray__mapping *mapping);
/* Returns the chunk's descriptor, for another mapping; give it back with dray__mapping_fd_put. */
int dray__mapping_fd(dray__keeper_link *link, dray__mapping *mapping, int *fd, dray_error *error);
void dray__mapping_fd_put(const dray__mapping *mapping, int fd);
/* Call when the keeper has dropped the chunk. It is unmapped once it has no users. */
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
    uint64_t id, key, size, used; /* key: a secret without which the keeper does not drop it */
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
    uint64_t messages; /* messages that reported closed chunks */
    const uint64_t *rooms;
    uint32_t room_count; /* bytes of the columns that are written next; 0 when not known */
} dray__storage;

typedef struct dray__storage_room { /* room for values, of a chunk */
    dray__written *chunk;
    uint64_t offset; /* of an object: its size */
    uint8_t *at;
    uint64_t object; /* the object of a store; 0 for room in a chunk */
} dray__storage_room;

/* Takes `bytes` of the current chunk. Returns false when another chunk is needed. */
bool dray__storage_take(dray__storage *storage, uint64_t bytes, dray__storage_room *out);
/* Makes the closed chunk that was given back current. Returns false when there is no such chunk. */
bool dray__storage_reuse(dray__storage *storage, uint64_t id);
/* Sets the current chunk aside: nothing more is put into it. */
void dray__storage_set_aside(dray__storage *storage);
/* Computes the size of a new chunk for `bytes` and later values, and the least size that it must
 * have. */
void dray__storage_size(const dray__storage *storage, uint64_t bytes, uint64_t *least,
                        uint64_t *size);
/* Computes the least bytes of new chunks that such columns need; 0 when they fit into the current
 * chunk. May set the current chunk aside. */
int dray__storage_ahead(dray__storage *storage, const uint64_t *rooms, uint32_t count,
                        uint64_t *bytes, dray_error *error);
/* Draws an id and a key for a new chunk. */
int dray__storage_name(uint64_t *id, uint64_t *key, dray_error *error);
/* Makes a new chunk, not yet one of the storage's. *fd is for the keeper. */
int dray__storage_make(uint64_t id, uint64_t key, uint64_t size, dray__written **out, int *fd,
                       dray_error *error);
void dray__storage_add(dray__storage *storage, dray__written *chunk); /* and makes it current */
void dray__storage_unmake(dray__written *chunk);
/* Call when a span's values were committed or given up. Room that was given up is used again where
 * possible. */
void dray__storage_done(dray__storage *storage, const dray__storage_room *span, bool given_up);
void dray__storage_dropped(dray__storage *storage, uint64_t id);
/* Writes "u32 n, n * u64": the chunks closed since the last report. */
void dray__storage_put_closed(dray__storage *storage, dray__writer *w);
/* Call when the last message was not sent. Its reports are repeated. With all, those of earlier
 * messages are repeated, too, because an answer that was lost may have given a chunk back. */
void dray__storage_untell(dray__storage *storage, bool all);
/* Call when the controller that knew the chunks is gone. */
void dray__storage_lose(dray__storage *storage);
/* Returns true when a closed chunk was not reported yet. */
bool dray__storage_has_news(const dray__storage *storage);
void dray__storage_free(dray__storage *storage);
