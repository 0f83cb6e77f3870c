/* The prefetched version: staging with the layout of the destination, allocated once. A commit is
 * an update with the staging as its only source. */
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "memory/region.h"
#include "mover/cuda/cuda.h"
#include "mover/cuda/nccl.h"
#include "net/stream.h"
#include "weights/delta/delta.h"
#include "weights/update/subscriber.h"

#include <dray/gpu.h>
#include <stdlib.h>

void dray__stage_drop(dray_subscriber *s)
{
    uint32_t count = s->destination.layout ? dray_layout_region_count(s->destination.layout) : 0;
    for (uint32_t i = 0; s->staging && !s->staged && i < count; i++)
        dray_region_free(s->staging[i]);
    if (s->staged) /* it owns the regions */
        dray__sources_free(s->staged);
    else
        free(s->staging);
    free(s->staged_sums);
    dray__exchange_free(s->exchange);
    s->exchange = NULL;
    s->staged = NULL;
    s->staging = NULL;
    s->staged_sums = NULL;
    s->staging_bytes = 0;
    s->staged_version = s->staged_incarnation = 0;
    s->has_staged = s->spare_is_old = false;
}

/* Allocates the staging of a region. For GPU memory: memory of the same GPU, or pinned memory. */
static int stage_region(const dray_subscriber *s, uint32_t index, uint64_t bytes, dray_region **out,
                        dray_error *error)
{
    const dray_region *beside = s->destination.regions[index];
    if (dray_region_get_kind(beside) != DRAY_REGION_CUDA)
        return dray_region_alloc(DRAY_REGION_HOST, bytes, "staging", out, error);
    if (s->stage_kind != DRAY_REGION_PINNED)
        return dray__region_alloc_cuda(beside->device->uuid, bytes, "staging", out, error);
    int rc = dray__cuda_enter(beside->device, error);
    if (rc)
        return rc;
    rc = dray_region_alloc(DRAY_REGION_PINNED, bytes, "staging", out, error);
    dray__cuda_leave();
    return rc;
}

int dray__stage_open(dray_subscriber *s, dray_error *error)
{
    const dray_layout *layout = s->destination.layout;
    uint32_t count = dray_layout_region_count(layout);
    if (s->exchange && !dray__exchange_fits(s->exchange))
        dray__stage_drop(s); /* an arena was resumed, or has other allocations */
    if (s->staged)
        return DRAY_OK;
    s->staging = calloc((size_t)count + DRAY__EXTRA_REGIONS, sizeof(dray_region *));
    int rc = s->staging ? DRAY_OK : dray__nomem(error);
    if (rc == DRAY_OK && s->stage_kind != DRAY_REGION_PINNED)
        rc = dray__exchange_new(layout, s->destination.regions, &s->exchange, error);
    s->staging_bytes = dray__exchange_spare_bytes(s->exchange);
    for (uint32_t i = 0; i < count && rc == DRAY_OK; i++) {
        uint64_t bytes = dray_layout_region(layout, i)->bytes;
        rc = dray__exchange_region(s->exchange, i, &s->staging[i], error);
        if (rc || s->staging[i])
            continue;
        rc = stage_region(s, i, bytes, &s->staging[i], error);
        s->staging_bytes += bytes;
    }
    if (rc == DRAY_OK)
        rc = dray__sources_staged(&s->destination, s->staging, &s->staged, error);
    if (rc)
        dray__stage_drop(s);
    return rc;
}

/* Returns true when the source's bytes come over NCCL, which has no deltas (remote_nccl.c). */
static bool comes_by_nccl(const dray_subscriber *s, const dray__source *source)
{
    const dray__stream_keys *keys = dray__context_keys(s->context);
    const dray_layout *own = s->destination.layout;
    int version;
    return keys->transport == NULL && dray__nccl_has_room(dray__nccl_bytes(s), s->sources->count) &&
           dray_layout_region_count(source->layout) &&
           dray_layout_region(source->layout, 0)->kind == DRAY_REGION_CUDA &&
           dray_layout_region_count(own) &&
           dray_region_get_kind(s->destination.regions[0]) == DRAY_REGION_CUDA &&
           dray__nccl_find(&version, NULL) == DRAY_OK;
}

/* Returns true when a publisher may have a delta on the held version. For a publisher on another
 * host, only its answers show that. */
static bool expects_delta(const dray_subscriber *s)
{
    for (uint32_t i = 0; s->source == DRAY__FROM_PUBLISHERS && i < s->sources->count; i++) {
        const dray__source *source = &s->sources->sources[i];
        const dray__delta_view *delta = source->has_delta ? dray__delta_of(source) : NULL;
        bool leads = delta && dray__delta_leads(delta, s->report.incarnation, s->held_version,
                                                s->report.version);
        if (leads || (!delta && source->has_delta && !comes_by_nccl(s, source) &&
                      dray__source_remote(source, 0, s->destination.host)))
            return true;
    }
    return false;
}

/* Blocks that are not exchanged were copied by the last commit, and the staging still has them.
 * Blocks that are exchanged are copied back, since the spare memory got an older version. Staging
 * that was never filled is new, or the engine's memory was released and resumed since and may have
 * lost its content. Memory that another allocator may unmap is never read here. */
bool dray__stage_has_base(dray_subscriber *s)
{
    bool same =
        s->staged_incarnation == s->held_incarnation && s->staged_version == s->held_version;
    bool base = s->staged_incarnation && expects_delta(s) &&
                (same || (s->exchange && dray__exchange_is_whole(s->exchange)));
    s->refills = base && s->exchange && (!same || s->spare_is_old);
    s->refilled = 0;
    s->refill_due_ns = 0;
    return base;
}

/* The copy is spread over half of the time that the prefetch may take. */
int dray__stage_refill(dray_subscriber *s, dray_error *error)
{
    int64_t now = dray__now();
    if (now < s->refill_due_ns)
        return DRAY_EAGAIN;
    uint64_t before = s->refilled;
    int rc = dray__exchange_refill(s->exchange, &s->refilled, error);
    double share = (double)(s->refilled - before) / (double)s->staging_bytes;
    s->refills = rc == DRAY_EAGAIN;
    s->refill_due_ns = now + (int64_t)(s->options.prefetch_seconds * 1e9 / 2 * share);
    dray__waker_at(&s->waker, s->refills ? s->refill_due_ns : s->deadline_ns);
    return rc;
}

int dray__stage_commit(dray_subscriber *s, dray_error *error)
{
    dray__transfer_options options = {
        .strategy = DRAY_STRATEGY_DIRECT,
        .bucket_bytes = DRAY__BUCKET_DEFAULT,
        .verify = s->staged_sums != NULL,
        /* Kernels read back in the same pass as they copy; copy engines are faster over PCIe. */
        .copy_engines = s->stage_kind == DRAY_REGION_PINNED ? 0 : DRAY__NO_COPY_ENGINES,
        .attempt = s->attempt};
    s->exchanges = s->exchange && dray__exchange_possible(s->exchange);
    options.in_place = s->exchanges ? dray__exchange_blocks(s->exchange) : NULL;
    s->sources = s->staged;
    s->target = s->destination;
    int rc = dray__transfer_open(s->sources, &s->target, &options, &s->transfer, error);
    return rc ? rc : dray__waker_add(&s->waker, dray__transfer_fd(s->transfer), error);
}

/* ---- exchange -------------------------------------------------------------------------------- */

int dray__stage_exchange(dray_subscriber *s, dray_error *error)
{
    int rc = dray__exchange_swap(s->exchange, s->deadline_ns, error);
    if (rc == DRAY_OK)
        s->exchanged = !s->exchanged;
    return rc;
}

static void *after(void *user)
{
    dray_subscriber *s = user;
    dray_error error;
    dray__hook_step("settling");
    s->after_rc = dray__exchange_settle(s->exchange, &error);
    if (s->after_rc)
        dray__log(DRAY_LOG_WARN, "after a commit of group %s: %s", s->group, error.message);
    /* If the connection broke, the regions are offered when this rank registers again. */
    if (dray__channel_alive(s->channel) &&
        dray__subscriber_put(s, dray__context_deadline(s->context, s->timeout_ns), &error))
        dray__log(DRAY_LOG_WARN, "after a commit of group %s, its memory: %s", s->group,
                  error.message);
    dray__hook_step("settled");
    return NULL;
}

void dray__stage_after(dray_subscriber *s)
{
    if (dray__thread_start(&s->after, after, s, "spare memory after a commit", NULL))
        after(s);
}

void dray__stage_join(dray_subscriber *s)
{
    dray__thread_join(&s->after);
    if (s->after_rc && !s->has_staged)
        dray__stage_drop(s); /* the next prefetch allocates new memory */
    s->after_rc = 0;
}
