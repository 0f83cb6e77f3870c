/* What the files of `dray bench queue` share: bench_queue.c (bytes),
 * bench_queue_journal.c, bench_queue_claims.c. */
#ifndef DRAY_CMD_BENCH_QUEUE_H
#define DRAY_CMD_BENCH_QUEUE_H

#include "cmd/bench.h"

#include <dray/queue.h>

enum { SAMPLES = 256, COLUMNS_MAX = 32, CLAIM = 32 };

typedef struct queue_bench {
    bench *b;
    char folder[64], socket[96], keeper[96], journal[96];
    pid_t coordinator;
    dray_context *context;
    dray_queue *queue;
    uint32_t columns;
    size_t cell; /* bytes of one sample in one column */
    uint8_t *source, *target;
    size_t bytes;
    int round;
    char names[COLUMNS_MAX][8];
    const char *list[COLUMNS_MAX];
} queue_bench;

void queue_bench_must(const queue_bench *s, int rc, const dray_error *error);
void queue_bench_columns(queue_bench *s, uint32_t columns);
dray_queue *queue_bench_open(const queue_bench *s, const char *name, const dray_queue_task *tasks,
                             uint32_t count, int32_t durability);
/* One partition inserted, put by one task, read by another, cleared: seconds. */
double queue_bench_put_and_read(queue_bench *s);
/* A queue whose one partition has `rows` rows of `columns` columns, all ready for `tasks` tasks. */
dray_queue *queue_bench_ready(queue_bench *s, const char *name, uint32_t rows, uint32_t columns,
                              uint32_t tasks, int32_t durability);
dray_batch *queue_bench_claim(const queue_bench *s, const char *task, uint32_t count);
/* Claims whose commit rides on the next one: samples per second. */
double queue_bench_stream(const queue_bench *s, uint32_t count, uint32_t rows, const char *task);

/* Another process that answers, over a socket as the coordinator's, as bare as can be. */
typedef struct queue_echo {
    int fd;
    pid_t pid;
} queue_echo;

queue_echo queue_bench_echo(const queue_bench *s); /* before the coordinator: it inherits nothing */

void queue_bench_claims(queue_bench *s, const queue_echo *e);
void queue_bench_journal(queue_bench *s);

/* The rows of --hosts: "A,B". */
void queue_bench_hosts(bench *b, const char *pair);

#endif
