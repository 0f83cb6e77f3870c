/* checkpoint.h - writes and reads checkpoints in Hugging Face's form, and keeps the checkpoints of
 * a run in a folder, or in a bucket of an object store. Regions must be memory. Since 0.1.
 *
 * Where a path is read, and where dray_checkpoint_save writes, "s3://BUCKET/PREFIX" is a folder,
 * too: of the server and with the keys that the environment names (AWS_ENDPOINT_URL, AWS_REGION,
 * AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN), through libcurl. Then functions
 * return DRAY_EUNSUPPORTED: libcurl is not there; DRAY_EPERM: there are no keys, or the server
 * refused them; DRAY_EINVALID: there is no such bucket, or no server is named; DRAY_ENOENT: no such
 * object; DRAY_ECHECKSUM: the bytes are not those that were written; DRAY_ESTALE: an object was
 * replaced while it was read; DRAY_ESYS: the server failed several times. docs/objects.md. */
#ifndef DRAY_CHECKPOINT_H
#define DRAY_CHECKPOINT_H

#include <dray/memory.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Writes the blocks of a layout, which must hold all of the model, as a Hugging Face checkpoint:
 * safetensors files that are fsynced and renamed, the index last. config_json: written as
 * config.json; may be NULL. The metadata of each file has the checksums of its tensors
 * ("dray.sums"), by which updates from disk and dray_checksums_of_checkpoint find changed files.
 * DRAY_EHOLE: an element is in no block. DRAY_ESYS. Blocks for the disk. */
int dray_checkpoint_write(const char *directory, const dray_layout *layout,
                          dray_region *const *regions, const char *config_json, dray_error *error);
/* Reads the ranges of a checkpoint that the layout's blocks need into them. Tensors that the layout
 * holds as a whole are compared with the checksums in their files. DRAY_ECHECKSUM: tensors differ;
 * the message names them. DRAY_EHOLE, DRAY_ESHAPE, DRAY_EDTYPE: the checkpoint cannot fill the
 * layout. Blocks for the disk. */
int dray_checkpoint_read(const char *directory, const dray_layout *layout,
                         dray_region *const *regions, dray_error *error);

/* Builds the layout of a checkpoint as dray_layout_safetensors does, also of a checkpoint that is
 * stored as a delta: its regions are then the files of the base, whose bytes are those before the
 * changes; the functions of this header read them with the changes. *base (may be NULL) gets the
 * base's folder, freed with dray_free, or NULL for a whole checkpoint. DRAY_ENOENT, DRAY_ECHECKSUM:
 * the base is missing or is another one; the message names it. */
int dray_checkpoint_layout(const char *path, dray_layout **out, char **base, dray_error *error);

/* ---- a run's checkpoints ------------------------------------------------------------------------
 *
 * Each version is a folder directory/step-000007/, and directory/latest is a link to the newest. A
 * folder gets its name only when it is complete and on the disk. The next writer removes the files
 * of one that died. */

/* More tensors of a checkpoint, such as the state of an optimizer. They are a checkpoint in a
 * folder of the checkpoint's folder, which is always whole. */
typedef struct dray_checkpoint_part {
    const char *name; /* the folder's name: 1 to 63 bytes without '/', the same on all ranks */
    const dray_layout *layout;
    dray_region *const *regions;
} dray_checkpoint_part;

/* One more file of a checkpoint. */
typedef struct dray_checkpoint_file {
    const char *name; /* 1 to 63 bytes without '/' */
    const void *data;
    size_t bytes;
} dray_checkpoint_file;

typedef struct dray_checkpoint_options {
    size_t size;
    uint64_t version;        /* the folder's number; a folder that exists is replaced */
    uint32_t keep;           /* how many of the newest versions stay; 0 means all */
    uint32_t rank, world;    /* of the ranks that write one checkpoint together; world 0: 1 */
    const char *name;        /* name of the barrier at which the ranks wait; NULL means
                              * "checkpoint" */
    const char *config_json; /* of rank 0, written as config.json; may be NULL */
    int64_t timeout_ns;      /* how long to wait for the other ranks at each step; 0 means the
                              * context's */
    /* How many versions in a row are stored as deltas on the version before them, then the next is
     * whole; 0: all are whole; at most 64. Versions that a delta needs are kept. The ranks write
     * the whole version, and then wait while rank 0 compares it with the one before. */
    uint32_t deltas;
    /* More tensors and files of the checkpoint. Borrowed for the call. Files are those of rank 0,
     * such as the cursor of a queue (dray_queue_cursor). */
    const dray_checkpoint_part *parts;
    const dray_checkpoint_file *files;
    uint32_t part_count, file_count;
    const uint64_t *stay; /* versions that are kept in addition to the newest */
    uint32_t stay_count;
} dray_checkpoint_options;

#define DRAY_CHECKPOINT_OPTIONS_INIT                                                               \
    {                                                                                              \
        sizeof(dray_checkpoint_options), 0, 0, 0, 0, NULL, NULL, 0, 0, NULL, NULL, 0, 0, NULL, 0   \
    }

/* Checks that checkpoints can be kept in a store ("s3"). detail gets a text of at most `size` bytes
 * that describes the store's library, such as "libcurl/7.88.1 OpenSSL/3.0.19". DRAY_EUNSUPPORTED:
 * they cannot; the message says what to do. DRAY_EINVALID: the name is another one. Threads: any.
 * Does not block. */
int dray_store_find(const char *store, char *detail, size_t size, dray_error *error);

/* Writes a version. Each rank writes blocks that it holds; a block that several ranks hold is
 * written by one. The version's folder gets its name when all ranks have finished. `directory` must
 * be on a file system that all ranks share, or "s3://BUCKET/PREFIX": then $DRAY_CACHE must be, in
 * which the version is written first, and rank 0 uploads it. context: the ranks wait for each other
 * through it; NULL where world is 1. DRAY_EHOLE: an element is in no rank's blocks. DRAY_EINVALID:
 * a name of a part or file is malformed, is given twice, or is one of the model's. DRAY_EBUSY:
 * another process writes in `directory`. DRAY_ECANCELED: another rank failed; the message names it.
 * DRAY_EDEAD, DRAY_ETIMEDOUT: a rank died or did not come. DRAY_ESYS: the message names the file
 * and the tensor. Threads: one version of a folder at a time. Blocks for the disk and the other
 * ranks. */
int dray_checkpoint_save(dray_context *context, const char *directory, const dray_layout *layout,
                         dray_region *const *regions, const dray_checkpoint_options *options,
                         dray_error *error);
/* Finds the folder of the newest version. *path is the resolved path, freed with dray_free. All
 * files that are read through it are of one version, even if a newer one is written meanwhile.
 * version may be NULL. DRAY_ENOENT: there is no checkpoint. */
int dray_checkpoint_latest(const char *directory, uint64_t *version, char **path,
                           dray_error *error);

/* Reads one file of a checkpoint, such as one that the options of dray_checkpoint_save named. *data
 * is freed with dray_free. DRAY_ENOENT, DRAY_ESYS. Blocks for the disk or the server. */
int dray_checkpoint_get(const char *path, const char *file, void **data, size_t *bytes,
                        dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
