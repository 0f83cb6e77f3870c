/* The program's subcommands, and what they share: errors, usage, numbers, JSON lines, tables.
 *
 * A subcommand is one file src/cmd/<name>.c with one function, and one line in CMD_MAP below. It
 * reads its options with cmd_parse, uses the public headers, prints results to stdout and
 * everything else to stderr, and returns CMD_OK, CMD_FAILED or CMD_USAGE. */
#ifndef DRAY_CMD_CMD_H
#define DRAY_CMD_CMD_H

#include <argp.h>
#include <dray/dray.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* The one table of subcommands, in the order in which `dray --help` lists them:
 * XX(name, summary). An empty summary keeps one out of the list (those that the program starts). */
#define CMD_MAP(XX)                                                                                \
    XX(run, "run a job: rollout, rewards and training, to its last checkpoint")                    \
    XX(study, "compare schedules of a job over seeds: what they learn, and how fast")              \
    XX(host, "")                                                                                   \
    XX(inspect, "print what a checkpoint holds, and whether it is complete")                       \
    XX(verify, "say whether two checkpoints or sessions hold the same weights")                    \
    XX(serve, "run a coordinator on its own")                                                      \
    XX(keeper, "keep samples of another host for a coordinator")                                   \
    XX(status, "ask a coordinator what it knows")                                                  \
    XX(token, "make a token, with which a process of another host gets in")                        \
    XX(plan, "say what an update would move, from whom to whom, and how long it takes")            \
    XX(queue, "put, claim, read and commit rows of a queue, from a shell")                         \
    XX(bench, "measure updates and planning against what the machine can do")                      \
    XX(doctor, "say what this machine has, and what is off without the rest")

#define XX(name, summary) int cmd_##name(int argc, char **argv);
CMD_MAP(XX)
#undef XX

/* Exit statuses. FAILED also says "no" where the answer of a command is yes or no (verify). */
enum { CMD_OK = 0, CMD_FAILED = 1, CMD_USAGE = 2 };

/* ---- arguments ------------------------------------------------------------------------------- */

/* argp_parse, with the nearest right word for an unknown option, and -h for --help. Does not come
 * back from --help (exit 0) and usage errors (exit 2, on stderr). argv[0] is "dray <name>". Inside
 * the parser report bad arguments with argp_error or cmd_bad_word. */
void cmd_parse(const struct argp *argp, int argc, char **argv, void *input);
/* A usage error in argp's form: "dray NAME: unknown WHAT 'word'; did you mean 'x'?", or a list of
 * the words. */
void cmd_bad_word(const struct argp_state *state, const char *what, const char *word,
                  const char *const *words, size_t count);
/* Of a command with parts, for a first argument that is none: says so on stderr, with the nearest
 * right word. Returns CMD_USAGE. */
int cmd_bad_part(const char *command, const char *word, const char *const *parts, size_t count);
/* A whole decimal number from min to max. A usage error that names `what` otherwise. */
int64_t cmd_number(const struct argp_state *state, const char *what, const char *text, int64_t min,
                   int64_t max);

/* ---- errors: one line on stderr, "dray NAME: message"; they return CMD_FAILED ---------------- */

int cmd_fail(const char *name, const dray_error *error);
/* The same, but CMD_USAGE where an argument is what is wrong: DRAY_EINVALID. */
int cmd_refuse(const char *name, const dray_error *error);
/* The same of a job file, whose syntax is an argument too: DRAY_EFORMAT. */
int cmd_refuse_job(const char *name, const dray_error *error);
int cmd_failf(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Fills *error and returns its code: for what a command finds wrong itself. */
int cmd_error(dray_error *error, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- numbers for people ---------------------------------------------------------------------- */

typedef struct cmd_text {
    char s[32];
} cmd_text;

cmd_text cmd_bytes(double bytes);     /* decimal units, three digits: "65.5 GB", "512 B" */
cmd_text cmd_seconds(double seconds); /* "12.3 ms", "1.50 s", "2 min 5 s" */
cmd_text cmd_count(double count);     /* "115 k", "32.8 G" */

/* ---- output ---------------------------------------------------------------------------------- */

/* Prints one object on one line and flushes, so that a reader sees it at once. Takes `object`;
 * NULL (out of memory while building it) ends the program. */
void cmd_json_line(json_t *object);

/* Columns that fit their widest cell. Headings: NULL-terminated; one that starts with '>' is
 * aligned to the right. Cells are added one by one, a row after the other. */
typedef struct cmd_table cmd_table;
cmd_table *cmd_table_new(const char *const *headings);
void cmd_cell(cmd_table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));
void cmd_table_print(cmd_table *table, FILE *out); /* prints and frees */

#endif
