/* Tests rows of a batch that become batches of their own. Each is committed, given back and taken
 * back separately, and the death of their client gives back all of them. */
#include "queue/three_tasks.h"

static dray_batch *claim_all(dray_queue *queue, uint32_t count)
{
    dray_batch *batch;
    dray_claim_options o = want("rollout", count);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), count);
    return batch;
}

static dray_batch *split(dray_batch *batch, const uint32_t *rows, uint32_t count)
{
    dray_batch *part;
    OK(dray_batch_split(batch, rows, count, &part, &error));
    assert_int_equal(dray_batch_rows(part), count);
    for (uint32_t i = 0; i < count; i++)
        assert_memory_equal(dray_batch_row(part, i), dray_batch_row(batch, rows[i]),
                            sizeof(dray_row));
    assert_string_equal(dray_batch_partition(part), dray_batch_partition(batch));
    return part;
}

static void commit(dray_batch *batch, int32_t base)
{
    set_ints(batch, "responses", base);
    OK(dray_batch_commit(batch, &error));
}

TEST_WITHIN(test_parts_are_committed_by_themselves, up, down)
{
    dray_context *context = fixture_context(&f, "parts");
    dray_queue *queue = open_queue(context, "parts", 0, 0);
    insert_ints(queue, "0", 8, 1);
    OK(dray_queue_seal(queue, "0", 8, &error));
    dray_batch *batch = claim_all(queue, 8), *got;
    dray_batch *first = split(batch, (uint32_t[]){6, 1}, 2),
               *second = split(batch, (uint32_t[]){0, 2, 3}, 3);
    assert_true(status_has(queue, "\"taken\":8"));
    OK(dray_batch_set_tag(first, 0, DRAY_TAG_VERSION, 5, &error));
    commit(first, 100);
    OK(dray_batch_commit(first, &error)); /* repeating it succeeds */
    assert_true(status_has(queue, "\"taken\":6"));
    dray_claim_options o = want("reward", 8);
    o.up_to = 1;
    OK(dray_queue_claim(queue, &o, &got, &error)); /* the others are not through */
    assert_int_equal(dray_batch_rows(got), 2);
    int32_t values[8];
    OK(dray_batch_gather(got, "responses", values, sizeof values, NULL, &error));
    for (uint32_t i = 0; i < 2; i++) {
        double version = -1;
        uint32_t slot = dray_batch_row(got, i)->slot;
        assert_int_equal(values[i], 100 + (int32_t)slot);
        dray_batch_tag(got, i, DRAY_TAG_VERSION, &version, NULL);
        assert_true(version == (slot == 6 ? 5 : -1));
    }
    dray_batch_free(got);
    dray_batch_free(first);
    commit(batch, 200); /* what is left of it: columns are set for all places */
    OK(dray_batch_gather(batch, "prompts", values, sizeof values, NULL, &error));
    for (int i = 0; i < 8; i++)
        assert_int_equal(values[i], 10 * i);
    dray_batch_free(batch);
    commit(second, 300);
    dray_batch_free(second);
    OK(dray_queue_wait(queue, "0", "rollout", 0, &error));
    o.up_to = 0;
    OK(dray_queue_claim(queue, &o, &got, &error));
    OK(dray_batch_gather(got, "responses", values, sizeof values, NULL, &error));
    static const int32_t bases[] = {300, 100, 300, 300, 200, 200, 100, 200};
    for (uint32_t i = 0; i < 8; i++) {
        uint32_t slot = dray_batch_row(got, i)->slot;
        assert_int_equal(values[i], bases[slot] + (int32_t)slot);
    }
    dray_batch_free(got);
    leave(queue, context);
}

/* Rows that were given back, were split off before, or have failed are nobody's part. */
TEST_WITHIN(test_rows_come_back, up, down)
{
    dray_context *context = fixture_context(&f, "back");
    dray_queue *queue = open_queue(context, "back", 0, 0);
    insert_ints(queue, "0", 4, 1);
    dray_batch *batch = claim_all(queue, 4), *part = split(batch, (uint32_t[]){1, 2}, 2), *bad;
    OK(dray_batch_split(batch, (uint32_t[]){3, 1}, 2, &bad,
                        &error)); /* it has not row 1 any more */
    set_ints(bad, "responses", 0);
    FAILS(DRAY_ESTALE, dray_batch_commit(bad, &error));
    dray_batch_free(bad);
    OK(dray_batch_split(batch, (uint32_t[]){3, 3}, 2, &bad, &error));
    set_ints(bad, "responses", 0);
    FAILS(DRAY_ESTALE, dray_batch_commit(bad, &error));
    dray_batch_free(bad);
    assert_true(status_has(queue, "\"taken\":4"));
    dray_batch_free(part);
    assert_true(status_has(queue, "\"taken\":2"));
    OK(dray_batch_fail(batch, (uint32_t[]){0}, 1, "broken", &error));
    part = split(batch, (uint32_t[]){3}, 1);
    set_ints(batch, "responses", 0);
    FAILS(DRAY_ESTALE, dray_batch_commit(batch, &error)); /* it has none any more */
    dray_batch_free(batch);
    commit(part, 0);
    dray_batch_free(part);
    leave(queue, context);
}

TEST_WITHIN(test_a_death_gives_back_every_part, up, down)
{
    dray_context *context = fixture_context(&f, "death");
    dray_queue *queue = open_queue(context, "death", 0, 0);
    insert_ints(queue, "0", 4, 1);
    pid_t child = fork();
    if (child == 0) {
        dray_context *own = fixture_context(&f, "dies");
        dray_batch *batch = claim_all(open_queue(own, "death", 0, 0), 4);
        commit(split(batch, (uint32_t[]){2}, 1), 0);
        split(batch, (uint32_t[]){0, 3}, 2);
        _exit(0);
    }
    int how;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_int_equal(how, 0);
    dray_batch *batch = claim_all(queue, 3); /* waits until they are given back */
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(dray_batch_row(batch, i)->attempt, 2);
    dray_batch_free(batch);
    OK(dray_queue_clear(queue, "0", &error));
    leave(queue, context);
}

TEST_WITHIN(test_parts_end_as_claims_do, up, down)
{
    dray_context *context = fixture_context(&f, "end");
    dray_queue *queue = open_queue(context, "end", 0, 0);
    insert_ints(queue, "0", 4, 1);
    dray_batch *batch, *part;
    dray_claim_options o = want("rollout", 4);
    o.max_hold_ns = 30 * DRAY__MILLISECOND;
    OK(dray_queue_claim(queue, &o, &batch, &error));
    part = split(batch, (uint32_t[]){0}, 1);
    OK(dray_batch_hold(batch, 0, &error)); /* not the part's */
    dray_batch *again = claim_all(queue, 1);
    assert_int_equal(dray_batch_row(again, 0)->slot, 0);
    set_ints(part, "responses", 0);
    FAILS(DRAY_ESTALE, dray_batch_commit(part, &error));
    dray_batch_free(part);
    dray_batch_free(again);
    part = split(batch, (uint32_t[]){1}, 1);
    OK(dray_queue_clear(queue, "0", &error));
    set_ints(part, "responses", 0);
    FAILS(DRAY_EGONE, dray_batch_commit(part, &error));
    dray_batch_free(part);
    dray_batch_free(batch);
    leave(queue, context);
}

TEST_WITHIN(test_what_is_not_split, up, down)
{
    dray_context *context = fixture_context(&f, "refused");
    dray_queue *queue = open_queue(context, "refused", 0, 0);
    insert_ints(queue, "0", 8, 1);
    dray_batch *batch = claim_all(queue, 4), *part;
    FAILS(DRAY_EINVALID, dray_batch_split(batch, (uint32_t[]){4}, 1, &part, &error));
    FAILS(DRAY_EINVALID, dray_batch_split(batch, NULL, 0, &part, &error));
    commit(batch, 0);
    FAILS(DRAY_EINVALID, dray_batch_split(batch, (uint32_t[]){0}, 1, &part, &error));
    dray_batch_free(batch);
    dray_claim_options o = want("rollout", 4);
    o.policy = DRAY_POLICY_TOKEN_BALANCED;
    OK(dray_queue_claim(queue, &o, &batch, &error));
    FAILS(DRAY_EINVALID, dray_batch_split(batch, (uint32_t[]){0}, 1, &part, &error));
    dray_batch_free(batch);
    leave(queue, context);
}

SUITE(NULL, NULL)
