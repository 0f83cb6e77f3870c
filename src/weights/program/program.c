/* Compiles ops into jobs (program.h). */
#include "weights/program/compile.h"

#include "base/arena.h"
#include "base/error.h"
#include "memory/cuda_memory.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static bool is_gpu_kind(int32_t kind)
{
    return kind == DRAY_REGION_CUDA || kind == DRAY_REGION_PINNED;
}

/* The GPU state of the sources. */
struct programs {
    dray__program *first;
    uint8_t *transforms; /* [transform]: whether GPUs take it; 0: unknown, 1: yes, 2: no */
};

static void forget(void *kept)
{
    struct programs *programs = kept;
    for (dray__program *p; (p = programs->first);) {
        programs->first = p->next;
        dray__program_free(p);
    }
    free(programs->transforms);
    free(programs);
}

static struct programs *programs_of(const dray__transfer *h)
{
    return dray__kept_make(&h->sources->kept, forget, sizeof(struct programs));
}

/* NVFP4: returns true when GPUs take all transforms that share a global scale. GPUs compute it and
 * use it, or do neither. */
static bool takes_shared(const dray__transfer *h, uint32_t index, uint8_t *known)
{
    const dray_transform *t = dray_plan_transforms(h->sources->plan);
    const dray_layout *layout = h->destination->layout;
    uint64_t count = dray_plan_transform_count(h->sources->plan);
    uint32_t shared = dray_layout_quant(layout, t[index].tensor)->shared;
    bool fits = true;
    for (int pass = 0; pass < 2; pass++)
        for (uint64_t i = 0; i < count && (pass || fits); i++) {
            if (t[i].quant_kind != DRAY_QUANT_NVFP4 ||
                dray_layout_quant(layout, t[i].tensor)->shared != shared)
                continue;
            if (pass)
                known[i] = fits ? 1 : 2;
            else
                fits = dray__transform_fits(h, &t[i]);
        }
    return fits;
}

/* Returns true when GPUs take the transform. The result is kept. */
static bool takes_transform(const dray__transfer *h, uint32_t index)
{
    struct programs *programs = programs_of(h);
    const dray_plan *plan = h->sources->plan;
    const dray_transform *t = &dray_plan_transforms(plan)[index];
    if (h->options.strategy != DRAY_STRATEGY_DIRECT || !programs)
        return false;
    if (!programs->transforms)
        programs->transforms = calloc(dray_plan_transform_count(plan) + 1, 1);
    if (!programs->transforms)
        return false;
    uint8_t *known = &programs->transforms[index];
    if (!*known && t->quant_kind == DRAY_QUANT_NVFP4)
        return takes_shared(h, index, programs->transforms);
    if (!*known)
        *known = dray__transform_fits(h, t) || dray__dequant_fits(h, index) ? 1 : 2;
    return *known == 1;
}

bool dray__program_takes(const dray__transfer *h, const dray__op *op)
{
    const dray__source *source = &h->sources->sources[op->copy.source];
    int32_t from = dray_layout_region(source->layout, op->copy.source_region)->kind;
    if (!is_gpu_kind(from) || dray__source_remote(source, op->copy.source_region, h->sources->host))
        return false;
    if (op->transform)
        return takes_transform(h, op->transform - 1);
    const dray_region *to = h->destination->regions[op->copy.destination_region];
    return to && is_gpu_kind((int32_t)dray_region_get_kind(to)) &&
           (from == DRAY_REGION_CUDA || dray_region_get_kind(to) == DRAY_REGION_CUDA);
}

/* ---- compilation ----------------------------------------------------------------------------- */

dray__draft *dray__draft_of(dray__compiler *c, dray__cuda_device *device, uint32_t sums,
                            uint32_t step)
{
    for (uint32_t i = 0; i < c->count; i++)
        if (c->drafts[i].device == device && c->drafts[i].sums == sums && c->drafts[i].step == step)
            return &c->drafts[i];
    dray__draft *draft = dray__append(&c->drafts, sizeof *draft, c->count, &c->capacity);
    if (!draft)
        return NULL;
    *draft = (dray__draft){.device = device, .sums = sums, .step = step};
    if (step >= c->program->steps)
        c->program->steps = step + 1;
    c->count++;
    return draft;
}

static const size_t sizes[] = {[DRAY__DRAFT_ITEMS] = sizeof(dray__cuda_item),
                               [DRAY__DRAFT_QUANTS] = sizeof(dray__cuda_quant),
                               [DRAY__DRAFT_DELTAS] = sizeof(dray__cuda_delta)};

bool dray__draft_add(dray__draft *d, enum dray__draft_list list, const void *work,
                     const dray__entry *entry)
{
    if (!d)
        return false;
    uint64_t count = d->lists[list].count, capacity = d->lists[list].capacity;
    dray__entry *new = dray__append(&d->lists[list].entries, sizeof *new, count, &capacity);
    void *at = dray__append(&d->lists[list].work, sizes[list], count, &d->lists[list].capacity);
    if (!new || !at)
        return false;
    *new = *entry;
    memcpy(at, work, sizes[list]);
    d->lists[list].count++;
    return true;
}

bool dray__draft_push(dray__draft *d, const dray__cuda_item *item, const dray__entry *entry)
{
    dray__rect rect = dray__copy_rect(&item->copy);
    dray__entry counted = *entry;
    counted.elements = dray__rect_elements(&rect);
    return dray__draft_add(d, DRAY__DRAFT_ITEMS, item, &counted);
}

const dray_region *dray__source_region(const dray__compiler *c, const dray_copy *copy)
{
    const dray__source *source = &c->transfer->sources->sources[copy->source];
    return source->local ? dray__local_region(c->held[copy->source], copy->source_region)
                         : source->regions[copy->source_region];
}

dray__cuda_device *dray__pusher_of(const dray__ends *ends)
{
    dray__cuda_device *other;
    if (dray_region_get_kind(ends->from) != DRAY_REGION_CUDA ||
        dray__cuda_device_find(ends->from->device_uuid, &other, NULL) || other == ends->device ||
        dray__region_reach(ends->from, other, NULL) || dray__region_reach(ends->to, other, NULL))
        return NULL;
    return other;
}

int dray__ends_of(const dray__compiler *c, const dray_copy *copy, const dray_region *to,
                  dray__ends *out, dray_error *error)
{
    const dray__transfer *h = c->transfer;
    const dray_region *from = dray__source_region(c, copy);
    uint32_t count = h->sources->count;
    *out = (dray__ends){.from = from,
                        .to = to,
                        .device = dray_region_get_kind(to) == DRAY_REGION_CUDA ? to->device
                                                                               : from->device,
                        .lane = (copy->source + count - h->destination->rank % count) % count};
    if (!out->device || !from->device_address || !to->device_address)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "region %s or %s: no GPU of this process reaches it",
                          dray_region_name(from), dray_region_name(to));
    int rc = dray__region_reach(from, out->device, error);
    return rc ? rc : dray__region_reach(to, out->device, error);
}

bool dray__draft_read_back(dray__compiler *c, const dray__ends *ends, const dray_copy *copy,
                           uint32_t block, uint32_t step)
{
    dray__entry entry = {.block = block, .kind = DRAY__ENTRY_ARRIVED};
    dray__cuda_item item = {.copy = *copy, .source_base = ends->to->device_address, .near = true};
    item.copy.source_dtype = copy->destination_dtype;
    item.copy.source_offset = copy->destination_offset;
    memcpy(item.copy.source_stride, copy->destination_stride, sizeof copy->source_stride);
    return dray__draft_push(dray__draft_of(c, ends->device, DRAY__CUDA_SUM_SOURCE, step), &item,
                            &entry);
}

/* ---- strategies ------------------------------------------------------------------------------ */

static bool converts(const dray_copy *copy)
{
    return copy->source_dtype != copy->destination_dtype;
}

static bool shrinks(const dray_copy *copy)
{
    return dray_dtype_size((dray_dtype)copy->destination_dtype) <
           dray_dtype_size((dray_dtype)copy->source_dtype);
}

bool dray__op_alone(const dray__transfer *h, const dray__op *op)
{
    const bool *compared = h->options.compared;
    return h->options.verify && (!op->owned || (compared && !compared[op->copy.tensor]));
}

/* As in sources/memory.c: when the group's sum is compared with the announced one, the sum of the
 * destination's bytes is enough. */
static uint8_t kind_of(const dray__transfer *h, const dray__op *op)
{
    if (!h->options.verify)
        return DRAY__ENTRY_UNCHECKED;
    return dray__op_alone(h, op) || converts(&op->copy) ? DRAY__ENTRY_SUMMED
                                                        : DRAY__ENTRY_READ_BACK;
}

static const uint32_t sums_of[] = {
    [DRAY__ENTRY_UNCHECKED] = 0,
    [DRAY__ENTRY_READ_BACK] = DRAY__CUDA_SUM_BACK,
    [DRAY__ENTRY_SUMMED] = DRAY__CUDA_SUM_SOURCE | DRAY__CUDA_SUM_WRITTEN | DRAY__CUDA_SUM_BACK,
    [DRAY__ENTRY_SENT] = DRAY__CUDA_SUM_SOURCE | DRAY__CUDA_SUM_WRITTEN,
};

static bool same_gpu(const dray_region *a, const dray_region *b)
{
    return dray_region_get_kind(a) == DRAY_REGION_CUDA &&
           dray_region_get_kind(b) == DRAY_REGION_CUDA &&
           memcmp(a->device_uuid, b->device_uuid, sizeof a->device_uuid) == 0;
}

static dray__cuda_item item_of(const dray__ends *ends, const dray_copy *copy)
{
    return (dray__cuda_item){.copy = *copy,
                             .source_base = ends->from->device_address,
                             .destination_base = ends->to->device_address,
                             .lane = ends->lane,
                             .near = same_gpu(ends->from, ends->to),
                             .host = dray_region_get_kind(ends->from) == DRAY_REGION_PINNED ||
                                     dray_region_get_kind(ends->to) == DRAY_REGION_PINNED};
}

static dray__entry entry_of(const dray__transfer *h, const dray__op *op, uint8_t kind)
{
    return (dray__entry){.twice = dray__op_alone(h, op),
                         .block = op->block,
                         .tensor = op->copy.tensor,
                         .dtype = (uint8_t)op->copy.source_dtype,
                         .kind = kind,
                         .owned = op->owned};
}

bool dray__draft_read_again(dray__compiler *c, dray__cuda_device *device,
                            const dray__cuda_item *item, const dray__entry *moved, uint32_t step)
{
    if (!moved->twice)
        return true;
    dray__entry entry = {.block = moved->block, .kind = DRAY__ENTRY_AGAIN};
    dray__cuda_item again = *item;
    again.copy.destination_dtype = item->copy.source_dtype;
    again.destination_base = 0;
    again.phase = 0;
    return dray__draft_push(dray__draft_of(c, device, DRAY__CUDA_SUM_SOURCE, step), &again, &entry);
}

bool dray__draft_move(dray__compiler *c, const dray__ends *ends, const dray_copy *copy,
                      const dray__op *op, uint32_t step, uint32_t phase)
{
    dray__entry entry = entry_of(c->transfer, op, kind_of(c->transfer, op));
    dray__cuda_item item = item_of(ends, copy);
    item.phase = phase;
    dray__draft *draft = dray__draft_of(c, ends->device, sums_of[entry.kind], step);
    return dray__draft_push(draft, &item, &entry) &&
           dray__draft_read_again(c, ends->device, &item, &entry, step);
}

/* ---- rounds: between GPUs that only give and GPUs that only take, links carry most when all ranks
 * read at once, no two of them from the same GPU. When GPUs do both, reading from all at once is as
 * fast, and no rank waits for one that began late. */

/* Rounds are used when every source gives at least this part of the bytes of the largest one. */
#define EVEN 0.75

/* Are about the same bytes read from all sources on other GPUs? Else rounds of different lengths
 * would overlap. */
static bool is_even(const dray__compiler *c, const uint64_t *bytes)
{
    uint64_t least = UINT64_MAX, most = 0;
    for (uint32_t i = 0; i < c->rounds; i++) {
        uint64_t of = bytes[(c->turn + i) % c->transfer->sources->count];
        least = of < least ? of : least;
        most = of > most ? of : most;
    }
    return (double)least >= EVEN * (double)most;
}

static int find_rounds(dray__compiler *c, dray_error *error)
{
    const dray__transfer *h = c->transfer;
    uint64_t here = dray__layout_device(h->destination->layout);
    uint32_t count = h->sources->count;
    for (uint32_t i = 0; here && i < count; i++)
        if (dray__layout_device(h->sources->sources[i].layout) == here)
            return DRAY_OK;
    uint64_t *bytes = calloc((size_t)count + 1, sizeof *bytes);
    if (!bytes)
        return dray__nomem(error);
    c->turn = h->destination->rank % count; /* a rank's first source has its number */
    c->rounds = count;
    for (uint64_t i = 0; i < c->program->count; i++) {
        const dray__op *op = &h->sources->ops[c->program->ops[i]];
        if (!op->transform)
            bytes[op->copy.source] += dray__copy_bytes(&op->copy);
    }
    if (!is_even(c, bytes))
        c->rounds = 0;
    free(bytes);
    return DRAY_OK;
}

static uint32_t round_of(const dray__compiler *c, const dray_copy *copy)
{
    uint32_t count = c->transfer->sources->count;
    return c->rounds ? (copy->source + count - c->turn) % count : 0;
}

/* The number of steps into which the pushes of all sources are cut. The bytes of one step are read
 * back during the next. */
enum { PUSH_STEPS = 8 };

/* Returns the step in which the next copy out of a source is pushed; -1 when out of memory. */
static int64_t push_step(dray__compiler *c, const dray__ends *ends, const dray_copy *copy)
{
    uint32_t sources = c->transfer->sources->count;
    uint64_t parts = sources < PUSH_STEPS ? PUSH_STEPS / sources : 1;
    uint64_t quota = c->program->bytes / (parts * sources) + 1;
    if (!c->pushed)
        c->pushed = calloc(sources, sizeof *c->pushed);
    if (!c->pushed)
        return -1;
    uint64_t part = c->pushed[copy->source] / quota;
    c->pushed[copy->source] += dray__copy_bytes(copy);
    return (int64_t)(ends->lane * parts + (part < parts ? part : parts - 1));
}

static int compile_op(dray__compiler *c, uint64_t index, dray_error *error)
{
    const dray__transfer *h = c->transfer;
    const dray__op *op = &h->sources->ops[index];
    dray__ends ends;
    int rc = dray__ends_of(c, &op->copy, h->destination->regions[op->copy.destination_region],
                           &ends, error);
    if (rc)
        return rc;
    dray__cuda_device *pusher = shrinks(&op->copy) ? dray__pusher_of(&ends) : NULL;
    bool pushed;
    int64_t step = pusher ? push_step(c, &ends, &op->copy) : 0;
    if (step < 0)
        return dray__nomem(error);
    if (pusher) {
        dray__cuda_item item = item_of(&ends, &op->copy);
        dray__entry entry = entry_of(h, op, DRAY__ENTRY_UNCHECKED);
        if (h->options.verify)
            entry.kind = DRAY__ENTRY_SENT;
        pushed = dray__draft_push(dray__draft_of(c, pusher, sums_of[entry.kind], (uint32_t)step),
                                  &item, &entry) &&
                 (!h->options.verify ||
                  dray__draft_read_back(c, &ends, &op->copy, op->block, (uint32_t)step + 1)) &&
                 dray__draft_read_again(c, pusher, &item, &entry, 0);
    } else {
        bool host = dray_region_get_kind(ends.from) == DRAY_REGION_PINNED ||
                    dray_region_get_kind(ends.to) == DRAY_REGION_PINNED;
        pushed = dray__draft_move(c, &ends, &op->copy, op, 0, host ? 0 : round_of(c, &op->copy));
    }
    return pushed ? DRAY_OK : dray__nomem(error);
}

static int compile_transform(dray__compiler *c, uint64_t index, dray_error *error)
{
    bool floats =
        dray_plan_transforms(c->transfer->sources->plan)[index].kind == DRAY_TRANSFORM_DEQUANTISE;
    return floats ? dray__compile_dequant(c, index, error)
                  : dray__compile_transform(c, index, error);
}

static int compile_direct(dray__compiler *c, dray_error *error)
{
    const dray__program *p = c->program;
    int even = find_rounds(c, error);
    if (even)
        return even;
    uint32_t transform = 0; /* 1 + the last one compiled; the ops of a transform are adjacent */
    for (uint64_t i = 0; i < p->count; i++) {
        const dray__op *op = &c->transfer->sources->ops[p->ops[i]];
        int rc = DRAY_OK;
        if (!op->transform)
            rc = compile_op(c, p->ops[i], error);
        else if (op->transform != transform)
            rc = compile_transform(c, op->transform - 1, error);
        transform = op->transform;
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

int dray__bucket_of(dray__compiler *c, dray__cuda_device *device, dray__filling **out,
                    dray_error *error)
{
    dray__program *p = c->program;
    const dray__cuda *cuda = dray__cuda_get(error);
    if (p->bucket_device == device) {
        *out = &c->filling;
        return DRAY_OK;
    }
    if (!cuda)
        return DRAY_EUNSUPPORTED;
    if (p->bucket_device)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "buckets on more than one GPU: the ceiling is one bucket's");
    uint64_t half = p->ceiling / 2 / DRAY__BUCKET_ALIGN * DRAY__BUCKET_ALIGN;
    if (p->strategy == DRAY_STRATEGY_DIRECT && half < DRAY__GATHERED_CELL)
        half = DRAY__GATHERED_CELL; /* the ceiling is one route's part of bucket_bytes */
    int rc = dray__cuda_enter(device, error);
    if (rc)
        return rc;
    CUresult result = cuda->cuMemAlloc(&p->bucket, 2 * half);
    dray__cuda_leave();
    if (result)
        return dray__fail_cuda(error, result, "bucket of %" PRIu64 " bytes", 2 * half);
    p->bucket_device = device;
    p->held_bytes = 2 * half;
    c->filling =
        (dray__filling){.device = device, .address = p->bucket, .half = half, .tensor = UINT32_MAX};
    *out = &c->filling;
    return DRAY_OK;
}

/* Adds one slice: into the bucket, and in the next phase out of it. */
static bool push_staged(dray__compiler *c, dray__filling *f, const dray__cuda_item *whole,
                        const dray_copy *slice, uint64_t index)
{
    const dray__transfer *h = c->transfer;
    const dray__op *op = &h->sources->ops[index];
    dray__cuda_item in = *whole, out = *whole;
    uint64_t bytes = dray__copy_bytes(slice);
    bool alone = h->options.strategy == DRAY_STRATEGY_PARAMETER && f->tensor != slice->tensor;
    if (f->used && (f->used + bytes > f->half || alone)) {
        f->group++;
        f->used = 0;
    }
    f->tensor = slice->tensor;
    uint64_t half = f->address + (f->group & 1) * f->half;
    bool verify = h->options.verify;
    dray__entry entry = entry_of(h, op, 0);
    in.copy = *slice;
    dray__copy_to_dense(&in.copy, slice->destination_dtype, f->used);
    in.destination_base = half;
    in.phase = f->group;
    out.copy = dray__copy_onwards(slice, &in.copy);
    out.source_base = half;
    out.phase = f->group + 1;
    out.lane = h->sources->count; /* local copies have their own lane */
    out.near = true;
    f->used = (f->used + bytes + DRAY__BUCKET_ALIGN - 1) / DRAY__BUCKET_ALIGN * DRAY__BUCKET_ALIGN;
    uint32_t sums = verify ? sums_of[DRAY__ENTRY_SUMMED] : 0;
    entry.kind = verify ? DRAY__ENTRY_SENT : DRAY__ENTRY_UNCHECKED;
    if (!dray__draft_push(dray__draft_of(c, f->device, sums, 0), &in, &entry) ||
        !dray__draft_read_again(c, f->device, &in, &entry, 0))
        return false;
    entry.kind = verify ? DRAY__ENTRY_DRAIN : DRAY__ENTRY_UNCHECKED;
    return dray__draft_push(dray__draft_of(c, f->device, sums, 0), &out, &entry);
}

static int compile_slices(dray__compiler *c, uint64_t index, dray_error *error)
{
    const dray__transfer *h = c->transfer;
    const dray__op *op = &h->sources->ops[index];
    dray__ends ends;
    dray__filling *f;
    dray__slicer slicer;
    dray__rect rect;
    int rc = dray__ends_of(c, &op->copy, h->destination->regions[op->copy.destination_region],
                           &ends, error);
    if (rc == DRAY_OK)
        rc = dray__bucket_of(c, ends.device, &f, error);
    if (rc)
        return rc;
    dray__cuda_item item = item_of(&ends, &op->copy);
    dray__slicer_start_copy(&slicer, &op->copy, f->half);
    for (; dray__slicer_peek(&slicer, &rect); dray__slicer_next(&slicer)) {
        dray_copy slice = dray__copy_cut(&op->copy, &rect);
        if (!push_staged(c, f, &item, &slice, index))
            return dray__nomem(error);
    }
    return DRAY_OK;
}

static int compile_staged(dray__compiler *c, dray_error *error)
{
    const dray__program *p = c->program;
    bool parameter = c->transfer->options.strategy == DRAY_STRATEGY_PARAMETER;
    uint64_t *order =
        parameter ? dray__ops_by_tensor(c->transfer->sources, p->ops, p->count) : NULL;
    int rc = order || !parameter ? DRAY_OK : dray__nomem(error);
    for (uint64_t i = 0; i < p->count && rc == DRAY_OK; i++)
        rc = compile_slices(c, order ? order[i] : p->ops[i], error);
    free(order);
    return rc;
}

/* ---- programs -------------------------------------------------------------------------------- */

void dray__program_free(dray__program *p)
{
    if (!p)
        return;
    for (uint32_t i = 0; i < p->job_count; i++) {
        dray__cuda_job_close(p->jobs[i].job);
        free(p->jobs[i].entries);
    }
    if (p->bucket_device && dray__cuda_enter(p->bucket_device, NULL) == DRAY_OK) {
        dray__cuda_get(NULL)->cuMemFree(p->bucket);
        dray__cuda_leave();
    }
    dray__waker_close(&p->waker);
    free(p->jobs);
    free(p->most);
    free(p->ops);
    free(p->serials);
    free(p);
}

static uint64_t serial_of(const dray__transfer *h, uint32_t region)
{
    const dray_region *live = h->destination->regions[region];
    return live ? live->serial : 0;
}

bool dray__program_fits(const dray__program *p, const dray__transfer *h, const uint64_t *ops,
                        uint64_t count, uint64_t ceiling)
{
    if (p->count != count || p->strategy != h->options.strategy || p->verify != h->options.verify ||
        p->ctas != h->options.ctas || p->copy_engines != h->options.copy_engines ||
        p->announced != (h->options.compared != NULL) || p->paced != (h->options.within_ns > 0) ||
        (p->strategy != DRAY_STRATEGY_DIRECT && p->ceiling != ceiling) ||
        memcmp(p->ops, ops, count * sizeof *ops) != 0)
        return false;
    for (uint32_t i = 0; i < p->serial_count; i++)
        if (p->serials[i] != serial_of(h, i))
            return false;
    return true;
}

dray__program *dray__program_new(const dray__transfer *h, const uint64_t *ops, uint64_t count,
                                 uint64_t ceiling)
{
    uint32_t regions = dray_layout_region_count(h->destination->layout);
    dray__program *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->waker = DRAY__WAKER_CLOSED;
    p->count = count;
    p->ceiling = ceiling;
    p->strategy = h->options.strategy;
    p->verify = h->options.verify;
    p->ctas = h->options.ctas;
    p->paced = h->options.within_ns > 0;
    p->copy_engines = h->options.copy_engines;
    p->announced = h->options.compared != NULL;
    p->ops = malloc((count + 1) * sizeof *p->ops);
    p->serials = malloc(((size_t)regions + 1) * sizeof *p->serials);
    if (!p->ops || !p->serials) {
        dray__program_free(p);
        return NULL;
    }
    memcpy(p->ops, ops, count * sizeof *ops);
    p->serial_count = regions;
    for (uint32_t i = 0; i < regions; i++)
        p->serials[i] = serial_of(h, i);
    for (uint64_t i = 0; i < count; i++)
        if (!h->sources->ops[ops[i]].transform)
            p->bytes += dray__copy_bytes(&h->sources->ops[ops[i]].copy);
    return p;
}

/* Shorter runs are too small for copy engines, even when kernels are to be avoided. */
#define ENGINE_RUN ((uint64_t)64 << 10)

int dray__program_finish(dray__compiler *c, dray_error *error)
{
    dray__program *p = c->program;
    p->jobs = calloc((size_t)c->count + 1, sizeof *p->jobs);
    p->most = calloc((size_t)p->most_count + 1, sizeof *p->most);
    int rc = p->jobs && p->most ? dray__waker_open(&p->waker, true, error) : dray__nomem(error);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < c->count; i++) {
        dray__draft *d = &c->drafts[i];
        dray__program_job *job = &p->jobs[i];
        dray__cuda_job_options options = {.sums = d->sums,
                                          .ctas = p->paced && !p->ctas ? DRAY__PACE_CTAS : p->ctas,
                                          .paced = p->paced,
                                          .launch_bytes = p->paced ? dray__pace_bytes(p->bytes) : 0,
                                          .engine_bytes = p->copy_engines > 0   ? ENGINE_RUN
                                                          : p->copy_engines < 0 ? UINT64_MAX
                                                                                : 0,
                                          .most_count = p->most_count,
                                          .quants = d->lists[DRAY__DRAFT_QUANTS].work,
                                          .quant_count = d->lists[DRAY__DRAFT_QUANTS].count,
                                          .deltas = d->lists[DRAY__DRAFT_DELTAS].work,
                                          .delta_count = d->lists[DRAY__DRAFT_DELTAS].count};
        rc = dray__cuda_job_new(d->device, c->transfer->destination->layout,
                                d->lists[DRAY__DRAFT_ITEMS].work, d->lists[DRAY__DRAFT_ITEMS].count,
                                &options, &job->job, error);
        if (rc)
            return rc;
        p->job_count++;
        job->device = d->device;
        job->step = d->step;
        for (int list = 0; list < DRAY__DRAFT_LISTS; list++)
            job->count += d->lists[list].count;
        dray__entry *to = job->entries = calloc(job->count + 1, sizeof *job->entries);
        if (!to)
            return dray__nomem(error);
        for (int list = 0; list < DRAY__DRAFT_LISTS; to += d->lists[list++].count)
            if (d->lists[list].count)
                memcpy(to, d->lists[list].entries, d->lists[list].count * sizeof *to);
        rc = dray__waker_add(&p->waker, dray__cuda_job_fd(job->job), error);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

void dray__drafts_free(dray__compiler *c)
{
    for (uint32_t i = 0; i < c->count; i++)
        for (int list = 0; list < DRAY__DRAFT_LISTS; list++) {
            free(c->drafts[i].lists[list].work);
            free(c->drafts[i].lists[list].entries);
        }
    free(c->drafts);
    free(c->pushed);
    c->drafts = NULL;
    c->pushed = NULL;
    c->count = 0;
}

static int compile(const dray__transfer *h, dray__program *p, dray_error *error)
{
    dray__compiler c = {.transfer = h, .program = p};
    c.held = calloc((size_t)h->sources->count + 1, sizeof(dray__local *));
    int rc = c.held ? dray__sources_hold(h->sources, c.held, error) : dray__nomem(error);
    if (rc == DRAY_OK)
        rc = p->patches                            ? dray__compile_patches(&c, error)
             : p->strategy == DRAY_STRATEGY_DIRECT ? compile_direct(&c, error)
                                                   : compile_staged(&c, error);
    if (rc == DRAY_OK)
        rc = dray__program_finish(&c, error);
    dray__drafts_free(&c);
    free(c.most_numbers);
    dray__sources_release(h->sources, c.held);
    free(c.held);
    return rc;
}

/* Programs that are kept: for the destination and its staging, in two strategies. */
enum { KEPT = 4 };

static void drop_oldest(struct programs *programs)
{
    uint32_t count = 0;
    for (dray__program **at = &programs->first; *at; at = &(*at)->next)
        if (++count > KEPT) {
            dray__program *p = *at;
            *at = p->next;
            dray__program_free(p);
            return;
        }
}

int dray__program_find(const dray__route *route, dray__program **out, dray_error *error)
{
    const dray__transfer *h = route->transfer;
    bool patches = route->placement == &dray__place_patch;
    struct programs *programs = programs_of(h);
    if (!programs)
        return dray__nomem(error);
    for (dray__program **at = &programs->first, *p; (p = *at); at = &p->next)
        if (p->patches == patches &&
            dray__program_fits(p, h, route->ops, route->count, route->ceiling)) {
            *at = p->next; /* to the front, so that another route's program does not evict it */
            p->next = programs->first;
            programs->first = *out = p;
            return DRAY_OK;
        }
    dray__program *p = dray__program_new(h, route->ops, route->count, route->ceiling);
    if (p)
        p->patches = patches;
    int rc = p ? compile(h, p, error) : dray__nomem(error);
    if (rc) {
        dray__program_free(p);
        return rc;
    }
    p->next = programs->first;
    programs->first = p;
    drop_oldest(programs);
    *out = p;
    return DRAY_OK;
}
