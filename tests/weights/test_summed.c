/* Tests versions that are announced before they are summed. A reader of such a version waits with
 * its commit until the sums of all ranks are there. Publishers that change what they published,
 * stop or are killed before that leave no reader with a mixed version. */
#include "suite.h"
#include "weights/cluster.h"

#include <stdint.h>

#define LONG (30 * DRAY__SECOND)
#define PATIENCE (DRAY__SECOND + DRAY__SECOND / 2)

enum { READ, CHANGED, TRIED, GONE_ON, ENDED, OUTCOME = 1 };

typedef struct scene {
    dray_model_config config;
    board *board;
    uint64_t seed;
    const char *step;
    uint64_t at; /* which byte changes */
} scene;

static scene s;

static int start(void **state)
{
    cluster_start(state);
    s = (scene){.config = small_config(false, 3), .board = board_new(), .seed = 71};
    return 0;
}

static int stop(void **state)
{
    munmap(s.board, sizeof(board));
    return cluster_stop(state);
}

static trainer open_trainer(uint32_t rank, uint32_t world)
{
    trainer t;
    trainer_open(&t, f.unix_address, &s.config, DRAY_F32, rank, world, s.seed, cluster_kind);
    return t;
}

static engine open_engine(const char *group)
{
    engine e;
    engine_open(&e, f.unix_address, &s.config, DRAY_F32, DRAY_F32, group, 0, 1);
    return e;
}

static int32_t state_of(const engine *e)
{
    int32_t state;
    MUST(dray_subscriber_version(e->subscriber, NULL, NULL, &state, error));
    return state;
}

/* Is what the engine holds what its publishers announced? */
static bool holds_what_was_summed(const engine *e, dray_context *context)
{
    dray_checksums *published, *held;
    MUST(dray_checksums_fetch(context, MODEL, NULL, &published, error));
    MUST(dray_checksums_fetch_group(context, MODEL, "engine", NULL, &held, error));
    bool same = dray_checksums_count(published) == dray_checksums_count(held);
    for (uint32_t i = 0; i < dray_checksums_count(published) && same; i++) {
        const char *name, *other;
        uint64_t sum = 0, its = 1;
        MUST(dray_checksums_entry(published, i, &name, NULL, NULL, &sum, error));
        for (uint32_t k = 0; k < dray_checksums_count(held); k++) {
            MUST(dray_checksums_entry(held, k, &other, NULL, NULL, &its, error));
            if (strcmp(name, other) == 0)
                break;
        }
        same = sum == its && strcmp(name, other) == 0;
    }
    dray_checksums_free(published);
    dray_checksums_free(held);
    return same && dray_subscriber_verify(e->subscriber, NULL) == DRAY_OK;
}

/* ---- a source that changes ------------------------------------------------------------------- */

/* The publisher's thread sums once the engine has read, what has changed meanwhile. */
static void change_before_summing(void *user, const char *step)
{
    trainer *t = user;
    if (strcmp(step, "summing") || s.board->flag[CHANGED])
        return;
    await_flag(s.board, READ);
    memory_flip(t->region[0], s.at, 0x10);
    raise_flag(s.board, CHANGED);
}

static void changing_trainer(void *user)
{
    (void)user;
    trainer t = open_trainer(0, 1);
    dray__hook_set(change_before_summing, &t);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    MUST(dray_publisher_wait(t.publisher, 1, LONG, NULL, error));
    CHECK(s.board->flag[CHANGED]);
    await_flag(s.board, TRIED);
    MUST(dray_publisher_publish(t.publisher, 2, NULL, error));
    await_flag(s.board, ENDED);
    MUST(dray_publisher_wait(t.publisher, 2, LONG, NULL, error));
    trainer_close(&t);
}

static void say_read(void *user, const char *step)
{
    (void)user;
    if (strcmp(step, "voted") == 0)
        raise_flag(s.board, READ);
}

static void deceived_engine(void *user)
{
    (void)user;
    engine e = open_engine("engine");
    dray_error said = {0};
    dray__hook_set(say_read, NULL);
    CHECK(dray_update_weights(e.subscriber, NULL, NULL, &said) == DRAY_ETORN);
    CHECK(strstr(said.message, "differ from the published version"));
    CHECK(state_of(&e) == DRAY_GROUP_TORN);
    raise_flag(s.board, TRIED);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.min_version = 2;
    MUST(dray_update_weights(e.subscriber, &options, NULL, error));
    CHECK(engine_wrong(&e, s.seed) == 1); /* what the trainer has now */
    CHECK(holds_what_was_summed(&e, e.context));
    raise_flag(s.board, ENDED);
    engine_close(&e);
}

TEST_WITHIN(test_change_between_read_and_sums, start, stop)
{
    if (cluster_kind == DRAY_REGION_CUDA) /* whose GPU sums at once */
        return;
    RUN_ROLES(NULL, NULL, {changing_trainer, 1}, {deceived_engine, 1});
}

/* At any time: the engine has what was summed, or says that it has nothing. */
static void restless_trainer(void *user)
{
    (void)user;
    trainer t = open_trainer(0, 1);
    for (uint64_t version = 1; version <= 20; version++) {
        MUST(dray_barrier(t.context, "next", 2, LONG, error));
        MUST(dray_publisher_publish(t.publisher, version, NULL, error));
        for (uint64_t i = 0; i < 3; i++) {
            usleep((useconds_t)(mix(s.seed + version * 10 + i) % 1500));
            memory_flip(t.region[0], 4 * (mix(s.seed * version + i) % 500), 0x20);
        }
        MUST(dray_barrier(t.context, "tried", 2, LONG, error));
        MUST(dray_publisher_wait(t.publisher, version, LONG, NULL, error));
    }
    trainer_close(&t);
}

static void watchful_engine(void *user)
{
    (void)user;
    engine e = open_engine("engine");
    uint32_t committed = 0;
    for (uint64_t version = 1; version <= 20; version++) {
        dray_error said = {0};
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        options.min_version = version;
        MUST(dray_barrier(e.context, "next", 2, LONG, error));
        int rc = dray_update_weights(e.subscriber, &options, NULL, &said);
        CHECK(rc == DRAY_OK || rc == DRAY_ETORN);
        CHECK((state_of(&e) == DRAY_GROUP_WHOLE) == (rc == DRAY_OK));
        CHECK(rc || holds_what_was_summed(&e, e.context));
        committed += rc == DRAY_OK;
        MUST(dray_barrier(e.context, "tried", 2, LONG, error));
    }
    fprintf(stderr, "%u of 20 versions that changed were committed\n", committed);
    engine_close(&e);
}

TEST_WITHIN(test_change_at_any_time, start, stop)
{
#if defined(__SANITIZE_THREAD__) /* which finds what the test does on purpose */
    return;
#endif
    RUN_ROLES(NULL, NULL, {restless_trainer, 1}, {watchful_engine, 1});
}

/* ---- sums that do not come --------------------------------------------------------------------
 */

static void stop_self(void *user, const char *step)
{
    (void)user;
    if (strcmp(step, s.step) == 0 && !s.board->flag[GONE_ON])
        raise(SIGSTOP);
}

static void stopped_trainer(void *user)
{
    (void)user;
    trainer t = open_trainer(0, 1);
    dray__hook_set(stop_self, NULL);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    await_flag(s.board, GONE_ON);
    MUST(dray_publisher_wait(t.publisher, 1, LONG, NULL, error));
    MUST(dray_publisher_publish(t.publisher, 2, NULL, error));
    await_flag(s.board, ENDED);
    trainer_close(&t);
}

static void bounded_engine(void *user)
{
    bool prefetches = *(bool *)user;
    engine e = open_engine("engine");
    dray_error said = {0};
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.timeout_ns = PATIENCE;
    int64_t begin = dray__now();
    int rc = prefetches ? dray_prefetch_weights(e.subscriber, &options, NULL, &said)
                        : dray_update_weights(e.subscriber, &options, NULL, &said);
    CHECK(rc != DRAY_OK && dray__now() - begin < 10 * PATIENCE);
    CHECK(state_of(&e) != DRAY_GROUP_WHOLE);
    if (rc == DRAY_ETORN || prefetches)
        CHECK(strstr(said.message, "checksums") || rc == DRAY_ETIMEDOUT);
    raise_flag(s.board, TRIED);
    options.timeout_ns = LONG;
    options.min_version = 2;
    MUST(dray_update_weights(e.subscriber, &options, NULL, error));
    CHECK(engine_wrong(&e, s.seed) == 0);
    raise_flag(s.board, ENDED);
    engine_close(&e);
}

TEST_WITHIN(test_stopped_publisher, start, stop)
{
    static const char *const steps[] = {"summing", "summed"};
    for (size_t i = 0; i < 4; i++) {
        bool prefetches = i / 2;
        if (cluster_skips(i))
            continue;
        memset((void *)s.board, 0, sizeof *s.board);
        s.step = steps[i % 2];
        pid_t a = spawn(stopped_trainer, NULL), b = spawn(bounded_engine, &prefetches);
        await_flag(s.board, TRIED);
        raise_flag(s.board, GONE_ON);
        kill(a, SIGCONT);
        must_end_well(b);
        must_end_well(a);
    }
}

/* ---- memory that is taken back before it is summed ---------------------------------------------
 */

static void sleep_while_summing(void *user, const char *step)
{
    (void)user;
    if (strcmp(step, "summing") == 0)
        usleep(2500000); /* longer than an answer may take */
}

static void hurried_trainer(void *user)
{
    (void)user;
    trainer t = open_trainer(0, 1);
    uint32_t dropped = 9;
    dray__hook_set(sleep_while_summing, NULL);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    CHECK(dray_publisher_deliver(t.publisher, 1, NULL, 1, DRAY__MILLISECOND, NULL) ==
          DRAY_ETIMEDOUT); /* and the sums go on */
    await_flag(s.board, READ);
    int64_t begin = dray__now();
    MUST(dray_publisher_wait(t.publisher, 1, 10 * DRAY__MILLISECOND, &dropped, error));
    CHECK(dropped == 1 && dray__now() - begin < 5 * DRAY__SECOND);
    fill(t.layout, t.region, t.tied, s.seed + 1);
    await_flag(s.board, TRIED);
    MUST(dray_publisher_publish(t.publisher, 2, NULL, error));
    MUST(dray_publisher_deliver(t.publisher, 2, NULL, 1, LONG, error));
    MUST(dray_publisher_wait(t.publisher, 2, LONG, &dropped, error));
    CHECK(dropped == 0);
    await_flag(s.board, ENDED);
    trainer_close(&t);
}

static void dropped_engine(void *user)
{
    (void)user;
    engine e = open_engine("engine");
    dray_error said = {0};
    dray__hook_set(say_read, NULL);
    CHECK(dray_update_weights(e.subscriber, NULL, NULL, &said) == DRAY_ETORN);
    CHECK(strstr(said.message, "dropped"));
    raise_flag(s.board, TRIED);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.min_version = 2;
    MUST(dray_update_weights(e.subscriber, &options, NULL, error));
    CHECK(engine_wrong(&e, s.seed + 1) == 0);
    raise_flag(s.board, ENDED);
    engine_close(&e);
}

TEST_WITHIN(test_taken_back_before_it_is_summed, start, stop)
{
    RUN_ROLES(NULL, NULL, {hurried_trainer, 1}, {dropped_engine, 1});
}

/* Closing is not held up by sums that nobody needs any more. */
TEST_WITHIN(test_close_gives_up, start, stop)
{
    trainer t = open_trainer(0, 1);
    dray__hook_set(sleep_while_summing, NULL);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    int64_t begin = dray__now();
    dray_publisher_close(t.publisher);
    assert_true(dray__now() - begin < 5 * DRAY__SECOND);
    dray__hook_set(NULL, NULL);
    dray_region_free(t.region[0]);
    dray_layout_free(t.layout);
    dray_close(t.context);
}

CLUSTER_SUITE
