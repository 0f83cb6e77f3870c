/* Puts real samples, the questions of GSM8K with a model's solutions ($DRAY_GSM8K, the folder with
 * example_model_solutions.jsonl), through four tasks of two ranks each, balanced by tokens. */
#include "queue/one_fixture.h"

#include <jansson.h>
#include <sys/mman.h>

enum { SAMPLES_MAX = 2048, TASKS = 4, RANKS = 2, CLAIM = 256, CAP = 1024 };

typedef struct sample {
    char *question, *truth, *solution;
    bool correct;
    uint32_t question_words, words; /* words stand for tokens */
} sample;

static sample samples[SAMPLES_MAX];
static uint32_t sample_count;

/* What the ranks say of themselves. */
typedef struct seen {
    double tokens;
    uint32_t rows, micros;
} seen;

static seen (*ledger)[RANKS]; /* [task][rank], shared */

static const char *const c_question[] = {"question"};
static const char *const c_rollout[] = {"response", "log_prob"};
static const char *const c_reward_in[] = {"response", "truth"};
static const char *const c_reward[] = {"reward", "verdict"};
static const char *const c_response[] = {"response"};
static const char *const c_reference[] = {"ref_log_prob"};
static const char *const c_actor[] = {"question",     "response", "log_prob",
                                      "ref_log_prob", "reward",   "verdict"};
static const char *const c_advantage[] = {"advantage"};

#define COLUMNS(list) list, sizeof(list) / sizeof *(list)

static const dray_queue_task tasks[TASKS] = {
    {"rollout", COLUMNS(c_question), COLUMNS(c_rollout)},
    {"reward", COLUMNS(c_reward_in), COLUMNS(c_reward)},
    {"reference", COLUMNS(c_response), COLUMNS(c_reference)},
    {"actor", COLUMNS(c_actor), COLUMNS(c_advantage)},
};

static dray_queue *open_samples(dray_context *context)
{
    dray_queue *queue;
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = tasks;
    options.task_count = TASKS;
    OK(dray_queue_open(context, "gsm8k", &options, &queue, &error));
    return queue;
}

static uint32_t words_of(const char *text)
{
    uint32_t words = 0;
    for (bool inside = false; *text; text++) {
        bool blank = *text == ' ' || *text == '\n';
        words += !blank && !inside;
        inside = !blank;
    }
    return words;
}

static bool read_samples(void)
{
    const char *folder = getenv("DRAY_GSM8K");
    char path[4096], *line = NULL;
    size_t capacity = 0;
    if (!folder)
        return false;
    snprintf(path, sizeof path, "%s/example_model_solutions.jsonl", folder);
    FILE *file = fopen(path, "r");
    if (!file)
        return false;
    while (sample_count < SAMPLES_MAX && getline(&line, &capacity, file) > 0) {
        json_t *json = json_loads(line, 0, NULL);
        const json_t *model = json_object_get(json, "175b_verification");
        sample *s = &samples[sample_count++];
        s->question = strdup(json_string_value(json_object_get(json, "question")));
        s->truth = strdup(json_string_value(json_object_get(json, "ground_truth")));
        s->solution = strdup(json_string_value(json_object_get(model, "solution")));
        s->correct = json_is_true(json_object_get(model, "is_correct"));
        s->question_words = words_of(s->question);
        s->words = words_of(s->solution);
        json_decref(json);
    }
    free(line);
    fclose(file);
    return sample_count > 0;
}

/* ---- columns of a batch ---------------------------------------------------------------------- */

typedef const char *(*text_fn)(const sample *s);

static const char *question_of(const sample *s)
{
    return s->question;
}

static const char *truth_of(const sample *s)
{
    return s->truth;
}

static const char *solution_of(const sample *s)
{
    return s->solution;
}

static const char *verdict_of(const sample *s)
{
    return s->correct ? "right" : "wrong";
}

static void set_text(dray_batch *batch, const char *name, text_fn text)
{
    uint32_t rows = dray_batch_rows(batch);
    uint64_t offsets[CLAIM + 1] = {0};
    for (uint32_t i = 0; i < rows; i++)
        offsets[i + 1] = offsets[i] + strlen(text(&samples[dray_batch_row(batch, i)->slot]));
    char *values = malloc(offsets[rows] + 1);
    for (uint32_t i = 0; i < rows; i++)
        memcpy(values + offsets[i], text(&samples[dray_batch_row(batch, i)->slot]),
               offsets[i + 1] - offsets[i]);
    dray_column_data column = {.name = name,
                               .dtype = DRAY_U8,
                               .content = DRAY_CONTENT_STRING,
                               .ndim = 1,
                               .offsets = offsets,
                               .values = values};
    OK(dray_batch_set(batch, &column, &error));
    free(values);
}

/* A number a word of the solution. */
static void set_floats(dray_batch *batch, const char *name, float base)
{
    uint32_t rows = dray_batch_rows(batch);
    uint64_t offsets[CLAIM + 1] = {0};
    for (uint32_t i = 0; i < rows; i++)
        offsets[i + 1] = offsets[i] + samples[dray_batch_row(batch, i)->slot].words;
    float *values = malloc((offsets[rows] + 1) * sizeof *values);
    for (uint32_t i = 0; i < rows; i++)
        for (uint64_t k = offsets[i]; k < offsets[i + 1]; k++)
            values[k] = base + (float)dray_batch_row(batch, i)->slot;
    dray_column_data column = {
        .name = name, .dtype = DRAY_F32, .ndim = 1, .offsets = offsets, .values = values};
    OK(dray_batch_set(batch, &column, &error));
    free(values);
}

static void check_text(dray_batch *batch, const char *name, text_fn text)
{
    dray_column column;
    OK(dray_batch_column(batch, name, &column, &error));
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++) {
        const char *expected = text(&samples[dray_batch_row(batch, i)->slot]);
        assert_int_equal(column.lengths[i], strlen(expected));
        assert_memory_equal(column.cells[i], expected, column.lengths[i]);
    }
}

static void check_floats(dray_batch *batch, const char *name, float base)
{
    dray_column column;
    OK(dray_batch_column(batch, name, &column, &error));
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++) {
        uint32_t slot = dray_batch_row(batch, i)->slot;
        assert_int_equal(column.lengths[i], samples[slot].words);
        for (uint64_t k = 0; k < column.lengths[i]; k++)
            assert_true(((const float *)column.cells[i])[k] == base + (float)slot);
    }
}

/* ---- tasks ----------------------------------------------------------------------------------- */

static void roll_out(dray_batch *batch)
{
    check_text(batch, "question", question_of);
    set_text(batch, "response", solution_of);
    set_floats(batch, "log_prob", 1);
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
        OK(dray_batch_set_tag(batch, i, DRAY_TAG_TOKENS,
                              samples[dray_batch_row(batch, i)->slot].words, &error));
}

static void score(dray_batch *batch)
{
    check_text(batch, "response", solution_of);
    check_text(batch, "truth", truth_of);
    set_floats(batch, "reward", 2);
    set_text(batch, "verdict", verdict_of);
}

static void refer(dray_batch *batch)
{
    check_text(batch, "response", solution_of);
    set_floats(batch, "ref_log_prob", 3);
}

static void train(dray_batch *batch)
{
    check_text(batch, "question", question_of);
    check_text(batch, "verdict", verdict_of);
    check_floats(batch, "log_prob", 1);
    check_floats(batch, "reward", 2);
    check_floats(batch, "ref_log_prob", 3);
    set_floats(batch, "advantage", 4);
}

static void (*const works[TASKS])(dray_batch *) = {roll_out, score, refer, train};

static void count_micros(const dray_batch *batch, seen *out)
{
    for (uint32_t m = 0; m < dray_batch_micros(batch); m++) {
        uint32_t first, rows;
        double sum = 0;
        OK(dray_batch_micro(batch, m, &first, &rows, &error));
        assert_true(rows > 0);
        for (uint32_t i = first; i < first + rows; i++) {
            double tokens;
            OK(dray_batch_tag(batch, i, DRAY_TAG_TOKENS, &tokens, &error));
            sum += tokens * dray_batch_weight(batch, i);
            out->rows += dray_batch_weight(batch, i) > 0;
        }
        assert_true(sum <= CAP);
        out->tokens += sum;
        out->micros++;
    }
}

static void consume(void *argument)
{
    const int *who = argument; /* task, rank */
    dray_context *context = fixture_context(&f, tasks[who[0]].name);
    dray_queue *queue = open_samples(context);
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = tasks[who[0]].name;
    o.count = CLAIM;
    o.policy = DRAY_POLICY_TOKEN_BALANCED;
    o.dp_rank = (uint32_t)who[1];
    o.dp_size = RANKS;
    o.token_cap = CAP;
    dray_batch *batch = NULL, *next;
    int rc = dray_queue_claim(queue, &o, &batch, &error);
    while (!rc) {
        count_micros(batch, &ledger[who[0]][who[1]]);
        works[who[0]](batch);
        rc = dray_batch_commit_claim(batch, &o, 1, NULL, &next, &error);
        COMMIT(batch);
        batch = next;
    }
    FAILS(DRAY_EEND, rc);
    leave(queue, context);
}

/* Rows one by one: each has tokens of its own. */
static void insert_all(dray_queue *queue)
{
    for (uint32_t i = 0; i < sample_count; i++) {
        const sample *s = &samples[i];
        uint64_t question[2] = {0, strlen(s->question)}, truth[2] = {0, strlen(s->truth)};
        dray_column_data columns[] = {
            {"question", DRAY_U8, DRAY_CONTENT_STRING, 1, {0}, question, s->question, 0},
            {"truth", DRAY_U8, DRAY_CONTENT_STRING, 1, {0}, truth, s->truth, 0},
        };
        dray_tag tag = {DRAY_TAG_TOKENS, s->question_words};
        dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
        o.partition = "test";
        o.rows = 1;
        o.columns = columns;
        o.column_count = 2;
        o.tags = &tag;
        o.tag_count = 1;
        OK(dray_queue_insert(queue, &o, NULL, &error));
    }
    OK(dray_queue_seal(queue, "test", sample_count, &error));
    OK(dray_queue_end(queue, &error));
}

TEST_WITHIN(test_balanced_ranks, up, down)
{
    ledger = mmap(NULL, TASKS * sizeof *ledger, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                  -1, 0);
    int who[TASKS * RANKS][2];
    pid_t pids[TASKS * RANKS];
    dray_context *context = fixture_context(&f, "driver");
    dray_queue *queue = open_samples(context);
    for (int i = 0; i < TASKS * RANKS; i++) {
        who[i][0] = i / RANKS;
        who[i][1] = i % RANKS;
        pids[i] = child(consume, who[i]);
    }
    insert_all(queue);
    for (int i = 0; i < TASKS * RANKS; i++)
        join(pids[i]);
    OK(dray_queue_wait(queue, "test", NULL, 0, &error));
    for (int t = 0; t < TASKS; t++) {
        const seen *a = &ledger[t][0], *b = &ledger[t][1];
        double difference = (a->tokens - b->tokens) / (a->tokens + b->tokens) * 2;
        printf("%-9s %.0f + %.0f tokens (%.2f %%), %u + %u rows, %u + %u micro-batches\n",
               tasks[t].name, a->tokens, b->tokens, difference * 100, a->rows, b->rows, a->micros,
               b->micros);
        assert_int_equal(a->rows + b->rows, sample_count);
        assert_true(difference < 0.03 && difference > -0.03);
    }
    munmap(ledger, TASKS * sizeof *ledger);
    leave(queue, context);
}

int main(void)
{
    if (!read_samples()) {
        fprintf(stderr, "DRAY_GSM8K names no folder with example_model_solutions.jsonl\n");
        return 77;
    }
    int failed = suite_run(NULL, NULL);
    for (uint32_t i = 0; i < sample_count; i++) {
        free(samples[i].question);
        free(samples[i].truth);
        free(samples[i].solution);
    }
    return failed;
}
