/* The arguments of the GPU's kernels, shared by cuda_kernels.cu and the code that launches it.
 * Plain data in the common subset of C17 and CUDA C++.
 *
 * Compiled as C (tests without a GPU), each kernel is a function that runs one thread of one block:
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
    DRAY__GPU_CELL = 1 << 14,    /* most elements of a cell that is read once */
    DRAY__GPU_HELD = 8,          /* eights of a cell that a thread holds, at most */
    DRAY__GPU_GROUP_ROWS = 512,  /* of a tile of groups, at most; a multiple of 8 */
    DRAY__GPU_GROUP = 256,       /* elements of a row that share a scale, at most; 8 * 2^n */
    DRAY__GPU_KEPT = 1 << 12,    /* bytes of scales that a block keeps before it writes them */
    DRAY__GPU_CHANGED = 1 << 13, /* entries of a slice of a delta, at most */
    DRAY__GPU_SPARSE = 8, /* if more than one element in so many changed, a slice is sent whole */
    DRAY__GPU_SLOT = 16,  /* bytes of a slot of a delta's table */
    DRAY__GPU_BYTES = 2,  /* a scale format: the exponent in a byte, for each row of a cell */
    DRAY__GPU_SUMS = 5    /* kinds of sums: source, written, back, scales, most */
};

/* A rectangle, as kernels iterate over it: two outer dimensions, rows, columns. Columns are those
 * of the tensor; the other three cover all its other dimensions. An element of 8 bytes that is not
 * converted counts as two of 4, as in the checksum. */
typedef struct dray__gpu_piece {
    uint64_t source, destination; /* addresses of the first element; destination 0: none */
    uint64_t row, column;         /* in the tensor, flattened (mover/kernels/checksum.h) */
    uint64_t row_step[3];         /* per dimension: outer, outer, rows */
    int64_t source_stride[3], destination_stride[3]; /* bytes, the same */
    int64_t source_step, destination_step;           /* from column to column */
    uint32_t extent[3], columns;
    uint32_t tile_rows, tile_columns; /* of a tile */
    uint32_t row_tiles, column_tiles;
    uint32_t sum;      /* index of its sums */
    uint16_t from, to; /* dray_dtype */
    uint16_t unit;     /* bytes of an element, unless converted */
    uint16_t word;     /* bytes moved at once; in conversions, elements */
    uint16_t turned;   /* the destination's rows are the source's columns */
    uint16_t reserved[5];
} dray__gpu_piece; /* a multiple of 16 bytes: kernels load it in words of 16 */

/* A box in cells. Four dimensions, the tensor's last ones last. */
typedef struct dray__gpu_quant {
    uint64_t source, destination, scales;
    uint64_t first_most; /* index of its first cell in `most`, where cells are read twice */
    int64_t source_stride[4], destination_stride[4], scale_stride[4];
    uint64_t start[4]; /* global */
    uint64_t extent[4], cell[4];
    uint64_t shape[4], scale_shape[4]; /* of the tensor, of its scales */
    uint64_t cells[4], first_cell[4];  /* of the box; index of its first one in the tensor */
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

/* A block whose changes are found, or a block, or part of one, to which changes are applied
 * (weights/delta/delta.h). Four dimensions, the tensor's last ones last. */
typedef struct dray__gpu_delta {
    uint64_t source; /* the block's first element; when applying, 0 if nothing is copied from it */
    uint64_t table, store;       /* the block's first slot; the region */
    uint64_t store_bytes, begin; /* of it; where entries begin */
    uint64_t base, pitch; /* the earlier bits, slice by slice, and the bytes from slice to slice */
    uint64_t destination; /* of the part's first element */
    int64_t source_stride[4], destination_stride[4];
    uint32_t extent[4], tile[4], slices[4]; /* of the block, of a slice; how many slices */
    uint32_t low[4], wanted[4];             /* the part, counted from the block's beginning */
    uint32_t first[4], crossed[4];          /* the slices that it overlaps */
    uint32_t sum;
    uint16_t from, to; /* dray_dtype: as it is stored, as it is sent */
    uint16_t in, out;  /* their bytes */
    uint16_t word;     /* finding: elements at once, 8, 4 or 1; applying: bytes copied at once */
    uint16_t stepping; /* applying: a step other than 0 is added to the element */
} dray__gpu_delta;

/* Tile number `index` of a piece, box or delta. */
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
    const uint32_t *stop;        /* kernels end when it is not 0 */
    uint32_t *cursor;            /* tiles taken so far, 0 at first */
    uint32_t count;              /* tiles */
    uint32_t wanted;             /* bit set of sums */
} dray__gpu_launch;

/* words: rows in 16-byte words, not converted. bytes: the same for elements of one byte. sum: sums
 * such rows without a copy. narrow: the same as words, in smaller words. cast: converts rows, 8
 * elements at once. any: one element at a time, any strides. turn: transposes through shared
 * memory. cells: quantises boxes of bf16 in cells that a block's threads hold. most, quantise,
 * dequantise, the formats, largest, globals: boxes. */
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
    XX(dray_cells)                                                                                 \
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
