/* Tests the mover on a GPU, or on the fake driver, which runs the same kernels as C. Random
 * rectangles of random bits, with gaps, transposed, misaligned, converted or not, by kernel and by
 * copy engines, become the same bits as with the CPU's movers, also between the rectangles. The
 * sums equal those of dray__sum. */
#include "cuda_memory.h"

#include "gpu/gpu.h"
#include "mover/kernels/kernels.h"
#include "mover/kernels/quant.h"
#include "mover/kernels/rect.h"
#include "mover/mover.h"

#include <dray/gpu.h>
#include <math.h>
#include <stdint.h>
#include <time.h>

/* ---- random rectangles ----------------------------------------------------------------------- */

enum { MOST_ITEMS = 6, MOST_ELEMENTS = 24 << 10 };

typedef struct side {
    int64_t stride[DRAY_MAX_DIMS];
    uint64_t offset, bytes;
} side;

/* Dimensions lie in memory in any order, with gaps, from any byte on. */
static side random_side(uint32_t ndim, const int64_t *extent, int64_t size, bool plain)
{
    side s = {.offset = plain ? 16 * draw(4) : draw(3) ? (uint64_t)size * draw(20) : draw(40)};
    uint32_t order[DRAY_MAX_DIMS] = {0, 1, 2, 3};
    int64_t step = size;
    for (uint32_t d = ndim; d-- > 1 && !plain && draw(3) == 0;) {
        uint32_t other = (uint32_t)draw(d + 1), was = order[d];
        order[d] = order[other];
        order[other] = was;
    }
    for (uint32_t i = ndim; i-- > 0;) {
        uint32_t d = order[i];
        s.stride[d] = step;
        step *= extent[d];
        if (plain) {
            step = (step + 15) & ~(int64_t)15;
            if (i == ndim - 1 && draw(2))
                step += 16 * (int64_t)draw(4);
        } else if (draw(4) == 0) {
            step += (int64_t)draw(3) ? size * (int64_t)draw(9) : (int64_t)draw(9);
        }
        if (i == ndim - 1 && !plain && draw(8) == 0) { /* not even the innermost is dense */
            s.stride[d] = 2 * size;
            step = 2 * size * extent[d];
        }
    }
    s.bytes = s.offset + (uint64_t)step + 16;
    return s;
}

static int32_t random_dtype(void)
{
    return (int32_t)(1 + draw(15));
}

typedef struct test_item {
    dray_copy copy;
    const int64_t *shape;
    side from, to;
    both source, destination;
    bool sink;
} test_item;

static void random_item(test_item *t, dray_layout *layout, uint32_t number)
{
    dray_error e = {0};
    char name[32];
    int64_t shape[DRAY_MAX_DIMS];
    uint32_t ndim = 1 + (uint32_t)draw(4);
    bool plain = draw(2), casts = draw(2);
    int64_t left = MOST_ELEMENTS, edge = draw(3) ? 4096 : 40;
    dray_copy *c = &t->copy;
    *t = (test_item){.sink = draw(6) == 0};
    c->ndim = ndim;
    c->tensor = number;
    c->source_dtype = casts ? (int32_t)(1 + draw(6)) : random_dtype();
    c->destination_dtype = casts ? (int32_t)(1 + draw(6)) : c->source_dtype;
    for (uint32_t d = ndim; d-- > 0;) {
        int64_t most = left < edge ? left : edge;
        c->extent[d] = 1 + (int64_t)draw((uint64_t)(draw(2) ? most : (most + 15) / 16));
        if (plain && d == ndim - 1 && c->extent[d] > 16)
            c->extent[d] &= ~(int64_t)15;
        left /= c->extent[d];
        left = left ? left : 1;
        c->start[d] = (int64_t)draw(200);
        shape[d] = c->start[d] + c->extent[d] + (int64_t)draw(100);
    }
    snprintf(name, sizeof name, "t%u", number);
    assert_int_equal(dray_layout_add_tensor(layout, name, (dray_dtype)c->destination_dtype, ndim,
                                            shape, NULL, &e),
                     DRAY_OK);
    t->from =
        random_side(ndim, c->extent, (int64_t)dray_dtype_size((dray_dtype)c->source_dtype), plain);
    t->to = random_side(ndim, c->extent, (int64_t)dray_dtype_size((dray_dtype)c->destination_dtype),
                        plain);
    memcpy(c->source_stride, t->from.stride, sizeof c->source_stride);
    memcpy(c->destination_stride, t->to.stride, sizeof c->destination_stride);
    c->source_offset = t->from.offset;
    c->destination_offset = t->to.offset;
    t->source = both_new(t->from.bytes);
    t->destination = both_new(t->to.bytes);
}

/* What the CPU makes of it, in the host's copy of the destination. */
static void expect(test_item *t)
{
    const dray_copy *c = &t->copy;
    dray__rect_copy r = {.ndim = c->ndim,
                         .from = c->source_dtype,
                         .to = c->destination_dtype,
                         .source = t->source.host + c->source_offset,
                         .destination = t->destination.host + c->destination_offset};
    memcpy(r.extent, c->extent, sizeof r.extent);
    memcpy(r.source_stride, c->source_stride, sizeof r.source_stride);
    memcpy(r.destination_stride, c->destination_stride, sizeof r.destination_stride);
    if (!t->sink)
        dray__rect_move(&r);
}

static uint64_t sum_of(const test_item *t, const dray_layout *layout, bool destination)
{
    const dray_copy *c = &t->copy;
    dray__sum_of of = {.dtype = destination ? c->destination_dtype : c->source_dtype,
                       .ndim = c->ndim,
                       .shape = dray_layout_tensor(layout, c->tensor)->shape,
                       .start = c->start,
                       .extent = c->extent,
                       .stride = destination ? c->destination_stride : c->source_stride,
                       .data = destination ? t->destination.host + c->destination_offset
                                           : t->source.host + c->source_offset};
    return dray__sum(&of);
}

static const char *describe(const test_item *t)
{
    static char text[512];
    const dray_copy *c = &t->copy;
    int n =
        snprintf(text, sizeof text,
                 "%s -> %s%s, offsets %llu %llu:", dray_dtype_name((dray_dtype)c->source_dtype),
                 dray_dtype_name((dray_dtype)c->destination_dtype), t->sink ? " (sums)" : "",
                 (unsigned long long)c->source_offset, (unsigned long long)c->destination_offset);
    for (uint32_t d = 0; d < c->ndim; d++)
        n += snprintf(text + n, sizeof text - (size_t)n, " %lld (%lld, %lld)",
                      (long long)c->extent[d], (long long)c->source_stride[d],
                      (long long)c->destination_stride[d]);
    return text;
}

static void check_sums(const dray__cuda_job *job, test_item *t, uint32_t i, uint32_t wanted,
                       const dray_layout *layout)
{
    static const struct {
        uint32_t which;
        bool destination;
    } kinds[] = {{DRAY__CUDA_SUM_SOURCE, false},
                 {DRAY__CUDA_SUM_WRITTEN, true},
                 {DRAY__CUDA_SUM_BACK, true}};
    for (int k = 0; k < 3; k++) {
        const uint64_t *sums = dray__cuda_job_sums(job, kinds[k].which);
        assert_int_equal(sums != NULL, (wanted & kinds[k].which) != 0);
        if (!sums || (t->sink && kinds[k].destination))
            continue;
        uint64_t expected = sum_of(t, layout, kinds[k].destination);
        if (sums[i] != expected)
            fail_msg("%s: sum %u is %016llx, expected %016llx", describe(t), kinds[k].which,
                     (unsigned long long)sums[i], (unsigned long long)expected);
    }
}

static void one_round(uint32_t wanted)
{
    test_item tests[MOST_ITEMS];
    dray__cuda_item items[MOST_ITEMS];
    uint32_t count = 1 + (uint32_t)draw(MOST_ITEMS);
    dray_layout *layout;
    dray_error e = {0};
    assert_int_equal(dray_layout_new(&layout, &e), DRAY_OK);
    for (uint32_t i = 0; i < count; i++) {
        random_item(&tests[i], layout, i);
        items[i] =
            (dray__cuda_item){.copy = tests[i].copy,
                              .source_base = tests[i].source.device,
                              .destination_base = tests[i].sink ? 0 : tests[i].destination.device,
                              .lane = (uint32_t)draw(3),
                              .phase = (uint32_t)draw(3),
                              .host = draw(4) == 0};
    }
    dray__cuda_job_options options = {.sums = wanted,
                                      .ctas = draw(2) ? 0 : 1 + (uint32_t)draw(40),
                                      .engine_bytes = draw(2) ? 0 : 1 + draw(4096),
                                      .launch_bytes = draw(2) ? 0 : 1 + draw(1 << 16)};
    dray__cuda_job *job;
    done(NULL, &e, dray__cuda_job_new(gpu, layout, items, count, &options, &job, &e));
    for (int again = 0; again < 2; again++) {
        done(job, &e, run(job, &e));
        for (uint32_t i = 0; i < count; i++) {
            expect(&tests[i]);
            both_agree(&tests[i].destination, describe(&tests[i]));
            check_sums(job, &tests[i], i, wanted, layout);
        }
    }
    dray__cuda_job_close(job);
    for (uint32_t i = 0; i < count; i++) {
        both_free(&tests[i].source);
        both_free(&tests[i].destination);
    }
    dray_layout_free(layout);
}

TEST(test_random_rectangles)
{
    for (int i = 0; i < test_times(150); i++)
        one_round((uint32_t)draw(8));
}

/* Sums of a region, at once, without a job. */
TEST(test_sums_of_regions)
{
    for (int i = 0; i < test_times(20); i++) {
        dray_layout *layout;
        dray_error e = {0};
        dray_region *region;
        test_item t;
        done(NULL, &e, dray_layout_new(&layout, &e));
        random_item(&t, layout, 0);
        done(NULL, &e, dray_region_wrap_cuda(t.source.device, t.source.bytes, "test", &region, &e));
        dray__sum_of of = {.dtype = t.copy.source_dtype,
                           .ndim = t.copy.ndim,
                           .shape = dray_layout_tensor(layout, 0)->shape,
                           .start = t.copy.start,
                           .extent = t.copy.extent,
                           .stride = t.copy.source_stride};
        dray__sum_part part = {t.copy.source_offset, of};
        uint64_t sum = 0;
        done(NULL, &e, dray__sum_region(region, &part, 1, &sum, &e));
        if (sum != sum_of(&t, layout, false))
            fail_msg("%s: another sum", describe(&t));
        dray_region_free(region);
        both_free(&t.source);
        both_free(&t.destination);
        dray_layout_free(layout);
    }
}

/* ---- phases, events, errors ------------------------------------------------------------------ */

static dray__cuda_item run_item(CUdeviceptr from, CUdeviceptr to, int64_t bytes, uint32_t phase)
{
    return (dray__cuda_item){.copy = {.ndim = 2,
                                      .source_dtype = DRAY_U8,
                                      .destination_dtype = DRAY_U8,
                                      .extent = {bytes / 64, 64},
                                      .source_stride = {64, 1},
                                      .destination_stride = {64, 1}},
                             .source_base = from,
                             .destination_base = to,
                             .phase = phase};
}

/* A chain of copies, by turns by kernel and by engines. */
TEST(test_phases_follow_each_other)
{
    enum { LINKS = 6, BYTES = 4 << 20 };
    both b[LINKS + 1];
    dray__cuda_item items[LINKS];
    dray_error e = {0};
    for (int i = 0; i <= LINKS; i++)
        b[i] = both_new(BYTES);
    for (int i = 0; i < LINKS; i++) {
        items[LINKS - 1 - i] = run_item(b[i].device, b[i + 1].device, BYTES, (uint32_t)i);
        items[LINKS - 1 - i].copy.source_stride[1] = 1;
        if (i % 2) /* no run that is long enough for an engine */
            items[LINKS - 1 - i].copy.extent[1] = 63;
    }
    for (int i = 0; i < LINKS; i++)
        for (int64_t k = 0; k < BYTES; k++)
            if (i % 2 == 0 || k % 64 != 63)
                b[i + 1].host[k] = b[i].host[k];
    dray__cuda_job_options options = {.engine_bytes = 1 << 20};
    dray__cuda_job *job;
    done(NULL, &e, dray__cuda_job_new(gpu, NULL, items, LINKS, &options, &job, &e));
    done(job, &e, run(job, &e));
    for (int i = 0; i <= LINKS; i++)
        both_agree(&b[i], "chain");
    dray__cuda_job_times times;
    dray__cuda_job_times_of(job, &times);
    assert_int_equal(times.engine_bytes, LINKS / 2 * BYTES);
    assert_int_equal(times.kernel_bytes, LINKS / 2 * BYTES / 64 * 63);
    dray__cuda_job_close(job);
    for (int i = 0; i <= LINKS; i++)
        both_free(&b[i]);
}

TEST(test_stopped_jobs_say_so)
{
    enum { BYTES = 8 << 20 };
    both from = both_new(BYTES), to = both_new(BYTES);
    dray__cuda_item item = run_item(from.device, to.device, BYTES, 0);
    dray__cuda_job_options options = {
        .ctas = 1, .launch_bytes = 1 << 20, .engine_bytes = UINT64_MAX};
    dray__cuda_job *job;
    dray_error e = {0};
    done(NULL, &e, dray__cuda_job_new(gpu, NULL, &item, 1, &options, &job, &e));
    assert_int_equal(dray__cuda_job_poll(job, &e), DRAY_EINVALID);
    done(job, &e, dray__cuda_job_start(job, NULL, 0, &e));
    assert_int_equal(dray__cuda_job_start(job, NULL, 0, &e), DRAY_EBUSY);
    dray__cuda_job_abort(job);
    int rc;
    while ((rc = dray__cuda_job_poll(job, &e)) == DRAY_EAGAIN)
        ;
    assert_int_equal(rc, DRAY_ECANCELED);
    done(job, &e, run(job, &e)); /* as if nothing had been */
    memcpy(to.host, from.host, BYTES);
    both_agree(&to, "after a stop");
    done(job, &e, dray__cuda_job_start(job, NULL, 0, &e));
    dray__cuda_job_close(job); /* under way */
    both_free(&from);
    both_free(&to);
}

/* A paced job moves what it was told to, launch by launch, and no more; what is stopped ends, with
 * launches that the GPU never got. */
TEST(test_paced_jobs_move_what_is_due)
{
    enum { BYTES = 4 << 20, LAUNCH_BYTES = 1 << 20 };
    both from = both_new(BYTES), to = both_new(BYTES);
    dray__cuda_item item = run_item(from.device, to.device, BYTES, 0);
    dray__cuda_job_options options = {.launch_bytes = LAUNCH_BYTES, .paced = true};
    dray__cuda_job *job;
    dray__cuda_job_times times;
    dray_error e = {0};
    done(NULL, &e, dray__cuda_job_new(gpu, NULL, &item, 1, &options, &job, &e));
    uint64_t launches = dray__cuda_job_launch_count(job);
    assert_int_equal(launches, BYTES / LAUNCH_BYTES);
    done(job, &e, dray__cuda_job_start(job, NULL, 0, &e));
    for (uint64_t i = 0; i < launches; i++) {
        dray__cuda_job_times_of(job, &times);
        assert_int_equal(times.launches, i);
        assert_int_equal(dray__cuda_job_poll(job, &e), DRAY_EAGAIN);
        done(job, &e, dray__cuda_job_release(job, 1, &e));
    }
    done(job, &e, dray__cuda_job_wait(job, INT64_MAX, &e));
    memcpy(to.host, from.host, BYTES);
    both_agree(&to, "all launches");
    done(job, &e, dray__cuda_job_start(job, NULL, 0, &e));
    done(job, &e, dray__cuda_job_release(job, 2, &e));
    dray__cuda_job_abort(job);
    assert_int_equal(dray__cuda_job_wait(job, INT64_MAX, &e), DRAY_ECANCELED);
    dray__cuda_job_times_of(job, &times);
    assert_int_equal(times.launches, 2);
    done(job, &e, dray__cuda_job_start(job, NULL, 0, &e));
    dray__cuda_job_close(job); /* nothing was released */
    both_free(&from);
    both_free(&to);
}

/* The same job with other rectangles, again and again, within its reserve and beyond it. */
TEST(test_jobs_made_anew)
{
    enum { MOST = 1024, BYTES = MOST << 10, ROUNDS = 40 };
    both from = both_new(BYTES), to = both_new(BYTES);
    dray__cuda_job_options options = {.reserve_bytes = 4096};
    dray__cuda_item *items = calloc(MOST, sizeof *items);
    dray__cuda_job *job;
    dray_error e = {0};
    uint64_t grown = 0;
    assert_non_null(items);
    done(NULL, &e, dray__cuda_job_new(gpu, NULL, NULL, 0, &options, &job, &e));
    for (int round = 0; round < ROUNDS; round++) {
        uint32_t count = round ? 1 + (uint32_t)draw(MOST) : MOST;
        memset(to.host, round, BYTES);
        CUDA(cu->cuMemcpyHtoD(to.device, to.host, BYTES));
        CUDA(cu->cuCtxSynchronize());
        for (uint32_t i = 0; i < count; i++) {
            uint64_t bytes = 64 * (1 + draw(16)), at = (uint64_t)i << 10;
            items[i] = run_item(from.device + at, to.device + at, (int64_t)bytes, 0);
            memcpy(to.host + at, from.host + at, bytes);
        }
        int rc = dray__cuda_job_remake(job, NULL, items, count, NULL, 0, false, &e);
        grown += rc == DRAY_EAGAIN;
        if (rc == DRAY_EAGAIN)
            rc = dray__cuda_job_remake(job, NULL, items, count, NULL, 0, true, &e);
        done(job, &e, rc);
        done(job, &e, run(job, &e));
        both_agree(&to, "made anew");
    }
    assert_int_equal(grown, 1); /* by the largest one, which came first */
    free(items);
    dray__cuda_job_close(job);
    done(NULL, &e, dray__cuda_job_new(gpu, NULL, NULL, 0, NULL, &job, &e));
    assert_int_equal(dray__cuda_job_remake(job, NULL, NULL, 0, NULL, 0, true, &e), DRAY_EBUSY);
    dray__cuda_job_close(job);
    both_free(&from);
    both_free(&to);
}

/* ---- a GPU that fails ------------------------------------------------------------------------ */

static void sleep_a_while(void *user)
{
    (void)user;
    usleep(50000);
}

/* Memory that may be unmapped while it is written to. */
static CUdeviceptr map(const dray__cuda_device *device, size_t bytes)
{
    const CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes =
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, device->ordinal}};
    const CUmemAccessDesc access = {prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    CUDA(cu->cuMemCreate(&handle, bytes, &prop, 0));
    CUDA(cu->cuMemAddressReserve(&at, bytes, 0, 0, 0));
    CUDA(cu->cuMemMap(at, bytes, 0, handle, 0));
    CUDA(cu->cuMemSetAccess(at, bytes, &access, 1));
    return at;
}

/* Whoever waits at the descriptor learns that what was to be moved never will be. The second GPU's
 * context is of no more use then. */
TEST(test_failed_jobs_wake)
{
    enum { BYTES = 2 << 20 };
    dray__cuda_device *other;
    const dray__cuda_job_options options = {.engine_bytes = 1}; /* what the driver sees fail */
    dray__cuda_job *job;
    dray_error e = {0};
    CUstream stream;
    CUevent late;
    if (gpu_is_real())
        skip();
    done(NULL, &e, dray__cuda_device_at(1, &other, &e));
    done(NULL, &e, dray__cuda_enter(other, &e));
    both from = both_new(BYTES);
    CUdeviceptr to = map(other, BYTES);
    CUDA(cu->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUDA(cu->cuEventCreate(&late, CU_EVENT_DISABLE_TIMING));
    dray__cuda_item item = run_item(from.device, to, BYTES, 0);
    done(NULL, &e, dray__cuda_job_new(other, NULL, &item, 1, &options, &job, &e));
    CUDA(cu->cuLaunchHostFunc(stream, sleep_a_while, NULL));
    CUDA(cu->cuEventRecord(late, stream));
    done(job, &e, dray__cuda_job_start(job, &late, 1, &e));
    CUDA(cu->cuMemUnmap(to, BYTES));
    struct pollfd p = {.fd = dray__cuda_job_fd(job), .events = POLLIN};
    assert_int_equal(poll(&p, 1, 10000), 1);
    int rc = dray__cuda_job_poll(job, &e);
    assert_true(rc && rc != DRAY_EAGAIN);
    assert_int_equal(e.raw, CUDA_ERROR_ILLEGAL_ADDRESS);
    dray__cuda_job_close(job);
    dray__cuda_leave();
    free(from.host);
}

TEST(test_wrong_items_are_refused)
{
    dray__cuda_job *job = NULL;
    dray_error e = {0};
    dray__cuda_item item = run_item(4096, 8192, 4096, 0);
    dray__cuda_job_options options = {.sums = DRAY__CUDA_SUM_BACK};
    assert_int_equal(dray__cuda_job_new(gpu, NULL, &item, 1, &options, &job, &e), DRAY_EINVALID);
    item.copy.extent[0] = 0;
    assert_int_equal(dray__cuda_job_new(gpu, NULL, &item, 1, NULL, &job, &e), DRAY_EINVALID);
    item = run_item(4096, 8192, 4096, 0);
    item.copy.destination_dtype = DRAY_BF16;
    assert_int_equal(dray__cuda_job_new(gpu, NULL, &item, 1, NULL, &job, &e), DRAY_EDTYPE);
    item = run_item(4096, 8192, 4096, 0);
    item.copy.ndim = 5;
    assert_int_equal(dray__cuda_job_new(gpu, NULL, &item, 1, NULL, &job, &e), DRAY_EINVALID);
    item = run_item(4096, 8192, 4096, 0);
    item.copy.source_stride[0] = -64;
    assert_int_equal(dray__cuda_job_new(gpu, NULL, &item, 1, NULL, &job, &e), DRAY_EINVALID);
    assert_null(job);
    done(NULL, &e, dray__cuda_job_new(gpu, NULL, NULL, 0, NULL, &job, &e));
    done(job, &e, run(job, &e)); /* nothing to do is done at once */
    dray__cuda_job_close(job);
    dray__cuda_job_close(NULL);
}

/* ---- quantisation ---------------------------------------------------------------------------- */

/* Values as weights have them, and some that they should not have. */
static void fill_values(both *b, int32_t dtype)
{
    size_t size = dray_dtype_size((dray_dtype)dtype), n = b->bytes / size;
    for (size_t i = 0; i < n; i++) {
        float f = (float)(dray__random_unit(seed, 2, drawn++) * 4 - 2);
        if (draw(4096) == 0)
            f = draw(2) ? f * 1e30f : f * 1e-30f;
        if (draw(20000) == 0)
            f = draw(2) ? INFINITY : draw(2) ? NAN : -NAN;
        if (dtype == DRAY_F32)
            memcpy(b->host + i * 4, &f, 4);
        else
            dray__cast_find(DRAY_F32, dtype)(&f, b->host + i * size, 1);
    }
    CUDA(cu->cuMemcpyHtoD(b->device, b->host, b->bytes));
    CUDA(cu->cuCtxSynchronize());
}

static int64_t dense_strides(uint32_t ndim, const int64_t *extent, int64_t size, int64_t *stride)
{
    int64_t step = size;
    for (uint32_t d = ndim; d-- > 0; step *= extent[d])
        stride[d] = step;
    return step;
}

/* Quantises a whole tensor and makes floats of it again, both as the CPU does. */
static void quant_round(uint32_t ndim, const int64_t *shape, const int64_t *cell, int32_t dtype,
                        int32_t quant_dtype, int32_t format)
{
    dray_layout *layout;
    dray_error e = {0};
    dray__quant_box box = {
        .dtype = dtype, .quant_dtype = quant_dtype, .extent = {1, 1, 1, 1}, .cell = {1, 1, 1, 1}};
    int64_t first[DRAY_MAX_DIMS], cells[DRAY_MAX_DIMS], elements = 1;
    memcpy(box.extent, shape, ndim * sizeof *shape);
    memcpy(box.cell, cell, ndim * sizeof *cell);
    for (uint32_t d = 0; d < ndim; d++)
        elements *= shape[d];
    uint64_t scales = dray__quant_cells(&box, first, cells);
    size_t size = dray_dtype_size((dray_dtype)dtype);
    both values = both_new((size_t)elements * size), bits = both_new((size_t)elements);
    both scale = both_new(scales * 4), floats = both_new((size_t)elements * size);
    fill_values(&values, dtype);
    dray__cuda_quant q[2] = {{.kind = DRAY_TRANSFORM_QUANTISE,
                              .dtype = dtype,
                              .quant_dtype = quant_dtype,
                              .scale_format = format,
                              .ndim = ndim,
                              .source = values.device,
                              .destination = bits.device,
                              .scales = scale.device},
                             {.kind = DRAY_TRANSFORM_DEQUANTISE,
                              .dtype = dtype,
                              .quant_dtype = quant_dtype,
                              .ndim = ndim,
                              .tensor = 1,
                              .source = bits.device,
                              .destination = floats.device,
                              .scales = scale.device,
                              .phase = 1}};
    for (int i = 0; i < 2; i++) {
        memcpy(q[i].extent, shape, ndim * sizeof *shape);
        memcpy(q[i].cell, cell, ndim * sizeof *cell);
        dense_strides(ndim, shape, i ? 1 : (int64_t)size, q[i].source_stride);
        dense_strides(ndim, shape, i ? (int64_t)size : 1, q[i].destination_stride);
        dense_strides(ndim, cells, 4, q[i].scale_stride);
    }
    assert_int_equal(dray_layout_new(&layout, &e), DRAY_OK);
    assert_int_equal(
        dray_layout_add_tensor(layout, "q", (dray_dtype)quant_dtype, ndim, shape, NULL, &e),
        DRAY_OK);
    assert_int_equal(dray_layout_add_tensor(layout, "f", (dray_dtype)dtype, ndim, shape, NULL, &e),
                     DRAY_OK);
    dray__cuda_job_options options = {
        .sums = 15, .quants = q, .quant_count = 2, .ctas = 1 + (uint32_t)draw(50)};
    dray__cuda_job *job;
    done(NULL, &e, dray__cuda_job_new(gpu, layout, NULL, 0, &options, &job, &e));
    done(job, &e, run(job, &e));

    uint32_t *amax = calloc(scales, sizeof *amax);
    assert_non_null(amax);
    dray__quant_most(&box, values.host, amax);
    for (uint64_t i = 0; i < scales; i++) {
        float s = dray__quant_scale(&box, amax[i], format);
        memcpy(scale.host + 4 * i, &s, 4);
    }
    dray__quantise(&box, values.host, (const float *)(const void *)scale.host, bits.host);
    dray__dequantise(&box, bits.host, (const float *)(const void *)scale.host, floats.host);
    both_agree(&scale, "scales");
    both_agree(&bits, "quantised");
    both_agree(&floats, "floats again");

    int64_t start[DRAY_MAX_DIMS] = {0};
    dray__sum_of of[4] = {
        {dtype, ndim, shape, start, shape, q[0].source_stride, values.host},
        {quant_dtype, ndim, shape, start, shape, q[0].destination_stride, bits.host},
        {dtype, ndim, shape, start, shape, q[1].destination_stride, floats.host},
        {DRAY_F32, ndim, cells, start, cells, q[0].scale_stride, scale.host}};
    assert_int_equal(dray__cuda_job_sums(job, DRAY__CUDA_SUM_SOURCE)[0], dray__sum(&of[0]));
    assert_int_equal(dray__cuda_job_sums(job, DRAY__CUDA_SUM_WRITTEN)[0], dray__sum(&of[1]));
    assert_int_equal(dray__cuda_job_sums(job, DRAY__CUDA_SUM_BACK)[0], dray__sum(&of[1]));
    assert_int_equal(dray__cuda_job_sums(job, DRAY__CUDA_SUM_SCALES)[0], dray__sum(&of[3]));
    assert_int_equal(dray__cuda_job_sums(job, DRAY__CUDA_SUM_SOURCE)[1], dray__sum(&of[1]));
    assert_int_equal(dray__cuda_job_sums(job, DRAY__CUDA_SUM_WRITTEN)[1], dray__sum(&of[2]));
    assert_int_equal(dray__cuda_job_sums(job, DRAY__CUDA_SUM_BACK)[1], dray__sum(&of[2]));
    dray__cuda_job_close(job);
    dray_layout_free(layout);
    free(amax);
    both_free(&values);
    both_free(&bits);
    both_free(&scale);
    both_free(&floats);
}

TEST(test_quantisation)
{
    static const int32_t floats[] = {DRAY_BF16, DRAY_F32, DRAY_F16};
    for (int i = 0; i < test_times(12); i++) {
        int32_t dtype = floats[draw(3)], quant = draw(4) ? DRAY_F8E4M3 : DRAY_F8E5M2;
        int32_t format = draw(3) ? DRAY_SCALE_F32 : DRAY_SCALE_UE8M0;
        bool odd = draw(2);
        int64_t shape[3] = {1 + (int64_t)draw(3), 1 + (int64_t)draw(300),
                            8 + 8 * (int64_t)draw(40)};
        int64_t block[3] = {1, 128, 128}, whole[3];
        shape[2] -= odd ? (int64_t)draw(8) : 0;
        memcpy(whole, shape, sizeof whole);
        uint32_t skip = (uint32_t)draw(2);
        quant_round(3 - skip, shape + skip, (draw(3) ? block : whole) + skip, dtype, quant, format);
    }
    const int64_t wide[2] = {2, 40000}, cell[2] = {1, 40000}, tall[2] = {40000, 3};
    quant_round(2, wide, cell, DRAY_BF16, DRAY_F8E4M3, DRAY_SCALE_F32);
    quant_round(2, tall, tall, DRAY_F32, DRAY_F8E4M3, DRAY_SCALE_F32);
}

int main(void)
{
    gpu_begin(gpu_is_real() ? 1 : 2);
    return suite_run(set_up, tear_down);
}
