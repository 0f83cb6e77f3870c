/* Which spaces of stores (backend.h) a folder's queues have used: a line each, written before the
 * space's first object, so that whatever a coordinator leaves when it is killed, also while it puts
 * back what a journal holds, the next one finds and drops. That is done in a thread of its own, at
 * addresses of the coordinator's own list alone, and given up after some tries. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>

typedef struct dray__stores dray__stores;

typedef struct dray__stores_options {
    const char *folder;
    int64_t patience_ns; /* of a try; 0: 3 s */
    int64_t pause_ns;    /* after the first try, and each time twice as long; 0: 1 s */
    uint32_t tries;      /* of a coordinator, with each space; 0: 5 */
    uint32_t starts;     /* coordinators that try in vain, until it is forgotten; 0: 5 */
} dray__stores_options;

int dray__stores_new(const dray__stores_options *options, dray__stores **out, dray_error *error);
/* Tries no more. Waits for the try that is under way. NULL is fine. */
void dray__stores_free(dray__stores *stores);
/* Safe on the disk when it returns. NULL: nobody will look. */
int dray__stores_note(dray__stores *stores, const char *kind, const char *address, uint64_t space,
                      dray_error *error);
/* Begins to drop the objects of all spaces that are noted by now, but for those that are `used`.
 * Stores that are not `listed` are left alone. Both are asked before this returns. */
int dray__stores_clean(dray__stores *stores, bool (*used)(void *user, uint64_t space),
                       bool (*listed)(void *user, const char *kind, const char *address),
                       void *user, dray_error *error);
/* Nothing is left to try. */
bool dray__stores_done(dray__stores *stores);
