/* A callback at each step of an update or a save, for fault tests. */
#ifndef DRAY_WEIGHTS_HOOK_H
#define DRAY_WEIGHTS_HOOK_H

typedef void (*dray__weights_hook_fn)(void *user, const char *step);
void dray__weights_hook(dray__weights_hook_fn fn, void *user); /* before threads start */
void dray__weights_step(const char *step);

#endif
