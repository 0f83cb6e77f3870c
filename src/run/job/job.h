/* src/run/job/: the description of a run. job_load.c loads a job file, by the table of settings
 * (settings.c, read by settings_read.c over the document of tree.c, written by settings_write.c);
 * job_roles.c checks the roles. tasks.c is the table of tasks, columns.c that table with the job's
 * own tasks, schedule.c the table of schedules, contract.c the variables of a role's process, and
 * devices.c how roles share devices. model.c and clock.c derive the model's sizes and the clock's
 * pace. */

/* A job file: the description of a run for `dray run`, as plain values. The settings, their
 * defaults and their ranges are in settings.c's table; docs/run.md is the reference for users. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>

typedef struct dray__job_model {
    char *checkpoint; /* folder to start from; "" to start from scratch with the sizes below */
    char *tokenizer;  /* a tokenizer.json; "" for the checkpoint's, or bytes when it has none */
    char *end_token;  /* "" for the one that the tokenizer's files name */
    char *family;
    int64_t hidden_size, intermediate_size, layers, heads, kv_heads, max_positions;
    double rope_theta, rms_norm_eps;
    bool qkv_bias, tied;
    double embedding_std, weight_std; /* of random parameters */
} dray__job_model;

/* The sources of data. Each is one line here and one file (data_source.h). */
#define DRAY__SOURCES(SOURCE)                                                                      \
    SOURCE(REVERSE, reverse)                                                                       \
    SOURCE(JSONL, jsonl)                                                                           \
    SOURCE(ARITHMETIC, arithmetic)                                                                 \
    SOURCE(TOOL, tool)

#define SOURCE(upper, lower) DRAY__SOURCE_##upper,
typedef enum dray__data_kind { DRAY__SOURCES(SOURCE) DRAY__SOURCE_COUNT } dray__data_kind;
#undef SOURCE

typedef struct dray__job_data {
    int32_t source; /* dray__data_kind */
    int64_t digits; /* reverse */
    int64_t steps;  /* arithmetic, tool: the most steps of a chain */
    char *path;     /* jsonl */
    char *eval_path;
} dray__job_data;

typedef struct dray__job_warmup {
    double reward;
    int64_t max_steps, batch, check_every;
    double lr;
} dray__job_warmup;

typedef enum dray__batching { DRAY__BATCHING_CLOSED = 0, DRAY__BATCHING_CONTINUOUS } dray__batching;

typedef enum dray__update {
    DRAY__UPDATE_BOUNDARY = 0,
    DRAY__UPDATE_IN_FLIGHT,
    DRAY__UPDATE_ANEW
} dray__update;

typedef struct dray__job_rollout {
    int64_t prompts, samples, micro_batch, max_new_tokens;
    int64_t partial_tokens; /* of a sample in one claim; 0 means all */
    int32_t batching;       /* dray__batching */
    double temperature;
} dray__job_rollout;

typedef enum dray__tool_kind {
    DRAY__TOOL_NONE = 0,
    DRAY__TOOL_CALCULATOR,
    DRAY__TOOL_COMMAND
} dray__tool_kind;

typedef struct dray__job_tool {
    int32_t kind; /* dray__tool_kind */
    char *command;
    char *call; /* the end of a response that calls the tool */
    int64_t turns, processes;
    double timeout_seconds, min_seconds, max_seconds;
} dray__job_tool;

typedef enum dray__rule { DRAY__RULE_EXACT_MATCH = 0, DRAY__RULE_COMMAND } dray__rule;

typedef struct dray__job_reward {
    int32_t rule; /* dray__rule */
    char *command;
    double timeout_seconds;
    int64_t micro_batch;
} dray__job_reward;

/* One of several rewards. */
typedef struct dray__job_part {
    char *name;
    int32_t rule; /* dray__rule */
    char *command;
    double weight;
} dray__job_part;

typedef struct dray__job_reference {
    bool enabled;
    int64_t micro_batch;
} dray__job_reference;

typedef struct dray__job_old_log_prob {
    int64_t micro_batch;
} dray__job_old_log_prob;

typedef struct dray__job_advantage {
    int32_t method; /* index into dray__advantages */
    bool divide_by_deviation;
    double gamma, lambda;
    int64_t micro_batch;
} dray__job_advantage;

typedef enum dray__decay { DRAY__DECAY_LINEAR = 0, DRAY__DECAY_NONE } dray__decay;

typedef enum dray__old { DRAY__OLD_TRAINER = 0, DRAY__OLD_ROLLOUT } dray__old;
typedef enum dray__overlong {
    DRAY__OVERLONG_TRAIN = 0,
    DRAY__OVERLONG_MASK,
    DRAY__OVERLONG_EXCLUDE
} dray__overlong;

typedef struct dray__job_actor {
    int64_t optimiser_steps, epochs, micro_batch, warmup_steps;
    double lr, beta1, beta2, epsilon, weight_decay, final_lr, clip, kl, grad_norm;
    double clip_high, dual_clip, truncate, entropy;
    int32_t decay;                  /* dray__decay */
    int32_t loss, aggregate;        /* of engine/policy.h */
    int32_t old_log_prob, overlong; /* dray__old, dray__overlong */
} dray__job_actor;

/* The value model's settings. All others are the actor's. */
typedef struct dray__job_critic {
    double lr, clip;
    int64_t epochs, micro_batch;
} dray__job_critic;

typedef struct dray__job_eval {
    int64_t every, prompts, micro_batch;
} dray__job_eval;

typedef struct dray__job_weights {
    int32_t mode, strategy; /* dray_update_mode, dray_update_strategy */
    int64_t bucket_bytes;
    bool verify;
} dray__job_weights;

typedef struct dray__job_checkpoint {
    int64_t every, keep;
} dray__job_checkpoint;

typedef struct dray__job_clock {
    bool enabled;
    double token_seconds, prefill_seconds, log_prob_seconds, train_seconds, reward_seconds;
    double tokens, variation, correlation, tail, tail_share;
} dray__job_clock;

typedef struct dray__job_queue {
    int64_t capacity_rows, capacity_bytes, max_attempts;
    /* dray_on_loss; shrink_group is "end" in a job file: a lost sample ends the run. */
    int32_t on_loss;
    int32_t policy; /* dray_policy, of the tasks of a step */
    int64_t token_cap;
    int32_t backend; /* dray_queue_backend */
    char *backend_address;
    char *metrics;  /* where the coordinator answers GET /metrics; "" for nowhere */
    int durability; /* dray_durability */
} dray__job_queue;

typedef struct dray__job_limits {
    double wait_seconds; /* the longest that anything waits for anything */
    double step_seconds; /* the longest that a step may take; 0 for no limit */
    int64_t restarts;    /* starts in a row without progress before the run ends */
    double join_seconds; /* the longest that the run waits for hosts that it cannot do without */
} dray__job_limits;

typedef enum dray__on_death { DRAY__ON_DEATH_RESTART = 0, DRAY__ON_DEATH_END } dray__on_death;

typedef struct dray__job_role {
    char *name;
    char **tasks; /* a role without tasks is a server */
    uint32_t task_count;
    char *command; /* a shell command; "" for the built-in program */
    int64_t ranks, instances;
    bool spread;   /* ranks may be on several hosts */
    int64_t local; /* places (instances, or ranks where they are spread) of the run's own host */
    char *devices;
    char **env; /* "NAME=VALUE" */
    uint32_t env_count;
    char *cwd;
    char *ready;  /* a URL, or a file, that shows that the role can be used; "" for at once */
    char **after; /* roles that must be ready before this one starts */
    uint32_t after_count;
    int32_t on_death; /* dray__on_death */
    double grace_seconds;
    int64_t nice; /* nice value of its processes, added to that of the supervisor */
} dray__job_role;

/* A task that the job adds or changes. Settings that are not given are those of the built-in
 * task. */
typedef struct dray__job_task {
    char *name;
    char **needs, **writes;
    uint32_t need_count, write_count;
} dray__job_task;

typedef struct dray__job {
    char *name;
    char *listen; /* where other hosts join; "" when none do */
    int64_t seed, steps;
    int32_t schedule; /* of schedule.h */
    bool stream;      /* tasks take samples as they come, not a step's all at once */
    int64_t staleness;
    int32_t update; /* dray__update */
    double fresh_share;
    dray__job_model model;
    dray__job_data data;
    dray__job_warmup warmup;
    dray__job_rollout rollout;
    dray__job_tool tool;
    dray__job_reward reward;
    dray__job_part *rewards; /* several rewards; when there are none, `reward` is the only one */
    uint32_t reward_count;
    dray__job_reference reference;
    dray__job_old_log_prob old_log_prob;
    dray__job_advantage advantage;
    dray__job_actor actor;
    dray__job_critic critic;
    dray__job_eval eval;
    dray__job_weights weights;
    dray__job_checkpoint checkpoint;
    dray__job_clock clock;
    dray__job_queue queue;
    dray__job_limits limits;
    dray__job_role *roles;
    uint32_t role_count;
    dray__job_task *tasks;
    uint32_t task_count;
} dray__job;

/* Reads a job file, which overrides the defaults; the settings ("actor.lr=1e-3") override both.
 * *resolved (may be NULL) gets the resolved job as YAML, itself a valid job file; malloc'ed. Paths
 * in the file are relative to its folder, and absolute when resolved. Returns 0, or DRAY_ENOENT,
 * DRAY_EFORMAT or DRAY_EINVALID with a message that has file, line, key, the expected and the found
 * value. */
int dray__job_load(const char *path, const char *const *settings, uint32_t setting_count,
                   dray__job **out, char **resolved, dray_error *error);
void dray__job_free(dray__job *job);

/* Returns the role that runs `task`; NULL when none does. */
const dray__job_role *dray__job_role_of(const dray__job *job, const char *task);
bool dray__role_has(const dray__job_role *role, const char *task);
/* Returns the role's number of instances or, when its ranks are spread, of ranks. */
int64_t dray__role_places(const dray__job_role *role);
/* Returns the name of the token that the role's processes use: "engine", "trainer" or "task". */
const char *dray__role_token(const dray__job_role *role);
/* Returns whether a role, a task or a reward may have this name: 1 to 32 letters, digits, `_` or
 * `-`. */
bool dray__job_name_ok(const char *name);
int64_t dray__job_batch(const dray__job *job);       /* samples a step */
int64_t dray__job_token_bytes(const dray__job *job); /* of the columns by response token */
int64_t dray__job_wait_ns(const dray__job *job);
