/* gpu.h - GPUs and their memory: devices by UUID, regions over GPU memory, arenas whose memory a
 * trainer and an engine use in turns, and the two functions by which PyTorch allocates from an
 * arena.
 *
 * The first call opens the CUDA driver: the library that $DRAY_CUDA_LIBRARY names, else
 * libcuda.so.1. An empty $DRAY_CUDA_LIBRARY turns GPUs off. Without a driver or a GPU, functions
 * that need one return DRAY_EUNSUPPORTED, and the message says why. The library uses primary
 * contexts alone, as PyTorch and the CUDA runtime do. Every call leaves the thread's current
 * context as it was. A process that was forked after the driver was opened gets DRAY_EUNSUPPORTED.
 *
 * Streams and events are the driver's CUstream and CUevent, which are also the runtime's. A NULL
 * stream is the default stream. Addresses are device addresses (CUdeviceptr). Sizes are in bytes.
 * Functions may be called from any thread unless they say otherwise. Since 0.1.
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
    uint8_t uuid[16];   /* the same in every process, with any $CUDA_VISIBLE_DEVICES */
    char uuid_text[48]; /* "GPU-2f4c..." */
    char name[128];
    char pci[32];    /* "0000:1b:00.0" */
    uint64_t bytes;  /* of its memory */
    int32_t ordinal; /* its number in CUDA, in this process */
    int32_t arch;    /* 90: compute capability 9.0 */
    int32_t multiprocessors;
} dray_gpu;

#define DRAY_GPU_INIT                                                                              \
    {                                                                                              \
        sizeof(dray_gpu), {0}, {0}, {0}, {0}, 0, 0, 0, 0                                           \
    }

/* Counts the GPUs that this process sees. *version gets the version of CUDA that the driver
 * supports (13000 is 13.0); version may be NULL. The first call of a process may take a second. */
int dray_gpu_count(int32_t *count, int32_t *version, dray_error *error);
/* Describes GPU `index` of this process, counted from 0 in the driver's order. out: its size is set
 * by the caller. DRAY_ENOENT: the process sees fewer GPUs. */
int dray_gpu_get(int32_t index, dray_gpu *out, dray_error *error);

/* How one GPU of this process reaches another's memory. */
typedef enum dray_gpu_link {
    DRAY_GPU_LINK_NONE = 0, /* not directly: copies go through host memory */
    DRAY_GPU_LINK_SAME,     /* both are the same GPU */
    DRAY_GPU_LINK_PCIE,
    DRAY_GPU_LINK_NVLINK
} dray_gpu_link;

/* *link gets the dray_gpu_link by which GPU `from` reaches the memory of GPU `to`. Both are indices
 * as of dray_gpu_get. Does not block. */
int dray_gpu_get_link(int32_t from, int32_t to, int32_t *link, dray_error *error);
/* Measures large copies: *rate gets bytes a second from the memory of GPU `from` to that of GPU
 * `to`, which may be the same. -1 stands for pinned host memory. The call allocates 256 MiB on each
 * side, fills them with random words, and takes about 0.1 s. DRAY_EUNSUPPORTED: there is no link.
 */
int dray_gpu_measure(int32_t from, int32_t to, double *rate, dray_error *error);
/* *unused gets the bytes of the GPU's memory that are free now, *total all of them. Either may be
 * NULL. Makes the GPU's primary context if there is none yet. */
int dray_gpu_memory(int32_t index, uint64_t *unused, uint64_t *total, dray_error *error);
/* Looks for the library `which`: "cuda", "nvrtc" or "nccl". detail gets its version and its path as
 * text of at most `size` bytes. DRAY_EUNSUPPORTED: it is missing or too old, and the message says
 * what to do. DRAY_EINVALID: the name is another one. */
int dray_gpu_library(const char *which, char *detail, size_t size, dray_error *error);

/* ---- regions over GPU memory ----------------------------------------------------------------- */

/* The allocation that an address belongs to, as the driver or the arena reports it. */
typedef struct dray_gpu_storage {
    size_t size;
    uint8_t uuid[16];     /* the GPU that has the memory */
    uint64_t base, bytes; /* first address and size of the allocation */
    uint64_t allocation;  /* its number in this process; a number is never used twice */
    int32_t form;         /* dray_cuda_form: how it can be exported; NONE: it cannot */
} dray_gpu_storage;

#define DRAY_GPU_STORAGE_INIT                                                                      \
    {                                                                                              \
        sizeof(dray_gpu_storage), {0}, 0, 0, 0, 0                                                  \
    }

/* Finds the allocation that has the address. out: its size is set by the caller. DRAY_EINVALID: the
 * address is not GPU memory of this process. DRAY_ESTALE: its arena is released. */
int dray_gpu_storage_of(uint64_t address, dray_gpu_storage *out, dray_error *error);

/* Makes a region of `bytes` of GPU memory from `address` on, which another allocator (PyTorch,
 * cudaMalloc) or an arena has allocated and which must outlive the region. name is copied; NULL is
 * "". The caller frees *out with dray_region_free. DRAY_EINVALID: the bytes are not in one
 * allocation; the message has its end. Memory that the driver does not export (cudaMallocAsync,
 * managed memory, memory of another process) can be wrapped as well, but dray_handle_describe
 * refuses it, with advice in the message. */
int dray_region_wrap_cuda(uint64_t address, uint64_t bytes, const char *name, dray_region **out,
                          dray_error *error);

/* ---- arenas -----------------------------------------------------------------------------------
 * An arena is memory of one GPU at addresses that stay the same. It is allocated in chunks, and
 * each chunk is exported to other processes by one descriptor.
 *
 * Releasing an arena gives its physical memory back to the GPU. Its content is copied to pinned
 * host memory, or dropped. Resuming an arena takes physical memory again and copies the content
 * back to the same addresses, so that pointers and CUDA graphs stay valid. Releasing an empty arena
 * succeeds; later allocations fail with DRAY_EBUSY until the arena is resumed.
 *
 * A tag names arenas that are released and resumed together. Usual tags are "weights" and
 * "kv_cache".
 *
 * Other processes must unmap exported memory before it is released: call dray_publisher_release,
 * then dray_arena_release. After dray_arena_resume, dray_publisher_move with the same regions
 * exports the memory again. */
typedef struct dray_arena dray_arena;

typedef struct dray_arena_options {
    size_t size;
    const char *tag;        /* 1 to 63 bytes; NULL means "weights" */
    uint8_t uuid[16];       /* the GPU; zero: the GPU of the thread's context, else the first one */
    uint64_t address_bytes; /* how many addresses are reserved; 0 means four times the GPU's
                             * memory */
    uint64_t chunk_bytes;   /* 0 means 1 GiB. A larger allocation gets a chunk of its own */
    int32_t peers;          /* not 0: the other GPUs of this process can use the memory as well */
} dray_arena_options;

#define DRAY_ARENA_OPTIONS_INIT                                                                    \
    {                                                                                              \
        sizeof(dray_arena_options), NULL, {0}, 0, 0, 0                                             \
    }

/* Reserves addresses. Physical memory is taken by allocations. options may be NULL. The caller
 * closes *out with dray_arena_close. Threads: several threads may use one arena at the same time.
 * DRAY_EUNSUPPORTED: the GPU has no virtual memory management. */
int dray_arena_open(const dray_arena_options *options, dray_arena **out, dray_error *error);
/* Gives all memory of the arena back, also memory that is still allocated. Regions over it become
 * stale (dray_region_check). NULL is fine. */
void dray_arena_close(dray_arena *arena);
/* Allocates `bytes`, aligned to 512 bytes; *address gets the device address. The content is
 * undefined. Zero bytes are allocated as one. DRAY_EFULL: no addresses are left. DRAY_ENOMEM: the
 * GPU has no memory left. DRAY_EBUSY: the arena is released. */
int dray_arena_alloc(dray_arena *arena, uint64_t bytes, uint64_t *address, dray_error *error);
/* Frees the allocation that begins at `address`. The GPU must not use it any more. A chunk without
 * allocations is given back to the GPU. DRAY_ENOENT: no allocation begins there. */
int dray_arena_free(dray_arena *arena, uint64_t address, dray_error *error);

typedef struct dray_arena_status {
    size_t size;
    uint64_t base, address_bytes; /* the reserved addresses */
    uint64_t resident_bytes;      /* physical memory that the arena has now */
    uint64_t used_bytes;          /* sum of its allocations */
    uint64_t pinned_bytes;        /* host memory that is pinned for its content */
    uint32_t chunks, allocations;
    uint32_t exported; /* regions over it that other processes may have mapped */
    int32_t released;  /* 1: released, 0: not */
} dray_arena_status;

#define DRAY_ARENA_STATUS_INIT                                                                     \
    {                                                                                              \
        sizeof(dray_arena_status), 0, 0, 0, 0, 0, 0, 0, 0, 0                                       \
    }

/* out: its size is set by the caller. Does not block. */
int dray_arena_get_status(dray_arena *arena, dray_arena_status *out, dray_error *error);

typedef struct dray_arena_release_options {
    size_t size;
    int32_t drop;  /* not 0: the content is dropped instead of copied to host memory */
    int32_t force; /* not 0: release also while other processes have the memory mapped; those keep
                      their physical memory */
    /* The GPU's work that must be complete before the release: a CUDA event. NULL: the caller has
     * waited for it already. */
    const dray_fence *after;
    int64_t timeout_ns; /* 0 means 60 s */
} dray_arena_release_options;

#define DRAY_ARENA_RELEASE_OPTIONS_INIT                                                            \
    {                                                                                              \
        sizeof(dray_arena_release_options), 0, 0, NULL, 0                                          \
    }

typedef struct dray_arena_resume_options {
    size_t size;
    int32_t free_pinned; /* not 0: frees the pinned host memory; the next release pins it again */
    int64_t timeout_ns;  /* 0 means 60 s */
} dray_arena_resume_options;

#define DRAY_ARENA_RESUME_OPTIONS_INIT                                                             \
    {                                                                                              \
        sizeof(dray_arena_resume_options), 0, 0                                                    \
    }

typedef struct dray_arena_report {
    size_t size;
    uint32_t arenas, chunks; /* how many were released or resumed */
    uint64_t bytes;          /* GPU memory that was given back or taken */
    uint64_t copied_bytes;   /* content that was copied */
    int64_t pin_ns;          /* time that pinning host memory took */
    int64_t copy_ns;         /* time from the first copy to the end of the last */
    int64_t total_ns;        /* time that the call took */
} dray_arena_report;

#define DRAY_ARENA_REPORT_INIT                                                                     \
    {                                                                                              \
        sizeof(dray_arena_report), 0, 0, 0, 0, 0, 0, 0                                             \
    }

/* Pins the host memory that dray_arena_release will need for the present allocations of the arenas
 * of the tag (NULL: of all arenas). Pinning takes longer than the copies. The memory stays pinned
 * until the arena is closed or resumed with free_pinned. report may be NULL. DRAY_ENOENT: no arena
 * has the tag. Blocks. */
int dray_arena_prepare(const char *tag, dray_arena_report *report, dray_error *error);
/* Releases all arenas of the tag (NULL: all arenas) in this process: copies their content and gives
 * their physical memory back, chunk by chunk. Of the GPU's work the call waits for options->after
 * and for its own copies only. options and report may be NULL. Arenas that are released already are
 * left alone. Blocks. DRAY_EBUSY: regions over an arena are exported (dray_region_unexport);
 * nothing was released. DRAY_ENOENT: no arena has the tag. DRAY_ETIMEDOUT: `after` or the copies
 * took too long. After any error but DRAY_EBUSY, chunks that were released stay released:
 * dray_arena_resume brings them back, and another dray_arena_release continues with the rest. */
int dray_arena_release(const char *tag, const dray_arena_release_options *options,
                       dray_arena_report *report, dray_error *error);
/* Resumes all released arenas of the tag (NULL: all): takes physical memory and copies the content
 * back. options and report may be NULL. Blocks. DRAY_ENOMEM: the GPU has too little free memory;
 * the arena that needed it is still released, with its content. DRAY_ENOENT: no arena has the tag.
 */
int dray_arena_resume(const char *tag, const dray_arena_resume_options *options,
                      dray_arena_report *report, dray_error *error);

/* The functions of torch.cuda.memory.CUDAPluggableAllocator(libdray, "dray_torch_malloc",
 * "dray_torch_free"), over which a torch.cuda.MemPool is made. Memory comes from one arena for each
 * tag and GPU of the process, opened at the first allocation. dray_torch_malloc returns NULL and
 * logs a line where it fails. dray_torch_free waits for the stream before the memory is freed. */
void *dray_torch_malloc(ptrdiff_t bytes, int device, void *stream);
void dray_torch_free(void *memory, ptrdiff_t bytes, int device, void *stream);
/* Chooses the tag that dray_torch_malloc uses in this thread; it is copied. NULL: the thread has no
 * tag of its own. Such threads use the tag that any thread chose last, at first "weights".
 * DRAY_EINVALID: the tag is empty or longer than 63 bytes. */
int dray_torch_use(const char *tag, dray_error *error);
/* The arena of the tag from which dray_torch_malloc allocates on a GPU (`device` is CUDA's
 * ordinal), opened if need be. The process owns it: do not close it. options may be NULL, and count
 * only in the call that opens the arena; its tag and uuid are ignored. DRAY_EINVALID: as of
 * dray_torch_use. DRAY_ENOENT: there is no such GPU. */
int dray_torch_arena(const char *tag, int device, const dray_arena_options *options,
                     dray_arena **out, dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
