/* The spaces of stores (backend.h) that a folder's queues have used. Each has a line, which is
 * written before the space's first object. So the next coordinator finds and drops everything that
 * a killed one leaves, even one that was killed while it put bytes back from a journal. This is
 * done in a thread of its own, only at addresses of the coordinator's own list, and given up after
 * some tries. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>

typedef struct dray__stores dray__stores;

typedef struct dray__stores_options {
    const char *folder;
    int64_t patience_ns; /* of a try; 0 means 3 s */
    int64_t pause_ns;    /* after the first try, doubled each time; 0 means 1 s */
    uint32_t tries;      /* of a coordinator, for each space; 0 means 5 */
    uint32_t starts;     /* coordinators that fail before it is forgotten; 0 means 5 */
} dray__stores_options;

int dray__stores_new(const dray__stores_options *options, dray__stores **out, dray_error *error);
/* Stops trying, and waits for the try that is under way. NULL is fine. */
void dray__stores_free(dray__stores *stores);
/* Returns when the note is safe on the disk. stores may be NULL; then nothing is noted. */
int dray__stores_note(dray__stores *stores, const char *kind, const char *address, uint64_t space,
                      dray_error *error);
/* Begins to drop the objects of all spaces noted so far, except those that are `used`. Stores that
 * are not `listed` are left alone. Both functions are called only before this returns. */
int dray__stores_clean(dray__stores *stores, bool (*used)(void *user, uint64_t space),
                       bool (*listed)(void *user, const char *kind, const char *address),
                       void *user, dray_error *error);
/* Returns true when nothing is left to try. */
bool dray__stores_done(dray__stores *stores);
