/* The trainer's state on disk: Hugging Face checkpoints, and beside them the optimiser's moments as
 * tensors "exp_avg.NAME" and "exp_avg_sq.NAME" (torch.optim.AdamW's words) and "step". All of it is
 * written whole, so that it can be read in any world. */
#include "engine/trainer_state.h"

#include "base/error.h"

#include <dray/weights.h>

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PARAMETER, MOMENT, MOMENT_SQUARE, KINDS };
static const char *const prefixes[KINDS] = {"", "exp_avg.", "exp_avg_sq."};

/* A layout over plain memory, and its regions. */
typedef struct memory {
    dray_layout *layout;
    dray_region *regions[KINDS + 1];
    uint32_t count;
} memory;

static void memory_free(memory *m)
{
    for (uint32_t i = 0; i < m->count; i++)
        dray_region_free(m->regions[i]);
    dray_layout_free(m->layout);
}

static int add_region(memory *m, void *base, uint64_t bytes, uint32_t *index, dray_error *error)
{
    dray_region_info info = {.kind = DRAY_REGION_HOST, .bytes = bytes, .name = "trainer"};
    int code = DRAY_OK;
    if (!m->layout)
        code = dray_layout_new(&m->layout, error);
    if (code == DRAY_OK)
        code = dray_layout_add_region(m->layout, &info, index, error);
    if (code == DRAY_OK)
        code = dray_region_wrap(base, bytes, info.name, &m->regions[m->count], error);
    m->count += code == DRAY_OK;
    return code;
}

/* Adds all parameters under `prefix` at `base`: whole, as they lie in the whole model; or this
 * rank's pieces, as they lie among the shards. */
static int add_parameters(const dray__trainer *t, memory *m, const char *prefix, float *base,
                          bool whole, dray_error *error)
{
    uint64_t floats = whole ? t->whole_floats : t->shard_floats;
    uint32_t region = 0;
    int code = DRAY_OK;
    if (floats > 0)
        code = add_region(m, base, floats * sizeof *base, &region, error);
    for (uint32_t i = 0; code == DRAY_OK && i < t->piece_count; i++) {
        const dray__piece *piece = &t->pieces[i];
        const dray_tensor_info *tensor = dray_layout_tensor(t->layout, piece->tensor);
        char name[512];
        uint32_t index;
        int64_t start[DRAY_MAX_DIMS] = {0}, extent[DRAY_MAX_DIMS] = {0};
        snprintf(name, sizeof name, "%s%s", prefix, tensor->name);
        code = dray_layout_add_tensor(m->layout, name, DRAY_F32, tensor->ndim, tensor->shape,
                                      &index, error);
        uint64_t count = piece->counts[t->rank], row = 1;
        if (code != DRAY_OK || (!whole && count == 0))
            continue;
        for (uint32_t j = 0; j < tensor->ndim; j++) {
            extent[j] = tensor->shape[j];
            row *= j > 0 ? (uint64_t)tensor->shape[j] : 1;
        }
        if (!whole) {
            start[0] = (int64_t)(piece->start / row);
            extent[0] = (int64_t)(count / row);
        }
        code = dray_layout_add_dense(m->layout, index, region, start, extent,
                                     (whole ? piece->whole : piece->shard) * sizeof *base, error);
    }
    return code;
}

static int add_step(memory *m, int64_t *step, dray_error *error)
{
    uint32_t region, index;
    int64_t none[DRAY_MAX_DIMS] = {0};
    int code = add_region(m, step, sizeof *step, &region, error);
    if (code == DRAY_OK)
        code = dray_layout_add_tensor(m->layout, "step", DRAY_I64, 0, none, &index, error);
    if (code == DRAY_OK)
        code = dray_layout_add_dense(m->layout, index, region, none, none, 0, error);
    return code;
}

/* ---- writing --------------------------------------------------------------------------------- */

static int optimizer_path(const char *directory, char *path, dray_error *error)
{
    int length = snprintf(path, PATH_MAX, "%s/optimizer", directory);
    if (length < 0 || length >= PATH_MAX)
        return dray__fail(error, DRAY_EINVALID, "%.200s: path too long", directory);
    return DRAY_OK;
}

static int write_model(dray__trainer *t, const char *directory, dray_error *error)
{
    char *config;
    int code = dray__engine_config_json(&t->config, t->options.eos_token, &config, error);
    if (code != DRAY_OK)
        return code;
    memory m = {0};
    code = add_parameters(t, &m, "", dray_region_base(t->whole_region), true, error);
    if (code == DRAY_OK)
        code = dray_checkpoint_write(directory, m.layout, m.regions, config, error);
    memory_free(&m);
    free(config);
    return code;
}

/* All ranks gather; the first one writes. */
int dray__trainer_write_model(dray__trainer *t, const char *directory, dray_error *error)
{
    int code = DRAY_OK;
    if (!t->gathered)
        code = dray__trainer_gather(t, t->shard, dray_region_base(t->whole_region), error);
    if (code != DRAY_OK)
        return code;
    t->gathered = true;
    if (t->rank == 0)
        code = write_model(t, directory, error);
    return dray__trainer_agree(t, code, error);
}

static int write_optimizer(dray__trainer *t, const char *directory, float *const *moments,
                           dray_error *error)
{
    char path[PATH_MAX];
    memory m = {0};
    int64_t step = (int64_t)t->steps;
    int code = optimizer_path(directory, path, error);
    for (int kind = MOMENT; code == DRAY_OK && kind < KINDS; kind++)
        code = add_parameters(t, &m, prefixes[kind], moments[kind], true, error);
    if (code == DRAY_OK)
        code = add_step(&m, &step, error);
    if (code == DRAY_OK)
        code = dray_checkpoint_write(path, m.layout, m.regions, NULL, error);
    memory_free(&m);
    return code;
}

int dray__trainer_save(dray__trainer *t, const char *directory, dray_error *error)
{
    int code = dray__trainer_write_model(t, directory, error);
    if (code != DRAY_OK)
        return code;
    float *wholes[KINDS] = {NULL, calloc(t->whole_floats + 1, sizeof(float)),
                            calloc(t->whole_floats + 1, sizeof(float))};
    code = wholes[MOMENT] && wholes[MOMENT_SQUARE] ? DRAY_OK : dray__nomem(error);
    code = dray__trainer_agree(t, code, error);
    if (code == DRAY_OK)
        code = dray__trainer_gather(t, t->moment, wholes[MOMENT], error);
    if (code == DRAY_OK)
        code = dray__trainer_gather(t, t->moment_square, wholes[MOMENT_SQUARE], error);
    if (code == DRAY_OK) {
        if (t->rank == 0)
            code = write_optimizer(t, directory, wholes, error);
        code = dray__trainer_agree(t, code, error);
    }
    free(wholes[MOMENT]);
    free(wholes[MOMENT_SQUARE]);
    return code;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Reads this rank's pieces of the parameters, or of both moments and the step. */
static int read_pieces(dray__trainer *t, const char *directory, float *const *to, int first,
                       int last, int64_t *step, dray_error *error)
{
    memory m = {0};
    int code = DRAY_OK;
    for (int kind = first; code == DRAY_OK && kind <= last; kind++)
        code = add_parameters(t, &m, prefixes[kind], to[kind], false, error);
    if (code == DRAY_OK && step)
        code = add_step(&m, step, error);
    if (code == DRAY_OK && m.layout)
        code = dray_checkpoint_read(directory, m.layout, m.regions, error);
    memory_free(&m);
    if (code == DRAY_OK && step && *step < 0)
        code = dray__fail(error, DRAY_EFORMAT, "%.300s: step %" PRId64, directory, *step);
    return code;
}

/* Everything is read aside first: a checkpoint that any rank cannot read changes nothing. */
static int read_state(dray__trainer *t, const char *directory, bool optimizer, dray_error *error)
{
    float *aside[KINDS] = {0};
    int64_t step = 0;
    int code = DRAY_OK;
    for (int kind = 0; kind < KINDS; kind++) {
        aside[kind] = calloc(t->shard_floats + 1, sizeof(float));
        if (!aside[kind])
            code = dray__nomem(error);
    }
    char path[PATH_MAX];
    if (code == DRAY_OK)
        code = read_pieces(t, directory, aside, PARAMETER, PARAMETER, NULL, error);
    if (code == DRAY_OK && optimizer) {
        code = optimizer_path(directory, path, error);
        if (code == DRAY_OK)
            code = read_pieces(t, path, aside, MOMENT, MOMENT_SQUARE, &step, error);
    }
    code = dray__trainer_agree(t, code, error);
    float *const to[KINDS] = {t->shard, t->moment, t->moment_square};
    for (int kind = 0; kind < KINDS; kind++) {
        if (code == DRAY_OK && aside[kind])
            memcpy(to[kind], aside[kind], t->shard_floats * sizeof(float));
        free(aside[kind]);
    }
    if (code != DRAY_OK)
        return code;
    t->steps = (uint64_t)step;
    t->gathered = false;
    dray__trainer_discard(t);
    return DRAY_OK;
}

int dray__trainer_load(dray__trainer *t, const char *directory, dray_error *error)
{
    return read_state(t, directory, false, error);
}

int dray__trainer_restore(dray__trainer *t, const char *directory, dray_error *error)
{
    return read_state(t, directory, true, error);
}
