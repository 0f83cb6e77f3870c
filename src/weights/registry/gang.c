/* Publishers: gangs, incarnations, versions, and the wait before the next write. */
#include "base/error.h"
#include "base/log.h"
#include "weights/registry/state.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void version_free(struct version *version)
{
    dray__sums_free(&version->sums);
    dray__reg_parts_free(version);
    free(version);
}

static void gang_free(dray__registry *r, struct gang *gang)
{
    (void)r;
    while (gang->versions) {
        struct version *next = gang->versions->next;
        version_free(gang->versions);
        gang->versions = next;
    }
    dray__reg_delivered_free(gang);
    free(gang->set.entries);
    free(gang);
}

static struct gang *gang_new(dray__registry *r, struct model *model)
{
    struct gang *gang = calloc(1, sizeof *gang);
    if (!gang)
        return NULL;
    gang->model = model;
    gang->set.id = r->next_id++;
    gang->next = model->gangs;
    model->gangs = gang;
    return gang;
}

static void gang_drop_if_empty(dray__registry *r, struct gang *gang)
{
    if (gang->set.present)
        return;
    for (struct gang **at = &gang->model->gangs; *at; at = &(*at)->next)
        if (*at == gang) {
            *at = gang->next;
            break;
        }
    gang_free(r, gang);
}

static void gang_break(dray__registry *r, struct gang *gang, const struct registrant *entry,
                       const char *why);

/* A rank that comes back finds that others opened anew, or the other way round: what was before the
 * restart is over. */
static int gang_over(dray__registry *r, struct gang *gang, const struct registrant *entry,
                     uint64_t claimed, dray_error *error)
{
    if (gang->incarnation || (claimed && claimed < gang->claimed) || (claimed && !gang->claimed))
        return dray__fail(error, DRAY_ESTALE,
                          "publisher of %s: incarnation %" PRIu64
                          " did not outlive the coordinator, other ranks opened anew: open the "
                          "publisher again",
                          entry->model->name, claimed);
    gang_break(r, gang, entry, "opened anew while the others came back");
    return DRAY_OK;
}

/* The gang that a newly opened rank belongs to: the one that is forming, unless a whole one lives
 * (then its rank is taken). */
static int gang_for(dray__registry *r, struct registrant *entry, uint64_t claimed,
                    struct gang **out, dray_error *error)
{
    for (struct gang *gang = entry->model->gangs; gang; gang = gang->next) {
        if (gang->broken)
            continue;
        if (gang->claimed != claimed && (claimed || !gang->incarnation)) {
            int rc = gang_over(r, gang, entry, claimed, error);
            if (rc)
                return rc;
            continue;
        }
        if (gang->incarnation)
            return dray__fail(error, DRAY_EEXIST,
                              "publisher of %s: all %" PRIu32 " ranks of incarnation %" PRIu64
                              " are alive; close them before rank %" PRIu32 " opens again",
                              entry->model->name, gang->set.world, gang->incarnation, entry->rank);
        *out = gang;
        return DRAY_OK;
    }
    *out = gang_new(r, entry->model);
    if (!*out)
        return dray__nomem(error);
    (*out)->claimed = claimed;
    return DRAY_OK;
}

static int announce(dray__registry *r, struct gang *gang, struct registrant *entry, uint64_t number,
                    uint8_t checked, dray__sums *sums, struct version **out, dray_error *error);

/* What a rank published before the restart stays readable, once all of them are back. Of the ids
 * that ranks know of their set the largest is the last one. */
static int take_claim(dray__registry *r, struct gang *gang, struct registrant *entry,
                      dray__rank_claim *claim, dray_error *error)
{
    struct version *version;
    if (!claim->given || !claim->incarnation)
        return DRAY_OK;
    gang->claimed_set = claim->set > gang->claimed_set ? claim->set : gang->claimed_set;
    if (!claim->published)
        return DRAY_OK;
    int rc =
        announce(r, gang, entry, claim->version, claim->checked, &claim->sums, &version, error);
    if (rc == DRAY_OK)
        version->withdrawn |= !claim->readable;
    return rc;
}

int dray__reg_gang_join(dray__registry *r, struct registrant *entry, uint32_t world,
                        dray__rank_claim *claim, dray_error *error)
{
    struct gang *gang;
    int rc = gang_for(r, entry, claim->given ? claim->incarnation : 0, &gang, error);
    if (rc)
        return rc;
    rc = dray__reg_set_join(&gang->set, entry, world, "publisher", error);
    if (rc == DRAY_OK && (rc = take_claim(r, gang, entry, claim, error)))
        dray__reg_set_leave(&gang->set, entry);
    if (rc) {
        gang_drop_if_empty(r, gang);
        return rc;
    }
    entry->gang = gang;
    dray__reg_gang_complete(r, gang);
    return DRAY_OK;
}

void dray__reg_gang_complete(dray__registry *r, struct gang *gang)
{
    if (gang->incarnation || gang->broken || gang->set.present < gang->set.world)
        return;
    for (uint32_t i = 0; i < gang->set.world; i++)
        if (gang->set.entries[i]->regions_missing)
            return;
    gang->incarnation = gang->claimed ? gang->claimed : r->next_incarnation++;
    if (gang->claimed_set && !dray__reg_set_taken(gang->model, gang->claimed_set))
        gang->set.id = gang->claimed_set;
}

static void gang_break(dray__registry *r, struct gang *gang, const struct registrant *entry,
                       const char *why)
{
    gang->broken = true;
    snprintf(gang->reason, sizeof gang->reason,
             "publisher rank %" PRIu32 " (%s, member %" PRIu64 ") of %s, incarnation %" PRIu64
             ", %s",
             entry->rank, entry->name, entry->member, gang->model->name, gang->incarnation, why);
    dray_error error;
    dray__fail(&error, DRAY_EDEAD, "%s", gang->reason);
    for (struct group *group = gang->model->groups; group; group = group->next)
        if (group->phase == ATTEMPT_MOVING && group->gang == gang)
            dray__reg_abort(r, group, &error);
}

void dray__reg_gang_leave(dray__registry *r, struct registrant *entry, const char *why)
{
    struct gang *gang = entry->gang;
    dray_error error;
    dray__fail(&error, DRAY_ECANCELED, "publisher %s", why);
    dray__reg_pending_refuse(r, entry, NULL, &error);
    if ((gang->incarnation || gang->claimed) && !gang->broken)
        gang_break(r, gang, entry, why);
    dray__reg_set_leave(&gang->set, entry);
    entry->gang = NULL;
    gang_drop_if_empty(r, gang);
}

bool dray__reg_ready(const struct gang *gang, const struct version *version)
{
    return !gang->broken && gang->incarnation && version->published == gang->set.world &&
           !version->withdrawn;
}

struct version *dray__reg_newest(const struct model *model, uint64_t min, struct gang **out)
{
    for (struct gang *gang = model->gangs; gang; gang = gang->next)
        for (struct version *version = gang->versions; version; version = version->next)
            if (dray__reg_ready(gang, version) && version->number >= min) {
                *out = gang;
                return version;
            }
    return NULL;
}

const struct version *dray__reg_latest(const struct model *model, const struct gang **out)
{
    for (const struct gang *gang = model->gangs; gang; gang = gang->next)
        for (const struct version *version = gang->versions; version; version = version->next)
            if (!gang->broken && version->published == gang->set.world) {
                *out = gang;
                return version;
            }
    return NULL;
}

/* Keeps what is read, waited for, being published, or the newest complete one. */
static void prune(dray__registry *r, struct gang *gang)
{
    bool complete_seen = false;
    for (struct version **at = &gang->versions; *at;) {
        struct version *version = *at;
        bool complete = version->published == gang->set.world;
        bool waited = false;
        for (const struct pending *p = r->pending; p; p = p->next)
            waited |= p->kind == &dray__reg_for_readers && p->entry->gang == gang &&
                      p->number >= version->number;
        if (!complete_seen || version->readers || waited) {
            complete_seen |= complete;
            at = &version->next;
            continue;
        }
        *at = version->next;
        version_free(version);
    }
}

int dray__reg_publish(dray__registry *r, struct registrant *entry, uint64_t number, uint8_t checked,
                      dray__sums *sums, dray_error *error)
{
    struct gang *gang = entry->gang;
    if (gang->broken)
        return dray__fail(error, DRAY_ESTALE, "%s: open the publisher again", gang->reason);
    if (!gang->incarnation)
        return dray__fail(error, DRAY_EAGAIN,
                          "publisher of %s: %" PRIu32 " of %" PRIu32 " ranks have opened",
                          gang->model->name, gang->set.present, gang->set.world);
    if (entry->regions_missing || entry->released)
        return dray__fail(error, DRAY_ESTALE,
                          "publisher of %s: rank %" PRIu32 "'s regions were taken back: say where "
                          "its memory is now",
                          gang->model->name, entry->rank);
    if (entry->has_published && number <= entry->published)
        return dray__fail(error, DRAY_EINVALID,
                          "publisher of %s: version %" PRIu64 " after %" PRIu64
                          ": versions grow within an incarnation",
                          gang->model->name, number, entry->published);
    struct version *version;
    return announce(r, gang, entry, number, checked, sums, &version, error);
}

static struct version *version_new(const struct gang *gang, uint64_t number)
{
    struct version *version = calloc(1, sizeof *version);
    if (!version)
        return NULL;
    version->number = number;
    version->world = gang->set.world;
    version->parts = calloc((size_t)version->world + 1, sizeof *version->parts);
    if (version->parts)
        return version;
    free(version);
    return NULL;
}

static int announce(dray__registry *r, struct gang *gang, struct registrant *entry, uint64_t number,
                    uint8_t checked, dray__sums *sums, struct version **out, dray_error *error)
{
    /* This rank's memory holds `number` now: nothing older can be read as a whole. */
    struct version **at = &gang->versions;
    while (*at && (*at)->number > number)
        at = &(*at)->next;
    for (struct version *older = *at; older; older = older->next)
        older->withdrawn |= older->number < number;
    struct version *version = *at;
    if (!version || version->number != number) {
        version = version_new(gang, number);
        if (!version)
            return dray__nomem(error);
        version->next = *at;
        /* A rank that is ahead already overwrote its part of this one. */
        version->withdrawn = gang->versions && gang->versions->number > number;
        *at = version;
    }
    int rc = checked == DRAY__CHECKED_LATER
                 ? DRAY_OK
                 : dray__reg_take_sums(version, entry->rank, sums, error);
    if (rc)
        return rc;
    version->unchecked |= checked == DRAY__UNCHECKED;
    version->published++;
    version->last = entry->member;
    entry->published = number;
    entry->has_published = true;
    prune(r, gang);
    *out = version;
    return DRAY_OK;
}

bool dray__reg_gang_read(const struct gang *gang, uint64_t number)
{
    for (const struct version *version = gang->versions; version; version = version->next)
        if (version->number <= number && version->readers)
            return true;
    return false;
}

/* Attempts from here on may read the gang's memory; older ones are over. */
static uint64_t oldest_attempt(const dray__registry *r, const struct gang *gang)
{
    uint64_t oldest = r->next_id;
    for (const struct group *group = gang->model->groups; group; group = group->next)
        if (group->phase == ATTEMPT_MOVING && group->gang == gang && group->attempt < oldest)
            oldest = group->attempt;
    return oldest;
}

/* What other ranks have announced beyond it waits for this rank still: it is not touched. */
void dray__reg_gang_withdraw(const struct registrant *entry)
{
    struct version *version = entry->gang->versions;
    for (; version; version = version->next)
        version->withdrawn |= entry->has_published && version->number <= entry->published;
}

void dray__reg_wait_answer(dray__registry *r, const struct registrant *entry, uint64_t number,
                           void *ticket)
{
    dray__drained answer = {.names = "", .oldest_attempt = oldest_attempt(r, entry->gang)};
    for (const struct version *version = entry->gang->versions; version; version = version->next)
        if (version->number == number) {
            answer.dropped = version->dropped;
            answer.names = version->dropped_names;
        }
    dray__reg_answer(r, ticket, &dray__drained_fields, &answer);
}

/* Takes the memory from the groups that still read it: what they vote later is refused. */
void dray__reg_gang_drop_readers(dray__registry *r, struct gang *gang, uint64_t number)
{
    for (struct group *group = gang->model->groups; group; group = group->next) {
        if (group->phase != ATTEMPT_MOVING || group->gang != gang ||
            group->reading->number > number)
            continue;
        struct version *version = group->reading;
        size_t used = strlen(version->dropped_names);
        snprintf(version->dropped_names + used, sizeof version->dropped_names - used, "%s%s",
                 used ? ", " : "", group->name);
        version->dropped++;
        group->epoch++;
        dray_error error;
        dray__fail(&error, DRAY_ESTALE,
                   "group %s was dropped: it did not release version %" PRIu64
                   " of %s within the publisher's deadline",
                   group->name, version->number, gang->model->name);
        dray__log(DRAY_LOG_WARN, "%s", error.message);
        dray__reg_abort(r, group, &error);
    }
}
