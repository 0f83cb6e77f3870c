/* A queue of three tasks, rollout -> reward -> actor, whose columns are one int32 a row. */
#pragma once

#include "queue/one_fixture.h"

static const char *const prompts[] = {"prompts"};
static const char *const responses[] = {"responses"};
static const char *const rewards[] = {"rewards"};
static const char *const both[] = {"responses", "rewards"};

static const dray_queue_task three_tasks[] = {
    {.name = "rollout", .needs = prompts, .needs_count = 1, .writes = responses, .writes_count = 1},
    {.name = "reward", .needs = responses, .needs_count = 1, .writes = rewards, .writes_count = 1},
    {.name = "actor", .needs = both, .needs_count = 2},
};

/* Opens the queue with options that name no tasks. */
static inline dray_queue *open_three(dray_context *context, const char *name,
                                     dray_queue_options options)
{
    dray_queue *queue;
    options.tasks = three_tasks;
    options.task_count = 3;
    OK(dray_queue_open(context, name, &options, &queue, &error));
    return queue;
}

static inline dray_queue *open_queue(dray_context *context, const char *name, uint64_t rows,
                                     uint64_t bytes)
{
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.on_loss = DRAY_ON_LOSS_SHRINK_GROUP;
    options.capacity_rows = rows;
    options.capacity_bytes = bytes;
    return open_three(context, name, options);
}

static inline dray_column_data int_column(const char *name, const int32_t *values)
{
    return (dray_column_data){.name = name, .dtype = DRAY_I32, .values = values};
}

static inline int try_insert_ints(dray_queue *queue, const char *partition, uint32_t rows,
                                  uint32_t group)
{
    int32_t values[64];
    for (int i = 0; i < 64; i++)
        values[i] = i * 10;
    dray_column_data column = int_column("prompts", values);
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = partition;
    o.rows = rows;
    o.group_size = group;
    o.columns = &column;
    o.column_count = 1;
    return dray_queue_insert(queue, &o, NULL, &error);
}

static inline void insert_ints(dray_queue *queue, const char *partition, uint32_t rows,
                               uint32_t group)
{
    OK(try_insert_ints(queue, partition, rows, group));
}

static inline dray_claim_options want(const char *task, uint32_t count)
{
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = task;
    o.count = count;
    return o;
}

/* Claims rows of one partition, within 20 s even where the queue's other calls have shorter
 * timeouts. */
static inline dray_batch *claim_of(dray_queue *queue, const char *task, const char *partition,
                                   uint32_t rows)
{
    dray_batch *batch;
    dray_claim_options o = want(task, rows);
    o.partition = partition;
    o.timeout_ns = 20 * DRAY__SECOND;
    OK(dray_queue_claim(queue, &o, &batch, &error));
    return batch;
}

static inline void set_ints(dray_batch *batch, const char *name, int32_t base)
{
    int32_t values[64];
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
        values[i] = base + (int32_t)dray_batch_row(batch, i)->slot;
    dray_column_data column = int_column(name, values);
    OK(dray_batch_set(batch, &column, &error));
}

static inline void all_rows(dray_queue *queue, const char *task, const char *output, int32_t base,
                            uint32_t count)
{
    dray_batch *batch;
    dray_claim_options o = want(task, count);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), count);
    if (output)
        set_ints(batch, output, base);
    COMMIT(batch);
}

static inline bool status_has(dray_queue *queue, const char *text)
{
    char *status;
    OK(dray_queue_status(queue, &status, &error));
    bool found = strstr(status, text) != NULL;
    if (!found)
        fprintf(stderr, "no %s in %s\n", text, status);
    free(status);
    return found;
}

/* Answers a demand with prompts that all have one value. */
static inline void refill_ints(dray_queue *queue, const dray_refill *refill, int32_t value)
{
    dray_column_data column = int_column("prompts", &value);
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = refill->partition;
    o.rows = refill->rows;
    o.once_per_group = 1; /* for its one group */
    o.refill = refill->id;
    o.columns = &column;
    o.column_count = 1;
    OK(dray_queue_insert(queue, &o, NULL, &error));
}
