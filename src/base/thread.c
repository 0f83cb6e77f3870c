#include "base/thread.h"

#include "base/clock.h"
#include "base/error.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

int dray__thread_start(dray__thread *thread, void *(*run)(void *), void *user, const char *what,
                       dray_error *error)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread->id, NULL, run, user);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    thread->begun = !failed;
    thread->process = getpid();
    return failed ? dray__fail_errno(error, failed, "a thread for %s", what) : DRAY_OK;
}

void dray__thread_join(dray__thread *thread)
{
    if (thread->begun && thread->process == getpid())
        pthread_join(thread->id, NULL);
    thread->begun = false;
}

void dray__cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &clock);
    pthread_condattr_destroy(&clock);
}

void dray__cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t deadline_ns)
{
    struct timespec at = {.tv_sec = deadline_ns / DRAY__SECOND,
                          .tv_nsec = deadline_ns % DRAY__SECOND};
    pthread_cond_timedwait(cond, lock, &at);
}

void dray__worker_init(dray__worker *worker)
{
    *worker = (dray__worker){.ending = false};
    dray__cond_init(&worker->wake);
    pthread_mutex_init(&worker->lock, NULL);
}

void dray__worker_pause(dray__worker *worker, int64_t ns)
{
    int64_t until = dray__deadline(ns);
    while (!worker->ending && dray__now() < until)
        dray__cond_wait(&worker->wake, &worker->lock, until);
}

void dray__worker_stop(dray__worker *worker)
{
    pthread_mutex_lock(&worker->lock);
    worker->ending = true;
    pthread_cond_signal(&worker->wake);
    pthread_mutex_unlock(&worker->lock);
}

void dray__worker_end(dray__worker *worker)
{
    dray__worker_stop(worker);
    dray__thread_join(&worker->thread);
    pthread_cond_destroy(&worker->wake);
    pthread_mutex_destroy(&worker->lock);
}
