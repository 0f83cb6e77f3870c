/* The objects of a version (s3.h has the format). The manifest's sum of each block is compared with
 * the received bytes, so that a reader gets only bytes that the version's writer wrote. */
#include "store/s3.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KEPT = 256, TRIES = 3 };

typedef struct kept_manifest {
    dray__s3_place step;
    dray__s3_manifest *manifest;
} kept_manifest;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static kept_manifest kept[KEPT];
static unsigned next_place;

bool dray__s3_step_of(const dray__s3_place *place, dray__s3_place *step, const char **name)
{
    const char *begin = place->key, *found = NULL, *end = NULL;
    for (const char *at = begin; at; at = strchr(at, '/')) {
        at += *at == '/';
        char word[64];
        uint64_t version;
        unsigned again;
        size_t size = strcspn(at, "/");
        if (size < sizeof word) {
            memcpy(word, at, size);
            word[size] = 0;
            if (dray__store_step_parse(word, &version, &again)) {
                found = at;
                end = at + size;
            }
        }
        if (!at[size])
            break;
    }
    if (!found)
        return false;
    *step = *place;
    step->key[end - begin] = 0;
    *name = *end ? end + 1 : end;
    return true;
}

static void let_go(dray__s3_manifest *m)
{
    if (m && --m->uses == 0) {
        json_decref(m->json);
        free(m);
    }
}

void dray__s3_manifest_put(dray__s3_manifest *m)
{
    pthread_mutex_lock(&lock);
    let_go(m);
    pthread_mutex_unlock(&lock);
}

static bool is_place(const dray__s3_place *a, const dray__s3_place *b)
{
    return a->server == b->server && strcmp(a->bucket, b->bucket) == 0 &&
           strcmp(a->key, b->key) == 0;
}

void dray__s3_manifest_forget(const dray__s3_place *step)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < KEPT; i++)
        if (kept[i].manifest && is_place(&kept[i].step, step)) {
            let_go(kept[i].manifest);
            kept[i].manifest = NULL;
        }
    pthread_mutex_unlock(&lock);
}

static dray__s3_manifest *find_kept(const dray__s3_place *step)
{
    dray__s3_manifest *m = NULL;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < KEPT && !m; i++)
        if (kept[i].manifest && is_place(&kept[i].step, step))
            m = kept[i].manifest;
    if (m)
        m->uses++;
    pthread_mutex_unlock(&lock);
    return m;
}

static void keep(const dray__s3_place *step, dray__s3_manifest *m)
{
    pthread_mutex_lock(&lock);
    kept_manifest *place = &kept[next_place++ % KEPT];
    let_go(place->manifest);
    *place = (kept_manifest){*step, m};
    m->uses++;
    pthread_mutex_unlock(&lock);
}

/* Checks the manifest's own sum, and the form of the fields that the reader needs. */
static int parse(const dray__s3_place *step, const char *text, size_t size, dray__s3_manifest *m,
                 dray_error *error)
{
    enum { TAIL = 18 }; /* newline, 16 digits, newline */
    char what[512], digits[17] = "";
    snprintf(what, sizeof what, "s3://%.63s/%.380s/" DRAY__S3_MANIFEST, step->bucket, step->key);
    if (size > TAIL)
        m->sum = dray__hash(text, size - TAIL);
    if (size > TAIL)
        snprintf(digits, sizeof digits, "%016" PRIx64, m->sum);
    if (size <= TAIL || text[size - TAIL] != '\n' || text[size - 1] != '\n' ||
        memcmp(text + size - TAIL + 1, digits, 16) != 0)
        return dray__fail(error, DRAY_ECHECKSUM, "%s: its own sum differs", what);
    int rc = dray__json_parse(text, size - TAIL, what, &m->json, error);
    if (!rc && (dray__json_integer(m->json, "version") != 1 ||
                dray__json_integer(m->json, "block") != DRAY__S3_BLOCK ||
                !json_is_object(json_object_get(m->json, "objects"))))
        rc = dray__fail(error, DRAY_EFORMAT, "%s: expected version 1, block %d and objects", what,
                        DRAY__S3_BLOCK);
    return rc;
}

/* Returns DRAY_OK with *out NULL when there is none. A manifest with a wrong sum is fetched
 * again. */
static int fetch(const dray__s3_place *step, dray__s3_manifest **out, dray_error *error)
{
    dray__s3_place place;
    int rc = dray__s3_beneath(step, DRAY__S3_MANIFEST, &place, error);
    dray__s3_manifest *m = calloc(1, sizeof *m);
    *out = NULL;
    if (rc || !m) {
        free(m);
        return rc ? rc : dray__nomem(error);
    }
    for (unsigned i = 0; i < TRIES && (i == 0 || rc == DRAY_ECHECKSUM); i++) {
        char *text = NULL;
        size_t size;
        rc = dray__s3_get(&place, &text, &size, error);
        if (!rc)
            rc = parse(step, text, size, m, error);
        free(text);
    }
    if (rc) {
        json_decref(m->json);
        free(m);
        return rc;
    }
    m->uses = 1;
    *out = m;
    return DRAY_OK;
}

int dray__s3_manifest_get(const dray__s3_place *step, dray__s3_manifest **out, dray_error *error)
{
    dray__s3_place partial;
    dray_error why = {0};
    *out = find_kept(step);
    if (*out)
        return DRAY_OK;
    int rc = fetch(step, out, &why);
    if (!rc) {
        keep(step, *out);
        return DRAY_OK;
    }
    if (rc != DRAY_ENOENT) {
        if (error)
            *error = why;
        return rc;
    }
    rc = dray__s3_beneath(step, DRAY__S3_PARTIAL, &partial, error);
    if (!rc && dray__s3_has(&partial, &rc, error))
        rc = dray__fail(error, DRAY_ENOENT,
                        "s3://%s/%.300s: not whole: it is being written, its writer died, or it is "
                        "being removed",
                        step->bucket, step->key);
    return rc;
}

int dray__s3_manifest_add(json_t *objects, const char *name, uint64_t bytes, const uint64_t *sums,
                          dray_error *error)
{
    uint64_t blocks = (bytes + DRAY__S3_BLOCK - 1) / DRAY__S3_BLOCK;
    json_t *list = json_array(), *object = json_object();
    for (uint64_t i = 0; i < blocks; i++) {
        char digits[24];
        snprintf(digits, sizeof digits, "%016" PRIx64, sums[i]);
        dray__json_append(&list, json_string(digits));
    }
    dray__json_set(&object, "bytes", json_integer((json_int_t)bytes));
    dray__json_set(&object, "sums", list);
    return object && json_object_set_new(objects, name, object) == 0 ? DRAY_OK : dray__nomem(error);
}

int dray__s3_manifest_write(const dray__s3_place *step, json_t *objects, dray_error *error)
{
    dray__s3_place place;
    json_t *json = json_object();
    dray__json_set(&json, "version", json_integer(1));
    dray__json_set(&json, "block", json_integer(DRAY__S3_BLOCK));
    dray__json_set(&json, "objects", json_incref(objects));
    char *text = dray__json_text(json, JSON_COMPACT | JSON_SORT_KEYS), *all = NULL;
    json_decref(json);
    int size =
        text ? asprintf(&all, "%s\n%016" PRIx64 "\n", text, dray__hash(text, strlen(text))) : -1;
    free(text);
    if (size < 0)
        return dray__nomem(error);
    int rc = dray__s3_beneath(step, DRAY__S3_MANIFEST, &place, error);
    if (!rc)
        rc = dray__s3_put(&place, all, (size_t)size, "application/json", error);
    free(all);
    return rc;
}
