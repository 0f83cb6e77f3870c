/* Keyed partitions in a journal: the puts that it needs, and the rest of their state. */
#include "queue/table/keyed_inside.h"

#include "base/array.h"
#include "base/error.h"

#include <stdlib.h>
#include <string.h>

int dray__keyed_place(dray__table *table, dray__keyed *p, const dray__row_at *at, const char *key,
                      uint64_t mark, uint32_t most, dray_error *error)
{
    uint64_t slots = table->settings.capacity_rows;
    uint32_t slot = *key ? dray__key_find(p, key, dray__key_hash(key)) : DRAY__NONE;
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
    if (dray__keyed_is_row(p, at)) {
        row->mark = mark;
        return strcmp(row->key ? row->key : "", key) == 0
                   ? DRAY_OK
                   : dray__fail(error, DRAY_EFORMAT, "partition %s: row %u has key %s, found %s",
                                p->name, at->slot, row->key ? row->key : "none", key);
    }
    if (row && row->generation)
        dray__keyed_drop_row(table, p, at->slot);
    slot = *key ? dray__key_find(p, key, dray__key_hash(key)) : DRAY__NONE;
    if (slot != DRAY__NONE)
        dray__keyed_drop_row(table, p, slot);
    int rc =
        dray__keyed_add_row(table, p, at->slot, *key ? key : NULL, at->generation, &slot, error);
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
        qsort(numbers, *count, sizeof *numbers, dray__by_u32);
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
        rc = dray__keyed_place(table, p, &kept->row.at, kept->row.key, mark, most, error);
    dray__keyed_row *row = rc ? NULL : &p->rows[kept->row.at.slot];
    if (row && (note->size > DRAY_ROW_TAG_MAX || (note->size && !note->given)))
        rc = dray__fail(error, DRAY_EFORMAT,
                        "partition %s, row %u: a tag of at most %u bytes expected, found %zu%s",
                        p->name, kept->row.at.slot, DRAY_ROW_TAG_MAX, note->size,
                        note->given ? "" : " of none");
    uint8_t *copy = !rc && note->given ? malloc(note->size + 1) : NULL;
    if (!rc && note->given && !copy)
        rc = dray__nomem(error);
    if (rc)
        return rc;
    if (note->size)
        memcpy(copy, note->data, note->size);
    free(row->note);
    row->note = copy;
    dray__keyed_count(table, p, (int64_t)note->size - (int64_t)row->note_size);
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
    if (!rc && (!kept->generation || kept->generation > most))
        rc = dray__fail(error, DRAY_EFORMAT, "partition %s: generation 1 to %u expected, found %u",
                        kept->name, most, kept->generation);
    if (!rc && dray__table_partition(table, kept->name))
        rc = dray__fail(error, DRAY_EFORMAT,
                        "partition %s: one of rows with keys expected, found one whose rows are "
                        "claimed",
                        kept->name);
    if (rc)
        return rc;
    if (!p && !(p = dray__keyed_new(kept->name)))
        return dray__nomem(error);
    if (!dray__table_keyed(table, kept->name))
        dray__keyed_link(table, p);
    p->generation = kept->generation;
    for (uint32_t i = 0; !rc && i < kept->row_count; i++)
        rc = restore_row(table, p, &kept->rows[i], mark, most, error);
    for (uint32_t i = 0; !rc && i < kept->task_count; i++) {
        rc = dray__name_check(kept->tasks[i], "task", error);
        if (!rc)
            rc = dray__keyed_add_task(p, kept->tasks[i], &t, error);
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
    for (dray__keyed *p = table->keyed, *next; p; p = next) { /* the partitions that were dropped */
        next = p->next;
        for (uint32_t slot = 0; slot < p->end; slot++)
            if (p->rows[slot].generation && p->rows[slot].mark != mark)
                dray__keyed_drop_row(table, p, slot);
        if (!p->row_count)
            dray__keyed_end(table, p);
    }
    return DRAY_OK;
}
