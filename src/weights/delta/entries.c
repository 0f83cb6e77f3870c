/* The codes of changed elements (entries.h). */
#include "weights/delta/entries.h"

#include "mover/kernels/floats.h"

enum { PREFIX = 7 }; /* zeros before a whole value */

/* Loads the bits of an element. Hosts are little-endian. */
static uint64_t load(const void *element, size_t size)
{
    uint64_t bits = 0;
    memcpy(&bits, element, size);
    return bits;
}

int8_t dray__step_of(const void *was, const void *now, size_t size, int32_t dtype)
{
    return step_between(load(was, size), load(now, size), (uint32_t)size, (uint32_t)dtype);
}

void dray__change_put(void *element, const dray__change *change, size_t size, int32_t dtype)
{
    uint64_t bits = change->bits;
    if (change->step)
        bits = stepped(load(element, size), change->step, (uint32_t)size, (uint32_t)dtype);
    memcpy(element, &bits, size);
}

/* Returns the number of zeros before the code's one. */
static uint32_t zeros_of(int8_t step)
{
    return 31 - (uint32_t)__builtin_clz((uint32_t)(step < 0 ? -step : step));
}

static uint32_t code_bits(int8_t step, size_t size)
{
    return step ? 2 * zeros_of(step) + 2 : PREFIX + 8 * (uint32_t)size;
}

static uint64_t whole_bytes(uint64_t bits)
{
    return (bits + 7) / 8;
}

size_t dray__codes_bytes(const int8_t *steps, uint64_t count, size_t size)
{
    uint64_t bits = 0;
    for (uint64_t i = 0; i < count; i++)
        bits += code_bits(steps[i], size);
    return (size_t)whole_bytes(bits);
}

uint64_t dray__codes_least(uint64_t count)
{
    return whole_bytes(2 * count);
}

uint64_t dray__codes_most(uint64_t count, size_t size)
{
    return whole_bytes((PREFIX + 8 * (uint64_t)size) * count);
}

/* ---- writing --------------------------------------------------------------------------------- */

struct bits {
    uint8_t *to;
    uint64_t held;
    uint32_t count; /* less than 8 between two calls */
};

/* count: at most 56 */
static void put_bits(struct bits *b, uint64_t bits, uint32_t count)
{
    b->held |= bits << b->count;
    for (b->count += count; b->count >= 8; b->count -= 8, b->held >>= 8)
        *b->to++ = (uint8_t)b->held;
}

void dray__codes_put(uint8_t *to, const int8_t *steps, const uint8_t *values, uint64_t count,
                     size_t size)
{
    struct bits b = {.to = to};
    for (uint64_t i = 0; i < count; i++) {
        int8_t step = steps[i];
        if (step) {
            uint32_t zeros = zeros_of(step), n = (uint32_t)(step < 0 ? -step : step);
            uint32_t rest = (n - (1u << zeros)) | (step < 0 ? 1u << zeros : 0);
            put_bits(&b, UINT64_C(1) << zeros | (uint64_t)rest << (zeros + 1), 2 * zeros + 2);
            continue;
        }
        put_bits(&b, 0, PREFIX);
        for (size_t k = 0; k < size; k++)
            put_bits(&b, values[i * size + k], 8);
    }
    if (b.count)
        *b.to = (uint8_t)b.held;
}

/* ---- reading --------------------------------------------------------------------------------- */

static void refill(dray__codes *c)
{
    for (; c->bits <= 56 && c->at < c->bytes; c->bits += 8)
        c->held |= (uint64_t)c->data[c->at++] << c->bits;
}

static bool take(dray__codes *c, uint32_t count, uint64_t *out)
{
    if (count > c->bits)
        refill(c);
    if (count > c->bits)
        return false;
    *out = c->held & ((UINT64_C(1) << count) - 1);
    c->held >>= count;
    c->bits -= count;
    return true;
}

bool dray__codes_next(dray__codes *c, size_t size, dray__change *out)
{
    uint64_t rest, byte;
    refill(c);
    uint32_t zeros = c->held ? (uint32_t)__builtin_ctzll(c->held) : PREFIX;
    *out = (dray__change){0};
    if (zeros < PREFIX) {
        if (!take(c, 2 * zeros + 2, &rest))
            return false;
        rest >>= zeros + 1;
        int n = (int)(1u << zeros | (rest & ((1u << zeros) - 1)));
        out->step = (int8_t)(rest >> zeros ? -n : n);
        return true;
    }
    if (!take(c, PREFIX, &rest))
        return false;
    for (size_t k = 0; k < size; k++) {
        if (!take(c, 8, &byte))
            return false;
        out->bits |= byte << 8 * k;
    }
    return true;
}

bool dray__codes_ended(const dray__codes *c)
{
    return c->at == c->bytes && c->bits < 8 && c->held == 0;
}
