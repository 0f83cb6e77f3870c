/* Tests the task `rollout` over a queue: micro-batches, rows that come and go, rows that are cut
 * and claimed again, weights that change meanwhile, and rows that call a tool. */
#include "base/clock.h"
#include "engine/sampler.h"
#include "queue/one_fixture.h"
#include "run/engine/rollout.h"
#include "run/job/settings.h"
#include "suite.h"

#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/small.h"

enum { NEW_TOKENS = 12, STEP = 1 };

static const char *const rollout_needs[] = {"prompt"};
static const char *const rollout_writes[] = {"response", "rollout_log_prob", "response_version",
                                             "response_mask"};

/* An engine, alone, with a queue of ROWS prompts. */
typedef struct scene {
    dray__host host;
    dray__job *job;
    dray__generator *generator;
    dray__rollout *rollout;
    int32_t prompts[64];
    uint64_t offsets[ROWS + 1];
} scene;

static void insert_prompts(scene *s)
{
    dray_column_data prompt = {.name = "prompt",
                               .dtype = DRAY_I32,
                               .ndim = 1,
                               .offsets = s->offsets,
                               .values = s->prompts};
    dray_tag step = {DRAY__TAG_STEP, STEP};
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = "step-000001";
    o.rows = ROWS;
    o.columns = &prompt;
    o.column_count = 1;
    o.tags = &step;
    o.tag_count = 1;
    OK(dray_queue_insert(s->host.queue, &o, NULL, &error));
    OK(dray_queue_seal(s->host.queue, o.partition, ROWS, &error));
}

/* tool: NULL: the job has none. */
static void scene_open_with(scene *s, const char *name, int32_t batching, int64_t partial,
                            const dray__job_tool *tool)
{
    uint32_t columns = tool ? 4 : 3;
    const dray_queue_task two_tasks[] = {
        {.name = "rollout",
         .needs = rollout_needs,
         .needs_count = 1,
         .writes = rollout_writes,
         .writes_count = columns},
        {.name = "reader", .needs = rollout_writes, .needs_count = columns},
    };
    *s = (scene){.generator = open_filled(NULL)};
    OK(dray__settings_default(&s->job, &error));
    s->job->seed = 3;
    s->job->rollout.prompts = ROWS;
    s->job->rollout.samples = 1;
    s->job->rollout.micro_batch = 4;
    s->job->rollout.max_new_tokens = NEW_TOKENS;
    s->job->rollout.batching = batching;
    s->job->rollout.partial_tokens = partial;
    if (tool) {
        free(s->job->tool.call);
        free(s->job->tool.command);
        s->job->tool = *tool;
        s->job->tool.call = strdup(tool->call);
        s->job->tool.command = strdup(tool->command);
    }
    s->host.job = s->job;
    OK(dray__job_tokenizer(s->job, &s->host.tokenizer, &error));
    s->host.context = fixture_context(&f, name);
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = two_tasks;
    options.task_count = 2;
    options.max_attempts = 2; /* a cut is no failure */
    OK(dray_queue_open(s->host.context, name, &options, &s->host.queue, &error));
    OK(dray__rollout_open(&s->host, s->generator, &s->rollout, &error));
    dray__rollout_renew(s->rollout, 7);
    make_rows(s->prompts, s->offsets);
    insert_prompts(s);
}

static void scene_open(scene *s, const char *name, int32_t batching, int64_t partial)
{
    scene_open_with(s, name, batching, partial, NULL);
}

static void scene_close(scene *s)
{
    dray__rollout_close(s->rollout);
    dray_queue_close(s->host.queue);
    dray_close(s->host.context);
    dray__generator_close(s->generator);
    dray__tokenizer_close(s->host.tokenizer);
    dray__settings_free(s->job);
}

/* Claims what there is room for; false: nothing is ready. */
static bool claim_and_take(scene *s, dray_batch **batch)
{
    dray_claim_options o;
    uint32_t room = dray__rollout_room(s->rollout);
    if (!room)
        return false;
    dray__task_claim(&s->host, dray__task_find("rollout"), &(dray__task_work){0}, room, &o);
    o.timeout_ns = 0;
    int rc = dray_queue_claim(s->host.queue, &o, batch, &error);
    if (rc == DRAY_ETIMEDOUT)
        return false;
    OK(rc);
    OK(dray__rollout_take(s->rollout, *batch, STEP, &error));
    return true;
}

/* One turn of what the host's loop does; false: nothing is left to do. */
static bool continuous_turn(scene *s)
{
    dray_batch *batch;
    while (claim_and_take(s, &batch)) {
    }
    if (!dray__rollout_busy(s->rollout))
        return false;
    OK(dray__rollout_turn(s->rollout, &error));
    return true;
}

static bool closed_batch(scene *s)
{
    dray_batch *batch;
    if (!claim_and_take(s, &batch))
        return false;
    OK(dray__rollout_drain(s->rollout, &error));
    OK(dray_batch_commit(batch, &error));
    dray_batch_free(batch);
    return true;
}

static void generate_all(scene *s)
{
    while (s->job->rollout.batching == DRAY__BATCHING_CLOSED ? closed_batch(s)
                                                             : continuous_turn(s)) {
    }
}

/* All rows as the next task reads them, by slot. */
static dray_batch *read_all(scene *s, dray_column columns[3])
{
    dray_batch *batch;
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = "reader";
    o.count = ROWS;
    o.policy = DRAY_POLICY_ORDERED;
    OK(dray_queue_claim(s->host.queue, &o, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), ROWS);
    for (int i = 0; i < 3; i++)
        OK(dray_batch_column(batch, rollout_writes[i], &columns[i], &error));
    for (uint32_t i = 0; i < ROWS; i++) {
        assert_int_equal(columns[1].lengths[i], columns[0].lengths[i]);
        assert_int_equal(columns[2].lengths[i], columns[0].lengths[i]);
        double tokens = 0;
        OK(dray_batch_tag(batch, i, DRAY_TAG_TOKENS, &tokens, &error));
        assert_true(tokens == (double)(s->offsets[i + 1] - s->offsets[i] + columns[0].lengths[i]));
    }
    return batch;
}

static void make_whole(scene *s, uint32_t first, uint32_t rows, dray__generation *out)
{
    uint64_t streams[ROWS];
    for (uint32_t i = 0; i < rows; i++)
        streams[i] = (uint64_t)STEP << 32 | (first + i);
    generating options = ANY_TOKENS;
    options.what.rows.rows = rows;
    options.what.rows.prompt = (dray__tokens){s->prompts, s->offsets + first};
    options.what.streams = streams;
    options.how.seed = 3;
    options.what.max_new_tokens = NEW_TOKENS;
    options.how.eos_token = DRAY__TOKEN_EOS;
    assert_int_equal(generate(s->generator, &options, out, NULL), DRAY_OK);
}

static void check_tokens(scene *s, bool bits)
{
    dray_column columns[3];
    dray_batch *batch = read_all(s, columns);
    for (uint32_t first = 0, rows; first < ROWS; first += rows) { /* as micro-batches are */
        rows = ROWS - first < 4 ? ROWS - first : 4;
        dray__generation whole;
        make_whole(s, first, rows, &whole);
        for (uint32_t i = 0; i < rows; i++) {
            uint64_t count = whole.offsets[i + 1] - whole.offsets[i];
            assert_int_equal(columns[0].lengths[first + i], count);
            assert_memory_equal(columns[0].cells[first + i], whole.tokens + whole.offsets[i],
                                count * sizeof(int32_t));
            if (bits)
                assert_memory_equal(columns[1].cells[first + i], whole.logprobs + whole.offsets[i],
                                    count * sizeof(float));
        }
        dray__generation_free(&whole);
    }
    dray_batch_free(batch);
}

TEST(rows_are_the_same_however_they_are_made)
{
    static const struct {
        const char *name;
        int32_t batching;
        int64_t partial;
    } cases[] = {{"closed", DRAY__BATCHING_CLOSED, 0},
                 {"closed, cut", DRAY__BATCHING_CLOSED, 3},
                 {"closed, cut at once", DRAY__BATCHING_CLOSED, 1},
                 {"continuous", DRAY__BATCHING_CONTINUOUS, 0},
                 {"continuous, cut", DRAY__BATCHING_CONTINUOUS, 5}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        scene s;
        scene_open(&s, cases[i].name, cases[i].batching, cases[i].partial);
        generate_all(&s);
        check_tokens(&s, i == 0);
        scene_close(&s);
    }
}

static void change_weights(dray__generator *g)
{
    dray_region *region = dray__generator_regions(g)[0];
    float *values = dray_region_base(region);
    for (uint64_t i = 0; i < dray_region_bytes(region) / sizeof *values; i++)
        values[i] += 0.03f * cosf(1.3f * (float)i);
}

/* Log-probs are those of a fresh forward pass of the version that the token says. */
static void check_versions(scene *s, uint32_t *mixed)
{
    dray_column columns[3];
    dray_batch *batch = read_all(s, columns);
    *mixed = 0;
    for (uint32_t i = 0; i < ROWS; i++) {
        float scores[2][NEW_TOKENS];
        uint64_t count = columns[0].lengths[i], response[2] = {0, count};
        const float *found = columns[1].cells[i];
        const int32_t *versions = columns[2].cells[i];
        dray__sequences row = {
            1, {s->prompts, s->offsets + i}, {columns[0].cells[i], response}, NULL};
        fill(s->generator);
        assert_int_equal(dray__generator_logprobs(s->generator, &row, 1, scores[0], NULL, NULL), 0);
        change_weights(s->generator);
        assert_int_equal(dray__generator_logprobs(s->generator, &row, 1, scores[1], NULL, NULL), 0);
        for (uint64_t k = 0; k < count; k++) {
            assert_in_range(versions[k], 7, 8);
            assert_true(!k || versions[k] >= versions[k - 1]);
            assert_true(fabsf(found[k] - scores[versions[k] - 7][k]) < 1e-4f);
        }
        double oldest = 0;
        OK(dray_batch_tag(batch, i, DRAY_TAG_VERSION, &oldest, &error));
        assert_true(oldest == versions[0]);
        *mixed += versions[0] != versions[count - 1];
    }
    dray_batch_free(batch);
}

TEST(weights_change_under_rows)
{
    scene s;
    uint32_t mixed;
    scene_open(&s, "under", DRAY__BATCHING_CONTINUOUS, 0);
    for (int i = 0; i < 5; i++)
        assert_true(continuous_turn(&s));
    change_weights(s.generator);
    dray__rollout_renew(s.rollout, 8);
    generate_all(&s);
    check_versions(&s, &mixed);
    assert_int_equal(mixed, 4); /* those that were under way */
    scene_close(&s);
}

TEST(cut_rows_go_on_with_other_weights)
{
    scene s;
    uint32_t mixed;
    scene_open(&s, "between", DRAY__BATCHING_CLOSED, 5);
    assert_true(closed_batch(&s));
    change_weights(s.generator);
    dray__rollout_renew(s.rollout, 8);
    generate_all(&s);
    check_versions(&s, &mixed);
    assert_int_equal(mixed, 4);
    scene_close(&s);
}

/* What people and other tasks see of cut rows: pieces of as many tokens as a claim gives. */
TEST(cuts_are_pieces)
{
    scene s;
    dray_column columns[3];
    scene_open(&s, "pieces", DRAY__BATCHING_CLOSED, 5);
    generate_all(&s);
    dray_batch *batch = read_all(&s, columns);
    for (uint32_t i = 0; i < ROWS; i++) {
        dray_piece pieces[4];
        uint32_t count;
        uint64_t left = columns[0].lengths[i];
        OK(dray_batch_pieces(batch, "response", i, pieces, 4, &count, &error));
        assert_int_equal(count, (left + 4) / 5);
        for (uint32_t k = 0; k < count; k++, left -= left < 5 ? left : 5) {
            assert_int_equal(pieces[k].elements, left < 5 ? left : 5);
            assert_true(pieces[k].version == 7);
        }
    }
    dray_batch_free(batch);
    scene_close(&s);
}

TEST(what_is_under_way_is_given_back)
{
    scene s;
    scene_open(&s, "back", DRAY__BATCHING_CONTINUOUS, 4);
    for (int round = 0; round < 5; round++) { /* more often than a row may fail */
        for (int i = 0; i < 2; i++)
            assert_true(continuous_turn(&s));
        dray__rollout_close(s.rollout);
        OK(dray__rollout_open(&s.host, s.generator, &s.rollout, &error));
        dray__rollout_renew(s.rollout, 7);
    }
    generate_all(&s);
    check_tokens(&s, false);
    scene_close(&s);
}

/* Rows take every slot that is free in one claim, and each leaves with its last token: those that
 * came with it go on. */
TEST(rows_leave_when_they_are_through)
{
    scene s;
    dray_batch *batch;
    uint32_t claims = 0, turn = 0, left[ROWS] = {0}, found = 0;
    uint64_t lengths[ROWS] = {0};
    scene_open(&s, "leave", DRAY__BATCHING_CONTINUOUS, 0);
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = "reader";
    o.count = ROWS;
    o.up_to = 1;
    o.timeout_ns = 0;
    for (; found < ROWS; turn++) {
        for (; claim_and_take(&s, &batch); claims++) {
        }
        OK(dray__rollout_turn(s.rollout, &error));
        if (dray_queue_claim(s.host.queue, &o, &batch, &error))
            continue;
        dray_column response;
        OK(dray_batch_column(batch, "response", &response, &error));
        for (uint32_t i = 0; i < dray_batch_rows(batch); i++, found++) {
            uint32_t slot = dray_batch_row(batch, i)->slot;
            lengths[slot] = response.lengths[i];
            left[slot] = turn;
        }
        OK(dray_batch_commit(batch, &error));
        dray_batch_free(batch);
    }
    /* Four slots, each taken by the next row once it is free. */
    uint32_t expected = 0, free_at[4] = {0};
    for (uint32_t row = 0, last = UINT32_MAX; row < ROWS; row++) {
        uint32_t slot = 0;
        for (uint32_t i = 1; i < 4; i++)
            slot = free_at[i] < free_at[slot] ? i : slot;
        expected += free_at[slot] != last;
        last = free_at[slot];
        free_at[slot] += (uint32_t)lengths[row];
        assert_int_equal(left[row], free_at[slot] - 1);
    }
    assert_int_equal(claims, expected);
    assert_true(expected < ROWS);
    scene_close(&s);
}

/* ---- a tool ---------------------------------------------------------------------------------- */

enum { TURNS = 3 };
static const char given[] = "ab";

/* Every token of the model is a call here (a job file cannot say that). Behind it, as long as the
 * row has turns, stands what the tool said, or as much of it as the row had room for; nobody
 * sampled that. The rest is what the model says to all before it. */
static void check_turns(scene *s, uint32_t row, const dray_column columns[4])
{
    const int32_t *tokens = columns[0].cells[row], *versions = columns[2].cells[row],
                  *mask = columns[3].cells[row];
    const float *found = columns[1].cells[row];
    uint64_t count = columns[0].lengths[row], response[2] = {0, count}, answer = 2;
    float scores[NEW_TOKENS];
    uint32_t turns = 0;
    dray__sequences sequence = {1, {s->prompts, s->offsets + row}, {tokens, response}, NULL};
    assert_int_equal(dray__generator_logprobs(s->generator, &sequence, 1, scores, NULL, NULL), 0);
    for (uint64_t i = 0; i < count; i++) {
        bool tools = answer < 2;
        assert_int_equal(mask[i], !tools);
        assert_int_equal(versions[i], tools ? -1 : 7);
        assert_true(fabsf(found[i] - (tools ? 0 : scores[i])) < 1e-4f);
        if (tools) {
            assert_int_equal(tokens[i], given[answer++]);
        } else if (turns < TURNS && tokens[i] != DRAY__TOKEN_EOS && i + 1 < count) {
            answer = 0;
            turns++;
        }
    }
    assert_true(turns > 0 || tokens[0] == DRAY__TOKEN_EOS);
}

/* The tokens do not depend on how rows are made, cut, or put back behind the tool's answer. */
TEST(rows_call_a_tool)
{
    static const struct {
        const char *name;
        int32_t batching;
        int64_t partial;
        double seconds; /* that an answer takes */
    } cases[] = {{"tool", DRAY__BATCHING_CLOSED, 0, 0.02},
                 {"tool, at once", DRAY__BATCHING_CLOSED, 0, 0},
                 {"tool, cut", DRAY__BATCHING_CLOSED, 3, 0.01},
                 {"tool, cut at once", DRAY__BATCHING_CLOSED, 1, 0},
                 {"tool, continuous", DRAY__BATCHING_CONTINUOUS, 0, 0.02},
                 {"tool, continuous, cut", DRAY__BATCHING_CONTINUOUS, 5, 0.01}};
    char call[] = "", command[] = "while read -r line; do echo '{\"answer\": \"ab\"}'; done";
    int32_t first[ROWS][NEW_TOKENS];
    uint64_t lengths[ROWS];
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        dray__job_tool tool = {.kind = DRAY__TOOL_COMMAND,
                               .command = command,
                               .call = call,
                               .turns = TURNS,
                               .processes = 2,
                               .timeout_seconds = 20,
                               .max_seconds = cases[i].seconds};
        scene s;
        dray_column columns[4];
        scene_open_with(&s, cases[i].name, cases[i].batching, cases[i].partial, &tool);
        generate_all(&s);
        dray_batch *batch = read_all(&s, columns);
        OK(dray_batch_column(batch, "response_mask", &columns[3], &error));
        for (uint32_t row = 0; row < ROWS; row++) {
            uint64_t bytes = columns[0].lengths[row] * sizeof(int32_t);
            double oldest = 0;
            check_turns(&s, row, columns);
            OK(dray_batch_tag(batch, row, DRAY_TAG_VERSION, &oldest, &error));
            assert_true(oldest == 7);
            if (i == 0) {
                memcpy(first[row], columns[0].cells[row], bytes);
                lengths[row] = columns[0].lengths[row];
            }
            assert_int_equal(columns[0].lengths[row], lengths[row]);
            assert_memory_equal(columns[0].cells[row], first[row], bytes);
        }
        dray_batch_free(batch);
        scene_close(&s);
    }
}

/* A tool that notes each call in a file, as a line, and then runs `commands` for it. */
typedef struct asked {
    char path[32], command[384];
} asked;

static dray__job_tool asked_open(asked *a, const char *commands)
{
    static char call[] = "";
    strcpy(a->path, "/tmp/dray-asked-XXXXXX");
    int fd = mkstemp(a->path);
    assert_true(fd >= 0);
    close(fd);
    snprintf(a->command, sizeof a->command,
             "f=%s; while read -r line; do printf '%%s\\n' \"$line\" >>$f; %s"
             " echo '{\"answer\": \"ab\"}'; done",
             a->path, commands);
    return (dray__job_tool){.kind = DRAY__TOOL_COMMAND,
                            .command = a->command,
                            .call = call,
                            .turns = TURNS,
                            .processes = 4,
                            .timeout_seconds = 20,
                            .max_seconds = 0.02};
}

/* Calls differ by prompt and response: one that is made again is there twice. */
static void check_asked_once(const asked *a)
{
    char lines[64][256];
    uint32_t count = 0;
    FILE *file = fopen(a->path, "r");
    assert_non_null(file);
    while (count < 64 && fgets(lines[count], sizeof lines[count], file)) {
        for (uint32_t i = 0; i < count; i++)
            if (strcmp(lines[i], lines[count]) == 0)
                fail_msg("asked twice: %s", lines[i]);
        count++;
    }
    fclose(file);
    unlink(a->path);
    assert_in_range(count, ROWS, ROWS * TURNS);
}

/* Rows are cut, or begun anew by newer weights, while they wait: the calls go on. */
TEST(calls_outlive_cuts)
{
    for (int anew = 0; anew < 2; anew++) {
        asked a;
        scene s;
        dray_column columns[4];
        dray__job_tool tool = asked_open(&a, "");
        scene_open_with(&s, anew ? "anew" : "cut", DRAY__BATCHING_CONTINUOUS, 0, &tool);
        s.job->update = anew ? DRAY__UPDATE_ANEW : DRAY__UPDATE_IN_FLIGHT;
        dray__rollout_close(s.rollout);
        OK(dray__rollout_open(&s.host, s.generator, &s.rollout, &error));
        dray__rollout_renew(s.rollout, anew ? 6 : 7);
        for (int turn = 0; continuous_turn(&s); turn++) {
            if (turn > 8 || turn % 2)
                continue;
            if (!anew) {
                OK(dray__rollout_cut(s.rollout, &error));
                continue;
            }
            dray__rollout_renew(s.rollout, 7); /* the same ones: tokens are the same, too */
            OK(dray__rollout_restart(s.rollout, &error));
        }
        check_asked_once(&a);
        dray_batch *batch = read_all(&s, columns);
        OK(dray_batch_column(batch, "response_mask", &columns[3], &error));
        for (uint32_t row = 0; row < ROWS; row++)
            check_turns(&s, row, columns); /* version 7 alone, too */
        dray_batch_free(batch);
        scene_close(&s);
    }
}

/* Rows that can be read by the next task, which takes them. */
static uint32_t read_some(scene *s)
{
    dray_batch *batch;
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = "reader";
    o.count = ROWS;
    o.up_to = 1;
    o.timeout_ns = 0;
    if (dray_queue_claim(s->host.queue, &o, &batch, &error))
        return 0;
    uint32_t rows = dray_batch_rows(batch);
    OK(dray_batch_commit(batch, &error));
    dray_batch_free(batch);
    return rows;
}

/* One row's answer comes when all others have left: they had the other slots meanwhile. */
TEST(others_go_on_while_a_row_waits)
{
    asked a;
    scene s;
    uint32_t found = 0;
    char gate[48];
    dray__job_tool tool = asked_open(
        &a, "if mkdir $f.first 2>/dev/null; then until [ -e $f.gate ]; do sleep 0.01; done; fi;");
    snprintf(gate, sizeof gate, "%s.gate", a.path);
    scene_open_with(&s, "others", DRAY__BATCHING_CONTINUOUS, 0, &tool);
    int64_t deadline = dray__deadline(10 * DRAY__SECOND);
    for (; found < ROWS - 1 && dray__now() < deadline; found += read_some(&s))
        assert_true(continuous_turn(&s));
    assert_int_equal(found, ROWS - 1);
    int fd = open(gate, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    close(fd);
    generate_all(&s);
    assert_int_equal(read_some(&s), 1);
    check_asked_once(&a);
    unlink(gate);
    snprintf(gate, sizeof gate, "%s.first", a.path);
    rmdir(gate);
    scene_close(&s);
}

/* Commands are started through "dray host --parent=... --exec COMMAND", which this is. */
int main(int argc, char **argv)
{
    if (argc == 5 && strcmp(argv[3], "--exec") == 0)
        return execl("/bin/sh", "sh", "-c", argv[4], (char *)NULL);
    return suite_run(up, down);
}
