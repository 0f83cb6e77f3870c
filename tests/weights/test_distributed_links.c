/* Tests updates between two network namespaces whose link is cut, for a while and for ever. They
 * need root and iproute2, and are skipped without. */

#include "suite.h"
#include "weights/cluster.h"
#include "weights/registry/registry.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>

static char trainers[32], engines[32];

static int run(const char *format, ...)
{
    char command[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command, sizeof command, format, arguments);
    va_end(arguments);
    return system(command);
}

static void remove_hosts(void)
{
    run("ip netns del %s 2>/dev/null", trainers);
    run("ip netns del %s 2>/dev/null", engines);
}

static bool add_hosts(void)
{
    snprintf(trainers, sizeof trainers, "drayt%d", (int)getpid());
    snprintf(engines, sizeof engines, "draye%d", (int)getpid());
    bool made =
        run("ip netns add %s 2>/dev/null", trainers) == 0 &&
        run("ip netns add %s 2>/dev/null", engines) == 0 &&
        run("ip link add eth0 netns %s type veth peer name eth0 netns %s", trainers, engines) == 0;
    for (int i = 0; i < 2 && made; i++) {
        const char *host = i ? engines : trainers;
        made = run("ip -n %s addr add 10.213.8.%d/24 dev eth0", host, i + 1) == 0 &&
               run("ip -n %s link set eth0 up", host) == 0 &&
               run("ip netns exec %s tc qdisc add dev eth0 root tbf rate 100mbit burst 64kb "
                   "latency 50ms",
                   host) == 0;
    }
    return made;
}

/* This process, a child, moves to a host. */
static void enter(const char *host, int number)
{
    char path[64], address[32];
    snprintf(path, sizeof path, "/run/netns/%s", host);
    snprintf(address, sizeof address, "10.213.8.%d", number);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0 && setns(fd, CLONE_NEWNET) == 0);
    close(fd);
    setenv("DRAY_DATA_ADDRESS", address, 1);
    fixture_host = host;
}

typedef struct scene {
    dray_model_config config;
    board *board;
    int64_t down_ns, timeout_ns; /* the link stays down for so long */
} scene;

static void run_trainer(void *user)
{
    const scene *s = user;
    enter(trainers, 1);
    trainer t;
    trainer_open(&t, f.unix_address, &s->config, DRAY_F32, 0, 1, 7, DRAY_REGION_HOST);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    raise_flag(s->board, 0);
    await_flag(s->board, 1);
    trainer_close(&t);
}

static void run_engine(void *user)
{
    const scene *s = user;
    enter(engines, 2);
    engine e;
    engine_open(&e, f.unix_address, &s->config, DRAY_F32, DRAY_F32, "engine", 0, 1);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    options.timeout_ns = s->timeout_ns;
    MUST(dray_update_start(e.subscriber, &options, error));
    int64_t begin = dray__now(), cut = 0;
    bool down = false;
    while (dray_update_poll(e.subscriber, NULL) == DRAY_EAGAIN) {
        int64_t now = dray__now();
        if (!cut && now - begin > DRAY__SECOND / 2) {
            CHECK(run("ip -n %s link set eth0 down", trainers) == 0);
            cut = now;
            down = true;
        } else if (down && now - cut > s->down_ns) {
            CHECK(run("ip -n %s link set eth0 up", trainers) == 0);
            down = false;
        }
        struct pollfd p = {.fd = dray_subscriber_fd(e.subscriber), .events = POLLIN};
        poll(&p, 1, 50);
    }
    dray_error said = {0};
    int rc = dray_update_finish(e.subscriber, &report, &said);
    fprintf(stderr, "%s after %.1f s, %u retries: %s\n", dray_error_name(rc),
            (double)(dray__now() - begin) * 1e-9, report.retries, said.message);
    CHECK(cut); /* in the middle of it */
    if (s->down_ns < s->timeout_ns) {
        CHECK(rc == DRAY_OK && report.retries > 0 && engine_wrong(&e, 7) == 0);
    } else {
        CHECK(rc == DRAY_ETORN && strstr(said.message, "trainer-0"));
        CHECK(dray__now() - begin < s->timeout_ns + 2 * DRAY__SECOND);
        CHECK(run("ip -n %s link set eth0 up", trainers) == 0);
    }
    raise_flag(s->board, 1);
    engine_close(&e);
}

static void test_cut(int64_t down_ns, int64_t timeout_ns)
{
    scene s = {.config = small_config(false, 3),
               .board = board_new(),
               .down_ns = down_ns,
               .timeout_ns = timeout_ns};
    s.config.vocab_size = 65536; /* 25 MB: two seconds */
    s.config.hidden_size = 48;
    pid_t trainer_pid = spawn(run_trainer, &s);
    await_flag(s.board, 0);
    must_end_well(spawn(run_engine, &s));
    must_end_well(trainer_pid);
    munmap(s.board, sizeof(board));
}

static void test_link_that_returns(void **state)
{
    (void)state;
    test_cut(5 * DRAY__SECOND, 60 * DRAY__SECOND);
}

static void test_link_that_does_not(void **state)
{
    (void)state;
    test_cut(1000 * DRAY__SECOND, 5 * DRAY__SECOND);
}

/* One of them, between hosts of its own: both wait most of the time. 77: there are no hosts. */
static int cut_links(int which)
{
    const struct CMUnitTest tests[][1] = {
        {cmocka_unit_test_setup_teardown(test_link_that_returns, cluster_start, cluster_stop)},
        {cmocka_unit_test_setup_teardown(test_link_that_does_not, cluster_start, cluster_stop)},
    };
    if (!add_hosts()) {
        remove_hosts();
        return 77; /* a container that has no namespaces to give */
    }
    fflush(NULL);
    pid_t child = fork(); /* whatever becomes of them, the hosts go away */
    if (child == 0)
        exit(cmocka_run_group_tests(tests[which], NULL, NULL));
    int status = child < 0 ? 1 : end_of(child);
    remove_hosts();
    return status != 0;
}

int main(void)
{
    if (geteuid() != 0 || system("command -v ip >/dev/null && command -v tc >/dev/null") != 0)
        return 77;
    pid_t pids[2];
    int worst = 0;
    for (int i = 0; i < 2; i++) {
        pids[i] = fork();
        if (pids[i] == 0)
            exit(cut_links(i));
    }
    for (int i = 0; i < 2; i++) {
        int status = pids[i] < 0 ? 1 : end_of(pids[i]);
        int code = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
        if (code && worst != 1)
            worst = code == 77 ? 77 : 1;
    }
    return worst;
}
