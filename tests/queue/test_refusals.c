/* Tests that use after fork, wrong arguments, malformed messages and false claims of producers are
 * refused. No other client is harmed, and nothing is left behind. */
#include "queue/client/client.h"
#include "queue/three_tasks.h"
#include "seed.h"

#include <sys/mman.h>

static void use_after_fork(void *argument)
{
    dray_queue *queue = argument;
    char *text;
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    int32_t value = 1;
    dray_column_data column = int_column("prompts", &value);
    o.partition = "x";
    o.rows = 1;
    o.columns = &column;
    o.column_count = 1;
    FAILS(DRAY_ECLOSED, dray_queue_status(queue, &text, &error));
    FAILS(DRAY_ECLOSED, dray_queue_insert(queue, &o, NULL, &error));
}

TEST(test_forks_are_refused)
{
    dray_context *context = fixture_context(&f, "fork");
    dray_queue *queue = open_queue(context, "fork", 0, 0);
    insert_ints(queue, "0", 1, 1);
    join(child(use_after_fork, queue));
    insert_ints(queue, "1", 1, 1); /* the parent's is as it was */
    leave(queue, context);
}

/* ---- refusals -------------------------------------------------------------------------------- */

TEST(test_bad_arguments)
{
    dray_context *context = fixture_context(&f, "bad");
    dray_queue *queue = open_queue(context, "bad", 0, 0), *no = NULL;
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = three_tasks;
    options.task_count = 2;
    FAILS(DRAY_EEXIST, dray_queue_open(context, "bad", &options, &no, &error));
    options.task_count = 0;
    options.timeout_ns = 1000000;
    FAILS(DRAY_ETIMEDOUT, dray_queue_open(context, "nowhere", &options, &no, &error));
    options.timeout_ns = 0;
    const dray_queue_task twice[] = {
        {.name = "a", .writes = prompts, .writes_count = 1},
        {.name = "b", .writes = prompts, .writes_count = 1},
    };
    options.tasks = twice;
    options.task_count = 2;
    FAILS(DRAY_EINVALID, dray_queue_open(context, "twice", &options, &no, &error));
    insert_ints(queue, "0", 4, 1);
    dray_claim_options o = want("rolout", 1);
    dray_batch *batch = NULL;
    FAILS(DRAY_ENOENT, dray_queue_claim(queue, &o, &batch, &error));
    assert_non_null(strstr(error.message, "did you mean 'rollout'"));
    o = want("rollout", 0);
    FAILS(DRAY_EINVALID, dray_queue_claim(queue, &o, &batch, &error));
    o = want("rollout", 1);
    o.policy = 77;
    FAILS(DRAY_EINVALID, dray_queue_claim(queue, &o, &batch, &error));
    int32_t values[4] = {0};
    dray_column_data column = int_column("responses", values);
    dray_insert_options in = DRAY_INSERT_OPTIONS_INIT;
    in.partition = "0";
    in.rows = 4;
    in.columns = &column;
    in.column_count = 1;
    FAILS(DRAY_EINVALID, dray_queue_insert(queue, &in, NULL, &error)); /* rollout's column */
    column = int_column("prompts", values);
    column.dtype = DRAY_F32;
    FAILS(DRAY_EDTYPE, dray_queue_insert(queue, &in, NULL, &error));
    column.dtype = 99;
    FAILS(DRAY_EDTYPE, dray_queue_insert(queue, &in, NULL, &error));
    column = int_column("prompts", values);
    column.ndim = 1;
    column.shape[0] = 1;
    FAILS(DRAY_ESHAPE, dray_queue_insert(queue, &in, NULL, &error));
    assert_string_equal(error.message, "column prompts: rows of I32 [] expected, found I32 [1]");
    column.shape[0] = -1;
    FAILS(DRAY_ESHAPE, dray_queue_insert(queue, &in, NULL, &error));
    column = int_column("prompts", NULL);
    FAILS(DRAY_EINVALID, dray_queue_insert(queue, &in, NULL, &error));
    in.column_count = 0;
    in.group_size = 3;
    FAILS(DRAY_EINVALID, dray_queue_insert(queue, &in, NULL, &error));
    in.group_size = 2; /* the partition's are 1 */
    FAILS(DRAY_EINVALID, dray_queue_insert(queue, &in, NULL, &error));
    FAILS(DRAY_EINVALID, dray_queue_seal(queue, "0", 5, &error));
    FAILS(DRAY_ENOENT, dray_queue_seal(queue, "9", 5, &error));
    FAILS(DRAY_ENOENT, dray_queue_clear(queue, "9", &error));
    FAILS(DRAY_EINVALID, dray_queue_clear(queue, "", &error));
    o = want("rollout", 4);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    column = int_column("rewards", values);
    FAILS(DRAY_EINVALID, dray_batch_set(batch, &column, &error));
    uint64_t offsets[5] = {0, 1, 3, 2, 4};
    column = int_column("responses", values);
    column.ndim = 1;
    column.offsets = offsets;
    FAILS(DRAY_EINVALID, dray_batch_set(batch, &column, &error));
    column.bytes = sizeof values;
    const uint64_t outside[][5] = {
        {0, 1, 2, 3, 5}, {0, 0, 0, 0, UINT64_C(1) << 61}, {4, 5, 5, 5, 5}};
    const char *const why[] = {"20 bytes of values expected", "overflow",
                               "20 bytes of values expected"};
    for (int i = 0; i < 3; i++) {
        column.offsets = outside[i];
        FAILS(DRAY_EINVALID, dray_batch_set(batch, &column, &error));
        assert_non_null(strstr(error.message, why[i]));
    }
    FAILS(DRAY_EINVALID, dray_batch_set_tag(batch, 4, "x", 1, &error));
    FAILS(DRAY_EINVALID, dray_batch_fail(batch, NULL, 0, "", &error));
    dray_batch_free(batch);
    insert_ints(queue, "1", 1, 1); /* all is as it was */
    leave(queue, context);
}

/* Random bytes as payload of every message: errors, and the queue lives on. */
TEST(test_bad_messages)
{
    dray_context *context = fixture_context(&f, "noise");
    dray_queue *queue = open_queue(context, "noise", 0, 0);
    insert_ints(queue, "0", 4, 1);
    uint64_t seed = test_seed(), x = seed;
    for (int round = 0; round < test_times(2000); round++) {
        dray__writer w = {0};
        x = x * UINT64_C(6364136223846793005) + 1442695040888963407;
        uint16_t type = (uint16_t)(0x0301 + (x >> 33) % 28);
        if (type == DRAY__MSG_QUEUE_CLOSE || type == DRAY__MSG_QUEUE_END ||
            type == DRAY__MSG_QUEUE_REFILL) /* which may wait */
            continue;
        if (x >> 40 & 1) { /* a right head, so that the rest is looked at */
            dray__put_u32(&w, queue->id);
            dray__put_u64(&w, 0);
            dray__put_u32(&w, 0);
            dray__put_u32(&w, 0);
        }
        for (uint64_t n = (x >> 50) % 90; n; n--) {
            x = x * UINT64_C(6364136223846793005) + 1442695040888963407;
            dray__put_u8(&w, (uint8_t)(x >> 60 ? (x >> 40) & 3 : x >> 50));
        }
        dray__reply reply;
        int rc = dray__call(queue->channel, type, &w, NULL, 0, dray__deadline(20 * DRAY__SECOND),
                            &reply, &error);
        bool waits = rc == DRAY_ETIMEDOUT && type == DRAY__MSG_QUEUE_WAIT; /* as it was asked to */
        if (rc == DRAY_ECLOSED || (rc == DRAY_ETIMEDOUT && !waits) || rc == DRAY_EINTERNAL) {
            fprintf(stderr, "seed %llu, round %d: %s\n", (unsigned long long)seed, round,
                    error.message);
            abort();
        }
        dray__writer_free(&w);
    }
    all_rows(queue, "rollout", "responses", 0, 4);
    leave(queue, context);
}

TEST(test_broken_producers)
{
    if (elsewhere()) /* this is of chunks */
        skip();
    (void)state;
    dray_context *context = fixture_context(&f, "broken");
    dray_queue *queue = open_queue(context, "broken", 0, 0);
    insert_ints(queue, "0", 3, 1);
    dray_batch *batch;
    dray_claim_options o = want("rollout", 3);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    int32_t values[6] = {1, 2, 3, 4, 5, 6};
    uint64_t offsets[4] = {0, 1, 3, 6};
    dray_column_data column = int_column("responses", values);
    column.ndim = 1;
    column.offsets = offsets;
    OK(dray_batch_set(batch, &column, &error));
    dray__batch_output *output = &batch->outputs[0];
    dray__extent right = output->extent;
    const dray__extent wrong[] = {
        {right.chunk, UINT64_MAX - 63, right.bytes, right.offsets},
        {right.chunk, right.values, UINT64_C(1) << 40, right.offsets},
        {right.chunk, right.values, UINT64_MAX, right.offsets},
        {right.chunk, right.values + 1, right.bytes, right.offsets},
        {right.chunk, right.values, right.bytes, (UINT64_C(4) << 20) - 64 + 64},
        {right.chunk, right.values, right.bytes, UINT64_MAX - 63},
        {right.chunk + 2, right.values, right.bytes, right.offsets},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        output->extent = wrong[i];
        int rc = dray_batch_commit(batch, &error);
        assert_true(rc == DRAY_EFORMAT || rc == DRAY_EINVALID);
    }
    output->extent = right;
    uint64_t *written = (uint64_t *)(void *)output->span.at;
    COMMIT(batch);
    /* A producer that changes its offsets after the commit, before anyone reads. */
    static const uint64_t forged[][4] = {{0, 7, 7, 6},
                                         {0, 3, 1, 6},
                                         {0, 1, 3, UINT64_MAX},
                                         {0, 1, 3, UINT64_C(1) << 62},
                                         {9, 1, 3, 6}};
    o = want("reward", 3);
    for (size_t i = 0; i < sizeof forged / sizeof *forged; i++) {
        dray_column read;
        memcpy(written, forged[i], sizeof forged[i]);
        OK(dray_queue_claim(queue, &o, &batch, &error));
        FAILS(DRAY_EFORMAT, dray_batch_column(batch, "responses", &read, &error));
        dray_batch_free(batch);
    }
    memcpy(written, offsets, sizeof offsets);
    int32_t out[6];
    OK(dray_queue_claim(queue, &o, &batch, &error));
    OK(dray_batch_gather(batch, "responses", out, sizeof out, NULL, &error));
    assert_memory_equal(out, values, sizeof out);
    dray_batch_free(batch);
    leave(queue, context);
}

/* Asks for a chunk of a size, and has the keeper hold a shorter one. */
static void keep_less(dray_queue *queue, const queue_fixture *of, uint64_t id)
{
    const dray__chunk_wish wish = {.id = id, .key = 5, .size = 1 << 20, .least = 1 << 20};
    const dray__storing message = {.wishes = &wish, .wish_count = 1};
    dray__keeper_link link;
    void *base;
    int fd;
    dray__put_fields(dray__queue_begin(queue), &dray__storing_fields, &message);
    OK(dray__queue_call(queue, DRAY__MSG_QUEUE_CHUNK, dray__deadline(20 * DRAY__SECOND), NULL,
                        &error));
    OK(dray__segment_new(4096, &base, &fd, &error));
    OK(dray__keeper_link_init(&link, of->keeper, 20 * DRAY__SECOND, &error));
    link.era = queue->era;
    OK(dray__keeper_put(&link, id, 5, 4096, fd, &error));
    dray__keeper_link_free(&link);
    close(fd);
    munmap(base, 4096);
}

/* A producer that keeps less than it says loses its commit, and does not stop the journal. */
TEST(test_chunks_that_are_shorter)
{
    if (elsewhere()) /* this is of chunks */
        skip();
    (void)state;
    queue_fixture own = {.durable = true};
    fixture_up(&own);
    dray_context *context = fixture_context(&own, "short");
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.durability = DRAY_DURABILITY_JOURNAL;
    dray_queue *queue = open_three(context, "short", options);
    insert_ints(queue, "0", 3, 1);
    dray_batch *batch;
    dray_claim_options o = want("rollout", 3);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    set_ints(batch, "responses", 0);
    keep_less(queue, &own, 77);
    batch->outputs[0].extent.chunk = 77;
    batch->outputs[0].extent.values = 1 << 19;
    FAILS(DRAY_EDEAD, dray_batch_commit(batch, &error));
    dray_batch_free(batch);
    insert_ints(queue, "1", 3, 1);
    fixture_restart(&own);
    OK(dray_queue_seal(queue, "1", 3, &error));
    leave(queue, context);
    fixture_down(&own);
}

TEST(test_no_descriptors_are_left)
{
    int mine = 0, coordinator = 0, keeper = 0, before = kept_chunks(&f); /* of earlier tests */
    for (int round = 0; round < 6; round++) {
        dray_context *context = fixture_context(&f, "descriptors");
        dray_queue *queue = open_queue(context, "descriptors", 0, 0);
        insert_ints(queue, "0", 4, 1);
        dray_batch *batch;
        dray_column column;
        dray_claim_options o = want("rollout", 4);
        OK(dray_queue_claim(queue, &o, &batch, &error));
        OK(dray_batch_column(batch, "prompts", &column, &error));
        dray_batch_free(batch);
        OK(dray_queue_clear(queue, "0", &error));
        leave(queue, context);
        wait_for_chunks(&f, before);
        if (round == 2) { /* what is opened once is open by now */
            mine = count_fds(getpid(), "");
            coordinator = count_fds(f.coordinator_pid, "");
            keeper = count_fds(f.keeper_pid, "");
        }
    }
    coordinator += elsewhere(); /* who drops what a store holds may connect to it only later */
    for (int i = 0; i < 2000 && count_fds(f.coordinator_pid, "") > coordinator; i++)
        usleep(5000); /* closing is not waited for */
    for (int i = 0; i < 2000 && count_fds(f.keeper_pid, "") > keeper; i++)
        usleep(5000);
    assert_int_equal(count_fds(getpid(), ""), mine);
    assert_true(count_fds(f.coordinator_pid, "") <= coordinator);
    assert_true(count_fds(f.keeper_pid, "") <= keeper);
}

TEST(test_no_keeper)
{
    if (elsewhere()) /* this is of chunks */
        skip();
    (void)state;
    queue_fixture own = {.without_keeper = true};
    fixture_up(&own);
    dray_context *context = fixture_context(&own, "alone");
    dray_queue *queue = open_queue(context, "alone", 0, 0);
    int32_t value = 1;
    dray_column_data column = int_column("prompts", &value);
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = "0";
    o.rows = 1;
    OK(dray_queue_insert(queue, &o, NULL, &error));
    o.columns = &column;
    o.column_count = 1;
    FAILS(DRAY_EUNSUPPORTED, dray_queue_insert(queue, &o, NULL, &error));
    assert_non_null(strstr(error.message, "no keeper"));
    char *text;
    OK(dray_queue_status(queue, &text, &error));
    assert_non_null(strstr(text, "\"chunks\":0")); /* it was given up again */
    free(text);
    leave(queue, context);
    fixture_down(&own);
}

SUITE(up, down)
