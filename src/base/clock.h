/* Deadlines are CLOCK_MONOTONIC nanoseconds, so that a clock that jumps changes nothing. */
#pragma once

#include <poll.h>
#include <stdbool.h>
#include <stdint.h>

#define DRAY__SECOND INT64_C(1000000000)
#define DRAY__MILLISECOND INT64_C(1000000)

int64_t dray__now(void);
/* now + timeout, saturating; negative timeouts count as 0. */
int64_t dray__deadline(int64_t timeout_ns);
/* Nanoseconds left; 0 when passed. */
uint64_t dray__left(int64_t deadline_ns);
/* Milliseconds left, rounded up, for poll(2); 0 when passed. */
int dray__left_ms(int64_t deadline_ns);

/* ---- waiting ---------------------------------------------------------------------------------
 *
 * Waiting for descriptors until a deadline, or until the program interrupts it
 * (dray_set_interrupt). A call that is interrupted does the same as when its deadline passes. */

/* The longest time between two questions. */
#define DRAY__SLICE_MS 200

/* As poll(2), and goes on after signals. Returns a positive number when something is ready, 0 when
 * the deadline passed or the wait was interrupted, -errno on failure. */
int dray__wait(struct pollfd *fds, nfds_t count, int64_t deadline_ns);
/* Asks the program. false in every thread but the one that wants to be asked. */
bool dray__interrupted(void);
