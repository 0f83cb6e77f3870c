/* The model of an engine in a subscriber's memory, whole responses, and scores. */
#include "engine/generator.h"

#include "base/error.h"
#include "engine/generator_state.h"
#include "engine/sampler.h"

#include <dray/weights.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

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

const dray_model_config *dray__generator_config(const dray__generator *g)
{
    return &g->model.config;
}

void dray__generator_pace(dray__generator *g, const dray__pace *pace)
{
    g->model.pace = pace;
}

int dray__generator_load(dray__generator *g, const char *directory, dray_error *error)
{
    return dray_checkpoint_read(directory, g->layout, g->regions, error);
}

/* ---- whole responses ------------------------------------------------------------------------- */

int dray__generate(dray__generator *g, const dray__generate_options *o, dray__generation *out,
                   dray_error *error)
{
    if (o->size != sizeof *o)
        return dray__fail(error, DRAY_EINVALID, "generate: options of %zu bytes, expected %zu",
                          o->size, sizeof *o);
    dray__sampler_options options = DRAY__SAMPLER_OPTIONS_INIT;
    options.slots = o->rows;
    options.seed = o->seed;
    options.temperature = o->temperature;
    options.eos_token = o->eos_token;
    uint64_t *streams = malloc((o->rows + (size_t)1) * sizeof *streams);
    uint32_t *slots = malloc((o->rows + (size_t)1) * sizeof *slots);
    dray__sampler *sampler = NULL;
    int code =
        streams && slots ? dray__sampler_open(g, &options, &sampler, error) : dray__nomem(error);
    for (uint32_t row = 0; code == DRAY_OK && row < o->rows; row++)
        streams[row] = o->streams ? o->streams[row] : row;
    dray__sampler_rows rows = {.rows = {.rows = o->rows, .prompt = o->prompt},
                               .streams = streams,
                               .max_new_tokens = o->max_new_tokens,
                               .row_max_new_tokens = o->row_max_new_tokens};
    if (code == DRAY_OK)
        code = dray__sampler_add(sampler, &rows, slots, error);
    while (code == DRAY_OK && dray__sampler_running(sampler) > 0)
        code = dray__sampler_step(sampler, error);
    if (code == DRAY_OK)
        code = dray__sampler_collect(sampler, slots, o->rows, out, error);
    dray__sampler_close(sampler);
    free(streams);
    free(slots);
    return code;
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

int dray__generator_logits(dray__generator *g, const int32_t *tokens, uint64_t count, float *out,
                           dray_error *error)
{
    const dray__model *m = &g->model;
    uint64_t offsets[2] = {0, count}, pieces[DRAY__GROUP_MAX_WORLD];
    dray__sequences sequence = {1, {tokens, offsets}, {tokens, (uint64_t[2]){0, 0}}, NULL};
    int code = dray__sequences_check(&m->config, &sequence, error);
    if (code == DRAY_OK)
        code = dray__model_reach(&g->model, (int64_t)count, error);
    dray__batch batch = {.rows = 1, .tokens = (int64_t)count, .ids = tokens, .offsets = offsets};
    if (code == DRAY_OK)
        code = dray__forward(m, &batch, NULL, &g->state, error);
    if (code != DRAY_OK)
        return code;
    if (!m->group) {
        dray__head(m, g->state.hidden, batch.tokens, out);
        return DRAY_OK;
    }
    size_t width = (size_t)m->config.vocab_size, row = (size_t)m->vocab_rows * sizeof(float);
    float *own = malloc(count * row + 1), *all = malloc(count * width * sizeof *all + 1);
    if (own && all) {
        dray__head(m, g->state.hidden, batch.tokens, own);
        dray__model_shares(m, pieces);
        for (uint32_t rank = 0; rank < m->world; rank++)
            pieces[rank] *= count * sizeof *all;
        code = dray__group_all_gather(m->group, own, pieces, all, DRAY_WAIT_DEFAULT, error);
    } else {
        code = dray__nomem(error);
    }
    size_t column = 0, at = 0;
    for (uint32_t rank = 0; code == DRAY_OK && rank < m->world; rank++) {
        size_t columns = pieces[rank] / (count * sizeof *all);
        for (uint64_t i = 0; i < count; i++, at += columns)
            memcpy(out + i * width + column, all + at, columns * sizeof *out);
        column += columns;
    }
    free(own);
    free(all);
    return code;
}
