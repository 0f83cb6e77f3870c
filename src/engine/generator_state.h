/* The declarations that the generator's files share. */
#pragma once

#include "engine/generator.h"
#include "engine/model.h"

struct dray__generator {
    dray_layout *layout;
    dray_region **regions;
    uint32_t region_count;
    dray__model model;
    dray__state state; /* of the last forward pass */
};
