/* A connection that breaks after its request was read and before the answer came, at a coordinator
 * that lives on: the client comes back on another one and asks again. What had counted counts once,
 * and what it had put stays where it is. */
#include "control/channel.h"
#include "queue/client/client.h"
#include "queue/three_tasks.h"

#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <linux/sockios.h>

static dray_queue *open_durable(dray_context *context)
{
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.durability = DRAY_DURABILITY_JOURNAL;
    return open_three(context, "repeated", options);
}

/* The coordinator, which stands still, has not read the request yet: it will, and then see that the
 * connection has ended. */
static void *cut(void *argument)
{
    int fd = *(int *)argument, unread = 0;
    for (int i = 0; i < 4000 && !unread; i++) {
        usleep(5000);
        ioctl(fd, SIOCOUTQ, &unread);
    }
    shutdown(fd, SHUT_RDWR);
    kill(f.coordinator_pid, SIGCONT);
    return unread ? NULL : argument;
}

static void begin_cut(const dray_queue *queue, int *fd, pthread_t *thread)
{
    *fd = dray__channel_socket(queue->channel);
    kill(f.coordinator_pid, SIGSTOP);
    assert_int_equal(pthread_create(thread, NULL, cut, fd), 0);
}

static void end_cut(pthread_t thread)
{
    void *failed;
    pthread_join(thread, &failed);
    assert_null(failed);
}

TEST(test_counts_once)
{
    int fd;
    pthread_t thread;
    f = (queue_fixture){.durable = true};
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "worker");
    dray_queue *queue = open_durable(context);
    insert_ints(queue, "first", 1, 1); /* the chunk is there */
    begin_cut(queue, &fd, &thread);
    insert_ints(queue, "0", 4, 1);
    end_cut(thread);
    OK(dray_queue_seal(queue, "0", 4, &error)); /* and not 8 */
    dray_claim_options o = want("rollout", 4);
    o.partition = "0";
    dray_batch *batch;
    OK(dray_queue_claim(queue, &o, &batch, &error));
    dray_column column; /* the chunk of before is the keeper's still */
    OK(dray_batch_column(batch, "prompts", &column, &error));
    for (int i = 0; i < 4; i++)
        assert_int_equal(*(const int32_t *)column.cells[i], i * 10);
    set_ints(batch, "responses", 100);
    begin_cut(queue, &fd, &thread);
    OK(dray_batch_commit(batch, &error)); /* it had counted */
    end_cut(thread);
    dray_batch_free(batch);
    o.task = "reward";
    OK(dray_queue_claim(queue, &o, &batch, &error));
    assert_int_equal(dray_batch_row(batch, 0)->attempt, 1);
    OK(dray_batch_column(batch, "responses", &column, &error));
    for (int i = 0; i < 4; i++)
        assert_int_equal(*(const int32_t *)column.cells[i], 100 + i);
    dray_batch_free(batch);
    assert_true(status_has(queue, "\"clients\":1"));
    leave(queue, context);
    fixture_down(&f);
}

/* The same of a put of rows with keys. What cannot be asked again says so, and the next call goes
 * on. */
TEST(test_puts_count_once)
{
    int fd;
    pthread_t thread;
    f = (queue_fixture){.durable = true};
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "worker");
    dray_queue *queue = open_durable(context);
    static const char *const keys[] = {"a", "b"};
    int64_t values[] = {1, 2};
    dray_row rows[2];
    const dray_column_data column = {.name = "x", .dtype = DRAY_I64, .values = values};
    dray_put_options put = DRAY_PUT_OPTIONS_INIT;
    put.partition = "p";
    put.rows = 2;
    put.keys = keys;
    put.columns = &column;
    put.column_count = 1;
    OK(dray_queue_put(queue, &put, NULL, &error));
    values[0] = 3;
    begin_cut(queue, &fd, &thread);
    OK(dray_queue_put(queue, &put, rows, &error));
    end_cut(thread);
    assert_int_equal(rows[0].attempt, 2);
    assert_int_equal(rows[1].attempt, 2);
    put.rows = 1;
    put.keys = NULL;
    begin_cut(queue, &fd, &thread);
    FAILS(DRAY_ECLOSED, dray_queue_put(queue, &put, NULL, &error));
    end_cut(thread);
    dray_get_options get = DRAY_GET_OPTIONS_INIT;
    get.partition = "p";
    get.all_columns = 1;
    get.task = "reader";
    dray_batch *batch;
    begin_cut(queue, &fd, &thread);
    FAILS(DRAY_ECLOSED, dray_queue_get(queue, &get, &batch, &error));
    end_cut(thread);
    FAILS(DRAY_EAGAIN, dray_queue_get(queue, &get, &batch, &error)); /* they were consumed */
    get.task = NULL;
    OK(dray_queue_get(queue, &get, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), 3);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(dray_batch_row(batch, i)->attempt, i < 2 ? 2 : 1);
    dray_batch_free(batch);
    leave(queue, context);
    fixture_down(&f);
}

SUITE(NULL, NULL)
