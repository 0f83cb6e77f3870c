/* The statistics of a study: means with their bootstrap intervals, and values read off curves.
 * Pure: the same numbers give the same result, bit for bit. */
#pragma once

#include <dray/dray.h>

/* low and high are the percentile bootstrap's interval (Efron and Tibshirani, "An Introduction to
 * the Bootstrap", 1993, section 13.3) around the mean; NaN with fewer than two values. */
typedef struct dray__interval {
    uint32_t n;
    double mean, low, high;
} dray__interval;

enum { DRAY__RESAMPLES = 10000 };
#define DRAY__CONFIDENCE 0.95

/* Computes the mean of n values (n > 0). With `below`, n values that are drawn together with
 * `values`, the result is the ratio of the two means; below may be NULL. Returns 0, or
 * DRAY_ENOMEM. */
int dray__bootstrap(const double *values, const double *below, uint32_t n, uint32_t resamples,
                    dray__interval *out, dray_error *error);

/* Returns the median of count values (at least one); sorts them. */
double dray__median(double *values, uint32_t count);

/* A curve: points by growing x, joined by straight lines. */
typedef struct dray__point {
    double x, y;
} dray__point;

/* Returns NaN when x is outside the curve. */
double dray__curve_at(const dray__point *points, uint32_t count, double x);
/* Returns the first x at which the curve is at or above y; NaN when there is none. */
double dray__curve_reach(const dray__point *points, uint32_t count, double y);
