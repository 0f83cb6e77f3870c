/* The store in buckets of S3 servers: opens objects, reads them in blocks, and keeps folders of
 * versions. */
#include "store/s3.h"

#include "base/array.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/hook.h"
#include "base/io.h"
#include "store/blocks.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { TRIES = 3, LINE_MAX_BYTES = 128 };

typedef struct object {
    dray__s3_place place;
    uint64_t bytes, key; /* of its content, for the cache */
    uint64_t *sums;      /* of its blocks; NULL when another program wrote it */
    char etag[128];      /* in that case, the object's ETag */
    dray__s3_manifest *manifest;
} object;

/* ---- reading --------------------------------------------------------------------------------- */

static int read_sums(object *o, const json_t *said, dray_error *error)
{
    const json_t *list = json_object_get(said, "sums"), *bytes = json_object_get(said, "bytes");
    json_int_t size = json_integer_value(bytes);
    size_t count = json_array_size(list);
    if (!json_is_integer(bytes) || size < 0 || !json_is_array(list) ||
        count != (size_t)size / DRAY__S3_BLOCK + (size % DRAY__S3_BLOCK != 0))
        return dray__fail(error, DRAY_EFORMAT,
                          "s3://%s/%.300s: " DRAY__S3_MANIFEST
                          ": expected bytes, and a sum of each "
                          "block",
                          o->place.bucket, o->place.key);
    o->bytes = (uint64_t)size;
    o->sums = calloc(count + 1, sizeof *o->sums);
    if (!o->sums)
        return dray__nomem(error);
    for (size_t i = 0; i < count; i++) {
        const char *text = json_string_value(json_array_get(list, i));
        char *end = NULL;
        o->sums[i] = text ? strtoull(text, &end, 16) : 0;
        if (!text || strlen(text) != 16 || *end)
            return dray__fail(error, DRAY_EFORMAT,
                              "s3://%s/%.300s: " DRAY__S3_MANIFEST
                              ": expected a sum of 16 hexadecimal digits",
                              o->place.bucket, o->place.key);
    }
    return DRAY_OK;
}

/* Gets size and ETag of another program's object. */
static int look_at(object *o, dray_error *error)
{
    dray__s3_request r = {.method = "HEAD", .place = &o->place};
    int rc = dray__s3_do(&r, error);
    free(r.text);
    if (rc)
        return rc;
    o->bytes = r.length;
    memcpy(o->etag, r.answer_etag, sizeof o->etag);
    return o->etag[0] ? DRAY_OK
                      : dray__fail(error, DRAY_EPROTO, "s3://%s/%.300s: expected an ETag",
                                   o->place.bucket, o->place.key);
}

static int find_object(object *o, dray_error *error)
{
    dray__s3_place step;
    const char *name;
    int rc = DRAY_OK;
    if (dray__s3_step_of(&o->place, &step, &name))
        rc = dray__s3_manifest_get(&step, &o->manifest, error);
    if (rc || !o->manifest)
        return rc ? rc : look_at(o, error);
    const json_t *said = json_object_get(json_object_get(o->manifest->json, "objects"), name);
    return said ? read_sums(o, said, error)
                : dray__fail(error, DRAY_ENOENT, "s3://%s/%.300s: no such object in the version",
                             o->place.bucket, o->place.key);
}

static void free_object(object *o)
{
    dray__s3_manifest_put(o->manifest);
    free(o->sums);
    free(o);
}

static int s3_open(const char *path, dray__store_file *out, dray_error *error)
{
    object *o = calloc(1, sizeof *o);
    char *identity = NULL;
    int rc = o ? dray__s3_parse(path, &o->place, error) : dray__nomem(error);
    if (!rc)
        rc = find_object(o, error);
    if (!rc && asprintf(&identity, "%s\n%s\n%s\n%016" PRIx64, o->place.bucket, o->place.key,
                        o->etag, o->manifest ? o->manifest->sum : o->place.server) < 0)
        rc = dray__nomem(error);
    if (rc) {
        if (o)
            free_object(o);
        return rc;
    }
    o->key = dray__hash(identity, strlen(identity));
    free(identity);
    *out = (dray__store_file){
        .store = &dray__store_s3, .name = path, .fd = -1, .object = o, .bytes = o->bytes};
    return DRAY_OK;
}

typedef struct fetching {
    const object *object;
    const atomic_bool *stop;
} fetching;

/* A block with a wrong sum is fetched again, because the transfer may have failed once. */
static int fetch(void *user, uint64_t block, void *data, uint64_t bytes, dray_error *error)
{
    const fetching *f = user;
    const object *o = f->object;
    int rc = DRAY_OK;
    for (unsigned i = 0; i < TRIES; i++) {
        dray__s3_request r = {.method = "GET",
                              .place = &o->place,
                              .etag = o->etag[0] ? o->etag : NULL,
                              .from = block * DRAY__S3_BLOCK,
                              .range = bytes,
                              .into = data,
                              .stop = f->stop};
        rc = dray__s3_do(&r, error);
        free(r.text);
        if (rc || !o->sums || dray__hash(data, (size_t)bytes) == o->sums[block])
            break;
        rc = dray__fail(error, DRAY_ECHECKSUM,
                        "s3://%s/%.300s: block %" PRIu64
                        " does not have the sum that the version's " DRAY__S3_MANIFEST
                        " says, %d times",
                        o->place.bucket, o->place.key, block, TRIES);
    }
    dray__s3_place step;
    const char *name;
    if ((rc == DRAY_ENOENT || rc == DRAY_ECHECKSUM) && dray__s3_step_of(&o->place, &step, &name))
        dray__s3_manifest_forget(&step);
    return rc;
}

static int s3_read(const dray__store_file *file, void *data, uint64_t bytes, uint64_t at,
                   const atomic_bool *stop, dray_error *error)
{
    const object *o = file->object;
    fetching f = {o, stop};
    uint8_t *out = data;
    if (at > o->bytes || bytes > o->bytes - at)
        return dray__fail(error, DRAY_EFORMAT,
                          "s3://%s/%.300s ends at byte %" PRIu64 ", %" PRIu64 " more expected",
                          o->place.bucket, o->place.key, o->bytes, at + bytes - o->bytes);
    while (bytes) {
        uint64_t block = at / DRAY__S3_BLOCK, from = at % DRAY__S3_BLOCK;
        uint64_t size = o->bytes - block * DRAY__S3_BLOCK;
        size = size < DRAY__S3_BLOCK ? size : DRAY__S3_BLOCK;
        uint64_t n = bytes < size - from ? bytes : size - from;
        int rc = dray__blocks_read(o->key, block, size, from, n, out, fetch, &f, error);
        if (rc)
            return rc;
        out += n;
        at += n;
        bytes -= n;
    }
    return DRAY_OK;
}

static void s3_close(dray__store_file *file)
{
    free_object(file->object);
}

typedef struct naming {
    dray__store_name_fn fn;
    void *user;
    uint64_t count;
} naming;

static int name_listed(void *user, const dray__s3_listed *listed, dray_error *error)
{
    naming *n = user;
    (void)error;
    n->count++;
    if (!strchr(listed->key, '/'))
        n->fn(n->user, listed->key);
    return DRAY_OK;
}

static int s3_names(const char *folder, dray__store_name_fn fn, void *user, dray_error *error)
{
    dray__s3_place place, step;
    dray__s3_manifest *m = NULL;
    const char *within = "", *name;
    naming n = {fn, user, 0};
    json_t *one;
    int rc = dray__s3_parse(folder, &place, error);
    if (!rc && dray__s3_step_of(&place, &step, &within))
        rc = dray__s3_manifest_get(&step, &m, error);
    if (!rc && !m)
        rc = dray__s3_list(&place, true, name_listed, &n, error);
    size_t skip = strlen(within);
    json_object_foreach(m ? json_object_get(m->json, "objects") : NULL, name, one)
    {
        const char *rest = name + skip + (skip > 0);
        if (strncmp(name, within, skip) == 0 && (!skip || name[skip] == '/') && !strchr(rest, '/'))
            name_listed(&n, &(dray__s3_listed){.key = rest}, NULL);
    }
    dray__s3_manifest_put(m);
    return rc || n.count ? rc : dray__fail(error, DRAY_ENOENT, "%.300s: no such folder", folder);
}

/* Returns the path itself, because there are no links, and folders have no entries of their own. */
static int s3_resolve(const char *path, char *out, dray_error *error)
{
    dray__s3_place place;
    int rc = dray__s3_parse(path, &place, error);
    if (!rc)
        snprintf(out, PATH_MAX, "s3://%s%s%s", place.bucket, place.key[0] ? "/" : "", place.key);
    return rc;
}

/* ---- a run's folder -------------------------------------------------------------------------- */

static int s3_stage(const char *folder, char *out, dray_error *error)
{
    char path[PATH_MAX], base[PATH_MAX];
    int rc = s3_resolve(folder, path, error);
    if (rc)
        return rc;
    if (!dray__cache_folder(base, sizeof base - 64))
        return dray__fail(error, DRAY_EINVALID,
                          "%.200s: versions are written on this machine first: expected DRAY_CACHE "
                          "(or HOME) to name a folder that can be written",
                          folder);
    snprintf(out, PATH_MAX, "%.*s/stage-%016" PRIx64, PATH_MAX - 64, base,
             dray__hash(path, strlen(path)));
    return mkdir(out, 0700) && errno != EEXIST ? dray__fail_errno(error, errno, "%.300s", out)
                                               : DRAY_OK;
}

typedef struct seen_step {
    dray__store_step step;
    bool whole, partial;
} seen_step;

typedef struct seeing {
    seen_step *steps;
    uint64_t count, capacity;
} seeing;

static int see(void *user, const dray__s3_listed *listed, dray_error *error)
{
    seeing *s = user;
    seen_step one = {0};
    uint64_t version;
    unsigned again;
    size_t size = strcspn(listed->key, "/");
    const char *rest = listed->key + size;
    if (!*rest || size >= sizeof one.step.name)
        return DRAY_OK;
    memcpy(one.step.name, listed->key, size);
    if (!dray__store_step_parse(one.step.name, &version, &again))
        return DRAY_OK;
    seen_step *at = s->count ? &s->steps[s->count - 1] : NULL; /* keys come in order */
    for (uint64_t i = 0; (!at || strcmp(at->step.name, one.step.name) != 0) && i < s->count; i++)
        at = &s->steps[i];
    if (!at || strcmp(at->step.name, one.step.name) != 0) {
        if (!DRAY__PUSH(s->steps, s->count, s->capacity, one))
            return dray__nomem(error);
        at = &s->steps[s->count - 1];
    }
    bool manifest = strcmp(rest + 1, DRAY__S3_MANIFEST) == 0;
    if (manifest || (!at->whole && (listed->made.tv_sec > at->step.made.tv_sec ||
                                    (listed->made.tv_sec == at->step.made.tv_sec &&
                                     listed->made.tv_nsec > at->step.made.tv_nsec))))
        at->step.made = listed->made;
    at->whole |= manifest;
    at->partial |= strcmp(rest + 1, DRAY__S3_PARTIAL) == 0;
    return DRAY_OK;
}

static int s3_retire(const char *folder, const char *name, dray_error *error);

static int s3_steps(const char *folder, bool clear, dray__store_step **out, size_t *count,
                    dray_error *error)
{
    dray__s3_place place;
    seeing s = {0};
    uint64_t kept = 0;
    *out = NULL;
    *count = 0;
    int rc = dray__s3_parse(folder, &place, error);
    if (!rc)
        rc = dray__s3_list(&place, false, see, &s, error);
    dray__store_step *steps = rc ? NULL : calloc((size_t)s.count + 1, sizeof *steps);
    if (!rc && !steps)
        rc = dray__nomem(error);
    for (uint64_t i = 0; i < s.count && !rc; i++) {
        if (s.steps[i].whole || !s.steps[i].partial)
            steps[kept++] = s.steps[i].step;
        else if (clear)
            rc = s3_retire(folder, s.steps[i].step.name, error);
    }
    free(s.steps);
    if (rc) {
        free(steps);
        return rc;
    }
    *out = steps;
    *count = (size_t)kept;
    return DRAY_OK;
}

/* Uploads all files below a folder of this machine, except those with names that begin with a
 * dot. */
static int upload_tree(const char *local, const dray__s3_place *step, const char *within,
                       json_t *objects, dray_error *error)
{
    DIR *dir = opendir(local);
    int rc = dir ? DRAY_OK : dray__fail_errno(error, errno, "%.300s", local);
    errno = 0;
    for (struct dirent *entry; !rc && (entry = readdir(dir)); errno = 0) {
        char path[PATH_MAX], name[512];
        struct stat st;
        dray__s3_place place;
        int n = snprintf(name, sizeof name, "%s%s%s", within, within[0] ? "/" : "", entry->d_name);
        if (entry->d_name[0] == '.')
            continue;
        if (n >= (int)sizeof name ||
            snprintf(path, sizeof path, "%s/%s", local, entry->d_name) >= (int)sizeof path)
            rc = dray__fail(error, DRAY_EINVALID, "%.300s/%.100s: path too long", local,
                            entry->d_name);
        else if (lstat(path, &st))
            rc = dray__fail_errno(error, errno, "%.300s", path);
        else if (S_ISDIR(st.st_mode))
            rc = upload_tree(path, step, name, objects, error);
        else if (!(rc = dray__s3_beneath(step, name, &place, error))) {
            rc = dray__s3_upload(path, &place, name, objects, error);
            dray__hook_step("save object");
        }
    }
    if (!rc && errno)
        rc = dray__fail_errno(error, errno, "%.300s", local);
    if (dir)
        closedir(dir);
    return rc;
}

static int mark_partial(const dray__s3_place *step, bool partial, dray_error *error)
{
    dray__s3_place place;
    int rc = dray__s3_beneath(step, DRAY__S3_PARTIAL, &place, error);
    if (rc)
        return rc;
    return partial ? dray__s3_put(&place, "", 0, "text/plain", error)
                   : dray__s3_delete(&place, error);
}

static int s3_place(const char *folder, const char *name, const char *finished, dray_error *error)
{
    dray__s3_place place, step;
    json_t *objects = json_object();
    int rc = objects ? dray__s3_parse(folder, &place, error) : dray__nomem(error);
    if (!rc)
        rc = dray__s3_beneath(&place, name, &step, error);
    if (rc) {
        json_decref(objects);
        return rc;
    }
    rc = dray__s3_upload_clear(&place, name, error);
    if (!rc)
        rc = mark_partial(&step, true, error);
    if (!rc)
        rc = upload_tree(finished, &step, "", objects, error);
    dray__hook_step("save uploaded");
    dray__s3_manifest_forget(&step);
    if (!rc)
        rc = dray__s3_manifest_write(&step, objects, error);
    dray__hook_step("save whole");
    if (!rc)
        rc = mark_partial(&step, false, error);
    json_decref(objects);
    return rc;
}

static int latest_place(const char *folder, dray__s3_place *out, dray_error *error)
{
    int rc = dray__s3_parse(folder, out, error);
    return rc ? rc : dray__s3_beneath(out, "latest", out, error);
}

/* The pointer's line; s3.h has the format. Returns its length. */
static int write_line(const char *name, const dray__store_given *given, char out[LINE_MAX_BYTES])
{
    int n = snprintf(out, LINE_MAX_BYTES, "%.63s %016" PRIx64 " %" PRIu64 " %u", name,
                     dray__name_hash(name), given->version, given->again);
    return n + snprintf(out + n, LINE_MAX_BYTES - (size_t)n, " %016" PRIx64 "\n",
                        dray__hash(out, (size_t)n));
}

static int s3_lead(const char *folder, const char *name, const dray__store_given *given,
                   dray_error *error)
{
    dray__s3_place place;
    char text[LINE_MAX_BYTES];
    int n = write_line(name, given, text);
    int rc = latest_place(folder, &place, error);
    return rc ? rc : dray__s3_put(&place, text, (size_t)n, "text/plain", error);
}

/* Reads the pointer's line. The names given are unknown when an earlier version of this program
 * wrote it, with the first sum at its end. Returns false when a sum differs. */
static bool read_line(const char *text, char name[64], dray__store_given *given)
{
    char sum[20] = "", digits[20] = "", line[LINE_MAX_BYTES];
    int end = 0, n = sscanf(text, "%63s %16s%n", name, sum, &end);
    snprintf(digits, sizeof digits, "%016" PRIx64, n == 2 ? dray__name_hash(name) : 0);
    *given = (dray__store_given){0, 0};
    if (n != 2 || strcmp(sum, digits) != 0)
        return false;
    if (text[end] != ' ')
        return true;
    if (sscanf(text + end, "%" SCNu64 " %u", &given->version, &given->again) != 2)
        return false;
    write_line(name, given, line);
    return strcmp(text, line) == 0;
}

/* Gets `latest`, whose place is `place`, again when it is damaged. */
static int get_latest(const char *folder, const dray__s3_place *place, char name[64],
                      dray__store_given *given, dray_error *error)
{
    for (unsigned i = 0; i < TRIES; i++) {
        char *text = NULL;
        size_t size;
        int rc = dray__s3_get(place, &text, &size, error);
        if (rc)
            return rc == DRAY_ENOENT
                       ? dray__fail(error, DRAY_ENOENT, "%.300s: no checkpoint", folder)
                       : rc;
        bool is = size < LINE_MAX_BYTES && read_line(text, name, given);
        free(text);
        if (is)
            return DRAY_OK;
    }
    return dray__fail(error, DRAY_EFORMAT, "%.300s/latest: expected a step and its sum", folder);
}

static int s3_led(const char *folder, char *out, dray_error *error)
{
    dray__s3_place place;
    dray__store_given given;
    char name[64] = "";
    int rc = latest_place(folder, &place, error);
    if (!rc)
        rc = get_latest(folder, &place, name, &given, error);
    if (rc)
        return rc;
    place.key[strlen(place.key) - strlen("latest")] = 0;
    int n = snprintf(out, PATH_MAX, "s3://%s/%s%s", place.bucket, place.key, name);
    return n < PATH_MAX ? DRAY_OK
                        : dray__fail(error, DRAY_EINVALID, "%.300s: path too long", folder);
}

/* A pointer that is missing or damaged says nothing, and is replaced. */
static int s3_given(const char *folder, dray__store_given *out, dray_error *error)
{
    dray__s3_place place;
    dray_error why = {0};
    char name[64] = "";
    *out = (dray__store_given){0, 0};
    int rc = latest_place(folder, &place, error);
    if (rc)
        return rc;
    rc = get_latest(folder, &place, name, out, &why);
    if (rc == DRAY_ENOENT || rc == DRAY_EFORMAT) {
        *out = (dray__store_given){0, 0};
        return DRAY_OK;
    }
    if (rc && error)
        *error = why;
    return rc;
}

typedef struct removing {
    dray__s3_place *keys;
    uint64_t count, capacity;
    const dray__s3_place *step;
} removing;

static int remember(void *user, const dray__s3_listed *listed, dray_error *error)
{
    removing *r = user;
    dray__s3_place place;
    if (strcmp(listed->key, DRAY__S3_MANIFEST) == 0 || strcmp(listed->key, DRAY__S3_PARTIAL) == 0)
        return DRAY_OK; /* the manifest is removed first, .partial last */
    int rc = dray__s3_beneath(r->step, listed->key, &place, error);
    if (rc)
        return rc;
    return DRAY__PUSH(r->keys, r->count, r->capacity, place) ? DRAY_OK : dray__nomem(error);
}

static int s3_retire(const char *folder, const char *name, dray_error *error)
{
    dray__s3_place place, step, manifest;
    removing r = {.step = &step};
    int rc = dray__s3_parse(folder, &place, error);
    if (!rc)
        rc = dray__s3_beneath(&place, name, &step, error);
    if (!rc)
        rc = dray__s3_beneath(&step, DRAY__S3_MANIFEST, &manifest, error);
    if (!rc)
        rc = mark_partial(&step, true, error);
    if (!rc)
        rc = dray__s3_delete(&manifest, error);
    if (!rc)
        dray__s3_manifest_forget(&step);
    dray__hook_step("save retired");
    if (!rc)
        rc = dray__s3_list(&step, false, remember, &r, error);
    for (uint64_t i = 0; i < r.count && !rc; i++)
        rc = dray__s3_delete(&r.keys[i], error);
    free(r.keys);
    return rc ? rc : mark_partial(&step, false, error);
}

const dray__store dray__store_s3 = {.scheme = "s3://",
                                    .open = s3_open,
                                    .read = s3_read,
                                    .close = s3_close,
                                    .names = s3_names,
                                    .resolve = s3_resolve,
                                    .stage = s3_stage,
                                    .steps = s3_steps,
                                    .place = s3_place,
                                    .lead = s3_lead,
                                    .led = s3_led,
                                    .retire = s3_retire,
                                    .given = s3_given};
