/* Requests that wait: for other ranks, for readers to finish, for groups to have a version. Each
 * kind of wait is a struct of functions. */
#include "base/error.h"
#include "weights/registry/state.h"

#include <inttypes.h>
#include <stdlib.h>

static void refuse(dray__registry *r, struct pending *p, const dray_error *error)
{
    dray__reg_refuse(r, p->ticket, error);
    p->ticket = NULL;
}

static void answer_empty(dray__registry *r, struct pending *p)
{
    dray__reg_reply(r, p->ticket, NULL, -1);
}

/* ---- UPDATE_SOURCES(TRAINER) ----------------------------------------------------------------- */

static bool trainer_formed(const dray__registry *r, const struct pending *p)
{
    (void)r;
    return p->entry->trainer->incarnation || p->entry->trainer->broken;
}

static void refuse_broken(dray__registry *r, struct pending *p)
{
    dray_error error;
    dray__fail(&error, DRAY_ESTALE, "%s: open the publisher again", p->entry->trainer->reason);
    refuse(r, p, &error);
}

static void answer_trainer(dray__registry *r, struct pending *p)
{
    const struct trainer *trainer = p->entry->trainer;
    if (trainer->broken)
        refuse_broken(r, p);
    else
        dray__reg_answer(
            r, p->ticket, &dray__trainer_told_fields,
            &(dray__trainer_told){trainer->incarnation, trainer->set.id, trainer->set.world});
}

static void expire_trainer(dray__registry *r, struct pending *p, bool gone)
{
    (void)gone;
    const struct set *set = &p->entry->trainer->set;
    dray_error error;
    dray__fail(&error, DRAY_ETIMEDOUT,
               "publisher of %s: %" PRIu32 " of %" PRIu32 " ranks opened in time",
               p->entry->model->name, set->present, set->world);
    refuse(r, p, &error);
}

const struct pending_kind dray__reg_for_trainer = {trainer_formed, answer_trainer, expire_trainer};

/* ---- PUBLISHER_WAIT -------------------------------------------------------------------------- */

static bool readers_gone(const dray__registry *r, const struct pending *p)
{
    (void)r;
    return !dray__reg_trainer_read(p->entry->trainer, p->number);
}

static void answer_wait(dray__registry *r, struct pending *p)
{
    dray__reg_wait_answer(r, p->entry, p->number, p->ticket);
}

static void drop_readers(dray__registry *r, struct pending *p, bool gone)
{
    (void)gone;
    dray__reg_trainer_drop_readers(r, p->entry->trainer, p->number);
}

const struct pending_kind dray__reg_for_readers = {readers_gone, answer_wait, drop_readers};

/* ---- PUBLISHER_DELIVER ----------------------------------------------------------------------- */

static bool groups_have_it(const dray__registry *r, const struct pending *p)
{
    (void)r;
    return dray__reg_arrived(p) >= p->count || p->entry->trainer->broken;
}

static void answer_deliver(dray__registry *r, struct pending *p)
{
    if (dray__reg_arrived(p) >= p->count)
        answer_empty(r, p);
    else
        refuse_broken(r, p);
}

static void expire_deliver(dray__registry *r, struct pending *p, bool gone)
{
    (void)gone;
    char text[320];
    dray_error error;
    dray__reg_missing(p, text, sizeof text);
    dray__fail(&error, DRAY_ETIMEDOUT,
               "%" PRIu32 " of %" PRIu32 " groups have committed version %" PRIu64 " of %s; %s",
               dray__reg_arrived(p), p->count, p->number, p->entry->model->name, text);
    refuse(r, p, &error);
}

const struct pending_kind dray__reg_for_groups = {groups_have_it, answer_deliver, expire_deliver};

/* ---- REGIONS_RELEASE ------------------------------------------------------------------------- */

static bool pins_gone(const dray__registry *r, const struct pending *p)
{
    return readers_gone(r, p) && !dray__reg_pinned(r, p->entry);
}

static void answer_release(dray__registry *r, struct pending *p)
{
    dray__reg_release_answer(r, p->entry, p->ticket);
}

const struct pending_kind dray__reg_for_pins = {pins_gone, answer_release, drop_readers};

/* ---- UPDATE_WRITING, SUBSCRIBER_LEAVE -------------------------------------------------------- */

static bool may_write(const dray__registry *r, const struct pending *p)
{
    (void)r;
    return !p->entry->group->readers || p->entry->group->purpose == DRAY__PREFETCH;
}

static void answer_write(dray__registry *r, struct pending *p)
{
    dray__reg_grant_writing(p->entry);
    answer_empty(r, p);
}

static void expire_write(dray__registry *r, struct pending *p, bool gone)
{
    dray_error error;
    dray__fail(&error, DRAY_ECANCELED, "connection lost");
    if (gone)
        refuse(r, p, &error);
    else
        dray__reg_revoke(r, p->entry->group, DRAY_ESTALE, "its next overwrite waited long enough");
}

const struct pending_kind dray__reg_to_write = {may_write, answer_write, expire_write};

static bool may_leave(const dray__registry *r, const struct pending *p)
{
    (void)r;
    return !p->entry->group->readers;
}

static void answer_leave(dray__registry *r, struct pending *p)
{
    dray__reg_unhouse(r, p->entry);
    dray__reg_answer(r, p->ticket, &dray__u32_fields, &p->revoked);
}

static void expire_leave(dray__registry *r, struct pending *p, bool gone)
{
    (void)gone;
    p->revoked = dray__reg_revoke(r, p->entry->group, DRAY_ESTALE, "the group leaves");
}

const struct pending_kind dray__reg_to_leave = {may_leave, answer_leave, expire_leave};

/* ---- all of them ----------------------------------------------------------------------------- */

static void pending_free(struct pending *p)
{
    dray__arena_free(&p->texts);
    free(p);
}

static void end(dray__registry *r, struct pending *p, bool expired, bool gone)
{
    if (expired)
        p->kind->expire(r, p, gone);
    if (p->ticket)
        p->kind->answer(r, p);
    pending_free(p);
}

int dray__reg_pend(dray__registry *r, const struct pending *given, int64_t timeout_ns,
                   dray_error *error)
{
    struct pending *p = calloc(1, sizeof *p);
    int rc = p ? DRAY_OK : dray__nomem(error);
    for (const struct pending *other = r->pending; other && rc == DRAY_OK; other = other->next)
        if (other->entry == given->entry && other->kind == given->kind &&
            given->kind != &dray__reg_for_readers && given->kind != &dray__reg_for_groups)
            rc = dray__fail(error, DRAY_EBUSY,
                            "rank %" PRIu32 " of %s: such a request waits already",
                            given->entry->rank, given->entry->model->name);
    if (rc) {
        dray__arena texts = given->texts;
        dray__arena_free(&texts);
        free(p);
        return rc;
    }
    *p = *given;
    p->next = r->pending;
    bool ready = p->kind->ready(r, p);
    if (ready || timeout_ns <= 0) {
        end(r, p, !ready, false);
        return DRAY_OK;
    }
    r->pending = p;
    dray__reg_expire(r, p->ticket, timeout_ns);
    return DRAY_OK;
}

void dray__reg_pending_settle(dray__registry *r)
{
    for (struct pending **at = &r->pending; *at;) {
        struct pending *p = *at;
        if (!p->kind->ready(r, p)) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        end(r, p, false, false);
    }
}

bool dray__reg_pending_expired(dray__registry *r, void *ticket, bool gone)
{
    struct pending **at = &r->pending, *p;
    while ((p = *at) && p->ticket != ticket)
        at = &p->next;
    if (!p)
        return false;
    *at = p->next;
    end(r, p, true, gone);
    return true;
}

void dray__reg_pending_refuse(dray__registry *r, const struct registrant *entry,
                              const struct pending_kind *kind, const dray_error *error)
{
    for (struct pending **at = &r->pending; *at;) {
        struct pending *p = *at;
        if (p->entry != entry || (kind && p->kind != kind)) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        refuse(r, p, error);
        pending_free(p);
    }
}
