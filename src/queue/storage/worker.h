/* A thread that does work beside the controller's loop, with the lock of what both use. */
#pragma once

#include <dray/dray.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct dray__worker {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t thread;
    bool begun;
    bool ending; /* the thread must come to its end; with the lock */
} dray__worker;

void dray__worker_init(dray__worker *worker);
/* what: the thread is for, in an error's message. */
int dray__worker_start(dray__worker *worker, void *(*work)(void *), void *user, const char *what,
                       dray_error *error);
/* In the thread, with the lock: until so much time has passed, or the thread must end. */
void dray__worker_pause(dray__worker *worker, int64_t ns);
/* Waits for the thread's end, if it was started. */
void dray__worker_end(dray__worker *worker);
