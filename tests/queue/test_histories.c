#include "queue/histories.h"

static void test_histories(void **state)
{
    (void)state;
    run_histories(20000 * (uint64_t)test_scale());
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_histories, up, down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
