/* Tests answers that never come, requests that are given up, and messages that are not sent. Bytes
 * that may be committed are never overwritten, no process waits for one that is gone, and no memory
 * is left behind. */
#include "control/channel.h"
#include "queue/client/client.h"

#include "queue/three_tasks.h"
#include <jansson.h>

#include <sys/mman.h>

/* A queue whose calls give up soon, though not sooner than a busy machine's Redis answers. */
static dray_queue *open_hasty(dray_context *context, const char *name)
{
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.on_loss = DRAY_ON_LOSS_SHRINK_GROUP;
    options.timeout_ns = 200 * DRAY__MILLISECOND;
    return open_three(context, name, options);
}

static void check_ints(dray_queue *queue, const char *partition, int32_t base)
{
    int32_t values[4];
    dray_batch *batch = claim_of(queue, "reward", partition, 4);
    OK(dray_batch_gather(batch, "responses", values, sizeof values, NULL, &error));
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(values[i], base + (int32_t)dray_batch_row(batch, i)->slot);
    dray_batch_free(batch);
}

/* The coordinator stands still while a commit is sent: the client cannot know that it happened. */
static void commit_without_answer(dray_batch *batch)
{
    kill(f.coordinator_pid, SIGSTOP);
    FAILS(DRAY_ETIMEDOUT, dray_batch_commit(batch, &error));
}

TEST(test_commit_without_answer)
{
    dray_context *context = fixture_context(&f, "commit");
    dray_queue *queue = open_queue(context, "commit", 0, 0),
               *worker = open_hasty(context, "commit");
    insert_ints(queue, "0", 4, 1);
    insert_ints(queue, "1", 4, 1);
    insert_ints(queue, "2", 4, 1);
    dray_batch *batch = claim_of(worker, "rollout", "0", 4);
    set_ints(batch, "responses", 100);
    commit_without_answer(batch);
    dray_batch_free(batch); /* its outputs may be committed all the same */
    kill(f.coordinator_pid, SIGCONT);
    batch = claim_of(worker, "rollout", "1", 4);
    set_ints(batch, "responses", 200);
    commit_without_answer(batch);
    set_ints(batch, "responses", 300); /* beside the others, not over them */
    kill(f.coordinator_pid, SIGCONT);
    COMMIT(batch);
    batch = claim_of(worker, "rollout", "2", 4);
    set_ints(batch, "responses", 400);
    COMMIT(batch);
    check_ints(queue, "0", 100);
    check_ints(queue, "1", 200); /* the first commit counted */
    check_ints(queue, "2", 400);
    dray_queue_close(worker);
    leave(queue, context);
}

/* An insert that its client gave up must not happen later, when its memory may be in use again. */
TEST(test_insert_without_answer)
{
    dray_context *context = fixture_context(&f, "insert");
    dray_queue *queue = open_queue(context, "insert", 4, 0);
    insert_ints(queue, "0", 4, 1);
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    int32_t values[4] = {0};
    dray_column_data column = int_column("prompts", values);
    o.partition = "1";
    o.rows = 4;
    o.columns = &column;
    o.column_count = 1;
    o.timeout_ns = 500 * DRAY__MILLISECOND; /* the coordinator counts from when it reads it */
    kill(f.coordinator_pid, SIGSTOP);
    FAILS(DRAY_ETIMEDOUT, dray_queue_insert(queue, &o, NULL, &error));
    kill(f.coordinator_pid, SIGCONT);
    OK(dray_queue_clear(queue, "0", &error)); /* there is room for it now */
    FAILS(DRAY_ENOENT, dray_queue_seal(queue, "1", 4, &error));
    leave(queue, context);
}

/* ---- who waits behind an insert that ends ---------------------------------------------------- */

typedef struct waiting {
    const char *queue;
    int64_t timeout_ns;
} waiting;

static void insert_and_wait(void *argument)
{
    const waiting *w = argument;
    dray_context *context = fixture_context(&f, "large");
    dray_queue *queue = open_queue(context, w->queue, 8, 0);
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = "large";
    o.rows = 8;
    o.timeout_ns = w->timeout_ns;
    FAILS(DRAY_ETIMEDOUT, dray_queue_insert(queue, &o, NULL, &error));
    leave(queue, context);
}

static void wait_for_waiter(dray_queue *queue)
{
    for (int i = 0; i < 4000; i++) {
        char *text;
        OK(dray_queue_status(queue, &text, &error));
        bool there = strstr(text, "\"inserts\":1") != NULL;
        free(text);
        if (there)
            return;
        usleep(5000);
    }
    die("nobody waits", NULL);
}

TEST(test_insert_behind_another)
{
    dray_context *context = fixture_context(&f, "behind");
    dray_queue *queue = open_queue(context, "behind", 8, 0);
    insert_ints(queue, "0", 4, 1);
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.rows = 2;
    o.timeout_ns = 20 * DRAY__SECOND;
    waiting w = {"behind", DRAY__SECOND};
    pid_t pid = child(insert_and_wait, &w);
    wait_for_waiter(queue);
    o.partition = "1";
    OK(dray_queue_insert(queue, &o, NULL, &error)); /* goes on when the other times out, */
    join(pid);
    w.timeout_ns = 60 * DRAY__SECOND;
    pid = child(insert_and_wait, &w);
    wait_for_waiter(queue);
    o.partition = "2";
    pid_t killer = fork();
    if (killer == 0) {
        usleep(300000);
        kill(pid, SIGKILL);
        _exit(0);
    }
    OK(dray_queue_insert(queue, &o, NULL, &error)); /* or dies */
    int status;
    waitpid(killer, &status, 0);
    waitpid(pid, &status, 0);
    leave(queue, context);
}

/* ---- chunks ---------------------------------------------------------------------------------- */

static int try_large(dray_batch *batch, dray_error *said)
{
    static int32_t values[3 << 18];
    uint64_t offsets[5] = {0, 1, 2, 3, 3 << 18};
    dray_column_data column = int_column("responses", values);
    column.ndim = 1;
    column.offsets = offsets;
    return dray_batch_set(batch, &column, said);
}

static void set_large(dray_batch *batch)
{
    OK(try_large(batch, &error));
}

/* Fills a chunk with the responses to four rows. */
static void commit_large(dray_queue *queue, const char *partition)
{
    dray_batch *batch = claim_of(queue, "rollout", partition, 4);
    set_large(batch);
    COMMIT(batch);
}

static json_int_t free_bytes(dray_queue *queue)
{
    char *text;
    OK(dray_queue_status(queue, &text, &error));
    json_t *json = json_loads(text, 0, NULL);
    json_int_t bytes = json_integer_value(json_object_get(json, "free_chunk_bytes"));
    json_decref(json);
    free(text);
    return bytes;
}

/* That a chunk is closed stands in a message that is not sent: the next one says it. */
TEST(test_closed_chunk_is_told)
{
    if (elsewhere()) /* this is of chunks */
        return;
    dray_context *context = fixture_context(&f, "closed");
    dray_queue *queue = open_queue(context, "closed", 0, 0);
    dray_queue *worker = open_queue(context, "closed", 0, 0);
    insert_ints(queue, "0", 8, 1);
    commit_large(worker, "0");
    dray_batch *first = claim_of(worker, "rollout", "0", 4), *none;
    set_large(first); /* in another chunk */
    dray_claim_options o = want("rolout", 1);
    FAILS(DRAY_ENOENT, dray_queue_claim(worker, &o, &none, &error));
    FAILS(DRAY_ENOENT, dray_queue_claim_start(worker, &o, 1, &error));
    COMMIT(first);
    OK(dray_queue_clear(worker, "0", &error));
    assert_true(free_bytes(worker) >= 3 << 20); /* both are known to be free */
    insert_ints(queue, "1", 4, 1);
    uint64_t count = worker->holder.storage.count;
    first = claim_of(worker, "rollout", "1", 4);
    set_large(first);
    assert_int_equal(worker->holder.storage.count, count);
    dray_batch_free(first);
    dray_queue_close(worker);
    leave(queue, context);
}

/* The answer never comes, and with it a chunk that was given back: saying again that it is closed
 * gives it back again. */
TEST(test_chunk_in_a_lost_answer)
{
    if (elsewhere()) /* this is of chunks */
        return;
    dray_context *context = fixture_context(&f, "answer");
    dray_queue *queue = open_queue(context, "answer", 0, 0);
    dray_queue *worker = open_queue(context, "answer", 0, 0);
    insert_ints(queue, "0", 4, 1);
    insert_ints(queue, "1", 4, 1);
    commit_large(worker, "0");
    dray_batch *batch = claim_of(worker, "rollout", "1", 4);
    OK(dray_queue_clear(queue, "0", &error));
    int64_t timeout = worker->timeout_ns;
    worker->timeout_ns = 10 * DRAY__MILLISECOND;
    kill(f.coordinator_pid, SIGSTOP);
    FAILS(DRAY_ETIMEDOUT, try_large(batch, &error));
    kill(f.coordinator_pid, SIGCONT);
    worker->timeout_ns = timeout;
    set_large(batch);
    assert_int_equal(worker->holder.storage.count, 1);
    COMMIT(batch);
    dray_queue_close(worker);
    leave(queue, context);
}

/* A commit fails because its partition was cleared. The worker's keeper is there as before, so its
 * chunks are, too: the controller gives them back. */
TEST(test_commit_of_a_cleared_partition)
{
    if (elsewhere()) /* this is of chunks */
        return;
    dray_context *context = fixture_context(&f, "gone");
    dray_queue *queue = open_queue(context, "gone", 0, 0);
    dray_queue *worker = open_queue(context, "gone", 0, 0);
    for (int i = 0; i < 3; i++)
        insert_ints(queue, (char[]){(char)('0' + i), '\0'}, 4, 1);
    commit_large(worker, "0");
    dray_batch *batch = claim_of(worker, "rollout", "1", 4);
    set_large(batch);
    OK(dray_queue_clear(queue, "0", &error)); /* its chunk is spare */
    OK(dray_queue_clear(queue, "1", &error));
    FAILS(DRAY_EGONE, dray_batch_commit(batch, &error));
    dray_batch_free(batch);
    uint64_t count = worker->holder.storage.count;
    commit_large(worker, "2");
    assert_int_equal(worker->holder.storage.count, count);
    dray_queue_close(worker);
    leave(queue, context);
}

/* The keeper died with chunks that the controller still counts as spare: it offers them, and they
 * are given up. */
TEST(test_spare_chunks_of_a_dead_keeper)
{
    if (elsewhere())
        return;
    queue_fixture own = {0};
    fixture_up(&own);
    dray_context *context = fixture_context(&own, "worker");
    dray_queue *worker = open_queue(context, "spare", 0, 0);
    dray_batch *batches[3], *read;
    dray_column column;
    insert_ints(worker, "0", 12, 1);
    for (int i = 0; i < 3; i++)
        batches[i] = claim_of(worker, "rollout", "0", 4);
    for (int i = 0; i < 3; i++)
        set_large(batches[i]);
    for (int i = 0; i < 2; i++)
        COMMIT(batches[i]);
    OK(dray_queue_clear(worker, "0", &error));
    fixture_restart_keeper(&own);
    FAILS(DRAY_EGONE, dray_batch_commit(batches[2], &error)); /* of no keeper's doing */
    dray_batch_free(batches[2]);
    insert_ints(worker, "1", 4, 1);
    commit_large(worker, "1");
    read = claim_of(worker, "reward", "1", 4);
    OK(dray_batch_column(read, "responses", &column, &error)); /* the new keeper has them */
    dray_batch_free(read);
    leave(worker, context);
    fixture_down(&own);
}

/* The controller has a chunk dropped that the keeper reads of only later. */
TEST(test_drop_comes_first)
{
    int fd;
    queue_fixture own = {0};
    fixture_up(&own);
    dray__keeper_link link;
    OK(dray__keeper_link_init(&link, own.keeper, 20 * DRAY__SECOND, &error));
    void *base;
    OK(dray__segment_new(4096, &base, &fd, &error));
    OK(dray__keeper_put(&link, 1, 5, 4096, fd, &error)); /* connects */
    dray__writer w = {0};
    dray__reply reply;
    const uint64_t pairs[][2] = {{1, 5}, {3, 5}, {7, 5}};
    dray__put_u32(&w, 3);
    for (int i = 0; i < 3; i++) {
        dray__put_u64(&w, pairs[i][0]);
        dray__put_u64(&w, pairs[i][1]);
    }
    OK(dray__call(link.channel, DRAY__MSG_KEEPER_DROP, &w, NULL, 0,
                  dray__deadline(20 * DRAY__SECOND), &reply, &error));
    FAILS(DRAY_EGONE, dray__keeper_put(&link, 3, 5, 4096, fd, &error));
    FAILS(DRAY_EGONE, dray__keeper_put(&link, 7, 5, 4096, fd, &error));
    wait_for_chunks(&own, 0);
    OK(dray__keeper_put(&link, 7, 6, 4096, fd, &error)); /* another's: only the key's owner drops */
    OK(dray__keeper_put(&link, 1, 5, 4096, fd, &error)); /* was there, and was dropped */
    dray__put_u32(&w, 1);
    dray__put_u64(&w, 7);
    dray__put_u64(&w, 5);
    FAILS(DRAY_EPERM, dray__call(link.channel, DRAY__MSG_KEEPER_DROP, &w, NULL, 0,
                                 dray__deadline(20 * DRAY__SECOND), &reply, &error));
    wait_for_chunks(&own, 2);
    dray__put_u32(&w, 2);
    dray__put_u64(&w, 7);
    dray__put_u64(&w, 6);
    dray__put_u64(&w, 1);
    dray__put_u64(&w, 5);
    OK(dray__call(link.channel, DRAY__MSG_KEEPER_DROP, &w, NULL, 0,
                  dray__deadline(20 * DRAY__SECOND), &reply, &error));
    wait_for_chunks(&own, 0);
    dray__writer_free(&w);
    munmap(base, 4096);
    close(fd);
    dray__keeper_link_free(&link);
    fixture_down(&own);
}

/* Who reads and leaves keeps no chunk's memory alive. */
TEST(test_mappings_end_with_the_queue)
{
    if (elsewhere()) /* this is of chunks */
        skip();
    (void)state;
    dray_context *context = fixture_context(&f, "maps");
    int before = mapped_chunks();
    dray_queue *queue = open_queue(context, "maps", 0, 0);
    insert_ints(queue, "0", 4, 1);
    dray_batch *batch = claim_of(queue, "rollout", "0", 4);
    dray_column column;
    OK(dray_batch_column(batch, "prompts", &column, &error));
    assert_int_equal(mapped_chunks(), before + 2); /* written and read */
    dray_batch_free(batch);
    dray_queue_close(queue);
    assert_int_equal(mapped_chunks(), before);
    dray_close(context);
}

SUITE(up, down)
