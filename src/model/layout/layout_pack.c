/* The wire form of a layout, little-endian:
 *
 *   u64 magic "DRAYLAYO", u32 version, u32 0, u64 bytes of the body, u64 XXH3 of the body
 *   body: u32 regions  { u8 kind, u64 bytes, string name, 16 bytes device }
 *         u32 tensors  { string name, i32 alias_of; unless an alias:
 *                        u8 dtype, u8 ndim, i64 shape[ndim] }
 *         u32 blocks   { u32 tensor, u32 region, u64 offset, i64 start[ndim], i64 extent[ndim],
 *                        u8 dense; unless dense: i64 stride[ndim] }
 *         u32 quants   { u32 tensor, u8 kind, u8 scale format, u32 scales; of kinds with a variable
 *                        cell: i64 block[2]; of packed ones: u32 values; of kinds with one more
 *                        part: u32 second; NVFP4: u32 shared }
 *
 * Reading goes through dray_layout_add_..., whose checks apply here, too. */
#include "model/layout/layout.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/wire.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC UINT64_C(0x4F59414C59415244) /* "DRAYLAYO" */
enum { VERSION = 2, HEADER_BYTES = 32 };

/* The fewest bytes of an item, to check counts against. */
enum {
    REGION_LEAST = 1 + 8 + 4 + 16,
    TENSOR_LEAST = 4 + 1 + 4,
    BLOCK_LEAST = 4 + 4 + 8 + 1,
    QUANT_LEAST = 4 + 1 + 1 + 4
};

static void put_i64s(dray__writer *w, const int64_t *values, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        dray__put_i64(w, values[i]);
}

static void put_region(dray__writer *w, const dray_region_info *region)
{
    dray__put_u8(w, (uint8_t)region->kind);
    dray__put_u64(w, region->bytes);
    dray__put_string(w, region->name);
    dray__put_bytes(w, region->device, sizeof region->device);
}

static void put_tensor(dray__writer *w, const dray_tensor_info *tensor)
{
    dray__put_string(w, tensor->name);
    dray__put_u32(w, (uint32_t)tensor->alias_of);
    if (tensor->alias_of >= 0)
        return;
    dray__put_u8(w, (uint8_t)tensor->dtype);
    dray__put_u8(w, (uint8_t)tensor->ndim);
    put_i64s(w, tensor->shape, tensor->ndim);
}

static void put_block(dray__writer *w, const dray_block *block, const dray_tensor_info *tensor)
{
    int64_t dense[DRAY_MAX_DIMS];
    dray__dense_strides((dray_dtype)tensor->dtype, tensor->ndim, block->extent, dense);
    bool is_dense = memcmp(dense, block->stride, sizeof dense) == 0;
    dray__put_u32(w, block->tensor);
    dray__put_u32(w, block->region);
    dray__put_u64(w, block->offset);
    put_i64s(w, block->start, tensor->ndim);
    put_i64s(w, block->extent, tensor->ndim);
    dray__put_u8(w, is_dense);
    if (!is_dense)
        put_i64s(w, block->stride, tensor->ndim);
}

/* Returns the tensor's quantisation; NULL for an alias, which is quantised as the tensor that it
 * names. */
static const dray_quant *own_quant(const dray_layout *layout, uint32_t tensor)
{
    return dray_layout_tensor(layout, tensor)->alias_of < 0 ? dray_layout_quant(layout, tensor)
                                                            : NULL;
}

static void put_quants(dray__writer *w, const dray_layout *layout)
{
    uint32_t count = dray_layout_tensor_count(layout), quants = 0;
    for (uint32_t i = 0; i < count; i++)
        quants += own_quant(layout, i) != NULL;
    dray__put_u32(w, quants);
    for (uint32_t i = 0; i < count; i++) {
        const dray_quant *quant = own_quant(layout, i);
        if (!quant)
            continue;
        dray__put_u32(w, i);
        dray__put_u8(w, (uint8_t)quant->kind);
        dray__put_u8(w, (uint8_t)quant->scale_format);
        dray__put_u32(w, quant->scales);
        const dray__quant_format *format = dray__quant_format_of(quant->kind);
        if (!format->columns)
            put_i64s(w, quant->block, 2);
        if (format->parts[DRAY__PART_VALUES].suffix)
            dray__put_u32(w, quant->values);
        if (format->parts[DRAY__PART_SECOND].suffix)
            dray__put_u32(w, quant->second);
        if (quant->kind == DRAY_QUANT_NVFP4)
            dray__put_u32(w, quant->shared);
    }
}

int dray_layout_pack(const dray_layout *layout, void **out, size_t *size, dray_error *error)
{
    dray__writer w = {0};
    dray__put_space(&w, HEADER_BYTES);
    uint32_t count = dray_layout_region_count(layout);
    dray__put_u32(&w, count);
    for (uint32_t i = 0; i < count; i++)
        put_region(&w, dray_layout_region(layout, i));
    count = dray_layout_tensor_count(layout);
    dray__put_u32(&w, count);
    for (uint32_t i = 0; i < count; i++)
        put_tensor(&w, dray_layout_tensor(layout, i));
    count = dray_layout_block_count(layout);
    dray__put_u32(&w, count);
    for (uint32_t i = 0; i < count; i++) {
        const dray_block *block = dray_layout_block(layout, i);
        put_block(&w, block, dray_layout_tensor(layout, block->tensor));
    }
    put_quants(&w, layout);
    int status = dray__writer_check(&w, error);
    if (status) {
        dray__writer_free(&w);
        return status;
    }
    dray__writer header = {.data = w.data, .capacity = HEADER_BYTES};
    dray__put_u64(&header, MAGIC);
    dray__put_u32(&header, VERSION);
    dray__put_u32(&header, 0);
    dray__put_u64(&header, w.size - HEADER_BYTES);
    dray__put_u64(&header, dray__hash(w.data + HEADER_BYTES, w.size - HEADER_BYTES));
    *out = w.data;
    *size = w.size;
    return DRAY_OK;
}

static void get_i64s(dray__reader *r, int64_t *values, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        values[i] = dray__get_i64(r);
}

static int read_region(dray__reader *r, dray_layout *layout, dray_error *error)
{
    dray_region_info region = {.kind = dray__get_u8(r)};
    region.bytes = dray__get_u64(r);
    char *name = dray__get_string(r, DRAY__NAME_MAX);
    const void *device = dray__get_bytes(r, sizeof region.device);
    int status = DRAY_OK;
    if (!r->failed) {
        region.name = name;
        memcpy(region.device, device, sizeof region.device);
        status = dray_layout_add_region(layout, &region, NULL, error);
    }
    free(name);
    return status;
}

static int read_tensor(dray__reader *r, dray_layout *layout, dray_error *error)
{
    char *name = dray__get_string(r, DRAY__NAME_MAX);
    int32_t alias_of = (int32_t)dray__get_u32(r);
    int status = DRAY_OK;
    if (!r->failed && alias_of != -1) {
        status = dray_layout_add_alias(layout, name, (uint32_t)alias_of, NULL, error);
    } else if (!r->failed) {
        dray_dtype dtype = dray__get_u8(r);
        uint32_t ndim = dray__get_u8(r);
        int64_t shape[DRAY_MAX_DIMS] = {0};
        get_i64s(r, shape, ndim <= DRAY_MAX_DIMS ? ndim : 0);
        if (!r->failed)
            status = dray_layout_add_tensor(layout, name, dtype, ndim, shape, NULL, error);
    }
    free(name);
    return status;
}

static int read_block(dray__reader *r, dray_layout *layout, dray_error *error)
{
    dray_block block = {.tensor = dray__get_u32(r)};
    block.region = dray__get_u32(r);
    block.offset = dray__get_u64(r);
    const dray_tensor_info *tensor = dray_layout_tensor(layout, block.tensor);
    if (!tensor)
        return dray__fail(error, DRAY_EFORMAT, "block of tensor %u: the layout has %u",
                          block.tensor, dray_layout_tensor_count(layout));
    get_i64s(r, block.start, tensor->ndim);
    get_i64s(r, block.extent, tensor->ndim);
    uint8_t dense = dray__get_u8(r);
    if (dense > 1)
        return dray__fail(error, DRAY_EFORMAT, "tensor %.200s: block form %u is unknown",
                          tensor->name, dense);
    if (dense)
        return dray_layout_add_dense(layout, block.tensor, block.region, block.start, block.extent,
                                     block.offset, error);
    get_i64s(r, block.stride, tensor->ndim);
    return r->failed ? DRAY_OK : dray_layout_add_block(layout, &block, error);
}

static int read_quant(dray__reader *r, dray_layout *layout, dray_error *error)
{
    uint32_t tensor = dray__get_u32(r);
    dray_quant quant = {.kind = dray__get_u8(r)};
    quant.scale_format = dray__get_u8(r);
    quant.scales = dray__get_u32(r);
    const dray__quant_format *format = dray__quant_format_of(quant.kind);
    if (!r->failed && !format)
        return dray__fail(error, DRAY_EFORMAT, "tensor %u: quant kind %d is unknown", tensor,
                          quant.kind);
    if (format && !format->columns)
        get_i64s(r, quant.block, 2);
    if (format && format->parts[DRAY__PART_VALUES].suffix)
        quant.values = dray__get_u32(r);
    if (format && format->parts[DRAY__PART_SECOND].suffix)
        quant.second = dray__get_u32(r);
    if (quant.kind == DRAY_QUANT_NVFP4)
        quant.shared = dray__get_u32(r);
    if (r->failed)
        return DRAY_OK;
    if (quant.kind == DRAY_QUANT_NONE || dray_layout_quant(layout, tensor))
        return dray__fail(error, DRAY_EFORMAT,
                          "tensor %u: quantised twice, or said to be quantised and not", tensor);
    return dray_layout_set_quant(layout, tensor, &quant, error);
}

static int read_body(dray__reader *r, dray_layout *layout, dray_error *error)
{
    static const struct {
        size_t least;
        int (*read)(dray__reader *, dray_layout *, dray_error *);
    } parts[] = {{REGION_LEAST, read_region},
                 {TENSOR_LEAST, read_tensor},
                 {BLOCK_LEAST, read_block},
                 {QUANT_LEAST, read_quant}};
    for (size_t p = 0; p < sizeof parts / sizeof *parts; p++) {
        uint32_t count = dray__get_count(r, parts[p].least);
        for (uint32_t i = 0; i < count && !r->failed; i++) {
            int status = parts[p].read(r, layout, error);
            if (status)
                return dray__fail_prefix(error, status, "packed layout: ");
        }
    }
    return dray__reader_finish(r, "packed layout", error);
}

static int read_header(dray__reader *r, dray_error *error)
{
    uint64_t magic = dray__get_u64(r);
    uint32_t version = dray__get_u32(r), zero = dray__get_u32(r);
    uint64_t size = dray__get_u64(r), sum = dray__get_u64(r);
    if (r->failed || magic != MAGIC || zero != 0)
        return dray__fail(error, DRAY_EFORMAT, "packed layout: not one, or cut off");
    if (version != VERSION)
        return dray__fail(error, DRAY_EVERSION, "packed layout: version %u, expected %d", version,
                          VERSION);
    if (size != r->size - HEADER_BYTES)
        return dray__fail(error, DRAY_EFORMAT,
                          "packed layout: %zu bytes, %" PRIu64 " expected after its header",
                          r->size - HEADER_BYTES, size);
    uint64_t found = dray__hash(r->data + HEADER_BYTES, size);
    if (found != sum)
        return dray__fail(error, DRAY_ECHECKSUM,
                          "packed layout: checksum %016" PRIx64 ", %016" PRIx64 " expected", found,
                          sum);
    return DRAY_OK;
}

int dray_layout_unpack(const void *data, size_t size, dray_layout **out, dray_error *error)
{
    dray__reader r = dray__reader_of(data, size);
    dray_layout *layout = NULL;
    int status = read_header(&r, error);
    if (!status)
        status = dray_layout_new(&layout, error);
    if (!status)
        status = read_body(&r, layout, error);
    return dray__layout_give(layout, status, out);
}
