/* The shared memory that a queue may take, and the part that it holds. Its capacity counts a
 * chunk as a whole as long as some part of it is needed.
 *
 * Chunks that are free again are spare. Their producer gets one back when it asks for memory. When
 * the memory is needed otherwise, they are dropped. An insert asks for memory before it writes
 * (ROOM), and takes the promised memory chunk by chunk (CHUNK). A commit takes memory without
 * asking, because work that frees memory is never blocked. */
#include "base/error.h"
#include "queue/table/table.h"

#include <stdio.h>

#define LIMIT_MIN (UINT64_C(1) << 20) /* for smaller capacities only values count */
#define UNASKED (UINT64_C(64) << 10)  /* the least that a commit gets at once */
#define PATIENCE 64u                  /* requests for memory after which a spare chunk is dropped */

static uint64_t limit(const dray__table *table)
{
    uint64_t bytes = table->settings.capacity_bytes;
    return bytes > LIMIT_MIN ? bytes : LIMIT_MIN;
}

/* Returns the bytes of chunks that are in use or promised. */
static uint64_t held(const dray__table *table)
{
    return table->chunk_bytes - table->spare_bytes + table->promised;
}

/* ---- spare chunks --------------------------------------------------------------------------- */

void dray__chunk_set_spare(dray__table *table, dray__chunk *chunk)
{
    chunk->spare = true;
    chunk->next = NULL;
    chunk->spare_since = table->asked;
    *chunk->owner->recycled_tail = chunk;
    chunk->owner->recycled_tail = &chunk->next;
    table->spare_bytes += chunk->size;
    table->freed = true;
}

/* Takes the chunk out of its owner's list. */
static dray__chunk *take_spare(dray__table *table, dray__client *owner, dray__chunk **at)
{
    dray__chunk *chunk = *at;
    *at = chunk->next;
    if (owner->recycled_tail == &chunk->next)
        owner->recycled_tail = at;
    chunk->spare = false;
    table->spare_bytes -= chunk->size;
    return chunk;
}

dray__chunk *dray__chunk_take_spare(dray__table *table, dray__client *client)
{
    return client->recycled ? take_spare(table, client, &client->recycled) : NULL;
}

/* Drops spare chunks, the client's own first, until `bytes` more fit the limit. */
static void make_room(dray__table *table, dray__client *client, uint64_t bytes)
{
    dray__client *next = table->clients;
    while (table->spare_bytes && table->chunk_bytes + bytes > limit(table)) {
        dray__chunk *chunk = dray__chunk_take_spare(table, client);
        if (chunk) {
            dray__chunk_forget(table, chunk);
            continue;
        }
        client = next;
        if (!client)
            return;
        next = client->next;
    }
}

/* Returns the smallest of the client's spare chunks that is large enough. Returns NULL when it
 * would take memory promised to others, or is much too large while there is memory for a better
 * one. */
static dray__chunk **find_spare(const dray__table *table, dray__client *client,
                                const dray__chunk_wish *wish, uint64_t promised)
{
    dray__chunk **best = NULL;
    for (dray__chunk **at = &client->recycled; *at; at = &(*at)->next)
        if ((*at)->keeper == wish->keeper && (*at)->size >= wish->least &&
            (!best || (*at)->size < (*best)->size))
            best = at;
    if (!best || held(table) - promised + (*best)->size > limit(table))
        return NULL;
    bool better = (*best)->size > 4 * wish->size && table->chunk_bytes + wish->size <= limit(table);
    return better ? NULL : best;
}

/* ---- asking ---------------------------------------------------------------------------------- */

void dray__promise_end(dray__table *table, dray__client *client)
{
    table->promised -= client->promised;
    table->freed |= client->promised != 0;
    client->promised = 0;
}

/* Returns the memory promised to the client, at most `bytes`. */
static uint64_t promised_of(const dray__client *client, uint64_t bytes)
{
    return bytes < client->promised ? bytes : client->promised;
}

static void use_promise(dray__table *table, dray__client *client, uint64_t bytes)
{
    client->promised -= bytes;
    table->promised -= bytes;
}

static void forget_old(dray__table *table, dray__client *client)
{
    uint64_t patience = PATIENCE + 2 * (uint64_t)table->chunks.count;
    table->asked++;
    while (client->recycled && table->asked - client->recycled->spare_since > patience)
        dray__chunk_forget(table, dray__chunk_take_spare(table, client));
}

int dray__chunk_ask(dray__table *table, dray__client *client, const dray__chunk_wish *wish,
                    uint64_t *given, uint64_t *size, dray_error *error)
{
    uint64_t least = wish->least, bytes = wish->size;
    if (!client->promised && least < UNASKED)
        least = UNASKED;
    uint64_t promised = promised_of(client, least);
    *given = *size = 0;
    forget_old(table, client);
    dray__chunk **spare = find_spare(table, client, wish, promised);
    if (spare) {
        dray__chunk *chunk = take_spare(table, client, spare);
        chunk->closed = false;
        *given = chunk->id;
        use_promise(table, client, promised);
        return DRAY_OK;
    }
    if (bytes > least &&
        (held(table) - promised + bytes > limit(table) || dray__quota_bytes(table, bytes, NULL)))
        bytes = least;
    make_room(table, client, bytes);
    int rc = dray__quota_bytes(table, bytes, error);
    if (rc)
        return dray__fail_prefix(error, rc, "queue %s: ", table->name);
    rc = dray__chunk_add(table, client, wish->keeper, wish->id, wish->key, bytes, error);
    if (!rc) {
        use_promise(table, client, promised);
        *size = bytes;
    }
    return rc;
}

int dray__table_room(dray__table *table, dray__client *client, const dray__new_rows *rows,
                     uint64_t values, uint64_t bytes, dray_error *error)
{
    int rc = rows->rows ? dray__insert_check(table, client, rows, values, error)
                        : dray__name_check(rows->partition, "partition", error);
    if (rc)
        return rc;
    if (bytes > limit(table))
        return dray__fail(error, DRAY_EFULL,
                          "insert into %s: %llu bytes of shared memory can never fit into %llu",
                          rows->partition, (unsigned long long)bytes,
                          (unsigned long long)limit(table));
    dray__promise_end(table, client);
    if (held(table) > limit(table) - bytes)
        return dray__fail(error, DRAY_EAGAIN,
                          "insert into %s: %llu bytes of shared memory are held + %llu > %llu",
                          rows->partition, (unsigned long long)held(table),
                          (unsigned long long)bytes, (unsigned long long)limit(table));
    table->promised += client->promised = bytes;
    client->asked_room = true;
    return DRAY_OK;
}

/* ---- the clients that hold memory ------------------------------------------------------------ */

static uint64_t pinned_bytes(dray__table *table, const dray__client *client,
                             const dray__claim **largest)
{
    uint64_t bytes = 0, most = 0, mark = ++table->marks;
    for (const dray__claim *claim = table->claims; claim; claim = claim->next) {
        uint64_t here = 0;
        for (uint32_t i = 0; claim->client == client && i < claim->pin_count; i++) {
            dray__put *put = claim->pins[i];
            for (uint32_t c = 0; put->mark != mark && c < put->column_count; c++)
                here += put->columns[c].chunk ? put->columns[c].extent.bytes : 0;
            put->mark = mark;
        }
        bytes += here;
        if (claim->client == client && (!*largest || here > most)) {
            *largest = claim;
            most = here;
        }
    }
    return bytes;
}

/* Returns the bytes of a producer's chunks in which nothing is committed. */
static uint64_t idle_bytes(const dray__table *table, const dray__client *client)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < table->chunks.capacity; i++) {
        const dray__chunk *chunk =
            table->chunks.entries[i].key ? table->chunks.entries[i].value : NULL;
        if (chunk && chunk->owner == client && !chunk->live && !chunk->spare)
            bytes += chunk->size;
    }
    return bytes;
}

static const dray__partition *largest_partition(const dray__table *table, const char **task)
{
    const dray__partition *found = NULL;
    for (uint32_t i = 0; i < table->partition_count; i++)
        if (!found || table->partitions[i]->live > found->live)
            found = table->partitions[i];
    *task = "a task";
    for (uint32_t t = 0; found && t < table->task_count; t++)
        if (found->tracks[t].settled_count < found->rows)
            *task = table->tasks[t].name;
    return found;
}

void dray__describe_holder(dray__table *table, char *out, size_t size)
{
    uint64_t most = 0;
    const char *task;
    const dray__partition *p = largest_partition(table, &task);
    out[0] = 0;
    if (p && p->live) {
        most = p->live;
        snprintf(out, size, "partition %s holds %llu bytes, which task %s has not committed",
                 p->name, (unsigned long long)p->live, task);
    }
    for (const dray__client *client = table->clients; client; client = client->next) {
        const dray__claim *claim = NULL;
        uint64_t pinned = pinned_bytes(table, client, &claim), idle = idle_bytes(table, client);
        if (claim && pinned && pinned >= most) {
            most = pinned;
            snprintf(out, size,
                     "%s holds %llu bytes: batches that it has not freed, the largest of %u rows "
                     "%s%s",
                     client->name, (unsigned long long)pinned, claim->count,
                     claim->read ? "with keys" : "of task ",
                     claim->read ? "" : table->tasks[claim->task].name);
        }
        if (idle > most) {
            most = idle;
            snprintf(out, size, "%s holds %llu bytes of chunks that it has not filled",
                     client->name, (unsigned long long)idle);
        }
    }
}
