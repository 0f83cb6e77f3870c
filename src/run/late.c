/* The actor's steps where a step trains the samples that are complete first, in whole groups,
 * whichever step's prompts they answer. Samples are copied out of the queue and committed at once,
 * so that what else the queue holds is for the next step. What the step begins with is not known
 * before its samples are there, so the actor itself computes their log-probs by it, as they come:
 * the proximal policy of the decoupled objective (Hilton et al. 2022, arXiv 2110.00641; AReaL, Fu
 * et al. 2025, arXiv 2505.24298). */
#include "base/error.h"
#include "run/fault.h"
#include "run/learn.h"
#include "run/prompts.h"
#include "run/schedule.h"

#include <stdlib.h>

static uint32_t batch_of(const dray__host *host)
{
    return (uint32_t)dray__job_batch(host->job);
}

/* ---- claims ---------------------------------------------------------------------------------- */

/* How many more samples of older versions the step may have. */
static uint32_t old_left(const dray__host *host)
{
    const dray__learner *self = host->state;
    uint32_t most = batch_of(host) - (uint32_t)dray__schedule_fresh(host->job);
    return most > self->old ? most - self->old : 0;
}

/* The last steps get what is left: no prompts come that newer weights could answer. */
static bool shares(const dray__host *host)
{
    const dray__learner *self = host->state;
    return host->job->fresh_share > 0 &&
           self->step + dray__schedule_staleness(host->job) <= host->job->steps;
}

bool dray__late_newest(const dray__host *host)
{
    return shares(host) && old_left(host) < (uint32_t)host->job->rollout.samples;
}

uint32_t dray__late_count(const dray__host *host)
{
    const dray__learner *self = host->state;
    uint32_t group = (uint32_t)host->job->rollout.samples, most = dray__learner_micro(host->job),
             left = batch_of(host) - self->rows;
    if (self->stopped)
        return 0;
    if (shares(host) && !dray__late_newest(host) && most > old_left(host))
        most = old_left(host);
    if (most > left)
        most = left;
    return most < group ? group : most / group * group;
}

static void count_old(dray__learner *self, const dray_batch *batch)
{
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++) {
        double version = 0;
        dray_batch_tag(batch, i, DRAY_TAG_VERSION, &version, NULL);
        self->old += version < (double)(self->step - 1);
    }
}

/* ---- learning -------------------------------------------------------------------------------- */

/* The policy's log-probs at the step's begin. */
static int add_proximal(dray__host *host, dray__micro *micro, dray_error *error)
{
    dray__learner *self = host->state;
    if (host->job->actor.old_log_prob == DRAY__OLD_ROLLOUT)
        return DRAY_OK;
    uint64_t tokens = micro->response.offsets[micro->rows];
    dray__sequences sequences = {.rows = micro->rows,
                                 .prompt = dray__ragged_tokens(&micro->prompt),
                                 .response = dray__ragged_tokens(&micro->response)};
    micro->old = (dray__ragged){.rows = micro->rows,
                                .offsets = malloc(((size_t)micro->rows + 1) * sizeof(uint64_t)),
                                .values = malloc((tokens + 1) * sizeof(float))};
    if (!micro->old.offsets || !micro->old.values)
        return dray__nomem(error);
    for (uint32_t i = 0; i <= micro->rows; i++)
        micro->old.offsets[i] = micro->response.offsets[i];
    return dray__trainer_logprobs(self->trainer, &sequences, host->job->rollout.temperature,
                                  micro->old.values, NULL, error);
}

/* Kept in pieces of which each belongs to one optimiser step. */
static int keep(dray__host *host, const dray__micro *whole, dray_error *error)
{
    dray__learner *self = host->state;
    uint32_t part = dray__learner_part(host->job), most = dray__learner_micro(host->job);
    int rc = DRAY_OK;
    for (uint32_t first = 0, rows; first < whole->rows && !rc; first += rows) {
        uint32_t left = part - self->rows % part;
        dray__micro piece = {0};
        rows = whole->rows - first;
        rows = rows < left ? rows : left;
        rows = rows < most ? rows : most;
        rc = dray__micro_slice(whole, first, rows, &piece, error);
        if (!rc)
            rc = dray__learner_keep(host, &piece, error);
        dray__micro_free(&piece);
        self->rows += rc ? 0 : rows;
    }
    return rc;
}

/* Accumulates what is kept, and takes the optimiser's steps; before all is there only what comes
 * before the first one, as the log-probs of the others are of the parameters before it. */
static int learn(dray__host *host, dray_error *error)
{
    dray__learner *self = host->state;
    uint32_t part = dray__learner_part(host->job), in = 0;
    bool all = self->rows == batch_of(host);
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < self->learned; i++)
        in += self->kept[i].rows;
    while (!rc) {
        bool due = in / part > self->sums.steps;
        if (due ? !all : self->learned == self->kept_count)
            break;
        if (due) {
            rc = dray__learner_step(host, error);
        } else {
            rc = dray__learner_accumulate(host, &self->kept[self->learned], error);
            in += self->kept[self->learned++].rows;
        }
    }
    return rc;
}

static int note_trained(dray__host *host, const dray_batch *batch, dray_error *error)
{
    dray__learner *self = host->state;
    uint32_t rows = dray_batch_rows(batch), group = (uint32_t)host->job->rollout.samples;
    int64_t of = dray__partition_step(dray__partition_of_step.kind, dray_batch_partition(batch));
    int rc = DRAY_OK;
    if (rows % group)
        return dray__fail(error, DRAY_EINTERNAL, "%u samples came, expected whole groups of %u",
                          rows, group);
    for (uint32_t i = 0; i < rows && !rc; i += group)
        rc = dray__feed_trained(self->feed, of, dray_batch_row(batch, i)->group, error);
    return rc;
}

int dray__late_run(dray__host *host, dray_batch *batch, dray_error *error)
{
    dray__learner *self = host->state;
    dray__micro whole = {0};
    dray_trace_enter(DRAY_SPAN_BUSY, "actor", self->step);
    int rc = dray__learner_check(host, batch, error);
    if (!rc)
        rc = note_trained(host, batch, error);
    if (!rc)
        rc = dray__micro_read(batch, host->job, self->what->task, &whole, error);
    if (!rc)
        rc = add_proximal(host, &whole, error);
    if (!rc) {
        count_old(self, batch);
        dray__learner_measure(host, &whole);
        rc = keep(host, &whole, error);
    }
    dray__micro_free(&whole);
    if (!rc)
        rc = learn(host, error);
    dray_trace_leave();
    return rc;
}
