/* Tests the list of engines that a router watches, while the coordinator goes away and comes back.
 * Engines that serve all the time are listed all the time, and the router is told of those that
 * ended with the coordinator. */
#include "control/restartable.h"
#include "suite.h"
#include "weights/cluster.h"

#include <pthread.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

#define LONG (20 * DRAY__SECOND)

enum { SEED = 70 };

static restartable *restarted;
static board *b;
static dray_model_config config;

static void publish(trainer *t, uint64_t version)
{
    fill(t->layout, t->region, t->tied, SEED + version);
    MUST(dray_publisher_publish(t->publisher, version, NULL, error));
}

static void update_to(engine *e, uint64_t version)
{
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.timeout_ns = LONG;
    options.min_version = version;
    MUST(dray_update_weights(e->subscriber, &options, NULL, error));
    CHECK(engine_wrong(e, SEED + version) == 0);
}

enum { SERVING, RESTARTED, SERVES_ON, NO_NEWS, ROUTER_DONE, ENGINE_GONE };

typedef struct heard {
    int of[DRAY_ENGINE_TORN + 1];
} heard;

static void hear(void *user, dray_engine_event event, const dray_engine_info *info)
{
    heard *h = user;
    CHECK(strcmp(info->group, "engine") == 0);
    h->of[event]++;
}

/* Listens until the event came `times` times, or the flag is up. */
static void listen_for(dray_engines *engines, heard *h, int event, int times, int flag)
{
    int64_t deadline = dray__deadline(LONG);
    while (h->of[event] < times && !(flag >= 0 && b->flag[flag])) {
        dray_error said;
        int rc = dray_engines_wait(engines, DRAY__SECOND / 10, hear, h, &said);
        if (rc && rc != DRAY_ETIMEDOUT)
            fprintf(stderr, "router: %s\n", said.message);
        CHECK(rc == DRAY_OK || rc == DRAY_ETIMEDOUT);
        CHECK(dray__now() < deadline);
    }
}

static void router(void *user)
{
    (void)user;
    heard h = {0};
    dray_engines *engines;
    dray_context *context = fixture_open_at(restarted->unix_address, "router", "router", 0);
    MUST(dray_engines_open(context, &engines, error));
    int fd = dray_engines_fd(engines);
    listen_for(engines, &h, DRAY_ENGINE_JOINED, 1, -1);
    raise_flag(b, SERVING);
    /* The coordinator goes and comes: the engine served all the time. */
    listen_for(engines, &h, DRAY_ENGINE_LEFT, 1, SERVES_ON);
    CHECK(h.of[DRAY_ENGINE_LEFT] == 0 && h.of[DRAY_ENGINE_JOINED] == 1);
    CHECK(dray_engines_count(engines) == 1 && dray_engines_fd(engines) == fd);
    raise_flag(b, NO_NEWS);
    listen_for(engines, &h, DRAY_ENGINE_LEFT, 1, -1); /* while its memory is overwritten */
    listen_for(engines, &h, DRAY_ENGINE_JOINED, 2, -1);
    /* It goes again, and the engine with it: that is told when its time to come back is over. */
    raise_flag(b, ROUTER_DONE);
    listen_for(engines, &h, DRAY_ENGINE_LEFT, 2, -1);
    CHECK(dray_engines_count(engines) == 0);
    dray_engines_close(engines);
    dray_close(context);
}

static void listed_trainer(void *user)
{
    (void)user;
    trainer t;
    trainer_open(&t, restarted->unix_address, &config, DRAY_F32, 0, 1, SEED, cluster_kind);
    publish(&t, 1);
    await_flag(b, NO_NEWS);
    MUST(dray_publisher_wait(t.publisher, 1, LONG, NULL, error));
    publish(&t, 2);
    await_flag(b, ENGINE_GONE);
    trainer_close(&t);
}

static void listed_engine(void *user)
{
    (void)user;
    engine e;
    engine_open(&e, restarted->unix_address, &config, DRAY_F32, DRAY_BF16, "engine", 0, 1);
    update_to(&e, 1);
    await_flag(b, RESTARTED);
    int64_t until = dray__deadline(DRAY__SECOND / 2); /* a loop that comes round slowly */
    while (dray__now() < until)
        usleep(10000);
    MUST(dray_subscriber_release_mappings(e.subscriber, error));
    raise_flag(b, SERVES_ON);
    await_flag(b, NO_NEWS);
    update_to(&e, 2);
    await_flag(b, ENGINE_GONE);
    kill(getpid(), SIGKILL);
}

TEST(test_router_hears_of_no_restart)
{
    restarted = restartable_start(dray__registry_add, false);
    b = board_new();
    config = small_config(false, 3);
    pid_t watcher = spawn(router, NULL), trains = spawn(listed_trainer, NULL);
    pid_t serves = spawn(listed_engine, NULL);
    await_flag(b, SERVING);
    restartable_restart(restarted);
    raise_flag(b, RESTARTED);
    await_flag(b, ROUTER_DONE);
    raise_flag(b, ENGINE_GONE);
    int status = end_of(serves);
    assert_true(WIFSIGNALED(status));
    restartable_restart(restarted);
    must_end_well(trains);
    must_end_well(watcher);
    munmap(b, sizeof *b);
    restartable_stop(restarted);
}

/* ---- a router that looks now and then, when the engines of its list do not come back ----------
 */

static char relay_address[160];

/* Carries bytes on, a while after they came, so that no answer is there at once. */
static void *carry(void *pair)
{
    const int *fds = pair;
    char bytes[1 << 16];
    for (ssize_t n; (n = read(fds[0], bytes, sizeof bytes)) > 0;) {
        usleep(5000);
        if (send(fds[1], bytes, (size_t)n, MSG_NOSIGNAL) != n)
            break;
    }
    shutdown(fds[0], SHUT_RDWR);
    shutdown(fds[1], SHUT_RDWR);
    free(pair);
    return NULL;
}

static void carry_on(int from, int to)
{
    pthread_t thread;
    int *pair = malloc(2 * sizeof *pair);
    CHECK(pair);
    pair[0] = from;
    pair[1] = to;
    CHECK(pthread_create(&thread, NULL, carry, pair) == 0 && pthread_detach(thread) == 0);
}

/* Stands between the router and the coordinator. */
static void relay(void *listener)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    snprintf(to.sun_path, sizeof to.sun_path, "%.100s", restarted->path);
    for (int here; (here = accept(*(const int *)listener, NULL, NULL)) >= 0;) {
        int there = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(there, (struct sockaddr *)&to, sizeof to)) {
            close(there);
            close(here);
            continue;
        }
        carry_on(here, there);
        carry_on(there, here);
    }
}

static void seldom_router(void *user)
{
    (void)user;
    heard h = {0};
    dray_engines *engines;
    dray_error said;
    dray_context *context = fixture_open_at(relay_address, "router", "router", 0);
    MUST(dray_engines_open(context, &engines, error));
    listen_for(engines, &h, DRAY_ENGINE_JOINED, 1, -1);
    raise_flag(b, SERVING);
    for (int64_t deadline = dray__deadline(LONG); !h.of[DRAY_ENGINE_LEFT]; usleep(50000)) {
        int rc = dray_engines_poll(engines, hear, &h, &said);
        CHECK(rc == DRAY_OK || rc == DRAY_EAGAIN);
        CHECK(dray__now() < deadline);
    }
    CHECK(dray_engines_count(engines) == 0);
    dray_engines_close(engines);
    dray_close(context);
}

static void lasting_trainer(void *user)
{
    (void)user;
    trainer t;
    trainer_open(&t, restarted->unix_address, &config, DRAY_F32, 0, 1, SEED, cluster_kind);
    publish(&t, 1);
    await_flag(b, ROUTER_DONE);
    trainer_close(&t);
}

static void lost_engine(void *user)
{
    (void)user;
    engine e;
    engine_open(&e, restarted->unix_address, &config, DRAY_F32, DRAY_BF16, "engine", 0, 1);
    update_to(&e, 1);
    await_flag(b, ENGINE_GONE);
    kill(getpid(), SIGKILL);
}

TEST(test_router_hears_of_an_engine_that_went_with_the_coordinator)
{
    restarted = restartable_start(dray__registry_add, false);
    b = board_new();
    config = small_config(false, 3);
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    snprintf(at.sun_path, sizeof at.sun_path, "%.90s/relay", restarted->folder);
    snprintf(relay_address, sizeof relay_address, "unix:%s", at.sun_path);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(listen(listener, 16), 0);
    pid_t relays = spawn(relay, &listener);
    close(listener);
    pid_t watcher = spawn(seldom_router, NULL), trains = spawn(lasting_trainer, NULL);
    pid_t serves = spawn(lost_engine, NULL);
    await_flag(b, SERVING);
    restartable_hold(restarted);
    raise_flag(b, ENGINE_GONE);
    int status = end_of(serves);
    assert_true(WIFSIGNALED(status));
    restartable_again(restarted);
    must_end_well(watcher);
    raise_flag(b, ROUTER_DONE);
    must_end_well(trains);
    kill(relays, SIGKILL);
    end_of(relays);
    unlink(at.sun_path);
    munmap(b, sizeof *b);
    restartable_stop(restarted);
}

CLUSTER_SUITE
