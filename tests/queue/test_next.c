/* Tests commits that are sent with the next claim, releases that are sent with the next request,
 * connections that break, and tasks that come too late. */
#include "control/channel.h"
#include "queue/client/client.h"
#include "queue/three_tasks.h"

TEST_WITHIN(test_commit_rides, up, down)
{
    dray_context *context = fixture_context(&f, "next");
    dray_queue *queue = open_queue(context, "next", 0, 0);
    insert_ints(queue, "0", 64, 1);
    OK(dray_queue_seal(queue, "0", 64, &error));
    dray_claim_options o = want("rollout", 16);
    o.partition = "0";
    dray_batch *batch, *next;
    OK(dray_queue_claim(queue, &o, &batch, &error));
    for (int i = 0; i < 3; i++) {
        FAILS(DRAY_EINVALID, dray_batch_commit_claim(batch, &o, 1, NULL, &next, &error));
        set_ints(batch, "responses", 1000);
        uint32_t which = 9;
        OK(dray_batch_commit_claim(batch, &o, 1, &which, &next, &error));
        assert_int_equal(which, 0);
        assert_int_equal(dray_batch_row(next, 0)->slot, (i + 1) * 16);
        COMMIT(batch);
        batch = next;
    }
    /* The commit counts although there is nothing left to claim. */
    set_ints(batch, "responses", 1000);
    o.timeout_ns = 0;
    FAILS(DRAY_EEND, dray_batch_commit_claim(batch, &o, 1, NULL, &next, &error));
    OK(dray_batch_commit(batch, &error));
    FAILS(DRAY_EINVALID, dray_batch_set_tag(batch, 0, "late", 1, &error));
    dray_batch_free(batch);
    OK(dray_queue_wait(queue, "0", "rollout", 0, &error));
    assert_true(status_has(queue, "\"claims\":0")); /* asking released them */
    int32_t values[64];
    o = want("reward", 64);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    OK(dray_batch_gather(batch, "responses", values, sizeof values, NULL, &error));
    for (uint32_t i = 0; i < 64; i++)
        assert_int_equal(values[i], 1000 + (int32_t)dray_batch_row(batch, i)->slot);
    /* It waits for what is not there yet, and the commit is seen meanwhile. */
    set_ints(batch, "rewards", 0);
    o.timeout_ns = 20 * DRAY__MILLISECOND;
    FAILS(DRAY_ETIMEDOUT, dray_batch_commit_claim(batch, &o, 1, NULL, &next, &error));
    OK(dray_queue_wait(queue, "0", "reward", 0, &error));
    dray_batch_free(batch);
    leave(queue, context);
}

/* A commit that is refused claims nothing. */
TEST_WITHIN(test_refused_commit, up, down)
{
    dray_context *context = fixture_context(&f, "refused");
    dray_queue *queue = open_queue(context, "refused", 0, 0);
    insert_ints(queue, "0", 8, 1);
    dray_claim_options o = want("rollout", 4);
    dray_batch *batch, *next;
    OK(dray_queue_claim(queue, &o, &batch, &error));
    set_ints(batch, "responses", 0);
    OK(dray_batch_fail(batch, NULL, 0, "broken", &error));
    FAILS(DRAY_ESTALE, dray_batch_commit_claim(batch, &o, 1, NULL, &next, &error));
    dray_batch_free(batch);
    assert_true(status_has(queue, "\"taken\":0"));
    o.count = 8;
    OK(dray_queue_claim(queue, &o, &batch, &error));
    dray_batch_free(batch);
    leave(queue, context);
}

TEST_WITHIN(test_broken_connection, up, down)
{
    dray_context *context = fixture_context(&f, "broken");
    dray_queue *queue = open_queue(context, "broken", 0, 0), *other;
    insert_ints(queue, "0", 4, 1);
    other = open_queue(context, "broken", 0, 0); /* of the same session, which lives on */
    dray_claim_options o = want("rollout", 4);
    dray_batch *held, *batch;
    OK(dray_queue_claim(other, &o, &held, &error));
    set_ints(held, "responses", 0);
    dray__channel_close(other->channel);
    OK(dray__channel_open(context, &other->channel, &error));
    OK(dray_queue_claim(queue, &o, &batch,
                        &error)); /* waits for nothing but the end of the connection */
    assert_int_equal(dray_batch_row(batch, 0)->attempt, 2);
    FAILS(DRAY_ENOENT, dray_batch_commit(held, &error));
    int32_t values[4];
    OK(dray_batch_gather(held, "prompts", values, sizeof values, NULL, &error));
    dray_batch_free(held);
    set_ints(batch, "responses", 1);
    COMMIT(batch);
    dray_queue_close(other);
    leave(queue, context);
}

TEST_WITHIN(test_late_task, up, down)
{
    dray_context *context = fixture_context(&f, "late");
    dray_queue *queue = open_queue(context, "late", 0, 0), *other;
    dray_queue_task tasks[4];
    memcpy(tasks, three_tasks, sizeof three_tasks);
    tasks[3] = (dray_queue_task){.name = "critic", .needs = prompts, .needs_count = 1};
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = tasks;
    options.task_count = 4;
    FAILS(DRAY_EGONE, dray_queue_open(context, "late", &options, &other, &error));
    assert_non_null(strstr(error.message, "critic"));
    options.task_count = 2;
    FAILS(DRAY_EEXIST, dray_queue_open(context, "late", &options, &other, &error));
    leave(queue, context);
}

/* A column is freed when those that need it are done, before its rows are. */
TEST_WITHIN(test_columns_are_freed_early, up, down)
{
    dray_context *context = fixture_context(&f, "early");
    dray_queue *queue = open_queue(context, "early", 0, 0);
    insert_ints(queue, "0", 4, 1);
    assert_true(status_has(queue, "\"bytes\":16")); /* prompts */
    all_rows(queue, "rollout", "responses", 0, 4);
    assert_true(status_has(queue, "\"bytes\":16")); /* responses alone */
    all_rows(queue, "reward", "rewards", 0, 4);
    assert_true(status_has(queue, "\"bytes\":32"));
    all_rows(queue, "actor", NULL, 0, 4);
    assert_true(status_has(queue, "\"bytes\":0"));
    OK(dray_queue_seal(queue, "0", 4, &error));
    leave(queue, context);
}

SUITE(NULL, NULL)
