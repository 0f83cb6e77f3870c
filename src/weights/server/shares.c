/* The part of an update that has arrived so far (shares.h). */
#include "weights/server/shares.h"

#include "base/array.h"
#include "base/error.h"

#include <pthread.h>
#include <stdlib.h>

struct landed {
    dray__rect rect;
    uint64_t source_sum, sum;
};

struct block {
    struct landed *items;
    uint32_t count;
    uint64_t capacity;
    dray__rect *expected;
    uint32_t expected_count;
    uint64_t expected_capacity;
};

struct dray__shares {
    pthread_mutex_t lock; /* of the blocks' items */
    uint64_t run;
    dray_region *const *regions;
    struct block *blocks;
    uint32_t count;
};

int dray__shares_new(uint64_t run, const dray_layout *layout, dray_region *const *regions,
                     dray__shares **out, dray_error *error)
{
    dray__shares *s = calloc(1, sizeof *s);
    if (!s)
        return dray__nomem(error);
    s->run = run;
    s->regions = regions;
    s->count = dray_layout_block_count(layout);
    s->blocks = calloc((size_t)s->count + 1, sizeof *s->blocks);
    if (!s->blocks) {
        free(s);
        return dray__nomem(error);
    }
    pthread_mutex_init(&s->lock, NULL);
    *out = s;
    return DRAY_OK;
}

void dray__shares_free(dray__shares *s)
{
    if (!s)
        return;
    for (uint32_t i = 0; i < s->count; i++) {
        free(s->blocks[i].items);
        free(s->blocks[i].expected);
    }
    free(s->blocks);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

bool dray__shares_expect(dray__shares *s, uint32_t index, const dray__rect *rect)
{
    struct block *block = &s->blocks[index];
    return DRAY__PUSH(block->expected, block->expected_count, block->expected_capacity, *rect);
}

/* Returns true when all of the rectangle is expected. Expected rectangles do not overlap. */
static bool is_expected(const struct block *block, const dray__rect *rect)
{
    uint64_t left = dray__rect_elements(rect);
    dray__rect cross;
    for (uint32_t i = 0; i < block->expected_count && left; i++)
        if (dray__rect_cross(&block->expected[i], rect, &cross))
            left -= dray__rect_elements(&cross);
    return left == 0;
}

bool dray__shares_enter(dray__shares *s, uint32_t index, const dray__rect *rect,
                        uint64_t source_sum, uint64_t sum)
{
    struct block *block = &s->blocks[index];
    pthread_mutex_lock(&s->lock);
    bool added = DRAY__PUSH(block->items, block->count, block->capacity,
                            (struct landed){*rect, source_sum, sum});
    pthread_mutex_unlock(&s->lock);
    return added;
}

uint64_t dray__shares_run(const dray__shares *shares)
{
    return shares->run;
}

dray_region *dray__shares_region(const dray__shares *shares, uint32_t index)
{
    return shares->regions[index];
}

dray_region *const *dray__shares_regions(const dray__shares *shares)
{
    return shares->regions;
}

int dray__shares_find(dray__shares *s, uint32_t index, const dray__rect *rect, bool *is_cut,
                      uint64_t *source_sum, uint64_t *sum)
{
    const struct block *block = &s->blocks[index];
    uint64_t wanted = dray__rect_elements(rect), there = 0;
    bool cut = false, same = true; /* same: the bits equal the publisher's */
    *source_sum = *sum = 0;
    pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < block->count && there < wanted; i++) {
        const struct landed *item = &block->items[i];
        dray__rect cross;
        if (!dray__rect_cross(&item->rect, rect, &cross))
            continue;
        uint64_t common = dray__rect_elements(&cross);
        cut |= common != dray__rect_elements(&item->rect);
        same &= item->source_sum == item->sum;
        there += common;
        *source_sum += item->source_sum;
        *sum += item->sum;
    }
    pthread_mutex_unlock(&s->lock);
    if (there < wanted)
        return is_expected(block, rect) ? DRAY_EAGAIN : DRAY_EUNSUPPORTED;
    *is_cut = cut;
    return cut && !same ? DRAY_EUNSUPPORTED : DRAY_OK;
}

int dray__shares_intact(dray__shares *s, const dray_layout *layout, uint32_t index,
                        const dray__rect *rect, dray_error *error)
{
    const struct block *block = &s->blocks[index];
    dray_region *scratch = NULL;
    int rc = DRAY_OK;
    for (uint32_t i = 0; rc == DRAY_OK; i++) {
        struct landed item;
        dray__rect cross;
        uint64_t sum = 0;
        pthread_mutex_lock(&s->lock); /* adding items may move the array */
        bool more = i < block->count;
        if (more)
            item = block->items[i];
        pthread_mutex_unlock(&s->lock);
        if (!more)
            break;
        if (!dray__rect_cross(&item.rect, rect, &cross))
            continue;
        rc = dray__sum_rect(layout, s->regions, index, &item.rect, &scratch, &sum, error);
        if (rc == DRAY_OK && sum != item.sum)
            rc = dray__fail(
                error, DRAY_ESTALE,
                "rectangle: unchanged memory expected, found other bits than were received");
    }
    dray_region_free(scratch);
    return rc;
}
