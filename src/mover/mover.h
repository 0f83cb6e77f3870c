/* Movers carry out the copies of a plan between two live regions, in slices.
 *
 * A move is opened for one pair of regions, stepped until it is done, and closed. Its cursor stops
 * and resumes within a rectangle, so that a step is as short as its caller wants.
 *
 *     dray__move *move;
 *     rc = dray__move_open(source, destination, copies, count, &options, &move, error);
 *     while ((rc = dray__move_step(move, 4 << 20, error)) == DRAY_EAGAIN) ... ;
 *     dray__move_close(move);
 */
#ifndef DRAY_MOVER_MOVER_H
#define DRAY_MOVER_MOVER_H

#include <dray/memory.h>
#include <dray/plan.h>
#include <stdbool.h>

typedef struct dray__move dray__move;

typedef struct dray__move_options {
    /* sums[i] += the checksum (mover/checksum.h) of the bits that copies[i] writes, source_sums[i]
     * += that of its source's bits, taken in the pass that moves them. What then lies at the
     * destination is for the caller to read back. NULL: not wanted. The caller zeroes them. */
    uint64_t *sums, *source_sums;
    /* The destination's layout, whose tensors dray_copy.tensor counts: their global shapes are part
     * of a checksum. Borrowed until close; may be NULL without sums. */
    const dray_layout *layout;
    /* Scratch for files and conversions, borrowed until close. NULL: allocated when it is needed,
     * DRAY__MOVE_STAGING bytes. */
    void *staging;
    size_t staging_bytes; /* at least DRAY__MOVE_STAGING_MIN when staging is given */
} dray__move_options;

#define DRAY__MOVE_STAGING ((size_t)1 << 20)
#define DRAY__MOVE_STAGING_MIN ((size_t)64 << 10)

/* copies and both regions are borrowed until close; copies may name other regions: the caller says
 * which pair they are for. options may be NULL. Every rectangle is checked against the live
 * regions: DRAY_EINVALID (outside its region, or its dtype has no size), DRAY_EDTYPE (no
 * conversion), DRAY_EPERM (the destination is read-only), DRAY_EUNSUPPORTED (no mover for this pair
 * of kinds). */
int dray__move_open(const dray_region *source, dray_region *destination, const dray_copy *copies,
                    uint64_t count, const dray__move_options *options, dray__move **out,
                    dray_error *error);
/* Moves about `bytes` destination bytes (at least one tile: up to 256 KiB of memory, 1 MiB of
 * file). DRAY_OK: all is moved. DRAY_EAGAIN: call again; *error is not touched. DRAY_ESYS (reading
 * or writing a file), DRAY_EFORMAT (a file ended early): the move stays where it was. Does not wait
 * but for the file system. */
int dray__move_step(dray__move *move, uint64_t bytes, dray_error *error);
/* Destination bytes moved so far. */
uint64_t dray__move_done(const dray__move *move);
void dray__move_close(dray__move *move); /* NULL is fine */

/* Open, step to the end, close. */
int dray__move_all(const dray_region *source, dray_region *destination, const dray_copy *copies,
                   uint64_t count, const dray__move_options *options, dray_error *error);

/* ---- fault.c: a mover that does wrong, for tests --------------------------------------------- */
typedef enum dray__fault {
    DRAY__FAULT_NONE = 0,
    DRAY__FAULT_FAIL,    /* DRAY_ESYS */
    DRAY__FAULT_DROP,    /* the piece is not written; its sums are as if it were */
    DRAY__FAULT_FLIP,    /* one bit of what was written changes */
    DRAY__FAULT_SHIFT,   /* written one element beside its place */
    DRAY__FAULT_MISREAD, /* read one element beside its place */
    DRAY__FAULT_COUNT
} dray__fault;

/* Asked for every piece that is moved; tensor: its name, where the move knows the layout. NULL:
 * none. Set before threads start. */
typedef dray__fault (*dray__fault_fn)(void *user, const char *tensor);
void dray__mover_faults(dray__fault_fn fn, void *user);

/* For a copy whose destination is turned over (another dimension is the dense one): sizes of tiles
 * of at most `elements` that are moved well. False: any will do. */
bool dray__copy_turn_tile(const dray_copy *copy, uint64_t elements, int64_t *tile);

/* "local", "shared", "file": the mover of a pair of kinds; NULL: there is none. Static storage. */
const char *dray__mover_name(dray_region_kind source, dray_region_kind destination);

#endif
