/* The duration of an engine's decoding steps, without and with an update or prefetch beside them.
 * The difference shows how much an update slows the engine down. Any thread may note a step. */
#pragma once

#include <dray/weights.h>
#include <pthread.h>
#include <stdbool.h>

enum { DRAY__STEPS_KEPT = 64 };

typedef struct dray__steps {
    pthread_mutex_t lock;
    int64_t before[DRAY__STEPS_KEPT]; /* the durations of the last steps without an update */
    uint64_t before_count;
    bool moving; /* an update or prefetch is moving bytes */
    int64_t began_ns;
    uint32_t count; /* the steps since it began */
    int64_t sum_ns; /* their durations */
} dray__steps;

void dray__steps_init(dray__steps *steps);
void dray__steps_destroy(dray__steps *steps);
/* Notes a step that ended at now_ns. It counts as a step beside an update if its middle is within
 * the time of one. */
void dray__steps_note(dray__steps *steps, int64_t took_ns, int64_t now_ns);
void dray__steps_begin(dray__steps *steps, int64_t now_ns);
/* Ends the time of an update, and writes the figures into the report (NULL: none). */
void dray__steps_end(dray__steps *steps, dray_update_report *report);
