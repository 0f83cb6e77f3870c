/* src/weights/placements/: how the bytes of an update are put where they belong, if it is more
 * than a copy. patch.c says which of them a delta can bring up to date, convert.c gathers cells of
 * a tensor and quantises them or makes floats of them, wired.c has them quantised before they are
 * sent, and load.c hands whole tensors to an engine's own load function. */

/* What is quantised before the wire: of the floats that a transform reads from another host, whole
 * cells that lie in one block are asked for as they will be. The source's data server quantises
 * them and sends elements and scales, half or a quarter of the bytes; the remote lane writes them
 * where they belong. Cells whose elements several sources or blocks share, and those that do not
 * fit an answer, are gathered by the lane of transforms. */
#pragma once

#include "weights/server/pull.h"
#include "weights/transfer/transfer.h"

enum {
    DRAY__WIRED_PARTS = 1 + DRAY__RECT_SIDES,
    DRAY__WIRED_CELL = 64 << 10 /* bytes on the wire of a cell, at most */
};
/* Then an answer of the remote lane has room for any such cell, however many lanes there are. */
#define DRAY__WIRED_BUCKET ((uint64_t)4 << 20)

/* Cuts what a read of a QUANTISE holds of whole cells of one block out of it; returns into how many
 * parts. */
uint32_t dray__wired_cut(const dray__sources *sources, const dray_transform *transform,
                         uint64_t host, const dray__op *op, dray__op out[DRAY__WIRED_PARTS]);
/* Does the remote lane carry out this op of a transform? */
bool dray__wired(const dray__transfer *transfer, const dray__op *op);
/* Of the transform that a wired op is of, its cells in a rectangle of whole ones. */
dray__rect dray__wired_cells(const dray__transfer *transfer, const dray__op *op,
                             const dray__rect *rect);
/* The way back, no further than where the op ends. */
dray__rect dray__wired_elements(const dray__transfer *transfer, const dray__op *op,
                                const dray__rect *cells);
dray__pull_quant dray__wired_quant(const dray__transfer *transfer, const dray__op *op);
/* Bytes on the wire of a rectangle of whole cells, and of each of its cells. */
uint64_t dray__wired_bytes(const dray__transfer *transfer, const dray__op *op,
                           const dray__rect *rect);
uint64_t dray__wired_cell_bytes(const dray__transfer *transfer, const dray__op *op);
/* The block of the destination that holds all of a rectangle's elements, as they are quantised.
 * false: there is none. */
bool dray__wired_block(const dray__transfer *transfer, const dray__op *op, const dray__rect *rect,
                       uint32_t *block);
/* From one cell's end to another's: those that a rectangle begins with, and not that at its end. */
dray__rect dray__wired_aligned(const dray__transfer *transfer, const dray__op *op,
                               const dray__rect *rect);
/* The sum of what came: dense elements, then their scales. */
uint64_t dray__wired_sum(const dray__transfer *transfer, const dray__op *op, const dray__rect *rect,
                         const void *data);
/* Writes what came, `at` of a region, to where this rank holds it, and enters it in the books. */
int dray__wired_place(dray__transfer *transfer, const dray__op *op, const dray__rect *rect,
                      const dray_region *from, uint64_t at, dray_error *error);

/* Writes what this rank holds of a dense box of a part (DRAY__PART_...) of the tensor of a
 * transform, in the part's coordinates, that lies at `at` of `from`. */
int dray__transform_write(dray__transfer *transfer, const dray_transform *transform, int part,
                          const dray_region *from, const dray__rect *box, uint64_t at,
                          dray_error *error);
