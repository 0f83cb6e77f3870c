/* Rows of metrics.jsonl, and of other files with an object a line, one after the other. */
#pragma once

#include <dray/dray.h>
#include <jansson.h>

/* Gets each row; what it returns, but DRAY_OK, ends the reading. */
typedef int dray__row_fn(void *user, json_t *row, const char *path, dray_error *error);

/* A file that is not there has no rows. The last line of a run that is not over may be half a line,
 * which is none. DRAY_EFORMAT: file and line. */
int dray__rows_each(const char *path, dray__row_fn *take, void *user, dray_error *error);
