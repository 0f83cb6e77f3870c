/* Waiting for descriptors until a deadline, or until the program interrupts it
 * (dray_set_interrupt). What a call does then is what it does when its deadline passes. */
#ifndef DRAY_BASE_WAIT_H
#define DRAY_BASE_WAIT_H

#include <poll.h>
#include <stdbool.h>
#include <stdint.h>

/* The longest time between two questions. */
#define DRAY__SLICE_MS 200

/* As poll(2), which goes on after signals. Positive: something is ready; 0: the deadline passed, or
 * the wait was interrupted; negative: errno. */
int dray__wait(struct pollfd *fds, nfds_t count, int64_t deadline_ns);
/* Asks the program. false in every thread but the one that wants to be asked. */
bool dray__interrupted(void);

#endif
