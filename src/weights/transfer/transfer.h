/* src/weights/transfer/: one update's copies, from the plan to the sums that are voted on. ops.c
 * cuts the plan's copies along the blocks of this rank, cohort.c divides them among ranks that
 * update together, and transfer.c gives each to a pair of a source and a placement and steps the
 * pairs in turn. books.c has the expected and the found sums. */

/* An update's bytes: sources read them, placements write them to the destination, and the books
 * show whether they are right.
 *
 * A source is one way to reach the bytes of an op: mapped memory, files, data servers, GPUs. A
 * placement is one way to write it: copied or cast, patched by changes, quantised or dequantised.
 * Each op goes to the first pair of transfer.c's table in which the placement takes it and the
 * source reaches it in that form. The ops of a pair, and its state, are a route, which is stepped
 * without ever waiting, and enters its results in the books: `expected` and `found` by destination
 * block, and the source's bits by tensor, of the elements that this rank owns in its group.
 *
 * The division of ops is made once, and kept with the sources until the plan or the options change.
 * A new source is one file with one struct dray__source_type, and a line of transfer.c's table. */
#pragma once

#include "base/waker.h"
#include "weights/internal.h"

/* The ops that a placement takes, from any source. */
typedef struct dray__placement {
    const char *name;
    bool (*takes)(const dray__transfer *transfer, const dray__op *op);
} dray__placement;

/* patch: writes only the changes since the held version. convert: quantises or dequantises, from
 * the staging in which another transfer gathers the elements. compiled: programs of GPUs do
 * everything. */
extern const dray__placement dray__place_copy, dray__place_patch, dray__place_convert,
    dray__place_compiled;

/* The running work of a pair of source and placement. */
typedef struct dray__route {
    dray__transfer *transfer;
    const struct dray__source_type *source; /* NULL when it has no ops */
    const dray__placement *placement;
    const uint64_t *ops; /* indices into the sources' ops, in the plan's order */
    uint64_t count;
    uint64_t ceiling; /* the bytes of staging that it may use; the strategy direct has none */
    /* The source's: */
    void *state;
    /* Readable when a route that waits can go on; set from `open` on; -1 when it never waits. */
    int fd;
    uint64_t held; /* the bytes of staging, at most */
    bool waits;    /* nothing can be done before fd is readable; false before each step */
    bool done;
} dray__route;

typedef struct dray__source_type {
    const char *name;
    size_t bytes; /* the size of a route's state, which is zeroed before `open` */
    /* Returns true when the source can bring the elements that the op reads, in the form that the
     * placement wants. */
    bool (*reaches)(const dray__transfer *transfer, const dray__op *op,
                    const dray__placement *placement);
    int (*open)(dray__route *route, dray_error *error); /* `close` is called also when this fails */
    /* Works until about until_ns. Returns DRAY_OK when all its ops are done, or DRAY_EAGAIN when
     * more is left. */
    int (*step)(dray__route *route, int64_t until_ns, dray_error *error);
    /* Adds the figures that are known only at the end; the others are in the transfer's `told`.
     * NULL when there are none. */
    void (*report)(const void *state, dray_update_report *report);
    /* Adds the member that was late to an error at the deadline. NULL when there is nothing to
     * add. */
    void (*explain)(const void *state, dray_error *error);
    void (*close)(void *state); /* frees the members of the state */
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
    struct dray__deal *own; /* the ops' division among ranks, if it is of this round only */
    /* For a load_weights engine: the ops by round. The rounds are transferred one after the
     * other. */
    uint64_t *by_round, *round_first; /* NULL for all ops at once */
    uint32_t round;
    bool loading;            /* the round's bucket is allocated */
    uint64_t held_most;      /* the most that routes of finished rounds held */
    dray_update_report told; /* the figures that routes add to a report */
    dray__route *routes;     /* one for each pair of transfer.c's table */
    uint32_t route_count;
    dray__waker waker; /* readable when a waiting route can go on; closed when no route ever
                        * waits */
    uint32_t turn;
    /* The sources whose fence has not passed. Nothing is moved before. NULL when there are none. */
    bool *held_by;
    /* `held_last`: the source whose fence passed last, or has not passed yet. */
    uint32_t held_count, held_last;
    int64_t opened_ns, held_ns;

    /* the books */
    struct dray__tensor_sum *tensors;
    uint64_t *expected, *found; /* one a destination block */
    uint64_t bytes;
    uint64_t misplaced; /* entries of deltas on GPUs that point outside their block */
    int64_t move_ns, verify_ns;
    int64_t device_ns; /* of move_ns, by the clocks of GPUs */
};

/* Writes the name of a source and of its GPU to `out`. */
void dray__source_who(const dray__source *source, char *out, size_t size);

/* patch.c: returns true when the source knows which of the op's elements changed since the version
 * that this rank holds. It is called only for tensors that are compared with the announced sums at
 * the end, as nothing else shows whether the memory held the delta's base. */
bool dray__delta_offered(const dray__transfer *transfer, const dray__op *op);
/* The same for a checkpoint that is a delta on the version that this rank holds. */
bool dray__overlay_offered(const dray__transfer *transfer, const dray__op *op);
#define DRAY__DELTA_NO_BLOCK UINT32_MAX
/* Returns the source's block that holds everything that the op reads, or DRAY__DELTA_NO_BLOCK
 * when several blocks do. */
uint32_t dray__delta_block(const dray__transfer *transfer, const dray__op *op);

/* ---- the books ------------------------------------------------------------------------------- */

const dray_tensor_info *dray__transfer_tensor(const dray__transfer *transfer,
                                              const dray_copy *copy);
/* Returns the destination bytes of a copy. */
uint64_t dray__copy_bytes(const dray_copy *copy);
/* Adds the sum of the source's bits of a part of an op. It counts in the group's sum if this
 * rank owns the op. */
void dray__transfer_own(dray__transfer *transfer, const dray__op *op, const dray_copy *copy,
                        uint64_t sum);
/* Adds sums of such bits that were computed elsewhere. */
void dray__transfer_add(dray__transfer *transfer, uint32_t tensor,
                        const struct dray__tensor_sum *sum);
/* Sums the present bytes at the destinations of copies, which are all in one region. For a GPU's
 * memory that can no longer be read, the sums are values that no other memory has. */
void dray__transfer_read_back(const dray__transfer *transfer, const dray_region *region,
                              const dray_copy *copies, uint32_t count, uint64_t *sums);
/* For a part of an op that was moved: the sums of the source's elements that were read, and of
 * the elements that were to be written. */
void dray__transfer_written(dray__transfer *transfer, const dray__op *op, const dray_copy *copy,
                            uint64_t read, uint64_t written);
/* For a part that is in its place: `sum` is that of the bytes that were read back there. */
void dray__transfer_found(dray__transfer *transfer, const dray__op *op, const dray_copy *copy,
                          uint64_t sum);
/* Reads back a part that is in its place. `counts`: its sum counts as the expected one and as the
 * source's, too, because there is no other. */
void dray__transfer_arrived(dray__transfer *transfer, const dray__op *op, const dray_copy *copy,
                            bool counts);

/* Slices that are moved from one region. */
enum { DRAY__BATCH = 64 };
typedef struct dray__batch {
    uint32_t count;
    const dray__op *ops[DRAY__BATCH];
    dray_copy copies[DRAY__BATCH];                    /* the copies, from the places of the
                                                       * slices */
    uint64_t read[DRAY__BATCH], written[DRAY__BATCH]; /* the sums that the mover computed */
    void *scratch;                                    /* as in dray__move_options; NULL when there
                                                       * is none */
    size_t scratch_bytes;
} dray__batch;

/* Moves `count` slices to one region, with or without sums. */
int dray__batch_move(dray__transfer *transfer, dray__batch *batch, uint32_t first, uint32_t count,
                     const dray_region *from, dray_region *to, bool sums, dray_error *error);
/* Checks that the region holds the written bytes. Fails with DRAY_ECHECKSUM. */
int dray__batch_compare(const dray__transfer *transfer, const dray__batch *batch,
                        const dray_region *to, dray_error *error);
/* The same, with the sums that the mover computed. */
void dray__batch_written(dray__transfer *transfer, const dray__batch *batch);
void dray__batch_arrived(dray__transfer *transfer, const dray__batch *batch, bool counts);
