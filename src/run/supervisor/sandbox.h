/* Restricts a process that serves others with Landlock (Linux 5.13). From then on it can write only
 * in its own folders, even if a bug lets an attacker run code in it. Reading, sockets and memory
 * stay as they are. */
#pragma once

#include <dray/dray.h>

/* Returns the kernel's version of Landlock; 0 when it has none, or does not permit it. */
int dray__sandbox_version(void);
/* Restricts this thread and those that it starts, permanently. In `work` (made when it does not
 * exist; NULL for none) everything may be created and changed. In the folder of each of `sockets`
 * (NULL for none) sockets may be created and files removed. Elsewhere nothing may be written, and
 * programs are not started. When the kernel has no Landlock, or $DRAY_SANDBOX is off, a line in the
 * log says so. */
int dray__sandbox(const char *work, const char *const *sockets, size_t count, dray_error *error);
