/* A coordinator with the queue's controller, and a keeper, each a process of its own, so that tests
 * can fork, kill and count descriptors. */
#pragma once

#include "base/clock.h"
#include "control/coordinator.h"
#include "queue/journal/journal.h"
#include "queue/server/controller.h"
#include "queue/storage/keeper.h"
#include "seed.h"
#include "suite.h"

#include <dirent.h>
#include <dray/queue.h>
#include <event2/event.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct queue_fixture {
    char folder[64], socket[96], keeper[96], address[112];
    pid_t coordinator_pid, keeper_pid;
    bool without_keeper;
    bool keeps_sessions;   /* a new coordinator takes back the members of the old one */
    const char *limits;    /* of the coordinator; NULL means its defaults */
    bool durable;          /* durable queues have a folder, which is made and removed here */
    char journals[96];     /* that folder; "" means none; without `durable`, the test's own */
    const char *stores[5]; /* "redis:ADDRESS", in addition to $DRAY_QUEUE_BACKEND; ends with NULL */
    void (*prepare)(bool keeper); /* called first in each server; may be NULL */
} queue_fixture;

/* The error of this thread's last call, which OK and FAILS print. */
__attribute__((unused)) static _Thread_local dray_error error;

static inline void die(const char *what, const dray_error *said)
{
    fprintf(stderr, "%s: %s\n", what, said ? said->message : "");
    abort();
}

static inline void fixture_term(evutil_socket_t fd, short what, void *base)
{
    (void)fd, (void)what;
    event_base_loopbreak(base);
}

static inline void fixture_serve(const queue_fixture *f, bool keeper, int ready)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (f->prepare)
        f->prepare(keeper);
    struct event_base *base = event_base_new();
    struct event *term = evsignal_new(base, SIGTERM, fixture_term, base);
    event_add(term, NULL);
    dray__keeper *k = NULL;
    dray__coordinator *c = NULL;
    const char *path = f->without_keeper ? NULL : f->keeper;
    char sessions[112];
    snprintf(sessions, sizeof sessions, "%s.state", f->socket);
    dray__coordinator_options options = {.unix_path = f->socket,
                                         .keeper_path = path,
                                         .limits = f->limits,
                                         .state_path = f->keeps_sessions ? sessions : NULL};
    if (keeper
            ? dray__keeper_new(base, f->keeper, 0, &k, &error)
            : dray__coordinator_new(base, &options, &c, &error) || dray__reports_add(c, &error) ||
                  dray__queue_add(c, base, path, f->journals[0] ? f->journals : NULL, f->stores,
                                  &error))
        die("server", &error);
    if (write(ready, "x", 1) != 1)
        _exit(1);
    event_base_dispatch(base);
    event_free(term);
    dray__keeper_free(k);
    if (c)
        dray__coordinator_free(c);
    event_base_free(base);
    exit(0); /* not _exit, because a leak checker runs at exit */
}

static inline pid_t fixture_spawn(const queue_fixture *f, bool keeper)
{
    int ready[2];
    char byte;
    if (pipe(ready) < 0)
        die("pipe", NULL);
    pid_t pid = fork();
    if (pid == 0) {
        close(ready[0]);
        fixture_serve(f, keeper, ready[1]);
    }
    close(ready[1]);
    if (read(ready[0], &byte, 1) != 1)
        die("a server did not start", NULL);
    close(ready[0]);
    return pid;
}

static inline void fixture_up(queue_fixture *f)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(f->folder, sizeof f->folder, "%.40s/dray-test-XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(f->folder))
        die("mkdtemp", NULL);
    if (f->durable) {
        snprintf(f->journals, sizeof f->journals, "%.60s/dray-journal-XXXXXX", tmp ? tmp : "/tmp");
        if (!mkdtemp(f->journals))
            die("mkdtemp", NULL);
    }
    snprintf(f->socket, sizeof f->socket, "%s/socket", f->folder);
    snprintf(f->keeper, sizeof f->keeper, "%s/keeper", f->folder);
    snprintf(f->address, sizeof f->address, "unix:%s", f->socket);
    f->keeper_pid = f->without_keeper ? 0 : fixture_spawn(f, true);
    f->coordinator_pid = fixture_spawn(f, false);
}

static inline int fixture_end(pid_t pid, int signal)
{
    int status = 0;
    kill(pid, signal);
    waitpid(pid, &status, 0);
    return status;
}

static inline void fixture_empty(const char *folder)
{
    DIR *dir = opendir(folder);
    for (struct dirent *entry; dir && (entry = readdir(dir));)
        unlinkat(dirfd(dir), entry->d_name, 0);
    if (dir)
        closedir(dir);
}

static inline void fixture_down(queue_fixture *f)
{
    int coordinator = fixture_end(f->coordinator_pid, SIGTERM);
    int keeper = f->keeper_pid ? fixture_end(f->keeper_pid, SIGTERM) : 0;
    unlink(f->keeper); /* a killed keeper leaves it */
    if (coordinator || keeper || rmdir(f->folder) < 0) {
        fprintf(stderr, "%s: coordinator's status %x, keeper's %x\n", f->folder,
                (unsigned)coordinator, (unsigned)keeper);
        die("the servers ended badly", NULL);
    }
    if (!f->durable)
        return;
    fixture_empty(f->journals);
    if (rmdir(f->journals) < 0)
        die("rmdir", NULL);
}

/* Finds the one journal in its folder. */
static inline void fixture_journal(const queue_fixture *f, char *out, size_t size)
{
    DIR *dir = opendir(f->journals);
    out[0] = 0;
    for (struct dirent *entry; dir && (entry = readdir(dir));)
        if (strncmp(entry->d_name, "queue-", 6) == 0 && !strstr(entry->d_name, ".new"))
            snprintf(out, size, "%s/%.60s", f->journals, entry->d_name);
    if (dir)
        closedir(dir);
    assert_true(out[0]);
}

/* Kills the coordinator, and starts another one. */
static inline void fixture_restart(queue_fixture *f)
{
    fixture_end(f->coordinator_pid, SIGKILL);
    f->coordinator_pid = fixture_spawn(f, false);
}

static inline int fixture_skip_record(void *user, const dray__journal_record *record,
                                      dray_error *said)
{
    (void)user, (void)record, (void)said;
    return DRAY_OK;
}

/* Limits the size of the coordinator's files. */
static inline void fixture_limit_files(const queue_fixture *f, rlim_t bytes)
{
    const struct rlimit limit = {bytes, RLIM_INFINITY};
    if (prlimit(f->coordinator_pid, RLIMIT_FSIZE, &limit, NULL))
        die("prlimit", NULL);
}

/* Leaves room for 8 more bytes in the journal. */
static inline void fixture_fill_disk(const queue_fixture *f)
{
    char path[200];
    uint64_t end, last;
    fixture_journal(f, path, sizeof path);
    if (dray__journal_read(path, fixture_skip_record, NULL, &end, &last, &error))
        die("dray__journal_read", &error);
    fixture_limit_files(f, (rlim_t)end + 8);
}

/* Kills the keeper with the chunks that it holds, and starts another one. */
static inline void fixture_restart_keeper(queue_fixture *f)
{
    fixture_end(f->keeper_pid, SIGKILL);
    unlink(f->keeper);
    f->keeper_pid = fixture_spawn(f, true);
}

static inline dray_context *fixture_context(const queue_fixture *f, const char *name)
{
    dray_context *context;
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = f->address;
    options.name = name;
    options.timeout_ns = 20 * DRAY__SECOND;
    if (dray_open(&options, &context, &error))
        die("dray_open", &error);
    return context;
}

static inline void ok_at(int rc, const dray_error *said, const char *file, int line)
{
    if (!rc)
        return;
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, dray_error_name(rc), said->message);
    abort(); /* also in children, which cmocka does not know */
}

/* Both print the error that was returned. */
#define OK(call) ok_at((call), &error, __FILE__, __LINE__)
#define FAILS(code, call)                                                                          \
    do {                                                                                           \
        int rc_ = (call);                                                                          \
        if (rc_ != (code)) {                                                                       \
            fprintf(stderr, "%s:%d: %s instead of %s: %s\n", __FILE__, __LINE__,                   \
                    dray_error_name(rc_), dray_error_name(code), rc_ ? error.message : "");        \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* Commits a batch and frees it. */
#define COMMIT(batch)                                                                              \
    do {                                                                                           \
        OK(dray_batch_commit((batch), &error));                                                    \
        dray_batch_free(batch);                                                                    \
    } while (0)

static inline void leave(dray_queue *queue, dray_context *context)
{
    dray_queue_close(queue);
    dray_close(context);
}

/* Returns the number of open descriptors of a process whose target begins with `prefix` ("" means
 * all). */
static inline int count_fds(pid_t pid, const char *prefix)
{
    char folder[64], target[256];
    snprintf(folder, sizeof folder, "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(folder);
    int count = 0;
    if (!dir)
        die(folder, NULL);
    for (struct dirent *entry; (entry = readdir(dir));) {
        ssize_t n = readlinkat(dirfd(dir), entry->d_name, target, sizeof target - 1);
        target[n > 0 ? n : 0] = 0;
        count += n > 0 && strncmp(target, prefix, strlen(prefix)) == 0;
    }
    closedir(dir);
    return count;
}

/* Returns the number of chunks that the keeper holds. */
static inline int kept_chunks(const queue_fixture *f)
{
    return count_fds(f->keeper_pid, "/memfd:dray-samples");
}

/* Returns the number of chunks that this process has mapped. */
static inline int mapped_chunks(void)
{
    char line[512];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && fgets(line, sizeof line, maps))
        count += strstr(line, "memfd:dray-samples") != NULL;
    if (!maps || fclose(maps) != 0)
        die("/proc/self/maps", NULL);
    return count;
}

/* Fails unless the keeper holds the expected number of chunks soon. Calls do not wait until chunks
 * are dropped. */
static inline void wait_for_chunks(const queue_fixture *f, int expected)
{
    for (int i = 0; i < 2000 && kept_chunks(f) != expected; i++)
        usleep(5000);
    assert_int_equal(kept_chunks(f), expected);
}

/* Runs a function in a child process, whose failure fails the test. */
static inline pid_t child(void (*work)(void *), void *argument)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0)
        die("fork", NULL);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        work(argument);
        _exit(0);
    }
    return pid;
}

static inline void join(pid_t pid)
{
    int status;
    if (waitpid(pid, &status, 0) != pid || status != 0) {
        fprintf(stderr, "a child ended with status %x\n", status);
        assert_int_equal(status, 0);
    }
}

/* Returns true when another backend than the builtin one holds the bytes (test_over_redis.sh). */
static inline bool elsewhere(void)
{
    const char *backend = getenv("DRAY_QUEUE_BACKEND");
    return backend && *backend;
}
