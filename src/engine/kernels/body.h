/* The loops of one table (KERNELS, KERNELS_NAME), compiled once for each instruction set. They use
 * LANES independent sums, which compilers can vectorise without reordering floating-point sums, and
 * are compiled without fused multiply-add. So every table gives the same bits. */
#include "engine/kernels/kernels.h"

#include <math.h>
#include <string.h>

#define LANES 8

static float lanes_total(const float lanes[LANES])
{
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) +
           ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

static float dot(const float *a, const float *b, int64_t count)
{
    float lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int j = 0; j < LANES; j++)
            lanes[j] += a[i + j] * b[i + j];
    for (int j = 0; i < count; i++, j++)
        lanes[j] += a[i] * b[i];
    return lanes_total(lanes);
}

static void axpy(float a, const float *restrict x, float *restrict y, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        y[i] += a * x[i];
}

static float max(const float *x, int64_t count)
{
    float lanes[LANES];
    for (int j = 0; j < LANES; j++)
        lanes[j] = x[0];
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int j = 0; j < LANES; j++)
            lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    for (; i < count; i++)
        lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
    for (int j = 1; j < LANES; j++)
        lanes[0] = lanes[j] > lanes[0] ? lanes[j] : lanes[0];
    return lanes[0];
}

/* e^x by 2^n · e^r, |r| <= ln 2 / 2: the polynomial and the split of ln 2 are those of Cephes' expf
 * (S. Moshier). The error is at most 2 units in the last place. It is plain arithmetic, so that
 * loops over it are vectorised, which a call of expf would prevent. Arguments are clamped to [-80,
 * 60], so that neither the result nor a quotient by it is denormal, which is slow. This does not
 * change a softmax or sigmoid in single precision. NaN stays NaN. */
static inline float exp_of(float x)
{
    const float round = 12582912.0f; /* 1.5 · 2^23: adding it rounds to an integer */
    x = x > 60.0f ? 60.0f : x;
    x = x < -80.0f ? -80.0f : x;
    float shifted = x * 1.44269504088896341f + round;
    float n = shifted - round;
    float r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits, power;
    memcpy(&bits, &shifted, sizeof bits);
    power = (int32_t)(((uint32_t)bits - 0x4B400000u + 127u) << 23);
    float two_to_n;
    memcpy(&two_to_n, &power, sizeof power);
    return p * two_to_n;
}

static float exp_sum(const float *x, float scale, float shift, float *out, int64_t count)
{
    float lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int j = 0; j < LANES; j++) {
            float e = exp_of(scale * x[i + j] - shift);
            out[i + j] = e;
            lanes[j] += e;
        }
    for (int j = 0; i < count; i++, j++) {
        out[i] = exp_of(scale * x[i] - shift);
        lanes[j] += out[i];
    }
    return lanes_total(lanes);
}

static void rms_norm(const float *x, const float *weight, float *y, int64_t rows, int64_t width,
                     int64_t x_stride, int64_t y_stride, float epsilon, float *scales)
{
    for (int64_t row = 0; row < rows; row++, x += x_stride, y += y_stride) {
        float mean = dot(x, x, width) / (float)width;
        float scale = 1.0f / sqrtf(mean + epsilon);
        for (int64_t i = 0; i < width; i++)
            y[i] = x[i] * scale * weight[i];
        if (scales)
            scales[row] = scale;
    }
}

static void rms_norm_backward(const float *x, const float *weight, const float *scales,
                              const float *dy, float *dx, float *dweight, int64_t rows,
                              int64_t width, int64_t x_stride, int64_t dx_stride)
{
    for (int64_t row = 0; row < rows; row++, x += x_stride, dx += dx_stride, dy += dx_stride) {
        float scale = scales[row], lanes[LANES] = {0};
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES)
            for (int j = 0; j < LANES; j++)
                lanes[j] += dy[i + j] * weight[i + j] * x[i + j];
        for (int j = 0; i < width; i++, j++)
            lanes[j] += dy[i] * weight[i] * x[i];
        float along = lanes_total(lanes) * scale * scale * scale / (float)width;
        for (i = 0; i < width; i++) {
            dweight[i] += dy[i] * x[i] * scale;
            dx[i] += dy[i] * weight[i] * scale - x[i] * along;
        }
    }
}

static void rotate(float *head, const float *cos, const float *sin, int64_t width, float sign)
{
    int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = head[i], b = head[i + half], s = sign * sin[i];
        head[i] = a * cos[i] - b * s;
        head[i + half] = b * cos[i] + a * s;
    }
}

static void swiglu(const float *gate_up, float *out, int64_t rows, int64_t width)
{
    for (int64_t row = 0; row < rows; row++) {
        const float *restrict gate = gate_up + row * 2 * width, *restrict up = gate + width;
        float *restrict to = out + row * width;
        for (int64_t i = 0; i < width; i++)
            to[i] = gate[i] / (1.0f + exp_of(-gate[i])) * up[i];
    }
}

static void swiglu_backward(const float *gate_up, const float *dout, float *dgate_up, int64_t rows,
                            int64_t width)
{
    for (int64_t row = 0; row < rows; row++) {
        const float *restrict gate = gate_up + row * 2 * width, *restrict up = gate + width;
        const float *restrict dy = dout + row * width;
        float *restrict dgate = dgate_up + row * 2 * width, *restrict dup = dgate + width;
        for (int64_t i = 0; i < width; i++) {
            float sigmoid = 1.0f / (1.0f + exp_of(-gate[i]));
            float silu = gate[i] * sigmoid;
            dup[i] = dy[i] * silu;
            dgate[i] = dy[i] * up[i] * (sigmoid + silu * (1.0f - sigmoid));
        }
    }
}

const dray__arithmetic KERNELS = {.name = KERNELS_NAME,
                                  .rms_norm = rms_norm,
                                  .rms_norm_backward = rms_norm_backward,
                                  .rotate = rotate,
                                  .swiglu = swiglu,
                                  .swiglu_backward = swiglu_backward,
                                  .dot = dot,
                                  .axpy = axpy,
                                  .max = max,
                                  .exp_sum = exp_sum};
