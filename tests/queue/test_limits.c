/* Tests the limits of what all sessions of one token together may take of a coordinator. */
#include "queue/fixture.h"

#include "control/limits.h"

#include <dray/dray.h>
#include <jansson.h>

static queue_fixture f;

static void up(const char *limits)
{
    f = (queue_fixture){.limits = limits};
    fixture_up(&f);
}

static int open_named(dray_context *context, const char *name, dray_queue **out, dray_error *said)
{
    static const char *const needs[] = {"x"};
    static const dray_queue_task tasks[] = {
        {.name = "a", .needs = needs, .needs_count = 1},
        {.name = "b", .needs = needs, .needs_count = 1},
        {.name = "c", .needs = needs, .needs_count = 1},
    };
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.tasks = tasks;
    o.task_count = 3;
    o.capacity_rows = UINT64_C(1) << 40; /* the client's own */
    o.capacity_bytes = UINT64_C(1) << 50;
    return dray_queue_open(context, name, &o, out, said);
}

static int insert_within(int64_t timeout_ns, dray_queue *queue, const char *partition,
                         uint32_t rows, uint64_t bytes, dray_error *said)
{
    uint8_t *values = calloc(rows, bytes ? bytes : 1);
    dray_column_data column = {
        .name = "x", .dtype = DRAY_U8, .ndim = 1, .shape = {(int64_t)bytes}, .values = values};
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = partition;
    o.rows = rows;
    o.columns = &column;
    o.column_count = bytes != 0;
    o.timeout_ns = timeout_ns;
    int rc = dray_queue_insert(queue, &o, NULL, said);
    free(values);
    return rc;
}

static int insert(dray_queue *queue, const char *partition, uint32_t rows, uint64_t bytes,
                  dray_error *said)
{
    return insert_within(0, queue, partition, rows, bytes, said);
}

static uint64_t resident(pid_t pid)
{
    char path[64];
    unsigned long size = 0, pages = 0;
    snprintf(path, sizeof path, "/proc/%d/statm", (int)pid);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%lu %lu", &size, &pages), 2);
    fclose(file);
    return (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* A message of some dozens of bytes, and gigabytes of tables. */
TEST(test_tiny_insert)
{
    dray_queue *queue;
    up("table-bytes=64MiB");
    dray_context *context = fixture_context(&f, "tiny");
    OK(open_named(context, "samples", &queue, &error));
    uint64_t before = resident(f.coordinator_pid);
    int rc = insert(queue, "p", 1 << 24, 0, &error);
    uint64_t after = resident(f.coordinator_pid);
    if (after > before + (64 << 20))
        fprintf(stderr, "the coordinator took %llu MiB\n",
                (unsigned long long)(after - before) >> 20);
    assert_true(after <= before + (64 << 20));
    assert_int_equal(rc, DRAY_EFULL);
    assert_non_null(strstr(error.message, "bytes for rows of the token master"));
    OK(insert(queue, "p", 1 << 16, 0, &error));
    leave(queue, context);
    fixture_down(&f);
}

static json_int_t number(const json_t *json, const char *name)
{
    return json_integer_value(json_object_get(json, name));
}

TEST(test_quotas)
{
    dray_queue *first, *second, *third;
    up("queues=2,rows=100,bytes=1MiB,sessions=3");
    dray_context *context = fixture_context(&f, "quotas");
    OK(open_named(context, "first", &first, &error));
    OK(open_named(context, "second", &second, &error));
    FAILS(DRAY_EFULL, open_named(context, "third", &third, &error));
    assert_non_null(strstr(error.message, "has 2 queues, the coordinator allows 2"));
    OK(insert(first, "p", 60, 1, &error));
    FAILS(DRAY_EFULL, insert(second, "p", 60, 1, &error)); /* of both queues */
    assert_non_null(strstr(error.message, "60 rows of the token master + 60 > 100"));
    FAILS(DRAY_EFULL, insert(second, "p", 20, 100000, &error));
    assert_non_null(strstr(error.message, "bytes of shared memory of the token master"));
    char *text;
    OK(dray_context_status(context, &text, &error));
    json_t *json = json_loads(text, 0, NULL);
    const json_t *quota = json_array_get(json_object_get(json, "quotas"), 0);
    assert_string_equal(json_string_value(json_object_get(quota, "token")), "master");
    assert_int_equal(number(quota, "sessions"), 1);
    assert_int_equal(number(quota, "most_sessions"), 3);
    assert_int_equal(number(quota, "queues"), 2);
    assert_int_equal(number(quota, "rows"), 60);
    assert_int_equal(number(quota, "most_rows"), 100);
    assert_true(number(quota, "bytes") > 0 && number(quota, "bytes") <= 1 << 20);
    assert_true(number(quota, "table_bytes") > 0);
    json_decref(json);
    free(text);
    OK(dray_queue_clear(first, "p", &error));
    OK(insert(second, "p", 60, 1, &error));
    dray_context *more[2], *none;
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = f.address;
    for (int i = 0; i < 2; i++)
        more[i] = fixture_context(&f, "more");
    FAILS(DRAY_EFULL, dray_open(&options, &none, &error));
    assert_non_null(strstr(error.message, "has 3 sessions, the coordinator allows 3"));
    for (int i = 0; i < 2; i++)
        dray_close(more[i]);
    dray_queue_close(first);
    leave(second, context);
    fixture_down(&f);
}

/* ---- an insert of many rows ------------------------------------------------------------------ */

enum { MANY = 1 << 21 };

static void insert_many(void *partition)
{
    dray_queue *queue;
    dray_context *context = fixture_context(&f, "many");
    OK(open_named(context, "samples", &queue, &error));
    OK(insert_within(60 * DRAY__SECOND, queue, partition, MANY, 1, &error)); /* on a busy machine */
    leave(queue, context);
}

/* How many rows there are; *inserts: that wait, or are worked off. */
static json_int_t rows_of(dray_queue *queue, json_int_t *inserts)
{
    char *text;
    OK(dray_queue_status(queue, &text, &error));
    json_t *json = json_loads(text, 0, NULL);
    json_int_t rows = number(json, "rows");
    *inserts = number(json_object_get(json, "waiters"), "inserts");
    json_decref(json);
    free(text);
    return rows;
}

/* Asks until the insert of another process is being worked off. */
static void wait_for_work(dray_queue *queue, pid_t pid)
{
    json_int_t inserts = 0;
    while (!inserts) {
        json_int_t rows = rows_of(queue, &inserts);
        if (rows || waitpid(pid, NULL, WNOHANG) == pid)
            fail_msg("the insert was done at once: nobody else was answered meanwhile");
    }
}

/* Others are answered between its steps; all of its rows are there at once, or none is. */
TEST(test_many_rows)
{
    dray_queue *queue;
    up(NULL);
    dray_context *context = fixture_context(&f, "asking");
    OK(open_named(context, "samples", &queue, &error));
    pid_t pid = child(insert_many, "p");
    wait_for_work(queue, pid);
    kill(pid, SIGKILL); /* nothing of it is left */
    waitpid(pid, NULL, 0);
    json_int_t inserts = 1, rows = 0, answers = 0;
    while (inserts)
        rows = rows_of(queue, &inserts);
    assert_int_equal(rows, 0);
    pid = child(insert_many, "p");
    wait_for_work(queue, pid);
    FAILS(DRAY_ENOENT, dray_queue_seal(queue, "p", MANY, &error));
    FAILS(DRAY_EFULL, insert(queue, "q", 10, 1, &error)); /* its turn is later */
    for (; (rows = rows_of(queue, &inserts)) == 0; answers++)
        assert_int_equal(inserts, 1);
    printf("%lld others were answered\n", (long long)answers);
    join(pid);
    assert_int_equal(rows, MANY);
    OK(dray_queue_seal(queue, "p", MANY, &error));
    dray_batch *batch;
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = "b";
    o.count = 100;
    o.partition = "p";
    OK(dray_queue_claim(queue, &o, &batch, &error));
    assert_int_equal(dray_batch_row(batch, 99)->slot, 99);
    dray_batch_free(batch);
    OK(dray_queue_clear(queue, "p", &error));
    leave(queue, context);
    fixture_down(&f);
}

TEST(test_parse)
{
    dray__limits limits;
    OK(dray__limits_parse("rows=7,table-bytes=2GiB", &limits, &error));
    assert_int_equal(limits.rows, 7);
    assert_int_equal(limits.table_bytes, UINT64_C(2) << 30);
    assert_int_equal(limits.queues, 1024);
    static const char *const wrong[][2] = {
        {"rows", "NAME=NUMBER expected"},
        {"rows=0", "found '0'"},
        {"rows=-1", "found '-1'"},
        {"rows=1.5", "found '1.5'"},
        {"rows=99999999999TiB", "whole number"},
        {"row=1", "there is no limit 'row'"},
        {"rows=1 GiB", "found '1 GiB'"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        FAILS(DRAY_EINVALID, dray__limits_parse(wrong[i][0], &limits, &error));
        assert_non_null(strstr(error.message, wrong[i][1]));
    }
}

SUITE(NULL, NULL)
