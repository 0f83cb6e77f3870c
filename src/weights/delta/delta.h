/* src/weights/delta/: what changed between two versions of a publisher's blocks. delta.c finds the
 * elements that changed, lists them in a region of shared memory, and applies such a list;
 * delta_gpu.c does the same for blocks in GPU memory; entries.c has the codes of a list on the wire
 * and on disk; delta_wire.c encodes a list for the network.
 * Checkpoints that are written as deltas are in weights/checkpoint/, since their format is another
 * one. */

/* What changed between two versions of a publisher's blocks, as a region that readers who hold the
 * first of them apply instead of copying everything.
 *
 * Every block is cut into slices of at most DRAY__DELTA_SLICE elements (slices.c; both sides derive
 * the same ones from the layout). The region holds, in the byte order of the host, which it never
 * leaves:
 *
 *     head     magic, base version, version, incarnation, number of slices, bytes used
 *     table    a slot for each slice, block by block: u64 offset of its entries, u32 how many;
 *              DRAY__DELTA_FULL many: too much changed, read the block itself
 *     entries  of each slice: u16 positions (flattened, C order within the slice, ascending) and,
 *              each from the next multiple of 8, the new values, and i8 steps from the old ones
 *              (entries.h; 0: more than 127), which readers here do without: only a code on its way
 *              to another host is made of them
 *
 * Of blocks in GPU memory, GPUs find and apply it, and the region is pinned (delta_gpu.h).
 *
 * The publisher writes it while it publishes, when nobody may read the version before; readers are
 * those who hold a lease on the version.
 */
#pragma once

#include "weights/delta/entries.h"
#include "weights/internal.h"

#define DRAY__DELTA_SLICE ((uint64_t)1 << 16)
#define DRAY__DELTA_FULL UINT32_MAX
/* GPUs enter, and apply, no more than one in so many elements of a slice. */
#define DRAY__DELTA_GPU_SPARSE 8

/* ---- the publisher's side -------------------------------------------------------------------- */
typedef struct dray__delta dray__delta;

/* Keeps a copy of the blocks' last published bits. dtype: what floats are compared and sent as;
 * NONE: as they are stored. layout and regions are borrowed until free. Blocks in files are always
 * full. */
int dray__delta_new(const dray_layout *layout, dray_region *const *regions, int32_t dtype,
                    dray__delta **out, dray_error *error);
/* Finds what changed since the version published before (the first has no base), and keeps the
 * bits of this one. Reads all blocks. */
int dray__delta_publish(dray__delta *delta, uint64_t incarnation, uint64_t version,
                        dray_error *error);
dray_region *dray__delta_region(const dray__delta *delta); /* SHARED; the delta's */
void dray__delta_free(dray__delta *delta);                 /* NULL is fine */

/* What a block's elements are compared and sent as, and the slices that it is cut in. */
int32_t dray__delta_dtype(const dray_layout *layout, uint32_t block, int32_t dtype);
void dray__delta_cut(const dray_layout *layout, uint32_t block, dray__slicer *slicer);
uint64_t dray__delta_slices(const dray_layout *layout, uint32_t block);

/* ---- the reader's side ----------------------------------------------------------------------- */
typedef struct dray__delta_view dray__delta_view;

/* layout: the publisher's; dtype: as given to dray__delta_new. Both regions and layout are borrowed
 * until close. DRAY_EFORMAT: not such a region, or one for another layout. */
bool dray__delta_is(const dray_region *region);
int dray__delta_open(const dray_layout *layout, const dray_region *region, dray__delta_view **out,
                     dray_error *error);
void dray__delta_close(dray__delta_view *view); /* NULL is fine */
/* What a source of shared memory keeps: the view of its delta; NULL: it has none, or not here. */
void dray__delta_forget(void *view);
static inline dray__delta_view *dray__delta_of(const dray__source *source)
{
    return dray__kept_find(source->kept, dray__delta_forget);
}
/* Does it lead from `base` to `version` now? */
bool dray__delta_leads(const dray__delta_view *view, uint64_t incarnation, uint64_t base,
                       uint64_t version);
/* Where a block's first slot lies in the region. */
uint64_t dray__delta_slot(const dray__delta_view *view, uint32_t block);
/* What elements that are stored as `dtype` are sent as. */
int32_t dray__delta_sent(const dray__delta_view *view, int32_t dtype);

typedef struct dray__delta_part {
    dray__rect slice, cross; /* the slice; what of it lies in the rectangle that was asked for */
    bool full;
    uint32_t count; /* entries of the slice */
    const uint16_t *positions;
    const uint8_t *values;
    const int8_t *steps;
    bool stepping; /* elements with a step other than 0 have no value, and are moved by it */
} dray__delta_part;

/* Walks the slices of a block that cross `rect`. */
typedef struct dray__delta_walk {
    const dray__delta_view *view; /* NULL: the slices alone */
    dray__rect rect;
    dray__slicer slicer;
    uint32_t block;
    uint64_t next;
} dray__delta_walk;

void dray__delta_start(const dray__delta_view *view, uint32_t block, const dray__rect *rect,
                       dray__delta_walk *walk);
/* The same without a view: what `rect` has of each slice, false after the last. */
void dray__delta_grid(const dray_layout *layout, uint32_t block, const dray__rect *rect,
                      dray__delta_walk *walk);
bool dray__delta_grid_next(dray__delta_walk *walk, dray__rect *out);
/* DRAY_EEND after the last; DRAY_EFORMAT: entries that lie outside the region. */
int dray__delta_next(dray__delta_walk *walk, dray__delta_part *out, dray_error *error);

/* Writes the entries that lie in part->cross to where `copy` (whose destination is of the values'
 * dtype) puts them; base: of the destination's region. *bytes grows by what was read. DRAY_EFORMAT:
 * positions that do not ascend or lie outside the slice. */
int dray__delta_apply(const dray__delta_part *part, const dray_copy *copy, void *base,
                      uint64_t *bytes, dray_error *error);

/* The slice that the whole rectangle lies in; false: it lies in several. */
bool dray__delta_slice(const dray__delta_view *view, uint32_t block, const dray__rect *rect,
                       dray__delta_part *out);
/* Is a block sent as this dtype? */
bool dray__delta_sends(const dray__delta_view *view, uint32_t block, int32_t dtype);

/* ---- over a network (delta_wire.c): the entries that lie in a rectangle of one slice, with
 * positions within the rectangle (entries.h):
 *
 *     u32 count  of entries; bit 31: what follows the two numbers is a zstd frame; bit 30: codes
 *     u32 gaps   bytes of the gaps
 *     gaps
 *     codes, to the end, or
 *     values     in planes: first the first byte of each, then the second of each, ...
 *
 * A coder keeps what compression needs, and gives it a rest where it does not pay. */
typedef struct dray__delta_coder dray__delta_coder;
dray__delta_coder *dray__delta_coder_new(void); /* NULL: out of memory */
void dray__delta_coder_free(dray__delta_coder *coder);
/* What one that decodes holds, at most, where pieces take so many bytes dense. gpus: into memory of
 * GPUs. */
size_t dray__delta_coder_bytes(size_t piece, bool gpus);

/* Returns the bytes put at `out`; 0: it would be `limit` bytes or more, the rectangle crosses
 * several slices, or what is sent is not of this dtype. */
size_t dray__delta_encode(dray__delta_coder *coder, const dray__delta_view *view, uint32_t block,
                          const dray__rect *rect, int32_t dtype, uint8_t *out, size_t limit);
/* copy: the rectangle's way to its place, as for dray__delta_apply. DRAY_EFORMAT: nothing was
 * written. */
int dray__delta_decode(dray__delta_coder *coder, const uint8_t *data, size_t size,
                       const dray_copy *copy, void *base, dray_error *error);
typedef struct dray__delta_message {
    const uint8_t *data;
    size_t size;
    const dray_copy *copy; /* all of them lead to one region */
} dray__delta_message;
/* The same of several, to memory of any kind: a GPU's is patched by the GPU, which has few launches
 * of many. DRAY_EFORMAT: nothing is written of those that are wrong, and of those behind them. */
int dray__delta_decode_all(dray__delta_coder *coder, const dray__delta_message *messages,
                           uint32_t count, dray_region *to, dray_error *error);
/* Can deltas be written to this region by this process? */
bool dray__delta_writes(const dray_region *to);
