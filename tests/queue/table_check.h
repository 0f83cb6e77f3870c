/* Checks of the table's own consistency, and of its agreement with the model (table_model.h). */
#pragma once

#include "queue/table_model.h"

static inline uint32_t popcount(const uint64_t *words, uint32_t rows)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < rows; i++)
        count += dray__bit_get(words, i);
    return count;
}

static inline void check_track(world *w, const model_partition *m, const dray__partition *p, int t)
{
    const dray__track *track = &p->tracks[t];
    uint32_t listed = 0, groups = 0;
    uint64_t last = 0;
    for (uint32_t s = track->head; s != DRAY__NONE; s = track->rows[s].next, listed++) {
        CHECK(row_age(m, t, s) >= last); /* in order of readiness, begun rows first */
        last = row_age(m, t, s);
        CHECK(m->row[s].task[t].ready_since);
    }
    CHECK(listed == track->ready_count && listed == popcount(track->ready, p->rows));
    CHECK(track->taken_count == popcount(track->taken, p->rows));
    CHECK(track->done_count == popcount(track->done, p->rows));
    uint32_t done = 0, cut = 0;
    for (uint32_t s = 0; s < m->rows; s++) {
        const model_row *row = &m->row[s];
        cut += row->task[t].begun && row->task[t].state == FREE && !row->dead && !row->vacant;
        CHECK(ready(row, t) == dray__bit_get(track->ready, s));
        CHECK((row->task[t].state == TAKEN) == dray__bit_get(track->taken, s));
        CHECK((row->task[t].state == DONE) == dray__bit_get(track->done, s));
        CHECK(row->task[t].attempt == track->rows[s].attempt);
        done += settled(row, t);
        if (s < track->open_from)
            CHECK(settled(row, t) || row->task[t].state == TAKEN);
    }
    CHECK(done == track->settled_count && cut == track->cut_count);
    for (uint32_t g = track->group_head; g != DRAY__NONE; g = track->groups[g].next, groups++)
        CHECK(m->group_since[t][g]);
    uint32_t expected = 0;
    for (uint32_t g = 0; m->group > 1 && g < m->rows / m->group; g++)
        expected += m->group_since[t][g] != 0;
    CHECK(groups == expected);
}

static inline void check_bytes(world *w)
{
    uint64_t live[NAMES] = {0}, hidden = 0, charged = 0, extents = 0, chunk_live = 0;
    for (uint32_t i = 0; i < w->put_count; i++) {
        const model_put *put = &w->puts[i];
        if (!extent_lives(w, put))
            continue;
        extents++;
        if (put->cleared)
            hidden += put->bytes;
        for (uint32_t k = 0; !put->cleared && k < w->partition_count; k++)
            if (w->partitions[k]->generation == put->generation)
                live[k] += put->bytes;
    }
    for (uint32_t k = 0; k < w->partition_count; k++) {
        CHECK(w->table->partitions[k]->live == live[k]);
        charged += live[k] > w->partitions[k]->reserved ? live[k] : w->partitions[k]->reserved;
    }
    CHECK(w->table->hidden == hidden);
    CHECK(w->table->charged == charged);
    for (size_t i = 0; i < w->table->chunks.capacity; i++)
        if (w->table->chunks.entries[i].key)
            chunk_live += ((dray__chunk *)w->table->chunks.entries[i].value)->live;
    CHECK(chunk_live == extents);
}

static inline void check_world(world *w)
{
    CHECK(w->table->partition_count == w->partition_count);
    uint64_t rows = 0;
    for (uint32_t i = 0; i < w->partition_count; i++) {
        const model_partition *m = w->partitions[i];
        const dray__partition *p = w->table->partitions[i];
        CHECK(strcmp(m->name, p->name) == 0 && m->generation == p->generation);
        CHECK(m->rows == p->rows && m->sealed == p->sealed);
        rows += m->rows;
        for (uint32_t s = 0; s < m->rows; s++) {
            CHECK(m->row[s].dead == dray__bit_get(p->dead, s));
            CHECK(m->row[s].vacant == dray__bit_get(p->vacant, s));
            CHECK(m->row[s].generation == p->row_generations[s]);
        }
        for (int t = 0; t < TASKS; t++)
            check_track(w, m, p, t);
    }
    CHECK(w->table->rows == rows);
    check_bytes(w);
}
