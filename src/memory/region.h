/* src/memory/: live regions, which are the memory and the files that blocks are in: host memory,
 * shared memory, memory pinned for GPUs, memory of GPUs, and files. Each kind is one file with one
 * table of operations. The folder also has handles, by which another process can reach a region,
 * and arenas, which give their memory back to the GPU for a time. */

/* A live region. Each kind has one table of operations, in one file of this folder; region.c lists
 * them. */
#pragma once

#include "store/store.h"

#include <dray/memory.h>
#include <stdbool.h>

typedef struct dray__region_ops dray__region_ops;
typedef struct dray__cuda_device dray__cuda_device;
typedef struct dray__cuda_memory dray__cuda_memory;

struct dray_region {
    const dray__region_ops *ops;
    char *name;
    uint8_t *base;         /* NULL when the CPU cannot address the memory */
    uint64_t bytes;        /* size that users of the region see */
    uint64_t mapped_bytes; /* size of the mapping; 0 when the region has made none */
    int fd;                /* -1 for none */
    bool writable;
    uint64_t serial;           /* number of the region; never used twice in a process */
    uint64_t device_address;   /* CUDA, PINNED; 0 when no GPU of this process reaches the memory */
    dray__cuda_device *device; /* CUDA: the GPU in whose context the memory is mapped */
    uint8_t device_uuid[16];   /* CUDA: the GPU that has the memory; this process may not see it */
    dray__cuda_memory *cuda;   /* CUDA: the memory (cuda.c) */
    /* For a file that is read together with changes to it: applies the changes to bytes that were
     * read. NULL when there are no changes. */
    int (*patch)(const dray_region *file, void *data, uint64_t offset, uint64_t bytes,
                 dray_error *error);
    const void *patch_user;
    uint32_t patch_index;
    dray__store_file stored; /* a file of another store than this machine's (object.c) */
};

/* Every operation gets a region whose name, bytes and writable are set, with base NULL and fd -1.
 * When it fails, the caller calls release; operations do not clean up themselves. */
struct dray__region_ops {
    dray_region_kind kind;
    /* Allocates zeroed memory. NULL when this kind is not allocated. */
    int (*alloc)(dray_region *region, dray_error *error);
    /* Opens the file region->name. NULL when the kind has no files. */
    int (*open)(dray_region *region, dray_error *error);
    /* Fills the kind's own fields of a handle. NULL when other processes cannot reach the kind. */
    int (*describe)(const dray_region *region, dray_handle *handle, dray_error *error);
    int (*import)(dray_region *region, const dray_handle *handle, int fd, dray_error *error);
    void (*release)(dray_region *region);
    /* dray_region_check. NULL when the memory never becomes stale. */
    int (*check)(const dray_region *region, dray_error *error);
    /* dray_region_unexport. NULL when there is nothing to do. */
    void (*unexport)(dray_region *region);
    /* dray_region_fd. NULL means region->fd. */
    int (*descriptor)(const dray_region *region);
    /* dray_region_read and _write, of bytes inside the region. NULL when the CPU addresses the
     * memory. */
    int (*transfer)(const dray_region *region, uint64_t offset, void *data, uint64_t bytes,
                    bool write, dray_error *error);
};

extern const dray__region_ops dray__region_host, dray__region_shared, dray__region_pinned,
    dray__region_cuda, dray__region_file, dray__region_object;

/* Reads bytes of a file region as dray_region_read does, and gives up when *stop (may be NULL)
 * becomes true. */
int dray__region_object_read(const dray_region *region, uint64_t offset, void *data, uint64_t bytes,
                             const atomic_bool *stop, dray_error *error);

/* Maps the region's bytes of fd (-1 for anonymous memory); sets base and mapped_bytes. Large
 * mappings begin at a huge page's boundary and ask for huge pages. Unmapped by
 * dray__region_unmap. */
int dray__region_map(dray_region *region, int fd, dray_error *error);
void dray__region_unmap(dray_region *region);

/* Makes a region that the kind's operations fill, and enters it in the list of live regions.
 * Returns NULL with *error when out of memory. */
dray_region *dray__region_new(const dray__region_ops *ops, const char *name, uint64_t bytes,
                              bool writable, dray_error *error);
/* The operations of shared memory, which pinned memory uses as well. */
int dray__shared_alloc(dray_region *region, dray_error *error);
int dray__shared_describe(const dray_region *region, dray_handle *handle, dray_error *error);
int dray__shared_import(dray_region *region, const dray_handle *handle, int fd, dray_error *error);
void dray__shared_release(dray_region *region);

/* Copies the caller's handle, which may be of an older version of the struct. */
int dray__handle_read(const dray_handle *given, dray_handle *out, dray_error *error);
/* Checks all fields. Returns 0, or DRAY_EFORMAT with the field's name: an unknown kind or dtype;
 * shape, strides or offset outside the storage; or a field that is set but not used by the kind. */
int dray__handle_check(const dray_handle *handle, dray_error *error);

/* Returns whether the region with this serial number still exists at this address. The pointer may
 * be stale. */
bool dray__region_is(const dray_region *region, uint64_t serial);

/* Allocates `bytes` of zeroed GPU memory, which other processes can import. */
int dray__region_alloc_cuda(const uint8_t uuid[16], uint64_t bytes, const char *name,
                            dray_region **out, dray_error *error);
