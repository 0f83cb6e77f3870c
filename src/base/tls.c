#include "base/tls.h"

#include "base/error.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/hmac.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum {
    RECORD = 16 << 10,  /* the most plain bytes of a TLS record */
    OVERHEAD = 256 + 5, /* the bytes that a record adds (RFC 8446 section 5.2) */
    BUFFER = 64 << 10,
    /* How often the other side may change keys before a MiB has arrived. Each change costs much
     * more than the few bytes of its request, and needs an answer, which is buffered here until the
     * other side reads it. */
    CHANGES = 32,
    CHANGES_PER = 1 << 20
};

/* The ciphertext between OpenSSL and the socket. Encrypted bytes must be sent unchanged, so they
 * are copied here, and the caller may reuse its buffer. */
typedef struct stream {
    uint8_t *data;
    size_t begin, end, capacity;
} stream;

struct dray__tls {
    SSL *ssl;
    int fd;
    bool server, ready, ended;
    int broken; /* the errno value that every further call returns */
    dray__tls_key key;
    dray__tls_find find;
    void *user;
    stream in, out;
    size_t chunk, came; /* `came` is the bytes since `changes` was 0 */
    uint32_t changes;   /* of keys */
};

/* ---- between OpenSSL and the socket ---------------------------------------------------------- */

static BIO_METHOD *method;

static int flush(dray__tls *tls)
{
    stream *out = &tls->out;
    while (out->begin < out->end) {
        ssize_t n = send(tls->fd, out->data + out->begin, out->end - out->begin,
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EWOULDBLOCK ? -EAGAIN : -errno;
        out->begin += (size_t)n;
    }
    out->begin = out->end = 0;
    return 0;
}

static bool reserve(stream *s, size_t more)
{
    if (s->capacity - s->end >= more)
        return true;
    uint8_t *data = realloc(s->data, s->end + more);
    if (!data)
        return false;
    s->data = data;
    s->capacity = s->end + more;
    return true;
}

/* Takes all bytes. Their number is limited because dray__tls_send takes no new bytes while some are
 * here, and by the size of a handshake. */
static int on_write(BIO *bio, const char *data, int size)
{
    dray__tls *tls = BIO_get_data(bio);
    if (size <= 0 || !reserve(&tls->out, (size_t)size))
        return -1;
    memcpy(tls->out.data + tls->out.end, data, (size_t)size);
    tls->out.end += (size_t)size;
    return size;
}

static int on_read(BIO *bio, char *data, int size)
{
    dray__tls *tls = BIO_get_data(bio);
    stream *in = &tls->in;
    BIO_clear_retry_flags(bio);
    if (tls->broken)
        return -1;
    if (in->begin == in->end) {
        ssize_t n;
        in->begin = in->end = 0;
        do
            n = recv(tls->fd, in->data, in->capacity, MSG_DONTWAIT);
        while (n < 0 && errno == EINTR);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            BIO_set_retry_read(bio);
            return -1;
        }
        if (n <= 0) {
            tls->ended = true;
            return 0;
        }
        in->end = (size_t)n;
    }
    size_t take = in->end - in->begin < (size_t)size ? in->end - in->begin : (size_t)size;
    memcpy(data, in->data + in->begin, take);
    in->begin += take;
    return (int)take;
}

static long on_control(BIO *bio, int command, long number, void *pointer)
{
    (void)bio, (void)number, (void)pointer;
    return command == BIO_CTRL_FLUSH; /* dray__tls_flush does the flushing */
}

static void on_message(int write, int version, int type, const void *data, size_t size, SSL *ssl,
                       void *user)
{
    (void)version, (void)user;
    dray__tls *tls = SSL_get_app_data(ssl);
    if (!write && type == SSL3_RT_HANDSHAKE && size &&
        *(const uint8_t *)data == SSL3_MT_KEY_UPDATE && ++tls->changes > CHANGES)
        tls->broken = EPROTO; /* Nothing more is read (on_read). */
}

/* ---- keys ------------------------------------------------------------------------------------ */

static const unsigned char AES_128_GCM_SHA256[] = {0x13, 0x01};

/* OpenSSL takes an external key as the secret of an earlier session, which never existed. */
static SSL_SESSION *session_of(SSL *ssl, const dray__tls_key *key)
{
    SSL_SESSION *session = SSL_SESSION_new();
    if (session && SSL_SESSION_set1_master_key(session, key->bytes, sizeof key->bytes) &&
        SSL_SESSION_set_cipher(session, SSL_CIPHER_find(ssl, AES_128_GCM_SHA256)) &&
        SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION))
        return session;
    SSL_SESSION_free(session);
    return NULL;
}

static int use_key(SSL *ssl, const EVP_MD *md, const unsigned char **id, size_t *size,
                   SSL_SESSION **session)
{
    dray__tls *tls = SSL_get_app_data(ssl);
    *session = NULL;
    if (md && !EVP_MD_is_a(md, "SHA256")) /* The server asked for another hash. */
        return 1;
    *id = (const unsigned char *)tls->key.identity;
    *size = strlen(tls->key.identity);
    *session = session_of(ssl, &tls->key);
    return *session != NULL;
}

static int find_key(SSL *ssl, const unsigned char *id, size_t size, SSL_SESSION **session)
{
    dray__tls *tls = SSL_get_app_data(ssl);
    dray__tls_key key = {{0}, {0}};
    *session = NULL;
    if (!size || size >= sizeof key.identity || memchr(id, 0, size))
        /* The identity is unknown. The handshake ends here, as there is no certificate. */
        return 1;
    memcpy(key.identity, id, size);
    if (!tls->find(tls->user, &key))
        return 1;
    tls->key = key;
    *session = session_of(ssl, &key);
    dray__forget_bytes(key.bytes, sizeof key.bytes);
    return *session != NULL;
}

/* ---- opening --------------------------------------------------------------------------------- */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static SSL_CTX *contexts[2]; /* client, server */

static SSL_CTX *new_context(bool server)
{
    SSL_CTX *context = SSL_CTX_new(server ? TLS_server_method() : TLS_client_method());
    if (!context)
        return NULL;
    SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                                  SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_num_tickets(context, 0);
    SSL_CTX_set_max_early_data(context, 0);
    SSL_CTX_set_msg_callback(context, on_message);
    if (server) {
        SSL_CTX_set_psk_find_session_callback(context, find_key);
    } else {
        /* This side knows no certificates, so it refuses a server that shows one instead of the
         * key. */
        SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL);
        SSL_CTX_set_psk_use_session_callback(context, use_key);
    }
    if (SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) &&
        SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) &&
        SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") &&
        SSL_CTX_set1_groups_list(context, "X25519:P-256"))
        return context;
    SSL_CTX_free(context);
    return NULL;
}

static void make_contexts(void)
{
    method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "dray stream");
    if (!method)
        return;
    BIO_meth_set_write(method, on_write);
    BIO_meth_set_read(method, on_read);
    BIO_meth_set_ctrl(method, on_control);
    for (int i = 0; i < 2; i++)
        contexts[i] = new_context(i == 1);
}

static int refuse(dray_error *error, const char *what)
{
    unsigned long code = ERR_peek_last_error();
    const char *text = code ? ERR_reason_error_string(code) : NULL;
    ERR_clear_error();
    return dray__fail(error, DRAY_ESYS, "TLS: %s: %s", what, text ? text : "out of memory");
}

static int new_tls(int fd, bool server, dray__tls **out, dray_error *error)
{
    pthread_once(&once, make_contexts);
    if (!contexts[server])
        return refuse(error, "OpenSSL has no TLS 1.3 with shared keys");
    dray__tls *tls = calloc(1, sizeof *tls);
    if (!tls)
        return dray__nomem(error);
    tls->fd = fd;
    tls->server = server;
    tls->chunk = BUFFER;
    tls->ssl = SSL_new(contexts[server]);
    BIO *bio = tls->ssl && reserve(&tls->in, BUFFER) ? BIO_new(method) : NULL;
    if (!bio) {
        dray__tls_free(tls);
        return refuse(error, "a connection");
    }
    BIO_set_data(bio, tls);
    BIO_set_init(bio, 1);
    SSL_set_bio(tls->ssl, bio, bio);
    SSL_set_app_data(tls->ssl, tls);
    if (server)
        SSL_set_accept_state(tls->ssl);
    else
        SSL_set_connect_state(tls->ssl);
    *out = tls;
    return DRAY_OK;
}

int dray__tls_connect(int fd, const dray__tls_key *key, dray__tls **out, dray_error *error)
{
    int status = new_tls(fd, false, out, error);
    if (!status)
        (*out)->key = *key;
    return status;
}

int dray__tls_accept(int fd, dray__tls_find find, void *user, dray__tls **out, dray_error *error)
{
    int status = new_tls(fd, true, out, error);
    if (!status) {
        (*out)->find = find;
        (*out)->user = user;
    }
    return status;
}

void dray__tls_goodbye(dray__tls *tls)
{
    if (!tls || !tls->ready || tls->broken || tls->ended)
        return;
    ERR_clear_error();
    SSL_shutdown(tls->ssl);
    flush(tls);
    ERR_clear_error();
}

void dray__tls_free(dray__tls *tls)
{
    if (!tls)
        return;
    SSL_free(tls->ssl);
    free(tls->in.data);
    free(tls->out.data);
    dray__forget_bytes(&tls->key, sizeof tls->key);
    free(tls);
}

int dray__tls_buffer(dray__tls *tls, size_t bytes, dray_error *error)
{
    if (bytes < BUFFER)
        bytes = BUFFER;
    if (bytes > tls->in.capacity && !reserve(&tls->in, bytes - tls->in.end))
        return dray__nomem(error);
    tls->chunk = bytes;
    return DRAY_OK;
}

/* ---- the handshake --------------------------------------------------------------------------- */

/* Reasons from this number on are alerts of the other side. */
enum { ALERTS = SSL_AD_REASON_OFFSET };

static int handshake_failed(dray__tls *tls, int reason, dray_error *error)
{
    unsigned long code = ERR_peek_error();
    int why = ERR_GET_REASON(code);
    const char *text = code ? ERR_reason_error_string(code) : NULL;
    bool ended = tls->ended && !code;
    ERR_clear_error();
    flush(tls); /* This alert informs the other side. */
    tls->broken = EPERM;
    if (reason == SSL_ERROR_SYSCALL || reason == SSL_ERROR_ZERO_RETURN || ended ||
        why == SSL_R_UNEXPECTED_EOF_WHILE_READING) {
        tls->broken = ECONNRESET;
        return dray__fail(error, DRAY_ECLOSED, "TLS: the other side closed the connection");
    }
    if (!tls->server && why >= ALERTS)
        return dray__fail(error, DRAY_EPERM,
                          "TLS: the other side does not take the token '%s' (%s): is it of this "
                          "session, and unchanged?",
                          tls->key.identity, text ? text : "alert");
    /* The server's alerts for an unknown identity and for a wrong key. */
    if (tls->server && (why == SSL_R_NO_SUITABLE_SIGNATURE_ALGORITHM ||
                        why == SSL_R_NO_SHARED_CIPHER || why == SSL_R_BINDER_DOES_NOT_VERIFY))
        return dray__fail(error, DRAY_EPERM, "TLS: the client shows %s (%s)",
                          why == SSL_R_BINDER_DOES_NOT_VERIFY ? "a wrong key" : "no known token",
                          text ? text : "?");
    tls->broken = EPROTO;
    return dray__fail(error, DRAY_EPROTO, "TLS: the other side speaks no TLS 1.3 with tokens (%s)",
                      text ? text : "?");
}

int dray__tls_handshake(dray__tls *tls, dray_error *error)
{
    if (tls->broken)
        return dray__fail(error, DRAY_ECLOSED, "TLS: the connection is broken");
    if (!tls->ready) {
        ERR_clear_error();
        int status = SSL_do_handshake(tls->ssl);
        int reason = status == 1 ? SSL_ERROR_NONE : SSL_get_error(tls->ssl, status);
        if (status != 1 && reason != SSL_ERROR_WANT_READ && reason != SSL_ERROR_WANT_WRITE)
            return handshake_failed(tls, reason, error);
        if (status == 1 && !SSL_session_reused(tls->ssl)) {
            tls->broken = EPERM;
            return dray__fail(error, DRAY_EPERM, "TLS: the other side did not use the token");
        }
        tls->ready = status == 1;
    }
    int code = flush(tls);
    if (code < 0 && code != -EAGAIN) {
        tls->broken = -code;
        return dray__fail(error, DRAY_ECLOSED, "TLS: the other side closed the connection");
    }
    return tls->ready ? DRAY_OK : DRAY_EAGAIN;
}

const char *dray__tls_identity(const dray__tls *tls)
{
    return tls->ready ? tls->key.identity : "";
}

/* Returns 0 when reading and writing may go on. */
static int be_ready(dray__tls *tls)
{
    if (tls->broken)
        return -tls->broken;
    if (tls->ready)
        return 0;
    int status = dray__tls_handshake(tls, NULL);
    return status == DRAY_OK ? 0 : (status == DRAY_EAGAIN ? -EAGAIN : -tls->broken);
}

/* ---- bytes ----------------------------------------------------------------------------------- */

int dray__tls_flush(dray__tls *tls)
{
    if (tls->broken)
        return -tls->broken;
    int code = flush(tls);
    if (code < 0 && code != -EAGAIN)
        tls->broken = -code;
    return code;
}

ssize_t dray__tls_send(dray__tls *tls, const void *data, size_t size)
{
    int code = be_ready(tls);
    if (!code)
        code = dray__tls_flush(tls);
    if (code)
        return code;
    size_t most = tls->chunk, taken = 0;
    /* Reserves room for all records at once, because growing would copy. */
    if (tls->out.capacity < most + (most / RECORD + 1) * OVERHEAD &&
        !reserve(&tls->out, most + (most / RECORD + 1) * OVERHEAD))
        return -ENOMEM;
    ERR_clear_error();
    while (taken < size && taken < most) {
        size_t part = size - taken < RECORD ? size - taken : RECORD, wrote;
        if (SSL_write_ex(tls->ssl, (const uint8_t *)data + taken, part, &wrote) != 1)
            break;
        taken += wrote;
    }
    ERR_clear_error();
    if (!taken) {
        tls->broken = EPROTO;
        return -EPROTO;
    }
    code = dray__tls_flush(tls);
    return code && code != -EAGAIN ? code : (ssize_t)taken;
}

static ssize_t recv_failed(dray__tls *tls, int reason)
{
    ERR_clear_error();
    if (reason == SSL_ERROR_ZERO_RETURN || tls->ended) {
        tls->ended = true;
        return 0;
    }
    tls->broken = EPROTO;
    return -EPROTO;
}

ssize_t dray__tls_recv(dray__tls *tls, void *data, size_t size)
{
    int code = be_ready(tls);
    if (code)
        return code;
    size_t got = 0;
    ERR_clear_error();
    while (got < size) {
        size_t n;
        if (SSL_read_ex(tls->ssl, (uint8_t *)data + got, size - got, &n) == 1) {
            got += n;
            if (!dray__tls_pending(tls)) /* The next call reads the socket. */
                break;
            continue;
        }
        int reason = SSL_get_error(tls->ssl, 0);
        flush(tls); /* It is an alert, or the answer to a change of keys. */
        if (got || reason == SSL_ERROR_WANT_READ || reason == SSL_ERROR_WANT_WRITE)
            break;
        return recv_failed(tls, reason);
    }
    ERR_clear_error();
    tls->came += got;
    if (tls->came >= CHANGES_PER)
        tls->came = tls->changes = 0;
    return got ? (ssize_t)got : -EAGAIN;
}

short dray__tls_events(const dray__tls *tls)
{
    return (short)(dray__tls_unsent(tls) ? POLLIN | POLLOUT : POLLIN);
}

bool dray__tls_unsent(const dray__tls *tls)
{
    return tls->out.begin < tls->out.end;
}

bool dray__tls_pending(const dray__tls *tls)
{
    return SSL_pending(tls->ssl) > 0 || tls->in.begin < tls->in.end;
}

/* ---- keys of keys ---------------------------------------------------------------------------- */

bool dray__keyed_hash(const uint8_t key[DRAY__TLS_KEY], const void *data, size_t size,
                      uint8_t out[DRAY__TLS_KEY])
{
    unsigned int made = 0;
    return HMAC(EVP_sha256(), key, DRAY__TLS_KEY, data, size, out, &made) && made == DRAY__TLS_KEY;
}

bool dray__derive_key(const uint8_t key[DRAY__TLS_KEY], const char *text,
                      uint8_t out[DRAY__TLS_KEY])
{
    return dray__keyed_hash(key, text, strlen(text), out);
}

bool dray__same_bytes(const void *a, const void *b, size_t size)
{
    return CRYPTO_memcmp(a, b, size) == 0;
}

void dray__forget_bytes(void *data, size_t size)
{
    OPENSSL_cleanse(data, size);
}
