/* Keeps track of the rows that are ready. Words of bits are recomputed where something changed;
 * ready rows and whole groups are listed in the order in which they became so. */
#include "queue/table/table_inside.h"

bool dray__finished(const dray__partition *p, uint32_t task)
{
    return p->sealed && p->tracks[task].settled_count == p->rows;
}

uint32_t dray__open_rows(const dray__partition *p, uint32_t task)
{
    const dray__track *track = &p->tracks[task];
    return p->rows - track->settled_count - (track->taken_count - track->taken_dead);
}

/* Returns the rank of a row that the task has begun, or 0. Begun rows come before others, oldest
 * version first. */
static uint64_t begun(const dray__partition *p, uint32_t task, uint32_t slot)
{
    return !dray__is_partial(p, task, slot) ? 0 : p->oldest ? p->oldest[slot] + 1 : 1;
}

/* Returns the row before which the slot is inserted; NONE when it is the last. */
static uint32_t place_in_list(const dray__partition *p, uint32_t task, uint32_t slot)
{
    const dray__track *track = &p->tracks[task];
    uint64_t age = p->places[task + 1] ? begun(p, task, slot) : 0;
    uint32_t at = age ? track->head : DRAY__NONE;
    for (; at != DRAY__NONE; at = track->rows[at].next) {
        uint64_t other = begun(p, task, at);
        if (!other || other > age || (other == age && at > slot))
            break;
    }
    return at;
}

static void list_add(const dray__partition *p, uint32_t task, uint32_t slot)
{
    dray__track *track = &p->tracks[task];
    dray__row_state *row = &track->rows[slot];
    row->next = place_in_list(p, task, slot);
    row->prev = row->next == DRAY__NONE ? track->tail : track->rows[row->next].prev;
    *(row->prev == DRAY__NONE ? &track->head : &track->rows[row->prev].next) = slot;
    *(row->next == DRAY__NONE ? &track->tail : &track->rows[row->next].prev) = slot;
    track->ready_count++;
}

static void list_remove(dray__track *track, uint32_t slot)
{
    const dray__row_state *row = &track->rows[slot];
    *(row->prev == DRAY__NONE ? &track->head : &track->rows[row->prev].next) = row->next;
    *(row->next == DRAY__NONE ? &track->tail : &track->rows[row->next].prev) = row->prev;
    track->ready_count--;
}

/* Returns the rank of the oldest member that the task has begun; 0 when none is. */
static uint64_t group_begun(const dray__partition *p, uint32_t task, uint32_t g)
{
    uint64_t oldest = 0;
    for (uint32_t s = p->groups[g].first; s < p->groups[g].first + p->groups[g].count; s++) {
        uint64_t age = begun(p, task, s);
        if (age && (!oldest || age < oldest))
            oldest = age;
    }
    return oldest;
}

static void group_add(const dray__partition *p, uint32_t task, uint32_t g)
{
    dray__track *track = &p->tracks[task];
    dray__link *link = &track->groups[g];
    uint64_t age = group_begun(p, task, g);
    uint32_t at = age ? track->group_head : DRAY__NONE;
    for (; at != DRAY__NONE; at = track->groups[at].next) {
        uint64_t other = group_begun(p, task, at);
        if (!other || other > age)
            break;
    }
    link->next = at;
    link->prev = at == DRAY__NONE ? track->group_tail : track->groups[at].prev;
    *(link->prev == DRAY__NONE ? &track->group_head : &track->groups[link->prev].next) = g;
    *(link->next == DRAY__NONE ? &track->group_tail : &track->groups[link->next].prev) = g;
    dray__bit_set(track->whole, g);
}

static void group_remove(dray__track *track, uint32_t g)
{
    const dray__link *link = &track->groups[g];
    *(link->prev == DRAY__NONE ? &track->group_head : &track->groups[link->prev].next) = link->next;
    *(link->next == DRAY__NONE ? &track->group_tail : &track->groups[link->next].prev) = link->prev;
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
        group_add(p, task, g);
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
                     ~(track->taken[w] | track->done[w] | p->dead[w] | p->vacant[w] | p->away[w]);
    for (uint32_t i = 0; ready && i < names->needs_count; i++) {
        uint32_t c = names->needs[i];
        ready &= c < p->column_capacity && p->columns[c] ? p->columns[c][w] : 0;
    }
    uint64_t changed = ready ^ track->ready[w];
    track->ready[w] = ready;
    for (uint64_t left = changed; left; left &= left - 1) {
        uint32_t bit = (uint32_t)__builtin_ctzll(left), slot = w * 64 + bit;
        if (ready >> bit & 1)
            list_add(p, task, slot);
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
