/* Movers between a GPU's memory and any other: tile by tile through the host, for all strides and
 * dtypes. They are slower than jobs (cuda.c), but work for all pairs. */
#include "mover/cuda/cuda.h"
#include "mover/move.h"

/* Copies the tile's elements, dense, to `staging`, and points the rectangle's source there. */
static int gather(dray__move *move, dray__tile *tile, uint8_t *staging, dray_error *error)
{
    dray__rect_copy *rect = &tile->rect;
    dray__cuda_place place = {rect->from, rect->ndim, rect->extent, rect->source_stride,
                              tile->source_offset};
    int rc = dray__cuda_bounce(move->source, &place, staging, false, error);
    if (!rc)
        *rect = dray__rect_from_dense(rect, staging);
    return rc;
}

/* Converts the tile into `staging`, dense, and copies that to its destination. */
static int scatter(dray__move *move, dray__tile *tile, uint8_t *staging, dray_error *error)
{
    dray__rect_copy *rect = &tile->rect, there = *rect;
    dray__cuda_place place = {rect->to, rect->ndim, there.extent, there.destination_stride,
                              tile->destination_offset};
    *rect = dray__rect_to_dense(rect, staging);
    dray__tile_move(tile);
    return dray__cuda_bounce(move->destination, &place, staging, true, error);
}

int dray__tile_from_cuda(dray__move *move, dray__tile *tile, dray_error *error)
{
    int rc = gather(move, tile, move->options.staging, error);
    if (!rc)
        dray__tile_move(tile);
    return rc;
}

int dray__tile_to_cuda(dray__move *move, dray__tile *tile, dray_error *error)
{
    return scatter(move, tile, move->options.staging, error);
}

int dray__tile_between_cuda(dray__move *move, dray__tile *tile, dray_error *error)
{
    uint8_t *staging = move->options.staging;
    int rc = gather(move, tile, staging, error);
    return rc ? rc : scatter(move, tile, staging + move->options.staging_bytes / 2, error);
}

int dray__tile_cuda_to_file(dray__move *move, dray__tile *tile, dray_error *error)
{
    uint8_t *staging = move->options.staging;
    int rc = gather(move, tile, staging, error);
    return rc ? rc : dray__file_store(move, tile, staging + move->options.staging_bytes / 2, error);
}

int dray__tile_file_to_cuda(dray__move *move, dray__tile *tile, dray_error *error)
{
    uint8_t *staging = move->options.staging;
    size_t half = move->options.staging_bytes / 2;
    int rc = dray__file_fetch(move, tile, staging, half, error);
    return rc ? rc : scatter(move, tile, staging + half, error);
}

int dray__cuda_flip(dray_region *region, uint64_t offset, dray_error *error)
{
    const int64_t one = 1;
    dray__cuda_place place = {DRAY_U8, 1, &one, &one, offset};
    uint8_t byte;
    int rc = dray__cuda_bounce(region, &place, &byte, false, error);
    byte ^= 4;
    return rc ? rc : dray__cuda_bounce(region, &place, &byte, true, error);
}
