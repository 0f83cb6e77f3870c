/* What the options of `dray queue` say, and what its parts do. */
#ifndef DRAY_CMD_QUEUE_H
#define DRAY_CMD_QUEUE_H

#include "cmd/queue_json.h"

enum { QUEUE_LIST_MAX = 64 };

typedef struct queue_arguments {
    const char *address, *queue, *partition, *task, *reason;
    const char *consumers, *cost;
    const char *words[QUEUE_LIST_MAX], *columns[QUEUE_LIST_MAX], *tasks[QUEUE_LIST_MAX];
    const char *tags[QUEUE_LIST_MAX], *provisional[QUEUE_LIST_MAX];
    cmd_dtype dtypes[QUEUE_LIST_MAX];
    uint32_t word_count, column_count, task_count, dtype_count, tag_count, provisional_count;
    int64_t rows;  /* --rows, --count; -1: not given */
    int64_t fresh; /* the version that consumes; -1: not given */
    int64_t staleness;
    int64_t group_size, hold_s, timeout_s, max_attempts, capacity_rows, capacity_bytes;
    int64_t refill, decline, version; /* 0: not given */
    int64_t epoch, round, rank, ranks, peer, peers, token_cap, micro_rows;
    int policy, on_loss, durability;
    bool up_to, seal, json, open;
} queue_arguments;

/* Each does its part, prints the result to stdout, and returns DRAY_OK or what *error says. */
int cmd_queue_open(const queue_arguments *a, dray_error *error);
int cmd_queue_insert(const queue_arguments *a, dray_error *error);
int cmd_queue_load(const queue_arguments *a, dray_error *error);
int cmd_queue_seal(const queue_arguments *a, dray_error *error);
int cmd_queue_clear(const queue_arguments *a, dray_error *error);
int cmd_queue_end(const queue_arguments *a, dray_error *error);
int cmd_queue_wait(const queue_arguments *a, dray_error *error);
int cmd_queue_claim(const queue_arguments *a, dray_error *error);
int cmd_queue_read(const queue_arguments *a, dray_error *error);
int cmd_queue_commit(const queue_arguments *a, dray_error *error);
int cmd_queue_fail(const queue_arguments *a, dray_error *error);
int cmd_queue_release(const queue_arguments *a, dray_error *error);
int cmd_queue_refill(const queue_arguments *a, dray_error *error);
int cmd_queue_cursor(const queue_arguments *a, dray_error *error);
int cmd_queue_cover(const queue_arguments *a, dray_error *error);
int cmd_queue_resume(const queue_arguments *a, dray_error *error);

/* A session with the queue; options NULL: it is there already. End it in any case; returns rc. */
typedef struct queue_session {
    struct dray_context *context;
    struct dray_queue *queue;
} queue_session;

int queue_session_open(const queue_arguments *a, const struct dray_queue_options *options,
                       queue_session *out, dray_error *error);
int queue_session_end(queue_session *s, int rc);
int cmd_queue_stat(const queue_arguments *a, dray_error *error);

#endif
