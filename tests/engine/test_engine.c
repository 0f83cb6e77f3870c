/* Tests sampling, training and their failures, in one process and over forked ranks. The Python
 * tests compare the numbers; here the same calls run under the sanitizers. */
#include "base/clock.h"
#include "engine/tokenizer.h"
#include "engine/trainer.h"
#include "suite.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/small.h"

static generating sampling(const int32_t *tokens, const uint64_t *offsets)
{
    generating options = ANY_TOKENS;
    options.what.rows.rows = ROWS;
    options.what.rows.prompt = (dray__tokens){tokens, offsets};
    options.how.seed = 3;
    options.what.max_new_tokens = 12;
    return options;
}

static void assert_row(const dray__generation *a, uint32_t row, const dray__generation *b,
                       uint32_t other)
{
    uint64_t count = a->offsets[row + 1] - a->offsets[row];
    assert_int_equal(count, b->offsets[other + 1] - b->offsets[other]);
    assert_memory_equal(a->tokens + a->offsets[row], b->tokens + b->offsets[other],
                        count * sizeof *a->tokens);
    assert_int_equal(a->finish[row], b->finish[other]);
}

TEST(a_row_does_not_depend_on_its_neighbours)
{
    dray__generator *g = open_filled(NULL);
    int32_t tokens[64];
    uint64_t offsets[ROWS + 1];
    make_rows(tokens, offsets);
    generating options = sampling(tokens, offsets);
    dray__generation all, one;
    assert_int_equal(generate(g, &options, &all, NULL), DRAY_OK);
    for (uint64_t row = 0; row < ROWS; row++) {
        options.what.rows.rows = 1;
        options.what.rows.prompt.offsets = offsets + row;
        options.what.streams = &row;
        assert_int_equal(generate(g, &options, &one, NULL), DRAY_OK);
        assert_row(&all, (uint32_t)row, &one, 0);
        dray__generation_free(&one);
    }
    dray__generation_free(&all);
    dray__generator_close(g);
}

TEST(rows_end_where_they_should)
{
    dray__generator *g = open_filled(NULL);
    int32_t tokens[64];
    uint64_t offsets[ROWS + 1];
    make_rows(tokens, offsets);
    generating options = sampling(tokens, offsets);
    dray__generation out;
    uint32_t most[ROWS];
    for (uint32_t i = 0; i < ROWS; i++)
        most[i] = 1 + 10 * i; /* the last ones meet the model's 40 positions first */
    options.what.row_max_new_tokens = most;
    assert_int_equal(generate(g, &options, &out, NULL), DRAY_OK);
    for (uint32_t row = 0; row < ROWS; row++) {
        uint64_t prompt = row + 1, limit = most[row];
        if (prompt + limit > 40)
            limit = 40 - prompt;
        assert_int_equal(out.offsets[row + 1] - out.offsets[row], limit);
        assert_int_equal(out.finish[row], DRAY__FINISH_LENGTH);
    }
    int32_t eos = out.tokens[out.offsets[5] + 4];
    dray__generation_free(&out);
    options.how.eos_token = eos;
    assert_int_equal(generate(g, &options, &out, NULL), DRAY_OK);
    assert_int_equal(out.finish[5], DRAY__FINISH_EOS);
    assert_int_equal(out.tokens[out.offsets[6] - 1], eos);
    assert_true(out.offsets[6] - out.offsets[5] <= 5);
    dray__generation_free(&out);
    options.what.rows.rows = 0;
    assert_int_equal(generate(g, &options, &out, NULL), DRAY_OK);
    assert_int_equal(out.offsets[0], 0);
    dray__generation_free(&out);
    dray__generator_close(g);
}

TEST(bad_requests_are_refused)
{
    dray__generator *g = open_filled(NULL);
    int32_t tokens[64];
    uint64_t offsets[ROWS + 1], empty[2] = {3, 3}, backwards[2] = {5, 3}, full[2] = {0, 40};
    make_rows(tokens, offsets);
    dray__generation out;
    generating options = sampling(tokens, offsets);
    options.how.temperature = -1;
    assert_int_equal(generate(g, &options, &out, NULL), DRAY_EINVALID);
    options.how.temperature = NAN;
    assert_int_equal(generate(g, &options, &out, NULL), DRAY_EINVALID);
    options = sampling(tokens, offsets);
    options.what.max_new_tokens = 0;
    assert_int_equal(generate(g, &options, &out, NULL), DRAY_EINVALID);
    options = sampling(tokens, offsets);
    const uint64_t *const wrong[] = {empty, backwards, full};
    for (size_t i = 0; i < 3; i++) {
        options = sampling(tokens, wrong[i]);
        options.what.rows.rows = 1;
        assert_int_equal(generate(g, &options, &out, NULL), DRAY_EINVALID);
    }
    uint64_t returns[3] = {5, 7, 3}; /* ends before it starts: no tokens in all, it seems */
    options = sampling(NULL, returns);
    options.what.rows.rows = 2;
    assert_int_equal(generate(g, &options, &out, NULL), DRAY_EINVALID);
    tokens[4] = DRAY__BYTE_VOCABULARY;
    options = sampling(tokens, offsets);
    assert_int_equal(generate(g, &options, &out, NULL), DRAY_EINVALID);
    dray__sequences s = {1, {tokens, offsets}, {tokens, offsets}, NULL};
    float logprobs[64];
    assert_int_equal(dray__generator_logprobs(g, &s, 0, logprobs, NULL, NULL), DRAY_EINVALID);
    assert_int_equal(dray__generator_logprobs(g, &s, 1, logprobs, NULL, NULL), DRAY_OK);
    assert_true(logprobs[0] < 0);
    dray__generator_close(g);
}

TEST(configurations_are_checked)
{
    dray_model_config good = small_config();
    dray_error error;
    assert_int_equal(dray__engine_config_check(&good, &error), DRAY_OK);
    for (int i = 0; i < 8; i++) {
        dray_model_config c = good;
        const struct {
            int64_t *field;
            int64_t value;
        } changes[] = {{&c.vocab_size, 0}, {&c.layers, -1},           {&c.heads, 3},
                       {&c.head_dim, 7},   {&c.max_positions, 0},     {&c.hidden_size, INT64_MAX},
                       {&c.kv_heads, 0},   {&c.intermediate_size, -8}};
        *changes[i].field = changes[i].value;
        dray__generator *g;
        dray__trainer *t;
        assert_int_equal(dray__generator_open(&c, NULL, &g, &error), DRAY_EINVALID);
        assert_int_equal(dray__trainer_open(&c, NULL, NULL, &t, &error), DRAY_EINVALID);
    }
    dray_model_config c = good;
    c.o_bias = 1;
    assert_int_equal(dray__engine_config_check(&c, &error), DRAY_EUNSUPPORTED);
    c = good;
    c.mlp_bias = 1;
    assert_int_equal(dray__engine_config_check(&c, &error), DRAY_EUNSUPPORTED);
    c = good;
    strcpy(c.family, "gpt2");
    assert_int_equal(dray__engine_config_check(&c, &error), DRAY_EUNSUPPORTED);
    assert_non_null(strstr(error.message, "gpt2"));
    assert_int_equal(dray__engine_config_load("qwen2.5-0.5b", &c, &error), DRAY_OK);
    assert_int_equal(dray__engine_config_load("/nowhere", &c, &error), DRAY_ENOENT);
}

TEST(bytes_are_tokens)
{
    const char text[] = "r\xC3\xBC"
                        "ckw\xFF"
                        "arts";
    dray__tokenizer *t;
    int32_t *tokens, more[32];
    size_t count, size;
    char *back;
    assert_int_equal(dray__tokenizer_open("", &t, NULL), DRAY_OK);
    assert_int_equal(dray__tokenizer_size(t), DRAY__BYTE_VOCABULARY);
    assert_int_equal(dray__tokenizer_end(t), DRAY__TOKEN_EOS);
    assert_int_equal(dray__tokenizer_encode(t, text, sizeof text, true, &tokens, &count, NULL),
                     DRAY_OK);
    assert_int_equal(count, sizeof text + 1);
    assert_int_equal(tokens[0], DRAY__TOKEN_BOS);
    memcpy(more, tokens, count * sizeof *tokens);
    more[count++] = DRAY__TOKEN_EOS;
    more[count++] = DRAY__TOKEN_PAD;
    more[count++] = -1;
    assert_int_equal(dray__tokenizer_decode(t, more, count, &back, &size, NULL), DRAY_OK);
    assert_int_equal(size, sizeof text);
    assert_memory_equal(back, text, sizeof text);
    free(tokens);
    free(back);
    dray__tokenizer_close(t);
}

/* ---- the trainer ----------------------------------------------------------------------------- */

static void copy_tree(const char *from, const char *to)
{
    char command[512];
    snprintf(command, sizeof command, "cp -r '%s' '%s'", from, to);
    assert_int_equal(system(command), 0);
}

static void remove_tree(const char *path)
{
    char command[512];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    assert_int_equal(system(command), 0);
}

/* One step of each loss; the sums of what came out. */
static int train(dray__trainer *t, dray__step_stats *stats, dray_error *error)
{
    int32_t tokens[64];
    uint64_t offsets[ROWS + 1];
    float logprobs[64], advantages[ROWS];
    make_rows(tokens, offsets);
    for (int i = 0; i < ROWS; i++)
        advantages[i] = (float)(i % 3) - 1;
    dray__step_options step = {0};
    step.learning_rate = 1e-2;
    step.max_norm = 1;
    dray__policy_batch batch = {0};
    batch.sequences = (dray__sequences){ROWS, {tokens, offsets}, {tokens, offsets}, NULL};
    batch.advantages = advantages;
    batch.old_logprobs = batch.ref_logprobs = logprobs;
    batch.kl_coefficient = 0.1;
    int code = dray__trainer_logprobs(t, &batch.sequences, 1, logprobs, NULL, error);
    if (code == DRAY_OK)
        code = dray__trainer_accumulate_sft(t, &batch.sequences, error);
    if (code == DRAY_OK)
        code = dray__trainer_step(t, &step, stats, error);
    if (code == DRAY_OK)
        code = dray__trainer_accumulate_policy(t, &batch, error);
    if (code == DRAY_OK)
        code = dray__trainer_step(t, &step, stats, error);
    return code;
}

TEST(a_checkpoint_that_cannot_be_read_changes_nothing)
{
    char folder[] = "/tmp/dray-engine-XXXXXX", good[64], bad[64], cut[160];
    assert_non_null(mkdtemp(folder));
    snprintf(good, sizeof good, "%s/step-000000", folder);
    snprintf(bad, sizeof bad, "%s/bad", folder);
    dray_model_config config = small_config();
    dray__trainer *t;
    dray_error error;
    dray__step_stats stats;
    assert_int_equal(dray__trainer_open(&config, NULL, NULL, &t, &error), DRAY_OK);
    assert_int_equal(dray__trainer_init(t, 0.02, 0.02, 1, &error), DRAY_OK);
    assert_int_equal(train(t, &stats, &error), DRAY_OK);
    dray_checkpoint_options options = DRAY_CHECKPOINT_OPTIONS_INIT;
    if (dray__trainer_save(t, NULL, folder, &options, true, &error) != DRAY_OK)
        fail_msg("%s", error.message);
    assert_int_equal(train(t, &stats, &error), DRAY_OK);
    dray_region *region = dray__trainer_regions(t)[0];
    size_t bytes = dray_region_bytes(region);
    void *before = malloc(bytes);
    assert_non_null(before);
    memcpy(before, dray_region_base(region), bytes);

    copy_tree(good, bad); /* whole parameters, but no moments */
    snprintf(cut, sizeof cut, "%s/optimizer/model.safetensors", bad);
    assert_int_equal(truncate(cut, 1000), 0);
    assert_int_not_equal(dray__trainer_restore(t, bad, &error), DRAY_OK);
    assert_int_not_equal(dray__trainer_load(t, "/nowhere", &error), DRAY_OK);
    assert_memory_equal(before, dray_region_base(region), bytes);
    assert_int_equal(train(t, &stats, &error), DRAY_OK);
    assert_int_equal(stats.step, 6); /* behind those that it had made */

    assert_int_equal(dray__trainer_restore(t, good, &error), DRAY_OK);
    assert_int_equal(train(t, &stats, &error), DRAY_OK);
    assert_int_equal(stats.step, 4);
    assert_memory_equal(before, dray_region_base(region), bytes); /* bit-identical */
    free(before);
    dray__trainer_close(t);
    remove_tree(folder);
}

/* ---- over ranks ------------------------------------------------------------------------------ */

/* Where ranks say that they have joined, for tests that kill them after that. */
static int joined[2] = {-1, -1};

static pid_t fork_rank(int fd, uint32_t rank, uint32_t world,
                       int (*function)(dray__group *, void *), void *argument)
{
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dray__group *group;
    if (dray__group_open(fd, rank, world, 20 * DRAY__SECOND, &group, NULL) != DRAY_OK)
        _exit(100);
    if (joined[1] >= 0 && write(joined[1], "", 1) != 1)
        _exit(101);
    int status = function(group, argument);
    dray__group_close(group);
    _exit(status);
}

static int run_ranks(uint32_t world, int (*function)(dray__group *, void *), void *argument)
{
    int fd, bad = 0, status;
    pid_t pids[4] = {0};
    assert_int_equal(dray__group_create(world, 0, &fd, NULL), DRAY_OK);
    for (uint32_t rank = 0; rank < world; rank++)
        pids[rank] = fork_rank(fd, rank, world, function, argument);
    for (uint32_t rank = 0; rank < world; rank++) {
        waitpid(pids[rank], &status, 0);
        bad |= status;
    }
    close(fd);
    return bad;
}

/* Leaves what it computed in memory shared with the parent, one page a rank. */
static int work(dray__group *group, void *argument)
{
    dray_model_config config = small_config();
    dray__generator *g = NULL;
    dray__trainer *t = NULL;
    dray_error error;
    int32_t tokens[64];
    uint64_t offsets[ROWS + 1];
    make_rows(tokens, offsets);
    generating options = sampling(tokens, offsets);
    dray__generation out = {0};
    dray__step_stats *stats = (void *)((char *)argument + (size_t)4096 * dray__group_rank(group));
    int code = dray__generator_open(&config, group, &g, &error);
    if (code == DRAY_OK) {
        fill(g);
        code = generate(g, &options, &out, &error);
    }
    if (code == DRAY_OK)
        code = dray__trainer_open(&config, group, NULL, &t, &error);
    if (code == DRAY_OK)
        code = dray__trainer_init(t, 0.02, 0.02, 1, &error);
    if (code == DRAY_OK)
        code = train(t, stats, &error);
    if (code == DRAY_OK) {
        memcpy(stats + 1, out.tokens, out.offsets[ROWS] * sizeof *out.tokens);
        memcpy((char *)(stats + 1) + 1024, out.logprobs, out.offsets[ROWS] * sizeof(float));
    }
    if (code != DRAY_OK)
        fprintf(stderr, "rank %u: %s\n", dray__group_rank(group), error.message);
    dray__generation_free(&out);
    dray__generator_close(g);
    dray__trainer_close(t);
    return code != DRAY_OK;
}

#define PAGES ((size_t)8 * 4096)

TEST(ranks_agree_and_runs_repeat)
{
    char *pages = mmap(NULL, PAGES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(pages, MAP_FAILED);
    assert_int_equal(run_ranks(2, work, pages), 0);
    assert_int_equal(run_ranks(2, work, pages + PAGES / 4), 0);
    for (size_t i = 1; i < 4; i++)
        assert_memory_equal(pages, pages + i * (PAGES / 8), 4096);
    munmap(pages, PAGES);
}

/* Works on and on; ends well when it hears that the other rank died. */
static int work_until_dead(dray__group *group, void *argument)
{
    (void)argument;
    dray_model_config config = small_config();
    dray__generator *g;
    dray__trainer *t;
    dray_error error;
    int32_t tokens[64];
    uint64_t offsets[ROWS + 1];
    make_rows(tokens, offsets);
    generating options = sampling(tokens, offsets);
    dray__step_stats stats;
    if (dray__generator_open(&config, group, &g, &error) != DRAY_OK ||
        dray__trainer_open(&config, group, NULL, &t, &error) != DRAY_OK)
        return 1;
    int code = dray__trainer_init(t, 0.02, 0.02, 1, &error);
    while (code == DRAY_OK) {
        dray__generation out;
        code = generate(g, &options, &out, &error);
        if (code == DRAY_OK) {
            dray__generation_free(&out);
            code = train(t, &stats, &error);
        }
    }
    dray__generator_close(g);
    dray__trainer_close(t);
    return code == DRAY_EDEAD && strstr(error.message, "rank 1") ? 0 : 2;
}

TEST(a_dead_peer_ends_the_work)
{
    assert_int_equal(pipe(joined), 0);
    for (int round = 0; round < 6; round++) {
        int fd, status;
        char byte;
        assert_int_equal(dray__group_create(2, 0, &fd, NULL), DRAY_OK);
        pid_t first = fork_rank(fd, 0, 2, work_until_dead, NULL);
        pid_t second = fork_rank(fd, 1, 2, work_until_dead, NULL);
        for (int i = 0; i < 2; i++)
            assert_int_equal(read(joined[0], &byte, 1), 1);
        usleep((useconds_t)(7919 * round));
        kill(second, SIGKILL);
        waitpid(second, &status, 0);
        waitpid(first, &status, 0);
        assert_int_equal(status, 0);
        close(fd);
    }
    close(joined[0]);
    close(joined[1]);
    joined[1] = -1;
}

static dray__trainer *trainer_of(const dray_model_config *config)
{
    dray__trainer *t;
    dray_error error;
    if (dray__trainer_open(config, NULL, NULL, &t, &error) != DRAY_OK ||
        dray__trainer_init(t, 0.02, 0.02, 1, &error) != DRAY_OK)
        fail_msg("%s", error.message);
    return t;
}

/* A layer whose heads are far wider than its feed-forward network. */
TEST(a_narrow_model_learns)
{
    dray_model_config config = small_config();
    strcpy(config.family, "qwen3");
    config.qkv_bias = 0;
    config.qk_norm = 1;
    config.intermediate_size = 1;
    config.head_dim = 64;
    dray_error error;
    dray__trainer *t = trainer_of(&config);
    const int32_t prompt[] = {65, 66}, response[] = {67};
    const uint64_t prompts[] = {0, 2}, responses[] = {0, 1};
    dray__sequences one = {1, {prompt, prompts}, {response, responses}, NULL};
    dray__step_options step = {0};
    dray__step_stats stats = {0};
    step.learning_rate = 0.01;
    double first = 0;
    for (int i = 0; i < 5; i++) {
        if (dray__trainer_accumulate_sft(t, &one, &error) ||
            dray__trainer_step(t, &step, &stats, &error))
            fail_msg("%s", error.message);
        first = i ? first : stats.loss;
    }
    assert_true(stats.loss < first);
    dray__trainer_close(t);
}

/* A reference that is measured only does not reach the gradients, however far away it is. */
TEST(what_is_only_measured_does_not_count)
{
    dray_model_config config = small_config();
    dray_error error;
    dray__trainer *t = trainer_of(&config);
    const int32_t prompt[] = {65, 66}, response[] = {67};
    const uint64_t prompts[] = {0, 2}, responses[] = {0, 1};
    const float advantage = 1, old = -5, reference = 1e4f;
    dray__policy_batch batch = {0};
    batch.sequences = (dray__sequences){1, {prompt, prompts}, {response, responses}, NULL};
    batch.advantages = &advantage;
    batch.old_logprobs = &old;
    batch.ref_logprobs = &reference;
    dray__step_options step = {0};
    dray__step_stats stats = {0};
    step.learning_rate = 0.01;
    if (dray__trainer_accumulate_policy(t, &batch, &error) ||
        dray__trainer_step(t, &step, &stats, &error))
        fail_msg("%s", error.message);
    assert_true(isfinite(stats.loss) && isinf(stats.kl));
    dray__trainer_close(t);
}

SUITE(NULL, NULL)
