/* A coordinator in a thread of the test, for tests of everything that speaks to one:
 *
 *     static coordinator_fixture f;
 *     fixture_start(&f, NULL);             // or with a callback that adds services
 *     dray_context *context = fixture_open(&f, "name", "trainer", 0);
 *     ...
 *     fixture_stop(&f);
 *
 * With fixture_fork the coordinator is a process of its own (for tests that fork, and count
 * descriptors). */
#pragma once

#include "base/clock.h"
#include "control/coordinator.h"
#include "control/token.h"
#include "net/address.h"
#include "seed.h"

#include <dray/dray.h>
#include <event2/event.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Adds services to a coordinator that was just made. Returns 0 or a negative code. */
typedef int (*fixture_services)(dray__coordinator *coordinator, dray_error *error);

typedef struct coordinator_fixture {
    char folder[96], path[128], unix_address[160], tcp_address[64];
    dray__coordinator_options options; /* all but the addresses are set before the start */
    bool tcp;                          /* also listens at 127.0.0.1; fixture_start only */
    fixture_services services;
    struct event_base *base;
    dray__coordinator *coordinator;
    int stop;
    pthread_t thread;
    pid_t process;
} coordinator_fixture;

static inline void fixture_die(const char *what, const dray_error *error)
{
    fprintf(stderr, "fixture: %s: %s\n", what, error ? error->message : "");
    abort();
}

/* Remembers the fixture whose files are removed when a test ends by abort(). With NULL, returns
 * that fixture; NULL in a process that did not give it. */
static inline const coordinator_fixture *fixture_kept(const coordinator_fixture *f)
{
    static const coordinator_fixture *kept;
    static pid_t owner;
    if (f) {
        kept = f;
        owner = getpid();
    }
    return owner == getpid() ? kept : NULL;
}

static inline void fixture_on_abort(int number)
{
    const coordinator_fixture *f = fixture_kept(NULL);
    if (f && f->folder[0]) {
        unlink(f->path);
        rmdir(f->folder);
    }
    signal(number, SIG_DFL);
    raise(number);
}

static inline void fixture_keep(const coordinator_fixture *f)
{
    fixture_kept(f);
    signal(SIGABRT, fixture_on_abort);
}

static inline void fixture_on_stop(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    event_base_loopbreak(user);
}

/* Makes sure that there is a runtime folder, in which a TCP listener's token is written. */
static inline void fixture_have_runtime(const coordinator_fixture *f)
{
    const char *folder = getenv("XDG_RUNTIME_DIR");
    if (!folder || access(folder, W_OK) < 0)
        setenv("XDG_RUNTIME_DIR", f->folder, 1);
}

static inline void fixture_make(coordinator_fixture *f)
{
    dray_error error;
    const char *tmp = getenv("TMPDIR");
    snprintf(f->folder, sizeof f->folder, "%.64s/dray-test-XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(f->folder))
        fixture_die("mkdtemp", NULL);
    fixture_have_runtime(f);
    snprintf(f->path, sizeof f->path, "%s/socket", f->folder);
    snprintf(f->unix_address, sizeof f->unix_address, "unix:%s", f->path);
    f->options.unix_path = f->path;
    f->options.tcp_address = f->tcp ? "127.0.0.1:0" : NULL;
    f->base = event_base_new();
    if (!f->base || dray__coordinator_new(f->base, &f->options, &f->coordinator, &error) ||
        dray__reports_add(f->coordinator, &error) ||
        (f->services && f->services(f->coordinator, &error)))
        fixture_die("coordinator", &error);
    if (f->tcp)
        snprintf(f->tcp_address, sizeof f->tcp_address, "%s",
                 dray__coordinator_tcp(f->coordinator));
}

static inline void *fixture_run(void *user)
{
    coordinator_fixture *f = user;
    struct event *stop = event_new(f->base, f->stop, EV_READ, fixture_on_stop, f->base);
    event_add(stop, NULL);
    event_base_dispatch(f->base);
    event_free(stop);
    dray__coordinator_free(f->coordinator);
    event_base_free(f->base);
    return NULL;
}

static inline void fixture_start(coordinator_fixture *f, fixture_services services)
{
    f->services = services;
    f->process = 0;
    fixture_make(f);
    fixture_keep(f);
    f->stop = eventfd(0, EFD_CLOEXEC);
    if (f->stop < 0 || pthread_create(&f->thread, NULL, fixture_run, f) != 0)
        fixture_die("thread", NULL);
}

/* Returns the master token, which gives access over TCP. */
static inline dray__token fixture_master(const coordinator_fixture *f)
{
    dray__address address;
    dray__token master;
    dray_error error;
    if (dray__address_parse(f->tcp_address, &address, &error) ||
        dray__token_find(&address, &master, &error))
        fixture_die("token", &error);
    return master;
}

static inline void fixture_on_term(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    event_base_loopbreak(user);
}

static inline void fixture_fork(coordinator_fixture *f, fixture_services services)
{
    f->services = services;
    int ready[2];
    char byte = 0;
    if (pipe(ready) < 0 || (f->process = fork()) < 0)
        fixture_die("fork", NULL);
    if (f->process == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        fixture_make(f);
        struct event *term = evsignal_new(f->base, SIGTERM, fixture_on_term, f->base);
        event_add(term, NULL);
        if (write(ready[1], f, sizeof *f) != (ssize_t)sizeof *f)
            _exit(1);
        event_base_dispatch(f->base);
        event_free(term);
        dray__coordinator_free(f->coordinator);
        event_base_free(f->base);
        exit(0); /* not _exit, because a leak checker runs at exit */
    }
    pid_t process = f->process;
    if (read(ready[0], f, sizeof *f) != (ssize_t)sizeof *f)
        fixture_die("child", NULL);
    (void)byte;
    f->process = process;
    fixture_have_runtime(f);
    fixture_keep(f);
    close(ready[0]);
    close(ready[1]);
}

/* Ends the coordinator. A file that it leaves in its folder, such as its socket, fails the test. */
static inline void fixture_stop(coordinator_fixture *f)
{
    if (f->process) {
        int status;
        kill(f->process, SIGTERM);
        if (waitpid(f->process, &status, 0) != f->process || !WIFEXITED(status) ||
            WEXITSTATUS(status) != 0)
            fixture_die("the coordinator's process ended badly", NULL);
    } else {
        uint64_t one = 1;
        if (write(f->stop, &one, sizeof one) != (ssize_t)sizeof one)
            fixture_die("stop", NULL);
        pthread_join(f->thread, NULL);
        close(f->stop);
    }
    if (rmdir(f->folder) < 0)
        fixture_die("files left in the folder", NULL);
    *f = (coordinator_fixture){0};
}

/* The host of the contexts that are opened next; NULL means this machine. */
static const char *fixture_host;

static inline dray_context *fixture_open_at(const char *address, const char *name, const char *role,
                                            uint32_t rank)
{
    dray_error error;
    dray_context *context;
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = address;
    options.name = name;
    options.role = role;
    options.rank = rank;
    options.host = fixture_host;
    if (dray_open(&options, &context, &error))
        fixture_die("dray_open", &error);
    return context;
}

static inline dray_context *fixture_open(const coordinator_fixture *f, const char *name,
                                         const char *role, uint32_t rank)
{
    return fixture_open_at(f->unix_address, name, role, rank);
}
