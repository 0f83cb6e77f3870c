#include "run/study/study_read.h"

#include "base/error.h"
#include "base/json.h"
#include "base/words.h"
#include "run/paths.h"
#include "run/report/rows_read.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- rows ------------------------------------------------------------------------------------ */

typedef struct reading {
    const dray__job *job;
    dray__study_run *run;
    json_t *sums, *counts; /* by flattened key, over the rows of steps */
    json_t *times;         /* sums of the roles' times */
    int64_t step;          /* of the last row; -1 for none */
    uint32_t rows;         /* of steps */
    double tokens;
    bool scored; /* the last row has an evaluation */
} reading;

/* Returns whether the key is left out, because its mean over steps has no meaning or it is measured
 * in another way here. */
static bool is_left_out(const char *key)
{
    static const char *const keys[] = {"step",         "tokens",        "samples", "weight_version",
                                       "tokens_per_s", "eval_accuracy", "time"};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++)
        if (strcmp(key, keys[i]) == 0)
            return true;
    return false;
}

static void add_number(reading *r, const char *key, double value)
{
    const json_t *before = json_object_get(r->sums, key);
    double sum = json_number_value(before);
    bool most = dray__ends_with(key, "_max");
    if (!before)
        sum = value;
    else
        sum = most ? fmax(sum, value) : sum + value;
    json_int_t count = most ? 1 : dray__json_integer(r->counts, key) + 1;
    dray__json_set(&r->sums, key, json_real(sum));
    dray__json_set(&r->counts, key, json_integer(count));
}

/* Adds the numbers of nested objects: {"seconds": {"actor": 1}} is seconds.actor. */
static void add_object(reading *r, const char *prefix, const json_t *object)
{
    const char *key;
    json_t *value;
    char name[160];
    json_object_foreach((json_t *)(uintptr_t)object, key, value)
    {
        snprintf(name, sizeof(name), "%s%s", prefix, key);
        if (json_is_number(value) && !is_left_out(name)) {
            add_number(r, name, json_number_value(value));
        } else if (json_is_object(value) && !is_left_out(name)) {
            snprintf(name, sizeof(name), "%s%s.", prefix, key);
            add_object(r, name, value);
        }
    }
}

/* Looks for null, which metrics.jsonl has for numbers that are not finite. */
static void look_for_divergence(reading *r, const json_t *row)
{
    static const char *const keys[] = {"loss", "grad_norm", "ratio_max", "reward_mean"};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++)
        if (!r->run->diverged[0] && json_is_null(json_object_get(row, keys[i])))
            snprintf(r->run->diverged, sizeof(r->run->diverged), "%s is not finite at step %lld",
                     keys[i], (long long)r->step);
}

/* An evaluation counts at the step of its version, which may be earlier than the row's. An
 * evaluation of the same version as the last adds nothing. */
static int add_point(reading *r, const json_t *row, double accuracy, dray_error *error)
{
    dray__study_run *run = r->run;
    const json_t *version = json_object_get(row, "eval_version");
    double step = json_is_integer(version) ? json_number_value(version) : (double)r->step;
    if (run->count && run->points[run->count - 1].step >= step)
        return DRAY_OK;
    dray__study_point *points =
        reallocarray(run->points, run->count + (size_t)1, sizeof(*run->points));
    if (!points)
        return dray__nomem(error);
    run->points = points;
    points[run->count++] = (dray__study_point){.step = step, .accuracy = accuracy};
    return DRAY_OK;
}

static void place_points(dray__study_run *run, double step)
{
    for (size_t i = run->count; i-- && run->points[i].step >= step;)
        if (run->points[i].step == step) {
            run->points[i].samples = run->samples;
            run->points[i].seconds = run->seconds;
        }
}

static int take_row(void *user, json_t *row, const char *path, dray_error *error)
{
    reading *r = user;
    const json_t *step = json_object_get(row, "step"),
                 *accuracy = json_object_get(row, "eval_accuracy");
    if (!json_is_integer(step) || json_integer_value(step) <= r->step)
        return dray__fail(error, DRAY_EFORMAT, "%s: expected a row of a step after %lld", path,
                          (long long)r->step);
    r->step = json_integer_value(step);
    if (r->step > 0) {
        r->run->samples += dray__json_number(row, "samples");
        r->tokens += dray__json_number(row, "tokens");
        r->run->seconds += dray__json_number(row, "step_seconds");
        add_object(r, "", row);
        dray__study_add_time(&r->times, row);
        look_for_divergence(r, row);
        r->rows++;
    }
    r->scored = json_is_number(accuracy);
    int rc = r->scored ? add_point(r, row, json_number_value(accuracy), error) : DRAY_OK;
    place_points(r->run, (double)r->step);
    return rc;
}

/* ---- measures -------------------------------------------------------------------------------- */

/* Means are over the rows that have the key. Rows without a key of `seconds` are those of steps
 * that spent no time on it, such as steps without a checkpoint. */
static void set_means(reading *r)
{
    const char *key;
    json_t *sum;
    json_object_foreach(r->sums, key, sum)
    {
        bool spent = strncmp(key, "seconds.", 8) == 0;
        double count = spent ? r->rows : dray__json_number(r->counts, key);
        dray__json_set(&r->run->measures, key, json_real(json_number_value(sum) / count));
    }
}

static void set_totals(reading *r)
{
    dray__study_run *run = r->run;
    double first = run->points[0].accuracy, last = run->points[run->count - 1].accuracy;
    dray__json_set(&run->measures, "accuracy_start", json_real(first));
    dray__json_set(&run->measures, "accuracy_end", json_real(last));
    dray__json_set(&run->measures, "seconds", json_real(run->seconds));
    if (run->seconds > 0) {
        dray__json_set(&run->measures, "samples_per_s", json_real(run->samples / run->seconds));
        dray__json_set(&run->measures, "tokens_per_s", json_real(r->tokens / run->seconds));
    }
    if (last < first && !run->diverged[0])
        snprintf(run->diverged, sizeof(run->diverged),
                 "held-out accuracy %.3f at the end, %.3f at the start", last, first);
}

int dray__study_read(const char *folder, const dray__job *job, dray__study_run *out,
                     dray_error *error)
{
    char path[PATH_MAX];
    dray__study_run run = {.measures = json_object()};
    reading r = {.job = job,
                 .run = &run,
                 .sums = json_object(),
                 .counts = json_object(),
                 .times = json_object(),
                 .step = -1};
    dray__path(path, sizeof(path), "%s/metrics.jsonl", folder);
    int rc = dray__rows_each(path, take_row, &r, error);
    if (!rc && r.step == job->steps && r.scored) {
        run.finished = true;
        set_totals(&r);
        set_means(&r);
        dray__study_set_shares(r.times, run.measures);
    }
    if (!rc && !(run.measures && r.sums && r.counts && r.times))
        rc = dray__nomem(error);
    json_decref(r.sums);
    json_decref(r.counts);
    json_decref(r.times);
    if (rc)
        dray__study_run_free(&run);
    else
        *out = run;
    return rc;
}

void dray__study_run_free(dray__study_run *run)
{
    json_decref(run->measures);
    free(run->points);
    *run = (dray__study_run){0};
}
