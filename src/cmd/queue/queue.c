/* dray queue: a queue from a shell. Each verb is one line of the table. Claims outlive the command
 * that made them (queue_claim.h). */
#include "cmd/queue/queue.h"

#include "queue/policies.h"
#include "run/supervisor/coordinator.h"

#include <dray/queue.h>

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { HOLD_SECONDS = 600, WAIT_SECONDS = 60 };

/* A verb's options are the common ones and those with the keys that it lists. */
struct queue_verb {
    const char *name, *arguments, *summary, *keys, *doc;
    uint32_t least_words, most_words;
    cmd_queue_part *run;
    bool attached; /* it is called with an open queue */
};

typedef struct queue_verb verb;

/* ---- the command line ------------------------------------------------------------------------ */

static const verb verbs[] = {
    {"open", "", "make a queue: its tasks, and how much it may hold", "tabrvLy",
     "Makes the queue, or checks that it has these tasks.", 0, 0, cmd_queue_open, false},
    {"insert", "[ROW...]", "put rows, given as JSON objects (or lines of standard input)", "pgdsTi",
     "Puts rows at the end of a partition: all of them are visible at once, or none.", 0,
     CMD_LIST_MAX, cmd_queue_insert, false},
    {"load", "FILE.jsonl...", "put the rows of files, one JSON object a line", "pgdsT",
     "Puts the rows of files (-: standard input) at the end of a partition, 1,024 at a time.", 1,
     CMD_LIST_MAX, cmd_queue_load, false},
    {"seal", "", "say that a partition is complete", "pn",
     "Fixes a partition's number of rows: those that it has, or --rows.", 0, 0, cmd_queue_seal,
     true},
    {"claim", "", "take rows for a task, and hold them", "pkcuofSHwB",
     "Takes rows that are ready for a task, prints the claim's name, and leaves a process behind "
     "that holds them for `read`, `commit`, `fail` and `release`. With the policies token_balanced "
     "and lockstep the rows are divided among the ranks of a group of consumers, of which each "
     "claims its share.",
     0, 0, cmd_queue_claim, false},
    {"read", "CLAIM", "print the rows of a claim as JSON lines", "l",
     "Prints the columns that the task needs, or those named, a JSON object a row.", 1, 1,
     cmd_queue_read, false},
    {"commit", "CLAIM [FILE.jsonl]", "hand in a claim's outputs, and end it", "dTO",
     "Makes the outputs (one JSON object a row, in the order of `read`; -: standard input) "
     "visible, with the acknowledgement, in one step.",
     1, 2, cmd_queue_commit, false},
    {"fail", "CLAIM", "give a claim's rows back as failed", "e",
     "Gives the rows back; each counts as one failed attempt.", 1, 1, cmd_queue_fail, false},
    {"release", "CLAIM", "give a claim's rows back, uncounted", "", "Gives the rows back.", 1, 1,
     cmd_queue_release, false},
    {"refill", "", "wait for rows that were lost and want others", "wD",
     "Waits until a slot wants another sample, and prints which as a JSON object: answer with "
     "`insert --refill ID`, as many rows, or say with --decline that there is none.",
     0, 0, cmd_queue_refill, true},
    {"cursor", "FILE", "write down how far provisional tasks are", "V",
     "Writes the cursor that belongs into a trainer's checkpoint (a file that is not there yet).",
     1, 1, cmd_queue_cursor, true},
    {"cover", "FILE", "say that the checkpoint with this cursor is safe", "",
     "What provisional tasks had committed up to the cursor is freed.", 1, 1, cmd_queue_cover,
     true},
    {"resume", "FILE", "go back to the checkpoint with this cursor", "",
     "Undoes what provisional tasks committed after the cursor; samples of later versions are "
     "lost, and refilled.",
     1, 1, cmd_queue_resume, true},
    {"wait", "", "wait until tasks are done with a partition", "pkw",
     "Waits until a task (all, without --task) is done with a sealed partition.", 0, 0,
     cmd_queue_wait, true},
    {"clear", "", "drop a partition", "p",
     "Hides a partition's rows now; their memory is freed after the last reader.", 0, 0,
     cmd_queue_clear, true},
    {"end", "", "say that no more partitions will come", "", "Lets tasks that wait for rows end.",
     0, 0, cmd_queue_end, true},
    {"stat", "", "print what the queue holds", "", "Shows partitions, columns and tasks.", 0, 0,
     cmd_queue_stat, true},
};

enum { VERBS = sizeof verbs / sizeof verbs[0] };

static void put_dtype(const struct argp_state *state, const cmd_option *option, void *to,
                      const char *text)
{
    (void)option;
    queue_arguments *a = to;
    const char *equals = strchr(text, '=');
    dray_dtype dtype = equals ? dray_dtype_parse(equals + 1) : DRAY_DTYPE_NONE;
    cmd_dtype *out = &a->dtypes[a->dtype_count];
    if (!dtype || equals == text || (size_t)(equals - text) >= sizeof out->column)
        argp_error(state, "--dtype '%s': COLUMN=DTYPE expected, like tokens=i32", text);
    snprintf(out->column, sizeof out->column, "%.*s", (int)(equals - text), text);
    out->dtype = dtype;
    a->dtype_count++;
}

static void check(const struct argp_state *state, const void *to)
{
    const queue_arguments *a = to;
    const verb *v = a->verb;
    bool balanced = dray__policy_traits(a->policy) & DRAY__POLICY_ROUNDS;
    if (v->run == cmd_queue_claim && !balanced && (a->consumers || a->ranks > 1 || a->token_cap))
        argp_error(
            state,
            "--consumers, --ranks and --token-cap are of the policies token_balanced and lockstep");
    if (strchr(v->keys, 'p') && !a->partition && v->run != cmd_queue_claim)
        argp_error(state, "which partition? --partition NAME expected");
    if (v->run == cmd_queue_claim && !a->task)
        argp_error(state, "for which task? --task NAME expected");
    if (v->run == cmd_queue_open && !a->tasks.count)
        argp_error(state, "a queue needs tasks: --task NAME:NEEDS>WRITES expected");
}

/* In the order of the enums. */
#define NAME(number, name, pick, traits, refused) #name,
static const char *const policies[] = {DRAY__POLICY_MAP(NAME) NULL};
static const char *const losses[] = {"default", "refill", "shrink_group", "drop_group", NULL};
static const char *const durabilities[] = {"default", "none", "checkpoint", "journal", NULL};

#define TEXT(member, ...) CMD_TEXT(queue_arguments, member, __VA_ARGS__)
#define FLAG(member, ...) CMD_FLAG(queue_arguments, member, __VA_ARGS__)
#define NUMBER(member, ...) CMD_NUMBER(queue_arguments, member, __VA_ARGS__)
#define WORD(member, ...) CMD_WORD(queue_arguments, member, __VA_ARGS__)
#define LIST(member, ...) CMD_LIST(queue_arguments, member, __VA_ARGS__)

#define WORD_OF(number, name, pick, traits, refused) " " #name

/* All options, with the letter by which verbs list them; 0 for options of every verb. */
static const struct option_of {
    char letter;
    cmd_option option;
} all_options[] = {
    {'t',
     LIST(tasks, "task", 't', "NAME:NEEDS>WRITES",
          "A task: its name, the columns that it needs and those that it writes (again for each)")},
    {'a', NUMBER(max_attempts, "max-attempts", 0, 1, 1000000, "N",
                 "Failed attempts after which a row is lost (3)")},
    {'b', NUMBER(capacity_bytes, "capacity-bytes", 0, 1, INT64_MAX, "BYTES",
                 "Most bytes of columns at once (4294967296)")},
    {'r',
     NUMBER(capacity_rows, "capacity-rows", 0, 1, INT32_MAX, "N", "Most rows at once (1000000)")},
    {'p', TEXT(partition, "partition", 'p', "NAME", "The partition")},
    {'g', NUMBER(group_size, "group-size", 'g', 1, INT32_MAX, "N",
                 "Rows of one prompt, following each other (1)")},
    {'d', CMD_CALL(put_dtype, "dtype", 'd', "COLUMN=DTYPE",
                   "What numbers of a column are stored as (i64, f64 or bool without it)")},
    {'s', FLAG(seal, "seal", 0, "Seal the partition afterwards")},
    {'n', NUMBER(rows, "rows", 'n', 0, INT32_MAX, "N", "How many rows it must have")},
    {'k', TEXT(task, "task", 't', "NAME", "The task")},
    {'c', NUMBER(rows, "count", 'n', 0, INT32_MAX, "N", "Rows to take (1)")},
    {'u', FLAG(up_to, "up-to", 'u', "Take fewer where fewer are ready")},
    {'o', WORD(policy, "policy", 'o', policies, "policy", "POLICY",
               "How rows are chosen, fifo without it:" DRAY__POLICY_MAP(WORD_OF))},
    {'B', TEXT(consumers, "consumers", 0, "NAME",
               "Balanced: the group of consumers among whose ranks rows are divided")},
    {'B',
     NUMBER(epoch, "epoch", 0, 0, INT64_MAX, "N", "Raised when that group is formed anew (0)")},
    {'B', NUMBER(round, "round", 0, 0, INT64_MAX, "N", "Lockstep: which round, ascending (0)")},
    {'B', NUMBER(rank, "rank", 0, 0, 1023, "N", "Which of the ranks claims (0)")},
    {'B', NUMBER(ranks, "ranks", 0, 1, 1024, "N", "How many ranks there are (1)")},
    {'B', NUMBER(peer, "peer", 0, 0, 63, "N", "Lockstep: which of the rank's peers claims (0)")},
    {'B', NUMBER(peers, "peers", 0, 1, 64, "N", "Lockstep: peers that share a rank's rows (1)")},
    {'B', NUMBER(token_cap, "token-cap", 0, 1, INT64_MAX, "N", "Most tokens of a micro-batch")},
    {'B', TEXT(cost, "cost", 0, "TAG", "The tag with a row's tokens (tokens)")},
    {'B', NUMBER(micro_rows, "micro-rows", 0, 1, INT32_MAX, "N", "Most rows of a micro-batch")},
    {'T', LIST(tags, "tag", 'T', "KEY",
               "This number of each row is a tag, not a column (again for each)")},
    {'O', FLAG(open, "open", 0, "The task will append to these rows: they stay open for it")},
    {'i', NUMBER(refill, "refill", 0, 1, INT64_MAX, "ID", "The rows answer what `refill` printed")},
    {'D',
     NUMBER(decline, "decline", 0, 1, INT64_MAX, "ID", "There is no other sample for this one")},
    {'V', NUMBER(version, "version", 0, 0, INT64_MAX, "N",
                 "Version of the weights that the checkpoint holds (0)")},
    {'v', LIST(provisional, "provisional", 0, "TASK",
               "A trainer: its commits wait for a checkpoint, `cursor` (again for each)")},
    {'L', WORD(on_loss, "on-loss", 0, losses, "rule", "WHAT",
               "Of rows that are lost: refill (default), shrink_group or drop_group")},
    {'y',
     WORD(durability, "durability", 0, durabilities, "durability", "WHAT",
          "What is left when the coordinator dies: none (default), checkpoint or journal, which "
          "need `dray serve --journal`")},
    {'f', NUMBER(fresh, "fresh", 'f', 0, INT64_MAX, "VERSION",
                 "Drop ready rows that are too old for this version of the weights")},
    {'S', NUMBER(staleness, "staleness", 'S', 0, INT32_MAX, "N",
                 "With --fresh: versions that a row may be behind (0)")},
    {'H',
     NUMBER(hold_s, "hold", 'H', 1, 7 * 86400, "SECONDS", "Take the rows back after this (600)")},
    {'w', NUMBER(timeout_s, "timeout", 'w', 0, 7 * 86400, "SECONDS", "How long to wait (60)")},
    {'l', LIST(columns, "column", 'l', "NAME", "Only this column (again for each)")},
    {'e', TEXT(reason, "reason", 'e', "TEXT", "Why, for people")},
    {0, CMD_GROUP(20, NULL)},
    {0, TEXT(queue, "queue", 'q', "NAME", "The queue (samples)")},
    {0, TEXT(address, "connect", 'C', "ADDRESS",
             "The coordinator. Default: $DRAY_ADDRESS, or where dray serve listens by default")},
    {0, FLAG(json, "json", 'j', "Print what was done as one JSON object")},
};

enum { OPTIONS = sizeof all_options / sizeof all_options[0] };

static void print_help(FILE *out)
{
    fputs("Usage: dray queue PART [OPTION...]\n"
          "Uses a queue of a running coordinator from a shell: rows are JSON objects, a key a\n"
          "column.\n\nParts:\n",
          out);
    for (size_t i = 0; i < VERBS; i++)
        fprintf(out, "  %-8s %-18s %s\n", verbs[i].name, verbs[i].arguments, verbs[i].summary);
    fputs("\n"
          "  dray queue PART --help   what PART takes\n"
          "\n"
          "For example, with `dray serve` running:\n"
          "  dray queue open --task 'reward:prompts,responses>rewards'\n"
          "  dray queue insert --partition step-1 '{\"prompts\": \"2+2=\", \"responses\": \"4\"}'\n"
          "  claim=$(dray queue claim --task reward)\n"
          "  dray queue read $claim\n"
          "  echo '{\"rewards\": 1.0}' | dray queue commit $claim -\n"
          "  dray queue stat\n",
          out);
}

static int run_verb(const verb *v, int argc, char **argv)
{
    cmd_option options[OPTIONS + 1] = {CMD_END};
    char path[256], fallback[300], name[48];
    queue_arguments a = {.verb = v,
                         .address = getenv("DRAY_ADDRESS"),
                         .queue = "samples",
                         .reason = "given back from a shell",
                         .rows = -1,
                         .fresh = -1,
                         .group_size = 1,
                         .hold_s = HOLD_SECONDS,
                         .timeout_s = WAIT_SECONDS};
    size_t count = 0;
    for (size_t i = 0; i < OPTIONS; i++)
        if (!all_options[i].letter || strchr(v->keys, all_options[i].letter))
            options[count++] = all_options[i].option;
    const cmd_usage usage = {.options = options,
                             .arguments = v->arguments,
                             .doc = v->doc,
                             .words = v->arguments,
                             .words_at = offsetof(queue_arguments, words),
                             .least = v->least_words,
                             .most = v->most_words,
                             .check = check};
    snprintf(name, sizeof name, "dray queue %s", v->name);
    argv[1] = name;
    cmd_parse(&usage, argc - 1, argv + 1, &a);
    if (!a.address || !a.address[0]) {
        snprintf(fallback, sizeof fallback, "unix:%s", dray__default_socket(path, sizeof path));
        a.address = fallback;
    }
    dray_error error = {0};
    int rc = v->attached ? cmd_queue_with(&a, NULL, v->run, &error) : v->run(&a, NULL, &error);
    if (rc && !error.code)
        cmd_error(&error, rc, "%s", dray_strerror(rc));
    return rc ? cmd_fail(name + strlen("dray "), &error) : CMD_OK;
}

int cmd_queue(int argc, char **argv)
{
    const char *names[VERBS], *word = argc > 1 ? argv[1] : NULL;
    if (word && (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0)) {
        print_help(stdout);
        return CMD_OK;
    }
    for (size_t i = 0; i < VERBS; i++) {
        names[i] = verbs[i].name;
        if (word && strcmp(word, names[i]) == 0)
            return run_verb(&verbs[i], argc, argv);
    }
    if (word)
        return cmd_bad_part("queue", word, names, VERBS);
    print_help(stderr);
    return CMD_USAGE;
}
