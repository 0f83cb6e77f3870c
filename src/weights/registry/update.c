/* The requests of subscribers, which group.c and peer.c carry out. */
#include "base/clock.h"
#include "base/error.h"
#include "control/protocol.h"
#include "weights/registry/state.h"

#include <dray/weights.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static int update_begin(dray__reg_call *c, const void *message, dray_error *error)
{
    const dray__update_wish *m = message;
    if (m->purpose > DRAY__COMMIT)
        return dray__fail(error, DRAY_EINVALID, "an update for purpose %d", m->purpose);
    if (m->mode > DRAY_MODE_DISK)
        return dray__fail(error, DRAY_EINVALID, "update mode %d", m->mode);
    if (m->mode == DRAY_MODE_DISK && !m->path[0])
        return dray__fail(error, DRAY_EINVALID, "mode disk needs a path");
    struct begin begin = {.ticket = c->ticket,
                          .wish = *m,
                          .texts = c->texts,
                          .deadline_ns = dray__deadline(m->timeout_ns)};
    int64_t timeout_ns = m->timeout_ns;
    c->texts = (dray__arena){0};
    int rc = dray__reg_begin(c->r, c->entry, &begin, error);
    if (rc)
        return rc;
    dray__reg_expire(c->r, c->ticket, timeout_ns);
    dray__reg_groups_settle(c->r);
    return DRAY_OK;
}

static int update_writing(dray__reg_call *c, const void *message, dray_error *error)
{
    const dray__writing *m = message;
    struct pending p = {.kind = &dray__reg_to_write, .ticket = c->ticket, .entry = c->entry};
    int rc = dray__reg_may_write(c->entry, m->attempt, error);
    return rc ? rc : dray__reg_pend(c->r, &p, m->lease_ns, error);
}

static int get_vote(dray__reg_call *c, struct vote *out, dray_error *error)
{
    dray__sums_forms *forms = &c->entry->forms;
    bool stored =
        dray__sums_get(c->in, &out->read, forms) && dray__sums_get(c->in, &out->expected, forms);
    out->held = dray__get_u8(c->in);
    stored = stored && dray__sums_get(c->in, &out->resident, forms);
    int rc = stored ? dray__reg_finish(c, error) : dray__nomem(error);
    bool commits = c->entry->group->purpose == DRAY__COMMIT;
    if (rc == DRAY_OK && out->held > (commits ? DRAY__HELD_MOVED : DRAY__HELD_OWN))
        rc = dray__fail(error, DRAY_EINVALID, "a vote that holds %d", out->held);
    return rc;
}

static int update_vote(dray__reg_call *c, const void *message, dray_error *error)
{
    const dray__voting *m = message;
    struct vote vote = {0};
    dray_error verdict = {0};
    int rc = get_vote(c, &vote, error);
    if (rc == DRAY_OK && m->code)
        dray__fail(&verdict, m->code, "%s", m->message);
    if (rc == DRAY_OK)
        rc = dray__reg_vote(c->r, c->entry, m->attempt, &verdict, &vote, c->ticket, error);
    if (rc == DRAY_OK && c->entry->vote_ticket == c->ticket)
        dray__reg_expire(c->r, c->ticket, m->timeout_ns);
    dray__vote_free(&vote);
    return rc;
}

static int prefetch_drop(dray__reg_call *c, const void *message, dray_error *error)
{
    (void)message, (void)error;
    dray__reg_prefetch_drop(c->entry);
    return dray__reg_done(c);
}

static int subscriber_leave(dray__reg_call *c, const void *message, dray_error *error)
{
    const dray__timed *m = message;
    struct pending p = {.kind = &dray__reg_to_leave, .ticket = c->ticket, .entry = c->entry};
    c->entry->group->leaving = true;
    return dray__reg_pend(c->r, &p, m->timeout_ns, error);
}

static int engines_watch(dray__reg_call *c, const void *message, dray_error *error)
{
    const dray__watching *m = message;
    return dray__reg_watch(c->r, m->sequence, m->timeout_ns, c->ticket, error);
}

static int group_state(dray__reg_call *c, const void *message, dray_error *error)
{
    (void)message;
    const struct group *group = c->entry->group;
    if (dray__reg_group_returning(group))
        return dray__fail(error, DRAY_EAGAIN,
                          "group %s: %" PRIu32 " of %" PRIu32
                          " ranks have come back since the coordinator was started anew",
                          group->name, group->set.present, group->set.world);
    const dray__group_told answer = {group->now.version, group->now.incarnation, group->epoch,
                                     (uint8_t)group->state};
    dray__reg_answer(c->r, c->ticket, &dray__group_told_fields, &answer);
    return DRAY_OK;
}

static int update_report(dray__reg_call *c, const void *message, dray_error *error)
{
    const dray__update_told *m = message;
    struct group *group = c->entry->group;
    char *json = strdup(m->json);
    if (!json)
        return dray__nomem(error);
    free(group->report);
    group->report = json;
    if (c->r->ops.report)
        c->r->ops.report(c->r->ops.user, c->ticket, json);
    return dray__reg_done(c);
}

const dray__reg_message dray__reg_update_messages[] = {
    {DRAY__MSG_UPDATE_BEGIN, DRAY__SUBSCRIBER, false, &dray__update_wish_fields, update_begin},
    {DRAY__MSG_UPDATE_WRITING, DRAY__SUBSCRIBER, false, &dray__writing_fields, update_writing},
    {DRAY__MSG_UPDATE_VOTE, DRAY__SUBSCRIBER, true, &dray__voting_fields, update_vote},
    {DRAY__MSG_UPDATE_REPORT, DRAY__SUBSCRIBER, false, &dray__update_told_fields, update_report},
    {DRAY__MSG_GROUP_STATE, DRAY__SUBSCRIBER, false, &dray__u64_fields, group_state},
    {DRAY__MSG_PREFETCH_DROP, DRAY__SUBSCRIBER, false, &dray__u64_fields, prefetch_drop},
    {DRAY__MSG_SUBSCRIBER_LEAVE, DRAY__SUBSCRIBER, false, &dray__timed_fields, subscriber_leave},
    {DRAY__MSG_ENGINES_WATCH, DRAY__NOBODY, false, &dray__watching_fields, engines_watch},
    {0},
};
