/* Puts rows into keyed partitions, for requests and for records of a journal. */
#include "queue/table/keyed_inside.h"

#include "base/error.h"
#include "queue/journal/ledger.h"

#include <stdlib.h>
#include <string.h>

#define NUMBERS_LEFT (1u << 20) /* left for partitions and refills, which share 32 bits */

/* ---- putting --------------------------------------------------------------------------------- */

/* A put under way. All steps that can fail come before `apply`. */
typedef struct putting {
    dray__keyed *partition;
    bool fresh; /* it is not in the table yet */
    uint32_t number, rows, made;
    uint32_t *slots, *columns; /* [rows]; [columns] of the partition */
    bool *new;                 /* [rows] */
    uint8_t **notes;           /* [rows] */
    dray__put *put;            /* NULL when there are no columns */
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

/* Undoes a put that is not applied. */
static void undo(dray__table *table, putting *x)
{
    dray__put_discard(table, x->put);
    for (uint32_t i = 0; x->new && x->partition &&i < x->made; i++)
        if (x->new[i])
            dray__keyed_drop_row(table, x->partition, x->slots[i]);
    if (x->fresh && x->partition)
        dray__keyed_free_one(table, x->partition);
    putting_free(x);
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

static uint64_t capacity_for(uint64_t count, uint64_t least)
{
    while (least < count)
        least *= 2;
    return least;
}

/* Returns the most memory that the put may take besides its bytes, when `made` of its rows are new.
 */
static uint64_t memory_for(const dray__keyed *p, const dray__putting *m, uint32_t made)
{
    uint64_t rows = capacity_for((uint64_t)p->row_count + made, p->capacity ? p->capacity : 64);
    uint64_t columns = capacity_for((uint64_t)p->column_count + m->column_count,
                                    p->column_capacity ? p->column_capacity : 16);
    uint64_t cells = m->column_count ? m->rows * columns : 0;
    return dray__keyed_arrays(p, rows, 2 * rows, columns) - p->arrays +
           (uint64_t)made * DRAY__WORD_MAX + cells * sizeof(dray__keyed_cell) + notes_memory(m);
}

/* Checks that there is room; `made` rows are new. A put without room fails instead of waiting,
 * because clearing rows wakes no put. */
static int check_room(const dray__table *table, const dray__putting *m, const putting *x,
                      uint32_t made, uint64_t bytes, dray_error *error)
{
    uint64_t rows = table->settings.capacity_rows, most = table->settings.capacity_bytes;
    uint64_t used = table->charged + table->hidden + table->kept;
    if (table->ledger && table->ledger->replaying) /* there was room when it was put */
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
    int rc = dray__quota_rows(table, made, memory_for(x->partition, m, made), error);
    return rc ? dray__fail_prefix(error, DRAY_EFULL, "put into %s: ", m->partition) : DRAY_OK;
}

/* Finds the rows that exist. The others get slot NONE. */
static int find_rows(dray__table *table, const dray__putting *m, putting *x, dray_error *error)
{
    dray__keyed *p = x->partition;
    uint64_t mark = ++table->marks;
    for (uint32_t i = 0; i < m->rows; i++) {
        x->slots[i] = DRAY__NONE;
        if (m->named.at_count && !dray__keyed_is_row(p, &m->named.at[i]))
            return dray__fail(error, DRAY_ESTALE,
                              "put into %s: row %u of generation %u is not there any more",
                              m->partition, m->named.at[i].slot, m->named.at[i].generation);
        if (m->named.at_count)
            x->slots[i] = m->named.at[i].slot;
        else if (m->named.key_count)
            x->slots[i] = dray__key_find(p, m->named.keys[i], dray__key_hash(m->named.keys[i]));
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
        if (key && dray__key_find(x->partition, key, dray__key_hash(key)) != DRAY__NONE)
            rc = dray__fail(error, DRAY_EINVALID, "put into %s: key %s is named twice",
                            m->partition, key);
        else
            rc = dray__keyed_add_row(table, x->partition, DRAY__NONE, key, x->number, &x->slots[i],
                                     error);
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

/* Allocates the cells of the put's columns in every row. */
static int make_cells(dray__table *table, const dray__putting *m, putting *x, dray_error *error)
{
    dray__keyed *p = x->partition;
    int rc = DRAY_OK;
    for (uint32_t c = 0; !rc && c < m->column_count; c++)
        rc = dray__keyed_add_column(table, p, x->put->columns[c].column, &x->columns[c], error);
    for (uint32_t i = 0; !rc && m->column_count && i < m->rows; i++) {
        dray__keyed_row *row = &p->rows[x->slots[i]];
        uint32_t before = row->cell_count;
        if (before >= p->column_count)
            continue;
        rc = dray__grow(&row->cells, before, p->column_capacity, sizeof *row->cells, error);
        if (!rc) {
            row->cell_count = p->column_capacity;
            dray__keyed_count(table, p, (int64_t)((row->cell_count - before) * sizeof *row->cells));
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
        dray__keyed_cell *cell = &row->cells[x->columns[c]], old = *cell;
        *cell = (dray__keyed_cell){x->put, i, c};
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
    dray__keyed_count(table, p, (int64_t)m->notes[i].size - (int64_t)row->note_size);
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
    if (x->fresh && table->ended && !(table->ledger && table->ledger->replaying))
        return dray__fail(error, DRAY_EEND, "put into %s: queue %s has ended", m->partition,
                          table->name);
    x->slots = calloc(m->rows, sizeof *x->slots);
    x->new = calloc(m->rows, sizeof *x->new);
    x->notes = calloc(m->rows, sizeof *x->notes);
    x->columns = calloc(m->column_count + 1u, sizeof *x->columns);
    if (x->fresh)
        x->partition = dray__keyed_new(m->partition);
    return x->slots && x->new && x->notes && x->columns && x->partition ? DRAY_OK
                                                                        : dray__nomem(error);
}

/* Applies the put. Cannot fail. */
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
        dray__keyed_link(table, p);
    x->partition = NULL;
    dray__keyed_changed(table, p);
}

static void tell_again(const dray__table *table, const dray__putting *m, dray__row_at *out)
{
    const dray__keyed *p = dray__table_keyed(table, m->partition);
    for (uint32_t i = 0; i < m->rows; i++) {
        uint32_t slot = DRAY__NONE;
        if (p && m->named.at_count && dray__keyed_is_row(p, &m->named.at[i]))
            slot = m->named.at[i].slot;
        else if (p && m->named.key_count)
            slot = dray__key_find(p, m->named.keys[i], dray__key_hash(m->named.keys[i]));
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
        rc = dray__named_check("put into", m->partition, &m->named, m->rows, error);
    if (!rc && dray__ledger_told(table->ledger, client->identity, m->ticket)) {
        tell_again(table, m, out); /* an earlier controller has done it */
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
    if (!rc && table->generations >= UINT32_MAX - NUMBERS_LEFT)
        rc = dray__fail(
            error, DRAY_EFULL,
            "put into %s: fewer than %u puts and partitions of a queue expected, found %u "
            "(go on with another queue)",
            m->partition, UINT32_MAX - NUMBERS_LEFT, table->generations);
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

/* ---- records of a
 * journal-------------------------------------------------------------------------------- */

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
        rc = dray__keyed_place(table, x.partition, &m->named.at[i], m->named.keys[i], mark, number,
                               error);
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
        undo(table, &x); /* the caller discards the table */
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
