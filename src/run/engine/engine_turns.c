#include "run/engine/engine_turns.h"

#include "base/clock.h"
#include "base/error.h"
#include "control/context.h"
#include "run/job/schedule.h"

#include <stdio.h>
#include <stdlib.h>

struct dray__engine_turns {
    dray__host *host;
    bool needed;
    uint32_t engines;
    double made;            /* samples a second of this engine; 0 until it is measured */
    double trained;         /* samples a second that are trained; 0 until it is measured */
    int64_t version, at_ns; /* the version that was taken last, and when; -1 for none */
    dray_lease *lease;      /* of the turn that has begun */
    int64_t refused_ns;     /* when none was free */
};

/* The weight of a new measurement in the average. */
#define NEWER 0.25
/* A turn that was not free is asked for again after this time, because the engine asks at every
 * token. */
#define AGAIN_NS (2 * DRAY__MILLISECOND)

int dray__engine_turns_open(dray__host *host, dray__engine_turns **out, dray_error *error)
{
    dray__engine_turns *self = calloc(1, sizeof(*self));
    if (!self)
        return dray__nomem(error);
    *self = (dray__engine_turns){.host = host,
                                 .needed = dray__schedule_of(host->job).in_turns,
                                 .engines = (uint32_t)dray__schedule_engines(host->job),
                                 .version = -1};
    *out = self;
    return DRAY_OK;
}

void dray__engine_turns_close(dray__engine_turns *self)
{
    if (self)
        dray_lease_release(self->lease, NULL);
    free(self);
}

static void note(double *mean, double value)
{
    *mean = *mean > 0 ? (1 - NEWER) * *mean + NEWER * value : value;
}

void dray__engine_turns_made(dray__engine_turns *self, uint32_t samples, int64_t took_ns)
{
    if (took_ns > 0)
        note(&self->made, samples * (double)DRAY__SECOND / (double)took_ns);
}

/* Returns how many engines may update at once, by the measured rates. */
static uint32_t engine_turns_most(const dray__engine_turns *self)
{
    double all = self->made * self->engines;
    double spare = all > 0 ? self->engines * (1 - self->trained / all) : 0;
    uint32_t most = spare >= 1 ? (uint32_t)spare : 1;
    return most < self->engines ? most : self->engines - 1;
}

static int acquire(dray__engine_turns *self, uint32_t place, int64_t timeout_ns, dray_error *error)
{
    char name[64];
    const char *const names[] = {name};
    dray_lease_options options = DRAY_LEASE_OPTIONS_INIT;
    snprintf(name, sizeof(name), "%.32s/weights-%u", self->host->spec->name, place);
    options.timeout_ns = timeout_ns;
    return dray_lease_acquire(self->host->context, names, 1, &options, &self->lease, error);
}

/* Tries to take a turn that is free now. */
static int try(dray__engine_turns *self, bool *begun, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < engine_turns_most(self) && !rc && !*begun; i++) {
        rc = acquire(self, i, 0, error);
        *begun = !rc;
        rc = rc == DRAY_ETIMEDOUT ? DRAY_OK : rc;
    }
    self->refused_ns = dray__now();
    return rc;
}

int dray__engine_turns_begin(dray__engine_turns *self, bool wait, bool *begun, dray_error *error)
{
    *begun = !self->needed || self->lease || self->engines < 2;
    int rc = DRAY_OK;
    if (!*begun && (wait || dray__now() > self->refused_ns + AGAIN_NS))
        rc = try(self, begun, error);
    if (!rc && !*begun && wait) {
        dray_trace_wait(DRAY_CAUSE_WEIGHTS, "wait for a turn", -1);
        rc = acquire(self, 0, self->host->wait_ns, error);
        dray_trace_leave();
        *begun = !rc;
    }
    return rc;
}

void dray__engine_turns_end(dray__engine_turns *self, int64_t version)
{
    int64_t now = dray__now();
    if (self->version >= 0 && version > self->version)
        note(&self->trained,
             (double)((version - self->version) * dray__job_batch(self->host->job)) *
                 (double)DRAY__SECOND / (double)(now - self->at_ns));
    self->version = version;
    self->at_ns = now;
    dray__lease_let_go(self->lease);
    self->lease = NULL;
}
