/* Quantisation by GPUs (program.h). Whole cells in one block of one source are read and quantised
 * in place, by the source's GPU if possible. Cells that are spread over several sources or blocks
 * are gathered on the destination's GPU first, through its bucket. Other transforms are left to
 * placements/convert.c. */
#include "base/error.h"
#include "model/layout/layout.h"
#include "mover/kernels/quant.h"
#include "weights/program/compile.h"

#include <stdlib.h>
#include <string.h>

/* A box of whole cells, and the plan's write for each part of its result. */
struct quant_piece {
    const dray_transform *t;
    const dray_copy *writes[DRAY__QUANT_PARTS]; /* NULL when the format has no such part */
    uint32_t blocks[DRAY__QUANT_PARTS];
    dray__rect rect;                     /* elements */
    dray__rect parts[DRAY__QUANT_PARTS]; /* in the parts' own coordinates */
    bool owned, twice, gathered;
};

static bool is_gpu_region(const dray_region *region)
{
    return region && (dray_region_get_kind(region) == DRAY_REGION_CUDA ||
                      dray_region_get_kind(region) == DRAY_REGION_PINNED);
}

static dray__rect all_cells(const dray_transform *t)
{
    dray__rect whole = dray__transform_rect(t);
    return dray__cells_touched(t->cell, &whole);
}

static bool is_groups(const dray_transform *t)
{
    return t->quant_kind >= DRAY_QUANT_MXFP8;
}

static bool is_inside(const dray__rect *outer, const dray__rect *inner)
{
    for (int d = 0; d < DRAY_MAX_DIMS; d++)
        if (inner->start[d] < outer->start[d] ||
            inner->start[d] + inner->extent[d] > outer->start[d] + outer->extent[d])
            return false;
    return true;
}

/* Finds the write that holds all of a part's rectangle. Returns false when there is none in GPU
 * memory. */
static bool find_write(const dray__transfer *h, const dray_transform *t, uint32_t tensor,
                       const dray__rect *rect, const dray_copy **write, uint32_t *block)
{
    const dray_copy *writes = dray_plan_writes(h->sources->plan);
    for (uint64_t w = t->first_write; w < t->first_write + t->writes; w++) {
        dray__rect held = dray__copy_rect(&writes[w]);
        if (writes[w].tensor != tensor || !is_inside(&held, rect) ||
            !is_gpu_region(h->destination->regions[writes[w].destination_region]))
            continue;
        *write = &writes[w];
        *block = h->sources->write_blocks[w];
        return true;
    }
    return false;
}

/* Returns the index of the tensor's last dimension. */
static uint32_t last_dimension(const dray__transfer *h, const dray_transform *t)
{
    uint32_t ndim = dray_layout_tensor(h->destination->layout, t->tensor)->ndim;
    return ndim ? ndim - 1 : 0;
}

/* Fills in the writes for the elements of `rect`. */
static bool find_piece(const dray__transfer *h, const dray__rect *rect, struct quant_piece *p)
{
    const dray_layout *layout = h->destination->layout;
    p->rect = *rect;
    for (int part = 0; part < DRAY__QUANT_PARTS; part++) {
        int64_t cell[DRAY_MAX_DIMS];
        uint32_t tensor;
        p->writes[part] = NULL;
        if (!dray__quant_part(layout, p->t->tensor, part, &tensor, cell) ||
            (part == DRAY__PART_SECOND && p->t->quant_kind == DRAY_QUANT_NVFP4))
            continue; /* a global scale is written by itself */
        p->parts[part] = dray__cells_touched(cell, rect);
        if (!find_write(h, p->t, tensor, &p->parts[part], &p->writes[part], &p->blocks[part]))
            return false;
    }
    return true;
}

/* Returns the next box of cells with their scales in one write: DeepGEMM has scales in columns of
 * four. */
static dray__rect next_cells(const dray__transfer *h, const dray_transform *t,
                             const dray__rect *cells, int64_t done)
{
    const dray_copy *writes = dray_plan_writes(h->sources->plan);
    const dray_quant *quant = dray_layout_quant(h->destination->layout, t->tensor);
    uint32_t last = last_dimension(h, t);
    dray__rect some = *cells;
    some.start[last] += done;
    some.extent[last] -= done;
    if (t->quant_kind != DRAY_QUANT_DEEPGEMM)
        return some;
    for (uint64_t w = t->first_write; w < t->first_write + t->writes; w++) {
        int64_t end = writes[w].start[last] + writes[w].extent[last];
        int64_t left = end - some.start[last];
        if (writes[w].tensor == quant->scales && writes[w].start[last] <= some.start[last] &&
            left > 0 && left < some.extent[last])
            some.extent[last] = left;
    }
    return some;
}

/* Does each box of the transform have one write for each part? */
static bool has_writes(const dray__transfer *h, const dray_transform *t)
{
    dray__rect whole = dray__transform_rect(t), cells = all_cells(t), some;
    uint32_t last = last_dimension(h, t);
    struct quant_piece p = {.t = t};
    if (t->quant_kind == DRAY_QUANT_TENSOR && dray__rect_elements(&cells) != 1)
        return false;
    for (int64_t done = 0; done < cells.extent[last]; done += some.extent[last]) {
        some = next_cells(h, t, &cells, done);
        dray__rect rect = dray__cells_elements(t->cell, &whole, &some);
        if (!find_piece(h, &rect, &p))
            return false;
    }
    return true;
}

/* Can the kernel quantise its groups? */
static bool groups_fit(const dray_layout *layout, const dray_transform *t)
{
    uint32_t ndim = dray_layout_tensor(layout, t->tensor)->ndim;
    int64_t matrices = 1;
    for (uint32_t d = 0; d + 2 < ndim; d++)
        matrices *= t->extent[d];
    bool whole = t->extent[ndim - 2] % t->cell[ndim - 2] == 0;
    return dray__cuda_groups(t->cell[ndim - 1]) && (whole || matrices == 1);
}

static bool reads_gpus(const dray__transfer *h, const dray_transform *t)
{
    const dray_copy *reads = dray_plan_reads(h->sources->plan) + t->first_read;
    for (uint64_t r = 0; r < t->reads; r++) {
        const dray__source *source = &h->sources->sources[reads[r].source];
        int32_t kind = dray_layout_region(source->layout, reads[r].source_region)->kind;
        if (kind != DRAY_REGION_CUDA || reads[r].source_dtype != reads->source_dtype ||
            dray__source_remote(source, reads[r].source_region, h->sources->host))
            return false;
    }
    return t->reads > 0;
}

static bool most_fits(const dray__transfer *h, const dray_transform *t)
{
    const dray_copy *writes = dray_plan_writes(h->sources->plan);
    for (uint64_t w = t->first_write; w < t->first_write + t->writes; w++)
        if (!is_gpu_region(h->destination->regions[writes[w].destination_region]))
            return false;
    const dray_layout *layout = h->destination->layout;
    const dray_block *values =
        dray__layout_first_block(layout, dray_layout_quant(layout, t->tensor)->values);
    return values && is_gpu_region(h->destination->regions[values->region]) && reads_gpus(h, t);
}

bool dray__transform_fits(const dray__transfer *h, const dray_transform *t)
{
    const dray_copy *reads = dray_plan_reads(h->sources->plan) + t->first_read;
    uint64_t cell = sizeof(float);
    if (t->kind == DRAY_TRANSFORM_MOST)
        return most_fits(h, t);
    if (t->kind != DRAY_TRANSFORM_QUANTISE || !reads_gpus(h, t) || !has_writes(h, t))
        return false;
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        if (t->start[d] % t->cell[d] != 0)
            return false;
        cell *= (uint64_t)(t->cell[d] < t->extent[d] ? t->cell[d] : t->extent[d]);
    }
    bool known = is_groups(t) ? dray__format_known(reads->source_dtype, t->quant_kind) &&
                                    groups_fit(h->destination->layout, t)
                              : dray__quant_known(reads->source_dtype, t->quant_dtype);
    return known && (t->reads == 1 || cell <= DRAY__GATHERED_CELL);
}

/* ---- boxes ----------------------------------------------------------------------------------- */

/* Returns the sums that a quantising job computes. */
static uint32_t sums_of(const dray__transfer *h)
{
    return h->options.verify ? DRAY__CUDA_SUM_SOURCE | DRAY__CUDA_SUM_WRITTEN |
                                   DRAY__CUDA_SUM_SCALES | DRAY__CUDA_SUM_MOST
                             : 0;
}

/* Returns the write of one part of the piece. */
static dray_copy part_copy(const struct quant_piece *p, int part)
{
    return dray__copy_cut(p->writes[part], &p->parts[part]);
}

static uint64_t address_of(const dray__transfer *h, const dray_copy *copy)
{
    return h->destination->regions[copy->destination_region]->device_address +
           copy->destination_offset;
}

/* Returns a quant with the destination's fields set. */
static dray__cuda_quant quant_of(const dray__transfer *h, const struct quant_piece *p,
                                 int32_t dtype)
{
    const dray_layout *layout = h->destination->layout;
    dray_copy values = part_copy(p, DRAY__PART_VALUES), scales = part_copy(p, DRAY__PART_SCALES);
    uint32_t ndim = dray_layout_tensor(layout, p->t->tensor)->ndim;
    bool by_cell = p->t->quant_kind != DRAY_QUANT_TENSOR;
    dray__cuda_quant q = {.kind = DRAY_TRANSFORM_QUANTISE,
                          .dtype = dtype,
                          .quant_dtype = p->t->quant_dtype,
                          .scale_format = p->t->scale_format,
                          .tensor = p->t->tensor,
                          .ndim = ndim ? ndim : 1,
                          .destination = address_of(h, &values),
                          .scales = address_of(h, &scales),
                          .quant_kind = p->t->quant_kind,
                          .as = dray__quant_as(layout, p->t->tensor)};
    for (uint32_t d = 0; d < q.ndim; d++) {
        q.start[d] = p->rect.start[d];
        q.extent[d] = p->rect.extent[d];
        q.cell[d] = p->t->cell[d];
        q.destination_stride[d] = values.destination_stride[d];
        q.scale_stride[d] = by_cell ? scales.destination_stride[d] : 0;
    }
    if (p->writes[DRAY__PART_SECOND]) {
        dray_copy second = part_copy(p, DRAY__PART_SECOND);
        q.second = address_of(h, &second);
        memcpy(q.second_stride, second.destination_stride, sizeof q.second_stride);
    }
    return q;
}

/* Gives the number of the global scale of the transform's tensor, a new one at first use. */
static bool number_of(dray__compiler *c, const dray_transform *t, uint32_t *number)
{
    const dray_layout *layout = c->transfer->destination->layout;
    if (!c->most_numbers)
        c->most_numbers =
            calloc((size_t)dray_layout_tensor_count(layout) + 1, sizeof *c->most_numbers);
    if (!c->most_numbers)
        return false;
    uint32_t *known = &c->most_numbers[dray_layout_quant(layout, t->tensor)->shared];
    if (!*known)
        *known = ++c->program->most_count;
    *number = *known - 1;
    return true;
}

/* Returns the first step of a transform. NVFP4 quantises a step later, after the largest elements
 * are found. */
static uint32_t first_step(const dray_transform *t)
{
    return t->quant_kind == DRAY_QUANT_NVFP4;
}

static uint8_t entry_kind(const dray__transfer *h, const struct quant_piece *p)
{
    if (!h->options.verify)
        return DRAY__ENTRY_UNCHECKED;
    if (is_groups(p->t))
        return p->gathered ? DRAY__ENTRY_REGROUPED : DRAY__ENTRY_GROUPED;
    return p->gathered ? DRAY__ENTRY_REQUANTISED : DRAY__ENTRY_QUANTISED;
}

/* Adds the box to a job, and the items that read it back to the next step. */
static bool push_piece(dray__compiler *c, const struct quant_piece *p, const dray__ends *ends,
                       dray__cuda_device *device, const dray__cuda_quant *q, uint32_t step)
{
    const dray__transfer *h = c->transfer;
    uint32_t sums = sums_of(h);
    dray__entry entry = {.elements = dray__rect_elements(&p->rect),
                         .block = p->blocks[DRAY__PART_VALUES],
                         .scale_block = p->blocks[DRAY__PART_SCALES],
                         .second_block = p->blocks[DRAY__PART_SECOND],
                         .tensor = p->t->tensor,
                         .dtype = (uint8_t)q->dtype,
                         .kind = entry_kind(h, p),
                         .owned = p->owned,
                         .twice = p->twice};
    if (!dray__draft_add(dray__draft_of(c, device, sums, step), DRAY__DRAFT_QUANTS, q, &entry))
        return false;
    for (int part = 0; part < DRAY__QUANT_PARTS; part++) {
        if (!p->writes[part])
            continue;
        dray_copy copy = part_copy(p, part);
        dray__ends to = *ends;
        to.to = h->destination->regions[copy.destination_region];
        c->program->bytes += dray__copy_bytes(&copy);
        if (h->options.verify && !dray__draft_read_back(c, &to, &copy, p->blocks[part], step + 1))
            return false;
    }
    return true;
}

/* Compiles cells that are in one block of one source. */
static int compile_cells(dray__compiler *c, const dray_transform *t, uint64_t index,
                         const dray__rect *cells, dray_error *error)
{
    const dray__transfer *h = c->transfer;
    const dray__op *op = &h->sources->ops[index];
    struct quant_piece p = {.t = t, .owned = op->owned, .twice = dray__op_alone(h, op)};
    dray__ends ends;
    dray__rect whole = dray__transform_rect(t);
    dray__rect rect = dray__cells_elements(t->cell, &whole, cells);
    if (!find_piece(h, &rect, &p))
        return dray__fail(error, DRAY_EINTERNAL, "a box that no write holds");
    int rc = dray__ends_of(c, &op->copy,
                           h->destination->regions[p.writes[DRAY__PART_VALUES]->destination_region],
                           &ends, error);
    if (rc)
        return rc;
    dray_copy from = dray__copy_cut(&op->copy, &p.rect);
    dray__cuda_quant q = quant_of(h, &p, from.source_dtype);
    dray__cuda_device *pusher = dray__pusher_of(&ends);
    q.source = ends.from->device_address + from.source_offset;
    q.lane = ends.lane;
    memcpy(q.source_stride, from.source_stride, from.ndim * sizeof *from.source_stride);
    dray__entry entry = {.block = p.blocks[DRAY__PART_VALUES], .twice = p.twice};
    dray__cuda_item item = {
        .copy = from, .source_base = ends.from->device_address, .lane = ends.lane};
    dray__cuda_device *mover = pusher ? pusher : ends.device;
    if (t->quant_kind == DRAY_QUANT_NVFP4 && !number_of(c, t, &q.global))
        return dray__nomem(error);
    return push_piece(c, &p, &ends, mover, &q, first_step(t) + (pusher ? ends.lane : 0)) &&
                   dray__draft_read_again(c, mover, &item, &entry, 0)
               ? DRAY_OK
               : dray__nomem(error);
}

/* Adds copies of all parts of a box, from all sources that have some, to the bucket, dense. */
static int gather(dray__compiler *c, uint32_t block, const dray__rect *rect, uint64_t first,
                  uint64_t end, uint32_t step, const dray__filling *f, dray_error *error)
{
    const dray__transfer *h = c->transfer;
    bool verify = h->options.verify;
    uint32_t sums = sums_of(h);
    for (uint64_t i = first; i < end; i++) {
        const dray__op *op = &h->sources->ops[i];
        dray__rect whole = dray__copy_rect(&op->copy), part;
        dray__ends ends;
        if (!dray__rect_cross(&whole, rect, &part))
            continue;
        int rc = dray__ends_of(c, &op->copy, h->destination->regions[op->copy.destination_region],
                               &ends, error);
        if (rc)
            return rc;
        dray__cuda_item item = {.copy = dray__copy_cut(&op->copy, &part),
                                .source_base = ends.from->device_address,
                                .destination_base = f->address + (f->group & 1) * f->half,
                                .lane = ends.lane,
                                .phase = f->group};
        dray__copy_to_box(&item.copy, rect, item.copy.source_dtype, f->used);
        dray__entry entry = {.block = block,
                             .tensor = item.copy.tensor,
                             .dtype = (uint8_t)item.copy.source_dtype,
                             .owned = op->owned,
                             .twice = dray__op_alone(h, op),
                             .kind = verify ? DRAY__ENTRY_SENT : DRAY__ENTRY_UNCHECKED};
        if (!dray__draft_push(dray__draft_of(c, f->device, sums, step), &item, &entry) ||
            !dray__draft_read_again(c, f->device, &item, &entry, step))
            return dray__nomem(error);
    }
    return DRAY_OK;
}

/* Compiles cells that no source has alone. */
static int compile_gathered(dray__compiler *c, uint64_t index, const dray__rect *cells,
                            dray_error *error)
{
    const dray__transfer *h = c->transfer;
    const dray__sources *s = h->sources;
    const dray_transform *t = &dray_plan_transforms(s->plan)[index];
    uint64_t first = s->transform_ops[index], end = s->transform_ops[index + 1];
    const dray_copy *any = &s->ops[first].copy;
    struct quant_piece p = {.t = t, .gathered = true};
    dray__ends ends;
    dray__filling *f;
    dray__rect whole = dray__transform_rect(t);
    dray__rect rect = dray__cells_elements(t->cell, &whole, cells);
    if (!find_piece(h, &rect, &p))
        return dray__fail(error, DRAY_EINTERNAL, "a box that no write holds");
    int rc = dray__ends_of(c, any,
                           h->destination->regions[p.writes[DRAY__PART_VALUES]->destination_region],
                           &ends, error);
    if (rc == DRAY_OK)
        rc = dray__bucket_of(c, ends.device, &f, error);
    if (rc)
        return rc;
    uint64_t size = dray_dtype_size((dray_dtype)any->source_dtype);
    uint64_t bytes = dray__rect_elements(&p.rect) * size;
    if (f->used && f->used + bytes > f->half) {
        f->group++;
        f->used = 0;
    }
    rc = gather(c, p.blocks[DRAY__PART_VALUES], &p.rect, first, end, first_step(t), f, error);
    if (rc)
        return rc;
    dray__cuda_quant q = quant_of(h, &p, any->source_dtype);
    q.source = f->address + (f->group & 1) * f->half + f->used;
    q.phase = f->group + 1;
    q.lane = s->count;
    for (uint32_t d = q.ndim; d-- > 0; size *= (uint64_t)p.rect.extent[d])
        q.source_stride[d] = (int64_t)size;
    f->used = (f->used + bytes + DRAY__BUCKET_ALIGN - 1) / DRAY__BUCKET_ALIGN * DRAY__BUCKET_ALIGN;
    if (t->quant_kind == DRAY_QUANT_NVFP4 && !number_of(c, t, &q.global))
        return dray__nomem(error);
    return push_piece(c, &p, &ends, ends.device, &q, first_step(t)) ? DRAY_OK : dray__nomem(error);
}

/* Compiles the remaining cells, in pieces that fit a half of the bucket. */
static int compile_left(dray__compiler *c, uint64_t index, const dray__rects *left,
                        dray_error *error)
{
    const dray_transform *t = &dray_plan_transforms(c->transfer->sources->plan)[index];
    uint32_t last = last_dimension(c->transfer, t);
    uint64_t cell = sizeof(float), half = c->program->ceiling / 2 - DRAY__BUCKET_ALIGN;
    int rc = DRAY_OK;
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++)
        cell *= (uint64_t)t->cell[d];
    for (size_t i = 0; i < left->count && rc == DRAY_OK; i++) {
        dray__rect some, slice;
        for (int64_t done = 0; done < left->items[i].extent[last] && rc == DRAY_OK;
             done += some.extent[last]) {
            dray__slicer slicer;
            some = next_cells(c->transfer, t, &left->items[i], done);
            dray__slicer_start(&slicer, &some, cell, half);
            for (; rc == DRAY_OK && dray__slicer_peek(&slicer, &slice); dray__slicer_next(&slicer))
                rc = compile_gathered(c, index, &slice, error);
        }
    }
    return rc;
}

/* Compiles the whole cells that one op reads, box by box. */
static int compile_op(dray__compiler *c, const dray_transform *t, uint64_t index,
                      const dray__rect *cells, dray_error *error)
{
    uint32_t last = last_dimension(c->transfer, t);
    dray__rect some;
    int rc = DRAY_OK;
    for (int64_t done = 0; done < cells->extent[last] && rc == DRAY_OK; done += some.extent[last]) {
        some = next_cells(c->transfer, t, cells, done);
        rc = compile_cells(c, t, index, &some, error);
    }
    return rc;
}

/* ---- the largest elements -------------------------------------------------------------------- */

/* Compiles the search of one op by the GPU that has its source, if this process sees that GPU. */
static int compile_largest(dray__compiler *c, const dray_transform *t, const dray__op *op,
                           const dray_region *to, dray_error *error)
{
    const dray_layout *layout = c->transfer->destination->layout;
    const dray_tensor_info *info = dray_layout_tensor(layout, t->tensor);
    dray__ends ends;
    int rc = dray__ends_of(c, &op->copy, to, &ends, error);
    if (rc)
        return rc;
    dray__entry entry = {.kind = DRAY__ENTRY_MOST};
    dray__cuda_quant q = {.kind = DRAY_TRANSFORM_MOST,
                          .dtype = op->copy.source_dtype,
                          .quant_dtype = DRAY_F8E4M3,
                          .tensor = t->tensor,
                          .ndim = info->ndim,
                          .lane = ends.lane,
                          .source = ends.from->device_address + op->copy.source_offset};
    for (uint32_t d = 0; d < info->ndim; d++) {
        q.start[d] = op->copy.start[d];
        q.extent[d] = op->copy.extent[d];
        q.cell[d] = 1 << 30;
        q.source_stride[d] = op->copy.source_stride[d];
    }
    q.destination_stride[info->ndim - 1] = 1;
    dray__cuda_device *pusher = dray__pusher_of(&ends);
    dray__draft *draft = dray__draft_of(c, pusher ? pusher : ends.device, DRAY__CUDA_SUM_MOST, 0);
    return number_of(c, t, &entry.scale_block) &&
                   dray__draft_add(draft, DRAY__DRAFT_QUANTS, &q, &entry)
               ? DRAY_OK
               : dray__nomem(error);
}

/* Adds the write of a global scale by the destination's GPU, after the largest element is known. */
static bool push_global(dray__compiler *c, const dray_transform *t, uint64_t write,
                        const dray__ends *ends)
{
    const dray__transfer *h = c->transfer;
    const dray_copy *copy = &dray_plan_writes(h->sources->plan)[write];
    uint32_t block = h->sources->write_blocks[write], sums = 0;
    dray__entry entry = {.block = block, .kind = DRAY__ENTRY_UNCHECKED, .tensor = t->tensor};
    dray__cuda_quant q = {.kind = DRAY__CUDA_GLOBAL,
                          .ndim = 1,
                          .tensor = t->tensor,
                          .destination = address_of(h, copy),
                          .as = dray__quant_as(h->destination->layout, t->tensor)};
    dray__ends to = *ends;
    to.to = h->destination->regions[copy->destination_region];
    c->program->bytes += sizeof(float);
    if (h->options.verify) {
        sums = DRAY__CUDA_SUM_WRITTEN;
        entry.kind = DRAY__ENTRY_GROUPED;
        entry.scale_block = entry.second_block = block;
    }
    return number_of(c, t, &q.global) &&
           dray__draft_add(dray__draft_of(c, ends->device, sums, 1), DRAY__DRAFT_QUANTS, &q,
                           &entry) &&
           (!h->options.verify || dray__draft_read_back(c, &to, copy, block, 2));
}

static int compile_most(dray__compiler *c, uint64_t index, dray_error *error)
{
    const dray__transfer *h = c->transfer;
    const dray__sources *s = h->sources;
    const dray_layout *layout = h->destination->layout;
    const dray_transform *t = &dray_plan_transforms(s->plan)[index];
    uint64_t first = s->transform_ops[index], end = s->transform_ops[index + 1];
    const dray_block *values =
        dray__layout_first_block(layout, dray_layout_quant(layout, t->tensor)->values);
    const dray_region *to = h->destination->regions[values->region];
    dray__ends ends;
    int rc = DRAY_OK;
    for (uint64_t i = first; i < end && rc == DRAY_OK; i++)
        rc = compile_largest(c, t, &s->ops[i], to, error);
    if (rc == DRAY_OK && t->writes)
        rc = dray__ends_of(c, &s->ops[first].copy, to, &ends, error);
    for (uint64_t w = t->first_write; w < t->first_write + t->writes && rc == DRAY_OK; w++)
        if (!push_global(c, t, w, &ends))
            rc = dray__nomem(error);
    return rc;
}

int dray__compile_transform(dray__compiler *c, uint64_t index, dray_error *error)
{
    const dray__sources *s = c->transfer->sources;
    const dray_transform *t = &dray_plan_transforms(s->plan)[index];
    dray__rects left = {0};
    if (t->kind == DRAY_TRANSFORM_MOST)
        return compile_most(c, index, error);
    dray__rect cells = all_cells(t);
    int rc = dray__rects_add(&left, &cells) ? DRAY_OK : dray__nomem(error);
    for (uint64_t i = s->transform_ops[index]; i < s->transform_ops[index + 1] && rc == DRAY_OK;
         i++) {
        dray__rect whole = dray__transform_rect(t), rect = dray__copy_rect(&s->ops[i].copy);
        if (!dray__cells_inside(t->cell, &whole, &rect, &cells))
            continue;
        rc = compile_op(c, t, i, &cells, error);
        if (rc == DRAY_OK && !dray__rects_take(&left, &cells))
            rc = dray__nomem(error);
    }
    /* Whole cells were compiled above; all others are gathered. */
    if (rc == DRAY_OK)
        rc = compile_left(c, index, &left, error);
    dray__rects_free(&left);
    return rc;
}
