/* The memory of a benchmark's GPUs, and random values in it (bench_gpu.h). */
#include "bench/weights/bench_gpu.h"

#include "base/error.h"
#include "bench/parts/bench_model.h"
#include "bench/weights/bench_formats.h"
#include "bench/weights/bench_gpu_kernels.h"
#include "bench/weights/bench_values.h"
#include "memory/cuda_library.h"
#include "memory/region.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GPUS_MAX = 64, THREADS = 256, ROWS_MAX = 65535 };

/* ---- which GPU ------------------------------------------------------------------------------- */

uint32_t *bench_gpus_parse(bench *b, const char *text, uint32_t *count)
{
    uint32_t *gpus = bench_alloc(b, GPUS_MAX, sizeof *gpus);
    *count = 0;
    for (const char *at = text; at;) {
        char *end;
        unsigned long first = strtoul(at, &end, 10), last = first;
        bool fits = end > at && *at >= '0' && *at <= '9';
        if (fits && *end == '-') {
            const char *from = end + 1;
            last = strtoul(from, &end, 10);
            fits = end > from;
        }
        if (!fits || last < first || last - first >= GPUS_MAX - *count || (*end && *end != ','))
            bench_die(b, "GPUs '%s': numbers and ranges expected, as in 0-7 or 0,2,4-5", text);
        for (unsigned long gpu = first; gpu <= last; gpu++)
            gpus[(*count)++] = (uint32_t)gpu;
        at = *end ? end + 1 : NULL;
    }
    return gpus;
}

uint32_t bench_gpu_of(const bench_side *side, uint32_t rank, uint32_t ranks)
{
    return side->gpu_count ? side->gpus[(uint64_t)rank * side->gpu_count / ranks] : 0;
}

/* Sets `names` to the GPUs that this process may use, and returns their number. Without
 * CUDA_VISIBLE_DEVICES the names are numbers, and not all of these GPUs need exist. */
static uint32_t visible(char names[GPUS_MAX][64])
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    uint32_t count = 0;
    for (const char *at = list; at && *at && count < GPUS_MAX;) {
        size_t length = strcspn(at, ",");
        snprintf(names[count++], 64, "%.*s", (int)length, at);
        at += length + (at[length] == ',');
    }
    for (; !list && count < GPUS_MAX / 4; count++)
        snprintf(names[count], 64, "%u", count);
    return count;
}

void bench_gpu_choose(uint32_t gpu)
{
    static char names[GPUS_MAX][64];
    uint32_t count = visible(names);
    char list[GPUS_MAX * 66] = "";
    if (gpu >= count)
        return; /* opening the driver reports which GPUs there are */
    size_t used = (size_t)snprintf(list, sizeof list, "%s", names[gpu]);
    for (uint32_t i = 0; i < count; i++)
        if (i != gpu)
            used += (size_t)snprintf(list + used, sizeof list - used, ",%s", names[i]);
    setenv("CUDA_VISIBLE_DEVICES", list, 1);
}

/* ---- layouts and regions --------------------------------------------------------------------- */

int bench_layout_as(const dray_layout *layout, dray_region_kind kind, dray_layout **out,
                    dray_error *error)
{
    dray_layout *made;
    int rc = dray_layout_new(&made, error);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < dray_layout_region_count(layout) && !rc; i++) {
        dray_region_info info = *dray_layout_region(layout, i);
        info.kind = (int32_t)kind;
        rc = dray_layout_add_region(made, &info, NULL, error);
    }
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout) && !rc; t++) {
        const dray_tensor_info *tensor = dray_layout_tensor(layout, t);
        rc =
            tensor->alias_of >= 0
                ? dray_layout_add_alias(made, tensor->name, (uint32_t)tensor->alias_of, NULL, error)
                : dray_layout_add_tensor(made, tensor->name, (dray_dtype)tensor->dtype,
                                         tensor->ndim, tensor->shape, NULL, error);
    }
    for (uint32_t i = 0; i < dray_layout_block_count(layout) && !rc; i++)
        rc = dray_layout_add_block(made, dray_layout_block(layout, i), error);
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout) && !rc; t++)
        if (dray_layout_tensor(layout, t)->alias_of < 0 && dray_layout_quant(layout, t))
            rc = dray_layout_set_quant(made, t, dray_layout_quant(layout, t), error);
    if (rc)
        dray_layout_free(made);
    else
        *out = made;
    return rc;
}

/* ---- the kernels ----------------------------------------------------------------------------- */

/* The functions of NVRTC that are used (docs.nvidia.com/cuda/nvrtc). */
typedef struct nvrtc {
    int (*create)(void **program, const char *source, const char *name, int headers,
                  const char *const *texts, const char *const *names);
    int (*compile)(void *program, int count, const char *const *options);
    int (*size)(void *program, size_t *size);
    int (*get)(void *program, char *out);
} nvrtc;

static bool find_nvrtc(nvrtc *out)
{
    const char *own = getenv("DRAY_NVRTC_LIBRARY");
    const char *names[] = {own, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};
    void *library = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names && !library; i++)
        library = names[i] ? dlopen(names[i], RTLD_NOW | RTLD_LOCAL) : NULL;
    *out = (nvrtc){0};
    if (!library)
        return false;
    *(void **)&out->create = dlsym(library, "nvrtcCreateProgram");
    *(void **)&out->compile = dlsym(library, "nvrtcCompileProgram");
    *(void **)&out->size = dlsym(library, "nvrtcGetCUBINSize");
    *(void **)&out->get = dlsym(library, "nvrtcGetCUBIN");
    return out->create && out->compile && out->size && out->get;
}

static char *compile(int arch)
{
    nvrtc rtc;
    void *program;
    size_t size = 0;
    char option[40], *image = NULL;
    const char *options[] = {option};
    snprintf(option, sizeof option, "--gpu-architecture=sm_%d", arch);
    if (!find_nvrtc(&rtc) || rtc.create(&program, bench_gpu_source, "bench.cu", 0, NULL, NULL) ||
        rtc.compile(program, 1, options) || rtc.size(program, &size) || !size ||
        !(image = malloc(size)))
        return NULL;
    if (rtc.get(program, image) == 0)
        return image;
    free(image);
    return NULL;
}

void *bench_gpu_kernel(int arch, const char *name)
{
    static CUmodule module;
    const dray__cuda *cuda = dray__cuda_get(NULL);
    CUfunction function;
    char *image = cuda && !module ? compile(arch) : NULL;
    if (image && cuda->cuModuleLoadData(&module, image))
        module = NULL;
    free(image);
    return module && cuda->cuModuleGetFunction(&function, module, name) == CUDA_SUCCESS ? function
                                                                                        : NULL;
}

typedef struct kernels {
    CUfunction fill, check;
} kernels;

/* Loads the kernels of a GPU whose context is current. Returns false when they cannot be compiled
 * or loaded here. */
static bool load(const dray__cuda_device *device, kernels *out)
{
    out->check = bench_gpu_kernel(device->arch, "bench_check");
    out->fill = bench_gpu_kernel(device->arch, "bench_fill");
    return out->check && out->fill;
}

/* ---- blocks as kernels see them -------------------------------------------------------------- */

static const dray_block *block_of(const dray_layout *layout, uint32_t tensor)
{
    for (uint32_t i = 0; i < dray_layout_block_count(layout); i++)
        if (dray_layout_block(layout, i)->tensor == tensor)
            return dray_layout_block(layout, i);
    return NULL;
}

/* Adds the scales of a quantised block. Returns false when a kernel cannot use them. A kernel needs
 * two dimensions and scales of f32. All scales are taken to lie in the first block of theirs. */
static bool add_scales(const dray_layout *layout, dray_region *const *regions,
                       const dray_quant *quant, bench_gpu_block *out)
{
    const dray_block *scales = block_of(layout, quant->scales);
    if (!scales || quant->kind == DRAY_QUANT_TENSOR || out->ndim != 2 ||
        dray_layout_tensor(layout, quant->scales)->dtype != DRAY_F32)
        return false;
    out->quantised = 1;
    out->scales = dray_region_device_address(regions[scales->region]) + scales->offset;
    for (int d = 0; d < 2; d++) {
        out->cell[d] = quant->block[d];
        out->scale_start[d] = scales->start[d];
        out->scale_stride[d] = scales->stride[d];
    }
    return true;
}

/* Describes a block to the kernels. Returns false when they cannot fill or check it. */
static bool block_for(const dray_layout *layout, dray_region *const *regions, uint32_t index,
                      bool tied, dray_dtype from, bench_gpu_block *out)
{
    const dray_block *block = dray_layout_block(layout, index);
    const dray_tensor_info *t = dray_layout_tensor(layout, block->tensor);
    const dray_quant *quant = dray_layout_quant(layout, block->tensor);
    *out =
        (bench_gpu_block){.at = dray_region_device_address(regions[block->region]) + block->offset,
                          .hash = bench_hash_of(t->name, tied),
                          .ndim = (int32_t)(t->ndim ? t->ndim : 1),
                          .dtype = t->dtype,
                          .from = (int32_t)from};
    bench_values_now(&out->version, &out->every);
    for (uint32_t d = 0; d < (t->ndim ? t->ndim : 1); d++) {
        out->shape[d] = t->ndim ? t->shape[d] : 1;
        out->start[d] = t->ndim ? block->start[d] : 0;
        out->extent[d] = t->ndim ? block->extent[d] : 1;
        out->stride[d] = t->ndim ? block->stride[d] : 0;
    }
    bool floats = from >= DRAY_F32 && from <= DRAY_F16;
    if (quant && (int32_t)from != t->dtype)
        return floats && t->dtype == DRAY_F8E4M3 && add_scales(layout, regions, quant, out);
    return (int32_t)from == t->dtype || (floats && t->dtype >= DRAY_F32 && t->dtype <= DRAY_F16);
}

static uint64_t elements_of(const bench_gpu_block *block)
{
    uint64_t elements = 1;
    for (int d = 0; d < block->ndim; d++)
        elements *= (uint64_t)block->extent[d];
    return elements;
}

/* Runs a kernel over all blocks, with a thread block for every 64 Ki elements of the largest block
 * (1024 at most), and waits for it. */
static CUresult launch(const dray__cuda *cuda, CUfunction function, const bench_gpu_block *blocks,
                       uint32_t count, uint64_t wrong[2])
{
    CUdeviceptr list = 0, found = 0;
    uint64_t most = 1;
    if (!count)
        return CUDA_SUCCESS;
    for (uint32_t i = 0; i < count; i++)
        most = elements_of(&blocks[i]) > most ? elements_of(&blocks[i]) : most;
    uint64_t wide = (most + 65535) / 65536;
    unsigned x = wide < 1024 ? (unsigned)wide : 1024, y = count < ROWS_MAX ? count : ROWS_MAX;
    void *parameters[] = {&list, &count, &found};
    CUresult result = cuda->cuMemAlloc(&list, count * sizeof *blocks);
    if (!result)
        result = cuda->cuMemAlloc(&found, 2 * sizeof *wrong);
    if (!result)
        result = cuda->cuMemcpyHtoD(list, blocks, count * sizeof *blocks);
    if (!result)
        result = cuda->cuMemcpyHtoD(found, wrong, 2 * sizeof *wrong);
    if (!result)
        result = cuda->cuLaunchKernel(function, x, y, 1, THREADS, 1, 1, 0, NULL, parameters, NULL);
    if (!result)
        result = cuda->cuMemcpyDtoH(wrong, found, 2 * sizeof *wrong);
    if (list)
        cuda->cuMemFree(list);
    if (found)
        cuda->cuMemFree(found);
    return result;
}

/* ---- by way of the host ---------------------------------------------------------------------- */

/* Makes a host region of the same size, and with `read` copies the GPU's bytes into it. */
static int to_host(const dray_region *region, bool read, dray_region **out, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    int rc = cuda ? dray_region_alloc(DRAY_REGION_HOST, region->bytes, "copy", out, error)
                  : DRAY_EUNSUPPORTED;
    if (rc || !read || !region->bytes)
        return rc;
    CUresult result =
        cuda->cuMemcpyDtoH(dray_region_base(*out), region->device_address, region->bytes);
    return result ? dray__fail_cuda(error, result, "reading region %s", region->name) : DRAY_OK;
}

static int copies_of(const dray_layout *layout, dray_region *const *regions, bool read,
                     dray_region ***out, dray_error *error)
{
    uint32_t count = dray_layout_region_count(layout);
    dray_region **copies = calloc((size_t)count + 1, sizeof *copies);
    int rc = copies ? DRAY_OK : dray__nomem(error);
    double bytes = 0, there = bench_memory();
    for (uint32_t i = 0; i < count; i++)
        bytes += (double)dray_region_bytes(regions[i]);
    if (rc == DRAY_OK && bytes > 0.9 * there)
        rc = dray__fail(error, DRAY_ENOMEM,
                        "without kernels of its own (no NVRTC?) the benchmark needs %.1f GB of "
                        "host memory for a rank, %.1f are free: fewer --layers",
                        bytes / 1e9, there / 1e9);
    for (uint32_t i = 0; i < count && !rc; i++)
        rc = to_host(regions[i], read, &copies[i], error);
    *out = copies;
    return rc;
}

static void free_copies(const dray_layout *layout, dray_region **copies)
{
    for (uint32_t i = 0; copies && i < dray_layout_region_count(layout); i++)
        dray_region_free(copies[i]);
    free(copies);
}

static int fill_by_host(const dray_layout *layout, dray_region *const *regions, bool tied,
                        dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    dray_region **copies;
    int rc = copies_of(layout, regions, false, &copies, error);
    if (rc == DRAY_OK)
        bench_fill(layout, copies, tied);
    for (uint32_t i = 0; i < dray_layout_region_count(layout) && !rc; i++) {
        CUresult result = cuda->cuMemcpyHtoD(regions[i]->device_address,
                                             dray_region_base(copies[i]), regions[i]->bytes);
        if (!result) /* the copy may not be complete yet */
            result = cuda->cuCtxSynchronize();
        if (result)
            rc = dray__fail_cuda(error, result, "filling region %s", regions[i]->name);
    }
    if (rc == DRAY_OK && cuda->cuCtxSynchronize()) /* copies return before they are complete */
        rc = dray__fail(error, DRAY_ESYS, "filling a GPU");
    free_copies(layout, copies);
    return rc;
}

static int wrong_by_host(const dray_layout *layout, dray_region *const *regions, bool tied,
                         dray_layout *const *sources, uint32_t count, uint64_t *wrong,
                         const char **first, dray_error *error)
{
    dray_region **copies;
    int rc = copies_of(layout, regions, true, &copies, error);
    if (rc == DRAY_OK)
        *wrong = bench_wrong(layout, copies, tied, sources, count, first);
    free_copies(layout, copies);
    return rc;
}

/* ---- filling, poisoning, checking ------------------------------------------------------------ */

static int enter(const dray_layout *layout, dray_region *const *regions, const dray__cuda **cuda,
                 kernels *k, bool *has, dray_error *error)
{
    *cuda = dray__cuda_get(error);
    if (!*cuda)
        return DRAY_EUNSUPPORTED;
    dray__cuda_device *device = dray_layout_region_count(layout) ? regions[0]->device : NULL;
    if (!device)
        return dray__fail(error, DRAY_EINVALID, "a layout without memory on a GPU");
    int rc = dray__cuda_enter(device, error);
    if (rc == DRAY_OK)
        *has = load(device, k);
    return rc;
}

int bench_gpu_fill(const dray_layout *layout, dray_region *const *regions, bool tied,
                   dray_error *error)
{
    const dray__cuda *cuda;
    kernels k;
    bool has;
    uint32_t count = dray_layout_block_count(layout);
    uint64_t none[2] = {0, 0};
    int rc = enter(layout, regions, &cuda, &k, &has, error);
    if (rc)
        return rc;
    bench_gpu_block *blocks = calloc((size_t)count + 1, sizeof *blocks);
    for (uint32_t i = 0; i < count && blocks && has; i++) {
        const dray_block *block = dray_layout_block(layout, i);
        has = block_for(layout, regions, i, tied,
                        (dray_dtype)dray_layout_tensor(layout, block->tensor)->dtype, &blocks[i]);
    }
    if (!blocks)
        rc = dray__nomem(error);
    else if (!has)
        rc = fill_by_host(layout, regions, tied, error);
    else {
        CUresult result = launch(cuda, k.fill, blocks, count, none);
        rc = result ? dray__fail_cuda(error, result, "filling a GPU") : DRAY_OK;
    }
    free(blocks);
    dray__cuda_leave();
    return rc;
}

int bench_gpu_poison(dray_region *region, int value, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    if (!cuda)
        return DRAY_EUNSUPPORTED;
    if (!region->bytes)
        return DRAY_OK;
    int rc = dray__cuda_enter(region->device, error);
    if (rc)
        return rc;
    CUresult result = cuda->cuMemsetD8(region->device_address, (unsigned char)value, region->bytes);
    if (!result)
        result = cuda->cuCtxSynchronize();
    dray__cuda_leave();
    return result ? dray__fail_cuda(error, result, "poisoning region %s", region->name) : DRAY_OK;
}

typedef struct gpu_reader {
    const dray__cuda *cuda;
    dray_region *const *regions;
} gpu_reader;

static bool read_gpu(void *user, uint32_t region, uint64_t offset, uint64_t bytes, uint64_t *bits)
{
    const gpu_reader *r = user;
    return r->cuda->cuMemcpyDtoH(bits, r->regions[region]->device_address + offset, bytes) == 0;
}

int bench_gpu_wrong(const dray_layout *layout, dray_region *const *regions, bool tied,
                    dray_layout *const *sources, uint32_t source_count, uint64_t *wrong,
                    const char **first, dray_error *error)
{
    const dray__cuda *cuda;
    kernels k;
    bool has;
    uint32_t count = dray_layout_block_count(layout), used = 0;
    int rc = enter(layout, regions, &cuda, &k, &has, error);
    if (rc)
        return rc;
    bench_gpu_block *blocks = calloc((size_t)count + 1, sizeof *blocks);
    uint32_t *tensors = calloc((size_t)count + 1, sizeof *tensors);
    bool *scales = bench_scales_of(layout);
    uint64_t found[2] = {0, UINT64_MAX};
    for (uint32_t i = 0; i < count && blocks && tensors && has; i++) {
        uint32_t tensor = dray_layout_block(layout, i)->tensor;
        if (scales[tensor])
            continue; /* they are checked with the tensor that they scale */
        dray_dtype from =
            bench_source_dtype(dray_layout_tensor(layout, tensor), tied, sources, source_count);
        has = block_for(layout, regions, i, tied, from, &blocks[used]);
        tensors[used++] = tensor;
    }
    if (!blocks || !tensors)
        rc = dray__nomem(error);
    else if (!has)
        rc = wrong_by_host(layout, regions, tied, sources, source_count, wrong, first, error);
    else {
        CUresult result = launch(cuda, k.check, blocks, used, found);
        rc = result ? dray__fail_cuda(error, result, "looking at a GPU's memory") : DRAY_OK;
        *wrong = found[0];
        *first = found[0] ? dray_layout_tensor(layout, tensors[found[1]])->name : NULL;
        gpu_reader reader = {cuda, regions};
        if (!rc)
            *wrong +=
                bench_formats_wrong(layout, tied, sources, source_count, read_gpu, &reader, first);
    }
    free(blocks);
    free(tensors);
    free(scales);
    dray__cuda_leave();
    return rc;
}
