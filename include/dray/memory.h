/* memory.h - regions made live: memory or files that blocks lie in, and handles, by which another
 * process reaches them. */
#ifndef DRAY_MEMORY_H
#define DRAY_MEMORY_H

#include <dray/dray.h>
#include <dray/model.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dray_region dray_region;

/* Allocates `bytes` of zeroed memory, page-aligned, in huge pages where the kernel gives them.
 * kind: HOST, SHARED (a memfd of sealed size, mapped; other processes can import it), PINNED (the
 * same, registered with the GPUs in every process that maps it), or CUDA (memory of the GPU whose
 * context is current in this thread, else of the first; other processes can import it). name is for
 * people, copied; NULL is "". Zero bytes are a region too. DRAY_EUNSUPPORTED for kinds that this
 * machine or build lacks (PINNED and CUDA: it says why), DRAY_ENOMEM, DRAY_ESYS. Owner: the caller
 * frees *out. Threads: any. */
int dray_region_alloc(dray_region_kind kind, uint64_t bytes, const char *name, dray_region **out,
                      dray_error *error);
/* Registers host memory of someone else's allocator, which must outlive the region: `bytes` from
 * `base`, writable. DRAY_EINVALID: NULL, or past the end of all addresses. */
int dray_region_wrap(void *base, uint64_t bytes, const char *name, dray_region **out,
                     dray_error *error);
/* A regular file as a region, of its present size. writable: opened for reading and writing. It
 * must exist. No mapping is made: dray_region_base gives NULL. DRAY_ENOENT, DRAY_EINVALID (not a
 * regular file), DRAY_ESYS. May wait for the file system. */
int dray_region_open(const char *path, int writable, dray_region **out, dray_error *error);
/* The live regions of a layout: FILE ones opened (writable or not), all others allocated as
 * dray_region_alloc does it, CUDA ones on this thread's GPU, whichever the layout's lay on. out: an
 * array of dray_layout_region_count entries, which the caller frees one by one. All or none.
 * DRAY_EFORMAT: a file is smaller than the layout says; else what the functions above return.
 */
int dray_regions_for_layout(const dray_layout *layout, int writable, dray_region **out,
                            dray_error *error);
/* Ends the region: unmaps, closes. NULL is fine. Peers that imported it keep their mapping. */
void dray_region_free(dray_region *region);

void *dray_region_base(const dray_region *region); /* NULL: not addressable (file, cuda) */
uint64_t dray_region_bytes(const dray_region *region);
dray_region_kind dray_region_get_kind(const dray_region *region);
const char *dray_region_name(const dray_region *region); /* borrowed; FILE: the path */
/* The descriptor by which others import it: -1: none. Borrowed. CUDA: what dray_handle_describe
 * exported; -1 before that, and where the handle alone is enough. */
int dray_region_fd(const dray_region *region);
/* CUDA, PINNED: where the GPUs of this process see it; 0: not (see gpu.h for more). */
uint64_t dray_region_device_address(const dray_region *region);
/* CUDA: the UUID of the GPU that has the memory. DRAY_EINVALID: another kind. */
int dray_region_device(const dray_region *region, uint8_t uuid[16], dray_error *error);
/* Does the region still show the memory that it was made of? DRAY_ESTALE: not so, of GPU memory:
 * another allocation lies at its address, or none (it was freed, or its arena is released), or its
 * arena was resumed since it was exported: export and plan it anew. Other kinds: always. Threads:
 * any. Does not block, but for a release or resume of its arena that is under way. */
int dray_region_check(const dray_region *region, dray_error *error);

/* Copies bytes out of a region of any kind, or into it, through the CPU, and waits until that is
 * complete: for looks, tests and small things; movers are many times as fast. GPU memory: work that
 * is under way in non-blocking streams is not waited for. DRAY_EINVALID: outside the region, or it
 * was opened for reading; DRAY_ESYS. Threads: any. Blocks. */
int dray_region_read(const dray_region *region, uint64_t offset, void *data, uint64_t bytes,
                     dray_error *error);
int dray_region_write(dray_region *region, uint64_t offset, const void *data, uint64_t bytes,
                      dray_error *error);

/* ---- handles ------------------------------------------------------------------------------------
 * dray's form of PyTorch's rebuild_cuda_tensor arguments, without pickle: says how to reach one
 * tensor's storage from another process. Pointer-free, versioned, checksummed, little-endian.
 * A SHARED or PINNED handle travels with its descriptor (SCM_RIGHTS); the handle itself says which
 * (device, inode) the descriptor must be, so that a wrong one is found. So does a CUDA handle of
 * form VMM; one of form IPC needs none. */
/* How a CUDA handle is opened. */
typedef enum dray_cuda_form {
    DRAY_CUDA_FORM_NONE = 0, /* other kinds */
    DRAY_CUDA_FORM_VMM,      /* virtual-memory allocation: by the descriptor that came with it */
    DRAY_CUDA_FORM_IPC       /* cudaMalloc's: by its 64-byte IPC handle, in key; no descriptor */
} dray_cuda_form;

typedef struct dray_handle {
    size_t size;
    int32_t kind;                  /* dray_region_kind; never HOST */
    int32_t dtype;                 /* dray_dtype; NONE with ndim 0: the whole storage as bytes */
    uint32_t ndim;                 /* 0..DRAY_MAX_DIMS; unused dimensions are 0 */
    int64_t shape[DRAY_MAX_DIMS];  /* >= 0 */
    int64_t stride[DRAY_MAX_DIMS]; /* bytes, >= 0 */
    uint64_t offset;               /* bytes from the storage's start */
    uint64_t storage_bytes;
    uint8_t device[16]; /* GPU UUID, never an index; zero for host kinds */
    uint64_t owner_member, owner_epoch;
    /* SHARED, PINNED: st_dev, st_ino; FILE: st_ino; CUDA: the allocation's name (VMM) or IPC handle
     */
    uint8_t key[64];
    uint8_t event[64]; /* IPC event to wait for; zero: none */
    char path[256];    /* FILE: absolute */
    /* CUDA: a handle exports a whole allocation, of which the storage is a part. */
    uint64_t base_offset; /* where the storage begins in it */
    uint64_t base_bytes;
    uint64_t allocation; /* the owner's number of it: a later one at the same address has another */
    int32_t form;        /* dray_cuda_form */
    int32_t unused;
} dray_handle;

#define DRAY_HANDLE_INIT                                                                           \
    {                                                                                              \
        sizeof(dray_handle), 0, 0, 0, {0}, {0}, 0, 0, {0}, 0, 0, {0}, {0}, {0}, 0, 0, 0, 0, 0      \
    }

/* Fills kind, storage_bytes, key, device, path and how it lies in its allocation from the region;
 * shape, strides and the rest are the caller's. CUDA memory is exported by it: until
 * dray_region_withdrawn its arena is not released. DRAY_EUNSUPPORTED: private host memory, a file
 * whose path is too long, or GPU memory that its driver does not export, cannot be reached from
 * another process. DRAY_ESTALE: as dray_region_check. On failure the handle is as it was. */
int dray_handle_describe(const dray_region *region, dray_handle *handle, dray_error *error);
/* Nobody but this process has the region's memory mapped any more (dray_publisher_release returned
 * DRAY_OK, or all who got the handle are done): its exported descriptor is closed, and its arena
 * may be released. A later dray_handle_describe exports it again. */
void dray_region_withdrawn(dray_region *region);
/* Bytes of the packed form: always the same for one format version. */
size_t dray_handle_packed_size(void);
/* out: room for `capacity` bytes. DRAY_EFORMAT names the field that no reader would accept (a
 * rectangle outside its storage, a field that the kind does not have), DRAY_EFULL: no room. */
int dray_handle_pack(const dray_handle *handle, void *out, size_t capacity, dray_error *error);
/* out: initialised by the caller. DRAY_EFORMAT (truncated, altered, forged: which field),
 * DRAY_EVERSION (format unknown). Data from anywhere may be given. *out is set only on success. */
int dray_handle_unpack(const void *data, size_t size, dray_handle *out, dray_error *error);
/* Makes the storage reachable here. fd: the descriptor that came with it (SHARED; duplicated, not
 * consumed), else -1. writable: map, or open, for writing. DRAY_EINVALID: the descriptor, or the
 * file at the path, is not the one that the handle names, is smaller than it says, or is shared
 * memory of a size that its owner could change; DRAY_EFORMAT as above; DRAY_EUNSUPPORTED: a kind
 * that this build lacks; DRAY_ESTALE: this process exported it itself, and other memory lies there
 * now; DRAY_ENOENT, DRAY_ESYS. Whether the owner still lives is the session's to know. GPU memory
 * is mapped into the context that is current in this thread, else into that of its own GPU where
 * this process sees it, else of the first; the same allocation of the same owner is opened once in
 * a process, and closed with the last region over it; what this process exported itself is used
 * where it is. Owner: the caller frees *out. */
int dray_region_import(const dray_handle *handle, int fd, int writable, dray_region **out,
                       dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
