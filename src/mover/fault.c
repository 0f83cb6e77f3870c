/* The test hook of movers: tiles can be lost, changed, misplaced or refused, as by a broken
 * transport. Updates must detect every such fault. */
#include "base/error.h"
#include "mover/move.h"

#include <stdlib.h>
#include <unistd.h>

/* Returns the step to the element before, or, at the region's start, to the one after. */
static int64_t beside(uint64_t offset, size_t size)
{
    return offset >= size ? -(int64_t)size : (int64_t)size;
}

/* Writes the tile to memory that is then freed. */
static int drop(dray__move *move, dray__tile *tile, dray_error *error)
{
    if (!move->destination->base)
        return DRAY_OK;
    uint64_t stride = dray_dtype_size((dray_dtype)tile->rect.to);
    for (uint32_t d = tile->rect.ndim; d-- > 0;) {
        tile->rect.destination_stride[d] = (int64_t)stride;
        stride *= (uint64_t)tile->rect.extent[d];
    }
    uint8_t *nowhere = malloc(stride);
    if (!nowhere)
        return dray__nomem(error);
    tile->rect.destination = nowhere;
    int rc = move->mover->tile(move, tile, error);
    free(nowhere);
    return rc;
}

static int flip(dray__move *move, dray__tile *tile, dray_error *error)
{
    uint8_t *at = tile->rect.destination, byte;
    uint64_t offset = tile->destination_offset;
    bool memory = move->destination->base != NULL;
    int rc = move->mover->tile(move, tile, error);
    if (rc)
        return rc;
    if (memory)
        *at ^= 4;
    else if (move->destination->ops->kind == DRAY_REGION_CUDA)
        return dray__cuda_flip(move->destination, offset, error);
    else if (pread(move->destination->fd, &byte, 1, (off_t)offset) != 1 ||
             (byte ^= 4, pwrite(move->destination->fd, &byte, 1, (off_t)offset) != 1))
        return dray__fail(error, DRAY_ESYS, "flipping a bit of %s", move->destination->name);
    return DRAY_OK;
}

int dray__fault_tile(dray__fault fault, dray__move *move, dray__tile *tile, dray_error *error)
{
    int64_t step;
    switch (fault) {
    case DRAY__FAULT_FAIL:
        return dray__fail(error, DRAY_ESYS, "%s mover: a fault was asked for", move->mover->name);
    case DRAY__FAULT_DROP:
        return drop(move, tile, error);
    case DRAY__FAULT_FLIP:
        return flip(move, tile, error);
    case DRAY__FAULT_SHIFT:
        step = beside(tile->destination_offset, dray_dtype_size((dray_dtype)tile->rect.to));
        tile->destination_offset += (uint64_t)step;
        if (tile->rect.destination)
            tile->rect.destination += step;
        break;
    case DRAY__FAULT_MISREAD:
        step = beside(tile->source_offset, dray_dtype_size((dray_dtype)tile->rect.from));
        tile->source_offset += (uint64_t)step;
        if (tile->rect.source)
            tile->rect.source += step;
        break;
    case DRAY__FAULT_NONE:
    case DRAY__FAULT_COUNT:
        break;
    }
    return move->mover->tile(move, tile, error);
}
