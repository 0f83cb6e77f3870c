/* The page of a run while it goes on: the supervisor answers at an address of this host alone. GET
 * / is the page (run/page/), GET /events the rows of metrics.jsonl as they come, as server-sent
 * events (HTML Standard, 9.2). Nothing can be changed through it. */
#pragma once

#include <dray/dray.h>
#include <jansson.h>

typedef struct dray__live dray__live;

/* folder: the run's; copied. *url: where it listens, the live page's. */
int dray__live_start(const char *folder, dray__live **out, const char **url, dray_error *error);
/* Call it when a row is in metrics.jsonl, from any thread. */
void dray__live_row(dray__live *live, const json_t *row); /* live NULL is fine */
/* Tells the readers that nothing more comes, and ends. */
void dray__live_stop(dray__live *live); /* NULL is fine */
