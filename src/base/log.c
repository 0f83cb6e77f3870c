#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static dray_log_fn sink;
static void *sink_user;
static atomic_int sink_level = -1; /* read without the lock, so that disabled logging is cheap */

void dray_set_log(dray_log_fn fn, void *user, dray_log_level level)
{
    pthread_mutex_lock(&lock);
    sink = fn;
    sink_user = user;
    atomic_store(&sink_level, fn ? (int)level : -1);
    pthread_mutex_unlock(&lock);
}

void dray__log(dray_log_level level, const char *format, ...)
{
    if ((int)level > atomic_load(&sink_level))
        return;
    char line[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    pthread_mutex_lock(&lock);
    if (sink)
        sink(sink_user, level, line);
    pthread_mutex_unlock(&lock);
}
