#include "run/host/turn.h"

#include "base/clock.h"
#include "base/error.h"
#include "run/host/host.h"

#include <dray/lease.h>
#include <stdlib.h>
#include <string.h>

struct dray__turn {
    char *text; /* the names point into it */
    const char *names[DRAY_LEASE_NAMES];
    uint32_t count;
    dray_lease *lease; /* on rank 0, while it has the turn */
    int64_t step;      /* of the work that was begun last */
};

/* Other ranks wait longer for rank 0's broadcast than rank 0 waits for the lease at a time. */
enum { FOLLOWER_EXTRA_SECONDS = 15 };

int dray__turn_open(const char *leases, dray__turn **out, dray_error *error)
{
    *out = NULL;
    if (!leases || !leases[0])
        return DRAY_OK;
    dray__turn *self = calloc(1, sizeof(*self));
    char *rest = NULL;
    if (!self || !(self->text = strdup(leases))) {
        free(self);
        return dray__nomem(error);
    }
    for (char *name = strtok_r(self->text, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
        if (self->count == DRAY_LEASE_NAMES) {
            dray__turn_close(self);
            return dray__fail(error, DRAY_EINVALID,
                              "$DRAY_LEASES: expected at most %d names, found more",
                              DRAY_LEASE_NAMES);
        }
        self->names[self->count++] = name;
    }
    *out = self;
    return DRAY_OK;
}

void dray__turn_close(dray__turn *turn)
{
    if (!turn)
        return;
    dray_lease_release(turn->lease, NULL);
    free(turn->text);
    free(turn);
}

bool dray__turn_is_mine(const dray__host *host)
{
    return host->turn && host->turn->lease;
}

int dray__turn_give(dray__host *host, dray_error *error)
{
    if (!dray__turn_is_mine(host))
        return DRAY_OK;
    dray_lease *lease = host->turn->lease;
    host->turn->lease = NULL;
    return dray_lease_release(lease, error);
}

int dray__turn_end(dray__host *host, dray_error *error)
{
    if (!host->turn)
        return DRAY_OK;
    int rc = dray__host_meet(host, error);
    return rc ? rc : dray__turn_give(host, error);
}

/* ---- waiting for it -------------------------------------------------------------------------- */

/* Rank 0's broadcast. */
typedef enum word { MINE = 0, WAITING } word;

static int tell(const dray__host *host, word *what, dray_error *error)
{
    int64_t timeout_ns = host->wait_ns + FOLLOWER_EXTRA_SECONDS * DRAY__SECOND;
    uint32_t told = *what;
    int rc = dray__group_broadcast(host->group, 0, &told, sizeof(told), timeout_ns, error);
    *what = told;
    return rc;
}

/* On rank 0: gives the turn to others first when the work of another step begins. */
static int look(dray__turn *self, int64_t step, word *out, dray_error *error)
{
    bool next = step >= 0 && step != self->step;
    uint32_t waiting = 0;
    int rc = DRAY_OK;
    self->step = step >= 0 ? step : self->step;
    if (self->lease && next)
        rc = dray_lease_check(self->lease, &waiting, error);
    *out = self->lease && !waiting ? MINE : WAITING;
    return rc;
}

/* Waits without limit, because the supervisor ends a run that makes no progress. */
static int wait_for_it(dray__host *host, dray_error *error)
{
    dray__turn *self = host->turn;
    dray_lease_options options = DRAY_LEASE_OPTIONS_INIT;
    options.timeout_ns = host->wait_ns;
    word now = WAITING;
    int rc = DRAY_OK;
    while (!rc && now == WAITING) {
        if (dray__host_leads(host))
            rc = dray_lease_acquire(host->context, self->names, self->count, &options, &self->lease,
                                    error);
        now = rc == DRAY_OK ? MINE : WAITING;
        if (rc == DRAY_OK || rc == DRAY_ETIMEDOUT)
            rc = tell(host, &now, error);
    }
    return rc;
}

int dray__turn_begin(dray__host *host, int64_t step, dray_error *error)
{
    dray__turn *self = host->turn;
    word now = MINE;
    if (!self)
        return DRAY_OK;
    int rc = dray__host_leads(host) ? look(self, step, &now, error) : DRAY_OK;
    if (!rc)
        rc = tell(host, &now, error);
    if (rc || now == MINE)
        return rc;
    rc = dray__turn_end(host, error);
    dray_trace_wait(DRAY_CAUSE_LEASE, "wait for lease", step);
    if (!rc)
        rc = wait_for_it(host, error);
    dray_trace_leave();
    return rc;
}
