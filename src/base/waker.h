/* One descriptor to wait at for several others, and for a time. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>

typedef struct dray__waker {
    int fd, timer; /* fd: readable when one of the others is, or the time came; -1: not opened */
} dray__waker;

#define DRAY__WAKER_CLOSED ((dray__waker){.fd = -1, .timer = -1})

/* Opens it, with a timer if it is wanted; nothing that is open already. */
int dray__waker_open(dray__waker *waker, bool timer, dray_error *error);
/* Until it is closed. Opens the waker where it is not. -1: nothing. */
int dray__waker_add(dray__waker *waker, int fd, dray_error *error);
/* The timer fires after this time, or at this time of the monotonic clock. 0 turns it off. */
void dray__waker_after(const dray__waker *waker, int64_t ns);
void dray__waker_at(const dray__waker *waker, int64_t at_ns);
void dray__waker_close(dray__waker *waker);
