/* src/plan/: pure arithmetic that turns two placements of the same tensors into the list of copies
 * between them. It finds which blocks overlap (overlap.c), which of several holders of the same
 * bytes to read, and how elements are cast or quantised on the way (transform.c). There is no I/O
 * here, no clock and no global state, so that every rank derives the same plan from the same
 * layouts. */

/* The declarations that the files of src/plan share. */
#pragma once

#include "plan/index.h"
#include "plan/rects.h"

typedef struct dray__copies {
    dray_copy *items;
    size_t count, capacity;
} dray__copies;

dray_copy *dray__copies_next(dray__copies *copies); /* NULL when out of memory */

struct dray_plan {
    dray__copies copies, reads, writes;
    dray_transform *transforms;
    size_t transform_count, transform_capacity;
    uint32_t source_count;
    uint64_t *source_bytes;
    int32_t *source_link; /* dray_link */
    uint64_t link_bytes[DRAY_LINK_COUNT];
    uint64_t total_bytes, largest;
};

/* ---- plan.c: filling rectangles ------------------------------------------------------------- */

/* How the source's elements are used. Holders that cannot be used in this way are skipped. */
typedef enum dray__reading {
    DRAY__AS_THEY_ARE,  /* they are copied or cast */
    DRAY__AS_FLOATS,    /* they are floats, and are quantised */
    DRAY__AS_QUANTISED, /* they are quantised, and are converted to floats */
    DRAY__AS_SCALES     /* they are the scales of quantised elements */
} dray__reading;

/* The holders of one rectangle that overlaps the destination block. */
typedef struct dray__hit {
    const dray__plan_holder *first;
    size_t count;
    dray__rect box; /* the overlap */
    uint64_t load;  /* the load of its least loaded holder; set when the order of hits matters */
} dray__hit;

/* A block of a part of a quantised tensor that must be made from floats. */
typedef struct dray__pending {
    uint32_t tensor; /* the quantised tensor */
    int part;        /* DRAY__PART_... */
    const dray_block *block;
} dray__pending;

typedef struct dray__planner {
    const dray_plan_index *index;
    const dray_plan_member *destination;
    uint64_t stripe_bytes;
    bool cast_floats, cast_quant;
    bool quants; /* some source has quantised tensors */
    dray_plan *plan;
    uint64_t *load;    /* the bytes asked of each source so far */
    uint32_t rotation; /* each destination begins with a different one of equal sources */
    dray__pending *pending;
    size_t pending_count, pending_capacity;
    /* The fields below describe the current destination block. */
    const dray_block *block;
    dray_block own; /* stands in for the block when that is not in the layout */
    const dray_tensor_info *tensor;
    dray__reading reading;
    const dray_quant *wanted;      /* with AS_QUANTISED: the form that all sources must have */
    int32_t wanted_dtype;          /* and their dtype */
    dray__copies *sink;            /* the list that copies are added to */
    const dray_block **last_block; /* per source: the last block that a piece was read from */
    bool repeated;                 /* a source gave more than one piece of this block */
    /* The rectangles that are not filled yet; those that the current hit does not fill. */
    dray__rects open, left;
    dray__hit *hits;
    size_t hit_count, hit_capacity;
    const dray__plan_holder **near; /* the holders of one hit with the current link */
    size_t near_capacity;
} dray__planner;
typedef dray__planner planner; /* the short name in the .c files of src/plan */

/* Fills the open rectangles from all holders of the tensor under any of its names. The caller
 * decides about rectangles that stay open. */
int dray__plan_fill(dray__planner *planner, dray_error *error);
/* Fills the open rectangles from holders under this name only. */
int dray__plan_fill_from_name(dray__planner *planner, const char *name, dray_error *error);
/* Makes the error for the first open rectangle: no source holds it, or none holds it in a form
 * that can be converted. */
int dray__plan_hole(const dray__planner *planner, dray_error *error);

/* ---- transform.c: quantised tensors --------------------------------------------------------- */

/* Returns true when the planner may read from a holder, given its current tensor and reading. */
bool dray__plan_accepts(const dray__planner *planner, const dray__plan_holder *holder);
/* Fills the planner's block, which has one open rectangle, when some tensors are quantised. Blocks
 * that must be made from floats are added to `pending`. */
int dray__plan_fill_quant(dray__planner *planner, dray_error *error);
/* Makes the pending blocks. */
int dray__plan_quantise(dray__planner *planner, dray_error *error);
/* Adds the transforms to the plan's totals. */
void dray__plan_total_transforms(dray__planner *planner);

/* Fails with DRAY_EOVERLAP when two blocks of the layout, or one block twice, write the same
 * bytes. */
int dray__plan_check_memory(const dray_plan_member *destination, dray_error *error);
/* The same, also for blocks of different regions. addresses: of each region's memory, in one space
 * of addresses; 0 for a region that has no memory in common with others. */
int dray__plan_check_addresses(const dray_plan_member *destination, const uint64_t *addresses,
                               dray_error *error);

/* Joins copies of one destination block, from index `from` on, where two of them are one
 * rectangle in both memories. */
void dray__plan_merge(dray__copies *copies, size_t from);
/* Sorts copies by source, then source region, source offset and destination. */
int dray__plan_sort(dray__copies *copies, dray_error *error);

/* Writes the member's name, such as "trainer-3" or "member 3". */
const char *dray__member_text(const dray_plan_member *member, char *out, size_t capacity);
