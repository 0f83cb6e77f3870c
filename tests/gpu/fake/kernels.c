/* The kernels, from the very source that is compiled for GPUs. */
#include "fake.h"

#include "mover/cuda_kernels.cu"

#define XX(name)                                                                                   \
    static void run_##name(const void *parameter)                                                  \
    {                                                                                              \
        name(*(const dray__gpu_launch *)parameter);                                                \
    }
DRAY__GPU_KERNELS(XX)
#undef XX

const fake_kernel fake_kernels[] = {
#define XX(name) {#name, sizeof(dray__gpu_launch), run_##name},
    DRAY__GPU_KERNELS(XX)
#undef XX
};
const size_t fake_kernel_count = sizeof fake_kernels / sizeof *fake_kernels;

void fake_kernel_place(unsigned int block, unsigned int blocks)
{
    dray__gpu_here = (dray__gpu_spot){.block = block, .blocks = blocks, .threads = 1};
}
