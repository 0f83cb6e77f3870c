/* Landlock (Linux 5.13): a process that serves others can write only in its own folders from then
 * on, even if an error in it lets an attacker run code. Reading, sockets and memory stay as they
 * are. */
#pragma once

#include <dray/dray.h>

/* The kernel's version of Landlock; 0 when it has none, or does not permit it. */
int dray__sandbox_version(void);
/* Restricts this thread and those that it starts, for ever. In `work` (made when it is not there;
 * NULL for none) everything may be made and changed. In the folder of each of `sockets` (NULL for
 * none) sockets may be made and files removed. Elsewhere nothing may be written, and programs are
 * not started. When the kernel has no Landlock, or $DRAY_SANDBOX is off, a line in the log says
 * so. */
int dray__sandbox(const char *work, const char *const *sockets, size_t count, dray_error *error);
