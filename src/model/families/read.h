/* The source of a family. It must outlive the family. */
#pragma once

#include "base/arena.h"
#include "base/json.h"
#include "model/families/family.h"

typedef struct dray__family_source {
    const char *name, *path;
    const json_t *json, *parts; /* the family's file, and parts.json */
    dray__arena *arena;
} dray__family_source;

/* Returns 0, or DRAY_EFORMAT with a message that names the mistake; *out is then unchanged. */
int dray__family_read(const dray__family_source *source, dray__family *out, dray_error *error);
