/* The fake driver's copies. Both sides are checked when a copy is asked for and again when its turn
 * comes: memory that was unmapped in between is an error of the context then, as on a GPU. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

typedef struct copy {
    uintptr_t to, from;
    size_t bytes;
    bool to_device, from_device;
} copy;

static CUresult check(context *c, const copy *k)
{
    if (!k->bytes)
        return CUDA_SUCCESS;
    CUresult rc = fake_may(c, k->from, k->bytes, false, k->from_device);
    return rc ? rc : fake_may(c, k->to, k->bytes, true, k->to_device);
}

/* A word may be looked at by a kernel that runs: it comes whole. */
static void move(uintptr_t to, uintptr_t from, size_t bytes)
{
    uint32_t word;
    if (bytes != sizeof word || to % sizeof word) {
        memmove((void *)to, (const void *)from, bytes);
        return;
    }
    memcpy(&word, (const void *)from, sizeof word);
    __atomic_store_n((uint32_t *)to, word, __ATOMIC_RELAXED);
}

static CUresult do_copy(context *c, void *argument)
{
    const copy *k = argument;
    fake_imports_check();
    if (__atomic_load_n(&c->sticky, __ATOMIC_SEQ_CST))
        return CUDA_SUCCESS;
    if (check(c, k))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    move(k->to, k->from, k->bytes);
    return CUDA_SUCCESS;
}

static CUresult submit(const copy *k, CUstream stream, bool wait)
{
    CURRENT(c);
    fake_imports_check();
    CUresult rc = check(c, k);
    if (!rc)
        rc = fake_submit(c, stream, do_copy, k, sizeof *k);
    if (!rc && wait)
        rc = fake_stream_wait(c, stream);
    return rc;
}

static CUresult run_of(uintptr_t to, bool to_device, uintptr_t from, bool from_device, size_t bytes,
                       CUstream stream, bool wait)
{
    const copy k = {to, from, bytes, to_device, from_device};
    return submit(&k, stream, wait);
}

typedef struct staged {
    uintptr_t to;
    size_t bytes;
    void *from;
} staged;

static CUresult do_staged(context *c, void *argument)
{
    const staged *s = argument;
    CUresult rc = __atomic_load_n(&c->sticky, __ATOMIC_SEQ_CST);
    if (!rc)
        rc = fake_may(c, s->to, s->bytes, true, true) ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
    if (!rc)
        memcpy((void *)s->to, s->from, s->bytes);
    free(s->from);
    return rc;
}

/* From pageable memory, as the reference has it: what comes before is waited for, the call returns
 * when the bytes are out of the caller's hands, and they arrive later. Streams that do not wait for
 * the default one have to be told. */
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes)
{
    ENTER(cuMemcpyHtoD);
    CURRENT(c);
    CUresult rc = fake_may(c, to, bytes, true, true);
    if (!rc)
        rc = fake_may(c, (uintptr_t)from, bytes, false, false);
    if (!rc)
        rc = fake_stream_wait(c, NULL);
    staged s = {to, bytes, rc ? NULL : malloc(bytes + 1)};
    if (!rc && !s.from)
        rc = CUDA_ERROR_OUT_OF_MEMORY;
    if (rc)
        return rc;
    memcpy(s.from, from, bytes);
    rc = fake_submit(c, NULL, do_staged, &s, sizeof s);
    if (rc)
        free(s.from);
    return rc;
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes)
{
    ENTER(cuMemcpyDtoH);
    return run_of((uintptr_t)to, false, from, true, bytes, NULL, true);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    ENTER(cuMemcpyDtoD);
    return run_of(to, true, from, true, bytes, NULL, false); /* nobody waits for it */
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    ENTER(cuMemcpyHtoDAsync);
    return run_of(to, true, (uintptr_t)from, false, bytes, stream, false);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    ENTER(cuMemcpyDtoHAsync);
    return run_of((uintptr_t)to, false, from, true, bytes, stream, false);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    ENTER(cuMemcpyDtoDAsync);
    return run_of(to, true, from, true, bytes, stream, false);
}

/* Is this address a GPU's? Else it is taken for the host's. */
static bool is_device(uintptr_t at)
{
    return fake_is_device_space(at);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    ENTER(cuMemcpyAsync);
    return run_of(to, is_device(to), from, is_device(from), bytes, stream, false);
}

/* ---- batches --------------------------------------------------------------------------------- */

/* The copies of a batch have no order among themselves: here the last goes first. */
static CUresult batch(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count,
                      const CUmemcpyAttributes *attributes, const size_t *attribute_from,
                      size_t attribute_count, CUstream stream)
{
    if (!count || !attribute_count || attribute_count > count || (uintptr_t)stream <= 2 ||
        attribute_from[0] != 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < attribute_count; i++)
        if (attributes[i].srcAccessOrder < 1 || attributes[i].srcAccessOrder > 3 ||
            attributes[i].flags > 1 ||
            (i && (attribute_from[i] <= attribute_from[i - 1] || attribute_from[i] >= count)))
            return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (!bytes[i])
            return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = count; i-- > 0;) {
        CUresult rc =
            run_of(to[i], is_device(to[i]), from[i], is_device(from[i]), bytes[i], stream, false);
        if (rc)
            return rc;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count,
                               CUmemcpyAttributes *attributes, size_t *attribute_from,
                               size_t attribute_count, CUstream stream)
{
    ENTER(cuMemcpyBatchAsync);
    return batch(to, from, bytes, count, attributes, attribute_from, attribute_count, stream);
}

CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count,
                            CUmemcpyAttributes *attributes, size_t *attribute_from,
                            size_t attribute_count, size_t *failed, CUstream stream)
{
    ENTER(cuMemcpyBatchAsync);
    *failed = SIZE_MAX;
    return batch(to, from, bytes, count, attributes, attribute_from, attribute_count, stream);
}

/* ---- filling --------------------------------------------------------------------------------- */

typedef struct filling {
    uintptr_t to;
    size_t count;
    uint32_t value;
    uint32_t size;
} filling;

static CUresult do_fill(context *c, void *argument)
{
    const filling *f = argument;
    if (__atomic_load_n(&c->sticky, __ATOMIC_SEQ_CST))
        return CUDA_SUCCESS;
    if (fake_may(c, f->to, f->count * f->size, true, true))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (f->size == 1)
        memset((void *)f->to, (int)f->value, f->count);
    for (size_t i = 0; f->size == 4 && i < f->count; i++)
        memcpy((void *)(f->to + 4 * i), &f->value, 4);
    return CUDA_SUCCESS;
}

/* Of GPU memory nobody waits for. */
static CUresult fill(const filling *f, CUstream stream)
{
    CURRENT(c);
    if (f->to % f->size)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = fake_may(c, f->to, f->count * f->size, true, true);
    if (!rc)
        rc = fake_submit(c, stream, do_fill, f, sizeof *f);
    return rc;
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count)
{
    ENTER(cuMemsetD8);
    return fill(&(filling){to, count, value, 1}, NULL);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream)
{
    ENTER(cuMemsetD8Async);
    return fill(&(filling){to, count, value, 1}, stream);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream)
{
    ENTER(cuMemsetD32Async);
    return fill(&(filling){to, count, value, 4}, stream);
}
