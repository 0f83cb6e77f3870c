/* The declarations that the files of `dray bench queue` share: bench_queue.c (bytes),
 * bench_queue_journal.c, bench_queue_claims.c, bench_queue_beside.c. */
#pragma once

#include "cmd/bench.h"

#include <dray/queue.h>

enum { SAMPLES = 256, COLUMNS_MAX = 32, CLAIM = 32 };

/* The process that reads the samples that this one puts (bench_queue_reader.c). */
typedef struct queue_reader {
    int fd;
    pid_t pid;
    /* Memory that both processes share, as large as the bytes that are put. Bare copies go through
     * it. */
    uint8_t *between;
} queue_reader;

typedef struct queue_bench {
    bench *b;
    queue_reader reader;
    char folder[64], socket[96], keeper[96], journal[96];
    pid_t coordinator;
    dray_context *context;
    dray_queue *queue;
    const char *name;   /* the queue's name */
    int32_t durability; /* the queue's durability */
    uint32_t columns;
    size_t cell; /* the bytes of one sample in one column */
    uint8_t *source, *target;
    size_t bytes;
    int round;
    char names[COLUMNS_MAX][8];
    const char *list[COLUMNS_MAX];
} queue_bench;

/* Returns a session with the coordinator at the socket. */
dray_context *queue_bench_context(const bench *b, const char *socket, const char *name);
void queue_bench_columns(queue_bench *s, uint32_t columns);
dray_queue *queue_bench_open(const queue_bench *s, const char *name, const dray_queue_task *tasks,
                             uint32_t count, int32_t durability);
/* Opens the queue whose tasks write and read s->columns columns, as queue_bench_put_and_read
 * expects. */
void queue_bench_shape(queue_bench *s, const char *name, uint32_t columns, int32_t durability);
/* Inserts one partition, puts its columns as one task, has the other process read them, and clears
 * it. Returns the sum of the seconds of both processes. */
double queue_bench_put_and_read(queue_bench *s);
/* Reads the samples that were put into s->queue. Returns the seconds. */
double queue_bench_get(const queue_bench *s);
/* Fills `data` with the values that are put, which are the same in both processes. */
void queue_bench_values(uint8_t *data, size_t bytes);

/* Starts the reader. It must be called before the coordinator is started, so that the reader
 * inherits nothing of it. `bytes` is the largest number of bytes that are put at once. */
queue_reader queue_bench_reader(const queue_bench *s, size_t bytes);
/* Have the reader read the samples that were put, or copy their bytes out of `between` in pieces.
 * Both return the reader's seconds. */
double queue_bench_read(const queue_bench *s);
double queue_bench_copy_out(const queue_bench *s, size_t piece);
/* Ends the benchmark unless the reader's bytes of the last read equal those that were put. */
void queue_bench_check(const queue_bench *s);
void queue_bench_reader_end(const queue_bench *s);
/* Returns a queue whose one partition has `rows` rows of `columns` columns, all ready for `tasks`
 * tasks. */
dray_queue *queue_bench_ready(queue_bench *s, const char *name, uint32_t rows, uint32_t columns,
                              uint32_t tasks, int32_t durability);
dray_batch *queue_bench_claim(const queue_bench *s, const char *task, uint32_t count);
/* Claims rows and commits each claim in the request of the next one. Returns samples per second. */
double queue_bench_stream(const queue_bench *s, uint32_t count, uint32_t rows, const char *task);

/* A process that answers over a socket of the coordinator's kind, and does nothing else. */
typedef struct queue_echo {
    int fd;
    pid_t pid;
} queue_echo;

/* Starts the echo. It must be called before the coordinator is started, so that the process
 * inherits nothing of it. */
queue_echo queue_bench_echo(const queue_bench *s);

void queue_bench_claims(queue_bench *s, const queue_echo *e);
void queue_bench_beside(queue_bench *s); /* claims beside a large insert */
void queue_bench_journal(queue_bench *s);

/* Adds the rows of --hosts "A,B". */
void queue_bench_hosts(bench *b, const char *pair);
