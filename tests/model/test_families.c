/* Tests families that users write: a file in the folder that DRAY_FAMILIES names, and refused
 * files. test_families_transformers.py compares the built-in families with transformers. */
#include "suite.h"

#include <dray/model.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char folder[64];
static int made; /* each file has a name of its own: files are read once */

#define SIZES                                                                                      \
    "\"vocab_size\": 10, \"hidden_size\": 8, \"intermediate_size\": 6, "                           \
    "\"num_hidden_layers\": 2, \"num_attention_heads\": 2"

static void write_file(const char *name, const char *text)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void remove_file(const char *name)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    assert_int_equal(unlink(path), 0);
}

/* Loads a config.json of a family that has this file, with more keys. */
static int load(const char *family, const char *more, dray_model_config *out, dray_error *error)
{
    char name[32], file[48], config[512];
    snprintf(name, sizeof name, "mine%d", made++);
    snprintf(file, sizeof file, "%s.json", name);
    snprintf(config, sizeof config, "{\"model_type\": \"%s\", %s%s}", name, SIZES, more);
    write_file(file, family);
    write_file("config.json", config);
    setenv("DRAY_FAMILIES", folder, 1);
    char path[128];
    snprintf(path, sizeof path, "%s/config.json", folder);
    int status = dray_model_config_load(path, out, error);
    remove_file(file);
    remove_file("config.json");
    return status;
}

static const int64_t *shape_of(const dray_layout *layout, const char *name)
{
    uint32_t index;
    return dray_layout_find(layout, name, &index, NULL) ? NULL
                                                        : dray_layout_tensor(layout, index)->shape;
}

TEST(a_family_of_ones_own)
{
    dray_model_config c;
    dray_layout *layout;
    dray_error e = {0};
    int status =
        load("{\"like\": \"llama\", \"prefix\": \"net.\", \"config\": {\"head_dim\": 3, "
             "\"gates\": {\"key\": [\"num_gates\", \"n_gates\"], \"default\": 2}, "
             "\"towers\": {\"key\": \"a.towers\", \"list\": true}}, "
             "\"kinds\": {\"odd\": {\"each\": \"types\", \"is\": \"odd\"}}, \"rows\": "
             "[\"embedding\", "
             "{\"name\": \"tower.*.weight\", \"shape\": [5, 1, 2, \"gates\"], \"each\": "
             "\"towers\"}, "
             "{\"name\": \"@layers.*.gate\", \"shape\": [\"(gates - 1) * heads\"], \"layers\": "
             "\"odd\"}, {\"name\": \"@layers.*.even\", \"shape\": [\"hidden_size / heads + 1\"], "
             "\"layers\": \"!odd\", \"when\": \"!qkv_bias\"}, \"head\"]}",
             ", \"n_gates\": 4, \"a\": {\"towers\": [1, 2, 3]}, \"types\": [\"even\", \"odd\"], "
             "\"tie_word_embeddings\": true",
             &c, &e);
    if (status)
        fail_msg("%s", e.message);
    assert_int_equal(dray_layout_full(&c, DRAY_F32, DRAY_REGION_HOST, &layout, NULL), DRAY_OK);
    assert_int_equal(dray_layout_tensor_count(layout), 8);
    assert_int_equal(shape_of(layout, "tower.2.weight")[3], 4);
    assert_int_equal(shape_of(layout, "tower.0.weight")[0], 5);
    assert_null(shape_of(layout, "net.layers.0.gate"));
    assert_int_equal(shape_of(layout, "net.layers.1.gate")[0], 6);
    assert_int_equal(shape_of(layout, "net.layers.0.even")[0], 5);
    assert_null(shape_of(layout, "net.layers.1.even"));
    uint32_t head, embedding;
    assert_int_equal(dray_layout_find(layout, "lm_head.weight", &head, NULL), 0);
    assert_int_equal(dray_layout_find(layout, "net.embed_tokens.weight", &embedding, NULL), 0);
    assert_int_equal(dray_layout_tensor(layout, head)->alias_of, embedding);
    dray_layout_free(layout);
}

#define SIGNED                                                                                     \
    "{\"like\": \"llama\", "                                                                       \
    "\"kinds\": "                                                                                  \
    "{\"far\": {\"each\": \"types\", \"is\": \"far\", \"signs\": \"ratios\", \"sign\": \"128\"}, " \
    "\"early\": {\"each\": \"types\", \"is\": \"early\", \"first\": \"n_early\", \"default\": "    \
    "1}}, "                                                                                        \
    "\"rows\": [\"embedding\", {\"name\": \"@layers.*.far\", \"shape\": [1], \"layers\": "         \
    "\"far\"}, "                                                                                   \
    "{\"name\": \"@layers.*.early\", \"shape\": [1], \"layers\": \"early\"}, \"head\"]}"

TEST(kinds_by_numbers_and_of_the_first_layers)
{
    static const struct {
        const char *config;
        const char *there[2], *refused; /* there: besides embedding, norm and head */
    } cases[] = {
        {", \"ratios\": [4, 128]", {"model.layers.1.far", "model.layers.0.early"}, NULL},
        {", \"ratios\": [128, 4, 128], \"n_early\": 0", {"model.layers.0.far"}, NULL},
        {", \"n_early\": 9", {"model.layers.0.early", "model.layers.1.early"}, NULL},
        {", \"types\": [\"early\", \"far\"], \"ratios\": [128, 0], \"n_early\": 9",
         {"model.layers.0.early", "model.layers.1.far"},
         NULL},
        {", \"ratios\": [4]", {0}, "ratios: expected one for each of 2 layers, found 1"},
        {", \"ratios\": [4, \"128\"]", {0}, "a list of integers"},
        {", \"ratios\": 4", {0}, "a string"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        dray_model_config c;
        dray_layout *layout;
        dray_error e = {0};
        int status = load(SIGNED, cases[i].config, &c, &e);
        if (cases[i].refused) {
            if (!status || !strstr(e.message, cases[i].refused))
                fail_msg("case %zu: '%s' expected, found '%s'", i, cases[i].refused, e.message);
            continue;
        }
        if (status)
            fail_msg("case %zu: %s", i, e.message);
        assert_int_equal(dray_layout_full(&c, DRAY_F32, DRAY_REGION_HOST, &layout, NULL), DRAY_OK);
        uint32_t there = 0;
        for (uint32_t k = 0; k < 2 && cases[i].there[k]; k++, there++)
            assert_non_null(shape_of(layout, cases[i].there[k]));
        assert_int_equal(dray_layout_tensor_count(layout), 3 + there);
        dray_layout_free(layout);
    }
}

TEST(builders_that_do_not_know_a_family_say_so)
{
    dray_model_config c;
    dray_layout *layout = NULL;
    dray_error e;
    dray_engine_spec engine = DRAY_ENGINE_SPEC_INIT;
    dray_megatron_spec megatron = DRAY_MEGATRON_SPEC_INIT;
    dray_fsdp1_spec fsdp1 = DRAY_FSDP1_SPEC_INIT;
    fsdp1.world = 2;
    assert_int_equal(load("{\"rows\": [\"embedding\", {\"name\": \"t.*\", \"shape\": [2], "
                          "\"each\": \"3\"}, \"norms\", \"head\"]}",
                          "", &c, &e),
                     DRAY_OK);
    assert_int_equal(dray_layout_engine(&c, &engine, &layout, &e), DRAY_EUNSUPPORTED);
    assert_non_null(strstr(e.message, "dray.weights.record()"));
    assert_int_equal(dray_layout_megatron(&c, &megatron, &layout, &e), DRAY_EUNSUPPORTED);
    assert_non_null(strstr(e.message, "Megatron-Core"));
    assert_int_equal(dray_layout_fsdp1(&c, &fsdp1, &layout, &e), DRAY_EUNSUPPORTED);
    assert_non_null(strstr(e.message, "t.0"));
    assert_null(layout);
}

#define ROWS(rows) "{\"rows\": [" rows "]}"
#define ROW(rest) ROWS("{\"name\": \"a.*\", " rest "}")

TEST(bad_files_are_refused)
{
    static const struct {
        const char *family;
        const char *says[3];
    } bad[] = {
        {"[]", {"expected an object"}},
        {"{", {"line 1"}},
        {"{}", {"rows", "expected a list of rows", "found nothing"}},
        {"{\"row\": []}", {"did you mean 'rows'", "found 'row'"}},
        {"{\"like\": 3}", {"like"}},
        {"{\"like\": \"lama\"}", {"did you mean 'llama'"}},
        {"{\"like\": \"parts\"}", {"model_type 'parts'"}},
        {"{\"like\": \"../llama\"}", {"model_type '../llama'"}},
        {ROWS("3"), {"rows: expected a row", "found 3"}},
        {ROWS("\"attentoin\""), {"the name of a part", "attentoin"}},
        {ROW("\"shape\": []"), {"a.*", "1 to 4 sizes", "found []"}},
        {ROW("\"shape\": [1, 1, 1, 1, 1]"), {"1 to 4 sizes"}},
        {ROW("\"shape\": [\"hidden\"]"), {"a.*", "found 'hidden'", "arithmetic"}},
        {ROW("\"shape\": [\"2 * (heads\"]"), {"arithmetic", "2 * (heads"}},
        {ROW("\"shape\": [\"heads heads\"]"), {"arithmetic"}},
        {ROW("\"shape\": [\"heads -\"]"), {"arithmetic"}},
        {ROW("\"shape\": [\"01\"]"), {"arithmetic"}},
        {ROW("\"shape\": [\"1+1+1+1+1+1+1+1+1+1+1\"]"), {"arithmetic"}},
        {ROW("\"shape\": [\"((((((((((((((((((1))))))))))))))))))\"]"), {"arithmetic"}},
        {ROW("\"shape\": [\"hidden_size / 3\"]"), {"a.*", "8 is not a multiple of 3"}},
        {ROW("\"shape\": [\"hidden_size - 8\"]"), {"a.*", "hidden_size - 8 is 0"}},
        {ROW("\"shape\": [\"1000000000000 * 1000000000000 \"]"), {"arithmetic"}},
        {ROW("\"shape\": [\"4000000000 * 4000000000 * 4000000000\"]"), {"too large"}},
        {ROW("\"shape\": [\"4000000 * 4000000\"]"), {"expected 1 to"}},
        {ROW("\"shape\": [1], \"each\": \"0 - 1\""), {"0 - 1 is -1"}},
        {ROW("\"shape\": [1], \"each\": \"100000\""), {"expected 0 to 65536"}},
        {ROWS("{\"name\": "
              "\"@12345678901234567890123456789012345678901234567890123456789012345678901234"
              "5678901234567890\", \"shape\": [1]}"),
         {"a text of at most 95 bytes with its prefix"}},
        {ROW("\"shape\": [1], \"cut\": \"rows\""), {"a.*: cut", "did you mean 'row'"}},
        {ROW("\"shape\": [1], \"cut\": \"row\""), {"a.*", "two sizes"}},
        {ROW("\"shape\": [1], \"layers\": \"odd\""), {"a.*: layers", "found 'odd'"}},
        {ROW("\"shape\": [1], \"dtype\": \"F33\""), {"a.*", "a dtype"}},
        {ROW("\"shape\": [1], \"fuse\": \"b\""), {"did you mean 'fused'"}},
        {ROW("\"shape\": [1], \"fused\": \"b\""), {"a.*", "'*' for the layer"}},
        {ROW("\"shape\": [1], \"tied\": \"b\""), {"a.*", "a tie to a row", "'b'"}},
        {ROW("\"shape\": [1], \"when\": 3.5"), {"a.*", "3.5"}},
        {ROWS("{\"name\": \"a\", \"shape\": [1], \"layers\": \"moe\"}"), {"a '*' for the layer"}},
        {ROWS("{\"name\": \"a.*.*\", \"shape\": [1]}"), {"another for the expert"}},
        {ROWS("{\"name\": \"a.*\", \"shape\": [1]}, {\"name\": \"b\", \"shape\": [1]}, {\"name\": "
              "\"c.*\", \"shape\": [1]}"),
         {"c.*", "side by side", "'b'"}},
        {"{\"rows\": [\"embedding\"], \"config\": {\"a\": \"b\", \"b\": \"a\"}}",
         {"config", "need themselves", "'a'"}},
        {"{\"rows\": [\"embedding\"], \"config\": {\"Heads\": 1}}", {"config", "'Heads'"}},
        {"{\"rows\": [\"embedding\"], \"config\": {\"a\": {\"kee\": 1}}}",
         {"config: a", "did you mean 'key'"}},
        {"{\"rows\": [\"embedding\"], \"config\": {\"a\": {\"default\": 1}}}",
         {"config: a", "expected a text", "found nothing"}},
        {"{\"rows\": [\"embedding\"], \"config\": {\"a\": {\"key\": [\"b\", \"c\", \"d\", "
         "\"e\"]}}}",
         {"config: a", "at most 3 keys"}},
        {"{\"rows\": [\"embedding\"], \"config\": []}", {"config: expected an object"}},
        {"{\"rows\": [\"embedding\"], \"kinds\": {\"x\": {\"each\": \"a\"}}}",
         {"kinds: x", "each and is"}},
        {"{\"rows\": [\"embedding\"], \"engine\": 1}", {"engine: expected true or false, found 1"}},
        {"{\"rows\": [{\"name\": \"c\", \"shape\": [1, 1, 1]}], \"engine\": true}",
         {"engine", "more than two sizes", "'c'"}},
        {"{\"rows\": [\"embedding\"], \"modules\": {\"a\": []}}",
         {"modules", "one or two tensors"}},
        {"{\"rows\": [\"embedding\"], \"refuse\": 1}", {"refuse: expected a list"}},
        {"{\"rows\": [\"embedding\"], \"rope_theta\": \"x\"}", {"rope_theta: expected a number"}},
        {"{\"rows\": [\"embedding\"], \"rows\": []}", {"duplicate"}},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dray_model_config c, before;
        dray_error e = {0};
        memset(&c, 0x5a, sizeof c);
        before = c;
        int status = load(bad[i].family, "", &c, &e);
        bool same = memcmp(&c, &before, sizeof c) == 0;
        for (size_t k = 0; k < 3; k++)
            if (!status || !same || (bad[i].says[k] && !strstr(e.message, bad[i].says[k])))
                fail_msg("case %zu, %s: %s '%s'%s", i, bad[i].family, dray_error_name(status),
                         e.message, same ? "" : ", and the configuration changed");
        if (status == DRAY_EFORMAT && !strstr(e.message, ".json"))
            fail_msg("case %zu: '%s' names no file", i, e.message);
    }
}

TEST(a_refused_file_is_read_again)
{
    dray_model_config c;
    dray_error e;
    made = 900;
    assert_int_equal(load("{\"rows\": 3}", "", &c, &e), DRAY_EFORMAT);
    made = 900;
    assert_int_equal(load("{\"rows\": [\"embedding\"]}", "", &c, &e), DRAY_OK);
}

FIXTURE(make_folder)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/dray-families-XXXXXX",
             tmp && strlen(tmp) < 30 ? tmp : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

FIXTURE(remove_folder)
{
    unsetenv("DRAY_FAMILIES");
    return rmdir(folder);
}

SUITE(make_folder, remove_folder)
