/* Keyed partitions: what is put into their rows, read of them, and dropped. */
#include "queue/table/keyed.h"

#include "base/error.h"
#include "queue/journal/ledger.h"
#include "queue/table/table_inside.h"

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

static uint64_t hash_of(const char *key)
{
    uint64_t hash = dray__name_hash(key);
    return hash + !hash;
}

static uint32_t find_key(const dray__keyed *p, const char *key, uint64_t hash)
{
    uint32_t slot = (uint32_t)(uintptr_t)dray__idmap_get(&p->keys, hash) - 1;
    while (slot != DRAY__NONE && strcmp(p->rows[slot].key, key) != 0)
        slot = p->rows[slot].next;
    return slot;
}

static bool is_row(const dray__keyed *p, const dray__row_at *at)
{
    return at->generation && at->slot < p->end && p->rows[at->slot].generation == at->generation;
}

static void count_memory(dray__table *table, dray__keyed *p, int64_t bytes)
{
    p->memory += (uint64_t)bytes;
    table->memory += (uint64_t)bytes;
}

/* What a row takes here before anything is put into it. */
static uint64_t row_memory(const char *key)
{
    return sizeof(dray__keyed_row) +
           (key ? strlen(key) + 1 + 2 * sizeof(struct dray__idmap_entry) : 0);
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
    } else { /* it is there already: nothing is allocated */
        dray__idmap_set(&p->keys, row->hash, (void *)(uintptr_t)(row->next + UINT64_C(1)));
    }
}

/* In the slot, or (NONE) where there is room. key NULL: none. */
static int add_row(dray__table *table, dray__keyed *p, uint32_t slot, const char *key,
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
    rc = key ? link_key(p, slot, key, hash_of(key), error) : DRAY_OK;
    if (rc)
        return rc;
    if (anywhere && slot == p->free)
        p->free = next;
    else if (slot >= p->end)
        p->end = slot + 1;
    p->rows[slot].generation = generation;
    p->row_count++;
    table->rows++;
    count_memory(table, p, (int64_t)row_memory(key));
    *out = slot;
    return DRAY_OK;
}

static void leave_cell(dray__table *table, dray__keyed *p, dray__keyed_row *row, uint32_t column)
{
    dray__cell old = row->cells[column];
    row->cells[column] = (dray__cell){0};
    p->column_rows[column]--;
    dray__put_leave(table, old.put, old.column);
}

static void drop_row(dray__table *table, dray__keyed *p, uint32_t slot)
{
    dray__keyed_row *row = &p->rows[slot];
    for (uint32_t c = 0; c < row->cell_count; c++)
        if (row->cells[c].put)
            leave_cell(table, p, row, c);
    if (row->key)
        unlink_key(p, slot);
    count_memory(
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

static dray__keyed *partition_new(const char *name)
{
    dray__keyed *p = calloc(1, sizeof *p);
    if (!p || !(p->name = strdup(name))) {
        free(p);
        return NULL;
    }
    p->free = DRAY__NONE;
    return p;
}

static void partition_free(dray__table *table, dray__keyed *p)
{
    for (uint32_t slot = 0; slot < p->end; slot++)
        if (p->rows[slot].generation)
            drop_row(table, p, slot);
    for (uint32_t t = 0; t < p->task_count; t++)
        free(p->tasks[t]);
    count_memory(table, p, -(int64_t)p->memory);
    dray__idmap_free(&p->keys);
    free(p->rows);
    free(p->columns);
    free(p->column_rows);
    free(p->name);
    free(p);
}

/* One without rows is not there any more. */
static void end_partition(dray__table *table, dray__keyed *p)
{
    dray__keyed **at = &table->keyed;
    while (*at != p)
        at = &(*at)->next;
    *at = p->next;
    partition_free(table, p);
    dray__quota_freed(table);
}

void dray__keyed_free(dray__table *table)
{
    while (table->keyed)
        end_partition(table, table->keyed);
}

static void link_partition(dray__table *table, dray__keyed *p)
{
    dray__keyed **at = &table->keyed; /* in order of creation */
    while (*at)
        at = &(*at)->next;
    *at = p;
}

/* The column's number in the partition. NONE: it has none of the table's number. */
static uint32_t find_column(const dray__keyed *p, uint32_t column)
{
    uint32_t c = 0;
    while (c < p->column_count && p->columns[c] != column)
        c++;
    return c < p->column_count ? c : DRAY__NONE;
}

static int add_column(dray__keyed *p, uint32_t column, uint32_t *out, dray_error *error)
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
    return DRAY_OK;
}

/* ---- putting --------------------------------------------------------------------------------- */

/* A put under way: all that can fail comes before `apply`. */
typedef struct putting {
    dray__keyed *partition;
    bool fresh; /* it is not the table's yet */
    uint32_t number, rows, made;
    uint32_t *slots, *columns; /* [rows]; [columns] of the partition */
    bool *new;                 /* [rows] */
    uint8_t **notes;           /* [rows] */
    dray__put *put;            /* NULL: there are no columns */
} putting;

static void putting_free(putting *x)
{
    for (uint32_t i = 0; x->notes && i < x->rows; i++)
        free(x->notes[i]);
    free(x->slots);
    free(x->columns);
    free(x->new);
    free(x->notes);
}

/* Nothing of it is there. */
static void undo(dray__table *table, putting *x)
{
    dray__put_discard(table, x->put);
    for (uint32_t i = 0; x->new && x->partition &&i < x->made; i++)
        if (x->new[i])
            drop_row(table, x->partition, x->slots[i]);
    if (x->fresh && x->partition)
        partition_free(table, x->partition);
    putting_free(x);
}

static int check_named(const char *what, const char *partition, const dray__named *named,
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

static int check_put(const dray__table *table, const dray__putting *m, dray_error *error)
{
    int rc = dray__name_check(m->partition, "partition", error);
    if (rc)
        return rc;
    if (!m->rows || m->rows > DRAY_PUT_ROWS_MAX)
        return dray__fail(error, DRAY_EINVALID, "put into %s: 1 to %u rows expected, found %u",
                          m->partition, DRAY_PUT_ROWS_MAX, m->rows);
    if (m->note_count && m->note_count != m->rows)
        return dray__fail(error, DRAY_EINVALID,
                          "put into %s: a tag for each of %u rows expected, "
                          "found %u",
                          m->partition, m->rows, m->note_count);
    for (uint32_t i = 0; i < m->note_count; i++)
        if (m->notes[i].size > DRAY_ROW_TAG_MAX)
            return dray__fail(error, DRAY_EINVALID,
                              "put into %s: a tag of at most %u bytes expected, found %zu",
                              m->partition, DRAY_ROW_TAG_MAX, m->notes[i].size);
    if (dray__table_partition(table, m->partition))
        return dray__fail(error, DRAY_EINVALID,
                          "put into %s: a partition of rows with keys expected, found one whose "
                          "rows are claimed (take another name)",
                          m->partition);
    return DRAY_OK;
}

static uint64_t notes_memory(const dray__putting *m)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < m->note_count; i++)
        bytes += m->notes[i].size;
    return bytes;
}

/* `made` rows are new. Nobody waits for rows here: whoever clears them does not know of it. */
static int check_room(const dray__table *table, const dray__putting *m, const putting *x,
                      uint32_t made, uint64_t bytes, dray_error *error)
{
    uint64_t rows = table->settings.capacity_rows, most = table->settings.capacity_bytes;
    uint64_t used = table->charged + table->hidden + table->kept;
    if (table->ledger && table->ledger->replaying) /* it had room then */
        return DRAY_OK;
    if (made && (made > rows || table->rows > rows - made))
        return dray__fail(error, DRAY_EFULL, "put into %s: %llu rows + %u > %llu (clear some)",
                          m->partition, (unsigned long long)table->rows, made,
                          (unsigned long long)rows);
    if (x->partition->row_count > DRAY__ROWS_MAX - made)
        return dray__fail(error, DRAY_EFULL, "put into %s: %u rows + %u > %u", m->partition,
                          x->partition->row_count, made, DRAY__ROWS_MAX);
    if (bytes > most || used > most - bytes)
        return dray__fail(error, DRAY_EFULL,
                          "put into %s: %llu bytes + %llu > %llu (clear some rows)", m->partition,
                          (unsigned long long)used, (unsigned long long)bytes,
                          (unsigned long long)most);
    uint64_t width = x->partition->column_capacity;
    width = width > m->column_count ? width : m->column_count;
    uint64_t memory = (uint64_t)made * (sizeof(dray__keyed_row) + DRAY__WORD_MAX) +
                      m->rows * width * sizeof(dray__cell) + notes_memory(m);
    int rc = dray__quota_rows(table, made, memory, error);
    return rc ? dray__fail_prefix(error, DRAY_EFULL, "put into %s: ", m->partition) : DRAY_OK;
}

/* The rows that are there. Others have slot NONE. */
static int find_rows(dray__table *table, const dray__putting *m, putting *x, dray_error *error)
{
    dray__keyed *p = x->partition;
    uint64_t mark = ++table->marks;
    for (uint32_t i = 0; i < m->rows; i++) {
        x->slots[i] = DRAY__NONE;
        if (m->named.at_count && !is_row(p, &m->named.at[i]))
            return dray__fail(error, DRAY_ESTALE,
                              "put into %s: row %u of generation %u is not there any more",
                              m->partition, m->named.at[i].slot, m->named.at[i].generation);
        if (m->named.at_count)
            x->slots[i] = m->named.at[i].slot;
        else if (m->named.key_count)
            x->slots[i] = find_key(p, m->named.keys[i], hash_of(m->named.keys[i]));
        dray__keyed_row *row = x->slots[i] == DRAY__NONE ? NULL : &p->rows[x->slots[i]];
        if (row && row->mark == mark)
            return dray__fail(error, DRAY_EINVALID, "put into %s: row %u%s%s is named twice",
                              m->partition, x->slots[i], row->key ? ", key " : "",
                              row->key ? row->key : "");
        if (row)
            row->mark = mark;
        x->new[i] = !row;
    }
    return DRAY_OK;
}

static int make_rows(dray__table *table, const dray__putting *m, putting *x, dray_error *error)
{
    int rc = DRAY_OK;
    for (x->made = 0; !rc && x->made < m->rows; x->made += !rc) {
        uint32_t i = x->made;
        const char *key = m->named.key_count ? m->named.keys[i] : NULL;
        if (!x->new[i])
            continue;
        if (key && find_key(x->partition, key, hash_of(key)) != DRAY__NONE)
            rc = dray__fail(error, DRAY_EINVALID, "put into %s: key %s is named twice",
                            m->partition, key);
        else
            rc = add_row(table, x->partition, DRAY__NONE, key, x->number, &x->slots[i], error);
    }
    return rc;
}

static int make_notes(const dray__putting *m, putting *x, dray_error *error)
{
    for (uint32_t i = 0; i < m->note_count; i++) {
        if (!m->notes[i].given)
            continue;
        x->notes[i] = malloc(m->notes[i].size + 1);
        if (!x->notes[i])
            return dray__nomem(error);
        if (m->notes[i].size)
            memcpy(x->notes[i], m->notes[i].data, m->notes[i].size);
    }
    return DRAY_OK;
}

/* Every row has room for the put's columns. */
static int make_cells(dray__table *table, const dray__putting *m, putting *x, dray_error *error)
{
    dray__keyed *p = x->partition;
    int rc = DRAY_OK;
    for (uint32_t c = 0; !rc && c < m->column_count; c++)
        rc = add_column(p, x->put->columns[c].column, &x->columns[c], error);
    for (uint32_t i = 0; !rc && m->column_count && i < m->rows; i++) {
        dray__keyed_row *row = &p->rows[x->slots[i]];
        uint32_t before = row->cell_count;
        if (before >= p->column_count)
            continue;
        rc = dray__grow(&row->cells, before, p->column_capacity, sizeof *row->cells, error);
        if (!rc) {
            row->cell_count = p->column_capacity;
            count_memory(table, p, (int64_t)((row->cell_count - before) * sizeof *row->cells));
        }
    }
    return rc;
}

static void put_row(dray__table *table, const dray__putting *m, const putting *x, uint32_t i)
{
    dray__keyed *p = x->partition;
    dray__keyed_row *row = &p->rows[x->slots[i]];
    row->version++;
    for (uint32_t c = 0; c < m->column_count; c++) {
        dray__cell *cell = &row->cells[x->columns[c]], old = *cell;
        *cell = (dray__cell){x->put, i, c};
        x->put->cells[c]++;
        x->put->cell_count++;
        if (old.put)
            dray__put_leave(table, old.put, old.column);
        else
            p->column_rows[x->columns[c]]++;
    }
    if (!x->notes[i])
        return;
    free(row->note);
    row->note = x->notes[i];
    x->notes[i] = NULL;
    count_memory(table, p, (int64_t)m->notes[i].size - (int64_t)row->note_size);
    row->note_size = (uint32_t)m->notes[i].size;
}

static int begin(const dray__table *table, const dray__putting *m, putting *x, dray_error *error)
{
    x->rows = m->rows;
    x->partition = dray__table_keyed(table, m->partition);
    x->fresh = !x->partition;
    if (x->fresh && m->named.at_count)
        return dray__fail(error, DRAY_ESTALE, "put into %s: there is no row %u any more",
                          m->partition, m->named.at[0].slot);
    if (x->fresh && table->ended)
        return dray__fail(error, DRAY_EEND, "put into %s: queue %s has ended", m->partition,
                          table->name);
    x->slots = calloc(m->rows, sizeof *x->slots);
    x->new = calloc(m->rows, sizeof *x->new);
    x->notes = calloc(m->rows, sizeof *x->notes);
    x->columns = calloc(m->column_count + 1u, sizeof *x->columns);
    if (x->fresh)
        x->partition = partition_new(m->partition);
    return x->slots && x->new && x->notes && x->columns && x->partition ? DRAY_OK
                                                                        : dray__nomem(error);
}

/* What is left of it cannot fail. */
static void apply(dray__table *table, const dray__putting *m, putting *x, dray__row_at *out)
{
    dray__keyed *p = x->partition;
    if (x->put)
        dray__put_keep(table, x->put);
    for (uint32_t i = 0; i < m->rows; i++) {
        put_row(table, m, x, i);
        const dray__keyed_row *row = &p->rows[x->slots[i]];
        out[i] = (dray__row_at){x->slots[i], row->generation, row->version};
    }
    if (x->fresh)
        link_partition(table, p);
    x->partition = NULL;
    table->named = true;
}

static void tell_again(const dray__table *table, const dray__putting *m, dray__row_at *out)
{
    const dray__keyed *p = dray__table_keyed(table, m->partition);
    for (uint32_t i = 0; i < m->rows; i++) {
        uint32_t slot = DRAY__NONE;
        if (p && m->named.at_count && is_row(p, &m->named.at[i]))
            slot = m->named.at[i].slot;
        else if (p && m->named.key_count)
            slot = find_key(p, m->named.keys[i], hash_of(m->named.keys[i]));
        out[i] = (dray__row_at){.slot = slot};
        if (slot != DRAY__NONE) {
            out[i].generation = p->rows[slot].generation;
            out[i].version = p->rows[slot].version;
        }
    }
}

int dray__keyed_put(dray__table *table, dray__client *client, const dray__putting *m,
                    dray__row_at *out, dray_error *error)
{
    const dray__content content = {.columns = m->columns, .column_count = m->column_count};
    uint64_t bytes = 0;
    uint32_t made = 0;
    putting x = {0};
    int rc = check_put(table, m, error);
    if (!rc)
        rc = check_named("put into", m->partition, &m->named, m->rows, error);
    if (!rc && dray__ledger_told(table->ledger, client->identity, m->ticket)) {
        tell_again(table, m, out); /* a controller that is gone has done it */
        return DRAY_OK;
    }
    if (!rc)
        rc = dray__put_check(table, client, DRAY__ANYBODY, &content, m->rows, &bytes, error);
    if (rc)
        return rc;
    rc = begin(table, m, &x, error);
    if (!rc)
        rc = find_rows(table, m, &x, error);
    for (uint32_t i = 0; !rc && i < m->rows; i++)
        made += x.new[i];
    if (!rc)
        rc = check_room(table, m, &x, made, bytes, error);
    if (!rc && x.fresh)
        x.partition->generation = dray__ledger_number(table);
    if (!rc)
        x.number = dray__ledger_number(table);
    if (!rc)
        rc = dray__put_prepare_keyed(table, &content, m->rows, x.number, &x.put, error);
    if (!rc)
        rc = make_notes(m, &x, error);
    if (!rc)
        rc = make_rows(table, m, &x, error);
    if (!rc)
        rc = make_cells(table, m, &x, error);
    if (rc) {
        undo(table, &x);
        return rc;
    }
    const dray__keyed *p = x.partition;
    apply(table, m, &x, out);
    table->inserted += made;
    dray__ledger_put(table->ledger, client, m, p, x.number, out, x.put);
    putting_free(&x);
    return DRAY_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

static uint32_t find_task(const dray__keyed *p, const char *task)
{
    uint32_t t = 0;
    while (t < p->task_count && strcmp(p->tasks[t], task) != 0)
        t++;
    return t < p->task_count ? t : DRAY__NONE;
}

static const dray__cell *cell_of(const dray__keyed *p, uint32_t slot, uint32_t column)
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
        if (m->all_columns && !p->column_rows[c]) /* its rows are gone */
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

/* The rows that were named, in their order. */
static int pick_named(const dray__getting *m, uint32_t task, dray__picked *out, dray_error *error)
{
    dray__keyed *p = out->partition;
    uint32_t count = m->named.key_count + m->named.at_count, missing = 0;
    for (uint32_t i = 0; i < count; i++) {
        const dray__row_at *at = m->named.at_count ? &m->named.at[i] : NULL;
        uint32_t slot = DRAY__NONE;
        if (at && is_row(p, at))
            slot = at->slot;
        else if (!at)
            slot = find_key(p, m->named.keys[i], hash_of(m->named.keys[i]));
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
    bool chooses = *m->task != 0; /* a consumer's rows; else what is missing is */
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
        rc = check_named("get of", m->partition, &m->named, m->named.key_count + m->named.at_count,
                         error);
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
            const dray__cell *cell = cell_of(p, picked->slots[i], picked->columns[c]);
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
    dray__ledger_uncount(table->ledger, p->generation); /* the state has it */
    free(at);
}

static int add_task(dray__keyed *p, const char *task, uint32_t *out, dray_error *error)
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
    int rc = add_task(p, task, &t, error);
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
    table->named = true;
    return DRAY_OK;
}

int dray__keyed_drop(dray__table *table, const char *partition, const dray__named *named,
                     dray_error *error)
{
    uint32_t count = named->key_count + named->at_count, found = 0;
    int rc = dray__name_check(partition, "partition", error);
    if (!rc)
        rc = check_named("clear rows of", partition, named, count, error);
    dray__keyed *p = rc ? NULL : dray__table_keyed(table, partition);
    if (rc || !p)
        return rc;
    uint32_t *slots = calloc(count + 1u, sizeof *slots);
    if (!slots)
        return dray__nomem(error);
    uint64_t mark = ++table->marks;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = DRAY__NONE;
        if (named->at_count && is_row(p, &named->at[i]))
            slot = named->at[i].slot;
        else if (named->key_count)
            slot = find_key(p, named->keys[i], hash_of(named->keys[i]));
        if (slot == DRAY__NONE || p->rows[slot].mark == mark)
            continue;
        p->rows[slot].mark = mark;
        slots[found++] = slot;
    }
    if (found || !count)
        write_used(table, p, DRAY__RECORD_DROP, "", slots, found);
    for (uint32_t i = 0; i < found; i++)
        drop_row(table, p, slots[i]);
    free(slots);
    if (!count)
        rc = dray__table_bury(table, partition, 0, error);
    if (!count || !p->row_count)
        end_partition(table, p);
    else if (found)
        dray__quota_freed(table);
    return rc;
}

/* ---- as a journal has it --------------------------------------------------------------------- */

/* The row of the record, where it is now; what is older and in its way is dropped. mark: of the
 * rows of this record; most: of generations. */
static int again_row(dray__table *table, dray__keyed *p, const dray__row_at *at, const char *key,
                     uint64_t mark, uint32_t most, dray_error *error)
{
    uint64_t slots = table->settings.capacity_rows;
    uint32_t slot = *key ? find_key(p, key, hash_of(key)) : DRAY__NONE;
    dray__keyed_row *row = at->slot < p->end ? &p->rows[at->slot] : NULL;
    slots = slots < DRAY__ROWS_MAX ? slots : DRAY__ROWS_MAX;
    if (at->slot >= slots || !at->generation || at->generation > most)
        return dray__fail(error, DRAY_EFORMAT,
                          "partition %s: a row below %llu of generation 1 to %u expected, found %u "
                          "of %u",
                          p->name, (unsigned long long)slots, most, at->slot, at->generation);
    if ((row && row->mark == mark) || (slot != DRAY__NONE && p->rows[slot].mark == mark))
        return dray__fail(error, DRAY_EFORMAT, "partition %s: row %u, key %s, is there twice",
                          p->name, at->slot, *key ? key : "none");
    if (row && row->generation > at->generation)
        return dray__fail(error, DRAY_EFORMAT,
                          "partition %s: row %u of generation %u or a later one expected, found %u",
                          p->name, at->slot, row->generation, at->generation);
    if (is_row(p, at)) {
        row->mark = mark;
        return strcmp(row->key ? row->key : "", key) == 0
                   ? DRAY_OK
                   : dray__fail(error, DRAY_EFORMAT, "partition %s: row %u has key %s, found %s",
                                p->name, at->slot, row->key ? row->key : "none", key);
    }
    if (row && row->generation)
        drop_row(table, p, at->slot);
    slot = *key ? find_key(p, key, hash_of(key)) : DRAY__NONE;
    if (slot != DRAY__NONE)
        drop_row(table, p, slot);
    int rc = add_row(table, p, at->slot, *key ? key : NULL, at->generation, &slot, error);
    if (!rc)
        p->rows[slot].mark = mark;
    return rc;
}

void dray__keyed_list_free(dray__table *table)
{
    for (dray__keyed *p = table->keyed; p; p = p->next) {
        p->free = DRAY__NONE;
        for (uint32_t slot = p->end; slot > 0; slot--)
            if (!p->rows[slot - 1].generation) {
                p->rows[slot - 1].next = p->free;
                p->free = slot - 1;
            }
    }
}

static int check_again(const dray__table *table, const dray__keyed_record *record,
                       dray_error *error)
{
    const dray__putting *m = &record->put;
    const dray__keyed *p = dray__table_keyed(table, m->partition);
    int rc = check_put(table, m, error);
    for (uint32_t i = 0; !rc && i < m->named.key_count; i++)
        if (*m->named.keys[i])
            rc = dray__name_check(m->named.keys[i], "key", error);
    if (!rc && (m->named.key_count != m->rows || m->named.at_count != m->rows))
        rc = dray__fail(error, DRAY_EFORMAT,
                        "put into %s: keys and addresses of %u rows expected, "
                        "found %u and %u",
                        m->partition, m->rows, m->named.key_count, m->named.at_count);
    if (!rc && p && p->generation != record->generation)
        rc = dray__fail(error, DRAY_EFORMAT, "partition %s has generation %u, found %u", p->name,
                        p->generation, record->generation);
    return rc;
}

int dray__keyed_again(dray__table *table, dray__client *reader, const dray__keyed_record *record,
                      uint32_t number, dray_error *error)
{
    const dray__putting *m = &record->put;
    const dray__content content = {.columns = m->columns, .column_count = m->column_count};
    uint64_t bytes = 0;
    putting x = {.number = number};
    int rc = check_again(table, record, error);
    if (!rc)
        rc = dray__put_check(table, reader, DRAY__ANYBODY, &content, m->rows, &bytes, error);
    if (rc)
        return rc;
    const dray__putting anywhere = {.partition = m->partition,
                                    .rows = m->rows,
                                    .column_count = m->column_count,
                                    .notes = m->notes,
                                    .note_count = m->note_count};
    rc = begin(table, &anywhere, &x, error);
    if (!rc && x.fresh)
        x.partition->generation = record->generation;
    uint64_t mark = ++table->marks;
    for (uint32_t i = 0; !rc && i < m->rows; i++) {
        rc = again_row(table, x.partition, &m->named.at[i], m->named.keys[i], mark, number, error);
        x.slots[i] = m->named.at[i].slot;
    }
    if (!rc)
        rc = dray__put_prepare_keyed(table, &content, m->rows, number, &x.put, error);
    if (!rc)
        rc = make_notes(m, &x, error);
    if (!rc)
        rc = make_cells(table, m, &x, error);
    dray__row_at *out = rc ? NULL : calloc(m->rows, sizeof *out);
    if (rc || !out) {
        undo(table, &x); /* the table is given up */
        return rc ? rc : dray__nomem(error);
    }
    dray__keyed *p = x.partition;
    apply(table, m, &x, out);
    for (uint32_t i = 0; i < m->rows; i++)
        p->rows[x.slots[i]].version = m->named.at[i].version;
    if (x.put)
        x.put->record = table->ledger->record;
    else
        dray__ledger_uncount(table->ledger, number);
    free(out);
    putting_free(&x);
    return DRAY_OK;
}

static int by_number(const void *a, const void *b)
{
    const uint32_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

uint32_t *dray__keyed_numbers(dray__table *table, uint32_t *count)
{
    uint64_t mark = ++table->marks;
    uint32_t *numbers = calloc(table->put_count + 1u, sizeof *numbers);
    *count = 0;
    for (const dray__keyed *p = numbers ? table->keyed : NULL; p; p = p->next)
        for (uint32_t slot = 0; slot < p->end; slot++)
            for (uint32_t c = 0; c < p->rows[slot].cell_count; c++) {
                dray__put *put = p->rows[slot].cells[c].put;
                if (!put || put->mark == mark)
                    continue;
                put->mark = mark;
                numbers[(*count)++] = put->number;
            }
    if (numbers)
        qsort(numbers, *count, sizeof *numbers, by_number);
    return numbers;
}

static dray__image_row *rows_state(const dray__keyed *p, dray__arena *arena)
{
    dray__image_row *rows = dray__arena_get(arena, (p->row_count + 1u) * sizeof *rows);
    uint32_t count = 0;
    for (uint32_t slot = 0; rows && slot < p->end; slot++) {
        const dray__keyed_row *row = &p->rows[slot];
        if (row->generation)
            rows[count++] =
                (dray__image_row){.row = {.at = {slot, row->generation, row->version},
                                          .key = row->key ? row->key : "",
                                          .note = {row->note != NULL, row->note, row->note_size}},
                                  .consumed = row->consumed};
    }
    return rows;
}

dray__image *dray__keyed_state(const dray__table *table, dray__arena *arena, uint32_t *count)
{
    uint32_t partitions = 0;
    for (const dray__keyed *p = table->keyed; p; p = p->next)
        partitions++;
    dray__image *kept = dray__arena_get(arena, (partitions + 1u) * sizeof *kept);
    *count = 0;
    for (const dray__keyed *p = kept ? table->keyed : NULL; p; p = p->next) {
        const dray__image_row *rows = rows_state(p, arena);
        if (!rows)
            return NULL;
        kept[(*count)++] = (dray__image){.name = p->name,
                                         .generation = p->generation,
                                         .tasks = (const char *const *)p->tasks,
                                         .task_count = p->task_count,
                                         .rows = rows,
                                         .row_count = p->row_count};
    }
    return kept;
}

static int restore_row(dray__table *table, dray__keyed *p, const dray__image_row *kept,
                       uint64_t mark, uint32_t most, dray_error *error)
{
    const dray__note *note = &kept->row.note;
    int rc = *kept->row.key ? dray__name_check(kept->row.key, "key", error) : DRAY_OK;
    if (!rc)
        rc = again_row(table, p, &kept->row.at, kept->row.key, mark, most, error);
    dray__keyed_row *row = rc ? NULL : &p->rows[kept->row.at.slot];
    if (row && note->size > DRAY_ROW_TAG_MAX)
        rc = dray__fail(error, DRAY_EFORMAT, "partition %s, row %u: a tag of %zu bytes", p->name,
                        kept->row.at.slot, note->size);
    uint8_t *copy = !rc && note->given ? malloc(note->size + 1) : NULL;
    if (!rc && note->given && !copy)
        rc = dray__nomem(error);
    if (rc)
        return rc;
    if (note->size)
        memcpy(copy, note->data, note->size);
    free(row->note);
    row->note = copy;
    count_memory(table, p, (int64_t)note->size - (int64_t)row->note_size);
    row->note_size = (uint32_t)note->size;
    row->version = kept->row.at.version;
    row->consumed = kept->consumed;
    return DRAY_OK;
}

static int restore_partition(dray__table *table, const dray__image *kept, uint64_t mark,
                             uint32_t most, dray_error *error)
{
    dray__keyed *p = dray__table_keyed(table, kept->name);
    int rc = dray__name_check(kept->name, "partition", error);
    uint32_t t;
    if (!rc && p && p->generation != kept->generation)
        rc = dray__fail(error, DRAY_EFORMAT, "partition %s has generation %u, found %u", p->name,
                        p->generation, kept->generation);
    if (rc)
        return rc;
    if (!p && !(p = partition_new(kept->name)))
        return dray__nomem(error);
    if (!dray__table_keyed(table, kept->name))
        link_partition(table, p);
    p->generation = kept->generation;
    for (uint32_t i = 0; !rc && i < kept->row_count; i++)
        rc = restore_row(table, p, &kept->rows[i], mark, most, error);
    for (uint32_t i = 0; !rc && i < kept->task_count; i++) {
        rc = dray__name_check(kept->tasks[i], "task", error);
        if (!rc)
            rc = add_task(p, kept->tasks[i], &t, error);
        if (!rc && t != i)
            rc = dray__fail(error, DRAY_EFORMAT, "partition %s: task %s is there twice", p->name,
                            kept->tasks[i]);
    }
    return rc;
}

int dray__keyed_restore(dray__table *table, const dray__image *kept, uint32_t count, uint32_t most,
                        dray_error *error)
{
    uint64_t mark = ++table->marks;
    for (uint32_t i = 0; i < count; i++) {
        int rc = restore_partition(table, &kept[i], mark, most, error);
        if (rc)
            return rc;
    }
    for (dray__keyed *p = table->keyed, *next; p; p = next) { /* what was dropped */
        next = p->next;
        for (uint32_t slot = 0; slot < p->end; slot++)
            if (p->rows[slot].generation && p->rows[slot].mark != mark)
                drop_row(table, p, slot);
        if (!p->row_count)
            end_partition(table, p);
    }
    return DRAY_OK;
}
