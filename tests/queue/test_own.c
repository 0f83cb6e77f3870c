/* Tests that readers of rows with keys get memory of their own (dray_batch_own). Other clients
 * never see what is written to it, their changes never reach it, and the memory is given back. */
#include "queue/one_fixture.h"

#include <stdint.h>
#include <sys/mman.h>

/* Rows of an odd size, whose column begins within a page, behind a small one. One column is written
 * past the caches. */
enum { ROWS = 4, ROW = (1 << 20) + 4099, SIZE = ROWS * ROW, CAPACITY = 64 << 20 };

static const char *const names[ROWS] = {"k0", "k1", "k2", "k3"};
static uint8_t bytes[SIZE];

static dray_queue *open_queue(dray_context *context, const char *name)
{
    static const char *const needs[] = {"large"};
    static const dray_queue_task tasks[] = {{.name = "train", .needs = needs, .needs_count = 1}};
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = tasks;
    options.task_count = 1;
    options.capacity_bytes = CAPACITY;
    dray_queue *queue;
    OK(dray_queue_open(context, name, &options, &queue, &error));
    return queue;
}

static uint8_t byte_of(int seed, size_t at)
{
    return (uint8_t)((at * 2654435761u >> 9) + (unsigned)seed * 37u);
}

static void put(dray_queue *queue, int seed)
{
    static const uint8_t small[ROWS] = {1, 2, 3, 4};
    for (size_t i = 0; i < SIZE; i++)
        bytes[i] = byte_of(seed, i);
    const dray_column_data columns[] = {
        {.name = "small", .dtype = DRAY_U8, .values = small},
        {.name = "large", .dtype = DRAY_U8, .ndim = 1, .shape = {ROW}, .values = bytes}};
    dray_put_options o = DRAY_PUT_OPTIONS_INIT;
    o.partition = "p";
    o.rows = ROWS;
    o.keys = names;
    o.columns = columns;
    o.column_count = 2;
    OK(dray_queue_put(queue, &o, NULL, &error));
}

static dray_batch *get(dray_queue *queue)
{
    dray_get_options o = DRAY_GET_OPTIONS_INIT;
    dray_batch *batch;
    o.partition = "p";
    o.rows = ROWS;
    o.keys = names;
    o.all_columns = 1;
    OK(dray_queue_get(queue, &o, &batch, &error));
    return batch;
}

static uint8_t *own(dray_batch *batch, uint32_t first, uint32_t rows)
{
    void *values;
    OK(dray_batch_own(batch, "large", first, rows, &values, &error));
    return values;
}

static bool holds(const uint8_t *values, int seed, size_t from, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (values[i] != byte_of(seed, from + i))
            return false;
    return true;
}

/* Puts and clears, so that memory which is free is written to. */
static void churn(dray_queue *queue, int seed)
{
    for (int i = 0; i < 4; i++) {
        put(queue, seed + i);
        OK(dray_queue_clear(queue, "p", &error));
    }
}

TEST(test_nobody_sees_what_is_written)
{
    dray_context *context = fixture_context(&f, "own");
    dray_queue *queue = open_queue(context, "written");
    put(queue, 1);
    dray_batch *batch = get(queue), *other = get(queue);
    uint8_t *mine = own(batch, 0, ROWS), *again = own(batch, 0, ROWS), *theirs = own(other, 1, 2);
    assert_true(mine && again && theirs && mine != again);
    assert_true(holds(mine, 1, 0, SIZE) && holds(theirs, 1, ROW, 2 * ROW));
    for (size_t i = 0; i < SIZE; i += 1000)
        mine[i] ^= 255;
    assert_true(holds(again, 1, 0, SIZE) && holds(theirs, 1, ROW, 2 * ROW));
    dray_column column;
    OK(dray_batch_column(batch, "large", &column, &error));
    for (int row = 0; row < ROWS; row++)
        assert_true(holds(column.cells[row], 1, (size_t)row * ROW, ROW));
    dray_batch_free(other);
    other = get(queue);
    memset(bytes, 0, SIZE);
    OK(dray_batch_gather(other, "large", bytes, SIZE, NULL, &error));
    assert_true(holds(bytes, 1, 0, SIZE) && holds(theirs, 1, ROW, 2 * ROW));
    for (size_t i = 0; i < SIZE; i++)
        assert_int_equal(mine[i], i % 1000 ? byte_of(1, i) : byte_of(1, i) ^ 255);
    dray_own_free(mine);
    dray_own_free(again);
    dray_own_free(theirs);
    dray_own_free(NULL);
    dray_batch_free(batch);
    dray_batch_free(other);
    leave(queue, context);
}

TEST(test_it_stays_when_rows_are_cleared)
{
    dray_context *context = fixture_context(&f, "own");
    dray_queue *queue = open_queue(context, "cleared");
    put(queue, 1);
    dray_batch *batch = get(queue);
    uint8_t *mine = own(batch, 0, ROWS);
    mine[ROW] ^= 255;
    OK(dray_queue_clear_rows(queue, "p", names, NULL, ROWS, &error));
    churn(queue, 2);
    assert_true(holds(mine, 1, 0, ROW) && holds(mine + ROW + 1, 1, ROW + 1, SIZE - ROW - 1));
    dray_own_free(mine);
    dray_batch_free(batch);
    leave(queue, context);
}

TEST(test_it_stays_when_its_batch_is_freed)
{
    dray_context *context = fixture_context(&f, "own");
    dray_queue *queue = open_queue(context, "freed");
    put(queue, 1);
    dray_batch *batch = get(queue);
    uint8_t *mine = own(batch, 0, ROWS), *part = own(batch, 3, 1);
    mine[5] ^= 255;
    OK(dray_queue_clear(queue, "p", &error));
    dray_batch_free(batch);
    churn(queue, 2);
    assert_int_equal(mine[5], byte_of(1, 5) ^ 255);
    assert_true(holds(mine + 6, 1, 6, SIZE - 6) && holds(part, 1, (size_t)3 * ROW, ROW));
    leave(queue, context);
    assert_true(holds(mine + 6, 1, 6, SIZE - 6));
    dray_own_free(part);
    dray_own_free(mine);
}

static int ready[2], done[2];

static dray_batch *forked;

/* The parent lets go of what the child has, too. */
static void be_forked(void *values)
{
    uint8_t *mine = values;
    char byte;
    void *more;
    FAILS(DRAY_ECLOSED, dray_batch_own(forked, "large", 0, ROWS, &more, &error));
    if (read(done[0], &byte, 1) != 1 || !holds(mine, 1, 0, SIZE))
        die("values of before the fork expected", NULL);
    mine[0] ^= 255;
    dray_own_free(mine);
}

TEST(test_it_stays_in_a_forked_child)
{
    dray_context *context = fixture_context(&f, "own");
    dray_queue *queue = open_queue(context, "forked");
    put(queue, 1);
    dray_batch *batch = forked = get(queue);
    uint8_t *mine = own(batch, 0, ROWS);
    assert_int_equal(pipe(done), 0);
    pid_t pid = child(be_forked, mine);
    dray_own_free(mine);
    dray_batch_free(batch);
    OK(dray_queue_clear(queue, "p", &error));
    churn(queue, 2);
    assert_int_equal(write(done[1], "", 1), 1);
    join(pid);
    close(done[0]);
    close(done[1]);
    leave(queue, context);
}

TEST(test_its_memory_is_given_back)
{
    dray_context *context = fixture_context(&f, "own");
    dray_queue *queue = open_queue(context, "rounds");
    int mappings = 0, fds = 0, chunks = 0;
    for (int round = 0; round < 12; round++) {
        put(queue, round);
        dray_batch *batch = get(queue);
        uint8_t *mine = own(batch, 0, ROWS), *part = own(batch, 1, 1);
        assert_true(mine && part);
        assert_true(holds(mine, round, 0, SIZE) && holds(part, round, ROW, ROW));
        memset(mine, 1, SIZE);
        dray_own_free(round % 2 ? mine : part);
        if (round % 3)
            dray_batch_free(batch);
        dray_own_free(round % 2 ? part : mine);
        if (round % 3 == 0)
            dray_batch_free(batch);
        OK(dray_queue_clear_rows(queue, "p", names, NULL, ROWS, &error));
        if (round == 3) {
            mappings = mapped_chunks();
            fds = count_fds(getpid(), "");
            chunks = kept_chunks(&f);
        }
    }
    assert_int_equal(mapped_chunks(), mappings);
    assert_int_equal(count_fds(getpid(), ""), fds);
    assert_int_equal(kept_chunks(&f), chunks);
    leave(queue, context);
}

static uint64_t status_of(dray_queue *queue, const char *name)
{
    char *status, key[32];
    OK(dray_queue_status(queue, &status, &error));
    snprintf(key, sizeof key, "\"%s\":", name);
    const char *at = strstr(status, key);
    assert_non_null(at);
    uint64_t number = strtoull(at + strlen(key), NULL, 10);
    free(status);
    return number;
}

static void be_reader(void *argument)
{
    (void)argument;
    dray_queue *queue = open_queue(fixture_context(&f, "reader"), "killed");
    uint8_t *mine = own(get(queue), 0, ROWS);
    if (!mine || write(ready[1], mine, 1) != 1)
        die("a value expected", NULL);
    pause();
}

TEST(test_a_killed_reader_holds_nothing)
{
    dray_context *context = fixture_context(&f, "own");
    dray_queue *queue = open_queue(context, "killed");
    char byte;
    put(queue, 1);
    assert_int_equal(pipe(ready), 0);
    pid_t pid = child(be_reader, NULL);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    OK(dray_queue_clear(queue, "p", &error));
    assert_true(status_of(queue, "bytes") >= SIZE);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    for (int i = 0; i < 2000 && status_of(queue, "bytes"); i++)
        usleep(5000);
    assert_int_equal(status_of(queue, "bytes"), 0);
    churn(queue, 2);
    close(ready[0]);
    close(ready[1]);
    leave(queue, context);
}

/* Readers that keep what they got hold at most a quarter of the capacity, and the chunks of half of
 * it. */
TEST(test_a_full_queue_is_copied_from)
{
    dray_context *context = fixture_context(&f, "own");
    dray_queue *queue = open_queue(context, "full");
    dray_batch *batches[8];
    int owned = 0;
    put(queue, 0);
    for (int i = 0; i < 8; i++) {
        batches[i] = get(queue);
        uint64_t used = status_of(queue, "bytes");
        uint8_t *mine = own(batches[i], 0, ROWS);
        assert_int_equal(mine != NULL, used <= CAPACITY / 4);
        owned += mine != NULL;
        dray_own_free(mine);
        if (i < 7)
            put(queue, i + 1); /* of the same keys: readers hold what was there */
    }
    assert_true(owned >= 2 && owned < 8);
    for (int i = 0; i < 8; i++)
        dray_batch_free(batches[i]);
    leave(queue, context);
}

TEST(test_what_has_no_mapping)
{
    dray_context *context = fixture_context(&f, "own");
    dray_queue *queue = open_queue(context, "none");
    put(queue, 1);
    static const char *const backwards[] = {"k2", "k1"};
    dray_get_options o = DRAY_GET_OPTIONS_INIT;
    dray_batch *batch;
    o.partition = "p";
    o.rows = 2;
    o.keys = backwards;
    o.all_columns = 1;
    OK(dray_queue_get(queue, &o, &batch, &error));
    assert_null(own(batch, 0, 2)); /* they do not follow one another */
    assert_null(own(batch, 0, 0));
    uint8_t *one = own(batch, 1, 1);
    assert_true(one && holds(one, 1, ROW, ROW));
    void *values;
    FAILS(DRAY_EINVALID, dray_batch_own(batch, "large", 1, 2, &values, &error));
    FAILS(DRAY_ENOENT, dray_batch_own(batch, "other", 0, 2, &values, &error));
    dray_own_free(one);
    dray_batch_free(batch);
    leave(queue, context);
}

SUITE(up, down)
