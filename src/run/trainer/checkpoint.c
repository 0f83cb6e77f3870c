#include "run/trainer/checkpoint.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/hook.h"
#include "base/io.h"
#include "base/json.h"
#include "control/reports.h"
#include "run/fault.h"
#include "run/report/reporter.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { WEIGHTS_KEPT = 2, CURSOR_MOST = 4096 };

/* The points at which tests kill the process: while the checkpoint is written, and when it is
 * complete but not yet the newest. */
static void on_step(void *user, const char *step)
{
    dray__host *host = user;
    if (host->saving < 0)
        return;
    if (strcmp(step, "save written") == 0)
        dray__fault_at("in_checkpoint", host->saving);
    else if (strcmp(step, "save named") == 0)
        dray__fault_at("checkpoint_named", host->saving);
}

void dray__checkpoint_open(dray__host *host)
{
    host->saving = -1;
    dray__hook_set(on_step, host);
}

/* Waits for the row of the step. A run resumes from its newest checkpoint, so the rows of its steps
 * must be written before. */
static int wait_for_row(const dray__host *host, int64_t step, dray_error *error)
{
    dray__channel *channel;
    uint64_t cursor = 0;
    int64_t deadline = dray__deadline(host->wait_ns), written = -1;
    int rc = dray__channel_open(host->context, &channel, error);
    if (rc)
        return rc;
    dray_trace_wait(DRAY_CAUSE_CONTROLLER, "wait for metrics.jsonl", step);
    while (!rc && written < step) {
        json_t *rows = NULL, *row;
        size_t i;
        rc = dray__reports_watch(channel, DRAY__REPORT_ROW, &cursor, deadline, &rows, error);
        json_array_foreach(rows, i, row)
        {
            json_int_t of = dray__json_integer(row, "step");
            written = of > written ? of : written;
        }
        json_decref(rows);
    }
    dray_trace_leave();
    dray__channel_close(channel);
    return rc;
}

#define CARD "dray.json"
#define CARD_FEED "feed"

/* Makes the card of a checkpoint, which is dray.json. Nothing in it depends on time, so resumed
 * runs end with the same bytes. */
static char *card(const dray__host *host, const dray__feed *feed, int64_t step)
{
    json_t *object = json_pack("{s:i, s:s, s:I, s:I, s:I, s:I}", "format", 1, "job",
                               host->job->name, "seed", (json_int_t)host->job->seed, "step",
                               (json_int_t)step, "weight_version", (json_int_t)step,
                               "samples_trained", (json_int_t)(step * dray__job_batch(host->job)));
    bool whole =
        object && (!feed || json_object_set_new(object, CARD_FEED, dray__feed_card(feed)) == 0);
    char *text = whole ? json_dumps(object, JSON_INDENT(2)) : NULL;
    json_decref(object);
    return text;
}

/* Files that rank 0 adds: the card first, then others. */
typedef struct beside {
    dray_checkpoint_file files[4];
    uint32_t count;
    const dray__feed *feed; /* for the card; NULL when it has none */
} beside;

/* The size limit of a tokenizer's file. */
enum { TOKENIZER_MOST = 64 << 20 };

/* Adds the job's tokenizer, so that transformers, and model.checkpoint of another job, need nothing
 * but the checkpoint's folder. */
static int add_tokenizer(const dray__host *host, beside *with, dray_error *error)
{
    static const char *const names[] = {"tokenizer.json", "tokenizer_config.json"};
    char path[PATH_MAX], beside_it[PATH_MAX];
    int rc = DRAY_OK;
    if (!dray__host_leads(host) || !dray__job_tokenizer_path(host->job, path))
        return DRAY_OK;
    const char *slash = strrchr(path, '/');
    dray__path(beside_it, sizeof(beside_it), "%.*s%s", slash ? (int)(slash + 1 - path) : 0, path,
               names[1]);
    for (int i = 0; i < 2 && !rc; i++) {
        dray_checkpoint_file *file = &with->files[with->count];
        const char *from = i ? beside_it : path;
        char *data = NULL;
        if (i && access(beside_it, F_OK) < 0)
            break;
        rc = dray__read_stream(fopen(from, "re"), from, TOKENIZER_MOST, &data, &file->bytes, error);
        file->name = names[i];
        file->data = data;
        with->count += !rc;
    }
    return rc;
}

static void free_beside(beside *with)
{
    for (uint32_t i = 1; i < with->count; i++) /* save_in frees the card */
        free((void *)(uintptr_t)with->files[i].data);
}

static int save_in(dray__host *host, dray__trainer *trainer, const char *folder, bool whole,
                   dray_checkpoint_options *options, beside *with, dray_error *error)
{
    char path[4096];
    int64_t number = (int64_t)options->version;
    char *text = card(host, with->feed, number);
    if (!text)
        return dray__nomem(error);
    dray__host_path(host, path, sizeof(path), "%s", folder);
    with->files[0] = (dray_checkpoint_file){.name = CARD, .data = text, .bytes = strlen(text)};
    options->name = folder;
    options->files = with->files;
    options->file_count = with->count;
    options->timeout_ns = host->wait_ns;
    host->saving = whole ? number : -1;
    int rc = dray__trainer_save(trainer, host->context, path, options, whole, error);
    host->saving = -1;
    free(text);
    return rc;
}

/* ---- the queue ------------------------------------------------------------------------------- */

#define CURSOR "queue.cursor" /* as in python/dray/role.py */

int dray__checkpoint_cursor(const char *folder, int64_t step, void **out, size_t *size,
                            dray_error *error)
{
    char checkpoint[PATH_MAX], path[PATH_MAX], *data = NULL;
    *out = NULL;
    *size = 0;
    dray__checkpoint_path(folder, step, checkpoint, sizeof(checkpoint));
    if (access(checkpoint, F_OK) < 0)
        return DRAY_OK;
    dray__path(path, sizeof(path), "%.*s/" CURSOR, PATH_MAX - 16, checkpoint);
    int rc = dray__read_stream(dray__open_stream(path, "r"), path, CURSOR_MOST, &data, size, error);
    *out = data;
    return rc;
}

int dray__checkpoint_feed(const char *folder, int64_t step, json_t **out, dray_error *error)
{
    char checkpoint[PATH_MAX], path[PATH_MAX];
    json_error_t problem;
    *out = NULL;
    dray__checkpoint_path(folder, step, checkpoint, sizeof(checkpoint));
    dray__path(path, sizeof(path), "%.*s/" CARD, PATH_MAX - 16, checkpoint);
    FILE *file = dray__open_stream(path, "r");
    if (!file)
        return errno == ENOENT ? DRAY_OK : dray__fail_errno(error, errno, "%s", path);
    json_t *read = json_loadf(file, 0, &problem);
    fclose(file);
    if (!read)
        return dray__fail(error, DRAY_EFORMAT, "%s:%d: %s", path, problem.line, problem.text);
    *out = json_incref(json_object_get(read, CARD_FEED));
    json_decref(read);
    return DRAY_OK;
}

void dray__checkpoint_queue(const char *folder, int64_t step, char *out, size_t capacity)
{
    dray__path(out, capacity, "%s/queue/step-%lld.checkpoint", folder, (long long)step);
}

/* Removes the samples of checkpoints that no longer exist. */
static void prune_queue(const dray__host *host)
{
    char folder[PATH_MAX], path[PATH_MAX];
    dray__host_path(host, folder, sizeof(folder), "queue");
    DIR *listing = opendir(folder);
    for (struct dirent *entry; listing && (entry = readdir(listing));) {
        int64_t step;
        int end = 0;
        if (sscanf(entry->d_name, "step-%" SCNd64 ".checkpoint%n", &step, &end) != 1 || !end)
            continue;
        dray__checkpoint_path(host->options.folder, step, path, sizeof(path));
        if (access(path, F_OK) < 0)
            unlinkat(dirfd(listing), entry->d_name, 0);
    }
    if (listing)
        closedir(listing);
}

/* Saves the queue's samples once the checkpoint is written: those that its weights have made for
 * the next steps, for a run that resumes from it. */
static int save_queue(const dray__host *host, int64_t step, dray_error *error)
{
    char path[PATH_MAX];
    if (host->job->queue.durability != DRAY_DURABILITY_CHECKPOINT)
        return DRAY_OK;
    dray__checkpoint_queue(host->options.folder, step, path, sizeof(path));
    int rc = dray_queue_checkpoint(host->queue, path, error);
    prune_queue(host);
    return rc;
}

/* Saves a checkpoint with the queue's cursor in it. The queue drops the commits that it covers once
 * the checkpoint is the newest. A run that resumes from it finds the rest in the queue. */
static int save_with_cursor(dray__host *host, dray__trainer *trainer,
                            const dray__publication *publication, const dray__feed *feed,
                            int64_t step, dray_error *error)
{
    static const uint64_t first = 0; /* the reference */
    bool leads = dray__host_leads(host);
    dray_checkpoint_options options = DRAY_CHECKPOINT_OPTIONS_INIT;
    options.version = (uint64_t)step;
    options.keep = (uint32_t)host->job->checkpoint.keep;
    options.stay = &first;
    options.stay_count = 1;
    dray_checkpoint_part previous;
    if (publication && dray__publication_previous(publication, step, &previous)) {
        options.parts = &previous;
        options.part_count = 1;
    }
    beside with = {.files[1].name = CURSOR, .count = 2, .feed = feed};
    void *cursor = NULL;
    int rc =
        leads ? dray_queue_cursor(host->queue, (uint64_t)step, &cursor, &with.files[1].bytes, error)
              : DRAY_OK;
    with.files[1].data = cursor;
    if (!rc)
        rc = add_tokenizer(host, &with, error);
    if (!rc)
        rc = save_in(host, trainer, "checkpoints", true, &options, &with, error);
    if (!rc)
        dray__fault_at("after_checkpoint", step);
    if (!rc && leads)
        rc = dray_queue_covered(host->queue, cursor, with.files[1].bytes, error);
    if (!rc)
        dray__fault_at("covered", step);
    free_beside(&with);
    return rc;
}

int dray__checkpoint_save(dray__host *host, dray__trainer *trainer,
                          const dray__publication *publication, const dray__feed *feed,
                          int64_t step, dray_error *error)
{
    bool leads = dray__host_leads(host);
    dray_trace_enter(DRAY_SPAN_TRANSFER, "checkpoint", step);
    int rc = leads && step > 0 ? wait_for_row(host, step, error) : DRAY_OK;
    if (!rc)
        rc = save_with_cursor(host, trainer, publication, feed, step, error);
    if (!rc && leads)
        rc = save_queue(host, step, error);
    if (!rc && leads)
        rc = dray__host_report(host, "checkpoint", json_pack("{s:I}", "step", (json_int_t)step),
                               error);
    dray_trace_leave();
    return rc;
}

int dray__checkpoint_pass(const dray__host *host, int64_t step, dray_error *error)
{
    void *cursor = NULL;
    size_t size = 0;
    if (!dray__host_leads(host) || host->job->queue.durability == DRAY_DURABILITY_JOURNAL)
        return DRAY_OK;
    int rc = dray_queue_cursor(host->queue, (uint64_t)step, &cursor, &size, error);
    if (!rc)
        rc = dray_queue_covered(host->queue, cursor, size, error);
    free(cursor);
    return rc;
}

int dray__checkpoint_weights(dray__host *host, dray__trainer *trainer, int64_t version,
                             dray_error *error)
{
    dray_checkpoint_options options = DRAY_CHECKPOINT_OPTIONS_INIT;
    options.version = (uint64_t)version;
    options.keep = WEIGHTS_KEPT;
    beside with = {.count = 1};
    return save_in(host, trainer, "weights", false, &options, &with, error);
}

int dray__checkpoint_critic(dray__host *host, dray__trainer *trainer, int64_t step,
                            dray_error *error)
{
    dray_checkpoint_options options = DRAY_CHECKPOINT_OPTIONS_INIT;
    dray_trace_enter(DRAY_SPAN_TRANSFER, "critic_checkpoint", step);
    options.version = (uint64_t)step;
    options.keep = (uint32_t)host->job->checkpoint.keep + 1;
    beside with = {.count = 1};
    int rc = save_in(host, trainer, DRAY__CRITIC_FOLDER, true, &options, &with, error);
    if (!rc)
        dray__fault_at("after_checkpoint", step);
    dray_trace_leave();
    return rc;
}

void dray__critic_path(const char *folder, int64_t step, char *out, size_t capacity)
{
    dray__path(out, capacity, "%s/" DRAY__CRITIC_FOLDER "/step-%06lld", folder, (long long)step);
}
