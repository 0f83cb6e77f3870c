/* Tests movers with faults. For any piece that is lost, changed, misplaced, misread or refused, in
 * any mode, no group commits wrong bytes, the tensor is named, all ranks are torn, and the next
 * update repairs them. Also tests checkpoints that are written wrong, or changed on disk. */
#include "suite.h"
#include "weights/cluster.h"

#include "mover/mover.h"
#include "seed.h"

#include <fcntl.h>
#include <stdint.h>

enum { TRAINERS = 3, ENGINES = 4 }; /* more ranks than KV heads: replicas */

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

static bool names_a_tensor(const dray_layout *layout, const char *message)
{
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout); t++)
        if (strstr(message, dray_layout_tensor(layout, t)->name))
            return true;
    return false;
}

/* ---- updates --------------------------------------------------------------------------------- */

typedef struct ranks {
    trainer t[TRAINERS];
    engine e[ENGINES];
    uint8_t *right[ENGINES]; /* what their memory must hold; NULL: what the values say */
} ranks;

static void open_ranks(ranks *r, dray_dtype to, uint64_t seed)
{
    memset(r, 0, sizeof *r);
    for (uint32_t i = 0; i < TRAINERS; i++)
        trainer_open(&r->t[i], f.unix_address, &config, DRAY_F32, i, TRAINERS, seed, cluster_kind);
    for (uint32_t i = 0; i < TRAINERS; i++)
        MUST(dray_publisher_publish(r->t[i].publisher, 1, NULL, error));
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
    for (uint32_t i = 0; i < ENGINES; i++) {
        const dray_region *region = r->e[i].region[0];
        if (!r->right[i]) {
            wrong += engine_wrong(&r->e[i], seed);
            continue;
        }
        uint8_t *bytes = memory_open(region);
        wrong += memcmp(bytes, r->right[i], dray_region_bytes(region)) != 0;
        memory_close(r->e[i].region[0], bytes, false);
    }
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
        if (wrong_in_all(r, seed))
            fail_msg("fault %d of piece %" PRIu64 " of %s is not found", (int)p->fault, p->at,
                     p->tensor);
        return false;
    }
    assert_int_equal(rc, DRAY_ETORN);
    if (p->fault == DRAY__FAULT_FAIL)
        assert_non_null(strstr(said.message, "a fault was asked for"));
    else if (r->right[0] ? !names_a_tensor(r->e[0].layout, said.message)
                         : !named(r->e[0].layout, options->strategy != DRAY_STRATEGY_DIRECT, p,
                                  said.message))
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
        int found = 0, tried = 0;
        for (; tried < test_times(6) || (!found && tried < 6); tried++) {
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

static bool one_gpu_fault(ranks *r, const dray_update_options *options, int kind, uint64_t at,
                          uint64_t seed)
{
    dray_error said = {0};
    poison_all(r);
    gpu_fault(kind, at);
    int rc = update(r, options, NULL, &said);
    gpu_fault(0, 0);
    if (rc == DRAY_OK) {
        if (wrong_in_all(r, seed))
            fail_msg("fault %d at %" PRIu64 " is not found", kind, at);
        return false;
    }
    assert_int_equal(rc, DRAY_ETORN);
    if (!names_a_tensor(r->e[0].layout, said.message))
        fail_msg("'%s' names no tensor", said.message);
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
        for (int i = 0; i < test_times(3) || (!found && i < 3); i++)
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

TEST_WITHIN(test_updates, start, stop)
{
    uint64_t seed = test_seed();
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

/* ---- quantised on the way, or made floats of ------------------------------------------------- */

/* Its cells lie in several trainers' memory, and some are two engine ranks'. */
#define SMALL_CELLS cell_config(96, 128, 256, 1, 4, 2)

/* A rank's layout; kind: how it is quantised. */
static dray_layout *cell_layout(int32_t kind, uint32_t rank, uint32_t tp)
{
    dray_model_config c = SMALL_CELLS;
    dray_engine_quant quant = {.size = sizeof quant, .kind = kind, .block = {32, 32}};
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    dray_layout *layout;
    spec.tp = tp;
    spec.tp_rank = rank;
    spec.kind = cluster_kind;
    spec.dtype = DRAY_BF16;
    spec.quant = kind == DRAY_QUANT_NONE ? NULL : &quant;
    MUST(dray_layout_engine(&c, &spec, &layout, error));
    return layout;
}

static void open_engines(ranks *r, int32_t kind)
{
    for (uint32_t i = 0; i < ENGINES; i++) {
        engine *e = &r->e[i];
        char name[32];
        snprintf(name, sizeof name, "engine-%u", i);
        e->context = fixture_open(&f, name, "engine", i);
        e->layout = cell_layout(kind, i, ENGINES);
        MUST(dray_regions_for_layout(e->layout, 1, e->region, error));
        dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
        options.regions = e->region;
        options.group = "engine";
        options.rank = i;
        options.world = ENGINES;
        MUST(dray_subscriber_open(e->context, MODEL, e->layout, &options, &e->subscriber, error));
    }
}

/* Floats that several trainers share; or one that holds all of the model quantised. */
static void open_cells(ranks *r, int32_t kind, bool floats_wanted, uint64_t seed)
{
    memset(r, 0, sizeof *r);
    for (uint32_t i = 0; i < (floats_wanted ? 1 : TRAINERS); i++) {
        trainer *t = &r->t[i];
        char name[32];
        dray_model_config c = SMALL_CELLS;
        dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
        snprintf(name, sizeof name, "trainer-%u", i);
        t->context = fixture_open(&f, name, "trainer", i);
        if (floats_wanted)
            t->layout = cell_layout(kind, 0, 1);
        else
            MUST(dray_layout_fsdp(&c, DRAY_BF16, i, TRAINERS, cluster_kind, &t->layout, error));
        MUST(dray_regions_for_layout(t->layout, 1, t->region, error));
        if (floats_wanted) {
            uint8_t *bytes = memory_open(t->region[0]);
            for (uint64_t k = 0; k < dray_region_bytes(t->region[0]); k++)
                bytes[k] = (uint8_t)(mix(seed + k) & 0x3B); /* neither NaN nor large */
            memory_close(t->region[0], bytes, true);
        } else {
            fill(t->layout, t->region, false, seed);
        }
        options.regions = t->region;
        options.rank = i;
        options.world = floats_wanted ? 1 : TRAINERS;
        MUST(dray_publisher_open(t->context, MODEL, t->layout, &options, &t->publisher, error));
    }
    for (uint32_t i = 0; i < (floats_wanted ? 1 : TRAINERS); i++)
        MUST(dray_publisher_publish(r->t[i].publisher, 1, NULL, error));
    open_engines(r, floats_wanted ? DRAY_QUANT_NONE : kind);
}

/* What is right is what an undisturbed update leaves: other tests know that it is. */
TEST_WITHIN(test_quantised, start, stop)
{
    static const int32_t kinds[] = {DRAY_QUANT_BLOCK, DRAY_QUANT_TENSOR};
    uint64_t seed = test_seed();
    for (int i = 0; i < 4; i++) {
        ranks r;
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        open_cells(&r, kinds[i % 2], i / 2, seed);
        poison_all(&r);
        MUST(update(&r, &options, NULL, error));
        for (uint32_t e = 0; e < ENGINES; e++) {
            uint64_t size = dray_region_bytes(r.e[e].region[0]);
            uint8_t *bytes = memory_open(r.e[e].region[0]);
            r.right[e] = malloc(size);
            memcpy(r.right[e], bytes, size);
            memory_close(r.e[e].region[0], bytes, false);
        }
        if (cluster_kind != DRAY_REGION_CUDA)
            faults_in(&r, &options, seed, seed * 1000 + (uint64_t)i);
        else if (!gpu_is_real())
            gpu_faults_in(&r, &options, seed, seed * 1000 + (uint64_t)i);
        for (uint32_t e = 0; e < ENGINES; e++)
            free(r.right[e]);
        for (uint32_t e = 0; e < ENGINES; e++)
            engine_close(&r.e[e]);
        for (uint32_t t = 0; t < TRAINERS && r.t[t].context; t++)
            trainer_close(&r.t[t]);
    }
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

TEST_WITHIN(test_checkpoints_written_wrong, start, stop)
{
    uint64_t seed = test_seed();
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

TEST_WITHIN(test_checkpoints_that_changed, start, stop)
{
    uint64_t seed = test_seed();
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
        options.no_verify = 1;
        assert_int_equal(update(&r, &options, NULL, &said), DRAY_OK);
        options.no_verify = 0;
    }
    close_ranks(&r);
}

CLUSTER_SUITE
