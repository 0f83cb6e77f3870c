/* dray study: one job under several schedules and seeds, with intervals. */
#include "run/study/study.h"

#include "base/json.h"

#include "cmd/cmd.h"
#include "cmd/study/study.h"
#include "run/paths.h"

#include <stdlib.h>
#include <string.h>

enum { INTERRUPTED = 130, SEEDS_MAX = 1000 };

typedef struct arguments {
    dray__study_options study;
    cmd_list job, settings;
    int64_t seeds;
    bool json;
} arguments;

static void check(const struct argp_state *state, const void *to)
{
    const arguments *a = to;
    if (!a->job.count)
        argp_error(state, "expected a job file, as in: dray study examples/reverse.yaml "
                          "--schedules sync --seeds 3");
    if (!a->study.schedules)
        argp_error(state, "expected --schedules LIST, as in: --schedules sync,one_step_async");
    if (!a->seeds)
        argp_error(state, "expected --seeds N: how many runs of each schedule");
    if (!a->job.items[0][0] || (a->study.out && !a->study.out[0]))
        argp_error(state, "expected a path, found an empty one");
}

/* ---- progress -------------------------------------------------------------------------------- */

static const char *word(const json_t *o, const char *key)
{
    const char *text = dray__json_string(o, key);
    return text ? text : "";
}

static double measure(const json_t *o, const char *key)
{
    return dray__json_number(json_object_get(o, "measures"), key);
}

static void say_run(const json_t *o)
{
    const json_t *reached = json_object_get(json_object_get(o, "measures"), "steps_to_accuracy");
    printf("[%lld/%lld] %s seed %lld: ", dray__json_integer(o, "number"),
           dray__json_integer(o, "of"), word(o, "schedule"), dray__json_integer(o, "seed"));
    if (word(o, "error")[0]) {
        printf("failed: %s\n", word(o, "error"));
        return;
    }
    printf("held-out %.3f (%.3f at the start)", measure(o, "accuracy_end"),
           measure(o, "accuracy_start"));
    if (reached)
        printf(", reached at step %.0f", json_number_value(reached));
    printf(", %s", dray__say_seconds(measure(o, "seconds")).s);
    if (word(o, "diverged")[0])
        printf("; diverged: %s", word(o, "diverged"));
    printf("%s\n", dray__json_true(o, "before") ? "; run before" : "");
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
        printf("%lld runs in %s\n", dray__json_integer(object, "runs"), word(object, "folder"));
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
    int rc = whole_text ? dray__write_text(folder, name, text, error)
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
        if (dray__json_integer(schedule, "failed"))
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
    static const cmd_option options[] = {
        CMD_TEXT(arguments, study.schedules, "schedules", 'S', "LIST",
                 "What to compare, with commas between; settings behind colons, as in "
                 "sync,async:staleness=2. The first is the one that others are compared with"),
        CMD_NUMBER(arguments, seeds, "seeds", 'n', 1, SEEDS_MAX, "N",
                   "Runs of each: with the job's seed, and those after it"),
        CMD_SET(arguments, settings, "Change a setting of all runs"),
        CMD_ABOVE(arguments, study.accuracy, "accuracy", 'a', 0, 1, "A",
                  "Held-out accuracy to which steps are counted. Default: 0.9"),
        CMD_TEXT(arguments, study.out, "out", 'o', "DIR",
                 "The study's folder. Default: studies/NAME"),
        CMD_JSON(arguments, json),
        CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .arguments = "JOB.yaml",
        CMD_ONE_JOB(arguments, job),
        .check = check,
        .doc = "Runs a job under several schedules with several seeds, one run after the other, "
               "and compares what they learn and how fast.\vMeans come with 95 % bootstrap "
               "intervals, differences are by seed. Runs that are done already are not run again, "
               "and one that is not goes on: the same command continues a study that was stopped "
               "(Ctrl-C). DIR gets study.json, study.html and two plots. Exit status: 0 done, 1 "
               "some runs failed, 2 wrong usage or a job that is refused, 130 stopped by Ctrl-C."};
    arguments a = {.study = {.accuracy = 0.9, .tell = tell}};
    cmd_parse(&usage, argc, argv, &a);
    a.study.user = &a;
    a.study.job = a.job.items[0];
    a.study.settings = a.settings.items;
    a.study.setting_count = a.settings.count;
    a.study.seeds = (uint32_t)a.seeds;
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
