/* Tests the first version, which is 0 in the second run of this suite (numbers.h). Publishers wait
 * for its readers, and another coordinator learns of it. */
#include "control/restartable.h"
#include "suite.h"
#include "weights/cluster.h"

#include <pthread.h>
#include <stdint.h>

#define LONG (20 * DRAY__SECOND)

static dray_model_config config;

static int start(void **state)
{
    cluster_start(state);
    config = small_config(false, 3);
    return 0;
}

/* ---- a reader half way ----------------------------------------------------------------------- */

typedef struct next {
    trainer *t;
    pthread_t thread;
    int published;
} next;

static void *publish_next(void *user)
{
    next *n = user;
    fill(n->t->layout, n->t->region, n->t->tied, 2);
    MUST(dray_publisher_publish(n->t->publisher, 2, NULL, error));
    __atomic_store_n(&n->published, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

/* Before the reader's first byte: the trainer goes on, as far as it can. */
static void go_on(void *user, const char *step)
{
    next *n = user;
    if (strcmp(step, "writing") != 0)
        return;
    dray__hook_set(NULL, NULL);
    assert_int_equal(pthread_create(&n->thread, NULL, publish_next, n), 0);
    for (int i = 0; i < 200 && !__atomic_load_n(&n->published, __ATOMIC_SEQ_CST); i++)
        usleep(1000);
}

/* The next publish fills the snapshot once the readers of the one before are done with it. */
TEST_WITHIN(test_snapshot_waits_for_its_readers, start, cluster_stop)
{
    trainer t = {.tied = config.tied};
    engine e;
    t.context = fixture_open(&f, "trainer-0", "trainer", 0);
    MUST(dray_layout_fsdp(&config, DRAY_F32, 0, 1, DRAY_REGION_HOST, &t.layout, error));
    MUST(dray_regions_for_layout(t.layout, 1, t.region, error));
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    options.regions = t.region;
    options.snapshot = 1;
    MUST(dray_publisher_open(t.context, MODEL, t.layout, &options, &t.publisher, error));
    assert_int_equal(dray_publisher_wait(t.publisher, 1, 0, NULL, NULL), DRAY_EINVALID);
    fill(t.layout, t.region, t.tied, 1);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    MUST(dray_publisher_wait(t.publisher, 1, 0, NULL, error));
    engine_open(&e, f.unix_address, &config, DRAY_F32, DRAY_F32, "engine", 0, 1);
    next n = {.t = &t};
    dray_update_options update = DRAY_UPDATE_OPTIONS_INIT;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    update.no_verify = 1; /* no checksum finds what is wrong */
    dray__hook_set(go_on, &n);
    MUST(dray_update_weights(e.subscriber, &update, &report, error));
    assert_int_equal(report.version, 1);
    assert_int_equal(engine_wrong(&e, 1), 0);
    assert_int_equal(pthread_join(n.thread, NULL), 0);
    MUST(dray_update_weights(e.subscriber, &update, &report, error));
    assert_int_equal(report.version, 2);
    assert_int_equal(engine_wrong(&e, 2), 0);
    engine_close(&e);
    trainer_close(&t);
}

/* ---- a coordinator that is started anew ------------------------------------------------------ */

static restartable *restarted;
static board *told;

static void publisher_of_first(void *user)
{
    (void)user;
    trainer t;
    trainer_open(&t, restarted->unix_address, &config, DRAY_F32, 0, 1, 1, DRAY_REGION_SHARED);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    restartable_restart(restarted);
    CHECK(dray_publisher_publish(t.publisher, 1, NULL, NULL) == DRAY_EINVALID);
    raise_flag(told, 0);
    await_flag(told, 1);
    MUST(dray_publisher_wait(t.publisher, 1, LONG, NULL, error));
    trainer_close(&t);
}

/* The publisher comes back as one that has published it; it can be read. */
TEST(test_coordinator_hears_of_it_again)
{
    config = small_config(false, 3);
    engine e;
    restarted = restartable_start(dray__registry_add, false);
    told = board_new();
    pid_t child = spawn(publisher_of_first, NULL);
    await_flag(told, 0);
    dray_update_options update = DRAY_UPDATE_OPTIONS_INIT;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    update.timeout_ns = 2 * DRAY__SECOND;
    engine_open(&e, restarted->unix_address, &config, DRAY_F32, DRAY_F32, "engine", 0, 1);
    MUST(dray_update_weights(e.subscriber, &update, &report, error));
    assert_int_equal(report.version, 1);
    assert_int_equal(engine_wrong(&e, 1), 0);
    raise_flag(told, 1);
    must_end_well(child);
    engine_close(&e);
    munmap(told, sizeof(board));
    restartable_stop(restarted);
}

CLUSTER_SUITE
