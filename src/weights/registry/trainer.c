/* Publishers: trainers, incarnations, versions, and the wait before the next write. */
#include "base/error.h"
#include "base/log.h"
#include "base/words.h"
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

static void trainer_free(dray__registry *r, struct trainer *trainer)
{
    (void)r;
    while (trainer->versions) {
        struct version *next = trainer->versions->next;
        version_free(trainer->versions);
        trainer->versions = next;
    }
    dray__reg_delivered_free(trainer);
    free(trainer->set.entries);
    free(trainer);
}

static struct trainer *trainer_new(dray__registry *r, struct model *model)
{
    struct trainer *trainer = calloc(1, sizeof *trainer);
    if (!trainer)
        return NULL;
    trainer->model = model;
    trainer->set.id = r->next_id++;
    trainer->next = model->trainers;
    model->trainers = trainer;
    return trainer;
}

static void trainer_drop_if_empty(dray__registry *r, struct trainer *trainer)
{
    if (trainer->set.present)
        return;
    for (struct trainer **at = &trainer->model->trainers; *at; at = &(*at)->next)
        if (*at == trainer) {
            *at = trainer->next;
            break;
        }
    trainer_free(r, trainer);
}

static void trainer_break(dray__registry *r, struct trainer *trainer,
                          const struct registrant *entry, const char *why);

/* Called when some ranks register again after a restart and others open as new ones. The state
 * before the restart is void. */
static int trainer_over(dray__registry *r, struct trainer *trainer, const struct registrant *entry,
                        uint64_t claimed, dray_error *error)
{
    if (trainer->incarnation || (claimed && claimed < trainer->claimed) ||
        (claimed && !trainer->claimed))
        return dray__fail(error, DRAY_ESTALE,
                          "publisher of %s: incarnation %" PRIu64
                          " did not outlive the coordinator, other ranks opened anew: open the "
                          "publisher again",
                          entry->model->name, claimed);
    trainer_break(r, trainer, entry, "opened anew while the others came back");
    return DRAY_OK;
}

/* Gives the trainer that a rank joins: the one that is incomplete, or a new one. Fails when there
 * is a complete one. */
static int trainer_for(dray__registry *r, struct registrant *entry, uint64_t claimed,
                       struct trainer **out, dray_error *error)
{
    for (struct trainer *trainer = entry->model->trainers; trainer; trainer = trainer->next) {
        if (trainer->broken)
            continue;
        if (trainer->claimed != claimed && (claimed || !trainer->incarnation)) {
            int rc = trainer_over(r, trainer, entry, claimed, error);
            if (rc)
                return rc;
            continue;
        }
        if (trainer->incarnation)
            return dray__fail(error, DRAY_EEXIST,
                              "publisher of %s: all %" PRIu32 " ranks of incarnation %" PRIu64
                              " are alive; close them before rank %" PRIu32 " opens again",
                              entry->model->name, trainer->set.world, trainer->incarnation,
                              entry->rank);
        *out = trainer;
        return DRAY_OK;
    }
    *out = trainer_new(r, entry->model);
    if (!*out)
        return dray__nomem(error);
    (*out)->claimed = claimed;
    return DRAY_OK;
}

static int announce(dray__registry *r, struct trainer *trainer, struct registrant *entry,
                    uint64_t number, uint8_t checked, dray__sums *sums, struct version **out,
                    dray_error *error);

/* Takes a rank's claim. Versions that ranks published before the restart are readable again once
 * all ranks are back. The set gets the largest id that a rank knows, which is the last one. */
static int take_claim(dray__registry *r, struct trainer *trainer, struct registrant *entry,
                      dray__rank_claim *claim, dray_error *error)
{
    struct version *version;
    if (!claim->given || !claim->incarnation)
        return DRAY_OK;
    trainer->claimed_set = claim->set > trainer->claimed_set ? claim->set : trainer->claimed_set;
    if (!claim->published)
        return DRAY_OK;
    int rc =
        announce(r, trainer, entry, claim->version, claim->checked, &claim->sums, &version, error);
    if (rc == DRAY_OK)
        version->withdrawn |= !claim->readable;
    return rc;
}

int dray__reg_trainer_join(dray__registry *r, struct registrant *entry, uint32_t world,
                           dray__rank_claim *claim, dray_error *error)
{
    struct trainer *trainer;
    int rc = trainer_for(r, entry, claim->given ? claim->incarnation : 0, &trainer, error);
    if (rc)
        return rc;
    rc = dray__reg_set_join(&trainer->set, entry, world, "publisher", error);
    if (rc == DRAY_OK && (rc = take_claim(r, trainer, entry, claim, error)))
        dray__reg_set_leave(&trainer->set, entry);
    if (rc) {
        trainer_drop_if_empty(r, trainer);
        return rc;
    }
    entry->trainer = trainer;
    dray__reg_trainer_complete(r, trainer);
    return DRAY_OK;
}

void dray__reg_trainer_complete(dray__registry *r, struct trainer *trainer)
{
    if (trainer->incarnation || trainer->broken || trainer->set.present < trainer->set.world)
        return;
    for (uint32_t i = 0; i < trainer->set.world; i++)
        if (trainer->set.entries[i]->regions_missing)
            return;
    trainer->incarnation = trainer->claimed ? trainer->claimed : r->next_incarnation++;
    if (trainer->claimed_set && !dray__reg_set_taken(trainer->model, trainer->claimed_set))
        trainer->set.id = trainer->claimed_set;
}

static void trainer_break(dray__registry *r, struct trainer *trainer,
                          const struct registrant *entry, const char *why)
{
    trainer->broken = true;
    snprintf(
        trainer->reason, sizeof trainer->reason,
        "publisher rank %" PRIu32 " (%s, member %" PRIu64 ") of %s, incarnation %" PRIu64 ", %s",
        entry->rank, entry->name, entry->member, trainer->model->name, trainer->incarnation, why);
    dray_error error;
    dray__fail(&error, DRAY_EDEAD, "%s", trainer->reason);
    for (struct group *group = trainer->model->groups; group; group = group->next)
        if (group->phase == ATTEMPT_MOVING && group->trainer == trainer)
            dray__reg_abort(r, group, &error);
}

void dray__reg_trainer_leave(dray__registry *r, struct registrant *entry, const char *why)
{
    struct trainer *trainer = entry->trainer;
    dray_error error;
    dray__fail(&error, DRAY_ECANCELED, "publisher %s", why);
    dray__reg_pending_refuse(r, entry, NULL, &error);
    if ((trainer->incarnation || trainer->claimed) && !trainer->broken)
        trainer_break(r, trainer, entry, why);
    dray__reg_set_leave(&trainer->set, entry);
    entry->trainer = NULL;
    trainer_drop_if_empty(r, trainer);
}

bool dray__reg_ready(const struct trainer *trainer, const struct version *version)
{
    return !trainer->broken && trainer->incarnation && version->published == trainer->set.world &&
           !version->withdrawn;
}

struct version *dray__reg_newest(const struct model *model, uint64_t min, struct trainer **out)
{
    for (struct trainer *trainer = model->trainers; trainer; trainer = trainer->next)
        for (struct version *version = trainer->versions; version; version = version->next)
            if (dray__reg_ready(trainer, version) && version->number >= min) {
                *out = trainer;
                return version;
            }
    return NULL;
}

const struct version *dray__reg_latest(const struct model *model, const struct trainer **out)
{
    for (const struct trainer *trainer = model->trainers; trainer; trainer = trainer->next)
        for (const struct version *version = trainer->versions; version; version = version->next)
            if (!trainer->broken && version->published == trainer->set.world) {
                *out = trainer;
                return version;
            }
    return NULL;
}

/* Writes "; did you mean 'policy'?" for the name of a model that no trainer has, or "". */
static void nearest_model(const dray__registry *r, const char *name, char *out, size_t capacity)
{
    const char *names[64];
    size_t count = 0;
    for (const struct model *m = r->models; m && count < 64; m = m->next)
        if (m->trainers)
            names[count++] = m->name;
    dray__word_hint(name, names, count, out, capacity);
}

/* Writes what there is of the model: its newest version, or a trainer without one, or the nearest
 * name of another model. */
static void describe(const dray__registry *r, const struct model *model, char *out, size_t capacity)
{
    const struct trainer *trainer = NULL;
    const struct version *newest = dray__reg_latest(model, &trainer);
    char hint[128];
    for (trainer = model->trainers; trainer && trainer->broken; trainer = trainer->next)
        ;
    if (newest) {
        snprintf(out, capacity, "the newest is %" PRIu64, newest->number);
    } else if (trainer && !trainer->incarnation) {
        snprintf(out, capacity, "%" PRIu32 " of %" PRIu32 " ranks of its trainer have opened",
                 trainer->set.present, trainer->set.world);
    } else if (trainer) {
        snprintf(out, capacity, "its trainer has not published one on all of its %" PRIu32 " ranks",
                 trainer->set.world);
    } else {
        nearest_model(r, model->name, hint, sizeof hint);
        snprintf(out, capacity, "no trainer has a publisher of that model open%s", hint);
    }
}

void dray__reg_no_version(const dray__registry *r, const struct group *group, uint64_t min,
                          dray_error *error)
{
    char found[200];
    for (const struct trainer *trainer = group->model->trainers; trainer; trainer = trainer->next)
        for (const struct version *v = trainer->versions; v; v = v->next) {
            if (v->number < min || v->published < trainer->set.world)
                continue;
            dray__fail(error, DRAY_ETIMEDOUT,
                       "group %s: version %" PRIu64 " of %s was published and withdrawn%s%s before "
                       "the group could read it (dray_publisher_deliver waits for groups)",
                       group->name, v->number, group->model->name, trainer->broken ? ": " : "",
                       trainer->broken ? trainer->reason : "");
            return;
        }
    describe(r, group->model, found, sizeof found);
    dray__fail(error, DRAY_ETIMEDOUT, "group %s: no version >= %" PRIu64 " of %s was published; %s",
               group->name, min, group->model->name, found);
}

/* Forgets versions, except those with readers or waiters, those being published, and the newest
 * complete one. */
static void prune(dray__registry *r, struct trainer *trainer)
{
    bool complete_seen = false;
    for (struct version **at = &trainer->versions; *at;) {
        struct version *version = *at;
        bool complete = version->published == trainer->set.world;
        bool waited = false;
        for (const struct pending *p = r->pending; p; p = p->next)
            waited |= p->kind == &dray__reg_for_readers && p->entry->trainer == trainer &&
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
    struct trainer *trainer = entry->trainer;
    if (trainer->broken)
        return dray__fail(error, DRAY_ESTALE, "%s: open the publisher again", trainer->reason);
    if (!trainer->incarnation)
        return dray__fail(error, DRAY_EAGAIN,
                          "publisher of %s: %" PRIu32 " of %" PRIu32 " ranks have opened",
                          trainer->model->name, trainer->set.present, trainer->set.world);
    if (entry->regions_missing || entry->released)
        return dray__fail(error, DRAY_ESTALE,
                          "publisher of %s: rank %" PRIu32 "'s regions were taken back: say where "
                          "its memory is now",
                          trainer->model->name, entry->rank);
    if (entry->has_published && number <= entry->published)
        return dray__fail(error, DRAY_EINVALID,
                          "publisher of %s: a version greater than %" PRIu64
                          ", which it published last, expected, found %" PRIu64,
                          trainer->model->name, entry->published, number);
    struct version *version;
    return announce(r, trainer, entry, number, checked, sums, &version, error);
}

static struct version *version_new(const struct trainer *trainer, uint64_t number)
{
    struct version *version = calloc(1, sizeof *version);
    if (!version)
        return NULL;
    version->number = number;
    version->world = trainer->set.world;
    version->parts = calloc((size_t)version->world + 1, sizeof *version->parts);
    if (version->parts)
        return version;
    free(version);
    return NULL;
}

static int announce(dray__registry *r, struct trainer *trainer, struct registrant *entry,
                    uint64_t number, uint8_t checked, dray__sums *sums, struct version **out,
                    dray_error *error)
{
    /* This rank's memory holds `number` now, so that no older version can be read as a whole. */
    struct version **at = &trainer->versions;
    while (*at && (*at)->number > number)
        at = &(*at)->next;
    for (struct version *older = *at; older; older = older->next)
        older->withdrawn |= older->number < number;
    struct version *version = *at;
    if (!version || version->number != number) {
        version = version_new(trainer, number);
        if (!version)
            return dray__nomem(error);
        version->next = *at;
        /* Another rank has published a later version, and overwritten its part of this one. */
        version->withdrawn = trainer->versions && trainer->versions->number > number;
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
    prune(r, trainer);
    *out = version;
    return DRAY_OK;
}

bool dray__reg_trainer_read(const struct trainer *trainer, uint64_t number)
{
    for (const struct version *version = trainer->versions; version; version = version->next)
        if (version->number <= number && version->readers)
            return true;
    return false;
}

/* Returns the oldest attempt that may read the trainer's memory. */
static uint64_t oldest_attempt(const dray__registry *r, const struct trainer *trainer)
{
    uint64_t oldest = r->next_id;
    for (const struct group *group = trainer->model->groups; group; group = group->next)
        if (group->phase == ATTEMPT_MOVING && group->trainer == trainer && group->attempt < oldest)
            oldest = group->attempt;
    return oldest;
}

/* Later versions, which other ranks have announced, still wait for this rank, and stay. */
void dray__reg_trainer_withdraw(const struct registrant *entry)
{
    struct version *version = entry->trainer->versions;
    for (; version; version = version->next)
        version->withdrawn |= entry->has_published && version->number <= entry->published;
}

void dray__reg_wait_answer(dray__registry *r, const struct registrant *entry, uint64_t number,
                           void *ticket)
{
    dray__drained answer = {.names = "", .oldest_attempt = oldest_attempt(r, entry->trainer)};
    for (const struct version *version = entry->trainer->versions; version; version = version->next)
        if (version->number == number) {
            answer.dropped = version->dropped;
            answer.names = version->dropped_names;
        }
    dray__reg_answer(r, ticket, &dray__drained_fields, &answer);
}

static void note_dropped(struct version *version, const struct group *group)
{
    size_t used = strlen(version->dropped_names);
    snprintf(version->dropped_names + used, sizeof version->dropped_names - used, "%s%s",
             used ? ", " : "", group->name);
    version->dropped++;
}

/* Their later votes are refused. A group is counted for the version that it read, and for the later
 * one that is waited for. */
void dray__reg_trainer_drop_readers(dray__registry *r, struct trainer *trainer, uint64_t number)
{
    for (struct group *group = trainer->model->groups; group; group = group->next) {
        if (group->phase != ATTEMPT_MOVING || group->trainer != trainer ||
            group->reading->number > number)
            continue;
        const struct version *version = group->reading;
        for (struct version *v = trainer->versions; v; v = v->next)
            if (v == version || v->number == number)
                note_dropped(v, group);
        group->epoch++;
        dray_error error;
        dray__fail(&error, DRAY_ESTALE,
                   "group %s was dropped: it did not release version %" PRIu64
                   " of %s within the publisher's deadline",
                   group->name, version->number, trainer->model->name);
        dray__log(DRAY_LOG_WARN, "%s", error.message);
        dray__reg_abort(r, group, &error);
    }
}
