/* The test hook: a process can be killed at an exact step. */
#include "weights/hook.h"

#include <stddef.h>

static dray__weights_hook_fn hook;
static void *hook_user;

void dray__weights_hook(dray__weights_hook_fn fn, void *user)
{
    hook = fn;
    hook_user = user;
}

void dray__weights_step(const char *step)
{
    if (hook)
        hook(hook_user, step);
}
