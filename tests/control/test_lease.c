/* Tests leases. They are given in the order of the requests, and no name has two holders, whichever
 * process is killed. */
#include "control/restartable.h"
#include "suite.h"

#include "base/random.h"
#include "control/channel.h"
#include "control/token.h"
#include "seed.h"

#include <dray/lease.h>
#include <poll.h>
#include <stdatomic.h>
#include <time.h>

static coordinator_fixture f;
static uint64_t seed;

static uint64_t draw(uint64_t stream, uint64_t at, uint64_t below)
{
    return dray__random_u64(seed, stream, at) % below;
}

FIXTURE(start)
{
    seed = test_seed();
    f.tcp = false;
    f.options = (dray__coordinator_options){.limits = "leases=20"};
    fixture_fork(&f, dray__leases_add);
    return 0;
}

FIXTURE(stop)
{
    fixture_stop(&f);
    return 0;
}

static int take(dray_context *context, const char *const *names, uint32_t count, int64_t timeout_ns,
                int64_t term_ns, dray_lease **out, dray_error *error)
{
    dray_lease_options options = DRAY_LEASE_OPTIONS_INIT;
    options.timeout_ns = timeout_ns;
    options.term_ns = term_ns;
    return dray_lease_acquire(context, names, count, &options, out, error);
}

static int take_one(dray_context *context, const char *name, int64_t timeout_ns, dray_lease **out,
                    dray_error *error)
{
    return take(context, &name, 1, timeout_ns, 0, out, error);
}

/* The lease as `dray status --json` has it; NULL: nobody holds it, or waits for it. */
static json_t *status_of(dray_context *context, const char *name)
{
    char *text;
    assert_int_equal(dray_context_status(context, &text, NULL), DRAY_OK);
    json_t *object = json_loads(text, 0, NULL), *entry, *found = NULL;
    dray_free(text);
    size_t i;
    json_array_foreach(json_object_get(object, "leases"), i,
                       entry) if (strcmp(json_string_value(json_object_get(entry, "name")), name) ==
                                  0) found = json_incref(entry);
    json_decref(object);
    return found;
}

static void wait_until_waiting(dray_context *context, const char *name, size_t count)
{
    size_t found = 0;
    for (int i = 0; i < 10000; i++) {
        json_t *entry = status_of(context, name);
        found = json_array_size(json_object_get(entry, "waiting"));
        json_decref(entry);
        if (found == count)
            return;
        poll(NULL, 0, 1);
    }
    fail_msg("%zu wait for %s, expected %zu", found, name, count);
}

/* ---- one at a time --------------------------------------------------------------------------- */

enum { MEMBERS = 6, ROUNDS = 100, NAMES = 4, TOGETHER = 3 }; /* all: fewer than the limit */

static const char *const shared[NAMES] = {"cuda:0", "cuda:1", "cuda:2", "cpu:0"};
static atomic_int inside[NAMES];
static _Atomic uint64_t newest[NAMES];
static atomic_int violations;

static void *many_turns(void *user)
{
    uint64_t stream = (uint64_t)(uintptr_t)user, at = 0;
    dray_context *context = fixture_open(&f, "member", "task", (uint32_t)stream);
    for (int round = 0; round < ROUNDS; round++) {
        const char *names[NAMES];
        uint32_t which[NAMES], count = 0;
        uint64_t set = 1 + draw(stream, at++, (1 << NAMES) - 1);
        for (uint32_t i = 0; i < NAMES; i++) /* in an order of its own */
            if (count < TOGETHER && set >> ((i + stream) % NAMES) & 1)
                which[count++] = (uint32_t)((i + stream) % NAMES);
        for (uint32_t i = 0; i < count; i++)
            names[i] = shared[which[i]];
        dray_lease *lease;
        dray_error error;
        if (take(context, names, count, 60 * DRAY__SECOND, 0, &lease, &error)) {
            fprintf(stderr, "%s\n", error.message);
            violations++;
            break;
        }
        for (uint32_t i = 0; i < count; i++) {
            violations += inside[which[i]]++ != 0;
            violations += dray_lease_number(lease) <= newest[which[i]];
            newest[which[i]] = dray_lease_number(lease);
        }
        if (draw(stream, at++, 4) == 0)
            violations += dray_lease_check(lease, NULL, NULL) != DRAY_OK;
        for (uint32_t i = 0; i < count; i++)
            violations += --inside[which[i]] != 0;
        violations += dray_lease_release(lease, NULL) != DRAY_OK;
    }
    dray_close(context);
    return NULL;
}

TEST(nobody_shares_a_name)
{
    pthread_t threads[MEMBERS];
    for (uintptr_t i = 0; i < MEMBERS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, many_turns, (void *)i), 0);
    for (int i = 0; i < MEMBERS; i++)
        pthread_join(threads[i], NULL);
    if (violations)
        fail_msg("seed %llu: %d violations", (unsigned long long)seed, violations);
    for (int i = 0; i < NAMES; i++)
        assert_true(newest[i] > 0);
}

/* ---- in the order of their coming ------------------------------------------------------------ */

typedef struct asking {
    const char *names[2];
    uint32_t count;
    atomic_int *grants;
    int place; /* among the grants, from 1 */
    pthread_t thread;
} asking;

static void *ask_and_note(void *user)
{
    asking *a = user;
    dray_lease *lease;
    dray_context *context = fixture_open(&f, "waiter", "task", 0);
    if (take(context, a->names, a->count, 60 * DRAY__SECOND, 0, &lease, NULL) == DRAY_OK) {
        a->place = ++*a->grants;
        dray_lease_release(lease, NULL);
    }
    dray_close(context);
    return NULL;
}

TEST(who_asked_first_has_its_turn_first)
{
    dray_lease *held;
    atomic_int grants = 0;
    /* The second waits for b, too, which is free: the third waits behind it all the same. */
    asking all[] = {{.names = {"a"}, .count = 1},
                    {.names = {"a", "b"}, .count = 2},
                    {.names = {"b"}, .count = 1},
                    {.names = {"a"}, .count = 1}};
    static const size_t in_a[] = {1, 2, 2, 3};
    dray_context *context = fixture_open(&f, "holder", "task", 0);
    assert_int_equal(take_one(context, "a", DRAY_WAIT_DEFAULT, &held, NULL), DRAY_OK);
    for (size_t i = 0; i < 4; i++) {
        all[i].grants = &grants;
        assert_int_equal(pthread_create(&all[i].thread, NULL, ask_and_note, &all[i]), 0);
        wait_until_waiting(context, i == 2 ? "b" : "a", i == 2 ? 2 : in_a[i]);
    }
    uint32_t waiting = 0;
    assert_int_equal(dray_lease_check(held, &waiting, NULL), DRAY_OK);
    assert_int_equal(waiting, 3);
    json_t *entry = status_of(context, "a"), *free_one = status_of(context, "b");
    assert_non_null(strstr(json_string_value(json_object_get(entry, "holder")), "task holder"));
    assert_true(json_is_null(json_object_get(free_one, "holder")));
    json_decref(entry);
    json_decref(free_one);
    assert_int_equal(grants, 0);
    assert_int_equal(dray_lease_release(held, NULL), DRAY_OK);
    for (size_t i = 0; i < 4; i++)
        pthread_join(all[i].thread, NULL);
    assert_int_equal(all[0].place, 1);
    assert_int_equal(all[1].place, 2);
    assert_true(all[2].place >= 3 && all[3].place >= 3);
    assert_null(status_of(context, "a"));
    dray_close(context);
}

TEST(misuse_hurts_nobody)
{
    dray_lease *held, *other;
    dray_error error;
    const char *twice[] = {"x", "y", "x"}, *many[65];
    char longer[300];
    for (int i = 0; i < 65; i++)
        many[i] = "x";
    memset(longer, 'x', sizeof longer);
    longer[299] = 0;
    dray_context *a = fixture_open(&f, "a", "task", 0), *b = fixture_open(&f, "b", "task", 3);
    assert_int_equal(dray_lease_acquire(a, NULL, 1, NULL, &held, &error), DRAY_EINVALID);
    assert_int_equal(dray_lease_acquire(a, many, 0, NULL, &held, &error), DRAY_EINVALID);
    assert_int_equal(dray_lease_acquire(a, many, 65, NULL, &held, &error), DRAY_EINVALID);
    assert_int_equal(take_one(a, "", 0, &held, &error), DRAY_EINVALID);
    assert_int_equal(take_one(a, longer, 0, &held, &error), DRAY_EFORMAT);
    assert_int_equal(take_one(a, "two\nlines", 0, &held, &error), DRAY_EFORMAT);
    assert_int_equal(take_one(a, "x", -2, &held, &error), DRAY_EINVALID);
    assert_int_equal(take(a, twice, 1, 0, -1, &held, &error), DRAY_EINVALID);
    assert_int_equal(take(a, twice, 3, 0, 0, &held, &error), DRAY_EINVALID);
    assert_non_null(strstr(error.message, "there twice"));
    assert_int_equal(take_one(a, "x", 0, &held, &error), DRAY_OK); /* free: it need not wait */
    assert_int_equal(take_one(a, "x", DRAY__SECOND, &other, &error), DRAY_EBUSY);
    assert_non_null(strstr(error.message, "this session holds it"));
    for (int i = 0; i < 3; i++) {
        assert_int_equal(take_one(b, "x", i * DRAY__MILLISECOND, &other, &error), DRAY_ETIMEDOUT);
        assert_non_null(strstr(error.message, "(task a, rank 0) has held it for"));
        wait_until_waiting(a, "x", 0);
    }
    assert_int_equal(dray_lease_release(held, &error), DRAY_OK);
    assert_int_equal(take_one(b, "x", INT64_MAX, &other, &error), DRAY_OK);
    assert_int_equal(dray_lease_release(other, &error), DRAY_OK);
    assert_int_equal(dray_lease_release(NULL, &error), DRAY_OK);
    dray_close(a);
    dray_close(b);
}

TEST(a_token_has_a_limit)
{
    dray_lease *held[2], *other;
    dray_error error;
    char texts[21][16];
    const char *names[21];
    for (int i = 0; i < 21; i++) {
        snprintf(texts[i], sizeof texts[i], "n%d", i);
        names[i] = texts[i];
    }
    dray_context *a = fixture_open(&f, "a", "task", 0), *b = fixture_open(&f, "b", "task", 1);
    assert_int_equal(take(a, names, 16, 0, 0, &held[0], &error), DRAY_OK);
    assert_int_equal(take(a, names + 16, 5, 0, 0, &other, &error), DRAY_EFULL);
    assert_non_null(strstr(error.message, "the token master would have 21 leases"));
    assert_int_equal(take(a, names + 16, 4, 0, 0, &held[1], &error), DRAY_OK);
    assert_int_equal(take(b, names + 20, 1, 0, 0, &other, &error), DRAY_EFULL);
    assert_int_equal(dray_lease_release(held[1], NULL), DRAY_OK);
    assert_int_equal(take(b, names + 20, 1, 0, 0, &held[1], &error), DRAY_OK);
    assert_int_equal(dray_lease_release(held[1], NULL), DRAY_OK);
    assert_int_equal(dray_lease_release(held[0], NULL), DRAY_OK);
    dray_close(a);
    dray_close(b);
}

/* Whoever gave up before the answer came, and closed its connection, holds nothing. */
TEST(a_lease_ends_with_its_connection)
{
    dray_lease *lease;
    dray__channel *channel;
    dray__writer w = {0};
    dray_context *a = fixture_open(&f, "a", "task", 0), *b = fixture_open(&f, "b", "task", 1);
    assert_int_equal(dray__channel_open(a, &channel, NULL), DRAY_OK);
    dray__put_u32(&w, 1);
    dray__put_string(&w, "left");
    dray__put_i64(&w, DRAY__SECOND);
    dray__put_i64(&w, 0);
    assert_int_equal(dray__call(channel, DRAY__MSG_LEASE_TAKE, &w, NULL, 0,
                                dray__deadline(20 * DRAY__SECOND), NULL, NULL),
                     DRAY_OK);
    dray__writer_free(&w);
    assert_int_equal(take_one(b, "left", 0, &lease, NULL), DRAY_ETIMEDOUT);
    dray__channel_close(channel);
    assert_int_equal(take_one(b, "left", 20 * DRAY__SECOND, &lease, NULL), DRAY_OK);
    assert_int_equal(dray_lease_release(lease, NULL), DRAY_OK);
    dray_close(a);
    dray_close(b);
}

/* ---- deaths ---------------------------------------------------------------------------------- */

typedef struct arena {
    atomic_int holder;         /* the process that is inside; 0: none */
    atomic_int victim;         /* it is killed now */
    atomic_int turns, strange; /* turns that met somebody who lived */
} arena;

static void turns_main(arena *all, uint32_t rank)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dray_context *context = fixture_open(&f, "child", "engine", rank);
    for (;;) {
        dray_lease *lease;
        if (take_one(context, "deadly", 30 * DRAY__SECOND, &lease, NULL))
            _exit(1);
        int before = atomic_exchange(&all->holder, getpid());
        all->strange += before && before != all->victim;
        all->turns++;
        poll(NULL, 0, (int)draw(rank, (uint64_t)all->turns, 2));
        all->holder = 0;
        if (dray_lease_release(lease, NULL))
            _exit(2);
    }
}

static void wait_for_turns(const arena *all, int more)
{
    int begun = all->turns;
    for (int i = 0; i < 20000 && all->turns < begun + more; i++)
        poll(NULL, 0, 1);
    if (all->turns < begun + more)
        fail_msg("seed %llu: no turns go on", (unsigned long long)seed);
}

TEST(the_dead_hold_nothing)
{
    enum { CHILDREN = 4 };
    pid_t children[CHILDREN];
    arena *all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(all != MAP_FAILED);
    for (uint32_t i = 0; i < CHILDREN; i++)
        if ((children[i] = fork()) == 0)
            turns_main(all, i);
    for (uint64_t round = 0; round < (uint64_t)test_times(50); round++) {
        wait_for_turns(all, 5);
        poll(NULL, 0, (int)draw(100, round, 3));
        uint64_t i = draw(101, round, CHILDREN);
        all->victim = children[i];
        kill(children[i], SIGKILL);
        int status;
        assert_int_equal(waitpid(children[i], &status, 0), children[i]);
        if (!WIFSIGNALED(status) || all->strange)
            fail_msg("seed %llu: child ended with %x, %d turns at once", (unsigned long long)seed,
                     status, all->strange);
        wait_for_turns(all, 5);
        if ((children[i] = fork()) == 0)
            turns_main(all, (uint32_t)i);
    }
    for (int i = 0; i < CHILDREN; i++) {
        kill(children[i], SIGKILL);
        waitpid(children[i], NULL, 0);
    }
    munmap(all, sizeof *all);
}

/* Holds the lease, tells its number, and tells what it finds when a byte comes. */
static void hold_main(int64_t term_ns, int in, int out)
{
    char byte;
    dray_lease *lease;
    const char *name = "held";
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dray_context *context = fixture_open(&f, "stopped", "engine", 0);
    if (take(context, &name, 1, 30 * DRAY__SECOND, term_ns, &lease, NULL))
        _exit(9);
    int64_t told[2] = {(int64_t)dray_lease_number(lease), 0};
    if (write(out, told, 8) != 8 || read(in, &byte, 1) != 1)
        _exit(9);
    told[0] = dray_lease_check(lease, NULL, NULL);
    told[1] = dray_lease_release(lease, NULL);
    if (write(out, told, 16) != 16)
        _exit(9);
    _exit(0);
}

static pid_t holder(int64_t term_ns, int in[2], int out[2], int64_t *number)
{
    assert_true(pipe(in) == 0 && pipe(out) == 0);
    pid_t child = fork();
    if (child == 0)
        hold_main(term_ns, in[0], out[1]);
    assert_int_equal(read(out[0], number, 8), 8);
    return child;
}

static void close_pipes(const int in[2], const int out[2])
{
    for (int i = 0; i < 2; i++) {
        close(in[i]);
        close(out[i]);
    }
}

/* With a term, a holder that was stopped learns that its turn is over. */
TEST(the_silent_lose_it_after_their_term)
{
    dray_error error;
    dray_lease *lease;
    int in[2], out[2];
    int64_t number, told[2];
    pid_t child = holder(100 * DRAY__MILLISECOND, in, out, &number);
    dray_context *context = fixture_open(&f, "next", "trainer", 0);
    kill(child, SIGSTOP);
    int64_t begun = dray__now();
    assert_int_equal(take_one(context, "held", 30 * DRAY__SECOND, &lease, &error), DRAY_OK);
    assert_true(dray__now() - begun < 20 * DRAY__SECOND);
    assert_true((int64_t)dray_lease_number(lease) > number);
    kill(child, SIGCONT);
    assert_int_equal(write(in[1], "x", 1), 1);
    assert_int_equal(read(out[0], told, 16), 16);
    assert_int_equal(told[0], DRAY_ESTALE);
    assert_int_equal(told[1], DRAY_ESTALE);
    assert_int_equal(dray_lease_check(lease, NULL, &error), DRAY_OK); /* it hurts nobody */
    assert_int_equal(dray_lease_release(lease, &error), DRAY_OK);
    assert_int_equal(waitpid(child, NULL, 0), child);
    close_pipes(in, out);
    dray_close(context);
}

/* Without one, it is kept until the process dies: then it is free at once. */
TEST(without_a_term_it_lives_with_its_process)
{
    dray_error error;
    dray_lease *lease;
    int in[2], out[2];
    int64_t number;
    pid_t child = holder(0, in, out, &number);
    dray_context *context = fixture_open(&f, "next", "trainer", 0);
    kill(child, SIGSTOP);
    assert_int_equal(take_one(context, "held", 300 * DRAY__MILLISECOND, &lease, &error),
                     DRAY_ETIMEDOUT);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
    int64_t begun = dray__now();
    assert_int_equal(take_one(context, "held", 30 * DRAY__SECOND, &lease, &error), DRAY_OK);
    assert_true(dray__now() - begun < 10 * DRAY__SECOND);
    assert_int_equal(dray_lease_release(lease, &error), DRAY_OK);
    close_pipes(in, out);
    dray_close(context);
}

/* A holder that says in time that it is there keeps it, and one for whom nobody waits, too. */
TEST(a_term_begins_anew)
{
    dray_lease *lease, *other;
    const char *name = "renewed", *lonely = "lonely";
    dray_context *a = fixture_open(&f, "a", "task", 0), *b = fixture_open(&f, "b", "task", 1);
    assert_int_equal(take(a, &lonely, 1, 0, DRAY__MILLISECOND, &lease, NULL), DRAY_OK);
    poll(NULL, 0, 50);
    assert_int_equal(dray_lease_release(lease, NULL), DRAY_OK);
    assert_int_equal(take(a, &name, 1, 0, 1500 * DRAY__MILLISECOND, &lease, NULL), DRAY_OK);
    assert_int_equal(take_one(b, name, 700 * DRAY__MILLISECOND, &other, NULL), DRAY_ETIMEDOUT);
    assert_int_equal(dray_lease_check(lease, NULL, NULL), DRAY_OK);
    assert_int_equal(take_one(b, name, DRAY__SECOND, &other, NULL), DRAY_ETIMEDOUT);
    assert_int_equal(take_one(b, name, 20 * DRAY__SECOND, &other, NULL), DRAY_OK);
    assert_int_equal(dray_lease_release(lease, NULL), DRAY_ESTALE);
    assert_int_equal(dray_lease_release(other, NULL), DRAY_OK);
    dray_close(a);
    dray_close(b);
}

/* ---- another coordinator --------------------------------------------------------------------- */

TEST(the_next_coordinator_takes_it_back)
{
    dray_lease *kept, *lost, *timed, *other;
    dray_error error;
    const char *name = "timed";
    restartable *r = restartable_start(dray__leases_add, false);
    dray_context *a = fixture_open_at(r->unix_address, "a", "task", 0),
                 *b = fixture_open_at(r->unix_address, "b", "task", 1);
    assert_int_equal(take_one(a, "kept", 0, &kept, &error), DRAY_OK);
    assert_int_equal(take_one(a, "lost", 0, &lost, &error), DRAY_OK);
    assert_int_equal(take(a, &name, 1, 0, 20 * DRAY__SECOND, &timed, &error), DRAY_OK);
    uint64_t number = dray_lease_number(kept);
    restartable_kill(r);
    assert_int_equal(take_one(b, "lost", 20 * DRAY__SECOND, &other, &error), DRAY_OK);
    assert_true(dray_lease_number(other) > dray_lease_number(lost));
    assert_int_equal(dray_lease_check(kept, NULL, &error), DRAY_OK);
    assert_int_equal(dray_lease_check(lost, NULL, &error), DRAY_ESTALE);
    assert_int_equal(dray_lease_check(timed, NULL, &error), DRAY_ESTALE);
    assert_int_equal(dray_lease_number(kept), number);
    assert_int_equal(dray_lease_release(other, &error), DRAY_OK);
    assert_int_equal(take_one(b, "kept", 0, &other, &error), DRAY_ETIMEDOUT);
    assert_int_equal(dray_lease_release(kept, &error), DRAY_OK);
    assert_int_equal(dray_lease_release(lost, &error), DRAY_ESTALE);
    assert_int_equal(dray_lease_release(timed, &error), DRAY_ESTALE);
    assert_int_equal(take_one(b, "kept", 0, &other, &error), DRAY_OK);
    assert_int_equal(dray_lease_release(other, &error), DRAY_OK);
    dray_close(a);
    dray_close(b);
    restartable_stop(r);
}

/* ---- tokens ---------------------------------------------------------------------------------- */

TEST(a_token_takes_names_of_its_role)
{
    static const struct {
        const char *role, *name;
        int expected;
    } cases[] = {
        {"engine", "engine/x", DRAY_OK},
        {"engine", "engine+trainer/cuda:0", DRAY_OK},
        {"trainer", "engine+trainer/cuda:0", DRAY_OK},
        {"task", "task/x", DRAY_OK},
        {"task", "engine+trainer/cuda:0", DRAY_EPERM},
        {"task", "engine/x", DRAY_EPERM},
        {"engine", "trainer/x", DRAY_EPERM},
        {"engine", "engine", DRAY_EPERM},
        {"engine", "engines/x", DRAY_EPERM},
        {"engine", "x/engine/y", DRAY_EPERM},
        {"engine", "x engine/y", DRAY_EPERM},
        {"master", "cuda:0", DRAY_OK},
    };
    coordinator_fixture t = {.tcp = true};
    dray__token token;
    char text[DRAY__TOKEN_TEXT];
    fixture_start(&t, dray__leases_add);
    dray__token master = fixture_master(&t);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        dray_lease *lease;
        dray_error error;
        token = master;
        if (strcmp(cases[i].role, "master") != 0)
            assert_int_equal(dray__token_derive(&master, cases[i].role, &token, NULL), DRAY_OK);
        setenv("DRAY_TOKEN", dray__token_print(&token, text), 1);
        dray_context *context = fixture_open_at(t.tcp_address, "x", NULL, 0);
        int rc = take_one(context, cases[i].name, 0, &lease, &error);
        if (rc != cases[i].expected)
            fail_msg("%s takes %s: %s", cases[i].role, cases[i].name, dray_error_name(rc));
        if (rc == DRAY_OK)
            assert_int_equal(dray_lease_release(lease, NULL), DRAY_OK);
        else
            assert_non_null(strstr(error.message, "the token is for the role"));
        dray_close(context);
        unsetenv("DRAY_TOKEN");
    }
    fixture_stop(&t);
}

SUITE(start, stop)
