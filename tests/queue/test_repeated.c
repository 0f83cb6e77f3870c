/* Tests a connection that breaks after its request was read and before the answer came, at a
 * coordinator that lives on. The client opens another connection and repeats the request. A request
 * that had succeeded counts once, and its bytes stay in place. */
#include "base/hook.h"
#include "control/channel.h"
#include "queue/client/client.h"
#include "queue/journal/records.h"
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

/* ---- requests by name --------------------------------------------------------------------------
 */

/* A change that names its object, whose answer is lost; what another client does before it is
 * repeated; and what there must be then. */
typedef struct change {
    void (*prepare)(dray_queue *);
    int (*ask)(dray_queue *);
    const char *done, *undone; /* in the status: waits until one is there and the other is not */
    void (*meanwhile)(dray_queue *);
    void (*check)(dray_queue *);
} change;

enum { AT_ONCE, RESTARTED, COMPACTED, COMPACTED_BY_THE_NEXT, WAYS };

static struct {
    const change *change;
    dray_queue *other;
    int way;
    pthread_t cuts; /* the thread that has cut the connection */
} between;

static bool has(dray_queue *queue, const char *text)
{
    char *status;
    OK(dray_queue_status(queue, &status, &error));
    bool found = strstr(status, text) != NULL;
    free(status);
    return found;
}

/* Makes more of the journal dead than alive, until it has been written anew. */
static void compact(dray_queue *queue)
{
    enum { BYTES = 4 << 20 };
    static uint8_t values[BYTES];
    char path[200];
    uint64_t end = 0, last, most = 0;
    dray_column_data column = {
        .name = "large", .dtype = DRAY_U8, .ndim = 1, .shape = {BYTES}, .values = values};
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = "large";
    o.rows = 1;
    o.columns = &column;
    o.column_count = 1;
    fixture_journal(&f, path, sizeof path);
    for (int i = 0; i < 12 && end >= most; i++) {
        most = end;
        OK(dray_queue_insert(queue, &o, NULL, &error));
        OK(dray_queue_clear(queue, "large", &error));
        OK(dray__journal_read(path, fixture_skip_record, NULL, &end, &last, &error));
    }
    for (int i = 0; i < 1000 && end >= most; i++) {
        usleep(10000);
        OK(dray__journal_read(path, fixture_skip_record, NULL, &end, &last, &error));
    }
    assert_true(end < most);
}

/* The client has no answer, and has not asked again. */
static void act_between(void *user, const char *step)
{
    (void)user;
    if (strcmp(step, "answered") != 0)
        return;
    dray__hook_set(NULL, NULL);
    end_cut(between.cuts);
    const change *c = between.change;
    dray_error kept = error; /* the call's, which goes on */
    for (int i = 0; i < 2000 && ((c->undone && has(between.other, c->undone)) ||
                                 (c->done && !has(between.other, c->done)));
         i++)
        usleep(5000);
    c->meanwhile(between.other);
    if (between.way == COMPACTED_BY_THE_NEXT)
        fixture_restart(&f);
    if (between.way >= COMPACTED)
        compact(between.other);
    if (between.way != AT_ONCE)
        fixture_restart(&f);
    error = kept;
}

static void repeat(const change *c, int way)
{
    int fd;
    f = (queue_fixture){.durable = true};
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "worker"), *second = fixture_context(&f, "other");
    dray_queue *queue = open_durable(context);
    between.change = c;
    between.other = open_durable(second);
    between.way = way;
    if (c->prepare)
        c->prepare(queue);
    begin_cut(queue, &fd, &between.cuts);
    dray__hook_set(act_between, NULL);
    OK(c->ask(queue));
    c->check(between.other);
    leave(between.other, second);
    leave(queue, context);
    fixture_down(&f);
}

static void insert_four(dray_queue *queue)
{
    insert_ints(queue, "p", 4, 1);
}

static void insert_two(dray_queue *queue)
{
    insert_ints(queue, "p", 2, 1);
}

static int clear_p(dray_queue *queue)
{
    return dray_queue_clear(queue, "p", &error);
}

static void seal_two(dray_queue *queue)
{
    OK(dray_queue_seal(queue, "p", 2, &error));
}

static int seal_four(dray_queue *queue)
{
    return dray_queue_seal(queue, "p", 4, &error);
}

static void clear_and_insert_four(dray_queue *queue)
{
    OK(clear_p(queue));
    insert_four(queue);
}

/* It is not sealed. */
static void insert_more(dray_queue *queue)
{
    insert_two(queue);
    OK(dray_queue_seal(queue, "p", 6, &error));
}

static void insert_and_clear(dray_queue *queue)
{
    insert_four(queue);
    OK(clear_p(queue));
}

static int count_done(void *user, const dray__journal_record *record, dray_error *said)
{
    (void)said;
    *(int *)user += record->kind == DRAY__RECORD_DONE;
    return DRAY_OK;
}

/* There was nothing to clear, which the journal says. */
static void insert_after_done(dray_queue *queue)
{
    char path[200];
    uint64_t end, last;
    int done = 0;
    fixture_journal(&f, path, sizeof path);
    for (int i = 0; i < 2000 && !done; i++, usleep(5000))
        OK(dray__journal_read(path, count_done, &done, &end, &last, &error));
    assert_int_equal(done, 1);
    insert_two(queue);
}

static void put_keyed(dray_queue *queue)
{
    static const char *const keys[] = {"a", "b"};
    static const int64_t values[] = {1, 2};
    const dray_column_data column = {.name = "x", .dtype = DRAY_I64, .values = values};
    dray_put_options put = DRAY_PUT_OPTIONS_INIT;
    put.partition = "k";
    put.rows = 2;
    put.keys = keys;
    put.columns = &column;
    put.column_count = 1;
    OK(dray_queue_put(queue, &put, NULL, &error));
}

static int clear_k(dray_queue *queue)
{
    return dray_queue_clear(queue, "k", &error);
}

static int clear_row_a(dray_queue *queue)
{
    static const char *const keys[] = {"a"};
    return dray_queue_clear_rows(queue, "k", keys, NULL, 1, &error);
}

/* How many rows the task has not had; it has them then. */
static uint32_t rows_for(dray_queue *queue, const char *task)
{
    dray_get_options get = DRAY_GET_OPTIONS_INIT;
    get.partition = "k";
    get.all_columns = 1;
    get.task = task;
    dray_batch *batch;
    int rc = dray_queue_get(queue, &get, &batch, &error);
    if (rc == DRAY_ECLOSED) /* the coordinator was started again since the last call */
        rc = dray_queue_get(queue, &get, &batch, &error);
    if (rc == DRAY_EAGAIN)
        return 0;
    OK(rc);
    uint32_t rows = dray_batch_rows(batch);
    dray_batch_free(batch);
    return rows;
}

static void both_are_there(dray_queue *queue)
{
    assert_int_equal(rows_for(queue, NULL), 2);
}

static void put_and_consume(dray_queue *queue)
{
    put_keyed(queue);
    assert_int_equal(rows_for(queue, "reader"), 2);
}

static int reset_reader(dray_queue *queue)
{
    return dray_queue_reset(queue, "k", "reader", &error);
}

static void consume_again(dray_queue *queue)
{
    uint32_t rows = rows_for(queue, "reader");
    for (int i = 0; i < 2000 && !rows; i++, usleep(5000)) /* until they were reset */
        rows = rows_for(queue, "reader");
    assert_int_equal(rows, 2);
}

static void are_consumed(dray_queue *queue)
{
    assert_int_equal(rows_for(queue, "reader"), 0);
}

static void admit(dray_queue *queue)
{
    dray_admission admission = DRAY_ADMISSION_INIT;
    admission.task = "rollout";
    admission.batch_rows = 4;
    admission.version = 1;
    OK(dray_queue_admit(queue, &admission, &error));
}

static int version_five(dray_queue *queue)
{
    return dray_queue_version(queue, 5, &error);
}

static void version_six(dray_queue *queue)
{
    OK(dray_queue_version(queue, 6, &error));
}

/* It goes back to version 1. */
static int admit_again(dray_queue *queue)
{
    dray_admission admission = DRAY_ADMISSION_INIT;
    admission.task = "rollout";
    admission.batch_rows = 4;
    admission.version = 1;
    admission.resume = 1;
    return dray_queue_admit(queue, &admission, &error);
}

static void admit_version_five(dray_queue *queue)
{
    admit(queue);
    OK(version_five(queue));
}

static void is_version_six(dray_queue *queue)
{
    assert_true(status_has(queue, "\"version\":6"));
}

/* Nothing is taken in that another client did after the request had counted: on a connection that
 * broke, after a restart, and after the journal was written anew, also by another coordinator. */
TEST(test_changes_count_once)
{
    static const change changes[] = {
        {insert_four, clear_p, NULL, "\"partition\":\"p\"", insert_two, seal_two},
        {insert_four, seal_four, "\"sealed\":true", NULL, clear_and_insert_four, insert_more},
        {insert_and_clear, clear_p, NULL, NULL, insert_after_done, seal_two},
        {put_keyed, clear_k, NULL, "\"partition\":\"k\"", put_keyed, both_are_there},
        {put_keyed, clear_row_a, "\"rows\":1", NULL, put_keyed, both_are_there},
        {put_and_consume, reset_reader, NULL, NULL, consume_again, are_consumed},
        {admit, version_five, "\"version\":5", NULL, version_six, is_version_six},
        {admit_version_five, admit_again, "\"version\":1", NULL, version_six, is_version_six},
    };
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++)
        for (int way = AT_ONCE; way < WAYS; way++)
            repeat(&changes[i], way);
}

SUITE(NULL, NULL)
