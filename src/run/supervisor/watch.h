/* The supervisor's view of the queue: a thread that opens it before any role does, looks at it
 * every second and on request, and wakes the supervisor's loop. (The loop itself must not wait for
 * the coordinator, which may wait for the keeper, whose loop it is.) */
#pragma once

#include "run/job/job.h"

typedef struct dray__watch dray__watch;

typedef struct dray__sight {
    bool open;        /* the queue is there */
    bool ended;       /* dray_queue_end */
    int64_t moved_ns; /* when something was seen to be inserted or committed */
    int64_t begun_ns; /* when this look began; 0 when there was none yet */
} dray__sight;

/* address: the coordinator's. */
int dray__watch_start(const dray__job *job, const char *address, dray__watch **out,
                      dray_error *error);
void dray__watch_free(dray__watch *watch); /* NULL is fine */

int dray__watch_fd(const dray__watch *watch); /* readable after a look; read 8 bytes of it */
void dray__watch_look(dray__watch *watch);    /* now, and not within a second */
/* The result of the last look. Not DRAY_OK when the queue cannot be opened. */
int dray__watch_last(dray__watch *watch, dray__sight *out, dray_error *error);
/* "4 rows of rollout, 2 rows of eval", held by sessions of processes of this group; "no rows". */
void dray__watch_all_held(dray__watch *watch, char *out, size_t capacity); /* by whom, too */
void dray__watch_holds(dray__watch *watch, long group, char *out, size_t capacity);
/* A number that differs for different claims of that group; 0 when it has none. */
uint64_t dray__watch_claims(dray__watch *watch, long group);
