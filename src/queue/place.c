#include "queue/place.h"

#include "base/error.h"
#include "queue/internal.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#define CHUNK_MIN (UINT64_C(256) << 10) /* each is twice as large as the one before, up to: */
#define CHUNK_MAX (UINT64_C(16) << 20)
#define STORE_PATIENCE (30 * DRAY__SECOND)

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
    rc = dray__keeper_put(placer->link, id, random[1], size, fd, error);
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

/* Into a store, as an object of its own. */
static int place_object(dray__placer *placer, dray__new_column *column, const void *offsets,
                        uint64_t head, const void *values, uint64_t bytes, dray_error *error)
{
    static const uint8_t zeros[DRAY__ALIGN];
    struct iovec parts[] = {{(void *)(uintptr_t)offsets, head},
                            {(void *)(uintptr_t)zeros, aligned(head) - head},
                            {(void *)(uintptr_t)values, bytes}};
    column->extent.chunk = (uint64_t)placer->client << 32 | ++*placer->objects;
    column->extent.offsets = 0;
    column->extent.values = aligned(head);
    int rc = placer->store->kind->put(placer->store, column->extent.chunk, parts, 3,
                                      dray__deadline(STORE_PATIENCE), error);
    return rc ? dray__fail_prefix(error, rc, "column %s: ", column->name) : DRAY_OK;
}

int dray__place_column(dray__placer *placer, dray__reader *r, dray__new_column *column,
                       uint64_t items, dray_error *error)
{
    uint64_t head = column->spec.ragged ? (items + 1) * 8 : 0, bytes = column->extent.bytes;
    if (bytes > r->size || head > r->size)
        return dray__fail(error, DRAY_EFORMAT, "column %s: its bytes are missing", column->name);
    const void *offsets = dray__get_bytes(r, head), *values = dray__get_bytes(r, bytes);
    if (r->failed)
        return dray__fail(error, DRAY_EFORMAT, "column %s: its bytes are missing", column->name);
    if (placer->store)
        return place_object(placer, column, offsets, head, values, bytes, error);
    uint64_t room = aligned(head) + aligned(bytes);
    if (!placer->chunk.base || room > placer->chunk.size - placer->chunk.used) {
        int rc = new_chunk(placer, room, error);
        if (rc)
            return rc;
    }
    uint64_t at = placer->chunk.used;
    column->extent.chunk = placer->chunk.id;
    column->extent.offsets = head ? at : 0;
    column->extent.values = at + aligned(head);
    if (head)
        memcpy(placer->chunk.base + at, offsets, head);
    if (bytes)
        memcpy(placer->chunk.base + column->extent.values, values, bytes);
    placer->chunk.used += room;
    return DRAY_OK;
}

dray__new_column *dray__record_columns(dray__reader *r, dray__arena *arena, uint32_t *count)
{
    dray__new_column *columns =
        dray__get_array(r, arena, 12 + DRAY__SPEC_WIRE, sizeof *columns, count);
    for (uint32_t i = 0; i < *count && !r->failed; i++) {
        columns[i] = (dray__new_column){.name = dray__get_text(r, arena)};
        columns[i].spec = dray__get_spec(r);
        columns[i].extent.bytes = dray__get_u64(r);
    }
    return columns;
}
