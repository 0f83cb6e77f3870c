/* What describes models and memory, and comes from files, messages or users (model.h, memory.h).
 * The first byte says which:
 *
 *  0  the body of a packed layout; its header is made for it
 *  1  a packed handle; its checksum is put right
 *  2  a safetensors file: u16 bytes of data, then the header's text
 *  3  a checkpoint's index, beside one file
 *  4  a config.json: the model, and how it is quantised
 *  5  a SPEC
 *  6  the name of a parameter: Megatron's, a module's, an engine's
 *
 * What is taken must hold together: what was packed once more is the same, and blocks lie in their
 * regions. What is not taken leaves everything as it was. */
#include "fuzz/fuzz.h"

#include "base/hash.h"

#include <dray/memory.h>
#include <dray/model.h>

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { KINDS = 7, TEXT_MAX = 4096 };

static struct world {
    dray_model_config model;
    char index[128];
} w;

static void make(void)
{
    static const char header[] = "{\"t\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}";
    dray__writer file = {0};
    MUST(dray_model_config_load("qwen3-30b-a3b", &w.model, NULL) == 0);
    w.model.layers = 2;
    w.model.experts = 4;
    snprintf(w.index, sizeof w.index, "%s", fuzz_path("model.safetensors.index.json"));
    dray__put_u64(&file, sizeof header - 1);
    dray__put_bytes(&file, header, sizeof header - 1);
    dray__put_u16(&file, 7);
    fuzz_write(fuzz_path("a.safetensors"), file.data, file.size);
    dray__writer_free(&file);
}

/* ---- layouts and handles --------------------------------------------------------------------- */

static void check_layout(const dray_layout *layout)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < dray_layout_block_count(layout); i++) {
        const dray_block *b = dray_layout_block(layout, i);
        const dray_tensor_info *t = dray_layout_tensor(layout, b->tensor);
        const dray_region_info *r = dray_layout_region(layout, b->region);
        uint64_t element = dray_dtype_size((dray_dtype)t->dtype), end = b->offset + element;
        MUST(t->alias_of < 0 && b->offset <= r->bytes);
        for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
            MUST(b->start[d] >= 0 && b->extent[d] >= 1);
            MUST(d >= t->ndim || b->extent[d] <= t->shape[d] - b->start[d]);
            end += (uint64_t)(b->extent[d] - 1) * (uint64_t)b->stride[d];
            element *= (uint64_t)b->extent[d];
        }
        MUST(end <= r->bytes);
        bytes += element;
    }
    MUST(bytes == dray_layout_bytes(layout));
}

static void packed_layout(const uint8_t *body, size_t size)
{
    dray__writer all = {0};
    void *again = NULL;
    size_t again_size;
    dray_layout *layout = NULL;
    dray__put_bytes(&all, "DRAYLAYO", 8);
    dray__put_u32(&all, 2);
    dray__put_u32(&all, 0);
    dray__put_u64(&all, size);
    dray__put_u64(&all, dray__hash(body, size));
    dray__put_bytes(&all, body, size);
    if (dray_layout_unpack(all.data, all.size, &layout, NULL) == DRAY_OK) {
        check_layout(layout);
        MUST(dray_layout_pack(layout, &again, &again_size, NULL) == 0);
        dray_layout *same;
        MUST(dray_layout_unpack(again, again_size, &same, NULL) == 0);
        MUST(dray_layout_bytes(same) == dray_layout_bytes(layout));
        dray_layout_free(same);
        free(again);
    }
    dray_layout_free(layout);
    dray__writer_free(&all);
}

static void packed_handle(const uint8_t *data, size_t size)
{
    uint8_t copy[1024], again[1024];
    dray_handle handle = DRAY_HANDLE_INIT;
    dray_region *region = NULL;
    if (size > sizeof copy || size < 8)
        return;
    memcpy(copy, data, size);
    uint64_t sum = htole64(dray__hash(copy, size - 8));
    memcpy(copy + size - 8, &sum, 8);
    if (dray_handle_unpack(copy, size, &handle, NULL))
        return;
    MUST(dray_handle_pack(&handle, again, sizeof again, NULL) == 0);
    MUST(memcmp(copy, again, size) == 0);
    if (handle.kind == DRAY_REGION_SHARED)
        MUST(dray_region_import(&handle, -1, 0, &region, NULL) == DRAY_EINVALID && !region);
}

/* ---- files ----------------------------------------------------------------------------------- */

static void safetensors(const uint8_t *data, size_t size)
{
    char path[64];
    dray_layout *layout = NULL;
    if (size < 2)
        return;
    uint64_t bytes = data[0] | (uint64_t)data[1] << 8, length = htole64(size - 2);
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    MUST(fd >= 0 && write(fd, &length, 8) == 8);
    MUST(write(fd, data + 2, size - 2) == (ssize_t)size - 2);
    MUST(ftruncate(fd, (off_t)(8 + size - 2 + bytes)) == 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (dray_layout_safetensors(path, &layout, NULL) == DRAY_OK) {
        check_layout(layout);
        MUST(dray_layout_bytes(layout) == bytes && dray_layout_region_count(layout) == 1);
    }
    dray_layout_free(layout);
    close(fd);
}

static void checkpoint(const uint8_t *data, size_t size)
{
    dray_layout *layout = NULL;
    fuzz_write(w.index, data, size);
    if (dray_layout_safetensors(fuzz_folder(), &layout, NULL) == DRAY_OK)
        MUST(dray_layout_bytes(layout) == 2 && dray_layout_tensor_count(layout) == 1);
    dray_layout_free(layout);
}

static void config(const uint8_t *data, size_t size)
{
    char path[64];
    dray_model_config c;
    dray_engine_quant *quant = NULL;
    dray_layout *layout = NULL;
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    MUST(fd >= 0 && write(fd, data, size) == (ssize_t)size);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    dray_engine_quant_load(path, &quant, NULL);
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    spec.quant = quant;
    if (dray_model_config_load(path, &c, NULL) == DRAY_OK && c.layers + c.mtp_layers <= 16 &&
        c.experts <= 64 && dray_layout_engine(&c, &spec, &layout, NULL) == DRAY_OK)
        check_layout(layout);
    dray_layout_free(layout);
    dray_engine_quant_free(quant);
    close(fd);
}

/* ---- words ----------------------------------------------------------------------------------- */

/* Text without zeros, and without numbers of ranks that take long. */
static bool as_text(const uint8_t *data, size_t size, char out[TEXT_MAX])
{
    size_t digits = 0;
    if (size >= TEXT_MAX || memchr(data, 0, size))
        return false;
    for (size_t i = 0; i < size; i++) {
        digits = data[i] >= '0' && data[i] <= '9' ? digits + 1 : 0;
        if (digits > 1)
            return false;
    }
    memcpy(out, data, size);
    out[size] = 0;
    return true;
}

static void spec(const uint8_t *data, size_t size)
{
    char text[TEXT_MAX];
    dray_layout **layouts = NULL;
    uint32_t count = 0;
    if (!as_text(data, size, text) || strncmp(text, "safetensors", 11) == 0)
        return;
    if (dray_layouts_from_spec(&w.model, text, &layouts, &count, NULL) == DRAY_OK)
        MUST(count >= 1 && layouts);
    for (uint32_t i = 0; i < count; i++) {
        check_layout(layouts[i]);
        dray_layout_free(layouts[i]);
    }
    free(layouts);
}

static void name(const uint8_t *data, size_t size)
{
    char text[TEXT_MAX];
    const dray_region_info region = {.kind = DRAY_REGION_HOST, .bytes = 1 << 20};
    const int64_t shape[2] = {size ? data[0] : 1, 2048};
    uint64_t offset;
    uint32_t ndim;
    int64_t local[DRAY_MAX_DIMS];
    dray_layout *layout;
    if (size < 1 || !as_text(data + 1, size - 1, text))
        return;
    MUST(dray_layout_new(&layout, NULL) == 0);
    MUST(dray_layout_add_region(layout, &region, NULL, NULL) == 0);
    if (dray_layout_add_megatron(layout, &w.model, NULL, 0, text, DRAY_BF16, 2, shape, 0, 0, NULL))
        MUST(dray_layout_tensor_count(layout) == 0);
    uint32_t before = dray_layout_tensor_count(layout);
    if (dray_layout_add_module(layout, &w.model, text, DRAY_BF16, 0, 0, NULL, NULL, local, NULL))
        MUST(dray_layout_tensor_count(layout) == before);
    check_layout(layout);
    dray_engine_parameter(&w.model, NULL, text, &offset, &ndim, local, NULL);
    dray_layout_free(layout);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const all[KINDS])(const uint8_t *, size_t) = {
        packed_layout, packed_handle, safetensors, checkpoint, config, spec, name};
    if (!w.index[0])
        make();
    if (size)
        all[data[0] % KINDS](data + 1, size - 1);
    return 0;
}

/* ---- what it begins with --------------------------------------------------------------------- */

static void put_layouts(fuzz_put put, void *user)
{
    static const char *const specs[] = {"fsdp:8", "engine:tp=4,ep=2,quant=fp8-block,transposed=1",
                                        "engine:tp=2,ep=2,quant=nvfp4",
                                        "engine:tp=2,ep=2,quant=int4-zero,block=16"};
    dray_model_config small;
    MUST(dray_model_config_load("qwen2.5-0.5b", &small, NULL) == 0);
    small.layers = 1;
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        dray_layout **layouts;
        uint32_t count;
        void *packed;
        size_t size;
        MUST(dray_layouts_from_spec(i ? &w.model : &small, specs[i], &layouts, &count, NULL) == 0);
        MUST(dray_layout_pack(layouts[1], &packed, &size, NULL) == 0);
        dray__writer body = {0};
        dray__put_bytes(&body, (uint8_t *)packed + 32, size - 32);
        fuzz_put_kind(put, user, 0, &body);
        dray__writer_free(&body);
        free(packed);
        for (uint32_t k = 0; k < count; k++)
            dray_layout_free(layouts[k]);
        free(layouts);
    }
}

static void put_handle(fuzz_put put, void *user)
{
    dray_region *region;
    dray_handle handle = DRAY_HANDLE_INIT;
    uint8_t packed[1024];
    handle.dtype = DRAY_F32;
    handle.ndim = 2;
    handle.shape[0] = handle.shape[1] = 8;
    handle.stride[0] = 64;
    handle.stride[1] = 4;
    MUST(dray_region_alloc(DRAY_REGION_SHARED, 4096, "fuzz", &region, NULL) == 0);
    MUST(dray_handle_describe(region, &handle, NULL) == 0);
    MUST(dray_handle_pack(&handle, packed, sizeof packed, NULL) == 0);
    dray__writer body = {0};
    dray__put_bytes(&body, packed, dray_handle_packed_size());
    fuzz_put_kind(put, user, 1, &body);
    dray__writer_free(&body);
    dray_region_free(region);
}

#define SIZES                                                                                      \
    "\"vocab_size\":64,\"hidden_size\":32,\"intermediate_size\":64,\"num_hidden_layers\":2,"       \
    "\"num_attention_heads\":4"

void fuzz_seeds(fuzz_put put, void *user)
{
    static const char file[] = "\x0c\x00{\"__metadata__\":{\"k\":\"v\"},\"a\":{\"dtype\":\"F32\","
                               "\"shape\":[2,1],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"BF16\","
                               "\"shape\":[2],\"data_offsets\":[8,12]}}";
    static const struct {
        uint8_t kind;
        const char *text;
    } texts[] = {
        {3, "{\"metadata\":{\"total_size\":2},\"weight_map\":{\"t\":\"a.safetensors\"}}"},
        {4, "{\"model_type\":\"qwen3_moe\"," SIZES
            ",\"num_experts\":4,\"moe_intermediate_size\":32,\"mlp_only_layers\":[1],"
            "\"rope_parameters\":{\"rope_theta\":1e6},\"torch_dtype\":\"bfloat16\","
            "\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[8,16],"
            "\"modules_to_not_convert\":[\"model.layers.0.mlp.experts.1.up_proj\"]}}"},
        {4, "{\"model_type\":\"deepseek_v3\"," SIZES
            ",\"n_routed_experts\":4,\"moe_intermediate_size\":8,\"kv_lora_rank\":8,"
            "\"qk_nope_head_dim\":4,\"qk_rope_head_dim\":4,\"v_head_dim\":4,"
            "\"num_nextn_predict_layers\":1,\"first_k_dense_replace\":1}"},
        {5, "megatron:tp=2,pp=2,ep=2,dtype=f32,experts=packed"},
        {5, "engine:tp=4,dp=2,ep=2,redundant=4,like=vllm,draft=none"},
        {5, "fsdp1:3,orig=1"},
        {6, "\x04"
            "module.decoder.layers.1.mlp.router.weight"},
        {6, "\x04"
            "model.layers.1.mlp.experts.gate_up_proj"},
        {6, "\x04"
            "model.layers.1.mlp.experts.w13_weight"},
    };
    if (!w.index[0])
        make();
    put_layouts(put, user);
    put_handle(put, user);
    dray__writer body = {0};
    dray__put_bytes(&body, file, sizeof file - 1);
    fuzz_put_kind(put, user, 2, &body);
    dray__writer_free(&body);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        fuzz_put_text(put, user, texts[i].kind, texts[i].text);
}
