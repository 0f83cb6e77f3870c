/* What the GPU's kernels are given: shared by cuda_kernels.cu and by those who launch it. Plain
 * data in the common subset of C17 and CUDA C++.
 *
 * As C (tests without a GPU) each kernel is a function that is one thread of one block:
 *
 *     for (uint32_t i = 0; i < blocks; i++)
 *         dray__gpu_here = (dray__gpu_spot){.block = i, .blocks = blocks, .threads = 1}, k(launch);
 */
#ifndef DRAY_MOVER_CUDA_CUDA_KERNELS_H
#define DRAY_MOVER_CUDA_CUDA_KERNELS_H

#if defined(__CUDACC_RTC__)
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;
#else
#include <stdint.h>
#endif

enum {
    DRAY__GPU_THREADS = 256,     /* of a block */
    DRAY__GPU_ROWS = 512,        /* of a tile, at most */
    DRAY__GPU_CELL = 1 << 14,    /* elements of a cell that is read once */
    DRAY__GPU_GROUP_ROWS = 512,  /* of a tile of groups, at most; eights */
    DRAY__GPU_GROUP = 256,       /* of a row, that share a scale, at most; 8 times a power of two */
    DRAY__GPU_CHANGED = 1 << 13, /* entries of a slice of a delta, at most */
    DRAY__GPU_SPARSE = 8, /* slices of which more than one in so many changed go as a whole */
    DRAY__GPU_SLOT = 16,  /* bytes of a slot of a delta's table */
    DRAY__GPU_BYTES = 2,  /* a scale format: the exponent in a byte, for each row of a cell */
    DRAY__GPU_SUMS = 5    /* kinds of sums: source, written, back, scales, most */
};

/* A rectangle in the order in which it is walked: two outer dimensions, rows, columns. Columns are
 * those of the tensor, rows everything else. An element of 8 bytes that is not converted counts as
 * two of 4, as in the checksum. */
typedef struct dray__gpu_piece {
    uint64_t source, destination; /* addresses of the first element; destination 0: none */
    uint64_t row, column;         /* in the tensor, flattened (mover/kernels/checksum.h) */
    uint64_t row_step[3];         /* per dimension: outer, outer, rows */
    int64_t source_stride[3], destination_stride[3]; /* bytes, the same */
    int64_t source_step, destination_step;           /* from column to column */
    uint32_t extent[3], columns;
    uint32_t tile_rows, tile_columns; /* of a tile */
    uint32_t row_tiles, column_tiles;
    uint32_t sum;      /* whose sums */
    uint16_t from, to; /* dray_dtype */
    uint16_t unit;     /* bytes of an element, where nothing is converted */
    uint16_t word;     /* bytes that are moved at once; elements, in conversions */
    uint16_t turned;   /* the destination's rows are the source's columns */
    uint16_t reserved[5];
} dray__gpu_piece; /* whole 16 bytes: it is fetched in such */

/* A box in cells. Four dimensions, the tensor's last ones last. */
typedef struct dray__gpu_quant {
    uint64_t source, destination, scales;
    uint64_t first_most; /* into `most`: of its first cell, where cells are read twice */
    int64_t source_stride[4], destination_stride[4], scale_stride[4];
    uint64_t start[4]; /* global */
    uint64_t extent[4], cell[4];
    uint64_t shape[4], scale_shape[4]; /* of the tensor, of its scales */
    uint64_t cells[4], first_cell[4];  /* of the box; the number of its first one in the tensor */
    uint32_t strips; /* tiles of a cell, or, of groups, of a matrix: ranges of its rows */
    uint32_t sum;
    uint16_t from, to;     /* dray_dtype */
    uint16_t scale_format; /* dray_scale_format, or DRAY__GPU_BYTES */
    uint16_t word;         /* elements that are moved at once: 8 or 1 */
    /* Of groups (cuda_groups.h): */
    uint64_t second; /* zero points */
    int64_t second_stride[4];
    uint32_t tile_rows; /* of a tile, in one matrix; whole words of zero points */
    uint16_t format;    /* dray_quant_kind; 0: cells */
    uint16_t as;        /* dtype in which scales are computed */
    uint16_t packed;    /* values are stored eight elements at once */
    uint16_t reserved;
} dray__gpu_quant;

/* A block whose changes are found, or (part of) one that is brought up to date
 * (weights/delta/delta.h). Four dimensions, the tensor's last ones last. */
typedef struct dray__gpu_delta {
    uint64_t source;             /* the block's first element; applying: 0: there is none to copy */
    uint64_t table, store;       /* the block's first slot; the region */
    uint64_t store_bytes, begin; /* of it; where entries begin */
    uint64_t base, pitch; /* kept bits, slice by slice, and how far it is to the next slice's */
    uint64_t destination; /* of the part's first element */
    int64_t source_stride[4], destination_stride[4];
    uint32_t extent[4], tile[4], slices[4]; /* of the block, of a slice; how many slices */
    uint32_t low[4], wanted[4];             /* the part, counted from the block's beginning */
    uint32_t first[4], crossed[4];          /* slices in which it is */
    uint32_t sum;
    uint16_t from, to; /* dray_dtype: as it is stored, as it is sent */
    uint16_t in, out;  /* their bytes */
    uint16_t word; /* finding: elements at once, 8, 4 or 1; else bytes that are copied at once */
    uint16_t stepping; /* applying: elements with a step other than 0 are moved by it */
} dray__gpu_delta;

/* A part of a piece or box: the tile of that number. */
typedef struct dray__gpu_tile {
    uint32_t piece, index;
} dray__gpu_tile;

typedef struct dray__gpu_launch {
    const dray__gpu_piece *pieces;
    const dray__gpu_quant *quants;
    const dray__gpu_delta *deltas;
    const dray__gpu_tile *tiles; /* of this launch */
    uint64_t *sums;              /* DRAY__GPU_SUMS arrays */
    uint64_t sum_count;          /* of one */
    uint32_t *most;              /* largest magnitudes, as bits of f32 */
    const uint32_t *stop;        /* not 0: go no further */
    uint32_t *cursor;            /* tiles of pieces that were taken: 0 at first */
    uint32_t count;              /* tiles */
    uint32_t wanted;             /* bit set of sums */
} dray__gpu_launch;

/* words: rows of 16-byte words, nothing converted. bytes: the same, whose elements are bytes. sum:
 * both, summed alone. narrow: the same in
 * smaller words. cast: rows of elements, 8 at once. any: one element at a time, any strides. turn:
 * through shared memory. most, quantise, dequantise, groups, largest, globals: boxes. */
#define DRAY__GPU_KERNELS(XX)                                                                      \
    XX(dray_words)                                                                                 \
    XX(dray_bytes)                                                                                 \
    XX(dray_sum)                                                                                   \
    XX(dray_narrow)                                                                                \
    XX(dray_cast)                                                                                  \
    XX(dray_any)                                                                                   \
    XX(dray_turn)                                                                                  \
    XX(dray_most)                                                                                  \
    XX(dray_quantise)                                                                              \
    XX(dray_dequantise)                                                                            \
    XX(dray_mxfp8)                                                                                 \
    XX(dray_mxfp4)                                                                                 \
    XX(dray_nvfp4)                                                                                 \
    XX(dray_int4)                                                                                  \
    XX(dray_int4_zero)                                                                             \
    XX(dray_largest)                                                                               \
    XX(dray_globals)                                                                               \
    XX(dray_delta_find)                                                                            \
    XX(dray_delta_apply)

#if !defined(__CUDACC__)
typedef struct dray__gpu_spot {
    uint32_t block, blocks, thread, threads;
} dray__gpu_spot;
extern _Thread_local dray__gpu_spot dray__gpu_here;

#define XX(name) void name(dray__gpu_launch launch);
DRAY__GPU_KERNELS(XX)
#undef XX
#endif

#endif
