/* Forks beside a thread that connects, and while a server begins to listen. */
#include "base/clock.h"
#include "net/address.h"
#include "suite.h"

#include <arpa/inet.h>
#include <dray/dray.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

/* Asks by the names in /proc: asking for the state of a descriptor would race with the thread that
 * makes it. */
static int count_sockets(void)
{
    int count = 0;
    char path[32], name[16];
    for (int fd = 0; fd < 256; fd++) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t size = readlink(path, name, sizeof name);
        count += size > 7 && memcmp(name, "socket:", 7) == 0;
    }
    return count;
}

static void *open_in_vain(void *user)
{
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = user;
    options.timeout_ns = 3 * DRAY__SECOND;
    dray_context *context = NULL;
    int rc = dray_open(&options, &context, NULL);
    dray_close(context);
    return (void *)(intptr_t)rc;
}

/* A child that is forked while another thread connects has no copy of that thread's socket, which
 * would hide its parent's death. */
TEST(test_fork_while_connecting)
{
    enum { CALLERS = 4 };
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof to;
    int callers[CALLERS], listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&to, sizeof to), 0);
    assert_int_equal(listen(listener, 0), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&to, &size), 0);
    for (int i = 0; i < CALLERS; i++) { /* the listener takes no more, and never accepts one */
        callers[i] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        connect(callers[i], (struct sockaddr *)&to, sizeof to);
    }
    char address[64];
    snprintf(address, sizeof address, "tcp:127.0.0.1:%d", ntohs(to.sin_port));
    int before = count_sockets(), status = 0;
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, open_in_vain, address), 0);
    for (int i = 0; i < 1000 && count_sockets() == before; i++)
        poll(NULL, 0, 1);
    assert_int_equal(count_sockets(), before + 1);
    pid_t child = fork();
    if (child == 0)
        _exit(count_sockets() == before ? 0 : 1);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    void *rc;
    pthread_join(thread, &rc);
    assert_int_equal((intptr_t)rc, DRAY_ETIMEDOUT);
    assert_int_equal(count_sockets(), before);
    for (int i = 0; i < CALLERS; i++)
        close(callers[i]);
    close(listener);
}

static int fork_here(void *user, int fd, dray_error *error)
{
    (void)fd, (void)error;
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pause();
        _exit(0);
    }
    *(pid_t *)user = child;
    return DRAY_OK;
}

/* A child that was forked while the folder was locked does not keep it locked. */
TEST(test_fork_while_listening)
{
    char folder[] = "/tmp/dray-forks-XXXXXX", text[80];
    pid_t child = 0;
    int fds[2];
    assert_non_null(mkdtemp(folder));
    for (int i = 0; i < 2; i++) {
        dray__address address;
        snprintf(text, sizeof text, "unix:%s/%d", folder, i);
        assert_int_equal(dray__address_parse(text, &address, NULL), 0);
        int64_t begin = dray__now();
        assert_int_equal(
            dray__address_listen(&address, text, i ? NULL : fork_here, &child, &fds[i], NULL), 0);
        assert_true(dray__now() - begin < 4 * DRAY__SECOND);
    }
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
    for (int i = 0; i < 2; i++) {
        close(fds[i]);
        snprintf(text, sizeof text, "%s/%d", folder, i);
        assert_int_equal(unlink(text), 0);
    }
    assert_int_equal(rmdir(folder), 0);
}

SUITE(NULL, NULL)
