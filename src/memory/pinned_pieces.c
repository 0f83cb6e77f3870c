/* Pinned host memory in pieces (cuda_arena.h). Several threads allocate the pages, huge ones if
 * possible, which are then registered. This is six times as fast as the driver's own allocation of
 * pinned memory. */
#include "memory/cuda_arena.h"

#include "base/arena.h"
#include "base/error.h"
#include "base/thread.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>

#define THREADS 8

typedef struct page_share {
    uint8_t *base;
    uint64_t bytes;
} page_share;

/* Allocates pages. Kernels before 5.14 cannot do this; then registering allocates them. */
static void *populate(void *user)
{
    const page_share *s = user;
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
    madvise(s->base, s->bytes, MADV_POPULATE_WRITE);
    return NULL;
}

void dray__populate(void *memory, uint64_t bytes)
{
    uint8_t *base = memory;
    cpu_set_t set;
    uint32_t cores = sched_getaffinity(0, sizeof set, &set) == 0 ? (uint32_t)CPU_COUNT(&set) : 1,
             count = 0;
    uint32_t most = cores < THREADS ? cores : THREADS;
    uint64_t each = (bytes / most + DRAY__HUGE_PAGE) / DRAY__HUGE_PAGE * DRAY__HUGE_PAGE;
    dray__thread threads[THREADS];
    page_share shares[THREADS];
    for (uint64_t at = 0; at < bytes && count < most; at += each, count++) {
        shares[count] = (page_share){base + at, bytes - at < each ? bytes - at : each};
        dray__thread_start(&threads[count], populate, &shares[count], "pinned memory", NULL);
    }
    for (uint32_t i = 0; i < count; i++)
        if (threads[i].begun)
            dray__thread_join(&threads[i]);
        else
            populate(&shares[i]);
}

CUresult dray__host_register(void *memory, uint64_t bytes, bool writable, CUdeviceptr *address)
{
    const dray__cuda *cuda = dray__cuda_get(NULL);
    unsigned flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
    CUresult result = cuda->cuMemHostRegister(
        memory, bytes, flags | (writable ? 0 : CU_MEMHOSTREGISTER_READ_ONLY));
    if (result)
        return result;
    result = cuda->cuMemHostGetDevicePointer(address, memory, 0);
    if (result)
        cuda->cuMemHostUnregister(memory);
    return result;
}

static void free_piece(struct dray__pinned_piece *piece)
{
    const dray__cuda *cuda = dray__cuda_get(NULL);
    if (cuda)
        cuda->cuMemHostUnregister(piece->base);
    munmap(piece->base, piece->bytes);
}

static int make_piece(uint64_t bytes, struct dray__pinned_piece *out, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    if (!cuda)
        return DRAY_EUNSUPPORTED;
    uint8_t *base = dray__map_aligned(bytes, PROT_READ | PROT_WRITE);
    if (!base)
        return dray__fail_errno(error, errno, "%llu bytes of host memory to pin",
                                (unsigned long long)bytes);
    madvise(base, bytes, MADV_HUGEPAGE);
    dray__populate(base, bytes);
    CUresult result = cuda->cuMemHostRegister(base, bytes, CU_MEMHOSTREGISTER_PORTABLE);
    if (result) {
        munmap(base, bytes);
        return dray__fail_cuda(error, result, "pinning %llu bytes of host memory",
                               (unsigned long long)bytes);
    }
    *out = (struct dray__pinned_piece){base, bytes};
    return DRAY_OK;
}

int dray__pinned_pieces_grow(dray__pinned_pieces *p, uint64_t bytes, dray_error *error)
{
    while (p->bytes < bytes) {
        struct dray__pinned_piece *piece =
            dray__append(&p->pieces, sizeof *piece, p->count, &p->capacity);
        if (!piece)
            return dray__nomem(error);
        uint64_t left = dray__round_up(bytes - p->bytes, DRAY__HUGE_PAGE);
        uint64_t size = left < DRAY__PINNED_PIECE ? left : DRAY__PINNED_PIECE;
        int rc = make_piece(size, piece, error);
        if (rc)
            return rc;
        p->count++;
        p->bytes += size;
    }
    return DRAY_OK;
}

void dray__pinned_pieces_free(dray__pinned_pieces *p)
{
    while (p->count)
        free_piece(&p->pieces[--p->count]);
    free(p->pieces);
    *p = (dray__pinned_pieces){0};
}
