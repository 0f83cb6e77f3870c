/* src/run/page/: a page that shows runs: report.html of a run's folder, and `dray report`. data.c
 * reads a run's files (metrics.jsonl, events.jsonl, config.json), timeline.c its spans, encode.c
 * writes numbers so that 10,000 steps fit, page.html shows them, and page.c puts data into it. */
#pragma once

#include <dray/dray.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

enum { DRAY__PAGE_RUNS = 16 };

/* Writes the page of these runs. With `live`, the page adds the rows that its server sends
 * (report/live.c). Returns 0, DRAY_ENOENT when a folder has no metrics.jsonl, or DRAY_EFORMAT with
 * file and place. */
int dray__page_write(const char *const *folders, uint32_t count, bool live, FILE *out,
                     dray_error *error);
/* The same into a file, which is replaced in one step. */
int dray__page_write_file(const char *const *folders, uint32_t count, const char *path,
                          dray_error *error);

/* ---- between its files ----------------------------------------------------------------------- */

/* Encodes numbers as base64 of little-endian 32-bit floats, or as one number when all are the same.
 * NaN means that a place has no value; the result is NULL when no place has one. */
json_t *dray__page_floats(const double *values, uint32_t count);
json_t *dray__page_bytes(const void *data, size_t size); /* base64 */
/* Makes one run's data. Curves have at most `points` points. */
int dray__page_run(const char *folder, uint32_t points, json_t **out, dray_error *error);
/* Makes the timeline of a run in at most `intervals` intervals, its longest waits, and the ends of
 * its steps. *out is NULL when the run has no spans. */
int dray__page_timeline(const char *folder, uint32_t intervals, json_t **out, dray_error *error);
