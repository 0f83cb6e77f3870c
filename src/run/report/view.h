/* The view of a running job: a picture that is redrawn in place on a terminal, lines elsewhere,
 * objects with --json. */
#pragma once

#include "run/report/rows.h"

typedef struct dray__view {
    bool json, live;
    uint32_t lines; /* of the picture that stand on the terminal */
    int64_t began_ns;
} dray__view;

void dray__view_open(dray__view *view, bool json);
/* One line, above the picture. With --json: {"event": event, "message": ...}. */
void dray__view_say(dray__view *view, const char *event, const char *message);
/* An object of its own with --json; nothing elsewhere. Takes `object`. */
void dray__view_event(dray__view *view, const char *event, json_t *object);
/* A row was completed. */
void dray__view_row(dray__view *view, const dray__rows *rows, const json_t *row);
/* Redraws the picture on a terminal. status: the queue's, or NULL. */
void dray__view_draw(dray__view *view, const dray__rows *rows, const json_t *status);
/* Cells of each column that are committed, over the queue's partitions; the caller's. */
json_t *dray__view_depths(const json_t *status);
/* Takes the picture away. */
void dray__view_clear(dray__view *view);
