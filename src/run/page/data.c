/* The data of a run for the page: curves by row, events, updates of engines, the queue's depth, and
 * the settings of its job that differ from the defaults. */
#include "base/array.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/wire.h"
#include "run/job/settings.h"
#include "run/page/page.h"
#include "run/paths.h"
#include "run/report/rows_read.h"

#include <dray/dray.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- tables of numbers by key ---------------------------------------------------------------- */

typedef struct curve {
    char *key;
    double *values;
    uint64_t room;
    uint32_t count;
} curve;

/* Rows one after the other; a key that a row does not have is NaN there. */
typedef struct table {
    curve *curves;
    uint32_t count, rows;
    uint64_t room;
    dray__map by_key;
    bool full; /* out of memory */
} table;

enum { CURVES_MOST = 4096, EVENTS_MOST = 400, STALENESS = 8, JSON_MOST = 1 << 24 };

static curve *curve_of(table *t, const char *key)
{
    uint32_t at;
    if (dray__map_get(&t->by_key, key, &at))
        return &t->curves[at];
    if (t->count == CURVES_MOST)
        return NULL;
    char *copy = strdup(key);
    if (!copy || !dray__map_set(&t->by_key, key, t->count) ||
        !DRAY__PUSH(t->curves, t->count, t->room, (curve){.key = copy})) {
        free(copy);
        t->full = true;
        return NULL;
    }
    // cppcheck-suppress memleak
    return &t->curves[t->count - 1]; /* which has the copy */
}

/* Puts a value into the row that is being read, which is number t->rows. */
static void put(table *t, const char *key, double value)
{
    curve *c = curve_of(t, key);
    while (c && c->count < t->rows && !t->full)
        t->full = !DRAY__PUSH(c->values, c->count, c->room, (double)NAN);
    if (c && !t->full && c->count == t->rows)
        t->full = !DRAY__PUSH(c->values, c->count, c->room, value);
}

static void free_table(table *t)
{
    for (uint32_t i = 0; i < t->count; i++) {
        free(t->curves[i].key);
        free(t->curves[i].values);
    }
    free(t->curves);
    dray__map_free(&t->by_key);
}

/* Returns the curve that has a value in each row where a missing value of this key means 0: a
 * role's time has no key for a cause that it did not wait for, and a row's staleness ends with the
 * stalest token. NULL when a missing value is not known. */
static const curve *beside(const table *t, const char *key)
{
    char name[160] = "stale.0";
    uint32_t at;
    if (strncmp(key, "time.", 5) == 0)
        snprintf(name, sizeof(name), "%.*s.processes", 5 + (int)strcspn(key + 5, "."), key);
    else if (strncmp(key, "stale.", 6) != 0)
        return NULL;
    return dray__map_get(&t->by_key, name, &at) ? &t->curves[at] : NULL;
}

static double value_at(const curve *c, uint32_t row)
{
    return c && row < c->count ? c->values[row] : NAN;
}

/* Returns a point of a curve: the mean of `stride` rows, or the largest value for keys that end in
 * _max. NaN when none of the rows has the key. */
static double point(const table *t, const curve *c, uint32_t first, uint32_t stride)
{
    const curve *other = beside(t, c->key);
    size_t length = strlen(c->key);
    bool most = length > 4 && strcmp(c->key + length - 4, "_max") == 0, any = false;
    double sum = 0;
    uint32_t rows = 0;
    for (uint32_t i = first; i < first + stride; i++) {
        double value = value_at(c, i);
        rows += !isnan(value) || !isnan(value_at(other, i));
        if (isnan(value))
            continue;
        sum = most && any ? fmax(sum, value) : most ? value : sum + value;
        any = true;
    }
    return !any ? (double)NAN : most ? sum : sum / rows;
}

static json_t *write_table(const table *t, uint32_t stride)
{
    json_t *out = json_object();
    uint32_t points = (t->rows + stride - 1) / stride;
    double *values = malloc((points + (size_t)1) * sizeof(*values));
    for (uint32_t i = 0; i < t->count && values; i++) {
        for (uint32_t k = 0; k < points; k++)
            values[k] = point(t, &t->curves[i], k * stride, stride);
        dray__json_set(&out, t->curves[i].key, dray__page_floats(values, points));
    }
    if (!values) {
        json_decref(out);
        out = NULL;
    }
    free(values);
    return out;
}

static uint32_t stride_of(const table *t, uint32_t points)
{
    return t->rows ? (t->rows + points - 1) / points : 1;
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* Puts the numbers of nested objects: {"time": {"engine": {"wait": {"samples": 1}}}} is
 * time.engine.wait.samples. */
static void put_object(table *t, const char *prefix, const json_t *object, int depth)
{
    const char *key;
    json_t *value;
    char name[160];
    json_object_foreach((json_t *)(uintptr_t)object, key, value)
    {
        snprintf(name, sizeof(name), "%s%s", prefix, key);
        if (json_is_number(value))
            put(t, name, json_number_value(value));
        if (json_is_object(value) && depth < 4 && strcmp(name, "seconds") != 0) {
            snprintf(name, sizeof(name), "%s%s.", prefix, key);
            put_object(t, name, value, depth + 1);
        }
    }
}

/* Puts tokens by staleness. The last number is that of all staler ones. */
static void put_staleness(table *t, const json_t *list)
{
    double sums[STALENESS] = {0};
    size_t i;
    json_t *tokens;
    char name[32];
    json_array_foreach(list, i, tokens)
    {
        sums[i < STALENESS ? i : STALENESS - 1] += json_number_value(tokens);
    }
    for (size_t k = 0; k < STALENESS && k < json_array_size(list); k++) {
        snprintf(name, sizeof(name), "stale.%zu", k);
        put(t, name, sums[k]);
    }
}

static int take_row(void *user, json_t *row, const char *path, dray_error *error)
{
    table *t = user;
    const json_t *step = json_object_get(row, "step");
    if (!json_is_integer(step))
        return dray__fail(error, DRAY_EFORMAT, "%s: expected a row with a number `step`", path);
    put_object(t, "", row, 0);
    put_staleness(t, json_object_get(row, "staleness_tokens"));
    t->rows++;
    return t->full ? dray__nomem(error) : DRAY_OK;
}

/* ---- events ---------------------------------------------------------------------------------- */

typedef struct happened {
    json_t *events;   /* events for readers */
    int64_t since_ns; /* the time of the first update or look at the queue, from which the times of
                         all of them are counted; 0 when there is none */
    json_t *updates;  /* "engine.0" -> a table (see below) */
    table *engines;
    char (*labels)[64];
    uint32_t engine_count;
    table queue;
} happened;

/* Returns the time of an event since the first one. The page's floats have 24 bits, which are too
 * few for the nanoseconds of a clock that has run for days. */
static double time_of(happened *h, const json_t *event)
{
    int64_t at = dray__json_integer(event, "at");
    h->since_ns = h->since_ns ? h->since_ns : at;
    return (double)(at - h->since_ns);
}

static void take_update(happened *h, const json_t *event)
{
    const char *role = dray__json_string(event, "role");
    uint32_t i = 0;
    if (!role)
        return;
    while (i < h->engine_count && strcmp(h->labels[i], role) != 0)
        i++;
    if (i == h->engine_count && i == DRAY__PAGE_RUNS * 16)
        return;
    if (i == h->engine_count) {
        table *engines = reallocarray(h->engines, i + (size_t)1, sizeof(*engines));
        h->engines = engines ? engines : h->engines;
        char(*labels)[64] = reallocarray(h->labels, i + (size_t)1, sizeof(*labels));
        h->labels = labels ? labels : h->labels;
        if (!engines || !labels)
            return;
        h->engines[i] = (table){0};
        snprintf(h->labels[h->engine_count++], sizeof(*labels), "%s", role);
    }
    static const char *const keys[] = {"version", "bytes", "seconds", "pause_seconds"};
    put(&h->engines[i], "at", time_of(h, event));
    for (size_t k = 0; k < sizeof(keys) / sizeof(keys[0]); k++)
        put(&h->engines[i], keys[k], dray__json_number(event, keys[k]));
    h->engines[i].rows++;
}

static int take_event(void *user, json_t *event, const char *path, dray_error *error)
{
    happened *h = user;
    const char *what = dray__json_string(event, "event");
    if (!what)
        return dray__fail(error, DRAY_EFORMAT, "%s: expected a text `event`", path);
    if (strcmp(what, "engine_update") == 0) {
        take_update(h, event);
    } else if (strcmp(what, "queue") == 0) {
        put(&h->queue, "at", time_of(h, event));
        put_object(&h->queue, "columns.", json_object_get(event, "columns"), 0);
        h->queue.rows++;
    } else if (json_array_size(h->events) < EVENTS_MOST) {
        json_array_append(h->events, event);
    }
    return DRAY_OK;
}

static json_t *write_updates(const happened *h, uint32_t points)
{
    json_t *out = json_object();
    for (uint32_t i = 0; i < h->engine_count; i++)
        dray__json_set(&out, h->labels[i],
                       write_table(&h->engines[i], stride_of(&h->engines[i], points)));
    return out;
}

/* ---- settings -------------------------------------------------------------------------------- */

/* Finds a record of a list by its name. */
static const json_t *by_name(const json_t *list, const char *name)
{
    size_t i;
    json_t *record;
    json_array_foreach(list, i, record)
    {
        const char *is = dray__json_string(record, "name");
        if (is && strcmp(is, name) == 0)
            return record;
    }
    return NULL;
}

static bool is_records(const json_t *list)
{
    return json_is_array(list) && json_is_object(json_array_get(list, 0));
}

static void compare(const json_t *is, const json_t *standard, const char *key, json_t **out,
                    int depth)
{
    char name[256];
    const char *member;
    size_t i;
    json_t *value;
    if (json_is_object(is) && depth < 6) {
        json_object_foreach((json_t *)(uintptr_t)is, member, value)
        {
            snprintf(name, sizeof(name), "%s%s%s", key, key[0] ? "." : "", member);
            compare(value, json_object_get(standard, member), name, out, depth + 1);
        }
    } else if (is_records(is) && depth < 6) {
        json_array_foreach(is, i, value)
        {
            const char *of = dray__json_string(value, "name");
            snprintf(name, sizeof(name), "%s.%s", key, of ? of : "?");
            compare(value, of ? by_name(standard, of) : NULL, name, out, depth + 1);
        }
    } else if (!json_equal(is, standard)) {
        bool numbers = json_is_number(is) && json_is_number(standard);
        bool nothing = !standard && json_is_array(is) && !json_array_size(is);
        if (!nothing && !(numbers && json_number_value(is) == json_number_value(standard)))
            dray__json_append(out, json_pack("[s, O?, O?]", key, standard, is));
    }
}

static int add_settings(const char *folder, json_t **out, dray_error *error)
{
    char path[PATH_MAX];
    json_t *config = NULL;
    dray__job *job = NULL;
    dray__path(path, sizeof(path), "%s/config.json", folder);
    if (access(path, F_OK) < 0)
        return DRAY_OK;
    int rc = dray__json_load(path, JSON_MOST, &config, error);
    if (!rc)
        rc = dray__settings_default(&job, error);
    json_t *standard = rc ? NULL : dray__settings_json(job), *found = json_array();
    if (!rc && !json_is_object(config))
        rc = dray__fail(error, DRAY_EFORMAT, "%s: expected an object", path);
    if (!rc && !standard)
        rc = dray__nomem(error);
    json_object_del(config, "rules"); /* they follow from the other settings */
    if (!rc)
        compare(config, standard, "", &found, 0);
    dray__json_set(out, "name", json_incref(json_object_get(config, "name")));
    dray__json_set(out, "schedule", json_incref(json_object_get(config, "schedule")));
    dray__json_set(out, "settings", found);
    json_decref(config);
    json_decref(standard);
    dray__settings_free(job);
    return rc;
}

/* ---- a run ----------------------------------------------------------------------------------- */

static int read_all(const char *folder, table *rows, happened *h, dray_error *error)
{
    char path[PATH_MAX];
    dray__path(path, sizeof(path), "%s/metrics.jsonl", folder);
    if (access(path, F_OK) < 0)
        return dray__fail(error, DRAY_ENOENT,
                          "%s: expected a run's folder, with metrics.jsonl, found none", folder);
    int rc = dray__rows_each(path, take_row, rows, error);
    dray__path(path, sizeof(path), "%s/events.jsonl", folder);
    return rc ? rc : dray__rows_each(path, take_event, h, error);
}

int dray__page_run(const char *folder, uint32_t points, json_t **out, dray_error *error)
{
    table rows = {0};
    happened h = {.events = json_array()};
    json_t *run = json_object();
    int rc = read_all(folder, &rows, &h, error);
    if (!rc && !dray__utf8_valid(folder, strlen(folder))) /* it is in the page's JSON */
        rc = dray__fail(error, DRAY_EINVALID, "%s: the path of a run must be UTF-8", folder);
    if (!rc)
        rc = add_settings(folder, &run, error);
    if (!rc) {
        uint32_t stride = stride_of(&rows, points);
        dray__json_set(&run, "folder", json_string(folder));
        dray__json_set(&run, "rows", json_integer(rows.rows));
        dray__json_set(&run, "stride", json_integer(stride));
        dray__json_set(&run, "curves", write_table(&rows, stride));
        dray__json_set(&run, "updates", write_updates(&h, points / 4));
        dray__json_set(&run, "queue", write_table(&h.queue, stride_of(&h.queue, points / 4)));
        dray__json_set(&run, "queue_rows", json_integer(h.queue.rows));
        dray__json_set(&run, "since_ns", json_integer(h.since_ns));
        dray__json_set(&run, "events", json_incref(h.events));
        if (!run)
            rc = dray__nomem(error);
    }
    free_table(&rows);
    free_table(&h.queue);
    for (uint32_t i = 0; i < h.engine_count; i++)
        free_table(&h.engines[i]);
    free(h.engines);
    free(h.labels);
    json_decref(h.events);
    if (rc)
        json_decref(run);
    else
        *out = run;
    return rc;
}
