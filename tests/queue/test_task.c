/* Tests a job's task in four calls, and the tags that tasks leave for each other. */
#include "queue/three_tasks.h"

#include <dray/task.h>

/* A program of a job: everything from the environment. */
TEST(test_task)
{
    dray_context *context = fixture_context(&f, "job");
    dray_queue *queue = open_queue(context, "job", 0, 0);
    static const char *const reads[] = {"prompts", NULL}, *const made[] = {"responses", NULL};
    static const char *const wrong[] = {"rewards", NULL}, *const none[] = {NULL};
    dray_task *task = NULL;
    dray_batch *batch;
    setenv("DRAY_ADDRESS", f.address, 1);
    setenv("DRAY_QUEUE", "job", 1);
    unsetenv("DRAY_TASK");
    FAILS(DRAY_EINVALID, dray_task_open(reads, made, NULL, &task, &error));
    setenv("DRAY_TASK", "rollout", 1);
    FAILS(DRAY_EINVALID, dray_task_open(wrong, made, NULL, &task, &error));
    FAILS(DRAY_EINVALID, dray_task_open(reads, wrong, NULL, &task, &error));
    FAILS(DRAY_EINVALID, dray_task_open(reads, none, NULL, &task, &error));
    setenv("DRAY_RANK", "one", 1);
    FAILS(DRAY_EINVALID, dray_task_open(reads, made, NULL, &task, &error));
    setenv("DRAY_RANK", "1", 1);
    OK(dray_task_open(reads, made, NULL, &task, &error));
    insert_ints(queue, "0", 40, 1);
    OK(dray_queue_seal(queue, "0", 40, &error));
    OK(dray_queue_end(queue, &error));
    static const uint32_t expected[] = {32, 8};
    for (int i = 0; i < 2; i++) {
        OK(dray_task_next(task, &batch, &error));
        assert_int_equal(dray_batch_rows(batch), expected[i]);
        set_ints(batch, "responses", 0);
        OK(dray_batch_commit(batch, &error));
    }
    FAILS(DRAY_EEND, dray_task_next(task, &batch, &error));
    dray_task_close(task);
    leave(queue, context);
}

/* A tag that two tasks set has the value of the later commit. */
TEST(test_tags)
{
    dray_context *context = fixture_context(&f, "tags");
    dray_queue *queue = open_queue(context, "tags", 0, 0);
    insert_ints(queue, "0", 3, 1);
    dray_batch *batch;
    double value;
    dray_claim_options o = want("rollout", 3);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    for (uint32_t i = 3; i-- > 0;)
        OK(dray_batch_set_tag(batch, i, i == 1 ? "b" : "a", i, &error));
    OK(dray_batch_set_tag(batch, 2, "a", 20, &error));
    set_ints(batch, "responses", 0);
    COMMIT(batch);
    o = want("reward", 3);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    OK(dray_batch_tag(batch, 0, "a", &value, &error));
    assert_true(value == 0);
    FAILS(DRAY_ENOENT, dray_batch_tag(batch, 1, "a", &value, &error));
    OK(dray_batch_tag(batch, 1, "b", &value, &error));
    assert_true(value == 1);
    OK(dray_batch_tag(batch, 2, "a", &value, &error));
    assert_true(value == 20);
    OK(dray_batch_set_tag(batch, 2, "a", 30, &error));
    set_ints(batch, "rewards", 0);
    COMMIT(batch);
    o = want("actor", 3);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    OK(dray_batch_tag(batch, 2, "a", &value, &error));
    assert_true(value == 30);
    dray_batch_free(batch);
    leave(queue, context);
}

SUITE(up, down)
