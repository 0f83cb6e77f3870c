/* Tests versions that exist at the same time: a prefetched one beside the served one, engines of
 * different versions, engines that read from each other, the router's list, and members that
 * leave. */
#include "suite.h"
#include "weights/cluster.h"
#include "weights/update/subscriber.h"

#include <stdint.h>

#define LONG (30 * DRAY__SECOND)

static dray_model_config config;

static int start(void **state)
{
    cluster_start(state);
    config = small_config(false, 3);
    return 0;
}

static void open_trainer(trainer *t, uint64_t seed)
{
    trainer_open(t, f.unix_address, &config, DRAY_F32, 0, 1, seed, cluster_kind);
}

static void open_engine(engine *e, const char *group, dray_dtype dtype)
{
    engine_open(e, f.unix_address, &config, DRAY_F32, dtype, group, 0, 1);
}

static void write_version(trainer *t, uint64_t version, uint64_t seed)
{
    fill(t->layout, t->region, t->tied, seed);
    MUST(dray_publisher_publish(t->publisher, version, NULL, error));
}

static int32_t state_of(const engine *e, uint64_t *version)
{
    int32_t state;
    MUST(dray_subscriber_version(e->subscriber, version, NULL, &state, error));
    return state;
}

static void check_serves(const engine *e, uint64_t expected)
{
    uint64_t version;
    assert_int_equal(state_of(e, &version), DRAY_GROUP_WHOLE);
    assert_int_equal(version, expected);
}

static void open_pair(scene_pair *p, dray_dtype dtype)
{
    pair_open(p, &config, DRAY_F32, dtype, 1, cluster_kind);
}

/* The engine has the version, of seed 1, and nobody reads the trainer. */
static void open_served(scene_pair *p, dray_dtype dtype, uint64_t version)
{
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    open_pair(p, dtype);
    write_version(&p->t, version, 1);
    MUST(dray_update_weights(p->e.subscriber, NULL, &report, error));
    assert_int_equal(report.source, DRAY_SOURCE_PUBLISHERS);
    MUST(dray_publisher_wait(p->t.publisher, version, LONG, NULL, error));
}

/* ---- prefetch and commit -------------------------------------------------------------------- */

TEST_WITHIN(test_prefetch_waits_beside_what_is_served, start, cluster_stop)
{
    for (int32_t strategy = 0; strategy < 3; strategy++) {
        scene_pair p;
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        options.strategy = strategy;
        open_pair(&p, strategy ? DRAY_BF16 : DRAY_F32);
        assert_int_equal(dray_commit_weights(p.e.subscriber, NULL, NULL, NULL), DRAY_ENOENT);
        write_version(&p.t, 1, 1);
        MUST(dray_update_weights(p.e.subscriber, &options, NULL, error));
        MUST(dray_publisher_wait(p.t.publisher, 1, LONG, NULL, error));
        write_version(&p.t, 2, 2);
        MUST(dray_prefetch_weights(p.e.subscriber, &options, &report, error));
        assert_int_equal(report.version, 2);
        assert_true(report.verified_bytes > 0);
        assert_true(report.peak_extra_bytes >= dray_region_bytes(p.e.region[0]));
        /* the old one is still there, for the coordinator, too; the source is free again */
        assert_int_equal(engine_wrong(&p.e, 1), 0);
        check_serves(&p.e, 1);
        MUST(dray_publisher_wait(p.t.publisher, 2, 0, NULL, error));
        write_version(&p.t, 3, 3);
        options.min_version = 3;
        assert_int_equal(dray_commit_weights(p.e.subscriber, &options, NULL, NULL), DRAY_ENOENT);
        options.min_version = 0;
        MUST(dray_commit_weights(p.e.subscriber, &options, &report, error));
        assert_int_equal(report.source, DRAY_SOURCE_STAGING);
        assert_true(report.verified_bytes > 0);
        assert_int_equal(engine_wrong(&p.e, 2), 0);
        check_serves(&p.e, 2);
        MUST(dray_subscriber_verify(p.e.subscriber, error));
        assert_int_equal(dray_commit_weights(p.e.subscriber, NULL, NULL, NULL), DRAY_ENOENT);
        pair_close(&p);
    }
}

TEST_WITHIN(test_prefetch_is_superseded_or_dropped, start, cluster_stop)
{
    scene_pair p;
    uint64_t version;
    open_pair(&p, DRAY_BF16);
    write_version(&p.t, 1, 1);
    MUST(dray_prefetch_weights(p.e.subscriber, NULL, NULL, error));
    assert_int_equal(state_of(&p.e, &version), DRAY_GROUP_EMPTY);
    write_version(&p.t, 2, 2);
    MUST(dray_prefetch_weights(p.e.subscriber, NULL, NULL, error));
    MUST(dray_commit_weights(p.e.subscriber, NULL, NULL, error));
    assert_int_equal(engine_wrong(&p.e, 2), 0);
    write_version(&p.t, 3, 3);
    MUST(dray_prefetch_weights(p.e.subscriber, NULL, NULL, error));
    MUST(dray_prefetch_drop(p.e.subscriber, error));
    assert_int_equal(dray_commit_weights(p.e.subscriber, NULL, NULL, NULL), DRAY_ENOENT);
    assert_int_equal(engine_wrong(&p.e, 2), 0);
    pair_close(&p);
}

static void flip_source(void *user, const char *step)
{
    trainer *t = user;
    if (strcmp(step, "writing") == 0)
        memory_flip(t->region[0], 0, 0x10);
}

/* A prefetch that read something else fails, and the engine is as it was. */
TEST_WITHIN(test_failed_prefetch_tears_nothing, start, cluster_stop)
{
    scene_pair p;
    open_served(&p, DRAY_BF16, 1);
    write_version(&p.t, 2, 2);
    MUST(dray_prefetch_weights(p.e.subscriber, NULL, NULL, error));
    write_version(&p.t, 3, 3);
    await_sums(p.t.context, 3);
    dray__hook_set(flip_source, &p.t);
    assert_int_equal(dray_prefetch_weights(p.e.subscriber, NULL, NULL, NULL), DRAY_ECHECKSUM);
    dray__hook_set(NULL, NULL);
    check_serves(&p.e, 1);
    assert_int_equal(engine_wrong(&p.e, 1), 0);
    assert_int_equal(dray_commit_weights(p.e.subscriber, NULL, NULL, NULL), DRAY_ENOENT);
    pair_close(&p);
}

/* Staging that changed between the two is found when it is copied; the next update repairs. */
TEST_WITHIN(test_commit_verifies_its_copy, start, cluster_stop)
{
    scene_pair p;
    uint64_t version;
    open_pair(&p, DRAY_F32);
    write_version(&p.t, 1, 1);
    MUST(dray_prefetch_weights(p.e.subscriber, NULL, NULL, error));
    memory_flip(p.e.subscriber->staging[0], dray_layout_block(p.e.layout, 3)->offset, 1);
    dray_error said;
    int rc = dray_commit_weights(p.e.subscriber, NULL, NULL, &said);
    if (cluster_kind == DRAY_REGION_CUDA) { /* which is exchanged: there is no copy */
        assert_int_equal(rc, DRAY_OK);
        assert_int_equal(dray_subscriber_verify(p.e.subscriber, &said), DRAY_ECHECKSUM);
    } else {
        assert_int_equal(rc, DRAY_ETORN);
        assert_int_equal(state_of(&p.e, &version), DRAY_GROUP_TORN);
    }
    const dray_block *block = dray_layout_block(p.e.layout, 3);
    assert_non_null(strstr(said.message, dray_layout_tensor(p.e.layout, block->tensor)->name));
    MUST(dray_update_weights(p.e.subscriber, NULL, NULL, error));
    assert_int_equal(engine_wrong(&p.e, 1), 0);
    pair_close(&p);
}

/* A commit of more than a poll copies, which then has to go on; and one whose deadline passes. */
TEST_WITHIN(test_commit_takes_several_polls, start, cluster_stop)
{
    scene_pair p;
    int polls = 0;
    config.vocab_size = 300000;
    open_pair(&p, DRAY_F32);
    MUST(dray_publisher_publish(p.t.publisher, 1, NULL, error));
    MUST(dray_prefetch_weights(p.e.subscriber, NULL, NULL, error));
    MUST(dray_commit_start(p.e.subscriber, NULL, error));
    while (dray_update_poll(p.e.subscriber, NULL) == DRAY_EAGAIN)
        polls += p.e.subscriber->phase == PHASE_MOVE;
    MUST(dray_update_finish(p.e.subscriber, NULL, error));
    assert_true(polls > 0 || cluster_kind == DRAY_REGION_CUDA); /* which is exchanged in one */
    assert_int_equal(engine_wrong(&p.e, 1), 0);
    MUST(dray_prefetch_weights(p.e.subscriber, NULL, NULL, error));
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.timeout_ns = DRAY__MILLISECOND;
    int rc = dray_commit_weights(p.e.subscriber, &options, NULL, NULL);
    /* a GPU may be done with it by then */
    assert_true(rc == DRAY_ETORN || rc == DRAY_ETIMEDOUT || cluster_kind == DRAY_REGION_CUDA);
    MUST(dray_update_weights(p.e.subscriber, NULL, NULL, error));
    assert_int_equal(engine_wrong(&p.e, 1), 0);
    pair_close(&p);
}

/* ---- engines that read each other ----------------------------------------------------------- */

/* The trainer is gone, or busy writing: a joiner reads the engine that holds the version. */
TEST_WITHIN(test_joiner_reads_a_peer, start, cluster_stop)
{
    static const dray_dtype dtypes[] = {DRAY_F32, DRAY_BF16};
    for (size_t i = 0; i < 2; i++) {
        scene_pair p;
        engine second, other;
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        open_served(&p, dtypes[i], 7);
        fill(p.t.layout, p.t.region, p.t.tied, 99);
        open_engine(&second, "second", dtypes[i]);
        MUST(dray_update_weights(second.subscriber, NULL, &report, error));
        assert_int_equal(report.source, DRAY_SOURCE_PEERS);
        assert_int_equal(report.version, 7);
        assert_true(report.verified_bytes > 0);
        assert_int_equal(engine_wrong(&second, 1), 0);
        /* with nothing newer, and with bits that were converted already, there is nobody to read */
        options.timeout_ns = DRAY__SECOND / 10;
        assert_int_equal(dray_update_weights(second.subscriber, &options, NULL, NULL),
                         DRAY_ETIMEDOUT);
        open_engine(&other, "other", dtypes[1 - i]);
        assert_int_equal(dray_update_weights(other.subscriber, &options, NULL, NULL),
                         DRAY_ETIMEDOUT);
        options.no_peers = 1;
        poison(second.layout, second.region);
        assert_int_equal(dray_update_weights(second.subscriber, &options, NULL, NULL),
                         DRAY_ETIMEDOUT);
        engine_close(&other);
        engine_close(&second);
        pair_close(&p);
    }
}

/* What changed in a peer's memory since it was verified is found by who reads it, and then the
 * publishers are read. */
TEST_WITHIN(test_wrong_peer_is_found, start, cluster_stop)
{
    scene_pair p;
    engine second;
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    open_served(&p, DRAY_F32, 7);
    memory_flip(p.e.region[0], dray_layout_block(p.e.layout, 2)->offset, 4);
    open_engine(&second, "second", DRAY_F32);
    options.timeout_ns = DRAY__SECOND;
    dray_error said;
    assert_int_equal(dray_update_weights(second.subscriber, &options, NULL, &said), DRAY_ETORN);
    assert_non_null(strstr(said.message, "differ from the peer's memory"));
    write_version(&p.t, 8, 2);
    options.timeout_ns = LONG;
    MUST(dray_update_weights(second.subscriber, &options, NULL, error));
    assert_int_equal(engine_wrong(&second, 2), 0);
    engine_close(&second);
    pair_close(&p);
}

/* While the reader is between its import and its first byte, the peer begins to be overwritten. */
typedef struct overwrite {
    trainer *t;
    engine *peer;
    int64_t lease_ns;
    int rc; /* of the peer's poll, after half a second */
} overwrite;

static void overwrite_peer(void *user, const char *step)
{
    overwrite *o = user;
    if (strcmp(step, "import") != 0)
        return;
    dray__hook_set(NULL, NULL);
    write_version(o->t, 2, 2);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.lease_ns = o->lease_ns;
    MUST(dray_update_start(o->peer->subscriber, &options, error));
    int64_t until = dray__now() + DRAY__SECOND / 2;
    while ((o->rc = dray_update_poll(o->peer->subscriber, NULL)) == DRAY_EAGAIN &&
           dray__now() < until)
        usleep(200);
}

/* The peer's next overwrite waits for its reader; or, at the lease's end, takes its memory back,
 * and the reader reads the publishers. */
TEST_WITHIN(test_leases, start, cluster_stop)
{
    for (int patient = 0; patient < 2; patient++) {
        scene_pair p;
        engine second;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        overwrite o = {&p.t, &p.e, patient ? LONG : DRAY__SECOND / 20, 0};
        open_served(&p, DRAY_F32, 1);
        open_engine(&second, "second", DRAY_F32);
        dray__hook_set(overwrite_peer, &o);
        MUST(dray_update_weights(second.subscriber, NULL, &report, error));
        assert_int_equal(o.rc, patient ? DRAY_EAGAIN : DRAY_OK);
        assert_int_equal(report.version, patient ? 1 : 2);
        assert_int_equal(report.retries, patient ? 0 : 1);
        assert_int_equal(engine_wrong(&second, patient ? 1 : 2), 0);
        while (dray_update_poll(p.e.subscriber, NULL) == DRAY_EAGAIN)
            usleep(200);
        MUST(dray_update_finish(p.e.subscriber, NULL, error));
        assert_int_equal(engine_wrong(&p.e, 2), 0);
        engine_close(&second);
        pair_close(&p);
    }
}

/* ---- the router's list ---------------------------------------------------------------------- */

typedef struct heard {
    char text[512];
} heard;

static void hear(void *user, dray_engine_event event, const dray_engine_info *info)
{
    static const char *const names[] = {"", "joined", "left", "updated", "torn"};
    heard *h = user;
    size_t used = strlen(h->text);
    snprintf(h->text + used, sizeof h->text - used, "%s%s %s %d", used ? ", " : "", info->group,
             names[event], (int)number_heard(info));
}

static void expect(dray_engines *engines, const char *text)
{
    heard h = {""};
    int64_t deadline = dray__deadline(LONG);
    while (strcmp(h.text, text) != 0) {
        int rc = dray_engines_wait(engines, DRAY__SECOND / 4, hear, &h, NULL);
        if (dray__now() > deadline || strlen(h.text) > strlen(text)) {
            fprintf(stderr, "heard '%s', expected '%s' (%d)\n", h.text, text, rc);
            abort();
        }
    }
}

TEST_WITHIN(test_router_sees_who_serves, start, cluster_stop)
{
    trainer t;
    engine a, b;
    dray_engines *engines;
    uint32_t revoked;
    dray_context *context = fixture_open(&f, "router", "task", 0);
    MUST(dray_engines_open(context, &engines, error));
    MUST(dray_engines_wait(engines, LONG, NULL, NULL, error));
    assert_int_equal(dray_engines_count(engines), 0);
    open_trainer(&t, 1);
    open_engine(&a, "a", DRAY_F32);
    write_version(&t, 1, 1);
    MUST(dray_update_weights(a.subscriber, NULL, NULL, error));
    expect(engines, "a joined 1");
    open_engine(&b, "b", DRAY_F32);
    MUST(dray_update_weights(b.subscriber, NULL, NULL, error));
    expect(engines, "b joined 1");
    write_version(&t, 2, 2);
    MUST(dray_prefetch_weights(a.subscriber, NULL, NULL, error));
    assert_int_equal(dray_engines_wait(engines, 0, hear, NULL, NULL), DRAY_ETIMEDOUT);
    MUST(dray_subscriber_leave(b.subscriber, LONG, &revoked, error));
    assert_int_equal(revoked, 0);
    expect(engines, "b left 1");
    engine_close(&b);
    assert_int_equal(dray_engines_wait(engines, LONG, NULL, NULL, NULL), DRAY_OK);
    dray_engine_info info = DRAY_ENGINE_INFO_INIT;
    assert_int_equal(dray_engines_count(engines), 1);
    MUST(dray_engines_entry(engines, 0, &info, error));
    assert_string_equal(info.group, "a");
    assert_string_equal(info.model, MODEL);
    assert_int_equal(info.serving, 1);
    assert_int_equal(dray_engines_entry(engines, 1, &info, NULL), DRAY_EINVALID);
    write_version(&t, 3, 3);
    await_sums(t.context, 3);
    dray__hook_set(flip_source, &t);
    assert_int_equal(dray_update_weights(a.subscriber, NULL, NULL, NULL), DRAY_ETORN);
    dray__hook_set(NULL, NULL);
    expect(engines, "a left 1, a torn 1");
    engine_close(&a);
    trainer_close(&t);
    dray_engines_close(engines);
    dray_close(context);
}

/* ---- a trainer that resumes ------------------------------------------------------------------ */

TEST_WITHIN(test_same_number_of_a_resumed_trainer, start, cluster_stop)
{
    trainer t;
    engine e;
    uint64_t incarnation[2];
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    open_engine(&e, "engine", DRAY_BF16);
    for (uint64_t i = 0; i < 2; i++) {
        open_trainer(&t, i + 1);
        MUST(dray_publisher_publish(t.publisher, 95, NULL, error));
        MUST(dray_update_weights(e.subscriber, NULL, &report, error));
        assert_int_equal(report.version, 95);
        incarnation[i] = report.incarnation;
        assert_int_equal(engine_wrong(&e, i + 1), 0);
        trainer_close(&t);
    }
    assert_true(incarnation[1] > incarnation[0]);
    engine_close(&e);
}

/* ---- memory that moves, and memory that is taken back --------------------------------------- */

static void open_snapshot_trainer(trainer *t, uint64_t seed)
{
    memset(t, 0, sizeof *t);
    t->tied = config.tied;
    t->context = fixture_open_at(f.unix_address, "trainer-0", "trainer", 0);
    MUST(dray_layout_fsdp(&config, DRAY_F32, 0, 1, cluster_kind_or(DRAY_REGION_HOST), &t->layout,
                          error));
    MUST(dray_regions_for_layout(t->layout, 1, t->region, error));
    fill(t->layout, t->region, t->tied, seed);
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    options.regions = t->region;
    options.snapshot = 1;
    MUST(dray_publisher_open(t->context, MODEL, t->layout, &options, &t->publisher, error));
}

/* The trainer goes on at once, and late readers still get what was published. */
TEST_WITHIN(test_snapshot_lets_the_trainer_go_on, start, cluster_stop)
{
    trainer t;
    engine e, late;
    open_snapshot_trainer(&t, 1);
    open_engine(&e, "engine", DRAY_BF16);
    for (uint64_t version = 1; version < 4; version++) {
        MUST(dray_publisher_publish(t.publisher, version, NULL, error));
        MUST(dray_publisher_wait(t.publisher, version, 0, NULL, error));
        fill(t.layout, t.region, t.tied, version + 1);
        MUST(dray_update_weights(e.subscriber, NULL, NULL, error));
        assert_int_equal(engine_wrong(&e, version), 0);
    }
    assert_int_equal(dray_publisher_wait(t.publisher, 4, 0, NULL, NULL), DRAY_EINVALID);
    open_engine(&late, "late", DRAY_F32);
    MUST(dray_update_weights(late.subscriber, NULL, NULL, error));
    assert_int_equal(engine_wrong(&late, 3), 0);
    /* freed, and made again */
    MUST(dray_publisher_release(t.publisher, LONG, NULL, 0, NULL, error));
    assert_int_equal(dray_publisher_publish(t.publisher, 4, NULL, NULL), DRAY_ESTALE);
    MUST(dray_publisher_move(t.publisher, t.region, error));
    MUST(dray_publisher_publish(t.publisher, 4, NULL, error));
    MUST(dray_update_weights(late.subscriber, NULL, NULL, error));
    assert_int_equal(engine_wrong(&late, 4), 0);
    /* the trainer's memory moves to the host, not to where there is less of it */
    uint64_t bytes = dray_layout_region(t.layout, 0)->bytes;
    dray_region *smaller[1], *elsewhere[1];
    MUST(dray_region_alloc(DRAY_REGION_HOST, bytes - 1, "smaller", smaller, error));
    MUST(dray_region_alloc(DRAY_REGION_HOST, bytes, "elsewhere", elsewhere, error));
    assert_int_equal(dray_publisher_move(t.publisher, smaller, NULL), DRAY_EINVALID);
    fill(t.layout, elsewhere, t.tied, 5);
    MUST(dray_publisher_move(t.publisher, elsewhere, error));
    MUST(dray_publisher_publish(t.publisher, 5, NULL, error));
    MUST(dray_update_weights(late.subscriber, NULL, NULL, error));
    assert_int_equal(engine_wrong(&late, 5), 0);
    engine_close(&late);
    engine_close(&e);
    trainer_close(&t);
    dray_region_free(smaller[0]);
    dray_region_free(elsewhere[0]);
}

enum { PUBLISHED, MAPPED, TAKEN_BACK, UPDATED, OVER };
static board *told;

static void mapping_engine(void *user)
{
    bool stops = *(bool *)user;
    engine e;
    await_flag(told, PUBLISHED);
    open_engine(&e, "engine", DRAY_F32);
    MUST(dray_update_weights(e.subscriber, NULL, NULL, error));
    raise_flag(told, MAPPED);
    if (stops)
        kill(getpid(), SIGSTOP);
    while (!stops && !told->flag[TAKEN_BACK]) {
        MUST(dray_subscriber_release_mappings(e.subscriber, error));
        usleep(1000);
    }
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    options.min_version = 2;
    MUST(dray_update_weights(e.subscriber, &options, &report, error));
    CHECK(report.planned);
    CHECK(engine_wrong(&e, 2) == 0);
    raise_flag(told, UPDATED);
    await_flag(told, OVER);
    engine_close(&e);
}

/* Memory that an engine has mapped: an idle engine lets it go, a stopped one is named with the
 * bytes that it pins. The next version is elsewhere, and never read where the first one was. */
static void release_with(bool stops)
{
    told = board_new();
    pid_t child = spawn(mapping_engine, &stops);
    trainer t;
    dray_pin pins[2];
    uint32_t count = 9;
    open_trainer(&t, 1);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    raise_flag(told, PUBLISHED);
    await_flag(told, MAPPED);
    uint64_t bytes = dray_region_bytes(t.region[0]);
    int rc =
        dray_publisher_release(t.publisher, stops ? DRAY__SECOND / 5 : LONG, pins, 2, &count, NULL);
    assert_int_equal(rc, stops ? DRAY_ETIMEDOUT : DRAY_OK);
    assert_int_equal(count, stops);
    if (stops) {
        assert_string_equal(pins[0].name, "engine-0");
        /* GPU memory is mapped in whole granules */
        assert_true(pins[0].bytes == bytes ||
                    (cluster_kind == DRAY_REGION_CUDA && pins[0].bytes > bytes));
    }
    assert_int_equal(dray_publisher_publish(t.publisher, 2, NULL, NULL), DRAY_ESTALE);
    dray_region_free(t.region[0]);
    /* a new region, maybe at the same address */
    MUST(dray_regions_for_layout(t.layout, 1, t.region, error));
    MUST(dray_publisher_move(t.publisher, t.region, error));
    write_version(&t, 2, 2);
    raise_flag(told, TAKEN_BACK);
    kill(child, SIGCONT);
    await_flag(told, UPDATED);
    raise_flag(told, OVER);
    must_end_well(child);
    trainer_close(&t);
    munmap(told, sizeof(board));
}

TEST_WITHIN(test_idle_engines_let_go, start, cluster_stop)
{
    release_with(false);
}

TEST_WITHIN(test_release_names_who_pins, start, cluster_stop)
{
    release_with(true);
}

/* One rank has published when the memory of the other one moves: its part stays. */
TEST_WITHIN(test_ranks_move_one_after_the_other, start, cluster_stop)
{
    trainer t[2];
    engine e;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    for (uint32_t i = 0; i < 2; i++)
        trainer_open(&t[i], f.unix_address, &config, DRAY_F32, i, 2, 1, cluster_kind);
    open_engine(&e, "engine", DRAY_F32);
    for (uint64_t version = 1; version < 4; version++) {
        for (int i = 0; i < 2; i++) {
            if (version > 1) {
                dray_region_free(t[i].region[0]);
                MUST(dray_regions_for_layout(t[i].layout, 1, t[i].region, error));
                MUST(dray_publisher_move(t[i].publisher, t[i].region, error));
            }
            write_version(&t[i], version, version);
        }
        MUST(dray_update_weights(e.subscriber, NULL, &report, error));
        assert_int_equal(report.version, version);
        assert_int_equal(engine_wrong(&e, version), 0);
        for (int i = 0; i < 2; i++)
            MUST(dray_publisher_wait(t[i].publisher, version, LONG, NULL, error));
    }
    engine_close(&e);
    for (int i = 0; i < 2; i++)
        trainer_close(&t[i]);
}

enum { PLACES = 4 };

/* The same elements of the same tensors, in other pieces, which lie in any order in so many
 * regions. without: a tensor that is left out; UINT32_MAX: none. */
static dray_layout *scattered(const dray_layout *from, uint32_t places, uint64_t seed,
                              uint32_t without)
{
    dray_layout *out;
    uint64_t bytes[PLACES] = {0}, end[PLACES] = {0};
    MUST(dray_layout_new(&out, error));
    for (uint32_t t = 0; t < dray_layout_tensor_count(from); t++) {
        const dray_tensor_info *i = dray_layout_tensor(from, t);
        if (i->alias_of >= 0)
            MUST(dray_layout_add_alias(out, i->name, (uint32_t)i->alias_of, NULL, error));
        else
            MUST(dray_layout_add_tensor(out, i->name, (dray_dtype)i->dtype, i->ndim, i->shape, NULL,
                                        error));
    }
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t r = 0; r < places && pass; r++) {
            dray_region_info info = {.kind = (int32_t)cluster_kind, .bytes = bytes[r] + 64};
            MUST(dray_layout_add_region(out, &info, NULL, error));
        }
        for (uint32_t b = 0; b < 2 * dray_layout_block_count(from); b++) {
            const dray_block *block = dray_layout_block(from, b / 2);
            const dray_tensor_info *tensor = dray_layout_tensor(from, block->tensor);
            int64_t start[DRAY_MAX_DIMS], extent[DRAY_MAX_DIMS];
            memcpy(start, block->start, sizeof start);
            memcpy(extent, block->extent, sizeof extent);
            int64_t cut = (int64_t)(mix(seed + b / 2) % (uint64_t)(extent[0] + 1));
            start[0] += b % 2 ? cut : 0;
            extent[0] = b % 2 ? extent[0] - cut : cut;
            uint64_t size = dray_dtype_size((dray_dtype)tensor->dtype);
            for (uint32_t d = 0; d < tensor->ndim; d++)
                size *= (uint64_t)extent[d];
            uint32_t place = (uint32_t)(mix(seed ^ (b + 1000)) % places);
            if (!size || block->tensor == without)
                continue;
            if (pass)
                MUST(dray_layout_add_dense(out, block->tensor, place, start, extent, end[place],
                                           error));
            end[place] += pass ? size : 0;
            bytes[place] += pass ? 0 : size;
        }
    }
    return out;
}

static void relay(trainer *t, dray_region **regions, uint64_t seed)
{
    dray_layout *next = scattered(t->layout, 1 + (uint32_t)seed % PLACES, seed, UINT32_MAX);
    for (uint32_t i = 0; i < dray_layout_region_count(t->layout); i++)
        dray_region_free(regions[i]);
    dray_layout_free(t->layout);
    t->layout = next;
    MUST(dray_regions_for_layout(next, 1, regions, error));
    MUST(dray_publisher_set_layout(t->publisher, next, regions, error));
}

/* As in memory that an allocator cuts: the parts of one rank, or of both, lie otherwise each time.
 */
TEST_WITHIN(test_layouts_change_with_memory, start, cluster_stop)
{
    trainer t[2];
    engine e;
    dray_region *regions[2][PLACES] = {{NULL}};
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    for (uint32_t i = 0; i < 2; i++) {
        trainer_open(&t[i], f.unix_address, &config, DRAY_F32, i, 2, 1, cluster_kind);
        regions[i][0] = t[i].region[0];
    }
    open_engine(&e, "engine", DRAY_BF16);
    for (uint64_t version = 1; version < 8; version++) {
        for (int i = 0; i < 2; i++)
            if (version > 1 && (i || version % 2))
                relay(&t[i], regions[i], 10 * version + (uint64_t)i);
        for (int i = 0; i < 2; i++) {
            fill(t[i].layout, regions[i], t[i].tied, version);
            MUST(dray_publisher_publish(t[i].publisher, version, NULL, error));
        }
        MUST(dray_update_weights(e.subscriber, NULL, &report, error));
        assert_int_equal(report.version, version);
        assert_true(report.planned);
        assert_true(report.verified_tensors > 0);
        assert_int_equal(engine_wrong(&e, version), 0);
        for (int i = 0; i < 2; i++)
            MUST(dray_publisher_wait(t[i].publisher, version, LONG, NULL, error));
    }
    /* without a tensor it is not the same */
    dray_layout *less = scattered(t[0].layout, 1, 1, dray_layout_block(t[0].layout, 0)->tensor);
    dray_region *other;
    MUST(dray_regions_for_layout(less, 1, &other, error));
    assert_int_equal(dray_publisher_set_layout(t[0].publisher, less, &other, NULL), DRAY_EINVALID);
    assert_int_equal(dray_publisher_set_layout(t[0].publisher, NULL, &other, NULL), DRAY_EINVALID);
    MUST(dray_publisher_publish(t[0].publisher, 8, NULL, error));
    dray_region_free(other);
    dray_layout_free(less);
    engine_close(&e);
    for (int i = 0; i < 2; i++) {
        uint32_t count = dray_layout_region_count(t[i].layout);
        t[i].region[0] = regions[i][0];
        trainer_close(&t[i]); /* it may still sum what was published last */
        for (uint32_t r = 1; r < count; r++)
            dray_region_free(regions[i][r]);
    }
}

/* Freed behind the publisher's back: said, and not read. */
TEST_WITHIN(test_freed_regions_are_found, start, cluster_stop)
{
    scene_pair p;
    open_served(&p, DRAY_F32, 1);
    dray_region_free(p.t.region[0]);
    MUST(dray_regions_for_layout(p.t.layout, 1, p.t.region, error));
    fill(p.t.layout, p.t.region, p.t.tied, 2);
    dray_error said;
    assert_int_equal(dray_publisher_publish(p.t.publisher, 2, NULL, &said), DRAY_ESTALE);
    assert_non_null(strstr(said.message, "freed"));
    MUST(dray_publisher_move(p.t.publisher, p.t.region, error));
    MUST(dray_publisher_publish(p.t.publisher, 2, NULL, error));
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    MUST(dray_update_weights(p.e.subscriber, NULL, &report, error));
    assert_true(report.planned);
    assert_int_equal(engine_wrong(&p.e, 2), 0);
    pair_close(&p);
}

CLUSTER_SUITE
