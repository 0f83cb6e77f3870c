/* Making a table of its records again. Records are checked as requests are: a journal that was
 * altered, or is another version's, is refused. Bytes are put into fresh chunks, which the keeper
 * holds and nobody owns afterwards. */
#include "queue/place.h"

#include "base/arena.h"
#include "base/error.h"
#include "queue/internal.h"

#include <stdlib.h>
#include <string.h>

typedef struct replay {
    dray__ledger *ledger;
    dray__table *table;
    const dray__journal_record *record;
    dray__reader r;
    dray__arena arena;
} replay;

/* ---- bytes ----------------------------------------------------------------------------------- */

static int add_chunk(void *user, uint64_t id, uint64_t key, uint64_t size, dray_error *error)
{
    dray__ledger *ledger = user;
    return dray__chunk_add(ledger->table, ledger->reader, 0, id, key, size, error);
}

static void close_chunk(void *user, uint64_t id)
{
    dray__ledger *ledger = user;
    dray__chunk_close(ledger->table, ledger->reader, id, NULL);
}

static int place_columns(replay *p, dray__new_column *columns, uint32_t count, uint64_t items,
                         dray_error *error)
{
    int rc = p->r.failed ? dray__fail(error, DRAY_EFORMAT, "short record") : DRAY_OK;
    for (uint32_t i = 0; i < count && !rc; i++)
        rc = dray__place_column(p->ledger->placer, &p->r, &columns[i], items, error);
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
    dray__place_close(p->ledger->placer); /* nothing else is put in there */
}

/* ---- records --------------------------------------------------------------------------------- */

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
    dray__new_column *columns = dray__record_columns(&p->r, &p->arena, &rows.column_count);
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
    const dray__told told = {ticket, slot, generation};
    return rc ? rc : dray__ledger_remember(p->ledger, identity, &told, error);
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
    dray__new_column *columns = rc ? NULL : dray__record_columns(&p->r, &p->arena, &o.column_count);
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
    const dray__told told = {ticket, 0, p->record->owner};
    return rc ? rc : dray__ledger_remember(p->ledger, identity, &told, error);
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
        dray__place_close(ledger->placer);
    int rc = handlers[record->kind](&p, error);
    ledger->number = 0;
    dray__arena_free(&p.arena);
    return rc;
}

int dray__replay_begin(dray__ledger *ledger, dray_error *error)
{
    ledger->replaying = true;
    ledger->placer = calloc(1, sizeof *ledger->placer);
    if (!ledger->placer)
        return dray__nomem(error);
    ledger->reader = dray__client_new(ledger->table, 0, "journal", error);
    if (!ledger->reader)
        return DRAY_ENOMEM;
    *ledger->placer = (dray__placer){.link = &ledger->link,
                                     .store = ledger->own,
                                     .client = ledger->reader->id,
                                     .objects = &ledger->objects,
                                     .made = add_chunk,
                                     .filled = close_chunk,
                                     .user = ledger};
    return DRAY_OK;
}

void dray__replay_end(dray__ledger *ledger)
{
    if (ledger->reader) {
        dray__place_close(ledger->placer);
        dray__client_end(ledger->table, ledger->reader, false, "");
    }
    free(ledger->placer);
    ledger->placer = NULL;
    ledger->reader = NULL;
    ledger->replaying = false;
}
