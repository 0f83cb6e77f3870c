/* plan.h - the planner: computes from the layouts of the sources and of one destination the exact
 * list of copies that fills the destination. Pure arithmetic without I/O, clock or global state;
 * the same input gives the same plan. Functions may be called from any thread; a plan may be read
 * by several threads. Since 0.1. */
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
    uint64_t host;    /* members with equal numbers are on the same host */
    uint64_t process; /* members of a host with equal numbers are in the same process */
    uint64_t device;  /* members of a host with equal numbers use the same GPU; 0: none */
} dray_plan_member;

typedef struct dray_plan_options {
    size_t size;
    uint64_t stripe_bytes; /* blocks larger than this are striped over equal replicas; 0: 4 MiB */
    uint32_t allow_cast;   /* bit set of DRAY_CAST_...; 0: DRAY_CAST_DEFAULT */
} dray_plan_options;

/* Conversions that a plan may contain.
 * NONE: none, dtypes must be equal; it is given alone.
 * FLOAT: between f64, f32, bf16 and f16, rounded to nearest even.
 * QUANT: between f32, bf16 or f16 and quantised tensors (dray_layout_set_quant). */
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

/* The links that copies use, the nearest first. FILE: one of the two regions is a file. */
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
    DRAY_TRANSFORM_DEQUANTISE,   /* a quantised tensor and its scales become floats */
    DRAY_TRANSFORM_MOST /* NVFP4: the largest of all elements of a tensor is found; the last
                           of those that share a global scale writes it */
} dray_transform_kind;

/* A box of one tensor whose elements are converted together. Elements that share a scale form a
 * cell. Cells begin at multiples of `cell` and are smaller at the tensor's edge. QUANTISE reads
 * whole cells, also where the destination holds a part of one, because the largest element of a
 * cell decides its scale. Of FP8 in blocks and by tensor the arithmetic is that of DeepGEMM's
 * per_block_cast_to_fp8: scale = max(amax, 1e-4) / largest, where largest is 448 (E4M3) or 57344
 * (E5M2), rounded up to a power of two for UE8M0; quantised = x * (1 / scale), rounded to nearest
 * even. docs/formats.md has that of the other kinds. */
typedef struct dray_transform {
    int32_t kind;                  /* dray_transform_kind */
    uint32_t tensor;               /* the destination's tensor: index within its layout */
    int32_t quant_dtype;           /* dray_dtype of the quantised side */
    int32_t scale_format;          /* dray_scale_format */
    int64_t start[DRAY_MAX_DIMS];  /* global coordinates, elements */
    int64_t extent[DRAY_MAX_DIMS]; /* unused dimensions: 1 */
    int64_t cell[DRAY_MAX_DIMS];   /* elements that share a scale, along each dimension */
    /* Ranges of dray_plan_reads, which has the elements (each once), and for DEQUANTISE the scales
     * of all cells that the box touches (each once); of dray_plan_writes, which has the elements
     * and, for QUANTISE, the scales and other parts that the destination holds. */
    uint64_t first_read, reads, first_scale_read, scale_reads, first_write, writes;
    int32_t quant_kind; /* dray_quant_kind of the quantised side */
    uint32_t most; /* QUANTISE of NVFP4: 1 + the number of the last MOST transform that it waits for
                      (which are before it); else 0 */
} dray_transform;

typedef struct dray_plan dray_plan;

/* Makes a plan that fills every element of the destination exactly once and reads every byte once.
 *
 * Where several sources hold an element, the nearest link (dray_link) is taken, and of sources with
 * equal links the one from which this plan reads the fewest bytes so far. Blocks larger than
 * stripe_bytes are shared among equal replicas. Destinations begin with different sources, by their
 * member ids. Tensors are found through aliases of either side, so that a tied embed_tokens fills
 * an lm_head. Elements that the destination holds twice, in different memory, are both filled.
 * Padding of the vocabulary is in no block and stays as it is. A quantised tensor and its scales
 * are copied from sources that quantise it in the same way, or that hold its dtype and do not say
 * how; else they are computed from floats.
 *
 * sources: source_count members, which may be 0. options: NULL for the defaults. The caller frees
 * *out, which keeps no pointer into the layouts. Does not block.
 * DRAY_EHOLE: an element is in no source. DRAY_EOVERLAP: two blocks of the destination have the
 * same bytes. DRAY_ESHAPE, DRAY_EDTYPE: shapes differ, or a dtype cannot be converted. The messages
 * name the tensor, the elements and the members. DRAY_EINVALID: allow_cast has unknown bits.
 * DRAY_ENOMEM.
 */
int dray_plan_new(const dray_plan_member *sources, uint32_t source_count,
                  const dray_plan_member *destination, const dray_plan_options *options,
                  dray_plan **out, dray_error *error);
void dray_plan_free(dray_plan *plan); /* NULL is fine */

/* An index of the sources, for plans of several destinations, such as all ranks of an engine.
 * dray_plan_new makes one for its destination alone. */
typedef struct dray_plan_index dray_plan_index;

/* Reads all layouts once. The caller frees *out, and must not change the sources and their layouts
 * before. DRAY_ENOMEM. */
int dray_plan_index_new(const dray_plan_member *sources, uint32_t source_count,
                        dray_plan_index **out, dray_error *error);
/* Makes the same plan as dray_plan_new, with the same errors. Several threads may use one index at
 * the same time. */
int dray_plan_from_index(const dray_plan_index *index, const dray_plan_member *destination,
                         const dray_plan_options *options, dray_plan **out, dray_error *error);
void dray_plan_index_free(dray_plan_index *index); /* NULL is fine */

/* The functions below read a plan. They return 0 for an index or link that does not exist. */

/* The number of copies. They are in the order of source, source region, and source offset. */
uint64_t dray_plan_count(const dray_plan *plan);
/* The copies: dray_plan_count entries, borrowed from the plan; may be NULL when there are none. */
const dray_copy *dray_plan_copies(const dray_plan *plan);
/* The transforms, in the order of their tensors. Borrowed; may be NULL when there are none. */
uint64_t dray_plan_transform_count(const dray_plan *plan);
const dray_transform *dray_plan_transforms(const dray_plan *plan);
/* The rectangles that transforms read. Of each dray_copy only the source's side is set; start and
 * extent of a read of scales count scales. */
const dray_copy *dray_plan_reads(const dray_plan *plan);
/* The rectangles that transforms write. Of each dray_copy only the destination's side is set. */
const dray_copy *dray_plan_writes(const dray_plan *plan);
/* Bytes that the plan reads from source `source`, before conversion. */
uint64_t dray_plan_source_bytes(const dray_plan *plan, uint32_t source);
/* Bytes that the plan writes, after conversion: over one link (scales go over the link of their
 * elements), in all, and by the largest copy or transform. */
uint64_t dray_plan_bytes(const dray_plan *plan, dray_link link);
uint64_t dray_plan_total_bytes(const dray_plan *plan);
uint64_t dray_plan_largest_copy(const dray_plan *plan);
/* The link between source `source` and the destination; FILE when all regions of it are files. */
dray_link dray_plan_source_link(const dray_plan *plan, uint32_t source);

#ifdef __cplusplus
}
#endif
#endif
