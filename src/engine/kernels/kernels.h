/* src/engine/kernels/: the arithmetic other than matrix products: norms, rotary positions, SwiGLU,
 * softmax. It is compiled for several instruction sets. The fastest one of the machine is chosen
 * when a model is opened, and all give the same bits. Each function is one field of the table and
 * one function in body.h.
 *
 * Matrices are row-major floats. Backward functions add to weight gradients and to inputs'
 * gradients if the comment says "adds", else they overwrite. */
#pragma once

#include <stdint.h>

/* One implementation of all functions. */
typedef struct dray__arithmetic {
    const char *name; /* "portable", "avx2", "avx512" */

    /* y = x · scale · weight with scale = 1 / sqrt(mean(x²) + epsilon), row by row (Zhang and
     * Sennrich 2019). The strides are floats between rows of x and of y. scales gets one number for
     * each row; NULL when they are not kept. */
    void (*rms_norm)(const float *x, const float *weight, float *y, int64_t rows, int64_t width,
                     int64_t x_stride, int64_t y_stride, float epsilon, float *scales);
    /* Adds to dx and to dweight. dy has the stride of dx. */
    void (*rms_norm_backward)(const float *x, const float *weight, const float *scales,
                              const float *dy, float *dx, float *dweight, int64_t rows,
                              int64_t width, int64_t x_stride, int64_t dx_stride);

    /* Rotates one head of one token in place, as transformers' rotate_half: element i pairs with i
     * + width / 2. cos and sin are width / 2 values of the position. sign -1 rotates back (for the
     * gradient). */
    void (*rotate)(float *head, const float *cos, const float *sin, int64_t width, float sign);

    /* out[row] = silu(gate) · up, where gate_up's rows are [gate; up] of `width` each. */
    void (*swiglu)(const float *gate_up, float *out, int64_t rows, int64_t width);
    void (*swiglu_backward)(const float *gate_up, const float *dout, float *dgate_up, int64_t rows,
                            int64_t width);

    float (*dot)(const float *a, const float *b, int64_t count);
    /* y += a · x */
    void (*axpy)(float a, const float *x, float *y, int64_t count);
    float (*max)(const float *x, int64_t count); /* count >= 1 */
    /* out[i] = exp(scale · x[i] - shift); returns their sum. out may be x. */
    float (*exp_sum)(const float *x, float scale, float shift, float *out, int64_t count);
} dray__arithmetic;

extern const dray__arithmetic dray__arithmetic_portable, dray__arithmetic_avx2,
    dray__arithmetic_avx512;

/* Returns the fastest implementation that this machine can run. $DRAY_KERNELS (a table's name)
 * selects a slower one. Thread-safe. */
const dray__arithmetic *dray__arithmetic_get(void);
/* Returns all that this machine can run, the fastest last, ended by NULL. Tests compare them. */
const dray__arithmetic *const *dray__arithmetic_all(void);
