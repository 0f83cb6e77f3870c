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
    uint64_t bytes; /* a multiple of the granularity */
    CUmemGenericAllocationHandle handle;
    bool resident;
    uint64_t reach; /* bit i: GPU i of this process can access it */
    /* The number of its physical memory, which is never used twice in a process. */
    uint64_t allocation;
    uint8_t name[64]; /* the random name of its physical memory, for other processes */
    int fd;           /* the exported descriptor; -1: not exported */
    uint32_t exports; /* the number of regions over it that other processes may have mapped */
    bool aliased;     /* its address still shows the memory that it gave away in an exchange */
} dray__cuda_chunk;

/* Returns the unit of sizes of physical memory. Returns 0 on failure, with *error set. */
uint64_t dray__chunk_granularity(dray__cuda_device *device, dray_error *error);
/* Puts physical memory of the chunk's device and size under chunk->address, which the caller has
 * reserved. */
int dray__chunk_back(dray__cuda_chunk *chunk, dray_error *error);
/* Frees the physical memory; the addresses stay reserved. Other processes keep their mappings of
 * it. */
void dray__chunk_drop(dray__cuda_chunk *chunk);
/* Exports the chunk once, as the descriptor chunk->fd. */
int dray__chunk_export(dray__cuda_chunk *chunk, dray_error *error);
void dray__chunk_unexport(dray__cuda_chunk *chunk);
int dray__chunk_reach(dray__cuda_chunk *chunk, dray__cuda_device *device, dray_error *error);
/* Swaps the physical memory of each spare chunk with that of the live chunk at the same place, so
 * that it lies under the live addresses; the names of physical memory move with it. Both lists are
 * sorted. Nothing on a GPU may use the live addresses meanwhile. The addresses of spare chunks
 * cannot be used before dray__chunk_settle, but another swap is allowed. After an error everything
 * is as before. When the driver refuses even that, a chunk is no longer resident, and the message
 * has this. */
int dray__chunks_swap(dray__cuda_chunk *const *live, dray__cuda_chunk *const *spare, uint32_t count,
                      dray_error *error);
/* Maps the chunk's own memory at its addresses. */
int dray__chunk_settle(dray__cuda_chunk *chunk, dray_error *error);

/* ---- openings: memory that others exported, mapped here -----------------------------------------
 *
 * The same allocation of the same owner is opened once in each context, however many regions use
 * it. */
typedef struct dray__cuda_opening dray__cuda_opening;

struct dray__cuda_opening {
    dray__cuda_opening *next;
    uint32_t users;
    int32_t form;
    bool writable;
    uint8_t key[64];
    uint64_t allocation, member, epoch;
    dray__cuda_device *device; /* the device that has it mapped in its context */
    CUdeviceptr address;
    uint64_t bytes;
    CUmemGenericAllocationHandle handle;
    uint64_t reach;
};

int dray__opening_get(const dray_handle *handle, int fd, bool writable, dray__cuda_device *device,
                      dray__cuda_opening **out, dray_error *error);
void dray__opening_put(dray__cuda_opening *opening);
int dray__opening_reach(dray__cuda_opening *opening, dray__cuda_device *device, dray_error *error);

/* Allocates the pages of writable host memory with several threads. Registering it would do so
 * with one thread. */
void dray__populate(void *memory, uint64_t bytes);

/* Registers host memory with the driver and finds its address on GPUs. The context must be
 * current. */
CUresult dray__host_register(void *memory, uint64_t bytes, bool writable, CUdeviceptr *address);

/* ---- the allocation at an address
 * ---------------------------------------------------------------- */
typedef struct dray__cuda_storage {
    dray__cuda_device *device;
    CUdeviceptr base;
    uint64_t bytes, allocation;
    int form; /* how it can be exported; NONE when its driver cannot export it */
} dray__cuda_storage;

/* Finds the GPU that the caller works with: that of the thread's context, else the one with the
 * UUID (which may be NULL), else the first. */
int dray__cuda_device_here(const uint8_t *uuid, dray__cuda_device **out, dray_error *error);

/* ---- arenas (cuda_arena.c)
 * -----------------------------------------------------------------------
 */
/* Returns the open arena that has the address, and holds it until dray__gpu_arena_put. Returns
 * NULL when there is none. */
dray_arena *dray__gpu_arena_of(CUdeviceptr address);
void dray__gpu_arena_put(dray_arena *arena);
/* Describes the memory that is there now. When nothing is resident, form is NONE and allocation
 * is 0. */
int dray__gpu_arena_storage(dray_arena *arena, CUdeviceptr address, dray__cuda_storage *out,
                            dray_error *error);
/* Returns the number of the content at the address, which is another one after a release that has
 * dropped the content. Returns 0 when nothing is resident. */
uint64_t dray__gpu_arena_content(dray_arena *arena, CUdeviceptr address);
/* Exports the chunk that has the address, and counts the export until dray__gpu_arena_unexport.
 * `key` receives its name. *allocation receives its number, which the other two functions need,
 * as another chunk may be there by then. */
int dray__gpu_arena_export(dray_arena *arena, CUdeviceptr address, uint8_t key[64],
                           uint64_t *allocation, dray_error *error);
void dray__gpu_arena_unexport(dray_arena *arena, CUdeviceptr address, uint64_t allocation);
int dray__gpu_arena_fd(dray_arena *arena, CUdeviceptr address, uint64_t allocation); /* -1: gone */
int dray__gpu_arena_reach(dray_arena *arena, CUdeviceptr address, dray__cuda_device *device,
                          dray_error *error);

/* For an exchange: returns the chunk at the address, and the allocations in it (borrowed; offsets
 * in the chunk). Returns NULL when nothing is resident there. The caller holds the arena's lock,
 * which the first two functions take and release. */
void dray__gpu_arena_lock(dray_arena *arena);
void dray__gpu_arena_unlock(dray_arena *arena);
struct dray__extents;
dray__cuda_chunk *dray__gpu_arena_chunk(const dray_arena *arena, CUdeviceptr address,
                                        const struct dray__extents **used);

/* Return the memory that a region uses, borrowed: a chunk of its own, or an arena. NULL when it
 * uses none. */
dray__cuda_chunk *dray__region_chunk(const dray_region *region);
dray_arena *dray__region_arena(const dray_region *region);
bool dray__region_exported(const dray_region *region);
/* Returns a number that is another one when the region's memory has lost its content since, because
 * its arena was released without it, or another allocation is at its address. 0 for memory of
 * other kinds, which keeps its content. */
uint64_t dray__region_content(const dray_region *region);
/* Makes a region over `bytes` from `offset` on of another owner's chunk. The chunk must outlive
 * the region. */
int dray__region_over_chunk(dray__cuda_chunk *chunk, uint64_t offset, uint64_t bytes,
                            const char *name, dray_region **out, dray_error *error);

/* Lets another GPU of this process access a region's memory (kernels and copies that run there).
 * Fails with DRAY_EUNSUPPORTED when the two GPUs are not connected. */
int dray__region_reach(const dray_region *region, dray__cuda_device *device, dray_error *error);
