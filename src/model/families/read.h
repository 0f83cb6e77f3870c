/* The source of a family. All of it must stay as long as the family is used. */
#pragma once

#include "base/arena.h"
#include "base/json.h"
#include "model/families/family.h"

typedef struct dray__family_source {
    const char *name, *path;
    const json_t *json, *parts; /* the family's file, and parts.json */
    dray__arena *arena;
} dray__family_source;

/* Returns 0, or DRAY_EFORMAT when something is wrong; the message has it, and *out is unchanged. */
int dray__family_read(const dray__family_source *source, dray__family *out, dray_error *error);
