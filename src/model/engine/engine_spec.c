/* Reads the engine's spec: the number of ranks that each class of parameters is cut over, the
 * layers of a stage, and the experts of a rank. As SGLang (distributed/parallel_state.py,
 * layers/dp_attention.py, distributed/utils.py: get_pp_indices) and vLLM (FusedMoEParallelConfig,
 * determine_expert_map, get_pp_indices) do. */
#include "model/engine/engine.h"

#include "base/error.h"
#include "base/options.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

dray__part dray__engine_part(const dray__parameter *parameter)
{
    static const struct {
        const char *within;
        dray__part part;
    } parts[] = {{".self_attn.", DRAY__ATTENTION}, {".shared_experts.", DRAY__SHARED},
                 {".experts.", DRAY__EXPERTS},     {".gate.", DRAY__ROUTER},
                 {".mlp.", DRAY__DENSE},           {"embed_tokens.", DRAY__EMBED},
                 {"head.weight", DRAY__HEAD}};
    for (size_t i = 0; i < COUNT(parts); i++)
        if (strstr(parameter->name, parts[i].within))
            return parts[i].part;
    return DRAY__OTHER;
}

const char *dray__engine_name(const dray__parameter *parameter)
{
    return parameter->fused ? parameter->fused : parameter->name;
}

const char *dray__engine_group_text(const dray__engine *e, dray__part part, char *out)
{
    uint32_t size = e->groups[part].size, tp = e->spec.tp;
    if (size == tp)
        snprintf(out, 48, "tp %u", tp);
    else
        snprintf(out, 48, "%u (tp %u / %u)", size, tp, tp / size);
    return out;
}

int32_t dray__engine_expert(const dray__engine *e, int64_t layer, int64_t slot)
{
    if (layer < (int64_t)e->map.layers)
        return e->map.experts[(uint64_t)layer * e->map.slots + (uint64_t)slot];
    return (int32_t)(slot % e->config->experts);
}

static int check_numbers(const dray_engine_spec *s, dray_error *error)
{
    if (s->tp_rank >= s->tp)
        return dray__fail(error, DRAY_EINVALID, "engine: tp rank %u of %u", s->tp_rank, s->tp);
    if (s->pp_rank >= s->pp)
        return dray__fail(error, DRAY_EINVALID, "engine: pp rank %u of %u", s->pp_rank, s->pp);
    if (s->vocab_multiple < 1 || s->vocab_multiple > INT64_C(1) << 30)
        return dray__fail(error, DRAY_EINVALID, "engine: vocabulary multiple %" PRId64,
                          s->vocab_multiple);
    if (s->engine != DRAY_ENGINE_SGLANG && s->engine != DRAY_ENGINE_VLLM)
        return dray__fail(error, DRAY_EINVALID, "engine: unknown kind %d", s->engine);
    if (s->draft < DRAY_DRAFT_SHARED || s->draft > DRAY_DRAFT_NONE)
        return dray__fail(error, DRAY_EINVALID, "engine: unknown draft %d", s->draft);
    if (s->draft == DRAY_DRAFT_COPIES && s->pp > 1)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "engine: a draft model with copies of embedding and head on one of %u "
                          "pipeline stages",
                          s->pp);
    if (s->w13_order != DRAY_W13_GATE_UP && s->w13_order != DRAY_W13_UP_GATE)
        return dray__fail(error, DRAY_EINVALID, "engine: unknown order %d of w13", s->w13_order);
    if (s->transposed & ~(uint32_t)DRAY_PART_LINEAR)
        return dray__fail(error, DRAY_EINVALID, "engine: transposed 0x%x: unknown parts",
                          s->transposed);
    return DRAY_OK;
}

static int read_spec(dray__engine *e, const dray_engine_spec *given, dray_error *error)
{
    dray_engine_spec *s = &e->spec;
    *s = (dray_engine_spec)DRAY_ENGINE_SPEC_INIT;
    int status = DRAY__OPTIONS_READ(dray_engine_spec, kind, s, given, error);
    if (status)
        return status;
    uint32_t *const ones[] = {&s->tp, &s->ep, &s->dp, &s->pp};
    for (size_t i = 0; i < COUNT(ones); i++)
        *ones[i] = *ones[i] ? *ones[i] : 1;
    s->vocab_multiple = s->vocab_multiple ? s->vocab_multiple : 64;
    e->dtype = (dray_dtype)s->dtype;
    e->kind = (dray_region_kind)s->kind;
    return check_numbers(s, error);
}

/* vLLM cuts everything but experts over the ranks that cut attention. SGLang cuts the parts after
 * the gathered tokens (dense MLPs, shared experts, head) over all ranks. */
static int make_groups(dray__engine *e, dray_error *error)
{
    const dray_engine_spec *s = &e->spec;
    if (s->tp % s->ep || s->tp % s->dp)
        return dray__fail(error, DRAY_EINVALID, "engine: tp %u is not divisible by %s %u", s->tp,
                          s->tp % s->ep ? "ep" : "dp", s->tp % s->ep ? s->ep : s->dp);
    uint32_t attention = s->tp / s->dp;
    uint32_t wide = s->engine == DRAY_ENGINE_VLLM ? attention : s->tp;
    const struct {
        const char *name;
        dray__part part;
        uint32_t given, usual;
    } sizes[] = {{"dense_tp", DRAY__DENSE, s->dense_tp, wide},
                 {"shared_tp", DRAY__SHARED, s->shared_tp, wide},
                 {"embed_tp", DRAY__EMBED, s->embed_tp, attention},
                 {"head_tp", DRAY__HEAD, s->head_tp, wide}};
    e->groups[DRAY__ATTENTION].size = attention;
    e->groups[DRAY__EXPERTS].size = s->tp / s->ep;
    e->groups[DRAY__ROUTER].size = e->groups[DRAY__OTHER].size = 1;
    e->expert_group = s->tp_rank / e->groups[DRAY__EXPERTS].size;
    for (size_t i = 0; i < COUNT(sizes); i++) {
        uint32_t size = sizes[i].given ? sizes[i].given : sizes[i].usual;
        if (s->tp % size)
            return dray__fail(error, DRAY_EINVALID, "engine: tp %u is not divisible by %s %u",
                              s->tp, sizes[i].name, size);
        e->groups[sizes[i].part].size = size;
    }
    if (e->config->tied && !s->head_tp)
        e->groups[DRAY__HEAD].size = e->groups[DRAY__EMBED].size;
    if (e->config->tied && e->groups[DRAY__HEAD].size != e->groups[DRAY__EMBED].size)
        return dray__fail(error, DRAY_EINVALID,
                          "engine: head_tp %u, but the head is tied to the embedding, which is cut "
                          "over %u",
                          s->head_tp, e->groups[DRAY__EMBED].size);
    for (int part = 0; part < DRAY__PARTS; part++)
        e->groups[part].rank = s->tp_rank % e->groups[part].size;
    return DRAY_OK;
}

static int given_stages(dray__engine *e, dray_error *error)
{
    const dray_engine_spec *s = &e->spec;
    int64_t sum = 0;
    for (uint32_t i = 0; i < s->pp; i++) {
        e->first_layer = i == s->pp_rank ? sum : e->first_layer;
        sum += s->pp_layers[i];
        e->end_layer = i == s->pp_rank ? sum : e->end_layer;
    }
    if (sum == e->config->layers)
        return DRAY_OK;
    return dray__fail(error, DRAY_EINVALID,
                      "engine: pp_layers are %" PRId64 " layers, the model has %" PRId64, sum,
                      e->config->layers);
}

/* Divides the layers among stages. Layers that are left over go to the last stages; in vLLM not to
 * the very last one. */
static int make_stages(dray__engine *e, dray_error *error)
{
    const dray_engine_spec *s = &e->spec;
    int64_t layers = e->config->layers, each = layers / s->pp, left = layers % s->pp;
    if (s->pp_layers)
        return given_stages(e, error);
    if (!each)
        return dray__fail(error, DRAY_EINVALID,
                          "engine: %" PRId64 " layers are fewer than pp %u stages", layers, s->pp);
    int64_t first_with_more = (int64_t)s->pp - left - (s->engine == DRAY_ENGINE_VLLM && left > 0);
    int64_t last_with_more = first_with_more + left;
    for (int64_t i = 0; i <= (int64_t)s->pp_rank; i++) {
        e->first_layer = e->end_layer;
        e->end_layer += each + (i >= first_with_more && i < last_with_more);
    }
    return DRAY_OK;
}

/* Every expert must have a slot in every layer with experts. */
static int check_map(const dray__engine *e, dray_error *error)
{
    const dray_model_config *c = e->config;
    uint8_t *seen = malloc((size_t)c->experts);
    int status = seen ? DRAY_OK : dray__nomem(error);
    for (int64_t layer = 0; layer < (int64_t)e->map.layers && !status; layer++) {
        if (!dray__layer_is_moe(c, layer))
            continue;
        int64_t missing = c->experts;
        memset(seen, 0, (size_t)c->experts);
        for (uint32_t slot = 0; slot < e->map.slots && !status; slot++) {
            int32_t expert = dray__engine_expert(e, layer, slot);
            if (expert < 0 || expert >= c->experts)
                status = dray__fail(error, DRAY_EINVALID,
                                    "engine: expert map %" PRIu64 ": layer %" PRId64
                                    ": slot %u has expert %d of %" PRId64,
                                    e->map.version, layer, slot, expert, c->experts);
            else {
                missing -= !seen[expert];
                seen[expert] = 1;
            }
        }
        const uint8_t *none = status ? NULL : memchr(seen, 0, (size_t)c->experts);
        if (none)
            status = dray__fail(error, DRAY_EINVALID,
                                "engine: expert map %" PRIu64 ": layer %" PRId64 ": expert %td and "
                                "%" PRId64 " others are in none of %u slots",
                                e->map.version, layer, none - seen, missing - 1, e->map.slots);
    }
    free(seen);
    return status;
}

static int read_map(dray__engine *e, dray_error *error)
{
    const dray_engine_spec *s = &e->spec;
    int64_t experts = e->config->experts;
    e->map = (dray_expert_map)DRAY_EXPERT_MAP_INIT;
    e->all_slots = experts + s->redundant;
    if (!s->experts)
        return DRAY_OK;
    int status = DRAY__OPTIONS_READ(dray_expert_map, experts, &e->map, s->experts, error);
    if (status)
        return status;
    if (e->map.slots < experts || (s->redundant && e->map.slots != e->all_slots))
        return dray__fail(error, DRAY_EINVALID,
                          "engine: expert map %" PRIu64 " has %u slots, expected %" PRId64
                          " experts and %u redundant ones",
                          e->map.version, e->map.slots, experts, s->redundant);
    if (e->map.layers && !e->map.experts)
        return dray__fail(error, DRAY_EINVALID, "engine: expert map %" PRIu64 " has no rows",
                          e->map.version);
    e->all_slots = e->map.slots;
    int64_t layers = e->config->layers + e->config->mtp_layers;
    if ((int64_t)e->map.layers > layers)
        return dray__fail(error, DRAY_EINVALID,
                          "engine: expert map %" PRIu64 " has %u rows, the model %" PRId64
                          " layers",
                          e->map.version, e->map.layers, layers);
    return check_map(e, error);
}

static int make_slots(dray__engine *e, dray_error *error)
{
    const dray_engine_spec *s = &e->spec;
    if (!e->family->moe) {
        if (s->ep == 1 && !s->redundant && !s->experts && !s->fuse_shared)
            return DRAY_OK;
        return dray__fail(error, DRAY_EINVALID,
                          "engine: %s has no experts: ep %u, %u redundant slots%s%s",
                          e->family->name, s->ep, s->redundant, s->experts ? ", a map" : "",
                          s->fuse_shared ? ", a fused shared expert" : "");
    }
    if (s->fuse_shared && (e->config->shared_experts != 1 || s->engine != DRAY_ENGINE_SGLANG))
        return dray__fail(error, DRAY_EINVALID,
                          "engine: a fused shared expert: expected SGLang and one shared expert, "
                          "found %" PRId64,
                          e->config->shared_experts);
    int status = read_map(e, error);
    if (status)
        return status;
    int64_t each = e->all_slots / s->ep, left = e->all_slots % s->ep, group = e->expert_group;
    bool uneven = s->engine == DRAY_ENGINE_VLLM && e->all_slots == e->config->experts &&
                  !s->experts && each > 0;
    if (left && !uneven)
        return dray__fail(error, DRAY_EINVALID,
                          "engine: %" PRId64 " slots of experts (%" PRId64 " experts and %" PRId64
                          " redundant) are not divisible by ep %u",
                          e->all_slots, e->config->experts, e->all_slots - e->config->experts,
                          s->ep);
    e->local_slots = each + (group < left);
    e->first_slot = each * group + (group < left ? group : left);
    return DRAY_OK;
}

int dray__engine_read(dray__engine *e, const dray_model_config *config,
                      const dray_engine_spec *spec, dray_error *error)
{
    *e = (dray__engine){.config = config};
    int status = read_spec(e, spec, error);
    if (!status)
        status = dray__config_check(config, &e->family, error);
    if (!status && !e->family->engine)
        status =
            dray__fail(error, DRAY_EUNSUPPORTED,
                       "engine: how engines hold a model of family %s is not known: "
                       "dray.weights.record() of Python learns it from the engine's own loader",
                       e->family->name);
    if (!status)
        status = dray__builder_defaults(config, &e->dtype, &e->kind, error);
    if (!status)
        status = make_groups(e, error);
    if (!status)
        status = make_stages(e, error);
    if (!status)
        status = make_slots(e, error);
    return status ? status : dray__engine_quant_read(e, error);
}
