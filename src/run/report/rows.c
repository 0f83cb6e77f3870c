#include "run/report/rows.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/io.h"
#include "base/json.h"
#include "run/job/tasks.h"
#include "run/study/statistics.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- opening --------------------------------------------------------------------------------- */

static void take_earlier(dray__rows *rows, const json_t *row)
{
    const json_t *accuracy = json_object_get(row, "eval_accuracy");
    int64_t step = dray__json_integer(row, "step");
    rows->last_step = step > rows->last_step ? step : rows->last_step;
    rows->reward = dray__json_number(row, "reward_mean");
    rows->length = dray__json_number(row, "response_length_mean");
    if (!json_is_number(accuracy))
        return;
    if (rows->first_accuracy_step < 0) {
        rows->first_accuracy = json_number_value(accuracy);
        rows->first_accuracy_step = step;
    }
    rows->last_accuracy = json_number_value(accuracy);
    rows->last_accuracy_step = step;
}

int dray__rows_open(const dray__folder *folder, const dray__job *job, dray__rows *out,
                    dray_error *error)
{
    char path[PATH_MAX];
    *out = (dray__rows){.job = job,
                        .folder = folder,
                        .last_step = -1,
                        .version = -1,
                        .checkpoint = -1,
                        .first_accuracy_step = -1,
                        .last_accuracy_step = -1,
                        .update_stride = 1,
                        .mark_ns = dray__now(),
                        .pending = json_array(),
                        .early = json_object(),
                        .done = json_array(),
                        .updates = json_object(),
                        .critics = json_object()};
    dray__folder_path(folder, "metrics.jsonl", path);
    out->metrics = dray__open_stream(path, "a");
    if (!out->pending || !out->early || !out->done || !out->updates || !out->critics)
        return dray__nomem(error);
    if (!out->metrics)
        return dray__fail_errno(error, errno, "%s", path);
    int rc = dray__spent_open(folder->path, &out->spent, error);
    if (rc)
        return rc;
    size_t i;
    json_t *row;
    json_array_foreach(folder->rows, i, row)
    {
        take_earlier(out, row);
    }
    if (folder->held && json_array_extend(out->pending, folder->held) < 0)
        return dray__nomem(error);
    if (folder->resumed)
        out->checkpoint = folder->first_step;
    return DRAY_OK;
}

/* ---- rows ------------------------------------------------------------------------------------ */

static int write_row(dray__rows *rows, json_t *row, dray_error *error)
{
    bool ok = json_dumpf(row, rows->metrics, JSON_COMPACT) == 0 &&
              fputc('\n', rows->metrics) >= 0 && fflush(rows->metrics) == 0;
    return ok ? DRAY_OK : dray__fail_errno(error, errno, "metrics.jsonl");
}

static int64_t step_of(const json_t *row)
{
    return dray__json_integer(row, "step");
}

/* Returns true when the row has the report of the value model's trainer, or there is none. */
static bool has_critic(const dray__rows *rows, const json_t *row)
{
    return step_of(row) == 0 || !dray__job_has(rows->job, "critic") ||
           json_object_get(row, "value_loss");
}

/* Writes the rows that are complete. They are written in order, so rows after one that waits for
 * its evaluation wait, too. */
static int complete(dray__rows *rows, dray_error *error)
{
    json_t *row;
    int rc = DRAY_OK;
    while (!rc && (row = json_array_get(rows->pending, 0))) {
        if (!has_critic(rows, row) ||
            (dray__job_eval_due(rows->job, step_of(row)) && !json_object_get(row, "eval_accuracy")))
            break;
        if (json_array_append(rows->done, row) < 0)
            return dray__nomem(error);
        take_earlier(rows, row);
        rc = write_row(rows, row, error);
        json_array_remove(rows->pending, 0);
    }
    return rc;
}

static const char *key_of(int64_t number, char out[32])
{
    snprintf(out, 32, "%lld", (long long)number);
    return out;
}

static void forget_before(json_t *by_number, int64_t number)
{
    const char *key;
    json_t *value;
    void *next;
    json_object_foreach_safe(by_number, next, key, value)
    {
        if (strtoll(key, NULL, 10) < number)
            json_object_del(by_number, key);
    }
}

/* Adds the update that brought the version to the engine. */
static void add_update(const dray__rows *rows, json_t *row, int64_t version)
{
    char key[32];
    const json_t *update = json_object_get(rows->updates, key_of(version, key));
    json_object_set_new(row, "update_seconds", json_real(dray__json_number(update, "seconds")));
    json_object_set_new(row, "update_bytes", json_integer(dray__json_integer(update, "bytes")));
}

static void show_phases(dray__rows *rows, const json_t *row)
{
    const char *name;
    json_t *value;
    rows->shown_count = 0;
    json_object_foreach(json_object_get(row, "seconds"), name, value)
    {
        if (rows->shown_count == DRAY__PHASES)
            return;
        dray__phase *phase = &rows->shown[rows->shown_count++];
        snprintf(phase->name, sizeof(phase->name), "%s", name);
        phase->seconds = json_number_value(value);
    }
}

/* Saves the pending rows, because a run that is killed while they wait may resume from a checkpoint
 * of their steps. */
static int keep_pending(const dray__rows *rows, dray_error *error)
{
    return dray__folder_write_rows(rows->folder, DRAY__ROWS_PENDING, rows->pending, error);
}

static void add_eval(json_t *row, const json_t *report)
{
    json_object_set(row, "eval_accuracy", json_object_get(report, "accuracy"));
    json_object_set(row, "eval_version", json_object_get(report, "version"));
    json_object_set(row, "eval_response_length_mean",
                    json_object_get(report, "response_length_mean"));
}

static void drop_own(json_t *row)
{
    static const char *const drop[] = {"kind", "member", "name", "time_ns"};
    for (size_t i = 0; i < sizeof(drop) / sizeof(drop[0]); i++)
        json_object_del(row, drop[i]);
}

/* Adds the earlier report of the value model's trainer. */
static int add_critic(dray__rows *rows, json_t *row, dray_error *error)
{
    char key[32];
    key_of(step_of(row), key);
    json_t *part = json_object_get(rows->critics, key);
    int rc = part && json_object_update_missing(row, part) < 0 ? dray__nomem(error) : DRAY_OK;
    forget_before(rows->critics, step_of(row) + 1);
    return rc;
}

/* Makes a row of the trainer's numbers, the time, and the update that the step's samples waited
 * for. Rows that an earlier run wrote are not written again. */
static int take_step(dray__rows *rows, const json_t *report, dray_error *error)
{
    char key[32];
    int64_t step = step_of(report), now;
    if (step <= rows->last_step)
        return DRAY_OK;
    json_t *made = json_deep_copy(report);
    if (!made)
        return dray__nomem(error);
    int rc = dray__spent_look(rows->spent, made, &now, error);
    double seconds = (double)(now - rows->mark_ns) / (double)DRAY__SECOND;
    rows->mark_ns = now;
    rows->last_step = step;
    drop_own(made);
    rows->tokens_per_s = dray__json_number(made, "tokens") / (seconds > 0 ? seconds : 1);
    rows->step_seconds = seconds;
    rows->staleness_mean = dray__json_number(made, "staleness_mean");
    rows->staleness_max = dray__json_number(made, "staleness_max");
    json_object_set_new(made, "tokens_per_s", json_real(rows->tokens_per_s));
    json_object_set_new(made, "step_seconds", json_real(seconds));
    if (!rc)
        rc = add_critic(rows, made, error);
    add_update(rows, made, dray__json_integer(made, "weight_version"));
    forget_before(rows->updates, dray__json_integer(made, "weight_version"));
    show_phases(rows, made);
    const json_t *early = json_object_get(rows->early, key_of(step, key));
    if (early)
        add_eval(made, early);
    json_object_del(rows->early, key);
    if (json_array_append_new(rows->pending, made) < 0 && !rc)
        rc = dray__nomem(error);
    if (!rc)
        rc = complete(rows, error);
    return rc || !json_array_size(rows->pending) ? rc : keep_pending(rows, error);
}

/* Makes row 0, from before the first step. */
static int take_ready(dray__rows *rows, const json_t *report, dray_error *error)
{
    rows->ready = true;
    int rc = dray__spent_look(rows->spent, NULL, &rows->mark_ns, error);
    if (rc)
        return rc;
    if (step_of(report) != 0 || rows->last_step >= 0 || json_array_size(rows->pending))
        return DRAY_OK;
    rows->warmup_reward = rows->reward = dray__json_number(report, "reward_mean");
    json_t *row = json_pack(
        "{s:I, s:f, s:f, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f}", "step", (json_int_t)0,
        "reward_mean", dray__json_number(report, "reward_mean"), "response_length_mean",
        dray__json_number(report, "response_length_mean"), "tokens", (json_int_t)0, "samples",
        (json_int_t)0, "weight_version", (json_int_t)0, "weight_version_min", (json_int_t)0,
        "staleness_mean", 0.0, "staleness_max", 0.0, "tokens_per_s", 0.0, "step_seconds", 0.0);
    return json_array_append_new(rows->pending, row) < 0 ? dray__nomem(error) : DRAY_OK;
}

static json_t *pending_row(const dray__rows *rows, int64_t step)
{
    size_t i;
    json_t *row;
    json_array_foreach(rows->pending, i, row)
    {
        if (step_of(row) == step)
            return row;
    }
    return NULL;
}

static int take_critic(dray__rows *rows, const json_t *report, dray_error *error)
{
    char key[32];
    json_t *row = pending_row(rows, step_of(report)), *part = json_deep_copy(report);
    if (!part)
        return dray__nomem(error);
    drop_own(part);
    int kept = 0;
    if (row) {
        kept = json_object_update_missing(row, part);
    } else if (step_of(report) > rows->last_step) {
        kept = json_object_set(rows->critics, key_of(step_of(report), key), part);
    }
    json_decref(part);
    int rc = kept < 0 ? dray__nomem(error) : complete(rows, error);
    return rc || !json_array_size(rows->pending) ? rc : keep_pending(rows, error);
}

int64_t dray__rows_whole(const dray__rows *rows, const json_t *report)
{
    const char *kind = dray__json_string(report, "kind");
    if (!kind || (strcmp(kind, "step") != 0 && strcmp(kind, "critic") != 0))
        return -1;
    const json_t *row = pending_row(rows, step_of(report));
    bool taken = step_of(report) <= rows->last_step;
    return taken && (!row || has_critic(rows, row)) ? step_of(report) : -1;
}

static int take_eval(dray__rows *rows, json_t *report, dray_error *error)
{
    char key[32];
    int64_t step = step_of(report);
    json_t *row = pending_row(rows, step);
    if (!row && step > rows->last_step) /* by other processes than the row: it may be sooner */
        return json_object_set(rows->early, key_of(step, key), report) ? dray__nomem(error)
                                                                       : DRAY_OK;
    if (!row) /* the evaluation is a repeated one, as the row is written already */
        return DRAY_OK;
    add_eval(row, report);
    if (step == 0)
        add_update(rows, row, 0);
    return complete(rows, error);
}

/* Notes the time of an update for the median; of many updates only every n-th. */
static void note_update(dray__rows *rows, double seconds)
{
    if (rows->updates_seen == DRAY__UPDATES_SEEN) {
        for (uint32_t i = 0; i < DRAY__UPDATES_SEEN / 2; i++)
            rows->update_seconds[i] = rows->update_seconds[2 * i];
        rows->updates_seen /= 2;
        rows->update_stride *= 2;
    }
    if (rows->update_count++ % rows->update_stride == 0)
        rows->update_seconds[rows->updates_seen++] = seconds;
}

static void take_update(dray__rows *rows, json_t *report)
{
    char key[32];
    rows->version = dray__json_integer(report, "version");
    json_object_set(rows->updates, key_of(rows->version, key), report);
    note_update(rows, dray__json_number(report, "seconds"));
    rows->update_bytes += (uint64_t)dray__json_integer(report, "bytes");
}

int dray__rows_take(dray__rows *rows, json_t *report, const json_t **done, dray_error *error)
{
    const char *kind = dray__json_string(report, "kind");
    json_array_clear(rows->done);
    *done = rows->done;
    if (!kind)
        return DRAY_OK;
    if (strcmp(kind, "step") == 0)
        return take_step(rows, report, error);
    if (strcmp(kind, "critic") == 0)
        return take_critic(rows, report, error);
    if (strcmp(kind, "eval") == 0)
        return take_eval(rows, report, error);
    if (strcmp(kind, "engine_update") == 0)
        take_update(rows, report);
    if (strcmp(kind, "ready") == 0)
        return take_ready(rows, report, error);
    if (strcmp(kind, "warmup") == 0) {
        rows->warmup_step = dray__json_integer(report, "warmup_step");
        rows->warmup_reward = dray__json_number(report, "reward_mean");
    } else if (strcmp(kind, "checkpoint") == 0) {
        rows->checkpoint = dray__json_integer(report, "step");
    }
    return DRAY_OK;
}

double dray__rows_median_update(const dray__rows *rows)
{
    double seconds[DRAY__UPDATES_SEEN];
    memcpy(seconds, rows->update_seconds, rows->updates_seen * sizeof(*seconds));
    return rows->updates_seen ? dray__median(seconds, rows->updates_seen) : 0;
}

int dray__rows_end(dray__rows *rows, dray_error *error)
{
    char path[PATH_MAX];
    size_t i;
    json_t *row;
    int rc = DRAY_OK;
    json_array_foreach(rows->pending, i, row)
    {
        if (!rc)
            rc = write_row(rows, row, error);
    }
    dray__folder_path(rows->folder, DRAY__ROWS_PENDING, path);
    if (!rc)
        unlink(path);
    if (fclose(rows->metrics) != 0 && !rc)
        rc = dray__fail_errno(error, errno, "metrics.jsonl");
    rows->metrics = NULL;
    return rc;
}

void dray__rows_free(dray__rows *rows)
{
    if (rows->metrics)
        fclose(rows->metrics);
    json_decref(rows->pending);
    json_decref(rows->early);
    json_decref(rows->done);
    json_decref(rows->updates);
    json_decref(rows->critics);
    dray__spent_close(rows->spent);
}
