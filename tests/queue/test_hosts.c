/* Tests samples on several hosts. Hosts are names (dray_options.host), whose keepers can be reached
 * through their data servers alone, as over a network. test_two_hosts.py has two network
 * namespaces. */
#include "queue/three_tasks.h"

#include "queue/keepers.h"

#include "control/context.h"
#include "queue/messages.h"

#include <sys/socket.h>
#include <sys/un.h>

static keeper_of kept[2] = {{.host = "b"}, {.host = "c"}};

/* Rows made on b, answered on c, scored on the coordinator's host, which keeps nothing. */
TEST(test_rows_cross_hosts)
{
    dray_context *at_b = context_of("b", "producer"), *at_c = context_of("c", "answers");
    dray_queue *b = open_queue(at_b, "hosts", 0, 0), *c = open_queue(at_c, "hosts", 0, 0);
    insert_ints(b, "0", 60, 1);
    OK(dray_queue_seal(b, "0", 60, &error));
    assert_int_equal(kept_chunks(&f), 0);
    assert_true(chunks_of(&kept[0]) == 1);
    for (int i = 0; i < 6; i++) {
        dray_claim_options o = want("rollout", 10);
        dray_batch *batch;
        dray_column column;
        OK(dray_queue_claim(c, &o, &batch, &error));
        OK(dray_batch_column(batch, "prompts", &column, &error));
        for (int r = 0; r < 10; r++)
            assert_int_equal(*(const int32_t *)column.cells[r],
                             (int)dray_batch_row(batch, (uint32_t)r)->slot * 10);
        set_ints(batch, "responses", 500);
        COMMIT(batch);
    }
    assert_true(chunks_of(&kept[1]) == 1);
    dray_claim_options o = want("reward", 60);
    dray_batch *batch;
    dray_column column;
    OK(dray_queue_claim(b, &o, &batch, &error));
    OK(dray_batch_column(batch, "responses", &column, &error));
    for (int r = 0; r < 60; r++)
        assert_int_equal(*(const int32_t *)column.cells[r], 500 + r);
    set_ints(batch, "rewards", 1000);
    COMMIT(batch);
    all_rows(c, "actor", NULL, 0, 60);
    OK(dray_queue_clear(b, "0", &error));
    dray_queue_close(b);
    leave(c, at_b);
    dray_close(at_c);
    for (int i = 0; i < 2000 && chunks_of(&kept[0]) + chunks_of(&kept[1]); i++)
        usleep(5000);
    assert_int_equal(chunks_of(&kept[0]) + chunks_of(&kept[1]), 0);
}

/* Bytes of row r: r * 977 % 3000 + 1 of them, beginning with r. */
static size_t ragged_size(uint32_t r)
{
    return r * 977 % 3000 + 1;
}

static uint8_t ragged_byte(uint32_t r, size_t at)
{
    return (uint8_t)(r * 31 + at * 7);
}

static void insert_ragged(dray_queue *queue, const char *partition, uint32_t rows)
{
    uint64_t *offsets = calloc(rows + 1, sizeof *offsets);
    for (uint32_t r = 0; r < rows; r++)
        offsets[r + 1] = offsets[r] + ragged_size(r);
    uint8_t *values = malloc(offsets[rows]);
    for (uint32_t r = 0; r < rows; r++)
        for (size_t i = 0; i < ragged_size(r); i++)
            values[offsets[r] + i] = ragged_byte(r, i);
    dray_column_data column = {.name = "prompts",
                               .dtype = DRAY_U8,
                               .ndim = 1,
                               .content = DRAY_CONTENT_BYTES,
                               .offsets = offsets,
                               .values = values};
    dray_insert_options in = DRAY_INSERT_OPTIONS_INIT;
    in.partition = partition;
    in.rows = rows;
    in.columns = &column;
    in.column_count = 1;
    OK(dray_queue_insert(queue, &in, NULL, &error));
    OK(dray_queue_seal(queue, partition, rows, &error));
    free(offsets);
    free(values);
}

static void check_ragged(dray_batch *batch)
{
    dray_column column;
    OK(dray_batch_column(batch, "prompts", &column, &error));
    for (uint32_t r = 0; r < dray_batch_rows(batch); r++) {
        uint32_t slot = dray_batch_row(batch, r)->slot;
        assert_int_equal(column.lengths[r], ragged_size(slot));
        for (size_t i = 0; i < column.lengths[r]; i++)
            if (((const uint8_t *)column.cells[r])[i] != ragged_byte(slot, i))
                fail_msg("row %u, byte %zu", slot, i);
    }
}

/* Many requests of many pieces each; rows of every size; what was read is the reader's although the
 * chunk is freed and written again. */
TEST(test_ragged_cells)
{
    dray_context *at_b = context_of("b", "producer"), *here = fixture_context(&f, "reader");
    dray_queue *b = open_queue(at_b, "ragged", 0, 0), *a = open_queue(here, "ragged", 0, 0);
    insert_ragged(b, "0", 4000); /* 6 MB */
    dray_batch *batches[4];
    for (int i = 0; i < 4; i++) {
        dray_claim_options o = want("rollout", 1000);
        OK(dray_queue_claim(a, &o, &batches[i], &error));
        check_ragged(batches[i]);
    }
    OK(dray_queue_clear(b, "0", &error));
    for (int i = 0; i < 4; i++) {
        check_ragged(batches[i]);
        dray_batch_free(batches[i]);
    }
    for (int round = 1; round < 6; round++) { /* its chunk is written again */
        char name[16];
        snprintf(name, sizeof name, "%d", round);
        insert_ragged(b, name, 1000);
        dray_claim_options o = want("rollout", 1000);
        dray_batch *batch;
        OK(dray_queue_claim(a, &o, &batch, &error));
        check_ragged(batch);
        OK(dray_queue_clear(b, name, &error));
        dray_batch_free(batch);
    }
    assert_true(chunks_of(&kept[0]) <= 3);
    dray_queue_close(b);
    leave(a, at_b);
    dray_close(here);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* they need the addresses */
/* A keeper that has no addresses left for a chunk says so, and its bytes do not count as lost. */
TEST(test_keeper_without_addresses)
{
    char path[64], name[16];
    long pages = 0;
    int partition = 0;
    dray_column column;
    dray_context *at_b = context_of("b", "producer"), *here = fixture_context(&f, "reader");
    dray_queue *b = open_queue(at_b, "addresses", 0, 0), *a = open_queue(here, "addresses", 0, 0);
    dray_batch *batch;
    dray_claim_options o = want("rollout", 4000);
    insert_ragged(b, "0", 4000); /* 6 MB */
    OK(dray_queue_claim(a, &o, &batch, &error));
    check_ragged(batch); /* the keeper has all that it needs, but a mapping of the next chunk */
    dray_batch_free(batch);
    while (chunks_of(&kept[0]) < 2) {
        snprintf(name, sizeof name, "%d", ++partition);
        insert_ragged(b, name, 4000);
    }
    snprintf(path, sizeof path, "/proc/%d/statm", (int)kept[0].pid);
    FILE *statm = fopen(path, "r");
    assert_true(statm && fscanf(statm, "%ld", &pages) == 1);
    fclose(statm);
    const struct rlimit none = {RLIM_INFINITY, RLIM_INFINITY},
                        limit = {(rlim_t)(pages * sysconf(_SC_PAGESIZE) + (1 << 20)),
                                 RLIM_INFINITY};
    o.partition = name;
    OK(dray_queue_claim(a, &o, &batch, &error));
    assert_int_equal(prlimit(kept[0].pid, RLIMIT_AS, &limit, NULL), 0);
    FAILS(DRAY_ENOMEM, dray_batch_column(batch, "prompts", &column, &error));
    assert_int_equal(prlimit(kept[0].pid, RLIMIT_AS, &none, NULL), 0);
    check_ragged(batch);
    dray_batch_free(batch);
    for (int i = 0; i <= partition; i++) {
        snprintf(name, sizeof name, "%d", i);
        OK(dray_queue_clear(b, name, &error));
    }
    dray_queue_close(b);
    leave(a, at_b);
    dray_close(here);
}
#endif

/* A keeper is killed: its rows are lost and refilled, those of others stay, and its producer goes
 * on with the next one. */
TEST(test_host_dies)
{
    dray_context *at_b = context_of("b", "producer b"), *at_c = context_of("c", "producer c");
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    dray_queue *b = open_three(at_b, "death", options), *c = open_three(at_c, "death", options);
    insert_ints(b, "0", 6, 1);
    insert_ints(c, "0", 4, 1);
    OK(dray_queue_seal(c, "0", 10, &error));
    dray_claim_options o = want("rollout", 3);
    dray_batch *batch, *rest;
    dray_column column;
    OK(dray_queue_claim(c, &o, &batch, &error)); /* of b, not looked at yet */
    keeper_down(&kept[0], SIGKILL);
    FAILS(DRAY_EGONE, dray_batch_column(batch, "prompts", &column, &error));
    dray_batch_free(batch);
    keeper_up(&kept[0]);
    uint32_t rows = 0;
    while (rows < 6) {
        dray_refill refill = DRAY_REFILL_INIT;
        OK(dray_queue_refill_wait(b, 10 * DRAY__SECOND, &refill, &error));
        assert_int_equal(refill.cause, DRAY_LOSS_BYTES);
        refill_ints(b, &refill, 7);
        rows += refill.rows;
    }
    assert_int_equal(rows, 6);
    o = want("rollout", 10);
    OK(dray_queue_claim(c, &o, &rest, &error));
    assert_int_equal(dray_batch_rows(rest), 10);
    OK(dray_batch_column(rest, "prompts", &column, &error));
    set_ints(rest, "responses", 0);
    COMMIT(rest);
    dray_queue_close(b);
    leave(c, at_b);
    dray_close(at_c);
}

/* The second keeper of a host is refused, and a host without one can read, but not put. */
/* Rows that were read from a host are committed when it is gone. Those that nobody holds are lost.
 */
TEST(test_claimed_rows_outlast_their_host)
{
    dray_context *at_b = context_of("b", "producer"), *at_c = context_of("c", "answers");
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    dray_queue *b = open_three(at_b, "claimed", options), *c = open_three(at_c, "claimed", options);
    insert_ints(b, "0", 8, 1);
    OK(dray_queue_seal(b, "0", 8, &error));
    dray_batch *batch = claim_of(c, "rollout", "0", 4);
    dray_column column;
    OK(dray_batch_column(batch, "prompts", &column, &error));
    keeper_down(&kept[0], SIGKILL);
    keeper_up(&kept[0]);
    for (uint32_t rows = 0; rows < 4;) {
        dray_refill refill = DRAY_REFILL_INIT;
        OK(dray_queue_refill_wait(b, 20 * DRAY__SECOND, &refill, &error));
        refill_ints(b, &refill, 7);
        rows += refill.rows;
    }
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(*(const int32_t *)column.cells[i], 10 * dray_batch_row(batch, i)->slot);
    set_ints(batch, "responses", 0);
    COMMIT(batch);
    batch = claim_of(c, "rollout", "0", 4);
    set_ints(batch, "responses", 0);
    COMMIT(batch);
    dray_queue_close(b);
    leave(c, at_b);
    dray_close(at_c);
}

/* Ends the connections to the coordinator, except the first one, which is the session's. */
static void break_channels(int signal)
{
    int count = 0, before = errno;
    (void)signal;
    for (int fd = 3; fd < 1024; fd++) {
        struct sockaddr_un at = {0};
        socklen_t size = sizeof at;
        if (getpeername(fd, (struct sockaddr *)&at, &size) == 0 && at.sun_family == AF_UNIX &&
            strcmp(at.sun_path, f.socket) == 0 && count++)
            shutdown(fd, SHUT_RDWR);
    }
    errno = before;
}

/* A keeper whose connection ends, and not its session, goes on with what it keeps. */
TEST(test_connection_of_a_keeper_ends)
{
    keeper_of keeper = {.host = "d"};
    signal(SIGUSR1, break_channels); /* for the keeper's process */
    keeper_up(&keeper);
    signal(SIGUSR1, SIG_DFL);
    dray_context *at_d = context_of("d", "producer"), *here = fixture_context(&f, "reader");
    dray_queue *d = open_queue(at_d, "broken", 0, 0), *a = open_queue(here, "broken", 0, 0);
    dray_batch *batch;
    dray_column column;
    insert_ints(d, "0", 20, 1);
    for (int round = 0; round < 3; round++) {
        assert_int_equal(kill(keeper.pid, SIGUSR1), 0);
        usleep(300000);
        assert_int_equal(chunks_of(&keeper), 1);
        batch = claim_of(a, "rollout", "0", 20);
        OK(dray_batch_column(batch, "prompts", &column, &error));
        for (uint32_t i = 0; i < 20; i++)
            assert_int_equal(*(const int32_t *)column.cells[i],
                             10 * dray_batch_row(batch, i)->slot);
        dray_batch_free(batch);
    }
    OK(dray_queue_clear(d, "0", &error)); /* the keeper hears of it */
    dray_queue_close(d);
    leave(a, at_d);
    dray_close(here);
    for (int i = 0; i < 2000 && chunks_of(&keeper); i++)
        usleep(5000);
    assert_int_equal(chunks_of(&keeper), 0);
    keeper_down(&keeper, SIGTERM);
}

static int join_as(dray__channel *channel, const char *path, uint32_t *number)
{
    const dray__keeper_join message = {path, "tcp:127.0.0.1:1", false};
    dray__keeper_told told;
    dray__arena texts = {0};
    int rc = dray__ask(channel, DRAY__MSG_QUEUE_KEEPER_JOIN, &dray__keeper_join_fields, &message,
                       dray__deadline(20 * DRAY__SECOND), &texts, &dray__keeper_joined_fields,
                       &told, &error);
    *number = rc ? 0 : told.number;
    dray__arena_free(&texts);
    return rc;
}

/* A keeper whose answer was lost joins again, with the same message. */
TEST(test_joins_again)
{
    uint32_t first, second;
    dray__channel *channel;
    dray_context *at_e = context_of("e", "keeper"), *other = context_of("e", "keeper");
    OK(dray__channel_open(at_e, &channel, &error));
    OK(join_as(channel, "/nowhere/e", &first));
    OK(join_as(channel, "/nowhere/e", &second));
    assert_int_equal(first, second);
    FAILS(DRAY_EEXIST, join_as(channel, "/nowhere/f", &second));
    dray__channel_close(channel);
    OK(dray__channel_open(other, &channel, &error));
    FAILS(DRAY_EEXIST, join_as(channel, "/nowhere/e", &second));
    dray__channel_close(channel);
    dray_close(other);
    dray_close(at_e);
}

TEST(test_refused)
{
    struct event_base *base = event_base_new();
    dray__keeper *keeper;
    dray__join *join = NULL;
    char path[112];
    snprintf(path, sizeof path, "%s/second", f.folder);
    OK(dray__keeper_new(base, path, 0, &keeper, &error));
    dray__join_options o = {.address = f.address, .path = path, .host = "b", .listen = "127.0.0.1"};
    FAILS(DRAY_EEXIST, dray__join_start(keeper, &o, &join, &error));
    o.host = "d";
    o.path = "not/absolute";
    FAILS(DRAY_EINVALID, dray__join_start(keeper, &o, &join, &error));
    dray__keeper_free(keeper);
    event_base_free(base);
}

/* A keeper that looks for a coordinator for the first time leaves at once when it is told to:
 * `dray serve` that is ended while it begins would wait for its own coordinator otherwise. */
TEST(test_leaves_before_it_joined)
{
    struct event_base *base = event_base_new();
    dray__keeper *keeper;
    dray__join *join = NULL;
    char path[112], nobody[120];
    snprintf(path, sizeof path, "%s/third", f.folder);
    snprintf(nobody, sizeof nobody, "unix:%s/nobody", f.folder);
    OK(dray__keeper_new(base, path, 0, &keeper, &error));
    dray__join_options o = {.address = nobody, .path = path, .host = "d", .later = true};
    OK(dray__join_start(keeper, &o, &join, &error));
    poll(NULL, 0, 100);
    int64_t begun = dray__now();
    dray__join_free(join);
    assert_true(dray__now() - begun < 30 * DRAY__SECOND);
    dray__keeper_free(keeper);
    event_base_free(base);
}

FIXTURE(all_up)
{
    fixture_up(&f);
    for (int i = 0; i < 2; i++)
        keeper_up(&kept[i]);
    return 0;
}

FIXTURE(all_down)
{
    for (int i = 0; i < 2; i++)
        keeper_down(&kept[i], SIGTERM);
    fixture_down(&f);
    return 0;
}

int main(void)
{
    if (elsewhere()) /* this is of chunks */
        return 77;
    return suite_run(all_up, all_down);
}
