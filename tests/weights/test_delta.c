/* Tests deltas of random blocks in random memory with random changes. The reader's memory is
 * afterwards compared element by element, without slices. */
#include "suite.h"
#include "weights/delta/delta.h"

#include "base/clock.h"
#include "base/random.h"
#include "gpu/memory.h"
#include "seed.h"

#include <inttypes.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static uint64_t seed, drawn;
static dray_region_kind kind = DRAY_REGION_HOST; /* of the publisher's blocks */

static uint64_t below(uint64_t n)
{
    return dray__random_u64(seed, 0, drawn++) % n;
}

struct world {
    dray_layout *layout;
    dray_region *region;
    dray_copy copy; /* a rectangle of block 0, on its way to a reader's own memory */
    uint8_t *data;  /* of the region; of a GPU's a copy */
    uint8_t *reader;
    size_t reader_bytes, size;
};

/* One tensor of up to three dimensions, its block with gaps between the rows, and a part of it that
 * lies somewhere else at a reader's, maybe transposed. */
static void draw(struct world *w, dray_dtype dtype)
{
    dray_region_info info = {.kind = (int32_t)kind, .name = "r"};
    dray_block block = {.offset = 8 * below(9)};
    int64_t shape[3];
    uint32_t ndim = 1 + (uint32_t)below(3), order[3] = {0, 1, 2};
    w->size = dray_dtype_size(dtype);
    memset(&w->copy, 0, sizeof w->copy);
    int64_t stride = (int64_t)w->size, reader = (int64_t)w->size;
    for (uint32_t d = ndim; d-- > 0;) {
        shape[d] = 1 + (int64_t)below(ndim == 1 ? 300000 : ndim == 2 ? 600 : 60);
        block.start[d] = (int64_t)below((uint64_t)shape[d]);
        block.extent[d] = 1 + (int64_t)below((uint64_t)(shape[d] - block.start[d]));
        block.stride[d] = stride;
        stride *= block.extent[d] + (int64_t)below(3);
        w->copy.start[d] = block.start[d] + (int64_t)below((uint64_t)block.extent[d]);
        w->copy.extent[d] =
            1 + (int64_t)below((uint64_t)(block.start[d] + block.extent[d] - w->copy.start[d]));
    }
    for (uint32_t i = 0; i < ndim; i++) {
        uint32_t j = i + (uint32_t)below(ndim - i), d = order[j];
        order[j] = order[i];
        order[i] = d;
    }
    for (uint32_t i = 0; i < ndim; i++) {
        w->copy.destination_stride[order[i]] = reader;
        reader *= w->copy.extent[order[i]];
    }
    w->copy.ndim = ndim;
    w->copy.source_dtype = w->copy.destination_dtype = (int32_t)dtype;
    info.bytes = block.offset + (uint64_t)stride;
    assert_int_equal(dray_layout_new(&w->layout, NULL), 0);
    assert_int_equal(dray_layout_add_region(w->layout, &info, NULL, NULL), 0);
    assert_int_equal(dray_layout_add_tensor(w->layout, "t", dtype, ndim, shape, NULL, NULL), 0);
    assert_int_equal(dray_layout_add_block(w->layout, &block, NULL), 0);
    w->reader_bytes = (size_t)reader;
}

static void allocate(struct world *w)
{
    uint64_t bytes = dray_layout_region(w->layout, 0)->bytes;
    assert_int_equal(dray_region_alloc(kind, bytes, "r", &w->region, NULL), 0);
    w->data = memory_open(w->region);
    w->reader = malloc(w->reader_bytes);
}

static void make(struct world *w, dray_dtype dtype)
{
    draw(w, dtype);
    allocate(w);
}

/* One of bf16 with one dimension, of more than so many elements, and a block of fewer than `most`.
 */
static void make_line(struct world *w, int64_t copied, int64_t most)
{
    for (draw(w, DRAY_BF16); w->copy.ndim != 1 || w->copy.extent[0] <= copied ||
                             dray_layout_block(w->layout, 0)->extent[0] >= most;
         draw(w, DRAY_BF16))
        dray_layout_free(w->layout);
    allocate(w); /* only now: a GPU's memory takes longer than all the drawing */
}

static void end(struct world *w)
{
    dray_layout_free(w->layout);
    memory_close(w->region, w->data, false);
    dray_region_free(w->region);
    free(w->reader);
}

/* Changes about `share` of 1000 of all bytes' elements, to any values, or by a few steps. */
static void change(struct world *w, uint64_t share)
{
    uint8_t *data = w->data;
    bool few = below(2);
    for (uint64_t i = 0; i + w->size <= dray_region_bytes(w->region); i += w->size)
        if (below(1000) < share)
            data[i + (few ? 0 : below(w->size))] ^= (uint8_t)(1 + below(few && below(9) ? 3 : 255));
    memory_put(w->region, 0, data, dray_region_bytes(w->region));
}

/* Visits the rectangle: true when the reader holds what the publisher has; fill: makes it so. */
static bool same(const struct world *w, bool fill)
{
    const dray_block *block = dray_layout_block(w->layout, 0);
    const uint8_t *data = w->data;
    int64_t at[3], extent[3];
    for (uint32_t d = 0; d < 3; d++)
        extent[d] = d < w->copy.ndim ? w->copy.extent[d] : 1;
    for (at[0] = 0; at[0] < extent[0]; at[0]++)
        for (at[1] = 0; at[1] < extent[1]; at[1]++)
            for (at[2] = 0; at[2] < extent[2]; at[2]++) {
                size_t from = block->offset, to = w->copy.destination_offset;
                for (uint32_t d = 0; d < w->copy.ndim; d++) {
                    from += (size_t)(w->copy.start[d] + at[d] - block->start[d]) *
                            (size_t)block->stride[d];
                    to += (size_t)at[d] * (size_t)w->copy.destination_stride[d];
                }
                if (fill)
                    memcpy(w->reader + to, data + from, w->size);
                else if (memcmp(w->reader + to, data + from, w->size) != 0)
                    return false;
            }
    return true;
}

/* What a reader does: entries where there are some, the memory itself where a slice is full. */
static uint64_t apply(struct world *w, const dray__delta_view *view, uint32_t *full)
{
    dray__rect rect = dray__copy_rect(&w->copy);
    dray__delta_walk walk;
    dray__delta_part part;
    uint64_t bytes = 0;
    dray__delta_start(view, 0, &rect, &walk);
    while (dray__delta_next(&walk, &part, NULL) == 0) {
        if (!part.full) {
            assert_int_equal(dray__delta_apply(&part, &w->copy, w->reader, &bytes, NULL), 0);
            continue;
        }
        (*full)++;
        struct world piece = *w;
        piece.copy = dray__copy_cut(&w->copy, &part.cross);
        same(&piece, true);
    }
    return bytes;
}

/* So many cases, times DRAY_TEST_SCALE; of the fake GPU's memory, which takes ten times as long,
 * fewer. */
static int rounds(int count)
{
    return test_times(kind == DRAY_REGION_CUDA ? count / 4 : count);
}

TEST(test_random)
{
    static const dray_dtype dtypes[] = {DRAY_U8, DRAY_BF16, DRAY_F32, DRAY_I64};
    static const uint64_t shares[] = {0, 1, 10, 100, 300, 1000};
    (void)state;
    for (int round = 0, all = rounds(60); round < all; round++) {
        struct world w;
        make(&w, dtypes[below(4)]);
        change(&w, 900);
        dray__delta *delta;
        dray__delta_view *view;
        dray_region *const regions[] = {w.region};
        assert_int_equal(dray__delta_new(w.layout, regions, 0, &delta, NULL), 0);
        assert_int_equal(dray__delta_publish(delta, 7, 1, INT64_MAX, NULL), 0);
        assert_int_equal(dray__delta_open(w.layout, dray__delta_region(delta), &view, NULL), 0);
        assert_false(dray__delta_leads(view, 7, 1, 1));
        same(&w, true);
        for (uint64_t version = 2; version < 6; version++) {
            uint64_t share = shares[below(6)];
            uint32_t full = 0;
            change(&w, share);
            assert_int_equal(dray__delta_publish(delta, 7, version, INT64_MAX, NULL), 0);
            assert_true(dray__delta_leads(view, 7, version - 1, version));
            uint64_t bytes = apply(&w, view, &full);
            if (!same(&w, false) || (share == 0 && bytes + full))
                fail_msg("seed %" PRIu64 ", version %" PRIu64 ": wrong memory", seed, version);
        }
        assert_int_equal(dray__delta_publish(delta, 8, 6, INT64_MAX, NULL), 0);
        assert_false(dray__delta_leads(view, 8, 5, 6)); /* another incarnation */
        dray__delta_close(view);
        dray__delta_free(delta);
        end(&w);
    }
}

/* Entries that lead outside are refused, whoever wrote them. */
TEST(test_forged)
{
    struct world w;
    make_line(&w, 1000, 65536); /* one slice */
    dray_region *const regions[] = {w.region};
    dray__delta *delta;
    dray__delta_view *view;
    assert_int_equal(dray__delta_new(w.layout, regions, 0, &delta, NULL), 0);
    assert_int_equal(dray__delta_publish(delta, 1, 1, INT64_MAX, NULL), 0);
    change(&w, 100);
    assert_int_equal(dray__delta_publish(delta, 1, 2, INT64_MAX, NULL), 0);
    assert_int_equal(dray__delta_open(w.layout, dray__delta_region(delta), &view, NULL), 0);
    dray__rect rect = dray__copy_rect(&w.copy);
    dray__delta_walk walk;
    dray__delta_part part;
    dray_error error;
    uint64_t bytes = 0;
    dray__delta_start(view, 0, &rect, &walk);
    assert_int_equal(dray__delta_next(&walk, &part, NULL), 0);
    assert_false(part.full);
    assert_true(part.count > 2);
    uint16_t *positions = (uint16_t *)part.positions;
    uint16_t kept = positions[1];
    positions[1] = positions[0];
    assert_int_equal(dray__delta_apply(&part, &w.copy, w.reader, &bytes, &error), DRAY_EFORMAT);
    positions[1] = kept;
    uint16_t *last = &positions[part.count - 1];
    kept = *last;
    *last = (uint16_t)dray__rect_elements(&part.slice); /* the first one outside */
    assert_int_equal(dray__delta_apply(&part, &w.copy, w.reader, &bytes, &error), DRAY_EFORMAT);
    *last = kept;
    uint32_t *words = dray_region_base(dray__delta_region(delta));
    uint64_t *offset = (uint64_t *)(words + 14), begin = *offset; /* of the first slot's entries */
    *offset = dray_region_bytes(dray__delta_region(delta)) / 8 * 8 - 8;
    dray__delta_start(view, 0, &rect, &walk);
    assert_int_equal(dray__delta_next(&walk, &part, &error), DRAY_EFORMAT);
    *offset = begin;
    words[14 + 2] = 70000; /* the first slot's count */
    dray__delta_start(view, 0, &rect, &walk);
    assert_int_equal(dray__delta_next(&walk, &part, &error), DRAY_EFORMAT);
    words[0] ^= 1;
    dray__delta_view *none;
    assert_int_equal(dray__delta_open(w.layout, dray__delta_region(delta), &none, &error),
                     DRAY_EFORMAT);
    dray__delta_close(view);
    dray__delta_free(delta);
    end(&w);
}

/* To the reader's memory, which is a GPU's where the publisher's is. */
static int decode(struct world *w, dray__delta_coder *reader, const uint8_t *data, size_t size,
                  const dray_copy *copy)
{
    const dray__delta_message message = {data, size, copy};
    dray_region *to;
    assert_int_equal(kind == DRAY_REGION_CUDA
                         ? dray_region_alloc(kind, w->reader_bytes, "reader", &to, NULL)
                         : dray_region_wrap(w->reader, w->reader_bytes, "reader", &to, NULL),
                     0);
    assert_true(dray__delta_writes(to));
    memory_put(to, 0, w->reader, kind == DRAY_REGION_CUDA ? w->reader_bytes : 0);
    int rc = dray__delta_decode_all(reader, &message, 1, to, NULL);
    memory_get(to, 0, w->reader, kind == DRAY_REGION_CUDA ? w->reader_bytes : 0);
    dray_region_free(to);
    return rc;
}

/* What a server sends of the rectangle, and a reader writes. Returns the bytes; UINT64_MAX:
 * refused. */
static uint64_t send_all(struct world *w, const dray__delta_view *view, dray__delta_coder *server,
                         dray__delta_coder *reader, bool forge, uint64_t *covered)
{
    enum { PIECE = 8 << 16 };
    uint8_t *wire = malloc(PIECE);
    dray__rect rect = dray__copy_rect(&w->copy), part;
    dray__delta_walk walk;
    uint64_t bytes = 0;
    dray__delta_grid(w->layout, 0, &rect, &walk);
    while (dray__delta_grid_next(&walk, &part)) {
        struct world piece = *w;
        piece.copy = dray__copy_cut(&w->copy, &part);
        size_t dense = dray__rect_elements(&part) * w->size;
        size_t size =
            dray__delta_encode(server, view, 0, &part, piece.copy.destination_dtype, wire, dense);
        assert_true(size < dense || dense == 0);
        if (!size) {
            same(&piece, true);
            continue;
        }
        uint8_t *before = malloc(w->reader_bytes);
        for (int i = 0; forge && i < 20; i++) {
            uint8_t *copy = malloc(size); /* where a sanitizer sees its end */
            memcpy(before, w->reader, w->reader_bytes);
            size_t cut = below(4) ? size : below(size + 1);
            memcpy(copy, wire, size);
            copy[below(size)] ^= (uint8_t)(1 + below(255));
            if (cut < size)
                copy = realloc(copy, cut + 1);
            int rc = decode(w, reader, copy, cut, &piece.copy);
            assert_true(rc == 0 || rc == DRAY_EFORMAT);
            assert_true(rc == 0 || memcmp(before, w->reader, w->reader_bytes) == 0);
            free(copy);
        }
        free(before);
        assert_int_equal(decode(w, reader, wire, size, &piece.copy), 0);
        bytes += size;
        *covered += dense;
    }
    free(wire);
    return bytes;
}

/* The publisher's first version, which the reader holds as well. */
static void publish_first(struct world *w, dray__delta **delta, dray__delta_view **view)
{
    assert_int_equal(dray__delta_new(w->layout, &w->region, 0, delta, NULL), 0); /* borrows it */
    assert_int_equal(dray__delta_publish(*delta, 7, 1, INT64_MAX, NULL), 0);
    assert_int_equal(dray__delta_open(w->layout, dray__delta_region(*delta), view, NULL), 0);
    same(w, true);
}

TEST(test_wire)
{
    static const dray_dtype dtypes[] = {DRAY_U8, DRAY_BF16, DRAY_F32, DRAY_I64};
    static const uint64_t shares[] = {0, 1, 10, 100, 300};
    (void)state;
    dray__delta_coder *server = dray__delta_coder_new(), *reader = dray__delta_coder_new();
    for (int round = 0, all = rounds(40); round < all; round++) {
        struct world w;
        make(&w, dtypes[below(4)]);
        change(&w, 900);
        dray__delta *delta;
        dray__delta_view *view;
        publish_first(&w, &delta, &view);
        for (uint64_t version = 2; version < 6; version++) {
            uint64_t covered = 0;
            change(&w, shares[below(5)]);
            assert_int_equal(dray__delta_publish(delta, 7, version, INT64_MAX, NULL), 0);
            bool forge = version == 5; /* what forged entries wrote stays in the rectangle */
            send_all(&w, view, server, reader, forge, &covered);
            if (!forge && !same(&w, false))
                fail_msg("seed %" PRIu64 ", version %" PRIu64 ": wrong memory", seed, version);
        }
        dray__delta_close(view);
        dray__delta_free(delta);
        end(&w);
    }
    dray__delta_coder_free(server);
    dray__delta_coder_free(reader);
}

/* Codes by the words of entries.h, bit by bit. */
TEST(test_codes)
{
    static const int8_t steps[] = {1, -1, 2, -3, 127, -127, 0, 5};
    static const uint8_t values[2 * 8] = {[12] = 0x5a, [13] = 0xc3};
    static const char text[] = "10"
                               "11"
                               "0100"
                               "0111"
                               "00000011111110"
                               "00000011111111"
                               "0000000"
                               "0101101011000011"
                               "001100";
    uint8_t wanted[16] = {0}, found[16] = {0};
    dray__change change;
    (void)state;
    for (size_t i = 0; text[i]; i++)
        wanted[i / 8] |= (uint8_t)((text[i] - '0') << i % 8);
    size_t bytes = dray__codes_bytes(steps, 8, 2);
    assert_int_equal(bytes, (sizeof text - 1 + 7) / 8);
    dray__codes_put(found, steps, values, 8, 2);
    assert_memory_equal(found, wanted, sizeof found);
    dray__codes codes = {.data = found, .bytes = bytes};
    for (int i = 0; i < 8; i++) {
        assert_false(dray__codes_ended(&codes));
        assert_true(dray__codes_next(&codes, 2, &change));
        assert_int_equal(change.step, steps[i]);
        assert_int_equal(change.bits, i == 6 ? 0xc35a : 0);
    }
    assert_true(dray__codes_ended(&codes));
    found[bytes - 1] |= 0x80; /* behind the last one */
    codes = (dray__codes){.data = found, .bytes = bytes};
    for (int i = 0; i < 8; i++)
        assert_true(dray__codes_next(&codes, 2, &change));
    assert_false(dray__codes_ended(&codes));
    for (size_t cut = 0; cut < bytes; cut++) {
        codes = (dray__codes){.data = wanted, .bytes = cut};
        int i = 0;
        while (i < 8 && dray__codes_next(&codes, 2, &change))
            i++;
        assert_true(i < 8);
    }
}

/* A step leads to the next value: of floats as nextafter says. */
TEST(test_steps)
{
    (void)state;
    for (int round = 0; round < 20000; round++) {
        uint32_t bits = (uint32_t)dray__random_u64(seed, 1, (uint64_t)round);
        float was, now, other;
        memcpy(&was, &bits, sizeof was);
        if (was != was || was == 0)
            continue;
        now = was;
        dray__change_put(&now, &(dray__change){.step = 1}, 4, DRAY_F32);
        other = nextafterf(was, INFINITY);
        assert_true(was == INFINITY ? now != now : now == other);
        if (now == 0)
            continue;
        assert_int_equal(dray__step_of(&was, &now, 4, DRAY_F32), 1);
        assert_int_equal(dray__step_of(&now, &was, 4, DRAY_F32), -1);
    }
    static const struct {
        int32_t dtype;
        uint64_t was, now;
        int step;
    } cases[] = {
        {DRAY_BF16, 0x0000, 0x8000, -1},   {DRAY_BF16, 0x8001, 0x0000, 2},
        {DRAY_BF16, 0x3f80, 0x3fff, 127},  {DRAY_BF16, 0x3f80, 0x4000, 0},
        {DRAY_BF16, 0xbf80, 0xbfff, -127}, {DRAY_BF16, 0x7fff, 0xffff, 1},
        {DRAY_I8, 0x00, 0xff, -1},         {DRAY_I8, 0x7f, 0x80, 1},
        {DRAY_I8, 0x00, 0x80, 0},          {DRAY_F8E4M3, 0x80, 0x00, 1},
        {DRAY_F8E4M3, 0x81, 0x82, -1},     {DRAY_U16, 0xffff, 0x0001, 2},
        {DRAY_I64, 5, UINT64_MAX, -6},     {DRAY_F64, UINT64_C(1) << 63, 1, 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t size = dray_dtype_size((dray_dtype)cases[i].dtype);
        uint64_t element = cases[i].was;
        assert_int_equal(dray__step_of(&cases[i].was, &cases[i].now, size, cases[i].dtype),
                         cases[i].step);
        if (!cases[i].step)
            continue;
        dray__change_put(&element, &(dray__change){.step = (int8_t)cases[i].step}, size,
                         cases[i].dtype);
        assert_true(element == cases[i].now);
    }
}

/* 1 % of bf16: a byte for the gap and two for the value, less where values can be foreseen, and a
 * quarter of a byte where all move by one step. */
TEST(test_wire_bytes)
{
    static const struct {
        const char *name;
        uint64_t permille_most; /* of the bytes, times 10 */
    } kinds[] = {{"random", 170}, {"foreseen", 80}, {"steps", 72}};
    for (int kind_of = 0; kind_of < 3; kind_of++) {
        struct world w;
        make_line(&w, 140000, INT64_MAX);
        dray__delta *delta;
        dray__delta_view *view;
        dray__delta_coder *server = dray__delta_coder_new(), *reader = dray__delta_coder_new();
        uint16_t *data = (uint16_t *)(void *)w.data;
        for (uint64_t i = 0; i < dray_region_bytes(w.region) / 2; i++)
            data[i] = (uint16_t)below(65536);
        memory_put(w.region, 0, data, dray_region_bytes(w.region));
        publish_first(&w, &delta, &view);
        for (uint64_t i = 0; i < dray_region_bytes(w.region) / 2; i++)
            if (below(100) == 0)
                data[i] = kind_of == 0   ? (uint16_t)below(65536)
                          : kind_of == 1 ? 0x3f80
                                         : (uint16_t)(data[i] + (below(2) ? 1 : -1));
        memory_put(w.region, 0, data, dray_region_bytes(w.region));
        assert_int_equal(dray__delta_publish(delta, 7, 2, INT64_MAX, NULL), 0);
        uint64_t covered = 0, bytes = send_all(&w, view, server, reader, false, &covered);
        fprintf(stderr, "%s: %.2f %% of %" PRIu64 " bytes\n", kinds[kind_of].name,
                100 * (double)bytes / (double)covered, covered);
        assert_true(covered > 250000 && same(&w, false));
        assert_true(bytes * 10000 <= covered * kinds[kind_of].permille_most);
        dray__delta_coder_free(server);
        dray__delta_coder_free(reader);
        dray__delta_close(view);
        dray__delta_free(delta);
        end(&w);
    }
}

/* Of thousands of entries: what is found to be wrong with the last ones, too, is found before the
 * first one is written (send_all). */
TEST(test_broken_behind_many_entries)
{
    struct world w;
    make_line(&w, 140000, INT64_MAX);
    dray__delta *delta;
    dray__delta_view *view;
    dray__delta_coder *server = dray__delta_coder_new(), *reader = dray__delta_coder_new();
    change(&w, 900);
    publish_first(&w, &delta, &view);
    change(&w, 100);
    assert_int_equal(dray__delta_publish(delta, 7, 2, INT64_MAX, NULL), 0);
    uint64_t covered = 0;
    send_all(&w, view, server, reader, true, &covered);
    assert_true(covered > 250000);
    dray__delta_coder_free(server);
    dray__delta_coder_free(reader);
    dray__delta_close(view);
    dray__delta_free(delta);
    end(&w);
}

/* A GPU that does not answer keeps a publisher no longer than its deadline, and nothing of what it
 * finds later counts. */
TEST(test_late)
{
    struct world w;
    dray__delta *delta;
    dray__delta_view *view;
    dray_error error;
    if (kind != DRAY_REGION_CUDA || gpu_is_real())
        skip();
    make_line(&w, 1000, INT64_MAX);
    publish_first(&w, &delta, &view);
    change(&w, 100);
    int64_t begin = dray__now();
    assert_true(gpu_fail("cuEventQuery:1+:600")); /* not ready */
    int rc = dray__delta_publish(delta, 7, 2, begin + DRAY__SECOND / 5, &error);
    gpu_fail(NULL);
    assert_int_equal(rc, DRAY_ETIMEDOUT);
    assert_true(dray__now() - begin < 20 * DRAY__SECOND);
    assert_false(dray__delta_leads(view, 7, 1, 2));
    assert_int_equal(dray__delta_publish(delta, 7, 3, INT64_MAX, NULL), 0);
    assert_false(dray__delta_leads(view, 7, 1, 3));
    assert_false(dray__delta_leads(view, 7, 2, 3));
    same(&w, true);
    change(&w, 100);
    assert_int_equal(dray__delta_publish(delta, 7, 4, INT64_MAX, NULL), 0);
    assert_true(dray__delta_leads(view, 7, 3, 4));
    uint32_t full = 0;
    apply(&w, view, &full);
    assert_true(same(&w, false));
    dray__delta_close(view);
    dray__delta_free(delta);
    end(&w);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "cuda") == 0) {
        gpu_begin(1);
        kind = DRAY_REGION_CUDA;
    }
    seed = test_seed();
    return suite_run(NULL, NULL);
}
