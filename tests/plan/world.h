/* Random placements for the planner's tests: tensors cut at random, pieces held by one or several
 * members, in dense or strided memory with gaps, under one or two names. */
#pragma once

#include <dray/plan.h>

#include "base/random.h"
#include "seed.h"
#include "suite.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TENSORS = 4, SOURCES = 6, REGIONS = 2, CELLS = 16, PLACED = 256 };

static uint64_t seed, drawn;

static inline uint64_t draw(uint64_t below)
{
    return dray__random_u64(seed, 0, drawn++) % below;
}

typedef struct cell {
    int64_t start[DRAY_MAX_DIMS], extent[DRAY_MAX_DIMS];
} cell;

typedef struct world_tensor {
    char name[32], other[32]; /* the tensor's two names */
    uint32_t ndim;
    int64_t shape[DRAY_MAX_DIMS];
    uint64_t elements;
    int32_t from, to; /* dtypes of the sources and of the destination */
} world_tensor;

/* A block that a member holds. Regions get their size once all blocks are placed. */
typedef struct placed {
    dray_block block;
} placed;

typedef struct holdings {
    placed items[PLACED];
    uint32_t count;
    uint64_t bytes[REGIONS];
} holdings;

typedef struct world {
    world_tensor tensors[TENSORS];
    uint32_t tensor_count, source_count;
    cell cells[TENSORS][CELLS]; /* the sources' division */
    uint32_t cell_count[TENSORS];
    holdings held[SOURCES + 1]; /* the last one is the destination's */
    dray_plan_member sources[SOURCES], destination;
    dray_layout *layouts[SOURCES + 1];
} world;

/* Returns the kind of the regions of a member. */
typedef dray_region_kind (*world_kind)(uint32_t member);

static inline uint64_t volume(const int64_t *extent, uint32_t ndim)
{
    uint64_t n = 1;
    for (uint32_t d = 0; d < ndim; d++)
        n *= (uint64_t)extent[d];
    return n;
}

static inline void make_tensor(world *w, uint32_t t)
{
    static const int32_t floats[] = {DRAY_F64, DRAY_F32, DRAY_BF16, DRAY_F16};
    static const int32_t others[] = {DRAY_U8, DRAY_I16, DRAY_I32, DRAY_I64, DRAY_BOOL};
    world_tensor *x = &w->tensors[t];
    *x = (world_tensor){.ndim = (uint32_t)draw(5)};
    snprintf(x->name, sizeof x->name, "layer.%u.weight", t);
    snprintf(x->other, sizeof x->other, "tied.%u.weight", t);
    uint64_t room = 1500;
    for (uint32_t d = 0; d < x->ndim; d++) {
        x->shape[d] = (int64_t)(1 + draw(room < 40 ? room : 40));
        room = room / (uint64_t)x->shape[d] + 1;
    }
    x->elements = volume(x->shape, x->ndim);
    if (draw(2)) {
        x->from = floats[draw(4)];
        x->to = draw(2) ? x->from : floats[draw(4)];
    } else {
        x->from = x->to = others[draw(5)];
    }
}

/* Cuts the tensor into up to `wanted` cells. Returns their number. */
static inline uint32_t cut(const world_tensor *x, uint32_t wanted, cell *cells)
{
    uint32_t n = 1;
    cells[0] = (cell){{0}, {1, 1, 1, 1}};
    memcpy(cells[0].extent, x->shape, x->ndim * sizeof *x->shape);
    for (uint32_t tries = 0; x->ndim && n < wanted && tries < 4 * wanted; tries++) {
        cell *a = &cells[draw(n)];
        uint32_t d = (uint32_t)draw(x->ndim);
        if (a->extent[d] < 2)
            continue;
        int64_t at = 1 + (int64_t)draw((uint64_t)a->extent[d] - 1);
        cells[n] = *a;
        cells[n].start[d] += at;
        cells[n].extent[d] -= at;
        a->extent[d] = at;
        n++;
    }
    return n;
}

/* Gives the cell memory of its own, dense or with gaps, with its dimensions in any order. */
static inline void place(holdings *h, uint32_t tensor, uint32_t ndim, const cell *c, uint64_t size)
{
    assert_true(h->count < PLACED);
    dray_block b = {.tensor = tensor, .region = (uint32_t)draw(REGIONS)};
    memcpy(b.start, c->start, sizeof b.start);
    memcpy(b.extent, c->extent, sizeof b.extent);
    uint32_t order[DRAY_MAX_DIMS];
    for (uint32_t d = 0; d < ndim; d++)
        order[d] = d;
    if (draw(4) == 0)
        for (uint32_t d = ndim; d > 1; d--) {
            uint32_t other = (uint32_t)draw(d), keep = order[d - 1];
            order[d - 1] = order[other], order[other] = keep;
        }
    uint64_t step = size, span = size;
    for (uint32_t i = ndim; i-- > 0;) {
        uint32_t d = order[i];
        if (draw(4) == 0)
            step += draw(2) ? size * draw(3) : draw(4);
        b.stride[d] = (int64_t)step;
        span += (uint64_t)(c->extent[d] - 1) * step;
        step *= (uint64_t)c->extent[d];
    }
    b.offset = h->bytes[b.region] + (draw(3) ? 0 : draw(17));
    h->bytes[b.region] = b.offset + span;
    h->items[h->count++] = (placed){b};
}

/* Gives every cell to one member or to several, and sometimes a whole tensor to a member in
 * addition. */
static inline void place_sources(world *w)
{
    for (uint32_t t = 0; t < w->tensor_count; t++) {
        const world_tensor *x = &w->tensors[t];
        uint64_t size = dray_dtype_size((dray_dtype)x->from);
        w->cell_count[t] = cut(x, 1 + (uint32_t)draw(CELLS), w->cells[t]);
        for (uint32_t c = 0; c < w->cell_count[t]; c++)
            for (uint64_t copies = 1 + (draw(2) ? draw(3) : 0); copies > 0; copies--)
                place(&w->held[draw(w->source_count)], t, x->ndim, &w->cells[t][c], size);
        if (draw(4) == 0) {
            cell whole[1];
            cut(x, 1, whole);
            place(&w->held[draw(w->source_count)], t, x->ndim, whole, size);
        }
    }
}

/* Gives the destination cells of its own: most of them once, some of them twice, in different
 * memory, and some not at all. */
static inline void place_destination(world *w)
{
    for (uint32_t t = 0; t < w->tensor_count; t++) {
        const world_tensor *x = &w->tensors[t];
        cell cells[CELLS];
        uint32_t n = cut(x, 1 + (uint32_t)draw(CELLS), cells);
        for (uint32_t c = 0; c < n; c++)
            for (uint64_t copies = draw(5) == 0 ? draw(3) : 1; copies > 0; copies--)
                place(&w->held[SOURCES], t, x->ndim, &cells[c], dray_dtype_size((dray_dtype)x->to));
    }
}

static inline dray_layout *make_layout(const world *w, uint32_t member, world_kind kind,
                                       const char *const *paths)
{
    const holdings *h = &w->held[member];
    dray_layout *l;
    uint32_t index, target[TENSORS];
    assert_int_equal(dray_layout_new(&l, NULL), DRAY_OK);
    for (uint32_t r = 0; r < REGIONS; r++) {
        dray_region_info info = {.kind = kind ? (int32_t)kind(member) : DRAY_REGION_SHARED,
                                 .bytes = h->bytes[r],
                                 .name = paths ? paths[member * REGIONS + r] : "/weights"};
        assert_int_equal(dray_layout_add_region(l, &info, &index, NULL), DRAY_OK);
    }
    for (uint32_t t = 0; t < w->tensor_count; t++) {
        const world_tensor *x = &w->tensors[t];
        /* Sources know both names, one as the alias of the other, or the first alone; a destination
         * may know the tensor by its second name alone only if all sources know it. */
        bool both = t % 2 == 0, swap = both && draw(2);
        const char *first = swap ? x->other : x->name, *second = swap ? x->name : x->other;
        bool alias = both && (member < SOURCES || draw(2));
        int32_t dtype = member == SOURCES ? x->to : x->from;
        assert_int_equal(dray_layout_add_tensor(l, first, (dray_dtype)dtype, x->ndim, x->shape,
                                                &target[t], NULL),
                         DRAY_OK);
        if (alias)
            assert_int_equal(dray_layout_add_alias(l, second, target[t], &index, NULL), DRAY_OK);
    }
    for (uint32_t i = 0; i < h->count; i++) {
        dray_block b = h->items[i].block;
        b.tensor = target[b.tensor];
        dray_error e;
        if (dray_layout_add_block(l, &b, &e))
            fail_msg("add_block: %s", e.message);
    }
    return l;
}

static inline void make_members(world *w)
{
    for (uint32_t i = 0; i <= w->source_count; i++) {
        dray_plan_member m = {.layout = w->layouts[i < w->source_count ? i : SOURCES],
                              .member = 100 + i,
                              .host = 1 + draw(2),
                              .process = draw(4),
                              .device = draw(3)};
        if (i < w->source_count)
            w->sources[i] = m;
        else
            w->destination = m;
    }
}

static inline void world_place(world *w)
{
    memset(w, 0, sizeof *w);
    w->tensor_count = 1 + (uint32_t)draw(TENSORS);
    w->source_count = 1 + (uint32_t)draw(SOURCES);
    for (uint32_t t = 0; t < w->tensor_count; t++)
        make_tensor(w, t);
    place_sources(w);
    place_destination(w);
}

static inline void world_layouts(world *w, world_kind kind, const char *const *paths)
{
    for (uint32_t i = 0; i < w->source_count; i++)
        w->layouts[i] = make_layout(w, i, kind, paths);
    w->layouts[SOURCES] = make_layout(w, SOURCES, kind, paths);
    make_members(w);
}

static inline void world_free(world *w)
{
    for (uint32_t i = 0; i <= SOURCES; i++)
        dray_layout_free(w->layouts[i]);
}

/* Advances an index vector within a rectangle. Returns false after the last element. */
static inline bool next_index(uint32_t ndim, const int64_t *extent, int64_t *index)
{
    uint32_t d = ndim;
    while (d > 0 && ++index[d - 1] == extent[d - 1])
        index[--d] = 0;
    return d > 0;
}

/* Returns the flattened number of an element of a tensor. */
static inline uint64_t element_of(const world_tensor *x, const int64_t *start, const int64_t *index)
{
    uint64_t n = 0;
    for (uint32_t d = 0; d < x->ndim; d++)
        n = n * (uint64_t)x->shape[d] + (uint64_t)(start[d] + index[d]);
    return n;
}

static inline uint64_t address_of(uint64_t offset, const int64_t *stride, uint32_t ndim,
                                  const int64_t *index)
{
    for (uint32_t d = 0; d < ndim; d++)
        offset += (uint64_t)stride[d] * (uint64_t)index[d];
    return offset;
}
