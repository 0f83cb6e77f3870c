/* Writes files as objects: small ones at once, large ones in parts, several at a time. An upload in
 * parts becomes an object when it is completed. An upload that an earlier writer left is continued:
 * the server lists its parts, and parts with the MD5 (their ETag) and size of this file's are not
 * sent again. */
#include "store/s3.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/io.h"
#include "base/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    PART_BYTES = 8 << 20, /* S3 requires 5 MiB or more, and at most 10,000 parts */
    MOST_PARTS = 8000,
    WRITERS = 4,
    ID_ROOM = 1024
};

typedef struct sent_part {
    char etag[80];  /* of the server's part; "" when it has none */
    uint64_t bytes; /* the server's */
} sent_part;

typedef struct upload {
    const dray__s3_place *place;
    const char *path;
    int fd;
    uint64_t bytes, part_bytes;
    uint32_t parts;
    sent_part *part;
    uint64_t *sums;
    char id[ID_ROOM];
    pthread_mutex_t lock;
    uint32_t next; /* the next part to send */
    int rc;
    dray_error why;
} upload;

static void number_text(uint32_t number, char out[16])
{
    snprintf(out, 16, "%" PRIu32, number);
}

/* ---- uploads that an earlier writer left ----------------------------------------------------- */

typedef int (*pending_fn)(void *user, const char *key, const char *id, dray_error *error);

/* Calls fn for each unfinished upload in parts with a key that begins with the prefix. */
static int each_pending(const dray__s3_place *prefix, pending_fn fn, void *user, dray_error *error)
{
    dray__s3_place bucket = {0};
    memcpy(bucket.bucket, prefix->bucket, sizeof bucket.bucket);
    char key_marker[1300] = "", id_marker[ID_ROOM] = "";
    int rc = DRAY_OK;
    for (bool more = true; more && !rc;) {
        dray__s3_request r = {.method = "GET", .place = &bucket};
        unsigned n = 0;
        if (key_marker[0])
            memcpy(r.query[n++], (const char *[]){"key-marker", key_marker}, sizeof r.query[0]);
        memcpy(r.query[n++], (const char *[]){"prefix", prefix->key}, sizeof r.query[0]);
        if (id_marker[0])
            memcpy(r.query[n++], (const char *[]){"upload-id-marker", id_marker},
                   sizeof r.query[0]);
        memcpy(r.query[n++], (const char *[]){"uploads", ""}, sizeof r.query[0]);
        rc = dray__s3_do(&r, error);
        if (rc)
            break;
        const char *at = r.text, *end = r.text ? r.text + r.size : NULL, *from, *to;
        while (!rc && dray__s3_element(&at, end, "Upload", &from, &to)) {
            char key[1300], id[ID_ROOM];
            const char *in = from;
            bool told = dray__s3_tag(&in, to, "Key", key, sizeof key);
            in = from;
            told = told && dray__s3_tag(&in, to, "UploadId", id, sizeof id);
            if (told && strncmp(key, prefix->key, strlen(prefix->key)) == 0)
                rc = fn(user, key, id, error);
        }
        char cut[8] = "", was[1300];
        at = r.text;
        more = dray__s3_tag(&at, end, "IsTruncated", cut, sizeof cut) && strcmp(cut, "true") == 0;
        memcpy(was, key_marker, sizeof was);
        at = r.text;
        more = more && dray__s3_tag(&at, end, "NextKeyMarker", key_marker, sizeof key_marker);
        at = r.text;
        if (more && !dray__s3_tag(&at, end, "NextUploadIdMarker", id_marker, sizeof id_marker))
            more = strcmp(was, key_marker) != 0;
        free(r.text);
    }
    return rc;
}

static int abort_upload(const dray__s3_place *place, const char *id, dray_error *error)
{
    dray__s3_request r = {.method = "DELETE", .place = place, .query = {{"uploadId", id}}};
    int rc = dray__s3_do(&r, error);
    free(r.text);
    return rc == DRAY_ENOENT ? DRAY_OK : rc;
}

typedef struct clearing {
    const dray__s3_place *folder;
    char keep[1300];
} clearing;

static int clear_pending(void *user, const char *key, const char *id, dray_error *error)
{
    const clearing *c = user;
    dray__s3_place place = *c->folder;
    if (strncmp(key, c->keep, strlen(c->keep)) == 0)
        return DRAY_OK;
    snprintf(place.key, sizeof place.key, "%s", key);
    return abort_upload(&place, id, error);
}

int dray__s3_upload_clear(const dray__s3_place *folder, const char *step, dray_error *error)
{
    dray__s3_place prefix;
    clearing c = {.folder = folder};
    int rc = dray__s3_beneath(folder, "step-", &prefix, error);
    snprintf(c.keep, sizeof c.keep, "%s%s%s/", folder->key, folder->key[0] ? "/" : "", step);
    return rc ? rc : each_pending(&prefix, clear_pending, &c, error);
}

static int remember_pending(void *user, const char *key, const char *id, dray_error *error)
{
    upload *u = user;
    (void)error;
    if (strcmp(key, u->place->key) == 0)
        snprintf(u->id, sizeof u->id, "%s", id);
    return DRAY_OK;
}

static int list_parts(upload *u, dray_error *error)
{
    char marker[16] = "";
    int rc = DRAY_OK;
    for (bool more = true; more && !rc;) {
        dray__s3_request r = {.method = "GET", .place = u->place};
        unsigned n = 0;
        if (marker[0])
            memcpy(r.query[n++], (const char *[]){"part-number-marker", marker}, sizeof r.query[0]);
        memcpy(r.query[n++], (const char *[]){"uploadId", u->id}, sizeof r.query[0]);
        rc = dray__s3_do(&r, error);
        if (rc)
            break;
        const char *at = r.text, *end = r.text ? r.text + r.size : NULL, *from, *to;
        while (dray__s3_element(&at, end, "Part", &from, &to)) {
            char number[16] = "", size[24] = "", etag[80] = "";
            const char *in = from;
            dray__s3_tag(&in, to, "PartNumber", number, sizeof number);
            in = from;
            dray__s3_tag(&in, to, "ETag", etag, sizeof etag);
            in = from;
            dray__s3_tag(&in, to, "Size", size, sizeof size);
            unsigned long which = strtoul(number, NULL, 10);
            if (which == 0 || which > u->parts)
                continue;
            u->part[which - 1].bytes = strtoull(size, NULL, 10);
            snprintf(u->part[which - 1].etag, sizeof u->part[0].etag, "%s", etag);
        }
        char cut[8] = "", next[16] = "";
        at = r.text;
        dray__s3_tag(&at, end, "IsTruncated", cut, sizeof cut);
        at = r.text;
        dray__s3_tag(&at, end, "NextPartNumberMarker", next, sizeof next);
        more = strcmp(cut, "true") == 0 && next[0] && strcmp(next, marker) != 0;
        memcpy(marker, next, sizeof marker);
        free(r.text);
    }
    return rc;
}

/* ---- parts ----------------------------------------------------------------------------------- */

/* Returns whether the server's part has these bytes, by its ETag. */
static bool is_part(const sent_part *p, const void *data, uint64_t bytes)
{
    unsigned char sum[EVP_MAX_MD_SIZE];
    unsigned size = 0;
    char digits[2 * EVP_MAX_MD_SIZE + 1] = "";
    if (!p->etag[0] || p->bytes != bytes ||
        !EVP_Digest(data, (size_t)bytes, sum, &size, EVP_md5(), NULL))
        return false;
    for (unsigned i = 0; i < size; i++)
        snprintf(digits + 2 * (size_t)i, 3, "%02x", sum[i]);
    const char *at = p->etag + (p->etag[0] == '"');
    return strncmp(at, digits, strlen(digits)) == 0 &&
           (at[strlen(digits)] == 0 || at[strlen(digits)] == '"');
}

static int read_part(upload *u, uint32_t index, uint8_t *data, uint64_t *bytes, dray_error *error)
{
    uint64_t at = index * u->part_bytes;
    *bytes = u->bytes - at < u->part_bytes ? u->bytes - at : u->part_bytes;
    if (dray__read_at(u->fd, data, (size_t)*bytes, (off_t)at))
        return dray__fail_errno(error, errno, "%.300s", u->path);
    for (uint64_t b = 0; b < *bytes; b += DRAY__S3_BLOCK) {
        uint64_t left = *bytes - b;
        u->sums[(at + b) / DRAY__S3_BLOCK] =
            dray__hash(data + b, (size_t)(left < DRAY__S3_BLOCK ? left : DRAY__S3_BLOCK));
    }
    return DRAY_OK;
}

static int send_part(upload *u, uint32_t index, uint8_t *data, dray_error *error)
{
    uint64_t bytes;
    char number[16];
    sent_part *p = &u->part[index];
    int rc = read_part(u, index, data, &bytes, error);
    if (rc || is_part(p, data, bytes))
        return rc;
    number_text(index + 1, number);
    dray__s3_request r = {.method = "PUT",
                          .place = u->place,
                          .query = {{"partNumber", number}, {"uploadId", u->id}},
                          .body = data,
                          .body_bytes = (size_t)bytes,
                          .type = "application/octet-stream"};
    rc = dray__s3_do(&r, error);
    free(r.text);
    if (!rc && (!r.answer_etag[0] || strlen(r.answer_etag) >= sizeof p->etag))
        rc = dray__fail(error, DRAY_EPROTO,
                        "s3://%s/%.200s: part %s: expected an answer with an ETag",
                        u->place->bucket, u->place->key, number);
    if (!rc)
        strcpy(p->etag, r.answer_etag);
    return rc;
}

static void *write_parts(void *user)
{
    upload *u = user;
    dray_error error = {0};
    uint8_t *data = malloc((size_t)u->part_bytes);
    int rc = data ? DRAY_OK : dray__nomem(&error);
    for (;;) {
        pthread_mutex_lock(&u->lock);
        if (rc && !u->rc) {
            u->rc = rc;
            u->why = error;
        }
        uint32_t index = u->rc ? u->parts : u->next;
        u->next += index < u->parts;
        pthread_mutex_unlock(&u->lock);
        if (index == u->parts)
            break;
        rc = send_part(u, index, data, &error);
    }
    free(data);
    return NULL;
}

static int begin_upload(upload *u, dray_error *error)
{
    dray__s3_request r = {.method = "POST",
                          .place = u->place,
                          .query = {{"uploads", ""}},
                          .type = "application/octet-stream"};
    int rc = each_pending(u->place, remember_pending, u, error);
    if (rc || u->id[0])
        return rc ? rc : list_parts(u, error);
    rc = dray__s3_do(&r, error);
    const char *at = r.text;
    if (!rc && (!r.text || !dray__s3_tag(&at, r.text + r.size, "UploadId", u->id, sizeof u->id)))
        rc = dray__fail(error, DRAY_EPROTO, "s3://%s/%.200s: expected an UploadId in the answer",
                        u->place->bucket, u->place->key);
    free(r.text);
    return rc;
}

/* Completes the upload. The answer may have an error although its status is a success:
 * https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html */
static int complete_upload(const upload *u, dray_error *error)
{
    size_t room = 64 + (size_t)u->parts * 160, n = 0;
    char *text = malloc(room);
    if (!text)
        return dray__nomem(error);
    n += (size_t)snprintf(text, room, "<CompleteMultipartUpload>");
    for (uint32_t i = 0; i < u->parts; i++) {
        bool quoted = u->part[i].etag[0] == '"';
        n +=
            (size_t)snprintf(text + n, room - n,
                             "<Part><PartNumber>%" PRIu32 "</PartNumber><ETag>%s%s%s</ETag></Part>",
                             i + 1, quoted ? "" : "\"", u->part[i].etag, quoted ? "" : "\"");
    }
    n += (size_t)snprintf(text + n, room - n, "</CompleteMultipartUpload>");
    dray__s3_request r = {.method = "POST",
                          .place = u->place,
                          .query = {{"uploadId", u->id}},
                          .body = text,
                          .body_bytes = n,
                          .type = "application/xml",
                          .says = "CompleteMultipartUploadResult"};
    int rc = dray__s3_do(&r, error);
    free(r.text);
    free(text);
    /* An earlier attempt may have completed it, if its answer was lost. */
    if (rc == DRAY_ENOENT) {
        r = (dray__s3_request){.method = "HEAD", .place = u->place};
        rc = dray__s3_do(&r, error);
        free(r.text);
        if (!rc && r.length != u->bytes)
            rc = dray__fail(error, DRAY_EPROTO,
                            "s3://%s/%.200s: expected %" PRIu64 " bytes, found %" PRIu64,
                            u->place->bucket, u->place->key, u->bytes, r.length);
    }
    return rc;
}

static int upload_parts(upload *u, dray_error *error)
{
    dray__thread threads[WRITERS] = {0};
    int rc = begin_upload(u, error);
    for (unsigned i = 0; i < WRITERS && !rc && i < u->parts; i++)
        rc = dray__thread_start(&threads[i], write_parts, u, "an upload", error);
    if (rc && threads[0].begun) /* one thread is enough */
        rc = DRAY_OK;
    for (unsigned i = 0; i < WRITERS; i++)
        dray__thread_join(&threads[i]);
    if (!rc && u->rc) {
        rc = u->rc;
        if (error)
            *error = u->why;
    }
    return rc ? rc : complete_upload(u, error);
}

static int upload_whole(upload *u, dray_error *error)
{
    uint64_t bytes;
    uint8_t *data = malloc((size_t)u->bytes + 1);
    int rc = data ? read_part(u, 0, data, &bytes, error) : dray__nomem(error);
    if (!rc)
        rc = dray__s3_put(u->place, data, (size_t)bytes, "application/octet-stream", error);
    free(data);
    return rc;
}

int dray__s3_upload(const char *path, const dray__s3_place *place, const char *name,
                    json_t *objects, dray_error *error)
{
    upload u = {.place = place, .path = path, .part_bytes = PART_BYTES};
    struct stat st;
    u.fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (u.fd < 0 || fstat(u.fd, &st)) {
        int rc = dray__fail_errno(error, errno, "%.300s", path);
        if (u.fd >= 0)
            close(u.fd);
        return rc;
    }
    u.bytes = (uint64_t)st.st_size;
    while (u.bytes / u.part_bytes >= MOST_PARTS)
        u.part_bytes *= 2;
    u.parts = (uint32_t)((u.bytes + u.part_bytes - 1) / u.part_bytes);
    u.part = calloc((size_t)u.parts + 1, sizeof *u.part);
    u.sums = calloc((size_t)(u.bytes / DRAY__S3_BLOCK) + 1, sizeof *u.sums);
    pthread_mutex_init(&u.lock, NULL);
    int rc = u.part && u.sums ? DRAY_OK : dray__nomem(error);
    if (!rc)
        rc = u.parts > 1 ? upload_parts(&u, error) : upload_whole(&u, error);
    if (!rc)
        rc = dray__s3_manifest_add(objects, name, u.bytes, u.sums, error);
    pthread_mutex_destroy(&u.lock);
    close(u.fd);
    free(u.part);
    free(u.sums);
    return rc;
}
