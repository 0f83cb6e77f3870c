#include "run/engine/rollout.h"

#include "base/clock.h"
#include "base/error.h"
#include "engine/sampler.h"
#include "engine/tokenizer.h"
#include "run/data/samples.h"
#include "run/engine/calls.h"
#include "run/fault.h"
#include "run/report/spent.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { GONE = UINT32_MAX };

/* A batch that is under way. */
typedef struct claim {
    struct claim *next;
    dray_batch *batch; /* NULL when another rank has it */
    int64_t step;
    uint32_t rows, left; /* left is the number of rows that have not left yet */
    uint32_t *slots;     /* of the sampler; GONE when the row has left */
    /* Of each row when it was added: prompt and response tokens of earlier claims. */
    uint64_t *lengths;
    uint32_t *prompts; /* tokens of each row's prompt */
    double *oldest;    /* oldest version of the response tokens of earlier claims; -1 when there are
                          none */
    int64_t began_ns;
} claim;

struct dray__rollout {
    dray__host *host;
    dray__sampler *sampler;
    dray__calls *calls; /* NULL when the job has no tool */
    bool continuous;
    uint32_t slots, unit; /* rows at once; rows of a claim, with batching `continuous` */
    uint64_t budget;      /* tokens that a claim gives a row; 0 means all */
    claim *claims;
    uint32_t *going; /* for rows that leave together */
    bool entered;    /* the rank is in the trace's span of the work under way */
    uint64_t finished;
};

/* Rows of a claim that leave together, and the batch that is committed for them. */
typedef struct leaving {
    const claim *c;
    const uint32_t *rows; /* of the claim */
    uint32_t count;
    dray_batch *batch; /* NULL when another rank has it */
} leaving;

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
    const dray__sampler_options options = {.slots = self->slots,
                                           .seed = (uint64_t)job->seed,
                                           .temperature = job->rollout.temperature,
                                           .eos_token = dray__tokenizer_end(host->tokenizer)};
    self->going = malloc(((size_t)self->slots + 1) * sizeof(*self->going));
    int rc = self->going ? dray__sampler_open(generator, &options, &self->sampler, error)
                         : dray__nomem(error);
    if (!rc && job->tool.kind != DRAY__TOOL_NONE)
        rc = dray__calls_open(host, self->sampler, self->slots, !self->continuous, &self->calls,
                              error);
    if (rc)
        dray__rollout_close(self);
    else
        *out = self;
    return rc;
}

static void claim_free(claim *c)
{
    free(c->slots);
    free(c->lengths);
    free(c->prompts);
    free(c->oldest);
    free(c);
}

void dray__rollout_close(dray__rollout *self)
{
    if (!self)
        return;
    for (claim *c = self->claims, *next; c; c = next) {
        next = c->next;
        if (self->continuous)
            dray_batch_free(c->batch);
        claim_free(c);
    }
    dray__calls_close(self->calls);
    dray__sampler_close(self->sampler);
    free(self->going);
    free(self);
}

uint32_t dray__rollout_room(const dray__rollout *self)
{
    if (!self->continuous)
        return (uint32_t)self->host->job->rollout.micro_batch;
    uint32_t free_slots = dray__sampler_free_slots(self->sampler);
    return free_slots - free_slots % self->unit;
}

uint64_t dray__rollout_finished(const dray__rollout *self)
{
    return self->finished;
}

bool dray__rollout_busy(const dray__rollout *self)
{
    return self->claims != NULL;
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

/* Reads the rows' values of a column that this task writes. */
static int read_begun(dray_batch *batch, const char *name, dray_dtype dtype, dray__ragged *out,
                      dray_error *error)
{
    dray_column column;
    *out = (dray__ragged){0};
    if (dray_batch_column(batch, name, &column, NULL) == DRAY_ENOENT)
        return DRAY_OK; /* no row has tokens of an earlier claim */
    return dray__ragged_read(batch, name, dtype, out, error);
}

static int claim_new(dray_batch *batch, int64_t step, claim **out, dray_error *error)
{
    size_t rows = dray_batch_rows(batch);
    claim *c = calloc(1, sizeof(*c));
    if (!c)
        return dray__nomem(error);
    c->rows = c->left = (uint32_t)rows;
    c->step = step;
    c->slots = malloc(rows * sizeof(*c->slots));
    c->lengths = malloc(rows * sizeof(*c->lengths));
    c->prompts = malloc(rows * sizeof(*c->prompts));
    c->oldest = malloc(rows * sizeof(*c->oldest));
    c->began_ns = dray__now();
    if (!c->slots || !c->lengths || !c->prompts || !c->oldest) {
        claim_free(c);
        return dray__nomem(error);
    }
    for (uint32_t i = 0; i < rows; i++) {
        c->oldest[i] = -1;
        dray_batch_tag(batch, i, DRAY_TAG_VERSION, &c->oldest[i], NULL);
    }
    *out = c;
    return DRAY_OK;
}

static int enter(dray__rollout *self, dray_batch *batch, claim *c, const dray__ragged *prompt,
                 const dray__ragged *begun, const dray__ragged *mask, dray_error *error)
{
    for (uint32_t i = 0; i < c->rows; i++) {
        uint64_t tokens = prompt->offsets[i + 1] - prompt->offsets[i];
        c->prompts[i] = (uint32_t)tokens;
        c->lengths[i] = tokens + (begun->offsets ? begun->offsets[i + 1] - begun->offsets[i] : 0);
    }
    uint64_t *streams = dray__rollout_streams(batch, c->step);
    dray__sampler_rows rows = {
        .rows = {c->rows, dray__ragged_tokens(prompt), dray__ragged_tokens(begun)},
        .streams = streams,
        .max_new_tokens = (uint32_t)self->host->job->rollout.max_new_tokens};
    int rc =
        streams ? dray__sampler_add(self->sampler, &rows, c->slots, error) : dray__nomem(error);
    if (!rc && self->calls)
        rc = dray__calls_enter(self->calls, &rows, mask->values, c->slots, error);
    free(streams);
    return rc;
}

int dray__rollout_take(dray__rollout *self, dray_batch *batch, int64_t step, dray_error *error)
{
    claim *c = NULL;
    dray__ragged prompt = {0}, begun = {0}, mask = {0};
    int rc = dray__ragged_read(batch, "prompt", DRAY_I32, &prompt, error);
    if (!rc)
        rc = read_begun(batch, "response", DRAY_I32, &begun, error);
    if (!rc && self->calls)
        rc = read_begun(batch, "response_mask", DRAY_I32, &mask, error);
    if (!rc)
        rc = claim_new(batch, step, &c, error);
    if (!self->entered)
        dray_trace_enter(DRAY_SPAN_BUSY, "rollout", step);
    self->entered = true;
    if (!rc)
        rc = enter(self, batch, c, &prompt, &begun, &mask, error);
    dray__ragged_free(&prompt);
    dray__ragged_free(&begun);
    dray__ragged_free(&mask);
    if (rc) {
        if (c)
            claim_free(c);
        return rc;
    }
    c->batch = dray__host_leads(self->host) ? batch : NULL;
    claim **last = &self->claims;
    while (*last)
        last = &(*last)->next;
    *last = c;
    return DRAY_OK;
}

/* ---- rows go --------------------------------------------------------------------------------- */

static bool goes_on(const dray__rollout *self, uint32_t slot)
{
    dray__sampled made = dray__sampler_look(self->sampler, slot);
    return made.finish == DRAY__FINISH_NOT_YET && (!self->budget || made.count < self->budget);
}

/* Chooses the rows of the claim that leave now; with `all`, also those that are not finished. The
 * rows of a closed batch leave together. */
static uint32_t choose(const dray__rollout *self, const claim *c, bool all)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < c->rows; i++)
        if (c->slots[i] != GONE && (all || !goes_on(self, c->slots[i])))
            self->going[count++] = i;
    return self->continuous || count == c->left ? count : 0;
}

/* Tags a sample with the version of the oldest token that the model made. */
static int set_tags(const leaving *l, uint32_t i, const dray__sampled *made, dray_error *error)
{
    double version = l->c->oldest[l->rows[i]];
    for (uint64_t t = 0; t < made->count; t++)
        if (made->versions[t] >= 0 && (version < 0 || made->versions[t] < version))
            version = made->versions[t];
    int rc =
        version < 0 ? DRAY_OK : dray_batch_set_tag(l->batch, i, DRAY_TAG_VERSION, version, error);
    return rc ? rc
              : dray_batch_set_tag(l->batch, i, DRAY_TAG_TOKENS,
                                   (double)(l->c->lengths[l->rows[i]] + made->count), error);
}

/* The tokens of the rows back to back. */
typedef struct outputs {
    uint64_t *offsets;
    int32_t *tokens, *versions, *mask;
    float *logprobs;
    uint32_t *open, open_count; /* indices of rows that are not finished */
} outputs;

static void outputs_free(outputs *out)
{
    void *const parts[] = {out->offsets, out->tokens,   out->versions,
                           out->mask,    out->logprobs, out->open};
    for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++)
        free(parts[i]);
}

static dray__sampled look(const dray__rollout *self, const leaving *l, uint32_t i)
{
    return dray__sampler_look(self->sampler, l->c->slots[l->rows[i]]);
}

static uint64_t tokens_of(const dray__rollout *self, const leaving *l)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < l->count; i++)
        total += look(self, l, i).count;
    return total;
}

static int outputs_open(const dray__rollout *self, const leaving *l, outputs *out,
                        dray_error *error)
{
    uint64_t total = tokens_of(self, l);
    out->offsets = malloc(((size_t)l->count + 1) * sizeof(*out->offsets));
    out->tokens = malloc(total * sizeof(*out->tokens) + 1);
    out->versions = malloc(total * sizeof(*out->versions) + 1);
    out->mask = malloc(total * sizeof(*out->mask) + 1);
    out->logprobs = malloc(total * sizeof(*out->logprobs) + 1);
    out->open = malloc(l->count * sizeof(*out->open));
    bool whole =
        out->offsets && out->tokens && out->versions && out->mask && out->logprobs && out->open;
    return whole ? DRAY_OK : dray__nomem(error);
}

static int collect(const dray__rollout *self, const leaving *l, outputs *out, dray_error *error)
{
    int rc = outputs_open(self, l, out, error);
    uint64_t at = 0;
    for (uint32_t i = 0; !rc && i < l->count; i++) {
        dray__sampled made = look(self, l, i);
        out->offsets[i] = at;
        memcpy(out->tokens + at, made.tokens, made.count * sizeof(*out->tokens));
        memcpy(out->versions + at, made.versions, made.count * sizeof(*out->versions));
        memcpy(out->logprobs + at, made.logprobs, made.count * sizeof(*out->logprobs));
        for (uint64_t t = 0; t < made.count; t++)
            out->mask[at + t] = made.versions[t] >= 0;
        out->offsets[i + 1] = at += made.count;
        if (made.finish == DRAY__FINISH_NOT_YET)
            out->open[out->open_count++] = i;
        rc = set_tags(l, i, &made, error);
    }
    return rc;
}

static int set_outputs(const dray__rollout *self, const leaving *l, dray_error *error)
{
    outputs made = {0};
    int rc = collect(self, l, &made, error);
    const dray_column_data columns[] = {
        dray__ragged_column("response", DRAY_I32, made.offsets, made.tokens),
        dray__ragged_column("rollout_log_prob", DRAY_F32, made.offsets, made.logprobs),
        dray__ragged_column("response_version", DRAY_I32, made.offsets, made.versions),
        dray__ragged_column("response_mask", DRAY_I32, made.offsets, made.mask),
    };
    for (size_t i = 0; !rc && i < sizeof(columns) / sizeof(*columns) - !self->calls; i++)
        rc = dray_batch_set(l->batch, &columns[i], error);
    if (!rc && made.open_count)
        rc = dray_batch_leave_open(l->batch, made.open, made.open_count, error);
    outputs_free(&made);
    return rc;
}

/* A run that is stopped clears the rows under way, because they are not needed any more. Of cleared
 * rows none becomes a batch of its own, so such a batch is unknown to the queue. */
static bool was_cleared(const dray__rollout *self, const leaving *l, int rc)
{
    bool part = l->batch != l->c->batch;
    return rc == DRAY_EGONE || (rc == DRAY_ESTALE && part && dray__host_queue_ended(self->host));
}

static int commit(const dray__rollout *self, const leaving *l, dray_error *error)
{
    int rc = dray_batch_commit(l->batch, error);
    if (!rc) {
        dray__fault_record("rollout", l->c->batch, l->rows, l->count, l->c->step,
                           self->host->options.first_step);
        dray__fault_at("committed", l->c->step);
    }
    return was_cleared(self, l, rc) ? DRAY_OK : rc;
}

/* Splits the batch when some of its rows go on: those that leave become a batch of their own. */
static int hand_over(const dray__rollout *self, leaving *l, dray_error *error)
{
    bool whole = l->count == l->c->rows;
    int rc = whole ? DRAY_OK : dray_batch_split(l->c->batch, l->rows, l->count, &l->batch, error);
    if (rc)
        return rc;
    rc = set_outputs(self, l, error);
    if (!rc && self->continuous)
        rc = commit(self, l, error);
    if (!whole)
        dray_batch_free(l->batch);
    return rc;
}

/* Records the lengths of finished rows in the trace, on rank 0. A response begins with its last
 * claim. */
static void record_lengths(const dray__rollout *self, const leaving *l)
{
    int64_t now = dray__now();
    for (uint32_t i = 0; l->c->batch && dray__host_leads(self->host) && i < l->count; i++) {
        uint32_t row = l->rows[i];
        dray__sampled made = look(self, l, i);
        uint64_t prompt = l->c->prompts[row], tokens = l->c->lengths[row] + made.count - prompt;
        if (made.finish != DRAY__FINISH_NOT_YET)
            dray_trace_response(l->c->step, dray_batch_row(l->c->batch, row)->slot, prompt, tokens,
                                l->c->began_ns, now);
    }
}

static int leave(dray__rollout *self, claim *c, uint32_t count, dray_error *error)
{
    leaving l = {.c = c, .rows = self->going, .count = count, .batch = c->batch};
    dray_trace_worked(count, (int64_t)tokens_of(self, &l));
    dray__fault_at("generated", c->step);
    int rc = c->batch ? hand_over(self, &l, error) : DRAY_OK;
    record_lengths(self, &l);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = c->slots[self->going[i]];
        if (self->calls)
            dray__calls_leave(self->calls, slot);
        self->finished += dray__sampler_look(self->sampler, slot).finish != DRAY__FINISH_NOT_YET;
        dray__sampler_remove(self->sampler, slot);
        c->slots[self->going[i]] = GONE;
    }
    c->left -= count;
    return rc;
}

static void leave_span(dray__rollout *self)
{
    if (self->entered && !self->claims) {
        dray_trace_leave();
        self->entered = false;
    }
}

/* Removes the rows that are finished or, with `all`, every row. Frees claims that have no rows
 * left. */
static int let_go(dray__rollout *self, bool all, dray_error *error)
{
    int rc = DRAY_OK;
    for (claim **at = &self->claims; !rc && *at;) {
        claim *c = *at;
        uint32_t count = choose(self, c, all);
        rc = count ? leave(self, c, count, error) : DRAY_OK;
        if (c->left) {
            at = &c->next;
            continue;
        }
        *at = c->next;
        if (self->continuous)
            dray_batch_free(c->batch);
        claim_free(c);
    }
    leave_span(self);
    return rc;
}

int dray__rollout_turn(dray__rollout *self, dray_error *error)
{
    if (!self->claims)
        return DRAY_OK;
    int rc = self->calls ? dray__calls_step(self->calls, self->claims->step, error)
                         : dray__sampler_step(self->sampler, error);
    return rc ? rc : let_go(self, false, error);
}

int dray__rollout_drain(dray__rollout *self, dray_error *error)
{
    int rc = DRAY_OK;
    while (!rc && self->claims)
        rc = dray__rollout_turn(self, error);
    return rc;
}

int dray__rollout_cut(dray__rollout *self, dray_error *error)
{
    return let_go(self, true, error);
}

void dray__rollout_drop(dray__rollout *self)
{
    for (claim *c = self->claims, *next; c; c = next) {
        next = c->next;
        for (uint32_t i = 0; i < c->rows; i++) {
            if (c->slots[i] == GONE)
                continue;
            if (self->calls)
                dray__calls_leave(self->calls, c->slots[i]);
            dray__sampler_remove(self->sampler, c->slots[i]);
        }
        if (self->continuous)
            dray_batch_free(c->batch);
        claim_free(c);
    }
    self->claims = NULL;
    leave_span(self);
}

int dray__rollout_restart(dray__rollout *self, dray_error *error)
{
    int rc = DRAY_OK;
    for (const claim *c = self->claims; c; c = c->next)
        for (uint32_t i = 0; i < c->rows && !rc; i++) {
            if (c->slots[i] == GONE)
                continue;
            dray__sampler_restart(self->sampler, c->slots[i]);
            if (self->calls)
                rc = dray__calls_restart(self->calls, c->slots[i], error);
        }
    return rc;
}
