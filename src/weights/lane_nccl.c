/* The lane of GPU memory on other hosts, by NCCL (nccl.h): asks a publisher's data server for what
 * the plan wants, as much at once as a slot holds; takes it into a slot here, and has the GPU move
 * it from there to its place, with sums of what came, of what was written and of what then lies
 * there. One slot is filled while the other is emptied.
 *
 * Where NCCL cannot be used between the two (no NCCL there, another version, an encrypted
 * connection, both on one GPU), the remote lane does it instead. What fails later fails the update:
 * the next one makes the pair anew. */
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "model/layout.h"
#include "mover/cuda.h"
#include "weights/haul.h"
#include "weights/nccl.h"
#include "weights/peer.h"
#include "weights/wired.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum { LEAST_POLL_NS = 100000 };
#define STALL_NS (10 * DRAY__SECOND) /* nothing came over NCCL */
#define JOIN_NS (30 * DRAY__SECOND)  /* a communicator takes a second, or some */

struct dray__nccl_link {
    dray__peer *peer;
    dray__nccl_pair *pair;
    uint64_t slot_bytes;
    bool joined;  /* the data server has joined, */
    bool ready;   /* and the communicator is made */
    bool refused; /* not to be tried again */
    uint32_t last_id;
    dray__nccl_jobs jobs; /* from slots to their places */
};

/* A part of an op that lies in one block of its source. */
struct part {
    uint64_t op;
    uint32_t block;
    dray__rect rect;
};

struct slice {
    uint64_t op;
    dray_copy copy; /* from the slot to its place */
};

/* What goes through one slot. */
struct chunk {
    enum { FREE, ASKED, COMING, PLACING } state;
    uint32_t count;
    bool arriving; /* NCCL is to receive it */
    uint64_t bytes;
    int64_t since_ns;
    struct slice slices[DRAY__PULL_RECTS_MAX];
    uint64_t source_sums[DRAY__PULL_RECTS_MAX], sums[DRAY__PULL_RECTS_MAX];
    dray__cuda_job *job;
};

struct source {
    dray__source *of;
    struct part *parts;
    uint64_t count, capacity, next, left; /* left: bytes that are not placed yet */
    uint64_t *ops, op_count;
    dray__slicer slicer;
    bool in_part, asking; /* asking: a request is out and not answered */
    uint32_t turn;        /* whose slot is asked for next */
    struct chunk *chunks[DRAY__NCCL_SLOTS];
    int64_t began_ns;
    void *instead; /* the remote lane that does it */
};

struct nccl_lane {
    dray__haul *haul;
    struct source *sources;
    uint32_t count, active;
    uint64_t ceiling;
    int poll_fd, timer_fd;
    dray__cuda_device *device;
};

/* ---- links ----------------------------------------------------------------------------------- */

void dray__nccl_link_free(struct dray__nccl_link *link)
{
    if (!link)
        return;
    dray__nccl_jobs_clear(&link->jobs);
    dray__nccl_close(link->pair);
    dray__peer_free(link->peer);
    free(link);
}

/* The next update begins from the start. */
static void drop_link(struct dray__nccl_link *link)
{
    dray__nccl_jobs_clear(&link->jobs);
    dray__nccl_close(link->pair);
    link->pair = NULL;
    link->joined = link->ready = false;
    dray__peer_drop(link->peer);
}

/* NCCL takes no GPU twice, and does not always survive being asked to. */
static bool on_one_gpu(const dray_region_info *from, const dray_region *to)
{
    uint8_t uuid[sizeof from->device];
    return dray_region_device(to, uuid, NULL) == DRAY_OK &&
           memcmp(from->device, uuid, sizeof uuid) == 0;
}

static bool takes(const dray__haul *haul, const dray__op *op)
{
    int version;
    const dray__source *source = &haul->sources->sources[op->copy.source];
    if (op->transform || !haul->options.keys ||
        haul->options.keys->transport != DRAY__TRANSPORT_AUTO || haul->options.load ||
        !dray__source_remote(source, op->copy.source_region, haul->destination->host) ||
        source->host == haul->destination->host)
        return false;
    const dray_region_info *from = dray_layout_region(source->layout, op->copy.source_region);
    if (from->kind != DRAY_REGION_CUDA)
        return false;
    const dray_region *to = haul->destination->regions[op->copy.destination_region];
    return dray__nccl_device_of(to) && !on_one_gpu(from, to) &&
           !(source->nccl && source->nccl->refused) && dray__nccl_find(&version, NULL) == DRAY_OK;
}

/* ---- what is to be fetched ------------------------------------------------------------------- */

/* The smaller of the two forms goes over the wire. */
static int32_t wire_dtype(const dray_copy *copy)
{
    return dray_dtype_size((dray_dtype)copy->destination_dtype) <=
                   dray_dtype_size((dray_dtype)copy->source_dtype)
               ? copy->destination_dtype
               : copy->source_dtype;
}

static bool push(struct source *s, const struct part *part)
{
    if (s->count == s->capacity) {
        uint64_t capacity = s->capacity ? s->capacity * 2 : 64;
        struct part *parts = realloc(s->parts, capacity * sizeof *parts);
        if (!parts)
            return false;
        s->parts = parts;
        s->capacity = capacity;
    }
    s->parts[s->count++] = *part;
    return true;
}

/* Cuts an op along the blocks of its source. */
static int cut(struct nccl_lane *l, struct source *s, uint64_t index, dray_error *error)
{
    const dray_copy *copy = &l->haul->sources->ops[index].copy;
    const dray_layout *layout = s->of->layout;
    dray__rect whole = dray__copy_rect(copy);
    uint32_t tensor;
    int rc = dray_layout_find(layout, l->haul->sources->names[copy->tensor], &tensor, error);
    if (rc)
        return rc;
    const dray_block *block = dray__layout_first_block(layout, tensor);
    for (; block; block = dray__layout_next_block(layout, block)) {
        struct part part = {.op = index, .block = dray__layout_block_index(layout, block)};
        dray__rect held = dray__rect_of(layout, part.block);
        if (!dray__rect_cross(&whole, &held, &part.rect) ||
            !dray__copy_reads(copy, block, &part.rect))
            continue;
        if (!push(s, &part))
            return dray__nomem(error);
        s->left +=
            dray__rect_elements(&part.rect) * dray_dtype_size((dray_dtype)copy->destination_dtype);
    }
    s->ops[s->op_count++] = index;
    return DRAY_OK;
}

/* The next slice that fits into what is left of a slot. */
static bool next_slice(const struct nccl_lane *l, struct source *s, uint64_t room, struct part *out)
{
    if (s->next == s->count)
        return false;
    const struct part *part = &s->parts[s->next];
    uint64_t size = dray_dtype_size((dray_dtype)wire_dtype(&l->haul->sources->ops[part->op].copy));
    if (!s->in_part)
        dray__slicer_start(&s->slicer, &part->rect, size, s->of->nccl->slot_bytes);
    s->in_part = true;
    *out = *part;
    if (!dray__slicer_peek(&s->slicer, &out->rect) || dray__rect_elements(&out->rect) * size > room)
        return false;
    dray__slicer_next(&s->slicer);
    if (s->slicer.done) {
        s->in_part = false;
        s->next++;
    }
    return true;
}

static void add_slice(const struct nccl_lane *l, struct chunk *c, const struct part *part,
                      dray__pull_rect *rect, const dray_layout *layout)
{
    const dray_copy *op = &l->haul->sources->ops[part->op].copy;
    int32_t dtype = wire_dtype(op);
    dray_copy in = dray__copy_cut(op, &part->rect);
    struct slice *slice = &c->slices[c->count++];
    slice->op = part->op;
    slice->copy = in;
    c->bytes += dray__copy_to_dense(&in, dtype, c->bytes);
    slice->copy.source_dtype = dtype;
    slice->copy.source_offset = in.destination_offset;
    slice->copy.source_region = 0;
    memcpy(slice->copy.source_stride, in.destination_stride, sizeof in.destination_stride);
    uint32_t tensor = dray_layout_block(layout, part->block)->tensor;
    *rect = (dray__pull_rect){.block = part->block,
                              .ndim = dray_layout_tensor(layout, tensor)->ndim,
                              .dtype = dtype,
                              .rect = part->rect};
}

/* Asks for as much as a slot holds. */
static void ask(struct nccl_lane *l, struct source *s, struct chunk *c)
{
    dray__pull_rect rects[DRAY__PULL_RECTS_MAX];
    struct dray__nccl_link *link = s->of->nccl;
    struct part part;
    c->count = 0;
    c->bytes = 0;
    while (c->count < DRAY__PULL_RECTS_MAX &&
           next_slice(l, s, link->slot_bytes - c->bytes, &part)) {
        add_slice(l, c, &part, &rects[c->count], s->of->layout);
    }
    dray__writer *w = dray__peer_out(link->peer);
    size_t begun = dray__pull_begin_nccl(w, ++link->last_id, s->of->token, l->haul->options.attempt,
                                         DRAY__NCCL_FETCH);
    dray__pull_put_rects(w, rects, c->count);
    dray__pull_end_nccl(w, begun);
    c->state = ASKED;
    c->arriving = false;
    c->since_ns = dray__now();
    s->asking = true;
}

/* ---- joining --------------------------------------------------------------------------------- */

static int begin_join(struct nccl_lane *l, struct source *s, dray_error *error)
{
    struct dray__nccl_link *link = s->of->nccl;
    uint8_t id[DRAY__NCCL_ID];
    int version;
    if (dray__peer_encrypts(link->peer))
        return dray__fail(error, DRAY_EUNSUPPORTED, "the connection is encrypted");
    int rc = dray__nccl_find(&version, error);
    if (rc == DRAY_OK)
        rc = dray__nccl_id(id, error);
    if (rc == DRAY_OK)
        rc = dray__nccl_open(l->device, id, 0, link->slot_bytes, &link->pair, error);
    if (rc)
        return rc;
    dray__writer *w = dray__peer_out(link->peer);
    size_t begun = dray__pull_begin_nccl(w, ++link->last_id, s->of->token, l->haul->options.attempt,
                                         DRAY__NCCL_JOIN);
    dray__put_u32(w, (uint32_t)version);
    dray__put_u64(w, link->slot_bytes);
    dray__put_bytes(w, id, sizeof id);
    dray__pull_end_nccl(w, begun);
    s->asking = true;
    return DRAY_OK;
}

/* What the data server says, once it does; its head, until the next call. */
static int hear(struct source *s, const uint8_t **head, uint32_t *bytes, dray_error *error)
{
    struct dray__nccl_link *link = s->of->nccl;
    dray__arrival arrival;
    int rc = dray__peer_recv_head(link->peer, &arrival, error);
    if (rc == DRAY_OK)
        rc = dray__peer_recv_data(link->peer, NULL, error);
    if (rc)
        return rc;
    s->asking = false;
    *head = arrival.head;
    *bytes = arrival.header.head_bytes;
    if (arrival.header.id != link->last_id || arrival.header.data_bytes)
        return dray__fail(error, DRAY_EPROTO, "%s: not the answer that was due", s->of->endpoint);
    if (!arrival.header.status)
        return DRAY_OK;
    dray__reader in = dray__reader_of(arrival.head, arrival.header.head_bytes);
    char *message = dray__get_string(&in, DRAY__PULL_HEAD_MAX);
    rc = dray__fail(error, arrival.header.status, "publisher %s at %s: %s", s->of->name,
                    s->of->endpoint, message ? message : "?");
    free(message);
    return rc;
}

static int join(struct nccl_lane *l, struct source *s, dray_error *error)
{
    struct dray__nccl_link *link = s->of->nccl;
    const uint8_t *head;
    uint32_t bytes;
    int rc = DRAY_OK;
    if (!link->pair)
        rc = begin_join(l, s, error);
    if (rc == DRAY_OK)
        rc = dray__peer_send(link->peer, error);
    if (rc == DRAY_OK && !link->joined)
        rc = hear(s, &head, &bytes, error);
    if (rc)
        return rc;
    link->joined = true;
    rc = dray__nccl_ready(link->pair, error);
    link->ready = rc == DRAY_OK;
    return rc;
}

/* ---- placing --------------------------------------------------------------------------------- */

static int place(struct nccl_lane *l, struct source *s, uint32_t slot, dray_error *error)
{
    struct chunk *c = s->chunks[slot];
    const dray__destination *to = l->haul->destination;
    dray__cuda_item items[DRAY__PULL_RECTS_MAX];
    for (uint32_t i = 0; i < c->count; i++)
        items[i] = (dray__cuda_item){.copy = c->slices[i].copy,
                                     .source_base = dray__nccl_slot(s->of->nccl->pair, slot),
                                     .destination_base = dray_region_device_address(
                                         to->regions[c->slices[i].copy.destination_region])};
    uint32_t sums = l->haul->options.verify
                        ? DRAY__CUDA_SUM_SOURCE | DRAY__CUDA_SUM_WRITTEN | DRAY__CUDA_SUM_BACK
                        : 0;
    int rc = dray__nccl_jobs_get(&s->of->nccl->jobs, 0, l->device, to->layout, items, c->count,
                                 sums, &c->job, error);
    if (rc == DRAY_OK)
        rc = dray__cuda_job_start(c->job, NULL, 0, error);
    c->state = PLACING;
    return rc;
}

static int enter_sums(struct nccl_lane *l, struct source *s, const struct chunk *c,
                      dray_error *error)
{
    dray__haul *h = l->haul;
    const uint64_t *came = dray__cuda_job_sums(c->job, DRAY__CUDA_SUM_SOURCE);
    const uint64_t *written = dray__cuda_job_sums(c->job, DRAY__CUDA_SUM_WRITTEN);
    const uint64_t *back = dray__cuda_job_sums(c->job, DRAY__CUDA_SUM_BACK);
    for (uint32_t i = 0; i < c->count && h->options.verify; i++) {
        const dray__op *op = &h->sources->ops[c->slices[i].op];
        if (came[i] != c->sums[i])
            return dray__fail(error, DRAY_ECHECKSUM,
                              "tensor %s: what came from %s over NCCL is not what it sent",
                              dray__haul_tensor(h, &op->copy)->name, s->of->name);
        h->expected[op->block] += written[i];
        h->found[op->block] += back[i];
        dray_copy origin = c->slices[i].copy;
        origin.source_dtype = op->copy.source_dtype;
        if (op->owned)
            dray__haul_own(h, &origin, c->source_sums[i]);
    }
    return DRAY_OK;
}

static int finish(struct nccl_lane *l, struct source *s, struct chunk *c, dray_error *error)
{
    int rc = dray__cuda_job_poll(c->job, error);
    if (rc)
        return rc;
    rc = enter_sums(l, s, c, error);
    for (uint32_t i = 0; i < c->count; i++) {
        uint64_t bytes = dray__copy_bytes(&c->slices[i].copy);
        l->haul->bytes += bytes;
        s->left -= bytes;
    }
    c->job = NULL;
    c->state = FREE;
    return rc;
}

/* ---- one source ------------------------------------------------------------------------------ */

static int take_answer(struct source *s, struct chunk *c, dray_error *error)
{
    const uint8_t *head;
    uint32_t bytes;
    int rc = hear(s, &head, &bytes, error);
    if (rc)
        return rc;
    if (bytes != c->count * dray__pull_head_bytes(true, false))
        return dray__fail(error, DRAY_EPROTO, "%s: sums of other rectangles", s->of->endpoint);
    dray__reader in = dray__reader_of(head, bytes);
    for (uint32_t i = 0; i < c->count; i++) {
        c->source_sums[i] = dray__get_u64(&in);
        c->sums[i] = dray__get_u64(&in);
    }
    c->state = COMING;
    return DRAY_OK;
}

/* *moved: something was done for the chunk. */
static int step_chunk(struct nccl_lane *l, struct source *s, uint32_t slot, bool *moved,
                      dray_error *error)
{
    struct chunk *c = s->chunks[slot];
    struct dray__nccl_link *link = s->of->nccl;
    int was = (int)c->state, rc = DRAY_OK;
    if (c->state == FREE && !s->asking && s->turn % DRAY__NCCL_SLOTS == slot &&
        s->next < s->count) {
        s->turn++;
        ask(l, s, c);
    }
    /* NCCL sends only to who receives. */
    if (c->state == ASKED && !c->arriving) {
        rc = dray__nccl_ready(link->pair, error);
        if (rc == DRAY_OK)
            rc = dray__nccl_begin(link->pair, slot, c->bytes, false, error);
        c->arriving = rc == DRAY_OK;
    }
    if (rc == DRAY_OK && c->state == ASKED) {
        rc = dray__peer_send(link->peer, error);
        if (rc == DRAY_OK)
            rc = take_answer(s, c, error);
    }
    if (rc == DRAY_OK && c->state == COMING) {
        rc = dray__nccl_done(link->pair, slot, error);
        if (rc == DRAY_OK)
            rc = place(l, s, slot, error);
    }
    if (rc == DRAY_OK && c->state == PLACING)
        rc = finish(l, s, c, error);
    *moved |= was != (int)c->state;
    if (rc == DRAY_EAGAIN && c->state != PLACING && dray__now() - c->since_ns > STALL_NS)
        return dray__fail(error, DRAY_ETIMEDOUT, "nothing came from %s over NCCL for %d s",
                          s->of->name, (int)(STALL_NS / DRAY__SECOND));
    return rc == DRAY_EAGAIN ? DRAY_OK : rc;
}

/* The remote lane does it, from now on. */
static int do_instead(struct nccl_lane *l, struct source *s, const dray_error *why,
                      dray_error *error)
{
    dray__log(DRAY_LOG_INFO, "no NCCL to %s: %s", s->of->name, why->message);
    drop_link(s->of->nccl);
    s->of->nccl->refused = true;
    s->asking = false;
    s->next = s->count;
    s->left = 0;
    int rc = dray__lane_remote.open(l->haul, s->ops, s->op_count, l->ceiling / l->active,
                                    &s->instead, error);
    struct epoll_event event = {.events = EPOLLIN};
    if (rc == DRAY_OK &&
        epoll_ctl(l->poll_fd, EPOLL_CTL_ADD, dray__lane_remote.fd(s->instead), &event))
        rc = dray__fail_errno(error, errno, "descriptors of an update");
    return rc;
}

static int step_source(struct nccl_lane *l, struct source *s, bool *moved, dray_error *error)
{
    struct dray__nccl_link *link = s->of->nccl;
    dray_error why = {0};
    int rc = dray__peer_open(link->peer, &why);
    if (rc == DRAY_OK && !link->ready)
        rc = join(l, s, &why);
    if (rc == DRAY_EAGAIN && dray__now() - s->began_ns > JOIN_NS)
        rc = dray__fail(&why, DRAY_ETIMEDOUT, "no communicator in %d s",
                        (int)(JOIN_NS / DRAY__SECOND));
    if (rc && rc != DRAY_EAGAIN)
        return do_instead(l, s, &why, error);
    for (uint32_t i = 0; i < DRAY__NCCL_SLOTS && rc == DRAY_OK && link->ready; i++)
        rc = step_chunk(l, s, i, moved, &why);
    if (rc == DRAY_OK || rc == DRAY_EAGAIN)
        return DRAY_OK;
    drop_link(link);
    if (error)
        *error = why;
    return rc;
}

/* ---- the lane -------------------------------------------------------------------------------- */

static void lane_close(void *lane)
{
    struct nccl_lane *l = lane;
    if (!l)
        return;
    for (uint32_t i = 0; l->sources && i < l->count; i++) {
        struct source *s = &l->sources[i];
        bool under_way = s->asking;
        for (uint32_t k = 0; k < DRAY__NCCL_SLOTS; k++) {
            under_way |= s->chunks[k] && s->chunks[k]->state != FREE;
            free(s->chunks[k]);
        }
        if (under_way && s->of->nccl)
            drop_link(s->of->nccl); /* what is sent is nobody's */
        dray__lane_remote.close(s->instead);
        free(s->parts);
        free(s->ops);
    }
    if (l->poll_fd >= 0)
        close(l->poll_fd);
    if (l->timer_fd >= 0)
        close(l->timer_fd);
    free(l->sources);
    free(l);
}

static int open_link(struct nccl_lane *l, dray__source *of, dray_error *error)
{
    uint64_t slot = l->ceiling / (DRAY__NCCL_SLOTS * (uint64_t)l->active);
    slot = slot > DRAY__NCCL_SLOT_MAX ? DRAY__NCCL_SLOT_MAX : slot & ~(uint64_t)4095;
    slot = slot < DRAY__NCCL_SLOT_MIN ? DRAY__NCCL_SLOT_MIN : slot;
    if (!of->nccl) {
        of->nccl = calloc(1, sizeof *of->nccl);
        if (!of->nccl)
            return dray__nomem(error);
        int rc = dray__peer_new(of->endpoint, l->haul->options.keys, &of->nccl->peer, error);
        if (rc)
            return rc;
    }
    if (of->nccl->pair && of->nccl->slot_bytes > slot)
        drop_link(of->nccl); /* it holds more than this update may */
    if (!of->nccl->pair)
        of->nccl->slot_bytes = slot;
    return DRAY_OK;
}

static int open_source(struct nccl_lane *l, uint32_t index, const uint64_t *ops, uint64_t count,
                       dray_error *error)
{
    struct source *s = &l->sources[index];
    s->ops = calloc((size_t)count + 1, sizeof *s->ops);
    int rc = s->ops ? DRAY_OK : dray__nomem(error);
    for (uint32_t k = 0; k < DRAY__NCCL_SLOTS && rc == DRAY_OK; k++) {
        s->chunks[k] = calloc(1, sizeof *s->chunks[k]);
        rc = s->chunks[k] ? DRAY_OK : dray__nomem(error);
    }
    if (rc == DRAY_OK)
        rc = open_link(l, s->of, error);
    for (uint64_t i = 0; i < count && rc == DRAY_OK; i++)
        if (l->haul->sources->ops[ops[i]].copy.source == index)
            rc = cut(l, s, ops[i], error);
    s->began_ns = dray__now();
    return rc;
}

static int lane_init(struct nccl_lane *l, const uint64_t *ops, uint64_t count, dray_error *error)
{
    const dray__sources *all = l->haul->sources;
    l->count = all->count;
    l->sources = calloc((size_t)l->count + 1, sizeof *l->sources);
    if (!l->sources)
        return dray__nomem(error);
    for (uint64_t i = 0; i < count; i++) {
        const dray_copy *copy = &all->ops[ops[i]].copy;
        struct source *s = &l->sources[copy->source];
        dray__cuda_device *device =
            dray__nccl_device_of(l->haul->destination->regions[copy->destination_region]);
        if (l->device && device != l->device)
            return dray__fail(error, DRAY_EUNSUPPORTED, "a rank's weights on several GPUs");
        l->device = device;
        l->active += !s->of;
        s->of = &all->sources[copy->source];
    }
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < l->count && rc == DRAY_OK; i++)
        if (l->sources[i].of)
            rc = open_source(l, i, ops, count, error);
    if (rc)
        return rc;
    l->poll_fd = epoll_create1(EPOLL_CLOEXEC);
    l->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN};
    return l->poll_fd < 0 || l->timer_fd < 0 ||
                   epoll_ctl(l->poll_fd, EPOLL_CTL_ADD, l->timer_fd, &event)
               ? dray__fail_errno(error, errno, "descriptors of an update")
               : DRAY_OK;
}

static int lane_open(dray__haul *haul, const uint64_t *ops, uint64_t count, uint64_t ceiling,
                     void **out, dray_error *error)
{
    struct nccl_lane *l = calloc(1, sizeof *l);
    if (!l)
        return dray__nomem(error);
    l->haul = haul;
    l->ceiling = ceiling;
    l->poll_fd = l->timer_fd = -1;
    int rc = lane_init(l, ops, count, error);
    if (rc) {
        lane_close(l);
        return rc;
    }
    *out = l;
    return DRAY_OK;
}

static int lane_step(void *lane, int64_t until_ns, bool *waits, dray_error *error)
{
    struct nccl_lane *l = lane;
    bool moved = true, done = false, idle = true;
    int64_t begin = dray__now();
    while (moved && !done && dray__now() < until_ns) {
        moved = false;
        done = idle = true;
        for (uint32_t i = 0; i < l->count; i++) {
            struct source *s = &l->sources[i];
            bool sleeps = true;
            int rc = s->left ? step_source(l, s, &moved, error) : DRAY_OK;
            if (rc == DRAY_OK && s->instead)
                rc = dray__lane_remote.step(s->instead, until_ns, &sleeps, error);
            if (rc && rc != DRAY_EAGAIN)
                return rc;
            done &= rc == DRAY_OK && !s->left;
            idle &= sleeps;
        }
    }
    l->haul->move_ns += dray__now() - begin;
    if (done)
        return DRAY_OK;
    *waits = !moved && idle;
    struct itimerspec tick = {.it_value = {.tv_nsec = LEAST_POLL_NS}};
    timerfd_settime(l->timer_fd, 0, &tick, NULL);
    return DRAY_EAGAIN;
}

static int lane_fd(const void *lane)
{
    const struct nccl_lane *l = lane;
    return l->poll_fd;
}

static void lane_report(const void *lane, dray_update_report *report)
{
    const struct nccl_lane *l = lane;
    for (uint32_t i = 0; i < l->count; i++)
        if (l->sources[i].instead)
            dray__lane_remote.report(l->sources[i].instead, report);
}

static uint64_t lane_held_bytes(const void *lane)
{
    const struct nccl_lane *l = lane;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < l->count; i++) {
        const struct source *s = &l->sources[i];
        if (s->instead)
            bytes += dray__lane_remote.held_bytes(s->instead);
        else if (s->of)
            bytes += DRAY__NCCL_SLOTS * s->of->nccl->slot_bytes;
    }
    return bytes;
}

/* Names those who did not answer. */
static void lane_explain(const void *lane, dray_error *error)
{
    const struct nccl_lane *l = lane;
    for (uint32_t i = 0; i < l->count; i++) {
        const struct source *s = &l->sources[i];
        if (s->instead)
            dray__lane_remote.explain(s->instead, error);
        if (!s->left)
            continue;
        dray__fail_prefix(error, error->code, "publisher %s at %s %s: ", s->of->name,
                          s->of->endpoint,
                          s->of->nccl->ready ? "sends slowly over NCCL"
                                             : "has not joined a communicator of NCCL's");
        return;
    }
}

const dray__lane_kind dray__lane_nccl = {.name = "nccl",
                                         .takes = takes,
                                         .open = lane_open,
                                         .step = lane_step,
                                         .fd = lane_fd,
                                         .report = lane_report,
                                         .held_bytes = lane_held_bytes,
                                         .explain = lane_explain,
                                         .close = lane_close};
