/* Tests whole checkpoints that are written and read through plans. A failure leaves nothing
 * behind. */
#include "suite.h"
#include "weights/cluster.h"

#include <dirent.h>
#include <stdint.h>
#include <sys/stat.h>

static char folder[128], path[160];
static dray_model_config config;

FIXTURE(start)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%.64s/dray-test-XXXXXX", tmp ? tmp : "/tmp");
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/checkpoint", folder);
    config = small_config(false, 3);
    return 0;
}

FIXTURE(stop)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

static int count_files(void)
{
    int count = 0;
    DIR *open = opendir(path);
    for (struct dirent *entry; open && (entry = readdir(open));)
        count += entry->d_name[0] != '.';
    if (open)
        closedir(open);
    return count;
}

static int write_full(uint64_t seed, const char *config_json, dray_error *said)
{
    dray_layout *layout;
    dray_region *region;
    MUST(dray_layout_full(&config, DRAY_F32, DRAY_REGION_HOST, &layout, error));
    MUST(dray_regions_for_layout(layout, 1, &region, error));
    fill(layout, &region, false, seed);
    int rc = dray_checkpoint_write(path, layout, &region, config_json, said);
    dray_region_free(region);
    dray_layout_free(layout);
    return rc;
}

/* Reads into this layout, which it frees; how many elements are wrong. */
static uint64_t read_wrong(dray_layout *layout, uint64_t seed)
{
    dray_region *region;
    MUST(dray_regions_for_layout(layout, 1, &region, error));
    poison(layout, &region);
    MUST(dray_checkpoint_read(path, layout, &region, error));
    uint64_t wrong = wrong_elements(layout, &region, false, seed, DRAY_F32);
    dray_region_free(region);
    dray_layout_free(layout);
    return wrong;
}

TEST_WITHIN(test_round_trip, start, stop)
{
    MUST(write_full(1, "{\"model_type\":\"qwen2\"}", error));
    MUST(write_full(2, "{\"model_type\":\"qwen2\"}", error)); /* over the first one */
    for (uint32_t rank = 0; rank < 4; rank++) {
        dray_layout *layout;
        dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
        MUST(dray_layout_fsdp(&config, rank % 2 ? DRAY_F32 : DRAY_BF16, rank, 4, DRAY_REGION_HOST,
                              &layout, error));
        assert_int_equal(read_wrong(layout, 2), 0);
        spec.tp = 4;
        spec.tp_rank = rank;
        spec.dtype = rank % 2 ? DRAY_BF16 : DRAY_F32;
        MUST(dray_layout_engine(&config, &spec, &layout, error));
        assert_int_equal(read_wrong(layout, 2), 0);
    }
    struct stat st;
    char file[192];
    snprintf(file, sizeof file, "%s/config.json", path);
    assert_int_equal(stat(file, &st), 0);
    assert_int_equal(count_files(), 2);
}

TEST_WITHIN(test_a_part_is_no_checkpoint, start, stop)
{
    MUST(write_full(1, NULL, error));
    dray_layout *layout;
    dray_region *region;
    dray_error said;
    MUST(dray_layout_fsdp(&config, DRAY_F32, 0, 2, DRAY_REGION_HOST, &layout, error));
    MUST(dray_regions_for_layout(layout, 1, &region, error));
    assert_int_equal(dray_checkpoint_write(path, layout, &region, NULL, &said), DRAY_EHOLE);
    dray_region_free(region);
    dray_layout_free(layout);
    assert_int_equal(count_files(), 1); /* the old one, and nothing half written */
    MUST(dray_layout_full(&config, DRAY_F32, DRAY_REGION_HOST, &layout, error));
    assert_int_equal(read_wrong(layout, 1), 0);
}

TEST_WITHIN(test_wrong_models, start, stop)
{
    dray_error said;
    dray_layout *layout;
    dray_region *region;
    MUST(write_full(1, NULL, error));
    config.layers = 3;
    MUST(dray_layout_full(&config, DRAY_F32, DRAY_REGION_HOST, &layout, error));
    MUST(dray_regions_for_layout(layout, 1, &region, error));
    assert_int_equal(dray_checkpoint_read(path, layout, &region, &said), DRAY_EHOLE);
    assert_non_null(strstr(said.message, "layers.2"));
    assert_int_equal(dray_checkpoint_read("/nowhere", layout, &region, &said), DRAY_ENOENT);
    assert_int_equal(dray_checkpoint_read(path, layout, NULL, &said), DRAY_EINVALID);
    dray_region *none = NULL;
    assert_int_equal(dray_checkpoint_read(path, layout, &none, &said), DRAY_EINVALID);
    assert_int_equal(dray_checkpoint_read(NULL, layout, &region, &said), DRAY_EINVALID);
    dray_region_free(region);
    dray_layout_free(layout);
}

/* Sums of a checkpoint's files equal those of the memory it was written from, however it is cut. */
TEST_WITHIN(test_checksums_of_files_and_shards, start, stop)
{
    MUST(write_full(4, NULL, error));
    dray_layout *files;
    dray_checksums *of_files;
    dray_region *region[1];
    MUST(dray_layout_safetensors(path, &files, error));
    MUST(dray_regions_for_layout(files, 0, region, error));
    MUST(dray_checksums_compute(files, region, &of_files, error));
    dray__sums total = {0};
    for (uint32_t rank = 0; rank < 3; rank++) {
        dray_layout *layout;
        dray_region *part[1];
        dray_checksums *of_part;
        MUST(dray_layout_fsdp(&config, DRAY_F32, rank, 3, DRAY_REGION_HOST, &layout, error));
        MUST(dray_regions_for_layout(layout, 1, part, error));
        fill(layout, part, false, 4);
        MUST(dray_checksums_compute(layout, part, &of_part, error));
        for (uint32_t i = 0; i < dray_checksums_count(of_part); i++) {
            const char *name;
            int32_t dtype;
            uint64_t elements, sum;
            MUST(dray_checksums_entry(of_part, i, &name, &dtype, &elements, &sum, error));
            assert_true(dray__sums_add(&total, name, dtype, elements, sum));
        }
        dray_checksums_free(of_part);
        dray_region_free(part[0]);
        dray_layout_free(layout);
    }
    assert_int_equal(dray_checksums_count(of_files), total.count);
    for (uint32_t i = 0; i < total.count; i++) {
        const char *name;
        int32_t dtype;
        uint64_t elements, sum;
        MUST(dray_checksums_entry(of_files, i, &name, &dtype, &elements, &sum, error));
        const dray__named_sum *part = dray__sums_find(&total, name);
        assert_non_null(part);
        assert_true(part->sum == sum && part->elements == elements && part->dtype == dtype);
    }
    assert_int_equal(dray_checksums_entry(of_files, total.count, NULL, NULL, NULL, NULL, NULL),
                     DRAY_EINVALID);
    dray__sums_free(&total);
    dray_checksums_free(of_files);
    dray_region_free(region[0]);
    dray_layout_free(files);
}

SUITE(NULL, NULL)
