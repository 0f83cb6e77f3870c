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

enum { PARTS = sizeof(parts) / sizeof(parts[0]), DEFAULT_REPEATS = 7 };

static error_t parse_common(int key, char *text, struct argp_state *state)
{
    bench_settings *s = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        *s = (bench_settings){.repeats = DEFAULT_REPEATS};
        return 0;
    case 'j':
        s->json = true;
        return 0;
    case 's':
        s->strict = true;
        return 0;
    case 'q':
        s->quick = true;
        return 0;
    case 'n':
        s->repeats = (unsigned)cmd_number(state, "--repeat", text, 1, 10000);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option common[] = {
    {"json", 'j', NULL, 0, "Print one object a row, as soon as it is measured", 20},
    {"strict", 's', NULL, 0, "Exit status 1 when a target is missed", 20},
    {"quick", 'q', NULL, 0, "Small sizes, once: does it run at all?", 20},
    {"repeat", 'n', "N", 0, "How often each thing is measured (7)", 20},
    {0}};

const struct argp bench_argp = {common, parse_common, NULL, NULL, NULL, NULL, NULL};

static error_t parse_placements(int key, char *text, struct argp_state *state)
{
    bench_placements *p = state->input;
    switch (key) {
    case 'm':
        p->model = text;
        return 0;
    case 'f':
        p->from = text;
        return 0;
    case 't':
        p->to = text;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option placements[] = {
    {"model", 'm', "MODEL", 0, "A name of the built-in table, or the path of a config.json", 1},
    {"from", 'f', "SPEC", 0, "Where the trainer's ranks have it: fsdp:4, full, ...", 1},
    {"to", 't', "SPEC", 0, "Where the engine's ranks want it: engine:tp=2, ...", 1},
    {0}};

const struct argp bench_placements_argp = {placements, parse_placements, NULL, NULL, NULL, NULL,
                                           NULL};

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
