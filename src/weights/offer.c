/* Agreeing on UCX (offer.h). */
#include "weights/offer.h"

#include "base/error.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/random.h>

enum {
    NUMBERS = 20, /* versions and number, before the address */
    ADDRESS_AT = NUMBERS,
    ANSWER_ADDRESS_AT = 8,
    GREETING = DRAY__OFFER_RANDOM + 1
};
static const char READER[] = "dray1 ucx offer", SERVER[] = "dray1 ucx answer";

static int allowed(const dray__stream_keys *keys, const dray__stream *stream, dray_error *error)
{
    if (!dray__stream_may_ucx(stream))
        return dray__fail(
            error, DRAY_EPERM,
            "UCX does not encrypt, and the network between here and there is not trusted: "
            "name it in trusted_networks or $DRAY_TRUSTED_NETWORKS (without "
            "DRAY_DATA_ENCRYPT=always), or set the transport to stream");
    if (!keys->key->identity[0])
        return dray__fail(error, DRAY_EPERM,
                          "an offer of UCX is proven with the session's key, and this one has "
                          "none: set the transport to stream");
    return DRAY_OK;
}

int dray__offer_wanted(const dray__stream_keys *keys, const dray__stream *stream, bool *wanted,
                       dray_error *error)
{
    dray__ucx_version version;
    *wanted = false;
    if (keys->transport == DRAY__TRANSPORT_UCX) {
        int rc = allowed(keys, stream, error);
        if (rc == DRAY_OK)
            rc = dray__ucx_find(&version, error);
        *wanted = rc == DRAY_OK;
        return rc;
    }
    if (keys->transport == DRAY__TRANSPORT_AUTO) /* over TCP the stream is as fast, and simpler */
        *wanted = allowed(keys, stream, NULL) == DRAY_OK && dray__ucx_has_rdma() &&
                  dray__ucx_find(&version, NULL) == DRAY_OK;
    return DRAY_OK;
}

/* ---- proofs ---------------------------------------------------------------------------------- */

static bool prove(const dray__offer *offer, const dray__stream_keys *keys, const char *side,
                  const void *said, size_t size, uint8_t out[DRAY__OFFER_PROOF])
{
    dray__writer w = {0};
    dray__put_bytes(&w, side, strlen(side) + 1);
    dray__put_bytes(&w, offer->reader, sizeof offer->reader);
    dray__put_bytes(&w, offer->server, sizeof offer->server);
    dray__put_u8(&w, offer->reads);
    dray__put_bytes(&w, said, size);
    bool proven = !w.failed && dray__keyed_hash(keys->key->bytes, w.data, w.size, out);
    dray__writer_free(&w);
    return proven;
}

/* Appends the proof of what was put since `from`. */
static void put_proof(const dray__offer *offer, const dray__stream_keys *keys, const char *side,
                      dray__writer *w, size_t from)
{
    uint8_t proof[DRAY__OFFER_PROOF];
    if (w->failed || !prove(offer, keys, side, w->data + from, w->size - from, proof))
        w->failed = true;
    else
        dray__put_bytes(w, proof, sizeof proof);
}

/* Does what was said end with the proof of the rest? */
static int check_proof(const dray__offer *offer, const dray__stream_keys *keys, const char *side,
                       const uint8_t *said, uint32_t size, dray_error *error)
{
    uint8_t proof[DRAY__OFFER_PROOF];
    uint32_t rest = size - DRAY__OFFER_PROOF;
    if (!prove(offer, keys, side, said, rest, proof))
        return dray__nomem(error);
    return dray__same_bytes(proof, said + rest, sizeof proof)
               ? DRAY_OK
               : dray__fail(error, DRAY_EPERM,
                            "an offer of UCX that is not proven: of another session, or of an "
                            "earlier connection");
}

static int draw(uint8_t out[DRAY__OFFER_RANDOM], dray_error *error)
{
    return getrandom(out, DRAY__OFFER_RANDOM, 0) == DRAY__OFFER_RANDOM
               ? DRAY_OK
               : dray__fail_errno(error, errno, "random bytes");
}

/* ---- the reader's side ----------------------------------------------------------------------- */

static size_t begin(dray__writer *w)
{
    dray__writer_reset(w);
    dray__put_u32(w, DRAY__PULL_MAGIC);
    dray__put_u16(w, DRAY__PULL_VERSION);
    dray__put_u16(w, DRAY__PULL_UCX);
    dray__put_u32(w, 0);
    dray__put_u32(w, 0);
    return w->size;
}

static int finish(dray__writer *w, size_t body, dray_error *error)
{
    if (!w->failed)
        dray__put_u32_at(w, body - 4, (uint32_t)(w->size - body));
    return dray__writer_check(w, error);
}

int dray__offer_greet(dray__offer *offer, bool reads, dray__writer *w, dray_error *error)
{
    *offer = (dray__offer){0};
    int rc = draw(offer->reader, error);
    if (rc)
        return rc;
    size_t body = begin(w);
    dray__put_bytes(w, offer->reader, sizeof offer->reader);
    dray__put_u8(w, reads);
    return finish(w, body, error);
}

int dray__offer_greeted(dray__offer *offer, const uint8_t *head, uint32_t size, dray_error *error)
{
    if (size != GREETING || head[DRAY__OFFER_RANDOM] > 1)
        return dray__fail(error, DRAY_EPROTO, "what came is no answer to a greeting");
    memcpy(offer->server, head, sizeof offer->server);
    offer->reads = head[DRAY__OFFER_RANDOM];
    offer->greeted = true;
    return DRAY_OK;
}

int dray__offer_put(const dray__offer *offer, const dray__stream_keys *keys, const dray__ucx *ucx,
                    dray__writer *w, dray_error *error)
{
    dray__ucx_version version = {0};
    size_t address_size;
    const void *address = dray__ucx_address(ucx, &address_size);
    dray__ucx_find(&version, NULL);
    size_t body = begin(w);
    dray__put_u32(w, version.major);
    dray__put_u32(w, version.minor);
    dray__put_u32(w, version.release);
    dray__put_u64(w, dray__ucx_nonce(ucx));
    dray__put_bytes(w, address, address_size);
    put_proof(offer, keys, READER, w, body);
    return finish(w, body, error);
}

int dray__offer_taken(const dray__offer *offer, const dray__stream_keys *keys, const uint8_t *head,
                      uint32_t size, dray__ucx *ucx, dray_error *error)
{
    const uint32_t around = ANSWER_ADDRESS_AT + DRAY__OFFER_PROOF;
    if (size <= around || size - around > DRAY__UCX_ADDRESS_MAX)
        return dray__fail(error, DRAY_EPROTO, "what came is no answer to an offer of UCX");
    int rc = check_proof(offer, keys, SERVER, head, size, error);
    if (rc)
        return rc;
    dray__reader in = dray__reader_of(head, size);
    uint64_t nonce = dray__get_u64(&in);
    return dray__ucx_connect(ucx, head + ANSWER_ADDRESS_AT, size - around, nonce, error);
}

/* ---- the server's side ----------------------------------------------------------------------- */

static int check_offer(const dray__offer *offer, const dray__stream_keys *keys, const uint8_t *body,
                       uint32_t size, dray_error *error)
{
    const uint32_t around = NUMBERS + DRAY__OFFER_PROOF;
    if (!offer->greeted)
        return dray__fail(error, DRAY_EPERM, "an offer of UCX without a greeting before it");
    if (size <= around || size - around > DRAY__UCX_ADDRESS_MAX)
        return dray__fail(error, DRAY_EFORMAT, "an offer of UCX in %" PRIu32 " bytes", size);
    return check_proof(offer, keys, READER, body, size, error);
}

static int accept_offer(const dray__stream *stream, bool reads, const uint8_t *body, uint32_t size,
                        dray__ucx **out, dray_error *error)
{
    dray__reader in = dray__reader_of(body, size);
    dray__ucx_version own = {0}, other;
    other.major = dray__get_u32(&in);
    other.minor = dray__get_u32(&in);
    other.release = dray__get_u32(&in);
    uint64_t nonce = dray__get_u64(&in);
    int rc = dray__ucx_find(&own, error);
    if (rc)
        return rc;
    if (own.major != other.major || own.minor != other.minor || own.release != other.release)
        return dray__fail(error, DRAY_EVERSION,
                          "UCX %u.%u.%u of the reader and %u.%u.%u here do not speak with each "
                          "other: install the same on both hosts, or set the transport to stream",
                          other.major, other.minor, other.release, own.major, own.minor,
                          own.release);
    rc = dray__ucx_open(dray__stream_socket(stream), reads, out, error);
    if (rc == DRAY_OK &&
        (rc = dray__ucx_connect(*out, body + ADDRESS_AT, size - NUMBERS - DRAY__OFFER_PROOF, nonce,
                                error))) {
        dray__ucx_close(*out);
        *out = NULL;
    }
    return rc;
}

static int answer_greeting(dray__offer *offer, const dray__pull_header *header, const uint8_t *body,
                           dray__writer *w, dray_error *error)
{
    int rc = draw(offer->server, error);
    if (rc)
        return rc;
    memcpy(offer->reader, body, sizeof offer->reader);
    offer->reads = body[DRAY__OFFER_RANDOM] == 1 && dray__ucx_wants_reads();
    offer->greeted = true;
    dray__pull_put_answer(w, 0, header->id, GREETING, 0);
    dray__put_bytes(w, offer->server, sizeof offer->server);
    dray__put_u8(w, offer->reads);
    return DRAY_OK;
}

static int answer_offer(dray__offer *offer, const dray__stream_keys *keys,
                        const dray__stream *stream, const dray__pull_header *header,
                        const uint8_t *body, dray__writer *w, dray__ucx **out, dray_error *error)
{
    int rc = check_offer(offer, keys, body, header->body_bytes, error);
    offer->greeted = false; /* a greeting is good for one offer */
    if (rc == DRAY_OK)
        rc = accept_offer(stream, offer->reads, body, header->body_bytes, out, error);
    if (rc)
        return rc;
    size_t size;
    const void *address = dray__ucx_address(*out, &size);
    dray__pull_put_answer(w, 0, header->id,
                          (uint32_t)(ANSWER_ADDRESS_AT + size + DRAY__OFFER_PROOF), 0);
    size_t head = w->size;
    dray__put_u64(w, dray__ucx_nonce(*out));
    dray__put_bytes(w, address, size);
    put_proof(offer, keys, SERVER, w, head);
    return DRAY_OK;
}

bool dray__offer_answer(dray__offer *offer, const dray__stream_keys *keys,
                        const dray__stream *stream, const dray__pull_header *header,
                        const uint8_t *body, dray__writer *w, dray__ucx **out)
{
    dray_error error;
    *out = NULL;
    dray__writer_reset(w);
    int rc = allowed(keys, stream, &error);
    if (rc == DRAY_OK && keys->transport == DRAY__TRANSPORT_STREAM)
        rc = dray__fail(&error, DRAY_EUNSUPPORTED, "its transport is set to stream");
    if (rc == DRAY_OK)
        rc = !offer->greeted && header->body_bytes == GREETING
                 ? answer_greeting(offer, header, body, w, &error)
                 : answer_offer(offer, keys, stream, header, body, w, out, &error);
    if (rc)
        dray__pull_put_refusal(w, header->id, &error);
    if (w->failed) {
        dray__ucx_close(*out);
        *out = NULL;
    }
    return !w->failed;
}
