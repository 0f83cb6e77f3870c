/* Opening and closing an engine rank, and questions about what it holds. */
#include "weights/subscriber.h"
#include "weights/fan.h"

#include "weights/serve.h"

#include "base/clock.h"
#include "base/error.h"
#include "weights/load.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

static int read_options(const dray_subscriber_options *given, dray_subscriber_options *out,
                        dray_error *error)
{
    return dray__options_read(out, sizeof *out, dray__end_of(dray_subscriber_options, timeout_ns),
                              given, "dray_subscriber_options", error);
}

static int check(dray_context *context, const char *model, const dray_layout *layout,
                 const dray_subscriber_options *options, dray_subscriber **out, dray_error *error)
{
    if (!context || !model || !layout || !options || !out)
        return dray__fail(error, DRAY_EINVALID,
                          "context, model, layout, options and out must be given");
    if (options->timeout_ns < 0 || !options->group || !options->group[0])
        return dray__fail(error, DRAY_EINVALID,
                          "a subscriber needs a group's name and a timeout that is not negative");
    if (options->staging && options->staging != DRAY_REGION_PINNED)
        return dray__fail(error, DRAY_EINVALID, "staging %d: 0 or DRAY_REGION_PINNED",
                          options->staging);
    if (options->load)
        return DRAY_OK;
    int rc = dray__regions_check(layout, options->regions, error);
    for (uint32_t i = 0; i < dray_layout_region_count(layout) && rc == DRAY_OK; i++)
        if (dray_region_get_kind(options->regions[i]) == DRAY_REGION_FILE)
            rc = dray__fail(error, DRAY_EUNSUPPORTED, "updating %s memory",
                            dray_region_kind_name(dray_region_get_kind(options->regions[i])));
    return rc;
}

static int watch(int poll_fd, int fd)
{
    struct epoll_event event = {.events = EPOLLIN};
    return fd < 0 ? -1 : epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &event);
}

static int open_descriptors(dray_subscriber *s, dray_error *error)
{
    s->poll_fd = epoll_create1(EPOLL_CLOEXEC);
    s->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    s->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (s->poll_fd < 0 || watch(s->poll_fd, s->event_fd) || watch(s->poll_fd, s->timer_fd) ||
        watch(s->poll_fd, dray__channel_fd(s->channel)))
        return dray__fail_errno(error, errno, "descriptors of a subscriber");
    return DRAY_OK;
}

/* The layout's, and behind them the board. */
static dray_region *region_of(const dray_subscriber *s, uint32_t region)
{
    return region < dray_layout_region_count(s->destination.layout) ? s->destination.regions[region]
                                                                    : s->destination.board;
}

/* Regions that others can read: only where descriptors can pass. */
static bool offered(const dray_subscriber *s, uint32_t region)
{
    return !s->load && strncmp(dray__context_address(s->context), "unix:", 5) == 0 &&
           dray__region_offered(region_of(s, region));
}

/* A rank on a GPU of this host may upload what others want, too. */
static int open_board(dray_subscriber *s, dray_error *error)
{
    for (uint32_t i = 0; !s->load && i < dray_layout_region_count(s->destination.layout); i++)
        if (dray_region_get_kind(s->destination.regions[i]) == DRAY_REGION_CUDA && offered(s, i))
            return dray__fan_board_new(&s->destination.board, error);
    return DRAY_OK;
}

/* Comes back: what this rank was. An update that was in progress is over; see end() in update.c. */
static void put_claim(const dray_subscriber *s, dray__writer *w)
{
    dray__put_u64(w, s->group_set);
    dray__put_u8(w, (uint8_t)s->state);
    dray__put_u8(w, (uint8_t)s->mode);
    dray__put_u64(w, s->version);
    dray__put_u64(w, s->incarnation);
    dray__put_u8(w, s->has_staged);
    dray__put_u64(w, s->has_staged ? s->staged_version : 0);
    dray__put_u64(w, s->has_staged ? s->staged_incarnation : 0);
}

static int register_rank(dray_subscriber *s, int64_t deadline, dray_error *error)
{
    const char *endpoint = ""; /* nobody reads what went to load_weights */
    int rc = s->load ? DRAY_OK : dray__serve_start(s->context, false, &endpoint, error);
    if (rc)
        return rc;
    uint64_t returns = dray__context_returns(s->context);
    uint32_t regions = dray_layout_region_count(s->destination.layout), shared = 0;
    regions += s->destination.board != NULL;
    for (uint32_t i = 0; i < regions; i++)
        shared += offered(s, i);
    dray__writer w = {0};
    dray__put_string(&w, s->model);
    dray__put_string(&w, s->group);
    dray__put_u32(&w, s->destination.rank);
    dray__put_u32(&w, s->destination.world);
    dray__put_u64(&w, s->token);
    dray__put_string(&w, endpoint);
    dray__put_u32(&w, s->load ? 0 : regions);
    dray__put_u32(&w, shared);
    dray__put_bytes(&w, s->packed.data, s->packed.size);
    if (s->key)
        put_claim(s, &w);
    dray__reply reply;
    rc = dray__call(s->channel, DRAY__MSG_SUBSCRIBER_OPEN, &w, NULL, 0, deadline, &reply, error);
    dray__writer_free(&w);
    if (rc)
        return rc;
    s->key = dray__get_u64(&reply.payload);
    s->returns = returns;
    dray__sums_forms_clear(&s->sent);
    rc = dray__reader_finish(&reply.payload, "SUBSCRIBER_OPEN", error);
    for (uint32_t i = 0; i < regions && rc == DRAY_OK; i++)
        if (offered(s, i))
            rc = dray__region_put(s->channel, s->context, s->key, i, region_of(s, i), NULL,
                                  deadline, error);
    return rc;
}

int dray__subscriber_ensure(dray_subscriber *s, int64_t deadline_ns, dray_error *error)
{
    dray__channel *channel;
    if (dray__channel_alive(s->channel))
        return DRAY_OK;
    int rc = dray__channel_open_until(s->context, deadline_ns, &channel, error);
    if (rc)
        return rc;
    dray__channel_close(s->channel); /* leaves the poll descriptor */
    s->channel = channel;
    s->channel_stuck = false;
    if (watch(s->poll_fd, dray__channel_fd(channel)))
        return dray__fail_errno(error, errno, "descriptors of a subscriber");
    if (s->returns == dray__context_returns(s->context))
        return DRAY_OK;
    return register_rank(s, deadline_ns, error);
}

/* The destination: the caller's layout and regions, or ours of a load_weights engine. */
static int take_layout(dray_subscriber *s, const dray_layout *layout,
                       const dray_subscriber_options *options, dray__writer *packed,
                       dray_error *error)
{
    dray_load_options load = DRAY_LOAD_OPTIONS_INIT;
    dray_layout *made = NULL;
    int rc = DRAY_OK;
    if (options->load) {
        rc = dray__options_read(&load, sizeof load, dray__end_of(dray_load_options, together_count),
                                options->load, "dray_load_options", error);
        if (rc == DRAY_OK)
            rc = dray__load_open(layout, &load, &s->load, &made, error);
        if (rc)
            return rc;
        layout = made;
        s->destination.regions =
            calloc((size_t)dray__load_rounds(s->load) + 1, sizeof *s->destination.regions);
    } else {
        s->destination.regions = dray__regions_copy(layout, options->regions);
    }
    rc = s->destination.regions ? dray__layout_copy(layout, options->load ? NULL : options->regions,
                                                    &s->destination.layout, packed, error)
                                : dray__nomem(error);
    dray_layout_free(made);
    return rc;
}

int dray_subscriber_open(dray_context *context, const char *model, const dray_layout *layout,
                         const dray_subscriber_options *given, dray_subscriber **out,
                         dray_error *error)
{
    dray_subscriber_options own = DRAY_SUBSCRIBER_OPTIONS_INIT, *options = &own;
    int rc = given ? read_options(given, options, error) : DRAY_OK;
    if (rc == DRAY_OK)
        rc = check(context, model, layout, given ? options : NULL, out, error);
    if (rc)
        return rc;
    dray_subscriber *s = calloc(1, sizeof *s);
    if (!s)
        return dray__nomem(error);
    s->context = context;
    s->poll_fd = s->event_fd = s->timer_fd = -1;
    dray__steps_init(&s->steps);
    s->stage_kind = options->staging;
    s->timeout_ns = options->timeout_ns ? options->timeout_ns : DRAY_WAIT_DEFAULT;
    s->model = strdup(model);
    s->group = strdup(options->group);
    s->destination.member = dray_context_member(context);
    s->destination.host = dray__context_host(context);
    s->destination.rank = options->rank;
    s->destination.world = options->world ? options->world : 1;
    rc = s->model && s->group ? take_layout(s, layout, options, &s->packed, error)
                              : dray__nomem(error);
    if (rc == DRAY_OK && !s->load) {
        s->token = s->destination.token = dray__local_token();
        rc = dray__local_add(s->token, s->destination.layout, s->destination.regions,
                             dray_layout_region_count(layout), NULL, NULL, error);
        s->local = rc == DRAY_OK;
    }
    if (rc == DRAY_OK)
        rc = open_board(s, error);
    if (rc == DRAY_OK)
        rc = dray__channel_open(context, &s->channel, error);
    if (rc == DRAY_OK)
        rc = open_descriptors(s, error);
    if (rc == DRAY_OK)
        rc = register_rank(s, dray__context_deadline(context, s->timeout_ns), error);
    if (rc) {
        dray_subscriber_close(s);
        return rc;
    }
    *out = s;
    return DRAY_OK;
}

static void close_fd(int fd)
{
    if (fd >= 0)
        close(fd);
}

void dray_subscriber_close(dray_subscriber *s)
{
    if (!s)
        return;
    if (s->channel && s->key) {
        dray__writer w = {0};
        dray__put_u64(&w, s->key);
        dray__call(s->channel, DRAY__MSG_WEIGHTS_CLOSE, &w, NULL, 0,
                   dray__deadline(5 * DRAY__SECOND), NULL, NULL);
        dray__writer_free(&w);
    }
    if (s->local)
        dray__local_remove(s->token);
    dray__update_release(s);
    dray__stage_drop(s);
    dray__sources_free(s->live);
    dray__sources_free(s->disk);
    close_fd(s->poll_fd);
    close_fd(s->event_fd);
    close_fd(s->timer_fd);
    dray__channel_close(s->channel);
    free(s->block_sums);
    dray__sums_form_drop(s->read_form);
    dray__sums_form_drop(s->lies_form);
    dray__sums_forms_clear(&s->sent);
    dray__writer_free(&s->packed);
    dray_layout_free(s->destination.layout);
    dray_region_free(s->destination.board);
    free(s->destination.regions);
    dray__load_close(s->load);
    free(s->model);
    free(s->group);
    dray__steps_destroy(&s->steps);
    free(s);
}

void dray__subscriber_unmapped(dray_subscriber *s, uint64_t set)
{
    dray__writer w = {0};
    dray__put_u64(&w, s->key);
    dray__put_u64(&w, set);
    dray__notify(s->channel, DRAY__MSG_REGIONS_DROP, &w, NULL);
    dray__writer_free(&w);
}

void dray__subscriber_forget(dray_subscriber *s, dray__sources **sources)
{
    uint64_t set = *sources ? (*sources)->source_set : 0;
    dray__sources_free(*sources);
    *sources = NULL;
    if (set)
        dray__subscriber_unmapped(s, set);
}

int dray_subscriber_attend(dray_subscriber *s, dray_error *error)
{
    if (!s)
        return dray__fail(error, DRAY_EINVALID, "subscriber must be given");
    if (s->phase != PHASE_IDLE || (!s->live && dray__channel_alive(s->channel)))
        return DRAY_OK; /* the update in progress ends first; without a plan nothing is mapped */
    int64_t deadline = dray__context_deadline(s->context, s->timeout_ns);
    int rc = dray__subscriber_ensure(s, deadline, error);
    if (rc)
        return rc;
    dray__writer w = {0};
    dray__put_u64(&w, s->key);
    dray__reply reply;
    rc = dray__call(s->channel, DRAY__MSG_REGIONS_REVOKED, &w, NULL, 0, deadline, &reply, error);
    dray__writer_free(&w);
    if (rc)
        return rc;
    uint32_t count = dray__get_count(&reply.payload, 8);
    uint64_t *sets = calloc((size_t)count + 1, sizeof *sets);
    for (uint32_t i = 0; i < count && sets; i++)
        sets[i] = dray__get_u64(&reply.payload);
    rc = sets ? dray__reader_finish(&reply.payload, "REGIONS_REVOKED", error) : dray__nomem(error);
    for (uint32_t i = 0; i < count && rc == DRAY_OK; i++)
        if (s->live && s->live->source_set == sets[i])
            dray__subscriber_forget(s, &s->live);
        else /* what said so was lost with its connection */
            dray__subscriber_unmapped(s, sets[i]);
    free(sets);
    return rc;
}

int dray_subscriber_leave(dray_subscriber *s, int64_t timeout_ns, uint32_t *revoked,
                          dray_error *error)
{
    if (!s || (timeout_ns < 0 && timeout_ns != DRAY_WAIT_DEFAULT))
        return dray__fail(error, DRAY_EINVALID, "subscriber must be given, timeout not negative");
    int64_t deadline = dray__context_deadline(
        s->context, timeout_ns == DRAY_WAIT_DEFAULT ? s->timeout_ns : timeout_ns);
    int rc = dray__subscriber_ensure(s, deadline, error);
    if (rc)
        return rc;
    int64_t left = deadline - dray__now();
    dray__writer w = {0};
    dray__put_u64(&w, s->key);
    dray__put_i64(&w, left > 0 ? left : 0);
    dray__reply reply;
    rc = dray__call(s->channel, DRAY__MSG_SUBSCRIBER_LEAVE, &w, NULL, 0,
                    dray__answer_deadline(deadline), &reply, error);
    dray__writer_free(&w);
    if (rc)
        return rc;
    uint32_t count = dray__get_u32(&reply.payload);
    rc = dray__reader_finish(&reply.payload, "SUBSCRIBER_LEAVE", error);
    if (rc == DRAY_OK && revoked)
        *revoked = count;
    return rc;
}

int dray_subscriber_fd(const dray_subscriber *subscriber)
{
    return subscriber ? subscriber->poll_fd : -1;
}

int dray__subscriber_watch(dray_subscriber *s, int fd, dray_error *error)
{
    if (fd >= 0 && watch(s->poll_fd, fd))
        return dray__fail_errno(error, errno, "descriptors of an update");
    return DRAY_OK;
}

void dray__subscriber_signal(dray_subscriber *s, bool ready)
{
    if (s->event_set == ready)
        return;
    uint64_t value = 1;
    ssize_t n =
        ready ? write(s->event_fd, &value, sizeof value) : read(s->event_fd, &value, sizeof value);
    if (n == (ssize_t)sizeof value)
        s->event_set = ready;
}

/* A question: asked again of the next coordinator where this one went away meanwhile. */
static int ask_state(dray_subscriber *s, dray__reply *reply, dray_error *error)
{
    int64_t deadline = dray__context_deadline(s->context, s->timeout_ns);
    for (;;) {
        int rc = s->phase == PHASE_IDLE ? dray__subscriber_ensure(s, deadline, error) : DRAY_OK;
        if (rc)
            return rc;
        dray__writer w = {0};
        dray__put_u64(&w, s->key);
        rc = dray__call(s->channel, DRAY__MSG_GROUP_STATE, &w, NULL, 0, deadline, reply, error);
        dray__writer_free(&w);
        if (rc != DRAY_ECLOSED || !dray__channel_broken(s->channel) || s->phase != PHASE_IDLE ||
            !dray__context_takes_back(s->context) || dray__now() >= deadline)
            return rc;
    }
}

int dray_subscriber_version(dray_subscriber *s, uint64_t *version, uint64_t *incarnation,
                            int32_t *state, dray_error *error)
{
    if (!s)
        return dray__fail(error, DRAY_EINVALID, "subscriber must be given");
    dray__reply reply;
    int rc = ask_state(s, &reply, error);
    if (rc)
        return rc;
    uint64_t number = dray__get_u64(&reply.payload), from = dray__get_u64(&reply.payload);
    int32_t now = dray__get_u8(&reply.payload);
    dray__get_u64(&reply.payload); /* epoch */
    rc = dray__reader_finish(&reply.payload, "GROUP_STATE", error);
    if (rc)
        return rc;
    if (version)
        *version = number;
    if (incarnation)
        *incarnation = from;
    if (state)
        *state = now;
    return DRAY_OK;
}

int dray_subscriber_verify(dray_subscriber *s, dray_error *error)
{
    if (!s)
        return dray__fail(error, DRAY_EINVALID, "subscriber must be given");
    if (s->phase != PHASE_IDLE)
        return dray__fail(error, DRAY_EBUSY, "an update is in progress");
    if (s->load)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "group %s, rank %" PRIu32 ": its weights went to load_weights", s->group,
                          s->destination.rank);
    if (!s->block_sums)
        return dray__fail(error, DRAY_ENOENT,
                          "group %s, rank %" PRIu32 ": no update was committed and verified here",
                          s->group, s->destination.rank);
    const dray_layout *layout = s->destination.layout;
    uint32_t wrong = 0, first = 0;
    uint64_t first_sum = 0;
    dray_region *scratch = NULL; /* stays NULL: all of it is addressable */
    for (uint32_t b = 0; b < dray_layout_block_count(layout); b++) {
        dray__rect rect = dray__rect_of(layout, b);
        uint64_t sum = 0;
        int rc = dray__sum_rect(layout, s->destination.regions, b, &rect, &scratch, &sum, error);
        if (rc)
            return rc;
        if (sum != s->block_sums[b] && wrong++ == 0) {
            first = b;
            first_sum = sum;
        }
    }
    if (!wrong)
        return DRAY_OK;
    const dray_block *block = dray_layout_block(layout, first);
    dray__rect rect = dray__rect_of(layout, first);
    return dray__fail(
        error, DRAY_ECHECKSUM,
        "tensor %s, block %" PRIu32 " from [%" PRId64 ", %" PRId64 "] of %" PRId64 " x %" PRId64
        ": sum %016" PRIx64 ", %016" PRIx64 " after the update; %" PRIu32 " blocks differ in all",
        dray_layout_tensor(layout, block->tensor)->name, first, rect.start[0], rect.start[1],
        rect.extent[0], rect.extent[1], first_sum, s->block_sums[first], wrong);
}
