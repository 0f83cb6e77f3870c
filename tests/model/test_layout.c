/* Tests dtypes, layouts and their wire form. */
#include "base/hash.h"
#include "base/random.h"
#include "seed.h"
#include "suite.h"
#include <dray/model.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static uint64_t seed;
static uint64_t draws;

static uint64_t draw(uint64_t below)
{
    return dray__random_u64(seed, 0, draws++) % below;
}

TEST(dtypes_have_sizes_and_names)
{
    assert_int_equal(dray_dtype_size(DRAY_BF16), 2);
    assert_int_equal(dray_dtype_size(DRAY_DTYPE_NONE), 0);
    assert_int_equal(dray_dtype_size((dray_dtype)99), 0);
    assert_int_equal(dray_dtype_size((dray_dtype)-1), 0);
    assert_string_equal(dray_dtype_name(DRAY_F8E4M3), "F8_E4M3");
    assert_string_equal(dray_dtype_name((dray_dtype)99), "?");
    assert_int_equal(dray_dtype_parse("torch.bfloat16"), DRAY_BF16);
    assert_int_equal(dray_dtype_parse("Float8_E5M2"), DRAY_F8E5M2);
    assert_int_equal(dray_dtype_parse("f8e4m3"), DRAY_F8E4M3);
    assert_int_equal(dray_dtype_parse("bool"), DRAY_BOOL);
    assert_int_equal(dray_dtype_parse("float"), DRAY_DTYPE_NONE);
    assert_int_equal(dray_dtype_parse(""), DRAY_DTYPE_NONE);
    assert_int_equal(dray_dtype_parse(NULL), DRAY_DTYPE_NONE);
    for (int i = 1; i <= 15; i++)
        assert_int_equal(dray_dtype_parse(dray_dtype_name((dray_dtype)i)), i);
    assert_string_equal(dray_region_kind_name(DRAY_REGION_FILE), "file");
    assert_string_equal(dray_region_kind_name((dray_region_kind)0), "?");
}

/* A layout with every form of everything: kinds, scalars, empty tensors, aliases, strides. */
static dray_layout *sample(void)
{
    dray_layout *l;
    assert_int_equal(dray_layout_new(&l, NULL), DRAY_OK);
    uint32_t r0, r1, t, a;
    dray_region_info region = {.kind = DRAY_REGION_SHARED, .bytes = 4096, .name = "w"};
    assert_int_equal(dray_layout_add_region(l, &region, &r0, NULL), DRAY_OK);
    region = (dray_region_info){.kind = DRAY_REGION_CUDA, .bytes = 1 << 20, .device = {1, 2, 3}};
    assert_int_equal(dray_layout_add_region(l, &region, &r1, NULL), DRAY_OK);
    int64_t shape[] = {10, 6};
    assert_int_equal(dray_layout_add_tensor(l, "model.a", DRAY_F32, 2, shape, &t, NULL), DRAY_OK);
    assert_int_equal(
        dray_layout_add_dense(l, t, r0, (int64_t[]){2, 0}, (int64_t[]){3, 6}, 16, NULL), DRAY_OK);
    dray_block block = {.tensor = t,
                        .region = r1,
                        .start = {0, 5},
                        .extent = {10, 1},
                        .offset = 8,
                        .stride = {24, 4}};
    assert_int_equal(dray_layout_add_block(l, &block, NULL), DRAY_OK);
    assert_int_equal(dray_layout_add_alias(l, "alias", t, &a, NULL), DRAY_OK);
    assert_int_equal(dray_layout_add_alias(l, "alias2", a, NULL, NULL), DRAY_OK);
    assert_int_equal(dray_layout_add_tensor(l, "scalar", DRAY_I64, 0, NULL, &t, NULL), DRAY_OK);
    assert_int_equal(dray_layout_add_dense(l, t, r0, NULL, NULL, 4088, NULL), DRAY_OK);
    assert_int_equal(
        dray_layout_add_tensor(l, "empty", DRAY_BOOL, 3, (int64_t[]){4, 0, 7}, &t, NULL), DRAY_OK);
    return l;
}

/* Of `sample` with a stack of experts in blocks, and a matrix with one scale. */
static dray_layout *quantised(void)
{
    dray_layout *l = sample();
    uint32_t t, s;
    assert_int_equal(
        dray_layout_add_tensor(l, "stack", DRAY_F8E4M3, 3, (int64_t[]){4, 300, 128}, &t, NULL), 0);
    assert_int_equal(
        dray_layout_add_tensor(l, "stack_s", DRAY_F32, 3, (int64_t[]){4, 3, 1}, &s, NULL), 0);
    dray_quant quant = {.kind = DRAY_QUANT_BLOCK,
                        .scale_format = DRAY_SCALE_UE8M0,
                        .scales = s,
                        .block = {128, 128}};
    assert_int_equal(dray_layout_set_quant(l, t, &quant, NULL), DRAY_OK);
    assert_int_equal(dray_layout_add_tensor(l, "one_s", DRAY_F32, 0, NULL, &s, NULL), 0);
    assert_int_equal(dray_layout_add_tensor(l, "one", DRAY_F8E5M2, 1, (int64_t[]){7}, &t, NULL), 0);
    quant = (dray_quant){.kind = DRAY_QUANT_TENSOR, .scales = s, .block = {9, 9}};
    assert_int_equal(dray_layout_set_quant(l, t, &quant, NULL), DRAY_OK);
    assert_int_equal(dray_layout_add_alias(l, "one_too", t, NULL, NULL), DRAY_OK);
    return l;
}

TEST(layout_keeps_quantisation)
{
    dray_layout *l = quantised();
    uint32_t stack, one, too, scales;
    assert_int_equal(dray_layout_find(l, "stack", &stack, NULL), DRAY_OK);
    assert_int_equal(dray_layout_find(l, "one", &one, NULL), DRAY_OK);
    assert_int_equal(dray_layout_find(l, "one_too", &too, NULL), DRAY_OK);
    assert_int_equal(dray_layout_find(l, "stack_s", &scales, NULL), DRAY_OK);
    const dray_quant *q = dray_layout_quant(l, stack);
    assert_int_equal(q->kind, DRAY_QUANT_BLOCK);
    assert_int_equal(q->scales, scales);
    assert_int_equal(q->block[1], 128);
    assert_int_equal(dray_layout_quant(l, one)->block[0], 0); /* of no meaning: not kept */
    assert_ptr_equal(dray_layout_quant(l, one), dray_layout_quant(l, too));
    assert_null(dray_layout_quant(l, scales));
    assert_null(dray_layout_quant(l, 0));
    assert_null(dray_layout_quant(l, 99));

    const dray_quant right = {.kind = DRAY_QUANT_BLOCK, .scales = scales, .block = {100, 128}};
    static const struct {
        const char *tensor;
        dray_quant change; /* of `right`: what is not 0 */
        const char *says;
    } wrong[] = {
        {"stack", {.kind = 99}, "kind"},
        {"stack", {.kind = DRAY_QUANT_DEEPGEMM}, "[4, 300, 1] expected"},
        {"stack", {.scale_format = 2}, "scale format"},
        {"stack", {.block = {99, 0}}, "[4, 4, 1] expected"},
        {"stack", {.block = {-1, 0}}, "sizes > 0"},
        {"stack", {.scales = 99}, "no tensor"},
        {"stack", {.kind = DRAY_QUANT_TENSOR}, "expected"},
        {"one", {.kind = DRAY_QUANT_TENSOR}, "already"},
        {"one", {.kind = DRAY_QUANT_BLOCK}, "two or more"},
        {"one_too", {0}, "alias"},
        {"stack_s", {0}, "another one's scales"},
        {"model.a", {0}, "F8_E4M3"},
    };
    dray_error e;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        dray_quant quant = right;
        uint32_t t;
        assert_int_equal(dray_layout_find(l, wrong[i].tensor, &t, NULL), DRAY_OK);
        quant.kind = wrong[i].change.kind ? wrong[i].change.kind : right.kind;
        quant.scale_format = wrong[i].change.scale_format;
        quant.scales = wrong[i].change.scales ? wrong[i].change.scales : scales;
        quant.block[0] = wrong[i].change.block[0] ? wrong[i].change.block[0] : right.block[0];
        assert_int_equal(dray_layout_set_quant(l, t, &quant, &e), DRAY_EINVALID);
        if (!strstr(e.message, wrong[i].says))
            fail_msg("case %zu: %s", i, e.message);
    }
    assert_int_equal(dray_layout_quant(l, stack)->block[0], 128);
    assert_int_equal(dray_layout_set_quant(l, stack, &right, NULL), DRAY_OK);
    assert_int_equal(dray_layout_quant(l, stack)->block[0], 100);
    assert_int_equal(dray_layout_set_quant(l, stack, &(dray_quant){0}, NULL), DRAY_OK);
    assert_null(dray_layout_quant(l, stack));
    assert_int_equal(dray_layout_set_quant(l, stack, &right, NULL), DRAY_OK); /* scales are free */
    dray_layout_free(l);
}

/* A weight whose elements are packed: its name, then its parts. */
enum { NAMED, PACKED, SCALES, GLOBAL, ZEROS, GROUPS, SHORT, FORMATTED };

static dray_layout *formatted(void)
{
    static const struct {
        const char *name;
        dray_dtype dtype;
        uint32_t ndim;
        int64_t shape[2];
    } tensors[FORMATTED] = {[NAMED] = {"w", DRAY_BF16, 2, {20, 64}},
                            [PACKED] = {"w_packed", DRAY_U8, 2, {20, 32}},
                            [SCALES] = {"w_scale", DRAY_F8E4M3, 2, {20, 4}},
                            [GLOBAL] = {"w_global_scale", DRAY_F32, 1, {1}},
                            [ZEROS] = {"w_zero_point", DRAY_I32, 2, {3, 2}},
                            [GROUPS] = {"w_groups", DRAY_F16, 2, {20, 2}},
                            [SHORT] = {"short", DRAY_BF16, 2, {20, 56}}};
    dray_region_info region = {.kind = DRAY_REGION_HOST, .bytes = 1 << 16, .name = "memory"};
    dray_layout *l;
    assert_int_equal(dray_layout_new(&l, NULL), DRAY_OK);
    assert_int_equal(dray_layout_add_region(l, &region, NULL, NULL), DRAY_OK);
    for (uint32_t i = 0; i < FORMATTED; i++)
        assert_int_equal(dray_layout_add_tensor(l, tensors[i].name, tensors[i].dtype,
                                                tensors[i].ndim, tensors[i].shape, NULL, NULL),
                         DRAY_OK);
    return l;
}

TEST(layout_keeps_formats)
{
    dray_layout *l = formatted(), *back;
    const dray_quant right = {.kind = DRAY_QUANT_NVFP4,
                              .scales = SCALES,
                              .values = PACKED,
                              .second = GLOBAL,
                              .block = {7, 7}};
    static const struct {
        uint32_t tensor;
        dray_quant quant;
        const char *says;
    } wrong[] = {
        {NAMED,
         {.kind = DRAY_QUANT_NVFP4, .scales = SCALES, .values = 99, .second = GLOBAL},
         "values (tensor 99)"},
        {NAMED,
         {.kind = DRAY_QUANT_NVFP4, .scales = SCALES, .values = PACKED, .second = SCALES},
         "its scales and its second"},
        {NAMED,
         {.kind = DRAY_QUANT_NVFP4,
          .scales = SCALES,
          .values = PACKED,
          .second = GLOBAL,
          .shared = PACKED},
         "no NVFP4 tensor before it"},
        {NAMED, {.kind = DRAY_QUANT_MXFP4, .scales = SCALES, .values = PACKED}, "[20, 2] expected"},
        {NAMED, {.kind = DRAY_QUANT_MXFP8, .scales = SCALES}, "quantised ones are F8_E4M3"},
        {NAMED,
         {.kind = DRAY_QUANT_INT4, .scales = GROUPS, .values = PACKED, .block = {1, 32}},
         "[20, 8] expected"},
        {NAMED,
         {.kind = DRAY_QUANT_INT4, .scales = GROUPS, .values = PACKED, .block = {1, 36}},
         "a multiple of 8"},
        {NAMED,
         {.kind = DRAY_QUANT_INT4, .scales = GROUPS, .values = PACKED, .block = {2, 32}},
         "a multiple of 8"},
        {SHORT,
         {.kind = DRAY_QUANT_NVFP4, .scales = SCALES, .values = PACKED, .second = GLOBAL},
         "are not whole groups of 16"},
        {PACKED,
         {.kind = DRAY_QUANT_NVFP4, .scales = SCALES, .values = NAMED, .second = GLOBAL},
         "F32, BF16 or F16"},
    };
    dray_error e;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(dray_layout_set_quant(l, wrong[i].tensor, &wrong[i].quant, &e),
                         DRAY_EINVALID);
        if (!strstr(e.message, wrong[i].says))
            fail_msg("case %zu: %s", i, e.message);
        assert_null(dray_layout_quant(l, wrong[i].tensor));
    }
    assert_int_equal(dray_layout_set_quant(l, NAMED, &right, NULL), DRAY_OK);
    assert_int_equal(dray_layout_set_quant(l, SHORT, &wrong[0].quant, &e), DRAY_EINVALID);
    void *packed;
    size_t size;
    assert_int_equal(dray_layout_pack(l, &packed, &size, NULL), DRAY_OK);
    assert_int_equal(dray_layout_unpack(packed, size, &back, NULL), DRAY_OK);
    const dray_quant *q = dray_layout_quant(back, NAMED);
    assert_memory_equal(q, dray_layout_quant(l, NAMED), sizeof *q);
    assert_int_equal(q->values, PACKED);
    assert_int_equal(q->second, GLOBAL);
    assert_int_equal(q->block[0], 0); /* of no meaning: not kept */
    free(packed);
    dray_layout_free(back);
    assert_int_equal(dray_layout_set_quant(l, NAMED, &(dray_quant){0}, NULL), DRAY_OK);
    /* What has memory of its own is not packed into another tensor. */
    const int64_t zero[2] = {0}, one[2] = {1, 1};
    assert_int_equal(dray_layout_add_dense(l, NAMED, 0, zero, one, 0, NULL), DRAY_OK);
    assert_int_equal(dray_layout_set_quant(l, NAMED, &right, &e), DRAY_EINVALID);
    assert_non_null(strstr(e.message, "has blocks"));
    dray_layout_free(l);
}

TEST(layout_keeps_what_it_was_given)
{
    dray_layout *l = sample();
    assert_int_equal(dray_layout_region_count(l), 2);
    assert_int_equal(dray_layout_tensor_count(l), 5);
    assert_int_equal(dray_layout_block_count(l), 3);
    assert_int_equal(dray_layout_bytes(l), 18 * 4 + 10 * 4 + 8);
    uint32_t i;
    assert_int_equal(dray_layout_find(l, "alias2", &i, NULL), DRAY_OK);
    assert_int_equal(dray_layout_tensor(l, i)->alias_of, 0); /* not of the alias */
    assert_int_equal(dray_layout_tensor(l, i)->shape[1], 6);
    const dray_block *dense = dray_layout_block(l, 0);
    assert_int_equal(dense->stride[0], 24);
    assert_int_equal(dense->stride[1], 4);
    assert_int_equal(dense->extent[3], 1); /* unused dimensions are one element */
    assert_int_equal(dense->stride[3], 0);
    assert_null(dray_layout_block(l, 3));
    assert_null(dray_layout_tensor(l, 5));
    assert_null(dray_layout_region(l, 2));
    dray_error e;
    assert_int_equal(dray_layout_find(l, "model.b", &i, &e), DRAY_ENOENT);
    assert_non_null(strstr(e.message, "nearest: model.a"));
    assert_int_equal(dray_layout_find(l, "alais", &i, &e), DRAY_ENOENT);
    assert_non_null(strstr(e.message, "nearest: alias, alias2"));
    dray_layout_free(l);
}

/* A flat parameter of which one piece cannot be: the layout is as before. */
TEST(flat_parameters_are_all_or_none)
{
    static const dray_flat_piece wrong[] = {
        {.name = "b", .ndim = 2, .shape = {2, 3}, .offset = 4, .first = 0, .last = 5},
        {.name = "", .ndim = 1, .shape = {6}, .offset = 4, .first = 0, .last = 5},
    };
    for (size_t i = 0; i < 2; i++) {
        dray_layout *l;
        dray_error e;
        dray_region_info region = {.kind = DRAY_REGION_HOST, .bytes = 64};
        dray_flat_piece pieces[2] = {{.name = "a", .ndim = 1, .shape = {4}, .last = 3}, wrong[i]};
        dray_flat_parameter flat = DRAY_FLAT_PARAMETER_INIT;
        uint32_t count = 0, index;
        assert_int_equal(dray_layout_new(&l, NULL), DRAY_OK);
        assert_int_equal(dray_layout_add_region(l, &region, NULL, NULL), DRAY_OK);
        if (i == 0) {
            assert_int_equal(
                dray_layout_add_tensor(l, "b", DRAY_F32, 1, (int64_t[]){6}, NULL, NULL), 0);
            count = 1;
        } else {
            pieces[0].last = -1; /* of an empty layout nothing is left, either */
            pieces[0].name = "";
        }
        flat.dtype = DRAY_F32;
        flat.numel = 16;
        flat.padding = 6;
        flat.pieces = pieces;
        flat.count = 2;
        assert_int_equal(dray_layout_add_flat(l, 0, 0, &flat, &e), DRAY_EINVALID);
        assert_int_equal(dray_layout_tensor_count(l), count);
        assert_int_equal(dray_layout_block_count(l), 0);
        assert_int_equal(dray_layout_find(l, "a", &index, NULL), DRAY_ENOENT);
        assert_true(dray_layout_bytes(l) == 0);
        dray_layout_free(l);
    }
}

TEST(layout_refuses)
{
    dray_layout *l = sample();
    dray_error e;
    const int64_t big = INT64_MAX;
    dray_region_info region = {.kind = 9, .bytes = 1};
    assert_int_equal(dray_layout_add_region(l, &region, NULL, &e), DRAY_EINVALID);
    region.kind = DRAY_REGION_FILE; /* without a path */
    assert_int_equal(dray_layout_add_region(l, &region, NULL, &e), DRAY_EINVALID);
    region = (dray_region_info){.kind = 1, .bytes = UINT64_MAX};
    assert_int_equal(dray_layout_add_region(l, &region, NULL, &e), DRAY_EINVALID);
    region = (dray_region_info){.kind = 1, .bytes = 1, .name = "\xff"};
    assert_int_equal(dray_layout_add_region(l, &region, NULL, &e), DRAY_EINVALID);
    static const struct {
        const char *name;
        int dtype;
        uint32_t ndim;
        int64_t shape[5];
        int code;
    } tensors[] = {
        {"", DRAY_F32, 1, {1}, DRAY_EINVALID},
        {"\xc0\x80", DRAY_F32, 1, {1}, DRAY_EINVALID},
        {"t", 0, 1, {1}, DRAY_EINVALID},
        {"t", 77, 1, {1}, DRAY_EINVALID},
        {"t", DRAY_F32, 5, {1, 1, 1, 1, 1}, DRAY_EINVALID},
        {"t", DRAY_F32, 1, {-1}, DRAY_EINVALID},
        {"t", DRAY_F32, 2, {INT64_MAX, 2}, DRAY_EINVALID},
        {"t", DRAY_F32, 3, {INT64_MAX, 0, 2}, DRAY_EINVALID},
        {"scalar", DRAY_F32, 1, {1}, DRAY_EEXIST},
        {"alias", DRAY_F32, 1, {1}, DRAY_EEXIST},
    };
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        assert_int_equal(dray_layout_add_tensor(l, tensors[i].name, (dray_dtype)tensors[i].dtype,
                                                tensors[i].ndim, tensors[i].shape, NULL, &e),
                         tensors[i].code);
    char long_name[5000];
    memset(long_name, 'x', sizeof long_name);
    long_name[4999] = 0;
    assert_int_equal(dray_layout_add_tensor(l, long_name, DRAY_F32, 0, NULL, NULL, &e),
                     DRAY_EINVALID);
    assert_int_equal(dray_layout_add_alias(l, "x", 5, NULL, &e), DRAY_EINVALID);
    assert_int_equal(dray_layout_add_alias(l, "scalar", 0, NULL, &e), DRAY_EEXIST);
    static const struct {
        dray_block block;
        const char *says;
    } blocks[] = {
        {{.tensor = 9, .extent = {1, 1}}, "tensor 9"},
        {{.tensor = 1, .extent = {1, 1}}, "another name of model.a"},
        {{.region = 2, .extent = {1, 1}}, "region 2"},
        {{.start = {-1, 0}, .extent = {1, 1}}, "outside"},
        {{.start = {10, 0}, .extent = {1, 1}}, "outside"},
        {{.start = {INT64_MAX, 0}, .extent = {1, 1}}, "outside"},
        {{.start = {1, 0}, .extent = {INT64_MAX, 1}}, "outside"},
        {{.start = {1, 0}, .extent = {10, 1}}, "[10, 1] lies outside"},
        {{.extent = {0, 1}}, "empty"},
        {{.extent = {1, 1}, .stride = {0, -4}}, "negative"},
        {{.extent = {1, 1}, .offset = 4093}, "outside region 'w'"},
        {{.extent = {1, 1}, .offset = UINT64_MAX}, "outside region 'w'"},
        {{.extent = {3, 1}, .stride = {INT64_MAX, 0}}, "outside region 'w'"},
        {{.extent = {5, 1}, .stride = {INT64_C(1) << 62, 4}}, "outside region 'w'"}, /* 2^64 */
        {{.extent = {2, 6}, .stride = {4080, 4}}, "outside region 'w'"},
        {{.tensor = 4, .extent = {1, 1, 1}}, "outside"},
    };
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
        assert_int_equal(dray_layout_add_block(l, &blocks[i].block, &e), DRAY_EINVALID);
        if (!strstr(e.message, blocks[i].says))
            fail_msg("block %zu: '%s' lacks '%s'", i, e.message, blocks[i].says);
    }
    assert_int_equal(
        dray_layout_add_dense(l, 0, 0, (int64_t[]){0, 0}, (int64_t[]){big, big}, 0, &e),
        DRAY_EINVALID);
    assert_int_equal(dray_layout_tensor_count(l), 5); /* nothing of all that changed it */
    assert_int_equal(dray_layout_region_count(l), 2);
    assert_int_equal(dray_layout_block_count(l), 3);
    dray_layout_free(l);
}

static void assert_same(const dray_layout *a, const dray_layout *b)
{
    assert_int_equal(dray_layout_region_count(a), dray_layout_region_count(b));
    assert_int_equal(dray_layout_tensor_count(a), dray_layout_tensor_count(b));
    assert_int_equal(dray_layout_block_count(a), dray_layout_block_count(b));
    assert_int_equal(dray_layout_bytes(a), dray_layout_bytes(b));
    for (uint32_t i = 0; i < dray_layout_region_count(a); i++) {
        const dray_region_info *x = dray_layout_region(a, i), *y = dray_layout_region(b, i);
        assert_int_equal(x->kind, y->kind);
        assert_int_equal(x->bytes, y->bytes);
        assert_string_equal(x->name, y->name);
        assert_memory_equal(x->device, y->device, 16);
    }
    for (uint32_t i = 0; i < dray_layout_tensor_count(a); i++) {
        const dray_tensor_info *x = dray_layout_tensor(a, i), *y = dray_layout_tensor(b, i);
        assert_string_equal(x->name, y->name);
        assert_int_equal(x->dtype, y->dtype);
        assert_int_equal(x->ndim, y->ndim);
        assert_int_equal(x->alias_of, y->alias_of);
        assert_memory_equal(x->shape, y->shape, sizeof x->shape);
        const dray_quant *p = dray_layout_quant(a, i), *q = dray_layout_quant(b, i);
        assert_int_equal(p != NULL, q != NULL);
        assert_true(!p || (p->kind == q->kind && p->scale_format == q->scale_format &&
                           p->scales == q->scales && p->block[0] == q->block[0] &&
                           p->block[1] == q->block[1]));
    }
    for (uint32_t i = 0; i < dray_layout_block_count(a); i++)
        assert_memory_equal(dray_layout_block(a, i), dray_layout_block(b, i), sizeof(dray_block));
}

TEST(pack_round_trip)
{
    dray_layout *l = quantised(), *back;
    void *data;
    size_t size;
    assert_int_equal(dray_layout_pack(l, &data, &size, NULL), DRAY_OK);
    assert_int_equal(dray_layout_unpack(data, size, &back, NULL), DRAY_OK);
    assert_same(l, back);
    dray_layout_free(back);
    for (size_t cut = 0; cut < size; cut++)
        assert_true(dray_layout_unpack(data, cut, &back, NULL) < 0);
    for (size_t i = 0; i < size; i++) { /* every flipped bit is seen */
        ((uint8_t *)data)[i] ^= (uint8_t)(1u << draw(8));
        uint8_t kept = ((uint8_t *)data)[i];
        dray_error e;
        if (dray_layout_unpack(data, size, &back, &e) == DRAY_OK)
            fail_msg("byte %zu changed to %u was not noticed", i, kept);
        free(data);
        assert_int_equal(dray_layout_pack(l, &data, &size, NULL), DRAY_OK);
    }
    uint8_t *more = malloc(size + 1);
    memcpy(more, data, size);
    more[size] = 0;
    assert_int_equal(dray_layout_unpack(more, size + 1, &back, NULL), DRAY_EFORMAT);
    free(more);
    free(data);
    dray_layout_free(l);
}

/* Mutations with a right checksum: whatever is accepted must be a valid layout, that is, pack and
 * unpack to itself. Sanitizers see the rest. */
TEST(forged_layouts_are_refused_or_valid)
{
    long rounds = test_times(20000), accepted = 0;
    dray_layout *l = quantised();
    uint8_t *data, *copy;
    size_t size;
    assert_int_equal(dray_layout_pack(l, (void **)&data, &size, NULL), DRAY_OK);
    copy = malloc(size);
    for (long i = 0; i < rounds; i++) {
        memcpy(copy, data, size);
        for (uint64_t n = 1 + draw(3); n > 0; n--) {
            static const uint8_t odd[] = {0, 1, 0x7f, 0x80, 0xff};
            size_t at = 32 + draw(size - 32);
            copy[at] = draw(2) ? odd[draw(sizeof odd)] : (uint8_t)draw(256);
        }
        size_t cut = draw(8) ? size : 32 + draw(size - 32);
        uint64_t body = cut - 32, sum = dray__hash(copy + 32, body);
        memcpy(copy + 16, &body, 8);
        memcpy(copy + 24, &sum, 8);
        dray_layout *forged, *back;
        if (dray_layout_unpack(copy, cut, &forged, NULL) < 0)
            continue;
        void *again;
        size_t again_size;
        assert_int_equal(dray_layout_pack(forged, &again, &again_size, NULL), DRAY_OK);
        assert_int_equal(dray_layout_unpack(again, again_size, &back, NULL), DRAY_OK);
        assert_same(forged, back);
        free(again);
        dray_layout_free(back);
        dray_layout_free(forged);
        accepted++;
    }
    assert_true(accepted > 0 && accepted < rounds * 3 / 4);
    free(copy);
    free(data);
    dray_layout_free(l);
}

TEST(a_million_blocks)
{
    enum { TENSORS = 20000, PER = 50 };
    dray_layout *l, *back;
    assert_int_equal(dray_layout_new(&l, NULL), DRAY_OK);
    dray_region_info region = {.kind = DRAY_REGION_HOST, .bytes = UINT64_C(1) << 40};
    assert_int_equal(dray_layout_add_region(l, &region, NULL, NULL), DRAY_OK);
    uint64_t at = 0;
    for (uint32_t i = 0; i < TENSORS; i++) {
        char name[64];
        snprintf(name, sizeof name, "model.layers.%u.experts.%u.w", i / 256, i % 256);
        assert_int_equal(
            dray_layout_add_tensor(l, name, DRAY_BF16, 2, (int64_t[]){PER, 64}, NULL, NULL), 0);
        for (int64_t j = 0; j < PER; j++, at += 128)
            assert_int_equal(
                dray_layout_add_dense(l, i, 0, (int64_t[]){j, 0}, (int64_t[]){1, 64}, at, NULL),
                DRAY_OK);
    }
    assert_int_equal(dray_layout_block_count(l), TENSORS * PER);
    void *data;
    size_t size;
    assert_int_equal(dray_layout_pack(l, &data, &size, NULL), DRAY_OK);
    assert_int_equal(dray_layout_unpack(data, size, &back, NULL), DRAY_OK);
    assert_int_equal(dray_layout_bytes(back), at);
    uint32_t index;
    assert_int_equal(dray_layout_find(back, "model.layers.70.experts.3.w", &index, NULL), DRAY_OK);
    assert_int_equal(index, 70 * 256 + 3);
    free(data);
    dray_layout_free(back);
    dray_layout_free(l);
}

int main(void)
{
    seed = test_seed();
    return suite_run(NULL, NULL);
}
