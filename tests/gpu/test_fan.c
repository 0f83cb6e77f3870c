/* Tests weights in pinned host memory for engines whose ranks, on several GPUs, need the same
 * bytes. Each byte is uploaded once, and the other ranks take it from that GPU. When a rank is
 * killed, stops or does not take part, the others still get all bytes. */
#include "gpu/scene.h"
#include "weights/update/subscriber.h"

#include <signal.h>

enum { ASKING = 1, ENDED = 2, WRONG_STEP = 3 };

/* Rows long enough, and enough of them, to be worth sharing. */
static scene wide(uint64_t seed)
{
    scene s = plain(seed);
    s.config.hidden_size = 256;
    s.config.head_dim = 64;
    s.config.intermediate_size = 512;
    s.config.vocab_size = 512;
    s.source = DRAY_REGION_PINNED;
    s.strategies = false;
    s.groups = 2;
    s.versions = 3;
    s.pause_us = 60000;
    for (uint32_t i = 0; i < 4; i++)
        s.engine_gpus[i] = i;
    s.board = board_new();
    return s;
}

static bool apart_first; /* the first version is taken by one engine after the other */

static void wait_turn(const engine *e, const scene *s, uint32_t turn)
{
    uint32_t ranks = s->tp * s->groups;
    for (uint32_t i = 0; i < turn; i++)
        MUST(dray_barrier(e->context, "turn", ranks, DRAY_WAIT_DEFAULT, error));
}

static bool odd_progress; /* the last ranks of engines offer other memory as their progress */

static void offer_odd_progress(const engine *e, dray_region_kind kind, uint64_t bytes)
{
    dray_subscriber *s = e->subscriber;
    dray_region *own = s->destination.progress;
    int64_t deadline = dray__deadline(20 * DRAY__SECOND);
    MUST(dray_region_alloc(kind, bytes, "progress", &s->destination.progress, error));
    MUST(dray__subscriber_put(s, deadline, error));
    dray_region_free(s->destination.progress);
    s->destination.progress = own;
}

static void sharing_engine(void *user)
{
    scene *s = user;
    engine e = scene_engine(s);
    if (odd_progress && s->rank % s->tp)
        offer_odd_progress(&e, s->rank < s->tp ? DRAY_REGION_CUDA : DRAY_REGION_SHARED,
                           s->rank < s->tp ? 4096 : 0);
    for (uint64_t version = 1; version <= s->versions; version++) {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        options.min_version = version;
        options.no_peers = 1;
        gpu_poison(e.region[0]);
        meet(e.context, "about to ask", s);
        bool apart = apart_first && version == 1;
        wait_turn(&e, s, apart ? s->rank / s->tp : 0);
        MUST(dray_update_weights(e.subscriber, &options, &report, error));
        wait_turn(&e, s, apart ? s->groups - 1 - s->rank / s->tp : 0);
        CHECK(gpu_engine_wrong(&e, s->seed + version - 1) == 0);
        MUST(dray_subscriber_verify(e.subscriber, error));
        CHECK(report.bytes == dray_layout_bytes(e.layout));
        CHECK(report.fanned_bytes < report.bytes);
        __atomic_add_fetch(&s->board->number[s->rank], (int64_t)report.fanned_bytes,
                           __ATOMIC_SEQ_CST);
        meet(e.context, "updated", s);
    }
    meet(e.context, "over", s);
    engine_close(&e);
}

/* All of the engines' shares come to about one upload of everything. */
static void run_shared(scene *s, double least)
{
    int64_t fanned = 0;
    run_scene(s, sharing_engine);
    for (uint32_t i = 0; i < s->tp * s->groups; i++)
        fanned += s->board->number[i];
    uint64_t all = 0;
    for (uint32_t i = 0; i < s->tp; i++) {
        dray_layout *layout;
        dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
        spec.tp = s->tp;
        spec.tp_rank = i;
        spec.dtype = (int32_t)s->to;
        assert_int_equal(dray_layout_engine(&s->config, &spec, &layout, NULL), 0);
        all += dray_layout_bytes(layout);
        dray_layout_free(layout);
    }
    double part = (double)fanned / (double)(all * s->groups * s->versions);
    if (part < least)
        fprintf(stderr, "%.3f of the bytes were taken from other GPUs\n", part);
    assert_true(part >= least);
    munmap(s->board, sizeof(board));
}

CLUSTER_TEST(test_replicas)
{
    scene s = wide(41);
    run_shared(&s, 0.25); /* one update in two at least met in time */
    s = wide(42);
    s.no_checksums = 1; /* nothing to compare with: sums of both ends */
    s.versions = 2;
    run_shared(&s, 0.2);
}

/* Engines that updated by themselves before. */
CLUSTER_TEST(test_joining)
{
    scene s = wide(49);
    apart_first = true;
    run_shared(&s, 0.1);
}

/* What is no progress is not read; these ranks' shares are uploaded by the others, too. */
CLUSTER_TEST(test_odd_progress)
{
    scene s = wide(50);
    s.versions = 2;
    odd_progress = true;
    run_shared(&s, 0);
}

/* Ranks of one engine on one GPU each, of whom two have the same KV heads. */
CLUSTER_TEST(test_same_in_a_group)
{
    scene s = wide(43);
    s.groups = 1;
    s.tp = 4;
    s.config.head_dim = 128;
    s.config.hidden_size = 512;
    s.versions = 2;
    run_shared(&s, 0.01);
}

/* What is converted on the way is uploaded by everyone. */
CLUSTER_TEST(test_converted)
{
    scene s = wide(44);
    s.from = DRAY_F32;
    s.versions = 2;
    run_shared(&s, 0);
}

/* ---- those who fail ---------------------------------------------------------------------------
 */

static const char *bad_step;
static int bad_signal;

static void fail_self(void *user, const char *step)
{
    const scene *s = user;
    if (strcmp(step, bad_step) != 0 || s->board->flag[WRONG_STEP])
        return;
    raise_flag(s->board, WRONG_STEP);
    if (bad_signal)
        kill(getpid(), bad_signal);
    else
        gpu_fail("cuStreamCreate:1+:2"); /* nothing can be compiled any more */
}

static void patient_trainer(void *user)
{
    scene *s = user;
    trainer t;
    choose(s, s->trainer_gpus[s->rank]);
    gpu_trainer_open(&t, f.unix_address, &s->config, s->from, s->rank, s->world, s->seed, s->source,
                     s->no_checksums);
    while (__atomic_load_n(&s->board->number[ASKING], __ATOMIC_SEQ_CST) < 4)
        usleep(1000);
    usleep(60000);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    while (__atomic_load_n(&s->board->number[ENDED], __ATOMIC_SEQ_CST) < 2)
        usleep(1000);
    trainer_close(&t);
}

/* Of four ranks the last one fails; the engine that it is of may be torn, the other one is not. */
static void failing_engine(void *user)
{
    scene *s = user;
    engine e;
    bool first = s->rank < s->tp;
    choose(s, s->engine_gpus[s->rank]);
    gpu_engine_open(&e, f.unix_address, &s->config, s->from, s->to, first ? "whole" : "torn",
                    s->rank % s->tp, s->tp, DRAY_REGION_CUDA);
    if (s->rank == 3)
        dray__hook_set(fail_self, s);
    __atomic_add_fetch(&s->board->number[ASKING], 1, __ATOMIC_SEQ_CST);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    dray_error said;
    options.no_peers = 1;
    int rc = dray_update_weights(e.subscriber, &options, &report, &said);
    if (first) {
        if (rc)
            fprintf(stderr, "%s\n", said.message);
        CHECK(rc == 0 && gpu_engine_wrong(&e, s->seed) == 0);
        if (bad_signal == SIGSTOP && report.held_ns > DRAY__SECOND)
            CHECK(strcmp(report.held_by, "torn-1") == 0);
        __atomic_add_fetch(&s->board->number[ENDED], 1, __ATOMIC_SEQ_CST);
    } else if (!bad_signal) {
        CHECK(rc); /* its other rank says so, too */
    }
    engine_close(&e);
}

static void run_failing(uint64_t seed, const char *step, int number)
{
    scene s = wide(seed);
    pid_t pids[6];
    bad_step = step;
    bad_signal = number;
    for (uint32_t i = 0; i < 6; i++) {
        s.rank = i < 2 ? i : i - 2;
        pids[i] = spawn(i < 2 ? patient_trainer : failing_engine, &s);
    }
    all_end_well(pids, 4);
    if (bad_signal) {
        kill(pids[5], SIGKILL);
        end_of(pids[5]);
        end_of(pids[4]);
    } else {
        must_end_well(pids[5]);
        must_end_well(pids[4]);
    }
    munmap(s.board, sizeof(board));
}

CLUSTER_TEST(test_killed)
{
    run_failing(45, "writing", SIGKILL);
    run_failing(46, "moving", SIGKILL);
}

CLUSTER_TEST(test_stopped)
{
    run_failing(47, "writing", SIGSTOP);
}

CLUSTER_TEST(test_out_of_memory)
{
    if (gpu_is_real())
        skip();
    run_failing(48, "import", 0);
}

int main(void)
{
    scenes_begin();
    return cluster_run();
}
