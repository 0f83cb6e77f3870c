/* dray run: one job, from its file to its last checkpoint. */
#include "run/run.h"

#include "cmd/cmd.h"
#include "run/settings.h"
#include "run/spawn.h"

#include <stdlib.h>
#include <string.h>

enum { INTERRUPTED = 130, SETTINGS = 64, PARENT = 1001 };

typedef struct arguments {
    dray__run_options run;
    const char *settings[SETTINGS];
    char seed[32];
    bool settings_only;
    pid_t parent; /* 0: none that this process would end with */
} arguments;

static void add_setting(struct argp_state *state, arguments *a, const char *text)
{
    if (a->run.setting_count == SETTINGS)
        argp_error(state, "at most %d settings expected", SETTINGS);
    a->settings[a->run.setting_count++] = text;
}

static void check(struct argp_state *state, const arguments *a)
{
    const char *given[] = {a->run.job, a->run.out, a->run.resume};
    for (size_t i = 0; i < sizeof(given) / sizeof(given[0]); i++)
        if (given[i] && !given[i][0])
            argp_error(state, "expected a path, found an empty one");
    if (a->settings_only && (a->run.resume || a->run.job || a->run.out || a->run.setting_count))
        argp_error(state, "--settings prints what job files may say, and runs none");
    if (!a->settings_only && !a->run.resume && !a->run.job)
        argp_error(state, "expected a job file, as in: dray run examples/reverse.yaml");
    if (a->run.resume && (a->run.job || a->run.out || a->run.setting_count))
        argp_error(state, "--resume goes on with the run as it is: no job file, --set, --seed or "
                          "--out beside it");
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    arguments *a = state->input;
    switch (key) {
    case 's':
        add_setting(state, a, text);
        return 0;
    case 'S':
        snprintf(a->seed, sizeof(a->seed), "seed=%lld",
                 (long long)cmd_number(state, "seed", text, 0, INT64_C(1) << 53));
        add_setting(state, a, a->seed);
        return 0;
    case 'o':
        a->run.out = text;
        return 0;
    case 'r':
        a->run.resume = text;
        return 0;
    case 'l':
        a->settings_only = true;
        return 0;
    case 'j':
        a->run.json = true;
        return 0;
    case PARENT:
        a->parent = (pid_t)cmd_number(state, "process", text, 1, INT32_MAX);
        return 0;
    case ARGP_KEY_ARG:
        if (a->run.job)
            argp_error(state, "one job file expected, found '%s' too", text);
        a->run.job = text;
        return 0;
    case ARGP_KEY_END:
        check(state, a);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* The keys of a job file stand behind the text of --help. */
static char *help(int key, const char *text, void *input)
{
    (void)input;
    char *keys = key == ARGP_KEY_HELP_POST_DOC ? dray__settings_keys() : NULL, *whole = NULL;
    if (!keys || asprintf(&whole, "%s\n\nKeys of a job file: %s.", text, keys) < 0)
        whole = (char *)(uintptr_t)text;
    free(keys);
    return whole;
}

static int print_settings(bool json)
{
    return dray__settings_print(stdout, json) ? CMD_OK
                                              : cmd_failf("run", "the settings cannot be printed");
}

int cmd_run(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"set", 's', "KEY=VALUE", 0, "Change a setting of the job, as in --set actor.lr=1e-3", 0},
        {"out", 'o', "DIR", 0, "The run's folder. Default: runs/NAME, or runs/NAME-2, ...", 0},
        {"seed", 'S', "N", 0, "The same as --set seed=N", 0},
        {"json", 'j', NULL, 0, "Print one object a line", 0},
        {"settings", 'l', NULL, 0,
         "Print all settings of a job file with their defaults, as Markdown, and run nothing; with "
         "--json one object a line",
         0},
        {"resume", 'r', "DIR", 0, "Go on with the run in DIR from its last checkpoint", 0},
        {"parent", PARENT, "PID", OPTION_HIDDEN, "The study that this run ends with", 0},
        {0}};
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .args_doc = "JOB.yaml\n--resume DIR\n--settings",
        .doc = "Runs an RL job: rollout, rewards and training on this machine, samples through the "
               "queue, weights back to the engine.\v"
               "Ctrl-C stops after the step and a checkpoint; a second one stops at once. What the "
               "settings of a job file mean: --settings. Exit status: 0 done, 1 failed, 2 wrong "
               "usage or a job that is refused, 130 stopped by Ctrl-C.",
        .help_filter = help};
    arguments a = {0};
    a.run.settings = a.settings;
    cmd_parse(&argp, argc, argv, &a);
    if (a.settings_only)
        return print_settings(a.run.json);
    dray__run_end end = DRAY__RUN_DONE;
    dray_error error;
    if (a.parent && dray__child_follow(a.parent, &error))
        return cmd_fail("run", &error);
    if (dray__run(&a.run, &end, &error))
        return a.run.job ? cmd_refuse_job("run", &error) : cmd_refuse("run", &error);
    if (end == DRAY__RUN_KILLED)
        return cmd_failf("run", "stopped at once"), INTERRUPTED;
    return end == DRAY__RUN_STOPPED ? INTERRUPTED : CMD_OK;
}
