/* A coordinator that is started again whenever it is killed, as under a supervisor. It is a process
 * of its own, and so is its parent, which watches it. Any process of the test may kill it. */
#pragma once

#include "control/fixture.h"

#include <sys/mman.h>

/* It lies in memory that all processes of the test share. */
typedef struct restartable {
    char folder[96], path[128], unix_address[160], state[160], token[160];
    char tcp_address[64]; /* "" means none */
    fixture_services services;
    bool tcp;
    pid_t supervisor;
    volatile pid_t coordinator;
    volatile int starts, held, over; /* held: it is not started again */
} restartable;

static inline void restartable_serve(restartable *r)
{
    dray_error error;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct event_base *base = event_base_new();
    dray__coordinator *coordinator;
    dray__coordinator_options options = {.unix_path = r->path, .state_path = r->state};
    if (r->tcp) {
        options.tcp_address = r->tcp_address[0] ? r->tcp_address + strlen("tcp:") : "127.0.0.1:0";
        options.token_path = r->token;
    }
    if (dray__coordinator_new(base, &options, &coordinator, &error) ||
        dray__reports_add(coordinator, &error) || (r->services && r->services(coordinator, &error)))
        fixture_die("coordinator", &error);
    if (r->tcp)
        snprintf(r->tcp_address, sizeof r->tcp_address, "%s", dray__coordinator_tcp(coordinator));
    struct event *term = evsignal_new(base, SIGTERM, fixture_on_term, base);
    event_add(term, NULL);
    r->coordinator = getpid();
    __atomic_add_fetch(&r->starts, 1, __ATOMIC_SEQ_CST);
    event_base_dispatch(base);
    event_free(term);
    dray__coordinator_free(coordinator);
    event_base_free(base);
    exit(0);
}

static inline void restartable_supervise(restartable *r)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (!r->over) {
        if (r->held) {
            usleep(1000);
            continue;
        }
        siginfo_t end;
        pid_t pid = fork();
        if (pid == 0)
            restartable_serve(r);
        /* It stays a zombie until `held` is set, so that a process that waits for it sees both. */
        waitid(P_PID, (id_t)pid, &end, WEXITED | WNOWAIT);
        if (end.si_code == CLD_EXITED)
            r->held = 1; /* it ended without being killed */
        else if (end.si_status != SIGKILL)
            fixture_die("the coordinator crashed", NULL);
        waitpid(pid, NULL, 0);
    }
    _exit(0);
}

static inline void restartable_await(const restartable *r, int starts)
{
    int64_t deadline = dray__deadline(60 * DRAY__SECOND);
    while (__atomic_load_n(&r->starts, __ATOMIC_SEQ_CST) < starts) {
        if (dray__now() > deadline)
            fixture_die("the coordinator did not start", NULL);
        usleep(1000);
    }
}

static inline restartable *restartable_start(fixture_services services, bool tcp)
{
    restartable *r =
        mmap(NULL, sizeof *r, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    const char *tmp = getenv("TMPDIR");
    if (r == MAP_FAILED)
        fixture_die("mmap", NULL);
    snprintf(r->folder, sizeof r->folder, "%.64s/dray-test-XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(r->folder))
        fixture_die("mkdtemp", NULL);
    snprintf(r->path, sizeof r->path, "%s/socket", r->folder);
    snprintf(r->state, sizeof r->state, "%s/socket.state", r->folder);
    snprintf(r->token, sizeof r->token, "%s/token", r->folder);
    snprintf(r->unix_address, sizeof r->unix_address, "unix:%s", r->path);
    r->services = services;
    r->tcp = tcp;
    fflush(NULL);
    pid_t supervisor = fork();
    if (supervisor == 0)
        restartable_supervise(r);
    r->supervisor = supervisor;
    restartable_await(r, 1);
    return r;
}

/* Kills the coordinator. Any process may call this. */
static inline void restartable_kill(restartable *r)
{
    kill(r->coordinator, SIGKILL);
}

static inline void restartable_restart(restartable *r)
{
    int starts = r->starts;
    restartable_kill(r);
    restartable_await(r, starts + 1);
}

/* Kills the coordinator, and keeps it from being started again. */
static inline void restartable_hold(restartable *r)
{
    r->held = 1;
    restartable_kill(r);
    while (kill(r->coordinator, 0) == 0)
        usleep(1000);
}

static inline void restartable_again(restartable *r)
{
    int starts = r->starts;
    r->held = 0;
    restartable_await(r, starts + 1);
}

/* Ends the coordinator by SIGTERM, and keeps it from being started again. */
static inline void restartable_end(restartable *r)
{
    r->held = 1;
    kill(r->coordinator, SIGTERM);
    while (kill(r->coordinator, 0) == 0)
        usleep(1000);
}

static inline void restartable_stop(restartable *r)
{
    int status;
    r->over = 1;
    kill(r->coordinator, SIGTERM);
    if (waitpid(r->supervisor, &status, 0) != r->supervisor || status != 0)
        fixture_die("the supervisor ended badly", NULL);
    unlink(r->token);
    if (rmdir(r->folder) < 0)
        fixture_die("files left in the folder", NULL);
    munmap(r, sizeof *r);
}
