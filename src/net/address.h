/* Where a coordinator or a data server listens: "unix:/path", "tcp:HOST:PORT" or
 * "tcp:[IPV6]:PORT". */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <sys/socket.h>

typedef struct dray__address {
    struct sockaddr_storage socket;
    socklen_t size;
    bool local; /* a Unix socket */
} dray__address;

/* A link of TCP that is silent for so long is broken, and a session on it over: nothing was
 * acknowledged, or no answer came to what the kernel asks (keepalive). */
enum { DRAY__LEASE_SECONDS = 10 };

/* DRAY_EINVALID: not an address; DRAY_ENOENT: no host of that name. Names of hosts are looked up,
 * which may take as long as the resolver wants. */
int dray__address_parse(const char *text, dray__address *out, dray_error *error);
/* Of a data server: "10.0.0.1", "10.0.0.1:7000" or "[::1]:7000", numbers alone; port 0 or none:
 * any. DRAY_EINVALID. */
int dray__address_parse_data(const char *text, dray__address *out, dray_error *error);
/* The host part of a network's address: "10.0.0.1", "fd00::1". false: it is of no network. port:
 * may be NULL. */
bool dray__address_host(const struct sockaddr_storage *address, char *out, size_t size,
                        uint16_t *port);

/* Called between bind and listen: nobody can connect before what it does is done. */
typedef int (*dray__bound_fn)(void *user, int fd, dray_error *error);
/* A listening socket, non-blocking and close-on-exec. A Unix socket has mode 0600; a file that a
 * dead server left is replaced, a live server is DRAY_EBUSY. bound may be NULL. */
int dray__address_listen(const dray__address *address, const char *text, dray__bound_fn bound,
                         void *user, int *out, dray_error *error);
/* Options of a TCP socket: no delay, and the lease. */
void dray__address_keep(int fd);
/* Begins to connect. The socket is non-blocking; it is writable when it is connected. */
int dray__address_begin(const dray__address *address, const char *text, int *out,
                        dray_error *error);
/* One attempt. DRAY_ECLOSED: nobody listens there; DRAY_ETIMEDOUT: no answer, or no network to it;
 * DRAY_EPERM: a Unix socket at which another user listens. The socket is non-blocking. */
int dray__address_connect(const dray__address *address, const char *text, int64_t deadline_ns,
                          int *out, dray_error *error);
