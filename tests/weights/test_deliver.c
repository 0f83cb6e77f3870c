/* Tests a publisher that waits until engines have a version. It waits for every engine, however
 * late it comes, and names those that do not come. Coordinators and ranks that are killed are
 * survived or reported. */
#include "control/restartable.h"
#include "suite.h"
#include "weights/cluster.h"

#include <stdint.h>

#define LONG (20 * DRAY__SECOND)
#define SHORT (DRAY__SECOND / 20)

enum { ROUNDS = 200 };
enum { PUBLISHED, DELIVERS = 2, OVER = 4 }; /* + rank */

static const char *const engine_name[] = {"engine"};
static dray_model_config config;
static const char *address;
static uint32_t rank;
static board *b;

static int start(void **state)
{
    cluster_start(state);
    config = small_config(false, 3);
    address = f.unix_address;
    b = board_new();
    return 0;
}

static int stop(void **state)
{
    munmap(b, sizeof *b);
    return cluster_stop(state);
}

static void open_rank(trainer *t, uint32_t world)
{
    trainer_open(t, address, &config, DRAY_F32, rank, world, 1, DRAY_REGION_SHARED);
}

static void open_engine(engine *e, const char *group)
{
    engine_open(e, address, &config, DRAY_F32, DRAY_F32, group, 0, 1);
}

/* Exactly this version, and all of it. */
static void take(engine *e, uint64_t version)
{
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    options.min_version = version;
    options.timeout_ns = LONG;
    MUST(dray_update_weights(e->subscriber, &options, &report, error));
    CHECK(report.version == version);
    CHECK(engine_wrong(e, version) == 0);
}

/* ---- versions that nobody has begun to read -------------------------------------------------- */

static void deliver_rounds(void *user)
{
    (void)user;
    trainer t;
    open_rank(&t, 2);
    for (uint64_t version = 1; version <= ROUNDS; version++) {
        fill(t.layout, t.region, t.tied, version);
        MUST(dray_publisher_publish(t.publisher, version, NULL, error));
        MUST(dray_publisher_deliver(t.publisher, version, version % 2 ? engine_name : NULL, 1, LONG,
                                    error));
        MUST(dray_publisher_wait(t.publisher, version, LONG, NULL, error));
    }
    trainer_close(&t);
}

TEST_WITHIN(test_no_version_is_lost, start, stop)
{
    pid_t trainers[2];
    for (rank = 0; rank < 2; rank++)
        trainers[rank] = spawn(deliver_rounds, NULL);
    engine e;
    usleep(50000);
    open_engine(&e, "engine");
    for (uint64_t version = 1; version <= ROUNDS; version++) {
        usleep((useconds_t)(mix(version) % 3000)); /* it generates, and comes late */
        take(&e, version);
    }
    all_end_well(trainers, 2);
    engine_close(&e);
}

/* ---- who does not come ----------------------------------------------------------------------- */

TEST_WITHIN(test_missing_groups_are_named, start, stop)
{
    static const char *const names[] = {"here", "absent"}, *const unnamed[] = {"here", ""};
    trainer t;
    engine here, absent;
    dray_error said;
    rank = 0;
    open_rank(&t, 1);
    open_engine(&here, "here");
    assert_int_equal(dray_publisher_deliver(t.publisher, 1, NULL, 1, 0, NULL), DRAY_EINVALID);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    assert_int_equal(dray_publisher_deliver(t.publisher, 2, NULL, 1, 0, NULL), DRAY_EINVALID);
    assert_int_equal(dray_publisher_deliver(t.publisher, 1, NULL, 0, 0, NULL), DRAY_EINVALID);
    assert_int_equal(dray_publisher_deliver(t.publisher, 1, unnamed, 2, 0, NULL), DRAY_EINVALID);
    assert_int_equal(dray_publisher_deliver(t.publisher, 1, NULL, 1, -5, NULL), DRAY_EINVALID);
    assert_int_equal(dray_publisher_deliver(t.publisher, 1, NULL, 1, SHORT, &said), DRAY_ETIMEDOUT);
    assert_non_null(strstr(said.message, "0 of 1 groups"));
    assert_non_null(strstr(said.message, "here (holds none)"));
    take(&here, 1);
    MUST(dray_publisher_deliver(t.publisher, 1, NULL, 1, 0, error));
    assert_int_equal(dray_publisher_deliver(t.publisher, 1, names, 2, SHORT, &said),
                     DRAY_ETIMEDOUT);
    assert_non_null(strstr(said.message, "1 of 2 groups"));
    assert_non_null(strstr(said.message, "missing: absent (not there)"));
    open_engine(&absent, "absent"); /* nothing was withdrawn meanwhile */
    take(&absent, 1);
    MUST(dray_publisher_deliver(t.publisher, 1, names, 2, 0, error));
    engine_close(&absent); /* it had it */
    MUST(dray_publisher_deliver(t.publisher, 1, names, 2, 0, error));
    MUST(dray_publisher_deliver(t.publisher, 1, NULL, 2, 0, error));
    assert_int_equal(dray_publisher_deliver(t.publisher, 1, NULL, 3, 0, &said), DRAY_ETIMEDOUT);
    assert_non_null(strstr(said.message, "no other group is open"));
    fill(t.layout, t.region, t.tied, 2);
    MUST(dray_publisher_publish(t.publisher, 2, NULL, error));
    assert_int_equal(dray_publisher_deliver(t.publisher, 2, names, 2, 0, &said), DRAY_ETIMEDOUT);
    assert_non_null(strstr(said.message, "here (holds version "));
    take(&here, 2);
    engine_close(&here); /* before anybody asks for it */
    MUST(dray_publisher_deliver(t.publisher, 2, names, 1, 0, error));
    MUST(dray_publisher_deliver(t.publisher, 1, names, 1, 0, error)); /* a newer one is as good */
    trainer_close(&t);
}

/* The same number of an older incarnation is another version, also when it is committed late. */
TEST_WITHIN(test_older_incarnations_do_not_count, start, stop)
{
    trainer t;
    engine holds, commits;
    dray_error said;
    rank = 0;
    open_engine(&holds, "holds");
    open_engine(&commits, "commits");
    for (int i = 0; i < 2; i++) {
        open_rank(&t, 1);
        MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
        if (i == 0) {
            take(&holds, 1);
            MUST(dray_prefetch_weights(commits.subscriber, NULL, NULL, error));
            trainer_close(&t);
        }
    }
    MUST(dray_commit_weights(commits.subscriber, NULL, NULL, error));
    assert_int_equal(dray_publisher_deliver(t.publisher, 1, NULL, 1, 0, &said), DRAY_ETIMEDOUT);
    assert_non_null(strstr(said.message, "0 of 1 groups"));
    take(&holds, 1);
    MUST(dray_publisher_deliver(t.publisher, 1, NULL, 1, 0, error));
    engine_close(&commits);
    engine_close(&holds);
    trainer_close(&t);
}

/* Without it: what no engine had begun to read is taken back, which who asks for it is told. */
TEST_WITHIN(test_withdrawn_is_said, start, stop)
{
    trainer t;
    engine e;
    dray_error said;
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.min_version = 1;
    options.timeout_ns = SHORT;
    rank = 0;
    open_rank(&t, 1);
    open_engine(&e, "engine");
    assert_int_equal(dray_update_weights(e.subscriber, &options, NULL, &said), DRAY_ETIMEDOUT);
    assert_null(strstr(said.message, "withdrawn"));
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    MUST(dray_publisher_wait(t.publisher, 1, LONG, NULL, error));
    assert_int_equal(dray_update_weights(e.subscriber, &options, NULL, &said), DRAY_ETIMEDOUT);
    assert_non_null(strstr(said.message, "was published and withdrawn"));
    options.min_version = 2;
    assert_int_equal(dray_update_weights(e.subscriber, &options, NULL, &said), DRAY_ETIMEDOUT);
    assert_null(strstr(said.message, "withdrawn"));
    engine_close(&e);
    trainer_close(&t);
}

static void dying_engine(void *user)
{
    (void)user;
    engine e;
    open_engine(&e, "engine");
    die_at_step("moving");
    take(&e, 1);
}

static void living_engine(void *user)
{
    (void)user;
    engine e;
    open_engine(&e, "engine");
    take(&e, 1);
    await_flag(b, OVER);
    engine_close(&e);
}

/* An engine that dies half way has nothing; another one of its name takes the version. */
TEST_WITHIN(test_engine_that_dies, start, stop)
{
    trainer t;
    dray_error said;
    rank = 0;
    open_rank(&t, 1);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    must_be_killed(spawn(dying_engine, NULL));
    assert_int_equal(dray_publisher_deliver(t.publisher, 1, engine_name, 1, SHORT, &said),
                     DRAY_ETIMEDOUT);
    assert_non_null(strstr(said.message, "engine (not there)"));
    pid_t next = spawn(living_engine, NULL);
    MUST(dray_publisher_deliver(t.publisher, 1, engine_name, 1, LONG, error));
    raise_flag(b, OVER);
    must_end_well(next);
    trainer_close(&t);
}

static void rank_that_dies(void *user)
{
    (void)user;
    trainer t;
    open_rank(&t, 2);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    raise_flag(b, PUBLISHED);
    await_flag(b, DELIVERS);
    usleep(20000);
    kill(getpid(), SIGKILL);
}

TEST_WITHIN(test_rank_that_dies, start, stop)
{
    trainer t;
    dray_error said;
    rank = 1;
    pid_t other = spawn(rank_that_dies, NULL);
    rank = 0;
    open_rank(&t, 2);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    await_flag(b, PUBLISHED);
    raise_flag(b, DELIVERS);
    int64_t begin = dray__now();
    assert_int_equal(dray_publisher_deliver(t.publisher, 1, NULL, 1, LONG, &said), DRAY_ESTALE);
    assert_true(dray__now() - begin < LONG / 2);
    assert_non_null(strstr(said.message, "rank 1"));
    end_of(other);
    trainer_close(&t);
}

/* ---- a coordinator that is started anew ------------------------------------------------------ */

static void delivering_rank(void *user)
{
    (void)user;
    trainer t;
    open_rank(&t, 2);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    raise_flag(b, PUBLISHED + (int)rank);
    await_flag(b, DELIVERS);
    MUST(dray_publisher_deliver(t.publisher, 1, engine_name, 1, LONG, error));
    raise_flag(b, OVER + (int)rank);
    MUST(dray_publisher_wait(t.publisher, 1, LONG, NULL, error));
    trainer_close(&t);
}

/* early: the engine has it before; else it takes it from publishers that wait already. */
static void restart_with(bool early)
{
    restartable *restarted = restartable_start(dray__registry_add, false);
    pid_t trainers[2];
    engine e;
    config = small_config(false, 3);
    address = restarted->unix_address;
    b = board_new();
    for (rank = 0; rank < 2; rank++)
        trainers[rank] = spawn(delivering_rank, NULL);
    await_flag(b, PUBLISHED);
    await_flag(b, PUBLISHED + 1);
    open_engine(&e, "engine");
    if (early) {
        take(&e, 1);
    } else {
        raise_flag(b, DELIVERS);
        usleep(50000);
    }
    restartable_restart(restarted);
    MUST(dray_subscriber_release_mappings(e.subscriber, error));
    if (early)
        raise_flag(b, DELIVERS);
    else
        take(&e, 1);
    all_end_well(trainers, 2);
    engine_close(&e);
    munmap(b, sizeof *b);
    restartable_stop(restarted);
}

TEST(test_over_a_restart)
{
    restart_with(false);
    restart_with(true);
}

CLUSTER_SUITE
