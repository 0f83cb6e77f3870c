/* Tests which connections of a listener may stay, and which are closed to make room for others
 * (base/callers.h). */

#include "base/callers.h"
#include "base/clock.h"
#include "suite.h"

#include <poll.h>
#include <sys/resource.h>

enum { FILES = 64, STRANGERS = FILES / DRAY__STRANGERS_PART, KNOWN = FILES / 4, MANY = 100 };

static dray__callers callers;
static dray__caller all[MANY];
static int ended[MANY], end_count;

static void note(void *user, dray__caller *caller)
{
    (void)user;
    ended[end_count++] = (int)(caller - all);
}

static int begin(void **state)
{
    static struct rlimit before;
    (void)state;
    if (!before.rlim_cur)
        getrlimit(RLIMIT_NOFILE, &before);
    struct rlimit few = {FILES, before.rlim_max};
    end_count = 0;
    dray__callers_init(&callers, "test", 4, DRAY__SECOND / 20, note, NULL);
    return setrlimit(RLIMIT_NOFILE, &few);
}

static void enter_known(int count, bool busy)
{
    for (int i = 0; i < count; i++) {
        assert_true(dray__callers_enter(&callers, &all[i], NULL));
        dray__callers_heard(&callers, &all[i]);
        all[i].busy = busy;
    }
}

TEST_WITHIN(the_oldest_stranger_ends, begin, NULL)
{
    for (int i = 0; i < STRANGERS + 3; i++)
        assert_true(dray__callers_enter(&callers, &all[i], NULL));
    assert_int_equal(callers.stranger_count, STRANGERS);
    assert_int_equal(end_count, 3);
    for (int i = 0; i < 3; i++)
        assert_int_equal(ended[i], i);
    dray__callers_leave(&callers, &all[0]); /* it has left already */
    dray__callers_heard(&callers, &all[1]); /* it speaks while it is being ended */
    assert_int_equal(callers.known_count, 0);
}

TEST_WITHIN(strangers_have_their_time, begin, NULL)
{
    for (int i = 0; i < 3; i++)
        assert_true(dray__callers_enter(&callers, &all[i], NULL));
    dray__callers_heard(&callers, &all[1]);
    dray__callers_sweep(&callers);
    assert_int_equal(end_count, 0);
    poll(NULL, 0, 60);
    dray__callers_sweep(&callers);
    assert_int_equal(end_count, 2);
    assert_int_equal(ended[0] + ended[1], 2);
    assert_int_equal(callers.known_count, 1);
}

TEST_WITHIN(who_was_silent_longest_ends, begin, NULL)
{
    enter_known(KNOWN, false);
    assert_true(dray__callers_enter(&callers, &all[KNOWN], NULL));
    assert_int_equal(end_count, 0); /* it may be nobody */
    dray__callers_heard(&callers, &all[0]);
    all[1].busy = true;
    dray__callers_heard(&callers, &all[KNOWN]);
    assert_int_equal(end_count, 1);
    assert_int_equal(ended[0], 2);
    assert_int_equal(callers.known_count, KNOWN);
}

TEST_WITHIN(nobody_ends_who_is_busy, begin, NULL)
{
    enter_known(KNOWN, true);
    assert_false(dray__callers_enter(&callers, &all[KNOWN], NULL));
    assert_false(dray__callers_make_room(&callers));
    assert_int_equal(end_count, 0);
    dray__callers_leave(&callers, &all[5]);
    assert_true(dray__callers_enter(&callers, &all[KNOWN], NULL));
    assert_true(dray__callers_make_room(&callers));
    assert_int_equal(ended[0], KNOWN);
}

SUITE(NULL, NULL)
