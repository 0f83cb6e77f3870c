/* Rectangles that a data server quantises before it sends them: the elements, dense, then the
 * scales of their cells, both in C order. Each is filled up to a multiple of DRAY__PULL_QUANT_ALIGN
 * bytes, so that a GPU can write the next one in whole words: with zeros, or over NCCL with any
 * bytes. */
#pragma once

#include "mover/cuda/cuda.h"
#include "weights/delta/delta.h"
#include "weights/server/pull.h"

enum { DRAY__PULL_QUANT_ALIGN = 16 };

/* Returns the bytes of a cell of FP8 with its scale. */
uint64_t dray__pull_quant_cell(const dray__pull_quant *quant);
/* Returns the offset of the scales behind the rectangle's first element. */
uint64_t dray__pull_quant_scales_at(const dray__rect *rect);
/* Returns the bytes of a rectangle of whole cells in an answer. */
uint64_t dray__pull_quant_bytes(const dray__pull_quant *quant, const dray__rect *rect);
/* Returns the sum of such an answer: of the elements, and of the scales in their own coordinates.
 */
uint64_t dray__pull_quant_sum(const dray_tensor_info *tensor, const dray__pull_quant *quant,
                              const dray__rect *rect, const void *data);
void dray__pull_put_quant(dray__writer *w, const dray__pull_quant *quant, uint32_t ndim);
/* Fails with DRAY_EINVALID when the rectangle, which must be inside the tensor, is not whole cells,
 * or its elements cannot be quantised in this way. */
int dray__pull_get_quant(dray__reader *in, const dray_tensor_info *tensor, const dray__rect *rect,
                         int32_t dtype, dray__pull_quant *out, dray_error *error);
/* For a tensor that an update has received in quantised form: returns the copy of the rectangle's
 * scales to offset `at` of the answer's data. Fails with DRAY_EINVALID when the rectangle is not
 * whole cells, when the cells are not the tensor's, or when no block has all of the scales. */
int dray__pull_get_held(dray__reader *in, const dray_layout *layout, uint32_t tensor,
                        const dray__rect *rect, int32_t dtype, uint64_t at, dray__pull_quant *out,
                        dray_copy *scales, dray_error *error);
/* Writes the zeros behind the elements and the scales of a rectangle in an answer. */
void dray__pull_quant_fill(const dray__pull_quant *quant, const dray__rect *rect, uint8_t *data);
/* Returns the work of a GPU that quantises the elements that the copy reads at `source`, the
 * address of its region, to the copy's place at `slot`. */
dray__cuda_quant dray__pull_quant_work(const dray_copy *copy, const dray__pull_quant *quant,
                                       uint64_t source, uint64_t slot);
/* Quantises the elements that the copy reads, and writes them to staging at the copy's destination
 * offset. *scratch is made when it is first needed, and freed by the caller. sum: of the result;
 * NULL: no sums are computed. */
int dray__pull_quantise(const dray_layout *layout, const dray_region *region, dray_region **scratch,
                        const dray_copy *copy, const dray__pull_quant *quant, dray_region *staging,
                        uint64_t *source_sum, uint64_t *sum, dray_error *error);
/* Call after dray__pull_quantise for the same copy: writes the changes of elements and scales since
 * the delta's base. Returns their bytes; 0 when they would be `limit` bytes or more, or are not
 * known (dray__delta_undo). The changes: u32 bytes of those of the elements; these; those of the
 * scales (both as in delta.h).
 *
 * What changes in quantised form is not what changes in floats: most changes are smaller than a
 * code, and a new scale changes all codes of its cell. So the floats are taken back to the version
 * before and quantised again. */
size_t dray__pull_quant_changes(dray__delta_coder *coder, const dray__delta_view *view,
                                uint32_t block, const dray_region *scratch, const dray_copy *copy,
                                const dray__pull_quant *quant, const dray_region *staging,
                                uint8_t *out, size_t limit);
/* Applies such changes at `base`. elements, scales: their places, as for dray__delta_decode. Fails
 * with DRAY_EFORMAT; elements may have been written then. */
int dray__pull_quant_apply(dray__delta_coder *coder, const uint8_t *data, size_t size,
                           const dray_copy *elements, const dray_copy *scales, void *base,
                           dray_error *error);
