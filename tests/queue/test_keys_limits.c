/* Tests that the memory and the work that one client can demand of the coordinator by rows with
 * keys are bounded. */
#include "queue/fixture.h"

#include <jansson.h>
#include <stdint.h>

static queue_fixture f;

static dray_queue *open_queue(dray_context *context)
{
    static const char *const needs[] = {"x"};
    static const dray_queue_task tasks[] = {{.name = "train", .needs = needs, .needs_count = 1}};
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = tasks;
    options.task_count = 1;
    options.capacity_rows = UINT64_C(1) << 30;
    dray_queue *queue;
    OK(dray_queue_open(context, "samples", &options, &queue, &error));
    return queue;
}

static dray_queue *up(const char *limits, dray_context **context)
{
    f = (queue_fixture){.limits = limits};
    fixture_up(&f);
    *context = fixture_context(&f, "limits");
    return open_queue(*context);
}

static void down(dray_queue *queue, dray_context *context)
{
    leave(queue, context);
    fixture_down(&f);
}

/* New rows without keys, with tags alone (NULL: none). */
static int put_rows(dray_queue *queue, const char *partition, uint32_t rows, const dray_blob *tags,
                    dray_row *out)
{
    dray_put_options put = DRAY_PUT_OPTIONS_INIT;
    put.partition = partition;
    put.rows = rows;
    put.tags = tags;
    return dray_queue_put(queue, &put, out, &error);
}

static int get_rows(dray_queue *queue, const char *partition, const dray_row *at, uint32_t rows,
                    dray_batch **batch)
{
    dray_get_options get = DRAY_GET_OPTIONS_INIT;
    get.partition = partition;
    get.at = at;
    get.rows = rows;
    return dray_queue_get(queue, &get, batch, &error);
}

static void expect(int code, int rc, const char *words)
{
    FAILS(code, rc);
    if (!strstr(error.message, words))
        fail_msg("'%s' expected, found: %s", words, error.message);
}

/* What the coordinator had in memory at most. */
static uint64_t most_memory(void)
{
    char path[64], line[256];
    unsigned long kib = 0;
    snprintf(path, sizeof path, "/proc/%d/status", (int)f.coordinator_pid);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    while (!kib && fgets(line, sizeof line, file))
        if (strncmp(line, "VmHWM:", 6) == 0)
            kib = strtoul(line + 6, NULL, 10);
    fclose(file);
    return (uint64_t)kib << 10;
}

/* A row with a large tag, named thousands of times: gigabytes for a message of some hundred KiB. */
TEST(test_an_answer_is_bounded)
{
    enum { NAMED = 1 << 15 };
    dray_context *context;
    dray_batch *batch;
    dray_queue *queue = up(NULL, &context);
    dray_row *rows = calloc(NAMED, sizeof *rows);
    const dray_blob tag = {calloc(DRAY_ROW_TAG_MAX, 1), DRAY_ROW_TAG_MAX};
    OK(put_rows(queue, "p", 1, &tag, rows));
    for (uint32_t i = 1; i < NAMED; i++)
        rows[i] = rows[0];
    uint64_t before = most_memory();
    expect(DRAY_EFULL, get_rows(queue, "p", rows, NAMED, &batch), "more than one answer can");
    assert_true(most_memory() - before < UINT64_C(256) << 20);
    OK(get_rows(queue, "p", rows, 500, &batch));
    assert_int_equal(dray_batch_row_tag(batch, 499).size, DRAY_ROW_TAG_MAX);
    dray_batch_free(batch);
    free((void *)(uintptr_t)tag.data);
    free(rows);
    down(queue, context);
}

TEST(test_a_get_names_so_many_rows)
{
    dray_context *context;
    dray_batch *batch;
    dray_queue *queue = up(NULL, &context);
    dray_row *rows = calloc(DRAY_GET_ROWS_MAX + 1, sizeof *rows);
    OK(put_rows(queue, "p", 1, NULL, rows));
    for (uint32_t i = 1; i <= DRAY_GET_ROWS_MAX; i++)
        rows[i] = rows[0];
    expect(DRAY_EINVALID, get_rows(queue, "p", rows, DRAY_GET_ROWS_MAX + 1, &batch),
           "at most 1048576 named rows expected, found 1048577");
    OK(get_rows(queue, "p", rows, DRAY_GET_ROWS_MAX, &batch));
    assert_int_equal(dray_batch_rows(batch), DRAY_GET_ROWS_MAX);
    dray_batch_free(batch);
    free(rows);
    down(queue, context);
}

/* Arrays stay as large as they were: rows that are cleared again do not hide them. */
TEST(test_room_of_rows_that_are_gone)
{
    enum { ROWS = DRAY_PUT_ROWS_MAX, PARTITIONS = 24 };
    dray_context *context;
    dray_queue *queue = up("table-bytes=64MiB", &context);
    dray_row *rows = calloc(ROWS, sizeof *rows);
    uint64_t before = most_memory();
    char name[16];
    int rc = DRAY_OK, count = 0;
    for (; !rc && count < PARTITIONS; count++) {
        snprintf(name, sizeof name, "p%d", count);
        rc = put_rows(queue, name, ROWS, NULL, rows);
        if (!rc)
            OK(dray_queue_clear_rows(queue, name, NULL, rows + 1, ROWS - 1, &error));
    }
    expect(DRAY_EFULL, rc, "bytes for rows of the token master");
    assert_true(count > 2);
    assert_true(most_memory() - before < UINT64_C(200) << 20);
    OK(dray_queue_clear(queue, "p0", &error));
    OK(put_rows(queue, name, 1, NULL, rows));
    free(rows);
    down(queue, context);
}

/* So are batches that nobody lets go of. */
TEST(test_batches_that_are_held)
{
    enum { MOST = 8192 };
    dray_context *context;
    dray_row row;
    dray_queue *queue = up("table-bytes=1MiB", &context);
    OK(put_rows(queue, "p", 1, NULL, &row));
    dray_batch **batches = calloc(MOST, sizeof(dray_batch *));
    int rc = DRAY_OK, count = 0;
    while (!rc && count < MOST)
        if (!(rc = get_rows(queue, "p", &row, 1, &batches[count])))
            count++;
    expect(DRAY_EFULL, rc, "bytes for rows of the token master");
    assert_true(count > 1000);
    for (int i = 0; i < count; i++)
        dray_batch_free(batches[i]);
    char *text;
    OK(dray_context_status(context, &text, &error));
    json_t *status = json_loads(text, 0, NULL);
    const json_t *quota = json_array_get(json_object_get(status, "quotas"), 0);
    assert_true(json_integer_value(json_object_get(quota, "table_bytes")) < 100000);
    json_decref(status);
    free(text);
    OK(get_rows(queue, "p", &row, 1, &batches[0]));
    dray_batch_free(batches[0]);
    free(batches);
    down(queue, context);
}

/* The numbers of these requests are the last ones. */
TEST(test_refusals_are_counted)
{
    dray_context *context;
    dray_batch *batch;
    char *text;
    dray_queue *queue = up(NULL, &context);
    dray_get_options get = DRAY_GET_OPTIONS_INIT;
    get.partition = "nowhere";
    get.task = "reader";
    FAILS(DRAY_EAGAIN, dray_queue_get(queue, &get, &batch, &error));
    OK(dray_context_status(context, &text, &error));
    json_t *status = json_loads(text, 0, NULL);
    const json_t *refused = json_array_get(json_object_get(status, "queue_refusals"), 0);
    assert_string_equal(json_string_value(json_object_get(refused, "request")), "QUEUE_TAKE");
    assert_string_equal(json_string_value(json_object_get(refused, "error")), "EAGAIN");
    assert_int_equal(json_integer_value(json_object_get(refused, "count")), 1);
    json_decref(status);
    free(text);
    down(queue, context);
}

/* ---- a name while rows are inserted under it ------------------------------------------------- */

enum { MANY = 1 << 21 };

static void insert_many(void *told)
{
    dray_context *context = fixture_context(&f, "many");
    dray_queue *queue = open_queue(context);
    uint8_t *values = calloc(MANY, 1);
    const dray_column_data column = {.name = "x", .dtype = DRAY_U8, .values = values};
    dray_insert_options insert = DRAY_INSERT_OPTIONS_INIT;
    insert.partition = "p";
    insert.rows = MANY;
    insert.columns = &column;
    insert.column_count = 1;
    int rc = dray_queue_insert(queue, &insert, NULL, &error);
    if (write(*(const int *)told, &rc, sizeof rc) != sizeof rc)
        abort();
    free(values);
    leave(queue, context);
}

/* Or it has happened, on a busy machine. */
static bool is_inserting(dray_queue *queue)
{
    char *text;
    OK(dray_queue_status(queue, &text, &error));
    bool found = strstr(text, "\"inserts\":1,") || strstr(text, "\"name\":\"p\"");
    free(text);
    return found;
}

/* Many rows are inserted in steps, between which rows with keys are put under the same name: it
 * becomes one of the two, and the other is refused. */
TEST(test_a_name_is_of_one_kind)
{
    dray_context *context;
    dray_row row;
    dray_batch *batch;
    int told[2], inserted = DRAY_OK;
    dray_queue *queue = up(NULL, &context);
    assert_int_equal(pipe(told), 0);
    pid_t pid = child(insert_many, &told[1]);
    while (!is_inserting(queue))
        ;
    int put = put_rows(queue, "p", 1, NULL, &row);
    assert_int_equal(read(told[0], &inserted, sizeof inserted), sizeof inserted);
    join(pid);
    close(told[0]);
    close(told[1]);
    assert_true((put == DRAY_OK && inserted == DRAY_EINVALID) ||
                (put == DRAY_EINVALID && inserted == DRAY_OK));
    int got = get_rows(queue, "p", put ? NULL : &row, !put, &batch);
    assert_int_equal(got, put);
    if (!got)
        dray_batch_free(batch);
    OK(dray_queue_clear(queue, "p", &error));
    OK(put_rows(queue, "p", 1, NULL, &row));
    down(queue, context);
}

SUITE(NULL, NULL)
