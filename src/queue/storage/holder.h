/* Who holds the bytes of a queue's columns, as one user of the queue puts and reads them: keepers
 * of chunks of shared memory (holder_chunks.c), or a store of objects, which any backend.h is
 * (holder_objects.c). A client has one, and so has each thread that reads or writes a journal. One
 * thread at a time. */
#pragma once

#include "queue/storage/backend.h"
#include "queue/storage/distant.h"
#include "queue/storage/storage.h"

typedef struct dray__values_holder dray__values_holder;

/* A column's values for `items` items: `head` bytes of offsets and what aligns the values, then
 * `bytes`. */
typedef struct dray__values {
    const char *column;
    const void *offsets; /* u64[items + 1] at any address; NULL: all items are of one size */
    uint64_t first;      /* taken off each of them */
    uint64_t items;
    const void *values;
    uint64_t head, bytes, room; /* room: both */
} dray__values;

/* Writes the offsets and what aligns the values: values->head bytes, which are not 0. */
void dray__values_head(const dray__values *values, void *to);

typedef struct dray__holder_kind {
    /* Afterwards the extent says where the values are. */
    int (*put)(dray__values_holder *self, const dray__values *values, dray__extent *extent,
               dray__storage_room *room, dray_error *error);
    /* Nothing more is done with what was put: it was committed, or not, or maybe. */
    void (*done)(dray__values_holder *self, const dray__storage_room *room, bool committed,
                 bool maybe);
    /* How many bytes of memory columns of these rooms need that is not there yet. NULL: none. */
    int (*ahead)(dray__values_holder *self, const uint64_t *rooms, uint32_t count, uint64_t *bytes,
                 dray_error *error);
    /* What was put is gone: learns who holds what comes. NULL: nobody else does. */
    int (*move)(dray__values_holder *self, dray_error *error);
    /* Before anything is read. NULL: nothing is to be done. */
    int (*prepare)(dray__values_holder *self, dray_error *error);
    /* Must it be got, because it cannot be mapped here? NULL: always. */
    bool (*is_elsewhere)(const dray__values_holder *self, uint32_t home);
    /* As a backend's get. All ranges are elsewhere, or none is. */
    int (*get)(dray__values_holder *self, dray__range *ranges, uint32_t count, int64_t deadline_ns,
               dray_error *error);
    void (*close)(dray__values_holder *self); /* tells what was given up; NULL: nothing */
    const char *lost;                         /* how it may be that bytes are lost */
} dray__holder_kind;

/* What the holder's user does for it. */
typedef struct dray__holder_uses {
    /* Chunks. Makes a chunk with room for `bytes` the current one (dray__holder_chunk). */
    int (*more)(void *user, uint64_t bytes, dray_error *error);
    /* Learns which keeper is this host's; again: though it is known. NULL: `home` is known. */
    int (*settle)(void *user, bool again, dray_error *error);
    dray__distant_find find; /* NULL: there are no other hosts */
    /* Objects. Tells the controller of some that were put and maybe not committed, which it drops
     * then. NULL: nobody needs to know. */
    int (*abandon)(void *user, const dray__chunk_wish *objects, uint32_t count);
} dray__holder_uses;

struct dray__values_holder {
    const dray__holder_kind *kind;
    const dray__holder_uses *uses;
    void *user;
    const char *name;  /* of who may lose bytes, for messages */
    const char *queue; /* borrowed; for messages */
    int64_t patience_ns;
    /* chunks */
    dray__keeper_link keeper;      /* of this host */
    dray__storage storage;         /* what we put */
    uint32_t home;                 /* the keeper's number; DRAY__NONE: there is none here */
    bool at_home;                  /* home is known */
    const dray__stream_keys *keys; /* for data servers of other hosts; NULL: there are none */
    dray__distant *distant;        /* NULL: nothing was read from there yet */
    /* objects */
    dray__backend *store;
    uint32_t owner, objects; /* whose they are, and how many were put */
    dray__chunk_wish *given_up;
    uint32_t given_up_count;
    uint64_t given_up_capacity;
};

extern const dray__holder_kind dray__holder_chunks, dray__holder_objects;

/* Chunks, until a backend is known. keeper_path: NULL: there is no keeper here. Free it in any
 * case. */
int dray__holder_init(dray__values_holder *holder, const dray__holder_uses *uses, void *user,
                      const char *keeper_path, int64_t patience_ns, dray_error *error);
void dray__holder_free(dray__values_holder *holder);
/* From now on it is this backend's (a dray_queue_backend) space; in place of what it was before. */
int dray__holder_open(dray__values_holder *holder, int32_t backend, const char *address,
                      uint64_t space, dray_error *error);
/* Drops all objects of an owner of the past. */
void dray__holder_sweep(dray__values_holder *holder, uint32_t owner);
/* Makes a chunk, has the keeper hold it, and makes it current. Nothing is left of it after an
 * error. */
int dray__holder_chunk(dray__values_holder *holder, uint64_t id, uint64_t key, uint64_t size,
                       dray_error *error);
