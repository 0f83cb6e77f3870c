#include "run/command.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/wire.h"
#include "run/job/contract.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { LINE_FIRST = 256, LINE_MOST = 1 << 20 };

struct dray__command {
    const char *setting, *text;
    pid_t pid;
    int to, from;
    char *line; /* received bytes: `taken` bytes that were taken, then those that were not */
    size_t filled, room, taken;
};

/* ---- starting -------------------------------------------------------------------------------- */

/* A copy of this process's environment without secrets, which borrows its strings. Returns NULL
 * when out of memory. */
static char **make_environment(void)
{
    size_t count = 0, kept = 0;
    while (environ[count])
        count++;
    char **list = calloc(count + 1, sizeof(*list));
    for (size_t i = 0; list && i < count; i++)
        if (!dray__is_secret(environ[i]))
            list[kept++] = environ[i];
    return list;
}

/* Starts the command through `dray host --exec`, which has the kernel end it with this process, and
 * then becomes the command. */
static int spawn(dray__command *command, int from, int to)
{
    char parent[32];
    snprintf(parent, sizeof(parent), "--parent=%ld", (long)getpid());
    char *arguments[] = {"dray", "host", parent, "--exec", (char *)(uintptr_t)command->text, NULL};
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t broken_pipe; /* this process ignores it, but other programs expect its default */
    sigemptyset(&broken_pipe);
    sigaddset(&broken_pipe, SIGPIPE);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setsigdefault(&attributes, &broken_pipe);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, from, 0);
    posix_spawn_file_actions_adddup2(&actions, to, 1);
    char **environment = make_environment();
    int problem = environment ? posix_spawn(&command->pid, "/proc/self/exe", &actions, &attributes,
                                            arguments, environment)
                              : ENOMEM;
    free(environment);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    return problem;
}

static int start(dray__command *command, dray_error *error)
{
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) < 0)
        return dray__fail_errno(error, errno, "%s: pipe", command->setting);
    if (pipe2(out, O_CLOEXEC) < 0) {
        int problem = errno;
        close(in[0]);
        close(in[1]);
        return dray__fail_errno(error, problem, "%s: pipe", command->setting);
    }
    int problem = spawn(command, in[0], out[1]);
    close(in[0]);
    close(out[1]);
    if (problem) {
        close(in[1]);
        close(out[0]);
        command->pid = 0;
        return dray__fail_errno(error, problem, "%s: cannot be started", command->setting);
    }
    command->to = in[1];
    command->from = out[0];
    fcntl(command->to, F_SETFL, O_NONBLOCK);
    fcntl(command->from, F_SETFL, O_NONBLOCK);
    return DRAY_OK;
}

int dray__command_open(const char *setting, const char *text, dray__command **out,
                       dray_error *error)
{
    dray__command *command = calloc(1, sizeof(*command));
    if (!command)
        return dray__nomem(error);
    *command = (dray__command){.setting = setting, .text = text, .room = LINE_FIRST};
    command->line = malloc(command->room + 1);
    int rc = command->line ? start(command, error) : dray__nomem(error);
    if (rc)
        dray__command_close(command);
    else
        *out = command;
    return rc;
}

void dray__command_close(dray__command *command)
{
    if (!command)
        return;
    if (command->pid) {
        close(command->to);
        close(command->from);
        kill(command->pid, SIGKILL);
        waitpid(command->pid, NULL, 0);
    }
    free(command->line);
    free(command);
}

int dray__command_fd(const dray__command *command)
{
    return command->from;
}

/* ---- asking ---------------------------------------------------------------------------------- */

int dray__command_late(const dray__command *command, double timeout_seconds, dray_error *error)
{
    return dray__fail(error, DRAY_ETIMEDOUT, "%s: no answer in %g s", command->setting,
                      timeout_seconds);
}

static int64_t deadline_of(double timeout_seconds)
{
    return dray__deadline((int64_t)(timeout_seconds * (double)DRAY__SECOND));
}

/* Returns DRAY_ETIMEDOUT when the deadline passed. */
static int wait_for(const dray__command *command, int fd, short events, int64_t deadline,
                    dray_error *error)
{
    struct pollfd p = {.fd = fd, .events = events};
    int ready;
    do {
        ready = poll(&p, 1, dray__left_ms(deadline));
    } while (ready < 0 && errno == EINTR);
    if (ready < 0)
        return dray__fail_errno(error, errno, "%s: poll", command->setting);
    return ready ? DRAY_OK : DRAY_ETIMEDOUT;
}

static int it_ended(const dray__command *command, dray_error *error)
{
    return dray__fail(error, DRAY_ECLOSED,
                      "%s: it ended; its output is in the host's file under logs/",
                      command->setting);
}

static int send_text(dray__command *command, const char *text, size_t size, double timeout_seconds,
                     dray_error *error)
{
    int64_t deadline = deadline_of(timeout_seconds);
    for (size_t done = 0; done < size;) {
        int rc = wait_for(command, command->to, POLLOUT, deadline, error);
        if (rc == DRAY_ETIMEDOUT)
            return dray__command_late(command, timeout_seconds, error);
        if (rc)
            return rc;
        ssize_t n = write(command->to, text + done, size - done);
        /* The command ended; its last lines are read before its end is reported. */
        if (n < 0 && errno == EPIPE)
            return DRAY_OK;
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            return dray__fail_errno(error, errno, "%s: write", command->setting);
        done += n > 0 ? (size_t)n : 0;
    }
    return DRAY_OK;
}

/* ---- answers --------------------------------------------------------------------------------- */

/* Removes the taken bytes, and makes room for at least one more byte. */
static int make_room(dray__command *command, dray_error *error)
{
    command->filled -= command->taken;
    memmove(command->line, command->line + command->taken, command->filled);
    command->taken = 0;
    if (command->filled < command->room)
        return DRAY_OK;
    if (command->room >= LINE_MOST)
        return dray__fail(error, DRAY_EFORMAT, "%s: a line of more than %d bytes", command->setting,
                          LINE_MOST);
    char *line = realloc(command->line, 2 * command->room + 1);
    if (!line)
        return dray__nomem(error);
    command->line = line;
    command->room *= 2;
    return DRAY_OK;
}

int dray__command_look(dray__command *command, char **line, dray_error *error)
{
    for (;;) {
        char *begin = command->line + command->taken;
        char *end = memchr(begin, '\n', command->filled - command->taken);
        if (end) {
            *end = 0;
            command->taken = (size_t)(end + 1 - command->line);
            *line = begin;
            return DRAY_OK;
        }
        int rc = make_room(command, error);
        if (rc)
            return rc;
        ssize_t n =
            read(command->from, command->line + command->filled, command->room - command->filled);
        if (n == 0)
            return it_ended(command, error);
        if (n < 0 && errno == EAGAIN)
            return DRAY_EAGAIN;
        if (n < 0 && errno != EINTR)
            return dray__fail_errno(error, errno, "%s: read", command->setting);
        command->filled += n > 0 ? (size_t)n : 0;
    }
}

int dray__command_wait(dray__command *command, double timeout_seconds, char **line,
                       dray_error *error)
{
    int64_t deadline = deadline_of(timeout_seconds);
    int rc;
    while ((rc = dray__command_look(command, line, error)) == DRAY_EAGAIN) {
        rc = wait_for(command, command->from, POLLIN, deadline, error);
        if (rc == DRAY_ETIMEDOUT)
            return dray__command_late(command, timeout_seconds, error);
        if (rc)
            return rc;
    }
    return rc;
}

/* Refuses a command that has said more lines than it was asked questions. All of its answers would
 * count for other questions than its own. */
static int check_silent(dray__command *command, dray_error *error)
{
    char *line;
    int rc = dray__command_look(command, &line, error);
    if (rc == DRAY_EAGAIN)
        return DRAY_OK;
    return rc ? rc
              : dray__fail(error, DRAY_EFORMAT,
                           "%s: expected one line for each question, found another: '%.64s'",
                           command->setting, line);
}

int dray__command_ask(dray__command *command, json_t *question, double timeout_seconds,
                      dray_error *error)
{
    char *text = question ? json_dumps(question, JSON_COMPACT) : NULL;
    json_decref(question);
    if (!text)
        return dray__nomem(error);
    int rc = check_silent(command, error);
    size_t length = strlen(text);
    text[length] = '\n'; /* replaces the terminating zero, which is not sent */
    if (!rc)
        rc = send_text(command, text, length + 1, timeout_seconds, error);
    free(text);
    return rc;
}

json_t *dray__json_clean(const char *bytes)
{
    size_t length = strlen(bytes), at = 0;
    char *out = malloc(3 * length + 1);
    for (size_t i = 0; out && i < length;) {
        size_t step = 1;
        while (step <= 4 && i + step <= length && !dray__utf8_valid(bytes + i, step))
            step++;
        if (step <= 4 && i + step <= length) {
            memcpy(out + at, bytes + i, step);
            at += step;
            i += step;
        } else {
            memcpy(out + at, "\xef\xbf\xbd", 3);
            at += 3;
            i++;
        }
    }
    if (out)
        out[at] = 0;
    json_t *text = out ? json_string(out) : NULL;
    free(out);
    return text;
}
