#include "run/engine/tool.h"

#include "base/clock.h"
#include "base/error.h"
#include "run/command.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct call {
    char *prompt, *response; /* for a command; NULL once a process has taken the call */
    char *answer;            /* NULL until there is one */
    int64_t due_ns;          /* the answer is not given out before */
    uint64_t number;         /* calls are asked in the order of their numbers */
    bool waiting;            /* for a free process of the command */
    bool aside;              /* the answer cannot be taken now */
} call;

/* One process of the command, which answers one call at a time. */
typedef struct worker {
    dray__command *command; /* NULL until it is started */
    bool busy;
    uint64_t number; /* of its call, which may have been forgotten */
    uint32_t id;
    int64_t deadline;
} worker;

struct dray__tool {
    const dray__job_tool *job;
    call *calls;
    /* waiting is the number of calls that wait for a process. */
    uint32_t ids, worker_count, waiting;
    uint64_t asked;
    worker *workers;
    struct pollfd *fds; /* for poll: those of all workers, and one more */
};

int dray__tool_open(const dray__job_tool *job, uint32_t ids, dray__tool **out, dray_error *error)
{
    dray__tool *tool = calloc(1, sizeof(*tool));
    if (!tool)
        return dray__nomem(error);
    *tool = (dray__tool){.job = job, .ids = ids, .worker_count = (uint32_t)job->processes};
    tool->calls = calloc((size_t)ids + 1, sizeof(*tool->calls));
    tool->workers = calloc(tool->worker_count, sizeof(*tool->workers));
    tool->fds = calloc((size_t)tool->worker_count + 1, sizeof(*tool->fds));
    if (!tool->calls || !tool->workers || !tool->fds) {
        dray__tool_close(tool);
        return dray__nomem(error);
    }
    *out = tool;
    return DRAY_OK;
}

void dray__tool_close(dray__tool *tool)
{
    if (!tool)
        return;
    for (uint32_t i = 0; tool->calls && i < tool->ids; i++)
        dray__tool_forget(tool, i);
    for (uint32_t i = 0; tool->workers && i < tool->worker_count; i++)
        dray__command_close(tool->workers[i].command);
    free(tool->calls);
    free(tool->workers);
    free(tool->fds);
    free(tool);
}

bool dray__tool_called(const dray__job_tool *job, const char *text)
{
    size_t length = strlen(text), end = strlen(job->call);
    return length >= end && strcmp(text + length - end, job->call) == 0;
}

/* ---- the calculator -------------------------------------------------------------------------- */

static bool is_part(char c)
{
    return c && strchr("0123456789+-* ", c);
}

/* A number, with blanks around it. */
static bool take_number(const char **at, const char *end, int64_t *out)
{
    const char *p = *at;
    int64_t value = 0;
    while (p < end && *p == ' ')
        p++;
    if (p == end || *p < '0' || *p > '9')
        return false;
    for (; p < end && *p >= '0' && *p <= '9'; p++)
        if (__builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, *p - '0', &value))
            return false;
    while (p < end && *p == ' ')
        p++;
    *at = p;
    *out = value;
    return true;
}

/* Returns false when the text is no expression, or its value is too large. */
static bool evaluate(const char *at, const char *end, int64_t *out)
{
    int64_t sum = 0, product, number;
    uint32_t operators = 0;
    char sign = '+';
    if (!take_number(&at, end, &product))
        return false;
    for (; at < end; operators++) {
        char op = *at++;
        if (!take_number(&at, end, &number))
            return false;
        if (op == '*') {
            if (__builtin_mul_overflow(product, number, &product))
                return false;
            continue;
        }
        if (sign == '+' ? __builtin_add_overflow(sum, product, &sum)
                        : __builtin_sub_overflow(sum, product, &sum))
            return false;
        sign = op;
        product = number;
    }
    bool large = sign == '+' ? __builtin_add_overflow(sum, product, out)
                             : __builtin_sub_overflow(sum, product, out);
    return operators && !large;
}

void dray__calculate(const dray__job_tool *job, const char *text, char out[DRAY__CALCULATED_BYTES])
{
    const char *end = text + strlen(text) - strlen(job->call), *at = end;
    int64_t value;
    while (at > text && is_part(at[-1]))
        at--;
    out[0] = 0;
    if (evaluate(at, end, &value))
        snprintf(out, DRAY__CALCULATED_BYTES, "%lld", (long long)value);
}

/* ---- calls ----------------------------------------------------------------------------------- */

void dray__tool_forget(dray__tool *tool, uint32_t id)
{
    call *c = &tool->calls[id];
    tool->waiting -= c->waiting;
    free(c->prompt);
    free(c->response);
    free(c->answer);
    *c = (call){0};
}

void dray__tool_set_aside(dray__tool *tool, uint32_t id, bool aside)
{
    tool->calls[id].aside = aside;
}

int dray__tool_ask(dray__tool *tool, uint32_t id, const char *prompt, const char *response,
                   double seconds, dray_error *error)
{
    call *c = &tool->calls[id];
    dray__tool_forget(tool, id);
    c->number = ++tool->asked;
    c->due_ns = dray__now() + (int64_t)(seconds * (double)DRAY__SECOND);
    if (tool->job->kind == DRAY__TOOL_CALCULATOR) {
        c->answer = malloc(DRAY__CALCULATED_BYTES);
        if (c->answer)
            dray__calculate(tool->job, response, c->answer);
        return c->answer ? DRAY_OK : dray__nomem(error);
    }
    c->prompt = strdup(prompt);
    c->response = strdup(response);
    c->waiting = true;
    tool->waiting++;
    return c->prompt && c->response ? dray__tool_look(tool, error) : dray__nomem(error);
}

/* Reads {"answer": "..."}. */
static int read_answer(const char *line, char **out, dray_error *error)
{
    json_t *object = json_loads(line, 0, NULL), *answer = json_object_get(object, "answer");
    int rc = DRAY_OK;
    if (!json_is_string(answer) && !json_is_null(answer))
        rc = dray__fail(error, DRAY_EFORMAT,
                        "tool.command: expected {\"answer\": \"...\"} a line, found '%.64s'", line);
    else if (!(*out = strdup(json_is_null(answer) ? "" : json_string_value(answer))))
        rc = dray__nomem(error);
    json_decref(object);
    return rc;
}

static int look_at(dray__tool *tool, worker *w, dray_error *error)
{
    char *line, *answer = NULL;
    int rc = dray__command_look(w->command, &line, error);
    if (rc == DRAY_EAGAIN)
        return dray__now() < w->deadline
                   ? DRAY_OK
                   : dray__command_late(w->command, tool->job->timeout_seconds, error);
    if (!rc)
        rc = read_answer(line, &answer, error);
    w->busy = false;
    if (!rc && tool->calls[w->id].number == w->number)
        tool->calls[w->id].answer = answer;
    else
        free(answer);
    return rc;
}

static int give_work(dray__tool *tool, worker *w, uint32_t id, dray_error *error)
{
    const dray__job_tool *job = tool->job;
    call *c = &tool->calls[id];
    int rc = DRAY_OK;
    if (!w->command)
        rc = dray__command_open("tool.command", job->command, &w->command, error);
    if (!rc)
        rc = dray__command_ask(w->command,
                               json_pack("{s:o, s:o}", "prompt", dray__json_clean(c->prompt),
                                         "response", dray__json_clean(c->response)),
                               job->timeout_seconds, error);
    c->waiting = false;
    tool->waiting--;
    w->busy = true;
    w->number = c->number;
    w->id = id;
    w->deadline = dray__deadline((int64_t)(job->timeout_seconds * (double)DRAY__SECOND));
    return rc;
}

/* Returns the call that has waited longest. There must be one. */
static uint32_t next_call(const dray__tool *tool)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < tool->ids; i++)
        if (tool->calls[i].waiting &&
            (!tool->calls[next].waiting || tool->calls[i].number < tool->calls[next].number))
            next = i;
    return next;
}

int dray__tool_look(dray__tool *tool, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < tool->worker_count && !rc; i++) {
        worker *w = &tool->workers[i];
        if (w->busy)
            rc = look_at(tool, w, error);
        if (!rc && !w->busy && tool->waiting)
            rc = give_work(tool, w, next_call(tool), error);
    }
    return rc;
}

const char *dray__tool_answer(const dray__tool *tool, uint32_t id)
{
    const call *c = &tool->calls[id];
    return c->answer && dray__now() >= c->due_ns ? c->answer : NULL;
}

void dray__tool_wait(const dray__tool *tool, int fd, int64_t timeout_ns)
{
    int64_t now = dray__now(), until = now + timeout_ns;
    uint32_t count = 0;
    for (uint32_t i = 0; i < tool->ids; i++)
        if (tool->calls[i].answer && !tool->calls[i].aside && tool->calls[i].due_ns < until)
            until = tool->calls[i].due_ns;
    for (uint32_t i = 0; i < tool->worker_count; i++)
        if (tool->workers[i].busy)
            tool->fds[count++] =
                (struct pollfd){.fd = dray__command_fd(tool->workers[i].command), .events = POLLIN};
    tool->fds[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
    int64_t left = until > now ? until - now : 0;
    ppoll(tool->fds, count,
          &(struct timespec){.tv_sec = left / DRAY__SECOND, .tv_nsec = left % DRAY__SECOND}, NULL);
}
