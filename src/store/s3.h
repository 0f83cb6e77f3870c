/* The declarations that the files of the store S3 share: places in buckets, requests, the objects
 * of a version. */
#pragma once

#include "store/store.h"

#include <jansson.h>

/* A version's folder in a bucket:
 *
 *   PREFIX/step-000007/objects.json     the list of its objects, put last, which makes it whole.
 *                                       JSON {version 1, block, objects: {name: {bytes, sums}}}, a
 *                                       newline, 16 hexadecimal digits (XXH3 of the JSON), a
 *                                       newline. sums: XXH3 of each block's bytes
 *   PREFIX/step-000007/.partial         there while a version is written, or removed
 *   PREFIX/step-000007/model...         its files, as in a folder
 *   PREFIX/latest                       "step-000007 ", 16 digits (XXH3 of the name), a newline
 *
 * No object of a version is ever written again under its name. A folder without objects.json that
 * is not partial is another program's; its blocks are read of one ETag, and without sums. */
#define DRAY__S3_MANIFEST "objects.json"
#define DRAY__S3_PARTIAL ".partial"
enum { DRAY__S3_BLOCK = 4 << 20, DRAY__S3_TEXT_MAX = 256 << 20 };

/* "s3://bucket/a/key": slashes that are doubled or at the end are left out. */
typedef struct dray__s3_place {
    char bucket[64], key[1200];
} dray__s3_place;

int dray__s3_parse(const char *path, dray__s3_place *out, dray_error *error);
/* Makes the key, "/" and a name behind it. Returns 0, or DRAY_EINVALID when it is too long. */
int dray__s3_beneath(const dray__s3_place *place, const char *name, dray__s3_place *out,
                     dray_error *error);

/* ---- s3_request.c */

enum { DRAY__S3_QUERIES = 6 };

typedef struct dray__s3_request {
    const char *method;
    const dray__s3_place *place;
    /* name, value; by name, as they are signed; a name of NULL ends them */
    const char *query[DRAY__S3_QUERIES][2];
    const void *body; /* NULL when there is none */
    size_t body_bytes;
    const char *type;        /* of the body */
    const char *etag;        /* the object must be this one; NULL means any */
    uint64_t from, range;    /* so many bytes from there; range 0: all of it */
    void *into;              /* where a range goes, all of it */
    const atomic_bool *stop; /* may be NULL */
    /* the answer */
    char *text; /* the answer when `into` is NULL, with a 0 behind it; to be freed with free */
    size_t size;
    uint64_t length; /* of the object: Content-Length */
    char answer_etag[128];
} dray__s3_request;

/* Sends the request until there is an answer. After a failure that may pass (no connection, 429,
 * 500 to 504, an answer that breaks off) it is sent again, a few times. Every message names the
 * object. Returns 0, DRAY_ENOENT when there is no such object, DRAY_EINVALID when there is no such
 * bucket, or the environment does not name the server, DRAY_EPERM when the server refused the keys,
 * DRAY_ESTALE when the object is not `etag` any more, DRAY_ECANCELED on stop, or DRAY_ESYS for all
 * else. */
int dray__s3_do(dray__s3_request *request, dray_error *error);
/* The text between <tag> and </tag> that comes first from *at on, before `end`; *at goes behind it.
 * false: there is none, or no room for it. Entities are decoded. */
bool dray__s3_tag(const char **at, const char *end, const char *tag, char *out, size_t room);
/* The same, of elements that have others inside: where they begin and end. */
bool dray__s3_element(const char **at, const char *end, const char *tag, const char **from,
                      const char **to);

/* ---- s3_objects.c: listing and removing */

typedef struct dray__s3_listed {
    const char *key; /* without the prefix */
    struct timespec made;
} dray__s3_listed;
typedef int (*dray__s3_list_fn)(void *user, const dray__s3_listed *listed, dray_error *error);
/* Each object beneath a place. flat: those of its folder alone. */
int dray__s3_list(const dray__s3_place *folder, bool flat, dray__s3_list_fn fn, void *user,
                  dray_error *error);
int dray__s3_get(const dray__s3_place *place, char **text, size_t *size, dray_error *error);
int dray__s3_put(const dray__s3_place *place, const void *data, size_t size, const char *type,
                 dray_error *error);
int dray__s3_delete(const dray__s3_place *place, dray_error *error);
bool dray__s3_has(const dray__s3_place *place, int *rc, dray_error *error);

/* ---- s3_manifest.c: the objects of a version, by its manifest */

typedef struct dray__s3_manifest {
    json_t *json;
    uint64_t sum;  /* of its text */
    uint32_t uses; /* under s3_manifest.c's lock */
} dray__s3_manifest;

/* Finds the version of a path, and the name in it. Returns false when the path is in none. */
bool dray__s3_step_of(const dray__s3_place *place, dray__s3_place *step, const char **name);
/* Fetches the manifest once for the process, and keeps it until it is forgotten. *out is NULL when
 * the version is another program's. Returns 0, or DRAY_ENOENT when the version is not whole. */
int dray__s3_manifest_get(const dray__s3_place *step, dray__s3_manifest **out, dray_error *error);
void dray__s3_manifest_put(dray__s3_manifest *manifest); /* NULL is fine */
/* Call it when an object was missing or wrong, or when the version is written: the manifest is then
 * fetched anew the next time. */
void dray__s3_manifest_forget(const dray__s3_place *step);
/* Adds a file's object. sums: of its blocks. */
int dray__s3_manifest_add(json_t *objects, const char *name, uint64_t bytes, const uint64_t *sums,
                          dray_error *error);
int dray__s3_manifest_write(const dray__s3_place *step, json_t *objects, dray_error *error);

/* ---- s3_upload.c */

/* Writes a file of this machine, in parts where it is large; parts that an earlier try left are
 * taken over where they are the same bytes. Adds it to `objects` under `name`. */
int dray__s3_upload(const char *path, const dray__s3_place *place, const char *name,
                    json_t *objects, dray_error *error);
/* Ends uploads beneath `folder` that nobody finishes: all but those beneath `step`. */
int dray__s3_upload_clear(const dray__s3_place *folder, const char *step, dray_error *error);
