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

/* Would one-sided reads be of use: where there is RDMA, or $DRAY_UCX_READS says "always"; "never":
 * not. "always" without RDMA is for tests: over TCP UCX only emulates reads, the process that is
 * read works for each of them at whatever address it is told, and UCX 1.13 ends it (abort) when a
 * reader is gone in the middle of one. */
bool dray__ucx_wants_reads(void);

/* One end of a connection, on the network device that the connected socket `fd` uses. reads: for
 * one-sided reads, too; both sides must say the same. */
int dray__ucx_open(int fd, bool reads, dray__ucx **out, dray_error *error);
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

/* ---- one-sided reads (ucx_reads.c): memory that its owner registered, read without him. */

/* Memory registered for the connections that share this one's devices; unmapped by any thread, also
 * after the connection was closed. remote: that the other side may read; else one that reads land
 * in. */
typedef struct dray__ucx_memory dray__ucx_memory;
int dray__ucx_map(const dray__ucx *ucx, void *base, size_t bytes, bool remote,
                  dray__ucx_memory **out, dray_error *error);
void dray__ucx_unmap(dray__ucx_memory *memory); /* NULL is fine */
/* What the other side needs to read it, in `*out`, which the caller frees. */
int dray__ucx_pack_key(const dray__ucx_memory *memory, void **out, size_t *size, dray_error *error);

/* Such a key, for use on this connection; the connection's, until it is closed or forgets all. */
typedef struct dray__ucx_key dray__ucx_key;
int dray__ucx_unpack_key(dray__ucx *ucx, const void *packed, size_t size, dray__ucx_key **out,
                         dray_error *error);
void dray__ucx_forget_keys(dray__ucx *ucx); /* while no read is under way */

/* Reads that belong together. Stays where it is until none is pending, or the connection closed. */
typedef struct dray__ucx_reads {
    uint32_t pending;
    bool failed;
} dray__ucx_reads;
/* Begins to read the other side's memory at `address` into `at`, which lies in `into`. */
int dray__ucx_get(dray__ucx *ucx, const dray__ucx_key *key, uint64_t address,
                  const dray__ucx_memory *into, void *at, size_t bytes, dray__ucx_reads *reads,
                  dray_error *error);
/* Lets it work: 0: none is pending; -EAGAIN; -errno. */
int dray__ucx_read(dray__ucx *ucx, const dray__ucx_reads *reads);

/* A test hook: pretends that another version was found; NULL: the true one. */
void dray__ucx_pretend(const dray__ucx_version *version);

#endif
