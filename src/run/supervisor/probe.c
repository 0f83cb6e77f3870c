#include "run/supervisor/probe.h"

#include "base/clock.h"
#include "base/error.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ANSWER_MS = 5000 };

static const char scheme[] = "http://";

static bool is_url(const char *ready)
{
    return strncmp(ready, scheme, sizeof(scheme) - 1) == 0;
}

/* Splits "http://HOST:PORT/PATH". An IPv6 address is in brackets. */
static bool split(const char *url, char host[64], char port[8], const char **path)
{
    const char *at = url + sizeof(scheme) - 1;
    size_t length = strcspn(at, "/");
    const char *colon = memrchr(at, ':', length);
    size_t name = colon ? (size_t)(colon - at) : 0, digits = colon ? length - name - 1 : 0;
    if (!name || name >= 64 || !digits || digits >= 8 || strspn(colon + 1, "0123456789") < digits)
        return false;
    bool brackets = at[0] == '[' && at[name - 1] == ']';
    snprintf(host, 64, "%.*s", (int)(name - 2 * brackets), at + brackets);
    snprintf(port, 8, "%.*s", (int)digits, colon + 1);
    *path = at[length] ? at + length : "/";
    return true;
}

static struct addrinfo *resolve(const char *host, const char *port)
{
    const struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV,
                                   .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    const char *name = strcmp(host, "localhost") == 0 ? "127.0.0.1" : host;
    return getaddrinfo(name, port, &hints, &found) ? NULL : found;
}

int dray__probe_check(const char *ready, dray_error *error)
{
    char host[64], port[8];
    const char *path;
    bool url = strstr(ready, "://") != NULL;
    if (!url)
        return DRAY_OK;
    struct addrinfo *found =
        is_url(ready) && split(ready, host, port, &path) ? resolve(host, port) : NULL;
    if (found)
        freeaddrinfo(found);
    return found ? DRAY_OK
                 : dray__fail(error, DRAY_EINVALID,
                              "expected a file, or http://HOST:PORT/PATH with a numeric host or "
                              "localhost, found '%.128s'",
                              ready);
}

void dray__probe_end(dray__probe *probe)
{
    if (probe->fd >= 0)
        close(probe->fd);
    *probe = (dray__probe){.fd = -1};
}

static void begin(dray__probe *probe, const char *host, const char *port)
{
    struct addrinfo *to = resolve(host, port);
    *probe = (dray__probe){.fd = -1, .begun_ns = dray__now()};
    if (to)
        probe->fd = socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe->fd >= 0 && connect(probe->fd, to->ai_addr, to->ai_addrlen) < 0 &&
        errno != EINPROGRESS)
        dray__probe_end(probe);
    if (to)
        freeaddrinfo(to);
}

static bool is_at(const dray__probe *probe, short events)
{
    struct pollfd p = {.fd = probe->fd, .events = events};
    return poll(&p, 1, 0) == 1;
}

static void ask(dray__probe *probe, const char *host, const char *path)
{
    char text[4500];
    int size = snprintf(text, sizeof(text), "GET %s HTTP/1.0\r\nHost: %s\r\n\r\n", path, host);
    probe->sent = size > 0 && (size_t)size < sizeof(text) &&
                  send(probe->fd, text, (size_t)size, MSG_NOSIGNAL) == size;
    if (!probe->sent) /* most likely the connection was refused */
        dray__probe_end(probe);
}

/* A server may send its first line in pieces. The next look reads the rest. */
static bool answered(dray__probe *probe)
{
    char line[16] = "";
    ssize_t got = recv(probe->fd, line, sizeof(line) - 1, MSG_PEEK);
    int status = 0;
    if (got > 0 && got < 12)
        return false;
    bool ok = got > 0 && sscanf(line, "HTTP/1.%*1[01] %3d", &status) == 1;
    dray__probe_end(probe);
    return ok && status >= 200 && status <= 299;
}

static bool ask_url(dray__probe *probe, const char *url)
{
    char host[64], port[8];
    const char *path;
    if (!split(url, host, port, &path))
        return false;
    if (probe->fd >= 0 && dray__now() > probe->begun_ns + ANSWER_MS * DRAY__MILLISECOND)
        dray__probe_end(probe);
    if (probe->fd < 0)
        begin(probe, host, port);
    if (probe->fd >= 0 && !probe->sent && is_at(probe, POLLOUT))
        ask(probe, host, path);
    return probe->fd >= 0 && probe->sent && is_at(probe, POLLIN) && answered(probe);
}

/* Looks at the file that `ready` names. */
static bool look(const char *ready, const char *folder, struct stat *out)
{
    char path[8192];
    snprintf(path, sizeof(path), "%s%s%s", ready[0] == '/' ? "" : folder,
             ready[0] == '/' ? "" : "/", ready);
    return stat(path, out) == 0;
}

static bool same_time(struct timespec a, struct timespec b)
{
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

void dray__probe_begin(dray__probe *probe, const char *ready, const char *folder)
{
    *probe = (dray__probe){.fd = -1};
    probe->there = !is_url(ready) && look(ready, folder, &probe->before);
}

/* The file's time is not compared with the clock's: the clock may have been set since the start,
 * times of files are behind it by up to 10 ms, and those of another host's files are that host's.
 */
bool dray__probe_ask(dray__probe *probe, const char *ready, const char *folder)
{
    struct stat now;
    const struct stat *before = &probe->before;
    if (is_url(ready))
        return ask_url(probe, ready);
    return look(ready, folder, &now) &&
           (!probe->there || now.st_size != before->st_size ||
            !same_time(now.st_mtim, before->st_mtim) || !same_time(now.st_ctim, before->st_ctim));
}
