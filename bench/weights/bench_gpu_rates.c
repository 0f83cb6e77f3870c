/* The rates of the links of a benchmark's GPUs, and the traffic of its updates on them
 * (bench_gpu.h). */
#include "base/error.h"
#include "bench/weights/bench_gpu.h"
#include "memory/cuda_library.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { GPUS_MAX = 64, ROUNDS = 4 };
#define BYTES ((size_t)512 << 20)
#define PINNED_BYTES ((size_t)128 << 20)

/* ---- rates, in a process of its own ---------------------------------------------------------- */

/* One GPU of the measurement. */
typedef struct gpu {
    dray__cuda_device *device;
    CUdeviceptr from, to;
    CUstream stream;
    CUevent begin, end;
    void *pinned;
} gpu;

/* The result, which the parent reads. */
typedef struct answer {
    bench_gpu_rates rates;
    char message[DRAY_ERROR_MESSAGE_MAX];
} answer;

static CUresult prepare(const dray__cuda *cuda, gpu *g, size_t bytes)
{
    CUresult result = cuda->cuMemAlloc(&g->from, bytes);
    if (!result)
        result = cuda->cuMemAlloc(&g->to, bytes);
    if (!result)
        result = cuda->cuMemsetD8(g->from, 0x5B, bytes);
    if (!result)
        result = cuda->cuStreamCreate(&g->stream, CU_STREAM_NON_BLOCKING);
    if (!result)
        result = cuda->cuEventCreate(&g->begin, CU_EVENT_DEFAULT);
    if (!result)
        result = cuda->cuEventCreate(&g->end, CU_EVENT_DEFAULT);
    return result;
}

/* Enqueues one copy of GPU i of `count`. */
typedef CUresult (*copy_fn)(const dray__cuda *cuda, gpu *gpus, uint32_t i, uint32_t count,
                            size_t bytes);

static CUresult copy_link(const dray__cuda *cuda, gpu *gpus, uint32_t i, uint32_t count,
                          size_t bytes)
{
    uint32_t peer = i ^ 1;
    if (i & 1 || peer >= count)
        return CUDA_SUCCESS;
    return cuda->cuMemcpyAsync(gpus[i].to, gpus[peer].from, bytes, gpus[i].stream);
}

static CUresult copy_local(const dray__cuda *cuda, gpu *gpus, uint32_t i, uint32_t count,
                           size_t bytes)
{
    (void)count;
    return cuda->cuMemcpyDtoDAsync(gpus[i].to, gpus[i].from, bytes, gpus[i].stream);
}

static CUresult copy_pinned(const dray__cuda *cuda, gpu *gpus, uint32_t i, uint32_t count,
                            size_t bytes)
{
    (void)count;
    return cuda->cuMemcpyHtoDAsync(gpus[i].to, gpus[i].pinned, bytes, gpus[i].stream);
}

/* The parameters of a measurement: its GPUs, the bytes of a copy, and the number of repeats. */
typedef struct sampling {
    const uint32_t *list;
    uint32_t count, repeats;
    size_t bytes;
} sampling;

/* Returns the median bytes/s of all GPUs and repeats. All GPUs copy at the same time. 0 when
 * nothing was measured. */
static double rate_of(const dray__cuda *cuda, gpu *gpus, const sampling *p, size_t bytes,
                      copy_fn copy, CUresult *result)
{
    uint32_t used = 0, count = p->count;
    double *rates = calloc((size_t)count * p->repeats, sizeof *rates);
    if (!rates)
        *result = CUDA_ERROR_OUT_OF_MEMORY;
    /* The first turn is not counted. */
    for (uint32_t turn = 0; turn <= p->repeats && !*result; turn++) {
        for (uint32_t i = 0; i < count && !*result; i++) {
            cuda->cuCtxSetCurrent(gpus[i].device->context);
            *result = cuda->cuEventRecord(gpus[i].begin, gpus[i].stream);
            for (int round = 0; round < ROUNDS && !*result; round++)
                *result = copy(cuda, gpus, i, count, bytes);
            if (!*result)
                *result = cuda->cuEventRecord(gpus[i].end, gpus[i].stream);
        }
        for (uint32_t i = 0; i < count && !*result; i++) {
            float ms = 0;
            *result = cuda->cuStreamSynchronize(gpus[i].stream);
            if (!*result)
                *result = cuda->cuEventElapsedTime(&ms, gpus[i].begin, gpus[i].end);
            bool took_part = copy != copy_link || (!(i & 1) && i + 1 < count);
            if (!*result && turn && took_part && ms > 0)
                rates[used++] = ROUNDS * (double)bytes / ((double)ms * 1e-3);
        }
    }
    double rate = used && !*result ? bench_percentile(rates, used, 0.5) : 0;
    free(rates);
    return rate;
}

static int open_gpus(const dray__cuda *cuda, gpu *gpus, const uint32_t *list, uint32_t count,
                     size_t bytes, dray_error *error)
{
    for (uint32_t i = 0; i < count; i++) {
        int rc = dray__cuda_device_at((int)list[i], &gpus[i].device, error);
        if (rc == DRAY_OK)
            rc = dray__cuda_enter(gpus[i].device, error);
        if (rc)
            return rc;
        CUresult result = prepare(cuda, &gpus[i], bytes);
        dray__cuda_leave();
        if (result)
            return dray__fail_cuda(error, result, "%zu bytes on %s", bytes, gpus[i].device->name);
    }
    for (uint32_t i = 0; i + 1 < count; i += 2) {
        dray__cuda_enter(gpus[i].device, error);
        CUresult result = cuda->cuCtxEnablePeerAccess(gpus[i + 1].device->context, 0);
        dray__cuda_leave();
        if (result && result != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
            return dray__fail_cuda(error, result, "access from %s to its peer",
                                   gpus[i].device->name);
    }
    return DRAY_OK;
}

static int measure(const sampling *p, bench_gpu_rates *out, dray_error *error)
{
    static gpu gpus[GPUS_MAX];
    const dray__cuda *cuda = dray__cuda_get(error);
    CUresult result = CUDA_SUCCESS;
    int rc = cuda ? open_gpus(cuda, gpus, p->list, p->count, p->bytes, error) : DRAY_EUNSUPPORTED;
    if (rc)
        return rc;
    out->link = rate_of(cuda, gpus, p, p->bytes, copy_link, &result);
    out->local = rate_of(cuda, gpus, p, p->bytes, copy_local, &result);
    size_t pinned = p->bytes < PINNED_BYTES ? p->bytes : PINNED_BYTES;
    for (uint32_t i = 0; i < p->count && !result; i++) {
        gpus[i].pinned =
            mmap(NULL, pinned, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (gpus[i].pinned == MAP_FAILED)
            return dray__fail(error, DRAY_ENOMEM, "%zu bytes of host memory", pinned);
        memset(gpus[i].pinned, 0x3C, pinned);
        cuda->cuCtxSetCurrent(gpus[i].device->context);
        result = cuda->cuMemHostRegister(gpus[i].pinned, pinned, CU_MEMHOSTREGISTER_PORTABLE);
    }
    out->pinned = rate_of(cuda, gpus, p, pinned, copy_pinned, &result);
    return result ? dray__fail_cuda(error, result, "measuring links") : DRAY_OK;
}

/* Sets `list` to the GPUs of both sides, each once, in ascending order. Returns their number. */
static uint32_t gpus_of(const bench_cluster_options *o, uint32_t *list)
{
    bool used[GPUS_MAX] = {false};
    uint32_t count = 0;
    const bench_side *sides[] = {&o->from, &o->to};
    for (int s = 0; s < 2; s++) {
        for (uint32_t i = 0; i < sides[s]->gpu_count; i++)
            if (sides[s]->gpus[i] < GPUS_MAX)
                used[sides[s]->gpus[i]] = true;
        used[0] |= sides[s]->gpu_count == 0;
    }
    for (uint32_t i = 0; i < GPUS_MAX; i++)
        if (used[i])
            list[count++] = i;
    return count;
}

bench_gpu_rates bench_gpu_measure(bench *b, const bench_cluster_options *o)
{
    uint32_t list[GPUS_MAX], count = gpus_of(o, list);
    int status = 0;
    answer *a = bench_shared(b, sizeof *a);
    bench_doing(b, "what the links of %u GPUs carry", count);
    pid_t pid = bench_fork(b);
    if (pid == 0) {
        dray_error error = {0};
        const sampling p = {list, count, bench_repeats(b), bench_quick(b) ? BYTES / 64 : BYTES};
        if (measure(&p, &a->rates, &error))
            snprintf(a->message, sizeof a->message, "%s", error.message);
        _exit(0);
    }
    if (waitpid(pid, &status, 0) != pid || status || a->message[0])
        bench_die(b, "GPUs: %s", a->message[0] ? a->message : "the measurement ended early");
    bench_gpu_rates rates = a->rates;
    munmap(a, sizeof *a);
    return rates;
}

/* ---- the limit ------------------------------------------------------------------------------- */

/* The bytes that pass through the links of one GPU, and that its memory reads and writes. */
typedef struct traffic {
    double in, out, memory, pinned;
} traffic;

/* The bytes of a copy: those that it reads, sends over a link, and writes. */
typedef struct amount {
    double read, carried, written;
} amount;

static double bytes_of(const dray_copy *copy, int32_t dtype)
{
    double bytes = (double)dray_dtype_size((dray_dtype)dtype);
    for (uint32_t d = 0; d < copy->ndim; d++)
        bytes *= (double)copy->extent[d];
    return bytes;
}

/* Returns the bytes of a copy. A conversion to a smaller dtype comes before the link. */
static amount amount_of(const dray_copy *copy, int32_t dtype)
{
    double from = bytes_of(copy, copy->source_dtype), to = bytes_of(copy, dtype);
    return (amount){.read = from, .carried = from < to ? from : to, .written = to};
}

/* Returns the bytes of a read of a transform. In a packed format, an element stands for several. A
 * transform that only finds the largest element has no dtype of its own, so that it sends and
 * writes nothing. */
static amount made_of(const dray_copy *read, const dray_transform *transform)
{
    static const double per[] = {[DRAY_QUANT_MXFP4] = 2,
                                 [DRAY_QUANT_NVFP4] = 2,
                                 [DRAY_QUANT_INT4] = 8,
                                 [DRAY_QUANT_INT4_ZERO] = 8};
    bool packed = transform->quant_kind >= DRAY_QUANT_MXFP4;
    amount bytes = amount_of(read, transform->quant_dtype);
    bytes.written /= packed ? per[transform->quant_kind] : 1;
    bytes.carried = bytes.read < bytes.written ? bytes.read : bytes.written;
    return bytes;
}

static void enter(const bench_cluster_options *o, traffic *of, uint32_t source, uint32_t to,
                  amount bytes)
{
    uint32_t from = bench_gpu_of(&o->from, source, o->from.count);
    double engines = o->engines ? o->engines : 1;
    of[to].memory += bytes.written;
    if (o->pinned) { /* each byte is read once for all engines; the other copies come from GPUs */
        of[to].pinned += bytes.carried / engines;
        of[to].in += bytes.carried - bytes.carried / engines;
        of[to].out += bytes.carried - bytes.carried / engines;
        return;
    }
    of[from].memory += bytes.read;
    if (from != to) {
        of[from].out += bytes.carried;
        of[to].in += bytes.carried;
    }
}

static void enter_plan(const bench_cluster_options *o, const dray_plan *plan, uint32_t to,
                       traffic *of)
{
    const dray_copy *copies = dray_plan_copies(plan), *reads = dray_plan_reads(plan);
    for (uint64_t i = 0; i < dray_plan_count(plan); i++)
        enter(o, of, copies[i].source, to, amount_of(&copies[i], copies[i].destination_dtype));
    for (uint64_t t = 0; t < dray_plan_transform_count(plan); t++) {
        const dray_transform *transform = &dray_plan_transforms(plan)[t];
        for (uint64_t r = 0; r < transform->reads; r++) {
            const dray_copy *read = &reads[transform->first_read + r];
            enter(o, of, read->source, to, made_of(read, transform));
        }
    }
}

static void plan_rank(bench *b, const bench_cluster_options *o, const dray_plan_member *members,
                      uint32_t number, traffic *of)
{
    uint32_t engines = o->engines ? o->engines : 1;
    uint32_t on = bench_gpu_of(&o->to, number, engines * o->to.count);
    dray_plan_member self = {.layout = o->to.layouts[number % o->to.count],
                             .member = 1000 + number,
                             .host = 1,
                             .process = 1000 + number,
                             .device = 1 + on};
    dray_plan *plan;
    BENCH_MUST(b, dray_plan_new(members, o->from.count, &self, NULL, &plan, error));
    enter_plan(o, plan, on, of);
    dray_plan_free(plan);
}

double bench_gpu_limit(bench *b, const bench_cluster_options *o, const bench_gpu_rates *rates,
                       const char **how)
{
    traffic of[GPUS_MAX] = {{0}};
    uint32_t engines = o->engines ? o->engines : 1;
    dray_plan_member *members = bench_alloc(b, o->from.count, sizeof *members);
    for (uint32_t i = 0; i < o->from.count; i++)
        members[i] = (dray_plan_member){
            .layout = o->from.layouts[i],
            .member = 1 + i,
            .host = 1,
            .process = 1 + i,
            .device = o->pinned ? 0 : 1 + bench_gpu_of(&o->from, i, o->from.count)};
    for (uint32_t number = 0; number < engines * o->to.count; number++)
        plan_rank(b, o, members, number, of);
    free(members);
    double most = 0;
    *how = "nothing";
    for (uint32_t g = 0; g < GPUS_MAX; g++) {
        const struct {
            const char *name;
            double bytes, rate;
        } parts[] = {{"link in", of[g].in, rates->link},
                     {"link out", of[g].out, rates->link},
                     /* A copy within a GPU reads and writes each byte. */
                     {"memory", of[g].memory, 2 * rates->local},
                     {"pinned memory", of[g].pinned, rates->pinned}};
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
            if (parts[i].rate > 0 && parts[i].bytes / parts[i].rate > most) {
                most = parts[i].bytes / parts[i].rate;
                *how = parts[i].name;
            }
    }
    return most;
}

double bench_gpu_commit_limit(const bench_cluster_options *o, const bench_gpu_rates *rates,
                              const char **how)
{
    double of[GPUS_MAX] = {0}, most = 0;
    uint32_t ranks = (o->engines ? o->engines : 1) * o->to.count;
    for (uint32_t number = 0; number < ranks; number++) {
        double *bytes = &of[bench_gpu_of(&o->to, number, ranks)];
        *bytes += (double)dray_layout_bytes(o->to.layouts[number % o->to.count]);
        most = *bytes > most ? *bytes : most;
    }
    bool pinned = o->prefetch_into == DRAY_REGION_PINNED;
    *how = pinned ? "pinned memory" : "local copy";
    double rate = pinned ? rates->pinned : rates->local;
    return rate > 0 ? most / rate : 0;
}
