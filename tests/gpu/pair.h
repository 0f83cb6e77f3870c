/* Runs tests of GPU memory in processes of their own, because a process that called the driver must
 * not fork. A body reports an error with CHECK, which ends its process. Two bodies exchange
 * messages over link_fd. */
#pragma once

#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "suite.h"

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

static int link_fd; /* a child's end of the socket pair */

static inline pid_t begin(void (*body)(void), int fd)
{
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(60);
        link_fd = fd;
        body();
        fflush(NULL);
        exit(0);
    }
    return child;
}

static inline void end(pid_t child)
{
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

static inline void alone(void (*body)(void))
{
    end(begin(body, -1));
}

static inline void together(void (*first)(void), void (*second)(void))
{
    int line[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, line), 0);
    pid_t a = begin(first, line[0]), b = begin(second, line[1]);
    close(line[0]);
    close(line[1]);
    end(b);
    kill(a, SIGKILL); /* it may wait for this */
    waitpid(a, NULL, 0);
}

static inline void tell(const void *data, size_t size, int fd)
{
    char room[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec part = {(void *)(uintptr_t)data, size};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        m.msg_control = room;
        m.msg_controllen = sizeof room;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    CHECK(sendmsg(link_fd, &m, 0) == (ssize_t)size);
}

static inline int hear(void *data, size_t size)
{
    char room[CMSG_SPACE(sizeof(int))];
    struct iovec part = {data, size};
    struct msghdr m = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    CHECK(recvmsg(link_fd, &m, 0) == (ssize_t)size);
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    int fd = -1;
    if (c)
        memcpy(&fd, CMSG_DATA(c), sizeof fd);
    return fd;
}
