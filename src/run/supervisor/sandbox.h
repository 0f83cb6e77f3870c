/* Landlock (Linux 5.13): a process that serves others gives up to write anywhere but in its own
 * folders, whatever a mistake in it would let somebody do. Reading, sockets and memory stay as they
 * are. */
#pragma once

#include <dray/dray.h>

/* The kernel's version of Landlock; 0: it has none, or does not let us. */
int dray__sandbox_version(void);
/* For this thread and those that it starts, for ever: in `work` (made when it is not there; NULL:
 * none) everything may be made and changed, in the folder of each of `sockets` (NULL: none) sockets
 * may be made and files removed, elsewhere nothing; programs are not started. Where the kernel has
 * no Landlock, or $DRAY_SANDBOX is off, a line in the log says so. */
int dray__sandbox(const char *work, const char *const *sockets, size_t count, dray_error *error);
