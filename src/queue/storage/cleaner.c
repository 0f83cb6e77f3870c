#include "queue/storage/cleaner.h"

#include "base/arena.h"
#include "base/array.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"

#include <stdlib.h>
#include <string.h>

#define TRY (DRAY__SECOND)         /* for the store to answer, and between tries */
#define GOODBYE (3 * DRAY__SECOND) /* for the last sweep */
#define AT_ONCE 4096u

typedef struct sweep {
    struct sweep *next;
    uint32_t owner, keep_count;
    uint64_t *keep;
} sweep;

struct dray__cleaner {
    dray__backend *backend;
    dray__worker worker;
    dray__object *objects;
    uint32_t count;
    uint64_t capacity;
    sweep *sweeps, **last;
};

static void sweep_free(sweep *s)
{
    if (s)
        free(s->keep);
    free(s);
}

/* Drops some objects, from the end of the list. The lock is held, except while the store is called.
 */
static int drop_some(dray__cleaner *self, dray_error *error)
{
    uint32_t count = self->count < AT_ONCE ? self->count : AT_ONCE;
    dray__object *some = malloc(count * sizeof *some);
    if (!some)
        return dray__nomem(error);
    self->count -= count;
    memcpy(some, self->objects + self->count, count * sizeof *some);
    pthread_mutex_unlock(&self->worker.lock);
    int rc = self->backend->kind->drop(self->backend, some, count, dray__deadline(TRY), error);
    pthread_mutex_lock(&self->worker.lock);
    for (uint32_t i = 0; rc && i < count && self->count < self->capacity; i++)
        self->objects[self->count++] = some[i]; /* objects without a place here are dropped by the
                                                 * last sweep */
    free(some);
    return rc;
}

static int sweep_one(dray__cleaner *self, dray_error *error)
{
    sweep *s = self->sweeps;
    pthread_mutex_unlock(&self->worker.lock);
    int rc = self->backend->kind->sweep(self->backend, s->owner, s->keep, s->keep_count,
                                        dray__deadline(10 * TRY), error);
    pthread_mutex_lock(&self->worker.lock);
    if (rc)
        return rc;
    self->sweeps = s->next;
    if (!self->sweeps)
        self->last = &self->sweeps;
    sweep_free(s);
    return DRAY_OK;
}

static void *work(void *cleaner)
{
    dray__cleaner *self = cleaner;
    dray_error error;
    pthread_mutex_lock(&self->worker.lock);
    while (!self->worker.ending) {
        int rc = DRAY_OK;
        if (self->count)
            rc = drop_some(self, &error);
        else if (self->sweeps)
            rc = sweep_one(self, &error);
        else
            pthread_cond_wait(&self->worker.wake, &self->worker.lock);
        if (rc && !self->worker.ending) {
            dray__log(DRAY_LOG_WARN, "queue: objects wait to be dropped: %s", error.message);
            dray__worker_pause(&self->worker, TRY);
        }
    }
    pthread_mutex_unlock(&self->worker.lock);
    if (self->backend->kind->sweep(self->backend, 0, NULL, 0, dray__deadline(GOODBYE), &error))
        dray__log(DRAY_LOG_WARN, "queue: its objects stay in %s: %s", self->backend->kind->name,
                  error.message);
    return NULL;
}

int dray__cleaner_new(const dray__backend_kind *kind, const char *address, uint64_t space,
                      dray__cleaner **out, dray_error *error)
{
    dray__cleaner *self = calloc(1, sizeof *self);
    if (!self)
        return dray__nomem(error);
    self->last = &self->sweeps;
    dray__worker_init(&self->worker);
    int rc = kind->open(address, space, &self->backend, error);
    if (!rc)
        rc = dray__thread_start(&self->worker.thread, work, self, "the queue's cleaner", error);
    if (rc) {
        if (self->backend)
            kind->close(self->backend);
        dray__worker_end(&self->worker);
        free(self);
        return rc;
    }
    *out = self;
    return DRAY_OK;
}

void dray__cleaner_free(dray__cleaner *self)
{
    if (!self)
        return;
    dray__worker_end(&self->worker);
    self->backend->kind->close(self->backend);
    while (self->sweeps) {
        sweep *s = self->sweeps;
        self->sweeps = s->next;
        sweep_free(s);
    }
    free(self->objects);
    free(self);
}

void dray__cleaner_drop(void *cleaner, uint32_t keeper, uint64_t object, uint64_t size)
{
    (void)keeper;
    dray__cleaner *self = cleaner;
    pthread_mutex_lock(&self->worker.lock);
    if (dray__append(&self->objects, sizeof *self->objects, self->count, &self->capacity))
        self->objects[self->count++] =
            (dray__object){object, size}; /* else the last sweep drops it */
    pthread_cond_signal(&self->worker.wake);
    pthread_mutex_unlock(&self->worker.lock);
}

void dray__cleaner_sweep(dray__cleaner *self, uint32_t owner, uint64_t *keep, uint32_t keep_count)
{
    sweep *s = calloc(1, sizeof *s);
    if (!s) { /* the last sweep drops them */
        free(keep);
        return;
    }
    if (keep_count)
        qsort(keep, keep_count, sizeof *keep, dray__by_u64);
    *s = (sweep){.owner = owner, .keep = keep, .keep_count = keep_count};
    pthread_mutex_lock(&self->worker.lock);
    *self->last = s;
    self->last = &s->next;
    pthread_cond_signal(&self->worker.wake);
    pthread_mutex_unlock(&self->worker.lock);
}
