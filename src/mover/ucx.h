/* Bytes to another host through UCX: a connection between two processes that have found each other
 * over a socket already, and exchange each other's UCX addresses there. Each connection is a worker
 * and an endpoint of its own, so that closing one, by force, concerns no other; bytes go as active
 * messages, in order. Over TCP or RDMA, never UCX's shared memory, which does not notice a peer's
 * death. UCX encrypts nothing and asks nobody who he is: for trusted networks only.
 *
 * UCX is opened at run time. Nothing here waits for the other side, and nothing here has a deadline
 * of its own: a cut link or a stopped peer shows as silence, which is for the caller to time. */
#ifndef DRAY_MOVER_UCX_H
#define DRAY_MOVER_UCX_H

#include <dray/dray.h>

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct dray__ucx dray__ucx;

typedef struct dray__ucx_version {
    uint32_t major, minor, release;
} dray__ucx_version;

enum { DRAY__UCX_ADDRESS_MAX = 8 << 10 };

/* The library's version. DRAY_EUNSUPPORTED, with what to do: it is missing, or too old, or dray was
 * built without its headers. Looks for it once. */
int dray__ucx_find(dray__ucx_version *version, dray_error *error);
/* The transports that a connection would use: "tcp", "tcp,rc,ud,dc". */
const char *dray__ucx_transports(void);
/* Does this machine have RDMA devices? */
bool dray__ucx_has_rdma(void);

/* One end of a connection, on the network device that the connected socket `fd` uses. */
int dray__ucx_open(int fd, dray__ucx **out, dray_error *error);
void dray__ucx_close(dray__ucx *ucx); /* by force, whatever is under way; NULL is fine */

/* What the other side needs to know: the worker's address, and the number that its messages must
 * carry. */
const void *dray__ucx_address(const dray__ucx *ucx, size_t *size);
uint64_t dray__ucx_nonce(const dray__ucx *ucx);
/* Connects to the other side's. Once. */
int dray__ucx_connect(dray__ucx *ucx, const void *address, size_t size, uint64_t nonce,
                      dray_error *error);

/* As dray__stream_send and recv: how many bytes were taken, or came, or -errno; -EAGAIN: when
 * dray__ucx_fd is readable. */
ssize_t dray__ucx_send(dray__ucx *ucx, const void *data, size_t size);
ssize_t dray__ucx_recv(dray__ucx *ucx, void *data, size_t size);
int dray__ucx_flush(dray__ucx *ucx); /* 0: nothing is under way; -EAGAIN; -errno */
int dray__ucx_fd(const dray__ucx *ucx);
/* Something may have come that the descriptor will not show. */
bool dray__ucx_pending(const dray__ucx *ucx);

/* A test hook: pretends that another version was found; NULL: the true one. */
void dray__ucx_pretend(const dray__ucx_version *version);

#endif
