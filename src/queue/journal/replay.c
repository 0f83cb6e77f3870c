/* Rebuilds a table from records. Records are checked as requests are: a journal that was altered,
 * or is of another version, is refused. Bytes are put into new chunks, which the keeper holds and
 * which have no owner afterwards. */
#include "queue/journal/ledger.h"

#include "base/arena.h"
#include "base/error.h"
#include "queue/table/keyed.h"
#include "queue/table/table_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct replay {
    dray__ledger *ledger;
    dray__table *table;
    const dray__journal_record *record;
    dray__partition *partition; /* of the record's owner; NULL when there is none */
    dray__reader r;
    dray__arena arena;
} replay;

/* ---- bytes ----------------------------------------------------------------------------------- */

static int add_chunk(void *user, uint64_t id, uint64_t key, uint64_t size, dray_error *error)
{
    dray__ledger *ledger = user;
    return dray__chunk_add(ledger->table, ledger->reader, 0, id, key, size, error);
}

/* Notes a full chunk, to close it once the put of this record exists, because the table accepts no
 * puts in a closed chunk. */
static void close_chunk(void *user, uint64_t id)
{
    dray__ledger *ledger = user;
    uint64_t *at =
        dray__append(&ledger->filled, sizeof *at, ledger->filled_count, &ledger->filled_capacity);
    if (!at) /* it is closed when the reader ends */
        return;
    *at = id;
    ledger->filled_count++;
}

static void close_filled(dray__ledger *ledger)
{
    for (uint32_t i = 0; i < ledger->filled_count; i++)
        dray__chunk_close(ledger->table, ledger->reader, ledger->filled[i], NULL);
    ledger->filled_count = 0;
}

/* Places the bytes of all columns. The content is in the arena, and may be changed. */
static int place_columns(replay *p, const dray__content *content, uint64_t items, dray_error *error)
{
    dray__new_column *columns = (dray__new_column *)(uintptr_t)content->columns;
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < content->column_count && !rc; i++)
        rc = dray__place_column(&p->ledger->own, &p->r, &columns[i], items, error);
    return rc ? rc : dray__reader_finish(&p->r, "record", error);
}

/* Marks the record's bytes as lost, because they were lost before they were written. */
static void note_missing(const replay *p, const dray__partition *partition)
{
    const dray__put *put = partition->put_count ? partition->puts[partition->put_count - 1] : NULL;
    if (!p->record->missing || !put || put->record != p->record->seq)
        return;
    for (uint32_t i = 0; i < put->column_count; i++)
        if (put->columns[i].chunk)
            put->columns[i].chunk->lost = true;
    dray__place_close(&p->ledger->own); /* nothing else is put in there */
}

/* ---- records --------------------------------------------------------------------------------- */

static dray__partition *partition_of(const replay *p)
{
    for (uint32_t i = 0; i < p->table->partition_count; i++)
        if (p->table->partitions[i]->generation == p->record->owner)
            return p->table->partitions[i];
    return NULL;
}

/* Checks the number of a partition or refill: each is greater than all before it. */
static int check_number(const replay *p, uint64_t number, dray_error *error)
{
    uint32_t last = p->table->generations;
    if (number > last && number < UINT32_MAX)
        return DRAY_OK;
    return dray__fail(error, DRAY_EFORMAT, "a number greater than %u expected, found %llu", last,
                      (unsigned long long)number);
}

/* Checks the record's owner: a new number for a new partition, else the partition's number. */
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

static int do_insert(replay *p, const void *body, dray_error *error)
{
    const dray__insert_record *record = body;
    const dray__new_rows *rows = &record->rows;
    uint32_t slot = 0, generation = 0, group = rows->group_size ? rows->group_size : 1;
    uint64_t items = rows->per_group ? (rows->refill ? 1 : rows->rows / group) : rows->rows;
    int rc = check_owner(p, rows->partition, error);
    if (!rc)
        rc = place_columns(p, &rows->content, items, error);
    p->ledger->number = p->record->owner;
    if (!rc)
        rc = dray__table_insert(p->table, p->ledger->reader, rows, &slot, &generation, error);
    if (rc == DRAY_EAGAIN) /* a valid journal never has too many rows */
        rc = error->code = DRAY_EFORMAT;
    if (!rc && (slot != record->first || generation != p->record->owner))
        rc = dray__fail(error, DRAY_EFORMAT,
                        "rows from slot %u of generation %u expected, found %u of %u", slot,
                        generation, record->first, p->record->owner);
    if (!rc)
        note_missing(p, partition_of(p));
    const dray__told told = {rows->ticket, slot, generation};
    return rc ? rc : dray__ledger_remember(p->ledger, record->identity, &told, error);
}

static int do_seal(replay *p, const void *body, dray_error *error)
{
    const uint32_t *rows = body;
    return dray__table_seal(p->table, p->partition->name, *rows, error);
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

/* Gives the slots of the commit's rows, and checks their row generations. */
static int get_slots(replay *p, const dray__commit_record *record, uint32_t **out,
                     dray_error *error)
{
    uint32_t count = record->row_count;
    uint32_t *slots = dray__arena_get(&p->arena, (count + 1u) * sizeof *slots);
    if (!slots)
        return dray__nomem(error);
    for (uint32_t i = 0; i < count; i++) {
        slots[i] = record->rows[i].slot;
        int rc = slots[i] == DRAY__NONE ? DRAY_OK
                                        : check_row(p, slots[i], record->rows[i].generation, error);
        if (rc)
            return rc;
    }
    *out = slots;
    if (!count)
        return dray__fail(error, DRAY_EFORMAT, "a commit of at least one row expected, found 0");
    return DRAY_OK;
}

/* Checks that the numbers of provisional commits ascend. */
static int check_commit_number(const replay *p, uint32_t task, uint64_t number, dray_error *error)
{
    if (!(p->table->settings.provisional >> task & 1) ||
        (number > p->table->commit_seq && number < INT64_MAX))
        return DRAY_OK;
    return dray__fail(error, DRAY_EFORMAT, "a commit after number %llu expected, found %llu",
                      (unsigned long long)p->table->commit_seq, (unsigned long long)number);
}

static int do_commit(replay *p, const void *body, dray_error *error)
{
    const dray__commit_record *record = body;
    uint32_t task = record->task, *slots = NULL;
    int rc = check_task(p, task, error);
    if (!rc)
        rc = check_commit_number(p, task, record->number, error);
    if (!rc)
        rc = get_slots(p, record, &slots, error);
    if (!rc)
        rc = place_columns(p, &record->outputs.content, record->row_count, error);
    dray__claim *claim = NULL;
    if (!rc)
        rc = dray__claim_again(p->table, p->ledger->reader, task, p->partition, slots,
                               record->row_count, &claim, error);
    if (rc)
        return rc;
    if (p->table->settings.provisional >> task & 1)
        p->table->commit_seq = record->number - 1;
    rc = dray__claim_commit(p->table, p->ledger->reader, 1, claim->generation, &record->outputs,
                            error);
    dray__claim_release(p->table, p->ledger->reader, 1);
    if (!rc)
        note_missing(p, p->partition);
    const dray__told told = {record->ticket, 0, p->record->owner};
    return rc ? rc : dray__ledger_remember(p->ledger, record->identity, &told, error);
}

/* Checks a loss: a task cannot lose a row that it has lost or settled before. */
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

static int do_loss(replay *p, const void *body, dray_error *error)
{
    const dray__loss_record *loss = body;
    uint32_t slot = loss->slot, task = loss->task;
    int rc = check_task(p, task, error);
    if (!rc)
        rc = check_row(p, slot, loss->generation, error);
    if (!rc)
        rc = check_loss(p, slot, task, loss->cause, loss->demand, error);
    if (rc)
        return rc;
    p->partition->tracks[task].rows[slot].failures = loss->failures;
    p->ledger->number = (uint32_t)loss->demand;
    dray__lose(p->table, p->partition, task, slot, (int32_t)loss->cause, loss->reason);
    if (loss->demand && p->table->generations != loss->demand)
        return dray__fail(error, DRAY_EFORMAT,
                          "partition %s, row %u: a loss without refill expected, found refill %llu",
                          p->partition->name, slot, (unsigned long long)loss->demand);
    return DRAY_OK;
}

static int do_decline(replay *p, const void *body, dray_error *error)
{
    const uint64_t *demand = body;
    for (const dray__demand *d = p->table->demands; d; d = d->next)
        if (d->id == *demand && d->partition != p->partition)
            return dray__fail(error, DRAY_EFORMAT, "refill %llu is of partition %s, found %s",
                              (unsigned long long)*demand, d->partition->name, p->partition->name);
    return dray__table_decline(p->table, *demand, error);
}

static int do_clear(replay *p, const void *body, dray_error *error)
{
    (void)body;
    if (p->record->owner > p->table->generations)
        return dray__fail(error, DRAY_EFORMAT,
                          "a partition of generation 1 to %u expected, found %u",
                          p->table->generations, p->record->owner);
    if (!p->partition) /* the partition was cleared when a checkpoint covered its commits */
        return DRAY_OK;
    return dray__table_clear(p->table, p->partition->name, error);
}

static int do_end(replay *p, const void *body, dray_error *error)
{
    (void)body, (void)error;
    dray__table_end(p->table);
    return DRAY_OK;
}

static int do_done(replay *p, const void *body, dray_error *error)
{
    (void)p, (void)body, (void)error;
    return DRAY_OK;
}

static int do_start(replay *p, const void *body, dray_error *error)
{
    (void)body, (void)error;
    p->table->restarts++;
    return DRAY_OK;
}

static int do_cover(replay *p, const void *body, dray_error *error)
{
    return dray__table_cover(p->table, body, error);
}

static int do_resume(replay *p, const void *body, dray_error *error)
{
    return dray__table_resume(p->table, body, error);
}

static int do_admit(replay *p, const void *body, dray_error *error)
{
    const dray__admission *admission = body;
    int rc = dray__admission_check(p->table, admission, error);
    if (!rc)
        p->table->admission = *admission;
    return rc;
}

static int define(dray__table *table, const dray__known_column *known, dray_error *error)
{
    const dray__new_column column = {.name = known->name, .spec = known->spec};
    int rc = dray__name_check(column.name, "column", error);
    if (!rc)
        rc = dray__spec_check(&column.spec, column.name, error);
    return rc ? rc : dray__table_define(table, &column, error);
}

/* Checks that the counts of a state are not below the table's. */
static int check_state(const dray__table *table, const dray__state_record *state, dray_error *error)
{
    uint32_t generations = state->generations, epoch = state->epoch;
    uint64_t seq = state->commit_seq, resumed = state->resumed_seq;
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

static int do_state(replay *p, const void *body, dray_error *error)
{
    const dray__state_record *state = body;
    dray__table *table = p->table;
    int rc = check_state(table, state, error);
    if (!rc)
        rc = dray__admission_check(table, &state->admission, error);
    for (uint32_t i = 0; i < state->column_count && !rc; i++)
        rc = define(table, &state->columns[i], error);
    for (uint32_t i = 0; i < state->cleared_count && !rc; i++) {
        const dray__cleared *cleared = &state->cleared[i];
        rc = dray__name_check(cleared->name, "cleared partition", error);
        if (!rc)
            rc = dray__table_add_former(table, cleared->name, cleared->finished, error);
    }
    if (!rc)
        rc = dray__keyed_restore(table, state->kept, state->kept_count, state->generations, error);
    if (!rc)
        rc = dray__ledger_recall(p->ledger, state->counted, state->counted_count, error);
    if (rc)
        return rc;
    if (state->space)
        p->ledger->former_space = state->space;
    table->generations = state->generations;
    table->epoch = state->epoch;
    table->commit_seq = state->commit_seq;
    table->resumed_seq = state->resumed_seq;
    table->ended = state->ended;
    table->admission = state->admission;
    return DRAY_OK;
}

static int do_space(replay *p, const void *body, dray_error *error)
{
    const uint64_t *space = body;
    if (!*space || !p->table->objects)
        return dray__fail(error, DRAY_EFORMAT,
                          "a queue of a store and its space expected, found %s",
                          *space ? "a queue of shared memory" : "space 0");
    p->ledger->former_space = *space;
    return DRAY_OK;
}

static int do_put(replay *p, const void *body, dray_error *error)
{
    const dray__keyed_record *record = body;
    const dray__putting *m = &record->put;
    int rc = check_number(p, p->record->owner, error);
    if (!rc && (!record->generation || record->generation >= p->record->owner))
        rc = dray__fail(error, DRAY_EFORMAT, "a partition older than put %u expected, found %u",
                        p->record->owner, record->generation);
    const dray__content content = {.columns = m->columns, .column_count = m->column_count};
    if (!rc)
        rc = place_columns(p, &content, m->rows, error);
    if (!rc)
        rc = dray__keyed_again(p->table, p->ledger->reader, record, p->record->owner, error);
    if (rc)
        return rc;
    p->table->generations = p->record->owner;
    for (uint32_t i = 0; p->record->missing && i < m->column_count; i++) {
        dray__chunk *chunk = dray__idmap_get(&p->table->chunks, m->columns[i].extent.chunk);
        if (chunk)
            chunk->lost = true;
    }
    if (p->record->missing)
        dray__place_close(&p->ledger->own); /* nothing else is put in there */
    const dray__told told = {m->ticket, 0, p->record->owner};
    return dray__ledger_remember(p->ledger, record->identity, &told, error);
}

/* Repeats a DROP, TAKE or RESET of a keyed partition, which is the record's owner. */
static int do_used(replay *p, const void *body, dray_error *error)
{
    const dray__used_record *record = body;
    dray__keyed *keyed = p->table->keyed;
    while (keyed && keyed->generation != p->record->owner)
        keyed = keyed->next;
    if (!keyed || record->rows.key_count)
        return dray__fail(error, DRAY_EFORMAT,
                          "addresses in a keyed partition that is there expected, found generation "
                          "%u, %u keys",
                          p->record->owner, record->rows.key_count);
    dray__ledger_uncount(p->ledger, p->record->owner);
    char name[DRAY__WORD_MAX + 1]; /* dropping may end the partition */
    snprintf(name, sizeof name, "%s", keyed->name);
    bool take = p->record->kind == DRAY__RECORD_TAKE, all = !record->rows.at_count;
    const dray__getting want = {
        .partition = name, .named = record->rows, .task = take ? record->task : ""};
    dray__picked picked;
    int rc = DRAY_OK;
    if (take ? all : !all && p->record->kind == DRAY__RECORD_RESET)
        rc = dray__fail(error, DRAY_EFORMAT, "%s expected, found %u", take ? "rows" : "no rows",
                        record->rows.at_count);
    if (!rc && !all)
        rc = dray__keyed_pick(p->table, &want, &p->arena, &picked, error);
    if (!rc && p->record->kind == DRAY__RECORD_DROP)
        rc = dray__keyed_drop(p->table, name, &record->rows, error);
    else if (!rc)
        rc = take ? dray__keyed_consume(p->table, &picked, record->task, error)
                  : dray__keyed_reset(p->table, name, record->task, error);
    return rc == DRAY_EAGAIN || rc == DRAY_ESTALE ? (error->code = DRAY_EFORMAT) : rc;
}

static int do_open(replay *p, const void *body, dray_error *error)
{
    (void)body;
    return dray__fail(error, DRAY_EFORMAT, "queue %s: one opening expected, found another one",
                      p->table->name);
}

/* The owner of a record: none, an existing partition, or one that may not exist (yet, or any more).
 */
enum { NOBODY, PARTITION, ANY_PARTITION };

static const struct {
    int (*replay)(replay *, const void *body, dray_error *);
    int owner;
} kinds[DRAY__RECORD_KINDS] = {
    [DRAY__RECORD_OPEN] = {do_open, NOBODY},
    [DRAY__RECORD_START] = {do_start, NOBODY},
    [DRAY__RECORD_STATE] = {do_state, NOBODY},
    [DRAY__RECORD_INSERT] = {do_insert, ANY_PARTITION},
    [DRAY__RECORD_SEAL] = {do_seal, PARTITION},
    [DRAY__RECORD_COMMIT] = {do_commit, PARTITION},
    [DRAY__RECORD_LOSS] = {do_loss, PARTITION},
    [DRAY__RECORD_DECLINE] = {do_decline, PARTITION},
    [DRAY__RECORD_CLEAR] = {do_clear, ANY_PARTITION},
    [DRAY__RECORD_END] = {do_end, NOBODY},
    [DRAY__RECORD_COVER] = {do_cover, NOBODY},
    [DRAY__RECORD_RESUME] = {do_resume, NOBODY},
    [DRAY__RECORD_ADMIT] = {do_admit, NOBODY},
    [DRAY__RECORD_SPACE] = {do_space, NOBODY},
    [DRAY__RECORD_PUT] = {do_put, ANY_PARTITION},
    [DRAY__RECORD_DROP] = {do_used, ANY_PARTITION},
    [DRAY__RECORD_TAKE] = {do_used, ANY_PARTITION},
    [DRAY__RECORD_RESET] = {do_used, ANY_PARTITION},
    [DRAY__RECORD_DONE] = {do_done, NOBODY},
};

static int check_kind(replay *p, dray_error *error)
{
    const dray__journal_record *record = p->record;
    if (record->kind >= DRAY__RECORD_KINDS || !kinds[record->kind].replay)
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

static int take_record(replay *p, dray_error *error)
{
    const dray__record_kind *kind = &dray__record_kinds[p->record->kind];
    dray__record_body body;
    dray__asker asker = {0};
    int rc = DRAY_OK;
    memset(&body, 0, sizeof body);
    if (kind->fields)
        dray__get_fields(&p->r, &p->arena, kind->fields, &body);
    if (kind->asked)
        dray__get_fields(&p->r, NULL, &dray__asker_fields, &asker);
    if ((!kind->bytes || p->r.failed) && p->record->kind != DRAY__RECORD_OPEN)
        rc = dray__reader_finish(&p->r, "record", error);
    if (!rc)
        rc = kinds[p->record->kind].replay(p, &body, error);
    const dray__told told = {.ticket = asker.ticket};
    return rc ? rc : dray__ledger_remember(p->ledger, asker.identity, &told, error);
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
        dray__place_close(&ledger->own);
    rc = take_record(&p, error);
    close_filled(ledger);
    ledger->number = 0;
    dray__arena_free(&p.arena);
    return rc ? dray__fail_prefix(error, rc, "%s: ", dray__record_kinds[record->kind].name) : rc;
}

int dray__replay_begin(dray__ledger *ledger, dray_error *error)
{
    ledger->replaying = true;
    ledger->reader = dray__client_new(ledger->table, 0, "journal", error);
    if (!ledger->reader)
        return DRAY_ENOMEM;
    ledger->own.holder.owner = ledger->reader->id;
    ledger->own.made = add_chunk;
    ledger->own.filled = close_chunk;
    ledger->own.user = ledger;
    return DRAY_OK;
}

void dray__replay_end(dray__ledger *ledger)
{
    if (ledger->reader) {
        dray__place_close(&ledger->own);
        close_filled(ledger);
        dray__client_end(ledger->table, ledger->reader, false, "");
    }
    free(ledger->filled);
    ledger->filled = NULL;
    ledger->filled_capacity = 0;
    dray__keyed_list_free(ledger->table);
    ledger->reader = NULL;
    ledger->replaying = false;
}
