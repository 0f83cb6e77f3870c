/* What the lanes of an update share. A lane carries out a subset of the update's ops its own way:
 * out of mapped memory or files (lane_memory.c), ... It is stepped without ever waiting, and does
 * its share of verification through the haul's books: `expected` and `found` by destination block,
 * and the source's bits by tensor, of what this rank owns in its group.
 *
 * A new lane is one file with one struct dray__lane_kind, entered in haul.c's table. */
#ifndef DRAY_WEIGHTS_HAUL_H
#define DRAY_WEIGHTS_HAUL_H

#include "weights/internal.h"

typedef struct dray__lane_kind {
    const char *name;
    /* Whether it carries out this op; the first lane of the table that does has it. */
    bool (*takes)(const dray__haul *haul, const dray__op *op);
    /* ops: indices into sources->ops, in the plan's order, borrowed until close. ceiling: bytes of
     * staging that it may hold; the strategy direct has none. */
    int (*open)(dray__haul *haul, const uint64_t *ops, uint64_t count, uint64_t ceiling, void **out,
                dray_error *error);
    /* Works until about until_ns. DRAY_OK: all its ops are done. DRAY_EAGAIN: more is left; *waits
     * is set when nothing can be done until the descriptor is readable. */
    int (*step)(void *lane, int64_t until_ns, bool *waits, dray_error *error);
    int (*fd)(const void *lane);                                  /* NULL: never waits */
    void (*report)(const void *lane, dray_update_report *report); /* adds; NULL: nothing to say */
    uint64_t (*held_bytes)(const void *lane);                     /* staging, at most */
    /* Puts in front of an error at the deadline who did not do his part; NULL: nothing to say. */
    void (*explain)(const void *lane, dray_error *error);
    void (*close)(void *lane); /* NULL lane is fine */
} dray__lane_kind;

extern const dray__lane_kind dray__lane_fan, dray__lane_quant, dray__lane_delta, dray__lane_overlay,
    dray__lane_patch, dray__lane_remote, dray__lane_file, dray__lane_cuda, dray__lane_memory;

struct dray__tensor_sum {
    int32_t dtype;
    bool mixed;
    uint64_t elements, sum;
};

struct dray__lane {
    const dray__lane_kind *kind;
    void *state;
    uint64_t *ops, count; /* owned, if `owns` */
    bool owns, done, waits;
};

enum { DRAY__LANES = 9 };

struct dray__haul {
    const dray__sources *sources;
    const dray__destination *destination;
    dray__haul_options options;
    /* Of a load_weights engine: the ops by round, which are hauled one after the other. */
    uint64_t *by_round, *round_first; /* NULL: all ops at once */
    uint32_t round;
    bool loading;            /* its bucket is there */
    uint64_t held_most;      /* by the lanes of the rounds that are over */
    dray_update_report told; /* by them: what lanes add to a report */
    struct dray__lane lanes[DRAY__LANES];
    int poll_fd; /* readable when a waiting lane can go on; -1: none ever waits */
    uint32_t turn;
    /* Sources whose fence has not come yet; nothing moves before. NULL: none. */
    bool *held_by;
    uint32_t held_count, held_last; /* held_last: the one that came last, or not yet */
    int64_t opened_ns, held_ns;
    int timer_fd;

    /* the books */
    struct dray__tensor_sum *tensors;
    uint64_t *expected, *found; /* one a destination block */
    uint64_t bytes;
    uint64_t misplaced; /* entries of deltas on GPUs that lead outside */
    int64_t move_ns, verify_ns;
    int64_t device_ns; /* of move_ns, by the clocks of GPUs */
};

/* ---- held.c: sources whose fences (mark.h) have not come ----------------------------------------
 */

/* Looks which there are. */
int dray__haul_hold(dray__haul *haul, dray_error *error);
/* DRAY_EAGAIN: one has not come; then nothing can be done until the haul's descriptor is readable.
 */
int dray__haul_held(dray__haul *haul, dray_error *error);
void dray__haul_explain_held(const dray__haul *haul, dray_error *error);
/* A source's name, and its GPU's. */
void dray__source_who(const dray__source *source, char *out, size_t size);

/* lane_delta.c: does the source say what changed of what the op reads since the version that this
 * rank holds? Only of what is compared with the announced sums in the end: nothing else tells
 * whether the memory held what the delta builds on. */
bool dray__delta_offered(const dray__haul *haul, const dray__op *op);
#define DRAY__DELTA_NO_BLOCK UINT32_MAX
/* The block that holds all of what the copy reads; DRAY__DELTA_NO_BLOCK: several do. */
uint32_t dray__delta_block(const dray_layout *layout, const char *name, const dray_copy *copy);

/* ---- the books ------------------------------------------------------------------------------- */

const dray_tensor_info *dray__haul_tensor(const dray__haul *haul, const dray_copy *copy);
/* Destination bytes. */
uint64_t dray__copy_bytes(const dray_copy *copy);
/* A sum of the source's bits that counts in the group's. */
void dray__haul_own(dray__haul *haul, const dray_copy *copy, uint64_t sum);
static inline void dray__tensor_sum_add(struct dray__tensor_sum *t,
                                        const struct dray__tensor_sum *sum)
{
    if (!sum->elements)
        return;
    t->mixed |= sum->mixed || (t->elements && t->dtype != sum->dtype);
    t->dtype = sum->dtype;
    t->elements += sum->elements;
    t->sum += sum->sum;
}
/* Sums of such bits, taken elsewhere. */
void dray__haul_add(dray__haul *haul, uint32_t tensor, const struct dray__tensor_sum *sum);
/* The sum of what lies at the destination of a copy now. Of a GPU's memory that cannot be read any
 * more: none that anything else has. */
uint64_t dray__haul_read_back(const dray__haul *haul, const dray_region *region,
                              const dray_copy *copy);

#endif
