/* src/mover/cuda/: copies that GPUs carry out. A list of rectangles is compiled into a job once
 * (cuda_program.c, cuda_pieces.c), and the job is started again for every update (cuda.c). The
 * kernels are one source for CUDA and for C (cuda_kernels.cu and the headers that it includes), so
 * that tests run them without a GPU; cuda_compile.c loads them or has them compiled. */

/* Movement on a GPU: a list of rectangles is compiled once into descriptors that stay in the GPU's
 * memory, and replayed with a few launches for every update, by kernels that process the rectangles
 * in tiles, and by copy engines where these are faster.
 *
 *     dray__cuda_job *job;
 *     rc = dray__cuda_job_new(device, layout, items, count, &options, &job, error);
 *     for each update:
 *         rc = dray__cuda_job_start(job, events, event_count, error);
 *         while ((rc = dray__cuda_job_poll(job, error)) == DRAY_EAGAIN)
 *             poll(dray__cuda_job_fd(job)) ...
 *         sums = dray__cuda_job_sums(job, DRAY__CUDA_SUM_BACK);
 *     dray__cuda_job_close(job);
 * Only wait, new and close wait for the GPU, and for their own streams alone; nothing synchronises
 * a device. A job is used by one thread at a time; different jobs may be used by different threads.
 */
#pragma once

#include "memory/cuda_library.h"
#include "memory/region.h"
#include "mover/kernels/checksum.h"

#include <dray/plan.h>
#include <stdbool.h>

typedef struct dray__cuda_job dray__cuda_job;

/* One rectangle. The copy's offsets and strides count from the two bases. Its region numbers and
 * `source` are ignored; `tensor` is needed for sums. */
typedef struct dray__cuda_item {
    dray_copy copy;
    uint64_t source_base, destination_base; /* addresses in the executing GPU's address space; with
                                               destination 0 the source is summed only */
    uint32_t lane;  /* items that are read over the same link have the same number; tiles of
                     * different  lanes are interleaved */
    uint32_t phase; /* begins when all items of lower phases are done */
    bool host;      /* one side is pinned host memory: copy engines move even short runs */
    bool near;      /* both sides are memory of the GPU that carries it out */
    const dray_tensor_info *of; /* the tensor, for sums; NULL: the layout's tensor copy.tensor */
} dray__cuda_item;

/* A box of a tensor that is quantised or dequantised (mover/kernels/quant.h has the arithmetic). To
 * QUANTISE, the box must consist of whole cells (cut short at the tensor's edge); to DEQUANTISE, it
 * may be any box. The source is read in place: once when a cell has at most DRAY__CUDA_CELL
 * elements, else twice. */
typedef struct dray__cuda_quant {
    int32_t kind;               /* dray_transform_kind */
    int32_t dtype, quant_dtype; /* of the float side and of the quantised side */
    int32_t scale_format;       /* dray_scale_format */
    uint32_t tensor, ndim;      /* the tensor's index in the layout; for sums */
    int64_t start[DRAY_MAX_DIMS], extent[DRAY_MAX_DIMS], cell[DRAY_MAX_DIMS]; /* as a transform's */
    uint64_t source, destination; /* addresses of the box's first element */
    int64_t source_stride[DRAY_MAX_DIMS], destination_stride[DRAY_MAX_DIMS]; /* bytes */
    uint64_t scales; /* address of the scale (F32) of the first cell that the box touches */
    int64_t scale_stride[DRAY_MAX_DIMS]; /* bytes, from cell to cell */
    uint32_t lane, phase;
    /* dray_quant_kind, for formats other than FP8 blocks with F32 scales. With DEEPGEMM, scales
     * are bytes, one for each row of a cell. With kinds from MXFP8 on, a cell is a group within one
     * row, with INT4_ZERO within eight rows. For those kinds the source's rows and the values may
     * have any strides; the first element and the first scale are aligned to their dtypes. */
    int32_t quant_kind;
    int32_t as;      /* NVFP4, INT4...: dtype in which scales are computed */
    uint64_t second; /* INT4_ZERO: address of the zero points */
    int64_t second_stride[DRAY_MAX_DIMS];
    uint32_t global; /* NVFP4: the index of its maximum in dray__cuda_job_set_most's array */
    /* With kind MOST, the largest magnitude of the box, as the bits of an f32, is returned as its
     * sum MOST. With kind GLOBAL, the global scale number `global` is written to `destination`, and
     * its checksum is the sum WRITTEN; such a box has no source and one element. */
} dray__cuda_quant;

enum { DRAY__CUDA_GLOBAL = 100 }; /* a kind beside dray_transform_kind's */
enum { DRAY__CUDA_CELL = 128 * 128 };
/* Can groups of so many elements be quantised? */
bool dray__cuda_groups(int64_t group);

/* A block whose changes are found (FIND), or a block, or part of one, to which changes are applied
 * (APPLY). weights/delta/delta.h has the format. FIND compares the block with a dense copy of its
 * earlier bits, slice by slice, and updates that copy; a slice of which more than an eighth changed
 * is marked as full. All FINDs of a job write to one store, and the sum SOURCE of the first one is
 * the number of bytes that entries take from `begin` on. APPLY copies full slices from the block
 * itself. Its sums SOURCE, WRITTEN and BACK are the bytes of entries that it read, the bytes that
 * these entries stand for, and the number of entries that point outside the slice or the store.
 * When that is not 0, the store cannot be trusted. */
enum { DRAY__CUDA_FIND, DRAY__CUDA_APPLY };
typedef struct dray__cuda_delta {
    int32_t kind;
    int32_t dtype, sent; /* as stored, as sent; the same for APPLY */
    uint32_t ndim;
    uint64_t source; /* address of the block's first element */
    int64_t source_stride[DRAY_MAX_DIMS];
    int64_t extent[DRAY_MAX_DIMS], tile[DRAY_MAX_DIMS]; /* of the block, of a slice */
    uint64_t table, store; /* addresses of the block's first slot, of the store */
    uint64_t store_bytes, begin;
    uint64_t base; /* FIND: address of the earlier bits: dray__cuda_delta_kept bytes, 16-aligned */
    int64_t low[DRAY_MAX_DIMS], wanted[DRAY_MAX_DIMS]; /* APPLY: the part, within the block */
    uint64_t destination;                              /* address of its first element */
    int64_t destination_stride[DRAY_MAX_DIMS];
    bool stepping; /* APPLY: a step other than 0 is added to the element, in value order */
    uint32_t lane, phase;
} dray__cuda_delta;
/* Returns the bytes that the copy of the earlier bits takes. */
uint64_t dray__cuda_delta_kept(const dray__cuda_delta *delta);

/* Which checksums (mover/kernels/checksum.h) are computed: of the bits read, of the bits written,
 * and of the destination read back. The first two are computed in the pass that moves the data.
 * Copy engines compute no sums, so that asking for these two sends all items that can be summed
 * through the kernel. */
enum {
    DRAY__CUDA_SUM_SOURCE = 1,
    DRAY__CUDA_SUM_WRITTEN = 2,
    DRAY__CUDA_SUM_BACK = 4,
    /* For quants, of the scales, in the scales' coordinates: of those written, or with DEQUANTISE
     * of those read, for all cells that the box touches. */
    DRAY__CUDA_SUM_SCALES = 8,
    /* For quants that QUANTISE: of the bits read in the pass that looks for maxima; where cells
     * are read once, those are the bits read. For groups, which are read once: of the zero points.
     */
    DRAY__CUDA_SUM_MOST = 16
};

typedef struct dray__cuda_job_options {
    uint32_t sums;         /* bit set */
    uint32_t ctas;         /* thread blocks (of 256 threads) at once; 0: as many as fit the GPU */
    uint32_t spared;       /* multiprocessors that are left to other kernels */
    uint64_t engine_bytes; /* runs at least so long go through copy engines; 0: the measured best;
                              UINT64_MAX: none */
    uint64_t launch_bytes; /* of one launch; 0: so many that it takes well below 2 ms */
    const dray__cuda_quant *quants; /* further work, in the same phases */
    uint64_t quant_count;
    uint32_t most_count;            /* NVFP4: number of maxima that `global` of quants indexes */
    const dray__cuda_delta *deltas; /* further work, in the same phases */
    uint64_t delta_count;
    uint64_t reserve_bytes; /* GPU and pinned memory set aside for dray__cuda_job_remake; 0: the job
                               cannot be remade */
    bool paced; /* dray__cuda_job_release enqueues its launches, some at a time; copy engines move
                   nothing */
} dray__cuda_job_options;

/* Checks and compiles. layout is the destination's, into whose tensors copy.tensor is an index; it
 * is needed for sums, else NULL is fine. All arguments are borrowed for the call alone. options may
 * be NULL. Returns DRAY_EINVALID, DRAY_EDTYPE (no such conversion), DRAY_ENOMEM, DRAY_EUNSUPPORTED
 * (no compiled kernels and no NVRTC). Addresses are not checked: a wrong one ends the GPU's
 * context. */
int dray__cuda_job_new(dray__cuda_device *device, const dray_layout *layout,
                       const dray__cuda_item *items, uint64_t count,
                       const dray__cuda_job_options *options, dray__cuda_job **out,
                       dray_error *error);
/* Replaces the job's items and quants (none with maxima), and keeps its sums, thread blocks and
 * sizes of launches. The job must have a reserve and not be under way. Does not wait for the GPU.
 * As long as the reserve suffices, nothing is allocated, because allocating may make the driver
 * wait for all kernels of the GPU. Otherwise it allocates, or with may_allocate false returns
 * DRAY_EAGAIN. After any failure the job has no items and must be remade. */
int dray__cuda_job_remake(dray__cuda_job *job, const dray_layout *layout,
                          const dray__cuda_item *items, uint64_t count,
                          const dray__cuda_quant *quants, uint64_t quant_count, bool may_allocate,
                          dray_error *error);
/* Enqueues the whole job (of a paced one, no launch yet) behind `events`, each of which is recorded
 * already. Returns DRAY_EBUSY when the job is under way. */
int dray__cuda_job_start(dray__cuda_job *job, const CUevent *events, uint32_t event_count,
                         dray_error *error);
/* Returns how many launches a run of a paced job has. */
uint64_t dray__cuda_job_launch_count(const dray__cuda_job *job);
/* Enqueues the next `count` launches of a paced job that was started, and after the last one the
 * end of the run. */
int dray__cuda_job_release(dray__cuda_job *job, uint64_t count, dray_error *error);
/* Returns an event of a job that is under way. It completes when the copy engines have moved their
 * part, or, where they have none, when everything is moved. Reading back for sums may still go on.
 * Borrowed. */
CUevent dray__cuda_job_moved(const dray__cuda_job *job);
/* Sets the largest magnitudes (bits of f32) from which later runs compute global scales: as many as
 * options.most_count. The job must not be under way. */
void dray__cuda_job_set_most(dray__cuda_job *job, const uint32_t *most);
/* Returns DRAY_EAGAIN while the job runs, DRAY_OK when it is done and its sums can be read,
 * DRAY_ECANCELED when it was aborted (which items are moved is undefined). Any other error is the
 * GPU's, which then cannot be used any more. */
int dray__cuda_job_poll(dray__cuda_job *job, dray_error *error);
/* Waits for the end of a job that is under way, until deadline_ns. Returns DRAY_EAGAIN when it is
 * still under way then, else the result of dray__cuda_job_poll. */
int dray__cuda_job_wait(dray__cuda_job *job, int64_t deadline_ns, dray_error *error);
bool dray__cuda_job_is_running(const dray__cuda_job *job); /* started, and not polled to its end */
/* Becomes readable when the job should be polled, also after a kernel failed. dray__cuda_job_poll
 * makes it unreadable again. */
int dray__cuda_job_fd(const dray__cuda_job *job);
/* Makes running kernels stop at their next tile. The job must still be polled to its end. */
void dray__cuda_job_abort(dray__cuda_job *job);
/* Returns one sum for each item, then for each quant, then for each delta, valid until the next
 * start; NULL when these sums were not asked for. which: one of the DRAY__CUDA_SUM bits. */
const uint64_t *dray__cuda_job_sums(const dray__cuda_job *job, uint32_t which);

typedef struct dray__cuda_job_times {
    int64_t device_ns;                   /* of the last run, from its first launch to its end */
    uint64_t kernel_bytes, engine_bytes; /* written by each, of one run */
    uint32_t launches;
} dray__cuda_job_times;
void dray__cuda_job_times_of(const dray__cuda_job *job, dray__cuda_job_times *out);
/* Aborts the job if it is under way, and waits for its end. NULL is fine. */
void dray__cuda_job_close(dray__cuda_job *job);

/* ---- without a job: calls that wait for the GPU ----------------------------------------------
 */

/* Copies the elements of a rectangle of device memory to a dense array (C order) in host memory, or
 * back. Movers between a GPU and any other kind of region use it. At most DRAY__CUDA_BOUNCE bytes.
 * The region is CUDA; offset is that of the first element; extent and stride (bytes) have `ndim`
 * entries. */
enum { DRAY__CUDA_BOUNCE = 1 << 20 };
typedef struct dray__cuda_place {
    int32_t dtype;
    uint32_t ndim;
    const int64_t *extent, *stride;
    uint64_t offset;
} dray__cuda_place;
int dray__cuda_bounce(const dray_region *region, const dray__cuda_place *place, void *dense,
                      bool to_gpu, dray_error *error);
/* A patch is a rectangle of device memory and the changes of its elements, as entries
 * (weights/delta/delta.h) of a slice that is this rectangle. One launch applies all of `count`
 * patches (at most DRAY__CUDA_PATCHES). Returns DRAY_EFORMAT when entries point outside. */
enum { DRAY__CUDA_PATCHES = 64, DRAY__CUDA_PATCH_BYTES = DRAY__CUDA_BOUNCE - 4096 };
typedef struct dray__cuda_patch {
    dray__cuda_place place;
    bool stepping;
    uint32_t count;  /* entries */
    uint64_t offset; /* where they begin, a multiple of 8 */
} dray__cuda_patch;
/* entries: `bytes` (at most DRAY__CUDA_PATCH_BYTES) of host memory. */
int dray__cuda_patch_all(const dray_region *region, const dray__cuda_patch *patches, uint32_t count,
                         const void *entries, size_t bytes, dray_error *error);
/* Allocates the memory that dray__cuda_bounce and dray__cuda_sum need on this GPU, which otherwise
 * their first call does. An allocation may wait for all work of the GPU. */
int dray__cuda_bounce_reserve(dray__cuda_device *device, dray_error *error);

/* dray__sum_region (mover.h) of memory that the CPU cannot address. */
int dray__cuda_sum(const dray_region *region, const dray__sum_part *parts, uint32_t count,
                   uint64_t *sums, dray_error *error);
