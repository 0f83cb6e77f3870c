/* A callback at each step of the queue's work, for fault tests. The steps:
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
#ifndef DRAY_QUEUE_HOOK_H
#define DRAY_QUEUE_HOOK_H

typedef void (*dray__queue_hook_fn)(void *user, const char *step);
void dray__queue_hook(dray__queue_hook_fn fn, void *user); /* before threads start */
extern dray__queue_hook_fn dray__queue_hooked;
extern void *dray__queue_hook_user;
/* A macro, so that nothing is called where nobody looks. */
#define dray__queue_step(step)                                                                     \
    do                                                                                             \
        if (dray__queue_hooked)                                                                    \
            dray__queue_hooked(dray__queue_hook_user, step);                                       \
    while (0)

#endif
