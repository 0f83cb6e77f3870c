/* Makes a family from its file, and checks all of the file. docs/families.md describes the file. */
#include "model/families/read.h"

#include "base/error.h"
#include "base/words.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

enum { MOST_VALUES = 64, MOST_DEPTH = 6, LONGEST_NAME = 95 };

/* A family being read. The first error is kept; later results do not matter. */
typedef struct reader {
    const char *path;
    const json_t *parts; /* parts.json */
    dray__arena *arena;
    dray__family family;
    dray__parameter *rows;
    const char *values[MOST_VALUES]; /* names */
    uint32_t value_count;
    bool ruled[MOST_VALUES];
    int status;
    dray_error *error;
} reader;

/* ---- errors ---------------------------------------------------------------------------------- */

static void found_text(const json_t *value, char *out, size_t capacity)
{
    char *text = value ? json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    snprintf(out, capacity, "%.60s", text ? text : value ? "a value" : "nothing");
    free(text);
}

static void bad(reader *r, const char *key, const char *expected, const json_t *found)
{
    char text[64];
    if (r->status)
        return;
    found_text(found, text, sizeof text);
    r->status = dray__fail(r->error, DRAY_EFORMAT, "%.200s: %.120s: expected %s, found %s", r->path,
                           key, expected, text);
}

static void bad_word(reader *r, const char *key, const char *expected, const char *found,
                     const char *hint)
{
    if (!r->status)
        r->status =
            dray__fail(r->error, DRAY_EFORMAT, "%.200s: %.120s: expected %s, found '%.60s'%.100s",
                       r->path, key, expected, found, hint);
}

static void *get_memory(reader *r, size_t size)
{
    void *memory = r->status ? NULL : dray__arena_get(r->arena, size);
    if (memory)
        memset(memory, 0, size);
    else if (!r->status)
        r->status = dray__nomem(r->error);
    return memory;
}

/* Every member must be one of the keys. */
static void check_members(reader *r, const char *where, const json_t *object,
                          const char *const *keys, size_t count)
{
    const char *key;
    json_t *value;
    char hint[128];
    json_object_foreach((json_t *)object, key, value)
    {
        size_t i = 0;
        while (i < count && strcmp(keys[i], key) != 0)
            i++;
        if (i == count)
            bad_word(r, where, "a key that is known", key,
                     dray__word_hint_or_all(key, keys, count, hint, sizeof hint));
    }
}

/* Returns the index of a word; `absent` when the key is missing. */
static int word_of(reader *r, const char *where, const json_t *object, const char *key,
                   const char *const *words, size_t count, int absent)
{
    const json_t *value = json_object_get(object, key);
    const char *text = json_string_value(value);
    char at[160], hint[128];
    if (!value)
        return absent;
    snprintf(at, sizeof at, "%.100s: %s", where, key);
    for (size_t i = 0; text && i < count; i++)
        if (strcmp(words[i], text) == 0)
            return (int)i;
    if (!text)
        bad(r, at, "a word", value);
    else
        bad_word(r, at, "a word that is known", text,
                 dray__word_hint_or_all(text, words, count, hint, sizeof hint));
    return absent;
}

static bool switch_of(reader *r, const json_t *object, const char *key, bool absent)
{
    const json_t *value = json_object_get(object, key);
    if (value && !json_is_boolean(value))
        bad(r, key, "true or false", value);
    return value ? json_is_true(value) : absent;
}

/* Returns a string. In names of parameters, '@' at the start stands for the family's prefix. */
static const char *text_of(reader *r, const char *where, const json_t *value)
{
    const char *text = json_string_value(value), *prefix = r->family.layer;
    char whole[2 * DRAY__PARAMETER_NAME];
    if (!text) {
        bad(r, where, "a text", value);
        return "";
    }
    int length =
        snprintf(whole, sizeof whole, "%s%s", *text == '@' ? prefix : "", text + (*text == '@'));
    if (length > LONGEST_NAME) {
        bad(r, where, "a text of at most 95 bytes with its prefix", value);
        return "";
    }
    char *copy = r->status ? NULL : dray__arena_text(r->arena, whole);
    if (!copy && !r->status)
        r->status = dray__nomem(r->error);
    return copy ? copy : "";
}

/* ---- expressions ----------------------------------------------------------------------------- */

typedef struct parsing {
    reader *r;
    const char *at;
    dray__expression *out;
    uint32_t depth;
    bool failed;
} parsing;

static char next_sign(parsing *p)
{
    while (*p->at == ' ')
        p->at++;
    return *p->at;
}

static void add_step(parsing *p, char what, int64_t value)
{
    if (p->out->count == DRAY__MOST_STEPS) {
        p->failed = true;
        return;
    }
    p->out->steps[p->out->count].what = what;
    p->out->steps[p->out->count++].value = value;
}

static bool in_word(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
}

static void parse_sum(parsing *p);

static void parse_name(parsing *p)
{
    const char *begin = p->at;
    while (in_word(*p->at))
        p->at++;
    for (uint32_t i = 0; i < p->r->value_count; i++)
        if (strlen(p->r->values[i]) == (size_t)(p->at - begin) &&
            strncmp(p->r->values[i], begin, (size_t)(p->at - begin)) == 0) {
            add_step(p, 'v', i);
            return;
        }
    p->at = begin;
    p->failed = true;
}

static void parse_atom(parsing *p)
{
    char c = next_sign(p);
    int64_t number;
    if (c == '(' && p->depth++ < DRAY__MOST_STEPS) {
        p->at++;
        parse_sum(p);
        p->failed |= next_sign(p) != ')';
        p->at += !p->failed;
    } else if (c >= '0' && c <= '9') {
        const char *end = dray__read_number(p->at, &number);
        p->failed |= !end;
        p->at = end ? end : p->at;
        add_step(p, 'n', number);
    } else if (in_word(c)) {
        parse_name(p);
    } else {
        p->failed = true;
    }
}

static void parse_chain(parsing *p, const char *operators, void (*part)(parsing *))
{
    part(p);
    while (!p->failed && next_sign(p) && strchr(operators, *p->at)) {
        char operator= * p->at++;
        part(p);
        add_step(p, operator, 0);
    }
}

static void parse_product(parsing *p)
{
    parse_chain(p, "*/", parse_atom);
}

static void parse_sum(parsing *p)
{
    parse_chain(p, "+-", parse_product);
}

static const dray__expression *expression_of(reader *r, const char *where, const json_t *value)
{
    char number[32];
    dray__expression *out = get_memory(r, sizeof *out);
    if (!out)
        return NULL;
    if (json_is_integer(value) || json_is_boolean(value)) {
        snprintf(number, sizeof number, "%lld",
                 json_is_true(value) ? 1LL : (long long)json_integer_value(value));
        out->text = "a number";
        out->count = 1;
        out->steps[0].what = 'n';
        out->steps[0].value = json_is_true(value) ? 1 : json_integer_value(value);
        return out;
    }
    out->text = text_of(r, where, value);
    parsing p = {.r = r, .at = out->text, .out = out};
    parse_sum(&p);
    if (p.failed || next_sign(&p)) {
        char hint[128];
        dray__word_hint(p.at, r->values, r->value_count, hint, sizeof hint);
        bad_word(r, where, "arithmetic on values of the configuration", out->text, hint);
    }
    return out;
}

/* ---- config: the rules ----------------------------------------------------------------------- */

static void add_key(reader *r, const char *where, dray__config_rule *rule, const json_t *key)
{
    uint32_t i = 0;
    while (i < COUNT(rule->keys) && rule->keys[i])
        i++;
    if (i == COUNT(rule->keys))
        bad(r, where, "at most 3 keys", key);
    else
        rule->keys[i] = text_of(r, where, key);
}

static void read_rule(reader *r, const char *name, const json_t *value, dray__config_rule *rule)
{
    static const char *const keys[] = {"key", "default", "null", "list"};
    char where[96];
    const json_t *key = json_object_get(value, "key"), *item;
    size_t i;
    snprintf(where, sizeof where, "config: %.80s", name);
    if (!json_is_object(value)) {
        rule->absent = expression_of(r, where, value);
        return;
    }
    check_members(r, where, value, keys, COUNT(keys));
    if (json_is_array(key))
        json_array_foreach(key, i, item) add_key(r, where, rule, item);
    else
        add_key(r, where, rule, key);
    const json_t *absent = json_object_get(value, "default"),
                 *null = json_object_get(value, "null");
    rule->is_list = switch_of(r, value, "list", false);
    rule->is_flag = json_is_boolean(absent);
    rule->absent = absent ? expression_of(r, where, absent) : NULL;
    rule->null = null ? expression_of(r, where, null) : NULL;
}

static bool is_placed(const reader *r, const bool *placed, const dray__expression *expression)
{
    for (uint32_t i = 0; expression && i < expression->count; i++)
        if (expression->steps[i].what == 'v' && r->ruled[expression->steps[i].value] &&
            !placed[expression->steps[i].value])
            return false;
    return true;
}

/* Sorts the rules so that each is after those that compute the values it needs. */
static void sort_rules(reader *r, const dray__config_rule *rules, uint32_t count,
                       dray__config_rule *sorted)
{
    bool placed[MOST_VALUES] = {false};
    uint32_t at = 0;
    for (bool more = true; more;) {
        more = false;
        for (uint32_t i = 0; i < count; i++) {
            const dray__config_rule *rule = &rules[i];
            if (placed[rule->value] || !is_placed(r, placed, rule->absent) ||
                !is_placed(r, placed, rule->null))
                continue;
            sorted[at++] = *rule;
            more = placed[rule->value] = true;
        }
    }
    for (uint32_t i = 0; i < count; i++)
        if (!placed[rules[i].value])
            bad_word(r, "config", "values that do not need themselves", r->values[rules[i].value],
                     "");
}

static uint32_t value_index(reader *r, const char *name)
{
    for (uint32_t i = 0; i < r->value_count; i++)
        if (strcmp(r->values[i], name) == 0)
            return i;
    return UINT32_MAX;
}

static void read_rules(reader *r, const json_t *config)
{
    dray__config_rule rules[MOST_VALUES] = {{0}};
    uint32_t count = 0, fields;
    const char *name;
    json_t *value;
    for (const char *field; (field = dray__value_name(r->value_count));)
        r->values[r->value_count++] = field;
    fields = r->value_count;
    if (!json_is_object(config))
        bad(r, "config", "an object", config);
    json_object_foreach((json_t *)config, name, value)
    {
        uint32_t at = value_index(r, name);
        size_t length = strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_");
        if (name[length] || !length || (*name >= '0' && *name <= '9'))
            bad_word(r, "config", "names of lower-case letters, digits and _", name, "");
        else if (at == UINT32_MAX && r->value_count - fields == DRAY_MODEL_OWN)
            bad_word(r, "config", "at most 32 values of the family's own", name, "");
        else if (at == UINT32_MAX)
            r->values[at = r->value_count++] = name;
        if (!r->status)
            r->ruled[at] = !json_is_null(value);
    }
    json_object_foreach((json_t *)config, name, value)
    {
        if (r->status || json_is_null(value))
            continue;
        rules[count].value = value_index(r, name);
        read_rule(r, name, value, &rules[count++]);
    }
    dray__config_rule *sorted = get_memory(r, (count + 1) * sizeof *sorted);
    if (sorted)
        sort_rules(r, rules, count, sorted);
    r->family.rules = sorted;
    r->family.rule_count = count;
    r->family.moe = r->ruled[value_index(r, "experts")];
    r->family.latent = r->ruled[value_index(r, "kv_lora_rank")];
    r->family.mtp = r->ruled[value_index(r, "mtp_layers")];
}

static void read_kinds(reader *r, const json_t *kinds)
{
    static const char *const keys[] = {"numbers", "others", "each",  "is",     "signs",
                                       "sign",    "every",  "first", "default"};
    const char *name;
    json_t *value;
    uint32_t own = 0;
    if (kinds && !json_is_object(kinds))
        bad(r, "kinds", "an object", kinds);
    json_object_foreach((json_t *)kinds, name, value)
    {
        char where[96];
        snprintf(where, sizeof where, "kinds: %.80s", name);
        uint32_t i = strcmp(name, "dense") == 0 ? DRAY__DENSE_KIND : own++;
        if (i != DRAY__DENSE_KIND && i >= DRAY_MODEL_KINDS) {
            bad(r, where, "at most 3 kinds", value);
            return;
        }
        if (!json_is_object(value))
            bad(r, where, "an object", value);
        check_members(r, where, value, keys, COUNT(keys));
        dray__kind *kind = &r->family.kinds[i];
        const char **texts[] = {&kind->numbers, &kind->others, &kind->each,  &kind->is,
                                &kind->signs,   &kind->sign,   &kind->every, &kind->first};
        kind->name = name;
        for (size_t k = 0; k < COUNT(texts); k++) {
            const json_t *text = json_object_get(value, keys[k]);
            *texts[k] = text ? text_of(r, where, text) : NULL;
        }
        kind->absent = dray__json_integer(value, "default");
        if (!kind->each != !kind->is || !kind->signs != !kind->sign ||
            (!kind->each && !kind->signs && !kind->numbers && !kind->others))
            bad(r, where, "numbers, others, each and is, or signs and sign", value);
    }
}

/* ---- rows ------------------------------------------------------------------------------------ */

static uint32_t stars_in(const char *text)
{
    uint32_t stars = 0;
    for (; *text; text++)
        stars += *text == '*';
    return stars;
}

static void read_layers(reader *r, const char *where, const json_t *json, dray__parameter *row)
{
    static const char *const words[] = {"all", "dense", "moe", "mtp"};
    const char *text = json_string_value(json_object_get(json, "layers"));
    bool unless = text && *text == '!';
    for (uint32_t i = 0; text && i < DRAY_MODEL_KINDS; i++)
        if (r->family.kinds[i].name && strcmp(r->family.kinds[i].name, text + unless) == 0) {
            row->layers = unless ? DRAY__LAYERS_NOT_KIND : DRAY__LAYERS_KIND;
            row->kind = i;
            return;
        }
    row->layers = (dray__layers)word_of(r, where, json, "layers", words, COUNT(words), 0);
}

static void read_shape(reader *r, const char *where, const json_t *shape, dray__parameter *row)
{
    const json_t *item;
    size_t i;
    if (!json_is_array(shape) || !json_array_size(shape) ||
        json_array_size(shape) > DRAY_MAX_DIMS) {
        bad(r, where, "a shape of 1 to 4 sizes", shape);
        return;
    }
    json_array_foreach(shape, i, item) row->shape[row->ndim++] = expression_of(r, where, item);
}

static void check_row(reader *r, const dray__parameter *row, const json_t *json)
{
    uint32_t stars = stars_in(row->name);
    bool columns = row->cut == DRAY__CUT_ROW || row->cut == DRAY__CUT_HEADS_ROW;
    if (stars > 2 || (stars == 2 && (row->layers != DRAY__LAYERS_MOE || row->each)))
        bad(r, row->name, "a '*' for the layer, and in layers \"moe\" another for the expert",
            json);
    if (!stars && (row->layers || row->each))
        bad(r, row->name, "a '*' for the layer's number", json);
    if (row->fused && stars_in(row->fused) != (stars > 0))
        bad(r, row->name, "a name of the engine with '*' for the layer", json);
    if (columns && row->ndim < 2)
        bad(r, row->name, "two sizes where columns are cut", json);
}

static void read_row(reader *r, const json_t *json)
{
    static const char *const keys[] = {"name",   "shape", "cut",  "fused", "tied",
                                       "layers", "each",  "when", "dtype"};
    static const char *const cuts[] = {"none",     "column",    "row",  "heads",
                                       "kv_heads", "heads_row", "vocab"};
    if (r->family.count == DRAY__MOST_ROWS) {
        bad(r, "rows", "at most 512 rows", json);
        return;
    }
    dray__parameter *row = &r->rows[r->family.count++];
    *row = (dray__parameter){.name = text_of(r, "rows: name", json_object_get(json, "name"))};
    check_members(r, row->name, json, keys, COUNT(keys));
    read_shape(r, row->name, json_object_get(json, "shape"), row);
    read_layers(r, row->name, json, row);
    row->cut = (dray__cut)word_of(r, row->name, json, "cut", cuts, COUNT(cuts), 0);
    const json_t *fused = json_object_get(json, "fused"), *tied = json_object_get(json, "tied");
    const json_t *each = json_object_get(json, "each"), *when = json_object_get(json, "when");
    const json_t *dtype = json_object_get(json, "dtype");
    row->fused = fused ? text_of(r, row->name, fused) : NULL;
    row->tied = tied ? text_of(r, row->name, tied) : NULL;
    row->each = each ? expression_of(r, row->name, each) : NULL;
    const char *condition = json_string_value(when);
    row->unless = condition && *condition == '!';
    json_t *text = row->unless ? json_string(condition + 1) : json_incref((json_t *)when);
    row->when = text ? expression_of(r, row->name, text) : NULL;
    if (when && !text && !r->status)
        r->status = dray__nomem(r->error);
    json_decref(text);
    row->dtype = dtype && json_is_string(dtype) ? dray_dtype_parse(json_string_value(dtype)) : 0;
    if (dtype && !row->dtype)
        bad(r, row->name, "a dtype", dtype);
    if (!r->status)
        check_row(r, row, json);
}

/* Reads a list of rows, and of names of lists of rows. */
static void read_rows(reader *r, const json_t *list, const char *where, uint32_t depth)
{
    const json_t *item;
    size_t i;
    if (!json_is_array(list) || depth > MOST_DEPTH) {
        bad(r, where, "a list of rows", list);
        return;
    }
    json_array_foreach(list, i, item)
    {
        const char *part = json_string_value(item);
        const json_t *rows = part ? json_object_get(r->parts, part) : NULL;
        if (r->status)
            return;
        if (part && rows)
            read_rows(r, rows, part, depth + 1);
        else if (json_is_object(item))
            read_row(r, item);
        else
            bad(r, where, "a row, or the name of a part", item);
    }
}

static bool same_count(const dray__expression *a, const dray__expression *b)
{
    return a == b || (a && b && strcmp(a->text, b->text) == 0);
}

/* Checks that rows of the same layers are adjacent and have the same expression, and that rows of
 * experts are adjacent. */
static void check_groups(reader *r)
{
    dray__parameter *rows = r->rows;
    for (uint32_t i = 1; i < r->family.count && !r->status; i++)
        for (uint32_t j = 0; j < i; j++) {
            bool layers = stars_in(rows[i].name) && stars_in(rows[j].name) &&
                          same_count(rows[i].each, rows[j].each);
            bool experts = stars_in(rows[i].name) == 2 && stars_in(rows[j].name) == 2;
            bool apart = layers && (!stars_in(rows[i - 1].name) ||
                                    !same_count(rows[i].each, rows[i - 1].each));
            apart |= experts && stars_in(rows[i - 1].name) != 2;
            if (layers)
                rows[i].each = rows[j].each;
            if (apart && !r->status)
                bad_word(r, rows[i].name, "rows of the same layers or experts side by side",
                         rows[i - 1].name, " before it");
        }
}

static void check_tied(reader *r)
{
    for (uint32_t i = 0; i < r->family.count; i++) {
        uint32_t j = 0;
        if (!r->rows[i].tied)
            continue;
        while (j < r->family.count && strcmp(r->rows[j].name, r->rows[i].tied) != 0)
            j++;
        if (j == r->family.count || j == i || stars_in(r->rows[i].tied))
            bad_word(r, r->rows[i].name, "a tie to a row outside layers", r->rows[i].tied, "");
    }
}

/* Checks that a table for engines has only matrices and vectors, in the model's layers. */
static void check_engine(reader *r)
{
    for (uint32_t i = 0; i < r->family.count && r->family.engine; i++)
        if (r->rows[i].ndim > 2 || r->rows[i].each || r->family.count > DRAY__MOST_PARAMETERS)
            bad_word(r, "engine",
                     "false where a row has more than two sizes or layers of its own, "
                     "or there are more than 64",
                     r->rows[i].name, "");
}

static void read_modules(reader *r, const json_t *modules)
{
    const char *name;
    json_t *list;
    uint32_t count = 0;
    dray__module *out = get_memory(r, (json_object_size(modules) + 1) * sizeof *out);
    if (modules && !json_is_object(modules))
        bad(r, "modules", "an object", modules);
    r->family.modules = out;
    json_object_foreach((json_t *)modules, name, list)
    {
        json_t *text = json_string(name);
        if (r->status || !json_is_array(list) || !json_array_size(list) ||
            json_array_size(list) > COUNT(out->tensors))
            bad(r, "modules", "lists of one or two tensors", list);
        else
            out[count].name = text_of(r, "modules", text);
        for (size_t i = 0; i < json_array_size(list) && !r->status; i++)
            out[count].tensors[i] = text_of(r, name, json_array_get(list, i));
        count++;
        json_decref(text);
    }
}

static void read_family(reader *r, const json_t *json)
{
    static const char *const keys[] = {"like",   "prefix",     "config",  "kinds",
                                       "rows",   "modules",    "refuse",  "within",
                                       "engine", "rope_theta", "megatron"};
    const json_t *prefix = json_object_get(json, "prefix"), *item;
    const json_t *within = json_object_get(json, "within");
    const json_t *theta = json_object_get(json, "rope_theta");
    char layer[DRAY__PARAMETER_NAME];
    size_t i;
    check_members(r, "the family", json, keys, COUNT(keys));
    r->family.layer = "";
    const char *begin = prefix ? text_of(r, "prefix", prefix) : "model.";
    snprintf(layer, sizeof layer, "%slayers.*.", begin);
    r->family.layer = begin; /* the text that replaces '@' while the file is read */
    read_rules(r, json_object_get(json, "config"));
    read_kinds(r, json_object_get(json, "kinds"));
    r->rows = get_memory(r, DRAY__MOST_ROWS * sizeof *r->rows);
    if (r->rows)
        read_rows(r, json_object_get(json, "rows"), "rows", 0);
    r->family.parameters = r->rows;
    read_modules(r, json_object_get(json, "modules"));
    r->family.engine = switch_of(r, json, "engine", false);
    r->family.megatron = switch_of(r, json, "megatron", false);
    r->family.within = within ? text_of(r, "within", within) : NULL;
    r->family.refused = json_object_get(json, "refuse");
    r->family.default_theta = theta ? json_number_value(theta) : 10000;
    if (theta && !json_is_number(theta))
        bad(r, "rope_theta", "a number", theta);
    if (r->family.refused && !json_is_array(r->family.refused))
        bad(r, "refuse", "a list of keys", r->family.refused);
    json_array_foreach(r->family.refused, i, item) text_of(r, "refuse", item);
    if (r->status)
        return;
    check_groups(r);
    check_tied(r);
    check_engine(r);
    r->family.layer = dray__arena_text(r->arena, layer);
    if (!r->family.layer)
        r->status = dray__nomem(r->error);
}

int dray__family_read(const dray__family_source *source, dray__family *out, dray_error *error)
{
    reader r = {.path = source->path,
                .parts = source->parts,
                .arena = source->arena,
                .family = {.name = source->name, .path = source->path},
                .error = error};
    read_family(&r, source->json);
    if (!r.status)
        *out = r.family;
    return r.status;
}
