/* The declarations that the files of src/mover share: the move, its tiles, and the table of
 * movers. */
#pragma once

#include "memory/region.h"
#include "mover/kernels/rect.h"
#include "mover/mover.h"

/* A piece of one copy, small enough to be done at once. */
typedef struct dray__tile {
    dray__rect_copy rect; /* the pointers are NULL where a side is a file */
    uint64_t source_offset, destination_offset;
    bool summed; /* `sums` are wanted; then `place` is set */
    dray__rect_place place;
    uint64_t sums[2]; /* of the source's bits, and of the written bits: see
                       * dray__rect_move_summed */
} dray__tile;

/* Kinds of regions that a mover is for: bit sets of dray__kind_bit. */
#define dray__kind_bit(kind) (1u << (kind))

typedef struct dray__mover {
    uint32_t sources, destinations;
    const char *name;
    size_t tile_bytes; /* of the larger side */
    size_t parts;      /* of the staging buffer, each with room for a tile; 0 when it needs none */
    /* Moves one tile. When tile->summed, sets tile->sums, too. */
    int (*tile)(dray__move *move, dray__tile *tile, dray_error *error);
    /* Returns true when the tile is small enough for this mover. NULL when tile_bytes decides. */
    bool (*fits)(const dray__move *move, const dray__tile *tile);
} dray__mover;

struct dray__move {
    const dray__mover *mover;
    const dray_region *source;
    dray_region *destination;
    const dray_copy *copies;
    uint64_t count;
    dray__move_options options;
    uint64_t at;                     /* the copy that is being done */
    int64_t position[DRAY_MAX_DIMS]; /* within it */
};

/* Moves the tile's rectangle between addressable memory on both sides, with its sums. */
void dray__tile_move(dray__tile *tile);
/* Sets the sums of a tile whose bits are the same on both sides, from its bits at `data`. */
void dray__tile_sum(dray__tile *tile, const uint8_t *data, const int64_t *stride);

int dray__tile_from_file(dray__move *move, dray__tile *tile, dray_error *error);
int dray__tile_to_file(dray__move *move, dray__tile *tile, dray_error *error);
int dray__tile_between_files(dray__move *move, dray__tile *tile, dray_error *error);

int dray__tile_from_cuda(dray__move *move, dray__tile *tile, dray_error *error);
int dray__tile_to_cuda(dray__move *move, dray__tile *tile, dray_error *error);
int dray__tile_between_cuda(dray__move *move, dray__tile *tile, dray_error *error);
int dray__tile_cuda_to_file(dray__move *move, dray__tile *tile, dray_error *error);
int dray__tile_file_to_cuda(dray__move *move, dray__tile *tile, dray_error *error);

/* Reads the tile's elements from a file into `staging` and points the rectangle's source there. */
int dray__file_fetch(dray__move *move, dray__tile *tile, uint8_t *staging, size_t room,
                     dray_error *error);
/* Writes the tile from memory, through `staging` where it must be packed or converted. */
int dray__file_store(dray__move *move, dray__tile *tile, uint8_t *staging, dray_error *error);
/* Flips a bit of the byte at `offset` of device memory. */
int dray__cuda_flip(dray_region *region, uint64_t offset, dray_error *error);

/* Returns false when the tile's rows are so short that they should be read together with the gaps
 * between them, but rows and gaps do not fit the staging buffer. */
bool dray__file_fits(const dray__move *move, const dray__tile *tile);

/* fault.c: moves the tile by its mover, with the given fault. */
int dray__fault_tile(dray__fault fault, dray__move *move, dray__tile *tile, dray_error *error);
