/* Declarations that the C files of src/mover/cuda/ share. */
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

/* Compiles the kernels' source with NVRTC for an architecture (90: sm_90). The caller frees *out.
 */
int dray__gpu_cubin(int arch, void **out, size_t *size, dray_error *error);
/* Loads the kernels' machine code for a GPU: the one built into the library, else the one cached on
 * disk, else NVRTC compiles it. The context must be current. */
int dray__gpu_module(const dray__cuda *cuda, const dray__cuda_device *device, CUmodule *out,
                     dray_error *error);

/* ---- cuda_gpu.c: state of a GPU that all jobs share, kept until the process ends ------------
 */

/* Memory of the GPU, or pinned memory of the host. Freeing it would wait for all work of the GPU,
 * of other jobs too. So it is kept, and given to the next job. */
typedef struct dray__gpu_memory {
    CUdeviceptr device;
    uint8_t *host; /* NULL for memory of the GPU */
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
    /* For calls without a job, one at a time, under bounce_lock. */
    pthread_mutex_t bounce_lock;
    CUstream bounce_stream;
    dray__gpu_memory *bounce, *bounce_memory; /* the host's, the GPU's */
} dray__gpu;

/* Returns the GPU's state, with its kernels loaded. The first call on a GPU may take seconds. The
 * context must be current. */
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
    uint64_t bytes;  /* written, or read where nothing is written; slow kinds are weighted higher */
    uint32_t shared; /* bytes of shared memory */
    bool back;       /* reads back bytes that copy engines wrote, */
    uint64_t behind; /* after so many of the runs have ended */
} dray__gpu_step;

/* A run of bytes that copy engines move. */
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
    dray__gpu_run *runs; /* phase by phase, lanes interleaved */
    uint64_t piece_count, quant_count, delta_count, tile_count, step_count, run_count, most_count;
    uint64_t given_most; /* the first ones of most_count, which dray__cuda_job_set_most sets */
    uint32_t phases;
    uint64_t kernel_bytes, engine_bytes;
} dray__gpu_program;

int dray__gpu_compile(const dray_layout *layout, const dray__cuda_item *items, uint64_t count,
                      const dray__cuda_job_options *options, dray__gpu_program *out,
                      dray_error *error);
void dray__gpu_program_free(dray__gpu_program *program);
/* cuda_delta.c: converts a delta to the kernels' form. Returns DRAY_EINVALID for a bad one. */
int dray__gpu_delta_of(const dray__cuda_delta *delta, uint32_t sum, dray__gpu_delta *out,
                       dray_error *error);
/* Makes the one to three pieces of an item that was checked. Returns how many. */
uint32_t dray__gpu_pieces_of(const dray__cuda_item *item, const dray_tensor_info *tensor,
                             uint64_t tile_bytes, dray__gpu_piece out[3], int kernels[3]);
uint64_t dray__gpu_tiles_of(const dray__gpu_piece *piece);
/* Checks an item. Returns DRAY_EINVALID or DRAY_EDTYPE for a bad one. */
int dray__gpu_check(const dray__cuda_item *item, const dray_tensor_info *tensor, bool sums,
                    uint64_t number, dray_error *error);
