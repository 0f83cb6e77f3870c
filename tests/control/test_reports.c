/* Tests that reports are posted and watched. */
#include "control/fixture.h"
#include "suite.h"

#include "control/reports.h"

static coordinator_fixture f;
static dray_context *context;

FIXTURE(start)
{
    fixture_start(&f, NULL);
    context = fixture_open(&f, "poster", "trainer", 0);
    return 0;
}

FIXTURE(stop)
{
    dray_close(context);
    fixture_stop(&f);
    return 0;
}

static dray__channel *open_channel(void)
{
    dray__channel *channel;
    assert_int_equal(dray__channel_open(context, &channel, NULL), DRAY_OK);
    return channel;
}

static void post_number(const char *kind, int number)
{
    char text[64];
    snprintf(text, sizeof text, "{\"number\": %d, \"name\": \"is replaced\"}", number);
    assert_int_equal(dray_report_post(context, kind, text, NULL), DRAY_OK);
}

static int number_of(json_t *array, size_t i)
{
    return (int)json_integer_value(json_object_get(json_array_get(array, i), "number"));
}

static int64_t soon(void)
{
    return dray__deadline(30 * DRAY__SECOND);
}

TEST(reports_come_in_order_and_are_completed)
{
    dray__channel *channel = open_channel();
    uint64_t cursor = 0;
    json_t *array;
    for (int i = 0; i < 10; i++)
        post_number("step", i);
    assert_int_equal(dray__reports_watch(channel, NULL, &cursor, soon(), &array, NULL), DRAY_OK);
    assert_int_equal(json_array_size(array), 10);
    for (int i = 0; i < 10; i++) {
        json_t *object = json_array_get(array, (size_t)i);
        assert_int_equal(number_of(array, (size_t)i), i);
        assert_string_equal(json_string_value(json_object_get(object, "kind")), "step");
        assert_string_equal(json_string_value(json_object_get(object, "name")), "poster");
        assert_int_equal(json_integer_value(json_object_get(object, "member")),
                         dray_context_member(context));
        assert_true(json_integer_value(json_object_get(object, "time_ns")) > 0);
    }
    json_decref(array);
    dray_error error;
    assert_int_equal(dray__reports_watch(channel, NULL, &cursor, 0, &array, &error),
                     DRAY_ETIMEDOUT);
    post_number("step", 10);
    assert_int_equal(dray__reports_watch(channel, NULL, &cursor, soon(), &array, NULL), DRAY_OK);
    assert_int_equal(json_array_size(array), 1);
    assert_int_equal(number_of(array, 0), 10);
    json_decref(array);
    dray__channel_close(channel);
}

TEST(kinds_and_cursors)
{
    dray__channel *channel = open_channel();
    uint64_t now = DRAY__REPORTS_NOW, evals = DRAY__REPORTS_NOW;
    json_t *array;
    assert_int_equal(dray__reports_watch(channel, NULL, &now, 0, &array, NULL), DRAY_ETIMEDOUT);
    assert_true(now != DRAY__REPORTS_NOW); /* from here on nothing is missed */
    evals = now;
    post_number("step", 1);
    post_number("eval", 2);
    post_number("step", 3);
    assert_int_equal(dray__reports_watch(channel, "eval", &evals, soon(), &array, NULL), DRAY_OK);
    assert_int_equal(json_array_size(array), 1);
    assert_int_equal(number_of(array, 0), 2);
    json_decref(array);
    uint64_t before = evals;
    assert_int_equal(dray__reports_watch(channel, "none", &evals, 0, &array, NULL), DRAY_ETIMEDOUT);
    assert_true(evals >= before);
    assert_int_equal(dray__reports_watch(channel, NULL, &now, soon(), &array, NULL), DRAY_OK);
    assert_int_equal(json_array_size(array), 3);
    json_decref(array);
    dray__channel_close(channel);
}

static void *watch_all(void *user)
{
    uint64_t cursor = *(uint64_t *)user;
    dray__channel *channel = open_channel();
    intptr_t sum = 0;
    for (bool over = false; !over;) {
        json_t *array, *object;
        size_t i;
        if (dray__reports_watch(channel, "many", &cursor, soon(), &array, NULL))
            break;
        json_array_foreach(array, i, object)
        {
            if (json_object_get(object, "lost"))
                sum = -1000000000;
            sum += json_integer_value(json_object_get(object, "number"));
            over = over || json_integer_value(json_object_get(object, "number")) == 2000;
        }
        json_decref(array);
    }
    dray__channel_close(channel);
    return (void *)sum;
}

TEST(watchers_that_keep_up_lose_nothing)
{
    dray__channel *channel = open_channel();
    uint64_t cursor = DRAY__REPORTS_NOW;
    json_t *array;
    assert_int_equal(dray__reports_watch(channel, NULL, &cursor, 0, &array, NULL), DRAY_ETIMEDOUT);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, watch_all, &cursor), 0);
    for (int i = 1; i <= 2000; i++)
        post_number("many", i);
    for (int i = 0; i < 3; i++) {
        void *sum;
        pthread_join(threads[i], &sum);
        assert_int_equal((intptr_t)sum, 2000 * 2001 / 2);
    }
    dray__channel_close(channel);
}

TEST(late_watchers_are_told_how_many_were_lost)
{
    enum { POSTS = 300, BYTES = 60000 };
    dray__channel *channel = open_channel();
    uint64_t cursor = DRAY__REPORTS_NOW;
    json_t *array;
    assert_int_equal(dray__reports_watch(channel, NULL, &cursor, 0, &array, NULL), DRAY_ETIMEDOUT);
    char *text = malloc(BYTES + 64);
    for (int i = 0; i < POSTS; i++) { /* 18 MB */
        int size = sprintf(text, "{\"number\":%d,\"text\":\"", i);
        memset(text + size, 'x', BYTES);
        strcpy(text + size + BYTES, "\"}");
        assert_int_equal(dray_report_post(context, "big", text, NULL), DRAY_OK);
    }
    int64_t lost = 0, next = 0, answers = 0;
    while (next < POSTS) {
        assert_int_equal(dray__reports_watch(channel, NULL, &cursor, soon(), &array, NULL),
                         DRAY_OK);
        size_t i = 0;
        json_t *first = json_array_get(array, 0);
        if (strcmp(json_string_value(json_object_get(first, "kind")), "lost") == 0) {
            lost += json_integer_value(json_object_get(first, "lost"));
            next = lost;
            i = 1;
        }
        for (; i < json_array_size(array); i++)
            assert_int_equal(number_of(array, i), next++);
        json_decref(array);
        answers++;
    }
    assert_int_equal(next, POSTS);
    assert_true(lost > 0 && (POSTS - lost) * BYTES > 7 << 20 && (POSTS - lost) * BYTES <= 8 << 20);
    assert_true(answers > 4); /* an answer is at most 1 MiB or so */
    free(text);
    dray__channel_close(channel);
}

TEST(bad_reports_are_refused)
{
    static const struct {
        const char *kind, *text;
        int code;
    } cases[] = {
        {"k", "", DRAY_EFORMAT},
        {"k", "[1]", DRAY_EFORMAT},
        {"k", "{\"a\": 1", DRAY_EFORMAT},
        {"k", "{\"a\": 1, \"a\": 2}", DRAY_EFORMAT},
        {"k", "{\"a\": \"\xff\"}", DRAY_EFORMAT},
        {"", "{}", DRAY_EINVALID},
        {NULL, "{}", DRAY_EINVALID},
        {"k", NULL, DRAY_EINVALID},
        {"0123456789012345678901234567890123456789012345678901234567890123456789", "{}",
         DRAY_EFORMAT},
    };
    dray_error error;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(dray_report_post(context, cases[i].kind, cases[i].text, &error),
                         cases[i].code);
    char *text = malloc(70000);
    memset(text, ' ', 70000);
    memcpy(text, "{}", 2);
    text[69999] = 0;
    assert_int_equal(dray_report_post(context, "k", text, &error), DRAY_EINVALID);
    text[65536] = 0;
    assert_int_equal(dray_report_post(context, "k", text, &error), DRAY_OK);
    free(text);
}

SUITE(start, stop)
