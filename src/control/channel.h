/* The client's end of a connection: blocking, threadless, with descriptors.
 *
 * A context owns one channel for its session (its death is the session's). Publishers, subscribers
 * and queues open channels of their own, attached to the session, so that objects in different
 * threads never wait for each other. One channel: one thread at a time, one request at a time
 * (a non-blocking one may be outstanding). */
#pragma once

#include "base/network.h"
#include "base/tls.h"
#include "base/wire.h"
#include "control/protocol.h"

#include <dray/dray.h>
#include <sys/types.h>

typedef struct dray__channel dray__channel;

/* This process, once it has had a channel, by asking the kernel after forks only. */
pid_t dray__channel_pid(void);

typedef struct dray__reply {
    dray__reader payload; /* valid until the channel's next call */
    uint32_t fd_count;
    int fds[DRAY__FRAME_FDS]; /* the caller's to close */
} dray__reply;

/* A channel of the context's session. */
int dray__channel_open(dray_context *context, dray__channel **out, dray_error *error);
/* The same, with a deadline of its own. Where the coordinator is gone, and the one that comes after
 * it takes members back, both wait for it: the session then goes on under its ids, and what the
 * channel's owner had registered must be registered again (dray__context_returns). */
int dray__channel_open_until(dray_context *context, int64_t deadline_ns, dray__channel **out,
                             dray_error *error);
/* A channel to another server that speaks the same frames (the queue's keeper): no session. */
int dray__channel_connect(const char *address, int64_t deadline_ns, dray__channel **out,
                          dray_error *error);
void dray__channel_close(dray__channel *channel); /* NULL is fine */

/* Sends a request and waits for its reply. The server's error reply becomes *error. When the
 * deadline passes the channel stays usable (a late reply is recognised by its id and dropped); when
 * the connection breaks: DRAY_ECLOSED. The payload writer is reset. */
int dray__call(dray__channel *channel, uint16_t type, dray__writer *payload, const int *fds,
               uint32_t fd_count, int64_t deadline_ns, dray__reply *reply, dray_error *error);
/* The same with these fields, and those of the answer (NULL: it is not looked at), whose texts and
 * lists are in `texts` (NULL: it has none). */
int dray__ask(dray__channel *channel, uint16_t type, const dray__fields *of, const void *message,
              int64_t deadline_ns, dray__arena *texts, const dray__fields *answer_of, void *answer,
              dray_error *error);
/* The two halves, not waiting: send, then take the reply when dray__channel_fd is readable
 * (DRAY_EAGAIN until then). */
int dray__call_start(dray__channel *channel, uint16_t type, dray__writer *payload, const int *fds,
                     uint32_t fd_count, dray_error *error);
int dray__ask_start(dray__channel *channel, uint16_t type, const dray__fields *of,
                    const void *message, dray_error *error);
int dray__call_poll(dray__channel *channel, dray__reply *reply, dray_error *error);
/* Sends without wanting an answer (the server must send none). */
int dray__notify(dray__channel *channel, uint16_t type, dray__writer *payload, dray_error *error);
void dray__tell(dray__channel *channel, uint16_t type, const dray__fields *of, const void *message);
/* The role of the token that was shown; "" over a Unix socket. */
const char *dray__channel_role(const dray__channel *channel);
bool dray__channel_broken(const dray__channel *channel); /* every further call is DRAY_ECLOSED */
/* Reads what has come, so that a connection that broke meanwhile is seen. */
bool dray__channel_alive(dray__channel *channel);
bool dray__channel_ended(const dray__channel *channel); /* the server said that it ends */
int dray__channel_socket(const dray__channel *channel); /* borrowed */
/* Over a Unix socket; over TCP nobody can pass descriptors. */
bool dray__channel_passes_fds(const dray__channel *channel);
/* Readable when dray__call_poll is worth a try, also when another call put its reply aside. Made at
 * the first call of this function; -1 when the process has no descriptors left. */
int dray__channel_fd(dray__channel *channel);

/* Members that met at a barrier; to begin with, nobody. `members` is the caller's to free. */
typedef struct dray__party_of {
    uint64_t *members;
    uint32_t count;
} dray__party_of;

/* dray_barrier, for those who meet again and again: *party says who met last, and gets who does
 * now. One of them that left since then is missed at once: DRAY_EDEAD. NULL: dray_barrier. */
int dray__meet(dray_context *context, const char *name, uint32_t count, int64_t timeout_ns,
               dray__party_of *party, dray_error *error);

/* The context's default deadline for a timeout argument (DRAY_WAIT_DEFAULT = the context's). */
int64_t dray__context_deadline(const dray_context *context, int64_t timeout_ns);
/* Until when to wait for the answer to a request that was sent with this deadline: a second more,
 * so that the server, which answers DRAY_ETIMEDOUT at the deadline, decides what has happened. */
int64_t dray__answer_deadline(int64_t deadline_ns);
/* Has the coordinator said that it ends, and that none comes after it? Or is this a fork? */
bool dray__context_ended(dray_context *context);
/* Does the coordinator that comes after this one know the session again? */
bool dray__context_takes_back(const dray_context *context);
/* How often the session went on with another coordinator. */
uint64_t dray__context_returns(const dray_context *context);
/* Coordinator's address as the context resolved it, "unix:..." or "tcp:...". */
const char *dray__context_address(const dray_context *context);
/* Path of the keeper's socket, told by the coordinator at HELLO; NULL when it has none. */
const char *dray__context_keeper(const dray_context *context);
/* How members of the session find each other's data safe; borrowed from the context. Its key is
 * what this member shows to other members, and they to it; no identity: the session's role moves no
 * weights. */
const struct dray__stream_keys *dray__context_keys(const dray_context *context);
uint64_t dray__context_host(const dray_context *context); /* hash of the host identity */
