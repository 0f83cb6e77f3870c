/* What desk.c (tasks) and driver.c share. */
#ifndef DRAY_RUN_DESK_H
#define DRAY_RUN_DESK_H

#include "run/host.h"

typedef struct dray__driver dray__driver;

/* Starts the driver's thread: it makes the steps' prompts, watches the steps finish, and ends the
 * queue. It ends the process with an error when it cannot go on. */
int dray__driver_start(dray__host *host, dray__driver **out, dray_error *error);
/* Waits for the thread, which ends by itself once the queue has ended; `now`: asks it to end before
 * that, because the host has failed. NULL is fine. */
void dray__driver_join(dray__driver *driver, bool now);

#endif
