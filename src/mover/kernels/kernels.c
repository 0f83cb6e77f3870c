/* Chooses the inner loops for this machine. */
#include "mover/kernels/kernels.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

static const dray__kernels *usable[5]; /* the best last, then NULL */
static const dray__kernels *chosen;
static pthread_once_t once = PTHREAD_ONCE_INIT;

#if defined(__x86_64__)
/* Some compilers' __builtin_cpu_supports do not know "f16c". */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

static void choose(void)
{
    size_t count = 0;
    usable[count++] = &dray__kernels_portable;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && has_f16c())
        usable[count++] = &dray__kernels_avx2;
    if (count == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        usable[count++] = &dray__kernels_avx512;
    if (count == 3 && __builtin_cpu_supports("avx512ifma"))
        usable[count++] = &dray__kernels_avx512ifma;
#endif
    chosen = usable[count - 1];
    const char *wish = getenv("DRAY_KERNELS");
    for (size_t i = 0; wish && i < count; i++)
        if (strcmp(usable[i]->name, wish) == 0)
            chosen = usable[i];
}

const dray__kernels *dray__kernels_get(void)
{
    pthread_once(&once, choose);
    return chosen;
}

const dray__kernels *const *dray__kernels_all(void)
{
    pthread_once(&once, choose);
    return usable;
}

static const dray__cast *find(int32_t from, int32_t to)
{
    for (const dray__cast *cast = dray__kernels_get()->casts; cast->run; cast++)
        if (cast->from == from && cast->to == to)
            return cast;
    return NULL;
}

dray__cast_fn dray__cast_find(int32_t from, int32_t to)
{
    const dray__cast *cast = find(from, to);
    return cast ? cast->run : NULL;
}

dray__cast_summed_fn dray__cast_find_summed(int32_t from, int32_t to)
{
    const dray__cast *cast = find(from, to);
    return cast ? cast->run_summed : NULL;
}
