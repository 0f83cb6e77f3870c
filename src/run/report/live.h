/* The page of a run while it goes on. The supervisor serves it at a loopback address. GET / answers
 * the page (run/page/); GET /events answers the rows of metrics.jsonl as they are written, as
 * server-sent events (HTML Standard, 9.2). The server is read-only. */
#pragma once

#include <dray/dray.h>
#include <jansson.h>

typedef struct dray__live dray__live;

/* folder is the run's, and is copied. *url is the address of the live page. */
int dray__live_start(const char *folder, dray__live **out, const char **url, dray_error *error);
/* Call it when a row has been written to metrics.jsonl. It may be called from any thread. */
void dray__live_row(dray__live *live, const json_t *row); /* live NULL is fine */
/* Tells the readers that no more rows come, and ends the server. */
void dray__live_stop(dray__live *live); /* NULL is fine */
