/* The registry as a service of the coordinator. */
#include "weights/registry/registry.h"

#include "base/error.h"
#include "control/coordinator.h"

#include <string.h>

static void answer(void *user, void *ticket, const dray_error *error, dray__writer *payload, int fd)
{
    (void)user;
    if (error)
        dray__request_fail(ticket, error);
    else
        dray__request_reply(ticket, payload, &fd, fd >= 0 ? 1 : 0);
}

static void expire_at(void *user, void *ticket, int64_t deadline_ns)
{
    (void)user;
    dray__request_expire_at(ticket, deadline_ns);
}

static void report(void *user, void *ticket, const char *json)
{
    (void)user;
    dray__session_report(dray__request_session(ticket), "update", json, strlen(json), NULL);
}

static void handle(void *self, dray__request *request)
{
    dray__session *session = dray__request_session(request);
    if (!session) {
        dray_error error;
        dray__fail(&error, DRAY_EPROTO, "weights need a session: say HELLO first");
        dray__request_fail(request, &error);
        return;
    }
    dray__party party = {dray__session_member(session), dray__session_host(session),
                         dray__session_pid(session), dray__session_name(session)};
    int fd = dray__request_fd_count(request) ? dray__request_take_fd(request, 0) : -1;
    dray__registry_handle(self, &party, dray__request_type(request), dray__request_payload(request),
                          fd, request);
}

static void expired(void *self, dray__request *request, int channel_gone)
{
    dray__registry_expired(self, request, channel_gone);
}

static void session_ended(void *self, dray__session *session)
{
    dray__registry_member_ended(self, dray__session_member(session));
}

static void status(void *self, json_t *object)
{
    dray__registry_status(self, object);
}

static void end(void *self)
{
    dray__registry_free(self);
}

int dray__registry_add(dray__coordinator *coordinator, dray_error *error)
{
    static const dray__service service = {.name = "weights",
                                          .first = DRAY__MSG_PUBLISHER_OPEN,
                                          .last = 0x02FF,
                                          .handle = handle,
                                          .expired = expired,
                                          .session_ended = session_ended,
                                          .status = status,
                                          .free = end};
    dray__registry_ops ops = {answer, expire_at, NULL, report};
    dray__registry *registry;
    int rc = dray__registry_new(&ops, &registry, error);
    if (rc)
        return rc;
    if (dray__coordinator_generation(coordinator))
        dray__registry_begin(registry, dray__coordinator_generation(coordinator));
    rc = dray__coordinator_add(coordinator, &service, registry, error);
    if (rc)
        dray__registry_free(registry);
    return rc;
}
