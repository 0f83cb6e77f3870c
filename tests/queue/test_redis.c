/* Tests queues whose bytes a real redis-server holds: the values that are read, keys that are made
 * and dropped, and a server that is killed, hangs, is full, or refuses the client. */
#include "queue/redis.h"

#include <time.h>

static const char *const answer_needs[] = {"prompts", "extra"}, *const answer_writes[] = {
                                                                    "answers"};
static const char *const learn_needs[] = {"prompts", "answers"};
static const dray_queue_task tasks[] = {
    {.name = "answer",
     .needs = answer_needs,
     .needs_count = 2,
     .writes = answer_writes,
     .writes_count = 1},
    {.name = "learn", .needs = learn_needs, .needs_count = 2},
};

static dray_queue *open_named(dray_context *context, const char *name, const char *address)
{
    dray_queue *queue;
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.tasks = tasks;
    o.task_count = 2;
    o.backend = DRAY_BACKEND_REDIS;
    o.backend_address = address;
    OK(dray_queue_open(context, name, &o, &queue, &error));
    return queue;
}

static dray_queue *open_queue(dray_context *context, const char *address)
{
    return open_named(context, "q", address);
}

/* Row i: a ragged prompt of bytes of some length, and `bytes` fixed ones in `extra`. */
static uint64_t prompt_length(uint32_t row)
{
    return row % 3 == 2 ? 0 : row * 37 % 1000 + 1;
}

static uint8_t byte_of(uint32_t row, uint64_t i)
{
    return (uint8_t)(row * 131 + i * 7 + i / 251);
}

static int insert_rows(dray_queue *queue, const char *partition, uint32_t rows, uint32_t bytes,
                       uint64_t refill, dray_error *said)
{
    uint64_t *offsets = calloc(rows + 1, 8), total = 3;
    offsets[0] = 3; /* not from the beginning of the values */
    for (uint32_t i = 0; i < rows; i++)
        offsets[i + 1] = total += prompt_length(i);
    uint8_t *prompts = malloc(total), *extra = malloc((size_t)rows * bytes + 1);
    for (uint32_t i = 0; i < rows; i++) {
        for (uint64_t k = 0; k < prompt_length(i); k++)
            prompts[offsets[i] + k] = byte_of(i, k);
        for (uint64_t k = 0; k < bytes; k++)
            extra[(uint64_t)i * bytes + k] = byte_of(i + 7, k);
    }
    dray_column_data columns[] = {
        {.name = "prompts",
         .dtype = DRAY_U8,
         .content = DRAY_CONTENT_BYTES,
         .ndim = 1,
         .offsets = offsets,
         .values = prompts},
        {.name = "extra", .dtype = DRAY_U8, .ndim = 1, .shape = {bytes}, .values = extra},
    };
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = partition;
    o.rows = rows;
    o.columns = columns;
    o.column_count = 2;
    o.refill = refill;
    int rc = dray_queue_insert(queue, &o, NULL, said);
    free(offsets);
    free(prompts);
    free(extra);
    return rc;
}

static int claim(dray_queue *queue, const char *task, uint32_t count, dray_batch **out,
                 dray_error *said)
{
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = task;
    o.count = count;
    o.up_to = 1;
    o.timeout_ns = 10 * DRAY__SECOND;
    return dray_queue_claim(queue, &o, out, said);
}

static void check_prompts(dray_batch *batch)
{
    dray_column prompts;
    OK(dray_batch_column(batch, "prompts", &prompts, &error));
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++) {
        uint32_t row = dray_batch_row(batch, i)->slot;
        const uint8_t *cell = prompts.cells[i];
        assert_int_equal(prompts.lengths[i], prompt_length(row));
        for (uint64_t k = 0; k < prompts.lengths[i]; k++)
            if (cell[k] != byte_of(row, k))
                fail_msg("prompt of row %u differs at byte %llu", row, (unsigned long long)k);
    }
}

static void check_extra(dray_batch *batch, uint32_t bytes)
{
    dray_column extra;
    OK(dray_batch_column(batch, "extra", &extra, &error));
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++) {
        uint32_t row = dray_batch_row(batch, i)->slot;
        for (uint64_t k = 0; k < bytes; k++)
            if (((const uint8_t *)extra.cells[i])[k] != byte_of(row + 7, k))
                fail_msg("extra of row %u differs at byte %llu", row, (unsigned long long)k);
    }
}

/* Answers rows with doubles that begin at an odd place of the value. */
static int answer(dray_batch *batch, dray_error *said)
{
    uint32_t rows = dray_batch_rows(batch);
    uint64_t *offsets = calloc(rows + 1, 8);
    double *values = calloc(rows * 3 + 1, sizeof *values);
    for (uint32_t i = 0; i < rows; i++) {
        uint32_t row = dray_batch_row(batch, i)->slot;
        offsets[i + 1] = offsets[i] + row % 4;
        for (uint32_t k = 0; k < row % 4; k++)
            values[offsets[i] + k] = row + k / 8.0;
    }
    dray_column_data column = {
        .name = "answers", .dtype = DRAY_F64, .ndim = 1, .offsets = offsets, .values = values};
    int rc = dray_batch_set(batch, &column, said);
    free(offsets);
    free(values);
    return rc ? rc : dray_batch_commit(batch, said);
}

static void check_answers(dray_batch *batch)
{
    dray_column answers;
    OK(dray_batch_column(batch, "answers", &answers, &error));
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++) {
        uint32_t row = dray_batch_row(batch, i)->slot;
        assert_int_equal(answers.lengths[i], row % 4);
        for (uint32_t k = 0; k < row % 4; k++)
            assert_true(((const double *)answers.cells[i])[k] == row + k / 8.0);
    }
}

static void run_tasks(dray_queue *queue, uint32_t rows, uint32_t at_once, uint32_t bytes)
{
    dray_batch *batch;
    for (uint32_t done = 0; done < rows; dray_batch_free(batch)) {
        OK(claim(queue, "answer", at_once, &batch, &error));
        check_extra(batch, bytes);
        check_prompts(batch);
        OK(answer(batch, &error));
        done += dray_batch_rows(batch);
    }
    for (uint32_t done = 0; done < rows; dray_batch_free(batch)) {
        OK(claim(queue, "learn", at_once, &batch, &error));
        check_prompts(batch);
        check_answers(batch);
        OK(dray_batch_commit(batch, &error));
        done += dray_batch_rows(batch);
    }
}

static void round_trip_with(const char *address, redis_server *servers, int count)
{
    char store[420];
    queue_fixture f = {.without_keeper = true, .stores = {store}};
    snprintf(store, sizeof store, "redis:%s", address);
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "worker");
    dray_queue *queue;
    const struct {
        const char *partition;
        uint32_t rows, at_once, bytes;
    } cases[] = {{"a", 1, 1, 1},
                 {"b", 100, 7, 13},
                 {"c", 64, 64, 4099},
                 {"d", 9, 2, 600000},
                 {"e", 3, 1, (2 << 20) + 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        queue = open_named(context, cases[i].partition, address);
        OK(insert_rows(queue, cases[i].partition, cases[i].rows, cases[i].bytes, 0, &error));
        for (int s = 0; s < count; s++)
            assert_true(redis_keys(&servers[s]) > 0 || count > 1);
        run_tasks(queue, cases[i].rows, cases[i].at_once, cases[i].bytes);
        for (int s = 0; s < count; s++)
            redis_wait_keys(&servers[s], 0); /* all tasks are done: freed */
        dray_queue_close(queue);
    }
    queue = open_queue(context, address);
    OK(insert_rows(queue, "cleared", 50, 600000, 0, &error));
    for (int s = 0; s < count; s++)
        assert_true(redis_keys(&servers[s]) > 0);
    OK(dray_queue_clear(queue, "cleared", &error));
    for (int s = 0; s < count; s++)
        redis_wait_keys(&servers[s], 0);
    OK(insert_rows(queue, "left", 20, 600000, 0, &error));
    leave(queue, context);
    fixture_down(&f);
    for (int s = 0; s < count; s++)
        assert_int_equal(redis_keys(&servers[s]), 0); /* the queue took them with it */
}

static dray_queue *begin(redis_server *r, const char *const *options, queue_fixture *f,
                         dray_context **context)
{
    *context = redis_begin(r, options, f);
    return open_queue(*context, r->address);
}

TEST(columns_come_back_and_keys_go)
{
    redis_server r;
    redis_up(&r, NULL);
    round_trip_with(r.address, &r, 1);
    redis_down(&r);
}

TEST(several_servers_share)
{
    redis_server r[3];
    char addresses[400];
    for (int i = 0; i < 3; i++)
        redis_up(&r[i], NULL);
    snprintf(addresses, sizeof addresses, "%s,%s, %s", r[0].address, r[1].address, r[2].address);
    round_trip_with(addresses, r, 3);
    for (int i = 0; i < 3; i++)
        redis_down(&r[i]);
}

TEST(what_redis_lost_is_refilled)
{
    redis_server r;
    queue_fixture f = {.without_keeper = true};
    dray_batch *batch;
    dray_column column;
    dray_context *context;
    dray_queue *queue = begin(&r, NULL, &f, &context);
    OK(insert_rows(queue, "p", 6, 100, 0, &error));
    OK(dray_queue_seal(queue, "p", 6, &error));
    OK(claim(queue, "answer", 4, &batch, &error));
    redis_restart(&r, NULL);
    FAILS(DRAY_EGONE, dray_batch_column(batch, "extra", &column, &error));
    assert_non_null(strstr(error.message, "redis lost the bytes of column extra"));
    assert_non_null(strstr(error.message, "4 of 4 rows"));
    dray_batch_free(batch);
    OK(claim(queue, "answer", 4, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), 2);
    FAILS(DRAY_EGONE, dray_batch_column(batch, "prompts", &column, &error));
    dray_batch_free(batch);
    for (uint32_t i = 0; i < 6; i++) { /* rows of the same length as the lost */
        dray_refill refill = DRAY_REFILL_INIT;
        OK(dray_queue_refill_wait(queue, DRAY__SECOND, &refill, &error));
        assert_int_equal(refill.cause, DRAY_LOSS_BYTES);
        assert_non_null(strstr(refill.reason, "redis lost the bytes"));
        OK(insert_rows(queue, "p", refill.rows, 100, refill.id, &error));
    }
    for (uint32_t done = 0; done < 6; dray_batch_free(batch)) {
        OK(claim(queue, "answer", 6, &batch, &error));
        OK(dray_batch_column(batch, "extra", &column, &error));
        OK(answer(batch, &error));
        done += dray_batch_rows(batch);
    }
    redis_end(&r, &f, context, queue);
}

static const char *const with_log[] = {"--appendonly", "yes", "--appendfsync", "always", NULL};

TEST(with_its_log_nothing_is_lost)
{
    redis_server r;
    queue_fixture f = {.without_keeper = true};
    dray_context *context;
    dray_queue *queue = begin(&r, with_log, &f, &context);
    for (int i = 0; i < 3; i++) {
        char name[16];
        snprintf(name, sizeof name, "p%d", i);
        OK(insert_rows(queue, name, 40, 5000, 0, &error));
        redis_restart(&r, with_log);
        run_tasks(queue, 40, 16, 5000);
    }
    redis_wait_keys(&r, 0);
    redis_end(&r, &f, context, queue);
}

/* The server comes back a second after the put began. */
static void restart_later(void *server)
{
    redis_server *r = server;
    usleep(1000000);
    r->pid = 0;
    redis_start(r, NULL);
    prctl(PR_SET_PDEATHSIG, 0);
    pause();
}

TEST(calls_wait_for_a_server_that_comes_back)
{
    redis_server r;
    queue_fixture f = {.without_keeper = true};
    dray_context *context;
    dray_queue *queue = begin(&r, NULL, &f, &context);
    OK(insert_rows(queue, "a", 4, 100, 0, &error));
    redis_kill(&r);
    pid_t later = child(restart_later, &r);
    OK(insert_rows(queue, "b", 4, 100, 0, &error));
    assert_true(redis_keys(&r) > 0);
    leave(queue, context);
    fixture_down(&f);
    fixture_end(later, SIGKILL); /* and its server with it */
    r.pid = later;
    char command[128];
    snprintf(command, sizeof command, "rm -rf %.63s", r.folder);
    assert_int_equal(system(command), 0);
}

TEST(nothing_hangs_past_its_deadline)
{
    redis_server r;
    queue_fixture f = {.without_keeper = true, .stores = {r.store}};
    dray_batch *batch;
    dray_column column;
    redis_up(&r, NULL);
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "worker");
    dray_queue *queue;
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.tasks = tasks;
    o.task_count = 2;
    o.backend = DRAY_BACKEND_REDIS;
    o.backend_address = r.address;
    o.timeout_ns = DRAY__SECOND;
    OK(dray_queue_open(context, "q", &o, &queue, &error));
    OK(insert_rows(queue, "p", 5, 3000000, 0, &error));
    OK(claim(queue, "answer", 5, &batch, &error));
    kill(r.pid, SIGSTOP);
    int64_t before = dray__now();
    FAILS(DRAY_ETIMEDOUT, dray_batch_column(batch, "extra", &column, &error));
    assert_non_null(strstr(error.message, "did not answer in time"));
    FAILS(DRAY_ETIMEDOUT, insert_rows(queue, "r", 5, 3000000, 0, &error));
    assert_true(dray__now() - before <
                8 * DRAY__SECOND);              /* two seconds, and room for a busy machine */
    OK(dray_queue_seal(queue, "p", 5, &error)); /* the controller is as quick as ever */
    kill(r.pid, SIGCONT);
    check_extra(batch, 3000000);
    OK(answer(batch, &error));
    dray_batch_free(batch);
    redis_kill(&r);
    before = dray__now();
    FAILS(DRAY_ETIMEDOUT, insert_rows(queue, "r", 5, 100, 0, &error));
    assert_non_null(strstr(error.message, "not reached in time"));
    assert_true(dray__now() - before < 5 * DRAY__SECOND);
    redis_end(&r, &f, context, queue);
}

TEST(a_full_server_is_an_error_and_passes)
{
    redis_server r;
    queue_fixture f = {.without_keeper = true};
    static const char *const small[] = {"--maxmemory", "12mb", "--maxmemory-policy", "noeviction",
                                        NULL};
    dray_context *context;
    dray_queue *queue = begin(&r, small, &f, &context);
    int rc = DRAY_OK, parts = 0;
    char name[16];
    for (; !rc && parts < 100; parts++) {
        snprintf(name, sizeof name, "p%d", parts);
        rc = insert_rows(queue, name, 4, 500000, 0, &error);
    }
    FAILS(DRAY_EFULL, rc);
    assert_non_null(strstr(error.message, "out of memory (raise maxmemory)"));
    for (int i = 0; i < parts - 1; i++) {
        snprintf(name, sizeof name, "p%d", i);
        OK(dray_queue_clear(queue, name, &error));
    }
    for (int i = 0; (rc = insert_rows(queue, "again", 4, 500000, 0, &error)) && i < 100; i++)
        usleep(50000); /* until what was cleared is dropped */
    OK(rc);
    run_tasks(queue, 4, 4, 500000);
    redis_wait_keys(&r, 0); /* also what the failed insert had written so far */
    redis_end(&r, &f, context, queue);
}

TEST(passwords_are_asked_for)
{
    redis_server r;
    queue_fixture f = {.without_keeper = true, .stores = {r.store}};
    char path[128];
    static const char *const locked[] = {"--requirepass", "open sesame", NULL};
    redis_up(&r, locked);
    snprintf(path, sizeof path, "%s/password", r.folder);
    FILE *file = fopen(path, "w");
    fputs("open sesame\n", file);
    fclose(file);
    setenv("DRAY_REDIS_PASSWORD_FILE", path, 1);
    fixture_up(&f); /* the coordinator knows it */
    unsetenv("DRAY_REDIS_PASSWORD_FILE");
    dray_context *context = fixture_context(&f, "worker");
    dray_queue *queue = open_queue(context, r.address);
    FAILS(DRAY_EPERM, insert_rows(queue, "p", 4, 100, 0, &error));
    assert_non_null(strstr(error.message, "a password is needed"));
    dray_queue_close(queue);
    setenv("DRAY_REDIS_PASSWORD", "sesame", 1);
    queue = open_queue(context, r.address);
    FAILS(DRAY_EPERM, insert_rows(queue, "p", 4, 100, 0, &error));
    assert_non_null(strstr(error.message, "wrong password"));
    assert_null(strstr(error.message, "sesame"));
    dray_queue_close(queue);
    setenv("DRAY_REDIS_PASSWORD", "open sesame", 1);
    queue = open_queue(context, r.address);
    OK(insert_rows(queue, "p", 4, 100, 0, &error));
    run_tasks(queue, 4, 4, 100);
    dray_queue_close(queue);
    unsetenv("DRAY_REDIS_PASSWORD");
    setenv("DRAY_REDIS_PASSWORD_FILE", "/nonexistent/password", 1);
    dray_queue_options attach = DRAY_QUEUE_OPTIONS_INIT;
    FAILS(DRAY_ESYS, dray_queue_open(context, "q", &attach, &queue, &error));
    unsetenv("DRAY_REDIS_PASSWORD_FILE");
    dray_close(context);
    fixture_down(&f);
    redis_down(&r);
}

typedef struct producer {
    const queue_fixture *f;
    const char *address;
    int ready;
} producer;

/* Commits some, writes more, and is killed before it commits that. */
static void produce_and_wait(void *argument)
{
    const producer *p = argument;
    dray_batch *batch;
    dray_context *context = fixture_context(p->f, "producer");
    dray_queue *queue = open_queue(context, p->address);
    OK(insert_rows(queue, "p", 8, 2000, 0, &error));
    OK(claim(queue, "answer", 8, &batch, &error));
    uint64_t offsets[9] = {0};
    dray_column_data column = {.name = "answers", .dtype = DRAY_F64, .ndim = 1, .offsets = offsets};
    OK(dray_batch_set(batch, &column, &error));
    if (write(p->ready, "x", 1) != 1)
        _exit(1);
    pause();
}

TEST(what_a_dead_producer_left_goes)
{
    redis_server r;
    queue_fixture f = {.without_keeper = true};
    int ready[2];
    char byte;
    dray_context *context;
    dray_queue *queue = begin(&r, NULL, &f, &context);
    assert_int_equal(pipe(ready), 0);
    pid_t pid = child(produce_and_wait, &(producer){&f, r.address, ready[1]});
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(redis_keys(&r), 3);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    redis_wait_keys(&r, 2); /* what it committed stays */
    run_tasks(queue, 8, 8, 2000);
    redis_wait_keys(&r, 0);
    close(ready[0]);
    close(ready[1]);
    (void)error;
    redis_end(&r, &f, context, queue);
}

TEST(bad_backends_are_refused)
{
    queue_fixture f = {.without_keeper = true, .stores = {"redis:unix:/nonexistent/socket"}};
    dray_queue *queue, *other;
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "worker");
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.tasks = tasks;
    o.task_count = 2;
    o.backend = 77;
    FAILS(DRAY_EINVALID, dray_queue_open(context, "q", &o, &queue, &error));
    o.backend = DRAY_BACKEND_REDIS;
    o.backend_address = "tcp:nowhere";
    FAILS(DRAY_EPERM, dray_queue_open(context, "q", &o, &queue, &error));
    assert_non_null(strstr(error.message, "no store of this coordinator"));
    o.backend_address = NULL; /* there is one: nobody connects yet */
    OK(dray_queue_open(context, "q", &o, &queue, &error));
    o.backend_address = "unix:/nonexistent/socket";
    OK(dray_queue_open(context, "q", &o, &other, &error));
    dray_queue_close(other);
    o.backend_address = "unix:/nonexistent/other";
    FAILS(DRAY_EEXIST, dray_queue_open(context, "q", &o, &other, &error));
    o.backend = DRAY_BACKEND_BUILTIN;
    o.backend_address = NULL;
    FAILS(DRAY_EEXIST, dray_queue_open(context, "q", &o, &other, &error));
    leave(queue, context);
    fixture_down(&f);
}

int main(void)
{
    if (!have_program("redis-server") || !have_program("redis-cli")) {
        puts("skipped: redis-server and redis-cli are needed");
        return 77;
    }
    return suite_run(NULL, NULL);
}
