/* Files of families: the built-in ones (families_embedded.c is made from src/model/families/
 * NAME.json), and those in the folder that DRAY_FAMILIES names. A file is read when its family
 * is first named, and kept until the process ends. */
#include "model/families/embedded.h"
#include "model/families/read.h"

#include "base/error.h"
#include "base/words.h"

#include <dirent.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_NAMES = 96, MOST_DEPTH = 6, LARGEST_FILE = 1 << 20 };

/* A family that was read, with its name and the value of DRAY_FAMILIES at that time. */
typedef struct known_family {
    struct known_family *next;
    dray__arena arena;
    json_t *json;
    char path[PATH_MAX], folder[PATH_MAX];
    dray__family family;
    char name[sizeof((dray_model_config *)0)->family];
} known_family;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static json_t *built_in; /* all built-in files: name without ".json" -> contents */
static known_family *families;

static int load_built_in(dray_error *error)
{
    if (built_in)
        return DRAY_OK;
    return dray__json_parse((const char *)dray__families_json, dray__families_json_size,
                            "the built-in families", &built_in, error);
}

static bool is_name(const char *name)
{
    return *name && !name[strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                       "0123456789_-")];
}

/* Returns the names of all families, which json_decref frees. */
static json_t *all_names(const char *folder)
{
    json_t *names = json_object();
    const char *name;
    json_t *value;
    DIR *dir = *folder ? opendir(folder) : NULL;
    json_object_foreach(built_in, name, value)
    {
        if (strcmp(name, "parts") != 0)
            json_object_set(names, name, value);
    }
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        size_t length = strlen(entry->d_name);
        if (length > 5 && dray__ends_with(entry->d_name, ".json"))
            json_object_setn_new(names, entry->d_name, length - 5, json_null());
    }
    if (dir)
        closedir(dir);
    return names;
}

static int unknown(const char *name, const char *folder, dray_error *error)
{
    const char *names[MOST_NAMES], *key;
    char hint[128];
    size_t count = 0;
    json_t *all = all_names(folder), *value;
    json_object_foreach(all, key, value)
    {
        if (count < MOST_NAMES)
            names[count++] = key;
    }
    int status = dray__fail(
        error, DRAY_EUNSUPPORTED,
        "model_type '%.60s' is not supported%s (dray.weights.record() of Python lays out any "
        "model, by its engine's own loader; docs/families.md: how to add a family; known: "
        "deepseek_v3, llama, qwen3 and %zu others)",
        name, dray__word_hint(name, names, count, hint, sizeof hint), count > 3 ? count - 3 : 0);
    json_decref(all);
    return status;
}

/* Reads one file, without merging. */
static int load_one(const char *name, const char *folder, char path[PATH_MAX], json_t **out,
                    dray_error *error)
{
    if (*folder && is_name(name)) {
        int n = snprintf(path, PATH_MAX, "%s/%s.json", folder, name);
        if (n < 0 || n >= PATH_MAX)
            return dray__fail(error, DRAY_EINVALID, "DRAY_FAMILIES: path too long");
        if (access(path, F_OK) == 0) {
            int status = dray__json_load(path, LARGEST_FILE, out, error);
            if (!status && !json_is_object(*out)) {
                status = dray__fail(error, DRAY_EFORMAT, "%.300s: expected an object", path);
                json_decref(*out);
            }
            return status;
        }
    }
    json_t *there = strcmp(name, "parts") != 0 ? json_object_get(built_in, name) : NULL;
    if (!there)
        return unknown(name, folder, error);
    snprintf(path, PATH_MAX, "built-in family %s", name);
    *out = json_incref(there);
    return DRAY_OK;
}

/* Merges two files: the values of the first replace those of the second, and in "config" each value
 * replaces one. A family with rows of its own inherits nothing about engines and Megatron-Core.
 * Returns NULL when out of memory. */
static json_t *laid_over(const json_t *base, const json_t *own)
{
    json_t *all = json_copy((json_t *)base);
    json_t *config = json_copy(json_object_get(base, "config"));
    const json_t *rules = json_object_get(own, "config");
    if (json_object_get(own, "rows")) {
        json_object_del(all, "engine");
        json_object_del(all, "megatron");
    }
    bool done = all && json_object_update(all, (json_t *)own) == 0;
    if (done && config && json_is_object(rules))
        done = json_object_update(config, (json_t *)rules) == 0;
    if (done && config && (!rules || json_is_object(rules)))
        done = json_object_set(all, "config", config) == 0;
    json_decref(config);
    if (done)
        return all;
    json_decref(all);
    return NULL;
}

/* Merges a file with the family that it is based on, or else with the "config" of parts.json. */
static int load(const char *name, const char *folder, uint32_t depth, char path[PATH_MAX],
                json_t **out, dray_error *error)
{
    char base_path[PATH_MAX];
    json_t *own, *base = NULL;
    int status = load_one(name, folder, path, &own, error);
    if (status)
        return status;
    const json_t *like = json_object_get(own, "like");
    if (like && (!json_is_string(like) || depth == MOST_DEPTH))
        status = dray__fail(error, DRAY_EFORMAT,
                            "%.300s: like: expected the name of a family that is not like this one",
                            path);
    else if (like) {
        status = load(json_string_value(like), folder, depth + 1, base_path, &base, error);
        if (status && status != DRAY_ENOMEM)
            status = dray__fail_prefix(error, status, "%.200s: like: ", path);
    } else {
        base = json_pack("{s:O}", "config",
                         json_object_get(json_object_get(built_in, "parts"), "config"));
        status = base ? DRAY_OK : dray__nomem(error);
    }
    if (!status && !(*out = laid_over(base, own)))
        status = dray__nomem(error);
    json_decref(base);
    json_decref(own);
    return status;
}

static int make(const char *name, const char *folder, known_family **out, dray_error *error)
{
    known_family *k = calloc(1, sizeof *k);
    if (!k)
        return dray__nomem(error);
    snprintf(k->name, sizeof k->name, "%s", name);
    snprintf(k->folder, sizeof k->folder, "%s", folder);
    int status = load_built_in(error);
    if (!status)
        status = load(name, folder, 0, k->path, &k->json, error);
    const dray__family_source source = {k->name, k->path, k->json,
                                        json_object_get(built_in, "parts"), &k->arena};
    if (!status)
        status = dray__family_read(&source, &k->family, error);
    if (status) {
        json_decref(k->json);
        dray__arena_free(&k->arena);
        free(k);
        return status;
    }
    *out = k;
    return DRAY_OK;
}

int dray__family_find(const char *name, const dray__family **out, dray_error *error)
{
    const char *given = getenv("DRAY_FAMILIES");
    const char *folder = given ? given : "";
    int status = DRAY_OK;
    if (strlen(name) >= sizeof((known_family *)0)->name || strlen(folder) >= PATH_MAX)
        return dray__fail(error, DRAY_EUNSUPPORTED, "model_type '%.60s' is not supported", name);
    pthread_mutex_lock(&lock);
    known_family *k = families;
    while (k && (strcmp(k->name, name) != 0 || strcmp(k->folder, folder) != 0))
        k = k->next;
    if (!k) {
        status = make(name, folder, &k, error);
        if (!status) {
            k->next = families;
            families = k;
        }
    }
    pthread_mutex_unlock(&lock);
    if (!status)
        *out = &k->family;
    return status;
}
