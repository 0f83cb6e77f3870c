/* memory.h - live regions, which are the memory and the files that blocks are in, and handles, by
 * which another process reaches them. Sizes, offsets and strides are in bytes. Functions may be
 * called from any thread; one region is used by one thread at a time, unless a function says
 * otherwise. Since 0.1. */
#ifndef DRAY_MEMORY_H
#define DRAY_MEMORY_H

#include <dray/dray.h>
#include <dray/model.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dray_region dray_region;

/* Allocates `bytes` of zeroed memory, aligned to pages, in huge pages where the kernel has them.
 * kind:
 *   HOST    private memory of this process
 *   SHARED  a mapped memfd whose size is sealed; other processes can import it
 *   PINNED  the same, registered with the GPUs in every process that maps it
 *   CUDA    memory of the GPU whose context is current in this thread, else of the first GPU; other
 *           processes can import it
 * name is shown in messages and is copied; NULL is "". `bytes` may be 0. The caller frees *out.
 * DRAY_EUNSUPPORTED: this machine or build lacks the kind, and the message says why. DRAY_ENOMEM,
 * DRAY_ESYS. */
int dray_region_alloc(dray_region_kind kind, uint64_t bytes, const char *name, dray_region **out,
                      dray_error *error);
/* Makes a region of host memory that another allocator owns: `bytes` from `base` on, which must be
 * writable and must outlive the region. The caller frees *out, which does not free the memory.
 * DRAY_EINVALID: base is NULL, or base + bytes is no address. */
int dray_region_wrap(void *base, uint64_t bytes, const char *name, dray_region **out,
                     dray_error *error);
/* Opens an existing regular file as a region of its present size. writable: 1 opens it for reading
 * and writing, 0 for reading. The file is not mapped: dray_region_base returns NULL. The caller
 * frees *out. DRAY_ENOENT: there is no such file. DRAY_EINVALID: it is not a regular file.
 * DRAY_ESYS. May block for the file system. */
int dray_region_open(const char *path, int writable, dray_region **out, dray_error *error);
/* Makes the live regions of a layout, in its order: opens its FILE regions (writable: as of
 * dray_region_open) and allocates the others as dray_region_alloc does, CUDA regions on this
 * thread's GPU. out: an array of dray_layout_region_count entries, each of which the caller frees.
 * On failure nothing stays allocated. DRAY_EFORMAT: a file is smaller than the layout says; other
 * errors are those of the two functions. */
int dray_regions_for_layout(const dray_layout *layout, int writable, dray_region **out,
                            dray_error *error);
/* Frees the region: unmaps its memory, or closes its file. Processes that imported the memory keep
 * their mapping. NULL is fine. */
void dray_region_free(dray_region *region);

/* The first address of the memory; NULL for kinds that the CPU cannot address (CUDA, FILE). */
void *dray_region_base(const dray_region *region);
uint64_t dray_region_bytes(const dray_region *region);
dray_region_kind dray_region_get_kind(const dray_region *region);
const char *dray_region_name(const dray_region *region); /* borrowed; FILE: the path */
/* The descriptor that goes with the region's handle; -1: none goes with it. The region owns it. Of
 * a CUDA region there is one only after dray_handle_describe, and only where the handle's form is
 * VMM. */
int dray_region_fd(const dray_region *region);
/* The address at which the GPUs of this process reach the region (CUDA, PINNED); 0 when they do
 * not. */
uint64_t dray_region_device_address(const dray_region *region);
/* uuid gets the UUID of the GPU that has the memory. DRAY_EINVALID: the region is not of kind CUDA.
 */
int dray_region_device(const dray_region *region, uint8_t uuid[16], dray_error *error);
/* Checks that the region still shows the memory that it was made of. Returns 0 for every kind but
 * CUDA. DRAY_ESTALE: the GPU memory was freed, its arena is released, or its arena was resumed
 * after the region had been exported; make and export the region again. Blocks only while another
 * thread releases or resumes the arena. */
int dray_region_check(const dray_region *region, dray_error *error);

/* Copies `bytes` between `data` and the region, from `offset` on, through the CPU. Works for every
 * kind and returns when the copy is complete. Updates are many times as fast; these two are for
 * inspection, tests and small copies. They do not wait for work of non-blocking GPU streams.
 * DRAY_EINVALID: the bytes are not inside the region, or the region was opened for reading.
 * DRAY_ESYS. Block. */
int dray_region_read(const dray_region *region, uint64_t offset, void *data, uint64_t bytes,
                     dray_error *error);
int dray_region_write(dray_region *region, uint64_t offset, const void *data, uint64_t bytes,
                      dray_error *error);

/* ---- handles ------------------------------------------------------------------------------------
 *
 * A handle describes how another process reaches one tensor's storage. It holds the values that
 * PyTorch passes to rebuild_cuda_tensor (torch/multiprocessing/reductions.py), without pickle and
 * without pointers. Its packed form has a version and a checksum and is little-endian.
 *
 * Handles of SHARED and PINNED regions, and CUDA handles of form VMM, need a file descriptor, which
 * the caller sends along (SCM_RIGHTS). Handles of files, and CUDA handles of form IPC, need none. A
 * handle names the device and inode that its descriptor must have, so that a wrong descriptor is
 * refused. */

/* How a CUDA handle is opened. */
typedef enum dray_cuda_form {
    DRAY_CUDA_FORM_NONE = 0, /* the kind is not CUDA */
    DRAY_CUDA_FORM_VMM,      /* virtual-memory allocation: by the descriptor that came along */
    DRAY_CUDA_FORM_IPC       /* allocation of cudaMalloc: by its 64-byte IPC handle, in key */
} dray_cuda_form;

typedef struct dray_handle {
    size_t size;
    int32_t kind;                  /* dray_region_kind; never HOST */
    int32_t dtype;                 /* dray_dtype; NONE with ndim 0: the whole storage as bytes */
    uint32_t ndim;                 /* 0..DRAY_MAX_DIMS; unused dimensions are 0 */
    int64_t shape[DRAY_MAX_DIMS];  /* elements, >= 0 */
    int64_t stride[DRAY_MAX_DIMS]; /* bytes, >= 0 */
    uint64_t offset;               /* bytes from the storage's start to the first element */
    uint64_t storage_bytes;        /* size of the storage */
    uint8_t device[16];            /* UUID of the GPU; zero for other kinds */
    uint64_t owner_member, owner_epoch; /* the session that owns the memory; 0 when not known */
    /* SHARED, PINNED: st_dev and st_ino of the descriptor. FILE: st_ino. CUDA: the allocation's
     * name (form VMM), or its IPC handle (form IPC). */
    uint8_t key[64];
    uint8_t event[64]; /* CUDA IPC event that the reader waits for; zero: none */
    char path[256];    /* FILE: the absolute path */
    /* CUDA exports whole allocations; the storage is a part of one. */
    uint64_t base_offset; /* bytes from the allocation's start to the storage */
    uint64_t base_bytes;  /* size of the allocation */
    uint64_t allocation;  /* its number in the owner's process; a number is never used twice */
    int32_t form;         /* dray_cuda_form */
} dray_handle;

#define DRAY_HANDLE_INIT                                                                           \
    {                                                                                              \
        sizeof(dray_handle), 0, 0, 0, {0}, {0}, 0, 0, {0}, 0, 0, {0}, {0}, {0}, 0, 0, 0, 0         \
    }

/* Fills kind, form, storage_bytes, key, device, path, base_offset, base_bytes and allocation from
 * the region. The caller sets dtype, ndim, shape, stride, offset, owner and event. The call exports
 * GPU memory: until dray_region_unexport its arena cannot be released. On failure the handle is
 * unchanged. DRAY_EUNSUPPORTED: no other process can reach the region, because it is private host
 * memory, GPU memory that the driver does not export, or a file whose path is too long.
 * DRAY_ESTALE: as of dray_region_check. */
int dray_handle_describe(const dray_region *region, dray_handle *handle, dray_error *error);
/* Ends the export of GPU memory: closes the exported descriptor, after which the arena may be
 * released. Call it when no other process has the memory mapped any more, for instance after
 * dray_publisher_release returned 0. A later dray_handle_describe exports the memory again. Does
 * nothing for other kinds. */
void dray_region_unexport(dray_region *region);
/* The size of the packed form, which is the same for all handles. */
size_t dray_handle_packed_size(void);
/* Writes the packed form to `out`, which has `capacity` bytes. DRAY_EFORMAT: a reader would refuse
 * the handle, because its rectangle is outside its storage or a field does not belong to its kind;
 * the message names the field. DRAY_EFULL: capacity is too small. */
int dray_handle_pack(const dray_handle *handle, void *out, size_t capacity, dray_error *error);
/* Reads the packed form. The data may come from an untrusted source. out: its size is set by the
 * caller; it is filled only on success. DRAY_EFORMAT: the data is truncated or altered; the message
 * names the field. DRAY_EVERSION: it is of another version. */
int dray_handle_unpack(const void *data, size_t size, dray_handle *out, dray_error *error);
/* Makes the storage reachable in this process: *out is a region over it, which the caller frees.
 * fd: the descriptor that came with the handle, or -1 where the handle needs none. It is duplicated
 * and stays the caller's. writable: 1 maps, or opens, for writing as well.
 *
 * GPU memory is mapped into the context that is current in this thread; without one, into that of
 * the memory's own GPU, or of the first GPU where this process does not see it. An allocation is
 * opened once for each context and closed with the last region over it. Memory that this process
 * exported itself is used where it is. The call does not find out whether the owner still runs.
 *
 * DRAY_EINVALID: the descriptor or file is not the one that the handle names, is smaller than the
 * handle says, or is shared memory whose size is not sealed. DRAY_EFORMAT: as of
 * dray_handle_unpack. DRAY_EUNSUPPORTED: this build lacks the kind. DRAY_ESTALE: this process
 * exported the memory itself and has freed it since. DRAY_ENOENT, DRAY_ESYS. */
int dray_region_import(const dray_handle *handle, int fd, int writable, dray_region **out,
                       dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
