/* Writing replies: the rows that a claim got, and the chunks that were freed. */
#include "base/error.h"
#include "control/protocol.h"
#include "queue/server/internal.h"
#include "queue/table/table_inside.h"

#include <string.h>

void dray__answer_dropped(dray__writer *w, const dray__table *table, uint64_t seen)
{
    bool all = seen > table->drop_count || table->drop_count - seen > DRAY__DROPS;
    uint32_t count = all ? 0 : (uint32_t)(table->drop_count - seen);
    dray__put_u64(w, table->drop_count);
    dray__put_u8(w, all);
    dray__put_u32(w, count);
    for (uint32_t i = 0; i < count; i++)
        dray__put_u64(w, table->drops[(seen + i) % DRAY__DROPS]);
}

void dray__answer_demand(dray__writer *w, const dray__demand *demand)
{
    const dray__partition *p = demand->partition;
    dray__refilling answer = {.id = demand->id,
                              .partition = p->name,
                              .reason = demand->reason,
                              .rows = demand->count,
                              .slot = demand->slots[0],
                              .group = p->group_of[demand->slots[0]],
                              .task = demand->task,
                              .attempts = demand->failures,
                              .cause = demand->cause};
    dray__put_fields(w, &dray__refilling_fields, &answer);
}

static void put_news(dray__writer *w, const dray__table *table, uint32_t columns, uint32_t keys)
{
    columns = columns < table->defined_count ? columns : table->defined_count;
    keys = keys < table->key_count ? keys : table->key_count;
    dray__put_u32(w, table->defined_count - columns);
    for (uint32_t i = columns; i < table->defined_count; i++) {
        const dray__col *column = &table->columns[table->defined[i]];
        dray__known_column known = {table->defined[i], column->name, column->spec};
        dray__put_fields(w, &dray__known_column_fields, &known);
    }
    dray__put_u32(w, table->key_count - keys);
    for (uint32_t i = keys; i < table->key_count; i++)
        dray__put_string(w, table->keys[i]);
}

/* Returns the slot of the i-th row that the claim reads, padding included. */
static uint32_t slot_of(const dray__claim *claim, uint32_t i)
{
    return claim->reads ? claim->reads[i] : claim->slots[i];
}

static bool reads(const dray__table *table, const dray__put *put, uint32_t task, uint32_t column)
{
    return (table->columns[column].readers | put->goes_on) >> task & 1;
}

static void put_puts(dray__writer *w, const dray__table *table, const dray__claim *claim)
{
    dray__put_u32(w, claim->pin_count);
    for (uint32_t i = 0; i < claim->pin_count; i++) {
        const dray__put *put = claim->pins[i];
        uint32_t count = 0;
        for (uint32_t c = 0; c < put->column_count; c++)
            count += reads(table, put, claim->task, put->columns[c].column);
        dray__put_u32(w, put->items);
        dray__put_u32(w, count);
        for (uint32_t c = 0; c < put->column_count; c++) {
            if (!reads(table, put, claim->task, put->columns[c].column))
                continue;
            dray__put_u32(w, put->columns[c].column);
            dray__put_u32(w, put->columns[c].chunk ? put->columns[c].chunk->keeper : 0);
            const dray__extent *extent = &put->columns[c].extent;
            dray__put_u64(w, extent->chunk);
            dray__put_u64(w, extent->values);
            dray__put_u64(w, extent->bytes);
            dray__put_u64(w, extent->offsets);
        }
    }
}

/* Returns true for rows that the task has begun. It reads its own earlier output. */
static bool goes_on(const dray__claim *claim)
{
    const dray__partition *p = claim->partition;
    for (uint32_t i = 0; p->earlier[claim->task] && i < claim->count; i++)
        if (dray__is_partial(p, claim->task, slot_of(claim, i)))
            return true;
    return false;
}

static double version_of(const dray__table *table, const dray__put *put, uint32_t item)
{
    uint32_t to = put->tag_start ? put->tag_start[item + 1] : put->tag_count;
    for (uint32_t i = to; i > (put->tag_start ? put->tag_start[item] : 0); i--)
        if (put->tags[i - 1].key == table->version_key)
            return put->tags[i - 1].value;
    return -1;
}

/* Returns the writer's n-th place of the row; n counts from 1. The list begins with the last one.
 */
static const dray__place *nth_place(const dray__partition *p, int writer, uint32_t slot, uint32_t n)
{
    uint32_t next = DRAY__NONE;
    const dray__place *place = NULL;
    while (n-- && dray__next_place(p, writer, slot, &next, &place))
        ;
    return place;
}

/* Writes the pieces of rows that have several, first to last. */
static void put_segments(dray__writer *w, const dray__table *table, const dray__claim *claim,
                         const uint32_t *writers, uint32_t count)
{
    const dray__partition *p = claim->partition;
    size_t at = w->size;
    uint32_t total = 0;
    dray__put_u32(w, 0);
    for (uint32_t k = 0; k < count; k++) {
        int writer = (int)writers[k] - 1;
        for (uint32_t row = 0; writer >= 0 && p->earlier[writer] && row < claim->count; row++) {
            uint32_t slot = slot_of(claim, row), next = DRAY__NONE, pieces = 0;
            if (p->earlier[writer][slot] == DRAY__NONE)
                continue;
            for (const dray__place *place = NULL; dray__next_place(p, writer, slot, &next, &place);)
                pieces++;
            dray__put_u32(w, k);
            dray__put_u32(w, row);
            dray__put_u32(w, pieces);
            for (uint32_t i = pieces; i > 0; i--) {
                const dray__place *place = nth_place(p, writer, slot, i);
                const dray__put *put = p->puts[place->put];
                dray__put_u32(w, put->mark_index);
                dray__put_u32(w, place->item);
                dray__put_f64(w, version_of(table, put, place->item));
            }
            total++;
        }
    }
    dray__put_u32_at(w, at, total);
}

/* Writes the places of the needed columns' values. Columns of one writer share their places. */
static void put_places(dray__writer *w, const dray__table *table, const dray__claim *claim)
{
    const dray__partition *p = claim->partition;
    const dray__qtask *task = &table->tasks[claim->task];
    uint32_t writers[DRAY__TASKS_MAX + 1], count = 0;
    uint32_t own = goes_on(claim) ? task->writes_count : 0;
    dray__put_u32(w, task->needs_count + own);
    for (uint32_t i = 0; i < task->needs_count + own; i++) {
        uint32_t column =
            i < task->needs_count ? task->needs[i] : task->writes[i - task->needs_count];
        uint32_t writer = (uint32_t)(table->columns[column].writer + 1), at = 0;
        while (at < count && writers[at] != writer)
            at++;
        if (at == count)
            writers[count++] = writer;
        dray__put_u32(w, column);
        dray__put_u32(w, at);
    }
    dray__put_u32(w, count * claim->count);
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t row = 0; row < claim->count; row++) {
            dray__place place = p->places[writers[i]][slot_of(claim, row)];
            bool none = place.put == DRAY__NONE; /* not begun yet */
            dray__put_u32(w, none ? DRAY__NONE : p->puts[place.put]->mark_index);
            dray__put_u32(w, none ? 0 : place.item);
        }
    }
    put_segments(w, table, claim, writers, count);
}

static uint32_t put_tags_of(dray__writer *w, const dray__put *put, uint32_t row, uint32_t item)
{
    uint32_t from = put->tag_start ? put->tag_start[item] : 0;
    uint32_t to = put->tag_start ? put->tag_start[item + 1] : put->tag_count;
    for (uint32_t i = from; i < to; i++) {
        dray__put_u32(w, row);
        dray__put_u32(w, put->tags[i].key);
        dray__put_f64(w, put->tags[i].value);
    }
    return to - from;
}

/* Writes tags in the order of their commits: of several with one key, the last one counts. */
static void put_tags(dray__writer *w, const dray__table *table, const dray__claim *claim)
{
    const dray__partition *p = claim->partition;
    size_t at = w->size;
    uint32_t total = 0;
    dray__put_u32(w, 0);
    for (uint32_t row = 0; row < claim->count; row++) {
        uint64_t after = 0;
        for (;;) {
            const dray__place *next = NULL;
            for (uint32_t writer = 0; writer <= table->task_count; writer++) {
                const dray__place *place = p->places[writer];
                if (!place || place[slot_of(claim, row)].put == DRAY__NONE)
                    continue;
                place += slot_of(claim, row);
                uint64_t seq = p->puts[place->put]->seq;
                if (p->puts[place->put]->tag_count && seq > after &&
                    (!next || seq < p->puts[next->put]->seq))
                    next = place;
            }
            if (!next)
                break;
            after = p->puts[next->put]->seq;
            total += put_tags_of(w, p->puts[next->put], row, next->item);
        }
    }
    dray__put_u32_at(w, at, total);
}

static void put_micros(dray__writer *w, const dray__claim *claim)
{
    dray__put_u32(w, claim->micro_count);
    for (uint32_t i = 0; i < claim->micro_count; i++)
        dray__put_u32(w, claim->micro_ends[i]);
    dray__put_u32(w, claim->micro_count ? claim->count : 0);
    for (uint32_t i = 0; claim->micro_count && i < claim->count; i++)
        dray__put_u8(w, claim->follower || claim->slots[i] != DRAY__NONE);
}

void dray__answer_claim(dray__writer *w, const dray__table *table, const dray__claim *claim,
                        uint32_t which, bool bounded, uint32_t columns_known, uint32_t keys_known)
{
    const dray__partition *p = claim->partition;
    dray__put_u32(w, which);
    dray__put_u8(w, bounded);
    put_news(w, table, columns_known, keys_known);
    dray__put_string(w, p->name);
    dray__put_u32(w, claim->generation);
    dray__put_u32(w, claim->task);
    dray__put_u32(w, claim->count);
    for (uint32_t i = 0; i < claim->count; i++) {
        uint32_t slot = slot_of(claim, i);
        dray__put_u32(w, slot);
        dray__put_u32(w, p->row_generations[slot]);
        dray__put_u32(w, p->tracks[claim->task].rows[slot].attempt);
        dray__put_u32(w, p->group_of[slot]);
    }
    put_puts(w, table, claim);
    put_places(w, table, claim);
    put_tags(w, table, claim);
    put_micros(w, claim);
}

/* ---- rows with keys -------------------------------------------------------------------------- */

/* Lists the requested columns of a pinned put. wanted: their positions, by the table's column. */
static int list_columns(const dray__put *put, const uint32_t *wanted, dray__arena *arena,
                        dray__got_put *out, dray_error *error)
{
    dray__got_column *columns = dray__arena_get(arena, put->column_count * sizeof *columns);
    if (!columns)
        return dray__nomem(error);
    *out = (dray__got_put){.items = put->items, .columns = columns};
    for (uint32_t c = 0; c < put->column_count; c++) {
        const dray__put_column *column = &put->columns[c];
        if (column->chunk && wanted[column->column])
            columns[out->column_count++] = (dray__got_column){.column = wanted[column->column] - 1,
                                                              .keeper = column->chunk->keeper,
                                                              .extent = column->extent,
                                                              .spec = *column->spec};
    }
    return DRAY_OK;
}

static void list_rows(const dray__picked *picked, dray__got_row *out)
{
    for (uint32_t i = 0; i < picked->count; i++) {
        const dray__keyed_row *row = &picked->partition->rows[picked->slots[i]];
        out[i] = (dray__got_row){.at = {picked->slots[i], row->generation, row->version},
                                 .key = row->key ? row->key : "",
                                 .note = {row->note != NULL, row->note, row->note_size}};
    }
}

static void list_cells(const dray__picked *picked, dray__got_cell *out)
{
    for (uint32_t c = 0; c < picked->column_count; c++)
        for (uint32_t i = 0; i < picked->count; i++) {
            const dray__keyed_row *row = &picked->partition->rows[picked->slots[i]];
            uint32_t column = picked->columns[c];
            const dray__keyed_cell *cell = column < row->cell_count ? &row->cells[column] : NULL;
            *out++ = cell && cell->put ? (dray__got_cell){cell->put->mark_index, cell->item}
                                       : (dray__got_cell){.put = DRAY__NONE};
        }
}

int dray__answer_rows(dray__writer *w, const dray__table *table, const dray__picked *picked,
                      dray__arena *arena, dray_error *error)
{
    const dray__claim *claim = picked->claim;
    size_t cells = (size_t)picked->count * picked->column_count;
    uint64_t bytes = cells * sizeof(dray__got_cell); /* the same row may be named many times */
    for (uint32_t i = 0; i < picked->count; i++) {
        const dray__keyed_row *row = &picked->partition->rows[picked->slots[i]];
        bytes += 21 + (row->key ? strlen(row->key) : 0) + row->note_size;
    }
    if (bytes > DRAY__FRAME_MAX)
        return dray__fail(error, DRAY_EFULL,
                          "get of %u rows of %u columns: more than one answer "
                          "can describe (get them in parts)",
                          picked->count, picked->column_count);
    dray__got_row *rows = dray__arena_get(arena, picked->count * sizeof *rows);
    dray__got_cell *at = dray__arena_get(arena, (cells + 1) * sizeof *at);
    dray__got_put *puts = dray__arena_get(arena, (claim->pin_count + 1u) * sizeof *puts);
    uint32_t *wanted = calloc(table->column_count + 1u, sizeof *wanted);
    int rc = rows && at && puts && wanted ? DRAY_OK : dray__nomem(error);
    for (uint32_t c = 0; !rc && c < picked->column_count; c++)
        if (picked->columns[c] != DRAY__NONE)
            wanted[picked->partition->columns[picked->columns[c]]] = c + 1;
    for (uint32_t i = 0; !rc && i < claim->pin_count; i++)
        rc = list_columns(claim->pins[i], wanted, arena, &puts[i], error);
    free(wanted);
    if (rc)
        return rc;
    list_rows(picked, rows);
    list_cells(picked, at);
    const dray__got got = {.rows = rows,
                           .row_count = picked->count,
                           .puts = puts,
                           .put_count = claim->pin_count,
                           .columns = picked->names,
                           .column_count = picked->column_count,
                           .cells = at,
                           .cell_count = (uint32_t)cells,
                           .roomy = dray__table_roomy(table)};
    dray__put_fields(w, &dray__got_fields, &got);
    return DRAY_OK;
}
