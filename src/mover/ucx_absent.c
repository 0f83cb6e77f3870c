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

bool dray__ucx_wants_reads(void)
{
    return false;
}

int dray__ucx_open(int fd, bool reads, dray__ucx **out, dray_error *error)
{
    (void)fd;
    (void)reads;
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

/* ---- one-sided reads: of connections that there are none of ---- */

int dray__ucx_map(const dray__ucx *ucx, void *base, size_t bytes, bool remote,
                  dray__ucx_memory **out, dray_error *error)
{
    (void)ucx;
    (void)base;
    (void)bytes;
    (void)remote;
    (void)out;
    dray__ucx_version version;
    return dray__ucx_find(&version, error);
}

void dray__ucx_unmap(dray__ucx_memory *memory)
{
    (void)memory;
}

int dray__ucx_pack_key(const dray__ucx_memory *memory, void **out, size_t *size, dray_error *error)
{
    (void)memory;
    (void)out;
    (void)size;
    dray__ucx_version version;
    return dray__ucx_find(&version, error);
}

int dray__ucx_unpack_key(dray__ucx *ucx, const void *packed, size_t size, dray__ucx_key **out,
                         dray_error *error)
{
    (void)ucx;
    (void)packed;
    (void)size;
    (void)out;
    dray__ucx_version version;
    return dray__ucx_find(&version, error);
}

void dray__ucx_forget_keys(dray__ucx *ucx)
{
    (void)ucx;
}

int dray__ucx_get(dray__ucx *ucx, const dray__ucx_key *key, uint64_t address,
                  const dray__ucx_memory *into, void *at, size_t bytes, dray__ucx_reads *reads,
                  dray_error *error)
{
    (void)ucx;
    (void)key;
    (void)address;
    (void)into;
    (void)at;
    (void)bytes;
    (void)reads;
    dray__ucx_version version;
    return dray__ucx_find(&version, error);
}

int dray__ucx_read(dray__ucx *ucx, const dray__ucx_reads *reads)
{
    (void)ucx;
    (void)reads;
    return -ENOTCONN;
}
#endif
