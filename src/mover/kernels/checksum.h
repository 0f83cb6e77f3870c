/* The checksum that does not depend on the sharding (include/dray/weights.h):
 *
 *     sum(tensor) = Σ over elements  A(row) · B(column) · bits   mod 2^64
 *
 * row: flattened index over all dimensions but the last of the global tensor; column: index along
 * the last; bits: the element zero-extended to 32 bits. An element of 8 bytes counts as the columns
 * 2c and 2c + 1, its low and high half. A scalar is one row of one column.
 *
 *     A(r) = splitmix64(r) | 1                                       (64 bits)
 *     B(c) = t(lo(c) · 0x9E3779B1 ^ hi(c) · 0x85EBCA77) | 1          (32 bits; lo, hi: halves of c)
 *     t(x): x ^= x >> 15;  x *= 0x2C1B3C6D;  x ^= x >> 12
 *
 * splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
 * As all multipliers are odd, a change of one element always changes the sum: odd · odd ·
 * difference is not 0 mod 2^64. Sums of disjoint rectangles add up to the sum of their union. */
#pragma once

#include <dray/model.h>

/* A rectangle of a tensor in memory. */
typedef struct dray__sum_of {
    int32_t dtype;
    uint32_t ndim;         /* 0..DRAY_MAX_DIMS */
    const int64_t *shape;  /* global, ndim entries */
    const int64_t *start;  /* global coordinates of the first element */
    const int64_t *extent; /* elements; > 0 */
    const int64_t *stride; /* bytes */
    const void *data;      /* the first element */
} dray__sum_of;
/* A rectangle in a region: its first element is at `offset`; of.data is ignored. */
typedef struct dray__sum_part {
    uint64_t offset;
    dray__sum_of of;
} dray__sum_part;

/* Returns the rectangle's part of its tensor's sum. data may have any alignment. */
uint64_t dray__sum(const dray__sum_of *rectangle);

uint64_t dray__sum_row_factor(uint64_t row);
