/* dray: looks up the subcommand and calls it. */
#include "base/words.h"
#include "cmd/cmd.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct subcommand {
    const char *name, *summary;
    int (*main)(int argc, char **argv);
} subcommand;

static const subcommand subcommands[] = {
#define XX(name, summary) {#name, summary, cmd_##name},
    CMD_MAP(XX)
#undef XX
};

enum { COUNT = sizeof(subcommands) / sizeof(subcommands[0]) };

static const subcommand *find(const char *name)
{
    for (size_t i = 0; i < COUNT; i++)
        if (strcmp(subcommands[i].name, name) == 0)
            return &subcommands[i];
    return NULL;
}

static int unknown(const char *word)
{
    const char *words[COUNT + 2];
    size_t count = 0;
    char hint[128];
    if (word[0] == '-') {
        words[count++] = "--help";
        words[count++] = "--version";
    } else {
        for (size_t i = 0; i < COUNT; i++)
            if (subcommands[i].summary[0])
                words[count++] = subcommands[i].name;
        words[count++] = "help";
    }
    fprintf(stderr, "dray: unknown %s '%s'%s\nTry 'dray --help' for the list.\n",
            word[0] == '-' ? "option" : "command", word,
            dray__word_hint(word, words, count, hint, sizeof(hint)));
    return CMD_USAGE;
}

static void print_help(FILE *out)
{
    fputs("Usage: dray COMMAND [ARGUMENT...]\n"
          "Moves the two heavy loads of RL post-training: weights from trainers to inference\n"
          "engines, and samples between the tasks of the RL loop.\n"
          "\n"
          "Commands:\n",
          out);
    for (size_t i = 0; i < COUNT; i++)
        if (subcommands[i].summary[0])
            fprintf(out, "  %-10s %s\n", subcommands[i].name, subcommands[i].summary);
    fputs("\n"
          "  dray help COMMAND   what COMMAND does and takes (also: dray COMMAND --help)\n"
          "  dray --version      the version (with --json: as an object)\n"
          "\n"
          "Results go to stdout, messages to stderr; with --json, one object a line. Exit status:\n"
          "0 done, 1 failed (or \"they differ\"), 2 wrong usage. DRAY_LOG=error|warn|info|debug "
          "says\n"
          "how much the library prints on stderr (default: warn).\n",
          out);
}

static int print_version(bool json)
{
    if (json)
        cmd_json_line(json_pack("{s:s, s:s}", "name", "dray", "version", dray_version()));
    else
        printf("dray %s\n", dray_version());
    return CMD_OK;
}

static int call(const subcommand *sub, int argc, char **argv)
{
    char name[64];
    snprintf(name, sizeof(name), "dray %s", sub->name);
    argv[0] = name;
    return sub->main(argc, argv);
}

static bool is_help(const char *word)
{
    return strcmp(word, "help") == 0 || strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0;
}

static int help(int argc, char **argv)
{
    if (argc > 1) {
        fputs("dray help: expected one command\nTry 'dray --help' for the list.\n", stderr);
        return CMD_USAGE;
    }
    if (argc == 0 || is_help(argv[0])) {
        print_help(stdout);
        return CMD_OK;
    }
    const subcommand *sub = find(argv[0]);
    if (!sub)
        return unknown(argv[0]);
    char option[] = "--help";
    char *arguments[] = {NULL, option, NULL};
    return call(sub, 2, arguments);
}

static int dispatch(int argc, char **argv)
{
    if (argc < 2) {
        print_help(stderr);
        return CMD_USAGE;
    }
    const char *word = argv[1];
    if (is_help(word))
        return help(argc - 2, argv + 2);
    if (strcmp(word, "--version") == 0 || strcmp(word, "-V") == 0) {
        bool json = argc == 3 && strcmp(argv[2], "--json") == 0;
        return argc == 2 || json ? print_version(json) : unknown(argv[2]);
    }
    const subcommand *sub = find(word);
    return sub ? call(sub, argc - 1, argv + 1) : unknown(word);
}

static const char *const levels[] = {"error", "warn", "info", "debug"};

static void log_line(void *user, dray_log_level level, const char *line)
{
    (void)user;
    fprintf(stderr, "dray: %s: %s\n", levels[level], line);
}

static bool set_log(void)
{
    const char *word = getenv("DRAY_LOG");
    int level = DRAY_LOG_WARN;
    if (word && word[0]) {
        for (level = DRAY_LOG_ERROR; level <= DRAY_LOG_DEBUG; level++)
            if (strcmp(word, levels[level]) == 0)
                break;
        if (level > DRAY_LOG_DEBUG) {
            char hint[128];
            fprintf(stderr, "dray: DRAY_LOG: unknown level '%s'%s\n", word,
                    dray__word_hint_or_all(word, levels, 4, hint, sizeof(hint)));
            return false;
        }
    }
    dray_set_log(log_line, NULL, (dray_log_level)level);
    return true;
}

static bool had_stdout;

/* Exits with an error when stdout could not be written, for example because the disk is full. */
static void close_stdout(void)
{
    bool lost = ferror(stdout) != 0;
    int problem = fclose(stdout) == 0 ? 0 : errno;
    if (!had_stdout || (!lost && !problem))
        return;
    fprintf(stderr, "dray: stdout: %s\n",
            problem ? strerror(problem) : "not all of the output could be written");
    _Exit(CMD_FAILED);
}

/* Replaces closed standard streams by descriptors that cannot be used. Otherwise the next file that
 * is opened would get the stream's number, and the printed text. */
static void open_standard_streams(void)
{
    had_stdout = fcntl(STDOUT_FILENO, F_GETFD) >= 0;
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 &&
            open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd)
            _Exit(CMD_FAILED);
}

int main(int argc, char **argv)
{
    open_standard_streams();
    /* Then a write beyond the limit fails with an error that names the file. */
    signal(SIGXFSZ, SIG_IGN);
    atexit(close_stdout);
    argp_err_exit_status = CMD_USAGE;
    setenv("ARGP_HELP_FMT", "no-dup-args-note", 0);
    return set_log() ? dispatch(argc, argv) : CMD_USAGE;
}
