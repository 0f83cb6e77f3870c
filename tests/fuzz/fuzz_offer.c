/* Offers to go on over UCX (weights/offer.h), both ways. The first byte: 0: what comes is a request
 * to a server that was not greeted; 1: that was; 2: the same, with a right proof (of another
 * version of UCX: what it says is read, and refused); 3: the answer to a greeting; 4: to an offer.
 * Nothing that is not proven makes a connection. */
#include "fuzz/fuzz.h"

#include "weights/offer.h"

#include <poll.h>
#include <string.h>
#include <unistd.h>

static const dray__networks none;
static const dray__tls_key key = {.identity = "dray1.session.data", .bytes = "a session's key"};
static const dray__stream_keys keys = {&key, &none, false, DRAY__TRANSPORT_UCX};
static dray__stream *reader, *server;

static void make(void)
{
    char endpoint[DRAY__STREAM_ADDRESS];
    int listener;
    MUST(dray__stream_listen("127.0.0.1", endpoint, &listener, NULL) == 0);
    MUST(dray__stream_connect(endpoint, &keys, &reader, NULL) == 0);
    struct pollfd p = {.fd = listener, .events = POLLIN};
    MUST(poll(&p, 1, 10000) == 1);
    MUST(dray__stream_accept(listener, &keys, &server, NULL) == 0);
    close(listener);
}

/* The proof that the server would want of this body. */
static void prove(const dray__offer *offer, uint8_t *body, size_t size)
{
    static const char side[] = "dray1 ucx offer";
    dray__writer said = {0};
    dray__put_bytes(&said, side, sizeof side);
    dray__put_bytes(&said, offer->reader, sizeof offer->reader);
    dray__put_bytes(&said, offer->server, sizeof offer->server);
    dray__put_u8(&said, offer->reads);
    dray__put_bytes(&said, body, size - DRAY__OFFER_PROOF);
    MUST(dray__keyed_hash(key.bytes, said.data, said.size, body + size - DRAY__OFFER_PROOF));
    dray__writer_free(&said);
}

static void request(const uint8_t *data, size_t size, int kind)
{
    dray__pull_header header;
    if (size < DRAY__PULL_REQUEST_HEADER || dray__pull_get_request(data, &header, NULL))
        return;
    size -= DRAY__PULL_REQUEST_HEADER;
    header.body_bytes = (uint32_t)(header.body_bytes < size ? header.body_bytes : size);
    uint8_t *body = malloc((size_t)header.body_bytes + 1);
    memcpy(body, data + DRAY__PULL_REQUEST_HEADER, header.body_bytes);
    dray__offer offer = {.greeted = kind > 0, .reader = "r", .server = "s"};
    if (kind == 2 && header.body_bytes > DRAY__OFFER_PROOF + 20) {
        body[0] = 99; /* no such version: no foreign address reaches UCX */
        prove(&offer, body, header.body_bytes);
    }
    dray__writer out = {0};
    dray__ucx *ucx;
    dray__answer_header answer;
    MUST(dray__offer_answer(&offer, &keys, server, &header, body, &out, &ucx));
    MUST(!ucx && dray__pull_get_answer(out.data, &answer, NULL) == 0);
    MUST(out.size == DRAY__PULL_ANSWER_HEADER + answer.head_bytes && !answer.data_bytes);
    MUST(answer.status != 0 || kind == 0); /* a greeting is answered */
    dray__writer_free(&out);
    free(body);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!reader)
        make();
    if (size == 0)
        return 0;
    int kind = data[0] % 5;
    dray__offer offer = {.greeted = kind == 4, .reader = "r", .server = "s"};
    if (kind < 3)
        request(data + 1, size - 1, kind);
    else if (kind == 3)
        dray__offer_greeted(&offer, data + 1, (uint32_t)(size - 1), NULL);
    else
        MUST(dray__offer_taken(&offer, &keys, data + 1, (uint32_t)(size - 1), NULL, NULL) != 0);
    return 0;
}

void fuzz_seeds(fuzz_put put, void *user)
{
    dray__offer offer;
    dray__writer body = {0};
    uint8_t noise[200];
    memset(noise, 7, sizeof noise);
    MUST(dray__offer_greet(&offer, true, &body, NULL) == 0);
    fuzz_put_kind(put, user, 0, &body);
    for (uint8_t kind = 0; kind < 3; kind++) {
        dray__writer_reset(&body);
        dray__put_u32(&body, DRAY__PULL_MAGIC);
        dray__put_u16(&body, DRAY__PULL_VERSION);
        dray__put_u16(&body, DRAY__PULL_UCX);
        dray__put_u32(&body, 0);
        dray__put_u32(&body, 150);
        dray__put_bytes(&body, noise, 150);
        fuzz_put_kind(put, user, kind, &body);
    }
    dray__writer_reset(&body);
    dray__put_bytes(&body, noise, DRAY__OFFER_RANDOM);
    dray__put_u8(&body, 1);
    fuzz_put_kind(put, user, 3, &body);
    dray__writer_reset(&body);
    dray__put_bytes(&body, noise, sizeof noise);
    fuzz_put_kind(put, user, 4, &body);
    dray__writer_free(&body);
}
