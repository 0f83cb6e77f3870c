#include "base/random.h"

#include <math.h>

dray__philox dray__philox4x32(const uint32_t counter[4], const uint32_t key[2])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (dray__philox){{c0, c1, c2, c3}};
}

uint64_t dray__random_u64(uint64_t seed, uint64_t stream, uint64_t i)
{
    uint32_t counter[4] = {(uint32_t)i, (uint32_t)(i >> 32), (uint32_t)stream,
                           (uint32_t)(stream >> 32)};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    dray__philox r = dray__philox4x32(counter, key);
    return (uint64_t)r.v[1] << 32 | r.v[0];
}

double dray__random_unit(uint64_t seed, uint64_t stream, uint64_t i)
{
    return (double)(dray__random_u64(seed, stream, i) >> 11) * 0x1p-53;
}

double dray__random_normal(uint64_t seed, uint64_t stream, uint64_t i)
{
    double u = 1.0 - dray__random_unit(seed, stream, 2 * i); /* (0, 1] */
    double v = dray__random_unit(seed, stream, 2 * i + 1);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586476925 * v);
}
