/* Chooses the arithmetic for this machine, in the way that src/mover/kernels chooses the movers'
 * loops. */
#include "engine/kernels/kernels.h"
#include "mover/kernels/kernels.h"

#include <pthread.h>
#include <stddef.h>
#include <string.h>

static const dray__arithmetic *usable[4]; /* the fastest last, then NULL */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void choose(void)
{
    size_t count = 0;
    usable[count++] = &dray__arithmetic_portable;
#if defined(__x86_64__)
    const char *movers = dray__kernels_get()->name;
    if (strncmp(movers, "avx", 3) == 0)
        usable[count++] = &dray__arithmetic_avx2;
    if (strncmp(movers, "avx512", 6) == 0)
        usable[count++] = &dray__arithmetic_avx512;
#endif
}

const dray__arithmetic *dray__arithmetic_get(void)
{
    const dray__arithmetic *const *all = dray__arithmetic_all();
    while (all[1])
        all++;
    return all[0];
}

const dray__arithmetic *const *dray__arithmetic_all(void)
{
    pthread_once(&once, choose);
    return usable;
}
