/* The formats of quantised tensors, with the tensors of each. Their arithmetic is that of
 * mover/kernels/formats.h, their names those of the packages that write them (docs/formats.md). */
#include "model/layout/layout.h"

#include <string.h>

enum { ALL = -1, BLOCK = 0 };

static const dray__quant_format formats[] = {
    [DRAY_QUANT_BLOCK] = {"fp8-block",
                          {{NULL, DRAY_DTYPE_NONE, 1, 1}, {"_scale_inv", DRAY_F32, BLOCK, BLOCK}},
                          BLOCK,
                          BLOCK},
    [DRAY_QUANT_TENSOR] = {"fp8-tensor",
                           {{NULL, DRAY_DTYPE_NONE, 1, 1}, {"_scale", DRAY_F32, ALL, ALL}},
                           ALL,
                           ALL},
    [DRAY_QUANT_DEEPGEMM] = {"fp8-deepgemm",
                             {{NULL, DRAY_F8E4M3, 1, 1}, {"_scale_inv", DRAY_U8, 1, BLOCK}},
                             BLOCK,
                             BLOCK},
    [DRAY_QUANT_MXFP8] = {"mxfp8", {{NULL, DRAY_F8E4M3, 1, 1}, {"_scale", DRAY_U8, 1, 32}}, 1, 32},
    [DRAY_QUANT_MXFP4] = {"mxfp4", {{"_packed", DRAY_U8, 1, 2}, {"_scale", DRAY_U8, 1, 32}}, 1, 32},
    [DRAY_QUANT_NVFP4] = {"nvfp4",
                          {{"_packed", DRAY_U8, 1, 2},
                           {"_scale", DRAY_F8E4M3, 1, 16},
                           {"_global_scale", DRAY_F32, ALL, ALL}},
                          1,
                          16},
    [DRAY_QUANT_INT4] = {"int4",
                         {{"_packed", DRAY_I32, 1, 8}, {"_scale", DRAY_DTYPE_NONE, 1, BLOCK}},
                         1,
                         BLOCK},
    [DRAY_QUANT_INT4_ZERO] = {"int4-zero",
                              {{"_packed", DRAY_I32, 1, 8},
                               {"_scale", DRAY_DTYPE_NONE, 1, BLOCK},
                               {"_zero_point", DRAY_I32, 8, BLOCK}},
                              8,
                              BLOCK},
};

enum { COUNT = sizeof formats / sizeof *formats };

const dray__quant_format *dray__quant_format_of(int32_t kind)
{
    return kind > DRAY_QUANT_NONE && kind < COUNT ? &formats[kind] : NULL;
}

bool dray__quant_is_packed(const dray_quant *quant)
{
    const dray__quant_format *format = dray__quant_format_of(quant->kind);
    return format && format->parts[DRAY__PART_VALUES].suffix;
}

bool dray__layout_name_only(const dray_layout *layout, uint32_t tensor)
{
    const dray_quant *quant = dray_layout_quant(layout, tensor);
    return quant && dray__quant_is_packed(quant);
}

/* Gets the cell of a size in rows and columns, which are the last two dimensions; it is 1 along the
 * others. */
static void cell_of(const dray_tensor_info *tensor, const dray_quant *quant, const int32_t size[2],
                    int64_t *cell)
{
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        bool used = d < tensor->ndim, matrix = used && d + 2 >= tensor->ndim;
        int32_t n = matrix ? size[d + 2 - tensor->ndim] : size[0] == ALL ? ALL : 1;
        int64_t all = used && tensor->shape[d] ? tensor->shape[d] : 1;
        cell[d] = n == ALL ? all : n == BLOCK && matrix ? quant->block[d + 2 - tensor->ndim] : n;
    }
}

void dray__quant_cell(const dray_tensor_info *tensor, const dray_quant *quant, int64_t *cell)
{
    const dray__quant_format *format = dray__quant_format_of(quant->kind);
    cell_of(tensor, quant, (const int32_t[2]){format->rows, format->columns}, cell);
}

bool dray__quant_part_cell(const dray_tensor_info *tensor, const dray_quant *quant, int part,
                           int64_t cell[DRAY_MAX_DIMS])
{
    const struct dray__quant_part *of = &dray__quant_format_of(quant->kind)->parts[part];
    if (part != DRAY__PART_VALUES && !of->suffix)
        return false;
    cell_of(tensor, quant, (const int32_t[2]){of->rows, of->columns}, cell);
    return true;
}

bool dray__quant_part(const dray_layout *layout, uint32_t tensor, int part, uint32_t *index,
                      int64_t cell[DRAY_MAX_DIMS])
{
    const dray_quant *quant = dray_layout_quant(layout, tensor);
    if (!quant || !dray__quant_part_cell(dray_layout_tensor(layout, tensor), quant, part, cell))
        return false;
    const uint32_t tensors[] = {quant->values, quant->scales, quant->second};
    *index = tensors[part];
    return true;
}

int32_t dray__quant_as(const dray_layout *layout, uint32_t tensor)
{
    const dray_quant *quant = dray_layout_quant(layout, tensor);
    if (!quant || quant->kind < DRAY_QUANT_NVFP4)
        return DRAY_DTYPE_NONE;
    bool own = quant->kind == DRAY_QUANT_NVFP4;
    return dray_layout_tensor(layout, own ? tensor : quant->scales)->dtype;
}
