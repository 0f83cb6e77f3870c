/* Tests rounds of consumer groups in the controller's state machine: many micro-batches, rows that
 * are lost between the peers of a rank, many groups. */
#include "queue/table/table_inside.h"
#include "suite.h"

#include <stdio.h>
#include <stdlib.h>

#define OK(call)                                                                                   \
    do {                                                                                           \
        int rc_ = (call);                                                                          \
        if (rc_)                                                                                   \
            fail_msg("%s: %s", #call, error.message);                                              \
    } while (0)

/* Tasks that need nothing: every row is ready. What fails once is lost. */
static dray__table *make_table(uint32_t tasks, uint64_t rows)
{
    static const dray__task_names names[] = {{.name = "a"}, {.name = "b"}};
    const dray__settings settings = {.capacity_rows = rows, .max_attempts = 1};
    dray__table *table;
    dray_error error;
    OK(dray__table_new("queue", names, tasks, &settings, &table, &error));
    return table;
}

static void insert_rows(dray__table *table, dray__client *client, uint32_t count)
{
    dray__new_rows rows = {.partition = "0", .rows = count};
    uint32_t first, generation;
    dray_error error;
    assert_non_null(client);
    OK(dray__table_insert(table, client, &rows, &first, &generation, &error));
}

static dray__want want_of(uint32_t count)
{
    return (dray__want){.count = count,
                        .policy = DRAY_POLICY_LOCKSTEP,
                        .hold_until = INT64_MAX,
                        .group = "group",
                        .dp_size = 1,
                        .peers = 1};
}

/* As many micro-batches as rows, of more rows than evenness is worth: a claim is divided all the
 * same. */
TEST(test_many_micro_batches)
{
    enum { ROWS = 8400 };
    dray__table *table = make_table(1, ROWS);
    dray__client *client = dray__client_new(table, 1, "client", NULL);
    insert_rows(table, client, ROWS);
    dray__want want = want_of(ROWS);
    want.dp_size = 2;
    want.micro_rows = 1;
    bool seen[ROWS] = {false};
    for (uint32_t rank = 0; rank < 2; rank++) {
        dray_error error;
        dray__claim *claim;
        want.dp_rank = rank;
        OK(dray__table_claim(table, client, 1 + rank, &want, &claim, &error));
        assert_int_equal(claim->micro_count, ROWS / 2);
        assert_int_equal(claim->count, ROWS / 2);
        for (uint32_t i = 0; i < claim->count; i++) {
            assert_int_equal(claim->micro_ends[i], i + 1);
            assert_false(seen[claim->slots[i]]);
            seen[claim->slots[i]] = true;
        }
    }
    dray__table_free(table);
}

/* A peer that asks after a row was lost and refilled would read another sample than its leader. */
TEST(test_peers_read_the_same)
{
    dray_error error;
    dray__table *table = make_table(2, 8);
    dray__client *client = dray__client_new(table, 1, "client", NULL);
    insert_rows(table, client, 4);
    dray__want want = want_of(4), other = {.task = 1, .count = 1, .hold_until = INT64_MAX};
    want.peers = 3;
    dray__claim *claim;
    OK(dray__table_claim(table, client, 1, &want, &claim, &error));
    want.peer = 1;
    OK(dray__table_claim(table, client, 2, &want, &claim, &error));
    OK(dray__table_claim(table, client, 3, &other, &claim, &error));
    OK(dray__claim_fail(table, client, 3, NULL, 0, "broken", &error)); /* b loses row 0 */
    dray__demand *demand;
    OK(dray__table_demand(table, client, &demand, &error));
    dray__new_rows rows = {.partition = "0", .rows = 1, .refill = demand->id};
    uint32_t first, generation;
    OK(dray__table_insert(table, client, &rows, &first, &generation, &error));
    want.peer = 2;
    assert_int_equal(dray__table_claim(table, client, 4, &want, &claim, &error), DRAY_ESTALE);
    assert_non_null(dray__table_find_claim(table, client, 1)); /* the others go on */
    OK(dray__claim_commit(table, client, 1, generation, &(dray__outputs){0}, &error));
    dray__table_free(table);
}

/* A rank that holds its share too long ends the round as one that dies: the others' part of it
 * would be half a round. */
TEST(test_held_too_long)
{
    dray_error error;
    dray__table *table = make_table(1, 8);
    dray__client *client = dray__client_new(table, 1, "client", NULL);
    insert_rows(table, client, 4);
    dray__want want = want_of(4);
    dray__claim *slow, *other;
    want.dp_size = 2;
    OK(dray__table_claim(table, client, 1, &want, &other, &error));
    want.dp_rank = 1;
    want.hold_until = 10;
    OK(dray__table_claim(table, client, 2, &want, &slow, &error));
    assert_int_equal(dray__table_expire(table, 9), 10);
    assert_int_equal(dray__table_expire(table, 10), INT64_MAX);
    const dray__outputs nothing = {0};
    for (uint32_t ticket = 1; ticket <= 2; ticket++)
        assert_int_equal(dray__claim_commit(table, client, ticket, 1, &nothing, NULL), DRAY_ESTALE);
    want.round = 1;
    assert_int_equal(dray__table_claim(table, client, 3, &want, &other, NULL), DRAY_ESTALE);
    want.group_epoch = 1;
    want.up_to = true; /* the rows of the slow one are lost */
    OK(dray__table_claim(table, client, 3, &want, &other, &error));
    dray__table_free(table);
}

/* Whoever names ever new groups takes no memory for ever; what is in use is not forgotten. */
TEST(test_groups_are_forgotten)
{
    dray_error error;
    dray__table *table = make_table(1, 8);
    dray__client *client = dray__client_new(table, 1, "client", NULL);
    dray__want want = want_of(4);
    dray__claim *claim;
    char name[16];
    insert_rows(table, client, 4);
    want.group_epoch = 5;
    OK(dray__table_claim(table, client, 1, &want, &claim, &error));
    for (uint32_t i = 0; i < DRAY__CONSUMER_GROUPS_MAX + 100; i++) {
        dray__want none = want_of(4);
        snprintf(name, sizeof name, "%u", i);
        none.group = name;
        assert_int_equal(dray__table_claim(table, client, 2, &none, &claim, NULL), DRAY_EAGAIN);
    }
    uint32_t count = 0;
    for (const dray__consumer_group *consumers = table->consumer_groups; consumers;
         consumers = consumers->next)
        count++;
    assert_int_equal(count, DRAY__CONSUMER_GROUPS_MAX);
    want.group_epoch = 4;
    assert_int_equal(dray__table_claim(table, client, 2, &want, &claim, NULL), DRAY_ESTALE);
    OK(dray__claim_commit(table, client, 1, 1, &(dray__outputs){0}, &error));
    dray__table_free(table);
}

SUITE(NULL, NULL)
