/* A redis-server of the test's own, at a Unix socket in a folder of its own. redis-cli reads its
 * state from outside. */
#pragma once

#include "queue/fixture.h"

#include <fcntl.h>

typedef struct redis_server {
    char folder[64], socket[80], address[96], store[112];
    pid_t pid;
} redis_server;

static inline bool have_program(const char *name)
{
    char command[128];
    snprintf(command, sizeof command, "command -v %s >/dev/null", name);
    return system(command) == 0;
}

/* Sets `out` to the first line of redis-cli's output. */
static inline void redis_ask(const redis_server *r, const char *command, char *out, int size)
{
    char line[512];
    snprintf(line, sizeof line, "redis-cli -s %s %s 2>/dev/null", r->socket, command);
    FILE *pipe = popen(line, "r");
    if (!pipe || !fgets(out, size, pipe))
        *out = 0;
    char rest[256];
    while (pipe && fgets(rest, sizeof rest, pipe))
        ;
    if (pipe)
        pclose(pipe);
    out[strcspn(out, "\n")] = 0;
}

static inline long redis_keys(const redis_server *r)
{
    char answer[256];
    redis_ask(r, "dbsize", answer, sizeof answer);
    return *answer ? atol(answer) : -1;
}

/* Fails unless the server has so many keys soon. Calls do not wait until objects are dropped. */
static inline void redis_wait_keys(const redis_server *r, long expected)
{
    for (int i = 0; i < 400 && redis_keys(r) != expected; i++)
        usleep(25000);
    assert_int_equal(redis_keys(r), expected);
}

/* Starts the server. `more` has further words of the command line, and ends with NULL. */
static inline void redis_start(redis_server *r, const char *const *more)
{
    const char *words[24] = {"redis-server", "--port", "0", "--unixsocket", r->socket, "--dir",
                             r->folder,      "--save", "",  "--loglevel",   "warning"};
    int count = 11;
    while (more && *more)
        words[count++] = *more++;
    fflush(NULL);
    r->pid = fork();
    if (r->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int null = open("/dev/null", O_RDWR);
        dup2(null, 1);
        execvp(words[0], (char *const *)words);
        _exit(127);
    }
    char answer[256] = "";
    for (int i = 0; i < 400 && strcmp(answer, "PONG") != 0 && !strstr(answer, "NOAUTH"); i++) {
        usleep(10000);
        redis_ask(r, "ping", answer, sizeof answer);
    }
}

static inline void redis_up(redis_server *r, const char *const *more)
{
    const char *tmp = getenv("TMPDIR");
    char folder[64];
    snprintf(folder, sizeof folder, "%.40s/dray-redis-XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(folder))
        die("mkdtemp", NULL);
    snprintf(r->folder, sizeof r->folder, "%s", folder);
    snprintf(r->socket, sizeof r->socket, "%s/socket", folder);
    snprintf(r->address, sizeof r->address, "unix:%s/socket", folder);
    snprintf(r->store, sizeof r->store, "redis:unix:%s/socket", folder);
    redis_start(r, more);
}

static inline void redis_kill(redis_server *r)
{
    kill(r->pid, SIGCONT);
    kill(r->pid, SIGKILL);
    waitpid(r->pid, NULL, 0);
    unlink(r->socket);
}

static inline void redis_down(redis_server *r)
{
    char command[128];
    redis_kill(r);
    snprintf(command, sizeof command, "rm -rf %.63s", r->folder);
    if (system(command) != 0)
        die(command, NULL);
}

/* Starts a server with these options (NULL means none) and the fixture's coordinator. Returns the
 * session of a client. */
static inline dray_context *redis_begin(redis_server *r, const char *const *options,
                                        queue_fixture *f)
{
    redis_up(r, options);
    f->stores[0] = r->store;
    fixture_up(f);
    return fixture_context(f, "worker");
}

static inline void redis_end(redis_server *r, queue_fixture *f, dray_context *context,
                             dray_queue *queue)
{
    leave(queue, context);
    fixture_down(f);
    redis_down(r);
}

/* Kills the server with everything that it held in memory, and starts it again. */
static inline void redis_restart(redis_server *r, const char *const *options)
{
    redis_kill(r);
    redis_start(r, options);
}
