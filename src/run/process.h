/* The start of every long-lived process of the program: servers, keepers, and the supervisor and
 * roles of a run. The library changes nothing of the kind in its users' processes. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>

/* A client that leaves, or a reader of our output, does not end us: SIGPIPE is ignored, and the
 * write fails instead. The limit of open files is raised as far as it may be. To be called before
 * threads are started. */
void dray__process_begin(void);
/* Returns whether hangups were to be ignored when this process began, as by nohup(1). To be called
 * before the process handles SIGHUP. */
bool dray__process_ignores_hangups(void);
/* Returns 0, or DRAY_ESYS when this process may open fewer files. */
int dray__process_may_open(unsigned least, dray_error *error);
