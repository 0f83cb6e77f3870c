/* The trainer's state on disk: Hugging Face checkpoints, and beside them, in optimizer/, the
 * optimiser's moments as tensors "exp_avg.NAME" and "exp_avg_sq.NAME" (torch.optim.AdamW's words)
 * and "step". Each rank writes its own pieces; a state can be read in any world. */
#include "engine/trainer_state.h"

#include "base/error.h"

#include <dray/weights.h>

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OPTIMIZER "optimizer" /* the folder */

enum { PARAMETER, MOMENT, MOMENT_SQUARE, KINDS };
enum { PARTS_MOST = 2 /* the optimiser's part, and one of the caller's */ };
static const char *const prefixes[KINDS] = {"", "exp_avg.", "exp_avg_sq."};

/* A layout over plain memory, and its regions. */
typedef struct state_memory {
    dray_layout *layout;
    dray_region *regions[KINDS + 1];
    uint32_t count;
} state_memory;

static void memory_free(state_memory *m)
{
    for (uint32_t i = 0; i < m->count; i++)
        dray_region_free(m->regions[i]);
    dray_layout_free(m->layout);
}

static int add_region(state_memory *m, void *base, uint64_t bytes, uint32_t *index,
                      dray_error *error)
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

enum { WHOLE, TRUNK /* without a value model's head */ };

/* Adds this rank's pieces of the parameters under `prefix`, which are at `base` like its shards. */
static int add_parameters(const dray__trainer *t, state_memory *m, const char *prefix, float *base,
                          int which, dray_error *error)
{
    uint32_t region = 0;
    int code = DRAY_OK;
    if (t->shard_floats > 0)
        code = add_region(m, base, t->shard_floats * sizeof *base, &region, error);
    for (uint32_t i = 0; code == DRAY_OK && i < t->piece_count; i++) {
        const dray__shard_piece *piece = &t->pieces[i];
        const dray_tensor_info *tensor = dray_layout_tensor(t->layout, piece->tensor);
        char name[512];
        uint32_t index;
        int64_t start[DRAY_MAX_DIMS] = {0}, extent[DRAY_MAX_DIMS] = {0};
        if (which == TRUNK && dray__is_score(tensor->name))
            continue;
        snprintf(name, sizeof name, "%s%s", prefix, tensor->name);
        code = dray_layout_add_tensor(m->layout, name, DRAY_F32, tensor->ndim, tensor->shape,
                                      &index, error);
        uint64_t count = piece->counts[t->rank], row = 1;
        if (code != DRAY_OK || count == 0)
            continue;
        for (uint32_t j = 0; j < tensor->ndim; j++) {
            extent[j] = tensor->shape[j];
            row *= j > 0 ? (uint64_t)tensor->shape[j] : 1;
        }
        start[0] = (int64_t)(piece->start / row);
        extent[0] = (int64_t)(count / row);
        code = dray_layout_add_dense(m->layout, index, region, start, extent,
                                     piece->shard * sizeof *base, error);
    }
    return code;
}

static int add_step(state_memory *m, int64_t *step, dray_error *error)
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

/* Adds the moments and the step, with the ranks' pieces. */
static int add_optimizer(const dray__trainer *t, state_memory *m, float *const *pieces,
                         int64_t *step, dray_error *error)
{
    int code = DRAY_OK;
    for (int kind = MOMENT; code == DRAY_OK && kind < KINDS; kind++)
        code = add_parameters(t, m, prefixes[kind], pieces[kind], WHOLE, error);
    return code == DRAY_OK ? add_step(m, step, error) : code;
}

/* ---- writing --------------------------------------------------------------------------------- */

int dray__trainer_save(dray__trainer *t, dray_context *context, const char *directory,
                       const dray_checkpoint_options *how, bool optimizer, dray_error *error)
{
    dray_checkpoint_options options = *how;
    dray_checkpoint_part parts[PARTS_MOST];
    uint32_t count = how->part_count < PARTS_MOST ? how->part_count : PARTS_MOST - 1;
    float *const pieces[KINDS] = {t->shard, t->moment, t->moment_square};
    int64_t step = (int64_t)t->steps;
    state_memory m = {0};
    char *config = NULL;
    int code = dray__engine_config_json(&t->config, t->options.eos_token, &config, error);
    if (code == DRAY_OK && optimizer)
        code = add_optimizer(t, &m, pieces, &step, error);
    for (uint32_t i = 0; i < count; i++)
        parts[i] = how->parts[i];
    if (optimizer)
        parts[count++] = (dray_checkpoint_part){OPTIMIZER, m.layout, m.regions};
    options.rank = t->rank;
    options.world = t->world;
    options.config_json = config;
    options.parts = parts;
    options.part_count = count;
    /* Otherwise the others would wait for a rank that cannot begin. */
    code = dray__trainer_agree(t, code, error);
    if (code == DRAY_OK)
        code = dray_checkpoint_save(context, directory, t->layout, t->regions, &options, error);
    memory_free(&m);
    free(config);
    return code;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Reads this rank's pieces of the parameters; with `step`, those of the optimiser's state. */
static int read_pieces(dray__trainer *t, const char *directory, float *const *to, int which,
                       int64_t *step, dray_error *error)
{
    state_memory m = {0};
    char path[PATH_MAX];
    int length = snprintf(path, sizeof path, "%s%s", directory, step ? "/" OPTIMIZER : "");
    if (length < 0 || length >= (int)sizeof path)
        return dray__fail(error, DRAY_EINVALID, "%.200s: path too long", directory);
    int code = step ? add_optimizer(t, &m, to, step, error)
                    : add_parameters(t, &m, "", to[PARAMETER], which, error);
    if (code == DRAY_OK && m.layout)
        code = dray_checkpoint_read(path, m.layout, m.regions, error);
    memory_free(&m);
    if (code == DRAY_OK && step && *step < 0)
        code = dray__fail(error, DRAY_EFORMAT, "%.300s: step %" PRId64, path, *step);
    return code;
}

/* Reads everything into other memory first, so that a checkpoint that some rank cannot read changes
 * nothing. */
static int read_state(dray__trainer *t, const char *directory, int which, bool optimizer,
                      dray_error *error)
{
    float *aside[KINDS] = {0};
    int64_t step = 0;
    int code = DRAY_OK;
    for (int kind = 0; kind < KINDS; kind++) {
        aside[kind] = calloc(t->shard_floats + 1, sizeof(float));
        if (!aside[kind])
            code = dray__nomem(error);
    }
    if (code == DRAY_OK)
        code = read_pieces(t, directory, aside, which, NULL, error);
    if (code == DRAY_OK && optimizer)
        code = read_pieces(t, directory, aside, which, &step, error);
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
    return read_state(t, directory, WHOLE, false, error);
}

int dray__trainer_load_trunk(dray__trainer *t, const char *directory, dray_error *error)
{
    return read_state(t, directory, TRUNK, false, error);
}

int dray__trainer_restore(dray__trainer *t, const char *directory, dray_error *error)
{
    return read_state(t, directory, WHOLE, true, error);
}
