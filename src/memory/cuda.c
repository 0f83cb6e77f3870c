/* Regions over GPU memory: allocated here, in an arena, by another allocator, or by another
 * process.
 *
 * The driver is asked whether memory can be exported, and how: VMM allocations as descriptors,
 * cudaMalloc's by legacy IPC handle, which exports the whole allocation, neighbours included.
 * Memory that this process exported itself is never opened (the driver refuses that); its own
 * address is used. */
#include "base/arena.h"
#include "base/error.h"
#include "base/options.h"
#include "memory/cuda_memory.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* The memory of a region: a chunk of its own or of another owner, an arena, or an opening. All
 * are NULL when another allocator owns the memory. */
struct dray__cuda_memory {
    dray__cuda_chunk *chunk; /* the region's own */
    dray__cuda_chunk *lent;  /* another owner's chunk, which outlives the region */
    dray_arena *arena;       /* held */
    dray__cuda_opening *opening;
    dray__cuda_storage storage; /* the allocation when the region was made */
    /* For exported memory; exports_lock guards these. */
    dray__cuda_memory *next;
    bool exported;
    int fd; /* the descriptor of another owner's VMM allocation */
    uint8_t key[64];
};

/* The exports that exist now, by which a process recognises its own handles. */
static pthread_mutex_t exports_lock = PTHREAD_MUTEX_INITIALIZER;
static dray__cuda_memory *exports;

/* ---- the allocation at an address
 * ---------------------------------------------------------------- */

static int form_of(const dray__cuda *cuda, CUdeviceptr address)
{
    unsigned long long allowed = 0;
    int legacy = 0, managed = 0;
    cuda->cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, address);
    CUresult result =
        cuda->cuPointerGetAttribute(&allowed, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, address);
    if (!result && allowed & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        CUmemGenericAllocationHandle handle;
        /* A pool may allow descriptors, too, but memory from a pool has no handle of its own. */
        if (cuda->cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)address) == 0) {
            cuda->cuMemRelease(handle);
            return DRAY_CUDA_FORM_VMM;
        }
    }
    result = cuda->cuPointerGetAttribute(&legacy, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                                         address);
    return !result && legacy && !managed ? DRAY_CUDA_FORM_IPC : DRAY_CUDA_FORM_NONE;
}

static int ask_storage(CUdeviceptr address, dray__cuda_storage *s, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(NULL);
    unsigned long long id = 0;
    size_t bytes = 0;
    int kind = 0;
    CUresult result = cuda->cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
    if (!result && kind != CU_MEMORYTYPE_DEVICE)
        return dray__fail(error, DRAY_EINVALID, "address 0x%llx is host memory, not a GPU's",
                          (unsigned long long)address);
    if (!result)
        result = cuda->cuMemGetAddressRange(&s->base, &bytes, address);
    if (!result)
        result = cuda->cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, s->base);
    if (result)
        return dray__fail_cuda(error, result, "the allocation at 0x%llx",
                               (unsigned long long)address);
    s->bytes = bytes;
    s->allocation = id;
    s->form = form_of(cuda, s->base);
    return DRAY_OK;
}

/* Describes memory outside arenas. Fails with DRAY_EINVALID when it is not GPU memory. */
static int cuda_storage_of(CUdeviceptr address, dray__cuda_storage *out, dray_error *error)
{
    dray__cuda_storage s = {0};
    int rc = dray__cuda_device_of(address, &s.device, error);
    if (rc)
        return rc;
    rc = dray__cuda_enter(s.device, error);
    if (rc)
        return rc;
    rc = ask_storage(address, &s, error);
    dray__cuda_leave();
    if (rc == DRAY_OK)
        *out = s;
    return rc;
}

static int storage_at(dray_arena *arena, CUdeviceptr address, dray__cuda_storage *out,
                      dray_error *error)
{
    return arena ? dray__gpu_arena_storage(arena, address, out, error)
                 : cuda_storage_of(address, out, error);
}

int dray_gpu_storage_of(uint64_t address, dray_gpu_storage *out, dray_error *error)
{
    int rc = DRAY__OPTIONS_CHECK(dray_gpu_storage, form, out, error);
    if (rc)
        return rc;
    dray_arena *arena = dray__gpu_arena_of(address);
    dray__cuda_storage s;
    rc = storage_at(arena, address, &s, error);
    dray__gpu_arena_put(arena);
    if (rc)
        return rc;
    dray_gpu_storage filled = DRAY_GPU_STORAGE_INIT;
    filled.base = s.base;
    filled.bytes = s.bytes;
    filled.allocation = s.allocation;
    filled.form = s.form;
    memcpy(filled.uuid, s.device->uuid, sizeof filled.uuid);
    dray__options_fill(out, &filled, sizeof filled);
    return DRAY_OK;
}

int dray__cuda_device_here(const uint8_t *uuid, dray__cuda_device **out, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    if (!cuda)
        return DRAY_EUNSUPPORTED;
    CUcontext context = NULL;
    CUdevice ordinal;
    if (cuda->cuCtxGetCurrent(&context) == CUDA_SUCCESS && context &&
        cuda->cuCtxGetDevice(&ordinal) == CUDA_SUCCESS)
        for (int i = 0; dray__cuda_device_at(i, out, NULL) == DRAY_OK; i++)
            if ((*out)->ordinal == ordinal)
                return DRAY_OK;
    if (uuid && dray__cuda_device_find(uuid, out, NULL) == DRAY_OK)
        return DRAY_OK;
    return dray__cuda_device_at(0, out, error);
}

/* ---- making ---------------------------------------------------------------------------------- */

static dray__cuda_memory *new_memory(dray_region *region, dray_error *error)
{
    region->cuda = calloc(1, sizeof *region->cuda);
    if (!region->cuda)
        dray__nomem(error);
    else
        region->cuda->fd = -1;
    return region->cuda;
}

static void set_device(dray_region *region, dray__cuda_device *device, CUdeviceptr address)
{
    region->device = device;
    region->device_address = address;
    memcpy(region->device_uuid, device->uuid, sizeof region->device_uuid);
}

/* Gives the region physical memory of its own, which is zeroed. */
static int back(dray_region *region, dray__cuda_chunk *chunk, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(NULL);
    CUresult result = cuda->cuMemAddressReserve(&chunk->address, chunk->bytes, 0, 0, 0);
    if (result)
        return dray__fail_cuda(error, result, "region %s: %llu bytes of addresses", region->name,
                               (unsigned long long)chunk->bytes);
    int rc = dray__chunk_back(chunk, error);
    if (rc)
        return rc;
    CUstream stream;
    result = cuda->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    if (!result) {
        result = cuda->cuMemsetD8Async(chunk->address, 0, chunk->bytes, stream);
        CUresult synced = cuda->cuStreamSynchronize(stream);
        result = result ? result : synced;
        cuda->cuStreamDestroy(stream);
    }
    return dray__fail_cuda(error, result, "region %s: zeroing", region->name);
}

static int alloc_on(dray_region *region, dray__cuda_device *device, dray_error *error)
{
    uint64_t unit = dray__chunk_granularity(device, error);
    if (!unit)
        return DRAY_EUNSUPPORTED;
    if (region->bytes > INT64_MAX - unit)
        return dray__fail(error, DRAY_ENOMEM, "region %s: %llu bytes is more than any GPU has",
                          region->name, (unsigned long long)region->bytes);
    dray__cuda_memory *memory = new_memory(region, error);
    if (!memory || !(memory->chunk = calloc(1, sizeof *memory->chunk)))
        return memory ? dray__nomem(error) : DRAY_ENOMEM;
    uint64_t bytes = region->bytes ? region->bytes : 1;
    *memory->chunk =
        (dray__cuda_chunk){.device = device, .bytes = dray__round_up(bytes, unit), .fd = -1};
    int rc = dray__cuda_enter(device, error);
    if (rc)
        return rc;
    rc = back(region, memory->chunk, error);
    dray__cuda_leave();
    if (rc)
        return rc;
    set_device(region, device, memory->chunk->address);
    memory->storage = (dray__cuda_storage){device, memory->chunk->address, memory->chunk->bytes,
                                           memory->chunk->allocation, DRAY_CUDA_FORM_VMM};
    return DRAY_OK;
}

static int alloc(dray_region *region, dray_error *error)
{
    dray__cuda_device *device;
    int rc = dray__cuda_device_here(NULL, &device, error);
    return rc ? rc : alloc_on(region, device, error);
}

int dray__region_alloc_cuda(const uint8_t uuid[16], uint64_t bytes, const char *name,
                            dray_region **out, dray_error *error)
{
    dray__cuda_device *device;
    int rc = dray__cuda_device_find(uuid, &device, error);
    if (rc)
        return rc;
    dray_region *region = dray__region_new(&dray__region_cuda, name, bytes, true, error);
    if (!region)
        return DRAY_ENOMEM;
    rc = alloc_on(region, device, error);
    if (rc)
        dray_region_free(region);
    else
        *out = region;
    return rc;
}

/* Makes a region over memory that this process has at the address. */
static int lay_over(dray_region *region, CUdeviceptr address, dray_error *error)
{
    dray__cuda_memory *memory = new_memory(region, error);
    if (!memory)
        return DRAY_ENOMEM;
    memory->arena = dray__gpu_arena_of(address);
    dray__cuda_storage *s = &memory->storage;
    int rc = storage_at(memory->arena, address, s, error);
    if (rc)
        return rc;
    if (region->bytes > s->bytes - (address - s->base))
        return dray__fail(
            error, DRAY_EINVALID,
            "region %s: %llu bytes from 0x%llx go beyond their allocation, which ends "
            "%llu bytes on: make a region of each piece",
            region->name, (unsigned long long)region->bytes, (unsigned long long)address,
            (unsigned long long)(s->bytes - (address - s->base)));
    set_device(region, s->device, address);
    return DRAY_OK;
}

int dray_region_wrap_cuda(uint64_t address, uint64_t bytes, const char *name, dray_region **out,
                          dray_error *error)
{
    if (!dray__cuda_get(error))
        return DRAY_EUNSUPPORTED;
    if (!address || !bytes)
        return dray__fail(error, DRAY_EINVALID, "region %s: GPU memory to wrap is empty",
                          name ? name : "");
    dray_region *region = dray__region_new(&dray__region_cuda, name, bytes, true, error);
    if (!region)
        return DRAY_ENOMEM;
    int rc = lay_over(region, address, error);
    if (rc)
        dray_region_free(region);
    else
        *out = region;
    return rc;
}

/* Asks the driver once per region, as publishers have thousands of regions. A number is never
 * given twice, and its allocation never moves or grows. */
static bool same_allocation(const dray_region *region)
{
    unsigned long long id = 0;
    const dray__cuda *cuda = dray__cuda_get(NULL);
    return cuda && !region->cuda->arena &&
           cuda->cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID,
                                       region->device_address) == CUDA_SUCCESS &&
           id == region->cuda->storage.allocation;
}

static int check(const dray_region *region, dray_error *error)
{
    const dray__cuda_memory *memory = region->cuda;
    dray__cuda_storage now;
    if (memory->chunk || memory->lent || memory->opening || same_allocation(region))
        return DRAY_OK;
    const dray__cuda_storage *then = &memory->storage;
    int rc = storage_at(memory->arena, region->device_address, &now, error);
    /* A resumed arena has other memory at the same addresses. That matters only to processes with a
     * handle of the old memory. */
    bool same = rc == DRAY_OK && now.base == then->base && now.bytes == then->bytes &&
                (now.allocation == then->allocation || (memory->arena && !memory->exported));
    if (same)
        return DRAY_OK;
    return dray__fail(error, DRAY_ESTALE,
                      "region %s: the GPU memory that it was made of, %llu bytes at 0x%llx, is %s",
                      region->name, (unsigned long long)then->bytes, (unsigned long long)then->base,
                      rc ? "freed, or its arena released" : "another allocation now");
}

/* ---- exporting ------------------------------------------------------------------------------- */

/* A part of the names of this process's exports. */
static uint8_t nonce[16];
static pthread_once_t nonce_once = PTHREAD_ONCE_INIT;

static void make_nonce(void)
{
    if (getrandom(nonce, sizeof nonce, 0) != (ssize_t)sizeof nonce)
        nonce[0] = (uint8_t)getpid();
    nonce[0] |= 1; /* A name is never all zeros. */
}

static int export_foreign(dray__cuda_memory *memory, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(NULL);
    CUmemGenericAllocationHandle handle;
    CUresult result;
    int rc = dray__cuda_enter(memory->storage.device, error);
    if (rc)
        return rc;
    if (memory->storage.form == DRAY_CUDA_FORM_IPC) {
        CUipcMemHandle ipc;
        result = cuda->cuIpcGetMemHandle(&ipc, memory->storage.base);
        if (!result)
            memcpy(memory->key, ipc.reserved, sizeof memory->key);
    } else {
        result =
            cuda->cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)memory->storage.base);
        if (!result) {
            result = cuda->cuMemExportToShareableHandle(
                &memory->fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
            cuda->cuMemRelease(handle);
        }
        /* Sends its name along: unlike an IPC handle, the descriptor does not identify the
         * memory. */
        pthread_once(&nonce_once, make_nonce);
        memset(memory->key, 0, sizeof memory->key);
        memcpy(memory->key, nonce, sizeof nonce);
        memcpy(memory->key + sizeof nonce, &memory->storage.allocation, sizeof(uint64_t));
    }
    dray__cuda_leave();
    return dray__fail_cuda(error, result, "exporting GPU memory at 0x%llx",
                           (unsigned long long)memory->storage.base);
}

static int export_memory(const dray_region *region, dray_error *error)
{
    dray__cuda_memory *memory = region->cuda;
    if (memory->arena)
        return dray__gpu_arena_export(memory->arena, region->device_address, memory->key,
                                      &memory->storage.allocation, error);
    if (!memory->chunk)
        return export_foreign(memory, error);
    int rc = dray__chunk_export(memory->chunk, error);
    memcpy(memory->key, memory->chunk->name, sizeof memory->key);
    /* It is another allocation after an exchange. */
    memory->storage.allocation = memory->chunk->allocation;
    return rc;
}

static int can_export(const dray_region *region, dray_error *error)
{
    const dray__cuda_memory *memory = region->cuda;
    if (memory->opening)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "region %s is GPU memory of another process, which cannot be exported "
                          "once more: ask its owner",
                          region->name);
    if (memory->storage.form == DRAY_CUDA_FORM_NONE)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "region %s: the driver does not export this GPU memory (of "
                          "cudaMallocAsync, a memory pool, or managed): declare staging_bytes, "
                          "through which it then passes, or allocate it in a dray arena",
                          region->name);
    return check(region, error);
}

static int describe(const dray_region *region, dray_handle *handle, dray_error *error)
{
    dray__cuda_memory *memory = region->cuda;
    int rc = can_export(region, error);
    if (rc)
        return rc;
    pthread_mutex_lock(&exports_lock);
    handle->base_offset = region->device_address - memory->storage.base;
    handle->base_bytes = memory->storage.bytes;
    handle->form = memory->storage.form;
    if (!memory->exported) {
        rc = export_memory(region, error);
        if (rc == DRAY_OK) {
            memory->exported = true;
            memory->next = exports;
            exports = memory;
        }
    }
    memcpy(handle->key, memory->key, sizeof handle->key);
    handle->allocation = memory->storage.allocation;
    memcpy(handle->device, region->device_uuid, sizeof handle->device);
    pthread_mutex_unlock(&exports_lock);
    return rc;
}

static void unexport(dray_region *region)
{
    dray__cuda_memory *memory = region->cuda;
    if (!memory)
        return;
    pthread_mutex_lock(&exports_lock);
    if (memory->exported) {
        dray__cuda_memory **link = &exports;
        while (*link != memory)
            link = &(*link)->next;
        *link = memory->next;
        memory->exported = false;
        if (memory->arena)
            dray__gpu_arena_unexport(memory->arena, region->device_address,
                                     memory->storage.allocation);
        else if (memory->chunk)
            dray__chunk_unexport(memory->chunk);
        else if (memory->fd >= 0)
            close(memory->fd);
        memory->fd = -1;
    }
    pthread_mutex_unlock(&exports_lock);
}

static int descriptor(const dray_region *region)
{
    const dray__cuda_memory *memory = region->cuda;
    if (!memory->exported)
        return -1;
    return memory->arena   ? dray__gpu_arena_fd(memory->arena, region->device_address,
                                                memory->storage.allocation)
           : memory->chunk ? memory->chunk->fd
                           : memory->fd;
}

/* ---- importing ------------------------------------------------------------------------------- */

/* Returns the address of the allocation that this process exported under the handle's name, or 0
 * when it exported none. *chunk is true when the allocation is a region's own; then the driver's
 * number for it differs from the handle's. */
static CUdeviceptr own_export(const dray_handle *h, bool *chunk)
{
    CUdeviceptr base = 0;
    pthread_mutex_lock(&exports_lock);
    for (const dray__cuda_memory *m = exports; m && !base; m = m->next)
        if (m->storage.form == h->form && m->storage.allocation == h->allocation &&
            m->storage.bytes == h->base_bytes && memcmp(m->key, h->key, sizeof m->key) == 0) {
            base = m->storage.base;
            *chunk = m->chunk != NULL;
        }
    pthread_mutex_unlock(&exports_lock);
    return base;
}

static int import(dray_region *region, const dray_handle *handle, int fd, dray_error *error)
{
    dray__cuda_device *device;
    bool chunk = false;
    int rc = dray__cuda_device_here(handle->device, &device, error);
    if (rc)
        return rc;
    CUdeviceptr own = own_export(handle, &chunk);
    if (own) {
        rc = lay_over(region, own + handle->base_offset, error);
        if (rc == DRAY_OK && !chunk && region->cuda->storage.allocation != handle->allocation)
            rc = dray__fail(error, DRAY_ESTALE,
                            "cuda handle of this process: the memory that it names was released or "
                            "freed, and other memory lies there now");
        return rc;
    }
    dray__cuda_memory *memory = new_memory(region, error);
    if (!memory)
        return DRAY_ENOMEM;
    rc = dray__opening_get(handle, fd, region->writable, device, &memory->opening, error);
    if (rc)
        return rc;
    memory->storage = (dray__cuda_storage){device, memory->opening->address, memory->opening->bytes,
                                           handle->allocation, DRAY_CUDA_FORM_NONE};
    region->device = device;
    region->device_address = memory->opening->address + handle->base_offset;
    memcpy(region->device_uuid, handle->device, sizeof region->device_uuid);
    return DRAY_OK;
}

static void free_chunk(dray__cuda_chunk *chunk)
{
    const dray__cuda *cuda = dray__cuda_get(NULL);
    if (cuda && chunk->address && dray__cuda_enter(chunk->device, NULL) == DRAY_OK) {
        dray__chunk_drop(chunk);
        cuda->cuMemAddressFree(chunk->address, chunk->bytes);
        dray__cuda_leave();
    }
    free(chunk);
}

static void release(dray_region *region)
{
    dray__cuda_memory *memory = region->cuda;
    if (!memory)
        return;
    unexport(region);
    if (memory->chunk)
        free_chunk(memory->chunk);
    if (memory->opening)
        dray__opening_put(memory->opening);
    dray__gpu_arena_put(memory->arena);
    free(memory);
}

/* The synchronous copy returns while the bytes are still on their way, and streams that do not
 * wait for the default stream would not see them. */
static CUresult write_all(const dray__cuda *cuda, CUdeviceptr at, const void *data, uint64_t bytes)
{
    CUresult result = cuda->cuMemcpyHtoD(at, data, bytes);
    return result ? result : cuda->cuStreamSynchronize(NULL);
}

static int transfer(const dray_region *region, uint64_t offset, void *data, uint64_t bytes,
                    bool write, dray_error *error)
{
    CUdeviceptr at = region->device_address + offset;
    int rc = check(region, error);
    if (rc == DRAY_OK)
        rc = dray__cuda_enter(region->device, error);
    if (rc)
        return rc;
    const dray__cuda *cuda = dray__cuda_get(NULL);
    CUresult result =
        write ? write_all(cuda, at, data, bytes) : cuda->cuMemcpyDtoH(data, at, bytes);
    dray__cuda_leave();
    return dray__fail_cuda(error, result, "region %s: %s %llu bytes", region->name,
                           write ? "writing" : "reading", (unsigned long long)bytes);
}

/* ---- for exchanges --------------------------------------------------------------------------- */

dray__cuda_chunk *dray__region_chunk(const dray_region *region)
{
    return region->cuda ? region->cuda->chunk : NULL;
}

dray_arena *dray__region_arena(const dray_region *region)
{
    return region->cuda ? region->cuda->arena : NULL;
}

bool dray__region_exported(const dray_region *region)
{
    pthread_mutex_lock(&exports_lock);
    bool exported = region->cuda && region->cuda->exported;
    pthread_mutex_unlock(&exports_lock);
    return exported;
}

uint64_t dray__region_content(const dray_region *region)
{
    const dray__cuda_memory *memory = region->cuda;
    const dray__cuda *cuda = memory ? dray__cuda_get(NULL) : NULL;
    unsigned long long id = 0;
    if (!cuda || memory->chunk || memory->lent || memory->opening)
        return 0;
    if (memory->arena)
        return dray__gpu_arena_content(memory->arena, region->device_address);
    cuda->cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, region->device_address);
    return id;
}

int dray__region_over_chunk(dray__cuda_chunk *chunk, uint64_t offset, uint64_t bytes,
                            const char *name, dray_region **out, dray_error *error)
{
    dray_region *region = dray__region_new(&dray__region_cuda, name, bytes, true, error);
    dray__cuda_memory *memory = region ? new_memory(region, error) : NULL;
    if (!memory) {
        dray_region_free(region);
        return DRAY_ENOMEM;
    }
    memory->lent = chunk;
    memory->storage =
        (dray__cuda_storage){chunk->device, chunk->address, chunk->bytes, 0, DRAY_CUDA_FORM_NONE};
    set_device(region, chunk->device, chunk->address + offset);
    *out = region;
    return DRAY_OK;
}

/* ---- from other GPUs ------------------------------------------------------------------------- */

static int enable_peer(const dray_region *region, dray__cuda_device *device, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    int rc = cuda ? dray__cuda_enter(region->device, error) : DRAY_EUNSUPPORTED;
    if (rc)
        return rc;
    dray__cuda_leave(); /* Its context exists now. */
    rc = dray__cuda_enter(device, error);
    if (rc)
        return rc;
    CUresult result = cuda->cuCtxEnablePeerAccess(region->device->context, 0);
    dray__cuda_leave();
    if (result && result != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
        return dray__fail_cuda(error, result, "access of %s to memory of %s", device->name,
                               region->device->name);
    return DRAY_OK;
}

int dray__region_reach(const dray_region *region, dray__cuda_device *device, dray_error *error)
{
    const dray__cuda_memory *memory = region->cuda;
    if (!memory || region->device == device)
        return DRAY_OK;
    if (memory->opening)
        return dray__opening_reach(memory->opening, device, error);
    if (memory->arena)
        return dray__gpu_arena_reach(memory->arena, region->device_address, device, error);
    if (memory->chunk || memory->lent)
        return dray__chunk_reach(memory->chunk ? memory->chunk : memory->lent, device, error);
    return enable_peer(region, device, error);
}

const dray__region_ops dray__region_cuda = {.kind = DRAY_REGION_CUDA,
                                            .alloc = alloc,
                                            .describe = describe,
                                            .import = import,
                                            .release = release,
                                            .check = check,
                                            .unexport = unexport,
                                            .descriptor = descriptor,
                                            .transfer = transfer};
