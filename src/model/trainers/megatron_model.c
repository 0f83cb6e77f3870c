/* One rank of Megatron-Core's GPT model: builds all its parameters in one region, or adds one
 * parameter by its name. */
#include "model/layout/layout.h"
#include "model/trainers/megatron.h"

#include "base/error.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ROWS = 64 };

/* The visited parameter, with its place in the checkpoint and in the region. */
typedef struct visit {
    const dray__megatron_parameter *parameter;
    uint32_t vp_stage;
    int64_t layer;  /* within the chunk, or within multi-token prediction */
    int64_t expert; /* local */
    dray__megatron_site site;
} visit;

typedef struct megatron_building {
    dray__megatron m;
    dray__megatron_parameter parameters[MOST_ROWS];
    bool has[MOST_ROWS];
    uint64_t end; /* of the region so far */
    int (*each)(struct megatron_building *, const visit *, dray_error *);
    dray_layout *layout;           /* used when adding */
    dray_megatron_parameter *list; /* used when listing */
    uint32_t count;
} megatron_building;

static bool builds(const dray__megatron *m, const dray__megatron_row *row)
{
    const bool built[] = {
        [DRAY__MEGATRON_ALWAYS] = true,
        [DRAY__MEGATRON_BY_NAME] = false,
        [DRAY__MEGATRON_IF_GROUPED] = m->spec.experts == DRAY_MEGATRON_GROUPED,
        [DRAY__MEGATRON_IF_PACKED] = m->spec.experts == DRAY_MEGATRON_PACKED,
        [DRAY__MEGATRON_IF_SEQUENTIAL] = m->spec.experts == DRAY_MEGATRON_SEQUENTIAL,
    };
    return built[row->form];
}

static int model_init(megatron_building *w, const dray_model_config *config,
                      const dray_megatron_spec *spec, dray_error *error)
{
    *w = (megatron_building){.end = 0};
    int status = dray__megatron_init(&w->m, config, spec, error);
    for (uint32_t i = 0; i < dray__megatron_count && !status; i++) {
        const dray__megatron_row *row = &dray__megatron_rows[i];
        w->has[i] = builds(&w->m, row) && dray__megatron_resolve(&w->m, row, &w->parameters[i]);
        if (w->has[i])
            status = dray__megatron_shape(&w->m, &w->parameters[i], error);
    }
    return status;
}

/* Visits one parameter, at the end of the region so far. */
static int visit_one(megatron_building *w, visit *v, dray_error *error)
{
    const dray__megatron_parameter *p = v->parameter;
    v->site.dtype = dray__parameter_dtype(p->tensors[0], w->m.dtype);
    v->site.offset = w->end;
    if (!dray__dense_end(v->site.dtype, p->ndim, p->shape, &w->end))
        return dray__fail(error, DRAY_EINVALID, "%s: the model is too large", p->row->name);
    return w->each ? w->each(w, v, error) : DRAY_OK;
}

/* A row is one parameter, or one for each local expert. */
static int visit_row(megatron_building *w, visit *v, dray_error *error)
{
    bool starred = strchr(v->parameter->row->name, '*') != NULL;
    int64_t count = starred ? dray__megatron_local_experts(&w->m) : 1, first = 0;
    if (v->parameter->row->layers == DRAY__LAYERS_MOE)
        first = w->m.spec.ep_rank * dray__megatron_local_experts(&w->m);
    for (v->expert = 0; v->expert < count; v->expert++) {
        v->site.expert = first + v->expert;
        int status = visit_one(w, v, error);
        if (status)
            return status;
    }
    return DRAY_OK;
}

/* Visits all rows of a scope that the layer has. A tied head is the embedding itself if both are in
 * the same chunk, else a copy of it. */
static int visit_scope(megatron_building *w, dray__megatron_scope scope, visit *v,
                       dray_error *error)
{
    bool is_first = v->vp_stage == 0 && w->m.spec.pp_rank == 0;
    for (uint32_t i = 0; i < dray__megatron_count; i++) {
        const dray__megatron_row *row = &dray__megatron_rows[i];
        if (!w->has[i] || row->scope != scope || !dray__megatron_in(&w->m, row, v->site.layer))
            continue;
        v->parameter = &w->parameters[i];
        if (is_first && scope == DRAY__MEGATRON_LAST &&
            dray__parameter_tied(v->parameter->tensors[0], w->m.config))
            continue;
        int status = visit_row(w, v, error);
        if (status)
            return status;
    }
    return DRAY_OK;
}

static int visit_mtp(megatron_building *w, visit *v, dray_error *error)
{
    int status = DRAY_OK;
    for (v->layer = 0; v->layer < w->m.config->mtp_layers && !status; v->layer++) {
        v->site.layer = w->m.config->layers + v->layer;
        status = visit_scope(w, DRAY__MEGATRON_MTP, v, error);
        if (!status)
            status = visit_scope(w, DRAY__MEGATRON_LAYER, v, error);
    }
    return status;
}

static int visit_chunk(megatron_building *w, uint32_t vp_stage, dray_error *error)
{
    const dray_megatron_spec *s = &w->m.spec;
    bool is_first = vp_stage == 0 && s->pp_rank == 0;
    bool is_last = vp_stage == s->vpp - 1 && s->pp_rank == s->pp - 1;
    visit v = {.vp_stage = vp_stage};
    int status = DRAY_OK;
    if (is_first || (is_last && w->m.config->mtp_layers > 0))
        status = visit_scope(w, DRAY__MEGATRON_FIRST, &v, error);
    int64_t first, layers = dray__megatron_layers(&w->m, vp_stage, &first);
    for (v.layer = 0; v.layer < layers && !status; v.layer++) {
        v.site.layer = first + v.layer;
        status = visit_scope(w, DRAY__MEGATRON_LAYER, &v, error);
    }
    v.site.layer = 0;
    if (!status && is_last)
        status = visit_scope(w, DRAY__MEGATRON_LAST, &v, error);
    if (!status && is_last)
        status = visit_mtp(w, &v, error);
    return status;
}

/* Visits all parameters. They have the same places each time. */
static int visit_all(megatron_building *w,
                     int (*each)(megatron_building *, const visit *, dray_error *),
                     dray_error *error)
{
    int status = DRAY_OK;
    w->each = each;
    w->end = 0;
    for (uint32_t vp = 0; vp < w->m.spec.vpp && !status; vp++)
        status = visit_chunk(w, vp, error);
    return status;
}

static int add_visited(megatron_building *w, const visit *v, dray_error *error)
{
    return dray__megatron_add(&w->m, v->parameter, &v->site, w->layout, error);
}

int dray_layout_megatron(const dray_model_config *config, const dray_megatron_spec *spec,
                         dray_layout **out, dray_error *error)
{
    megatron_building w;
    int status = model_init(&w, config, spec, error);
    if (!status)
        status = visit_all(&w, NULL, error);
    if (!status)
        status = dray_layout_new(&w.layout, error);
    if (status)
        return status;
    dray_region_info region = {.kind = (int32_t)w.m.kind, .bytes = w.end, .name = "weights"};
    status = dray_layout_add_region(w.layout, &region, NULL, error);
    if (!status)
        status = visit_all(&w, add_visited, error);
    return dray__layout_give(w.layout, status, out);
}

/* ---- the parameters' names ------------------------------------------------------------------- */

static int count_visited(megatron_building *w, const visit *v, dray_error *error)
{
    (void)v, (void)error;
    w->count++;
    return DRAY_OK;
}

static void full_name(const visit *v, bool mtp, char *out, size_t capacity)
{
    const dray__megatron_row *row = v->parameter->row;
    char within[DRAY__PARAMETER_NAME];
    dray__parameter_name(row->name, v->expert, 0, within);
    if (row->scope == DRAY__MEGATRON_FIRST || row->scope == DRAY__MEGATRON_LAST)
        snprintf(out, capacity, "%s", within);
    else if (row->scope == DRAY__MEGATRON_MTP)
        snprintf(out, capacity, "mtp.layers.%" PRId64 ".%s", v->layer, within);
    else
        snprintf(out, capacity, "%s.layers.%" PRId64 ".%s%s", mtp ? "mtp" : "decoder", v->layer,
                 mtp ? "transformer_layer." : "", within);
}

static int list_visited(megatron_building *w, const visit *v, dray_error *error)
{
    (void)error;
    dray_megatron_parameter *p = &w->list[w->count++];
    *p = (dray_megatron_parameter){.vp_stage = v->vp_stage,
                                   .dtype = (int32_t)v->site.dtype,
                                   .ndim = v->parameter->ndim,
                                   .offset = v->site.offset};
    memcpy(p->shape, v->parameter->shape, v->parameter->ndim * sizeof *p->shape);
    full_name(v, v->site.layer >= w->m.config->layers, p->name, sizeof p->name);
    return DRAY_OK;
}

int dray_megatron_parameters(const dray_model_config *config, const dray_megatron_spec *spec,
                             dray_megatron_parameter **out, uint32_t *count, dray_error *error)
{
    megatron_building w;
    int status = model_init(&w, config, spec, error);
    if (!status)
        status = visit_all(&w, count_visited, error);
    if (status)
        return status;
    w.list = calloc(w.count ? w.count : 1, sizeof *w.list);
    if (!w.list)
        return dray__nomem(error);
    w.count = 0;
    visit_all(&w, list_visited, NULL); /* cannot fail: it succeeded before */
    *out = w.list;
    *count = w.count;
    return DRAY_OK;
}

/* ---- one parameter by its name --------------------------------------------------------------- */

typedef struct named {
    const char *name; /* as given, without "module." */
    const char *rest; /* within its scope */
    bool in_layer, in_mtp;
    int64_t layer; /* within its chunk */
    dray__megatron_parameter parameter;
    dray__megatron_site site;
} named;

static const char *skip(const char *text, const char *prefix)
{
    size_t size = strlen(prefix);
    return strncmp(text, prefix, size) == 0 ? text + size : NULL;
}

/* Splits "module.module.decoder.layers.3.mlp...". */
static bool parse_name(named *n, const char *name)
{
    for (const char *inner; (inner = skip(name, "module."));)
        name = inner;
    n->name = n->rest = name;
    const char *at = skip(name, "decoder.layers.");
    n->in_layer = at != NULL;
    if (!at && (at = skip(name, "mtp.layers.")))
        n->in_mtp = true;
    if (!at)
        return true;
    at = dray__read_number(at, &n->layer);
    if (!at || *at != '.')
        return false;
    n->rest = at + 1;
    static const char *const inner[] = {"transformer_layer.", "mtp_model_layer."};
    for (size_t i = 0; i < 2 && n->in_mtp; i++)
        if ((at = skip(n->rest, inner[i]))) {
            n->rest = at;
            n->in_layer = true;
        }
    return true;
}

static bool same_scope(const named *n, const dray__megatron_row *row)
{
    return n->in_layer == (row->scope == DRAY__MEGATRON_LAYER) &&
           (n->in_layer || n->in_mtp == (row->scope == DRAY__MEGATRON_MTP));
}

/* Finds the layer's number in the checkpoint. */
static int find_layer(const dray__megatron *m, uint32_t vp_stage, named *n, dray_error *error)
{
    int64_t first = m->config->layers, count = m->config->mtp_layers;
    if (!n->in_mtp)
        count = dray__megatron_layers(m, vp_stage, &first);
    if ((n->in_layer || n->in_mtp) && n->layer >= count)
        return dray__fail(error, DRAY_ENOENT,
                          "%.200s: chunk %u of stage %u of %u has %" PRId64 " layers", n->name,
                          vp_stage, m->spec.pp_rank, m->spec.pp, count);
    n->site.layer = first + n->layer;
    return DRAY_OK;
}

static int find_row(const dray__megatron *m, named *n, dray_error *error)
{
    int64_t local = dray__megatron_local_experts(m), expert = 0;
    for (uint32_t i = 0; i < dray__megatron_count; i++) {
        const dray__megatron_row *row = &dray__megatron_rows[i];
        if (!same_scope(n, row) || !dray__name_matches(row->name, n->rest, &expert) ||
            !dray__megatron_in(m, row, n->site.layer) ||
            !dray__megatron_resolve(m, row, &n->parameter))
            continue;
        if (strchr(row->name, '*') && expert >= local)
            return dray__fail(error, DRAY_ENOENT,
                              "%.200s: %" PRId64 " experts over ep %u are %" PRId64 " a rank",
                              n->name, m->config->experts, m->spec.ep, local);
        n->site.expert = m->spec.ep_rank * local + expert;
        return DRAY_OK;
    }
    if (!n->in_layer)
        return dray__fail(error, DRAY_ENOENT, "%s has no parameter %.200s", m->config->family,
                          n->name);
    return dray__fail(error, DRAY_ENOENT,
                      "%s has no parameter %.200s: layer %" PRId64 " of the model, %s",
                      m->config->family, n->name, n->site.layer,
                      dray__layer_is_moe(m->config, n->site.layer) ? "with experts" : "dense");
}

static int check_shape(const dray__megatron *m, named *n, uint32_t ndim, const int64_t *shape,
                       dray_error *error)
{
    char expected[DRAY__SHAPE_TEXT], found[DRAY__SHAPE_TEXT];
    dray__megatron_parameter *p = &n->parameter;
    int status = dray__megatron_shape(m, p, error);
    if (status)
        return status;
    size_t bytes = p->ndim * sizeof *shape;
    bool same = ndim == p->ndim && memcmp(shape, p->shape, bytes) == 0;
    if (!same && p->row->cut == DRAY__MEGATRON_DOWN && p->shape[0] % m->spec.tp == 0) {
        dray__megatron_parameter cut = *p;
        cut.cut_rows = true;
        same = dray__megatron_shape(m, &cut, NULL) == DRAY_OK && ndim == cut.ndim &&
               memcmp(shape, cut.shape, bytes) == 0;
        if (same)
            *p = cut;
    }
    if (same)
        return DRAY_OK;
    return dray__fail(error, DRAY_EINVALID, "%.200s: expected local shape %s, found %s", n->name,
                      dray__shape_text(p->ndim, p->shape, expected),
                      dray__shape_text(ndim, shape, found));
}

static int check_named(const dray__megatron *m, uint32_t vp_stage, named *n, dray_dtype dtype,
                       dray_error *error)
{
    int status = find_layer(m, vp_stage, n, error);
    if (!status)
        status = find_row(m, n, error);
    if (status)
        return status;
    dray_dtype stored = dray__parameter_dtype(n->parameter.tensors[0], dtype);
    if (stored != dtype)
        return dray__fail(error, DRAY_EINVALID,
                          "%.200s: expected %s, which it is never cast from, "
                          "found %s",
                          n->name, dray_dtype_name(stored), dray_dtype_name(dtype));
    n->site.dtype = dtype;
    return DRAY_OK;
}

int dray_layout_add_megatron(dray_layout *layout, const dray_model_config *config,
                             const dray_megatron_spec *spec, uint32_t vp_stage, const char *name,
                             dray_dtype dtype, uint32_t ndim, const int64_t *local_shape,
                             uint32_t region, uint64_t offset, dray_error *error)
{
    dray__megatron m;
    named n = {.site = {.region = region, .offset = offset}};
    int status = dray__megatron_init(&m, config, spec, error);
    if (status)
        return status;
    if (!parse_name(&n, name))
        return dray__fail(error, DRAY_ENOENT, "%.200s: expected a layer's number behind 'layers.'",
                          name);
    if (vp_stage >= m.spec.vpp)
        return dray__fail(error, DRAY_EINVALID, "%.200s: chunk %u of %u", name, vp_stage,
                          m.spec.vpp);
    status = check_named(&m, vp_stage, &n, dtype, error);
    if (!status)
        status = check_shape(&m, &n, ndim, local_shape, error);
    if (status)
        return status;
    const dray__layout_state before = dray__layout_state_of(layout);
    status = dray__megatron_add(&m, &n.parameter, &n.site, layout, error);
    if (status)
        dray__layout_restore(layout, &before);
    return status;
}
