/* src/mover/: copies between two regions of any kinds (mover.c), with a file for files (file.c) and
 * one for GPU memory (cuda_tile.c), and reads and writes of ranges of files in the background
 * (disk.c). The folders within it have the inner loops for CPUs (kernels/) and jobs of
 * GPUs (cuda/). fault.c breaks copies on purpose, for tests. */

/* Movers carry out the copies of a plan between two live regions. */
#pragma once

#include "mover/kernels/checksum.h"

#include <dray/memory.h>
#include <dray/plan.h>
#include <stdbool.h>

typedef struct dray__move dray__move;

typedef struct dray__move_options {
    /* The checksum (mover/kernels/checksum.h) of the bits that copies[i] writes is added to
     * sums[i], that of its source's bits to source_sums[i]. Both are computed in the pass that
     * moves the data; to verify the destination the caller reads it back. NULL when not wanted.
     * The caller zeroes them. */
    uint64_t *sums, *source_sums;
    /* The destination's layout. dray_copy.tensor is an index into its tensors, whose global shapes
     * enter the checksums. May be NULL without sums. */
    const dray_layout *layout;
    /* Scratch for files and conversions. When NULL, DRAY__MOVE_STAGING bytes are allocated when
     * needed. */
    void *staging;
    size_t staging_bytes; /* at least DRAY__MOVE_STAGING_MIN when staging is given */
} dray__move_options;

#define DRAY__MOVE_STAGING ((size_t)1 << 20)
#define DRAY__MOVE_STAGING_MIN ((size_t)64 << 10)

/* Carries out copies from `source` to `destination`; the region numbers in the copies are ignored.
 * options may be NULL. Nothing is moved before every rectangle is checked against the regions:
 * DRAY_EINVALID (outside its region, or its dtype has no size), DRAY_EDTYPE (no conversion),
 * DRAY_EPERM (the destination is read-only), DRAY_EUNSUPPORTED (no mover for this pair of kinds).
 * After DRAY_ESYS (reading or writing a file) and DRAY_EFORMAT (a file ended early) some of the
 * data is moved. */
int dray__move_all(const dray_region *source, dray_region *destination, const dray_copy *copies,
                   uint64_t count, const dray__move_options *options, dray_error *error);

/* Computes the checksums of rectangles in a region of host or GPU memory. of.data is ignored: the
 * first element is at `offset`. A GPU sums many in one launch. */
int dray__sum_region(const dray_region *region, const dray__sum_part *parts, uint32_t count,
                     uint64_t *sums, dray_error *error);

/* ---- fault.c: a mover with faults, for tests --------------------------------------------- */
typedef enum dray__fault {
    DRAY__FAULT_NONE = 0,
    DRAY__FAULT_FAIL,    /* DRAY_ESYS */
    DRAY__FAULT_DROP,    /* the piece is not written; its sums are as if it were */
    DRAY__FAULT_FLIP,    /* one bit of the written bytes changes */
    DRAY__FAULT_SHIFT,   /* written one element beside its place */
    DRAY__FAULT_MISREAD, /* read one element beside its place */
    DRAY__FAULT_COUNT
} dray__fault;

/* Called for every tile that is moved. tensor is its tensor's name, or NULL when the move has no
 * layout. fn is NULL for no faults. Set before threads start. */
typedef dray__fault (*dray__fault_fn)(void *user, const char *tensor);
void dray__mover_faults(dray__fault_fn fn, void *user);

/* For a copy that transposes (the dense dimension of the destination is not that of the source):
 * gives the extents of tiles of at most `elements` elements that are fast to move. Returns false
 * for copies that do not transpose. */
bool dray__copy_turn_tile(const dray_copy *copy, uint64_t elements, int64_t *tile);
