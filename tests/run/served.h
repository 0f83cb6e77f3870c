/* A dray program, such as `dray serve`, as a process of a test. */
#pragma once

#include "base/clock.h"
#include "suite.h"

#include <arpa/inet.h>
#include <errno.h>
#include <jansson.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

/* A program whose first line is JSON and says that it is ready. */
typedef struct served {
    pid_t pid;
    int out;
    json_t *line;
} served;

static inline const char *served_says(const served *s, const char *key)
{
    const char *text = json_string_value(json_object_get(s->line, key));
    assert_non_null(text);
    return text;
}

/* Starts the program and waits for its first line. `descriptors` limits its open files; 0 means the
 * limit of this process. */
static inline served served_start(const char *const *arguments, rlim_t descriptors)
{
    int out[2];
    char text[1024];
    size_t have = 0;
    served s = {0};
    assert_int_equal(pipe2(out, O_CLOEXEC), 0);
    fflush(NULL);
    if ((s.pid = fork()) == 0) {
        const struct rlimit limit = {descriptors, descriptors};
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(out[1], STDOUT_FILENO);
        if (!descriptors || setrlimit(RLIMIT_NOFILE, &limit) == 0)
            execv(getenv("DRAY_PROGRAM"), (char *const *)(uintptr_t)arguments);
        _exit(127);
    }
    close(out[1]);
    s.out = out[0];
    struct pollfd p = {.fd = s.out, .events = POLLIN};
    while (have + 1 < sizeof text && (!have || text[have - 1] != '\n')) {
        ssize_t n = poll(&p, 1, 30000) == 1 ? read(s.out, text + have, sizeof text - 1 - have) : 0;
        if (n <= 0)
            fail_msg("dray %s did not say that it is ready", arguments[1]);
        have += (size_t)n;
    }
    s.line = json_loadb(text, have, 0, NULL);
    assert_non_null(s.line);
    return s;
}

/* Ends the process, which must exit with status 0. */
static inline void served_stop(served *s)
{
    int status = 0;
    if (waitpid(s->pid, &status, WNOHANG) == 0) {
        kill(s->pid, SIGTERM);
        waitpid(s->pid, &status, 0);
    }
    close(s->out);
    json_decref(s->line);
    *s = (served){0};
    if (WIFSIGNALED(status))
        fail_msg("the server was ended by signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
    assert_int_equal(status, 0);
}

/* Connects to an address such as "tcp:127.0.0.1:4000", "http://127.0.0.1:4000/metrics" or
 * "unix:/path". Returns a descriptor, or -1 when nothing accepts. */
static inline int served_connect_as(const char *address, int flags)
{
    struct sockaddr_un local = {.sun_family = AF_UNIX};
    struct sockaddr_in tcp = {.sin_family = AF_INET};
    bool is_local = strncmp(address, "unix:", 5) == 0;
    int fd = socket(is_local ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);
    if (is_local)
        memccpy(local.sun_path, address + 5, 0, sizeof local.sun_path - 1);
    else
        tcp.sin_port = htons((uint16_t)atoi(strrchr(address, ':') + 1));
    tcp.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const struct sockaddr *to = is_local ? (struct sockaddr *)&local : (struct sockaddr *)&tcp;
    if (fd >= 0 && (connect(fd, to, is_local ? sizeof local : sizeof tcp) == 0 ||
                    (flags && errno == EINPROGRESS)))
        return fd;
    close(fd);
    return -1;
}

static inline int served_connect(const char *address)
{
    return served_connect_as(address, 0);
}

/* Connects without waiting for room in the backlog. */
static inline int served_connect_now(const char *address)
{
    return served_connect_as(address, SOCK_NONBLOCK);
}
