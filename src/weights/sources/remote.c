/* Data servers as a source: of other hosts, and of publishers on this host with staging arenas. It
 * requests slices of the planned rectangles (pull.h), with many requests in flight but never more
 * bytes than the ceiling, receives each answer into a slot that stays in cache, and moves it from
 * there to its destination.
 *
 * For each slice these are checked: the received bytes against the sum of the sent ones; the bits
 * that the mover wrote against those read back; and the source's own bits, as the server summed
 * them, against the announced sums. The server makes narrowing conversions, and this rank makes
 * widening ones, so that the smaller form is sent.
 *
 * From a source with deltas, a rank that holds the delta's base requests the deltas' slices, and
 * may get the changes of a slice instead of all its elements. The sum in the answer is compared
 * with the whole resulting slice; a slice that differs is fetched whole.
 *
 * With RDMA, slices that are compared as a whole are read one-sidedly (remote_read.c) instead.
 *
 * GPU memory of publishers on other hosts comes over NCCL if that can be used (remote_nccl.c).
 * A publisher on this host with a staging arena (arena.h) writes answers into it. The next request
 * is under way while the last answer is copied out, so that both sides are busy.
 *
 * A connection that breaks, or is silent for STALL_NS, is opened again, until the update's
 * deadline. Answers that arrived are kept, all others are requested again. */
#include "weights/sources/remote.h"
#include "base/error.h"
#include "base/log.h"
#include "mover/cuda/nccl.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/epoll.h>

/* ---- answers --------------------------------------------------------------------------------- */

static int break_off(struct remote_route *l, struct source *s, const dray_error *why,
                     dray_error *error);

/* Tells the server that it may fill the slot again. A broken connection is noticed later. */
static void hand_back(struct source *s, uint32_t id)
{
    dray__request_begin(dray__peer_out(s->link), DRAY__DATA_TAKEN, id);
    dray__peer_send(s->link, NULL);
}

/* Was the answer in the arena for longer than its lease? */
static bool too_late(const struct source *s, const struct request *request)
{
    return s->staged && dray__now() - request->asked_ns > DRAY__ARENA_LEASE_NS;
}

/* Takes an answer that has arrived completely. */
static int take(struct remote_route *l, struct source *s, const uint8_t *head, dray_error *error)
{
    struct request *request = s->flying.first;
    int rc = dray__remote_place(l, s, request, head, error);
    if (rc)
        return rc;
    if (l->transfer->options.verify && !dray__remote_unchanged(l, s, request, head)) {
        dray_error why;
        request->plain = true; /* the held version may have changed */
        dray__fail(&why, DRAY_ECHECKSUM, "the bytes from %s are not those that it sent",
                   s->of->name);
        if (++s->wrong < WRONG_MAX && !s->cohort)
            return break_off(l, s, &why, error);
        if (error)
            *error = why;
        return why.code;
    }
    if (too_late(s, request)) {
        dray_error why;
        request->plain = true; /* the changes are applied, and steps must not be applied twice */
        dray__fail(&why, DRAY_ETIMEDOUT, "the answer of %s in its arena was not copied out in %d s",
                   s->of->name, (int)(DRAY__ARENA_LEASE_NS / DRAY__SECOND));
        return break_off(l, s, &why, error);
    }
    s->wrong = 0;
    rc = dray__remote_place_prequantised(l, s, request, error);
    if (rc)
        return rc;
    dray__remote_enter(l, s, request, head);
    if (s->cohort && s->of->host == l->transfer->destination->host)
        l->fanned_bytes += request->bytes;
    s->probing = false;
    s->brought_ns = dray__now();
    uint32_t id = request->id;
    dray__remote_end(l, dray__remote_landed(l, s));
    if (s->staged)
        hand_back(s, id);
    else if (s->slot)
        l->slots[l->free_slots++] = s->slot;
    s->slot = NULL;
    return DRAY_OK;
}

/* Takes a one-sided read that has landed. */
static int take_read(struct remote_route *l, struct source *s, bool *fatal, dray_error *error)
{
    struct request *request = s->flying.first;
    int rc = dray__remote_read_done(s, request, error);
    if (rc)
        return rc;
    s->broken = false;
    s->pause_ns = PAUSE_MIN_NS;
    s->slot = request->slot;
    request->slot = NULL;
    rc = take(l, s, NULL, error);
    *fatal = rc != DRAY_OK;
    return rc;
}

static int not_due(const struct source *s, dray_error *error)
{
    return dray__fail(error, DRAY_EPROTO, "publisher %s at %s: not the answer that was due",
                      s->of->name, s->of->endpoint);
}

/* Checks that the answer belongs to the oldest request and has the right size. Returns DRAY_EAGAIN
 * for the answer "not yet", which only members of the cohort may give. */
static int check_answer(const struct remote_route *l, const struct source *s,
                        const dray__arrival *arrival, dray_error *error)
{
    const struct request *request = s->flying.first;
    const dray__answer *header = &arrival->header;
    if (!request || request->id != header->id || (header->status == DRAY_EAGAIN && !s->cohort))
        return not_due(s, error);
    if (s->cohort && (header->status == DRAY_EAGAIN || header->status == DRAY_EUNSUPPORTED))
        return header->status;
    if (header->status) {
        dray__reader in = dray__reader_of(arrival->head, header->head_bytes);
        char *message = dray__get_prose(&in, DRAY__HEAD_MAX);
        int rc = dray__fail(error, header->status, "publisher %s at %s: %s", s->of->name,
                            s->of->endpoint, message ? message : "?");
        free(message);
        return rc;
    }
    bool fits = header->head_bytes ==
                    dray__remote_head_start(s) +
                        request->count *
                            dray__pull_head_bytes(l->transfer->options.verify, !request->plain) &&
                dray__remote_fits(l, s, request, arrival);
    return fits ? DRAY_OK : not_due(s, error);
}

/* Returns how long a member of the cohort may answer "not yet". Tensors that it fetches from GPU
 * memory arrive only after a communicator is made. */
static int64_t patience(const struct remote_route *l)
{
    int version;
    bool gpus = false;
    for (uint32_t i = 0; i < l->publishers && !gpus; i++) {
        const dray_layout *layout = l->sources[i].of->layout;
        for (uint32_t k = 0; k < dray_layout_region_count(layout) && !gpus; k++)
            gpus = dray_layout_region(layout, k)->kind == DRAY_REGION_CUDA;
    }
    return PATIENCE_NS + (gpus && dray__nccl_find(&version, NULL) == DRAY_OK ? JOIN_NS : 0);
}

/* Handles the answer "not yet" of a member of the cohort. It is asked again after an eighth of the
 * time since its last bytes, within bounds: it may wait for NCCL. */
static int not_yet(struct remote_route *l, struct source *s, dray_error *error)
{
    int64_t now = dray__now(), pause = (now - s->brought_ns) / 8;
    pause = pause < NOT_YET_NS ? NOT_YET_NS : pause > NOT_YET_MAX_NS ? NOT_YET_MAX_NS : pause;
    int rc = dray__peer_recv_data(s->link, NULL, error); /* the answer has no data */
    if (rc)
        return rc;
    struct request *request = dray__remote_landed(l, s);
    *s->again.last = request;
    s->again.last = &request->next;
    s->probing = true;
    s->asleep_ns = now + pause;
    if (s->asleep_ns - s->brought_ns > PATIENCE_NS && s->asleep_ns - s->brought_ns > patience(l))
        return dray__fail(error, DRAY_ETIMEDOUT, "%s has had nothing new for a while", s->of->name);
    return DRAY_EAGAIN;
}

static bool ask_publisher(struct remote_route *l, const struct source *s, const struct slice *slice)
{
    struct part part = s->parts[slice->part];
    part.block = part.publisher_block;
    part.rect = slice->rect;
    return dray__remote_push(&l->sources[part.publisher], &part);
}

/* Handles the answer of a member of the cohort that it will not have this form: the publishers are
 * asked instead. */
static int never(struct remote_route *l, struct source *s, dray_error *error)
{
    int rc = dray__peer_recv_data(s->link, NULL, error);
    if (rc)
        return rc;
    struct request *request = dray__remote_landed(l, s);
    bool kept = true;
    for (uint32_t i = 0; i < request->count; i++)
        kept &= ask_publisher(l, s, &request->slices[i]);
    dray__remote_end(l, request);
    return kept ? DRAY_OK : dray__nomem(error);
}

static bool needs_slot(const struct source *s)
{
    bool direct = s->flying.first && s->flying.first->direct; /* it has its own, or needs none */
    return !s->staged && !s->slot && !direct;
}

/* Sends the next requests, so that the server fills one slot while the other is copied out. */
static int ask_ahead(struct remote_route *l, struct source *s, dray_error *error)
{
    s->copying = true;
    int rc = dray__remote_ask(l, s, error);
    s->copying = false;
    if (rc == DRAY_OK)
        dray__peer_send(s->link, NULL); /* an error is noticed later */
    return rc;
}

/* Receives one answer. */
static int receive(struct remote_route *l, struct source *s, bool *fatal, dray_error *error)
{
    dray__arrival arrival;
    if (s->keys == KEYS_ASKED)
        return dray__remote_take_keys(l, s, error);
    if (s->flying.first && s->flying.first->direct && !s->cohort)
        return take_read(l, s, fatal, error);
    int rc = dray__peer_recv_head(s->link, &arrival, error);
    if (rc)
        return rc;
    rc = check_answer(l, s, &arrival, error);
    if (rc == DRAY_EAGAIN)
        return not_yet(l, s, error);
    if (rc == DRAY_EUNSUPPORTED && s->cohort)
        return never(l, s, error);
    *fatal = rc != DRAY_OK;
    if (rc)
        return rc;
    if (needs_slot(s) && !l->free_slots)
        return DRAY_EAGAIN; /* until another source's answer is complete */
    if (needs_slot(s))
        s->slot = l->slots[--l->free_slots];
    rc = dray__peer_recv_data(s->link, s->slot ? dray_region_base(s->slot) : NULL, error);
    if (rc)
        return rc;
    s->broken = false;
    s->pause_ns = PAUSE_MIN_NS;
    rc = s->staged ? ask_ahead(l, s, error) : DRAY_OK;
    if (rc == DRAY_OK)
        rc = take(l, s, arrival.head, error);
    *fatal = rc != DRAY_OK;
    return rc;
}

/* ---- connections that break ------------------------------------------------------------------ */

/* Frees the slots of requests over a broken connection. */
static void free_slots(struct remote_route *l, struct source *s)
{
    dray__remote_forget_keys(s, true);
    for (struct request *r = s->flying.first; r; r = r->next) {
        if (r->slot)
            l->slots[l->free_slots++] = r->slot;
        r->slot = NULL;
    }
    if (s->slot)
        l->slots[l->free_slots++] = s->slot;
    s->slot = NULL;
}

/* Sends the requests under way again, over a new connection, after a pause. */
static int break_off(struct remote_route *l, struct source *s, const dray_error *why,
                     dray_error *error)
{
    int64_t now = dray__now();
    dray__log(DRAY_LOG_INFO, "%s is asked again over a new connection: %s", s->of->name,
              why->message);
    dray__peer_drop(s->link);
    s->watched = false;
    free_slots(l, s);
    if (s->flying.first) {
        *s->flying.last = s->again.first;
        if (!s->again.first)
            s->again.last = s->flying.last;
        s->again.first = s->flying.first;
        s->flying.first = NULL;
        s->flying.last = &s->flying.first;
    }
    l->in_flight -= s->flying_bytes;
    s->flying_bytes = 0;
    l->transfer->told.retries++;
    s->trouble = *why;
    if (!s->broken)
        s->broken_ns = now;
    s->broken = true;
    s->retry_ns = now + s->pause_ns;
    s->pause_ns = s->pause_ns * 2 < PAUSE_MAX_NS ? s->pause_ns * 2 : PAUSE_MAX_NS;
    /* The host is up and no process listens, so the publisher has ended. */
    if (why->raw == ECONNREFUSED && now - s->broken_ns > REFUSED_NS)
        return dray__fail(error, DRAY_EDEAD, "publisher %s is gone: %s", s->of->name, why->message);
    return DRAY_OK;
}

/* Moves the parts of a member of the cohort that failed to the publishers. */
static int leave_member(struct remote_route *l, struct source *s, const dray_error *why,
                        dray_error *error)
{
    dray__log(DRAY_LOG_INFO, "%s of the cohort is left, the publishers bring the rest: %s",
              s->of->name, why->message);
    dray__peer_drop(s->link);
    s->watched = false;
    free_slots(l, s);
    l->in_flight -= s->flying_bytes;
    s->flying_bytes = 0;
    l->transfer->told.retries++;
    bool kept = true;
    struct queue *queues[] = {&s->flying, &s->again};
    for (size_t q = 0; q < 2; q++)
        for (const struct request *r = queues[q]->first; r; r = r->next)
            for (uint32_t i = 0; i < r->count; i++)
                kept &= ask_publisher(l, s, &r->slices[i]);
    struct slice slice;
    while (dray__remote_next_slice(l, s, UINT64_MAX, &slice))
        kept &= ask_publisher(l, s, &slice);
    for (size_t q = 0; q < 2; q++) {
        dray__remote_free(queues[q]);
        queues[q]->last = &queues[q]->first;
    }
    return kept ? DRAY_OK : dray__nomem(error);
}

static int watch(struct remote_route *l, struct source *s, dray_error *error)
{
    if (!dray__peer_is_open(s->link))
        return DRAY_OK; /* the waker's time is that of the next attempt */
    short events = dray__peer_events(s->link);
    if (needs_slot(s) && !l->free_slots)
        events = (short)(events & ~POLLIN); /* until another source frees a slot */
    if (s->watched && events == s->events)
        return DRAY_OK;
    struct epoll_event event = {.events = (uint32_t)events};
    int fd = dray__peer_fd(s->link);
    if (epoll_ctl(l->waker.fd, s->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event))
        return dray__fail_errno(error, errno, "descriptors of an update");
    s->watched = true;
    s->events = events;
    return DRAY_OK;
}

/* Is there anything to request, to receive, or to give back? */
static bool is_busy(const struct source *s)
{
    return dray__remote_wants(s) || s->flying.first || (s->staged && dray__peer_owes(s->link));
}

/* Returns true when trying again is useless, because the two sides cannot communicate. */
static bool hopeless(int rc)
{
    return rc == DRAY_EPERM || rc == DRAY_EVERSION || rc == DRAY_EUNSUPPORTED ||
           rc == DRAY_EINVALID || rc == DRAY_ENOMEM;
}

/* Does the present work of one source. *moved is set when there was any. */
static int serve(struct remote_route *l, struct source *s, bool *moved, dray_error *error)
{
    dray_error why;
    bool fatal = false;
    if (!is_busy(s))
        return DRAY_OK;
    if (s->broken && !dray__peer_is_open(s->link) && dray__now() < s->retry_ns)
        return DRAY_OK;
    int rc = dray__peer_open(s->link, &why);
    if (rc == DRAY_OK) {
        rc = dray__remote_ask(l, s, error);
        if (rc)
            return rc;
        rc = dray__peer_send(s->link, &why);
    }
    fatal = hopeless(rc);
    if (rc == DRAY_OK || rc == DRAY_EAGAIN)
        rc = receive(l, s, &fatal, &why);
    if (s->cohort && rc && rc != DRAY_EAGAIN) {
        *moved = true;
        return leave_member(l, s, &why, error);
    }
    if (fatal) {
        if (error)
            *error = why;
        return rc;
    }
    *moved |= rc == DRAY_OK;
    if (rc == DRAY_EAGAIN && dray__now() - dray__peer_moved(s->link) > STALL_NS)
        rc = dray__fail(&why, DRAY_ETIMEDOUT, "%s has been silent for %d s", s->of->endpoint,
                        (int)(STALL_NS / DRAY__SECOND));
    if (rc && rc != DRAY_EAGAIN && s->cohort)
        return leave_member(l, s, &why, error);
    if (rc && rc != DRAY_EAGAIN)
        return break_off(l, s, &why, error);
    return watch(l, s, error);
}

/* ---- the route ------------------------------------------------------------------------------- */

static bool finished(const struct remote_route *l)
{
    if (dray__remote_nccl_busy(l->nccl))
        return false;
    for (uint32_t i = 0; i < l->count; i++)
        if (is_busy(&l->sources[i]))
            return false;
    return true;
}

/* Returns the time until the next check when no descriptor is readable; this also detects silence.
 */
static int64_t next_look(const struct remote_route *l)
{
    for (uint32_t i = 0; i < l->count; i++)
        if (l->sources[i].flying.first && dray__peer_is_blind(l->sources[i].link))
            return BLIND_NS;
    if (dray__remote_nccl_busy(l->nccl))
        return NCCL_NS;
    return l->cohort ? NOT_YET_NS : TICK_NS;
}

static int route_step(dray__route *route, int64_t until_ns, dray_error *error)
{
    struct remote_route *l = route->state;
    bool moved = true;
    while (moved && dray__now() < until_ns) {
        moved = false;
        int rc = dray__remote_nccl_step(l->nccl, &moved, error);
        if (rc)
            return rc;
        for (uint32_t i = 0; i < l->count; i++) {
            rc = serve(l, &l->sources[i], &moved, error);
            if (rc)
                return rc;
        }
    }
    route->held = l->peak + dray__remote_nccl_held(l->nccl);
    if (finished(l))
        return DRAY_OK;
    route->waits = !moved;
    dray__waker_after(&l->waker, next_look(l));
    return DRAY_EAGAIN;
}

static void route_report(const void *state, dray_update_report *report)
{
    const struct remote_route *l = state;
    for (uint32_t i = 0; i < l->count; i++) {
        const struct source *s = &l->sources[i];
        if (s->link && s->of->host != l->transfer->destination->host)
            report->wire_bytes += dray__peer_wire_bytes(s->link);
    }
    report->wire_bytes += dray__remote_nccl_wire(l->nccl) - l->wire_before;
    report->link_bytes[DRAY_LINK_NETWORK] -= l->fanned_bytes;
    report->link_bytes[DRAY_LINK_HOST] += l->fanned_bytes;
}

/* Names the sources that did not answer. */
static void route_explain(const void *state, dray_error *error)
{
    const struct remote_route *l = state;
    if (dray__remote_nccl_explain(l->nccl, error))
        return;
    for (uint32_t i = 0; i < l->count; i++) {
        const struct source *s = &l->sources[i];
        if (!dray__remote_wants(s) && !s->flying.first)
            continue;
        dray__fail_prefix(error, error->code, "publisher %s at %s%s%s: ", s->of->name,
                          s->of->endpoint, s->broken ? " cannot be reached, " : " answers slowly",
                          s->broken ? s->trouble.message : "");
        return;
    }
}

const dray__source_type dray__source_server = {.name = "server",
                                               .bytes = sizeof(struct remote_route),
                                               .reaches = dray__remote_reaches,
                                               .open = dray__remote_open,
                                               .step = route_step,
                                               .report = route_report,
                                               .explain = route_explain,
                                               .close = dray__remote_close};
