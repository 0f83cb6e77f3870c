/* Tests one-sided reads, as UCX emulates them over TCP. They reach exactly the registered regions,
 * for as long as the publisher allows it, and no bytes are taken for others. */

#include "mover/mover.h"
#include "net/stream.h"
#include "suite.h"
#include "weights/cluster.h"
#include "weights/registry/registry.h"
#include "weights/server/exports.h"
#include "weights/server/pull.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

static dray__fault count_moves(void *user, const char *tensor)
{
    (void)tensor;
    __atomic_add_fetch((int64_t *)user, 1, __ATOMIC_SEQ_CST);
    return DRAY__FAULT_NONE;
}

/* The publisher moves nothing: all moves are the reader's, out of its slots. */
CLUSTER_TEST_IN_PROCESS(test_read)
{
    static const struct {
        dray_dtype from, to;
        bool read;
    } cases[] = {
        {DRAY_F32, DRAY_F32, true},
        {DRAY_BF16, DRAY_F32, true},  /* widened here */
        {DRAY_F32, DRAY_BF16, false}, /* narrowed before the wire: by messages */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        scene_pair p;
        dray_model_config config = wide_config();
        int64_t moves[2] = {0};
        pair_open_apart(&p, &config, cases[i].from, cases[i].to);
        MUST(dray_publisher_publish(p.t.publisher, 1, NULL, error));
        for (int reads = 0; reads < 2; reads++) {
            setenv("DRAY_UCX_READS", reads ? "always" : "never", 1);
            dray_update_report report = DRAY_UPDATE_REPORT_INIT;
            dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
            options.bucket_bytes = i == 1 ? 300 << 10 : 0;
            poison(p.e.layout, p.e.region);
            for (int try = 0; try < 3 && (!try || report.retries); try++) {
                moves[reads] = 0; /* a machine that is busy may keep a peer silent for long */
                dray__mover_faults(count_moves, &moves[reads]);
                MUST(dray_update_weights(p.e.subscriber, &options, &report, error));
                dray__mover_faults(NULL, NULL);
            }
            assert_int_equal(engine_wrong(&p.e, 7), 0);
            assert_true(report.verified_tensors > 0 && report.retries == 0);
            assert_true(report.wire_bytes >= report.bytes / 2);
            assert_true(report.wire_bytes <= report.bytes + (report.bytes >> 4));
            if (options.bucket_bytes)
                assert_true(report.peak_extra_bytes <= options.bucket_bytes);
            if (!reads) { /* another connection, for the other kind */
                engine_close(&p.e);
                setenv("DRAY_UCX_READS", "always", 1);
                fixture_host = "engines";
                engine_open(&p.e, f.unix_address, &config, cases[i].from, cases[i].to, "engine", 0,
                            1);
            }
        }
        fprintf(stderr, "%lld moves without reads, %lld with\n", (long long)moves[0],
                (long long)moves[1]);
        assert_true(cases[i].read ? moves[1] * 4 < moves[0] * 3 : moves[1] == moves[0]);
        /* the same connection, for as long as the reader behaves */
        fill(p.t.layout, p.t.region, false, 8);
        MUST(dray_publisher_publish(p.t.publisher, 2, NULL, error));
        MUST(dray_update_weights(p.e.subscriber, NULL, NULL, error));
        assert_int_equal(engine_wrong(&p.e, 8), 0);
        pair_close(&p);
    }
}

/* Starts an update of little budget a poll, and stops when some of it was moved. */
static void start_some(engine *e, int64_t timeout_ns)
{
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.timeout_ns = timeout_ns;
    options.bucket_bytes = 128 << 10;
    MUST(dray_update_start(e->subscriber, &options, error));
    uint8_t *last = (uint8_t *)dray_region_base(e->region[0]) + 4096;
    while (*last == 0xA5)
        CHECK(dray_update_poll(e->subscriber, NULL) == DRAY_EAGAIN);
}

static int finish(engine *e, dray_error *said)
{
    while (dray_update_poll(e->subscriber, NULL) == DRAY_EAGAIN) {
        struct pollfd p = {.fd = dray_subscriber_fd(e->subscriber), .events = POLLIN};
        CHECK(poll(&p, 1, 60000) == 1);
    }
    return dray_update_finish(e->subscriber, NULL, said);
}

/* The memory changes under a reader that nobody stopped, and under one that was dropped. */
CLUSTER_TEST_IN_PROCESS(test_new_bytes_are_not_old_ones)
{
    setenv("DRAY_UCX_READS", "always", 1);
#if defined(__SANITIZE_THREAD__)
    const int first = 1; /* the sanitizer sees the race that this is about */
#else
    const int first = 0;
#endif
    for (int dropped = first; dropped < 2; dropped++) {
        scene_pair p;
        dray_model_config config = wide_config();
        dray_error said;
        pair_open_apart(&p, &config, DRAY_F32, DRAY_F32);
        MUST(dray_publisher_publish(p.t.publisher, 1, NULL, error));
        start_some(&p.e, 20 * DRAY__SECOND);
        if (dropped) {
            uint32_t count = 0;
            MUST(dray_publisher_wait(p.t.publisher, 1, 0, &count, error));
            assert_int_equal(count, 1);
        }
        fill(p.t.layout, p.t.region, false, 8);
        int64_t begin = dray__now();
        assert_int_equal(finish(&p.e, &said), DRAY_ETORN);
        fprintf(stderr, "after %.1f s: %s\n", (double)(dray__now() - begin) * 1e-9, said.message);
        assert_non_null(strstr(said.message, dropped ? "dropped" : "differ"));
        MUST(dray_publisher_publish(p.t.publisher, 2, NULL, error));
        MUST(dray_update_weights(p.e.subscriber, NULL, NULL, error));
        assert_int_equal(engine_wrong(&p.e, 8), 0);
        pair_close(&p);
    }
}

typedef struct scene {
    board *board;
} scene;

static void run_trainer(void *user)
{
    const scene *s = user;
    dray_model_config config = wide_config();
    trainer t;
    config.vocab_size = 16384;
    fixture_host = "trainers";
    trainer_open(&t, f.unix_address, &config, DRAY_F32, 0, 1, 7, DRAY_REGION_SHARED);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    raise_flag(s->board, 0);
    await_flag(s->board, 1);
    trainer_close(&t);
}

/* UCX itself would wait for minutes. */
CLUSTER_TEST(test_publisher_that_stops)
{
    setenv("DRAY_UCX_READS", "always", 1);
    scene s = {board_new()};
    dray_model_config config = wide_config();
    config.vocab_size = 16384;
    pid_t pid = spawn(run_trainer, &s);
    await_flag(s.board, 0);
    engine e;
    dray_error said;
    fixture_host = "engines";
    engine_open(&e, f.unix_address, &config, DRAY_F32, DRAY_F32, "engine", 0, 1);
    int64_t begin = dray__now();
    start_some(&e, 3 * DRAY__SECOND);
    kill(pid, SIGSTOP);
    assert_int_equal(finish(&e, &said), DRAY_ETORN);
    assert_true(dray__now() - begin < 5 * DRAY__SECOND);
    assert_non_null(strstr(said.message, "trainer"));
    engine_close(&e);
    kill(pid, SIGKILL);
    end_of(pid);
    munmap(s.board, sizeof(board));
}

typedef struct held {
    atomic_bool is, ends;
} held;

static void *hold(void *user)
{
    held *h = user;
    dray__export_enter(NULL);
    atomic_store(&h->is, true);
    while (!atomic_load(&h->ends))
        poll(NULL, 0, 1);
    dray__export_leave();
    return NULL;
}

/* A child frees its copy, though the server's thread was at work when it was forked, and leaves the
 * registered memory to its parent. */
static void closes_in_child(uint64_t token, dray__export *export)
{
    held h = {0};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, hold, &h), 0);
    while (!atomic_load(&h.is))
        poll(NULL, 0, 1);
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        dray__local_remove(token);
        dray__export_free(export);
        _exit(0);
    }
    int status = end_of(child);
    atomic_store(&h.ends, true);
    pthread_join(thread, NULL);
    assert_int_equal(status, 0);
    assert_true(dray__export_enter(export));
    dray__export_leave();
}

/* What is given is of one member and one update, and taken from those that are over. */
TEST(test_exports)
{
    static const dray__networks none;
    static const dray__tls_key key = {.identity = "x"};
    const dray__stream_keys keys = {.key = &key, .trusted = &none, .transport = "ucx"};
    char endpoint[DRAY__STREAM_ADDRESS];
    int listener;
    dray__stream *stream, *server;
    setenv("DRAY_UCX_READS", "always", 1);
    MUST(dray__stream_listen("127.0.0.1", endpoint, &listener, error));
    MUST(dray__stream_connect(endpoint, &keys, 0, &stream, error));
    struct pollfd p = {.fd = listener, .events = POLLIN};
    assert_int_equal(poll(&p, 1, 10000), 1);
    MUST(dray__stream_accept(listener, &keys, &server, error));
    while (dray__stream_ready(stream, NULL) == DRAY_EAGAIN)
        dray__stream_ready(server, NULL);

    dray_model_config config = small_config(false, 1);
    dray_layout *layout;
    dray_region *region;
    MUST(dray_layout_fsdp(&config, DRAY_F32, 0, 1, DRAY_REGION_HOST, &layout, error));
    MUST(dray_regions_for_layout(layout, 1, &region, error));
    uint64_t token = dray__local_token();
    MUST(dray__local_add(token, layout, &region, 1, NULL, NULL, error));
    dray__export *export = NULL;
    dray__writer said = {0};
    dray_error why;
    assert_int_equal(dray__export_give(&export, stream, token + 1, 5, 1 << 16, &said, &why),
                     DRAY_EDEAD);
    assert_int_equal(dray__export_give(&export, stream, token, 5, 8, &said, &why),
                     DRAY_EUNSUPPORTED);
    assert_int_equal(said.size, 0);
    MUST(dray__export_give(&export, stream, token, 5, 1 << 16, &said, error));
    dray__reader in = dray__reader_of(said.data, said.size);
    assert_int_equal(dray__get_u32(&in), 1);
    assert_true(dray__get_u64(&in) == (uint64_t)(uintptr_t)dray_region_base(region));
    assert_true(dray__get_u64(&in) == dray_region_bytes(region));
    dray__local_revoke(token, 5); /* older ones */
    assert_true(dray__export_enter(export));
    dray__export_leave();
    dray__export_done(export);
    dray__local_revoke(token, 6); /* it was over: kept for the next */
    assert_true(dray__export_enter(export));
    dray__export_leave();
    assert_int_equal(dray__export_give(&export, stream, token, 5, 1 << 16, &said, &why),
                     DRAY_ESTALE);
    MUST(dray__export_give(&export, stream, token, 6, 1 << 16, &said, error));
    dray__local_revoke(token, 7);
    assert_false(dray__export_enter(export));
    MUST(dray__export_give(&export, stream, token, 7, 1 << 16, &said, error)); /* anew */
    dray__export_done(export);
    closes_in_child(token, export);
    dray__local_remove(token); /* the memory goes away: nobody keeps it */
    assert_false(dray__export_enter(export));
    dray__export_free(export);
    dray__writer_free(&said);
    dray_region_free(region);
    dray_layout_free(layout);
    dray__stream_close(server);
    dray__stream_close(stream);
    close(listener);
}

int main(void)
{
#if defined(__SANITIZE_THREAD__)
    setenv("UCX_MEM_EVENTS", "n", 1); /* UCX patches malloc and its like, as the sanitizer does */
#endif
    if (dray_transport_find("ucx", NULL, 0, NULL))
        return 77;
    setenv("DRAY_TRANSPORT", "ucx", 1);
    return suite_run(NULL, NULL);
}
