/* src/queue/storage/: who holds the bytes of samples. holder.h is the one interface to them, for
 * clients and journals: holder_chunks.c is of chunks of shared memory, holder_objects.c of stores
 * of objects. Chunks: storage.c makes and maps them and fills a client's own, keeper.c holds them
 * beyond the process that wrote them, keepers.c knows the keepers of all hosts, join.c is a
 * keeper's session with the coordinator, distant.c reads from the keepers of other hosts. Stores of
 * objects: backend.c names them, backend_redis.c is one, cleaner.c and stores.c drop what is not
 * needed any more. */

/* Who holds the bytes of columns.
 *
 * builtin: chunks of shared memory, which readers map (storage.h). Any other backend is a store of
 * objects, each written whole and once, read in ranges of bytes, and dropped: one kind below. An
 * object is one column of one put: for ragged columns u64 offsets[items + 1], then from the next
 * multiple of DRAY__ALIGN the values.
 *
 * The controller keeps where everything lies, as for chunks: an object becomes known with the
 * commit that names it, and is dropped when nothing refers to it any more (cleaner.h). Ids are
 * owner << 32 | number: the owner is the client of the queue that wrote it. */
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
    void *at;        /* where they go */
    bool lost;       /* set by get: the store does not have them (any more) */
    uint32_t keeper; /* builtin: the keeper that has them (keepers.h) */
} dray__range;

/* Every function but open waits for the store until the deadline, connecting again as often as it
 * must; DRAY_ETIMEDOUT says what stood in the way. DRAY_EPERM: the store refuses us; DRAY_EFULL: it
 * has no room. Repeating any of them does no harm. One thread at a time. */
typedef struct dray__backend_kind {
    const char *name;
    const char *missing; /* what this build is without, and then all else is NULL */
    /* space: which queue's objects; two queues of one store never see each other's. Connects to
     * nothing yet. DRAY_EINVALID: the address. */
    int (*open)(const char *address, uint64_t space, dray__backend **out, dray_error *error);
    void (*close)(dray__backend *self);
    /* The object is the parts, back to back. After an error some of it may be there. */
    int (*put)(dray__backend *self, uint64_t object, const struct iovec *parts, uint32_t count,
               int64_t deadline_ns, dray_error *error);
    int (*get)(dray__backend *self, dray__range *ranges, uint32_t count, int64_t deadline_ns,
               dray_error *error);
    int (*drop)(dray__backend *self, const dray__object *objects, uint32_t count,
                int64_t deadline_ns, dray_error *error);
    /* Drops all objects of the owner but those in `keep` (ids, ascending); owner 0: of everybody.
     */
    int (*sweep)(dray__backend *self, uint32_t owner, const uint64_t *keep, uint32_t keep_count,
                 int64_t deadline_ns, dray_error *error);
} dray__backend_kind;

struct dray__backend { /* begins every backend's own struct */
    const dray__backend_kind *kind;
};

/* By dray_queue_backend. *out NULL: the builtin one. DRAY_EINVALID: there is no such backend;
 * DRAY_EUNSUPPORTED: this build is without it. */
int dray__backend_find(int32_t backend, const dray__backend_kind **out, dray_error *error);
/* The store of this name, which need not end there. NULL: this build has none. */
const dray__backend_kind *dray__backend_named(const char *name, size_t length);
/* What DRAY_BACKEND_DEFAULT means where a queue is created: builtin, or what $DRAY_QUEUE_BACKEND
 * says, "redis:unix:/path". address: borrowed from the environment. DRAY_EINVALID. */
int dray__backend_default(int32_t *backend, const char **address, dray_error *error);
const char *dray__backend_name(int32_t backend);

/* The one table of stores: XX(of dray_queue_backend, name). */
#define DRAY__STORE_MAP(XX) XX(REDIS, redis)

#define XX(number, name) extern const dray__backend_kind dray__backend_##name;
DRAY__STORE_MAP(XX)
#undef XX
/* What messages expect as the name of one: "redis:ADDRESS ". */
#define DRAY__STORE_WORD(number, name) #name ":ADDRESS "
#define DRAY__STORE_WORDS DRAY__STORE_MAP(DRAY__STORE_WORD)
