/* Reading a Hugging Face tokenizer.json (the format of huggingface/tokenizers: a `model` of type
 * BPE, and the parts around it). A part that would change tokens and is not implemented here is
 * refused by name. */
#include "base/error.h"
#include "base/json.h"
#include "engine/tokenizer_parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FILE_MOST = 256 << 20, IDS_MOST = 1 << 24 };

/* GPT-2's split, for files in which ByteLevel splits itself (use_regex). */
static const char gpt2_pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

static bool is_printable(uint32_t byte)
{
    return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

/* Returns the character that stands for a byte. */
static uint32_t letter_of(uint8_t byte)
{
    uint32_t number = 0x100;
    if (is_printable(byte))
        return byte;
    for (uint32_t b = 0; b < byte; b++)
        number += !is_printable(b);
    return number;
}

size_t dray__byte_letter(uint8_t byte, char out[2])
{
    uint32_t letter = letter_of(byte);
    if (letter < 0x80) {
        out[0] = (char)letter;
        return 1;
    }
    out[0] = (char)(0xC0 | letter >> 6);
    out[1] = (char)(0x80 | (letter & 0x3F));
    return 2;
}

/* Returns the byte that the character at *at stands for, or -1, and advances *at past the
 * character. */
static int letter_byte(const char **at)
{
    uint8_t first = (uint8_t) * *at;
    uint32_t letter = first;
    if (first >= 0x80) {
        if ((first & 0xE0) != 0xC0)
            return -1;
        letter = (uint32_t)(first & 0x1F) << 6 | ((uint8_t)(*at)[1] & 0x3F);
        ++*at;
    }
    ++*at;
    if (letter < 0x100)
        return is_printable(letter) ? (int)letter : -1;
    for (int byte = 0; byte < 256; byte++)
        if (letter_of((uint8_t)byte) == letter)
            return byte;
    return -1;
}

static int refuse(const dray__tokenizer *t, dray_error *error, const char *format, const char *name)
{
    char what[200];
    snprintf(what, sizeof what, format, name ? name : "?");
    return dray__fail(error, DRAY_EUNSUPPORTED, "%s: %s", t->path, what);
}

static const char *text_at(const json_t *object, const char *key)
{
    return json_string_value(json_object_get(object, key));
}

/* Returns whether the setting is on. Absent, null, false and "" are off. */
static bool is_set(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    const char *text = json_string_value(value);
    return value && !json_is_null(value) && !json_is_false(value) && !(text && !*text);
}

/* ---- tokens ---------------------------------------------------------------------------------- */

/* Sets the decoded form of a token: its bytes if each of its characters stands for one, else its
 * text. */
static int set_text(dray__tokenizer *t, int64_t id, const char *written, bool special,
                    dray_error *error)
{
    size_t size = strlen(written), made = 0;
    char *bytes = malloc(size + 1);
    if (!bytes)
        return dray__nomem(error);
    for (const char *at = written; *at;) {
        int byte = letter_byte(&at);
        if (byte < 0) {
            memcpy(bytes, written, size + 1);
            made = size;
            break;
        }
        bytes[made++] = (char)byte;
    }
    free(t->tokens[id].bytes);
    t->tokens[id] = (dray__token_text){bytes, (uint32_t)made, special};
    return DRAY_OK;
}

static int read_id(const dray__tokenizer *t, const json_t *value, const char *token, int64_t *id,
                   dray_error *error)
{
    *id = json_is_integer(value) ? (int64_t)json_integer_value(value) : -1;
    return *id >= 0 && *id < IDS_MOST
               ? DRAY_OK
               : dray__fail(error, DRAY_EFORMAT,
                            "%s: token '%.64s': its id is expected to be 0 to %d", t->path, token,
                            IDS_MOST - 1);
}

static int count_ids(dray__tokenizer *t, const json_t *vocabulary, const json_t *added,
                     dray_error *error)
{
    const char *key;
    json_t *value;
    int64_t id;
    size_t i;
    int rc = DRAY_OK;
    json_object_foreach((json_t *)(uintptr_t)vocabulary, key, value)
    {
        if (!rc)
            rc = read_id(t, value, key, &id, error);
        if (!rc && id >= t->size)
            t->size = id + 1;
    }
    json_array_foreach(added, i, value)
    {
        if (!rc)
            rc = read_id(t, json_object_get(value, "id"), text_at(value, "content"), &id, error);
        if (!rc && id >= t->size)
            t->size = id + 1;
    }
    t->tokens = rc ? NULL : calloc((size_t)t->size + 1, sizeof *t->tokens);
    return rc || t->tokens ? rc : dray__nomem(error);
}

static int read_vocabulary(dray__tokenizer *t, const json_t *vocabulary, dray_error *error)
{
    const char *key;
    json_t *value;
    int rc = DRAY_OK;
    json_object_foreach((json_t *)(uintptr_t)vocabulary, key, value)
    {
        int64_t id = (int64_t)json_integer_value(value);
        if (!rc && !dray__map_set(&t->ids, key, (uint32_t)id))
            rc = dray__nomem(error);
        if (!rc)
            rc = set_text(t, id, key, false, error);
    }
    for (int byte = 0; byte < 256 && !rc; byte++) {
        char letter[3] = "";
        uint32_t id;
        letter[dray__byte_letter((uint8_t)byte, letter)] = 0;
        if (!dray__map_get(&t->ids, letter, &id))
            rc = dray__fail(
                error, DRAY_EUNSUPPORTED,
                "%s: the vocabulary has no token for byte %d: only byte-level BPE is done here",
                t->path, byte);
        t->byte_ids[byte] = rc ? 0 : (int32_t)id;
    }
    return rc;
}

static int read_added(dray__tokenizer *t, const json_t *added, dray_error *error)
{
    static const char *const changes[] = {"single_word", "lstrip", "rstrip"};
    json_t *one;
    size_t i;
    t->added = calloc(json_array_size(added) + 1, sizeof *t->added);
    if (!t->added)
        return dray__nomem(error);
    json_array_foreach(added, i, one)
    {
        const char *text = text_at(one, "content");
        int64_t id = (int64_t)json_integer_value(json_object_get(one, "id"));
        if (!text || !*text)
            return dray__fail(error, DRAY_EFORMAT, "%s: added token %zu has no content", t->path,
                              i);
        for (size_t c = 0; c < sizeof changes / sizeof *changes; c++)
            if (is_set(one, changes[c]))
                return dray__fail(error, DRAY_EUNSUPPORTED,
                                  "%s: added token '%.64s': %s is not done here", t->path, text,
                                  changes[c]);
        bool special = json_is_true(json_object_get(one, "special"));
        bool normalized = json_is_true(json_object_get(one, "normalized"));
        dray__added_token *a = &t->added[t->added_count++];
        size_t size = strlen(text);
        *a = (dray__added_token){.id = (int32_t)id, .normalized = normalized};
        int rc = set_text(t, id, text, special, error);
        if (!rc && normalized && t->nfc)
            rc = dray__nfc(text, size, &a->text, &size, error);
        else if (!rc && !(a->text = strdup(text)))
            rc = dray__nomem(error);
        if (rc)
            return rc;
        a->size = (uint32_t)size;
        t->added_first[normalized][(uint8_t)a->text[0]] = true;
    }
    return DRAY_OK;
}

/* ---- merges ---------------------------------------------------------------------------------- */

/* Reads a merge: "left right" (before version 0.20 of `tokenizers`), or ["left", "right"]. */
static bool read_pair(const json_t *merge, char **left, const char **right, char **own)
{
    const char *text = json_string_value(merge);
    *own = strdup(text ? text : "");
    char *space = *own ? strchr(*own, ' ') : NULL;
    if (space) {
        *space = 0;
        *left = *own;
        *right = space + 1;
    } else {
        *left = (char *)(uintptr_t)json_string_value(json_array_get(merge, 0));
        *right = json_string_value(json_array_get(merge, 1));
    }
    return *left && *right;
}

static int read_merge(dray__tokenizer *t, const json_t *merge, uint32_t rank, dray_error *error)
{
    char *left, *own, *whole = NULL;
    const char *right;
    uint32_t ids[3] = {0};
    bool known = read_pair(merge, &left, &right, &own) && asprintf(&whole, "%s%s", left, right) > 0;
    const char *parts[3] = {known ? left : "", known ? right : "", whole};
    for (int i = 0; i < 3 && known; i++)
        known = dray__map_get(&t->ids, parts[i], &ids[i]);
    int rc = known ? DRAY_OK
                   : dray__fail(error, DRAY_EFORMAT,
                                "%s: merge %u ('%.32s' and '%.32s'): both, and the two together, "
                                "are expected in the vocabulary",
                                t->path, rank, parts[0], parts[1]);
    free(own);
    free(whole);
    dray__merge *to = &t->merges[t->merge_count++];
    *to = (dray__merge){rank, (int32_t)ids[2]};
    if (!rc && !dray__idmap_set(&t->merge_of, ((uint64_t)ids[0] + 1) << 32 | ids[1], to))
        rc = dray__nomem(error);
    return rc;
}

static int read_merges(dray__tokenizer *t, const json_t *merges, dray_error *error)
{
    size_t i;
    json_t *merge;
    int rc = DRAY_OK;
    t->merges = calloc(json_array_size(merges) + 1, sizeof *t->merges);
    if (!t->merges)
        return dray__nomem(error);
    json_array_foreach(merges, i, merge)
    {
        if (!rc)
            rc = read_merge(t, merge, (uint32_t)i, error);
    }
    return rc;
}

static int read_model(dray__tokenizer *t, const json_t *model, const json_t *added,
                      dray_error *error)
{
    static const char *const others[] = {"dropout", "continuing_subword_prefix",
                                         "end_of_word_suffix", "byte_fallback"};
    const char *type = text_at(model, "type");
    const json_t *vocabulary = json_object_get(model, "vocab"),
                 *merges = json_object_get(model, "merges");
    if (type && strcmp(type, "BPE") != 0) /* files before 0.9 have no type */
        return refuse(t, error, "model.type %s: only BPE is done here", type);
    if (!json_is_object(vocabulary) || !json_is_array(merges))
        return dray__fail(error, DRAY_EFORMAT,
                          "%s: model.vocab (an object) and model.merges (an array) expected",
                          t->path);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (is_set(model, others[i]))
            return refuse(t, error, "model.%s is not done here", others[i]);
    t->whole_words = json_is_true(json_object_get(model, "ignore_merges"));
    int rc = count_ids(t, vocabulary, added, error);
    if (!rc)
        rc = read_vocabulary(t, vocabulary, error);
    return rc ? rc : read_merges(t, merges, error);
}

/* ---- the parts around the model -------------------------------------------------------------- */

static int read_normalizer(dray__tokenizer *t, const json_t *normalizer, dray_error *error)
{
    const char *type = text_at(normalizer, "type");
    const json_t *inner = json_object_get(normalizer, "normalizers");
    if (!normalizer || json_is_null(normalizer))
        return DRAY_OK;
    if (type && strcmp(type, "Sequence") == 0 && json_array_size(inner) <= 1)
        return read_normalizer(t, json_array_get(inner, 0), error);
    t->nfc = type && strcmp(type, "NFC") == 0;
    return t->nfc ? DRAY_OK : refuse(t, error, "normalizer %s: only NFC is done here", type);
}

static int add_cut(dray__tokenizer *t, const char *pattern, dray_error *error)
{
    if (t->cut_count == DRAY__CUTS)
        return refuse(t, error, "pre_tokenizer: too many steps%s", "");
    dray__text_cut *c = &t->cuts[t->cut_count];
    int rc = pattern ? dray__cut_compile(t->path, pattern, c, error) : DRAY_OK;
    t->cut_count += !rc;
    return rc;
}

static int read_split(dray__tokenizer *t, const json_t *split, dray_error *error)
{
    const char *pattern = text_at(json_object_get(split, "pattern"), "Regex");
    const char *behavior = text_at(split, "behavior");
    if (!pattern)
        return refuse(t, error, "pre_tokenizer Split: a pattern with %s expected", "Regex");
    if (!behavior || strcmp(behavior, "Isolated") != 0 || is_set(split, "invert"))
        return refuse(t, error,
                      "pre_tokenizer Split: only Isolated, not inverted, is done here; found %s",
                      behavior);
    return add_cut(t, pattern, error);
}

/* Reads a pre-tokenizer. *bytes is true when its steps end in ByteLevel, which tokens of bytes
 * need. */
static int read_pre_tokenizer(dray__tokenizer *t, const json_t *pre, bool *bytes, dray_error *error)
{
    const char *type = text_at(pre, "type");
    size_t i;
    json_t *step;
    int rc = DRAY_OK;
    if (type && strcmp(type, "Sequence") == 0) {
        json_array_foreach(json_object_get(pre, "pretokenizers"), i, step)
        {
            if (!rc)
                rc = read_pre_tokenizer(t, step, bytes, error);
        }
        return rc;
    }
    if (*bytes || !type)
        return refuse(t, error, "pre_tokenizer %s: ByteLevel is expected, as the last step", type);
    if (strcmp(type, "Split") == 0)
        return read_split(t, pre, error);
    *bytes = strcmp(type, "ByteLevel") == 0;
    if (!*bytes)
        return refuse(t, error, "pre_tokenizer %s is not done here", type);
    if (json_is_true(json_object_get(pre, "add_prefix_space")))
        rc = add_cut(t, NULL, error);
    if (!rc && !json_is_false(json_object_get(pre, "use_regex")))
        rc = add_cut(t, gpt2_pattern, error);
    return rc;
}

/* Reads "single" of a template: special tokens around the sequence A. */
static int read_template(dray__tokenizer *t, const json_t *template, dray_error *error)
{
    size_t i, n;
    json_t *part, *id;
    bool seen = false;
    json_array_foreach(json_object_get(template, "single"), i, part)
    {
        const json_t *special = json_object_get(part, "SpecialToken");
        const json_t *of = json_object_get(json_object_get(template, "special_tokens"),
                                           special ? text_at(special, "id") : "");
        seen |= !special;
        uint32_t *count = seen ? &t->after_count : &t->before_count;
        json_array_foreach(json_object_get(of, "ids"), n, id)
        {
            if (*count == DRAY__AROUND || !json_is_integer(id))
                return refuse(t, error, "post_processor: at most 8 tokens%s are done here", "");
            (seen ? t->after : t->before)[(*count)++] = (int32_t)json_integer_value(id);
        }
    }
    return DRAY_OK;
}

static int read_post_processor(dray__tokenizer *t, const json_t *post, dray_error *error)
{
    const char *type = text_at(post, "type");
    size_t i;
    json_t *step;
    int rc = DRAY_OK;
    if (!post || json_is_null(post) || (type && strcmp(type, "ByteLevel") == 0))
        return DRAY_OK; /* a ByteLevel post-processor changes only offsets */
    if (type && strcmp(type, "TemplateProcessing") == 0)
        return read_template(t, post, error);
    if (!type || strcmp(type, "Sequence") != 0)
        return refuse(t, error, "post_processor %s is not done here", type);
    json_array_foreach(json_object_get(post, "processors"), i, step)
    {
        if (!rc)
            rc = read_post_processor(t, step, error);
    }
    return rc;
}

/* Reads eos_token of tokenizer_config.json: a text, or an object with its content. */
static int read_end(dray__tokenizer *t, dray_error *error)
{
    char path[4200];
    const char *slash = strrchr(t->path, '/');
    snprintf(path, sizeof path, "%.*stokenizer_config.json", slash ? (int)(slash + 1 - t->path) : 0,
             t->path);
    json_t *config = NULL;
    int rc = dray__json_load(path, FILE_MOST, &config, error);
    if (rc == DRAY_ENOENT)
        return DRAY_OK;
    const json_t *value = json_object_get(config, "eos_token");
    const char *text = json_is_object(value) ? text_at(value, "content") : json_string_value(value);
    if (!rc && text && (t->end = dray__tokenizer_find(t, text)) < 0)
        rc = dray__fail(error, DRAY_EFORMAT, "%s: eos_token '%.64s' is no token of %s", path, text,
                        t->path);
    json_decref(config);
    return rc;
}

int dray__tokenizer_load(dray__tokenizer *t, dray_error *error)
{
    json_t *root = NULL;
    bool bytes = false;
    int rc = dray__json_load(t->path, FILE_MOST, &root, error);
    const json_t *added = json_object_get(root, "added_tokens");
    if (!rc && (is_set(root, "truncation") || is_set(root, "padding")))
        rc = refuse(t, error, "%s is not done here",
                    is_set(root, "padding") ? "padding" : "truncation");
    if (!rc)
        rc = read_normalizer(t, json_object_get(root, "normalizer"), error);
    if (!rc)
        rc = read_model(t, json_object_get(root, "model"), added, error);
    if (!rc)
        rc = read_added(t, added, error);
    if (!rc)
        rc = read_pre_tokenizer(t, json_object_get(root, "pre_tokenizer"), &bytes, error);
    if (!rc && !bytes)
        rc = refuse(t, error, "pre_tokenizer: %s is expected as the last step", "ByteLevel");
    if (!rc)
        rc = read_post_processor(t, json_object_get(root, "post_processor"), error);
    json_decref(root);
    return rc ? rc : read_end(t, error);
}
