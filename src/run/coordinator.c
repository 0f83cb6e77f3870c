#include "run/coordinator.h"

#include "base/error.h"
#include "control/coordinator.h"

#include <event2/event.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

char *dray__default_socket(char *out, size_t capacity)
{
    const char *folder = getenv("XDG_RUNTIME_DIR");
    if (folder && folder[0] == '/')
        snprintf(out, capacity, "%s/dray.socket", folder);
    else
        snprintf(out, capacity, "/tmp/dray-%u.socket", (unsigned)getuid());
    return out;
}

static int add_services(dray__coordinator *coordinator, dray_error *error)
{
    int status = dray__reports_add(coordinator, error);
    return status ? status : dray__registry_add(coordinator, error);
}

static void on_signal(evutil_socket_t number, short what, void *base)
{
    (void)number, (void)what;
    event_base_loopbreak(base);
}

static int loop(struct event_base *base, const dray__serve_options *options,
                dray__coordinator *coordinator, dray_error *error)
{
    struct event *events[] = {evsignal_new(base, SIGINT, on_signal, base),
                              evsignal_new(base, SIGTERM, on_signal, base)};
    int status = DRAY_OK;
    for (int i = 0; i < 2; i++)
        if (!events[i] || event_add(events[i], NULL) < 0)
            status = dray__fail(error, DRAY_ESYS, "coordinator: cannot watch signals");
    if (!status) {
        char unix_address[256];
        snprintf(unix_address, sizeof unix_address, "unix:%s",
                 options->unix_path ? options->unix_path : "");
        if (options->ready)
            options->ready(options->user, options->unix_path ? unix_address : NULL,
                           dray__coordinator_tcp(coordinator));
        if (event_base_dispatch(base) < 0)
            status = dray__fail(error, DRAY_ESYS, "coordinator: the event loop failed");
    }
    for (int i = 0; i < 2; i++)
        if (events[i])
            event_free(events[i]);
    return status;
}

int dray__serve(const dray__serve_options *options, dray_error *error)
{
    struct event_base *base = event_base_new();
    if (!base)
        return dray__fail(error, DRAY_ESYS, "coordinator: no event loop");
    dray__coordinator_options listening = {.unix_path = options->unix_path,
                                           .tcp_address = options->tcp_address};
    dray__coordinator *coordinator = NULL;
    int status = dray__coordinator_new(base, &listening, &coordinator, error);
    if (!status)
        status = add_services(coordinator, error);
    if (!status)
        status = loop(base, options, coordinator, error);
    dray__coordinator_free(coordinator);
    event_base_free(base);
    return status;
}
