/* UCX's functions, opened at run time; for ucx.c. Its headers are for types only. */
#ifndef DRAY_MOVER_UCX_LIBRARY_H
#define DRAY_MOVER_UCX_LIBRARY_H

#include "mover/ucx.h"

#include <ucp/api/ucp.h>

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

/* NULL: dray__ucx_find says why. */
const dray__ucx_library *dray__ucx_library_get(void);

/* A UCX context for one set of network devices ("eth0", "eth0,mlx5_0:1"), with one-sided reads or
 * without, shared by those who use the same, and gone with the last: with it goes UCX's own thread,
 * so that a process may fork. */
int dray__ucx_context_get(const char *devices, bool reads, ucp_context_h *out, dray_error *error);
void dray__ucx_context_hold(ucp_context_h context); /* once more, to be put */
void dray__ucx_context_put(ucp_context_h context);

int dray__ucx_fail(dray_error *error, ucs_status_t status, const char *what);

#endif
