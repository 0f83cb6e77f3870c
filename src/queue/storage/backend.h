/* src/queue/storage/: the storage of samples' bytes. holder.h is the one interface to it, for
 * clients and journals: holder_chunks.c for chunks of shared memory, holder_objects.c for stores of
 * objects. Chunks: storage.c makes, maps and fills them, keeper.c holds them after the process that
 * wrote them has ended, homes.c knows the keepers of all hosts, join.c is a keeper's session with
 * the coordinator, distant.c reads from the keepers of other hosts. Stores of objects: backend.c
 * names them, backend_redis.c is one, cleaner.c and stores.c drop objects that are not needed any
 * more. */

/* Backends, which hold the bytes of columns.
 *
 * builtin: chunks of shared memory, which readers map (storage.h). Any other backend is a store of
 * objects (dray__backend_kind). An object is written once, as a whole, read in ranges of bytes, and
 * dropped. It is one column of one put: for ragged columns u64 offsets[items + 1], then, from the
 * next multiple of DRAY__ALIGN on, the values.
 *
 * The controller knows the place of everything, as it does for chunks. It learns of an object from
 * the commit that names it, and drops it when nothing refers to it any more (cleaner.h). Ids are
 * owner << 32 | number; the owner is the client of the queue that wrote the object. */
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
    void *at;      /* the memory for the bytes */
    bool lost;     /* set by get: the store does not have them (any more) */
    uint32_t home; /* builtin: the keeper that has them (homes.h) */
} dray__range;

/* Every function but open waits for the store until the deadline, and connects again when it has
 * to. The message of DRAY_ETIMEDOUT has the last failure. DRAY_EPERM: the store refuses this
 * process; DRAY_EFULL: it has no room. Repeating a call does no harm. Threads: one at a time. */
typedef struct dray__backend_kind {
    const char *name;
    const char *missing; /* the library that the build lacks; then everything else is NULL */
    /* space: the number of a queue's objects, which are separate from those of other queues in the
     * same store. The call connects to nothing. Fails with DRAY_EINVALID for a wrong address. */
    int (*open)(const char *address, uint64_t space, dray__backend **out, dray_error *error);
    void (*close)(dray__backend *self);
    /* Writes an object, which is the parts one after the other. After an error the store may have
     * some of it. */
    int (*put)(dray__backend *self, uint64_t object, const struct iovec *parts, uint32_t count,
               int64_t deadline_ns, dray_error *error);
    int (*get)(dray__backend *self, dray__range *ranges, uint32_t count, int64_t deadline_ns,
               dray_error *error);
    int (*drop)(dray__backend *self, const dray__object *objects, uint32_t count,
                int64_t deadline_ns, dray_error *error);
    /* Drops all objects of the owner except those in `keep` (ids, ascending); owner 0: the objects
     * of all owners. */
    int (*sweep)(dray__backend *self, uint32_t owner, const uint64_t *keep, uint32_t keep_count,
                 int64_t deadline_ns, dray_error *error);
} dray__backend_kind;

struct dray__backend { /* begins every backend's own struct */
    const dray__backend_kind *kind;
};

/* Finds a backend by its number (dray_queue_backend). *out NULL: the builtin one. DRAY_EINVALID:
 * there is no such backend; DRAY_EUNSUPPORTED: this build lacks it. */
int dray__backend_find(int32_t backend, const dray__backend_kind **out, dray_error *error);
/* Returns the store whose name is the first `length` bytes. NULL: this build has none. */
const dray__backend_kind *dray__backend_named(const char *name, size_t length);
/* Reads the backend for DRAY_BACKEND_DEFAULT from $DRAY_QUEUE_BACKEND, such as "redis:unix:/path".
 * Without the variable, nothing is changed. address: borrowed from the environment. Fails with
 * DRAY_EINVALID. */
int dray__backend_default(int32_t *backend, const char **address, dray_error *error);
const char *dray__backend_name(int32_t backend);

/* The one table of stores: XX(of dray_queue_backend, name). */
#define DRAY__STORE_MAP(XX) XX(REDIS, redis)

#define XX(number, name) extern const dray__backend_kind dray__backend_##name;
DRAY__STORE_MAP(XX)
#undef XX
/* The forms of stores' names, for error messages: "redis:ADDRESS ". */
#define DRAY__STORE_WORD(number, name) #name ":ADDRESS "
#define DRAY__STORE_WORDS DRAY__STORE_MAP(DRAY__STORE_WORD)
