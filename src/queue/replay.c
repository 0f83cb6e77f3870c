/* Making a table of its records again. Records are checked as requests are: a journal that was
 * altered, or is another version's, is refused. Bytes are put into fresh chunks, which the keeper
 * holds and nobody owns afterwards. */
#include "queue/ledger.h"

#include "base/arena.h"
#include "base/error.h"
#include "base/log.h"
#include "queue/internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#define CHUNK_BYTES (UINT64_C(16) << 20)
#define STORE_PATIENCE (30 * DRAY__SECOND)

typedef struct replay {
    dray__ledger *ledger;
    dray__table *table;
    const dray__journal_record *record;
    dray__reader r;
    dray__arena arena;
} replay;

/* ---- bytes ----------------------------------------------------------------------------------- */

static void close_chunk(dray__ledger *ledger)
{
    struct dray__refill_chunk *c = &ledger->chunk;
    if (!c->base)
        return;
    munmap(c->base, c->size);
    dray__chunk_close(ledger->table, ledger->reader, c->id, NULL);
    *c = (struct dray__refill_chunk){0};
}

static int new_chunk(dray__ledger *ledger, uint64_t bytes, dray_error *error)
{
    struct dray__refill_chunk *c = &ledger->chunk;
    uint64_t random[2] = {0, 0};
    int fd;
    void *base;
    close_chunk(ledger);
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return dray__fail(error, DRAY_ESYS, "getrandom");
    c->id = random[0] | 1;
    c->size = bytes > CHUNK_BYTES ? bytes : CHUNK_BYTES;
    int rc = dray__segment_new(c->size, &base, &fd, error);
    if (rc)
        return rc;
    c->base = base;
    rc = dray__keeper_put(&ledger->link, c->id, random[1], c->size, fd, error);
    close(fd);
    if (!rc)
        rc = dray__chunk_add(ledger->table, ledger->reader, 0, c->id, random[1], c->size, error);
    if (rc) {
        munmap(c->base, c->size);
        *c = (struct dray__refill_chunk){0};
    }
    return rc;
}

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + DRAY__ALIGN - 1) / DRAY__ALIGN * DRAY__ALIGN;
}

/* Into a store, as an object of its own. */
static int place_object(replay *p, dray__new_column *column, const void *offsets, uint64_t head,
                        const void *values, uint64_t bytes, dray_error *error)
{
    static const uint8_t zeros[DRAY__ALIGN];
    dray__ledger *ledger = p->ledger;
    struct iovec parts[] = {{(void *)(uintptr_t)offsets, head},
                            {(void *)(uintptr_t)zeros, aligned(head) - head},
                            {(void *)(uintptr_t)values, bytes}};
    column->extent.chunk = (uint64_t)ledger->reader->id << 32 | ++ledger->objects;
    column->extent.offsets = 0;
    column->extent.values = aligned(head);
    int rc = ledger->own->kind->put(ledger->own, column->extent.chunk, parts, 3,
                                    dray__deadline(STORE_PATIENCE), error);
    return rc ? dray__fail_prefix(error, rc, "column %s: ", column->name) : DRAY_OK;
}

/* Takes the column's bytes from the record. */
static int place_column(replay *p, dray__new_column *column, uint64_t items, dray_error *error)
{
    struct dray__refill_chunk *c = &p->ledger->chunk;
    uint64_t head = column->spec.ragged ? (items + 1) * 8 : 0, bytes = column->extent.bytes;
    if (bytes > p->r.size || head > p->r.size)
        return dray__fail(error, DRAY_EFORMAT, "column %s: its bytes are missing", column->name);
    const void *offsets = dray__get_bytes(&p->r, head), *values = dray__get_bytes(&p->r, bytes);
    if (p->r.failed)
        return dray__fail(error, DRAY_EFORMAT, "column %s: its bytes are missing", column->name);
    if (p->ledger->own)
        return place_object(p, column, offsets, head, values, bytes, error);
    uint64_t room = aligned(head) + aligned(bytes);
    if (!c->base || room > c->size - c->used) {
        int rc = new_chunk(p->ledger, room, error);
        if (rc)
            return rc;
    }
    column->extent.chunk = c->id;
    column->extent.offsets = head ? c->used : 0;
    column->extent.values = c->used + aligned(head);
    if (head)
        memcpy(c->base + c->used, offsets, head);
    if (bytes)
        memcpy(c->base + column->extent.values, values, bytes);
    c->used += room;
    return DRAY_OK;
}

static dray__new_column *get_columns(replay *p, uint32_t *count)
{
    dray__new_column *columns =
        dray__get_array(&p->r, &p->arena, 12 + DRAY__SPEC_WIRE, sizeof *columns, count);
    for (uint32_t i = 0; i < *count && !p->r.failed; i++) {
        columns[i] = (dray__new_column){.name = dray__get_text(&p->r, &p->arena)};
        columns[i].spec = dray__get_spec(&p->r);
        columns[i].extent.bytes = dray__get_u64(&p->r);
    }
    return columns;
}

static int place_columns(replay *p, dray__new_column *columns, uint32_t count, uint64_t items,
                         dray_error *error)
{
    int rc = p->r.failed ? dray__fail(error, DRAY_EFORMAT, "short record") : DRAY_OK;
    for (uint32_t i = 0; i < count && !rc; i++)
        rc = place_column(p, &columns[i], items, error);
    return rc ? rc : dray__reader_finish(&p->r, "record", error);
}

/* What the record should hold was gone before it was written: its rows are lost. */
static void note_missing(const replay *p, const dray__partition *partition)
{
    const dray__put *put = partition->put_count ? partition->puts[partition->put_count - 1] : NULL;
    if (!p->record->missing || !put || put->record != p->record->seq)
        return;
    for (uint32_t i = 0; i < put->column_count; i++)
        if (put->columns[i].chunk)
            put->columns[i].chunk->lost = true;
    close_chunk(p->ledger); /* nothing else is put in there */
}

/* ---- records --------------------------------------------------------------------------------- */

static int remember(dray__ledger *ledger, uint64_t identity, uint32_t ticket, uint32_t first,
                    uint32_t generation, dray_error *error)
{
    uint64_t key = dray__told_key(identity, ticket);
    dray__told *told = malloc(sizeof *told);
    if (!identity || !ticket || dray__idmap_get(&ledger->told, key) || !told ||
        !dray__idmap_set(&ledger->told, key, told)) {
        free(told);
        return told || !identity || !ticket ? DRAY_OK : dray__nomem(error);
    }
    *told = (dray__told){.first_slot = first, .generation = generation};
    return DRAY_OK;
}

static dray__partition *partition_of(const replay *p)
{
    for (uint32_t i = 0; i < p->table->partition_count; i++)
        if (p->table->partitions[i]->generation == p->record->owner)
            return p->table->partitions[i];
    return NULL;
}

static int no_partition(const replay *p, dray_error *error)
{
    return dray__fail(error, DRAY_EFORMAT, "there is no partition of generation %u",
                      p->record->owner);
}

static int do_insert(replay *p, dray_error *error)
{
    dray__reader *r = &p->r;
    dray__new_rows rows = {0};
    uint64_t identity = dray__get_u64(r);
    uint32_t ticket = dray__get_u32(r);
    rows.partition = dray__get_text(r, &p->arena);
    uint32_t first = dray__get_u32(r), slot = 0, generation = 0;
    rows.rows = dray__get_u32(r);
    rows.group_size = dray__get_u32(r);
    rows.per_group = dray__get_u8(r) != 0;
    rows.row_bytes = dray__get_u64(r);
    rows.refill = dray__get_u64(r);
    dray__new_column *columns = get_columns(p, &rows.column_count);
    rows.tags = dray__get_tags(r, &p->arena, &rows.tag_count);
    rows.columns = columns;
    uint32_t group = rows.group_size ? rows.group_size : 1;
    uint64_t items = rows.per_group ? (rows.refill ? 1 : rows.rows / group) : rows.rows;
    int rc = place_columns(p, columns, rows.column_count, items, error);
    p->ledger->number = p->record->owner;
    if (!rc)
        rc = dray__table_insert(p->table, p->ledger->reader, &rows, &slot, &generation, error);
    if (!rc && (slot != first || generation != p->record->owner))
        rc = dray__fail(error, DRAY_EFORMAT, "rows from slot %u of generation %u became %u of %u",
                        first, p->record->owner, slot, generation);
    if (!rc)
        note_missing(p, partition_of(p));
    return rc ? rc : remember(p->ledger, identity, ticket, slot, generation, error);
}

static int do_seal(replay *p, dray_error *error)
{
    uint32_t rows = dray__get_u32(&p->r);
    const dray__partition *partition = partition_of(p);
    int rc = dray__reader_finish(&p->r, "record", error);
    if (!rc && !partition)
        rc = no_partition(p, error);
    return rc ? rc : dray__table_seal(p->table, partition->name, rows, error);
}

/* The rows, as somebody held them; checked against the row generations of then. */
static int get_slots(replay *p, const dray__partition *partition, uint32_t task, uint32_t *slots,
                     uint32_t count, dray_error *error)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = slots[i] = dray__get_u32(&p->r), generation = dray__get_u32(&p->r);
        if (slot == DRAY__NONE)
            continue;
        if (p->r.failed || slot >= partition->rows ||
            partition->row_generations[slot] != generation ||
            dray__bit_get(partition->tracks[task].done, slot) ||
            dray__bit_get(partition->vacant, slot))
            return dray__fail(error, DRAY_EFORMAT, "commit of row %u of generation %u", slot,
                              generation);
    }
    return DRAY_OK;
}

static int do_commit(replay *p, dray_error *error)
{
    dray__reader *r = &p->r;
    uint64_t identity = dray__get_u64(r);
    uint32_t ticket = dray__get_u32(r), task = dray__get_u32(r), count;
    uint64_t number = dray__get_u64(r);
    dray__partition *partition = partition_of(p);
    uint32_t *slots = dray__get_array(r, &p->arena, 8, sizeof *slots, &count);
    if (!partition)
        return no_partition(p, error);
    if (r->failed || task >= p->table->task_count)
        return dray__fail(error, DRAY_EFORMAT, "commit of task number %u", task);
    int rc = get_slots(p, partition, task, slots, count, error);
    dray__outputs o = {0};
    dray__new_column *columns = rc ? NULL : get_columns(p, &o.column_count);
    if (rc)
        return rc;
    o.columns = columns;
    o.tags = dray__get_tags(r, &p->arena, &o.tag_count);
    uint32_t *open = dray__get_array(r, &p->arena, 4, sizeof *open, &o.open_count);
    for (uint32_t i = 0; i < o.open_count && !r->failed; i++)
        open[i] = dray__get_u32(r);
    o.open = open;
    rc = place_columns(p, columns, o.column_count, count, error);
    dray__claim *claim = NULL;
    if (!rc)
        rc = dray__claim_again(p->table, p->ledger->reader, task, partition, slots, count, &claim,
                               error);
    if (rc)
        return rc;
    if (p->table->settings.provisional >> task & 1)
        p->table->commit_seq = number - 1;
    rc = dray__claim_commit(p->table, p->ledger->reader, 1, claim->generation, &o, error);
    dray__claim_release(p->table, p->ledger->reader, 1);
    if (!rc)
        note_missing(p, partition);
    return rc ? rc : remember(p->ledger, identity, ticket, 0, p->record->owner, error);
}

static int do_loss(replay *p, dray_error *error)
{
    dray__reader *r = &p->r;
    uint32_t slot = dray__get_u32(r), generation = dray__get_u32(r), task = dray__get_u32(r),
             failures = dray__get_u32(r), cause = dray__get_u32(r);
    const char *reason = dray__get_text(r, &p->arena);
    uint64_t demand = dray__get_u64(r);
    dray__partition *partition = partition_of(p);
    int rc = dray__reader_finish(r, "record", error);
    if (!rc && !partition)
        rc = no_partition(p, error);
    if (!rc && (slot >= partition->rows || task >= p->table->task_count || cause >= DRAY__CAUSES ||
                partition->row_generations[slot] != generation ||
                dray__bit_get(partition->dead, slot) || dray__bit_get(partition->vacant, slot)))
        rc = dray__fail(error, DRAY_EFORMAT, "loss of row %u of generation %u", slot, generation);
    if (rc)
        return rc;
    partition->tracks[task].rows[slot].failures = failures;
    p->ledger->number = (uint32_t)demand;
    dray__lose(p->table, partition, task, slot, (int32_t)cause, reason);
    return DRAY_OK;
}

static int do_decline(replay *p, dray_error *error)
{
    uint64_t demand = dray__get_u64(&p->r);
    int rc = dray__reader_finish(&p->r, "record", error);
    return rc ? rc : dray__table_decline(p->table, demand, error);
}

static int do_clear(replay *p, dray_error *error)
{
    const dray__partition *partition = partition_of(p);
    int rc = dray__reader_finish(&p->r, "record", error);
    if (rc || !partition) /* what a checkpoint covered was cleared with it */
        return rc;
    return dray__table_clear(p->table, partition->name, error);
}

static int do_end(replay *p, dray_error *error)
{
    int rc = dray__reader_finish(&p->r, "record", error);
    if (!rc)
        dray__table_end(p->table);
    return rc;
}

static int do_start(replay *p, dray_error *error)
{
    p->table->restarts++;
    return dray__reader_finish(&p->r, "record", error);
}

static int do_cover(replay *p, dray_error *error)
{
    uint32_t epoch = dray__get_u32(&p->r);
    uint64_t seq = dray__get_u64(&p->r);
    int rc = dray__reader_finish(&p->r, "record", error);
    return rc ? rc : dray__table_cover(p->table, epoch, seq, error);
}

static int do_resume(replay *p, dray_error *error)
{
    uint32_t epoch = dray__get_u32(&p->r);
    uint64_t seq = dray__get_u64(&p->r), version = dray__get_u64(&p->r);
    int rc = dray__reader_finish(&p->r, "record", error);
    return rc ? rc : dray__table_resume(p->table, epoch, seq, version, error);
}

static void get_admission(replay *p)
{
    dray__admission a = {.batch = dray__get_u32(&p->r)};
    a.task = dray__get_u32(&p->r);
    a.staleness = dray__get_u32(&p->r);
    a.concurrency = dray__get_u32(&p->r);
    a.version = dray__get_u64(&p->r);
    a.accepted = dray__get_u64(&p->r);
    p->r.failed |= a.task != DRAY__NONE && a.task >= p->table->task_count;
    if (!p->r.failed)
        p->table->admission = a;
}

static int do_admit(replay *p, dray_error *error)
{
    get_admission(p);
    return dray__reader_finish(&p->r, "record", error);
}

static int define(replay *p, dray_error *error)
{
    dray__new_column column = {.name = dray__get_text(&p->r, &p->arena)};
    column.spec = dray__get_spec(&p->r);
    int rc = p->r.failed ? dray__fail(error, DRAY_EFORMAT, "short record")
                         : dray__name_check(column.name, "column", error);
    if (!rc)
        rc = dray__spec_check(&column.spec, column.name, error);
    return rc ? rc : dray__table_define(p->table, &column, error);
}

static int do_state(replay *p, dray_error *error)
{
    dray__table *table = p->table;
    dray__reader *r = &p->r;
    table->generations = dray__get_u32(r);
    table->epoch = dray__get_u32(r);
    table->commit_seq = dray__get_u64(r);
    table->resumed_seq = dray__get_u64(r);
    table->ended = dray__get_u8(r) != 0;
    get_admission(p);
    int rc = DRAY_OK;
    uint32_t count = dray__get_count(r, 4 + DRAY__SPEC_WIRE);
    for (uint32_t i = 0; i < count && !rc; i++)
        rc = define(p, error);
    count = rc ? 0 : dray__get_count(r, 12);
    for (uint32_t i = 0; i < count && !rc; i++) {
        const char *name = dray__get_text(r, &p->arena);
        uint64_t finished = dray__get_u64(r);
        if (!r->failed)
            rc = dray__table_bury(table, name, finished, error);
    }
    uint64_t space = r->at < r->size ? dray__get_u64(r) : 0;
    p->ledger->former_space = space ? space : p->ledger->former_space;
    return rc ? rc : dray__reader_finish(r, "record", error);
}

static int do_space(replay *p, dray_error *error)
{
    p->ledger->former_space = dray__get_u64(&p->r);
    return dray__reader_finish(&p->r, "record", error);
}

static int (*const handlers[])(replay *, dray_error *) = {
    [DRAY__RECORD_START] = do_start,     [DRAY__RECORD_STATE] = do_state,
    [DRAY__RECORD_INSERT] = do_insert,   [DRAY__RECORD_SEAL] = do_seal,
    [DRAY__RECORD_COMMIT] = do_commit,   [DRAY__RECORD_LOSS] = do_loss,
    [DRAY__RECORD_DECLINE] = do_decline, [DRAY__RECORD_CLEAR] = do_clear,
    [DRAY__RECORD_END] = do_end,         [DRAY__RECORD_COVER] = do_cover,
    [DRAY__RECORD_RESUME] = do_resume,   [DRAY__RECORD_ADMIT] = do_admit,
    [DRAY__RECORD_SPACE] = do_space,
};

int dray__replay_record(dray__ledger *ledger, const dray__journal_record *record, dray_error *error)
{
    replay p = {.ledger = ledger,
                .table = ledger->table,
                .record = record,
                .r = dray__reader_of(record->body, record->size)};
    if (record->kind >= sizeof handlers / sizeof *handlers || !handlers[record->kind])
        return dray__fail(error, DRAY_EVERSION, "records of kind %u are not known", record->kind);
    if (record->kind != DRAY__RECORD_CLEAR)
        dray__ledger_count(ledger, record->owner, record->bytes);
    ledger->record = record->seq;
    if (record->missing)
        close_chunk(ledger);
    int rc = handlers[record->kind](&p, error);
    ledger->number = 0;
    dray__arena_free(&p.arena);
    return rc;
}

int dray__replay_begin(dray__ledger *ledger, dray_error *error)
{
    ledger->replaying = true;
    ledger->reader = dray__client_new(ledger->table, 0, "journal", error);
    return ledger->reader ? DRAY_OK : DRAY_ENOMEM;
}

void dray__replay_end(dray__ledger *ledger)
{
    close_chunk(ledger);
    if (ledger->reader)
        dray__client_end(ledger->table, ledger->reader, false, "");
    ledger->reader = NULL;
    ledger->replaying = false;
}

/* ---- bytes that are lost --------------------------------------------------------------------- */

typedef struct restoring {
    dray__ledger *ledger;
    dray__idmap wanted; /* a record's number -> its put */
    uint64_t puts, bytes;
} restoring;

/* Reads up to the record's columns. */
static dray__new_column *find_columns(replay *p, uint32_t *count)
{
    dray__reader *r = &p->r;
    uint32_t rows = 0;
    dray__get_u64(r);
    dray__get_u32(r);
    if (p->record->kind == DRAY__RECORD_INSERT) {
        dray__get_text(r, &p->arena);
        dray__get_bytes(r, 4 + 4 + 4 + 1 + 8 + 8);
    } else {
        dray__get_bytes(r, 4 + 8);
        rows = dray__get_count(r, 8);
        dray__get_bytes(r, 8 * (size_t)rows);
    }
    dray__new_column *columns = get_columns(p, count);
    dray__get_tags(r, &p->arena, &rows);
    if (p->record->kind == DRAY__RECORD_COMMIT) {
        rows = dray__get_count(r, 4);
        dray__get_bytes(r, 4 * (size_t)rows);
    }
    return columns;
}

static int restore_put(restoring *to, replay *p, dray__put *put, dray_error *error)
{
    uint32_t count = 0;
    dray__new_column *columns = find_columns(p, &count);
    int rc = p->r.failed || count != put->column_count
                 ? dray__fail(error, DRAY_EFORMAT, "it is of other columns")
                 : DRAY_OK;
    for (uint32_t i = 0; i < count && !rc; i++) {
        dray__put_column *column = &put->columns[i];
        uint64_t head = columns[i].spec.ragged ? ((uint64_t)put->items + 1) * 8 : 0;
        if (!column->chunk || !column->chunk->lost) { /* the bytes are here, or freed */
            dray__get_bytes(&p->r, head);
            dray__get_bytes(&p->r, columns[i].extent.bytes);
            continue;
        }
        if (columns[i].extent.bytes != column->extent.bytes)
            return dray__fail(error, DRAY_EFORMAT, "it is of other bytes");
        rc = place_column(p, &columns[i], put->items, error);
        if (!rc)
            rc = dray__put_move(p->table, put, i, &columns[i].extent, error);
        to->bytes += column->extent.bytes;
    }
    put->restored = p->table->restores;
    to->puts += rc == DRAY_OK;
    return rc;
}

static int restore_record(void *user, const dray__journal_record *record, dray_error *error)
{
    restoring *to = user;
    dray__put *put = dray__idmap_get(&to->wanted, record->seq);
    bool bytes = record->kind == DRAY__RECORD_INSERT || record->kind == DRAY__RECORD_COMMIT;
    if (!put || !bytes || record->missing)
        return DRAY_OK;
    replay p = {.ledger = to->ledger,
                .table = to->ledger->table,
                .record = record,
                .r = dray__reader_of(record->body, record->size)};
    int rc = restore_put(to, &p, put, error);
    dray__arena_free(&p.arena);
    return rc ? dray__fail_prefix(error, rc, "record %llu: ", (unsigned long long)record->seq) : rc;
}

static void list_lost(restoring *to)
{
    const dray__table *table = to->ledger->table;
    for (uint32_t i = 0; i < table->partition_count; i++) {
        const dray__partition *p = table->partitions[i];
        for (uint32_t k = 0; k < p->put_count; k++)
            for (uint32_t c = 0; p->puts[k]->record && c < p->puts[k]->column_count; c++)
                if (p->puts[k]->columns[c].chunk && p->puts[k]->columns[c].chunk->lost)
                    dray__idmap_set(&to->wanted, p->puts[k]->record, p->puts[k]);
    }
}

void dray__ledger_restore(dray__ledger *ledger)
{
    restoring to = {.ledger = ledger};
    dray_error error = {0};
    uint64_t end, last;
    if (!ledger || ledger->replaying)
        return;
    list_lost(&to);
    if (!to.wanted.count)
        return;
    ledger->table->restores++;
    ledger->reader = dray__client_new(ledger->table, 0, "journal", &error);
    if (ledger->reader)
        dray__journal_read(ledger->path, restore_record, &to, &end, &last, &error);
    if (error.code)
        dray__log(DRAY_LOG_WARN, "queue: journal %s: %s", ledger->path, error.message);
    close_chunk(ledger);
    if (ledger->reader)
        dray__client_end(ledger->table, ledger->reader, false, "");
    ledger->reader = NULL;
    dray__log(DRAY_LOG_INFO, "queue: journal %s: put %llu bytes of %llu of %llu puts back",
              ledger->path, (unsigned long long)to.bytes, (unsigned long long)to.puts,
              (unsigned long long)to.wanted.count);
    dray__idmap_free(&to.wanted);
}
