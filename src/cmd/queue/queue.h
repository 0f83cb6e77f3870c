/* src/cmd/queue/: `dray queue`. queue.c reads the options that its parts share, queue_parts.c and
 * queue_trainer.c have the parts themselves, queue_claim.c claims and commits rows, and
 * queue_json.c makes rows of JSON and JSON of rows. */

/* The values of the options of `dray queue`, and the functions of its parts. */
#pragma once

#include "cmd/queue/queue_json.h"

typedef struct queue_arguments {
    const struct queue_verb *verb;
    const char *address, *queue, *partition, *task, *reason;
    const char *consumers, *cost;
    cmd_list words, columns, tasks, tags, provisional;
    cmd_dtype dtypes[CMD_LIST_MAX];
    uint32_t dtype_count;
    int64_t rows;  /* --rows, --count; -1 when not given */
    int64_t fresh; /* the version of the weights that the consumer uses; -1 when not given */
    int64_t staleness;
    int64_t group_size, hold_s, timeout_s, max_attempts, capacity_rows, capacity_bytes;
    int64_t refill, decline, version; /* 0 when not given */
    int64_t epoch, round, rank, ranks, peer, peers, token_cap, micro_rows;
    int policy, on_loss, durability;
    bool up_to, seal, json, open;
    bool whole;    /* insert: all rows in one step */
    json_t *input; /* the rows that insert and load put */
} queue_arguments;

/* Each part does its work, prints the result to stdout, and returns DRAY_OK or the code of
 * *error. `queue` is the queue that --queue names; it is NULL for parts that open it themselves
 * or use a claim. */
typedef int cmd_queue_part(const queue_arguments *a, struct dray_queue *queue, dray_error *error);
cmd_queue_part cmd_queue_open, cmd_queue_insert, cmd_queue_load, cmd_queue_seal, cmd_queue_clear,
    cmd_queue_end, cmd_queue_wait, cmd_queue_claim, cmd_queue_read, cmd_queue_commit,
    cmd_queue_fail, cmd_queue_release, cmd_queue_refill, cmd_queue_cursor, cmd_queue_cover,
    cmd_queue_resume, cmd_queue_stat;

/* Calls a part with the queue. `options` creates the queue; NULL when it exists already. */
int cmd_queue_with(const queue_arguments *a, const struct dray_queue_options *options,
                   cmd_queue_part *part, dray_error *error);
