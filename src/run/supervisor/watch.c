#include "run/supervisor/watch.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/thread.h"
#include "run/job/tasks.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { LOOK_MS = 1000 };

struct dray__watch {
    const dray__job *job;
    char *address;
    int fd;
    dray__worker worker; /* its lock protects the fields below */
    bool asked;
    dray__sight sight;
    json_t *status, *sessions, *leases; /* of the last look; NULL when there was none */
    char *counts;                       /* the queue's counts at that time; the thread's */
    dray_error failure;                 /* code 0 when there is none */
};

/* ---- the thread ------------------------------------------------------------------------------ */

static json_t *parse(char *text, const char *what)
{
    json_t *json = NULL;
    if (text)
        dray__json_parse(text, strlen(text), what, &json, NULL);
    free(text);
    return json;
}

/* Rows that are claimed and given back do not count as progress. */
static bool has_moved(dray__watch *self, const json_t *status)
{
    json_t *counts = json_pack("[O?, O?]", json_object_get(status, "totals"),
                               json_object_get(status, "columns_in")),
           *task;
    const char *name;
    json_object_foreach(json_object_get(status, "tasks_out"), name, task)
    {
        json_array_append(counts, json_object_get(task, "committed"));
    }
    char *now = counts ? json_dumps(counts, JSON_COMPACT) : NULL;
    bool moved = !now || !self->counts || strcmp(now, self->counts) != 0;
    json_decref(counts);
    free(self->counts);
    self->counts = now;
    return moved;
}

static int look(dray__watch *self, dray_context *context, dray_queue *queue, dray_error *error)
{
    char *text = NULL;
    dray__sight sight = {.open = true, .begun_ns = dray__now()};
    json_t *status = NULL;
    int rc = dray__queue_state(queue, &status, error);
    if (rc)
        return rc;
    sight.ended = dray__json_true(status, "ended");
    sight.moved_ns = has_moved(self, status) ? sight.begun_ns : self->sight.moved_ns;
    text = NULL;
    json_t *all = dray_context_status(context, &text, NULL) ? NULL : parse(text, "status");
    pthread_mutex_lock(&self->worker.lock);
    json_decref(self->status);
    json_decref(self->sessions);
    json_decref(self->leases);
    self->status = status;
    self->sessions = json_incref(json_object_get(all, "sessions"));
    self->leases = json_incref(json_object_get(all, "leases"));
    self->sight = sight;
    pthread_mutex_unlock(&self->worker.lock);
    json_decref(all);
    return DRAY_OK;
}

static void tell(const dray__watch *self)
{
    uint64_t one = 1;
    if (write(self->fd, &one, sizeof(one)) < 0)
        return; /* the descriptor is readable already */
}

/* Waits until it is time to look. Returns false when it is time to stop. */
static bool rest(dray__watch *self)
{
    int64_t deadline = dray__deadline(LOOK_MS * DRAY__MILLISECOND);
    pthread_mutex_lock(&self->worker.lock);
    while (!self->asked && !self->worker.ending && dray__now() < deadline)
        dray__cond_wait(&self->worker.wake, &self->worker.lock, deadline);
    self->asked = false;
    bool go_on = !self->worker.ending;
    pthread_mutex_unlock(&self->worker.lock);
    return go_on;
}

static int open_both(dray__watch *self, dray_context **context, dray_queue **queue,
                     dray_error *error)
{
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = self->address;
    options.name = "supervisor";
    options.timeout_ns = dray__job_wait_ns(self->job);
    int rc = dray_open(&options, context, error);
    return rc ? rc : dray__job_queue_open(*context, self->job, queue, error);
}

static void *watch(void *user)
{
    dray__watch *self = user;
    dray_context *context = NULL;
    dray_queue *queue = NULL;
    dray_error error = {0};
    int64_t deadline = dray__deadline(dray__job_wait_ns(self->job));
    bool seen = false, late = false;
    int rc = open_both(self, &context, &queue, &error);
    if (!rc) {
        do {
            rc = look(self, context, queue, &error);
            seen = seen || !rc;
            late = !seen && dray__now() > deadline;
            tell(self);
        } while (!late && rest(self));
        /* Later the supervisor itself notices a coordinator that is gone. */
        rc = late ? rc : DRAY_OK;
    }
    if (rc) {
        pthread_mutex_lock(&self->worker.lock);
        self->failure = error;
        self->failure.code = rc;
        pthread_mutex_unlock(&self->worker.lock);
        tell(self);
    }
    dray_queue_close(queue);
    dray_close(context);
    return NULL;
}

/* ---- from the supervisor's thread ------------------------------------------------------------ */

int dray__watch_start(const dray__job *job, const char *address, dray__watch **out,
                      dray_error *error)
{
    dray__watch *self = calloc(1, sizeof(*self));
    if (!self)
        return dray__nomem(error);
    dray__worker_init(&self->worker);
    self->job = job;
    self->address = strdup(address);
    self->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = self->fd < 0 || !self->address
                 ? dray__nomem(error)
                 : dray__thread_start(&self->worker.thread, watch, self, "the supervisor", error);
    if (rc)
        dray__watch_free(self);
    else
        *out = self;
    return rc;
}

void dray__watch_free(dray__watch *self)
{
    if (!self)
        return;
    dray__worker_end(&self->worker);
    if (self->fd >= 0)
        close(self->fd);
    json_decref(self->status);
    json_decref(self->sessions);
    json_decref(self->leases);
    free(self->counts);
    free(self->address);
    free(self);
}

int dray__watch_fd(const dray__watch *self)
{
    return self->fd;
}

void dray__watch_look(dray__watch *self)
{
    pthread_mutex_lock(&self->worker.lock);
    self->asked = true;
    pthread_cond_signal(&self->worker.wake);
    pthread_mutex_unlock(&self->worker.lock);
}

int dray__watch_last(dray__watch *self, dray__sight *out, dray_error *error)
{
    pthread_mutex_lock(&self->worker.lock);
    *out = self->sight;
    int rc = self->failure.code;
    if (rc && error)
        *error = self->failure;
    pthread_mutex_unlock(&self->worker.lock);
    return rc;
}

static bool is_of(const json_t *sessions, json_int_t member, long group)
{
    size_t i;
    const json_t *session;
    json_array_foreach(sessions, i, session)
    {
        if (dray__json_integer(session, "member") ==
            member) /* other hosts have such numbers, too */
            return dray__json_true(session, "local") &&
                   getpgid((pid_t)dray__json_integer(session, "pid")) == group;
    }
    return false;
}

/* Writes the devices that the group's leases keep from others. */
static void describe_leases(const dray__watch *self, long group, char *out, size_t capacity)
{
    size_t i;
    const json_t *lease;
    json_array_foreach(self->leases, i, lease)
    {
        json_int_t member = dray__json_integer(lease, "member");
        const char *holder = dray__json_string(lease, "holder");
        size_t used = strlen(out);
        if (!holder || (group && !is_of(self->sessions, member, group)))
            continue;
        snprintf(out + used, capacity - used, "%sthe lease %s%s%s", used ? ", " : "",
                 dray__json_string(lease, "name"), group ? "" : " by ", group ? "" : holder);
    }
}

/* group is that of the processes that count; 0 when all count, and then the text names them. */
static void describe(dray__watch *self, long group, char *out, size_t capacity)
{
    size_t i;
    const json_t *holder;
    out[0] = 0;
    pthread_mutex_lock(&self->worker.lock);
    json_array_foreach(json_object_get(self->status, "holders"), i, holder)
    {
        json_int_t member = dray__json_integer(holder, "member");
        const char *name = dray__json_string(holder, "name");
        size_t used = strlen(out);
        if (group && !is_of(self->sessions, member, group))
            continue;
        snprintf(out + used, capacity - used, "%s%lld rows of %s%s%s", used ? ", " : "",
                 dray__json_integer(holder, "rows"), dray__json_string(holder, "task"),
                 group ? "" : " by ", group || !name ? "" : name);
    }
    describe_leases(self, group, out, capacity);
    pthread_mutex_unlock(&self->worker.lock);
    if (!out[0])
        snprintf(out, capacity, "no rows");
}

uint64_t dray__watch_claims(dray__watch *self, long group)
{
    size_t i;
    const json_t *holder;
    uint64_t found = 0;
    pthread_mutex_lock(&self->worker.lock);
    json_array_foreach(json_object_get(self->status, "holders"), i, holder)
    {
        uint64_t claim = (uint64_t)dray__json_integer(holder, "claim");
        if (is_of(self->sessions, dray__json_integer(holder, "member"), group))
            found += dray__hash(&claim, sizeof(claim)) | 1;
    }
    pthread_mutex_unlock(&self->worker.lock);
    return found;
}

void dray__watch_holds(dray__watch *self, long group, char *out, size_t capacity)
{
    describe(self, group, out, capacity);
}

void dray__watch_all_held(dray__watch *self, char *out, size_t capacity)
{
    describe(self, 0, out, capacity);
}
