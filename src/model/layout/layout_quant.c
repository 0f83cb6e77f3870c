/* How tensors of a layout are quantised. */
#include "model/layout/layout.h"

#include "base/error.h"

#include <inttypes.h>
#include <string.h>

void dray__quant_cell(const dray_tensor_info *tensor, const dray_quant *quant, int64_t *cell)
{
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        bool blocked = quant->kind == DRAY_QUANT_BLOCK;
        cell[d] = blocked || d >= tensor->ndim || !tensor->shape[d] ? 1 : tensor->shape[d];
        if (blocked && d < tensor->ndim && d + 2 >= tensor->ndim)
            cell[d] = quant->block[d + 2 - tensor->ndim];
    }
}

static int check_scales(const dray_tensor_info *tensor, const dray_tensor_info *scales,
                        const dray_quant *quant, dray_error *error)
{
    int64_t cell[DRAY_MAX_DIMS], shape[DRAY_MAX_DIMS] = {0};
    char want[DRAY__SHAPE_TEXT], found[DRAY__SHAPE_TEXT];
    dray__quant_cell(tensor, quant, cell);
    uint32_t ndim = quant->kind == DRAY_QUANT_BLOCK ? tensor->ndim : scales->ndim;
    bool fits = ndim == scales->ndim;
    for (uint32_t d = 0; d < ndim; d++) {
        shape[d] = 1;
        if (quant->kind == DRAY_QUANT_BLOCK)
            shape[d] = tensor->shape[d] / cell[d] + (tensor->shape[d] % cell[d] != 0);
        fits = fits && scales->shape[d] == shape[d];
    }
    if (!fits)
        return dray__fail(
            error, DRAY_EINVALID, "tensor %.160s: its scales %.160s have shape %s, %s expected",
            tensor->name, scales->name, dray__shape_text(scales->ndim, scales->shape, found),
            dray__shape_text(ndim, shape, want));
    if (scales->dtype != DRAY_F32)
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %.160s: its scales %.160s are %s, F32 expected", tensor->name,
                          scales->name, dray_dtype_name((dray_dtype)scales->dtype));
    return DRAY_OK;
}

static int check_quant(const dray_layout *layout, uint32_t index, const dray_quant *quant,
                       dray_error *error)
{
    const dray_tensor_info *tensor = dray_layout_tensor(layout, index);
    const dray_tensor_info *scales = dray_layout_tensor(layout, quant->scales);
    uint32_t other;
    if (quant->kind != DRAY_QUANT_BLOCK && quant->kind != DRAY_QUANT_TENSOR)
        return dray__fail(error, DRAY_EINVALID, "tensor %.200s: quant kind %d is unknown",
                          tensor->name, quant->kind);
    if (quant->scale_format != DRAY_SCALE_F32 && quant->scale_format != DRAY_SCALE_UE8M0)
        return dray__fail(error, DRAY_EINVALID, "tensor %.200s: scale format %d is unknown",
                          tensor->name, quant->scale_format);
    if (tensor->dtype != DRAY_F8E4M3 && tensor->dtype != DRAY_F8E5M2)
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %.200s is %s: quantised ones are F8_E4M3 or F8_E5M2",
                          tensor->name, dray_dtype_name((dray_dtype)tensor->dtype));
    if (quant->kind == DRAY_QUANT_BLOCK &&
        (tensor->ndim < 2 || quant->block[0] <= 0 || quant->block[1] <= 0))
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %.200s: blocks of %" PRId64 " x %" PRId64
                          " do not cut %u dimensions: two or more, and sizes > 0, expected",
                          tensor->name, quant->block[0], quant->block[1], tensor->ndim);
    if (!scales || scales->alias_of >= 0 || dray_layout_quant(layout, quant->scales))
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %.200s: its scales (tensor %u) are no tensor, an alias, or "
                          "quantised themselves",
                          tensor->name, quant->scales);
    if (dray__layout_scales_of(layout, quant->scales, &other) && other != index)
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %.160s: its scales %.160s are those of %.160s already",
                          tensor->name, scales->name, dray_layout_tensor(layout, other)->name);
    return check_scales(tensor, scales, quant, error);
}

int dray_layout_set_quant(dray_layout *layout, uint32_t tensor, const dray_quant *quant,
                          dray_error *error)
{
    const dray_tensor_info *info = dray_layout_tensor(layout, tensor);
    uint32_t other;
    if (!info || info->alias_of >= 0 || dray__layout_scales_of(layout, tensor, &other))
        return dray__fail(error, DRAY_EINVALID,
                          "quantised tensor %u is none of %u, an alias, or another one's scales",
                          tensor, dray_layout_tensor_count(layout));
    if (quant->kind == DRAY_QUANT_NONE) {
        dray__layout_put_quant(layout, tensor, NULL);
        return DRAY_OK;
    }
    int status = check_quant(layout, tensor, quant, error);
    if (status)
        return status;
    dray_quant copy = *quant;
    if (copy.kind == DRAY_QUANT_TENSOR)
        memset(copy.block, 0, sizeof copy.block);
    return dray__layout_put_quant(layout, tensor, &copy) ? DRAY_OK : dray__nomem(error);
}
