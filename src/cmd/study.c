/* dray study: one job under several schedules and seeds, with intervals. */
#include "run/study.h"

#include "cmd/cmd.h"
#include "cmd/study.h"

#include <stdlib.h>
#include <string.h>

enum { INTERRUPTED = 130, SETTINGS = 64, SEEDS_MAX = 1000 };

typedef struct arguments {
    dray__study_options study;
    const char *settings[SETTINGS];
    bool json;
} arguments;

static double share(const struct argp_state *state, const char *text)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !(value > 0 && value <= 1))
        argp_error(state, "--accuracy: expected a number above 0 and up to 1, found '%s'", text);
    return value;
}

static void check(struct argp_state *state, const arguments *a)
{
    if (!a->study.job)
        argp_error(state, "expected a job file, as in: dray study examples/reverse.yaml "
                          "--schedules sync --seeds 3");
    if (!a->study.schedules)
        argp_error(state, "expected --schedules LIST, as in: --schedules sync,one_step_async");
    if (!a->study.seeds)
        argp_error(state, "expected --seeds N: how many runs of each schedule");
    if (!a->study.job[0] || (a->study.out && !a->study.out[0]))
        argp_error(state, "expected a path, found an empty one");
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    arguments *a = state->input;
    switch (key) {
    case 'S':
        a->study.schedules = text;
        return 0;
    case 'n':
        a->study.seeds = (uint32_t)cmd_number(state, "number of seeds", text, 1, SEEDS_MAX);
        return 0;
    case 's':
        if (a->study.setting_count == SETTINGS)
            argp_error(state, "at most %d settings expected", SETTINGS);
        a->settings[a->study.setting_count++] = text;
        return 0;
    case 'a':
        a->study.accuracy = share(state, text);
        return 0;
    case 'o':
        a->study.out = text;
        return 0;
    case 'j':
        a->json = true;
        return 0;
    case ARGP_KEY_ARG:
        if (a->study.job)
            argp_error(state, "one job file expected, found '%s' too", text);
        a->study.job = text;
        return 0;
    case ARGP_KEY_END:
        check(state, a);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ---- progress -------------------------------------------------------------------------------- */

static const char *word(const json_t *o, const char *key)
{
    const char *text = json_string_value(json_object_get(o, key));
    return text ? text : "";
}

static long long whole(const json_t *o, const char *key)
{
    return json_integer_value(json_object_get(o, key));
}

static double measure(const json_t *o, const char *key)
{
    return json_number_value(json_object_get(json_object_get(o, "measures"), key));
}

static void say_run(const json_t *o)
{
    const json_t *reached = json_object_get(json_object_get(o, "measures"), "steps_to_accuracy");
    printf("[%lld/%lld] %s seed %lld: ", whole(o, "number"), whole(o, "of"), word(o, "schedule"),
           whole(o, "seed"));
    if (word(o, "error")[0]) {
        printf("failed: %s\n", word(o, "error"));
        return;
    }
    printf("held-out %.3f (%.3f at the start)", measure(o, "accuracy_end"),
           measure(o, "accuracy_start"));
    if (reached)
        printf(", reached at step %.0f", json_number_value(reached));
    printf(", %s", cmd_seconds(measure(o, "seconds")).s);
    if (word(o, "diverged")[0])
        printf("; diverged: %s", word(o, "diverged"));
    printf("%s\n", json_is_true(json_object_get(o, "before")) ? "; run before" : "");
}

static void tell(void *user, const char *event, const json_t *object)
{
    const arguments *a = user;
    if (a->json) {
        json_t *line = json_pack("{s:s}", "event", event);
        if (line && json_object_update(line, (json_t *)(uintptr_t)object) < 0)
            line = NULL;
        cmd_json_line(line);
        return;
    }
    if (strcmp(event, "run") == 0)
        say_run(object);
    else if (strcmp(event, "start") == 0)
        printf("%lld runs in %s\n", whole(object, "runs"), word(object, "folder"));
    else if (strcmp(event, "stopping") == 0)
        printf("%s\n", word(object, "message"));
    fflush(stdout);
}

/* ---- results --------------------------------------------------------------------------------- */

static void plot_samples(const json_t *study, FILE *out)
{
    cmd_study_plot(study, false, out);
}

static void plot_seconds(const json_t *study, FILE *out)
{
    cmd_study_plot(study, true, out);
}

static int write_file(const json_t *study, const char *folder, const char *name,
                      void (*print)(const json_t *, FILE *), dray_error *error)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    if (out)
        print(study, out);
    bool whole_text = out && !ferror(out);
    if (out && fclose(out) != 0)
        whole_text = false;
    int rc = whole_text ? dray__study_write(folder, name, text, error)
                        : cmd_error(error, DRAY_ENOMEM, "%s: out of memory", name);
    free(text);
    return rc;
}

static int write_pages(const json_t *study, const char *folder, dray_error *error)
{
    static const struct {
        const char *name;
        void (*print)(const json_t *, FILE *);
    } files[] = {{"study.html", cmd_study_page},
                 {"accuracy-samples.svg", plot_samples},
                 {"accuracy-seconds.svg", plot_seconds}};
    int rc = DRAY_OK;
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]) && !rc; i++)
        rc = write_file(study, folder, files[i].name, files[i].print, error);
    return rc;
}

static bool any_failed(const json_t *study)
{
    size_t i;
    json_t *schedule;
    json_array_foreach(json_object_get(study, "schedules"), i, schedule)
    {
        if (whole(schedule, "failed"))
            return true;
    }
    return false;
}

static int show(const arguments *a, const json_t *study, const char *folder, dray__run_end end)
{
    dray_error error;
    if (write_pages(study, folder, &error))
        return cmd_fail("study", &error);
    if (a->json) {
        json_t *line = json_pack("{s:s, s:s}", "event", "end", "folder", folder);
        if (line && json_object_update(line, (json_t *)(uintptr_t)study) < 0)
            line = NULL;
        cmd_json_line(line);
    } else {
        cmd_study_tables(study, false, stdout);
        printf("\n%s/study.html\n", folder);
    }
    if (end == DRAY__RUN_DONE)
        return any_failed(study) ? CMD_FAILED : CMD_OK;
    cmd_failf("study", "stopped; the same command goes on with %s", folder);
    return INTERRUPTED;
}

int cmd_study(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"schedules", 'S', "LIST", 0,
         "What to compare, with commas between; settings behind colons, as in "
         "sync,async:staleness=2. The first is the one that others are compared with",
         0},
        {"seeds", 'n', "N", 0, "Runs of each: with the job's seed, and those after it", 0},
        {"set", 's', "KEY=VALUE", 0, "Change a setting of all runs", 0},
        {"accuracy", 'a', "A", 0, "Held-out accuracy to which steps are counted. Default: 0.9", 0},
        {"out", 'o', "DIR", 0, "The study's folder. Default: studies/NAME", 0},
        {"json", 'j', NULL, 0, "Print one object a line", 0},
        {0}};
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .args_doc = "JOB.yaml",
        .doc =
            "Runs a job under several schedules with several seeds, one run after the other, and "
            "compares what they learn and how fast.\v"
            "Means come with 95 % bootstrap intervals, differences are by seed. Runs that are "
            "done already are not run again, and one that is not goes on: the same command "
            "continues a study that was stopped (Ctrl-C). DIR gets study.json, study.html and "
            "two plots. Exit status: 0 done, 1 some runs failed, 2 wrong usage or a job that is "
            "refused, 130 stopped by Ctrl-C."};
    arguments a = {.study = {.accuracy = 0.9, .tell = tell}};
    a.study.settings = a.settings;
    a.study.user = &a;
    cmd_parse(&argp, argc, argv, &a);
    dray__run_end end = DRAY__RUN_DONE;
    json_t *study = NULL;
    char *folder = NULL;
    dray_error error;
    if (dray__study(&a.study, &end, &study, &folder, &error))
        return cmd_refuse_job("study", &error);
    int status = show(&a, study, folder, end);
    json_decref(study);
    free(folder);
    return status;
}
