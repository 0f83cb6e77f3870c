/* Rectangles that a data server quantises before it sends them: the elements, dense, then the
 * scales of their cells, both in C order. */
#pragma once

#include "weights/server/pull.h"

/* Of a rectangle of whole cells: bytes in an answer. */
uint64_t dray__pull_quant_bytes(const dray__pull_quant *quant, const dray__rect *rect);
/* The sum of such an answer: of the elements and, in their own coordinates, of the scales. */
uint64_t dray__pull_quant_sum(const dray_tensor_info *tensor, const dray__pull_quant *quant,
                              const dray__rect *rect, const void *data);
void dray__pull_put_quant(dray__writer *w, const dray__pull_quant *quant, uint32_t ndim);
/* DRAY_EINVALID: the rectangle, which lies in the tensor, is not whole cells, or its elements
 * cannot be quantised so. */
int dray__pull_get_quant(dray__reader *in, const dray_tensor_info *tensor, const dray__rect *rect,
                         int32_t dtype, dray__pull_quant *out, dray_error *error);
/* Of what is quantised already and was brought by an update: the copy of the scales that belong to
 * the rectangle of the layout's tensor, to `at` of the answer's data. DRAY_EINVALID: not whole
 * cells, or others than the tensor has, or no block has all of the scales. */
int dray__pull_get_held(dray__reader *in, const dray_layout *layout, uint32_t tensor,
                        const dray__rect *rect, int32_t dtype, uint64_t at, dray__pull_quant *out,
                        dray_copy *scales, dray_error *error);
/* Quantises what the copy reads into staging, at the copy's destination offset. *scratch is made
 * when it is first needed, the caller's. sum: of what is sent; NULL: no sums are wanted. */
int dray__pull_quantise(const dray_layout *layout, const dray_region *region, dray_region **scratch,
                        const dray_copy *copy, const dray__pull_quant *quant, dray_region *staging,
                        uint64_t *source_sum, uint64_t *sum, dray_error *error);
