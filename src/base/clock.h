/* Deadlines are CLOCK_MONOTONIC nanoseconds, so that a clock that jumps changes nothing. */
#ifndef DRAY_BASE_CLOCK_H
#define DRAY_BASE_CLOCK_H

#include <stdint.h>

#define DRAY__SECOND INT64_C(1000000000)
#define DRAY__MILLISECOND INT64_C(1000000)

int64_t dray__now(void);
/* now + timeout, saturating; negative timeouts count as 0. */
int64_t dray__deadline(int64_t timeout_ns);
/* Milliseconds left, rounded up, for poll(2); 0 when passed. */
int dray__left_ms(int64_t deadline_ns);

#endif
