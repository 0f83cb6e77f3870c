/* The declarations that coordinator.c, connection.c, request.c, session.c and barrier.c share. */
#pragma once

#include "base/callers.h"
#include "base/hash.h"
#include "control/coordinator.h"
#include "control/frame.h"
#include "control/messages.h"
#include "control/token.h"

#include <event2/util.h>
#include <stdbool.h>
#include <sys/time.h>

enum { DRAY__GENERATION_SHIFT = 32 }; /* of member ids */
enum { DRAY__TOKEN = 16 };

typedef struct dray__connection dray__connection;
typedef struct dray__listener dray__listener;

struct dray__session {
    dray__coordinator *coordinator;
    dray__session *next;
    dray__connection *first; /* the session ends with it */
    uint64_t member, epoch, host;
    char *name, *role;
    uint32_t rank;
    int64_t pid, told_pid; /* pid is from the kernel, told_pid from the client */
    int64_t since_ns;
    uint32_t may;               /* DRAY__MAY_... */
    uint8_t token[DRAY__TOKEN]; /* a connection that shows it may attach */
    bool ended;
};

typedef struct dray__outgoing {
    struct dray__outgoing *next;
    size_t size, at;
    uint32_t fd_count;
    int fds[DRAY__FRAME_FDS];
    uint8_t data[];
} dray__outgoing;

struct dray__connection {
    dray__coordinator *coordinator;
    dray__connection *next;
    dray__caller caller;
    dray__listener *listener;
    dray__session *session; /* NULL before HELLO or ATTACH */
    uint64_t id;            /* unique; never reused */
    int fd;
    dray__tls *tls; /* NULL for a Unix socket */
    uint32_t may;   /* DRAY__MAY_... of its token; 0 until it is proven */
    bool local, doomed;
    int64_t pid;
    struct event *readable, *writable;
    dray__inbox inbox;
    dray__outgoing *out, **out_last;
    size_t out_bytes;
    dray__request *requests; /* not answered yet */
    size_t request_count, request_bytes;
};

struct dray__request {
    dray__connection *connection; /* NULL when it is gone */
    dray__coordinator *coordinator;
    dray__session *session;
    dray__request *next, **link;
    const dray__service *service;
    void *self;
    uint64_t id;
    uint16_t type;
    uint32_t fd_count;
    int fds[DRAY__FRAME_FDS];
    void *data;
    struct event *timer;
    int64_t deadline_ns;
    dray__reader reader;
    size_t size;
    uint8_t payload[];
};

typedef struct dray__registered {
    dray__service service;
    void *self;
} dray__registered;

enum { DRAY__SERVICES = 16, DRAY__LISTENERS = 2 };

struct dray__listener {
    dray__coordinator *coordinator;
    int fd;
    bool local;
    struct event *event, *resume;
    dray__callers callers;
    char text[128];  /* the address as clients write it */
    char path[4096]; /* of the socket or, for TCP, of the token; removed at the end if it is still
                        ours */
    uint64_t device, inode; /* of that file; 0 when it is not ours */
};

struct dray__coordinator {
    struct event_base *base;
    struct event *reaper; /* closes doomed connections outside of other callbacks */
    struct event *sweep;  /* ends connections that never sent their identity */
    dray__listener listeners[DRAY__LISTENERS];
    uint32_t listener_count;
    char *keeper_path, *token_path, *state_path;
    dray__token state;   /* the secret by which members that come back are recognised */
    uint64_t generation; /* the number of coordinators that began with this state; 0 when it keeps
                          * none */
    dray__token master;  /* tokens of roles, which TCP connections show, are derived from it */
    dray__token data;    /* the key that members show each other */
    bool sessionless;
    size_t unread_bytes;
    int64_t hello_ns;
    dray__connection *connections;
    dray__session *sessions;
    uint64_t members; /* the id that was given last: the generation in its high bits */
    uint64_t connection_ids;
    dray__map epochs; /* by role, name and rank */
    dray__limits limits;
    int64_t since_ns;
    dray__registered services[DRAY__SERVICES];
    uint32_t service_count;
    struct reports *reports; /* of reports.c; NULL when it has none */
    dray__writer scratch;
};

/* connection.c */
struct timeval dray__interval(int64_t ns);
void dray__connection_add(dray__listener *listener, int fd);
/* Has a connection closed by the loop soon; the callback of a listener's callers. */
void dray__connection_doom(void *listener, dray__caller *caller);
/* Sends the frame, or keeps it until there is room. */
void dray__connection_send(dray__connection *connection, dray__frame *frame, const int *fds);
/* Sends an error as the answer to message `id`. */
void dray__connection_fail(dray__connection *connection, uint16_t type, uint64_t id,
                           const dray_error *error);
void dray__connection_close(dray__connection *connection);
void dray__session_end(dray__session *session);
void dray__reap(evutil_socket_t fd, short what, void *coordinator);
void dray__sweep_strangers(evutil_socket_t fd, short what, void *coordinator);

/* request.c */
void dray__request_unlink(dray__request *request);

/* Adds the service of messages 0x0001..0x00FF. */
int dray__sessions_add(dray__coordinator *coordinator, dray_error *error);

/* Barriers: a part of that service. */
typedef struct dray__barriers dray__barriers;
dray__barriers *dray__barriers_new(void);
void dray__barriers_free(dray__barriers *barriers);
int dray__barriers_enter(dray__barriers *barriers, dray__request *request, const dray__meeting *m,
                         dray_error *error);
void dray__barriers_expired(dray__barriers *barriers, dray__request *request, int channel_gone);
/* Is called when a session ends; ends its part in barriers. */
void dray__barriers_ended(dray__barriers *barriers, const dray__session *session);
void dray__barriers_status(dray__barriers *barriers, json_t *object);
