/* C = alpha · op(A) · op(B) + beta · C for row-major float matrices: C is m × n, the inner
 * dimension is k; ld: floats between rows. n and t say which operand is transposed. */
#pragma once

#include <dray/dray.h>
#include <stdint.h>

/* The configuration that OpenBLAS was built with; NULL when it is not there. $DRAY_OPENBLAS_LIBRARY
 * names its file; without it, the system's is opened, once for the process. Thread-safe. */
const char *dray__blas_config(void);
/* Opens OpenBLAS, which the functions below need. Lets it take its work buffer now: when there is
 * no memory for it, OpenBLAS would try for ever. Returns 0, DRAY_ENOMEM, or DRAY_ENOENT when it is
 * not there. */
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
