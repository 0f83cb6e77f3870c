/* Samples that replace lost ones (queue.on_loss: refill). A step keeps its number of samples, and
 * each group keeps one prompt. A group that is lost as a whole gets another prompt, because its own
 * may be one that cannot be graded. A group that still has members, or that was lost because it had
 * become too old, gets more samples of its own prompt. */
#include "base/clock.h"
#include "base/error.h"
#include "base/json.h"
#include "base/thread.h"
#include "run/data/prompts.h"
#include "run/desk/desk.h"
#include "run/job/schedule.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SLICE_MS = 500 /* between looks at whether the host has failed */ };

#define OTHERS (UINT64_C(1) << 41) /* far from the prompts that steps begin with */

/* The prompt that a group got as a replacement. */
typedef struct replaced {
    uint32_t group;
    uint64_t prompt;
} replaced;

/* A partition that lost samples. */
typedef struct losses {
    char partition[DRAY__PARTITION_BYTES];
    int64_t step, lost;
    replaced *groups;
    uint32_t count;
} losses;

struct dray__refiller {
    const dray__job *job;
    const dray__data *data;
    const dray__feed *feed;
    const dray__tokenizer *tokenizer;
    dray_queue *queue; /* its own */
    dray_context *context;
    dray__thread thread;
    atomic_bool abandoned;
    int64_t known_after; /* replacements in steps after this one are all known here */
    atomic_llong oldest; /* the oldest step that is not trained yet */
    losses *partitions;
    uint32_t count;
};

/* Forgets partitions of steps that are over. */
static void forget(dray__refiller *self)
{
    uint32_t kept = 0;
    int64_t least = atomic_load(&self->oldest) - 2 * dray__schedule_of(self->job).open;
    for (uint32_t i = 0; i < self->count; i++) {
        if (self->partitions[i].step < least)
            free(self->partitions[i].groups);
        else
            self->partitions[kept++] = self->partitions[i];
    }
    self->count = kept;
}

static int enter_partition(dray__refiller *self, const dray_refill *refill, int64_t step,
                           losses **out, dray_error *error)
{
    for (uint32_t i = 0; i < self->count; i++)
        if (strcmp(self->partitions[i].partition, refill->partition) == 0) {
            *out = &self->partitions[i];
            return DRAY_OK;
        }
    forget(self);
    losses *grown = realloc(self->partitions, (self->count + 1) * sizeof(*grown));
    if (!grown)
        return dray__nomem(error);
    self->partitions = grown;
    *out = &grown[self->count++];
    **out = (losses){.step = step};
    snprintf((*out)->partition, sizeof((*out)->partition), "%.*s", DRAY__PARTITION_BYTES - 1,
             refill->partition);
    return DRAY_OK;
}

static const replaced *find(const losses *of, uint32_t group)
{
    for (uint32_t i = of->count; i > 0; i--)
        if (of->groups[i - 1].group == group)
            return &of->groups[i - 1];
    return NULL;
}

static int remember(losses *of, uint32_t group, uint64_t prompt, dray_error *error)
{
    if (find(of, group) && find(of, group)->prompt == prompt)
        return DRAY_OK;
    replaced *grown = realloc(of->groups, (of->count + 1) * sizeof(*grown));
    if (!grown)
        return dray__nomem(error);
    of->groups = grown;
    grown[of->count++] = (replaced){group, prompt};
    return DRAY_OK;
}

/* Chooses the prompt of the replacement. Returns false when no prompt would be right. */
static bool choose(const dray__refiller *self, const losses *of, const dray_refill *refill,
                   uint64_t *prompt)
{
    bool eval = strncmp(refill->partition, "eval", 4) == 0;
    const replaced *before = find(of, refill->group);
    *prompt = eval
                  ? dray__prompt_index(self->job, &dray__partition_of_eval, of->step, refill->group)
                  : dray__prompt_index(self->job, &dray__partition_of_step, of->step,
                                       dray__feed_group(self->feed, of->step, refill->group));
    if (eval)
        return true;
    bool whole = refill->rows == (uint32_t)self->job->rollout.samples;
    if (whole && refill->cause != DRAY_LOSS_STALE && refill->cause != DRAY_LOSS_ROLLED_BACK)
        *prompt = OTHERS + refill->id;
    else if (before)
        *prompt = before->prompt;
    return whole || before || of->step > self->known_after;
}

static int insert(dray__refiller *self, const dray_refill *refill, const char *kind, int64_t step,
                  uint64_t prompt, dray_error *error)
{
    const dray__partition_kind *of =
        strcmp(kind, "eval") == 0 ? &dray__partition_of_eval : &dray__partition_of_step;
    dray__prompts p;
    int rc = dray__prompts_make(self->data, self->tokenizer, of->split, prompt, NULL, 1, &p, error);
    if (rc)
        return rc;
    dray_column_data columns[2];
    dray__prompts_columns(&p, of, columns);
    dray_tag tags[] = {{DRAY__TAG_STEP, (double)step},
                       {DRAY__TAG_REFILL, 1 + (double)(refill->id % 255)}};
    dray_insert_options options = DRAY_INSERT_OPTIONS_INIT;
    options.partition = refill->partition;
    options.rows = refill->rows;
    options.once_per_group = 1;
    options.columns = columns;
    options.column_count = 2;
    options.tags = tags;
    options.tag_count = 2;
    options.refill = refill->id;
    rc = dray_queue_insert(self->queue, &options, NULL, error);
    dray__prompts_free(&p);
    return rc == DRAY_EEXIST ? DRAY_OK : rc; /* answered before, or the step is over */
}

/* Reports the replacement in the desk's log and on the run's page. */
static void say(const dray__refiller *self, const dray_refill *refill, uint64_t prompt)
{
    char message[1024];
    snprintf(message, sizeof(message),
             "%s: %u samples from %u on were lost (%s: %s): replaced by prompt %llu",
             refill->partition, refill->rows, refill->slot, refill->task, refill->reason,
             (unsigned long long)prompt);
    fprintf(stderr, "%s\n", message);
    json_t *report = json_pack("{s:s}", "message", message);
    char *text = dray__json_text(report, JSON_COMPACT);
    json_decref(report);
    if (text)
        dray_report_post(self->context, "lost", text, NULL);
    free(text);
}

static int answer(dray__refiller *self, const dray_refill *refill, dray_error *error)
{
    int64_t step = dray__partition_step("step", refill->partition);
    const char *kind = step >= 0 ? "step" : "eval";
    if (step < 0)
        step = dray__partition_step("eval", refill->partition);
    losses *of = NULL;
    int rc = enter_partition(self, refill, step, &of, error);
    if (rc)
        return rc;
    bool stale = refill->cause == DRAY_LOSS_STALE;
    of->lost += stale ? 0 : refill->rows;
    uint64_t prompt;
    /* After as many losses as a step has samples, replacements would be lost, too. */
    bool hopeless = of->lost > dray__job_batch(self->job) + self->job->eval.prompts;
    if (hopeless || !choose(self, of, refill, &prompt))
        return dray_queue_refill_decline(self->queue, refill->id, error);
    say(self, refill, prompt);
    rc = insert(self, refill, kind, step, prompt, error);
    return rc ? rc : remember(of, refill->group, prompt, error);
}

static int serve(dray__refiller *self, dray_error *error)
{
    int rc = DRAY_OK;
    while (!rc && !atomic_load(&self->abandoned)) {
        dray_refill refill = DRAY_REFILL_INIT;
        rc = dray_queue_refill_wait(self->queue, SLICE_MS * DRAY__MILLISECOND, &refill, error);
        if (rc == DRAY_ETIMEDOUT)
            rc = DRAY_OK;
        else if (!rc)
            rc = answer(self, &refill, error);
    }
    return rc == DRAY_EEND ? DRAY_OK : rc;
}

static void *refiller_main(void *user)
{
    dray__refiller *self = user;
    dray_error error;
    dray_trace_enter(DRAY_SPAN_BUSY, "refill", -1);
    if (serve(self, &error) && !atomic_load(&self->abandoned)) {
        /* The step waits for samples that will not come: the process cannot go on. */
        fprintf(stderr, "error: refill: %s\n", error.message);
        _exit(1);
    }
    dray_trace_leave();
    return NULL;
}

static void refiller_free(dray__refiller *self)
{
    dray_queue_close(self->queue);
    for (uint32_t i = 0; i < self->count; i++)
        free(self->partitions[i].groups);
    free(self->partitions);
    free(self);
}

int dray__refiller_start(dray__host *host, const dray__data *data, const dray__feed *feed,
                         dray__refiller **out, dray_error *error)
{
    dray__refiller *self = calloc(1, sizeof(*self));
    if (!self)
        return dray__nomem(error);
    self->job = host->job;
    self->data = data;
    self->feed = feed;
    self->tokenizer = host->tokenizer;
    self->context = host->context;
    int rc = dray__job_queue_open(host->context, host->job, &self->queue, error);
    if (!rc)
        rc = dray__driver_newest(self->queue, &self->known_after, error);
    if (!rc)
        rc = dray__thread_start(&self->thread, refiller_main, self, "refill", error);
    if (rc)
        refiller_free(self);
    else
        *out = self;
    return rc;
}

void dray__refiller_oldest(dray__refiller *self, int64_t step)
{
    atomic_store(&self->oldest, step);
}

void dray__refiller_join(dray__refiller *self, bool now)
{
    if (!self)
        return;
    if (now)
        atomic_store(&self->abandoned, true);
    dray__thread_join(&self->thread);
    refiller_free(self);
}
