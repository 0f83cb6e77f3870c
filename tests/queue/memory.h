/* A queue's shared memory never takes more than its capacity, for columns of any shape, however
 * slowly they are read. The oracle is the size of the memory files that the keeper holds. */
#pragma once

#include "queue/fixture.h"

#include <jansson.h>
#include <sys/stat.h>

#define MIB (UINT64_C(1) << 20)

enum { COLUMNS = 8 };

typedef struct memory_test {
    queue_fixture f;
    dray_context *context, *reading;
    dray_queue *queue, *reader; /* the producer's, and the consumer's */
    uint64_t capacity, most;    /* bytes */
    uint8_t *values;
    int partitions;
} memory_test;

static const char *const column_names[COLUMNS] = {"c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"};

static inline dray_queue *memory_open(memory_test *t, dray_context *context)
{
    dray_queue *queue;
    static const char *const done[] = {"done"};
    dray_queue_task tasks[] = {{.name = "train",
                                .needs = column_names,
                                .needs_count = 1,
                                .writes = done,
                                .writes_count = 1},
                               {.name = "log", .needs = column_names, .needs_count = COLUMNS}};
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.tasks = tasks;
    o.task_count = 2;
    o.capacity_bytes = t->capacity;
    OK(dray_queue_open(context, "samples", &o, &queue, &error));
    return queue;
}

static inline void memory_up(memory_test *t, uint64_t capacity)
{
    *t = (memory_test){.capacity = capacity, .values = malloc(capacity)};
    memset(t->values, 1, capacity);
    fixture_up(&t->f);
    t->context = fixture_context(&t->f, "producer");
    t->reading = fixture_context(&t->f, "reader");
    t->queue = memory_open(t, t->context);
    t->reader = memory_open(t, t->reading);
}

static inline void memory_down(memory_test *t)
{
    dray_queue_close(t->queue);
    leave(t->reader, t->context);
    dray_close(t->reading);
    wait_for_chunks(&t->f, 0);
    fixture_down(&t->f);
    free(t->values);
}

/* Returns the bytes of the memory files that the keeper holds now. */
static inline uint64_t kept_bytes(memory_test *t)
{
    char folder[64], target[256];
    uint64_t bytes = 0;
    snprintf(folder, sizeof folder, "/proc/%d/fd", (int)t->f.keeper_pid);
    DIR *dir = opendir(folder);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        struct stat st;
        ssize_t n = readlinkat(dirfd(dir), entry->d_name, target, sizeof target - 1);
        target[n > 0 ? n : 0] = 0;
        if (strncmp(target, "/memfd:dray-samples", 19) == 0 &&
            fstatat(dirfd(dir), entry->d_name, &st, 0) == 0)
            bytes += (uint64_t)st.st_size;
    }
    closedir(dir);
    t->most = bytes > t->most ? bytes : t->most;
    return bytes;
}

/* Inserts one row of `count` columns with these many bytes, in a partition of its own. */
static inline int memory_insert(memory_test *t, const uint64_t *bytes, uint32_t count,
                                int64_t timeout_ns, dray_error *said)
{
    char name[16];
    dray_column_data columns[COLUMNS];
    uint64_t offsets[COLUMNS][2];
    for (uint32_t i = 0; i < count; i++) {
        offsets[i][0] = 0;
        offsets[i][1] = bytes[i];
        columns[i] = (dray_column_data){.name = column_names[i],
                                        .dtype = DRAY_U8,
                                        .ndim = 1,
                                        .offsets = offsets[i],
                                        .values = t->values};
    }
    snprintf(name, sizeof name, "%d", t->partitions);
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = name;
    o.rows = 1;
    o.columns = columns;
    o.column_count = count;
    o.timeout_ns = timeout_ns;
    int rc = dray_queue_insert(t->queue, &o, NULL, said);
    t->partitions += !rc;
    kept_bytes(t);
    return rc;
}

static inline dray_batch *memory_claim(memory_test *t, int partition)
{
    dray_batch *batch;
    char name[16];
    snprintf(name, sizeof name, "%d", partition);
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = "train";
    o.count = 1;
    o.partition = name;
    OK(dray_queue_claim(t->reader, &o, &batch, &error));
    return batch;
}

static inline void memory_clear(memory_test *t, int partition)
{
    char name[16];
    snprintf(name, sizeof name, "%d", partition);
    OK(dray_queue_clear(t->reader, name, &error));
}

/* Runs rounds of mixed shapes. Rows are read late, and released in any order. Readers hold some of
 * them for several rounds, and the producer is refused until they release them. */
static inline void memory_rounds(uint64_t capacity, int rounds, uint64_t seed)
{
    enum { OPEN = 6 };
    memory_test t;
    dray_batch *held[OPEN] = {0};
    int partition[OPEN], refused = 0;
    uint64_t random = seed;
    memory_up(&t, capacity);
    for (int i = 0; i < OPEN; i++)
        partition[i] = -1;
    for (int round = 0; round < rounds; round++) {
        uint64_t bytes[COLUMNS], total = 0;
        random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        uint32_t count = 1 + (uint32_t)(random >> 60) % COLUMNS,
                 shift = (uint32_t)(random >> 40) % 12;
        for (uint32_t i = 0; i < count; i++) {
            bytes[i] = (capacity / 2 / COLUMNS >> shift) + (random >> (i * 4)) % 5000;
            bytes[i] = i == 0 && shift > 6 ? bytes[i] + capacity / 4 : bytes[i];
            total += bytes[i];
        }
        assert_true(total <= capacity);
        int at = round % OPEN, rc = memory_insert(&t, bytes, count, 0, &error);
        for (int k = 0; rc && k < OPEN; k++) { /* the readers release rows, one after the other */
            assert_int_equal(rc, DRAY_EFULL);
            refused++;
            int i = (at + k) % OPEN;
            dray_batch_free(held[i]);
            held[i] = NULL;
            if (partition[i] >= 0)
                memory_clear(&t, partition[i]);
            partition[i] = -1;
            rc = memory_insert(&t, bytes, count, 0, &error);
        }
        OK(rc);
        dray_batch_free(held[at]);
        if (partition[at] >= 0)
            memory_clear(&t, partition[at]);
        partition[at] = t.partitions - 1;
        held[at] = random >> 63 ? memory_claim(&t, partition[at]) : NULL;
        if (t.most > capacity)
            fprintf(stderr, "round %d: %llu bytes of %llu\n", round, (unsigned long long)t.most,
                    (unsigned long long)capacity);
        assert_true(t.most <= capacity);
    }
    assert_true(refused > 0);
    for (int i = 0; i < OPEN; i++) {
        dray_batch_free(held[i]);
        if (partition[i] >= 0)
            memory_clear(&t, partition[i]);
    }
    memory_down(&t);
}
