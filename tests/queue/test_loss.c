/* Tests lost samples: dead after max_attempts, refilled, with groups that are dropped or shrunk. */
#include "queue/three_tasks.h"

static dray_queue *open_losing(dray_context *context, const char *name, int32_t on_loss)
{
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.on_loss = on_loss;
    return open_three(context, name, options);
}

static dray_batch *claim_some(dray_queue *queue, const char *task, uint32_t count, int32_t policy)
{
    dray_batch *batch;
    dray_claim_options o = want(task, count);
    o.up_to = 1;
    o.policy = policy;
    int rc = dray_queue_claim(queue, &o, &batch, &error);
    if (rc == DRAY_EEND)
        return NULL;
    OK(rc);
    return batch;
}

/* ---- a reward that crashes on one prompt ----------------------------------------------------- */

enum { B = 12, CRASHES = 50 };

static void roll_out(void *argument)
{
    (void)argument;
    dray_context *context = fixture_context(&f, "rollout");
    dray_queue *queue = open_losing(context, "crash", 0);
    dray_batch *batch;
    while ((batch = claim_some(queue, "rollout", 4, DRAY_POLICY_FIFO))) {
        int32_t values[4];
        OK(dray_batch_gather(batch, "prompts", values, sizeof values, NULL, &error));
        dray_column_data column = int_column("responses", values);
        OK(dray_batch_set(batch, &column, &error));
        COMMIT(batch);
    }
    leave(queue, context);
}

/* Dies in the middle of the sample whose response is 50. */
static void reward_until_crash(void *argument)
{
    (void)argument;
    dray_context *context = fixture_context(&f, "reward");
    dray_queue *queue = open_losing(context, "crash", 0);
    dray_batch *batch;
    while ((batch = claim_some(queue, "reward", 1, DRAY_POLICY_FIFO))) {
        int32_t value;
        OK(dray_batch_gather(batch, "responses", &value, sizeof value, NULL, &error));
        if (value == CRASHES)
            kill(getpid(), SIGKILL);
        dray_column_data column = int_column("rewards", &value);
        OK(dray_batch_set(batch, &column, &error));
        COMMIT(batch);
    }
    leave(queue, context);
}

static void reward_restarted(void *argument)
{
    (void)argument;
    int status = 1, deaths = 0;
    while (status) {
        pid_t pid = child(reward_until_crash, NULL);
        waitpid(pid, &status, 0);
        deaths += status != 0;
    }
    assert_int_equal(deaths, 3);
}

TEST_WITHIN(test_reward_crashes_on_one_prompt, up, down)
{
    dray_context *context = fixture_context(&f, "driver");
    dray_queue *queue = open_losing(context, "crash", 0);
    insert_ints(queue, "0", B, 1); /* prompts 0, 10, ... 110: one of them is 50 */
    OK(dray_queue_seal(queue, "0", B, &error));
    pid_t rollout = child(roll_out, NULL), reward = child(reward_restarted, NULL);
    dray_refill refill = DRAY_REFILL_INIT;
    OK(dray_queue_refill_wait(queue, 20 * DRAY__SECOND, &refill, &error));
    assert_int_equal(refill.rows, 1);
    assert_int_equal(refill.slot, 5);
    assert_int_equal(refill.attempts, 3);
    assert_int_equal(refill.cause, DRAY_LOSS_FAILED);
    assert_string_equal(refill.partition, "0");
    assert_string_equal(refill.task, "reward");
    assert_non_null(strstr(refill.reason, "of reward"));
    assert_true(status_has(queue, "\"vacant\":1"));
    refill_ints(queue, &refill, 777);
    dray_insert_options late = DRAY_INSERT_OPTIONS_INIT;
    late.partition = "0";
    late.rows = 1;
    late.refill = refill.id;
    FAILS(DRAY_EEXIST, dray_queue_insert(queue, &late, NULL, &error));
    uint32_t rows = 0;
    int64_t sum = 0;
    while (rows < B) {
        dray_batch *batch = claim_some(queue, "actor", B, DRAY_POLICY_FIFO);
        int32_t values[B];
        OK(dray_batch_gather(batch, "rewards", values, sizeof values, NULL, &error));
        for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
            sum += values[i];
        rows += dray_batch_rows(batch);
        COMMIT(batch);
    }
    assert_int_equal(sum, 660 - CRASHES + 777);
    OK(dray_queue_wait(queue, "0", NULL, 20 * DRAY__SECOND, &error));
    assert_true(status_has(queue, "\"refilled\":1"));
    assert_true(status_has(queue, "\"failed\":1"));
    assert_true(status_has(queue, "\"attempts\":3"));
    OK(dray_queue_end(queue, &error));
    FAILS(DRAY_EEND, dray_queue_refill_wait(queue, 20 * DRAY__SECOND, &refill, &error));
    join(rollout);
    join(reward);
    leave(queue, context);
}

/* ---- groups ---------------------------------------------------------------------------------- */

static void fail_one(dray_queue *queue, uint32_t count, uint32_t slot)
{
    for (int attempt = 0; attempt < 3; attempt++) {
        dray_batch *batch = claim_some(queue, "rollout", count, DRAY_POLICY_FIFO);
        for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
            if (dray_batch_row(batch, i)->slot == slot)
                OK(dray_batch_fail(batch, &i, 1, "broken", &error));
        dray_batch_free(batch);
    }
}

/* The whole group is replaced: it would not be of one prompt otherwise. A claim that held members
 * of it commits the other rows only. */
TEST_WITHIN(test_group_is_refilled, up, down)
{
    dray_context *context = fixture_context(&f, "groups");
    dray_queue *queue = open_losing(context, "groups", DRAY_ON_LOSS_REFILL);
    insert_ints(queue, "0", 8, 4);
    OK(dray_queue_seal(queue, "0", 8, &error));
    dray_batch *held = NULL, *batch;
    for (int attempt = 0; attempt < 3; attempt++) {
        dray_claim_options o = want("rollout", 8);
        OK(dray_queue_claim(queue, &o, &batch, &error));
        uint32_t bad = 0;
        while (dray_batch_row(batch, bad)->slot != 2)
            bad++;
        OK(dray_batch_fail(batch, &bad, 1, "broken", &error));
        if (attempt < 2)
            dray_batch_free(batch);
        else
            held = batch;
    }
    dray_refill refill = DRAY_REFILL_INIT;
    OK(dray_queue_refill_wait(queue, 0, &refill, &error));
    assert_int_equal(refill.rows, 4);
    assert_int_equal(refill.slot, 0);
    assert_int_equal(refill.group, 0);
    dray_refill again = DRAY_REFILL_INIT;
    OK(dray_queue_refill_wait(queue, 0, &again, &error));
    assert_int_equal(again.id, refill.id);
    refill_ints(queue, &refill, 5);
    set_ints(held, "responses", 100);
    OK(dray_batch_commit(held, &error)); /* of slots 4 to 7 */
    dray_batch_free(held);
    batch = claim_some(queue, "reward", 8, DRAY_POLICY_FIFO);
    assert_int_equal(dray_batch_rows(batch), 4);
    assert_int_equal(dray_batch_row(batch, 0)->slot, 4);
    dray_batch_free(batch);
    batch = claim_some(queue, "rollout", 8, DRAY_POLICY_GROUP);
    assert_int_equal(dray_batch_rows(batch), 4);
    for (uint32_t i = 0; i < 4; i++) {
        int32_t values[4];
        OK(dray_batch_gather(batch, "prompts", values, sizeof values, NULL, &error));
        assert_int_equal(values[i], 5);
        assert_int_equal(dray_batch_row(batch, i)->slot, i);
        assert_int_equal(dray_batch_row(batch, i)->generation, refill.id);
        assert_int_equal(dray_batch_row(batch, i)->attempt, 1);
    }
    dray_batch_free(batch);
    leave(queue, context);
}

TEST_WITHIN(test_group_is_dropped_or_shrunk, up, down)
{
    dray_context *context = fixture_context(&f, "drop");
    const struct {
        const char *name;
        int32_t on_loss;
        uint32_t left;
    } cases[] = {{"dropping", DRAY_ON_LOSS_DROP_GROUP, 4},
                 {"shrinking", DRAY_ON_LOSS_SHRINK_GROUP, 7}};
    for (int i = 0; i < 2; i++) {
        dray_queue *queue = open_losing(context, cases[i].name, cases[i].on_loss);
        insert_ints(queue, "0", 8, 4);
        OK(dray_queue_seal(queue, "0", 8, &error));
        fail_one(queue, 8, 1);
        all_rows(queue, "rollout", "responses", 0, cases[i].left);
        dray_batch *batch = claim_some(queue, "reward", 8, DRAY_POLICY_GROUP);
        assert_int_equal(dray_batch_rows(batch), cases[i].left);
        dray_batch_free(batch);
        dray_refill refill = DRAY_REFILL_INIT;
        FAILS(DRAY_ETIMEDOUT, dray_queue_refill_wait(queue, 0, &refill, &error));
        dray_queue_close(queue);
    }
    dray_close(context);
}

/* A producer without another sample says so; one that dies leaves the question to the next. */
static void ask_and_die(void *argument)
{
    (void)argument;
    dray_context *context = fixture_context(&f, "asker");
    dray_queue *queue = open_losing(context, "decline", 0);
    dray_refill refill = DRAY_REFILL_INIT;
    OK(dray_queue_refill_wait(queue, 20 * DRAY__SECOND, &refill, &error));
    kill(getpid(), SIGKILL);
}

TEST_WITHIN(test_refill_is_declined, up, down)
{
    dray_context *context = fixture_context(&f, "decline");
    dray_queue *queue = open_losing(context, "decline", 0);
    insert_ints(queue, "0", 4, 1);
    OK(dray_queue_seal(queue, "0", 4, &error));
    int status;
    pid_t asker = child(ask_and_die, NULL);
    fail_one(queue, 4, 3);
    waitpid(asker, &status, 0);
    assert_true(WIFSIGNALED(status));
    dray_refill refill = DRAY_REFILL_INIT;
    OK(dray_queue_refill_wait(queue, 20 * DRAY__SECOND, &refill, &error));
    OK(dray_queue_refill_decline(queue, refill.id, &error));
    OK(dray_queue_refill_decline(queue, refill.id, &error));
    FAILS(DRAY_ENOENT, dray_queue_refill_decline(queue, refill.id + 1, &error));
    all_rows(queue, "rollout", "responses", 0, 3);
    OK(dray_queue_wait(queue, "0", "rollout", 0, &error));
    assert_true(status_has(queue, "\"dead\":1"));
    leave(queue, context);
}

/* ---- a reason with a long name --------------------------------------------------------------- */

static dray_queue *open_durable(dray_context *context)
{
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.durability = DRAY_DURABILITY_JOURNAL;
    options.max_attempts = 1;
    options.on_loss = DRAY_ON_LOSS_SHRINK_GROUP;
    return open_three(context, "durable", options);
}

static void hold_a_row(void *ready)
{
    char name[256] = "";
    for (int i = 0; i < 85; i++)
        strcat(name, "\xe5\x90\x8d");
    dray_queue *queue = open_durable(fixture_context(&f, name));
    if (!claim_some(queue, "rollout", 1, DRAY_POLICY_FIFO) ||
        write(*(const int *)ready, "x", 1) != 1)
        abort();
    pause();
}

/* The reason of a loss names the process, and is cut. The journal that has it can be read again. */
TEST(test_reason_with_a_long_name)
{
    int ready[2];
    char byte;
    f = (queue_fixture){.durable = true};
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "driver");
    dray_queue *queue = open_durable(context);
    insert_ints(queue, "0", 1, 1);
    OK(dray_queue_seal(queue, "0", 1, &error));
    assert_int_equal(pipe(ready), 0);
    pid_t pid = child(hold_a_row, &ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    fixture_end(pid, SIGKILL);
    OK(dray_queue_wait(queue, "0", "rollout", 10 * DRAY__SECOND, &error));
    fixture_restart(&f);
    OK(dray_queue_wait(queue, "0", "rollout", 0, &error));
    close(ready[0]);
    close(ready[1]);
    leave(queue, context);
    fixture_down(&f);
}

SUITE(NULL, NULL)
