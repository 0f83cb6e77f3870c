/* Tests tools alone: the results of the calculator, and commands that answer out of order, late or
 * wrongly. */
#include "run/engine/tool.h"
#include "suite.h"

#include "base/clock.h"
#include "run/data/data.h"
#include "run/engine/calls.h"
#include "run/job/settings.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OK(call)                                                                                   \
    do {                                                                                           \
        if (call)                                                                                  \
            fail_msg("%s", error.message);                                                         \
    } while (0)

static dray_error error;

static dray__job_tool a_tool(int32_t kind, char *command)
{
    static char call[] = "=";
    return (dray__job_tool){.kind = kind,
                            .command = command,
                            .call = call,
                            .turns = 8,
                            .processes = 3,
                            .timeout_seconds = 20};
}

TEST(sums_and_products)
{
    static const struct {
        const char *text, *answer;
    } cases[] = {{"3+9=", "12"},
                 {"3+9=12+4=", "16"},
                 {"12 - 20=", "-8"},
                 {"2*3+4*5=", "26"},
                 {"1-2*3-4=", "-9"},
                 {"so: 6*7=", "42"},
                 {"9=", ""},
                 {"=", ""},
                 {"3+=", ""},
                 {"+3=", ""},
                 {"3++4=", ""},
                 {"1 2+3=", ""},
                 {"9223372036854775807+0=", "9223372036854775807"},
                 {"9223372036854775807+1=", ""},
                 {"9223372036854775808+0=", ""},
                 {"4611686018427387904*2+1=", ""}};
    dray__job_tool tool = a_tool(DRAY__TOOL_CALCULATOR, NULL);
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char out[DRAY__CALCULATED_BYTES];
        assert_true(dray__tool_called(&tool, cases[i].text));
        dray__calculate(&tool, cases[i].text, out);
        if (strcmp(out, cases[i].answer))
            fail_msg("'%s': '%s' expected, found '%s'", cases[i].text, cases[i].answer, out);
    }
    assert_false(dray__tool_called(&tool, "3+9"));
    assert_false(dray__tool_called(&tool, ""));
    assert_false(dray__tool_called(&tool, "=3"));
}

static const char *answer_of(dray__tool *tool, uint32_t id)
{
    const char *answer;
    while (!(answer = dray__tool_answer(tool, id))) {
        dray__tool_wait(tool, -1, DRAY__SECOND);
        OK(dray__tool_look(tool, &error));
    }
    return answer;
}

TEST(a_calculator_takes_its_time)
{
    dray__tool *tool;
    dray__job_tool job = a_tool(DRAY__TOOL_CALCULATOR, NULL);
    OK(dray__tool_open(&job, 2, &tool, &error));
    int64_t begin = dray__now();
    OK(dray__tool_ask(tool, 0, "", "1+1=", 0.05, &error));
    OK(dray__tool_ask(tool, 1, "", "1+2=", 0, &error));
    assert_string_equal(answer_of(tool, 1), "3");
    assert_string_equal(answer_of(tool, 0), "2");
    assert_true(dray__now() - begin >= 50 * DRAY__MILLISECOND);
    dray__tool_close(tool);
}

/* A call of "wait=" is answered when the file is there; others at once, by the other processes. */
TEST(commands_answer_out_of_turn)
{
    char file[] = "/tmp/dray-tool-test-XXXXXX", command[512];
    int fd = mkstemp(file);
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(unlink(file), 0);
    snprintf(command, sizeof command,
             "while read -r line; do case $line in"
             " *wait=*) while [ ! -e %s ]; do sleep 0.01; done; echo '{\"answer\": \"late\"}';;"
             " *none=*) echo '{\"answer\": null}';;"
             " *) echo \"{\\\"answer\\\": \\\"${#line}\\\"}\";; esac; done",
             file);
    dray__tool *tool;
    dray__job_tool job = a_tool(DRAY__TOOL_COMMAND, command);
    OK(dray__tool_open(&job, 8, &tool, &error));
    OK(dray__tool_ask(tool, 0, "p", "wait=", 0, &error));
    OK(dray__tool_ask(tool, 1, "p", "wait=", 0, &error));
    for (uint32_t id = 2; id < 6; id++) /* one process is left for these */
        OK(dray__tool_ask(tool, id, "p", id == 3 ? "none=" : "=", 0, &error));
    for (uint32_t id = 2; id < 6; id++) /* {"prompt":"p","response":"="} */
        assert_string_equal(answer_of(tool, id), id == 3 ? "" : "29");
    assert_null(dray__tool_answer(tool, 0));
    dray__tool_forget(tool, 0); /* its answer is nobody's, not the next call's */
    OK(dray__tool_ask(tool, 0, "p", "12=", 0, &error));
    assert_string_equal(answer_of(tool, 0), "31");
    fd = open(file, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    close(fd);
    assert_string_equal(answer_of(tool, 1), "late");
    assert_string_equal(answer_of(tool, 0), "31");
    dray__tool_close(tool);
    unlink(file);
}

TEST(commands_that_fail)
{
    char ends[] = "read -r line", words[] = "read -r line; echo 12; cat >/dev/null",
         late[] = "cat >/dev/null";
    struct {
        char *command;
        int code;
        const char *message;
    } cases[] = {{ends, DRAY_ECLOSED, "tool.command: it ended"},
                 {words, DRAY_EFORMAT, "expected {\"answer\": \"...\"} a line, found '12'"},
                 {late, DRAY_ETIMEDOUT, "tool.command: no answer in 0.2 s"}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        dray__tool *tool;
        dray__job_tool job = a_tool(DRAY__TOOL_COMMAND, cases[i].command);
        if (cases[i].code == DRAY_ETIMEDOUT)
            job.timeout_seconds = 0.2;
        OK(dray__tool_open(&job, 1, &tool, &error));
        int rc = dray__tool_ask(tool, 0, "", "=", 0, &error);
        while (!rc && !dray__tool_answer(tool, 0)) {
            dray__tool_wait(tool, -1, DRAY__SECOND / 20);
            rc = dray__tool_look(tool, &error);
        }
        assert_int_equal(rc, cases[i].code);
        if (!strstr(error.message, cases[i].message))
            fail_msg("%s", error.message);
        dray__tool_close(tool);
    }
}

/* What warm-up learns of a right answer: what the model has to write, and nothing else. */
TEST(right_answers_without_the_tool)
{
    dray__job *job;
    dray__tokenizer *tokenizer;
    dray__data *data;
    OK(dray__settings_default(&job, &error));
    job->tool.kind = DRAY__TOOL_CALCULATOR;
    job->data.source = DRAY__SOURCE_TOOL;
    job->data.steps = 12;
    OK(dray__job_tokenizer(job, &tokenizer, &error));
    OK(dray__data_open(job, &data, &error));
    int most = 0, differs = 0;
    for (uint64_t i = 0; i < 2000; i++) {
        char *prompt, *answer, expected[256];
        int32_t *tokens, mask[256];
        uint64_t count;
        OK(dray__data_get(data, DRAY__SPLIT_TRAIN, i, &prompt, &answer, &error));
        OK(dray__answer_tokens(tokenizer, answer, &tokens, &count, &error));
        OK(dray__calls_mask(job, tokenizer, tokens, count, mask, &error));
        int sum = prompt[0] - '0', turns = 0, at = 0;
        memset(expected, 1, sizeof expected);
        at += 1;
        for (const char *p = prompt + 1; *p == '+'; p += 2) {
            char text[16];
            sum += p[1] - '0';
            int digits = snprintf(text, sizeof text, "%d", sum);
            assert_memory_equal(answer + at, ((char[]){'+', p[1], '='}), 3);
            assert_memory_equal(answer + at + 3, text, (size_t)digits);
            at += 3;
            if (turns++ < 8) /* tool.turns */
                memset(expected + at, 0, (size_t)digits);
            at += digits;
        }
        assert_int_equal(strlen(answer), at);
        for (uint64_t k = 0; k < count; k++)
            assert_int_equal(mask[k], expected[k]);
        most = turns > most ? turns : most;
        differs += turns == 1;
        free(tokens);
        free(prompt);
        free(answer);
    }
    assert_int_equal(most, 12);
    assert_true(differs > 100);
    dray__data_close(data);
    dray__tokenizer_close(tokenizer);
    dray__settings_free(job);
}

/* Commands are started through "dray host --parent=... --exec COMMAND", which this is. */
int main(int argc, char **argv)
{
    if (argc == 5 && strcmp(argv[3], "--exec") == 0)
        return execl("/bin/sh", "sh", "-c", argv[4], (char *)NULL);
    return suite_run(NULL, NULL);
}
