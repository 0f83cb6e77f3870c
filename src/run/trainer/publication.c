#include "run/trainer/publication.h"

#include "base/error.h"
#include "run/fault.h"
#include "run/job/schedule.h"
#include "run/trainer/checkpoint.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct place {
    dray_publisher *publisher;
    dray_region **copy; /* NULL when the parameters themselves are published */
    int64_t version;    /* published here; -1 for none */
} place;

struct dray__publication {
    dray__host *host;
    dray__trainer *trainer;
    const char *model, *phase;
    place places[DRAY__KEPT_MOST];
    uint32_t count;
};

void dray__publication_name(const dray__job *job, int64_t version, char out[DRAY__MODEL_NAME_BYTES])
{
    int64_t kept = dray__schedule_of(job).kept;
    if (kept == 1)
        snprintf(out, DRAY__MODEL_NAME_BYTES, DRAY__POLICY);
    else
        snprintf(out, DRAY__MODEL_NAME_BYTES, DRAY__POLICY "-%d", (int)(version % kept));
}

static bool is_policy(const dray__publication *self)
{
    return strcmp(self->model, DRAY__POLICY) == 0;
}

static place *place_of(dray__publication *self, int64_t version)
{
    return &self->places[version % self->count];
}

/* ---- opening --------------------------------------------------------------------------------- */

static int open_place(dray__publication *self, uint32_t index, dray_error *error)
{
    const dray__host *host = self->host;
    const dray_layout *layout = dray__trainer_layout(self->trainer);
    place *at = &self->places[index];
    int rc = DRAY_OK;
    if (dray__schedule_of(host->job).open > 1) {
        at->copy = calloc(dray_layout_region_count(layout) + 1, sizeof(dray_region *));
        rc = at->copy ? dray_regions_for_layout(layout, 1, at->copy, error) : dray__nomem(error);
    }
    char name[DRAY__MODEL_NAME_BYTES];
    if (is_policy(self))
        dray__publication_name(host->job, index, name);
    else
        snprintf(name, sizeof(name), "%s", self->model);
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    options.regions = at->copy ? at->copy : dray__trainer_regions(self->trainer);
    options.rank = host->options.rank;
    options.world = dray__group_world(host->group);
    options.no_checksums = !host->job->weights.verify;
    options.timeout_ns = host->wait_ns;
    at->version = -1;
    return rc ? rc
              : dray_publisher_open(host->context, name, layout, &options, &at->publisher, error);
}

int dray__publication_open(dray__host *host, dray__trainer *trainer, const char *model,
                           const char *phase, dray__publication **out, dray_error *error)
{
    dray__publication *self = calloc(1, sizeof(*self));
    if (!self)
        return dray__nomem(error);
    self->host = host;
    self->trainer = trainer;
    self->model = model;
    self->phase = phase;
    uint32_t kept = is_policy(self) ? (uint32_t)dray__schedule_of(host->job).kept : 1;
    int rc = DRAY_OK;
    while (!rc && self->count < kept)
        rc = open_place(self, self->count++, error);
    if (rc)
        dray__publication_close(self);
    else
        *out = self;
    return rc;
}

void dray__publication_close(dray__publication *self)
{
    if (!self)
        return;
    uint32_t regions = dray_layout_region_count(dray__trainer_layout(self->trainer));
    for (uint32_t i = 0; i < self->count; i++) {
        place *at = &self->places[i];
        dray_publisher_close(at->publisher);
        for (uint32_t r = 0; at->copy && r < regions; r++)
            dray_region_free(at->copy[r]);
        free(at->copy);
    }
    free(self);
}

/* ---- publishing ------------------------------------------------------------------------------ */

static int announce(dray__publication *self, int64_t version, dray_error *error)
{
    place *at = place_of(self, version);
    int rc = dray_publisher_publish(at->publisher, (uint64_t)version, NULL, error);
    if (!rc)
        at->version = version;
    return rc;
}

/* Waits for the readers of the copy's earlier content. */
static int empty(dray__publication *self, const place *at, dray_error *error)
{
    if (at->version < 0)
        return DRAY_OK;
    dray_trace_wait(DRAY_CAUSE_READERS, "wait for readers", at->version);
    int rc =
        dray_publisher_wait(at->publisher, (uint64_t)at->version, self->host->wait_ns, NULL, error);
    dray_trace_leave();
    return rc;
}

static int copy(dray__publication *self, const place *at, dray_error *error)
{
    dray_region *const *from = dray__trainer_regions(self->trainer);
    uint32_t regions = dray_layout_region_count(dray__trainer_layout(self->trainer));
    int rc = empty(self, at, error);
    for (uint32_t r = 0; !rc && r < regions; r++)
        memcpy(dray_region_base(at->copy[r]), dray_region_base(from[r]),
               dray_region_bytes(from[r]));
    return rc;
}

int dray__publication_put(dray__publication *self, int64_t version, dray_error *error)
{
    dray__host *host = self->host;
    const place *at = place_of(self, version);
    dray_trace_enter(DRAY_SPAN_TRANSFER, self->phase, version);
    int rc = at->copy ? copy(self, at, error) : DRAY_OK;
    if (!rc && is_policy(self) && host->job->weights.mode == DRAY_MODE_DISK)
        rc = dray__checkpoint_weights(host, self->trainer, version, error);
    if (!rc)
        rc = announce(self, version, error);
    if (!rc)
        dray__fault_at("after_publish", version);
    dray_trace_leave();
    return rc;
}

int dray__publication_release(dray__publication *self, int64_t version, dray_error *error)
{
    const place *at = place_of(self, version);
    return at->copy ? DRAY_OK : empty(self, at, error);
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

#define PREVIOUS "previous"

void dray__publication_path(const char *directory, char *out, size_t capacity)
{
    dray__path(out, capacity, "%s/" PREVIOUS, directory);
}

bool dray__publication_previous(const dray__publication *self, int64_t step,
                                dray_checkpoint_part *out)
{
    if (self->count == 1 || step == 0)
        return false;
    const place *at = &self->places[(step - 1) % self->count];
    *out = (dray_checkpoint_part){PREVIOUS, dray__trainer_layout(self->trainer), at->copy};
    return true;
}

int dray__publication_restore(dray__publication *self, int64_t step, const char *directory,
                              dray_error *error)
{
    char path[PATH_MAX];
    dray_checkpoint_part part;
    if (!dray__publication_previous(self, step, &part))
        return DRAY_OK;
    dray__publication_path(directory, path, sizeof(path));
    int rc = dray_checkpoint_read(path, part.layout, part.regions, error);
    return rc ? rc : announce(self, step - 1, error);
}
