/* The structures and functions of the files that compile programs (program.h). */
#pragma once

#include "weights/program/program.h"

enum { DRAY__BUCKET_ALIGN = 256 };

/* Cells of more bytes, as f32, are not gathered. Half of a bucket always has room for one. */
#define DRAY__GATHERED_CELL ((uint64_t)64 << 10)

enum dray__draft_list {
    DRAY__DRAFT_ITEMS,
    DRAY__DRAFT_QUANTS,
    DRAY__DRAFT_DELTAS,
    DRAY__DRAFT_LISTS
};

/* One job in the making. */
typedef struct dray__draft {
    dray__cuda_device *device;
    uint32_t sums, step;
    struct {
        void *work; /* the job's items, quants or deltas (cuda.h) */
        dray__entry *entries;
        uint64_t count, capacity;
    } lists[DRAY__DRAFT_LISTS];
} dray__draft;

/* The filling of a GPU's bucket: one half is filled while the other half is emptied. */
typedef struct dray__filling {
    dray__cuda_device *device;
    uint64_t address, half, used;
    uint32_t group, tensor; /* the phase in which the half is filled */
} dray__filling;

typedef struct dray__compiler {
    const dray__transfer *transfer;
    dray__program *program;
    dray__draft *drafts;
    uint32_t count;
    uint64_t capacity;
    dray__local **held; /* one for each source */
    /* NVFP4: [tensor] 1 + the number of the global scale that it shares with other tensors. */
    uint32_t *most_numbers;
    dray__filling filling; /* of the bucket */
    /* Rounds, in each of which this rank reads from one other GPU. */
    uint32_t turn;    /* the source of the first round */
    uint32_t rounds;  /* 0 when all sources are read at once */
    uint64_t *pushed; /* [source] the destination bytes that it pushes; NULL when there are none so
                       * far */
} dray__compiler;

/* The draft for this GPU, these sums and this step; NULL when out of memory. */
dray__draft *dray__draft_of(dray__compiler *c, dray__cuda_device *device, uint32_t sums,
                            uint32_t step);
/* Adds an item to the draft. Returns false when memory runs out, or the draft is NULL. */
bool dray__draft_push(dray__draft *draft, const dray__cuda_item *item, const dray__entry *entry);
/* Does the same for any list of the draft. */
bool dray__draft_add(dray__draft *draft, enum dray__draft_list list, const void *work,
                     const dray__entry *entry);

/* The two regions of an op, and the GPU that moves it. */
typedef struct dray__ends {
    const dray_region *from, *to;
    dray__cuda_device *device; /* the destination's */
    uint32_t lane;
} dray__ends;

int dray__ends_of(const dray__compiler *c, const dray_copy *copy, const dray_region *to,
                  dray__ends *out, dray_error *error);
/* Adds a copy of (a part of) an op, which the destination's GPU moves, with the sums that
 * verification needs. Returns false when memory runs out. */
bool dray__draft_move(dray__compiler *c, const dray__ends *ends, const dray_copy *copy,
                      const dray__op *op, uint32_t step, uint32_t phase);
/* Returns the GPU of the source's memory, if it is another GPU that this process sees and that
 * reaches both ends; otherwise NULL. */
dray__cuda_device *dray__pusher_of(const dray__ends *ends);
/* Adds an item with which the destination's GPU reads a copy's destination back after a step. */
bool dray__draft_read_back(dray__compiler *c, const dray__ends *ends, const dray_copy *copy,
                           uint32_t block, uint32_t step);
/* Returns true when there is no other sum to compare the sum of the op's source with. */
bool dray__op_alone(const dray__transfer *transfer, const dray__op *op);
/* If the entry has `twice`, adds an item that reads the source again, by another kernel than the
 * one that moves it. */
bool dray__draft_read_again(dray__compiler *c, dray__cuda_device *device,
                            const dray__cuda_item *item, const dray__entry *moved, uint32_t step);
/* Returns the bucket of a device, which is opened when it is first needed. */
int dray__bucket_of(dray__compiler *c, dray__cuda_device *device, dray__filling **out,
                    dray_error *error);

/* Returns an empty program of these ops; NULL when out of memory. */
dray__program *dray__program_new(const dray__transfer *transfer, const uint64_t *ops,
                                 uint64_t count, uint64_t ceiling);
/* Returns true when the program was compiled for these ops and this transfer's options. */
bool dray__program_fits(const dray__program *program, const dray__transfer *transfer,
                        const uint64_t *ops, uint64_t count, uint64_t ceiling);
/* Makes the jobs of the program from the drafts. */
int dray__program_finish(dray__compiler *c, dray_error *error);
void dray__drafts_free(dray__compiler *c);
void dray__program_free(dray__program *program); /* NULL is fine */

/* compile_quant.c: transforms that quantise */
bool dray__transform_fits(const dray__transfer *transfer, const dray_transform *transform);
int dray__compile_transform(dray__compiler *c, uint64_t index, dray_error *error);

/* compile_dequant.c: transforms that dequantise */
bool dray__dequant_fits(const dray__transfer *transfer, uint64_t index);
int dray__compile_dequant(dray__compiler *c, uint64_t index, dray_error *error);
/* compile_patch.c: ops that apply deltas */
int dray__compile_patches(dray__compiler *c, dray_error *error);

/* Returns the source region of an op. */
const dray_region *dray__source_region(const dray__compiler *c, const dray_copy *copy);
