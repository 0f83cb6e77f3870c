/* Tests the inner loops. Every instruction set gives the same results as the portable code, at any
 * length and alignment. With arguments, this is the program through which test_kernels_python.py
 * compares them with PyTorch and with a checksum written in Python:
 *
 *     list                              names of the tables that this machine can run
 *     cast TABLE FROM TO                stdin: elements; stdout: converted
 *     sum DTYPE SHAPE START EXTENT      stdin: the dense rectangle; stdout: its checksum
 *     quantise FROM TO FORMAT START EXTENT CELL
 *                                       stdin: a dense box; stdout: scales, quantised, dequantised
 */
#include "mover/kernels/kernels.h"
#include "suite.h"

#include "base/random.h"
#include "mover/filter.h"
#include "mover/kernels/checksum.h"
#include "mover/kernels/quant.h"
#include "mover/kernels/rect.h"
#include "seed.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static uint64_t seed;

static void fill_random(void *out, size_t bytes)
{
    static uint64_t stream;
    uint8_t *at = out;
    stream++;
    for (size_t i = 0; i < bytes; i++)
        at[i] = (uint8_t)(dray__random_u64(seed, stream, i / 8) >> 8 * (i % 8));
}

enum { MOST = 300 };

TEST(conversions_agree)
{
    static uint8_t in[MOST * 8 + 1], want[MOST * 8], got[MOST * 8 + 2];
    for (const dray__kernels *const *k = dray__kernels_all(); *k; k++)
        for (size_t c = 0; (*k)->casts[c].run; c++)
            for (size_t n = 0; n < MOST; n += n < 70 ? 1 : 23) {
                const dray__cast *cast = &(*k)->casts[c], *plain = &dray__kernels_portable.casts[c];
                assert_int_equal(cast->from, plain->from);
                assert_int_equal(cast->to, plain->to);
                size_t bytes = n * dray_dtype_size((dray_dtype)cast->to);
                fill_random(in, sizeof in);
                memset(got, 0xEE, sizeof got);
                plain->run(in + 1, want, n);
                cast->run(in + 1, got + 1, n);
                assert_memory_equal(got + 1, want, bytes);
                assert_int_equal(got[0], 0xEE);
                assert_int_equal(got[bytes + 1], 0xEE);
            }
}

static uint64_t plain_dot(const uint32_t *columns, const uint8_t *data, size_t n, size_t size)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = 0;
        memcpy(&bits, data + i * size, size);
        sum += (uint64_t)columns[i] * bits;
    }
    return sum;
}

TEST(products_agree)
{
    static uint8_t data[MOST * 4 + 1];
    static uint32_t columns[MOST];
    for (const dray__kernels *const *k = dray__kernels_all(); *k; k++)
        for (size_t n = 0; n < MOST; n++) {
            fill_random(data, sizeof data);
            if (n % 7 == 0)
                memset(data, 0xFF, sizeof data); /* the largest products */
            fill_random(columns, sizeof columns);
            assert_int_equal((*k)->dot1(columns, data + 1, n), plain_dot(columns, data + 1, n, 1));
            assert_int_equal((*k)->dot2(columns, data + 1, n), plain_dot(columns, data + 1, n, 2));
            assert_int_equal((*k)->dot4(columns, data + 1, n), plain_dot(columns, data + 1, n, 4));
        }
}

TEST(rows_agree)
{
    static uint8_t data[4 * (2 * MOST + 6) + 1];
    static uint32_t columns[MOST];
    for (const dray__kernels *const *k = dray__kernels_all(); *k; k++)
        for (size_t n = 0; n < MOST; n++) {
            uint64_t sums[4];
            int64_t stride = (int64_t)(2 * n + n % 4);
            fill_random(data, sizeof data);
            fill_random(columns, sizeof columns);
            (*k)->dot2_rows(columns, data + 1, stride, n, sums);
            for (int64_t r = 0; r < 4; r++)
                assert_int_equal(sums[r], plain_dot(columns, data + 1 + r * stride, n, 2));
        }
}

/* Copied and summed at once: the same bytes, the same products, not a byte beside them. */
TEST(copies_agree)
{
    static uint8_t data[MOST * 4 + 1], out[MOST * 4 + 2];
    static uint32_t columns[MOST];
    for (const dray__kernels *const *k = dray__kernels_all(); *k; k++)
        for (size_t n = 0; n < MOST; n++)
            for (size_t size = 1; size <= 4; size *= 2) {
                uint64_t (*copy)(const uint32_t *, const void *, void *, size_t) =
                    size == 1   ? (*k)->copy1
                    : size == 2 ? (*k)->copy2
                                : (*k)->copy4;
                fill_random(data, sizeof data);
                fill_random(columns, sizeof columns);
                memset(out, 0xEE, sizeof out);
                assert_int_equal(copy(columns, data + 1, out + 1, n),
                                 plain_dot(columns, data + 1, n, size));
                assert_memory_equal(out + 1, data + 1, n * size);
                assert_int_equal(out[0], 0xEE);
                assert_int_equal(out[n * size + 1], 0xEE);
            }
}

TEST(summed_conversions_agree)
{
    static uint8_t in[MOST * 4 + 1], want[MOST * 4], got[MOST * 4 + 2];
    static uint32_t columns[MOST];
    size_t tried = 0;
    for (const dray__kernels *const *k = dray__kernels_all(); *k; k++)
        for (const dray__cast *cast = (*k)->casts; cast->run; cast++)
            for (size_t n = 0; n < MOST && cast->run_summed; n++) {
                size_t from = dray_dtype_size((dray_dtype)cast->from);
                size_t to = dray_dtype_size((dray_dtype)cast->to);
                uint64_t sums[2] = {5, 7};
                fill_random(in, sizeof in);
                fill_random(columns, sizeof columns);
                for (size_t i = 0; i < n; i += 5) /* NaN and infinities, of all signs */
                    in[1 + i * from + from - 1] |= 0x7F, in[1 + i * from + from - 2] |= 0x80;
                memset(got, 0xEE, sizeof got);
                cast->run(in + 1, want, n);
                cast->run_summed(columns, in + 1, got + 1, n, 4096, sums);
                assert_memory_equal(got + 1, want, n * to);
                assert_int_equal(got[0], 0xEE);
                assert_int_equal(got[n * to + 1], 0xEE);
                assert_int_equal(sums[0], 5 + plain_dot(columns, in + 1, n, from));
                assert_int_equal(sums[1], 7 + plain_dot(columns, want, n, to));
                tried++;
            }
    assert_true(tried >= MOST);
}

/* Rectangles of any dimensions, strides and dtypes: moved as without sums, with the sums of both
 * sides. */
TEST(rectangles_agree)
{
    enum { BYTES = 1 << 18 };
    static uint8_t in[BYTES], want[BYTES], got[BYTES];
    const dray__cast *casts = dray__kernels_get()->casts;
    size_t kinds = 0;
    while (casts[kinds].run)
        kinds++;
    for (uint64_t n = 0; n < 400; n++) {
        uint64_t x = dray__random_u64(seed, 99, n);
        int32_t plain[] = {DRAY_U8, DRAY_BF16, DRAY_F32, DRAY_F64};
        dray__rect_copy r = {.ndim = 1 + (uint32_t)(x % 4)};
        bool cast = x >> 8 & 1, wide = n % 4 == 0;
        r.from = cast ? casts[(x >> 16) % kinds].from : plain[x >> 16 & 3];
        r.to = cast ? casts[(x >> 16) % kinds].to : r.from;
        int64_t shape[DRAY_MAX_DIMS], from = (int64_t)dray_dtype_size((dray_dtype)r.from);
        int64_t to = (int64_t)dray_dtype_size((dray_dtype)r.to);
        dray__rect_place place = {.ndim = r.ndim == 1 && x >> 20 & 1 ? 0 : r.ndim, .shape = shape};
        for (uint32_t d = r.ndim; d-- > 0;) {
            uint64_t y = dray__random_u64(seed, 100 + d, n);
            r.extent[d] = place.ndim == 0           ? 1
                          : wide && d + 1 == r.ndim ? 1000 + (int64_t)(y % 3000)
                                                    : 1 + (int64_t)(y % (wide ? 2 : 9));
            place.start[d] = (int64_t)(y >> 8 & 0xFFFF);
            shape[d] = place.start[d] + r.extent[d] + (int64_t)(y >> 24 & 0xFF);
            r.source_stride[d] = from;
            r.destination_stride[d] = to;
            from *= r.extent[d] + (y >> 32 & 1 && !wide ? 1 : 0);
            to *= r.extent[d] + (y >> 33 & 1 && !wide ? 1 : 0);
        }
        if (x >> 40 & 1 && r.ndim > 1 && r.extent[0] == r.extent[1]) { /* transposed */
            int64_t other = r.destination_stride[0];
            r.destination_stride[0] = r.destination_stride[1];
            r.destination_stride[1] = other;
        }
        assert_true(from <= BYTES && to <= BYTES);
        fill_random(in, (size_t)from);
        memset(want, 0xEE, sizeof want);
        memset(got, 0xEE, sizeof got);
        r.source = in;
        r.destination = want;
        dray__rect_move(&r);
        r.destination = got;
        uint64_t sums[2] = {1, 2};
        dray__rect_move_summed(&r, &place, sums);
        assert_memory_equal(got, want, sizeof got);
        dray__sum_of before = {r.from,   place.ndim,      shape, place.start,
                               r.extent, r.source_stride, in};
        dray__sum_of after = {r.to,     place.ndim,           shape, place.start,
                              r.extent, r.destination_stride, want};
        assert_int_equal(sums[0], 1 + dray__sum(&before));
        assert_int_equal(sums[1], 2 + dray__sum(&after));
    }
}

TEST(factors_agree)
{
    const uint64_t firsts[] = {0, 1, 1000, UINT32_MAX - 50, (UINT64_C(1) << 40) - 7};
    uint32_t want[MOST], got[MOST];
    for (const dray__kernels *const *k = dray__kernels_all(); *k; k++)
        for (size_t f = 0; f < sizeof firsts / sizeof *firsts; f++) {
            dray__kernels_portable.columns(firsts[f], MOST, want);
            (*k)->columns(firsts[f], MOST, got);
            assert_memory_equal(want, got, sizeof want);
            for (size_t i = 0; i < MOST; i++) {
                uint32_t alone;
                (*k)->columns(firsts[f] + i, 1, &alone);
                assert_int_equal(got[i] & 1, 1);
                assert_int_equal(got[i], alone);
            }
        }
}

TEST(any_flipped_bit_changes_the_sum)
{
    const int64_t shape[2] = {40, 90}, start[2] = {3, 5}, extent[2] = {11, 37};
    const int32_t dtypes[] = {DRAY_U8, DRAY_BF16, DRAY_F32, DRAY_F64};
    for (size_t t = 0; t < 4; t++) {
        static uint8_t data[11 * 37 * 8];
        int64_t size = (int64_t)dray_dtype_size((dray_dtype)dtypes[t]);
        const int64_t stride[2] = {37 * size, size};
        dray__sum_of of = {dtypes[t], 2, shape, start, extent, stride, data};
        fill_random(data, sizeof data);
        uint64_t sum = dray__sum(&of);
        for (size_t bit = 0; bit < (size_t)(11 * 37 * size) * 8; bit++) {
            data[bit / 8] ^= (uint8_t)(1u << bit % 8);
            assert_int_not_equal(dray__sum(&of), sum);
            data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        }
        assert_int_equal(dray__sum(&of), sum);
    }
}

static void turn(const dray__kernels *k, size_t size, size_t rows, size_t columns)
{
    enum { SIDE = 200, GAP = 24 };
    static uint8_t in[SIDE * (SIDE + GAP) * 8 + 1], out[SIDE * (SIDE + GAP) * 8 + 1];
    int64_t from = (int64_t)(columns * size + GAP), to = (int64_t)(rows * size + GAP);
    fill_random(in, sizeof in);
    memset(out, 0xEE, sizeof out);
    k->turn[size](in + 1, from, out + 1, to, rows, columns);
    for (size_t c = 0; c < columns; c++) {
        for (size_t r = 0; r < rows; r++)
            assert_memory_equal(out + 1 + (int64_t)c * to + (int64_t)(r * size),
                                in + 1 + (int64_t)r * from + (int64_t)(c * size), size);
        for (size_t i = 0; i < GAP; i++)
            assert_int_equal(out[1 + (size_t)((int64_t)(c + 1) * to) - GAP + i], 0xEE);
    }
}

TEST(transposes_agree)
{
    static const size_t sides[][2] = {{1, 1},    {3, 70},  {64, 64}, {65, 17},  {128, 31},
                                      {131, 63}, {32, 15}, {8, 8},   {200, 200}};
    for (const dray__kernels *const *k = dray__kernels_all(); *k; k++)
        for (size_t size = 1; size <= 8; size *= 2)
            for (size_t i = 0; i < sizeof sides / sizeof *sides; i++) {
                turn(*k, size, sides[i][0], sides[i][1]);
                turn(*k, size, sides[i][1], sides[i][0]);
            }
}

/* Strides of a box whose dimensions lie in a random order; the bytes that it takes. */
static int64_t shuffled(const int64_t *extent, uint32_t ndim, int64_t size, int64_t *stride)
{
    static uint64_t draws;
    uint32_t order[DRAY_MAX_DIMS];
    int64_t step = size;
    for (uint32_t d = 0; d < ndim; d++) {
        uint32_t other = (uint32_t)(dray__random_u64(seed, 77, draws++) % (d + 1));
        order[d] = order[other];
        order[other] = d;
    }
    for (uint32_t d = 0; d < ndim; d++) {
        stride[order[d]] = step;
        step = step * extent[order[d]] + size * (int64_t)(dray__random_u64(seed, 77, draws++) % 3);
    }
    return step;
}

TEST(turned_rectangles_agree)
{
    enum { ROUNDS = 200 };
    for (uint64_t round = 0; round < ROUNDS; round++) {
        const dray__cast *casts = dray__kernels_get()->casts, *cast;
        uint64_t x = dray__random_u64(seed, 78, round);
        cast = &casts[x % 30];
        bool converts = x >> 8 & 1;
        dray__rect_copy r = {.ndim = 2 + (uint32_t)(x >> 10) % 3,
                             .from = cast->from,
                             .to = converts ? cast->to : cast->from};
        int64_t shape[DRAY_MAX_DIMS];
        dray__rect_place place = {.ndim = r.ndim, .shape = shape};
        for (uint32_t d = 0; d < r.ndim; d++) {
            static const uint64_t most[] = {0, 0, 300, 70, 20};
            r.extent[d] = 1 + (int64_t)(dray__random_u64(seed, 79, round * 8 + d) % most[r.ndim]);
            place.start[d] = (int64_t)(x >> (20 + d)) % 9;
            shape[d] = place.start[d] + r.extent[d] + 3;
        }
        int64_t from = (int64_t)dray_dtype_size((dray_dtype)r.from);
        int64_t to = (int64_t)dray_dtype_size((dray_dtype)r.to);
        int64_t in_bytes = shuffled(r.extent, r.ndim, from, r.source_stride);
        int64_t out_bytes = shuffled(r.extent, r.ndim, to, r.destination_stride);
        uint8_t *in = malloc((size_t)in_bytes), *want = malloc((size_t)out_bytes);
        uint8_t *got = malloc((size_t)out_bytes);
        fill_random(in, (size_t)in_bytes);
        memset(want, 0xEE, (size_t)out_bytes);
        r.source = in;
        int64_t at[DRAY_MAX_DIMS] = {0};
        for (uint32_t d = 0; d < r.ndim;) {
            const uint8_t *a = in;
            uint8_t *b = want;
            for (d = 0; d < r.ndim; d++) {
                a += at[d] * r.source_stride[d];
                b += at[d] * r.destination_stride[d];
            }
            if (converts)
                cast->run(a, b, 1);
            else
                memcpy(b, a, (size_t)from);
            for (d = 0; d < r.ndim && ++at[d] == r.extent[d]; d++)
                at[d] = 0;
        }
        for (int summed = 0; summed < 2; summed++) {
            uint64_t sums[2] = {1, 2};
            memset(got, 0xEE, (size_t)out_bytes);
            r.destination = got;
            if (summed)
                dray__rect_move_summed(&r, &place, sums);
            else
                dray__rect_move(&r);
            assert_memory_equal(got, want, (size_t)out_bytes);
            if (!summed)
                continue;
            dray__rect_copy whole = dray__rect_to_dense(&r, malloc((size_t)(out_bytes + 1)));
            dray__rect_move(&whole);
            dray__sum_of after = {r.to,
                                  r.ndim,
                                  shape,
                                  place.start,
                                  r.extent,
                                  whole.destination_stride,
                                  whole.destination};
            dray__sum_of turned = {r.to, r.ndim, shape, place.start, r.extent, r.destination_stride,
                                   got};
            assert_int_equal(sums[1], 2 + dray__sum(&after));
            assert_int_equal(sums[1], 2 + dray__sum(&turned));
            dray__sum_of before = {r.from,   r.ndim,          shape, place.start,
                                   r.extent, r.source_stride, in};
            assert_int_equal(sums[0], 1 + dray__sum(&before));
            free(whole.destination);
        }
        free(in);
        free(want);
        free(got);
    }
}

/* ---- for test_kernels_python.py
 * ----------------------------------------------------------------------
 */

static int run_cast(const char *table, const char *from_name, const char *to_name)
{
    int32_t from = (int32_t)dray_dtype_parse(from_name), to = (int32_t)dray_dtype_parse(to_name);
    for (const dray__kernels *const *k = dray__kernels_all(); *k; k++)
        for (const dray__cast *c = (*k)->casts; c->run && !strcmp((*k)->name, table); c++)
            if (c->from == from && c->to == to) {
                size_t size, count;
                void *in = filter_read(&size);
                count = size / dray_dtype_size((dray_dtype)from);
                size = count * dray_dtype_size((dray_dtype)to);
                void *out = malloc(size);
                c->run(in, out, count);
                bool ok = fwrite(out, 1, size, stdout) == size;
                free(in);
                free(out);
                return ok ? 0 : 1;
            }
    return 2;
}

static int run_sum(char **arguments)
{
    int64_t shape[DRAY_MAX_DIMS], start[DRAY_MAX_DIMS], extent[DRAY_MAX_DIMS];
    int64_t stride[DRAY_MAX_DIMS];
    int32_t dtype = (int32_t)dray_dtype_parse(arguments[0]);
    uint32_t ndim = filter_numbers(arguments[1], shape);
    filter_numbers(arguments[2], start);
    filter_numbers(arguments[3], extent);
    int64_t step = (int64_t)dray_dtype_size((dray_dtype)dtype);
    for (uint32_t d = ndim; d-- > 0; step *= extent[d])
        stride[d] = step;
    size_t size;
    void *data = filter_read(&size);
    if (size != (size_t)step)
        return 2;
    dray__sum_of of = {dtype, ndim, shape, start, extent, stride, data};
    printf("%llu\n", (unsigned long long)dray__sum(&of));
    free(data);
    return 0;
}

static int run_quantise(char **arguments)
{
    uint32_t ndim;
    dray__quant_box box = filter_box(arguments, &ndim);
    int64_t first[DRAY_MAX_DIMS], count[DRAY_MAX_DIMS];
    size_t cells = dray__quant_cells(&box, first, count), size;
    uint8_t *values = filter_read(&size);
    size_t elements = size / dray_dtype_size((dray_dtype)box.dtype);
    uint32_t *amax = calloc(cells, sizeof *amax);
    float *scales = calloc(cells, sizeof *scales);
    uint8_t *quantised = malloc(elements);
    dray__quant_most(&box, values, amax);
    for (size_t i = 0; i < cells; i++)
        scales[i] = dray__quant_scale(&box, amax[i], atoi(arguments[2]));
    dray__quantise(&box, values, scales, quantised);
    dray__dequantise(&box, quantised, scales, values);
    bool ok = fwrite(scales, sizeof *scales, cells, stdout) == cells &&
              fwrite(quantised, 1, elements, stdout) == elements &&
              fwrite(values, 1, size, stdout) == size;
    free(values);
    free(amax);
    free(scales);
    free(quantised);
    return ok ? 0 : 1;
}

int main(int argc, char **argv)
{
    if (argc == 8 && strcmp(argv[1], "quantise") == 0)
        return run_quantise(argv + 2);
    if (argc == 2 && strcmp(argv[1], "list") == 0) {
        for (const dray__kernels *const *k = dray__kernels_all(); *k; k++)
            puts((*k)->name);
        return 0;
    }
    if (argc == 5 && strcmp(argv[1], "cast") == 0)
        return run_cast(argv[2], argv[3], argv[4]);
    if (argc == 6 && strcmp(argv[1], "sum") == 0)
        return run_sum(argv + 2);
    seed = test_seed();
    return suite_run(NULL, NULL);
}
