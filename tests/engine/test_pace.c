/* Tests engine and trainer when work is a sleep. Lengths have the stated distribution, cuts do not
 * change them, sleeps add up, and the trainer's parameters stay. */
#include "engine/pace.h"
#include "suite.h"

#include "base/clock.h"
#include "engine/small.h"
#include "engine/trainer.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static void near(const char *what, double value, double expected, double within)
{
    if (!(fabs(value - expected) <= within))
        fail_msg("%s: %.9g, expected %.9g", what, value, expected);
}

/* Moments of 20,000 groups of two. */
TEST(lengths)
{
    const dray__pace pace = {
        .tokens = 1000, .variation = 0.3, .correlation = 0.6, .tail = 1, .seed = 3, .group = 2};
    enum { GROUPS = 20000 };
    double sum = 0, squares = 0, logs = 0, log_squares = 0, products = 0;
    for (uint64_t i = 0; i < GROUPS; i++) {
        double a = (double)dray__pace_length(&pace, 7ULL << 32 | (2 * i)),
               b = (double)dray__pace_length(&pace, 7ULL << 32 | (2 * i + 1));
        sum += a + b;
        squares += a * a + b * b;
        logs += log(a) + log(b);
        log_squares += log(a) * log(a) + log(b) * log(b);
        products += log(a) * log(b);
    }
    double mean = sum / (2 * GROUPS), deviation = sqrt(squares / (2 * GROUPS) - mean * mean);
    double log_mean = logs / (2 * GROUPS);
    double variance = log_squares / (2 * GROUPS) - log_mean * log_mean;
    near("mean", mean, 1000, 10); /* five deviations of the mean of 40,000 */
    near("variation", deviation / mean, 0.3, 0.01);
    near("correlation", (products / GROUPS - log_mean * log_mean) / variance, 0.6, 0.03);
}

TEST(tails)
{
    const dray__pace pace = {.tokens = 8, .tail = 100, .tail_share = 0.02, .seed = 5, .group = 4};
    uint32_t longer = 0;
    for (uint64_t i = 0; i < 50000; i++) {
        uint64_t length = dray__pace_length(&pace, i);
        assert_true(length == 8 || length == 800);
        assert_int_equal(length, dray__pace_length(&pace, i));
        longer += length == 800;
    }
    near("tail", longer / 50000., 0.02, 0.0032);
    const dray__pace least = {.tokens = 1, .variation = 3, .tail = 1, .group = 1};
    for (uint64_t i = 0; i < 1000; i++)
        assert_true(dray__pace_length(&least, i) >= 1);
}

/* Never shorter; and what a sleep is too long is taken off the next. */
TEST(sleeps)
{
    dray__pace_spend(1e-4);
    int64_t begin = dray__now();
    for (int i = 0; i < 200; i++)
        dray__pace_spend(5e-4);
    double took = (double)(dray__now() - begin) / (double)DRAY__SECOND;
    assert_true(took > 0.0795); /* 0.1 without 20 ms at most that the sleep before was late */
    begin = dray__now();
    dray__pace_spend(0);
    dray__pace_spend(-1);
    assert_true(dray__now() - begin < DRAY__SECOND);
}

/* A response in one piece, and one that is taken out after every third token and added again. */
TEST(cuts)
{
    const dray__pace pace = {.tokens = 17, .variation = 0.5, .tail = 1, .seed = 9, .group = 1};
    dray_model_config c = small_config();
    dray__generator *generator;
    dray__sampler *sampler;
    dray__sampler_options options = {.temperature = 1, .eos_token = -1};
    c.max_positions = 64;
    options.slots = 1;
    options.eos_token = 258;
    assert_int_equal(dray__generator_open(&c, NULL, &generator, NULL), 0);
    dray__generator_pace(generator, &pace);
    assert_int_equal(dray__sampler_open(generator, &options, &sampler, NULL), 0);
    for (uint64_t stream = 0; stream < 20; stream++) {
        int32_t prompt[3] = {1, 2, 3}, made[64];
        uint64_t prompts[2] = {0, 3}, responses[2] = {0, 0};
        uint32_t slot;
        for (int pieces = 0;; pieces++) {
            dray__sampler_rows rows = {.rows = {1, {prompt, prompts}, {made, responses}},
                                       .streams = &stream,
                                       .max_new_tokens = 60};
            assert_int_equal(dray__sampler_add(sampler, &rows, &slot, NULL), 0);
            for (int i = 0; i < 3 && dray__sampler_running(sampler); i++)
                assert_int_equal(dray__sampler_step(sampler, NULL), 0);
            dray__sampled got = dray__sampler_look(sampler, slot);
            memcpy(made + responses[1], got.tokens, got.count * sizeof(*made));
            responses[1] += got.count;
            uint8_t finish = got.finish;
            dray__sampler_remove(sampler, slot);
            if (finish != DRAY__FINISH_NOT_YET)
                break;
            assert_true(pieces < 30);
        }
        uint64_t drawn = dray__pace_length(&pace, stream);
        assert_int_equal(responses[1], drawn < 60 ? drawn : 60);
        for (uint64_t i = 0; i < responses[1]; i++)
            assert_true(i + 1 == drawn ? made[i] == 258 : made[i] == '0' + (int32_t)((i + 3) % 10));
    }
    dray__sampler_close(sampler);
    dray__generator_close(generator);
}

/* Log-probs are -1 and gradients 0: ratios are 1, and a step leaves the parameters as they are. */
TEST(training)
{
    const dray__pace pace = {.score_seconds = 1e-2, .train_seconds = 2e-2, .group = 1};
    dray_model_config c = small_config();
    dray__trainer *trainer;
    dray__trainer_options options = {.eos_token = -1};
    assert_int_equal(dray__trainer_open(&c, NULL, &options, &trainer, NULL), 0);
    assert_int_equal(dray__trainer_init(trainer, 0.02, 0.02, 1, NULL), 0);
    dray__trainer_pace(trainer, &pace);
    size_t bytes = dray_region_bytes(dray__trainer_regions(trainer)[0]);
    void *base = dray_region_base(dray__trainer_regions(trainer)[0]), *before = malloc(bytes);
    memcpy(before, base, bytes);
    int32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    uint64_t prompts[5] = {0, 1, 2, 3, 4}, responses[5] = {0, 2, 4, 6, 8};
    float logprobs[8], entropy[8], advantages[4] = {1, -1, 0.5, 2};
    dray__policy_batch batch = {0};
    batch.sequences = (dray__sequences){4, {tokens, prompts}, {tokens, responses}, NULL};
    batch.advantages = advantages;
    int64_t begin = dray__now();
    assert_int_equal(dray__trainer_logprobs(trainer, &batch.sequences, 1, logprobs, entropy, NULL),
                     0);
    for (int i = 0; i < 8; i++)
        assert_true(logprobs[i] == -1 && entropy[i] == 0);
    assert_int_equal(dray__trainer_accumulate_policy(trainer, &batch, NULL), 0);
    /* 4 of 10 ms and 4 of 20, less what the sleep before was late */
    assert_true(dray__now() - begin >= 99 * DRAY__MILLISECOND);
    dray__step_options step = {0};
    dray__step_stats stats;
    step.learning_rate = 0.1;
    assert_int_equal(dray__trainer_step(trainer, &step, &stats, NULL), 0);
    assert_true(stats.tokens == 8 && stats.gradient_norm == 0);
    assert_memory_equal(before, base, bytes);
    free(before);
    dray__trainer_close(trainer);
}

SUITE(NULL, NULL)
