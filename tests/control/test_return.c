/* Tests a coordinator that is killed and started again. Members continue their sessions under their
 * ids, and no other member gets those ids. */
#include "control/channel.h"
#include "control/context.h"
#include "control/restartable.h"
#include "suite.h"

#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/stat.h>

static restartable *f;

FIXTURE(start)
{
    f = restartable_start(NULL, false);
    return 0;
}

FIXTURE(start_tcp)
{
    f = restartable_start(NULL, true);
    setenv("DRAY_TOKEN_FILE", f->token, 1);
    return 0;
}

FIXTURE(stop)
{
    restartable_stop(f);
    unsetenv("DRAY_TOKEN_FILE");
    return 0;
}

static void goes_on(const char *address)
{
    dray_error error;
    dray_context *a = fixture_open_at(address, "a", "trainer", 0);
    dray_context *b = fixture_open_at(address, "b", "engine", 1);
    uint64_t first = dray_context_member(a), second = dray_context_member(b);
    assert_int_not_equal(first, second);
    for (uint64_t round = 1; round <= 3; round++) {
        restartable_restart(f);
        char *text = NULL;
        assert_int_equal(dray_context_status(a, &text, &error), DRAY_OK);
        dray_free(text);
        assert_int_equal(dray_barrier(b, "alone", 1, 10 * DRAY__SECOND, &error), DRAY_OK);
        assert_int_equal(dray_context_member(a), first);
        assert_int_equal(dray_context_member(b), second);
        assert_int_equal(dray__context_returns(a), round);
        dray_context *fresh = fixture_open_at(address, "a", "trainer", 0);
        assert_true(dray_context_member(fresh) > second);
        assert_true(dray_context_epoch(fresh) > dray_context_epoch(a));
        second = dray_context_member(fresh) > second ? second : 0;
        dray_close(fresh);
    }
    dray_close(a);
    dray_close(b);
}

TEST_WITHIN(test_sessions_go_on, start, stop)
{
    goes_on(f->unix_address);
}

TEST_WITHIN(test_sessions_go_on_over_tls, start_tcp, stop)
{
    goes_on(f->tcp_address);
}

static int claim_as(dray_context *mine, uint64_t member, uint64_t epoch, const uint8_t *token,
                    dray_error *error)
{
    dray__channel *channel;
    dray__writer w = {0};
    assert_int_equal(
        dray__channel_connect(f->unix_address, dray__deadline(10 * DRAY__SECOND), &channel, error),
        0);
    dray__put_u32(&w, DRAY__PROTOCOL_VERSION);
    dray__put_u32(&w, DRAY__PROTOCOL_VERSION);
    dray__put_string(&w, mine->name);
    dray__put_string(&w, mine->role);
    dray__put_u32(&w, mine->rank);
    dray__put_u64(&w, mine->host);
    dray__put_i64(&w, getpid());
    dray__put_u64(&w, member);
    dray__put_u64(&w, epoch);
    dray__put_blob(&w, token, token ? 16 : 0);
    int status = dray__call(channel, DRAY__MSG_RETURN, &w, NULL, 0,
                            dray__deadline(10 * DRAY__SECOND), NULL, error);
    dray__writer_free(&w);
    dray__channel_close(channel);
    return status;
}

TEST_WITHIN(test_strangers_are_refused, start, stop)
{
    dray_error error;
    dray_context *a = fixture_open_at(f->unix_address, "a", "trainer", 0);
    dray_context *b = fixture_open_at(f->unix_address, "b", "engine", 0);
    assert_int_equal(claim_as(a, a->member, a->epoch, a->token, &error), DRAY_ECLOSED);
    restartable_restart(f);
    assert_int_equal(claim_as(b, a->member, a->epoch, b->token, &error), DRAY_EPERM);
    assert_int_equal(claim_as(b, a->member, a->epoch, a->token, &error), DRAY_EPERM);
    assert_int_equal(claim_as(a, a->member, a->epoch + 1, a->token, &error), DRAY_EPERM);
    assert_int_equal(claim_as(a, a->member + 7, a->epoch, a->token, &error), DRAY_EPERM);
    assert_int_equal(claim_as(a, a->member, a->epoch, NULL, &error), DRAY_EPERM);
    assert_int_equal(dray_barrier(a, "x", 1, 10 * DRAY__SECOND, &error), DRAY_OK);
    assert_int_equal(claim_as(a, a->member, a->epoch, a->token, &error), DRAY_EBUSY);
    assert_int_equal(dray_barrier(a, "x", 1, 10 * DRAY__SECOND, &error), DRAY_OK);
    dray_close(a);
    dray_close(b);
}

/* Another secret: whoever comes is unknown, and is told so at once. */
TEST_WITHIN(test_another_state_knows_nobody, start, stop)
{
    dray_error error;
    dray_context *a = fixture_open_at(f->unix_address, "a", "trainer", 0);
    restartable_hold(f);
    assert_int_equal(unlink(f->state), 0);
    restartable_again(f);
    int64_t begin = dray__now();
    assert_int_equal(dray_barrier(a, "x", 1, 10 * DRAY__SECOND, &error), DRAY_EPERM);
    assert_non_null(strstr(error.message, "anew"));
    assert_true(dray__now() - begin < 5 * DRAY__SECOND);
    dray_close(a);
    a = fixture_open_at(f->unix_address, "a", "trainer", 0);
    dray_close(a);
}

/* The token of before opens no connection to a coordinator that has another. */
TEST_WITHIN(test_another_token_is_refused, start_tcp, stop)
{
    dray_error error;
    dray_context *a = fixture_open_at(f->tcp_address, "a", "trainer", 0);
    char kept[200];
    snprintf(kept, sizeof kept, "%s.kept", f->token);
    assert_int_equal(link(f->token, kept), 0);
    restartable_hold(f);
    assert_int_equal(unlink(f->token), 0);
    restartable_again(f);
    setenv("DRAY_TOKEN_FILE", kept, 1);
    assert_int_not_equal(dray_report_post(a, "x", "{}", &error), DRAY_OK);
    setenv("DRAY_TOKEN_FILE", f->token, 1);
    assert_int_equal(dray_report_post(a, "x", "{}", &error), DRAY_OK);
    unlink(kept);
    dray_close(a);
}

/* Nobody comes back: calls end at their deadline. An orderly end: at once. */
TEST_WITHIN(test_ends, start, stop)
{
    dray_error error;
    dray_options options = DRAY_OPTIONS_INIT;
    dray_context *a;
    options.address = f->unix_address;
    options.timeout_ns = DRAY__SECOND / 2;
    assert_int_equal(dray_open(&options, &a, &error), DRAY_OK);
    dray_context *b = fixture_open_at(f->unix_address, "b", "trainer", 0);
    restartable_hold(f);
    int64_t begin = dray__now();
    assert_int_equal(dray_report_post(a, "x", "{}", &error), DRAY_ECLOSED);
    assert_true(dray__now() - begin >= DRAY__SECOND / 2);
    assert_true(dray__now() - begin < 10 * DRAY__SECOND);
    restartable_again(f);
    assert_int_equal(dray_report_post(a, "x", "{}", &error), DRAY_OK);
    assert_int_equal(dray_report_post(b, "x", "{}", &error), DRAY_OK);
    restartable_end(f);
    begin = dray__now();
    assert_int_equal(dray_report_post(b, "x", "{}", &error), DRAY_ECLOSED);
    assert_true(dray__now() - begin < 10 * DRAY__SECOND);
    struct stat st;
    assert_int_not_equal(stat(f->state, &st), 0);
    restartable_again(f);
    dray_close(a);
    dray_close(b);
}

static void *post(void *context)
{
    return (void *)(intptr_t)dray_report_post(context, "x", "{}", NULL);
}

/* A deadline is that of the call: not the context's, nor that of what another thread waits for. */
TEST_WITHIN(test_deadlines_are_the_calls, start, stop)
{
    const int64_t patience = DRAY__SECOND / 5;
    dray_error error;
    pthread_t thread;
    void *posted;
    dray_context *a = fixture_open_at(f->unix_address, "a", "trainer", 0); /* with 60 s */
    kill(f->coordinator, SIGSTOP);
    int64_t begin = dray__now();
    assert_int_equal(dray_barrier(a, "x", 1, patience, &error), DRAY_ETIMEDOUT);
    assert_true(dray__now() - begin < 10 * DRAY__SECOND);
    kill(f->coordinator, SIGCONT);
    restartable_hold(f);
    assert_int_equal(pthread_create(&thread, NULL, post, a), 0);
    poll(NULL, 0, 100);
    begin = dray__now();
    for (int i = 0; i < 3; i++)
        assert_int_not_equal(dray_barrier(a, "x", 1, patience, &error), DRAY_OK);
    assert_true(dray__now() - begin < 10 * DRAY__SECOND);
    assert_non_null(strstr(error.message, "another thread"));
    restartable_again(f);
    pthread_join(thread, &posted);
    assert_int_equal((intptr_t)posted, DRAY_OK);
    assert_int_equal(dray_barrier(a, "x", 1, 10 * DRAY__SECOND, &error), DRAY_OK);
    dray_close(a);
}

SUITE(NULL, NULL)
