/* The trainer: opening, gathering, and the optimiser. */
#include "engine/trainer_state.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/random.h"
#include "base/words.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- opening --------------------------------------------------------------------------------- */

static const dray_block *only_block(const dray_layout *layout, uint32_t tensor)
{
    const dray_block *found = NULL;
    for (uint32_t i = 0; i < dray_layout_block_count(layout); i++) {
        const dray_block *block = dray_layout_block(layout, i);
        if (block->tensor == tensor) {
            if (found)
                return NULL;
            found = block;
        }
    }
    return found;
}

static uint64_t elements(const int64_t *extent, uint32_t ndim)
{
    uint64_t count = 1;
    for (uint32_t i = 0; i < ndim; i++)
        count *= (uint64_t)extent[i];
    return count;
}

/* Fills the table of pieces from the layouts of all ranks. */
static int find_pieces(dray__trainer *t, dray_error *error)
{
    uint32_t tensors = dray_layout_tensor_count(t->layout);
    t->pieces = calloc(tensors, sizeof *t->pieces);
    if (!t->pieces)
        return dray__nomem(error);
    for (uint32_t i = 0; i < tensors; i++) {
        const dray_tensor_info *tensor = dray_layout_tensor(t->layout, i);
        if (tensor->alias_of >= 0)
            continue;
        uint32_t index;
        int code = dray_layout_find(t->whole_layout, tensor->name, &index, error);
        if (code != DRAY_OK)
            return code;
        const dray_block *whole = only_block(t->whole_layout, index);
        if (!whole)
            return dray__fail(error, DRAY_EINTERNAL, "%s: expected one block in the whole model",
                              tensor->name);
        t->pieces[t->piece_count++] =
            (dray__shard_piece){.tensor = i, .whole = whole->offset / sizeof(float)};
    }
    for (uint32_t rank = 0; rank < t->world; rank++) {
        dray_layout *layout;
        int code = dray_layout_fsdp(&t->config, DRAY_F32, rank, t->world, DRAY_REGION_SHARED,
                                    &layout, error);
        if (code != DRAY_OK)
            return code;
        for (uint32_t i = 0; i < t->piece_count; i++) {
            const dray_block *block = only_block(layout, t->pieces[i].tensor);
            const dray_tensor_info *tensor = dray_layout_tensor(layout, t->pieces[i].tensor);
            if (!block)
                continue;
            t->pieces[i].counts[rank] = elements(block->extent, tensor->ndim);
            if (rank != t->rank)
                continue;
            uint64_t row = elements(tensor->shape + 1, tensor->ndim - 1);
            t->pieces[i].shard = block->offset / sizeof(float);
            t->pieces[i].start = (uint64_t)block->start[0] * row;
        }
        dray_layout_free(layout);
    }
    return DRAY_OK;
}

static int open_shards(dray__trainer *t, dray_error *error)
{
    int code = dray_layout_fsdp(&t->config, DRAY_F32, t->rank, t->world, DRAY_REGION_SHARED,
                                &t->layout, error);
    if (code != DRAY_OK)
        return code;
    uint32_t count = dray_layout_region_count(t->layout);
    t->regions = calloc(count, sizeof(dray_region *));
    if (!t->regions)
        return dray__nomem(error);
    code = dray_regions_for_layout(t->layout, 1, t->regions, error);
    if (code != DRAY_OK)
        return code;
    t->region_count = count;
    t->shard = dray_region_base(t->regions[0]);
    t->shard_floats = dray_region_bytes(t->regions[0]) / sizeof(float);
    t->gradient = calloc(t->shard_floats + 1, sizeof(float));
    t->moment = calloc(t->shard_floats + 1, sizeof(float));
    t->moment_square = calloc(t->shard_floats + 1, sizeof(float));
    return t->gradient && t->moment && t->moment_square ? DRAY_OK : dray__nomem(error);
}

static int open_whole(dray__trainer *t, dray_error *error)
{
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    spec.dtype = DRAY_F32;
    spec.kind = DRAY_REGION_HOST;
    int code = dray_layout_engine(&t->config, &spec, &t->whole_layout, error);
    if (code == DRAY_OK)
        code = dray_regions_for_layout(t->whole_layout, 1, &t->whole_region, error);
    if (code != DRAY_OK)
        return code;
    void *base = dray_region_base(t->whole_region);
    t->whole_floats = dray_region_bytes(t->whole_region) / sizeof(float);
    t->whole_gradient = calloc(t->whole_floats + 1, sizeof(float));
    if (!t->whole_gradient)
        return dray__nomem(error);
    code = dray__model_open(&t->config, NULL, base, &t->model, error);
    if (code == DRAY_OK)
        code = dray__model_map(&t->model, t->whole_gradient, &t->gradients, error);
    return code;
}

static int check_options(const dray__trainer_options *o, dray_error *error)
{
    if (!(o->beta1 >= 0 && o->beta1 < 1 && o->beta2 >= 0 && o->beta2 < 1 && o->epsilon >= 0 &&
          o->weight_decay >= 0))
        return dray__fail(error, DRAY_EINVALID,
                          "trainer: betas %g and %g (expected 0..1), epsilon %g, weight decay %g",
                          o->beta1, o->beta2, o->epsilon, o->weight_decay);
    return DRAY_OK;
}

int dray__trainer_open(const dray_model_config *config, dray__group *group,
                       const dray__trainer_options *options, dray__trainer **out, dray_error *error)
{
    const dray__trainer_options defaults = {.eos_token = -1};
    int code = dray__engine_config_check(config, error);
    if (code == DRAY_OK)
        code = check_options(options ? options : &defaults, error);
    if (code != DRAY_OK)
        return code;
    dray__trainer *t = calloc(1, sizeof *t);
    if (!t)
        return dray__nomem(error);
    t->config = *config;
    t->options = options ? *options : defaults;
    t->options.beta1 = t->options.beta1 > 0 ? t->options.beta1 : 0.9;
    t->options.beta2 = t->options.beta2 > 0 ? t->options.beta2 : 0.95;
    t->options.epsilon = t->options.epsilon > 0 ? t->options.epsilon : 1e-8;
    t->group = group;
    t->rank = group ? dray__group_rank(group) : 0;
    t->world = group ? dray__group_world(group) : 1;
    t->training.keep = true;
    code = open_shards(t, error);
    if (code == DRAY_OK)
        code = open_whole(t, error);
    if (code == DRAY_OK)
        code = find_pieces(t, error);
    if (code == DRAY_OK)
        *out = t;
    else
        dray__trainer_close(t);
    return code;
}

void dray__trainer_close(dray__trainer *t)
{
    if (!t)
        return;
    dray__state_free(&t->inference);
    dray__state_free(&t->training);
    dray__backward_free(&t->backward);
    free(t->gradients.layers);
    dray__model_close(&t->model);
    free(t->pieces);
    free(t->whole_gradient);
    dray_region_free(t->whole_region);
    dray_layout_free(t->whole_layout);
    free(t->gradient);
    free(t->moment);
    free(t->moment_square);
    for (uint32_t i = 0; i < t->region_count; i++)
        dray_region_free(t->regions[i]);
    free(t->regions);
    dray_layout_free(t->layout);
    free(t);
}

const dray_layout *dray__trainer_layout(const dray__trainer *t)
{
    return t->layout;
}

dray_region *const *dray__trainer_regions(const dray__trainer *t)
{
    return t->regions;
}

void dray__trainer_pace(dray__trainer *t, const dray__pace *pace)
{
    t->model.pace = pace;
}

/* ---- among the ranks ------------------------------------------------------------------------- */

int dray__trainer_gather(dray__trainer *t, const float *shard, float *whole, dray_error *error)
{
    for (uint32_t i = 0; i < t->piece_count; i++) {
        const dray__shard_piece *piece = &t->pieces[i];
        uint64_t bytes[DRAY__GROUP_MAX_WORLD];
        for (uint32_t rank = 0; rank < t->world; rank++)
            bytes[rank] = piece->counts[rank] * sizeof *shard;
        int code = DRAY_OK;
        if (t->group)
            code = dray__group_all_gather(t->group, shard + piece->shard, bytes,
                                          whole + piece->whole, DRAY_WAIT_DEFAULT, error);
        else
            memcpy(whole + piece->whole, shard + piece->shard, bytes[0]);
        if (code != DRAY_OK)
            return code;
    }
    return DRAY_OK;
}

int dray__trainer_agree(dray__trainer *t, int code, dray_error *error)
{
    typedef struct report {
        int32_t code;
        char message[DRAY_ERROR_MESSAGE_MAX];
    } report;
    if (!t->group)
        return code;
    report own = {code, ""}, *all = calloc(t->world, sizeof *all);
    if (!all) { /* this rank cannot take part any more */
        dray__group_abort(t->group, "out of memory");
        return dray__nomem(error);
    }
    if (code != DRAY_OK && error)
        memcpy(own.message, error->message, sizeof own.message);
    int gathered =
        dray__group_all_gather_equal(t->group, &own, sizeof own, all, DRAY_WAIT_DEFAULT, error);
    uint32_t rank = 0;
    while (gathered == DRAY_OK && rank < t->world && all[rank].code == DRAY_OK)
        rank++;
    if (gathered == DRAY_OK && rank < t->world)
        gathered = rank == t->rank ? code
                                   : dray__fail(error, all[rank].code, "rank %" PRIu32 ": %.470s",
                                                rank, all[rank].message);
    free(all);
    return gathered;
}

/* ---- parameters ------------------------------------------------------------------------------ */

bool dray__is_score(const char *name)
{
    return strncmp(name, "score.", 6) == 0;
}

int dray__trainer_init(dray__trainer *t, double embeddings, double weights, uint64_t seed,
                       dray_error *error)
{
    (void)error;
    for (uint32_t i = 0; i < t->piece_count; i++) {
        const dray__shard_piece *piece = &t->pieces[i];
        const dray_tensor_info *tensor = dray_layout_tensor(t->layout, piece->tensor);
        bool norm = dray__ends_with(tensor->name, "norm.weight"),
             bias = dray__ends_with(tensor->name, ".bias"),
             embedding = dray__ends_with(tensor->name, "embed_tokens.weight"),
             score = dray__is_score(tensor->name);
        uint64_t stream = dray__hash(tensor->name, strlen(tensor->name));
        for (uint64_t j = 0; j < piece->counts[t->rank]; j++) {
            double value = norm ? 1 : 0;
            if (!norm && !bias && !score)
                value = (embedding ? embeddings : weights) *
                        dray__random_normal(seed, stream, piece->start + j);
            t->shard[piece->shard + j] = (float)value;
        }
    }
    t->gathered = false;
    dray__trainer_forget(t);
    return DRAY_OK;
}

void dray__trainer_forget(dray__trainer *t)
{
    memset(t->moment, 0, t->shard_floats * sizeof(float));
    memset(t->moment_square, 0, t->shard_floats * sizeof(float));
    t->steps = 0;
    dray__trainer_discard(t);
}

void dray__trainer_discard(dray__trainer *t)
{
    memset(t->whole_gradient, 0, t->whole_floats * sizeof(float));
    t->begun = false;
    t->tokens = 0;
    t->divisor = 0;
    t->sums = (dray__policy_sums){0};
}

/* ---- the step -------------------------------------------------------------------------------- */

static int scatter_gradients(dray__trainer *t, dray_error *error)
{
    for (uint32_t i = 0; i < t->piece_count; i++) {
        const dray__shard_piece *piece = &t->pieces[i];
        float *to = t->gradient + piece->shard;
        const float *from = t->whole_gradient + piece->whole;
        int code = DRAY_OK;
        if (t->group)
            code = dray__group_reduce_scatter_f32(t->group, from, piece->counts, to,
                                                  DRAY_WAIT_DEFAULT, error);
        else
            memcpy(to, from, piece->counts[0] * sizeof *to);
        if (code != DRAY_OK)
            return code;
    }
    return DRAY_OK;
}

/* Sums this rank's numbers, and the squares of its gradients, over the ranks in rank order. */
static int total(dray__trainer *t, dray__policy_sums *sums, double *squares, dray_error *error)
{
    typedef struct part {
        dray__policy_sums sums;
        double squares;
    } part;
    part own = {t->sums, 0}, all[DRAY__GROUP_MAX_WORLD];
    for (uint32_t i = 0; i < t->piece_count; i++) {
        const float *gradient = t->gradient + t->pieces[i].shard;
        for (uint64_t j = 0; j < t->pieces[i].counts[t->rank]; j++)
            own.squares += (double)gradient[j] * gradient[j];
    }
    all[0] = own;
    if (t->group) {
        int code =
            dray__group_all_gather_equal(t->group, &own, sizeof own, all, DRAY_WAIT_DEFAULT, error);
        if (code != DRAY_OK)
            return code;
    }
    *sums = (dray__policy_sums){0};
    *squares = 0;
    for (uint32_t rank = 0; rank < t->world; rank++) {
        dray__policy_sums_add(sums, &all[rank].sums);
        *squares += all[rank].squares;
    }
    return DRAY_OK;
}

/* AdamW (Loshchilov and Hutter 2019) in the order of operations of torch.optim.AdamW. */
static void adamw(dray__trainer *t, double learning_rate, float gradient_scale)
{
    const dray__trainer_options *o = &t->options;
    double correction1 = 1 - pow(o->beta1, (double)t->steps);
    double correction2 = 1 - pow(o->beta2, (double)t->steps);
    float decay = (float)(1 - learning_rate * o->weight_decay);
    float rise1 = (float)(1 - o->beta1), rise2 = (float)(1 - o->beta2), keep2 = (float)o->beta2;
    float root = (float)sqrt(correction2), epsilon = (float)o->epsilon;
    float step = (float)(learning_rate / correction1);
    for (uint32_t i = 0; i < t->piece_count; i++) {
        uint64_t at = t->pieces[i].shard, count = t->pieces[i].counts[t->rank];
        float *p = t->shard + at, *m = t->moment + at, *v = t->moment_square + at;
        const float *gradient = t->gradient + at;
        for (uint64_t j = 0; j < count; j++) {
            float g = gradient[j] * gradient_scale;
            m[j] += (g - m[j]) * rise1;
            v[j] = v[j] * keep2 + g * g * rise2;
            p[j] = p[j] * decay - step * (m[j] / (sqrtf(v[j]) / root + epsilon));
        }
    }
}

static dray__step_stats stats_of(const dray__trainer *t, const dray__policy_sums *sums, double norm,
                                 double divisor)
{
    double tokens = t->tokens ? (double)t->tokens : 1;
    return (dray__step_stats){.step = t->steps,
                              .tokens = t->tokens,
                              .loss = sums->loss / divisor,
                              .gradient_norm = norm,
                              .entropy = sums->entropy / tokens,
                              .clip_fraction = sums->clipped / tokens,
                              .dual_clip_fraction = sums->dual_clipped / tokens,
                              .truncated_fraction = sums->truncated / tokens,
                              .kl = sums->kl / tokens,
                              .ratio_mean = sums->ratio / tokens,
                              .ratio_max = sums->ratio_max,
                              .behaviour_mean = sums->behaviour / tokens,
                              .behaviour_square = sums->behaviour_square / tokens,
                              .behaviour_max = sums->behaviour_max};
}

int dray__trainer_step(dray__trainer *t, const dray__step_options *options, dray__step_stats *stats,
                       dray_error *error)
{
    if (!(options->learning_rate >= 0) || !(options->max_norm >= 0))
        return dray__fail(error, DRAY_EINVALID, "step: learning rate %g, gradient norm %g",
                          options->learning_rate, options->max_norm);
    if (!t->begun)
        return dray__fail(error, DRAY_EINVALID, "step: no response token was accumulated");
    dray__policy_sums sums;
    double squares;
    int code = scatter_gradients(t, error);
    if (code == DRAY_OK)
        code = total(t, &sums, &squares, error);
    if (code != DRAY_OK)
        return code;
    double divisor = t->divisor > 0 ? t->divisor : 1; /* 0 when all rows are masked, and all sums
                                                       * are 0 */
    double norm = sqrt(squares) / divisor, scale = 1 / divisor;
    if (!isfinite(norm)) {
        dray__trainer_discard(t);
        return dray__fail(error, DRAY_EINVALID, "step %" PRIu64 ": the gradient norm is %g",
                          t->steps + 1, norm);
    }
    if (options->max_norm > 0 && norm > options->max_norm)
        scale *= options->max_norm / (norm + 1e-6); /* torch.nn.utils.clip_grad_norm_ */
    t->steps++;
    adamw(t, options->learning_rate, (float)scale);
    t->gathered = false;
    if (stats)
        *stats = stats_of(t, &sums, norm, divisor);
    dray__trainer_discard(t);
    return DRAY_OK;
}
