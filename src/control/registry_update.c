/* The registry's requests of subscribers: decoding what registry_group.c and registry_peer.c carry
 * out. */
#include "base/clock.h"
#include "base/error.h"
#include "control/protocol.h"
#include "control/registry_state.h"

#include <dray/weights.h>
#include <inttypes.h>
#include <stdlib.h>

#define REPORT_MAX (64u << 10)
#define PATH_BYTES_MAX 4096u

static int update_begin(dray__reg_call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in);
    struct begin begin = {.ticket = c->ticket};
    begin.mode = dray__get_u8(c->in);
    begin.min_version = dray__get_u64(c->in);
    begin.path = dray__get_string(c->in, PATH_BYTES_MAX);
    begin.path_version = dray__get_u64(c->in);
    begin.verify = dray__get_u8(c->in) != 0;
    begin.deadline_ns = dray__deadline(dray__get_i64(c->in));
    begin.purpose = dray__get_u8(c->in);
    begin.publishers_only = dray__get_u8(c->in) != 0;
    begin.ready_source = dray__get_u64(c->in);
    begin.ready_group = dray__get_u64(c->in);
    struct entry *entry = NULL;
    int rc = dray__reader_finish(c->in, "UPDATE_BEGIN", error);
    if (rc == DRAY_OK && begin.purpose > DRAY__COMMIT)
        rc = dray__fail(error, DRAY_EINVALID, "an update for purpose %d", begin.purpose);
    if (rc == DRAY_OK && begin.mode > DRAY_MODE_DISK)
        rc = dray__fail(error, DRAY_EINVALID, "update mode %d", begin.mode);
    if (rc == DRAY_OK && begin.mode == DRAY_MODE_DISK && !begin.path[0])
        rc = dray__fail(error, DRAY_EINVALID, "mode disk needs a path");
    if (rc == DRAY_OK)
        rc = dray__reg_entry(c, key, DRAY__SUBSCRIBER, &entry, error);
    if (rc == DRAY_OK)
        rc = dray__reg_begin(c->r, entry, &begin, error);
    if (rc == DRAY_OK) {
        c->r->ops.expire_at(c->r->ops.user, c->ticket, begin.deadline_ns);
        dray__reg_groups_settle(c->r);
    }
    free(begin.path);
    return rc;
}

static int update_writing(dray__reg_call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in), attempt = dray__get_u64(c->in);
    int64_t lease = dray__get_i64(c->in);
    struct entry *entry = NULL;
    int rc = dray__reader_finish(c->in, "UPDATE_WRITING", error);
    if (rc == DRAY_OK)
        rc = dray__reg_entry(c, key, DRAY__SUBSCRIBER, &entry, error);
    return rc ? rc : dray__reg_writing(c->r, entry, attempt, lease, c->ticket, error);
}

static int get_vote(dray__reg_call *c, struct entry *entry, struct vote *out, dray_error *error)
{
    bool stored = dray__sums_get(c->in, &out->read, &entry->forms) &&
                  dray__sums_get(c->in, &out->expected, &entry->forms);
    out->held = dray__get_u8(c->in);
    stored = stored && dray__sums_get(c->in, &out->lies, &entry->forms);
    int rc = stored ? dray__reader_finish(c->in, "UPDATE_VOTE", error) : dray__nomem(error);
    if (rc == DRAY_OK && out->held > DRAY__HELD_OWN)
        rc = dray__fail(error, DRAY_EINVALID, "a vote that holds %d", out->held);
    return rc;
}

static int update_vote(dray__reg_call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in), attempt = dray__get_u64(c->in);
    int32_t code = (int32_t)dray__get_u32(c->in);
    char *message = dray__get_prose(c->in, DRAY_ERROR_MESSAGE_MAX);
    int64_t timeout = dray__get_i64(c->in);
    struct vote vote = {0};
    struct entry *entry = NULL;
    int rc = dray__reg_entry(c, key, DRAY__SUBSCRIBER, &entry, error);
    if (rc == DRAY_OK)
        rc = get_vote(c, entry, &vote, error);
    if (rc == DRAY_OK) {
        dray_error verdict = {0};
        if (code)
            dray__fail(&verdict, code, "%s", message);
        rc = dray__reg_vote(c->r, entry, attempt, &verdict, &vote, c->ticket, error);
        if (rc == DRAY_OK && entry->vote_ticket == c->ticket)
            c->r->ops.expire_at(c->r->ops.user, c->ticket, dray__deadline(timeout));
    }
    free(message);
    dray__vote_free(&vote);
    return rc;
}

static int prefetch_drop(dray__reg_call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in);
    struct entry *entry = NULL;
    int rc = dray__reader_finish(c->in, "PREFETCH_DROP", error);
    if (rc == DRAY_OK)
        rc = dray__reg_entry(c, key, DRAY__SUBSCRIBER, &entry, error);
    if (rc)
        return rc;
    dray__reg_prefetch_drop(entry);
    return dray__reg_done(c);
}

static int subscriber_leave(dray__reg_call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in);
    int64_t timeout = dray__get_i64(c->in);
    struct entry *entry = NULL;
    int rc = dray__reader_finish(c->in, "SUBSCRIBER_LEAVE", error);
    if (rc == DRAY_OK)
        rc = dray__reg_entry(c, key, DRAY__SUBSCRIBER, &entry, error);
    if (rc == DRAY_OK && entry->leave_ticket)
        rc = dray__fail(error, DRAY_EBUSY, "rank %" PRIu32 " leaves already", entry->rank);
    if (rc)
        return rc;
    dray__reg_leave(c->r, entry, timeout, c->ticket);
    return DRAY_OK;
}

static int engines_watch(dray__reg_call *c, dray_error *error)
{
    uint64_t seen = dray__get_u64(c->in);
    int64_t timeout = dray__get_i64(c->in);
    int rc = dray__reader_finish(c->in, "ENGINES_WATCH", error);
    return rc ? rc : dray__reg_watch(c->r, seen, timeout, c->ticket, error);
}

static int group_state(dray__reg_call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in);
    struct entry *entry = NULL;
    int rc = dray__reader_finish(c->in, "GROUP_STATE", error);
    if (rc == DRAY_OK)
        rc = dray__reg_entry(c, key, DRAY__SUBSCRIBER, &entry, error);
    if (rc == DRAY_OK && dray__reg_group_returning(entry->group))
        rc = dray__fail(error, DRAY_EAGAIN,
                        "group %s: %" PRIu32 " of %" PRIu32
                        " ranks have come back since the coordinator was started anew",
                        entry->group->name, entry->group->set.present, entry->group->set.world);
    if (rc)
        return rc;
    dray__writer w = {0};
    dray__put_u64(&w, entry->group->now.version);
    dray__put_u64(&w, entry->group->now.incarnation);
    dray__put_u8(&w, (uint8_t)entry->group->state);
    dray__put_u64(&w, entry->group->epoch);
    dray__reg_reply(c->r, c->ticket, &w, -1);
    return DRAY_OK;
}

static int update_report(dray__reg_call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in);
    char *json = dray__get_prose(c->in, REPORT_MAX);
    struct entry *entry = NULL;
    int rc = dray__reader_finish(c->in, "UPDATE_REPORT", error);
    if (rc == DRAY_OK)
        rc = dray__reg_entry(c, key, DRAY__SUBSCRIBER, &entry, error);
    if (rc) {
        free(json);
        return rc;
    }
    free(entry->group->report);
    entry->group->report = json;
    return dray__reg_done(c);
}

int dray__reg_update_request(dray__reg_call *c, uint16_t type, bool *known, dray_error *error)
{
    static const struct {
        uint16_t type;
        int (*handle)(dray__reg_call *c, dray_error *error);
    } handlers[] = {
        {DRAY__MSG_UPDATE_BEGIN, update_begin},         {DRAY__MSG_UPDATE_WRITING, update_writing},
        {DRAY__MSG_UPDATE_VOTE, update_vote},           {DRAY__MSG_UPDATE_REPORT, update_report},
        {DRAY__MSG_GROUP_STATE, group_state},           {DRAY__MSG_PREFETCH_DROP, prefetch_drop},
        {DRAY__MSG_SUBSCRIBER_LEAVE, subscriber_leave}, {DRAY__MSG_ENGINES_WATCH, engines_watch},
    };
    for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++)
        if (handlers[i].type == type) {
            *known = true;
            return handlers[i].handle(c, error);
        }
    return DRAY_EPROTO;
}
