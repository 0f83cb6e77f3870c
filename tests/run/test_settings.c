/* Tests every line of the table of settings, through the functions that read and write jobs by
 * it. */
#include "run/job/settings.h"
#include "suite.h"

#include <stdlib.h>
#include <string.h>

static int set(dray__job *job, const char *key, const char *value, dray_error *error)
{
    char text[2 * DRAY__SETTING_BYTES];
    dray__node *tree;
    dray__places *places;
    snprintf(text, sizeof(text), "%s=%s", key, value);
    int rc = dray__tree_setting(text, &tree, error);
    if (rc)
        return rc;
    assert_int_equal(dray__places_open("job.yaml", &places, NULL), DRAY_OK);
    rc = dray__settings_read(job, tree, places, error);
    assert_true(rc || dray__setting_given(places, key));
    dray__places_close(places);
    dray__tree_free(tree);
    return rc;
}

/* A value that the setting accepts and that is not its default. */
static void another(const dray__setting *s, char out[64])
{
    double now = s->text ? strtod(s->text, NULL) : 0;
    snprintf(out, 64, "other");
    if (s->type == DRAY__SETTING_INT)
        snprintf(out, 64, "%.0f", now + 2 <= s->high ? now + 2 : now - 1);
    else if (s->type == DRAY__SETTING_REAL)
        snprintf(out, 64, "%.17g", now < s->high ? now + (s->high - now) / 3 : (now + s->low) / 2);
    else if (s->type == DRAY__SETTING_BOOL)
        snprintf(out, 64, "%s", strcmp(s->text, "true") == 0 ? "false" : "true");
    else if (s->type == DRAY__SETTING_PATH)
        snprintf(out, 64, "/other");
    else if (s->type == DRAY__SETTING_TEXTS)
        snprintf(out, 64, "[other]");
    for (const dray__word *w = s->words; w && w->name; w++)
        if (!w->refused && strcmp(w->name, s->text) != 0)
            snprintf(out, 64, "%s", w->name);
}

/* The one line in which two texts differ, of the second; NULL: none, or several. */
static const char *changed(const char *was, const char *is)
{
    const char *found = NULL;
    while (*was && *is) {
        size_t a = strcspn(was, "\n"), b = strcspn(is, "\n");
        if (a != b || strncmp(was, is, a) != 0) {
            if (found)
                return NULL;
            found = is;
        }
        was += a + 1;
        is += b + 1;
    }
    return *was || *is ? NULL : found;
}

static char *yaml(const dray__job *job)
{
    char *text;
    assert_int_equal(dray__settings_yaml(job, &text, NULL), DRAY_OK);
    return text;
}

/* "  - key: value" says so of the setting. */
static bool says(const char *line, const dray__setting *s, const char *value)
{
    const char *dot = strrchr(s->key, '.'), *key = dot ? dot + 1 : s->key;
    line += strspn(line, " -");
    size_t length = strlen(key);
    if (strncmp(line, key, length) != 0 || line[length] != ':')
        return false;
    line += length + 2;
    return s->type == DRAY__SETTING_REAL
               ? strtod(line, NULL) == strtod(value, NULL)
               : strcspn(line, "\n") == strlen(value) && strncmp(line, value, strlen(value)) == 0;
}

static void check_one(const dray__setting *s, const char *key)
{
    char value[64];
    dray__job *job;
    dray_error error;
    another(s, value);
    bool only = s->words && strcmp(value, "other") == 0; /* one word that is not refused */
    assert_int_equal(dray__settings_default(&job, NULL), DRAY_OK);
    char *was = yaml(job);
    if (set(job, key, only ? s->text : value, &error))
        fail_msg("%s", error.message);
    char *is = yaml(job);
    const char *line = changed(was, is);
    if (only ? strcmp(was, is) != 0 : !line || !says(line, s, value))
        fail_msg("%s=%s was written as: %s", key, value, line ? line : "nothing, or more");
    free(was);
    free(is);
    dray__settings_free(job);
}

/* Whatever is set is what is written, and nothing else changes. */
static void check_each(const dray__setting *settings, const char *prefix)
{
    for (const dray__setting *s = settings; s->key; s++) {
        char key[96];
        snprintf(key, sizeof(key), "%s%s", prefix, s->key);
        if (!s->record)
            check_one(s, key);
        else if (s->record->preset_count) /* an entry to change */
            check_each(s->record->settings,
                       strcat(strcat(strcat(key, "."), s->record->presets[0][1]), "."));
    }
}

TEST(each_setting)
{
    check_each(dray__settings, "");
}

/* Numbers out of range, words that are none, and the wrong kind of value name the key. */
static void refuse_each(const dray__setting *settings, const char *prefix)
{
    for (const dray__setting *s = settings; s->key; s++) {
        char key[96], values[3][64] = {"{a: 1}", "", ""};
        snprintf(key, sizeof(key), "%s%s", prefix, s->key);
        if (s->type <= DRAY__SETTING_REAL) {
            snprintf(values[1], 64, "%.17g", s->high * 2 + 1);
            snprintf(values[2], 64, "%.17g", s->above ? s->low : s->low - 1);
        } else if (s->type <= DRAY__SETTING_WORD) {
            snprintf(values[1], 64, "nonsense");
        } else if (s->record) {
            snprintf(values[1], 64, s->low > 0 ? "[]" : "[{}]");
        }
        for (int i = 0; i < 3 && (i == 0 || values[i][0]); i++) {
            dray__job *job;
            dray_error error = {0};
            assert_int_equal(dray__settings_default(&job, NULL), DRAY_OK);
            if (set(job, key, values[i], &error) != DRAY_EINVALID)
                fail_msg("%s=%s was accepted", key, values[i]);
            if (!strstr(error.message, key) ||
                !(strstr(error.message, "expected") || strstr(error.message, "is missing")))
                fail_msg("%s=%s: %s", key, values[i], error.message);
            dray__settings_free(job);
        }
        if (s->record && s->record->preset_count) {
            strcat(strcat(strcat(key, "."), s->record->presets[0][1]), ".");
            refuse_each(s->record->settings, key);
        }
    }
}

TEST(each_refusal)
{
    refuse_each(dray__settings, "");
}

/* The same values as JSON, with their types. */
TEST(as_json)
{
    dray__job *job;
    assert_int_equal(dray__settings_default(&job, NULL), DRAY_OK);
    json_t *all = dray__settings_json(job), *actor = json_object_get(all, "actor");
    assert_true(json_real_value(json_object_get(actor, "lr")) == job->actor.lr);
    assert_int_equal(json_integer_value(json_object_get(all, "steps")), job->steps);
    assert_string_equal(json_string_value(json_object_get(actor, "decay")), "linear");
    assert_true(json_is_true(json_object_get(json_object_get(all, "weights"), "verify")));
    json_decref(all);
    dray__settings_free(job);
}

/* The place of a complaint: of the key, else of its section, else of another key that was given. */
TEST(places)
{
    static const char text[] = "steps: 3\nactor:\n  lr: 0.5\n";
    static const struct {
        const char *keys, *message;
    } all[] = {{"steps", "job.yaml:1:1: steps: no"},
               {"actor.lr", "job.yaml:3:3: actor.lr: no"},
               {"actor.clip", "job.yaml:2:1: actor.clip: no"},
               {"model.heads actor.lr", "job.yaml:3:3: model.heads: no"},
               {"model.heads model.layers", "job.yaml: model.heads: no"}};
    dray__node *tree;
    dray__places *at;
    dray__job *job;
    dray_error error;
    assert_int_equal(dray__tree_parse(text, strlen(text), "job.yaml", &tree, NULL), DRAY_OK);
    assert_int_equal(dray__places_open("job.yaml", &at, NULL), DRAY_OK);
    assert_int_equal(dray__settings_default(&job, NULL), DRAY_OK);
    assert_int_equal(dray__settings_read(job, tree, at, &error), DRAY_OK);
    dray__tree_free(tree);
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++) {
        assert_int_equal(dray__setting_fail(at, all[i].keys, &error, "no"), DRAY_EINVALID);
        assert_string_equal(error.message, all[i].message);
    }
    assert_true(dray__setting_given(at, "actor.lr"));
    assert_false(dray__setting_given(at, "actor.clip"));
    dray__places_close(at);
    dray__settings_free(job);
}

SUITE(NULL, NULL)
