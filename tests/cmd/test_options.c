/* Tests the tables of options. No letter or name occurs twice in a command's own and shared tables,
 * and real numbers keep to their bounds. */
#include "cmd/cmd_util.c"

#include "suite.h"

#include <sys/wait.h>
#include <unistd.h>

typedef struct both {
    int64_t repeats;
    double share, age;
    bool nccl;
} both;

static const cmd_option parent_options[] = {
    CMD_NUMBER(both, repeats, "repeat", 'n', 1, 100, "N", "How often"), CMD_END};
static const cmd_usage parent = {.options = parent_options};

/* Exit status of a command that has `own` beside the parent's options and is called with `word`. */
static int status_of(cmd_option own, const char *word)
{
    const cmd_option options[] = {own, CMD_END};
    const cmd_usage usage = {.options = options, .also = &parent};
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        char name[] = "dray test", argument[64];
        char *argv[] = {name, argument, NULL};
        both to = {0};
        snprintf(argument, sizeof(argument), "%s", word);
        argp_err_exit_status = CMD_USAGE;
        cmd_parse(&usage, 2, argv, &to);
        _exit(CMD_OK);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

TEST(options_of_two_tables_differ)
{
    const char *word = "--repeat=3";
    assert_int_equal(status_of((cmd_option)CMD_FLAG(both, nccl, "nccl", 'N', "x"), word), CMD_OK);
    assert_int_equal(status_of((cmd_option)CMD_FLAG(both, nccl, "nccl", 0, "x"), word), CMD_OK);
    assert_int_equal(status_of((cmd_option)CMD_FLAG(both, nccl, "nccl", 'n', "x"), word),
                     CMD_FAILED);
    assert_int_equal(status_of((cmd_option)CMD_FLAG(both, nccl, "repeat", 'N', "x"), word),
                     CMD_FAILED);
    assert_int_equal(status_of((cmd_option)CMD_FLAG(both, nccl, "help", 0, "x"), word), CMD_FAILED);
}

TEST(real_numbers_keep_to_their_bounds)
{
    static const struct {
        const char *word;
        int share, age;
    } cases[] = {{"0", CMD_USAGE, CMD_OK},       {"1", CMD_OK, CMD_OK},
                 {"0.5", CMD_OK, CMD_OK},        {"1.5", CMD_USAGE, CMD_OK},
                 {"64", CMD_USAGE, CMD_OK},      {"64.1", CMD_USAGE, CMD_USAGE},
                 {"-0.1", CMD_USAGE, CMD_USAGE}, {"nan", CMD_USAGE, CMD_USAGE},
                 {"", CMD_USAGE, CMD_USAGE},     {"1x", CMD_USAGE, CMD_USAGE}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char word[32];
        snprintf(word, sizeof(word), "--share=%s", cases[i].word);
        assert_int_equal(
            status_of((cmd_option)CMD_ABOVE(both, share, "share", 0, 0, 1, "X", "x"), word),
            cases[i].share);
        snprintf(word, sizeof(word), "--age=%s", cases[i].word);
        assert_int_equal(
            status_of((cmd_option)CMD_REAL(both, age, "age", 0, 0, 64, "X", "x"), word),
            cases[i].age);
    }
}

SUITE(NULL, NULL)
