/* The time of a process so far: sums by state and, except for waits, by the name of the span, which
 * it keeps in the head of its file of spans, in shared memory. Others read them while it runs, and
 * after it was killed. The running state counts up to the moment of reading.
 *
 * The time is that of the thread that opened the file (dray_trace_open). Numbers have this
 * machine's byte order, because they are read only on this host, while the run lasts. */
#pragma once

#include <dray/trace.h>
#include <stdbool.h>

enum {
    DRAY__WAIT_CAUSES = DRAY_CAUSE_LEASE + 1,
    /* one state for busy, one for transfer, and one for each cause of waits */
    DRAY__STATE_BUSY = 0,
    DRAY__STATE_TRANSFER = 1,
    DRAY__STATE_WAIT = 2,
    DRAY__STATES = DRAY__STATE_WAIT + DRAY__WAIT_CAUSES,
    DRAY__ACCOUNT_NAMES = 64,
    DRAY__ACCOUNT_NAME = 32,
    DRAY__ACCOUNT_AT = 2048, /* offset in the file */
    DRAY__SPANS_HEAD = 8192  /* the bytes of the file before its chunks */
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

/* Opens the account in the file's head. Returns NULL when the file cannot be mapped. */
dray__account *dray__account_map(int file);
void dray__account_unmap(dray__account *account); /* NULL is allowed. */
/* Ends the state that ran until `now`, adds cpu_ns to it, and begins this one. `name` names the
 * work (static storage); NULL when nothing runs. */
void dray__account_switch(dray__account *account, int64_t now, int64_t cpu_ns, int state,
                          const char *name);
/* Changes the state that runs, as of its beginning. */
void dray__account_restate(dray__account *account, int state);

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct dray__account_sum {
    char name[DRAY__ACCOUNT_NAME];
    int64_t ns, cpu_ns;
} dray__account_sum;

typedef struct dray__accounted {
    char label[64];
    int64_t first_ns; /* when the account began; 0 when it has not */
    int64_t ended_ns; /* when the process was found dead; 0 when it was not */
    int64_t state_ns[DRAY__STATES];
    int64_t cpu_ns; /* the sum of all states */
    int state;      /* the state that runs; -1 for none */
    dray__account_sum named[DRAY__ACCOUNT_NAMES];
    uint32_t named_count;
} dray__accounted;

/* Reads the account of the file's process until `now`, or until its death. Returns false when
 * nothing can be read. */
bool dray__account_read(const char *path, int64_t now, dray__accounted *out);
/* Records that the file's process is dead. A program that keeps no account has none to end. */
void dray__account_end(const char *path, int64_t now);
