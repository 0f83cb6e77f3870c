/* The address at which a coordinator or a data server listens: "unix:/path", "tcp:HOST:PORT" or
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

/* A TCP connection without acknowledgements, or without an answer to the kernel's keepalive, for
 * this time is broken, and a session on it ends. */
enum { DRAY__LEASE_SECONDS = 10 };

/* Parses an address. Names of hosts are looked up, which may take as long as the resolver takes.
 * Returns 0, DRAY_EINVALID when it is not an address, or DRAY_ENOENT when there is no host of that
 * name. */
int dray__address_parse(const char *text, dray__address *out, dray_error *error);
/* Parses a data server's address: "10.0.0.1", "10.0.0.1:7000" or "[::1]:7000", numbers alone. Port
 * 0 or none means any. Returns 0, or DRAY_EINVALID. */
int dray__address_parse_data(const char *text, dray__address *out, dray_error *error);
/* Gets the host part of a network address: "10.0.0.1", "fd00::1". Returns false for other kinds of
 * address. port may be NULL. */
bool dray__address_host(const struct sockaddr_storage *address, char *out, size_t size,
                        uint16_t *port);

/* Called between bind and listen, so that no client can connect before it has returned. */
typedef int (*dray__bound_fn)(void *user, int fd, dray_error *error);
/* Opens a listening socket, non-blocking and close-on-exec. A Unix socket has mode 0600. The file
 * of a dead server is replaced; when a server still listens, it returns DRAY_EBUSY. bound may be
 * NULL. */
int dray__address_listen(const dray__address *address, const char *text, dray__bound_fn bound,
                         void *user, int *out, dray_error *error);
/* Sets the options of a TCP socket: no delay, and the timeouts of DRAY__LEASE_SECONDS. */
void dray__address_keep(int fd);
/* Begins to connect. The socket is non-blocking; it is writable when it is connected. */
int dray__address_begin(const dray__address *address, const char *text, int *out,
                        dray_error *error);
/* Returns whether the socket is connected to itself. That happens when a TCP socket connects to an
 * unused port of the ephemeral range. */
bool dray__address_met_itself(int fd);
/* Makes one attempt to connect. The socket is non-blocking. Returns 0, DRAY_ECLOSED when no server
 * listens, DRAY_ETIMEDOUT when there is no answer, or no route to the host, or DRAY_EPERM for a
 * Unix socket at which another user listens. */
int dray__address_connect(const dray__address *address, const char *text, int64_t deadline_ns,
                          int *out, dray_error *error);
/* The same in two steps, for a caller who must know the socket while it connects. The caller closes
 * it, also when connecting fails. */
int dray__address_socket(const dray__address *address, const char *text, int *out,
                         dray_error *error);
int dray__address_connect_on(int fd, const dray__address *address, const char *text,
                             int64_t deadline_ns, dray_error *error);
