/* What a family is read from. All of it must stay as long as the family is used. */
#pragma once

#include "base/arena.h"
#include "base/json.h"
#include "model/families/family.h"

typedef struct dray__family_source {
    const char *name, *path;
    const json_t *json, *parts; /* what the file says, and what parts.json says */
    dray__arena *arena;
} dray__family_source;

/* DRAY_EFORMAT: something is not as it should be; the message says what, and *out is as it was. */
int dray__family_read(const dray__family_source *source, dray__family *out, dray_error *error);
