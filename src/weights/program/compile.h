/* What the files that compile programs share (program.h). */
#pragma once

#include "weights/program/program.h"

enum { DRAY__BUCKET_ALIGN = 256 };

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
        void *work; /* items, quants, deltas: what a job is made of (cuda.h) */
        dray__entry *entries;
        uint64_t count, capacity;
    } lists[DRAY__DRAFT_LISTS];
} dray__draft;

/* What fills a GPU's bucket: one half, while the other is emptied. */
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
    dray__local **held; /* one a source */
    uint32_t
        *most_numbers; /* NVFP4: by tensor, of those that share a global scale: 1 + its number */
    dray__filling filling; /* of the bucket */
    /* Rounds, in each of which this rank reads from one other GPU. */
    uint32_t turn;    /* the source of the first */
    uint32_t rounds;  /* 0: all at once */
    uint64_t *pushed; /* destination bytes by source, of what sources push; NULL: nothing yet */
} dray__compiler;

/* The draft for this GPU, these sums and this step; NULL: out of memory. */
dray__draft *dray__draft_of(dray__compiler *c, dray__cuda_device *device, uint32_t sums,
                            uint32_t step);
/* Adds an item to what the job does. false: out of memory, also where the draft is NULL. */
bool dray__draft_push(dray__draft *draft, const dray__cuda_item *item, const dray__entry *entry);
/* The same of any list. */
bool dray__draft_add(dray__draft *draft, enum dray__draft_list list, const void *work,
                     const dray__entry *entry);

/* Where an op leads from and to, and who moves it. */
typedef struct dray__ends {
    const dray_region *from, *to;
    dray__cuda_device *device; /* the destination's */
    uint32_t lane;
} dray__ends;

int dray__ends_of(const dray__compiler *c, const dray_copy *copy, const dray_region *to,
                  dray__ends *out, dray_error *error);
/* A copy of (a part of) an op, moved by the destination's GPU with what verification asks for.
 * false: out of memory. */
bool dray__draft_move(dray__compiler *c, const dray__ends *ends, const dray_copy *copy,
                      const dray__op *op, uint32_t step, uint32_t phase);
/* The GPU that has the source's memory, if it is another one, is seen here, and reaches both ends.
 * NULL: not so. */
dray__cuda_device *dray__pusher_of(const dray__ends *ends);
/* Reads back, by the destination's GPU, what lies at a copy's destination after a step. */
bool dray__draft_read_back(dray__compiler *c, const dray__ends *ends, const dray_copy *copy,
                           uint32_t block, uint32_t step);
/* Is there nothing that the sum of what the op reads would be compared with? */
bool dray__op_alone(const dray__transfer *transfer, const dray__op *op);
/* Reads the source again, where the entry says so, by another kernel than the one that moves. */
bool dray__draft_read_again(dray__compiler *c, dray__cuda_device *device,
                            const dray__cuda_item *item, const dray__entry *moved, uint32_t step);
/* The bucket of a device, opened when it is first needed. */
int dray__bucket_of(dray__compiler *c, dray__cuda_device *device, dray__filling **out,
                    dray_error *error);

/* An empty program of these ops; NULL: out of memory. */
dray__program *dray__program_new(const dray__transfer *transfer, const uint64_t *ops,
                                 uint64_t count, uint64_t ceiling);
/* Is it the program of these ops, for this transfer? */
bool dray__program_fits(const dray__program *program, const dray__transfer *transfer,
                        const uint64_t *ops, uint64_t count, uint64_t ceiling);
/* The drafts become its jobs. */
int dray__program_finish(dray__compiler *c, dray_error *error);
void dray__drafts_free(dray__compiler *c);
void dray__program_free(dray__program *program); /* NULL is fine */

/* compile_quant.c: of the transforms that quantise. */
bool dray__transform_fits(const dray__transfer *transfer, const dray_transform *transform);
int dray__compile_transform(dray__compiler *c, uint64_t index, dray_error *error);

/* compile_dequant.c: of those that make floats. */
bool dray__dequant_fits(const dray__transfer *transfer, uint64_t index);
int dray__compile_dequant(dray__compiler *c, uint64_t index, dray_error *error);
/* compile_patch.c: of all ops, by deltas. */
int dray__compile_patches(dray__compiler *c, dray_error *error);

/* The source region of an op. */
const dray_region *dray__source_region(const dray__compiler *c, const dray_copy *copy);
