/* Tests provisional commits. Their rows are kept until a checkpoint covers them, and can be
 * consumed again by a run that goes back to a checkpoint. */
#include "base/hash.h"
#include "queue/messages.h"
#include "queue/three_tasks.h"

static const char *const trainers[] = {"actor"};

static dray_queue_options trainer_options(void)
{
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = three_tasks;
    options.task_count = 3;
    options.provisional = trainers;
    options.provisional_count = 1;
    return options;
}

static dray_queue *open_provisional(dray_context *context, const char *name)
{
    return open_three(context, name, trainer_options());
}

static void make_partition(dray_queue *queue, const char *name, uint32_t rows)
{
    insert_ints(queue, name, rows, 1);
    OK(dray_queue_seal(queue, name, rows, &error));
}

/* The task commits all rows of the partition; version < 0: without one. */
static void commit_all(dray_queue *queue, const char *task, const char *output,
                       const char *partition, double version)
{
    dray_batch *batch = claim_of(queue, task, partition, 64);
    if (output)
        set_ints(batch, output, 0);
    for (uint32_t i = 0; version >= 0 && i < dray_batch_rows(batch); i++)
        OK(dray_batch_set_tag(batch, i, DRAY_TAG_VERSION, version, &error));
    COMMIT(batch);
}

static void make_and_train(dray_queue *queue, const char *partition, double version)
{
    commit_all(queue, "rollout", "responses", partition, version);
    commit_all(queue, "reward", "rewards", partition, -1);
    commit_all(queue, "actor", NULL, partition, -1);
}

/* ---- capacity -------------------------------------------------------------------------------- */

enum { BATCH = 4, OPEN = 2, CHECKPOINT = 3, STEPS = 9 };
enum { NEEDED = (OPEN + CHECKPOINT - 1) * BATCH };

static void name_of(int step, char name[16])
{
    snprintf(name, 16, "step%d", step);
}

static void insert_at_once(dray_queue *queue, int step)
{
    char name[16];
    int32_t values[BATCH] = {0};
    dray_column_data column = int_column("prompts", values);
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    name_of(step, name);
    o.partition = name;
    o.rows = BATCH;
    o.row_bytes = 64;
    o.columns = &column;
    o.column_count = 1;
    o.timeout_ns = 0; /* whoever waits here waits for ever: this is the only thread */
    OK(dray_queue_insert(queue, &o, NULL, &error));
    OK(dray_queue_seal(queue, name, BATCH, &error));
}

/* The driver's way: staleness + 1 batches first, then one for each finished step; a checkpoint
 * every three steps. */
static void run_steps(dray_queue *queue)
{
    for (int step = 0; step < OPEN; step++)
        insert_at_once(queue, step);
    for (int step = 0; step < STEPS; step++) {
        char name[16];
        name_of(step, name);
        make_and_train(queue, name, step);
        OK(dray_queue_wait(queue, name, NULL, 0, &error));
        OK(dray_queue_clear(queue, name, &error));
        if ((step + 1) % CHECKPOINT == 0) {
            void *cursor;
            size_t size;
            OK(dray_queue_cursor(queue, (uint64_t)step + 1, &cursor, &size, &error));
            OK(dray_queue_covered(queue, cursor, size, &error));
            free(cursor);
        }
        insert_at_once(queue, step + OPEN);
    }
}

TEST_WITHIN(test_minimum_capacity, up, down)
{
    dray_context *context = fixture_context(&f, "capacity");
    dray_queue_options options = trainer_options();
    options.batch_rows = BATCH;
    options.open_batches = OPEN;
    options.checkpoint_batches = CHECKPOINT;
    options.row_bytes = 64;
    options.capacity_rows = NEEDED - 1;
    dray_queue *queue;
    FAILS(DRAY_EFULL, dray_queue_open(context, "rows", &options, &queue, &error));
    assert_non_null(strstr(error.message,
                           "2 open batches + 2 that wait for a checkpoint, of 4 rows, "
                           "are 16 rows; its capacity is 15"));
    options.capacity_rows = NEEDED;
    options.capacity_bytes = NEEDED * 64 - 1;
    FAILS(DRAY_EFULL, dray_queue_open(context, "rows", &options, &queue, &error));
    assert_non_null(strstr(error.message, "are 1024; its capacity is 1023"));
    options.capacity_bytes = NEEDED * 64;
    OK(dray_queue_open(context, "rows", &options, &queue, &error));
    run_steps(queue);
    leave(queue, context);
}

/* ---- covering -------------------------------------------------------------------------------- */

TEST_WITHIN(test_rows_are_kept, up, down)
{
    dray_context *context = fixture_context(&f, "kept");
    dray_queue_options options = trainer_options();
    dray_queue *queue;
    OK(dray_queue_open(context, "kept", &options, &queue, &error));
    /* The order in which tasks are given does not matter, which are provisional does. */
    static const char *const other[] = {"reward"};
    dray_queue_task turned[] = {three_tasks[2], three_tasks[0], three_tasks[1]};
    dray_queue *second;
    options.tasks = turned;
    OK(dray_queue_open(context, "kept", &options, &second, &error));
    dray_queue_close(second);
    options.provisional = other;
    FAILS(DRAY_EEXIST, dray_queue_open(context, "kept", &options, &second, &error));
    make_partition(queue, "0", 4);
    make_partition(queue, "1", 4);
    make_and_train(queue, "0", 0);
    dray_claim_options o = want("actor", 4);
    dray_batch *batch;
    o.partition = "0";
    FAILS(DRAY_EEND, dray_queue_claim(queue, &o, &batch, &error));
    OK(dray_queue_wait(queue, "0", NULL, 0, &error));
    void *cursor;
    size_t size;
    OK(dray_queue_cursor(queue, 1, &cursor, &size, &error));
    make_and_train(queue, "1", 0);
    OK(dray_queue_clear(queue, "0", &error));
    OK(dray_queue_clear(queue, "1", &error));
    assert_true(status_has(queue, "\"rows\":8"));
    assert_true(status_has(queue, "\"uncovered\":4,\"clearing\":true"));
    OK(dray_queue_covered(queue, cursor, size, &error));
    OK(dray_queue_covered(queue, cursor, size, &error));
    assert_true(status_has(queue, "\"rows\":4")); /* of partition 1 */
    OK(dray_queue_wait(queue, "0", NULL, 0, &error));
    free(cursor);
    OK(dray_queue_cursor(queue, 2, &cursor, &size, &error));
    OK(dray_queue_covered(queue, cursor, size, &error));
    assert_true(status_has(queue, "\"rows\":0"));
    /* What is no cursor. */
    ((char *)cursor)[20] ^= 1;
    FAILS(DRAY_ECHECKSUM, dray_queue_covered(queue, cursor, size, &error));
    FAILS(DRAY_ECHECKSUM, dray_queue_resume(queue, cursor, size - 1, NULL, &error));
    FAILS(DRAY_EFORMAT, dray_queue_resume(queue, "cursor", 6, NULL, &error));
    free(cursor);
    leave(queue, context);
}

/* ---- going back ------------------------------------------------------------------------------ */

TEST_WITHIN(test_resume, up, down)
{
    dray_context *context = fixture_context(&f, "resume");
    dray_queue *queue = open_provisional(context, "resume");
    static const char *const names[] = {"0", "1", "2", "3"};
    for (int i = 0; i < 4; i++)
        make_partition(queue, names[i], 4);
    make_and_train(queue, "0", 0);
    void *cursor, *later;
    size_t size;
    OK(dray_queue_cursor(queue, 1, &cursor, &size, &error)); /* version 1 is made of step 0 */
    make_and_train(queue, "1", 1);
    make_and_train(queue, "2", 2);
    OK(dray_queue_clear(queue, "1", &error));
    OK(dray_queue_cursor(queue, 3, &later, &size, &error));
    dray_batch *old = claim_of(queue, "rollout", "3", 2), *new = claim_of(queue, "rollout", "3", 2);
    /* The trainer dies after step 2 and starts again from version 1. */
    uint32_t epoch = 0;
    OK(dray_queue_resume(queue, cursor, size, &epoch, &error));
    assert_int_equal(epoch, 1);
    FAILS(DRAY_ESTALE, dray_queue_covered(queue, later, size, &error));
    FAILS(DRAY_ESTALE, dray_queue_resume(queue, later, size, NULL, &error));
    /* Step 1 is trained again, of the same samples; those of version 2 are replaced. */
    dray_batch *again = claim_of(queue, "actor", "1", 4);
    assert_int_equal(dray_batch_rows(again), 4);
    assert_int_equal(dray_batch_row(again, 0)->attempt, 2);
    dray_refill refill = DRAY_REFILL_INIT;
    for (int i = 0; i < 4; i++) {
        OK(dray_queue_refill_wait(queue, 0, &refill, &error));
        assert_int_equal(refill.cause, DRAY_LOSS_ROLLED_BACK);
        assert_string_equal(refill.partition, "2");
        refill_ints(queue, &refill, 1);
    }
    FAILS(DRAY_ETIMEDOUT, dray_queue_refill_wait(queue, 0, &refill, &error));
    /* What engines hold may still be of weights that exist, or not. */
    set_ints(old, "responses", 0);
    OK(dray_batch_set_tag(old, 0, DRAY_TAG_VERSION, 1, &error));
    COMMIT(old);
    set_ints(new, "responses", 0);
    OK(dray_batch_set_tag(new, 0, DRAY_TAG_VERSION, 2, &error));
    FAILS(DRAY_ESTALE, dray_batch_commit(new, &error));
    dray_batch_free(new);
    commit_all(queue, "rollout", "responses", "3", 2); /* made by the version 2 of this epoch */
    /* A claim of the trainer that was under way is void. */
    OK(dray_queue_resume(queue, cursor, size, &epoch, &error));
    assert_int_equal(epoch, 2);
    FAILS(DRAY_ESTALE, dray_batch_commit(again, &error));
    dray_batch_free(again);
    commit_all(queue, "actor", NULL, "1", -1);
    FAILS(DRAY_ETIMEDOUT, dray_queue_wait(queue, "2", NULL, 0, &error));
    free(cursor);
    free(later);
    leave(queue, context);
}

/* What a trainer said of the rows beside training them is undone, too: they are as if it had never
 * begun them. */
TEST_WITHIN(test_tags_are_undone, up, down)
{
    dray_context *context = fixture_context(&f, "tags");
    dray_queue *queue = open_provisional(context, "tags");
    make_partition(queue, "0", 4);
    commit_all(queue, "rollout", "responses", "0", 0);
    commit_all(queue, "reward", "rewards", "0", -1);
    void *cursor;
    size_t size;
    OK(dray_queue_cursor(queue, 1, &cursor, &size, &error));
    for (int times = 0; times < 3; times++) {
        dray_batch *batch = claim_of(queue, "actor", "0", 4);
        double value;
        for (uint32_t i = 0; i < 4; i++) {
            assert_int_equal(dray_batch_row(batch, i)->slot, i);
            FAILS(DRAY_ENOENT, dray_batch_tag(batch, i, "loss", &value, &error));
            OK(dray_batch_set_tag(batch, i, "loss", 0.5, &error));
        }
        COMMIT(batch);
        if (times < 2)
            OK(dray_queue_resume(queue, cursor, size, NULL, &error));
    }
    OK(dray_queue_wait(queue, "0", NULL, 0, &error));
    free(cursor);
    leave(queue, context);
}

/* A run that goes back to before its end has steps to make again. */
TEST_WITHIN(test_an_end_is_undone, up, down)
{
    dray_context *context = fixture_context(&f, "end");
    dray_queue *queue = open_provisional(context, "end");
    void *cursor;
    size_t size;
    OK(dray_queue_cursor(queue, 1, &cursor, &size, &error));
    make_partition(queue, "0", 4);
    make_and_train(queue, "0", 1);
    OK(dray_queue_end(queue, &error));
    dray_claim_options o = want("rollout", 1);
    dray_batch *batch;
    FAILS(DRAY_EEND, dray_queue_claim(queue, &o, &batch, &error));
    OK(dray_queue_resume(queue, cursor, size, NULL, &error));
    make_partition(queue, "1", 4); /* DRAY_EEND before */
    make_and_train(queue, "1", 1);
    commit_all(queue, "actor", NULL, "0", -1);
    OK(dray_queue_end(queue, &error));
    FAILS(DRAY_EEND, dray_queue_claim(queue, &o, &batch, &error));
    free(cursor);
    leave(queue, context);
}

TEST_WITHIN(test_refusals, up, down)
{
    dray_context *context = fixture_context(&f, "refusals");
    static const char *const writer[] = {"reward"}, *const nobody[] = {"nobody"};
    dray_queue_options options = trainer_options();
    dray_queue *queue;
    options.provisional = writer;
    FAILS(DRAY_EINVALID, dray_queue_open(context, "refusals", &options, &queue, &error));
    assert_non_null(strstr(error.message, "writes columns"));
    options.provisional = nobody;
    FAILS(DRAY_EINVALID, dray_queue_open(context, "refusals", &options, &queue, &error));
    options = trainer_options();
    options.provisional_count = 0;
    OK(dray_queue_open(context, "refusals", &options, &queue, &error));
    void *cursor;
    size_t size;
    OK(dray_queue_cursor(queue, 0, &cursor, &size, &error));
    FAILS(DRAY_EINVALID, dray_queue_resume(queue, cursor, size, NULL, &error));
    /* Versions that no tag can have. */
    dray_queue *other;
    void *wild;
    options.provisional_count = 1;
    OK(dray_queue_open(context, "wild", &options, &other, &error));
    OK(dray_queue_cursor(other, UINT64_MAX, &wild, &size, &error));
    FAILS(DRAY_EINVALID, dray_queue_resume(other, wild, size, NULL, &error));
    free(wild);
    dray_queue_close(other);
    options.provisional_count = 0;
    OK(dray_queue_open(context, "other", &options, &other, &error));
    FAILS(DRAY_EINVALID, dray_queue_covered(other, cursor, size, &error));
    free(cursor);
    dray_queue_close(other);
    leave(queue, context);
}

/* ---- counts that no queue has ---------------------------------------------------------------- */

/* Resumes with a cursor that no queue gave. */
static int resume_at(dray_queue *queue, const char *name, uint32_t epoch, uint64_t seq)
{
    static const dray__envelope form = {"cursor", 0x52535243u, 1};
    const dray__cursor cursor = {.epoch = epoch, .seq = seq, .version = 1};
    dray__writer w = {0};
    void *made;
    size_t size;
    dray__envelope_begin(&form, &w);
    dray__put_u64(&w, dray__hash(name, strlen(name)));
    dray__put_fields(&w, &dray__cursor_fields, &cursor);
    OK(dray__envelope_end(&w, DRAY_OK, &made, &size, &error));
    int rc = dray_queue_resume(queue, made, size, NULL, &error);
    free(made);
    return rc;
}

/* Commits and epochs are counted on from a cursor: from one that is near the end of their numbers,
 * the journal would get numbers with which it cannot be read. */
TEST(test_counts_near_their_end)
{
    f = (queue_fixture){.durable = true};
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "near");
    dray_queue_options options = trainer_options();
    options.durability = DRAY_DURABILITY_JOURNAL;
    dray_queue *queue = open_three(context, "near", options);
    FAILS(DRAY_EINVALID, resume_at(queue, "near", 0, INT64_MAX - 1));
    FAILS(DRAY_EINVALID, resume_at(queue, "near", UINT32_MAX - 1, 0));
    OK(resume_at(queue, "near", 7, 1000));
    make_partition(queue, "0", 4);
    make_and_train(queue, "0", 1);
    fixture_restart(&f);
    OK(dray_queue_wait(queue, "0", "actor", 0, &error));
    leave(queue, context);
    fixture_down(&f);
    f = (queue_fixture){0};
}

SUITE(NULL, NULL)
