/* Tests loaders: the rows that they claim ahead and commit, and their errors when rows are lost. */
#include "queue/three_tasks.h"

#include <dray/loader.h>
#include <poll.h>

static dray_loader *open_loader(dray_queue *queue, const dray_claim_options *claim,
                                dray_loader_options o)
{
    dray_loader *loader;
    o.claim = claim;
    OK(dray_loader_open(queue, &o, &loader, &error));
    return loader;
}

static dray_loader_counts counts_of(const dray_loader *loader)
{
    dray_loader_counts counts = DRAY_LOADER_COUNTS_INIT;
    OK(dray_loader_count(loader, &counts, &error));
    return counts;
}

/* What another use of the queue finds there: started claims are sent, but not waited for. */
static void wait_for(dray_queue *queue, const char *text)
{
    char *status = NULL;
    for (int i = 0; i < 2000; i++) {
        free(status);
        OK(dray_queue_status(queue, &status, &error));
        if (strstr(status, text)) {
            free(status);
            return;
        }
        usleep(5000);
    }
    fprintf(stderr, "no %s in %s\n", text, status);
    abort();
}

TEST_WITHIN(test_to_the_end, up, down)
{
    dray_context *context = fixture_context(&f, "loader");
    dray_queue *queue = open_queue(context, "loader", 0, 0);
    dray_queue *other = open_queue(context, "loader", 0, 0);
    insert_ints(queue, "0", 50, 1);
    OK(dray_queue_seal(queue, "0", 50, &error));
    dray_claim_options claim = want("rollout", 8);
    claim.partition = "0";
    dray_loader *loader = open_loader(queue, &claim, (dray_loader_options)DRAY_LOADER_OPTIONS_INIT);
    dray_load load = DRAY_LOAD_INIT;
    uint32_t rows = 0, loads = 0;
    int rc;
    assert_true(status_has(other, "\"taken\":0")); /* opening claims nothing */
    while (!(rc = dray_loader_next(loader, DRAY_WAIT_DEFAULT, &load, &error))) {
        assert_int_equal(load.number, loads);
        assert_int_equal(load.first, 0);
        assert_int_equal(load.rows, dray_batch_rows(load.batch));
        assert_int_equal(load.micros, 1);
        if (loads == 0)
            wait_for(other, "\"taken\":16");                           /* the next one, ahead */
        FAILS(DRAY_EINVALID, dray_loader_done(loader, &load, &error)); /* no output yet */
        set_ints(load.batch, "responses", 1000);
        OK(dray_loader_done(loader, &load, &error));
        FAILS(DRAY_EINVALID, dray_loader_done(loader, &load, &error)); /* done before */
        rows += load.rows;
        loads++;
    }
    assert_int_equal(rc, DRAY_EEND);
    assert_int_equal(rows, 50);
    assert_int_equal(loads, 7); /* the last of two rows */
    OK(dray_queue_wait(other, "0", "rollout", 0, &error));
    FAILS(DRAY_EEND, dray_loader_next(loader, DRAY_WAIT_DEFAULT, &load, &error));
    dray_loader_counts counts = counts_of(loader);
    assert_int_equal(counts.batches, 7);
    assert_int_equal(counts.rows, 50);
    assert_int_equal(counts.committed, 7);
    assert_int_equal(counts.lost + counts.ready + counts.unfinished, 0);
    dray_loader_close(loader);
    int32_t values[50];
    dray_batch *batch;
    claim = want("reward", 50);
    OK(dray_queue_claim(other, &claim, &batch, &error));
    OK(dray_batch_gather(batch, "responses", values, sizeof values, NULL, &error));
    for (uint32_t i = 0; i < 50; i++)
        assert_int_equal(values[i], 1000 + (int32_t)dray_batch_row(batch, i)->slot);
    dray_batch_free(batch);
    dray_queue_close(other);
    leave(queue, context);
}

/* How many rows a loader takes before the second batch is asked for. */
static void takes_ahead(dray_loader_options o, const char *name, const char *taken, uint32_t ready)
{
    dray_context *context = fixture_context(&f, name);
    dray_queue *queue = open_queue(context, name, 0, 0), *other = open_queue(context, name, 0, 0);
    insert_ints(queue, "0", 64, 1);
    dray_claim_options claim = want("rollout", 8);
    dray_loader *loader = open_loader(queue, &claim, o);
    dray_load load = DRAY_LOAD_INIT;
    for (uint32_t i = 0; i < 4; i++) {
        OK(dray_loader_next(loader, DRAY_WAIT_DEFAULT, &load, &error));
        set_ints(load.batch, "responses", 0);
        OK(dray_loader_done(loader, &load, &error));
    }
    /* A loader works in its calls alone. */
    for (int i = 0; i < 5000 && !status_has(other, taken); i++, usleep(1000))
        OK(dray_loader_flush(loader, &error));
    wait_for(other, taken);
    OK(dray_loader_next(loader, DRAY_WAIT_DEFAULT, &load, &error));
    assert_true(counts_of(loader).ready <= ready);
    dray_loader_close(loader); /* gives the rest back */
    wait_for(other, "\"taken\":0");
    dray_queue_close(other);
    leave(queue, context);
}

TEST_WITHIN(test_bounds, up, down)
{
    dray_loader_options o = DRAY_LOADER_OPTIONS_INIT;
    takes_ahead(o, "one", "\"taken\":8", 1);
    o.ahead = 3;
    o.ahead_rows = 16;
    takes_ahead(o, "rows", "\"taken\":16", 2);
    o.ahead_rows = 7; /* less than a batch */
    takes_ahead(o, "none", "\"taken\":0", 0);
    o.ahead_rows = 0;
    o.ahead_bytes = 2 * 8 * 4; /* two batches of 8 int32 */
    takes_ahead(o, "bytes", "\"taken\":16", 2);
}

TEST_WITHIN(test_waiting, up, down)
{
    dray_context *context = fixture_context(&f, "waiting");
    dray_queue *queue = open_queue(context, "waiting", 0, 0);
    dray_queue *other = open_queue(context, "waiting", 0, 0);
    dray_claim_options claim = want("rollout", 4);
    claim.timeout_ns = 20 * DRAY__MILLISECOND;
    dray_loader *loader = open_loader(queue, &claim, (dray_loader_options)DRAY_LOADER_OPTIONS_INIT);
    dray_load load = DRAY_LOAD_INIT;
    FAILS(DRAY_EAGAIN, dray_loader_next(loader, 0, &load, &error));
    FAILS(DRAY_ETIMEDOUT, dray_loader_next(loader, 200 * DRAY__MILLISECOND, &load, &error));
    assert_non_null(strstr(error.message, "rollout"));
    FAILS(DRAY_ETIMEDOUT, dray_loader_next(loader, DRAY_WAIT_DEFAULT, &load, &error));
    insert_ints(other, "0", 8, 1);
    /* By its descriptor. */
    int rc;
    while ((rc = dray_loader_next(loader, 0, &load, &error)) == DRAY_EAGAIN) {
        struct pollfd fd = {.fd = dray_queue_fd(queue), .events = POLLIN};
        assert_int_equal(poll(&fd, 1, 20000), 1);
    }
    OK(rc);
    assert_int_equal(load.rows, 4);
    set_ints(load.batch, "responses", 0);
    OK(dray_loader_done(loader, &load, &error));
    OK(dray_loader_next(loader, DRAY_WAIT_DEFAULT, &load, &error));
    set_ints(load.batch, "responses", 0);
    OK(dray_loader_done(loader, &load, &error));
    /* There is nothing more: what is finished is committed all the same, before the wait. */
    FAILS(DRAY_ETIMEDOUT, dray_loader_next(loader, DRAY_WAIT_DEFAULT, &load, &error));
    assert_true(status_has(other, "\"committed\":8"));
    assert_true(counts_of(loader).waits > 0 && counts_of(loader).waited_ns > 0);
    dray_loader_close(loader); /* with a claim on its way: the queue is usable again */
    insert_ints(other, "1", 4, 1);
    all_rows(queue, "rollout", "responses", 0, 4);
    dray_queue_close(other);
    leave(queue, context);
}

TEST_WITHIN(test_lost_batches, up, down)
{
    dray_context *context = fixture_context(&f, "lost");
    dray_queue *queue = open_queue(context, "lost", 0, 0),
               *other = open_queue(context, "lost", 0, 0);
    insert_ints(queue, "0", 4, 1);
    insert_ints(queue, "1", 8, 1);
    dray_claim_options claim = want("rollout", 4);
    dray_loader *loader = open_loader(queue, &claim, (dray_loader_options)DRAY_LOADER_OPTIONS_INIT);
    dray_load load = DRAY_LOAD_INIT;
    OK(dray_loader_next(loader, DRAY_WAIT_DEFAULT, &load, &error));
    assert_string_equal(dray_batch_partition(load.batch), "0");
    OK(dray_queue_clear(other, "0", &error));
    set_ints(load.batch, "responses", 0);
    OK(dray_loader_done(loader, &load, &error));
    int rc, lost = 0, rows = 0;
    while (rows < 8) { /* told once, whichever call finds it out; then it goes on */
        rc = dray_loader_next(loader, DRAY_WAIT_DEFAULT, &load, &error);
        if (rc) {
            assert_int_equal(rc, DRAY_EGONE);
            lost++;
            continue;
        }
        assert_string_equal(dray_batch_partition(load.batch), "1");
        set_ints(load.batch, "responses", 0);
        OK(dray_loader_done(loader, &load, &error));
        rows += (int)load.rows;
    }
    OK(dray_loader_flush(loader, &error));
    assert_int_equal(lost, 1);
    assert_int_equal(counts_of(loader).lost, 1);
    assert_int_equal(counts_of(loader).committed, 2);
    dray_loader_close(loader);
    /* Held too long by the loop. */
    insert_ints(other, "2", 4, 1);
    claim.max_hold_ns = 50 * DRAY__MILLISECOND;
    dray_loader_options o = DRAY_LOADER_OPTIONS_INIT;
    o.ahead_rows = 1;
    loader = open_loader(queue, &claim, o);
    OK(dray_loader_next(loader, DRAY_WAIT_DEFAULT, &load, &error));
    set_ints(load.batch, "responses", 1);
    claim.timeout_ns = 20 * DRAY__SECOND;
    dray_batch *taken;
    OK(dray_queue_claim(other, &claim, &taken, &error)); /* when they are taken back */
    dray_batch_free(taken);
    OK(dray_loader_done(loader, &load, &error));
    FAILS(DRAY_ESTALE, dray_loader_flush(loader, &error));
    dray_loader_close(loader);
    claim.max_hold_ns = 0;
    loader = open_loader(queue, &claim, (dray_loader_options)DRAY_LOADER_OPTIONS_INIT);
    OK(dray_loader_next(loader, DRAY_WAIT_DEFAULT, &load, &error));
    uint32_t attempt = dray_batch_row(load.batch, 0)->attempt;
    assert_true(attempt > 1);
    OK(dray_loader_fail(loader, &load, "cannot", &error));
    dray_loader_close(loader);
    OK(dray_queue_claim(other, &claim, &taken, &error));
    assert_true(dray_batch_row(taken, 0)->attempt > attempt); /* a claim ahead may have had it */
    dray_batch_free(taken);
    dray_queue_close(other);
    leave(queue, context);
}

/* A flush learns of a commit that was sent with a claim, also while that claim waits for rows. */
TEST_WITHIN(test_flush_of_a_commit_with_a_claim, up, down)
{
    for (int cleared = 0; cleared < 2; cleared++) {
        const char *name = cleared ? "flush-cleared" : "flush";
        dray_context *context = fixture_context(&f, name);
        dray_queue *queue = open_queue(context, name, 0, 0),
                   *other = open_queue(context, name, 0, 0);
        insert_ints(queue, "0", 2, 1);
        dray_claim_options claim = want("rollout", 1);
        dray_loader_options o = DRAY_LOADER_OPTIONS_INIT;
        o.ahead = 2;
        dray_loader *loader = open_loader(queue, &claim, o);
        dray_load load = DRAY_LOAD_INIT;
        OK(dray_loader_next(loader, DRAY_WAIT_DEFAULT, &load, &error));
        wait_for(other, "\"taken\":2");
        struct pollfd answer = {.fd = dray_queue_fd(queue), .events = POLLIN};
        assert_int_equal(poll(&answer, 1, 20000), 1);
        if (cleared)
            OK(dray_queue_clear(other, "0", &error));
        set_ints(load.batch, "responses", 1);
        OK(dray_loader_done(loader, &load, &error));
        if (cleared)
            FAILS(DRAY_EGONE, dray_loader_flush(loader, &error));
        else
            OK(dray_loader_flush(loader, &error));
        assert_int_equal(counts_of(loader).committed, !cleared);
        assert_int_equal(counts_of(loader).lost, cleared);
        OK(dray_loader_flush(loader, &error));
        dray_loader_close(loader);
        dray_queue_close(other);
        leave(queue, context);
    }
}

/* ---- ranks ----------------------------------------------------------------------------------- */

enum { ROWS = 23, RANKS = 2, PEERS = 2, CAP = 40 };

static uint32_t length_of(uint32_t row)
{
    return 1 + row * 7 % 19;
}

static void insert_ragged(dray_queue *queue)
{
    for (uint32_t i = 0; i < ROWS; i++) {
        int32_t values[64];
        uint64_t offsets[2] = {0, length_of(i)};
        for (uint32_t k = 0; k < length_of(i); k++)
            values[k] = (int32_t)(i * 100 + k);
        dray_column_data column = {
            .name = "prompts", .dtype = DRAY_I32, .ndim = 1, .offsets = offsets, .values = values};
        dray_tag tag = {DRAY_TAG_TOKENS, length_of(i)};
        dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
        o.partition = "0";
        o.rows = 1;
        o.columns = &column;
        o.column_count = 1;
        o.tags = &tag;
        o.tag_count = 1;
        OK(dray_queue_insert(queue, &o, NULL, &error));
    }
    OK(dray_queue_seal(queue, "0", ROWS, &error));
}

/* One round of one rank: how many micro-batches, each within the cap. */
static uint32_t take_round(dray_loader *loader, bool leader, uint32_t seen[ROWS], bool *over)
{
    dray_load load = DRAY_LOAD_INIT;
    uint32_t micros = 0;
    do {
        int rc = dray_loader_next(loader, DRAY_WAIT_DEFAULT, &load, &error);
        *over = rc == DRAY_EEND;
        if (*over)
            return 0;
        OK(rc);
        uint32_t tokens = 0;
        dray_column column;
        OK(dray_batch_column(load.batch, "prompts", &column, &error));
        assert_true(load.rows > 0);
        for (uint32_t i = load.first; i < load.first + load.rows; i++) {
            uint32_t slot = dray_batch_row(load.batch, i)->slot;
            assert_int_equal(column.lengths[i], length_of(slot));
            assert_int_equal(*(const int32_t *)column.cells[i], slot * 100);
            tokens += (uint32_t)column.lengths[i];
            if (leader && dray_batch_weight(load.batch, i) > 0)
                seen[slot]++;
        }
        assert_true(tokens <= CAP);
        if (load.micro + 1 == load.micros)
            set_ints(load.batch, "responses", 0);
        OK(dray_loader_done(loader, &load, &error));
        micros++;
    } while (load.micro + 1 < load.micros);
    assert_int_equal(micros, load.micros);
    return micros;
}

/* Lockstep in rounds, two data-parallel ranks of two peers each: the same number of micro-batches
 * everywhere, and each row once. */
TEST_WITHIN(test_ranks_in_lockstep, up, down)
{
    dray_context *context = fixture_context(&f, "ranks");
    dray_queue *queues[RANKS * PEERS];
    dray_loader *loaders[RANKS * PEERS];
    uint32_t seen[ROWS] = {0}, rounds = 0;
    for (uint32_t i = 0; i < RANKS * PEERS; i++)
        queues[i] = open_queue(context, "ranks", 0, 0);
    insert_ragged(queues[0]);
    for (uint32_t i = 0; i < RANKS * PEERS; i++) {
        dray_claim_options claim = want("rollout", 8);
        claim.partition = "0";
        claim.policy = DRAY_POLICY_LOCKSTEP;
        claim.dp_rank = i / PEERS;
        claim.dp_size = RANKS;
        claim.peer = i % PEERS;
        claim.peers = PEERS;
        claim.token_cap = CAP;
        dray_loader_options o = DRAY_LOADER_OPTIONS_INIT;
        o.micro = 1;
        loaders[i] = open_loader(queues[i], &claim, o);
    }
    for (bool over = false; !over; rounds++) {
        uint32_t micros[RANKS * PEERS] = {0};
        for (uint32_t i = 0; i < RANKS * PEERS; i++) {
            bool ended = false;
            if (rounds == (ROWS + 7) / 8) /* all got their rows: the commits of all must be there */
                for (uint32_t k = 0; k < RANKS * PEERS; k++)
                    OK(dray_loader_flush(loaders[k], &error));
            micros[i] = take_round(loaders[i], i % PEERS == 0, seen, &ended);
            assert_true(i == 0 || ended == over);
            assert_true(i == 0 || micros[i] == micros[0]);
            over = ended;
        }
    }
    assert_int_equal(rounds, (ROWS + 7) / 8 + 1);
    for (uint32_t i = 0; i < ROWS; i++)
        assert_int_equal(seen[i], 1);
    for (uint32_t i = 0; i < RANKS * PEERS; i++)
        dray_loader_close(loaders[i]);
    OK(dray_queue_wait(queues[0], "0", "rollout", 0, &error));
    for (uint32_t i = 0; i < RANKS * PEERS; i++)
        dray_queue_close(queues[i]);
    dray_close(context);
}

/* What is held stays as it is when it is committed, cleared and its memory wanted again, and
 * outlives the loader. */
TEST_WITHIN(test_held, up, down)
{
    dray_context *context = fixture_context(&f, "held");
    dray_queue *queue = open_queue(context, "held", 0, 0),
               *other = open_queue(context, "held", 0, 0);
    insert_ints(other, "0", 12, 1);
    OK(dray_queue_seal(other, "0", 12, &error));
    dray_claim_options claim = want("rollout", 4);
    claim.partition = "0";
    dray_loader *loader = open_loader(queue, &claim, (dray_loader_options)DRAY_LOADER_OPTIONS_INIT);
    dray_load loads[3];
    dray_column columns[3];
    for (int i = 0; i < 3; i++) {
        loads[i] = (dray_load)DRAY_LOAD_INIT;
        OK(dray_loader_next(loader, DRAY_WAIT_DEFAULT, &loads[i], &error));
        OK(dray_batch_column(loads[i].batch, "prompts", &columns[i], &error));
        OK(dray_loader_hold(loader, &loads[i], &error));
        set_ints(loads[i].batch, "responses", 0);
        OK(dray_loader_done(loader, &loads[i], &error));
        FAILS(DRAY_EINVALID, dray_loader_hold(loader, &loads[i], &error));
    }
    dray_load none = DRAY_LOAD_INIT;
    FAILS(DRAY_EEND, dray_loader_next(loader, DRAY_WAIT_DEFAULT, &none, &error));
    dray_loader_unhold(loader, loads[1].batch);
    OK(dray_queue_clear(other, "0", &error));
    insert_ints(other, "1", 64, 1);
    for (int i = 0; i < 3; i += 2)
        for (int row = 0; row < 4; row++)
            assert_int_equal(*(const int32_t *)columns[i].cells[row], (i * 4 + row) * 10);
    dray_loader_close(loader);
    for (int i = 0; i < 3; i += 2) {
        for (int row = 0; row < 4; row++)
            assert_int_equal(*(const int32_t *)columns[i].cells[row], (i * 4 + row) * 10);
        dray_batch_free(loads[i].batch);
    }
    dray_queue_close(other);
    leave(queue, context);
}

TEST_WITHIN(test_refusals, up, down)
{
    dray_context *context = fixture_context(&f, "refusals");
    dray_queue *queue = open_queue(context, "refusals", 0, 0);
    dray_loader *loader;
    dray_loader_options o = DRAY_LOADER_OPTIONS_INIT;
    FAILS(DRAY_EINVALID, dray_loader_open(queue, &o, &loader, &error));
    dray_claim_options claim = want("rolout", 4);
    o.claim = &claim;
    FAILS(DRAY_ENOENT, dray_loader_open(queue, &o, &loader, &error));
    o.size = 3;
    FAILS(DRAY_EINVALID, dray_loader_open(queue, &o, &loader, &error));
    o = (dray_loader_options)DRAY_LOADER_OPTIONS_INIT;
    claim = want("rollout", 4);
    claim.policy = 99; /* the coordinator's to refuse: and again, when asked again */
    loader = open_loader(queue, &claim, o);
    dray_load load = DRAY_LOAD_INIT;
    FAILS(DRAY_EINVALID, dray_loader_next(loader, DRAY_WAIT_DEFAULT, &load, &error));
    FAILS(DRAY_EINVALID, dray_loader_next(loader, 0, &load, &error));
    load.size = 8;
    FAILS(DRAY_EINVALID, dray_loader_next(loader, 0, &load, &error));
    dray_loader_close(loader);
    dray_loader_close(NULL);
    claim = want("rollout", 4);
    loader = open_loader(queue, &claim, o);
    load.size = sizeof load;
    FAILS(DRAY_EAGAIN, dray_loader_next(loader, 0, &load, &error));
    pid_t pid = fork();
    if (pid == 0) {
        int rc = dray_loader_next(loader, 0, &load, &error);
        dray_loader_close(loader);
        _exit(rc == DRAY_ECLOSED ? 0 : 1);
    }
    join(pid);
    insert_ints(queue, "0", 4, 1);
    OK(dray_loader_next(loader, DRAY_WAIT_DEFAULT, &load, &error));
    dray_loader_close(loader);
    leave(queue, context);
}

SUITE(NULL, NULL)
