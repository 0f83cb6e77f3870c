#include "base/waker.h"

#include "base/clock.h"
#include "base/error.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

static int add(const dray__waker *w, int fd)
{
    struct epoll_event event = {.events = EPOLLIN};
    return epoll_ctl(w->fd, EPOLL_CTL_ADD, fd, &event);
}

int dray__waker_open(dray__waker *w, bool timer, dray_error *error)
{
    bool wanted = timer && w->timer < 0;
    if (w->fd < 0)
        w->fd = epoll_create1(EPOLL_CLOEXEC);
    if (wanted)
        w->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (w->fd < 0 || (timer && w->timer < 0) || (wanted && add(w, w->timer)))
        return dray__fail_errno(error, errno, "descriptors to wait at");
    return DRAY_OK;
}

int dray__waker_add(dray__waker *w, int fd, dray_error *error)
{
    if (fd < 0)
        return DRAY_OK;
    int rc = dray__waker_open(w, false, error);
    if (rc == DRAY_OK && add(w, fd))
        rc = dray__fail_errno(error, errno, "descriptors to wait at");
    return rc;
}

static void set(const dray__waker *w, int64_t ns, int flags)
{
    struct itimerspec spec = {
        .it_value = {.tv_sec = ns / DRAY__SECOND, .tv_nsec = ns % DRAY__SECOND}};
    timerfd_settime(w->timer, flags, &spec, NULL); /* and makes it unreadable until then */
}

void dray__waker_after(const dray__waker *w, int64_t ns)
{
    set(w, ns, 0);
}

void dray__waker_at(const dray__waker *w, int64_t at_ns)
{
    set(w, at_ns, TFD_TIMER_ABSTIME);
}

void dray__waker_close(dray__waker *w)
{
    if (w->fd >= 0)
        close(w->fd);
    if (w->timer >= 0)
        close(w->timer);
    *w = DRAY__WAKER_CLOSED;
}
