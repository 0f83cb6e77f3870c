/* TLS 1.3 over a stream socket, in which both sides prove that they know a shared key (an external
 * PSK with (EC)DHE, RFC 8446 section 2.2). There are no certificates, and a key that leaks later
 * does not decrypt earlier traffic. Tickets, early data and older versions are off, so nothing can
 * be replayed.
 *
 * Nothing here blocks: on -EAGAIN wait until the socket is ready for dray__tls_events and go on.
 * Works in a libevent loop, with poll, or in a data server. The descriptor stays the caller's. It
 * may be blocking or not, because it is used with MSG_DONTWAIT only. A connection is used by one
 * thread at a time. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <sys/types.h>

enum { DRAY__TLS_KEY = 32, DRAY__TLS_IDENTITY = 128 };

/* One side's key: the identity that it shows, and the secret that both sides must know. The
 * identity travels in the clear. */
typedef struct dray__tls_key {
    char identity[DRAY__TLS_IDENTITY];
    uint8_t bytes[DRAY__TLS_KEY];
} dray__tls_key;

typedef struct dray__tls dray__tls;

/* For servers: fills in the key that belongs to key->identity. Returns false when there is none.
 * Called during dray__tls_handshake, in its thread. */
typedef bool (*dray__tls_find)(void *user, dray__tls_key *key);

int dray__tls_connect(int fd, const dray__tls_key *key, dray__tls **out, dray_error *error);
int dray__tls_accept(int fd, dray__tls_find find, void *user, dray__tls **out, dray_error *error);
/* Says that the connection ends, if the socket takes it now. NULL is fine. */
void dray__tls_goodbye(dray__tls *tls);
void dray__tls_free(dray__tls *tls); /* does not close the socket. NULL is fine */

/* Goes on with the handshake. Returns DRAY_OK when done, DRAY_EAGAIN while it is not, DRAY_EPERM
 * when the other side does not know this key, or shows a wrong one, DRAY_EPROTO when it does not
 * use TLS 1.3 with keys, or DRAY_ECLOSED when it went away. Reading and writing finish the
 * handshake by themselves. */
int dray__tls_handshake(dray__tls *tls, dray_error *error);
/* The client's identity; "" before it is proven. */
const char *dray__tls_identity(const dray__tls *tls);

/* Takes up to `size` bytes to be sent. Returns their number (at least 1), -EAGAIN when the socket
 * takes nothing now, or another -errno (-EPROTO, -EPERM, -ECONNRESET). Some of these bytes may
 * still be buffered; the next call, or dray__tls_flush, sends them. */
ssize_t dray__tls_send(dray__tls *tls, const void *data, size_t size);
int dray__tls_flush(dray__tls *tls); /* Returns 0 when all bytes are sent, -EAGAIN while they are
                                      * not, -errno on failure */
/* Receives bytes. Returns their number (at least 1), 0 when the other side has closed or is gone,
 * -EAGAIN while there are none, -errno on failure. */
ssize_t dray__tls_recv(dray__tls *tls, void *data, size_t size);

short dray__tls_events(const dray__tls *tls); /* POLLIN, and POLLOUT while bytes wait to be sent */
bool dray__tls_unsent(const dray__tls *tls);  /* bytes that were taken are not sent yet */
/* Returns true when bytes were read from the socket already, so that dray__tls_recv may succeed
 * without waiting. */
bool dray__tls_pending(const dray__tls *tls);
/* Sets how much ciphertext one system call reads or sends (at least, and by default, 64 KiB), for
 * connections with much traffic. Returns 0, or DRAY_ENOMEM. */
int dray__tls_buffer(dray__tls *tls, size_t bytes, dray_error *error);

/* Derives a key from another one: HMAC-SHA256(key, text). Returns false when out of memory. */
bool dray__derive_key(const uint8_t key[DRAY__TLS_KEY], const char *text,
                      uint8_t out[DRAY__TLS_KEY]);
/* The same for any bytes, as a proof that only a holder of the key can give. */
bool dray__keyed_hash(const uint8_t key[DRAY__TLS_KEY], const void *data, size_t size,
                      uint8_t out[DRAY__TLS_KEY]);
/* Compares in constant time. */
bool dray__same_bytes(const void *a, const void *b, size_t size);
/* Zeroes memory; compilers do not optimise it away. */
void dray__forget_bytes(void *data, size_t size);
