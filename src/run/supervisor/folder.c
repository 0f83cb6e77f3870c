#include "run/supervisor/folder.h"

#include "base/error.h"
#include "base/io.h"
#include "base/json.h"
#include "base/wire.h"
#include "run/data/data.h"
#include "run/job/schedule.h"
#include "run/job/settings.h"
#include "run/paths.h"
#include "run/trainer/checkpoint.h"

#include <dray/trace.h>
#include <dray/weights.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

bool dray__job_eval_due(const dray__job *job, int64_t step)
{
    return step == 0 || step == job->steps || (job->eval.every > 0 && step % job->eval.every == 0);
}

void dray__folder_path(const dray__folder *folder, const char *name, char out[PATH_MAX])
{
    dray__path(out, PATH_MAX, "%s/%s", folder->path, name);
}

/* ---- making ---------------------------------------------------------------------------------- */

static int take_path(dray__folder *folder, const char *path, dray_error *error)
{
    char whole[PATH_MAX];
    if (!realpath(path, whole))
        return errno == ENOENT ? dray__fail(error, DRAY_ENOENT, "%s: no such folder", path)
                               : dray__fail_errno(error, errno, "%s", path);
    if (strlen(whole) >= sizeof(folder->path) - 64)
        return dray__fail(error, DRAY_EINVALID, "%s: the path is too long", whole);
    if (!dray__utf8_valid(whole, strlen(whole))) /* messages and JSON need UTF-8 */
        return dray__fail(error, DRAY_EINVALID, "%s: the path of a run must be UTF-8", whole);
    strcpy(folder->path, whole);
    return DRAY_OK;
}

static int check_unused(const dray__folder *folder, dray_error *error)
{
    char config[PATH_MAX];
    dray__folder_path(folder, "config.yaml", config);
    return access(config, F_OK) == 0
               ? dray__fail(error, DRAY_EEXIST,
                            "%s: a run is there already; go on with it: dray run --resume %s",
                            folder->path, folder->path)
               : DRAY_OK;
}

/* A given folder may exist if no run is in it. */
static int make_given(dray__folder *folder, const char *out, dray_error *error)
{
    int rc = dray__make_folders(out, error);
    if (!rc)
        rc = take_path(folder, out, error);
    return rc ? rc : check_unused(folder, error);
}

static int make_default(dray__folder *folder, const char *name, dray_error *error)
{
    char path[PATH_MAX];
    int rc = dray__folder_name_check(name, "run", error);
    if (!rc)
        rc = dray__make_folders("runs", error);
    for (int n = 1; !rc && n < 100000; n++) {
        if (n == 1)
            snprintf(path, sizeof(path), "runs/%s", name);
        else
            snprintf(path, sizeof(path), "runs/%s-%d", name, n);
        if (mkdir(path, 0777) == 0)
            return take_path(folder, path, error);
        if (errno != EEXIST)
            rc = dray__fail_errno(error, errno, "%s", path);
    }
    return rc ? rc : dray__fail(error, DRAY_EEXIST, "runs/%s: too many runs", name);
}

static const char *const guest_names[] = {"weights", "logs", "trace"};

static int make_folders_of(const dray__folder *folder, const char *const *names, size_t count,
                           dray_error *error)
{
    char path[PATH_MAX];
    for (size_t i = 0; i < count; i++) {
        dray__folder_path(folder, names[i], path);
        if (mkdir(path, 0777) < 0 && errno != EEXIST)
            return dray__fail_errno(error, errno, "%s", path);
    }
    return DRAY_OK;
}

static int make_inside(const dray__folder *folder, dray_error *error)
{
    static const char *const names[] = {"checkpoints", "weights", "logs", "trace"};
    return make_folders_of(folder, names, sizeof(names) / sizeof(names[0]), error);
}

/* A socket's path holds at most 107 bytes. */
static int place_sockets(dray__folder *folder, dray_error *error)
{
    if (strlen(folder->path) < sizeof(folder->sockets)) {
        strcpy(folder->sockets, folder->path);
        return DRAY_OK;
    }
    strcpy(folder->sockets, "/tmp/dray-XXXXXX");
    if (!mkdtemp(folder->sockets))
        return dray__fail_errno(error, errno, "%s", folder->sockets);
    folder->own_sockets = true;
    return DRAY_OK;
}

/* ---- resuming -------------------------------------------------------------------------------- */

static int64_t step_of(const json_t *row)
{
    return dray__json_integer(row, "step");
}

static int64_t last_of(const json_t *rows)
{
    size_t count = json_array_size(rows);
    return count ? step_of(json_array_get(rows, count - 1)) : -1;
}

/* Reads the rows that are complete lines and have steps in order. All rows after a bad line are
 * lost. */
static int read_rows(const dray__folder *folder, const char *name, json_t *rows, dray_error *error)
{
    char path[PATH_MAX];
    dray__folder_path(folder, name, path);
    FILE *file = dray__open_stream(path, "r");
    if (!file)
        return errno == ENOENT ? DRAY_OK : dray__fail_errno(error, errno, "%s", path);
    char *line = NULL;
    size_t room = 0;
    ssize_t length;
    bool ok = true;
    while (ok && (length = getline(&line, &room, file)) > 0) {
        json_t *row = NULL;
        ok = line[length - 1] == '\n' &&
             dray__json_parse(line, (size_t)length, path, &row, NULL) == DRAY_OK &&
             json_is_integer(json_object_get(row, "step"));
        if (ok && step_of(row) > last_of(rows))
            json_array_append_new(rows, row);
        else
            json_decref(row);
    }
    free(line);
    fclose(file);
    return DRAY_OK;
}

int dray__folder_checkpoint(const dray__folder *folder, int64_t *step, dray_error *error)
{
    char path[PATH_MAX], *newest = NULL;
    uint64_t version = 0;
    dray__folder_path(folder, "checkpoints", path);
    int rc = dray_checkpoint_latest(path, &version, &newest, error);
    dray_free(newest);
    if (!rc)
        *step = (int64_t)version;
    return rc;
}

int dray__folder_write_rows(const dray__folder *folder, const char *name, const json_t *rows,
                            dray_error *error)
{
    char path[PATH_MAX];
    dray__folder_path(folder, name, path);
    FILE *file = dray__begin_file(path);
    size_t i;
    json_t *row;
    bool ok = file != NULL;
    json_array_foreach(rows, i, row)
    {
        ok = ok && json_dumpf(row, file, JSON_COMPACT) == 0 && fputc('\n', file) >= 0;
    }
    return dray__end_file(file, ok, path, error);
}

/* Holds back the rows from the first one without its evaluation on, as the earlier run did. */
static int hold_rows(dray__folder *folder, size_t from, dray_error *error)
{
    folder->held = json_array();
    if (!folder->held)
        return dray__nomem(error);
    while (json_array_size(folder->rows) > from) {
        if (json_array_append(folder->held, json_array_get(folder->rows, from)) < 0)
            return dray__nomem(error);
        json_array_remove(folder->rows, from);
    }
    return json_array_size(folder->held)
               ? dray__folder_write_rows(folder, DRAY__ROWS_PENDING, folder->held, error)
               : DRAY_OK;
}

/* Returns the next version in the listing after the one that the run goes on from; NULL at the
 * end. */
static const char *next_newer(DIR *listing, int64_t first_step)
{
    for (const struct dirent *entry; listing && (entry = readdir(listing));) {
        int64_t step;
        int end = 0;
        if (sscanf(entry->d_name, "step-%" SCNd64 "%n", &step, &end) == 1 && !entry->d_name[end] &&
            step > first_step)
            return entry->d_name;
    }
    return NULL;
}

/* Refuses to begin again when there are checkpoints to which no link leads, as in a copy of the
 * folder that was made without links. They would be removed. */
static int check_unled(const dray__folder *folder, dray_error *error)
{
    char path[PATH_MAX];
    dray__folder_path(folder, "checkpoints", path);
    DIR *listing = opendir(path);
    const char *name = next_newer(listing, 0);
    int rc = name ? dray__fail(error, DRAY_EFORMAT,
                               "%s: it has %.64s, but `latest`, which leads to the newest "
                               "checkpoint, leads to none: make that link, or remove the "
                               "checkpoints to begin again",
                               path, name)
                  : DRAY_OK;
    if (listing)
        closedir(listing);
    return rc;
}

/* Removes the rows that the earlier run held back. They are of steps that are made again, and a
 * trainer in Python would take them for those that its checkpoints wait for. */
static void forget_pending(const dray__folder *folder)
{
    char path[PATH_MAX];
    dray__folder_path(folder, DRAY__ROWS_PENDING, path);
    unlink(path);
}

static int choose_start(dray__folder *folder, const dray__job *job, dray_error *error)
{
    folder->rows = json_array();
    int rc =
        folder->rows ? read_rows(folder, "metrics.jsonl", folder->rows, error) : dray__nomem(error);
    if (!rc)
        rc = read_rows(folder, DRAY__ROWS_PENDING, folder->rows, error);
    if (!rc)
        rc = dray__folder_checkpoint(folder, &folder->first_step, error);
    if (rc == DRAY_ENOENT) { /* the run ended before its first checkpoint, so it begins again */
        folder->first_step = 0;
        rc = check_unled(folder, error);
    }
    if (!rc && folder->first_step > job->steps)
        rc = dray__fail(error, DRAY_EINVALID,
                        "%s/config.yaml: steps: expected %lld or more, which the run has done, "
                        "found %lld",
                        folder->path, (long long)folder->first_step, (long long)job->steps);
    if (rc)
        return rc;
    size_t count = json_array_size(folder->rows);
    while (count && step_of(json_array_get(folder->rows, count - 1)) > folder->first_step)
        json_array_remove(folder->rows, --count);
    size_t whole = 0;
    const json_t *row;
    while ((row = json_array_get(folder->rows, whole)) &&
           (json_is_number(json_object_get(row, "eval_accuracy")) ||
            !dray__job_eval_due(job, step_of(row))))
        whole++;
    folder->eval_from = row ? step_of(row) : count ? folder->first_step + 1 : folder->first_step;
    rc = hold_rows(folder, whole, error);
    if (!rc)
        rc = dray__folder_write_rows(folder, "metrics.jsonl", folder->rows, error);
    if (!rc && !json_array_size(folder->held))
        forget_pending(folder);
    return rc;
}

/* Keeps the timeline of the run until now as trace-N.json, because the processes to come begin new
 * ones. A run that was killed left its spans unmerged. A timeline that cannot be kept does not end
 * the run. */
static void keep_timeline(const dray__folder *folder)
{
    char spans[PATH_MAX], now[PATH_MAX], kept[PATH_MAX], name[32];
    dray__folder_path(folder, "trace", spans);
    dray__folder_path(folder, "trace.json", now);
    int n = 0;
    do {
        snprintf(name, sizeof(name), "trace-%d.json", ++n);
        dray__folder_path(folder, name, kept);
    } while (access(kept, F_OK) == 0);
    if (rename(now, kept) < 0)
        dray_trace_merge(spans, kept, NULL);
    dray__remove_tree(spans, NULL);
}

/* Removes versions that engines read from disk. The resumed run writes them again. */
static int forget_weights(const dray__folder *folder, dray_error *error)
{
    char path[PATH_MAX];
    dray__folder_path(folder, "weights", path);
    return dray__remove_tree(path, error);
}

/* Removes versions after the one that the run resumes from. They are made again, and an old one
 * would be taken for the new one. */
static int forget_newer(const dray__folder *folder, const char *name, dray_error *error)
{
    char path[PATH_MAX], version[PATH_MAX];
    dray__folder_path(folder, name, path);
    DIR *listing = opendir(path);
    int rc = DRAY_OK;
    for (const char *at; !rc && (at = next_newer(listing, folder->first_step));) {
        dray__path(version, sizeof(version), "%.*s/%s", PATH_MAX - 300, path, at);
        rc = dray__remove_tree(version, error);
    }
    if (listing)
        closedir(listing);
    return rc;
}

static int open_resumed(const dray__run_options *options, dray__folder *folder, dray__job **job,
                        dray_error *error)
{
    char config[PATH_MAX];
    int rc = take_path(folder, options->resume, error);
    if (rc)
        return rc;
    folder->resumed = true;
    dray__folder_path(folder, "config.yaml", config);
    if (access(config, F_OK) < 0)
        return dray__fail(error, DRAY_ENOENT, "%s: no run to go on with (no config.yaml there)",
                          options->resume);
    rc = dray__job_load(config, NULL, 0, job, NULL, error);
    if (!rc)
        rc = dray__lock_folder(folder->path, "a run", &folder->lock, error);
    if (!rc)
        rc = choose_start(folder, *job, error);
    if (!rc)
        rc = forget_weights(folder, error);
    if (!rc)
        rc = forget_newer(folder, "checkpoints", error);
    if (!rc)
        rc = forget_newer(folder, DRAY__CRITIC_FOLDER, error);
    if (rc)
        return rc;
    keep_timeline(folder);
    return make_inside(folder, error);
}

/* ---- both ------------------------------------------------------------------------------------ */

static int open_new(const dray__run_options *options, dray__folder *folder, dray__job **job,
                    dray_error *error)
{
    char *resolved = NULL;
    int rc = dray__job_load(options->job, options->settings, options->setting_count, job, &resolved,
                            error);
    if (!rc)
        rc = dray__data_check(*job, error);
    if (!rc)
        rc = options->out ? make_given(folder, options->out, error)
                          : make_default(folder, (*job)->name, error);
    if (!rc)
        rc = dray__lock_folder(folder->path, "a run", &folder->lock, error);
    if (!rc) /* checks again, as another run may have started and ended meanwhile */
        rc = check_unused(folder, error);
    if (!rc)
        rc = dray__write_text(folder->path, "config.yaml", resolved, error);
    if (!rc)
        rc = make_inside(folder, error);
    free(resolved);
    folder->eval_from = 0;
    return rc;
}

/* Writes the job as JSON, for roles of any language (docs/roles.md). */
static int write_json(const dray__folder *folder, const dray__job *job, dray_error *error)
{
    json_t *json = dray__settings_json(job);
    bool whole = json && !json_object_set_new(json, "rules", dray__schedule_rules_json(job));
    char *text = whole ? json_dumps(json, JSON_INDENT(2)) : NULL;
    int rc = text ? dray__write_text(folder->path, "config.json", text, error) : dray__nomem(error);
    free(text);
    json_decref(json);
    return rc;
}

/* Makes or reads the identity of a run that hosts may join, and counts its starts, so that files
 * which a host has of an earlier start are not taken for this one's. */
static int identify(dray__folder *folder, const dray__job *job, dray_error *error)
{
    char path[PATH_MAX];
    const char *launch = getenv("DRAY_LAUNCH");
    json_t *known = NULL;
    uint64_t drawn;
    dray__folder_path(folder, "run.json", path);
    if (dray__json_load(path, 4096, &known, NULL) == DRAY_OK && dray__json_string(known, "id")) {
        snprintf(folder->id, sizeof folder->id, "%.16s", dray__json_string(known, "id"));
        folder->epoch = dray__json_integer(known, "epoch");
    } else if (getrandom(&drawn, sizeof drawn, 0) == (ssize_t)sizeof drawn) {
        snprintf(folder->id, sizeof folder->id, "%016" PRIx64, drawn);
    } else {
        return dray__fail_errno(error, errno, "getrandom");
    }
    json_decref(known);
    folder->epoch++;
    known = json_pack("{s:s, s:I, s:s, s:s}", "id", folder->id, "epoch", (json_int_t)folder->epoch,
                      "listen", job->listen, "launch", launch ? launch : "");
    char *text = known ? json_dumps(known, JSON_INDENT(2)) : NULL;
    int rc = text ? dray__write_text(folder->path, "run.json", text, error) : dray__nomem(error);
    free(text);
    json_decref(known);
    return rc;
}

int dray__folder_of_guest(dray__folder *out, const char *path, const dray__job *job,
                          const char *resolved, dray_error *error)
{
    *out = (dray__folder){.lock = -1};
    int rc = take_path(out, path, error);
    if (!rc)
        rc = dray__lock_folder(out->path, "a host of a run", &out->lock, error);
    if (!rc)
        rc = make_folders_of(out, guest_names, sizeof(guest_names) / sizeof(*guest_names), error);
    if (!rc)
        rc = dray__write_text(out->path, "config.yaml", resolved, error);
    if (!rc)
        rc = write_json(out, job, error);
    return rc ? rc : place_sockets(out, error);
}

int dray__folder_open(const dray__run_options *options, dray__folder *out, dray__job **job,
                      dray_error *error)
{
    dray__folder folder = {.lock = -1};
    *job = NULL;
    int rc = options->resume ? open_resumed(options, &folder, job, error)
                             : open_new(options, &folder, job, error);
    if (!rc)
        rc = write_json(&folder, *job, error);
    if (!rc && (*job)->listen[0])
        rc = identify(&folder, *job, error);
    if (!rc)
        rc = place_sockets(&folder, error);
    if (rc) {
        dray__folder_close(&folder);
        dray__job_free(*job);
        return rc;
    }
    *out = folder;
    return DRAY_OK;
}

void dray__folder_close(dray__folder *folder)
{
    if (folder->lock >= 0)
        close(folder->lock);
    if (folder->own_sockets)
        dray__remove_tree(folder->sockets, NULL);
    json_decref(folder->rows);
    json_decref(folder->held);
}
