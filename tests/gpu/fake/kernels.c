/* The kernels, from the very source that is compiled for GPUs. */
#include "fake.h"

#include <stdatomic.h>
#include <string.h>

/* ---- stores and loads that go wrong ---------------------------------------------------------- */

/* kind: 0 none; 1 dropped, 2 two bits flip: the `at`-th store of at least 8 bytes to GPU memory by
 * kernels, counted from here; 3 two bits flip: the `at`-th such load. Returns how many stores (of
 * kind 3: loads) there were since the last call. */
__attribute__((visibility("default"))) uint64_t fake_cuda_fault(int kind, uint64_t at);

static atomic_int fault_kind;
static atomic_ullong fault_at, stores;

uint64_t fake_cuda_fault(int kind, uint64_t at)
{
    atomic_store(&fault_kind, kind);
    atomic_store(&fault_at, at);
    return atomic_exchange(&stores, 0);
}

static inline void copy_word(void *to, const void *from, size_t n)
{
    int kind = atomic_load_explicit(&fault_kind, memory_order_relaxed);
    bool wrong = kind && n >= 8 &&
                 fake_is_device_space(kind == 3 ? (uintptr_t)from : (uintptr_t)to) &&
                 atomic_fetch_add(&stores, 1) == atomic_load(&fault_at);
    if (wrong && kind == 1)
        return;
    memcpy(to, from, n);
    if (wrong && kind != 1)
        for (int i = 0; i < 2; i++)
            ((uint8_t *)to)[i] ^= 4;
}

#define memcpy copy_word
#include "mover/cuda/cuda_kernels.cu"
#undef memcpy

/* ---- the table ------------------------------------------------------------------------------- */

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
