/* A callback at each step of an update, of a save, and of the queue's work, for fault tests. The
 * queue's steps:
 *
 *   client      told (the controller knows of a chunk), kept (so does the keeper), wrote (values
 *               are in a chunk), asking (a request is about to be sent), answered
 *
 *   controller  handling, handled (a request changed the table; no answer yet), answering (a
 *               group's answers are about to be sent)
 *
 *   journal     writing, written (not synced), syncing, synced, renaming, renamed (compaction),
 *               reading (a record, to put its bytes back)
 *
 *   keeper      keeping, holding (a chunk is kept; no answer yet), giving, dropping */
#pragma once

typedef void (*dray__hook_fn)(void *user, const char *step);
void dray__hook_set(dray__hook_fn fn, void *user);
extern _Atomic(dray__hook_fn) dray__hooked; /* the library's own threads read it, too */
extern _Atomic(void *) dray__hook_user;
/* A macro, so that nothing is called when no hook is set. */
#define dray__hook_step(step)                                                                      \
    do {                                                                                           \
        dray__hook_fn hooked = dray__hooked;                                                       \
        if (hooked)                                                                                \
            hooked(dray__hook_user, step);                                                         \
    } while (0)
