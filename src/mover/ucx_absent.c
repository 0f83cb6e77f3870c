/* What ucx.h means in a build without UCX's headers: nobody gets a connection. */
#ifndef DRAY_HAVE_UCX
#include "mover/ucx.h"

#include "base/error.h"

#include <errno.h>

int dray__ucx_find(dray__ucx_version *version, dray_error *error)
{
    *version = (dray__ucx_version){0};
    return dray__fail(error, DRAY_EUNSUPPORTED,
                      "dray was built without UCX: install its headers (Debian: apt install "
                      "libucx-dev) and build again");
}

const char *dray__ucx_transports(void)
{
    return "";
}

bool dray__ucx_has_rdma(void)
{
    return false;
}

int dray__ucx_open(int fd, dray__ucx **out, dray_error *error)
{
    (void)fd;
    (void)out;
    dray__ucx_version version;
    return dray__ucx_find(&version, error);
}

void dray__ucx_close(dray__ucx *ucx)
{
    (void)ucx;
}

const void *dray__ucx_address(const dray__ucx *ucx, size_t *size)
{
    (void)ucx;
    *size = 0;
    return NULL;
}

uint64_t dray__ucx_nonce(const dray__ucx *ucx)
{
    (void)ucx;
    return 0;
}

int dray__ucx_connect(dray__ucx *ucx, const void *address, size_t size, uint64_t nonce,
                      dray_error *error)
{
    (void)ucx;
    (void)address;
    (void)size;
    (void)nonce;
    dray__ucx_version version;
    return dray__ucx_find(&version, error);
}

ssize_t dray__ucx_send(dray__ucx *ucx, const void *data, size_t size)
{
    (void)ucx;
    (void)data;
    (void)size;
    return -ENOTSUP;
}

ssize_t dray__ucx_recv(dray__ucx *ucx, void *data, size_t size)
{
    (void)ucx;
    (void)data;
    (void)size;
    return -ENOTSUP;
}

int dray__ucx_flush(dray__ucx *ucx)
{
    (void)ucx;
    return -ENOTSUP;
}

int dray__ucx_fd(const dray__ucx *ucx)
{
    (void)ucx;
    return -1;
}

bool dray__ucx_pending(const dray__ucx *ucx)
{
    (void)ucx;
    return false;
}

void dray__ucx_pretend(const dray__ucx_version *version)
{
    (void)version;
}
#endif
