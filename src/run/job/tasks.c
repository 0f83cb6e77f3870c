#include "run/job/tasks.h"

#include "base/error.h"
#include "base/json.h"
#include "run/desk/advantage.h"
#include "run/job/columns.h"
#include "run/job/schedule.h"

#include <stdlib.h>
#include <string.h>

/* Samples of a step are claimed in their order and in whole micro-batches, so that the rows that
 * are computed together, and the order of sums, are the same in every run and after every restart.
 * Evaluations become ready all at once and in order, so FIFO has the same effect. */
const dray__task_kind dray__tasks[DRAY__TASK_COUNT] = {
    {.name = "driver", .program = DRAY__PROGRAM_DESK},
    /* Comes before the samples of the next version, because an evaluation is due while the engine
     * has its version. */
    {.name = "eval",
     .program = DRAY__PROGRAM_ENGINE,
     .needs = {"eval_prompt"},
     .writes = {"eval_response"},
     .policy = DRAY_POLICY_FIFO},
    {.name = "rollout",
     .program = DRAY__PROGRAM_ENGINE,
     .needs = {"prompt"},
     .writes = {"response", "rollout_log_prob", "response_version", "response_mask"},
     .policy = DRAY_POLICY_ORDERED},
    {.name = "reward",
     .program = DRAY__PROGRAM_DESK,
     .needs = {"prompt", "answer", "response"},
     .writes = {"reward", "rewards"},
     .policy = DRAY_POLICY_ORDERED},
    {.name = "reference",
     .program = DRAY__PROGRAM_DESK,
     .needs = {"prompt", "response"},
     .writes = {"ref_log_prob"},
     .policy = DRAY_POLICY_ORDERED},
    {.name = "old_log_prob",
     .program = DRAY__PROGRAM_TRAINER,
     .needs = {"prompt", "response"},
     .writes = {"old_log_prob"},
     .policy = DRAY_POLICY_ORDERED},
    {.name = "value",
     .program = DRAY__PROGRAM_CRITIC,
     .needs = {"prompt", "response"},
     .writes = {"value"},
     .policy = DRAY_POLICY_ORDERED},
    /* Advantages come last, so that no sample of a group is lost after they are computed from all
     * of its samples. */
    {.name = "advantage",
     .program = DRAY__PROGRAM_DESK,
     .needs = {"response", "response_mask", "reward", "old_log_prob", "ref_log_prob", "value"},
     .writes = {"advantage", "returns"},
     .policy = DRAY_POLICY_ORDERED},
    {.name = "actor",
     .program = DRAY__PROGRAM_TRAINER,
     .needs = {"prompt", "response", "rollout_log_prob", "response_version", "response_mask",
               "reward", "rewards", "old_log_prob", "advantage", "ref_log_prob"},
     .policy = DRAY_POLICY_ORDERED,
     .trains = true},
    {.name = "critic",
     .program = DRAY__PROGRAM_CRITIC,
     .needs = {"prompt", "response", "response_mask", "value", "returns"},
     .policy = DRAY_POLICY_ORDERED,
     .trains = true},
};

const dray__task_kind dray__task_score = {
    .name = "score",
    .program = DRAY__PROGRAM_DESK,
    .needs = {"eval_prompt", "eval_answer", "eval_response"},
    .writes = {"eval_reward"},
    .policy = DRAY_POLICY_FIFO,
};

const dray__task_kind *dray__task_find(const char *name)
{
    for (uint32_t i = 0; i < DRAY__TASK_COUNT; i++)
        if (strcmp(dray__tasks[i].name, name) == 0)
            return &dray__tasks[i];
    return strcmp(dray__task_score.name, name) == 0 ? &dray__task_score : NULL;
}

/* Returns whether the job has the column of versions. A rollout of the user's own may leave it out;
 * then the tag `version` is that of all tokens. */
static bool has_versions(const dray__job *job)
{
    bool has = true;
    for (uint32_t i = 0; i < job->role_count; i++)
        if (!job->roles[i].command[0] && dray__role_has(&job->roles[i], "rollout"))
            return true;
    for (uint32_t i = 0; i < job->task_count; i++) {
        const dray__job_task *given = &job->tasks[i];
        bool writes = false;
        for (uint32_t w = 0; w < given->write_count; w++)
            writes = writes || strcmp(given->writes[w], "response_version") == 0;
        if (writes)
            return true;
        has = has && (strcmp(given->name, "rollout") != 0 || !given->write_count);
    }
    return has;
}

typedef struct sometimes {
    const char *task, *column; /* a task and its column; task is "" for a column of no task */
    const char *setting;
    bool (*here)(const dray__job *job);
} sometimes;

static bool has_reference(const dray__job *job)
{
    return job->reference.enabled;
}

/* Returns whether old_log_prob is a task. When a step's samples are not known before they are
 * trained, the actor itself computes the log-probs at the beginning of the step. */
static bool has_old(const dray__job *job)
{
    return job->actor.old_log_prob == DRAY__OLD_TRAINER && !dray__schedule_of(job).first_complete;
}

static bool has_rewards(const dray__job *job)
{
    return job->reward_count > 0;
}

static bool has_mask(const dray__job *job)
{
    return job->tool.kind != DRAY__TOOL_NONE;
}

static bool has_values(const dray__job *job)
{
    return dray__advantages[job->advantage.method].by_token;
}

/* Returns whether advantage is a task. When a step's samples are not known before they are trained,
 * the actor itself computes the advantages of a method over all samples of a step. */
static bool has_advantages(const dray__job *job)
{
    return !dray__advantages[job->advantage.method].whole || !dray__schedule_of(job).first_complete;
}

static const sometimes some[] = {{"reference", "ref_log_prob", "reference.enabled", has_reference},
                                 {"old_log_prob", "old_log_prob", "actor.old_log_prob", has_old},
                                 {"", "response_mask", "tool.kind", has_mask},
                                 {"", "response_version", "tasks", has_versions},
                                 {"", "rewards", "rewards", has_rewards},
                                 {"advantage", "advantage", "advantage.method", has_advantages},
                                 {"value", "value", "advantage.method", has_values},
                                 {"critic", "returns", "advantage.method", has_values}};

static const sometimes *find_some(const char *name)
{
    for (size_t i = 0; i < sizeof(some) / sizeof(some[0]); i++)
        if (strcmp(some[i].task, name) == 0 || strcmp(some[i].column, name) == 0)
            return &some[i];
    return NULL;
}

bool dray__job_has(const dray__job *job, const char *name)
{
    const sometimes *found = find_some(name);
    return !found || found->here(job);
}

const char *dray__job_has_by(const char *name)
{
    const sometimes *found = find_some(name);
    return found ? found->setting : "";
}

bool dray__task_used(const dray__job *job, const dray__task_kind *kind)
{
    return dray__job_has(job, kind->name);
}

uint32_t dray__tasks_of(const dray__job *job, const dray__job_role *role,
                        const dray__task_kind **out)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < DRAY__TASK_COUNT; i++)
        if (dray__role_has(role, dray__tasks[i].name) && dray__task_has_rows(&dray__tasks[i]) &&
            dray__task_used(job, &dray__tasks[i]))
            out[count++] = &dray__tasks[i];
    if (dray__role_has(role, dray__task_score.name))
        out[count++] = &dray__task_score;
    return count;
}

int dray__job_queue_restore(dray_context *context, const dray__job *job, const char *path,
                            dray_queue **out, dray_error *error)
{
    dray__task_view views[DRAY__JOB_TASKS];
    dray_queue_task tasks[DRAY__JOB_TASKS];
    static const char *const provisional[] = {"actor", "critic"};
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    uint32_t count = dray__job_tasks(job, views);
    for (uint32_t i = 0; i < count; i++)
        if (dray__task_claims(&views[i]))
            tasks[options.task_count++] = (dray_queue_task){.name = views[i].name,
                                                            .needs = views[i].needs,
                                                            .needs_count = views[i].need_count,
                                                            .writes = views[i].writes,
                                                            .writes_count = views[i].write_count};
    options.tasks = tasks;
    options.capacity_rows = (uint64_t)job->queue.capacity_rows;
    options.capacity_bytes = (uint64_t)job->queue.capacity_bytes;
    options.max_attempts = (uint32_t)job->queue.max_attempts;
    options.timeout_ns = dray__job_wait_ns(job);
    options.backend = job->queue.backend;
    options.backend_address = job->queue.backend_address;
    options.durability = job->queue.durability;
    options.on_loss = job->queue.on_loss;
    options.provisional = provisional;
    options.provisional_count = dray__job_has(job, "critic") ? 2 : 1;
    options.restore = path;
    return dray_queue_open(context, DRAY__QUEUE_NAME, &options, out, error);
}

int dray__job_queue_open(dray_context *context, const dray__job *job, dray_queue **out,
                         dray_error *error)
{
    return dray__job_queue_restore(context, job, NULL, out, error);
}

int dray__queue_state(dray_queue *queue, json_t **out, dray_error *error)
{
    char *text = NULL;
    *out = NULL;
    int rc = dray_queue_status(queue, &text, error);
    if (!rc)
        rc = dray__json_parse(text, strlen(text), "queue status", out, error);
    free(text);
    return rc;
}

int dray__queue_version(dray_queue *queue, int64_t *version, dray_error *error)
{
    json_t *status;
    int rc = dray__queue_state(queue, &status, error);
    const json_t *reached = json_object_get(json_object_get(status, "admission"), "version");
    if (!rc && !json_is_integer(reached))
        rc = dray__fail(error, DRAY_EINTERNAL, "the queue admits samples by no version");
    if (!rc)
        *version = json_integer_value(reached);
    json_decref(status);
    return rc;
}
