/* Connections that a listener accepted. All listeners share one rule, so that no client can keep
 * others out by connecting. A connection is a stranger until its listener says that it is known: it
 * has proven its identity, or its first request has arrived completely. Strangers have a fixed time
 * for that, and their number is small: a new one replaces the oldest. There may be more known
 * connections; when there are too many, the one that has been silent longest is closed. Both limits
 * are far below the number of descriptors that the process may open (RLIMIT_NOFILE), as other parts
 * need descriptors, too. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* One connection, as a member of the listener's own struct. */
typedef struct dray__caller {
    struct dray__caller *next, *before; /* the list that it is in; NULL when it is in none */
    void *owner;                        /* the listener's */
    /* When a stranger connected, or when a known connection last sent something. */
    int64_t since_ns;
    bool known;
    /* The listener sets it: the connection is known, and must not be closed to make room. */
    bool busy;
} dray__caller;

typedef struct dray__callers {
    dray__caller strangers, known; /* rings that begin with the oldest connection */
    uint32_t stranger_count, known_count;
    const char *name; /* for the log */
    uint32_t part;    /* known connections may use 1 / part of the descriptors */
    int64_t patience_ns, told_ns;
    /* Closes a connection that has left the list, now or soon. */
    void (*end)(void *user, dray__caller *caller);
    void *user;
} dray__callers;

enum {
    DRAY__STRANGERS_MAX = 256,    /* of a listener, */
    DRAY__STRANGERS_PART = 8,     /* and at most this part of the descriptors */
    DRAY__CALLERS_PART_MANY = 2,  /* for the listener with the most important connections, */
    DRAY__CALLERS_PART_SOME = 4,  /* and for the others */
    DRAY__CALLERS_PATIENCE_S = 10 /* from a connection to its first request */
};

void dray__callers_init(dray__callers *callers, const char *name, uint32_t part,
                        int64_t patience_ns, void (*end)(void *user, dray__caller *caller),
                        void *user);
/* Adds a new connection, for which others may be closed. Returns false when all others are busy
 * and this one cannot be served. */
bool dray__callers_enter(dray__callers *callers, dray__caller *caller, void *owner);
/* Is called when the connection becomes known, and when a known one sends something. */
void dray__callers_heard(dray__callers *callers, dray__caller *caller);
void dray__callers_leave(dray__callers *callers, dray__caller *caller);
/* Closes the strangers that have used up their time. Call it at least every few seconds. */
void dray__callers_sweep(dray__callers *callers);
/* Is called when no descriptors are left. Closes the oldest stranger, else the connection that has
 * been silent longest. Returns false when there is none. */
bool dray__callers_make_room(dray__callers *callers);
