#include "weights/placements/prequantised.h"

#include "base/array.h"
#include "model/layout/layout.h"
#include "mover/mover.h"
#include "weights/server/pull_quant.h"

#include <string.h>

/* ---- cutting --------------------------------------------------------------------------------- */

/* Gives the elements of the cells that are entirely in the rectangle. Returns false when there are
 * none. */
static bool whole_cells(const dray_transform *t, const dray_tensor_info *tensor,
                        const dray__rect *rect, dray__rect *out)
{
    dray__rect all = {.extent = {1, 1, 1, 1}}, cells;
    memcpy(all.extent, tensor->shape, tensor->ndim * sizeof *all.extent);
    if (!dray__cells_inside(t->cell, &all, rect, &cells))
        return false;
    *out = dray__cells_elements(t->cell, &all, &cells);
    return true;
}

static uint64_t cell_bytes(const dray_transform *t, const dray_tensor_info *tensor)
{
    uint64_t elements = 1;
    for (uint32_t d = 0; d < tensor->ndim; d++) {
        int64_t most = t->cell[d] < tensor->shape[d] ? t->cell[d] : tensor->shape[d];
        if (__builtin_mul_overflow(elements, (uint64_t)most, &elements))
            return UINT64_MAX;
    }
    return elements > DRAY__PREQUANTISED_CELL ? UINT64_MAX : elements + sizeof(float);
}

/* Finds whole cells that the op reads from one block. */
static bool find_part(const dray__sources *s, const dray_transform *t, const dray__op *op,
                      dray__rect *out)
{
    const dray_layout *layout = s->sources[op->copy.source].layout;
    dray__rect whole = dray__copy_rect(&op->copy);
    uint32_t tensor;
    if (dray_layout_find(layout, s->names[t->tensor], &tensor, NULL))
        return false;
    const dray_tensor_info *info = dray_layout_tensor(layout, tensor);
    if (cell_bytes(t, info) > DRAY__PREQUANTISED_CELL)
        return false;
    dray__blocks held = dray__blocks_of(layout, tensor, &whole);
    while (dray__blocks_next(&held))
        if (dray__copy_reads(&op->copy, held.block, &held.cross) &&
            whole_cells(t, info, &held.cross, out))
            return true;
    return false;
}

static dray__op part_of(const dray__op *op, const dray__rect *rect)
{
    dray__op part = *op;
    part.copy = dray__copy_cut(&op->copy, rect);
    return part;
}

uint32_t dray__prequantised_cut(const dray__sources *s, const dray_transform *t, uint64_t host,
                                const dray__op *op, dray__op out[DRAY__PREQUANTISED_PARTS])
{
    dray__rect whole = dray__copy_rect(&op->copy), part, sides[DRAY__RECT_SIDES];
    out[0] = *op;
    if (t->kind != DRAY_TRANSFORM_QUANTISE || t->quant_kind > DRAY_QUANT_TENSOR || op->scales ||
        !dray__source_remote(&s->sources[op->copy.source], op->copy.source_region, host) ||
        !find_part(s, t, op, &part))
        return 1;
    out[0] = part_of(op, &part);
    out[0].prequantised = true;
    uint32_t count = dray__rect_rest(&whole, &part, sides);
    for (uint32_t i = 0; i < count; i++)
        out[i + 1] = part_of(op, &sides[i]);
    return count + 1;
}

/* ---- a prequantised op ----------------------------------------------------------------------- */

static const dray_transform *transform_of(const dray__transfer *h, const dray__op *op)
{
    return &dray_plan_transforms(h->sources->plan)[op->transform - 1];
}

bool dray__prequantised(const dray__transfer *h, const dray__op *op)
{
    const dray__source *source = &h->sources->sources[op->copy.source];
    return op->prequantised && !source->staged &&
           h->options.bucket_bytes >= DRAY__PREQUANTISED_BUCKET &&
           dray__source_remote(source, op->copy.source_region, h->destination->host);
}

dray__rect dray__prequantised_cells(const dray__transfer *h, const dray__op *op,
                                    const dray__rect *rect)
{
    return dray__cells_touched(transform_of(h, op)->cell, rect);
}

dray__rect dray__prequantised_elements(const dray__transfer *h, const dray__op *op,
                                       const dray__rect *cells)
{
    dray__rect whole = dray__copy_rect(&op->copy);
    return dray__cells_elements(transform_of(h, op)->cell, &whole, cells);
}

dray__pull_quant dray__prequantised_quant(const dray__transfer *h, const dray__op *op)
{
    const dray_transform *t = transform_of(h, op);
    dray__pull_quant quant = {.dtype = t->quant_dtype, .scale_format = t->scale_format};
    memcpy(quant.cell, t->cell, sizeof quant.cell);
    return quant;
}

uint64_t dray__prequantised_bytes(const dray__transfer *h, const dray__op *op,
                                  const dray__rect *rect)
{
    dray__pull_quant quant = dray__prequantised_quant(h, op);
    return dray__pull_quant_bytes(&quant, rect);
}

uint64_t dray__prequantised_cell_bytes(const dray__transfer *h, const dray__op *op)
{
    return cell_bytes(transform_of(h, op),
                      dray_layout_tensor(h->destination->layout, op->copy.tensor));
}

uint64_t dray__prequantised_sum(const dray__transfer *h, const dray__op *op, const dray__rect *rect,
                                const void *data)
{
    dray__pull_quant quant = dray__prequantised_quant(h, op);
    return dray__pull_quant_sum(dray__transfer_tensor(h, &op->copy), &quant, rect, data);
}

bool dray__prequantised_block(const dray__transfer *h, const dray__op *op, const dray__rect *rect,
                              uint32_t *block)
{
    const dray_transform *t = transform_of(h, op);
    const dray_copy *writes = dray_plan_writes(h->sources->plan);
    for (uint64_t w = t->first_write; w < t->first_write + t->writes; w++) {
        dray__rect held = dray__copy_rect(&writes[w]), cross;
        if (writes[w].tensor != t->tensor || !dray__rect_cross(&held, rect, &cross) ||
            dray__rect_elements(&cross) != dray__rect_elements(rect))
            continue;
        *block = h->sources->write_blocks[w];
        return true;
    }
    return false;
}

dray__rect dray__prequantised_aligned(const dray__transfer *h, const dray__op *op,
                                      const dray__rect *rect)
{
    const dray_transform *t = transform_of(h, op);
    dray__rect out;
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        int64_t cell = t->cell[d], end = rect->start[d] + rect->extent[d];
        out.start[d] = (rect->start[d] + cell - 1) / cell * cell;
        out.extent[d] = (end + cell - 1) / cell * cell - out.start[d];
    }
    return out;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* Returns the part of a quantised tensor that a write is for; for floats, values. */
static int part_of_write(const dray__transfer *h, const dray_copy *write)
{
    uint32_t tensor;
    int part;
    return dray__layout_part_of(h->destination->layout, write->tensor, &tensor, &part)
               ? part
               : DRAY__PART_VALUES;
}

/* Gives the copy of what write w takes of a dense box of a part at offset `at`. Returns false when
 * it takes nothing. */
static bool copy_of_write(const dray__transfer *h, uint64_t w, int part, const dray__rect *box,
                          uint64_t at, dray_copy *out)
{
    const dray_copy *write = &dray_plan_writes(h->sources->plan)[w];
    dray__rect held = dray__copy_rect(write), cross;
    if (part_of_write(h, write) != part || !dray__rect_cross(&held, box, &cross))
        return false;
    *out = dray__copy_cut(write, &cross);
    dray__copy_from_box(out, box, out->destination_dtype, at);
    return true;
}

int dray__transform_write(dray__transfer *h, const dray_transform *t, int part,
                          const dray_region *from, const dray__rect *box, uint64_t at,
                          dray_error *error)
{
    bool verify = h->options.verify;
    for (uint64_t w = t->first_write; w < t->first_write + t->writes; w++) {
        dray_copy copy;
        if (!copy_of_write(h, w, part, box, at, &copy))
            continue;
        dray_region *region = h->destination->regions[copy.destination_region];
        dray__move_options options = {.layout = h->destination->layout};
        int rc = dray__move_all(from, region, &copy, 1, &options, error);
        if (rc)
            return rc;
        h->bytes += dray__copy_bytes(&copy);
        if (!verify)
            continue;
        uint32_t block = h->sources->write_blocks[w];
        dray_copy made = copy; /* its source is the place where it was computed */
        made.destination_offset = copy.source_offset;
        memcpy(made.destination_stride, copy.source_stride, sizeof made.destination_stride);
        uint64_t expected, found;
        dray__transfer_read_back(h, from, &made, 1, &expected);
        dray__transfer_read_back(h, region, &copy, 1, &found);
        h->expected[block] += expected;
        h->found[block] += found;
    }
    return DRAY_OK;
}

int dray__prequantised_place(dray__transfer *h, const dray__op *op, const dray__rect *rect,
                             const dray_region *from, uint64_t at, dray_error *error)
{
    const dray_transform *t = transform_of(h, op);
    dray__rect cells = dray__prequantised_cells(h, op, rect);
    int rc = dray__transform_write(h, t, DRAY__PART_VALUES, from, rect, at, error);
    return rc ? rc
              : dray__transform_write(h, t, DRAY__PART_SCALES, from, &cells,
                                      at + dray__pull_quant_scales_at(rect), error);
}

bool dray__prequantised_copies(const dray__transfer *h, const dray__op *op, const dray__rect *rect,
                               uint64_t at, dray__placings *out)
{
    const dray_transform *t = transform_of(h, op);
    dray__rect boxes[] = {*rect, dray__prequantised_cells(h, op, rect)};
    uint64_t places[] = {at, at + dray__pull_quant_scales_at(rect)};
    static const int parts[] = {DRAY__PART_VALUES, DRAY__PART_SCALES};
    for (uint64_t w = t->first_write; w < t->first_write + t->writes; w++)
        for (int i = 0; i < 2; i++) {
            dray__placing made = {.block = h->sources->write_blocks[w]};
            if (copy_of_write(h, w, parts[i], &boxes[i], places[i], &made.copy) &&
                !DRAY__PUSH(out->items, out->count, out->capacity, made))
                return false;
        }
    return true;
}

/* ---- reading --------------------------------------------------------------------------------- */

static uint64_t count_here(const dray__transfer *h, const dray_transform *t, int part,
                           const dray__rect *box)
{
    const dray_copy *writes = dray_plan_writes(h->sources->plan);
    uint64_t count = 0;
    for (uint64_t w = t->first_write; w < t->first_write + t->writes; w++) {
        dray__rect held = dray__copy_rect(&writes[w]), cross;
        if (part_of_write(h, &writes[w]) == part && dray__rect_cross(&held, box, &cross))
            count += dray__rect_elements(&cross);
    }
    return count;
}

bool dray__prequantised_is_here(const dray__transfer *h, const dray__op *op)
{
    const dray_transform *t = transform_of(h, op);
    dray__rect rect = dray__copy_rect(&op->copy), cells = dray__prequantised_cells(h, op, &rect);
    return count_here(h, t, DRAY__PART_VALUES, &rect) == dray__rect_elements(&rect) &&
           count_here(h, t, DRAY__PART_SCALES, &cells) == dray__rect_elements(&cells);
}

static int read_part(dray__transfer *h, const dray_transform *t, int part, const dray__rect *box,
                     dray_region *to, uint64_t at, dray_error *error)
{
    const dray_copy *writes = dray_plan_writes(h->sources->plan);
    int rc = DRAY_OK;
    for (uint64_t w = t->first_write; w < t->first_write + t->writes && !rc; w++) {
        dray__rect held = dray__copy_rect(&writes[w]), cross;
        if (part_of_write(h, &writes[w]) != part || !dray__rect_cross(&held, box, &cross))
            continue;
        dray_copy write = dray__copy_cut(&writes[w], &cross), copy = write;
        dray__copy_from_box(&write, box, write.destination_dtype, at);
        copy.source_dtype = write.destination_dtype;
        copy.source_region = write.destination_region;
        copy.source_offset = write.destination_offset;
        memcpy(copy.source_stride, write.destination_stride, sizeof copy.source_stride);
        copy.destination_offset = write.source_offset;
        memcpy(copy.destination_stride, write.source_stride, sizeof copy.destination_stride);
        dray__move_options options = {.layout = h->destination->layout};
        rc = dray__move_all(h->destination->regions[copy.source_region], to, &copy, 1, &options,
                            error);
    }
    return rc;
}

int dray__prequantised_read(dray__transfer *h, const dray__op *op, const dray__rect *rect,
                            dray_region *to, uint64_t at, dray_error *error)
{
    const dray_transform *t = transform_of(h, op);
    dray__rect cells = dray__prequantised_cells(h, op, rect);
    int rc = read_part(h, t, DRAY__PART_VALUES, rect, to, at, error);
    return rc ? rc
              : read_part(h, t, DRAY__PART_SCALES, &cells, to,
                          at + dray__pull_quant_scales_at(rect), error);
}

/* Ops that the source quantises are copied like others. */
static bool takes(const dray__transfer *transfer, const dray__op *op)
{
    (void)transfer;
    return !op->transform || op->prequantised;
}

const dray__placement dray__place_copy = {"copy", takes};
