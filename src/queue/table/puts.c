/* Puts: the columns of one insert or commit, and which of them are still needed. Their bytes are in
 * chunks (chunks.c). */
#include "queue/table/table_inside.h"

#include "base/error.h"
#include "queue/journal/ledger.h"

#include <stdlib.h>
#include <string.h>

#define PUT_COLUMNS_MAX 512u
#define TAGS_MAX (1u << 26) /* of a put; a tag of all rows counts once for each row */

/* ---- puts ------------------------------------------------------------------------------------ */

static int check_column(const dray__table *table, const dray__client *client, int writer,
                        const dray__new_column *column, uint32_t items, uint64_t *bytes,
                        dray_error *error)
{
    int rc = dray__name_check(column->name, "column", error);
    if (!rc)
        rc = dray__spec_check(&column->spec, column->name, error);
    if (rc)
        return rc;
    uint32_t index;
    bool known = dray__map_get(&table->column_names, column->name, &index);
    const dray__col *col = known ? &table->columns[index] : NULL;
    if (writer == -1 && col && col->writer >= 0)
        return dray__fail(error, DRAY_EINVALID, "column %s is written by task %s, not by inserts",
                          column->name, table->tasks[col->writer].name);
    if (writer >= 0 && (!col || col->writer != writer))
        return dray__fail(error, DRAY_EINVALID, "task %s does not write a column %s",
                          table->tasks[writer].name, column->name);
    if (col && col->defined && writer != DRAY__ANYBODY)
        rc = dray__spec_same(&col->spec, &column->spec, column->name, error);
    if (rc)
        return writer < 0 ? rc
                          : dray__fail_prefix(error, rc, "task %s: ", table->tasks[writer].name);
    uint64_t size = 0;
    rc = table->bytes->check(table, client, column, &size, error);
    if (!rc)
        rc = dray__extent_check(&column->extent, &column->spec, items, size, column->name, error);
    if (!rc && __builtin_add_overflow(
                   *bytes, dray__extent_bytes(&column->extent, &column->spec, items), bytes))
        rc = dray__fail(error, DRAY_EINVALID, "column %s: sizes overflow", column->name);
    return rc;
}

static int check_tags(const dray__content *content, int writer, uint32_t items, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t k = 0; k < content->key_count && !rc; k++)
        rc = dray__name_check(content->keys[k], "tag", error);
    for (uint32_t i = 0; i < content->tag_count && !rc; i++) {
        const dray__new_tag *tag = &content->tags[i];
        if (tag->key >= content->key_count)
            return dray__fail(error, DRAY_EFORMAT, "tag %u: one of %u keys expected, found %u", i,
                              content->key_count, tag->key);
        rc = dray__version_check(content->keys[tag->key], tag->value, error);
        if (!rc && tag->item >= items && (writer >= 0 || tag->item != DRAY__NONE))
            rc = dray__fail(error, DRAY_EINVALID, "tag %s: row %u of %u", content->keys[tag->key],
                            tag->item, items);
    }
    return rc;
}

int dray__put_check(const dray__table *table, const dray__client *client, int writer,
                    const dray__content *content, uint32_t items, uint64_t *bytes,
                    dray_error *error)
{
    const dray__new_column *columns = content->columns;
    uint32_t column_count = content->column_count;
    *bytes = 0;
    if (column_count > PUT_COLUMNS_MAX)
        return dray__fail(error, DRAY_EINVALID, "at most %u columns at once, found %u",
                          PUT_COLUMNS_MAX, column_count);
    for (uint32_t i = 0; i < column_count; i++) {
        int rc = check_column(table, client, writer, &columns[i], items, bytes, error);
        if (rc)
            return rc;
        for (uint32_t j = 0; j < i; j++)
            if (strcmp(columns[i].name, columns[j].name) == 0)
                return dray__fail(error, DRAY_EINVALID, "column %s is given twice",
                                  columns[i].name);
    }
    for (uint32_t i = 0; i < column_count; i++) {
        int rc = table->bytes->check_beside(table, columns, column_count, i, items, error);
        if (rc)
            return rc;
    }
    return check_tags(content, writer, items, error);
}

/* Sorts tags by item, with a stable counting sort, so that of equal (item, key) the later one wins.
 * Tags of every item are copied to each item, before its own, unless all tags are of every item;
 * then they are kept once. */
static void sort_tags(dray__put *put, const dray__content *content, const uint32_t *keys,
                      bool every)
{
    const dray__new_tag *tags = content->tags;
    for (uint32_t k = 0; k < content->tag_count; k++) {
        dray__put_tag tag = {.item = DRAY__NONE, .key = keys[tags[k].key], .value = tags[k].value};
        if (every)
            put->tags[k] = tag;
        for (uint32_t i = 0; !every && tags[k].item == DRAY__NONE && i < put->items; i++) {
            tag.item = i;
            put->tags[put->tag_start[i + 1]++] = tag;
        }
    }
    for (uint32_t k = 0; k < content->tag_count && !every; k++)
        if (tags[k].item != DRAY__NONE)
            put->tags[put->tag_start[tags[k].item + 1]++] =
                (dray__put_tag){tags[k].item, keys[tags[k].key], tags[k].value};
}

static int prepare_tags(dray__table *table, dray__put *put, const dray__content *content,
                        dray_error *error)
{
    const dray__new_tag *tags = content->tags;
    uint32_t common = 0, count = content->tag_count;
    for (uint32_t i = 0; i < count; i++)
        common += tags[i].item == DRAY__NONE;
    bool every = common == count;
    size_t total = every ? count : (size_t)common * put->items + (count - common);
    if (!count)
        return DRAY_OK;
    if (total > TAGS_MAX)
        return dray__fail(error, DRAY_EFULL, "%zu tags at once, at most %u", total, TAGS_MAX);
    put->tags = calloc(total, sizeof *put->tags);
    if (!every)
        put->tag_start = calloc((size_t)put->items + 2, sizeof *put->tag_start);
    uint32_t *keys = calloc(content->key_count, sizeof *keys);
    if (!put->tags || (!every && !put->tag_start) || !keys) {
        free(keys);
        return dray__nomem(error);
    }
    for (uint32_t i = 0; !every && i < put->items; i++)
        put->tag_start[i + 2] = common;
    for (uint32_t i = 0; !every && i < count; i++)
        if (tags[i].item != DRAY__NONE)
            put->tag_start[tags[i].item + 2]++;
    for (uint32_t i = 2; !every && i < put->items + 2; i++)
        put->tag_start[i] += put->tag_start[i - 1];
    int rc = DRAY_OK;
    for (uint32_t k = 0; k < content->key_count && !rc; k++)
        rc = dray__table_key(table, content->keys[k], &keys[k], error);
    if (!rc) {
        sort_tags(put, content, keys, every);
        put->tag_count = (uint32_t)total;
    }
    free(keys);
    return rc;
}

static int prepare_column(dray__table *table, dray__partition *p, const dray__new_column *column,
                          dray__put_column *out, dray_error *error)
{
    uint32_t c;
    int rc = dray__table_column(table, column->name, &c, error);
    if (!rc && c >= p->column_capacity) {
        uint32_t capacity = table->column_capacity;
        rc = dray__grow(&p->columns, p->column_capacity, capacity, sizeof *p->columns, error);
        if (!rc)
            rc = dray__grow(&p->committed, p->column_capacity, capacity, sizeof *p->committed,
                            error);
        if (!rc)
            p->column_capacity = capacity;
    }
    if (!rc && !p->columns[c])
        rc = dray__grow(&p->columns[c], 0, dray__bit_words(p->row_capacity), 8, error);
    *out = (dray__put_column){.column = c, .extent = column->extent};
    return rc ? rc : table->bytes->take(table, &column->extent, &out->chunk, error);
}

static int prepare_places(dray__partition *p, int writer, dray_error *error)
{
    dray__place **places = &p->places[writer + 1];
    int rc = DRAY_OK;
    if (!*places) {
        rc = dray__grow(places, 0, p->row_capacity, sizeof **places, error);
        uint32_t written = writer < 0 ? p->coming : 0; /* by the partition's first insert */
        if (!rc)
            memset(*places + written, 0xFF, (p->row_capacity - written) * sizeof **places);
    }
    if (!rc)
        rc = dray__grow_full(&p->puts, p->put_count, &p->put_capacity, sizeof(dray__put *), error);
    return rc;
}

int dray__put_prepare(dray__table *table, dray__partition *p, int writer,
                      const dray__content *content, uint32_t items, dray__put **out,
                      dray_error *error)
{
    const dray__new_column *columns = content->columns;
    uint32_t column_count = content->column_count;
    *out = NULL;
    if (!column_count && !content->tag_count)
        return DRAY_OK;
    dray__put *put = calloc(1, sizeof *put);
    if (!put)
        return dray__nomem(error);
    put->items = items;
    put->pins = dray__ledger_keeps(table->ledger); /* until its bytes are written */
    put->column_count = column_count;
    put->unsettled = calloc(table->task_count, sizeof *put->unsettled);
    put->columns = calloc(column_count ? column_count : 1, sizeof *put->columns);
    int rc = put->unsettled && put->columns ? DRAY_OK : dray__nomem(error);
    if (!rc)
        rc = prepare_places(p, writer, error);
    for (uint32_t i = 0; !rc && i < column_count; i++)
        rc = prepare_column(table, p, &columns[i], &put->columns[i], error);
    if (!rc)
        rc = prepare_tags(table, put, content, error);
    for (uint32_t i = 0; !rc && i < put->tag_count; i++)
        if (put->tags[i].key == table->version_key) {
            rc = dray__versions_prepare(p, error);
            break;
        }
    if (rc) {
        dray__put_discard(table, put);
        return rc;
    }
    for (uint32_t i = 0; i < column_count; i++) {
        dray__col *col = &table->columns[put->columns[i].column];
        if (!col->defined)
            table->defined[table->defined_count++] = put->columns[i].column;
        col->defined = true;
        col->spec = columns[i].spec;
    }
    *out = put;
    return DRAY_OK;
}

void dray__put_discard(dray__table *table, dray__put *put)
{
    if (!put)
        return;
    for (uint32_t i = 0; put->columns && i < put->column_count; i++)
        if (put->columns[i].chunk) /* NULL when freed */
            table->bytes->discard(table, put->columns[i].chunk);
    for (uint32_t i = 0; put->cells && i < put->column_count; i++)
        free((void *)(uintptr_t)put->columns[i].spec);
    free(put->cells);
    free(put->unsettled);
    free(put->columns);
    free(put->tags);
    free(put->tag_start);
    free(put);
}

static void set_live(dray__table *table, dray__partition *p, uint64_t live)
{
    uint64_t before = dray__partition_charge(p);
    p->live = live;
    uint64_t after = dray__partition_charge(p);
    table->charged = table->charged - before + after;
    table->freed |= after < before;
}

static const dray__column_spec *put_spec(const dray__table *table, const dray__put_column *column)
{
    return column->spec ? column->spec : &table->columns[column->column].spec;
}

static uint64_t column_bytes(const dray__table *table, const dray__put *put,
                             const dray__put_column *column)
{
    return dray__extent_bytes(&column->extent, put_spec(table, column), put->items);
}

static void free_column(dray__table *table, dray__put *put, dray__put_column *column)
{
    uint64_t bytes = column_bytes(table, put, column);
    if (put->partition)
        set_live(table, put->partition, put->partition->live - bytes);
    else if (put->cells)
        table->kept -= bytes;
    else
        table->hidden -= bytes;
    table->freed = true;
    dray__chunk *chunk = column->chunk;
    column->chunk = NULL;
    chunk->live--;
    chunk->live_bytes -= bytes;
    dray__chunk_check_free(table, chunk);
}

int dray__put_move(dray__table *table, dray__put *put, uint32_t column, const dray__extent *to,
                   dray_error *error)
{
    dray__put_column *c = &put->columns[column];
    dray__chunk *chunk, *old = c->chunk;
    uint64_t bytes = column_bytes(table, put, c);
    int rc = table->bytes->take(table, to, &chunk, error);
    if (rc)
        return rc;
    c->extent = *to;
    c->chunk = chunk;
    chunk->live++;
    chunk->live_bytes += bytes;
    old->live--;
    old->live_bytes -= bytes;
    dray__chunk_check_free(table, old);
    return DRAY_OK;
}

static bool is_needed(const dray__table *table, const dray__put *put, uint32_t column)
{
    return put->cells ? put->cells[column] != 0
                      : ((table->columns[put->columns[column].column].readers | put->goes_on) &
                         put->open_tasks) != 0;
}

/* Frees the columns that no task with open rows needs, or no row has. */
static void trim(dray__table *table, dray__put *put)
{
    if (put->pins)
        return;
    for (uint32_t i = 0; i < put->column_count; i++)
        if (put->columns[i].chunk && !is_needed(table, put, i))
            free_column(table, put, &put->columns[i]);
}

static void free_put(dray__table *table, dray__put *put)
{
    for (uint32_t i = 0; i < put->column_count; i++)
        if (put->columns[i].chunk)
            free_column(table, put, &put->columns[i]);
    table->put_count--;
    dray__put_discard(table, put);
}

/* ---- of rows with keys ----------------------------------------------------------------------- */

static int prepare_keyed_column(dray__table *table, const dray__new_column *column,
                                dray__put_column *out, dray_error *error)
{
    dray__column_spec *spec = malloc(sizeof *spec);
    if (!spec)
        return dray__nomem(error);
    *spec = column->spec;
    *out = (dray__put_column){.extent = column->extent, .spec = spec};
    int rc = dray__table_column(table, column->name, &out->column, error);
    return rc ? rc : table->bytes->take(table, &column->extent, &out->chunk, error);
}

int dray__put_prepare_keyed(dray__table *table, const dray__content *content, uint32_t items,
                            uint32_t number, dray__put **out, dray_error *error)
{
    uint32_t count = content->column_count;
    *out = NULL;
    if (!count)
        return DRAY_OK;
    dray__put *put = calloc(1, sizeof *put);
    if (!put)
        return dray__nomem(error);
    put->items = items;
    put->number = number;
    put->pins = dray__ledger_keeps(table->ledger); /* until its bytes are written */
    put->columns = calloc(count, sizeof *put->columns);
    put->cells = calloc(count, sizeof *put->cells);
    int rc = put->columns && put->cells ? DRAY_OK : dray__nomem(error);
    put->column_count = rc ? 0 : count;
    for (uint32_t i = 0; !rc && i < count; i++)
        rc = prepare_keyed_column(table, &content->columns[i], &put->columns[i], error);
    if (rc)
        dray__put_discard(table, put);
    else
        *out = put;
    return rc;
}

void dray__put_keep(dray__table *table, dray__put *put)
{
    for (uint32_t i = 0; i < put->column_count; i++) {
        uint64_t bytes = column_bytes(table, put, &put->columns[i]);
        put->columns[i].chunk->live++;
        put->columns[i].chunk->live_bytes += bytes;
        table->columns[put->columns[i].column].rows_in += put->items;
        table->columns[put->columns[i].column].bytes_in += bytes;
        table->kept += bytes;
    }
    table->put_count++;
}

void dray__put_leave(dray__table *table, dray__put *put, uint32_t column)
{
    put->cell_count--;
    if (--put->cells[column])
        return;
    if (!put->cell_count)
        dray__ledger_uncount(table->ledger, put->number);
    if (put->cell_count)
        trim(table, put);
    else if (!put->pins)
        free_put(table, put);
}

/* ---- rows that one task commits piece by piece ----------------------------------------------- */

bool dray__is_partial(const dray__partition *p, uint32_t task, uint32_t slot)
{
    const dray__place *places = p->places[task + 1];
    return places && places[slot].put != DRAY__NONE && !dray__bit_get(p->tracks[task].done, slot);
}

void dray__count_cut(dray__partition *p, uint32_t task, uint32_t slot, int by)
{
    if (dray__is_partial(p, task, slot) && !dray__bit_get(p->dead, slot))
        p->tracks[task].cut_count += (uint32_t)by;
}

int dray__segments_prepare(dray__partition *p, uint32_t task, uint32_t rows, bool open,
                           dray_error *error)
{
    if (!open && !p->earlier[task])
        return DRAY_OK;
    int rc = DRAY_OK;
    if (!p->earlier[task]) {
        rc = dray__grow(&p->earlier[task], 0, p->row_capacity, sizeof **p->earlier, error);
        if (!rc)
            memset(p->earlier[task], 0xFF, p->row_capacity * sizeof **p->earlier);
    }
    while (!rc && p->segment_capacity - p->segment_count < rows)
        rc = dray__grow_full(&p->segments, p->segment_capacity, &p->segment_capacity,
                             sizeof *p->segments, error);
    return rc;
}

static void push_segment(dray__partition *p, uint32_t task, uint32_t slot)
{
    uint32_t *last = &p->earlier[task][slot];
    p->segments[p->segment_count] =
        (dray__segment){.place = p->places[task + 1][slot], .previous = *last};
    *last = p->segment_count++;
}

bool dray__next_place(const dray__partition *p, int writer, uint32_t slot, uint32_t *at,
                      const dray__place **place)
{
    if (!*place) {
        *place = p->places[writer + 1] ? &p->places[writer + 1][slot] : NULL;
        *at = writer >= 0 && p->earlier[writer] ? p->earlier[writer][slot] : DRAY__NONE;
        return *place && (*place)->put != DRAY__NONE;
    }
    if (*at == DRAY__NONE)
        return false;
    *place = &p->segments[*at].place;
    *at = p->segments[*at].previous;
    return true;
}

void dray__put_begin(dray__table *table, dray__partition *p, dray__put *put)
{
    put->index = p->put_count;
    p->puts[p->put_count++] = put;
    put->partition = p;
    put->seq = ++table->put_seq;
    table->put_count++;
}

uint32_t dray__put_rows(dray__table *table, dray__partition *p, int writer, dray__put *put,
                        const uint32_t *slots, uint32_t first, uint32_t from, uint32_t to,
                        uint32_t divisor, const bool *stays)
{
    uint32_t rows = 0;
    for (uint32_t i = from; i < to; i++) {
        uint32_t slot = slots ? slots[i] : first + i;
        if (slot == DRAY__NONE)
            continue;
        if (writer >= 0 && dray__is_partial(p, (uint32_t)writer, slot))
            push_segment(p, (uint32_t)writer, slot);
        p->places[writer + 1][slot] = (dray__place){.put = put->index, .item = i / divisor};
        bool complete = !stays || !stays[i];
        for (uint32_t c = 0; complete && c < put->column_count; c++)
            dray__bit_set(p->columns[put->columns[c].column], slot);
        if (!complete)
            put->goes_on = UINT64_C(1) << writer;
        for (uint32_t t = 0; t < table->task_count; t++)
            put->unsettled[t] +=
                dray__is_provisional(p, t, slot) ||
                (!dray__bit_get(p->tracks[t].done, slot) && !dray__bit_get(p->dead, slot));
        rows += complete;
    }
    dray__versions_note(table, p, put, slots, first, from, to, divisor);
    return rows;
}

void dray__put_finish(dray__table *table, dray__partition *p, dray__put *put, uint32_t rows)
{
    uint64_t bytes = 0;
    for (uint32_t c = 0; c < put->column_count; c++) {
        p->committed[put->columns[c].column] += rows;
        uint64_t size = column_bytes(table, put, &put->columns[c]);
        put->columns[c].chunk->live++;
        put->columns[c].chunk->live_bytes += size;
        table->columns[put->columns[c].column].rows_in += rows;
        table->columns[put->columns[c].column].bytes_in += size;
        bytes += size;
    }
    for (uint32_t t = 0; t < table->task_count; t++)
        if (put->unsettled[t])
            put->open_tasks |= UINT64_C(1) << t;
    set_live(table, p, p->live + bytes);
    trim(table, put);
}

void dray__put_apply(dray__table *table, dray__partition *p, int writer, dray__put *put,
                     const uint32_t *slots, uint32_t first, uint32_t count, uint32_t divisor,
                     const bool *stays)
{
    dray__put_begin(table, p, put);
    uint32_t rows = dray__put_rows(table, p, writer, put, slots, first, 0, count, divisor, stays);
    dray__put_finish(table, p, put, rows);
}

bool dray__row_tag(const dray__table *table, const dray__partition *p, uint32_t slot, uint32_t key,
                   double *value)
{
    uint64_t newest = 0;
    for (uint32_t w = 0; w <= table->task_count; w++) {
        const dray__place *place = p->places[w] ? &p->places[w][slot] : NULL;
        const dray__put *put = place && place->put != DRAY__NONE ? p->puts[place->put] : NULL;
        if (!put || put->seq < newest)
            continue;
        uint32_t from = put->tag_start ? put->tag_start[place->item] : 0;
        uint32_t to = put->tag_start ? put->tag_start[place->item + 1] : put->tag_count;
        for (uint32_t i = from; i < to; i++)
            if (put->tags[i].key == key) {
                *value = put->tags[i].value;
                newest = put->seq;
            }
    }
    return newest != 0;
}

void dray__put_settled(dray__table *table, dray__partition *p, uint32_t task, uint32_t slot)
{
    for (uint32_t w = 0; w <= table->task_count; w++) {
        uint32_t at = DRAY__NONE;
        const dray__place *place = NULL;
        while (dray__next_place(p, (int)w - 1, slot, &at, &place)) {
            dray__put *put = p->puts[place->put];
            if (--put->unsettled[task])
                continue;
            put->open_tasks &= ~(UINT64_C(1) << task);
            trim(table, put);
        }
    }
}

void dray__put_unpin(dray__table *table, dray__put *put, bool retire)
{
    for (uint32_t i = 0; retire && i < put->column_count; i++)
        if (put->columns[i].chunk)
            put->columns[i].chunk->retired = true;
    if (--put->pins)
        return;
    if (put->partition || put->cell_count)
        trim(table, put);
    else
        free_put(table, put);
}

void dray__puts_clear(dray__table *table, dray__partition *p)
{
    for (uint32_t i = 0; i < p->put_count; i++) {
        dray__put *put = p->puts[i];
        put->partition = NULL;
        for (uint32_t c = 0; c < put->column_count; c++)
            if (put->columns[c].chunk)
                table->hidden += column_bytes(table, put, &put->columns[c]);
        if (!put->pins)
            free_put(table, put);
    }
    p->put_count = 0;
}
