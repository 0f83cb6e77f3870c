/* A joined host's connection with the run: a session of its own. It joins. After that a thread
 * sends the run a heartbeat and the host's events once a second, sends its files, and receives the
 * run's progress. Each request compares clocks: when it was sent at a, answered by the run at r,
 * and the answer was received at b, the run's clock is ahead by r − (a + b) / 2, with an error of
 * at most (b − a) / 2 (Cristian, "Probabilistic clock synchronization", 1989). The request that was
 * answered fastest counts; its error grows by 50 ns for each ms since then, because quartz clocks
 * drift apart. */
#pragma once

#include "run/job/job.h"

#include <jansson.h>

typedef struct dray__uplink dray__uplink;

typedef struct dray__uplink_options {
    const dray__job *job;
    const char *text;          /* the resolved job file */
    const char *address;       /* "tcp:HOST:PORT" */
    const char *name;          /* the name of this host, for messages */
    const char *const *tokens; /* files of tokens; none: $DRAY_TOKEN_FILE */
    uint32_t token_count;
    json_t *roles;      /* {"rollout": 2}; borrowed */
    const char *folder; /* the folder whose logs and spans are sent to the run */
    void (*say)(const char *event, const char *text); /* prints a line for the user */
    bool (*hurries)(void);                            /* whether to leave at once; NULL for never */
    int64_t wait_ns; /* how long to wait for a coordinator and for places */
} dray__uplink_options;

typedef struct dray__uplink_sight {
    uint64_t progress;   /* the number of steps that the run has done */
    int64_t answered_ns; /* when the run last answered */
    int64_t asked_ns;    /* when the question of that answer was asked */
    bool ended;          /* the queue has ended */
    bool over;           /* the run has ended */
    bool lost;           /* the session has ended */
    char why[DRAY_ERROR_MESSAGE_MAX];
} dray__uplink_sight;

/* Finds the tokens that the roles need. Fails with DRAY_ENOENT or DRAY_EPERM, which name the
 * missing one. */
int dray__uplink_open(const dray__uplink_options *options, dray__uplink **out, dray_error *error);
void dray__uplink_close(dray__uplink *link); /* NULL is allowed. */

/* Opens the session and asks for places, until it has them, the time is over, or the call is
 * interrupted (dray_set_interrupt). After a lost session it is called again, and accepts only the
 * same run. *told is the run's answer, which the link owns. */
int dray__uplink_join(dray__uplink *link, const json_t **told, dray_error *error);
/* Starts the thread. */
int dray__uplink_begin(dray__uplink *link, dray_error *error);
void dray__uplink_look(dray__uplink *link, dray__uplink_sight *out);
/* Returns true when the run answers. When it does not, that may be why a process died. */
bool dray__uplink_fresh(dray__uplink *link);
uint64_t dray__uplink_progress(dray__uplink *link);
/* Prints a line here and at the run. */
void dray__uplink_say(dray__uplink *link, const char *event, const char *text);
void dray__uplink_busy(dray__uplink *link); /* records that processes of this host compute */
/* Ends the thread: it sends the last files, reports the failure (NULL when there was none), and
 * leaves. In a hurry it has a second for that. */
void dray__uplink_leave(dray__uplink *link, const char *failed, int64_t deadline_ns);
/* Ends the thread and the session. */
void dray__uplink_end(dray__uplink *link);

/* Returns the file of the token with which the role's processes identify themselves. */
const char *dray__uplink_token(const dray__uplink *link, const dray__job_role *role);
bool dray__uplink_master(const dray__uplink *link, const dray__job_role *role, char address[64],
                         uint16_t *port);
