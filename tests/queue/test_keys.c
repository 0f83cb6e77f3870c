/* Tests rows with keys: put, got, consumed and cleared through the public functions. Random
 * histories are compared with a plain model. A reader's bytes stay, two writers may use one key,
 * and limits hold. */
#include "queue/one_fixture.h"

#include <stdint.h>

enum { MANY = 12 };

static const char *const names[MANY] = {"k0", "k1", "k2", "k3", "k4",  "k5",
                                        "k6", "k7", "k8", "k9", "k10", "k11"};

static dray_queue *open_queue(dray_context *context, const char *name, uint64_t capacity_rows)
{
    static const char *const needs[] = {"x"};
    static const dray_queue_task tasks[] = {{.name = "train", .needs = needs, .needs_count = 1}};
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = tasks;
    options.task_count = 1;
    options.capacity_rows = capacity_rows;
    options.capacity_bytes = 64 << 20;
    dray_queue *queue;
    OK(dray_queue_open(context, name, &options, &queue, &error));
    return queue;
}

static dray_put_options put_of(const char *partition, uint32_t rows)
{
    dray_put_options o = DRAY_PUT_OPTIONS_INIT;
    o.partition = partition;
    o.rows = rows;
    return o;
}

static dray_get_options get_of(const char *partition)
{
    dray_get_options o = DRAY_GET_OPTIONS_INIT;
    o.partition = partition;
    return o;
}

static dray_column_data numbers(const char *name, const int64_t *values)
{
    return (dray_column_data){.name = name, .dtype = DRAY_I64, .values = values};
}

static dray_column_data text(const char *name, const char *value, const uint64_t *offsets)
{
    return (dray_column_data){.name = name,
                              .dtype = DRAY_U8,
                              .content = DRAY_CONTENT_OBJECT,
                              .ndim = 1,
                              .offsets = offsets,
                              .values = value};
}

static int64_t number_in(dray_batch *batch, const char *column, uint32_t row)
{
    dray_column_part part;
    int64_t value;
    OK(dray_batch_cell(batch, column, row, &part, &error));
    assert_int_equal(part.dtype, DRAY_I64);
    assert_int_equal(part.bytes, 8);
    memcpy(&value, part.values, 8);
    return value;
}

static bool tag_is(const dray_batch *batch, uint32_t row, const char *expected)
{
    dray_blob tag = dray_batch_row_tag(batch, row);
    return tag.data && tag.size == strlen(expected) && memcmp(tag.data, expected, tag.size) == 0;
}

/* ---- one at a time --------------------------------------------------------------------------- */

TEST(test_rows_are_put_and_got)
{
    dray_context *context = fixture_context(&f, "keys");
    dray_queue *queue = open_queue(context, "put", 0);
    const int64_t x[] = {1, 2, 3};
    const uint64_t offsets[] = {0, 2, 2, 5};
    const dray_column_data columns[] = {numbers("x", x), text("o", "abcde", offsets)};
    const dray_blob tags[] = {{"one", 3}, {NULL, 0}, {"", 0}};
    dray_row rows[3];
    dray_put_options put = put_of("p", 3);
    put.keys = names;
    put.columns = columns;
    put.column_count = 2;
    put.tags = tags;
    OK(dray_queue_put(queue, &put, rows, &error));
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(rows[i].attempt, 1);
        assert_int_equal(rows[i].id, (uint64_t)rows[i].generation << 32 | rows[i].slot);
    }

    static const char *const asked[] = {"k2", "k0"};
    dray_get_options get = get_of("p");
    get.rows = 2;
    get.keys = asked;
    get.all_columns = 1;
    dray_batch *batch;
    OK(dray_queue_get(queue, &get, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), 2);
    assert_string_equal(dray_batch_key(batch, 0), "k2");
    assert_string_equal(dray_batch_key(batch, 1), "k0");
    assert_null(dray_batch_key(batch, 2));
    assert_string_equal(dray_batch_column_name(batch, 0), "x");
    assert_string_equal(dray_batch_column_name(batch, 1), "o");
    assert_null(dray_batch_column_name(batch, 2));
    assert_int_equal(number_in(batch, "x", 0), 3);
    assert_int_equal(number_in(batch, "x", 1), 1);
    assert_true(tag_is(batch, 0, "") && tag_is(batch, 1, "one"));
    dray_column column;
    OK(dray_batch_column(batch, "o", &column, &error));
    assert_int_equal(column.content, DRAY_CONTENT_OBJECT);
    assert_int_equal(column.lengths[0], 3);
    assert_memory_equal(column.cells[0], "cde", 3);
    assert_memory_equal(column.cells[1], "ab", 2);
    FAILS(DRAY_ENOENT, dray_batch_column(batch, "z", &column, &error));
    FAILS(DRAY_EPERM, dray_batch_commit(batch, &error));
    void *exported;
    size_t size;
    FAILS(DRAY_EUNSUPPORTED, dray_batch_export(batch, &exported, &size, &error));
    dray_batch_free(batch);

    /* By addresses; and names alone. */
    get = get_of("p");
    get.rows = 1;
    get.at = &rows[1];
    static const char *const only_x[] = {"x"};
    get.columns = only_x;
    get.column_count = 1;
    OK(dray_queue_get(queue, &get, &batch, &error));
    assert_string_equal(dray_batch_key(batch, 0), "k1");
    assert_int_equal(number_in(batch, "x", 0), 2);
    assert_null(dray_batch_row_tag(batch, 0).data);
    dray_batch_free(batch);
    get = get_of("p");
    OK(dray_queue_get(queue, &get, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), 3);
    dray_batch_free(batch);

    /* What is not there. */
    get.rows = 1;
    get.keys = &names[5];
    FAILS(DRAY_EAGAIN, dray_queue_get(queue, &get, &batch, &error));
    get.timeout_ns = 1;
    FAILS(DRAY_ETIMEDOUT, dray_queue_get(queue, &get, &batch, &error));
    get = get_of("nowhere");
    FAILS(DRAY_EAGAIN, dray_queue_get(queue, &get, &batch, &error));
    rows[0].generation++;
    get = get_of("p");
    get.rows = 1;
    get.at = rows;
    FAILS(DRAY_ESTALE, dray_queue_get(queue, &get, &batch, &error));
    put = put_of("p", 1);
    put.at = rows;
    FAILS(DRAY_ESTALE, dray_queue_put(queue, &put, NULL, &error));
    leave(queue, context);
}

static void expect(int code, int rc, const char *words)
{
    FAILS(code, rc);
    if (!strstr(error.message, words))
        fail_msg("'%s' expected, found: %s", words, error.message);
}

/* Rows may lack columns: then no more is read than what is there, and nobody takes it for all. */
TEST(test_partial_reads)
{
    dray_context *context = fixture_context(&f, "keys");
    dray_queue *queue = open_queue(context, "partial", 0);
    const int64_t x[] = {1, 2, 3, 4};
    const uint64_t offsets[] = {0, 2, 2};
    const dray_column_data columns[] = {numbers("x", x), text("o", "ab", offsets)};
    dray_put_options put = put_of("p", 2);
    put.keys = names;
    put.columns = columns;
    put.column_count = 2;
    OK(dray_queue_put(queue, &put, NULL, &error));
    put.keys = names + 2; /* k2 and k3 have tags alone, */
    put.column_count = 0;
    OK(dray_queue_put(queue, &put, NULL, &error));
    put.keys = names + 3; /* k3 and k4 numbers */
    put.column_count = 1;
    OK(dray_queue_put(queue, &put, NULL, &error));
    dray_get_options get = get_of("p");
    get.all_columns = 1;
    get.partial = 1;
    dray_batch *batch;
    OK(dray_queue_get(queue, &get, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), 5);
    int64_t out[5], starts[6];
    size_t bytes;
    dray_column column;
    dray_column_part part;
    expect(DRAY_ENOENT, dray_batch_gather(batch, "x", out, sizeof out, &bytes, &error),
           "batch of p: column x: a value in each row expected, row 2, key k2, has none");
    expect(DRAY_ENOENT, dray_batch_gather_rows(batch, "x", 2, 2, out, sizeof out, &bytes, &error),
           "row 2, key k2");
    expect(DRAY_ENOENT, dray_batch_read(batch, "o", 1, 4, &part, starts, out, 0, &error),
           "column o: a value in each row expected, row 2, key k2");
    OK(dray_batch_gather_rows(batch, "x", 3, 2, out, sizeof out, &bytes, &error));
    assert_int_equal(bytes, 16);
    assert_true(out[0] == 1 && out[1] == 2);
    OK(dray_batch_read(batch, "o", 0, 2, &part, starts, out, sizeof out,
                       &error)); /* one is empty */
    assert_int_equal(part.bytes, 2);
    assert_true(starts[0] == 0 && starts[1] == 2 && starts[2] == 2);
    OK(dray_batch_column(batch, "x", &column, &error)); /* says where there is nothing */
    assert_non_null(column.cells[1]);
    assert_null(column.cells[2]);
    assert_int_equal(column.lengths[2], 0);
    FAILS(DRAY_ENOENT, dray_batch_cell(batch, "x", 2, &part, &error));
    dray_batch_free(batch);
    get.column_count = 1; /* of a list that is none */
    OK(dray_queue_get(queue, &get, &batch, &error));
    assert_string_equal(dray_batch_column_name(batch, 1), "o");
    dray_batch_free(batch);
    leave(queue, context);
}

/* Rows of a column that are not alike are read one by one. */
TEST(test_a_column_of_several_shapes)
{
    dray_context *context = fixture_context(&f, "keys");
    dray_queue *queue = open_queue(context, "shapes", 0);
    const float floats[] = {1, 2, 3, 4, 5, 6};
    const int64_t number = 7;
    const dray_column_data columns[] = {
        {.name = "x", .dtype = DRAY_F32, .ndim = 2, .shape = {2, 3}, .values = floats},
        numbers("x", &number)};
    for (uint32_t i = 0; i < 2; i++) {
        dray_put_options put = put_of("p", 1);
        put.keys = &names[i];
        put.columns = &columns[i];
        put.column_count = 1;
        OK(dray_queue_put(queue, &put, NULL, &error));
    }
    dray_get_options get = get_of("p");
    get.all_columns = 1;
    dray_batch *batch;
    OK(dray_queue_get(queue, &get, &batch, &error));
    dray_column column;
    dray_column_part part;
    FAILS(DRAY_EDTYPE, dray_batch_column(batch, "x", &column, &error));
    OK(dray_batch_cell(batch, "x", 0, &part, &error));
    assert_int_equal(part.ndim, 2);
    assert_int_equal(part.shape[0], 2);
    assert_int_equal(part.shape[1], 3);
    assert_memory_equal(part.values, floats, sizeof floats);
    assert_int_equal(number_in(batch, "x", 1), 7);
    dray_batch_free(batch);
    leave(queue, context);
}

static void get_task(dray_queue *queue, uint32_t count, bool peek, uint32_t expected)
{
    static const char *const columns[] = {"x"};
    dray_get_options get = get_of("p");
    get.task = "reader";
    get.columns = columns;
    get.column_count = 1;
    get.count = count;
    get.peek = peek;
    dray_batch *batch;
    if (!expected) {
        FAILS(DRAY_EAGAIN, dray_queue_get(queue, &get, &batch, &error));
        return;
    }
    OK(dray_queue_get(queue, &get, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), expected);
    dray_batch_free(batch);
}

TEST(test_a_consumer_gets_a_row_once)
{
    dray_context *context = fixture_context(&f, "keys");
    dray_queue *queue = open_queue(context, "consume", 0);
    const int64_t x[] = {1, 2, 3, 4};
    const dray_column_data column = numbers("x", x);
    dray_row rows[4], without[1];
    dray_put_options put = put_of("p", 4);
    put.keys = names;
    put.columns = &column;
    put.column_count = 1;
    OK(dray_queue_put(queue, &put, rows, &error));
    put = put_of("p", 1); /* without a key, and not ready */
    OK(dray_queue_put(queue, &put, without, &error));
    get_task(queue, 0, true, 4);
    get_task(queue, 5, true, 0);
    get_task(queue, 3, false, 3);
    get_task(queue, 0, true, 1);
    dray_get_options get = get_of("p");
    get.rows = 2;
    get.at = &rows[2];
    get.task = "reader";
    dray_batch *batch;
    FAILS(DRAY_ESTALE, dray_queue_get(queue, &get, &batch, &error)); /* rows[2] is consumed */
    get_task(queue, 0, true, 1);                                     /* neither of the two was */
    get.task = "other";
    OK(dray_queue_get(queue, &get, &batch, &error));
    dray_batch_free(batch);
    get_task(queue, 1, false, 1);
    get_task(queue, 0, false, 0);
    OK(dray_queue_reset(queue, "p", "nobody", &error));
    OK(dray_queue_reset(queue, "nowhere", NULL, &error));
    get_task(queue, 0, true, 0);
    OK(dray_queue_reset(queue, "p", "reader", &error));
    get_task(queue, 0, true, 4);
    FAILS(DRAY_ESTALE, dray_queue_get(queue, &get, &batch, &error)); /* the other one's are not */
    OK(dray_queue_reset(queue, "p", NULL, &error));
    OK(dray_queue_get(queue, &get, &batch, &error));
    dray_batch_free(batch);
    char *status;
    OK(dray_queue_status(queue, &status, &error));
    assert_non_null(strstr(status, "\"keyed\":[{\"name\":\"p\""));
    assert_non_null(strstr(status, "\"tasks\":{\"reader\":0,\"other\":2}"));
    free(status);
    leave(queue, context);
}

/* A name is of one kind of partition; what is refused changes nothing. */
TEST(test_what_is_refused)
{
    dray_context *context = fixture_context(&f, "keys");
    dray_queue *queue = open_queue(context, "refuse", 6);
    const int64_t x[] = {1, 2, 3, 4, 5, 6, 7};
    const dray_column_data column = numbers("x", x);
    dray_insert_options insert = DRAY_INSERT_OPTIONS_INIT;
    insert.partition = "claimed";
    insert.rows = 1;
    insert.columns = &column;
    insert.column_count = 1;
    OK(dray_queue_insert(queue, &insert, NULL, &error));
    dray_put_options put = put_of("claimed", 1);
    put.keys = names;
    FAILS(DRAY_EINVALID, dray_queue_put(queue, &put, NULL, &error));
    dray_get_options get = get_of("claimed");
    dray_batch *batch;
    FAILS(DRAY_EINVALID, dray_queue_get(queue, &get, &batch, &error));
    put = put_of("p", 2);
    put.keys = names;
    put.columns = &column;
    put.column_count = 1;
    OK(dray_queue_put(queue, &put, NULL, &error));
    insert.partition = "p";
    FAILS(DRAY_EINVALID, dray_queue_insert(queue, &insert, NULL, &error));

    static const char *const twice[] = {"k0", "k7", "k7"};
    put.rows = 3;
    put.keys = twice;
    FAILS(DRAY_EINVALID, dray_queue_put(queue, &put, NULL, &error)); /* new ones */
    put.rows = 2;
    put.keys = (const char *const[]){"k0", "k0"};
    FAILS(DRAY_EINVALID, dray_queue_put(queue, &put, NULL, &error)); /* one that is there */
    put.keys = (const char *const[]){"k0", "\n"};
    FAILS(DRAY_EINVALID, dray_queue_put(queue, &put, NULL, &error));
    char *large = calloc(DRAY_ROW_TAG_MAX + 1, 1);
    dray_blob tags[2] = {{large, DRAY_ROW_TAG_MAX + 1}, {NULL, 0}};
    put.keys = names;
    put.tags = tags;
    FAILS(DRAY_EINVALID, dray_queue_put(queue, &put, NULL, &error));
    tags[0].size--;
    OK(dray_queue_put(queue, &put, NULL, &error));
    put.tags = NULL;
    put.keys = names;
    put.rows = 6; /* five rows, with the inserted one six */
    FAILS(DRAY_EFULL, dray_queue_put(queue, &put, NULL, &error));
    put.rows = 5;
    OK(dray_queue_put(queue, &put, NULL, &error));
    put.rows = DRAY_PUT_ROWS_MAX + 1;
    put.keys = NULL;
    put.column_count = 0;
    FAILS(DRAY_EINVALID, dray_queue_put(queue, &put, NULL, &error));
    put.rows = 0;
    FAILS(DRAY_EINVALID, dray_queue_put(queue, &put, NULL, &error));

    get = get_of("p");
    get.all_columns = 1;
    OK(dray_queue_get(queue, &get, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), 5);
    const uint32_t versions[] = {3, 3, 1, 1, 1};
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(dray_batch_row(batch, i)->attempt, versions[i]);
        assert_int_equal(number_in(batch, "x", i), x[i]);
        assert_int_equal(dray_batch_row_tag(batch, i).size, i ? 0 : DRAY_ROW_TAG_MAX);
    }
    dray_batch_free(batch);
    free(large);

    OK(dray_queue_clear(queue, "p", &error)); /* rows are free for others */
    OK(dray_queue_clear(queue, "p", &error));
    insert.rows = 5;
    OK(dray_queue_insert(queue, &insert, NULL, &error));
    OK(dray_queue_end(queue, &error));
    put = put_of("new", 1);
    FAILS(DRAY_EEND, dray_queue_put(queue, &put, NULL, &error));
    get = get_of("new");
    get.timeout_ns = DRAY_WAIT_DEFAULT;
    FAILS(DRAY_EEND, dray_queue_get(queue, &get, &batch, &error));
    leave(queue, context);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Rows that are put again and again, and cleared, hold no more than what is there: the queue's
 * capacity is two values. What a reader has is neither written over nor freed. */
TEST(test_what_is_replaced_is_freed)
{
    dray_context *context = fixture_context(&f, "keys");
    enum { SIZE = 24 << 20, ROUNDS = 8 };
    dray_queue *queue = open_queue(context, "memory", 0);
    uint8_t *bytes = malloc(SIZE);
    dray_column_data column = {
        .name = "b", .dtype = DRAY_U8, .ndim = 1, .shape = {SIZE}, .values = bytes};
    dray_put_options put = put_of("p", 1);
    put.keys = names;
    put.columns = &column;
    put.column_count = 1;
    dray_get_options get = get_of("p");
    get.all_columns = 1;
    dray_batch *first = NULL;
    for (int i = 0; i < ROUNDS; i++) {
        memset(bytes, i, SIZE);
        if (i == 2) { /* two are there, and the first one's reader lets go */
            put.timeout_ns = 0;
            FAILS(DRAY_EFULL, dray_queue_put(queue, &put, NULL, &error));
            dray_column_part part;
            OK(dray_batch_cell(first, "b", 0, &part, &error));
            const uint8_t *values = part.values;
            for (int at = 0; at < SIZE; at += 4096)
                assert_int_equal(values[at], 0);
            dray_batch_free(first);
            put.timeout_ns = DRAY_WAIT_DEFAULT;
        }
        if (i % 3 == 2)
            OK(dray_queue_clear_rows(queue, "p", names, NULL, 2, &error));
        OK(dray_queue_put(queue, &put, NULL, &error));
        dray_batch *batch;
        OK(dray_queue_get(queue, &get, &batch, &error));
        if (i)
            dray_batch_free(batch);
        else
            first = batch;
    }
    OK(dray_queue_clear(queue, "p", &error));
    free(bytes);
    char *status;
    OK(dray_queue_status(queue, &status, &error));
    assert_non_null(strstr(status, "\"keyed_bytes\":0"));
    assert_non_null(strstr(status, "\"rows\":0"));
    free(status);
    leave(queue, context);
}

/* ---- several at once ------------------------------------------------------------------------- */

/* Asks until so many gets wait. */
static void wait_for_gets(dray_queue *queue, int count)
{
    char expected[32], *status;
    int64_t deadline = dray__deadline(20 * DRAY__SECOND);
    snprintf(expected, sizeof expected, "\"gets\":%d}", count);
    for (bool there = false; !there; free(status)) {
        assert_true(dray__now() < deadline);
        OK(dray_queue_status(queue, &status, &error));
        there = strstr(status, expected) != NULL;
    }
}

/* Who waits for a row of an address; for all rows, one of which never gets its column. */
static void be_waiting(void *argument)
{
    const dray_row *at = argument;
    static const char *const columns[] = {"x"};
    dray_context *context = fixture_context(&f, "waits");
    dray_queue *queue = open_queue(context, "cleared", 0);
    dray_get_options get = get_of("p");
    get.columns = columns;
    get.column_count = 1;
    get.at = at;
    get.rows = at != NULL;
    get.timeout_ns = DRAY_WAIT_DEFAULT;
    dray_batch *batch;
    if (at) {
        FAILS(DRAY_ESTALE, dray_queue_get(queue, &get, &batch, &error));
    } else {
        OK(dray_queue_get(queue, &get, &batch, &error));
        assert_int_equal(dray_batch_rows(batch), 1);
        assert_int_equal(number_in(batch, "x", 0), 7);
        dray_batch_free(batch);
    }
    leave(queue, context);
}

/* Others are whole then, or not there any more. A put elsewhere changes nothing of it. */
TEST(test_clearing_rows_wakes_readers)
{
    dray_context *context = fixture_context(&f, "clears");
    dray_queue *queue = open_queue(context, "cleared", 0);
    const int64_t seven = 7;
    const dray_column_data column = numbers("x", &seven);
    dray_row row;
    dray_put_options put = put_of("p", 1);
    put.keys = names;
    put.columns = &column;
    put.column_count = 1;
    OK(dray_queue_put(queue, &put, NULL, &error));
    put.keys = &names[1];
    put.column_count = 0;
    OK(dray_queue_put(queue, &put, &row, &error));
    pid_t pids[] = {child(be_waiting, &row), child(be_waiting, NULL)};
    wait_for_gets(queue, 2);
    put.partition = "elsewhere";
    OK(dray_queue_put(queue, &put, NULL, &error));
    wait_for_gets(queue, 2);
    OK(dray_queue_clear_rows(queue, "p", NULL, &row, 1, &error));
    join(pids[0]);
    join(pids[1]);
    leave(queue, context);
}

enum { WRITERS = 2, PUTS = 150, SHARED = 4 };

/* Values and tags of a row all say who put them, and in which of its puts. */
static void be_writer(void *argument)
{
    int64_t writer = *(const int64_t *)argument;
    dray_context *context = fixture_context(&f, "writer");
    dray_queue *queue = open_queue(context, "shared", 0);
    for (int64_t i = 1; i <= PUTS; i++) {
        int64_t values[SHARED];
        char words[24];
        uint64_t offsets[SHARED + 1] = {0};
        char texts[SHARED * 24] = "";
        int length = snprintf(words, sizeof words, "%lld", (long long)(writer << 32 | i));
        dray_blob tags[SHARED];
        for (uint32_t k = 0; k < SHARED; k++) {
            values[k] = writer << 32 | i;
            memcpy(texts + offsets[k], words, (size_t)length);
            offsets[k + 1] = offsets[k] + (uint64_t)length;
            tags[k] = (dray_blob){words, (uint64_t)length};
        }
        const dray_column_data columns[] = {numbers("x", values), text("o", texts, offsets)};
        dray_put_options put = put_of("p", SHARED);
        put.keys = names;
        put.columns = columns;
        put.column_count = 2;
        put.tags = tags;
        OK(dray_queue_put(queue, &put, NULL, &error));
    }
    leave(queue, context);
}

TEST(test_nobody_sees_half_a_put)
{
    int64_t numbers_of[WRITERS] = {1, 2};
    pid_t pids[WRITERS];
    dray_context *context = fixture_context(&f, "reader");
    dray_queue *queue = open_queue(context, "shared", 0);
    for (int i = 0; i < WRITERS; i++)
        pids[i] = child(be_writer, &numbers_of[i]);
    dray_get_options get = get_of("p");
    get.rows = SHARED;
    get.keys = names;
    get.all_columns = 1;
    get.timeout_ns = DRAY_WAIT_DEFAULT; /* the first put is waited for */
    for (uint32_t version = 0; version < WRITERS * PUTS;) {
        dray_batch *batch;
        OK(dray_queue_get(queue, &get, &batch, &error));
        int64_t value = number_in(batch, "x", 0);
        char words[24];
        snprintf(words, sizeof words, "%lld", (long long)value);
        for (uint32_t i = 0; i < SHARED; i++) {
            dray_column_part part;
            assert_int_equal(number_in(batch, "x", i), value);
            OK(dray_batch_cell(batch, "o", i, &part, &error));
            assert_int_equal(part.bytes, strlen(words));
            assert_memory_equal(part.values, words, part.bytes);
            assert_true(tag_is(batch, i, words));
            assert_true(dray_batch_row(batch, i)->attempt >= version);
        }
        version = dray_batch_row(batch, 0)->attempt;
        dray_batch_free(batch);
    }
    for (int i = 0; i < WRITERS; i++)
        join(pids[i]);
    leave(queue, context);
}

/* Consumers in several processes have every row once. */
static void be_consumer(void *argument)
{
    int told = *(const int *)argument;
    dray_context *context = fixture_context(&f, "consumer");
    dray_queue *queue = open_queue(context, "divided", 0);
    static const char *const columns[] = {"x"};
    dray_get_options get = get_of("p");
    get.task = "one";
    get.columns = columns;
    get.column_count = 1;
    get.count = 3;
    get.up_to = 1;
    get.timeout_ns = DRAY_WAIT_DEFAULT;
    dray_batch *batch;
    int rc;
    while ((rc = dray_queue_get(queue, &get, &batch, &error)) != DRAY_EEND) {
        OK(rc);
        for (uint32_t i = 0; i < dray_batch_rows(batch); i++) {
            int64_t value = number_in(batch, "x", i);
            if (write(told, &value, sizeof value) != sizeof value)
                abort();
        }
        dray_batch_free(batch);
    }
    leave(queue, context);
}

TEST(test_consumers_divide_the_rows)
{
    enum { CONSUMERS = 3, EACH = 60 };
    int pipes[2], seen[EACH + 1] = {0};
    int64_t value;
    pid_t pids[CONSUMERS];
    dray_context *context = fixture_context(&f, "producer");
    dray_queue *queue = open_queue(context, "divided", 0);
    assert_int_equal(pipe(pipes), 0);
    for (int i = 0; i < CONSUMERS; i++)
        pids[i] = child(be_consumer, &pipes[1]);
    close(pipes[1]);
    for (int64_t i = 1; i <= EACH; i++) {
        const dray_column_data column = numbers("x", &i);
        dray_put_options put = put_of("p", 1); /* without keys */
        put.columns = &column;
        put.column_count = 1;
        OK(dray_queue_put(queue, &put, NULL, &error));
    }
    for (int i = 1; i <= EACH; i++) {
        assert_int_equal(read(pipes[0], &value, sizeof value), sizeof value);
        assert_int_equal(seen[value]++, 0);
    }
    OK(dray_queue_clear(queue, "p", &error)); /* who waits for more hears that there is none */
    OK(dray_queue_end(queue, &error));
    for (int i = 0; i < CONSUMERS; i++)
        join(pids[i]);
    assert_int_equal(read(pipes[0], &value, sizeof value), 0);
    close(pipes[0]);
    leave(queue, context);
}

TEST(test_no_more_than_64_consumers)
{
    dray_context *context = fixture_context(&f, "keys");
    dray_queue *queue = open_queue(context, "crowd", 0);
    dray_put_options put = put_of("p", 1);
    put.keys = names;
    OK(dray_queue_put(queue, &put, NULL, &error));
    dray_get_options get = get_of("p");
    dray_batch *batch;
    char name[16];
    get.task = name;
    for (int i = 0; i < 64; i++) {
        snprintf(name, sizeof name, "t%d", i);
        OK(dray_queue_get(queue, &get, &batch, &error));
        dray_batch_free(batch);
        FAILS(DRAY_EAGAIN, dray_queue_get(queue, &get, &batch, &error));
    }
    snprintf(name, sizeof name, "more");
    FAILS(DRAY_EFULL, dray_queue_get(queue, &get, &batch, &error));
    get.peek = 1; /* who only looks is none */
    OK(dray_queue_get(queue, &get, &batch, &error));
    dray_batch_free(batch);
    leave(queue, context);
}

SUITE(up, down)
