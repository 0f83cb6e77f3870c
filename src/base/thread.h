/* Threads of the library's own. They take no signals, which are for the program's threads (SIGXFSZ,
 * too: a limit is an error like any other). */
#pragma once

#include <dray/dray.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct dray__thread { /* zero: there is none */
    pthread_t id;
    bool begun;
    pid_t process; /* which began it: a fork's child has no such thread */
} dray__thread;

/* what: the purpose of the thread, for an error's message. */
int dray__thread_start(dray__thread *thread, void *(*run)(void *), void *user, const char *what,
                       dray_error *error);
/* Waits for the thread's end, if there is one: afterwards there is none. */
void dray__thread_join(dray__thread *thread);

/* Makes a condition that uses the clock of clock.h's deadlines. */
void dray__cond_init(pthread_cond_t *cond);
/* Until it is signalled, or the deadline has passed; it may also return before. */
void dray__cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t deadline_ns);

/* A thread that works until it is told to end, with the lock of its shared fields. */
typedef struct dray__worker {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    dray__thread thread;
    bool ending; /* the thread must come to its end; with the lock */
} dray__worker;

void dray__worker_init(dray__worker *worker);
/* In the thread, with the lock: until so much time has passed, or the thread must end. */
void dray__worker_pause(dray__worker *worker, int64_t ns);
/* Tells the thread to end, and does not wait. */
void dray__worker_stop(dray__worker *worker);
/* Tells the thread to end, and waits for that, if it was started. */
void dray__worker_end(dray__worker *worker);
