/* The controller's side of the pages on which clients write their releases (queue/messages.h). */
#include "base/clock.h"
#include "base/error.h"
#include "queue/server/waiters.h"

#include <event2/event.h>

#define SWEEP_FIRST (50 * DRAY__MILLISECOND)
#define SWEEP_LAST (10 * DRAY__SECOND)

static bool collect_page(dray__served *q, dray__page *page)
{
    uint32_t tickets[DRAY__RELEASES];
    uint32_t count = dray__releases_read(page->releases, &page->read, tickets);
    for (uint32_t i = 0; i < count; i++)
        dray__claim_release(q->table, page->client, tickets[i]);
    return count != 0;
}

bool dray__page_add(dray__served *q, dray__client *client, int fd)
{
    dray__releases *releases =
        fd >= 0 && q->page_count < DRAY__PAGES ? dray__releases_map(fd) : NULL;
    if (!releases)
        return false;
    dray__releases_want(releases, q->wanted);
    q->pages[q->page_count++] = (dray__page){.client = client, .releases = releases};
    return true;
}

void dray__page_remove(dray__served *q, const dray__client *client)
{
    uint32_t i = 0;
    while (i < q->page_count && q->pages[i].client != client)
        i++;
    if (i == q->page_count)
        return;
    collect_page(q, &q->pages[i]);
    dray__releases_free(q->pages[i].releases);
    q->pages[i] = q->pages[--q->page_count];
}

void dray__pages_free(dray__served *q)
{
    while (q->page_count)
        dray__releases_free(q->pages[--q->page_count].releases);
}

bool dray__collect(dray__served *q)
{
    bool any = false;
    for (uint32_t i = 0; i < q->page_count; i++)
        any |= collect_page(q, &q->pages[i]);
    return any;
}

bool dray__collect_wanted(dray__served *q)
{
    /* Bytes of cleared rows (hidden) are kept until their last reader releases them. */
    uint32_t wanted = (q->inserts.first || q->table->hidden ? DRAY__WANT_BYTES : 0) |
                      (q->claims.first ? DRAY__WANT_ROWS : 0);
    uint32_t more = wanted & ~q->wanted;
    if (wanted == q->wanted)
        return false;
    q->wanted = wanted;
    for (uint32_t i = 0; i < q->page_count; i++)
        dray__releases_want(q->pages[i].releases, wanted);
    return more && dray__collect(q);
}

/* ---- without requests ----------------------------------------------------------------------- */

/* Sets the timer, unless nothing is claimed, so that there is nothing to release. */
static void sweep_after(dray__controller *self, int64_t ns)
{
    bool claimed = false;
    for (const dray__served *q = self->queues; q; q = q->next)
        claimed |= q->page_count && q->table->claim_count;
    struct timeval wait = {.tv_sec = ns / DRAY__SECOND,
                           .tv_usec = (suseconds_t)(ns % DRAY__SECOND / 1000)};
    self->sweep_ns = claimed && event_add(self->sweep, &wait) == 0 ? ns : 0;
}

static void on_sweep(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    dray__controller *self = user;
    int64_t next = 2 * self->sweep_ns;
    bool any = false;
    for (dray__served *q = self->queues; q; q = q->next)
        any |= dray__collect(q);
    dray__pump_all(self);
    sweep_after(self, any ? SWEEP_FIRST : next < SWEEP_LAST ? next : SWEEP_LAST);
}

void dray__sweep_soon(dray__controller *self)
{
    if (self->sweep_ns != SWEEP_FIRST)
        sweep_after(self, SWEEP_FIRST);
}

int dray__sweep_init(dray__controller *self, dray_error *error)
{
    self->sweep = evtimer_new(self->base, on_sweep, self);
    return self->sweep ? DRAY_OK : dray__nomem(error);
}
