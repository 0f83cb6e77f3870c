/* Tests rows with keys in a journal that is rewritten: the records that it leaves out, rows that
 * are read again beyond today's limits, and numbers that are used up. Also tests readers when the
 * journal or the keeper fails. */
#include "queue/fixture.h"
#include "queue/journal/journal.h"
#include "queue/journal/records.h"

#include <stdint.h>
#include <sys/stat.h>

static queue_fixture f;

enum { LARGE = 4 << 20, PUTS = 6 }; /* so many make it be written anew */

static uint8_t large[3 * LARGE];

static dray_queue *open_queue(dray_context *context, uint64_t rows, uint64_t bytes)
{
    static const char *const needs[] = {"x"};
    static const dray_queue_task tasks[] = {{.name = "train", .needs = needs, .needs_count = 1}};
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = tasks;
    options.task_count = 1;
    options.capacity_rows = rows;
    options.capacity_bytes = bytes;
    options.durability = f.durable ? DRAY_DURABILITY_JOURNAL : DRAY_DURABILITY_NONE;
    dray_queue *queue;
    OK(dray_queue_open(context, "samples", &options, &queue, &error));
    return queue;
}

static dray_queue *up(dray_context **context, uint64_t rows, uint64_t bytes)
{
    f = (queue_fixture){.durable = true};
    fixture_up(&f);
    *context = fixture_context(&f, "journal");
    return open_queue(*context, rows, bytes);
}

static void down(dray_queue *queue, dray_context *context)
{
    leave(queue, context);
    fixture_down(&f);
}

static ino_t journal_file(void)
{
    char path[200];
    struct stat st;
    fixture_journal(&f, path, sizeof path);
    assert_int_equal(stat(path, &st), 0);
    return st.st_ino;
}

/* ---- puts ------------------------------------------------------------------------------------ */

static dray_column_data bytes_of(const char *name, uint32_t size)
{
    return (dray_column_data){
        .name = name, .dtype = DRAY_U8, .ndim = 1, .shape = {size}, .values = large};
}

static int put_at(dray_queue *queue, const char *partition, const char *const *keys, uint32_t rows,
                  const dray_column_data *columns, uint32_t column_count, dray_row *out)
{
    dray_put_options put = DRAY_PUT_OPTIONS_INIT;
    put.partition = partition;
    put.keys = keys;
    put.rows = rows;
    put.columns = columns;
    put.column_count = column_count;
    put.timeout_ns = DRAY_WAIT_DEFAULT;
    return dray_queue_put(queue, &put, out, &error);
}

static void put_number(dray_queue *queue, const char *partition, const char *key, int64_t number)
{
    const dray_column_data column = {.name = "x", .dtype = DRAY_I64, .values = &number};
    OK(put_at(queue, partition, &key, 1, &column, 1, NULL));
}

static int get(dray_queue *queue, const char *partition, const char *task, dray_batch **batch)
{
    dray_get_options o = DRAY_GET_OPTIONS_INIT;
    o.partition = partition;
    o.all_columns = 1;
    o.partial = 1;
    o.task = task;
    return dray_queue_get(queue, &o, batch, &error);
}

static void expect_number(dray_queue *queue, const char *partition, int64_t expected)
{
    dray_batch *batch;
    dray_column_part part;
    OK(get(queue, partition, NULL, &batch));
    assert_int_equal(dray_batch_rows(batch), 1);
    OK(dray_batch_cell(batch, "x", 0, &part, &error));
    assert_int_equal(part.bytes, 8);
    assert_memory_equal(part.values, &expected, 8);
    dray_batch_free(batch);
}

/* Replaces one row's large value again and again; the last one stays. */
static void write_anew(dray_queue *queue, const char *partition)
{
    static const char *const key[] = {"large"};
    const dray_column_data column = bytes_of("bytes", LARGE);
    ino_t before = journal_file();
    for (int i = 0; i < PUTS; i++)
        OK(put_at(queue, partition, key, 1, &column, 1, NULL));
    int64_t deadline = dray__deadline(15 * DRAY__SECOND);
    while (journal_file() == before) {
        assert_true(dray__now() < deadline);
        usleep(2000);
    }
}

/* ---- a journal that is written anew ---------------------------------------------------------- */

/* What it said of a partition that was cleared since, and made again under its name, goes. */
TEST(test_earlier_states_are_left_out)
{
    dray_context *context;
    dray_queue *queue = up(&context, 0, 0);
    put_number(queue, "stays", "k", 1);
    put_number(queue, "p", "before", 2);
    write_anew(queue, "large");
    OK(dray_queue_clear(queue, "p", &error));
    put_number(queue, "p", "after", 3);
    write_anew(queue, "large");
    fixture_restart(&f);
    expect_number(queue, "stays", 1);
    expect_number(queue, "p", 3);
    down(queue, context);
}

/* Rows and bytes that were dropped are read again with the put that they came with: what came into
 * their place had room then. */
TEST(test_what_is_read_again_had_room)
{
    enum { ROWS = 6, BYTES = 2 << 20, CAPACITY = 40 << 20, INSERTED = 8 };
    static const char *const keys[ROWS] = {"a", "b", "c", "d", "e", "f"};
    const dray_column_data columns[] = {bytes_of("bytes", BYTES), bytes_of("few", 1)};
    const dray_column_data small = bytes_of("bytes", 1);
    const int64_t numbers[INSERTED] = {0};
    const dray_column_data x = {.name = "x", .dtype = DRAY_I64, .values = numbers};
    dray_context *context;
    dray_queue *queue = up(&context, 10, CAPACITY);
    OK(put_at(queue, "p", keys, ROWS, columns, 2, NULL));
    OK(put_at(queue, "p", keys, 1, &small, 1, NULL)); /* few of the first put is needed, */
    OK(dray_queue_clear_rows(queue, "p", keys + 1, NULL, ROWS - 1, &error)); /* bytes are not */
    dray_insert_options insert = DRAY_INSERT_OPTIONS_INIT;
    insert.partition = "claimed";
    insert.rows = INSERTED;
    insert.row_bytes = (CAPACITY - ROWS * BYTES + (1 << 20)) / INSERTED;
    insert.columns = &x;
    insert.column_count = 1;
    OK(dray_queue_insert(queue, &insert, NULL, &error));
    write_anew(queue, "large");
    fixture_restart(&f);
    dray_batch *batch;
    OK(get(queue, "p", NULL, &batch));
    assert_int_equal(dray_batch_rows(batch), 1);
    dray_batch_free(batch);
    OK(dray_queue_seal(queue, "claimed", INSERTED, &error));
    down(queue, context);
}

/* The put that made the partition is left out; one after the end of the queue is not. */
TEST(test_puts_after_the_end)
{
    dray_context *context;
    dray_queue *queue = up(&context, 0, 0);
    put_number(queue, "stays", "k", 1);
    put_number(queue, "p", "k", 2);
    write_anew(queue, "large");
    OK(dray_queue_end(queue, &error));
    put_number(queue, "p", "k", 3);
    write_anew(queue, "large");
    fixture_restart(&f);
    expect_number(queue, "p", 3);
    expect_number(queue, "stays", 1);
    dray_batch *batch;
    FAILS(DRAY_EEND, get(queue, "another", NULL, &batch));
    down(queue, context);
}

/* As if the queue had counted so far. */
static void count_to(uint32_t generations)
{
    char path[200];
    uint64_t end, last;
    dray__journal *journal;
    dray__journal_options options = {.path = path};
    const dray__state_record state = {.generations = generations, .admission.task = UINT32_MAX};
    fixture_journal(&f, path, sizeof path);
    OK(dray__journal_read(path, fixture_skip_record, NULL, &end, &last, &error));
    OK(dray__journal_start(&options, end, last, &journal, &error));
    dray__journal_entry *entry = calloc(1, sizeof *entry);
    entry->kind = DRAY__RECORD_STATE;
    dray__put_fields(&entry->body, dray__record_kinds[DRAY__RECORD_STATE].fields, &state);
    dray__journal_add(journal, entry);
    for (dray__journal_entry *done = dray__journal_stop(journal), *next; done; done = next) {
        next = done->next;
        dray__entry_free(done);
    }
}

/* Puts and partitions are numbered in 32 bits: puts end first, and what they made stays. */
TEST(test_numbers_are_used_up)
{
    dray_context *context;
    dray_queue *queue = up(&context, 0, 0);
    const char *key = "k";
    fixture_end(f.coordinator_pid, SIGKILL);
    count_to(UINT32_MAX - (1 << 20) - 3);
    f.coordinator_pid = fixture_spawn(&f, false);
    put_number(queue, "p", key, 1); /* two numbers, one of them the partition's */
    put_number(queue, "p", key, 2);
    FAILS(DRAY_EFULL, put_at(queue, "p", &key, 1, NULL, 0, NULL));
    assert_non_null(strstr(error.message, "fewer than 4293918719 puts and partitions"));
    int64_t number = 1;
    const dray_column_data column = {.name = "x", .dtype = DRAY_I64, .values = &number};
    dray_insert_options insert = DRAY_INSERT_OPTIONS_INIT;
    insert.partition = "claimed";
    insert.rows = 1;
    insert.columns = &column;
    insert.column_count = 1;
    OK(dray_queue_insert(queue, &insert, NULL, &error));
    fixture_restart(&f);
    expect_number(queue, "p", 2);
    FAILS(DRAY_EFULL, put_at(queue, "p", &key, 1, NULL, 0, NULL));
    OK(dray_queue_clear(queue, "p", &error));
    OK(dray_queue_seal(queue, "claimed", 1, &error));
    down(queue, context);
}

static int insert_three(dray_queue *queue, const char *partition)
{
    int64_t numbers[3] = {1, 2, 3};
    const dray_column_data column = {.name = "x", .dtype = DRAY_I64, .values = numbers};
    dray_insert_options insert = DRAY_INSERT_OPTIONS_INIT;
    insert.partition = partition;
    insert.rows = 3;
    insert.columns = &column;
    insert.column_count = 1;
    return dray_queue_insert(queue, &insert, NULL, &error);
}

/* Claims and fails a row, as often as it takes until all three are lost. */
static void lose_three(dray_queue *queue)
{
    for (int i = 0; i < 9; i++) {
        dray_batch *batch;
        dray_claim_options claim = DRAY_CLAIM_OPTIONS_INIT;
        claim.task = "train";
        claim.count = 1;
        OK(dray_queue_claim(queue, &claim, &batch, &error));
        OK(dray_batch_fail(batch, NULL, 0, "no", &error));
        dray_batch_free(batch);
    }
}

/* Partitions end before refills, and rows that are lost then are not refilled. */
TEST(test_numbers_of_partitions_are_used_up)
{
    dray_context *context;
    dray_queue *queue = up(&context, 0, 0);
    dray_refill refill = DRAY_REFILL_INIT;
    fixture_end(f.coordinator_pid, SIGKILL);
    count_to(UINT32_MAX - (1 << 19) - 1);
    f.coordinator_pid = fixture_spawn(&f, false);
    OK(insert_three(queue, "last"));
    OK(dray_queue_seal(queue, "last", 3, &error));
    FAILS(DRAY_EFULL, insert_three(queue, "another"));
    assert_non_null(strstr(error.message, "fewer than 4294443007 "));
    fixture_end(f.coordinator_pid, SIGKILL);
    count_to(UINT32_MAX - 3);
    f.coordinator_pid = fixture_spawn(&f, false);
    lose_three(queue);
    fixture_restart(&f);
    for (int i = 0; i < 2; i++) {
        OK(dray_queue_refill_wait(queue, 10 * DRAY__SECOND, &refill, &error));
        OK(dray_queue_refill_decline(queue, refill.id, &error));
    }
    OK(dray_queue_wait(queue, "last", "train", 0, &error));
    fixture_restart(&f);
    OK(dray_queue_wait(queue, "last", "train", 0, &error));
    down(queue, context);
}

/* ---- what fails ------------------------------------------------------------------------------ */

/* A consumer that learns only that its get could not be written down holds nothing. */
TEST(test_a_get_that_is_not_kept_holds_nothing)
{
    dray_context *context;
    dray_batch *batch;
    char *status;
    dray_queue *queue = up(&context, 0, 0);
    put_number(queue, "p", "k", 1);
    fixture_fill_disk(&f);
    FAILS(DRAY_EFULL, get(queue, "p", "reader", &batch));
    fixture_limit_files(&f, RLIM_INFINITY);
    int64_t deadline = dray__deadline(10 * DRAY__SECOND);
    int rc;
    while ((rc = dray_queue_clear(queue, "p", &error)) == DRAY_EFULL && dray__now() < deadline)
        usleep(10000);
    OK(rc);
    OK(dray_queue_status(queue, &status, &error));
    assert_non_null(strstr(status, "\"keyed_bytes\":0"));
    free(status);
    down(queue, context);
}

/* What died with the keeper is looked for once: the next one is told at once. */
TEST(test_bytes_that_a_reader_missed)
{
    if (elsewhere())
        return;
    f = (queue_fixture){0};
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "writes"), *other = fixture_context(&f, "reads");
    dray_queue *queue = open_queue(context, 0, 0), *reader = open_queue(other, 0, 0);
    dray_batch *batch;
    dray_column_part part;
    put_number(queue, "p", "k", 1);
    fixture_restart_keeper(&f);
    pid_t pid = f.coordinator_pid;
    OK(get(reader, "p", NULL, &batch));
    FAILS(DRAY_EGONE, dray_batch_cell(batch, "x", 0, &part, &error));
    dray_batch_free(batch);
    FAILS(DRAY_EGONE, get(reader, "p", NULL, &batch));
    assert_non_null(strstr(error.message, "lost its bytes of column x"));
    put_number(queue, "p", "k", 2);
    expect_number(reader, "p", 2);
    assert_int_equal(f.coordinator_pid, pid);
    leave(reader, other);
    down(queue, context);
}

SUITE(NULL, NULL)
