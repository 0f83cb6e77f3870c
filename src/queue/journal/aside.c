/* Jobs on a journal's file that run while it is written: rewriting it, copying it to another file,
 * reading it again. They run in a thread that exists while there are jobs. A job covers the records
 * that were in the file when the job was added, and starts once these are safe. So no other thread
 * writes to that range meanwhile. */
#include "queue/journal/journal_inside.h"

#include "base/array.h"
#include "base/error.h"
#include "base/hook.h"
#include "base/log.h"
#include "queue/journal/records.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    CATCH_UP_BYTES = 1 << 20, /* at most so many are copied while no other thread may write */
    CATCH_UPS = 16,           /* or so many attempts were made */
    SPARE_BYTES = 256 << 20   /* bytes of the replaced file that are kept, at most */
};

typedef struct job {
    dray__journal *journal;
    dray__journal_entry *entry;
    int from; /* the file, and the salt of its sums */
    uint64_t salt, end;
    char *path;    /* of the other one */
    uint64_t kept; /* the ends in it of the kept records, and of the entry */
    int to;
    dray__output out;
} job;

static bool abandoned(dray__journal *j, dray_error *error)
{
    pthread_mutex_lock(&j->lock);
    bool abandon = j->abandon;
    pthread_mutex_unlock(&j->lock);
    if (abandon)
        dray__fail(error, DRAY_ECANCELED, "journal %s: it is closed", j->path);
    return abandon;
}

/* ---- copying --------------------------------------------------------------------------------- */

/* Copies the records of [at, end) that are kept, or all. */
static int copy_records(job *self, uint64_t at, uint64_t end, bool all, dray_error *error)
{
    const dray__journal_entry *entry = self->entry;
    bool any = false;
    dray__record r;
    for (int n = 0; at < end; n++) {
        int rc = n % 64 == 0 && abandoned(self->journal, error) ? DRAY_ECANCELED : DRAY_OK;
        if (!rc)
            rc = dray__record_at(self->from, self->journal->path, at, end, &r, error);
        if (rc)
            return rc;
        bool kept =
            all || bsearch(&r.owner, entry->keep, entry->keep_count, 4, dray__by_u32) != NULL;
        any |= kept;
        /* The first record (OPEN) identifies the queue. An earlier STATE is left out: its rows may
         * not exist any more. */
        bool old = r.kind == DRAY__RECORD_STATE;
        if (kept || (!r.owner && !old && (any || at == DRAY__FILE_HEAD)))
            rc = dray__output_copy(&self->out, self->from, self->journal->path, self->salt, at, &r,
                                   error);
        if (rc)
            return rc;
        at += dray__record_bytes(&r);
    }
    return DRAY_OK;
}

static int sync_copy(job *self, dray_error *error)
{
    int rc = dray__output_flush(&self->out, error);
    if (!rc && self->journal->options.files->sync(self->to) < 0)
        rc = dray__file_failed(self->path, errno, "fdatasync", error);
    return rc;
}

/* Writes the kept records and the entry to the file that was opened for them. */
static int write_anew(job *self, dray_error *error)
{
    dray__journal *j = self->journal;
    uint64_t salt = 0;
    if (self->to < 0 || fchmod(self->to, 0600) < 0 || flock(self->to, LOCK_EX | LOCK_NB) < 0)
        return dray__fail_errno(error, errno, "journal %s", self->path);
    int rc = dray__output_init(&self->out, j->options.files, error);
    if (!rc)
        rc = dray__head_write(j->options.files, self->to, self->path, &salt, error);
    if (rc)
        return rc;
    dray__output_to(&self->out, self->to, self->path, salt, DRAY__FILE_HEAD);
    rc = copy_records(self, DRAY__FILE_HEAD, self->entry->at, false, error);
    if (!rc)
        rc = dray__output_entry(&self->out, self->entry, self->entry->seq, &j->options, error);
    self->kept = dray__output_end(&self->out);
    return rc ? rc : sync_copy(self, error);
}

static int fail_rename(const char *path, dray_error *error)
{
    return dray__fail_errno(error, errno, "journal %s: rename", path);
}

/* Copies the records to the other file. Its previous content is deleted even when the job fails. */
static int copy_to_other(job *self, dray_error *error)
{
    dray__copy *copy = self->entry->copy;
    self->path = strdup(copy->label);
    if (!self->path)
        return dray__nomem(error);
    self->to = copy->fd;
    copy->fd = -1;
    int rc = ftruncate(self->to, 0) < 0
                 ? dray__fail_errno(error, errno, "%s: ftruncate", copy->label)
                 : write_anew(self, error);
    if (copy->folder < 0)
        return rc;
    if (!rc && (renameat(copy->folder, copy->partial, copy->folder, copy->name) < 0 ||
                fsync(copy->folder) < 0))
        rc = fail_rename(copy->label, error);
    if (rc)
        unlinkat(copy->folder, copy->partial, 0);
    return rc;
}

/* ---- the file itself ------------------------------------------------------------------------- */

/* Waits until both hands are idle, and keeps them so. */
static void be_alone(dray__journal *j)
{
    pthread_mutex_lock(&j->lock);
    j->alone = true;
    while (j->writing || j->syncing || j->broken)
        pthread_cond_wait(&j->idle, &j->lock);
    pthread_mutex_unlock(&j->lock);
}

static void be_alone_no_more(dray__journal *j)
{
    pthread_mutex_lock(&j->lock);
    j->alone = false;
    pthread_cond_broadcast(&j->work);
    pthread_mutex_unlock(&j->lock);
}

/* Copies the records that were added meanwhile, until few are left. */
static int catch_up(job *self, uint64_t *at, dray_error *error)
{
    dray__journal *j = self->journal;
    int rc = DRAY_OK;
    for (int i = 0; i < CATCH_UPS && !rc; i++) {
        pthread_mutex_lock(&j->lock);
        uint64_t end = j->end;
        pthread_mutex_unlock(&j->lock);
        if (i && end - *at < CATCH_UP_BYTES)
            break;
        rc = copy_records(self, *at, end, true, error);
        if (!rc)
            rc = sync_copy(self, error);
        *at = end;
    }
    return rc;
}

/* Exchanges the names of the two files. Where the file system cannot, the new file replaces the old
 * one. */
static int exchange(job *self, dray_error *error)
{
    const char *path = self->journal->path;
    unsigned how = RENAME_EXCHANGE;
    int done = renameat2(AT_FDCWD, self->path, AT_FDCWD, path, how);
    if (done < 0 && (errno == EINVAL || errno == ENOSYS)) {
        how = 0;
        done = rename(self->path, path);
    }
    if (done < 0)
        return fail_rename(path, error);
    if (dray__journal_sync_folder(path) == 0)
        return DRAY_OK;
    int rc = fail_rename(path, error);
    if (how && renameat2(AT_FDCWD, self->path, AT_FDCWD, path, how) == 0)
        return rc;
    dray__log(DRAY_LOG_WARN, "queue: %s", error->message); /* the new file has the name */
    return DRAY_OK;
}

static uint64_t size_of(int fd)
{
    struct stat st;
    return fstat(fd, &st) < 0 ? 0 : (uint64_t)st.st_size;
}

/* Makes the other file the journal. */
static void take_over(job *self)
{
    dray__journal *j = self->journal;
    pthread_mutex_lock(&j->lock);
    self->from = j->fd;
    j->fd = self->to;
    j->salt = self->out.salt;
    j->written = j->end = dray__output_end(&self->out);
    for (dray__journal_entry *later = j->jobs.first; later; later = later->next)
        later->at = later->at - self->entry->at + self->kept;
    j->size = size_of(j->fd);
    j->safe = j->taken;
    if (j->written_record < self->entry->seq)
        j->written_record = self->entry->seq;
    j->safe_record = j->written_record;
    dray__entries_add(&j->done, j->unsafe.first);
    j->unsafe.first = NULL;
    j->unsafe.last = &j->unsafe.first;
    dray__journal_wake(j);
    pthread_mutex_unlock(&j->lock);
    self->to = -1;
    if (size_of(self->from) > SPARE_BYTES && ftruncate(self->from, SPARE_BYTES) < 0)
        dray__log(DRAY_LOG_WARN, "queue: journal %s: its spare is left long", j->path);
    close(self->from);
}

static int compact(job *self, dray_error *error)
{
    dray__journal *j = self->journal;
    uint64_t at = self->entry->at;
    if (asprintf(&self->path, "%s.new", j->path) < 0) {
        self->path = NULL;
        return dray__nomem(error);
    }
    self->to = open(self->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    int rc = write_anew(self, error);
    if (!rc)
        rc = catch_up(self, &at, error);
    be_alone(j);
    if (!rc && at < j->written) {
        rc = copy_records(self, at, j->written, true, error);
        if (!rc)
            rc = sync_copy(self, error);
    }
    uint64_t before = j->written;
    dray__hook_step("renaming");
    if (!rc)
        rc = exchange(self, error);
    dray__hook_step("renamed");
    if (!rc)
        take_over(self);
    be_alone_no_more(j);
    if (rc) { /* the journal goes on in its old file */
        dray__log(DRAY_LOG_WARN, "queue: compaction: %s", error->message);
        if (self->to >= 0)
            unlink(self->path);
    } else {
        dray__log(DRAY_LOG_INFO, "queue: journal %s: %llu bytes, were %llu", j->path,
                  (unsigned long long)dray__output_end(&self->out), (unsigned long long)before);
    }
    return rc;
}

/* ---- the thread ------------------------------------------------------------------------------ */

static int read_one(void *user, const dray__journal_record *record, dray_error *error)
{
    job *self = user;
    dray__hook_step("reading");
    if (abandoned(self->journal, error))
        return DRAY_ECANCELED;
    return self->entry->each(self->entry->user, record, error);
}

static int read_again(job *self, dray_error *error)
{
    return dray__records_read_whole(self->from, self->journal->path, self->salt, self->entry->at,
                                    read_one, self, error);
}

static void do_job(dray__journal *j, dray__journal_entry *entry)
{
    job self = {.journal = j, .entry = entry, .from = j->fd, .salt = j->salt, .to = -1};
    entry->error = (dray_error){0};
    if (entry->each)
        read_again(&self, &entry->error);
    else if (entry->copy)
        copy_to_other(&self, &entry->error);
    else
        compact(&self, &entry->error);
    dray__output_free(&self.out);
    if (self.to >= 0)
        close(self.to);
    free(self.path);
}

static void *run(void *user)
{
    dray__journal *j = user;
    pthread_mutex_lock(&j->lock);
    while (j->jobs.first && !j->abandon) {
        dray__journal_entry *entry = j->jobs.first;
        if (j->safe < entry->seq) {
            pthread_cond_wait(&j->idle, &j->lock);
            continue;
        }
        j->jobs.first = entry->next;
        if (!entry->next)
            j->jobs.last = &j->jobs.first;
        entry->next = NULL;
        pthread_mutex_unlock(&j->lock);
        do_job(j, entry); /* only this thread replaces the journal's file */
        pthread_mutex_lock(&j->lock);
        dray__entries_add(&j->done, entry);
        dray__journal_wake(j);
    }
    j->aside_runs = false;
    pthread_mutex_unlock(&j->lock);
    return NULL;
}

/* Fails all jobs, because there is no thread. */
static void refuse(dray__journal *j, const dray_error *why)
{
    for (dray__journal_entry *entry = j->jobs.first; entry; entry = entry->next)
        entry->error = *why;
    dray__entries_add(&j->done, j->jobs.first);
    j->jobs.first = NULL;
    j->jobs.last = &j->jobs.first;
    dray__journal_wake(j);
}

void dray__aside_begin(dray__journal *journal)
{
    dray_error error;
    if (journal->aside_runs || journal->abandon) {
        pthread_cond_broadcast(&journal->idle);
        return;
    }
    dray__thread_join(&journal->aside); /* it does not take the lock any more */
    journal->aside_runs =
        dray__thread_start(&journal->aside, run, journal, journal->path, &error) == DRAY_OK;
    if (!journal->aside_runs)
        refuse(journal, &error);
}

void dray__aside_end(dray__journal *journal)
{
    pthread_mutex_lock(&journal->lock);
    journal->abandon = true;
    pthread_cond_broadcast(&journal->idle);
    pthread_mutex_unlock(&journal->lock);
    dray__thread_join(&journal->aside);
}
