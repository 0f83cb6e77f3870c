/* Compiling ops into jobs (program.h). */
#include "weights/program.h"

#include "base/error.h"
#include "memory/cuda_memory.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

enum { ALIGNMENT = 256 };

static bool is_gpu_kind(int32_t kind)
{
    return kind == DRAY_REGION_CUDA || kind == DRAY_REGION_PINNED;
}

bool dray__program_takes(const dray__haul *h, const dray__op *op)
{
    const dray__source *source = &h->sources->sources[op->copy.source];
    if (op->transform || dray__source_remote(source, op->copy.source_region, h->sources->host))
        return false;
    int32_t from = dray_layout_region(source->layout, op->copy.source_region)->kind;
    const dray_region *to = h->destination->regions[op->copy.destination_region];
    return to && is_gpu_kind(from) && is_gpu_kind((int32_t)dray_region_get_kind(to)) &&
           (from == DRAY_REGION_CUDA || dray_region_get_kind(to) == DRAY_REGION_CUDA);
}

/* ---- what is being compiled ------------------------------------------------------------------ */

/* One job in the making. */
struct draft {
    dray__cuda_device *device;
    uint32_t sums, step;
    dray__cuda_item *items;
    dray__entry *entries;
    uint64_t count, capacity;
};

struct compiler {
    const dray__haul *haul;
    dray__program *program;
    struct draft *drafts;
    uint32_t count;
    dray__local **held; /* one a source */
};

/* The draft for this GPU, these sums and this step; NULL: out of memory. */
static struct draft *draft_of(struct compiler *c, dray__cuda_device *device, uint32_t sums,
                              uint32_t step)
{
    for (uint32_t i = 0; i < c->count; i++)
        if (c->drafts[i].device == device && c->drafts[i].sums == sums && c->drafts[i].step == step)
            return &c->drafts[i];
    struct draft *drafts = reallocarray(c->drafts, c->count + 1, sizeof *drafts);
    if (!drafts)
        return NULL;
    c->drafts = drafts;
    drafts[c->count] = (struct draft){.device = device, .sums = sums, .step = step};
    if (step >= c->program->steps)
        c->program->steps = step + 1;
    return &drafts[c->count++];
}

static bool push(struct draft *d, const dray__cuda_item *item, uint64_t op, uint8_t kind)
{
    if (!d)
        return false;
    if (d->count == d->capacity) {
        uint64_t capacity = d->capacity ? d->capacity * 2 : 256;
        dray__cuda_item *items = reallocarray(d->items, capacity, sizeof *items);
        if (items)
            d->items = items;
        dray__entry *entries = reallocarray(d->entries, capacity, sizeof *entries);
        if (entries)
            d->entries = entries;
        if (!items || !entries)
            return false;
        d->capacity = capacity;
    }
    dray__rect rect = dray__copy_rect(&item->copy);
    d->items[d->count] = *item;
    d->entries[d->count++] = (dray__entry){op, dray__rect_elements(&rect), kind};
    return true;
}

static const dray_region *source_region(const struct compiler *c, const dray_copy *copy)
{
    const dray__source *source = &c->haul->sources->sources[copy->source];
    return source->local ? dray__local_region(c->held[copy->source], copy->source_region)
                         : source->regions[copy->source_region];
}

static int hold(struct compiler *c, dray_error *error)
{
    const dray__sources *s = c->haul->sources;
    c->held = calloc((size_t)s->count + 1, sizeof(dray__local *));
    if (!c->held)
        return dray__nomem(error);
    for (uint32_t i = 0; i < s->count; i++)
        if (s->sources[i].local && !(c->held[i] = dray__local_hold(s->sources[i].token)))
            return dray__fail(error, DRAY_EDEAD, "publisher %s (member %" PRIu64 ") closed",
                              s->sources[i].name, s->sources[i].member);
    return DRAY_OK;
}

/* Whom this rank begins with: not all ranks with the same. */
static uint32_t lane_of(const dray__haul *h, const dray_copy *copy)
{
    uint32_t count = h->sources->count;
    return (copy->source + count - h->destination->rank % count) % count;
}

/* The two ends of an op, and the GPU that moves it: the destination's, whose process this is. */
static int ends(const struct compiler *c, const dray__op *op, dray__cuda_item *item,
                dray__cuda_device **device, dray_error *error)
{
    const dray_copy *copy = &op->copy;
    const dray_region *from = source_region(c, copy);
    const dray_region *to = c->haul->destination->regions[copy->destination_region];
    *device = dray_region_get_kind(to) == DRAY_REGION_CUDA ? to->device : from->device;
    *item = (dray__cuda_item){.copy = *copy,
                              .source_base = from->device_address,
                              .destination_base = to->device_address,
                              .lane = lane_of(c->haul, copy),
                              .host = dray_region_get_kind(from) == DRAY_REGION_PINNED ||
                                      dray_region_get_kind(to) == DRAY_REGION_PINNED};
    if (*device && item->source_base && item->destination_base) {
        int rc = dray__region_reach(from, *device, error);
        return rc ? rc : dray__region_reach(to, *device, error);
    }
    return dray__fail(error, DRAY_EUNSUPPORTED,
                      "region %s or %s: no GPU of this process reaches it", dray_region_name(from),
                      dray_region_name(to));
}

static bool converts(const dray_copy *copy)
{
    return copy->source_dtype != copy->destination_dtype;
}

/* As lane_memory.c has it: where the group's sum is compared with what was announced, the sum of
 * what lies there is enough. */
static uint8_t kind_of(const dray__haul *h, const dray__op *op)
{
    const bool *compared = h->options.compared;
    if (!h->options.verify)
        return DRAY__ENTRY_UNCHECKED;
    if (!op->owned || (compared && !compared[op->copy.tensor]) || converts(&op->copy))
        return DRAY__ENTRY_SUMMED;
    return DRAY__ENTRY_READ_BACK;
}

static const uint32_t sums_of[] = {
    [DRAY__ENTRY_UNCHECKED] = 0,
    [DRAY__ENTRY_READ_BACK] = DRAY__CUDA_SUM_BACK,
    [DRAY__ENTRY_SUMMED] = DRAY__CUDA_SUM_SOURCE | DRAY__CUDA_SUM_WRITTEN | DRAY__CUDA_SUM_BACK,
};

/* ---- strategies ------------------------------------------------------------------------------ */

static int compile_direct(struct compiler *c, dray_error *error)
{
    const dray__program *p = c->program;
    for (uint64_t i = 0; i < p->count; i++) {
        const dray__op *op = &c->haul->sources->ops[p->ops[i]];
        dray__cuda_device *device;
        dray__cuda_item item;
        int rc = ends(c, op, &item, &device, error);
        if (rc)
            return rc;
        uint8_t kind = kind_of(c->haul, op);
        if (!push(draft_of(c, device, sums_of[kind], 0), &item, p->ops[i], kind))
            return dray__nomem(error);
    }
    return DRAY_OK;
}

/* ops by tensor, otherwise in their order */
static int by_tensor(const void *a, const void *b, void *user)
{
    const dray__op *ops = user;
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    if (ops[x].copy.tensor != ops[y].copy.tensor)
        return ops[x].copy.tensor < ops[y].copy.tensor ? -1 : 1;
    return x < y ? -1 : x > y;
}

/* What fills a GPU's bucket: one half, while the other is emptied. */
struct filling {
    dray__cuda_device *device;
    uint64_t address, half, used;
    uint32_t group, tensor; /* the phase in which the half is filled */
};

static int open_buckets(struct compiler *c, struct filling *fillings, dray_error *error)
{
    dray__program *p = c->program;
    const dray__cuda *cuda = dray__cuda_get(error);
    uint32_t count = 0, most = sizeof p->buckets / sizeof *p->buckets;
    for (uint64_t i = 0; i < p->count && cuda; i++) {
        dray__cuda_device *device;
        dray__cuda_item item;
        int rc = ends(c, &c->haul->sources->ops[p->ops[i]], &item, &device, error);
        if (rc)
            return rc;
        uint32_t at = 0;
        while (at < count && fillings[at].device != device)
            at++;
        if (at == most)
            return dray__fail(error, DRAY_EUNSUPPORTED, "buckets on more than %u GPUs", most);
        if (at == count)
            fillings[count++] = (struct filling){.device = device, .tensor = UINT32_MAX};
    }
    if (!cuda)
        return DRAY_EUNSUPPORTED;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t half = p->ceiling / count / 2 / ALIGNMENT * ALIGNMENT;
        int rc = dray__cuda_enter(fillings[i].device, error);
        if (rc)
            return rc;
        CUresult result = cuda->cuMemAlloc(&p->buckets[i].address, 2 * half);
        dray__cuda_leave();
        if (result)
            return dray__fail_cuda(error, result, "bucket of %" PRIu64 " bytes", 2 * half);
        p->buckets[i].device = fillings[i].device;
        p->bucket_count++;
        p->held_bytes += 2 * half;
        fillings[i].address = p->buckets[i].address;
        fillings[i].half = half;
    }
    return DRAY_OK;
}

/* One slice: in, and in the next phase out. */
static bool push_staged(struct compiler *c, struct filling *f, const dray__cuda_item *whole,
                        const dray_copy *slice, uint64_t op)
{
    const dray__haul *h = c->haul;
    dray__cuda_item in = *whole, out = *whole;
    uint64_t bytes = dray__copy_bytes(slice);
    bool alone = h->options.strategy == DRAY_STRATEGY_PARAMETER && f->tensor != slice->tensor;
    if (f->used && (f->used + bytes > f->half || alone)) {
        f->group++;
        f->used = 0;
    }
    f->tensor = slice->tensor;
    uint64_t half = f->address + (f->group & 1) * f->half;
    uint32_t sums = h->options.verify ? sums_of[DRAY__ENTRY_SUMMED] : 0;
    in.copy = *slice;
    dray__copy_to_dense(&in.copy, slice->destination_dtype, f->used);
    in.destination_base = half;
    in.phase = f->group;
    out.copy = dray__copy_onwards(slice, &in.copy);
    out.source_base = half;
    out.phase = f->group + 1;
    out.lane = h->sources->count; /* what is local is a lane of its own */
    f->used = (f->used + bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    struct draft *d = draft_of(c, f->device, sums, 0);
    return push(d, &in, op, sums ? DRAY__ENTRY_FILL : DRAY__ENTRY_UNCHECKED) &&
           push(d, &out, op, sums ? DRAY__ENTRY_DRAIN : DRAY__ENTRY_UNCHECKED);
}

static int compile_staged(struct compiler *c, dray_error *error)
{
    struct filling fillings[sizeof c->program->buckets / sizeof *c->program->buckets];
    const dray__program *p = c->program;
    const dray__op *ops = c->haul->sources->ops;
    uint64_t *order = malloc((p->count + 1) * sizeof *order);
    int rc = order ? open_buckets(c, fillings, error) : dray__nomem(error);
    if (rc == DRAY_OK)
        memcpy(order, p->ops, p->count * sizeof *order);
    if (rc == DRAY_OK && c->haul->options.strategy == DRAY_STRATEGY_PARAMETER)
        qsort_r(order, p->count, sizeof *order, by_tensor, (void *)ops);
    for (uint64_t i = 0; i < p->count && rc == DRAY_OK; i++) {
        dray__cuda_device *device;
        dray__cuda_item item;
        dray__slicer slicer;
        dray__rect rect;
        struct filling *f = fillings;
        rc = ends(c, &ops[order[i]], &item, &device, error);
        while (rc == DRAY_OK && f->device != device)
            f++;
        dray__slicer_start_copy(&slicer, &item.copy, f->half);
        for (; rc == DRAY_OK && dray__slicer_peek(&slicer, &rect); dray__slicer_next(&slicer)) {
            dray_copy slice = dray__copy_cut(&item.copy, &rect);
            if (!push_staged(c, f, &item, &slice, order[i]))
                rc = dray__nomem(error);
        }
    }
    free(order);
    return rc;
}

/* ---- programs -------------------------------------------------------------------------------- */

static void program_free(dray__program *p)
{
    for (uint32_t i = 0; i < p->job_count; i++) {
        dray__cuda_job_close(p->jobs[i].job);
        free(p->jobs[i].entries);
    }
    for (uint32_t i = 0; i < p->bucket_count; i++)
        if (dray__cuda_enter(p->buckets[i].device, NULL) == DRAY_OK) {
            dray__cuda_get(NULL)->cuMemFree(p->buckets[i].address);
            dray__cuda_leave();
        }
    if (p->poll_fd >= 0)
        close(p->poll_fd);
    free(p->jobs);
    free(p->ops);
    free(p->serials);
    free(p);
}

void dray__programs_clear(dray__programs *programs)
{
    while (programs && programs->first) {
        dray__program *p = programs->first;
        programs->first = p->next;
        program_free(p);
    }
}

static uint64_t serial_of(const dray__haul *h, uint32_t region)
{
    const dray_region *live = h->destination->regions[region];
    return live ? live->serial : 0;
}

static bool fits(const dray__program *p, const dray__haul *h, const uint64_t *ops, uint64_t count,
                 uint64_t ceiling)
{
    if (p->count != count || p->strategy != h->options.strategy || p->verify != h->options.verify ||
        p->announced != (h->options.compared != NULL) ||
        (p->strategy != DRAY_STRATEGY_DIRECT && p->ceiling != ceiling) ||
        memcmp(p->ops, ops, count * sizeof *ops) != 0)
        return false;
    for (uint32_t i = 0; i < p->serial_count; i++)
        if (p->serials[i] != serial_of(h, i))
            return false;
    return true;
}

static dray__program *program_new(const dray__haul *h, const uint64_t *ops, uint64_t count,
                                  uint64_t ceiling)
{
    uint32_t regions = dray_layout_region_count(h->destination->layout);
    dray__program *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->poll_fd = -1;
    p->count = count;
    p->ceiling = ceiling;
    p->strategy = h->options.strategy;
    p->verify = h->options.verify;
    p->announced = h->options.compared != NULL;
    p->ops = malloc((count + 1) * sizeof *p->ops);
    p->serials = malloc(((size_t)regions + 1) * sizeof *p->serials);
    if (!p->ops || !p->serials) {
        program_free(p);
        return NULL;
    }
    memcpy(p->ops, ops, count * sizeof *ops);
    p->serial_count = regions;
    for (uint32_t i = 0; i < regions; i++)
        p->serials[i] = serial_of(h, i);
    for (uint64_t i = 0; i < count; i++)
        p->bytes += dray__copy_bytes(&h->sources->ops[ops[i]].copy);
    return p;
}

/* The drafts become jobs. */
static int finish(struct compiler *c, dray_error *error)
{
    dray__program *p = c->program;
    p->poll_fd = epoll_create1(EPOLL_CLOEXEC);
    p->jobs = calloc((size_t)c->count + 1, sizeof *p->jobs);
    if (p->poll_fd < 0)
        return dray__fail_errno(error, errno, "descriptors of an update");
    if (!p->jobs)
        return dray__nomem(error);
    for (uint32_t i = 0; i < c->count; i++) {
        struct draft *d = &c->drafts[i];
        dray__program_job *job = &p->jobs[i];
        dray__cuda_job_options options = {.sums = d->sums};
        struct epoll_event event = {.events = EPOLLIN};
        int rc = dray__cuda_job_new(d->device, c->haul->destination->layout, d->items, d->count,
                                    &options, &job->job, error);
        if (rc)
            return rc;
        p->job_count++;
        job->device = d->device;
        job->step = d->step;
        job->count = d->count;
        job->entries = d->entries;
        d->entries = NULL;
        if (epoll_ctl(p->poll_fd, EPOLL_CTL_ADD, dray__cuda_job_fd(job->job), &event))
            return dray__fail_errno(error, errno, "descriptors of an update");
    }
    return DRAY_OK;
}

static int compile(const dray__haul *h, dray__program *p, dray_error *error)
{
    struct compiler c = {.haul = h, .program = p};
    int rc = hold(&c, error);
    if (rc == DRAY_OK)
        rc = p->strategy == DRAY_STRATEGY_DIRECT ? compile_direct(&c, error)
                                                 : compile_staged(&c, error);
    if (rc == DRAY_OK)
        rc = finish(&c, error);
    for (uint32_t i = 0; i < c.count; i++) {
        free(c.drafts[i].items);
        free(c.drafts[i].entries);
    }
    for (uint32_t i = 0; c.held && i < h->sources->count; i++)
        dray__local_release(c.held[i]);
    free(c.drafts);
    free(c.held);
    return rc;
}

/* How many are kept: of the destination and of its staging, in two strategies. */
enum { KEPT = 4 };

static void drop_oldest(dray__programs *programs)
{
    uint32_t count = 0;
    for (dray__program **at = &programs->first; *at; at = &(*at)->next)
        if (++count > KEPT) {
            dray__program *p = *at;
            *at = p->next;
            program_free(p);
            return;
        }
}

int dray__program_find(const dray__haul *h, const uint64_t *ops, uint64_t count, uint64_t ceiling,
                       dray__program **out, dray_error *error)
{
    dray__programs *programs = h->sources->programs;
    for (dray__program *p = programs->first; p; p = p->next)
        if (fits(p, h, ops, count, ceiling)) {
            *out = p;
            return DRAY_OK;
        }
    dray__program *p = program_new(h, ops, count, ceiling);
    int rc = p ? compile(h, p, error) : dray__nomem(error);
    if (rc) {
        if (p)
            program_free(p);
        return rc;
    }
    p->next = programs->first;
    programs->first = p;
    drop_oldest(programs);
    *out = p;
    return DRAY_OK;
}
