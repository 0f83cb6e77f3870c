#include "queue/storage/worker.h"

#include "base/clock.h"
#include "base/error.h"

#include <signal.h>
#include <time.h>

void dray__worker_init(dray__worker *worker)
{
    pthread_condattr_t clock;
    *worker = (dray__worker){0};
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&worker->lock, NULL);
    pthread_cond_init(&worker->wake, &clock);
    pthread_condattr_destroy(&clock);
}

int dray__worker_start(dray__worker *worker, void *(*work)(void *), void *user, const char *what,
                       dray_error *error)
{
    sigset_t all, before;
    sigfillset(&all); /* signals are the loop's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&worker->thread, NULL, work, user);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    worker->begun = !failed;
    return failed ? dray__fail_errno(error, failed, "a thread for %s", what) : DRAY_OK;
}

void dray__worker_pause(dray__worker *worker, int64_t ns)
{
    int64_t until = dray__deadline(ns);
    struct timespec at = {.tv_sec = until / DRAY__SECOND, .tv_nsec = until % DRAY__SECOND};
    while (!worker->ending && dray__now() < until)
        pthread_cond_timedwait(&worker->wake, &worker->lock, &at);
}

void dray__worker_end(dray__worker *worker)
{
    pthread_mutex_lock(&worker->lock);
    worker->ending = true;
    pthread_cond_signal(&worker->wake);
    pthread_mutex_unlock(&worker->lock);
    if (worker->begun)
        pthread_join(worker->thread, NULL);
    pthread_cond_destroy(&worker->wake);
    pthread_mutex_destroy(&worker->lock);
}
