/* Rows that are lost: they die, or their slots are given to other samples. */
#include "queue/table/table_inside.h"

#include "base/error.h"
#include "base/words.h"
#include "queue/journal/ledger.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void record_death(dray__table *table, dray__partition *p, const dray__death *death)
{
    (void)table;
    if (p->death_count == p->death_capacity) {
        uint32_t capacity = p->death_capacity ? 64 : 4;
        if (capacity == p->death_capacity ||
            dray__grow(&p->deaths, p->death_capacity, capacity, sizeof *p->deaths, NULL))
            return;
        p->death_capacity = capacity;
    }
    p->deaths[p->death_count++] = *death;
}

static void kill_row(dray__table *table, dray__partition *p, uint32_t task, uint32_t slot)
{
    dray__bit_set(p->dead, slot);
    p->dead_count++;
    p->tracks[task].dead_count++;
    for (uint32_t t = 0; t < table->task_count; t++) {
        if (dray__bit_get(p->tracks[t].done, slot))
            continue;
        p->tracks[t].cut_count -=
            dray__is_partial(p, t, slot) && !dray__bit_get(p->tracks[t].taken, slot);
        p->tracks[t].settled_count++;
        p->tracks[t].taken_dead += dray__bit_get(p->tracks[t].taken, slot);
        dray__put_settled(table, p, t, slot);
    }
    table->dirty = ~UINT64_C(0); /* fewer rows are open, so claims of the last rows may be served */
    dray__refresh_all_tasks(table, p, slot / 64, true);
}

/* Takes the row out of the claims that hold it, because their commits would be of the old sample.
 */
static void take_from_claims(dray__table *table, dray__partition *p, uint32_t slot)
{
    uint64_t holders = 0;
    for (uint32_t t = 0; t < table->task_count; t++)
        dray__rounds_lose(table, p, t, slot);
    for (uint32_t t = 0; t < table->task_count; t++)
        if (dray__bit_get(p->tracks[t].taken, slot))
            holders |= UINT64_C(1) << t;
    for (dray__claim *claim = table->claims; claim && holders; claim = claim->next) {
        if (claim->partition != p || claim->state != DRAY__CLAIM_ACTIVE ||
            !(holders >> claim->task & 1))
            continue;
        for (uint32_t i = 0; i < claim->count; i++) {
            if (claim->slots[i] != slot)
                continue;
            claim->slots[i] = DRAY__NONE;
            if (!--claim->active)
                claim->state = DRAY__CLAIM_FAILED;
            dray__bit_clear(p->tracks[claim->task].taken, slot);
            p->tracks[claim->task].taken_count--;
            dray__count_cut(p, claim->task, slot, 1);
            dray__admission_note(table, claim->task, 0);
            holders &= ~(UINT64_C(1) << claim->task);
            break;
        }
    }
}

static void forget_columns(const dray__table *table, dray__partition *p, uint32_t slot)
{
    for (uint32_t w = 0; w <= table->task_count; w++) {
        if (!p->places[w] || p->places[w][slot].put == DRAY__NONE)
            continue;
        const dray__put *put = p->puts[p->places[w][slot].put];
        for (uint32_t c = 0; c < put->column_count; c++) {
            uint32_t column = put->columns[c].column;
            p->committed[column] -= dray__bit_get(p->columns[column], slot);
            dray__bit_clear(p->columns[column], slot);
        }
        p->places[w][slot] = (dray__place){DRAY__NONE, DRAY__NONE};
        if (w && p->earlier[w - 1])
            p->earlier[w - 1][slot] = DRAY__NONE;
    }
}

/* Clears the state of the row. */
static void vacate_row(dray__table *table, dray__partition *p, uint32_t slot)
{
    take_from_claims(table, p, slot);
    for (uint32_t t = 0; t < table->task_count; t++) {
        dray__track *track = &p->tracks[t];
        if (dray__bit_get(track->done, slot)) {
            dray__bit_clear(track->done, slot);
            track->done_count--;
            track->settled_count--;
            if (dray__provisional_end(p, t, slot))
                dray__put_settled(table, p, t, slot);
        } else {
            dray__count_cut(p, t, slot, -1);
            dray__put_settled(table, p, t, slot);
        }
        track->rows[slot].attempt = track->rows[slot].failures = 0;
        if (slot < track->open_from)
            track->open_from = slot;
    }
    forget_columns(table, p, slot);
    if (p->oldest)
        p->oldest[slot] = p->newest[slot] = 0;
    dray__bit_set(p->vacant, slot);
    p->vacant_count++;
    dray__refresh_all_tasks(table, p, slot / 64, true);
}

/* Returns true when the row is lost together with a row of its group that `task` lost. Rows that
 * the task has committed are counted already, and stay. */
static bool shares_fate(const dray__partition *p, uint32_t task, uint32_t slot)
{
    return !dray__bit_get(p->tracks[task].done, slot) && !dray__bit_get(p->dead, slot) &&
           !dray__bit_get(p->vacant, slot);
}

static bool trained(const dray__table *table, const dray__partition *p, uint32_t slot)
{
    for (uint64_t left = table->settings.provisional; left; left &= left - 1)
        if (dray__bit_get(p->tracks[__builtin_ctzll(left)].done, slot))
            return true;
    return false;
}

static dray__demand *demand_new(const dray__death *death, uint32_t count)
{
    dray__demand *demand = calloc(1, sizeof *demand);
    uint32_t *slots = calloc(count, sizeof *slots);
    if (!demand || !slots) {
        free(demand);
        free(slots);
        return NULL;
    }
    demand->slots = slots;
    demand->task = death->task;
    demand->failures = death->failures;
    demand->cause = death->cause;
    memcpy(demand->reason, death->reason, sizeof demand->reason);
    return demand;
}

static void ask(dray__table *table, dray__partition *p, dray__demand *demand)
{
    demand->id = dray__ledger_number(table);
    demand->partition = p;
    *table->demands_tail = demand;
    table->demands_tail = &demand->next;
    table->demanded = true;
    for (uint32_t i = 0; i < demand->count; i++)
        vacate_row(table, p, demand->slots[i]);
}

/* Corrects the admission's count when an accepted row is lost. */
static void note_drop(dray__table *table, const dray__partition *p, uint32_t slot)
{
    uint32_t task = table->admission.task;
    if (task == DRAY__NONE || dray__bit_get(p->tracks[task].done, slot))
        dray__admission_note(table, task, -1);
}

void dray__lose(dray__table *table, dray__partition *p, uint32_t task, uint32_t slot, int32_t cause,
                const char *reason)
{
    dray__group_range range = p->groups[p->group_of[slot]];
    if (table->settings.on_loss == DRAY_ON_LOSS_SHRINK_GROUP)
        range = (dray__group_range){slot, 1};
    dray__death death = {.slot = slot,
                         .generation = p->row_generations[slot],
                         .task = task,
                         .cause = cause,
                         .failures = p->tracks[task].rows[slot].failures};
    dray__take_text(death.reason, sizeof death.reason, reason); /* else no journal could be read */
    dray__demand *demand = NULL;
    const dray__ledger *ledger = table->ledger;
    bool died = ledger && ledger->replaying && !ledger->number; /* there was no memory then */
    if (table->settings.on_loss == DRAY_ON_LOSS_REFILL && trained(table, p, slot))
        range = (dray__group_range){slot, 1}; /* the step has trained it and needs no other */
    else if (table->settings.on_loss == DRAY_ON_LOSS_REFILL && !died &&
             table->generations < UINT32_MAX - 1) /* the last number */
        demand = demand_new(&death, range.count); /* without memory the rows die */
    death.refilled = demand != NULL;
    record_death(table, p, &death);
    for (uint32_t s = range.first; s < range.first + range.count; s++) {
        if (!shares_fate(p, task, s) || (s != slot && trained(table, p, s)))
            continue;
        p->lost[cause]++;
        table->lost[cause]++;
        note_drop(table, p, s);
        if (demand)
            demand->slots[demand->count++] = s;
        else
            kill_row(table, p, task, s);
    }
    if (demand)
        ask(table, p, demand);
    dray__ledger_loss(table->ledger, p, &death, demand ? demand->id : 0);
}

/* ---- demands --------------------------------------------------------------------------------- */

static void demand_free(dray__table *table, dray__demand **at)
{
    dray__demand *demand = *at;
    *at = demand->next;
    if (table->demands_tail == &demand->next)
        table->demands_tail = at;
    free(demand->slots);
    free(demand);
}

void dray__demands_clear(dray__table *table, const dray__partition *p)
{
    for (dray__demand **at = &table->demands; *at;) {
        if (!p || (*at)->partition == p)
            demand_free(table, at);
        else
            at = &(*at)->next;
    }
}

void dray__demands_let_go(dray__table *table, const dray__client *client)
{
    for (dray__demand *demand = table->demands; demand; demand = demand->next) {
        if (demand->holder != client)
            continue;
        demand->holder = NULL;
        table->demanded = true;
    }
}

int dray__table_demand(dray__table *table, dray__client *client, dray__demand **out,
                       dray_error *error)
{
    dray__demand *found = NULL;
    for (dray__demand *demand = table->demands; demand; demand = demand->next) {
        if (demand->holder == client) {
            *out = demand;
            return DRAY_OK;
        }
        if (!found && !demand->holder)
            found = demand;
    }
    if (found) {
        found->holder = client;
        *out = found;
        return DRAY_OK;
    }
    bool over = table->ended && !table->demands;
    for (uint32_t i = 0; over && i < table->partition_count; i++)
        for (uint32_t t = 0; over && t < table->task_count; t++)
            over = dray__finished(table->partitions[i], t);
    if (over)
        return dray__fail(error, DRAY_EEND, "queue %s has ended and every sample is settled",
                          table->name);
    return dray__fail(error, DRAY_EAGAIN, "no slot waits for another sample");
}

static dray__demand **find_demand(dray__table *table, uint64_t id)
{
    dray__demand **at = &table->demands;
    while (*at && (*at)->id != id)
        at = &(*at)->next;
    return at;
}

int dray__table_decline(dray__table *table, uint64_t id, dray_error *error)
{
    dray__demand **at = find_demand(table, id);
    if (!id || id > table->generations)
        return dray__fail(error, DRAY_ENOENT, "refill %llu: there never was one",
                          (unsigned long long)id);
    if (!*at) /* declined twice, or its partition is cleared */
        return DRAY_OK;
    dray__partition *p = (*at)->partition;
    dray__ledger_write(table->ledger, DRAY__RECORD_DECLINE, p->generation, &id);
    for (uint32_t i = 0; i < (*at)->count; i++) {
        dray__bit_clear(p->vacant, (*at)->slots[i]);
        p->vacant_count--;
        kill_row(table, p, (*at)->task, (*at)->slots[i]);
    }
    for (uint32_t i = 0; i < p->death_count; i++)
        for (uint32_t s = 0; s < (*at)->count; s++)
            if (p->deaths[i].slot == (*at)->slots[s])
                p->deaths[i].refilled = false;
    demand_free(table, at);
    table->demanded = true;
    return DRAY_OK;
}

static int check_refill(const dray__table *table, const dray__demand *demand,
                        const dray__new_rows *rows, dray_error *error)
{
    if (!demand)
        return dray__fail(error, rows->refill <= table->generations ? DRAY_EEXIST : DRAY_ENOENT,
                          "refill %llu of %s: it was answered, or its partition cleared",
                          (unsigned long long)rows->refill, rows->partition);
    if (strcmp(demand->partition->name, rows->partition) != 0 || demand->count != rows->rows)
        return dray__fail(error, DRAY_EINVALID,
                          "refill %llu: %u rows for partition %s expected, found %u for %s",
                          (unsigned long long)demand->id, demand->count, demand->partition->name,
                          rows->rows, rows->partition);
    return DRAY_OK;
}

/* Does not check the capacity: the rows are counted already, and a refill, which lets a partition
 * finish, must not be blocked. */
int dray__table_refill(dray__table *table, dray__client *client, const dray__new_rows *rows,
                       uint32_t *first_slot, uint32_t *generation, dray_error *error)
{
    dray__demand **at = find_demand(table, rows->refill), *demand = *at;
    uint64_t bytes = 0;
    int rc = dray__name_check(rows->partition, "partition", error);
    if (!rc)
        rc = check_refill(table, demand, rows, error);
    uint32_t items = rows->per_group ? 1 : rows->rows;
    if (!rc)
        rc = dray__put_check(table, client, -1, &rows->content, items, &bytes, error);
    dray__put *put = NULL;
    if (!rc)
        rc = dray__put_prepare(table, demand->partition, -1, &rows->content, items, &put, error);
    if (rc)
        return rc;
    dray__partition *p = demand->partition;
    for (uint32_t i = 0; i < demand->count; i++) {
        dray__bit_clear(p->vacant, demand->slots[i]);
        p->row_generations[demand->slots[i]] = (uint32_t)demand->id;
    }
    dray__admission_note(table, DRAY__NONE, demand->count);
    p->vacant_count -= demand->count;
    p->refilled += demand->count;
    table->refilled += demand->count;
    if (put)
        dray__put_apply(table, p, -1, put, demand->slots, 0, demand->count,
                        rows->per_group ? demand->count : 1, NULL);
    for (uint32_t i = 0; i < demand->count; i++)
        dray__refresh_all_tasks(table, p, demand->slots[i] / 64, false);
    *first_slot = demand->slots[0];
    *generation = p->generation;
    dray__ledger_insert(table->ledger, client, rows, p, *first_slot, put);
    demand_free(table, at);
    return DRAY_OK;
}

/* ---- a keeper that is gone ------------------------------------------------------------------- */

/* Finds a task that needs lost bytes of the row. With `unclaimed`, not one whose claim holds the
 * row: the claim's process may have read them already, and reports them if it finds them gone. */
static bool needs(const dray__table *table, const dray__partition *p, uint32_t slot, bool restoring,
                  bool unclaimed, uint32_t *task)
{
    for (uint32_t w = 0; w <= table->task_count; w++) {
        uint32_t at = DRAY__NONE;
        const dray__place *place = NULL;
        while (dray__next_place(p, (int)w - 1, slot, &at, &place)) {
            const dray__put *put = p->puts[place->put];
            uint64_t tasks = 0;
            for (uint32_t c = 0; c < put->column_count && put->restoring == restoring; c++)
                if (put->columns[c].chunk && put->columns[c].chunk->lost)
                    tasks |= table->columns[put->columns[c].column].readers | put->goes_on;
            for (; tasks; tasks &= tasks - 1) {
                *task = (uint32_t)__builtin_ctzll(tasks);
                const dray__track *track = &p->tracks[*task];
                if (!dray__bit_get(track->done, slot) &&
                    !(unclaimed && dray__bit_get(track->taken, slot)))
                    return true;
            }
        }
    }
    return false;
}

bool dray__needs_lost(const dray__table *table, const dray__partition *p, uint32_t slot,
                      uint32_t *task)
{
    return needs(table, p, slot, false, false, task);
}

bool dray__awaits_bytes(const dray__table *table, const dray__partition *p, uint32_t slot)
{
    uint32_t task;
    return !dray__bit_get(p->dead, slot) && !dray__bit_get(p->vacant, slot) &&
           needs(table, p, slot, true, false, &task);
}

static bool has_lost_put(const dray__partition *p)
{
    for (uint32_t i = 0; i < p->put_count; i++)
        for (uint32_t c = 0; p->puts[i] && c < p->puts[i]->column_count; c++)
            if (p->puts[i]->columns[c].chunk && p->puts[i]->columns[c].chunk->lost)
                return true;
    return false;
}

void dray__table_lose_bytes(dray__table *table)
{
    for (uint32_t i = 0; i < table->partition_count; i++) {
        dray__partition *p = table->partitions[i];
        uint32_t rows = has_lost_put(p) ? p->rows : 0, task;
        for (uint32_t slot = 0; slot < rows; slot++) {
            if (!dray__bit_get(p->dead, slot) && !dray__bit_get(p->vacant, slot) &&
                needs(table, p, slot, false, true, &task))
                dray__lose(table, p, task, slot, DRAY_LOSS_BYTES,
                           "the keeper of its host ended, and its bytes with it");
        }
    }
}

/* Marks the chunks from which the task reads the row as lost, unless their put was restored since
 * the claim. With `named`, only named chunks count. */
static void mark_row(const dray__table *table, const dray__claim *claim, uint32_t slot, bool named)
{
    const dray__partition *p = claim->partition;
    for (uint32_t w = 0; w <= table->task_count; w++) {
        uint32_t at = DRAY__NONE;
        const dray__place *place = NULL;
        while (dray__next_place(p, (int)w - 1, slot, &at, &place)) {
            const dray__put *put = p->puts[place->put];
            for (uint32_t c = 0; c < put->column_count && put->restored <= claim->restores; c++)
                if (put->columns[c].chunk && (!named || put->columns[c].chunk->named) &&
                    (table->columns[put->columns[c].column].readers | put->goes_on) >> claim->task &
                        1)
                    put->columns[c].chunk->lost = true;
        }
    }
}

/* Marks the named chunks of a put of rows with keys as lost. */
static void mark_named(const dray__put *put)
{
    for (uint32_t c = 0; c < put->column_count; c++)
        if (put->columns[c].chunk && put->columns[c].chunk->named)
            put->columns[c].chunk->lost = true;
}

static void set_named(const dray__table *table, const uint64_t *chunks, uint32_t count, bool named)
{
    for (uint32_t i = 0; i < count; i++) {
        dray__chunk *chunk = dray__idmap_get(&table->chunks, chunks[i]);
        if (chunk)
            chunk->named = named;
    }
}

void dray__claim_mark_lost(const dray__table *table, const dray__client *client, uint32_t ticket,
                           const uint32_t *items, uint32_t count, const uint64_t *chunks,
                           uint32_t chunk_count)
{
    const dray__claim *claim = dray__table_find_claim(table, client, ticket);
    bool active = claim && claim->state == DRAY__CLAIM_ACTIVE;
    if (!claim || !(active || claim->read) || count > claim->count)
        return; /* rows are never named twice */
    set_named(table, chunks, chunk_count, true);
    for (uint32_t i = 0; active && i < count; i++)
        if (items[i] < claim->count && claim->slots[items[i]] != DRAY__NONE)
            mark_row(table, claim, claim->slots[items[i]], chunk_count);
    for (uint32_t i = 0; claim->read && i < claim->pin_count; i++)
        mark_named(claim->pins[i]);
    set_named(table, chunks, chunk_count, false);
}
