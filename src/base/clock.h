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
 * Waiting for descriptors until a deadline, or until the program interrupts it
 * (dray_set_interrupt). What a call does then is what it does when its deadline passes. */

/* The longest time between two questions. */
#define DRAY__SLICE_MS 200

/* As poll(2), which goes on after signals. Positive: something is ready; 0: the deadline passed, or
 * the wait was interrupted; negative: errno. */
int dray__wait(struct pollfd *fds, nfds_t count, int64_t deadline_ns);
/* Asks the program. false in every thread but the one that wants to be asked. */
bool dray__interrupted(void);
