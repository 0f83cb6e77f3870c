/* C = alpha · op(A) · op(B) + beta · C for row-major float matrices: C is m × n, the inner
 * dimension is k; ld is the number of floats between rows. In the names, t marks a transposed
 * operand. */
#pragma once

#include <dray/dray.h>
#include <stdint.h>

/* Returns the configuration that OpenBLAS was built with; NULL when it is not installed.
 * $DRAY_OPENBLAS_LIBRARY names its file; without it, the system's is opened, once for the process.
 * Thread-safe. */
const char *dray__blas_config(void);
/* Opens OpenBLAS, which the functions below need. Has it allocate its work buffer now, because
 * without memory OpenBLAS would retry for ever. Returns 0, DRAY_ENOMEM, or DRAY_ENOENT when it is
 * not installed. */
int dray__blas_open(dray_error *error);
/* A is m × k, B is n × k. */
void dray__gemm_nt(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                   const float *b, int64_t ldb, float beta, float *c, int64_t ldc);
/* A is m × k, B is k × n. */
void dray__gemm_nn(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                   const float *b, int64_t ldb, float beta, float *c, int64_t ldc);
/* A is k × m, B is k × n. */
void dray__gemm_tn(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                   const float *b, int64_t ldb, float beta, float *c, int64_t ldc);
