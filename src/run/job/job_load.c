/* Job files: a file overrides the defaults, and the settings are checked against each other. */
#include "run/job/job.h"

#include "base/error.h"
#include "base/io.h"
#include "engine/policy.h"
#include "run/data/data.h"
#include "run/desk/advantage.h"
#include "run/job/job_roles.h"
#include "run/job/model.h"
#include "run/job/schedule.h"
#include "run/job/settings.h"
#include "run/job/tasks.h"
#include "run/report/metrics.h"

#include <dray/queue.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FILE_MAX = 1 << 20 };

/* ---- rules between settings ------------------------------------------------------------------ */

typedef int (*rule_fn)(const dray__job *job, const dray__places *at, dray_error *error);

static int rule_batch(const dray__job *job, const dray__places *at, dray_error *error)
{
    int64_t batch = dray__job_batch(job), parts = job->actor.optimiser_steps;
    if (batch > 1 << 24)
        return dray__setting_fail(at, "rollout.samples rollout.prompts", error,
                                  "prompts x samples is %lld rows a step, at most %d expected",
                                  (long long)batch, 1 << 24);
    if (batch % parts)
        return dray__setting_fail(
            at, "actor.optimiser_steps rollout.prompts rollout.samples", error,
            "expected a divisor of the batch (%lld prompts x %lld samples = %lld), found %lld",
            (long long)job->rollout.prompts, (long long)job->rollout.samples, (long long)batch,
            (long long)parts);
    int64_t part = batch / parts, micro = job->actor.micro_batch;
    if (micro < part && part % micro)
        return dray__setting_fail(
            at, "actor.micro_batch actor.optimiser_steps rollout.prompts", error,
            "expected a divisor of the %lld samples of an optimiser step, found %lld",
            (long long)part, (long long)micro);
    return DRAY_OK;
}

static int expect_file(const char *path, const char *key, const char *what, const dray__places *at,
                       dray_error *error)
{
    if (!path[0])
        return dray__setting_fail(at, key, error, "expected a file of %s for source jsonl", what);
    if (access(path, R_OK))
        return dray__setting_fail(at, key, error, "expected a file of %s, found '%s': %s", what,
                                  path, strerror(errno));
    return DRAY_OK;
}

static int rule_data(const dray__job *job, const dray__places *at, dray_error *error)
{
    bool lines = job->data.source == DRAY__SOURCE_JSONL;
    int rc = lines ? expect_file(job->data.path, "data.path data.source", "prompts", at, error)
                   : DRAY_OK;
    if (!rc && lines)
        rc = expect_file(job->data.eval_path, "data.eval_path data.source", "held-out prompts", at,
                         error);
    if (rc)
        return rc;
    int64_t answer = dray__data_longest(job).answer;
    if (answer && job->rollout.max_new_tokens < answer + 1)
        return dray__setting_fail(
            at, "rollout.max_new_tokens data.digits data.steps", error,
            "expected at least %lld (the longest answer and the end token), found %lld",
            (long long)answer + 1, (long long)job->rollout.max_new_tokens);
    return DRAY_OK;
}

static int rule_reward(const dray__job *job, const dray__places *at, dray_error *error)
{
    if (job->reward.rule == DRAY__RULE_COMMAND && !job->reward.command[0])
        return dray__setting_fail(at, "reward.command", error,
                                  "expected a command line for rule command");
    if (job->rollout.samples < (int64_t)dray__advantages[job->advantage.method].least_samples)
        return dray__setting_fail(
            at, "rollout.samples", error, "expected at least %u for advantage %s, found %lld",
            dray__advantages[job->advantage.method].least_samples,
            dray__advantages[job->advantage.method].name, (long long)job->rollout.samples);
    if (job->actor.kl > 0 && !job->reference.enabled)
        return dray__setting_fail(at, "actor.kl", error, "expected 0 without a reference, found %g",
                                  job->actor.kl);
    return DRAY_OK;
}

static int rule_tool(const dray__job *job, const dray__places *at, dray_error *error)
{
    const dray__job_tool *tool = &job->tool;
    bool command = tool->kind == DRAY__TOOL_COMMAND;
    if (command != (tool->command[0] != 0))
        return dray__setting_fail(at, "tool.command tool.kind", error,
                                  command ? "expected a command line for kind command"
                                          : "expected none but for kind command");
    if (!tool->call[0])
        return dray__setting_fail(at, "tool.call", error, "expected at least one character");
    if (tool->max_seconds < tool->min_seconds)
        return dray__setting_fail(at, "tool.max_seconds tool.min_seconds", error,
                                  "expected at least tool.min_seconds, %g, found %g",
                                  tool->min_seconds, tool->max_seconds);
    if (tool->kind != DRAY__TOOL_NONE && job->clock.enabled)
        return dray__setting_fail(at, "tool.kind", error,
                                  "expected none with clock.enabled, where responses are digits");
    return DRAY_OK;
}

static int rule_clock(const dray__job *job, const dray__places *at, dray_error *error)
{
    if (job->clock.enabled && job->warmup.max_steps)
        return dray__setting_fail(
            at, "warmup.max_steps", error,
            "expected 0 with clock.enabled, where nothing is learned, found %lld",
            (long long)job->warmup.max_steps);
    return DRAY_OK;
}

bool dray__job_name_ok(const char *name)
{
    size_t length = strlen(name);
    return length > 0 && length <= 32 &&
           strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") ==
               length;
}

/* With several rewards, the rules of `reward` hold for each. */
static int rule_rewards(const dray__job *job, const dray__places *at, dray_error *error)
{
    bool counts = job->reward_count == 0, command = job->reward.command[0] != 0;
    if (job->reward_count && (command || job->reward.rule != DRAY__RULE_EXACT_MATCH))
        return dray__setting_fail(at, command ? "reward.command" : "reward.rule", error,
                                  "expected none beside `rewards`, which names rules and commands");
    for (uint32_t i = 0; i < job->reward_count; i++) {
        const dray__job_part *part = &job->rewards[i];
        counts |= part->weight != 0;
        if (!dray__job_name_ok(part->name))
            return dray__setting_fail(
                at, "rewards", error,
                "reward name '%.64s': expected 1 to 32 letters, digits, _ or -", part->name);
        if ((part->rule == DRAY__RULE_COMMAND) != (part->command[0] != 0))
            return dray__setting_fail(at, "rewards", error, "reward %s: expected %s", part->name,
                                      part->command[0] ? "rule command for its command"
                                                       : "a command line for rule command");
        for (uint32_t j = 0; j < i; j++)
            if (strcmp(job->rewards[j].name, part->name) == 0)
                return dray__setting_fail(at, "rewards", error, "two rewards are called %s",
                                          part->name);
    }
    return counts ? DRAY_OK
                  : dray__setting_fail(at, "rewards", error,
                                       "expected a weight other than 0, found none");
}

static int rule_loss(const dray__job *job, const dray__places *at, dray_error *error)
{
    const dray__job_actor *actor = &job->actor;
    static const char same[] = "its ratio of proximal to behaviour policy is 1 everywhere";
    if (actor->old_log_prob == DRAY__OLD_ROLLOUT && actor->loss == DRAY__LOSS_DECOUPLED)
        return dray__setting_fail(at, "actor.loss", error,
                                  "expected ppo with old_log_prob rollout, found decoupled: %s",
                                  same);
    if (actor->old_log_prob == DRAY__OLD_ROLLOUT && actor->truncate > 0)
        return dray__setting_fail(at, "actor.truncate", error,
                                  "expected 0 with old_log_prob rollout, found %g: %s",
                                  actor->truncate, same);
    if (actor->dual_clip > 0 && actor->dual_clip <= 1)
        return dray__setting_fail(at, "actor.dual_clip", error,
                                  "expected 0, or more than 1, found %g", actor->dual_clip);
    if (job->advantage.divide_by_deviation && !dray__advantages[job->advantage.method].divides)
        return dray__setting_fail(at, "advantage.divide_by_deviation", error,
                                  "expected false for advantage %s, which does not look at the "
                                  "group's deviation, found true",
                                  dray__advantages[job->advantage.method].name);
    return DRAY_OK;
}

static int rule_backend(const dray__job *job, const dray__places *at, dray_error *error)
{
    bool store = job->queue.backend > DRAY_BACKEND_BUILTIN;
    bool given = job->queue.backend_address && *job->queue.backend_address;
    if (store != given)
        return dray__setting_fail(at, "queue.backend_address", error,
                                  store ? "expected unix:/path or tcp:HOST:PORT, where the store is"
                                        : "expected none for backend builtin");
    return DRAY_OK;
}

static int rule_metrics(const dray__job *job, const dray__places *at, dray_error *error)
{
    dray_error inner;
    return job->queue.metrics[0] && dray__metrics_check(job->queue.metrics, &inner)
               ? dray__setting_fail(at, "queue.metrics", error, "%s", inner.message)
               : DRAY_OK;
}

static int rule_policy(const dray__job *job, const dray__places *at, dray_error *error)
{
    bool balanced = job->queue.policy == DRAY_POLICY_TOKEN_BALANCED;
    int64_t longest = job->rollout.max_new_tokens + dray__data_longest(job).prompt + 1;
    if (job->queue.token_cap && !balanced)
        return dray__setting_fail(at, "queue.token_cap", error,
                                  "expected 0 without policy token_balanced, found %lld",
                                  (long long)job->queue.token_cap);
    if (job->queue.token_cap && job->queue.token_cap < longest)
        return dray__setting_fail(at, "queue.token_cap", error,
                                  "expected at least %lld (a sample can be that long), found %lld",
                                  (long long)longest, (long long)job->queue.token_cap);
    return DRAY_OK;
}

/* Claims are of whole groups. So the rows of a claim, and those of an optimiser step, must be whole
 * groups. */
static int rule_groups(const dray__job *job, const dray__places *at, dray_error *error)
{
    int64_t group = job->rollout.samples;
    const struct {
        const char *path;
        int64_t rows;
    } claims[] = {{"rollout.micro_batch", job->rollout.micro_batch},
                  {"reward.micro_batch", job->reward.micro_batch},
                  {"reference.micro_batch", job->reference.micro_batch},
                  {"old_log_prob.micro_batch", job->old_log_prob.micro_batch},
                  {"critic.micro_batch", dray__job_has(job, "value") ? job->critic.micro_batch : 0},
                  {"actor.micro_batch", job->actor.micro_batch},
                  {"actor.optimiser_steps", dray__job_batch(job) / job->actor.optimiser_steps}};
    for (size_t i = 0;
         job->queue.policy == DRAY_POLICY_GROUP && i < sizeof(claims) / sizeof(*claims); i++)
        if (claims[i].rows % group)
            return dray__setting_fail(
                at, claims[i].path, error,
                "policy group takes whole groups of %lld samples, and this makes it %lld at once",
                (long long)group, (long long)claims[i].rows);
    return DRAY_OK;
}

/* Returns the bytes of a sample that the driver reserves, as far as the job file determines
 * them. */
static int64_t row_bytes(const dray__job *job)
{
    dray__data_bytes most = dray__data_longest(job);
    return 4 * (most.prompt + 1) + most.answer +
           dray__job_token_bytes(job) * job->rollout.max_new_tokens + 256;
}

/* Returns how many trained batches wait for a checkpoint. The queue keeps them until then if its
 * journal would return them to a resumed run (checkpoint.h). */
static int64_t waiting(const dray__job *job)
{
    if (job->queue.durability != DRAY_DURABILITY_JOURNAL)
        return 0;
    int64_t every = job->checkpoint.every < job->steps ? job->checkpoint.every : job->steps;
    return every - 1;
}

static int rule_capacity_bytes(const dray__job *job, const dray__places *at, dray_error *error)
{
    int64_t batches = dray__schedule_steps(job) + waiting(job),
            rows = batches * dray__job_batch(job) + job->eval.prompts, each = row_bytes(job);
    if (job->queue.capacity_bytes / each < rows)
        return dray__setting_fail(
            at,
            "queue.capacity_bytes rollout.max_new_tokens rollout.prompts rollout.samples "
            "eval.prompts checkpoint.every queue.durability data.steps data.digits",
            error,
            "expected at least %lld (batches of %lld, %lld of them, of which %lld wait for a "
            "checkpoint, and an evaluation of %lld, %lld bytes a sample), found %lld",
            (long long)(rows * each), (long long)dray__job_batch(job), (long long)batches,
            (long long)waiting(job), (long long)job->eval.prompts, (long long)each,
            (long long)job->queue.capacity_bytes);
    return DRAY_OK;
}

static int rule_capacity(const dray__job *job, const dray__places *at, dray_error *error)
{
    int64_t batches = dray__schedule_steps(job) + 1,
            rows = (batches + waiting(job)) * dray__job_batch(job) + 2 * job->eval.prompts;
    if (job->queue.capacity_rows < rows)
        return dray__setting_fail(
            at,
            "queue.capacity_rows rollout.prompts rollout.samples eval.prompts checkpoint.every "
            "queue.durability",
            error,
            "expected at least %lld (%lld batches of %lld and two evaluations of %lld are open at "
            "once, %lld batches wait for a checkpoint), found %lld",
            (long long)rows, (long long)batches, (long long)dray__job_batch(job),
            (long long)job->eval.prompts, (long long)waiting(job),
            (long long)job->queue.capacity_rows);
    return DRAY_OK;
}

/* Refuses a model that the engine would refuse minutes later, and names the line. */
static int rule_model(const dray__job *job, const dray__places *at, dray_error *error)
{
    dray_error inner = {0};
    dray_model_config config;
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    dray_layout *layout = NULL;
    if (dray__job_model_config(job, NULL, &config, &inner))
        return dray__setting_fail(at, job->model.checkpoint[0] ? "model.checkpoint" : "model",
                                  error, "%s", inner.message);
    for (uint32_t i = 0; i < job->role_count; i++) {
        const dray__job_role *role = &job->roles[i];
        if (role->command[0] || dray__task_find(role->tasks[0])->program != DRAY__PROGRAM_ENGINE)
            continue;
        spec.tp = (uint32_t)role->ranks;
        int rc = dray_layout_engine(&config, &spec, &layout, &inner);
        dray_layout_free(layout);
        layout = NULL;
        if (rc) {
            char keys[128];
            snprintf(keys, sizeof(keys), "roles.%.64s.ranks model.heads model.kv_heads",
                     role->name);
            return dray__setting_fail(at, keys, error, "%s", inner.message);
        }
    }
    int64_t prompt = dray__data_longest(job).prompt,
            longest = prompt + 1 + job->rollout.max_new_tokens;
    if (prompt && config.max_positions < longest)
        return dray__setting_fail(at, "model.max_positions rollout.max_new_tokens", error,
                                  "expected at least %lld (prompt and response), found %lld",
                                  (long long)longest, (long long)config.max_positions);
    return DRAY_OK;
}

static int check_rules(const dray__job *job, const dray__places *at, dray_error *error)
{
    static const rule_fn all[] = {
        rule_batch,          rule_data,          rule_reward,         rule_tool,
        rule_clock,          rule_rewards,       rule_loss,           rule_capacity,
        rule_capacity_bytes, rule_policy,        rule_groups,         rule_backend,
        rule_metrics,        dray__rule_roles,   dray__rule_schedule, dray__rule_programs,
        dray__rule_tasks,    dray__rule_columns, rule_model};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        int rc = all[i](job, at, error);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

/* ---- loading --------------------------------------------------------------------------------- */

/* Reads the file, which overrides the defaults, and the settings, which override both. */
static int read_layers(const char *path, const char *const *settings, uint32_t setting_count,
                       dray__job *job, dray__places *places, dray_error *error)
{
    char *text = NULL;
    size_t size = 0;
    dray__node *tree = NULL;
    int rc = dray__read_stream(fopen(path, "re"), path, FILE_MAX, &text, &size, error);
    if (!rc)
        rc = dray__tree_parse(text, size, path, &tree, error);
    if (!rc)
        rc = dray__settings_read(job, tree, places, error);
    free(text);
    dray__tree_free(tree);
    for (uint32_t i = 0; i < setting_count && !rc; i++) {
        tree = NULL;
        rc = dray__tree_setting(settings[i], &tree, error);
        if (!rc)
            rc = dray__settings_read(job, tree, places, error);
        dray__tree_free(tree);
    }
    return rc;
}

/* Takes `listen` from the environment, where a scheduler puts the address of the host that it
 * chose. */
static int settle_listen(dray__job *job, dray_error *error)
{
    const char *given = getenv("DRAY_LISTEN");
    char *copy = given && given[0] ? strdup(given) : NULL;
    if (given && given[0] && !copy)
        return dray__nomem(error);
    if (copy) {
        free(job->listen);
        job->listen = copy;
    }
    return DRAY_OK;
}

/* Settings of the value model that are not given are those of the policy. */
static void settle_critic(dray__job *job, const dray__places *at)
{
    if (!dray__setting_given(at, "critic.lr"))
        job->critic.lr = job->actor.lr;
    if (!dray__setting_given(at, "critic.epochs"))
        job->critic.epochs = job->actor.epochs;
}

int dray__job_load(const char *path, const char *const *settings, uint32_t setting_count,
                   dray__job **out, char **resolved, dray_error *error)
{
    dray__job *job = NULL;
    dray__places *places = NULL;
    int rc = dray__places_open(path, &places, error);
    if (!rc)
        rc = dray__settings_default(&job, error);
    if (!rc)
        rc = read_layers(path, settings, setting_count, job, places, error);
    if (!rc)
        rc = settle_listen(job, error);
    if (!rc)
        settle_critic(job, places);
    /* The default is the family's: of those that the engine computes, Qwen2 alone has biases. */
    if (!rc && !dray__setting_given(places, "model.qkv_bias"))
        job->model.qkv_bias = strcmp(job->model.family, "qwen2") == 0;
    if (!rc)
        dray__schedule_settle(job, places);
    if (!rc)
        rc = dray__roles_settle(job, places, error);
    if (!rc)
        rc = check_rules(job, places, error);
    if (!rc && resolved) /* a run is about to start here */
        rc = dray__rule_there(job, places, error);
    if (!rc && resolved)
        rc = dray__settings_yaml(job, resolved, error);
    dray__places_close(places);
    if (rc)
        dray__settings_free(job);
    else
        *out = job;
    return rc;
}

void dray__job_free(dray__job *job)
{
    dray__settings_free(job);
}
