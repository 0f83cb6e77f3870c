/* Tests the sampler with rows that come and go while others advance, that are cut and continued,
 * and whose weights change meanwhile. */
#include "engine/sampler.h"
#include "suite.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "engine/small.h"

enum { NEW_TOKENS = 12, SEED = 3 };

/* What a test has of each row: its prompt, and its response as far as it is made. */
typedef struct story {
    int32_t prompts[64], response[ROWS][NEW_TOKENS];
    float logprobs[ROWS][NEW_TOKENS];
    int32_t versions[ROWS][NEW_TOKENS];
    uint64_t offsets[ROWS + 1], count[ROWS];
    uint8_t finish[ROWS];
} story;

static dray__sampler *open_sampler(dray__generator *g, uint32_t slots, int32_t eos)
{
    dray__sampler_options options = {.temperature = 1, .eos_token = -1};
    dray__sampler *s;
    dray_error error;
    options.slots = slots;
    options.seed = SEED;
    options.eos_token = eos;
    if (dray__sampler_open(g, &options, &s, &error) != DRAY_OK)
        fail_msg("%s", error.message);
    return s;
}

/* Row `row` of the story, with what it has. */
static int add(dray__sampler *s, const story *t, uint64_t row, uint32_t *slot, dray_error *error)
{
    uint64_t made[2] = {0, t->count[row]};
    dray__sampler_rows rows = {
        .rows = {1, {t->prompts, t->offsets + row}, {t->response[row], made}},
        .streams = &row,
        .max_new_tokens = NEW_TOKENS};
    return dray__sampler_add(s, &rows, slot, error);
}

/* Takes the row's tokens out of the sampler. */
static void take(dray__sampler *s, story *t, uint32_t row, uint32_t slot)
{
    dray__sampled made = dray__sampler_look(s, slot);
    uint64_t had = t->count[row];
    memcpy(t->response[row] + had, made.tokens, made.count * sizeof *made.tokens);
    memcpy(t->logprobs[row] + had, made.logprobs, made.count * sizeof *made.logprobs);
    memcpy(t->versions[row] + had, made.versions, made.count * sizeof *made.versions);
    t->count[row] += made.count;
    t->finish[row] = made.finish;
    dray__sampler_remove(s, slot);
}

/* All rows at once, which end at `eos`. */
static void generate_whole(dray__generator *g, int32_t eos, story *t)
{
    generating options = ANY_TOKENS;
    dray__generation out;
    memset(t, 0, sizeof *t);
    make_rows(t->prompts, t->offsets);
    options.what.rows.rows = ROWS;
    options.what.rows.prompt = (dray__tokens){t->prompts, t->offsets};
    options.how.seed = SEED;
    options.what.max_new_tokens = NEW_TOKENS;
    options.how.eos_token = eos;
    assert_int_equal(generate(g, &options, &out, NULL), DRAY_OK);
    for (uint32_t i = 0; i < ROWS; i++) {
        t->count[i] = out.offsets[i + 1] - out.offsets[i];
        t->finish[i] = out.finish[i];
        memcpy(t->response[i], out.tokens + out.offsets[i], t->count[i] * sizeof *out.tokens);
        memcpy(t->logprobs[i], out.logprobs + out.offsets[i], t->count[i] * sizeof(float));
    }
    dray__generation_free(&out);
}

/* An end token with which rows end at different lengths. */
static int32_t some_eos(dray__generator *g)
{
    story whole;
    generate_whole(g, -1, &whole);
    return whole.response[4][5];
}

static void begin(story *t)
{
    memset(t, 0, sizeof *t);
    make_rows(t->prompts, t->offsets);
}

static void assert_same_rows(const story *found, const story *expected)
{
    for (uint32_t i = 0; i < ROWS; i++) {
        assert_int_equal(found->count[i], expected->count[i]);
        assert_int_equal(found->finish[i], expected->finish[i]);
        assert_memory_equal(found->response[i], expected->response[i],
                            expected->count[i] * sizeof(int32_t));
        for (uint64_t k = 0; k < expected->count[i]; k++)
            assert_true(fabsf(found->logprobs[i][k] - expected->logprobs[i][k]) < 1e-4f);
    }
}

/* Whenever a slot is free, the next row takes it; a row that has got `budget` tokens since it was
 * added is cut, and comes again before new ones. */
static void run_continuously(dray__generator *g, uint32_t slots, uint64_t budget, int32_t eos,
                             story *t)
{
    dray__sampler *s = open_sampler(g, slots, eos);
    uint32_t slot_of[ROWS], queue[ROWS * NEW_TOKENS], first = 0, last = 0;
    bool inside[ROWS] = {false};
    for (uint32_t i = 0; i < ROWS; i++)
        queue[last++] = i;
    begin(t);
    do {
        for (; first < last && dray__sampler_free_slots(s) > 0; first++) {
            assert_int_equal(add(s, t, queue[first], &slot_of[queue[first]], NULL), DRAY_OK);
            inside[queue[first]] = true;
        }
        assert_int_equal(dray__sampler_step(s, NULL), DRAY_OK);
        for (uint32_t i = 0; i < ROWS; i++) {
            if (!inside[i])
                continue;
            dray__sampled made = dray__sampler_look(s, slot_of[i]);
            bool goes_on = made.finish == DRAY__FINISH_NOT_YET;
            if (goes_on && made.count < budget)
                continue;
            take(s, t, i, slot_of[i]);
            inside[i] = false;
            if (goes_on)
                queue[--first] = i;
        }
    } while (first < last || dray__sampler_running(s) > 0);
    assert_int_equal(dray__sampler_free_slots(s), slots);
    dray__sampler_close(s);
}

TEST(rows_come_and_go_while_others_advance)
{
    dray__generator *g = open_filled(NULL);
    int32_t eos = some_eos(g);
    story whole, found;
    generate_whole(g, eos, &whole);
    for (uint32_t slots = 1; slots <= ROWS; slots += 2) {
        run_continuously(g, slots, UINT64_MAX, eos, &found);
        assert_same_rows(&found, &whole);
    }
    dray__generator_close(g);
}

TEST(a_cut_row_goes_on_as_if_uncut)
{
    dray__generator *g = open_filled(NULL);
    int32_t eos = some_eos(g);
    story whole, found;
    generate_whole(g, eos, &whole);
    for (uint64_t budget = 1; budget <= 5; budget += 2) {
        run_continuously(g, 4, budget, eos, &found);
        assert_same_rows(&found, &whole);
    }
    dray__generator_close(g);
}

static void change_weights(dray__generator *g)
{
    dray_region *region = dray__generator_regions(g)[0];
    float *values = dray_region_base(region);
    for (uint64_t i = 0; i < dray_region_bytes(region) / sizeof *values; i++)
        values[i] += 0.03f * cosf(1.3f * (float)i);
}

/* The largest difference between the log-probs of tokens [from, to) of all rows and those of a
 * forward pass of the present weights over the same sequences. */
static float worst_gap(dray__generator *g, const story *t, uint64_t from, uint64_t to)
{
    int32_t response[ROWS * NEW_TOKENS];
    uint64_t offsets[ROWS + 1];
    float scores[ROWS * NEW_TOKENS], worst = 0;
    for (uint32_t i = 0; i <= ROWS; i++)
        offsets[i] = (uint64_t)i * NEW_TOKENS;
    for (uint32_t i = 0; i < ROWS; i++)
        memcpy(response + offsets[i], t->response[i], sizeof t->response[i]);
    dray__sequences rows = {ROWS, {t->prompts, t->offsets}, {response, offsets}, NULL};
    assert_int_equal(dray__generator_logprobs(g, &rows, 1, scores, NULL, NULL), DRAY_OK);
    for (uint32_t i = 0; i < ROWS; i++)
        for (uint64_t k = from; k < to; k++)
            worst = fmaxf(worst, fabsf(scores[offsets[i] + k] - t->logprobs[i][k]));
    return worst;
}

/* Five tokens, other weights, and the rest. */
static void run_over_change(dray__generator *g, bool renew, story *t)
{
    enum { BEFORE = 5 };
    uint32_t slots[ROWS];
    dray__sampler *s = open_sampler(g, ROWS, -1);
    begin(t);
    fill(g);
    dray__sampler_renew(s, 7);
    for (uint32_t i = 0; i < ROWS; i++)
        assert_int_equal(add(s, t, i, &slots[i], NULL), DRAY_OK);
    for (int i = 0; i < NEW_TOKENS; i++) {
        if (i == BEFORE)
            change_weights(g);
        if (i == BEFORE && renew)
            dray__sampler_renew(s, 8);
        assert_int_equal(dray__sampler_step(s, NULL), DRAY_OK);
    }
    for (uint32_t i = 0; i < ROWS; i++) {
        take(s, t, i, slots[i]);
        for (int k = 0; k < NEW_TOKENS; k++)
            assert_int_equal(t->versions[i][k], renew && k >= BEFORE ? 8 : 7);
    }
    dray__sampler_close(s);
    assert_true((worst_gap(g, t, BEFORE, NEW_TOKENS) < 1e-4f) == renew);
    fill(g);
    assert_true(worst_gap(g, t, 0, BEFORE) < 1e-4f);
}

/* A stale prefix cache (NeMo-RL #4018, SkyRL #2246) is seen: log-probs are those of a fresh
 * forward.
 */
TEST(new_weights_take_new_caches)
{
    dray__generator *g = open_filled(NULL);
    story t;
    run_over_change(g, true, &t);
    run_over_change(g, false, &t); /* what the comparison sees where the caches are kept */
    dray__generator_close(g);
}

TEST(bad_rows_are_refused_whole)
{
    dray__generator *g = open_filled(NULL);
    dray__sampler *s;
    dray__sampler_options options = {.temperature = 1, .eos_token = -1};
    dray_error error;
    uint32_t slots[ROWS];
    options.temperature = -1;
    assert_int_equal(dray__sampler_open(g, &options, &s, &error), DRAY_EINVALID);
    s = open_sampler(g, 2, 9);
    assert_int_equal(dray__sampler_step(s, &error), DRAY_OK);

    int32_t tokens[64] = {1, 2, 3}, ended[3] = {4, 5, 9};
    uint64_t prompts[3] = {0, 1, 2}, streams[3] = {0}, none[3] = {0}, last[3] = {0, 0, 3};
    uint64_t long_prompts[3] = {0, 1, 41}, full[3] = {0, 0, 3};
    const struct {
        const uint64_t *prompts, *offsets;
        const int32_t *response;
        uint32_t most;
        const char *says;
    } cases[] = {
        {prompts, last, ended, 8, "end token"},
        {prompts, full, tokens, 3, "may have 3"},
        {prompts, none, tokens, 0, "may have 0"},
        {long_prompts, none, tokens, 8, "40 positions"},
        {prompts, last, (int32_t[]){1, 2, 1000}, 8, "response"},
        {none, none, tokens, 8, "prompt"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        dray__sampler_rows rows = {
            .rows = {2, {tokens, cases[i].prompts}, {cases[i].response, cases[i].offsets}},
            .streams = streams,
            .max_new_tokens = cases[i].most};
        assert_int_equal(dray__sampler_add(s, &rows, slots, &error), DRAY_EINVALID);
        if (!strstr(error.message, cases[i].says))
            fail_msg("%s", error.message);
        assert_int_equal(dray__sampler_free_slots(s), 2);
        assert_int_equal(dray__sampler_running(s), 0);
    }
    dray__sampler_rows rows = {
        .rows = {2, {tokens, prompts}, {0}}, .streams = streams, .max_new_tokens = 1};
    assert_int_equal(dray__sampler_add(s, &rows, slots, &error), DRAY_OK);
    assert_int_equal(dray__sampler_add(s, &rows, slots, &error), DRAY_EFULL);
    assert_int_equal(dray__sampler_step(s, &error), DRAY_OK);
    assert_int_equal(dray__sampler_free_slots(s), 0); /* until they are taken out */
    assert_int_equal(dray__sampler_running(s), 0);
    dray__sampler_remove(s, slots[0]);
    assert_int_equal(dray__sampler_free_slots(s), 1);
    dray__sampler_close(s);
    dray__generator_close(g);
}

SUITE(NULL, NULL)
