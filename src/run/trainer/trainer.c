/* A trainer's process: the tasks old_log_prob and actor, or (critic.c) value and critic, on one
 * sharded trainer, and the work after a step: publish the version, report, write checkpoints.
 *
 * The order within a step. Old log-probs must be those of the version that the step began with, so
 * the parameters do not change until all of them are computed; until then at most the first part of
 * the actor's batch is accumulated. That also keeps the version readable for an engine that is
 * restarted in the middle of rollout, and for samples that replace lost ones. Values are also of
 * the version that the step began with.
 *
 * Checkpoints of both models are of the same step. The cursor in the policy's is at a point where
 * both have trained that step and neither has trained the next. The value model's checkpoint is
 * written first, and the policy's waits for it; then the value model's trainer waits for the
 * policy's checkpoint. */
#include "base/array.h"
#include "base/clock.h"
#include "base/error.h"
#include "run/data/prompts.h"
#include "run/fault.h"
#include "run/job/schedule.h"
#include "run/trainer/checkpoint.h"
#include "run/trainer/learn.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* ---- opening --------------------------------------------------------------------------------- */

static int open_trainer(dray__host *host, dray__learner *self, int64_t labels, dray_error *error)
{
    const dray__job_actor *actor = &host->job->actor;
    dray_model_config config;
    const dray__trainer_options options = {.beta1 = actor->beta1,
                                           .beta2 = actor->beta2,
                                           .epsilon = actor->epsilon,
                                           .weight_decay = actor->weight_decay,
                                           .eos_token = dray__tokenizer_end(host->tokenizer)};
    int rc = dray__job_model_config(host->job, host->tokenizer, &config, error);
    config.labels = labels;
    if (!rc)
        rc = dray__trainer_open(&config, host->group, &options, &self->trainer, error);
    if (!rc)
        dray__trainer_pace(self->trainer, host->pace);
    return rc;
}

/* In a new run the model, after the warm-up, becomes checkpoint 0, with a fresh optimiser. A
 * resumed run starts from its checkpoint. */
static int begin(dray__host *host, dray_error *error)
{
    dray__learner *self = host->state;
    const dray__job *job = host->job;
    char path[4096];
    int64_t first = host->options.first_step;
    dray__checkpoint_path(host->options.folder, first, path, sizeof(path));
    if (access(path, F_OK) == 0)
        return dray__trainer_restore(self->trainer, path, error);
    if (first > 0)
        return dray__fail(error, DRAY_ENOENT, "%s: no such checkpoint", path);
    int rc = job->model.checkpoint[0]
                 ? dray__trainer_load(self->trainer, job->model.checkpoint, error)
                 : dray__trainer_init(self->trainer, job->model.embedding_std,
                                      job->model.weight_std, (uint64_t)job->seed, error);
    if (!rc && job->warmup.max_steps > 0)
        rc = dray__warmup(host, NULL, NULL, error);
    if (!rc)
        dray__trainer_forget(self->trainer);
    if (!rc)
        rc = dray__checkpoint_save(host, self->trainer, NULL, NULL, 0, error);
    dray__fault_at("after_warmup", 0);
    return rc;
}

/* Reports row 0 of the metrics: the reward of samples of the first version. */
static int tell_ready(dray__host *host, dray_error *error)
{
    double reward = 0, length = 0;
    int rc = DRAY_OK;
    if (host->options.first_step == 0)
        rc = dray__warmup(host, &reward, &length, error);
    return rc || !dray__host_leads(host)
               ? rc
               : dray__host_report(host, "ready",
                                   json_pack("{s:I, s:f, s:f}", "step",
                                             (json_int_t)host->options.first_step, "reward_mean",
                                             reward, "response_length_mean", length),
                                   error);
}

static void begin_step(dray__learner *self, int64_t step)
{
    self->step = step;
    dray__partition_name(dray__partition_of_step.kind, step, self->partition);
}

int dray__learner_open(dray__host *host, const dray__learned *what, int64_t labels,
                       dray_error *error)
{
    dray__learner *self = calloc(1, sizeof(*self));
    if (!self)
        return dray__nomem(error);
    host->state = self;
    self->what = what;
    self->rules = dray__schedule_rules(host->job);
    self->late = self->rules.first_complete;
    self->saved = host->options.first_step;
    begin_step(self, host->options.first_step + 1);
    dray__checkpoint_open(host);
    return open_trainer(host, self, labels, error);
}

int dray__learner_publish(dray__host *host, dray_error *error)
{
    dray__learner *self = host->state;
    return dray__publication_put(self->publication, host->options.first_step, error);
}

static int trainer_open(dray__host *host, dray_error *error)
{
    int rc = dray__learner_open(host, &dray__learned_policy, 0, error);
    dray__learner *self = host->state;
    if (!rc && self->late)
        rc = dray__feed_open(&self->rules, host->options.folder, host->options.first_step,
                             &self->feed, error);
    if (!rc) /* the warm-up needs the turn, too */
        rc = dray__turn_begin(host, -1, error);
    if (!rc)
        rc = begin(host, error);
    if (!rc)
        rc = dray__publication_open(host, self->trainer, self->what->model, self->what->publish,
                                    &self->publication, error);
    if (!rc) /* before the version can be evaluated, because row 0 begins with this report */
        rc = tell_ready(host, error);
    int64_t first = host->options.first_step;
    char path[4096];
    dray__checkpoint_path(host->options.folder, first, path, sizeof(path));
    if (!rc)
        rc = dray__publication_restore(self->publication, first, path, error);
    return rc ? rc : dray__learner_publish(host, error);
}

/* Writes a checkpoint when the run ends, or is asked to end. A process that leaves in the middle of
 * a step writes none: the queue counts samples as trained, and the parameters may have changed, of
 * which the step before knows nothing. */
static int trainer_finish(dray__host *host, dray_error *error)
{
    const dray__learner *self = host->state;
    int64_t done = self->step - 1;
    return self->saved == done || self->rows ? DRAY_OK
                                             : self->what->last_checkpoint(host, done, error);
}

static void trainer_close(dray__host *host)
{
    dray__learner *self = host->state;
    if (!self)
        return;
    for (uint32_t i = 0; i < self->kept_count; i++)
        dray__micro_free(&self->kept[i]);
    free(self->kept);
    dray__feed_close(self->feed);
    dray__publication_close(self->publication);
    dray__trainer_close(self->trainer);
    free(self);
}

/* ---- waiting for the other model's trainer --------------------------------------------------- */

enum { LOOK_MS = 10 };

void dray__learner_await(dray__host *host, const char *path,
                         int (*then)(dray__host *host, dray_error *error))
{
    dray__learner *self = host->state;
    snprintf(self->awaited, sizeof(self->awaited), "%s", path);
    self->then = then;
}

static bool trainer_busy(const dray__host *host)
{
    const dray__learner *self = host->state;
    return self->then != NULL;
}

static bool is_there(const dray__host *host)
{
    const dray__learner *self = host->state;
    int64_t version = -1;
    if (self->awaited[0])
        return access(self->awaited, F_OK) == 0;
    return dray__queue_version(host->queue, &version, NULL) == DRAY_OK &&
           version >= self->awaited_version;
}

/* Returns 1 when the awaited checkpoint is there. */
static int64_t trainer_decide(dray__host *host)
{
    const dray__learner *self = host->state;
    if (is_there(host))
        return 1;
    dray_trace_wait_briefly(DRAY_CAUSE_WEIGHTS, "wait for the other model", self->step);
    nanosleep(&(struct timespec){.tv_nsec = LOOK_MS * DRAY__MILLISECOND}, NULL);
    dray_trace_leave();
    return -1;
}

/* A process that leaves waits for no other trainer any more. A checkpoint of the policy, which
 * waits for the value model's, is then written by trainer_finish. */
static void stop_waiting(dray__learner *self)
{
    if (self->what == &dray__learned_policy)
        self->saved = -1;
    self->then = NULL;
}

static int trainer_turn(dray__host *host, int64_t decision, dray_error *error)
{
    dray__learner *self = host->state;
    int (*then)(dray__host *, dray_error *) = self->then;
    int rc = dray__turn_end(host, error); /* the other trainer may need the device */
    if (!rc && then && decision == DRAY__TURN_LAST)
        stop_waiting(self);
    if (rc || decision != 1 || !then)
        return rc;
    self->then = NULL;
    return then(host, error);
}

/* ---- the end of a step ----------------------------------------------------------------------- */

/* JSON has no NaN or infinity: a run that diverges reports null, and goes on. */
static int finish_step(dray__host *host, dray_error *error)
{
    dray__learner *self = host->state;
    int rc = dray__learner_repeat(host, error);
    if (!rc)
        rc = dray__publication_put(self->publication, self->step, error);
    if (!rc && dray__host_leads(host))
        rc = self->what->tell(host, error);
    self->finished = true;
    return rc;
}

/* When a step trains samples of any prompts, those of the next step are already under way at the
 * end of the run. They are left in the queue; the driver clears them when it sees that the queue
 * has ended. */
int dray__learner_go_on(dray__host *host, dray_error *error)
{
    dray__learner *self = host->state;
    if (!dray__late_binds(host) || !dray__host_leads(host) || !dray__host_stopping(host))
        return DRAY_OK;
    self->stopped = true;
    return dray_queue_end(host->queue, error);
}

static bool commits_alone(const dray__host *host)
{
    const dray__learner *self = host->state;
    return self->finished || self->late;
}

static int actor_after(dray__host *host, dray_error *error)
{
    dray__learner *self = host->state;
    if (!self->finished)
        return DRAY_OK;
    dray__fault_at("after_commit", self->step);
    int64_t done = self->step;
    begin_step(self, done + 1);
    self->rows = 0;
    self->settled = self->step_due = self->written = self->finished = false;
    self->learned = self->old = 0;
    self->sums = (dray__step_sums){0};
    int rc = DRAY_OK;
    if (done % host->job->checkpoint.every != 0 && done != host->job->steps) {
        rc = dray__checkpoint_pass(host, done, error);
    } else {
        self->saved = done;
        rc = dray__turn_end(host, error); /* writing files needs no device */
        if (!rc)
            rc = self->what->checkpoint(host, done, error);
    }
    if (rc || self->then)
        return rc;
    if (!self->late || self->what == &dray__learned_policy)
        return dray__learner_go_on(host, error);
    dray__learner_await(host, "", dray__learner_go_on); /* called when both have made the step */
    self->awaited_version = done;
    return DRAY_OK;
}

/* ---- tasks ----------------------------------------------------------------------------------- */

static uint32_t batch_of(const dray__host *host)
{
    return (uint32_t)dray__job_batch(host->job);
}

static int64_t trainer_version(const dray__host *host)
{
    const dray__learner *self = host->state;
    return self->step - 1;
}

static const char *trainer_partition(const dray__host *host)
{
    const dray__learner *self = host->state;
    return self->rules.open > 1 && !self->late ? self->partition : NULL;
}

static uint32_t old_log_prob_count(const dray__host *host)
{
    const dray__learner *self = host->state;
    return self->settled || self->then ? 0 : (uint32_t)host->job->old_log_prob.micro_batch;
}

/* After the first part, claims all that is left at once, to see that it is ready (settle). */
static uint32_t actor_count(const dray__host *host)
{
    const dray__learner *self = host->state;
    if (self->then)
        return 0;
    if (self->late)
        return dray__late_count(host);
    bool first_part = self->rows < dray__learner_part(host->job);
    return first_part || self->settled ? dray__learner_micro(host->job)
                                       : batch_of(host) - self->rows;
}

static bool actor_newest(const dray__host *host)
{
    return dray__late_binds(host) && dray__late_newest(host);
}

static int check_step(const dray__host *host, const dray_batch *batch, dray_error *error)
{
    const dray__learner *self = host->state;
    int64_t step = 0;
    int rc = dray__batch_step(batch, &step, error);
    if (!rc && step != self->step)
        rc = dray__fail(error, DRAY_EINTERNAL, "samples of step %lld came, expected step %lld",
                        (long long)step, (long long)self->step);
    return rc;
}

/* Takes the optimiser step for the part that was waiting, if any. */
static int step_if_due(dray__host *host, dray_error *error)
{
    dray__learner *self = host->state;
    if (!self->step_due)
        return DRAY_OK;
    self->step_due = false;
    return dray__learner_step(host, error);
}

int dray__learner_score(dray__host *host, dray_batch *batch, const char *column,
                        dray__score_fn *score, dray_error *error)
{
    dray__learner *self = host->state;
    int rc = self->late ? dray__rules_check(&self->rules, self->step, batch, error)
                        : check_step(host, batch, error);
    dray_trace_enter(DRAY_SPAN_BUSY, column, self->step);
    if (!rc)
        rc = dray__host_score(host, batch, column, score, error);
    dray_trace_leave();
    return rc;
}

static int score_logprobs(dray__host *host, const dray__sequences *sequences, float *out,
                          dray_error *error)
{
    const dray__learner *self = host->state;
    return dray__trainer_logprobs(self->trainer, sequences, host->job->rollout.temperature, out,
                                  NULL, error);
}

static int old_log_prob_run(dray__host *host, dray_batch *batch, int64_t step, dray_error *error)
{
    (void)step;
    return dray__learner_score(host, batch, "old_log_prob", score_logprobs, error);
}

int dray__learner_keep(dray__host *host, dray__micro *micro, dray_error *error)
{
    dray__learner *self = host->state;
    if (!DRAY__PUSH(self->kept, self->kept_count, self->kept_room, *micro))
        return dray__nomem(error);
    *micro = (dray__micro){0};
    return DRAY_OK;
}

static int learn(dray__host *host, const dray_batch *batch, dray__micro *whole, uint32_t at,
                 dray_error *error)
{
    dray__learner *self = host->state;
    dray__micro micro = {0};
    uint32_t first, rows;
    int rc = dray_batch_micro(batch, at, &first, &rows, error);
    if (rc)
        return rc;
    if (rows == whole->rows) {
        micro = *whole;
        *whole = (dray__micro){0};
    } else {
        rc = dray__micro_slice(whole, first, rows, &micro, error);
    }
    if (!rc)
        rc = dray__learner_accumulate(host, &micro, error);
    self->rows += rc ? 0 : rows;
    if (!rc && self->what->epochs(host->job) > 1)
        rc = dray__learner_keep(host, &micro, error);
    dray__micro_free(&micro);
    return rc;
}

/* Settles the step: everything that is left of it is ready, so the parameters may change. No sample
 * that replaces a lost one will need old log-probs or the version any more. */
static bool settle(dray__host *host, const dray_batch *batch)
{
    dray__learner *self = host->state;
    bool all = !self->settled && self->rows &&
               self->rows + dray_batch_rows(batch) == batch_of(host) &&
               self->rows >= dray__learner_part(host->job);
    self->settled |= all;
    host->put_back = all; /* claimed again by micro-batch */
    return all;
}

static int train_in_order(dray__host *host, dray_batch *batch, dray_error *error)
{
    dray__learner *self = host->state;
    dray__micro whole = {0};
    int rc = check_step(host, batch, error);
    if (!rc && settle(host, batch))
        return DRAY_OK;
    dray_trace_enter(DRAY_SPAN_BUSY, self->what->task, self->step);
    if (!rc)
        rc = step_if_due(host, error);
    if (!rc)
        rc = dray__rules_check(&self->rules, self->step, batch, error);
    if (!rc)
        rc = dray__micro_read(batch, host->job, self->what->task, &whole, error);
    if (!rc)
        self->what->measure(host, &whole);
    for (uint32_t i = 0; i < dray_batch_micros(batch) && !rc; i++)
        rc = learn(host, batch, &whole, i, error);
    dray__micro_free(&whole);
    dray_trace_leave();
    if (rc)
        return rc;
    self->step_due = self->rows % dray__learner_part(host->job) == 0;
    return self->rows < batch_of(host) ? DRAY_OK : step_if_due(host, error);
}

static int actor_run(dray__host *host, dray_batch *batch, int64_t step, dray_error *error)
{
    (void)step;
    dray__learner *self = host->state;
    int rc = self->late ? dray__late_run(host, batch, error) : train_in_order(host, batch, error);
    return rc || self->rows < batch_of(host) || host->put_back ? rc : finish_step(host, error);
}

/* ---- the policy ------------------------------------------------------------------------------ */

static double policy_rate(const dray__job *job)
{
    return job->actor.lr;
}

static int64_t policy_epochs(const dray__job *job)
{
    return job->actor.epochs;
}

static int policy_tell(dray__host *host, dray_error *error)
{
    const dray__learner *self = host->state;
    int rc = dray__schedule_of(host->job).exact
                 ? DRAY_OK
                 : dray_queue_version(host->queue, (uint64_t)self->step, error);
    return rc ? rc : dray__host_report(host, "step", dray__learner_row(host), error);
}

static int policy_save(dray__host *host, dray_error *error)
{
    const dray__learner *self = host->state;
    return dray__checkpoint_save(host, self->trainer, self->publication, self->feed, self->saved,
                                 error);
}

static int policy_checkpoint(dray__host *host, int64_t step, dray_error *error)
{
    char path[4096];
    if (!dray__job_has(host->job, "critic"))
        return policy_save(host, error);
    dray__critic_path(host->options.folder, step, path, sizeof(path));
    dray__learner_await(host, path, policy_save);
    return DRAY_OK;
}

enum { LEAVING_S = 10 };

/* Waits for the value model's checkpoint of the step. When the run goes on without this trainer,
 * the value model's may go on, too, and write none: then the wait is short, and *there is false.
 * Rank 0 decides for all. */
static int await_critic(dray__host *host, const char *path, bool *there, dray_error *error)
{
    int64_t deadline = dray__deadline(LEAVING_S * DRAY__SECOND);
    bool whole = dray__host_queue_ended(host);
    *there = access(path, F_OK) == 0;
    while (host->options.rank == 0 && !whole && !*there && dray__now() < deadline) {
        nanosleep(&(struct timespec){.tv_nsec = LOOK_MS * DRAY__MILLISECOND}, NULL);
        *there = access(path, F_OK) == 0;
        whole = dray__host_queue_ended(host);
    }
    uint8_t decided = whole || *there;
    int rc = dray__host_broadcast(host, &decided, sizeof(decided), DRAY_WAIT_DEFAULT, error);
    *there = decided != 0;
    return rc || !*there ? rc : dray__host_wait_file(host, path, error);
}

static int policy_last_checkpoint(dray__host *host, int64_t step, dray_error *error)
{
    dray__learner *self = host->state;
    char path[4096];
    bool there = true;
    int rc = DRAY_OK;
    self->saved = step;
    dray__critic_path(host->options.folder, step, path, sizeof(path));
    if (dray__job_has(host->job, "critic"))
        rc = await_critic(host, path, &there, error);
    return rc || !there ? rc : policy_save(host, error);
}

const dray__learned dray__learned_policy = {.task = "actor",
                                            .model = DRAY__POLICY,
                                            .optimiser = "optimiser",
                                            .publish = "publish",
                                            .rate = policy_rate,
                                            .epochs = policy_epochs,
                                            .complete = dray__late_proximal,
                                            .accumulate = dray__learner_accumulate_policy,
                                            .measure = dray__learner_measure,
                                            .tell = policy_tell,
                                            .checkpoint = policy_checkpoint,
                                            .last_checkpoint = policy_last_checkpoint};

#define LEARNER                                                                                    \
    .version = trainer_version, .partition = trainer_partition, .commits_alone = commits_alone
static const dray__task_work policy_works[] = {
    {.task = "old_log_prob", LEARNER, .count = old_log_prob_count, .run = old_log_prob_run},
    {.task = "actor",
     LEARNER,
     .count = actor_count,
     .newest = actor_newest,
     .run = actor_run,
     .after = actor_after},
    {.task = NULL}};
static const dray__task_work value_works[] = {
    {.task = "value",
     LEARNER,
     .count = dray__value_count,
     .newest = dray__value_newest,
     .run = dray__value_run},
    {.task = "critic", LEARNER, .count = actor_count, .run = actor_run, .after = actor_after},
    {.task = NULL}};

#define TRAINER                                                                                    \
    .finish = trainer_finish, .busy = trainer_busy, .decide = trainer_decide,                      \
    .turn = trainer_turn, .close = trainer_close
const dray__program_kind dray__trainer_program = {
    .open = trainer_open, TRAINER, .works = policy_works};
const dray__program_kind dray__critic_program = {
    .open = dray__critic_open, TRAINER, .works = value_works};
