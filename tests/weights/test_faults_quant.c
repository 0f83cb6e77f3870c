/* Tests a rank that is killed while it quantises. The group is torn, the other rank is told by its
 * deadline, and the next update gives both ranks the bytes of an undisturbed engine. */
#include "suite.h"
#include "weights/cluster.h"

#include <stdint.h>

#define LONG (120 * DRAY__SECOND)

enum { PUBLISHED, VICTIM_DEAD, END };

static board *shared;

static void run_trainer(void *user)
{
    (void)user;
    dray_model_config config = cell_config(128, 512, 1024, 2, 8, 8);
    trainer t;
    trainer_open(&t, f.unix_address, &config, DRAY_BF16, 0, 1, 3, cluster_kind);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    raise_flag(shared, PUBLISHED);
    await_flag(shared, END);
    trainer_close(&t);
}

/* As engine_open, in FP8. */
static void open_quantised(engine *e, const char *group, uint32_t rank, uint32_t world)
{
    char name[64];
    dray_model_config config = cell_config(128, 512, 1024, 2, 8, 8);
    snprintf(name, sizeof name, "%s-%u", group, rank);
    memset(e, 0, sizeof *e);
    cluster_choose_gpu(rank + 1);
    e->context = fixture_open_at(f.unix_address, name, "engine", rank);
    dray_engine_quant quant = {.size = sizeof quant, .kind = DRAY_QUANT_BLOCK, .block = {128, 128}};
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    spec.tp = 2;
    spec.tp_rank = world == 2 ? rank : (uint32_t)(group[0] - '0');
    spec.kind = cluster_kind;
    spec.quant = &quant;
    MUST(dray_layout_engine(&config, &spec, &e->layout, error));
    MUST(dray_regions_for_layout(e->layout, 1, e->region, error));
    poison(e->layout, e->region);
    engine_subscribe(e, group, rank, world, 0);
}

static int update(engine *e, int64_t timeout_ns)
{
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.timeout_ns = timeout_ns;
    return dray_update_weights(e->subscriber, &options, NULL, NULL);
}

static bool same_memory(dray_region *a, dray_region *b)
{
    uint8_t *bytes = memory_open(a), *others = memory_open(b);
    bool same = memcmp(bytes, others, dray_region_bytes(a)) == 0;
    memory_close(a, bytes, false);
    memory_close(b, others, false);
    return same;
}

static void must_be_whole(engine *e, uint32_t rank)
{
    CHECK(update(e, LONG) == DRAY_OK);
    MUST(dray_subscriber_verify(e->subscriber, error));
    engine alone;
    open_quantised(&alone, rank ? "1-alone" : "0-alone", 0, 1);
    CHECK(update(&alone, LONG) == DRAY_OK);
    CHECK(same_memory(e->region[0], alone.region[0]));
    engine_close(&alone);
}

static void run_victim(void *user)
{
    (void)user;
    engine e;
    open_quantised(&e, "engine", 1, 2);
    die_at_step("moving"); /* after a few of its boxes */
    update(&e, LONG);
}

static void run_survivor(void *user)
{
    (void)user;
    engine e;
    int32_t state;
    open_quantised(&e, "engine", 0, 2);
    CHECK(update(&e, LONG) == DRAY_ETORN);
    MUST(dray_subscriber_version(e.subscriber, NULL, NULL, &state, error));
    CHECK(state == DRAY_GROUP_TORN);
    await_flag(shared, VICTIM_DEAD);
    must_be_whole(&e, 0);
    MUST(dray_barrier(e.context, "over", 2, LONG, error));
    engine_close(&e);
}

static void run_successor(void *user)
{
    (void)user;
    engine e;
    open_quantised(&e, "engine", 1, 2);
    must_be_whole(&e, 1);
    MUST(dray_barrier(e.context, "over", 2, LONG, error));
    engine_close(&e);
}

TEST(test_killed_while_quantising)
{
    cluster_start(state);
    shared = board_new();
    pid_t trains = spawn(run_trainer, NULL);
    await_flag(shared, PUBLISHED);
    pid_t survivor = spawn(run_survivor, NULL), victim = spawn(run_victim, NULL);
    must_be_killed(victim);
    raise_flag(shared, VICTIM_DEAD);
    pid_t successor = spawn(run_successor, NULL);
    must_end_well(successor);
    must_end_well(survivor);
    raise_flag(shared, END);
    must_end_well(trains);
    munmap(shared, sizeof(board));
    cluster_stop(state);
}

CLUSTER_SUITE
