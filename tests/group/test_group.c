/* Compares collectives among forked ranks with a serial oracle, and tests deaths, departures and
 * deadlines. */
#include "base/clock.h"
#include "base/random.h"
#include "group/group.h"
#include "seed.h"
#include "suite.h"

#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define TIMEOUT (20 * DRAY__SECOND)

typedef int (*rank_function)(dray__group *group, void *argument);

/* Where ranks say that they have joined, for tests that kill them after that. */
static int joined[2] = {-1, -1};

static void wait_until_joined(uint32_t ranks)
{
    char byte;
    for (uint32_t i = 0; i < ranks; i++)
        assert_int_equal(read(joined[0], &byte, 1), 1);
}

/* Forks a rank; its exit status is what the function returns, 100 when the group does not open. */
static pid_t fork_rank(int fd, uint32_t rank, uint32_t world, rank_function function,
                       void *argument)
{
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dray__group *group;
    dray_error error;
    if (dray__group_open(fd, rank, world, TIMEOUT, &group, &error) != DRAY_OK) {
        fprintf(stderr, "rank %u: %s\n", rank, error.message);
        _exit(100);
    }
    if (joined[1] >= 0 && write(joined[1], "", 1) != 1)
        _exit(101);
    int status = function(group, argument);
    dray__group_close(group);
    _exit(status);
}

static int exit_status(pid_t pid)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 200 + WTERMSIG(status);
}

/* ---- random operations against an oracle ----------------------------------------------------- */

typedef struct sequence {
    uint64_t seed;
    uint32_t operations;
} sequence;

/* Float i of rank `rank` in operation n: every rank can say what any other one holds. */
static float value(uint64_t seed, uint64_t n, uint32_t rank, uint64_t i)
{
    return (float)(dray__random_unit(seed + n, rank, i) - 0.5);
}

static uint64_t draw(uint64_t seed, uint64_t n, uint64_t what, uint64_t bound)
{
    return dray__random_u64(seed, 1000000 + n, what) % bound;
}

static float *filled(uint64_t seed, uint64_t n, uint32_t rank, uint64_t count)
{
    float *data = malloc(count * sizeof *data + 1);
    for (uint64_t i = 0; data && i < count; i++)
        data[i] = value(seed, n, rank, i);
    return data;
}

static float sum_of(uint64_t seed, uint64_t n, uint32_t world, uint64_t i)
{
    float sum = value(seed, n, 0, i);
    for (uint32_t rank = 1; rank < world; rank++)
        sum += value(seed, n, rank, i);
    return sum;
}

static int check_broadcast(dray__group *group, uint64_t seed, uint64_t n, uint64_t count)
{
    uint32_t root = (uint32_t)draw(seed, n, 2, dray__group_world(group));
    float *data = filled(seed, n, dray__group_rank(group), count);
    int bad = dray__group_broadcast(group, root, data, count * sizeof *data, -1, NULL) != 0;
    for (uint64_t i = 0; !bad && i < count; i++)
        bad = data[i] != value(seed, n, root, i);
    free(data);
    return bad;
}

static int check_all_gather(dray__group *group, uint64_t seed, uint64_t n, uint64_t count)
{
    uint32_t world = dray__group_world(group), rank = dray__group_rank(group);
    bool equal = draw(seed, n, 3, 2) == 0, in_place = draw(seed, n, 4, 2) == 0;
    uint64_t bytes[DRAY__GROUP_MAX_WORLD], total = 0, before = 0;
    for (uint32_t r = 0; r < world; r++) {
        uint64_t piece = equal ? count : draw(seed, n, 10 + r, count + 1);
        bytes[r] = piece * sizeof(float);
        before += r < rank ? piece : 0;
        total += piece;
    }
    float *in = filled(seed, n, rank, bytes[rank] / sizeof(float));
    float *out = calloc(total + 1, sizeof *out), *from = in;
    if (in_place) {
        memcpy(out + before, in, bytes[rank]);
        from = out + before;
    }
    int bad = (equal ? dray__group_all_gather_equal(group, from, count * 4, out, -1, NULL)
                     : dray__group_all_gather(group, from, bytes, out, -1, NULL)) != 0;
    const float *at = out;
    for (uint32_t r = 0; r < world; r++)
        for (uint64_t i = 0; i < bytes[r] / sizeof(float); i++)
            bad |= *at++ != value(seed, n, r, i);
    free(in);
    free(out);
    return bad;
}

static int check_all_reduce(dray__group *group, uint64_t seed, uint64_t n, uint64_t count)
{
    float *data = filled(seed, n, dray__group_rank(group), count);
    int bad = dray__group_all_reduce_f32(group, data, count, -1, NULL) != 0;
    for (uint64_t i = 0; !bad && i < count; i++)
        bad = data[i] != sum_of(seed, n, dray__group_world(group), i);
    free(data);
    return bad;
}

static int check_reduce_scatter(dray__group *group, uint64_t seed, uint64_t n, uint64_t count)
{
    uint32_t world = dray__group_world(group), rank = dray__group_rank(group);
    uint64_t counts[DRAY__GROUP_MAX_WORLD], total = 0, before = 0;
    for (uint32_t r = 0; r < world; r++) {
        counts[r] = draw(seed, n, 10 + r, count + 1);
        before += r < rank ? counts[r] : 0;
        total += counts[r];
    }
    float *in = filled(seed, n, rank, total), *out = calloc(counts[rank] + 1, sizeof *out);
    int bad = dray__group_reduce_scatter_f32(group, in, counts, out, -1, NULL) != 0;
    for (uint64_t i = 0; !bad && i < counts[rank]; i++)
        bad = out[i] != sum_of(seed, n, world, before + i);
    free(in);
    free(out);
    return bad;
}

static int run_sequence(dray__group *group, void *argument)
{
    static int (*const checks[])(dray__group *, uint64_t, uint64_t, uint64_t) = {
        check_broadcast, check_all_gather, check_all_reduce, check_reduce_scatter};
    const sequence *s = argument;
    for (uint64_t n = 0; n < s->operations; n++) {
        /* sizes around the scratch of 4096 bytes a half, and zero */
        uint64_t count = draw(s->seed, n, 0, 5) == 0 ? 0 : draw(s->seed, n, 1, 5000);
        if (checks[draw(s->seed, n, 5, 4)](group, s->seed, n, count) != 0) {
            fprintf(stderr, "seed %" PRIu64 ": operation %" PRIu64 ", %" PRIu64 " floats\n",
                    s->seed, n, count);
            return 1;
        }
        if (dray__group_barrier(group, -1, NULL) != DRAY_OK)
            return 2;
    }
    return 0;
}

TEST(operations_agree_with_a_serial_oracle)
{
    uint64_t seed = test_seed();
    for (uint32_t world = 1; world <= 5; world++) {
        int fd;
        assert_int_equal(dray__group_create(world, 8192, &fd, NULL), DRAY_OK);
        sequence s = {seed + world, (uint32_t)test_times(60)};
        pid_t pids[5] = {0};
        for (uint32_t rank = 0; rank < world; rank++)
            pids[rank] = fork_rank(fd, rank, world, run_sequence, &s);
        int bad = 0;
        for (uint32_t rank = 0; rank < world; rank++)
            bad |= exit_status(pids[rank]);
        close(fd);
        if (bad)
            fail_msg("world %u, seed %" PRIu64 ": a rank failed (%d)", world, seed, bad);
    }
}

/* ---- threads as ranks: what the thread sanitizer can see ------------------------------------- */

typedef struct thread_rank {
    int fd;
    uint32_t rank;
    sequence *s;
    int result;
} thread_rank;

static void *thread_main(void *argument)
{
    thread_rank *self = argument;
    dray__group *group;
    self->result = 1;
    if (dray__group_open(self->fd, self->rank, 3, TIMEOUT, &group, NULL) == DRAY_OK) {
        self->result = run_sequence(group, self->s);
        dray__group_close(group);
    }
    return NULL;
}

TEST(ranks_may_be_threads)
{
    sequence s = {test_seed(), 40};
    int fd;
    assert_int_equal(dray__group_create(3, 8192, &fd, NULL), DRAY_OK);
    pthread_t threads[3];
    thread_rank ranks[3];
    for (uint32_t i = 0; i < 3; i++) {
        ranks[i] = (thread_rank){fd, i, &s, 0};
        assert_int_equal(pthread_create(&threads[i], NULL, thread_main, &ranks[i]), 0);
    }
    for (uint32_t i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(ranks[i].result, 0);
    }
    close(fd);
}

/* ---- deaths ---------------------------------------------------------------------------------- */

typedef struct expectation {
    uint32_t victim;
    const char *word; /* in the message */
    int code;
} expectation;

/* Works until the group dies; 0 when it died as expected, and stays dead. */
static int work_until_dead(dray__group *group, void *argument)
{
    const expectation *expected = argument;
    float data[3000] = {1};
    float out[4 * 3000];
    dray_error error;
    int code = DRAY_OK;
    for (uint64_t n = 0; code == DRAY_OK; n++) {
        if (n % 3 == 0)
            code = dray__group_all_reduce_f32(group, data, 3000, -1, &error);
        else if (n % 3 == 1)
            code = dray__group_all_gather_equal(group, data, sizeof data, out, -1, &error);
        else
            code = dray__group_barrier(group, -1, &error);
        memset(data, 0, sizeof data);
    }
    char name[32];
    snprintf(name, sizeof name, "rank %u", expected->victim);
    if (code != expected->code || !strstr(error.message, name) ||
        !strstr(error.message, expected->word)) {
        fprintf(stderr, "expected %d '%s' '%s', found %d: %s\n", expected->code, name,
                expected->word, code, error.message);
        return 1;
    }
    return dray__group_barrier(group, -1, NULL) == expected->code ? 0 : 2;
}

TEST(a_killed_rank_ends_the_others)
{
    uint64_t seed = test_seed(), rounds = (uint64_t)test_times(12);
    assert_int_equal(pipe(joined), 0);
    for (uint64_t n = 0; n < rounds; n++) {
        uint32_t world = 2 + (uint32_t)draw(seed, n, 0, 3);
        expectation expected = {(uint32_t)draw(seed, n, 1, world), "died", DRAY_EDEAD};
        int fd;
        assert_int_equal(dray__group_create(world, 8192, &fd, NULL), DRAY_OK);
        pid_t pids[4] = {0};
        for (uint32_t rank = 0; rank < world; rank++)
            pids[rank] = fork_rank(fd, rank, world, work_until_dead, &expected);
        wait_until_joined(world);
        usleep((useconds_t)draw(seed, n, 2, 20000));
        kill(pids[expected.victim], SIGKILL);
        for (uint32_t rank = 0; rank < world; rank++) {
            int status = exit_status(pids[rank]);
            int right = rank == expected.victim ? 200 + SIGKILL : 0;
            if (status != right)
                fail_msg("seed %" PRIu64 " round %" PRIu64 ": rank %u ended with %d", seed, n, rank,
                         status);
        }
        dray__group *late; /* nobody takes the dead one's place */
        assert_int_equal(dray__group_open(fd, expected.victim, world, 0, &late, NULL), DRAY_EDEAD);
        close(fd);
    }
    close(joined[0]);
    close(joined[1]);
    joined[1] = -1;
}

static int leave_after_some(dray__group *group, void *argument)
{
    (void)argument;
    float data[3000] = {1};
    return dray__group_all_reduce_f32(group, data, 3000, -1, NULL);
}

static int abort_after_some(dray__group *group, void *argument)
{
    int code = leave_after_some(group, argument);
    dray__group_abort(group, "out of luck");
    return code;
}

static int hang_after_some(dray__group *group, void *argument)
{
    int code = leave_after_some(group, argument);
    raise(SIGSTOP);
    return code;
}

static int expect_timeout(dray__group *group, void *argument)
{
    int code = leave_after_some(group, argument);
    dray_error error;
    if (code == DRAY_OK)
        code = dray__group_barrier(group, 200 * DRAY__MILLISECOND, &error);
    return code == DRAY_ETIMEDOUT && strstr(error.message, "barrier: rank 1 did not come") ? 0 : 1;
}

static void two_ranks(rank_function first, rank_function second, expectation *expected)
{
    int fd;
    assert_int_equal(dray__group_create(2, 0, &fd, NULL), DRAY_OK);
    pid_t a = fork_rank(fd, 0, 2, first, expected), b = fork_rank(fd, 1, 2, second, expected);
    assert_int_equal(exit_status(a), 0);
    kill(b, SIGCONT);
    assert_int_equal(exit_status(b), 0);
    close(fd);
}

TEST(a_rank_that_leaves_or_aborts_ends_the_others)
{
    two_ranks(work_until_dead, leave_after_some, &(expectation){1, "left", DRAY_EDEAD});
    two_ranks(work_until_dead, abort_after_some, &(expectation){1, "out of luck", DRAY_ECANCELED});
}

TEST(a_deadline_names_the_missing_rank)
{
    two_ranks(expect_timeout, hang_after_some, NULL);
}

static int in_barrier(dray__group *group, void *argument)
{
    (void)argument;
    dray_error error;
    int code = dray__group_barrier(group, -1, &error);
    return code == DRAY_EPROTO && strstr(error.message, "barrier") ? 0 : 1;
}

static int in_all_reduce(dray__group *group, void *argument)
{
    (void)argument;
    dray_error error;
    float data[8] = {0};
    int code = dray__group_all_reduce_f32(group, data, 8, -1, &error);
    return code == DRAY_EPROTO && strstr(error.message, "all_reduce") ? 0 : 1;
}

/* Leaves this process one descriptor, which a look at the other rank takes. */
static int wait_without_descriptors(dray__group *group, void *argument)
{
    (void)argument;
    int last = -1, fd;
    dray_error error;
    if (setrlimit(RLIMIT_NOFILE, &(struct rlimit){64, 64}))
        return 1;
    while ((fd = dup(2)) >= 0)
        last = fd;
    close(last);
    int code = dray__group_barrier(group, -1, &error);
    if (code)
        fprintf(stderr, "without descriptors: %s\n", error.message);
    return code == DRAY_OK ? 0 : 2;
}

static int come_late(dray__group *group, void *argument)
{
    (void)argument;
    usleep(200000);
    return dray__group_barrier(group, -1, NULL) == DRAY_OK ? 0 : 1;
}

TEST(a_late_rank_is_not_taken_for_dead)
{
    two_ranks(come_late, wait_without_descriptors, NULL);
    two_ranks(wait_without_descriptors, come_late, NULL);
}

TEST(different_calls_are_found)
{
    two_ranks(in_barrier, in_all_reduce, NULL);
}

TEST(bad_arguments_are_refused)
{
    int fd = -1;
    dray__group *group = NULL, *other = NULL;
    dray_error error;
    assert_int_equal(dray__group_create(0, 0, &fd, NULL), DRAY_EINVALID);
    assert_int_equal(dray__group_create(65, 0, &fd, NULL), DRAY_EINVALID);
    assert_int_equal(dray__group_create(1, UINT64_MAX, &fd, NULL), DRAY_EINVALID);
    assert_int_equal(fd, -1);
    assert_int_equal(dray__group_create(2, 0, &fd, NULL), DRAY_OK);
    assert_int_equal(dray__group_open(fd, 2, 2, 0, &group, NULL), DRAY_EINVALID);
    assert_int_equal(dray__group_open(fd, 0, 3, 0, &group, NULL), DRAY_EINVALID);
    assert_int_equal(dray__group_open(fd, 0, 2, -5, &group, NULL), DRAY_EINVALID);
    assert_int_equal(dray__group_open(fd, 0, 2, 0, &group, NULL), DRAY_OK);
    assert_int_equal(dray__group_open(fd, 0, 2, 0, &other, &error), DRAY_EEXIST);
    assert_non_null(strstr(error.message, "rank 0 was taken"));
    char byte = 0;
    assert_int_equal(dray__group_broadcast(group, 2, &byte, 1, 0, NULL), DRAY_EINVALID);
    uint64_t huge[2] = {UINT64_MAX, 2};
    assert_int_equal(dray__group_all_gather(group, &byte, huge, &byte, 0, NULL), DRAY_EINVALID);
    /* nothing was entered: a deadline of zero passes at once and names who is not there */
    assert_int_equal(dray__group_barrier(group, 0, &error), DRAY_ETIMEDOUT);
    dray__group_close(group);
    dray__group_close(NULL);
    close(fd);
    int file = open("/dev/zero", O_RDWR | O_CLOEXEC);
    assert_int_equal(dray__group_open(file, 0, 2, 0, &group, NULL), DRAY_EINVALID);
    close(file);
    assert_int_equal(dray__group_open(-1, 0, 2, 0, &group, NULL), DRAY_ESYS);
}

SUITE(NULL, NULL)
