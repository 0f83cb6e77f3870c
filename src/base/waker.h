/* One descriptor to poll for several others, and for a time. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>

typedef struct dray__waker {
    int fd, timer; /* fd is readable when one of the others is, or the time has come; -1 before it
                      is opened */
} dray__waker;

#define DRAY__WAKER_CLOSED ((dray__waker){.fd = -1, .timer = -1})

/* Opens the waker, with a timer if `timer` is set. Does nothing for parts that are open already. */
int dray__waker_open(dray__waker *waker, bool timer, dray_error *error);
/* Adds a descriptor until it is closed. Opens the waker if necessary. Does nothing for fd -1. */
int dray__waker_add(dray__waker *waker, int fd, dray_error *error);
/* Set the timer to fire after this time, or at this time of the monotonic clock. 0 turns it off. */
void dray__waker_after(const dray__waker *waker, int64_t ns);
void dray__waker_at(const dray__waker *waker, int64_t at_ns);
void dray__waker_close(dray__waker *waker);
