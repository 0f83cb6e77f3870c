/* dray simulate: how long the steps of a job would take, from the trace of a run. */
#include "base/json.h"
#include "cmd/predict/predict.h"

#include <dray/trace.h>
#include <stdlib.h>
#include <string.h>

typedef struct arguments {
    cmd_predict with;
    int64_t runs;
} arguments;

static const char *const causes[DRAY__SIM_CAUSES] = {"unknown", "samples",    "weights",  "readers",
                                                     "ranks",   "admission",  "capacity", "tool",
                                                     "restart", "controller", "lease"};

static json_t *spread(const dray__spread *s)
{
    return json_pack("{s:f, s:f}", "mean", s->mean, "deviation", s->deviation);
}

/* The model's error for a run that it was fitted on. */
typedef struct off {
    const char *trace;
    double simulated, measured;
    dray_error error; /* code 0 when there is none */
} off;

static void check_trace(const char *trace, const dray__services *own, off *out)
{
    *out = (off){.trace = trace, .measured = own->measured};
    dray__services_check(trace, own, &out->simulated, &out->error);
}

static void print_check(const off *is)
{
    if (is->error.code)
        printf("%s: cannot be simulated as it was run: %s\n", is->trace, is->error.message);
    else
        printf("%s: %s a step, simulated as it was run %s (%+.1f %%)\n", is->trace,
               dray__say_seconds(is->measured).s, dray__say_seconds(is->simulated).s,
               100 * (is->simulated / is->measured - 1));
}

static json_t *json_of(const off *checks, uint32_t count)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < count; i++) {
        const off *is = &checks[i];
        json_array_append_new(
            list, is->error.code
                      ? json_pack("{s:s, s:s}", "trace", is->trace, "error", is->error.message)
                      : json_pack("{s:s, s:f, s:f, s:f}", "trace", is->trace, "step_seconds",
                                  is->measured, "simulated_seconds", is->simulated, "ratio",
                                  is->simulated / is->measured));
    }
    return list;
}

static void print_json(const dray__job *job, const dray__services *services,
                       const dray__prediction *p, int64_t runs, json_t *checks)
{
    json_t *roles = json_object();
    for (uint32_t i = 0; i < p->roles; i++) {
        json_t *waits = json_object();
        for (int c = 0; c < DRAY__SIM_CAUSES; c++)
            if (p->one.idle[i][c] > 0)
                dray__json_set(&waits, causes[c], json_real(p->one.idle[i][c]));
        dray__json_set(&roles, job->roles[i].name,
                       json_pack("{s:o, s:o, s:f}", "idle", spread(&p->waits[i]), "wait", waits,
                                 "transfer", p->one.transfer[i]));
    }
    cmd_json_line(json_pack("{s:b, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "estimated",
                            services->estimated, "runs", (json_int_t)runs, "first_step",
                            (json_int_t)p->one.first, "last_step", (json_int_t)p->one.last,
                            "step_seconds", spread(&p->step_seconds), "samples_per_s",
                            spread(&p->samples_per_s), "staleness_mean", spread(&p->staleness_mean),
                            "staleness_max", spread(&p->staleness_max), "made_anew",
                            spread(&p->made_anew), "roles", roles, "traces", checks));
}

static void print_text(const dray__job *job, const dray__services *services,
                       const dray__prediction *p, int64_t runs)
{
    static const char *const headings[] = {"role", ">waits %", ">+-", "for (%)", NULL};
    printf("%s, steps %lld to %lld, %lld simulated runs%s\n\n", job->name, (long long)p->one.first,
           (long long)p->one.last, (long long)runs,
           services->estimated ? ": an ESTIMATE from a device's figures, not from a trace" : "");
    printf("step        %s +- %s\n", dray__say_seconds(p->step_seconds.mean).s,
           dray__say_seconds(p->step_seconds.deviation).s);
    printf("samples/s   %.4g +- %.2g\n", p->samples_per_s.mean, p->samples_per_s.deviation);
    printf("staleness   %.3f +- %.3f, at most %.0f\n", p->staleness_mean.mean,
           p->staleness_mean.deviation, p->staleness_max.mean);
    if (p->made_anew.mean > 0)
        printf("made anew   %.2f samples a step, as they were too old\n", p->made_anew.mean);
    printf("\n");
    cmd_table *table = cmd_table_new(headings);
    for (uint32_t i = 0; i < p->roles; i++) {
        char text[256] = "";
        size_t used = 0;
        for (int c = 0; c < DRAY__SIM_CAUSES && used + 32 < sizeof(text); c++)
            if (p->one.idle[i][c] >= 0.0005)
                used += (size_t)snprintf(text + used, sizeof(text) - used, "%s%s %.1f",
                                         used ? ", " : "", causes[c], 100 * p->one.idle[i][c]);
        cmd_cell(table, "%s", job->roles[i].name);
        cmd_cell(table, "%.1f", 100 * p->waits[i].mean);
        cmd_cell(table, "%.1f", 100 * p->waits[i].deviation);
        cmd_cell(table, "%s", text);
    }
    cmd_table_print(table, stdout);
}

int cmd_simulate(int argc, char **argv)
{
    static const cmd_option options[] = {
        CMD_NUMBER(arguments, runs, "runs", 'n', 1, 1000, "N", "Simulated runs. Default: 10"),
        CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .also = &cmd_predict_usage,
        .arguments = "JOB.yaml",
        .least = 1,
        CMD_ONE_JOB(arguments, with.job),
        .check = cmd_predict_check,
        .doc =
            "Predicts how long the steps of a job take, who waits for what, and how old samples "
            "get, with another schedule or other roles than those that were run.\vHow long "
            "tasks take is fitted from the trace of a run of the same job; a line for each trace "
            "says how far the prediction is off for that run itself. Nothing is run. Exit "
            "status: 0 done, 1 the trace cannot be used, 2 wrong usage or a job that is "
            "refused."};
    arguments a = {.runs = DRAY__SIM_RUNS};
    cmd_parse(&usage, argc, argv, &a);
    dray__job *job = NULL;
    dray__services services = {0};
    dray__prediction made;
    dray_error error;
    static dray__services each[CMD_LIST_MAX];
    static off checks[CMD_LIST_MAX];
    int status = cmd_predict_load("simulate", &a.with, &job, &services, each);
    if (status != CMD_OK)
        return status;
    int rc = dray__simulate(job, &services, (uint32_t)a.runs, &made, &error);
    uint32_t count = a.with.traces.count;
    for (uint32_t i = 0; i < count; i++) {
        if (!rc)
            check_trace(a.with.traces.items[i], &each[i], &checks[i]);
        dray__services_free(&each[i]);
    }
    if (!rc && a.with.json)
        print_json(job, &services, &made, a.runs, json_of(checks, count));
    else if (!rc)
        print_text(job, &services, &made, a.runs);
    for (uint32_t i = 0; !rc && !a.with.json && i < count; i++) {
        printf("%s", i ? "" : "\n");
        print_check(&checks[i]);
    }
    dray__services_free(&services);
    dray__job_free(job);
    return rc ? cmd_refuse("simulate", &error) : CMD_OK;
}
