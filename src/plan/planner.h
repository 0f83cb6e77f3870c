/* src/plan/: pure arithmetic that turns two placements of the same tensors into the list of copies
 * between them. It finds which blocks overlap (overlap.c), which of several holders of the same
 * bytes to read, and how elements are cast or quantised on the way (transform.c). There is no I/O
 * here, no clock and no global state, so that every rank derives the same plan from the same
 * layouts. */

/* What the files of src/plan share. */
#pragma once

#include "plan/index.h"
#include "plan/rects.h"

typedef struct dray__copies {
    dray_copy *items;
    size_t count, capacity;
} dray__copies;

dray_copy *dray__copies_next(dray__copies *copies); /* NULL: out of memory */

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

/* As what the source's elements are taken; others are passed over. */
typedef enum dray__reading {
    DRAY__AS_THEY_ARE,  /* copied, or cast */
    DRAY__AS_FLOATS,    /* to be quantised */
    DRAY__AS_QUANTISED, /* to be made floats of */
    DRAY__AS_SCALES     /* for these */
} dray__reading;

/* Holders of one rectangle that overlaps the destination block. */
typedef struct dray__hit {
    const dray__plan_holder *first;
    size_t count;
    dray__rect box; /* the overlap */
    uint64_t load;  /* of its least loaded holder; set where the order of hits matters */
} dray__hit;

/* A block of a part of a quantised tensor that is to be made of floats. */
typedef struct dray__pending {
    uint32_t tensor; /* the quantised one */
    int part;        /* DRAY__PART_... */
    const dray_block *block;
} dray__pending;

typedef struct dray__planner {
    const dray_plan_index *index;
    const dray_plan_member *destination;
    uint64_t stripe_bytes;
    bool cast_floats, cast_quant;
    bool quants; /* somebody has quantised tensors */
    dray_plan *plan;
    uint64_t *load;    /* bytes asked of each source so far */
    uint32_t rotation; /* among equals each destination begins with another source */
    dray__pending *pending;
    size_t pending_count, pending_capacity;
    /* Of the destination block at hand. */
    const dray_block *block;
    dray_block own; /* where it is no block of the layout */
    const dray_tensor_info *tensor;
    dray__reading reading;
    const dray_quant *wanted;      /* AS_QUANTISED: all must be quantised like this */
    int32_t wanted_dtype;          /* and have this dtype */
    dray__copies *sink;            /* where copies go */
    const dray_block **last_block; /* per source: the last block that it gave a piece of */
    bool repeated;                 /* a source gave more than one piece of this block */
    dray__rects open, left;        /* not filled; not filled after the present hit */
    dray__hit *hits;
    size_t hit_count, hit_capacity;
    const dray__plan_holder **near; /* holders of one hit in the present class */
    size_t near_capacity;
} dray__planner;
typedef dray__planner planner; /* in the .c files of src/plan */

/* Fills what is open from all who hold it under any of the tensor's names. The open rest is the
 * caller's to judge. */
int dray__plan_fill(dray__planner *planner, dray_error *error);
/* The same, from those who hold it under this name. */
int dray__plan_fill_from_name(dray__planner *planner, const char *name, dray_error *error);
/* The error of the first open rectangle: held by nobody, or as nothing that can be converted. */
int dray__plan_hole(const dray__planner *planner, dray_error *error);

/* ---- transform.c: quantised tensors --------------------------------------------------------- */

/* Of a holder, with the planner's tensor and reading: is it one to read? */
bool dray__plan_accepts(const dray__planner *planner, const dray__plan_holder *holder);
/* Fills the planner's block, whose rectangle is open, where quantised tensors are about: what must
 * be made of floats is remembered in `pending`. */
int dray__plan_fill_quant(dray__planner *planner, dray_error *error);
/* Makes what is pending. */
int dray__plan_quantise(dray__planner *planner, dray_error *error);
/* The transforms' share of the plan's totals. */
void dray__plan_total_transforms(dray__planner *planner);

/* DRAY_EOVERLAP when two blocks of the layout, or one with itself, write the same bytes. */
int dray__plan_check_memory(const dray_plan_member *destination, dray_error *error);

/* Joins the copies from index `from` on, all of one destination block, where two of them are one
 * rectangle in both memories. */
void dray__plan_merge(dray__copies *copies, size_t from);
/* Source, then source region, then source offset, then destination. */
int dray__plan_sort(dray__copies *copies, dray_error *error);

/* "trainer-3" or "member 3". */
const char *dray__member_text(const dray_plan_member *member, char *out, size_t capacity);
