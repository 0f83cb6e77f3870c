/* Tests malformed safetensors files and indexes, the writer's guards, and SPEC strings. */
#include "base/random.h"
#include "seed.h"
#include "suite.h"
#include <dray/model.h>

#include <endian.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static char folder[80];
static uint64_t seed;

static const char *path_of(const char *name)
{
    static char paths[8][256];
    static unsigned turn;
    char *path = paths[turn++ % 8];
    snprintf(path, 256, "%s/%s", folder, name);
    return path;
}

static void write_bytes(const char *name, const void *data, size_t size)
{
    FILE *f = fopen(path_of(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, size, f), size);
    assert_int_equal(fclose(f), 0);
}

/* A file with this header and so many bytes of data. */
static void write_tensors(const char *name, const char *header, size_t data)
{
    size_t length = strlen(header);
    uint8_t *all = calloc(1, 8 + length + data);
    uint64_t le = htole64(length);
    memcpy(all, &le, 8);
    memcpy(all + 8, header, length);
    write_bytes(name, all, 8 + length + data);
    free(all);
}

static void expect(const char *what, const char *path, int code, const char *says)
{
    dray_layout *l = NULL;
    dray_error e = {0};
    int status = dray_layout_safetensors(path, &l, &e);
    if (status != code || (says && !strstr(e.message, says)))
        fail_msg("%s: %s '%s', expected %s '%s'", what, dray_error_name(status), e.message,
                 dray_error_name(code), says ? says : "");
    dray_layout_free(l);
}

#define T(shape, offsets) "{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

TEST(malformed_files)
{
    static const struct {
        const char *header;
        size_t data;
        int code;
        const char *says;
    } bad[] = {
        {"{}", 0, DRAY_OK, NULL},
        {"{\"a\":" T("[2]", "[0,8]") "}   ", 8, DRAY_OK, NULL},
        {"{\"__metadata__\":{\"x\":\"y\"},\"a\":" T("[]", "[0,4]") "}", 4, DRAY_OK, NULL},
        {"{\"a\":" T("[0]", "[0,0]") ",\"b\":" T("[1]", "[0,4]") "}", 4, DRAY_OK, NULL},
        {"", 0, DRAY_EFORMAT, "does not begin with '{'"},
        {" {}", 0, DRAY_EFORMAT, "does not begin with '{'"},
        {"[]", 0, DRAY_EFORMAT, "does not begin with '{'"},
        {"{", 0, DRAY_EFORMAT, "line 1"},
        {"{}x", 0, DRAY_EFORMAT, "line 1"},
        {"{\"a\xff\":1}", 0, DRAY_EFORMAT, "line 1"},
        {"{\"a\":1}", 0, DRAY_EFORMAT, "tensor a: expected an object"},
        {"{\"a\":" T("[1]", "[0,4]") ",\"a\":" T("[1]", "[4,8]") "}", 8, DRAY_EFORMAT, "duplicate"},
        {"{\"__metadata__\":3}", 0, DRAY_EFORMAT, "__metadata__: expected an object"},
        {"{\"__metadata__\":{\"k\":3}}", 0, DRAY_EFORMAT, "k is not a string"},
        {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, DRAY_EFORMAT, "dtype: expected"},
        {"{\"a\":{\"dtype\":3,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, DRAY_EFORMAT, "dtype"},
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, DRAY_EUNSUPPORTED,
         "unknown dtype 'F4'"},
        {"{\"a\":{\"dtype\":\"float32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
         DRAY_EUNSUPPORTED, "unknown dtype 'float32'"},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, DRAY_EFORMAT, "shape: expected"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, DRAY_EFORMAT, "data_offsets: expected"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"z\":1}}", 4,
         DRAY_EFORMAT, "unknown key 'z'"},
        {"{\"a\":" T("3", "[0,4]") "}", 4, DRAY_EFORMAT, "shape: expected"},
        {"{\"a\":" T("[1.0]", "[0,4]") "}", 4, DRAY_EFORMAT, "shape: expected"},
        {"{\"a\":" T("[-1]", "[0,4]") "}", 4, DRAY_EFORMAT, "shape: expected"},
        {"{\"a\":" T("[true]", "[0,4]") "}", 4, DRAY_EFORMAT, "shape: expected"},
        {"{\"a\":" T("[1,1,1,1,1]", "[0,4]") "}", 4, DRAY_OK, NULL},
        {"{\"a\":" T("[1,1,1,2,3,1,1,2]", "[0,48]") "}", 48, DRAY_OK, NULL},
        {"{\"a\":" T("[1,1,1,2,3]", "[0,4]") "}", 4, DRAY_EFORMAT, "its shape and dtype need 24"},
        {"{\"a\":" T("[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, DRAY_EUNSUPPORTED,
         "tensor a: 9 dimensions"},
        {"{\"a\":" T("[1,1,1,4611686018427387904,4]", "[0,4]") "}", 4, DRAY_EFORMAT, "overflow"},
        {"{\"a\":" T("[9223372036854775807,9]", "[0,4]") "}", 4, DRAY_EFORMAT, "overflow"},
        {"{\"a\":" T("[9223372036854775807,0,9]", "[0,0]") "}", 0, DRAY_EFORMAT, "overflow"},
        {"{\"a\":" T("[99999999999999999999]", "[0,4]") "}", 4, DRAY_EFORMAT, "line 1"},
        {"{\"a\":" T("[1]", "[0]") "}", 4, DRAY_EFORMAT, "data_offsets: expected"},
        {"{\"a\":" T("[1]", "[0,4,8]") "}", 4, DRAY_EFORMAT, "data_offsets: expected"},
        {"{\"a\":" T("[1]", "[-4,0]") "}", 4, DRAY_EFORMAT, "data_offsets: expected"},
        {"{\"a\":" T("[1]", "[4,0]") "}", 4, DRAY_EFORMAT, "outside the file"},
        {"{\"a\":" T("[2]", "[0,8]") "}", 4, DRAY_EFORMAT, "outside the file"},
        {"{\"a\":" T("[1]", "[9223372036854775800,9223372036854775804]") "}", 4, DRAY_EFORMAT,
         "outside the file"},
        {"{\"a\":" T("[1]", "[0,8]") "}", 8, DRAY_EFORMAT,
         "span 8 bytes, its shape and dtype need 4"},
        {"{\"a\":" T("[1]", "[4,8]") "}", 8, DRAY_EFORMAT, "after a hole"},
        {"{\"a\":" T("[1]", "[0,4]") ",\"b\":" T("[1]", "[8,12]") "}", 12, DRAY_EFORMAT,
         "after a hole"},
        {"{\"a\":" T("[2]", "[0,8]") ",\"b\":" T("[2]", "[4,12]") "}", 12, DRAY_EFORMAT,
         "tensor b begins"},
        {"{\"a\":" T("[2]", "[0,8]") ",\"b\":" T("[2]", "[0,8]") "}", 8, DRAY_EFORMAT,
         "inside the one that ends"},
        {"{\"a\":" T("[2]", "[0,8]") ",\"b\":" T("[0]", "[4,4]") "}", 8, DRAY_EFORMAT,
         "inside the one that ends"},
        {"{\"a\":" T("[1]", "[0,4]") "}", 5, DRAY_EFORMAT, "its tensors end at"},
        {"{}", 1, DRAY_EFORMAT, "its tensors end at"},
        {"{\"\":" T("[1]", "[0,4]") "}", 4, DRAY_EINVALID, "needs a name"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_tensors("t.safetensors", bad[i].header, bad[i].data);
        expect(bad[i].header, path_of("t.safetensors"), bad[i].code, bad[i].says);
    }
    write_bytes("t.safetensors", "\x01\0\0\0\0\0\0", 7);
    expect("7 bytes", path_of("t.safetensors"), DRAY_EFORMAT, "too short");
    write_bytes("t.safetensors", "\x03\0\0\0\0\0\0\0{}", 10);
    expect("long", path_of("t.safetensors"), DRAY_EFORMAT, "exceeds the file");
    write_bytes("t.safetensors", "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10);
    expect("huge", path_of("t.safetensors"), DRAY_EFORMAT, "exceeds the file");
    assert_int_equal(truncate(path_of("t.safetensors"), 200000000), 0);
    FILE *f = fopen(path_of("t.safetensors"), "r+b");
    uint64_t le = htole64(100000001);
    assert_int_equal(fwrite(&le, 8, 1, f), 1);
    fclose(f);
    expect("100 MB", path_of("t.safetensors"), DRAY_EFORMAT, "exceeds the format's limit");
    unlink(path_of("t.safetensors"));
    assert_int_equal(mkfifo(path_of("t.safetensors"), 0600), 0);
    expect("fifo", path_of("t.safetensors"), DRAY_EFORMAT, "not a regular file");
    unlink(path_of("t.safetensors"));
    expect("missing", path_of("t.safetensors"), DRAY_ENOENT, "no such file");
}

/* Any bytes: refused or accepted, never a crash (sanitizers watch). */
TEST(mutated_files)
{
    static const char header[] = "{\"__metadata__\":{\"format\":\"pt\"},\"a.weight\":" T(
        "[2,3]", "[0,24]") ",\"b\":" T("[0,5]", "[24,24]") ",\"c\":" T("[]", "[24,28]") "}";
    enum { DATA = 28 };
    uint8_t all[8 + sizeof header - 1 + DATA], copy[sizeof all];
    uint64_t le = htole64(sizeof header - 1), draws = 0, accepted = 0;
    memset(all, 0, sizeof all);
    memcpy(all, &le, 8);
    memcpy(all + 8, header, sizeof header - 1);
    long rounds = test_times(3000);
    for (long i = 0; i < rounds; i++) {
        memcpy(copy, all, sizeof all);
        for (uint64_t n = 1 + dray__random_u64(seed, 1, draws++) % 3; n > 0; n--) {
            static const char odd[] = "0123456789[]{},:\"-\\ ex\xff";
            uint64_t r = dray__random_u64(seed, 2, draws++);
            size_t at = r % 8 ? 8 + (r >> 8) % (sizeof header - 1) : (r >> 8) % 8;
            copy[at] = (uint8_t)odd[(r >> 40) % (sizeof odd - 1)];
        }
        size_t size = sizeof copy;
        if (dray__random_u64(seed, 3, draws++) % 6 == 0)
            size = dray__random_u64(seed, 4, draws) % sizeof copy;
        write_bytes("m.safetensors", copy, size);
        dray_layout *l = NULL;
        if (dray_layout_safetensors(path_of("m.safetensors"), &l, NULL) == DRAY_OK) {
            assert_int_equal(dray_layout_bytes(l), DATA);
            accepted++;
        }
        dray_layout_free(l);
    }
    assert_true(accepted > 0 && accepted < (uint64_t)rounds / 2);
    unlink(path_of("m.safetensors"));
}

TEST(malformed_indexes)
{
    static const char index[] = "model.safetensors.index.json";
    static const struct {
        const char *text;
        int code;
        const char *says;
    } bad[] = {
        {"{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"y.safetensors\"}}", DRAY_OK, NULL},
        {"{", DRAY_EFORMAT, "line 1"},
        {"[]", DRAY_EFORMAT, "weight_map: expected an object"},
        {"{}", DRAY_EFORMAT, "weight_map: expected an object"},
        {"{\"weight_map\":{}}", DRAY_EFORMAT, "weight_map: expected an object"},
        {"{\"weight_map\":{\"a\":3}}", DRAY_EFORMAT, "(not a string)"},
        {"{\"weight_map\":{\"a\":\"../x.safetensors\"}}", DRAY_EFORMAT, "not a file name beside"},
        {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", DRAY_EFORMAT, "not a file name beside"},
        {"{\"weight_map\":{\"a\":\"..\"}}", DRAY_EFORMAT, "not a file name beside"},
        {"{\"weight_map\":{\"a\":\".\"}}", DRAY_EFORMAT, "not a file name beside"},
        {"{\"weight_map\":{\"a\":\"\"}}", DRAY_EFORMAT, "not a file name beside"},
        {"{\"weight_map\":{\"a\":\"x.safetensors\",\"a\":\"y.safetensors\"}}", DRAY_EFORMAT,
         "duplicate"},
        {"{\"weight_map\":{\"a\":\"gone.safetensors\"}}", DRAY_ENOENT, "no such file"},
        {"{\"weight_map\":{\"a\":\"y.safetensors\",\"b\":\"y.safetensors\"}}", DRAY_EFORMAT,
         "tensor a is not in y.safetensors"},
        {"{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"x.safetensors\"}}", DRAY_EFORMAT,
         "tensor b is not in x.safetensors"},
        {"{\"weight_map\":{\"b\":\"x.safetensors\"}}", DRAY_EFORMAT,
         "tensor a is not what the index says"},
        {"{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"y.safetensors\",\"c\":\"y.safetensors\"}"
         "}",
         DRAY_EFORMAT, "tensor c is not in y.safetensors"},
    };
    write_tensors("x.safetensors", "{\"a\":" T("[1]", "[0,4]") "}", 4);
    write_tensors("y.safetensors", "{\"b\":" T("[1]", "[0,4]") "}", 4);
    expect("two files", folder, DRAY_EFORMAT, "2 .safetensors files, but no");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_bytes(index, bad[i].text, strlen(bad[i].text));
        expect(bad[i].text, folder, bad[i].code, bad[i].says);
        expect(bad[i].text, path_of(index), bad[i].code, bad[i].says);
    }
    write_tensors("y.safetensors", "{\"a\":" T("[1]", "[0,4]") "}", 4); /* in both files */
    write_bytes(index, bad[0].text, strlen(bad[0].text));
    expect("twice", folder, DRAY_EFORMAT, "is not what the index says");
    unlink(path_of(index));
    unlink(path_of("y.safetensors"));
    expect("the only one", folder, DRAY_OK, NULL);
    rename(path_of("x.safetensors"), path_of("model-00001-of-00002.safetensors"));
    expect("a lone shard", folder, DRAY_EFORMAT, "one of 2 files");
    rename(path_of("model-00001-of-00002.safetensors"),
           path_of("model-00001-of-00001.safetensors"));
    expect("one of one", folder, DRAY_OK, NULL);
    unlink(path_of("model-00001-of-00001.safetensors"));
    expect("empty folder", folder, DRAY_ENOENT, "no .safetensors file");
}

static dray_layout *two_tensors(void)
{
    dray_layout *l;
    assert_int_equal(dray_layout_new(&l, NULL), DRAY_OK);
    int64_t shape[] = {100};
    assert_int_equal(dray_layout_add_tensor(l, "a", DRAY_F32, 1, shape, NULL, NULL), DRAY_OK);
    assert_int_equal(dray_layout_add_tensor(l, "b", DRAY_BF16, 1, shape, NULL, NULL), DRAY_OK);
    assert_int_equal(dray_layout_add_alias(l, "c", 0, NULL, NULL), DRAY_OK);
    return l;
}

static bool exists(const char *name)
{
    return access(path_of(name), F_OK) == 0;
}

/* An update that stops anywhere leaves the old checkpoint. */
TEST(begun_is_invisible)
{
    dray_layout *like = two_tensors(), *first, *second;
    dray_safetensors_options options = DRAY_SAFETENSORS_OPTIONS_INIT;
    options.max_file_bytes = 600;
    dray_error e;
    assert_int_equal(dray_safetensors_begin(folder, like, &options, &first, &e), DRAY_OK);
    assert_int_equal(dray_layout_tensor_count(first), 2); /* no alias */
    expect("nothing yet", folder, DRAY_ENOENT, "no .safetensors file");
    assert_int_equal(dray_safetensors_finish(folder, first, &e), DRAY_OK);
    expect("the first", folder, DRAY_OK, NULL);
    assert_true(exists("model-00002-of-00002.safetensors"));
    options.max_file_bytes = 0;
    assert_int_equal(dray_safetensors_begin(folder, like, &options, &second, &e), DRAY_OK);
    assert_true(exists("model.safetensors.partial"));
    expect("the first still", folder, DRAY_OK, NULL);
    /* A layout that was finished already, a foreign one, one that was tampered with. */
    assert_int_equal(dray_safetensors_finish(folder, first, &e), DRAY_ENOENT);
    assert_int_equal(dray_safetensors_finish(folder, like, &e), DRAY_EINVALID);
    assert_int_equal(dray_safetensors_finish("/tmp", second, &e), DRAY_EINVALID);
    assert_int_equal(truncate(path_of("model.safetensors.partial"), 100), 0);
    assert_int_equal(dray_safetensors_finish(folder, second, &e), DRAY_EFORMAT);
    expect("the first still", folder, DRAY_OK, NULL);
    assert_true(exists("model-00002-of-00002.safetensors"));
    dray_layout_free(second);
    assert_int_equal(dray_safetensors_begin(folder, like, &options, &second, &e), DRAY_OK);
    assert_int_equal(dray_safetensors_finish(folder, second, &e), DRAY_OK);
    expect("the second", folder, DRAY_OK, NULL);
    assert_true(exists("model.safetensors") && !exists("model.safetensors.index.json") &&
                !exists("model-00001-of-00002.safetensors"));
    unlink(path_of("model.safetensors"));
    dray_layout_free(first);
    dray_layout_free(second);
    dray_layout_free(like);
}

TEST(begin_refuses)
{
    dray_layout *like = two_tensors(), *out = NULL;
    dray_safetensors_options options = DRAY_SAFETENSORS_OPTIONS_INIT;
    dray_error e;
    static const char *const bad[] = {"{", "[]", "3", "{\"a\":1}", "{\"a\":\"x\",\"a\":\"y\"}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        options.metadata_json = bad[i];
        assert_true(dray_safetensors_begin(folder, like, &options, &out, &e) < 0);
        assert_non_null(strstr(e.message, "metadata_json"));
    }
    options.metadata_json = NULL;
    assert_int_equal(dray_safetensors_begin("/nowhere/x", like, &options, &out, &e), DRAY_ESYS);
    write_bytes("plain", "", 0);
    assert_int_equal(dray_safetensors_begin(path_of("plain"), like, &options, &out, &e),
                     DRAY_EINVALID);
    unlink(path_of("plain"));
    assert_int_equal(dray_layout_add_tensor(like, "__metadata__", DRAY_I8, 0, NULL, NULL, &e), 0);
    assert_int_equal(dray_safetensors_begin(folder, like, &options, &out, &e), DRAY_EINVALID);
    assert_null(out);
    assert_false(exists("model.safetensors.partial"));
    dray_layout_free(like);
}

TEST(specs)
{
    dray_model_config model;
    assert_int_equal(dray_model_config_load("qwen2.5-0.5b", &model, NULL), DRAY_OK);
    static const struct {
        const char *spec;
        uint32_t count;
        uint64_t bytes; /* of all members; 0: more than the model, because norms are replicated */
    } good[] = {
        {"full", 1, 494032768 * 2ul},
        {"full:dtype=f32", 1, 494032768 * 4ul},
        {"fsdp:4", 4, 494032768 * 2ul},
        {"fsdp:3,dtype=torch.float32", 3, 494032768 * 4ul},
        {"megatron", 1, 494032768 * 2ul},
        {"megatron:dp=3", 3, 0},
        {"megatron:tp=2,pp=3,vpp=2,cp=2", 12, 0},
        {"engine:tp=1", 1, 494032768 * 2ul},
        {"engine:tp=2,dtype=f16,vocab=128", 2, 0},
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        dray_layout **layouts;
        uint32_t count;
        dray_error e = {0};
        if (dray_layouts_from_spec(&model, good[i].spec, &layouts, &count, &e) != DRAY_OK)
            fail_msg("%s: %s", good[i].spec, e.message);
        assert_int_equal(count, good[i].count);
        uint64_t bytes = 0;
        for (uint32_t j = 0; j < count; j++) {
            bytes += dray_layout_bytes(layouts[j]);
            dray_layout_free(layouts[j]);
        }
        free(layouts);
        assert_true(good[i].bytes ? bytes == good[i].bytes : bytes > good[0].bytes);
    }
    static const struct {
        const char *spec, *says;
    } bad[] = {
        {"", "unknown word ''"},
        {"fsdq:4", "did you mean 'fsdp'?"},
        {"engin:tp=2", "did you mean 'engine'?"},
        {"deepspeed:tp=2", "known: full"},
        {"fsdp", "number of ranks is missing; form: 'fsdp:N"},
        {"fsdp:", "expected a number of ranks"},
        {"fsdp:0", "expected a number of ranks"},
        {"fsdp:4097", "expected a number of ranks"},
        {"fsdp:+4", "expected a number of ranks"},
        {"fsdp:4x", "expected a number of ranks"},
        {"fsdp:4,5", "expected key=value, found '5'"},
        {"fsdp:4,dtpe=f32", "did you mean 'dtype'?"},
        {"fsdp:4,dtype=bf61", "did you mean 'BF16'?"},
        {"fsdp:4,dtype=f32,dtype=f32", "given twice: 'dtype'"},
        {"fsdp:tp=4", "unknown key 'tp'"},
        {"engine", "number of ranks is missing"},
        {"engine:4", "expected key=value, found '4'"},
        {"engine:tp=", "expected a number of ranks"},
        {"engine:tp=4", "14 is not divisible by tp 4"},
        {"engine:tp=2,vocab=0", "expected a multiple"},
        {"engine:tp=2,vocab=99999999999", "expected a multiple"},
        {"engine:tp=2,,dtype=f32", "expected key=value, found ''"},
        {"megatron:tp=4", "num_attention_heads 14 is not divisible by tp 4"},
        {"megatron:tp=7", "num_key_value_heads 2 is neither divisible by tp 7 nor"},
        {"megatron:pp=5", "num_hidden_layers 24 is not divisible by pp 5"},
        {"megatron:pp=4,vpp=4", "layers of a stage 6 is not divisible by vpp 4"},
        {"megatron:vpp=2", "vpp 2 needs pp above 1"},
        {"megatron:ep=2", "tp 1 x cp 1 x dp 1 = 1 is not divisible by etp 1 x ep 2 = 2"},
        {"megatron:ep=2,dp=2", "ep 2, but qwen2 has no experts"},
        {"megatron:pp=3,first=5", "given stages 19 is not divisible by their number of stages 2"},
        {"megatron:pp=2,first=25", "25 layers in the first and 0 in the last of 2 stages, of 24"},
        {"megatron:pp=2,first=10,last=10", "given stages 4 is not divisible"},
        {"megatron:pp=3,vpp=2,first=7,last=7", "layers of the first stage 7 is not divisible by"},
        {"megatron:pp=3,vpp=2,first=8,last=9", "layers of the last stage 9 is not divisible by"},
        {"megatron:experts=some", "expected grouped, packed or sequential, found 'some'"},
        {"megatron:tp=4096,pp=4096", "16777216 ranks, at most 4096"},
        {"megatron:4", "expected key=value, found '4'"},
        {"megatron:dp=0", "expected a number of ranks"},
        {"safetensors", "a path is missing"},
        {"safetensors:", "a path is missing"},
        {"safetensors:/nowhere", "no such file or folder"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dray_layout **layouts = NULL;
        uint32_t count;
        dray_error e = {0};
        if (dray_layouts_from_spec(&model, bad[i].spec, &layouts, &count, &e) == DRAY_OK)
            fail_msg("SPEC '%s' was accepted", bad[i].spec);
        if (!strstr(e.message, bad[i].says))
            fail_msg("SPEC '%s': '%s' lacks '%s'", bad[i].spec, e.message, bad[i].says);
        assert_null(layouts);
    }
    dray_layout **layouts;
    uint32_t count;
    dray_error e;
    assert_int_equal(dray_layouts_from_spec(NULL, "fsdp:4", &layouts, &count, &e), DRAY_EINVALID);
    assert_non_null(strstr(e.message, "needs a model"));
    write_tensors("x.safetensors", "{\"a\":" T("[1]", "[0,4]") "}", 4);
    char spec[128];
    snprintf(spec, sizeof spec, "safetensors:%s", folder);
    assert_int_equal(dray_layouts_from_spec(NULL, spec, &layouts, &count, &e), DRAY_OK);
    assert_int_equal(count, 1);
    dray_layout_free(layouts[0]);
    free(layouts);
    unlink(path_of("x.safetensors"));
}

FIXTURE(make_folder)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/dray-tensors-XXXXXX",
             tmp && strlen(tmp) < 40 ? tmp : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

FIXTURE(remove_folder)
{
    return rmdir(folder); /* every test cleans up behind it */
}

int main(void)
{
    seed = test_seed();
    return suite_run(make_folder, remove_folder);
}
