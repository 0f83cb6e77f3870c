/* src/mover/kernels/: the loops in which the CPU spends its time: copies of rectangles with any
 * strides, conversions between dtypes, checksums, and quantisation. They are written once in plain
 * C (kernels_body.h) and compiled once for each instruction set; kernels.c chooses one at first
 * use. All of them, and the GPU's kernels, must give the same bits. */

/* The inner loops of movers and checksums, in one table per instruction set. */
#pragma once

#include <dray/model.h>

/* Converts `count` dense elements. The two arrays do not overlap; any alignment. */
typedef void (*dray__cast_fn)(const void *source, void *destination, size_t count);

/* The same, and adds Σ columns[i] · bits of element i to sums[0] for the elements before the
 * conversion, and to sums[1] for those after it. For elements of at most 4 bytes on both sides.
 * `ahead` is a hint to prefetch: the bytes at source + ahead are read soon. */
typedef void (*dray__cast_summed_fn)(const uint32_t *columns, const void *source, void *destination,
                                     size_t count, int64_t ahead, uint64_t sums[2]);

typedef struct dray__cast {
    int32_t from, to; /* dray_dtype */
    dray__cast_fn run;
    dray__cast_summed_fn run_summed; /* NULL when a fused loop is not faster than two */
} dray__cast;

/* Rows of a dense box that share a scale: `stride` elements from one to the next, on both sides. */
typedef struct dray__patch {
    size_t rows, count, stride;
} dray__patch;

/* Quantisation (quant.h): out[i] = x[i] · factor, narrowed; a NaN without its sign. */
typedef void (*dray__quantise_fn)(const void *x, uint8_t *out, dray__patch patch, float factor);
/* out[i] = x[i] · scale, narrowed to nearest even; a NaN is the quiet one without payload. */
typedef void (*dray__dequantise_fn)(const uint8_t *x, void *out, dray__patch patch, float scale);

typedef struct dray__quantiser {
    int32_t from, to;
    dray__quantise_fn run;
} dray__quantiser;

typedef struct dray__dequantiser {
    int32_t from, to;
    dray__dequantise_fn run;
} dray__dequantiser;

/* Transposes: the element at row r, column c of the source goes to row c, column r. Rows are
 * `stride` bytes apart on either side, their elements beside each other; any alignment. */
typedef void (*dray__turn_fn)(const uint8_t *source, int64_t source_stride, uint8_t *destination,
                              int64_t destination_stride, size_t rows, size_t columns);

typedef struct dray__kernels {
    const char *name; /* "portable", "avx2", "avx512", "avx512ifma" */
    /* out[i] = B(first + i), see checksum.h. */
    void (*columns)(uint64_t first, size_t count, uint32_t *out);
    /* Σ columns[i] · element i mod 2^64, for dense elements of 1, 2 and 4 bytes. */
    uint64_t (*dot1)(const uint32_t *columns, const void *data, size_t count);
    uint64_t (*dot2)(const uint32_t *columns, const void *data, size_t count);
    uint64_t (*dot4)(const uint32_t *columns, const void *data, size_t count);
    /* dot2 of four rows that are `stride` bytes apart. */
    void (*dot2_rows)(const uint32_t *columns, const void *data, int64_t stride, size_t count,
                      uint64_t sums[4]);
    /* The same while copying to `out`: one pass over the data. */
    uint64_t (*copy1)(const uint32_t *columns, const void *data, void *out, size_t count);
    uint64_t (*copy2)(const uint32_t *columns, const void *data, void *out, size_t count);
    uint64_t (*copy4)(const uint32_t *columns, const void *data, void *out, size_t count);
    const dray__cast *casts; /* ends with run == NULL */
    /* The largest magnitude (bits without the sign) among the elements and `most`; of 2 and 4
     * bytes. A NaN is larger than infinity. */
    uint32_t (*most2)(const void *x, dray__patch patch, uint32_t most);
    uint32_t (*most4)(const void *x, dray__patch patch, uint32_t most);
    const dray__quantiser *quantisers; /* both end with run == NULL */
    const dray__dequantiser *dequantisers;
    dray__turn_fn turn[9]; /* by the bytes of an element: 1, 2, 4, 8 */
} dray__kernels;

/* Returns the best table for this machine, or the one that $DRAY_KERNELS names, if the machine can
 * run it. Thread-safe. */
const dray__kernels *dray__kernels_get(void);
/* Returns all tables that this machine can run, the best last, ended by NULL. For tests, which
 * compare them. */
const dray__kernels *const *dray__kernels_all(void);

extern const dray__kernels dray__kernels_portable, dray__kernels_avx2, dray__kernels_avx512,
    dray__kernels_avx512ifma;

/* Returns NULL when there is no such conversion. Rounding is to nearest even. NaN: to bf16 it
 * becomes 0x7FC0 (as in PyTorch's scalar code; its vector code gives 0xFFFF, its GPU code 0x7FFF);
 * to f16, f32 and f64 it keeps sign and leading payload and becomes quiet, as the hardware does.
 * f64 to 16 bits goes through f32, as in PyTorch. To F8E4M3, numbers that are too large, infinity
 * included, become 448, and NaN becomes 0x7F with its sign; to F8E5M2 they become infinity and
 * 0x7F. From either a NaN keeps sign
 * and payload and becomes quiet. All other conversions to and from 8 bits go through f32. */
dray__cast_fn dray__cast_find(int32_t from, int32_t to);
dray__cast_summed_fn dray__cast_find_summed(int32_t from, int32_t to); /* NULL as above */
