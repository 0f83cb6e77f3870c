/* UCX as a carrier. Both sides have a socket already. Over it they agree to use UCX, and exchange
 * the addresses of UCX workers. There are four messages over the socket, each a header and its
 * body. A status other than 0 refuses, and the body is then a string with the reason.
 *
 *  greeting  of the reader: random bytes, and whether it wants one-sided reads
 *  greeting  back: random bytes, and whether both want them, and UCX is opened for them
 *  offer     of the reader: the version of its UCX, u64 the number that messages to it carry, its
 *            address, 32 bytes of proof
 *  answer    u64 number, its address, 32 bytes of proof
 *
 * A proof is HMAC-SHA256 with the session's data key over the name of the side that gives it, the
 * random bytes of both, the agreement, and all of the body before it. So each side knows that the
 * other belongs to the session, that the message is unchanged, and that it is not a replay. After
 * the answer the bytes of the stream go over UCX. The socket stays open, so that the end of the
 * connection is noticed. Different versions of UCX are not compatible, so both sides must have the
 * same. */
#include "net/ucx.h"

#include "base/error.h"
#include "base/wire.h"
#include "base/words.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <unistd.h>

/* Checks the environment's settings early, because later no caller could get the error. */
static int check(dray_error *error)
{
    static const char *const words[] = {"auto", "never", "always", NULL};
    const char *word;
    return dray__word_of_variable("DRAY_UCX_READS", words, &word, error);
}

static int allowed(const dray__stream_keys *keys, bool trusted, dray_error *error)
{
    if (!trusted || keys->always)
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

const dray__fields dray__ucx_header_fields =
    DRAY__FIELDS(dray__ucx_header, DRAY__NUMBERS(dray__ucx_header, magic, status, size));
const dray__fields dray__ucx_greeting_fields =
    DRAY__FIELDS(dray__ucx_greeting, DRAY__FIELD_ARRAY(dray__ucx_greeting, random),
                 DRAY__NUMBERS(dray__ucx_greeting, reads));
const dray__fields dray__ucx_version_fields =
    DRAY__FIELDS(dray__ucx_version, DRAY__NUMBERS(dray__ucx_version, major, minor, release));

#ifdef DRAY_HAVE_UCX

enum {
    MAGIC = 0x31584355, /* "UCX1" */
    HEADER = 12,
    RANDOM = DRAY__UCX_RANDOM,
    PROOF = 32,
    OFFER_ADDRESS_AT = 20, /* after the versions and the number */
    ANSWER_ADDRESS_AT = 8,
    BODY_MAX = OFFER_ADDRESS_AT + DRAY__UCX_ADDRESS_MAX + PROOF,
    STEPS = 2
};

/* The state of the agreement over the socket. */
typedef struct talk {
    bool reads;
    uint32_t step;
    dray__writer out;
    size_t out_at, have;
    dray_error refused; /* the error with which the server ends after it has sent it; code 0 when
                         * there is none */
    uint8_t reader_random[RANDOM], server_random[RANDOM];
    uint8_t in[HEADER + BODY_MAX];
} talk;

typedef int (*step_fn)(dray__stream *stream, const uint8_t *body, uint32_t size, dray_error *error);

static int find(char *detail, size_t size, dray_error *error)
{
    dray__ucx_version v;
    int rc = dray__ucx_find(&v, error);
    if (rc == DRAY_OK && size)
        snprintf(detail, size, "%u.%u.%u, transports %s", v.major, v.minor, v.release,
                 dray__ucx_transports());
    return rc;
}

/* Returns whether one-sided reads are wanted. "always" without RDMA is for tests: over TCP, UCX
 * only emulates reads. The process that is read then serves any address that it is given, and UCX
 * 1.13 aborts it when a reader disappears in the middle of a read. */
static bool wants_reads(void)
{
    const char *given = getenv("DRAY_UCX_READS");
    if (given && strcmp(given, "always") == 0)
        return true;
    return !(given && strcmp(given, "never") == 0) && dray__ucx_has_rdma();
}

static int may(const dray__stream_keys *keys, bool trusted, dray_error *error)
{
    int rc = allowed(keys, trusted, error);
    if (rc == DRAY_OK && !keys->transport && !dray__ucx_has_rdma())
        rc = dray__fail(error, DRAY_EUNSUPPORTED, "over TCP a stream is as fast, and simpler");
    return rc ? rc : find(NULL, 0, error);
}

static int may_read(const dray__stream_keys *keys, bool trusted, dray_error *error)
{
    int rc = may(keys, trusted, error);
    return rc || wants_reads()
               ? rc
               : dray__fail(error, DRAY_EUNSUPPORTED, "one-sided reads are of no use here");
}

/* Puts the header of a message. Its body follows, and the caller then finishes it. */
static void begin_message(talk *t, int status)
{
    dray__writer_reset(&t->out);
    dray__put_fields(&t->out, &dray__ucx_header_fields, &(dray__ucx_header){MAGIC, status, 0});
}

static int finish_message(talk *t, dray_error *error)
{
    if (!t->out.failed)
        dray__put_u32_at(&t->out, HEADER - 4, (uint32_t)(t->out.size - HEADER));
    return dray__writer_check(&t->out, error);
}

/* ---- proofs ---------------------------------------------------------------------------------- */

static bool prove(const dray__stream *stream, bool server, const void *said, size_t size,
                  uint8_t out[PROOF])
{
    const talk *t = ((dray__ucx_state *)stream->state)->talk;
    const char *side = server ? "dray1 ucx answer" : "dray1 ucx offer";
    dray__writer w = {0};
    dray__put_bytes(&w, side, strlen(side) + 1);
    dray__put_bytes(&w, t->reader_random, RANDOM);
    dray__put_bytes(&w, t->server_random, RANDOM);
    dray__put_u8(&w, t->reads);
    dray__put_bytes(&w, said, size);
    bool proven = !w.failed && dray__keyed_hash(stream->keys->key->bytes, w.data, w.size, out);
    dray__writer_free(&w);
    return proven;
}

/* Ends the message with a proof of its body. */
static int finish_proven(const dray__stream *stream, talk *t, dray_error *error)
{
    uint8_t proof[PROOF];
    if (t->out.failed ||
        !prove(stream, stream->server, t->out.data + HEADER, t->out.size - HEADER, proof))
        return dray__nomem(error);
    dray__put_bytes(&t->out, proof, PROOF);
    return finish_message(t, error);
}

/* Checks that the other side's message has an address after `at`, and ends with a proof of the
 * rest. */
static int check_proof(const dray__stream *stream, bool server, const uint8_t *said, uint32_t size,
                       uint32_t at, dray_error *error)
{
    uint8_t proof[PROOF];
    if (size <= at + PROOF || size - at - PROOF > DRAY__UCX_ADDRESS_MAX)
        return dray__fail(error, DRAY_EPROTO, "an offer of UCX in %" PRIu32 " bytes", size);
    if (!prove(stream, server, said, size - PROOF, proof))
        return dray__nomem(error);
    return dray__same_bytes(proof, said + size - PROOF, PROOF)
               ? DRAY_OK
               : dray__fail(error, DRAY_EPERM,
                            "an offer of UCX that is not proven: of another session, or of an "
                            "earlier connection");
}

static void put_address(talk *t, const dray__ucx *ucx)
{
    size_t size;
    uint64_t number;
    const void *address = dray__ucx_address(ucx, &size, &number);
    dray__put_u64(&t->out, number);
    dray__put_bytes(&t->out, address, size);
}

static int draw(uint8_t out[RANDOM], dray_error *error)
{
    return getrandom(out, RANDOM, 0) == RANDOM ? DRAY_OK
                                               : dray__fail_errno(error, errno, "random bytes");
}

/* ---- the steps ------------------------------------------------------------------------------- */

static int greet(talk *t, uint8_t random[RANDOM], bool reads, dray_error *error)
{
    int rc = draw(random, error);
    begin_message(t, 0);
    dray__ucx_greeting said = {.reads = reads};
    memcpy(said.random, random, RANDOM);
    dray__put_fields(&t->out, &dray__ucx_greeting_fields, &said);
    return rc ? rc : finish_message(t, error);
}

static int take_greeting(const uint8_t *body, uint32_t size, dray__ucx_greeting *out,
                         dray_error *error)
{
    dray__reader in = dray__reader_of(body, size);
    dray__get_fields(&in, NULL, &dray__ucx_greeting_fields, out);
    return in.failed || in.at != in.size || out->reads > 1
               ? dray__fail(error, DRAY_EPROTO, "a greeting of %" PRIu32 " bytes", size)
               : DRAY_OK;
}

/* For the reader, after the server's greeting: opens UCX as agreed, and sends the offer. */
static int on_greeted(dray__stream *stream, const uint8_t *body, uint32_t size, dray_error *error)
{
    dray__ucx_state *s = stream->state;
    talk *t = s->talk;
    dray__ucx_version v = {0};
    dray__ucx_greeting said;
    int rc = take_greeting(body, size, &said, error);
    if (rc)
        return rc;
    memcpy(t->server_random, said.random, RANDOM);
    t->reads = said.reads;
    rc = dray__ucx_open(stream->socket, t->reads, &s->ucx, error);
    if (rc == DRAY_OK)
        rc = dray__ucx_find(&v, error);
    if (rc)
        return rc;
    begin_message(t, 0);
    dray__put_fields(&t->out, &dray__ucx_version_fields, &v);
    put_address(t, s->ucx);
    return finish_proven(stream, t, error);
}

static int on_answer(dray__stream *stream, const uint8_t *body, uint32_t size, dray_error *error)
{
    int rc = check_proof(stream, true, body, size, ANSWER_ADDRESS_AT, error);
    if (rc)
        return rc;
    dray__reader in = dray__reader_of(body, size);
    uint64_t number = dray__get_u64(&in);
    return dray__ucx_connect(((dray__ucx_state *)stream->state)->ucx, body + ANSWER_ADDRESS_AT,
                             number, error);
}

/* For the server, after the reader's greeting. */
static int on_greeting(dray__stream *stream, const uint8_t *body, uint32_t size, dray_error *error)
{
    talk *t = ((dray__ucx_state *)stream->state)->talk;
    const char *transport = stream->keys->transport;
    dray__ucx_greeting said = {0};
    int rc = allowed(stream->keys, stream->trusted, error);
    if (rc == DRAY_OK && transport && strcmp(transport, stream->carrier->transport) != 0)
        rc = dray__fail(error, DRAY_EUNSUPPORTED, "its transport is set to %s", transport);
    if (rc == DRAY_OK)
        rc = take_greeting(body, size, &said, error);
    if (rc)
        return rc;
    memcpy(t->reader_random, said.random, RANDOM);
    t->reads = said.reads && wants_reads();
    return greet(t, t->server_random, t->reads, error);
}

static int on_offer(dray__stream *stream, const uint8_t *body, uint32_t size, dray_error *error)
{
    dray__ucx_state *s = stream->state;
    dray__ucx_version own = {0}, other;
    int rc = check_proof(stream, false, body, size, OFFER_ADDRESS_AT, error);
    if (rc == DRAY_OK)
        rc = dray__ucx_find(&own, error);
    if (rc)
        return rc;
    dray__reader in = dray__reader_of(body, size);
    dray__get_fields(&in, NULL, &dray__ucx_version_fields, &other);
    uint64_t number = dray__get_u64(&in);
    if (own.major != other.major || own.minor != other.minor || own.release != other.release)
        return dray__fail(error, DRAY_EVERSION,
                          "UCX %u.%u.%u of the reader and %u.%u.%u here do not speak with each "
                          "other: install the same on both hosts, or set the transport to stream",
                          other.major, other.minor, other.release, own.major, own.minor,
                          own.release);
    rc = dray__ucx_open(stream->socket, s->talk->reads, &s->ucx, error);
    if (rc == DRAY_OK)
        rc = dray__ucx_connect(s->ucx, body + OFFER_ADDRESS_AT, number, error);
    if (rc)
        return rc;
    begin_message(s->talk, 0);
    put_address(s->talk, s->ucx);
    return finish_proven(stream, s->talk, error);
}

static const step_fn steps[2][STEPS] = {{on_greeted, on_answer}, {on_greeting, on_offer}};

/* ---- messages over the socket
 * -------------------------------------------------------------------------------- */

static int push(const dray__stream *stream, talk *t, dray_error *error)
{
    while (t->out_at < t->out.size) {
        ssize_t n = dray__plain_send((dray__stream *)stream, t->out.data + t->out_at,
                                     t->out.size - t->out_at, false);
        if (n == -EAGAIN)
            return DRAY_EAGAIN;
        if (n < 0)
            return dray__fail_errno(error, (int)-n, "agreeing on UCX");
        t->out_at += (size_t)n;
    }
    dray__writer_reset(&t->out);
    t->out_at = 0;
    return DRAY_OK;
}

/* Receives a whole message of the other side. */
static int pull(dray__stream *stream, talk *t, dray__ucx_header *out, dray_error *error)
{
    for (size_t need = HEADER;;) {
        if (t->have >= HEADER) {
            dray__reader in = dray__reader_of(t->in, HEADER);
            dray__get_fields(&in, NULL, &dray__ucx_header_fields, out);
            if (out->magic != MAGIC || out->status > 0 || out->size > BODY_MAX)
                return dray__fail(error, DRAY_EPROTO,
                                  "peer: an answer about UCX expected, found other bytes");
            need = HEADER + out->size;
        }
        if (t->have == need)
            break;
        ssize_t n = dray__plain_recv(stream, t->in + t->have, need - t->have);
        if (n == -EAGAIN)
            return DRAY_EAGAIN;
        if (n <= 0)
            return dray__fail(error, DRAY_ECLOSED,
                              "peer: an answer about UCX expected, found a closed connection");
        t->have += (size_t)n;
    }
    t->have = 0;
    return DRAY_OK;
}

static int refused(const talk *t, int status, uint32_t size, dray_error *error)
{
    dray__reader in = dray__reader_of(t->in + HEADER, size);
    char *message = dray__get_prose(&in, BODY_MAX);
    int rc = dray__fail(error, status, "%s",
                        message ? message : "peer: UCX was refused without a reason");
    free(message);
    return rc;
}

/* Handles one message of the other side, and puts the answer to it. */
static int step(dray__stream *stream, talk *t, dray_error *error)
{
    dray__ucx_header header = {0};
    int rc = push(stream, t, error);
    if (rc == DRAY_OK && t->refused.code)
        *error = t->refused;
    if (rc || t->refused.code || t->step == STEPS)
        return rc ? rc : t->refused.code;
    rc = pull(stream, t, &header, error);
    if (rc == DRAY_OK && header.status)
        return refused(t, header.status, header.size, error);
    if (rc)
        return rc;
    rc = steps[stream->server][t->step++](stream, t->in + HEADER, header.size, error);
    if (rc == DRAY_OK || !stream->server)
        return rc;
    t->refused = *error;
    begin_message(t, rc);
    dray__put_string(&t->out, error->message);
    return finish_message(t, error);
}

static void end_talk(dray__ucx_state *s)
{
    if (s->talk)
        dray__writer_free(&s->talk->out);
    free(s->talk);
    s->talk = NULL;
}

static short events(const dray__stream *stream, short wanted)
{
    const dray__ucx_state *s = stream->state;
    (void)wanted;
    return s->talk && s->talk->out.size ? POLLIN | POLLOUT : POLLIN;
}

/* Switches the stream to UCX, which carries the bytes from now on. */
static int go_over(dray__stream *stream, dray_error *error)
{
    dray__ucx_state *s = stream->state;
    int fds[] = {dray__ucx_fd(s->ucx), stream->socket};
    s->both = epoll_create1(EPOLL_CLOEXEC);
    for (size_t i = 0; i < 2; i++) {
        struct epoll_event event = {.events = EPOLLIN};
        if (s->both < 0 || epoll_ctl(s->both, EPOLL_CTL_ADD, fds[i], &event))
            return dray__fail_errno(error, errno, "descriptors of a connection");
    }
    stream->carrier = s->talk->reads ? &dray__carrier_ucx_reads : &dray__carrier_ucx;
    end_talk(s);
    return DRAY_OK;
}

static int ready(dray__stream *stream, dray_error *out)
{
    dray__ucx_state *s = stream->state;
    dray_error error = {0};
    int rc = DRAY_OK;
    while (rc == DRAY_OK && (s->talk->step < STEPS || s->talk->out.size))
        rc = step(stream, s->talk, &error);
    if (rc == DRAY_OK)
        rc = go_over(stream, &error);
    stream->unfit = rc && rc != DRAY_EAGAIN;
    if (rc && out)
        *out = error;
    return rc;
}

static int begin(dray__stream *stream, dray_error *error)
{
    dray__ucx_state *s = calloc(1, sizeof *s);
    if (s)
        s->talk = calloc(1, sizeof *s->talk);
    if (!s || !s->talk) {
        free(s);
        return dray__nomem(error);
    }
    s->both = -1;
    stream->state = s;
    return stream->server ? DRAY_OK
                          : greet(s->talk, s->talk->reader_random,
                                  stream->carrier == &dray__carrier_ucx_reads, error);
}

/* ---- the carrier ----------------------------------------------------------------------------- */

static void end(dray__stream *stream)
{
    dray__ucx_state *s = stream->state;
    if (s->both >= 0)
        close(s->both);
    dray__ucx_close(s->ucx);
    end_talk(s);
    free(s);
}

static int fd(const dray__stream *stream)
{
    const dray__ucx_state *s = stream->state;
    return s->talk ? stream->socket : s->both;
}

#define COMMON                                                                                     \
    .transport = "ucx", .scheme = "tcp", .first = 'U', .blind = true, .find = find,                \
    .check = check, .connect = begin, .accept = begin, .ready = ready, .send = dray__ucx_send,     \
    .recv = dray__ucx_recv, .flush = dray__ucx_flush, .events = events,                            \
    .pending = dray__ucx_pending, .fd = fd, .close = end

const dray__carrier dray__carrier_ucx = {.name = "ucx", COMMON, .may = may};
const dray__carrier dray__carrier_ucx_reads = {.name = "ucx_reads",
                                               COMMON,
                                               .may = may_read,
                                               .map = dray__ucx_map,
                                               .unmap = dray__ucx_unmap,
                                               .pack_key = dray__ucx_pack_key,
                                               .unpack_key = dray__ucx_unpack_key,
                                               .forget_keys = dray__ucx_forget_keys,
                                               .get = dray__ucx_get,
                                               .read = dray__ucx_read};

#else

static int find(char *detail, size_t size, dray_error *error)
{
    (void)detail, (void)size;
    return dray__fail(error, DRAY_EUNSUPPORTED,
                      "dray was built without UCX: install its headers (Debian: apt install "
                      "libucx-dev) and build again");
}

static int may(const dray__stream_keys *keys, bool trusted, dray_error *error)
{
    int rc = allowed(keys, trusted, error);
    return rc ? rc : find(NULL, 0, error);
}

#define COMMON .transport = "ucx", .scheme = "tcp", .first = 'U', .find = find, .check = check

const dray__carrier dray__carrier_ucx = {.name = "ucx", COMMON, .may = may};
const dray__carrier dray__carrier_ucx_reads = {.name = "ucx_reads", COMMON, .may = may};

void dray__ucx_pretend(const dray__ucx_version *version)
{
    (void)version;
}
#endif
