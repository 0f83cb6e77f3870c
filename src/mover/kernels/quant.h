/* Quantisation with scales, of dense boxes in memory.
 *
 * The arithmetic of FP8 in blocks, in f32 and rounded to nearest even after every step:
 *
 *     amax  = the largest |x| among the elements that share a scale (a NaN is the largest)
 *     scale = max(amax, 1e-4) / largest       largest: 448 for F8E4M3, 57344 for F8E5M2
 *     scale = the least power of two >= scale, its exponent in 1..254 as bits    (UE8M0 alone)
 *     q     = narrow(x * (1 / scale))         narrowed as kernels.h says; a NaN as 0x7F
 *     y     = narrow(widen(q) * scale)        the way back
 *
 * It is that of DeepGEMM's per_block_cast_to_fp8 (deep_gemm/utils/math.py at 38939a4), which SGLang
 * and vLLM have too, and with which DeepSeek-V3's weights are read back (inference/kernel.py at
 * 0623163: y = q * s). slime's blockwise_cast_to_fp8_triton (slime/utils/fp8_kernel.py at fe5eb23)
 * differs in blocks whose amax is below 1e-4 (its minimum is 1e-10) or NaN (it gives them the
 * scale 1). DeepSeek's own weight_quant divides by the scale: other bits in rare ties. */
#pragma once

#include <dray/model.h>
#include <stdbool.h>

/* A dense box (C order) of a tensor, and how its elements share scales. */
typedef struct dray__quant_box {
    int32_t dtype;                 /* of the floats: F32, BF16, F16 */
    int32_t quant_dtype;           /* F8E4M3, F8E5M2 */
    int64_t start[DRAY_MAX_DIMS];  /* global coordinates */
    int64_t extent[DRAY_MAX_DIMS]; /* unused dimensions: 1 */
    int64_t cell[DRAY_MAX_DIMS];   /* elements that share a scale, counted from the origin */
    int32_t kind;                  /* dray_quant_kind, for formats other than FP8 in blocks */
    int32_t as; /* NVFP4, INT4...: the dtype in which the scales are computed (F32, BF16, F16) */
} dray__quant_box;

/* Can floats of this dtype be quantised to the other, and back? */
bool dray__quant_known(int32_t dtype, int32_t quant_dtype);

/* Gives the start and extent of the cells that a box touches, in the scales' coordinates. Returns
 * their number. */
uint64_t dray__quant_cells(const dray__quant_box *box, int64_t *start, int64_t *extent);

/* Raises amax[i] of every cell that the box touches, in C order of dray__quant_cells, to its
 * largest |x|. amax holds the bits of |x| in the box's dtype, 0 at first. */
void dray__quant_most(const dray__quant_box *box, const void *values, uint32_t *amax);
/* Returns the scale of a cell. scale_format: dray_scale_format. */
float dray__quant_scale(const dray__quant_box *box, uint32_t amax, int32_t scale_format);
/* scales: one for each cell, in the order of amax. quantised: a dense box of the same extent. */
void dray__quantise(const dray__quant_box *box, const void *values, const float *scales,
                    uint8_t *quantised);
void dray__dequantise(const dray__quant_box *box, const uint8_t *quantised, const float *scales,
                      void *values);

/* ---- formats.c: kinds from MXFP8 on (model/layout/formats.c), with the arithmetic of
 * mover/kernels/formats.h. Boxes are whole cells. */

bool dray__format_known(int32_t dtype, int32_t kind);
/* Returns NVFP4's global scale, as bits. most: bits of f32 of the largest |x|. */
uint32_t dray__format_global(uint32_t most, int32_t as);
/* Returns amax of one cell (dray__quant_most) as the bits of an f32. */
uint32_t dray__format_most(int32_t dtype, uint32_t amax);
/* parts: the box's share of each stored part, dense, in C order of the part's own coordinates.
 * Entries for parts that the kind does not have, and for NVFP4's global scale, are ignored. */
void dray__format_quantise(const dray__quant_box *box, const void *values, uint32_t global,
                           void *const parts[3]);
