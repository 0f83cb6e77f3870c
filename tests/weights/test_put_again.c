/* Tests a trainer's rank whose memory runs out while it comes back to the next coordinator. It is
 * not in test_restart.c, because no allocation can fail under the thread sanitizer. */
#include "control/restartable.h"
#include "house/no_memory.h"
#include "suite.h"
#include "weights/cluster.h"

/* Not always the same threads allocate first, so every number has several turns. */
enum { ROUNDS = 4, MOST = 30 };

static restartable *restarted;
static dray_model_config config;

/* One allocation fails, each time another one. Whatever was done before that, the rank publishes
 * when it is called again. */
static void poor_trainer(void *user)
{
    (void)user;
    trainer t;
    trainer_open(&t, restarted->unix_address, &config, DRAY_F32, 0, 1, 9, cluster_kind);
    for (uint64_t n = 1; n <= ROUNDS * MOST; n++) {
        char *text;
        restartable_restart(restarted);
        MUST(dray_context_status(t.context, &text, error)); /* the session goes on */
        dray_free(text);
        no_memory_at(n % MOST + 1);
        int rc = dray_publisher_publish(t.publisher, n, NULL, NULL);
        bool failed = no_memory_failed() != 0;
        no_memory_at(0);
        CHECK(rc == DRAY_OK || failed);
        if (rc)
            MUST(dray_publisher_publish(t.publisher, n, NULL, error));
    }
    trainer_close(&t);
}

TEST(test_regions_are_put_again)
{
    restarted = restartable_start(dray__registry_add, false);
    config = small_config(false, 3);
    RUN_ROLES(NULL, NULL, {poor_trainer, 1});
    restartable_stop(restarted);
}

CLUSTER_SUITE
