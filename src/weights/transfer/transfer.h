/* src/weights/transfer/: one update's copies, from the plan to the sums that are voted on. ops.c
 * cuts the plan's copies along the blocks of this rank, cohort.c deals them among ranks that
 * update together, and transfer.c gives each to a pair of a source and a placement and steps them
 * in turns. books.c has the sums of what was meant and of what was found; held.c waits until what
 * was published is there. */

/* An update's bytes: sources bring them, placements put them where they belong, and the books say
 * whether they came right.
 *
 * A source is one way to reach what an op reads: mapped memory, files, data servers, GPUs. A
 * placement is one way to write it: copied or cast, patched by what changed, quantised or
 * dequantised. Each op goes to the first pair of transfer.c's table in which the placement takes it
 * and the source reaches it in that form. What a pair has running is a lane, which is stepped
 * without ever waiting, and enters what it did in the books: `expected` and `found` by destination
 * block, and the source's bits by tensor, of what this rank owns in its group.
 *
 * Which ops go where is found out once, and kept with the sources until the plan changes or what is
 * asked for does. A new source is one file with one struct dray__source_type, and a line of
 * transfer.c's table. */
#pragma once

#include "base/waker.h"
#include "weights/internal.h"

/* For which ops it is, whatever brings them. */
typedef struct dray__placement {
    const char *name;
    bool (*takes)(const dray__transfer *transfer, const dray__op *op);
} dray__placement;

/* patch: only what changed since what this rank holds. convert: quantised or made floats of, from
 * the staging that another transfer gathers it in. compiled: all of it by programs of GPUs. */
extern const dray__placement dray__place_copy, dray__place_patch, dray__place_convert,
    dray__place_compiled;

/* What a pair has running. */
typedef struct dray__lane {
    dray__transfer *transfer;
    const struct dray__source_type *source; /* NULL: nothing is for it */
    const dray__placement *placement;
    const uint64_t *ops; /* indices into the sources' ops, in the plan's order */
    uint64_t count;
    uint64_t ceiling; /* bytes of staging that it may hold; the strategy direct has none */
    /* The source's: */
    void *state;
    int fd;        /* readable when a lane that waits can go on, from open on; -1: it never waits */
    uint64_t held; /* bytes of staging, at most */
    bool waits;    /* nothing can be done until fd is readable; false before each step */
    bool done;
} dray__lane;

typedef struct dray__source_type {
    const char *name;
    size_t bytes; /* of a lane's state, which is zeroed before it is opened */
    /* Can it bring what the op reads, as this placement wants it? */
    bool (*reaches)(const dray__transfer *transfer, const dray__op *op,
                    const dray__placement *placement);
    int (*open)(dray__lane *lane, dray_error *error); /* it is closed when this fails, too */
    /* Works until about until_ns. DRAY_OK: all its ops are done. DRAY_EAGAIN: more is left. */
    int (*step)(dray__lane *lane, int64_t until_ns, dray_error *error);
    /* Adds what is only known in the end, the rest is in the transfer's `told`; NULL: nothing. */
    void (*report)(const void *state, dray_update_report *report);
    /* Puts in front of an error at the deadline who did not do his part; NULL: nothing to say. */
    void (*explain)(const void *state, dray_error *error);
    void (*close)(void *state); /* what the state holds */
} dray__source_type;

struct dray__tensor_sum {
    int32_t dtype;
    bool mixed;
    uint64_t elements, sum;
};

struct dray__transfer {
    dray__sources *sources;
    const dray__destination *destination;
    dray__transfer_options options;
    struct dray__deal *own; /* who brings what, where that is of this round alone */
    /* Of a load_weights engine: the ops by round, which are transferred one after the other. */
    uint64_t *by_round, *round_first; /* NULL: all ops at once */
    uint32_t round;
    bool loading;            /* its bucket is there */
    uint64_t held_most;      /* by the lanes of the rounds that are over */
    dray_update_report told; /* what lanes add to a report */
    dray__lane *lanes;       /* one a pair of transfer.c's table */
    uint32_t lane_count;
    dray__waker waker; /* when a waiting lane can go on; closed: none ever waits */
    uint32_t turn;
    /* Sources whose fence has not come yet; nothing moves before. NULL: none. */
    bool *held_by;
    uint32_t held_count, held_last; /* held_last: the one that came last, or not yet */
    int64_t opened_ns, held_ns;

    /* the books */
    struct dray__tensor_sum *tensors;
    uint64_t *expected, *found; /* one a destination block */
    uint64_t bytes;
    uint64_t misplaced; /* entries of deltas on GPUs that lead outside */
    int64_t move_ns, verify_ns;
    int64_t device_ns; /* of move_ns, by the clocks of GPUs */
};

/* A source's name, and its GPU's. */
void dray__source_who(const dray__source *source, char *out, size_t size);

/* patch.c: does the source say what changed of what the op reads since the version that this
 * rank holds? Only of what is compared with the announced sums in the end: nothing else tells
 * whether the memory held what the delta builds on. */
bool dray__delta_offered(const dray__transfer *transfer, const dray__op *op);
/* The same of a checkpoint that is a delta on what this rank holds. */
bool dray__overlay_offered(const dray__transfer *transfer, const dray__op *op);
#define DRAY__DELTA_NO_BLOCK UINT32_MAX
/* The source's block that holds all of what the op reads; DRAY__DELTA_NO_BLOCK: several do. */
uint32_t dray__delta_block(const dray__transfer *transfer, const dray__op *op);

/* ---- the books ------------------------------------------------------------------------------- */

const dray_tensor_info *dray__transfer_tensor(const dray__transfer *transfer,
                                              const dray_copy *copy);
/* Destination bytes. */
uint64_t dray__copy_bytes(const dray_copy *copy);
/* The sum of the source's bits of a part of an op, which counts in the group's if the op is owned.
 */
void dray__transfer_own(dray__transfer *transfer, const dray__op *op, const dray_copy *copy,
                        uint64_t sum);
/* Sums of such bits, taken elsewhere. */
void dray__transfer_add(dray__transfer *transfer, uint32_t tensor,
                        const struct dray__tensor_sum *sum);
/* The sum of what lies at the destination of a copy now. Of a GPU's memory that cannot be read any
 * more: none that anything else has. */
uint64_t dray__transfer_read_back(const dray__transfer *transfer, const dray_region *region,
                                  const dray_copy *copy);
/* Of a part of an op that was moved: the sums of what was read, as the source has it, and of what
 * was meant to be written. */
void dray__transfer_written(dray__transfer *transfer, const dray__op *op, const dray_copy *copy,
                            uint64_t read, uint64_t written);
/* It is in its place: reads it back. counts: what lies there is also what was meant,
 * and what the source has; nothing else said so. */
void dray__transfer_arrived(dray__transfer *transfer, const dray__op *op, const dray_copy *copy,
                            bool counts);

/* Slices on their way from one region. */
enum { DRAY__BATCH = 64 };
typedef struct dray__batch {
    uint32_t count;
    const dray__op *ops[DRAY__BATCH];
    dray_copy copies[DRAY__BATCH];                    /* from where they lie */
    uint64_t read[DRAY__BATCH], written[DRAY__BATCH]; /* sums that the mover took */
    void *scratch;                                    /* of dray__move_options; NULL: none */
    size_t scratch_bytes;
} dray__batch;

/* Moves `count` slices to one region, with sums or without. */
int dray__batch_move(dray__transfer *transfer, dray__batch *batch, uint32_t first, uint32_t count,
                     const dray_region *from, dray_region *to, bool sums, dray_error *error);
/* Does the region hold what was written? DRAY_ECHECKSUM. */
int dray__batch_compare(const dray__transfer *transfer, const dray__batch *batch,
                        const dray_region *to, dray_error *error);
/* With the sums that the mover took. */
void dray__batch_written(dray__transfer *transfer, const dray__batch *batch);
void dray__batch_arrived(dray__transfer *transfer, const dray__batch *batch, bool counts);
