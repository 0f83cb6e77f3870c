/* The time at which a thread's requests to the servers of stores end. It belongs to the thread and
 * not to a request, because an update's deadline holds for all that it reads. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* Sets the time at which requests of this thread to a store's server end with DRAY_ETIMEDOUT; 0
 * means never. */
void dray__store_until(int64_t deadline_ns);
/* Returns that time, or INT64_MAX. */
int64_t dray__store_deadline(void);
bool dray__store_is_late(void);
