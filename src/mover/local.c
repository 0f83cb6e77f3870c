/* Memory to memory: both sides are addressable in this process. */
#include "mover/move.h"

#include <string.h>

int dray__tile_memory(dray__move *move, dray__tile *tile, dray_error *error)
{
    (void)move;
    (void)error;
    dray__rect_move(&tile->rect);
    tile->bits = tile->rect.destination;
    memcpy(tile->bits_stride, tile->rect.destination_stride, sizeof tile->bits_stride);
    return DRAY_OK;
}
