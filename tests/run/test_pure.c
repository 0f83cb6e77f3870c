/* Tests the parts of a run that compute and decide without other processes: advantages, rewards,
 * prompts, learning rates, partitions' names, and the layers of a job file. */
#include "run/data/data.h"
#include "run/desk/advantage.h"
#include "run/desk/reward.h"
#include "run/job/contract.h"
#include "run/job/job.h"
#include "run/job/tasks.h"
#include "run/job/tree.h"
#include "run/trainer/learn.h"
#include "suite.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void near(double value, double expected, double within)
{
    if (!(value >= expected - within && value <= expected + within))
        fail_msg("%.9g, expected %.9g", value, expected);
}

/* A job file of these lines; settings NULL-terminated. */
static int load(const char *text, const char *const *settings, dray__job **job, char **resolved,
                dray_error *error)
{
    char path[] = "/tmp/dray-job-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
    uint32_t count = 0;
    while (settings && settings[count])
        count++;
    int rc = dray__job_load(path, settings, count, job, resolved, error);
    unlink(path);
    return rc;
}

static dray__job *loaded(const char *text, const char *const *settings)
{
    dray__job *job = NULL;
    dray_error error = {0};
    if (load(text, settings, &job, NULL, &error))
        fail_msg("%s", error.message);
    return job;
}

/* Against PyTorch: test_advantages.py. */
TEST(advantages)
{
    const float rewards[] = {1, 0, 0, 1, 1, 1, 1, 1};
    const uint64_t offsets[] = {0, 1, 3, 4, 5, 6, 7, 8, 9}; /* one response of two tokens */
    const bool excluded[] = {true, false, false, false, false, false, false, true};
    dray__rewarded in = {.rows = 8, .group = 4, .rewards = rewards, .offsets = offsets};
    float out[8];
    dray__advantages[DRAY__ADVANTAGE_GRPO].compute(&in, out, NULL);
    near((double)out[0], 0.5, 1e-7);
    near((double)out[1], -0.5, 1e-7);
    in.divide = true;
    dray__advantages[DRAY__ADVANTAGE_GRPO].compute(&in, out, NULL);
    near((double)out[0], 1, 1e-5);
    for (int i = 4; i < 8; i++)
        near((double)out[i], 0, 0); /* all equal: nothing to learn, and no division by zero */
    in.divide = false;
    in.excluded = excluded;
    dray__advantages[DRAY__ADVANTAGE_RLOO].compute(&in, out, NULL);
    near((double)out[0], 0, 0);
    near((double)out[1], -0.5, 1e-6);
    near((double)out[3], 1, 1e-6);
    in.excluded = NULL;
    dray__advantages[DRAY__ADVANTAGE_REINFORCE].compute(&in, out, NULL);
    near((double)out[0], (1 - 6 / 9.) / sqrt(6 / 9. * 3 / 9.), 1e-6);
    near((double)out[1], (0 - 6 / 9.) / sqrt(6 / 9. * 3 / 9.), 1e-6);
}

TEST(exact_match)
{
    assert_true(dray__exact_match("4321", "4321") == 1);
    assert_true(dray__exact_match("4321", "43210") == 0);
    assert_true(dray__exact_match("4321", "432") == 0);
    assert_true(dray__exact_match("", "") == 1);
}

TEST(reversed_prompts)
{
    const char *const settings[] = {"data.digits=3", "seed=7", NULL};
    dray__job *job = loaded("name: x", settings);
    dray__data *data;
    assert_int_equal(dray__data_open(job, &data, NULL), 0);
    bool held[1000] = {false};
    for (uint64_t i = 0; i < 2000; i++) {
        for (int split = DRAY__SPLIT_TRAIN; split <= DRAY__SPLIT_EVAL; split++) {
            char *prompt, *answer;
            assert_int_equal(dray__data_get(data, (dray__split)split, i, &prompt, &answer, NULL),
                             0);
            assert_true(strlen(prompt) == 4 && prompt[3] == '=' && strlen(answer) == 3);
            for (int d = 0; d < 3; d++)
                assert_true(prompt[d] == answer[2 - d]);
            if (split == DRAY__SPLIT_EVAL)
                held[atoi(prompt)] = true;
            free(prompt);
            free(answer);
        }
    }
    int count = 0;
    for (int i = 0; i < 1000; i++)
        count += held[i];
    assert_in_range(count, 80, 180); /* one in eight */
    for (uint64_t i = 0; i < 2000; i++) {
        char *prompt, *answer;
        assert_int_equal(dray__data_get(data, i % 2 ? DRAY__SPLIT_TRAIN : DRAY__SPLIT_WARMUP, i,
                                        &prompt, &answer, NULL),
                         0);
        assert_false(held[atoi(prompt)]);
        free(prompt);
        free(answer);
    }
    dray__data_close(data);
    dray__job_free(job);
}

/* What the answer of a chain must be, counted anew; its bytes with the end token. */
static size_t check_chain(const char *prompt, const char *answer)
{
    char expected[256] = "", *at = expected, *rest;
    long result = strtol(prompt, &rest, 10);
    for (int step = 0; *rest != '='; step++) {
        assert_true(*rest == '+' || *rest == '-');
        long digit = strtol(rest, &rest, 10);
        assert_in_range(labs(digit), 1, 9);
        result += digit;
        assert_in_range(result, 0, 99);
        at += sprintf(at, "%s%ld", step ? " " : "", result);
    }
    assert_string_equal(rest, "=");
    assert_string_equal(answer, expected);
    return strlen(answer) + 1;
}

TEST(arithmetic_prompts)
{
    const char *const settings[] = {"data.source=arithmetic", "rollout.max_new_tokens=60",
                                    "model.max_positions=128", "seed=7", NULL};
    const char *const other[] = {"data.source=arithmetic", "rollout.max_new_tokens=60",
                                 "model.max_positions=128", "seed=8", NULL};
    dray__job *job = loaded("name: x", settings), *job2 = loaded("name: x", other);
    dray__data *data, *data2;
    enum { DRAWN = 4000 };
    size_t longest = 0, shortest = 99, sum = 0, bytes = 0;
    char *seen[DRAWN], *again, *answer;
    assert_int_equal(dray__data_open(job, &data, NULL), 0);
    assert_int_equal(dray__data_open(job2, &data2, NULL), 0);
    for (uint64_t i = 0; i < DRAWN; i++) { /* every other one is held out */
        dray__split split = i % 2 ? DRAY__SPLIT_TRAIN : DRAY__SPLIT_EVAL;
        assert_int_equal(dray__data_get(data, split, i, &seen[i], &answer, NULL), 0);
        size_t length = check_chain(seen[i], answer);
        longest = length > longest ? length : longest;
        shortest = length < shortest ? length : shortest;
        sum += length;
        bytes = strlen(seen[i]) > bytes ? strlen(seen[i]) : bytes;
        free(answer);
        assert_int_equal(dray__data_get(data2, split, i, &again, &answer, NULL), 0);
        if (split == DRAY__SPLIT_EVAL) /* the same for all seeds */
            assert_string_equal(seen[i], again);
        free(again);
        free(answer);
    }
    assert_int_equal(shortest, 2);
    assert_in_range(longest, 50, 60);
    assert_in_range(sum / DRAWN, 10, 20);
    dray__data_bytes most = dray__data_longest(job);
    assert_true((int64_t)bytes <= most.prompt && (int64_t)longest <= most.answer + 1);
    for (int a = 0; a < DRAWN; a += 2)
        for (int b = 1; b < DRAWN; b += 2)
            if (strcmp(seen[a], seen[b]) == 0)
                fail_msg("%s is held out, and trained", seen[a]);
    for (int i = 0; i < DRAWN; i++)
        free(seen[i]);
    dray__data_close(data);
    dray__data_close(data2);
    dray__job_free(job);
    dray__job_free(job2);
}

TEST(lines_of_a_file)
{
    char path[] = "/tmp/dray-data-XXXXXX", set[128], held[128];
    int fd = mkstemp(path);
    FILE *file = fdopen(fd, "w");
    for (int i = 0; i < 37; i++)
        fprintf(file, "{\"prompt\": \"p%d\", \"answer\": \"a%d\"}\n%s", i, i, i % 5 ? "" : "\n");
    fclose(file);
    snprintf(set, sizeof(set), "data.path=%s", path);
    snprintf(held, sizeof(held), "data.eval_path=%s", path);
    const char *const settings[] = {"data.source=jsonl", set, held, NULL};
    dray__job *job = loaded("name: x", settings);
    dray__data *data;
    assert_int_equal(dray__data_open(job, &data, NULL), 0);
    for (uint64_t i = 0; i < 2 * 37; i++) { /* held-out lines come in their order, and again */
        char *prompt, *answer;
        assert_int_equal(dray__data_get(data, DRAY__SPLIT_EVAL, i, &prompt, &answer, NULL), 0);
        assert_int_equal(atoi(prompt + 1), i % 37);
        free(prompt);
        free(answer);
    }
    for (uint64_t round = 0; round < 3; round++) { /* each round holds every line once */
        bool seen[37] = {false};
        for (uint64_t i = 0; i < 37; i++) {
            char *prompt, *answer;
            assert_int_equal(
                dray__data_get(data, DRAY__SPLIT_TRAIN, 37 * round + i, &prompt, &answer, NULL), 0);
            assert_string_equal(prompt + 1, answer + 1);
            assert_false(seen[atoi(prompt + 1)]);
            seen[atoi(prompt + 1)] = true;
            free(prompt);
            free(answer);
        }
    }
    dray__data_close(data);
    file = fopen(path, "a");
    fprintf(file, "{\"prompt\": \"p\"}\n");
    fclose(file);
    dray_error error;
    assert_int_equal(dray__data_open(job, &data, &error), DRAY_EFORMAT);
    assert_non_null(strstr(error.message, ":46: expected"));
    unlink(path);
    dray__job_free(job);
}

TEST(learning_rates)
{
    const char *const settings[] = {"steps=100",
                                    "actor.lr=1e-3",
                                    "actor.warmup_steps=10",
                                    "actor.optimiser_steps=4",
                                    "actor.final_lr=0.1",
                                    NULL};
    dray__job *job = loaded("name: x", settings);
    near(dray__learning_rate(job, &dray__learned_policy, 1, 0), 1e-3 * 0.025, 1e-9);
    near(dray__learning_rate(job, &dray__learned_policy, 11, 0), 1e-3 * (1 - 0.9 * 0.1), 1e-9);
    near(dray__learning_rate(job, &dray__learned_policy, 100, 3), 1e-3 * (1 - 0.9 * 0.9975), 1e-9);
    for (int64_t step = 12; step < 100; step++)
        assert_true(dray__learning_rate(job, &dray__learned_policy, step, 1) <
                    dray__learning_rate(job, &dray__learned_policy, step, 0));
    dray__job_free(job);
}

TEST(partitions)
{
    char name[DRAY__PARTITION_BYTES];
    dray__partition_name("step", 12, name);
    assert_string_equal(name, "step-000012");
    assert_int_equal(dray__partition_step("step", name), 12);
    assert_int_equal(dray__partition_step("eval", name), -1);
    assert_int_equal(dray__partition_step("step", "step-"), -1);
    assert_int_equal(dray__partition_step("step", "step-1x"), -1);
    dray__partition_name("eval", 12345678, name);
    assert_int_equal(dray__partition_step("eval", name), 12345678);
}

/* What a layered job resolves to is a job that resolves to itself. */
TEST(layers)
{
    const char text[] = "name: \"a: \\\"b\\\"\\n#c\"\nsteps: 7\nactor: {lr: 0.5}\n";
    const char *const settings[] = {"actor.clip=0.3", "roles.engine.ranks=4", "seed=3",
                                    "reward.command=a 'b' # c", NULL};
    dray__job *job, *again;
    char *resolved, *twice;
    dray_error error;
    if (load(text, settings, &job, &resolved, &error))
        fail_msg("%s", error.message);
    assert_string_equal(job->name, "a: \"b\"\n#c");
    assert_int_equal(job->steps, 7);
    near(job->actor.lr, 0.5, 0);
    near(job->actor.clip, 0.3, 0);
    near(job->actor.beta1, 0.9, 0);
    assert_int_equal(job->role_count, 3);
    assert_int_equal(dray__job_role_of(job, "rollout")->ranks, 4);
    assert_int_equal(dray__job_role_of(job, "actor")->ranks, 2);
    if (load(resolved, NULL, &again, &twice, &error))
        fail_msg("%s", error.message);
    assert_string_equal(resolved, twice);
    assert_string_equal(job->name, again->name);
    free(resolved);
    free(twice);
    dray__job_free(job);
    dray__job_free(again);
}

/* Characters that YAML reads as they are, and those that it does not. */
TEST(characters)
{
    static const char text[] =
        "name: \"\\x01\\x1f\\x7f\\x80\\x85\\x9f\\xa0\\u2027\\u2028\\u2029\\u202a"
        "\\ufefe\\ufeff\\ufffd\\ufffe\\uffff\\U00010000\\U0010ffff\"\n";
    dray__job *job, *again;
    char *resolved;
    dray_error error;
    if (load(text, NULL, &job, &resolved, &error) || load(resolved, NULL, &again, NULL, &error))
        fail_msg("%s", error.message);
    assert_string_equal(job->name, again->name);
    assert_int_equal(strlen(job->name), 3 + 4 * 2 + 9 * 3 + 2 * 4);
    free(resolved);
    dray__job_free(job);
    dray__job_free(again);
}

#define BUILT_IN                                                                                   \
    "[{name: e, tasks: [rollout, eval]}, {name: t, tasks: [old_log_prob, actor]}, "                \
    "{name: d, tasks: [driver, reward, reference, advantage]}"

/* What was given for the entries of a list is not given for those of a list that replaces it. */
TEST(replaced_lists)
{
    static const char text[] =
        "roles: [{name: e, tasks: [rollout, eval]}, {name: t, tasks: [old_log_prob, actor], "
        "on_death: end}, {name: d, tasks: [driver, reward, reference, advantage]}]\n";
    const char *const settings[] = {"roles=" BUILT_IN "]", NULL};
    dray__job *job = loaded(text, settings);
    assert_int_equal(dray__job_role_of(job, "actor")->on_death, DRAY__ON_DEATH_END);
    assert_int_equal(dray__job_role_of(job, "rollout")->on_death, DRAY__ON_DEATH_RESTART);
    dray__job_free(job);
}

/* The jobs that people begin with are accepted as they stand. */
TEST(examples)
{
    static const char *const names[] = {"reverse", "arithmetic", "tool"};
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        char path[512];
        dray__job *job;
        dray_error error;
        snprintf(path, sizeof(path), "%s/examples/%s.yaml", getenv("DRAY_SOURCE_DIR"), names[i]);
        if (dray__job_load(path, NULL, 0, &job, NULL, &error))
            fail_msg("%s", error.message);
        assert_string_equal(job->name, names[i]);
        dray__job_free(job);
    }
}

typedef struct refusal {
    const char *text, *setting, *message;
} refusal;

TEST(refusals)
{
    static const refusal all[] = {
        {"name: x\nactor:\n  lrr: 1\n", NULL, ":3:3: actor: unknown key 'lrr'; did you mean 'lr'?"},
        {"nam: x\n", NULL, ":1:1: job: unknown key 'nam'; did you mean 'name'?"},
        {"steps: many\n", NULL, ":1:1: steps: expected a whole number, found 'many'"},
        {"steps: 3.5\n", NULL, ":1:1: steps: expected a whole number, found '3.5'"},
        {"steps: 010\n", NULL, ":1:1: steps: expected a whole number, found '010'"},
        {"steps: +010\n", NULL, ":1:1: steps: expected a whole number, found '+010'"},
        {"steps: \" 010\"\n", NULL, ":1:1: steps: expected a whole number, found ' 010'"},
        {"warmup: {reward: 1e-400}\n", NULL, "warmup.reward: expected a number, found '1e-400'"},
        {"actor: {clip: 1.5}\n", NULL, "actor.clip: expected more than 0 and at most 1, found 1.5"},
        {"steps: 0\n", NULL, ":1:1: steps: expected from 1 to 1000000, found 0"},
        {"steps: 99999999999999999999\n", NULL, "expected a whole number"},
        {"\n\nactor: {lr: nan}\n", NULL, ":3:9: actor.lr: expected a number, found 'nan'"},
        {"actor: {lr: 0}\n", NULL, "actor.lr: expected more than 0 and at most 1, found 0"},
        {"actor: 3\n", NULL, ":1:1: actor: expected a section, found a value"},
        {"steps: [1]\n", NULL, ":1:1: steps: expected a value, found a list"},
        {"[1, 2]\n", NULL, ":1:1: job: expected a section, found a list"},
        {"name: x\nname: y\n", NULL, ":2:1: 'name' is there twice"},
        {"name: [x\n", NULL, ":2:1: "},
        {"name: x\n---\nname: y\n", NULL, "one document expected"},
        {"a: &a [*a]\n", NULL, "too big"},
        {"model: {tied: maybe}\n", NULL, "expected true or false, found 'maybe'"},
        {"schedule: asink\n", NULL,
         "schedule: expected one of sync, one_step_async, rolling, async, found 'asink'"},
        {"advantage: {method: gae}\n", NULL,
         ":1:13: roles: task value, as it is in this job by advantage.method: expected in a role, "
         "found in 0"},
        {"name: x\nactor: {loss: decouple}\n", NULL,
         ":2:9: actor.loss: expected one of ppo, decoupled, found 'decouple'; did you mean "
         "'decoupled'?"},
        {"name: x\nactor: {loss: decoupled, old_log_prob: rollout}\n", NULL,
         ":2:9: actor.loss: expected ppo with old_log_prob rollout, found decoupled: its ratio of "
         "proximal to behaviour policy is 1 everywhere"},
        {"actor:\n  truncate: 2\n  old_log_prob: rollout\n", NULL,
         ":2:3: actor.truncate: expected 0 with old_log_prob rollout, found 2: its ratio"},
        {"actor: {old_log_prob: engine}\n", NULL,
         "actor.old_log_prob: expected one of trainer, rollout, found 'engine'"},
        {"rollout: {temperature: 1e-40}\n", NULL,
         "rollout.temperature: expected from 1e-06 to 100, found 1e-40"},
        {"actor: {truncate: -1}\n", NULL, "actor.truncate: expected from 0 to 1000000, found -1"},
        {"actor: {clip_high: 101}\n", NULL, "actor.clip_high: expected from 0 to 100, found 101"},
        {"actor: {dual_clip: 1}\n", NULL,
         ":1:9: actor.dual_clip: expected 0, or more than 1, found 1"},
        {"actor: {entropy: -0.1}\n", NULL, "actor.entropy: expected from 0 to 100, found -0.1"},
        {"actor: {aggregate: tokens}\n", NULL,
         "actor.aggregate: expected one of token, sample, length, found 'tokens'; did you mean "
         "'token'?"},
        {"actor: {overlong: drop}\n", NULL,
         "actor.overlong: expected one of train, mask, exclude, found 'drop'"},
        {"advantage: {method: reinforce++, divide_by_deviation: true}\n", NULL,
         ":1:34: advantage.divide_by_deviation: expected false for advantage reinforce++"},
        {"rewards: [{name: a}, {name: a}]\n", NULL, ":1:1: rewards: two rewards are called a"},
        {"rewards: [{name: a b}]\n", NULL, "rewards: reward name 'a b': expected 1 to 32 letters"},
        {"rewards: [{rule: exact_match}]\n", NULL, "rewards: key 'name' is missing"},
        {"rewards: [{name: a, rule: command}]\n", NULL,
         "rewards: reward a: expected a command line for rule command"},
        {"rewards: [{name: a, command: cat}]\n", NULL,
         "rewards: reward a: expected rule command for its command"},
        {"rewards: [{name: a, weight: 0}]\n", NULL,
         "rewards: expected a weight other than 0, found none"},
        {"rewards: [{name: a}]\nreward: {command: cat}\n", NULL,
         ":2:10: reward.command: expected none beside `rewards`"},
        {"actor: {optimiser_steps: 3}\n", NULL,
         ":1:9: actor.optimiser_steps: expected a divisor of the batch (32 prompts x 8 samples = "
         "256), found 3"},
        {"actor: {micro_batch: 48}\n", NULL, "expected a divisor of the 64 samples"},
        {"data: {source: jsonl}\n", NULL, "/tmp/dray-job"},
        {"data: {source: jsonl}\n", NULL, ": data.path: expected a file"},
        {"name: x\n", "data.source=jsonl", "--set: data.path: expected a file"},
        {"name: x\n", "actor.lr=1: 2: 3", "--set:1:5: mapping values are not allowed"},
        {"name: x\n", "queue.metrics=nope",
         "--set: queue.metrics: metrics address 'nope': PORT, or a numeric HOST:PORT expected"},
        {"rollout: {max_new_tokens: 3}\n", NULL,
         "expected at least 5 (the longest answer and the end token)"},
        {"reward: {rule: command}\n", NULL, "reward.command: expected a command line"},
        {"tool: {kind: command}\n", NULL, "tool.command: expected a command line for kind command"},
        {"tool: {kind: calculator, command: cat}\n", NULL,
         ":1:26: tool.command: expected none but for kind command"},
        {"tool: {kind: calculator, call: ''}\n", NULL,
         "tool.call: expected at least one character"},
        {"tool: {kind: calculator, min_seconds: 0.4, max_seconds: 0.1}\n", NULL,
         ":1:44: tool.max_seconds: expected at least tool.min_seconds, 0.4, found 0.1"},
        {"tool: {kind: calculator}\nwarmup: {max_steps: 0}\nclock: {enabled: true}\n", NULL,
         ":1:8: tool.kind: expected none with clock.enabled"},
        {"reference: {enabled: false}\nactor: {kl: 0.1}\n", NULL,
         ":2:9: actor.kl: expected 0 without a reference, found 0.1"},
        {"queue: {capacity_rows: 100}\n", NULL,
         "queue.capacity_rows: expected at least 2560 (2 "
         "batches of 256 and two evaluations of 1024 are open at once, 0 batches wait for a "
         "checkpoint), found 100"},
        {"model: {hidden_size: 63}\n", NULL,
         ":1:1: model: hidden_size: expected a multiple of 4 heads, found 63"},
        {"model: {family: gpt2}\n", NULL, ":1:1: model: the engine does not compute family 'gpt2'"},
        {"name: x\nmodel:\n  checkpoint: /nowhere\n", NULL,
         ":3:3: model.checkpoint: '/nowhere' is"},
        {"model: {max_positions: 13}\n", NULL, "model.max_positions: expected at least 14"},
        {"name: x\n", "roles.engine.ranks=3", "--set: roles.engine.ranks: "},
        {"name: x\nhosts: [{name: a, tasks: [driver], ranks: 1}]\n", NULL,
         ":2:1: hosts: expected 'roles:' in its place, found 'hosts'"},
        {"name: x\n", "hosts.engine.ranks=1",
         "--set: hosts: expected 'roles' in its place, found 'hosts'"},
        {"roles: []\n", NULL, "roles: expected 1 to 16 entries, found 0"},
        {"roles: [{name: a, tasks: [rolout], ranks: 1}]\n", NULL,
         ":1:19: roles.a.tasks: unknown task 'rolout'; did you mean 'rollout'?"},
        {"roles: [{name: a, tasks: [rollout, actor], ranks: 1}]\n", NULL,
         ":1:19: roles.a.tasks: no built-in program runs both rollout and actor"},
        {"roles: [{name: a, tasks: [driver], ranks: 2}]\n", NULL, "driver takes 1 rank, found 2"},
        {"roles: [{name: a, tasks: [rollout, eval], ranks: 1}]\n", NULL,
         "task driver: expected in a role, found in 0"},
        {"roles: [{name: a/b, tasks: [rollout], ranks: 1}]\n", NULL, "role name 'a/b'"},
        {"roles: [{tasks: [rollout]}]\n", NULL, ":1:9: roles: key 'name' is missing"},
        {"roles: [{name: a}]\n", NULL, ":1:9: roles.a.command: expected a command: a role without"},
        {"roles: [{name: a, tasks: [actor], instances: 2}]\n", NULL,
         ":1:35: roles.a.instances: the built-in actor is there once, found 2 instances"},
        {"roles: [{name: a, tasks: [actor]}, {name: b, tasks: [old_log_prob]}]\n", NULL,
         "roles.b.tasks: task old_log_prob: expected in role a, beside the other tasks of its "
         "model"},
        {"roles: [{name: a, tasks: [driver]}, {name: b, tasks: [driver]}]\n", NULL,
         "roles.b.tasks: the built-in driver is there once, found in role a, too"},
        {"roles: [{name: a, tasks: [rollout, rollout]}]\n", NULL, "task rollout is there twice"},
        {"roles: [{name: a, tasks: [driver], devices: gpu0}]\n", NULL,
         ":1:36: roles.a.devices: expected cpu:N or cuda:N, where N is a number, a range (0-1)"},
        {"roles: [{name: a, tasks: [driver], devices: 'cpu:0-1,1'}]\n", NULL,
         "a list (0,2) of at most 64, none twice, found 'cpu:0-1,1'"},
        {"name: x\n", "roles.engine.devices=cpu:1023",
         "--set: roles.engine.devices: no core 1023 is there: this machine has "},
        {"name: x\n", "roles.engine.devices=cuda:3",
         "roles.engine.devices: no GPU 3 is there: this "},
        {"roles: [{name: a, tasks: [driver], ready: 'https://x'}]\n", NULL,
         "roles.a.ready: expected a file, or http://HOST:PORT/PATH with a numeric host"},
        {"roles: [{name: a, tasks: [driver], env: [X]}]\n", NULL,
         "roles.a.env: expected NAME=VALUE, found 'X'"},
        {"roles: [{name: a, tasks: [driver], env: [RANK=1]}]\n", NULL, "'RANK' is set by dray run"},
        {"name: x\n", "roles.engine.after=[dsk]",
         "roles.engine.after: unknown role 'dsk'; did you "},
        {"name: x\n", "roles.engine.after=[engine]",
         "roles.engine.after: the role waits for itself"},
        {"name: x\n", "roles.engine.command=nosuchprogram -x",
         "--set: roles.engine.command: no program 'nosuchprogram' is there"},
        {"name: x\n", "roles.engine.cwd=/nowhere",
         "roles.engine.cwd: no folder '/nowhere' is there"},
        {"tasks: [{name: judge, needs: [response], writes: [judged]}]\n", NULL,
         "roles: task judge: expected in a role, found in 0"},
        {"tasks: [{name: judge}]\n", NULL,
         ":1:9: tasks.judge: expected columns that the task needs"},
        {"tasks: [{name: judge, needs: [respons]}]\nroles: " BUILT_IN
         ", {name: j, tasks: [judge], command: cat}]\n",
         NULL,
         ":1:23: tasks.judge.needs: column respons is written by no task; did you mean 'resp"},
        {"tasks: [{name: judge, needs: [response], writes: [reward]}]\nroles: " BUILT_IN
         ", {name: j, tasks: [judge], command: cat}]\n",
         NULL, ":1:42: tasks.judge.writes: column reward is written by reward and judge"},
        {"tasks: [{name: judge, needs: [response]}]\nroles: " BUILT_IN
         ", {name: j, tasks: [judge]}]\n",
         NULL, "roles.j.command: expected a command: task judge has no built-in program"},
        {"name: x\n", "actor.lr", "--set actor.lr: expected KEY=VALUE"},
        {"name: x\n", "actor..lr=1", "a part of the key is empty"},
        {"name: x\n", "actr.lr=1", "--set: job: unknown key 'actr'; did you mean 'actor'?"},
        {"name: x\n", "roles.enginee.ranks=1",
         "--set: roles: expected a list, or the name of an entry, found 'enginee'; did you mean "
         "'engine'?"},
        {"name: x\n", "steps=", "--set: steps: expected a whole number, found ''"},
    };
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        const char *const settings[] = {all[i].setting, NULL};
        dray__job *job = NULL;
        char *resolved = NULL;
        dray_error error = {0};
        if (!load(all[i].text, settings, &job, &resolved, &error))
            fail_msg("accepted: %s%s", all[i].text, all[i].setting ? all[i].setting : "");
        if (!strstr(error.message, all[i].message))
            fail_msg("%s", error.message);
        assert_null(resolved);
    }
}

/* A role's command is looked for where its shell looks for it. */
TEST(path_of_a_role)
{
    char folder[] = "/tmp/dray-tools-XXXXXX", tool[64], text[512], *resolved = NULL;
    dray__job *job = NULL;
    dray_error error = {0};
    assert_non_null(mkdtemp(folder));
    snprintf(tool, sizeof tool, "%s/a-tool-of-its-own", folder);
    FILE *file = fopen(tool, "w");
    assert_non_null(file);
    fclose(file);
    assert_int_equal(chmod(tool, 0755), 0);
    snprintf(text, sizeof text,
             "roles: " BUILT_IN ", {name: s, command: a-tool-of-its-own, env: ['PATH=%s']}]\n",
             folder);
    if (load(text, NULL, &job, &resolved, &error))
        fail_msg("%s", error.message);
    dray__job_free(job);
    free(resolved);
    unlink(tool);
    assert_int_equal(load(text, NULL, &job, &resolved, &error), DRAY_EINVALID);
    assert_non_null(strstr(error.message, "no program 'a-tool-of-its-own' is there"));
    rmdir(folder);
}

/* What a command says must be a number, all of the line, and a finite one; the next line counts,
 * and another line, which nobody asked for, is refused before the next question. */
/* Expects this $CUDA_VISIBLE_DEVICES, and no other, of the second of two instances with `devices`.
 * `own` is this process's, and `env` the role's. */
static void expect_gpus(const char *own, const char *devices, const char *env, const char *expected)
{
    char name[] = "engine", here[64], variable[64];
    char *list[] = {variable};
    snprintf(here, sizeof here, "%s", devices);
    snprintf(variable, sizeof variable, "%s", env ? env : "OTHER=1");
    const dray__job_role role = {
        .name = name, .devices = here, .ranks = 1, .instances = 2, .env = list, .env_count = 1};
    const dray__orders orders = {.role = &role,
                                 .job = "job",
                                 .folder = "/run",
                                 .config = "/run/config.json",
                                 .address = "unix:/run/socket",
                                 .leases = "",
                                 .instance = 1,
                                 .epoch = 1,
                                 .group_fd = -1};
    if (own)
        setenv("CUDA_VISIBLE_DEVICES", own, 1);
    char **environment = dray__contract_write(&orders);
    unsetenv("CUDA_VISIBLE_DEVICES");
    assert_non_null(environment);
    const char *found = NULL;
    for (char **at = environment; *at; at++) {
        if (strncmp(*at, "CUDA_VISIBLE_DEVICES=", 21) != 0)
            continue;
        if (found)
            fail_msg("two of them: %s, %s", found, *at + 21);
        found = *at + 21;
    }
    assert_string_equal(found ? found : "none", expected);
    dray__environment_free(environment);
}

TEST(gpus_of_a_role_are_among_those_of_the_run)
{
    unsetenv("CUDA_VISIBLE_DEVICES");
    expect_gpus(NULL, "cuda:0-3", NULL, "2,3");
    expect_gpus("4,5,6,7", "cuda:0-3", NULL, "6,7");
    expect_gpus("4,GPU-2b,6", "cuda:0,1", NULL, "GPU-2b");
    expect_gpus("4,5,6,7", "cpu:0", NULL, "4,5,6,7");
    expect_gpus("4,5,6,7", "", NULL, "4,5,6,7");
    expect_gpus("4,5,6,7", "cuda:0-3", "CUDA_VISIBLE_DEVICES=1", "1");
}

TEST(rewards_of_a_command)
{
    static const struct {
        const char *said;
        int code;
        double value;
    } lines[] = {{"1.5 \t", DRAY_OK, 1.5},         {"2 of 3", DRAY_EFORMAT, 0},
                 {"1e3", DRAY_OK, 1000},           {"inf", DRAY_EFORMAT, 0},
                 {"-Infinity", DRAY_EFORMAT, 0},   {"1e99", DRAY_EFORMAT, 0},
                 {"nan", DRAY_EFORMAT, 0},         {"", DRAY_EFORMAT, 0},
                 {"0x10 points", DRAY_EFORMAT, 0}, {"-0.25", DRAY_OK, -0.25}};
    char command[512] = "for line in";
    dray__job job = {.reward = {DRAY__RULE_COMMAND, command, 20, 1}};
    dray__grader *grader;
    dray_error error;
    float reward;
    (void)state;
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        strcat(command, " '");
        strcat(strcat(command, lines[i].said), "'");
    }
    strcat(command,
           "; do read -r question; echo \"$line\"; done; read -r question; printf '1\\n2\\n'; "
           "cat >/dev/null");
    assert_int_equal(dray__grader_open(&job.reward, &grader, &error), DRAY_OK);
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        int rc = dray__grade(grader, "p", "a", "r", &reward, &error);
        if (rc != lines[i].code)
            fail_msg("'%s': %s", lines[i].said, rc ? error.message : "taken for a number");
        if (!rc)
            near((double)reward, lines[i].value, 1e-6);
        else
            assert_non_null(strstr(error.message, lines[i].said));
    }
    assert_int_equal(dray__grade(grader, "p", "a", "r", &reward, &error), DRAY_OK);
    assert_int_equal(dray__grade(grader, "p", "a", "r", &reward, &error), DRAY_EFORMAT);
    assert_non_null(strstr(error.message, "found another: '2'"));
    dray__grader_close(grader);
}

/* Bytes that are no text reach a command as U+FFFD, in the prompt and the answer as in the
 * response. */
TEST(questions_of_any_bytes)
{
    char command[] = "read -r question; case $question in "
                     "*p\xef\xbf\xbd*a\xef\xbf\xbd*r\xef\xbf\xbd*) echo 1;; *) echo 0;; esac";
    dray__job job = {.reward = {DRAY__RULE_COMMAND, command, 20, 1}};
    dray__grader *grader;
    dray_error error;
    float reward = 0;
    (void)state;
    assert_int_equal(dray__grader_open(&job.reward, &grader, &error), DRAY_OK);
    if (dray__grade(grader, "p\xc8", "a\xff", "r\x80", &reward, &error))
        fail_msg("%s", error.message);
    near((double)reward, 1, 0);
    dray__grader_close(grader);
}

/* A grader starts its command through "dray host --parent=... --exec COMMAND", which this is. */
int main(int argc, char **argv)
{
    if (argc == 5 && strcmp(argv[3], "--exec") == 0)
        return execl("/bin/sh", "sh", "-c", argv[4], (char *)NULL);
    return suite_run(NULL, NULL);
}
