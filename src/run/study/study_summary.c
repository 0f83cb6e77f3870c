/* The summary of a study's runs. */
#include "run/study/study_list.h"

#include "base/error.h"
#include "base/json.h"
#include "run/job/settings.h"

#include <math.h>
#include <stdlib.h>

/* Points of a curve with its band, and resamples for each. */
enum { GRID = 60, BAND_RESAMPLES = 1000 };

typedef struct summary {
    const dray__study_plan *plan;
    double samples, seconds; /* reached by all runs that have ended; 0 when none has */
    double *a, *b;           /* room for one value for each seed */
    dray__point *points;     /* room for the longest curve */
    int rc;
    dray_error *error;
} summary;

static json_t *number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

/* ---- curves of one run ----------------------------------------------------------------------- */

typedef double (*axis_fn)(const dray__study_point *point);

static double by_step(const dray__study_point *p)
{
    return p->step;
}

static double by_samples(const dray__study_point *p)
{
    return p->samples;
}

static double by_seconds(const dray__study_point *p)
{
    return p->seconds;
}

static const dray__point *curve(const summary *s, const dray__study_run *run, axis_fn axis)
{
    for (uint32_t i = 0; i < run->count; i++)
        s->points[i] = (dray__point){axis(&run->points[i]), run->points[i].accuracy};
    return s->points;
}

static void set_number(json_t **measures, const char *key, double value)
{
    if (isfinite(value))
        dray__json_set(measures, key, json_real(value));
}

static void measure_curves(const summary *s, dray__study_run *run)
{
    static const struct {
        const char *key;
        axis_fn axis;
    } reached[] = {{"steps_to_accuracy", by_step},
                   {"samples_to_accuracy", by_samples},
                   {"seconds_to_accuracy", by_seconds}};
    set_number(&run->measures, "accuracy_at_samples",
               dray__curve_at(curve(s, run, by_samples), run->count, s->samples));
    set_number(&run->measures, "accuracy_at_seconds",
               dray__curve_at(curve(s, run, by_seconds), run->count, s->seconds));
    for (size_t i = 0; i < sizeof(reached) / sizeof(reached[0]); i++)
        set_number(&run->measures, reached[i].key,
                   dray__curve_reach(curve(s, run, reached[i].axis), run->count,
                                     s->plan->options->accuracy));
}

/* ---- over the seeds -------------------------------------------------------------------------- */

static json_t *bootstrap(summary *s, const double *values, const double *below, uint32_t n,
                         uint32_t resamples)
{
    dray__interval i = {0};
    if (!s->rc)
        s->rc = dray__bootstrap(values, below, n, resamples, &i, s->error);
    json_t *o = json_pack("{s:I}", "n", (json_int_t)i.n);
    dray__json_set(&o, "mean", number(i.mean));
    dray__json_set(&o, "low", number(i.low));
    dray__json_set(&o, "high", number(i.high));
    return o;
}

static const json_t *value_of(const dray__study_trial *t, const char *name)
{
    return t->run.finished ? json_object_get(t->run.measures, name) : NULL;
}

/* Compares two schedules by the differences and ratios of their values for the same seeds. */
static void compare(summary *s, const dray__study_entry *first, const dray__study_entry *e,
                    const char *name, json_t **o)
{
    uint32_t n = 0;
    bool positive = true;
    for (uint32_t i = 0; i < s->plan->seed_count; i++) {
        const json_t *a = value_of(&e->trials[i], name), *b = value_of(&first->trials[i], name);
        if (!a || !b)
            continue;
        s->a[n] = json_number_value(a);
        s->b[n++] = json_number_value(b);
        positive = positive && s->b[n - 1] > 0;
    }
    if (!n)
        return;
    if (positive)
        dray__json_set(o, "ratio", bootstrap(s, s->a, s->b, n, DRAY__RESAMPLES));
    for (uint32_t i = 0; i < n; i++)
        s->a[i] -= s->b[i];
    dray__json_set(o, "difference", bootstrap(s, s->a, NULL, n, DRAY__RESAMPLES));
}

static json_t *summarise_measure(summary *s, const dray__study_entry *e, const char *name)
{
    const dray__study_entry *first = &s->plan->entries[0];
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->plan->seed_count; i++) {
        const json_t *value = value_of(&e->trials[i], name);
        if (value)
            s->a[n++] = json_number_value(value);
    }
    json_t *o = bootstrap(s, s->a, NULL, n, DRAY__RESAMPLES);
    if (e != first)
        compare(s, first, e, name, &o);
    return o;
}

/* Summarises every measure that a run has, also those that a study does not know by name. */
static json_t *summarise_measures(summary *s, const dray__study_entry *e)
{
    json_t *all = json_object(), *value;
    const char *name;
    for (uint32_t i = 0; i < s->plan->seed_count; i++)
        json_object_foreach(e->trials[i].run.measures, name, value)
        {
            if (!json_object_get(all, name))
                dray__json_set(&all, name, summarise_measure(s, e, name));
        }
    return all;
}

/* [x, mean, low, high] at points that all of the schedule's runs have reached. */
static json_t *summarise_curve(summary *s, const dray__study_entry *e, axis_fn axis)
{
    double most = INFINITY;
    for (uint32_t i = 0; i < s->plan->seed_count; i++)
        if (e->trials[i].run.finished)
            most = fmin(most, axis(&e->trials[i].run.points[e->trials[i].run.count - 1]));
    json_t *all = json_array();
    for (uint32_t k = 0; k <= GRID && isfinite(most); k++) {
        double x = k == GRID ? most : most * k / GRID;
        uint32_t n = 0;
        for (uint32_t i = 0; i < s->plan->seed_count; i++) {
            const dray__study_run *run = &e->trials[i].run;
            double y = run->finished ? dray__curve_at(curve(s, run, axis), run->count, x) : NAN;
            if (isfinite(y))
                s->a[n++] = y;
        }
        if (!n)
            continue;
        json_t *at = bootstrap(s, s->a, NULL, n, BAND_RESAMPLES);
        dray__json_set(&at, "x", json_real(x));
        dray__json_append(&all, at);
    }
    return all;
}

/* ---- the whole ------------------------------------------------------------------------------- */

static json_t *describe_run(const dray__study_trial *t)
{
    const dray__study_run *run = &t->run;
    json_t *points = json_array();
    json_t *o = json_pack("{s:I, s:s}", "seed", (json_int_t)t->seed, "state",
                          run->finished ? "done"
                          : t->error[0] ? "failed"
                                        : "open");
    if (t->error[0])
        dray__json_set(&o, "error", json_string(t->error));
    if (run->diverged[0] && run->finished)
        dray__json_set(&o, "diverged", json_string(run->diverged));
    for (uint32_t i = 0; i < run->count && run->finished; i++)
        dray__json_append(&points,
                          json_pack("{s:f, s:f, s:f, s:f}", "step", run->points[i].step, "samples",
                                    run->points[i].samples, "seconds", run->points[i].seconds,
                                    "accuracy", run->points[i].accuracy));
    if (run->finished)
        dray__json_set(&o, "measures", json_incref(run->measures));
    dray__json_set(&o, "points", points);
    return o;
}

static json_t *summarise_entry(summary *s, const dray__study_entry *e)
{
    json_int_t done = 0, diverged = 0, failed = 0, reached = 0;
    json_t *runs = json_array();
    for (uint32_t i = 0; i < s->plan->seed_count; i++) {
        const dray__study_trial *t = &e->trials[i];
        done += t->run.finished;
        diverged += t->run.finished && t->run.diverged[0];
        failed += t->error[0] != 0;
        reached += value_of(t, "steps_to_accuracy") != NULL;
        dray__json_append(&runs, describe_run(t));
    }
    json_t *o = json_pack("{s:s, s:I, s:I, s:I, s:I}", "schedule", e->text, "done", done,
                          "diverged", diverged, "failed", failed, "reached", reached);
    dray__json_set(&o, "settings", dray__settings_json(e->job));
    dray__json_set(&o, "measures", summarise_measures(s, e));
    json_t *curves = json_object();
    dray__json_set(&curves, "samples", summarise_curve(s, e, by_samples));
    dray__json_set(&curves, "seconds", summarise_curve(s, e, by_seconds));
    dray__json_set(&o, "curves", curves);
    dray__json_set(&o, "runs", runs);
    return o;
}

static int open_summary(summary *s)
{
    uint32_t most = 1;
    s->samples = s->seconds = INFINITY;
    for (uint32_t i = 0; i < s->plan->entry_count; i++)
        for (uint32_t k = 0; k < s->plan->seed_count; k++) {
            const dray__study_run *run = &s->plan->entries[i].trials[k].run;
            if (!run->finished)
                continue;
            most = run->count > most ? run->count : most;
            s->samples = fmin(s->samples, run->samples);
            s->seconds = fmin(s->seconds, run->seconds);
        }
    s->a = calloc(s->plan->seed_count, sizeof(*s->a));
    s->b = calloc(s->plan->seed_count, sizeof(*s->b));
    s->points = calloc(most, sizeof(*s->points));
    if (!s->a || !s->b || !s->points)
        return dray__nomem(s->error);
    for (uint32_t i = 0; i < s->plan->entry_count; i++)
        for (uint32_t k = 0; k < s->plan->seed_count; k++)
            if (s->plan->entries[i].trials[k].run.finished)
                measure_curves(s, &s->plan->entries[i].trials[k].run);
    return DRAY_OK;
}

int dray__study_summary(const dray__study_plan *plan, json_t **out, dray_error *error)
{
    summary s = {.plan = plan, .error = error};
    s.rc = open_summary(&s);
    const dray__job *job = plan->entries[0].job;
    bool complete = true;
    json_t *entries = json_array();
    for (uint32_t i = 0; i < plan->entry_count && !s.rc; i++) {
        dray__json_append(&entries, summarise_entry(&s, &plan->entries[i]));
        for (uint32_t k = 0; k < plan->seed_count; k++)
            complete = complete && plan->entries[i].trials[k].run.finished;
    }
    json_t *o = json_pack("{s:s, s:s, s:I, s:I, s:I, s:f, s:f, s:i, s:b}", "name", job->name, "job",
                          plan->options->job, "steps", (json_int_t)job->steps, "first_seed",
                          (json_int_t)job->seed, "seeds", (json_int_t)plan->seed_count, "accuracy",
                          plan->options->accuracy, "confidence", DRAY__CONFIDENCE, "resamples",
                          (int)DRAY__RESAMPLES, "complete", complete);
    dray__json_set(&o, "samples", number(s.samples));
    dray__json_set(&o, "seconds", number(s.seconds));
    dray__json_set(&o, "schedules", entries);
    free(s.a);
    free(s.b);
    free(s.points);
    if (!s.rc && !o)
        s.rc = dray__nomem(error);
    if (s.rc)
        json_decref(o);
    else
        *out = o;
    return s.rc;
}
