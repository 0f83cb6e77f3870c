/* dray bench: looks up the part and calls it. */
#include "cmd/bench.h"

#include <string.h>

typedef struct part {
    const char *name, *summary;
    int (*main)(int argc, char **argv);
} part;

static const part parts[] = {
#define XX(name, summary) {#name, summary, bench_##name},
    BENCH_MAP(XX)
#undef XX
};

enum { PARTS = sizeof(parts) / sizeof(parts[0]) };

static const cmd_option every_options[] = {
    CMD_GROUP(20, "Options of every part:"),
    CMD_FLAG(bench_settings, json, "json", 'j',
             "Print one object a row, as soon as it is measured"),
    CMD_FLAG(bench_settings, strict, "strict", 's', "Exit status 1 when a target is missed"),
    CMD_FLAG(bench_settings, quick, "quick", 'q', "Small sizes, once: does it run at all?"),
    CMD_NUMBER(bench_settings, repeats, "repeat", 'n', 1, 10000, "N",
               "How often each thing is measured (7)"),
    CMD_END};
const cmd_usage bench_usage = {.options = every_options};

static const cmd_option update_options[] = {
    CMD_GROUP(1, NULL),
    CMD_TEXT(bench_update, model, "model", 'm', "MODEL",
             "A name of the built-in table, or the path of a config.json"),
    CMD_TEXT(bench_update, from, "from", 'f', "SPEC",
             "Where the trainer's ranks have it: fsdp:4, full, ..."),
    CMD_TEXT(bench_update, to, "to", 't', "SPEC",
             "Where the engine's ranks want it: engine:tp=2, ..."),
    CMD_END};
const cmd_usage bench_update_usage = {.options = update_options, .also = &bench_usage};

static void print_help(FILE *out)
{
    fputs(
        "Usage: dray bench PART [OPTION...]\n"
        "Measures, always against a limit that is measured in the same run: what a plain memcpy,\n"
        "direct I/O or a bare connection takes for the same bytes. Times on shared machines mean\n"
        "nothing, ratios do.\n"
        "\n"
        "Parts:\n",
        out);
    for (size_t i = 0; i < PARTS; i++)
        fprintf(out, "  %-10s %s\n", parts[i].name, parts[i].summary);
    fputs("\n"
          "  dray bench PART --help   what PART measures and takes\n"
          "\n"
          "Options of every part:\n"
          "  -j, --json      one object a row, as soon as it is measured\n"
          "  -n, --repeat=N  how often each thing is measured (7)\n"
          "  -q, --quick     small sizes, once: does it run at all?\n"
          "  -s, --strict    exit status 1 when a target is missed\n",
          out);
}

int cmd_bench(int argc, char **argv)
{
    const char *word = argc > 1 ? argv[1] : NULL;
    if (word && (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0)) {
        print_help(stdout);
        return CMD_OK;
    }
    const char *names[PARTS];
    char name[64];
    for (size_t i = 0; i < PARTS; i++) {
        names[i] = parts[i].name;
        if (!word || strcmp(word, names[i]) != 0)
            continue;
        snprintf(name, sizeof(name), "dray bench %s", names[i]);
        argv[1] = name;
        return parts[i].main(argc - 1, argv + 1);
    }
    if (word)
        return cmd_bad_part("bench", word, names, PARTS);
    print_help(stderr);
    return CMD_USAGE;
}
