/* Opening and closing an engine rank, and queries of its version. */
#include "weights/update/subscriber.h"
#include "weights/sources/upload.h"

#include "weights/server/serve.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "memory/cuda_memory.h"
#include "weights/placements/load.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static int read_options(const dray_subscriber_options *given, dray_subscriber_options *out,
                        dray_error *error)
{
    return DRAY__OPTIONS_READ(dray_subscriber_options, timeout_ns, out, given, error);
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
    char name[200];
    snprintf(name, sizeof name, "group %.120s, rank %" PRIu32, options->group, options->rank);
    const dray_plan_member member = {.layout = layout, .name = name};
    return rc ? rc : dray__regions_apart(&member, options->regions, error);
}

static int open_descriptors(dray_subscriber *s, dray_error *error)
{
    s->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (s->event_fd < 0)
        return dray__fail_errno(error, errno, "descriptors of a subscriber");
    int rc = dray__waker_open(&s->waker, true, error);
    if (rc == DRAY_OK)
        rc = dray__waker_add(&s->waker, s->event_fd, error);
    return rc ? rc : dray__waker_add(&s->waker, dray__channel_fd(s->channel), error);
}

/* Returns a region of the layout, or behind those the progress. */
static dray_region *region_of(const dray_subscriber *s, uint32_t region)
{
    return region < dray_layout_region_count(s->destination.layout) ? s->destination.regions[region]
                                                                    : s->destination.progress;
}

/* Returns true for a region that others can map; that needs a Unix socket, which passes
 * descriptors.
 */
static bool offered(const dray_subscriber *s, uint32_t region)
{
    return !s->load && strncmp(dray__context_address(s->context), "unix:", 5) == 0 &&
           dray__region_offered(region_of(s, region));
}

/* Makes the progress page for a rank on a GPU, which may upload bytes for other ranks, too. */
static int open_progress(dray_subscriber *s, dray_error *error)
{
    for (uint32_t i = 0; !s->load && i < dray_layout_region_count(s->destination.layout); i++)
        if (dray_region_get_kind(s->destination.regions[i]) == DRAY_REGION_CUDA && offered(s, i))
            return dray__progress_new(&s->destination.progress, error);
    return DRAY_OK;
}

/* Writes this rank's former registration, for a rank that registers again. An update that was in
 * progress has ended; see end() in update.c. */
static void put_claim(const dray_subscriber *s, dray__writer *w)
{
    const dray__rank_claim claim = {.set = s->group_set,
                                    .state = (uint8_t)s->state,
                                    .mode = (uint8_t)s->mode,
                                    .version = s->version,
                                    .incarnation = s->incarnation,
                                    .staged = s->has_staged,
                                    .staged_version = s->has_staged ? s->staged_version : 0,
                                    .staged_incarnation =
                                        s->has_staged ? s->staged_incarnation : 0};
    dray__put_fields(w, &dray__subscriber_claim_fields, &claim);
}

int dray__subscriber_put(dray_subscriber *s, int64_t deadline_ns, dray_error *error)
{
    uint32_t regions =
        dray_layout_region_count(s->destination.layout) + (s->destination.progress != NULL);
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < regions && rc == DRAY_OK; i++)
        if (offered(s, i))
            rc = dray__region_put(s->channel, s->context, s->key, i, region_of(s, i), NULL,
                                  deadline_ns, error);
    return rc;
}

/* Has memory been released since it was offered? Then there is other physical memory now. */
static bool is_elsewhere(const dray_subscriber *s)
{
    bool is = s->left;
    for (uint32_t i = 0; i < dray_layout_region_count(s->destination.layout) && !is; i++)
        is = offered(s, i) && dray__region_arena(region_of(s, i)) &&
             !dray__region_exported(region_of(s, i));
    return is;
}

void dray__subscriber_put_again(dray_subscriber *s, int64_t deadline_ns)
{
    dray_error error;
    if (!is_elsewhere(s))
        return;
    if (dray__subscriber_put(s, deadline_ns, &error))
        dray__log(DRAY_LOG_WARN, "group %s: others cannot read this rank's memory: %s", s->group,
                  error.message);
    else
        s->left = false;
}

static int register_rank(dray_subscriber *s, int64_t deadline, dray_error *error)
{
    const char *endpoint = ""; /* tensors given to load_weights cannot be read */
    int rc = s->load ? DRAY_OK : dray__serve_start(s->context, false, &endpoint, error);
    if (rc)
        return rc;
    uint64_t returns = dray__context_returns(s->context);
    uint32_t regions = dray_layout_region_count(s->destination.layout), shared = 0;
    regions += s->destination.progress != NULL;
    for (uint32_t i = 0; i < regions; i++)
        shared += offered(s, i);
    dray__writer w = {0};
    const dray__enrolling message = {.model = s->model,
                                     .group = s->group,
                                     .rank = s->destination.rank,
                                     .world = s->destination.world,
                                     .token = s->token,
                                     .endpoint = endpoint,
                                     .regions = s->load ? 0 : regions,
                                     .to_put = shared,
                                     .layout = s->packed.data,
                                     .layout_size = s->packed.size};
    dray__put_fields(&w, &dray__subscriber_open_fields, &message);
    if (s->key)
        put_claim(s, &w);
    dray__reply reply;
    rc = dray__call(s->channel, DRAY__MSG_SUBSCRIBER_OPEN, &w, NULL, 0, deadline, &reply, error);
    dray__writer_free(&w);
    if (rc)
        return rc;
    s->key = dray__get_u64(&reply.payload);
    dray__sums_forms_clear(&s->sent);
    s->left = false;
    rc = dray__reader_finish(&reply.payload, "SUBSCRIBER_OPEN", error);
    if (rc == DRAY_OK)
        rc = dray__subscriber_put(s, deadline, error);
    if (rc == DRAY_OK) /* otherwise the next call registers again, and puts all regions */
        s->returns = returns;
    return rc;
}

int dray__subscriber_ensure(dray_subscriber *s, int64_t deadline_ns, dray_error *error)
{
    dray__channel *channel;
    dray__stage_join(s);
    /* A rank that the next coordinator has refused registers again: it may be welcome by now. */
    if (dray__channel_alive(s->channel) && s->returns == dray__context_returns(s->context))
        return DRAY_OK;
    int rc = dray__channel_open_until(s->context, deadline_ns, &channel, error);
    if (rc)
        return rc;
    dray__channel_close(s->channel); /* this removes it from the poll descriptor */
    s->channel = channel;
    s->channel_stuck = false;
    rc = dray__waker_add(&s->waker, dray__channel_fd(channel), error);
    if (rc)
        return rc;
    if (s->returns == dray__context_returns(s->context))
        return DRAY_OK;
    return register_rank(s, deadline_ns, error);
}

/* Sets the destination: the caller's layout and regions, or those made for a load_weights engine.
 */
static int take_layout(dray_subscriber *s, const dray_layout *layout,
                       const dray_subscriber_options *options, dray__writer *packed,
                       dray_error *error)
{
    dray_load_options load = DRAY_LOAD_OPTIONS_INIT;
    dray_layout *made = NULL;
    int rc = DRAY_OK;
    if (options->load) {
        rc = DRAY__OPTIONS_READ(dray_load_options, together_count, &load, options->load, error);
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
    s->waker = DRAY__WAKER_CLOSED;
    s->event_fd = -1;
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
        rc = open_progress(s, error);
    if (rc == DRAY_OK)
        rc = dray__channel_open(context, &s->channel, error);
    if (rc == DRAY_OK)
        rc = open_descriptors(s, error);
    if (rc == DRAY_OK)
        rc = register_rank(s, dray__context_deadline(context, s->timeout_ns), error);
    if (rc)
        dray_subscriber_close(s);
    else
        *out = s;
    return rc;
}

void dray_subscriber_close(dray_subscriber *s)
{
    if (!s)
        return;
    dray__stage_join(s);
    if (s->channel && s->key)
        dray__ask(s->channel, DRAY__MSG_WEIGHTS_CLOSE, &dray__u64_fields, &s->key,
                  dray__deadline(5 * DRAY__SECOND), NULL, NULL, NULL, NULL);
    if (s->local)
        dray__local_remove(s->token);
    dray__update_release(s);
    dray__stage_drop(s);
    dray__sources_free(s->live);
    dray__sources_free(s->disk);
    dray__waker_close(&s->waker);
    if (s->event_fd >= 0)
        close(s->event_fd);
    dray__channel_close(s->channel);
    free(s->block_sums);
    dray__sums_form_drop(s->read_form);
    dray__sums_form_drop(s->resident_form);
    dray__sums_forms_clear(&s->sent);
    dray__writer_free(&s->packed);
    dray_layout_free(s->destination.layout);
    dray_region_free(s->destination.progress);
    free(s->destination.regions);
    dray__load_close(s->load);
    free(s->model);
    free(s->group);
    dray__steps_destroy(&s->steps);
    free(s);
}

/* Tells the coordinator that no memory of a set's members is mapped any more. */
static void subscriber_unmapped(dray_subscriber *s, uint64_t set)
{
    dray__tell(s->channel, DRAY__MSG_REGIONS_DROP, &dray__set_told_fields,
               &(dray__set_told){s->key, set});
}

/* Frees sources, and tells the coordinator that their memory is no longer mapped. */
static void subscriber_forget(dray_subscriber *s, dray__sources **sources)
{
    uint64_t set = *sources ? (*sources)->source_set : 0;
    dray__sources_free(*sources);
    *sources = NULL;
    if (set)
        subscriber_unmapped(s, set);
}

int dray_subscriber_release_mappings(dray_subscriber *s, dray_error *error)
{
    if (!s)
        return dray__fail(error, DRAY_EINVALID, "subscriber must be given");
    dray__stage_join(s);
    if (s->phase != PHASE_IDLE || (!s->live && dray__channel_alive(s->channel)))
        return DRAY_OK; /* the update in progress ends first; without a plan nothing is mapped */
    int64_t deadline = dray__context_deadline(s->context, s->timeout_ns);
    int rc = dray__subscriber_ensure(s, deadline, error);
    if (rc)
        return rc;
    dray__sets_told told;
    dray__arena items = {0};
    rc = dray__ask(s->channel, DRAY__MSG_REGIONS_REVOKED, &dray__u64_fields, &s->key, deadline,
                   &items, &dray__sets_told_fields, &told, error);
    for (uint32_t i = 0; rc == DRAY_OK && i < told.count; i++)
        if (s->live && s->live->source_set == told.items[i])
            subscriber_forget(s, &s->live);
        else /* the notice was lost with its connection */
            subscriber_unmapped(s, told.items[i]);
    dray__arena_free(&items);
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
    uint32_t count = 0;
    s->left = true;
    rc = dray__ask(s->channel, DRAY__MSG_SUBSCRIBER_LEAVE, &dray__timed_fields,
                   &(dray__timed){s->key, (int64_t)dray__left(deadline)},
                   dray__answer_deadline(deadline), NULL, &dray__u32_fields, &count, error);
    if (rc == DRAY_OK && revoked)
        *revoked = count;
    return rc;
}

int dray_subscriber_fd(const dray_subscriber *subscriber)
{
    return subscriber ? subscriber->waker.fd : -1;
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

/* Asks for the group's state, and asks the next coordinator if this one is gone. */
static int ask_state(dray_subscriber *s, dray__group_told *told, dray_error *error)
{
    int64_t deadline = dray__context_deadline(s->context, s->timeout_ns);
    for (;;) {
        int rc = s->phase == PHASE_IDLE ? dray__subscriber_ensure(s, deadline, error) : DRAY_OK;
        if (rc)
            return rc;
        rc = dray__ask(s->channel, DRAY__MSG_GROUP_STATE, &dray__u64_fields, &s->key, deadline,
                       NULL, &dray__group_told_fields, told, error);
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
    dray__group_told told;
    dray__stage_join(s);
    int rc = ask_state(s, &told, error);
    if (rc)
        return rc;
    if (version)
        *version = told.version;
    if (incarnation)
        *incarnation = told.incarnation;
    if (state)
        *state = told.state;
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
    dray__stage_join(s);
    const dray_layout *layout = s->destination.layout;
    uint32_t wrong = 0, first = 0;
    uint64_t first_sum = 0;
    dray_region *scratch = NULL; /* stays NULL, because the memory is addressable */
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

/* ---- planning an update ---------------------------------------------------------------------- */

/* Takes the sources of the last update of this kind if they still fit, else makes new ones. */
static int find_sources(dray_subscriber *s, dray_error *error)
{
    bool disk = s->source == DRAY__FROM_DISK;
    dray__sources **kept = disk ? &s->disk : &s->live;
    s->sources = *kept;
    bool same = s->sources && s->sources->plan && s->sources->group_set == s->group_set;
    if (same && disk && dray__sources_disk_same(s->sources, s->path)) {
        dray__sources_close(s->sources); /* the same tensors, possibly in new files */
        return DRAY_OK;
    }
    if (same && !disk && s->sources->source_set == s->source_set)
        return DRAY_OK;
    subscriber_forget(s, kept);
    s->report.planned = 1;
    int rc = disk ? dray__sources_disk(s->path, s->group_set, &s->destination, kept, error)
                  : dray__sources_live(s->source_set, s->source_count, s->group_set,
                                       &s->destination, kept, error);
    s->sources = *kept;
    return rc;
}

/* Finds the tensors that the coordinator will compare with the announced sums. */
static int find_compared(dray_subscriber *s, dray_error *error)
{
    uint32_t count = dray_layout_tensor_count(s->destination.layout), any;
    if (!s->announced)
        return DRAY_OK;
    s->compared = calloc((size_t)count + 1, sizeof *s->compared);
    if (!s->compared)
        return dray__nomem(error);
    for (uint32_t t = 0; t < count; t++)
        s->compared[t] =
            !s->partial.index.count || !dray__map_get(&s->partial, s->sources->names[t], &any);
    return DRAY_OK;
}

/* Prepares a commit, which needs only the staging. */
static int prepare_commit(dray_subscriber *s, dray_error *error)
{
    if (s->has_staged && s->staged_version == s->report.version &&
        s->staged_incarnation == s->report.incarnation)
        return dray__stage_commit(s, error);
    return dray__fail(error, DRAY_ENOENT,
                      "rank %" PRIu32 " of group %s has not prefetched version %" PRIu64,
                      s->destination.rank, s->group, s->report.version);
}

/* Refuses transforms for load_weights engines: buckets are filled one after the other, and would
 * cut through elements that share a scale. */
static int check_load(const dray_subscriber *s, dray_error *error)
{
    const dray_plan *plan = s->sources->plan;
    if (!s->load || !dray_plan_transform_count(plan))
        return DRAY_OK;
    const dray_tensor_info *tensor =
        dray_layout_tensor(s->destination.layout, dray_plan_transforms(plan)[0].tensor);
    return dray__fail(
        error, DRAY_EUNSUPPORTED,
        "tensor %s: load_weights gets quantised tensors as publishers hold them: take "
        "it in their dtype, with its scales, not as %s",
        tensor->name, dray_dtype_name((dray_dtype)tensor->dtype));
}

/* Drops the cohort, and unmaps its members' regions. */
static void drop_cohort(dray_subscriber *s)
{
    uint64_t set = s->sources->cohort_set;
    if (set && set != s->cohort_set && dray__upload_of(s->sources))
        subscriber_unmapped(s, set);
}

/* Are the sources of the last update complete, with the same cohort? */
static bool is_ready(const dray_subscriber *s)
{
    return s->sources->ready && s->sources->cohort_set == s->cohort_set;
}

int dray__update_plan(dray_subscriber *s, dray_error *error)
{
    if (s->purpose == DRAY__COMMIT)
        return prepare_commit(s, error);
    int rc = DRAY_OK;
    if (!s->sources) {
        rc = find_sources(s, error);
        if (rc == DRAY_OK) {
            s->sources->asked = 0; /* an earlier update's request was never answered */
            drop_cohort(s);
        }
        if (rc == DRAY_OK && !is_ready(s))
            rc = dray__sources_cohort(s->sources, s->cohort_set, s->cohort_count, error);
    }
    if (rc == DRAY_OK && !is_ready(s))
        rc = dray__sources_plan(s->sources, s->channel, s->key, &s->destination, error);
    if (rc == DRAY_OK)
        rc = check_load(s, error);
    if (rc == DRAY_OK && s->source == DRAY__FROM_DISK && !s->options.no_verify)
        rc = dray__sources_disk_sums(s->sources, error);
    return rc ? rc : find_compared(s, error);
}
