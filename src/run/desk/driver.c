/* The driver makes the prompts of a step, watches the step finish, and clears it. It reads the
 * remaining work from the queue, so that a new desk goes on where a killed one stopped. */
#include "base/clock.h"
#include "base/error.h"
#include "base/io.h"
#include "base/json.h"
#include "base/thread.h"
#include "run/data/data.h"
#include "run/data/prompts.h"
#include "run/desk/desk.h"
#include "run/fault.h"
#include "run/job/schedule.h"
#include "run/supervisor/folder.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* The newest partition of a kind; step is -1 when there is none. */
typedef struct newest {
    int64_t step;
    bool sealed;
} newest;

typedef struct view {
    json_t *status; /* of the queue; view_free */
    newest step, eval;
    /* Steps that are not trained yet: the oldest one (-1 for none), and their number. */
    int64_t oldest, open;
    int64_t trained; /* the newest step that is trained; -1 for none */
    int64_t version; /* the version that the trainer has published, if rollout is admitted by it */
    /* Trainers wait for samples, and no engine works on the present prompts. */
    bool stands, ended;
} view;

struct dray__driver {
    dray__host *host;
    /* A connection of its own, because the host's thread waits on the other one. */
    dray_queue *queue;
    dray__data *data;
    dray_steps_rules rules;
    dray__feed *feed;
    dray__refiller *refiller;
    dray__thread thread;
    atomic_bool abandoned; /* the host has failed */
    view now;              /* at the last look */
    /* For evaluations beside the steps (the schedule is not exact): the next one, and the one that
     * is being made; -1 when there is none. */
    int64_t next_eval, evaluating;
};

/* The time between two checks whether the run is to stop, or a sample was lost. The short one is
 * for evaluations beside the steps, which may be due. */
enum { SLICE_MS = 500, SHORT_SLICE_MS = 100 };

/* ---- making partitions ----------------------------------------------------------------------- */

/* Returns the number of the partition's prompts, and lists them. Returns 0 when all of the step's
 * are trained already. */
static uint32_t prompts_of(const dray__driver *self, const dray__partition_kind *kind, int64_t step,
                           const uint32_t **groups)
{
    *groups = NULL;
    return kind == &dray__partition_of_eval ? (uint32_t)self->host->job->eval.prompts
                                            : dray__feed_groups(self->feed, step, groups);
}

static uint32_t samples_of(const dray__driver *self, const dray__partition_kind *kind)
{
    return kind == &dray__partition_of_eval ? 1 : (uint32_t)self->host->job->rollout.samples;
}

static int insert(dray__driver *self, const dray__partition_kind *kind, int64_t step,
                  dray_error *error)
{
    const dray__job *job = self->host->job;
    const uint32_t *groups;
    uint32_t count = prompts_of(self, kind, step, &groups), group = samples_of(self, kind);
    char name[DRAY__PARTITION_BYTES];
    dray__partition_name(kind->kind, step, name);
    dray__prompts p;
    if (!count)
        return DRAY_OK;
    int rc = dray__prompts_make(self->data, self->host->tokenizer, kind->split,
                                dray__prompt_index(job, kind, step, 0), groups, count, &p, error);
    if (rc)
        return rc;
    dray_column_data columns[2];
    dray__prompts_columns(&p, kind, columns);
    dray_tag tag = {DRAY__TAG_STEP, (double)step};
    dray_insert_options options = DRAY_INSERT_OPTIONS_INIT;
    options.partition = name;
    options.rows = count * group;
    options.group_size = group;
    options.once_per_group = 1;
    options.columns = columns;
    options.column_count = 2;
    options.tags = &tag;
    options.tag_count = 1;
    options.row_bytes =
        p.longest + 256 + (uint64_t)(dray__job_token_bytes(job) * job->rollout.max_new_tokens);
    options.timeout_ns = self->host->wait_ns;
    options.at_slot = 1;
    rc = dray_queue_insert(self->queue, &options, NULL, error);
    if (rc == DRAY_EEXIST) { /* it was cleared when the run went back */
        options.at_slot = 0;
        rc = dray_queue_insert(self->queue, &options, NULL, error);
    }
    dray__prompts_free(&p);
    if (!rc)
        dray__fault_at("inserted", step);
    if (!rc)
        rc = dray_queue_seal(self->queue, name, count * group, error);
    if (!rc)
        dray__fault_at("sealed", step);
    return rc;
}

/* ---- reading the queue ----------------------------------------------------------------------- */

static void view_free(view *v)
{
    json_decref(v->status);
    *v = (view){.step = {-1, false}, .eval = {-1, false}, .oldest = -1, .trained = -1};
}

static bool is_trainers(const char *task)
{
    const dray__task_kind *kind = dray__task_find(task);
    return kind && dray__program_trains(kind->program);
}

/* Returns whether the policy and, if the job has one, the value model have trained the
 * partition. */
static bool is_trained(const json_t *partition)
{
    const char *name;
    json_t *task;
    json_object_foreach(json_object_get(partition, "tasks"), name, task)
    {
        const dray__task_kind *kind = dray__task_find(name);
        if (kind && kind->trains && !dray__json_true(task, "finished"))
            return false;
    }
    return true;
}

/* Returns whether tasks other than the trainers' have work on the partition, or it must be
 * refilled. */
static bool is_moving(const json_t *partition)
{
    const char *name;
    json_t *task;
    bool moving = dray__json_integer(partition, "vacant") > 0;
    json_object_foreach(json_object_get(partition, "tasks"), name, task)
    {
        moving = moving || (!is_trainers(name) && (dray__json_integer(task, "ready") > 0 ||
                                                   dray__json_integer(task, "taken") > 0));
    }
    return moving;
}

static bool trainer_waits(const json_t *status)
{
    const char *name;
    json_t *waiting;
    json_object_foreach(json_object_get(json_object_get(status, "waiters"), "claims"), name,
                        waiting)
    {
        if (is_trainers(name) && json_integer_value(waiting) > 0)
            return true;
    }
    return false;
}

static void look_at_partition(const json_t *partition, const char *name, view *out)
{
    bool sealed = dray__json_true(partition, "sealed");
    int64_t step = dray__partition_step(dray__partition_of_step.kind, name),
            eval = dray__partition_step(dray__partition_of_eval.kind, name);
    if (step > out->step.step)
        out->step = (newest){step, sealed};
    if (eval > out->eval.step)
        out->eval = (newest){eval, sealed};
    out->stands = out->stands && !is_moving(partition);
    bool trained = is_trained(partition);
    if (trained && step > out->trained)
        out->trained = step;
    if (step < 0 || trained)
        return;
    out->open++;
    if (out->oldest < 0 || step < out->oldest)
        out->oldest = step;
}

/* Fails for a sample that failed too often and was not replaced, because its step would never be
 * complete. */
static int look_for_dead(const json_t *partition, const char *name, dray_error *error)
{
    const json_t *dead = json_object_get(partition, "dead");
    json_int_t count = json_is_integer(dead) ? json_integer_value(dead) : 0;
    if (!count)
        return DRAY_OK;
    const json_t *deaths = json_object_get(partition, "deaths");
    const char *reason = dray__json_string(json_array_get(deaths, 0), "reason");
    return dray__fail(error, DRAY_EDEAD,
                      "%s: %lld samples failed too often (queue.max_attempts)%s%s", name,
                      (long long)count, reason ? ": " : "", reason ? reason : "");
}

static int look_at(dray_queue *queue, view *out, dray_error *error)
{
    view_free(out);
    int rc = dray__queue_state(queue, &out->status, error);
    out->ended = dray__json_true(out->status, "ended");
    out->version = dray__json_integer(json_object_get(out->status, "admission"), "version");
    out->stands = trainer_waits(out->status);
    json_t *partitions = json_object_get(out->status, "partitions"), *partition;
    size_t i;
    json_array_foreach(partitions, i, partition)
    {
        const char *name = dray__json_string(partition, "name");
        if (name && !rc) {
            look_at_partition(partition, name, out);
            rc = look_for_dead(partition, name, error);
        }
    }
    return rc;
}

static int look(dray__driver *self, dray_error *error)
{
    return look_at(self->queue, &self->now, error);
}

int dray__driver_newest(dray_queue *queue, int64_t *step, dray_error *error)
{
    view v = {0};
    int rc = look_at(queue, &v, error);
    if (!rc)
        *step = v.step.step;
    view_free(&v);
    return rc;
}

/* ---- the thread ------------------------------------------------------------------------------ */

static int abandoned(dray__driver *self, dray_error *error)
{
    return atomic_load(&self->abandoned) ? dray__fail(error, DRAY_ECANCELED, "the host has failed")
                                         : DRAY_OK;
}

static int evaluate_beside(dray__driver *self, int64_t version, dray_error *error);

/* Returns DRAY_EEND when the run was stopped meanwhile. */
static int look_around(dray__driver *self, dray_error *error)
{
    int rc = abandoned(self, error);
    if (!rc)
        rc = look(self, error);
    if (!rc && self->now.ended)
        return dray__fail(error, DRAY_EEND, "the run was stopped");
    return rc || self->next_eval < 0 ? rc : evaluate_beside(self, self->now.version, error);
}

/* Waits a short time until `task` is done with the partition. Returns DRAY_ETIMEDOUT after it has
 * looked at the queue and the run. A partition that was cleared counts as done, because an earlier
 * instance saw it. */
static int wait_slice(dray__driver *self, const dray__partition_kind *kind, const char *task,
                      int64_t step, dray_error *error)
{
    char name[DRAY__PARTITION_BYTES];
    const uint32_t *groups;
    int64_t slice = self->next_eval < 0 && !self->rules.fresh ? SLICE_MS : SHORT_SLICE_MS;
    dray__partition_name(kind->kind, step, name);
    if (!prompts_of(self, kind, step, &groups))
        return DRAY_OK;
    int rc = dray_queue_wait(self->queue, name, task, slice * DRAY__MILLISECOND, error);
    if (rc != DRAY_ETIMEDOUT)
        return rc;
    rc = look_around(self, error);
    return rc ? rc : DRAY_ETIMEDOUT;
}

static int wait_partition(dray__driver *self, const dray__partition_kind *kind, const char *task,
                          int64_t step, dray_error *error)
{
    int rc;
    do
        rc = wait_slice(self, kind, task, step, error);
    while (rc == DRAY_ETIMEDOUT);
    return rc;
}

static int seal(dray__driver *self, const dray__partition_kind *kind, int64_t step,
                dray_error *error)
{
    char name[DRAY__PARTITION_BYTES];
    const uint32_t *groups;
    uint32_t count = prompts_of(self, kind, step, &groups);
    dray__partition_name(kind->kind, step, name);
    return count ? dray_queue_seal(self->queue, name, count * samples_of(self, kind), error)
                 : DRAY_OK;
}

static int clear(dray__driver *self, const dray__partition_kind *kind, int64_t step,
                 dray_error *error)
{
    char name[DRAY__PARTITION_BYTES];
    dray__partition_name(kind->kind, step, name);
    int rc = dray_queue_clear(self->queue, name, error);
    return rc == DRAY_ENOENT || rc == DRAY_EGONE ? DRAY_OK : rc;
}

/* Waits until the trainer has written the checkpoint that it starts from. From then on there are
 * weights. */
static int wait_for_start(dray__driver *self, dray_error *error)
{
    char path[4096];
    struct stat st;
    dray__checkpoint_path(self->host->options.folder, self->host->options.first_step, path,
                          sizeof(path));
    dray_trace_wait(DRAY_CAUSE_WEIGHTS, "wait for weights", -1);
    while (stat(path, &st) < 0) {
        if (errno != ENOENT)
            return dray__fail_errno(error, errno, "%s", path);
        int rc = abandoned(self, error);
        if (rc)
            return rc;
        nanosleep(&(struct timespec){.tv_nsec = 20 * DRAY__MILLISECOND}, NULL);
    }
    dray_trace_leave();
    return DRAY_OK;
}

/* Clears the trained steps that the last look found, and the evaluations up to `step` that a killed
 * instance left; with `all`, all steps and evaluations. */
static int tidy(dray__driver *self, int64_t step, bool all, dray_error *error)
{
    json_t *partitions = json_object_get(self->now.status, "partitions"), *partition;
    size_t i;
    int rc = DRAY_OK;
    json_array_foreach(partitions, i, partition)
    {
        const char *name = dray__json_string(partition, "name");
        int64_t of_step = name ? dray__partition_step("step", name) : -1,
                of_eval = name ? dray__partition_step("eval", name) : -1;
        if (!rc && of_step >= 0 && (all || is_trained(partition)))
            rc = clear(self, &dray__partition_of_step, of_step, error);
        if (!rc && of_eval >= 0 && (all || of_eval <= step) && of_eval != self->evaluating)
            rc = clear(self, &dray__partition_of_eval, of_eval, error);
    }
    json_array_clear(partitions);
    return rc;
}

static int clear_all(dray__driver *self, dray_error *error)
{
    int rc = look(self, error);
    return rc ? rc : tidy(self, 0, true, error);
}

/* Returns whether the partition has samples, not only prompts. */
static bool has_samples(const json_t *partition)
{
    const json_t *made = json_object_get(json_object_get(partition, "columns"), "response");
    return json_is_integer(made) && json_integer_value(made) > 0;
}

/* Returns whether a resumed run keeps samples of the earlier one. It does when the schedule is not
 * exact, except for a job that trains complete samples first and has a value model: there, samples
 * with values were bound to steps that are made again. */
static bool keeps_samples(const dray__job *job)
{
    dray__schedule schedule = dray__schedule_of(job);
    return !schedule.exact && !(schedule.first_complete && dray__job_has(job, "critic"));
}

int dray__driver_resume(dray_queue *queue, const dray__job *job, const void *cursor, size_t size,
                        bool eval_first, dray_error *error)
{
    json_t *status = NULL;
    dray__schedule schedule = dray__schedule_of(job);
    bool keep = keeps_samples(job);
    int rc = cursor ? dray_queue_resume(queue, cursor, size, NULL, error) : DRAY_OK;
    if (!rc)
        rc = dray__queue_state(queue, &status, error);
    json_t *partitions = json_object_get(status, "partitions"), *partition;
    size_t i;
    json_array_foreach(partitions, i, partition)
    {
        const char *name = dray__json_string(partition, "name");
        bool prompts = !keep && (eval_first || !schedule.exact || !has_samples(partition)),
             eval = name && dray__partition_step(dray__partition_of_eval.kind, name) >= 0;
        if (!rc && name && (prompts || eval))
            rc = dray_queue_clear(queue, name, error);
    }
    json_decref(status);
    return rc;
}

int dray__driver_admit(dray_queue *queue, const dray__job *job, int64_t version, dray_error *error)
{
    dray_admission admission = DRAY_ADMISSION_INIT;
    admission.task = "rollout";
    admission.batch_rows = (uint32_t)dray__job_batch(job);
    admission.staleness = (uint32_t)dray__schedule_staleness(job);
    admission.version = (uint64_t)version;
    admission.resume = !keeps_samples(job); /* samples that are gone do not count */
    return dray__schedule_of(job).exact ? DRAY_OK : dray_queue_admit(queue, &admission, error);
}

/* Evaluates a version after the samples of the step before and before the prompts of the first step
 * that the version generates. So the engine, which has one version at a time, changes it only once.
 * Training goes on meanwhile as far as it has samples. The evaluation is cleared before those
 * prompts are inserted, because tasks that take samples in order would wait for its rows. */
static int evaluate(dray__driver *self, int64_t version, int64_t last, dray_error *error)
{
    const dray__host *host = self->host;
    if (version < host->options.eval_from || !dray__job_eval_due(host->job, version))
        return DRAY_OK;
    int rc = last > host->options.first_step
                 ? wait_partition(self, &dray__partition_of_step, "rollout", last, error)
                 : DRAY_OK;
    if (!rc)
        rc = look(self, error);
    if (!rc)
        rc = self->now.eval.step == version
                 ? seal(self, &dray__partition_of_eval, version, error)
                 : insert(self, &dray__partition_of_eval, version, error);
    if (!rc)
        rc = wait_partition(self, &dray__partition_of_eval, "score", version, error);
    if (!rc)
        dray__fault_at("finished", version);
    return rc ? rc : clear(self, &dray__partition_of_eval, version, error);
}

static int64_t next_due(const dray__job *job, int64_t version)
{
    while (version <= job->steps && !dray__job_eval_due(job, version))
        version++;
    return version;
}

/* Makes evaluations one after the other, each as soon as its version is published, while training
 * goes on. It is made with that version or a newer one (its row has the number). */
static int evaluate_beside(dray__driver *self, int64_t version, dray_error *error)
{
    char name[DRAY__PARTITION_BYTES];
    int rc = DRAY_OK;
    if (self->evaluating >= 0) {
        dray__partition_name(dray__partition_of_eval.kind, self->evaluating, name);
        rc = dray_queue_wait(self->queue, name, "score", 0, error);
        if (rc)
            return rc == DRAY_ETIMEDOUT ? DRAY_OK : rc;
        dray__fault_at("finished", self->evaluating);
        rc = clear(self, &dray__partition_of_eval, self->evaluating, error);
        self->evaluating = -1;
    }
    if (rc || self->next_eval > version || self->next_eval > self->host->job->steps)
        return rc;
    self->evaluating = self->next_eval;
    self->next_eval = next_due(self->host->job, self->next_eval + 1);
    return insert(self, &dray__partition_of_eval, self->evaluating, error);
}

/* Returns how many rows metrics.jsonl has. A row is written after its evaluation. */
static int64_t rows_written(const dray__host *host)
{
    char path[4096];
    dray__host_path(host, path, sizeof(path), "metrics.jsonl");
    FILE *file = dray__open_stream(path, "r");
    int64_t lines = 0;
    for (int c; file && (c = fgetc(file)) != EOF;)
        lines += c == '\n';
    if (file)
        fclose(file);
    return lines;
}

/* Finds the evaluation to begin with. A restarted instance repeats the one that was under way. */
static int begin_evaluations(dray__driver *self, dray_error *error)
{
    const dray__host *host = self->host;
    if (dray__schedule_of(host->job).exact)
        return DRAY_OK;
    int64_t from = host->options.eval_from, written = rows_written(host);
    self->next_eval = next_due(host->job, from > written ? from : written);
    int64_t left = self->now.eval.step;
    return left < 0 ? DRAY_OK : clear(self, &dray__partition_of_eval, left, error);
}

static int finish_evaluations(dray__driver *self, int64_t last, dray_error *error)
{
    char name[DRAY__PARTITION_BYTES];
    int rc = DRAY_OK;
    while (!rc && (self->evaluating >= 0 || (self->next_eval >= 0 && self->next_eval <= last))) {
        dray__partition_name(dray__partition_of_eval.kind,
                             self->evaluating >= 0 ? self->evaluating : self->next_eval, name);
        rc = dray_queue_wait(self->queue, name, "score", SHORT_SLICE_MS * DRAY__MILLISECOND, error);
        rc = rc && rc != DRAY_ETIMEDOUT && rc != DRAY_EGONE ? rc : look_around(self, error);
    }
    return rc;
}

static int wait_trained(dray__driver *self, int64_t step, dray_error *error)
{
    if (step < dray__feed_first(self->feed))
        return DRAY_OK;
    int rc = wait_partition(self, &dray__partition_of_step, "actor", step, error);
    if (!rc && dray__job_has(self->host->job, "critic"))
        rc = wait_partition(self, &dray__partition_of_step, "critic", step, error);
    if (!rc)
        dray__fault_at("finished", step);
    return rc;
}

/* Returns true when the prompts of one more step may be inserted. The schedule limits the number of
 * open steps. There are more when a step waits for samples of newer versions (fresh_share), which
 * can only be made of new prompts, because all present samples were made by earlier versions.
 * Admission has room for them once rows of the newest version are trained. */
static bool has_room(const dray__driver *self)
{
    const dray__job *job = self->host->job;
    const view *now = &self->now;
    if (now->open < self->rules.open)
        return true;
    return self->rules.fresh && self->rules.first_complete && now->stands &&
           dray__json_integer(now->status, "rows") + dray__job_batch(job) <=
               dray__json_integer(now->status, "capacity_rows");
}

static int await_room(dray__driver *self, dray_error *error)
{
    int rc = DRAY_OK;
    while (!rc && !has_room(self)) {
        int64_t oldest = self->now.oldest;
        rc = wait_slice(self, &dray__partition_of_step, "actor", oldest, error);
        if (!rc && dray__job_has(self->host->job, "critic"))
            rc = wait_slice(self, &dray__partition_of_step, "critic", oldest, error);
        if (!rc)
            rc = look_around(self, error);
        if (rc == DRAY_ETIMEDOUT) /* it has looked around */
            rc = DRAY_OK;
    }
    if (!rc && self->now.trained >= 0)
        dray__fault_at("finished", self->now.trained);
    if (!rc && self->now.oldest >= 0)
        dray__refiller_oldest(self->refiller, self->now.oldest);
    return rc;
}

/* Inserts the prompts of one step after the other, as far ahead as the schedule allows; *last is
 * the newest step. A step is cleared only after a newer one was inserted. So the queue always has a
 * step, which shows how far the run is. */
static int feed(dray__driver *self, int64_t *last, dray_error *error)
{
    const dray__host *host = self->host;
    int rc = DRAY_OK;
    while (!rc && *last < host->job->steps) {
        int64_t step = *last + 1, version = dray__schedule_versions(host->job, step).newest;
        rc = await_room(self, error);
        if (!rc && dray__host_stopping(host))
            return DRAY_OK;
        if (!rc && self->rules.exact && dray__schedule_first_step(host->job, version) == step)
            rc = evaluate(self, version, *last, error);
        if (!rc)
            rc = insert(self, &dray__partition_of_step, step, error);
        if (!rc)
            rc = tidy(self, step - self->rules.open, false, error);
        if (rc)
            return rc;
        if (!self->now.open++)
            self->now.oldest = step;
        self->now.stands = false;
        dray__fault_at("cleared", step);
        *last = step;
    }
    return rc;
}

/* Waits for the steps that are still in the queue, and makes the evaluations that come after the
 * last prompts. */
static int finish(dray__driver *self, int64_t last, dray_error *error)
{
    const dray__job *job = self->host->job;
    int64_t step = last - self->rules.open + 1;
    int rc = look(self, error);
    if (self->now.oldest >= 0 && self->now.oldest < step)
        step = self->now.oldest;
    for (; step <= last && !rc; step++) {
        rc = wait_trained(self, step, error);
        if (!rc && self->rules.exact && step >= 0 && dray__schedule_first_step(job, step) > last)
            rc = evaluate(self, step, last, error);
    }
    if (!rc)
        rc = finish_evaluations(self, last, error);
    if (!rc)
        rc = dray_queue_end(self->queue, error);
    return rc ? rc : clear_all(self, error);
}

static int drive(dray__driver *self, dray_error *error)
{
    int rc = wait_for_start(self, error);
    if (!rc)
        rc = look(self, error);
    if (!rc && self->now.ended)
        return clear_all(self, error);
    int64_t last = dray__feed_first(self->feed) - 1;
    if (!rc)
        rc = begin_evaluations(self, error);
    if (!rc &&
        self->now.step.step > last) { /* an earlier instance was here, or the run went back */
        last = self->now.step.step;
        rc = seal(self, &dray__partition_of_step, last, error);
    }
    if (!rc)
        rc = feed(self, &last, error);
    if (!rc)
        rc = finish(self, last, error);
    if (rc != DRAY_EEND)
        return rc;
    self->evaluating = -1; /* the run was stopped, so the evaluation is not waited for */
    return clear_all(self, error);
}

static void *drive_main(void *user)
{
    dray__driver *self = user;
    dray_error error;
    dray_trace_enter(DRAY_SPAN_BUSY, "drive", -1);
    if (drive(self, &error) && !atomic_load(&self->abandoned)) {
        /* The host's thread waits for samples that will not come: the process cannot go on. */
        fprintf(stderr, "error: driver: %s\n", error.message);
        _exit(1);
    }
    dray_trace_leave();
    return NULL;
}

static void driver_free(dray__driver *self)
{
    dray_queue_close(self->queue);
    dray__feed_close(self->feed);
    dray__data_close(self->data);
    view_free(&self->now);
    free(self);
}

int dray__driver_start(dray__host *host, dray__driver **out, dray_error *error)
{
    dray__driver *self = calloc(1, sizeof(*self));
    if (!self)
        return dray__nomem(error);
    self->host = host;
    self->rules = dray__schedule_rules(host->job);
    self->next_eval = self->evaluating = -1;
    int rc = dray__data_open(host->job, &self->data, error);
    if (!rc)
        rc = dray__feed_open(&self->rules, host->options.folder, host->options.first_step,
                             &self->feed, error);
    if (!rc)
        rc = dray__job_queue_open(host->context, host->job, &self->queue, error);
    if (!rc)
        rc = dray__refiller_start(host, self->data, self->feed, &self->refiller, error);
    if (!rc)
        rc = dray__thread_start(&self->thread, drive_main, self, "driver", error);
    if (rc) {
        dray__refiller_join(self->refiller, true);
        driver_free(self);
        return rc;
    }
    *out = self;
    return DRAY_OK;
}

void dray__driver_join(dray__driver *self, bool now)
{
    if (!self)
        return;
    if (now)
        atomic_store(&self->abandoned, true);
    dray__thread_join(&self->thread);
    dray__refiller_join(self->refiller, now);
    driver_free(self);
}
