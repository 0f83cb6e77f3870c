/* OpenBLAS is opened at run time, because the rest of the program does not need it. */
#include "engine/blas.h"

#include "base/error.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* The C interface of the BLAS Technical Forum (2001), appendix B; OpenBLAS's own functions. */
enum { ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112 };

static struct {
    void (*sgemm)(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a,
                  int lda, const float *b, int ldb, float beta, float *c, int ldc);
    char *(*config)(void);
} blas;

static char trouble[DRAY_ERROR_MESSAGE_MAX];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void *symbol(void *library, const char *prefix, const char *name)
{
    char whole[64];
    snprintf(whole, sizeof(whole), "%s%s", prefix, name);
    return dlsym(library, whole);
}

/* Loads OpenBLAS. A system without it may have PyPI's scipy-openblas32, which has a prefix before
 * each name. */
static void load(void)
{
    const char *wish = getenv("DRAY_OPENBLAS_LIBRARY");
    const char *const names[] = {wish ? wish : "libopenblas.so.0", wish ? NULL : "libopenblas.so"};
    void *library = NULL;
    for (size_t i = 0; i < 2 && names[i] && !library; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *why = dlerror();
        snprintf(trouble, sizeof(trouble), "%s", why ? why : "the dynamic linker gave no reason");
        return;
    }
    const char *prefix = dlsym(library, "scipy_cblas_sgemm") ? "scipy_" : "";
    void *sgemm = symbol(library, prefix, "cblas_sgemm");
    void *config = symbol(library, prefix, "openblas_get_config");
    if (!sgemm || !config) {
        snprintf(trouble, sizeof(trouble), "%s has no cblas_sgemm", names[0]);
        return;
    }
    memcpy(&blas.sgemm, &sgemm, sizeof(sgemm));
    memcpy(&blas.config, &config, sizeof(config));
}

const char *dray__blas_config(void)
{
    pthread_once(&once, load);
    return blas.sgemm ? blas.config() : NULL;
}

static void gemm(int ta, int tb, int64_t m, int64_t n, int64_t k, float alpha, const float *a,
                 int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
    if (m > 0 && n > 0)
        blas.sgemm(ROW_MAJOR, ta, tb, (int)m, (int)n, (int)k, alpha, a, (int)lda, b, (int)ldb, beta,
                   c, (int)ldc);
}

void dray__gemm_nt(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                   const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
    gemm(AS_IT_IS, TRANSPOSED, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void dray__gemm_nn(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                   const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
    gemm(AS_IT_IS, AS_IT_IS, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void dray__gemm_tn(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                   const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
    gemm(TRANSPOSED, AS_IT_IS, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

/* A thread's buffer in OpenBLAS 0.3 on x86-64, and some room for its other allocations. */
static const size_t BUFFER = (128 + 8) << 20;

int dray__blas_open(dray_error *error)
{
    enum { SIZE = 64 }; /* too large for OpenBLAS's buffers on the stack */
    static float a[SIZE * SIZE], b[SIZE * SIZE], c[SIZE * SIZE];
    void *room = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED)
        return dray__fail_errno(error, errno, "OpenBLAS: a buffer of %zu MiB", BUFFER >> 20);
    munmap(room, BUFFER);
    if (!dray__blas_config())
        return dray__fail(
            error, DRAY_ENOENT,
            "the built-in engine and trainer need OpenBLAS (`apt-get install libopenblas0`, "
            "or `pip install scipy-openblas32`), found none: %s; "
            "roles with a `command` do without",
            trouble);
    dray__gemm_nt(SIZE, SIZE, SIZE, 1, a, SIZE, b, SIZE, 0, c, SIZE);
    return DRAY_OK;
}
