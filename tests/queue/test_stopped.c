#include "queue/stopped.h"

TEST_WITHIN(test_superseded_producer, up, down)
{
    supersede(test_times(200));
}

/* A reader is stopped with a column mapped; its rows are cleared and their memory is wanted for
 * others: what it reads when it goes on is what it read before. */
static void read_stop_read(void *argument)
{
    (void)argument;
    dray_context *context = fixture_context(&f, "reader");
    dray_queue *queue = open_two(context, "mapped");
    dray_claim_options o = want("rollout", 64);
    dray_batch *batch;
    dray_column column;
    OK(dray_queue_claim(queue, &o, &batch, &error));
    OK(dray_batch_column(batch, "prompts", &column, &error));
    raise(SIGSTOP);
    for (uint32_t i = 0; i < 64; i++)
        assert_int_equal(*(const int32_t *)column.cells[i], i * 10);
    set_ints(batch, "responses", 0);
    set_ints(batch, "log_probs", 0);
    FAILS(DRAY_EGONE, dray_batch_commit(batch, &error));
    dray_batch_free(batch);
    leave(queue, context);
}

TEST_WITHIN(test_stopped_reader, up, down)
{
    dray_context *context = fixture_context(&f, "writer");
    dray_queue *queue = open_two(context, "mapped");
    insert_ints(queue, "0", 64, 1);
    pid_t pid = child(read_stop_read, NULL);
    int status;
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    assert_true(WIFSTOPPED(status));
    OK(dray_queue_clear(queue, "0", &error));
    /* Many times as much as a chunk holds, over and over. */
    static int32_t values[1 << 18];
    memset(values, 0xEE, sizeof values);
    dray_column_data column = {.name = "prompts", .dtype = DRAY_I32, .values = values};
    for (int i = 1; i <= 40; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
        o.partition = name;
        o.rows = 1 << 18;
        o.columns = &column;
        o.column_count = 1;
        OK(dray_queue_insert(queue, &o, NULL, &error));
        OK(dray_queue_clear(queue, name, &error));
    }
    kill(pid, SIGCONT);
    join(pid);
    leave(queue, context);
}

SUITE(NULL, NULL)
