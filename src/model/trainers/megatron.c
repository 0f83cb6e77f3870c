/* Adds one parameter of Megatron-Core as blocks over Hugging Face names. The cuts are those of
 * ColumnParallelLinear and RowParallelLinear (tensor_parallel/layers.py), the gated first layer of
 * an MLP (transformer/mlp.py), query groups (transformer/attention.py: q1 q2 k1 v1 | q3 q4 k2 v2,
 * cut in equal parts even through a group), experts (transformer/moe/experts.py), the padded
 * vocabulary (training/tokenizer). linear_fc2 is always cut along its input: the
 * partition_dim attribute of a grouped one is not asked. */
#include "model/trainers/megatron.h"
#include "model/layout/layout.h"

#include "base/error.h"
#include "base/options.h"

#include <inttypes.h>
#include <string.h>

enum { MOST_RANKS = 1 << 16 };

/* ---- sizes ----------------------------------------------------------------------------------- */

static int indivisible(const char *what, int64_t value, const char *by, int64_t parts,
                       dray_error *error)
{
    return dray__fail(error, DRAY_EINVALID,
                      "megatron: %s %" PRId64 " is not divisible by %s %" PRId64, what, value, by,
                      parts);
}

static int read_spec(const dray_megatron_spec *given, dray_megatron_spec *spec, dray_error *error)
{
    *spec = (dray_megatron_spec)DRAY_MEGATRON_SPEC_INIT;
    int status = DRAY__OPTIONS_READ(dray_megatron_spec, loss_in_split, spec, given, error);
    if (status)
        return status;
    if (spec->etp == 0)
        spec->etp = spec->tp;
    const struct {
        const char *name;
        uint32_t *value;
    } sizes[] = {{"tp", &spec->tp}, {"cp", &spec->cp}, {"ep", &spec->ep},  {"etp", &spec->etp},
                 {"dp", &spec->dp}, {"pp", &spec->pp}, {"vpp", &spec->vpp}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (*sizes[i].value == 0)
            *sizes[i].value = 1;
        if (*sizes[i].value > MOST_RANKS)
            return dray__fail(error, DRAY_EINVALID, "megatron: %s %u, expected at most %d",
                              sizes[i].name, *sizes[i].value, MOST_RANKS);
    }
    if (spec->vocab_multiple == 0)
        spec->vocab_multiple = 128;
    if (spec->vocab_multiple < 1 || spec->vocab_multiple > INT64_C(1) << 30)
        return dray__fail(error, DRAY_EINVALID, "megatron: vocabulary multiple %" PRId64,
                          spec->vocab_multiple);
    return DRAY_OK;
}

static int check_ranks(const dray_megatron_spec *spec, dray_error *error)
{
    const struct {
        const char *name;
        uint32_t rank, size;
    } ranks[] = {{"tp", spec->tp_rank, spec->tp},
                 {"ep", spec->ep_rank, spec->ep},
                 {"etp", spec->etp_rank, spec->etp},
                 {"pp", spec->pp_rank, spec->pp}};
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++)
        if (ranks[i].rank >= ranks[i].size)
            return dray__fail(error, DRAY_EINVALID, "megatron: %s rank %u of %u", ranks[i].name,
                              ranks[i].rank, ranks[i].size);
    return DRAY_OK;
}

int dray_megatron_place(dray_megatron_spec *spec, uint32_t rank, uint32_t *world, dray_error *error)
{
    dray_megatron_spec s;
    int status = read_spec(spec, &s, error);
    if (status)
        return status;
    uint64_t stage = (uint64_t)s.tp * s.cp, experts = (uint64_t)s.etp * s.ep, all;
    if (__builtin_mul_overflow(stage, s.dp, &stage) || __builtin_mul_overflow(stage, s.pp, &all) ||
        all > UINT32_MAX)
        return dray__fail(error, DRAY_EINVALID, "megatron: tp %u x cp %u x dp %u x pp %u ranks",
                          s.tp, s.cp, s.dp, s.pp);
    if (stage % experts)
        return dray__fail(error, DRAY_EINVALID,
                          "megatron: tp %u x cp %u x dp %u = %" PRIu64
                          " is not divisible by etp %u x ep %u = %" PRIu64,
                          s.tp, s.cp, s.dp, stage, s.etp, s.ep, experts);
    if (rank >= all)
        return dray__fail(error, DRAY_EINVALID, "megatron: rank %u of %" PRIu64, rank, all);
    spec->tp_rank = rank % s.tp;
    spec->etp_rank = (uint32_t)(rank % stage % s.etp);
    spec->ep_rank = (uint32_t)(rank % stage / s.etp % s.ep);
    spec->pp_rank = (uint32_t)(rank / stage);
    if (world)
        *world = (uint32_t)all;
    return DRAY_OK;
}

/* ---- pipeline stages ------------------------------------------------------------------------- */

static bool uneven(const dray_megatron_spec *s)
{
    return s->first_stage_layers || s->last_stage_layers;
}

/* Returns the number of stages between a first and a last stage with given numbers of layers. They
 * share the other layers. */
static int64_t middle_stages(const dray_megatron_spec *s)
{
    return (int64_t)s->pp - (s->first_stage_layers > 0) - (s->last_stage_layers > 0);
}

static int64_t middle_layers(const dray__megatron *m)
{
    return m->config->layers - m->spec.first_stage_layers - m->spec.last_stage_layers;
}

/* Returns the number of layers of a chunk, as get_num_layers_to_build of transformer_block.py
 * does. */
static int64_t chunk_layers(const dray__megatron *m, uint32_t vp, uint32_t stage)
{
    const dray_megatron_spec *s = &m->spec;
    bool first = stage == 0, last = stage == s->pp - 1;
    if (first && s->first_stage_layers)
        return s->first_stage_layers / s->vpp;
    if (last && s->last_stage_layers)
        return s->last_stage_layers / s->vpp;
    if (uneven(s))
        return middle_layers(m) / middle_stages(s) / s->vpp;
    int64_t all = m->config->layers + (s->embedding_in_split != 0) + (s->loss_in_split != 0);
    return all / s->pp / s->vpp - (first && vp == 0 && s->embedding_in_split) -
           (last && vp == s->vpp - 1 && s->loss_in_split);
}

int64_t dray__megatron_layers(const dray__megatron *m, uint32_t vp_stage, int64_t *first)
{
    *first = 0;
    for (uint32_t vp = 0; vp <= vp_stage; vp++)
        for (uint32_t stage = 0; stage < (vp < vp_stage ? m->spec.pp : m->spec.pp_rank); stage++)
            *first += chunk_layers(m, vp, stage);
    return chunk_layers(m, vp_stage, m->spec.pp_rank);
}

static int check_uneven(const dray__megatron *m, dray_error *error)
{
    const dray_megatron_spec *s = &m->spec;
    int64_t all = m->config->layers, stages = middle_stages(s);
    if (s->embedding_in_split || s->loss_in_split)
        return dray__fail(error, DRAY_EINVALID,
                          "megatron: layers of the first or last stage cannot be given together "
                          "with embedding or loss in the split");
    if (s->first_stage_layers < 0 || s->first_stage_layers > all || s->last_stage_layers < 0 ||
        s->last_stage_layers > all - s->first_stage_layers || stages < 0)
        return dray__fail(error, DRAY_EINVALID,
                          "megatron: %" PRId64 " layers in the first and %" PRId64
                          " in the last of %u stages, of %" PRId64 " layers",
                          s->first_stage_layers, s->last_stage_layers, s->pp, all);
    int64_t layers = middle_layers(m);
    if (stages == 0 ? layers != 0 : layers % stages != 0)
        return indivisible("layers outside the given stages", layers, "their number of stages",
                           stages, error);
    if (s->first_stage_layers % s->vpp)
        return indivisible("layers of the first stage", s->first_stage_layers, "vpp", s->vpp,
                           error);
    if (s->last_stage_layers % s->vpp)
        return indivisible("layers of the last stage", s->last_stage_layers, "vpp", s->vpp, error);
    if (stages && layers / stages % s->vpp)
        return indivisible("layers of a stage", layers / stages, "vpp", s->vpp, error);
    return DRAY_OK;
}

static int check_stages(const dray__megatron *m, dray_error *error)
{
    const dray_megatron_spec *s = &m->spec;
    int64_t all = m->config->layers + (s->embedding_in_split != 0) + (s->loss_in_split != 0);
    if (s->vpp > 1 && s->pp == 1)
        return dray__fail(error, DRAY_EINVALID, "megatron: vpp %u needs pp above 1", s->vpp);
    if (uneven(s))
        return check_uneven(m, error);
    const char *what = all == m->config->layers
                           ? "num_hidden_layers"
                           : "num_hidden_layers with embedding and loss in the split";
    if (all % s->pp)
        return indivisible(what, all, "pp", s->pp, error);
    if (all / s->pp % s->vpp)
        return indivisible("layers of a stage", all / s->pp, "vpp", s->vpp, error);
    return DRAY_OK;
}

int dray__megatron_init(dray__megatron *m, const dray_model_config *config,
                        const dray_megatron_spec *spec, dray_error *error)
{
    *m = (dray__megatron){.config = config};
    int status = read_spec(spec, &m->spec, error);
    if (!status)
        status = check_ranks(&m->spec, error);
    if (!status)
        status = dray__config_check(config, &m->family, error);
    if (!status && !m->family->megatron)
        status = dray__fail(error, DRAY_EUNSUPPORTED,
                            "megatron: how Megatron-Core holds a model of family %s is not known",
                            m->family->name);
    m->dtype = (dray_dtype)m->spec.dtype;
    m->kind = (dray_region_kind)m->spec.kind;
    if (!status)
        status = dray__builder_defaults(config, &m->dtype, &m->kind, error);
    if (status)
        return status;
    if (m->spec.experts < DRAY_MEGATRON_GROUPED || m->spec.experts > DRAY_MEGATRON_SEQUENTIAL)
        return dray__fail(error, DRAY_EINVALID, "megatron: unknown form of experts %d",
                          m->spec.experts);
    if (config->labels)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "megatron: expected a language model, found one that scores %" PRId64
                          " labels",
                          config->labels);
    if (m->spec.ep > 1 && config->experts == 0)
        return dray__fail(error, DRAY_EINVALID, "megatron: ep %u, but %s has no experts",
                          m->spec.ep, config->family);
    if (config->experts % m->spec.ep)
        return indivisible("the number of experts", config->experts, "ep", m->spec.ep, error);
    return check_stages(m, error);
}

int64_t dray__megatron_local_experts(const dray__megatron *m)
{
    return m->config->experts / m->spec.ep;
}

/* ---- a row's tensors ------------------------------------------------------------------------- */

static const dray__parameter *find_tensor(const dray__megatron *m, const char *name, bool in_layer)
{
    const size_t prefix = strlen(m->family->layer);
    for (uint32_t i = 0; i < m->family->count; i++) {
        const dray__parameter *p = &m->family->parameters[i];
        if (in_layer != dray__parameter_in_layer(p) || p->each ||
            !dray__parameter_used(p, m->config))
            continue;
        if (strcmp(in_layer ? p->name + prefix : p->name, name) == 0)
            return p;
    }
    return NULL;
}

bool dray__megatron_resolve(const dray__megatron *m, const dray__megatron_row *row,
                            dray__megatron_parameter *out)
{
    bool in_layer = row->scope == DRAY__MEGATRON_LAYER || row->scope == DRAY__MEGATRON_MTP;
    if (row->attention != DRAY__ANY_ATTENTION &&
        m->family->latent != (row->attention == DRAY__LATENT))
        return false;
    *out = (dray__megatron_parameter){.row = row};
    while (out->count < DRAY__MEGATRON_TENSORS && row->tensors[out->count]) {
        const dray__parameter *p = find_tensor(m, row->tensors[out->count], in_layer);
        if (!p)
            return false;
        out->tensors[out->count++] = p;
    }
    return true;
}

bool dray__megatron_in(const dray__megatron *m, const dray__megatron_row *row, int64_t layer)
{
    if (row->layers == DRAY__LAYERS_ALL)
        return true;
    return dray__layer_is_moe(m->config, layer) == (row->layers == DRAY__LAYERS_MOE);
}

static bool of_experts(const dray__megatron_parameter *p)
{
    return dray__parameter_of_expert(p->tensors[0]);
}

/* Returns the tensor parallelism of a parameter; experts have their own. */
static int64_t parts(const dray__megatron *m, const dray__megatron_parameter *p)
{
    return of_experts(p) ? m->spec.etp : m->spec.tp;
}

static int64_t part(const dray__megatron *m, const dray__megatron_parameter *p)
{
    return of_experts(p) ? m->spec.etp_rank : m->spec.tp_rank;
}

static const char *parts_name(const dray__megatron_parameter *p)
{
    return of_experts(p) ? "etp" : "tp";
}

/* ---- local shapes ---------------------------------------------------------------------------- */

static int shape_error(const dray__megatron_parameter *p, int status, dray_error *error)
{
    return dray__fail_prefix(error, status, "%s: ", p->row->name);
}

/* Divides shape[d] among the ranks. `count` (of heads, for example) must be divisible. */
static int divide(const dray__megatron *m, dray__megatron_parameter *p, uint32_t d,
                  const char *what, int64_t count, dray_error *error)
{
    if (count % parts(m, p))
        return shape_error(p, indivisible(what, count, parts_name(p), parts(m, p), error), error);
    p->shape[d] /= parts(m, p);
    return DRAY_OK;
}

static int divide_vocab(const dray__megatron *m, dray__megatron_parameter *p)
{
    int64_t each = m->spec.vocab_multiple * m->spec.tp;
    p->shape[0] = (p->shape[0] + each - 1) / each * m->spec.vocab_multiple;
    return DRAY_OK;
}

/* Returns the number of rows of one query group of [q; k; v]. */
static int64_t group_rows(const dray_model_config *c)
{
    return (c->heads / c->kv_heads + 2) * c->head_dim;
}

static int divide_qkv(const dray__megatron *m, dray__megatron_parameter *p, dray_error *error)
{
    const dray_model_config *c = m->config;
    int64_t tp = m->spec.tp;
    p->shape[0] = group_rows(c) * c->kv_heads;
    if (c->heads % tp)
        return divide(m, p, 0, "num_attention_heads", c->heads, error);
    if (c->kv_heads % tp && tp % c->kv_heads)
        return dray__fail(error, DRAY_EINVALID,
                          "%s: megatron: num_key_value_heads %" PRId64
                          " is neither divisible by tp %" PRId64 " nor a divisor of it",
                          p->row->name, c->kv_heads, tp);
    return divide(m, p, 0, "rows", p->shape[0], error);
}

int dray__megatron_shape(const dray__megatron *m, dray__megatron_parameter *p, dray_error *error)
{
    const dray_model_config *c = m->config;
    p->shape[1] = 1;
    p->ndim = dray__parameter_shape(p->tensors[0], c, p->shape);
    int64_t rows = p->shape[0], columns = p->shape[1];
    int status = DRAY_OK;
    switch (p->row->cut) {
    case DRAY__MEGATRON_WHOLE:
        return DRAY_OK;
    case DRAY__MEGATRON_DOWN:
        return p->cut_rows ? divide(m, p, 0, "rows", rows, error) : DRAY_OK;
    case DRAY__MEGATRON_COLUMN:
        return divide(m, p, 0, "rows", rows, error);
    case DRAY__MEGATRON_HEADS:
        return divide(m, p, 0, "num_attention_heads", c->heads, error);
    case DRAY__MEGATRON_ROW:
        return divide(m, p, 1, "columns", columns, error);
    case DRAY__MEGATRON_HEADS_ROW:
        return divide(m, p, 1, "num_attention_heads", c->heads, error);
    case DRAY__MEGATRON_VOCAB:
        return divide_vocab(m, p);
    case DRAY__MEGATRON_GATED:
        status = divide(m, p, 0, "rows", rows, error);
        p->shape[0] *= 2;
        return status;
    case DRAY__MEGATRON_QKV:
        return divide_qkv(m, p, error);
    case DRAY__MEGATRON_PACKED_IN: /* [hidden, local experts x 2 x intermediate / etp] */
        status = divide(m, p, 0, "rows", rows, error);
        p->shape[1] = p->shape[0] * 2 * dray__megatron_local_experts(m);
        p->shape[0] = columns;
        return status;
    case DRAY__MEGATRON_PACKED_OUT: /* [local experts x intermediate / etp, hidden] */
        status = divide(m, p, 1, "columns", columns, error);
        p->shape[0] = p->shape[1] * dray__megatron_local_experts(m);
        p->shape[1] = rows;
        return status;
    }
    return dray__fail(error, DRAY_EINTERNAL, "%s: unknown cut", p->row->name);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

typedef struct adding {
    const dray__megatron *m;
    const dray__megatron_parameter *p;
    const dray__megatron_site *site;
    dray_layout *layout;
    dray_error *error;
} adding;

/* Adds the aliases of this tensor: a tied head, and the embedding and head of multi-token
 * prediction. */
static int add_other_names(const adding *a, const char *name, uint32_t tensor)
{
    const dray_model_config *c = a->m->config;
    char other[DRAY__PARAMETER_NAME];
    for (uint32_t i = 0; i < a->m->family->count; i++) {
        const dray__parameter *p = &a->m->family->parameters[i];
        if (!dray__parameter_tied(p, c) || strcmp(p->tied, name) != 0)
            continue;
        bool mtp = p->layers == DRAY__LAYERS_MTP;
        for (int64_t layer = c->layers; layer < c->layers + (mtp ? c->mtp_layers : 1); layer++) {
            uint32_t index;
            dray__parameter_name(p->name, layer, 0, other);
            int status = dray_layout_find(a->layout, other, &index, NULL) == DRAY_OK
                             ? DRAY_OK
                             : dray_layout_add_alias(a->layout, other, tensor, NULL, a->error);
            if (!status && !mtp) /* adds the parameters that are tied to the head */
                status = add_other_names(a, other, tensor);
            if (status)
                return status;
        }
    }
    return DRAY_OK;
}

/* Finds the tensor t of this expert in the layout, or adds it. */
static int tensor_index(const adding *a, const dray__parameter *t, int64_t expert, uint32_t *index)
{
    const dray_model_config *c = a->m->config;
    char name[DRAY__PARAMETER_NAME];
    int64_t shape[DRAY_MAX_DIMS];
    uint32_t before = dray_layout_tensor_count(a->layout);
    if (dray__parameter_tied(t, c))
        t = find_tensor(a->m, t->tied, false);
    uint32_t ndim = dray__parameter_shape(t, c, shape);
    dray__parameter_name(t->name, a->site->layer, expert, name);
    int status = dray__layout_need_tensor(a->layout, name, a->site->dtype, ndim, shape,
                                          a->p->row->name, index, a->error);
    bool added = !status && *index >= before;
    return added && !dray__parameter_in_layer(t) ? add_other_names(a, name, *index) : status;
}

/* Rows [first, first + rows) and columns [column, column + columns) of a tensor, at `offset` of the
 * parameter. Rows are `row_stride` bytes apart, columns `column_stride`. */
typedef struct tensor_piece {
    uint32_t tensor;
    int64_t first, rows, column, columns;
    uint64_t offset;
    int64_t row_stride, column_stride;
} tensor_piece;

static int add_piece(const adding *a, const tensor_piece *r)
{
    dray_block block = {.tensor = r->tensor,
                        .region = a->site->region,
                        .start = {r->first, r->column},
                        .extent = {r->rows, r->columns},
                        .offset = a->site->offset + r->offset,
                        .stride = {r->row_stride, r->column_stride}};
    return r->rows > 0 ? dray_layout_add_block(a->layout, &block, a->error) : DRAY_OK;
}

static int64_t element(const adding *a)
{
    return (int64_t)dray_dtype_size(a->site->dtype);
}

/* Adds a parameter that is whole, or cut by rows or columns, which is one rectangle. */
static int add_plain(const adding *a)
{
    const dray__megatron_parameter *p = a->p;
    int64_t full[DRAY_MAX_DIMS] = {0, 1}, at = part(a->m, p);
    tensor_piece one = {.rows = p->shape[0], .columns = p->shape[1], .column_stride = element(a)};
    one.row_stride = p->shape[1] * element(a);
    dray__parameter_shape(p->tensors[0], a->m->config, full);
    if (p->row->cut == DRAY__MEGATRON_ROW || p->row->cut == DRAY__MEGATRON_HEADS_ROW)
        one.column = at * p->shape[1];
    else if (p->row->cut != DRAY__MEGATRON_WHOLE &&
             (p->row->cut != DRAY__MEGATRON_DOWN || p->cut_rows))
        one.first = at * p->shape[0];
    if (one.rows > full[0] - one.first) /* padding of the vocabulary */
        one.rows = full[0] > one.first ? full[0] - one.first : 0;
    int status = tensor_index(a, p->tensors[0], a->site->expert, &one.tensor);
    return status ? status : add_piece(a, &one);
}

static int add_gated(const adding *a)
{
    const dray__megatron_parameter *p = a->p;
    int64_t rows = p->shape[0] / 2, stride = p->shape[1] * element(a);
    for (uint32_t i = 0; i < 2; i++) {
        tensor_piece half = {.first = part(a->m, p) * rows,
                             .rows = rows,
                             .columns = p->shape[1],
                             .offset = i * (uint64_t)(rows * stride),
                             .row_stride = stride,
                             .column_stride = element(a)};
        int status = tensor_index(a, p->tensors[i], a->site->expert, &half.tensor);
        if (!status)
            status = add_piece(a, &half);
        if (status)
            return status;
    }
    return DRAY_OK;
}

static int add_qkv(const adding *a)
{
    const dray_model_config *c = a->m->config;
    const dray__megatron_parameter *p = a->p;
    int64_t stride = p->shape[1] * element(a), per_group[] = {c->heads / c->kv_heads, 1, 1};
    int64_t start = part(a->m, p) * p->shape[0], end = start + p->shape[0];
    uint32_t tensors[DRAY__MEGATRON_TENSORS];
    for (uint32_t i = 0; i < p->count; i++) {
        int status = tensor_index(a, p->tensors[i], 0, &tensors[i]);
        if (status)
            return status;
    }
    for (int64_t group = start / group_rows(c); group * group_rows(c) < end; group++) {
        int64_t at = group * group_rows(c); /* of q, k or v of the group, in the whole parameter */
        for (uint32_t i = 0; i < p->count; i++) {
            int64_t rows = per_group[i] * c->head_dim;
            int64_t from = at > start ? at : start, to = at + rows < end ? at + rows : end;
            tensor_piece one = {.tensor = tensors[i],
                                .first = group * rows + from - at,
                                .rows = to - from,
                                .columns = p->shape[1],
                                .offset = (uint64_t)((from - start) * stride),
                                .row_stride = stride,
                                .column_stride = element(a)};
            int status = add_piece(a, &one);
            if (status)
                return status;
            at += rows;
        }
    }
    return DRAY_OK;
}

/* Adds weight1.view(experts, hidden, 2 x intermediate / etp), which is transposed, with gate before
 * up. */
static int add_packed_in(const adding *a)
{
    const dray__megatron_parameter *p = a->p;
    int64_t experts = dray__megatron_local_experts(a->m), hidden = p->shape[0];
    int64_t rows = p->shape[1] / experts / 2, stride = rows * 2 * element(a);
    for (int64_t e = 0; e < experts; e++)
        for (uint32_t i = 0; i < 2; i++) {
            tensor_piece half = {.first = part(a->m, p) * rows,
                                 .rows = rows,
                                 .columns = hidden,
                                 .offset = (uint64_t)(e * hidden * stride + i * rows * element(a)),
                                 .row_stride = element(a),
                                 .column_stride = stride};
            int status = tensor_index(a, p->tensors[i], a->site->expert + e, &half.tensor);
            if (!status)
                status = add_piece(a, &half);
            if (status)
                return status;
        }
    return DRAY_OK;
}

/* Adds weight2.view(experts, intermediate / etp, hidden), which is transposed. */
static int add_packed_out(const adding *a)
{
    const dray__megatron_parameter *p = a->p;
    int64_t experts = dray__megatron_local_experts(a->m), hidden = p->shape[1];
    int64_t columns = p->shape[0] / experts, stride = hidden * element(a);
    for (int64_t e = 0; e < experts; e++) {
        tensor_piece one = {.rows = hidden,
                            .column = part(a->m, p) * columns,
                            .columns = columns,
                            .offset = (uint64_t)(e * columns * stride),
                            .row_stride = element(a),
                            .column_stride = stride};
        int status = tensor_index(a, p->tensors[0], a->site->expert + e, &one.tensor);
        if (!status)
            status = add_piece(a, &one);
        if (status)
            return status;
    }
    return DRAY_OK;
}

int dray__megatron_add(const dray__megatron *m, const dray__megatron_parameter *p,
                       const dray__megatron_site *site, dray_layout *layout, dray_error *error)
{
    const adding a = {m, p, site, layout, error};
    switch (p->row->cut) {
    case DRAY__MEGATRON_GATED:
        return add_gated(&a);
    case DRAY__MEGATRON_QKV:
        return add_qkv(&a);
    case DRAY__MEGATRON_PACKED_IN:
        return add_packed_in(&a);
    case DRAY__MEGATRON_PACKED_OUT:
        return add_packed_out(&a);
    default:
        return add_plain(&a);
    }
}
