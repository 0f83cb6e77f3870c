/* Tests the rows of metrics.jsonl, made from reports in any order in which processes send them. */
#include "run/report/rows.h"
#include "run/report/rows_read.h"
#include "suite.h"

#include "base/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OK(call) assert_int_equal((call), DRAY_OK)

static char path[] = "/tmp/dray-rows-XXXXXX";

static void take(dray__rows *rows, const char *text)
{
    const json_t *done = NULL;
    dray_error error;
    json_t *report = NULL;
    OK(dray__json_parse(text, strlen(text), "report", &report, &error));
    OK(dray__rows_take(rows, report, &done, &error));
    json_decref(report);
}

/* Accuracy of the next row that is written; -1: it has none; -2: there is no more. */
static double next(FILE *metrics)
{
    char line[4096];
    json_t *row = NULL;
    if (!fgets(line, sizeof line, metrics))
        return -2;
    OK(dray__json_parse(line, strlen(line), "row", &row, NULL));
    const json_t *accuracy = json_object_get(row, "eval_accuracy");
    double value = accuracy ? json_number_value(accuracy) : -1;
    json_decref(row);
    return value;
}

/* An evaluation is another process's than the row: it may come before, and it may come twice. */
TEST(evaluations)
{
    dray_error error;
    dray__job *job;
    dray__rows rows;
    char name[64];
    const char *const settings[] = {"steps=2", "eval.every=1", NULL};
    snprintf(name, sizeof name, "%s/job.yaml", path);
    FILE *file = fopen(name, "w");
    assert_non_null(file);
    fclose(file);
    OK(dray__job_load(name, settings, 2, &job, NULL, &error));
    dray__folder folder = {.rows = json_array()};
    snprintf(folder.path, sizeof folder.path, "%s", path);
    OK(dray__rows_open(&folder, job, &rows, &error));
    take(&rows, "{\"kind\": \"ready\", \"step\": 0, \"reward_mean\": 0.5}");
    take(&rows, "{\"kind\": \"eval\", \"step\": 0, \"version\": 0, \"accuracy\": 0.25}");
    take(&rows, "{\"kind\": \"step\", \"step\": 1, \"tokens\": 1}");
    take(&rows, "{\"kind\": \"eval\", \"step\": 0, \"version\": 1, \"accuracy\": 0.75}");
    take(&rows, "{\"kind\": \"eval\", \"step\": 2, \"version\": 2, \"accuracy\": 1}");
    take(&rows, "{\"kind\": \"step\", \"step\": 2, \"tokens\": 1}");
    take(&rows, "{\"kind\": \"eval\", \"step\": 1, \"version\": 1, \"accuracy\": 0.5}");
    OK(dray__rows_end(&rows, &error));
    dray__rows_free(&rows);
    snprintf(name, sizeof name, "%s/metrics.jsonl", path);
    file = fopen(name, "r");
    assert_non_null(file);
    assert_true(next(file) == 0.25);
    assert_true(next(file) == 0.5);
    assert_true(next(file) == 1);
    assert_true(next(file) == -2);
    fclose(file);
    json_decref(folder.rows);
    dray__job_free(job);
}

/* Rewards of any sign: the first evaluation is the first one, also where it is below 0. */
TEST(evaluations_below_zero)
{
    dray_error error;
    dray__job *job;
    dray__rows rows;
    char name[64];
    const char *const settings[] = {"steps=2", "eval.every=1", NULL};
    snprintf(name, sizeof name, "%s/job.yaml", path);
    OK(dray__job_load(name, settings, 2, &job, NULL, &error));
    dray__folder folder = {.rows = json_array()};
    snprintf(folder.path, sizeof folder.path, "%s", path);
    OK(dray__rows_open(&folder, job, &rows, &error));
    assert_int_equal(rows.first_accuracy_step, -1);
    take(&rows, "{\"kind\": \"ready\", \"step\": 0, \"reward_mean\": 0.5}");
    take(&rows, "{\"kind\": \"eval\", \"step\": 0, \"version\": 0, \"accuracy\": -1.5}");
    take(&rows, "{\"kind\": \"step\", \"step\": 1, \"tokens\": 1}");
    take(&rows, "{\"kind\": \"eval\", \"step\": 1, \"version\": 1, \"accuracy\": -0.5}");
    assert_true(rows.first_accuracy == -1.5 && rows.first_accuracy_step == 0);
    assert_true(rows.last_accuracy == -0.5 && rows.last_accuracy_step == 1);
    OK(dray__rows_end(&rows, &error));
    dray__rows_free(&rows);
    json_decref(folder.rows);
    dray__job_free(job);
}

static int count_row(void *user, json_t *row, const char *place, dray_error *error)
{
    (void)row, (void)place, (void)error;
    ++*(int *)user;
    return DRAY_OK;
}

/* A file that cannot be read is an error, and not a file without rows. */
TEST(files_that_cannot_be_read)
{
    dray_error error;
    char name[64];
    int rows = 0;
    snprintf(name, sizeof name, "%s/missing.jsonl", path);
    OK(dray__rows_each(name, count_row, &rows, &error));
    assert_int_equal(dray__rows_each(path, count_row, &rows, &error), DRAY_ESYS);
    assert_non_null(strstr(error.message, path));
    assert_int_equal(rows, 0);
}

FIXTURE(make_folder)
{
    return mkdtemp(path) ? 0 : -1;
}

FIXTURE(remove_folder)
{
    char line[64];
    snprintf(line, sizeof line, "rm -rf %s", path);
    return system(line);
}

SUITE(make_folder, remove_folder)
