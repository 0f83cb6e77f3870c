/* dray queue: a queue from a shell. One line a verb; claims outlive the command that made them
 * (queue_claim.h). */
#include "cmd/queue.h"

#include "run/coordinator.h"

#include <dray/queue.h>

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { HOLD_SECONDS = 600, WAIT_SECONDS = 60 };

/* A verb's options are the common ones and those whose keys it lists. */
typedef struct verb {
    const char *name, *arguments, *summary, *keys, *doc;
    uint32_t least_words, most_words;
    int (*run)(const queue_arguments *a, dray_error *error);
} verb;

typedef struct parsing {
    const verb *verb;
    queue_arguments *to;
} parsing;

enum {
    KEY_SEAL = 256,
    KEY_CAPACITY_BYTES,
    KEY_CAPACITY_ROWS,
    KEY_ATTEMPTS,
    KEY_OPEN,
    KEY_REFILL,
    KEY_DECLINE,
    KEY_VERSION,
    KEY_PROVISIONAL,
    KEY_ON_LOSS,
    KEY_DURABILITY,
    KEY_CONSUMERS,
    KEY_EPOCH,
    KEY_ROUND,
    KEY_RANK,
    KEY_RANKS,
    KEY_PEER,
    KEY_PEERS,
    KEY_CAP,
    KEY_COST,
    KEY_MICRO
};

/* ---- the command line ------------------------------------------------------------------------ */

static const verb verbs[] = {
    {"open", "", "make a queue: its tasks, and how much it may hold", "tabrvLy",
     "Makes the queue, or checks that it has these tasks.", 0, 0, cmd_queue_open},
    {"insert", "[ROW...]", "put rows, given as JSON objects (or lines of standard input)", "pgdsTi",
     "Puts rows at the end of a partition: all of them are visible at once, or none.", 0,
     QUEUE_LIST_MAX, cmd_queue_insert},
    {"load", "FILE.jsonl...", "put the rows of files, one JSON object a line", "pgdsT",
     "Puts the rows of files (-: standard input) at the end of a partition, 1,024 at a time.", 1,
     QUEUE_LIST_MAX, cmd_queue_load},
    {"seal", "", "say that a partition is complete", "pn",
     "Fixes a partition's number of rows: those that it has, or --rows.", 0, 0, cmd_queue_seal},
    {"claim", "", "take rows for a task, and hold them", "pkcuofSHwB",
     "Takes rows that are ready for a task, prints the claim's name, and leaves a process behind "
     "that holds them for `read`, `commit`, `fail` and `release`. With the policies token_balanced "
     "and lockstep the rows are divided among the ranks of a group of consumers, of which each "
     "claims its share.",
     0, 0, cmd_queue_claim},
    {"read", "CLAIM", "print the rows of a claim as JSON lines", "l",
     "Prints the columns that the task needs, or those named, a JSON object a row.", 1, 1,
     cmd_queue_read},
    {"commit", "CLAIM [FILE.jsonl]", "hand in a claim's outputs, and end it", "dTO",
     "Makes the outputs (one JSON object a row, in the order of `read`; -: standard input) "
     "visible, "
     "with the acknowledgement, in one step.",
     1, 2, cmd_queue_commit},
    {"fail", "CLAIM", "give a claim's rows back as failed", "e",
     "Gives the rows back; each counts as one failed attempt.", 1, 1, cmd_queue_fail},
    {"release", "CLAIM", "give a claim's rows back, uncounted", "", "Gives the rows back.", 1, 1,
     cmd_queue_release},
    {"refill", "", "wait for rows that were lost and want others", "wD",
     "Waits until a slot wants another sample, and prints which as a JSON object: answer with "
     "`insert --refill ID`, as many rows, or say with --decline that there is none.",
     0, 0, cmd_queue_refill},
    {"cursor", "FILE", "write down how far provisional tasks are", "V",
     "Writes the cursor that belongs into a trainer's checkpoint (a file that is not there yet).",
     1, 1, cmd_queue_cursor},
    {"cover", "FILE", "say that the checkpoint with this cursor is safe", "",
     "What provisional tasks had committed up to the cursor is freed.", 1, 1, cmd_queue_cover},
    {"resume", "FILE", "go back to the checkpoint with this cursor", "",
     "Undoes what provisional tasks committed after the cursor; samples of later versions are "
     "lost, "
     "and refilled.",
     1, 1, cmd_queue_resume},
    {"wait", "", "wait until tasks are done with a partition", "pkw",
     "Waits until a task (all, without --task) is done with a sealed partition.", 0, 0,
     cmd_queue_wait},
    {"clear", "", "drop a partition", "p",
     "Hides a partition's rows now; their memory is freed after the last reader.", 0, 0,
     cmd_queue_clear},
    {"end", "", "say that no more partitions will come", "", "Lets tasks that wait for rows end.",
     0, 0, cmd_queue_end},
    {"stat", "", "print what the queue holds", "", "Shows partitions, columns and tasks.", 0, 0,
     cmd_queue_stat},
};

enum { VERBS = sizeof verbs / sizeof verbs[0] };

/* All options; `group` is the letter by which verbs list them, 0 the common ones. */
static const struct option_of {
    char letter;
    struct argp_option option;
} all_options[] = {
    {'t',
     {"task", 't', "NAME:NEEDS>WRITES", 0,
      "A task: its name, the columns that it needs and those that it writes (again for each)", 0}},
    {'a',
     {"max-attempts", KEY_ATTEMPTS, "N", 0, "Failed attempts after which a row is lost (3)", 0}},
    {'b',
     {"capacity-bytes", KEY_CAPACITY_BYTES, "BYTES", 0,
      "Most bytes of columns at once (4294967296)", 0}},
    {'r', {"capacity-rows", KEY_CAPACITY_ROWS, "N", 0, "Most rows at once (1000000)", 0}},
    {'p', {"partition", 'p', "NAME", 0, "The partition", 0}},
    {'g', {"group-size", 'g', "N", 0, "Rows of one prompt, following each other (1)", 0}},
    {'d',
     {"dtype", 'd', "COLUMN=DTYPE", 0,
      "What numbers of a column are stored as (i64, f64 or bool without it)", 0}},
    {'s', {"seal", KEY_SEAL, NULL, 0, "Seal the partition afterwards", 0}},
    {'n', {"rows", 'n', "N", 0, "How many rows it must have", 0}},
    {'k', {"task", 't', "NAME", 0, "The task", 0}},
    {'c', {"count", 'n', "N", 0, "Rows to take (1)", 0}},
    {'u', {"up-to", 'u', NULL, 0, "Take fewer where fewer are ready", 0}},
    {'o',
     {"policy", 'o', "POLICY", 0,
      "fifo (default), ordered, group, oldest_version, priority, token_balanced or lockstep", 0}},
    {'B',
     {"consumers", KEY_CONSUMERS, "NAME", 0,
      "Balanced: the group of consumers among whose ranks rows are divided", 0}},
    {'B', {"epoch", KEY_EPOCH, "N", 0, "Raised when that group is formed anew (0)", 0}},
    {'B', {"round", KEY_ROUND, "N", 0, "Lockstep: which round, ascending (0)", 0}},
    {'B', {"rank", KEY_RANK, "N", 0, "Which of the ranks claims (0)", 0}},
    {'B', {"ranks", KEY_RANKS, "N", 0, "How many ranks there are (1)", 0}},
    {'B', {"peer", KEY_PEER, "N", 0, "Lockstep: which of the rank's peers claims (0)", 0}},
    {'B', {"peers", KEY_PEERS, "N", 0, "Lockstep: peers that share a rank's rows (1)", 0}},
    {'B', {"token-cap", KEY_CAP, "N", 0, "Most tokens of a micro-batch", 0}},
    {'B', {"cost", KEY_COST, "TAG", 0, "The tag with a row's tokens (tokens)", 0}},
    {'B', {"micro-rows", KEY_MICRO, "N", 0, "Most rows of a micro-batch", 0}},
    {'T',
     {"tag", 'T', "KEY", 0, "This number of each row is a tag, not a column (again for each)", 0}},
    {'O',
     {"open", KEY_OPEN, NULL, 0, "The task will append to these rows: they stay open for it", 0}},
    {'i', {"refill", KEY_REFILL, "ID", 0, "The rows answer what `refill` printed", 0}},
    {'D', {"decline", KEY_DECLINE, "ID", 0, "There is no other sample for this one", 0}},
    {'V',
     {"version", KEY_VERSION, "N", 0, "Version of the weights that the checkpoint holds (0)", 0}},
    {'v',
     {"provisional", KEY_PROVISIONAL, "TASK", 0,
      "A trainer: its commits wait for a checkpoint, `cursor` (again for each)", 0}},
    {'L',
     {"on-loss", KEY_ON_LOSS, "WHAT", 0,
      "Of rows that are lost: refill (default), shrink_group or "
      "drop_group",
      0}},
    {'y',
     {"durability", KEY_DURABILITY, "WHAT", 0,
      "What is left when the coordinator dies: none (default), checkpoint or journal, which need "
      "`dray serve --journal`",
      0}},
    {'f',
     {"fresh", 'f', "VERSION", 0,
      "Drop ready rows that are too old for this version of the weights", 0}},
    {'S', {"staleness", 'S', "N", 0, "With --fresh: versions that a row may be behind (0)", 0}},
    {'H', {"hold", 'H', "SECONDS", 0, "Take the rows back after this (600)", 0}},
    {'w', {"timeout", 'w', "SECONDS", 0, "How long to wait (60)", 0}},
    {'l', {"column", 'l', "NAME", 0, "Only this column (again for each)", 0}},
    {'e', {"reason", 'e', "TEXT", 0, "Why, for people", 0}},
    {0, {"queue", 'q', "NAME", 0, "The queue (samples)", 20}},
    {0,
     {"connect", 'C', "ADDRESS", 0,
      "The coordinator. Default: $DRAY_ADDRESS, or where dray serve listens by default", 20}},
    {0, {"json", 'j', NULL, 0, "Print what was done as one JSON object", 20}},
};

enum { OPTIONS = sizeof all_options / sizeof all_options[0] };

static void add_dtype(struct argp_state *state, queue_arguments *a, const char *text)
{
    const char *equals = strchr(text, '=');
    dray_dtype dtype = equals ? dray_dtype_parse(equals + 1) : DRAY_DTYPE_NONE;
    cmd_dtype *out = &a->dtypes[a->dtype_count];
    if (!dtype || equals == text || (size_t)(equals - text) >= sizeof out->column)
        argp_error(state, "--dtype '%s': COLUMN=DTYPE expected, like tokens=i32", text);
    snprintf(out->column, sizeof out->column, "%.*s", (int)(equals - text), text);
    out->dtype = dtype;
    a->dtype_count++;
}

static void add_to(struct argp_state *state, const char **list, uint32_t *count, const char *text)
{
    if (*count == QUEUE_LIST_MAX)
        argp_error(state, "more than %d of one kind", QUEUE_LIST_MAX);
    list[(*count)++] = text;
}

static int read_policy(struct argp_state *state, const char *text)
{
    static const char *const names[] = {"fifo",     "ordered",        "group",   "oldest_version",
                                        "priority", "token_balanced", "lockstep"};
    enum { POLICIES = sizeof names / sizeof names[0] };
    for (int i = 0; i < POLICIES; i++)
        if (strcmp(names[i], text) == 0)
            return i; /* as in dray_policy */
    cmd_bad_word(state, "policy", text, names, POLICIES);
    return 0;
}

/* One of three words, as 1, 2 or 3. */
static int read_word(struct argp_state *state, const char *what, const char *text,
                     const char *const names[3])
{
    for (int i = 0; i < 3; i++)
        if (strcmp(names[i], text) == 0)
            return i + 1;
    cmd_bad_word(state, what, text, names, 3);
    return 0;
}

/* In the order of dray_on_loss and dray_durability. */
static const char *const losses[] = {"refill", "shrink_group", "drop_group"};
static const char *const durabilities[] = {"none", "checkpoint", "journal"};

static void check_words(struct argp_state *state, const verb *v, const queue_arguments *a)
{
    if (a->word_count < v->least_words)
        argp_error(state, "expected %s", v->arguments);
    bool balanced = a->policy == DRAY_POLICY_TOKEN_BALANCED || a->policy == DRAY_POLICY_LOCKSTEP;
    if (v->run == cmd_queue_claim && !balanced && (a->consumers || a->ranks > 1 || a->token_cap))
        argp_error(state, "--consumers, --ranks and --token-cap are of the policies token_balanced "
                          "and lockstep");
    if (strchr(v->keys, 'p') && !a->partition && v->run != cmd_queue_claim)
        argp_error(state, "which partition? --partition NAME expected");
    if (v->run == cmd_queue_claim && !a->task)
        argp_error(state, "for which task? --task NAME expected");
    if (v->run == cmd_queue_open && !a->task_count)
        argp_error(state, "a queue needs tasks: --task NAME:NEEDS>WRITES expected");
}

/* Options that are numbers, texts and flags. */
static const struct number {
    int key;
    size_t at;
    const char *what;
    int64_t min, max;
} numbers[] = {
    {'g', offsetof(queue_arguments, group_size), "--group-size", 1, INT32_MAX},
    {'n', offsetof(queue_arguments, rows), "a number of rows", 0, INT32_MAX},
    {'f', offsetof(queue_arguments, fresh), "--fresh", 0, INT64_MAX},
    {'S', offsetof(queue_arguments, staleness), "--staleness", 0, INT32_MAX},
    {'H', offsetof(queue_arguments, hold_s), "--hold", 1, 7 * 86400},
    {'w', offsetof(queue_arguments, timeout_s), "--timeout", 0, 7 * 86400},
    {KEY_REFILL, offsetof(queue_arguments, refill), "--refill", 1, INT64_MAX},
    {KEY_DECLINE, offsetof(queue_arguments, decline), "--decline", 1, INT64_MAX},
    {KEY_VERSION, offsetof(queue_arguments, version), "--version", 0, INT64_MAX},
    {KEY_EPOCH, offsetof(queue_arguments, epoch), "--epoch", 0, INT64_MAX},
    {KEY_ROUND, offsetof(queue_arguments, round), "--round", 0, INT64_MAX},
    {KEY_RANK, offsetof(queue_arguments, rank), "--rank", 0, 1023},
    {KEY_RANKS, offsetof(queue_arguments, ranks), "--ranks", 1, 1024},
    {KEY_PEER, offsetof(queue_arguments, peer), "--peer", 0, 63},
    {KEY_PEERS, offsetof(queue_arguments, peers), "--peers", 1, 64},
    {KEY_CAP, offsetof(queue_arguments, token_cap), "--token-cap", 1, INT64_MAX},
    {KEY_MICRO, offsetof(queue_arguments, micro_rows), "--micro-rows", 1, INT32_MAX},
    {KEY_ATTEMPTS, offsetof(queue_arguments, max_attempts), "--max-attempts", 1, 1000000},
    {KEY_CAPACITY_ROWS, offsetof(queue_arguments, capacity_rows), "--capacity-rows", 1, INT32_MAX},
    {KEY_CAPACITY_BYTES, offsetof(queue_arguments, capacity_bytes), "--capacity-bytes", 1,
     INT64_MAX},
};

static const struct text {
    int key;
    size_t at;
} texts[] = {{'t', offsetof(queue_arguments, task)},
             {'p', offsetof(queue_arguments, partition)},
             {'q', offsetof(queue_arguments, queue)},
             {'e', offsetof(queue_arguments, reason)},
             {KEY_CONSUMERS, offsetof(queue_arguments, consumers)},
             {KEY_COST, offsetof(queue_arguments, cost)},
             {'C', offsetof(queue_arguments, address)}},
  flags[] = {{'u', offsetof(queue_arguments, up_to)},
             {'j', offsetof(queue_arguments, json)},
             {KEY_OPEN, offsetof(queue_arguments, open)},
             {KEY_SEAL, offsetof(queue_arguments, seal)}};

/* false: the key is in none of the tables. */
static bool parse_simple(int key, char *text, struct argp_state *state, char *to)
{
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (numbers[i].key == key) {
            *(int64_t *)(void *)(to + numbers[i].at) =
                cmd_number(state, numbers[i].what, text, numbers[i].min, numbers[i].max);
            return true;
        }
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        if (texts[i].key == key) {
            *(const char **)(void *)(to + texts[i].at) = text;
            return true;
        }
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        if (flags[i].key == key) {
            *(bool *)(to + flags[i].at) = true;
            return true;
        }
    return false;
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    const parsing *p = state->input;
    queue_arguments *a = p->to;
    bool simple = parse_simple(key, text, state, (char *)a);
    if (key == 't')
        add_to(state, a->tasks, &a->task_count, text);
    else if (key == 'd')
        add_dtype(state, a, text);
    else if (key == 'l')
        add_to(state, a->columns, &a->column_count, text);
    else if (key == 'T')
        add_to(state, a->tags, &a->tag_count, text);
    else if (key == KEY_PROVISIONAL)
        add_to(state, a->provisional, &a->provisional_count, text);
    else if (key == KEY_ON_LOSS)
        a->on_loss = read_word(state, "rule", text, losses);
    else if (key == KEY_DURABILITY)
        a->durability = read_word(state, "durability", text, durabilities);
    else if (key == 'o')
        a->policy = read_policy(state, text);
    else if (key == ARGP_KEY_ARG && a->word_count < p->verb->most_words)
        a->words[a->word_count++] = text;
    else if (key == ARGP_KEY_ARG)
        argp_error(state, "expected %s, found '%s' too",
                   p->verb->most_words ? p->verb->arguments : "no arguments", text);
    else if (key == ARGP_KEY_END)
        check_words(state, p->verb, a);
    else if (!simple)
        return ARGP_ERR_UNKNOWN;
    return 0;
}

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
    struct argp_option options[OPTIONS + 1] = {{0}};
    char path[256], fallback[300], name[48];
    queue_arguments a = {.address = getenv("DRAY_ADDRESS"),
                         .queue = "samples",
                         .reason = "given back from a shell",
                         .rows = -1,
                         .fresh = -1,
                         .group_size = 1,
                         .hold_s = HOLD_SECONDS,
                         .timeout_s = WAIT_SECONDS};
    parsing input = {v, &a};
    size_t count = 0;
    for (size_t i = 0; i < OPTIONS; i++)
        if (!all_options[i].letter || strchr(v->keys, all_options[i].letter))
            options[count++] = all_options[i].option;
    const struct argp argp = {
        .options = options, .parser = parse, .args_doc = v->arguments, .doc = v->doc};
    snprintf(name, sizeof name, "dray queue %s", v->name);
    argv[1] = name;
    cmd_parse(&argp, argc - 1, argv + 1, &input);
    if (!a.address || !a.address[0]) {
        snprintf(fallback, sizeof fallback, "unix:%s", dray__default_socket(path, sizeof path));
        a.address = fallback;
    }
    dray_error error = {0};
    int rc = v->run(&a, &error);
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
