/* Tests dray verify, between checkpoints and running sessions, through the program itself. */
#include "suite.h"
#include "weights/cluster.h"

#include <stdint.h>

static dray_model_config config;

static int start(void **state)
{
    cluster_start(state);
    config = small_config(true, 1);
    return 0;
}

static int stop(void **state)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf '%s'/checkpoint-*", f.folder);
    assert_int_equal(system(command), 0);
    return cluster_stop(state);
}

/* Writes a checkpoint of the seed's values; flip: a byte of this tensor is changed. */
static void write_checkpoint(const char *name, uint64_t seed, dray_dtype dtype, const char *flip,
                             char *path, size_t capacity)
{
    dray_layout *full;
    dray_region *region[1];
    MUST(dray_layout_full(&config, dtype, DRAY_REGION_HOST, &full, error));
    MUST(dray_regions_for_layout(full, 1, region, error));
    fill(full, region, config.tied, seed);
    for (uint32_t b = 0; flip && b < dray_layout_block_count(full); b++) {
        const dray_block *block = dray_layout_block(full, b);
        if (strcmp(dray_layout_tensor(full, block->tensor)->name, flip) == 0)
            ((uint8_t *)dray_region_base(region[0]))[block->offset + 5] ^= 4;
    }
    snprintf(path, capacity, "%s/checkpoint-%s", f.folder, name);
    MUST(dray_checkpoint_write(path, full, region, NULL, error));
    dray_region_free(region[0]);
    dray_layout_free(full);
}

/* Runs the program; what it printed as JSON. */
static json_t *verify(const char *a, const char *b, int *status)
{
    char command[1024], out[65536];
    snprintf(command, sizeof command, "'%s' verify '%s' '%s' --json", getenv("DRAY_PROGRAM"), a, b);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    size_t size = fread(out, 1, sizeof out - 1, pipe);
    out[size] = 0;
    *status = WEXITSTATUS(pclose(pipe));
    return json_loads(out, 0, NULL);
}

static void expect_equal(const char *a, const char *b)
{
    int status;
    json_t *said = verify(a, b, &status);
    assert_non_null(said);
    assert_int_equal(json_array_size(json_object_get(said, "differences")), 0);
    assert_true(json_integer_value(json_object_get(said, "tensors")) > 10);
    assert_int_equal(status, 0);
    json_decref(said);
}

/* The first difference. count: how many there must be; 0: any number. */
static void expect_difference(const char *a, const char *b, const char *tensor, const char *what,
                              size_t count)
{
    int status;
    json_t *said = verify(a, b, &status);
    assert_non_null(said);
    const json_t *list = json_object_get(said, "differences");
    const json_t *first = json_array_get(list, 0);
    assert_int_equal(status, 1);
    assert_non_null(first);
    if (count)
        assert_int_equal(json_array_size(list), count);
    if (tensor)
        assert_string_equal(json_string_value(json_object_get(first, "tensor")), tensor);
    assert_string_equal(json_string_value(json_object_get(first, "difference")), what);
    json_decref(said);
}

TEST_WITHIN(test_checkpoints, start, stop)
{
    if (!getenv("DRAY_PROGRAM") || access(getenv("DRAY_PROGRAM"), X_OK) != 0)
        skip();
    const char *flipped = "model.layers.1.mlp.up_proj.weight";
    char a[160], b[160], c[160], d[160];
    write_checkpoint("a", 1, DRAY_F32, NULL, a, sizeof a);
    write_checkpoint("b", 1, DRAY_F32, NULL, b, sizeof b);
    write_checkpoint("c", 1, DRAY_F32, flipped, c, sizeof c);
    write_checkpoint("d", 1, DRAY_BF16, NULL, d, sizeof d);
    expect_equal(a, b);
    expect_difference(a, c, flipped, "content", 1);
    expect_difference(a, d, NULL, "dtype", 0);
    config.layers = 3;
    write_checkpoint("e", 1, DRAY_F32, NULL, b, sizeof b);
    expect_difference(a, b, NULL, "missing", 0);
    config.layers = 2;
    config.intermediate_size += 4;
    write_checkpoint("f", 1, DRAY_F32, NULL, b, sizeof b);
    expect_difference(a, b, NULL, "shape", 0);
    int status;
    assert_null(verify(a, "/nowhere", &status));
    assert_int_equal(status, 1);
    assert_null(verify("unix:/nowhere#m", a, &status));
    assert_int_equal(status, 1);
}

TEST_WITHIN(test_session, start, stop)
{
    if (!getenv("DRAY_PROGRAM") || access(getenv("DRAY_PROGRAM"), X_OK) != 0)
        skip();
    trainer t[3];
    engine e[2];
    char a[160], b[160], model[256], group[256];
    write_checkpoint("a", 7, DRAY_F32, NULL, a, sizeof a);
    write_checkpoint("b", 7, DRAY_F32, "model.norm.weight", b, sizeof b);
    snprintf(model, sizeof model, "%s#%s", f.unix_address, MODEL);
    snprintf(group, sizeof group, "%s#%s@engine", f.unix_address, MODEL);
    for (uint32_t i = 0; i < 3; i++)
        trainer_open(&t[i], f.unix_address, &config, DRAY_F32, i, 3, 7, cluster_kind);
    for (uint32_t i = 0; i < 3; i++)
        MUST(dray_publisher_publish(t[i].publisher, 1, NULL, error));
    expect_equal(a, model);
    expect_difference(model, b, "model.norm.weight", "content", 1);
    int status;
    assert_null(verify(a, group, &status));
    for (uint32_t i = 0; i < 2; i++)
        engine_open(&e[i], f.unix_address, &config, DRAY_F32, DRAY_BF16, "engine", i, 2);
    for (uint32_t i = 0; i < 2; i++)
        MUST(dray_update_start(e[i].subscriber, NULL, error));
    for (int open = 3; open;)
        for (uint32_t i = 0; i < 2; i++)
            if (dray_update_poll(e[i].subscriber, NULL) == DRAY_OK)
                open &= ~(1 << i);
    for (uint32_t i = 0; i < 2; i++)
        MUST(dray_update_finish(e[i].subscriber, NULL, error));
    expect_equal(a, group);
    expect_equal(group, model);
    for (uint32_t i = 0; i < 2; i++)
        engine_close(&e[i]);
    for (uint32_t i = 0; i < 3; i++)
        trainer_close(&t[i]);
}

CLUSTER_SUITE
