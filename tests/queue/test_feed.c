/* Tests which groups each step of a trainer takes, and which groups a resumed run holds of a step's
 * prompts, under a schedule whose steps take the groups that are complete first. */
#include "base/json.h"
#include "queue/client/feed.h"
#include "suite.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OK(call) assert_int_equal((call), DRAY_OK)
#define FAILS(code, call) assert_int_equal((call), (code))

static char folder[] = "/tmp/dray-feed-XXXXXX";

/* Eight prompts a step, four steps' prompts in the queue at once. */
static const dray_steps_rules eight = {.size = sizeof(dray_steps_rules),
                                       .oldest = 2,
                                       .newest = 1,
                                       .open = 4,
                                       .kept = 1,
                                       .rows = 64,
                                       .group = 8,
                                       .first_complete = 1};
static const dray_steps_rules *const rules = &eight;

static void expect_groups(const dray__feed *feed, int64_t step, const uint32_t *want,
                          uint32_t count)
{
    const uint32_t *groups;
    assert_int_equal(dray__feed_groups(feed, step, &groups), count);
    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(groups ? groups[i] : i, want[i]);
        assert_int_equal(dray__feed_group(feed, step, i), want[i]);
    }
}

static void train(dray__feed *feed, int64_t step, const uint32_t *places, uint32_t count)
{
    dray_error error;
    for (uint32_t i = 0; i < count; i++)
        OK(dray__feed_trained(feed, step, places[i], &error));
}

static const uint32_t all[] = {0, 1, 2, 3, 4, 5, 6, 7};

/* The run that goes on twice: its queue is new, and then it is kept. */
TEST(test_groups)
{
    dray_error error;
    dray__feed *feed = NULL;
    OK(dray__feed_open(rules, folder, 0, &feed, &error));
    assert_int_equal(dray__feed_first(feed), 1);
    expect_groups(feed, 1, all, 8);
    train(feed, 1, all, 8);
    train(feed, 2, (const uint32_t[]){1, 5}, 2);
    train(feed, 5, (const uint32_t[]){0}, 1); /* so that step 1's are all trained */
    FAILS(DRAY_EINTERNAL, dray__feed_trained(feed, 2, 5, &error));
    json_t *card = dray__feed_card(feed);
    assert_int_equal(json_integer_value(json_object_get(card, "first")), 2);
    assert_int_equal(json_array_size(json_object_get(card, "steps")), 2);
    dray__feed_close(feed);

    json_t *empty = json_pack("{s:[]}", "partitions");
    OK(dray__feed_begin(rules, folder, card, empty, &error));
    OK(dray__feed_open(rules, folder, 3, &feed, &error));
    assert_int_equal(dray__feed_first(feed), 2);
    expect_groups(feed, 2, (const uint32_t[]){0, 2, 3, 4, 6, 7}, 6);
    expect_groups(feed, 3, all, 8);
    expect_groups(feed, 5, (const uint32_t[]){1, 2, 3, 4, 5, 6, 7}, 7);
    train(feed, 2, (const uint32_t[]){5, 0}, 2); /* groups 7 and 0 */
    json_decref(card);
    card = dray__feed_card(feed);
    dray__feed_close(feed);

    json_t *kept = json_pack("{s:[{s:s}]}", "partitions", "name", "step-000002");
    OK(dray__feed_begin(rules, folder, card, kept, &error));
    OK(dray__feed_open(rules, folder, 4, &feed, &error));
    expect_groups(feed, 2, (const uint32_t[]){0, 2, 3, 4, 6, 7}, 6);
    dray__feed_close(feed);
    OK(dray__feed_begin(rules, folder, card, empty, &error));
    OK(dray__feed_open(rules, folder, 4, &feed, &error));
    expect_groups(feed, 2, (const uint32_t[]){2, 3, 4, 6}, 4);
    dray__feed_close(feed);
    json_decref(card);
    json_decref(empty);
    json_decref(kept);
}

/* A group of step 1 is generated again and again, while more steps than may be open go by. A run
 * that goes on trains it, and no other group of the steps that are over. */
TEST(test_late_group)
{
    dray_error error;
    dray__feed *feed = NULL;
    OK(dray__feed_begin(rules, folder, NULL, NULL, &error)); /* of a run that begins */
    OK(dray__feed_open(rules, folder, 0, &feed, &error));
    train(feed, 1, all, 7);
    for (int64_t step = 2; step < 8; step++)
        train(feed, step, all, 8);
    json_t *card = dray__feed_card(feed), *empty = json_pack("{s:[]}", "partitions");
    assert_int_equal(json_integer_value(json_object_get(card, "first")), 1);
    train(feed, 1, all + 7, 1);
    train(feed, 8, all, 1);
    assert_int_equal(dray__feed_first(feed), 5);
    dray__feed_close(feed);

    OK(dray__feed_begin(rules, folder, card, empty, &error));
    OK(dray__feed_open(rules, folder, 6, &feed, &error));
    assert_int_equal(dray__feed_first(feed), 1);
    expect_groups(feed, 1, all + 7, 1);
    for (int64_t step = 2; step < 8; step++)
        expect_groups(feed, step, all, 0);
    expect_groups(feed, 8, all, 8);
    dray__feed_close(feed);
    json_decref(card);
    json_decref(empty);
}

TEST(test_refused)
{
    dray_error error;
    json_t *empty = json_pack("{s:[]}", "partitions");
    static const char *const cards[] = {
        "{}", "{\"first\": 1}", "{\"first\": 1, \"steps\": [{\"step\": 1, \"trained\": [8]}]}",
        "{\"first\": 1, \"steps\": [{\"step\": 1, \"trained\": [-1]}]}",
        "{\"first\": 1, \"steps\": [{\"step\": 1, \"holds\": [\"a\"], \"trained\": []}]}"};
    for (size_t i = 0; i < sizeof cards / sizeof *cards; i++) {
        json_t *card = NULL;
        OK(dray__json_parse(cards[i], strlen(cards[i]), "card", &card, &error));
        FAILS(DRAY_EFORMAT, dray__feed_begin(rules, folder, card, empty, &error));
        json_decref(card);
    }
    OK(dray__feed_begin(rules, folder, NULL, empty, &error)); /* of a run that begins */
    dray__feed *feed = NULL;
    OK(dray__feed_open(rules, folder, 0, &feed, &error));
    expect_groups(feed, 2, all, 8);
    dray__feed_close(feed);
    json_decref(empty);
}

/* ---- claims ---------------------------------------------------------------------------------- */

static dray_steps_rules rules_of(int64_t oldest, int64_t newest, int64_t open)
{
    dray_steps_rules r = DRAY_STEPS_RULES_INIT;
    r.oldest = oldest;
    r.newest = newest;
    r.open = open;
    r.rows = 16;
    r.group = 4;
    return r;
}

static void expect_claim(const dray_steps *steps, uint32_t most, uint32_t count,
                         const dray_claim_options *want)
{
    dray_claim_options claim = DRAY_CLAIM_OPTIONS_INIT;
    claim.policy = DRAY_POLICY_ORDERED;
    assert_int_equal(dray_steps_claim(steps, most, &claim), count);
    assert_int_equal(claim.count, count);
    assert_int_equal(claim.policy, want->policy);
    assert_int_equal(claim.up_to, want->up_to);
    assert_int_equal(claim.fresh, want->fresh);
    assert_int_equal(claim.staleness, want->staleness);
    assert_int_equal(claim.version, want->version);
    assert_true(!claim.partition == !want->partition);
    if (want->partition)
        assert_string_equal(claim.partition, want->partition);
}

/* Steps of their own prompts: one at a time, or behind others that are in the queue already. */
TEST(test_own_prompts)
{
    dray_error error;
    dray_steps *steps = NULL;
    dray_claim_options want = {.policy = DRAY_POLICY_ORDERED, .fresh = DRAY_FRESH_DROP};
    dray_steps_rules r = rules_of(1, 1, 1);
    OK(dray_steps_open(&r, NULL, 0, &steps, &error));
    expect_claim(steps, 6, 6, &want);
    expect_claim(steps, 60, 16, &want);
    dray_steps_next(steps);
    want.version = 1;
    expect_claim(steps, 6, 6, &want);
    char *text = (char *)folder;
    OK(dray_steps_feed(steps, &text, &error));
    assert_null(text);
    dray_steps_close(steps);

    r = rules_of(2, 1, 2);
    OK(dray_steps_open(&r, folder, 7, &steps, &error));
    want = (dray_claim_options){.policy = DRAY_POLICY_ORDERED,
                                .fresh = DRAY_FRESH_DROP,
                                .staleness = 1,
                                .version = 7,
                                .partition = "step-000008"};
    expect_claim(steps, 4, 4, &want);
    dray_steps_close(steps);
}

/* Whole groups, as many as fit, and one where none does. */
TEST(test_first_complete)
{
    dray_error error;
    dray_steps *steps = NULL;
    dray_steps_rules r = rules_of(3, 1, 6);
    r.first_complete = 1;
    OK(dray_steps_open(&r, NULL, 4, &steps, &error));
    dray_claim_options want = {.policy = DRAY_POLICY_GROUP,
                               .up_to = 1,
                               .fresh = DRAY_FRESH_DROP,
                               .staleness = 2,
                               .version = 4};
    expect_claim(steps, 11, 8, &want);
    expect_claim(steps, 3, 4, &want);
    dray_steps_close(steps);
    r.fresh = 12; /* at most four may be older: a group of them */
    r.last = 7;
    OK(dray_steps_open(&r, NULL, 4, &steps, &error));
    expect_claim(steps, 16, 4, &want);
    dray_steps_close(steps);
    r.fresh = 13; /* no whole group of them */
    OK(dray_steps_open(&r, NULL, 4, &steps, &error));
    want.fresh = DRAY_FRESH_LEFT;
    want.staleness = 0;
    expect_claim(steps, 16, 16, &want);
    dray_steps_close(steps);
    OK(dray_steps_open(&r, NULL, 5, &steps, &error)); /* nothing newer will come */
    want = (dray_claim_options){.policy = DRAY_POLICY_GROUP,
                                .up_to = 1,
                                .fresh = DRAY_FRESH_DROP,
                                .staleness = 2,
                                .version = 5};
    expect_claim(steps, 16, 16, &want);
    dray_steps_close(steps);
}

TEST(test_contradictions)
{
    dray_error error;
    dray_steps *steps = NULL;
    dray_steps_rules wrong[8];
    for (size_t i = 0; i < 8; i++)
        wrong[i] = rules_of(2, 1, 2);
    wrong[0].oldest = 0;
    wrong[1].newest = 0;
    wrong[2].newest = 3;
    wrong[3].open = 0;
    wrong[4].kept = 0;
    wrong[5].rows = 15;
    wrong[6].group = 0;
    wrong[7].fresh = 17;
    for (size_t i = 0; i < 8; i++)
        FAILS(DRAY_EINVALID, dray_steps_open(&wrong[i], NULL, 0, &steps, &error));
    assert_null(steps);
    dray_steps_close(NULL);
}

int main(void)
{
    if (!mkdtemp(folder))
        return 1;
    return suite_run(NULL, NULL);
}
