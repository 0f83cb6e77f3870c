/* Entries of deltas on the wire and on disk: the elements that changed, in ascending order, first
 * all positions, then all new values.
 *
 * Positions are stored as gaps. A gap is the number of elements between a changed element and the
 * one before it (or the beginning). It is written as one byte 255 for each 255 in it, and a byte
 * for the rest.
 *
 * New values are stored whole, or as codes, whichever takes fewer bytes. A code is the number of
 * steps from the old value, up or down, where a step leads to the next value of the dtype. Floats
 * are in the order of their values, with the negative zero below the positive one and NaNs outside
 * the infinities; integers are in their order; both wrap around (the step up from the last value
 * leads to the first). After an optimizer's step most elements of bf16 have changed by one step.
 * Bits are filled into bytes from the lowest on:
 *
 *     n zeros and a one     (n < 7) 2^n <= steps < 2^(n + 1):
 *         n bits            steps - 2^n
 *         1 bit             1: down
 *     seven zeros           more than 127 steps:
 *         8 x size bits     the whole value, its lowest bit first
 *
 * (Elias's gamma code with an end.) The bits after the last code are zeros, and fewer than 8. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct dray__gaps {
    const uint8_t *data;
    size_t at, bytes;
    uint64_t next; /* the least possible next position */
} dray__gaps;
/* Reads the next position. Returns false when there is none before `end`. */
static inline bool dray__gaps_next(dray__gaps *gaps, uint64_t end, uint64_t *position)
{
    for (; gaps->at < gaps->bytes && gaps->data[gaps->at] == 255; gaps->at++)
        gaps->next += 255;
    if (gaps->at == gaps->bytes || gaps->next + gaps->data[gaps->at] >= end)
        return false;
    *position = gaps->next + gaps->data[gaps->at++];
    gaps->next = *position + 1;
    return true;
}
static inline size_t dray__gap_bytes(uint64_t gap)
{
    return gap / 255 + 1;
}
/* Writes dray__gap_bytes bytes. */
static inline void dray__gap_put(uint8_t *to, uint64_t gap)
{
    memset(to, 255, gap / 255);
    to[gap / 255] = (uint8_t)(gap % 255);
}

/* ---- codes ----------------------------------------------------------------------------------- */

/* The change of an element. */
typedef struct dray__change {
    int8_t step;   /* steps from the old value; with 0, */
    uint64_t bits; /* these are the new bits */
} dray__change;

/* Returns the steps between two elements of `size` bytes; 0 for more than 127, or none. */
int8_t dray__step_of(const void *was, const void *now, size_t size, int32_t dtype);
void dray__change_put(void *element, const dray__change *change, size_t size, int32_t dtype);

/* Returns the bytes of the codes of `count` elements. A step of 0 stands for the whole value. */
size_t dray__codes_bytes(const int8_t *steps, uint64_t count, size_t size);
/* Return the least and the most bytes that codes of so many elements take. */
uint64_t dray__codes_least(uint64_t count);
uint64_t dray__codes_most(uint64_t count, size_t size);
/* Writes dray__codes_bytes bytes. values: dense. */
void dray__codes_put(uint8_t *to, const int8_t *steps, const uint8_t *values, uint64_t count,
                     size_t size);

typedef struct dray__codes {
    const uint8_t *data;
    size_t at, bytes;
    uint64_t held; /* bits taken from the data, the next one lowest */
    uint32_t bits; /* the number of bits in `held` */
} dray__codes;
bool dray__codes_next(dray__codes *codes, size_t size, dray__change *out); /* false: cut off */
bool dray__codes_ended(const dray__codes *codes); /* true when only the zeros at the end are left */
