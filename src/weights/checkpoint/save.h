/* src/weights/checkpoint/: weights in files. checkpoint.c and deposit.c write the blocks of a
 * layout into files and read them back; save.c writes one folder for each version of a run and
 * kept.c finds and removes such folders; overlay.c and overlay_write.c read and write
 * checkpoints that hold only the changes since an earlier one; manifest.c handles the sums that
 * files have of their own tensors, and prove.c compares an engine's memory with a checkpoint. */

/* The declarations that save.c (writing a checkpoint) and kept.c (the folders of earlier ones)
 * share. */
#pragma once

#include "control/channel.h"
#include "store/store.h"
#include "weights/checkpoint/deposit.h"

#include <dray/weights.h>
#include <limits.h>

enum {
    DRAY__SAVE_ROOM = 256
}; /* room for the names that these files append to the caller's folder */

/* Tensors that are written together: the model, or a part beside it. The name is that of its
 * folder. */
typedef struct dray__save_part {
    const char *name; /* of its folder; "" for the checkpoint's own */
    const dray_layout *layout;
    dray_region *const *regions;
    dray_layout **layouts; /* of all ranks */
    dray_layout *files;
    dray_plan *plan;
    dray__sums sums;
} dray__save_part;

typedef struct dray__save {
    dray_context *context;
    dray_checkpoint_options options;
    dray__save_part *parts; /* the model first */
    uint32_t part_count;
    const dray__store *store;
    char folder[PATH_MAX - DRAY__SAVE_ROOM]; /* DIR */
    char stage[PATH_MAX - DRAY__SAVE_ROOM];  /* local folder: versions are written there first */
    char partial[PATH_MAX];
    uint32_t number;      /* its number in a chain of deltas */
    char base[64];        /* rank 0: the step that this one is a delta on, or "" */
    int lock;             /* rank 0: on the stage */
    uint32_t meetings;    /* so far */
    dray__party_of party; /* the sessions of the ranks */
} dray__save;

/* ---- kept.c: for rank 0, which holds the lock. */
/* Removes the files of writers that died, and chooses the base of the new checkpoint if it is a
 * delta. */
int dray__save_clear(dray__save *s, dray_error *error);
/* Gives the complete folder its name, makes it the newest for readers, and removes checkpoints that
 * are not kept. */
int dray__save_publish(const dray__save *s, dray_error *error);
