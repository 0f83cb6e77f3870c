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
 * bits to sums[0], and that of the bits that it writes to sums[1]. The caller reads the destination
 * back. */
void dray__rect_move_summed(const dray__rect_copy *rect, const dray__rect_place *place,
                            uint64_t sums[2]);
/* Whether the rectangle is turned over on the way: elements that are beside each other along one
 * dimension of the source do so along another one of the destination. */
typedef struct dray__rect_turn {
    uint32_t source, destination; /* the dimensions */
} dray__rect_turn;
bool dray__rect_turns(const dray__rect_copy *rect, dray__rect_turn *turn);
/* Sizes of tiles that are worked off well, at most `elements` each. */
void dray__turn_tile(const dray__rect_turn *turn, const int64_t *extent, uint32_t ndim,
                     uint64_t elements, int64_t *tile);
/* The same rectangle of dense elements in C order at `data`, on one side. */
dray__rect_copy dray__rect_to_dense(const dray__rect_copy *rect, void *data);
dray__rect_copy dray__rect_from_dense(const dray__rect_copy *rect, const void *data);
/* Neither a conversion nor a gap: one run of bytes on both sides, in the same order. */
bool dray__rect_is_run(const dray__rect_copy *rect, uint64_t *bytes);

/* The checks that every mover makes of copy `number`: dtypes that are known and can be converted,
 * and dimensions and extents of at least 1. DRAY_EINVALID, DRAY_EDTYPE. */
int dray__copy_check(const dray_copy *copy, uint64_t number, dray_error *error);
/* ... and for its checksum: the tensor's dimensions (tensor NULL: the layout lacks it), and
 * coordinates inside its shape. DRAY_EINVALID. */
int dray__copy_check_place(const dray_copy *copy, const dray_tensor_info *tensor, uint64_t number,
                           dray_error *error);
