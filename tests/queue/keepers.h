/* Keepers of other hosts, each in a process of its own. Hosts are names (dray_options.host), so
 * that a keeper's bytes can be reached through its data server alone. Include this after a header
 * that has the fixture `f`. */
#pragma once

#include "queue/storage/join.h"

typedef struct keeper_of {
    const char *host;
    char path[112];
    pid_t pid;
} keeper_of;

static inline void serve_keeper(const keeper_of *k, int ready)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct event_base *base = event_base_new();
    struct event *term = evsignal_new(base, SIGTERM, fixture_term, base);
    event_add(term, NULL);
    dray__keeper *keeper;
    dray__join *join;
    dray__join_options o = {
        .address = f.address, .path = k->path, .host = k->host, .listen = "127.0.0.1"};
    if (dray__keeper_new(base, k->path, 0, &keeper, &error) ||
        dray__join_start(keeper, &o, &join, &error))
        die("keeper", &error);
    if (write(ready, "x", 1) != 1)
        _exit(1);
    event_base_dispatch(base);
    event_free(term);
    dray__join_free(join);
    dray__keeper_free(keeper);
    event_base_free(base);
    exit(0);
}

static inline void keeper_up(keeper_of *k)
{
    int ready[2];
    char byte;
    snprintf(k->path, sizeof k->path, "%s/keeper-%s", f.folder, k->host);
    if (pipe(ready) < 0)
        die("pipe", NULL);
    fflush(NULL);
    k->pid = fork();
    if (k->pid == 0) {
        close(ready[0]);
        serve_keeper(k, ready[1]);
    }
    close(ready[1]);
    if (read(ready[0], &byte, 1) != 1)
        die("a keeper did not start", NULL);
    close(ready[0]);
}

static inline void keeper_down(keeper_of *k, int signal)
{
    int status = fixture_end(k->pid, signal);
    if (signal != SIGKILL && status)
        die("a keeper ended badly", NULL);
    unlink(k->path);
    k->pid = 0;
}

static inline dray_context *context_of(const char *host, const char *name)
{
    dray_context *context;
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = f.address;
    options.name = name;
    options.host = host;
    options.timeout_ns = 20 * DRAY__SECOND;
    OK(dray_open(&options, &context, &error));
    return context;
}

static inline int chunks_of(const keeper_of *k)
{
    return count_fds(k->pid, "/memfd:dray-samples");
}
