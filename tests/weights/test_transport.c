/* Tests the choice of the carrier of weights between hosts, and the refusal of unsuitable ones.
 * Where UCX is missing, only its error messages are tested. */

#include "net/ucx.h"
#include "suite.h"
#include "weights/cluster.h"
#include "weights/registry/registry.h"

CLUSTER_TEST(test_names)
{
    dray_error said;
    char detail[64];
    dray_context *context;
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = f.unix_address;
    options.transport = "carrier pigeon";
    assert_int_equal(dray_open(&options, &context, &said), DRAY_EINVALID);
    assert_non_null(strstr(said.message, "carrier pigeon"));
    MUST(dray_transport_find("stream", detail, sizeof detail, error));
    assert_string_equal(detail, "tcp");
    assert_int_equal(dray_transport_find("tcp", detail, sizeof detail, &said), DRAY_EINVALID);
    options.transport = "ucx";
    int rc = dray_open(&options, &context, &said);
    assert_int_equal(rc, dray_transport_find("ucx", detail, sizeof detail, &said));
    if (rc == DRAY_OK)
        dray_close(context);
    else
        assert_non_null(strstr(said.message, "install"));
}

typedef struct scene {
    board *board;
    const char *encrypt, *transport; /* of the engine */
    bool other_version;
    bool by_path;     /* the trainer listens at a Unix socket */
    const char *said; /* NULL: the update works */
} scene;

static void run_trainer(void *user)
{
    const scene *s = user;
    dray_model_config config = small_config(false, 3);
    trainer t;
    fixture_host = "trainers";
    char listen[DRAY__STREAM_ADDRESS];
    snprintf(listen, sizeof listen, "%.70s.data", f.unix_address);
    if (s->by_path)
        setenv("DRAY_DATA_ADDRESS", listen, 1);
    trainer_open(&t, f.unix_address, &config, DRAY_F32, 0, 1, 7, DRAY_REGION_HOST);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    raise_flag(s->board, 0);
    await_flag(s->board, 1);
    trainer_close(&t);
}

static void run_engine(void *user)
{
    const scene *s = user;
    dray_model_config config = small_config(false, 3);
    dray_error said = {0};
    engine e;
    fixture_host = "engines";
    setenv("DRAY_TRANSPORT", s->transport, 1);
    if (s->encrypt)
        setenv("DRAY_DATA_ENCRYPT", s->encrypt, 1);
    if (s->other_version)
        dray__ucx_pretend(&(dray__ucx_version){1, 99, 7});
    engine_open(&e, f.unix_address, &config, DRAY_F32, DRAY_F32, "engine", 0, 1);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.timeout_ns = 20 * DRAY__SECOND;
    int64_t begin = dray__now();
    int rc = dray_update_weights(e.subscriber, &options, NULL, &said);
    fprintf(stderr, "%s: %s\n", dray_error_name(rc), said.message);
    if (s->said) {
        CHECK(rc != DRAY_OK && strstr(said.message, s->said));
        CHECK(dray__now() - begin < 10 * DRAY__SECOND); /* not tried again and again */
    } else {
        CHECK(rc == DRAY_OK && engine_wrong(&e, 7) == 0);
    }
    raise_flag(s->board, 1);
    engine_close(&e);
}

static void run_pair(const scene *given)
{
    scene s = *given;
    s.board = board_new();
    pid_t pid = spawn(run_trainer, &s);
    await_flag(s.board, 0);
    must_end_well(spawn(run_engine, &s));
    must_end_well(pid);
    munmap(s.board, sizeof(board));
}

CLUSTER_TEST(test_refusals)
{
    char version[64], both[128];
    if (dray_transport_find("ucx", version, sizeof version, NULL))
        skip();
    snprintf(both, sizeof both, "UCX 1.99.7 of the reader and %.*s here",
             (int)strcspn(version, ","), version);
    const scene scenes[] = {
        {.transport = "ucx"},
        {.transport = "auto"},
        {.transport = "ucx", .other_version = true, .said = both},
        {.transport = "ucx", .encrypt = "always", .said = "trusted_networks"},
    };
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++)
        run_pair(&scenes[i]);
}

/* Bytes need no network where both see the same file. */
CLUSTER_TEST(test_by_path)
{
    run_pair(&(scene){.transport = "auto", .by_path = true});
    run_pair(&(scene){.transport = "auto", .by_path = true, .encrypt = "always", .said = "clear"});
}

/* What this process's children use may be refused by the other side. */
CLUSTER_TEST(test_trainer_without)
{
    if (dray_transport_find("ucx", NULL, 0, NULL))
        skip();
    setenv("DRAY_TRANSPORT", "stream", 1); /* the trainer's */
    run_pair(&(scene){.transport = "ucx", .said = "its transport is set to stream"});
    unsetenv("DRAY_TRANSPORT");
}

int main(void)
{
#if defined(__SANITIZE_THREAD__)
    setenv("UCX_MEM_EVENTS", "n", 1); /* UCX patches malloc and its like, as the sanitizer does */
#endif
    unsetenv("DRAY_TRANSPORT");
    return suite_run(NULL, NULL);
}
