/* Through a bucket: by one core that fills and empties it in turns, as the strategy bucket does; by
 * two, one filling a bucket while the other empties the second; and by two that share the work,
 * each with a bucket of its own. What a second core is best given decides whether a bucket is
 * doubled. */
#include "bench.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKET = 512 << 10, LARGE = 8 << 20, BUCKETS = 2, THREADS = 2 };

typedef struct job {
    const bench *b;
    uint8_t *from, *to, *bucket[BUCKETS];
    size_t bytes, size; /* of all; of a bucket */
    atomic_uint filled; /* buckets so far; the other thread empties them */
    atomic_uint emptied;
} job;

static size_t count_of(const job *j)
{
    return j->bytes / j->size;
}

static void alternate(void *state)
{
    const job *j = state;
    for (size_t i = 0; i < count_of(j); i++) {
        memcpy(j->bucket[0], j->from + i * j->size, j->size);
        memcpy(j->to + i * j->size, j->bucket[0], j->size);
    }
}

static void await(const atomic_uint *count, unsigned least)
{
    while (atomic_load_explicit(count, memory_order_acquire) < least)
        sched_yield();
}

static void *empty(void *state)
{
    job *j = state;
    for (unsigned i = 0; i < count_of(j); i++) {
        await(&j->filled, i + 1);
        memcpy(j->to + i * j->size, j->bucket[i % BUCKETS], j->size);
        atomic_store_explicit(&j->emptied, i + 1, memory_order_release);
    }
    return NULL;
}

static void start(const job *j, pthread_t *thread, void *(*run)(void *), void *state)
{
    if (pthread_create(thread, NULL, run, state))
        bench_die(j->b, "no thread");
}

static void fill_and_empty(void *state)
{
    job *j = state;
    pthread_t thread;
    atomic_store(&j->filled, 0);
    atomic_store(&j->emptied, 0);
    start(j, &thread, empty, j);
    for (unsigned i = 0; i < count_of(j); i++) {
        await(&j->emptied, i < BUCKETS ? 0 : i + 1 - BUCKETS);
        memcpy(j->bucket[i % BUCKETS], j->from + i * j->size, j->size);
        atomic_store_explicit(&j->filled, i + 1, memory_order_release);
    }
    pthread_join(thread, NULL);
}

static void *alternate_part(void *state)
{
    alternate(state);
    return NULL;
}

static void share(void *state)
{
    const job *j = state;
    job part[THREADS];
    pthread_t thread;
    for (unsigned i = 0; i < THREADS; i++) {
        part[i] = (job){.b = j->b,
                        .from = j->from + i * (j->bytes / THREADS),
                        .to = j->to + i * (j->bytes / THREADS),
                        .bucket = {j->bucket[i]},
                        .bytes = j->bytes / THREADS,
                        .size = j->size};
    }
    start(j, &thread, alternate_part, &part[1]);
    alternate(&part[0]);
    pthread_join(thread, NULL);
}

static uint8_t *room(const bench *b, size_t bytes)
{
    uint8_t *at = malloc(bytes);
    if (!at)
        bench_die(b, "out of memory");
    memset(at, 1, bytes);
    return at;
}

static void measure(bench *b, job *j, size_t size, const char *const names[3], double limit)
{
    void (*const runs[])(void *) = {alternate, fill_and_empty, share};
    j->size = size;
    for (int i = 0; i < 3; i++)
        bench_row(b, names[i], (double)j->bytes / bench_median(j->b, runs[i], j), "B/s", limit, 0);
}

int main(int argc, char **argv)
{
    static const char *const small[] = {"one core fills and empties 512 KiB",
                                        "one fills, one empties, 2 x 512 KiB",
                                        "two cores, each fills and empties 512 KiB"};
    static const char *const large[] = {"one core fills and empties 8 MiB",
                                        "one fills, one empties, 2 x 8 MiB",
                                        "two cores, each fills and empties 8 MiB"};
    bench *b = bench_open(argc, argv, "bucket");
    job j = {.b = b, .bytes = bench_quick(b) ? 32u << 20 : 256u << 20};
    j.from = room(b, j.bytes);
    j.to = room(b, j.bytes);
    for (int i = 0; i < BUCKETS; i++)
        j.bucket[i] = room(b, LARGE);
    double limit = bench_memcpy(b, j.bytes);
    measure(b, &j, BUCKET, small, limit);
    measure(b, &j, LARGE, large, limit);
    for (int i = 0; i < BUCKETS; i++)
        free(j.bucket[i]);
    free(j.from);
    free(j.to);
    return bench_close(b);
}
