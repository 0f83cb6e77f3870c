#include "queue/journal.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/io.h"
#include "base/log.h"
#include "queue/hook.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    MAGIC = 0x524A5244,
    FORMAT = 1,
    HEADER = 48,
    SUM_AT = 40,
    RETRY_MS = 200,       /* after a failure */
    WRITE_BYTES = 8 << 20 /* at once, if records are not larger */
};

struct dray__journal {
    dray__journal_options options;
    char *path;
    int fd, wake;
    uint64_t end;  /* of what is safe */
    uint64_t safe; /* up to this number */
    dray__writer buffer;
    pthread_t thread;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t work;
    uint64_t added, told; /* told: as `safe`, for others */
    dray__entry *waiting, **waiting_last, *done, **done_last;
    bool stop;
    dray_error failure; /* code 0: none */
};

void dray__entry_free(dray__entry *entry)
{
    if (!entry)
        return;
    dray__writer_free(&entry->body);
    free(entry->pieces);
    free(entry->keep);
    free(entry->path);
    free(entry);
}

/* ---- records --------------------------------------------------------------------------------- */

static uint64_t padded(uint64_t bytes)
{
    return (bytes + 7) / 8 * 8;
}

typedef struct header {
    uint16_t kind, format;
    uint32_t owner, flags;
    uint64_t size, seq, safe, sum;
} header;

enum { MISSING = 1 };

/* false: no header is here. */
static bool read_header(const uint8_t *at, uint64_t room, header *out)
{
    dray__reader r = dray__reader_of(at, HEADER);
    uint32_t magic = dray__get_u32(&r);
    out->kind = dray__get_u16(&r);
    out->format = dray__get_u16(&r);
    out->size = dray__get_u64(&r);
    out->seq = dray__get_u64(&r);
    out->safe = dray__get_u64(&r);
    out->owner = dray__get_u32(&r);
    out->flags = dray__get_u32(&r);
    out->sum = dray__get_u64(&r);
    return magic == MAGIC && out->size <= room && padded(HEADER + out->size) <= room;
}

static int write_all(int fd, const void *data, size_t size, int64_t at)
{
    const uint8_t *from = data;
    while (size) {
        ssize_t n = pwrite(fd, from, size, at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return -1;
        from += n;
        at += n;
        size -= (size_t)n;
    }
    return 0;
}

static const dray__journal_files real_files = {.write = write_all, .sync = fdatasync};

/* The record at `at`, whole and right, in *data (malloc'ed; the caller's). false: there is none. */
static bool read_record(int fd, uint64_t at, uint64_t file, header *h, uint8_t **data)
{
    uint8_t head[HEADER];
    if (file - at < HEADER || dray__read_at(fd, head, HEADER, (off_t)at) < 0 ||
        !read_header(head, file - at, h))
        return false;
    uint8_t *bytes = malloc(HEADER + h->size);
    if (!bytes || dray__read_at(fd, bytes, HEADER + h->size, (off_t)at) < 0) {
        free(bytes);
        return false;
    }
    memset(bytes + SUM_AT, 0, 8);
    if (dray__hash(bytes, HEADER + h->size) != h->sum) {
        free(bytes);
        return false;
    }
    *data = bytes;
    return true;
}

/* Whether a later record says that number `seq`, which is broken, had been safe. */
static bool was_safe(int fd, uint64_t at, uint64_t file, uint64_t seq)
{
    uint8_t block[1 << 16];
    for (uint64_t from = padded(at + 1); file - from >= HEADER && from < file;) {
        size_t size = file - from < sizeof block ? (size_t)(file - from) : sizeof block;
        if (dray__read_at(fd, block, size, (off_t)from) < 0)
            return false;
        for (size_t i = 0; i + HEADER <= size; i += 8) {
            header h;
            uint8_t *data = NULL;
            if (!read_header(block + i, file - from - i, &h) || h.safe < seq ||
                !read_record(fd, from + i, file, &h, &data))
                continue;
            free(data);
            return true;
        }
        from += size > HEADER ? (size - HEADER) / 8 * 8 + 8 : size;
    }
    return false;
}

static int scan(int fd, const char *path, dray__journal_each each, void *user, uint64_t *end,
                uint64_t *last, dray_error *error)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return dray__fail_errno(error, errno, "journal %s", path);
    uint64_t at = 0, file = (uint64_t)st.st_size;
    int rc = DRAY_OK;
    *last = 0;
    while (!rc) {
        header h;
        uint8_t *data = NULL;
        if (!read_record(fd, at, file, &h, &data))
            break;
        if (h.format != FORMAT)
            rc = dray__fail(error, DRAY_EVERSION, "journal %s: format %u expected, found %u", path,
                            FORMAT, h.format);
        else if (h.seq <= *last)
            rc = dray__fail(error, DRAY_EFORMAT, "journal %s: record %llu after %llu", path,
                            (unsigned long long)h.seq, (unsigned long long)*last);
        dray__journal_record record = {.kind = h.kind,
                                       .owner = h.owner,
                                       .seq = h.seq,
                                       .bytes = padded(HEADER + h.size),
                                       .body = data + HEADER,
                                       .size = h.size,
                                       .missing = h.flags & MISSING};
        if (!rc)
            rc = each(user, &record, error);
        free(data);
        if (!rc) {
            *last = h.seq;
            at += record.bytes;
        }
    }
    *end = at;
    if (!rc && at < file && was_safe(fd, at, file, *last + 1))
        rc = dray__fail(error, DRAY_ECHECKSUM,
                        "journal %s: the record at byte %llu is broken, and it had been safe", path,
                        (unsigned long long)at);
    return rc;
}

int dray__journal_read(const char *path, dray__journal_each each, void *user, uint64_t *end,
                       uint64_t *last, dray_error *error)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return dray__fail_errno(error, errno, "journal %s", path);
    int rc = scan(fd, path, each, user, end, last, error);
    close(fd);
    return rc;
}

/* ---- writing --------------------------------------------------------------------------------- */

static int fail_file(const char *path, int errnum, const char *what, dray_error *error)
{
    bool full = errnum == ENOSPC || errnum == EDQUOT || errnum == EFBIG;
    if (full)
        return dray__fail(error, DRAY_EFULL, "journal %s: %s: %s", path, what, strerror(errnum));
    return dray__fail_errno(error, errnum, "journal %s: %s", path, what);
}

/* The record's bytes, as they go to the file, at the end of the buffer. */
static int put_record(dray__journal *j, dray__entry *entry, dray_error *error)
{
    dray__writer *w = &j->buffer;
    size_t begin = w->size;
    uint64_t bytes = entry->body.size;
    for (uint32_t i = 0; i < entry->piece_count; i++)
        bytes += entry->pieces[i].bytes;
    dray__put_u32(w, MAGIC);
    dray__put_u16(w, entry->kind);
    dray__put_u16(w, FORMAT);
    dray__put_u64(w, bytes);
    dray__put_u64(w, entry->seq);
    dray__put_u64(w, j->safe);
    dray__put_u32(w, entry->owner);
    size_t flags_at = w->size;
    dray__put_u32(w, 0);
    dray__put_u64(w, 0);
    dray__put_bytes(w, entry->body.data, entry->body.size);
    entry->missing = false;
    for (uint32_t i = 0; i < entry->piece_count; i++) {
        void *at = dray__put_space(w, entry->pieces[i].bytes);
        int rc = at ? j->options.fetch(j->options.user, &entry->pieces[i], at, error) : DRAY_OK;
        if (rc && rc != DRAY_EGONE)
            return rc;
        if (rc) {
            memset(at, 0, entry->pieces[i].bytes);
            *error = (dray_error){0};
        }
        entry->missing |= rc != DRAY_OK;
    }
    dray__put_u32_at(w, flags_at, entry->missing ? MISSING : 0);
    static const uint8_t zeros[8];
    dray__put_bytes(w, zeros, padded(HEADER + bytes) - (HEADER + bytes));
    if (w->failed)
        return dray__nomem(error);
    uint64_t sum = dray__hash(w->data + begin, HEADER + bytes);
    for (int i = 0; i < 8; i++)
        w->data[begin + SUM_AT + (size_t)i] = (uint8_t)(sum >> 8 * i);
    return DRAY_OK;
}

static int flush_buffer(dray__journal *j, int fd, const char *path, uint64_t *at, dray_error *error)
{
    if (j->buffer.size &&
        j->options.files->write(fd, j->buffer.data, j->buffer.size, (int64_t)*at) < 0)
        return fail_file(path, errno, "write", error);
    *at += j->buffer.size;
    dray__writer_reset(&j->buffer);
    return DRAY_OK;
}

/* ---- compaction ------------------------------------------------------------------------------ */

static int compare(const void *a, const void *b)
{
    uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
    return left < right ? -1 : left > right;
}

/* Copies the kept records of [0, end) of the journal to `to`. */
static int copy_kept(dray__journal *j, const dray__entry *entry, uint64_t end, int to,
                     const char *path, uint64_t *at, dray_error *error)
{
    bool any = false;
    for (uint64_t from = 0; from < end;) {
        header h;
        uint8_t head[HEADER];
        if (dray__read_at(j->fd, head, HEADER, (off_t)from) < 0 ||
            !read_header(head, end - from, &h))
            return dray__fail(error, DRAY_EFORMAT, "journal %s: no record at byte %llu", j->path,
                              (unsigned long long)from);
        uint64_t bytes = padded(HEADER + h.size);
        bool kept = bsearch(&h.owner, entry->keep, entry->keep_count, 4, compare) != NULL;
        any |= kept;
        if (kept || (!h.owner && (any || !from))) { /* the first says what the journal is of */
            void *room = dray__put_space(&j->buffer, bytes);
            if (!room)
                return dray__nomem(error);
            if (dray__read_at(j->fd, room, bytes, (off_t)from) < 0)
                return dray__fail_errno(error, errno, "journal %s", j->path);
            if (j->buffer.size >= WRITE_BYTES) {
                int rc = flush_buffer(j, to, path, at, error);
                if (rc)
                    return rc;
            }
        }
        from += bytes;
    }
    return DRAY_OK;
}

static int sync_folder(const char *path)
{
    char *copy = strdup(path);
    int fd = copy ? open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    free(copy);
    int rc = fd < 0 ? -1 : fsync(fd);
    if (fd >= 0)
        close(fd);
    return rc;
}

/* The new file under a temporary name, whole, synced, then under its own. */
static int write_anew(dray__journal *j, dray__entry *entry, const char *path, uint64_t end,
                      int *out, uint64_t *size, dray_error *error)
{
    char *fresh = NULL;
    if (asprintf(&fresh, "%s.new", path) < 0)
        return dray__nomem(error);
    int fd = open(fresh, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600), rc = DRAY_OK;
    *size = 0;
    if (fd < 0 || fchmod(fd, 0600) < 0 || flock(fd, LOCK_EX | LOCK_NB) < 0)
        rc = dray__fail_errno(error, errno, "journal %s", fresh);
    dray__writer_reset(&j->buffer);
    if (!rc)
        rc = copy_kept(j, entry, end, fd, fresh, size, error);
    if (!rc)
        rc = put_record(j, entry, error);
    if (!rc)
        rc = flush_buffer(j, fd, fresh, size, error);
    dray__writer_reset(&j->buffer);
    if (!rc && (j->options.files->sync(fd) < 0 || fsync(fd) < 0))
        rc = fail_file(fresh, errno, "sync", error);
    dray__queue_step("renaming");
    if (!rc && (rename(fresh, path) < 0 || sync_folder(path) < 0))
        rc = dray__fail_errno(error, errno, "journal %s: rename", path);
    dray__queue_step("renamed");
    if (rc && fd >= 0) {
        close(fd);
        unlink(fresh);
    }
    free(fresh);
    *out = rc ? -1 : fd;
    return rc;
}

/* A journal that cannot be made smaller is still a journal: the entry is then an ordinary one. */
static int compact(dray__journal *j, dray__entry *entry, uint64_t *at, dray_error *error)
{
    int fd, rc = flush_buffer(j, j->fd, j->path, at, error);
    uint64_t size;
    if (rc)
        return rc;
    if (entry->path) {
        if (!write_anew(j, entry, entry->path, *at, &fd, &size, &entry->error))
            close(fd);
        return DRAY_OK;
    }
    if (write_anew(j, entry, j->path, *at, &fd, &size, &entry->error)) {
        dray__log(DRAY_LOG_WARN, "queue: compaction: %s", entry->error.message);
        return put_record(j, entry, error);
    }
    dray__log(DRAY_LOG_INFO, "queue: journal %s: %llu bytes, were %llu", j->path,
              (unsigned long long)size, (unsigned long long)*at);
    close(j->fd);
    j->fd = fd;
    *at = j->end = size;
    return DRAY_OK;
}

/* Writes the group's first entries and syncs: one compaction, or what comes before the next. *rest:
 * what is left. */
static int write_some(dray__journal *j, dray__entry *group, dray__entry **rest, dray_error *error)
{
    uint64_t at = j->end, last = j->safe;
    int rc = DRAY_OK;
    dray__entry *entry = group;
    dray__writer_reset(&j->buffer);
    for (bool more = true; entry && more && !rc; entry = entry->next) {
        rc = entry->compact ? compact(j, entry, &at, error) : put_record(j, entry, error);
        last = entry->seq;
        more = !entry->compact && entry->next && !entry->next->compact;
        if (!rc && j->buffer.size >= WRITE_BYTES)
            rc = flush_buffer(j, j->fd, j->path, &at, error);
    }
    dray__queue_step("writing");
    if (!rc)
        rc = flush_buffer(j, j->fd, j->path, &at, error);
    dray__queue_step("written");
    if (!rc && j->options.sync && j->options.files->sync(j->fd) < 0)
        rc = fail_file(j->path, errno, "fdatasync", error);
    if (j->buffer.capacity > 8 * (size_t)WRITE_BYTES)
        dray__writer_free(&j->buffer);
    if (rc) { /* nothing of it counts; it is written again, from the same place */
        if (ftruncate(j->fd, (off_t)j->end) < 0)
            dray__log(DRAY_LOG_WARN, "queue: journal %s: ftruncate: %s", j->path, strerror(errno));
        return rc;
    }
    dray__queue_step("synced");
    j->end = at;
    j->safe = last;
    *rest = entry;
    return DRAY_OK;
}

static void wait_for_work(dray__journal *j, bool failed)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += RETRY_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    if (failed && !j->stop)
        pthread_cond_timedwait(&j->work, &j->lock, &until);
    while (!failed && !j->stop && !j->waiting)
        pthread_cond_wait(&j->work, &j->lock);
}

/* Hands over what is safe, or says that nothing more is for now. */
static void report(dray__journal *j, dray__entry *first, const dray__entry *rest,
                   const dray_error *error)
{
    pthread_mutex_lock(&j->lock);
    j->failure = *error;
    j->told = j->safe;
    while (first != rest) {
        dray__entry *next = first->next;
        first->next = NULL;
        *j->done_last = first;
        j->done_last = &first->next;
        first = next;
    }
    pthread_mutex_unlock(&j->lock);
    uint64_t one = 1;
    ssize_t n = write(j->wake, &one, sizeof one);
    (void)n; /* the counter is full: then it is readable */
}

static void *run(void *user)
{
    dray__journal *j = user;
    dray__entry *group = NULL; /* what could not be written so far */
    bool failed = false, over = false;
    while (!over) {
        pthread_mutex_lock(&j->lock);
        wait_for_work(j, failed);
        over = j->stop;
        dray__entry **last = &group;
        while (*last)
            last = &(*last)->next;
        *last = j->waiting;
        j->waiting = NULL;
        j->waiting_last = &j->waiting;
        pthread_mutex_unlock(&j->lock);
        failed = false;
        while (group && !failed) {
            dray_error error = {0};
            dray__entry *first = group;
            failed = write_some(j, first, &group, &error) != DRAY_OK;
            if (failed && !j->failure.code)
                dray__log(DRAY_LOG_WARN, "queue: %s", error.message);
            report(j, first, group, &error);
        }
    }
    j->waiting = group; /* it never became safe */
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
    if (!end && sync_folder(o->path) < 0)
        return dray__fail_errno(error, errno, "folder of journal %s", j->path);
    return DRAY_OK;
}

static int start_thread(dray__journal *j)
{
    sigset_t set, before;
    sigfillset(&set); /* SIGXFSZ, too: a limit is an error like any other */
    pthread_sigmask(SIG_SETMASK, &set, &before);
    int code = pthread_create(&j->thread, NULL, run, j);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return code;
}

static void journal_free(dray__journal *j)
{
    if (j->fd >= 0)
        close(j->fd);
    if (j->wake >= 0)
        close(j->wake);
    dray__writer_free(&j->buffer);
    pthread_mutex_destroy(&j->lock);
    pthread_cond_destroy(&j->work);
    free(j->path);
    free(j);
}

int dray__journal_start(const dray__journal_options *options, uint64_t end, uint64_t last,
                        dray__journal **out, dray_error *error)
{
    dray__journal *j = calloc(1, sizeof *j);
    if (!j)
        return dray__nomem(error);
    *j = (dray__journal){
        .options = *options, .fd = -1, .end = end, .safe = last, .added = last, .told = last};
    pthread_mutex_init(&j->lock, NULL);
    pthread_cond_init(&j->work, NULL);
    j->waiting_last = &j->waiting;
    j->done_last = &j->done;
    if (!j->options.files)
        j->options.files = &real_files;
    j->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    j->path = strdup(options->path);
    int rc = j->path && j->wake >= 0 ? DRAY_OK : dray__nomem(error);
    if (!rc)
        rc = open_file(j, end, error);
    int code = rc ? 0 : start_thread(j);
    if (code)
        rc = dray__fail_errno(error, code, "journal: thread");
    if (rc) {
        journal_free(j);
        return rc;
    }
    *out = j;
    return DRAY_OK;
}

void dray__journal_add(dray__journal *journal, dray__entry *entry)
{
    entry->next = NULL;
    pthread_mutex_lock(&journal->lock);
    entry->seq = ++journal->added;
    *journal->waiting_last = entry;
    journal->waiting_last = &entry->next;
    pthread_cond_signal(&journal->work);
    pthread_mutex_unlock(&journal->lock);
}

int dray__journal_fd(const dray__journal *journal)
{
    return journal->wake;
}

uint64_t dray__journal_added(const dray__journal *journal)
{
    return journal->added; /* who adds asks: no lock is needed */
}

dray__entry *dray__journal_done(dray__journal *journal, uint64_t *safe, int *code,
                                dray_error *error)
{
    uint64_t count;
    ssize_t n = read(journal->wake, &count, sizeof count);
    (void)n; /* nothing new: then there is nothing to take */
    pthread_mutex_lock(&journal->lock);
    dray__entry *done = journal->done;
    journal->done = NULL;
    journal->done_last = &journal->done;
    *safe = journal->told;
    *code = journal->failure.code;
    *error = journal->failure;
    pthread_mutex_unlock(&journal->lock);
    return done;
}

dray__entry *dray__journal_stop(dray__journal *journal)
{
    if (!journal)
        return NULL;
    pthread_mutex_lock(&journal->lock);
    journal->stop = true;
    pthread_cond_signal(&journal->work);
    pthread_mutex_unlock(&journal->lock);
    pthread_join(journal->thread, NULL);
    *journal->done_last = journal->waiting;
    dray__entry *left = journal->done;
    journal_free(journal);
    return left;
}
