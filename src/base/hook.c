/* The test hook: a process can be killed, or can look around, at an exact step of its work. */
#include "base/hook.h"

dray__hook_fn dray__hooked;
void *dray__hook_user;

void dray__hook_set(dray__hook_fn fn, void *user)
{
    dray__hooked = fn;
    dray__hook_user = user;
}
