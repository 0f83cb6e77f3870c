/* Tests whether a claimed layout is true, for engines of every kind of storage that loaded a
 * checkpoint, and for one that shuffled a tensor. */
#include "suite.h"
#include "weights/cluster.h"

#include <stdint.h>

static char folder[64];
static dray_model_config config;

FIXTURE(write_checkpoint)
{
    dray_layout *full;
    dray_region *region[1];
    config = small_config(true, 1);
    config.dtype = DRAY_BF16;
    snprintf(folder, sizeof folder, "/tmp/dray-prove-XXXXXX");
    if (!mkdtemp(folder))
        return -1;
    MUST(dray_layout_full(&config, DRAY_DTYPE_NONE, DRAY_REGION_HOST, &full, error));
    MUST(dray_regions_for_layout(full, 1, region, error));
    fill(full, region, true, 5);
    MUST(dray_checkpoint_write(folder, full, region, NULL, error));
    dray_region_free(region[0]);
    dray_layout_free(full);
    return 0;
}

FIXTURE(remove_checkpoint)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

typedef struct seen {
    const dray_layout *layout;
    uint32_t blocks;
    uint64_t elements;
    const char *tensor;
} seen;

static void differs(void *user, uint32_t block, uint64_t elements)
{
    seen *s = user;
    s->blocks++;
    s->elements += elements;
    s->tensor = dray_layout_tensor(s->layout, dray_layout_block(s->layout, block)->tensor)->name;
}

TEST(engines_that_say_the_truth)
{
    static const char *const specs[] = {"engine:tp=2", "engine:tp=2,transposed=1,dtype=f32",
                                        "fsdp1:3", "full"};
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        dray_layout **all;
        uint32_t count;
        MUST(dray_layouts_from_spec(&config, specs[i], &all, &count, error));
        for (uint32_t r = 0; r < count; r++) {
            dray_region *region[1];
            seen s = {.layout = all[r]};
            MUST(dray_regions_for_layout(all[r], 1, region, error));
            fill_from(all[r], region, true, 5, DRAY_BF16);
            MUST(dray_layout_prove(all[r], region, folder, differs, &s, error));
            assert_int_equal(s.blocks, 0);
            dray_region_free(region[0]);
            dray_layout_free(all[r]);
        }
        free(all);
    }
}

/* Two rows of k_proj within qkv_proj change places, as a kernel's own order would have it. */
TEST(one_that_shuffled_a_tensor)
{
    const char *name = "model.layers.1.self_attn.k_proj.weight";
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    dray_layout *layout;
    dray_region *region[1];
    dray_error e = {0};
    uint32_t tensor;
    spec.tp = 2;
    spec.tp_rank = 1;
    MUST(dray_layout_engine(&config, &spec, &layout, error));
    MUST(dray_regions_for_layout(layout, 1, region, error));
    fill(layout, region, true, 5);
    MUST(dray_layout_find(layout, name, &tensor, error));
    for (uint32_t b = 0; b < dray_layout_block_count(layout); b++) {
        const dray_block *block = dray_layout_block(layout, b);
        uint8_t *at = (uint8_t *)dray_region_base(region[0]) + block->offset, row[96];
        if (block->tensor != tensor)
            continue;
        assert_int_equal(block->stride[0], sizeof row);
        memcpy(row, at, sizeof row);
        memcpy(at, at + sizeof row, sizeof row);
        memcpy(at + sizeof row, row, sizeof row);
    }
    seen s = {.layout = layout};
    assert_int_equal(dray_layout_prove(layout, region, folder, differs, &s, &e), DRAY_ECHECKSUM);
    assert_int_equal(s.blocks, 1);
    assert_true(s.elements > 90 && s.elements <= 96);
    assert_string_equal(s.tensor, name);
    assert_non_null(strstr(e.message, name));
    assert_int_equal(dray_layout_prove(layout, region, "/nowhere", NULL, NULL, &e), DRAY_ENOENT);
    dray_region_free(region[0]);
    dray_layout_free(layout);
}

/* One bit of one element is enough. */
TEST(one_that_changed_an_element)
{
    dray_layout **all;
    uint32_t count;
    dray_region *region[1];
    MUST(dray_layouts_from_spec(&config, "full", &all, &count, error));
    seen s = {.layout = all[0]};
    MUST(dray_regions_for_layout(all[0], 1, region, error));
    fill_from(all[0], region, true, 5, DRAY_BF16);
    const dray_block *block = dray_layout_block(all[0], 2);
    ((uint8_t *)dray_region_base(region[0]))[block->offset] ^= 1;
    assert_int_equal(dray_layout_prove(all[0], region, folder, differs, &s, NULL), DRAY_ECHECKSUM);
    assert_int_equal(s.blocks, 1);
    assert_int_equal(s.elements, 1);
    dray_region_free(region[0]);
    for (uint32_t i = 0; i < count; i++)
        dray_layout_free(all[i]);
    free(all);
}

SUITE(write_checkpoint, remove_checkpoint)
