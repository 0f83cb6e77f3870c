/* src/weights/program/: copies between memory that GPUs reach. program.c compiles an update's
 * operations into jobs of the GPUs, with a file for each kind of work: compile_patch.c applies
 * deltas, compile_quant.c quantises, compile_dequant.c dequantises.
 * program_run.c starts the jobs again in every update and reads back their sums. */

/* A program is an update's ops between memory that GPUs reach, as jobs of these GPUs
 * (mover/cuda/cuda.h). It is compiled for the addresses of the ops, run in every update, and kept
 * with the sources until the plan, a region or the options of the update change.
 *
 * The destination's GPU pulls the elements. When an op makes them smaller (a cast, quantisation)
 * and this process sees the source's GPU, that GPU pushes them instead, so that the link carries
 * the smaller result. The sources then push one after the other, in several steps; each rank begins
 * with another source. In each step the destination's GPU reads back the elements of the step
 * before. */
#pragma once

#include "mover/cuda/cuda.h"
#include "weights/transfer/transfer.h"

/* How an item's sums are entered in the books. */
enum dray__entry_kind {
    DRAY__ENTRY_UNCHECKED,
    DRAY__ENTRY_READ_BACK,   /* moved unchanged: the sum of the destination counts for all */
    DRAY__ENTRY_SUMMED,      /* read, written and read back, each with its sum */
    DRAY__ENTRY_SENT,        /* read and written: into a bucket, or by another GPU */
    DRAY__ENTRY_DRAIN,       /* out of the bucket, to the destination */
    DRAY__ENTRY_ARRIVED,     /* written by another GPU, and read back */
    DRAY__ENTRY_AGAIN,       /* the source, read a second time */
    DRAY__ENTRY_QUANTISED,   /* elements and scales written */
    DRAY__ENTRY_REQUANTISED, /* as QUANTISED, of elements that were gathered first */
    DRAY__ENTRY_GROUPED,     /* elements, scales of groups and their zero points written */
    DRAY__ENTRY_REGROUPED,   /* as GROUPED, of elements that were gathered first */
    DRAY__ENTRY_MOST,        /* the largest magnitude: scale_block is its number */
    DRAY__ENTRY_DEQUANTISED, /* as SUMMED, with the sum of the scales that were used */
    DRAY__ENTRY_SCALES,      /* these scales, read separately */
    DRAY__ENTRY_PATCHED,     /* changed by a delta */
    DRAY__ENTRY_LIES /* a whole block read back: the sum of the destination counts for all */
};

/* Everything that is needed to enter an item's sums in the books. */
typedef struct dray__entry {
    uint64_t elements;
    uint32_t block, scale_block, second_block; /* of the destination */
    uint32_t tensor;
    uint8_t dtype; /* the dtype of the source */
    uint8_t kind;
    bool owned; /* the sum of the source's elements counts in the group's sum */
    bool twice; /* the source is read again to compare, because no other sum checks it */
} dray__entry;

typedef struct dray__program_job {
    dray__cuda_device *device; /* the GPU that runs it */
    dray__cuda_job *job;
    dray__entry *entries; /* one for each item, then one for each box that is quantised */
    uint64_t count;
    uint32_t step; /* it begins when the jobs of lower steps are done */
    bool running;
} dray__program_job;

typedef struct dray__program {
    struct dray__program *next;
    dray__program_job *jobs;
    uint32_t job_count, steps;
    uint32_t *most, most_count; /* NVFP4: of tensors that share a global scale, as bits of f32 */
    uint64_t bytes;             /* destination bytes of one run */
    uint64_t held_bytes;        /* staging on GPUs */
    dray__waker waker;          /* wakes when a job is to be polled, and at look_from_ns */
    /* The time in which the current step will probably end, from the duration of the last run. In
     * this time the jobs are polled without sleeping, because waking takes longer. 0 when not
     * known. */
    int64_t look_from_ns, look_until_ns;
    /* the arguments for which it was compiled */
    uint64_t *ops, count, ceiling;
    uint64_t *serials; /* of the destination's regions */
    uint32_t serial_count;
    int32_t strategy, copy_engines;
    uint32_t ctas;
    bool verify, announced, patches;  /* patches: deltas are applied */
    bool paced;                       /* spread over a time (pace.c) */
    dray__cuda_device *bucket_device; /* NULL when it has no bucket */
    uint64_t bucket;                  /* its address */
} dray__program;

/* Returns true when one GPU of this process reaches both regions of the op, on this host. */
bool dray__program_takes(const dray__transfer *transfer, const dray__op *op);
/* compile_patch.c: returns true when the op's destination, in GPU memory, is better changed by its
 * source's delta than copied. */
bool dray__patch_takes(const dray__transfer *transfer, const dray__op *op);
/* Returns the program of a route's ops, from an earlier update or compiled now. The sources own
 * it. */
int dray__program_find(const dray__route *route, dray__program **out, dray_error *error);
/* program_run.c: begins the jobs of a step. */
int dray__program_start(const dray__program *program, uint32_t step, dray_error *error);
/* Begins the jobs of a step so that they run after those of step `before`, which are running. */
int dray__program_follow(const dray__program *program, uint32_t step, uint32_t before,
                         dray_error *error);
/* Returns the longest duration of the step's jobs in their last run, by the GPUs' clocks; 0 when
 * there was no run. */
int64_t dray__program_device_ns(const dray__program *program, uint32_t step);
/* Sets look_from_ns and look_until_ns for the step that was just started. */
void dray__program_expect(dray__program *program, uint32_t step, int64_t now_ns);
/* Returns true within that time, in which the caller should not sleep. */
bool dray__program_ends_soon(const dray__program *program, int64_t now_ns);
void dray__program_expect_nothing(dray__program *program); /* the step has ended */

/* ---- pace.c: launches of a few MiB, spread over a time, that leave most of the GPU to others */
/* The thread blocks of a launch, unless the caller gives a number. On H200, steps that read memory
 * took 2.2 % longer beside 64 of them, 4.6 % beside 16, and 4.8 % beside the number that moves
 * fastest. */
enum { DRAY__PACE_CTAS = 64 };
/* Returns the bytes of a launch, for a program that writes `bytes`. */
uint64_t dray__pace_bytes(uint64_t bytes);
/* Returns how many of `count` launches may have begun after elapsed_ns, when within_ns is the time
 * for all: the first at once, the others evenly over 15 / 16 of the time. */
uint64_t dray__pace_due(uint64_t count, int64_t within_ns, int64_t elapsed_ns);
/* Returns when launch number `index` is due, in ns after the start. */
int64_t dray__pace_at(uint64_t count, int64_t within_ns, uint64_t index);
/* Starts the launches of a step that are due, and sets the waker for the next one. *released: the
 * launches of all steps so far. */
int dray__program_keep_pace(const dray__program *program, uint32_t step, int64_t within_ns,
                            int64_t began_ns, uint64_t *released, dray_error *error);

/* Returns DRAY_EAGAIN until all jobs of the step are done. */
int dray__program_poll(const dray__program *program, uint32_t step, dray_error *error);
/* Takes the largest magnitudes that a step has found, for the steps after it. The caller that
 * starts the first step sets them to 0. */
void dray__program_take_most(const dray__program *program, uint32_t step);
/* Enters the step's sums in the books. */
void dray__program_enter(dray__transfer *transfer, const dray__program *program, uint32_t step);
/* Stops the running jobs. Jobs look at their abort word between tiles, so that this takes
 * milliseconds. */
void dray__program_stop(const dray__program *program);
