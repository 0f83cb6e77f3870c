#include "run/report/reporter.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/io.h"
#include "base/json.h"
#include "base/thread.h"
#include "control/channel.h"
#include "control/reports.h"
#include "run/job/tasks.h"
#include "run/report/live.h"
#include "run/report/units.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct dray__reporter {
    const dray__job *job;
    dray_context *context;
    dray__channel *channel;
    dray_queue *queue; /* for the picture; NULL without one, or before the queue exists */
    dray__thread thread;
    pthread_mutex_t lock; /* protects the fields below */
    dray__rows rows;
    dray__view view;
    json_t *status;
    bool unlearned;     /* the last evaluation was worse than the first */
    dray_error failure; /* code 0 when there is none */
    int64_t drawn_ns, depth_ns;
    int events; /* events.jsonl; -1 for none */
    dray__live *live;
    _Atomic int64_t heard_ns;
    _Atomic uint64_t progress;
    _Atomic bool ready, stopping;
};

enum { SLICE_MS = 200, DRAW_MS = 200, DEPTH_MS = 1000 };

/* ---- the thread ------------------------------------------------------------------------------ */

/* Cuts off what follows the last whole line, which a full disk or a fall of the machine has left.
 * With another line behind it, it would be a line that no reader takes. */
static void cut_torn_line(int fd)
{
    char last;
    off_t size = lseek(fd, 0, SEEK_END), whole = size;
    while (whole > 0 && pread(fd, &last, 1, whole - 1) == 1 && last != '\n')
        whole--;
    if (whole < size && ftruncate(fd, whole))
        return; /* the page then says which line is none */
}

/* Writes a line of events.jsonl, for the page: an event without a row in metrics.jsonl. It takes
 * `object`. Lines that cannot be written are left out, because the run goes on without them. */
static void note(dray__reporter *self, const char *event, json_t *object)
{
    if (object && self->events >= 0) {
        json_object_set_new(object, "event", json_string(event));
        json_object_set_new(object, "at", json_integer(dray__now()));
        json_object_set_new(object, "step", json_integer(self->rows.last_step));
        char *text = json_dumps(object, JSON_COMPACT), *line = NULL;
        int length = text ? asprintf(&line, "%s\n", text) : -1;
        if (length > 0 && dray__write_all(self->events, line, (size_t)length))
            cut_torn_line(self->events);
        if (length > 0)
            free(line);
        free(text);
    }
    json_decref(object);
}

/* Returns whether the last accuracy is below the first by more than two standard errors, computed
 * as if prompts were drawn anew for each evaluation. The error of a mean follows from the mean
 * alone for rewards from 0 to 1 only, so means of other rewards are not judged. */
static bool unlearned(const dray__reporter *self)
{
    double first = self->rows.first_accuracy, last = self->rows.last_accuracy;
    double variance = (first * (1 - first) + last * (1 - last)) / (double)self->job->eval.prompts;
    return self->rows.first_accuracy_step >= 0 && last >= 0 && first <= 1 && last < first &&
           (first - last) * (first - last) > 4 * variance;
}

/* Warns once, and again only after the accuracy has recovered. */
static void warn_of_unlearning(dray__reporter *self)
{
    char message[256];
    bool was = self->unlearned;
    self->unlearned = unlearned(self);
    if (was || !self->unlearned)
        return;
    snprintf(message, sizeof(message),
             "warning: held-out reward %.3f at step %lld is below the %.3f of step %lld: the job "
             "unlearns (try a smaller actor.lr, or a higher warmup.reward)",
             self->rows.last_accuracy, (long long)self->rows.last_accuracy_step,
             self->rows.first_accuracy, (long long)self->rows.first_accuracy_step);
    dray__view_say(&self->view, "warning", message);
    note(self, "warning", json_pack("{s:s}", "message", message));
}

static void note_update(dray__reporter *self, const json_t *report)
{
    static const char *const keys[] = {"role", "version", "bytes", "seconds", "pause_seconds"};
    json_t *object = json_object();
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++)
        json_object_set(object, keys[i], json_object_get(report, keys[i]));
    note(self, "engine_update", object);
}

static void note_lost(dray__reporter *self, const json_t *report)
{
    const char *message = dray__json_string(report, "message");
    note(self, "lost", json_pack("{s:s}", "message", message ? message : ""));
}

static void take(dray__reporter *self, json_t *report)
{
    const json_t *done = NULL, *row;
    size_t i, rows = 0;
    const char *kind = dray__json_string(report, "kind");
    pthread_mutex_lock(&self->lock);
    if (!self->failure.code)
        dray__rows_take(&self->rows, report, &done, &self->failure);
    json_array_foreach(done, i, row)
    {
        dray__view_row(&self->view, &self->rows, row);
        dray__live_row(self->live, row);
        rows++;
    }
    if (rows)
        warn_of_unlearning(self);
    if (kind && (strcmp(kind, "warmup") == 0 || strcmp(kind, "checkpoint") == 0 ||
                 strcmp(kind, "engine_update") == 0))
        dray__view_event(&self->view, kind, json_incref(report));
    if (kind && strcmp(kind, "engine_update") == 0)
        note_update(self, report);
    if (kind && strcmp(kind, "lost") == 0)
        note_lost(self, report);
    pthread_mutex_unlock(&self->lock);
    if (rows || (kind && strcmp(kind, "eval") == 0))
        atomic_fetch_add(&self->progress, 1);
    if (self->rows.ready)
        atomic_store(&self->ready, true);
    atomic_store(&self->heard_ns, dray__now());
}

/* Confirms that the row of a step is complete. The trainer waits for this before a checkpoint
 * (checkpoint.c). */
static void confirm(dray__reporter *self, const json_t *report)
{
    char text[64];
    int64_t step = dray__rows_whole(&self->rows, report);
    if (self->failure.code || step < 0)
        return;
    snprintf(text, sizeof(text), "{\"step\":%lld}", (long long)step);
    dray_report_post(self->context, DRAY__REPORT_ROW, text, NULL);
}

static void ask_queue(dray__reporter *self)
{
    char *text = NULL;
    json_t *status = NULL;
    if (!self->queue) {
        dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
        options.timeout_ns = DRAY__MILLISECOND;
        dray_queue_open(self->context, DRAY__QUEUE_NAME, &options, &self->queue, NULL);
    }
    if (!self->queue || dray_queue_status(self->queue, &text, NULL))
        return;
    dray__json_parse(text, strlen(text), "queue status", &status, NULL);
    free(text);
    json_decref(self->status);
    self->status = status;
}

static void draw(dray__reporter *self)
{
    if (!self->view.live || dray__now() < self->drawn_ns + DRAW_MS * DRAY__MILLISECOND)
        return;
    ask_queue(self);
    self->drawn_ns = dray__now();
    pthread_mutex_lock(&self->lock);
    dray__view_draw(&self->view, &self->rows, self->status);
    pthread_mutex_unlock(&self->lock);
}

/* Notes from time to time how far the queue's columns are filled. */
static void look_at_depth(dray__reporter *self)
{
    if (!self->rows.ready || dray__now() < self->depth_ns + DEPTH_MS * DRAY__MILLISECOND)
        return;
    ask_queue(self);
    self->depth_ns = dray__now();
    pthread_mutex_lock(&self->lock);
    note(self, "queue", json_pack("{s:o}", "columns", dray__view_depths(self->status)));
    pthread_mutex_unlock(&self->lock);
}

static void *watch(void *user)
{
    dray__reporter *self = user;
    uint64_t cursor = 0;
    for (;;) {
        /* Read before the wait, so that reports posted before the end are still taken. */
        bool last = atomic_load(&self->stopping);
        json_t *reports = NULL, *report;
        size_t i;
        int64_t deadline = dray__deadline(last ? 0 : SLICE_MS * DRAY__MILLISECOND);
        int rc = dray__reports_watch(self->channel, NULL, &cursor, deadline, &reports, NULL);
        json_array_foreach(reports, i, report)
        {
            take(self, report);
            confirm(self, report);
        }
        json_decref(reports);
        draw(self);
        look_at_depth(self);
        if (rc && (last || rc != DRAY_ETIMEDOUT))
            return NULL; /* the supervisor itself notices a coordinator that is gone */
    }
}

/* ---- from the supervisor's thread ------------------------------------------------------------ */

int dray__reporter_start(const dray__folder *folder, const dray__job *job, const char *address,
                         bool json, dray__reporter **out, const char **url, dray_error *error)
{
    *url = NULL;
    dray__reporter *self = calloc(1, sizeof(*self));
    if (!self)
        return dray__nomem(error);
    self->job = job;
    pthread_mutex_init(&self->lock, NULL);
    dray__view_open(&self->view, json);
    atomic_store(&self->heard_ns, dray__now());
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = address;
    options.name = "supervisor";
    options.role = "tool";
    options.timeout_ns = 10 * DRAY__SECOND;
    char events[PATH_MAX];
    dray__folder_path(folder, "events.jsonl", events);
    self->events = open(events, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0666);
    int rc = self->events >= 0 ? DRAY_OK : dray__fail_errno(error, errno, "%s", events);
    if (!rc)
        cut_torn_line(self->events);
    if (!rc)
        rc = dray__rows_open(folder, job, &self->rows, error);
    if (!rc)
        rc = dray_open(&options, &self->context, error);
    if (!rc)
        rc = dray__channel_open(self->context, &self->channel, error);
    /* A run goes on without its page. */
    if (!rc && dray__live_start(folder->path, &self->live, url, error))
        *url = NULL;
    if (!rc)
        rc = dray__thread_start(&self->thread, watch, self, "the supervisor", error);
    if (rc)
        dray__reporter_free(self);
    else
        *out = self;
    return rc;
}

int dray__reporter_stop(dray__reporter *self, dray_error *error)
{
    atomic_store(&self->stopping, true);
    dray__thread_join(&self->thread);
    dray__live_stop(self->live);
    self->live = NULL;
    dray__view_clear(&self->view);
    int rc = dray__rows_end(&self->rows, error);
    return self->failure.code ? dray__reporter_failed(self, error) : rc;
}

void dray__reporter_free(dray__reporter *self)
{
    if (!self)
        return;
    dray__live_stop(self->live);
    dray_queue_close(self->queue);
    dray__channel_close(self->channel);
    dray_close(self->context);
    dray__rows_free(&self->rows);
    json_decref(self->status);
    if (self->events >= 0)
        close(self->events);
    pthread_mutex_destroy(&self->lock);
    free(self);
}

int64_t dray__reporter_heard_ns(dray__reporter *self)
{
    return atomic_load(&self->heard_ns);
}

uint64_t dray__reporter_progress(dray__reporter *self)
{
    return atomic_load(&self->progress);
}

bool dray__reporter_ready(dray__reporter *self)
{
    return atomic_load(&self->ready);
}

int dray__reporter_failed(dray__reporter *self, dray_error *error)
{
    pthread_mutex_lock(&self->lock);
    int code = self->failure.code;
    if (code && error)
        *error = self->failure;
    pthread_mutex_unlock(&self->lock);
    return code;
}

void dray__reporter_say(dray__reporter *self, const char *event, const char *format, ...)
{
    char message[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&self->lock);
    dray__view_say(&self->view, event, message);
    if (strcmp(event, "start") != 0 && strcmp(event, "page") != 0)
        note(self, event, json_pack("{s:s}", "message", message));
    pthread_mutex_unlock(&self->lock);
}

/* ---- the last lines -------------------------------------------------------------------------- */

static void summary_json(dray__reporter *self, const dray__folder *folder, const char *outcome)
{
    const dray__rows *rows = &self->rows;
    json_t *object = json_pack("{s:s, s:I, s:s, s:I, s:I, s:f}", "outcome", outcome, "step",
                               (json_int_t)(rows->last_step > 0 ? rows->last_step : 0), "folder",
                               folder->path, "updates", (json_int_t)rows->update_count,
                               "update_bytes", (json_int_t)rows->update_bytes,
                               "update_seconds_median", dray__rows_median_update(rows));
    if (object && rows->first_accuracy_step >= 0) {
        json_object_set_new(object, "accuracy_first", json_real(rows->first_accuracy));
        json_object_set_new(object, "accuracy_last", json_real(rows->last_accuracy));
    }
    if (object && rows->checkpoint >= 0)
        json_object_set_new(object, "checkpoint", json_integer(rows->checkpoint));
    dray__view_event(&self->view, "end", object);
}

void dray__reporter_summary(dray__reporter *self, const dray__folder *folder, const char *outcome)
{
    const dray__rows *rows = &self->rows;
    if (self->view.json) {
        summary_json(self, folder, outcome);
        return;
    }
    double mean = rows->update_count ? (double)rows->update_bytes / (double)rows->update_count : 0;
    printf("\n%s after %lld of %lld steps.\n", outcome,
           (long long)(rows->last_step > 0 ? rows->last_step : 0), (long long)self->job->steps);
    if (rows->first_accuracy_step >= 0 && rows->last_accuracy_step == rows->first_accuracy_step)
        printf("reward (held-out, greedy): %.3f at step %lld, not looked at since\n",
               rows->first_accuracy, (long long)rows->first_accuracy_step);
    else if (rows->first_accuracy_step >= 0)
        printf("reward (held-out, greedy): %.3f at step %lld -> %.3f at step %lld\n",
               rows->first_accuracy, (long long)rows->first_accuracy_step, rows->last_accuracy,
               (long long)rows->last_accuracy_step);
    if (rows->update_count)
        printf("weights: %llu updates of %s each, median %s\n",
               (unsigned long long)rows->update_count, dray__say_bytes(mean).s,
               dray__say_seconds(dray__rows_median_update(rows)).s);
    printf("folder:     %s\n", folder->path);
    if (strcmp(outcome, "stopped") == 0 && rows->checkpoint >= 0)
        printf("go on:      dray run --resume %s\n", folder->path);
    if (rows->checkpoint >= 0)
        printf("checkpoint: %s/checkpoints/step-%06lld (dray inspect looks into it; transformers "
               "loads it where the built-in trainer wrote it)\n",
               folder->path, (long long)rows->checkpoint);
    printf("report:     %s/report.html (a page for the browser)\n"
           "timeline:   %s/trace.json (open it at https://ui.perfetto.dev; dray trace %s)\n"
           "numbers:    %s/metrics.jsonl; what they mean: docs/run.md\n",
           folder->path, folder->path, folder->path, folder->path);
    fflush(stdout);
}
