/* Which spaces of stores (backend.h) a folder's queues have used: a line each, written before the
 * space's first object, so that whatever a coordinator leaves when it is killed, also while it puts
 * back what a journal holds, the next one finds and drops. */
#ifndef DRAY_QUEUE_STORES_H
#define DRAY_QUEUE_STORES_H

#include <dray/dray.h>
#include <stdbool.h>

/* Safe on the disk when it returns. folder NULL: nobody will look. */
int dray__stores_note(const char *folder, const char *kind, const char *address, uint64_t space,
                      dray_error *error);
/* Drops the objects of all spaces that are noted, but for those that are `used`, and forgets them.
 * Those of a store that cannot be reached are left for the next time. */
int dray__stores_clean(const char *folder, bool (*used)(void *user, uint64_t space), void *user,
                       dray_error *error);

#endif
