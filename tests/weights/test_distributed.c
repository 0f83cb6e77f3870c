/* Tests updates between hosts, which are simulated by contexts that name their hosts, over
 * loopback. Every fault of a network or a peer must end as an error that names the peer, or be
 * repaired. */

#include "base/wire.h"
#include "mover/mover.h"
#include "seed.h"
#include "suite.h"
#include "weights/cluster.h"
#include "weights/registry/registry.h"
#include "weights/server/pull.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

/* ---- any layouts, any hosts ------------------------------------------------------------------ */

typedef struct scene {
    dray_model_config config;
    uint32_t world, tp, rank, hosts;
    dray_dtype from, to;
    dray_region_kind kind;
    uint64_t seed, bucket;
    board *board;
} scene;

static const char *host_of(const scene *s, uint32_t index)
{
    static char name[16];
    snprintf(name, sizeof name, "host-%u", index % s->hosts);
    return name;
}

static void run_trainer(void *user)
{
    const scene *s = user;
    trainer t;
    fixture_host = host_of(s, s->rank);
    trainer_open(&t, f.unix_address, &s->config, s->from, s->rank, s->world, s->seed, s->kind);
    for (uint64_t version = 1; version <= 3; version++) {
        fill(t.layout, t.region, t.tied, s->seed + version);
        MUST(dray_publisher_publish(t.publisher, version, NULL, error));
        MUST(dray_barrier(t.context, "updated", s->world + s->tp, DRAY_WAIT_DEFAULT, error));
        MUST(dray_publisher_wait(t.publisher, version, DRAY_WAIT_DEFAULT, NULL, error));
    }
    trainer_close(&t);
}

/* Why something was asked for again. */
static void see_line(void *user, dray_log_level level, const char *line)
{
    (void)user;
    if (level <= DRAY_LOG_WARN || strstr(line, "is asked again") || strstr(line, "is left"))
        fprintf(stderr, "%s\n", line);
}

static void run_engine(void *user)
{
    const scene *s = user;
    engine e;
    dray_set_log(see_line, NULL, DRAY_LOG_INFO);
    fixture_host = s->hosts == 1 ? "elsewhere" : host_of(s, s->rank + 1);
    engine_open(&e, f.unix_address, &s->config, s->from, s->to, "engine", s->rank, s->tp);
    for (uint64_t version = 1; version <= 3; version++) {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        options.mode = version == 2 ? DRAY_MODE_AUTO : DRAY_MODE_DISTRIBUTED;
        options.strategy = (int32_t)(version - 1);
        options.bucket_bytes = s->bucket;
        options.nccl_bytes = 8 << 20;
        options.min_version = version;
        MUST(dray_update_weights(e.subscriber, &options, &report, error));
        CHECK(report.version == version && report.mode == DRAY_MODE_DISTRIBUTED);
        CHECK(engine_wrong(&e, s->seed + version) == 0);
        CHECK(report.verified_tensors > 0 && report.retries == 0);
        CHECK(report.wire_bytes >= report.link_bytes[DRAY_LINK_NETWORK] / 2);
        if (options.strategy != DRAY_STRATEGY_DIRECT)
            CHECK(report.peak_extra_bytes <=
                  s->bucket + (report.nccl_bytes ? options.nccl_bytes : 0));
        MUST(dray_subscriber_verify(e.subscriber, error));
        MUST(dray_barrier(e.context, "updated", s->world + s->tp, DRAY_WAIT_DEFAULT, error));
    }
    engine_close(&e);
}

CLUSTER_TEST(test_random_hosts)
{
    static const dray_dtype dtypes[][2] = {
        {DRAY_F32, DRAY_F32}, {DRAY_F32, DRAY_BF16}, {DRAY_BF16, DRAY_BF16}, {DRAY_BF16, DRAY_F32}};
    static const uint32_t tps[] = {1, 2, 4};
    uint64_t seed = test_seed();
    for (int i = 0; i < 8 * (1 + test_scale()); i++, seed++) {
        if (cluster_skips((size_t)i))
            continue;
        uint64_t x = mix(seed);
        scene s = {.world = 1 + (uint32_t)(x % 4),
                   .tp = tps[(x >> 8) % 3],
                   .hosts = 1 + (uint32_t)((x >> 12) % 4),
                   .from = dtypes[(x >> 16) % 4][0],
                   .to = dtypes[(x >> 16) % 4][1],
                   .kind = (x >> 20) % 2 ? cluster_kind_or(DRAY_REGION_HOST) : cluster_kind,
                   .seed = seed * 100,
                   .bucket = 128u * 1024 + (x >> 24) % 100000};
        s.config = small_config((x >> 32) & 1, x >> 40);
        fprintf(stderr, "seed %" PRIu64 ": fsdp %u -> tp %u on %u hosts, %s -> %s\n", seed, s.world,
                s.tp, s.hosts, dray_dtype_name(s.from), dray_dtype_name(s.to));
        if (s.hosts > 1 && s.kind == DRAY_REGION_SHARED && s.world == 1 && s.tp == 1)
            s.hosts = 1;                                /* else both may be on one */
        if ((x >> 50 & 1) && !getenv("DRAY_TRANSPORT")) /* which wants plain ones */
            setenv("DRAY_DATA_ENCRYPT", "always", 1);
        RUN_ROLES(&s, &s.rank, {run_trainer, s.world}, {run_engine, s.tp});
        unsetenv("DRAY_DATA_ENCRYPT");
    }
}

/* ---- one process: a trainer on one host, an engine on another -------------------------------- */

static uint64_t elements_of(const dray_layout *layout)
{
    uint64_t sum = 0;
    for (uint32_t b = 0; b < dray_layout_block_count(layout); b++) {
        dray__rect rect = dray__rect_of(layout, b);
        sum += dray__rect_elements(&rect);
    }
    return sum;
}

/* Narrowed before the wire; a tensor that is 32 times the ceiling. */
CLUSTER_TEST_IN_PROCESS(test_bytes_and_ceiling)
{
    dray_model_config config = wide_config();
    scene_pair p;
    pair_open_apart(&p, &config, DRAY_F32, DRAY_BF16);
    MUST(dray_publisher_publish(p.t.publisher, 1, NULL, error));
    for (int32_t strategy = 0; strategy < 3; strategy++) {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        options.strategy = strategy;
        options.bucket_bytes = 128 << 10;
        options.nccl_bytes = 8 << 20;
        poison(p.e.layout, p.e.region);
        MUST(dray_update_weights(p.e.subscriber, &options, &report, error));
        assert_int_equal(engine_wrong(&p.e, 7), 0);
        assert_true(report.peak_extra_bytes <=
                    options.bucket_bytes + (report.nccl_bytes ? options.nccl_bytes : 0));
        assert_int_equal(report.link_bytes[DRAY_LINK_NETWORK], report.bytes);
        options.bucket_bytes = 0;
        MUST(dray_update_weights(p.e.subscriber, &options, &report, error));
        assert_true((double)report.wire_bytes <= 2.02 * (double)elements_of(p.e.layout));
        assert_true(report.wire_bytes >= 2 * elements_of(p.e.layout));
        assert_int_equal(report.retries, 0);
    }
    pair_close(&p);
}

/* ---- movers that do wrong, on either side ---------------------------------------------------- */

typedef struct plan_of_faults {
    int64_t at;
    dray__fault fault;
    int64_t calls;
} plan_of_faults;

static dray__fault nth(void *user, const char *tensor)
{
    (void)tensor;
    plan_of_faults *p = user;
    int64_t call = __atomic_add_fetch(&p->calls, 1, __ATOMIC_SEQ_CST);
    return call == p->at ? p->fault : DRAY__FAULT_NONE;
}

/* Whatever one piece suffers, the engine ends with the right bytes, or says that it is torn. */
CLUSTER_TEST_IN_PROCESS(test_faults)
{
    dray_model_config config = small_config(false, 1);
    scene_pair p;
    plan_of_faults plan = {0};
    dray__mover_faults(nth, &plan);
    pair_open_apart(&p, &config, DRAY_F32, DRAY_F32);
    MUST(dray_publisher_publish(p.t.publisher, 1, NULL, error));
    int repaired = 0, found = 0;
    MUST(dray_update_weights(p.e.subscriber, NULL, NULL, error));
    int64_t calls = __atomic_load_n(&plan.calls, __ATOMIC_SEQ_CST);
    assert_true(calls > 4);
    for (dray__fault fault = DRAY__FAULT_FAIL; fault < DRAY__FAULT_COUNT; fault++)
        for (int64_t at = 1; at <= calls; at += 1 + calls / 12) {
            plan = (plan_of_faults){.at = at, .fault = fault};
            poison(p.e.layout, p.e.region);
            int rc = dray_update_weights(p.e.subscriber, NULL, NULL, NULL);
            if (rc == DRAY_OK) {
                assert_int_equal(engine_wrong(&p.e, 7), 0);
                repaired++;
            } else {
                assert_int_equal(rc, DRAY_ETORN);
                found++;
            }
        }
    fprintf(stderr, "%d faults were repaired, %d made the update fail\n", repaired, found);
    assert_true(found > 0 && repaired > 0);
    plan = (plan_of_faults){0};
    MUST(dray_update_weights(p.e.subscriber, NULL, NULL, error));
    assert_int_equal(engine_wrong(&p.e, 7), 0);
    dray__mover_faults(NULL, NULL);
    pair_close(&p);
}

/* ---- forged requests ------------------------------------------------------------------------- */

typedef struct raw {
    int fd;
    uint64_t token;
} raw;

/* The trainer's data server and ticket, as a reader learns them. */
static raw raw_open(const scene_pair *p)
{
    dray__channel *channel;
    dray__source source = {0};
    MUST(dray__channel_open(p->e.context, &channel, error));
    /* asked for by the publisher's own key: any member of the model may */
    dray__writer w = {0};
    dray__reply reply;
    uint64_t key = 0, set = 0;
    for (uint64_t k = 1; k < 64 && !key; k++)
        for (uint64_t s = 1; s < 64 && !key; s++) {
            dray__put_u64(&w, k);
            dray__put_u8(&w, DRAY__SOURCES_MEMBERS);
            dray__put_i64(&w, 0);
            dray__put_u64(&w, s);
            dray__put_u32(&w, 0);
            dray_error said;
            if (dray__call(channel, DRAY__MSG_UPDATE_SOURCES, &w, NULL, 0,
                           dray__deadline(DRAY__SECOND), &reply, &said) == DRAY_OK) {
                dray__get_u32(&reply.payload);
                dray__get_u64(&reply.payload);
                uint64_t member = dray__get_u64(&reply.payload);
                if (member == dray_context_member(p->t.context)) {
                    key = k;
                    set = s;
                }
            }
            dray__writer_free(&w);
        }
    CHECK(key && set);
    MUST(dray__members_fetch(channel, key, set, &source, 1, dray__deadline(DRAY__SECOND), error));
    raw r = {.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), .token = source.token};
    struct sockaddr_in to = {.sin_family = AF_INET};
    to.sin_port = htons((uint16_t)atoi(strrchr(source.endpoint, ':') + 1));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(strncmp(source.endpoint, "tcp:127.0.0.1:", 14) == 0);
    CHECK(connect(r.fd, (struct sockaddr *)&to, sizeof to) == 0);
    dray__source_clear(&source);
    dray__channel_close(channel);
    return r;
}

/* The status of the answer; 1: the server hung up. */
static int ask_raw(const raw *r, const dray__writer *w)
{
    uint8_t header[DRAY__ANSWER_HEADER], rest[4096];
    CHECK(send(r->fd, w->data, w->size, MSG_NOSIGNAL) == (ssize_t)w->size);
    struct pollfd ready = {.fd = r->fd, .events = POLLIN};
    CHECK(poll(&ready, 1, 10000) == 1);
    ssize_t n = recv(r->fd, header, sizeof header, MSG_WAITALL);
    if (n != sizeof header)
        return 1;
    dray__answer answer;
    MUST(dray__answer_get(header, &answer, error));
    uint64_t left = answer.head_bytes + answer.data_bytes;
    while (left) {
        n = recv(r->fd, rest, left < sizeof rest ? left : sizeof rest, 0);
        CHECK(n > 0);
        left -= (uint64_t)n;
    }
    return answer.status;
}

static int ask_rect(const raw *r, uint64_t token, uint32_t block, int32_t dtype, uint32_t ndim,
                    int64_t start, int64_t extent)
{
    dray__writer w = {0};
    dray__pull_rect rect = {.block = block, .ndim = ndim, .dtype = dtype};
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++)
        rect.rect.extent[d] = 1;
    rect.rect.start[0] = start;
    rect.rect.extent[0] = extent;
    dray__pull_put_request(&w, 1, DRAY__PULL_SUMS, token, UINT64_MAX, NULL, &rect, 1);
    int status = ask_raw(r, &w);
    dray__writer_free(&w);
    return status;
}

CLUSTER_TEST_IN_PROCESS(test_forged_requests)
{
    dray_model_config config = small_config(false, 1);
    scene_pair p;
    pair_open_apart(&p, &config, DRAY_F32, DRAY_F32);
    MUST(dray_publisher_publish(p.t.publisher, 1, NULL, error));
    raw r = raw_open(&p);
    uint32_t ndim = dray_layout_tensor(p.t.layout, dray_layout_block(p.t.layout, 0)->tensor)->ndim;
    int64_t rows = dray_layout_block(p.t.layout, 0)->extent[0];
    uint32_t blocks = dray_layout_block_count(p.t.layout);
    assert_int_equal(ask_rect(&r, r.token, 0, DRAY_F32, ndim, 0, 1), 0);
    assert_int_equal(ask_rect(&r, r.token, 0, DRAY_BF16, ndim, rows - 1, 1), 0);
    assert_int_equal(ask_rect(&r, r.token + 1, 0, DRAY_F32, ndim, 0, 1), DRAY_EDEAD);
    assert_int_equal(ask_rect(&r, r.token, blocks, DRAY_F32, ndim, 0, 1), DRAY_EINVALID);
    assert_int_equal(ask_rect(&r, r.token, UINT32_MAX, DRAY_F32, ndim, 0, 1), DRAY_EINVALID);
    assert_int_equal(ask_rect(&r, r.token, 0, 99, ndim, 0, 1), DRAY_EINVALID);
    assert_int_equal(ask_rect(&r, r.token, 0, DRAY_F32, ndim, -1, 1), DRAY_EINVALID);
    assert_int_equal(ask_rect(&r, r.token, 0, DRAY_F32, ndim, INT64_MIN, 1), DRAY_EINVALID);
    assert_int_equal(ask_rect(&r, r.token, 0, DRAY_F32, ndim, INT64_MAX, 1), DRAY_EINVALID);
    assert_int_equal(ask_rect(&r, r.token, 0, DRAY_F32, ndim, 0, rows + 1), DRAY_EINVALID);
    assert_int_equal(ask_rect(&r, r.token, 0, DRAY_F32, ndim, 1, INT64_MAX), DRAY_EINVALID);
    assert_int_equal(ask_rect(&r, r.token, 0, DRAY_F32, ndim, 0, 0), DRAY_EINVALID);
    assert_int_equal(ask_rect(&r, r.token, 0, DRAY_F32, ndim, 0, -1), DRAY_EINVALID);
    assert_int_equal(ask_rect(&r, r.token, 0, DRAY_F32, ndim - 1, 0, 1), DRAY_EINVALID);
    assert_int_equal(ask_rect(&r, r.token, 0, DRAY_F32, ndim + 1, 0, 1), DRAY_EFORMAT);
    assert_int_equal(ask_rect(&r, r.token, 0, DRAY_F32, ndim, 0, 1), 0); /* it goes on */
    /* noise: any bytes in a well-formed frame are refused, or answered; the server lives on */
    uint64_t seed = test_seed();
    for (int i = 0; i < test_times(300); i++) {
        dray__writer w = {0};
        dray__pull_rect rect = {.ndim = ndim, .dtype = DRAY_F32};
        dray__pull_put_request(&w, 1, DRAY__PULL_SUMS, r.token, 9, NULL, &rect, 1);
        for (size_t k = 16; k < w.size; k++)
            if (mix(seed + k * 7 + (uint64_t)i * 1000) % 4 == 0)
                w.data[k] = (uint8_t)mix(seed ^ (k * 31 + (uint64_t)i));
        assert_true(ask_raw(&r, &w) <= 0);
        dray__writer_free(&w);
    }
    /* a frame that says it is larger than any may be, and one that is none: hung up on */
    for (int i = 0; i < 2; i++) {
        dray__writer w = {0};
        dray__put_u32(&w, i ? 0x12345678 : DRAY__DATA_MAGIC);
        dray__put_u16(&w, DRAY__DATA_VERSION);
        dray__put_u16(&w, DRAY__DATA_RECTS);
        dray__put_u32(&w, 1);
        dray__put_u32(&w, i ? 16 : UINT32_MAX);
        assert_int_equal(ask_raw(&r, &w), 1);
        dray__writer_free(&w);
        close(r.fd);
        r = raw_open(&p);
    }
    MUST(dray_update_weights(p.e.subscriber, NULL, NULL, error));
    assert_int_equal(engine_wrong(&p.e, 7), 0);
    close(r.fd);
    pair_close(&p);
}

/* ---- peers that die or stop ------------------------------------------------------------------ */

static void run_big_trainer(void *user)
{
    const scene *s = user;
    trainer t;
    fixture_host = "trainers";
    trainer_open(&t, f.unix_address, &s->config, s->from, 0, 1, 7, cluster_kind);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    raise_flag(s->board, 0);
    await_flag(s->board, 1);
    trainer_close(&t);
}

/* Until some of it was moved. */
static void move_some(engine *e)
{
    uint8_t last = 0xA5;
    while (last == 0xA5 && dray_update_poll(e->subscriber, NULL) == DRAY_EAGAIN)
        memory_get(e->region[0], 4096, &last, 1);
    if (last == 0xA5)
        MUST(dray_update_finish(e->subscriber, NULL, error));
}

/* Starts an update of little budget a poll, and stops when some of it was moved. */
static void start_some(engine *e, int64_t timeout_ns)
{
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.timeout_ns = timeout_ns;
    options.bucket_bytes = 128 << 10;
    MUST(dray_update_start(e->subscriber, &options, error));
    move_some(e);
}

static int finish_with(engine *e, dray_update_report *report, dray_error *said)
{
    while (dray_update_poll(e->subscriber, NULL) == DRAY_EAGAIN) {
        struct pollfd p = {.fd = dray_subscriber_fd(e->subscriber), .events = POLLIN};
        CHECK(poll(&p, 1, 60000) == 1); /* something always wakes it */
    }
    return dray_update_finish(e->subscriber, report, said);
}

static int finish(engine *e, dray_error *said)
{
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    int rc = finish_with(e, &report, said);
    if (rc == DRAY_OK)
        fprintf(stderr, "%u retries\n", report.retries);
    return rc;
}

typedef struct peer_case {
    int signal;
    int64_t pause_ms, timeout_s;
    int outcome;
} peer_case;

/* In a process of its own, with a coordinator of its own: most of a case is waiting. */
static void run_peer_case(void *user)
{
    const peer_case *c = user;
    setenv("DRAY_NCCL_LIBRARY", "", 1); /* which has all of it under way at once */
    f = (coordinator_fixture){0};
    fixture_fork(&f, dray__registry_add);
    scene s = {.config = wide_config(), .from = DRAY_F32, .board = board_new()};
    s.config.vocab_size = 16384;
    pid_t pid = spawn(run_big_trainer, &s);
    await_flag(s.board, 0);
    engine e;
    fixture_host = "engines";
    engine_open(&e, f.unix_address, &s.config, DRAY_F32, DRAY_F32, "engine", 0, 1);
    int64_t begin = dray__now();
    start_some(&e, c->timeout_s * DRAY__SECOND);
    kill(pid, c->signal);
    dray_error said = {0};
    if (c->outcome == DRAY_OK) {
        int64_t until = dray__deadline(c->pause_ms * DRAY__MILLISECOND);
        while (dray__now() < until && dray_update_poll(e.subscriber, NULL) == DRAY_EAGAIN)
            usleep(1000);
        kill(pid, SIGCONT);
    }
    int rc = finish(&e, &said);
    fprintf(stderr, "%s after %.1f s: %s\n", dray_error_name(rc),
            (double)(dray__now() - begin) * 1e-9, said.message);
    CHECK(rc == c->outcome);
    CHECK(dray__now() - begin < (c->timeout_s + 2) * DRAY__SECOND);
    if (rc == DRAY_OK)
        CHECK(engine_wrong(&e, 7) == 0);
    else
        CHECK(strstr(said.message, "trainer"));
    raise_flag(s.board, 1);
    kill(pid, SIGCONT);
    end_of(pid);
    engine_close(&e);
    munmap(s.board, sizeof(board));
    fixture_stop(&f);
}

CLUSTER_TEST(test_peers)
{
    peer_case cases[] = {
        {SIGKILL, 0, 20, DRAY_ETORN},      /* dies */
        {SIGSTOP, 3500, 30, DRAY_OK},      /* silent for longer than a connection is waited for */
        {SIGSTOP, 1000000, 4, DRAY_ETORN}, /* for ever */
    };
    pid_t pids[3];
    for (size_t i = 0; i < 3; i++)
        pids[i] = spawn(run_peer_case, &cases[i]);
    for (size_t i = 0; i < 3; i++)
        must_end_well(pids[i]);
}

/* A reader that is dropped is told so by the data server itself: the memory may change. */
CLUSTER_TEST_IN_PROCESS(test_revoked)
{
    dray_model_config config = wide_config();
    scene_pair p;
    pair_open_apart(&p, &config, DRAY_F32, DRAY_F32);
    MUST(dray_publisher_publish(p.t.publisher, 1, NULL, error));
    start_some(&p.e, 20 * DRAY__SECOND);
    uint32_t dropped = 0;
    MUST(dray_publisher_wait(p.t.publisher, 1, 0, &dropped, error));
    assert_int_equal(dropped, 1);
    fill(p.t.layout, p.t.region, false, 8);
    dray_error said;
    assert_int_equal(finish(&p.e, &said), DRAY_ETORN);
    MUST(dray_publisher_publish(p.t.publisher, 2, NULL, error));
    MUST(dray_update_weights(p.e.subscriber, NULL, NULL, error));
    assert_int_equal(engine_wrong(&p.e, 8), 0);
    pair_close(&p);
}

/* ---- cohorts: engines that join together ----------------------------------------------------- */

enum { JOINERS = 4 };

/* Publishes what the joiners have asked for by then: they begin together on a busy machine, too. */
static void run_awaited_trainer(void *user)
{
    const scene *s = user;
    trainer t;
    fixture_host = "trainers";
    trainer_open(&t, f.unix_address, &s->config, s->from, 0, 1, 7, cluster_kind);
    raise_flag(s->board, 0);
    await_flag(s->board, 2);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    await_flag(s->board, 1);
    trainer_close(&t);
}

static void run_joiner(void *user)
{
    const scene *s = user;
    engine e;
    char group[16], host[16];
    bool dies = s->rank == 3 && s->tp == 2; /* in the middle */
    snprintf(group, sizeof group, "joiner%u", s->rank);
    snprintf(host, sizeof host, "engines-%u", s->hosts == 1 ? 0 : s->rank);
    fixture_host = host;
    engine_open(&e, f.unix_address, &s->config, s->from, s->to, group, 0, 1);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    options.bucket_bytes = dies ? 128 << 10 : 1 << 20;
    MUST(dray_update_start(e.subscriber, &options, error));
    MUST(dray_barrier(e.context, "joining", JOINERS, DRAY_WAIT_DEFAULT, error));
    if (s->rank == 0)
        raise_flag(s->board, 2);
    if (dies) {
        move_some(&e);
        kill(getpid(), SIGKILL);
    }
    dray_error said = {0};
    int rc = finish_with(&e, &report, &said);
    if (rc != DRAY_OK)
        fprintf(stderr, "%s: %s: %s\n", group, dray_error_name(rc), said.message);
    CHECK(rc == DRAY_OK);
    CHECK(engine_wrong(&e, 7) == 0);
    CHECK(report.verified_tensors > 0);
    s->board->number[s->rank] = (int64_t)report.wire_bytes;
    s->board->number[JOINERS + s->rank] = (int64_t)report.bytes;
    s->board->number[2 * JOINERS + s->rank] = (int64_t)report.retries;
    /* who is through early stays for the others */
    MUST(dray_barrier(e.context, "joined", JOINERS - (s->tp == 2), DRAY_WAIT_DEFAULT, error));
    engine_close(&e);
}

/* Bytes over the network in relation to what one joiner reads; *left: how often a joiner asked the
 * publisher for what a neighbour had not brought for seconds. */
static double joined(int i, int64_t *left)
{
    scene s = {.config = wide_config(),
               .board = board_new(),
               .from = i % 2 ? DRAY_BF16 : DRAY_F32,
               .to = DRAY_BF16,
               .hosts = i == 2 ? 4 : 1,
               .tp = i == 3 ? 2 : 1};
    pid_t trainer_pid = spawn(run_awaited_trainer, &s), pids[JOINERS];
    await_flag(s.board, 0);
    for (s.rank = 0; s.rank < JOINERS; s.rank++)
        pids[s.rank] = spawn(run_joiner, &s);
    int64_t wire = 0;
    *left = 0;
    for (uint32_t k = 0; k < JOINERS; k++) {
        if (i == 3 && k == 3)
            assert_true(WIFSIGNALED(end_of(pids[k])));
        else
            must_end_well(pids[k]);
        wire += s.board->number[k];
        *left += s.board->number[2 * JOINERS + k];
    }
    double times = (double)wire / (double)s.board->number[JOINERS];
    fprintf(stderr, "%.2f times one engine's bytes\n", times);
    raise_flag(s.board, 1);
    must_end_well(trainer_pid);
    munmap(s.board, sizeof(board));
    return times;
}

/* On one host every byte comes over the network once; one that dies owes the others nothing. Where
 * others have the cores, a joiner may be silent for so long that its neighbours do without it: they
 * begin once more. */
CLUSTER_TEST(test_joiners)
{
    for (int i = 0; i < 4; i++) {
        int64_t left = 1;
        double times = 0;
        bool together = i < 2; /* on one host, all to the end */
        if (cluster_skips((size_t)i))
            continue;
        for (int tries = 0; tries < (together ? 4 : 1) && left; tries++)
            times = joined(i, &left);
        if (together && !(cluster_gpus && gpu_is_real()))
            assert_true(times < 1.2);
    }
}

/* ---- a small ceiling --------------------------------------------------------------------------
 */

/* A trainer's rank has one tensor. Those near the engine are the first, with changes, and the
 * second, which has weights to quantise, too. */
enum { RANKS = 6, NEAR = 2, SIDE = 64, FLOATS = SIDE * SIDE };

static uint32_t add_square(dray_layout *layout, const char *name, dray_dtype dtype, int64_t side,
                           uint32_t place)
{
    const int64_t shape[2] = {side, side}, size = (int64_t)dray_dtype_size(dtype);
    uint32_t tensor;
    MUST(dray_layout_add_tensor(layout, name, dtype, 2, shape, &tensor, error));
    const dray_block block = {.tensor = tensor,
                              .offset = place * FLOATS * sizeof(float),
                              .extent = {side, side},
                              .stride = {side * size, size}};
    MUST(dray_layout_add_block(layout, &block, error));
    return tensor;
}

/* The layout of a trainer's rank; of the engine for rank RANKS. */
static dray_layout *squares_of(uint32_t rank)
{
    dray_layout *layout;
    bool all = rank == RANKS;
    const dray_region_info info = {.kind = DRAY_REGION_SHARED,
                                   .bytes = (RANKS + 2) * FLOATS * sizeof(float),
                                   .name = "weights"};
    MUST(dray_layout_new(&layout, error));
    MUST(dray_layout_add_region(layout, &info, NULL, error));
    for (uint32_t i = 0; i < RANKS; i++) {
        char name[16];
        snprintf(name, sizeof name, "plain-%u", i);
        if (all || i == rank)
            add_square(layout, name, DRAY_F32, SIDE, i);
    }
    if (rank == 1)
        add_square(layout, "coded", DRAY_BF16, SIDE, RANKS);
    if (all) {
        uint32_t coded = add_square(layout, "coded", DRAY_F8E4M3, SIDE, RANKS);
        dray_quant quant = {.kind = DRAY_QUANT_BLOCK, .block = {8, 8}};
        quant.scales = add_square(layout, "scales", DRAY_F32, SIDE / 8, RANKS + 1);
        MUST(dray_layout_set_quant(layout, coded, &quant, error));
    }
    return layout;
}

/* Of one version to the next a few elements change. */
static float square_at(uint32_t rank, uint32_t i, uint64_t version)
{
    return (float)(i + 1000 * rank) + (i % 100 ? 0 : (float)version);
}

static void run_square_trainer(void *user)
{
    uint32_t rank = ((const scene *)user)->rank;
    trainer t = {0};
    fixture_host = rank < NEAR ? "near" : "far";
    t.context = fixture_open_at(f.unix_address, "trainer", "trainer", rank);
    t.layout = squares_of(rank);
    MUST(dray_regions_for_layout(t.layout, 1, t.region, error));
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    options.regions = t.region;
    options.rank = rank;
    options.world = RANKS;
    options.delta = rank == 0;
    MUST(dray_publisher_open(t.context, MODEL, t.layout, &options, &t.publisher, error));
    float *own = (float *)dray_region_base(t.region[0]) + rank * FLOATS;
    for (uint64_t version = 1; version <= 2; version++) {
        for (uint32_t i = 0; i < FLOATS; i++)
            own[i] = square_at(rank, i, version);
        MUST(dray_publisher_publish(t.publisher, version, NULL, error));
        MUST(dray_barrier(t.context, "updated", RANKS + 1, DRAY_WAIT_DEFAULT, error));
        MUST(dray_publisher_wait(t.publisher, version, DRAY_WAIT_DEFAULT, NULL, error));
    }
    trainer_close(&t);
}

/* Changes in memory, weights to quantise, other memory, and other hosts share the ceiling. */
static void run_square_engine(void *user)
{
    (void)user;
    engine e = {0};
    fixture_host = "near";
    e.context = fixture_open_at(f.unix_address, "engine", "engine", 0);
    e.layout = squares_of(RANKS);
    MUST(dray_regions_for_layout(e.layout, 1, e.region, error));
    engine_subscribe(&e, "engine", 0, 1, 0);
    const float *own = dray_region_base(e.region[0]);
    for (uint64_t version = 1; version <= 2; version++) {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        options.bucket_bytes = 128 << 10;
        options.min_version = version;
        options.timeout_ns = 30 * DRAY__SECOND;
        MUST(dray_update_weights(e.subscriber, &options, &report, error));
        CHECK((report.delta_covered_bytes > 0) == (version == 2));
        CHECK(report.wire_bytes > 0);
        for (uint32_t i = 0; i < RANKS * FLOATS; i++)
            CHECK(own[i] == square_at(i / FLOATS, i % FLOATS, version));
        MUST(dray_barrier(e.context, "updated", RANKS + 1, DRAY_WAIT_DEFAULT, error));
    }
    engine_close(&e);
}

CLUSTER_TEST(test_small_ceiling)
{
    scene scenes[RANKS + 1];
    pid_t pids[RANKS + 1];
    if (cluster_kind != DRAY_REGION_SHARED)
        skip();
    for (uint32_t i = 0; i <= RANKS; i++) {
        scenes[i] = (scene){.rank = i};
        pids[i] = spawn(i < RANKS ? run_square_trainer : run_square_engine, &scenes[i]);
    }
    all_end_well(pids, RANKS + 1);
}

static void print_line(void *user, dray_log_level level, const char *line)
{
    (void)user, (void)level;
    fprintf(stderr, "%s\n", line);
}

int main(int argc, char **argv)
{
    if (getenv("DRAY_TEST_LOG"))
        dray_set_log(print_line, NULL, DRAY_LOG_INFO);
    return cluster_main(argc, argv);
}
