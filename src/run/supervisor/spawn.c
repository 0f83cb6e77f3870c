#include "run/supervisor/spawn.h"

#include "base/clock.h"
#include "base/error.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

enum { ARGUMENTS = 32, LOG_ROOM = 4096 };

static int set_up(posix_spawn_file_actions_t *actions, posix_spawnattr_t *attributes,
                  const dray__child_start *start)
{
    sigset_t all, none;
    sigfillset(&all);
    sigemptyset(&none);
    posix_spawnattr_setflags(attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF |
                                             POSIX_SPAWN_SETSIGMASK);
    posix_spawnattr_setpgroup(attributes, 0);
    posix_spawnattr_setsigdefault(attributes, &all);
    posix_spawnattr_setsigmask(attributes, &none);
    int problem = posix_spawn_file_actions_addopen(actions, 0, "/dev/null", O_RDONLY, 0);
    if (!problem)
        problem = posix_spawn_file_actions_addopen(
            actions, 1, start->log, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW, 0666);
    if (!problem)
        problem = posix_spawn_file_actions_adddup2(actions, 1, 2);
    if (!problem && start->fd >= 0)
        problem = posix_spawn_file_actions_adddup2(actions, start->fd, DRAY__CHILD_FD);
    if (!problem && start->folder)
        problem = posix_spawn_file_actions_addchdir_np(actions, start->folder);
    return problem;
}

/* Reserves room in the log, so that a child's last line, which says why it ended, is written even
 * when the disk is full. */
static int reserve_log(const char *path, dray_error *error)
{
    struct stat st;
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0666);
    bool full = fd >= 0 && fstat(fd, &st) == 0 &&
                fallocate(fd, FALLOC_FL_KEEP_SIZE, st.st_size, LOG_ROOM) < 0 && errno == ENOSPC;
    int rc = fd < 0 || full ? dray__fail_errno(error, errno, "%s", path) : DRAY_OK;
    if (fd >= 0)
        close(fd);
    return rc;
}

int dray__child_begin(const dray__child_start *start, dray__child *out, dray_error *error)
{
    int rc = reserve_log(start->log, error);
    if (rc)
        return rc;
    char *list[ARGUMENTS] = {(char[]){"dray"}};
    for (int i = 0; start->arguments[i]; i++) {
        if (i + 2 >= ARGUMENTS)
            return dray__fail(error, DRAY_EINTERNAL, "too many arguments for a child");
        list[i + 1] = (char *)(uintptr_t)start->arguments[i];
    }
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
    dray__child child = {.pidfd = -1};
    int problem = set_up(&actions, &attributes, start);
    if (!problem)
        problem = posix_spawn(&child.pid, "/proc/self/exe", &actions, &attributes, list,
                              start->environment ? start->environment : environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    if (problem)
        return dray__fail_errno(error, problem, "dray %s: cannot be started (log: %s)",
                                start->arguments[0], start->log);
    child.pidfd = (int)syscall(SYS_pidfd_open, child.pid, 0);
    if (child.pidfd < 0) {
        problem = errno;
        dray__child_end(&child);
        return dray__fail_errno(error, problem, "pidfd_open");
    }
    *out = child;
    return DRAY_OK;
}

void dray__child_signal(const dray__child *child, int number)
{
    if (child->pid > 0 && kill(-child->pid, number) < 0)
        kill(child->pid, number);
}

static void forget(dray__child *child)
{
    if (child->pidfd >= 0)
        close(child->pidfd);
    *child = (dray__child){.pidfd = -1};
}

int dray__child_ended(dray__child *child, int *status)
{
    pid_t got;
    if (child->pid <= 0)
        return 0;
    do {
        got = waitpid(child->pid, status, WNOHANG);
    } while (got < 0 && errno == EINTR);
    if (got == 0)
        return 0;
    if (got < 0)
        *status = SIGKILL;      /* another process reaped it: its real status is lost */
    kill(-child->pid, SIGKILL); /* also kills the processes that it had started */
    forget(child);
    return 1;
}

bool dray__child_was_killed(const dray__child *child)
{
    siginfo_t seen = {0};
    return child->pid > 0 &&
           waitid(P_PID, (id_t)child->pid, &seen, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           seen.si_pid == child->pid && seen.si_code != CLD_EXITED;
}

void dray__child_end(dray__child *child)
{
    if (child->pid <= 0)
        return;
    dray__child_signal(child, SIGKILL);
    while (waitpid(child->pid, NULL, 0) < 0 && errno == EINTR) {
    }
    forget(child);
}

/* ---- orphans --------------------------------------------------------------------------------- */

void dray__orphans_reap(dray__child_known *known, const void *user)
{
    siginfo_t seen = {0};
    /* A known child hides those behind it only until its end is taken. */
    while (waitid(P_ALL, 0, &seen, WEXITED | WNOHANG | WNOWAIT) == 0 && seen.si_pid > 0 &&
           !known(user, seen.si_pid)) {
        waitpid(seen.si_pid, NULL, WNOHANG);
        seen = (siginfo_t){0};
    }
}

void dray__orphans_end(void)
{
    char path[64], list[4096];
    snprintf(path, sizeof(path), "/proc/self/task/%ld/children", (long)getpid());
    for (int round = 0; round < 100; round++) {
        while (waitpid(-1, NULL, WNOHANG) > 0) {
        }
        FILE *file = fopen(path, "re");
        bool any = file && fgets(list, sizeof(list), file);
        if (file)
            fclose(file);
        if (!any)
            return;
        char *at = list, *end;
        /* Skips a number at which the list was truncated, because it is another process's. */
        for (long pid = strtol(at, &end, 10); end != at && *end == ' ';
             pid = strtol(at, &end, 10)) {
            kill((pid_t)pid, SIGKILL);
            at = end;
        }
        nanosleep(&(struct timespec){.tv_nsec = 2 * DRAY__MILLISECOND}, NULL);
    }
}

/* ---- in the child ---------------------------------------------------------------------------- */

int dray__child_follow(pid_t parent, dray_error *error)
{
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0)
        return dray__fail_errno(error, errno, "prctl");
    if (getppid() != parent)
        return dray__fail(error, DRAY_EDEAD, "the process that started this one is gone");
    return DRAY_OK;
}

/* Ends this process as the child ended, without a second core file. */
static void end_as(int status)
{
    if (WIFEXITED(status))
        _exit(WEXITSTATUS(status));
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    signal(WTERMSIG(status), SIG_DFL);
    raise(WTERMSIG(status));
    _exit(1);
}

int dray__child_guard(pid_t parent, dray_error *error)
{
    enum { PARENT, CHILD, WATCHED };
    /* Is reset before the fork, so that this process is not killed before it has killed the
     * group. */
    prctl(PR_SET_PDEATHSIG, 0);
    pid_t self = getpid(), child = fork();
    if (child < 0)
        return dray__fail_errno(error, errno, "fork");
    if (child == 0)
        return dray__child_follow(self, error);
    signal(SIGTERM, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    const pid_t pids[WATCHED] = {parent, child};
    struct pollfd at[WATCHED];
    for (int i = 0; i < WATCHED; i++) {
        at[i] = (struct pollfd){.fd = (int)syscall(SYS_pidfd_open, pids[i], 0), .events = POLLIN};
        if (at[i].fd < 0 && errno != ESRCH)
            return dray__fail_errno(error, errno, "pidfd_open");
    }
    int status;
    while (getppid() == parent) {
        poll(at, WATCHED, -1);
        if (waitpid(child, &status, WNOHANG) == child)
            end_as(status);
    }
    kill(0, SIGKILL);
    return DRAY_OK;
}

void dray__log_last(const char *path, off_t begin, const char *prefix, bool only, char *out,
                    size_t capacity)
{
    char tail[4097], *state = NULL;
    out[0] = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return;
    off_t size = lseek(fd, 0, SEEK_END);
    ssize_t got = pread(fd, tail, 4096, size - begin > 4096 ? size - 4096 : begin);
    close(fd);
    tail[got > 0 ? got : 0] = 0;
    for (char *line = strtok_r(tail, "\n", &state); line; line = strtok_r(NULL, "\n", &state)) {
        size_t length = strncmp(line, prefix, strlen(prefix)) == 0 ? strlen(prefix) : 0;
        if (length || !only)
            snprintf(out, capacity, "%s", line + length);
    }
}
