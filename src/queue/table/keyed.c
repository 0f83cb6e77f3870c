/* Keyed partitions: their rows, and the requests that read, consume and drop them. */
#include "queue/table/keyed_inside.h"

#include "base/error.h"
#include "queue/journal/ledger.h"

#include <stdlib.h>
#include <string.h>

#define GET_COLUMNS_MAX 512u /* that are named */

/* ---- rows ------------------------------------------------------------------------------------ */

dray__keyed *dray__table_keyed(const dray__table *table, const char *name)
{
    dray__keyed *p = table->keyed;
    while (p && strcmp(p->name, name) != 0)
        p = p->next;
    return p;
}

uint64_t dray__key_hash(const char *key)
{
    uint64_t hash = dray__name_hash(key);
    return hash + !hash;
}

uint32_t dray__key_find(const dray__keyed *p, const char *key, uint64_t hash)
{
    uint32_t slot = (uint32_t)(uintptr_t)dray__idmap_get(&p->keys, hash) - 1;
    while (slot != DRAY__NONE && strcmp(p->rows[slot].key, key) != 0)
        slot = p->rows[slot].next;
    return slot;
}

bool dray__keyed_is_row(const dray__keyed *p, const dray__row_at *at)
{
    return at->generation && at->slot < p->end && p->rows[at->slot].generation == at->generation;
}

void dray__keyed_changed(dray__table *table, dray__keyed *p)
{
    p->change = ++table->changes;
    table->named = true;
}

uint64_t dray__keyed_change(const dray__table *table, const char *name)
{
    const dray__keyed *p = dray__table_keyed(table, name);
    return p ? p->change + 1 : table->ended;
}

void dray__keyed_count(dray__table *table, dray__keyed *p, int64_t bytes)
{
    p->memory += (uint64_t)bytes;
    table->memory += (uint64_t)bytes;
}

/* Returns the memory of a row without values. */
static uint64_t row_memory(const char *key)
{
    return key ? strlen(key) + 1 : 0;
}

uint64_t dray__keyed_arrays(const dray__keyed *p, uint64_t rows, uint64_t keys, uint64_t columns)
{
    return sizeof *p + strlen(p->name) + 1 + rows * sizeof *p->rows +
           keys * sizeof *p->keys.entries + columns * (sizeof *p->columns + sizeof *p->column_rows);
}

/* Counts the memory of the arrays, which do not shrink when rows are dropped. */
static void count_arrays(dray__table *table, dray__keyed *p)
{
    uint64_t now = dray__keyed_arrays(p, p->capacity, p->keys.capacity, p->column_capacity);
    dray__keyed_count(table, p, (int64_t)(now - p->arrays));
    p->arrays = now;
}

static int link_key(dray__keyed *p, uint32_t slot, const char *key, uint64_t hash,
                    dray_error *error)
{
    dray__keyed_row *row = &p->rows[slot];
    uint32_t first = (uint32_t)(uintptr_t)dray__idmap_get(&p->keys, hash) - 1;
    row->key = strdup(key);
    if (!row->key || !dray__idmap_set(&p->keys, hash, (void *)(uintptr_t)(slot + UINT64_C(1)))) {
        free(row->key);
        row->key = NULL;
        return dray__nomem(error);
    }
    row->hash = hash;
    row->next = first;
    return DRAY_OK;
}

static void unlink_key(dray__keyed *p, uint32_t slot)
{
    const dray__keyed_row *row = &p->rows[slot];
    uint32_t at = (uint32_t)(uintptr_t)dray__idmap_get(&p->keys, row->hash) - 1;
    if (at != slot) {
        while (p->rows[at].next != slot)
            at = p->rows[at].next;
        p->rows[at].next = row->next;
    } else if (row->next == DRAY__NONE) {
        dray__idmap_remove(&p->keys, row->hash);
    } else { /* the entry exists already: nothing is allocated */
        dray__idmap_set(&p->keys, row->hash, (void *)(uintptr_t)(row->next + UINT64_C(1)));
    }
}

int dray__keyed_add_row(dray__table *table, dray__keyed *p, uint32_t slot, const char *key,
                        uint32_t generation, uint32_t *out, dray_error *error)
{
    bool anywhere = slot == DRAY__NONE;
    if (anywhere)
        slot = p->free != DRAY__NONE ? p->free : p->end;
    uint32_t capacity = p->capacity ? p->capacity : 64;
    while (capacity <= slot)
        capacity *= 2;
    int rc = dray__grow(&p->rows, p->capacity, capacity, sizeof *p->rows, error);
    if (rc)
        return rc;
    p->capacity = capacity > p->capacity ? capacity : p->capacity;
    uint32_t next = p->rows[slot].next;
    rc = key ? link_key(p, slot, key, dray__key_hash(key), error) : DRAY_OK;
    if (rc)
        return rc;
    if (anywhere && slot == p->free)
        p->free = next;
    else if (slot >= p->end)
        p->end = slot + 1;
    p->rows[slot].generation = generation;
    p->row_count++;
    table->rows++;
    dray__keyed_count(table, p, (int64_t)row_memory(key));
    count_arrays(table, p);
    *out = slot;
    return DRAY_OK;
}

static void leave_cell(dray__table *table, dray__keyed *p, dray__keyed_row *row, uint32_t column)
{
    dray__keyed_cell old = row->cells[column];
    row->cells[column] = (dray__keyed_cell){0};
    p->column_rows[column]--;
    dray__put_leave(table, old.put, old.column);
}

void dray__keyed_drop_row(dray__table *table, dray__keyed *p, uint32_t slot)
{
    dray__keyed_row *row = &p->rows[slot];
    for (uint32_t c = 0; c < row->cell_count; c++)
        if (row->cells[c].put)
            leave_cell(table, p, row, c);
    if (row->key)
        unlink_key(p, slot);
    dray__keyed_count(
        table, p,
        -(int64_t)(row_memory(row->key) + row->note_size + row->cell_count * sizeof *row->cells));
    free(row->key);
    free(row->note);
    free(row->cells);
    *row = (dray__keyed_row){.next = p->free};
    p->free = slot;
    p->row_count--;
    table->rows--;
    table->freed = true;
}

/* ---- partitions ------------------------------------------------------------------------------ */

dray__keyed *dray__keyed_new(const char *name)
{
    dray__keyed *p = calloc(1, sizeof *p);
    if (!p || !(p->name = strdup(name))) {
        free(p);
        return NULL;
    }
    p->free = DRAY__NONE;
    return p;
}

void dray__keyed_free_one(dray__table *table, dray__keyed *p)
{
    for (uint32_t slot = 0; slot < p->end; slot++)
        if (p->rows[slot].generation)
            dray__keyed_drop_row(table, p, slot);
    for (uint32_t t = 0; t < p->task_count; t++)
        free(p->tasks[t]);
    dray__keyed_count(table, p, -(int64_t)p->memory);
    dray__idmap_free(&p->keys);
    free(p->rows);
    free(p->columns);
    free(p->column_rows);
    free(p->name);
    free(p);
}

/* Removes the partition when it has no rows. */
void dray__keyed_end(dray__table *table, dray__keyed *p)
{
    dray__keyed **at = &table->keyed;
    while (*at != p)
        at = &(*at)->next;
    *at = p->next;
    dray__keyed_free_one(table, p);
    dray__quota_freed(table);
}

void dray__keyed_free(dray__table *table)
{
    while (table->keyed)
        dray__keyed_end(table, table->keyed);
}

void dray__keyed_link(dray__table *table, dray__keyed *p)
{
    dray__keyed **at = &table->keyed; /* in order of creation */
    while (*at)
        at = &(*at)->next;
    *at = p;
}

/* Returns the partition's index of the table's column, or NONE. */
static uint32_t find_column(const dray__keyed *p, uint32_t column)
{
    uint32_t c = 0;
    while (c < p->column_count && p->columns[c] != column)
        c++;
    return c < p->column_count ? c : DRAY__NONE;
}

int dray__keyed_add_column(dray__table *table, dray__keyed *p, uint32_t column, uint32_t *out,
                           dray_error *error)
{
    *out = find_column(p, column);
    if (*out != DRAY__NONE)
        return DRAY_OK;
    uint32_t capacity = p->column_capacity;
    int rc =
        dray__grow_full(&p->column_rows, p->column_count, &capacity, sizeof *p->column_rows, error);
    if (!rc)
        rc = dray__grow(&p->columns, p->column_capacity, capacity, sizeof *p->columns, error);
    if (rc)
        return rc;
    p->column_capacity = capacity;
    *out = p->column_count++;
    p->columns[*out] = column;
    p->column_rows[*out] = 0;
    count_arrays(table, p);
    return DRAY_OK;
}

int dray__named_check(const char *what, const char *partition, const dray__named *named,
                      uint32_t rows, dray_error *error)
{
    int rc = DRAY_OK;
    if ((named->key_count && named->at_count) || (named->key_count && named->key_count != rows) ||
        (named->at_count && named->at_count != rows))
        return dray__fail(error, DRAY_EINVALID,
                          "%s %s: %u rows by keys or by addresses expected, found %u keys, %u "
                          "addresses",
                          what, partition, rows, named->key_count, named->at_count);
    for (uint32_t i = 0; !rc && i < named->key_count; i++)
        rc = dray__name_check(named->keys[i], "key", error);
    return rc;
}

/* ---- reading --------------------------------------------------------------------------------- */

static uint32_t find_task(const dray__keyed *p, const char *task)
{
    uint32_t t = 0;
    while (t < p->task_count && strcmp(p->tasks[t], task) != 0)
        t++;
    return t < p->task_count ? t : DRAY__NONE;
}

static const dray__keyed_cell *cell_of(const dray__keyed *p, uint32_t slot, uint32_t column)
{
    const dray__keyed_row *row = &p->rows[slot];
    return column < row->cell_count && row->cells[column].put ? &row->cells[column] : NULL;
}

static bool has_all(const dray__picked *picked, uint32_t slot, uint32_t *missing)
{
    for (*missing = 0; *missing < picked->column_count; ++*missing)
        if (!cell_of(picked->partition, slot, picked->columns[*missing]))
            return false;
    return true;
}

static int pick_columns(const dray__table *table, const dray__getting *m, dray__arena *arena,
                        dray__picked *out, dray_error *error)
{
    const dray__keyed *p = out->partition;
    uint32_t count = m->all_columns ? p->column_count : m->column_count;
    out->columns = dray__arena_get(arena, (count + 1u) * sizeof *out->columns);
    out->names = dray__arena_get(arena, (count + 1u) * sizeof *out->names);
    if (!out->columns || !out->names)
        return dray__nomem(error);
    for (uint32_t c = 0; c < count; c++) {
        uint32_t number = 0, column = c;
        if (m->all_columns && !p->column_rows[c]) /* the rows that had it were dropped */
            continue;
        if (!m->all_columns)
            column = dray__map_get(&table->column_names, m->columns[c], &number)
                         ? find_column(p, number)
                         : DRAY__NONE;
        out->names[out->column_count] =
            m->all_columns ? table->columns[p->columns[c]].name : m->columns[c];
        out->columns[out->column_count++] = column;
    }
    return DRAY_OK;
}

/* Picks the named rows, in their order. */
static int pick_named(const dray__getting *m, uint32_t task, dray__picked *out, dray_error *error)
{
    dray__keyed *p = out->partition;
    uint32_t count = m->named.key_count + m->named.at_count, missing = 0;
    for (uint32_t i = 0; i < count; i++) {
        const dray__row_at *at = m->named.at_count ? &m->named.at[i] : NULL;
        uint32_t slot = DRAY__NONE;
        if (at && dray__keyed_is_row(p, at))
            slot = at->slot;
        else if (!at)
            slot = dray__key_find(p, m->named.keys[i], dray__key_hash(m->named.keys[i]));
        if (slot == DRAY__NONE && m->partial)
            continue;
        if (slot == DRAY__NONE && at)
            return dray__fail(error, DRAY_ESTALE,
                              "get of %s: row %u of generation %u is not there any more", p->name,
                              at->slot, at->generation);
        if (slot == DRAY__NONE)
            return dray__fail(error, DRAY_EAGAIN, "get of %s: there is no key %s", p->name,
                              m->named.keys[i]);
        if (task != DRAY__NONE && (p->rows[slot].consumed >> task & 1)) {
            if (m->partial)
                continue;
            return dray__fail(error, DRAY_ESTALE, "get of %s: row %u was consumed by %s before",
                              p->name, slot, m->task);
        }
        if (!m->partial && !has_all(out, slot, &missing))
            return dray__fail(error, DRAY_EAGAIN, "get of %s: row %u has no column %s", p->name,
                              slot, m->all_columns ? "that others have" : m->columns[missing]);
        out->slots[out->count++] = slot;
    }
    return DRAY_OK;
}

static int pick_all(const dray__getting *m, uint32_t task, dray__picked *out, dray_error *error)
{
    const dray__keyed *p = out->partition;
    uint32_t missing = 0, ready = 0;
    bool chooses = *m->task != 0; /* true for a consumer's rows; else rows may be missing */
    for (uint32_t slot = 0; slot < p->end; slot++) {
        if (!p->rows[slot].generation ||
            (task != DRAY__NONE && (p->rows[slot].consumed >> task & 1)))
            continue;
        bool whole = m->partial || has_all(out, slot, &missing);
        if (!whole && !chooses)
            return dray__fail(error, DRAY_EAGAIN, "get of %s: row %u has no column %s", p->name,
                              slot, m->all_columns ? "that others have" : m->columns[missing]);
        if (!whole)
            continue;
        out->slots[out->count++] = slot;
        ready++;
        if (m->count && ready == m->count)
            break;
    }
    if (chooses && m->count > ready && !m->up_to)
        return dray__fail(error, DRAY_EAGAIN, "get of %s for %s: %u rows expected, found %u",
                          p->name, m->task, m->count, ready);
    return DRAY_OK;
}

static int check_get(const dray__getting *m, dray_error *error)
{
    int rc = dray__name_check(m->partition, "partition", error);
    if (!rc && m->column_count > GET_COLUMNS_MAX)
        rc = dray__fail(error, DRAY_EINVALID, "get of %s: at most %u columns expected, found %u",
                        m->partition, GET_COLUMNS_MAX, m->column_count);
    if (!rc)
        rc = dray__named_check("get of", m->partition, &m->named,
                               m->named.key_count + m->named.at_count, error);
    if (!rc && *m->task)
        rc = dray__name_check(m->task, "task", error);
    for (uint32_t c = 0; !rc && c < m->column_count; c++)
        rc = dray__name_check(m->columns[c], "column", error);
    for (uint32_t c = 0; !rc && c < m->column_count; c++)
        for (uint32_t d = 0; !rc && d < c; d++)
            if (strcmp(m->columns[c], m->columns[d]) == 0)
                rc = dray__fail(error, DRAY_EINVALID, "get of %s: column %s is named twice",
                                m->partition, m->columns[c]);
    return rc;
}

int dray__keyed_pick(dray__table *table, const dray__getting *m, dray__arena *arena,
                     dray__picked *out, dray_error *error)
{
    *out = (dray__picked){0};
    int rc = check_get(m, error);
    if (rc)
        return rc;
    if (dray__table_partition(table, m->partition))
        return dray__fail(error, DRAY_EINVALID,
                          "get of %s: a partition of rows with keys expected, found one whose rows "
                          "are claimed",
                          m->partition);
    dray__keyed *p = out->partition = dray__table_keyed(table, m->partition);
    if (!p && m->named.at_count && !m->partial)
        return dray__fail(error, DRAY_ESTALE, "get of %s: its rows are not there any more",
                          m->partition);
    if (!p)
        return dray__fail(error, table->ended ? DRAY_EEND : DRAY_EAGAIN,
                          "get of %s: there is no partition of that name%s", m->partition,
                          table->ended ? ", and the queue has ended" : "");
    uint32_t named = m->named.key_count + m->named.at_count;
    uint32_t task = *m->task ? find_task(p, m->task) : DRAY__NONE;
    out->slots = dray__arena_get(arena, (named ? named : p->row_count) * sizeof *out->slots);
    rc = out->slots ? pick_columns(table, m, arena, out, error) : dray__nomem(error);
    if (!rc)
        rc = named ? pick_named(m, task, out, error) : pick_all(m, task, out, error);
    if (!rc && !out->count)
        rc =
            dray__fail(error, DRAY_EAGAIN, "get of %s: no such rows, of %u", p->name, p->row_count);
    return rc;
}

/* Counts the memory of the claim, so that batches that are never released are limited, too. */
static int count_claim(dray__table *table, dray__claim *claim, uint32_t pins, dray_error *error)
{
    uint64_t memory =
        sizeof *claim + 2 * sizeof(struct dray__idmap_entry) + pins * sizeof *claim->pins;
    if (dray__quota_rows(table, 0, memory, error))
        return DRAY_EFULL;
    claim->memory = memory;
    table->memory += memory;
    return DRAY_OK;
}

/* Pins every put that has a cell that was asked for, once each. */
int dray__keyed_pin(dray__table *table, dray__client *client, uint32_t ticket, dray__picked *picked,
                    dray_error *error)
{
    const dray__keyed *p = picked->partition;
    const dray__claim made = {.read = true, .count = picked->count, .hold_until = INT64_MAX};
    uint64_t mark = ++table->marks;
    uint32_t capacity = 0;
    if (!ticket || dray__table_find_claim(table, client, ticket))
        return dray__fail(error, DRAY_EINVALID, "get of %s: ticket %u is in use", p->name, ticket);
    int rc = dray__claim_add(table, client, ticket, &made, &picked->claim, error);
    if (rc)
        return rc;
    dray__claim *claim = picked->claim;
    for (uint32_t c = 0; c < picked->column_count; c++) {
        for (uint32_t i = 0; i < picked->count; i++) {
            const dray__keyed_cell *cell = cell_of(p, picked->slots[i], picked->columns[c]);
            if (cell && cell->put->columns[cell->column].chunk->lost)
                rc = dray__fail(error, DRAY_EGONE,
                                "get of %s: row %u lost its bytes of column %s with their keeper",
                                p->name, picked->slots[i],
                                table->columns[p->columns[picked->columns[c]]].name);
            else if (!cell || cell->put->mark == mark)
                continue;
            if (!rc)
                rc = dray__grow_full(&claim->pins, claim->pin_count, &capacity, sizeof(dray__put *),
                                     error);
            if (rc) {
                dray__claim_release(table, client, ticket);
                return rc;
            }
            cell->put->mark = mark;
            cell->put->mark_index = claim->pin_count;
            cell->put->pins++;
            claim->pins[claim->pin_count++] = cell->put;
        }
    }
    rc = count_claim(table, claim, capacity, error);
    if (rc) {
        dray__claim_release(table, client, ticket);
        return dray__fail_prefix(error, rc, "get of %s (let go of batches): ", p->name);
    }
    return DRAY_OK;
}

static void write_used(dray__table *table, const dray__keyed *p, uint16_t kind, const char *task,
                       const uint32_t *slots, uint32_t count)
{
    dray__row_at *at = NULL;
    if (!dray__ledger_keeps(table->ledger))
        return;
    if (count && !(at = calloc(count, sizeof *at))) {
        dray__ledger_lose(table->ledger);
        return;
    }
    for (uint32_t i = 0; i < count; i++)
        at[i] = (dray__row_at){.slot = slots[i], .generation = p->rows[slots[i]].generation};
    const dray__used_record body = {.task = task, .rows = {.at = at, .at_count = count}};
    dray__ledger_write(table->ledger, kind, p->generation, &body);
    dray__ledger_uncount(table->ledger, p->generation); /* the STATE record has it */
    free(at);
}

int dray__keyed_add_task(dray__keyed *p, const char *task, uint32_t *out, dray_error *error)
{
    *out = find_task(p, task);
    if (*out != DRAY__NONE)
        return DRAY_OK;
    if (p->task_count == DRAY__TASKS_MAX)
        return dray__fail(error, DRAY_EFULL, "partition %s: task %s would be more than %u", p->name,
                          task, DRAY__TASKS_MAX);
    p->tasks[p->task_count] = strdup(task);
    if (!p->tasks[p->task_count])
        return dray__nomem(error);
    *out = p->task_count++;
    return DRAY_OK;
}

int dray__keyed_consume(dray__table *table, const dray__picked *picked, const char *task,
                        dray_error *error)
{
    dray__keyed *p = picked->partition;
    uint32_t t;
    int rc = dray__keyed_add_task(p, task, &t, error);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < picked->count; i++)
        p->rows[picked->slots[i]].consumed |= UINT64_C(1) << t;
    write_used(table, p, DRAY__RECORD_TAKE, task, picked->slots, picked->count);
    return DRAY_OK;
}

int dray__keyed_reset(dray__table *table, const char *partition, const char *task,
                      dray_error *error)
{
    int rc = dray__name_check(partition, "partition", error);
    if (!rc && *task)
        rc = dray__name_check(task, "task", error);
    dray__keyed *p = rc ? NULL : dray__table_keyed(table, partition);
    uint32_t t = p && *task ? find_task(p, task) : DRAY__NONE;
    if (rc || !p || (*task && t == DRAY__NONE))
        return rc;
    for (uint32_t slot = 0; slot < p->end; slot++)
        p->rows[slot].consumed &= *task ? ~(UINT64_C(1) << t) : 0;
    write_used(table, p, DRAY__RECORD_RESET, task, NULL, 0);
    dray__keyed_changed(table, p);
    return DRAY_OK;
}

int dray__keyed_drop(dray__table *table, const char *partition, const dray__named *named,
                     dray_error *error)
{
    uint32_t count = named->key_count + named->at_count, found = 0;
    int rc = dray__name_check(partition, "partition", error);
    if (!rc)
        rc = dray__named_check("clear rows of", partition, named, count, error);
    dray__keyed *p = rc ? NULL : dray__table_keyed(table, partition);
    if (rc || !p)
        return rc;
    uint32_t *slots = calloc(count + 1u, sizeof *slots);
    if (!slots)
        return dray__nomem(error);
    uint64_t mark = ++table->marks;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = DRAY__NONE;
        if (named->at_count && dray__keyed_is_row(p, &named->at[i]))
            slot = named->at[i].slot;
        else if (named->key_count)
            slot = dray__key_find(p, named->keys[i], dray__key_hash(named->keys[i]));
        if (slot == DRAY__NONE || p->rows[slot].mark == mark)
            continue;
        p->rows[slot].mark = mark;
        slots[found++] = slot;
    }
    if (found || !count) {
        write_used(table, p, DRAY__RECORD_DROP, "", slots, found);
        dray__keyed_changed(table, p); /* a waiting request may ask for the remaining rows */
    }
    for (uint32_t i = 0; i < found; i++)
        dray__keyed_drop_row(table, p, slots[i]);
    free(slots);
    if (!count)
        rc = dray__table_add_former(table, partition, 0, error);
    if (!count || !p->row_count)
        dray__keyed_end(table, p);
    else if (found)
        dray__quota_freed(table);
    return rc;
}
