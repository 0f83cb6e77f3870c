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
    dray__partition *partition; /* of the record's owner; NULL: there is none */
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
    int rc = p->r.failed ? dray__reader_finish(&p->r, "record", error) : DRAY_OK;
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

/* A number for a partition or a refill: every one is greater than those before it. */
static int check_number(const replay *p, uint64_t number, dray_error *error)
{
    uint32_t last = p->table->generations;
    if (number > last && number < UINT32_MAX)
        return DRAY_OK;
    return dray__fail(error, DRAY_EFORMAT, "a number greater than %u expected, found %llu", last,
                      (unsigned long long)number);
}

/* A new partition has a new number; rows for one that is there name its own. */
static int check_owner(const replay *p, const char *name, dray_error *error)
{
    const dray__partition *partition = dray__table_partition(p->table, name);
    if (!partition)
        return check_number(p, p->record->owner, error);
    if (partition == p->partition)
        return DRAY_OK;
    return dray__fail(error, DRAY_EFORMAT, "partition %s has generation %u, found %u", name,
                      partition->generation, p->record->owner);
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
    int rc = p->r.failed ? DRAY_OK : check_owner(p, rows.partition, error);
    if (!rc)
        rc = place_columns(p, columns, rows.column_count, items, error);
    p->ledger->number = p->record->owner;
    if (!rc)
        rc = dray__table_insert(p->table, p->ledger->reader, &rows, &slot, &generation, error);
    if (rc == DRAY_EAGAIN) /* there was room when it was written */
        rc = error->code = DRAY_EFORMAT;
    if (!rc && (slot != first || generation != p->record->owner))
        rc = dray__fail(error, DRAY_EFORMAT,
                        "rows from slot %u of generation %u expected, found %u of %u", slot,
                        generation, first, p->record->owner);
    if (!rc)
        note_missing(p, partition_of(p));
    const dray__told told = {ticket, slot, generation};
    return rc ? rc : dray__ledger_remember(p->ledger, identity, &told, error);
}

static int do_seal(replay *p, dray_error *error)
{
    uint32_t rows = dray__get_u32(&p->r);
    int rc = dray__reader_finish(&p->r, "record", error);
    return rc ? rc : dray__table_seal(p->table, p->partition->name, rows, error);
}

static int check_row(const replay *p, uint32_t slot, uint32_t generation, dray_error *error)
{
    const dray__partition *partition = p->partition;
    if (slot >= partition->rows)
        return dray__fail(error, DRAY_EFORMAT, "partition %s: one of %u rows expected, found %u",
                          partition->name, partition->rows, slot);
    if (partition->row_generations[slot] != generation)
        return dray__fail(error, DRAY_EFORMAT,
                          "partition %s, row %u: generation %u expected, found %u", partition->name,
                          slot, partition->row_generations[slot], generation);
    return DRAY_OK;
}

static int check_task(const replay *p, uint32_t task, dray_error *error)
{
    if (task < p->table->task_count)
        return DRAY_OK;
    return dray__fail(error, DRAY_EFORMAT, "one of %u tasks expected, found number %u",
                      p->table->task_count, task);
}

/* The rows, as somebody held them; checked against the row generations of then. */
static int get_slots(replay *p, uint32_t *slots, uint32_t count, dray_error *error)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = slots[i] = dray__get_u32(&p->r), generation = dray__get_u32(&p->r);
        int rc = slot == DRAY__NONE ? DRAY_OK : check_row(p, slot, generation, error);
        if (rc)
            return rc;
    }
    if (!count || p->r.failed)
        return dray__fail(error, DRAY_EFORMAT, "a commit of at least one row expected, found %u",
                          count);
    return DRAY_OK;
}

/* Provisional commits are numbered upwards. */
static int check_commit_number(const replay *p, uint32_t task, uint64_t number, dray_error *error)
{
    if (!(p->table->settings.provisional >> task & 1) ||
        (number > p->table->commit_seq && number < INT64_MAX))
        return DRAY_OK;
    return dray__fail(error, DRAY_EFORMAT, "a commit after number %llu expected, found %llu",
                      (unsigned long long)p->table->commit_seq, (unsigned long long)number);
}

static int do_commit(replay *p, dray_error *error)
{
    dray__reader *r = &p->r;
    uint64_t identity = dray__get_u64(r);
    uint32_t ticket = dray__get_u32(r), task = dray__get_u32(r), count;
    uint64_t number = dray__get_u64(r);
    uint32_t *slots = dray__get_array(r, &p->arena, 8, sizeof *slots, &count);
    int rc = check_task(p, task, error);
    if (!rc)
        rc = check_commit_number(p, task, number, error);
    if (!rc)
        rc = get_slots(p, slots, count, error);
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
        rc = dray__claim_again(p->table, p->ledger->reader, task, p->partition, slots, count,
                               &claim, error);
    if (rc)
        return rc;
    if (p->table->settings.provisional >> task & 1)
        p->table->commit_seq = number - 1;
    rc = dray__claim_commit(p->table, p->ledger->reader, 1, claim->generation, &o, error);
    dray__claim_release(p->table, p->ledger->reader, 1);
    if (!rc)
        note_missing(p, p->partition);
    const dray__told told = {ticket, 0, p->record->owner};
    return rc ? rc : dray__ledger_remember(p->ledger, identity, &told, error);
}

/* What the task has lost before, or settled, it cannot lose. */
static int check_loss(const replay *p, uint32_t slot, uint32_t task, uint32_t cause,
                      uint64_t demand, dray_error *error)
{
    const dray__partition *partition = p->partition;
    if (cause >= DRAY__CAUSES)
        return dray__fail(error, DRAY_EFORMAT, "one of %u causes of a loss expected, found %u",
                          DRAY__CAUSES, cause);
    if (dray__bit_get(partition->dead, slot) || dray__bit_get(partition->vacant, slot) ||
        dray__bit_get(partition->tracks[task].done, slot))
        return dray__fail(error, DRAY_EFORMAT,
                          "partition %s: loss of a row that is open for task %s expected, found "
                          "row %u, which is not",
                          partition->name, p->table->tasks[task].name, slot);
    return demand ? check_number(p, demand, error) : DRAY_OK;
}

static int do_loss(replay *p, dray_error *error)
{
    dray__reader *r = &p->r;
    uint32_t slot = dray__get_u32(r), generation = dray__get_u32(r), task = dray__get_u32(r),
             failures = dray__get_u32(r), cause = dray__get_u32(r);
    const char *reason = dray__get_lines(r, &p->arena);
    uint64_t demand = dray__get_u64(r);
    int rc = dray__reader_finish(r, "record", error);
    if (!rc)
        rc = check_task(p, task, error);
    if (!rc)
        rc = check_row(p, slot, generation, error);
    if (!rc)
        rc = check_loss(p, slot, task, cause, demand, error);
    if (rc)
        return rc;
    p->partition->tracks[task].rows[slot].failures = failures;
    p->ledger->number = (uint32_t)demand;
    dray__lose(p->table, p->partition, task, slot, (int32_t)cause, reason);
    if (demand && p->table->generations != demand)
        return dray__fail(error, DRAY_EFORMAT,
                          "partition %s, row %u: a loss without refill expected, found refill %llu",
                          p->partition->name, slot, (unsigned long long)demand);
    return DRAY_OK;
}

static int do_decline(replay *p, dray_error *error)
{
    uint64_t demand = dray__get_u64(&p->r);
    int rc = dray__reader_finish(&p->r, "record", error);
    for (const dray__demand *d = p->table->demands; d && !rc; d = d->next)
        if (d->id == demand && d->partition != p->partition)
            rc = dray__fail(error, DRAY_EFORMAT, "refill %llu is of partition %s, found %s",
                            (unsigned long long)demand, d->partition->name, p->partition->name);
    return rc ? rc : dray__table_decline(p->table, demand, error);
}

static int do_clear(replay *p, dray_error *error)
{
    int rc = dray__reader_finish(&p->r, "record", error);
    if (!rc && p->record->owner > p->table->generations)
        rc = dray__fail(error, DRAY_EFORMAT, "a partition of generation 1 to %u expected, found %u",
                        p->table->generations, p->record->owner);
    if (rc || !p->partition) /* what a checkpoint covered was cleared with it */
        return rc;
    return dray__table_clear(p->table, p->partition->name, error);
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

static dray__admission get_admission(replay *p)
{
    dray__admission a = {.batch = dray__get_u32(&p->r)};
    a.task = dray__get_u32(&p->r);
    a.staleness = dray__get_u32(&p->r);
    a.concurrency = dray__get_u32(&p->r);
    a.version = dray__get_u64(&p->r);
    a.accepted = dray__get_u64(&p->r);
    return a;
}

static int do_admit(replay *p, dray_error *error)
{
    dray__admission a = get_admission(p);
    int rc = dray__reader_finish(&p->r, "record", error);
    if (!rc)
        rc = dray__admission_check(p->table, &a, error);
    if (!rc)
        p->table->admission = a;
    return rc;
}

static int define(replay *p, dray_error *error)
{
    dray__new_column column = {.name = dray__get_text(&p->r, &p->arena)};
    column.spec = dray__get_spec(&p->r);
    int rc = p->r.failed ? dray__reader_finish(&p->r, "record", error)
                         : dray__name_check(column.name, "column", error);
    if (!rc)
        rc = dray__spec_check(&column.spec, column.name, error);
    return rc ? rc : dray__table_define(p->table, &column, error);
}

/* What a table counts never goes back. */
static int check_state(const dray__table *table, uint32_t generations, uint32_t epoch, uint64_t seq,
                       uint64_t resumed, dray_error *error)
{
    if (generations < table->generations || generations == UINT32_MAX)
        return dray__fail(error, DRAY_EFORMAT, "at least %u generations expected, found %u",
                          table->generations, generations);
    if (epoch < table->epoch || epoch == UINT32_MAX)
        return dray__fail(error, DRAY_EFORMAT, "epoch %u or a later one expected, found %u",
                          table->epoch, epoch);
    if (seq < table->commit_seq || seq >= INT64_MAX || resumed >= INT64_MAX)
        return dray__fail(error, DRAY_EFORMAT,
                          "commit %llu or a later one expected, found %llu, resumed at %llu",
                          (unsigned long long)table->commit_seq, (unsigned long long)seq,
                          (unsigned long long)resumed);
    return DRAY_OK;
}

static int get_graves(replay *p, dray_error *error)
{
    int rc = DRAY_OK;
    uint32_t count = dray__get_count(&p->r, 12);
    for (uint32_t i = 0; i < count && !rc; i++) {
        const char *name = dray__get_text(&p->r, &p->arena);
        uint64_t finished = dray__get_u64(&p->r);
        if (p->r.failed)
            break;
        rc = dray__name_check(name, "cleared partition", error);
        if (!rc)
            rc = dray__table_bury(p->table, name, finished, error);
    }
    return rc;
}

static int do_state(replay *p, dray_error *error)
{
    dray__table *table = p->table;
    dray__reader *r = &p->r;
    uint32_t generations = dray__get_u32(r), epoch = dray__get_u32(r);
    uint64_t seq = dray__get_u64(r), resumed = dray__get_u64(r);
    bool ended = dray__get_u8(r) != 0;
    dray__admission admission = get_admission(p);
    uint32_t count = dray__get_count(r, 4 + DRAY__SPEC_WIRE);
    int rc = r->failed ? dray__reader_finish(r, "record", error)
                       : check_state(table, generations, epoch, seq, resumed, error);
    if (!rc)
        rc = dray__admission_check(table, &admission, error);
    for (uint32_t i = 0; i < count && !rc; i++)
        rc = define(p, error);
    if (!rc)
        rc = get_graves(p, error);
    uint64_t space = r->at < r->size ? dray__get_u64(r) : 0;
    p->ledger->former_space = space ? space : p->ledger->former_space;
    if (!rc)
        rc = dray__reader_finish(r, "record", error);
    if (rc)
        return rc;
    table->generations = generations;
    table->epoch = epoch;
    table->commit_seq = seq;
    table->resumed_seq = resumed;
    table->ended = ended;
    table->admission = admission;
    return DRAY_OK;
}

static int do_space(replay *p, dray_error *error)
{
    uint64_t space = dray__get_u64(&p->r);
    int rc = dray__reader_finish(&p->r, "record", error);
    if (!rc && (!space || !p->table->objects))
        rc = dray__fail(error, DRAY_EFORMAT, "a queue of a store and its space expected, found %s",
                        space ? "a queue of shared memory" : "space 0");
    if (!rc)
        p->ledger->former_space = space;
    return rc;
}

static int do_open(replay *p, dray_error *error)
{
    return dray__fail(error, DRAY_EFORMAT, "queue %s: one opening expected, found another one",
                      p->table->name);
}

/* What a record's owner is: nobody, a partition that is there, or one that may be made or gone. */
enum { NOBODY, PARTITION, ANY_PARTITION };

static const struct {
    int (*replay)(replay *, dray_error *);
    const char *name;
    int owner;
} kinds[] = {
    [DRAY__RECORD_OPEN] = {do_open, "OPEN", NOBODY},
    [DRAY__RECORD_START] = {do_start, "START", NOBODY},
    [DRAY__RECORD_STATE] = {do_state, "STATE", NOBODY},
    [DRAY__RECORD_INSERT] = {do_insert, "INSERT", ANY_PARTITION},
    [DRAY__RECORD_SEAL] = {do_seal, "SEAL", PARTITION},
    [DRAY__RECORD_COMMIT] = {do_commit, "COMMIT", PARTITION},
    [DRAY__RECORD_LOSS] = {do_loss, "LOSS", PARTITION},
    [DRAY__RECORD_DECLINE] = {do_decline, "DECLINE", PARTITION},
    [DRAY__RECORD_CLEAR] = {do_clear, "CLEAR", ANY_PARTITION},
    [DRAY__RECORD_END] = {do_end, "END", NOBODY},
    [DRAY__RECORD_COVER] = {do_cover, "COVER", NOBODY},
    [DRAY__RECORD_RESUME] = {do_resume, "RESUME", NOBODY},
    [DRAY__RECORD_ADMIT] = {do_admit, "ADMIT", NOBODY},
    [DRAY__RECORD_SPACE] = {do_space, "SPACE", NOBODY},
};

static int check_kind(replay *p, dray_error *error)
{
    const dray__journal_record *record = p->record;
    if (record->kind >= sizeof kinds / sizeof *kinds || !kinds[record->kind].replay)
        return dray__fail(error, DRAY_EVERSION, "records of kind %u are not known", record->kind);
    int owner = kinds[record->kind].owner;
    p->partition = partition_of(p);
    if (owner == NOBODY && record->owner)
        return dray__fail(error, DRAY_EFORMAT, "no owner expected, found %u", record->owner);
    if (owner != NOBODY && !record->owner)
        return dray__fail(error, DRAY_EFORMAT, "a partition's record expected, found no owner");
    if (owner == PARTITION && !p->partition)
        return dray__fail(error, DRAY_EFORMAT,
                          "a partition that is there expected, found generation %u", record->owner);
    return DRAY_OK;
}

int dray__replay_record(dray__ledger *ledger, const dray__journal_record *record, dray_error *error)
{
    replay p = {.ledger = ledger,
                .table = ledger->table,
                .record = record,
                .r = dray__reader_of(record->body, record->size)};
    int rc = check_kind(&p, error);
    if (rc)
        return rc;
    if (record->kind != DRAY__RECORD_CLEAR)
        dray__ledger_count(ledger, record->owner, record->bytes);
    ledger->record = record->seq;
    if (record->missing)
        dray__place_close(ledger->placer);
    rc = kinds[record->kind].replay(&p, error);
    ledger->number = 0;
    dray__arena_free(&p.arena);
    return rc ? dray__fail_prefix(error, rc, "%s: ", kinds[record->kind].name) : rc;
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
