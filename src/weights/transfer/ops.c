/* Makes the plan of an update, and cuts its copies into ops: along the destination blocks, and
 * along the pieces that this rank owns in its group. */
#include "base/array.h"
#include "base/error.h"
#include "model/layout/layout.h"
#include "weights/internal.h"
#include "weights/placements/prequantised.h"
#include "weights/registry/coverage.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- names of a tensor on the other side ----------------------------------------------------- */

/* Returns the name of the tensor that has the memory of `name` in some source, or NULL. */
static const char *source_name(const void *user, const char *name)
{
    const dray__sources *s = user;
    for (uint32_t i = 0; i < s->count; i++) {
        uint32_t index;
        if (dray_layout_find(s->sources[i].layout, name, &index, NULL))
            continue;
        const dray_tensor_info *tensor = dray_layout_tensor(s->sources[i].layout, index);
        if (tensor->alias_of < 0)
            return tensor->name;
        return dray_layout_tensor(s->sources[i].layout, (uint32_t)tensor->alias_of)->name;
    }
    return NULL;
}

/* Returns the source's name of each tensor of a destination layout. */
static const char **names_for(const dray__sources *s, const dray_layout *layout)
{
    const char **names = calloc((size_t)dray_layout_tensor_count(layout) + 1, sizeof *names);
    if (names)
        dray__names_resolve(layout, source_name, s, names);
    return names;
}

/* ---- the plan, cut along blocks and ownership ----------------------------------------------- */

static int plan(dray__sources *s, const dray__destination *destination, dray_error *error)
{
    dray_plan_member *members = calloc((size_t)s->count + 1, sizeof *members);
    if (!members)
        return dray__nomem(error);
    for (uint32_t i = 0; i < s->count; i++) {
        const dray__source *source = &s->sources[i];
        bool own = source->local || source->member == destination->member;
        members[i] = (dray_plan_member){.layout = source->layout,
                                        .member = source->member,
                                        .name = source->name,
                                        .host = source->host,
                                        .process = own ? 1 : 2 + source->member,
                                        .device = dray__layout_device(source->layout)};
    }
    dray_plan_member self = {.layout = destination->layout,
                             .member = destination->member,
                             .host = destination->host,
                             .process = 1,
                             .device = dray__layout_device(destination->layout)};
    int rc = dray_plan_new(members, s->count, &self, NULL, &s->plan, error);
    free(members);
    return rc;
}

struct op_list {
    dray__op *items;
    uint64_t count, capacity;
};

static bool op_push(struct op_list *list, const dray__op *op)
{
    return DRAY__PUSH(list->items, list->count, list->capacity, *op);
}

static int cut_copy(const dray_layout *layout, const dray__pieces *pieces, const dray_copy *copy,
                    struct op_list *ops, dray_error *error)
{
    dray__rect whole = dray__copy_rect(copy), cross;
    uint64_t left = dray__rect_elements(&whole);
    dray__blocks held = dray__blocks_of(layout, copy->tensor, &whole);
    while (left && dray__blocks_next(&held)) {
        if (!dray__copy_fills(copy, held.block, &held.cross))
            continue;
        for (uint32_t p = pieces->first[held.index]; p < pieces->first[held.index + 1]; p++) {
            if (!dray__rect_cross(&whole, &pieces->items[p].rect, &cross))
                continue;
            dray__op op = {.copy = dray__copy_cut(copy, &cross),
                           .block = held.index,
                           .owned = pieces->items[p].owned};
            if (!op_push(ops, &op))
                return dray__nomem(error);
            left -= dray__rect_elements(&cross);
        }
    }
    if (left)
        return dray__fail(error, DRAY_EINTERNAL,
                          "tensor %s: a planned copy fills %" PRIu64 " elements outside any block",
                          dray_layout_tensor(layout, copy->tensor)->name, left);
    return DRAY_OK;
}

/* Returns the elements that a piece of a block stands for; a packed element stands for several. */
static dray__rect elements_of_piece(const dray_layout *layout, const dray_block *block,
                                    const dray__rect *piece)
{
    dray__rect whole = {.extent = {1, 1, 1, 1}};
    int64_t cell[DRAY_MAX_DIMS];
    uint32_t tensor;
    int part;
    if (!dray__layout_part_of(layout, block->tensor, &tensor, &part))
        return *piece;
    const dray_tensor_info *info = dray_layout_tensor(layout, tensor);
    dray__quant_part_cell(info, dray_layout_quant(layout, tensor), part, cell);
    memcpy(whole.extent, info->shape, info->ndim * sizeof *info->shape);
    return dray__cells_elements(cell, &whole, piece);
}

/* Splits a read: each part that this rank owns becomes an op, and so does each part of the rest.
 * Considers `block` alone, or it and the blocks behind it. */
static int split_read(const dray_layout *layout, const dray__pieces *pieces,
                      const dray_block *block, bool alone, const dray__op *whole,
                      struct op_list *ops, dray_error *error)
{
    struct op_list left = {0};
    int rc = op_push(&left, whole) ? DRAY_OK : dray__nomem(error);
    for (; block; block = alone ? NULL : dray__layout_next_block(layout, block)) {
        uint32_t index = dray__layout_block_index(layout, block);
        uint32_t p = pieces->first[index], end = pieces->first[index + 1];
        for (; p < end && rc == DRAY_OK; p++)
            for (uint64_t i = 0; pieces->items[p].owned && i < left.count && rc == DRAY_OK; i++) {
                dray__op op = left.items[i], taken = op;
                dray__rect rest = dray__copy_rect(&op.copy), cross;
                dray__rect piece = elements_of_piece(layout, block, &pieces->items[p].rect);
                if (!dray__rect_cross(&rest, &piece, &cross))
                    continue;
                taken.copy = dray__copy_cut(&op.copy, &cross);
                taken.owned = true;
                dray__rect sides[DRAY__RECT_SIDES];
                uint32_t count = dray__rect_rest(&rest, &cross, sides);
                bool pushed = op_push(ops, &taken);
                left.items[i--] = left.items[--left.count];
                taken = op;
                for (uint32_t k = 0; k < count && pushed; k++) {
                    taken.copy = dray__copy_cut(&op.copy, &sides[k]);
                    pushed = op_push(&left, &taken);
                }
                if (!pushed)
                    rc = dray__nomem(error);
            }
    }
    for (uint64_t i = 0; i < left.count && rc == DRAY_OK; i++)
        if (!op_push(ops, &left.items[i]))
            rc = dray__nomem(error);
    free(left.items);
    return rc;
}

/* Returns the destination block that a write of the plan fills. */
static uint32_t write_block(const dray_layout *layout, const dray_copy *write)
{
    dray__rect whole = dray__copy_rect(write);
    dray__blocks held = dray__blocks_of(layout, write->tensor, &whole);
    while (dray__blocks_next(&held))
        if (held.all && dray__copy_fills(write, held.block, &held.cross))
            return held.index;
    return UINT32_MAX;
}

/* Cuts the ops from `from` on: parts that the source can quantise become ops of their own. */
static int cut_prequantised(const dray__sources *s, const dray_transform *t, uint64_t from,
                            struct op_list *list, dray_error *error)
{
    for (uint64_t i = from, end = list->count; i < end; i++) {
        dray__op parts[DRAY__PREQUANTISED_PARTS], op = list->items[i];
        uint32_t count = dray__prequantised_cut(s, t, s->host, &op, parts);
        list->items[i] = parts[0];
        for (uint32_t p = 1; p < count; p++)
            if (!op_push(list, &parts[p]))
                return dray__nomem(error);
    }
    return DRAY_OK;
}

static int make_transform_ops(dray__sources *s, const dray_layout *layout,
                              const dray__pieces *pieces, struct op_list *list, dray_error *error)
{
    const dray_transform *t = dray_plan_transforms(s->plan);
    const dray_copy *reads = dray_plan_reads(s->plan), *writes = dray_plan_writes(s->plan);
    uint64_t count = dray_plan_transform_count(s->plan), write_count = 0;
    if (count)
        write_count = t[count - 1].first_write + t[count - 1].writes;
    s->transform_ops = calloc((size_t)count + 1, sizeof *s->transform_ops);
    s->write_blocks = calloc((size_t)write_count + 1, sizeof *s->write_blocks);
    int rc = s->transform_ops && s->write_blocks ? DRAY_OK : dray__nomem(error);
    for (uint64_t w = 0; w < write_count && rc == DRAY_OK; w++) {
        s->write_blocks[w] = write_block(layout, &writes[w]);
        if (s->write_blocks[w] == UINT32_MAX)
            rc = dray__fail(error, DRAY_EINTERNAL, "tensor %s: a planned write fills no block",
                            dray_layout_tensor(layout, writes[w].tensor)->name);
    }
    for (uint64_t i = 0; i < count && rc == DRAY_OK; i++) {
        /* A DEQUANTISE is for one block, which others may overlap. */
        bool alone = t[i].kind == DRAY_TRANSFORM_DEQUANTISE;
        const dray_quant *quant = dray_layout_quant(layout, t[i].tensor);
        const dray_block *of = NULL; /* NULL for MOST: its elements count in another
                                      * op */
        if (alone)
            of = dray_layout_block(layout, s->write_blocks[t[i].first_write]);
        else if (t[i].kind == DRAY_TRANSFORM_QUANTISE)
            of = dray__layout_first_block(layout, quant->values);
        dray__op op = {.transform = (uint32_t)i + 1};
        s->transform_ops[i] = list->count;
        for (uint64_t r = 0; r < t[i].reads && rc == DRAY_OK; r++) {
            op.copy = reads[t[i].first_read + r];
            rc = split_read(layout, pieces, of, alone, &op, list, error);
        }
        if (rc == DRAY_OK)
            rc = cut_prequantised(s, &t[i], s->transform_ops[i], list, error);
        op.scales = true;
        for (uint64_t r = 0; r < t[i].scale_reads && rc == DRAY_OK; r++) {
            op.copy = reads[t[i].first_scale_read + r];
            rc = op_push(list, &op) ? DRAY_OK : dray__nomem(error);
        }
        s->transform_ops[i + 1] = list->count;
    }
    return rc;
}

static int make_ops(dray__sources *s, const dray_layout *layout, const dray__pieces *pieces,
                    dray_error *error)
{
    struct op_list list = {0};
    const dray_copy *copies = dray_plan_copies(s->plan);
    int rc = DRAY_OK;
    for (uint64_t i = 0; i < dray_plan_count(s->plan) && rc == DRAY_OK; i++)
        rc = cut_copy(layout, pieces, &copies[i], &list, error);
    if (rc == DRAY_OK)
        rc = make_transform_ops(s, layout, pieces, &list, error);
    s->ops = list.items;
    s->op_count = list.count;
    for (uint64_t i = 0; i < s->op_count; i++) {
        const dray_copy *copy = &s->ops[i].copy;
        s->casts |= copy->source_dtype != copy->destination_dtype;
        s->files |=
            dray_layout_region(s->sources[copy->source].layout, copy->source_region)->kind ==
            DRAY_REGION_FILE;
    }
    return rc;
}

static int by_tensor(const void *a, const void *b, void *user)
{
    const dray__op *ops = user;
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    if (ops[x].copy.tensor != ops[y].copy.tensor)
        return ops[x].copy.tensor < ops[y].copy.tensor ? -1 : 1;
    return x < y ? -1 : x > y;
}

uint64_t *dray__ops_by_tensor(const dray__sources *s, const uint64_t *ops, uint64_t count)
{
    uint64_t *order = malloc((count + 1) * sizeof *order);
    if (!order)
        return NULL;
    memcpy(order, ops, count * sizeof *order);
    qsort_r(order, count, sizeof *order, by_tensor, s->ops);
    return order;
}

int dray__sources_prepare(dray__sources *s, const dray__destination *destination, dray_error *error)
{
    int rc = plan(s, destination, error);
    if (rc)
        return rc;
    s->names = names_for(s, destination->layout);
    dray__holder *holders = calloc((size_t)s->group_count + 1, sizeof *holders);
    rc = s->names && holders ? DRAY_OK : dray__nomem(error);
    for (uint32_t i = 0; i < s->group_count && rc == DRAY_OK; i++) {
        bool self = i == destination->rank;
        holders[i].layout = self ? destination->layout : s->group[i].layout;
        holders[i].names = self ? s->names : names_for(s, s->group[i].layout);
        if (!holders[i].names)
            rc = dray__nomem(error);
    }
    dray__pieces pieces = {0};
    if (rc == DRAY_OK)
        rc = dray__pieces_make(holders, destination->rank, &pieces, error);
    if (rc == DRAY_OK)
        rc = make_ops(s, destination->layout, &pieces, error);
    dray__pieces_free(&pieces);
    for (uint32_t i = 0; holders && i < s->group_count; i++)
        if (i != destination->rank)
            free((void *)holders[i].names);
    free(holders);
    return rc;
}
