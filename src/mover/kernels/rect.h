/* Rectangles in addressable memory: moved and converted, with any strides. */
#pragma once

#include <dray/plan.h>
#include <stdbool.h>

typedef struct dray__rect_copy {
    uint32_t ndim;
    int32_t from, to; /* dray_dtype */
    int64_t extent[DRAY_MAX_DIMS];
    const uint8_t *source;
    uint8_t *destination;
    int64_t source_stride[DRAY_MAX_DIMS], destination_stride[DRAY_MAX_DIMS]; /* bytes */
} dray__rect_copy;

/* Moves every element, converting where from != to (the conversion must exist). The two sides do
 * not overlap. */
void dray__rect_move(const dray__rect_copy *rect);
/* The place of a rectangle in its tensor, which a checksum needs. */
typedef struct dray__rect_place {
    uint32_t ndim;        /* of the tensor; 0 for a scalar, whose rectangle has one dimension */
    const int64_t *shape; /* global */
    int64_t start[DRAY_MAX_DIMS];
} dray__rect_place;

/* The same, reading the source once: adds the checksum (mover/kernels/checksum.h) of the source's
 * bits to sums[0], and that of the bits that it writes to sums[1]. To verify the destination,
 * the caller reads it back. */
void dray__rect_move_summed(const dray__rect_copy *rect, const dray__rect_place *place,
                            uint64_t sums[2]);
/* A transposing copy: the dimension along which elements are adjacent in the source is not the one
 * along which they are adjacent in the destination. */
typedef struct dray__rect_turn {
    uint32_t source, destination; /* the dimensions */
} dray__rect_turn;
bool dray__rect_turns(const dray__rect_copy *rect, dray__rect_turn *turn);
/* Gives the extents of tiles of at most `elements` elements that are fast to transpose. */
void dray__turn_tile(const dray__rect_turn *turn, const int64_t *extent, uint32_t ndim,
                     uint64_t elements, int64_t *tile);
/* Returns the rectangle with its destination (or source) replaced by a dense array in C order. */
dray__rect_copy dray__rect_to_dense(const dray__rect_copy *rect, void *data);
dray__rect_copy dray__rect_from_dense(const dray__rect_copy *rect, const void *data);
/* Returns true when the rectangle is one run of bytes on both sides: no conversion, no gap, and the
 * same order. */
bool dray__rect_is_run(const dray__rect_copy *rect, uint64_t *bytes);

/* The checks that every mover makes of copy `number`: dtypes that are known and can be converted,
 * and dimensions and extents of at least 1. DRAY_EINVALID, DRAY_EDTYPE. */
int dray__copy_check(const dray_copy *copy, uint64_t number, dray_error *error);
/* The checks of a copy that is summed: its dimensions are the tensor's, and its coordinates are
 * inside the tensor's shape. tensor is NULL when the layout lacks it. DRAY_EINVALID. */
int dray__copy_check_place(const dray_copy *copy, const dray_tensor_info *tensor, uint64_t number,
                           dray_error *error);
