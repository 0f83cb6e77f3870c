/* Memory to memory: both sides are addressable in this process. */
#include "mover/move.h"

int dray__tile_memory(dray__move *move, dray__tile *tile, dray_error *error)
{
    (void)move;
    (void)error;
    dray__tile_move(tile);
    return DRAY_OK;
}
