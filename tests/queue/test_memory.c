#include "queue/memory.h"
#include "seed.h"

/* Few shapes, many rounds: chunks of one shape serve the others. */
TEST(test_columns)
{
    memory_test t;
    memory_up(&t, 64 * MIB);
    for (int round = 0; round < 12; round++) {
        static const uint64_t mib[][COLUMNS] = {{40}, {8, 8, 8, 8, 8, 8}, {20, 20}, {33, 12}};
        uint64_t bytes[COLUMNS];
        uint32_t count = 0;
        for (; count < COLUMNS && mib[round % 4][count]; count++)
            bytes[count] = mib[round % 4][count] * MIB;
        OK(memory_insert(&t, bytes, count, 5 * DRAY__SECOND, &error));
        dray_batch_free(memory_claim(&t, t.partitions - 1));
        memory_clear(&t, t.partitions - 1);
        kept_bytes(&t);
    }
    if (t.most > t.capacity)
        fprintf(stderr, "%llu bytes of %llu\n", (unsigned long long)t.most,
                (unsigned long long)t.capacity);
    assert_true(t.most <= t.capacity);
    memory_down(&t);
}

/* What can never fit, or does not fit now, takes no memory. */
TEST(test_refused)
{
    memory_test t;
    memory_up(&t, 16 * MIB);
    t.values = realloc(t.values, 64 * MIB);
    uint64_t much = 64 * MIB, half = 10 * MIB;
    FAILS(DRAY_EFULL, memory_insert(&t, &much, 1, DRAY__SECOND, &error));
    assert_non_null(strstr(error.message, "can never fit"));
    assert_int_equal(kept_bytes(&t), 0);
    OK(memory_insert(&t, &half, 1, 0, &error));
    uint64_t before = kept_bytes(&t);
    FAILS(DRAY_EFULL, memory_insert(&t, &half, 1, 0, &error));
    FAILS(DRAY_ETIMEDOUT, memory_insert(&t, &half, 1, DRAY__SECOND / 20, &error));
    assert_int_equal(kept_bytes(&t), before);
    memory_clear(&t, 0);
    OK(memory_insert(&t, &half, 1, DRAY__SECOND, &error));
    memory_clear(&t, 1);
    memory_down(&t);
}

/* Who holds the memory is named: a reader that keeps its batch, after the rows are gone. */
TEST(test_holder)
{
    memory_test t;
    memory_up(&t, 16 * MIB);
    uint64_t half = 10 * MIB;
    OK(memory_insert(&t, &half, 1, 0, &error));
    dray_batch *batch = memory_claim(&t, 0);
    FAILS(DRAY_EFULL, memory_insert(&t, &half, 1, 0, &error));
    memory_clear(&t, 0);
    FAILS(DRAY_ETIMEDOUT, memory_insert(&t, &half, 1, DRAY__SECOND / 20, &error));
    fprintf(stderr, "%s\n", error.message);
    assert_non_null(strstr(error.message, "reader"));
    assert_non_null(strstr(error.message, "task train"));
    char *text;
    OK(dray_queue_status(t.queue, &text, &error));
    json_t *json = json_loads(text, 0, NULL);
    const char *holder = json_string_value(json_object_get(json, "held_by"));
    assert_non_null(holder);
    assert_non_null(strstr(holder, "reader"));
    assert_true(json_integer_value(json_object_get(json, "chunk_bytes")) >= (json_int_t)half);
    json_decref(json);
    free(text);
    dray_batch_free(batch);
    OK(memory_insert(&t, &half, 1, DRAY__SECOND, &error));
    memory_clear(&t, 1);
    memory_down(&t);
}

/* A producer that has gone silent keeps no memory from another one. */
TEST(test_two_producers)
{
    memory_test t;
    memory_up(&t, 64 * MIB);
    dray_context *context = fixture_context(&t.f, "other");
    dray_queue *other = memory_open(&t, context), *first = t.queue;
    for (int round = 0; round < 6; round++) {
        uint64_t bytes[] = {30 * MIB, 20 * MIB, 3 * MIB};
        t.queue = round % 2 ? other : first;
        OK(memory_insert(&t, bytes, 3, 2 * DRAY__SECOND, &error));
        memory_clear(&t, round);
    }
    assert_true(t.most <= t.capacity);
    t.queue = first;
    leave(other, context);
    memory_down(&t);
}

TEST(test_rounds)
{
    uint64_t seed = test_seed();
    memory_rounds(16 * MIB, test_times(60), seed);
}

SUITE(NULL, NULL)
