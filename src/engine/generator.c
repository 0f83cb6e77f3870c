/* The generator: an engine's model in memory that a subscriber updates, and log-probs. */
#include "engine/generator.h"

#include "base/error.h"
#include "engine/generator_state.h"

#include <dray/weights.h>

#include <math.h>
#include <stdlib.h>

int dray__generator_open(const dray_model_config *config, dray__group *group, dray__generator **out,
                         dray_error *error)
{
    int code = dray__engine_config_check(config, error);
    if (code == DRAY_OK && config->labels)
        code = dray__fail(error, DRAY_EUNSUPPORTED,
                          "a generator expects a language model, found a value model");
    if (code != DRAY_OK)
        return code;
    dray__generator *g = calloc(1, sizeof *g);
    if (!g)
        return dray__nomem(error);
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    spec.tp = group ? dray__group_world(group) : 1;
    spec.tp_rank = group ? dray__group_rank(group) : 0;
    spec.dtype = DRAY_F32;
    code = dray_layout_engine(config, &spec, &g->layout, error);
    if (code == DRAY_OK) {
        uint32_t count = dray_layout_region_count(g->layout);
        g->regions = calloc(count, sizeof(dray_region *));
        code = g->regions ? dray_regions_for_layout(g->layout, 1, g->regions, error)
                          : dray__nomem(error);
        g->region_count = code == DRAY_OK ? count : 0;
    }
    if (code == DRAY_OK)
        code = dray__model_open(config, group, dray_region_base(g->regions[0]), &g->model, error);
    if (code == DRAY_OK)
        *out = g;
    else
        dray__generator_close(g);
    return code;
}

void dray__generator_close(dray__generator *g)
{
    if (!g)
        return;
    dray__state_free(&g->state);
    dray__model_close(&g->model);
    for (uint32_t i = 0; i < g->region_count; i++)
        dray_region_free(g->regions[i]);
    free(g->regions);
    dray_layout_free(g->layout);
    free(g);
}

const dray_layout *dray__generator_layout(const dray__generator *g)
{
    return g->layout;
}

dray_region *const *dray__generator_regions(const dray__generator *g)
{
    return g->regions;
}

void dray__generator_pace(dray__generator *g, const dray__pace *pace)
{
    g->model.pace = pace;
}

int dray__generator_load(dray__generator *g, const char *directory, dray_error *error)
{
    return dray_checkpoint_read(directory, g->layout, g->regions, error);
}

void dray__generation_free(dray__generation *generation)
{
    free(generation->offsets);
    free(generation->tokens);
    free(generation->logprobs);
    free(generation->finish);
    *generation = (dray__generation){0};
}

/* ---- scores ---------------------------------------------------------------------------------- */

int dray__generator_logprobs(dray__generator *g, const dray__sequences *sequences,
                             double temperature, float *logprobs, float *entropy, dray_error *error)
{
    if (!(temperature > 0) || isinf(temperature))
        return dray__fail(error, DRAY_EINVALID, "log-probs: temperature %g", temperature);
    int code = dray__sequences_check(&g->model.config, sequences, error);
    if (code == DRAY_OK)
        code = dray__model_reach(&g->model, dray__sequences_longest(sequences), error);
    if (code != DRAY_OK)
        return code;
    return dray__score(&g->model, &g->state, sequences, 0, sequences->rows, temperature, logprobs,
                       entropy, error);
}
