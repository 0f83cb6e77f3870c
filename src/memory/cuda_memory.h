/* GPU memory inside the library: chunks, which this process has allocated; openings, which are
 * allocations of other processes that are mapped here; and the allocation of an address (storage).
 */
#pragma once

#include "memory/cuda_library.h"
#include "memory/region.h"

#include <dray/gpu.h>
#include <stdatomic.h>

/* ---- chunks: physical memory of one GPU under addresses that outlive it
 * -------------------------- A chunk's owner has the lock that its functions need. */
typedef struct dray__cuda_chunk {
    dray__cuda_device *device;
    CUdeviceptr address;
    uint64_t bytes; /* of the granularity */
    CUmemGenericAllocationHandle handle;
    bool resident;
    uint64_t reach;      /* bit i: GPU i of this process can access it */
    uint64_t allocation; /* number of its physical memory; never used twice in a process */
    uint8_t name[64];    /* random name of its physical memory, for other processes */
    int fd;              /* the exported descriptor; -1: not exported */
    uint32_t exports;    /* regions over it that other processes may have mapped */
    bool aliased;        /* its address still shows the memory that it gave in an exchange */
} dray__cuda_chunk;

/* The unit of sizes of physical memory. 0: it failed, and *error is set. */
uint64_t dray__chunk_granularity(dray__cuda_device *device, dray_error *error);
/* Physical memory under chunk->address (reserved by the caller), of device and bytes. */
int dray__chunk_back(dray__cuda_chunk *chunk, dray_error *error);
/* Gives the physical memory back; the addresses stay. What others have mapped stays with them. */
void dray__chunk_drop(dray__cuda_chunk *chunk);
/* Exports it once: chunk->fd. */
int dray__chunk_export(dray__cuda_chunk *chunk, dray_error *error);
void dray__chunk_unexport(dray__cuda_chunk *chunk);
int dray__chunk_reach(dray__cuda_chunk *chunk, dray__cuda_device *device, dray_error *error);
/* Puts the physical memory of each spare chunk under the addresses of the live one at the same
 * place, which are sorted, and gives it that one's; what names physical memory goes along. Nothing
 * on a GPU may use the live addresses meanwhile. The addresses of spare chunks are of no use before
 * dray__chunk_settle, but swapping once more is fine. After an error everything is as it was; where
 * the driver does not even give that back, a chunk is no longer resident, and the message says so.
 */
int dray__chunks_swap(dray__cuda_chunk *const *live, dray__cuda_chunk *const *spare, uint32_t count,
                      dray_error *error);
/* Brings the chunk's own memory under its addresses. */
int dray__chunk_settle(dray__cuda_chunk *chunk, dray_error *error);

/* ---- openings: what others exported, mapped here
 * ------------------------------------------------- The same allocation of the same owner is opened
 * once in each context, however many regions use it. */
typedef struct dray__cuda_opening dray__cuda_opening;

struct dray__cuda_opening {
    dray__cuda_opening *next;
    uint32_t users;
    int32_t form;
    bool writable;
    uint8_t key[64];
    uint64_t allocation, member, epoch;
    dray__cuda_device *device; /* mapped into its context */
    CUdeviceptr address;
    uint64_t bytes;
    CUmemGenericAllocationHandle handle;
    uint64_t reach;
};

int dray__opening_get(const dray_handle *handle, int fd, bool writable, dray__cuda_device *device,
                      dray__cuda_opening **out, dray_error *error);
void dray__opening_put(dray__cuda_opening *opening);
int dray__opening_reach(dray__cuda_opening *opening, dray__cuda_device *device, dray_error *error);

/* Makes the pages of writable host memory, by several threads: what registering would do by one. */
void dray__populate(void *memory, uint64_t bytes);

/* Registers host memory with the driver and finds its address on GPUs; the context is current. */
CUresult dray__host_register(void *memory, uint64_t bytes, bool writable, CUdeviceptr *address);

/* ---- what is at an address -------------------------------------------------------------------
 */
typedef struct dray__cuda_storage {
    dray__cuda_device *device;
    CUdeviceptr base;
    uint64_t bytes, allocation;
    int form; /* how it can be exported; NONE: its driver does not */
} dray__cuda_storage;

/* The GPU that the caller works with: of the thread's context, else of the UUID (may be NULL) where
 * it is seen, else the first. */
int dray__cuda_device_here(const uint8_t *uuid, dray__cuda_device **out, dray_error *error);

/* ---- arenas (cuda_arena.c)
 * -----------------------------------------------------------------------
 */
/* The open arena that has the address, held: dray__gpu_arena_put gives it back. NULL: none has. */
dray_arena *dray__gpu_arena_of(CUdeviceptr address);
void dray__gpu_arena_put(dray_arena *arena);
/* What is there now; form NONE and allocation 0: nothing is resident. */
int dray__gpu_arena_storage(dray_arena *arena, CUdeviceptr address, dray__cuda_storage *out,
                            dray_error *error);
/* Exports the chunk that has the address, and counts it until dray__gpu_arena_unexport. key: gets
 * its name; *allocation: its number, by which the other two know it (another chunk may be there by
 * then). */
int dray__gpu_arena_export(dray_arena *arena, CUdeviceptr address, uint8_t key[64],
                           uint64_t *allocation, dray_error *error);
void dray__gpu_arena_unexport(dray_arena *arena, CUdeviceptr address, uint64_t allocation);
int dray__gpu_arena_fd(dray_arena *arena, CUdeviceptr address, uint64_t allocation); /* -1: gone */
int dray__gpu_arena_reach(dray_arena *arena, CUdeviceptr address, dray__cuda_device *device,
                          dray_error *error);

/* For an exchange. The chunk at the address, and what is allocated in it (offsets in the chunk,
 * borrowed); NULL: nothing is resident there. With the arena's lock, which these two take and give
 * back. */
void dray__gpu_arena_lock(dray_arena *arena);
void dray__gpu_arena_unlock(dray_arena *arena);
struct dray__extents;
dray__cuda_chunk *dray__gpu_arena_chunk(const dray_arena *arena, CUdeviceptr address,
                                        const struct dray__extents **used);
uint64_t dray__gpu_arena_base(const dray_arena *arena); /* by which several are locked in order */

/* What a region's memory is of: a chunk of its own, or an arena, borrowed; NULL: neither. */
dray__cuda_chunk *dray__region_chunk(const dray_region *region);
dray_arena *dray__region_arena(const dray_region *region);
bool dray__region_exported(const dray_region *region);
/* A region over `bytes` from `offset` on of somebody else's chunk, which outlives it. */
int dray__region_over_chunk(dray__cuda_chunk *chunk, uint64_t offset, uint64_t bytes,
                            const char *name, dray_region **out, dray_error *error);

/* Lets another GPU of this process touch a region's memory (kernels and copies that run there).
 * DRAY_EUNSUPPORTED: there is no way between the two. */
int dray__region_reach(const dray_region *region, dray__cuda_device *device, dray_error *error);
