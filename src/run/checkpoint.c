#include "run/checkpoint.h"

#include "base/error.h"
#include "run/fault.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WEIGHTS_KEPT = 2 };

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *ftw)
{
    (void)st;
    (void)kind;
    (void)ftw;
    return remove(path) < 0 && errno != ENOENT ? -1 : 0;
}

int dray__remove_tree(const char *path, dray_error *error)
{
    struct stat st;
    if (lstat(path, &st) < 0)
        return errno == ENOENT ? DRAY_OK : dray__fail_errno(error, errno, "%s", path);
    return nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS) < 0
               ? dray__fail_errno(error, errno, "%s: cannot be removed", path)
               : DRAY_OK;
}

static int sync_folder(const char *path, dray_error *error)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return dray__fail_errno(error, errno, "%s", path);
    int rc = fsync(fd) < 0 ? dray__fail_errno(error, errno, "%s: fsync", path) : DRAY_OK;
    close(fd);
    return rc;
}

/* ---- numbered folders ------------------------------------------------------------------------ */

/* The number of an entry called PREFIX-N; -1: it is something else. */
static int64_t number_of(const char *name, const char *prefix)
{
    size_t length = strlen(prefix);
    if (strncmp(name, prefix, length) != 0 || name[length] != '-' || name[length + 1] < '0' ||
        name[length + 1] > '9')
        return -1;
    char *end;
    long long number = strtoll(name + length + 1, &end, 10);
    return *end ? -1 : number;
}

/* The largest number in `folder` that is at most `most`; -1: none. */
static int64_t largest(const char *folder, const char *prefix, int64_t most)
{
    DIR *listing = opendir(folder);
    int64_t best = -1;
    for (struct dirent *entry; listing && (entry = readdir(listing));) {
        int64_t number = number_of(entry->d_name, prefix);
        if (number > best && number <= most)
            best = number;
    }
    if (listing)
        closedir(listing);
    return best;
}

int dray__checkpoint_newest(const char *folder, int64_t most, int64_t *step, dray_error *error)
{
    char path[PATH_MAX];
    dray__path(path, sizeof(path), "%s/checkpoints", folder);
    int64_t best = largest(path, "step", most);
    if (best < 0)
        return dray__fail(error, DRAY_ENOENT, "%s: no checkpoint to go on from", path);
    *step = best;
    return DRAY_OK;
}

/* Removes all but the newest `keep` numbered folders, and number `spared`. */
static int prune(const char *folder, const char *prefix, int64_t keep, int64_t spared,
                 dray_error *error)
{
    int64_t at = INT64_MAX;
    int rc = DRAY_OK;
    while (!rc && (at = largest(folder, prefix, at == INT64_MAX ? at : at - 1)) >= 0) {
        if (keep-- > 0 || at == spared)
            continue;
        char path[PATH_MAX];
        dray__path(path, sizeof(path), "%s/%s-%lld", folder, prefix, (long long)at);
        rc = dray__remove_tree(path, error);
    }
    return rc;
}

/* ---- writing --------------------------------------------------------------------------------- */

static int make_folder(const char *path, dray_error *error)
{
    return mkdir(path, 0777) < 0 && errno != EEXIST ? dray__fail_errno(error, errno, "%s", path)
                                                    : DRAY_OK;
}

static int write_text(const char *path, const char *text, dray_error *error)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd < 0)
        return dray__fail_errno(error, errno, "%s", path);
    size_t size = strlen(text), done = 0;
    ssize_t n = 0;
    while (done < size && n >= 0) {
        n = write(fd, text + done, size - done);
        done += n > 0 ? (size_t)n : 0;
    }
    int problem = n < 0 || fsync(fd) < 0 ? errno : 0;
    if (close(fd) < 0 && !problem)
        problem = errno;
    return problem ? dray__fail_errno(error, problem, "%s", path) : DRAY_OK;
}

/* What a checkpoint says of itself. Nothing that depends on time: resumed runs end with the same
 * bytes. */
static int write_card(const dray__host *host, const char *folder, int64_t step, dray_error *error)
{
    char path[PATH_MAX];
    dray__path(path, sizeof(path), "%s/dray.json", folder);
    json_t *card = json_pack("{s:i, s:s, s:I, s:I, s:I, s:I}", "format", 1, "job", host->job->name,
                             "seed", (json_int_t)host->job->seed, "step", (json_int_t)step,
                             "weight_version", (json_int_t)step, "samples_trained",
                             (json_int_t)(step * dray__job_batch(host->job)));
    char *text = card ? json_dumps(card, JSON_INDENT(2)) : NULL;
    json_decref(card);
    int rc = text ? write_text(path, text, error) : dray__nomem(error);
    free(text);
    return rc;
}

typedef int (*write_fn)(dray__trainer *trainer, const char *directory, dray_error *error);

/* All ranks write into a folder beside the place, which rank 0 then renames. */
static int write_numbered(dray__host *host, dray__trainer *trainer, write_fn write,
                          const char *parent, const char *prefix, int64_t number, dray_error *error)
{
    char folder[PATH_MAX], partial[PATH_MAX], whole[PATH_MAX];
    bool lead = dray__host_leads(host);
    dray__host_path(host, folder, sizeof(folder), "%s", parent);
    dray__host_path(host, partial, sizeof(partial), "%s/.%s-%lld.partial", parent, prefix,
                    (long long)number);
    dray__host_path(host, whole, sizeof(whole), "%s/%s-%lld", parent, prefix, (long long)number);
    int rc = lead ? dray__remove_tree(partial, error) : DRAY_OK;
    if (!rc && lead)
        rc = make_folder(partial, error);
    if (!rc)
        rc = dray__group_barrier(host->group, DRAY_WAIT_DEFAULT, error);
    if (!rc)
        rc = write(trainer, partial, error);
    dray__fault_at("in_checkpoint", number);
    if (!rc)
        rc = dray__group_barrier(host->group, DRAY_WAIT_DEFAULT, error);
    if (!rc && lead)
        rc = write_card(host, partial, number, error);
    if (!rc && lead)
        rc = sync_folder(partial, error);
    if (!rc && lead && access(whole, F_OK) == 0)
        rc = dray__remove_tree(whole, error);
    if (!rc && lead && rename(partial, whole) < 0)
        rc = dray__fail_errno(error, errno, "%s", whole);
    return rc || !lead ? rc : sync_folder(folder, error);
}

/* ---- the queue's samples --------------------------------------------------------------------- */

void dray__checkpoint_queue(const char *folder, int64_t step, char *out, size_t capacity)
{
    dray__path(out, capacity, "%s/queue/step-%lld.checkpoint", folder, (long long)step);
}

/* Those of checkpoints that are there no more. */
static void prune_queue(const dray__host *host)
{
    char folder[PATH_MAX], path[PATH_MAX];
    dray__host_path(host, folder, sizeof(folder), "queue");
    DIR *listing = opendir(folder);
    for (struct dirent *entry; listing && (entry = readdir(listing));) {
        char name[64];
        snprintf(name, sizeof(name), "%.63s", entry->d_name);
        char *ending = strstr(name, ".checkpoint");
        if (!ending || ending[strlen(".checkpoint")])
            continue;
        *ending = 0;
        int64_t step = number_of(name, "step");
        dray__checkpoint_path(host->options.folder, step, path, sizeof(path));
        if (step >= 0 && access(path, F_OK) < 0)
            unlinkat(dirfd(listing), entry->d_name, 0);
    }
    if (listing)
        closedir(listing);
}

/* What the queue holds once the checkpoint is there: samples of the next step that its weights have
 * made meanwhile, for a run that goes on from it. */
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

int dray__checkpoint_save(dray__host *host, dray__trainer *trainer, int64_t step, dray_error *error)
{
    int64_t begin = dray_trace_now();
    char folder[PATH_MAX];
    dray__host_path(host, folder, sizeof(folder), "checkpoints");
    int rc = write_numbered(host, trainer, dray__trainer_save, "checkpoints", "step", step, error);
    if (!rc && dray__host_leads(host))
        rc = prune(folder, "step", host->job->checkpoint.keep, 0, error);
    if (!rc && dray__host_leads(host))
        rc = save_queue(host, step, error);
    if (!rc && dray__host_leads(host))
        rc = dray__host_report(host, "checkpoint", json_pack("{s:I}", "step", (json_int_t)step),
                               error);
    if (!rc)
        dray__fault_at("after_checkpoint", step);
    return rc ? rc : dray__host_phase(host, "checkpoint", step, begin, error);
}

int dray__checkpoint_weights(dray__host *host, dray__trainer *trainer, int64_t version,
                             dray_error *error)
{
    char folder[PATH_MAX];
    dray__host_path(host, folder, sizeof(folder), "weights");
    int rc = write_numbered(host, trainer, dray__trainer_write_model, "weights", "version", version,
                            error);
    return rc || !dray__host_leads(host) ? rc : prune(folder, "version", WEIGHTS_KEPT, -1, error);
}

int dray__checkpoint_reset(dray__host *host, dray__trainer *trainer, dray_error *error)
{
    char path[PATH_MAX];
    dray__host_path(host, path, sizeof(path), "checkpoints/.start.partial");
    int rc = dray__host_leads(host) ? dray__remove_tree(path, error) : DRAY_OK;
    if (!rc && dray__host_leads(host))
        rc = make_folder(path, error);
    if (!rc)
        rc = dray__group_barrier(host->group, DRAY_WAIT_DEFAULT, error);
    if (!rc)
        rc = dray__trainer_write_model(trainer, path, error);
    if (!rc)
        rc = dray__group_barrier(host->group, DRAY_WAIT_DEFAULT, error);
    if (!rc)
        rc = dray__trainer_load(trainer, path, error);
    if (!rc)
        rc = dray__group_barrier(host->group, DRAY_WAIT_DEFAULT, error);
    return rc || !dray__host_leads(host) ? rc : dray__remove_tree(path, error);
}
