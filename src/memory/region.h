/* A live region: memory or a file that blocks lie in. Each kind has one table of operations, in one
 * file of this folder; region.c lists them. */
#ifndef DRAY_MEMORY_REGION_H
#define DRAY_MEMORY_REGION_H

#include <dray/memory.h>
#include <stdbool.h>

typedef struct dray__region_ops dray__region_ops;
typedef struct dray__cuda_device dray__cuda_device;
typedef struct dray__cuda_memory dray__cuda_memory;

struct dray_region {
    const dray__region_ops *ops;
    char *name;
    uint8_t *base;         /* NULL: not addressable */
    uint64_t bytes;        /* what users of the region may touch */
    uint64_t mapped_bytes; /* what munmap is told; 0: the mapping is not this region's */
    int fd;                /* -1: none */
    bool writable;
    uint64_t serial;           /* never given twice in a process */
    uint64_t device_address;   /* CUDA, PINNED: 0: no GPU of this process sees it */
    dray__cuda_device *device; /* CUDA: in whose context it is mapped here */
    uint8_t device_uuid[16];   /* CUDA: whose memory it is; not always a GPU that is seen here */
    dray__cuda_memory *cuda;   /* CUDA: what it lies in (cuda.c) */
    /* Of a file that is read through changes to it: puts them into what was read of it. NULL: none.
     */
    int (*patch)(const void *user, uint32_t index, void *data, uint64_t offset, uint64_t bytes,
                 dray_error *error);
    const void *patch_user;
    uint32_t patch_index;
};

/* Every operation fills a region whose name, bytes, writable are set, base NULL and fd -1. On
 * failure the caller calls release, so that no operation cleans up after itself. */
struct dray__region_ops {
    dray_region_kind kind;
    /* Fresh zeroed memory. NULL: this kind is not allocated. */
    int (*alloc)(dray_region *region, dray_error *error);
    /* Opens what region->name says. NULL: this kind is not found by name. */
    int (*open)(dray_region *region, dray_error *error);
    /* The kind's own fields of a handle. NULL: other processes cannot reach this kind. */
    int (*describe)(const dray_region *region, dray_handle *handle, dray_error *error);
    int (*import)(dray_region *region, const dray_handle *handle, int fd, dray_error *error);
    void (*release)(dray_region *region);
    /* DRAY_ESTALE: dray_region_check. NULL: it cannot change. */
    int (*check)(const dray_region *region, dray_error *error);
    /* dray_region_withdrawn. NULL: nothing to do. */
    void (*withdrawn)(dray_region *region);
    /* dray_region_fd. NULL: region->fd. */
    int (*descriptor)(const dray_region *region);
    /* dray_region_read and _write, of bytes that are inside. NULL: it is addressable. */
    int (*transfer)(const dray_region *region, uint64_t offset, void *data, uint64_t bytes,
                    bool write, dray_error *error);
};

extern const dray__region_ops dray__region_host, dray__region_shared, dray__region_pinned,
    dray__region_cuda, dray__region_file;

/* NULL: this build has no regions of that kind. */
const dray__region_ops *dray__region_ops_of(int32_t kind);

/* Maps `bytes` of fd (-1: anonymous memory) so that large mappings begin at a huge page's boundary
 * and asks for huge pages; sets base and mapped_bytes. Unmapped by dray__region_unmap. */
int dray__region_map(dray_region *region, int fd, dray_error *error);
void dray__region_unmap(dray_region *region);

/* An empty region that the kind's own constructors fill; entered among the living. NULL: out of
 * memory, and said so. */
dray_region *dray__region_new(const dray__region_ops *ops, const char *name, uint64_t bytes,
                              bool writable, dray_error *error);
/* The shared kind's, which pinned memory builds on. */
int dray__shared_alloc(dray_region *region, dray_error *error);
int dray__shared_describe(const dray_region *region, dray_handle *handle, dray_error *error);
int dray__shared_import(dray_region *region, const dray_handle *handle, int fd, dray_error *error);
void dray__shared_release(dray_region *region);

/* A copy of the caller's handle, of any version. */
int dray__handle_read(const dray_handle *given, dray_handle *out, dray_error *error);
/* DRAY_EFORMAT naming the field of the handle that cannot be: unknown kind or dtype, shape, strides
 * or offset outside the storage, fields that the kind does not use but that are set. */
int dray__handle_check(const dray_handle *handle, dray_error *error);

/* Is this still the region that had the serial number? The pointer may be stale. */
bool dray__region_is(const dray_region *region, uint64_t serial);

#endif
