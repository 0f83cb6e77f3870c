/* Tests processes that are killed or stop at every step of an update, and bytes that change where
 * they must not. The other processes are told, no group ever says that it holds a mixed version,
 * and the next update repairs a torn one. */
#include "suite.h"
#include "weights/cluster.h"

#include <stdint.h>

#define SHORT (DRAY__SECOND)
#define LONG (30 * DRAY__SECOND)
#define TRIES 10

enum {
    PARENT_SAYS_END,
    TRAINER_DEAD,
    RETRY,
    STOPPED,
    REPUBLISHED,
    PUBLISHED,
    ENGINE_DONE = 8,
    VICTIM_DEAD = 10,
    DEATH_SEEN /* by the coordinator */
};

typedef struct scene {
    dray_model_config config;
    board *board;
    uint32_t rank;
    uint64_t seed;
    const char *step; /* where the victim is killed */
    bool again;       /* a process that replaces a dead one */
    uint64_t round;   /* each makes two incarnations */
} scene;

static scene s;

static int start(void **state)
{
    cluster_start(state);
    s = (scene){.config = small_config(false, 3), .board = board_new(), .seed = 5};
    return 0;
}

static int stop(void **state)
{
    munmap(s.board, sizeof(board));
    return cluster_stop(state);
}

/* ---- hooks ---------------------------------------------------------------------------------- */

static void stop_self(void *user, const char *step)
{
    (void)user;
    if (strcmp(step, s.step) != 0)
        return;
    dray__hook_set(NULL, NULL);
    raise_flag(s.board, STOPPED);
    kill(getpid(), SIGSTOP);
}

/* Asks the parent to kill trainer 1, and goes on once it is dead. */
static void kill_trainer(void *user, const char *step)
{
    (void)user;
    if (strcmp(step, s.step) != 0)
        return;
    dray__hook_set(NULL, NULL);
    raise_flag(s.board, STOPPED);
    await_flag(s.board, TRAINER_DEAD);
}

/* ---- one engine rank: an update that may fail, and one that must work ----------------------- */

static int first_update(engine *e)
{
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.timeout_ns = SHORT;
    options.strategy = (int32_t)(s.seed % 3);
    int64_t begin = dray__now();
    dray_error said = {0};
    int32_t before, state;
    uint64_t version;
    MUST(dray_subscriber_version(e->subscriber, &version, NULL, &before, error));
    int rc = dray_update_weights(e->subscriber, &options, NULL, &said);
    CHECK(dray__now() - begin < LONG);
    MUST(dray_subscriber_version(e->subscriber, &version, NULL, &state, error));
    if (rc == DRAY_OK) {
        CHECK(engine_wrong(e, s.seed) == 0);
    } else if (rc == DRAY_ETORN) {
        CHECK(state == DRAY_GROUP_TORN);
        CHECK(dray_subscriber_verify(e->subscriber, NULL) != DRAY_OK);
    } else if (before == DRAY_GROUP_TORN) {
        CHECK(state == DRAY_GROUP_TORN);
    } else {
        CHECK(state == DRAY_GROUP_EMPTY);
        uint8_t *bytes = memory_open(e->region[0]);
        for (uint64_t i = 0; i < dray_region_bytes(e->region[0]); i++)
            CHECK(bytes[i] == 0xA5);
        memory_close(e->region[0], bytes, false);
    }
    CHECK(rc == DRAY_OK || said.message[0]);
    return rc;
}

static void last_update(engine *e, uint64_t seed, uint64_t incarnation)
{
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    options.timeout_ns = LONG;
    MUST(dray_update_weights(e->subscriber, &options, &report, error));
    if (incarnation && report.incarnation != incarnation)
        fprintf(stderr, "step %s: incarnation %" PRIu64 ", expected %" PRIu64 "\n", s.step,
                report.incarnation, incarnation);
    CHECK(!incarnation || report.incarnation == incarnation);
    CHECK(engine_wrong(e, seed) == 0);
    int32_t state;
    MUST(dray_subscriber_version(e->subscriber, NULL, NULL, &state, error));
    CHECK(state == DRAY_GROUP_WHOLE);
    MUST(dray_subscriber_verify(e->subscriber, error));
}

static void open_engine(engine *e, uint32_t rank)
{
    engine_open(e, f.unix_address, &s.config, DRAY_F32, DRAY_BF16, "engine", rank, 2);
}

/* ---- an engine rank dies -------------------------------------------------------------------- */

static void steady_trainer(void *user)
{
    (void)user;
    trainer t;
    trainer_open(&t, f.unix_address, &s.config, DRAY_F32, s.rank, 2, s.seed, cluster_kind);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    raise_flag(s.board, PUBLISHED + (int)s.rank);
    await_flag(s.board, PARENT_SAYS_END);
    trainer_close(&t);
}

/* A GPU that is used for the first time takes seconds: engines begin again where an update's time
 * was over before the victim came to its step. The parent hears of a death a little after the
 * group. */
static int updates_until(int dead, engine *e)
{
    int rc = first_update(e);
    for (int tries = 1; tries < TRIES && rc != DRAY_OK; tries++) {
        for (int i = 0; i < 200 && !s.board->flag[dead]; i++)
            usleep(1000);
        if (s.board->flag[dead])
            break;
        rc = first_update(e);
    }
    return rc;
}

static void surviving_engine(void *user)
{
    (void)user;
    engine e;
    open_engine(&e, 0);
    await_flag(s.board, PUBLISHED);
    await_flag(s.board, PUBLISHED + 1);
    s.board->number[0] = updates_until(VICTIM_DEAD, &e);
    raise_flag(s.board, ENGINE_DONE);
    MUST(dray_barrier(e.context, "again", 2, LONG, error));
    last_update(&e, s.seed, 0);
    /* nobody leaves before both have committed: a rank that leaves tears the group */
    MUST(dray_barrier(e.context, "over", 2, LONG, error));
    engine_close(&e);
}

static void dying_engine(void *user)
{
    (void)user;
    engine e;
    open_engine(&e, 1);
    die_at_step(s.step);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.strategy = (int32_t)(s.seed % 3);
    for (int i = 0, rc = -1; i < TRIES && rc != DRAY_OK; i++)
        rc = dray_update_weights(e.subscriber, &options, NULL, NULL);
    fprintf(stderr, "still alive after step %s\n", s.step);
}

static void replacing_engine(void *user)
{
    (void)user;
    engine e;
    open_engine(&e, 1);
    MUST(dray_barrier(e.context, "again", 2, LONG, error));
    last_update(&e, s.seed, 0);
    MUST(dray_barrier(e.context, "over", 2, LONG, error));
    engine_close(&e);
}

static const char *const engine_steps[] = {"begin", "plan",     "import", "writing",  "moving",
                                           "moved", "verified", "voted",  "committed"};

TEST_WITHIN(test_engine_rank_dies, start, stop)
{
    for (size_t i = 0; i < sizeof engine_steps / sizeof *engine_steps; i++) {
        if (cluster_skips(i))
            continue;
        memset((void *)s.board, 0, sizeof *s.board);
        s.step = engine_steps[i];
        s.seed++;
        pid_t trainers[2], survivor, victim, replacement;
        for (s.rank = 0; s.rank < 2; s.rank++)
            trainers[s.rank] = spawn(steady_trainer, NULL);
        survivor = spawn(surviving_engine, NULL);
        victim = spawn(dying_engine, NULL);
        must_be_killed(victim);
        raise_flag(s.board, VICTIM_DEAD);
        await_flag(s.board, ENGINE_DONE);
        bool before_writing = i < 3;
        if (before_writing)
            assert_int_not_equal(s.board->number[0], DRAY_OK);
        replacement = spawn(replacing_engine, NULL);
        must_end_well(survivor);
        must_end_well(replacement);
        raise_flag(s.board, PARENT_SAYS_END);
        must_end_well(trainers[0]);
        must_end_well(trainers[1]);
    }
}

/* ---- a trainer rank dies -------------------------------------------------------------------- */

/* Rank 0 outlives rank 1: its incarnation is over, it must open again. */
static void surviving_trainer(void *user)
{
    (void)user;
    trainer t;
    trainer_open(&t, f.unix_address, &s.config, DRAY_F32, 0, 2, s.seed, cluster_kind);
    dray_error said;
    int first =
        dray_publisher_publish(t.publisher, 1, NULL, &said); /* rank 1 may be dead already */
    CHECK(first == DRAY_OK || (first == DRAY_ESTALE && strstr(said.message, "rank 1")));
    raise_flag(s.board, PUBLISHED + 1);
    await_flag(s.board, RETRY);
    int rc = DRAY_OK; /* until the coordinator has seen that rank 1 died */
    for (uint64_t version = 2; version < 1000 && rc == DRAY_OK; version++, usleep(1000))
        rc = dray_publisher_publish(t.publisher, version, NULL, &said);
    CHECK(rc == DRAY_ESTALE && strstr(said.message, "rank 1"));
    raise_flag(s.board, DEATH_SEEN);
    if (first == DRAY_OK)
        MUST(dray_publisher_wait(t.publisher, 1, SHORT, NULL, error));
    trainer_close(&t);
    trainer_open(&t, f.unix_address, &s.config, DRAY_F32, 0, 2, s.seed + 1000, cluster_kind);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    await_flag(s.board, PARENT_SAYS_END);
    trainer_close(&t);
}

static void dying_trainer(void *user)
{
    (void)user;
    trainer t;
    if (s.again) {
        trainer_open(&t, f.unix_address, &s.config, DRAY_F32, 1, 2, s.seed + 1000, cluster_kind);
    } else {
        trainer_open(&t, f.unix_address, &s.config, DRAY_F32, 1, 2, s.seed, cluster_kind);
        die_at_step(s.step);
    }
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    raise_flag(s.board, PUBLISHED);
    if (!s.again && strcmp(s.step, "never") != 0)
        MUST(dray_publisher_wait(t.publisher, 1, LONG, NULL, error));
    await_flag(s.board, PARENT_SAYS_END);
    trainer_close(&t);
}

static void engine_of_dead_trainer(void *user)
{
    bool kills = *(bool *)user;
    engine e;
    open_engine(&e, s.rank);
    if (kills)
        dray__hook_set(kill_trainer, NULL);
    s.board->number[s.rank] = updates_until(TRAINER_DEAD, &e);
    dray__hook_set(NULL, NULL);
    raise_flag(s.board, ENGINE_DONE + (int)s.rank);
    await_flag(s.board, DEATH_SEEN); /* what the dead one published is over */
    last_update(&e, s.seed + 1000, 2 * s.round);
    MUST(dray_barrier(e.context, "over", 2, LONG, error));
    engine_close(&e);
}

/* engine_kills: the trainer is killed while an engine rank is at the step; else at its own step. */
static void trainer_dies_at(const char *step, bool engine_kills)
{
    memset((void *)s.board, 0, sizeof *s.board);
    bool yes = true, no = false;
    s.step = step;
    s.seed++;
    s.again = false;
    s.round++;
    pid_t engines[2], survivor = spawn(surviving_trainer, NULL);
    if (engine_kills)
        s.step = "never";
    pid_t victim = spawn(dying_trainer, NULL);
    s.step = step;
    if (engine_kills) { /* engines' patience begins when there is something to read, as above */
        await_flag(s.board, PUBLISHED);
        await_flag(s.board, PUBLISHED + 1);
    }
    for (s.rank = 0; s.rank < 2; s.rank++)
        engines[s.rank] = spawn(engine_of_dead_trainer, engine_kills && s.rank == 1 ? &yes : &no);
    if (engine_kills) {
        await_flag(s.board, STOPPED);
        kill(victim, SIGKILL);
    }
    must_be_killed(victim);
    raise_flag(s.board, TRAINER_DEAD);
    await_flag(s.board, ENGINE_DONE);
    await_flag(s.board, ENGINE_DONE + 1);
    /* all of the group or none of it */
    assert_int_equal(s.board->number[0] == DRAY_OK, s.board->number[1] == DRAY_OK);
    raise_flag(s.board, RETRY);
    s.again = true;
    pid_t replacement = spawn(dying_trainer, NULL);
    must_end_well(engines[0]);
    must_end_well(engines[1]);
    raise_flag(s.board, PARENT_SAYS_END);
    must_end_well(survivor);
    must_end_well(replacement);
}

TEST_WITHIN(test_trainer_rank_dies_while_engines_read, start, stop)
{
    for (size_t i = 0; i < sizeof engine_steps / sizeof *engine_steps; i++)
        if (!cluster_skips(i))
            trainer_dies_at(engine_steps[i], true);
}

TEST_WITHIN(test_trainer_rank_dies_at_its_own_steps, start, stop)
{
    static const char *const steps[] = {"published", "summing", "summed", "sums told", "waited"};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        trainer_dies_at(steps[i], false);
}

/* ---- a reader that hangs -------------------------------------------------------------------- */

static void impatient_trainer(void *user)
{
    (void)user;
    trainer t;
    trainer_open(&t, f.unix_address, &s.config, DRAY_F32, 0, 1, s.seed, cluster_kind);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    await_flag(s.board, STOPPED);
    uint32_t dropped = 0;
    MUST(dray_publisher_wait(t.publisher, 1, SHORT / 10, &dropped, error));
    CHECK(dropped == 1);
    fill(t.layout, t.region, false, s.seed + 1);
    MUST(dray_publisher_publish(t.publisher, 2, NULL, error));
    raise_flag(s.board, REPUBLISHED);
    await_flag(s.board, PARENT_SAYS_END);
    trainer_close(&t);
}

static void hanging_engine(void *user)
{
    (void)user;
    engine e;
    engine_open(&e, f.unix_address, &s.config, DRAY_F32, DRAY_F32, "engine", 0, 1);
    dray__hook_set(stop_self, NULL);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.timeout_ns = LONG;
    dray_error said = {0};
    int rc = dray_update_weights(e.subscriber, &options, NULL, &said);
    bool torn = strcmp(s.step, "import") != 0;
    CHECK(rc == (torn ? DRAY_ETORN : DRAY_ESTALE));
    CHECK(strstr(said.message, "dropped"));
    int32_t state;
    MUST(dray_subscriber_version(e.subscriber, NULL, NULL, &state, error));
    CHECK(state == (torn ? DRAY_GROUP_TORN : DRAY_GROUP_EMPTY));
    last_update(&e, s.seed + 1, 0);
    engine_close(&e);
}

TEST_WITHIN(test_stopped_reader_is_dropped, start, stop)
{
    static const char *const steps[] = {"import", "writing", "moving", "moved", "verified"};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        if (cluster_skips(i))
            continue;
        memset((void *)s.board, 0, sizeof *s.board);
        s.step = steps[i];
        pid_t writer = spawn(impatient_trainer, NULL), reader = spawn(hanging_engine, NULL);
        await_flag(s.board, REPUBLISHED);
        kill(reader, SIGCONT);
        must_end_well(reader);
        raise_flag(s.board, PARENT_SAYS_END);
        must_end_well(writer);
    }
}

/* ---- the coordinator dies ------------------------------------------------------------------- */

static void kill_coordinator(void *user, const char *step)
{
    (void)user;
    if (strcmp(step, s.step) == 0)
        kill(f.process, SIGKILL);
}

static void engine_without_coordinator(void *user)
{
    (void)user;
    trainer t;
    engine e;
    trainer_open(&t, f.unix_address, &s.config, DRAY_F32, 0, 1, s.seed, cluster_kind);
    engine_open(&e, f.unix_address, &s.config, DRAY_F32, DRAY_F32, "engine", 0, 1);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    dray__hook_set(kill_coordinator, NULL);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.timeout_ns = LONG / 3;
    int rc = dray_update_weights(e.subscriber, &options, NULL, NULL);
    bool committed = strcmp(s.step, "committed") == 0;
    if (strcmp(s.step, "voted") != 0) /* there the answer may have been on its way */
        CHECK(rc == (committed ? DRAY_OK : DRAY_ECLOSED));
    if (rc == DRAY_OK)
        CHECK(engine_wrong(&e, s.seed) == 0);
    CHECK(dray_subscriber_version(e.subscriber, NULL, NULL, NULL, NULL) == DRAY_ECLOSED);
    CHECK(dray_update_weights(e.subscriber, &options, NULL, NULL) == DRAY_ECLOSED);
    CHECK(dray_publisher_publish(t.publisher, 2, NULL, NULL) == DRAY_ECLOSED);
    CHECK(dray_publisher_wait(t.publisher, 1, LONG / 3, NULL, NULL) == DRAY_ECLOSED);
    engine_close(&e);
    trainer_close(&t);
}

FIXTURE(start_nothing)
{
    s = (scene){.config = small_config(false, 3), .board = board_new(), .seed = 5};
    return 0;
}

FIXTURE(stop_nothing)
{
    return munmap(s.board, sizeof(board));
}

TEST_WITHIN(test_coordinator_dies, start_nothing, stop_nothing)
{
    for (size_t i = 0; i < sizeof engine_steps / sizeof *engine_steps; i++) {
        if (cluster_skips(i))
            continue;
        s.step = engine_steps[i];
        fixture_fork(&f, dray__registry_add);
        must_end_well(spawn(engine_without_coordinator, NULL));
        end_of(f.process);
        unlink(f.path);
        assert_int_equal(rmdir(f.folder), 0);
    }
}

/* ---- bytes that change ----------------------------------------------------------------------- */

/* The tensor whose block holds byte `at` of region 0; NULL: padding. */
static const char *tensor_at(const dray_layout *layout, uint64_t at)
{
    for (uint32_t b = 0; b < dray_layout_block_count(layout); b++) {
        const dray_block *block = dray_layout_block(layout, b);
        const dray_tensor_info *t = dray_layout_tensor(layout, block->tensor);
        uint64_t end = block->offset + dray_dtype_size((dray_dtype)t->dtype);
        for (uint32_t d = 0; d < t->ndim; d++)
            end += (uint64_t)(block->extent[d] - 1) * (uint64_t)block->stride[d];
        if (at >= block->offset && at < end)
            return t->name;
    }
    return NULL;
}

TEST_WITHIN(test_flipped_bits_are_found_and_named, start, stop)
{
    scene_pair p;
    pair_open(&p, &s.config, DRAY_F32, DRAY_BF16, s.seed, DRAY_REGION_HOST);
    MUST(dray_publisher_publish(p.t.publisher, 1, NULL, error));
    assert_int_equal(dray_subscriber_verify(p.e.subscriber, NULL), DRAY_ENOENT);
    MUST(dray_update_weights(p.e.subscriber, NULL, NULL, error));
    uint64_t found = 0;
    for (uint64_t i = 0; i < 200; i++) {
        uint64_t at = mix(s.seed * 1000 + i) % dray_layout_region(p.e.layout, 0)->bytes;
        const char *name = tensor_at(p.e.layout, at);
        dray_error said;
        memory_flip(p.e.region[0], at, (uint8_t)(1 << (i % 8)));
        int rc = dray_subscriber_verify(p.e.subscriber, &said);
        assert_int_equal(rc, name ? DRAY_ECHECKSUM : DRAY_OK);
        if (name)
            assert_non_null(strstr(said.message, name));
        found += name != NULL;
        memory_flip(p.e.region[0], at, (uint8_t)(1 << (i % 8)));
    }
    assert_true(found > 100);
    MUST(dray_subscriber_verify(p.e.subscriber, error));
    pair_close(&p);
}

TEST_WITHIN(test_source_that_changed_is_found, start, stop)
{
    for (int i = 0; i < 6; i++) {
        scene_pair p;
        s.seed++;
        pair_open(&p, &s.config, DRAY_F32, i % 2 ? DRAY_F32 : DRAY_BF16, s.seed, cluster_kind);
        MUST(dray_publisher_publish(p.t.publisher, 1, NULL, error));
        await_sums(p.t.context, 1);
        uint64_t at = mix(s.seed) % dray_layout_region(p.t.layout, 0)->bytes;
        const char *name = tensor_at(p.t.layout, at);
        dray_region *region = p.t.region[0];
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        options.strategy = i % 3;
        dray_error said = {0};
        memory_flip(region, at, 0x10);
        int rc = dray_update_weights(p.e.subscriber, &options, NULL, &said);
        assert_int_equal(rc, name ? DRAY_ETORN : DRAY_OK);
        if (name)
            assert_non_null(strstr(said.message, name));
        memory_flip(region, at, 0x10);
        MUST(dray_update_weights(p.e.subscriber, &options, NULL, error));
        assert_int_equal(engine_wrong(&p.e, s.seed), 0);
        /* without checksums nobody sees it, and the report says that nothing was verified */
        memory_flip(region, at, 0x10);
        options.no_verify = 1;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        MUST(dray_update_weights(p.e.subscriber, &options, &report, error));
        assert_int_equal(report.verify_ns, 0);
        assert_int_equal(report.verified_tensors, 0);
        assert_int_equal(report.verified_bytes, 0);
        assert_int_equal(dray_subscriber_verify(p.e.subscriber, NULL), DRAY_ENOENT);
        pair_close(&p);
    }
}

CLUSTER_SUITE
