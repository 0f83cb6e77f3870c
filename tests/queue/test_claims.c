/* Tests which claims and commits the controller's state machine refuses, and which rows a claim
 * gets, exactly at each limit and one beyond it. */
#include "queue/table/table.h"
#include "suite.h"

#include <dray/queue.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK(call)                                                                                   \
    do {                                                                                           \
        int rc_ = (call);                                                                          \
        if (rc_)                                                                                   \
            fail_msg("%s: %s", #call, error.message);                                              \
    } while (0)

static dray_error error;
static dray__table *table;
static dray__client *client;

/* Task a needs nothing: every row is ready; b writes two columns. */
FIXTURE(up)
{
    static const char *const columns[] = {"x", "y"};
    static const dray__task_names tasks[] = {{.name = "a"},
                                             {.name = "b", .writes = columns, .writes_count = 2}};
    const dray__settings settings = {.capacity_rows = 64, .max_attempts = 2};
    OK(dray__table_new("queue", tasks, 2, &settings, &table, &error));
    client = dray__client_new(table, 1, "client", NULL);
    return client ? 0 : -1;
}

FIXTURE(down)
{
    dray__table_free(table);
    return 0;
}

static uint32_t insert(uint32_t rows, uint32_t group, const dray__new_tag *tags, uint32_t tag_count)
{
    static const char *const keys[] = {DRAY_TAG_VERSION};
    const dray__new_rows new_rows = {
        .partition = "0",
        .rows = rows,
        .group_size = group,
        .content = {.keys = keys, .key_count = 1, .tags = tags, .tag_count = tag_count}};
    uint32_t first, generation;
    OK(dray__table_insert(table, client, &new_rows, &first, &generation, &error));
    return generation;
}

static dray__want want_of(int32_t policy, uint32_t count)
{
    return (dray__want){.count = count,
                        .policy = policy,
                        .hold_until = INT64_MAX,
                        .group = "group",
                        .dp_size = 1,
                        .peers = 1};
}

static int claim(const dray__want *want, uint32_t ticket, dray__claim **out)
{
    return dray__table_claim(table, client, ticket, want, out, &error);
}

/* ---- which rows ------------------------------------------------------------------------------ */

TEST_WITHIN(test_claims_are_full, up, down)
{
    dray__claim *got;
    insert(3, 1, NULL, 0);
    dray__want want = want_of(DRAY_POLICY_FIFO, 4);
    assert_int_equal(claim(&want, 1, &got), DRAY_EAGAIN);
    want.up_to = true;
    OK(claim(&want, 1, &got));
    assert_int_equal(got->count, 3);
}

/* Neither the claim's size nor the room of an admission cuts a group. */
TEST_WITHIN(test_groups_are_whole, up, down)
{
    dray__claim *got;
    insert(9, 3, NULL, 0);
    dray__want want = want_of(DRAY_POLICY_GROUP, 4);
    assert_int_equal(claim(&want, 1, &got), DRAY_EINVALID);
    const dray__admission admission = {.batch = 5};
    OK(dray__table_admit(table, &admission, false, &error));
    want.count = 9;
    want.up_to = true;
    OK(claim(&want, 1, &got));
    assert_int_equal(got->count, 3); /* of five that are admitted */
    assert_int_equal(claim(&want, 2, &got), DRAY_EAGAIN);
}

/* Rows that are claimed count, although none was accepted yet. */
TEST_WITHIN(test_running_rows_are_admitted_once, up, down)
{
    dray__claim *got;
    insert(9, 1, NULL, 0);
    const dray__admission admission = {.batch = 4};
    OK(dray__table_admit(table, &admission, false, &error));
    dray__want want = want_of(DRAY_POLICY_FIFO, 3);
    OK(claim(&want, 1, &got));
    want.up_to = true;
    OK(claim(&want, 2, &got));
    assert_int_equal(got->count, 1);
    assert_int_equal(claim(&want, 3, &got), DRAY_EAGAIN);
    OK(dray__table_version(table, 1, &error));
    OK(claim(&want, 3, &got));
    assert_int_equal(got->count, 3);
}

TEST_WITHIN(test_a_tag_names_a_key_that_is_there, up, down)
{
    static const char *const keys[] = {"score", "behind"};
    const dray__new_tag tag = {0, 1, 0.5};
    const dray__new_rows rows = {
        .partition = "0",
        .rows = 1,
        .content = {.keys = keys, .key_count = 1, .tags = &tag, .tag_count = 1}};
    uint32_t first, generation;
    assert_int_equal(dray__table_insert(table, client, &rows, &first, &generation, &error),
                     DRAY_EFORMAT);
    assert_non_null(strstr(error.message, "one of 1 keys expected, found 1"));
}

/* staleness + 1 versions are fresh: the newest, and as many before it. */
TEST_WITHIN(test_rows_stay_fresh_to_the_last_version, up, down)
{
    enum { VERSIONS = 6 };
    dray__new_tag tags[VERSIONS];
    dray__claim *got;
    for (uint32_t i = 0; i < VERSIONS; i++)
        tags[i] = (dray__new_tag){i, 0, i};
    insert(VERSIONS, 1, tags, VERSIONS);
    dray__want want = want_of(DRAY_POLICY_FIFO, VERSIONS);
    want.up_to = true;
    want.fresh = DRAY_FRESH_DROP;
    want.version = 5;
    want.staleness = 2;
    OK(claim(&want, 1, &got));
    assert_int_equal(got->count, 3);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(got->slots[i], 3 + i);
}

/* ---- rounds ---------------------------------------------------------------------------------- */

TEST_WITHIN(test_rounds_and_epochs_go_on, up, down)
{
    dray__claim *got;
    insert(8, 1, NULL, 0);
    dray__want want = want_of(DRAY_POLICY_LOCKSTEP, 2);
    want.group_epoch = 2;
    OK(claim(&want, 1, &got));
    assert_int_equal(claim(&want, 2, &got), DRAY_ESTALE); /* round 0 was given out */
    assert_non_null(strstr(error.message, "round 0 is over, the next is 1"));
    want.round = 1;
    want.group_epoch = 1;
    assert_int_equal(claim(&want, 2, &got), DRAY_ESTALE);
    assert_non_null(strstr(error.message, "is in epoch 2, found 1"));
    want.group_epoch = 2;
    OK(claim(&want, 2, &got));
}

TEST_WITHIN(test_ranks_and_peers_are_of_their_group, up, down)
{
    dray__claim *got;
    uint32_t generation = insert(8, 1, NULL, 0);
    dray__want want = want_of(DRAY_POLICY_LOCKSTEP, 2);
    want.dp_rank = 1;
    assert_int_equal(claim(&want, 1, &got), DRAY_EINVALID);
    want.dp_rank = 0;
    want.peer = 1;
    assert_int_equal(claim(&want, 1, &got), DRAY_EINVALID);
    want.peers = 2;
    OK(claim(&want, 1, &got));
    const dray__outputs none = {0};
    assert_int_equal(dray__claim_commit(table, client, 1, generation, &none, &error), DRAY_EPERM);
    want.peer = 0;
    OK(claim(&want, 2, &got));
    OK(dray__claim_commit(table, client, 2, generation, &none, &error));
}

/* ---- commits --------------------------------------------------------------------------------- */

TEST_WITHIN(test_commits_are_of_the_claim, up, down)
{
    dray__claim *got;
    uint32_t generation = insert(4, 1, NULL, 0);
    const dray__want want = want_of(DRAY_POLICY_FIFO, 4);
    OK(claim(&want, 1, &got));
    const uint32_t beside[] = {4};
    dray__outputs outputs = {.open = beside, .open_count = 1};
    assert_int_equal(dray__claim_commit(table, client, 1, generation, &outputs, &error),
                     DRAY_EINVALID);
    assert_non_null(strstr(error.message, "row 4 of a claim of 4"));
    assert_int_equal(dray__claim_fail(table, client, 1, beside, 1, "", &error), DRAY_EINVALID);
    outputs = (dray__outputs){0};
    for (int wrong = -1; wrong <= 1; wrong += 2)
        assert_int_equal(
            dray__claim_commit(table, client, 1, generation + (uint32_t)wrong, &outputs, &error),
            DRAY_ESTALE);
    OK(dray__claim_commit(table, client, 1, generation, &outputs, &error));
    OK(dray__claim_commit(table, client, 1, generation, &outputs,
                          &error)); /* its answer was lost */
    assert_int_equal(dray__table_partition(table, "0")->tracks[0].done_count, 4);
}

TEST_WITHIN(test_commits_bring_every_column, up, down)
{
    dray__claim *got;
    uint32_t generation = insert(1, 1, NULL, 0);
    dray__want want = want_of(DRAY_POLICY_FIFO, 1);
    want.task = 1;
    OK(claim(&want, 1, &got));
    const dray__new_column x = {.name = "x", .spec = {.dtype = DRAY_I32}};
    const dray__outputs outputs = {.content = {.columns = &x, .column_count = 1}};
    assert_int_equal(dray__claim_commit(table, client, 1, generation, &outputs, &error),
                     DRAY_EINVALID);
    assert_non_null(strstr(error.message, "column y was not set"));
}

SUITE(NULL, NULL)
