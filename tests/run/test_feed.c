/* Which groups of a step's prompts a run holds that goes on from a checkpoint of schedule async. */
#include "base/json.h"
#include "run/feed.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
/* after those that it needs */
#include <cmocka.h>

#define OK(call) assert_int_equal((call), DRAY_OK)
#define FAILS(code, call) assert_int_equal((call), (code))

static char folder[] = "/tmp/dray-feed-XXXXXX";

/* Eight prompts a step, four steps' prompts in the queue at once. */
static dray__job *job_of(void)
{
    char path[64];
    dray_error error;
    dray__job *job = NULL;
    snprintf(path, sizeof path, "%s/job.yaml", folder);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs("schedule: async\nstaleness: 1\nrollout: {prompts: 8}\n", file);
    fclose(file);
    OK(dray__job_load(path, NULL, 0, &job, NULL, &error));
    return job;
}

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
static void test_groups(void **state)
{
    (void)state;
    dray_error error;
    dray__job *job = job_of();
    dray__feed *feed = NULL;
    OK(dray__feed_open(job, folder, 0, &feed, &error));
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
    OK(dray__feed_begin(job, folder, card, empty, &error));
    OK(dray__feed_open(job, folder, 3, &feed, &error));
    assert_int_equal(dray__feed_first(feed), 2);
    expect_groups(feed, 2, (const uint32_t[]){0, 2, 3, 4, 6, 7}, 6);
    expect_groups(feed, 3, all, 8);
    expect_groups(feed, 5, (const uint32_t[]){1, 2, 3, 4, 5, 6, 7}, 7);
    train(feed, 2, (const uint32_t[]){5, 0}, 2); /* groups 7 and 0 */
    json_decref(card);
    card = dray__feed_card(feed);
    dray__feed_close(feed);

    json_t *kept = json_pack("{s:[{s:s}]}", "partitions", "name", "step-000002");
    OK(dray__feed_begin(job, folder, card, kept, &error));
    OK(dray__feed_open(job, folder, 4, &feed, &error));
    expect_groups(feed, 2, (const uint32_t[]){0, 2, 3, 4, 6, 7}, 6);
    dray__feed_close(feed);
    OK(dray__feed_begin(job, folder, card, empty, &error));
    OK(dray__feed_open(job, folder, 4, &feed, &error));
    expect_groups(feed, 2, (const uint32_t[]){2, 3, 4, 6}, 4);
    dray__feed_close(feed);
    json_decref(card);
    json_decref(empty);
    json_decref(kept);
    dray__job_free(job);
}

static void test_refused(void **state)
{
    (void)state;
    dray_error error;
    dray__job *job = job_of();
    json_t *empty = json_pack("{s:[]}", "partitions");
    static const char *const cards[] = {
        "{}", "{\"first\": 1}", "{\"first\": 1, \"steps\": [{\"step\": 1, \"trained\": [8]}]}",
        "{\"first\": 1, \"steps\": [{\"step\": 1, \"trained\": [-1]}]}",
        "{\"first\": 1, \"steps\": [{\"step\": 1, \"holds\": [\"a\"], \"trained\": []}]}"};
    for (size_t i = 0; i < sizeof cards / sizeof *cards; i++) {
        json_t *card = NULL;
        OK(dray__json_parse(cards[i], strlen(cards[i]), "card", &card, &error));
        FAILS(DRAY_EFORMAT, dray__feed_begin(job, folder, card, empty, &error));
        json_decref(card);
    }
    OK(dray__feed_begin(job, folder, NULL, empty, &error)); /* of a run that begins */
    dray__feed *feed = NULL;
    OK(dray__feed_open(job, folder, 0, &feed, &error));
    expect_groups(feed, 2, all, 8);
    dray__feed_close(feed);
    json_decref(empty);
    dray__job_free(job);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_groups),
                                       cmocka_unit_test(test_refused)};
    if (!mkdtemp(folder))
        return 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
