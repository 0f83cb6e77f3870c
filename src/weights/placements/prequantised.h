/* src/weights/placements/: how the bytes of an update are written to the destination, if it is more
 * than a copy. patch.c finds the ops that a delta can update, convert.c gathers cells of a tensor
 * and quantises or dequantises them, prequantised.c has them quantised before they are sent, and
 * load.c gives whole tensors to an engine's own load function. */

/* Quantisation before the network. A transform may read floats from another host. Whole cells in
 * one block are requested in quantised form: the source's data server quantises
 * them and sends elements and scales, which are half or a quarter of the bytes, and the route of
 * data servers writes them to their place. Cells whose elements are in several sources or blocks,
 * and cells that are too large for an answer, are gathered as floats (convert.c). */
#pragma once

#include "weights/server/pull.h"
#include "weights/transfer/transfer.h"

enum {
    DRAY__PREQUANTISED_PARTS = 1 + DRAY__RECT_SIDES,
    DRAY__PREQUANTISED_CELL = 64 << 10 /* the most bytes of a cell on the network */
};
/* With a bucket of this size, an answer of the route has room for any such cell, however many
 * routes there are. */
#define DRAY__PREQUANTISED_BUCKET ((uint64_t)4 << 20)

/* Cuts the whole cells of one block out of a read of a QUANTISE. Returns the number of parts. */
uint32_t dray__prequantised_cut(const dray__sources *sources, const dray_transform *transform,
                                uint64_t host, const dray__op *op,
                                dray__op out[DRAY__PREQUANTISED_PARTS]);
/* Returns true when the route of data servers carries out this op of a transform. */
bool dray__prequantised(const dray__transfer *transfer, const dray__op *op);
/* Returns the cells of the op's transform in a rectangle of whole cells. */
dray__rect dray__prequantised_cells(const dray__transfer *transfer, const dray__op *op,
                                    const dray__rect *rect);
/* Returns the elements of cells, cut off at the end of the op. */
dray__rect dray__prequantised_elements(const dray__transfer *transfer, const dray__op *op,
                                       const dray__rect *cells);
dray__pull_quant dray__prequantised_quant(const dray__transfer *transfer, const dray__op *op);
/* Return the bytes on the network of a rectangle of whole cells, and of each of its cells. */
uint64_t dray__prequantised_bytes(const dray__transfer *transfer, const dray__op *op,
                                  const dray__rect *rect);
uint64_t dray__prequantised_cell_bytes(const dray__transfer *transfer, const dray__op *op);
/* Returns the block of the destination that holds all quantised elements of a rectangle. Returns
 * false when there is no such block. */
bool dray__prequantised_block(const dray__transfer *transfer, const dray__op *op,
                              const dray__rect *rect, uint32_t *block);
/* Returns true when this rank's blocks have every element and scale of the op's rectangle once, so
 * that changes of them can be applied. */
bool dray__prequantised_is_here(const dray__transfer *transfer, const dray__op *op);
/* Reads what this rank's blocks have now of a rectangle of whole cells, to offset `at` of a region:
 * dense elements, then their scales. */
int dray__prequantised_read(dray__transfer *transfer, const dray__op *op, const dray__rect *rect,
                            dray_region *to, uint64_t at, dray_error *error);
/* Returns the rectangle of all cells that begin in this rectangle, in elements. */
dray__rect dray__prequantised_aligned(const dray__transfer *transfer, const dray__op *op,
                                      const dray__rect *rect);
/* Returns the sum of received data: dense elements, then their scales. */
uint64_t dray__prequantised_sum(const dray__transfer *transfer, const dray__op *op,
                                const dray__rect *rect, const void *data);
/* Writes received data at offset `at` of a region to this rank's blocks, and enters their sums in
 * the books. */
int dray__prequantised_place(dray__transfer *transfer, const dray__op *op, const dray__rect *rect,
                             const dray_region *from, uint64_t at, dray_error *error);

/* A copy to one of this rank's blocks. */
typedef struct dray__placing {
    dray_copy copy;
    uint32_t block;
} dray__placing;
typedef struct dray__placings {
    dray__placing *items;
    uint64_t count, capacity;
} dray__placings;
/* Adds the copies that write received data at offset `at` to this rank's blocks. Returns false when
 * out of memory. */
bool dray__prequantised_copies(const dray__transfer *transfer, const dray__op *op,
                               const dray__rect *rect, uint64_t at, dray__placings *out);

/* Writes a dense box of a part (DRAY__PART_...) of a transform's tensor to the blocks of this rank
 * that hold some of it. The box is in the part's coordinates, and its bytes are at offset `at` of
 * `from`. */
int dray__transform_write(dray__transfer *transfer, const dray_transform *transform, int part,
                          const dray_region *from, const dray__rect *box, uint64_t at,
                          dray_error *error);
