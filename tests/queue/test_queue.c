/* The queue through its public API: one program for the ways in which rows go from insert to end.
 * Processes that die have a program of their own (test_death.c). */
#include "queue/fixture.h"

static queue_fixture f;

static const char *const prompts[] = {"prompts"};
static const char *const responses[] = {"responses"};
static const char *const rewards[] = {"rewards"};
static const char *const both[] = {"responses", "rewards"};

static const dray_queue_task three_tasks[] = {
    {.name = "rollout", .needs = prompts, .needs_count = 1, .writes = responses, .writes_count = 1},
    {.name = "reward", .needs = responses, .needs_count = 1, .writes = rewards, .writes_count = 1},
    {.name = "actor", .needs = both, .needs_count = 2},
};

static dray_queue *open_queue(dray_context *context, const char *name, uint64_t rows,
                              uint64_t bytes)
{
    dray_error error;
    dray_queue *queue;
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = three_tasks;
    options.task_count = 3;
    options.capacity_rows = rows;
    options.capacity_bytes = bytes;
    OK(dray_queue_open(context, name, &options, &queue, &error));
    return queue;
}

static dray_column_data int_column(const char *name, const int32_t *values)
{
    return (dray_column_data){.name = name, .dtype = DRAY_I32, .values = values};
}

static void insert_ints(dray_queue *queue, const char *partition, uint32_t rows, uint32_t group)
{
    dray_error error;
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
    OK(dray_insert(queue, &o, NULL, &error));
}

static dray_claim_options want(const char *task, uint32_t count)
{
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = task;
    o.count = count;
    return o;
}

static void set_ints(dray_batch *batch, const char *name, int32_t base)
{
    dray_error error;
    int32_t values[64];
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
        values[i] = base + (int32_t)dray_batch_row(batch, i)->slot;
    dray_column_data column = int_column(name, values);
    OK(dray_batch_set(batch, &column, &error));
}

static void test_rows_flow(void **state)
{
    (void)state;
    dray_error error;
    dray_context *context = fixture_context(&f, "flow");
    dray_queue *queue = open_queue(context, "flow", 0, 0);
    insert_ints(queue, "0", 10, 1);
    OK(dray_seal(queue, "0", 10, &error));
    static const uint32_t expected[] = {4, 4, 2};
    for (int i = 0; i < 3; i++) {
        dray_claim_options o = want("rollout", 4);
        o.partition = "0";
        dray_batch *batch;
        dray_column column;
        OK(dray_claim(queue, &o, &batch, &error));
        assert_int_equal(dray_batch_rows(batch), expected[i]);
        OK(dray_batch_column(batch, "prompts", &column, &error));
        for (uint32_t r = 0; r < expected[i]; r++) {
            assert_int_equal(dray_batch_row(batch, r)->slot, 4 * i + (int)r);
            assert_int_equal(*(const int32_t *)column.cells[r], (4 * i + (int)r) * 10);
            assert_int_equal(column.lengths[r], 1);
        }
        set_ints(batch, "responses", 100);
        OK(dray_batch_set_tag(batch, 0, "length", 7.5, &error));
        OK(dray_batch_commit(batch, &error));
        OK(dray_batch_commit(batch, &error)); /* again */
        dray_batch_free(batch);
    }
    dray_claim_options o = want("rollout", 4);
    dray_batch *batch = NULL;
    o.partition = "0";
    FAILS(DRAY_EEND, dray_claim(queue, &o, &batch, &error));
    OK(dray_queue_wait(queue, "0", "rollout", 0, &error));
    FAILS(DRAY_ETIMEDOUT, dray_queue_wait(queue, "0", NULL, 1000, &error));
    o = want("reward", 10);
    OK(dray_claim(queue, &o, &batch, &error));
    double tag;
    OK(dray_batch_tag(batch, 4, "length", &tag, &error));
    assert_true(tag == 7.5);
    FAILS(DRAY_ENOENT, dray_batch_tag(batch, 1, "length", &tag, &error));
    FAILS(DRAY_EINVALID, dray_batch_commit(batch, &error)); /* rewards not set */
    set_ints(batch, "rewards", 1000);
    OK(dray_batch_commit(batch, &error));
    dray_batch_free(batch);
    o = want("actor", 10);
    o.policy = DRAY_POLICY_ORDERED;
    OK(dray_claim(queue, &o, &batch, &error));
    int32_t gathered[10];
    size_t bytes;
    OK(dray_batch_gather(batch, "rewards", gathered, sizeof gathered, &bytes, &error));
    assert_int_equal(bytes, 40);
    for (int i = 0; i < 10; i++)
        assert_int_equal(gathered[i], 1000 + i);
    FAILS(DRAY_EFULL, dray_batch_gather(batch, "rewards", gathered, 39, &bytes, &error));
    FAILS(DRAY_ENOENT, dray_batch_gather(batch, "prompts", gathered, 40, &bytes, &error));
    OK(dray_batch_commit(batch, &error));
    dray_batch_free(batch);
    OK(dray_queue_wait(queue, "0", NULL, 0, &error));
    OK(dray_queue_end(queue, &error));
    o = want("actor", 1);
    FAILS(DRAY_EEND, dray_claim(queue, &o, &batch, &error));
    OK(dray_clear(queue, "0", &error));
    OK(dray_clear(queue, "0", &error));
    dray_queue_close(queue);
    dray_close(context);
}

static int up(void **state)
{
    (void)state;
    fixture_up(&f);
    return 0;
}

static int down(void **state)
{
    (void)state;
    fixture_down(&f);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_flow),
    };
    return cmocka_run_group_tests(tests, up, down);
}
