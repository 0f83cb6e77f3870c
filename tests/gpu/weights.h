/* Trainers and engines with memory on GPUs. The oracle is that of tests/weights/cluster.h, on a
 * copy in host memory. */
#pragma once

#include "gpu/gpu.h"
#include "memory/cuda_library.h"
#include "memory/region.h"
#include "weights/cluster.h"

#include <dray/gpu.h>

/* Makes these GPUs, such as "0" or "1,3", the only ones that the child sees. It must be called
 * before the first call of the library. */
static inline void see(const char *gpus)
{
    setenv("CUDA_VISIBLE_DEVICES", gpus, 1);
}

static inline void see_one(uint32_t gpu)
{
    char text[12];
    snprintf(text, sizeof text, "%u", gpu);
    see(text);
}

static inline void copy_region(dray_region *region, dray_region *host, bool up)
{
    const dray__cuda *cuda = dray__cuda_get(NULL);
    CHECK(cuda);
    if (region->base) {
        memcpy(up ? (void *)region->base : dray_region_base(host),
               up ? dray_region_base(host) : (void *)region->base, region->bytes);
        return;
    }
    MUST(dray__cuda_enter(region->device, error));
    CUresult result =
        up ? cuda->cuMemcpyHtoD(region->device_address, dray_region_base(host), region->bytes)
           : cuda->cuMemcpyDtoH(dray_region_base(host), region->device_address, region->bytes);
    CHECK(result == CUDA_SUCCESS);
    CHECK(cuda->cuCtxSynchronize() == CUDA_SUCCESS); /* pageable copies may return before the end */
    dray__cuda_leave();
}

static inline dray_region *mirror_of(const dray_region *region)
{
    dray_region *host;
    MUST(dray_region_alloc(DRAY_REGION_HOST, dray_region_bytes(region), "mirror", &host, error));
    return host;
}

/* Do the same as fill, poison and wrong_elements, for layouts with one region. */
static inline void gpu_fill(const dray_layout *layout, dray_region *region, bool tied,
                            uint64_t seed)
{
    dray_region *host = mirror_of(region);
    fill(layout, &host, tied, seed);
    copy_region(region, host, true);
    dray_region_free(host);
}

static inline void gpu_poison(dray_region *region)
{
    dray_region *host = mirror_of(region);
    memset(dray_region_base(host), 0xA5, dray_region_bytes(host));
    copy_region(region, host, true);
    dray_region_free(host);
}

static inline uint64_t gpu_wrong(const dray_layout *layout, dray_region *region, bool tied,
                                 uint64_t seed, int from)
{
    dray_region *host = mirror_of(region);
    copy_region(region, host, false);
    uint64_t wrong = wrong_elements(layout, &host, tied, seed, from);
    dray_region_free(host);
    return wrong;
}

/* ---- ranks ----------------------------------------------------------------------------------- */

static inline void gpu_trainer_open(trainer *t, const char *address,
                                    const dray_model_config *config, dray_dtype dtype,
                                    uint32_t rank, uint32_t world, uint64_t seed,
                                    dray_region_kind kind, int32_t no_checksums)
{
    char name[32];
    snprintf(name, sizeof name, "trainer-%u", rank);
    memset(t, 0, sizeof *t);
    t->tied = config->tied;
    t->context = fixture_open_at(address, name, "trainer", rank);
    MUST(dray_layout_fsdp(config, dtype, rank, world, kind, &t->layout, error));
    MUST(dray_regions_for_layout(t->layout, 1, t->region, error));
    gpu_fill(t->layout, t->region[0], t->tied, seed);
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    options.regions = t->region;
    options.rank = rank;
    options.world = world;
    options.no_checksums = no_checksums;
    MUST(dray_publisher_open(t->context, MODEL, t->layout, &options, &t->publisher, error));
}

/* `staging` is that of dray_subscriber_options. */
static inline void gpu_engine_open_staged(engine *e, const char *address,
                                          const dray_model_config *config, dray_dtype from,
                                          dray_dtype dtype, const char *group, uint32_t rank,
                                          uint32_t tp, dray_region_kind kind, int32_t staging)
{
    char name[64];
    snprintf(name, sizeof name, "%s-%u", group, rank);
    memset(e, 0, sizeof *e);
    e->tied = config->tied;
    e->from = (int)from;
    e->context = fixture_open_at(address, name, "engine", rank);
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    spec.tp = tp;
    spec.tp_rank = rank;
    spec.dtype = (int32_t)dtype;
    spec.kind = kind;
    MUST(dray_layout_engine(config, &spec, &e->layout, error));
    MUST(dray_regions_for_layout(e->layout, 1, e->region, error));
    gpu_poison(e->region[0]);
    engine_subscribe(e, group, rank, tp, staging);
}

static inline void gpu_engine_open(engine *e, const char *address, const dray_model_config *config,
                                   dray_dtype from, dray_dtype dtype, const char *group,
                                   uint32_t rank, uint32_t tp, dray_region_kind kind)
{
    gpu_engine_open_staged(e, address, config, from, dtype, group, rank, tp, kind, 0);
}

static inline uint64_t gpu_engine_wrong(const engine *e, uint64_t seed)
{
    return gpu_wrong(e->layout, e->region[0], e->tied, seed, e->from);
}
