/* What the files src/mover/cuda*.c share. */
#pragma once

#include "mover/cuda/cuda.h"
#include "mover/cuda/cuda_kernels.h"

#include <pthread.h>

/* ---- cuda_compile.c --------------------------------------------------------------------------
 */

enum dray__gpu_kernel {
#define XX(name) DRAY__GPU_##name,
    DRAY__GPU_KERNELS(XX)
#undef XX
        DRAY__GPU_KERNEL_COUNT
};

/* What NVRTC makes of the source for an architecture (90); the caller frees it. */
int dray__gpu_cubin(int arch, void **out, size_t *size, dray_error *error);
/* The kernels' machine code for a GPU: what was built in, what was kept on disk, or what NVRTC
 * makes of the source. The context is current. */
int dray__gpu_module(const dray__cuda *cuda, const dray__cuda_device *device, CUmodule *out,
                     dray_error *error);

/* ---- cuda_gpu.c: what a GPU needs for any job, kept for the life of the process ------------
 */

/* Memory of the GPU, or of the host where the GPU reaches it. Freeing either would wait for all
 * that the GPU does, whoever asked for it: it is kept for the next one. */
typedef struct dray__gpu_memory {
    CUdeviceptr device;
    uint8_t *host; /* NULL: the GPU's own */
    uint64_t bytes;
    struct dray__gpu_memory *next;
} dray__gpu_memory;

typedef struct dray__gpu {
    const dray__cuda *cuda;
    dray__cuda_device *device;
    CUfunction kernels[DRAY__GPU_KERNEL_COUNT];
    uint32_t blocks[DRAY__GPU_KERNEL_COUNT]; /* that fit the GPU at once */
    pthread_mutex_t lock;
    dray__gpu_memory *spare[2]; /* the GPU's, the host's */
    /* For one thing at once, under bounce_lock. */
    pthread_mutex_t bounce_lock;
    CUstream bounce_stream;
    dray__gpu_memory *bounce, *bounce_memory; /* the host's, the GPU's */
} dray__gpu;

/* Ready for jobs. The first call on a GPU may take seconds. The context is current. */
int dray__gpu_get(dray__cuda_device *device, dray__gpu **out, dray_error *error);
int dray__gpu_take(dray__gpu *gpu, uint64_t bytes, bool host, dray__gpu_memory **out,
                   dray_error *error);
void dray__gpu_give(dray__gpu *gpu, dray__gpu_memory *memory); /* NULL is fine */
int dray__gpu_launch_kernel(const dray__gpu *gpu, int kernel, uint32_t blocks, uint32_t shared,
                            const dray__gpu_launch *launch, CUstream stream, dray_error *error);

/* ---- cuda_pieces.c: items become pieces, pieces tiles -----------------------------------------
 */

/* Tiles of one kernel that are launched together. */
typedef struct dray__gpu_step {
    uint32_t phase;
    int kernel;
    uint64_t first, count; /* tiles */
    uint64_t bytes;        /* written, or read where nothing is; what is slow counts for more */
    uint32_t shared;       /* bytes of shared memory */
    bool back;             /* reads back what copy engines wrote, */
    uint64_t behind;       /* once so many of the runs have ended */
} dray__gpu_step;

/* What copy engines move. */
typedef struct dray__gpu_run {
    uint64_t source, destination, bytes;
    uint64_t number; /* in the order in which they were given */
    uint32_t phase, lane;
} dray__gpu_run;

typedef struct dray__gpu_program {
    dray__gpu_piece *pieces;
    dray__gpu_quant *quants;
    dray__gpu_delta *deltas;
    dray__gpu_tile *tiles;
    dray__gpu_step *steps;
    dray__gpu_run *runs; /* phase by phase, their lanes taking turns */
    uint64_t piece_count, quant_count, delta_count, tile_count, step_count, run_count, most_count;
    uint64_t given_most; /* of most_count, the first ones: given by dray__cuda_job_set_most */
    uint32_t phases;
    uint64_t kernel_bytes, engine_bytes;
} dray__gpu_program;

int dray__gpu_compile(const dray_layout *layout, const dray__cuda_item *items, uint64_t count,
                      const dray__cuda_job_options *options, dray__gpu_program *out,
                      dray_error *error);
void dray__gpu_program_free(dray__gpu_program *program);
/* cuda_delta.c: a delta as kernels have it. DRAY_EINVALID. */
int dray__gpu_delta_of(const dray__cuda_delta *delta, uint32_t sum, dray__gpu_delta *out,
                       dray_error *error);
/* One piece per item at most three; count says how many. Of an item that was checked. */
uint32_t dray__gpu_pieces_of(const dray__cuda_item *item, const dray_tensor_info *tensor,
                             uint64_t tile_bytes, dray__gpu_piece out[3], int kernels[3]);
uint64_t dray__gpu_tiles_of(const dray__gpu_piece *piece);
/* DRAY_EINVALID, DRAY_EDTYPE. */
int dray__gpu_check(const dray__cuda_item *item, const dray_tensor_info *tensor, bool sums,
                    uint64_t number, dray_error *error);
