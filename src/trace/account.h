/* Where a process's time has gone so far: sums by state and, but for waits, by the name of the
 * span, which it keeps in the head of its file of spans, in shared memory. Others read them while
 * it runs, and after it was killed: what runs now counts up to the moment that is asked for.
 *
 * The time is that of the thread that opened the file (dray_trace_open). Numbers are there as the
 * machine has them: they are for this host, and for now. */
#pragma once

#include <dray/trace.h>
#include <stdbool.h>

enum {
    DRAY__WAIT_CAUSES = DRAY_CAUSE_LEASE + 1,
    /* busy, transfer, and a state for each cause of waits */
    DRAY__STATE_BUSY = 0,
    DRAY__STATE_TRANSFER = 1,
    DRAY__STATE_WAIT = 2,
    DRAY__STATES = DRAY__STATE_WAIT + DRAY__WAIT_CAUSES,
    DRAY__ACCOUNT_NAMES = 64,
    DRAY__ACCOUNT_NAME = 32,
    DRAY__ACCOUNT_AT = 2048, /* in the file */
    DRAY__SPANS_HEAD = 8192  /* bytes of the file before its chunks */
};

static inline int dray__state_of(dray_span_kind kind, dray_wait_cause cause)
{
    return kind == DRAY_SPAN_BUSY       ? DRAY__STATE_BUSY
           : kind == DRAY_SPAN_TRANSFER ? DRAY__STATE_TRANSFER
                                        : DRAY__STATE_WAIT + (int)cause;
}

const char *dray__cause_name(dray_wait_cause cause); /* "samples" */

/* ---- writing: the thread that owns it -------------------------------------------------------- */

typedef struct dray__account dray__account;

/* In the file's head. NULL: there is none, as the file cannot be mapped. */
dray__account *dray__account_map(int file);
void dray__account_unmap(dray__account *account); /* NULL is fine */
/* The state that ran until `now` is over, and had so much CPU time; from here on it is this one,
 * with `name` of what is done (static storage). NULL: nothing runs. */
void dray__account_switch(dray__account *account, int64_t now, int64_t cpu_ns, int state,
                          const char *name);
/* What runs is, and was since it began, this state. */
void dray__account_restate(dray__account *account, int state);

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct dray__account_sum {
    char name[DRAY__ACCOUNT_NAME];
    int64_t ns, cpu_ns;
} dray__account_sum;

typedef struct dray__accounted {
    char label[64];
    int64_t first_ns; /* when the account began; 0: it has not */
    int64_t ended_ns; /* when the process was seen to be dead; 0: it was not */
    int64_t state_ns[DRAY__STATES];
    int64_t cpu_ns; /* of all states */
    int state;      /* that runs; -1: none */
    dray__account_sum named[DRAY__ACCOUNT_NAMES];
    uint32_t named_count;
} dray__accounted;

/* What the file's process has done until `now`, or until it was dead. false: nothing that can be
 * read. */
bool dray__account_read(const char *path, int64_t now, dray__accounted *out);
/* The file's process is dead. Best effort: a program that keeps no account has none to end. */
void dray__account_end(const char *path, int64_t now);
