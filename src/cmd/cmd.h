/* src/cmd/: the program `dray`. Each subcommand is one file, or a folder, that reads its options,
 * calls the library through its public headers or run's entry points, and prints results as text or
 * JSON. Code that other programs could use is not here. The benchmarks of `dray bench` are in
 * bench/. */

/* The program's subcommands, and the functions that they share: errors, usage, numbers, JSON lines,
 * tables.
 *
 * A subcommand is one file src/cmd/<name>.c (or a folder, if it needs several) with one function,
 * and one line in CMD_MAP below. It reads its options with cmd_parse, uses the public headers,
 * prints results to stdout and everything else to stderr, and returns CMD_OK, CMD_FAILED or
 * CMD_USAGE. */
#pragma once

#include "run/report/units.h"

#include <argp.h>
#include <dray/dray.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* The one table of subcommands, in the order in which `dray --help` lists them:
 * XX(name, summary). An empty summary keeps one out of the list (those that the program starts). */
#define CMD_MAP(XX)                                                                                \
    XX(run, "run a job: rollout, rewards and training, to its last checkpoint")                    \
    XX(study, "compare schedules of a job over seeds: what they learn, and how fast")              \
    XX(trace, "say where the time of a run went, and who waited for whom")                         \
    XX(report, "write a page that shows a run, or several side by side")                           \
    XX(simulate, "predict step time, waits and staleness of a job from the trace of a run")        \
    XX(size, "find the split of devices between engines and trainer that is fastest")              \
    XX(join, "take part in a run that another host began")                                         \
    XX(host, "")                                                                                   \
    XX(inspect, "print what a checkpoint holds, and whether it is complete")                       \
    XX(verify, "say whether two checkpoints or sessions hold the same weights")                    \
    XX(serve, "run a coordinator on its own")                                                      \
    XX(keeper, "keep samples of another host for a coordinator")                                   \
    XX(status, "ask a coordinator what it knows")                                                  \
    XX(token, "make a token, with which a process of another host may connect")                    \
    XX(plan, "say what an update would move, from whom to whom, and how long it takes")            \
    XX(queue, "put, claim, read and commit rows of a queue, from a shell")                         \
    XX(bench, "measure updates and planning against what the machine can do")                      \
    XX(doctor, "say what this machine has, and what dray cannot do without the rest")

#define XX(name, summary) int cmd_##name(int argc, char **argv);
CMD_MAP(XX)
#undef XX

/* Exit statuses. FAILED is also the answer "no" of a command that answers yes or no (verify). */
enum { CMD_OK = 0, CMD_FAILED = 1, CMD_USAGE = 2 };

#define CMD_SECOND INT64_C(1000000000)
int64_t cmd_now(void); /* nanoseconds of CLOCK_MONOTONIC */

/* ---- arguments ------------------------------------------------------------------------------- */

/* Texts of an option that may be given again, or of a command's arguments. */
enum { CMD_LIST_MAX = 64 };
typedef struct cmd_list {
    const char *items[CMD_LIST_MAX + 1]; /* NULL at the end */
    uint32_t count;
} cmd_list;

/* An option of a command: its name and letter, its text in --help, and the member of the command's
 * struct that takes its value. */
typedef struct cmd_option cmd_option;
/* Stores an option's value. Wrong values are reported with argp_error or cmd_bad_word. */
typedef void cmd_put(const struct argp_state *state, const cmd_option *option, void *at,
                     const char *text);
struct cmd_option {
    const char *name;  /* NULL, with `put` NULL, at the end */
    int key;           /* the letter; 0 when it has none */
    const char *value; /* the name of the value in --help; NULL when it takes none */
    const char *doc;   /* NULL when --help does not show the option */
    cmd_put *put;      /* NULL for a new group with the heading `doc` (may be NULL) */
    size_t at;         /* offset of the member */
    int64_t min, max;  /* range of a number; for a group, its place in --help */
    const char *what;  /* for words, the kind of object, for messages; for a real number, "above"
                          when min is excluded */
    const char *const *words; /* ended by NULL */
};

cmd_put cmd_put_text, cmd_put_flag, cmd_put_number, cmd_put_real, cmd_put_word, cmd_put_words,
    cmd_put_list, cmd_put_seed;

/* The settings of a job that --set changes, and --seed, which is the setting `seed`. */
typedef struct cmd_settings {
    cmd_list list;
    char seed[32];
} cmd_settings;

/* Rows of a table of options, for these members: const char *; bool; int64_t; double, from min to
 * max or (CMD_ABOVE) above min and up to max; int, the word's place among the words; unsigned, a
 * bit for each of the words, which have commas between them; cmd_list. CMD_JSON is a bool, CMD_SET
 * a cmd_list, CMD_SEED a cmd_settings. CMD_CALL: the function gets the command's whole struct. */
#define CMD_ROW(at, name, key, value, doc, put, min, max, what, words)                             \
    {                                                                                              \
        name, key, value, doc, put, at, min, max, what, words                                      \
    }
#define CMD_TEXT(type, member, name, key, value, doc)                                              \
    CMD_ROW(offsetof(type, member), name, key, value, doc, cmd_put_text, 0, 0, NULL, NULL)
#define CMD_FLAG(type, member, name, key, doc)                                                     \
    CMD_ROW(offsetof(type, member), name, key, NULL, doc, cmd_put_flag, 0, 0, NULL, NULL)
#define CMD_NUMBER(type, member, name, key, min, max, value, doc)                                  \
    CMD_ROW(offsetof(type, member), name, key, value, doc, cmd_put_number, min, max, NULL, NULL)
#define CMD_REAL(type, member, name, key, min, max, value, doc)                                    \
    CMD_ROW(offsetof(type, member), name, key, value, doc, cmd_put_real, min, max, NULL, NULL)
#define CMD_ABOVE(type, member, name, key, min, max, value, doc)                                   \
    CMD_ROW(offsetof(type, member), name, key, value, doc, cmd_put_real, min, max, "above", NULL)
#define CMD_WORD(type, member, name, key, words, what, value, doc)                                 \
    CMD_ROW(offsetof(type, member), name, key, value, doc, cmd_put_word, 0, 0, what, words)
#define CMD_WORDS(type, member, name, key, words, what, value, doc)                                \
    CMD_ROW(offsetof(type, member), name, key, value, doc, cmd_put_words, 0, 0, what, words)
#define CMD_LIST(type, member, name, key, value, doc)                                              \
    CMD_ROW(offsetof(type, member), name, key, value, doc, cmd_put_list, 0, CMD_LIST_MAX, NULL,    \
            NULL)
#define CMD_JSON(type, member) CMD_FLAG(type, member, "json", 'j', "Print one object a line")
#define CMD_SET(type, member, doc) CMD_LIST(type, member, "set", 's', "KEY=VALUE", doc)
#define CMD_SEED(type, member)                                                                     \
    CMD_ROW(offsetof(type, member), "seed", 'S', "N", "The same as --set seed=N", cmd_put_seed, 0, \
            INT64_C(1) << 53, NULL, NULL)
#define CMD_CALL(function, name, key, value, doc)                                                  \
    CMD_ROW(0, name, key, value, doc, function, 0, 0, NULL, NULL)
#define CMD_GROUP(number, heading) CMD_ROW(0, NULL, 0, NULL, heading, NULL, number, 0, "", NULL)
#define CMD_END CMD_ROW(0, NULL, 0, NULL, NULL, NULL, 0, 0, NULL, NULL)

/* The options and arguments of a command. */
typedef struct cmd_usage {
    const cmd_option *options;
    /* Another usage's options, of the same struct, with other names and letters; NULL when there is
     * none. */
    const struct cmd_usage *also;
    const char *arguments, *doc; /* like args_doc and doc of an argp */
    /* The arguments that are not options: their description for messages, the offset of their
     * cmd_list, and their least and greatest number; most is 0 when there may be none. */
    const char *words;
    size_t words_at;
    uint32_t least, most;
    /* Checks all values together; or NULL. */
    void (*check)(const struct argp_state *state, const void *to);
    char *(*help)(int key, const char *text, void *input); /* like help_filter of an argp */
} cmd_usage;

/* The fields of a usage that takes one job file. */
#define CMD_ONE_JOB(type, member)                                                                  \
    .words = "one job file", .words_at = offsetof(type, member), .most = 1

/* Reads the arguments into a struct. Suggests the nearest known word for an unknown option, and
 * takes -h for --help. Exits for --help (status 0) and usage errors (status 2, on stderr). argv[0]
 * is "dray <name>". */
void cmd_parse(const cmd_usage *usage, int argc, char **argv, void *to);
/* Ends with a usage error in argp's form: "dray NAME: unknown WHAT 'word'; did you mean 'x'?", or a
 * list of the words. */
void cmd_bad_word(const struct argp_state *state, const char *what, const char *word,
                  const char *const *words, size_t count);
/* For a command with parts, when the first argument is none of them: prints the error to stderr,
 * with the nearest known part. Returns CMD_USAGE. */
int cmd_bad_part(const char *command, const char *word, const char *const *parts, size_t count);
/* Returns a whole decimal number from min to max. Ends with a usage error that names the option for
 * any other text. */
int64_t cmd_number(const struct argp_state *state, const char *option, const char *text,
                   int64_t min, int64_t max);

/* ---- errors: one line on stderr, "dray NAME: message"; they return CMD_FAILED ---------------- */

int cmd_fail(const char *name, const dray_error *error);
/* The same, but returns CMD_USAGE for DRAY_EINVALID, when an argument is wrong. */
int cmd_refuse(const char *name, const dray_error *error);
/* The same for a job file: returns CMD_USAGE for DRAY_EFORMAT, too. */
int cmd_refuse_job(const char *name, const dray_error *error);
int cmd_failf(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Fills *error and returns its code, for errors that a command finds itself. */
int cmd_error(dray_error *error, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- output ---------------------------------------------------------------------------------- */

/* Prints one object on one line and flushes, so that a reader sees it at once. Takes `object`;
 * NULL (out of memory while building it) ends the program. */
void cmd_json_line(json_t *object);

/* Columns that fit their widest cell. Headings end with NULL; the column of one that starts with
 * '>' is aligned to the right. Cells are added one by one, row after row. */
typedef struct cmd_table cmd_table;
cmd_table *cmd_table_new(const char *const *headings);
void cmd_cell(cmd_table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));
void cmd_table_print(cmd_table *table, FILE *out); /* prints and frees */
