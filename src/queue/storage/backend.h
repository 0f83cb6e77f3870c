/* src/queue/storage/: the holders of the bytes of samples. holder.h is the one interface to them,
 * for clients and journals: holder_chunks.c is of chunks of shared memory, holder_objects.c of
 * stores of objects. Chunks: storage.c makes and maps them and fills a client's own, keeper.c holds
 * them beyond the process that wrote them, keepers.c knows the keepers of all hosts, join.c is a
 * keeper's session with the coordinator, distant.c reads from the keepers of other hosts. Stores of
 * objects: backend.c names them, backend_redis.c is one, cleaner.c and stores.c drop unused
 * objects. */

/* The backends that hold the bytes of columns.
 *
 * builtin: chunks of shared memory, which readers map (storage.h). Any other backend is a store of
 * objects, each written whole and once, read in ranges of bytes, and dropped: one kind below. An
 * object is one column of one put: for ragged columns u64 offsets[items + 1], then from the next
 * multiple of DRAY__ALIGN the values.
 *
 * The controller keeps the places of all bytes, in objects as in chunks. An object becomes known
 * with the commit that names it, and is dropped when nothing refers to it any more (cleaner.h). Ids
 * are owner << 32 | number: the owner is the client of the queue that wrote it. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <sys/uio.h>

typedef struct dray__backend dray__backend;

typedef struct dray__object {
    uint64_t id, size;
} dray__object;

typedef struct dray__range {
    uint64_t object, offset, bytes;
    void *at;        /* their destination */
    bool lost;       /* set by get when the store does not have them */
    uint32_t keeper; /* builtin: the keeper that has them (keepers.h) */
} dray__range;

/* Every function but open waits for the store until the deadline, and connects again as often as it
 * must. Functions return 0, DRAY_ETIMEDOUT with the last obstacle in the message, DRAY_EPERM when
 * the store refuses this client, or DRAY_EFULL when it has no room. All of them can be
 * repeated. One thread at a time may call them. */
typedef struct dray__backend_kind {
    const char *name;
    const char *missing; /* the library that this build lacks; then all functions are NULL */
    /* Opens a backend without connecting to it. space is the number of the queue's objects: two
     * queues of one store never see each other's. Returns 0, or DRAY_EINVALID when the address is
     * wrong. */
    int (*open)(const char *address, uint64_t space, dray__backend **out, dray_error *error);
    void (*close)(dray__backend *self);
    /* Writes the parts, back to back, as one object. After an error some of it may be written. */
    int (*put)(dray__backend *self, uint64_t object, const struct iovec *parts, uint32_t count,
               int64_t deadline_ns, dray_error *error);
    int (*get)(dray__backend *self, dray__range *ranges, uint32_t count, int64_t deadline_ns,
               dray_error *error);
    int (*drop)(dray__backend *self, const dray__object *objects, uint32_t count,
                int64_t deadline_ns, dray_error *error);
    /* Drops all objects of the owner but those in `keep` (ids, ascending); owner 0 means all
     * owners. */
    int (*sweep)(dray__backend *self, uint32_t owner, const uint64_t *keep, uint32_t keep_count,
                 int64_t deadline_ns, dray_error *error);
} dray__backend_kind;

struct dray__backend { /* begins every backend's own struct */
    const dray__backend_kind *kind;
};

/* Finds a backend by its dray_queue_backend. *out is NULL for the builtin one. Returns 0,
 * DRAY_EINVALID when there is no such backend, or DRAY_EUNSUPPORTED when this build lacks it. */
int dray__backend_find(int32_t backend, const dray__backend_kind **out, dray_error *error);
/* Returns the store whose name is the first `length` bytes of `name`; NULL when this build has
 * none. */
const dray__backend_kind *dray__backend_named(const char *name, size_t length);
/* Finds the meaning of DRAY_BACKEND_DEFAULT where a queue is created: builtin, or the value of
 * $DRAY_QUEUE_BACKEND, "redis:unix:/path". address is borrowed from the environment. Returns 0, or
 * DRAY_EINVALID when that value is wrong. */
int dray__backend_default(int32_t *backend, const char **address, dray_error *error);
const char *dray__backend_name(int32_t backend);

/* The one table of stores: XX(of dray_queue_backend, name). */
#define DRAY__STORE_MAP(XX) XX(REDIS, redis)

#define XX(number, name) extern const dray__backend_kind dray__backend_##name;
DRAY__STORE_MAP(XX)
#undef XX
/* The form of a store's name in messages: "redis:ADDRESS ". */
#define DRAY__STORE_WORD(number, name) #name ":ADDRESS "
#define DRAY__STORE_WORDS DRAY__STORE_MAP(DRAY__STORE_WORD)
