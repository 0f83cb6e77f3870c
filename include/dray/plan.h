/* plan.h - two placements in, the exact list of copies out. Pure arithmetic: no I/O, no clock, no
 * global state; the same input gives the same plan. */
#ifndef DRAY_PLAN_H
#define DRAY_PLAN_H

#include <dray/dray.h>
#include <dray/model.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One member as the planner sees it: its layout and where it runs. */
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

enum { DRAY_CAST_NONE = 1, DRAY_CAST_FLOAT = 2, DRAY_CAST_DEFAULT = DRAY_CAST_FLOAT };

#define DRAY_PLAN_OPTIONS_INIT                                                                     \
    {                                                                                              \
        sizeof(dray_plan_options), 0, 0                                                            \
    }

typedef enum dray_link {
    DRAY_LINK_PROCESS = 0, /* same process */
    DRAY_LINK_DEVICE,      /* same GPU, another process */
    DRAY_LINK_HOST,        /* same host, another process */
    DRAY_LINK_NETWORK,     /* another host */
    DRAY_LINK_FILE,        /* a file */
    DRAY_LINK_COUNT
} dray_link;

const char *dray_link_name(dray_link link);

/* One rectangle: element (i0..i3) goes from source_region[source_offset + Σ i·source_stride] to
 * destination_region[destination_offset + Σ i·destination_stride], converted from source_dtype to
 * destination_dtype. Dimensions are those of the tensor (ndim = the tensor's, at least 1). */
typedef struct dray_copy {
    uint32_t source;        /* index into the sources given to dray_plan_new */
    uint32_t source_region; /* index within that layout */
    uint32_t destination_region;
    uint32_t tensor; /* index within the destination layout */
    uint32_t ndim;
    int32_t source_dtype, destination_dtype;
    int64_t start[DRAY_MAX_DIMS]; /* global coordinates */
    int64_t extent[DRAY_MAX_DIMS];
    uint64_t source_offset, destination_offset;                              /* bytes */
    int64_t source_stride[DRAY_MAX_DIMS], destination_stride[DRAY_MAX_DIMS]; /* bytes */
} dray_copy;

typedef struct dray_plan dray_plan;

/* Fills every element of the destination exactly once from the sources, each destination byte read
 * once. Where several sources hold an element: the same process, then the same GPU, then the same
 * host, then the least loaded; equal replicas share large blocks. Source names are resolved through
 * aliases on either side (a destination lm_head from a tied embed_tokens). Elements beyond a
 * tensor's global shape (vocabulary padding) are in no block and stay as they are.
 * DRAY_EHOLE, DRAY_EOVERLAP, DRAY_ESHAPE, DRAY_EDTYPE name tensor, element range and members.
 * The plan keeps no pointer into the layouts. Thread-safe. */
int dray_plan_new(const dray_plan_member *sources, uint32_t source_count,
                  const dray_plan_member *destination, const dray_plan_options *options,
                  dray_plan **out, dray_error *error);
void dray_plan_free(dray_plan *plan);

/* Who holds what, gathered once for several destinations of the same sources (each of 128 engine
 * ranks): dray_plan_new makes one for its destination alone. Borrows the sources and their layouts
 * until it is freed. Read-only afterwards: any threads may plan from one index at once. */
typedef struct dray_plan_index dray_plan_index;

int dray_plan_index_new(const dray_plan_member *sources, uint32_t source_count,
                        dray_plan_index **out, dray_error *error);
/* The same plan as dray_plan_new's. */
int dray_plan_from_index(const dray_plan_index *index, const dray_plan_member *destination,
                         const dray_plan_options *options, dray_plan **out, dray_error *error);
void dray_plan_index_free(dray_plan_index *index);

/* Copies are grouped by source, then source region, then ascending source offset. */
uint64_t dray_plan_count(const dray_plan *plan);
const dray_copy *dray_plan_copies(const dray_plan *plan);                /* borrowed: the plan's */
uint64_t dray_plan_source_bytes(const dray_plan *plan, uint32_t source); /* before conversion */
uint64_t dray_plan_bytes(const dray_plan *plan, dray_link link);         /* destination bytes */
uint64_t dray_plan_total_bytes(const dray_plan *plan);
uint64_t dray_plan_largest_copy(const dray_plan *plan); /* destination bytes */
dray_link dray_plan_source_link(const dray_plan *plan, uint32_t source);

#ifdef __cplusplus
}
#endif
#endif
