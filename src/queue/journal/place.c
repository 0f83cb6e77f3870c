#include "queue/journal/place.h"

#include "base/clock.h"
#include "base/error.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#define CHUNK_MIN (UINT64_C(256) << 10) /* each is twice as large as the one before, up to: */
#define CHUNK_MAX (UINT64_C(16) << 20)
#define STORE_PATIENCE (30 * DRAY__SECOND)
#define GET_PATIENCE (10 * DRAY__SECOND) /* then it is tried again */

void dray__place_close(dray__placer *placer)
{
    if (!placer->chunk.base)
        return;
    munmap(placer->chunk.base, placer->chunk.size);
    placer->chunk.base = NULL;
    if (placer->filled)
        placer->filled(placer->user, placer->chunk.id);
}

static int new_chunk(dray__placer *placer, uint64_t bytes, dray_error *error)
{
    uint64_t random[2] = {0, 0};
    int fd;
    void *base;
    dray__place_close(placer);
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return dray__fail(error, DRAY_ESYS, "getrandom");
    uint64_t before = placer->chunk.size; /* 0: there was none */
    uint64_t id = random[0] | 1, size = before ? 2 * before : CHUNK_MIN;
    size = size > CHUNK_MAX ? CHUNK_MAX : size;
    size = size < bytes ? bytes : size;
    int rc = dray__segment_new(size, &base, &fd, error);
    if (rc)
        return rc;
    rc = dray__keeper_put(&placer->link, id, random[1], size, fd, error);
    close(fd);
    if (!rc)
        rc = placer->made(placer->user, id, random[1], size, error);
    if (rc) {
        munmap(base, size);
        return rc;
    }
    placer->chunk.id = id;
    placer->chunk.size = size;
    placer->chunk.used = 0;
    placer->chunk.base = base;
    return DRAY_OK;
}

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + DRAY__ALIGN - 1) / DRAY__ALIGN * DRAY__ALIGN;
}

static int put_into_chunk(dray__placer *placer, dray__new_column *column,
                          const struct iovec parts[3], dray_error *error)
{
    uint64_t head = parts[0].iov_len + parts[1].iov_len, room = head + aligned(parts[2].iov_len);
    if (!placer->chunk.base || room > placer->chunk.size - placer->chunk.used) {
        int rc = new_chunk(placer, room, error);
        if (rc)
            return rc;
    }
    uint64_t at = placer->chunk.used;
    column->extent.chunk = placer->chunk.id;
    column->extent.offsets = head ? at : 0;
    column->extent.values = at + head;
    if (head)
        memcpy(placer->chunk.base + at, parts[0].iov_base, parts[0].iov_len);
    if (parts[2].iov_len)
        memcpy(placer->chunk.base + at + head, parts[2].iov_base, parts[2].iov_len);
    placer->chunk.used += room;
    return DRAY_OK;
}

static int find_home(void *user, uint32_t home, char *endpoint, size_t size, dray_error *error)
{
    return dray__homes_endpoint(user, home, endpoint, size, error);
}

static int get_from_chunk(dray__placer *placer, dray__range *range, int64_t deadline_ns,
                          dray_error *error)
{
    if (range->home && placer->homes) {
        int rc = placer->distant ? DRAY_OK
                                 : dray__distant_new(&placer->homes->keys, find_home, placer->homes,
                                                     &placer->distant, error);
        return rc ? rc : dray__distant_get(placer->distant, range, 1, deadline_ns, error);
    }
    dray__mapping *mapping = NULL;
    int rc = dray__mapping_get(&placer->link, range->object, &mapping, error);
    if (rc)
        return rc;
    if (range->offset > mapping->size || range->bytes > mapping->size - range->offset)
        rc = dray__fail(error, DRAY_EFORMAT, "chunk %016llx is shorter than was said",
                        (unsigned long long)range->object);
    else
        memcpy(range->at, mapping->base + range->offset, range->bytes);
    dray__mapping_put(mapping);
    return rc;
}

/* As an object of its own. */
static int put_into_store(dray__placer *placer, dray__new_column *column,
                          const struct iovec parts[3], dray_error *error)
{
    column->extent.chunk = (uint64_t)placer->client << 32 | ++placer->objects;
    column->extent.offsets = 0;
    column->extent.values = parts[0].iov_len + parts[1].iov_len;
    int rc = placer->store->kind->put(placer->store, column->extent.chunk, parts, 3,
                                      dray__deadline(STORE_PATIENCE), error);
    return rc ? dray__fail_prefix(error, rc, "column %s: ", column->name) : DRAY_OK;
}

static int get_from_store(dray__placer *placer, dray__range *range, int64_t deadline_ns,
                          dray_error *error)
{
    return placer->store->kind->get(placer->store, range, 1, deadline_ns, error);
}

static const dray__placer_kind chunks = {put_into_chunk, get_from_chunk},
                               objects = {put_into_store, get_from_store};

int dray__placer_open(dray__placer *placer, const dray__settings *settings, uint64_t space,
                      const char *keeper_path, uint64_t era, dray_error *error)
{
    const dray__backend_kind *kind = NULL;
    *placer = (dray__placer){.kind = &chunks};
    int rc = dray__backend_find(settings->backend, &kind, error);
    if (!rc)
        rc = dray__keeper_link_init(&placer->link, keeper_path, DRAY__KEEPER_PATIENCE, error);
    placer->link.era = era;
    if (rc || !kind)
        return rc;
    placer->kind = &objects;
    return kind->open(settings->backend_address, space, &placer->store, error);
}

void dray__placer_free(dray__placer *placer)
{
    dray__keeper_link_free(&placer->link);
    dray__distant_free(placer->distant);
    if (placer->store)
        placer->store->kind->close(placer->store);
}

int dray__place_column(dray__placer *placer, dray__reader *r, dray__new_column *column,
                       uint64_t items, dray_error *error)
{
    static const uint8_t zeros[DRAY__ALIGN];
    uint64_t head = column->spec.ragged ? (items + 1) * 8 : 0, bytes = column->extent.bytes;
    r->failed |= bytes > r->size || head > r->size;
    const void *offsets = dray__get_bytes(r, head), *values = dray__get_bytes(r, bytes);
    if (r->failed)
        return dray__fail(error, DRAY_EFORMAT, "column %s: its bytes are missing", column->name);
    const struct iovec parts[3] = {{(void *)(uintptr_t)offsets, head},
                                   {(void *)(uintptr_t)zeros, aligned(head) - head},
                                   {(void *)(uintptr_t)values, bytes}};
    return placer->kind->put(placer, column, parts, error);
}

int dray__placer_get(dray__placer *placer, dray__range *range, dray_error *error)
{
    int rc = placer->kind->get(placer, range, dray__deadline(GET_PATIENCE), error);
    if (!rc && range->lost)
        rc = dray__fail(error, DRAY_EGONE, "bytes of %016llx are gone",
                        (unsigned long long)range->object);
    return rc;
}
