/* What the files of src/mover share: the move, its tiles, and the table of movers. */
#ifndef DRAY_MOVER_MOVE_H
#define DRAY_MOVER_MOVE_H

#include "memory/region.h"
#include "mover/mover.h"
#include "mover/rect.h"

/* A piece of one copy, small enough to be done at once. */
typedef struct dray__tile {
    dray__rect rect; /* the pointers are NULL where a side is a file */
    uint64_t source_offset, destination_offset;
    /* Set by the mover: where the destination's bits can be read for the checksum. */
    const uint8_t *bits;
    int64_t bits_stride[DRAY_MAX_DIMS];
} dray__tile;

typedef struct dray__mover {
    dray_region_kind source, destination;
    const char *name;
    size_t tile_bytes; /* of the larger side */
    size_t parts;      /* of the staging buffer, each with room for a tile; 0: needs none */
    /* Does one tile and says where its bits are. */
    int (*tile)(dray__move *move, dray__tile *tile, dray_error *error);
    /* Whether the tile is small enough for this mover; NULL: tile_bytes says it all. */
    bool (*fits)(const dray__move *move, const dray__tile *tile);
} dray__mover;

struct dray__move {
    const dray__mover *mover;
    const dray_region *source;
    dray_region *destination;
    const dray_copy *copies;
    uint64_t count;
    dray__move_options options;
    void *owned_staging;
    uint64_t at;                     /* the copy that is being done */
    int64_t position[DRAY_MAX_DIMS]; /* within it */
    uint64_t done;                   /* bytes */
};

int dray__tile_memory(dray__move *move, dray__tile *tile, dray_error *error);
int dray__tile_from_file(dray__move *move, dray__tile *tile, dray_error *error);
int dray__tile_to_file(dray__move *move, dray__tile *tile, dray_error *error);
int dray__tile_between_files(dray__move *move, dray__tile *tile, dray_error *error);

/* False for rows so short that they should be read with the gaps between them, but too many of them
 * for the staging buffer. */
bool dray__file_fits(const dray__move *move, const dray__tile *tile);

#endif
