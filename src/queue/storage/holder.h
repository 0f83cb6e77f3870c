/* The holder of the bytes of a queue's columns, for one user of the queue that puts and reads them.
 * The bytes are in chunks of shared memory that keepers hold (holder_chunks.c), or in a store of
 * objects, any backend of backend.h (holder_objects.c). A client has one holder, and so has each
 * thread that reads or writes a journal. Only one thread may use it at a time. */
#pragma once

#include "queue/storage/backend.h"
#include "queue/storage/distant.h"
#include "queue/storage/storage.h"

typedef struct dray__values_holder dray__values_holder;

/* A column's values for `items` items: `head` bytes of offsets and of padding that aligns the
 * values, then `bytes` bytes. */
typedef struct dray__values {
    const char *column;
    const void *offsets; /* u64[items + 1] at any address; NULL when all items have one size */
    uint64_t first;      /* this is subtracted from each offset */
    uint64_t items;
    const void *values;
    uint64_t head, bytes, room; /* room: both */
} dray__values;

/* Writes the offsets and the padding: values->head bytes, which is not 0. */
void dray__values_head(const dray__values *values, void *to);

typedef struct dray__holder_kind {
    /* Puts the values. Afterwards the extent says where they are. */
    int (*put)(dray__values_holder *self, const dray__values *values, dray__extent *extent,
               dray__storage_room *room, dray_error *error);
    /* Ends the work on the column that was put, whether it was committed or not. */
    void (*done)(dray__values_holder *self, const dray__storage_room *room, bool committed,
                 bool maybe);
    /* Returns how many bytes of new memory columns of these sizes need. NULL when none is ever
     * needed. */
    int (*ahead)(dray__values_holder *self, const uint64_t *rooms, uint32_t count, uint64_t *bytes,
                 dray_error *error);
    /* A request failed with DRAY_EGONE: finds the holder of the next bytes, and forgets those that
     * were put if they are lost. NULL when nothing is to be found. */
    int (*move)(dray__values_holder *self, dray_error *error);
    /* Runs before anything is read. May be NULL. */
    int (*prepare)(dray__values_holder *self, dray_error *error);
    /* Returns true when the bytes must be fetched because they cannot be mapped here. NULL means
     * always. */
    bool (*is_elsewhere)(const dray__values_holder *self, uint32_t keeper);
    /* Fetches ranges as a backend's `get` does. Either all ranges are elsewhere or none is. */
    int (*get)(dray__values_holder *self, dray__range *ranges, uint32_t count, int64_t deadline_ns,
               dray_error *error);
    /* Gives up the objects. May be NULL. */
    void (*close)(dray__values_holder *self);
    /* How bytes may have been lost, for messages. */
    const char *lost;
} dray__holder_kind;

/* The functions that the holder's user supplies. */
typedef struct dray__holder_uses {
    /* For chunks: makes a chunk with room for `bytes` the current one (dray__holder_chunk). */
    int (*more)(void *user, uint64_t bytes, dray_error *error);
    /* Finds this host's keeper. With `again`, asks the controller although the keeper is known.
     * NULL when the number is known already. */
    int (*settle)(void *user, bool again, dray_error *error);
    dray__distant_find find; /* NULL when there are no other hosts */
    /* For objects: reports objects that were put and may not be committed to the controller, which
     * then drops them. May be NULL. */
    int (*abandon)(void *user, const dray__chunk_wish *objects, uint32_t count);
} dray__holder_uses;

struct dray__values_holder {
    const dray__holder_kind *kind;
    const dray__holder_uses *uses;
    void *user;
    const char *name;  /* the name that messages about lost bytes use */
    const char *queue; /* borrowed; for messages */
    int64_t patience_ns;
    /* chunks */
    dray__keeper_link keeper; /* of this host */
    dray__storage storage;    /* this client's chunks */
    uint32_t keeper_number;   /* DRAY__NONE when this host has none */
    bool keeper_known;        /* keeper_number is known */
    /* The keys for data servers of other hosts; NULL when there are none. */
    const dray__stream_keys *keys;
    dray__distant *distant; /* NULL until something was read from there */
    /* objects */
    dray__backend *store;
    uint32_t owner, objects; /* their owner's number, and how many were put */
    dray__chunk_wish *given_up;
    uint32_t given_up_count;
    uint64_t given_up_capacity;
};

extern const dray__holder_kind dray__holder_chunks, dray__holder_objects;

/* Begins with chunks, until a backend is known. keeper_path is NULL when this host has no
 * keeper. The caller frees the holder in any case. */
int dray__holder_init(dray__values_holder *holder, const dray__holder_uses *uses, void *user,
                      const char *keeper_path, int64_t patience_ns, dray_error *error);
void dray__holder_free(dray__values_holder *holder);
/* Uses this space of the backend (a dray_queue_backend) from now on, in place of the former one. */
int dray__holder_open(dray__values_holder *holder, int32_t backend, const char *address,
                      uint64_t space, dray_error *error);
/* Drops all objects of an owner that no longer exists. */
void dray__holder_sweep(dray__values_holder *holder, uint32_t owner);
/* Makes a chunk, gives it to the keeper, and makes it the current one. After an error nothing of
 * it is left. */
int dray__holder_chunk(dray__values_holder *holder, uint64_t id, uint64_t key, uint64_t size,
                       dray_error *error);
