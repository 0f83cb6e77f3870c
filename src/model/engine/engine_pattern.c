/* Makes one pattern of the engine: cuts each row of the family's table for this rank, concatenates
 * the rows of one parameter, and places the parameters. The cuts are those of vLLM's
 * model_executor/layers/linear.py, fused_moe/layer.py and vocab_parallel_embedding.py (SGLang's are
 * the same). */
#include "model/engine/engine.h"
#include "model/layout/layout.h"

#include "base/error.h"

#include <inttypes.h>
#include <string.h>

/* A row that is being cut. */
typedef struct row_cutting {
    const dray__engine *e;
    const dray__parameter *p;
    dray__part part;
    dray__cut_group group;
    dray__row_part *piece;
    dray_error *error;
} row_cutting;

static int indivisible(const row_cutting *c, const char *what, int64_t value)
{
    char text[48];
    return dray__fail(c->error, DRAY_EINVALID, "%s: %s %" PRId64 " is not divisible by %s",
                      dray__engine_name(c->p), what, value,
                      dray__engine_group_text(c->e, c->part, text));
}

/* Cuts KV heads. Neighbouring ranks share a head when there are fewer heads than ranks. */
static int cut_kv(const row_cutting *c)
{
    int64_t heads = c->e->config->kv_heads, dim = c->e->config->head_dim, size = c->group.size;
    char text[48];
    if (heads >= size && heads % size)
        return indivisible(c, "num_key_value_heads", heads);
    if (heads < size && size % heads)
        return dray__fail(
            c->error, DRAY_EINVALID, "%s: %s is not a multiple of num_key_value_heads %" PRId64,
            dray__engine_name(c->p), dray__engine_group_text(c->e, c->part, text), heads);
    int64_t each = heads >= size ? heads / size : 1, share = heads >= size ? 1 : size / heads;
    c->piece->extent[0] = c->piece->rows = each * dim;
    c->piece->start[0] = c->group.rank / share * each * dim;
    return DRAY_OK;
}

static int cut_vocab(const row_cutting *c)
{
    int64_t multiple = c->e->spec.vocab_multiple, size = c->e->config->vocab_size;
    int64_t padded = (size + multiple - 1) / multiple * multiple;
    char text[48];
    if (padded % c->group.size)
        return dray__fail(c->error, DRAY_EINVALID,
                          "%s: vocabulary %" PRId64 " padded to %" PRId64 " (a multiple of %" PRId64
                          ") is not divisible by %s",
                          dray__engine_name(c->p), size, padded, multiple,
                          dray__engine_group_text(c->e, c->part, text));
    dray__row_part *piece = c->piece;
    piece->rows = padded / c->group.size;
    piece->start[0] = piece->rows * c->group.rank;
    int64_t left = size - piece->start[0];
    piece->extent[0] = left < 0 ? 0 : left < piece->rows ? left : piece->rows;
    return DRAY_OK;
}

/* Takes this rank's equal part of dimension d. `count` is the number that must be divisible (heads,
 * or elements). */
static int cut_even(const row_cutting *c, uint32_t d, const char *what, int64_t count)
{
    if (count % c->group.size)
        return indivisible(c, what, count);
    c->piece->extent[d] /= c->group.size;
    c->piece->start[d] = c->piece->extent[d] * c->group.rank;
    c->piece->rows = c->piece->extent[0];
    return DRAY_OK;
}

/* Cuts the inner dimension of an MLP. */
static int cut_inner(const row_cutting *c, uint32_t d)
{
    static const char *const names[DRAY__PARTS] = {[DRAY__EXPERTS] = "moe_intermediate_size",
                                                   [DRAY__SHARED] =
                                                       "n_shared_experts x moe_intermediate_size"};
    return cut_even(c, d, names[c->part] ? names[c->part] : "intermediate_size",
                    c->piece->shape[d]);
}

static int cut_row(const row_cutting *c)
{
    int64_t heads = c->e->config->heads;
    switch (c->p->cut) {
    case DRAY__CUT_NONE:
        return DRAY_OK;
    case DRAY__CUT_COLUMN:
        return cut_inner(c, 0);
    case DRAY__CUT_ROW:
        return cut_inner(c, 1);
    case DRAY__CUT_HEADS:
        return cut_even(c, 0, "num_attention_heads", heads);
    case DRAY__CUT_HEADS_ROW:
        return cut_even(c, 1, "num_attention_heads", heads);
    case DRAY__CUT_KV_HEADS:
        return cut_kv(c);
    case DRAY__CUT_VOCAB:
        return cut_vocab(c);
    }
    return dray__fail(c->error, DRAY_EINTERNAL, "%s: unknown cut", c->p->name);
}

static int make_row(const dray__engine *e, const dray__parameter *p, bool quantised, dray__row *row,
                    dray_error *error)
{
    dray__row_part *w = &row->parts[DRAY__PART_VALUES];
    row->part = dray__engine_part(p);
    w->ndim = dray__parameter_shape(p, e->config, w->shape);
    memcpy(w->extent, w->shape, sizeof w->shape);
    w->rows = w->shape[0];
    row_cutting c = {e, p, row->part, e->groups[row->part], w, error};
    int status = cut_row(&c);
    if (status)
        return status;
    w->columns = w->ndim == 2 ? w->extent[1] : 1;
    w->dtype = dray__parameter_dtype(p, e->dtype);
    w->slots = row->part == DRAY__EXPERTS ? e->local_slots + (e->spec.fuse_shared != 0) : 0;
    row->transposed =
        w->ndim == 2 && row->part < DRAY__EMBED && (e->spec.transposed >> row->part & 1);
    row->quantised = quantised;
    memcpy(row->shape, w->shape, sizeof row->shape);
    dray__row_part weight = *w;
    return quantised ? dray__engine_parts(e, p, &weight, row, error) : DRAY_OK;
}

static bool has(uint64_t mask, uint32_t row)
{
    return mask >> row & 1;
}

/* Returns whether rows i and j are parts of one parameter. */
static bool together(const dray__engine *e, uint32_t i, uint32_t j)
{
    const dray__parameter *table = e->family->parameters;
    return strcmp(dray__engine_name(&table[i]), dray__engine_name(&table[j])) == 0;
}

/* Returns whether the parameter has its rows in the reverse order of the family's table. Scales
 * with one number for each matrix keep their order, because vLLM and SGLang load them by the
 * matrix's number. */
static bool up_first(const dray__engine *e, const dray__row *row, int part)
{
    return e->spec.w13_order == DRAY_W13_UP_GATE && row->part == DRAY__EXPERTS &&
           !(part != DRAY__PART_VALUES && row->parts[part].ndim < 2);
}

/* Concatenates row i and the rows that are fused with it, and places the parameter at the pattern's
 * end. */
static int place(const dray__engine *e, dray__pattern *pattern, uint32_t i, int part,
                 dray_error *error)
{
    int64_t total = 0;
    const dray__row_part *first = &pattern->rows[i].parts[part];
    bool reverse = up_first(e, &pattern->rows[i], part);
    for (uint32_t k = 0; k < e->family->count; k++) {
        uint32_t j = reverse ? e->family->count - 1 - k : k;
        if (j >= i && has(pattern->used & ~pattern->aliases, j) && together(e, i, j)) {
            pattern->rows[j].parts[part].before = total;
            total += pattern->rows[j].parts[part].rows;
        }
    }
    if (first->fours)
        total = (total + 3) / 4 * 4;
    for (uint32_t j = i; j < e->family->count; j++)
        if (has(pattern->used & ~pattern->aliases, j) && together(e, i, j)) {
            pattern->rows[j].parts[part].total = total;
            pattern->rows[j].parts[part].offset = pattern->bytes;
        }
    int64_t shape[] = {first->slots ? first->slots : 1, total, first->columns};
    if (!dray__dense_end(first->dtype, 3, shape, &pattern->bytes))
        return dray__fail(error, DRAY_EINVALID, "%s: the model is too large",
                          dray__engine_name(&e->family->parameters[i]));
    return DRAY_OK;
}

/* Makes the shared expert the last slot of the experts' parameters, with its rows placed like
 * theirs. */
static void fuse_shared(const dray__engine *e, dray__pattern *pattern, uint64_t shared)
{
    uint32_t expert = 0;
    for (uint32_t i = 0; i < e->family->count; i++) {
        dray__row *row = &pattern->rows[i];
        if (!has(shared, i))
            continue;
        while (pattern->rows[expert].part != DRAY__EXPERTS || !has(pattern->used, expert))
            expert++;
        *row = pattern->rows[expert++];
        row->part = DRAY__SHARED;
    }
}

int dray__engine_pattern(const dray__engine *e, dray__pattern *pattern, dray_error *error)
{
    const dray__parameter *table = e->family->parameters;
    uint64_t shared = 0, done = pattern->aliases;
    int status = DRAY_OK;
    for (uint32_t i = 0; i < e->family->count && e->spec.fuse_shared; i++)
        if (has(pattern->used, i) && dray__engine_part(&table[i]) == DRAY__SHARED)
            shared |= UINT64_C(1) << i;
    for (uint32_t i = 0; i < e->family->count && !status; i++)
        if (has(pattern->used & ~shared, i))
            status = make_row(e, &table[i], has(pattern->quantised, i), &pattern->rows[i], error);
    for (uint32_t i = 0; i < e->family->count && !status; i++) {
        if (!has(pattern->used & ~shared & ~done, i))
            continue;
        for (uint32_t j = i; j < e->family->count; j++)
            done |= (uint64_t)together(e, i, j) << j;
        for (int part = 0; part < DRAY__QUANT_PARTS && !status; part++)
            if (part == DRAY__PART_VALUES ||
                (pattern->rows[i].quantised && dray__engine_suffix(e, part)))
                status = place(e, pattern, i, part, error);
    }
    if (!status)
        fuse_shared(e, pattern, shared);
    return status;
}
