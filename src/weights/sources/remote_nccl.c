/* NCCL in the source of data servers (remote.h): GPU memory of publishers on other hosts. Each
 * request to such a publisher is for as many bytes as a slot holds. They arrive over NCCL in a slot
 * on this GPU (nccl.h), and the GPU moves them to their destination, with sums of the received, the
 * written and the read-back bytes. What is prequantised (placements/prequantised.h) the publisher's
 * GPU quantises into the slot. As many requests are under way as there are slots, so that
 * packing, sending and placing overlap. Received parts are shared with the cohort like all others
 * of the route.
 *
 * When NCCL cannot be used between the two (the publisher has no NCCL, or another version, the
 * connection is encrypted, both are on one GPU, or the ceiling is too low for slots), the data
 * server sends the bytes itself. A later failure fails the update, and the next update makes a new
 * pair. */
#include "base/array.h"
#include "base/error.h"
#include "base/log.h"
#include "mover/cuda/cuda.h"
#include "weights/placements/prequantised.h"
#include "weights/program/program.h"
#include "weights/server/nccl.h"
#include "weights/server/pull_quant.h"
#include "weights/sources/remote.h"

#include <stdlib.h>
#include <string.h>

#define SILENCE_NS (10 * DRAY__SECOND) /* the longest time without data over NCCL */

struct link {
    dray__peer *peer;
    dray__nccl_pair *pair;
    uint64_t slot_bytes;
    uint32_t ctas;
    bool verify;
    bool joined;  /* the data server has joined, */
    bool ready;   /* and the communicator is made */
    bool refused; /* not to be tried again */
    uint32_t last_id;
    dray__cuda_job *jobs[DRAY__NCCL_SLOTS]; /* copy slots to the destination */
};

/* A rectangle in a slot. */
struct piece {
    const dray__op *op;
    dray__rect rect;
    uint64_t first; /* of its copies to the destination; those of the next piece follow */
};

/* The content of one slot. */
struct chunk {
    enum { FREE, FILLED, ASKED, PLACING } state;
    uint32_t count, id; /* of the request */
    bool arriving;      /* the data server has packed it, and NCCL receives it */
    uint64_t bytes;
    int64_t since_ns;
    struct piece pieces[DRAY__PULL_RECTS_MAX];
    dray__placings copies; /* of all pieces, from the slot to the destination */
    dray__pull_rect rects[DRAY__PULL_RECTS_MAX];
    uint64_t source_sums[DRAY__PULL_RECTS_MAX], sums[DRAY__PULL_RECTS_MAX];
};

/* A publisher, and the parts that NCCL brings from it. */
struct nccl_source {
    struct source *publisher; /* the route's */
    dray__source *of;
    struct link *link; /* kept with it from one update to the next */
    struct source own; /* the parts, cut for slots */
    uint64_t left;     /* bytes that are not placed yet, without scales */
    uint64_t pieces;   /* number of slots that they fill */
    bool joining;      /* a request to join has no answer yet */
    /* Numbers of chunks that were requested, that were answered, and whose receive was begun. Chunk
     * i uses slot i % DRAY__NCCL_SLOTS. */
    uint64_t asked, answered, receiving;
    struct chunk *chunks[DRAY__NCCL_SLOTS];
    int64_t began_ns;
    uint64_t wire_before;
};

struct dray__remote_nccl {
    struct remote_route *route;
    dray__transfer *transfer;
    struct nccl_source *sources;
    uint32_t count;
    dray__cuda_device *device;
};

/* ---- links ----------------------------------------------------------------------------------- */

static void close_pair(struct link *link)
{
    dray__nccl_close(link->pair, link->jobs);
    link->pair = NULL;
    link->joined = link->ready = false;
}

static void forget_link(void *kept)
{
    struct link *link = kept;
    close_pair(link);
    dray__peer_free(link->peer);
    free(link);
}

/* Closes the pair, so that the next update makes a new one. */
static void drop_link(struct link *link)
{
    close_pair(link);
    dray__peer_drop(link->peer);
}

/* Returns true when both are on one GPU. NCCL does not support that, and may crash when asked to.
 */
static bool on_one_gpu(const dray_region_info *from, const dray_region *to)
{
    uint8_t uuid[sizeof from->device];
    return dray_region_device(to, uuid, NULL) == DRAY_OK &&
           memcmp(from->device, uuid, sizeof uuid) == 0;
}

static bool may_use(const dray__transfer *transfer, const dray__source *source)
{
    int version;
    const struct link *link = dray__kept_find(source->kept, forget_link);
    return transfer->options.keys && transfer->options.keys->transport == NULL &&
           !transfer->options.load && source->host != transfer->destination->host &&
           !(link && link->refused) && dray__nccl_find(&version, NULL) == DRAY_OK;
}

/* Returns the GPU of a region if NCCL can bring memory of `from` there; else NULL. */
static dray__cuda_device *device_between(const dray_region_info *from, const dray_region *to)
{
    dray__cuda_device *device = dray__nccl_device_of(to);
    return from->kind == DRAY_REGION_CUDA && device && !on_one_gpu(from, to) ? device : NULL;
}

/* Returns the GPU of the op's destination if NCCL can bring its bytes; else NULL. Of a prequantised
 * op, the smallest slot must hold a cell, cells must not be too small, and this rank's memory of
 * one GPU must have all elements and scales. */
static dray__cuda_device *device_for(const dray__transfer *h, const dray__source *source,
                                     const dray__op *op)
{
    const dray_region_info *from = dray_layout_region(source->layout, op->copy.source_region);
    dray_region *const *regions = h->destination->regions;
    if (!op->transform)
        return device_between(from, regions[op->copy.destination_region]);
    uint64_t cell = op->prequantised ? dray__prequantised_cell_bytes(h, op) : 0;
    if (cell < DRAY__NCCL_CELL_MIN || cell > DRAY__NCCL_SLOT_MIN - 2 * DRAY__PULL_QUANT_ALIGN ||
        !dray__prequantised_is_here(h, op))
        return NULL;
    const dray_transform *t = &dray_plan_transforms(h->sources->plan)[op->transform - 1];
    const dray_copy *writes = dray_plan_writes(h->sources->plan) + t->first_write;
    dray__cuda_device *device = device_between(from, regions[writes->destination_region]);
    for (uint64_t w = 1; w < t->writes && device; w++)
        if (device_between(from, regions[writes[w].destination_region]) != device)
            device = NULL;
    return device;
}

/* ---- the parts to fetch ---------------------------------------------------------------------- */

/* Returns the bytes of a rectangle of an op at the destination, without scales. */
static uint64_t bytes_of(const dray__op *op, const dray__rect *rect)
{
    uint64_t each = dray_dtype_size((dray_dtype)op->copy.destination_dtype);
    return dray__rect_elements(rect) * (op->prequantised ? 1 : each); /* FP8 */
}

/* Adds a slice to the chunk, and its copies out of the slot. */
static bool add_piece(const struct dray__remote_nccl *n, const struct nccl_source *s,
                      struct chunk *c, const struct slice *slice)
{
    const dray__op *op = dray__remote_op(n->route, &s->own, slice);
    const dray__rect *rect = &slice->rect;
    dray__pull_rect wanted = dray__remote_rect(n->route, &s->own, slice);
    dray__placing whole = {.copy = dray__copy_cut(&op->copy, rect), .block = op->block};
    dray__copy_from_box(&whole.copy, rect, wanted.dtype, c->bytes);
    c->rects[c->count] = wanted;
    c->pieces[c->count++] = (struct piece){op, *rect, c->copies.count};
    c->bytes += dray__remote_bytes(n->route, &s->own, op, rect);
    return wanted.quantised
               ? dray__prequantised_copies(n->transfer, op, rect, whole.copy.source_offset,
                                           &c->copies)
               : DRAY__PUSH(c->copies.items, c->copies.count, c->copies.capacity, whole);
}

/* Takes the next slice that fits the rest of a slot. Slices that other members of the cohort read
 * from this rank are cut as those members request them. */
static bool next_slice(const struct dray__remote_nccl *n, struct nccl_source *s,
                       const struct chunk *c, struct slice *out)
{
    struct remote_route *l = n->route;
    uint64_t slot = s->link->slot_bytes;
    if (!dray__remote_wants(&s->own))
        return false;
    const struct part *part = &s->own.parts[s->own.next];
    const dray__op *op = &n->transfer->sources->ops[part->op];
    uint32_t block;
    if (c->count && op->prequantised != c->pieces->op->prequantised)
        return false; /* the chunk has either quantised rectangles or others */
    bool shared = l->cohort && dray__remote_block(n->transfer, op, &part->rect, &block) &&
                  dray__cohort_shared(l->cohort, block);
    s->own.segment = shared && l->segment < slot ? l->segment : slot;
    return dray__remote_next_slice(l, &s->own, slot - c->bytes, out);
}

/* Fills a chunk with as many slices as a slot holds. */
static bool fill(const struct dray__remote_nccl *n, struct nccl_source *s, struct chunk *c)
{
    struct slice slice;
    c->count = 0;
    c->copies.count = 0;
    c->bytes = 0;
    while (c->count < DRAY__PULL_RECTS_MAX && next_slice(n, s, c, &slice))
        if (!add_piece(n, s, c, &slice))
            return false;
    c->state = FILLED;
    c->since_ns = dray__now();
    return true;
}

/* Must a communicator still be made? That allocates memory, too. */
static bool joins(const struct dray__remote_nccl *n)
{
    for (uint32_t i = 0; i < n->count; i++)
        if (n->sources[i].left && !n->sources[i].link->ready)
            return true;
    return false;
}

/* Is any receive under way? */
static bool receives(const struct dray__remote_nccl *n)
{
    for (uint32_t i = 0; i < n->count; i++)
        for (uint32_t k = 0; k < DRAY__NCCL_SLOTS; k++) {
            const struct chunk *c = n->sources[i].chunks[k];
            if (c->state == ASKED && c->arriving)
                return true;
        }
    return false;
}

/* Gives the slot's job the received slices to place. Returns DRAY_EAGAIN when its items need
 * more room than it has while another receive is under way. */
static int remake_job(struct dray__remote_nccl *n, struct nccl_source *s, uint32_t slot,
                      dray_error *error)
{
    struct chunk *c = s->chunks[slot];
    const dray__destination *to = n->transfer->destination;
    dray__cuda_item *items = calloc(c->copies.count + 1, sizeof *items);
    if (!items)
        return dray__nomem(error);
    for (uint64_t i = 0; i < c->copies.count; i++) {
        const dray_copy *copy = &c->copies.items[i].copy;
        items[i] = (dray__cuda_item){
            .copy = *copy,
            .source_base = dray__nccl_slot(s->link->pair, slot),
            .destination_base = dray_region_device_address(to->regions[copy->destination_region])};
    }
    int rc = dray__cuda_job_remake(s->link->jobs[slot], to->layout, items, c->copies.count, NULL, 0,
                                   !receives(n), error);
    free(items);
    return rc;
}

static void ask(const struct dray__remote_nccl *n, struct nccl_source *s, uint32_t slot)
{
    struct link *link = s->link;
    struct chunk *c = s->chunks[slot];
    dray__writer *w = dray__peer_out(link->peer);
    c->id = ++link->last_id;
    size_t begun =
        dray__pull_begin(w, DRAY__DATA_NCCL, c->id, s->of->token, n->transfer->options.attempt);
    dray__put_u8(w, DRAY__NCCL_FETCH);
    dray__put_u8(w, (uint8_t)slot);
    dray__pull_put_rects(w, c->rects, c->count);
    dray__request_end(w, begun);
    c->state = ASKED;
    c->arriving = false;
    c->since_ns = dray__now();
    s->asked++;
}

/* ---- joining --------------------------------------------------------------------------------- */

/* Makes a job for each slot; its items change with the slot's content. */
static int make_jobs(const struct dray__remote_nccl *n, struct link *link, dray_error *error)
{
    const dray__cuda_job_options options = {
        .sums = n->transfer->options.verify
                    ? DRAY__CUDA_SUM_SOURCE | DRAY__CUDA_SUM_WRITTEN | DRAY__CUDA_SUM_BACK
                    : 0,
        .ctas = n->transfer->options.ctas,
        .spared = link->ctas,
        .launch_bytes = DRAY__NCCL_LAUNCH,
        .reserve_bytes = DRAY__NCCL_RESERVE(link->slot_bytes)};
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < DRAY__NCCL_SLOTS && rc == DRAY_OK; i++)
        rc = dray__cuda_job_new(n->device, n->transfer->destination->layout, NULL, 0, &options,
                                &link->jobs[i], error);
    return rc;
}

static int begin_join(struct dray__remote_nccl *n, struct nccl_source *s, dray_error *error)
{
    struct link *link = s->link;
    uint8_t id[DRAY__NCCL_ID];
    int version;
    if (dray__peer_encrypts(link->peer))
        return dray__fail(error, DRAY_EUNSUPPORTED, "the connection is encrypted");
    int rc = dray__nccl_find(&version, error);
    if (rc == DRAY_OK)
        rc = dray__nccl_id(id, error);
    if (rc == DRAY_OK)
        rc = dray__nccl_open(n->device, id, 0, link->slot_bytes, link->ctas, &link->pair, error);
    if (rc == DRAY_OK)
        rc = make_jobs(n, link, error);
    if (rc)
        return rc;
    dray__writer *w = dray__peer_out(link->peer);
    size_t begun = dray__pull_begin(w, DRAY__DATA_NCCL, ++link->last_id, s->of->token,
                                    n->transfer->options.attempt);
    dray__put_u8(w, DRAY__NCCL_JOIN);
    dray__put_u32(w, (uint32_t)version);
    dray__put_u64(w, link->slot_bytes);
    dray__put_u32(w, link->ctas);
    dray__put_bytes(w, id, sizeof id);
    dray__request_end(w, begun);
    s->joining = true;
    return DRAY_OK;
}

/* Reads the data server's answer to the request `id`, once it has arrived. Its head is valid until
 * the next call. */
static int hear(struct nccl_source *s, uint32_t id, const uint8_t **head, uint32_t *bytes,
                dray_error *error)
{
    struct link *link = s->link;
    dray__arrival arrival;
    int rc = dray__peer_recv_head(link->peer, &arrival, error);
    if (rc == DRAY_OK)
        rc = dray__peer_recv_data(link->peer, NULL, error);
    if (rc)
        return rc;
    *head = arrival.head;
    *bytes = arrival.header.head_bytes;
    if (arrival.header.id != id || arrival.header.data_bytes)
        return dray__fail(error, DRAY_EPROTO, "%s: not the answer that was due", s->of->endpoint);
    if (!arrival.header.status)
        return DRAY_OK;
    dray__reader in = dray__reader_of(arrival.head, arrival.header.head_bytes);
    char *message = dray__get_prose(&in, DRAY__HEAD_MAX);
    rc = dray__fail(error, arrival.header.status, "publisher %s at %s: %s", s->of->name,
                    s->of->endpoint, message ? message : "?");
    free(message);
    return rc;
}

static int join(struct dray__remote_nccl *n, struct nccl_source *s, dray_error *error)
{
    struct link *link = s->link;
    const uint8_t *head;
    uint32_t bytes;
    int rc = DRAY_OK;
    if (!link->pair)
        rc = begin_join(n, s, error);
    if (rc == DRAY_OK)
        rc = dray__peer_send(link->peer, error);
    if (rc == DRAY_OK && !link->joined)
        rc = hear(s, link->last_id, &head, &bytes, error);
    if (rc)
        return rc;
    s->joining = false;
    link->joined = true;
    rc = dray__nccl_ready(link->pair, error);
    link->ready = rc == DRAY_OK;
    return rc;
}

/* ---- placing --------------------------------------------------------------------------------- */

/* Enters the sums in the books (with verification), and in the shares for members that read the
 * slices from this rank. */
static int enter(struct dray__remote_nccl *n, struct nccl_source *s, const struct chunk *c,
                 const dray__cuda_job *job, dray_error *error)
{
    dray__transfer *h = n->transfer;
    const uint64_t *came = dray__cuda_job_sums(job, DRAY__CUDA_SUM_SOURCE);
    const uint64_t *written = dray__cuda_job_sums(job, DRAY__CUDA_SUM_WRITTEN);
    const uint64_t *back = dray__cuda_job_sums(job, DRAY__CUDA_SUM_BACK);
    for (uint32_t i = 0; i < c->count; i++) {
        const struct piece *piece = &c->pieces[i];
        const dray__op *op = piece->op;
        uint64_t end = i + 1 < c->count ? piece[1].first : c->copies.count;
        uint64_t received = 0, sum = 0;
        for (uint64_t k = piece->first; k < end; k++)
            h->bytes += dray__copy_bytes(&c->copies.items[k].copy);
        if (!h->options.verify) {
            dray__remote_share(n->route, op, &piece->rect, 0, 0);
            continue;
        }
        for (uint64_t k = piece->first; k < end; k++) {
            received += came[k];
            sum += written[k];
        }
        bool as_it_is = !op->prequantised && c->rects[i].dtype == op->copy.source_dtype;
        if (received != c->sums[i] || (as_it_is && c->source_sums[i] != c->sums[i]))
            return dray__fail(error, DRAY_ECHECKSUM,
                              "tensor %s: the bytes from %s over NCCL are not those that it sent",
                              dray__transfer_tensor(h, &op->copy)->name, s->of->name);
        for (uint64_t k = piece->first; k < end; k++) {
            h->expected[c->copies.items[k].block] += written[k];
            h->found[c->copies.items[k].block] += back[k];
        }
        dray_copy origin = dray__copy_cut(&op->copy, &piece->rect);
        dray__transfer_own(h, op, &origin, c->source_sums[i]);
        dray__remote_share(n->route, op, &piece->rect, c->source_sums[i], sum);
    }
    return DRAY_OK;
}

static int finish(struct dray__remote_nccl *n, struct nccl_source *s, uint32_t slot,
                  dray_error *error)
{
    struct chunk *c = s->chunks[slot];
    int rc = dray__cuda_job_poll(s->link->jobs[slot], error);
    if (rc)
        return rc;
    rc = enter(n, s, c, s->link->jobs[slot], error);
    for (uint32_t i = 0; i < c->count; i++)
        s->left -= bytes_of(c->pieces[i].op, &c->pieces[i].rect);
    dray__peer_count(s->link->peer, c->bytes);
    n->transfer->told.nccl_bytes += c->bytes;
    c->state = FREE;
    return rc;
}

/* ---- one source ------------------------------------------------------------------------------ */

/* The functions below return DRAY_EAGAIN when neither this chunk nor a later one can be handled
 * yet. */

/* Returns true when the next chunk may be requested; with within_ns, chunks are spread over that
 * time. */
static bool is_due(const struct dray__remote_nccl *n, const struct nccl_source *s)
{
    int64_t within = n->transfer->options.within_ns;
    uint64_t due =
        within ? dray__pace_due(s->pieces, within, dray__now() - n->transfer->opened_ns) : 0;
    return !within || due == s->pieces || s->asked < due;
}

/* Requests the next chunk, if its slot is free and parts are left. */
static int ask_next(struct dray__remote_nccl *n, struct nccl_source *s, dray_error *error)
{
    uint32_t slot = s->asked % DRAY__NCCL_SLOTS;
    struct chunk *c = s->chunks[slot];
    if (c->state == FREE && dray__remote_wants(&s->own) && !joins(n) && is_due(n, s) &&
        !fill(n, s, c))
        return dray__nomem(error);
    if (c->state != FILLED)
        return DRAY_EAGAIN;
    int rc = remake_job(n, s, slot, error);
    if (rc == DRAY_OK)
        ask(n, s, slot);
    return rc;
}

/* Begins the next receive, in the order of requests; NCCL sends only to a rank that receives. It is
 * begun only after the slices are packed, because a waiting receive occupies thread blocks. */
static int receive_next(struct nccl_source *s, dray_error *error)
{
    uint32_t slot = s->receiving % DRAY__NCCL_SLOTS;
    struct chunk *c = s->chunks[slot];
    if (s->receiving == s->answered)
        return DRAY_EAGAIN;
    int rc = dray__nccl_ready(s->link->pair, error);
    if (rc == DRAY_OK)
        rc = dray__nccl_begin(s->link->pair, slot, c->bytes, false, NULL, error);
    if (rc)
        return rc;
    c->arriving = true;
    s->receiving++;
    return DRAY_OK;
}

static int take_answer(struct nccl_source *s, dray_error *error)
{
    struct chunk *c = s->chunks[s->answered % DRAY__NCCL_SLOTS];
    const uint8_t *head;
    uint32_t bytes;
    if (s->answered == s->asked)
        return DRAY_EAGAIN;
    int rc = hear(s, c->id, &head, &bytes, error);
    if (rc)
        return rc;
    if (bytes != c->count * dray__pull_head_bytes(true, false))
        return dray__fail(error, DRAY_EPROTO, "%s: sums of other rectangles", s->of->endpoint);
    dray__reader in = dray__reader_of(head, bytes);
    for (uint32_t i = 0; i < c->count; i++) {
        c->source_sums[i] = dray__get_u64(&in);
        c->sums[i] = dray__get_u64(&in);
    }
    s->answered++;
    return DRAY_OK;
}

/* Moves received slices to their destination. */
static int place(struct dray__remote_nccl *n, struct nccl_source *s, uint32_t slot,
                 dray_error *error)
{
    struct chunk *c = s->chunks[slot];
    int rc = DRAY_EAGAIN;
    if (c->state == ASKED && c->arriving) {
        rc = dray__nccl_done(s->link->pair, slot, error);
        if (rc == DRAY_OK)
            rc = dray__cuda_job_start(s->link->jobs[slot], NULL, 0, error);
        if (rc == DRAY_OK)
            c->state = PLACING;
    } else if (c->state == PLACING) {
        rc = finish(n, s, slot, error);
    }
    return rc;
}

static int check_silence(const struct nccl_source *s, dray_error *error)
{
    for (uint32_t i = 0; i < DRAY__NCCL_SLOTS; i++)
        if (s->chunks[i]->state == ASKED && dray__now() - s->chunks[i]->since_ns > SILENCE_NS)
            return dray__fail(error, DRAY_ETIMEDOUT, "nothing came from %s over NCCL for %d s",
                              s->of->name, (int)(SILENCE_NS / DRAY__SECOND));
    return DRAY_OK;
}

/* Does the present work, once. *moved is set when there was any. */
static int step_chunks(struct dray__remote_nccl *n, struct nccl_source *s, bool *moved,
                       dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < DRAY__NCCL_SLOTS && (rc == DRAY_OK || rc == DRAY_EAGAIN); i++) {
        rc = place(n, s, i, error);
        *moved |= rc == DRAY_OK;
    }
    if (rc && rc != DRAY_EAGAIN)
        return rc;
    while ((rc = ask_next(n, s, error)) == DRAY_OK)
        *moved = true;
    if (rc == DRAY_EAGAIN)
        rc = dray__peer_send(s->link->peer, error);
    if (rc == DRAY_OK || rc == DRAY_EAGAIN)
        while ((rc = take_answer(s, error)) == DRAY_OK)
            *moved = true;
    if (rc == DRAY_EAGAIN)
        rc = receive_next(s, error);
    *moved |= rc == DRAY_OK;
    return rc == DRAY_EAGAIN ? check_silence(s, error) : rc;
}

/* Gives the parts back to the route: the data server sends the bytes itself. */
static int give_back(struct nccl_source *s, const dray_error *why, dray_error *error)
{
    bool kept = true;
    dray__log(DRAY_LOG_INFO, "no NCCL to %s: %s", s->of->name, why->message);
    drop_link(s->link);
    s->link->refused = true;
    s->joining = false;
    for (uint64_t i = 0; i < s->own.count; i++)
        kept &= dray__remote_push(s->publisher, &s->own.parts[i]);
    s->own.count = s->own.next = s->left = 0;
    return kept ? DRAY_OK : dray__nomem(error);
}

static int step_source(struct dray__remote_nccl *n, struct nccl_source *s, bool *moved,
                       dray_error *error)
{
    struct link *link = s->link;
    dray_error why = {0};
    int rc = dray__peer_open(link->peer, &why);
    if (rc == DRAY_OK && !link->ready)
        rc = join(n, s, &why);
    if (rc == DRAY_EAGAIN && dray__now() - s->began_ns > JOIN_NS)
        rc = dray__fail(&why, DRAY_ETIMEDOUT, "no communicator in %d s",
                        (int)(JOIN_NS / DRAY__SECOND));
    if (rc && rc != DRAY_EAGAIN) {
        *moved = true;
        return give_back(s, &why, error);
    }
    if (rc == DRAY_OK && link->ready)
        rc = step_chunks(n, s, moved, &why);
    if (rc == DRAY_OK || rc == DRAY_EAGAIN)
        return DRAY_OK;
    drop_link(link);
    if (error)
        *error = why;
    return rc;
}

int dray__remote_nccl_step(struct dray__remote_nccl *n, bool *moved, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; n && i < n->count && rc == DRAY_OK; i++)
        if (n->sources[i].left)
            rc = step_source(n, &n->sources[i], moved, error);
    return rc;
}

bool dray__remote_nccl_busy(const struct dray__remote_nccl *n)
{
    for (uint32_t i = 0; n && i < n->count; i++)
        if (n->sources[i].left)
            return true;
    return false;
}

/* ---- opening and closing --------------------------------------------------------------------- */

void dray__remote_nccl_close(struct dray__remote_nccl *n)
{
    if (!n)
        return;
    for (uint32_t i = 0; i < n->count; i++) {
        struct nccl_source *s = &n->sources[i];
        bool under_way = s->joining;
        for (uint32_t k = 0; k < DRAY__NCCL_SLOTS; k++) {
            struct chunk *c = s->chunks[k];
            if (!c)
                continue;
            under_way |= c->state != FREE;
            free(c->copies.items);
            free(c);
        }
        if (under_way && s->link)
            drop_link(s->link); /* its sends have no receiver any more */
        free(s->own.parts);
    }
    free(n->sources);
    free(n);
}

/* Takes the parts of a publisher that NCCL can bring from the route. */
static int take_parts(struct dray__remote_nccl *n, struct source *publisher, dray_error *error)
{
    struct nccl_source *s = &n->sources[n->count];
    uint64_t kept = 0;
    if (!publisher->count || !may_use(n->transfer, publisher->of))
        return DRAY_OK;
    *s = (struct nccl_source){.publisher = publisher,
                              .of = publisher->of,
                              .own = {.of = publisher->of, .over_nccl = true}};
    bool pushed = true;
    for (uint64_t i = 0; i < publisher->count && pushed; i++) {
        const struct part *part = &publisher->parts[i];
        dray__cuda_device *device =
            device_for(n->transfer, publisher->of, &n->transfer->sources->ops[part->op]);
        if (device && (!n->device || n->device == device)) {
            n->device = device;
            pushed = dray__remote_push(&s->own, part);
            s->left += bytes_of(&n->transfer->sources->ops[part->op], &part->rect);
        } else {
            publisher->parts[kept++] = *part;
        }
    }
    publisher->count = kept;
    n->count += s->own.count > 0;
    return pushed ? DRAY_OK : dray__nomem(error);
}

/* Returns the thread blocks of a pair. All pairs of a GPU (of this rank with its publishers, and of
 * a publisher with all ranks of the group) share the number of one pair, so that kernels that wait
 * for their other side leave room for the kernels that this side waits for. */
static uint32_t blocks_of(const struct dray__remote_nccl *n)
{
    const dray__transfer *h = n->transfer;
    uint32_t most = h->options.ctas ? h->options.ctas : DRAY__NCCL_CTAS;
    uint32_t pairs = n->count > h->destination->world ? n->count : h->destination->world;
    uint32_t each = pairs > 1 ? most / pairs : most;
    return each < 1 ? 1 : each > DRAY__NCCL_CTAS ? DRAY__NCCL_CTAS : each;
}

static int open_link(struct dray__remote_nccl *n, struct nccl_source *s, uint64_t slot,
                     dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t k = 0; k < DRAY__NCCL_SLOTS && rc == DRAY_OK; k++) {
        s->chunks[k] = calloc(1, sizeof *s->chunks[k]);
        rc = s->chunks[k] ? DRAY_OK : dray__nomem(error);
    }
    struct link *link = dray__kept_find(s->of->kept, forget_link);
    if (rc == DRAY_OK && !link) {
        link = calloc(1, sizeof *link);
        rc = link ? dray__peer_new(s->of->endpoint, n->transfer->options.keys, &link->peer, error)
                  : dray__nomem(error);
        if (rc)
            free(link);
        else
            rc = dray__kept_add(&s->of->kept, forget_link, link, error);
    }
    if (rc)
        return rc;
    s->link = link;
    uint32_t ctas = blocks_of(n);
    if (link->pair && (link->slot_bytes != slot || link->ctas != ctas ||
                       link->verify != n->transfer->options.verify))
        drop_link(link); /* its slots or sums do not suit this update */
    if (!link->pair) {
        link->slot_bytes = slot;
        link->ctas = ctas;
        link->verify = n->transfer->options.verify;
    }
    s->pieces = s->left / slot + 1;
    s->wire_before = dray__peer_wire_bytes(link->peer);
    s->began_ns = dray__now();
    return DRAY_OK;
}

/* Drops the slots that an earlier update kept, because this one may not hold so much memory. */
static void drop_links(const dray__transfer *transfer)
{
    for (uint32_t i = 0; i < transfer->sources->count; i++) {
        struct link *link = dray__kept_find(transfer->sources->sources[i].kept, forget_link);
        if (link)
            drop_link(link);
    }
}

static uint64_t slot_of(uint64_t ceiling, uint32_t sources)
{
    uint64_t slot = ceiling / (DRAY__NCCL_SLOTS * (uint64_t)(sources ? sources : 1));
    return slot > DRAY__NCCL_SLOT_MAX ? DRAY__NCCL_SLOT_MAX : slot & ~(uint64_t)4095;
}

bool dray__nccl_has_room(uint64_t ceiling, uint32_t sources)
{
    return slot_of(ceiling, sources) >= DRAY__NCCL_SLOT_MIN;
}

int dray__remote_nccl_open(struct remote_route *l, dray_error *error)
{
    uint64_t ceiling = l->transfer->options.nccl_bytes;
    struct dray__remote_nccl *n = calloc(1, sizeof *n);
    if (!n)
        return dray__nomem(error);
    n->route = l;
    n->transfer = l->transfer;
    l->nccl = n;
    n->sources = calloc((size_t)l->publishers + 1, sizeof *n->sources);
    int rc = n->sources ? DRAY_OK : dray__nomem(error);
    bool room = dray__nccl_has_room(ceiling, l->publishers);
    for (uint32_t i = 0; i < l->publishers && rc == DRAY_OK && room; i++)
        rc = take_parts(n, &l->sources[i], error);
    for (uint32_t i = 0; i < n->count && rc == DRAY_OK; i++)
        rc = open_link(n, &n->sources[i], slot_of(ceiling, n->count), error);
    if (rc)
        return rc;
    if (!room)
        drop_links(n->transfer);
    if (!n->count) {
        dray__remote_nccl_close(n);
        l->nccl = NULL;
    }
    return DRAY_OK;
}

uint64_t dray__remote_nccl_wire(const struct dray__remote_nccl *n)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; n && i < n->count; i++)
        bytes += dray__peer_wire_bytes(n->sources[i].link->peer) - n->sources[i].wire_before;
    return bytes;
}

uint64_t dray__remote_nccl_held(const struct dray__remote_nccl *n)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; n && i < n->count; i++)
        bytes += DRAY__NCCL_SLOTS * n->sources[i].link->slot_bytes;
    return bytes;
}

bool dray__remote_nccl_explain(const struct dray__remote_nccl *n, dray_error *error)
{
    for (uint32_t i = 0; n && i < n->count; i++) {
        const struct nccl_source *s = &n->sources[i];
        if (!s->left)
            continue;
        dray__fail_prefix(
            error, error->code, "publisher %s at %s %s: ", s->of->name, s->of->endpoint,
            s->link->ready ? "sends slowly over NCCL" : "has not joined a communicator of NCCL's");
        return true;
    }
    return false;
}
