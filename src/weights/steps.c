/* An engine's steps beside what moves (steps.h). */
#include "weights/steps.h"

#include <stdlib.h>
#include <string.h>

void dray__steps_init(dray__steps *s)
{
    *s = (dray__steps){0};
    pthread_mutex_init(&s->lock, NULL);
}

void dray__steps_destroy(dray__steps *s)
{
    pthread_mutex_destroy(&s->lock);
}

void dray__steps_note(dray__steps *s, int64_t took_ns, int64_t now_ns)
{
    pthread_mutex_lock(&s->lock);
    if (s->moving && now_ns - took_ns / 2 >= s->began_ns) {
        s->count++;
        s->sum_ns += took_ns;
    } else {
        s->before[s->before_count++ % DRAY__STEPS_KEPT] = took_ns;
    }
    pthread_mutex_unlock(&s->lock);
}

void dray__steps_begin(dray__steps *s, int64_t now_ns)
{
    pthread_mutex_lock(&s->lock);
    s->moving = true;
    s->began_ns = now_ns;
    s->count = 0;
    s->sum_ns = 0;
    pthread_mutex_unlock(&s->lock);
}

static int by_time(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

/* The median: first steps after a pause take longer. */
static int64_t usual(const dray__steps *s)
{
    int64_t sorted[DRAY__STEPS_KEPT];
    uint64_t count = s->before_count < DRAY__STEPS_KEPT ? s->before_count : DRAY__STEPS_KEPT;
    memcpy(sorted, s->before, sizeof sorted);
    qsort(sorted, count, sizeof *sorted, by_time);
    return count ? sorted[count / 2] : 0;
}

void dray__steps_end(dray__steps *s, dray_update_report *report)
{
    pthread_mutex_lock(&s->lock);
    s->moving = false;
    if (report) {
        report->steps = s->count;
        report->step_ns = s->count ? s->sum_ns / s->count : 0;
        report->step_before_ns = usual(s);
    }
    pthread_mutex_unlock(&s->lock);
}
