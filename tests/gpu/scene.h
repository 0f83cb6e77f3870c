/* Trainers and engines of a test, each a process on a chosen GPU: their settings, and the rounds in
 * which they publish and update. */
#pragma once

#include "gpu/weights.h"
#include "suite.h"

#include <stdint.h>

enum { GPUS = 6 };

static uint32_t gpus; /* the number of GPUs; larger GPU numbers are taken modulo it */

typedef struct scene {
    dray_model_config config;
    dray_dtype from, to;
    dray_region_kind source, destination;
    uint32_t world, tp, groups, versions;
    uint32_t trainer_gpus[8], engine_gpus[8];
    uint64_t pause_us; /* before each publish, while the engines begin to ask for the version */
    int32_t no_checksums;
    int32_t staging; /* the kind of memory of prefetched weights; 0 means the GPU's */
    bool strategies; /* engines use all strategies, one after the other */
    bool sees_all;   /* a process sees all GPUs, its own first */
    uint64_t seed;
    board *board;
    uint32_t rank;
} scene;

static inline uint32_t ranks_of(const scene *s)
{
    return s->world + s->tp * s->groups;
}

static inline void meet(dray_context *context, const char *where, const scene *s)
{
    MUST(dray_barrier(context, where, ranks_of(s), DRAY_WAIT_DEFAULT, error));
}

/* Chooses the GPU of this process, which is the only one that it sees, or the first. */
static inline void choose(const scene *s, uint32_t gpu)
{
    char list[64];
    size_t used = (size_t)snprintf(list, sizeof list, "%u", gpu % gpus);
    for (uint32_t i = 0; i < gpus && s->sees_all; i++)
        if (i != gpu % gpus)
            used += (size_t)snprintf(list + used, sizeof list - used, ",%u", i);
    see(list);
}

static inline void run_trainer(void *user)
{
    scene *s = user;
    trainer t;
    choose(s, s->trainer_gpus[s->rank]);
    gpu_trainer_open(&t, f.unix_address, &s->config, s->from, s->rank, s->world, s->seed, s->source,
                     s->no_checksums);
    for (uint64_t version = 1; version <= s->versions; version++) {
        uint32_t dropped = 9;
        if (s->pause_us) {
            meet(t.context, "about to ask", s);
            usleep((useconds_t)s->pause_us);
        }
        MUST(dray_publisher_publish(t.publisher, version, NULL, error));
        meet(t.context, "updated", s);
        MUST(dray_publisher_wait(t.publisher, version, DRAY_WAIT_DEFAULT, &dropped, error));
        CHECK(dropped == 0);
        gpu_fill(t.layout, t.region[0], t.tied, s->seed + version);
    }
    meet(t.context, "over", s);
    trainer_close(&t);
}

/* Opens this process's rank of one of the engines. */
static inline engine scene_engine(const scene *s)
{
    engine e;
    char group[16];
    choose(s, s->engine_gpus[s->rank]);
    snprintf(group, sizeof group, "engine-%u", s->rank / s->tp);
    gpu_engine_open(&e, f.unix_address, &s->config, s->from, s->to, group, s->rank % s->tp, s->tp,
                    s->destination);
    return e;
}

static inline void run_scene(scene *s, void (*engine_body)(void *scene))
{
    RUN_ROLES(s, &s->rank, {run_trainer, s->world}, {engine_body, s->tp * s->groups});
}

static inline scene plain(uint64_t seed)
{
    return (scene){.config = small_config(seed % 2, seed),
                   .from = DRAY_BF16,
                   .to = DRAY_BF16,
                   .source = DRAY_REGION_CUDA,
                   .destination = DRAY_REGION_CUDA,
                   .world = 2,
                   .tp = 2,
                   .groups = 1,
                   .versions = 4,
                   .trainer_gpus = {0, 1, 0, 1},
                   .engine_gpus = {0, 1, 0, 1},
                   .strategies = true,
                   .seed = seed};
}

/* Runs the trainers, and `ranks` ranks of an engine. */
static inline void run_with_trainers(scene *s, uint32_t ranks, void (*engine_body)(void *scene))
{
    RUN_ROLES(s, &s->rank, {run_trainer, s->world}, {engine_body, ranks});
}

/* Prepares the processes of cmocka's tests. With the fake driver, they see six GPUs. */
static inline void scenes_begin(void)
{
    gpu_begin(1);
    gpus = gpu_is_real() ? (uint32_t)gpu_real_count() : GPUS;
    if (!gpu_is_real())
        setenv("FAKE_CUDA_DEVICES", "6", 1);
    cmocka_set_test_filter(getenv("DRAY_TEST_ONLY")); /* NULL means all */
}
