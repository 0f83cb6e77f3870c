/* Writing a table's changes down.
 *
 * Bodies of records, after base/wire.h:
 *   INSERT  u64 identity, u32 ticket (of the client's request), str partition, u32 first slot,
 *           u32 rows, u32 group size, u8 per group, u64 row bytes, u64 refill, columns, tags, bytes
 *   SEAL    u32 rows                CLEAR, END, START  (nothing)
 *   COMMIT  u64 identity, u32 ticket, u32 task, u64 commit number, u32 n, n * {u32 slot (NONE: not
 *           its), u32 row's generation}, columns, tags, u32 n, n * u32 rows that stay open, bytes
 *   LOSS    u32 slot, u32 row's generation, u32 task, u32 failures, u32 cause, str reason,
 *           u64 demand (0: none)
 *   DECLINE u64 demand              COVER  u32 epoch, u64 number
 *   RESUME  u32 epoch, u64 number, u64 version
 *   ADMIT   u32 rows a batch, u32 task, u32 staleness, u32 concurrency, u64 version, u64 accepted
 *   STATE   u32 generations, u32 epoch, u64 commit number, u64 resumed to, u8 ended, as ADMIT,
 *           u32 n, n * {str column, spec}, u32 n, n * {str cleared partition, u64 finished tasks},
 *           u64 space
 *   SPACE   u64 space (of a store's objects)
 * columns: u32 n, n * {str name, spec, u64 bytes of values}; bytes: of each column its offsets, if
 * it is ragged, and its values. tags: u32 n keys, n * str, u32 n, n * {u32 item, u32 key, f64}.
 * A record of a partition has the partition's generation as its owner. */
#include "queue/ledger.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#define FETCH_PATIENCE (10 * DRAY__SECOND) /* then it is tried again */

enum { COMPACT_BYTES = 16 << 20 }; /* dead bytes that are not worth it */

/* ---- counting -------------------------------------------------------------------------------- */

void dray__ledger_count(dray__ledger *ledger, uint32_t owner, uint64_t bytes)
{
    uintptr_t held = (uintptr_t)dray__idmap_get(&ledger->sizes, owner);
    if (owner && dray__idmap_set(&ledger->sizes, owner, (void *)(held + bytes)))
        ledger->live += bytes;
    else
        ledger->dead += bytes; /* of nobody, or without memory to know better */
}

void dray__ledger_uncount(dray__ledger *ledger, uint32_t owner)
{
    uintptr_t held = (uintptr_t)dray__idmap_remove(&ledger->sizes, owner);
    ledger->live -= held;
    ledger->dead += held;
}

/* ---- what clients may ask again -------------------------------------------------------------- */

static uint64_t told_key(uint64_t identity, uint32_t ticket)
{
    uint64_t pair[2] = {identity, ticket};
    return dray__hash(pair, sizeof pair) | 1;
}

const dray__told *dray__ledger_told(const dray__ledger *ledger, uint64_t identity, uint32_t ticket)
{
    return ledger ? dray__idmap_get(&ledger->told, told_key(identity, ticket)) : NULL;
}

int dray__ledger_remember(dray__ledger *ledger, uint64_t identity, const dray__told *told,
                          dray_error *error)
{
    uint64_t key = told_key(identity, told->ticket);
    if (!identity || !told->ticket || dray__idmap_get(&ledger->told, key))
        return DRAY_OK;
    dray__told *copy = malloc(sizeof *copy);
    if (!copy || !dray__idmap_set(&ledger->told, key, copy)) {
        free(copy);
        return dray__nomem(error);
    }
    *copy = *told;
    return DRAY_OK;
}

void dray__ledger_left(dray__ledger *ledger, const dray__client *client)
{
    if (!ledger || !client->told.ticket ||
        dray__ledger_told(ledger, client->identity, client->told.ticket) ||
        dray__ledger_remember(ledger, client->identity, &client->told, NULL))
        return;
    uint64_t *left = &ledger->left[ledger->left_count++ % DRAY__LEFT];
    if (*left)
        free(dray__idmap_remove(&ledger->told, *left));
    *left = told_key(client->identity, client->told.ticket);
}

uint32_t dray__ledger_number(dray__table *table)
{
    uint32_t forced = table->ledger ? table->ledger->number : 0;
    uint32_t number = forced ? forced : table->generations + 1;
    if (number > table->generations)
        table->generations = number;
    return number;
}

/* ---- records --------------------------------------------------------------------------------- */

bool dray__ledger_keeps(const dray__ledger *ledger)
{
    return ledger && !ledger->replaying;
}

/* The table has changed and nobody would know it after a restart: the queue takes no more. */
static void lose(dray__ledger *ledger)
{
    ledger->lost = true;
    ledger->failed =
        dray__fail(&ledger->why, DRAY_ENOMEM,
                   "queue %s: there was no memory to write a change down; what its journal %s "
                   "holds is right up to there",
                   ledger->table->name, ledger->path);
    dray__log(DRAY_LOG_ERROR, "%s", ledger->why.message);
}

static dray__entry *entry_new(dray__ledger *ledger, uint16_t kind, uint32_t owner)
{
    if (!dray__ledger_keeps(ledger) || ledger->lost)
        return NULL;
    dray__entry *entry = calloc(1, sizeof *entry);
    if (entry) {
        entry->kind = kind;
        entry->owner = owner;
    } else {
        lose(ledger);
    }
    return entry;
}

/* There is no entry that holds the put until it is written. */
static void forget(dray__ledger *ledger, dray__put *put)
{
    if (put && dray__ledger_keeps(ledger))
        dray__put_unpin(ledger->table, put, false);
}

static void add(dray__ledger *ledger, dray__entry *entry)
{
    uint64_t bytes = 56 + entry->body.size;
    if (entry->body.failed) {
        lose(ledger);
        forget(ledger, entry->user);
        dray__entry_free(entry);
        return;
    }
    for (uint32_t i = 0; i < entry->piece_count; i++)
        bytes += entry->pieces[i].bytes;
    dray__ledger_count(ledger, entry->owner, bytes);
    dray__journal_add(ledger->journal, entry);
}

static void put_columns(const dray__ledger *ledger, dray__entry *entry,
                        const dray__new_column *columns, uint32_t count, uint32_t items)
{
    dray__writer *w = &entry->body;
    dray__put_u32(w, count);
    entry->pieces = calloc(2 * (size_t)count + 1, sizeof *entry->pieces);
    w->failed |= !entry->pieces;
    for (uint32_t i = 0; i < count && entry->pieces; i++) {
        const dray__extent *e = &columns[i].extent;
        const dray__chunk *chunk = dray__idmap_get(&ledger->table->chunks, e->chunk);
        uint32_t home = chunk ? chunk->home : 0;
        dray__put_string(w, columns[i].name);
        dray__put_spec(w, &columns[i].spec);
        dray__put_u64(w, e->bytes);
        if (columns[i].spec.ragged)
            entry->pieces[entry->piece_count++] =
                (dray__piece){e->chunk, e->offsets, ((uint64_t)items + 1) * 8, home};
        if (e->bytes)
            entry->pieces[entry->piece_count++] =
                (dray__piece){e->chunk, e->values, e->bytes, home};
    }
}

static void put_tags(dray__writer *w, const dray__new_tag *tags, uint32_t count)
{
    size_t at = w->size;
    uint32_t keys = 0, *of = calloc(count ? count : 1, sizeof *of);
    const char **known = calloc(count ? count : 1, sizeof *known);
    w->failed |= !of || !known;
    dray__put_u32(w, 0);
    for (uint32_t i = 0; i < count && !w->failed; i++) {
        while (of[i] < keys && strcmp(known[of[i]], tags[i].key) != 0)
            of[i]++;
        if (of[i] < keys)
            continue;
        known[keys++] = tags[i].key;
        dray__put_string(w, tags[i].key);
    }
    dray__put_u32_at(w, at, keys);
    dray__put_u32(w, count);
    for (uint32_t i = 0; i < count && !w->failed; i++) {
        dray__put_u32(w, tags[i].item);
        dray__put_u32(w, of[i]);
        dray__put_f64(w, tags[i].value);
    }
    free(of);
    free(known);
}

void dray__ledger_insert(dray__ledger *ledger, dray__client *client, const dray__new_rows *rows,
                         const dray__partition *p, uint32_t first, dray__put *put)
{
    dray__entry *entry = entry_new(ledger, DRAY__RECORD_INSERT, p->generation);
    if (put && ledger && ledger->replaying)
        put->record = ledger->record;
    if (!entry) {
        forget(ledger, put);
        return;
    }
    client->told = (dray__told){rows->ticket, first, p->generation};
    dray__writer *w = &entry->body;
    uint32_t group = rows->group_size ? rows->group_size : 1;
    uint32_t items = rows->per_group ? (rows->refill ? 1 : rows->rows / group) : rows->rows;
    dray__put_u64(w, client->identity);
    dray__put_u32(w, rows->ticket);
    dray__put_string(w, rows->partition);
    dray__put_u32(w, first);
    dray__put_u32(w, rows->rows);
    dray__put_u32(w, rows->group_size);
    dray__put_u8(w, rows->per_group);
    dray__put_u64(w, rows->row_bytes);
    dray__put_u64(w, rows->refill);
    put_columns(ledger, entry, rows->columns, rows->column_count, items);
    put_tags(w, rows->tags, rows->tag_count);
    entry->user = put;
    add(ledger, entry);
    if (put)
        put->record = dray__journal_added(ledger->journal);
}

void dray__ledger_seal(dray__ledger *ledger, const dray__partition *p)
{
    dray__entry *entry = entry_new(ledger, DRAY__RECORD_SEAL, p->generation);
    if (!entry)
        return;
    dray__put_u32(&entry->body, p->rows);
    add(ledger, entry);
}

void dray__ledger_commit(dray__ledger *ledger, const dray__claim *claim, const dray__outputs *o,
                         dray__put *put)
{
    dray__entry *entry = entry_new(ledger, DRAY__RECORD_COMMIT, claim->generation);
    if (put && ledger && ledger->replaying)
        put->record = ledger->record;
    if (!entry) {
        forget(ledger, put);
        return;
    }
    claim->client->told = (dray__told){(uint32_t)claim->id, 0, claim->generation};
    dray__writer *w = &entry->body;
    dray__put_u64(w, claim->client->identity);
    dray__put_u32(w, (uint32_t)claim->id); /* the ticket */
    dray__put_u32(w, claim->task);
    dray__put_u64(w, ledger->table->commit_seq);
    dray__put_u32(w, claim->count);
    for (uint32_t i = 0; i < claim->count; i++) {
        uint32_t slot = claim->slots[i];
        dray__put_u32(w, slot);
        dray__put_u32(w, slot == DRAY__NONE ? 0 : claim->partition->row_generations[slot]);
    }
    put_columns(ledger, entry, o->columns, o->column_count, claim->count);
    put_tags(w, o->tags, o->tag_count);
    dray__put_u32(w, o->open_count);
    for (uint32_t i = 0; i < o->open_count; i++)
        dray__put_u32(w, o->open[i]);
    entry->user = put;
    add(ledger, entry);
    if (put)
        put->record = dray__journal_added(ledger->journal);
}

void dray__ledger_loss(dray__ledger *ledger, const dray__partition *p, const dray__death *death,
                       uint64_t demand)
{
    dray__entry *entry = entry_new(ledger, DRAY__RECORD_LOSS, p->generation);
    if (!entry)
        return;
    dray__writer *w = &entry->body;
    dray__put_u32(w, death->slot);
    dray__put_u32(w, death->generation);
    dray__put_u32(w, death->task);
    dray__put_u32(w, death->failures);
    dray__put_u32(w, (uint32_t)death->cause);
    dray__put_string(w, death->reason);
    dray__put_u64(w, demand);
    add(ledger, entry);
}

void dray__ledger_decline(dray__ledger *ledger, const dray__partition *p, uint64_t demand)
{
    dray__entry *entry = entry_new(ledger, DRAY__RECORD_DECLINE, p->generation);
    if (!entry)
        return;
    dray__put_u64(&entry->body, demand);
    add(ledger, entry);
}

void dray__ledger_clear(dray__ledger *ledger, const dray__partition *p)
{
    dray__entry *entry = entry_new(ledger, DRAY__RECORD_CLEAR, p->generation);
    if (entry)
        add(ledger, entry);
    if (ledger)
        dray__ledger_uncount(ledger, p->generation);
}

void dray__ledger_end(dray__ledger *ledger)
{
    dray__entry *entry = entry_new(ledger, DRAY__RECORD_END, 0);
    if (entry)
        add(ledger, entry);
}

void dray__ledger_cover(dray__ledger *ledger, uint32_t epoch, uint64_t seq)
{
    dray__entry *entry = entry_new(ledger, DRAY__RECORD_COVER, 0);
    if (!entry)
        return;
    dray__put_u32(&entry->body, epoch);
    dray__put_u64(&entry->body, seq);
    add(ledger, entry);
}

void dray__ledger_resume(dray__ledger *ledger, uint32_t epoch, uint64_t seq, uint64_t version)
{
    dray__entry *entry = entry_new(ledger, DRAY__RECORD_RESUME, 0);
    if (!entry)
        return;
    dray__put_u32(&entry->body, epoch);
    dray__put_u64(&entry->body, seq);
    dray__put_u64(&entry->body, version);
    add(ledger, entry);
}

static void put_admission(dray__writer *w, const dray__admission *a)
{
    dray__put_u32(w, a->batch);
    dray__put_u32(w, a->task);
    dray__put_u32(w, a->staleness);
    dray__put_u32(w, a->concurrency);
    dray__put_u64(w, a->version);
    dray__put_u64(w, a->accepted);
}

void dray__ledger_admit(dray__ledger *ledger)
{
    dray__entry *entry = entry_new(ledger, DRAY__RECORD_ADMIT, 0);
    if (!entry)
        return;
    put_admission(&entry->body, &ledger->table->admission);
    add(ledger, entry);
}

/* ---- compaction ------------------------------------------------------------------------------ */

static void put_state(dray__writer *w, const dray__table *table)
{
    dray__put_u32(w, table->generations);
    dray__put_u32(w, table->epoch);
    dray__put_u64(w, table->commit_seq);
    dray__put_u64(w, table->resumed_seq);
    dray__put_u8(w, table->ended);
    put_admission(w, &table->admission);
    dray__put_u32(w, table->defined_count);
    for (uint32_t i = 0; i < table->defined_count; i++) {
        dray__put_string(w, table->columns[table->defined[i]].name);
        dray__put_spec(w, &table->columns[table->defined[i]].spec);
    }
    size_t at = w->size;
    uint32_t count = 0;
    dray__put_u32(w, 0);
    for (uint32_t i = 0; i < DRAY__GRAVES; i++) { /* oldest first */
        const dray__grave *grave = &table->graves[(table->grave_at + i) % DRAY__GRAVES];
        if (!grave->name)
            continue;
        dray__put_string(w, grave->name);
        dray__put_u64(w, grave->finished);
        count++;
    }
    dray__put_u32_at(w, at, count);
    dray__put_u64(w, table->space);
}

static dray__entry *state_entry(dray__ledger *ledger, dray_error *error)
{
    const dray__table *table = ledger->table;
    dray__entry *entry = calloc(1, sizeof *entry);
    uint32_t *keep = calloc(table->partition_count + 1u, sizeof *keep);
    if (!entry || !keep) {
        free(entry);
        free(keep);
        dray__nomem(error);
        return NULL;
    }
    entry->kind = DRAY__RECORD_STATE;
    entry->compact = true;
    entry->keep = keep;
    for (uint32_t i = 0; i < table->partition_count; i++) /* ascending: in order of creation */
        keep[entry->keep_count++] = table->partitions[i]->generation;
    put_state(&entry->body, table);
    return entry;
}

static void compact(dray__ledger *ledger)
{
    if (ledger->compacting || ledger->failed || ledger->dead < COMPACT_BYTES ||
        ledger->dead < ledger->live)
        return;
    dray__entry *entry = state_entry(ledger, NULL);
    if (!entry)
        return;
    ledger->compacting = true;
    ledger->dead = 0;
    dray__journal_add(ledger->journal, entry);
}

int dray__ledger_copy(dray__ledger *ledger, dray__copy *copy, dray_error *error)
{
    int rc = ledger->copying
                 ? dray__fail(error, DRAY_EBUSY, "queue %s: a checkpoint is being written already",
                              ledger->table->name)
                 : DRAY_OK;
    dray__entry *entry = rc ? NULL : state_entry(ledger, error);
    if (!entry) {
        dray__copy_free(copy);
        return rc ? rc : DRAY_ENOMEM;
    }
    entry->copy = copy;
    ledger->copying = true;
    dray__journal_add(ledger->journal, entry);
    return DRAY_OK;
}

/* ---- the journal ----------------------------------------------------------------------------- */

int dray__ledger_fd(const dray__ledger *ledger)
{
    return dray__journal_fd(ledger->journal);
}

static void mark_lost(const dray__put *put)
{
    for (uint32_t i = 0; i < put->column_count; i++)
        if (put->columns[i].chunk)
            put->columns[i].chunk->lost = true;
}

/* The put's bytes are written: it may be freed. */
static void finish(dray__ledger *ledger, dray__entry *entry)
{
    for (dray__entry *next; entry; entry = next) {
        next = entry->next;
        if (entry->each) {
            dray__restore_done(ledger, entry);
            entry->user = NULL;
        }
        if (entry->missing && ledger->gone)
            ledger->gone(ledger->user, entry->seq);
        if (entry->missing && entry->user)
            mark_lost(entry->user);
        if (entry->user)
            dray__put_unpin(ledger->table, entry->user, false);
        if (entry->compact && !entry->copy)
            ledger->compacting = false;
        if (entry->copy) {
            ledger->copied = entry->error;
            ledger->copying = false;
        }
        dray__entry_free(entry);
    }
}

void dray__ledger_poll(dray__ledger *ledger)
{
    dray_error why;
    int code;
    finish(ledger, dray__journal_done(ledger->journal, &ledger->safe, &code, &why));
    if (!ledger->lost) {
        ledger->failed = code;
        ledger->why = why;
    }
    compact(ledger);
}

int dray__ledger_check(const dray__ledger *ledger, dray_error *error)
{
    if (!ledger || !ledger->failed)
        return DRAY_OK;
    if (error)
        *error = ledger->why;
    return ledger->failed;
}

uint64_t dray__ledger_added(const dray__ledger *ledger)
{
    return ledger ? dray__journal_added(ledger->journal) : 0;
}

uint64_t dray__ledger_pending(const dray__ledger *ledger)
{
    if (!ledger || !ledger->sync || dray__journal_added(ledger->journal) <= ledger->safe)
        return 0;
    return dray__journal_added(ledger->journal);
}

/* ---- beginning and end ----------------------------------------------------------------------- */

static int find_home(void *user, uint32_t home, char *endpoint, size_t size, dray_error *error)
{
    return dray__homes_endpoint(user, home, endpoint, size, error);
}

/* From a store, or another host. */
static int fetch_far(dray__ledger *ledger, const dray__piece *piece, void *out, dray_error *error)
{
    dray__range range = {.object = piece->source,
                         .offset = piece->offset,
                         .bytes = piece->bytes,
                         .at = out,
                         .home = piece->home};
    int64_t deadline = dray__deadline(FETCH_PATIENCE);
    int rc = DRAY_OK;
    if (!ledger->store && !ledger->distant)
        rc = dray__distant_new(&ledger->homes->keys, find_home, ledger->homes, &ledger->distant,
                               error);
    if (!rc && ledger->store)
        rc = ledger->store->kind->get(ledger->store, &range, 1, deadline, error);
    else if (!rc)
        rc = dray__distant_get(ledger->distant, &range, 1, deadline, error);
    if (!rc && range.lost)
        rc = dray__fail(error, DRAY_EGONE, "bytes of %016llx are gone",
                        (unsigned long long)piece->source);
    return rc;
}

static int fetch(void *user, const dray__piece *piece, void *out, dray_error *error)
{
    dray__ledger *ledger = user;
    dray__mapping *mapping = NULL;
    if (ledger->store || (piece->home && ledger->homes))
        return fetch_far(ledger, piece, out, error);
    int rc = dray__mapping_get(&ledger->link, piece->source, &mapping, error);
    if (rc)
        return rc;
    if (piece->offset > mapping->size || piece->bytes > mapping->size - piece->offset)
        rc = dray__fail(error, DRAY_EFORMAT, "chunk %016llx is shorter than was said",
                        (unsigned long long)piece->source);
    else
        memcpy(out, mapping->base + piece->offset, piece->bytes);
    dray__mapping_put(mapping);
    return rc;
}

static void ledger_free(dray__ledger *ledger)
{
    dray__keeper_link_free(&ledger->link);
    dray__distant_free(ledger->distant);
    if (ledger->store)
        ledger->store->kind->close(ledger->store);
    if (ledger->own)
        ledger->own->kind->close(ledger->own);
    for (size_t i = 0; i < ledger->told.capacity; i++)
        if (ledger->told.entries[i].key)
            free(ledger->told.entries[i].value);
    dray__idmap_free(&ledger->told);
    dray__idmap_free(&ledger->sizes);
    free(ledger->path);
    free(ledger);
}

void dray__ledger_reach(dray__ledger *ledger, dray__homes *homes)
{
    ledger->homes = homes;
}

/* While a journal is read: nothing else drops what is freed meanwhile. */
static void drop_now(void *user, uint32_t home, uint64_t chunk, uint64_t key)
{
    const dray__ledger *ledger = user;
    dray__object object = {.id = chunk, .size = key};
    (void)home;
    if (ledger->own->kind->drop(ledger->own, &object, 1, dray__deadline(FETCH_PATIENCE), NULL))
        dray__log(DRAY_LOG_WARN, "queue %s: object %016llx is left in its store",
                  ledger->table->name, (unsigned long long)chunk);
}

/* Of a queue whose bytes a store holds, in a space that is new. */
static int open_store(dray__ledger *ledger, dray_error *error)
{
    dray__table *table = ledger->table;
    const dray__backend_kind *kind = NULL;
    int rc = dray__backend_find(table->settings.backend, &kind, error);
    if (rc || !kind)
        return rc;
    if (!table->space &&
        getrandom(&table->space, sizeof table->space, 0) != (ssize_t)sizeof table->space)
        return dray__fail(error, DRAY_ESYS, "getrandom");
    rc = kind->open(table->settings.backend_address, table->space, &ledger->store, error);
    if (!rc)
        rc = kind->open(table->settings.backend_address, table->space, &ledger->own, error);
    if (!rc) {
        table->drop = drop_now;
        table->user = ledger;
    }
    return rc;
}

static void add_space(dray__ledger *ledger)
{
    dray__entry *entry = ledger->store ? entry_new(ledger, DRAY__RECORD_SPACE, 0) : NULL;
    if (!entry)
        return;
    dray__put_u64(&entry->body, ledger->table->space);
    add(ledger, entry);
}

static int ledger_open(dray__table *table, const dray__ledger_options *options, dray_error *error)
{
    dray__ledger *ledger = calloc(1, sizeof *ledger);
    if (!ledger)
        return dray__nomem(error);
    ledger->table = table;
    ledger->sync = options->sync;
    ledger->path = strdup(options->path);
    int rc = ledger->path ? dray__keeper_link_init(&ledger->link, options->keeper_path,
                                                   DRAY__KEEPER_PATIENCE, error)
                          : dray__nomem(error);
    ledger->link.era = options->era;
    if (!rc)
        rc = open_store(ledger, error);
    if (rc)
        ledger_free(ledger);
    else
        table->ledger = ledger;
    return rc;
}

static int start(dray__ledger *ledger, const dray__ledger_options *options, uint64_t end,
                 uint64_t last, dray_error *error)
{
    dray__journal_options o = {.path = ledger->path,
                               .sync = options->sync,
                               .fetch = fetch,
                               .user = ledger,
                               .files = options->files};
    ledger->safe = last;
    return dray__journal_start(&o, end, last, &ledger->journal, error);
}

int dray__ledger_new(dray__table *table, const dray__ledger_options *options, const void *opening,
                     size_t size, dray_error *error)
{
    int rc = ledger_open(table, options, error);
    if (!rc)
        rc = start(table->ledger, options, 0, 0, error);
    dray__entry *entry = rc ? NULL : entry_new(table->ledger, DRAY__RECORD_OPEN, 0);
    if (!entry)
        return rc ? rc : dray__nomem(error);
    dray__put_bytes(&entry->body, opening, size);
    add(table->ledger, entry);
    add_space(table->ledger);
    return DRAY_OK;
}

typedef struct recovery {
    const char *path;
    const dray__ledger_options *options;
    dray__ledger_make make;
    void *user;
    dray__table *table;
    uint64_t records;
} recovery;

static int where(const recovery *r, const dray__journal_record *record, int rc, dray_error *error)
{
    return rc ? dray__fail_prefix(error, rc, "journal %s, record %llu at byte %llu: ", r->path,
                                  (unsigned long long)record->seq, (unsigned long long)record->at)
              : rc;
}

static int take_record(void *user, const dray__journal_record *record, dray_error *error)
{
    recovery *r = user;
    r->records++;
    if (record->kind == DRAY__RECORD_OPEN && !r->table) {
        dray__reader opening = dray__reader_of(record->body, record->size);
        int rc = r->make(r->user, &opening, &r->table, error);
        if (!rc)
            rc = ledger_open(r->table, r->options, error);
        if (!rc)
            rc = dray__replay_begin(r->table->ledger, error);
        return where(r, record, rc, error);
    }
    if (!r->table)
        return dray__fail(error, DRAY_EFORMAT,
                          "journal %s, at byte %llu: a queue's opening expected, found a record of "
                          "kind %u",
                          r->path, (unsigned long long)record->at, record->kind);
    return where(r, record, dray__replay_record(r->table->ledger, record, error), error);
}

/* The journal goes on where what was read of it ends. */
static int go_on(dray__ledger *ledger, const dray__ledger_options *options, uint64_t end,
                 uint64_t last, dray_error *error)
{
    int rc = start(ledger, options, end, last, error);
    dray__entry *entry = rc ? NULL : entry_new(ledger, DRAY__RECORD_START, 0);
    ledger->table->restarts++;
    if (entry)
        add(ledger, entry);
    if (!rc)
        add_space(ledger);
    return rc;
}

int dray__ledger_recover(const dray__ledger_options *options, dray__ledger_make make, void *user,
                         dray__table **out, dray_error *error)
{
    recovery r = {.path = options->path, .options = options, .make = make, .user = user};
    uint64_t end = 0, last = 0;
    int rc = options->from ? dray__journal_read_open(*options->from, r.path, take_record, &r, &end,
                                                     &last, error)
                           : dray__journal_read(r.path, take_record, &r, &end, &last, error);
    if (!rc)
        dray__log(DRAY_LOG_INFO, "queue: journal %s: %llu records read", r.path,
                  (unsigned long long)r.records);
    if (r.table && r.table->ledger)
        dray__replay_end(r.table->ledger);
    if (!rc && r.table && options->kept)
        rc = go_on(r.table->ledger, options, end, last, error);
    if (!rc && r.table) { /* of a cover that was whole, the clears may not have been */
        dray__clear_covered(r.table);
        dray__table_lose_bytes(r.table);
    }
    if (r.table && (rc || !options->kept))
        dray__ledger_end_of(r.table);
    if (rc) {
        dray__table_free(r.table);
        r.table = NULL;
    }
    *out = r.table;
    return rc;
}

void dray__ledger_end_of(dray__table *table)
{
    dray__ledger *ledger = table->ledger;
    if (!ledger)
        return;
    dray__entry *left = dray__journal_stop(ledger->journal);
    ledger->journal = NULL; /* nothing is added to it any more */
    finish(ledger, left);
    if (table->drop == drop_now)
        table->drop = NULL;
    table->ledger = NULL;
    ledger_free(ledger);
}
