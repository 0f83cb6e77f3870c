/* Network namespaces as hosts, and the rate of TCP between them (bench_hosts.h). */
#include "bench/weights/bench_hosts.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BUFFER = 1 << 20, TRIES = 40, ADDRESS = INET_ADDRSTRLEN };

void bench_hosts_check(bench *b, char *const *hosts, uint32_t count)
{
    char path[PATH_MAX];
    for (uint32_t i = 0; i < count; i++) {
        snprintf(path, sizeof path, "/run/netns/%s", hosts[i]);
        bool fits = hosts[i][0] && !strchr(hosts[i], '/');
        if (!fits || (hosts[i][0] != '~' && access(path, F_OK)))
            bench_refuse(b,
                         "no network namespace '%s' (see: ip netns list; make one: ip netns add "
                         "%s); @~NAME is this machine's own network under another name",
                         hosts[i], hosts[i]);
    }
}

/* Sets `out` to the first address that other hosts can reach, or to that of loopback when there is
 * none. */
static void own_address(char *out)
{
    struct ifaddrs *list = NULL;
    strcpy(out, "127.0.0.1");
    if (getifaddrs(&list))
        return;
    for (const struct ifaddrs *i = list; i; i = i->ifa_next)
        if (i->ifa_addr && i->ifa_addr->sa_family == AF_INET && (i->ifa_flags & IFF_UP) &&
            !(i->ifa_flags & IFF_LOOPBACK)) {
            const struct sockaddr_in *in = (const void *)i->ifa_addr;
            inet_ntop(AF_INET, &in->sin_addr, out, ADDRESS);
            break;
        }
    freeifaddrs(list);
}

static bool real(const char *host)
{
    return host && host[0] != '~';
}

/* Mounts /sys anew, in a mount namespace of this process. UCX finds network devices there, and a
 * mount shows the devices of the network namespace in which it was made. */
static void show_devices(void)
{
    if (unshare(CLONE_NEWNS) == 0 && mount("", "/", NULL, MS_REC | MS_SLAVE, NULL) == 0)
        mount("sysfs", "/sys", "sysfs", 0, NULL);
}

bool bench_host_enter(const char *host)
{
    char path[PATH_MAX], address[ADDRESS] = "127.0.0.1";
    if (real(host)) {
        snprintf(path, sizeof path, "/run/netns/%s", host);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        bool entered = fd >= 0 && setns(fd, CLONE_NEWNET) == 0;
        int errnum = errno;
        if (fd >= 0)
            close(fd);
        errno = errnum;
        if (!entered)
            return false;
        own_address(address);
        show_devices();
    }
    if (host)
        setenv("DRAY_DATA_ADDRESS", address, 0);
    return true;
}

/* ---- processes ------------------------------------------------------------------------------- */

/* Runs `body` in a child on a host. *from is the read end of a pipe, to which `body` writes. */
static pid_t start(bench *b, const char *host, int *from, void (*body)(int out, const char *text),
                   const char *text)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC))
        bench_die(b, "pipe: %s", strerror(errno));
    pid_t pid = bench_fork(b);
    if (pid == 0) {
        close(ends[0]);
        if (bench_host_enter(host))
            body(ends[1], text);
        _exit(0);
    }
    close(ends[1]);
    *from = ends[0];
    return pid;
}

/* Reads everything that a child wrote, terminates it, and waits for the child's end. Returns its
 * length. */
static size_t finish(pid_t pid, int from, char *out, size_t capacity)
{
    size_t used = 0;
    for (ssize_t n; used + 1 < capacity && (n = read(from, out + used, capacity - used - 1)) > 0;)
        used += (size_t)n;
    out[used] = 0;
    close(from);
    waitpid(pid, NULL, 0);
    return used;
}

/* ---- a pair of sockets ----------------------------------------------------------------------- */

/* Writes "ADDRESS PORT" to `out`, and then sends as many bytes as `text` says to the first
 * connection. */
static void send_bytes(int out, const char *text)
{
    static char buffer[BUFFER];
    char address[ADDRESS];
    struct sockaddr_in in = {.sin_family = AF_INET};
    socklen_t size = sizeof in;
    const char *own = getenv("DRAY_DATA_ADDRESS");
    snprintf(address, sizeof address, "%s", own ? own : "127.0.0.1");
    inet_pton(AF_INET, address, &in.sin_addr);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&in, sizeof in) || listen(listener, 1) ||
        getsockname(listener, (struct sockaddr *)&in, &size))
        return;
    dprintf(out, "%s %u", address, ntohs(in.sin_port));
    close(out);
    int fd = accept(listener, NULL, NULL);
    for (double left = strtod(text, NULL); left > 0;) {
        ssize_t n = send(fd, buffer, left < BUFFER ? (size_t)left : BUFFER, MSG_NOSIGNAL);
        if (n <= 0)
            return;
        left -= (double)n;
    }
}

/* Reads from "ADDRESS PORT" until the connection ends, and writes the bytes/s to `out`. */
static void receive_bytes(int out, const char *text)
{
    static char buffer[BUFFER];
    char address[ADDRESS];
    unsigned port;
    struct sockaddr_in in = {.sin_family = AF_INET};
    double bytes = 0;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (sscanf(text, "%15s %u", address, &port) != 2)
        return;
    inet_pton(AF_INET, address, &in.sin_addr);
    in.sin_port = htons((uint16_t)port);
    if (connect(fd, (struct sockaddr *)&in, sizeof in))
        return;
    double begin = bench_now();
    for (ssize_t n; (n = recv(fd, buffer, sizeof buffer, 0)) > 0;)
        bytes += (double)n;
    dprintf(out, "%f", bytes / (bench_now() - begin));
}

static double plain_rate(bench *b, const char *from, const char *to, double bytes)
{
    char text[64], where[64] = "", rate[64];
    int out, in;
    snprintf(text, sizeof text, "%.0f", bytes);
    pid_t sender = start(b, from, &out, send_bytes, text);
    ssize_t n = read(out, where, sizeof where - 1);
    if (n <= 0)
        bench_die(b, "no connection from %s", from);
    pid_t receiver = start(b, to, &in, receive_bytes, where);
    finish(receiver, in, rate, sizeof rate);
    finish(sender, out, where, sizeof where);
    if (strtod(rate, NULL) <= 0)
        bench_die(b, "no connection from %s to %s", from, to);
    return strtod(rate, NULL);
}

/* ---- iperf3 ---------------------------------------------------------------------------------- */

static void say_address(int out, const char *text)
{
    (void)text;
    dprintf(out, "%s", getenv("DRAY_DATA_ADDRESS"));
}

static void run_server(int out, const char *port)
{
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    execlp("iperf3", "iperf3", "-s", "-1", "-p", port, (char *)NULL);
}

static void run_client(int out, const char *where)
{
    char address[ADDRESS], port[16];
    if (sscanf(where, "%15s %15s", address, port) != 2)
        return;
    dup2(out, STDOUT_FILENO);
    execlp("iperf3", "iperf3", "-c", address, "-p", port, "-t", "1", "-J", (char *)NULL);
}

/* Returns bytes/s; 0 when iperf3 is not installed or did not work. */
static double iperf_rate(bench *b, const char *from, const char *to)
{
    static char text[1 << 16];
    char address[64], port[16], where[96];
    double rate = 0;
    int in, server_in;
    snprintf(port, sizeof port, "%d", 20000 + (int)(getpid() % 10000));
    pid_t pid = start(b, to, &in, say_address, NULL);
    finish(pid, in, address, sizeof address);
    pid_t server = start(b, to, &server_in, run_server, port);
    snprintf(where, sizeof where, "%s %s", address, port);
    for (int i = 0; i < TRIES && rate <= 0 && waitpid(server, NULL, WNOHANG) == 0; i++) {
        usleep(50000);
        pid = start(b, from, &in, run_client, where);
        finish(pid, in, text, sizeof text);
        json_t *report = json_loads(text, 0, NULL);
        json_t *received = json_object_get(json_object_get(report, "end"), "sum_received");
        rate = json_number_value(json_object_get(received, "bits_per_second")) / 8;
        json_decref(report);
    }
    kill(server, SIGTERM);
    finish(server, server_in, text, sizeof text);
    return rate;
}

double bench_hosts_rate(bench *b, const char *from, const char *to, double bytes, const char **how)
{
    double rate = real(from) && real(to) ? iperf_rate(b, from, to) : 0;
    *how = rate > 0 ? "iperf3" : "a TCP connection";
    return rate > 0 ? rate : plain_rate(b, from, to, bytes);
}
