#include "run/report/rows_read.h"

#include "base/error.h"
#include "base/io.h"
#include "base/json.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

int dray__rows_each(const char *path, dray__row_fn *take, void *user, dray_error *error)
{
    FILE *file = dray__open_stream(path, "r");
    if (!file)
        return errno == ENOENT ? DRAY_OK : dray__fail_errno(error, errno, "%s", path);
    char *line = NULL, place[4096 + 32];
    size_t room = 0;
    ssize_t length = 0;
    int rc = DRAY_OK;
    for (int number = 1;
         !rc && (length = getline(&line, &room, file)) > 0 && line[length - 1] == '\n'; number++) {
        json_t *row = NULL;
        snprintf(place, sizeof(place), "%s: line %d", path, number);
        rc = dray__json_parse(line, (size_t)length, place, &row, error);
        if (!rc && !json_is_object(row))
            rc = dray__fail(error, DRAY_EFORMAT, "%s: expected an object", place);
        if (!rc)
            rc = take(user, row, place, error);
        json_decref(row);
    }
    if (!rc && length < 0 && !feof(file))
        rc = dray__fail_errno(error, errno, "%s", path);
    free(line);
    fclose(file);
    return rc;
}
