/* The test hook: a process can be killed, or can look around, at an exact step of the queue's work.
 */
#include "queue/hook.h"

static dray__queue_hook_fn hook;
static void *hook_user;

void dray__queue_hook(dray__queue_hook_fn fn, void *user)
{
    hook = fn;
    hook_user = user;
}

void dray__queue_step(const char *step)
{
    if (hook)
        hook(hook_user, step);
}
