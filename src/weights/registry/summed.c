/* Sums of versions. Publishers compute them while groups read already; no group commits a version
 * before the sums of all ranks have arrived. */
#include "base/error.h"
#include "base/log.h"
#include "weights/registry/state.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void dray__reg_parts_free(struct version *version)
{
    for (uint32_t i = 0; version->parts && i < version->world; i++)
        dray__sums_free(&version->parts[i].sums);
    free(version->parts);
    version->parts = NULL;
}

/* Joins the sums in the order of ranks, so that the last result of the join can be used again. */
static bool join_parts(struct version *version)
{
    bool joined = true;
    for (uint32_t i = 0; i < version->world && joined; i++)
        joined = dray__sums_join(&version->sums, &version->parts[i].sums);
    dray__reg_parts_free(version);
    return joined;
}

int dray__reg_take_sums(struct version *version, uint32_t rank, dray__sums *sums, dray_error *error)
{
    if (!version->parts || version->parts[rank].given)
        return DRAY_OK; /* sent again, after a restart or a lost answer */
    version->parts[rank] = (struct summed_part){*sums, true};
    *sums = (dray__sums){0};
    if (version->summed + 1 == version->world && !join_parts(version)) {
        version->withdrawn = true; /* its sums can never be complete */
        return dray__nomem(error);
    }
    version->summed++;
    return DRAY_OK;
}

bool dray__reg_is_summed(const struct version *version)
{
    return version->unchecked || version->summed == version->world;
}

bool dray__reg_awaits_sums(const struct group *group)
{
    return group->verify && group->reading && !dray__reg_is_summed(group->reading);
}

void dray__reg_unsummed(const struct group *group, dray_error *error)
{
    char who[160] = "";
    const struct version *version = group->reading;
    for (uint32_t i = 0; version && version->parts && i < version->world; i++) {
        const struct registrant *entry = group->trainer->set.entries[i];
        size_t used = strlen(who);
        if (!version->parts[i].given)
            snprintf(who + used, sizeof who - used, "%srank %" PRIu32 " (%s)", used ? ", " : "", i,
                     entry ? entry->name : "gone");
    }
    if (version)
        dray__fail(error, DRAY_ETIMEDOUT,
                   "publisher %s did not say the checksums of version %" PRIu64
                   " within the deadline",
                   who, version->number);
}

/* Marks the version as failed: no group can commit it. */
static void fail_version(dray__registry *r, struct trainer *trainer, struct version *version,
                         const dray_error *reason)
{
    version->withdrawn = version->failed = true;
    for (struct group *group = trainer->model->groups; group; group = group->next)
        if (group->phase == ATTEMPT_MOVING && group->reading == version)
            dray__reg_abort(r, group, reason);
}

static void decide_readers(dray__registry *r, struct trainer *trainer,
                           const struct version *version)
{
    for (struct group *group = trainer->model->groups; group; group = group->next)
        if (group->phase == ATTEMPT_MOVING && group->reading == version)
            dray__reg_decide(r, group);
}

int dray__reg_summed(dray__registry *r, const struct registrant *entry, uint64_t number,
                     const dray_error *verdict, dray__sums *sums, dray_error *error)
{
    struct trainer *trainer = entry->trainer;
    if (!entry->has_published || number > entry->published)
        return dray__fail(error, DRAY_EINVALID,
                          "publisher of %s: rank %" PRIu32 " did not publish version %" PRIu64,
                          trainer->model->name, entry->rank, number);
    struct version *version = trainer->versions;
    while (version && version->number != number)
        version = version->next;
    if (!version)
        return DRAY_OK; /* the version was withdrawn and has no readers */
    dray_error reason = {0};
    int rc = DRAY_OK;
    if (verdict->code)
        dray__fail(&reason, verdict->code,
                   "version %" PRIu64 " of %s: publisher rank %" PRIu32
                   " (%s) has no checksums of it: %.300s",
                   number, trainer->model->name, entry->rank, entry->name, verdict->message);
    else if ((rc = dray__reg_take_sums(version, entry->rank, sums, &reason)) && error)
        *error = reason;
    if (reason.code) {
        dray__log(DRAY_LOG_WARN, "%s", reason.message);
        fail_version(r, trainer, version, &reason);
    } else if (dray__reg_is_summed(version)) {
        decide_readers(r, trainer, version);
    }
    return rc;
}
