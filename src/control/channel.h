/* The client's end of a connection: blocking, threadless, with descriptors.
 *
 * A context owns one channel for its session; when that channel breaks, the session ends.
 * Publishers, subscribers and queues open channels of their own, attached to the session, so that
 * objects in different threads never wait for each other. A channel serves one thread and one
 * request at a time (a non-blocking one may be outstanding). */
#pragma once

#include "base/network.h"
#include "base/tls.h"
#include "base/wire.h"
#include "control/protocol.h"

#include <dray/dray.h>
#include <sys/types.h>

typedef struct dray__channel dray__channel;

/* Returns the pid of this process. Once the process has had a channel, the kernel is asked only
 * after a fork. */
pid_t dray__channel_pid(void);

typedef struct dray__reply {
    dray__reader payload; /* valid until the next call on the channel */
    uint32_t fd_count;
    int fds[DRAY__FRAME_FDS]; /* the caller closes them */
} dray__reply;

/* Opens a channel of the context's session. */
int dray__channel_open(dray_context *context, dray__channel **out, dray_error *error);
/* Opens a channel with a deadline of its own. When the coordinator is gone, and its successor takes
 * members back, the call waits for the successor. The session then goes on under its ids, and the
 * channel's owner must register its objects again (dray__context_returns). */
int dray__channel_open_until(dray_context *context, int64_t deadline_ns, dray__channel **out,
                             dray_error *error);
/* Opens a channel to another server that speaks the same frames (the queue's keeper), without a
 * session. */
int dray__channel_connect(const char *address, int64_t deadline_ns, dray__channel **out,
                          dray_error *error);
void dray__channel_close(dray__channel *channel); /* NULL is allowed. */

/* Sends a request and waits for its reply. The server's error reply becomes *error. The channel
 * stays usable when the deadline passes: a late reply is recognised by its id and dropped. Fails
 * with DRAY_ECLOSED when the connection breaks. Resets the payload writer. */
int dray__call(dray__channel *channel, uint16_t type, dray__writer *payload, const int *fds,
               uint32_t fd_count, int64_t deadline_ns, dray__reply *reply, dray_error *error);
/* The same, with the fields of the request and of the answer. `answer` may be NULL to ignore it.
 * Its texts and lists are in `texts`, which may be NULL when it has none. */
int dray__ask(dray__channel *channel, uint16_t type, const dray__fields *of, const void *message,
              int64_t deadline_ns, dray__arena *texts, const dray__fields *answer_of, void *answer,
              dray_error *error);
/* The two halves of a call, neither of which waits: one sends, the other takes the reply once
 * dray__channel_fd is readable, and returns DRAY_EAGAIN before. */
int dray__call_start(dray__channel *channel, uint16_t type, dray__writer *payload, const int *fds,
                     uint32_t fd_count, dray_error *error);
int dray__ask_start(dray__channel *channel, uint16_t type, const dray__fields *of,
                    const void *message, dray_error *error);
int dray__call_poll(dray__channel *channel, dray__reply *reply, dray_error *error);
/* Sends a request for which the server must send no answer. */
int dray__notify(dray__channel *channel, uint16_t type, dray__writer *payload, dray_error *error);
void dray__tell(dray__channel *channel, uint16_t type, const dray__fields *of, const void *message);
/* Returns the role of the token that the channel was opened with; "" over a Unix socket. */
const char *dray__channel_role(const dray__channel *channel);
/* Returns true when every further call fails with DRAY_ECLOSED. */
bool dray__channel_broken(const dray__channel *channel);
/* Returns false when the connection is broken. Reads the bytes that have arrived first, so that a
 * break in the meantime is noticed. */
bool dray__channel_alive(dray__channel *channel);
/* Returns true when the server announced its end. */
bool dray__channel_ended(const dray__channel *channel);
int dray__channel_socket(const dray__channel *channel); /* borrowed */
/* Returns true when the channel is a Unix socket. Descriptors cannot be passed over TCP. */
bool dray__channel_passes_fds(const dray__channel *channel);
/* Returns a descriptor that is readable when dray__call_poll may succeed, also when another call
 * received the reply and kept it. The first call makes it. Returns -1 when the process has no
 * descriptors left. */
int dray__channel_fd(dray__channel *channel);

/* The members that met at a barrier; none at first. The caller frees `members`. */
typedef struct dray__party_of {
    uint64_t *members;
    uint32_t count;
} dray__party_of;

/* dray_barrier for members that meet repeatedly. *party holds the members of the last meeting,
 * and receives those of this one. When one of them has left since then, the call fails at once
 * with DRAY_EDEAD. `party` may be NULL: then this is dray_barrier. */
int dray__meet(dray_context *context, const char *name, uint32_t count, int64_t timeout_ns,
               dray__party_of *party, dray_error *error);

/* Returns the deadline for a timeout argument; DRAY_WAIT_DEFAULT means the context's timeout. */
int64_t dray__context_deadline(const dray_context *context, int64_t timeout_ns);
/* The deadline for the answer to a request that was sent with this deadline: one second later. The
 * server answers DRAY_ETIMEDOUT at the deadline itself, and so decides the result. */
int64_t dray__answer_deadline(int64_t deadline_ns);
/* Returns true when the coordinator announced that it ends without a successor, and in a forked
 * child. */
bool dray__context_ended(dray_context *context);
/* Returns true when the coordinator's successor knows the session. */
bool dray__context_takes_back(const dray_context *context);
/* The number of times that the session went on with another coordinator. */
uint64_t dray__context_returns(const dray_context *context);
/* Returns the coordinator's address as the context resolved it, "unix:..." or "tcp:...". */
const char *dray__context_address(const dray_context *context);
/* The path of the keeper's socket, which the coordinator sends with HELLO; NULL when it has
 * none. */
const char *dray__context_keeper(const dray_context *context);
/* The keys for data connections between members of the session; borrowed from the context. The
 * key proves this member to other members, and them to it. There is no identity when the
 * session's role moves no weights. */
const struct dray__stream_keys *dray__context_keys(const dray_context *context);
uint64_t dray__context_host(const dray_context *context); /* hash of the host identity */
