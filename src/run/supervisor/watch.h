/* The supervisor's view of the queue: a thread that opens it before any role does, looks at it
 * every second and on request, and wakes the supervisor's loop. (The loop itself must not wait for
 * the coordinator, because the coordinator may wait for the keeper, which runs on the same
 * loop.) */
#pragma once

#include "run/job/job.h"

typedef struct dray__watch dray__watch;

typedef struct dray__sight {
    bool open;        /* the queue has been opened */
    bool ended;       /* dray_queue_end was called */
    int64_t moved_ns; /* when an insertion or a commit was last seen */
    int64_t begun_ns; /* when this look began; 0 when there was none yet */
} dray__sight;

/* address is the coordinator's. */
int dray__watch_start(const dray__job *job, const char *address, dray__watch **out,
                      dray_error *error);
void dray__watch_free(dray__watch *watch); /* NULL is fine */

int dray__watch_fd(const dray__watch *watch); /* readable after a look; read 8 bytes of it */
void dray__watch_look(dray__watch *watch);    /* looks at once */
/* Gets the result of the last look. Returns an error when the queue cannot be opened. */
int dray__watch_last(dray__watch *watch, dray__sight *out, dray_error *error);
/* Writes the rows that sessions of processes of this group hold: "4 rows of rollout, 2 rows of
 * eval", or "no rows". dray__watch_all_held writes those of all sessions, with their holders. */
void dray__watch_all_held(dray__watch *watch, char *out, size_t capacity); /* by whom, too */
void dray__watch_holds(dray__watch *watch, long group, char *out, size_t capacity);
/* Returns a number that differs for different claims of that group; 0 when it has none. */
uint64_t dray__watch_claims(dray__watch *watch, long group);
