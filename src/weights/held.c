/* Until what is published is there (haul.h): publishers without checksums do not wait for their
 * GPUs when they publish; who reads does. Here, and not on a stream: a stream that waits cannot be
 * told to give up, and a trainer that hangs would take the engine along past its deadline. Whom it
 * was that one waited for shows, too. */
#include "base/clock.h"
#include "base/error.h"
#include "weights/haul.h"
#include "weights/mark.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define LOOK_NS 50000

/* DRAY_EAGAIN: not yet. */
static int look(const dray__source *source, dray_error *error)
{
    dray__local *local = source->local ? dray__local_hold(source->token) : NULL;
    dray_event *mark = local ? dray__local_mark(local) : source->mark;
    int rc = mark ? dray_event_sync(mark, 0, error) : DRAY_OK;
    dray__local_release(local);
    return rc == DRAY_ETIMEDOUT ? DRAY_EAGAIN : rc;
}

static int watch(dray__haul *h, dray_error *error)
{
    struct epoll_event event = {.events = EPOLLIN};
    h->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (h->poll_fd < 0)
        h->poll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (h->timer_fd < 0 || h->poll_fd < 0 ||
        epoll_ctl(h->poll_fd, EPOLL_CTL_ADD, h->timer_fd, &event))
        return dray__fail_errno(error, errno, "descriptors of an update");
    return DRAY_OK;
}

int dray__haul_hold(dray__haul *h, dray_error *error)
{
    uint32_t count = h->sources->count;
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < count && (rc == DRAY_OK || rc == DRAY_EAGAIN); i++) {
        rc = look(&h->sources->sources[i], error);
        if (rc != DRAY_EAGAIN)
            continue;
        if (!h->held_by)
            h->held_by = calloc(count, sizeof *h->held_by);
        if (!h->held_by)
            return dray__nomem(error);
        h->held_by[i] = true;
        h->held_count++;
    }
    if (rc && rc != DRAY_EAGAIN)
        return rc;
    return h->held_count ? watch(h, error) : DRAY_OK;
}

static void set_timer(const dray__haul *h)
{
    struct itimerspec spec = {.it_value.tv_nsec = h->held_count ? LOOK_NS : 0};
    timerfd_settime(h->timer_fd, 0, &spec, NULL); /* and it is not readable before */
}

int dray__haul_held(dray__haul *h, dray_error *error)
{
    if (!h->held_count)
        return DRAY_OK;
    for (uint32_t i = 0; i < h->sources->count; i++) {
        int rc = h->held_by[i] ? look(&h->sources->sources[i], error) : DRAY_EAGAIN;
        if (rc == DRAY_EAGAIN)
            continue;
        if (rc)
            return rc;
        h->held_by[i] = false;
        h->held_last = i;
        h->held_count--;
    }
    set_timer(h);
    h->held_ns = dray__now() - h->opened_ns;
    for (uint32_t l = 0; h->held_count && l < DRAY__LANES; l++)
        h->lanes[l].waits = true;
    return h->held_count ? DRAY_EAGAIN : DRAY_OK;
}

void dray__source_who(const dray__source *source, char *out, size_t size)
{
    static const uint8_t none[16];
    char gpu[41];
    size_t used = (size_t)snprintf(out, size, "%.64s", source->name ? source->name : "");
    for (uint32_t i = 0; source->layout && i < dray_layout_region_count(source->layout); i++) {
        const dray_region_info *info = dray_layout_region(source->layout, i);
        if (info->kind == DRAY_REGION_CUDA && memcmp(info->device, none, sizeof none) != 0) {
            snprintf(out + used, size - used, " on %s", dray__cuda_uuid_text(info->device, gpu));
            return;
        }
    }
}

void dray__haul_explain_held(const dray__haul *h, dray_error *error)
{
    char who[128];
    for (uint32_t i = 0; i < h->sources->count; i++)
        if (h->held_by[i]) {
            dray__source_who(&h->sources->sources[i], who, sizeof who);
            dray__fail_prefix(error, error->code, "the fence of %s has not come: ", who);
            return;
        }
}
