/* Planning an update: the sources of the last one where they still fit, who updates together, what
 * will be compared. */
#include "base/error.h"
#include "weights/fan.h"
#include "weights/subscriber.h"

#include <inttypes.h>
#include <stdlib.h>

/* The plan of the last update of this kind, where it still fits; else a new one is begun. */
static int find_sources(dray_subscriber *s, dray_error *error)
{
    bool disk = s->source == DRAY__FROM_DISK;
    dray__sources **kept = disk ? &s->disk : &s->live;
    s->sources = *kept;
    bool same = s->sources && s->sources->plan && s->sources->group_set == s->group_set;
    if (same && disk && dray__sources_disk_same(s->sources, s->path)) {
        dray__sources_close(s->sources); /* the same tensors, maybe in new files */
        return DRAY_OK;
    }
    if (same && !disk && s->sources->source_set == s->source_set)
        return DRAY_OK;
    dray__subscriber_forget(s, kept);
    s->report.planned = 1;
    int rc = disk ? dray__sources_disk(s->path, s->group_set, &s->destination, kept, error)
                  : dray__sources_live(s->source_set, s->source_count, s->group_set,
                                       &s->destination, kept, error);
    s->sources = *kept;
    return rc;
}

/* Which tensors the coordinator will compare with what was announced. */
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
            !s->partial.count || !dray__map_get(&s->partial, s->sources->names[t], &any);
    return DRAY_OK;
}

static int open_swap(dray_subscriber *s, dray_error *error)
{
    int rc = dray__swap_open(s, &s->swap, error);
    return rc ? rc : dray__subscriber_watch(s, dray__swap_fd(s->swap), error);
}

/* A commit needs nothing but the staging. */
static int prepare_commit(dray_subscriber *s, dray_error *error)
{
    if (s->has_staged && s->staged_version == s->report.version &&
        s->staged_incarnation == s->report.incarnation)
        return open_swap(s, error);
    return dray__fail(error, DRAY_ENOENT,
                      "rank %" PRIu32 " of group %s has not prefetched version %" PRIu64,
                      s->destination.rank, s->group, s->report.version);
}

/* Buckets come one after the other, and cut through what shares a scale. */
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

/* Its members' regions are no longer mapped when it changes. */
static void drop_cohort(dray_subscriber *s)
{
    uint64_t set = s->sources->fan ? s->sources->cohort_set : 0;
    if (set && set != s->cohort_set)
        dray__subscriber_unmapped(s, set);
}

int dray__update_plan(dray_subscriber *s, dray_error *error)
{
    if (s->purpose == DRAY__COMMIT)
        return prepare_commit(s, error);
    int rc = DRAY_OK;
    if (!s->sources) {
        rc = find_sources(s, error);
        if (rc == DRAY_OK) {
            s->sources->asked = 0; /* by an update whose coordinator never answered */
            drop_cohort(s);
        }
        if (rc == DRAY_OK)
            rc = dray__sources_cohort(s->sources, s->cohort_set, s->cohort_count, error);
    }
    if (rc == DRAY_OK)
        rc = dray__sources_plan(s->sources, s->channel, s->key, &s->destination, error);
    if (rc == DRAY_OK)
        rc = check_load(s, error);
    if (rc == DRAY_OK && s->source == DRAY__FROM_DISK && s->options.verify >= 0)
        rc = dray__sources_disk_sums(s->sources, error);
    return rc ? rc : find_compared(s, error);
}
