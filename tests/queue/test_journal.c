/* Durable queues: what is left when the controller dies, the power goes, the disk is full. The
 * oracle knows only what was acknowledged. */
#include "queue/fixture.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>

static queue_fixture f;

static const char *const prompts[] = {"prompts"}, *const responses[] = {"responses"};
static const dray_queue_task tasks[] = {
    {.name = "rollout", .needs = prompts, .needs_count = 1, .writes = responses, .writes_count = 1},
    {.name = "reward", .needs = responses, .needs_count = 1},
};

enum { GROUP = 4 };

static void up(void)
{
    memset(&f, 0, sizeof f);
    snprintf(f.journals, sizeof f.journals, "%.60s/dray-journal-XXXXXX",
             getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    if (!mkdtemp(f.journals))
        die("mkdtemp", NULL);
    fixture_up(&f);
}

static void empty_folder(const char *path)
{
    DIR *dir = opendir(path);
    for (struct dirent *entry; dir && (entry = readdir(dir));)
        unlinkat(dirfd(dir), entry->d_name, 0);
    if (dir)
        closedir(dir);
}

static void down(void)
{
    fixture_down(&f);
    empty_folder(f.journals);
    if (rmdir(f.journals) < 0)
        die("rmdir", NULL);
}

static void restart(void)
{
    fixture_end(f.coordinator_pid, SIGKILL);
    f.coordinator_pid = fixture_spawn(&f, false);
}

/* The one journal in the folder. */
static void journal_path(char *out, size_t size)
{
    DIR *dir = opendir(f.journals);
    out[0] = 0;
    for (struct dirent *entry; (entry = readdir(dir));)
        if (strncmp(entry->d_name, "queue-", 6) == 0)
            snprintf(out, size, "%s/%.60s", f.journals, entry->d_name);
    closedir(dir);
    assert_true(out[0]);
}

static dray_queue *open_with(dray_context *context, int32_t durability, const char *restore)
{
    dray_error error;
    dray_queue *queue;
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.tasks = tasks;
    o.task_count = 2;
    o.durability = durability;
    o.restore = restore;
    OK(dray_queue_open(context, "samples", &o, &queue, &error));
    return queue;
}

static dray_queue *open_queue(dray_context *context)
{
    return open_with(context, DRAY_DURABILITY_JOURNAL, NULL);
}

/* Ragged prompts: value k of row i of the partition is a function of both. */
static int64_t value_of(int partition, uint32_t slot, uint32_t k)
{
    return partition * 1000000 + (int64_t)slot * 1000 + k;
}

static int insert(dray_queue *queue, int partition, uint32_t rows, uint32_t *first,
                  dray_error *error)
{
    char name[16];
    uint64_t offsets[65] = {0};
    int64_t values[64 * 8];
    uint32_t at = 0;
    for (uint32_t i = 0; i < rows; i++) {
        for (uint32_t k = 0; k < 1 + i % 5; k++)
            values[at++] = value_of(partition, i, k);
        offsets[i + 1] = at;
    }
    snprintf(name, sizeof name, "%d", partition);
    dray_column_data column = {
        .name = "prompts", .dtype = DRAY_I64, .ndim = 1, .offsets = offsets, .values = values};
    dray_tag tag = {"step", partition};
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = name;
    o.rows = rows;
    o.group_size = rows % GROUP ? 1 : GROUP;
    o.columns = &column;
    o.column_count = 1;
    o.tags = &tag;
    o.tag_count = 1;
    return dray_insert(queue, &o, first, error);
}

static int claim(dray_queue *queue, const char *task, int partition, uint32_t count,
                 dray_batch **out, dray_error *error)
{
    char name[16];
    snprintf(name, sizeof name, "%d", partition);
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = task;
    o.count = count;
    o.up_to = 1;
    o.partition = name;
    o.timeout_ns = 0;
    return dray_claim(queue, &o, out, error);
}

static void check_prompts(dray_batch *batch, int partition)
{
    dray_error error;
    dray_column column;
    double step;
    OK(dray_batch_column(batch, "prompts", &column, &error));
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++) {
        uint32_t slot = dray_batch_row(batch, i)->slot;
        assert_int_equal(column.lengths[i], 1 + slot % 5);
        for (uint32_t k = 0; k < column.lengths[i]; k++)
            assert_int_equal(((const int64_t *)column.cells[i])[k], value_of(partition, slot, k));
        OK(dray_batch_tag(batch, i, "step", &step, &error));
        assert_int_equal((int)step, partition);
    }
}

static void set_responses(dray_batch *batch, int partition)
{
    dray_error error;
    int64_t values[64];
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
        values[i] = -value_of(partition, dray_batch_row(batch, i)->slot, 0);
    dray_column_data column = {.name = "responses", .dtype = DRAY_I64, .values = values};
    OK(dray_batch_set(batch, &column, &error));
}

static void check_responses(dray_batch *batch, int partition)
{
    dray_error error;
    int64_t values[64];
    OK(dray_batch_gather(batch, "responses", values, sizeof values, NULL, &error));
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
        assert_int_equal(values[i], -value_of(partition, dray_batch_row(batch, i)->slot, 0));
}

/* Rolls out `rows` rows and commits them. */
static void roll_out(dray_queue *queue, int partition, uint32_t rows)
{
    dray_error error;
    dray_batch *batch;
    OK(claim(queue, "rollout", partition, rows, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), rows);
    check_prompts(batch, partition);
    set_responses(batch, partition);
    OK(dray_batch_commit(batch, &error));
    dray_batch_free(batch);
}

static void test_goes_on(void **state)
{
    (void)state;
    dray_error error;
    up();
    dray_context *context = fixture_context(&f, "main");
    dray_queue *queue = open_queue(context);
    uint32_t first = 9;
    OK(insert(queue, 1, 8, &first, &error));
    assert_int_equal(first, 0);
    OK(dray_seal(queue, "1", 8, &error));
    roll_out(queue, 1, 3);
    dray_batch *before, *batch;
    OK(claim(queue, "rollout", 1, 2, &before, &error));
    set_responses(before, 1);
    restart();
    FAILS(DRAY_ESTALE, dray_batch_commit(before, &error));
    dray_batch_free(before);
    OK(claim(queue, "reward", 1, 8, &batch, &error)); /* what was committed is there */
    assert_int_equal(dray_batch_rows(batch), 3);
    check_responses(batch, 1);
    OK(dray_batch_commit(batch, &error));
    dray_batch_free(batch);
    roll_out(queue, 1, 5); /* with the rows whose claim is void */
    OK(insert(queue, 2, 5, NULL, &error));
    restart();
    OK(claim(queue, "reward", 1, 8, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), 5);
    check_responses(batch, 1);
    OK(dray_batch_commit(batch, &error));
    dray_batch_free(batch);
    OK(dray_queue_wait(queue, "1", NULL, 0, &error));
    OK(dray_clear(queue, "1", &error));
    restart();
    OK(dray_queue_wait(queue, "1", NULL, 0, &error)); /* it had finished */
    roll_out(queue, 2, 5);
    OK(dray_clear(queue, "2", &error));
    dray_queue_close(queue);
    dray_close(context);
    wait_for_chunks(&f, 0);
    down();
}

static void test_private(void **state)
{
    (void)state;
    up();
    dray_context *context = fixture_context(&f, "main");
    dray_queue *queue = open_queue(context);
    char path[200];
    struct stat st;
    journal_path(path, sizeof path);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    dray_queue_close(queue);
    dray_close(context);
    down();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_goes_on),
        cmocka_unit_test(test_private),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
