/* Where a coordinator listens: "unix:/path" or "tcp:127.0.0.1:port". */
#ifndef DRAY_CONTROL_ADDRESS_H
#define DRAY_CONTROL_ADDRESS_H

#include <dray/dray.h>
#include <stdbool.h>
#include <sys/socket.h>

typedef struct dray__address {
    struct sockaddr_storage socket;
    socklen_t size;
    bool local; /* a Unix socket */
} dray__address;

/* DRAY_EINVALID: not an address; DRAY_EUNSUPPORTED: TCP beyond this machine. */
int dray__address_parse(const char *text, dray__address *out, dray_error *error);

/* Called between bind and listen: nobody can connect before what it does is done. */
typedef int (*dray__bound_fn)(void *user, int fd, dray_error *error);
/* A listening socket, non-blocking and close-on-exec. A Unix socket has mode 0600; a file that a
 * dead server left is replaced, a live server is DRAY_EBUSY. bound may be NULL. */
int dray__address_listen(const dray__address *address, const char *text, dray__bound_fn bound,
                         void *user, int *out, dray_error *error);
/* One attempt. DRAY_ECLOSED: nobody listens there; DRAY_ETIMEDOUT; DRAY_EPERM: a Unix socket at
 * which another user listens. The socket is non-blocking. */
int dray__address_connect(const dray__address *address, const char *text, int64_t deadline_ns,
                          int *out, dray_error *error);

#endif
