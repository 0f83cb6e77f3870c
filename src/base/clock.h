/* Deadlines are CLOCK_MONOTONIC nanoseconds, so that changes of the wall clock do not affect
 * them. */
#pragma once

#include <poll.h>
#include <stdbool.h>
#include <stdint.h>

#define DRAY__SECOND INT64_C(1000000000)
#define DRAY__MILLISECOND INT64_C(1000000)

int64_t dray__now(void);
/* Returns now + timeout, saturating; negative timeouts count as 0. */
int64_t dray__deadline(int64_t timeout_ns);
/* Returns the nanoseconds left; 0 when the deadline has passed. */
uint64_t dray__left(int64_t deadline_ns);
/* Returns the milliseconds left, rounded up, for poll(2); 0 when the deadline has passed. */
int dray__left_ms(int64_t deadline_ns);

/* ---- waiting ---------------------------------------------------------------------------------
 *
 * Waiting for descriptors until a deadline, or until the program interrupts it
 * (dray_set_interrupt). An interrupted call behaves as if its deadline had passed. */

/* The longest time between two calls of the program's interrupt function. */
#define DRAY__SLICE_MS 200

/* As poll(2), and goes on after signals. Returns a positive number when something is ready, 0 when
 * the deadline passed or the wait was interrupted, -errno on failure. */
int dray__wait(struct pollfd *fds, nfds_t count, int64_t deadline_ns);
/* Returns whether the program interrupts the wait. It is asked only in the thread that it chose;
 * elsewhere the result is false. */
bool dray__interrupted(void);
