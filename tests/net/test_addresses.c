/* Tests where data servers may listen, and from where they accept unencrypted connections. A list
 * with an invalid address is refused as a whole. */
#include "control/context.h"
#include "net/carrier.h"
#include "suite.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

TEST(addresses_are_taken_whole)
{
    static const char *const good[] = {"127.0.0.1", "127.0.0.1:0"};
    static const char *const bad[] = {"",           "localhost",  "127.0.0.1:x", "127.0.0.1:70000",
                                      "127.0.0.1:", "[::1]7000",  "[::1]x:7000", "[::1",
                                      "::1]:7000",  "[127.0.0.1", "[]:7000"};
    char endpoint[DRAY__STREAM_ADDRESS];
    dray_error e;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        int fd;
        assert_int_equal(dray__stream_listen(good[i], endpoint, &fd, &e), DRAY_OK);
        assert_memory_equal(endpoint, "tcp:127.0.0.1:", 14);
        close(fd);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int fd = -1, rc = dray__stream_listen(bad[i], endpoint, &fd, &e);
        if (rc != DRAY_EINVALID || fd >= 0)
            fail_msg("'%s': %s at %s", bad[i], dray_error_name(rc), rc ? "-" : endpoint);
    }
}

/* ---- who may come unencrypted ---------------------------------------------------------------- */

static const dray__tls_key key = {.identity = "dray1.0123456789abcdef.data", .bytes = {7}};

/* An IPv4 address of this host that is not its loopback's, from which it reaches itself. */
static bool find_own_address(char out[INET_ADDRSTRLEN])
{
    struct ifaddrs *all = NULL;
    bool found = false;
    if (getifaddrs(&all))
        return false;
    for (const struct ifaddrs *a = all; a && !found; a = a->ifa_next)
        found =
            a->ifa_addr && a->ifa_addr->sa_family == AF_INET && a->ifa_flags & IFF_UP &&
            !(a->ifa_flags & IFF_LOOPBACK) &&
            inet_ntop(AF_INET, &((const struct sockaddr_in *)(const void *)a->ifa_addr)->sin_addr,
                      out, INET_ADDRSTRLEN);
    freeifaddrs(all);
    return found;
}

/* What a server with these keys makes of a peer at `host` whose first byte this is: 1: it was read;
 * else what dray__stream_recv returned. */
static int takes(const char *host, const dray__stream_keys *keys, char first)
{
    char endpoint[DRAY__STREAM_ADDRESS], byte = 0;
    dray_error e;
    int listener;
    assert_int_equal(dray__stream_listen(host, endpoint, &listener, &e), DRAY_OK);
    struct sockaddr_in at = {.sin_family = AF_INET};
    assert_int_equal(inet_pton(AF_INET, host, &at.sin_addr), 1);
    at.sin_port = htons((uint16_t)strtoul(strrchr(endpoint, ':') + 1, NULL, 10));
    int peer = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(peer, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(send(peer, &first, 1, 0), 1);
    dray__stream *stream;
    struct pollfd p = {.fd = listener, .events = POLLIN};
    assert_int_equal(poll(&p, 1, 20000), 1);
    assert_int_equal(dray__stream_accept(listener, keys, &stream, &e), DRAY_OK);
    p.fd = dray__stream_fd(stream);
    assert_int_equal(poll(&p, 1, 20000), 1);
    int came = (int)dray__stream_recv(stream, &byte, 1);
    dray__stream_close(stream);
    close(peer);
    close(listener);
    return came;
}

TEST(plain_connections_come_from_trusted_networks_alone)
{
    char own[INET_ADDRSTRLEN];
    if (!find_own_address(own))
        skip(); /* this host has no network */
    dray__networks none = {.count = 0}, here;
    assert_int_equal(dray__networks_parse(own, &here, NULL), DRAY_OK);
    const dray__stream_keys strict = {.key = &key, .trusted = &none},
                            trusting = {.key = &key, .trusted = &here},
                            always = {.key = &key, .trusted = &here, .always = true};
    enum { PLAIN = 'D', TLS = 0x16 };
    assert_int_equal(takes(own, &strict, PLAIN), -EPERM);
    assert_int_equal(takes(own, &strict, TLS), -EAGAIN); /* a handshake, which goes on */
    assert_int_equal(takes(own, &trusting, PLAIN), 1);
    assert_int_equal(takes(own, &trusting, TLS), -EAGAIN);
    assert_int_equal(takes(own, &always, PLAIN), -EPERM);
    assert_int_equal(takes("127.0.0.1", &strict, PLAIN), 1); /* nobody else is there */
    assert_int_equal(takes("127.0.0.1", &always, PLAIN), -EPERM);
}

/* The other end: it does not begin to speak in the clear, either. */
TEST(nobody_connects_unencrypted_elsewhere)
{
    dray__networks none = {.count = 0}, there;
    assert_int_equal(dray__networks_parse("192.0.2.0/24", &there, NULL), DRAY_OK);
    const dray__tls_key nothing = {.identity = ""};
    const struct {
        dray__stream_keys keys;
        bool encrypts;
    } cases[] = {{{.key = &key, .trusted = &none}, true},
                 {{.key = &key, .trusted = &there}, false},
                 {{.key = &key, .trusted = &there, .always = true}, true}};
    dray__stream *stream;
    dray_error e;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int rc = dray__stream_connect("tcp:192.0.2.1:9", &cases[i].keys, 0, &stream, &e);
        if (rc == DRAY_ESYS)
            skip(); /* this host has no network */
        assert_int_equal(rc, DRAY_OK);
        assert_int_equal(dray__stream_encrypts(stream), cases[i].encrypts);
        dray__stream_close(stream);
    }
    const dray__stream_keys without = {.key = &nothing, .trusted = &none};
    assert_int_equal(dray__stream_connect("tcp:192.0.2.1:9", &without, 0, &stream, &e), DRAY_EPERM);
}

/* ---- a port at which nobody listens ------------------------------------------------------------
 */

/* A network of this process's own, whose sockets all get this port. */
static bool one_port(uint16_t port)
{
    if (unshare(CLONE_NEWNET) && unshare(CLONE_NEWUSER | CLONE_NEWNET))
        return false;
    struct ifreq loopback = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool up = fd >= 0 && ioctl(fd, SIOCSIFFLAGS, &loopback) == 0;
    close(fd);
    FILE *range = fopen("/proc/sys/net/ipv4/ip_local_port_range", "we");
    bool set = range && fprintf(range, "%u %u", port, port) > 0;
    if (range)
        set = fclose(range) == 0 && set;
    return up && set;
}

/* Returns the errno with which a connection to the port fails; 0 when it is ready; 77 when this
 * machine has no networks for tests. */
static int connects_to_itself(void)
{
    enum { PORT = 40000 };
    dray__networks none = {.count = 0};
    const dray__stream_keys keys = {.key = &key, .trusted = &none};
    dray__stream *stream;
    dray_error e = {0};
    if (!one_port(PORT))
        return 77;
    if (dray__stream_connect("tcp:127.0.0.1:40000", &keys, 0, &stream, &e))
        return (int)e.raw;
    struct pollfd p = {.fd = dray__stream_fd(stream), .events = POLLOUT};
    poll(&p, 1, 20000);
    int rc = dray__stream_ready(stream, &e);
    dray__stream_close(stream);
    return rc ? (int)e.raw : 0;
}

TEST(nobody_is_connected_to_itself)
{
    fflush(NULL);
    pid_t child = fork();
    if (child == 0)
        _exit(connects_to_itself());
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        skip();
    assert_int_equal(WEXITSTATUS(status), ECONNREFUSED);
}

/* Of a server that is told how fast it may send. Connections without a limit have the greatest. */
TEST(accepted_connections_send_as_fast_as_they_may)
{
    const uint64_t rates[] = {0, 65536, (uint64_t)10 << 30};
    for (size_t i = 0; i < sizeof rates / sizeof *rates; i++) {
        const dray__stream_keys keys = {.key = &key, .rate = rates[i]};
        char endpoint[DRAY__STREAM_ADDRESS];
        int listener;
        dray__stream *reader, *server = NULL;
        uint64_t found = 1;
        socklen_t size = sizeof found;
        assert_int_equal(dray__stream_listen("127.0.0.1", endpoint, &listener, NULL), DRAY_OK);
        assert_int_equal(dray__stream_connect(endpoint, &keys, 0, &reader, NULL), DRAY_OK);
        struct pollfd p = {.fd = listener, .events = POLLIN};
        assert_int_equal(poll(&p, 1, 20000), 1);
        assert_int_equal(dray__stream_accept(listener, &keys, &server, NULL), DRAY_OK);
        assert_int_equal(getsockopt(server->socket, SOL_SOCKET, SO_MAX_PACING_RATE, &found, &size),
                         0);
        assert_true(found == (rates[i] ? rates[i] : UINT64_MAX));
        dray__stream_close(server);
        dray__stream_close(reader);
        close(listener);
    }
}

TEST(rates_are_numbers_of_bytes)
{
    static const struct {
        const char *text;
        uint64_t rate; /* 0: refused */
    } cases[] = {{"65536", 65536}, {"1000000000", 1000000000},     {"65535", 0}, {"-70000", 0},
                 {"1e9", 0},       {"99999999999999999999999", 0}, {"fast", 0}};
    uint64_t rate = 1;
    unsetenv("DRAY_DATA_RATE");
    assert_int_equal(dray__data_rate(&rate, NULL), DRAY_OK);
    assert_true(rate == 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        dray_error e = {0};
        setenv("DRAY_DATA_RATE", cases[i].text, 1);
        int rc = dray__data_rate(&rate, &e);
        assert_int_equal(rc, cases[i].rate ? DRAY_OK : DRAY_EINVALID);
        assert_true(rate == cases[i].rate);
        if (rc)
            assert_non_null(strstr(e.message, cases[i].text));
    }
    unsetenv("DRAY_DATA_RATE");
}

SUITE(NULL, NULL)
