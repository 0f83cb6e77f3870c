/* Openings (cuda_memory.h). For a second open of an IPC handle in one context the driver returns
 * the same pointer and counts, which makes a wrong close likely. So each allocation is opened once
 * here, and closed once. */
#include "memory/cuda_memory.h"

#include "base/error.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static dray__cuda_opening *all;

/* ---- by descriptor --------------------------------------------------------------------------- */

static CUresult allow(const dray__cuda *cuda, const dray__cuda_opening *o,
                      const dray__cuda_device *device, bool writable)
{
    CUmemAccessDesc access = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, device->ordinal},
                              .flags = writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                                : CU_MEM_ACCESS_FLAGS_PROT_READ};
    return cuda->cuMemSetAccess(o->address, o->bytes, &access, 1);
}

/* Gives read access if the driver supports that, else read and write access. */
static CUresult allow_least(const dray__cuda *cuda, dray__cuda_opening *o,
                            const dray__cuda_device *device)
{
    CUresult result = allow(cuda, o, device, o->writable);
    if ((result == CUDA_ERROR_NOT_SUPPORTED || result == CUDA_ERROR_INVALID_VALUE) &&
        !o->writable) {
        o->writable = true;
        result = allow(cuda, o, device, true);
    }
    return result;
}

static int map_descriptor(const dray__cuda *cuda, dray__cuda_opening *o, int fd, dray_error *error)
{
    unsigned long long member = o->member, bytes = o->bytes;
    if (fd < 0)
        return dray__fail(error, DRAY_EINVALID,
                          "cuda handle of member %llu: no descriptor came with it", member);
    CUresult result = cuda->cuMemImportFromShareableHandle(
        &o->handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result) {
        int rc = dray__fail_cuda(error, result,
                                 "cuda handle of member %llu: its descriptor %d is no GPU memory",
                                 member, fd);
        if (error)
            error->code = DRAY_EINVALID;
        return rc == DRAY_ENOMEM ? rc : DRAY_EINVALID;
    }
    result = cuda->cuMemAddressReserve(&o->address, o->bytes, 0, 0, 0);
    if (result)
        return dray__fail_cuda(error, result, "%llu bytes of addresses", bytes);
    result = cuda->cuMemMap(o->address, o->bytes, 0, o->handle, 0);
    if (result) {
        dray__fail_cuda(error, result,
                        "cuda handle of member %llu: mapping base_bytes, %llu, of the memory of "
                        "its descriptor",
                        member, bytes);
        cuda->cuMemAddressFree(o->address, o->bytes);
        o->address = 0;
        if (error)
            error->code = DRAY_EINVALID;
        return DRAY_EINVALID;
    }
    result = allow_least(cuda, o, o->device);
    if (result)
        return dray__fail_cuda(error, result, "access of %s to memory of member %llu",
                               o->device->name, member);
    o->reach = 1ull << o->device->index;
    return DRAY_OK;
}

static void unmap_descriptor(const dray__cuda *cuda, const dray__cuda_opening *o)
{
    if (o->address) {
        cuda->cuMemUnmap(o->address, o->bytes);
        cuda->cuMemAddressFree(o->address, o->bytes);
    }
    if (o->handle)
        cuda->cuMemRelease(o->handle);
}

/* ---- by IPC handle --------------------------------------------------------------------------- */

static int open_handle(const dray__cuda *cuda, dray__cuda_opening *o, dray_error *error)
{
    unsigned long long member = o->member;
    CUipcMemHandle ipc;
    memcpy(ipc.reserved, o->key, sizeof ipc.reserved);
    CUdeviceptr base = 0;
    size_t bytes = 0;
    CUresult result =
        cuda->cuIpcOpenMemHandle(&o->address, ipc, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (result) {
        o->address = 0;
        return dray__fail_cuda(error, result,
                               "cuda handle of member %llu: opening its IPC handle on %s (has its "
                               "owner freed the memory, or ended? is it this process's own?)",
                               member, o->device->name);
    }
    o->writable = true;
    o->reach = 1ull << o->device->index;
    result = cuda->cuMemGetAddressRange(&base, &bytes, o->address);
    if (result)
        return dray__fail_cuda(error, result, "cuda handle of member %llu: its size", member);
    if (base != o->address || bytes < o->bytes)
        return dray__fail(error, DRAY_EINVALID,
                          "cuda handle of member %llu: base_bytes is %llu, but the allocation has "
                          "%zu (freed, and another one made, since)",
                          member, (unsigned long long)o->bytes, bytes);
    o->bytes = bytes; /* a handle from PyTorch has only the bytes that are needed */
    return DRAY_OK;
}

/* ---- both ------------------------------------------------------------------------------------ */

static void end(dray__cuda_opening *o)
{
    const dray__cuda *cuda = dray__cuda_get(NULL);
    if (cuda && dray__cuda_enter(o->device, NULL) == DRAY_OK) {
        if (o->form == DRAY_CUDA_FORM_VMM)
            unmap_descriptor(cuda, o);
        else if (o->address)
            cuda->cuIpcCloseMemHandle(o->address);
        dray__cuda_leave();
    }
    free(o);
}

static dray__cuda_opening *find(const dray_handle *h, const dray__cuda_device *device)
{
    for (dray__cuda_opening *o = all; o; o = o->next)
        if (o->form == h->form && o->device == device && o->allocation == h->allocation &&
            o->member == h->owner_member && o->epoch == h->owner_epoch &&
            memcmp(o->key, h->key, sizeof o->key) == 0)
            return o;
    return NULL;
}

static int add(const dray__cuda *cuda, const dray_handle *h, int fd, bool writable,
               dray__cuda_device *device, dray__cuda_opening **out, dray_error *error)
{
    dray__cuda_opening *o = calloc(1, sizeof *o);
    if (!o)
        return dray__nomem(error);
    *o = (dray__cuda_opening){.form = h->form,
                              .writable = writable,
                              .allocation = h->allocation,
                              .member = h->owner_member,
                              .epoch = h->owner_epoch,
                              .device = device,
                              .bytes = h->base_bytes};
    memcpy(o->key, h->key, sizeof o->key);
    int rc = dray__cuda_enter(device, error);
    if (rc == DRAY_OK) {
        rc = o->form == DRAY_CUDA_FORM_VMM ? map_descriptor(cuda, o, fd, error)
                                           : open_handle(cuda, o, error);
        dray__cuda_leave();
    }
    if (rc) {
        end(o);
        return rc;
    }
    o->next = all;
    all = o;
    *out = o;
    return DRAY_OK;
}

/* Makes an opening that was mapped for reading writable. */
static int widen(const dray__cuda *cuda, dray__cuda_opening *o, dray_error *error)
{
    CUresult result = allow(cuda, o, o->device, true);
    if (result)
        return dray__fail_cuda(error, result, "writing to memory of member %llu",
                               (unsigned long long)o->member);
    o->writable = true;
    o->reach = 1ull << o->device->index; /* other GPUs get access again when they need it */
    return DRAY_OK;
}

int dray__opening_get(const dray_handle *handle, int fd, bool writable, dray__cuda_device *device,
                      dray__cuda_opening **out, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    if (!cuda)
        return DRAY_EUNSUPPORTED;
    pthread_mutex_lock(&lock);
    int rc = DRAY_OK;
    dray__cuda_opening *o = find(handle, device);
    if (o && (o->form == DRAY_CUDA_FORM_IPC ? o->bytes < handle->base_bytes
                                            : o->bytes != handle->base_bytes))
        rc = dray__fail(error, DRAY_EINVALID,
                        "cuda handle of member %llu: base_bytes is %llu, and was %llu in another "
                        "handle of the same allocation",
                        (unsigned long long)o->member, (unsigned long long)handle->base_bytes,
                        (unsigned long long)o->bytes);
    else if (!o)
        rc = add(cuda, handle, fd, writable, device, &o, error);
    else if (writable && !o->writable)
        rc = widen(cuda, o, error);
    if (rc == DRAY_OK) {
        o->users++;
        *out = o;
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

void dray__opening_put(dray__cuda_opening *opening)
{
    pthread_mutex_lock(&lock);
    bool last = --opening->users == 0;
    if (last) {
        dray__cuda_opening **link = &all;
        while (*link != opening)
            link = &(*link)->next;
        *link = opening->next;
        end(opening);
    }
    pthread_mutex_unlock(&lock);
}

int dray__opening_reach(dray__cuda_opening *o, dray__cuda_device *device, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    if (!cuda)
        return DRAY_EUNSUPPORTED;
    int rc = DRAY_OK;
    pthread_mutex_lock(&lock);
    if (o->reach & 1ull << device->index)
        ;
    else if (o->form == DRAY_CUDA_FORM_IPC)
        rc = dray__fail(error, DRAY_EUNSUPPORTED,
                        "memory of member %llu was opened for %s: import it once more with a "
                        "context of %s current",
                        (unsigned long long)o->member, o->device->name, device->name);
    else {
        CUresult result = allow_least(cuda, o, device);
        if (result)
            rc = dray__fail_cuda(error, result, "access of %s to memory of member %llu",
                                 device->name, (unsigned long long)o->member);
        else
            o->reach |= 1ull << device->index;
    }
    pthread_mutex_unlock(&lock);
    return rc;
}
