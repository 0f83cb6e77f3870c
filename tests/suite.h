/* A suite: the tests of one program. They run in the order in which they stand in its file. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka expects the headers above it. */
#include <cmocka.h>

static struct CMUnitTest suite_tests[64]; /* cmocka skips empty ones */
static size_t suite_count;

static inline void suite_add(struct CMUnitTest test)
{
    assert_true(suite_count < sizeof suite_tests / sizeof *suite_tests);
    suite_tests[suite_count++] = test;
}

/* Defines a test, or one with a set-up and a tear-down of its own: TEST(name) { ... }. */
#define TEST(name) TEST_WITHIN(name, NULL, NULL)
#define TEST_WITHIN(name, up, down)                                                                \
    static void name(void **state);                                                                \
    __attribute__((constructor(1000 + __COUNTER__))) static void name##_is_added(void)             \
    {                                                                                              \
        suite_add((struct CMUnitTest)cmocka_unit_test_setup_teardown(name, up, down));             \
    }                                                                                              \
    static void name(void **state __attribute__((unused)))

/* Defines a function that runs before or after tests: FIXTURE(name) { ... return 0; }. */
#define FIXTURE(name) static int name(void **state __attribute__((unused)))

/* Runs all tests, between a set-up and a tear-down of the whole suite (or NULL). Returns the number
 * of tests that failed. */
static inline int suite_run(CMFixtureFunction up, CMFixtureFunction down)
{
    return cmocka_run_group_tests(suite_tests, up, down);
}

/* Defines the main function of a program that only runs its suite. */
#define SUITE(up, down)                                                                            \
    int main(void)                                                                                 \
    {                                                                                              \
        return suite_run(up, down);                                                                \
    }
