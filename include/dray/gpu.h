/* gpu.h - GPUs, and their memory: devices by UUID, regions over GPU memory, arenas that trainer and
 * engine share in turns, events as fences, and the two functions by which PyTorch allocates from an
 * arena.
 *
 * The CUDA driver is opened at the first call ($DRAY_CUDA_LIBRARY, or libcuda.so.1; an empty value:
 * none). Without one, or without a GPU, functions that need it return DRAY_EUNSUPPORTED and say
 * why. Only primary contexts are used, those of PyTorch and of the CUDA runtime; a call leaves the
 * thread's current context as it was. A process that was forked after the driver was opened cannot
 * use it (DRAY_EUNSUPPORTED). Streams and events are the driver's (CUstream, CUevent), which are
 * the runtime's, too; a NULL stream is the default one. Addresses are device addresses
 * (CUdeviceptr). Since 0.1.
 */
#ifndef DRAY_GPU_H
#define DRAY_GPU_H

#include <dray/dray.h>
#include <dray/memory.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- devices -------------------------------------------------------------------------------- */

typedef struct dray_gpu {
    size_t size;
    uint8_t uuid[16];   /* the same for every process, whatever $CUDA_VISIBLE_DEVICES says */
    char uuid_text[48]; /* "GPU-2f4c..." */
    char name[128];
    char pci[32];    /* "0000:1b:00.0" */
    uint64_t bytes;  /* of its memory */
    int32_t ordinal; /* what CUDA calls it in this process */
    int32_t arch;    /* 90: compute capability 9.0 */
    int32_t multiprocessors;
    int32_t unused;
} dray_gpu;

#define DRAY_GPU_INIT                                                                              \
    {                                                                                              \
        sizeof(dray_gpu), {0}, {0}, {0}, {0}, 0, 0, 0, 0, 0                                        \
    }

/* How many GPUs this process sees, and the version of CUDA that its driver supports (13000: 13.0;
 * may be NULL). Threads: any. The first call of a process may take a second. */
int dray_gpu_count(int32_t *count, int32_t *version, dray_error *error);
/* The GPU of that place in the list, from 0. DRAY_ENOENT: there are fewer. Threads: any. */
int dray_gpu_get(int32_t index, dray_gpu *out, dray_error *error);
/* The place of a UUID. DRAY_ENOENT: this process does not see it. Threads: any. */
int dray_gpu_find(const uint8_t uuid[16], int32_t *index, dray_error *error);

/* How one GPU of this process reaches another's memory. */
typedef enum dray_gpu_link {
    DRAY_GPU_LINK_NONE = 0, /* through host memory only */
    DRAY_GPU_LINK_SAME,     /* it is the same GPU */
    DRAY_GPU_LINK_PCIE,
    DRAY_GPU_LINK_NVLINK
} dray_gpu_link;

/* Threads: any. Does not block. */
int dray_gpu_get_link(int32_t from, int32_t to, int32_t *link, dray_error *error);
/* Bytes a second of large copies from one GPU's memory into another's (the same one: within it);
 * -1 is pinned host memory. Allocates 256 MiB on each side for the call, fills them with noise, and
 * takes a tenth of a second. DRAY_EUNSUPPORTED: no link. */
int dray_gpu_measure(int32_t from, int32_t to, double *rate, dray_error *error);
/* Of its memory, what nobody uses now, and all. Outputs may be NULL. Makes a context on it. */
int dray_gpu_memory(int32_t index, uint64_t *unused, uint64_t *total, dray_error *error);
/* Is a library of the GPU world there ("cuda", "nvrtc", "nccl")? detail: gets at most `size` bytes,
 * its version and where it was found. DRAY_EUNSUPPORTED: no, and why; DRAY_EINVALID. */
int dray_gpu_library(const char *which, char *detail, size_t size, dray_error *error);

/* ---- regions over GPU memory ----------------------------------------------------------------- */

/* What the driver, or the arena, says of an address. */
typedef struct dray_gpu_storage {
    size_t size;
    uint8_t uuid[16];     /* whose memory it is */
    uint64_t base, bytes; /* the allocation that the address lies in */
    /* Its number in this process, never given twice: another one at the same address has another.
     */
    uint64_t allocation;
    int32_t form; /* dray_cuda_form: how it can be exported; NONE: the driver does not */
    int32_t unused;
} dray_gpu_storage;

#define DRAY_GPU_STORAGE_INIT                                                                      \
    {                                                                                              \
        sizeof(dray_gpu_storage), {0}, 0, 0, 0, 0, 0                                               \
    }

/* DRAY_EINVALID: no GPU memory lies there; DRAY_ESTALE: its arena is released. Threads: any. */
int dray_gpu_storage_of(uint64_t address, dray_gpu_storage *out, dray_error *error);

/* `bytes` of zeroed memory of the GPU, of this process's own, that others can import. */
int dray_region_alloc_cuda(const uint8_t uuid[16], uint64_t bytes, const char *name,
                           dray_region **out, dray_error *error);
/* Registers GPU memory of someone else's allocator (PyTorch, cudaMalloc) or of an arena, which must
 * outlive the region. It must lie in one allocation: DRAY_EINVALID says where that ends. Of memory
 * that its driver does not export (cudaMallocAsync, managed, another process's) a region can be
 * made, too: dray_handle_describe refuses it then, and says what to do. */
int dray_region_wrap_cuda(uint64_t address, uint64_t bytes, const char *name, dray_region **out,
                          dray_error *error);

/* ---- arenas -----------------------------------------------------------------------------------
 * Memory of one GPU under addresses that stay: allocated in chunks, each exported to other
 * processes by one descriptor. Released, an arena's physical memory is given back, and its content
 * kept in pinned host memory or dropped; resumed, it lies at the same addresses as before, so that
 * pointers and CUDA graphs stay good. The tags that people use are "weights", "kv_cache", and so
 * on: trainer and engine share a GPU in turns, and wake up in stages.
 *
 * Before memory that others have mapped is released, they must unmap it: dray_publisher_release
 * takes back what was published, then dray_arena_release, and after dray_arena_resume a
 * dray_publisher_move with the same regions exports it anew. */
typedef struct dray_arena dray_arena;

typedef struct dray_arena_options {
    size_t size;
    const char *tag;        /* 1 to 63 bytes; NULL: "weights" */
    uint8_t uuid[16];       /* the GPU; zero: that of the thread's context, else the first */
    uint64_t address_bytes; /* of addresses; 0: four times the GPU's memory */
    uint64_t chunk_bytes; /* 0: 1 GiB. An allocation never spans chunks: a larger one has its own */
    int32_t peers;        /* not 0: the other GPUs of this process can use the memory, too */
    int32_t unused;
} dray_arena_options;

#define DRAY_ARENA_OPTIONS_INIT                                                                    \
    {                                                                                              \
        sizeof(dray_arena_options), NULL, {0}, 0, 0, 0, 0                                          \
    }

/* Reserves addresses; memory comes with allocations. Owner: the caller. Threads: an arena may be
 * used from any, all at once. DRAY_EUNSUPPORTED: the GPU has no virtual memory management. */
int dray_arena_open(const dray_arena_options *options, dray_arena **out, dray_error *error);
/* Gives all of its memory back, allocated or not; regions over it are stale. NULL is fine. */
void dray_arena_close(dray_arena *arena);
/* Memory of the arena, aligned to 512 bytes, of any content. Zero bytes are as one. DRAY_EFULL: no
 * addresses are left; DRAY_ENOMEM: no memory; DRAY_EBUSY: the arena is released. */
int dray_arena_alloc(dray_arena *arena, uint64_t bytes, uint64_t *address, dray_error *error);
/* Gives an allocation back, which the GPU must be done with. A chunk without any is given back to
 * the GPU. DRAY_ENOENT: no allocation begins there. */
int dray_arena_free(dray_arena *arena, uint64_t address, dray_error *error);

typedef struct dray_arena_status {
    size_t size;
    uint64_t base, address_bytes;
    uint64_t resident_bytes; /* physical memory */
    uint64_t used_bytes;     /* allocated */
    uint64_t pinned_bytes;   /* host memory that it has for its content */
    uint32_t chunks, allocations;
    uint32_t exported; /* regions over it that others may have mapped */
    int32_t released;
} dray_arena_status;

#define DRAY_ARENA_STATUS_INIT                                                                     \
    {                                                                                              \
        sizeof(dray_arena_status), 0, 0, 0, 0, 0, 0, 0, 0, 0                                       \
    }

int dray_arena_get_status(dray_arena *arena, dray_arena_status *out, dray_error *error);

typedef struct dray_arena_release_options {
    size_t size;
    int32_t drop;  /* not 0: the content is not kept */
    int32_t force; /* not 0: also when others may have it mapped (they keep the memory) */
    /* What must be complete first; NULL: everything that uses the memory is. */
    const dray_fence *after;
    int64_t timeout_ns; /* 0: 60 s */
} dray_arena_release_options;

#define DRAY_ARENA_RELEASE_OPTIONS_INIT                                                            \
    {                                                                                              \
        sizeof(dray_arena_release_options), 0, 0, NULL, 0                                          \
    }

typedef struct dray_arena_resume_options {
    size_t size;
    int32_t
        free_pinned; /* not 0: the host memory is freed, too, and pinned anew by the next release */
    int32_t unused;
    int64_t timeout_ns; /* 0: 60 s */
} dray_arena_resume_options;

#define DRAY_ARENA_RESUME_OPTIONS_INIT                                                             \
    {                                                                                              \
        sizeof(dray_arena_resume_options), 0, 0, 0                                                 \
    }

typedef struct dray_arena_report {
    size_t size;
    uint32_t arenas, chunks; /* that were released, or resumed */
    uint64_t bytes;          /* of GPU memory given back, or taken */
    uint64_t copied_bytes;   /* of content */
    int64_t pin_ns, copy_ns; /* getting host memory pinned; from the first copy to the last */
    int64_t total_ns;
} dray_arena_report;

#define DRAY_ARENA_REPORT_INIT                                                                     \
    {                                                                                              \
        sizeof(dray_arena_report), 0, 0, 0, 0, 0, 0, 0                                             \
    }

/* Pins the host memory that dray_arena_release of the tag (NULL: of all) will need for what is
 * allocated now: that takes longer than the copies. It stays until the arena is closed, or resumed
 * with free_pinned. */
int dray_arena_prepare(const char *tag, dray_arena_report *report, dray_error *error);
/* Gives back the physical memory of all arenas of the tag (NULL: of all) in this process, chunk by
 * chunk as it was copied. Of the GPU it waits for `after` and its own copies alone. options and
 * report may be NULL. DRAY_EBUSY: regions over it were exported, and not withdrawn: nothing is
 * released. On other errors what was released stays so (dray_arena_resume brings it back, and
 * another release goes on with the rest). An arena that is released already counts for nothing.
 * DRAY_ENOENT: no arena has the tag. Threads: any. Blocks. */
int dray_arena_release(const char *tag, const dray_arena_release_options *options,
                       dray_arena_report *report, dray_error *error);
/* Takes memory for all released arenas of the tag, and copies the content back. DRAY_ENOMEM: the
 * GPU has not enough free; the arena that lacked it is released as before. */
int dray_arena_resume(const char *tag, const dray_arena_resume_options *options,
                      dray_arena_report *report, dray_error *error);

/* PyTorch: torch.cuda.memory.CUDAPluggableAllocator(libdray, "dray_torch_malloc",
 * "dray_torch_free"), then torch.cuda.MemPool over it. Memory comes from the process-wide arena of
 * the thread's tag on that GPU, which is opened when it is needed. NULL, and a line in the log,
 * where there is none. Frees wait for the stream where a chunk goes back to the GPU. */
void *dray_torch_malloc(ptrdiff_t bytes, int device, void *stream);
void dray_torch_free(void *memory, ptrdiff_t bytes, int device, void *stream);
/* The tag from which this thread allocates from now on; NULL: none of its own. Threads without one
 * use the tag that was chosen last by any ("weights" at first). DRAY_EINVALID: too long. */
int dray_torch_use(const char *tag, dray_error *error);
/* The arena of PyTorch's that has the tag, on a GPU by its ordinal; borrowed. Its options are those
 * of the first call for it (chunk_bytes of options, which may be NULL). */
int dray_torch_arena(const char *tag, int device, const dray_arena_options *options,
                     dray_arena **out, dray_error *error);

/* ---- events -----------------------------------------------------------------------------------
 * An event says that what was put into a stream before it is complete. Another process can wait for
 * it: neither side's stream blocks the other's host. */
typedef struct dray_event dray_event;

/* uuid NULL: the GPU of the thread's context, else the first. Owner: the caller. */
int dray_event_new(const uint8_t uuid[16], dray_event **out, dray_error *error);
void dray_event_free(dray_event *event); /* NULL is fine */
int dray_event_record(dray_event *event, void *stream, dray_error *error);
/* For dray_publisher_publish and the like; borrowed from the event. DRAY_EINVALID: it was never
 * recorded, and an event that never was blocks nobody. */
int dray_event_fence(const dray_event *event, dray_fence *out, dray_error *error);
/* What another process opens it by. DRAY_EINVALID: never recorded: tell others of it only then. */
int dray_event_export(const dray_event *event, uint8_t handle[64], dray_error *error);
int dray_event_import(const uint8_t uuid[16], const uint8_t handle[64], dray_event **out,
                      dray_error *error);
/* The stream's later work waits for the event; the caller does not. */
int dray_event_wait(dray_event *event, void *stream, dray_error *error);
/* The caller waits. DRAY_ETIMEDOUT. */
int dray_event_sync(dray_event *event, int64_t timeout_ns, dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
