/* Tests a coordinator that stops answering without dying or closing its sockets. An update that
 * waits for its answer ends a second after its deadline, and the next one works once the
 * coordinator answers again. */

#include "suite.h"
#include "weights/cluster.h"
#include "weights/registry/registry.h"

static coordinator_fixture f;
static const char *_Atomic silent_from;

static void silence(void *user, const char *step)
{
    (void)user;
    if (!silent_from || strcmp(step, silent_from))
        return;
    silent_from = NULL;
    kill(f.process, SIGSTOP);
}

FIXTURE(start)
{
    fixture_fork(&f, dray__registry_add);
    return 0;
}

FIXTURE(stop)
{
    dray__hook_set(NULL, NULL);
    fixture_stop(&f);
    f = (coordinator_fixture){0};
    return 0;
}

TEST_WITHIN(test_updates_end, start, stop)
{
    /* before BEGIN is answered; while it is planned; before WRITING; before the vote is answered */
    static const char *const steps[] = {"begin", "plan", "import", "verified"};
    dray_model_config config = small_config(false, 3);
    trainer t;
    engine e;
    trainer_open(&t, f.unix_address, &config, DRAY_F32, 0, 1, 7, cluster_kind);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    dray__hook_set(silence, NULL);
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        dray_error said = {0};
        options.timeout_ns = DRAY__SECOND / 2;
        engine_open(&e, f.unix_address, &config, DRAY_F32, DRAY_F32, "engine", 0, 1);
        silent_from = steps[i];
        int64_t begin = dray__now();
        alarm(60); /* it never ended */
        int rc = dray_update_weights(e.subscriber, &options, NULL, &said);
        alarm(0);
        int64_t took = dray__now() - begin;
        kill(f.process, SIGCONT);
        fprintf(stderr, "silent from %s: %s after %.2f s: %s\n", steps[i], dray_error_name(rc),
                (double)took * 1e-9, said.message);
        assert_null(silent_from);
        assert_true(rc == DRAY_ETIMEDOUT || rc == DRAY_ETORN);
        assert_non_null(strstr(said.message, "no answer from"));
        assert_true(took < 20 * DRAY__SECOND);
        engine_close(&e);
        engine_open(&e, f.unix_address, &config, DRAY_F32, DRAY_F32, "engine", 0, 1);
        MUST(dray_update_weights(e.subscriber, NULL, NULL, error));
        assert_int_equal(engine_wrong(&e, 7), 0);
        engine_close(&e);
    }
    trainer_close(&t);
}

CLUSTER_SUITE
