#include "run/study/statistics.h"

#include "base/array.h"
#include "base/error.h"
#include "base/random.h"

#include <math.h>
#include <stdlib.h>

/* The resamples depend on n alone, so that figures of one study can be compared. */
enum { SEED = 1979 };

/* Interpolates linearly between order statistics (type 7 of Hyndman and Fan, "Sample Quantiles in
 * Statistical Packages", 1996; numpy's default). */
static double quantile(const double *sorted, uint32_t count, double share)
{
    double at = share * (double)(count - 1), whole = floor(at);
    uint32_t i = (uint32_t)whole;
    return i + 1 < count ? sorted[i] + (at - whole) * (sorted[i + 1] - sorted[i]) : sorted[i];
}

double dray__median(double *values, uint32_t count)
{
    qsort(values, count, sizeof(*values), dray__by_f64);
    return quantile(values, count, 0.5);
}

static double resample(const double *values, const double *below, uint32_t n, uint32_t which)
{
    double above = 0, under = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t word = dray__random_u64(SEED, which, i) >> 32;
        uint32_t drawn = (uint32_t)(word * n >> 32);
        above += values[drawn];
        under += below ? below[drawn] : 1;
    }
    return above / under;
}

int dray__bootstrap(const double *values, const double *below, uint32_t n, uint32_t resamples,
                    dray__interval *out, dray_error *error)
{
    double above = 0, under = 0;
    for (uint32_t i = 0; i < n; i++) {
        above += values[i];
        under += below ? below[i] : 1;
    }
    dray__interval made = {.n = n, .mean = above / under, .low = NAN, .high = NAN};
    if (n > 1) {
        double *drawn = malloc(resamples * sizeof(*drawn));
        if (!drawn)
            return dray__nomem(error);
        for (uint32_t i = 0; i < resamples; i++)
            drawn[i] = resample(values, below, n, i);
        qsort(drawn, resamples, sizeof(*drawn), dray__by_f64);
        made.low = quantile(drawn, resamples, (1 - DRAY__CONFIDENCE) / 2);
        made.high = quantile(drawn, resamples, (1 + DRAY__CONFIDENCE) / 2);
        free(drawn);
    }
    *out = made;
    return DRAY_OK;
}

double dray__curve_at(const dray__point *points, uint32_t count, double x)
{
    for (uint32_t i = 0; i < count; i++) {
        if (points[i].x == x)
            return points[i].y;
        if (points[i].x > x) {
            dray__point a = points[i > 0 ? i - 1 : 0], b = points[i];
            return i > 0 ? a.y + (b.y - a.y) * (x - a.x) / (b.x - a.x) : NAN;
        }
    }
    return NAN;
}

double dray__curve_reach(const dray__point *points, uint32_t count, double y)
{
    for (uint32_t i = 0; i < count; i++) {
        dray__point b = points[i];
        if (b.y >= y && i > 0) {
            dray__point a = points[i - 1];
            return a.x + (b.x - a.x) * (y - a.y) / (b.y - a.y);
        }
        if (b.y >= y)
            return b.x;
    }
    return NAN;
}
