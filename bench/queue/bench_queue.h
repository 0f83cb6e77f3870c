/* What the files of `dray bench queue` share: bench_queue.c (bytes),
 * bench_queue_journal.c, bench_queue_claims.c, bench_queue_beside.c. */
#pragma once

#include "cmd/bench.h"

#include <dray/queue.h>

enum { SAMPLES = 256, COLUMNS_MAX = 32, CLAIM = 32 };

/* The process that reads what this one puts (bench_queue_reader.c). */
typedef struct queue_reader {
    int fd;
    pid_t pid;
    uint8_t
        *between; /* memory that both share, as large as what is put; bare copies go through it */
} queue_reader;

typedef struct queue_bench {
    bench *b;
    queue_reader reader;
    char folder[64], socket[96], keeper[96], journal[96];
    pid_t coordinator;
    dray_context *context;
    dray_queue *queue;
    const char *name;   /* the queue's */
    int32_t durability; /* the same */
    uint32_t columns;
    size_t cell; /* bytes of one sample in one column */
    uint8_t *source, *target;
    size_t bytes;
    int round;
    char names[COLUMNS_MAX][8];
    const char *list[COLUMNS_MAX];
} queue_bench;

/* A session with the coordinator at the socket. */
dray_context *queue_bench_context(const bench *b, const char *socket, const char *name);
void queue_bench_columns(queue_bench *s, uint32_t columns);
dray_queue *queue_bench_open(const queue_bench *s, const char *name, const dray_queue_task *tasks,
                             uint32_t count, int32_t durability);
/* The queue whose tasks write and read s->columns columns: what queue_bench_put_and_read takes. */
void queue_bench_shape(queue_bench *s, const char *name, uint32_t columns, int32_t durability);
/* One partition inserted, put by one task, read by the other process, cleared: the seconds that the
 * two took, added. */
double queue_bench_put_and_read(queue_bench *s);
/* Reads what was put into s->queue: seconds. */
double queue_bench_get(const queue_bench *s);
/* As many values as are put, the same in both processes. */
void queue_bench_values(uint8_t *data, size_t bytes);

/* Before the coordinator, as it inherits nothing. bytes: that are put at most. */
queue_reader queue_bench_reader(const queue_bench *s, size_t bytes);
/* The reader reads what was put, or copies the bytes out of `between` by pieces: seconds. */
double queue_bench_read(const queue_bench *s);
double queue_bench_copy_out(const queue_bench *s, size_t piece);
/* Ends the benchmark unless the reader's bytes of the last read are those that were put. */
void queue_bench_check(const queue_bench *s);
void queue_bench_reader_end(const queue_bench *s);
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
void queue_bench_beside(queue_bench *s); /* claims beside a large insert */
void queue_bench_journal(queue_bench *s);

/* The rows of --hosts: "A,B". */
void queue_bench_hosts(bench *b, const char *pair);
