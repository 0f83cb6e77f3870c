/* The test hook: a process can be killed, or can look around, at an exact step of the queue's work.
 */
#include "queue/hook.h"

dray__queue_hook_fn dray__queue_hooked;
void *dray__queue_hook_user;

void dray__queue_hook(dray__queue_hook_fn fn, void *user)
{
    dray__queue_hooked = fn;
    dray__queue_hook_user = user;
}
