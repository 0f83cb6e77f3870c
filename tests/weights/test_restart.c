/* Tests a coordinator that is killed at every step of an update, a prefetch or a commit, and
 * started again. Publishers and subscribers come back by themselves. No engine ever says that it
 * holds a mixed version, published weights stay readable, plans are kept, and the next update
 * works. */
#include "control/restartable.h"
#include "suite.h"
#include "weights/cluster.h"

#include <dirent.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/socket.h>

#define LONG (20 * DRAY__SECOND)
/* Of the update that the coordinator does not outlive: a rank that begins it with the next one
 * waits for the other, which may have failed with the last. */
#define TRIAL (3 * DRAY__SECOND / 2)

enum { FIRST, SECOND = 2, TRIED = 4, THIRD = 6, OVER = 8, PREFETCHED = 10 }; /* + rank */

static restartable *restarted;
static board *b;

typedef struct scene {
    dray_model_config config;
    const char *address, *step;
    int purpose; /* 0: update, 1: prefetch, 2: commit */
    uint32_t rank;
    uint64_t seed;
} scene;

static scene s;

static void kill_coordinator(void *user, const char *step)
{
    (void)user;
    if (strcmp(step, s.step) == 0) {
        dray__hook_set(NULL, NULL);
        restartable_kill(restarted);
    }
}

static void both(int flag)
{
    await_flag(b, flag);
    await_flag(b, flag + 1);
}

static void write_version(trainer *t, uint64_t version)
{
    fill(t->layout, t->region, t->tied, s.seed + version);
    MUST(dray_publisher_publish(t->publisher, version, NULL, error));
}

static void trainer_rank(void *user)
{
    (void)user;
    trainer t;
    trainer_open(&t, s.address, &s.config, DRAY_F32, s.rank, 2, s.seed, cluster_kind);
    write_version(&t, 1);
    both(FIRST);
    MUST(dray_publisher_wait(t.publisher, 1, LONG, NULL, error));
    write_version(&t, 2);
    raise_flag(b, SECOND + (int)s.rank);
    both(TRIED);
    MUST(dray_publisher_wait(t.publisher, 2, LONG, NULL, error));
    write_version(&t, 3);
    raise_flag(b, THIRD + (int)s.rank);
    both(OVER);
    trainer_close(&t);
}

static int step_of(engine *e, int purpose, uint64_t version, dray_update_report *report)
{
    dray_error said = {0};
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.timeout_ns = version == 2 && purpose == s.purpose ? TRIAL : LONG;
    options.min_version = version;
    int64_t begin = dray__now();
    int rc = purpose == 0   ? dray_update_weights(e->subscriber, &options, report, &said)
             : purpose == 1 ? dray_prefetch_weights(e->subscriber, &options, report, &said)
                            : dray_commit_weights(e->subscriber, &options, report, &said);
    CHECK(dray__now() - begin < LONG + 5 * DRAY__SECOND);
    CHECK(rc == DRAY_OK || said.message[0]);
    return rc;
}

/* What it says that it holds is what lies there. */
static int32_t look(engine *e)
{
    int32_t state = DRAY_GROUP_EMPTY;
    uint64_t version;
    dray_error said;
    int rc;
    int64_t deadline = dray__deadline(LONG);
    while ((rc = dray_subscriber_version(e->subscriber, &version, NULL, &state, &said)) ==
           DRAY_EAGAIN) {
        CHECK(dray__now() < deadline);
        usleep(1000);
    }
    if (rc)
        fprintf(stderr, "%s: %s\n", s.step, said.message);
    CHECK(rc == DRAY_OK);
    if (state == DRAY_GROUP_WHOLE)
        CHECK(engine_wrong(e, s.seed + version) == 0);
    return state;
}

/* As an engine's loop does between updates. */
static void attend(engine *e, int flag)
{
    int64_t deadline = dray__deadline(3 * LONG);
    while (!b->flag[flag] || !b->flag[flag + 1]) {
        dray_subscriber_release_mappings(e->subscriber, NULL);
        CHECK(dray__now() < deadline);
        usleep(2000);
    }
}

static void engine_rank(void *user)
{
    (void)user;
    engine e;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    engine_open(&e, s.address, &s.config, DRAY_F32, DRAY_BF16, "engine", s.rank, 2);
    CHECK(step_of(&e, 0, 1, &report) == DRAY_OK);
    CHECK(report.planned == 1);
    raise_flag(b, FIRST + (int)s.rank);
    both(SECOND);
    if (s.purpose == 2) { /* the coordinator lives until both ranks know that it is prefetched */
        CHECK(step_of(&e, 1, 2, NULL) == DRAY_OK);
        raise_flag(b, PREFETCHED + (int)s.rank);
        both(PREFETCHED);
    }
    if (s.rank == 0)
        dray__hook_set(kill_coordinator, NULL);
    int rc = step_of(&e, s.purpose, 2, NULL);
    dray__hook_set(NULL, NULL);
    int32_t state = look(&e);
    CHECK(state != DRAY_GROUP_EMPTY);
    if (rc == DRAY_ETORN)
        CHECK(state == DRAY_GROUP_TORN);
    if (s.purpose == 1)
        CHECK(state == DRAY_GROUP_WHOLE);
    raise_flag(b, TRIED + (int)s.rank);
    attend(&e, THIRD);
    report = (dray_update_report)DRAY_UPDATE_REPORT_INIT;
    CHECK(step_of(&e, 0, 3, &report) == DRAY_OK);
    CHECK(report.planned == 0); /* the same ranks, the same layouts */
    CHECK(engine_wrong(&e, s.seed + 3) == 0);
    CHECK(look(&e) == DRAY_GROUP_WHOLE);
    CHECK(dray__context_returns(e.context) == 1);
    MUST(dray_barrier(e.context, "over", 2, LONG, error));
    raise_flag(b, OVER + (int)s.rank);
    engine_close(&e);
}

static void killed_at(const char *step, int purpose)
{
    memset((void *)b, 0, sizeof *b);
    s.step = step;
    s.purpose = purpose;
    s.seed += 10;
    RUN_ROLES(NULL, &s.rank, {trainer_rank, 2}, {engine_rank, 2});
}

static const char *const steps[] = {"begin", "plan",     "import", "writing",  "moving",
                                    "moved", "verified", "voted",  "committed"};

static void every_step(bool tcp)
{
    restarted = restartable_start(dray__registry_add, tcp);
    if (tcp)
        setenv("DRAY_TOKEN_FILE", restarted->token, 1);
    b = board_new();
    s = (scene){.config = small_config(false, 3), .seed = 5};
    s.address = tcp ? restarted->tcp_address : restarted->unix_address;
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        if (!cluster_skips(i))
            killed_at(steps[i], 0);
    for (size_t i = 0; !tcp && i < sizeof steps / sizeof *steps; i++)
        if (!cluster_skips(i + 1))
            killed_at(steps[i], 1);
    static const char *const commit_steps[] = {"begin", "writing", "moved", "voted", "committed"};
    for (size_t i = 0; !tcp && i < sizeof commit_steps / sizeof *commit_steps; i++)
        if (!cluster_skips(i + 2))
            killed_at(commit_steps[i], 2);
    munmap(b, sizeof *b);
    restartable_stop(restarted);
    unsetenv("DRAY_TOKEN_FILE");
}

TEST(test_killed_at_every_step)
{
    every_step(false);
}

TEST(test_killed_at_every_step_over_tls)
{
    every_step(true);
}

/* ---- a coordinator that hangs before it is killed ----------------------------------------------
 */

static void stop_coordinator(void *user, const char *step)
{
    (void)user;
    if (strcmp(step, "import") != 0)
        return;
    dray__hook_set(NULL, NULL);
    kill(restarted->coordinator, SIGSTOP);
}

static void lone_trainer(void *user)
{
    (void)user;
    trainer t;
    trainer_open(&t, s.address, &s.config, DRAY_F32, 0, 1, s.seed, cluster_kind);
    write_version(&t, 2);
    raise_flag(b, SECOND);
    await_flag(b, TRIED);
    MUST(dray_publisher_wait(t.publisher, 2, LONG, NULL, error));
    write_version(&t, 3);
    raise_flag(b, THIRD);
    await_flag(b, OVER);
    trainer_close(&t);
}

/* The answer that an update asked for never comes; the next one does not look for it. */
static void lone_engine(void *user)
{
    (void)user;
    engine e;
    engine_open(&e, s.address, &s.config, DRAY_F32, DRAY_BF16, "engine", 0, 1);
    await_flag(b, SECOND);
    dray__hook_set(stop_coordinator, NULL);
    CHECK(step_of(&e, 0, 2, NULL) == DRAY_ETIMEDOUT);
    restartable_restart(restarted);
    raise_flag(b, TRIED);
    await_flag(b, THIRD);
    MUST(dray_subscriber_release_mappings(e.subscriber, error));
    CHECK(step_of(&e, 0, 3, NULL) == DRAY_OK);
    CHECK(engine_wrong(&e, s.seed + 3) == 0);
    raise_flag(b, OVER);
    engine_close(&e);
}

TEST(test_stopped_then_killed)
{
    restarted = restartable_start(dray__registry_add, false);
    b = board_new();
    s = (scene){.config = small_config(false, 3),
                .seed = 7,
                .address = restarted->unix_address,
                .step = ""};
    RUN_ROLES(NULL, NULL, {lone_trainer, 1}, {lone_engine, 1});
    munmap(b, sizeof *b);
    restartable_stop(restarted);
}

/* ---- many members at once ---------------------------------------------------------------------
 */

static void one_member(void *user)
{
    (void)user;
    dray_context *context = fixture_open_at(s.address, "member", "engine", s.rank);
    MUST(dray_barrier(context, "here", 8, LONG, error));
    raise_flag(b, (int)s.rank);
    await_flag(b, 15);
    int64_t begin = dray__now();
    MUST(dray_barrier(context, "back", 8, LONG, error));
    CHECK(dray__now() - begin < 5 * DRAY__SECOND);
    dray_close(context);
}

TEST(test_eight_come_back_at_once)
{
    for (int tcp = 0; tcp < 2; tcp++) {
        pid_t members[8];
        restarted = restartable_start(dray__registry_add, tcp);
        if (tcp)
            setenv("DRAY_TOKEN_FILE", restarted->token, 1);
        b = board_new();
        s = (scene){.address = tcp ? restarted->tcp_address : restarted->unix_address};
        for (s.rank = 0; s.rank < 8; s.rank++)
            members[s.rank] = spawn(one_member, NULL);
        for (int i = 0; i < 8; i++)
            await_flag(b, i);
        restartable_restart(restarted);
        raise_flag(b, 15);
        all_end_well(members, 8);
        munmap(b, sizeof *b);
        restartable_stop(restarted);
        unsetenv("DRAY_TOKEN_FILE");
    }
}

/* ---- ranks that the next coordinator refuses at first -----------------------------------------
 */

static void begin_alone(void)
{
    restarted = restartable_start(dray__registry_add, false);
    b = board_new();
    s = (scene){.config = small_config(false, 3),
                .seed = 9,
                .address = restarted->unix_address,
                .step = ""};
}

static void end_alone(void)
{
    munmap(b, sizeof *b);
    restartable_stop(restarted);
}

static void say_told(void *user, const char *step)
{
    (void)user;
    if (strcmp(step, "sums told") == 0)
        raise_flag(b, TRIED);
}

/* Another one takes the rank's place before it is back, and leaves again. The coordinator restarts
 * after it has the sums: the rank would register again to tell them. */
static void displaced_trainer(void *user)
{
    (void)user;
    trainer t, other;
    dray__hook_set(say_told, NULL);
    trainer_open(&t, s.address, &s.config, DRAY_F32, 0, 1, s.seed, cluster_kind);
    write_version(&t, 1);
    raise_flag(b, FIRST);
    await_flag(b, SECOND);
    trainer_open(&other, s.address, &s.config, DRAY_F32, 0, 1, s.seed, cluster_kind);
    CHECK(dray_publisher_publish(t.publisher, 2, NULL, NULL) == DRAY_ESTALE);
    trainer_close(&other);
    write_version(&t, 3);
    raise_flag(b, THIRD);
    await_flag(b, OVER);
    trainer_close(&t);
}

static void displaced_engine(void *user)
{
    (void)user;
    engine e, other;
    engine_open(&e, s.address, &s.config, DRAY_F32, DRAY_BF16, "engine", 0, 1);
    await_flag(b, FIRST);
    CHECK(step_of(&e, 0, 1, NULL) == DRAY_OK);
    await_flag(b, TRIED);
    restartable_restart(restarted);
    engine_open(&other, s.address, &s.config, DRAY_F32, DRAY_BF16, "engine", 0, 1);
    CHECK(step_of(&e, 0, 3, NULL) == DRAY_EEXIST);
    engine_close(&other);
    raise_flag(b, SECOND);
    await_flag(b, THIRD);
    CHECK(step_of(&e, 0, 3, NULL) == DRAY_OK);
    CHECK(engine_wrong(&e, s.seed + 3) == 0);
    raise_flag(b, OVER);
    engine_close(&e);
}

TEST(test_refused_then_back)
{
    begin_alone();
    RUN_ROLES(NULL, NULL, {displaced_trainer, 1}, {displaced_engine, 1});
    end_alone();
}

/* ---- a coordinator that hangs before it hears the sums -----------------------------------------
 */

static void stop_once_summed(void *user, const char *step)
{
    (void)user;
    if (strcmp(step, "summed") != 0)
        return;
    dray__hook_set(NULL, NULL);
    kill(restarted->coordinator, SIGSTOP);
}

static void unheard_trainer(void *user)
{
    (void)user;
    trainer t;
    dray_error said;
    trainer_open(&t, s.address, &s.config, DRAY_F32, 0, 1, s.seed, cluster_kind);
    dray__hook_set(stop_once_summed, NULL);
    write_version(&t, 1);
    int64_t begin = dray__now();
    CHECK(dray_publisher_wait(t.publisher, 1, DRAY__SECOND / 4, NULL, &said) == DRAY_ETIMEDOUT);
    CHECK(dray__now() - begin < 20 * DRAY__SECOND);
    kill(restarted->coordinator, SIGCONT);
    MUST(dray_publisher_wait(t.publisher, 1, LONG, NULL, error));
    trainer_close(&t);
}

TEST(test_a_wait_for_sums_that_nobody_hears)
{
    begin_alone();
    RUN_ROLES(NULL, NULL, {unheard_trainer, 1});
    end_alone();
}

/* Counts the descriptors of this process whose files have such names. *last: the last of them. */
static uint32_t descriptors(const char *of, int *last)
{
    char path[300], name[64];
    uint32_t count = 0;
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder);
    for (const struct dirent *entry; (entry = readdir(folder));) {
        snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
        ssize_t size = readlink(path, name, sizeof name - 1);
        name[size > 0 ? size : 0] = 0;
        if (strncmp(name, of, strlen(of)) != 0)
            continue;
        count++;
        *last = atoi(entry->d_name) > *last ? atoi(entry->d_name) : *last;
    }
    closedir(folder);
    return count;
}

static uint32_t shared_pieces(void)
{
    int last = -1;
    return descriptors("/memfd:dray-", &last);
}

/* ---- a connection that breaks behind a request -------------------------------------------------
 */

/* The coordinator gets the request, and its answer is lost. */
static void *cut_the_answer_off(void *fd)
{
    usleep(300000);
    CHECK(shutdown(*(const int *)fd, SHUT_RD) == 0);
    usleep(100000);
    kill(restarted->coordinator, SIGCONT);
    return NULL;
}

static void deaf_trainer(void *user)
{
    (void)user;
    trainer t;
    pthread_t cutter;
    trainer_open(&t, s.address, &s.config, DRAY_F32, 0, 1, s.seed, cluster_kind);
    write_version(&t, 1);
    MUST(dray_publisher_wait(t.publisher, 1, LONG, NULL, error));
    int fd = -1;
    CHECK(descriptors("socket:", &fd) >= 2); /* the session's, and the publisher's */
    fill(t.layout, t.region, t.tied, s.seed + 2);
    kill(restarted->coordinator, SIGSTOP);
    CHECK(pthread_create(&cutter, NULL, cut_the_answer_off, &fd) == 0);
    MUST(dray_publisher_publish(t.publisher, 2, NULL, error));
    CHECK(pthread_join(cutter, NULL) == 0);
    CHECK(dray__context_returns(t.context) == 0);
    CHECK(dray_publisher_publish(t.publisher, 2, NULL, NULL) == DRAY_EINVALID);
    raise_flag(b, SECOND);
    await_flag(b, OVER);
    MUST(dray_publisher_wait(t.publisher, 2, LONG, NULL, error));
    trainer_close(&t);
}

static void late_engine(void *user)
{
    (void)user;
    engine e;
    await_flag(b, SECOND);
    engine_open(&e, s.address, &s.config, DRAY_F32, DRAY_BF16, "engine", 0, 1);
    CHECK(step_of(&e, 0, 2, NULL) == DRAY_OK);
    CHECK(engine_wrong(&e, s.seed + 2) == 0);
    raise_flag(b, OVER);
    engine_close(&e);
}

TEST(test_an_announcement_whose_answer_is_lost)
{
    begin_alone();
    RUN_ROLES(NULL, NULL, {deaf_trainer, 1}, {late_engine, 1});
    end_alone();
}

/* ---- a snapshot that cannot be offered ---------------------------------------------------------
 */

static void snapshot_trainer(void *user)
{
    (void)user;
    trainer t;
    trainer_open(&t, s.address, &s.config, DRAY_F32, 0, 1, s.seed, cluster_kind);
    dray_publisher_close(t.publisher);
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    options.regions = t.region;
    options.snapshot = 1;
    options.timeout_ns = DRAY__SECOND / 4;
    MUST(dray_publisher_open(t.context, MODEL, t.layout, &options, &t.publisher, error));
    write_version(&t, 1);
    uint32_t before = shared_pieces();
    MUST(dray_publisher_release(t.publisher, LONG, NULL, 0, NULL, error));
    restartable_hold(restarted);
    for (int i = 0; i < 3; i++) {
        CHECK(dray_publisher_move(t.publisher, t.region, NULL) != DRAY_OK);
        CHECK(shared_pieces() <= before);
    }
    restartable_again(restarted);
    int64_t deadline = dray__deadline(LONG);
    while (dray_publisher_move(t.publisher, t.region, NULL))
        CHECK(dray__now() < deadline);
    CHECK(shared_pieces() == before);
    write_version(&t, 3);
    raise_flag(b, THIRD);
    await_flag(b, OVER);
    trainer_close(&t);
}

static void next_engine(void *user)
{
    (void)user;
    engine e;
    await_flag(b, THIRD);
    engine_open(&e, s.address, &s.config, DRAY_F32, DRAY_BF16, "engine", 0, 1);
    CHECK(step_of(&e, 0, 3, NULL) == DRAY_OK);
    CHECK(engine_wrong(&e, s.seed + 3) == 0);
    raise_flag(b, OVER);
    engine_close(&e);
}

TEST(test_a_snapshot_moves_while_nobody_listens)
{
    begin_alone();
    RUN_ROLES(NULL, NULL, {snapshot_trainer, 1}, {next_engine, 1});
    end_alone();
}

CLUSTER_SUITE
