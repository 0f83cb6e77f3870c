/* The view of a running job: a picture that is redrawn in place on a terminal, lines elsewhere,
 * objects with --json. */
#pragma once

#include "run/report/rows.h"

typedef struct dray__view {
    bool json, live;
    uint32_t lines; /* of the picture that are on the terminal */
    int64_t began_ns;
} dray__view;

void dray__view_open(dray__view *view, bool json);
/* Prints one line above the picture; with --json, {"event": event, "message": ...}. */
void dray__view_say(dray__view *view, const char *event, const char *message);
/* Prints `object` with --json; does nothing otherwise. Takes `object`. */
void dray__view_event(dray__view *view, const char *event, json_t *object);
/* Shows a row that was completed. */
void dray__view_row(dray__view *view, const dray__rows *rows, const json_t *row);
/* Redraws the picture on a terminal. status is the queue's, or NULL. */
void dray__view_draw(dray__view *view, const dray__rows *rows, const json_t *status);
/* Returns a new object with the number of committed cells of each column, over all partitions of
 * the queue. */
json_t *dray__view_depths(const json_t *status);
/* Removes the picture. */
void dray__view_clear(dray__view *view);
