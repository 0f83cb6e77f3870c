/* Rectangles in addressable memory: moved, converted, whatever their strides. */
#ifndef DRAY_MOVER_RECT_H
#define DRAY_MOVER_RECT_H

#include <dray/model.h>
#include <stdbool.h>

typedef struct dray__rect {
    uint32_t ndim;
    int32_t from, to; /* dray_dtype */
    int64_t extent[DRAY_MAX_DIMS];
    const uint8_t *source;
    uint8_t *destination;
    int64_t source_stride[DRAY_MAX_DIMS], destination_stride[DRAY_MAX_DIMS]; /* bytes */
} dray__rect;

/* Moves every element, converting where from != to (the conversion must exist). The two sides do
 * not overlap. */
void dray__rect_move(const dray__rect *rect);
/* Where a rectangle lies in its tensor: what a checksum needs to know. */
typedef struct dray__place {
    uint32_t ndim;        /* of the tensor; 0: a scalar, whose rectangle has one dimension */
    const int64_t *shape; /* global */
    int64_t start[DRAY_MAX_DIMS];
} dray__place;

/* The same, reading the source once: adds the checksum (mover/checksum.h) of the source's bits to
 * sums[0], and that of the bits that it writes to sums[1]. What then lies at the destination is for
 * the caller to read back. */
void dray__rect_move_summed(const dray__rect *rect, const dray__place *place, uint64_t sums[2]);
/* Whether the rectangle is turned over on the way: elements that lie beside each other along one
 * dimension of the source do so along another one of the destination. */
typedef struct dray__turn {
    uint32_t source, destination; /* the dimensions */
} dray__turn;
bool dray__rect_turns(const dray__rect *rect, dray__turn *turn);
/* Sizes of tiles that are worked off well, at most `elements` each. */
void dray__turn_tile(const dray__turn *turn, const int64_t *extent, uint32_t ndim,
                     uint64_t elements, int64_t *tile);
/* The same rectangle of dense elements in C order at `data`, on one side. */
dray__rect dray__rect_to_dense(const dray__rect *rect, void *data);
dray__rect dray__rect_from_dense(const dray__rect *rect, const void *data);
/* Neither a conversion nor a gap: one run of bytes on both sides, in the same order. */
bool dray__rect_is_run(const dray__rect *rect, uint64_t *bytes);
/* Copies `count` elements of `size` bytes (1, 2, 4, 8) from and to any strides. */
void dray__elements_move(const uint8_t *source, int64_t source_stride, uint8_t *destination,
                         int64_t destination_stride, size_t size, size_t count);

#endif
