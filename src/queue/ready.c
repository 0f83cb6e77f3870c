/* Which rows are ready: words recomputed where something changed, ready rows and whole groups
 * listed in the order in which they became so. */
#include "queue/table.h"

bool dray__finished(const dray__partition *p, uint32_t task)
{
    return p->sealed && p->tracks[task].settled_count == p->rows;
}

uint32_t dray__open_rows(const dray__partition *p, uint32_t task)
{
    const dray__track *track = &p->tracks[task];
    return p->rows - track->settled_count - (track->taken_count - track->taken_dead);
}

static void list_append(dray__track *track, uint32_t slot)
{
    dray__row_state *row = &track->rows[slot];
    row->next = DRAY__NONE;
    row->prev = track->tail;
    if (track->tail == DRAY__NONE)
        track->head = slot;
    else
        track->rows[track->tail].next = slot;
    track->tail = slot;
    track->ready_count++;
}

static void list_remove(dray__track *track, uint32_t slot)
{
    dray__row_state *row = &track->rows[slot];
    if (row->prev == DRAY__NONE)
        track->head = row->next;
    else
        track->rows[row->prev].next = row->next;
    if (row->next == DRAY__NONE)
        track->tail = row->prev;
    else
        track->rows[row->next].prev = row->prev;
    track->ready_count--;
}

static void group_append(dray__track *track, uint32_t g)
{
    dray__link *link = &track->groups[g];
    link->next = DRAY__NONE;
    link->prev = track->group_tail;
    if (track->group_tail == DRAY__NONE)
        track->group_head = g;
    else
        track->groups[track->group_tail].next = g;
    track->group_tail = g;
    dray__bit_set(track->whole, g);
}

static void group_remove(dray__track *track, uint32_t g)
{
    dray__link *link = &track->groups[g];
    if (link->prev == DRAY__NONE)
        track->group_head = link->next;
    else
        track->groups[link->prev].next = link->next;
    if (link->next == DRAY__NONE)
        track->group_tail = link->prev;
    else
        track->groups[link->next].prev = link->prev;
    dray__bit_clear(track->whole, g);
}

static void refresh_group(dray__table *table, dray__partition *p, uint32_t task, uint32_t g)
{
    dray__track *track = &p->tracks[task];
    dray__group_range range = p->groups[g];
    uint32_t ready = 0, settled = 0, last = (range.first + range.count - 1) / 64;
    for (uint32_t w = range.first / 64; w <= last; w++) {
        uint64_t mask = dray__bit_mask(w, range.first, range.count);
        ready += (uint32_t)__builtin_popcountll(track->ready[w] & mask);
        settled += (uint32_t)__builtin_popcountll((track->done[w] | p->dead[w]) & mask);
    }
    bool whole = ready && ready + settled == range.count;
    if (whole == dray__bit_get(track->whole, g))
        return;
    if (whole) {
        group_append(track, g);
        table->dirty |= UINT64_C(1) << task;
    } else {
        group_remove(track, g);
    }
}

void dray__refresh(dray__table *table, dray__partition *p, uint32_t task, uint32_t w, bool settled)
{
    dray__track *track = &p->tracks[task];
    const dray__qtask *names = &table->tasks[task];
    uint64_t ready = dray__bit_mask(w, 0, p->rows) &
                     ~(track->taken[w] | track->done[w] | p->dead[w] | p->vacant[w]);
    for (uint32_t i = 0; ready && i < names->needs_count; i++) {
        uint32_t c = names->needs[i];
        ready &= c < p->column_capacity && p->columns[c] ? p->columns[c][w] : 0;
    }
    uint64_t changed = ready ^ track->ready[w];
    track->ready[w] = ready;
    for (uint64_t left = changed; left; left &= left - 1) {
        uint32_t bit = (uint32_t)__builtin_ctzll(left), slot = w * 64 + bit;
        if (ready >> bit & 1)
            list_append(track, slot);
        else
            list_remove(track, slot);
    }
    if (ready & changed)
        table->dirty |= UINT64_C(1) << task;
    if (settled && dray__finished(p, task)) {
        table->dirty |= UINT64_C(1) << task;
        table->finished = table->demanded = true;
    }
    if (p->group_size == 1)
        return;
    uint64_t left = settled ? dray__bit_mask(w, 0, p->rows) : changed;
    while (left) {
        uint32_t g = p->group_of[w * 64 + (uint32_t)__builtin_ctzll(left)];
        refresh_group(table, p, task, g);
        left &= ~dray__bit_mask(w, p->groups[g].first, p->groups[g].count);
    }
}

void dray__refresh_all_tasks(dray__table *table, dray__partition *p, uint32_t w, bool settled)
{
    for (uint32_t t = 0; t < table->task_count; t++)
        dray__refresh(table, p, t, w, settled);
}
