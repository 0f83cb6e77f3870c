/* src/weights/program/: copies between memory that GPUs reach. program.c compiles an update's
 * operations into jobs of the GPUs, with a file for each kind of work: compile_patch.c applies
 * deltas, compile_quant.c quantises, compile_dequant.c makes floats of quantised tensors.
 * program_run.c starts the jobs again in every update and reads back their sums. */

/* An update's ops between memory that GPUs reach, as jobs of theirs (mover/cuda/cuda.h): compiled
 * for the addresses that they lead from and to, replayed in every update, and kept with the sources
 * until the plan, a region, or what is asked for changes.
 *
 * The destination's GPU pulls. What becomes smaller on the way (a cast, quantisation) is pushed by
 * the source's GPU, where this process sees it, so that the link carries the result: one source
 * after the other, each rank beginning with another one, in several steps, and the destination's
 * GPU reads back what came in the step before. */
#pragma once

#include "mover/cuda/cuda.h"
#include "weights/transfer/transfer.h"

/* What an item's sums are to the books. */
enum dray__entry_kind {
    DRAY__ENTRY_UNCHECKED,
    DRAY__ENTRY_READ_BACK,   /* moved as it is: what lies there is what counts */
    DRAY__ENTRY_SUMMED,      /* read, written and read back, each with its sum */
    DRAY__ENTRY_SENT,        /* read and written: into a bucket, or by another GPU */
    DRAY__ENTRY_DRAIN,       /* out of the bucket, to the destination */
    DRAY__ENTRY_ARRIVED,     /* what another GPU wrote, read back */
    DRAY__ENTRY_AGAIN,       /* the source, read a second time */
    DRAY__ENTRY_QUANTISED,   /* elements and scales written */
    DRAY__ENTRY_REQUANTISED, /* the same of what was gathered */
    DRAY__ENTRY_GROUPED,     /* elements, scales of groups and their zero points written */
    DRAY__ENTRY_REGROUPED,   /* the same of what was gathered */
    DRAY__ENTRY_MOST,        /* the largest magnitude: scale_block is its number */
    DRAY__ENTRY_DEQUANTISED, /* as SUMMED; the scales that were used, too */
    DRAY__ENTRY_SCALES,      /* those, read by themselves */
    DRAY__ENTRY_PATCHED,     /* brought up to date by a delta */
    DRAY__ENTRY_LIES         /* read back as a whole: what lies there is what counts */
};

/* All that the books need, so that entering sums touches nothing else. */
typedef struct dray__entry {
    uint64_t elements;
    uint32_t block, scale_block, second_block; /* of the destination */
    uint32_t tensor;
    uint8_t dtype; /* of what is read */
    uint8_t kind;
    bool owned; /* the sum of what is read counts */
    bool twice; /* it counts nowhere else: the source is read a second time, to be compared */
} dray__entry;

typedef struct dray__program_job {
    dray__cuda_device *device; /* that carries it out */
    dray__cuda_job *job;
    dray__entry *entries; /* one an item, then one a box that is quantised */
    uint64_t count;
    uint32_t step; /* begins when the jobs of lower steps are done */
    bool running;
} dray__program_job;

typedef struct dray__program {
    struct dray__program *next;
    dray__program_job *jobs;
    uint32_t job_count, steps;
    uint32_t *most, most_count; /* NVFP4: of tensors that share a global scale, as bits of f32 */
    uint64_t bytes;             /* destination bytes of one run */
    uint64_t held_bytes;        /* staging on GPUs */
    dray__waker waker;          /* when one of the jobs is worth a poll, and at look_from */
    /* When the step that runs will probably end, as the last one did: being woken takes longer than
     * looking. 0: not known. */
    int64_t look_from_ns, look_until_ns;
    /* what it was compiled for */
    uint64_t *ops, count, ceiling;
    uint64_t *serials; /* of the destination's regions */
    uint32_t serial_count;
    int32_t strategy, copy_engines;
    uint32_t ctas;
    bool verify, announced, patches;  /* patches: by deltas */
    bool paced;                       /* spread over a time (pace.c) */
    dray__cuda_device *bucket_device; /* NULL: it has no bucket */
    uint64_t bucket;                  /* its address */
} dray__program;

/* Is the op between two regions of this host that one GPU of this process reaches? */
bool dray__program_takes(const dray__transfer *transfer, const dray__op *op);
/* compile_patch.c: is it worth while to bring the op's destination, GPU memory, up to date by its
 * source's delta? */
bool dray__patch_takes(const dray__transfer *transfer, const dray__op *op);
/* The program of a lane's ops, as of an earlier update or made now. It is the sources'. */
int dray__program_find(const dray__lane *lane, dray__program **out, dray_error *error);
/* program_run.c: begins the jobs of a step. */
int dray__program_start(const dray__program *program, uint32_t step, dray_error *error);
/* The same, behind what those of another step, which are under way, move. */
int dray__program_follow(const dray__program *program, uint32_t step, uint32_t before,
                         dray_error *error);
/* GPUs' own clocks say how long the step's jobs took the last time, the one that took the longest;
 * 0: there was none. */
int64_t dray__program_device_ns(const dray__program *program, uint32_t step);
/* Of the step that was just started: when its end is to be looked for. */
void dray__program_expect(dray__program *program, uint32_t step, int64_t now_ns);
/* It is: nobody should sleep now. */
bool dray__program_ends_soon(const dray__program *program, int64_t now_ns);
void dray__program_expect_nothing(dray__program *program); /* it ended */
/* ---- pace.c: what moves is cut into launches of a few MiB that are spread over a time, so that
 * whatever else the GPU does has it nearly to itself */
/* Thread blocks of a launch, where nothing else is said: on H200 steps that read memory took 2.2 %
 * longer beside these, 4.8 % beside as many as pay, and 4.6 % beside 16. */
enum { DRAY__PACE_CTAS = 64 };
/* Bytes of a launch, of a program that writes so many. */
uint64_t dray__pace_bytes(uint64_t bytes);
/* How many of `count` launches may have begun by then, of a program that has within_ns for all: the
 * first at once, all others evenly over 15 / 16 of the time, the last after that at the latest. */
uint64_t dray__pace_due(uint64_t count, int64_t within_ns, int64_t elapsed_ns);
/* When launch number `index` is due. */
int64_t dray__pace_at(uint64_t count, int64_t within_ns, uint64_t index);
/* Gives the GPUs what is due of a step that was started, and sets the waker for the next launch.
 * *released: of all steps, launches so far. */
int dray__program_keep_pace(const dray__program *program, uint32_t step, int64_t within_ns,
                            int64_t began_ns, uint64_t *released, dray_error *error);

/* DRAY_EAGAIN until all jobs of the step are done. */
int dray__program_poll(const dray__program *program, uint32_t step, dray_error *error);
/* The largest magnitudes that a step found, for those behind it; whoever starts the first step sets
 * them to 0. */
void dray__program_take_most(const dray__program *program, uint32_t step);
/* What they found, into the books. */
void dray__program_enter(dray__transfer *transfer, const dray__program *program, uint32_t step);
/* Stops what is under way: jobs look at their abort word between tiles, this takes milliseconds. */
void dray__program_stop(const dray__program *program);
