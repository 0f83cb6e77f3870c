/* Lists objects, and fetches, puts and removes single ones. */
#include "store/s3.h"

#include "base/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int dray__s3_parse(const char *path, dray__s3_place *out, dray_error *error)
{
    const char *at = path + strlen(dray__store_s3.scheme);
    size_t bucket = strcspn(at, "/"), n = 0;
    *out = (dray__s3_place){.server = dray__s3_server()};
    /* https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html */
    if (bucket < 3 || bucket >= sizeof out->bucket ||
        strspn(at, "abcdefghijklmnopqrstuvwxyz0123456789.-") < bucket)
        return dray__fail(error, DRAY_EINVALID,
                          "%.200s: expected s3://BUCKET/PREFIX, with a bucket's name of 3 to 63 "
                          "small letters, digits, '-' and '.'",
                          path);
    memcpy(out->bucket, at, bucket);
    for (at += bucket; *at; at++) {
        if (*at == '/' && (n == 0 || out->key[n - 1] == '/'))
            continue;
        if (n + 1 == sizeof out->key)
            return dray__fail(error, DRAY_EINVALID, "%.200s...: path too long", path);
        out->key[n++] = *at;
    }
    if (n && out->key[n - 1] == '/')
        out->key[n - 1] = 0;
    return DRAY_OK;
}

int dray__s3_beneath(const dray__s3_place *place, const char *name, dray__s3_place *out,
                     dray_error *error)
{
    dray__s3_place made = *place;
    size_t size = sizeof made.key, n = strlen(place->key);
    int more = snprintf(made.key + n, size - n, "%s%s", n ? "/" : "", name);
    if (more < 0 || (size_t)more >= size - n)
        return dray__fail(error, DRAY_EINVALID, "s3://%s/%.200s...: path too long", place->bucket,
                          place->key);
    *out = made;
    return DRAY_OK;
}

int dray__s3_get(const dray__s3_place *place, char **text, size_t *size, dray_error *error)
{
    dray__s3_request r = {.method = "GET", .place = place};
    int rc = dray__s3_do(&r, error);
    if (rc)
        return rc;
    *text = r.text ? r.text : calloc(1, 1);
    *size = r.size;
    return *text ? DRAY_OK : dray__nomem(error);
}

int dray__s3_put(const dray__s3_place *place, const void *data, size_t size, const char *type,
                 dray_error *error)
{
    dray__s3_request r = {
        .method = "PUT", .place = place, .body = data, .body_bytes = size, .type = type};
    int rc = dray__s3_do(&r, error);
    free(r.text);
    return rc;
}

int dray__s3_delete(const dray__s3_place *place, dray_error *error)
{
    dray__s3_request r = {.method = "DELETE", .place = place};
    int rc = dray__s3_do(&r, error);
    free(r.text);
    return rc == DRAY_ENOENT ? DRAY_OK : rc;
}

bool dray__s3_has(const dray__s3_place *place, int *rc, dray_error *error)
{
    dray__s3_request r = {.method = "HEAD", .place = place};
    *rc = dray__s3_do(&r, error);
    free(r.text);
    bool has = *rc == DRAY_OK;
    if (*rc == DRAY_ENOENT)
        *rc = DRAY_OK;
    return has;
}

/* Reads a time such as "2026-11-27T10:58:31.000Z". */
static struct timespec read_time(const char *text)
{
    struct tm tm = {0};
    int millis = 0;
    if (sscanf(text, "%d-%d-%dT%d:%d:%d.%3d", &tm.tm_year, &tm.tm_mon, &tm.tm_mday, &tm.tm_hour,
               &tm.tm_min, &tm.tm_sec, &millis) < 6)
        return (struct timespec){0};
    tm.tm_year -= 1900;
    tm.tm_mon -= 1;
    return (struct timespec){.tv_sec = timegm(&tm), .tv_nsec = (long)millis * 1000000};
}

enum { PAGES_MAX = 10000 };

static int each_listed(const char *text, size_t size, const char *prefix, dray__s3_list_fn fn,
                       void *user, dray_error *error)
{
    const char *at = text, *end = text + size, *from, *to;
    size_t skip = strlen(prefix);
    int rc = DRAY_OK;
    while (!rc && dray__s3_element(&at, end, "Contents", &from, &to)) {
        char key[1300], made[40] = "";
        const char *in = from;
        bool named = dray__s3_tag(&in, to, "Key", key, sizeof key);
        in = from;
        dray__s3_tag(&in, to, "LastModified", made, sizeof made);
        if (named && strncmp(key, prefix, skip) == 0 && key[skip])
            rc = fn(user, &(dray__s3_listed){key + skip, read_time(made)}, error);
    }
    return rc;
}

int dray__s3_list(const dray__s3_place *folder, bool flat, dray__s3_list_fn fn, void *user,
                  dray_error *error)
{
    dray__s3_place bucket = {0}, prefix;
    char token[1024] = "", next[1024];
    unsigned pages = 0; /* pages of 1,000 objects, limited in case a server never ends the list */
    int rc = dray__s3_beneath(folder, "", &prefix, error);
    memcpy(bucket.bucket, folder->bucket, sizeof bucket.bucket);
    for (bool more = true; more && !rc;) {
        dray__s3_request r = {.method = "GET", .place = &bucket};
        unsigned n = 0;
        if (token[0])
            memcpy(r.query[n++], (const char *[]){"continuation-token", token}, sizeof r.query[0]);
        if (flat)
            memcpy(r.query[n++], (const char *[]){"delimiter", "/"}, sizeof r.query[0]);
        memcpy(r.query[n++], (const char *[]){"list-type", "2"}, sizeof r.query[0]);
        memcpy(r.query[n++], (const char *[]){"prefix", prefix.key}, sizeof r.query[0]);
        rc = dray__s3_do(&r, error);
        if (rc)
            break;
        const char *at = r.text, *end = r.text ? r.text + r.size : NULL;
        char cut[8] = "";
        dray__s3_tag(&at, end, "IsTruncated", cut, sizeof cut);
        at = r.text;
        more = strcmp(cut, "true") == 0;
        bool told = !more || dray__s3_tag(&at, end, "NextContinuationToken", next, sizeof next);
        if (!cut[0] || !told || (more && (strcmp(next, token) == 0 || ++pages == PAGES_MAX)))
            rc = dray__fail(error, DRAY_EPROTO,
                            "s3://%s/%.200s: the server's list does not say whether it ends, or "
                            "where it goes on",
                            folder->bucket, folder->key);
        if (!rc)
            rc = each_listed(r.text, r.size, prefix.key, fn, user, error);
        if (more && told)
            memcpy(token, next, sizeof token);
        free(r.text);
    }
    return rc;
}
