/* For test_kernels_python.py, which it gives the GPU's arithmetic instead of the CPU's:
 * conversions, quantisation and sums, by one job each. A request is a line of arguments that ends
 * with the size of the elements, and the elements; its answer a line with the size, and the bytes.
 * One process answers all of them, because a GPU's driver takes a second to start. */
#include "mover/cuda/cuda.h"

#include "gpu/gpu.h"
#include "mover/filter.h"
#include "mover/kernels/quant.h"

#include <poll.h>

static const dray__cuda *cu;
static dray__cuda_device *gpu;
static CUdeviceptr made[8]; /* of the request that is answered */
static int made_count;
static FILE *answer;

static void fine(int rc, const dray_error *e)
{
    if (rc) {
        fprintf(stderr, "%s\n", e->message);
        exit(1);
    }
}

static void cuda(CUresult result)
{
    if (result) {
        fprintf(stderr, "the driver says %d\n", result);
        exit(1);
    }
}

/* `size` bytes on the GPU, with what is given. */
static CUdeviceptr put(const void *data, size_t size)
{
    CUdeviceptr at;
    cuda(cu->cuMemAlloc(&at, size + 16));
    made[made_count++] = at;
    cuda(data ? cu->cuMemcpyHtoD(at, data, size) : cu->cuMemsetD8(at, 0xA5, size));
    cuda(cu->cuCtxSynchronize()); /* neither waits until the bytes are there */
    return at;
}

static int print(CUdeviceptr at, size_t size)
{
    void *data = malloc(size + 1);
    if (!data)
        return 1;
    cuda(cu->cuMemcpyDtoH(data, at, size));
    bool fully = fwrite(data, 1, size, answer) == size;
    free(data);
    return fully ? 0 : 1;
}

static dray__cuda_job *run(const dray_layout *layout, const dray__cuda_item *items, uint64_t count,
                           const dray__cuda_job_options *options)
{
    dray__cuda_job *job;
    dray_error e;
    int rc;
    fine(dray__cuda_job_new(gpu, layout, items, count, options, &job, &e), &e);
    fine(dray__cuda_job_start(job, NULL, 0, &e), &e);
    while ((rc = dray__cuda_job_poll(job, &e)) == DRAY_EAGAIN) {
        struct pollfd p = {.fd = dray__cuda_job_fd(job), .events = POLLIN};
        poll(&p, 1, 1000);
    }
    fine(rc, &e);
    return job;
}

static int run_cast(const char *from_name, const char *to_name)
{
    int32_t from = (int32_t)dray_dtype_parse(from_name), to = (int32_t)dray_dtype_parse(to_name);
    int64_t in = (int64_t)dray_dtype_size((dray_dtype)from);
    int64_t out = (int64_t)dray_dtype_size((dray_dtype)to);
    size_t size;
    uint8_t *data = filter_read(&size);
    int64_t count = (int64_t)size / in;
    dray__cuda_item item = {.copy = {.ndim = 1,
                                     .source_dtype = from,
                                     .destination_dtype = to,
                                     .extent = {count},
                                     .source_stride = {in},
                                     .destination_stride = {out}},
                            .source_base = put(data, size),
                            .destination_base = put(NULL, (size_t)(count * out))};
    dray__cuda_job_close(run(NULL, &item, 1, NULL));
    free(data);
    return print(item.destination_base, (size_t)(count * out));
}

static int64_t dense(uint32_t ndim, const int64_t *extent, int64_t size, int64_t *stride)
{
    int64_t step = size;
    for (uint32_t d = ndim; d-- > 0; step *= extent[d])
        stride[d] = step;
    return step;
}

static int run_sum(char **arguments)
{
    int64_t shape[DRAY_MAX_DIMS];
    dray__cuda_item item = {.copy = {.ndim = 1, .extent = {1}}};
    dray_copy *c = &item.copy;
    c->source_dtype = c->destination_dtype = (int32_t)dray_dtype_parse(arguments[0]);
    uint32_t ndim = filter_numbers(arguments[1], shape);
    filter_numbers(arguments[2], c->start);
    filter_numbers(arguments[3], c->extent);
    c->ndim = ndim ? ndim : 1;
    dense(c->ndim, c->extent, (int64_t)dray_dtype_size((dray_dtype)c->source_dtype),
          c->source_stride);
    size_t size;
    uint8_t *data = filter_read(&size);
    dray_layout *layout;
    dray_error e;
    fine(dray_layout_new(&layout, &e), &e);
    fine(dray_layout_add_tensor(layout, "t", (dray_dtype)c->source_dtype, ndim, shape, NULL, &e),
         &e);
    item.source_base = put(data, size);
    dray__cuda_job_options options = {.sums = DRAY__CUDA_SUM_SOURCE};
    dray__cuda_job *job = run(layout, &item, 1, &options);
    fprintf(answer, "%llu\n",
            (unsigned long long)dray__cuda_job_sums(job, DRAY__CUDA_SUM_SOURCE)[0]);
    dray__cuda_job_close(job);
    dray_layout_free(layout);
    free(data);
    return 0;
}

static int run_quantise(char **arguments)
{
    uint32_t ndim;
    dray__quant_box box = filter_box(arguments, &ndim);
    int64_t first[DRAY_MAX_DIMS], cells[DRAY_MAX_DIMS];
    int64_t size = (int64_t)dray_dtype_size((dray_dtype)box.dtype);
    size_t scale_bytes = 4 * dray__quant_cells(&box, first, cells), bytes;
    uint8_t *values = filter_read(&bytes);
    size_t elements = bytes / (size_t)size;
    CUdeviceptr floats = put(values, bytes), scales = put(NULL, scale_bytes);
    CUdeviceptr quantised = put(NULL, elements);
    dray__cuda_quant q[2] = {
        {.kind = DRAY_TRANSFORM_QUANTISE, .source = floats, .destination = quantised},
        {.kind = DRAY_TRANSFORM_DEQUANTISE,
         .source = quantised,
         .destination = floats,
         .phase = 1}};
    for (int i = 0; i < 2; i++) {
        q[i].dtype = box.dtype;
        q[i].quant_dtype = box.quant_dtype;
        q[i].scale_format = atoi(arguments[2]);
        q[i].ndim = ndim;
        q[i].scales = scales;
        memcpy(q[i].start, box.start, sizeof box.start);
        memcpy(q[i].extent, box.extent, sizeof box.extent);
        memcpy(q[i].cell, box.cell, sizeof box.cell);
        dense(ndim, box.extent, i ? 1 : size, q[i].source_stride);
        dense(ndim, box.extent, i ? size : 1, q[i].destination_stride);
        dense(ndim, cells, 4, q[i].scale_stride);
    }
    dray__cuda_job_options options = {.quants = q, .quant_count = 2};
    dray__cuda_job_close(run(NULL, NULL, 0, &options));
    free(values);
    return print(scales, scale_bytes) || print(quantised, elements) || print(floats, bytes);
}

static int run_request(int count, char **words)
{
    if (count == 7 && strcmp(words[0], "quantise") == 0)
        return run_quantise(words + 1);
    if (count == 4 && strcmp(words[0], "cast") == 0)
        return run_cast(words[2], words[3]);
    return count == 5 && strcmp(words[0], "sum") == 0 ? run_sum(words + 1) : 2;
}

static int answer_one(char *line)
{
    char *words[9], *bytes = NULL;
    size_t size;
    int count = 0;
    line[strcspn(line, "\n")] = 0;
    while (line && count < 9) /* a word may be empty */
        words[count++] = strsep(&line, " ");
    answer = open_memstream(&bytes, &size);
    if (!answer)
        return 2;
    filter_size = (size_t)strtoull(words[count - 1], NULL, 10);
    int rc = run_request(count - 1, words);
    fclose(answer);
    while (made_count)
        cuda(cu->cuMemFree(made[--made_count]));
    printf("%zu\n", size);
    bool whole = fwrite(bytes, 1, size, stdout) == size && fflush(stdout) == 0;
    free(bytes);
    return rc ? rc : !whole;
}

int main(int argc, char **argv)
{
    dray_error e;
    if (argc == 2 && strcmp(argv[1], "list") == 0) {
        puts("cuda");
        return 0;
    }
    gpu_begin(1);
    cu = dray__cuda_get(&e);
    fine(cu ? DRAY_OK : DRAY_EUNSUPPORTED, &e);
    fine(dray__cuda_device_at(0, &gpu, &e), &e);
    fine(dray__cuda_enter(gpu, &e), &e);
    char *line = NULL;
    size_t room = 0;
    int rc = 0;
    while (!rc && getline(&line, &room, stdin) > 0)
        rc = answer_one(line);
    free(line);
    return rc;
}
