/* The reference engine as a program for tests in Python: reads one JSON request from a file, runs
 * it on as many ranks as it says, and prints one JSON answer (of rank 0).
 *
 *   {"do": "next", "model": DIR, "ranks": 2, "tokens": [...], "vocabulary": N}
 *   {"do": "logprobs", "model": DIR, "ranks": 2, "with": "generator" | "trainer",
 *    "prompts": [[...]], "responses": [[...]], "temperature": 1}
 *   {"do": "generate", "model": DIR, "ranks": 2, "prompts": [[...]], "temperature": 1, "seed": 1,
 *    "max_new_tokens": 8, "eos": -1}
 *   {"do": "update", "model": DIR, "then": DIR, "ranks": 2, "prompts": [[...]], "seed": 1,
 *    "before": 3, "max_new_tokens": 8}: the other weights come after `before` tokens
 *   {"do": "init", "like": DIR, "ranks": 2, "seed": 1, "out": DIR}
 *   {"do": "train", "model": DIR, "ranks": 2, "options": {...}, "steps": [{"lr": 1e-3, "norm": 0,
 *    "batches": [{"loss": "sft" | "policy" | "value", "prompts": ..., "responses": ..., ...}]}],
 *    "out": DIR}
 *   {"do": "loss", "cases": [{"batch": {...}, "logprobs": [...], "entropies": [...]}]}
 *   {"do": "value_loss", "cases": [{"batch": {...}, "now": [...]}]}
 *   {"do": "values", "model": DIR, "ranks": 2, "prompts": [[...]], "responses": [[...]]}
 *
 * With "trunk": DIR, a value model of the trunk of this language model, in the place of "model".
 *
 * An error of the library is the answer {"error": NAME, "message": TEXT}. */
#include "control/fixture.h"
#include "engine/sampler.h"
#include "engine/trainer.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static dray_error error;

static json_t *failed(int code)
{
    return json_pack("{s:s, s:s}", "error", dray_error_name(code), "message", error.message);
}

static const char *text(const json_t *json, const char *key)
{
    return json_string_value(json_object_get(json, key));
}

static double number(const json_t *json, const char *key, double absent)
{
    const json_t *value = json_object_get(json, key);
    return value ? json_number_value(value) : absent;
}

static dray__tokens ragged(const json_t *json)
{
    size_t rows = json_array_size(json), total = 0;
    uint64_t *offsets = calloc(rows + 1, sizeof *offsets);
    for (size_t i = 0; i < rows; i++)
        offsets[i + 1] = total += json_array_size(json_array_get(json, i));
    int32_t *values = calloc(total + 1, sizeof *values), *at = values;
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < json_array_size(json_array_get(json, i)); j++)
            *at++ = (int32_t)json_integer_value(json_array_get(json_array_get(json, i), j));
    return (dray__tokens){values, offsets};
}

static dray__sequences sequences(const json_t *json)
{
    const json_t *prompts = json_object_get(json, "prompts"), *mask = json_object_get(json, "mask");
    int32_t *made = mask ? calloc(json_array_size(mask) + 1, sizeof *made) : NULL;
    for (size_t i = 0; i < json_array_size(mask); i++)
        made[i] = (int32_t)json_integer_value(json_array_get(mask, i));
    return (dray__sequences){(uint32_t)json_array_size(prompts), ragged(prompts),
                             ragged(json_object_get(json, "responses")), made};
}

static float *floats(const json_t *json)
{
    if (!json_is_array(json))
        return NULL;
    float *values = calloc(json_array_size(json) + 1, sizeof *values);
    for (size_t i = 0; i < json_array_size(json); i++)
        values[i] = (float)json_number_value(json_array_get(json, i));
    return values;
}

static json_t *list(const float *values, size_t count)
{
    json_t *json = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(json, json_real(values[i]));
    return json;
}

/* ---- the generator --------------------------------------------------------------------------- */

/* Log-probs of all tokens of the vocabulary behind the given ones. */
static json_t *do_next(const json_t *request, dray__generator *g)
{
    uint32_t count = (uint32_t)number(request, "vocabulary", 0);
    json_t *tokens = json_object_get(request, "tokens"), *prompts = json_array();
    json_t *responses = json_array();
    for (uint32_t i = 0; i < count; i++) {
        json_array_append(prompts, tokens);
        json_array_append_new(responses, json_pack("[i]", (int)i));
    }
    dray__sequences s = {count, ragged(prompts), ragged(responses), NULL};
    float *logprobs = calloc(count + 1, sizeof *logprobs);
    int code = dray__generator_logprobs(g, &s, 1, logprobs, NULL, &error);
    return code == DRAY_OK ? json_pack("{s:o}", "logprobs", list(logprobs, count)) : failed(code);
}

static json_t *scores(int code, const dray__sequences *s, const float *logprobs,
                      const float *entropy)
{
    size_t count = s->response.offsets[s->rows];
    return code == DRAY_OK ? json_pack("{s:o, s:o}", "logprobs", list(logprobs, count), "entropy",
                                       list(entropy, count))
                           : failed(code);
}

static json_t *do_logprobs(const json_t *request, dray__generator *g)
{
    dray__sequences s = sequences(request);
    size_t count = s.response.offsets[s.rows];
    float *logprobs = calloc(count + 1, sizeof(float)), *entropy = calloc(count + 1, sizeof(float));
    int code = dray__generator_logprobs(g, &s, number(request, "temperature", 1), logprobs, entropy,
                                        &error);
    return scores(code, &s, logprobs, entropy);
}

static json_t *do_generate(const json_t *request, dray__generator *g)
{
    const json_t *prompts = json_object_get(request, "prompts");
    const dray__sampler_options how = {.seed = (uint64_t)number(request, "seed", 0),
                                       .temperature = number(request, "temperature", 1),
                                       .eos_token = (int32_t)number(request, "eos", -1)};
    const dray__sampler_rows given = {
        .rows = {.rows = (uint32_t)json_array_size(prompts), .prompt = ragged(prompts)},
        .max_new_tokens = (uint32_t)number(request, "max_new_tokens", 1)};
    dray__generation out;
    int code = dray__generate(g, &how, &given, &out, &error);
    if (code != DRAY_OK)
        return failed(code);
    json_t *rows = json_array(), *finish = json_array();
    for (uint32_t i = 0; i < out.rows; i++) {
        json_t *row = json_array();
        for (uint64_t j = out.offsets[i]; j < out.offsets[i + 1]; j++)
            json_array_append_new(row, json_integer(out.tokens[j]));
        json_array_append_new(rows, row);
        json_array_append_new(finish, json_integer(out.finish[i]));
    }
    return json_pack("{s:o, s:o, s:o}", "responses", rows, "finish", finish, "logprobs",
                     list(out.logprobs, out.offsets[out.rows]));
}

static json_t *do_update(const json_t *request, dray__generator *g)
{
    dray__sampler_options options = {.temperature = 1, .eos_token = -1};
    dray__sampler *s;
    uint64_t before = (uint64_t)number(request, "before", 0), streams[64];
    uint32_t slots[64];
    options.slots = (uint32_t)json_array_size(json_object_get(request, "prompts"));
    options.seed = (uint64_t)number(request, "seed", 0);
    for (uint32_t i = 0; i < options.slots; i++)
        streams[i] = i;
    dray__sampler_rows rows = {
        .rows = {.rows = options.slots, .prompt = ragged(json_object_get(request, "prompts"))},
        .streams = streams,
        .max_new_tokens = (uint32_t)number(request, "max_new_tokens", 1)};
    int code = dray__sampler_open(g, &options, &s, &error);
    if (code == DRAY_OK)
        code = dray__sampler_add(s, &rows, slots, &error);
    for (uint64_t i = 0; code == DRAY_OK && dray__sampler_running(s) > 0; i++) {
        if (i == before) {
            code = dray__generator_load(g, text(request, "then"), &error);
            dray__sampler_renew(s, 1);
        }
        if (code == DRAY_OK)
            code = dray__sampler_step(s, &error);
    }
    if (code != DRAY_OK)
        return failed(code);
    json_t *responses = json_array(), *logprobs = json_array();
    for (uint32_t i = 0; i < options.slots; i++) {
        dray__sampled made = dray__sampler_look(s, slots[i]);
        json_t *row = json_array();
        for (uint64_t j = 0; j < made.count; j++)
            json_array_append_new(row, json_integer(made.tokens[j]));
        json_array_append_new(responses, row);
        json_array_append_new(logprobs, list(made.logprobs, made.count));
    }
    dray__sampler_close(s);
    return json_pack("{s:o, s:o}", "responses", responses, "logprobs", logprobs);
}

static json_t *with_generator(const json_t *request, dray__group *group,
                              json_t *(*function)(const json_t *, dray__generator *))
{
    dray_model_config config;
    dray__generator *g = NULL;
    int code = dray__engine_config_load(text(request, "model"), &config, &error);
    if (code == DRAY_OK)
        code = dray__generator_open(&config, group, &g, &error);
    if (code == DRAY_OK)
        code = dray__generator_load(g, text(request, "model"), &error);
    json_t *answer = code == DRAY_OK ? function(request, g) : failed(code);
    dray__generator_close(g);
    return answer;
}

/* ---- the trainer ----------------------------------------------------------------------------- */

static bool *flags(const json_t *json)
{
    bool *values = json ? calloc(json_array_size(json) + 1, sizeof *values) : NULL;
    for (size_t i = 0; i < json_array_size(json); i++)
        values[i] = json_is_true(json_array_get(json, i));
    return values;
}

static dray__policy_batch policy_batch(const json_t *json)
{
    dray__policy_batch batch = {0};
    batch.sequences = sequences(json);
    batch.temperature = number(json, "temperature", 1);
    batch.advantages = floats(json_object_get(json, "advantages"));
    batch.token_advantages = json_is_true(json_object_get(json, "token_advantages"));
    batch.old_logprobs = floats(json_object_get(json, "old"));
    batch.behaviour_logprobs = floats(json_object_get(json, "behaviour"));
    batch.ref_logprobs = floats(json_object_get(json, "ref"));
    batch.masked = flags(json_object_get(json, "masked"));
    batch.loss =
        json_is_true(json_object_get(json, "decoupled")) ? DRAY__LOSS_DECOUPLED : DRAY__LOSS_PPO;
    batch.aggregate = (int32_t)number(json, "aggregate", DRAY__AGGREGATE_TOKEN);
    batch.length = number(json, "length", 0);
    batch.truncate = number(json, "truncate", 0);
    batch.clip_low = number(json, "clip_low", 0);
    batch.clip_high = number(json, "clip_high", 0);
    batch.dual_clip = number(json, "dual_clip", 0);
    batch.kl_coefficient = number(json, "kl", 0);
    batch.entropy_coefficient = number(json, "entropy", 0);
    return batch;
}

static dray__value_batch value_batch(const json_t *json)
{
    dray__value_batch batch = {0};
    batch.sequences = sequences(json);
    batch.returns = floats(json_object_get(json, "returns"));
    batch.values = floats(json_object_get(json, "values"));
    batch.masked = flags(json_object_get(json, "masked"));
    batch.aggregate = (int32_t)number(json, "aggregate", DRAY__AGGREGATE_TOKEN);
    batch.length = number(json, "length", 0);
    batch.clip = number(json, "clip", 0);
    return batch;
}

static int accumulate(const json_t *json, dray__trainer *t)
{
    dray__policy_batch batch = policy_batch(json);
    dray__value_batch value = value_batch(json);
    if (strcmp(text(json, "loss"), "value") == 0)
        return dray__trainer_accumulate_value(t, &value, &error);
    return strcmp(text(json, "loss"), "sft") == 0
               ? dray__trainer_accumulate_sft(t, &batch.sequences, &error)
               : dray__trainer_accumulate_policy(t, &batch, &error);
}

static json_t *loss_of(const json_t *request)
{
    const json_t *logprobs = json_object_get(request, "logprobs");
    const json_t *entropies = json_object_get(request, "entropies");
    dray__policy_batch batch = policy_batch(json_object_get(request, "batch")), policy;
    const uint64_t *offsets = batch.sequences.response.offsets;
    dray__policy_sums sums = {0};
    uint64_t tokens;
    int code = dray__policy_check(&batch, &policy, &error);
    if (code != DRAY_OK)
        return failed(code);
    json_t *by_logprob = json_array(), *by_entropy = json_array();
    for (uint32_t row = 0; row < policy.sequences.rows; row++)
        for (uint64_t i = offsets[row]; i < offsets[row + 1]; i++) {
            dray__slopes slopes =
                dray__policy_token(&policy, i, row, json_number_value(json_array_get(logprobs, i)),
                                   json_number_value(json_array_get(entropies, i)), &sums);
            json_array_append_new(by_logprob, json_real(slopes.logprob));
            json_array_append_new(by_entropy, json_real(slopes.entropy));
        }
    double divisor = dray__aggregate_divisor(policy.aggregate, &policy.sequences, policy.masked,
                                             policy.length, &tokens);
    return json_pack("{s:f, s:f, s:I, s:o, s:o}", "loss", sums.loss, "divisor", divisor, "tokens",
                     (json_int_t)tokens, "by_logprob", by_logprob, "by_entropy", by_entropy);
}

static json_t *value_loss_of(const json_t *request)
{
    const json_t *now = json_object_get(request, "now");
    dray__value_batch batch = value_batch(json_object_get(request, "batch"));
    const uint64_t *offsets = batch.sequences.response.offsets;
    dray__policy_sums sums = {0};
    uint64_t tokens;
    int code = dray__value_check(&batch, &error);
    if (code != DRAY_OK)
        return failed(code);
    json_t *slopes = json_array();
    for (uint32_t row = 0; row < batch.sequences.rows; row++)
        for (uint64_t i = offsets[row]; i < offsets[row + 1]; i++) {
            double value = json_number_value(json_array_get(now, i));
            json_array_append_new(slopes,
                                  json_real(dray__value_token(&batch, i, row, value, &sums)));
        }
    double divisor = dray__aggregate_divisor(batch.aggregate, &batch.sequences, batch.masked,
                                             batch.length, &tokens);
    return json_pack("{s:f, s:f, s:f, s:o}", "loss", sums.loss, "divisor", divisor, "clipped",
                     sums.clipped, "slopes", slopes);
}

static json_t *do_loss(const json_t *request)
{
    const json_t *cases = json_object_get(request, "cases");
    bool value = strcmp(text(request, "do"), "value_loss") == 0;
    json_t *answers = json_array();
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *of = json_array_get(cases, i);
        json_array_append_new(answers, value ? value_loss_of(of) : loss_of(of));
    }
    return json_pack("{s:o}", "answers", answers);
}

static json_t *step_answer(const dray__step_stats *s)
{
    const struct {
        const char *key;
        double value;
    } reals[] = {{"loss", s->loss},
                 {"norm", s->gradient_norm},
                 {"entropy", s->entropy},
                 {"clip_fraction", s->clip_fraction},
                 {"dual_clip_fraction", s->dual_clip_fraction},
                 {"truncated_fraction", s->truncated_fraction},
                 {"kl", s->kl},
                 {"ratio_mean", s->ratio_mean},
                 {"ratio_max", s->ratio_max},
                 {"behaviour_mean", s->behaviour_mean},
                 {"behaviour_square", s->behaviour_square},
                 {"behaviour_max", s->behaviour_max}};
    json_t *answer =
        json_pack("{s:I, s:I}", "step", (json_int_t)s->step, "tokens", (json_int_t)s->tokens);
    for (size_t i = 0; i < sizeof reals / sizeof *reals; i++)
        json_object_set_new(answer, reals[i].key, json_real(reals[i].value));
    return answer;
}

/* Where ranks meet to save. */
static coordinator_fixture coordinator;
static dray_context *meeting;
static uint32_t own_rank;

/* A version in a folder beside `path`, which then takes that name. */
static int save(dray__trainer *t, const char *path, bool optimizer)
{
    static uint64_t saved;
    char folder[512], version[600], command[600];
    dray_checkpoint_options options = DRAY_CHECKPOINT_OPTIONS_INIT;
    options.version = saved++;
    snprintf(folder, sizeof folder, "%s.saved", path);
    snprintf(version, sizeof version, "%s/step-%06llu", folder,
             (unsigned long long)options.version);
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    int code = dray__trainer_save(t, meeting, folder, &options, optimizer, &error);
    if (code == DRAY_OK && own_rank == 0 && (system(command) || rename(version, path)))
        abort();
    return code;
}

static json_t *do_train(const json_t *request, dray__trainer *t)
{
    json_t *answers = json_array();
    const json_t *steps = json_object_get(request, "steps");
    int code = DRAY_OK;
    for (size_t i = 0; code == DRAY_OK && i < json_array_size(steps); i++) {
        const json_t *step = json_array_get(steps, i), *batches = json_object_get(step, "batches");
        for (size_t j = 0; code == DRAY_OK && j < json_array_size(batches); j++)
            code = accumulate(json_array_get(batches, j), t);
        dray__step_options options = {0};
        options.learning_rate = number(step, "lr", 0);
        options.max_norm = number(step, "norm", 0);
        dray__step_stats stats;
        if (code == DRAY_OK)
            code = dray__trainer_step(t, &options, &stats, &error);
        if (code == DRAY_OK)
            json_array_append_new(answers, step_answer(&stats));
        if (code == DRAY_OK && text(step, "save"))
            code = save(t, text(step, "save"), true);
    }
    if (code == DRAY_OK && text(request, "out"))
        code = save(t, text(request, "out"), false);
    return code == DRAY_OK ? json_pack("{s:o}", "steps", answers) : failed(code);
}

static json_t *do_trainer_logprobs(const json_t *request, dray__trainer *t)
{
    dray__sequences s = sequences(request);
    size_t count = s.response.offsets[s.rows];
    float *logprobs = calloc(count + 1, sizeof(float)), *entropy = calloc(count + 1, sizeof(float));
    int code =
        dray__trainer_logprobs(t, &s, number(request, "temperature", 1), logprobs, entropy, &error);
    return scores(code, &s, logprobs, entropy);
}

static json_t *do_values(const json_t *request, dray__trainer *t)
{
    dray__sequences s = sequences(request);
    size_t count = s.response.offsets[s.rows];
    float *values = calloc(count + 1, sizeof(float));
    int code = dray__trainer_values(t, &s, values, &error);
    return code == DRAY_OK ? json_pack("{s:o}", "values", list(values, count)) : failed(code);
}

static json_t *with_trainer(const json_t *request, dray__group *group,
                            json_t *(*function)(const json_t *, dray__trainer *))
{
    const json_t *given = json_object_get(request, "options");
    const char *model = text(request, "model"), *trunk = text(request, "trunk");
    const char *like = model ? model : trunk ? trunk : text(request, "like");
    dray__trainer_options options = {.eos_token = -1};
    options.beta1 = number(given, "beta1", 0);
    options.beta2 = number(given, "beta2", 0);
    options.epsilon = number(given, "epsilon", 0);
    options.weight_decay = number(given, "weight_decay", 0);
    dray_model_config config;
    dray__trainer *t = NULL;
    int code = dray__engine_config_load(like, &config, &error);
    if (trunk)
        config.labels = 1;
    if (code == DRAY_OK)
        code = dray__trainer_open(&config, group, &options, &t, &error);
    if (code == DRAY_OK && json_is_true(json_object_get(request, "restore")))
        code = dray__trainer_restore(t, model, &error);
    else if (code == DRAY_OK && trunk)
        code = dray__trainer_load_trunk(t, trunk, &error);
    else if (code == DRAY_OK && model)
        code = dray__trainer_load(t, model, &error);
    else if (code == DRAY_OK)
        code = dray__trainer_init(t, 0.02, 0.02, (uint64_t)number(request, "seed", 0), &error);
    json_t *answer = code == DRAY_OK ? function(request, t) : failed(code);
    dray__trainer_close(t);
    return answer;
}

/* ---- ranks ----------------------------------------------------------------------------------- */

static json_t *run(const json_t *request, dray__group *group)
{
    const char *what = text(request, "do");
    const char *with = text(request, "with");
    if (strcmp(what, "loss") == 0 || strcmp(what, "value_loss") == 0)
        return do_loss(request);
    if (strcmp(what, "values") == 0)
        return with_trainer(request, group, do_values);
    if (strcmp(what, "next") == 0)
        return with_generator(request, group, do_next);
    if (strcmp(what, "generate") == 0)
        return with_generator(request, group, do_generate);
    if (strcmp(what, "update") == 0)
        return with_generator(request, group, do_update);
    if (strcmp(what, "logprobs") == 0 && with && strcmp(with, "trainer") == 0)
        return with_trainer(request, group, do_trainer_logprobs);
    if (strcmp(what, "logprobs") == 0)
        return with_generator(request, group, do_logprobs);
    if (strcmp(what, "train") == 0 || strcmp(what, "init") == 0)
        return with_trainer(request, group, do_train);
    return json_pack("{s:s, s:s}", "error", "?", "message", what);
}

static int run_rank(const json_t *request, int fd, uint32_t rank, uint32_t ranks)
{
    dray__group *group = NULL;
    int code = DRAY_OK;
    if (fd >= 0)
        code = dray__group_open(fd, rank, ranks, 0, &group, &error);
    own_rank = rank;
    if (ranks > 1)
        meeting = fixture_open(&coordinator, "rank", "trainer", rank);
    json_t *answer = code == DRAY_OK ? run(request, group) : failed(code);
    int bad = json_object_get(answer, "error") != NULL;
    if (rank == 0) {
        json_dumpf(answer, stdout, JSON_COMPACT | JSON_REAL_PRECISION(17));
        fflush(stdout);
    }
    dray_close(meeting);
    dray__group_close(group);
    return bad;
}

int main(int argc, char **argv)
{
    json_error_t problem;
    json_t *request = argc == 2 ? json_load_file(argv[1], 0, &problem) : NULL;
    if (!request) {
        fprintf(stderr, "usage: helper_engine REQUEST.json\n");
        return 2;
    }
    uint32_t ranks = (uint32_t)number(request, "ranks", 0);
    int fd = -1;
    if (ranks > 0 && dray__group_create(ranks, 0, &fd, &error) != DRAY_OK)
        return 3;
    if (ranks > 1)
        fixture_fork(&coordinator, NULL);
    for (uint32_t rank = 1; rank < ranks; rank++)
        if (fork() == 0)
            _exit(run_rank(request, fd, rank, ranks));
    int bad = run_rank(request, fd, 0, ranks), status;
    for (uint32_t rank = 1; rank < ranks; rank++)
        bad |= wait(&status) < 0 || status != 0;
    if (ranks > 1)
        fixture_stop(&coordinator);
    return bad;
}
