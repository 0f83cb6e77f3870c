/* How tensors of a layout are quantised. */
#include "model/layout/layout.h"

#include "base/error.h"

#include <inttypes.h>
#include <string.h>

static const char *const PARTS[DRAY__QUANT_PARTS] = {"values", "scales", "second scales"};

/* The most elements of a group. */
enum { MOST_GROUP = 256 };

static bool is_made_of(int32_t dtype)
{
    return dtype == DRAY_F32 || dtype == DRAY_BF16 || dtype == DRAY_F16;
}

/* Checks a part's shape. It is the tensor's with the last two sizes divided by the cell; when one
 * element covers the whole tensor, it is any shape of one element. */
static int check_part(const dray_layout *layout, const dray_tensor_info *tensor,
                      const dray_quant *quant, int part, uint32_t index, dray_error *error)
{
    const dray_tensor_info *found = dray_layout_tensor(layout, index);
    const struct dray__quant_part *of = &dray__quant_format_of(quant->kind)->parts[part];
    int64_t cell[DRAY_MAX_DIMS], shape[DRAY_MAX_DIMS] = {0};
    char want[DRAY__SHAPE_TEXT], have[DRAY__SHAPE_TEXT];
    dray__quant_part_cell(tensor, quant, part, cell);
    uint32_t ndim = of->rows < 0 ? found->ndim : tensor->ndim;
    bool fits = ndim == found->ndim;
    for (uint32_t d = 0; d < ndim; d++) {
        shape[d] = 1;
        if (of->rows >= 0)
            shape[d] = tensor->shape[d] / cell[d] + (tensor->shape[d] % cell[d] != 0);
        fits = fits && found->shape[d] == shape[d];
    }
    if (!fits)
        return dray__fail(
            error, DRAY_EINVALID, "tensor %.160s: its %s %.160s have shape %s, %s expected",
            tensor->name, PARTS[part], found->name,
            dray__shape_text(found->ndim, found->shape, have), dray__shape_text(ndim, shape, want));
    if (of->dtype == DRAY_DTYPE_NONE ? !is_made_of(found->dtype) : found->dtype != of->dtype)
        return dray__fail(error, DRAY_EINVALID, "tensor %.160s: its %s %.160s are %s, %s expected",
                          tensor->name, PARTS[part], found->name,
                          dray_dtype_name((dray_dtype)found->dtype),
                          of->dtype == DRAY_DTYPE_NONE ? "F32, BF16 or F16"
                                                       : dray_dtype_name((dray_dtype)of->dtype));
    return DRAY_OK;
}

static int check_tensor(const dray_layout *layout, uint32_t index, const dray_quant *quant,
                        dray_error *error)
{
    const dray_tensor_info *tensor = dray_layout_tensor(layout, index);
    bool packed = dray__quant_is_packed(quant);
    bool any = quant->kind == DRAY_QUANT_BLOCK || quant->kind == DRAY_QUANT_TENSOR;
    if (any && quant->scale_format != DRAY_SCALE_F32 && quant->scale_format != DRAY_SCALE_UE8M0)
        return dray__fail(error, DRAY_EINVALID, "tensor %.200s: scale format %d is unknown",
                          tensor->name, quant->scale_format);
    if (packed ? !is_made_of(tensor->dtype)
               : tensor->dtype != DRAY_F8E4M3 && (!any || tensor->dtype != DRAY_F8E5M2))
        return dray__fail(error, DRAY_EINVALID, "tensor %.200s is %s: quantised ones are %s",
                          tensor->name, dray_dtype_name((dray_dtype)tensor->dtype),
                          packed ? "F32, BF16 or F16 where they are packed into another one"
                          : any  ? "F8_E4M3 or F8_E5M2"
                                 : "F8_E4M3");
    if (packed && dray__layout_first_block(layout, index))
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %.200s has blocks, and its elements are packed into another one",
                          tensor->name);
    return DRAY_OK;
}

static int check_cells(const dray_tensor_info *tensor, const dray_quant *quant, dray_error *error)
{
    const dray__quant_format *format = dray__quant_format_of(quant->kind);
    bool groups = format->columns == 0 && format->parts[DRAY__PART_VALUES].suffix;
    if (format->rows < 0)
        return DRAY_OK;
    if (tensor->ndim < 2 ||
        (format->columns == 0 && (quant->block[0] <= 0 || quant->block[1] <= 0)))
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %.200s: blocks of %" PRId64 " x %" PRId64
                          " do not cut %u dimensions: two or more, and sizes > 0, expected",
                          tensor->name, quant->block[0], quant->block[1], tensor->ndim);
    if (groups && (quant->block[0] != 1 || quant->block[1] % 8 || quant->block[1] > MOST_GROUP))
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %.200s: groups of %" PRId64 " x %" PRId64
                          ": 1 x a multiple of 8 up to %d expected",
                          tensor->name, quant->block[0], quant->block[1], MOST_GROUP);
    int64_t columns = format->columns ? format->columns : groups ? quant->block[1] : 1;
    if (quant->kind >= DRAY_QUANT_MXFP8 && tensor->shape[tensor->ndim - 1] % columns)
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %.200s: rows of %" PRId64 " elements are not whole groups of "
                          "%" PRId64,
                          tensor->name, tensor->shape[tensor->ndim - 1], columns);
    return DRAY_OK;
}

/* Checks a part that is a tensor of its own. */
static int check_own(const dray_layout *layout, uint32_t index, int part, uint32_t own,
                     dray_error *error)
{
    const dray_tensor_info *tensor = dray_layout_tensor(layout, index);
    const dray_tensor_info *found = dray_layout_tensor(layout, own);
    uint32_t other;
    int as;
    if (!found || found->alias_of >= 0 || dray_layout_quant(layout, own) || own == index)
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %.200s: its %s (tensor %u) are no tensor, an alias, or "
                          "quantised themselves",
                          tensor->name, PARTS[part], own);
    if (dray__layout_part_of(layout, own, &other, &as) && (other != index || as != part))
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %.160s: its %s %.160s are %s of %.160s already", tensor->name,
                          PARTS[part], found->name, PARTS[as],
                          dray_layout_tensor(layout, other)->name);
    return DRAY_OK;
}

static int check_quant(const dray_layout *layout, uint32_t index, const dray_quant *quant,
                       dray_error *error)
{
    const dray_tensor_info *tensor = dray_layout_tensor(layout, index);
    const dray__quant_format *format = dray__quant_format_of(quant->kind);
    const uint32_t tensors[] = {quant->values, quant->scales, quant->second};
    if (!format)
        return dray__fail(error, DRAY_EINVALID, "tensor %.200s: quant kind %d is unknown",
                          tensor->name, quant->kind);
    int status = check_tensor(layout, index, quant, error);
    if (!status)
        status = check_cells(tensor, quant, error);
    for (int part = 0; part < DRAY__QUANT_PARTS && !status; part++) {
        if (!format->parts[part].suffix)
            continue;
        status = check_own(layout, index, part, tensors[part], error);
        for (int before = 0; before < part && !status; before++)
            if (format->parts[before].suffix && tensors[before] == tensors[part])
                status = dray__fail(error, DRAY_EINVALID,
                                    "tensor %.160s: tensor %u is its %s and its %s", tensor->name,
                                    tensors[part], PARTS[before], PARTS[part]);
        if (!status)
            status = check_part(layout, tensor, quant, part, tensors[part], error);
    }
    const dray_quant *head = NULL;
    if (!status && quant->kind == DRAY_QUANT_NVFP4 && quant->shared != index) {
        head = dray_layout_quant(layout, quant->shared);
        if (!head || quant->shared > index || head->kind != DRAY_QUANT_NVFP4 ||
            head->shared != quant->shared)
            status = dray__fail(error, DRAY_EINVALID,
                                "tensor %.200s: it shares the global scale of tensor %u, which is "
                                "no NVFP4 tensor before it that names itself",
                                tensor->name, quant->shared);
    }
    return status;
}

int dray_layout_set_quant(dray_layout *layout, uint32_t tensor, const dray_quant *quant,
                          dray_error *error)
{
    const dray_tensor_info *info = dray_layout_tensor(layout, tensor);
    uint32_t other;
    int part;
    if (!info || info->alias_of >= 0 ||
        (dray__layout_part_of(layout, tensor, &other, &part) && other != tensor))
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
    const dray__quant_format *format = dray__quant_format_of(quant->kind);
    dray_quant copy = *quant;
    bool any = copy.kind == DRAY_QUANT_BLOCK || copy.kind == DRAY_QUANT_TENSOR;
    if (format->columns != 0)
        memset(copy.block, 0, sizeof copy.block);
    copy.scale_format = any ? copy.scale_format : DRAY_SCALE_F32;
    copy.values = format->parts[DRAY__PART_VALUES].suffix ? copy.values : tensor;
    copy.second = format->parts[DRAY__PART_SECOND].suffix ? copy.second : 0;
    copy.shared = copy.kind == DRAY_QUANT_NVFP4 ? copy.shared : tensor;
    return dray__layout_put_quant(layout, tensor, &copy) ? DRAY_OK : dray__nomem(error);
}
