/* src/store/: the places where checkpoints are stored: folders of this machine (files.c), or a
 * bucket of an object store (s3.c and s3_*.c, over libcurl, curl.c). Readers of checkpoints open
 * and list them through a store's table, and writers place a finished folder in one. A store is one
 * file with one table, and a line in the list of store.c. blocks.c keeps fetched blocks. */
#pragma once

#include <dray/dray.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

typedef struct dray__store dray__store;

/* A file of a store, open for reading. */
typedef struct dray__store_file {
    const dray__store *store;
    const char *name; /* the caller's path */
    int fd;           /* for a file of this machine; else -1 */
    void *object;     /* state of another store */
    uint64_t bytes;
} dray__store_file;

/* A complete version in a run's folder. */
typedef struct dray__store_step {
    char name[64];
    struct timespec made;
} dray__store_step;

/* The highest version and the highest repetition among the names that a run's folder ever gave to
 * steps, removed ones too. `again` is 0 when they are not known. */
typedef struct dray__store_given {
    uint64_t version;
    unsigned again;
} dray__store_given;

typedef void (*dray__store_name_fn)(void *user, const char *name);

struct dray__store {
    const char *scheme; /* the beginning of its paths; "" for all others */
    /* Returns 0, or DRAY_ENOENT when it does not exist. */
    int (*open)(const char *path, dray__store_file *out, dray_error *error);
    /* Reads all of the bytes, which must be in the file. When stop (may be NULL) becomes true, a
     * wait for a server ends. Any thread may call it. */
    int (*read)(const dray__store_file *file, void *data, uint64_t bytes, uint64_t at,
                const atomic_bool *stop, dray_error *error);
    void (*close)(dray__store_file *file);
    /* Lists each name in a folder. */
    int (*names)(const char *folder, dray__store_name_fn fn, void *user, dray_error *error);
    /* Writes the path without links to `out` of PATH_MAX bytes. Returns 0, or DRAY_ENOENT when
     * there is nothing. */
    int (*resolve)(const char *path, char *out, dray_error *error);
    /* ---- functions for a run's folder (checkpoint/save.c) */
    /* Writes to `out` of PATH_MAX bytes a folder of this machine in which versions are written
     * before they are placed, and makes it if it does not exist. For folders of this machine it is
     * the folder itself. */
    int (*stage)(const char *folder, char *out, dray_error *error);
    /* Lists the complete steps, in no order. With `clear`, the files of writers that died are
     * removed. The caller frees *out with free. */
    int (*steps)(const char *folder, bool clear, dray__store_step **out, size_t *count,
                 dray_error *error);
    /* Gives a finished folder of the stage its name, in one step. No reader finds any of it before
     * that. */
    int (*place)(const char *folder, const char *name, const char *finished, dray_error *error);
    /* `lead` makes `latest` point to the step. `led` writes the path of that step to `out` of
     * PATH_MAX bytes, and returns 0, or DRAY_ENOENT when there is none. */
    int (*lead)(const char *folder, const char *name, const dray__store_given *given,
                dray_error *error);
    int (*led)(const char *folder, char *out, dray_error *error);
    /* Removes a step, so that no reader finds half of it. A step that does not exist is fine. */
    int (*retire)(const char *folder, const char *name, dray_error *error);
    /* Gets what the last `lead` said of the names given. NULL for a store that may give the name of
     * a removed step again. */
    int (*given)(const char *folder, dray__store_given *out, dray_error *error);
};

extern const dray__store dray__store_files, dray__store_s3;

/* Returns the store of a path; never NULL. */
const dray__store *dray__store_of(const char *path);
static inline bool dray__store_is_local(const char *path)
{
    return dray__store_of(path) == &dray__store_files;
}
/* Reads a file of at most `most` bytes, and ends it with a 0. The caller frees *text with free.
 * Returns 0, DRAY_ENOENT, or DRAY_EFORMAT when it is larger. */
int dray__store_text(const char *path, size_t most, char **text, size_t *size, dray_error *error);

/* Returns whether the name is a step's, "step-000007" or "step-000007.2". Gets its version and the
 * repetition, which is 1 for the first one. */
bool dray__store_step_parse(const char *name, uint64_t *version, unsigned *again);
