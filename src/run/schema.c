#include "run/schema.h"

#include "base/error.h"
#include "base/words.h"
#include "run/advantage.h"

#include <dray/queue.h>
#include <dray/weights.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the schema ------------------------------------------------------------------------------ */

#define INT(name, type, member) CYAML_FIELD_INT(name, CYAML_FLAG_DEFAULT, type, member)
#define REAL(name, type, member) CYAML_FIELD_FLOAT(name, CYAML_FLAG_STRICT, type, member)
#define BOOL(name, type, member) CYAML_FIELD_BOOL(name, CYAML_FLAG_DEFAULT, type, member)
#define TEXT(name, type, member)                                                                   \
    CYAML_FIELD_STRING_PTR(name, CYAML_FLAG_POINTER, type, member, 0, 4096)
#define WORD(name, type, member, words)                                                            \
    CYAML_FIELD_ENUM(name, CYAML_FLAG_STRICT, type, member, words, CYAML_ARRAY_LEN(words))
#define SECTION(name, member, fields)                                                              \
    CYAML_FIELD_MAPPING(name, CYAML_FLAG_DEFAULT, dray__job, member, fields)

/* Words that RUN's design names and this version does not do have a negative value: they are
 * refused with a message of their own. */
enum { NOT_YET = -1 };

static const cyaml_strval_t schedules[] = {
    {"sync", DRAY__SCHEDULE_SYNC}, {"colocated", NOT_YET}, {"one_step_async", NOT_YET},
    {"rolling", NOT_YET},          {"async", NOT_YET},
};
static const cyaml_strval_t sources[] = {{"reverse", DRAY__SOURCE_REVERSE},
                                         {"jsonl", DRAY__SOURCE_JSONL}};
static const cyaml_strval_t rules[] = {{"exact_match", DRAY__RULE_EXACT_MATCH},
                                       {"command", DRAY__RULE_COMMAND}};
static const cyaml_strval_t methods[] = {{"grpo", DRAY__ADVANTAGE_GRPO},
                                         {"rloo", DRAY__ADVANTAGE_RLOO},
                                         {"reinforce++", NOT_YET},
                                         {"gae", NOT_YET}};
static const cyaml_strval_t decays[] = {{"linear", DRAY__DECAY_LINEAR}, {"none", DRAY__DECAY_NONE}};
static const cyaml_strval_t modes[] = {
    {"tensor", DRAY_MODE_TENSOR}, {"disk", DRAY_MODE_DISK}, {"distributed", NOT_YET}};
static const cyaml_strval_t durabilities[] = {{"none", DRAY_DURABILITY_NONE},
                                              {"checkpoint", DRAY_DURABILITY_CHECKPOINT},
                                              {"journal", DRAY_DURABILITY_JOURNAL}};
static const cyaml_strval_t losses[] = {{"refill", DRAY_ON_LOSS_REFILL},
                                        {"end", DRAY_ON_LOSS_SHRINK_GROUP},
                                        {"shrink_group", NOT_YET},
                                        {"drop_group", NOT_YET}};
static const cyaml_strval_t policies[] = {{"ordered", DRAY_POLICY_ORDERED},
                                          {"fifo", DRAY_POLICY_FIFO},
                                          {"oldest_version", DRAY_POLICY_OLDEST_VERSION},
                                          {"token_balanced", DRAY_POLICY_TOKEN_BALANCED},
                                          {"group", DRAY_POLICY_GROUP},
                                          {"priority", NOT_YET},
                                          {"lockstep", NOT_YET}};
static const cyaml_strval_t strategies[] = {{"direct", DRAY_STRATEGY_DIRECT},
                                            {"bucket", DRAY_STRATEGY_BUCKET},
                                            {"parameter", DRAY_STRATEGY_PARAMETER}};

static const cyaml_strval_t backends[] = {{"builtin", DRAY_BACKEND_BUILTIN},
                                          {"redis", DRAY_BACKEND_REDIS}};

static const cyaml_schema_field_t model_fields[] = {
    TEXT("checkpoint", dray__job_model, checkpoint),
    TEXT("family", dray__job_model, family),
    INT("hidden_size", dray__job_model, hidden_size),
    INT("intermediate_size", dray__job_model, intermediate_size),
    INT("layers", dray__job_model, layers),
    INT("heads", dray__job_model, heads),
    INT("kv_heads", dray__job_model, kv_heads),
    INT("max_positions", dray__job_model, max_positions),
    REAL("rope_theta", dray__job_model, rope_theta),
    REAL("rms_norm_eps", dray__job_model, rms_norm_eps),
    BOOL("qkv_bias", dray__job_model, qkv_bias),
    BOOL("tied", dray__job_model, tied),
    REAL("embedding_std", dray__job_model, embedding_std),
    REAL("weight_std", dray__job_model, weight_std),
    CYAML_FIELD_END,
};
static const cyaml_schema_field_t data_fields[] = {
    WORD("source", dray__job_data, source, sources),
    INT("digits", dray__job_data, digits),
    TEXT("path", dray__job_data, path),
    TEXT("eval_path", dray__job_data, eval_path),
    CYAML_FIELD_END,
};
static const cyaml_schema_field_t warmup_fields[] = {
    REAL("reward", dray__job_warmup, reward),
    INT("max_steps", dray__job_warmup, max_steps),
    INT("batch", dray__job_warmup, batch),
    REAL("lr", dray__job_warmup, lr),
    INT("check_every", dray__job_warmup, check_every),
    CYAML_FIELD_END,
};
static const cyaml_schema_field_t rollout_fields[] = {
    INT("prompts", dray__job_rollout, prompts),
    INT("samples", dray__job_rollout, samples),
    REAL("temperature", dray__job_rollout, temperature),
    INT("max_new_tokens", dray__job_rollout, max_new_tokens),
    INT("micro_batch", dray__job_rollout, micro_batch),
    CYAML_FIELD_END,
};
static const cyaml_schema_field_t reward_fields[] = {
    WORD("rule", dray__job_reward, rule, rules),
    TEXT("command", dray__job_reward, command),
    REAL("timeout_seconds", dray__job_reward, timeout_seconds),
    INT("micro_batch", dray__job_reward, micro_batch),
    CYAML_FIELD_END,
};
static const cyaml_schema_field_t reference_fields[] = {
    BOOL("enabled", dray__job_reference, enabled),
    INT("micro_batch", dray__job_reference, micro_batch),
    CYAML_FIELD_END,
};
static const cyaml_schema_field_t old_log_prob_fields[] = {
    INT("micro_batch", dray__job_old_log_prob, micro_batch),
    CYAML_FIELD_END,
};
static const cyaml_schema_field_t advantage_fields[] = {
    WORD("method", dray__job_advantage, method, methods),
    BOOL("divide_by_deviation", dray__job_advantage, divide_by_deviation),
    INT("micro_batch", dray__job_advantage, micro_batch),
    CYAML_FIELD_END,
};
static const cyaml_schema_field_t actor_fields[] = {
    INT("optimiser_steps", dray__job_actor, optimiser_steps),
    INT("epochs", dray__job_actor, epochs),
    INT("micro_batch", dray__job_actor, micro_batch),
    REAL("lr", dray__job_actor, lr),
    REAL("beta1", dray__job_actor, beta1),
    REAL("beta2", dray__job_actor, beta2),
    REAL("epsilon", dray__job_actor, epsilon),
    REAL("weight_decay", dray__job_actor, weight_decay),
    INT("warmup_steps", dray__job_actor, warmup_steps),
    WORD("decay", dray__job_actor, decay, decays),
    REAL("final_lr", dray__job_actor, final_lr),
    REAL("clip", dray__job_actor, clip),
    REAL("kl", dray__job_actor, kl),
    REAL("grad_norm", dray__job_actor, grad_norm),
    CYAML_FIELD_END,
};
static const cyaml_schema_field_t eval_fields[] = {
    INT("every", dray__job_eval, every),
    INT("prompts", dray__job_eval, prompts),
    INT("micro_batch", dray__job_eval, micro_batch),
    CYAML_FIELD_END,
};
static const cyaml_schema_field_t weights_fields[] = {
    WORD("mode", dray__job_weights, mode, modes),
    WORD("strategy", dray__job_weights, strategy, strategies),
    INT("bucket_bytes", dray__job_weights, bucket_bytes),
    BOOL("verify", dray__job_weights, verify),
    CYAML_FIELD_END,
};
static const cyaml_schema_field_t checkpoint_fields[] = {
    INT("every", dray__job_checkpoint, every),
    INT("keep", dray__job_checkpoint, keep),
    CYAML_FIELD_END,
};
static const cyaml_schema_field_t queue_fields[] = {
    INT("capacity_rows", dray__job_queue, capacity_rows),
    INT("capacity_bytes", dray__job_queue, capacity_bytes),
    INT("max_attempts", dray__job_queue, max_attempts),
    WORD("on_loss", dray__job_queue, on_loss, losses),
    WORD("policy", dray__job_queue, policy, policies),
    INT("token_cap", dray__job_queue, token_cap),
    INT("staleness", dray__job_queue, staleness),
    WORD("backend", dray__job_queue, backend, backends),
    TEXT("backend_address", dray__job_queue, backend_address),
    TEXT("metrics", dray__job_queue, metrics),
    WORD("durability", dray__job_queue, durability, durabilities),
    CYAML_FIELD_END,
};
static const cyaml_schema_field_t limits_fields[] = {
    REAL("wait_seconds", dray__job_limits, wait_seconds),
    INT("restarts", dray__job_limits, restarts),
    CYAML_FIELD_END,
};
static const cyaml_schema_value_t task_value = {
    CYAML_VALUE_STRING(CYAML_FLAG_POINTER, char, 1, 64),
};
static const cyaml_schema_field_t role_fields[] = {
    TEXT("name", dray__job_role, name),
    CYAML_FIELD_SEQUENCE_COUNT("tasks", CYAML_FLAG_POINTER, dray__job_role, tasks, task_count,
                               &task_value, 1, 16),
    INT("ranks", dray__job_role, ranks),
    CYAML_FIELD_END,
};
static const cyaml_schema_value_t role_value = {
    CYAML_VALUE_MAPPING(CYAML_FLAG_DEFAULT, dray__job_role, role_fields),
};
static const cyaml_schema_field_t job_fields[] = {
    TEXT("name", dray__job, name),
    INT("seed", dray__job, seed),
    WORD("schedule", dray__job, schedule, schedules),
    INT("steps", dray__job, steps),
    SECTION("model", model, model_fields),
    SECTION("data", data, data_fields),
    SECTION("warmup", warmup, warmup_fields),
    SECTION("rollout", rollout, rollout_fields),
    SECTION("reward", reward, reward_fields),
    SECTION("reference", reference, reference_fields),
    SECTION("old_log_prob", old_log_prob, old_log_prob_fields),
    SECTION("advantage", advantage, advantage_fields),
    SECTION("actor", actor, actor_fields),
    SECTION("eval", eval, eval_fields),
    SECTION("weights", weights, weights_fields),
    SECTION("checkpoint", checkpoint, checkpoint_fields),
    SECTION("queue", queue, queue_fields),
    SECTION("limits", limits, limits_fields),
    CYAML_FIELD_SEQUENCE_COUNT("roles", CYAML_FLAG_POINTER, dray__job, roles, role_count,
                               &role_value, 1, 16),
    CYAML_FIELD_END,
};
const cyaml_schema_value_t dray__job_schema = {
    CYAML_VALUE_MAPPING(CYAML_FLAG_POINTER, dray__job, job_fields),
};

/* ---- ranges ---------------------------------------------------------------------------------- */

typedef struct range {
    const char *path;
    double low, high;
    bool above; /* low itself is outside */
} range;

static const range ranges[] = {
    {"seed", 0, 9007199254740992.0, false},
    {"steps", 1, 1e6, false},
    {"model.hidden_size", 1, 65536, false},
    {"model.intermediate_size", 1, 262144, false},
    {"model.layers", 1, 1024, false},
    {"model.heads", 1, 1024, false},
    {"model.kv_heads", 1, 1024, false},
    {"model.max_positions", 2, 1048576, false},
    {"model.rope_theta", 0, 1e9, true},
    {"model.rms_norm_eps", 0, 1, true},
    {"model.embedding_std", 0, 100, true},
    {"model.weight_std", 0, 100, true},
    {"data.digits", 2, 18, false},
    {"warmup.reward", 0, 1, false},
    {"warmup.max_steps", 0, 1e7, false},
    {"warmup.batch", 1, 65536, false},
    {"warmup.lr", 0, 1, true},
    {"warmup.check_every", 1, 1e6, false},
    {"rollout.prompts", 1, 65536, false},
    {"rollout.samples", 1, 4096, false},
    {"rollout.temperature", 0, 100, true},
    {"rollout.max_new_tokens", 1, 1048576, false},
    {"rollout.micro_batch", 1, 65536, false},
    {"reward.timeout_seconds", 0, 86400, true},
    {"reward.micro_batch", 1, 65536, false},
    {"reference.micro_batch", 1, 65536, false},
    {"old_log_prob.micro_batch", 1, 65536, false},
    {"advantage.micro_batch", 1, 65536, false},
    {"actor.optimiser_steps", 1, 4096, false},
    {"actor.epochs", 1, 1024, false},
    {"actor.micro_batch", 1, 65536, false},
    {"actor.lr", 0, 1, true},
    {"actor.beta1", 0, 0.999999, true},
    {"actor.beta2", 0, 0.9999999, true},
    {"actor.epsilon", 0, 1, true},
    {"actor.weight_decay", 0, 1, false},
    {"actor.warmup_steps", 0, 1e6, false},
    {"actor.final_lr", 0, 1, false},
    {"actor.clip", 0, 1, true},
    {"actor.kl", 0, 100, false},
    {"actor.grad_norm", 0, 1e6, false},
    {"eval.every", 0, 1e6, false},
    {"eval.prompts", 1, 1e6, false},
    {"eval.micro_batch", 1, 65536, false},
    {"weights.bucket_bytes", 131072, 1099511627776.0, false},
    {"checkpoint.every", 1, 1e6, false},
    {"checkpoint.keep", 1, 1e6, false},
    {"queue.capacity_rows", 1, 1e9, false},
    {"queue.capacity_bytes", 4096, 1099511627776.0, false},
    {"queue.max_attempts", 1, 1000, false},
    {"queue.token_cap", 0, 1e9, false},
    {"queue.staleness", 0, 1000, false},
    {"limits.wait_seconds", 0.1, 86400, false},
    {"limits.restarts", 1, 1000, false},
    {"roles.ranks", 1, 64, false},
};

/* ---- checks ---------------------------------------------------------------------------------- */

enum { PATH_MAX_BYTES = 192 };

static int refuse(const dray__node *node, const char *path, dray_error *error, const char *format,
                  ...) __attribute__((format(printf, 4, 5)));

static int refuse_v(const dray__node *node, const char *path, dray_error *error, const char *format,
                    va_list arguments)
{
    char message[DRAY_ERROR_MESSAGE_MAX], where[DRAY__PLACE_BYTES];
    vsnprintf(message, sizeof(message), format, arguments);
    return dray__fail(error, DRAY_EINVALID, "%s: %s: %s",
                      dray__place_text(node->source, node->at, where), path[0] ? path : "job",
                      message);
}

static int refuse(const dray__node *node, const char *path, dray_error *error, const char *format,
                  ...)
{
    va_list arguments;
    va_start(arguments, format);
    int rc = refuse_v(node, path, error, format, arguments);
    va_end(arguments);
    return rc;
}

int dray__schema_fail(dray__node *root, const char *path, dray_error *error, const char *format,
                      ...)
{
    const dray__node *node = dray__tree_find(root, path), file = {.source = root->source};
    if (!node || node->source == dray__job_defaults_name) /* nobody wrote it */
        node = &file;
    va_list arguments;
    va_start(arguments, format);
    int rc = refuse_v(node, path, error, format, arguments);
    va_end(arguments);
    return rc;
}

static const char *kind_name(int kind)
{
    static const char *const names[] = {"a value", "a list", "a section"};
    return names[kind];
}

static int expect_kind(const dray__node *node, int kind, const char *path, dray_error *error)
{
    return node->kind == kind ? DRAY_OK
                              : refuse(node, path, error, "expected %s, found %s", kind_name(kind),
                                       kind_name(node->kind));
}

static int check_range(const dray__node *node, const char *path, double value, dray_error *error)
{
    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
        const range *r = &ranges[i];
        if (strcmp(r->path, path) != 0)
            continue;
        if (value > r->high || value < r->low || (r->above && value <= r->low))
            return refuse(node, path, error, "expected %s %.16g%s%.16g, found %s",
                          r->above ? "more than" : "from", r->low,
                          r->above ? " and at most " : " to ", r->high, node->value);
    }
    return DRAY_OK;
}

static int check_int(const dray__node *node, const char *path, dray_error *error)
{
    char *end;
    errno = 0;
    long long value = strtoll(node->value, &end, 10);
    const char *digits = node->value + (node->value[0] == '-');
    bool plain = digits[0] >= '0' && digits[0] <= '9' &&
                 !(digits[0] == '0' && digits[1]); /* which libcyaml would take as octal */
    if (errno || *end || !plain)
        return refuse(node, path, error, "expected a whole number, found '%.64s'", node->value);
    return check_range(node, path, (double)value, error);
}

static int check_real(const dray__node *node, const char *path, dray_error *error)
{
    char *end;
    errno = 0;
    double value = strtod(node->value, &end);
    if (errno || end == node->value || *end || !isfinite(value))
        return refuse(node, path, error, "expected a number, found '%.64s'", node->value);
    return check_range(node, path, value, error);
}

static int check_bool(const dray__node *node, const char *path, dray_error *error)
{
    return strcmp(node->value, "true") == 0 || strcmp(node->value, "false") == 0
               ? DRAY_OK
               : refuse(node, path, error, "expected true or false, found '%.64s'", node->value);
}

/* Why a word that the queue knows is none for runs. */
static const struct reason {
    const char *path, *word, *why;
} reasons[] = {
    {"queue.policy", "lockstep",
     "rank 0 of the trainer claims for all its ranks, which cannot get unequal counts"},
    {"queue.policy", "priority", "nothing in a run gives samples the tag priority"},
    {"queue.on_loss", "shrink_group", "each step trains prompts x samples samples"},
    {"queue.on_loss", "drop_group", "each step trains prompts x samples samples"},
};

static int refuse_word(const dray__node *node, const char *path, const char *list,
                       dray_error *error)
{
    for (size_t i = 0; i < sizeof(reasons) / sizeof(reasons[0]); i++)
        if (strcmp(reasons[i].path, path) == 0 && strcmp(reasons[i].word, node->value) == 0)
            return refuse(node, path, error, "'%s' is not for runs, where %s; they have: %s",
                          node->value, reasons[i].why, list);
    return refuse(node, path, error, "'%s' is not in this version, which has: %s", node->value,
                  list);
}

static int check_word(const cyaml_schema_value_t *schema, const dray__node *node, const char *path,
                      dray_error *error)
{
    const cyaml_strval_t *words = schema->enumeration.strings;
    uint32_t count = schema->enumeration.count;
    const char *known[16];
    char list[256] = "";
    for (uint32_t i = 0, n = 0; i < count; i++) {
        known[i] = words[i].str;
        if (words[i].val >= 0) {
            size_t used = strlen(list);
            snprintf(list + used, sizeof(list) - used, "%s%s", n++ ? ", " : "", words[i].str);
        }
    }
    for (uint32_t i = 0; i < count; i++)
        if (strcmp(words[i].str, node->value) == 0)
            return words[i].val >= 0 ? DRAY_OK : refuse_word(node, path, list, error);
    char hint[96];
    return refuse(node, path, error, "expected one of %s, found '%.64s'%s", list, node->value,
                  dray__word_hint(node->value, known, count, hint, sizeof(hint)));
}

static int check_text(const cyaml_schema_value_t *schema, const dray__node *node, const char *path,
                      dray_error *error)
{
    size_t length = strlen(node->value);
    return length >= schema->string.min && length <= schema->string.max
               ? DRAY_OK
               : refuse(node, path, error, "expected %u to %u bytes, found %zu", schema->string.min,
                        schema->string.max, length);
}

static int check_value(const cyaml_schema_value_t *schema, const dray__node *node, const char *path,
                       dray_error *error);

/* What a key of the job was called before. */
static const struct renamed {
    const char *was, *is;
} renamed[] = {{"hosts", "roles"}};

static int refuse_renamed(const dray__node *node, dray_error *error)
{
    for (size_t i = 0; i < sizeof(renamed) / sizeof(renamed[0]); i++)
        if (strcmp(renamed[i].was, node->key) == 0)
            return refuse(node, node->key, error, "expected '%s%s' in its place, found '%s'",
                          renamed[i].is, node->at.line ? ":" : "", node->key);
    return DRAY_OK;
}

static int check_key(const cyaml_schema_field_t *fields, const dray__node *child, const char *path,
                     const cyaml_schema_field_t **found, dray_error *error)
{
    const char *known[64];
    size_t count = 0;
    for (const cyaml_schema_field_t *f = fields; f->key; f++) {
        if (strcmp(f->key, child->key) == 0) {
            *found = f;
            return DRAY_OK;
        }
        if (count < 64)
            known[count++] = f->key;
    }
    int rc = path[0] ? DRAY_OK : refuse_renamed(child, error);
    if (rc)
        return rc;
    char hint[96];
    return refuse(child, path, error, "unknown key '%.64s'%s", child->key,
                  dray__word_hint(child->key, known, count, hint, sizeof(hint)));
}

static int check_mapping(const cyaml_schema_value_t *schema, const dray__node *node,
                         const char *path, dray_error *error)
{
    for (uint32_t i = 0; i < node->count; i++) {
        const dray__node *child = node->children[i];
        const cyaml_schema_field_t *field = NULL;
        int rc = check_key(schema->mapping.fields, child, path, &field, error);
        char below[PATH_MAX_BYTES];
        snprintf(below, sizeof(below), "%s%s%s", path, path[0] ? "." : "", child->key);
        if (!rc)
            rc = check_value(&field->value, child, below, error);
        if (rc)
            return rc;
    }
    for (const cyaml_schema_field_t *f = schema->mapping.fields; f->key; f++)
        if (!dray__tree_child(node, f->key))
            return refuse(node, path, error, "key '%s' is missing", f->key);
    return DRAY_OK;
}

static int check_sequence(const cyaml_schema_value_t *schema, const dray__node *node,
                          const char *path, dray_error *error)
{
    if (node->count < schema->sequence.min || node->count > schema->sequence.max)
        return refuse(node, path, error, "expected %u to %u entries, found %u",
                      schema->sequence.min, schema->sequence.max, node->count);
    for (uint32_t i = 0; i < node->count; i++) {
        int rc = check_value(schema->sequence.entry, node->children[i], path, error);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

static int check_value(const cyaml_schema_value_t *schema, const dray__node *node, const char *path,
                       dray_error *error)
{
    int kind = schema->type == CYAML_MAPPING    ? DRAY__NODE_MAPPING
               : schema->type == CYAML_SEQUENCE ? DRAY__NODE_SEQUENCE
                                                : DRAY__NODE_SCALAR;
    int rc = expect_kind(node, kind, path, error);
    if (rc)
        return rc;
    switch (schema->type) {
    case CYAML_MAPPING:
        return check_mapping(schema, node, path, error);
    case CYAML_SEQUENCE:
        return check_sequence(schema, node, path, error);
    case CYAML_INT:
        return check_int(node, path, error);
    case CYAML_FLOAT:
        return check_real(node, path, error);
    case CYAML_BOOL:
        return check_bool(node, path, error);
    case CYAML_ENUM:
        return check_word(schema, node, path, error);
    default:
        return check_text(schema, node, path, error);
    }
}

int dray__schema_check(const dray__node *root, dray_error *error)
{
    return check_value(&dray__job_schema, root, "", error);
}
