/* PyTorch's allocator interface (torch.cuda.memory.CUDAPluggableAllocator: two C functions, found
 * by name) over arenas of the process, one for each tag and GPU. */
#include "memory/cuda_arena.h"

#include "base/error.h"
#include "base/log.h"
#include "base/options.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct pool {
    struct pool *next;
    int device;
    char tag[64];
    dray_arena *arena;
} pool;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pool *pools;
static char last_tag[64] = "weights";
static _Thread_local char own_tag[64];

static int check_tag(const char *tag, dray_error *error)
{
    size_t length = strlen(tag);
    if (length && length < sizeof own_tag)
        return DRAY_OK;
    return dray__fail(error, DRAY_EINVALID, "a tag of %zu bytes: 1 to %zu are possible", length,
                      sizeof own_tag - 1);
}

int dray_torch_use(const char *tag, dray_error *error)
{
    int rc = tag ? check_tag(tag, error) : DRAY_OK;
    if (rc)
        return rc;
    memset(own_tag, 0, sizeof own_tag);
    if (!tag)
        return DRAY_OK;
    snprintf(own_tag, sizeof own_tag, "%s", tag);
    pthread_mutex_lock(&lock);
    memcpy(last_tag, own_tag, sizeof last_tag);
    pthread_mutex_unlock(&lock);
    return DRAY_OK;
}

static int by_ordinal(int ordinal, dray__cuda_device **out, dray_error *error)
{
    for (int i = 0; dray__cuda_device_at(i, out, error) == DRAY_OK; i++)
        if ((*out)->ordinal == ordinal)
            return DRAY_OK;
    return dray__cuda_get(NULL) ? DRAY_ENOENT : DRAY_EUNSUPPORTED;
}

static int open_pool(const char *tag, int device, const dray_arena_options *given, pool **out,
                     dray_error *error)
{
    dray__cuda_device *on;
    dray_arena_options options = DRAY_ARENA_OPTIONS_INIT;
    int rc = by_ordinal(device, &on, error);
    if (rc == DRAY_OK)
        rc = DRAY__OPTIONS_READ(dray_arena_options, peers, &options, given, error);
    if (rc)
        return rc;
    options.tag = tag;
    memcpy(options.uuid, on->uuid, sizeof options.uuid);
    pool *p = calloc(1, sizeof *p);
    if (!p)
        return dray__nomem(error);
    rc = dray_arena_open(&options, &p->arena, error);
    if (rc) {
        free(p);
        return rc;
    }
    p->device = device;
    snprintf(p->tag, sizeof p->tag, "%s", tag);
    p->next = pools;
    pools = p;
    *out = p;
    return DRAY_OK;
}

int dray_torch_arena(const char *tag, int device, const dray_arena_options *options,
                     dray_arena **out, dray_error *error)
{
    int rc = check_tag(tag, error);
    if (rc)
        return rc;
    pthread_mutex_lock(&lock);
    pool *p = pools;
    while (p && (p->device != device || strcmp(p->tag, tag) != 0))
        p = p->next;
    if (!p)
        rc = open_pool(tag, device, options, &p, error);
    if (rc == DRAY_OK)
        *out = p->arena;
    pthread_mutex_unlock(&lock);
    return rc;
}

void *dray_torch_malloc(ptrdiff_t bytes, int device, void *stream)
{
    char tag[64];
    dray_arena *arena;
    dray_error error;
    uint64_t address = 0;
    (void)stream; /* no stream has used new memory */
    pthread_mutex_lock(&lock);
    memcpy(tag, *own_tag ? own_tag : last_tag, sizeof tag);
    pthread_mutex_unlock(&lock);
    int rc = bytes < 0 ? dray__fail(&error, DRAY_EINVALID, "a negative size")
                       : dray_torch_arena(tag, device, NULL, &arena, &error);
    if (rc == DRAY_OK)
        rc = dray_arena_alloc(arena, (uint64_t)bytes, &address, &error);
    if (rc) {
        dray__log(DRAY_LOG_ERROR, "%td bytes of GPU %d for PyTorch (tag %s): %s", bytes, device,
                  tag, error.message);
        return NULL;
    }
    return (void *)(uintptr_t)address;
}

void dray_torch_free(void *memory, ptrdiff_t bytes, int device, void *stream)
{
    const dray__cuda *cuda = dray__cuda_get(NULL);
    dray_arena *arena = dray__gpu_arena_of((CUdeviceptr)(uintptr_t)memory);
    dray_error error;
    (void)bytes, (void)device;
    /* cudaFree waits for the GPU, and unmapping does not. The stream's work on the memory must be
     * done before the memory is unmapped. */
    if (cuda && arena && dray__cuda_enter(arena->device, NULL) == DRAY_OK) {
        cuda->cuStreamSynchronize(stream);
        dray__cuda_leave();
    }
    if (!arena)
        dray__log(DRAY_LOG_ERROR, "PyTorch frees %p, which is in no arena", memory);
    else if (dray_arena_free(arena, (uint64_t)(uintptr_t)memory, &error))
        dray__log(DRAY_LOG_ERROR, "PyTorch frees %p: %s", memory, error.message);
    dray__gpu_arena_put(arena);
}
