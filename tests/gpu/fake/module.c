/* The fake driver's modules, whose kernels are those of src/mover/cuda/cuda_kernels.cu compiled as
 * C, and a fake NVRTC, whose cubins say for which source and architecture they were made. */
#include "module.h"

#include <stdlib.h>
#include <string.h>

typedef struct module module;

typedef struct function {
    module *owner;
    const fake_kernel *kernel;
    int shared_bytes; /* that a launch may ask for */
} function;

struct module {
    context *owner;
    function functions[];
};

/* ---- modules --------------------------------------------------------------------------------- */

uint64_t fake_image_sum(const void *data, size_t size)
{
    const uint8_t *bytes = data;
    uint64_t sum = 14695981039346656037ULL;
    for (size_t i = 0; i < size; i++)
        sum = (sum ^ bytes[i]) * 1099511628211ULL;
    return sum;
}

/* Takes what the fake NVRTC made, and what a real compiler did: ELF, fat binaries, PTX. */
static CUresult check_image(const void *image)
{
    fake_image made;
    const char *text = image;
    if (memcmp(text, FAKE_IMAGE, sizeof FAKE_IMAGE - 1) != 0) {
        bool real = memcmp(text, "\177ELF", 4) == 0 || memcmp(text, "\x50\xed\x55\xba", 4) == 0 ||
                    strstr(text, ".version");
        return real ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
    }
    memcpy(&made, image, sizeof made);
    if (made.sum != fake_image_sum(&made, offsetof(fake_image, sum)))
        return CUDA_ERROR_INVALID_IMAGE;
    return made.arch == fake_number("FAKE_CUDA_ARCH", 90) ? CUDA_SUCCESS
                                                          : CUDA_ERROR_NO_BINARY_FOR_GPU;
}

CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
    ENTER(cuModuleLoadData);
    CURRENT(c);
    CUresult rc = check_image(image);
    if (rc)
        return rc;
    fake_drain(c); /* loading waits for kernels that run, on real GPUs */
    module *m = calloc(1, sizeof *m + fake_kernel_count * sizeof m->functions[0]);
    if (!m)
        return CUDA_ERROR_OUT_OF_MEMORY;
    m->owner = c;
    for (size_t i = 0; i < fake_kernel_count; i++)
        m->functions[i] = (function){m, &fake_kernels[i], 48 << 10};
    *out = (CUmodule)m;
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule given)
{
    ENTER(cuModuleUnload);
    CURRENT(c);
    module *m = (module *)given;
    if (m->owner != c)
        return CUDA_ERROR_INVALID_CONTEXT;
    fake_drain(c);
    free(m);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule given, const char *name)
{
    ENTER(cuModuleGetFunction);
    module *m = (module *)given;
    for (size_t i = 0; i < fake_kernel_count; i++)
        if (strcmp(fake_kernels[i].name, name) == 0) {
            *out = (CUfunction)&m->functions[i];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

CUresult cuFuncSetAttribute(CUfunction given, int attribute, int value)
{
    ENTER(cuFuncSetAttribute);
    function *f = (function *)given;
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 ||
        value > 227 << 10)
        return CUDA_ERROR_INVALID_VALUE;
    f->shared_bytes = value;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction given, int block_size,
                                                     size_t shared_bytes)
{
    ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessor);
    (void)given, (void)shared_bytes;
    if (block_size < 1 || block_size > 1024)
        return CUDA_ERROR_INVALID_VALUE;
    *blocks = 2048 / block_size;
    return CUDA_SUCCESS;
}

/* ---- launches -------------------------------------------------------------------------------- */

enum { PARAMETER_MAX = 1024 };

typedef struct launch {
    const fake_kernel *kernel;
    unsigned int blocks;
    _Alignas(16) uint8_t parameter[PARAMETER_MAX];
} launch;

/* A block has one thread here; blocks run one after the other, other streams beside them. */
static CUresult do_launch(context *c, void *argument)
{
    launch l;
    memcpy(&l, argument, sizeof l);
    fake_imports_check();
    if (__atomic_load_n(&c->sticky, __ATOMIC_SEQ_CST))
        return CUDA_SUCCESS;
    for (unsigned int i = 0; i < l.blocks; i++) {
        fake_kernel_place(i, l.blocks);
        l.kernel->run(l.parameter);
    }
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction given, unsigned int grid_x, unsigned int grid_y,
                        unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                        unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                        void **parameters, void **extra)
{
    ENTER(cuLaunchKernel);
    CURRENT(c);
    const function *f = (const function *)given;
    if (!grid_x || grid_x > INT32_MAX || grid_y != 1 || grid_z != 1 || !block_x || block_y != 1 ||
        block_z != 1 || block_x > 1024 || extra || !parameters)
        return CUDA_ERROR_INVALID_VALUE;
    if (fake_stream_owner(c, stream) !=
        f->owner->owner) /* a function belongs to the context of its module */
        return CUDA_ERROR_INVALID_HANDLE;
    if (shared_bytes > (unsigned)f->shared_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    launch l = {.kernel = f->kernel, .blocks = grid_x};
    memcpy(l.parameter, parameters[0], f->kernel->bytes);
    return fake_submit(c, stream, do_launch, &l, sizeof l);
}
