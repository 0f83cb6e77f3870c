/* SPEC strings: "word", "word:N", "word:key=value,key=value". A table has for each word its
 * settings, and the function that makes the layouts of all members. */
#include "model/layout/layout.h"

#include "base/error.h"
#include "base/words.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The keys of settings. WORLD is the bare number of "fsdp:4". */
enum {
    WORLD,
    TP,
    CP,
    EP,
    ETP,
    DP,
    PP,
    VPP,
    FIRST,
    LAST,
    EXPERTS,
    VOCAB,
    QUANT,
    BLOCK,
    TRANSPOSED,
    REDUNDANT,
    DRAFT,
    FUSED,
    LIKE,
    W13,
    ORIG,
    NUMBERS,
    DTYPE = NUMBERS,
    KEYS
};
#define KEY(key) (1u << (key))

enum { MOST_RANKS = 4096, MOST_VOCAB = 1 << 30, MOST_SLOTS = 1 << 20, MOST_CHOICES = 9 };

/* Indexed by dray_quant_kind; the names are those of model/layout/formats.c. */
static const char *const quants[MOST_CHOICES] = {"none",         "fp8-block", "fp8-tensor",
                                                 "fp8-deepgemm", "mxfp8",     "mxfp4",
                                                 "nvfp4",        "int4",      "int4-zero"};
static const char *const drafts[MOST_CHOICES] = {"shared", "copies", "none"};
static const char *const expert_forms[MOST_CHOICES] = {"grouped", "packed", "sequential"};
static const char *const engines[MOST_CHOICES] = {"sglang", "vllm"};
static const char *const w13_orders[MOST_CHOICES] = {"gate-up", "up-gate"};

#define RANKS 1, MOST_RANKS, "a number of ranks from 1 to 4096", NULL
#define SWITCH 0, 1, "0 or 1", NULL

static const struct {
    const char *name;
    int64_t least, most;
    const char *expected;
    const char *const *choices; /* words for the numbers 0, 1, ... */
} keys[KEYS] = {
    [WORLD] = {"N", RANKS},
    [TP] = {"tp", RANKS},
    [CP] = {"cp", RANKS},
    [EP] = {"ep", RANKS},
    [ETP] = {"etp", RANKS},
    [DP] = {"dp", RANKS},
    [PP] = {"pp", RANKS},
    [VPP] = {"vpp", 1, MOST_RANKS, "a number of chunks from 1 to 4096", NULL},
    [FIRST] = {"first", 1, 1 << 16, "a number of layers from 1 to 65536", NULL},
    [LAST] = {"last", 1, 1 << 16, "a number of layers from 1 to 65536", NULL},
    [EXPERTS] = {"experts", 0, 0, "grouped, packed or sequential", expert_forms},
    [VOCAB] = {"vocab", 1, MOST_VOCAB, "a multiple from 1 to 2^30", NULL},
    [QUANT] = {"quant", 0, 0,
               "none, fp8-block, fp8-tensor, fp8-deepgemm, mxfp8, mxfp4, nvfp4, int4 or int4-zero",
               quants},
    [BLOCK] = {"block", 1, 1 << 20, "a size from 1 to 2^20", NULL},
    [TRANSPOSED] = {"transposed", SWITCH},
    [REDUNDANT] = {"redundant", 0, MOST_SLOTS, "a number of slots from 0 to 2^20", NULL},
    [DRAFT] = {"draft", 0, 0, "shared, copies or none", drafts},
    [FUSED] = {"fused", SWITCH},
    [LIKE] = {"like", 0, 0, "sglang or vllm", engines},
    [W13] = {"w13", 0, 0, "gate-up or up-gate", w13_orders},
    [ORIG] = {"orig", SWITCH},
    [DTYPE] = {"dtype", 0, 0, NULL, NULL},
};

typedef struct settings {
    const char *spec; /* for messages */
    bool given[KEYS];
    int64_t number[NUMBERS]; /* 0 when not given */
    dray_dtype dtype;        /* NONE for the model's */
    const char *path;
} settings;

typedef struct word {
    const char *name, *form; /* as the usage text shows it */
    uint32_t takes;          /* a set of KEY */
    int needs;               /* the required key; KEYS when all are optional */
    bool is_path;            /* the text after the colon is a path */
    uint64_t (*ranks)(const settings *);
    int (*make)(const dray_model_config *, const settings *, uint32_t rank, dray_layout **,
                dray_error *);
} word;

static uint64_t one_rank(const settings *s)
{
    (void)s;
    return 1;
}

static uint64_t world_ranks(const settings *s)
{
    return (uint64_t)s->number[WORLD];
}

/* A number that was not given is one rank. */
static uint32_t at_least_one(int64_t number)
{
    return number ? (uint32_t)number : 1;
}

static uint64_t engine_ranks(const settings *s)
{
    return (uint64_t)s->number[TP] * at_least_one(s->number[PP]);
}

static int make_full(const dray_model_config *model, const settings *s, uint32_t rank,
                     dray_layout **out, dray_error *error)
{
    (void)rank;
    return dray_layout_full(model, s->dtype, DRAY_REGION_SHARED, out, error);
}

static int make_fsdp(const dray_model_config *model, const settings *s, uint32_t rank,
                     dray_layout **out, dray_error *error)
{
    return dray_layout_fsdp(model, s->dtype, rank, (uint32_t)world_ranks(s), DRAY_REGION_SHARED,
                            out, error);
}

static int make_fsdp1(const dray_model_config *model, const settings *s, uint32_t rank,
                      dray_layout **out, dray_error *error)
{
    dray_fsdp1_spec spec = DRAY_FSDP1_SPEC_INIT;
    spec.rank = rank;
    spec.world = (uint32_t)world_ranks(s);
    spec.dtype = (int32_t)s->dtype;
    spec.use_orig_params = (int32_t)s->number[ORIG];
    return dray_layout_fsdp1(model, &spec, out, error);
}

/* Makes the layout of an engine's rank. Ranks of a stage have consecutive numbers. */
static int make_engine(const dray_model_config *model, const settings *s, uint32_t rank,
                       dray_layout **out, dray_error *error)
{
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    dray_engine_quant quant = DRAY_ENGINE_QUANT_INIT;
    spec.tp = (uint32_t)s->number[TP];
    spec.tp_rank = rank % spec.tp;
    spec.pp = at_least_one(s->number[PP]);
    spec.pp_rank = rank / spec.tp;
    spec.ep = at_least_one(s->number[EP]);
    spec.dp = at_least_one(s->number[DP]);
    spec.dtype = (int32_t)s->dtype;
    spec.vocab_multiple = s->number[VOCAB];
    spec.transposed = s->number[TRANSPOSED] ? DRAY_PART_LINEAR : 0;
    spec.redundant = (uint32_t)s->number[REDUNDANT];
    spec.draft = (int32_t)s->number[DRAFT];
    spec.fuse_shared = (int32_t)s->number[FUSED];
    spec.engine = (int32_t)s->number[LIKE];
    spec.w13_order = (int32_t)s->number[W13];
    quant.kind = (int32_t)s->number[QUANT];
    quant.block[0] = quant.kind < DRAY_QUANT_INT4 ? s->number[BLOCK] : 1;
    quant.block[1] = s->number[BLOCK];
    spec.quant = quant.kind ? &quant : NULL;
    return dray_layout_engine(model, &spec, out, error);
}

static uint64_t megatron_ranks(const settings *s)
{
    const int sizes[] = {TP, CP, DP, PP};
    uint64_t ranks = 1; /* at most 4096^4 */
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        ranks *= s->number[sizes[i]] ? (uint64_t)s->number[sizes[i]] : 1;
    return ranks;
}

static int make_megatron(const dray_model_config *model, const settings *s, uint32_t rank,
                         dray_layout **out, dray_error *error)
{
    dray_megatron_spec spec = DRAY_MEGATRON_SPEC_INIT;
    spec.tp = (uint32_t)s->number[TP];
    spec.cp = (uint32_t)s->number[CP];
    spec.ep = (uint32_t)s->number[EP];
    spec.etp = (uint32_t)s->number[ETP];
    spec.dp = (uint32_t)s->number[DP];
    spec.pp = (uint32_t)s->number[PP];
    spec.vpp = (uint32_t)s->number[VPP];
    spec.experts = (int32_t)s->number[EXPERTS];
    spec.dtype = (int32_t)s->dtype;
    spec.vocab_multiple = s->number[VOCAB];
    spec.first_stage_layers = s->number[FIRST];
    spec.last_stage_layers = s->number[LAST];
    int status = dray_megatron_place(&spec, rank, NULL, error);
    return status ? status : dray_layout_megatron(model, &spec, out, error);
}

static int make_safetensors(const dray_model_config *model, const settings *s, uint32_t rank,
                            dray_layout **out, dray_error *error)
{
    (void)model, (void)rank;
    return dray_layout_safetensors(s->path, out, error);
}

static const word words[] = {
    {"full", "full[:dtype=D]", KEY(DTYPE), KEYS, false, one_rank, make_full},
    {"fsdp", "fsdp:N[,dtype=D]", KEY(WORLD) | KEY(DTYPE), WORLD, false, world_ranks, make_fsdp},
    {"fsdp1", "fsdp1:N[,dtype=D][,orig=1]", KEY(WORLD) | KEY(DTYPE) | KEY(ORIG), WORLD, false,
     world_ranks, make_fsdp1},
    {"megatron",
     "megatron:tp=N,pp=N,ep=N,etp=N,vpp=N,dp=N,cp=N[,first=N][,last=N][,dtype=D][,vocab=N]"
     "[,experts=grouped|packed|sequential]",
     KEY(TP) | KEY(CP) | KEY(EP) | KEY(ETP) | KEY(DP) | KEY(PP) | KEY(VPP) | KEY(FIRST) |
         KEY(LAST) | KEY(EXPERTS) | KEY(DTYPE) | KEY(VOCAB),
     KEYS, false, megatron_ranks, make_megatron},
    {"engine", "engine:tp=N[,ep=N][,dp=N][,pp=N][,quant=Q][,dtype=D][,...]",
     KEY(TP) | KEY(EP) | KEY(DP) | KEY(PP) | KEY(VOCAB) | KEY(QUANT) | KEY(BLOCK) |
         KEY(TRANSPOSED) | KEY(REDUNDANT) | KEY(DRAFT) | KEY(FUSED) | KEY(LIKE) | KEY(W13) |
         KEY(DTYPE),
     TP, false, engine_ranks, make_engine},
    {"safetensors", "safetensors:PATH", 0, KEYS, true, one_rank, make_safetensors},
};

enum { WORDS = sizeof words / sizeof *words };

static int bad(const settings *s, const char *problem, const char *text, const char *hint,
               dray_error *error)
{
    return dray__fail(error, DRAY_EINVALID, "SPEC '%.160s': %s '%.80s'%s", s->spec, problem, text,
                      hint);
}

static bool read_number(const char *text, int key, int64_t *out)
{
    char *end;
    for (int i = 0; keys[key].choices && i < MOST_CHOICES && keys[key].choices[i]; i++)
        if (strcmp(text, keys[key].choices[i]) == 0) {
            *out = i;
            return true;
        }
    if (keys[key].choices)
        return false;
    if (*text < '0' || *text > '9' || strlen(text) > 10)
        return false;
    *out = strtoll(text, &end, 10);
    return !*end && *out >= keys[key].least && *out <= keys[key].most;
}

static int set_dtype(settings *s, const char *value, dray_error *error)
{
    enum { MOST = 16 };
    const char *names[MOST];
    size_t count = 0;
    char hint[96];
    s->dtype = dray_dtype_parse(value);
    if (s->dtype != DRAY_DTYPE_NONE)
        return DRAY_OK;
#define XX(name, value_, bytes, safetensors, torch) names[count++] = #name;
    DRAY_DTYPE_MAP(XX)
#undef XX
    return bad(s, "unknown dtype", value, dray__word_hint(value, names, count, hint, sizeof hint),
               error);
}

static int set_key(settings *s, int key, const char *value, dray_error *error)
{
    char expected[128];
    if (s->given[key])
        return bad(s, "given twice:", keys[key].name, "", error);
    s->given[key] = true;
    if (key == DTYPE)
        return set_dtype(s, value, error);
    if (read_number(value, key, &s->number[key]))
        return DRAY_OK;
    snprintf(expected, sizeof expected, "expected %s, found", keys[key].expected);
    return bad(s, expected, value, "", error);
}

static int read_setting(const word *w, settings *s, char *text, bool first, dray_error *error)
{
    char *equals = strchr(text, '=');
    if (!equals && first && (w->takes & KEY(WORLD)))
        return set_key(s, WORLD, text, error);
    if (!equals)
        return bad(s, "expected key=value, found", text, "", error);
    *equals = 0;
    const char *known[KEYS];
    size_t count = 0;
    for (int key = WORLD + 1; key < KEYS; key++) {
        if ((w->takes & KEY(key)) && strcmp(keys[key].name, text) == 0)
            return set_key(s, key, equals + 1, error);
        if (w->takes & KEY(key))
            known[count++] = keys[key].name;
    }
    char hint[256];
    dray__word_hint(text, known, count, hint, sizeof hint);
    if (!*hint)
        snprintf(hint, sizeof hint, " (form: %s)", w->form);
    return bad(s, "unknown key", text, hint, error);
}

/* Reads settings from `arguments`, the text after the colon, or NULL. It is split in place. */
static int read_settings(const word *w, settings *s, char *arguments, dray_error *error)
{
    if (w->is_path) {
        s->path = arguments;
        return arguments && *arguments ? DRAY_OK
                                       : bad(s, "a path is missing; form:", w->form, "", error);
    }
    bool first = true;
    for (char *at = arguments; at; first = false) {
        char *comma = strchr(at, ',');
        if (comma)
            *comma = 0;
        int status = read_setting(w, s, at, first, error);
        if (status)
            return status;
        at = comma ? comma + 1 : NULL;
    }
    if (w->needs < KEYS && !s->given[w->needs])
        return bad(s, "the number of ranks is missing; form:", w->form, "", error);
    return DRAY_OK;
}

static int find_word(const settings *s, const char *name, const word **out, dray_error *error)
{
    const char *names[WORDS];
    char hint[160];
    for (size_t i = 0; i < WORDS; i++) {
        names[i] = words[i].name;
        *out = &words[i];
        if (strcmp(names[i], name) == 0)
            return DRAY_OK;
    }
    dray__word_hint(name, names, WORDS, hint, sizeof hint);
    size_t at = strlen(hint);
    for (size_t i = 0; i < WORDS && at < sizeof hint; i++)
        at += (size_t)snprintf(hint + at, sizeof hint - at, "%s%s%s",
                               i ? ", " : " (known: ", names[i], i + 1 == WORDS ? ")" : "");
    return bad(s, "unknown word", name, hint, error);
}

static int make_all(const word *w, const dray_model_config *model, const settings *s,
                    dray_layout ***out, uint32_t *count, dray_error *error)
{
    uint64_t ranks = w->ranks(s);
    if (ranks > MOST_RANKS)
        return dray__fail(error, DRAY_EINVALID, "SPEC '%.160s': %" PRIu64 " ranks, at most %d",
                          s->spec, ranks, MOST_RANKS);
    dray_layout **layouts = calloc(ranks, sizeof *layouts);
    int status = layouts ? DRAY_OK : dray__nomem(error);
    for (uint32_t rank = 0; rank < ranks && !status; rank++)
        status = w->make(model, s, rank, &layouts[rank], error);
    if (status) {
        for (uint32_t rank = 0; layouts && rank < ranks; rank++)
            dray_layout_free(layouts[rank]);
        free(layouts);
        return dray__fail_prefix(error, status, "SPEC '%.120s': ", s->spec);
    }
    *out = layouts;
    *count = (uint32_t)ranks;
    return DRAY_OK;
}

int dray_layouts_from_spec(const dray_model_config *model, const char *spec, dray_layout ***out,
                           uint32_t *count, dray_error *error)
{
    char *text = strdup(spec);
    if (!text)
        return dray__nomem(error);
    settings s = {.spec = spec};
    const word *w;
    char *colon = strchr(text, ':');
    if (colon)
        *colon = 0;
    int status = find_word(&s, text, &w, error);
    if (!status)
        status = read_settings(w, &s, colon ? colon + 1 : NULL, error);
    if (!status && !w->is_path && !model)
        status = bad(&s, "needs a model:", w->name, "", error);
    if (!status)
        status = make_all(w, model, &s, out, count, error);
    free(text);
    return status;
}
