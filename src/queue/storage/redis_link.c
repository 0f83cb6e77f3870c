#ifdef DRAY_HIREDIS
#include "queue/storage/redis_link.h"

#include "base/clock.h"
#include "base/error.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define READ_BYTES (64u << 10)
#define WINDOW_BYTES (UINT64_C(8) << 20) /* of answers that the server may have to buffer */
#define WINDOW_COMMANDS 512u

enum { BROKEN = 1 }; /* commands that were not answered are sent again on another connection */

int dray__redis_link_init(dray__redis_link *link, const char *address, const char *password,
                          dray_error *error)
{
    *link = (dray__redis_link){.fd = -1, .password = password};
    int rc = dray__address_parse(address, &link->address, error);
    if (rc)
        return dray__fail_prefix(error, rc, "redis: ");
    link->text = strdup(address);
    return link->text ? DRAY_OK : dray__nomem(error);
}

static void disconnect(dray__redis_link *link)
{
    if (link->fd >= 0)
        close(link->fd);
    link->fd = -1;
    if (link->reader)
        redisReaderFree(link->reader);
    link->reader = NULL;
}

void dray__redis_link_free(dray__redis_link *link)
{
    disconnect(link);
    free(link->text);
}

void dray__redis_command_begin(dray__redis_command *command, const char *const *words,
                               uint32_t count, int64_t value_size)
{
    *command = (dray__redis_command){0};
    int at = snprintf(command->head, sizeof command->head, "*%u\r\n", count + (value_size >= 0));
    for (uint32_t i = 0; i < count; i++)
        at += snprintf(command->head + at, sizeof command->head - (size_t)at, "$%zu\r\n%s\r\n",
                       strlen(words[i]), words[i]);
    if (value_size >= 0)
        at += snprintf(command->head + at, sizeof command->head - (size_t)at, "$%lld\r\n",
                       (long long)value_size);
    command->head_size = (uint32_t)at;
}

/* ---- failures -------------------------------------------------------------------------------- */

static __attribute__((format(printf, 2, 3))) int broken(dray__redis_link *link, const char *format,
                                                        ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(link->why, sizeof link->why, format, arguments);
    va_end(arguments);
    disconnect(link);
    int64_t pause = DRAY__MILLISECOND * 10 << (link->failures < 7 ? link->failures : 7);
    link->failures++;
    link->retry_ns = dray__deadline(pause);
    return BROKEN;
}

static int late(dray__redis_link *link, dray_error *error)
{
    bool connected = link->fd >= 0;
    disconnect(link); /* answers to old commands may still arrive on it */
    if (connected)
        return dray__fail(error, DRAY_ETIMEDOUT, "redis at %s: it did not answer in time",
                          link->text);
    return dray__fail(error, DRAY_ETIMEDOUT, "redis at %s: not reached in time: %s", link->text,
                      link->why[0] ? link->why : "the deadline passed");
}

/* Handles an error of the server. */
static int refused(dray__redis_link *link, const char *text, dray_error *error)
{
    static const struct {
        const char *begins;
        int code;
        const char *means;
    } known[] = {
        {"LOADING", BROKEN, NULL}, /* it is loading its file, and answers soon */
        {"BUSY", BROKEN, NULL},
        {"OOM", DRAY_EFULL, "out of memory (raise maxmemory): "},
        {"NOAUTH", DRAY_EPERM,
         "a password is needed (set $DRAY_REDIS_PASSWORD_FILE or $DRAY_REDIS_PASSWORD): "},
        {"WRONGPASS", DRAY_EPERM, "wrong password: "},
        {"ERR invalid password", DRAY_EPERM, "wrong password: "},
        {"ERR AUTH", DRAY_EPERM, "no password expected, found one (unset it): "},
        {"ERR Client sent AUTH", DRAY_EPERM, "no password expected, found one (unset it): "},
        {"NOPERM", DRAY_EPERM, "not permitted: "},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strncmp(text, known[i].begins, strlen(known[i].begins)) != 0)
            continue;
        if (known[i].code == BROKEN)
            return broken(link, "%.150s", text);
        disconnect(link);
        return dray__fail(error, known[i].code, "redis at %s: %s%.200s", link->text, known[i].means,
                          text);
    }
    disconnect(link);
    return dray__fail(error, DRAY_ESYS, "redis at %s: %.300s", link->text, text);
}

/* ---- the pipeline ---------------------------------------------------------------------------- */

typedef struct pipeline {
    dray__redis_command *commands;
    uint32_t count, sent, done; /* sent: whole commands */
    size_t sent_bytes;          /* of the next one */
    uint64_t expected;          /* bytes of the answers to the sent commands */
} pipeline;

static bool may_send(const pipeline *p)
{
    if (p->sent == p->count)
        return false;
    if (p->sent_bytes || p->sent == p->done)
        return true;
    return p->sent - p->done < WINDOW_COMMANDS &&
           p->expected + p->commands[p->sent].bytes <= WINDOW_BYTES;
}

static size_t command_size(const dray__redis_command *command)
{
    size_t size = command->head_size;
    for (uint32_t i = 0; i < command->body_count; i++)
        size += command->body[i].iov_len;
    return size;
}

/* Collects the unsent rest of the next commands, as far as the window allows. */
static uint32_t gather(const pipeline *p, struct iovec *out, uint32_t capacity)
{
    uint32_t count = 0, at = p->sent;
    size_t skip = p->sent_bytes;
    uint64_t expected = p->expected;
    for (; at < p->count && count + 1 + DRAY__REDIS_BODY <= capacity; at++) {
        dray__redis_command *command = &p->commands[at];
        if (at != p->done && !(at == p->sent && p->sent_bytes) &&
            (at - p->done >= WINDOW_COMMANDS || expected + command->bytes > WINDOW_BYTES))
            break;
        expected += command->bytes;
        struct iovec parts[1 + DRAY__REDIS_BODY] = {{command->head, command->head_size}};
        memcpy(parts + 1, command->body, command->body_count * sizeof *parts);
        for (uint32_t i = 0; i <= command->body_count; i++) {
            size_t cut = skip < parts[i].iov_len ? skip : parts[i].iov_len;
            skip -= cut;
            if (parts[i].iov_len > cut)
                out[count++] =
                    (struct iovec){(char *)parts[i].iov_base + cut, parts[i].iov_len - cut};
        }
    }
    return count;
}

static int send_some(dray__redis_link *link, pipeline *p)
{
    struct iovec parts[128];
    struct msghdr message = {.msg_iov = parts};
    message.msg_iovlen = gather(p, parts, sizeof parts / sizeof *parts);
    ssize_t n = sendmsg(link->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : broken(link, "%s", strerror(errno));
    p->sent_bytes += (size_t)n;
    while (p->sent < p->count && p->sent_bytes >= command_size(&p->commands[p->sent])) {
        p->sent_bytes -= command_size(&p->commands[p->sent]);
        p->expected += p->commands[p->sent++].bytes;
    }
    return 0;
}

static int take(dray__redis_link *link, dray__redis_command *command, redisReply *reply,
                dray_error *error)
{
    link->failures = 0;
    if (reply->type == REDIS_REPLY_ERROR) {
        int rc = refused(link, reply->str, error);
        freeReplyObject(reply);
        return rc;
    }
    if (command->at) {
        bool whole = reply->type == REDIS_REPLY_STRING && (uint64_t)reply->len == command->bytes;
        command->lost = !whole;
        if (whole)
            memcpy(command->at, reply->str, command->bytes);
    }
    if (command->keep)
        command->reply = reply;
    else
        freeReplyObject(reply);
    return 0;
}

static int take_replies(dray__redis_link *link, pipeline *p, dray_error *error)
{
    for (;;) {
        void *reply = NULL;
        if (redisReaderGetReply(link->reader, &reply) != REDIS_OK) {
            char why[130];
            snprintf(why, sizeof why, "%s", link->reader->errstr);
            disconnect(link);
            return dray__fail(error, DRAY_EPROTO, "redis at %s: %s", link->text, why);
        }
        if (!reply)
            return 0;
        if (p->done == p->sent) {
            freeReplyObject(reply);
            disconnect(link);
            return dray__fail(error, DRAY_EPROTO, "redis at %s: an answer that nobody asked for",
                              link->text);
        }
        dray__redis_command *command = &p->commands[p->done];
        int rc = take(link, command, reply, error);
        if (rc)
            return rc;
        p->expected -= command->bytes;
        p->done++;
    }
}

static int receive_some(dray__redis_link *link, pipeline *p, dray_error *error)
{
    char bytes[READ_BYTES];
    ssize_t n = recv(link->fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : broken(link, "%s", strerror(errno));
    if (n == 0)
        return broken(link, "the server closed the connection");
    if (redisReaderFeed(link->reader, bytes, (size_t)n) != REDIS_OK) {
        disconnect(link);
        return dray__nomem(error);
    }
    return take_replies(link, p, error);
}

/* Sends and receives until everything is answered, the connection breaks, or the deadline passes.
 */
static int exchange(dray__redis_link *link, pipeline *p, int64_t deadline, dray_error *error)
{
    while (p->done < p->count) {
        struct pollfd ready = {.fd = link->fd, .events = POLLIN};
        if (may_send(p))
            ready.events |= POLLOUT;
        int n = dray__wait(&ready, 1, deadline);
        if (n < 0)
            return dray__fail_errno(error, errno, "poll");
        if (n == 0 || dray__now() >= deadline)
            return late(link, error);
        int rc = 0;
        if (n > 0 && (ready.revents & (POLLIN | POLLERR | POLLHUP)))
            rc = receive_some(link, p, error);
        if (!rc && n > 0 && (ready.revents & POLLOUT))
            rc = send_some(link, p);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

/* ---- connecting ------------------------------------------------------------------------------ */

static int open_socket(dray__redis_link *link, int64_t deadline, dray_error *error)
{
    const struct sockaddr *to = (const struct sockaddr *)&link->address.socket;
    link->fd = socket(to->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (link->fd < 0)
        return dray__fail_errno(error, errno, "socket");
    if (!link->address.local)
        dray__address_keep(link->fd);
    int failed = 0;
    socklen_t size = sizeof failed;
    if (connect(link->fd, to, link->address.size) < 0) {
        if (errno != EINPROGRESS)
            return broken(link, "%s", strerror(errno));
        struct pollfd ready = {.fd = link->fd, .events = POLLOUT};
        if (dray__wait(&ready, 1, deadline) <= 0)
            return late(link, error);
        if (getsockopt(link->fd, SOL_SOCKET, SO_ERROR, &failed, &size) < 0)
            failed = errno;
    }
    if (failed)
        return broken(link, "%s", strerror(failed));
    link->reader = redisReaderCreate();
    if (link->reader)
        return DRAY_OK;
    disconnect(link);
    return dray__nomem(error);
}

static int connect_once(dray__redis_link *link, int64_t deadline, dray_error *error)
{
    int rc = open_socket(link, deadline, error);
    if (rc || !link->password)
        return rc;
    static char end[] = "\r\n";
    dray__redis_command auth;
    dray__redis_command_begin(&auth, (const char *const[]){"AUTH"}, 1,
                              (int64_t)strlen(link->password));
    auth.body[auth.body_count++] =
        (struct iovec){(char *)(uintptr_t)link->password, strlen(link->password)};
    auth.body[auth.body_count++] = (struct iovec){end, 2};
    pipeline p = {.commands = &auth, .count = 1};
    return exchange(link, &p, deadline, error);
}

/* Waits until it is time to try again. */
static int pause_before(dray__redis_link *link, int64_t deadline, dray_error *error)
{
    if (dray__now() >= link->retry_ns)
        return DRAY_OK;
    if (link->retry_ns >= deadline)
        return late(link, error);
    poll(NULL, 0, dray__left_ms(link->retry_ns));
    return DRAY_OK;
}

int dray__redis_run(dray__redis_link *link, dray__redis_command *commands, uint32_t count,
                    int64_t deadline, dray_error *error)
{
    pipeline p = {.commands = commands, .count = count};
    while (p.done < p.count) {
        int rc = DRAY_OK;
        if (link->fd < 0) {
            p.sent = p.done; /* commands without an answer are sent again */
            p.sent_bytes = p.expected = 0;
            rc = pause_before(link, deadline, error);
            if (!rc)
                rc = connect_once(link, deadline, error);
        }
        if (!rc)
            rc = exchange(link, &p, deadline, error);
        if (rc && rc != BROKEN)
            return rc;
    }
    return DRAY_OK;
}
#else
typedef int dray__no_redis_link; /* ISO C forbids an empty file */
#endif
