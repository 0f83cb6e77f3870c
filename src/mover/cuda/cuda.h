/* src/mover/cuda/: copies that GPUs carry out. A list of rectangles is compiled into a job once
 * (cuda_program.c, cuda_pieces.c), and the job is started again for every update (cuda.c). The
 * kernels are one source for CUDA and for C (cuda_kernels.cu and the headers that it includes), so
 * that tests run them without a GPU; cuda_compile.c loads them or has them compiled. */

/* Movement on a GPU: a list of rectangles is compiled once into descriptors that stay in the GPU's
 * memory, and replayed with a few launches for every update, by a kernel that walks the rectangles
 * in tiles and by copy engines for what they do better.
 *
 *     dray__cuda_job *job;
 *     rc = dray__cuda_job_new(device, layout, items, count, &options, &job, error);
 *     for each update:
 *         rc = dray__cuda_job_start(job, events, event_count, error);
 *         while ((rc = dray__cuda_job_poll(job, error)) == DRAY_EAGAIN)
 *             poll(dray__cuda_job_fd(job)) ...
 *         sums = dray__cuda_job_sums(job, DRAY__CUDA_SUM_BACK);
 *     dray__cuda_job_close(job);
 *
 * Nothing here waits for the GPU, but wait, new and close, for their own streams alone; nothing
 * synchronises a device. One job: one thread at a time, any one; different jobs: any threads. */
#pragma once

#include "memory/cuda_library.h"
#include "memory/region.h"
#include "mover/kernels/checksum.h"

#include <dray/plan.h>
#include <stdbool.h>

typedef struct dray__cuda_job dray__cuda_job;

/* One rectangle: copy's offsets and strides count from the two bases. Its region numbers and
 * `source` are not looked at; `tensor` is, for sums. */
typedef struct dray__cuda_item {
    dray_copy copy;
    uint64_t source_base, destination_base; /* addresses as the executing GPU sees them; destination
                                               0: nothing is written, the source is summed */
    uint32_t lane;  /* what is read over the same link has the same: tiles of all lanes take turns
                     */
    uint32_t phase; /* begins when all items of lower phases are done */
    bool host;      /* one side is pinned host memory: copy engines, down to short runs */
    bool near;      /* both sides are memory of the GPU that carries it out */
    const dray_tensor_info *of; /* the tensor, for sums; NULL: the layout's that copy.tensor says */
} dray__cuda_item;

/* A box of a tensor that is quantised, or made of a quantised one (mover/kernels/quant.h has the
 * arithmetic). QUANTISE: the box consists of whole cells (cut short at the tensor's edge), whose
 * elements are all read; DEQUANTISE: any. A source is read where it is, once, when a cell has at
 * most DRAY__CUDA_CELL elements, else twice. */
typedef struct dray__cuda_quant {
    int32_t kind;               /* dray_transform_kind */
    int32_t dtype, quant_dtype; /* of the floats, of the quantised side */
    int32_t scale_format;       /* dray_scale_format */
    uint32_t tensor, ndim;      /* its shape is the layout's; for sums */
    int64_t start[DRAY_MAX_DIMS], extent[DRAY_MAX_DIMS], cell[DRAY_MAX_DIMS]; /* as a transform's */
    uint64_t source, destination; /* addresses of the box's first element */
    int64_t source_stride[DRAY_MAX_DIMS], destination_stride[DRAY_MAX_DIMS]; /* bytes */
    uint64_t scales; /* address of the scale (F32) of the first cell that the box touches */
    int64_t scale_stride[DRAY_MAX_DIMS]; /* bytes, from cell to cell */
    uint32_t lane, phase;
    /* dray_quant_kind of what is quantised in another way than by scales of cells in F32: of
     * DEEPGEMM scales are bytes, by row and cell; of kinds from MXFP8 on a cell is a group of a
     * row, of INT4_ZERO of eight. Of those the source's rows, and the values, may have any strides;
     * the first element and the first scale are aligned as their dtypes. */
    int32_t quant_kind;
    int32_t as;      /* NVFP4, INT4...: dtype in which scales are computed */
    uint64_t second; /* INT4_ZERO: address of the zero points */
    int64_t second_stride[DRAY_MAX_DIMS];
    uint32_t global; /* NVFP4: the number that dray__cuda_job_set_most knows it by, from 0 on */
    /* kind MOST: the largest magnitude of the box, as the bits of an f32, becomes its sum MOST.
     * kind GLOBAL: the global scale of number `global` is written to `destination`, its sum is
     * WRITTEN; it has no source, and one element. */
} dray__cuda_quant;

enum { DRAY__CUDA_GLOBAL = 100 }; /* a kind beside dray_transform_kind's */
enum { DRAY__CUDA_CELL = 128 * 128 };
/* Can groups of so many elements be quantised? */
bool dray__cuda_groups(int64_t group);

/* A block whose changes are found, or (a part of) one that is brought up to date by what others
 * found (weights/delta/delta.h has the format). FIND compares with the bits that it keeps, dense,
 * slice by slice, and leaves those of now there; slices of which more than an eighth changed are
 * full. All of a job enter into one store, and the sum SOURCE of the first one says how many bytes
 * behind `begin` entries take. APPLY copies what is full out of the block itself; its sums SOURCE,
 * WRITTEN and BACK are the bytes of entries that it read, the bytes that they stood for, and how
 * many of them lead outside: not 0 is a store that cannot be trusted. */
enum { DRAY__CUDA_FIND, DRAY__CUDA_APPLY };
typedef struct dray__cuda_delta {
    int32_t kind;
    int32_t dtype, sent; /* as it is stored, as it is sent; APPLY: the same */
    uint32_t ndim;
    uint64_t source; /* address of the block's first element */
    int64_t source_stride[DRAY_MAX_DIMS];
    int64_t extent[DRAY_MAX_DIMS], tile[DRAY_MAX_DIMS]; /* of the block, of a slice */
    uint64_t table, store; /* addresses of the block's first slot, of the store */
    uint64_t store_bytes, begin;
    uint64_t base; /* FIND: address of the kept bits: dray__cuda_delta_kept bytes, by 16 */
    int64_t low[DRAY_MAX_DIMS], wanted[DRAY_MAX_DIMS]; /* APPLY: the part, within the block */
    uint64_t destination;                              /* address of its first element */
    int64_t destination_stride[DRAY_MAX_DIMS];
    bool stepping; /* APPLY: elements with a step other than 0 are moved by it */
    uint32_t lane, phase;
} dray__cuda_delta;
/* Bytes of kept bits. */
uint64_t dray__cuda_delta_kept(const dray__cuda_delta *delta);

/* Which sums (mover/kernels/checksum.h) are taken: of the bits read, of the bits written, of what
 * then is at the destination. The first two are taken in the pass that moves; what copy engines
 * move has none of its own, so that asking for them sends all items that can be summed through the
 * kernel.
 */
enum {
    DRAY__CUDA_SUM_SOURCE = 1,
    DRAY__CUDA_SUM_WRITTEN = 2,
    DRAY__CUDA_SUM_BACK = 4,
    /* Of quants, in the scales' coordinates: those that were written; DEQUANTISE: those that were
     * used, of all cells that the box touches. */
    DRAY__CUDA_SUM_SCALES = 8,
    /* Of quants that QUANTISE: of the bits in which the largest were looked for; where cells are
     * read once, those are the bits read. Of groups, which are read once: of the zero points. */
    DRAY__CUDA_SUM_MOST = 16
};

typedef struct dray__cuda_job_options {
    uint32_t sums;         /* bit set */
    uint32_t ctas;         /* thread blocks (of 256 threads) at once; 0: as many as pay */
    uint64_t engine_bytes; /* runs at least so long go through copy engines; 0: what was measured to
                              be best; UINT64_MAX: none */
    uint64_t launch_bytes; /* of one launch; 0: what takes well below 2 ms */
    const dray__cuda_quant *quants; /* more to do, in the same phases */
    uint64_t quant_count;
    uint32_t most_count;            /* NVFP4: numbers that quants name as `global` */
    const dray__cuda_delta *deltas; /* and these */
    uint64_t delta_count;
    uint64_t reserve_bytes; /* of GPU and pinned memory, for what remake will want; 0: it is not
                               made anew */
    bool paced; /* its launches are given to the GPU by dray__cuda_job_release, one after the other;
                   copy engines move nothing */
} dray__cuda_job_options;

/* Checks and compiles. layout: the destination's, whose tensors copy.tensor counts; with sums, else
 * NULL is fine. Everything is borrowed for the call alone. options may be NULL. DRAY_EINVALID,
 * DRAY_EDTYPE (no such conversion), DRAY_ENOMEM, DRAY_EUNSUPPORTED (no compiled kernels and no
 * NVRTC). Addresses are the caller's responsibility: a wrong one ends the GPU's context. */
int dray__cuda_job_new(dray__cuda_device *device, const dray_layout *layout,
                       const dray__cuda_item *items, uint64_t count,
                       const dray__cuda_job_options *options, dray__cuda_job **out,
                       dray_error *error);
/* Other items in the place of those that it has, with the same sums and blocks; it was made with a
 * reserve, and is not under way. Nothing is waited for, and as long as the reserve is enough,
 * nothing is allocated: a driver that allocates may wait for all kernels of the GPU. may_allocate
 * false: DRAY_EAGAIN instead. After any failure the job has no items: make it anew. */
int dray__cuda_job_remake(dray__cuda_job *job, const dray_layout *layout,
                          const dray__cuda_item *items, uint64_t count, bool may_allocate,
                          dray_error *error);
/* Enqueues all of it, after `events` (each recorded already). A job that is under way is
 * DRAY_EBUSY. */
int dray__cuda_job_start(dray__cuda_job *job, const CUevent *events, uint32_t event_count,
                         dray_error *error);
/* Of a paced job: how many launches a run has. */
uint64_t dray__cuda_job_launch_count(const dray__cuda_job *job);
/* Gives the GPU the next `count` launches of a paced job that was started; with the last one, the
 * end. */
int dray__cuda_job_release(dray__cuda_job *job, uint64_t count, dray_error *error);
/* Of a job that is under way: complete when copy engines have moved all that is theirs, or where
 * they have nothing, all is moved. What looks at it may still go on. Borrowed. */
CUevent dray__cuda_job_moved(const dray__cuda_job *job);
/* The largest magnitudes, as bits of f32, that runs from now on make global scales of: as many as
 * the options said. The job is not under way. */
void dray__cuda_job_set_most(dray__cuda_job *job, const uint32_t *most);
/* DRAY_EAGAIN: not yet; DRAY_OK: done, the sums are there; DRAY_ECANCELED: it was told to stop,
 * and did: what is moved is undefined; else what the GPU says, which then is of no more use. */
int dray__cuda_job_poll(dray__cuda_job *job, dray_error *error);
/* Waits for the end of a job that is under way, until then. DRAY_EAGAIN: it still is; else what
 * poll says. */
int dray__cuda_job_wait(dray__cuda_job *job, int64_t deadline_ns, dray_error *error);
bool dray__cuda_job_is_running(const dray__cuda_job *job); /* started, and not polled to its end */
/* Readable when poll is worth a try, also after a kernel failed; poll makes it unreadable. */
int dray__cuda_job_fd(const dray__cuda_job *job);
/* Makes running kernels stop at their next tile. The job is still to be polled to its end. */
void dray__cuda_job_abort(dray__cuda_job *job);
/* which: one of the bits. Per item and, after them, per quant, then per delta; NULL: not asked for.
 * Until the next start. */
const uint64_t *dray__cuda_job_sums(const dray__cuda_job *job, uint32_t which);

typedef struct dray__cuda_job_times {
    int64_t device_ns;                   /* of the last run, from its first launch to its end */
    uint64_t kernel_bytes, engine_bytes; /* written by each, of one run */
    uint32_t launches;
} dray__cuda_job_times;
void dray__cuda_job_times_of(const dray__cuda_job *job, dray__cuda_job_times *out);
/* Aborts what is under way and waits for it. NULL is fine. */
void dray__cuda_job_close(dray__cuda_job *job);

/* ---- without a job: one thing at once, waited for ----------------------------------------------
 */

/* The elements of a rectangle of device memory, dense (C order), to host memory, or back: what
 * movers between a GPU and anything else are made of. At most DRAY__CUDA_BOUNCE bytes. The region
 * is CUDA; offset: of the first element; extent, stride (bytes): `ndim` entries. */
enum { DRAY__CUDA_BOUNCE = 1 << 20 };
typedef struct dray__cuda_place {
    int32_t dtype;
    uint32_t ndim;
    const int64_t *extent, *stride;
    uint64_t offset;
} dray__cuda_place;
int dray__cuda_bounce(const dray_region *region, const dray__cuda_place *place, void *dense,
                      bool to_gpu, dray_error *error);
/* What became of elements of a rectangle of device memory, as a slot's entries
 * (weights/delta/delta.h) of a slice that is the rectangle: all of `count` (at most
 * DRAY__CUDA_PATCHES) are put into it by one launch. DRAY_EFORMAT: entries lead outside. */
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
/* Allocates all that dray__cuda_bounce and dray__cuda_sum need on this GPU, which they do at their
 * first call otherwise: an allocation may wait for all that the GPU has to do. */
int dray__cuda_bounce_reserve(dray__cuda_device *device, dray_error *error);

/* dray__sum_region (mover.h) of memory that the CPU cannot address. */
int dray__cuda_sum(const dray_region *region, const dray__sum_part *parts, uint32_t count,
                   uint64_t *sums, dray_error *error);
