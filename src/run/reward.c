#include "run/reward.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/wire.h"
#include "run/contract.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

struct dray__grader {
    const dray__job_reward *reward;
    pid_t pid; /* 0: not started */
    int to, from;
    char line[256];
    size_t filled;
};

float dray__exact_match(const char *answer, const char *response)
{
    return strcmp(answer, response) == 0 ? 1 : 0;
}

int dray__grader_open(const dray__job_reward *reward, dray__grader **out, dray_error *error)
{
    dray__grader *grader = calloc(1, sizeof(*grader));
    if (!grader)
        return dray__nomem(error);
    grader->reward = reward;
    grader->to = grader->from = -1;
    *out = grader;
    return DRAY_OK;
}

void dray__grader_close(dray__grader *grader)
{
    if (!grader)
        return;
    if (grader->pid) {
        close(grader->to);
        close(grader->from);
        kill(grader->pid, SIGKILL);
        waitpid(grader->pid, NULL, 0);
    }
    free(grader);
}

/* Ours without secrets; its strings are ours. NULL: no memory. */
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

/* Through `dray host --exec`, which ties the command's life to ours before it becomes it. */
static int spawn(dray__grader *grader, int from, int to)
{
    char parent[32];
    snprintf(parent, sizeof(parent), "--parent=%ld", (long)getpid());
    char *arguments[] = {"dray", "host", parent, "--exec", grader->reward->command, NULL};
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t broken_pipe; /* which this process ignores, and programs need not expect to be */
    sigemptyset(&broken_pipe);
    sigaddset(&broken_pipe, SIGPIPE);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setsigdefault(&attributes, &broken_pipe);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, from, 0);
    posix_spawn_file_actions_adddup2(&actions, to, 1);
    char **environment = make_environment();
    int problem = environment ? posix_spawn(&grader->pid, "/proc/self/exe", &actions, &attributes,
                                            arguments, environment)
                              : ENOMEM;
    free(environment);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    return problem;
}

static int start(dray__grader *grader, dray_error *error)
{
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) < 0)
        return dray__fail_errno(error, errno, "reward.command: pipe");
    if (pipe2(out, O_CLOEXEC) < 0) {
        int problem = errno;
        close(in[0]);
        close(in[1]);
        return dray__fail_errno(error, problem, "reward.command: pipe");
    }
    int problem = spawn(grader, in[0], out[1]);
    close(in[0]);
    close(out[1]);
    if (problem) {
        close(in[1]);
        close(out[0]);
        grader->pid = 0;
        return dray__fail_errno(error, problem, "reward.command: cannot be started");
    }
    grader->to = in[1];
    grader->from = out[0];
    fcntl(grader->to, F_SETFL, O_NONBLOCK);
    return DRAY_OK;
}

static int wait_for(int fd, short events, int64_t deadline, const dray__grader *grader,
                    dray_error *error)
{
    struct pollfd p = {.fd = fd, .events = events};
    int ready;
    do {
        ready = poll(&p, 1, dray__left_ms(deadline));
    } while (ready < 0 && errno == EINTR);
    if (ready < 0)
        return dray__fail_errno(error, errno, "reward.command: poll");
    return ready ? DRAY_OK
                 : dray__fail(error, DRAY_ETIMEDOUT, "reward.command: no answer in %g s",
                              grader->reward->timeout_seconds);
}

static int it_ended(dray_error *error)
{
    return dray__fail(error, DRAY_ECLOSED,
                      "reward.command: it ended; what it said is in the host's file under logs/");
}

static int send_line(dray__grader *grader, const char *text, int64_t deadline, dray_error *error)
{
    size_t size = strlen(text);
    for (size_t done = 0; done < size;) {
        int rc = wait_for(grader->to, POLLOUT, deadline, grader, error);
        if (rc)
            return rc;
        ssize_t n = write(grader->to, text + done, size - done);
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            return errno == EPIPE ? it_ended(error)
                                  : dray__fail_errno(error, errno, "reward.command: write");
        done += n > 0 ? (size_t)n : 0;
    }
    return DRAY_OK;
}

static int take_number(dray__grader *grader, char *end, float *reward, dray_error *error)
{
    *end = 0;
    char *rest;
    float value = strtof(grader->line, &rest);
    rest += strspn(rest, " \t\r");
    int rc =
        rest == grader->line || *rest || !isfinite(value)
            ? dray__fail(error, DRAY_EFORMAT,
                         "reward.command: expected a number a line, found '%.64s'", grader->line)
            : DRAY_OK;
    grader->filled -= (size_t)(end + 1 - grader->line);
    memmove(grader->line, end + 1, grader->filled);
    *reward = value;
    return rc;
}

static int receive(dray__grader *grader, int64_t deadline, float *reward, dray_error *error)
{
    for (;;) {
        char *end = memchr(grader->line, '\n', grader->filled);
        if (end)
            return take_number(grader, end, reward, error);
        if (grader->filled == sizeof(grader->line))
            return dray__fail(error, DRAY_EFORMAT,
                              "reward.command: expected a number a line, found a longer line");
        int rc = wait_for(grader->from, POLLIN, deadline, grader, error);
        if (rc)
            return rc;
        ssize_t n = read(grader->from, grader->line + grader->filled,
                         sizeof(grader->line) - grader->filled);
        if (n == 0)
            return it_ended(error);
        if (n < 0 && errno != EINTR)
            return dray__fail_errno(error, errno, "reward.command: read");
        grader->filled += n > 0 ? (size_t)n : 0;
    }
}

/* Bytes that are no UTF-8 become U+FFFD: JSON can say nothing else. malloc'ed; NULL: no memory. */
static char *valid_utf8(const char *text)
{
    size_t length = strlen(text), at = 0;
    char *out = malloc(3 * length + 1);
    for (size_t i = 0; out && i < length;) {
        size_t step = 1;
        while (step <= 4 && i + step <= length && !dray__utf8_valid(text + i, step))
            step++;
        if (step <= 4 && i + step <= length) {
            memcpy(out + at, text + i, step);
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
    return out;
}

/* The question as a line of JSON. malloc'ed; NULL: no memory. */
static char *question(const char *prompt, const char *answer, const char *response)
{
    char *clean = valid_utf8(response), *line = NULL;
    json_t *object =
        clean ? json_pack("{s:s, s:s, s:s}", "prompt", prompt, "answer", answer, "response", clean)
              : NULL;
    char *text = object ? json_dumps(object, JSON_COMPACT) : NULL;
    size_t length = text ? strlen(text) : 0;
    if (text && (line = realloc(text, length + 2)))
        memcpy(line + length, "\n", 2);
    else
        free(text);
    json_decref(object);
    free(clean);
    return line;
}

static int ask_command(dray__grader *grader, const char *prompt, const char *answer,
                       const char *response, float *reward, dray_error *error)
{
    int rc = grader->pid ? DRAY_OK : start(grader, error);
    if (rc)
        return rc;
    char *line = question(prompt, answer, response);
    if (!line)
        return dray__nomem(error);
    int64_t deadline =
        dray__deadline((int64_t)(grader->reward->timeout_seconds * (double)DRAY__SECOND));
    dray_trace_wait_briefly(DRAY_CAUSE_TOOL, "wait for reward.command", -1);
    rc = send_line(grader, line, deadline, error);
    free(line);
    if (!rc)
        rc = receive(grader, deadline, reward, error);
    dray_trace_leave();
    return rc;
}

int dray__grade(dray__grader *grader, const char *prompt, const char *answer, const char *response,
                float *reward, dray_error *error)
{
    if (grader->reward->rule == DRAY__RULE_COMMAND)
        return ask_command(grader, prompt, answer, response, reward, error);
    *reward = dray__exact_match(answer, response);
    return DRAY_OK;
}
