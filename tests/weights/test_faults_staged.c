/* Tests a rank that is killed at every step of a prefetch, of a commit, and of a read from a peer.
 * A failed prefetch leaves the old version as it was served. After a failed commit the group is
 * torn or as it was, never mixed. The other ranks are told, and the next update works. */
#include "suite.h"
#include "weights/cluster.h"

#include <stdint.h>

#define LONG (30 * DRAY__SECOND)

enum { SECOND_IS_THERE, PARENT_SAYS_END, SURVIVED, FIRST_VERSION };

static const char *const steps[] = {"begin", "plan",     "import", "writing",  "moving",
                                    "moved", "verified", "voted",  "committed"};
/* Of commits that exchange memory. */
static const char *const exchange_steps[] = {"unmapped", "settling", "settled"};

typedef struct scene {
    dray_model_config config;
    board *board;
    const char *step;
    bool commit; /* dies in the commit; else in the prefetch */
} scene;

static scene s;

static int start(void **state)
{
    cluster_start(state);
    s = (scene){.config = small_config(false, 3), .board = board_new()};
    return 0;
}

static int stop(void **state)
{
    munmap(s.board, sizeof(board));
    return cluster_stop(state);
}

/* Publishes version 1, and 2 once both ranks have that. */
static void run_trainer(void *user)
{
    (void)user;
    trainer t;
    trainer_open(&t, f.unix_address, &s.config, DRAY_F32, 0, 1, 1, cluster_kind);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    await_flag(s.board, FIRST_VERSION);
    MUST(dray_publisher_wait(t.publisher, 1, LONG, NULL, error));
    fill(t.layout, t.region, t.tied, 2);
    MUST(dray_publisher_publish(t.publisher, 2, NULL, error));
    raise_flag(s.board, SECOND_IS_THERE);
    await_flag(s.board, PARENT_SAYS_END);
    trainer_close(&t);
}

static void open_rank(engine *e, uint32_t rank)
{
    engine_open(e, f.unix_address, &s.config, DRAY_F32, DRAY_BF16, "engine", rank, 2);
}

static void hold_first_version(engine *e, uint32_t rank)
{
    open_rank(e, rank);
    MUST(dray_update_weights(e->subscriber, NULL, NULL, error));
    MUST(dray_barrier(e->context, "first", 2, LONG, error));
    raise_flag(s.board, FIRST_VERSION);
    await_flag(s.board, SECOND_IS_THERE);
}

#if defined(__SANITIZE_THREAD__) /* where an update of its own takes a second on a busy machine */
#define PATIENCE (5 * DRAY__SECOND)
#else
#define PATIENCE DRAY__SECOND
#endif

static dray_update_options options_of(uint64_t min)
{
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.timeout_ns = PATIENCE; /* all of it, where the other rank is dead */
    options.min_version = min;
    return options;
}

static void last_update(engine *e)
{
    dray_update_options options = options_of(2);
    options.timeout_ns = LONG;
    MUST(dray_barrier(e->context, "again", 2, LONG, error));
    MUST(dray_update_weights(e->subscriber, &options, NULL, error));
    CHECK(engine_wrong(e, 2) == 0);
    MUST(dray_subscriber_verify(e->subscriber, error));
    MUST(dray_barrier(e->context, "over", 2, LONG, error));
    engine_close(e);
}

static void survivor(void *user)
{
    (void)user;
    engine e;
    int32_t state;
    uint64_t version;
    dray_update_options options = options_of(2);
    hold_first_version(&e, 0);
    int rc = dray_prefetch_weights(e.subscriber, &options, NULL, NULL);
    if (s.commit) {
        CHECK(rc == DRAY_OK);
        CHECK(engine_wrong(&e, 1) == 0);
        options.min_version = 0;
        rc = dray_commit_weights(e.subscriber, &options, NULL, NULL);
    }
    MUST(dray_subscriber_version(e.subscriber, &version, NULL, &state, error));
    /* the other rank is dead: never whole; but this one's memory is one version or said to be torn
     */
    CHECK(state != DRAY_GROUP_WHOLE || rc == DRAY_OK);
    if (!s.commit)
        CHECK(engine_wrong(&e, 1) == 0);
    else if (rc == DRAY_OK)
        CHECK(engine_wrong(&e, 2) == 0);
    else
        CHECK(state == DRAY_GROUP_TORN);
    raise_flag(s.board, SURVIVED);
    last_update(&e);
}

static void victim(void *user)
{
    (void)user;
    engine e;
    dray_update_options options = options_of(2);
    hold_first_version(&e, 1);
    if (!s.commit)
        die_at_step(s.step);
    dray_prefetch_weights(e.subscriber, &options, NULL, NULL);
    die_at_step(s.step);
    options.min_version = 0;
    dray_commit_weights(e.subscriber, &options, NULL, NULL);
    dray_subscriber_release_mappings(e.subscriber, NULL); /* after what comes after a commit */
    fprintf(stderr, "still alive after step %s\n", s.step);
}

static void replacement(void *user)
{
    (void)user;
    engine e;
    open_rank(&e, 1);
    last_update(&e);
}

TEST_WITHIN(test_rank_dies_in_prefetch_or_commit, start, stop)
{
    size_t all = sizeof steps / sizeof *steps,
           more = sizeof exchange_steps / sizeof *exchange_steps;
    for (size_t i = 0; i < 2 * all + (cluster_kind == DRAY_REGION_CUDA ? more : 0); i++) {
        if (i < 2 * all && cluster_skips(i))
            continue;
        memset((void *)s.board, 0, sizeof *s.board);
        s.commit = i % 2 != 0 || i >= 2 * all;
        s.step = i < 2 * all ? steps[i / 2] : exchange_steps[i - 2 * all];
        pid_t publisher = spawn(run_trainer, NULL);
        pid_t one = spawn(survivor, NULL), other = spawn(victim, NULL);
        must_be_killed(other);
        await_flag(s.board, SURVIVED);
        pid_t second = spawn(replacement, NULL);
        must_end_well(one);
        must_end_well(second);
        raise_flag(s.board, PARENT_SAYS_END);
        must_end_well(publisher);
    }
}

/* ---- the peer that is read dies -------------------------------------------------------------- */

static void peer(void *user)
{
    (void)user;
    engine e;
    engine_open(&e, f.unix_address, &s.config, DRAY_F32, DRAY_F32, "peer", 0, 1);
    MUST(dray_update_weights(e.subscriber, NULL, NULL, error));
    raise_flag(s.board, FIRST_VERSION);
    await_flag(s.board, PARENT_SAYS_END);
    engine_close(&e);
}

static pid_t peer_process;

static void kill_peer(void *user, const char *step)
{
    (void)user;
    if (strcmp(step, s.step) != 0)
        return;
    dray__hook_set(NULL, NULL);
    kill(peer_process, SIGKILL);
    end_of(peer_process);
    usleep(20000); /* the coordinator hears of it */
}

/* The reader had version 1 from the peer, or, where that came too early to be committed, gets
 * version 2 from the trainer in the same call. */
static void read_from_dying_peer(void *user)
{
    (void)user;
    engine e;
    dray_update_options options = options_of(0);
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    trainer t;
    pid_t child = spawn(peer, NULL);
    trainer_open(&t, f.unix_address, &s.config, DRAY_F32, 0, 1, 1, cluster_kind);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    await_flag(s.board, FIRST_VERSION);
    MUST(dray_publisher_wait(t.publisher, 1, LONG, NULL, error));
    peer_process = child;
    engine_open(&e, f.unix_address, &s.config, DRAY_F32, DRAY_F32, "reader", 0, 1);
    dray__hook_set(kill_peer, NULL);
    int rc = dray_update_weights(e.subscriber, &options, &report, NULL);
    dray__hook_set(NULL, NULL);
    int32_t now;
    MUST(dray_subscriber_version(e.subscriber, NULL, NULL, &now, error));
    if (rc == DRAY_OK)
        CHECK(engine_wrong(&e, 1) == 0);
    CHECK((now == DRAY_GROUP_WHOLE) == (rc == DRAY_OK));
    fill(t.layout, t.region, t.tied, 2);
    MUST(dray_publisher_publish(t.publisher, 2, NULL, error));
    options.timeout_ns = LONG;
    MUST(dray_update_weights(e.subscriber, &options, &report, error));
    CHECK(report.version == 2);
    CHECK(engine_wrong(&e, 2) == 0);
    engine_close(&e);
    trainer_close(&t);
}

TEST_WITHIN(test_peer_dies_while_it_is_read, start, stop)
{
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        if (cluster_skips(i))
            continue;
        memset((void *)s.board, 0, sizeof *s.board);
        s.step = steps[i];
        must_end_well(spawn(read_from_dying_peer, NULL));
    }
}

CLUSTER_SUITE
