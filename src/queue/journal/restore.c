/* Puts lost bytes back from the journal in the background. A thread of the journal reads it and
 * places the wanted bytes. The table gets their places when the thread has ended. Until then the
 * rows cannot be claimed, and are not lost. */
#include "queue/journal/ledger.h"

#include "base/arena.h"
#include "base/error.h"
#include "base/log.h"
#include "queue/table/table_inside.h"

#include <stdlib.h>
#include <string.h>

typedef struct wanted { /* the put of a record, as it was when the reading began */
    uint64_t record;
    uint32_t items, count;
    uint64_t *bytes; /* [count]: bytes of the values of a lost column; UINT64_MAX when it is not
                      * lost */
    dray__extent *extents;
    bool placed;
} wanted;

typedef struct made {
    uint64_t id, key, size;
} made;

struct dray__restoring {
    char *path;
    wanted *wanted; /* by number */
    size_t count;
    made *made; /* chunks */
    size_t made_count, made_capacity;
    dray__placer placer;
    bool begun;
    uint64_t bytes;
    dray_error first; /* why the first record was left out whose bytes could not be placed */
    bool again;       /* more bytes were lost meanwhile */
};

/* ---- in the journal's thread ----------------------------------------------------------------- */

static int note_made(void *user, uint64_t id, uint64_t key, uint64_t size, dray_error *error)
{
    struct dray__restoring *self = user;
    if (!dray__append(&self->made, sizeof *self->made, self->made_count, &self->made_capacity))
        return dray__nomem(error);
    self->made[self->made_count++] = (made){id, key, size};
    return DRAY_OK;
}

static int place(struct dray__restoring *self, wanted *want, const dray__journal_record *record,
                 dray__arena *arena, dray_error *error)
{
    dray__record_body body;
    dray__reader r = dray__reader_of(record->body, record->size);
    dray__get_fields(&r, arena, dray__record_kinds[record->kind].fields, &body);
    const dray__content *content = record->kind == DRAY__RECORD_INSERT
                                       ? &body.insert.rows.content
                                       : &body.commit.outputs.content;
    int rc = r.failed || content->column_count != want->count
                 ? dray__fail(error, DRAY_EFORMAT, "record: %u columns expected, found %u",
                              want->count, r.failed ? 0 : content->column_count)
                 : DRAY_OK;
    for (uint32_t i = 0; i < want->count && !rc; i++) {
        dray__new_column column = content->columns[i];
        uint64_t head = column.spec.ragged ? ((uint64_t)want->items + 1) * 8 : 0;
        if (want->bytes[i] == UINT64_MAX) { /* the column is not lost, or freed */
            dray__get_bytes(&r, head);
            dray__get_bytes(&r, column.extent.bytes);
        } else if (column.extent.bytes != want->bytes[i]) {
            rc = dray__fail(error, DRAY_EFORMAT, "column %s: %llu bytes expected, found %llu",
                            column.name, (unsigned long long)want->bytes[i],
                            (unsigned long long)column.extent.bytes);
        } else {
            rc = dray__place_column(&self->placer, &r, &column, want->items, error);
            want->extents[i] = column.extent;
            self->bytes += want->bytes[i];
        }
    }
    want->placed = rc == DRAY_OK;
    return rc;
}

static int by_record(const void *a, const void *b)
{
    const wanted *left = a, *right = b;
    return (left->record > right->record) - (left->record < right->record);
}

static int read_record(void *user, const dray__journal_record *record, dray_error *error)
{
    struct dray__restoring *self = user;
    wanted key = {.record = record->seq};
    wanted *want = bsearch(&key, self->wanted, self->count, sizeof key, by_record);
    if (!want || !dray__record_kinds[record->kind].bytes || record->missing)
        return DRAY_OK;
    dray__arena arena = {0};
    dray_error why = {0};
    int rc = place(self, want, record, &arena, &why);
    dray__arena_free(&arena);
    if (!rc)
        return DRAY_OK;
    dray__fail_prefix(&why, rc, "record %llu: ", (unsigned long long)record->seq);
    if (rc == DRAY_ETIMEDOUT || rc == DRAY_ECLOSED) { /* each of the others would wait as long */
        *error = why;
        return rc;
    }
    if (!self->first.code)
        self->first = why;
    return DRAY_OK;
}

/* ---- in the table's thread ------------------------------------------------------------------- */

static void restoring_free(struct dray__restoring *self)
{
    if (!self)
        return;
    for (size_t i = 0; i < self->count; i++) {
        free(self->wanted[i].bytes);
        free(self->wanted[i].extents);
    }
    dray__placer_free(&self->placer);
    free(self->wanted);
    free(self->made);
    free(self);
}

static bool is_lost(const dray__put *put)
{
    for (uint32_t c = 0; c < put->column_count; c++)
        if (put->columns[c].chunk && put->columns[c].chunk->lost)
            return true;
    return false;
}

/* Calls `each` for every put in the journal that has lost columns. */
static void for_lost(const dray__table *table, void (*each)(void *user, dray__put *put), void *user)
{
    for (uint32_t i = 0; i < table->partition_count; i++) {
        const dray__partition *p = table->partitions[i];
        for (uint32_t k = 0; k < p->put_count; k++)
            if (p->puts[k] && p->puts[k]->record && is_lost(p->puts[k]))
                each(user, p->puts[k]);
    }
}

static void count_put(void *user, dray__put *put)
{
    (void)put;
    ++*(size_t *)user;
}

/* Adds the put to the wanted ones. Without memory its bytes stay lost. */
static void want_put(void *user, dray__put *put)
{
    struct dray__restoring *self = user;
    wanted *want = &self->wanted[self->count];
    *want = (wanted){.record = put->record, .items = put->items, .count = put->column_count};
    want->bytes = calloc(put->column_count, sizeof *want->bytes);
    want->extents = calloc(put->column_count, sizeof *want->extents);
    if (!want->bytes || !want->extents) {
        free(want->bytes);
        free(want->extents);
        return;
    }
    for (uint32_t c = 0; c < put->column_count; c++) {
        const dray__put_column *column = &put->columns[c];
        want->bytes[c] = column->chunk && column->chunk->lost ? column->extent.bytes : UINT64_MAX;
    }
    put->restoring = true;
    self->count++;
}

static bool waits(const dray__partition *p)
{
    for (uint32_t k = 0; k < p->put_count; k++)
        if (p->puts[k] && p->puts[k]->restoring)
            return true;
    return false;
}

static void set_away(dray__table *table)
{
    for (uint32_t i = 0; i < table->partition_count; i++) {
        dray__partition *p = table->partitions[i];
        bool some = waits(p);
        for (uint32_t w = 0; (some || p->some_away) && w < dray__bit_words(p->rows); w++) {
            uint64_t before = p->away[w];
            p->away[w] = 0;
            for (uint32_t slot = w * 64; some && slot < w * 64 + 64 && slot < p->rows; slot++)
                if (dray__awaits_bytes(table, p, slot))
                    dray__bit_set(p->away, slot);
            if (p->away[w] != before)
                dray__refresh_all_tasks(table, p, w, true);
        }
        p->some_away = some;
    }
}

static int prepare(dray__ledger *ledger, struct dray__restoring *self, dray_error *error)
{
    const dray__table *table = ledger->table;
    const dray__keeper_link *link = &ledger->own.holder.keeper;
    const char *path = link->address ? link->address + strlen("unix:") : NULL;
    int rc =
        dray__placer_open(&self->placer, &table->settings, table->space, path, link->era, error);
    self->placer.holder.owner = ++ledger->table->client_ids;
    self->placer.made = note_made;
    self->placer.user = self;
    return rc;
}

static void begin(dray__ledger *ledger, size_t count)
{
    dray_error error = {0};
    dray__journal_entry *entry = calloc(1, sizeof *entry);
    struct dray__restoring *self = calloc(1, sizeof *self);
    wanted *list = calloc(count, sizeof *list);
    if (!entry || !self || !list || prepare(ledger, self, &error)) {
        dray__log(DRAY_LOG_WARN, "queue: journal %s: putting bytes back: %s", ledger->path,
                  error.code ? error.message : "no memory");
        free(entry);
        free(list);
        restoring_free(self);
        return;
    }
    self->wanted = list;
    for_lost(ledger->table, want_put, self);
    qsort(list, self->count, sizeof *list, by_record);
    entry->each = read_record;
    entry->user = self;
    ledger->restoring = self;
    set_away(ledger->table);
    dray__journal_add(ledger->journal, entry);
}

void dray__ledger_restore(dray__ledger *ledger)
{
    size_t count = 0;
    if (!ledger || !ledger->journal || ledger->replaying || ledger->lost)
        return;
    for_lost(ledger->table, count_put, &count);
    if (!count)
        return;
    if (!ledger->restoring) {
        begin(ledger, count);
        return;
    }
    struct dray__restoring later = {.wanted = calloc(count, sizeof *later.wanted)};
    if (!later.wanted)
        return;
    for_lost(ledger->table, want_put, &later); /* these puts wait for the next restore */
    for (size_t i = 0; i < later.count; i++) {
        free(later.wanted[i].bytes);
        free(later.wanted[i].extents);
    }
    free(later.wanted);
    ledger->restoring->again = true;
    set_away(ledger->table);
}

typedef struct applying {
    dray__ledger *ledger;
    struct dray__restoring *from;
    uint64_t puts;
    bool *used; /* [wanted]: the put still needed it */
} applying;

/* Moves the put's lost columns to the places of the restored bytes, if their sizes match. */
static void apply(void *user, dray__put *put)
{
    applying *a = user;
    dray__table *table = a->ledger->table;
    wanted key = {.record = put->record};
    wanted *want = bsearch(&key, a->from->wanted, a->from->count, sizeof key, by_record);
    if (!want)
        return;
    put->restoring = false;
    bool whole = want->placed && want->count == put->column_count;
    for (uint32_t i = 0; i < put->column_count && whole; i++) {
        const dray__put_column *column = &put->columns[i];
        if (!column->chunk || !column->chunk->lost)
            continue;
        whole = want->bytes[i] == column->extent.bytes &&
                dray__put_move(table, put, i, &want->extents[i], NULL) == DRAY_OK;
        if (whole)
            want->bytes[i] = UINT64_MAX; /* the table owns the bytes now */
    }
    put->restored = table->restores;
    a->puts += whole;
}

/* Drops the restored objects that the table did not take. */
static void drop_rest(dray__table *table, const struct dray__restoring *self)
{
    for (size_t i = 0; table->objects && table->drop && i < self->count; i++)
        for (uint32_t c = 0; c < self->wanted[i].count; c++) {
            const dray__extent *e = &self->wanted[i].extents[c];
            if (self->wanted[i].bytes[c] != UINT64_MAX && e->chunk)
                table->drop(table->user, 0, e->chunk, e->values + e->bytes);
        }
}

static void take_chunks(dray__table *table, dray__client *reader,
                        const struct dray__restoring *self, bool closing)
{
    for (size_t i = 0; i < self->made_count; i++) {
        const made *chunk = &self->made[i];
        if (closing)
            dray__chunk_close(table, reader, chunk->id, NULL);
        else if ((!reader ||
                  dray__chunk_add(table, reader, 0, chunk->id, chunk->key, chunk->size, NULL)) &&
                 table->drop)
            table->drop(table->user, 0, chunk->id, chunk->key);
    }
}

static void stop_waiting(void *user, dray__put *put)
{
    (void)user;
    put->restoring = false;
}

void dray__restore_done(dray__ledger *ledger, dray__journal_entry *entry)
{
    struct dray__restoring *self = entry->user;
    dray__table *table = ledger->table;
    dray_error error = {0};
    applying a = {.ledger = ledger, .from = self};
    dray__place_close(&self->placer);
    if (self->first.code)
        dray__log(DRAY_LOG_WARN, "queue: journal %s: %s", ledger->path, self->first.message);
    if (entry->error.code)
        dray__log(DRAY_LOG_WARN, "queue: journal %s: %s", ledger->path, entry->error.message);
    dray__client *reader = dray__client_new(table, 0, "journal", &error);
    table->restores++;
    take_chunks(table, reader, self, false);
    for_lost(table, apply, &a);
    drop_rest(table, self);
    take_chunks(table, reader, self, true);
    if (reader)
        dray__client_end(table, reader, false, ""); /* this frees chunks that were not needed */
    dray__log(DRAY_LOG_INFO, "queue: journal %s: put %llu bytes of %llu of %llu puts back",
              ledger->path, (unsigned long long)self->bytes, (unsigned long long)a.puts,
              (unsigned long long)self->count);
    bool again = self->again && entry->error.code != DRAY_ECANCELED;
    restoring_free(self);
    ledger->restoring = NULL;
    ledger->restored = true;
    if (again)
        dray__ledger_restore(ledger);
    if (!ledger->restoring) /* rows that no longer wait for their bytes are lost */
        for_lost(table, stop_waiting, NULL);
    set_away(table);
}
