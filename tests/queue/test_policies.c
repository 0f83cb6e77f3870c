/* Tests which rows claims get: by version, by priority, balanced among ranks, in lockstep. */
#include "queue/three_tasks.h"

enum { RANKS = 3, ROWS = 10 };

static dray_queue *open_named(dray_context *context, const char *name)
{
    return open_queue(context, name, 0, 0);
}

/* Rows come out of the first task with a tag; with several, one value a row. */
static void roll_out(dray_queue *queue, uint32_t rows, const char *key, const double *values)
{
    dray_batch *batch;
    dray_claim_options o = want("rollout", rows);
    o.policy = DRAY_POLICY_ORDERED;
    OK(dray_queue_claim(queue, &o, &batch, &error));
    set_ints(batch, "responses", 0);
    for (uint32_t i = 0; i < rows; i++)
        OK(dray_batch_set_tag(batch, i, key, values[i], &error));
    COMMIT(batch);
}

static void check_order(dray_queue *queue, int32_t policy, const uint32_t *slots, uint32_t count)
{
    dray_batch *batch;
    for (uint32_t size = count; size > 0; size = size / 2) { /* any number: the best of them */
        dray_claim_options o = want("reward", size);
        o.policy = policy;
        OK(dray_queue_claim(queue, &o, &batch, &error));
        for (uint32_t i = 0; i < size; i++)
            assert_int_equal(dray_batch_row(batch, i)->slot, slots[i]);
        dray_batch_free(batch);
    }
}

TEST_WITHIN(test_by_version_and_priority, up, down)
{
    dray_context *context = fixture_context(&f, "order");
    dray_queue *queue = open_named(context, "version");
    insert_ints(queue, "0", 8, 1);
    roll_out(queue, 8, DRAY_TAG_VERSION, (double[]){5, 3, 4, 3, 9, 0, 7, 5});
    check_order(queue, DRAY_POLICY_OLDEST_VERSION, (uint32_t[]){5, 1, 3, 2, 0, 7, 6, 4}, 8);
    dray_queue_close(queue);
    queue = open_named(context, "priority");
    insert_ints(queue, "0", 8, 1);
    roll_out(queue, 8, DRAY_TAG_PRIORITY, (double[]){0, -1, 4, 3, 9, 0, 4.5, 5});
    check_order(queue, DRAY_POLICY_PRIORITY, (uint32_t[]){4, 7, 6, 2, 3, 0, 5, 1}, 8);
    leave(queue, context);
}

/* 10 sealed rows, exactly 4 at once: 4, 4, 2, and the end. */
TEST_WITHIN(test_exact_to_the_end, up, down)
{
    dray_context *context = fixture_context(&f, "exact");
    static const int32_t policies[] = {DRAY_POLICY_FIFO,     DRAY_POLICY_ORDERED,
                                       DRAY_POLICY_GROUP,    DRAY_POLICY_OLDEST_VERSION,
                                       DRAY_POLICY_PRIORITY, DRAY_POLICY_TOKEN_BALANCED};
    for (size_t i = 0; i < sizeof policies / sizeof *policies; i++) {
        char name[16];
        snprintf(name, sizeof name, "exact%zu", i);
        dray_queue *queue = open_named(context, name);
        insert_ints(queue, "0", 10, 1);
        OK(dray_queue_seal(queue, "0", 10, &error));
        dray_claim_options o = want("rollout", 4);
        o.partition = "0";
        o.policy = policies[i];
        static const uint32_t sizes[] = {4, 4, 2};
        for (int k = 0; k < 3; k++) {
            dray_batch *batch;
            OK(dray_queue_claim(queue, &o, &batch, &error));
            assert_int_equal(dray_batch_rows(batch), sizes[k]);
            set_ints(batch, "responses", 0);
            COMMIT(batch);
        }
        dray_batch *none;
        FAILS(DRAY_EEND, dray_queue_claim(queue, &o, &none, &error));
        dray_queue_close(queue);
    }
    dray_close(context);
}

/* In order: nothing behind a row that is not ready, however far. */
TEST_WITHIN(test_ordered_has_no_gaps, up, down)
{
    dray_context *context = fixture_context(&f, "ordered");
    dray_queue *queue = open_named(context, "ordered");
    dray_batch *batch, *open;
    for (int i = 0; i < 3; i++)
        insert_ints(queue, "0", 64, 1);
    dray_claim_options o = want("rollout", 10);
    o.policy = DRAY_POLICY_ORDERED;
    for (int i = 0; i < 4; i++) {
        OK(dray_queue_claim(queue, &o, i == 1 ? &open : &batch, &error));
        if (i != 1) { /* row 10 stays with its engine */
            set_ints(batch, "responses", 0);
            COMMIT(batch);
        }
        o.count = i ? 60 : 1;
    }
    o = want("reward", 64);
    o.policy = DRAY_POLICY_ORDERED;
    o.up_to = 1;
    OK(dray_queue_claim(queue, &o, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), 10);
    dray_batch_free(batch);
    dray_batch_free(open);
    leave(queue, context);
}

/* ---- lockstep -------------------------------------------------------------------------------- */

static dray_claim_options in_step(uint32_t rank, uint64_t epoch, uint64_t round)
{
    dray_claim_options o = want("reward", ROWS);
    o.policy = DRAY_POLICY_LOCKSTEP;
    o.group = "trainer";
    o.dp_rank = rank;
    o.dp_size = RANKS;
    o.group_epoch = epoch;
    o.round = round;
    o.token_cap = 100;
    return o;
}

static const double lengths[ROWS] = {90, 10, 20, 30, 80, 5, 100, 60, 45, 33};

static void insert_lengths(dray_queue *queue, const char *partition)
{
    insert_ints(queue, partition, ROWS, 1);
    OK(dray_queue_seal(queue, partition, ROWS, &error));
    roll_out(queue, ROWS, DRAY_TAG_TOKENS, lengths);
}

/* Every micro-batch has rows, and no more tokens than it may; own rows are counted in `seen`. */
static double check_micros(const dray_batch *batch, int *seen)
{
    double total = 0;
    for (uint32_t m = 0; m < dray_batch_micros(batch); m++) {
        uint32_t first, rows;
        double sum = 0;
        OK(dray_batch_micro(batch, m, &first, &rows, &error));
        assert_true(rows > 0);
        for (uint32_t i = first; i < first + rows; i++) {
            double tokens;
            OK(dray_batch_tag(batch, i, DRAY_TAG_TOKENS, &tokens, &error));
            sum += tokens * dray_batch_weight(batch, i);
            seen[dray_batch_row(batch, i)->slot] += dray_batch_weight(batch, i) > 0;
        }
        assert_true(sum <= 100);
        total += sum;
    }
    return total;
}

TEST_WITHIN(test_lockstep, up, down)
{
    dray_context *context = fixture_context(&f, "lockstep");
    dray_queue *queue = open_named(context, "lockstep");
    insert_lengths(queue, "0");
    dray_batch *batches[RANKS];
    int seen[ROWS] = {0};
    double most = 0, least = 1e9;
    for (uint32_t r = 0; r < RANKS; r++) {
        dray_claim_options o = in_step(RANKS - 1 - r, 0, 0);
        OK(dray_queue_claim(queue, &o, &batches[r], &error));
        assert_int_equal(dray_batch_micros(batches[r]), dray_batch_micros(batches[0]));
        double tokens = check_micros(batches[r], seen);
        most = tokens > most ? tokens : most;
        least = tokens < least ? tokens : least;
    }
    for (int i = 0; i < ROWS; i++)
        assert_int_equal(seen[i], 1);
    assert_true(most - least <= 10); /* 473 tokens: 157.7 each at best */
    for (uint32_t r = 0; r < RANKS; r++) {
        set_ints(batches[r], "rewards", 0);
        OK(dray_batch_commit(batches[r], &error));
        dray_batch_free(batches[r]);
    }
    OK(dray_queue_wait(queue, "0", "reward", 0, &error));
    dray_claim_options o = in_step(0, 0, 0);
    FAILS(DRAY_ESTALE, dray_queue_claim(queue, &o, &batches[0], &error));
    leave(queue, context);
}

/* Rows that cannot be divided evenly: what is missing is padding, which nobody commits. */
TEST_WITHIN(test_padding, up, down)
{
    dray_context *context = fixture_context(&f, "padding");
    dray_queue *queue = open_named(context, "padding");
    insert_ints(queue, "0", 4, 1);
    OK(dray_queue_seal(queue, "0", 4, &error));
    roll_out(queue, 4, DRAY_TAG_TOKENS, (double[]){10, 10, 10, 10});
    dray_batch *batches[RANKS];
    uint32_t padding = 0, own = 0;
    for (uint32_t r = 0; r < RANKS; r++) {
        dray_claim_options o = in_step(r, 0, 7);
        o.micro_rows = 1;
        OK(dray_queue_claim(queue, &o, &batches[r], &error));
        assert_int_equal(dray_batch_micros(batches[r]), 2);
        assert_int_equal(dray_batch_rows(batches[r]), 2);
        int32_t values[2];
        OK(dray_batch_gather(batches[r], "responses", values, sizeof values, NULL, &error));
        for (uint32_t i = 0; i < 2; i++) {
            padding += dray_batch_weight(batches[r], i) == 0;
            own += dray_batch_weight(batches[r], i) == 1;
            assert_int_equal(values[i], dray_batch_row(batches[r], i)->slot);
        }
    }
    assert_int_equal(own, 4);
    assert_int_equal(padding, 2);
    for (uint32_t r = 0; r < RANKS; r++) {
        set_ints(batches[r], "rewards", 100 * (int32_t)r);
        OK(dray_batch_commit(batches[r], &error));
        dray_batch_free(batches[r]);
    }
    assert_true(status_has(queue, "\"rewards\":4"));
    leave(queue, context);
}

TEST_WITHIN(test_peers, up, down)
{
    dray_context *context = fixture_context(&f, "peers");
    dray_queue *leader = open_named(context, "peers"), *peer = open_named(context, "peers");
    insert_lengths(leader, "0");
    dray_claim_options o = in_step(0, 0, 0);
    dray_batch *first, *second;
    o.dp_size = 1;
    o.peers = 2;
    OK(dray_queue_claim(leader, &o, &first, &error));
    o.peer = 1;
    OK(dray_queue_claim(peer, &o, &second, &error));
    assert_int_equal(dray_batch_rows(first), dray_batch_rows(second));
    for (uint32_t i = 0; i < dray_batch_rows(first); i++)
        assert_int_equal(dray_batch_row(first, i)->id, dray_batch_row(second, i)->id);
    set_ints(second, "rewards", 1);
    FAILS(DRAY_EPERM, dray_batch_commit(second, &error));
    set_ints(first, "rewards", 2);
    OK(dray_batch_commit(first, &error));
    int32_t values[ROWS];
    OK(dray_batch_gather(second, "responses", values, sizeof values, NULL, &error));
    dray_batch_free(second);
    dray_batch_free(first);
    dray_queue_close(peer);
    leave(leader, context);
}

static void die_in_step(void *argument)
{
    (void)argument;
    dray_context *context = fixture_context(&f, "member");
    dray_queue *queue = open_named(context, "death");
    dray_claim_options o = in_step(1, 0, 0);
    dray_batch *batch;
    OK(dray_queue_claim(queue, &o, &batch, &error));
    kill(getpid(), SIGKILL);
}

TEST_WITHIN(test_death_voids_the_round, up, down)
{
    dray_context *context = fixture_context(&f, "death");
    dray_queue *queue = open_named(context, "death"), *other = open_named(context, "death");
    insert_lengths(queue, "0");
    dray_batch *batches[RANKS];
    dray_claim_options o = in_step(0, 0, 0);
    OK(dray_queue_claim(queue, &o, &batches[0], &error));
    int status;
    waitpid(child(die_in_step, NULL), &status, 0);
    o = in_step(2, 0, 0);
    o.timeout_ns = 20 * DRAY__SECOND;
    int rc = dray_queue_claim(other, &o, &batches[2], &error);
    if (!rc) { /* before its end was seen */
        for (int i = 0; i < 4000 && !(rc = dray_batch_hold(batches[2], 0, &error)); i++)
            usleep(5000);
        dray_batch_free(batches[2]);
    }
    assert_int_equal(rc, DRAY_ESTALE);
    set_ints(batches[0], "rewards", 0);
    FAILS(DRAY_ESTALE, dray_batch_commit(batches[0], &error));
    dray_batch_free(batches[0]);
    FAILS(DRAY_ESTALE, dray_queue_claim(other, &o, &batches[2], &error));
    /* The group comes back: all rows are there again. */
    int seen[ROWS] = {0};
    for (uint32_t r = 0; r < RANKS; r++) {
        o = in_step(r, 1, 0);
        OK(dray_queue_claim(queue, &o, &batches[r], &error));
        check_micros(batches[r], seen);
    }
    for (int i = 0; i < ROWS; i++)
        assert_int_equal(seen[i], 1);
    o = in_step(1, 0, 1);
    FAILS(DRAY_ESTALE, dray_queue_claim(other, &o, &batches[0], &error));
    for (uint32_t r = 0; r < RANKS; r++)
        dray_batch_free(batches[r]);
    dray_queue_close(other);
    leave(queue, context);
}

/* ---- token_balanced -------------------------------------------------------------------------- */

/* What one rank has not asked for waits for it, also for the process that takes its place. */
TEST_WITHIN(test_token_balanced, up, down)
{
    dray_context *context = fixture_context(&f, "balanced");
    dray_queue *queue = open_named(context, "balanced");
    enum { MANY = 60 };
    double tokens[MANY];
    double all = 0, sums[2] = {0};
    uint32_t rows[2] = {0};
    for (int i = 0; i < MANY; i++)
        all += tokens[i] = 1 + (i * 37) % 90;
    insert_ints(queue, "0", MANY, 1);
    OK(dray_queue_seal(queue, "0", MANY, &error));
    roll_out(queue, MANY, DRAY_TAG_TOKENS, tokens);
    dray_claim_options o = want("reward", MANY / 2);
    o.policy = DRAY_POLICY_TOKEN_BALANCED;
    o.dp_size = 2;
    o.token_cap = 128;
    static const uint32_t ranks[] = {0, 0, 1, 1};
    for (int i = 0; i < 4; i++) {
        dray_batch *batch;
        o.dp_rank = ranks[i];
        OK(dray_queue_claim(queue, &o, &batch, &error));
        for (uint32_t m = 0; m < dray_batch_micros(batch); m++) {
            uint32_t first, count;
            double sum = 0;
            OK(dray_batch_micro(batch, m, &first, &count, &error));
            for (uint32_t k = first; k < first + count; k++)
                sum += tokens[dray_batch_row(batch, k)->slot];
            assert_true(count && sum <= 128);
            sums[ranks[i]] += sum;
        }
        rows[ranks[i]] += dray_batch_rows(batch);
        set_ints(batch, "rewards", 0);
        COMMIT(batch);
    }
    assert_int_equal(rows[0] + rows[1], MANY);
    assert_true(sums[0] + sums[1] == all);
    assert_true(sums[0] - sums[1] < all * 0.01 && sums[1] - sums[0] < all * 0.01);
    OK(dray_queue_wait(queue, "0", "reward", 0, &error));
    /* A row that no micro-batch can hold is named. */
    insert_ints(queue, "1", 2, 1);
    roll_out(queue, 2, DRAY_TAG_TOKENS, (double[]){1, 129});
    dray_batch *none;
    o.count = 2;
    FAILS(DRAY_EFULL, dray_queue_claim(queue, &o, &none, &error));
    assert_non_null(strstr(error.message, "row 1 has 129 tokens, a micro-batch at most 128"));
    o.dp_rank = 2;
    FAILS(DRAY_EINVALID, dray_queue_claim(queue, &o, &none, &error));
    leave(queue, context);
}

SUITE(NULL, NULL)
