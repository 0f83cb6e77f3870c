/* Writes the values of a job as JSON and YAML, and the table of settings as text and JSON. */
#include "run/job/settings.h"

#include "base/error.h"
#include "base/json.h"
#include "base/wire.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

/* ---- values as JSON -------------------------------------------------------------------------- */

static json_t *values_json(const dray__setting *settings, const void *base);

static json_t *list_json(const dray__setting *s, const void *base)
{
    json_t *list = json_array();
    const char *array, *text;
    uint32_t count;
    memcpy(&array, (const char *)base + s->at, sizeof(array));
    memcpy(&count, (const char *)base + s->count_at, sizeof(count));
    for (uint32_t i = 0; i < count; i++) {
        if (!s->record)
            memcpy(&text, array + i * sizeof(text), sizeof(text));
        dray__json_append(&list, s->record
                                     ? values_json(s->record->settings, array + i * s->record->size)
                                     : json_string(text));
    }
    return list;
}

static json_t *value_json(const dray__setting *s, const void *base)
{
    union {
        int64_t number;
        int32_t word;
        double real;
        bool yes;
        const char *text;
    } v;
    static const size_t sizes[DRAY__SETTING_TYPES] = {
        [DRAY__SETTING_INT] = sizeof(v.number), [DRAY__SETTING_REAL] = sizeof(v.real),
        [DRAY__SETTING_BOOL] = sizeof(v.yes),   [DRAY__SETTING_WORD] = sizeof(v.word),
        [DRAY__SETTING_TEXT] = sizeof(v.text),  [DRAY__SETTING_PATH] = sizeof(v.text)};
    memcpy(&v, (const char *)base + s->at, sizes[s->type]);
    switch (s->type) {
    case DRAY__SETTING_INT:
        return json_integer(v.number);
    case DRAY__SETTING_REAL:
        return json_real(v.real);
    case DRAY__SETTING_BOOL:
        return json_boolean(v.yes);
    case DRAY__SETTING_WORD:
        for (const dray__word *w = s->words; w->name; w++)
            if (!w->refused && w->value == v.word)
                return json_string(w->name);
        return NULL;
    case DRAY__SETTING_TEXT:
    case DRAY__SETTING_PATH:
        return json_string(v.text);
    default:
        return list_json(s, base);
    }
}

/* Writes key "a.b" as member b of the object a, which is made if it does not exist yet. */
static json_t *values_json(const dray__setting *settings, const void *base)
{
    json_t *all = json_object();
    for (const dray__setting *s = settings; all && s->key; s++) {
        const char *dot = strchr(s->key, '.');
        char section[64];
        snprintf(section, sizeof(section), "%.*s", dot ? (int)(dot - s->key) : 0, s->key);
        json_t *at = dot ? json_object_get(all, section) : all;
        if (!at) {
            dray__json_set(&all, section, json_object());
            at = json_object_get(all, section);
        }
        json_t *value = value_json(s, base);
        if (at && !(value && json_object_set(at, dot ? dot + 1 : s->key, value) == 0)) {
            json_decref(all);
            all = NULL;
        }
        json_decref(value);
    }
    return all;
}

json_t *dray__settings_json(const dray__job *job)
{
    return values_json(dray__settings, job);
}

/* ---- YAML ------------------------------------------------------------------------------------ */

/* Returns whether the text needs no quotes, and readers of YAML 1.1 take it for a text, not for a
 * number or a boolean. */
static bool is_plain(const char *text)
{
    static const char *const others[] = {"true", "false", "yes", "no",  "on",
                                         "off",  "y",     "n",   "null"};
    if (!isalpha((unsigned char)text[0]) && text[0] != '/')
        return false;
    for (size_t i = 0; i < sizeof(others) / sizeof(*others); i++)
        if (strcasecmp(text, others[i]) == 0)
            return false;
    for (const char *c = text; *c; c++)
        if (!isalnum((unsigned char)*c) && !strchr("_./+-", *c))
            return false;
    return true;
}

/* Prints as many digits as reading the same number again needs. */
static void print_real(double value, char *out, size_t size)
{
    int digits = 15;
    do {
        snprintf(out, size, "%.*g", digits, value);
    } while (strtod(out, NULL) != value && ++digits <= 17);
}

static bool emit_scalar(yaml_emitter_t *out, const char *text, bool plain)
{
    yaml_event_t event;
    yaml_scalar_style_t style = plain ? YAML_PLAIN_SCALAR_STYLE : YAML_DOUBLE_QUOTED_SCALAR_STYLE;
    return yaml_scalar_event_initialize(&event, NULL, NULL, (const yaml_char_t *)text,
                                        (int)strlen(text), 1, 1, style) &&
           yaml_emitter_emit(out, &event);
}

static bool emit(yaml_emitter_t *out, const json_t *value);

static bool emit_object(yaml_emitter_t *out, json_t *object)
{
    yaml_event_t event;
    const char *key;
    json_t *value;
    bool ok =
        yaml_mapping_start_event_initialize(&event, NULL, NULL, 1, YAML_BLOCK_MAPPING_STYLE) &&
        yaml_emitter_emit(out, &event);
    json_object_foreach(object, key, value)
    {
        ok = ok && emit_scalar(out, key, is_plain(key)) && emit(out, value);
    }
    return ok && yaml_mapping_end_event_initialize(&event) && yaml_emitter_emit(out, &event);
}

static bool emit_array(yaml_emitter_t *out, const json_t *array)
{
    yaml_event_t event;
    yaml_sequence_style_t style = json_is_object(json_array_get(array, 0))
                                      ? YAML_BLOCK_SEQUENCE_STYLE
                                      : YAML_FLOW_SEQUENCE_STYLE;
    bool ok = yaml_sequence_start_event_initialize(&event, NULL, NULL, 1, style) &&
              yaml_emitter_emit(out, &event);
    for (size_t i = 0; i < json_array_size(array); i++)
        ok = ok && emit(out, json_array_get(array, i));
    return ok && yaml_sequence_end_event_initialize(&event) && yaml_emitter_emit(out, &event);
}

static bool emit(yaml_emitter_t *out, const json_t *value)
{
    char number[32];
    if (json_is_object(value))
        return emit_object(out, (json_t *)(uintptr_t)value);
    if (json_is_array(value))
        return emit_array(out, value);
    if (json_is_string(value))
        return emit_scalar(out, json_string_value(value), is_plain(json_string_value(value)));
    if (json_is_integer(value))
        snprintf(number, sizeof(number), "%lld", (long long)json_integer_value(value));
    else if (json_is_real(value))
        print_real(json_real_value(value), number, sizeof(number));
    else
        snprintf(number, sizeof(number), "%s", json_is_true(value) ? "true" : "false");
    return emit_scalar(out, number, true);
}

static int append(void *writer, unsigned char *bytes, size_t size)
{
    dray__put_bytes(writer, bytes, size);
    return !((dray__writer *)writer)->failed;
}

int dray__settings_yaml(const dray__job *job, char **out, dray_error *error)
{
    dray__writer text = {0};
    yaml_emitter_t emitter;
    yaml_event_t event;
    json_t *all = dray__settings_json(job);
    bool ok = all && yaml_emitter_initialize(&emitter);
    if (!ok) {
        json_decref(all);
        return dray__nomem(error);
    }
    yaml_emitter_set_output(&emitter, append, &text);
    yaml_emitter_set_unicode(&emitter, 1);
    yaml_emitter_set_width(&emitter, -1);
    ok = yaml_stream_start_event_initialize(&event, YAML_UTF8_ENCODING) &&
         yaml_emitter_emit(&emitter, &event) &&
         yaml_document_start_event_initialize(&event, NULL, NULL, NULL, 1) &&
         yaml_emitter_emit(&emitter, &event) && emit(&emitter, all) &&
         yaml_document_end_event_initialize(&event, 1) && yaml_emitter_emit(&emitter, &event) &&
         yaml_stream_end_event_initialize(&event) && yaml_emitter_emit(&emitter, &event);
    yaml_emitter_delete(&emitter);
    json_decref(all);
    dray__put_u8(&text, 0);
    if (!ok || text.failed) {
        dray__writer_free(&text);
        return dray__nomem(error);
    }
    *out = (char *)text.data;
    return DRAY_OK;
}

/* ---- the table, for people ------------------------------------------------------------------- */

static const char *const type_names[DRAY__SETTING_TYPES] = {
    "whole number", "number", "true or false", "word", "text", "path", "texts", "records"};

enum { ACCEPTED_BYTES = 256 };

/* "1 to 64", "more than 0, at most 1", "sync, async", "text". */
static void say_accepted(const dray__setting *s, char out[ACCEPTED_BYTES])
{
    if (s->type == DRAY__SETTING_INT || s->type == DRAY__SETTING_REAL)
        snprintf(out, ACCEPTED_BYTES,
                 s->above ? "more than %.16g, at most %.16g" : "%.16g to %.16g", s->low, s->high);
    else if (s->type >= DRAY__SETTING_TEXTS)
        snprintf(out, ACCEPTED_BYTES, "%.0f to %.0f %s", s->low, s->high, type_names[s->type]);
    else
        snprintf(out, ACCEPTED_BYTES, "%s", s->words ? "" : type_names[s->type]);
    for (const dray__word *w = s->words; w && w->name; w++) {
        size_t used = strlen(out);
        if (!w->refused)
            snprintf(out + used, ACCEPTED_BYTES - used, "%s%s", used ? ", " : "", w->name);
    }
}

/* Writes the default as in a job file; for records, their names. */
static void say_default(const dray__setting *s, char out[ACCEPTED_BYTES])
{
    snprintf(out, ACCEPTED_BYTES, "%s", s->text ? s->text : "");
    for (uint32_t i = 0; s->record && i < s->record->preset_count; i++) {
        size_t used = strlen(out);
        snprintf(out + used, ACCEPTED_BYTES - used, "%s%s", used ? ", " : "",
                 s->record->presets[i][1]);
    }
}

static bool print_line(FILE *out, bool json, const char *key, const dray__setting *s)
{
    char accepted[ACCEPTED_BYTES], given[ACCEPTED_BYTES];
    say_accepted(s, accepted);
    say_default(s, given);
    const char *quote = given[0] ? "`" : "";
    if (!json)
        return fprintf(out, "| `%s` | %s%s%s | %s | %s |\n", key, quote,
                       s->text ? given : "must be given", quote, accepted, s->meaning) > 0;
    json_t *line =
        json_pack("{s:s, s:s, s:s?, s:s, s:s}", "key", key, "type", type_names[s->type], "default",
                  s->text ? given : NULL, "accepts", accepted, "meaning", s->meaning);
    bool ok = line && json_dumpf(line, out, JSON_COMPACT) == 0 && fputc('\n', out) >= 0;
    json_decref(line);
    return ok;
}

static bool print_settings(FILE *out, bool json, const char *prefix, const dray__setting *settings)
{
    bool ok = true;
    for (const dray__setting *s = settings; ok && s->key; s++) {
        char key[96], inside[112];
        snprintf(key, sizeof(key), "%s%s", prefix, s->key);
        snprintf(inside, sizeof(inside), "%s.NAME.", key);
        ok = print_line(out, json, key, s) &&
             (!s->record || print_settings(out, json, inside, s->record->settings));
    }
    return ok;
}

bool dray__settings_print(FILE *out, bool json)
{
    if (!json)
        fprintf(out, "| key | default | accepts | meaning |\n| --- | --- | --- | --- |\n");
    return print_settings(out, json, "", dray__settings) && fflush(out) == 0;
}

char *dray__settings_keys(void)
{
    char *text = NULL, section[64] = "";
    size_t size;
    FILE *out = open_memstream(&text, &size);
    for (const dray__setting *s = dray__settings; out && s->key; s++) {
        const char *dot = strchr(s->key, '.');
        char now[64];
        snprintf(now, sizeof(now), "%.*s", dot ? (int)(dot - s->key) : 0, s->key);
        bool first = s == dray__settings, same = strcmp(now, section) == 0;
        fprintf(out, "%s%s%s%s",
                first  ? ""
                : same ? ", "
                       : "; ",
                same ? "" : now, same || !dot ? "" : ": ", dot ? dot + 1 : s->key);
        memcpy(section, now, sizeof(section));
    }
    bool failed = !out || ferror(out);
    if (out && (fclose(out) || failed)) {
        free(text);
        return NULL;
    }
    return text;
}
