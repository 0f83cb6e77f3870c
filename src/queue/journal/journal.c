#include "queue/journal/journal_inside.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/hook.h"
#include "base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <unistd.h>

#define RETRY_AFTER (200 * DRAY__MILLISECOND) /* after a failure */
#define GROUP_BYTES (UINT64_C(32) << 20)      /* of a group, after which it is synced */
#define SPIN (50 * INT64_C(1000))             /* of nanoseconds */
#define AHEAD (UINT64_C(1) << 20)             /* of zeros */

void dray__copy_free(dray__copy *copy)
{
    if (!copy)
        return;
    if (copy->fd >= 0)
        close(copy->fd);
    free(copy->label);
    free(copy->partial);
    free(copy->name);
    free(copy);
}

void dray__entry_free(dray__journal_entry *entry)
{
    if (!entry)
        return;
    dray__writer_free(&entry->body);
    free(entry->pieces);
    free(entry->keep);
    dray__copy_free(entry->copy);
    free(entry);
}

void dray__entries_add(dray__entries *to, dray__journal_entry *first)
{
    *to->last = first;
    while (*to->last)
        to->last = &(*to->last)->next;
}

static void entries_clear(dray__entries *list)
{
    list->first = NULL;
    list->last = &list->first;
}

/* Moves all entries of `from` to the beginning of `to`. */
static void prepend(dray__entries *to, dray__entries *from)
{
    if (!from->first)
        return;
    *from->last = to->first;
    if (!to->first)
        to->last = from->last;
    to->first = from->first;
    entries_clear(from);
}

void dray__journal_wake(const dray__journal *journal)
{
    uint64_t one = 1;
    ssize_t n = write(journal->wake, &one, sizeof one);
    (void)n; /* when the counter is full, it is readable already */
}

int dray__journal_sync_folder(const char *path)
{
    char *copy = strdup(path);
    int fd = copy ? open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    free(copy);
    int rc = fd < 0 ? -1 : fsync(fd);
    if (fd >= 0)
        close(fd);
    return rc;
}

/* Removes the replaced file. It may be missing. */
static void journal_drop_spare(const dray__journal *journal)
{
    char *spare = NULL;
    if (asprintf(&spare, "%s.new", journal->path) < 0)
        return;
    unlink(spare);
    free(spare);
}

/* ---- writing --------------------------------------------------------------------------------- */

static bool is_job(const dray__journal_entry *entry)
{
    return entry->compact || entry->each;
}

/* Extends the file beyond the last written record, so that syncing the next records does not change
 * its size. A disk that has no room for the extension may still have room for the records. */
static void go_ahead(dray__journal *j)
{
    static const uint8_t zeros[1 << 16];
    for (uint64_t left = AHEAD; left; left -= sizeof zeros)
        if (j->options.files->write(j->fd, zeros, sizeof zeros, (int64_t)j->size) < 0)
            return;
        else
            j->size += sizeof zeros;
}

static int write_group(dray__journal *j, dray__journal_entry *group, uint64_t at, uint64_t safe,
                       dray_error *error)
{
    int rc = DRAY_OK;
    dray__output_to(&j->out, j->fd, j->path, j->salt, at);
    for (dray__journal_entry *entry = group; entry && !rc; entry = entry->next)
        rc = dray__output_entry(&j->out, entry, safe, &j->options, error);
    dray__hook_step("writing");
    if (!rc)
        rc = dray__output_flush(&j->out, error);
    if (rc)
        return rc;
    dray__hook_step("written");
    uint64_t end = dray__output_end(&j->out);
    if (end > j->size) {
        j->size = end;
        if (j->options.sync && end - at < AHEAD)
            go_ahead(j);
    }
    return DRAY_OK;
}

/* Wakes the other hand if there is work; this one goes on without it. */
static void wake_others(dray__journal *j)
{
    if (j->waiting.first || j->broken || j->stop)
        pthread_cond_broadcast(&j->work);
    if (j->aside_runs)
        pthread_cond_broadcast(&j->idle);
}

static void note_failure(dray__journal *j, const dray_error *error)
{
    if (!j->failure.code)
        dray__log(DRAY_LOG_WARN, "queue: %s", error->message);
    j->failure = *error;
    j->broken = true;
    dray__journal_wake(j);
}

/* Takes the next work: one job, or the records up to the next job, or a full group of them. */
static dray__journal_entry *take_group(dray__journal *j)
{
    dray__journal_entry *group = j->waiting.first, *last = group;
    uint64_t bytes = 0;
    for (; last->next && !is_job(group) && !is_job(last->next) && bytes < GROUP_BYTES;
         last = last->next) {
        bytes += last->body.size;
        for (uint32_t i = 0; i < last->piece_count; i++)
            bytes += last->pieces[i].bytes;
    }
    j->waiting.first = last->next;
    if (!last->next)
        j->waiting.last = &j->waiting.first;
    last->next = NULL;
    return group;
}

/* Updates `taken`. Jobs have numbers, too, but are not written again after a failure. */
static void note_taken(dray__journal *j, uint64_t last)
{
    j->most_taken = last > j->most_taken ? last : j->most_taken;
    j->taken = j->waiting.first ? j->waiting.first->seq - 1 : j->most_taken;
}

static void write_waiting(dray__journal *j)
{
    dray__journal_entry *group = take_group(j);
    dray_error error = {0};
    uint64_t last = group->seq;
    if (is_job(group)) { /* it starts when everything before it is safe */
        group->at = j->written;
        note_taken(j, last);
        dray__entries_add(&j->jobs, group);
        dray__aside_begin(j);
        return;
    }
    for (const dray__journal_entry *entry = group; entry; entry = entry->next)
        last = entry->seq;
    j->writing = true;
    uint64_t at = j->written, safe = j->safe_record;
    pthread_mutex_unlock(&j->lock);
    int rc = write_group(j, group, at, safe, &error);
    pthread_mutex_lock(&j->lock);
    j->writing = false;
    dray__entries_add(&j->unsafe, group);
    if (rc) {
        note_failure(j, &error);
    } else {
        j->written = dray__output_end(&j->out);
        j->written_record = last;
        note_taken(j, last);
    }
    wake_others(j);
}

/* Moves the entries that are safe to `done`. */
static void report(dray__journal *j)
{
    while (j->unsafe.first && j->unsafe.first->seq <= j->safe) {
        dray__journal_entry *entry = j->unsafe.first;
        j->unsafe.first = entry->next;
        if (!entry->next)
            j->unsafe.last = &j->unsafe.first;
        entry->next = NULL;
        dray__entries_add(&j->done, entry);
    }
    dray__journal_wake(j);
}

static void sync_written(dray__journal *j)
{
    uint64_t last = j->taken, record = j->written_record, end = j->written;
    bool needed = j->options.sync && end > j->end;
    int rc = 0, errnum = 0;
    j->syncing = true;
    pthread_mutex_unlock(&j->lock);
    dray__hook_step("syncing");
    if (needed && (rc = j->options.files->sync(j->fd)) < 0)
        errnum = errno;
    if (!rc)
        dray__hook_step("synced");
    pthread_mutex_lock(&j->lock);
    j->syncing = false;
    if (rc) {
        dray_error error;
        dray__file_failed(j->path, errnum, "fdatasync", &error);
        note_failure(j, &error);
    } else {
        j->failure = (dray_error){0};
        j->end = end;
        j->safe = last;
        j->safe_record = record;
        report(j);
    }
    wake_others(j);
}

/* Cuts the file after the last safe record, so that later records are written again. */
static void start_over(dray__journal *j)
{
    if (ftruncate(j->fd, (off_t)j->end) < 0)
        dray__log(DRAY_LOG_WARN, "queue: journal %s: ftruncate: %s", j->path, strerror(errno));
    j->size = j->written = j->end;
    prepend(&j->waiting, &j->unsafe);
    j->taken = j->safe;
    j->written_record = j->safe_record;
    if (j->failure.code == DRAY_EFULL && !j->aside_runs)
        journal_drop_spare(j);
    j->broken = false;
    j->retry_at = dray__deadline(RETRY_AFTER);
    wake_others(j);
}

/* Polls for more records for a short time. A client that was answered often sends its next request
 * at once, and waking a thread takes as long as half a sync. */
static bool spin(dray__journal *j)
{
    uint64_t before = j->added;
    if (j->spinning || j->stop || j->waiting.first || before == j->spun)
        return false;
    j->spinning = true;
    j->spun = before; /* once after each record */
    pthread_mutex_unlock(&j->lock);
    int64_t until = dray__now() + SPIN;
    while (__atomic_load_n(&j->added, __ATOMIC_ACQUIRE) == before && dray__now() < until)
        sched_yield();
    pthread_mutex_lock(&j->lock);
    j->spinning = false;
    return true;
}

static void wait_for_work(dray__journal *j)
{
    if (!j->alone && !j->broken && spin(j))
        return;
    if (!j->waiting.first || j->writing || j->alone || j->broken) {
        pthread_cond_wait(&j->work, &j->lock);
        return;
    }
    dray__cond_wait(&j->work, &j->lock, j->retry_at);
}

static void *run(void *user)
{
    dray__journal *j = user;
    pthread_mutex_lock(&j->lock);
    for (;;) {
        bool failed = j->failure.code && !j->broken;
        if (j->broken && !j->writing && !j->syncing)
            start_over(j);
        else if (!j->syncing && !j->alone && !j->broken && j->safe < j->taken)
            sync_written(j);
        else if (!j->writing && !j->alone && !j->broken && j->waiting.first &&
                 (j->stop ? !failed : dray__now() >= j->retry_at))
            write_waiting(j);
        else if (j->stop && (!j->waiting.first || failed) && !j->writing && !j->syncing)
            break;
        else
            wait_for_work(j);
    }
    pthread_cond_broadcast(&j->work);
    pthread_mutex_unlock(&j->lock);
    return NULL;
}

/* ---- starting and stopping ------------------------------------------------------------------- */

static int open_file(dray__journal *j, uint64_t end, dray_error *error)
{
    const dray__journal_options *o = &j->options;
    int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | (end ? 0 : O_CREAT | O_EXCL);
    j->fd = open(o->path, flags, 0600);
    if (j->fd < 0 && errno == EEXIST)
        return dray__fail(error, DRAY_EEXIST, "journal %s is there already", j->path);
    if (j->fd < 0)
        return dray__fail_errno(error, errno, "journal %s", j->path);
    if (flock(j->fd, LOCK_EX | LOCK_NB) < 0)
        return dray__fail(error, DRAY_EBUSY, "journal %s: another process has it open", j->path);
    if (ftruncate(j->fd, (off_t)end) < 0)
        return dray__fail_errno(error, errno, "journal %s: ftruncate", j->path);
    if (end)
        return dray__head_read(j->fd, j->path, &j->salt, error);
    int rc = dray__head_write(o->files, j->fd, j->path, &j->salt, error);
    if (!rc && o->sync && o->files->sync(j->fd) < 0)
        rc = dray__file_failed(j->path, errno, "fdatasync", error);
    if (!rc && dray__journal_sync_folder(o->path) < 0)
        rc = dray__fail_errno(error, errno, "folder of journal %s", j->path);
    j->size = j->written = j->end = DRAY__FILE_HEAD;
    return rc;
}

static int start_hands(dray__journal *j, dray_error *error)
{
    int rc = DRAY_OK;
    for (size_t i = 0; i < DRAY__JOURNAL_HANDS && !rc; i++)
        rc = dray__thread_start(&j->hands[i], run, j, j->path, error);
    return j->hands[0].begun ? DRAY_OK : rc; /* one is enough */
}

static void journal_free(dray__journal *j)
{
    if (j->fd >= 0)
        close(j->fd);
    if (j->wake >= 0)
        close(j->wake);
    dray__output_free(&j->out);
    pthread_mutex_destroy(&j->lock);
    pthread_cond_destroy(&j->work);
    pthread_cond_destroy(&j->idle);
    free(j->path);
    free(j);
}

static void init_locks(dray__journal *j)
{
    pthread_mutex_init(&j->lock, NULL);
    dray__cond_init(&j->work);
    pthread_cond_init(&j->idle, NULL);
    entries_clear(&j->waiting);
    entries_clear(&j->unsafe);
    entries_clear(&j->done);
    entries_clear(&j->jobs);
}

int dray__journal_start(const dray__journal_options *options, uint64_t end, uint64_t last,
                        dray__journal **out, dray_error *error)
{
    dray__journal *j = calloc(1, sizeof *j);
    if (!j)
        return dray__nomem(error);
    *j = (dray__journal){.options = *options,
                         .fd = -1,
                         .size = end,
                         .written = end,
                         .end = end,
                         .added = last,
                         .taken = last,
                         .most_taken = last,
                         .written_record = last,
                         .safe_record = last,
                         .safe = last};
    init_locks(j);
    if (!j->options.files)
        j->options.files = &dray__journal_real_files;
    j->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    j->path = strdup(options->path);
    int rc = j->path && j->wake >= 0 ? DRAY_OK : dray__nomem(error);
    if (!rc)
        rc = dray__output_init(&j->out, j->options.files, error);
    if (!rc)
        rc = open_file(j, end, error);
    if (!rc)
        rc = start_hands(j, error);
    if (rc)
        journal_free(j);
    else
        *out = j;
    return rc;
}

void dray__journal_add(dray__journal *journal, dray__journal_entry *entry)
{
    entry->next = NULL;
    pthread_mutex_lock(&journal->lock);
    entry->seq = journal->added + 1;
    __atomic_store_n(&journal->added, entry->seq, __ATOMIC_RELEASE);
    dray__entries_add(&journal->waiting, entry);
    if (!journal->spinning)
        pthread_cond_signal(&journal->work);
    pthread_mutex_unlock(&journal->lock);
}

int dray__journal_fd(const dray__journal *journal)
{
    return journal->wake;
}

uint64_t dray__journal_added(const dray__journal *journal)
{
    return journal->added; /* no lock is needed: only the thread that adds records calls
                            * this */
}

dray__journal_entry *dray__journal_done(dray__journal *journal, uint64_t *safe, int *code,
                                        dray_error *error)
{
    uint64_t count;
    ssize_t n = read(journal->wake, &count, sizeof count);
    (void)n; /* it fails when nothing is new */
    pthread_mutex_lock(&journal->lock);
    dray__journal_entry *done = journal->done.first;
    entries_clear(&journal->done);
    *safe = journal->safe;
    *code = journal->failure.code;
    *error = journal->failure;
    pthread_mutex_unlock(&journal->lock);
    return done;
}

dray__journal_entry *dray__journal_stop(dray__journal *journal)
{
    if (!journal)
        return NULL;
    dray__aside_end(journal);
    pthread_mutex_lock(&journal->lock);
    journal->stop = true;
    pthread_cond_broadcast(&journal->work);
    pthread_mutex_unlock(&journal->lock);
    for (size_t i = 0; i < DRAY__JOURNAL_HANDS; i++)
        dray__thread_join(&journal->hands[i]);
    dray__entries *left[] = {&journal->unsafe, &journal->waiting, &journal->jobs};
    for (size_t i = 0; i < sizeof left / sizeof *left; i++)
        if (left[i]->first)
            dray__entries_add(&journal->done, left[i]->first);
    dray__journal_entry *given = journal->done.first;
    journal_drop_spare(journal);
    journal_free(journal);
    return given;
}
