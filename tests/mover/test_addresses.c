/* mover: where data servers may listen. What is no address, or half of one, is refused: none of it
 * is dropped. */
#include "mover/stream.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static void addresses_are_taken_whole(void **state)
{
    (void)state;
    static const char *const good[] = {"127.0.0.1", "127.0.0.1:0"};
    static const char *const bad[] = {"",           "localhost",  "127.0.0.1:x", "127.0.0.1:70000",
                                      "127.0.0.1:", "[::1]7000",  "[::1]x:7000", "[::1",
                                      "::1]:7000",  "[127.0.0.1", "[]:7000"};
    char endpoint[DRAY__STREAM_ADDRESS];
    dray_error e;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        int fd;
        assert_int_equal(dray__stream_listen(good[i], endpoint, &fd, &e), DRAY_OK);
        assert_memory_equal(endpoint, "tcp:127.0.0.1:", 14);
        close(fd);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int fd = -1, rc = dray__stream_listen(bad[i], endpoint, &fd, &e);
        if (rc != DRAY_EINVALID || fd >= 0)
            fail_msg("'%s': %s at %s", bad[i], dray_error_name(rc), rc ? "-" : endpoint);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(addresses_are_taken_whole)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
