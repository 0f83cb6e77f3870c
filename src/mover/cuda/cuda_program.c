/* Converts a list of items to tiles for a GPU's kernels, in an order that keeps all links busy, and
 * to runs for its copy engines. */
#include "base/array.h"
#include "base/error.h"
#include "mover/cuda/cuda_internal.h"
#include "mover/kernels/quant.h"

#include <stdlib.h>
#include <string.h>

enum { TILE = 32 << 10, SUM_TILE = 128 << 10, ENGINE_MIN = 4 << 20, HOST_MIN = 64 << 10 };
#define LAUNCH ((uint64_t)512 << 20)

/* A piece or a box whose tiles are still to be distributed. */
typedef struct work {
    uint32_t phase, lane, index;
    int kernel;
    bool back;
    uint64_t behind;       /* for reading back: the runs with smaller numbers wrote it */
    uint64_t tiles, bytes; /* of all tiles */
    uint32_t shared;
    /* The time of a byte, in units of the time of a byte in whole words over NEAR. */
    uint32_t weight;
} work;

/* Over PCIe everything is slow. NVLink is slower than memory within a GPU. */
enum { NEAR = 1, FAR = 4, HOST_FAR = 32 };
static const uint32_t weights[DRAY__GPU_KERNEL_COUNT] = {
    [DRAY__GPU_dray_narrow] = 2, [DRAY__GPU_dray_any] = 4, [DRAY__GPU_dray_turn] = 2};

static uint32_t weight_of(int kernel, const dray__cuda_item *item, bool back)
{
    uint32_t slow = weights[kernel] ? weights[kernel] : 1;
    return item->host && !back ? HOST_FAR : slow * (item->near || back ? NEAR : FAR);
}

typedef struct program_builder {
    dray__gpu_program *program;
    const dray__cuda_job_options *options;
    work *works;
    uint64_t count, work_capacity, piece_capacity, run_capacity;
} program_builder;

static bool add_work(program_builder *b, const work *w)
{
    return DRAY__PUSH(b->works, b->count, b->work_capacity, *w);
}

static bool add_pieces(program_builder *b, const dray__cuda_item *item,
                       const dray_tensor_info *tensor, uint64_t number, bool back)
{
    dray__gpu_program *p = b->program;
    dray__gpu_piece pieces[3];
    int kernels[3];
    uint64_t tile = item->destination_base ? TILE : SUM_TILE;
    uint32_t count = dray__gpu_pieces_of(item, tensor, tile, pieces, kernels);
    for (uint32_t i = 0; i < count; i++) {
        const dray__gpu_piece *q = &pieces[i];
        work w = {.phase = item->phase,
                  .lane = item->lane,
                  .index = (uint32_t)p->piece_count,
                  .kernel = kernels[i],
                  .back = back,
                  .behind = back ? p->run_count : 0,
                  .tiles = dray__gpu_tiles_of(q),
                  .weight = weight_of(kernels[i], item, back)};
        uint64_t unit =
            q->destination && q->from != q->to ? dray_dtype_size((dray_dtype)q->to) : q->unit;
        w.bytes = unit * q->columns * q->extent[0] * q->extent[1] * q->extent[2];
        pieces[i].sum = (uint32_t)number;
        if (!DRAY__PUSH(p->pieces, p->piece_count, b->piece_capacity, pieces[i]) ||
            !add_work(b, &w))
            return false;
        p->kernel_bytes += back ? 0 : w.bytes;
    }
    return true;
}

/* ---- copy engines ---------------------------------------------------------------------------- */

/* Returns the bytes that are adjacent on both sides, and the number of such runs. */
static uint64_t run_of(const dray__cuda_item *item, dray_copy *left)
{
    const dray_copy *c = &item->copy;
    uint64_t run = dray_dtype_size((dray_dtype)c->source_dtype);
    *left = *c;
    for (uint32_t d = c->ndim; d-- > 0;) {
        if (c->extent[d] != 1 &&
            (c->source_stride[d] != (int64_t)run || c->destination_stride[d] != (int64_t)run))
            break;
        run *= (uint64_t)c->extent[d];
        left->extent[d] = 1;
    }
    return run;
}

static bool for_engine(const program_builder *b, const dray__cuda_item *item, bool one_lane)
{
    dray_copy left;
    uint64_t least = b->options->engine_bytes;
    if (!item->destination_base || item->copy.source_dtype != item->copy.destination_dtype ||
        (b->options->sums & (DRAY__CUDA_SUM_SOURCE | DRAY__CUDA_SUM_WRITTEN)))
        return false;
    if (!least) /* Copy engines that read from several GPUs at once are slower than the kernel. */
        least = item->host ? HOST_MIN : one_lane ? ENGINE_MIN : UINT64_MAX;
    return run_of(item, &left) >= least;
}

static bool add_runs(program_builder *b, const dray__cuda_item *item)
{
    dray__gpu_program *p = b->program;
    dray_copy left;
    uint64_t bytes = run_of(item, &left);
    int64_t at[DRAY_MAX_DIMS] = {0};
    for (;;) {
        dray__gpu_run run = {item->source_base + left.source_offset,
                             item->destination_base + left.destination_offset,
                             bytes,
                             p->run_count,
                             item->phase,
                             item->lane};
        uint32_t d = left.ndim;
        for (uint32_t k = 0; k < left.ndim; k++) {
            run.source += (uint64_t)(at[k] * left.source_stride[k]);
            run.destination += (uint64_t)(at[k] * left.destination_stride[k]);
        }
        if (!DRAY__PUSH(p->runs, p->run_count, b->run_capacity, run))
            return false;
        p->engine_bytes += bytes;
        while (d > 0 && ++at[d - 1] == left.extent[d - 1])
            at[--d] = 0;
        if (d == 0)
            return true;
    }
}

/* Returns the item that sums the bytes that copy engines wrote at the item's destination. */
static dray__cuda_item back_item(const dray__cuda_item *item)
{
    dray__cuda_item back = *item;
    back.source_base = item->destination_base;
    back.destination_base = 0;
    back.copy.source_offset = item->copy.destination_offset;
    memcpy(back.copy.source_stride, item->copy.destination_stride, sizeof back.copy.source_stride);
    return back;
}

static int add_items(program_builder *b, const dray_layout *layout, const dray__cuda_item *items,
                     uint64_t count, dray_error *error)
{
    const uint32_t of_quants = DRAY__CUDA_SUM_SCALES | DRAY__CUDA_SUM_MOST;
    bool sums = (b->options->sums & ~of_quants) != 0, one_lane = true;
    for (uint64_t i = 1; i < count; i++)
        one_lane = one_lane && items[i].lane == items[0].lane;
    for (uint64_t i = 0; i < count; i++) {
        const dray_tensor_info *tensor = !sums ? NULL
                                         : items[i].of
                                             ? items[i].of
                                             : dray_layout_tensor(layout, items[i].copy.tensor);
        int rc = dray__gpu_check(&items[i], tensor, sums, i, error);
        bool fine = true;
        if (rc)
            return rc;
        if (!items[i].destination_base && !(b->options->sums & DRAY__CUDA_SUM_SOURCE))
            continue;
        if (!for_engine(b, &items[i], one_lane)) {
            fine = add_pieces(b, &items[i], tensor, i, false);
        } else {
            fine = add_runs(b, &items[i]);
            dray__cuda_item back = back_item(&items[i]);
            if (fine && (b->options->sums & DRAY__CUDA_SUM_BACK))
                fine = add_pieces(b, &back, tensor, i, true);
        }
        if (!fine)
            return dray__nomem(error);
        if (items[i].phase >= b->program->phases)
            b->program->phases = items[i].phase + 1;
    }
    return DRAY_OK;
}

/* ---- boxes ----------------------------------------------------------------------------------- */

static int check_quant(const dray__cuda_quant *q, const dray_tensor_info *tensor, bool sums,
                       uint64_t number, dray_error *error)
{
    unsigned long long n = number;
    bool known = q->kind == DRAY_TRANSFORM_QUANTISE || q->kind == DRAY_TRANSFORM_DEQUANTISE ||
                 q->kind == DRAY_TRANSFORM_MOST || q->kind == DRAY__CUDA_GLOBAL;
    bool groups = q->quant_kind >= DRAY_QUANT_MXFP8 && q->kind != DRAY_TRANSFORM_MOST;
    if (q->kind == DRAY__CUDA_GLOBAL && q->destination && q->ndim == 1)
        return DRAY_OK;
    if (!known || q->ndim < 1 || q->ndim > DRAY_MAX_DIMS ||
        (groups
             ? q->kind != DRAY_TRANSFORM_QUANTISE || !dray__format_known(q->dtype, q->quant_kind) ||
                   !dray__cuda_groups(q->cell[q->ndim - 1])
             : !dray__quant_known(q->dtype, q->quant_dtype)))
        return dray__fail(error, DRAY_EINVALID, "transform %llu: kind %d of dtypes %d and %d", n,
                          (int)q->kind, (int)q->dtype, (int)q->quant_dtype);
    if (sums && (!tensor || q->ndim != (tensor->ndim ? tensor->ndim : 1)))
        return dray__fail(error, DRAY_EINVALID,
                          "transform %llu: is of tensor %u with %u dimensions, which the layout "
                          "lacks",
                          n, (unsigned)q->tensor, (unsigned)q->ndim);
    uint64_t rows = 1;
    for (uint32_t d = 0; d < q->ndim; d++) {
        int64_t end = q->start[d] + q->extent[d];
        bool whole =
            q->kind != DRAY_TRANSFORM_QUANTISE || (q->cell[d] > 0 && q->start[d] % q->cell[d] == 0);
        if (q->start[d] < 0 || q->extent[d] < 1 || q->extent[d] > UINT32_MAX || q->cell[d] < 1 ||
            !whole || (tensor && tensor->ndim && end > tensor->shape[d]))
            return dray__fail(error, DRAY_EINVALID,
                              "transform %llu: dimension %u: %lld elements from %lld on, in cells "
                              "of %lld",
                              n, d, (long long)q->extent[d], (long long)q->start[d],
                              (long long)q->cell[d]);
        rows *= d + 1 < q->ndim ? (uint64_t)q->extent[d] : 1;
        if (groups && rows > UINT32_MAX)
            return dray__fail(error, DRAY_EINVALID,
                              "transform %llu: expected at most %u rows, found %llu", n, UINT32_MAX,
                              (unsigned long long)rows);
    }
    return DRAY_OK;
}

/* Says whether eight adjacent elements may be moved at once: the kernels can do so for these
 * types when everything is aligned. */
static bool eight(const dray__gpu_quant *g, uint64_t in, uint64_t out)
{
    uint16_t floats = in == 1 ? g->to : g->from, bits = in == 1 ? g->from : g->to;
    if (bits != DRAY_F8E4M3 || (floats != DRAY_BF16 && floats != DRAY_F32))
        return false;
    uint64_t in_align = in == 1 ? 8 : 16, out_align = out == 1 ? 8 : 16;
    for (int d = 0; d < 3; d++)
        if (g->extent[d] > 1 && ((uint64_t)g->source_stride[d] % in_align != 0 ||
                                 (uint64_t)g->destination_stride[d] % out_align != 0))
            return false;
    return g->source % in_align == 0 && g->destination % out_align == 0 &&
           g->source_stride[3] == (int64_t)in && g->destination_stride[3] == (int64_t)out &&
           g->start[3] % 8 == 0 && g->extent[3] % 8 == 0 && g->cell[3] % 8 == 0;
}

bool dray__cuda_groups(int64_t group)
{
    return group >= 8 && group <= DRAY__GPU_GROUP && (group & (group - 1)) == 0;
}

/* Elements of a tile of groups: enough to make the work that is done once a tile negligible. */
enum { GROUP_TILE = 8 * DRAY__GPU_CELL };

/* Fills the fields that only boxes of groups have. */
static void group_box(const dray__cuda_quant *q, dray__gpu_quant *g)
{
    uint64_t rows = g->extent[2], in, align = 4, out = 1;
    uint64_t together = g->cell[2], tile = GROUP_TILE / g->extent[3];
    in = dray_dtype_size((dray_dtype)g->from);
    g->format = (uint16_t)q->quant_kind;
    g->as = (uint16_t)q->as;
    g->second = q->second;
    if (g->format == DRAY_QUANT_MXFP8)
        align = 8;
    else if (g->format >= DRAY_QUANT_INT4)
        out = 4;
    g->packed = g->destination % align == 0 && g->destination_stride[3] == (int64_t)out;
    g->word = g->source % 16 == 0 && g->source_stride[3] == (int64_t)in ? 8 : 1;
    for (int d = 0; d < 3; d++) {
        if (g->extent[d] > 1 && (uint64_t)g->source_stride[d] % 16 != 0)
            g->word = 1;
        if (g->extent[d] > 1 && (uint64_t)g->destination_stride[d] % align != 0)
            g->packed = 0;
    }
    tile = tile > 1 ? tile : 1;
    tile = tile < DRAY__GPU_GROUP_ROWS ? tile : DRAY__GPU_GROUP_ROWS;
    tile = (tile + together - 1) / together * together;
    g->tile_rows = (uint32_t)(tile < rows ? tile : rows);
    g->strips = (uint32_t)((rows + g->tile_rows - 1) / g->tile_rows);
}

static dray__gpu_quant box_of(const dray__cuda_quant *q, const dray_tensor_info *tensor)
{
    bool quantise = q->kind != DRAY_TRANSFORM_DEQUANTISE;
    int32_t from = quantise ? q->dtype : q->quant_dtype, to = quantise ? q->quant_dtype : q->dtype;
    dray__gpu_quant g = {.source = q->source,
                         .destination = q->destination,
                         .scales = q->scales,
                         .from = (uint16_t)from,
                         .to = (uint16_t)to,
                         .scale_format = (uint16_t)q->scale_format};
    if (q->quant_kind == DRAY_QUANT_DEEPGEMM)
        g.scale_format = DRAY__GPU_BYTES;
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        uint32_t front = DRAY_MAX_DIMS - q->ndim;
        bool used = d >= front;
        uint32_t i = used ? d - front : 0;
        g.source_stride[d] = used ? q->source_stride[i] : 0;
        g.destination_stride[d] = used ? q->destination_stride[i] : 0;
        g.scale_stride[d] = used ? q->scale_stride[i] : 0;
        g.second_stride[d] = used ? q->second_stride[i] : 0;
        g.start[d] = used ? (uint64_t)q->start[i] : 0;
        g.extent[d] = used ? (uint64_t)q->extent[i] : 1;
        g.cell[d] = used ? (uint64_t)q->cell[i] : 1;
        g.shape[d] = used && tensor && tensor->ndim ? (uint64_t)tensor->shape[i] : 1;
        g.scale_shape[d] = (g.shape[d] - 1) / g.cell[d] + 1;
        g.first_cell[d] = g.start[d] / g.cell[d];
        g.cells[d] = (g.start[d] + g.extent[d] - 1) / g.cell[d] + 1 - g.first_cell[d];
    }
    if (q->quant_kind >= DRAY_QUANT_MXFP8 && q->kind == DRAY_TRANSFORM_QUANTISE)
        group_box(q, &g);
    else
        g.word =
            eight(&g, dray_dtype_size((dray_dtype)from), dray_dtype_size((dray_dtype)to)) ? 8 : 1;
    return g;
}

/* Counts the elements of the largest cell of the box, and its rows. */
static uint64_t cell_elements(const dray__gpu_quant *g, uint64_t *rows)
{
    *rows = 1;
    uint64_t columns = 1;
    for (int d = 0; d < DRAY_MAX_DIMS; d++) {
        uint64_t n = g->cell[d] < g->extent[d] ? g->cell[d] : g->extent[d];
        if (d < 3)
            *rows *= n;
        else
            columns = n;
    }
    return *rows * columns;
}

/* Adds the work of writing a global scale, which is one number. */
static bool add_global(program_builder *b, const dray__cuda_quant *q, uint64_t number)
{
    dray__gpu_program *p = b->program;
    work w = {.phase = q->phase,
              .lane = q->lane,
              .index = (uint32_t)p->quant_count,
              .kernel = DRAY__GPU_dray_globals,
              .tiles = 1,
              .bytes = sizeof(float),
              .weight = FAR};
    p->quants[p->quant_count++] = (dray__gpu_quant){.destination = q->destination,
                                                    .first_most = q->global,
                                                    .sum = (uint32_t)number,
                                                    .as = (uint16_t)q->as};
    if (q->phase >= p->phases)
        p->phases = q->phase + 1;
    return add_work(b, &w);
}

static const int kernel_of_format[] = {[DRAY_QUANT_MXFP8] = DRAY__GPU_dray_mxfp8,
                                       [DRAY_QUANT_MXFP4] = DRAY__GPU_dray_mxfp4,
                                       [DRAY_QUANT_NVFP4] = DRAY__GPU_dray_nvfp4,
                                       [DRAY_QUANT_INT4] = DRAY__GPU_dray_int4,
                                       [DRAY_QUANT_INT4_ZERO] = DRAY__GPU_dray_int4_zero};

/* Adds a box of groups. Its elements are read once. */
static bool add_groups(program_builder *b, const dray__cuda_quant *q, dray__gpu_quant *g,
                       uint64_t number)
{
    dray__gpu_program *p = b->program;
    uint64_t elements = g->extent[0] * g->extent[1] * g->extent[2] * g->extent[3];
    g->sum = (uint32_t)number;
    g->first_most = q->global;
    work w = {.phase = q->phase,
              .lane = q->lane,
              .index = (uint32_t)p->quant_count,
              .kernel = kernel_of_format[g->format],
              .tiles = g->extent[0] * g->extent[1] * g->strips,
              .bytes = g->format == DRAY_QUANT_MXFP8 ? elements : elements / 2,
              .weight = FAR};
    p->kernel_bytes += w.bytes;
    p->quants[p->quant_count++] = *g;
    if (q->phase >= p->phases)
        p->phases = q->phase + 1;
    return add_work(b, &w);
}

/* Can a block's threads hold the cells of this box, each thread in one column of eights
 * (dray_cells)? `back` says that the written elements are read back. */
static bool is_held(const dray__gpu_quant *g, bool back)
{
    uint64_t columns = g->cell[3] / 8;
    return g->word == 8 && g->from == DRAY_BF16 && g->to == DRAY_F8E4M3 && !back &&
           g->extent[0] == 1 && g->extent[1] == 1 && g->cell[2] <= DRAY__GPU_ROWS &&
           g->cell[3] <= DRAY__GPU_ROWS && g->cell[2] * g->cell[3] <= DRAY__GPU_CELL &&
           columns > 0 && columns <= DRAY__GPU_THREADS &&
           g->cell[2] <= DRAY__GPU_HELD * (DRAY__GPU_THREADS / columns);
}

static bool add_box(program_builder *b, const dray__cuda_quant *q, const dray_tensor_info *tensor,
                    uint64_t number)
{
    dray__gpu_program *p = b->program;
    if (q->kind == DRAY__CUDA_GLOBAL)
        return add_global(b, q, number);
    dray__gpu_quant g = box_of(q, tensor);
    if (g.format)
        return add_groups(b, q, &g, number);
    uint64_t rows, elements = cell_elements(&g, &rows);
    uint64_t cells = g.cells[0] * g.cells[1] * g.cells[2] * g.cells[3];
    uint64_t in = dray_dtype_size((dray_dtype)g.from), out = dray_dtype_size((dray_dtype)g.to);
    bool quantise = q->kind == DRAY_TRANSFORM_QUANTISE;
    bool most = q->kind == DRAY_TRANSFORM_MOST;
    uint64_t strip = most ? GROUP_TILE : DRAY__GPU_CELL; /* boxes of MOST are not staged */
    uint64_t strips = (elements + strip - 1) / strip;
    g.strips = (uint32_t)(strips < rows ? strips : rows);
    /* A single row that is too long to be staged is read twice, too. */
    if (quantise && elements > DRAY__GPU_CELL && g.strips < 2)
        g.strips = 2;
    g.sum = (uint32_t)number;
    g.first_most = p->most_count;
    work w = {.phase = q->phase,
              .lane = q->lane,
              .index = (uint32_t)p->quant_count,
              .kernel = DRAY__GPU_dray_most,
              .tiles = cells * g.strips,
              .weight = FAR};
    if (quantise && g.strips > 1) {
        w.bytes = 1;
        p->most_count += cells;
        if (!add_work(b, &w))
            return false;
    } else if (quantise) {
        w.shared = (uint32_t)(elements * (g.word == 8 ? in : sizeof(uint32_t)));
    }
    bool held = quantise && g.strips == 1 && is_held(&g, b->options->sums & DRAY__CUDA_SUM_BACK);
    if (held)
        w.shared = 0;
    w.kernel = held       ? DRAY__GPU_dray_cells
               : quantise ? DRAY__GPU_dray_quantise
               : most     ? DRAY__GPU_dray_largest
                          : DRAY__GPU_dray_dequantise;
    w.bytes = g.extent[0] * g.extent[1] * g.extent[2] * g.extent[3] * out;
    p->kernel_bytes += w.bytes;
    p->quants[p->quant_count++] = g;
    if (q->phase >= p->phases)
        p->phases = q->phase + 1;
    return add_work(b, &w);
}

static int add_boxes(program_builder *b, const dray_layout *layout, uint64_t items,
                     dray_error *error)
{
    const dray__cuda_job_options *o = b->options;
    for (uint64_t i = 0; i < o->quant_count; i++) {
        const dray__cuda_quant *q = &o->quants[i];
        const dray_tensor_info *tensor = o->sums ? dray_layout_tensor(layout, q->tensor) : NULL;
        int rc = check_quant(q, tensor, o->sums != 0, i, error);
        if (rc)
            return rc;
        if (!add_box(b, q, tensor, items + i))
            return dray__nomem(error);
    }
    return DRAY_OK;
}

/* ---- deltas ---------------------------------------------------------------------------------- */

static int add_deltas(program_builder *b, uint64_t before, dray_error *error)
{
    const dray__cuda_job_options *o = b->options;
    dray__gpu_program *p = b->program;
    for (uint64_t i = 0; i < o->delta_count; i++) {
        const dray__cuda_delta *d = &o->deltas[i];
        bool find = d->kind == DRAY__CUDA_FIND;
        dray__gpu_delta *g = &p->deltas[p->delta_count];
        int rc = dray__gpu_delta_of(d, (uint32_t)(before + (find ? 0 : i)), g, error);
        if (rc)
            return rc;
        work w = {.phase = d->phase,
                  .lane = d->lane,
                  .index = (uint32_t)p->delta_count++,
                  .kernel = find ? DRAY__GPU_dray_delta_find : DRAY__GPU_dray_delta_apply,
                  .tiles = 1,
                  .bytes = g->out,
                  .weight = 1};
        for (int k = 0; k < 4; k++) {
            w.tiles *= find ? g->slices[k] : g->crossed[k];
            w.bytes *= find ? g->extent[k] : g->wanted[k];
        }
        p->kernel_bytes += w.bytes;
        if (d->phase >= p->phases)
            p->phases = d->phase + 1;
        if (!add_work(b, &w))
            return dray__nomem(error);
    }
    return DRAY_OK;
}

/* ---- tiles ----------------------------------------------------------------------------------- */

static int by_step(const void *left, const void *right)
{
    const work *a = left, *b = right;
    if (a->phase != b->phase)
        return a->phase < b->phase ? -1 : 1;
    if (a->back != b->back)
        return a->back ? 1 : -1;
    if (a->kernel != b->kernel)
        return a->kernel < b->kernel ? -1 : 1;
    if (a->lane != b->lane)
        return a->lane < b->lane ? -1 : 1;
    return a->index < b->index ? -1 : 1;
}

static bool same_step(const work *a, const work *b)
{
    return a->phase == b->phase && a->back == b->back && a->kernel == b->kernel;
}

/* The tiles of a lane that are not placed yet. Lanes are interleaved such that all end at the same
 * time. */
typedef struct lane {
    const work *at, *end;
    uint64_t tile;       /* of *at */
    uint64_t given, all; /* bytes */
} lane;

/* Returns the lane that is the furthest behind. */
static lane *next_lane(lane *lanes, uint64_t count)
{
    lane *best = NULL;
    double least = 2;
    for (uint64_t i = 0; i < count; i++) {
        double share = (double)lanes[i].given / (double)lanes[i].all;
        if (lanes[i].at < lanes[i].end && share < least) {
            least = share;
            best = &lanes[i];
        }
    }
    return best;
}

static bool add_step(dray__gpu_program *p, const dray__gpu_step *step, uint64_t *capacity)
{
    return DRAY__PUSH(p->steps, p->step_count, *capacity, *step);
}

/* Adds all tiles of works[0..count), which use the same kernel, as launches of bounded size. */
static bool add_tiles(program_builder *b, const work *works, uint64_t count,
                      uint64_t *step_capacity)
{
    dray__gpu_program *p = b->program;
    uint64_t lanes = 0;
    uint64_t most = FAR * (b->options->launch_bytes ? b->options->launch_bytes : LAUNCH);
    lane *lane_of = calloc(count, sizeof *lane_of);
    if (!lane_of)
        return false;
    uint32_t shared = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (i == 0 || works[i].lane != works[i - 1].lane)
            lane_of[lanes++].at = &works[i];
        lane_of[lanes - 1].end = &works[i + 1];
        lane_of[lanes - 1].all += works[i].bytes;
        shared = works[i].shared > shared ? works[i].shared : shared;
    }
    dray__gpu_step step = {
        works->phase, works->kernel, p->tile_count, 0, 0, shared, works->back, 0};
    bool fine = true;
    for (lane *l; fine && (l = next_lane(lane_of, lanes));) {
        uint64_t bytes = l->at->bytes / l->at->tiles;
        p->tiles[p->tile_count++] = (dray__gpu_tile){l->at->index, (uint32_t)l->tile};
        l->given += bytes;
        step.bytes += bytes * l->at->weight;
        step.behind = l->at->behind > step.behind ? l->at->behind : step.behind;
        if (++l->tile == l->at->tiles) {
            l->at++;
            l->tile = 0;
        }
        if (++step.count * 2 > UINT32_MAX || step.bytes >= most) {
            fine = add_step(p, &step, step_capacity);
            step.first = p->tile_count;
            step.count = step.bytes = step.behind = 0;
        }
    }
    if (fine && step.count)
        fine = add_step(p, &step, step_capacity);
    free(lane_of);
    return fine;
}

static int add_all_tiles(program_builder *b, dray_error *error)
{
    dray__gpu_program *p = b->program;
    uint64_t tiles = 0, step_capacity = 0;
    for (uint64_t i = 0; i < b->count; i++) {
        tiles += b->works[i].tiles;
        if (b->works[i].tiles > UINT32_MAX)
            return dray__fail(error, DRAY_EINVALID, "a rectangle of more than %u tiles",
                              UINT32_MAX);
    }
    p->tiles = malloc((tiles + 1) * sizeof *p->tiles);
    if (!p->tiles)
        return dray__nomem(error);
    if (b->count)
        qsort(b->works, b->count, sizeof *b->works, by_step);
    for (uint64_t i = 0, n; i < b->count; i += n) {
        n = 1;
        while (i + n < b->count && same_step(&b->works[i], &b->works[i + n]))
            n++;
        if (!add_tiles(b, b->works + i, n, &step_capacity))
            return dray__nomem(error);
    }
    return DRAY_OK;
}

static int by_phase(const void *left, const void *right)
{
    const dray__gpu_run *a = left, *b = right;
    if (a->phase != b->phase)
        return a->phase < b->phase ? -1 : 1;
    if (a->lane != b->lane)
        return a->lane < b->lane ? -1 : 1;
    return a->number < b->number ? -1 : 1;
}

/* Interleaves the lanes within each phase, one run of each in turn. */
static bool order_runs(dray__gpu_program *p)
{
    dray__gpu_run *sorted = malloc((p->run_count + 1) * sizeof *sorted);
    uint64_t *at = calloc(p->run_count + 1, sizeof *at), done = 0;
    if (!sorted || !at) {
        free(sorted);
        free(at);
        return false;
    }
    if (p->run_count)
        qsort(p->runs, p->run_count, sizeof *p->runs, by_phase);
    for (uint64_t i = 0, end; i < p->run_count; i = end) {
        uint64_t lanes = 0;
        for (end = i; end < p->run_count && p->runs[end].phase == p->runs[i].phase; end++)
            if (end == i || p->runs[end].lane != p->runs[end - 1].lane)
                at[lanes++] = end;
        at[lanes] = end;
        for (uint64_t turn = 0, given = 1; given; turn++) {
            given = 0;
            for (uint64_t l = 0; l < lanes; l++)
                if (at[l] + turn < (l + 1 < lanes ? at[l + 1] : end)) {
                    sorted[done++] = p->runs[at[l] + turn];
                    given = 1;
                }
        }
    }
    free(p->runs);
    free(at);
    p->runs = sorted;
    return true;
}

static int by_need(const void *left, const void *right)
{
    const dray__gpu_step *a = left, *b = right;
    if (a->phase != b->phase)
        return a->phase < b->phase ? -1 : 1;
    if (a->back != b->back)
        return a->back ? 1 : -1;
    if (a->behind != b->behind)
        return a->behind < b->behind ? -1 : 1;
    return a->first < b->first ? -1 : 1;
}

/* Orders steps such that reading back begins as soon as the runs that wrote the bytes have ended.
 * `behind` is converted from numbers of runs to positions in their order. */
static bool order_steps(dray__gpu_program *p)
{
    /* places[n]: the position behind all runs with numbers smaller than n. */
    uint64_t *places = calloc(p->run_count + 1, sizeof *places);
    if (!places)
        return false;
    for (uint64_t i = 0; i < p->run_count; i++)
        places[p->runs[i].number + 1] = i + 1;
    for (uint64_t i = 1; i <= p->run_count; i++)
        places[i] = places[i - 1] > places[i] ? places[i - 1] : places[i];
    for (uint64_t i = 0; i < p->step_count; i++)
        p->steps[i].behind = places[p->steps[i].behind];
    if (p->step_count)
        qsort(p->steps, p->step_count, sizeof *p->steps, by_need);
    free(places);
    return true;
}

int dray__gpu_compile(const dray_layout *layout, const dray__cuda_item *items, uint64_t count,
                      const dray__cuda_job_options *options, dray__gpu_program *out,
                      dray_error *error)
{
    program_builder b = {.program = out, .options = options};
    int rc = DRAY_OK;
    *out = (dray__gpu_program){0};
    if (options->sums && !layout)
        return dray__fail(error, DRAY_EINVALID, "checksums need the destination's layout");
    if (count + options->quant_count + options->delta_count >= UINT32_MAX)
        return dray__fail(error, DRAY_EINVALID, "more than %u rectangles", UINT32_MAX);
    out->most_count = out->given_most = options->most_count;
    out->quants = calloc(options->quant_count + 1, sizeof *out->quants);
    out->deltas = calloc(options->delta_count + 1, sizeof *out->deltas);
    if (!out->quants || !out->deltas)
        rc = dray__nomem(error);
    if (!rc)
        rc = add_items(&b, layout, items, count, error);
    if (!rc)
        rc = add_boxes(&b, layout, count, error);
    if (!rc)
        rc = add_deltas(&b, count + options->quant_count, error);
    if (!rc)
        rc = add_all_tiles(&b, error);
    if (!rc && (!order_runs(out) || !order_steps(out)))
        rc = dray__nomem(error);
    free(b.works);
    if (rc)
        dray__gpu_program_free(out);
    return rc;
}

void dray__gpu_program_free(dray__gpu_program *p)
{
    free(p->pieces);
    free(p->quants);
    free(p->deltas);
    free(p->tiles);
    free(p->steps);
    free(p->runs);
    *p = (dray__gpu_program){0};
}
