/* dray run: one job, from its file to its last checkpoint. */
#include "run/run.h"

#include "cmd/cmd.h"
#include "run/job/settings.h"
#include "run/join/manifest.h"
#include "run/supervisor/spawn.h"

#include <stdlib.h>

enum { INTERRUPTED = 130 };

typedef struct arguments {
    dray__run_options run;
    cmd_list job;
    cmd_settings settings;
    bool settings_only;
    const char *image;
    int print;      /* index in `prints`; -1 for none */
    int64_t parent; /* the process with which this one ends; 0 when there is none */
} arguments;

static void check(const struct argp_state *state, const void *to)
{
    const arguments *a = to;
    const char *job = a->job.items[0];
    const char *given[] = {job, a->run.out, a->run.resume};
    for (size_t i = 0; i < sizeof(given) / sizeof(given[0]); i++)
        if (given[i] && !given[i][0])
            argp_error(state, "expected a path, found an empty one");
    if (a->settings_only && (a->run.resume || job || a->run.out || a->settings.list.count))
        argp_error(state, "--settings prints what job files may say, and runs none");
    if (!a->settings_only && !a->run.resume && !job)
        argp_error(state, "expected a job file, as in: dray run examples/reverse.yaml");
    if (a->print >= 0 && a->run.resume)
        argp_error(state, "--print takes a job file, and no run to go on with");
    if (a->image && a->print != 1)
        argp_error(state, "--image is for --print k8s");
    if (a->run.resume && (job || a->run.out || a->settings.list.count))
        argp_error(state, "--resume goes on with the run as it is: no job file, --set, --seed or "
                          "--out beside it");
}

/* Appends the keys of a job file to the text of --help. */
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

static const char *const prints[] = {"job", "k8s", NULL};

static int print_job(const arguments *a)
{
    dray_error error;
    json_t *made = NULL;
    const dray__manifest_options options = {.job = a->run.job,
                                            .settings = a->run.settings,
                                            .setting_count = a->run.setting_count,
                                            .out = a->run.out,
                                            .image = a->image ? a->image : "dray"};
    int rc = a->print ? dray__manifest_k8s(&options, &made, &error)
                      : dray__manifest_job(&options, &made, &error);
    if (rc)
        return cmd_refuse_job("run", &error);
    bool whole = json_dumpf(made, stdout, JSON_INDENT(2)) == 0 && putchar('\n') >= 0;
    json_decref(made);
    return whole ? CMD_OK : cmd_failf("run", "the job cannot be printed");
}

int cmd_run(int argc, char **argv)
{
    static const cmd_option options[] = {
        CMD_SET(arguments, settings.list, "Change a setting of the job, as in --set actor.lr=1e-3"),
        CMD_TEXT(arguments, run.out, "out", 'o', "DIR",
                 "The run's folder. Default: runs/NAME, or runs/NAME-2, ..."),
        CMD_SEED(arguments, settings), CMD_JSON(arguments, run.json),
        CMD_FLAG(arguments, settings_only, "settings", 'l',
                 "Print all settings of a job file with their defaults, as Markdown, and run "
                 "nothing; with --json one object a line"),
        CMD_WORD(arguments, print, "print", 'p', prints, "form", "FORM",
                 "Print the job, and run nothing: `job`: as resolved, in JSON; `k8s`: a JobSet for "
                 "Kubernetes, for kubectl apply -f -"),
        CMD_TEXT(arguments, image, "image", 'i', "IMAGE",
                 "Of the containers of --print k8s, with dray and what the roles need"),
        CMD_TEXT(arguments, run.resume, "resume", 'r', "DIR",
                 "Go on with the run in DIR from its last checkpoint"),
        /* The process of the study that this run ends with. */
        CMD_NUMBER(arguments, parent, "parent", 0, 1, INT32_MAX, "PID", NULL), CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .arguments = "JOB.yaml\n--resume DIR\n--settings",
        CMD_ONE_JOB(arguments, job),
        .check = check,
        .doc = "Runs an RL job: rollout, rewards and training on this machine, samples through the "
               "queue, weights back to the engine.\vCtrl-C stops after the step and a checkpoint; "
               "a second one stops at once. What the settings of a job file mean: --settings. Exit "
               "status: 0 done, 1 failed, 2 wrong usage or a job that is refused, 130 stopped by "
               "Ctrl-C.",
        .help = help};
    arguments a = {.print = -1};
    cmd_parse(&usage, argc, argv, &a);
    a.run.job = a.job.items[0];
    a.run.settings = a.settings.list.items;
    a.run.setting_count = a.settings.list.count;
    if (a.settings_only)
        return print_settings(a.run.json);
    if (a.print >= 0)
        return print_job(&a);
    dray__run_end end = DRAY__RUN_DONE;
    dray_error error;
    if (a.parent && dray__child_follow((pid_t)a.parent, &error))
        return cmd_fail("run", &error);
    if (dray__run(&a.run, &end, &error))
        return a.run.job ? cmd_refuse_job("run", &error) : cmd_refuse("run", &error);
    if (end == DRAY__RUN_KILLED)
        return cmd_failf("run", "stopped at once"), INTERRUPTED;
    return end == DRAY__RUN_STOPPED ? INTERRUPTED : CMD_OK;
}
