#include "run/rollout.h"

#include "base/clock.h"
#include "base/error.h"
#include "engine/sampler.h"
#include "engine/tokenizer.h"
#include "run/calls.h"
#include "run/fault.h"
#include "run/samples.h"

#include <stdlib.h>
#include <string.h>

/* A batch that is under way. */
typedef struct visit {
    struct visit *next;
    dray_batch *batch; /* NULL: another rank has it */
    int64_t step;
    uint32_t rows;
    uint32_t *slots;   /* of the sampler */
    uint64_t *lengths; /* of each row when it came: prompt, and response tokens of earlier claims */
    double *oldest;    /* version of those; -1: there are none */
} visit;

struct dray__rollout {
    dray__host *host;
    dray__sampler *sampler;
    dray__calls *calls; /* NULL: the job has no tool */
    bool continuous;
    uint32_t slots, unit; /* rows at once; of a claim, with batching continuous */
    uint64_t budget;      /* tokens that a claim gives a row; 0: all */
    visit *visits;
    bool entered; /* the span of what is under way: what the rank does meanwhile lies within it */
    uint64_t finished;
};

int dray__rollout_open(dray__host *host, dray__generator *generator, dray__rollout **out,
                       dray_error *error)
{
    const dray__job *job = host->job;
    dray__rollout *self = calloc(1, sizeof(*self));
    if (!self)
        return dray__nomem(error);
    int64_t batch = dray__job_batch(job), micro = job->rollout.micro_batch;
    self->host = host;
    self->continuous = job->rollout.batching == DRAY__BATCHING_CONTINUOUS;
    self->slots = (uint32_t)(micro < batch ? micro : batch);
    self->unit = job->queue.policy == DRAY_POLICY_GROUP ? (uint32_t)job->rollout.samples : 1;
    self->budget = (uint64_t)job->rollout.partial_tokens;
    dray__sampler_options options = DRAY__SAMPLER_OPTIONS_INIT;
    options.slots = self->slots;
    options.seed = (uint64_t)job->seed;
    options.temperature = job->rollout.temperature;
    options.eos_token = dray__tokenizer_end(host->tokenizer);
    int rc = dray__sampler_open(generator, &options, &self->sampler, error);
    if (!rc && job->tool.kind != DRAY__TOOL_NONE)
        rc = dray__calls_open(host, self->sampler, self->slots, !self->continuous, &self->calls,
                              error);
    if (rc)
        dray__rollout_close(self);
    else
        *out = self;
    return rc;
}

static void visit_free(visit *v)
{
    free(v->slots);
    free(v->lengths);
    free(v->oldest);
    free(v);
}

void dray__rollout_close(dray__rollout *self)
{
    if (!self)
        return;
    for (visit *v = self->visits, *next; v; v = next) {
        next = v->next;
        if (self->continuous)
            dray_batch_free(v->batch);
        visit_free(v);
    }
    dray__calls_close(self->calls);
    dray__sampler_close(self->sampler);
    free(self);
}

uint32_t dray__rollout_room(const dray__rollout *self)
{
    if (!self->continuous)
        return (uint32_t)self->host->job->rollout.micro_batch;
    return dray__sampler_free_slots(self->sampler) < self->unit ? 0 : self->unit;
}

uint64_t dray__rollout_finished(const dray__rollout *self)
{
    return self->finished;
}

bool dray__rollout_busy(const dray__rollout *self)
{
    return self->visits != NULL;
}

void dray__rollout_renew(dray__rollout *self, int64_t version)
{
    dray__sampler_renew(self->sampler, (int32_t)version);
}

/* ---- rows come ------------------------------------------------------------------------------- */

uint64_t *dray__rollout_streams(const dray_batch *batch, int64_t step)
{
    uint32_t rows = dray_batch_rows(batch);
    uint64_t *streams = malloc(rows * sizeof(*streams));
    for (uint32_t i = 0; streams && i < rows; i++) {
        double refill = 0;
        dray_batch_tag(batch, i, DRAY__TAG_REFILL, &refill, NULL);
        streams[i] =
            (uint64_t)step << 32 | ((uint64_t)refill & 255) << 24 | dray_batch_row(batch, i)->slot;
    }
    return streams;
}

/* What the rows have of a column that this task writes. */
static int read_begun(dray_batch *batch, const char *name, dray_dtype dtype, dray__ragged *out,
                      dray_error *error)
{
    dray_column column;
    *out = (dray__ragged){0};
    if (dray_batch_column(batch, name, &column, NULL) == DRAY_ENOENT)
        return DRAY_OK; /* none of them was begun */
    return dray__ragged_read(batch, name, dtype, out, error);
}

static int visit_new(dray_batch *batch, int64_t step, visit **out, dray_error *error)
{
    size_t rows = dray_batch_rows(batch);
    visit *v = calloc(1, sizeof(*v));
    if (!v)
        return dray__nomem(error);
    v->rows = (uint32_t)rows;
    v->step = step;
    v->slots = malloc(rows * sizeof(*v->slots));
    v->lengths = malloc(rows * sizeof(*v->lengths));
    v->oldest = malloc(rows * sizeof(*v->oldest));
    if (!v->slots || !v->lengths || !v->oldest) {
        visit_free(v);
        return dray__nomem(error);
    }
    for (uint32_t i = 0; i < rows; i++) {
        v->oldest[i] = -1;
        dray_batch_tag(batch, i, DRAY_TAG_VERSION, &v->oldest[i], NULL);
    }
    *out = v;
    return DRAY_OK;
}

static int enter(dray__rollout *self, dray_batch *batch, visit *v, const dray__ragged *prompt,
                 const dray__ragged *begun, const dray__ragged *mask, dray_error *error)
{
    for (uint32_t i = 0; i < v->rows; i++)
        v->lengths[i] = prompt->offsets[i + 1] - prompt->offsets[i] +
                        (begun->offsets ? begun->offsets[i + 1] - begun->offsets[i] : 0);
    uint64_t *streams = dray__rollout_streams(batch, v->step);
    dray__sampler_rows rows = {
        .rows = {v->rows, dray__ragged_tokens(prompt), dray__ragged_tokens(begun)},
        .streams = streams,
        .max_new_tokens = (uint32_t)self->host->job->rollout.max_new_tokens};
    int rc =
        streams ? dray__sampler_add(self->sampler, &rows, v->slots, error) : dray__nomem(error);
    if (!rc && self->calls)
        rc = dray__calls_enter(self->calls, &rows, mask->values, v->slots, error);
    free(streams);
    return rc;
}

int dray__rollout_take(dray__rollout *self, dray_batch *batch, int64_t step, dray_error *error)
{
    visit *v = NULL;
    dray__ragged prompt = {0}, begun = {0}, mask = {0};
    int rc = dray__ragged_read(batch, "prompt", DRAY_I32, &prompt, error);
    if (!rc)
        rc = read_begun(batch, "response", DRAY_I32, &begun, error);
    if (!rc && self->calls)
        rc = read_begun(batch, "response_mask", DRAY_I32, &mask, error);
    if (!rc)
        rc = visit_new(batch, step, &v, error);
    if (!self->entered)
        dray_trace_enter(DRAY_SPAN_BUSY, "rollout", step);
    self->entered = true;
    if (!rc)
        rc = enter(self, batch, v, &prompt, &begun, &mask, error);
    dray__ragged_free(&prompt);
    dray__ragged_free(&begun);
    dray__ragged_free(&mask);
    if (rc) {
        if (v)
            visit_free(v);
        return rc;
    }
    v->batch = dray__host_leads(self->host) ? batch : NULL;
    visit **last = &self->visits;
    while (*last)
        last = &(*last)->next;
    *last = v;
    return DRAY_OK;
}

/* ---- rows go --------------------------------------------------------------------------------- */

static bool goes_on(const dray__rollout *self, uint32_t slot)
{
    dray__sampled made = dray__sampler_look(self->sampler, slot);
    return made.finish == DRAY__FINISH_NOT_YET && (!self->budget || made.count < self->budget);
}

static bool is_over(const dray__rollout *self, const visit *v)
{
    for (uint32_t i = 0; i < v->rows; i++)
        if (goes_on(self, v->slots[i]))
            return false;
    return true;
}

/* A sample is as old as its oldest token, of those that the model made. */
static int set_tags(const visit *v, uint32_t i, const dray__sampled *made, dray_error *error)
{
    double version = v->oldest[i];
    for (uint64_t t = 0; t < made->count; t++)
        if (made->versions[t] >= 0 && (version < 0 || made->versions[t] < version))
            version = made->versions[t];
    int rc =
        version < 0 ? DRAY_OK : dray_batch_set_tag(v->batch, i, DRAY_TAG_VERSION, version, error);
    return rc ? rc
              : dray_batch_set_tag(v->batch, i, DRAY_TAG_TOKENS,
                                   (double)(v->lengths[i] + made->count), error);
}

/* The tokens of the visit's rows back to back. */
typedef struct outputs {
    uint64_t *offsets;
    int32_t *tokens, *versions, *mask;
    float *logprobs;
    uint32_t *open, open_count; /* places of rows that are not finished */
} outputs;

static void outputs_free(outputs *out)
{
    void *const parts[] = {out->offsets, out->tokens,   out->versions,
                           out->mask,    out->logprobs, out->open};
    for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++)
        free(parts[i]);
}

static int outputs_open(const dray__rollout *self, const visit *v, outputs *out, dray_error *error)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < v->rows; i++)
        total += dray__sampler_look(self->sampler, v->slots[i]).count;
    out->offsets = malloc(((size_t)v->rows + 1) * sizeof(*out->offsets));
    out->tokens = malloc(total * sizeof(*out->tokens) + 1);
    out->versions = malloc(total * sizeof(*out->versions) + 1);
    out->mask = malloc(total * sizeof(*out->mask) + 1);
    out->logprobs = malloc(total * sizeof(*out->logprobs) + 1);
    out->open = malloc(v->rows * sizeof(*out->open));
    bool whole =
        out->offsets && out->tokens && out->versions && out->mask && out->logprobs && out->open;
    return whole ? DRAY_OK : dray__nomem(error);
}

static int collect(const dray__rollout *self, const visit *v, outputs *out, dray_error *error)
{
    int rc = outputs_open(self, v, out, error);
    uint64_t at = 0;
    for (uint32_t i = 0; !rc && i < v->rows; i++) {
        dray__sampled made = dray__sampler_look(self->sampler, v->slots[i]);
        out->offsets[i] = at;
        memcpy(out->tokens + at, made.tokens, made.count * sizeof(*out->tokens));
        memcpy(out->versions + at, made.versions, made.count * sizeof(*out->versions));
        memcpy(out->logprobs + at, made.logprobs, made.count * sizeof(*out->logprobs));
        for (uint64_t t = 0; t < made.count; t++)
            out->mask[at + t] = made.versions[t] >= 0;
        out->offsets[i + 1] = at += made.count;
        if (made.finish == DRAY__FINISH_NOT_YET)
            out->open[out->open_count++] = i;
        rc = set_tags(v, i, &made, error);
    }
    return rc;
}

static int set_outputs(const dray__rollout *self, const visit *v, dray_error *error)
{
    outputs made = {0};
    int rc = collect(self, v, &made, error);
    const dray_column_data columns[] = {
        dray__ragged_column("response", DRAY_I32, made.offsets, made.tokens),
        dray__ragged_column("rollout_log_prob", DRAY_F32, made.offsets, made.logprobs),
        dray__ragged_column("response_version", DRAY_I32, made.offsets, made.versions),
        dray__ragged_column("response_mask", DRAY_I32, made.offsets, made.mask),
    };
    for (size_t i = 0; !rc && i < sizeof(columns) / sizeof(*columns) - !self->calls; i++)
        rc = dray_batch_set(v->batch, &columns[i], error);
    if (!rc && made.open_count)
        rc = dray_batch_leave_open(v->batch, made.open, made.open_count, error);
    outputs_free(&made);
    return rc;
}

/* A run that is stopped clears what is under way: nobody wants it any more. */
static int commit(const dray__rollout *self, const visit *v, dray_error *error)
{
    int rc = dray_batch_commit(v->batch, error);
    if (!rc) {
        dray__fault_record("rollout", v->batch, v->step, self->host->options.first_step);
        dray__fault_at("committed", v->step);
    }
    return rc == DRAY_EGONE ? DRAY_OK : rc;
}

static int leave(dray__rollout *self, visit *v, dray_error *error)
{
    int rc = DRAY_OK;
    uint64_t tokens = 0;
    for (uint32_t i = 0; i < v->rows; i++)
        tokens += dray__sampler_look(self->sampler, v->slots[i]).count;
    dray_trace_worked(v->rows, (int64_t)tokens);
    dray__fault_at("generated", v->step);
    if (v->batch)
        rc = set_outputs(self, v, error);
    if (v->batch && self->continuous) {
        rc = rc ? rc : commit(self, v, error);
        dray_batch_free(v->batch);
    }
    for (uint32_t i = 0; i < v->rows; i++) {
        if (self->calls)
            dray__calls_leave(self->calls, v->slots[i]);
        dray__sampled made = dray__sampler_look(self->sampler, v->slots[i]);
        self->finished += made.finish != DRAY__FINISH_NOT_YET;
        dray__sampler_remove(self->sampler, v->slots[i]);
    }
    visit_free(v);
    return rc;
}

static void pause_if_done(dray__rollout *self)
{
    if (self->entered && !self->visits)
        dray_trace_leave();
    self->entered &= self->visits != NULL;
}

int dray__rollout_turn(dray__rollout *self, dray_error *error)
{
    if (!self->visits)
        return DRAY_OK;
    int rc = self->calls ? dray__calls_step(self->calls, self->visits->step, error)
                         : dray__sampler_step(self->sampler, error);
    for (visit **at = &self->visits; !rc && *at;) {
        visit *v = *at;
        if (is_over(self, v)) {
            *at = v->next;
            rc = leave(self, v, error);
        } else {
            at = &v->next;
        }
    }
    if (!rc)
        pause_if_done(self);
    return rc;
}

int dray__rollout_drain(dray__rollout *self, dray_error *error)
{
    int rc = DRAY_OK;
    while (!rc && self->visits)
        rc = dray__rollout_turn(self, error);
    return rc;
}

int dray__rollout_cut(dray__rollout *self, dray_error *error)
{
    int rc = DRAY_OK;
    while (!rc && self->visits) {
        visit *v = self->visits;
        self->visits = v->next;
        rc = leave(self, v, error);
    }
    pause_if_done(self);
    return rc;
}
