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
 *   PREFIX/latest                       "step-000007 ", 16 digits (XXH3 of the name), " 9 2" (the
 *                                       highest version and repetition of all names ever given),
 *                                       a space, 16 digits (XXH3 of the text before that space), a
 *                                       newline
 *
 * An object of a version is never overwritten. A folder without objects.json that is not partial is
 * another program's; all blocks of its objects are read from one ETag, without sums. */
#define DRAY__S3_MANIFEST "objects.json"
#define DRAY__S3_PARTIAL ".partial"
enum { DRAY__S3_BLOCK = 4 << 20, DRAY__S3_TEXT_MAX = 256 << 20 };

/* "s3://bucket/a/key", without double slashes and slashes at the end. */
typedef struct dray__s3_place {
    char bucket[64], key[1200];
    uint64_t server; /* that the environment names, by dray__s3_server */
} dray__s3_place;

int dray__s3_parse(const char *path, dray__s3_place *out, dray_error *error);
/* Makes the place with the key, "/" and the name. Returns 0, or DRAY_EINVALID when it is too
 * long. */
int dray__s3_beneath(const dray__s3_place *place, const char *name, dray__s3_place *out,
                     dray_error *error);

/* ---- s3_request.c */

enum { DRAY__S3_QUERIES = 6 };

typedef struct dray__s3_request {
    const char *method;
    const dray__s3_place *place;
    /* name and value, sorted by name as they are signed; ended by a NULL name */
    const char *query[DRAY__S3_QUERIES][2];
    const void *body; /* NULL when there is none */
    size_t body_bytes;
    const char *type;        /* of the body */
    const char *etag;        /* the object must be this one; NULL means any */
    const char *says;        /* text that the answer of a success has; NULL means any answer */
    uint64_t from, range;    /* `range` bytes from offset `from`; range 0 for all */
    void *into;              /* destination of a range */
    const atomic_bool *stop; /* may be NULL */
    /* the answer */
    char *text; /* the answer when `into` is NULL, ended by a 0; freed with free */
    size_t size;
    uint64_t length; /* of the object: Content-Length */
    char answer_etag[128];
} dray__s3_request;

/* Sends the request until there is an answer. After a failure that may be temporary (no connection,
 * 429, 500 to 504, an incomplete answer, a success without the text `says`) it is sent again, a few
 * times. Every message names the object. Returns 0, DRAY_ENOENT when there is no such object,
 * DRAY_EINVALID when there is no such bucket or the environment does not name the server,
 * DRAY_EPERM when the server refused the keys, DRAY_ESTALE when the object is not `etag` any more,
 * DRAY_ECANCELED on stop, DRAY_ETIMEDOUT at the thread's deadline (store/deadline.h), or DRAY_ESYS
 * for other failures. */
int dray__s3_do(dray__s3_request *request, dray_error *error);
/* Returns a number that tells the servers apart whose buckets may have the same names. */
uint64_t dray__s3_server(void);
/* Gets the first text between <tag> and </tag> from *at on, before `end`, with entities decoded,
 * and moves *at past it. Returns false when there is none, or no room for it. */
bool dray__s3_tag(const char **at, const char *end, const char *tag, char *out, size_t room);
/* The same for elements that contain others: gets where the content begins and ends. */
bool dray__s3_element(const char **at, const char *end, const char *tag, const char **from,
                      const char **to);

/* ---- s3_objects.c: listing and removing */

typedef struct dray__s3_listed {
    const char *key; /* without the prefix */
    struct timespec made;
} dray__s3_listed;
typedef int (*dray__s3_list_fn)(void *user, const dray__s3_listed *listed, dray_error *error);
/* Lists each object below a place; with `flat`, only those directly in the folder. */
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
 * the version is another program's. Returns 0, or DRAY_ENOENT when the version is not complete. */
int dray__s3_manifest_get(const dray__s3_place *step, dray__s3_manifest **out, dray_error *error);
void dray__s3_manifest_put(dray__s3_manifest *manifest); /* NULL is fine */
/* Call it when an object was missing or wrong, or when the version is written: the next
 * dray__s3_manifest_get then fetches the manifest again. */
void dray__s3_manifest_forget(const dray__s3_place *step);
/* Adds a file's object. sums are those of its blocks. */
int dray__s3_manifest_add(json_t *objects, const char *name, uint64_t bytes, const uint64_t *sums,
                          dray_error *error);
int dray__s3_manifest_write(const dray__s3_place *step, json_t *objects, dray_error *error);

/* ---- s3_upload.c */

/* Uploads a file of this machine, in parts if it is large. Parts of an earlier try are kept if
 * their bytes are the same. Adds the file to `objects` under `name`. */
int dray__s3_upload(const char *path, const dray__s3_place *place, const char *name,
                    json_t *objects, dray_error *error);
/* Aborts unfinished uploads below `folder`, except those below `step`. */
int dray__s3_upload_clear(const dray__s3_place *folder, const char *step, dray_error *error);
