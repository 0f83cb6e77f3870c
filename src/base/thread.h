/* Threads of the library's own. They block all signals, which are for the program's threads
 * (SIGXFSZ, too, so that a file that is too large is an ordinary error). */
#pragma once

#include <dray/dray.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct dray__thread { /* zero when there is no thread */
    pthread_t id;
    bool begun;
    pid_t process; /* the process that began it; a forked child does not have the thread */
} dray__thread;

/* `what` is the purpose of the thread, for an error's message. */
int dray__thread_start(dray__thread *thread, void *(*run)(void *), void *user, const char *what,
                       dray_error *error);
/* Waits for the thread's end, if there is a thread. There is none afterwards. */
void dray__thread_join(dray__thread *thread);

/* Makes a condition that uses the clock of clock.h's deadlines. */
void dray__cond_init(pthread_cond_t *cond);
/* Waits until the condition is signalled or the deadline passes. It may also return earlier. */
void dray__cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t deadline_ns);

/* A thread that works until it is asked to end, with the lock of its shared fields. */
typedef struct dray__worker {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    dray__thread thread;
    bool ending; /* the thread must end; read and written with the lock */
} dray__worker;

void dray__worker_init(dray__worker *worker);
/* Called in the thread, with the lock. Waits for this time, or until the thread must end. */
void dray__worker_pause(dray__worker *worker, int64_t ns);
/* Asks the thread to end, without waiting. */
void dray__worker_stop(dray__worker *worker);
/* Asks the thread to end and waits for it, if it was started. */
void dray__worker_end(dray__worker *worker);
