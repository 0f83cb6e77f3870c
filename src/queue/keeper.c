/* The keeper's service: descriptors by chunk id, nothing else. It speaks the coordinator's frames,
 * on a socket of its own, without sessions: who put a chunk may be long dead. */
#include "queue/keeper.h"

#include "base/error.h"
#include "base/idmap.h"
#include "control/coordinator.h"
#include "queue/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

typedef struct kept {
    uint64_t key, bytes;
    int fd;
} kept;

/* Chunks that were dropped before they came: the controller and a producer that dies, or gives up,
 * talk to the keeper on connections of their own. */
typedef struct tomb {
    uint64_t id, key;
} tomb;

enum { TOMBS = 1024 };

struct dray__keeper {
    dray__coordinator *server;
    dray__idmap chunks;
    uint64_t bytes, max_bytes;
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

static int put(dray__keeper *self, dray__request *request, dray_error *error)
{
    dray__reader *r = dray__request_payload(request);
    uint64_t id = dray__get_u64(r), key = dray__get_u64(r), bytes = dray__get_u64(r);
    int rc = dray__reader_finish(r, "KEEPER_PUT", error);
    if (rc)
        return rc;
    if (!id || dray__request_fd_count(request) != 1)
        return dray__fail(error, DRAY_EINVALID,
                          "KEEPER_PUT: one descriptor and an id expected, "
                          "found %u and %llu",
                          dray__request_fd_count(request), (unsigned long long)id);
    if (dray__idmap_get(&self->chunks, id))
        return dray__fail(error, DRAY_EEXIST, "KEEPER_PUT: chunk %016llx is kept already",
                          (unsigned long long)id);
    if (dropped_before(self, id, key))
        return dray__fail(error, DRAY_EGONE, "KEEPER_PUT: chunk %016llx was dropped already",
                          (unsigned long long)id);
    if (self->max_bytes && (bytes > self->max_bytes || self->bytes > self->max_bytes - bytes))
        return dray__fail(error, DRAY_EFULL, "KEEPER_PUT: %llu bytes + %llu > %llu",
                          (unsigned long long)self->bytes, (unsigned long long)bytes,
                          (unsigned long long)self->max_bytes);
    kept *chunk = malloc(sizeof *chunk);
    if (!chunk)
        return dray__nomem(error);
    *chunk = (kept){.key = key, .bytes = bytes, .fd = dray__request_take_fd(request, 0)};
    rc = dray__segment_check(chunk->fd, bytes, error);
    if (!rc && !dray__idmap_set(&self->chunks, id, chunk))
        rc = dray__nomem(error);
    if (rc) {
        close(chunk->fd);
        free(chunk);
        return rc;
    }
    self->bytes += bytes;
    dray__request_reply(request, NULL, NULL, 0);
    return DRAY_OK;
}

static int get(dray__keeper *self, dray__request *request, dray_error *error)
{
    dray__reader *r = dray__request_payload(request);
    uint64_t id = dray__get_u64(r);
    int rc = dray__reader_finish(r, "KEEPER_GET", error);
    if (rc)
        return rc;
    const kept *chunk = dray__idmap_get(&self->chunks, id);
    if (!chunk)
        return dray__fail(error, DRAY_EGONE, "KEEPER_GET: chunk %016llx is not kept here",
                          (unsigned long long)id);
    dray__writer_reset(&self->out);
    dray__put_u64(&self->out, chunk->bytes);
    dray__request_reply(request, &self->out, &chunk->fd, 1);
    return DRAY_OK;
}

static void forget(dray__keeper *self, kept *chunk)
{
    self->bytes -= chunk->bytes;
    close(chunk->fd);
    free(chunk);
}

static int drop(dray__keeper *self, dray__request *request, dray_error *error)
{
    dray__reader *r = dray__request_payload(request);
    uint32_t count = dray__get_count(r, 16), refused = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t id = dray__get_u64(r), key = dray__get_u64(r);
        kept *chunk = dray__idmap_get(&self->chunks, id);
        if (!chunk)
            self->tombs[self->tomb_count++ % TOMBS] = (tomb){id, key};
        else if (chunk->key == key)
            forget(self, dray__idmap_remove(&self->chunks, id));
        else
            refused++;
    }
    int rc = dray__reader_finish(r, "KEEPER_DROP", error);
    if (!rc && refused)
        rc = dray__fail(error, DRAY_EPERM, "KEEPER_DROP: wrong key for %u of %u chunks", refused,
                        count);
    if (!rc)
        dray__request_reply(request, NULL, NULL, 0);
    return rc;
}

static int reset(dray__keeper *self, dray__request *request, dray_error *error)
{
    int rc = dray__reader_finish(dray__request_payload(request), "KEEPER_RESET", error);
    if (rc)
        return rc;
    for (size_t i = 0; i < self->chunks.capacity; i++)
        if (self->chunks.entries[i].key)
            forget(self, self->chunks.entries[i].value);
    dray__idmap_free(&self->chunks);
    self->chunks = (dray__idmap){0};
    dray__request_reply(request, NULL, NULL, 0);
    return DRAY_OK;
}

static void handle(void *user, dray__request *request)
{
    dray__keeper *self = user;
    dray_error error;
    int rc;
    switch (dray__request_type(request)) {
    case DRAY__MSG_KEEPER_PUT:
        rc = put(self, request, &error);
        break;
    case DRAY__MSG_KEEPER_GET:
        rc = get(self, request, &error);
        break;
    case DRAY__MSG_KEEPER_DROP:
        rc = drop(self, request, &error);
        break;
    case DRAY__MSG_KEEPER_RESET:
        rc = reset(self, request, &error);
        break;
    default:
        rc = dray__fail(&error, DRAY_EUNSUPPORTED, "message %04x is none of the keeper's",
                        dray__request_type(request));
    }
    if (rc)
        dray__request_fail(request, &error);
}

static void raise_descriptor_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
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
    raise_descriptor_limit();
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
    for (size_t i = 0; i < keeper->chunks.capacity; i++)
        if (keeper->chunks.entries[i].key)
            forget(keeper, keeper->chunks.entries[i].value);
    dray__idmap_free(&keeper->chunks);
    dray__writer_free(&keeper->out);
    free(keeper);
}

uint64_t dray__keeper_chunks(const dray__keeper *keeper)
{
    return keeper->chunks.count;
}

uint64_t dray__keeper_bytes(const dray__keeper *keeper)
{
    return keeper->bytes;
}
