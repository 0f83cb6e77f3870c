/* Tests that a forked child can close the weights of its parent at any moment. */
#include "base/clock.h"
#include "mover/mover.h"
#include "suite.h"
#include "weights/cluster.h"

#include <poll.h>
#include <stdatomic.h>

static atomic_bool reading, goes_on;

/* Keeps the data server's thread in the middle of an answer. */
static dray__fault stand_still(void *user, const char *tensor)
{
    (void)user, (void)tensor;
    int64_t until = dray__now() + 40 * DRAY__SECOND;
    atomic_store(&reading, true);
    while (!atomic_load(&goes_on) && dray__now() < until)
        poll(NULL, 0, 1);
    return DRAY__FAULT_NONE;
}

static void run_engine(void *user)
{
    engine e;
    fixture_host = "engines";
    engine_open(&e, f.unix_address, user, DRAY_F32, DRAY_F32, "engine", 0, 1);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.min_version = 1;
    MUST(dray_update_weights(e.subscriber, &options, NULL, error));
    CHECK(engine_wrong(&e, 7) == 0);
    engine_close(&e);
}

static void close_in_child(void *user)
{
    alarm(20);
    trainer_close(user);
}

CLUSTER_TEST(test_in_the_middle_of_an_answer)
{
    dray_model_config config = small_config(false, 1);
    trainer t;
    pid_t reader = spawn(run_engine, &config);
    fixture_host = "trainers";
    dray__mover_faults(stand_still, NULL);
    trainer_open(&t, f.unix_address, &config, DRAY_F32, 0, 1, 7, DRAY_REGION_HOST);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    while (!atomic_load(&reading))
        poll(NULL, 0, 1);
    pid_t child = spawn(close_in_child, &t);
    int status = end_of(child);
    atomic_store(&goes_on, true);
    assert_int_equal(status, 0);
    must_end_well(reader);
    trainer_close(&t);
}

CLUSTER_SUITE
