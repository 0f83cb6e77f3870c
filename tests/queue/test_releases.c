/* Tests rows that a consumer releases without a message before it idles. A client that waits for
 * them, or begins to wait later, gets them. They count as given back when the consumer is killed,
 * and only once. */
#include "queue/client/client.h"
#include "queue/three_tasks.h"

#include <sys/mman.h>

enum { ROWS = 8, ROUNDS = 200 };

static const dray_queue_task reading[] = {{.name = "read", .needs = prompts, .needs_count = 1}};

/* A queue of one reader that holds ROWS rows' bytes and no more. */
static dray_queue *open_small(dray_context *context, const char *name, int32_t durability)
{
    dray_queue *queue;
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.tasks = reading;
    o.task_count = 1;
    o.max_attempts = 1;
    o.on_loss = DRAY_ON_LOSS_SHRINK_GROUP;
    o.capacity_bytes = ROWS * sizeof(int32_t);
    o.durability = durability;
    OK(dray_queue_open(context, name, &o, &queue, &error));
    return queue;
}

static dray_batch *take(dray_queue *queue, const char *partition, uint32_t rows)
{
    dray_batch *batch = claim_of(queue, "read", partition, rows);
    assert_int_equal(dray_batch_rows(batch), rows);
    return batch;
}

static const char *name_of(char name[16], int number)
{
    snprintf(name, 16, "%d", number);
    return name;
}

/* ---- two processes that hand each other the turn, so that only one of them does anything ------
 */

typedef struct turns {
    int mine[2], other[2];
    const char *queue;
} turns;

static turns turns_new(const char *queue)
{
    turns t = {.queue = queue};
    assert_true(pipe(t.mine) == 0 && pipe(t.other) == 0);
    return t;
}

static void turn_give(const int to[2])
{
    if (write(to[1], "x", 1) != 1)
        abort();
}

static void turn_take(const int from[2])
{
    char byte;
    if (read(from[0], &byte, 1) != 1)
        abort();
}

/* Wants the queue's whole capacity again and again, while it is let go or after. */
static void produce(void *argument)
{
    turns *t = argument;
    char name[16];
    dray_context *context = fixture_context(&f, "producer");
    dray_queue *queue = open_small(context, t->queue, DRAY_DURABILITY_NONE);
    for (int i = 0; i < ROUNDS; i++) {
        insert_ints(queue, name_of(name, i), ROWS, 1);
        turn_give(t->mine);
        if (i % 2) /* the insert comes after the release, else it may come before */
            turn_take(t->other);
    }
    leave(queue, context);
}

TEST_WITHIN(test_bytes_for_who_waits, up, down)
{
    char name[16];
    turns t = turns_new("bytes");
    dray_context *context = fixture_context(&f, "reader");
    dray_queue *queue = open_small(context, t.queue, DRAY_DURABILITY_NONE);
    pid_t producer = child(produce, &t);
    for (int i = 0; i < ROUNDS; i++) {
        turn_take(t.mine); /* and asks the queue nothing meanwhile */
        dray_batch *batch = take(queue, name_of(name, i), ROWS), *next;
        dray_claim_options o = want("read", 1);
        o.timeout_ns = 0;
        if (i % 4 < 2)
            OK(dray_batch_commit(batch, &error));
        else
            FAILS(DRAY_ETIMEDOUT, dray_batch_commit_claim(batch, &o, 1, NULL, &next, &error));
        dray_batch_free(batch);
        if (i % 2)
            turn_give(t.other);
    }
    join(producer);
    leave(queue, context);
}

/* Takes what the other one gives back, when it is told to. */
static void take_turns(void *argument)
{
    turns *t = argument;
    dray_context *context = fixture_context(&f, "other");
    dray_queue *queue = open_small(context, t->queue, DRAY_DURABILITY_NONE);
    for (int i = 0; i < ROUNDS; i++) {
        turn_take(t->mine);
        dray_batch_free(take(queue, "0", ROWS));
        turn_give(t->other);
    }
    leave(queue, context);
}

TEST_WITHIN(test_rows_for_who_waits, up, down)
{
    turns t = turns_new("rows");
    dray_context *context = fixture_context(&f, "one");
    dray_queue *queue = open_small(context, t.queue, DRAY_DURABILITY_NONE);
    insert_ints(queue, "0", ROWS, 1);
    pid_t other = child(take_turns, &t);
    for (int i = 0; i < ROUNDS; i++) {
        dray_batch *batch = take(queue, "0", ROWS);
        if (i % 2)
            dray_batch_free(batch);
        turn_give(t.mine);
        if (!(i % 2)) /* the other one waits, or comes to wait */
            dray_batch_free(batch);
        turn_take(t.other); /* and asks the queue nothing meanwhile */
    }
    join(other);
    leave(queue, context);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* With rows whose producer has gone. */
static dray_queue *open_filled(dray_context *context, const char *name)
{
    dray_context *gone = fixture_context(&f, "producer");
    dray_queue *queue = open_small(context, name, DRAY_DURABILITY_NONE);
    dray_queue *producer = open_small(gone, name, DRAY_DURABILITY_NONE);
    insert_ints(producer, "0", ROWS, 1);
    leave(producer, gone);
    return queue;
}

/* The last reader of what was cleared lets go: the keeper hears of it though nobody asks. */
TEST_WITHIN(test_cleared_bytes, up, down)
{
    dray_context *context = fixture_context(&f, "reader");
    dray_queue *queue = open_filled(context, "cleared");
    dray_batch *batch = take(queue, "0", ROWS);
    dray_column column;
    OK(dray_batch_column(batch, "prompts", &column, &error));
    OK(dray_queue_clear(queue, "0", &error));
    assert_int_equal(*(const int32_t *)column.cells[3], 30);
    assert_int_equal(kept_chunks(&f), 1);
    dray_batch_free(batch);
    wait_for_chunks(&f, 0);
    leave(queue, context);
}

/* Nobody asks, nobody waits: what no task needs any more goes all the same. */
TEST_WITHIN(test_bytes_that_nobody_asks_for, up, down)
{
    dray_context *context = fixture_context(&f, "reader");
    dray_queue *queue = open_filled(context, "idle");
    dray_batch *batch = take(queue, "0", ROWS);
    OK(dray_batch_commit(batch, &error));
    usleep(300000); /* it was looked for, and not there yet */
    assert_int_equal(kept_chunks(&f), 1);
    dray_batch_free(batch);
    wait_for_chunks(&f, 0);
    leave(queue, context);
}

/* ---- deaths ---------------------------------------------------------------------------------- */

static void die_after_release(void *argument)
{
    const turns *t = argument;
    dray_context *context = fixture_context(&f, "mortal");
    dray_queue *queue = open_small(context, t->queue, DRAY_DURABILITY_NONE);
    dray_batch *all = take(queue, "0", ROWS);
    dray_batch_free(all);
    dray_batch *held = take(queue, "0", 2), *freed = take(queue, "0", 4);
    dray_batch_free(freed);
    turn_give(t->mine);
    kill(getpid(), held ? SIGKILL : SIGTERM);
}

/* What it held is lost at the first failure; what it had let go did not fail. */
TEST_WITHIN(test_death_after_release, up, down)
{
    turns t = turns_new("death");
    dray_context *context = fixture_context(&f, "heir");
    dray_queue *queue = open_small(context, t.queue, DRAY_DURABILITY_NONE);
    insert_ints(queue, "0", ROWS, 1);
    pid_t pid = child(die_after_release, &t);
    turn_take(t.mine);
    int status;
    assert_true(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
    dray_batch *rest = take(queue, "0", ROWS - 2);
    for (uint32_t i = 0; i < ROWS - 2; i++)
        assert_true(dray_batch_row(rest, i)->slot >= 2);
    for (int tries = 0; tries < 2000 && !status_has(queue, "\"lost\":{\"failed\":2,"); tries++)
        usleep(5000);
    dray_batch_free(rest);
    assert_true(status_has(queue, "\"claims\":0"));
    leave(queue, context);
}

/* A claim of before the coordinator died is let go when the next one has others: nothing happens to
 * those, and releases are read again. */
TEST(test_release_after_a_restart)
{
    f = (queue_fixture){.durable = true};
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "reader"), *second = fixture_context(&f, "other");
    dray_queue *queue = open_small(context, "again", DRAY_DURABILITY_JOURNAL);
    insert_ints(queue, "0", ROWS, 1);
    dray_batch *before = take(queue, "0", ROWS);
    fixture_restart(&f);
    dray_batch *now = take(queue, "0", ROWS);
    dray_batch_free(before);
    dray_queue *other = open_small(second, "again", DRAY_DURABILITY_JOURNAL);
    assert_true(status_has(other, "\"claims\":1"));
    dray_batch_free(now);
    assert_true(status_has(other, "\"claims\":0"));
    now = take(queue, "0", ROWS);
    COMMIT(now);
    assert_true(status_has(other, "\"claims\":0"));
    assert_true(status_has(other, "\"lost\":{\"failed\":0,"));
    dray_queue_close(other);
    leave(queue, second);
    dray_close(context);
    fixture_down(&f);
    f = (queue_fixture){0};
}

/* ---- pages ----------------------------------------------------------------------------------- */

/* More clients than have pages, more releases than a page holds. */
TEST_WITHIN(test_more_than_there_are_pages, up, down)
{
    enum { CLIENTS = 66, BATCHES = 70 };
    dray_context *context = fixture_context(&f, "many");
    dray_queue *queues[CLIENTS], *one = open_queue(context, "many", 0, 0);
    for (int i = 0; i < CLIENTS; i++)
        queues[i] = open_queue(context, "many", 0, 0);
    insert_ints(one, "0", 64, 1);
    insert_ints(one, "1", 64, 1);
    for (int i = 0; i < CLIENTS; i += CLIENTS - 1) {
        dray_batch *batches[BATCHES];
        dray_claim_options o = want("rollout", 1);
        for (int b = 0; b < BATCHES; b++)
            OK(dray_queue_claim(queues[i], &o, &batches[b], &error));
        assert_true(status_has(one, "\"claims\":70"));
        for (int b = 0; b < BATCHES; b++)
            dray_batch_free(batches[b]);
        dray_queue_close(queues[i]);
        assert_true(status_has(one, "\"claims\":0"));
    }
    all_rows(one, "rollout", "responses", 0, 64);
    for (int i = 1; i < CLIENTS - 1; i++)
        dray_queue_close(queues[i]);
    leave(one, context);
}

/* Whatever a client writes on its page, others' claims and the controller are as they were. */
TEST_WITHIN(test_lies_on_the_page, up, down)
{
    dray_context *context = fixture_context(&f, "liar"), *honest = fixture_context(&f, "honest");
    dray_queue *liar = open_queue(context, "lies", 0, 0), *queue = open_queue(honest, "lies", 0, 0);
    insert_ints(queue, "0", ROWS, 1);
    dray_claim_options o = want("rollout", ROWS);
    dray_batch *batch;
    OK(dray_queue_claim(queue, &o, &batch, &error));
    assert_non_null(liar->releases);
    for (uint32_t i = 0; i < 1000; i++) {
        liar->releases->tickets[i % DRAY__RELEASES] = i;
        liar->releases->written += i * i;
        liar->releases->read = i * 77;
        assert_true(status_has(liar, "\"claims\":1"));
    }
    set_ints(batch, "responses", 0);
    COMMIT(batch);
    dray_queue_close(liar);
    leave(queue, honest);
    dray_close(context);
}

/* Memory that its owner could take away from under the reader is no page. */
TEST(test_no_page)
{
    int fd = memfd_create("page", MFD_CLOEXEC | MFD_ALLOW_SEALING), ends[2];
    assert_true(fd >= 0 && ftruncate(fd, sizeof(dray__releases)) == 0 && pipe(ends) == 0);
    assert_null(dray__releases_map(fd));
    assert_null(dray__releases_map(ends[0]));
    close(fd);
    dray__releases *ours = dray__releases_new(&fd), *theirs = dray__releases_map(fd);
    assert_non_null(theirs);
    assert_true(ftruncate(fd, 0) < 0);
    uint32_t read = 0, out[DRAY__RELEASES];
    for (uint32_t i = 0; i < 3 * DRAY__RELEASES; i++) {
        assert_true(dray__releases_write(ours, i, DRAY__WANT_BYTES));
        if (i % DRAY__RELEASES == DRAY__RELEASES - 1) {
            assert_false(dray__releases_write(ours, i, DRAY__WANT_BYTES)); /* full */
            assert_int_equal(dray__releases_read(theirs, &read, out), DRAY__RELEASES);
            assert_int_equal(out[DRAY__RELEASES - 1], i);
        }
    }
    dray__releases_want(theirs, DRAY__WANT_ROWS);
    assert_true(dray__releases_write(ours, 1, DRAY__WANT_BYTES));
    assert_false(dray__releases_write(ours, 2, DRAY__WANT_BYTES | DRAY__WANT_ROWS));
    dray__releases_free(theirs);
    dray__releases_free(ours);
    close(fd);
    close(ends[0]);
    close(ends[1]);
}

SUITE(NULL, NULL)
