/* Entries of deltas as they are on the wire and on disk: of elements that changed, in ascending
 * order, first all positions, then all of what they became.
 *
 * Positions are gaps: of each the elements between it and the one before it (or the beginning), as
 * many bytes 255 as it has 255s, and a byte for the rest.
 *
 * What elements became are their whole values, or codes, whichever takes fewer bytes. A code says
 * how many steps up or down the element moved from what it was, where a step leads to the next
 * value of its dtype: floats in the order of their values, with a negative zero below the positive
 * one and NaNs outside the infinities, integers as they are, both without an end (the step up from
 * the last is the first). After an optimizer's step most elements of bf16 moved by one. Bits are
 * filled into bytes from the lowest on:
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
    uint64_t next; /* the first position that may come */
} dray__gaps;
/* The next one; false: there is none before `end`. */
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
/* Puts dray__gap_bytes of them. */
static inline void dray__gap_put(uint8_t *to, uint64_t gap)
{
    memset(to, 255, gap / 255);
    to[gap / 255] = (uint8_t)(gap % 255);
}

/* ---- codes ----------------------------------------------------------------------------------- */

/* What became of an element. */
typedef struct dray__change {
    int8_t step;   /* this many steps from what it was; 0: */
    uint64_t bits; /* these are its bits */
} dray__change;

/* Both are of `size` bytes. 0: more than 127, or the same. */
int8_t dray__step_of(const void *was, const void *now, size_t size, int32_t dtype);
void dray__change_put(void *element, const dray__change *change, size_t size, int32_t dtype);

/* Bytes of the codes of `count` elements; steps: 0: the value. */
size_t dray__codes_bytes(const int8_t *steps, uint64_t count, size_t size);
/* The least and the most that so many may take. */
uint64_t dray__codes_least(uint64_t count);
uint64_t dray__codes_most(uint64_t count, size_t size);
/* Puts dray__codes_bytes of them. values: dense. */
void dray__codes_put(uint8_t *to, const int8_t *steps, const uint8_t *values, uint64_t count,
                     size_t size);

typedef struct dray__codes {
    const uint8_t *data;
    size_t at, bytes;
    uint64_t held; /* bits that were taken from the data, the next one lowest */
    uint32_t bits; /* how many */
} dray__codes;
bool dray__codes_next(dray__codes *codes, size_t size, dray__change *out); /* false: cut off */
bool dray__codes_ended(const dray__codes *codes); /* nothing but the zeros at the end is left */
