/* A trainer rank: registers its blocks, announces versions, and waits for the readers before the
 * next write. */
#include "weights/publish/publisher.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "memory/region.h"
#include "weights/publish/snapshot.h"
#include "weights/server/serve.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

int64_t dray__publisher_deadline(const dray_publisher *p, int64_t timeout_ns)
{
    if (timeout_ns == DRAY_WAIT_DEFAULT)
        timeout_ns = p->timeout_ns;
    return timeout_ns == DRAY_WAIT_DEFAULT ? dray__context_deadline(p->context, timeout_ns)
                                           : dray__deadline(timeout_ns);
}

uint32_t dray__publisher_regions(const dray_publisher *p)
{
    return dray_layout_region_count(p->layout) + (p->delta != NULL) + (p->arena != NULL);
}

dray_region *dray__publisher_region(const dray_publisher *p, uint32_t region)
{
    bool given = !p->origin && region < dray_layout_region_count(p->layout);
    return given && !dray__region_is(p->regions[region], p->serials[region]) ? NULL
                                                                             : p->regions[region];
}

/* Returns true for a region that readers on this host can map; that needs a channel that passes
 * descriptors. */
static bool is_offered(const dray_publisher *p, uint32_t region)
{
    const dray_region *live = dray__publisher_region(p, region);
    return dray__channel_passes_fds(p->channel) && live && dray__region_offered(live);
}

uint32_t dray__publisher_shared(const dray_publisher *p)
{
    uint32_t shared = 0;
    for (uint32_t i = 0; i < dray__publisher_regions(p); i++)
        shared += is_offered(p, i);
    return shared;
}

int dray__publisher_put(dray_publisher *p, int64_t deadline_ns, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < dray__publisher_regions(p) && rc == DRAY_OK; i++)
        if (is_offered(p, i))
            rc = dray__region_put(p->channel, p->context, p->key, i, p->regions[i],
                                  dray__publisher_event_of(p), deadline_ns, error);
    return rc;
}

/* Writes this rank's former registration, for a rank that registers again. */
static void put_claim(const dray_publisher *p, dray__writer *w)
{
    const dray__rank_claim claim = {.set = p->released ? 0 : p->set,
                                    .incarnation = p->incarnation,
                                    .published = p->has_published,
                                    .version = p->published,
                                    .checked = p->checksum,
                                    .readable = !p->withdrawn && !p->released};
    dray__put_fields(w, &dray__publisher_claim_fields, &claim);
    dray__sums_put(w, &p->sums);
}

static int register_rank(dray_publisher *p, int64_t deadline, dray_error *error)
{
    const char *endpoint = NULL;
    int rc = dray__serve_start(p->context, p->arena != NULL, &endpoint, error);
    if (rc == DRAY_OK)
        rc = dray__publisher_marked(p, endpoint && endpoint[0] ? endpoint : NULL, error);
    if (rc)
        return rc;
    uint64_t returns = dray__context_returns(p->context);
    dray__writer w = {0};
    const dray__enrolling message = {.model = p->model,
                                     .rank = p->rank,
                                     .world = p->world,
                                     .token = p->token,
                                     .endpoint = endpoint,
                                     .regions = dray__publisher_regions(p),
                                     .to_put = dray__publisher_shared(p),
                                     .slot_bytes = p->arena ? dray__arena_slot_bytes(p->arena) : 0,
                                     .layout = p->packed.data,
                                     .layout_size = p->packed.size};
    dray__put_fields(&w, &dray__publisher_open_fields, &message);
    if (p->key)
        put_claim(p, &w);
    dray__reply reply;
    rc = dray__call(p->channel, DRAY__MSG_PUBLISHER_OPEN, &w, NULL, 0, deadline, &reply, error);
    dray__writer_free(&w);
    if (rc)
        return rc;
    p->key = dray__get_u64(&reply.payload);
    p->relaid = false;
    dray__sums_forms_clear(&p->sent);
    rc = dray__reader_finish(&reply.payload, "PUBLISHER_OPEN", error);
    if (rc == DRAY_OK)
        rc = dray__publisher_put(p, deadline, error);
    if (rc == DRAY_OK) /* otherwise the next call registers again, and puts all regions */
        p->returns = returns;
    return rc;
}

int dray__publisher_ensure(dray_publisher *p, int64_t deadline, dray_error *error)
{
    dray__channel *channel;
    /* A rank that the next coordinator has refused registers again: it may be welcome by now. */
    if (dray__channel_alive(p->channel) && p->returns == dray__context_returns(p->context))
        return DRAY_OK;
    int rc = dray__channel_open_until(p->context, deadline, &channel, error);
    if (rc)
        return rc;
    dray__channel_close(p->channel);
    p->channel = channel;
    if (p->returns == dray__context_returns(p->context))
        return DRAY_OK;
    rc = register_rank(p, deadline, error);
    if (rc == DRAY_OK)
        p->incarnation_known = false;
    return rc;
}

bool dray__publisher_again(const dray_publisher *p, int rc, int64_t deadline)
{
    return rc == DRAY_ECLOSED && dray__channel_broken(p->channel) &&
           dray__context_takes_back(p->context) && dray__now() < deadline;
}

static int read_options(const dray_publisher_options *given, dray_publisher_options *out,
                        dray_error *error)
{
    return DRAY__OPTIONS_READ(dray_publisher_options, timeout_ns, out, given, error);
}

static int check(dray_context *context, const char *model, const dray_layout *layout,
                 const dray_publisher_options *options, dray_publisher **out, dray_error *error)
{
    if (!context || !model || !layout || !options || !out)
        return dray__fail(error, DRAY_EINVALID,
                          "context, model, layout, options and out must be given");
    if (options->snapshot != 0 && options->snapshot != 1)
        return dray__fail(error, DRAY_EINVALID, "snapshot %d: 0 or 1 expected", options->snapshot);
    if (options->delta != 0 && options->delta != 1)
        return dray__fail(error, DRAY_EINVALID, "delta %d: 0 or 1 expected", options->delta);
    if (options->delta_dtype &&
        (options->delta_dtype < DRAY_F64 || options->delta_dtype > DRAY_F16))
        return dray__fail(error, DRAY_EINVALID, "delta_dtype %d: F64, F32, BF16, F16 or none",
                          options->delta_dtype);
    if (options->timeout_ns < 0)
        return dray__fail(error, DRAY_EINVALID, "timeout_ns %" PRId64, options->timeout_ns);
    if (options->staging_bytes &&
        (options->staging_bytes < DRAY__ARENA_MIN || options->staging_bytes > DRAY__ARENA_MAX))
        return dray__fail(error, DRAY_EINVALID,
                          "staging_bytes %" PRIu64 ": 0, or %" PRIu64 " to %" PRIu64 " expected",
                          options->staging_bytes, DRAY__ARENA_MIN, DRAY__ARENA_MAX);
    if (options->staging_bytes && options->snapshot)
        return dray__fail(error, DRAY_EINVALID,
                          "staging_bytes with a snapshot, which readers map: one or the other");
    int rc = dray__regions_check(layout, options->regions, error);
    for (uint32_t i = 0; i < dray_layout_region_count(layout) && rc == DRAY_OK; i++) {
        dray_region_kind kind = dray_region_get_kind(options->regions[i]);
        if (options->delta && !dray_region_base(options->regions[i]) && kind != DRAY_REGION_FILE &&
            kind != DRAY_REGION_CUDA)
            rc = dray__fail(error, DRAY_EUNSUPPORTED, "deltas of %s memory",
                            dray_region_kind_name(kind));
    }
    return rc;
}

static int open_delta(dray_publisher *p, int32_t dtype, dray_error *error)
{
    int rc = dray__delta_new(p->layout, p->regions, dtype, &p->delta, error);
    if (rc)
        return rc;
    p->regions[dray_layout_region_count(p->layout)] = dray__delta_region(p->delta);
    return dray__delta_open(p->layout, dray__delta_region(p->delta), &p->delta_view, error);
}

/* Opens the arena. Its region is behind the delta's, so the delta must exist already. */
static int open_arena(dray_publisher *p, uint64_t bytes, dray_error *error)
{
    int rc = dray__arena_new(bytes, &p->arena, error);
    if (rc == DRAY_OK)
        p->regions[dray__publisher_regions(p) - 1] = dray__arena_region(p->arena);
    return rc;
}

int dray__publisher_offer(dray_publisher *p, dray_error *error)
{
    int rc = dray__local_add(p->token, p->layout, p->regions, dray__publisher_regions(p),
                             p->delta_view, p->arena, error);
    p->local = rc == DRAY_OK;
    if (p->local && p->marked)
        dray__local_set_mark(p->token, p->mark->event);
    return rc;
}

static int take_regions(dray_publisher *p, const dray_layout *layout, dray_region *const *regions,
                        dray__writer *packed, dray_error *error)
{
    uint32_t count = dray_layout_region_count(layout);
    p->regions =
        calloc((size_t)count + 2, sizeof(dray_region *)); /* and the delta's, and the arena's */
    if (p->regions && count)
        memcpy(p->regions, regions, count * sizeof *p->regions);
    return p->regions ? dray__layout_copy(layout, regions, &p->layout, packed, error)
                      : dray__nomem(error);
}

int dray__publisher_note(dray_publisher *p, dray_region *const *regions, dray_error *error)
{
    uint32_t count = dray_layout_region_count(p->layout);
    if (!p->serials)
        p->serials = calloc((size_t)count + 1, sizeof *p->serials);
    if (!p->serials)
        return dray__nomem(error);
    for (uint32_t i = 0; i < count; i++)
        p->serials[i] = regions[i]->serial;
    return DRAY_OK;
}

/* Checks, before each publish, that no region was freed or replaced by another region object, so
 * that freed memory is never read. */
static int check_regions(const dray_publisher *p, dray_error *error)
{
    dray_region *const *regions = p->origin ? p->origin : p->regions;
    for (uint32_t i = 0; i < dray_layout_region_count(p->layout); i++)
        if (!dray__region_is(regions[i], p->serials[i]))
            return dray__fail(error, DRAY_ESTALE,
                              "region %" PRIu32
                              " (%s) was freed since it was registered: say where "
                              "the memory is now (dray_publisher_move)",
                              i, dray_layout_region(p->layout, i)->name);
    for (uint32_t i = 0; i < dray_layout_region_count(p->layout) && !p->released; i++) {
        int rc = dray_region_check(regions[i], error);
        if (rc)
            return dray__fail_prefix(error, rc, "region %" PRIu32 ": ", i);
    }
    if (p->released)
        return dray__fail(error, DRAY_ESTALE,
                          "the regions were released: say where the memory is now "
                          "(dray_publisher_move)");
    return DRAY_OK;
}

int dray_publisher_open(dray_context *context, const char *model, const dray_layout *layout,
                        const dray_publisher_options *given, dray_publisher **out,
                        dray_error *error)
{
    dray_publisher_options own = DRAY_PUBLISHER_OPTIONS_INIT, *options = &own;
    int rc = given ? read_options(given, options, error) : DRAY_OK;
    if (rc == DRAY_OK)
        rc = check(context, model, layout, given ? options : NULL, out, error);
    if (rc)
        return rc;
    dray_publisher *p = calloc(1, sizeof *p);
    if (!p)
        return dray__nomem(error);
    dray__publisher_sums_init(p);
    p->context = context;
    p->rank = options->rank;
    p->world = options->world ? options->world : 1;
    p->checksum = !options->no_checksums;
    p->timeout_ns = options->timeout_ns ? options->timeout_ns : DRAY_WAIT_DEFAULT;
    p->token = dray__local_token();
    p->model = strdup(model);
    rc = !p->model           ? dray__nomem(error)
         : options->snapshot ? dray__snapshot_open(p, layout, options->regions, &p->packed, error)
                             : take_regions(p, layout, options->regions, &p->packed, error);
    if (rc == DRAY_OK)
        rc = dray__publisher_note(p, options->regions, error);
    if (rc == DRAY_OK && options->delta)
        rc = open_delta(p, options->delta_dtype, error);
    if (rc == DRAY_OK && options->staging_bytes)
        rc = open_arena(p, options->staging_bytes, error);
    if (rc == DRAY_OK)
        rc = dray__publisher_offer(p, error);
    if (rc == DRAY_OK)
        rc = dray__channel_open(context, &p->channel, error);
    if (rc == DRAY_OK)
        rc = register_rank(p, dray__publisher_deadline(p, DRAY_WAIT_DEFAULT), error);
    if (rc)
        dray_publisher_close(p);
    else
        *out = p;
    return rc;
}

/* Waits for the other ranks, then fetches their layouts, because an element that several ranks hold
 * is summed by the first of them. */
static int meet_trainer(dray_publisher *p, int64_t deadline_ns, dray_error *error)
{
    const dray__sources_asked asked = {
        .key = p->key, .what = DRAY__SOURCES_TRAINER, .timeout_ns = deadline_ns - dray__now()};
    dray__trainer_told told;
    int rc = dray__ask(p->channel, DRAY__MSG_UPDATE_SOURCES, &dray__sources_asked_fields, &asked,
                       dray__answer_deadline(deadline_ns), NULL, &dray__trainer_told_fields, &told,
                       error);
    if (rc)
        return rc;
    p->incarnation = told.incarnation;
    p->incarnation_known = true;
    p->set = told.set;
    return DRAY_OK;
}

static int make_pieces(dray_publisher *p, int64_t deadline_ns, dray_error *error)
{
    dray__source *earlier = calloc((size_t)p->rank + 1, sizeof *earlier);
    dray__holder *holders = calloc((size_t)p->rank + 1, sizeof *holders);
    int rc = earlier && holders ? DRAY_OK : dray__nomem(error);
    if (rc == DRAY_OK)
        rc = dray__members_fetch(p->channel, p->key, p->set, earlier, p->rank, deadline_ns, error);
    for (uint32_t i = 0; i < p->rank && rc == DRAY_OK; i++)
        holders[i].layout = earlier[i].layout;
    if (rc == DRAY_OK) {
        holders[p->rank].layout = p->layout;
        rc = dray__pieces_make(holders, p->rank, &p->pieces, error);
        p->pieces_made = rc == DRAY_OK;
    }
    for (uint32_t i = 0; earlier && i < p->rank; i++)
        if (earlier[i].layout)
            dray__source_clear(&earlier[i]);
    free(earlier);
    free(holders);
    return rc;
}

/* Fetches the layouts of the other ranks, even while they change, and makes the pieces. */
static int meet_and_cut(dray_publisher *p, int64_t deadline_ns, dray_error *error)
{
    int rc = make_pieces(p, deadline_ns, error);
    for (uint64_t met = 0; rc == DRAY_ESTALE && met != p->set && dray__now() < deadline_ns;) {
        met = p->set;
        rc = meet_trainer(p, deadline_ns, error);
        if (rc == DRAY_OK)
            rc = make_pieces(p, deadline_ns, error);
    }
    return rc;
}

static int ask_readers(dray_publisher *p, uint64_t version, int64_t deadline, uint32_t *dropped,
                       dray_error *error)
{
    const dray__draining asked = {p->key, version, (int64_t)dray__left(deadline)};
    dray__drained told;
    dray__arena texts = {0};
    int rc =
        dray__ask(p->channel, DRAY__MSG_PUBLISHER_WAIT, &dray__draining_fields, &asked,
                  dray__answer_deadline(deadline), &texts, &dray__drained_fields, &told, error);
    if (rc == DRAY_OK && told.dropped)
        dray__log(DRAY_LOG_WARN, "dropped from version %" PRIu64 ": %s", version, told.names);
    dray__arena_free(&texts);
    if (rc == DRAY_OK)
        dray__local_revoke(p->token, told.oldest_attempt);
    if (rc == DRAY_OK && dropped)
        *dropped = told.dropped;
    if (rc)
        return rc;
    p->drained = p->drained || version == p->published;
    dray__hook_step("waited");
    return DRAY_OK;
}

/* Waits until no group reads the version, or an older one, any more. When another coordinator has
 * replaced the one that granted it, no reader can commit it. */
int dray__publisher_drain(dray_publisher *p, uint64_t version, int64_t timeout_ns,
                          uint32_t *dropped, dray_error *error)
{
    int64_t deadline = dray__publisher_deadline(p, timeout_ns);
    dray_error of_sums = {0};
    int rc, summed = dray__publisher_sums_end(p, deadline, &of_sums);
    p->withdrawn = p->withdrawn || version == p->published;
    do {
        rc = dray__publisher_ensure(p, dray__answer_deadline(deadline), error);
        if (rc == DRAY_OK)
            rc = ask_readers(p, version, deadline, dropped, error);
    } while (dray__publisher_again(p, rc, deadline));
    if (summed == DRAY_ECANCELED) /* the version's readers were dropped */
        dray__publisher_sums_forgo(p, dray__answer_deadline(deadline));
    else if (rc == DRAY_OK && summed && error)
        *error = of_sums;
    return rc || summed == DRAY_ECANCELED ? rc : summed;
}

int dray__publisher_check(dray_publisher *p, uint64_t version, int64_t timeout_ns,
                          dray_error *error)
{
    if (!p || (timeout_ns < 0 && timeout_ns != DRAY_WAIT_DEFAULT))
        return dray__fail(error, DRAY_EINVALID, "publisher must be given, timeout not negative");
    int rc = dray__gate_join(&p->gate, error);
    return rc || (p->has_published && version <= p->published)
               ? rc
               : dray__fail(error, DRAY_EINVALID,
                            "publisher of %s: rank %" PRIu32 " did not publish version %" PRIu64,
                            p->model, p->rank, version);
}

/* lost: the connection broke before the answer to an earlier announcement of the version. Then the
 * coordinator may have that one, and it takes no version twice. */
static int announce(dray_publisher *p, uint64_t version, int64_t deadline, bool *lost,
                    dray_error *error)
{
    dray__sums none = {0};
    dray__writer w = {0};
    dray__put_fields(
        &w, &dray__announcing_fields,
        &(dray__announcing){p->key, version, p->checksum ? DRAY__CHECKED_LATER : DRAY__UNCHECKED});
    dray__sums_put(&w, &none);
    int rc = dray__call(p->channel, DRAY__MSG_PUBLISH, &w, NULL, 0, dray__answer_deadline(deadline),
                        NULL, error);
    dray__writer_free(&w);
    bool later = !p->has_published || version > p->published;
    if (rc == DRAY_EINVALID && *lost && later)
        return DRAY_OK;
    *lost |= rc == DRAY_ECLOSED;
    if (rc == DRAY_ETIMEDOUT) /* it may be announced already */
        dray__fail_prefix(error, rc,
                          "version %" PRIu64 " may be announced, wait for its readers before the "
                          "memory changes: ",
                          version);
    return rc;
}

static int publish(dray_publisher *p, uint64_t version, int64_t deadline, bool *lost,
                   dray_error *error)
{
    int rc = check_regions(p, error);
    if (rc == DRAY_OK &&
        (!p->incarnation_known || !p->pieces_made)) /* another rank may have moved */
        rc = meet_trainer(p, deadline, error);
    if (rc == DRAY_OK && p->origin)
        rc = dray__snapshot_take(p, deadline, error);
    if (rc == DRAY_OK && p->checksum && !p->pieces_made)
        rc = meet_and_cut(p, deadline, error);
    /* The delta of a version that may still be read must stay. Then this version has none, and the
     * next builds on the delta that was kept last. Readers may have this one's already when its
     * announcement is repeated. */
    bool kept = rc == DRAY_OK && p->delta && !*lost && (p->drained || !p->has_published);
    if (kept)
        rc = dray__delta_publish(p->delta, p->incarnation, version, deadline, error);
    if (rc == DRAY_OK && dray__now() >= deadline)
        rc = dray__fail(error, DRAY_ETIMEDOUT,
                        "version %" PRIu64 " was not ready at the deadline, it was not announced",
                        version);
    if (rc == DRAY_OK && p->checksum)
        rc = dray__publisher_sums_start(p, version, deadline, error);
    bool ready = rc == DRAY_OK;
    if (ready)
        rc = announce(p, version, deadline, lost, error);
    if (rc && kept) /* perhaps no reader gets the bits that were kept */
        dray__delta_forgo(p->delta);
    if (rc && !(ready && rc == DRAY_ETIMEDOUT)) {
        if (ready && p->gpu_sums && !dray__source_sums_end(p->gpu_sums, deadline))
            dray__fail_prefix(error, rc, "(GPUs still read the memory of version %" PRIu64 ") ",
                              version);
        return rc;
    }
    p->published = version;
    p->has_published = true;
    p->withdrawn = p->drained = false;
    if (p->checksum)
        dray__publisher_sums_go(p);
    dray__hook_step("published");
    return rc;
}

int dray_publisher_publish(dray_publisher *p, uint64_t version, const dray_fence *ready,
                           dray_error *error)
{
    if (!p)
        return dray__fail(error, DRAY_EINVALID, "publisher must be given");
    dray_fence fence = DRAY_FENCE_INIT;
    int rc = DRAY__OPTIONS_READ(dray_fence, event, &fence, ready, error);
    if (rc)
        return rc;
    int64_t deadline = dray__publisher_deadline(p, DRAY_WAIT_DEFAULT);
    bool lost = false;
    rc = dray__gate_join(&p->gate, error);
    if (rc == DRAY_OK)
        rc = dray__publisher_sums_end(p, deadline, error);
    if (rc == DRAY_OK)
        rc = dray__publisher_fence(p, &fence, deadline, error);
    if (rc)
        return rc;
    do {
        rc = dray__publisher_ensure(p, deadline, error);
        if (rc == DRAY_OK)
            rc = publish(p, version, deadline, &lost, error);
    } while (dray__publisher_again(p, rc, deadline));
    return rc;
}

int dray_publisher_wait(dray_publisher *p, uint64_t version, int64_t timeout_ns, uint32_t *dropped,
                        dray_error *error)
{
    int rc = dray__publisher_check(p, version, timeout_ns, error);
    if (rc)
        return rc;
    if (!p->origin)
        return dray__publisher_drain(p, version, timeout_ns, dropped, error);
    if (dropped)
        *dropped = 0;
    return DRAY_OK; /* readers and sums use the snapshot */
}

void dray_publisher_close(dray_publisher *p)
{
    if (!p)
        return;
    dray__gate_free(&p->gate);
    dray__publisher_sums_free(p);
    if (p->channel && p->key)
        dray__ask(p->channel, DRAY__MSG_WEIGHTS_CLOSE, &dray__u64_fields, &p->key,
                  dray__deadline(5 * DRAY__SECOND), NULL, NULL, NULL, NULL);
    if (p->local)
        dray__local_remove(p->token);
    dray__channel_close(p->channel);
    dray__source_sums_free(p->gpu_sums);
    dray__mark_free(p->mark);
    dray__pieces_free(&p->pieces);
    dray__sums_free(&p->sums);
    dray__sums_forms_clear(&p->sent);
    dray__writer_free(&p->packed);
    free(p->model);
    dray__delta_close(p->delta_view);
    dray__delta_free(p->delta);
    dray__arena_release(p->arena);
    dray__snapshot_close(p);
    dray_layout_free(p->layout);
    free(p->serials);
    free(p->regions);
    free(p);
}
