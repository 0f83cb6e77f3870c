/* Compares plans of quantised tensors with every element: which rank reads it, from which byte, and
 * which byte of the destination gets it. Every cell that is needed is read once, and as a whole. */
#include <dray/plan.h>

#include "base/random.h"
#include "seed.h"
#include "suite.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SOURCES = 5, BYTES = 1 << 20, BOXES = 64 };

static uint64_t seed, drawn;

static int64_t draw(int64_t below)
{
    return (int64_t)(dray__random_u64(seed, 0, drawn++) % (uint64_t)below);
}

typedef struct grid { /* elements, or scales */
    uint32_t ndim;
    int64_t shape[DRAY_MAX_DIMS];
} grid;

typedef struct box {
    int64_t start[DRAY_MAX_DIMS], extent[DRAY_MAX_DIMS];
} box;

static int64_t count_of(const grid *g)
{
    int64_t count = 1;
    for (int d = 0; d < DRAY_MAX_DIMS; d++)
        count *= g->shape[d];
    return count;
}

static int64_t index_of(const grid *g, const int64_t *at)
{
    int64_t index = 0;
    for (int d = 0; d < DRAY_MAX_DIMS; d++)
        index = index * g->shape[d] + at[d];
    return index;
}

/* Goes over a box: at[] counts from its start. */
static bool next(const int64_t *extent, int64_t *at)
{
    for (int d = DRAY_MAX_DIMS; d-- > 0;) {
        if (++at[d] < extent[d])
            return true;
        at[d] = 0;
    }
    return false;
}

/* Random disjoint boxes that make up the grid. */
static int cut(const grid *g, box *boxes, int most)
{
    int n = 1;
    boxes[0] = (box){0};
    memcpy(boxes[0].extent, g->shape, sizeof g->shape);
    for (int tries = (int)draw(most); tries > 0 && n < BOXES; tries--) {
        box *b = &boxes[draw(n)];
        int d = (int)draw(DRAY_MAX_DIMS);
        if (b->extent[d] < 2)
            continue;
        int64_t first = 1 + draw(b->extent[d] - 1);
        boxes[n] = *b;
        boxes[n].start[d] += first;
        boxes[n++].extent[d] -= first;
        b->extent[d] = first;
    }
    return n;
}

typedef struct member {
    dray_layout *layout;
    uint64_t used;
    int64_t *id; /* of the element that begins at a byte; -1: none does */
} member;

static void member_new(member *m)
{
    dray_region_info region = {.kind = DRAY_REGION_HOST, .bytes = BYTES};
    assert_int_equal(dray_layout_new(&m->layout, NULL), 0);
    assert_int_equal(dray_layout_add_region(m->layout, &region, NULL, NULL), 0);
    m->id = malloc(BYTES * sizeof *m->id);
    memset(m->id, 0xFF, BYTES * sizeof *m->id);
    m->used = (uint64_t)draw(100) * 8;
}

static void member_free(member *m)
{
    dray_layout_free(m->layout);
    free(m->id);
}

static void hold(member *m, uint32_t tensor, const grid *g, const box *b, int64_t first_id)
{
    const dray_tensor_info *info = dray_layout_tensor(m->layout, tensor);
    int64_t size = (int64_t)dray_dtype_size((dray_dtype)info->dtype), step = size;
    dray_block block = {.tensor = tensor, .offset = m->used};
    for (uint32_t d = g->ndim; d-- > 0;) {
        block.start[d] = b->start[d];
        block.extent[d] = b->extent[d];
        block.stride[d] = step;
        step = step * b->extent[d] + size * draw(3);
    }
    m->used += (uint64_t)step + (uint64_t)draw(40) * 8;
    assert_true(m->used < BYTES);
    assert_int_equal(dray_layout_add_block(m->layout, &block, NULL), 0);
    int64_t at[DRAY_MAX_DIMS] = {0}, global[DRAY_MAX_DIMS];
    do {
        uint64_t offset = block.offset;
        for (int d = 0; d < DRAY_MAX_DIMS; d++) {
            global[d] = b->start[d] + at[d];
            offset += (uint64_t)(at[d] * block.stride[d]);
        }
        m->id[offset] = first_id + index_of(g, global);
    } while (next(b->extent, at));
}

typedef struct world {
    grid elements, scales;
    dray_quant quant;
    int64_t cell[DRAY_MAX_DIMS];
    member source[SOURCES], destination;
    int sources;
    bool *needed; /* by scale: must its cell be read? */
} world;

static uint32_t add_tensor(member *m, const char *name, dray_dtype dtype, const grid *g)
{
    uint32_t index;
    assert_int_equal(
        dray_layout_add_tensor(m->layout, name, dtype, g->ndim, g->shape, &index, NULL), 0);
    return index;
}

static void need(world *w, const box *b, bool scales)
{
    int64_t at[DRAY_MAX_DIMS] = {0}, cell[DRAY_MAX_DIMS];
    do {
        for (int d = 0; d < DRAY_MAX_DIMS; d++)
            cell[d] = (b->start[d] + at[d]) / (scales ? 1 : w->cell[d]);
        w->needed[index_of(&w->scales, cell)] = true;
    } while (next(b->extent, at));
}

static void shapes(world *w)
{
    static const int64_t most[] = {0, 90, 40, 14, 8};
    w->quant.kind = draw(4) ? DRAY_QUANT_BLOCK : DRAY_QUANT_TENSOR;
    w->elements.ndim =
        w->quant.kind == DRAY_QUANT_BLOCK ? 2 + (uint32_t)draw(3) : 1 + (uint32_t)draw(4);
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        bool used = d < w->elements.ndim, last = d + 2 >= w->elements.ndim;
        w->elements.shape[d] = used ? 1 + draw(most[w->elements.ndim]) : 1;
        w->cell[d] = w->elements.shape[d];
        if (w->quant.kind == DRAY_QUANT_BLOCK)
            w->cell[d] = used && last ? 1 + draw(16) : 1;
        if (used && last && w->quant.kind == DRAY_QUANT_BLOCK)
            w->quant.block[d + 2 - w->elements.ndim] = w->cell[d];
        w->scales.shape[d] = (w->elements.shape[d] + w->cell[d] - 1) / w->cell[d];
    }
    w->scales.ndim = w->quant.kind == DRAY_QUANT_BLOCK ? w->elements.ndim : 0;
}

static void make(world *w)
{
    box boxes[BOXES];
    memset(w, 0, sizeof *w);
    shapes(w);
    w->needed = calloc((size_t)count_of(&w->scales), sizeof *w->needed);
    w->sources = 1 + (int)draw(SOURCES);
    for (int s = 0; s < w->sources; s++) {
        member_new(&w->source[s]);
        add_tensor(&w->source[s], "w", draw(2) ? DRAY_F32 : DRAY_BF16, &w->elements);
    }
    for (int i = cut(&w->elements, boxes, 20); i-- > 0;) {
        int first = (int)draw(w->sources), other = (int)draw(w->sources);
        hold(&w->source[first], 0, &w->elements, &boxes[i], 0);
        if (other != first)
            hold(&w->source[other], 0, &w->elements, &boxes[i], 0);
    }
    member *to = &w->destination;
    member_new(to);
    add_tensor(to, "w", DRAY_F8E4M3, &w->elements);
    w->quant.scales = add_tensor(to, "w_scale_inv", DRAY_F32, &w->scales);
    assert_int_equal(dray_layout_set_quant(to->layout, 0, &w->quant, NULL), 0);
    for (int i = cut(&w->elements, boxes, 10); i-- > 0;)
        if (draw(3)) {
            hold(to, 0, &w->elements, &boxes[i], 0);
            need(w, &boxes[i], false);
        }
    to->used = (to->used + 7) & ~UINT64_C(7);
    for (int i = cut(&w->scales, boxes, 6); i-- > 0;)
        if (draw(3)) {
            hold(to, w->quant.scales, &w->scales, &boxes[i], count_of(&w->elements));
            need(w, &boxes[i], true);
        }
}

static dray_plan *plan_of(const world *w, uint32_t casts, int want, dray_error *e)
{
    dray_plan_member sources[SOURCES] = {0};
    for (int s = 0; s < w->sources; s++)
        sources[s] = (dray_plan_member){.layout = w->source[s].layout,
                                        .member = (uint64_t)s + 1,
                                        .host = (uint64_t)s % 2,
                                        .process = (uint64_t)s};
    dray_plan_member to = {.layout = w->destination.layout, .member = 99, .process = 99};
    dray_plan_options options = DRAY_PLAN_OPTIONS_INIT;
    options.allow_cast = casts;
    dray_plan *plan = NULL;
    int rc = dray_plan_new(sources, (uint32_t)w->sources, &to, &options, &plan, e);
    if (rc != want)
        fail_msg("%d, not %d: %s", rc, want, e->message);
    return plan;
}

/* Reads cover the transform's box, from the right bytes. Returns the bytes read. */
static uint64_t check_reads(const world *w, const dray_plan *plan, const dray_transform *t,
                            uint8_t *seen)
{
    const dray_copy *reads = dray_plan_reads(plan);
    uint64_t bytes = 0;
    for (uint64_t r = t->first_read; r < t->first_read + t->reads; r++) {
        const dray_copy *c = &reads[r];
        int64_t at[DRAY_MAX_DIMS] = {0}, global[DRAY_MAX_DIMS];
        do {
            uint64_t offset = c->source_offset;
            for (int d = 0; d < DRAY_MAX_DIMS; d++) {
                global[d] = c->start[d] + at[d];
                assert_in_range(global[d], t->start[d], t->start[d] + t->extent[d] - 1);
                offset += (uint64_t)(at[d] * c->source_stride[d]);
            }
            assert_int_equal(w->source[c->source].id[offset], index_of(&w->elements, global));
            seen[index_of(&w->elements, global)]++;
            bytes += dray_dtype_size((dray_dtype)c->source_dtype);
        } while (next(c->extent, at));
        assert_int_equal(c->source_dtype,
                         dray_layout_tensor(w->source[c->source].layout, 0)->dtype);
    }
    return bytes;
}

static uint64_t check_writes(const world *w, const dray_plan *plan, const dray_transform *t,
                             uint8_t *written)
{
    const dray_copy *writes = dray_plan_writes(plan);
    uint64_t bytes = 0;
    for (uint64_t i = t->first_write; i < t->first_write + t->writes; i++) {
        const dray_copy *c = &writes[i];
        bool scales = c->tensor == w->quant.scales;
        const grid *g = scales ? &w->scales : &w->elements;
        int64_t at[DRAY_MAX_DIMS] = {0}, global[DRAY_MAX_DIMS];
        do {
            uint64_t offset = c->destination_offset;
            for (int d = 0; d < DRAY_MAX_DIMS; d++) {
                global[d] = c->start[d] + at[d];
                int64_t cell = scales ? t->cell[d] : 1;
                assert_in_range(global[d] * cell, t->start[d], t->start[d] + t->extent[d] - 1);
                offset += (uint64_t)(at[d] * c->destination_stride[d]);
            }
            assert_int_equal(w->destination.id[offset],
                             (scales ? count_of(&w->elements) : 0) + index_of(g, global));
            written[offset]++;
            bytes += dray_dtype_size((dray_dtype)c->destination_dtype);
        } while (next(c->extent, at));
    }
    return bytes;
}

static void check(const world *w, const dray_plan *plan)
{
    const dray_transform *t = dray_plan_transforms(plan);
    uint8_t *seen = calloc((size_t)count_of(&w->elements), 1), *written = calloc(BYTES, 1);
    uint64_t read = 0, wrote = 0, linked = 0, asked = 0;
    for (uint64_t i = 0; i < dray_plan_transform_count(plan); i++) {
        assert_int_equal(t[i].kind, DRAY_TRANSFORM_QUANTISE);
        for (int d = 0; d < DRAY_MAX_DIMS; d++) {
            int64_t end = t[i].start[d] + t[i].extent[d];
            assert_int_equal(t[i].cell[d], w->cell[d]);
            assert_int_equal(t[i].start[d] % w->cell[d], 0);
            assert_true(end % w->cell[d] == 0 || end == w->elements.shape[d]);
        }
        read += check_reads(w, plan, &t[i], seen);
        wrote += check_writes(w, plan, &t[i], written);
    }
    int64_t at[DRAY_MAX_DIMS] = {0}, cell[DRAY_MAX_DIMS];
    do {
        for (int d = 0; d < DRAY_MAX_DIMS; d++)
            cell[d] = at[d] / w->cell[d];
        assert_int_equal(seen[index_of(&w->elements, at)], w->needed[index_of(&w->scales, cell)]);
    } while (next(w->elements.shape, at));
    for (size_t i = 0; i < BYTES; i++)
        assert_int_equal(written[i], w->destination.id[i] >= 0);
    for (int l = 0; l < DRAY_LINK_COUNT; l++)
        linked += dray_plan_bytes(plan, (dray_link)l);
    for (uint32_t s = 0; s < (uint32_t)w->sources; s++)
        asked += dray_plan_source_bytes(plan, s);
    assert_int_equal(dray_plan_count(plan), 0);
    assert_int_equal(dray_plan_total_bytes(plan), wrote);
    assert_int_equal(linked, wrote);
    assert_int_equal(asked, read);
    free(seen);
    free(written);
}

static void world_free(world *w)
{
    for (int s = 0; s < w->sources; s++)
        member_free(&w->source[s]);
    member_free(&w->destination);
    free(w->needed);
}

TEST(every_cell_once_and_whole)
{
    for (long i = test_times(300); i > 0; i--) {
        world w;
        dray_error e;
        make(&w);
        dray_plan *plan = plan_of(&w, 0, 0, &e);
        check(&w, plan);
        dray_plan_free(plan);
        world_free(&w);
    }
}

/* One source, all of it; both sides of a dtype. */
static void simple(world *w, dray_dtype from, dray_dtype to)
{
    memset(w, 0, sizeof *w);
    w->elements = (grid){2, {20, 30, 1, 1}};
    w->scales = (grid){2, {2, 3, 1, 1}};
    w->quant = (dray_quant){.kind = DRAY_QUANT_BLOCK, .scales = 1, .block = {10, 10}};
    w->sources = 1;
    box all = {.extent = {20, 30, 1, 1}}, scales = {.extent = {2, 3, 1, 1}};
    member *sides[] = {&w->source[0], &w->destination};
    const dray_dtype dtypes[] = {from, to};
    for (int i = 0; i < 2; i++) {
        member_new(sides[i]);
        add_tensor(sides[i], "w", dtypes[i], &w->elements);
        hold(sides[i], 0, &w->elements, &all, 0);
        if (dtypes[i] != DRAY_F8E4M3)
            continue;
        sides[i]->used = (sides[i]->used + 7) & ~UINT64_C(7);
        add_tensor(sides[i], "w_scale_inv", DRAY_F32, &w->scales);
        hold(sides[i], 1, &w->scales, &scales, 600);
        assert_int_equal(dray_layout_set_quant(sides[i]->layout, 0, &w->quant, NULL), 0);
    }
}

TEST(what_cannot_be_made_is_refused)
{
    world w;
    dray_error e;
    simple(&w, DRAY_BF16, DRAY_F8E4M3);
    assert_null(plan_of(&w, DRAY_CAST_FLOAT, DRAY_EDTYPE, &e));
    assert_non_null(strstr(e.message, "tensor w: member 99 wants quantised F8_E4M3"));
    world_free(&w);
    simple(&w, DRAY_F64, DRAY_F8E4M3);
    assert_null(plan_of(&w, 0, DRAY_EDTYPE, &e));
    world_free(&w);
    simple(&w, DRAY_F8E4M3, DRAY_I8);
    assert_null(plan_of(&w, 0, DRAY_EDTYPE, &e));
    world_free(&w);
    simple(&w, DRAY_F8E4M3, DRAY_F8E4M3); /* in the same way: copies */
    dray_plan *plan = plan_of(&w, 0, 0, &e);
    assert_int_equal(dray_plan_count(plan), 2);
    assert_int_equal(dray_plan_transform_count(plan), 0);
    dray_plan_free(plan);
    w.quant.scale_format = DRAY_SCALE_UE8M0;
    assert_int_equal(dray_layout_set_quant(w.destination.layout, 0, &w.quant, NULL), 0);
    assert_null(plan_of(&w, 0, DRAY_EDTYPE, &e));
    assert_non_null(strstr(e.message, "otherwise quantised F8_E4M3"));
    world_free(&w);
}

TEST(floats_of_quantised)
{
    world w;
    dray_error e;
    simple(&w, DRAY_F8E4M3, DRAY_BF16);
    dray_plan *plan = plan_of(&w, 0, 0, &e);
    assert_int_equal(dray_plan_transform_count(plan), 1);
    const dray_transform *t = dray_plan_transforms(plan);
    assert_int_equal(t->kind, DRAY_TRANSFORM_DEQUANTISE);
    assert_int_equal(t->scale_reads, 1);
    assert_int_equal(dray_plan_reads(plan)[t->first_scale_read].extent[1], 3);
    assert_int_equal(dray_plan_source_bytes(plan, 0), 600 + 6 * 4);
    assert_int_equal(dray_plan_total_bytes(plan), 1200);
    dray_plan_free(plan);
    world_free(&w);
}

int main(void)
{
    seed = test_seed();
    return suite_run(NULL, NULL);
}
