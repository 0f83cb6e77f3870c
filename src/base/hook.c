/* The test hook: tests can kill a process, or inspect it, at an exact step of its work. */
#include "base/hook.h"

_Atomic(dray__hook_fn) dray__hooked;
_Atomic(void *) dray__hook_user;

void dray__hook_set(dray__hook_fn fn, void *user)
{
    dray__hook_user = user;
    dray__hooked = fn;
}
