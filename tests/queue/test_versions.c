/* Tests staleness. Rows that are too old for the claiming task are dropped and refilled, and no
 * more samples are generated than can still be young enough. */
#include "queue/three_tasks.h"

#include <dray/trace.h>
#include <poll.h>
#include <stdatomic.h>
#include <sys/mman.h>

enum { B = 4, STEPS = 8, ETA = 1 };

static dray_queue *open_refilling(dray_context *context, const char *name)
{
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    return open_three(context, name, options);
}

/* Rollouts, in batches of B rows, none of them stale. */
static void admit(dray_queue *queue)
{
    dray_admission a = DRAY_ADMISSION_INIT;
    a.task = "rollout";
    a.batch_rows = B;
    OK(dray_queue_admit(queue, &a, &error));
}

static void set_version(dray_batch *batch, uint64_t version)
{
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
        OK(dray_batch_set_tag(batch, i, DRAY_TAG_VERSION, (double)version, &error));
}

/* ---- an engine frozen for three steps -------------------------------------------------------- */

typedef struct engine {
    atomic_ullong *version; /* of the newest weights */
    bool freezes;
} engine;

static void roll_out(void *argument)
{
    const engine *e = argument;
    dray_context *context = fixture_context(&f, e->freezes ? "frozen" : "engine");
    dray_queue *queue = open_refilling(context, "frozen");
    dray_claim_options o = want("rollout", B);
    o.up_to = !e->freezes;
    bool frozen = false;
    dray_batch *batch;
    int rc;
    while ((rc = dray_queue_claim(queue, &o, &batch, &error)) != DRAY_EEND) {
        OK(rc);
        uint64_t version = atomic_load(e->version);
        if (e->freezes && !frozen)
            raise(SIGSTOP);
        frozen = true;
        set_ints(batch, "responses", (int32_t)version * 100);
        set_version(batch, version);
        COMMIT(batch);
        if (e->freezes)
            break;
    }
    leave(queue, context);
}

static void score(void *argument)
{
    (void)argument;
    dray_context *context = fixture_context(&f, "reward");
    dray_queue *queue = open_refilling(context, "frozen");
    dray_claim_options o = want("reward", B);
    o.up_to = 1;
    dray_batch *batch;
    int rc;
    while ((rc = dray_queue_claim(queue, &o, &batch, &error)) != DRAY_EEND) {
        OK(rc);
        set_ints(batch, "rewards", 0);
        COMMIT(batch);
    }
    leave(queue, context);
}

static void answer_refills(void *argument)
{
    (void)argument;
    dray_context *context = fixture_context(&f, "producer");
    dray_queue *queue = open_refilling(context, "frozen");
    dray_refill refill = DRAY_REFILL_INIT;
    int rc;
    while ((rc = dray_queue_refill_wait(queue, 20 * DRAY__SECOND, &refill, &error)) != DRAY_EEND) {
        OK(rc);
        assert_int_equal(refill.cause, DRAY_LOSS_STALE);
        refill_ints(queue, &refill, 1000);
    }
    leave(queue, context);
}

TEST_WITHIN(test_frozen_engine, up, down)
{
    atomic_ullong *version =
        mmap(NULL, sizeof *version, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    dray_context *context = fixture_context(&f, "trainer");
    dray_queue *queue = open_refilling(context, "frozen");
    dray_admission admission = DRAY_ADMISSION_INIT;
    admission.task = "rollout";
    admission.batch_rows = B;
    admission.staleness = ETA;
    OK(dray_queue_admit(queue, &admission, &error));
    insert_ints(queue, "all", B * STEPS, 1);
    OK(dray_queue_seal(queue, "all", B * STEPS, &error));
    engine slow = {version, true}, fast = {version, false};
    pid_t frozen = child(roll_out, &slow);
    int status;
    assert_int_equal(waitpid(frozen, &status, WUNTRACED), frozen); /* it holds B rows */
    assert_true(WIFSTOPPED(status));
    pid_t engine_pid = child(roll_out, &fast), reward = child(score, NULL);
    pid_t producer = child(answer_refills, NULL);
    dray_claim_options o = want("actor", B);
    o.fresh = 1;
    o.staleness = ETA;
    for (uint64_t v = 0; v < STEPS; v++) {
        dray_batch *batch;
        o.version = v;
        OK(dray_queue_claim(queue, &o, &batch, &error));
        assert_int_equal(dray_batch_rows(batch), B);
        for (uint32_t i = 0; i < B; i++) {
            double made;
            OK(dray_batch_tag(batch, i, DRAY_TAG_VERSION, &made, &error));
            assert_true(made + ETA >= (double)v);
        }
        COMMIT(batch);
        atomic_store(version, v + 1);
        OK(dray_queue_version(queue, v + 1, &error));
        if (v == 3)
            kill(frozen, SIGCONT);
    }
    OK(dray_queue_wait(queue, "all", NULL, 20 * DRAY__SECOND, &error));
    assert_true(status_has(queue, "\"refilled\":4"));
    assert_true(status_has(queue, "\"stale\":4"));
    assert_true(status_has(queue, "too old for version"));
    assert_true(status_has(queue, "\"accepted\":32"));
    OK(dray_queue_end(queue, &error));
    join(frozen);
    join(engine_pid);
    join(reward);
    join(producer);
    munmap(version, sizeof *version);
    leave(queue, context);
}

/* ---- rows of the newest version alone -------------------------------------------------------- */

static uint32_t claim_newest(dray_queue *queue, const char *task, int32_t policy, uint64_t version,
                             bool left)
{
    dray_claim_options o = want(task, 8);
    o.up_to = 1;
    o.timeout_ns = 0;
    o.policy = policy;
    o.fresh = left ? DRAY_FRESH_LEFT : DRAY_FRESH_ANY;
    o.version = version;
    dray_batch *batch;
    int rc = dray_queue_claim(queue, &o, &batch, &error);
    if (rc == DRAY_ETIMEDOUT)
        return 0;
    OK(rc);
    uint32_t rows = dray_batch_rows(batch);
    if (strcmp(task, "reward") == 0)
        set_ints(batch, "rewards", 0);
    COMMIT(batch);
    return rows;
}

/* Slots 0 to 3 of version 1, 4 of version 0, and 5 to 7 of version 1: in groups of two the third
 * has an old member. */
TEST_WITHIN(test_older_rows_are_left, up, down)
{
    dray_context *context = fixture_context(&f, "left");
    dray_queue *queue = open_refilling(context, "left");
    insert_ints(queue, "0", 8, 2);
    static const uint64_t versions[] = {1, 1, 1, 1, 0, 1, 1, 1};
    for (uint32_t i = 0; i < 8; i++) {
        dray_claim_options o = want("rollout", 1);
        dray_batch *batch;
        OK(dray_queue_claim(queue, &o, &batch, &error));
        set_ints(batch, "responses", 0);
        set_version(batch, versions[dray_batch_row(batch, 0)->slot]);
        COMMIT(batch);
    }
    assert_int_equal(claim_newest(queue, "reward", DRAY_POLICY_FIFO, 1, true), 7);
    assert_int_equal(claim_newest(queue, "reward", DRAY_POLICY_FIFO, 1, true), 0);
    dray_claim_options o = want("reward", 1);
    dray_batch *batch;
    o.fresh = DRAY_FRESH_LEFT;
    o.policy = DRAY_POLICY_FIFO;
    o.version = 1;
    o.timeout_ns = 0;
    FAILS(DRAY_ETIMEDOUT, dray_queue_claim(queue, &o, &batch, &error));
    assert_non_null(strstr(error.message, "1 ready, "));
    assert_non_null(strstr(error.message, ", 1 ready but too old"));
    assert_int_equal(claim_newest(queue, "reward", DRAY_POLICY_FIFO, 1, false), 1);
    assert_int_equal(claim_newest(queue, "actor", DRAY_POLICY_GROUP, 1, true), 6);
    assert_int_equal(claim_newest(queue, "actor", DRAY_POLICY_GROUP, 1, true), 0);
    assert_false(status_has(queue, "\"stale\":1")); /* nothing was dropped */
    assert_int_equal(claim_newest(queue, "actor", DRAY_POLICY_GROUP, 1, false), 2);
    o = want("actor", 2);
    o.fresh = DRAY_FRESH_LEFT;
    o.policy = DRAY_POLICY_ORDERED;
    FAILS(DRAY_EINVALID, dray_queue_claim(queue, &o, &batch, &error));
    o.policy = DRAY_POLICY_GROUP;
    o.fresh = 3;
    FAILS(DRAY_EINVALID, dray_queue_claim(queue, &o, &batch, &error));
    leave(queue, context);
}

/* ---- admission ------------------------------------------------------------------------------- */

static uint32_t roll_out_some(dray_queue *queue, uint64_t version)
{
    dray_claim_options o = want("rollout", 64);
    o.up_to = 1;
    o.timeout_ns = 0;
    dray_batch *batch;
    int rc = dray_queue_claim(queue, &o, &batch, &error);
    if (rc == DRAY_ETIMEDOUT) {
        assert_non_null(strstr(error.message, "0 more admitted"));
        return 0;
    }
    OK(rc);
    uint32_t rows = dray_batch_rows(batch);
    set_ints(batch, "responses", 0);
    set_version(batch, version);
    COMMIT(batch);
    return rows;
}

TEST_WITHIN(test_admission, up, down)
{
    dray_context *context = fixture_context(&f, "admission");
    dray_queue *queue = open_refilling(context, "admission");
    FAILS(DRAY_EINVALID, dray_queue_version(queue, 1, &error));
    dray_admission a = DRAY_ADMISSION_INIT;
    a.task = "rollout";
    FAILS(DRAY_EINVALID, dray_queue_admit(queue, &a, &error));
    a.batch_rows = B;
    a.staleness = ETA;
    OK(dray_queue_admit(queue, &a, &error));
    insert_ints(queue, "0", 64, 1);
    assert_int_equal(roll_out_some(queue, 0), (ETA + 0 + 1) * B);
    assert_int_equal(roll_out_some(queue, 0), 0);
    OK(dray_queue_version(queue, 1, &error));
    FAILS(DRAY_EINVALID, dray_queue_version(queue, 0, &error));
    assert_int_equal(roll_out_some(queue, 1), B);
    assert_int_equal(roll_out_some(queue, 1), 0);
    /* A drop lets one more be made. */
    dray_batch *batch;
    dray_claim_options o = want("reward", 1);
    for (int attempt = 0; attempt < 3; attempt++) {
        o.policy = DRAY_POLICY_ORDERED;
        OK(dray_queue_claim(queue, &o, &batch, &error));
        assert_int_equal(dray_batch_row(batch, 0)->slot, 0);
        OK(dray_batch_fail(batch, NULL, 0, "broken", &error));
        dray_batch_free(batch);
    }
    assert_int_equal(roll_out_some(queue, 1), 1);
    assert_int_equal(roll_out_some(queue, 1), 0);
    /* A run that goes on at version 5 has accepted 5 batches. */
    a.version = 5;
    a.resume = 1;
    OK(dray_queue_admit(queue, &a, &error));
    assert_true(status_has(queue, "\"accepted\":20"));
    /* At most three at once. */
    a.resume = 0;
    a.concurrency = 3;
    OK(dray_queue_admit(queue, &a, &error));
    assert_int_equal(roll_out_some(queue, 5), 3);
    assert_int_equal(roll_out_some(queue, 5), 3);
    assert_int_equal(roll_out_some(queue, 5), 2);
    assert_int_equal(roll_out_some(queue, 5), 0);
    a.version = 4;
    FAILS(DRAY_EINVALID, dray_queue_admit(queue, &a, &error));
    leave(queue, context);
}

/* A row that died in the engine's hands was never accepted: its commit takes nobody's place. */
TEST_WITHIN(test_dead_rows_are_not_accepted, up, down)
{
    dray_context *context = fixture_context(&f, "dead");
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.on_loss = DRAY_ON_LOSS_DROP_GROUP;
    options.max_attempts = 1;
    dray_queue *queue = open_three(context, "dead", options);
    admit(queue);
    insert_ints(queue, "0", 16, 2);
    for (int i = 0; i < 3; i++) {
        dray_batch *lost, *other;
        dray_claim_options o = want("rollout", 1);
        OK(dray_queue_claim(queue, &o, &lost, &error));
        OK(dray_queue_claim(queue, &o, &other, &error)); /* the other one of its group */
        OK(dray_batch_fail(lost, NULL, 0, "broken", &error));
        set_ints(other, "responses", 0);
        OK(dray_batch_commit(other, &error));
        dray_batch_free(lost);
        dray_batch_free(other);
    }
    assert_true(status_has(queue, "\"accepted\":0"));
    assert_int_equal(roll_out_some(queue, 0), B);
    leave(queue, context);
}

/* Returns when one claim of rollout waits at the coordinator. */
static void await_claim(dray_queue *queue)
{
    char *status = NULL;
    do {
        free(status);
        OK(dray_queue_status(queue, &status, &error));
    } while (!strstr(status, "\"claims\":{\"rollout\":1"));
    free(status);
}

/* When a claim waits. */
static void reach_version(void *argument)
{
    (void)argument;
    dray_context *context = fixture_context(&f, "trainer");
    dray_queue *queue = open_refilling(context, "causes");
    await_claim(queue);
    OK(dray_queue_version(queue, 2, &error));
    leave(queue, context);
}

/* The answer to a claim that waited says for what: that of a commit with a claim, too. */
TEST_WITHIN(test_claims_say_what_they_waited_for, up, down)
{
    dray_context *context = fixture_context(&f, "causes");
    dray_queue *queue = open_refilling(context, "causes"),
               *other = open_refilling(context, "causes");
    admit(queue);
    dray_claim_options o = want("rollout", B);
    dray_batch *batch, *next;
    OK(dray_queue_claim_start(queue, &o, 1, &error)); /* there is nothing yet */
    FAILS(DRAY_EAGAIN, dray_queue_claim_poll(queue, NULL, &batch, &error));
    insert_ints(other, "0", 2 * B + 2, 1);
    struct pollfd p = {.fd = dray_queue_fd(queue), .events = POLLIN};
    assert_int_equal(poll(&p, 1, 20000), 1);
    OK(dray_queue_claim_poll(queue, NULL, &batch, &error));
    assert_int_equal(dray_batch_waited_for(batch), DRAY_CAUSE_SAMPLES);
    OK(dray_queue_claim_start(queue, &o, 1, &error)); /* prompts, but no room */
    await_claim(other);
    OK(dray_queue_version(other, 1, &error));
    assert_int_equal(poll(&p, 1, 20000), 1);
    OK(dray_queue_claim_poll(queue, NULL, &next, &error));
    assert_int_equal(dray_batch_waited_for(next), DRAY_CAUSE_ADMISSION);
    dray_batch_free(next); /* room for them, at once */
    OK(dray_queue_claim(queue, &o, &next, &error));
    assert_int_equal(dray_batch_waited_for(next), DRAY_CAUSE_SAMPLES);
    pid_t trainer = child(reach_version, NULL);
    set_ints(batch, "responses", 0);
    dray_batch *last;
    o.count = 2;
    OK(dray_batch_commit_claim(batch, &o, 1, NULL, &last, &error));
    assert_int_equal(dray_batch_waited_for(last), DRAY_CAUSE_ADMISSION);
    join(trainer);
    dray_batch_free(batch);
    dray_batch_free(next);
    dray_batch_free(last);
    dray_queue_close(other);
    leave(queue, context);
}

static void check_cause(const dray_error *said, dray_wait_cause cause)
{
    assert_int_equal(said->origin, DRAY_ORIGIN_WAIT);
    assert_int_equal(said->raw, cause);
}

/* So does that of a claim whose time was over, however it was made; and the span knows it. */
TEST_WITHIN(test_claims_in_vain_say_what_they_waited_for, up, down)
{
    dray_context *context = fixture_context(&f, "vain");
    dray_queue *queue = open_refilling(context, "vain");
    admit(queue);
    dray_claim_options o = want("rollout", B);
    dray_batch *batch, *next;
    o.timeout_ns = 20 * DRAY__MILLISECOND;
    FAILS(DRAY_ETIMEDOUT, dray_queue_claim(queue, &o, &batch, &error));
    check_cause(&error, DRAY_CAUSE_SAMPLES);
    insert_ints(queue, "0", 2 * B, 1);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    FAILS(DRAY_ETIMEDOUT, dray_queue_claim(queue, &o, &next, NULL));
    FAILS(DRAY_ETIMEDOUT, dray_queue_claim(queue, &o, &next, &error));
    check_cause(&error, DRAY_CAUSE_ADMISSION);
    OK(dray_queue_claim_start(queue, &o, 1, &error));
    struct pollfd p = {.fd = dray_queue_fd(queue), .events = POLLIN};
    assert_int_equal(poll(&p, 1, 20000), 1);
    FAILS(DRAY_ETIMEDOUT, dray_queue_claim_poll(queue, NULL, &next, &error));
    check_cause(&error, DRAY_CAUSE_ADMISSION);
    char spans[4096], merged[4096], text[65536];
    snprintf(spans, sizeof spans, "%s/vain.spans", f.folder);
    snprintf(merged, sizeof merged, "%s/vain.json", f.folder);
    OK(dray_trace_open(spans, "vain", &error));
    set_ints(batch, "responses", 0);
    FAILS(DRAY_ETIMEDOUT, dray_batch_commit_claim(batch, &o, 1, NULL, &next, &error));
    check_cause(&error, DRAY_CAUSE_ADMISSION);
    o.task = "actor";
    FAILS(DRAY_ETIMEDOUT, dray_queue_claim(queue, &o, &next, &error));
    check_cause(&error, DRAY_CAUSE_SAMPLES);
    OK(dray_trace_open(NULL, NULL, &error));
    OK(dray_trace_merge(f.folder, merged, &error));
    FILE *file = fopen(merged, "re");
    assert_non_null(file);
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    unlink(spans);
    unlink(merged);
    const char *first = strstr(text, "queue claim"), *second = strstr(first + 1, "queue claim");
    assert_true(strstr(first, "admission") < second && strstr(second, "samples"));
    dray_batch_free(batch);
    leave(queue, context);
}

/* Producers that insert whole samples are bounded at insert. */
TEST_WITHIN(test_admission_of_inserts, up, down)
{
    dray_context *context = fixture_context(&f, "inserts");
    dray_queue *queue = open_refilling(context, "inserts");
    dray_admission a = DRAY_ADMISSION_INIT;
    a.batch_rows = B;
    a.staleness = ETA;
    OK(dray_queue_admit(queue, &a, &error));
    insert_ints(queue, "0", 2 * B, 1);
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = "1";
    o.rows = 1;
    o.timeout_ns = 0;
    FAILS(DRAY_EFULL, dray_queue_insert(queue, &o, NULL, &error));
    assert_non_null(strstr(error.message, "staleness 1 at version 0"));
    OK(dray_queue_version(queue, 1, &error));
    OK(dray_queue_insert(queue, &o, NULL, &error));
    leave(queue, context);
}

TEST_WITHIN(test_bad_versions, up, down)
{
    dray_context *context = fixture_context(&f, "bad");
    dray_queue *queue = open_refilling(context, "bad");
    insert_ints(queue, "0", 1, 1);
    dray_batch *batch;
    dray_claim_options o = want("rollout", 1);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    set_ints(batch, "responses", 0);
    OK(dray_batch_set_tag(batch, 0, DRAY_TAG_VERSION, 1.5, &error));
    FAILS(DRAY_EINVALID, dray_batch_commit(batch, &error));
    dray_batch_free(batch);
    leave(queue, context);
}

SUITE(NULL, NULL)
