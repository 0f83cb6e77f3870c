/* The demo's recipe through the reference engine alone, without queue and weight updates: what the
 * arithmetic of a step costs, and whether it learns. A model reverses 4 digits: supervised warm-up
 * until the sampled reward reaches 0.1, then GRPO. The curve goes to stderr.
 *
 * DRAY_BENCH_SEEDS: how many seeds (1); DRAY_BENCH_RANKS: processes that train and generate (1). */
#include "base/clock.h"
#include "base/random.h"
#include "bench.h"
#include "engine/generator.h"
#include "engine/tokenizer.h"
#include "engine/trainer.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { DIGITS = 4, PROMPT = DIGITS + 1, ANSWER = DIGITS + 1, NUMBERS = 10000, HELD_OUT = 1024 };
enum { PROMPTS = 32, SAMPLES = 8, ROWS = PROMPTS * SAMPLES, SPLITS = 4, WARM_UP_BATCH = 64 };

/* What the first rank found; in memory that its parent reads. */
typedef struct outcome {
    uint32_t warm_up_steps;
    double start, accuracy, step_s, generate_s, score_s, train_s;
} outcome;

typedef struct run {
    outcome *outcome;
    uint64_t seed;
    uint32_t rank, world, steps;
    dray__group *group;
    dray__trainer *trainer;
    dray__generator *generator;
    int numbers[NUMBERS]; /* shuffled: the first HELD_OUT are never trained on */
    int64_t generate_ns, score_ns, train_ns, move_ns;
} run;

static void check(int code, const dray_error *error)
{
    if (code == DRAY_OK)
        return;
    fprintf(stderr, "bench_reverse: %s: %s\n", dray_error_name(code), error->message);
    exit(1);
}

static void write_prompt(int number, int32_t *tokens)
{
    char text[16];
    snprintf(text, sizeof text, "%04d=", number);
    for (int i = 0; i < PROMPT; i++)
        tokens[i] = (unsigned char)text[i];
}

static void write_answer(int number, int32_t *tokens)
{
    for (int i = 0; i < DIGITS; i++, number /= 10)
        tokens[i] = '0' + number % 10;
    tokens[DIGITS] = DRAY__TOKEN_EOS;
}

static float reward(int number, const int32_t *tokens, uint64_t count)
{
    int32_t right[ANSWER];
    write_answer(number, right);
    return count == ANSWER && memcmp(tokens, right, sizeof right) == 0;
}

static int draw_number(const run *r, uint64_t phase, uint64_t i)
{
    double unit = dray__random_unit(r->seed, phase, i);
    return r->numbers[HELD_OUT + (int)(unit * (NUMBERS - HELD_OUT))];
}

static void shuffle(run *r)
{
    for (int i = 0; i < NUMBERS; i++)
        r->numbers[i] = i;
    for (int i = NUMBERS - 1; i > 0; i--) {
        int j = (int)(dray__random_unit(7, 1, (uint64_t)i) * (i + 1)), other = r->numbers[j];
        r->numbers[j] = r->numbers[i];
        r->numbers[i] = other;
    }
}

/* ---- weights from trainer to generator: whole tensors, as no real run would ------------------ */

static void put_block(const dray_layout *layout, const dray_block *block, char *base, float *whole,
                      int into_whole)
{
    const dray_tensor_info *tensor = dray_layout_tensor(layout, block->tensor);
    int64_t columns = tensor->ndim > 1 ? block->extent[1] : 1;
    int64_t width = tensor->ndim > 1 ? tensor->shape[1] : 1;
    int64_t first = tensor->ndim > 1 ? block->start[1] : 0;
    for (int64_t i = 0; i < block->extent[0]; i++) {
        float *a = (float *)(void *)(base + block->offset + (uint64_t)(i * block->stride[0]));
        float *b = whole + (block->start[0] + i) * width + first;
        memcpy(into_whole ? b : a, into_whole ? a : b, (size_t)columns * sizeof *a);
    }
}

static void move_weights(run *r)
{
    int64_t from = dray__now();
    const dray_layout *mine = dray__trainer_layout(r->trainer);
    const dray_layout *engine = dray__generator_layout(r->generator);
    dray_error error;
    for (uint32_t i = 0; i < dray_layout_tensor_count(mine); i++) {
        const dray_tensor_info *tensor = dray_layout_tensor(mine, i);
        if (tensor->alias_of >= 0)
            continue;
        uint64_t floats = (uint64_t)tensor->shape[0];
        floats *= tensor->ndim > 1 ? (uint64_t)tensor->shape[1] : 1;
        float *whole = calloc(floats, sizeof *whole);
        for (uint32_t j = 0; j < dray_layout_block_count(mine); j++)
            if (dray_layout_block(mine, j)->tensor == i)
                put_block(mine, dray_layout_block(mine, j),
                          dray_region_base(dray__trainer_regions(r->trainer)[0]), whole, 1);
        if (r->group)
            check(dray__group_all_reduce_f32(r->group, whole, floats, -1, &error), &error);
        uint32_t index;
        check(dray_layout_find(engine, tensor->name, &index, &error), &error);
        for (uint32_t j = 0; j < dray_layout_block_count(engine); j++)
            if (dray_layout_block(engine, j)->tensor == index)
                put_block(engine, dray_layout_block(engine, j),
                          dray_region_base(dray__generator_regions(r->generator)[0]), whole, 0);
        free(whole);
    }
    r->move_ns += dray__now() - from;
}

/* ---- the recipe ------------------------------------------------------------------------------ */

static void generate(run *r, const int *numbers, uint32_t rows, double temperature, uint64_t stream,
                     dray__generation *out)
{
    int64_t from = dray__now();
    int32_t *prompts = malloc((size_t)rows * PROMPT * sizeof *prompts);
    uint64_t *offsets = malloc((rows + 1) * sizeof *offsets);
    uint64_t *streams = malloc(rows * sizeof *streams);
    for (uint32_t i = 0; i <= rows; i++)
        offsets[i] = (uint64_t)i * PROMPT;
    for (uint32_t i = 0; i < rows; i++) {
        write_prompt(numbers[i], prompts + (size_t)i * PROMPT);
        streams[i] = stream + i;
    }
    dray__generate_options options = DRAY__GENERATE_OPTIONS_INIT;
    options.rows = rows;
    options.prompt = (dray__tokens){prompts, offsets};
    options.streams = streams;
    options.seed = r->seed;
    options.temperature = temperature;
    options.max_new_tokens = ANSWER;
    options.eos_token = DRAY__TOKEN_EOS;
    dray_error error;
    check(dray__generate(r->generator, &options, out, &error), &error);
    free(prompts);
    free(offsets);
    free(streams);
    r->generate_ns += dray__now() - from;
}

static double mean_reward(const int *numbers, const dray__generation *g, float *rewards)
{
    double sum = 0;
    for (uint32_t i = 0; i < g->rows; i++) {
        float one =
            reward(numbers[i], g->tokens + g->offsets[i], g->offsets[i + 1] - g->offsets[i]);
        sum += one;
        if (rewards)
            rewards[i] = one;
    }
    return sum / g->rows;
}

static double evaluate(run *r)
{
    dray__generation g;
    generate(r, r->numbers, HELD_OUT, 0, 0, &g);
    double accuracy = mean_reward(r->numbers, &g, NULL);
    dray__generation_free(&g);
    return accuracy;
}

static double sampled_reward(run *r, uint64_t stream)
{
    int numbers[512];
    for (uint64_t i = 0; i < 512; i++)
        numbers[i] = draw_number(r, 3, stream * 512 + i);
    dray__generation g;
    generate(r, numbers, 512, 1, UINT64_C(1) << 40 | stream * 512, &g);
    double mean = mean_reward(numbers, &g, NULL);
    dray__generation_free(&g);
    return mean;
}

static uint32_t warm_up(run *r)
{
    int32_t prompts[WARM_UP_BATCH * PROMPT], answers[WARM_UP_BATCH * ANSWER];
    uint64_t prompt_at[WARM_UP_BATCH + 1], answer_at[WARM_UP_BATCH + 1];
    for (uint64_t i = 0; i <= WARM_UP_BATCH; i++) {
        prompt_at[i] = i * PROMPT;
        answer_at[i] = i * ANSWER;
    }
    dray__sequences batch = {WARM_UP_BATCH, {prompts, prompt_at}, {answers, answer_at}, NULL};
    dray__step_options step = DRAY__STEP_OPTIONS_INIT;
    step.learning_rate = 1e-3;
    step.max_norm = 1;
    dray_error error;
    for (uint32_t n = 1;; n++) {
        for (uint64_t i = 0; i < WARM_UP_BATCH; i++) {
            int number = draw_number(r, 1, n * (uint64_t)WARM_UP_BATCH + i);
            write_prompt(number, prompts + (size_t)i * PROMPT);
            write_answer(number, answers + i * ANSWER);
        }
        dray__step_stats stats;
        check(dray__trainer_accumulate_sft(r->trainer, &batch, &error), &error);
        check(dray__trainer_step(r->trainer, &step, &stats, &error), &error);
        if (n % 10)
            continue;
        move_weights(r);
        double sampled = sampled_reward(r, n);
        if (r->rank == 0 && n % 100 == 0)
            fprintf(stderr, "warm-up %u: loss %.3f sampled reward %.3f\n", n, stats.loss, sampled);
        if (sampled >= 0.1 || n >= 5000)
            return n;
    }
}

static double learning_rate(const run *r, uint32_t step)
{
    double rise = fmin(1, (step + 1) / 10.0), done = (double)step / r->steps;
    return 6e-4 * rise * (1 - 0.95 * done);
}

static void optimise(run *r, uint32_t step, const int32_t *prompts, const dray__generation *g,
                     const float *advantages, const float *old, dray__step_stats *stats)
{
    int64_t from = dray__now();
    uint64_t prompt_at[ROWS + 1];
    for (uint64_t i = 0; i <= ROWS; i++)
        prompt_at[i] = i * PROMPT;
    dray_error error;
    for (int split = 0; split < SPLITS; split++) {
        uint32_t first = (uint32_t)split * ROWS / SPLITS;
        dray__policy_batch batch = DRAY__POLICY_BATCH_INIT;
        batch.sequences = (dray__sequences){
            ROWS / SPLITS, {prompts, prompt_at + first}, {g->tokens, g->offsets + first}, NULL};
        batch.advantages = advantages + first;
        batch.old_logprobs = old + g->offsets[first];
        check(dray__trainer_accumulate_policy(r->trainer, &batch, &error), &error);
        dray__step_options options = DRAY__STEP_OPTIONS_INIT;
        options.learning_rate = learning_rate(r, step);
        options.max_norm = 1;
        check(dray__trainer_step(r->trainer, &options, stats, &error), &error);
    }
    r->train_ns += dray__now() - from;
}

static double grpo_step(run *r, uint32_t step, dray__step_stats *stats)
{
    int numbers[ROWS];
    int32_t prompts[ROWS * PROMPT];
    uint64_t prompt_at[ROWS + 1];
    for (uint32_t i = 0; i < ROWS; i++) {
        numbers[i] = draw_number(r, 2, step * (uint64_t)PROMPTS + i / SAMPLES);
        write_prompt(numbers[i], prompts + (size_t)i * PROMPT);
        prompt_at[i] = (uint64_t)i * PROMPT;
    }
    prompt_at[ROWS] = (uint64_t)ROWS * PROMPT;
    dray__generation g;
    generate(r, numbers, ROWS, 1, step * (uint64_t)ROWS, &g);
    float advantages[ROWS];
    double mean = mean_reward(numbers, &g, advantages);
    for (uint32_t i = 0; i < ROWS; i += SAMPLES) {
        float sum = 0;
        for (uint32_t j = i; j < i + SAMPLES; j++)
            sum += advantages[j];
        for (uint32_t j = i; j < i + SAMPLES; j++)
            advantages[j] -= sum / SAMPLES;
    }
    int64_t from = dray__now();
    dray_error error;
    float *old = malloc((g.offsets[ROWS] + 1) * sizeof *old);
    dray__sequences all = {ROWS, {prompts, prompt_at}, {g.tokens, g.offsets}, NULL};
    check(dray__trainer_logprobs(r->trainer, &all, 1, old, NULL, &error), &error);
    r->score_ns += dray__now() - from;
    optimise(r, step, prompts, &g, advantages, old, stats);
    move_weights(r);
    free(old);
    dray__generation_free(&g);
    return mean;
}

static void learn(run *r)
{
    dray_error error;
    int64_t start = dray__now();
    check(dray__trainer_init(r->trainer, r->seed, &error), &error);
    outcome found = {.warm_up_steps = warm_up(r)};
    found.start = evaluate(r);
    if (r->rank == 0)
        fprintf(stderr, "seed %" PRIu64 ": %u warm-up steps in %.1f s, greedy %.3f\n", r->seed,
                found.warm_up_steps, (double)(dray__now() - start) / 1e9, found.start);
    r->generate_ns = r->score_ns = r->train_ns = r->move_ns = 0;
    start = dray__now();
    double recent = 0;
    for (uint32_t step = 0; step < r->steps; step++) {
        dray__step_stats stats;
        recent += grpo_step(r, step, &stats);
        if ((step + 1) % 40 == 0 && r->rank == 0)
            fprintf(stderr, "step %u: reward %.3f entropy %.3f norm %.3f clipped %.3f\n", step + 1,
                    recent / 40, stats.entropy, stats.gradient_norm, stats.clip_fraction);
        recent = (step + 1) % 40 ? recent : 0;
    }
    double steps = r->steps * 1e9;
    found.step_s = (double)(dray__now() - start) / steps;
    found.generate_s = (double)r->generate_ns / steps;
    found.score_s = (double)r->score_ns / steps;
    found.train_s = (double)r->train_ns / steps;
    found.accuracy = evaluate(r);
    if (r->rank == 0)
        *r->outcome = found;
}

static void run_rank(run *r, int fd)
{
    dray_error error;
    dray_model_config config = {.family = "qwen2",
                                .vocab_size = DRAY__BYTE_VOCABULARY,
                                .hidden_size = 64,
                                .intermediate_size = 192,
                                .layers = 2,
                                .heads = 4,
                                .kv_heads = 2,
                                .head_dim = 16,
                                .max_positions = 64,
                                .rms_norm_eps = 1e-6,
                                .rope_theta = 10000,
                                .qkv_bias = 1,
                                .tied = 1,
                                .dtype = DRAY_F32};
    if (fd >= 0)
        check(dray__group_open(fd, r->rank, r->world, 0, &r->group, &error), &error);
    check(dray__trainer_open(&config, r->group, NULL, &r->trainer, &error), &error);
    check(dray__generator_open(&config, r->group, &r->generator, &error), &error);
    shuffle(r);
    learn(r);
    dray__generator_close(r->generator);
    dray__trainer_close(r->trainer);
    dray__group_close(r->group);
}

static void run_seed(run *r)
{
    int fd = -1;
    dray_error error;
    if (r->world > 1)
        check(dray__group_create(r->world, 0, &fd, &error), &error);
    for (r->rank = 0; r->rank < r->world; r->rank++)
        if (fork() == 0) {
            run_rank(r, fd);
            exit(0);
        }
    for (int status; wait(&status) > 0;)
        if (status != 0)
            exit(1);
    if (fd >= 0)
        close(fd);
}

static uint32_t setting(const char *name, uint32_t absent)
{
    const char *text = getenv(name);
    return text ? (uint32_t)strtoul(text, NULL, 10) : absent;
}

int main(int argc, char **argv)
{
    bench *b = bench_open(argc, argv, "reverse");
    static run r;
    r.outcome =
        mmap(NULL, sizeof *r.outcome, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (r.outcome == MAP_FAILED)
        bench_die(b, "no shared memory");
    r.world = setting("DRAY_BENCH_RANKS", 1);
    r.steps = bench_quick(b) ? 20 : 400;
    uint32_t seeds = bench_quick(b) ? 1 : setting("DRAY_BENCH_SEEDS", 1);
    double worst = 1;
    for (r.seed = 1; r.seed <= seeds; r.seed++) {
        run_seed(&r);
        fprintf(stderr, "seed %" PRIu64 ": greedy %.3f\n", r.seed, r.outcome->accuracy);
        worst = fmin(worst, r.outcome->accuracy);
    }
    bench_row(b, "step of 256 sequences", r.outcome->step_s, "s", 0, 0.15);
    bench_row(b, "- sampling", r.outcome->generate_s, "s", 0, 0);
    bench_row(b, "- old log-probs", r.outcome->score_s, "s", 0, 0);
    bench_row(b, "- four updates", r.outcome->train_s, "s", 0, 0);
    bench_row(b, "wrong of 1,024 held out, worst seed", (1 - worst) * HELD_OUT, "rows", 0,
              bench_quick(b) ? 0 : 0.1 * HELD_OUT);
    return bench_close(b);
}
