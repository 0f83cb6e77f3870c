/* Reports of the roles become rows of metrics.jsonl, and the state that the live view shows. */
#pragma once

#include "run/report/spent.h"
#include "run/supervisor/folder.h"

#include <jansson.h>
#include <stdio.h>

enum { DRAY__PHASES = 16, DRAY__UPDATES_SEEN = 4096 };

typedef struct dray__phase {
    char name[24];
    double seconds; /* of the last row */
} dray__phase;

typedef struct dray__rows {
    const dray__job *job;
    const dray__folder *folder;
    FILE *metrics;
    json_t *pending; /* the trainer's rows in order; the first one waits for its evaluation, or the
                        value model's part */
    json_t *early;   /* "step" -> an evaluation that came before the step's row */
    json_t *done;    /* rows that the last report completed */
    json_t *updates; /* "version" -> the engine's update to it */
    json_t *critics; /* "step" -> the value model's part of its row, which came first */
    dray__spent *spent;
    int64_t last_step; /* of the newest row that was taken; -1 for none */
    int64_t mark_ns;   /* when the last row was taken */
    /* For the view. */
    double warmup_reward, reward, length, tokens_per_s, staleness_mean, staleness_max, step_seconds;
    double first_accuracy, last_accuracy;            /* of any sign, as rewards are */
    int64_t first_accuracy_step, last_accuracy_step; /* -1 when not measured */
    int64_t warmup_step, version, checkpoint;
    bool ready;
    dray__phase shown[DRAY__PHASES];
    uint32_t shown_count;
    double update_seconds[DRAY__UPDATES_SEEN]; /* of every update_stride-th update */
    uint64_t update_count, update_stride, update_bytes;
    uint32_t updates_seen;
} dray__rows;

int dray__rows_open(const dray__folder *folder, const dray__job *job, dray__rows *out,
                    dray_error *error);
/* Takes in one report. *done has the rows that it completed, in order, borrowed until the next
 * call. */
int dray__rows_take(dray__rows *rows, json_t *report, const json_t **done, dray_error *error);
/* Returns the step whose row has the reports of all of its trainers now that `report` was taken; -1
 * when there is none. */
int64_t dray__rows_whole(const dray__rows *rows, const json_t *report);
/* Ends the rows. Writes pending ones without their evaluation; a resumed run completes them. */
int dray__rows_end(dray__rows *rows, dray_error *error);
void dray__rows_free(dray__rows *rows);
/* In seconds; 0 when there was no update. */
double dray__rows_median_update(const dray__rows *rows);
