/* Bytes over a Unix socket, between processes of one host. */
#include "net/carrier.h"

#include "base/error.h"

static int may(const dray__stream_keys *keys, bool trusted, dray_error *error)
{
    (void)trusted;
    return keys->always ? dray__fail(error, DRAY_EPERM, "bytes do not go there in the clear")
                        : DRAY_OK;
}

const dray__carrier dray__carrier_unix = {
    .name = "unix", .transport = "stream", .scheme = "unix", .may = may, DRAY__CARRIER_PLAIN};
