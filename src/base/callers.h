/* Connections that a listener took: one rule for all listeners, so that nobody keeps others out by
 * connecting. A connection is a stranger's until its listener says that it is known: who is there
 * was proven, or a first request has come whole. Strangers have a fixed time for that, whatever
 * they send meanwhile, and there may be few of them: the oldest one ends for the newest. There may
 * be more of the known, and there the one that was silent longest ends. Both numbers are far below
 * what the process may open (RLIMIT_NOFILE), as other things want descriptors, too. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* One connection, a part of what its listener keeps of it. */
typedef struct dray__caller {
    struct dray__caller *next, *before; /* of its list; NULL: in none */
    void *owner;                        /* the listener's */
    int64_t since_ns;                   /* a stranger: it connected; known: it was last heard */
    bool known;
    bool busy; /* the listener's to set: it is known, and must not end to make room */
} dray__caller;

typedef struct dray__callers {
    dray__caller strangers, known; /* rings, the oldest first */
    uint32_t stranger_count, known_count;
    const char *name; /* for the log */
    uint32_t part;    /* the known may have 1 / part of the descriptors */
    int64_t patience_ns, told_ns;
    /* Ends a connection, which has left the list: now, or soon. */
    void (*end)(void *user, dray__caller *caller);
    void *user;
} dray__callers;

enum {
    DRAY__STRANGERS_MAX = 256,    /* of a listener, */
    DRAY__STRANGERS_PART = 8,     /* and at most this part of the descriptors */
    DRAY__CALLERS_PART_MANY = 2,  /* for a listener whose connections matter most, */
    DRAY__CALLERS_PART_SOME = 4,  /* and for the others */
    DRAY__CALLERS_PATIENCE_S = 10 /* from a connection to its first request */
};

void dray__callers_init(dray__callers *callers, const char *name, uint32_t part,
                        int64_t patience_ns, void (*end)(void *user, dray__caller *caller),
                        void *user);
/* A connection has come: others may end for it. false: all that are there are busy, and this one
 * cannot be served. */
bool dray__callers_enter(dray__callers *callers, dray__caller *caller, void *owner);
/* It is known from now on, or heard again. */
void dray__callers_heard(dray__callers *callers, dray__caller *caller);
void dray__callers_leave(dray__callers *callers, dray__caller *caller);
/* Ends the strangers whose time is over. To be called every few seconds at least. */
void dray__callers_sweep(dray__callers *callers);
/* There are no descriptors left: the oldest stranger ends, else the one that was silent longest.
 * false: there is none. */
bool dray__callers_make_room(dray__callers *callers);
