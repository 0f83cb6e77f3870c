/* The placement of elements that are quantised or dequantised. It gathers a box of a tensor from
 * all sources that have parts of it, quantises or dequantises it, and writes this rank's part of
 * the result.
 *
 * Gathering is a transfer of its own, with the staging as its destination, so that all sources and
 * their checks can be used. A box is as many whole cells (elements that share a scale) as fit the
 * staging. A cell that does not fit is read twice, in slices: first for its largest element, then
 * to be quantised. The result is summed when it is computed, and read back at its destination. */
#include "base/arena.h"
#include "base/clock.h"
#include "base/error.h"
#include "model/layout/layout.h"
#include "mover/kernels/quant.h"
#include "weights/placements/prequantised.h"
#include "weights/transfer/transfer.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* A box that is read from memory fits the cache; one that is read over a network is large enough
 * for many requests to be under way. */
enum { BOX_OF_MEMORY = 256 << 10, BOX_OF_NETWORK = 8 << 20, LEAST_STAGING = 16 << 10 };

enum { VALUES, SCALES, TENSORS }; /* of the gathered elements' layout */

struct quant_route {
    dray__route *route;
    dray__transfer *transfer;
    const dray_transform *transforms;
    uint64_t count, next; /* of transforms */
    bool *mine;           /* [transform]: no other route carries it out */

    /* The gathering transfer: the same sources over connections of their own, into the staging. */
    dray__sources sources;
    dray__destination destination;
    dray__transfer *gathering;
    const char *names[TENSORS];
    bool compared[TENSORS];
    uint64_t op_capacity, gather_bytes;
    dray__waker waker;

    /* values | their results | scales | other parts, each in the form that the transform has */
    dray_region *staging;
    uint64_t staging_bytes, part_at[DRAY__QUANT_PARTS];
    uint32_t *amax;
    uint64_t amax_bytes;
    uint32_t *most; /* NVFP4: by tensor, the bits of the largest element of those that share it */

    /* The current transform. */
    bool in_transform, in_cell, second;
    int32_t values_dtype, result_dtype;
    uint64_t box_elements; /* of a box, at most */
    dray__rects left;      /* the part that is still to be gathered, in cells or elements as
                            * below */
    dray__slicer cells;    /* QUANTISE: boxes of cells; DEQUANTISE: of elements */
    dray__slicer slices;   /* of a cell that is too large */
    dray__rect box;
    uint64_t sum_first, sum_second; /* of the elements of such a cell that were read in each pass */
    uint32_t cell_amax;
};

/* ---- opening --------------------------------------------------------------------------------- */

static bool takes(const dray__transfer *transfer, const dray__op *op)
{
    return op->transform != 0 && !dray__prequantised(transfer, op);
}

const dray__placement dray__place_convert = {"convert", takes};

/* Returns true for every source. */
static bool reaches(const dray__transfer *transfer, const dray__op *op,
                    const dray__placement *placement)
{
    (void)transfer, (void)op, (void)placement;
    return true;
}

static bool is_remote(const struct quant_route *q, const dray__op *op)
{
    return dray__source_remote(&q->transfer->sources->sources[op->copy.source],
                               op->copy.source_region, q->transfer->destination->host);
}

/* The sources over connections of their own, because an answer belongs to its connection. */
static int copy_sources(struct quant_route *q, dray_error *error)
{
    const dray__sources *all = q->transfer->sources;
    q->sources = *all;
    q->sources.kept = NULL;
    q->sources.ops = NULL;
    q->sources.op_count = 0;
    q->sources.names = q->names;
    q->sources.sources = calloc((size_t)all->count + 1, sizeof *q->sources.sources);
    if (!q->sources.sources)
        return dray__nomem(error);
    for (uint32_t i = 0; i < all->count; i++) {
        q->sources.sources[i] = all->sources[i];
        q->sources.sources[i].kept = NULL;
    }
    return DRAY_OK;
}

static int route_init(struct quant_route *q, dray_error *error)
{
    uint64_t box = BOX_OF_MEMORY, ceiling = q->route->ceiling;
    for (uint64_t i = 0; i < q->route->count; i++)
        if (is_remote(q, &q->transfer->sources->ops[q->route->ops[i]]))
            box = BOX_OF_NETWORK;
    /* Values, their result and scales: twice the box is enough for all but tiny cells. */
    q->gather_bytes = box == BOX_OF_MEMORY && !q->transfer->sources->files ? 0 : ceiling / 2;
    if (q->gather_bytes && q->gather_bytes < DRAY__BUCKET_MIN)
        return dray__fail(error, DRAY_EINVALID,
                          "bucket_bytes: %" PRIu64 " of them are left for quantised tensors, which "
                          "need %" PRIu64 " to be read from files or other hosts",
                          ceiling, 2 * DRAY__BUCKET_MIN);
    q->staging_bytes = ceiling - q->gather_bytes < 2 * box ? ceiling - q->gather_bytes : 2 * box;
    q->staging_bytes &= ~(uint64_t)4095;
    if (q->staging_bytes < LEAST_STAGING)
        q->staging_bytes = LEAST_STAGING;
    q->route->held = q->staging_bytes;
    q->amax_bytes = q->staging_bytes / 4;
    q->staging_bytes -= q->amax_bytes;
    q->amax = malloc(q->amax_bytes);
    if (!q->amax)
        return dray__nomem(error);
    int rc = dray__waker_open(&q->waker, false, error);
    q->route->fd = q->waker.fd;
    if (rc == DRAY_OK)
        rc = dray_region_alloc(DRAY_REGION_HOST, q->staging_bytes, "quantisation", &q->staging,
                               error);
    return rc ? rc : copy_sources(q, error);
}

static void end_transform(struct quant_route *q)
{
    dray__transfer_close(q->gathering);
    q->gathering = NULL;
    dray_layout_free(q->destination.layout);
    q->destination.layout = NULL;
    q->left.count = 0;
    q->in_transform = q->in_cell = false;
}

static void route_close(void *state)
{
    struct quant_route *q = state;
    end_transform(q);
    for (uint32_t i = 0; q->sources.sources && i < q->sources.count; i++)
        dray__kept_end(&q->sources.sources[i].kept, NULL);
    free(q->sources.sources);
    free(q->sources.ops);
    free(q->mine);
    dray_region_free(q->staging);
    free(q->amax);
    free(q->most);
    dray__rects_free(&q->left);
    dray__waker_close(&q->waker);
}

static int route_open(dray__route *route, dray_error *error)
{
    struct quant_route *q = route->state;
    const dray__sources *s = route->transfer->sources;
    q->route = route;
    q->transfer = route->transfer;
    q->waker = DRAY__WAKER_CLOSED;
    q->transforms = dray_plan_transforms(s->plan);
    q->count = dray_plan_transform_count(s->plan);
    q->mine = calloc((size_t)q->count + 1, sizeof *q->mine);
    q->most = calloc((size_t)dray_layout_tensor_count(route->transfer->destination->layout) + 1,
                     sizeof *q->most);
    for (uint64_t i = 0; q->mine && i < route->count; i++)
        q->mine[s->ops[route->ops[i]].transform - 1] = true;
    return q->mine && q->most ? route_init(q, error) : dray__nomem(error);
}

/* ---- a transform ----------------------------------------------------------------------------- */

static const dray__op *transform_ops(const struct quant_route *q, uint64_t *count)
{
    const dray__sources *s = q->transfer->sources;
    *count = s->transform_ops[q->next + 1] - s->transform_ops[q->next];
    return s->ops + s->transform_ops[q->next];
}

/* Returns the source's tensor of scales. */
static const dray_tensor_info *source_scales(const struct quant_route *q, const dray__op *ops,
                                             uint64_t count)
{
    uint32_t tensor;
    for (uint64_t i = 0; i < count; i++) {
        const dray_layout *layout = q->sources.sources[ops[i].copy.source].layout;
        if (ops[i].scales || dray_layout_find(layout, q->names[VALUES], &tensor, NULL))
            continue;
        const dray_quant *quant = dray_layout_quant(layout, tensor);
        if (quant)
            return dray_layout_tensor(layout, quant->scales);
    }
    return NULL;
}

/* Makes the layout of the gathered elements. */
static int make_layout(struct quant_route *q, const dray_tensor_info *values,
                       const dray_tensor_info *scales, dray_error *error)
{
    dray_region_info region = {.kind = DRAY_REGION_HOST, .bytes = q->staging_bytes};
    const dray_tensor_info *info[TENSORS] = {values, scales};
    const int32_t dtypes[TENSORS] = {q->values_dtype, DRAY_F32};
    dray_layout *layout;
    int rc = dray_layout_new(&layout, error);
    if (rc)
        return rc;
    rc = dray_layout_add_region(layout, &region, NULL, error);
    for (int i = 0; i < TENSORS && rc == DRAY_OK && info[i]; i++)
        rc =
            dray_layout_add_tensor(layout, i == VALUES ? "values" : "scales", (dray_dtype)dtypes[i],
                                   info[i]->ndim, info[i]->shape, NULL, error);
    const int64_t one[DRAY_MAX_DIMS] = {1, 1, 1, 1}, zero[DRAY_MAX_DIMS] = {0};
    if (rc == DRAY_OK) /* the books need a block */
        rc = dray_layout_add_dense(layout, VALUES, 0, zero, one, 0, error);
    if (rc) {
        dray_layout_free(layout);
        return rc;
    }
    q->destination = *q->transfer->destination;
    q->destination.layout = layout;
    q->destination.regions = &q->staging;
    return DRAY_OK;
}

/* Returns the dtype in which floats are gathered: their own, or f32 when sources have different
 * ones.
 */
static int32_t gathered_dtype(const dray__op *ops, uint64_t count)
{
    int32_t dtype = ops[0].copy.source_dtype;
    for (uint64_t i = 1; i < count; i++)
        if (!ops[i].scales && ops[i].copy.source_dtype != dtype)
            dtype = DRAY_F32;
    return dtype;
}

/* Returns the most scales that a box of the current slicer needs. */
static uint64_t most_scales(const struct quant_route *q, const dray_transform *t)
{
    uint64_t scales = 1;
    for (int d = 0; d < DRAY_MAX_DIMS; d++) {
        int64_t tile = q->cells.tile[d];
        if (t->kind == DRAY_TRANSFORM_DEQUANTISE)
            tile = (tile - 1) / t->cell[d] + (tile > 1 ? 2 : 1); /* may begin within a cell */
        scales *= (uint64_t)tile;
    }
    return t->kind == DRAY_TRANSFORM_MOST ? 1 : scales;
}

/* Returns the most bytes of a part that a box of the current slicer needs. */
static uint64_t most_bytes(const struct quant_route *q, const dray_transform *t, int part)
{
    const dray_layout *layout = q->transfer->destination->layout;
    uint64_t bytes = most_scales(q, t) * sizeof(float);
    int64_t cell[DRAY_MAX_DIMS];
    uint32_t tensor;
    if (t->kind != DRAY_TRANSFORM_QUANTISE)
        return part == DRAY__PART_SCALES ? bytes : 0;
    if (!dray__quant_part(layout, t->tensor, part, &tensor, cell))
        return 0;
    for (int d = 0; d < DRAY_MAX_DIMS; d++) /* of most formats a cell has one of each part */
        bytes *= (uint64_t)((t->cell[d] - 1) / cell[d] + 1);
    return bytes;
}

/* Divides the staging, with boxes of `whole` as large as possible. `whole` is in units of `piece`
 * elements. */
static void share_staging(struct quant_route *q, const dray__rect *whole, uint64_t piece)
{
    const dray_transform *t = &q->transforms[q->next];
    uint64_t values = dray_dtype_size((dray_dtype)q->values_dtype), gaps = 192;
    uint64_t result = dray_dtype_size((dray_dtype)q->result_dtype), scales, second;
    if (t->kind == DRAY_TRANSFORM_QUANTISE)
        result = 1; /* or less */
    q->box_elements = (q->staging_bytes - gaps) / (values + result);
    for (;; q->box_elements -= q->box_elements / 8 + 1) {
        dray__slicer_start(&q->cells, whole, piece, q->box_elements);
        scales = most_bytes(q, t, DRAY__PART_SCALES);
        second = most_bytes(q, t, DRAY__PART_SECOND);
        if (q->box_elements * (values + result) + scales + second + gaps <= q->staging_bytes &&
            most_scales(q, t) * sizeof(float) <= q->amax_bytes)
            break;
    }
    q->part_at[DRAY__PART_VALUES] = (q->box_elements * values + 63) & ~(uint64_t)63;
    q->part_at[DRAY__PART_SCALES] =
        (q->part_at[DRAY__PART_VALUES] + q->box_elements * result + 63) & ~(uint64_t)63;
    q->part_at[DRAY__PART_SECOND] = (q->part_at[DRAY__PART_SCALES] + scales + 63) & ~(uint64_t)63;
}

/* Finds the cells, or elements, that the route of data servers does not bring. */
static int find_left(struct quant_route *q, const dray__rect *whole, const dray__op *ops,
                     uint64_t count, dray_error *error)
{
    q->left.count = 0;
    bool kept = dray__rects_add(&q->left, whole);
    for (uint64_t i = 0; i < count && kept; i++) {
        if (!dray__prequantised(q->transfer, &ops[i]))
            continue;
        dray__rect taken = dray__copy_rect(&ops[i].copy);
        taken = dray__prequantised_cells(q->transfer, &ops[i], &taken);
        kept = dray__rects_take(&q->left, &taken);
    }
    return kept ? DRAY_OK : dray__nomem(error);
}

/* Goes to the next part that is left. Returns false when there is none. */
static bool next_left(struct quant_route *q)
{
    const dray_transform *t = &q->transforms[q->next];
    uint64_t cell = 1;
    if (!q->left.count)
        return false;
    dray__rect whole = q->left.items[--q->left.count];
    for (int d = 0; d < DRAY_MAX_DIMS; d++)
        cell *= (uint64_t)t->cell[d];
    share_staging(q, &whole, t->kind == DRAY_TRANSFORM_QUANTISE ? cell : 1);
    return true;
}

static int begin_transform(struct quant_route *q, dray_error *error)
{
    const dray_transform *t = &q->transforms[q->next];
    const dray_tensor_info *info = dray_layout_tensor(q->transfer->destination->layout, t->tensor);
    const dray_tensor_info *scales = NULL;
    uint64_t count;
    const dray__op *ops = transform_ops(q, &count);
    bool quantise = t->kind != DRAY_TRANSFORM_DEQUANTISE;
    q->names[VALUES] = q->transfer->sources->names[t->tensor];
    q->compared[VALUES] = q->transfer->options.compared && q->transfer->options.compared[t->tensor];
    if (!quantise) {
        scales = source_scales(q, ops, count);
        if (!scales)
            return dray__fail(error, DRAY_EINTERNAL, "tensor %s: its source has no scales",
                              info->name);
        q->names[SCALES] = scales->name;
    }
    q->values_dtype = quantise ? gathered_dtype(ops, count) : t->quant_dtype;
    q->result_dtype = quantise ? t->quant_dtype : info->dtype;
    dray__rect box = dray__transform_rect(t);
    if (quantise)
        box = dray__cells_touched(t->cell, &box);
    int rc = find_left(q, &box, ops, count, error);
    q->cells.done = true;
    q->in_transform = true;
    return rc ? rc : make_layout(q, info, scales, error);
}

/* ---- boxes ----------------------------------------------------------------------------------- */

/* Goes to the next box of the current transform. Returns false when it is done. */
static bool next_box(struct quant_route *q)
{
    const dray_transform *t = &q->transforms[q->next];
    dray__rect cells;
    if (!q->in_cell) {
        while (!dray__slicer_peek(&q->cells, &cells))
            if (!next_left(q))
                return false;
        dray__rect whole = dray__transform_rect(t);
        q->box = t->kind == DRAY_TRANSFORM_QUANTISE ? dray__cells_elements(t->cell, &whole, &cells)
                                                    : cells;
        if (dray__rect_elements(&q->box) <= q->box_elements)
            return true;
        q->in_cell = true;
        q->second = false;
        q->cell_amax = 0;
        q->sum_first = q->sum_second = 0;
        dray__slicer_start(&q->slices, &q->box, 1, q->box_elements);
    }
    return dray__slicer_peek(&q->slices, &q->box);
}

static dray__quant_box quant_box(const struct quant_route *q)
{
    const dray_transform *t = &q->transforms[q->next];
    dray__quant_box box = {.dtype = t->kind == DRAY_TRANSFORM_DEQUANTISE ? q->result_dtype
                                                                         : q->values_dtype,
                           .quant_dtype = t->quant_dtype,
                           .kind = t->quant_kind,
                           .as = dray__quant_as(q->transfer->destination->layout, t->tensor)};
    memcpy(box.start, q->box.start, sizeof box.start);
    memcpy(box.extent, q->box.extent, sizeof box.extent);
    memcpy(box.cell, t->cell, sizeof box.cell);
    return box;
}

static dray__rect touched_cells(const struct quant_route *q)
{
    dray__quant_box box = quant_box(q);
    dray__rect cells = {0};
    dray__quant_cells(&box, cells.start, cells.extent);
    return cells;
}

/* ---- gathering ------------------------------------------------------------------------------- */

/* Adds an op that copies the part of a read in the box to its place in the staging. */
static bool push_part(struct quant_route *q, const dray__op *of, const dray__rect *box,
                      int32_t dtype, uint64_t at)
{
    dray__rect whole = dray__copy_rect(&of->copy), part;
    if (!dray__rect_cross(&whole, box, &part))
        return true;
    dray__op *op = dray__append(&q->sources.ops, sizeof *op, q->sources.op_count, &q->op_capacity);
    if (!op)
        return false;
    *op = (dray__op){.copy = dray__copy_cut(&of->copy, &part), .owned = of->owned};
    op->copy.tensor = of->scales ? SCALES : VALUES;
    dray__copy_to_box(&op->copy, box, dtype, at);
    q->sources.op_count++;
    return true;
}

static int begin_gathering(struct quant_route *q, dray_error *error)
{
    uint64_t count;
    const dray__op *ops = transform_ops(q, &count);
    dray__rect cells = touched_cells(q);
    q->sources.op_count = 0;
    for (uint64_t i = 0; i < count; i++)
        if (!push_part(q, &ops[i], ops[i].scales ? &cells : &q->box,
                       ops[i].scales ? DRAY_F32 : q->values_dtype,
                       ops[i].scales ? q->part_at[DRAY__PART_SCALES] : 0))
            return dray__nomem(error);
    dray__transfer_options options = q->transfer->options;
    options.strategy = DRAY_STRATEGY_DIRECT;
    options.bucket_bytes = q->gather_bytes ? q->gather_bytes : DRAY__BUCKET_MIN;
    options.compared = q->transfer->options.compared ? q->compared : NULL;
    options.has_base = false;
    options.run = 0; /* staged bytes are for no other rank */
    options.once = true;
    int rc = dray__transfer_open(&q->sources, &q->destination, &options, &q->gathering, error);
    /* Closing the gathering removes it from the waker. */
    return rc ? rc : dray__waker_add(&q->waker, dray__transfer_fd(q->gathering), error);
}

/* Enters the gathered elements in the update's books. */
static int end_gathering(struct quant_route *q, dray_error *error)
{
    const dray_transform *t = &q->transforms[q->next];
    dray__transfer *g = q->gathering, *h = q->transfer;
    int rc = dray__transfer_check(g, error);
    dray_update_report report = {0};
    dray__transfer_report(g, &report);
    uint64_t held = q->staging_bytes + q->amax_bytes + report.peak_extra_bytes;
    q->route->held = held > q->route->held ? held : q->route->held;
    h->told.wire_bytes += report.wire_bytes;
    h->move_ns += g->move_ns;
    h->verify_ns += g->verify_ns;
    if (rc == DRAY_OK && h->options.verify) {
        struct dray__tensor_sum *from = &g->tensors[VALUES];
        *(q->second ? &q->sum_second : &q->sum_first) += from->sum;
        if (!q->second)
            dray__transfer_add(h, t->tensor, from);
    }
    dray__transfer_close(g);
    q->gathering = NULL;
    return rc;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* Writes this rank's share of a part's box from the staging. */
static int write_part(struct quant_route *q, int part, const dray__rect *box, dray_error *error)
{
    return dray__transform_write(q->transfer, &q->transforms[q->next], part, q->staging, box,
                                 q->part_at[part], error);
}

/* Writes the exponents of the cells' scales for each row of the box, dense. */
static void spread_exponents(const struct quant_route *q, const dray__rect *rows,
                             const int64_t *part_cell, const float *scales, uint8_t *out)
{
    const dray_transform *t = &q->transforms[q->next];
    dray__rect cells = touched_cells(q);
    int64_t at[DRAY_MAX_DIMS] = {0};
    for (uint64_t i = 0; i < dray__rect_elements(rows); i++) {
        uint64_t cell = 0;
        uint32_t bits;
        for (int d = 0; d < DRAY_MAX_DIMS; d++) {
            int64_t element = (rows->start[d] + at[d]) * part_cell[d]; /* the first of its own */
            cell = cell * (uint64_t)cells.extent[d] +
                   (uint64_t)(element / t->cell[d] - cells.start[d]);
        }
        memcpy(&bits, &scales[cell], sizeof bits);
        out[i] = (uint8_t)(bits >> 23);
        for (int d = DRAY_MAX_DIMS - 1; d >= 0 && ++at[d] == rows->extent[d]; d--)
            at[d] = 0;
    }
}

/* Writes the scales of FP8, one for each cell, or for each row of a cell. */
static int write_scales(struct quant_route *q, const float *scales, dray_error *error)
{
    const dray_transform *t = &q->transforms[q->next];
    uint8_t *base = dray_region_base(q->staging);
    dray__rect cells = touched_cells(q);
    bool first = memcmp(q->box.start, q->slices.whole.start, sizeof q->box.start) == 0;
    int64_t cell[DRAY_MAX_DIMS];
    uint32_t tensor;
    if (t->quant_kind != DRAY_QUANT_DEEPGEMM) {
        memcpy(base + q->part_at[DRAY__PART_SCALES], scales,
               dray__rect_elements(&cells) * sizeof *scales);
        /* The scale of a cell in slices is written with its first slice. */
        return q->in_cell && !first ? DRAY_OK : write_part(q, DRAY__PART_SCALES, &cells, error);
    }
    dray__quant_part(q->transfer->destination->layout, t->tensor, DRAY__PART_SCALES, &tensor, cell);
    dray__rect rows = dray__cells_touched(cell, &q->box);
    uint32_t last = dray_layout_tensor(q->transfer->destination->layout, t->tensor)->ndim - 1;
    if (q->in_cell && q->box.start[last] != q->slices.whole.start[last])
        return DRAY_OK;
    spread_exponents(q, &rows, cell, scales, base + q->part_at[DRAY__PART_SCALES]);
    return write_part(q, DRAY__PART_SCALES, &rows, error);
}

static int quantise_cells(struct quant_route *q, dray_error *error)
{
    const dray_transform *t = &q->transforms[q->next];
    dray__quant_box box = quant_box(q);
    dray__rect cells = touched_cells(q);
    uint8_t *base = dray_region_base(q->staging);
    float *scales = (float *)(void *)q->amax;
    uint64_t count = dray__rect_elements(&cells);
    bool bytes = t->quant_kind == DRAY_QUANT_DEEPGEMM;
    memset(q->amax, 0, count * sizeof *q->amax);
    if (q->in_cell)
        q->amax[0] = q->cell_amax;
    if (!q->in_cell || !q->second)
        dray__quant_most(&box, base, q->amax);
    if (q->in_cell)
        q->cell_amax = q->amax[0];
    if (q->in_cell && !q->second) /* the cell has more slices */
        return DRAY_OK;
    for (uint64_t i = 0; i < count; i++) {
        float scale =
            dray__quant_scale(&box, q->amax[i], bytes ? DRAY_SCALE_UE8M0 : t->scale_format);
        memcpy(&scales[i], &scale, sizeof scale);
    }
    dray__quantise(&box, base, scales, base + q->part_at[DRAY__PART_VALUES]);
    dray__rect elements = q->box;
    int rc = write_part(q, DRAY__PART_VALUES, &elements, error);
    return rc ? rc : write_scales(q, scales, error);
}

/* Finds the largest element of a tensor, which is one cell. */
static int find_most(struct quant_route *q)
{
    const dray_layout *layout = q->transfer->destination->layout;
    uint32_t tensor = q->transforms[q->next].tensor, amax = 0, *most;
    most = &q->most[dray_layout_quant(layout, tensor)->shared];
    dray__quant_box box = quant_box(q);
    for (int d = 0; d < DRAY_MAX_DIMS; d++)
        box.cell[d] = INT64_MAX;
    dray__quant_most(&box, dray_region_base(q->staging), &amax);
    amax = dray__format_most(q->values_dtype, amax);
    *most = amax > *most ? amax : *most;
    return DRAY_OK;
}

static uint32_t global_of(const struct quant_route *q, int32_t as)
{
    const dray_layout *layout = q->transfer->destination->layout;
    const dray_quant *quant = dray_layout_quant(layout, q->transforms[q->next].tensor);
    return dray__format_global(q->most[quant->shared], as);
}

/* Writes a global scale, after the last transform that shares it. */
static int write_global(struct quant_route *q, dray_error *error)
{
    const dray_transform *t = &q->transforms[q->next];
    const dray__rect one = {.extent = {1, 1, 1, 1}};
    if (t->kind != DRAY_TRANSFORM_MOST || !t->writes)
        return DRAY_OK;
    uint32_t global = global_of(q, dray__quant_as(q->transfer->destination->layout, t->tensor));
    memcpy((uint8_t *)dray_region_base(q->staging) + q->part_at[DRAY__PART_SECOND], &global,
           sizeof global);
    return write_part(q, DRAY__PART_SECOND, &one, error);
}

/* Quantises a box in a format with groups. */
static int quantise_groups(struct quant_route *q, dray_error *error)
{
    const dray_layout *layout = q->transfer->destination->layout;
    const dray_transform *t = &q->transforms[q->next];
    dray__quant_box box = quant_box(q);
    uint8_t *base = dray_region_base(q->staging);
    void *parts[DRAY__QUANT_PARTS];
    uint32_t tensor, global = t->quant_kind == DRAY_QUANT_NVFP4 ? global_of(q, box.as) : 0;
    int64_t cell[DRAY_MAX_DIMS];
    int rc = DRAY_OK;
    for (int part = 0; part < DRAY__QUANT_PARTS; part++)
        parts[part] = base + q->part_at[part];
    dray__format_quantise(&box, base, global, parts);
    for (int part = 0; part < DRAY__QUANT_PARTS && rc == DRAY_OK; part++) {
        if (!dray__quant_part(layout, t->tensor, part, &tensor, cell) ||
            (part == DRAY__PART_SECOND && t->quant_kind == DRAY_QUANT_NVFP4))
            continue;
        dray__rect of_part = dray__cells_touched(cell, &q->box);
        rc = write_part(q, part, &of_part, error);
    }
    return rc;
}

static int quantise(struct quant_route *q, dray_error *error)
{
    const dray_transform *t = &q->transforms[q->next];
    if (t->kind == DRAY_TRANSFORM_MOST)
        return find_most(q);
    return t->quant_kind < DRAY_QUANT_MXFP8 ? quantise_cells(q, error) : quantise_groups(q, error);
}

static int dequantise(struct quant_route *q, dray_error *error)
{
    dray__quant_box box = quant_box(q);
    uint8_t *base = dray_region_base(q->staging);
    const float *scales = (const float *)(const void *)(base + q->part_at[DRAY__PART_SCALES]);
    dray__dequantise(&box, base, scales, base + q->part_at[DRAY__PART_VALUES]);
    dray__rect elements = q->box;
    return write_part(q, DRAY__PART_VALUES, &elements, error);
}

/* ---- the route ------------------------------------------------------------------------------- */

/* Goes past the current box. */
static int advance(struct quant_route *q, dray_error *error)
{
    if (!q->in_cell) {
        dray__slicer_next(&q->cells);
        return DRAY_OK;
    }
    dray__slicer_next(&q->slices);
    if (!q->slices.done)
        return DRAY_OK;
    if (!q->second) {
        dray__rect whole = q->slices.whole;
        dray__slicer_start(&q->slices, &whole, 1, q->box_elements);
        q->second = true;
        return DRAY_OK;
    }
    q->in_cell = q->second = false;
    dray__slicer_next(&q->cells);
    if (q->sum_first != q->sum_second)
        return dray__fail(error, DRAY_ECHECKSUM,
                          "tensor %s: its source changed between the two times it was read",
                          q->names[VALUES]);
    return DRAY_OK;
}

static int convert(struct quant_route *q, dray_error *error)
{
    int64_t begin = dray__now();
    int rc = end_gathering(q, error);
    if (rc == DRAY_OK)
        rc = q->transforms[q->next].kind == DRAY_TRANSFORM_DEQUANTISE ? dequantise(q, error)
                                                                      : quantise(q, error);
    q->transfer->move_ns += dray__now() - begin;
    return rc ? rc : advance(q, error);
}

static int step(struct quant_route *q, int64_t until_ns, dray_error *error)
{
    int rc = DRAY_OK;
    while (q->next < q->count && !q->mine[q->next])
        q->next++;
    if (q->next == q->count)
        return DRAY_OK;
    if (!q->in_transform && (rc = begin_transform(q, error)))
        return rc;
    if (!q->gathering) {
        if (!next_box(q)) {
            rc = write_global(q, error);
            if (rc)
                return rc;
            end_transform(q);
            q->next++;
            return DRAY_EAGAIN;
        }
        rc = begin_gathering(q, error);
        if (rc)
            return rc;
    }
    int64_t budget = until_ns - dray__now();
    rc = dray__transfer_step(q->gathering, budget > 0 ? budget : 1, error);
    if (rc == DRAY_EAGAIN)
        q->route->waits = dray__transfer_waits(q->gathering);
    if (rc == DRAY_OK && (rc = convert(q, error)) == DRAY_OK)
        return DRAY_EAGAIN;
    return rc == DRAY_EAGAIN ? rc : dray__fail_prefix(error, rc, "tensor %s: ", q->names[VALUES]);
}

static int route_step(dray__route *route, int64_t until_ns, dray_error *error)
{
    int rc;
    do
        rc = step(route->state, until_ns, error);
    while (rc == DRAY_EAGAIN && !route->waits && dray__now() < until_ns);
    return rc;
}

static void route_explain(const void *state, dray_error *error)
{
    const struct quant_route *q = state;
    if (q->gathering)
        dray__transfer_explain(q->gathering, error);
}

const dray__source_type dray__source_gathered = {.name = "gathered",
                                                 .bytes = sizeof(struct quant_route),
                                                 .reaches = reaches,
                                                 .open = route_open,
                                                 .step = route_step,
                                                 .explain = route_explain,
                                                 .close = route_close};
