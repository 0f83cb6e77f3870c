/* An engine's own load_weights, as engines have it: finds each tensor that comes by its name, and
 * copies the part that is its own, in host memory or on a GPU. */
#pragma once

#include <dray/load.h>
#include <dray/memory.h>
#include <stdbool.h>

typedef struct bench_loader bench_loader;

/* Of one rank: layout and regions are borrowed. cuda: memory of the GPU of the first region, where
 * the buckets are, too. */
int bench_loader_new(const dray_layout *layout, dray_region *const *regions, bool cuda,
                     bench_loader **out, dray_error *error);
/* A dray_load_fn whose user is the loader. */
int bench_load(void *loader, const dray_load_bucket *bucket, dray_error *error);
