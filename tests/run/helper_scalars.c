/* Claims rows of the task `reward` and grades them as the desk does (the reward is the slot's
 * number and a half), or reads rewards as it does, and prints them: scalars write|read ROWS. */
#include "base/error.h"
#include "run/data/samples.h"

#include <dray/task.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 16 };

static int grade(dray_batch *batch, dray_error *error)
{
    float rewards[ROWS];
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
        rewards[i] = (float)dray_batch_row(batch, i)->slot + 0.5f;
    dray_column_data column = dray__scalar_column("reward", rewards);
    int rc = dray_batch_set(batch, &column, error);
    return rc ? rc : dray_batch_commit(batch, error);
}

static int show(dray_batch *batch, dray_error *error)
{
    float rewards[ROWS];
    int rc = dray__scalars_read(batch, "reward", rewards, error);
    for (uint32_t i = 0; !rc && i < dray_batch_rows(batch); i++)
        printf("%g\n", (double)rewards[i]);
    return rc ? rc : dray_batch_commit(batch, error);
}

int main(int argc, char **argv)
{
    dray_task_options options = DRAY_TASK_OPTIONS_INIT;
    options.micro_batch = argc == 3 ? (uint32_t)atoi(argv[2]) : 0;
    if (!options.micro_batch || options.micro_batch > ROWS)
        return 2;
    dray_error error;
    dray_task *task = NULL;
    dray_batch *batch;
    int rc = dray_task_open(NULL, NULL, &options, &task, &error);
    if (!rc)
        rc = dray_task_next(task, &batch, &error);
    if (!rc)
        rc = strcmp(argv[1], "write") == 0 ? grade(batch, &error) : show(batch, &error);
    if (rc)
        fprintf(stderr, "%s\n", error.message);
    dray_task_close(task);
    return rc ? 1 : 0;
}
