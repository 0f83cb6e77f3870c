/* weights: movers that do wrong. Whatever piece is lost, changed, misplaced, misread or refused, in
 * whatever mode: no group commits wrong bytes, the tensor is named, all ranks are torn, and the
 * next update repairs them. Then checkpoints: written wrong, or changed on disk. */
#include "weights/cluster.h"

#include "mover/mover.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>

#include <cmocka.h>

enum { TRAINERS = 2, ENGINES = 4 }; /* more ranks than KV heads: replicas */

static dray_model_config config;
static char folder[160];

static int start(void **state)
{
    cluster_start_thread(state);
    config = small_config(false, 2);
    snprintf(folder, sizeof folder, "%s/checkpoint", f.folder);
    return 0;
}

static int stop(void **state)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    assert_int_equal(system(command), 0);
    return cluster_stop(state);
}

/* ---- the fault ------------------------------------------------------------------------------- */

typedef struct plot {
    dray__fault fault;
    uint64_t at, pieces; /* the piece that goes wrong, of those that were moved */
    char tensor[128];
} plot;

static dray__fault do_wrong(void *user, const char *tensor)
{
    plot *p = user;
    if (p->pieces++ != p->at)
        return DRAY__FAULT_NONE;
    snprintf(p->tensor, sizeof p->tensor, "%s", tensor);
    return p->fault;
}

/* Is the tensor named? What is written beside its place may damage its neighbour in memory, or in
 * the bucket whichever comes before: then that one may be named. */
static bool named(const dray_layout *layout, bool bucket, const plot *p, const char *message)
{
    uint32_t tensors =
        bucket && p->fault == DRAY__FAULT_SHIFT ? dray_layout_tensor_count(layout) : 0;
    for (uint32_t t = 0; t < tensors; t++)
        if (strstr(message, dray_layout_tensor(layout, t)->name))
            return true;
    if (strstr(message, p->tensor) || p->fault != DRAY__FAULT_SHIFT)
        return strstr(message, p->tensor) != NULL;
    for (uint32_t b = 0; b < dray_layout_block_count(layout); b++) {
        const dray_block *block = dray_layout_block(layout, b), *before = NULL, *after = NULL;
        if (strcmp(dray_layout_tensor(layout, block->tensor)->name, p->tensor) != 0)
            continue;
        for (uint32_t i = 0; i < dray_layout_block_count(layout); i++) {
            const dray_block *other = dray_layout_block(layout, i);
            if (other->offset < block->offset && (!before || other->offset > before->offset))
                before = other;
            if (other->offset > block->offset && (!after || other->offset < after->offset))
                after = other;
        }
        if (before && strstr(message, dray_layout_tensor(layout, before->tensor)->name))
            return true;
        if (after && strstr(message, dray_layout_tensor(layout, after->tensor)->name))
            return true;
    }
    return false;
}

/* ---- updates --------------------------------------------------------------------------------- */

typedef struct ranks {
    trainer t[TRAINERS];
    engine e[ENGINES];
} ranks;

static void open_ranks(ranks *r, dray_dtype to, uint64_t seed)
{
    for (uint32_t i = 0; i < TRAINERS; i++)
        trainer_open(&r->t[i], f.unix_address, &config, DRAY_F32, i, TRAINERS, seed, cluster_kind);
    for (uint32_t i = 0; i < TRAINERS; i++)
        MUST(dray_publish(r->t[i].publisher, 1, NULL, error));
    for (uint32_t i = 0; i < ENGINES; i++)
        engine_open(&r->e[i], f.unix_address, &config, DRAY_F32, to, "engine", i, ENGINES);
}

static void close_ranks(ranks *r)
{
    for (uint32_t i = 0; i < ENGINES; i++)
        engine_close(&r->e[i]);
    for (uint32_t i = 0; i < TRAINERS; i++)
        trainer_close(&r->t[i]);
}

/* All ranks together; they all hear the same. */
static int update(ranks *r, const dray_update_options *options, dray_update_report *report,
                  dray_error *said)
{
    int rc = 0;
    for (uint32_t i = 0; i < ENGINES; i++)
        MUST(dray_update_start(r->e[i].subscriber, options, error));
    for (uint32_t open = (1u << ENGINES) - 1; open;)
        for (uint32_t i = 0; i < ENGINES; i++)
            if ((open >> i & 1) && dray_update_poll(r->e[i].subscriber, NULL) == DRAY_OK)
                open &= ~(1u << i);
    for (uint32_t i = 0; i < ENGINES; i++) {
        int code = dray_update_finish(r->e[i].subscriber, report, said);
        if (i > 0)
            assert_int_equal(code, rc);
        rc = code;
    }
    return rc;
}

static uint64_t wrong_in_all(const ranks *r, uint64_t seed)
{
    uint64_t wrong = 0;
    for (uint32_t i = 0; i < ENGINES; i++)
        wrong += engine_wrong(&r->e[i], seed);
    return wrong;
}

static void poison_all(const ranks *r)
{
    for (uint32_t i = 0; i < ENGINES; i++)
        poison(r->e[i].layout, r->e[i].region);
}

static void check_whole(ranks *r, const dray_update_options *options, uint64_t seed)
{
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    poison_all(r);
    MUST(update(r, options, &report, error));
    assert_int_equal(wrong_in_all(r, seed), 0);
    assert_true(report.verified_tensors > 10);
    assert_true(report.verified_bytes > 0);
}

/* true: it was found. false: it did no harm. */
static bool one_fault(ranks *r, const dray_update_options *options, plot *p, uint64_t seed)
{
    dray_error said = {0};
    int32_t state;
    poison_all(r);
    dray__mover_faults(do_wrong, p);
    int rc = update(r, options, NULL, &said);
    dray__mover_faults(NULL, NULL);
    assert_true(p->pieces > p->at);
    if (rc == DRAY_OK) {
        assert_int_equal(wrong_in_all(r, seed), 0);
        return false;
    }
    assert_int_equal(rc, DRAY_ETORN);
    if (p->fault == DRAY__FAULT_FAIL)
        assert_non_null(strstr(said.message, "a fault was asked for"));
    else if (!named(r->e[0].layout, options->strategy != DRAY_STRATEGY_DIRECT, p, said.message))
        fail_msg("'%s' does not name %s", said.message, p->tensor);
    for (uint32_t i = 0; i < ENGINES; i++) {
        MUST(dray_subscriber_version(r->e[i].subscriber, NULL, NULL, &state, error));
        assert_int_equal(state, DRAY_GROUP_TORN);
    }
    return true;
}

static void faults_in(ranks *r, const dray_update_options *options, uint64_t seed, uint64_t random)
{
    plot count = {.at = UINT64_MAX};
    dray__mover_faults(do_wrong, &count);
    check_whole(r, options, seed);
    dray__mover_faults(NULL, NULL);
    for (int fault = DRAY__FAULT_FAIL; fault < DRAY__FAULT_COUNT; fault++) {
        int found = 0, tried = 6 * fixture_scale();
        for (int i = 0; i < tried; i++) {
            plot p = {.fault = (dray__fault)fault, .at = mix(random++) % count.pieces};
            found += one_fault(r, options, &p, seed);
        }
        if (fault == DRAY__FAULT_FAIL)
            assert_int_equal(found, tried);
        assert_true(found > 0);
        check_whole(r, options, seed);
    }
}

/* ---- what GPUs move by themselves: stores and loads of their kernels go wrong, or launches fail
 */

static bool names_a_tensor(const dray_layout *layout, const char *message)
{
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout); t++)
        if (strstr(message, dray_layout_tensor(layout, t)->name))
            return true;
    return false;
}

static bool one_gpu_fault(ranks *r, const dray_update_options *options, int kind, uint64_t at,
                          uint64_t seed)
{
    dray_error said = {0};
    poison_all(r);
    gpu_fault(kind, at);
    int rc = update(r, options, NULL, &said);
    gpu_fault(0, 0);
    if (rc == DRAY_OK) {
        assert_int_equal(wrong_in_all(r, seed), 0);
        return false;
    }
    assert_int_equal(rc, DRAY_ETORN);
    assert_true(names_a_tensor(r->e[0].layout, said.message));
    return true;
}

static void gpu_faults_in(ranks *r, const dray_update_options *options, uint64_t seed,
                          uint64_t random)
{
    for (int kind = 1; kind <= 3; kind++) {
        int found = 0;
        gpu_fault(kind, UINT64_MAX);
        assert_int_equal(update(r, options, NULL, NULL), DRAY_OK);
        uint64_t words = gpu_fault(0, 0);
        assert_true(words > 0);
        for (int i = 0; i < 3 * fixture_scale(); i++)
            found += one_gpu_fault(r, options, kind, mix(random++) % words, seed);
        /* a bucket may hold what was to be written there already */
        assert_true(found > 0 || kind != 2);
        check_whole(r, options, seed);
    }
    for (int i = 1; i <= 2; i++) {
        char spec[64];
        snprintf(spec, sizeof spec, "cuLaunchKernel:%d:701", i);
        gpu_fail(spec);
        int rc = update(r, options, NULL, NULL);
        gpu_fail(NULL);
        assert_true(rc == DRAY_OK || rc == DRAY_ETORN);
        assert_true(i > 1 || rc == DRAY_ETORN);
        check_whole(r, options, seed);
    }
}

static uint64_t random_seed(void)
{
    const char *given = getenv("DRAY_TEST_SEED");
    uint64_t seed = given ? (uint64_t)atoll(given) : (uint64_t)getpid();
    fprintf(stderr, "seed %" PRIu64 "\n", seed);
    return seed;
}

static void write_checkpoint(uint64_t seed)
{
    dray_layout *full;
    dray_region *region[1];
    MUST(dray_layout_full(&config, DRAY_F32, DRAY_REGION_HOST, &full, error));
    MUST(dray_regions_for_layout(full, 1, region, error));
    fill(full, region, false, seed);
    MUST(dray_checkpoint_write(folder, full, region, NULL, error));
    dray_region_free(region[0]);
    dray_layout_free(full);
}

static void test_updates(void **state)
{
    (void)state;
    uint64_t seed = random_seed();
    for (int mode = 0; mode < 4; mode++) {
        ranks r;
        open_ranks(&r, mode % 2 ? DRAY_BF16 : DRAY_F32, seed);
        write_checkpoint(seed);
        for (int32_t strategy = 0; strategy < 3; strategy++) {
            dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
            options.strategy = strategy;
            options.mode = mode < 2 ? DRAY_MODE_TENSOR : DRAY_MODE_DISK;
            options.path = mode < 2 ? NULL : folder;
            options.path_version = 1;
            uint64_t random = seed * 1000 + (uint64_t)(mode * 100 + strategy * 30);
            if (cluster_kind == DRAY_REGION_CUDA && mode < 2 && !gpu_is_real())
                gpu_faults_in(&r, &options, seed, random);
            else if (cluster_kind != DRAY_REGION_CUDA || mode >= 2)
                faults_in(&r, &options, seed, random);
        }
        close_ranks(&r);
    }
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

static void test_checkpoints_written_wrong(void **state)
{
    (void)state;
    uint64_t seed = random_seed();
    uint32_t compared = 0;
    dray_checksums *sums;
    write_checkpoint(seed);
    MUST(dray_checksums_of_checkpoint(folder, &compared, &sums, error));
    assert_int_equal(compared, dray_checksums_count(sums));
    assert_true(compared > 10);
    dray_checksums_free(sums);
    for (int fault = DRAY__FAULT_FAIL; fault < DRAY__FAULT_COUNT; fault++) {
        plot p = {.fault = (dray__fault)fault, .at = mix(seed + (uint64_t)fault) % 10};
        dray_layout *full;
        dray_region *region[1];
        dray_error said = {0};
        MUST(dray_layout_full(&config, DRAY_F32, DRAY_REGION_HOST, &full, error));
        MUST(dray_regions_for_layout(full, 1, region, error));
        fill(full, region, false, seed);
        dray__mover_faults(do_wrong, &p);
        int rc = dray_checkpoint_write(folder, full, region, NULL, &said);
        dray__mover_faults(NULL, NULL);
        assert_true(p.pieces > p.at);
        if (rc == DRAY_OK) {
            rc = dray_checksums_of_checkpoint(folder, NULL, &sums, &said);
            assert_int_equal(rc, DRAY_ECHECKSUM);
            dray_layout *files;
            MUST(dray_layout_safetensors(folder, &files, error));
            if (!named(files, false, &p, said.message))
                fail_msg("'%s' does not name %s", said.message, p.tensor);
            dray_layout_free(files);
            assert_non_null(strstr(said.message, ".safetensors"));
        } else {
            assert_int_equal(rc, DRAY_ESYS);
        }
        dray_region_free(region[0]);
        dray_layout_free(full);
        write_checkpoint(seed);
    }
}

/* Flips a bit of a tensor's bytes on disk. */
static void corrupt(uint64_t random, char *name, size_t capacity)
{
    dray_layout *files;
    MUST(dray_layout_safetensors(folder, &files, error));
    uint32_t index = (uint32_t)(random % dray_layout_block_count(files));
    const dray_block *block = dray_layout_block(files, index);
    const dray_tensor_info *tensor = dray_layout_tensor(files, block->tensor);
    uint64_t size = dray_dtype_size((dray_dtype)tensor->dtype);
    for (uint32_t d = 0; d < tensor->ndim; d++)
        size *= (uint64_t)tensor->shape[d];
    off_t at = (off_t)(block->offset + random / 7 % size);
    snprintf(name, capacity, "%s", tensor->name);
    int fd = open(dray_layout_region(files, block->region)->name, O_RDWR | O_CLOEXEC);
    uint8_t byte;
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 0x20;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
    dray_layout_free(files);
}

static void test_checkpoints_that_changed(void **state)
{
    (void)state;
    uint64_t seed = random_seed();
    ranks r;
    dray_checksums *sums;
    open_ranks(&r, DRAY_BF16, seed);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.mode = DRAY_MODE_DISK;
    options.path = folder;
    for (int i = 0; i < 6; i++) {
        char name[160];
        dray_error said = {0};
        write_checkpoint(seed + (uint64_t)i);
        options.path_version = (uint64_t)i;
        options.strategy = i % 3;
        check_whole(&r, &options, seed + (uint64_t)i);
        corrupt(mix(seed + (uint64_t)i), name, sizeof name);
        assert_int_equal(dray_checksums_of_checkpoint(folder, NULL, &sums, &said), DRAY_ECHECKSUM);
        assert_non_null(strstr(said.message, name));
        assert_int_equal(update(&r, &options, NULL, &said), DRAY_ETORN);
        assert_non_null(strstr(said.message, name));
        assert_non_null(strstr(said.message, folder));
        /* unless nobody wants to know */
        options.verify = -1;
        assert_int_equal(update(&r, &options, NULL, &said), DRAY_OK);
        options.verify = 0;
    }
    close_ranks(&r);
}

int main(int argc, char **argv)
{
#define T(name) cmocka_unit_test_setup_teardown(name, start, stop)
    const struct CMUnitTest tests[] = {
        T(test_updates),
        T(test_checkpoints_written_wrong),
        T(test_checkpoints_that_changed),
    };
    return CLUSTER_MAIN(tests);
}
