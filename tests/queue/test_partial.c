/* Tests partial rollout: commits that append to a row and leave it open, and how such rows are
 * read. */
#include "queue/three_tasks.h"

static const char *const both_outputs[] = {"responses", "log_probs"};
static const char *const scores[] = {"scores"};

static const dray_queue_task pieces_tasks[] = {
    {.name = "rollout",
     .needs = prompts,
     .needs_count = 1,
     .writes = both_outputs,
     .writes_count = 2},
    {.name = "actor", .needs = both_outputs, .needs_count = 2, .writes = scores, .writes_count = 1},
};

static dray_queue *open_pieces(dray_context *context, const char *name)
{
    dray_queue *queue;
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = pieces_tasks;
    options.task_count = 2;
    OK(dray_queue_open(context, name, &options, &queue, &error));
    return queue;
}

static dray_batch *claim_rows(dray_queue *queue, const char *task, uint32_t count, int32_t policy)
{
    dray_batch *batch;
    dray_claim_options o = want(task, count);
    o.policy = policy;
    OK(dray_queue_claim(queue, &o, &batch, &error));
    return batch;
}

/* Row i gets lengths[i] tokens from `first` on (those of a row go on where they were), and as many
 * log-probs. */
static void generate(dray_batch *batch, const uint64_t *lengths, int32_t first, double version)
{
    int32_t tokens[256];
    float log_probs[256];
    uint64_t offsets[17] = {0};
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++) {
        offsets[i + 1] = offsets[i] + lengths[i];
        for (uint64_t k = offsets[i]; k < offsets[i + 1]; k++) {
            tokens[k] = (int32_t)(dray_batch_row(batch, i)->slot * 1000) + first +
                        (int32_t)(k - offsets[i]);
            log_probs[k] = -(float)tokens[k];
        }
        OK(dray_batch_set_tag(batch, i, DRAY_TAG_VERSION, version, &error));
    }
    dray_column_data column = {
        .name = "responses", .dtype = DRAY_I32, .ndim = 1, .offsets = offsets, .values = tokens};
    OK(dray_batch_set(batch, &column, &error));
    column.name = "log_probs";
    column.dtype = DRAY_F32;
    column.values = log_probs;
    OK(dray_batch_set(batch, &column, &error));
}

static void check_value(dray_batch *batch, uint32_t row, uint64_t length)
{
    dray_column tokens, log_probs;
    OK(dray_batch_column(batch, "responses", &tokens, &error));
    OK(dray_batch_column(batch, "log_probs", &log_probs, &error));
    assert_int_equal(tokens.lengths[row], length);
    assert_int_equal(log_probs.lengths[row], length);
    int32_t base = (int32_t)(dray_batch_row(batch, row)->slot * 1000);
    for (uint64_t k = 0; k < length; k++) {
        assert_int_equal(((const int32_t *)tokens.cells[row])[k], base + (int32_t)k);
        assert_true(((const float *)log_probs.cells[row])[k] == -(float)(base + (int32_t)k));
    }
}

TEST_WITHIN(test_rows_in_pieces, up, down)
{
    dray_context *context = fixture_context(&f, "pieces");
    dray_queue *queue = open_pieces(context, "pieces");
    insert_ints(queue, "0", 4, 1);
    OK(dray_queue_seal(queue, "0", 4, &error));
    /* Rows 0 and 1: rows 0 stays open. Its own columns are not there before. */
    dray_batch *batch = claim_rows(queue, "rollout", 2, DRAY_POLICY_FIFO);
    dray_column column;
    FAILS(DRAY_ENOENT, dray_batch_column(batch, "responses", &column, &error));
    generate(batch, (uint64_t[]){3, 5}, 0, 7);
    OK(dray_batch_leave_open(batch, (uint32_t[]){0}, 1, &error));
    OK(dray_batch_commit(batch, &error));
    COMMIT(batch);
    batch = claim_rows(queue, "actor", 1, DRAY_POLICY_FIFO);
    assert_int_equal(dray_batch_row(batch, 0)->slot, 1);
    check_value(batch, 0, 5);
    dray_claim_options more = want("actor", 1);
    more.timeout_ns = 0;
    dray_batch *none;
    FAILS(DRAY_ETIMEDOUT, dray_queue_claim(queue, &more, &none, &error));
    dray_batch_free(batch);
    /* The row that is begun comes first, and reads what it has. */
    batch = claim_rows(queue, "rollout", 2, DRAY_POLICY_FIFO);
    assert_int_equal(dray_batch_row(batch, 0)->slot, 0);
    assert_int_equal(dray_batch_row(batch, 0)->attempt, 2);
    assert_int_equal(dray_batch_row(batch, 1)->slot, 2);
    check_value(batch, 0, 3);
    check_value(batch, 1, 0);
    generate(batch, (uint64_t[]){4, 1}, 3, 8);
    OK(dray_batch_leave_open(batch, (uint32_t[]){0}, 1, &error));
    COMMIT(batch);
    /* Given back without a commit: nothing is appended. */
    batch = claim_rows(queue, "rollout", 1, DRAY_POLICY_FIFO);
    generate(batch, (uint64_t[]){9}, 100, 8);
    dray_batch_free(batch);
    batch = claim_rows(queue, "rollout", 1, DRAY_POLICY_FIFO);
    check_value(batch, 0, 7);
    generate(batch, (uint64_t[]){2}, 7, 9);
    COMMIT(batch);
    batch = claim_rows(queue, "actor", 3, DRAY_POLICY_FIFO);
    for (uint32_t i = 0; i < 3; i++) {
        if (dray_batch_row(batch, i)->slot != 0)
            continue;
        check_value(batch, i, 9);
        dray_piece pieces[4];
        uint32_t count;
        OK(dray_batch_pieces(batch, "responses", i, pieces, 4, &count, &error));
        assert_int_equal(count, 3);
        const dray_piece expected[] = {{3, 7}, {4, 8}, {2, 9}};
        for (uint32_t k = 0; k < 3; k++)
            assert_true(pieces[k].elements == expected[k].elements &&
                        pieces[k].version == expected[k].version);
        /* Another rank of the group reads the same. */
        void *text;
        size_t size;
        dray_batch *other;
        OK(dray_batch_export(batch, &text, &size, &error));
        OK(dray_batch_import(queue, text, size, &other, &error));
        check_value(other, i, 9);
        dray_batch_free(other);
        free(text);
    }
    dray_batch_free(batch);
    /* The oldest of its tokens decides whether a row is too old. */
    more.fresh = 1;
    more.staleness = 1;
    more.version = 9;
    more.count = 3;
    more.up_to = 1;
    OK(dray_queue_claim(queue, &more, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), 1); /* row 2, of version 8 */
    assert_int_equal(dray_batch_row(batch, 0)->slot, 2);
    dray_batch_free(batch);
    dray_refill refill = DRAY_REFILL_INIT;
    OK(dray_queue_refill_wait(queue, 0, &refill, &error));
    assert_int_equal(refill.cause, DRAY_LOSS_STALE);
    refill_ints(queue, &refill, 1);
    leave(queue, context);
}

/* The row of the oldest version first, whatever order they were committed in; whole groups, too. */
TEST_WITHIN(test_oldest_first, up, down)
{
    dray_context *context = fixture_context(&f, "oldest");
    dray_queue *queue = open_pieces(context, "oldest");
    insert_ints(queue, "0", 8, 2);
    static const double versions[] = {5, 3, 4};
    dray_batch *batches[3];
    for (int i = 0; i < 3; i++) {
        batches[i] = claim_rows(queue, "rollout", 2, DRAY_POLICY_GROUP);
        generate(batches[i], (uint64_t[]){1, 1}, 0, versions[i]);
        OK(dray_batch_leave_open(batches[i], NULL, 0, &error));
    }
    for (int i = 0; i < 3; i++) {
        OK(dray_batch_commit(batches[i], &error));
        dray_batch_free(batches[i]);
    }
    dray_batch *batch = claim_rows(queue, "rollout", 8, DRAY_POLICY_FIFO);
    static const uint32_t slots[] = {2, 3, 4, 5, 0, 1, 6, 7};
    for (uint32_t i = 0; i < 8; i++)
        assert_int_equal(dray_batch_row(batch, i)->slot, slots[i]);
    dray_batch_free(batch);
    static const uint32_t groups[] = {1, 2, 0, 3};
    for (int i = 0; i < 4; i++) {
        batches[0] = claim_rows(queue, "rollout", 2, DRAY_POLICY_GROUP);
        assert_int_equal(dray_batch_row(batches[0], 0)->group, groups[i]);
        generate(batches[0], (uint64_t[]){1, 1}, 1, 9);
        OK(dray_batch_commit(batches[0], &error));
        dray_batch_free(batches[0]);
    }
    leave(queue, context);
}

/* Columns of a fixed shape cannot be appended to, nor rows be open for who writes nothing. */
TEST_WITHIN(test_what_cannot_be_partial, up, down)
{
    dray_context *context = fixture_context(&f, "cannot");
    dray_queue *queue = open_queue(context, "cannot", 0, 0);
    insert_ints(queue, "0", 2, 1);
    dray_batch *batch = claim_rows(queue, "rollout", 2, DRAY_POLICY_FIFO);
    FAILS(DRAY_EINVALID, dray_batch_leave_open(batch, (uint32_t[]){2}, 1, &error));
    set_ints(batch, "responses", 0);
    OK(dray_batch_leave_open(batch, (uint32_t[]){1}, 1, &error));
    FAILS(DRAY_EINVALID, dray_batch_commit(batch, &error));
    assert_non_null(strstr(error.message, "not ragged"));
    dray_batch_free(batch);
    all_rows(queue, "rollout", "responses", 0, 2);
    all_rows(queue, "reward", "rewards", 0, 2);
    batch = claim_rows(queue, "actor", 2, DRAY_POLICY_FIFO);
    OK(dray_batch_leave_open(batch, NULL, 0, &error));
    FAILS(DRAY_EINVALID, dray_batch_commit(batch, &error));
    dray_batch_free(batch);
    leave(queue, context);
}

SUITE(NULL, NULL)
