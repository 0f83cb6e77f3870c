/* The model that test_table.c compares the table with: all facts about all rows, in arrays. */
#pragma once

#include "base/random.h"
#include "queue/table/table.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TASKS = 5, COLUMNS = 5, NAMES = 5, ROWS = 400, PUTS = 4096, CLAIMS = 64, CLIENTS = 6 };
enum { CAPACITY_ROWS = 300, CAPACITY_BYTES = 200000, MAX_ATTEMPTS = 3 };

static const char *const column_names[COLUMNS] = {"prompts", "x", "y", "z", "w"};
static const char *const c_prompts[] = {"prompts"}, *const c_x[] = {"x"}, *const c_y[] = {"y"};
static const char *const c_xy[] = {"x", "y"}, *const c_z[] = {"z"}, *const c_w[] = {"w"};

/* Task e needs nothing and writes a column that no task reads. Task d only acknowledges. */
static const dray__task_names task_names[TASKS] = {
    {"a", c_prompts, c_x, 1, 1}, {"b", c_prompts, c_y, 1, 1}, {"c", c_xy, c_z, 2, 1},
    {"d", c_z, NULL, 1, 0},      {"e", NULL, c_w, 0, 1},
};
static const unsigned needs[TASKS] = {1, 1, 2 | 4, 8, 0};
static const int writes[TASKS] = {1, 2, 3, -1, 4};

typedef struct model_row {
    bool dead, vacant;
    uint32_t generation;
    unsigned columns;
    struct {
        enum { FREE, TAKEN, DONE } state;
        bool begun; /* committed in part */
        uint32_t attempt, failures;
        uint64_t ready_since; /* the number of the step; 0 means not ready */
    } task[TASKS];
} model_row;

typedef struct model_partition {
    char name[16];
    uint32_t generation, rows, group;
    bool sealed;
    uint64_t reserved;
    model_row row[ROWS];
    uint64_t group_since[TASKS][ROWS];
} model_partition;

typedef struct model_put { /* one column of one put */
    uint32_t generation, rows, slots[ROWS], row_generations[ROWS];
    int column, pins, goes_on; /* goes_on: the task that appends to rows of it; -1 means none */
    uint64_t bytes;
    bool cleared;
} model_put;

typedef struct model_claim {
    bool used, committed, stale, gone, failed;
    int client, task;
    uint32_t ticket, generation, count, slots[ROWS];
    int64_t hold;
    uint32_t pinned[ROWS * 2], pin_count;
} model_claim;

typedef struct model_demand {
    uint32_t id, generation, count, slots[8], task;
    int holder; /* -1 means nobody */
} model_demand;

typedef struct world {
    uint64_t seed, draws, step;
    dray__table *table;
    dray__client *clients[CLIENTS];
    uint64_t chunks[CLIENTS];
    uint32_t tickets;
    model_partition *partitions[NAMES];
    uint32_t partition_count;
    struct {
        char name[16];
        unsigned finished;
    } former[NAMES];
    model_put puts[PUTS];
    uint32_t put_count;
    model_claim claims[CLAIMS];
    model_demand demands[ROWS];
    uint32_t demand_count, generations;
    int32_t on_loss;
    bool ended;
    int64_t now;
    uint64_t digest;
} world;

static inline uint32_t draw(world *w, uint32_t below)
{
    return (uint32_t)(dray__random_u64(w->seed, 1, w->draws++) % below);
}

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s (seed %llu, step %llu)\n", __FILE__, __LINE__, #condition,  \
                    (unsigned long long)w->seed, (unsigned long long)w->step);                     \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static inline void note(world *w, uint64_t value)
{
    w->digest = (w->digest ^ value) * UINT64_C(0x9E3779B97F4A7C15);
}

/* ---- the model ------------------------------------------------------------------------------- */

static inline model_partition *find(world *w, const char *name)
{
    for (uint32_t i = 0; i < w->partition_count; i++)
        if (strcmp(w->partitions[i]->name, name) == 0)
            return w->partitions[i];
    return NULL;
}

static inline model_partition *find_generation(world *w, uint32_t generation)
{
    for (uint32_t i = 0; i < w->partition_count; i++)
        if (w->partitions[i]->generation == generation)
            return w->partitions[i];
    return NULL;
}

static inline bool settled(const model_row *row, int t)
{
    return row->dead || row->task[t].state == DONE;
}

static inline bool ready(const model_row *row, int t)
{
    return !row->dead && !row->vacant && row->task[t].state == FREE &&
           (row->columns & needs[t]) == needs[t];
}

static inline uint32_t open_rows(const model_partition *p, int t)
{
    uint32_t open = 0;
    for (uint32_t s = 0; s < p->rows; s++)
        open += !settled(&p->row[s], t) && p->row[s].task[t].state != TAKEN;
    return open;
}

static inline bool finished(const model_partition *p, int t)
{
    if (!p->sealed)
        return false;
    for (uint32_t s = 0; s < p->rows; s++)
        if (!settled(&p->row[s], t))
            return false;
    return true;
}

static inline bool whole(const model_partition *p, int t, uint32_t g)
{
    uint32_t r = 0, d = 0;
    for (uint32_t s = g * p->group; s < (g + 1) * p->group; s++) {
        r += ready(&p->row[s], t);
        d += settled(&p->row[s], t);
    }
    return r && r + d == p->group;
}

/* Returns the order in which rows are given out: begun rows first, by slot. */
static inline uint64_t row_age(const model_partition *p, int t, uint32_t slot)
{
    return p->row[slot].task[t].begun ? slot : ROWS + p->row[slot].task[t].ready_since;
}

static inline uint64_t group_age(const model_partition *p, int t, uint32_t g)
{
    bool begun = false;
    if (p->group == 1) /* every row is a group, and given out as a row */
        return row_age(p, t, g);
    for (uint32_t s = g * p->group; s < (g + 1) * p->group; s++)
        begun |= p->row[s].task[t].begun;
    return p->group_since[t][g] + (begun ? 0 : UINT32_MAX);
}

/* Runs after every step. Notes since when rows and groups are ready. */
static inline void stamp(world *w)
{
    for (uint32_t i = 0; i < w->partition_count; i++) {
        model_partition *p = w->partitions[i];
        for (int t = 0; t < TASKS; t++) {
            for (uint32_t s = 0; s < p->rows; s++) {
                uint64_t *since = &p->row[s].task[t].ready_since;
                *since = !ready(&p->row[s], t) ? 0 : *since ? *since : w->step;
            }
            for (uint32_t g = 0; g < p->rows / p->group; g++) {
                uint64_t *since = &p->group_since[t][g];
                *since = !whole(p, t, g) ? 0 : *since ? *since : w->step;
            }
        }
    }
}

static inline bool extent_lives(world *w, const model_put *put)
{
    if (put->pins)
        return true;
    const model_partition *p = put->cleared ? NULL : find_generation(w, put->generation);
    if (!p)
        return false;
    for (int t = 0; t < TASKS; t++)
        for (uint32_t i = 0; (needs[t] >> put->column & 1 || put->goes_on == t) && i < put->rows;
             i++)
            if (p->row[put->slots[i]].generation == put->row_generations[i] &&
                !p->row[put->slots[i]].vacant && !settled(&p->row[put->slots[i]], t))
                return true;
    return false;
}
