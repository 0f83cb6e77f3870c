/* One suite for every pair of region kinds. Random rectangles with gaps and permuted dimensions,
 * with or without conversion, are moved in slices of random size, and compared with an oracle
 * element by element. Bytes between the rectangles must stay as they were. */
#include "mover/mover.h"
#include "suite.h"

#include "base/random.h"
#include "gpu/memory.h"
#include "mover/kernels/checksum.h"
#include "mover/kernels/kernels.h"
#include "pairs.h"
#include "seed.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static char folder[PATH_MAX - 32];
static uint64_t seed, drawn;

static uint64_t draw(uint64_t below)
{
    return dray__random_u64(seed, 0, drawn++) % below;
}

FIXTURE(set_up)
{
    const char *tmp = getenv("TMPDIR");
    seed = test_seed();
    snprintf(folder, sizeof folder, "%s/dray-mover-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

FIXTURE(tear_down)
{
    return rmdir(folder);
}

/* ---- regions of any kind, filled and read back ----------------------------------------------- */

static dray_region *region_with(dray_region_kind kind, const void *content, size_t bytes)
{
    dray_region *r = NULL;
    dray_error e = {0};
    if (kind != DRAY_REGION_FILE) {
        assert_int_equal(dray_region_alloc(kind, bytes, "test", &r, &e), DRAY_OK);
        memory_put(r, 0, content, bytes);
        return r;
    }
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%llu", folder, (unsigned long long)drawn++);
    int fd = open(path, O_CREAT | O_EXCL | O_WRONLY, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, content, bytes), (ssize_t)bytes);
    close(fd);
    assert_int_equal(dray_region_open(path, 1, &r, &e), DRAY_OK);
    unlink(path);
    return r;
}

static void read_back(const dray_region *r, void *out, size_t bytes)
{
    memory_get(r, 0, out, bytes);
}

/* ---- random copies --------------------------------------------------------------------------- */

/* Strides of a rectangle whose dimensions lie in a random order, often dense, else with gaps.
 * Returns the bytes it spans. */
static uint64_t random_strides(uint32_t ndim, const int64_t *extent, uint64_t size, int64_t *stride)
{
    uint32_t order[DRAY_MAX_DIMS];
    for (uint32_t d = 0; d < ndim; d++)
        order[d] = d;
    if (draw(3) == 0)
        for (uint32_t d = ndim; d > 1; d--) {
            uint32_t other = (uint32_t)draw(d), keep = order[d - 1];
            order[d - 1] = order[other], order[other] = keep;
        }
    bool gaps = draw(2);
    uint64_t step = size, end = size;
    for (uint32_t i = ndim; i-- > 0;) {
        uint32_t d = order[i];
        if (gaps && draw(2)) /* sometimes not a multiple of the element: packed records */
            step += draw(4) ? size * draw(9) : draw(5);
        if (gaps && draw(30) == 0)
            step += 5000;
        stride[d] = (int64_t)step;
        end += (uint64_t)(extent[d] - 1) * step;
        step *= (uint64_t)extent[d];
    }
    return end;
}

static const int32_t floats[] = {DRAY_F64, DRAY_F32, DRAY_BF16, DRAY_F16};
static const int32_t others[] = {DRAY_F8E4M3, DRAY_I8,  DRAY_BOOL, DRAY_I16,
                                 DRAY_U32,    DRAY_I64, DRAY_U64};

static void random_dtypes(dray_copy *c)
{
    if (draw(2)) {
        c->source_dtype = floats[draw(4)];
        c->destination_dtype = draw(2) ? c->source_dtype : floats[draw(4)];
    } else {
        c->source_dtype = c->destination_dtype = others[draw(7)];
    }
}

enum { COPIES = 6, REGION = 1 << 20 };

typedef struct scene {
    dray_layout *layout;
    dray_copy copies[COPIES];
    uint64_t count, source_bytes, destination_bytes;
} scene;

static void add_random_copy(scene *s)
{
    dray_copy c = {.ndim = 1 + (uint32_t)draw(4)};
    random_dtypes(&c);
    uint64_t from = dray_dtype_size((dray_dtype)c.source_dtype);
    uint64_t to = dray_dtype_size((dray_dtype)c.destination_dtype);
    uint64_t room = draw(4) ? 4096 : 100000;
    int64_t shape[DRAY_MAX_DIMS];
    for (uint32_t d = 0; d < c.ndim; d++) {
        c.extent[d] = (int64_t)(1 + draw(d + 1 == c.ndim || draw(3) == 0 ? room : 7));
        room = room / (uint64_t)c.extent[d] + 1;
        c.start[d] = (int64_t)draw(1000);
        shape[d] = c.start[d] + c.extent[d] + (int64_t)draw(10);
    }
    c.source_offset = s->source_bytes + draw(64);
    c.destination_offset = s->destination_bytes + draw(64);
    uint64_t source = random_strides(c.ndim, c.extent, from, c.source_stride);
    uint64_t destination = random_strides(c.ndim, c.extent, to, c.destination_stride);
    if (c.source_offset + source > REGION || c.destination_offset + destination > REGION)
        return;
    s->source_bytes = c.source_offset + source;
    s->destination_bytes = c.destination_offset + destination;
    char name[32];
    snprintf(name, sizeof name, "t%llu", (unsigned long long)s->count);
    assert_int_equal(dray_layout_add_tensor(s->layout, name, (dray_dtype)c.destination_dtype,
                                            c.ndim, shape, &c.tensor, NULL),
                     DRAY_OK);
    s->copies[s->count++] = c;
}

static dray__cast_fn portable_cast(int32_t from, int32_t to)
{
    for (const dray__cast *c = dray__kernels_portable.casts; c->run; c++)
        if (c->from == from && c->to == to)
            return c->run;
    return NULL;
}

/* B(c) of mover/kernels/checksum.h. */
static uint32_t column_factor(uint64_t column)
{
    uint32_t x = (uint32_t)column * 0x9E3779B1u ^ (uint32_t)(column >> 32) * 0x85EBCA77u;
    x ^= x >> 15;
    x *= 0x2C1B3C6Du;
    return (x ^ x >> 12) | 1;
}

/* The checksum of one element, straight from the formula. */
static uint64_t element_sum(uint64_t row, uint64_t column, const uint8_t *data, uint64_t size)
{
    uint64_t sum = 0, words = size == 8 ? 2 : 1;
    for (uint64_t w = 0; w < words; w++) {
        uint32_t bits = 0;
        memcpy(&bits, data + 4 * w, size == 8 ? 4 : size);
        sum += dray__sum_row_factor(row) * column_factor(column * words + w) * bits;
    }
    return sum;
}

/* One copy by the definition in plan.h. Returns its checksum. */
static uint64_t oracle(const scene *s, const dray_copy *c, const uint8_t *in, uint8_t *out)
{
    uint64_t from = dray_dtype_size((dray_dtype)c->source_dtype), sum = 0;
    uint64_t to = dray_dtype_size((dray_dtype)c->destination_dtype);
    dray__cast_fn cast = portable_cast(c->source_dtype, c->destination_dtype);
    const dray_tensor_info *tensor = dray_layout_tensor(s->layout, c->tensor);
    int64_t i[DRAY_MAX_DIMS] = {0};
    for (;;) {
        const uint8_t *a = in + c->source_offset;
        uint8_t *b = out + c->destination_offset;
        uint64_t row = 0;
        for (uint32_t d = 0; d < c->ndim; d++) {
            a += i[d] * c->source_stride[d];
            b += i[d] * c->destination_stride[d];
            if (d + 1 < c->ndim)
                row = row * (uint64_t)tensor->shape[d] + (uint64_t)(c->start[d] + i[d]);
        }
        if (cast)
            cast(a, b, 1);
        else
            memcpy(b, a, from);
        sum += element_sum(row, (uint64_t)(c->start[c->ndim - 1] + i[c->ndim - 1]), b, to);
        uint32_t d = c->ndim;
        while (d > 0 && ++i[d - 1] == c->extent[d - 1])
            i[--d] = 0;
        if (d == 0)
            return sum;
    }
}

static void move_scene(const dray_region *source, dray_region *destination, const scene *s,
                       uint64_t *sums)
{
    static uint64_t staging[DRAY__MOVE_STAGING_MIN / 8];
    dray__move_options options = {.sums = sums, .layout = s->layout};
    if (draw(2)) {
        options.staging = staging;
        options.staging_bytes = sizeof staging;
    }
    dray_error e = {0};
    if (dray__move_all(source, destination, s->copies, s->count, &options, &e))
        fail_msg("%s", e.message);
}

static void one_scene(dray_region_kind from, dray_region_kind to)
{
    static uint8_t in[REGION], before[REGION], expected[REGION], found[REGION];
    scene s = {0};
    assert_int_equal(dray_layout_new(&s.layout, NULL), DRAY_OK);
    uint64_t wanted = 1 + draw(COPIES);
    for (int tries = 0; s.count < wanted && tries < 100; tries++)
        add_random_copy(&s);
    uint64_t stream = 1 + draw(1u << 30);
    for (size_t i = 0; i < REGION; i += 8) {
        uint64_t word = (stream + i) * UINT64_C(0x9E3779B97F4A7C15);
        word ^= word >> 29;
        memcpy(in + i, &word, 8);
        word = ~word;
        memcpy(before + i, &word, 8);
    }
    memcpy(expected, before, REGION);
    uint64_t sums[COPIES] = {0}, expected_sums[COPIES] = {0};
    for (uint64_t i = 0; i < s.count; i++)
        expected_sums[i] = oracle(&s, &s.copies[i], in, expected);
    dray_region *source = region_with(from, in, REGION);
    dray_region *destination = region_with(to, before, REGION);
    bool summed = draw(4);
    move_scene(source, destination, &s, summed ? sums : NULL);
    read_back(destination, found, REGION);
    for (size_t i = 0; i < REGION; i++)
        if (found[i] != expected[i])
            fail_msg("byte %zu is %02x, expected %02x", i, found[i], expected[i]);
    if (summed)
        assert_memory_equal(sums, expected_sums, sizeof sums);
    dray_region_free(source);
    dray_region_free(destination);
    dray_layout_free(s.layout);
}

static void conforms(dray_region_kind from, dray_region_kind to)
{
    for (int i = 0; i < test_times(12); i++)
        one_scene(from, to);
}

#define XX(from, to)                                                                               \
    TEST(from##_to_##to)                                                                           \
    {                                                                                              \
        conforms(DRAY_REGION_##from, DRAY_REGION_##to);                                            \
    }
PAIRS(XX)
#undef XX

/* ---- refusals -------------------------------------------------------------------------------- */

static int move_one(const dray_region *source, dray_region *destination, const dray_copy *copy,
                    dray_error *e)
{
    return dray__move_all(source, destination, copy, 1, NULL, e);
}

TEST(copies_outside_a_region_are_refused)
{
    uint8_t zeros[256] = {0};
    dray_region *a = region_with(DRAY_REGION_HOST, zeros, 256);
    dray_region *b = region_with(DRAY_REGION_FILE, zeros, 256);
    const dray_copy good = {.ndim = 2,
                            .source_dtype = DRAY_F32,
                            .destination_dtype = DRAY_F32,
                            .extent = {4, 16},
                            .source_stride = {64, 4},
                            .destination_stride = {64, 4}};
    dray_error e;
    dray_copy c = good;
    assert_int_equal(move_one(a, b, &c, &e), DRAY_OK);
    c = good, c.source_offset = 1;
    assert_int_equal(move_one(a, b, &c, &e), DRAY_EINVALID);
    c = good, c.destination_offset = 1;
    assert_int_equal(move_one(a, b, &c, &e), DRAY_EINVALID);
    c = good, c.source_offset = UINT64_MAX - 2;
    assert_int_equal(move_one(a, b, &c, &e), DRAY_EINVALID);
    c = good, c.source_stride[0] = INT64_MAX;
    assert_int_equal(move_one(a, b, &c, &e), DRAY_EINVALID);
    c = good, c.destination_stride[1] = -4;
    assert_int_equal(move_one(a, b, &c, &e), DRAY_EINVALID);
    c = good, c.extent[0] = 0;
    assert_int_equal(move_one(a, b, &c, &e), DRAY_EINVALID);
    c = good, c.ndim = 5;
    assert_int_equal(move_one(a, b, &c, &e), DRAY_EINVALID);
    c = good, c.source_dtype = 99;
    assert_int_equal(move_one(a, b, &c, &e), DRAY_EINVALID);
    c = good, c.destination_dtype = DRAY_I32;
    assert_int_equal(move_one(a, b, &c, &e), DRAY_EDTYPE);
    dray_region_free(a);
    dray_region_free(b);
}

TEST(read_only_destinations_are_refused)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/ro", folder);
    int fd = open(path, O_CREAT | O_WRONLY, 0600);
    assert_int_equal(write(fd, "12345678", 8), 8);
    close(fd);
    dray_region *file, *host, *shared, *read_only;
    assert_int_equal(dray_region_open(path, 0, &file, NULL), DRAY_OK);
    unlink(path);
    assert_int_equal(dray_region_alloc(DRAY_REGION_HOST, 8, "h", &host, NULL), DRAY_OK);
    assert_int_equal(dray_region_alloc(DRAY_REGION_SHARED, 8, "s", &shared, NULL), DRAY_OK);
    dray_handle h = DRAY_HANDLE_INIT;
    assert_int_equal(dray_handle_describe(shared, &h, NULL), DRAY_OK);
    assert_int_equal(dray_region_import(&h, dray_region_fd(shared), 0, &read_only, NULL), DRAY_OK);
    const dray_copy c = {.ndim = 1,
                         .source_dtype = DRAY_U8,
                         .destination_dtype = DRAY_U8,
                         .extent = {8},
                         .source_stride = {1},
                         .destination_stride = {1}};
    dray_error e;
    assert_int_equal(move_one(host, file, &c, &e), DRAY_EPERM);
    assert_int_equal(move_one(host, read_only, &c, &e), DRAY_EPERM);
    assert_int_equal(move_one(read_only, host, &c, &e), DRAY_OK);
    dray_region_free(file);
    dray_region_free(host);
    dray_region_free(shared);
    dray_region_free(read_only);
}

TEST(files_that_shrank_or_are_full_are_errors)
{
    static uint8_t zeros[3 << 20];
    dray_region *a = region_with(DRAY_REGION_FILE, zeros, sizeof zeros);
    dray_region *b = region_with(DRAY_REGION_HOST, zeros, sizeof zeros);
    const dray_copy c = {.ndim = 1,
                         .source_dtype = DRAY_U8,
                         .destination_dtype = DRAY_U8,
                         .extent = {sizeof zeros},
                         .source_stride = {1},
                         .destination_stride = {1}};
    assert_int_equal(ftruncate(dray_region_fd(a), sizeof zeros - 1), 0);
    dray_error e;
    assert_int_equal(dray__move_all(a, b, &c, 1, NULL, &e), DRAY_EFORMAT);
    assert_non_null(strstr(e.message, "ends at byte 3145727"));

    /* A file system that is full, by another name: the limit on a file's size. */
    assert_int_equal(ftruncate(dray_region_fd(a), 1 << 20), 0);
    struct rlimit old, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = old, small.rlim_cur = 1 << 20;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    int rc = dray__move_all(b, a, &c, 1, NULL, &e);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(rc, DRAY_ESYS);
    assert_int_equal(e.origin, DRAY_ORIGIN_ERRNO);
    dray_region_free(a);
    dray_region_free(b);
}

TEST(nothing_to_move_is_done)
{
    uint8_t zero = 0;
    dray_region *a = region_with(DRAY_REGION_HOST, &zero, 1);
    assert_int_equal(dray__move_all(a, a, NULL, 0, NULL, NULL), DRAY_OK);
    dray_region_free(a);
}

/* Ranks that are threads read one source at once, each into its own part of one destination. */
typedef struct part {
    dray_region *source, *destination;
    uint64_t offset, bytes;
    int rc;
} part;

static void *move_part(void *state)
{
    part *p = state;
    const dray_copy c = {.ndim = 2,
                         .source_dtype = DRAY_BF16,
                         .destination_dtype = DRAY_F32,
                         .extent = {16, (int64_t)p->bytes / 64},
                         .source_offset = p->offset / 2,
                         .destination_offset = p->offset,
                         .source_stride = {(int64_t)p->bytes / 32, 2},
                         .destination_stride = {(int64_t)p->bytes / 16, 4}};
    p->rc = dray__move_all(p->source, p->destination, &c, 1, NULL, NULL);
    return NULL;
}

TEST(threads_share_a_source)
{
    enum { THREADS = 4, BYTES = 1 << 20 };
    static uint16_t in[BYTES / 4];
    static float out[BYTES / 4];
    for (size_t i = 0; i < BYTES / 4; i++)
        in[i] = (uint16_t)(0x3F80 + i % 256);
    memset(out, 0, sizeof out);
    dray_region *source = region_with(DRAY_REGION_SHARED, in, sizeof in);
    dray_region *destination = region_with(DRAY_REGION_HOST, out, sizeof out);
    pthread_t threads[THREADS];
    part parts[THREADS];
    for (uint64_t i = 0; i < THREADS; i++) {
        parts[i] = (part){source, destination, i * BYTES / THREADS, BYTES / THREADS, -1};
        assert_int_equal(pthread_create(&threads[i], NULL, move_part, &parts[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(parts[i].rc, DRAY_OK);
    }
    read_back(destination, out, sizeof out);
    for (size_t i = 0; i < BYTES / 4; i++) {
        uint32_t bits = (uint32_t)in[i] << 16;
        assert_memory_equal(&out[i], &bits, 4);
    }
    dray_region_free(source);
    dray_region_free(destination);
}

int main(void)
{
    gpu_begin(1);
    return suite_run(set_up, tear_down);
}
