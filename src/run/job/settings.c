/* The table of settings: a new one is one line here, and a member of its struct in job.h. */
#include "run/job/settings.h"

#include "engine/policy.h"
#include "queue/policies.h"
#include "queue/storage/backend.h"
#include "run/desk/advantage.h"
#include "run/job/schedule.h"

#include <dray/queue.h>
#include <dray/weights.h>

/* ---- words ----------------------------------------------------------------------------------- */

#define NOT_YET "is not in this version"
#define FIXED_COUNT "is not for runs, where each step trains prompts x samples samples"

#define SCHEDULE(word, line) {word, line, NULL},
static const dray__word schedules[] = {DRAY__SCHEDULE_WORDS(SCHEDULE){NULL, 0, NULL}};
#define SOURCE(upper, lower) {#lower, DRAY__SOURCE_##upper, NULL},
static const dray__word sources[] = {DRAY__SOURCES(SOURCE){NULL, 0, NULL}};
#undef SOURCE
static const dray__word batchings[] = {{"closed", DRAY__BATCHING_CLOSED, NULL},
                                       {"continuous", DRAY__BATCHING_CONTINUOUS, NULL},
                                       {NULL, 0, NULL}};
static const dray__word tools[] = {{"none", DRAY__TOOL_NONE, NULL},
                                   {"calculator", DRAY__TOOL_CALCULATOR, NULL},
                                   {"command", DRAY__TOOL_COMMAND, NULL},
                                   {NULL, 0, NULL}};
static const dray__word updates[] = {{"boundary", DRAY__UPDATE_BOUNDARY, NULL},
                                     {"in_flight", DRAY__UPDATE_IN_FLIGHT, NULL},
                                     {"anew", DRAY__UPDATE_ANEW, NULL},
                                     {NULL, 0, NULL}};
static const dray__word rules[] = {{"exact_match", DRAY__RULE_EXACT_MATCH, NULL},
                                   {"command", DRAY__RULE_COMMAND, NULL},
                                   {NULL, 0, NULL}};
static const dray__word methods[] = {{"grpo", DRAY__ADVANTAGE_GRPO, NULL},
                                     {"rloo", DRAY__ADVANTAGE_RLOO, NULL},
                                     {"reinforce++", DRAY__ADVANTAGE_REINFORCE, NULL},
                                     {"gae", DRAY__ADVANTAGE_GAE, NULL},
                                     {NULL, 0, NULL}};
static const dray__word objectives[] = {
    {"ppo", DRAY__LOSS_PPO, NULL}, {"decoupled", DRAY__LOSS_DECOUPLED, NULL}, {NULL, 0, NULL}};
static const dray__word olds[] = {
    {"trainer", DRAY__OLD_TRAINER, NULL}, {"rollout", DRAY__OLD_ROLLOUT, NULL}, {NULL, 0, NULL}};
static const dray__word aggregates[] = {{"token", DRAY__AGGREGATE_TOKEN, NULL},
                                        {"sample", DRAY__AGGREGATE_SAMPLE, NULL},
                                        {"length", DRAY__AGGREGATE_LENGTH, NULL},
                                        {NULL, 0, NULL}};
static const dray__word overlong[] = {{"train", DRAY__OVERLONG_TRAIN, NULL},
                                      {"mask", DRAY__OVERLONG_MASK, NULL},
                                      {"exclude", DRAY__OVERLONG_EXCLUDE, NULL},
                                      {NULL, 0, NULL}};
static const dray__word decays[] = {
    {"linear", DRAY__DECAY_LINEAR, NULL}, {"none", DRAY__DECAY_NONE, NULL}, {NULL, 0, NULL}};
static const dray__word modes[] = {{"tensor", DRAY_MODE_TENSOR, NULL},
                                   {"disk", DRAY_MODE_DISK, NULL},
                                   {"distributed", 0, NOT_YET},
                                   {NULL, 0, NULL}};
static const dray__word strategies[] = {{"direct", DRAY_STRATEGY_DIRECT, NULL},
                                        {"bucket", DRAY_STRATEGY_BUCKET, NULL},
                                        {"parameter", DRAY_STRATEGY_PARAMETER, NULL},
                                        {NULL, 0, NULL}};
static const dray__word losses[] = {{"refill", DRAY_ON_LOSS_REFILL, NULL},
                                    {"end", DRAY_ON_LOSS_SHRINK_GROUP, NULL},
                                    {"shrink_group", 0, FIXED_COUNT},
                                    {"drop_group", 0, FIXED_COUNT},
                                    {NULL, 0, NULL}};
#define POLICY(number, name, pick, traits, refused) {#name, DRAY_POLICY_##number, refused},
static const dray__word policies[] = {DRAY__POLICY_MAP(POLICY){NULL, 0, NULL}};
#define STORE(number, name) {#name, DRAY_BACKEND_##number, NULL},
static const dray__word backends[] = {{"builtin", DRAY_BACKEND_BUILTIN, NULL},
                                      DRAY__STORE_MAP(STORE){NULL, 0, NULL}};
static const dray__word on_deaths[] = {
    {"restart", DRAY__ON_DEATH_RESTART, NULL}, {"end", DRAY__ON_DEATH_END, NULL}, {NULL, 0, NULL}};
static const dray__word durabilities[] = {{"none", DRAY_DURABILITY_NONE, NULL},
                                          {"checkpoint", DRAY_DURABILITY_CHECKPOINT, NULL},
                                          {"journal", DRAY_DURABILITY_JOURNAL, NULL},
                                          {NULL, 0, NULL}};

/* ---- how a line is written ------------------------------------------------------------------- */

/* The offset of a member. It does not compile when the member's type is not `holds`. */
#define AT(member, holds)                                                                          \
    .at = offsetof(STRUCT, member) + 0 * sizeof(_Generic(((STRUCT *)0)->member, holds : 1))
#define LINE(member, kind, holds, value, means)                                                    \
    .key = #member, .type = DRAY__SETTING_##kind, AT(member, holds), .text = value, .meaning = means

/* The default is written and read as in a job file. INT and REAL are from low to high; ABOVE is a
 * real number greater than low. The default of TEXT and PATH is a C string, or NULL when the key is
 * required; so is that of TEXTS, with blanks between its entries. */
/* clang-format off */
#define INT(member, value, from, to, means)                                                        \
    {LINE(member, INT, int64_t, #value, means), .low = (from), .high = (to)}
#define REAL(member, value, from, to, means)                                                       \
    {LINE(member, REAL, double, #value, means), .low = (from), .high = (to)}
#define ABOVE(member, value, from, to, means)                                                      \
    {LINE(member, REAL, double, #value, means), .low = (from), .high = (to), .above = true}
#define BOOL(member, value, means) {LINE(member, BOOL, bool, #value, means)}
#define WORD(member, value, list, means) {LINE(member, WORD, int32_t, #value, means), .words = list}
#define TEXT(member, value, means) {LINE(member, TEXT, char *, value, means)}
#define PATH(member, value, means) {LINE(member, PATH, char *, value, means)}
#define TEXTS(member, count, value, from, to, means)                                               \
    {LINE(member, TEXTS, char **, value, means), .count_at = offsetof(STRUCT, count),              \
     .low = (from), .high = (to)}
#define RECORDS(member, count, item, from, to, means)                                              \
    {LINE(member, RECORDS, item *, "", means), .count_at = offsetof(STRUCT, count),                \
     .low = (from), .high = (to), .record = &item##_record}
#define END {.key = NULL}
/* clang-format on */

/* ---- lists of records ------------------------------------------------------------------------ */

#define STRUCT dray__job_role
static const dray__setting role_settings[] = {
    TEXT(name, NULL, "1 to 32 letters, digits, `_` or `-`"),
    TEXTS(tasks, task_count, "", 0, 16,
          "what the role claims; a task may have several roles; none: a server"),
    TEXT(command, "",
         "a shell command that runs the tasks ([roles](roles.md)); without one, the built-in "
         "program, of which there are four: `rollout`, `eval`; `old_log_prob`, `actor`; `value`, "
         "`critic`; `driver`, `reward`, `score`, `reference`, `advantage`"),
    INT(ranks, 1, 1, 64,
        "processes of an instance, which start, end and die together; of the built-in `driver`, "
        "`reward`, `reference`, `advantage`: 1"),
    INT(instances, 1, 1, 1024, "each is started anew by itself when it dies"),
    INT(local, 1024, 0, 1024,
        "with `listen`: how many of its instances `dray run` starts on its own host (as many as "
        "there are, where it is not given); the others are for hosts that join "
        "([hosts](hosts.md))"),
    BOOL(spread, false,
         "`true`: the ranks of a command may be on several hosts, and `local` and `dray join` "
         "count ranks; they meet at `MASTER_ADDR`"),
    TEXT(devices, "",
         "`cpu:0`, `cuda:0-1`, `cuda:0,2`; GPUs become `CUDA_VISIBLE_DEVICES`, divided evenly "
         "among the instances; roles that share one take [turns](roles.md#devices-in-turns)"),
    TEXTS(env, env_count, "", 0, 64, "`NAME=VALUE`, over the environment of `dray run`"),
    PATH(cwd, "", "folder of the command; without one, where `dray run` was typed"),
    TEXT(ready, "",
         "the role can be used once this file is there (a relative path: below the run's "
         "folder), or this `http://HOST:PORT/PATH` answers"),
    TEXTS(after, after_count, "", 0, 16, "roles that must be ready before this one starts"),
    WORD(on_death, restart, on_deaths,
         "`restart`: the instance is started anew; `end`: the run ends, and can be resumed. Where "
         "it is not given: `end` for roles with `actor` or `critic`"),
    ABOVE(grace_seconds, 30, 0, 86400, "from the queue's end to SIGTERM, and from that to SIGKILL"),
    INT(nice, 0, 0, 19,
        "added to the nice value of `dray run` for its processes: where there are more of them "
        "than processors, roles that are waited for get theirs first"),
    END};
#undef STRUCT
static const char *const role_presets[][DRAY__PRESET_TEXTS] = {
    {"name", "engine", "tasks", "rollout eval", "ranks", "2"},
    {"name", "trainer", "tasks", "old_log_prob actor", "ranks", "2"},
    {"name", "desk", "tasks", "driver reward reference advantage"}};
static const dray__setting_record dray__job_role_record = {
    sizeof(dray__job_role), role_settings, role_presets,
    sizeof(role_presets) / sizeof(*role_presets)};

#define STRUCT dray__job_part
static const dray__setting part_settings[] = {
    TEXT(name, NULL, "1 to 32 letters, digits, `_` or `-`: of its mean in `metrics.jsonl`"),
    WORD(rule, exact_match, rules, "as `reward.rule`"),
    TEXT(command, "", "as `reward.command`; each reward's command is a process of its own"),
    REAL(weight, 1, -1e6, 1e6, "factor in the sum; 0: the reward is only measured"), END};
#undef STRUCT
static const dray__setting_record dray__job_part_record = {sizeof(dray__job_part), part_settings,
                                                           NULL, 0};
#define STRUCT dray__job_task
static const dray__setting task_settings[] = {
    TEXT(name, NULL, "a new task, or one of the built-in ones"),
    TEXTS(needs, need_count, "", 0, 16, "columns that are there before a row is claimed"),
    TEXTS(writes, write_count, "", 0, 16, "columns that the task adds"), END};
#undef STRUCT
static const dray__setting_record dray__job_task_record = {sizeof(dray__job_task), task_settings,
                                                           NULL, 0};

/* ---- the table ------------------------------------------------------------------------------- */

#define MICRO "samples that are claimed and computed at once"

#define STRUCT dray__job
const dray__setting dray__settings[] = {
    TEXT(name, "job", "the folder's name without `--out`: no `/`, and no `.` at its beginning"),
    TEXT(
        listen, "",
        "`tcp:HOST:PORT`: other hosts may join there with `dray join` ([hosts](hosts.md)); HOST is "
        "this host's, as others reach it"),
    INT(seed, 1, 0, 9007199254740992.0, "of all random numbers"),
    WORD(schedule, sync, schedules, "which version makes the samples of a step (above)"),
    BOOL(stream, true,
         "`false`: each task behind `rollout` waits until all samples of a step are there for it "
         "(the classical baseline; `sync` alone)"),
    INT(staleness, 0, 0, 64,
        "with `async` (where it is not given: 1): versions that the oldest token of a sample may "
        "be behind the one that its step begins with. What is older is dropped, and made anew from "
        "its own prompt"),
    WORD(update, boundary, updates,
         "with `rolling` and `async`, when an engine takes newer weights. `boundary`: between "
         "micro-batches, or (`rollout.batching: continuous`) when the samples under way are "
         "finished, and no new ones are begun until then; `in_flight`: at once: the samples under "
         "way are cut, and go on with the new weights; `anew`: at once: the samples under way are "
         "begun anew, so that each is of one version, but what a tool has said to calls that they "
         "make again is not asked again"),
    REAL(fresh_share, 0, 0, 1,
         "with `rolling` and `async`: the share of a step's samples that must be of the newest "
         "version that it may have; in `async` the last `staleness` steps get what is left"),
    INT(steps, 400, 1, 1e6, "training steps"),

    PATH(model.checkpoint, "",
         "a Hugging Face folder to start from (Llama, Qwen2, Qwen3; at least the tokenizer's "
         "vocabulary); without one, a model from scratch with the sizes below"),
    PATH(
        model.tokenizer, "",
        "a Hugging Face `tokenizer.json`, or its folder: byte-level BPE with NFC or no normalizer, "
        "and what it asks for besides is refused by name; without one the checkpoint's, or bytes "
        "(256, pad, begin 257, end 258). Prompts are taken with the tokens that its post-processor "
        "puts around a text; what `reward.command` reads is without special tokens"),
    TEXT(model.end_token, "",
         "the text of the token that ends a response; without it `eos_token` of the "
         "`tokenizer_config.json` beside the tokenizer"),
    TEXT(model.family, "qwen2", "`llama`, `qwen2` or `qwen3`"),
    INT(model.hidden_size, 64, 1, 65536, "a multiple of `heads`"),
    INT(model.intermediate_size, 192, 1, 262144, "of the feed-forward layers"),
    INT(model.layers, 2, 1, 1024, "of the transformer"),
    INT(model.heads, 4, 1, 1024, "of attention; a multiple of the engine's ranks"),
    INT(model.kv_heads, 2, 1, 1024, "heads of keys and values; divides `heads`"),
    INT(model.max_positions, 64, 2, 1048576, "tokens of a prompt with its response"),
    ABOVE(model.rope_theta, 10000, 0, 1e9, "base of the rotary position embedding"),
    ABOVE(model.rms_norm_eps, 1e-6, 0, 1, "epsilon of the norms"),
    BOOL(model.qkv_bias, true,
         "biases of queries, keys and values; where it is not given: the family's, of which "
         "`qwen2` alone has them"),
    BOOL(model.tied, true, "the embedding is the output matrix, too"),
    ABOVE(model.embedding_std, 0.02, 0, 100, "deviation of the random embedding"),
    ABOVE(model.weight_std, 0.02, 0, 100, "deviation of the other random matrices"),

    WORD(data.source, reverse, sources,
         "`reverse`: `1234=` is answered by `4321`, one number in eight is held out; `jsonl`: "
         "lines of `{\"prompt\": …, \"answer\": …}`; `arithmetic`: `3+9-4=` is answered by the "
         "chain of results, `12 8`, one chain in eight is held out; `tool`: `3+9+4=` is answered "
         "by `3+9=12+4=16`, whose results a calculator gives (`tool`), the same share is held out"),
    INT(data.digits, 4, 2, 18, "of `reverse`"),
    INT(data.steps, 20, 1, 200,
        "of `arithmetic` and `tool`: the most that a chain has; short ones are more frequent"),
    PATH(data.path, "", "`jsonl`: training lines"),
    PATH(data.eval_path, "", "`jsonl`: held-out lines"),

    REAL(warmup.reward, 0.1, 0, 1,
         "ends when the mean probability that a sample is the right answer is that much"),
    INT(warmup.max_steps, 5000, 0, 1e7, "0: no warm-up"),
    INT(warmup.batch, 64, 1, 65536, "answers of a step"),
    ABOVE(warmup.lr, 1e-3, 0, 1, "learning rate"),
    INT(warmup.check_every, 10, 1, 1e6, "steps between two looks at the reward"),

    INT(rollout.prompts, 32, 1, 65536, "of a step"),
    INT(rollout.samples, 8, 1, 4096, "of each prompt: a group"),
    REAL(rollout.temperature, 1, 1e-6, 100, "divides the logits"),
    INT(rollout.max_new_tokens, 8, 1, 1048576, "of a response, with its end token"),
    INT(rollout.micro_batch, 64, 1, 65536, MICRO),
    WORD(rollout.batching, closed, batchings,
         "`closed`: a micro-batch is generated from begin to end, and its bits are the same in "
         "every run; `continuous`: samples are claimed (with `queue.policy` `group`: groups) "
         "whenever fewer than `micro_batch` are under way, and leave when they are finished"),
    INT(rollout.partial_tokens, 0, 0, 1048576,
        "that a sample gets in one claim: then it is put back as far as it is, and goes on before "
        "new ones, with the weights that count then; 0: all. Not with `sync`"),

    WORD(tool.kind, none, tools,
         "what responses may call: `calculator`: whole numbers with `+`, `-` and `*`; `command`: a "
         "program of yours answers"),
    TEXT(tool.call, "=",
         "a response that ends with this, as the model goes on with it, calls the tool; the answer "
         "stands behind it"),
    INT(tool.turns, 8, 1, 1024, "answers that a sample gets at most; then the model is alone"),
    REAL(tool.min_seconds, 0, 0, 3600,
         "an answer comes no sooner: evenly from this to `max_seconds`, drawn from the sample's "
         "seed"),
    REAL(tool.max_seconds, 0, 0, 3600, "of the same"),
    TEXT(tool.command, "",
         "a shell command that stays, as `reward.command`: reads `{\"prompt\", \"response\"}` a "
         "line, the response ending with the call, writes `{\"answer\": \"…\"}` a line; `null`: "
         "none"),
    INT(tool.processes, 4, 1, 64, "of the command, each of which answers one call at a time"),
    ABOVE(tool.timeout_seconds, 30, 0, 86400, "for an answer of the command"),

    WORD(reward.rule, exact_match, rules,
         "`exact_match`: 1 when the response is the answer; `command`: a program grades"),
    TEXT(reward.command, "",
         "a shell command that stays, run where `dray run` was typed: reads `{\"prompt\", "
         "\"answer\", \"response\"}` a line, writes a finite number (single precision) a line; its "
         "environment is that of `dray run` without `DRAY_TOKEN`, `DRAY_REDIS_PASSWORD` and their "
         "`_FILE`s"),
    ABOVE(reward.timeout_seconds, 30, 0, 86400, "for an answer of the command"),
    INT(reward.micro_batch, 64, 1, 65536, MICRO),
    RECORDS(rewards, reward_count, dray__job_part, 0, 16,
            "several rewards: a sample's is the sum of all, each times its `weight`. In the place "
            "of `reward.rule` and `reward.command`; the other settings of `reward` hold for each"),

    BOOL(reference.enabled, true, "log-probs of the first model; without them no KL"),
    INT(reference.micro_batch, 64, 1, 65536, MICRO),
    INT(old_log_prob.micro_batch, 64, 1, 65536, MICRO),

    WORD(advantage.method, grpo, methods,
         "`grpo`: reward − group mean; `rloo`: reward − mean of the others; `reinforce++`: reward "
         "− mean over all tokens of the step, by their standard deviation: it takes the whole step "
         "at once; `gae`: of each token, by a value model, for which a role has the tasks `value` "
         "and `critic` (below)"),
    BOOL(advantage.divide_by_deviation, false,
         "of `grpo` and `rloo`: by the group's standard deviation"),
    REAL(advantage.gamma, 1, 0, 1, "of `gae`: discount of what comes a token later"),
    REAL(advantage.lambda, 0.95, 0, 1,
         "of `gae`: 1: the reward less the value, 0: from one value to the next"),
    INT(advantage.micro_batch, 64, 1, 65536, MICRO ", rounded to whole groups"),

    INT(actor.optimiser_steps, 4, 1, 4096, "of a batch; divides prompts × samples"),
    INT(actor.epochs, 1, 1, 1024, "passes over the batch"),
    INT(actor.micro_batch, 64, 1, 65536, MICRO),
    ABOVE(actor.lr, 1e-4, 0, 1, "learning rate of AdamW"),
    ABOVE(actor.beta1, 0.9, 0, 0.999999, "of AdamW"),
    ABOVE(actor.beta2, 0.95, 0, 0.999999, "of AdamW"),
    ABOVE(actor.epsilon, 1e-8, 0, 1, "of AdamW"),
    REAL(actor.weight_decay, 0, 0, 1, "of AdamW"),
    INT(actor.warmup_steps, 10, 0, 1e6, "in which the learning rate grows from 0"),
    WORD(actor.decay, linear, decays, "of the learning rate, over all steps"),
    REAL(actor.final_lr, 0.05, 0, 1, "fraction to which the learning rate decays"),
    WORD(actor.loss, ppo, objectives,
         "`ppo`; or `decoupled`: PPO's term is weighted by the ratio of the old log-prob to the "
         "engine's, token by token, which corrects for samples of other versions"),
    WORD(actor.old_log_prob, trainer, olds,
         "whose log-probs the clipped ratio is to: the `trainer`'s, as its step begins, or those "
         "of the `rollout` itself: the task `old_log_prob` then does not run"),
    REAL(actor.truncate, 0, 0, 1e6,
         "the largest weight of `decoupled`; under `ppo`, too, which then has weights. 0: none"),
    ABOVE(actor.clip, 0.2, 0, 1, "PPO's clip: ratios below 1 − clip gain nothing"),
    REAL(actor.clip_high, 0, 0, 100, "nor do those above 1 + clip_high; 0: as `clip`"),
    REAL(actor.dual_clip, 0, 0, 100,
         "where the advantage is negative, a token costs at most that many times it; more than 1; "
         "0: no bound"),
    WORD(actor.aggregate, token, aggregates,
         "the loss is the mean over an optimiser step's tokens (`token`), or over its samples, "
         "each the mean over its tokens (`sample`), or over samples × `rollout.max_new_tokens` "
         "(`length`)"),
    WORD(actor.overlong, train, overlong,
         "a response that was cut by `rollout.max_new_tokens` is trained as any other (`train`), "
         "is in no loss (`mask`), or is in no loss and its reward in no mean of its group's or "
         "step's (`exclude`)"),
    REAL(actor.entropy, 0, 0, 100, "coefficient of the entropy bonus"),
    REAL(actor.kl, 0, 0, 100, "coefficient of the KL divergence from the reference (k3)"),
    REAL(actor.grad_norm, 1, 0, 1e6, "to which gradients are clipped; 0: they are not"),

    ABOVE(critic.lr, 1e-4, 0, 1,
          "learning rate of the value model; where it is not given: `actor.lr`. What is not said "
          "here is the actor's: the other settings of AdamW, `optimiser_steps`, `micro_batch`, "
          "`warmup_steps`, `decay`, `aggregate`, `overlong`, `grad_norm`"),
    INT(critic.epochs, 1, 1, 1024, "passes over the batch; where it is not given: `actor.epochs`"),
    REAL(critic.clip, 0.2, 0, 1e6,
         "values that go further than that from where they were gain nothing; 0: no clip"),
    INT(critic.micro_batch, 64, 1, 65536, MICRO " by the task `value`"),

    INT(eval.every, 50, 0, 1e6, "steps, and at the beginning and the end; 0: only then"),
    INT(eval.prompts, 1024, 1, 1e6, "held out"),
    INT(eval.micro_batch, 128, 1, 65536, MICRO),

    WORD(weights.mode, tensor, modes,
         "`tensor`: straight from the trainer's memory; `disk`: files"),
    WORD(weights.strategy, direct, strategies, "how updates are cut ([weights](weights.md))"),
    INT(weights.bucket_bytes, 67108864, 131072, 1099511627776.0, "64 MiB; of `bucket`"),
    BOOL(weights.verify, true, "checksums of every update"),

    INT(checkpoint.every, 100, 1, 1e6, "steps, and at the end"),
    INT(checkpoint.keep, 3, 1, 1e6, "the newest; step 0 is always kept"),

    BOOL(clock.enabled, false,
         "no model is computed: work is a sleep, as the lines below say, and responses are digits; "
         "claims, commits, published bytes, updates and versions are real. To measure schedules"),
    REAL(clock.token_seconds, 1e-3, 0, 60, "a token for every sample that an engine generates"),
    REAL(clock.prefill_seconds, 0, 0, 60, "a token of a prompt, or of a cache made anew"),
    REAL(clock.log_prob_seconds, 0, 0, 60, "a sample's log-probs, trainer's and reference's"),
    REAL(clock.train_seconds, 1e-3, 0, 60, "a sample's gradients, whatever the trainer's ranks"),
    REAL(clock.reward_seconds, 0, 0, 60, "a sample's reward"),
    REAL(clock.tokens, 8, 1, 1e6, "mean length of a response; `rollout.max_new_tokens` cuts it"),
    REAL(clock.variation, 0, 0, 10, "deviation of lengths over their mean; they are log-normal"),
    REAL(clock.correlation, 0, 0, 1, "of the lengths' logarithms between samples of a prompt"),
    REAL(clock.tail, 1, 1, 1e6, "how much longer the tail's responses are"),
    REAL(clock.tail_share, 0, 0, 1, "responses of the tail"),

    INT(queue.capacity_rows, 1000000, 1, 1e9,
        "a job that cannot fit is refused, with the arithmetic"),
    INT(queue.capacity_bytes, 1073741824, 4096, 1099511627776.0, "1 GiB; the same"),
    INT(queue.max_attempts, 3, 1, 1000,
        "a sample whose claims died, or failed, that often is lost"),
    WORD(queue.on_loss, refill, losses,
         "`refill`: a group that is lost as a whole is replaced by another prompt, other samples "
         "by new ones of their prompt; `end`: a lost sample ends the run"),
    WORD(queue.policy, ordered, policies,
         "which samples of a step tasks take first. `ordered`: by slot, so that every run gives "
         "the same bits; `group`: whole groups, first complete first: every `micro_batch`, and the "
         "samples of an optimiser step, must be whole groups; `token_balanced`: the actor's are "
         "divided into micro-batches of at most `token_cap` tokens, and the other tasks take what "
         "is ready first. Advantages are of whole groups in any case"),
    INT(queue.token_cap, 0, 0, 1e9,
        "with `token_balanced`: tokens of a micro-batch, prompts with responses; 0: no cap"),
    WORD(queue.backend, builtin, backends, "where the bytes are ([queue](queue.md))"),
    TEXT(queue.backend_address, "", "of `redis`: `unix:/path` or `tcp:HOST:PORT`"),
    WORD(queue.durability, none, durabilities,
         "`checkpoint`: what the queue holds is saved with every checkpoint, in `queue` of the "
         "run's folder; a run that goes on (`--resume`) does not make again what had been made by "
         "then for the step after it. `journal`: what was committed is kept there at once: of what "
         "was made since the checkpoint only samples of later weights, which are gone, are made "
         "again"),
    TEXT(queue.metrics, "",
         "where the coordinator answers `GET /metrics` while the run lasts: `9400` or "
         "`127.0.0.1:9400` ([queue](queue.md))"),

    REAL(limits.wait_seconds, 120, 0.1, 86400,
         "the longest that anything waits for anything, and that a process may be stopped, or all "
         "of them do nothing"),
    REAL(limits.step_seconds, 0, 0, 1e7,
         "the longest that a step may take; 0: as long as it takes"),
    INT(limits.restarts, 5, 1, 1000, "starts of an instance in a row without a finished step"),
    REAL(limits.join_seconds, 600, 0.1, 1e7,
         "the longest that the run waits for hosts to join where it cannot go on without them"),

    RECORDS(roles, role_count, dray__job_role, 1, 16,
            "who runs the tasks; `--set roles.engine.ranks=1` changes one of an entry"),
    RECORDS(tasks, task_count, dray__job_task, 0, 16,
            "tasks beside the built-in ones, or other columns of those"),
    END};
#undef STRUCT

const char *const dray__settings_renamed[][2] = {
    {"hosts", "roles"}, {"queue.staleness", "staleness"}, {NULL, NULL}};
