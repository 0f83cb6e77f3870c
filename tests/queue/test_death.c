/* Tests what remains when processes are killed, stop, or take too long: claimers, producers, the
 * keeper. */
#include "queue/one_fixture.h"

static const char *const prompts[] = {"prompts"}, *const responses[] = {"responses"};
static const dray_queue_task tasks[] = {
    {.name = "rollout", .needs = prompts, .needs_count = 1, .writes = responses, .writes_count = 1},
    {.name = "reward", .needs = responses, .needs_count = 1},
};

enum { ROWS = 8 };

static dray_queue *open_queue(dray_context *context, const char *name)
{
    dray_queue *queue;
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = tasks;
    options.task_count = 2;
    options.on_loss = DRAY_ON_LOSS_SHRINK_GROUP;
    OK(dray_queue_open(context, name, &options, &queue, &error));
    return queue;
}

static void insert(dray_queue *queue, uint32_t rows)
{
    int64_t values[ROWS] = {0, 1, 2, 3, 4, 5, 6, 7};
    dray_column_data column = {.name = "prompts", .dtype = DRAY_I64, .values = values};
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = "0";
    o.rows = rows;
    o.columns = &column;
    o.column_count = 1;
    OK(dray_queue_insert(queue, &o, NULL, &error));
    OK(dray_queue_seal(queue, "0", rows, &error));
}

static int claim(dray_queue *queue, const char *task, uint32_t count, int64_t hold_ns,
                 dray_batch **out)
{
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = task;
    o.count = count;
    o.max_hold_ns = hold_ns;
    o.partition = "0";
    return dray_queue_claim(queue, &o, out, &error);
}

static void set(dray_batch *batch, int64_t base)
{
    int64_t values[ROWS];
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
        values[i] = base + dray_batch_row(batch, i)->slot;
    dray_column_data column = {.name = "responses", .dtype = DRAY_I64, .values = values};
    OK(dray_batch_set(batch, &column, &error));
}

typedef struct worker {
    const char *queue;
    int64_t base, hold_ns;
    bool commit, insert;
    int ready[2], go[2];
} worker;

/* Claims all rows, writes, perhaps commits; says so, and then waits for its end. */
static void work(void *argument)
{
    worker *w = argument;
    dray_context *context = fixture_context(&f, "worker");
    dray_queue *queue = open_queue(context, w->queue);
    if (w->insert)
        insert(queue, ROWS);
    dray_batch *batch;
    if (claim(queue, "rollout", ROWS, w->hold_ns, &batch))
        abort();
    set(batch, w->base);
    if (w->commit)
        OK(dray_batch_commit(batch, &error));
    char byte = 'x';
    if (write(w->ready[1], &byte, 1) != 1 || read(w->go[0], &byte, 1) != 1)
        abort();
    int rc = dray_batch_commit(batch, &error);
    byte = rc == DRAY_ESTALE ? 's' : rc == DRAY_OK ? 'k' : '?';
    if (write(w->ready[1], &byte, 1) != 1)
        abort();
    dray_batch_free(batch);
    leave(queue, context);
}

static pid_t start(worker *w)
{
    char byte;
    if (pipe(w->ready) < 0 || pipe(w->go) < 0)
        die("pipe", NULL);
    pid_t pid = child(work, w);
    if (read(w->ready[0], &byte, 1) != 1)
        die("the worker said nothing", NULL);
    return pid;
}

static void stop(worker *w)
{
    for (int i = 0; i < 2; i++) {
        close(w->ready[i]);
        close(w->go[i]);
    }
}

static void check_responses(dray_queue *queue, int64_t base)
{
    dray_batch *batch;
    int64_t values[ROWS];
    assert_int_equal(claim(queue, "reward", ROWS, 0, &batch), DRAY_OK);
    OK(dray_batch_gather(batch, "responses", values, sizeof values, NULL, &error));
    for (int i = 0; i < ROWS; i++)
        assert_int_equal(values[i], base + dray_batch_row(batch, (uint32_t)i)->slot);
    COMMIT(batch);
}

/* Nothing is left of it. */
static void end(dray_queue *queue, dray_context *context)
{
    OK(dray_queue_clear(queue, "0", &error));
    leave(queue, context);
    wait_for_chunks(&f, 0);
}

TEST(test_committed_survives)
{
    dray_context *context = fixture_context(&f, "main");
    dray_queue *queue = open_queue(context, "survives");
    worker w = {.queue = "survives", .base = 100, .commit = true, .insert = true};
    pid_t pid = start(&w);
    fixture_end(pid, SIGKILL);
    stop(&w);
    check_responses(queue, 100); /* nobody but the keeper holds it now */
    OK(dray_queue_clear(queue, "0", &error));
    wait_for_chunks(&f, 0);
    leave(queue, context);
}

TEST(test_uncommitted_comes_back)
{
    dray_context *context = fixture_context(&f, "main");
    dray_queue *queue = open_queue(context, "back");
    insert(queue, ROWS);
    worker w = {.queue = "back", .base = 100};
    pid_t pid = start(&w);
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = "rollout";
    o.count = ROWS;
    OK(dray_queue_claim_start(queue, &o, 1, &error)); /* waits for the death */
    fixture_end(pid, SIGKILL);
    stop(&w);
    dray_batch *batch = NULL;
    int rc;
    while ((rc = dray_queue_claim_poll(queue, NULL, &batch, &error)) == DRAY_EAGAIN)
        usleep(1000);
    OK(rc);
    assert_int_equal(dray_batch_rows(batch), ROWS);
    for (uint32_t i = 0; i < ROWS; i++)
        assert_int_equal(dray_batch_row(batch, i)->attempt, 2);
    set(batch, 200);
    COMMIT(batch);
    check_responses(queue, 200);
    end(queue, context);
}

TEST(test_held_too_long)
{
    dray_context *context = fixture_context(&f, "main");
    dray_queue *queue = open_queue(context, "held");
    insert(queue, ROWS);
    worker w = {.queue = "held", .base = 100, .hold_ns = 30 * DRAY__MILLISECOND};
    pid_t pid = start(&w);
    kill(pid, SIGSTOP);
    dray_batch *batch;
    assert_int_equal(claim(queue, "rollout", ROWS, 0, &batch), DRAY_OK); /* woken by the timer */
    for (uint32_t i = 0; i < ROWS; i++)
        assert_int_equal(dray_batch_row(batch, i)->attempt, 2);
    set(batch, 300);
    char byte = 'g';
    if (write(w.go[1], &byte, 1) != 1)
        abort();
    kill(pid, SIGCONT);
    assert_int_equal(read(w.ready[0], &byte, 1), 1);
    assert_int_equal(byte, 's'); /* its commit came too late */
    join(pid);
    stop(&w);
    COMMIT(batch);
    check_responses(queue, 300);
    end(queue, context);
}

TEST(test_hold_is_renewed)
{
    dray_context *context = fixture_context(&f, "main");
    dray_queue *queue = open_queue(context, "renewed");
    insert(queue, ROWS);
    dray_batch *batch, *again;
    assert_int_equal(claim(queue, "rollout", ROWS, 20 * DRAY__SECOND, &batch), DRAY_OK);
    OK(dray_batch_hold(batch, 1, &error));
    assert_int_equal(claim(queue, "rollout", ROWS, 1, &again), DRAY_OK); /* and this one at once */
    FAILS(DRAY_ESTALE, dray_batch_hold(batch, 0, &error));
    dray_batch_free(batch);
    assert_int_equal(claim(queue, "rollout", ROWS, 20 * DRAY__SECOND, &batch), DRAY_OK);
    OK(dray_batch_hold(batch, 0, &error));
    set(again, 0);
    FAILS(DRAY_ESTALE, dray_batch_commit(again, &error));
    dray_batch_free(again);
    set(batch, 0);
    COMMIT(batch);
    end(queue, context);
}

TEST(test_deaths_count_as_attempts)
{
    dray_context *context = fixture_context(&f, "main");
    dray_queue *queue = open_queue(context, "deaths");
    insert(queue, ROWS);
    for (int i = 0; i < 3; i++) {
        worker w = {.queue = "deaths"};
        pid_t pid = start(&w);
        fixture_end(pid, SIGKILL);
        stop(&w);
    }
    OK(dray_queue_wait(queue, "0", NULL, 20 * DRAY__SECOND, &error)); /* all are dead */
    dray_batch *batch;
    FAILS(DRAY_EEND, claim(queue, "rollout", 1, 0, &batch));
    FAILS(DRAY_EEND, claim(queue, "reward", 1, 0, &batch));
    char *text;
    OK(dray_queue_status(queue, &text, &error));
    assert_non_null(strstr(text, "of worker"));
    free(text);
    end(queue, context);
}

/* Dies with rows claimed, read and pinned. */
static void read_and_die(void *argument)
{
    const char *name = argument;
    dray_context *context = fixture_context(&f, "reader");
    dray_queue *queue = open_queue(context, name);
    dray_batch *batch;
    dray_column column;
    if (claim(queue, "rollout", ROWS, 0, &batch))
        abort();
    OK(dray_batch_column(batch, "prompts", &column, &error));
    raise(SIGKILL);
}

TEST(test_pins_end_with_the_session)
{
    dray_context *context = fixture_context(&f, "main");
    dray_queue *queue = open_queue(context, "pins");
    insert(queue, ROWS);
    pid_t pid = child(read_and_die, "pins");
    int status;
    waitpid(pid, &status, 0);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    end(queue, context);
}

TEST(test_keeper_is_gone)
{
    if (elsewhere()) /* this is of chunks */
        skip();
    (void)state;
    queue_fixture own = {0};
    fixture_up(&own);
    dray_context *context = fixture_context(&own, "main");
    dray_queue *queue = open_queue(context, "keeper");
    insert(queue, ROWS);
    fixture_end(own.keeper_pid, SIGKILL);
    own.keeper_pid = 0;
    dray_batch *batch;
    dray_column column;
    dray_queue *hasty; /* as it is waited for, in case that it comes back */
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.timeout_ns = 100 * DRAY__MILLISECOND;
    OK(dray_queue_open(context, "keeper", &options, &hasty, &error));
    assert_int_equal(claim(hasty, "rollout", ROWS, 0, &batch), DRAY_OK);
    int rc = dray_batch_column(batch, "prompts", &column, &error);
    assert_int_equal(rc, DRAY_ECLOSED);
    assert_non_null(strstr(error.message, "keeper"));
    assert_non_null(strstr(error.message, own.keeper));
    dray_batch_free(batch);
    OK(dray_queue_clear(queue, "0", &error)); /* the controller does not hang on it either */
    dray_queue_close(hasty);
    leave(queue, context);
    fixture_down(&own);
}

SUITE(up, down)
