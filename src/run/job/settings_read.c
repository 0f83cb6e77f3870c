/* Reads the trees of job files and --set into the values of a job, and notes where each was
 * written. */
#include "run/job/settings.h"

#include "base/error.h"
#include "base/words.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { KEY_BYTES = 192, KEYS_MAX = 64 };

/* ---- places ---------------------------------------------------------------------------------- */

typedef struct place {
    char *key;
    const char *source;
    dray__text_place at;
} place;

struct dray__places {
    const char *file;
    place *items;
    uint32_t count;
};

int dray__places_open(const char *file, dray__places **out, dray_error *error)
{
    dray__places *places = calloc(1, sizeof(*places));
    if (!places)
        return dray__nomem(error);
    places->file = file;
    *out = places;
    return DRAY_OK;
}

void dray__places_close(dray__places *places)
{
    for (uint32_t i = 0; places && i < places->count; i++)
        free(places->items[i].key);
    if (places)
        free(places->items);
    free(places);
}

static int remember(dray__places *places, const char *key, const dray__node *node,
                    dray_error *error)
{
    if ((places->count & (places->count - 1)) == 0) {
        place *grown = realloc(places->items, 2 * (places->count + 1) * sizeof(*grown));
        if (!grown)
            return dray__nomem(error);
        places->items = grown;
    }
    place *p = &places->items[places->count];
    *p = (place){strdup(key), node->source, node->at};
    places->count += p->key != NULL;
    return p->key ? DRAY_OK : dray__nomem(error);
}

/* Forgets the places of a list's entries, because another list replaces them. */
static void forget_inside(dray__places *places, const char *list)
{
    size_t length = strlen(list);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < places->count; i++) {
        place *p = &places->items[i];
        if (strncmp(p->key, list, length) == 0 && p->key[length] == '.')
            free(p->key);
        else
            places->items[kept++] = *p;
    }
    places->count = kept;
}

/* Returns the last place of the key, which is the one that counts; NULL when it is not written
 * anywhere. */
static const place *place_of(const dray__places *places, const char *key, size_t length)
{
    for (uint32_t i = places->count; i-- > 0;)
        if (strncmp(places->items[i].key, key, length) == 0 && !places->items[i].key[length])
            return &places->items[i];
    return NULL;
}

bool dray__setting_given(const dray__places *places, const char *key)
{
    return place_of(places, key, strlen(key)) != NULL;
}

/* Returns the place of the first of `keys` that was written, else of the first that has its section
 * written. */
static place find_place(const dray__places *places, const char *keys)
{
    const place *found = NULL;
    for (int sections = 0; sections < 2 && !found; sections++)
        for (const char *key = keys; *key && !found; key += strspn(key, " ")) {
            size_t length = strcspn(key, " ");
            const char *next = key + length;
            found = place_of(places, key, length);
            while (sections && !found && length) {
                while (length && key[--length] != '.')
                    ;
                found = length ? place_of(places, key, length) : NULL;
            }
            key = next;
        }
    return found ? *found : (place){.source = places->file};
}

static int refuse_at(const char *source, dray__text_place at, const char *key, dray_error *error,
                     const char *format, va_list arguments)
{
    char message[DRAY_ERROR_MESSAGE_MAX], where[DRAY__PLACE_BYTES];
    vsnprintf(message, sizeof(message), format, arguments);
    return dray__fail(error, DRAY_EINVALID, "%s: %.*s: %s", dray__place_text(source, at, where),
                      (int)strcspn(key, " "), key[0] ? key : "job", message);
}

int dray__setting_fail(const dray__places *places, const char *keys, dray_error *error,
                       const char *format, ...)
{
    place p = find_place(places, keys);
    va_list arguments;
    va_start(arguments, format);
    int rc = refuse_at(p.source, p.at, keys, error, format, arguments);
    va_end(arguments);
    return rc;
}

/* ---- one value ------------------------------------------------------------------------------- */

typedef struct reading {
    dray__places *places; /* NULL for defaults, which have no place */
    dray_error *error;
} reading;

static __attribute__((format(printf, 4, 5))) int refuse(const reading *r, const dray__node *node,
                                                        const char *key, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int rc = refuse_at(node->source, node->at, key[0] ? key : "job", r->error, format, arguments);
    va_end(arguments);
    return rc;
}

static int expect(const reading *r, const dray__node *node, int kind, const char *key)
{
    static const char *const names[] = {"a value", "a list", "a section"};
    return node->kind == kind
               ? DRAY_OK
               : refuse(r, node, key, "expected %s, found %s", names[kind], names[node->kind]);
}

typedef int (*read_fn)(const reading *r, const dray__setting *s, void *to, const dray__node *node,
                       const char *key);

static int check_range(const reading *r, const dray__setting *s, double value,
                       const dray__node *node, const char *key)
{
    if (value > s->high || value < s->low || (s->above && value <= s->low))
        return refuse(r, node, key, "expected %s %.16g%s%.16g, found %s",
                      s->above ? "more than" : "from", s->low, s->above ? " and at most " : " to ",
                      s->high, node->value);
    return DRAY_OK;
}

static int read_int(const reading *r, const dray__setting *s, void *to, const dray__node *node,
                    const char *key)
{
    char *end;
    errno = 0;
    int64_t value = strtoll(node->value, &end, 10);
    const char *digits = node->value + (node->value[0] == '-');
    bool plain = digits[0] >= '0' && digits[0] <= '9' &&
                 !(digits[0] == '0' && digits[1]); /* YAML 1.1 reads 010 as octal 8 */
    if (errno || *end || !plain)
        return refuse(r, node, key, "expected a whole number, found '%.64s'", node->value);
    memcpy(to, &value, sizeof(value));
    return check_range(r, s, (double)value, node, key);
}

static int read_real(const reading *r, const dray__setting *s, void *to, const dray__node *node,
                     const char *key)
{
    char *end;
    errno = 0;
    double value = strtod(node->value, &end);
    bool number = value == 0 || isnormal(value);
    if (errno || end == node->value || *end || !number)
        return refuse(r, node, key, "expected a number, found '%.64s'", node->value);
    memcpy(to, &value, sizeof(value));
    return check_range(r, s, value, node, key);
}

static int read_bool(const reading *r, const dray__setting *s, void *to, const dray__node *node,
                     const char *key)
{
    (void)s;
    bool value = strcmp(node->value, "true") == 0;
    memcpy(to, &value, sizeof(value));
    return value || strcmp(node->value, "false") == 0
               ? DRAY_OK
               : refuse(r, node, key, "expected true or false, found '%.64s'", node->value);
}

static int read_word(const reading *r, const dray__setting *s, void *to, const dray__node *node,
                     const char *key)
{
    const char *known[KEYS_MAX];
    const dray__word *found = NULL;
    char list[256] = "", hint[96];
    size_t count = 0;
    for (const dray__word *w = s->words; w->name && count < KEYS_MAX; w++) {
        size_t used = strlen(list);
        known[count++] = w->name;
        if (!w->refused)
            snprintf(list + used, sizeof(list) - used, "%s%s", used ? ", " : "", w->name);
        found = strcmp(w->name, node->value) == 0 ? w : found;
    }
    if (!found)
        return refuse(r, node, key, "expected one of %s, found '%.64s'%s", list, node->value,
                      dray__word_hint(node->value, known, count, hint, sizeof(hint)));
    if (found->refused)
        return refuse(r, node, key, "'%s' %s; expected one of %s", found->name, found->refused,
                      list);
    memcpy(to, &found->value, sizeof(found->value));
    return DRAY_OK;
}

static int put_text(const reading *r, void *to, const char *text, const dray__node *node,
                    const char *key)
{
    size_t length = strlen(text);
    if (length > DRAY__SETTING_BYTES)
        return refuse(r, node, key, "expected at most %d bytes, found %zu", DRAY__SETTING_BYTES,
                      length);
    char **member = to, *copy = strdup(text);
    if (!copy)
        return dray__nomem(r->error);
    free(*member);
    *member = copy;
    return DRAY_OK;
}

static int read_text(const reading *r, const dray__setting *s, void *to, const dray__node *node,
                     const char *key)
{
    (void)s;
    return put_text(r, to, node->value, node, key);
}

/* Paths of a job file are relative to its folder, those of --set to the current one. */
static int read_path(const reading *r, const dray__setting *s, void *to, const dray__node *node,
                     const char *key)
{
    char folder[PATH_MAX], whole[PATH_MAX + DRAY__SETTING_BYTES];
    const char *file = r->places ? r->places->file : "", *slash = strrchr(file, '/');
    if (!node->value[0] || node->value[0] == '/' || strlen(node->value) > DRAY__SETTING_BYTES)
        return read_text(r, s, to, node, key);
    bool inside = node->source == file && slash;
    char *base = inside ? strndup(file, (size_t)(slash - file) + 1) : strdup(".");
    bool ok = base && realpath(base, folder);
    free(base);
    if (!ok)
        return dray__fail_errno(r->error, errno, "%s: folder of the job file", file);
    snprintf(whole, sizeof(whole), "%s/%s", folder, node->value);
    return put_text(r, to, whole, node, key);
}

/* ---- lists ----------------------------------------------------------------------------------- */

static void free_values(const dray__setting *settings, void *base);

static void *member(const dray__setting *s, const void *base)
{
    return (char *)(uintptr_t)base + s->at;
}

/* Gets the array of a list, and returns the address of its length. */
static uint32_t *list_of(const dray__setting *s, void *base, void *array)
{
    memcpy(array, member(s, base), sizeof(void *));
    return (uint32_t *)(void *)((char *)base + s->count_at);
}

static void set_list(const dray__setting *s, void *base, void *array)
{
    memcpy(member(s, base), &array, sizeof(array));
}

static void free_list(const dray__setting *s, void *base)
{
    char *array;
    uint32_t *count = list_of(s, base, &array);
    size_t size = s->record ? s->record->size : sizeof(char *);
    for (uint32_t i = 0; i < *count; i++)
        if (s->record)
            free_values(s->record->settings, array + i * size);
        else
            free(((char **)(void *)array)[i]);
    free(array);
    *count = 0;
    set_list(s, base, NULL);
}

static void free_values(const dray__setting *settings, void *base)
{
    for (const dray__setting *s = settings; s->key; s++)
        if (s->type >= DRAY__SETTING_TEXTS)
            free_list(s, base);
        else if (s->type >= DRAY__SETTING_TEXT)
            free(*(char **)member(s, base));
}

/* Replaces the list by a new one with room for `length` entries, which are filled and counted
 * later. */
static int new_list(const reading *r, const dray__setting *s, void *base, uint32_t length,
                    const dray__node *node, const char *key)
{
    if (length < s->low || length > s->high)
        return refuse(r, node, key, "expected %.0f to %.0f entries, found %u", s->low, s->high,
                      length);
    free_list(s, base);
    void *array = calloc((size_t)length + 1, s->record ? s->record->size : sizeof(char *));
    set_list(s, base, array);
    return array ? DRAY_OK : dray__nomem(r->error);
}

static int read_texts(const reading *r, const dray__setting *s, void *base, const dray__node *node,
                      const char *key)
{
    char **texts;
    int rc = expect(r, node, DRAY__NODE_SEQUENCE, key);
    if (!rc)
        rc = new_list(r, s, base, node->count, node, key);
    uint32_t *count = list_of(s, base, &texts);
    for (uint32_t i = 0; !rc && i < node->count; i++) {
        rc = expect(r, node->children[i], DRAY__NODE_SCALAR, key);
        if (!rc)
            rc = put_text(r, &texts[(*count)++], node->children[i]->value, node->children[i], key);
    }
    return rc;
}

/* ---- sections -------------------------------------------------------------------------------- */

static int read_setting(const reading *r, const dray__setting *s, void *base,
                        const dray__node *node, const char *key);

static const dray__setting *find_setting(const dray__setting *settings, const char *key)
{
    for (const dray__setting *s = settings; s->key; s++)
        if (strcmp(s->key, key) == 0)
            return s;
    return NULL;
}

/* Returns the part of the key after "section."; NULL when the key is not in this section. */
static const char *inside(const char *key, const char *section)
{
    size_t length = strlen(section);
    if (!length)
        return key;
    return strncmp(key, section, length) == 0 && key[length] == '.' ? key + length + 1 : NULL;
}

static bool is_section(const dray__setting *settings, const char *key)
{
    for (const dray__setting *s = settings; s->key; s++)
        if (inside(s->key, key))
            return true;
    return false;
}

static int unknown_key(const reading *r, const dray__setting *settings, const char *section,
                       const char *path, const dray__node *node)
{
    char words[KEYS_MAX][32], hint[96];
    const char *known[KEYS_MAX];
    size_t count = 0;
    for (size_t i = 0; !section[0] && dray__settings_renamed[i][0]; i++)
        if (strcmp(dray__settings_renamed[i][0], node->key) == 0)
            return refuse(r, node, node->key, "expected '%s%s' in its place, found '%s'",
                          dray__settings_renamed[i][1], node->at.line ? ":" : "", node->key);
    for (const dray__setting *s = settings; s->key && count < KEYS_MAX; s++) {
        const char *key = inside(s->key, section);
        int length = key ? (int)strcspn(key, ".") : 0;
        if (!length)
            continue;
        snprintf(words[count], sizeof(words[0]), "%.*s", length, key);
        if (!count || strcmp(words[count], words[count - 1]) != 0) {
            known[count] = words[count];
            count++;
        }
    }
    return refuse(r, node, path, "unknown key '%.64s'%s", node->key,
                  dray__word_hint(node->key, known, count, hint, sizeof(hint)));
}

static void join(char out[KEY_BYTES], const char *path, const char *key)
{
    snprintf(out, KEY_BYTES, "%s%s%s", path, path[0] ? "." : "", key);
}

/* section is the section's name in the table, path that in the job, for messages. */
static int read_section(const reading *r, const dray__setting *settings, void *base,
                        const char *section, const char *path, const dray__node *node)
{
    int rc = expect(r, node, DRAY__NODE_MAPPING, path);
    for (uint32_t i = 0; !rc && i < node->count; i++) {
        const dray__node *child = node->children[i];
        char key[KEY_BYTES], whole[KEY_BYTES];
        join(key, section, child->key);
        join(whole, path, child->key);
        bool dotted = strchr(child->key, '.') != NULL;
        const dray__setting *s = dotted ? NULL : find_setting(settings, key);
        if (!s && (dotted || !is_section(settings, key)))
            return unknown_key(r, settings, section, path, child);
        if (r->places)
            rc = remember(r->places, whole, child, r->error);
        if (!rc)
            rc = s ? read_setting(r, s, base, child, whole)
                   : read_section(r, settings, base, key, whole, child);
    }
    return rc;
}

/* ---- records --------------------------------------------------------------------------------- */

static int set_defaults(const reading *r, const dray__setting *settings, void *base);

static const char *name_of(const dray__setting *s, const char *array, uint32_t index)
{
    char *name;
    memcpy(&name, member(s->record->settings, array + index * s->record->size), sizeof(name));
    return name;
}

/* Reads sections of a list, which are its entries by name, as in roles.engine.ranks=1. */
static int read_named(const reading *r, const dray__setting *s, void *base, const dray__node *node,
                      const char *path)
{
    char *array, whole[KEY_BYTES], hint[128];
    uint32_t count = *list_of(s, base, &array);
    int rc = DRAY_OK;
    for (uint32_t i = 0; !rc && i < node->count; i++) {
        const dray__node *child = node->children[i];
        const char *names[KEYS_MAX];
        uint32_t at = 0;
        for (uint32_t n = 0; n < count && n < KEYS_MAX; n++)
            names[n] = name_of(s, array, n);
        while (at < count && strcmp(names[at], child->key) != 0)
            at++;
        if (at == count)
            return refuse(r, child, path,
                          "expected a list, or the name of an entry, found '%.64s'%s", child->key,
                          dray__word_hint(child->key, names, count, hint, sizeof(hint)));
        join(whole, path, child->key);
        if (r->places)
            rc = remember(r->places, whole, child, r->error);
        if (!rc)
            rc = read_section(r, s->record->settings, array + at * s->record->size, "", whole,
                              child);
    }
    return rc;
}

static int read_record(const reading *r, const dray__setting *s, void *record,
                       const dray__node *node, const char *path)
{
    char whole[KEY_BYTES];
    int rc = expect(r, node, DRAY__NODE_MAPPING, path);
    for (const dray__setting *f = s->record->settings; !rc && f->key; f++)
        if (!f->text && !dray__tree_child(node, f->key))
            rc = refuse(r, node, path, "key '%s' is missing", f->key);
    if (rc)
        return rc;
    const dray__node *name = dray__tree_child(node, s->record->settings->key);
    join(whole, path, name->kind == DRAY__NODE_SCALAR ? name->value : "");
    rc = set_defaults(r, s->record->settings, record);
    if (!rc && r->places)
        rc = remember(r->places, whole, node, r->error);
    return rc ? rc : read_section(r, s->record->settings, record, "", whole, node);
}

static int read_records(const reading *r, const dray__setting *s, void *base,
                        const dray__node *node, const char *path)
{
    if (node->kind == DRAY__NODE_MAPPING && node->count)
        return read_named(r, s, base, node, path);
    char *array;
    int rc = expect(r, node, DRAY__NODE_SEQUENCE, path);
    if (!rc)
        rc = new_list(r, s, base, node->count, node, path);
    if (!rc && r->places)
        forget_inside(r->places, path);
    uint32_t *count = list_of(s, base, &array);
    for (uint32_t i = 0; !rc && i < node->count; i++) {
        ++*count;
        rc = read_record(r, s, array + i * s->record->size, node->children[i], path);
    }
    return rc;
}

static int read_setting(const reading *r, const dray__setting *s, void *base,
                        const dray__node *node, const char *key)
{
    static const read_fn scalars[DRAY__SETTING_TEXTS] = {
        [DRAY__SETTING_INT] = read_int,   [DRAY__SETTING_REAL] = read_real,
        [DRAY__SETTING_BOOL] = read_bool, [DRAY__SETTING_WORD] = read_word,
        [DRAY__SETTING_TEXT] = read_text, [DRAY__SETTING_PATH] = read_path};
    if (s->type == DRAY__SETTING_RECORDS)
        return read_records(r, s, base, node, key);
    if (s->type == DRAY__SETTING_TEXTS)
        return read_texts(r, s, base, node, key);
    int rc = expect(r, node, DRAY__NODE_SCALAR, key);
    return rc ? rc : scalars[s->type](r, s, member(s, base), node, key);
}

/* ---- defaults -------------------------------------------------------------------------------- */

static int set_default(const reading *r, const dray__setting *s, void *base, const char *text)
{
    char words[256], *rest = NULL;
    dray__node items[DRAY__PRESET_TEXTS], *children[DRAY__PRESET_TEXTS];
    dray__node node = {.kind = DRAY__NODE_SCALAR, .value = words, .source = "defaults"};
    snprintf(words, sizeof(words), "%s", text);
    if (s->type == DRAY__SETTING_TEXTS) {
        node = (dray__node){.kind = DRAY__NODE_SEQUENCE, .children = children};
        for (char *word = strtok_r(words, " ", &rest); word && node.count < DRAY__PRESET_TEXTS;
             word = strtok_r(NULL, " ", &rest)) {
            items[node.count] = (dray__node){.kind = DRAY__NODE_SCALAR, .value = word};
            children[node.count] = &items[node.count];
            node.count++;
        }
    }
    return read_setting(r, s, base, &node, s->key);
}

static int set_presets(const reading *r, const dray__setting *s, void *base)
{
    const dray__setting *settings = s->record->settings;
    const dray__node nobody = {.source = "defaults"};
    char *array;
    int rc = new_list(r, s, base, s->record->preset_count, &nobody, s->key);
    uint32_t *count = list_of(s, base, &array);
    for (uint32_t i = 0; !rc && i < s->record->preset_count; i++) {
        char *record = array + i * s->record->size;
        ++*count;
        rc = set_defaults(r, settings, record);
        for (const char *const *text = s->record->presets[i]; !rc && *text; text += 2)
            rc = set_default(r, find_setting(settings, text[0]), record, text[1]);
    }
    return rc;
}

static int set_defaults(const reading *r, const dray__setting *settings, void *base)
{
    int rc = DRAY_OK;
    for (const dray__setting *s = settings; !rc && s->key; s++)
        if (s->record)
            rc = set_presets(r, s, base);
        else if (s->text)
            rc = set_default(r, s, base, s->text);
    return rc;
}

int dray__settings_default(dray__job **out, dray_error *error)
{
    dray__job *job = calloc(1, sizeof(*job));
    if (!job)
        return dray__nomem(error);
    const reading r = {.error = error};
    int rc = set_defaults(&r, dray__settings, job);
    if (rc)
        dray__settings_free(job);
    else
        *out = job;
    return rc;
}

int dray__settings_read(dray__job *job, const dray__node *tree, dray__places *places,
                        dray_error *error)
{
    const reading r = {.places = places, .error = error};
    return read_section(&r, dray__settings, job, "", "", tree);
}

void dray__settings_free(dray__job *job)
{
    if (job)
        free_values(dray__settings, job);
    free(job);
}
