/* Agreeing on UCX (offer.h). */
#include "weights/offer.h"

#include "base/error.h"

#include <inttypes.h>

static int allowed(const dray__stream *stream, dray_error *error)
{
    if (dray__stream_may_ucx(stream))
        return DRAY_OK;
    return dray__fail(
        error, DRAY_EPERM,
        "UCX does not encrypt, and the network between here and there is not trusted: "
        "name it in trusted_networks or $DRAY_TRUSTED_NETWORKS (without "
        "DRAY_DATA_ENCRYPT=always), or set the transport to stream");
}

int dray__offer_wanted(const dray__stream_keys *keys, const dray__stream *stream, bool *wanted,
                       dray_error *error)
{
    dray__ucx_version version;
    *wanted = false;
    if (keys->transport == DRAY__TRANSPORT_UCX) {
        int rc = allowed(stream, error);
        if (rc == DRAY_OK)
            rc = dray__ucx_find(&version, error);
        *wanted = rc == DRAY_OK;
        return rc;
    }
    if (keys->transport == DRAY__TRANSPORT_AUTO) /* over TCP the stream is as fast, and simpler */
        *wanted = dray__stream_may_ucx(stream) && dray__ucx_has_rdma() &&
                  dray__ucx_find(&version, NULL) == DRAY_OK;
    return DRAY_OK;
}

void dray__offer_put(dray__writer *w, const dray__ucx *ucx)
{
    dray__ucx_version version = {0};
    size_t size;
    const void *address = dray__ucx_address(ucx, &size);
    dray__ucx_find(&version, NULL);
    dray__put_u32(w, DRAY__PULL_MAGIC);
    dray__put_u16(w, DRAY__PULL_VERSION);
    dray__put_u16(w, DRAY__PULL_UCX);
    dray__put_u32(w, 0);
    dray__put_u32(w, (uint32_t)(20 + size));
    dray__put_u32(w, version.major);
    dray__put_u32(w, version.minor);
    dray__put_u32(w, version.release);
    dray__put_u64(w, dray__ucx_nonce(ucx));
    dray__put_bytes(w, address, size);
}

int dray__offer_taken(const uint8_t *head, uint32_t size, dray__ucx *ucx, dray_error *error)
{
    dray__reader in = dray__reader_of(head, size);
    uint64_t nonce = dray__get_u64(&in);
    const void *address = dray__get_bytes(&in, size > 8 ? size - 8 : 1);
    if (in.failed || size - 8 > DRAY__UCX_ADDRESS_MAX)
        return dray__fail(error, DRAY_EPROTO, "what came is no answer to an offer of UCX");
    return dray__ucx_connect(ucx, address, size - 8, nonce, error);
}

static int accept_offer(const dray__stream_keys *keys, const dray__stream *stream,
                        const dray__pull_header *header, const uint8_t *body, dray__ucx **out,
                        dray_error *error)
{
    dray__reader in = dray__reader_of(body, header->body_bytes);
    dray__ucx_version own = {0}, other;
    other.major = dray__get_u32(&in);
    other.minor = dray__get_u32(&in);
    other.release = dray__get_u32(&in);
    uint64_t nonce = dray__get_u64(&in);
    size_t size = header->body_bytes > 20 ? header->body_bytes - 20 : 1;
    const void *address = dray__get_bytes(&in, size);
    if (in.failed || size > DRAY__UCX_ADDRESS_MAX)
        return dray__fail(error, DRAY_EFORMAT, "an offer of UCX in %" PRIu32 " bytes",
                          header->body_bytes);
    int rc = allowed(stream, error);
    if (rc == DRAY_OK && keys->transport == DRAY__TRANSPORT_STREAM)
        rc = dray__fail(error, DRAY_EUNSUPPORTED, "its transport is set to stream");
    if (rc == DRAY_OK)
        rc = dray__ucx_find(&own, error);
    if (rc)
        return rc;
    if (own.major != other.major || own.minor != other.minor || own.release != other.release)
        return dray__fail(error, DRAY_EVERSION,
                          "UCX %u.%u.%u of the reader and %u.%u.%u here do not speak with each "
                          "other: install the same on both hosts, or set the transport to stream",
                          other.major, other.minor, other.release, own.major, own.minor,
                          own.release);
    rc = dray__ucx_open(dray__stream_socket(stream), out, error);
    if (rc == DRAY_OK && (rc = dray__ucx_connect(*out, address, size, nonce, error))) {
        dray__ucx_close(*out);
        *out = NULL;
    }
    return rc;
}

bool dray__offer_answer(const dray__stream_keys *keys, const dray__stream *stream,
                        const dray__pull_header *header, const uint8_t *body, dray__writer *w,
                        dray__ucx **out)
{
    dray_error error;
    *out = NULL;
    dray__writer_reset(w);
    if (accept_offer(keys, stream, header, body, out, &error)) {
        dray__pull_put_refusal(w, header->id, &error);
        return !w->failed;
    }
    size_t size;
    const void *address = dray__ucx_address(*out, &size);
    dray__pull_put_answer(w, 0, header->id, (uint32_t)(8 + size), 0);
    dray__put_u64(w, dray__ucx_nonce(*out));
    dray__put_bytes(w, address, size);
    if (w->failed) {
        dray__ucx_close(*out);
        *out = NULL;
    }
    return !w->failed;
}
