/* src/weights/delta/: the changes between two versions of a publisher's blocks. delta.c finds the
 * elements that changed, lists them in a region of shared memory, and applies such a list;
 * delta_gpu.c does the same for blocks in GPU memory; entries.c has the codes of a list on the wire
 * and on disk; delta_wire.c encodes a list for the network. Checkpoints that are written as deltas
 * have another format, and are in weights/checkpoint/. */

/* A delta is the changes between two versions of a publisher's blocks, as a region. Readers that
 * hold the first version apply the delta instead of copying everything.
 *
 * Every block is cut into slices of at most DRAY__DELTA_SLICE elements (slices.c; both sides derive
 * the same ones from the layout). The region never leaves its host, and uses the host's byte order:
 *
 *     head     magic, base version, version, incarnation, number of slices, bytes used
 *     table    a slot for each slice, block by block: u64 offset of its entries, u32 number of
 *              entries, or DRAY__DELTA_FULL: too much changed, read the block itself
 *     entries  of each slice: u16 positions (flattened, C order within the slice, ascending) and,
 *              each from the next multiple of 8, the new values, and i8 steps from the old values
 *              (entries.h; 0 for more than 127). Readers on this host use the values; steps are
 *              needed for the codes that are sent to other hosts.
 *
 * For blocks in GPU memory, GPUs find and apply the changes, and the region is pinned
 * (delta_gpu.h).
 *
 * The publisher writes the region while it publishes, when no reader may use the version before.
 * Readers hold a lease on the version.
 */
#pragma once

#include "weights/delta/entries.h"
#include "weights/internal.h"

#define DRAY__DELTA_SLICE ((uint64_t)1 << 16)
#define DRAY__DELTA_FULL UINT32_MAX
/* GPUs list, and apply, at most one in so many elements of a slice. */
#define DRAY__DELTA_GPU_SPARSE 8

/* ---- the publisher's side -------------------------------------------------------------------- */
typedef struct dray__delta dray__delta;

/* Keeps a copy of the blocks' last published bits. dtype: the one in which floats are
 * compared and sent; NONE for the stored one. layout and regions are borrowed until free. Blocks in
 * files are always full. */
int dray__delta_new(const dray_layout *layout, dray_region *const *regions, int32_t dtype,
                    dray__delta **out, dray_error *error);
/* Finds the changes since the version published before (the first has no base), and keeps the bits
 * of this one. Reads all blocks. Returns DRAY_ETIMEDOUT when GPUs are not done by the deadline;
 * then the next delta has no base. */
int dray__delta_publish(dray__delta *delta, uint64_t incarnation, uint64_t version,
                        int64_t deadline_ns, dray_error *error);
/* The version that was given last was not announced, or that is not known: nobody may hold the bits
 * that were kept of it, so the next delta has no base. The delta at present stays, because readers
 * may use it if the version was announced. */
void dray__delta_forgo(dray__delta *delta);
dray_region *dray__delta_region(const dray__delta *delta); /* SHARED; borrowed */
void dray__delta_free(dray__delta *delta);                 /* NULL is fine */

/* The dtype in which a block's elements are compared and sent, and the block's slices. */
int32_t dray__delta_dtype(const dray_layout *layout, uint32_t block, int32_t dtype);
void dray__delta_cut(const dray_layout *layout, uint32_t block, dray__slicer *slicer);
uint64_t dray__delta_slices(const dray_layout *layout, uint32_t block);

/* ---- the reader's side ----------------------------------------------------------------------- */
typedef struct dray__delta_view dray__delta_view;

/* dray__delta_is returns true for a region with a delta. dray__delta_open borrows the publisher's
 * layout and the region until close. It fails with DRAY_EFORMAT when the region is not a delta, or
 * is one for another layout. */
bool dray__delta_is(const dray_region *region);
int dray__delta_open(const dray_layout *layout, const dray_region *region, dray__delta_view **out,
                     dray_error *error);
void dray__delta_close(dray__delta_view *view); /* NULL is fine */
/* The view of its delta that a source of shared memory keeps, and the function that frees it.
 * dray__delta_of returns NULL when it has none, or this process cannot map it. */
void dray__delta_forget(void *view);
static inline dray__delta_view *dray__delta_of(const dray__source *source)
{
    return dray__kept_find(source->kept, dray__delta_forget);
}
/* Returns true when the delta at present leads from `base` to `version`. */
bool dray__delta_leads(const dray__delta_view *view, uint64_t incarnation, uint64_t base,
                       uint64_t version);
/* Returns the offset of a block's first slot in the region. */
uint64_t dray__delta_slot(const dray__delta_view *view, uint32_t block);
/* Returns the dtype in which elements that are stored as `dtype` are sent. */
int32_t dray__delta_sent(const dray__delta_view *view, int32_t dtype);

typedef struct dray__delta_part {
    dray__rect slice, cross; /* the slice; its intersection with the rectangle */
    bool full;
    uint32_t count; /* entries of the slice */
    const uint16_t *positions;
    const uint8_t *values;
    const int8_t *steps;
    bool stepping; /* elements with a step other than 0 have no value; the step is applied */
} dray__delta_part;

/* Iterates over the slices of a block that overlap `rect`. */
typedef struct dray__delta_walk {
    const dray__delta_view *view; /* NULL for slices without a delta */
    dray__rect rect;
    dray__slicer slicer;
    uint32_t block;
    uint64_t next;
} dray__delta_walk;

void dray__delta_start(const dray__delta_view *view, uint32_t block, const dray__rect *rect,
                       dray__delta_walk *walk);
/* The same without a view: gives the intersection of `rect` with each slice. Returns false after
 * the last. */
void dray__delta_grid(const dray_layout *layout, uint32_t block, const dray__rect *rect,
                      dray__delta_walk *walk);
bool dray__delta_grid_next(dray__delta_walk *walk, dray__rect *out);
/* Returns DRAY_EEND after the last, DRAY_EFORMAT when entries are outside the region. */
int dray__delta_next(dray__delta_walk *walk, dray__delta_part *out, dray_error *error);

/* Writes the entries in part->cross to the destination of `copy`, which has the values' dtype. base
 * is the address of the destination's region. Adds the bytes read to *bytes. Returns DRAY_EFORMAT
 * when positions do not ascend or are outside the slice. */
int dray__delta_apply(const dray__delta_part *part, const dray_copy *copy, void *base,
                      uint64_t *bytes, dray_error *error);

/* Gives the slice that contains the rectangle. Returns false when it is in several slices. */
bool dray__delta_slice(const dray__delta_view *view, uint32_t block, const dray__rect *rect,
                       dray__delta_part *out);
/* Returns true when a block is sent in this dtype. */
bool dray__delta_sends(const dray__delta_view *view, uint32_t block, int32_t dtype);

/* ---- over a network (delta_wire.c): the entries in a rectangle of one slice, with
 * positions within the rectangle (entries.h):
 *
 *     u32 count  of entries; bit 31: a zstd frame follows the two numbers; bit 30: codes
 *     u32 gaps   bytes of the gaps
 *     gaps
 *     codes, to the end, or
 *     values     in planes: first the first byte of each, then the second of each, ...
 *
 * A coder holds the state of compression, and pauses compression where it does not pay. */
typedef struct dray__delta_coder dray__delta_coder;
dray__delta_coder *dray__delta_coder_new(void); /* NULL when out of memory */
void dray__delta_coder_free(dray__delta_coder *coder);
/* Returns the most memory that a decoding coder holds, for pieces of so many dense bytes. gpus: it
 * decodes into GPU memory. */
size_t dray__delta_coder_bytes(size_t piece, bool gpus);

/* Returns the bytes written to `out`. Returns 0 when it would be `limit` bytes or more, when the
 * rectangle is in several slices, or when the block is not sent in this dtype. */
size_t dray__delta_encode(dray__delta_coder *coder, const dray__delta_view *view, uint32_t block,
                          const dray__rect *rect, int32_t dtype, uint8_t *out, size_t limit);
/* The same for what changed between two dense arrays of at most DRAY__DELTA_SLICE elements, with
 * positions within the array. */
size_t dray__delta_encode_between(dray__delta_coder *coder, const void *was, const void *now,
                                  uint64_t count, int32_t dtype, uint8_t *out, size_t limit);
/* Takes the dense elements of a copy's rectangle, in its source's dtype, back to the version
 * before. Returns false when the delta does not say what they were: a slice is full, an element
 * moved by more than 127 steps, or the block is sent in another dtype. The elements are of no use
 * then. */
bool dray__delta_undo(const dray__delta_view *view, uint32_t block, const dray_copy *copy,
                      void *dense);
/* copy: from the rectangle to its place, as for dray__delta_apply. After DRAY_EFORMAT nothing is
 * written. */
int dray__delta_decode(dray__delta_coder *coder, const uint8_t *data, size_t size,
                       const dray_copy *copy, void *base, dray_error *error);
typedef struct dray__delta_message {
    const uint8_t *data;
    size_t size;
    const dray_copy *copy; /* all of them lead to one region */
} dray__delta_message;
/* The same for several messages, to memory of any kind. GPU memory is patched by the GPU, with many
 * messages in a launch. After DRAY_EFORMAT wrong messages, and those behind them, are not written.
 */
int dray__delta_decode_all(dray__delta_coder *coder, const dray__delta_message *messages,
                           uint32_t count, dray_region *to, dray_error *error);
/* Returns true when this process can write deltas to the region. */
bool dray__delta_writes(const dray_region *to);
