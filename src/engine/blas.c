#include "engine/blas.h"

#include "base/error.h"

#include <cblas.h>
#include <errno.h>
#include <sys/mman.h>

static void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int64_t m, int64_t n, int64_t k,
                 float alpha, const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                 float *c, int64_t ldc)
{
    if (m > 0 && n > 0)
        cblas_sgemm(CblasRowMajor, ta, tb, (blasint)m, (blasint)n, (blasint)k, alpha, a,
                    (blasint)lda, b, (blasint)ldb, beta, c, (blasint)ldc);
}

void dray__gemm_nt(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                   const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
    gemm(CblasNoTrans, CblasTrans, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void dray__gemm_nn(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                   const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
    gemm(CblasNoTrans, CblasNoTrans, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void dray__gemm_tn(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                   const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
    gemm(CblasTrans, CblasNoTrans, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

/* Of OpenBLAS 0.3 on x86-64 a thread's buffer, and something for what it begins besides. */
static const size_t BUFFER = (128 + 8) << 20;

int dray__blas_open(dray_error *error)
{
    enum { SIZE = 64 }; /* too much for its buffers on the stack */
    static float a[SIZE * SIZE], b[SIZE * SIZE], c[SIZE * SIZE];
    void *room = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED)
        return dray__fail_errno(error, errno, "OpenBLAS: a buffer of %zu MiB", BUFFER >> 20);
    munmap(room, BUFFER);
    dray__gemm_nt(SIZE, SIZE, SIZE, 1, a, SIZE, b, SIZE, 0, c, SIZE);
    return DRAY_OK;
}
