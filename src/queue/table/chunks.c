/* The memory of committed bytes. Producers add chunks before they put into them. Objects of a store
 * are added by the put that names them. */
#include "queue/table/table_inside.h"

#include "base/error.h"

#include <stdlib.h>

#define CHUNKS_MAX 65536u
#define CHUNK_BYTES_MAX (UINT64_C(1) << 40) /* sums of bytes cannot overflow */

int dray__chunk_add(dray__table *table, dray__client *client, uint32_t keeper, uint64_t id,
                    uint64_t key, uint64_t size, dray_error *error)
{
    if (!id || !size || size > CHUNK_BYTES_MAX)
        return dray__fail(error, DRAY_EINVALID, "chunk %016llx of %llu bytes: impossible",
                          (unsigned long long)id, (unsigned long long)size);
    if (dray__idmap_get(&table->chunks, id))
        return dray__fail(error, DRAY_EEXIST, "chunk %016llx is registered already",
                          (unsigned long long)id);
    if (table->chunks.count >= CHUNKS_MAX)
        return dray__fail(error, DRAY_EFULL, "queue %s: more than %u chunks", table->name,
                          CHUNKS_MAX);
    dray__chunk *chunk = malloc(sizeof *chunk);
    if (!chunk || !dray__idmap_set(&table->chunks, id, chunk)) {
        free(chunk);
        return dray__nomem(error);
    }
    *chunk = (dray__chunk){.id = id, .key = key, .size = size, .keeper = keeper, .owner = client};
    table->chunk_bytes += size;
    return DRAY_OK;
}

void dray__chunk_forget(dray__table *table, dray__chunk *chunk)
{
    table->freed = true;
    dray__idmap_remove(&table->chunks, chunk->id);
    table->chunk_bytes -= chunk->size;
    table->bytes->forget(table, chunk);
    if (table->drop)
        table->drop(table->user, chunk->keeper, chunk->id, chunk->key);
    free(chunk);
}

/* The memory of a lost chunk is gone. Its record stays until the producer, which may still name it,
 * closes it. */
static void take_no_memory(dray__table *table, dray__chunk *chunk)
{
    if (!chunk->lost)
        return;
    table->freed |= chunk->size != 0;
    table->chunk_bytes -= chunk->size;
    chunk->size = 0;
}

void dray__chunk_check_free(dray__table *table, dray__chunk *chunk)
{
    if (chunk->live || chunk->spare)
        return;
    if (chunk->owner && !chunk->closed) {
        take_no_memory(table, chunk);
        return;
    }
    if (!chunk->owner || chunk->retired || chunk->lost) {
        dray__chunk_forget(table, chunk);
        return;
    }
    dray__chunk_set_spare(table, chunk);
}

static int own_chunk(const dray__table *table, const dray__client *client, uint64_t id,
                     dray__chunk **out, dray_error *error)
{
    dray__chunk *chunk = dray__idmap_get(&table->chunks, id);
    if (!chunk || chunk->owner != client)
        return dray__fail(error, DRAY_EINVALID, "chunk %016llx is none of this producer's",
                          (unsigned long long)id);
    *out = chunk;
    return DRAY_OK;
}

int dray__chunk_close(dray__table *table, dray__client *client, uint64_t id, dray_error *error)
{
    dray__chunk *chunk = dray__idmap_get(&table->chunks, id);
    if (!chunk) /* reported twice, and dropped after the first time */
        return DRAY_OK;
    int rc = own_chunk(table, client, id, &chunk, error);
    if (rc)
        return rc;
    chunk->closed = true;
    dray__chunk_check_free(table, chunk);
    return DRAY_OK;
}

int dray__chunk_discard(dray__table *table, dray__client *client, uint64_t id, dray_error *error)
{
    dray__chunk *chunk = NULL;
    int rc = own_chunk(table, client, id, &chunk, error);
    if (rc)
        return rc;
    if (chunk->live || chunk->spare)
        return dray__fail(error, DRAY_EBUSY, "chunk %016llx holds committed values",
                          (unsigned long long)id);
    dray__chunk_forget(table, chunk);
    return DRAY_OK;
}

void dray__chunks_orphan(dray__table *table, dray__client *client)
{
    for (dray__chunk *chunk; (chunk = dray__chunk_take_spare(table, client)) != NULL;)
        dray__chunk_forget(table, chunk);
    for (size_t i = 0; i < table->chunks.capacity; i++) {
        dray__chunk *chunk = table->chunks.entries[i].key ? table->chunks.entries[i].value : NULL;
        if (!chunk || chunk->owner != client)
            continue;
        chunk->owner = NULL;
        if (chunk->live)
            continue;
        dray__chunk_forget(table, chunk);
        i--; /* an entry that was probed past this one has moved, and may be here now */
    }
}

void dray__chunks_lose(dray__table *table, uint32_t keeper)
{
    for (dray__client *client = table->clients; client; client = client->next) {
        dray__chunk *spare = client->recycled, *next; /* those of other keepers stay spare */
        while (dray__chunk_take_spare(table, client))
            ;
        for (dray__chunk *chunk = spare; chunk; chunk = next) {
            next = chunk->next;
            chunk->lost |= chunk->keeper == keeper;
            dray__chunk_check_free(table, chunk);
        }
    }
    for (size_t i = 0; i < table->chunks.capacity; i++) {
        dray__chunk *chunk = table->chunks.entries[i].key ? table->chunks.entries[i].value : NULL;
        if (!chunk || chunk->keeper != keeper || chunk->lost)
            continue;
        chunk->lost = true;
        if (chunk->live)
            continue;
        take_no_memory(table, chunk);
        if (!chunk->closed)
            continue;
        dray__chunk_forget(table, chunk);
        i--; /* an entry that was probed past this one has moved, and may be here now */
    }
}

/* ---- checks of the chunks that a put names --------------------------------------------------- */

static int check_chunk(const dray__table *table, const dray__client *client,
                       const dray__new_column *column, uint64_t *size, dray_error *error)
{
    dray__chunk *chunk = NULL;
    int rc = own_chunk(table, client, column->extent.chunk, &chunk, error);
    if (rc)
        return dray__fail_prefix(error, rc, "column %s: ", column->name);
    if (chunk->lost)
        return dray__fail(error, DRAY_EGONE,
                          "column %s: the keeper of this host ended, and its values with it",
                          column->name);
    if (chunk->closed)
        return dray__fail(error, DRAY_EINVALID, "column %s: chunk %016llx is closed", column->name,
                          (unsigned long long)chunk->id);
    *size = chunk->size;
    return DRAY_OK;
}

/* Checks that the live bytes of a chunk do not exceed its size, because values do not overlap. */
static int check_room(const dray__table *table, const dray__new_column *columns, uint32_t count,
                      uint32_t at, uint32_t items, dray_error *error)
{
    uint64_t id = columns[at].extent.chunk;
    const dray__chunk *chunk = dray__idmap_get(&table->chunks, id);
    uint64_t bytes = chunk->live_bytes;
    for (uint32_t i = 0; i < count; i++)
        if (columns[i].extent.chunk == id)
            bytes += dray__extent_bytes(&columns[i].extent, &columns[i].spec, items);
    if (bytes <= chunk->size)
        return DRAY_OK;
    return dray__fail(error, DRAY_EINVALID, "column %s: %llu bytes in a chunk of %llu",
                      columns[at].name, (unsigned long long)bytes, (unsigned long long)chunk->size);
}

static int take_chunk(dray__table *table, const dray__extent *extent, dray__chunk **out,
                      dray_error *error)
{
    *out = dray__idmap_get(&table->chunks, extent->chunk);
    return *out ? DRAY_OK
                : dray__fail(error, DRAY_EGONE, "chunk %016llx is gone",
                             (unsigned long long)extent->chunk);
}

/* Nothing to undo: `take` does not change a chunk. */
static void discard_nothing(dray__table *table, dray__chunk *chunk)
{
    (void)table, (void)chunk;
}

static void forget_chunk(dray__table *table, const dray__chunk *chunk)
{
    table->drops[table->drop_count++ % DRAY__DROPS] = chunk->id;
}

const dray__bytes_kind dray__bytes_chunks = {.check = check_chunk,
                                             .check_beside = check_room,
                                             .take = take_chunk,
                                             .discard = discard_nothing,
                                             .forget = forget_chunk};

/* ---- of objects ------------------------------------------------------------------------------ */

/* Checks that the object is new, and this client's. */
static int check_object(const dray__table *table, const dray__client *client,
                        const dray__new_column *column, uint64_t *size, dray_error *error)
{
    const dray__extent *e = &column->extent;
    if (e->chunk >> 32 != client->id || !(uint32_t)e->chunk)
        return dray__fail(error, DRAY_EINVALID, "column %s: object %016llx is none of client %u",
                          column->name, (unsigned long long)e->chunk, client->id);
    if (dray__idmap_get(&table->chunks, e->chunk))
        return dray__fail(error, DRAY_EEXIST, "column %s: object %016llx is committed already",
                          column->name, (unsigned long long)e->chunk);
    if (__builtin_add_overflow(e->values, e->bytes, size) || *size > DRAY__OBJECT_MAX)
        return dray__fail(error, DRAY_EINVALID, "column %s: an object of impossible size",
                          column->name);
    return DRAY_OK;
}

/* Checks that no other column of the put is in the same object. */
static int check_alone(const dray__table *table, const dray__new_column *columns, uint32_t count,
                       uint32_t at, uint32_t items, dray_error *error)
{
    (void)table, (void)count, (void)items;
    for (uint32_t i = 0; i < at; i++)
        if (columns[i].extent.chunk == columns[at].extent.chunk)
            return dray__fail(error, DRAY_EINVALID, "columns %s and %s are one object",
                              columns[i].name, columns[at].name);
    return DRAY_OK;
}

/* Adds an object of the put. It is dropped with its column. */
static int add_object(dray__table *table, const dray__extent *extent, dray__chunk **out,
                      dray_error *error)
{
    dray__chunk *chunk = malloc(sizeof *chunk);
    if (!chunk || !dray__idmap_set(&table->chunks, extent->chunk, chunk)) {
        free(chunk);
        return dray__nomem(error);
    }
    uint64_t size = extent->values + extent->bytes;
    *chunk = (dray__chunk){.id = extent->chunk, .key = size, .size = size};
    table->chunk_bytes += size;
    *out = chunk;
    return DRAY_OK;
}

/* Removes an object that was not committed. Its writer drops it. */
static void discard_object(dray__table *table, dray__chunk *object)
{
    table->chunk_bytes -= object->size;
    free(dray__idmap_remove(&table->chunks, object->id));
}

static void forget_object(dray__table *table, const dray__chunk *object)
{
    (void)table, (void)object; /* no client maps it */
}

const dray__bytes_kind dray__bytes_objects = {.check = check_object,
                                              .check_beside = check_alone,
                                              .take = add_object,
                                              .discard = discard_object,
                                              .forget = forget_object};
