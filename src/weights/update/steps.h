/* How long an engine's own steps (of decoding) take, while nothing moves and beside what moves: by
 * how much an update, or a prefetch, slows it down. Noted by any thread. */
#pragma once

#include <dray/weights.h>
#include <pthread.h>
#include <stdbool.h>

enum { DRAY__STEPS_KEPT = 64 };

typedef struct dray__steps {
    pthread_mutex_t lock;
    int64_t before[DRAY__STEPS_KEPT]; /* the last ones with nothing beside them */
    uint64_t before_count;
    bool moving;
    int64_t began_ns;
    uint32_t count; /* beside what moves */
    int64_t sum_ns;
} dray__steps;

void dray__steps_init(dray__steps *steps);
void dray__steps_destroy(dray__steps *steps);
/* A step ended at now_ns. It counts for the time in which its middle lies. */
void dray__steps_note(dray__steps *steps, int64_t took_ns, int64_t now_ns);
void dray__steps_begin(dray__steps *steps, int64_t now_ns);
/* Nothing moves any more; what was seen goes into the report (NULL: nowhere). */
void dray__steps_end(dray__steps *steps, dray_update_report *report);
