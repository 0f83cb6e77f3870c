/* Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as
 * 1, 2, 3", SC11). A value depends only on its key and counter, never on earlier draws, so that a
 * resumed run draws the same values as an undisturbed one. */
#pragma once

#include <stdint.h>

typedef struct dray__philox {
    uint32_t v[4];
} dray__philox;

dray__philox dray__philox4x32(const uint32_t counter[4], const uint32_t key[2]);
/* Returns word i (0..) of the stream (seed, stream): uniform 64 bits. */
uint64_t dray__random_u64(uint64_t seed, uint64_t stream, uint64_t i);
/* Returns a number that is uniform in [0, 1), with 53 bits. */
double dray__random_unit(uint64_t seed, uint64_t stream, uint64_t i);
/* Returns a standard normal number (Box-Muller on words 2i and 2i+1). */
double dray__random_normal(uint64_t seed, uint64_t stream, uint64_t i);
