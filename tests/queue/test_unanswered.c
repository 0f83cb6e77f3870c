/* Tests changes that are made although their caller gets an error or no answer. They count once,
 * their bytes stay, and rows and memory without an owner are free again. */
#include "control/channel.h"
#include "queue/client/client.h"
#include "queue/three_tasks.h"

#include "queue/keepers.h"

#include <dray/loader.h>
#include <poll.h>
#include <sys/socket.h>

static dray_context *contexts[2];
static dray_queue *worker, *other;

static dray_queue *open_durable(dray_context *context)
{
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.on_loss = DRAY_ON_LOSS_SHRINK_GROUP;
    options.max_attempts = 3;
    options.durability = DRAY_DURABILITY_JOURNAL;
    return open_three(context, "unanswered", options);
}

/* A worker, and somebody else. */
static void begin_durable(void)
{
    f = (queue_fixture){.durable = true};
    fixture_up(&f);
    contexts[0] = fixture_context(&f, "worker");
    contexts[1] = fixture_context(&f, "other");
    worker = open_durable(contexts[0]);
    other = open_durable(contexts[1]);
}

static void end_both(void)
{
    leave(other, contexts[1]);
    leave(worker, contexts[0]);
    fixture_down(&f);
}

/* ---- a full disk ----------------------------------------------------------------------------- */

/* Until the journal is written again. */
static void empty_disk(void)
{
    int rc;
    fixture_limit_files(&f, RLIM_INFINITY);
    int64_t deadline = dray__deadline(20 * DRAY__SECOND);
    while ((rc = try_insert_ints(other, "more", 1, 1)) == DRAY_EFULL && dray__now() < deadline)
        usleep(10000);
    OK(rc);
}

TEST(test_bytes_of_a_commit_on_a_full_disk)
{
    int32_t values[4];
    begin_durable();
    insert_ints(other, "0", 4, 1);
    insert_ints(other, "1", 4, 1);
    dray_batch *batch = claim_of(worker, "rollout", "0", 4);
    set_ints(batch, "responses", 100);
    fixture_fill_disk(&f);
    FAILS(DRAY_EFULL, dray_batch_commit(batch, &error));
    dray_batch_free(batch);
    empty_disk();
    batch = claim_of(worker, "rollout", "1", 4);
    set_ints(batch, "responses", 900);
    COMMIT(batch);
    batch = claim_of(other, "reward", "0", 4);
    OK(dray_batch_gather(batch, "responses", values, sizeof values, NULL, &error));
    for (int i = 0; i < 4; i++)
        assert_int_equal(values[i], 100 + i);
    dray_batch_free(batch);
    end_both();
}

/* The rows that the same message claimed are nobody's, and are claimed again. */
TEST(test_claim_behind_a_commit_on_a_full_disk)
{
    begin_durable();
    insert_ints(other, "0", 8, 1);
    OK(dray_queue_seal(other, "0", 8, &error));
    dray_batch *batch = claim_of(worker, "rollout", "0", 4), *next = NULL;
    set_ints(batch, "responses", 100);
    fixture_fill_disk(&f);
    dray_claim_options o = want("rollout", 4);
    o.partition = "0";
    o.timeout_ns = 20 * DRAY__SECOND;
    FAILS(DRAY_EFULL, dray_batch_commit_claim(batch, &o, 1, NULL, &next, &error));
    empty_disk();
    OK(dray_batch_commit_claim(batch, &o, 1, NULL, &next, &error));
    dray_batch_free(batch);
    set_ints(next, "responses", 100);
    COMMIT(next);
    end_both();
}

/* ---- a loader's commit, and something else of its queue -------------------------------------- */

/* Batch 0 is done: its commit is under way, with a claim that waits. Batch 1 is ready. */
static dray_loader *begin_loader(dray_load *load)
{
    dray_loader *loader;
    dray_loader_options o = DRAY_LOADER_OPTIONS_INIT;
    static dray_claim_options claim;
    insert_ints(other, "0", 4, 1);
    claim = want("rollout", 4);
    claim.timeout_ns = 20 * DRAY__SECOND;
    o.claim = &claim;
    o.ahead = 2;
    OK(dray_loader_open(worker, &o, &loader, &error));
    OK(dray_loader_next(loader, 20 * DRAY__SECOND, load, &error));
    insert_ints(other, "1", 4, 1); /* answers the claim ahead, and the loader has not looked */
    struct pollfd answer = {.fd = dray_queue_fd(worker), .events = POLLIN};
    assert_int_equal(poll(&answer, 1, 20000), 1);
    set_ints(load->batch, "responses", 100);
    OK(dray_loader_done(loader, load, &error));
    assert_non_null(worker->committing);
    int64_t deadline = dray__deadline(20 * DRAY__SECOND);
    while (!status_has(other, "\"committed\":4") && dray__now() < deadline)
        usleep(10000);
    return loader;
}

/* The insert finds that the coordinator was restarted: the loader's claim ended with it. */
TEST(test_loader_whose_queue_came_back)
{
    dray_load load = DRAY_LOAD_INIT;
    dray_loader_counts counts = DRAY_LOADER_COUNTS_INIT;
    begin_durable();
    dray_loader *loader = begin_loader(&load);
    fixture_restart(&f);
    insert_ints(worker, "2", 4, 1);
    insert_ints(worker, "3", 4, 1);
    int64_t deadline = dray__deadline(40 * DRAY__SECOND);
    do { /* of batches that were claimed before, too, whose commits are too late */
        int rc = dray_loader_next(loader, DRAY__SECOND / 5, &load, &error);
        if (!rc) {
            set_ints(load.batch, "responses", 500);
            OK(dray_loader_done(loader, &load, &error));
        }
        OK(dray_loader_count(loader, &counts, &error));
    } while (counts.committed < 4 && dray__now() < deadline);
    for (char name[] = "0"; name[0] < '4'; name[0]++)
        dray_batch_free(claim_of(other, "reward", name, 4));
    assert_int_equal(counts.committed, 4);
    dray_loader_close(loader);
    end_both();
}

/* The commit counted, and so did an insert behind it, when the connection broke. */
TEST(test_commit_that_counted_before_another_change)
{
    dray_load load = DRAY_LOAD_INIT;
    dray_loader_counts counts = DRAY_LOADER_COUNTS_INIT;
    begin_durable();
    dray_loader *loader = begin_loader(&load);
    insert_ints(worker, "2", 4, 1);
    shutdown(dray__channel_socket(worker->channel), SHUT_RDWR);
    OK(dray_loader_flush(loader, &error));
    OK(dray_loader_count(loader, &counts, &error));
    assert_int_equal(counts.committed, 1);
    assert_int_equal(counts.lost, 0);
    dray_batch_free(claim_of(other, "reward", "0", 4));
    dray_loader_close(loader);
    end_both();
}

/* ---- keepers --------------------------------------------------------------------------------- */

/* Each keeper dies with a chunk that its producer had not filled. The memory of those is not
 * counted any more. */
TEST(test_chunks_of_keepers_that_died)
{
    if (elsewhere())
        return;
    f = (queue_fixture){0};
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "worker"), *context2 = fixture_context(&f, "reads");
    dray_queue *producer = open_queue(context, "dead", 0, 1 << 20),
               *reader = open_queue(context2, "dead", 0, 0);
    for (int i = 0; i < 20; i++) { /* of 64 KiB each */
        char name[12];
        dray_column column;
        snprintf(name, sizeof name, "%d", i);
        insert_ints(producer, name, 4, 1);
        fixture_restart_keeper(&f);
        dray_batch *batch = claim_of(reader, "rollout", name, 4);
        FAILS(DRAY_EGONE, dray_batch_column(batch, "prompts", &column, &error));
        dray_batch_free(batch);
        OK(dray_queue_clear(reader, name, &error));
    }
    assert_true(status_has(reader, "\"chunk_bytes\":0"));
    leave(reader, context2);
    leave(producer, context);
    fixture_down(&f);
}

static void read_ints(dray_queue *reader, const char *partition)
{
    dray_column column;
    dray_batch *batch = claim_of(reader, "rollout", partition, 4);
    OK(dray_batch_column(batch, "prompts", &column, &error));
    for (int row = 0; row < 4; row++)
        assert_int_equal(*(const int32_t *)column.cells[row], row * 10);
    dray_batch_free(batch);
}

/* Inserts until the queue's keeper has joined again, with this number. */
static void insert_at(dray_queue *queue, const char *partition, uint32_t number)
{
    int rc;
    int64_t deadline = dray__deadline(20 * DRAY__SECOND);
    do {
        usleep(20000);
        dray_queue_clear(queue, partition, NULL);
        rc = try_insert_ints(queue, partition, 4, 1);
    } while ((rc || queue->holder.keeper_number != number) && dray__now() < deadline);
    OK(rc);
    assert_int_equal(queue->holder.keeper_number, number);
}

/* Keepers join a restarted coordinator in another order, and have each other's numbers. A reader's
 * links are to the hosts that it asked before. */
TEST(test_keepers_that_change_their_numbers)
{
    if (elsewhere())
        return;
    keeper_of kept[2] = {{.host = "b"}, {.host = "c"}};
    f = (queue_fixture){.durable = true};
    fixture_up(&f);
    keeper_up(&kept[0]);
    keeper_up(&kept[1]);
    dray_context *at_b = context_of("b", "b"), *at_c = context_of("c", "c"),
                 *at_d = context_of("d", "d");
    dray_queue *b = open_durable(at_b), *c = open_durable(at_c), *d = open_durable(at_d);
    insert_ints(b, "b0", 4, 1);
    insert_ints(c, "c0", 4, 1);
    assert_int_equal(b->holder.keeper_number, 1);
    read_ints(d, "b0");
    read_ints(d, "c0");
    kill(kept[0].pid, SIGSTOP);
    fixture_restart(&f);
    OK(dray_queue_seal(d, "b0", 4, &error)); /* comes back */
    insert_at(c, "c1", 1);
    kill(kept[0].pid, SIGCONT);
    insert_at(b, "b1", 2);
    read_ints(d, "b1");
    read_ints(d, "c1");
    leave(b, at_b);
    leave(c, at_c);
    leave(d, at_d);
    keeper_down(&kept[0], SIGTERM);
    keeper_down(&kept[1], SIGTERM);
    fixture_down(&f);
}

SUITE(NULL, NULL)
