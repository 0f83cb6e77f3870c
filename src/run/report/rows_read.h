/* Rows of metrics.jsonl, and of other files with an object a line, one after the other. */
#pragma once

#include <dray/dray.h>
#include <jansson.h>

/* Gets each row. A result other than DRAY_OK ends the reading. */
typedef int dray__row_fn(void *user, json_t *row, const char *path, dray_error *error);

/* A file that does not exist has no rows. In a run that is not over, the last line may be
 * incomplete; it is left out. Returns 0, DRAY_EFORMAT with file and line, or the
 * error of reading. */
int dray__rows_each(const char *path, dray__row_fn *take, void *user, dray_error *error);
