/* The load_weights of an engine. As in real engines, it finds each tensor by its name and copies
 * the part that the rank holds, in host memory or on a GPU. */
#pragma once

#include <dray/load.h>
#include <dray/memory.h>
#include <stdbool.h>

typedef struct bench_loader bench_loader;

/* Makes the loader of one rank. Layout and regions are borrowed. With `cuda`, the regions and the
 * buckets are memory of the first region's GPU. */
int bench_loader_new(const dray_layout *layout, dray_region *const *regions, bool cuda,
                     bench_loader **out, dray_error *error);
/* A dray_load_fn whose user is the loader. */
int bench_load(void *loader, const dray_load_bucket *bucket, dray_error *error);
