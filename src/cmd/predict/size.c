/* dray size: which split of the devices between a job's engines and its trainer would be fastest.
 */
#include "base/json.h"
#include "cmd/predict/predict.h"
#include "run/job/settings.h"

#include <stdlib.h>
#include <string.h>

typedef struct arguments {
    cmd_predict with;
    int64_t devices;
    double staleness; /* negative for any */
    bool apply;
} arguments;

static void check(const struct argp_state *state, const void *to)
{
    const arguments *a = to;
    cmd_predict_check(state, to);
    if (!a->devices)
        argp_error(state, "expected --devices N: how many devices there are to split");
}

/* Returns the role that waits least, which is the one that others wait for. */
static const char *bottleneck(const dray__job *job, const dray__sizing *s)
{
    uint32_t engine, trainer;
    dray__size_roles(job, &engine, &trainer);
    return s->made.waits[engine].mean < s->made.waits[trainer].mean ? job->roles[engine].name
                                                                    : job->roles[trainer].name;
}

/* Prints the roles as the job has them, with all of their settings, but for the split. */
static int print_roles(const dray__job *job, const dray__sizing *s, dray_error *error)
{
    dray__job changed = *job;
    dray__job_role roles[64];
    uint32_t engine, trainer;
    char *text = NULL;
    dray__size_roles(job, &engine, &trainer);
    memcpy(roles, job->roles, job->role_count * sizeof(*roles));
    roles[engine].instances = s->instances;
    static char none[] =
        ""; /* devices that were chosen for another split are not those of this one */
    if (s->instances != job->roles[engine].instances)
        roles[engine].devices = none;
    if (s->ranks != job->roles[trainer].ranks)
        roles[trainer].devices = none;
    roles[trainer].ranks = s->ranks;
    for (uint32_t i = 0; i < job->role_count; i++) {
        bool here = job->roles[i].local == dray__role_places(&job->roles[i]);
        int64_t places = dray__role_places(&roles[i]);
        roles[i].local = here || roles[i].local > places ? places : roles[i].local;
    }
    changed.roles = roles;
    int rc = dray__settings_yaml(&changed, &text, error);
    const char *line = rc ? NULL : strstr(text, "\nroles:\n");
    /* The section's lines are those that begin with a space or with an item of the list. */
    while (line) {
        size_t length = strcspn(line + 1, "\n");
        printf("%.*s\n", (int)length, line + 1);
        line += length + 1;
        line = *line && (line[1] == ' ' || line[1] == '-') ? line : NULL;
    }
    free(text);
    return rc;
}

static void print_json(const arguments *a, const dray__job *job, const dray__sizing *splits,
                       uint32_t count, double engine_more, double trainer_more, bool estimated)
{
    for (uint32_t i = 0; i < count; i++) {
        const dray__sizing *s = &splits[i];
        cmd_json_line(json_pack(
            "{s:s, s:I, s:I, s:f, s:f, s:f, s:s, s:b}", "event", "split", "instances",
            (json_int_t)s->instances, "ranks", (json_int_t)s->ranks, "samples_per_s",
            s->made.samples_per_s.mean, "step_seconds", s->made.step_seconds.mean, "staleness_mean",
            s->made.staleness_mean.mean, "bottleneck", bottleneck(job, s), "estimated", estimated));
    }
    cmd_json_line(json_pack("{s:s, s:I, s:f, s:f}", "event", "end", "devices",
                            (json_int_t)a->devices, "engine_more", engine_more, "trainer_more",
                            trainer_more));
}

static void print_text(const dray__job *job, const dray__sizing *splits, uint32_t count,
                       double engine_more, double trainer_more, bool estimated)
{
    static const char *const headings[] = {
        ">engines",        ">trainer ranks",   ">samples/s", ">step", ">staleness",
        ">engines wait %", ">trainer waits %", "bottleneck", NULL};
    uint32_t engine, trainer;
    dray__size_roles(job, &engine, &trainer);
    if (estimated)
        printf("an ESTIMATE from a device's figures, not from a trace\n\n");
    cmd_table *table = cmd_table_new(headings);
    for (uint32_t i = 0; i < count; i++) {
        const dray__prediction *p = &splits[i].made;
        cmd_cell(table, "%lld", (long long)splits[i].instances);
        cmd_cell(table, "%lld", (long long)splits[i].ranks);
        cmd_cell(table, "%.4g", p->samples_per_s.mean);
        cmd_cell(table, "%s", dray__say_seconds(p->step_seconds.mean).s);
        cmd_cell(table, "%.2f", p->staleness_mean.mean);
        cmd_cell(table, "%.1f", 100 * p->waits[engine].mean);
        cmd_cell(table, "%.1f", 100 * p->waits[trainer].mean);
        cmd_cell(table, "%s", bottleneck(job, &splits[i]));
    }
    cmd_table_print(table, stdout);
    printf("\none more for the best split: %+.1f %% with another engine, %+.1f %% with "
           "another trainer rank\n",
           100 * (engine_more - 1), 100 * (trainer_more - 1));
}

int cmd_size(int argc, char **argv)
{
    static const cmd_option options[] = {
        CMD_NUMBER(arguments, devices, "devices", 'n', 2, 1024, "N",
                   "Devices to split between engines and trainer"),
        CMD_REAL(arguments, staleness, "staleness", 'm', 0, 64, "MAX",
                 "Leave out splits whose mean staleness is more than that"),
        CMD_FLAG(arguments, apply, "apply", 'a', "Print the best split as roles: of a job file"),
        CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .also = &cmd_predict_usage,
        .arguments = "JOB.yaml",
        .least = 1,
        CMD_ONE_JOB(arguments, with.job),
        .check = check,
        .doc = "Simulates all splits of the devices between the role that generates and the one "
               "that trains, and prints the five with the most samples a second, what each is "
               "bound by, and what one device more would bring.\vAn engine takes as many devices "
               "as it has ranks, each rank of the trainer one. Nothing is run."};
    arguments a = {.staleness = -1};
    cmd_parse(&usage, argc, argv, &a);
    dray__job *job = NULL;
    dray__services services = {0};
    dray__sizing splits[DRAY__SPLITS];
    uint32_t count = 0;
    double engine_more = 1, trainer_more = 1;
    dray_error error;
    int status = cmd_predict_load("size", &a.with, &job, &services, NULL);
    if (status != CMD_OK)
        return status;
    int rc = dray__size(job, &services, a.devices, a.staleness, splits, &count, &engine_more,
                        &trainer_more, &error);
    if (!rc && a.apply)
        rc = print_roles(job, &splits[0], &error);
    else if (!rc && a.with.json)
        print_json(&a, job, splits, count, engine_more, trainer_more, services.estimated);
    else if (!rc)
        print_text(job, splits, count, engine_more, trainer_more, services.estimated);
    dray__services_free(&services);
    dray__job_free(job);
    return rc ? cmd_refuse("size", &error) : CMD_OK;
}
