/* plan.h - two placements in, the exact list of copies out. Pure arithmetic: no I/O, no clock, no
 * global state; the same input gives the same plan. */
#ifndef DRAY_PLAN_H
#define DRAY_PLAN_H

#include <dray/dray.h>
#include <dray/model.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One member as the planner sees it: its layout and where it runs. The layout and the name are
 * borrowed for as long as the call, or the index, that is given the member. */
typedef struct dray_plan_member {
    const dray_layout *layout;
    uint64_t member;  /* id, for messages and tie-breaking */
    const char *name; /* for messages; NULL: "member <id>" */
    uint64_t host;    /* equal = same host */
    uint64_t process; /* equal (and same host) = same process */
    uint64_t device;  /* equal, not 0 (and same host) = same GPU */
} dray_plan_member;

typedef struct dray_plan_options {
    size_t size;
    uint64_t stripe_bytes; /* blocks larger than this are striped over equal replicas; 0: 4 MiB */
    uint32_t allow_cast;   /* bit set of DRAY_CAST_...; 0: DRAY_CAST_DEFAULT */
} dray_plan_options;

/* NONE alone: dtypes must be equal. FLOAT: between f64, f32, bf16 and f16, rounding to nearest
 * even. QUANT: from f32, bf16 and f16 to tensors that are quantised (dray_layout_set_quant), and
 * back. */
enum {
    DRAY_CAST_NONE = 1,
    DRAY_CAST_FLOAT = 2,
    DRAY_CAST_QUANT = 4,
    DRAY_CAST_DEFAULT = DRAY_CAST_FLOAT | DRAY_CAST_QUANT
};

#define DRAY_PLAN_OPTIONS_INIT                                                                     \
    {                                                                                              \
        sizeof(dray_plan_options), 0, 0                                                            \
    }

/* Over what a copy goes, the nearest first. FILE: one of its two regions is a file. */
typedef enum dray_link {
    DRAY_LINK_PROCESS = 0, /* same process */
    DRAY_LINK_DEVICE,      /* same GPU, another process */
    DRAY_LINK_HOST,        /* same host, another process */
    DRAY_LINK_NETWORK,     /* another host */
    DRAY_LINK_FILE,        /* a file */
    DRAY_LINK_COUNT
} dray_link;

/* "process", "device", "host", "network", "file"; "?" for anything else. Static storage. */
const char *dray_link_name(dray_link link);

/* One rectangle: element (i0..i3) goes from source_region[source_offset + Σ i·source_stride] to
 * destination_region[destination_offset + Σ i·destination_stride], converted from source_dtype to
 * destination_dtype. Dimensions are those of the tensor (ndim = the tensor's, at least 1); unused
 * ones have start 0, extent 1, stride 0. */
typedef struct dray_copy {
    uint32_t source;        /* index into the sources given to dray_plan_new */
    uint32_t source_region; /* index within that layout */
    uint32_t destination_region;
    uint32_t tensor; /* index within the destination layout */
    uint32_t ndim;
    int32_t source_dtype, destination_dtype;
    int64_t start[DRAY_MAX_DIMS]; /* global coordinates, elements */
    int64_t extent[DRAY_MAX_DIMS];
    uint64_t source_offset, destination_offset;                              /* bytes */
    int64_t source_stride[DRAY_MAX_DIMS], destination_stride[DRAY_MAX_DIMS]; /* bytes */
} dray_copy;

typedef enum dray_transform_kind {
    DRAY_TRANSFORM_QUANTISE = 1, /* floats become a quantised tensor and its scales */
    DRAY_TRANSFORM_DEQUANTISE    /* a quantised tensor and its scales become floats */
} dray_transform_kind;

/* Elements that are converted together: a box of one tensor, read from wherever it lies and written
 * to wherever the destination holds it. Elements that share a scale are a cell: cells are the grid
 * of multiples of `cell`, cut short at the tensor's edge. QUANTISE reads whole cells, also where
 * the destination holds a part of one: their largest element decides the scale. The arithmetic is
 * that of DeepGEMM's per_block_cast_to_fp8: scale = max(amax, 1e-4) / largest (448 or 57344),
 * rounded up to a power of two for UE8M0; quantised = x * (1 / scale), rounded to nearest even. */
typedef struct dray_transform {
    int32_t kind;    /* dray_transform_kind */
    uint32_t tensor; /* index within the destination layout: of the quantised one, or the floats */
    int32_t quant_dtype;           /* of the quantised side */
    int32_t scale_format;          /* dray_scale_format */
    int64_t start[DRAY_MAX_DIMS];  /* global coordinates, elements */
    int64_t extent[DRAY_MAX_DIMS]; /* unused dimensions: 1 */
    int64_t cell[DRAY_MAX_DIMS];   /* elements that share a scale, along each dimension */
    /* Ranges of dray_plan_reads, which has the elements (each once), and for DEQUANTISE the scales
     * of all cells that the box touches (each once); of dray_plan_writes, which has the elements
     * and, for QUANTISE, the scales that the destination holds. */
    uint64_t first_read, reads, first_scale_read, scale_reads, first_write, writes;
} dray_transform;

typedef struct dray_plan dray_plan;

/* Fills every element of the destination exactly once from the sources, each destination byte read
 * once. Where several sources hold an element: the same process, then the same GPU, then the same
 * host, then another host, then a file; within one of these the least loaded by this plan so far,
 * and equal replicas share blocks larger than stripe_bytes. Among sources with the same load each
 * destination begins with another one, chosen by its member id. Source names are resolved through
 * aliases on either side (a destination lm_head from a tied embed_tokens). Elements beyond a
 * tensor's global shape (vocabulary padding) are in no block and stay as they are. Elements that
 * the destination holds twice, in different memory, are both filled. A quantised tensor, and its
 * scales, are copied from sources that quantise it in the same way (or hold that dtype and do not
 * say how), else made of floats. sources: source_count members,
 * may be none; options: NULL for the defaults. Returns DRAY_EHOLE (elements that nobody holds),
 * DRAY_EOVERLAP (two blocks of the destination write the same bytes), DRAY_ESHAPE, DRAY_EDTYPE:
 * named are tensor, element range and members; DRAY_EINVALID (unknown bits in allow_cast),
 * DRAY_ENOMEM. Owner: the caller frees *out; it keeps no pointer into the layouts. Threads: any.
 * Does not block. */
int dray_plan_new(const dray_plan_member *sources, uint32_t source_count,
                  const dray_plan_member *destination, const dray_plan_options *options,
                  dray_plan **out, dray_error *error);
void dray_plan_free(dray_plan *plan); /* NULL is fine */

/* Who holds what, gathered once for several destinations of the same sources (each of 128 engine
 * ranks): dray_plan_new makes one for its destination alone. */
typedef struct dray_plan_index dray_plan_index;

/* Reads all layouts once. Owner: the caller frees *out, and keeps sources and their layouts as they
 * are until then. DRAY_ENOMEM. */
int dray_plan_index_new(const dray_plan_member *sources, uint32_t source_count,
                        dray_plan_index **out, dray_error *error);
/* The same plan, and the same errors, as dray_plan_new gives. Threads: any number may plan from one
 * index at once. */
int dray_plan_from_index(const dray_plan_index *index, const dray_plan_member *destination,
                         const dray_plan_options *options, dray_plan **out, dray_error *error);
void dray_plan_index_free(dray_plan_index *index); /* NULL is fine */

/* What a plan holds. Read-only: any threads, until it is freed. An index or link that does not
 * exist has 0 bytes. */

/* Copies are grouped by source, then source region, then ascending source offset. */
uint64_t dray_plan_count(const dray_plan *plan);
/* dray_plan_count entries, borrowed from the plan; may be NULL when there are none. */
const dray_copy *dray_plan_copies(const dray_plan *plan);
/* What is not copied: by tensor; no more than there are tensors, but for those in several blocks.
 * Borrowed; may be NULL when there are none. */
uint64_t dray_plan_transform_count(const dray_plan *plan);
const dray_transform *dray_plan_transforms(const dray_plan *plan);
/* What transforms read: the source's side of a copy alone (the destination's is 0, the tensor the
 * transform's); reads of scales count coordinates in scales. */
const dray_copy *dray_plan_reads(const dray_plan *plan);
/* What they write: the destination's side alone (the source's is 0). */
const dray_copy *dray_plan_writes(const dray_plan *plan);
/* Bytes read from a source, before conversion. */
uint64_t dray_plan_source_bytes(const dray_plan *plan, uint32_t source);
/* Bytes written, after conversion: over one link (scales count as their elements do), in all, by
 * the largest copy or transform. */
uint64_t dray_plan_bytes(const dray_plan *plan, dray_link link);
uint64_t dray_plan_total_bytes(const dray_plan *plan);
uint64_t dray_plan_largest_copy(const dray_plan *plan);
/* Where a source is as seen from the destination; FILE when all of its regions are files. */
dray_link dray_plan_source_link(const dray_plan *plan, uint32_t source);

#ifdef __cplusplus
}
#endif
#endif
