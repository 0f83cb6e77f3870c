/* Bitmaps of u64 words: one bit a row. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline size_t dray__bit_words(size_t bits)
{
    return (bits + 63) / 64;
}

static inline bool dray__bit_get(const uint64_t *words, uint32_t i)
{
    return words && (words[i / 64] >> (i % 64) & 1);
}

static inline void dray__bit_set(uint64_t *words, uint32_t i)
{
    words[i / 64] |= UINT64_C(1) << (i % 64);
}

static inline void dray__bit_clear(uint64_t *words, uint32_t i)
{
    words[i / 64] &= ~(UINT64_C(1) << (i % 64));
}

/* The bits of word `w` that belong to rows [first, first + count). */
static inline uint64_t dray__bit_mask(uint32_t w, uint32_t first, uint32_t count)
{
    uint64_t low = (uint64_t)w * 64, end = (uint64_t)first + count;
    if (end <= low || first >= low + 64)
        return 0;
    uint64_t mask = ~UINT64_C(0);
    if (first > low)
        mask &= ~UINT64_C(0) << (first - low);
    if (end < low + 64)
        mask &= ~UINT64_C(0) >> (low + 64 - end);
    return mask;
}
