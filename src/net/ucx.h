/* The declarations that the files of UCX's carrier share: ucx.c, which agrees with the other side
 * and is the carrier, ucx_endpoint.c, the bytes and one-sided reads of one connection, and
 * ucx_library.c, the library. It is opened at run time: its headers are for types only. A build
 * without them has ucx.c alone, which refuses.
 *
 * A connection is between two processes that have found each other over a socket already, and
 * exchange each other's UCX addresses there. Each has a worker and an endpoint of its own, so that
 * closing one by force does not affect others. Bytes are sent as active messages, in order, over
 * TCP or RDMA, never over UCX's shared memory, which does not notice a peer's death. UCX neither
 * encrypts nor authenticates, so it is for trusted networks only. Nothing here has a deadline of
 * its own. A cut connection or a stopped peer is only silent, so the caller must time it. */
#pragma once

#include "base/wire.h"
#include "net/carrier.h"

typedef struct dray__ucx_version {
    uint32_t major, minor, release;
} dray__ucx_version;

enum { DRAY__UCX_ADDRESS_MAX = 8 << 10, DRAY__UCX_RANDOM = 16 };

/* The messages over the socket (ucx.c). */
typedef struct dray__ucx_header {
    uint32_t magic;
    int32_t status;
    uint32_t size;
} dray__ucx_header;

typedef struct dray__ucx_greeting {
    uint8_t random[DRAY__UCX_RANDOM], reads;
} dray__ucx_greeting;

extern const dray__fields dray__ucx_header_fields, dray__ucx_greeting_fields,
    dray__ucx_version_fields;

extern const dray__carrier dray__carrier_ucx_reads, dray__carrier_ucx;

/* A test hook that pretends that another version was found; NULL means the true version. */
void dray__ucx_pretend(const dray__ucx_version *version);

#ifdef DRAY_HAVE_UCX
#include <ucp/api/ucp.h>

/* ---- ucx_library.c */

#define DRAY__UCX_FUNCTIONS(XX)                                                                    \
    XX(ucp_get_version)                                                                            \
    XX(ucp_config_read)                                                                            \
    XX(ucp_config_modify)                                                                          \
    XX(ucp_config_release)                                                                         \
    XX(ucp_init_version)                                                                           \
    XX(ucp_cleanup)                                                                                \
    XX(ucp_worker_create)                                                                          \
    XX(ucp_worker_destroy)                                                                         \
    XX(ucp_worker_get_address)                                                                     \
    XX(ucp_worker_release_address)                                                                 \
    XX(ucp_worker_get_efd)                                                                         \
    XX(ucp_worker_arm)                                                                             \
    XX(ucp_worker_progress)                                                                        \
    XX(ucp_worker_set_am_recv_handler)                                                             \
    XX(ucp_ep_create)                                                                              \
    XX(ucp_ep_close_nbx)                                                                           \
    XX(ucp_mem_map)                                                                                \
    XX(ucp_mem_unmap)                                                                              \
    XX(ucp_rkey_pack)                                                                              \
    XX(ucp_rkey_buffer_release)                                                                    \
    XX(ucp_ep_rkey_unpack)                                                                         \
    XX(ucp_rkey_destroy)                                                                           \
    XX(ucp_get_nbx)                                                                                \
    XX(ucp_am_send_nbx)                                                                            \
    XX(ucp_request_check_status)                                                                   \
    XX(ucp_request_free)

typedef struct dray__ucx_library {
#define XX(name) __typeof__(&(name)) name;
    DRAY__UCX_FUNCTIONS(XX)
#undef XX
    const char *(*status_string)(ucs_status_t status);
} dray__ucx_library;

/* Returns NULL when there is none; dray__ucx_find then has the reason. */
const dray__ucx_library *dray__ucx_library_get(void);
/* Finds UCX's library once, and its version. Fails with DRAY_EUNSUPPORTED when it is missing or too
 * old, with advice in the message. */
int dray__ucx_find(dray__ucx_version *version, dray_error *error);
/* The transports that a connection would use, such as "tcp" or "tcp,rc,ud,dc". */
const char *dray__ucx_transports(void);
bool dray__ucx_has_rdma(void); /* Returns true when this machine has RDMA devices. */
int dray__ucx_fail(dray_error *error, ucs_status_t status, const char *what);

/* A UCX context for one set of network devices ("eth0", "eth0,mlx5_0:1"), with or without one-
 * sided reads. All connections with the same settings share it. The last one frees it, and with
 * it UCX's own thread, so that the process may fork. */
int dray__ucx_context_get(const char *devices, bool reads, ucp_context_h *out, dray_error *error);
/* Takes one more reference, which the caller puts back. */
void dray__ucx_context_hold(ucp_context_h context);
void dray__ucx_context_put(ucp_context_h context);

/* ---- ucx_endpoint.c: the functions of carrier.h for a stream that uses UCX */

typedef struct dray__ucx dray__ucx;

typedef struct dray__ucx_state { /* of a stream */
    struct talk *talk;           /* ucx.c's; NULL when the two have agreed */
    dray__ucx *ucx;
    int both; /* Readable when UCX's descriptor or the socket is. */
} dray__ucx_state;

/* Makes one end of a connection on the network device that the connected socket `fd` uses.
 * `reads` asks for one-sided reads; both sides must ask for the same. */
int dray__ucx_open(int fd, bool reads, dray__ucx **out, dray_error *error);
void dray__ucx_close(dray__ucx *ucx); /* Closes by force, also with reads and sends under way. NULL
                                       * is fine. */
/* The data that the other side needs: the worker's address, and the number that its messages
 * must carry. */
const void *dray__ucx_address(const dray__ucx *ucx, size_t *size, uint64_t *number);
/* Connects to the other side's address. May be called once. */
int dray__ucx_connect(dray__ucx *ucx, const void *address, uint64_t number, dray_error *error);
int dray__ucx_fd(const dray__ucx *ucx);

ssize_t dray__ucx_send(dray__stream *stream, const void *data, size_t size, bool more);
ssize_t dray__ucx_recv(dray__stream *stream, void *data, size_t size);
int dray__ucx_flush(dray__stream *stream);
bool dray__ucx_pending(const dray__stream *stream);
int dray__ucx_map(const dray__stream *stream, void *base, size_t bytes, bool remote,
                  dray__net_memory **out, dray_error *error);
void dray__ucx_unmap(dray__net_memory *memory);
int dray__ucx_pack_key(const dray__net_memory *memory, void **out, size_t *size, dray_error *error);
int dray__ucx_unpack_key(dray__stream *stream, const void *packed, size_t size, dray__net_key **out,
                         dray_error *error);
void dray__ucx_forget_keys(dray__stream *stream);
int dray__ucx_get(dray__stream *stream, const dray__net_key *key, uint64_t address,
                  const dray__net_memory *into, void *at, size_t bytes, dray__net_reads *reads,
                  dray_error *error);
int dray__ucx_read(dray__stream *stream, const dray__net_reads *reads);
#endif
