/* The keeper's service: it holds descriptors by chunk id. It uses the coordinator's frames on a
 * socket of its own, without sessions, because a chunk outlives the process that put it.
 * Bytes for other hosts are copied from a mapping of the chunk, which is made at the first request
 * (join.c). */
#include "queue/storage/keeper.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/hook.h"
#include "control/coordinator.h"
#include "queue/messages.h"
#include "queue/storage/storage.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct kept {
    uint64_t key, bytes;
    int fd;
    uint8_t *base;  /* NULL until another host reads it */
    uint32_t users; /* threads that copy from it */
    bool gone;      /* its last user frees it */
} kept;

/* A chunk that was dropped before it was put. This happens because the controller and a producer,
 * which may die or give up, use different connections to the keeper. */
typedef struct tomb {
    uint64_t id, key;
} tomb;

enum { TOMBS = 1024 };

struct dray__keeper {
    dray__coordinator *server;
    pthread_mutex_t lock; /* of the fields below */
    dray__idmap chunks;
    uint64_t bytes, max_bytes, era;
    tomb tombs[TOMBS]; /* a ring */
    size_t tomb_count;
    dray__writer out;
};

static bool dropped_before(const dray__keeper *self, uint64_t id, uint64_t key)
{
    for (size_t i = 0; i < TOMBS; i++)
        if (self->tombs[i].id == id && self->tombs[i].key == key)
            return true;
    return false;
}

static int put(void *keeper, dray__request *request, const void *message, dray_error *error)
{
    dray__keeper *self = keeper;
    const dray__keeping *m = message;
    uint64_t id = m->id, bytes = m->bytes;
    dray__hook_step("keeping");
    if (!id || dray__request_fd_count(request) != 1)
        return dray__fail(error, DRAY_EINVALID,
                          "KEEPER_PUT: one descriptor and an id expected, "
                          "found %u and %llu",
                          dray__request_fd_count(request), (unsigned long long)id);
    if (dray__idmap_get(&self->chunks, id))
        return dray__fail(error, DRAY_EEXIST, "KEEPER_PUT: chunk %016llx is kept already",
                          (unsigned long long)id);
    if (dropped_before(self, id, m->key))
        return dray__fail(error, DRAY_EGONE, "KEEPER_PUT: chunk %016llx was dropped already",
                          (unsigned long long)id);
    if (m->era && self->era && m->era != self->era)
        return dray__fail(error, DRAY_ECLOSED,
                          "KEEPER_PUT: chunk %016llx is of a coordinator that is gone",
                          (unsigned long long)id);
    if (self->max_bytes && (bytes > self->max_bytes || self->bytes > self->max_bytes - bytes))
        return dray__fail(error, DRAY_EFULL, "KEEPER_PUT: %llu bytes + %llu > %llu",
                          (unsigned long long)self->bytes, (unsigned long long)bytes,
                          (unsigned long long)self->max_bytes);
    kept *chunk = malloc(sizeof *chunk);
    if (!chunk)
        return dray__nomem(error);
    *chunk = (kept){.key = m->key, .bytes = bytes, .fd = dray__request_take_fd(request, 0)};
    int rc = dray__segment_check(chunk->fd, bytes, error);
    if (!rc && !dray__idmap_set(&self->chunks, id, chunk))
        rc = dray__nomem(error);
    if (rc) {
        close(chunk->fd);
        free(chunk);
        return rc;
    }
    self->bytes += bytes;
    dray__hook_step("holding");
    dray__request_reply(request, NULL, NULL, 0);
    return DRAY_OK;
}

static int get(void *keeper, dray__request *request, const void *message, dray_error *error)
{
    dray__keeper *self = keeper;
    uint64_t id = *(const uint64_t *)message;
    const kept *chunk = dray__idmap_get(&self->chunks, id);
    if (!chunk)
        return dray__fail(error, DRAY_EGONE, "KEEPER_GET: chunk %016llx is not kept here",
                          (unsigned long long)id);
    dray__hook_step("giving");
    dray__writer_reset(&self->out);
    dray__put_fields(&self->out, &dray__u64_fields, &chunk->bytes);
    dray__request_reply(request, &self->out, &chunk->fd, 1);
    return DRAY_OK;
}

static void release(kept *chunk)
{
    if (chunk->users)
        return;
    if (chunk->base)
        munmap(chunk->base, chunk->bytes);
    close(chunk->fd);
    free(chunk);
}

static void forget(dray__keeper *self, kept *chunk)
{
    self->bytes -= chunk->bytes;
    chunk->gone = true;
    release(chunk);
}

static bool drop_one(dray__keeper *self, uint64_t id, uint64_t key)
{
    const kept *chunk = dray__idmap_get(&self->chunks, id);
    if (!chunk)
        self->tombs[self->tomb_count++ % TOMBS] = (tomb){id, key};
    else if (chunk->key != key)
        return false;
    else
        forget(self, dray__idmap_remove(&self->chunks, id));
    return true;
}

static void forget_all(dray__keeper *self)
{
    for (size_t i = 0; i < self->chunks.capacity; i++)
        if (self->chunks.entries[i].key)
            forget(self, self->chunks.entries[i].value);
    dray__idmap_free(&self->chunks);
    self->chunks = (dray__idmap){0};
}

static int drop(void *self, dray__request *request, const void *message, dray_error *error)
{
    const dray__chunk_keys *m = message;
    uint32_t refused = 0;
    dray__hook_step("dropping");
    for (uint32_t i = 0; i < m->count; i++)
        refused += !drop_one(self, m->items[i].id, m->items[i].key);
    if (refused)
        return dray__fail(error, DRAY_EPERM, "KEEPER_DROP: wrong key for %u of %u chunks", refused,
                          m->count);
    dray__request_reply(request, NULL, NULL, 0);
    return DRAY_OK;
}

static int reset(void *keeper, dray__request *request, const void *message, dray_error *error)
{
    (void)error;
    dray__keeper *self = keeper;
    forget_all(self);
    self->era = *(const uint64_t *)message;
    dray__request_reply(request, NULL, NULL, 0);
    return DRAY_OK;
}

static void handle(void *user, dray__request *request)
{
    static const dray__handler handlers[] = {
        {DRAY__MSG_KEEPER_PUT, &dray__keeping_fields, put},
        {DRAY__MSG_KEEPER_GET, &dray__u64_fields, get},
        {DRAY__MSG_KEEPER_DROP, &dray__chunk_keys_fields, drop},
        {DRAY__MSG_KEEPER_RESET, &dray__u64_fields, reset},
        {0},
    };
    dray__keeper *self = user;
    dray_error error;
    pthread_mutex_lock(&self->lock);
    int rc = dray__request_handle(request, handlers, self, &error);
    pthread_mutex_unlock(&self->lock);
    if (rc)
        dray__request_fail(request, &error);
}

int dray__keeper_new(struct event_base *base, const char *path, uint64_t max_bytes,
                     dray__keeper **out, dray_error *error)
{
    static const dray__service service = {
        .name = "keeper", .first = 0x0400, .last = 0x04FF, .handle = handle};
    dray__keeper *keeper = calloc(1, sizeof *keeper);
    if (!keeper)
        return dray__nomem(error);
    keeper->max_bytes = max_bytes;
    pthread_mutex_init(&keeper->lock, NULL);
    dray__coordinator_options options = {.unix_path = path, .sessionless = 1};
    int rc = dray__coordinator_new(base, &options, &keeper->server, error);
    if (!rc)
        rc = dray__coordinator_add(keeper->server, &service, keeper, error);
    if (rc) {
        dray__keeper_free(keeper);
        return dray__fail_prefix(error, rc, "keeper: ");
    }
    *out = keeper;
    return DRAY_OK;
}

void dray__keeper_free(dray__keeper *keeper)
{
    if (!keeper)
        return;
    dray__coordinator_free(keeper->server);
    forget_all(keeper);
    pthread_mutex_destroy(&keeper->lock);
    dray__writer_free(&keeper->out);
    free(keeper);
}

/* ---- for other hosts ------------------------------------------------------------------------- */

/* Gets the chunk, mapped. Call it under the lock. Returns 0, DRAY_EGONE when the keeper does not
 * have the range, or DRAY_ENOMEM when there is no room for the mapping, and the bytes are still
 * there. */
static int mapped(dray__keeper *self, uint64_t id, uint64_t offset, uint64_t bytes, kept **out)
{
    kept *chunk = dray__idmap_get(&self->chunks, id);
    if (!chunk || offset > chunk->bytes || bytes > chunk->bytes - offset)
        return DRAY_EGONE;
    if (!chunk->base) {
        void *base = mmap(NULL, chunk->bytes, PROT_READ, MAP_SHARED, chunk->fd, 0);
        if (base == MAP_FAILED)
            return DRAY_ENOMEM;
        chunk->base = base;
    }
    *out = chunk;
    return DRAY_OK;
}

int dray__keeper_read(dray__keeper *self, uint64_t id, uint64_t offset, uint64_t bytes, void *out)
{
    kept *chunk = NULL;
    pthread_mutex_lock(&self->lock);
    int rc = mapped(self, id, offset, bytes, &chunk);
    if (!rc)
        chunk->users++;
    pthread_mutex_unlock(&self->lock);
    if (rc)
        return rc;
    memcpy(out, chunk->base + offset, bytes);
    pthread_mutex_lock(&self->lock);
    chunk->users--;
    if (chunk->gone)
        release(chunk);
    pthread_mutex_unlock(&self->lock);
    return DRAY_OK;
}

bool dray__keeper_drop(dray__keeper *self, uint64_t id, uint64_t key)
{
    pthread_mutex_lock(&self->lock);
    bool known = drop_one(self, id, key);
    pthread_mutex_unlock(&self->lock);
    return known;
}

void dray__keeper_reset_all(dray__keeper *self)
{
    pthread_mutex_lock(&self->lock);
    forget_all(self);
    pthread_mutex_unlock(&self->lock);
}

void dray__keeper_enter_era(dray__keeper *self, uint64_t era)
{
    pthread_mutex_lock(&self->lock);
    if (self->era != era)
        forget_all(self);
    self->era = era;
    pthread_mutex_unlock(&self->lock);
}
