/* A producer stopped after its put, superseded and continued: 10,000 times. */
#include "queue/stopped.h"

static void test_superseded_producer(void **state)
{
    (void)state;
    supersede(10000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_superseded_producer, up, down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
