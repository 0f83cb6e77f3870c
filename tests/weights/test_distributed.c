/* Updates between hosts: simulated ones (contexts that name their hosts), over loopback. Everything
 * that a network and a peer can do wrong must end as an error that names the peer, or be repaired. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "base/wire.h"
#include "control/registry.h"
#include "mover/mover.h"
#include "weights/cluster.h"
#include "weights/pull.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

static coordinator_fixture f;

static int start_process(void **state)
{
    (void)state;
    fixture_fork(&f, dray__registry_add);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    fixture_stop(&f);
    f = (coordinator_fixture){0};
    fixture_host = NULL;
    return 0;
}

/* ---- any layouts, any hosts ------------------------------------------------------------------ */

typedef struct scene {
    dray_model_config config;
    uint32_t world, tp, rank, hosts;
    dray_dtype from, to;
    dray_region_kind kind;
    uint64_t seed, bucket;
    board *board;
} scene;

static const char *host_of(const scene *s, uint32_t index)
{
    static char name[16];
    snprintf(name, sizeof name, "host-%u", index % s->hosts);
    return name;
}

static void run_trainer(void *user)
{
    const scene *s = user;
    trainer t;
    fixture_host = host_of(s, s->rank);
    trainer_open(&t, f.unix_address, &s->config, s->from, s->rank, s->world, s->seed, s->kind);
    for (uint64_t version = 1; version <= 3; version++) {
        fill(t.layout, t.region, t.tied, s->seed + version);
        MUST(dray_publish(t.publisher, version, NULL, error));
        MUST(dray_barrier(t.context, "updated", s->world + s->tp, DRAY_WAIT_DEFAULT, error));
        MUST(dray_publisher_wait(t.publisher, version, DRAY_WAIT_DEFAULT, NULL, error));
    }
    trainer_close(&t);
}

static void run_engine(void *user)
{
    const scene *s = user;
    engine e;
    fixture_host = s->hosts == 1 ? "elsewhere" : host_of(s, s->rank + 1);
    engine_open(&e, f.unix_address, &s->config, s->from, s->to, "engine", s->rank, s->tp);
    for (uint64_t version = 1; version <= 3; version++) {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        options.mode = version == 2 ? DRAY_MODE_AUTO : DRAY_MODE_DISTRIBUTED;
        options.strategy = (int32_t)(version - 1);
        options.bucket_bytes = s->bucket;
        options.min_version = version;
        MUST(dray_update_weights(e.subscriber, &options, &report, error));
        CHECK(report.version == version && report.mode == DRAY_MODE_DISTRIBUTED);
        CHECK(engine_wrong(&e, s->seed + version) == 0);
        CHECK(report.verified_tensors > 0 && report.retries == 0);
        CHECK(report.wire_bytes >= report.link_bytes[DRAY_LINK_NETWORK] / 2);
        if (options.strategy != DRAY_STRATEGY_DIRECT)
            CHECK(report.peak_extra_bytes <= s->bucket);
        MUST(dray_subscriber_verify(e.subscriber, error));
        MUST(dray_barrier(e.context, "updated", s->world + s->tp, DRAY_WAIT_DEFAULT, error));
    }
    engine_close(&e);
}

static void test_random_hosts(void **state)
{
    (void)state;
    static const dray_dtype dtypes[][2] = {
        {DRAY_F32, DRAY_F32}, {DRAY_F32, DRAY_BF16}, {DRAY_BF16, DRAY_BF16}, {DRAY_BF16, DRAY_F32}};
    static const uint32_t tps[] = {1, 2, 4};
    const char *given = getenv("DRAY_TEST_SEED");
    uint64_t seed = given ? (uint64_t)atoll(given) : (uint64_t)getpid();
    for (int i = 0; i < 8 * fixture_scale(); i++, seed++) {
        uint64_t x = mix(seed);
        scene s = {.world = 1 + (uint32_t)(x % 4),
                   .tp = tps[(x >> 8) % 3],
                   .hosts = 1 + (uint32_t)((x >> 12) % 4),
                   .from = dtypes[(x >> 16) % 4][0],
                   .to = dtypes[(x >> 16) % 4][1],
                   .kind = (x >> 20) % 2 ? DRAY_REGION_HOST : DRAY_REGION_SHARED,
                   .seed = seed * 100,
                   .bucket = 128u * 1024 + (x >> 24) % 100000};
        s.config = small_config((x >> 32) & 1, x >> 40);
        fprintf(stderr, "seed %" PRIu64 ": fsdp %u -> tp %u on %u hosts, %s -> %s\n", seed, s.world,
                s.tp, s.hosts, dray_dtype_name(s.from), dray_dtype_name(s.to));
        if (s.hosts > 1 && s.kind == DRAY_REGION_SHARED && s.world == 1 && s.tp == 1)
            s.hosts = 1; /* else both may be on one */
        pid_t pids[16];
        uint32_t count = 0;
        for (s.rank = 0; s.rank < s.world; s.rank++)
            pids[count++] = spawn(run_trainer, &s);
        for (s.rank = 0; s.rank < s.tp; s.rank++)
            pids[count++] = spawn(run_engine, &s);
        for (uint32_t k = 0; k < count; k++)
            must_end_well(pids[k]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_random_hosts, start_process, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
