/* Requests as services see them, until they are answered or their deadline passes. */
#include "base/clock.h"
#include "base/error.h"
#include "control/internal.h"

#include <event2/event.h>
#include <stdlib.h>
#include <string.h>

void dray__request_unlink(dray__request *request)
{
    dray__connection *connection = request->connection;
    if (!connection)
        return;
    *request->link = request->next;
    if (request->next)
        request->next->link = request->link;
    connection->request_count--;
    connection->request_bytes -= request->size;
    request->connection = NULL;
}

static void request_free(dray__request *request)
{
    dray__request_unlink(request);
    if (request->timer)
        event_free(request->timer);
    dray__close_fds(request->fds, request->fd_count);
    free(request);
}

void dray__request_fail(dray__request *request, const dray_error *error)
{
    if (request->connection && request->id) /* a notification (id 0) gets no answer */
        dray__connection_fail(request->connection, request->type, request->id, error);
    request_free(request);
}

void dray__request_reply(dray__request *request, dray__writer *payload, const int *fds,
                         uint32_t fd_count)
{
    dray_error error;
    dray__connection *connection = request->connection;
    dray__frame frame = {.type = request->type,
                         .flags = DRAY__FRAME_REPLY,
                         .id = request->id,
                         .fd_count = (uint16_t)fd_count,
                         .payload = payload ? payload->data : NULL,
                         .size = payload ? (uint32_t)payload->size : 0};
    int status = DRAY_OK;
    if (payload && payload->failed)
        status = dray__nomem(&error);
    else if (fd_count > DRAY__FRAME_FDS || (payload && payload->size > DRAY__FRAME_MAX))
        status = dray__fail(&error, DRAY_EINTERNAL, "reply to %s: too large",
                            dray__message_name(request->type));
    else if (fd_count && connection && !connection->local)
        status = dray__fail(&error, DRAY_EUNSUPPORTED,
                            "%s: its answer has descriptors, which only a Unix socket carries",
                            dray__message_name(request->type));
    if (status) {
        dray__request_fail(request, &error);
    } else {
        if (connection && request->id)
            dray__connection_send(connection, &frame, fds);
        request_free(request);
    }
    if (payload)
        dray__writer_reset(payload);
}

static void request_due(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    dray__request *request = user;
    int64_t left = request->deadline_ns - dray__now();
    if (left > 0) { /* libevent's timers may fire a little early */
        struct timeval rest = dray__interval(left);
        event_add(request->timer, &rest);
        return;
    }
    request->service->expired(request->self, request, 0);
}

int dray__request_expire_at(dray__request *request, int64_t deadline_ns)
{
    if (!request->service->expired)
        return DRAY_EINVALID;
    if (!request->timer)
        request->timer = evtimer_new(request->coordinator->base, request_due, request);
    if (!request->timer)
        return DRAY_ENOMEM;
    request->deadline_ns = deadline_ns;
    int64_t left = deadline_ns - dray__now(), most = INT64_C(86400) * DRAY__SECOND;
    struct timeval wait = dray__interval(left < most ? left : most);
    return event_add(request->timer, &wait) < 0 ? DRAY_ENOMEM : DRAY_OK;
}

dray__session *dray__request_session(const dray__request *request)
{
    return request->session;
}

uint16_t dray__request_type(const dray__request *request)
{
    return request->type;
}

dray__reader *dray__request_payload(dray__request *request)
{
    return &request->reader;
}

uint32_t dray__request_fd_count(const dray__request *request)
{
    return request->fd_count;
}

int dray__request_take_fd(dray__request *request, uint32_t index)
{
    if (index >= request->fd_count)
        return -1;
    int fd = request->fds[index];
    request->fds[index] = -1;
    return fd;
}

void dray__request_answer(dray__request *request, const dray__fields *of, const void *answer)
{
    dray__writer w = {0};
    dray__put_fields(&w, of, answer);
    dray__request_reply(request, &w, NULL, 0);
    dray__writer_free(&w);
}

int dray__request_handle(dray__request *request, const dray__handler *handlers, void *self,
                         dray_error *error)
{
    dray__arena arena = {0};
    const char *name = dray__message_name(request->type);
    while (handlers->type && handlers->type != request->type)
        handlers++;
    if (!handlers->type)
        return dray__fail(error, DRAY_EUNSUPPORTED, "message %04x (%s): not served here",
                          request->type, name);
    const dray__fields *fields = handlers->fields;
    void *message = fields ? dray__arena_get(&arena, fields->size) : NULL;
    int rc = fields && !message ? dray__nomem(error) : DRAY_OK;
    if (message) {
        memset(message, 0, fields->size);
        dray__get_fields(&request->reader, &arena, fields, message);
        rc = dray__reader_finish(&request->reader, name, error);
    }
    if (!rc)
        rc = handlers->handle(self, request, message, error);
    dray__arena_free(&arena);
    return rc;
}

uint64_t dray__request_channel(const dray__request *request)
{
    return request->connection ? request->connection->id : 0;
}

void dray__request_set_data(dray__request *request, void *data)
{
    request->data = data;
}

void *dray__request_data(const dray__request *request)
{
    return request->data;
}
