/* Tests barriers of control, with members that leave, come back, and are killed. */
#include "control/fixture.h"
#include "suite.h"

#include "base/random.h"
#include "seed.h"

#include <poll.h>
#include <stdatomic.h>
#include <time.h>

static coordinator_fixture f;
static uint64_t seed;

static uint64_t draw(uint64_t below)
{
    static uint64_t drawn;
    return dray__random_u64(seed, 0, drawn++) % below;
}

FIXTURE(start)
{
    seed = test_seed();
    f.tcp = false;
    fixture_fork(&f, NULL);
    return 0;
}

FIXTURE(stop)
{
    fixture_stop(&f);
    return 0;
}

enum { MEMBERS = 8, ROUNDS = 200 };

static _Atomic int entered;

static void *many_rounds(void *user)
{
    dray_context *context = fixture_open(&f, "member", "task", (uint32_t)(uintptr_t)user);
    void *failed = NULL;
    for (int round = 1; round <= ROUNDS && !failed; round++) {
        entered++;
        int status = dray_barrier(context, "round", MEMBERS, 60 * DRAY__SECOND, NULL);
        if (status || entered < round * MEMBERS)
            failed = user ? user : (void *)1;
    }
    dray_close(context);
    return failed;
}

TEST(nobody_passes_early)
{
    pthread_t threads[MEMBERS];
    for (uintptr_t i = 0; i < MEMBERS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, many_rounds, (void *)i), 0);
    for (int i = 0; i < MEMBERS; i++) {
        void *failed;
        pthread_join(threads[i], &failed);
        assert_null(failed);
    }
    assert_int_equal(entered, MEMBERS * ROUNDS);
}

/* How many have entered the barrier; 0 where there is none. */
static int count_entered(dray_context *context, const char *name)
{
    char *text;
    assert_int_equal(dray_context_status(context, &text, NULL), DRAY_OK);
    json_t *object = json_loads(text, 0, NULL), *entry;
    dray_free(text);
    size_t i;
    int count = 0;
    json_array_foreach(json_object_get(object, "barriers"), i,
                       entry) if (strcmp(json_string_value(json_object_get(entry, "name")), name) ==
                                  0) count =
        (int)json_integer_value(json_object_get(entry, "entered"));
    json_decref(object);
    return count;
}

static void wait_entered(dray_context *context, const char *name, int count)
{
    for (int i = 0; i < 10000 && count_entered(context, name) != count; i++)
        poll(NULL, 0, 2);
    assert_int_equal(count_entered(context, name), count);
}

static void *enter_pair(void *user)
{
    return (void *)(intptr_t)dray_barrier(user, "pair", 2, 60 * DRAY__SECOND, NULL);
}

TEST(misuse_hurts_nobody)
{
    dray_context *a = fixture_open(&f, "a", "task", 0), *b = fixture_open(&f, "b", "task", 0);
    dray_error error;
    void *result;
    pthread_t thread;
    assert_int_equal(dray_barrier(a, "", 1, 0, &error), DRAY_EINVALID);
    assert_int_equal(dray_barrier(a, NULL, 1, 0, &error), DRAY_EINVALID);
    assert_int_equal(dray_barrier(a, "x", 0, 0, &error), DRAY_EINVALID);
    assert_int_equal(dray_barrier(a, "x", 1, -2, &error), DRAY_EINVALID);
    assert_int_equal(dray_barrier(a, "x", 1, DRAY_WAIT_DEFAULT, &error), DRAY_OK);
    assert_int_equal(dray_barrier(a, "x", 1, INT64_MAX, &error), DRAY_OK);
    char longer[300];
    memset(longer, 'x', sizeof longer);
    longer[299] = 0;
    assert_int_equal(dray_barrier(a, longer, 1, 0, &error), DRAY_EFORMAT);
    assert_int_equal(pthread_create(&thread, NULL, enter_pair, a), 0);
    wait_entered(b, "pair", 1);
    assert_int_equal(dray_barrier(a, "pair", 2, DRAY__SECOND, &error), DRAY_EBUSY);
    assert_int_equal(dray_barrier(b, "pair", 3, DRAY__SECOND, &error), DRAY_EINVALID);
    assert_non_null(strstr(error.message, "3 members, others entered for 2"));
    assert_int_equal(dray_barrier(b, "pair", 2, DRAY__SECOND, &error), DRAY_OK);
    pthread_join(thread, &result);
    assert_null(result);
    dray_close(a);
    dray_close(b);
}

TEST(who_times_out_may_come_back)
{
    dray_context *a = fixture_open(&f, "a", "task", 0), *b = fixture_open(&f, "b", "task", 0);
    dray_error error;
    void *result;
    pthread_t thread;
    for (int i = 0; i < 5; i++) {
        assert_int_equal(dray_barrier(a, "pair", 2, i * DRAY__MILLISECOND, &error), DRAY_ETIMEDOUT);
        assert_non_null(strstr(error.message, "1 of 2"));
        assert_int_equal(count_entered(b, "pair"), 0);
    }
    assert_int_equal(pthread_create(&thread, NULL, enter_pair, a), 0);
    wait_entered(b, "pair", 1);
    assert_int_equal(dray_barrier(b, "pair", 2, 0, &error),
                     DRAY_OK); /* the last one need not wait */
    pthread_join(thread, &result);
    assert_null(result);
    dray_close(a);
    dray_close(b);
}

TEST(contexts_do_not_wait_for_their_own_barriers)
{
    dray_context *a = fixture_open(&f, "a", "task", 0), *b = fixture_open(&f, "b", "task", 0);
    pthread_t thread;
    void *result;
    assert_int_equal(pthread_create(&thread, NULL, enter_pair, a), 0);
    wait_entered(a, "pair", 1); /* a's other calls go on */
    assert_int_equal(dray_report_post(a, "note", "{}", NULL), DRAY_OK);
    assert_int_equal(dray_barrier(a, "other", 1, 0, NULL), DRAY_OK);
    assert_int_equal(dray_barrier(b, "pair", 2, DRAY__SECOND, NULL), DRAY_OK);
    pthread_join(thread, &result);
    assert_null(result);
    dray_close(a);
    dray_close(b);
}

/* A member's process: enters, and tells through its exit status what it was told. */
static void child_main(uint32_t rank, uint32_t count, int pipe_end)
{
    dray_error error;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dray_context *context = fixture_open(&f, "child", "engine", rank);
    uint64_t member = dray_context_member(context);
    if (write(pipe_end, &member, sizeof member) != (ssize_t)sizeof member)
        _exit(9);
    int status = dray_barrier(context, "deadly", count, 30 * DRAY__SECOND, &error);
    char told[512] = "";
    snprintf(told, sizeof told, "%s", status ? error.message : "passed");
    if (write(pipe_end, told, sizeof told) != (ssize_t)sizeof told)
        _exit(9);
    dray_close(context);
    _exit(status == DRAY_EDEAD ? 0 : 1);
}

TEST(the_dead_are_named)
{
    dray_context *watcher = fixture_open(&f, "watcher", "tool", 0);
    for (int round = 0; round < test_times(10); round++) {
        int count = 1 + (int)draw(5), pipes[8][2];
        pid_t children[8] = {0};
        uint64_t members[8] = {0};
        for (int i = 0; i < count; i++) {
            assert_int_equal(pipe(pipes[i]), 0);
            children[i] = fork();
            if (children[i] == 0)
                child_main((uint32_t)i, (uint32_t)count + 1, pipes[i][1]);
            assert_int_equal(read(pipes[i][0], &members[i], 8), 8);
        }
        wait_entered(watcher, "deadly", count);
        int victim = (int)draw((uint64_t)count);
        kill(children[victim], SIGKILL);
        char expected[96];
        snprintf(expected, sizeof expected, "member %llu (engine child, rank %d) died",
                 (unsigned long long)members[victim], victim);
        for (int i = 0; i < count; i++) {
            int status;
            assert_int_equal(waitpid(children[i], &status, 0), children[i]);
            char told[512];
            if (i == victim) {
                assert_true(WIFSIGNALED(status));
            } else {
                assert_int_equal(read(pipes[i][0], told, sizeof told), sizeof told);
                if (!strstr(told, expected) || status != 0)
                    fail_msg("seed %llu: expected '%s', told '%s'", (unsigned long long)seed,
                             expected, told);
            }
            close(pipes[i][0]);
            close(pipes[i][1]);
        }
        wait_entered(watcher, "deadly", 0); /* and the name can be used again */
    }
    dray_close(watcher);
}

/* Runs through barriers until one fails: then somebody must have died. */
static void rounds_main(uint32_t rank, uint32_t count)
{
    dray_error error;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dray_context *context = fixture_open(&f, "child", "engine", rank);
    int status = dray_barrier(context, "begin", count, 30 * DRAY__SECOND, &error);
    while (status == DRAY_OK)
        status = dray_barrier(context, "go", count, 300 * DRAY__MILLISECOND, &error);
    /* The survivors meet again, whatever the dead one left. */
    int again = dray_barrier(context, "after", count - 1, 30 * DRAY__SECOND, &error);
    dray_close(context);
    _exit(again == DRAY_OK && (status == DRAY_EDEAD || status == DRAY_ETIMEDOUT) ? 0 : 1);
}

TEST(deaths_at_any_moment_free_the_others)
{
    for (int round = 0; round < test_times(8); round++) {
        pid_t children[4] = {0};
        int count = 2 + (int)draw(3);
        for (int i = 0; i < count; i++) {
            children[i] = fork();
            if (children[i] == 0)
                rounds_main((uint32_t)i, (uint32_t)count);
        }
        dray_context *watcher = fixture_open(&f, "watcher", "tool", 0);
        for (int seen = 0, i = 0; i < 5000 && !seen; i++) { /* until they are running */
            seen = count_entered(watcher, "go");
            poll(NULL, 0, 1);
        }
        poll(NULL, 0, (int)draw(20));
        int victim = (int)draw((uint64_t)count);
        kill(children[victim], SIGKILL);
        for (int i = 0; i < count; i++) {
            int status;
            assert_int_equal(waitpid(children[i], &status, 0), children[i]);
            if (i != victim && status != 0)
                fail_msg("seed %llu: child %d of %d ended with %x", (unsigned long long)seed, i,
                         count, status);
        }
        dray_close(watcher);
    }
}

SUITE(start, stop)
