#include "queue/storage/stores.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "base/wire.h"
#include "queue/storage/backend.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TRIES = 5, STARTS = 5 };

typedef struct space {
    struct space *next;
    const dray__backend_kind *kind; /* NULL when the store is not in the list */
    uint64_t number;
    bool done;   /* its line is removed */
    bool failed; /* the last try */
    dray_error why;
    char address[];
} space;

struct dray__stores {
    dray__stores_options options;
    char *path, *fresh;
    dray__worker worker; /* its lock protects the file and the fields below */
    bool done;
    space *spaces; /* used by the thread while it runs */
};

/* ---- lines ----------------------------------------------------------------------------------- */

/* The line of a space: the backend's name, the space in hexadecimal, +N if N coordinators have
 * failed to clean it, the store's address. */
typedef struct store_line {
    const char *kind, *address;
    size_t kind_size;
    unsigned long long number;
    unsigned failures;
} store_line;

/* Parses a line. Returns false for a line that is incomplete after a power cut; its space has no
 * objects. */
static bool parse(const char *text, store_line *out)
{
    int name = 0, end = 0, more = 0;
    *out = (store_line){.kind = text};
    if (sscanf(text, "%*s%n %16llx%n", &name, &out->number, &end) != 1 || !end)
        return false;
    if (sscanf(text + end, "+%u%n", &out->failures, &more) == 1)
        end += more;
    if (text[end] != ' ' || !text[end + 1])
        return false;
    out->kind_size = (size_t)name;
    out->address = text + end + 1;
    return true;
}

static int append(const char *path, const char *text, dray_error *error)
{
    size_t size = strlen(text);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    bool written = fd >= 0 && write(fd, text, size) == (ssize_t)size && fdatasync(fd) == 0;
    int rc = written ? DRAY_OK : dray__fail_errno(error, errno, "noting a store in %s", path);
    if (fd >= 0)
        close(fd);
    return rc;
}

int dray__stores_note(dray__stores *stores, const char *kind, const char *address, uint64_t number,
                      dray_error *error)
{
    char *text;
    if (!stores)
        return DRAY_OK;
    if (strchr(address, '\n'))
        return dray__fail(error, DRAY_EINVALID, "backend %s: an address of one line expected",
                          kind);
    if (asprintf(&text, "\n%s %016llx %s\n", kind, (unsigned long long)number, address) < 0)
        return dray__nomem(error);
    pthread_mutex_lock(&stores->worker.lock);
    int rc = append(stores->path, text, error);
    pthread_mutex_unlock(&stores->worker.lock);
    free(text);
    return rc;
}

static int replace(const dray__stores *self, const void *text, size_t size, dray_error *error)
{
    int fd = open(self->fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    bool written = fd >= 0 && write(fd, text, size) == (ssize_t)size && fdatasync(fd) == 0 &&
                   rename(self->fresh, self->path) == 0;
    int rc =
        written ? DRAY_OK : dray__fail_errno(error, errno, "noting the stores in %s", self->path);
    if (fd >= 0)
        close(fd);
    return rc;
}

static const space *find(const dray__stores *self, const store_line *l)
{
    for (const space *s = self->spaces; s; s = s->next)
        if (s->number == l->number && strcmp(s->address, l->address) == 0)
            return s;
    return NULL;
}

/* Writes the line's new content, if it stays. */
static void keep(const dray__stores *self, const char *text, dray__writer *out)
{
    char counted[64];
    store_line l;
    if (!parse(text, &l))
        return;
    const space *s = find(self, &l); /* NULL when it is in use, or new */
    if (!s || (!s->done && self->worker.ending)) {
        dray__put_bytes(out, text, strlen(text));
        dray__put_u8(out, '\n');
    } else if (!s->done && l.failures + 1 >= self->options.starts) {
        dray__log(
            DRAY_LOG_WARN,
            "queue: %u coordinators could not clean space %016llx of %s: it is forgotten, and "
            "its objects stay there: %s",
            l.failures + 1, l.number, l.address, s->why.message);
    } else if (!s->done) {
        dray__log(DRAY_LOG_WARN, "queue: the objects of an earlier coordinator stay in %s: %s",
                  l.address, s->why.message);
        snprintf(counted, sizeof counted, "%.*s %016llx+%u ", (int)l.kind_size, l.kind, l.number,
                 l.failures + 1);
        dray__put_bytes(out, counted, strlen(counted));
        dray__put_bytes(out, l.address, strlen(l.address));
        dray__put_u8(out, '\n');
    }
}

/* Writes the file. Spaces that were noted meanwhile stay in it. */
static int write_back(dray__stores *self, dray_error *error)
{
    dray__writer text = {0};
    char *row = NULL;
    size_t capacity = 0;
    FILE *file = fopen(self->path, "re");
    if (!file)
        return dray__fail_errno(error, errno, "reading the stores in %s", self->path);
    while (getline(&row, &capacity, file) > 0) {
        row[strcspn(row, "\n")] = 0;
        keep(self, row, &text);
    }
    int rc = ferror(file) ? dray__fail_errno(error, errno, "reading the stores in %s", self->path)
                          : dray__writer_check(&text, error);
    if (!rc)
        rc = replace(self, text.data, text.size, error);
    fclose(file);
    free(row);
    dray__writer_free(&text);
    return rc;
}

/* ---- cleaning -------------------------------------------------------------------------------- */

static void try_one(const dray__stores *self, space *s)
{
    dray__backend *store;
    s->failed = true;
    if (s->kind->open(s->address, s->number, &store, &s->why))
        return;
    int64_t deadline = dray__deadline(self->options.patience_ns);
    s->failed = s->kind->sweep(store, 0, NULL, 0, deadline, &s->why) != DRAY_OK;
    s->done = !s->failed;
    s->kind->close(store);
}

/* Returns true when an earlier space of the same store failed: a store that does not answer is
 * tried once a round. */
static bool failed_there(const dray__stores *self, const space *before)
{
    for (const space *s = self->spaces; s != before; s = s->next)
        if (s->failed && strcmp(s->address, before->address) == 0)
            return true;
    return false;
}

/* Tries all spaces. Returns false when all are done. The lock is held, except while a store is
 * called. */
static bool try_all(dray__stores *self)
{
    bool left = false;
    for (space *s = self->spaces; s; s = s->next)
        s->failed = false;
    for (space *s = self->spaces; s && !self->worker.ending; s = s->next) {
        if (s->done || !s->kind)
            continue;
        if (failed_there(self, s)) {
            dray__fail(&s->why, DRAY_ETIMEDOUT, "%s has not answered before", s->address);
        } else {
            pthread_mutex_unlock(&self->worker.lock);
            try_one(self, s);
            pthread_mutex_lock(&self->worker.lock);
        }
        left |= !s->done;
    }
    return left;
}

static void *work(void *user)
{
    dray__stores *self = user;
    dray_error error;
    int64_t pause = self->options.pause_ns;
    pthread_mutex_lock(&self->worker.lock);
    for (uint32_t i = 0; !self->worker.ending && try_all(self) && i + 1 < self->options.tries;
         i++) {
        dray__worker_pause(&self->worker, pause);
        pause *= 2;
    }
    if (write_back(self, &error))
        dray__log(DRAY_LOG_WARN, "queue: %s", error.message);
    self->done = true;
    pthread_mutex_unlock(&self->worker.lock);
    return NULL;
}

static int add_space(dray__stores *self, const store_line *l, bool listed, dray_error *error)
{
    size_t size = strlen(l->address) + 1;
    space *s = calloc(1, sizeof *s + size);
    if (!s)
        return dray__nomem(error);
    memcpy(s->address, l->address, size);
    s->number = l->number;
    s->kind = listed ? dray__backend_named(l->kind, l->kind_size) : NULL;
    if (!s->kind)
        dray__fail(&s->why, DRAY_EPERM,
                   listed ? "this build does not have the store's backend"
                          : "the store is not in this coordinator's list (dray serve --store)");
    s->next = self->spaces;
    self->spaces = s;
    return DRAY_OK;
}

int dray__stores_clean(dray__stores *self, bool (*used)(void *, uint64_t),
                       bool (*listed)(void *, const char *, const char *), void *user,
                       dray_error *error)
{
    char *row = NULL, kind[32];
    size_t capacity = 0;
    int rc = DRAY_OK;
    FILE *file = fopen(self->path, "re");
    store_line l;
    if (!file && errno != ENOENT)
        rc = dray__fail_errno(error, errno, "reading the stores in %s", self->path);
    while (file && !rc && getline(&row, &capacity, file) > 0) {
        row[strcspn(row, "\n")] = 0;
        if (!parse(row, &l) || used(user, l.number) || find(self, &l))
            continue;
        snprintf(kind, sizeof kind, "%.*s", (int)l.kind_size, l.kind);
        rc = add_space(self, &l, listed(user, kind, l.address), error);
    }
    if (file && !rc && ferror(file))
        rc = dray__fail_errno(error, errno, "reading the stores in %s", self->path);
    free(row);
    if (file)
        fclose(file);
    return rc || !self->spaces
               ? rc
               : dray__thread_start(&self->worker.thread, work, self, "cleaning stores", error);
}

bool dray__stores_done(dray__stores *self)
{
    pthread_mutex_lock(&self->worker.lock);
    bool done = self->done || !self->worker.thread.begun;
    pthread_mutex_unlock(&self->worker.lock);
    return done;
}

/* ---- beginning and end ----------------------------------------------------------------------- */

int dray__stores_new(const dray__stores_options *options, dray__stores **out, dray_error *error)
{
    dray__stores *self = calloc(1, sizeof *self);
    if (!self)
        return dray__nomem(error);
    self->options = *options;
    self->options.patience_ns = options->patience_ns ? options->patience_ns : 3 * DRAY__SECOND;
    self->options.pause_ns = options->pause_ns ? options->pause_ns : DRAY__SECOND;
    self->options.tries = options->tries ? options->tries : TRIES;
    self->options.starts = options->starts ? options->starts : STARTS;
    self->options.folder = NULL;
    dray__worker_init(&self->worker);
    if (asprintf(&self->path, "%s/stores", options->folder) < 0)
        self->path = NULL;
    if (asprintf(&self->fresh, "%s/stores.new", options->folder) < 0)
        self->fresh = NULL;
    if (!self->path || !self->fresh) {
        dray__stores_free(self);
        return dray__nomem(error);
    }
    *out = self;
    return DRAY_OK;
}

void dray__stores_free(dray__stores *self)
{
    if (!self)
        return;
    dray__worker_end(&self->worker);
    while (self->spaces) {
        space *s = self->spaces;
        self->spaces = s->next;
        free(s);
    }
    free(self->path);
    free(self->fresh);
    free(self);
}
