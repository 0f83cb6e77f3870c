/* The deal of a cohort (cohort.h). */
#include "weights/cohort.h"

#include "base/error.h"
#include "base/hash.h"
#include "model/layout.h"

#include <stdlib.h>
#include <string.h>

#define STRIPE_MIN ((uint64_t)64 << 10)
#define STRIPE_MAX ((uint64_t)4 << 20)

struct holder {
    uint32_t member, block;
};

struct shared {            /* a block of this rank */
    uint32_t first, count; /* of the holders, in the cohort's order, this rank among them */
    uint32_t stripes;
    uint64_t seed;
};

struct dray__cohort {
    const dray__sources *sources;
    const dray__destination *destination;
    uint32_t self;
    struct shared *blocks;
    struct holder *holders;
    uint32_t count, capacity;
};

static bool push(dray__cohort *c, uint32_t member, uint32_t block)
{
    if (c->count == c->capacity) {
        uint32_t capacity = c->capacity ? c->capacity * 2 : 256;
        struct holder *holders = realloc(c->holders, capacity * sizeof *holders);
        if (!holders)
            return false;
        c->holders = holders;
        c->capacity = capacity;
    }
    c->holders[c->count++] = (struct holder){member, block};
    return true;
}

/* The member's block that is this rectangle of this tensor; false: it has none. */
static bool find_block(const dray_layout *layout, const dray_tensor_info *wanted,
                       const dray__rect *rect, uint32_t *out)
{
    uint32_t tensor;
    if (dray_layout_find(layout, wanted->name, &tensor, NULL) ||
        dray_layout_tensor(layout, tensor)->dtype != wanted->dtype)
        return false;
    const dray_block *block = dray__layout_first_block(layout, tensor);
    for (; block; block = dray__layout_next_block(layout, block)) {
        uint32_t index = dray__layout_block_index(layout, block);
        dray__rect other = dray__rect_of(layout, index);
        if (memcmp(&other, rect, sizeof other) == 0) {
            *out = index;
            return true;
        }
    }
    return false;
}

/* Big blocks are cut into equal stripes, as many for each holder; small ones go as a whole. */
static uint32_t stripes_of(const dray__rect *rect, size_t element, uint32_t holders)
{
    uint64_t bytes = dray__rect_elements(rect) * element;
    if (holders < 2 || bytes < holders * STRIPE_MIN || rect->extent[0] < (int64_t)holders)
        return 1;
    uint64_t rounds = (bytes + holders * STRIPE_MAX - 1) / (holders * STRIPE_MAX);
    uint64_t most = (uint64_t)rect->extent[0] / holders;
    return holders * (uint32_t)(rounds < most ? rounds : most);
}

/* Which blocks of all members are the same, by block: members in the cohort's order. */
static int find_holders(dray__cohort *c, dray_error *error)
{
    const dray_layout *own = c->destination->layout;
    uint32_t members = c->sources->cohort_count, blocks = dray_layout_block_count(own);
    for (uint32_t b = 0; b < blocks; b++) {
        const dray_tensor_info *tensor = dray_layout_tensor(own, dray_layout_block(own, b)->tensor);
        dray__rect rect = dray__rect_of(own, b);
        struct shared *shared = &c->blocks[b];
        shared->first = c->count;
        for (uint32_t m = 0; m < members; m++) {
            const dray__source *member = &c->sources->cohort[m];
            uint32_t found = b;
            if (m != c->self &&
                (!member->endpoint[0] || !find_block(member->layout, tensor, &rect, &found)))
                continue;
            if (!push(c, m, found))
                return dray__nomem(error);
        }
        shared->count = c->count - shared->first;
        shared->stripes =
            stripes_of(&rect, dray_dtype_size((dray_dtype)tensor->dtype), shared->count);
        shared->seed =
            dray__hash(tensor->name, strlen(tensor->name)) ^ dray__hash(&rect, sizeof rect);
    }
    return DRAY_OK;
}

int dray__cohort_new(const dray__sources *sources, const dray__destination *destination,
                     dray__cohort **out, dray_error *error)
{
    dray__cohort *c = calloc(1, sizeof *c);
    if (!c)
        return dray__nomem(error);
    c->sources = sources;
    c->destination = destination;
    c->self = UINT32_MAX;
    for (uint32_t m = 0; m < sources->cohort_count; m++)
        if (sources->cohort[m].token == destination->token)
            c->self = m;
    c->blocks = calloc((size_t)dray_layout_block_count(destination->layout) + 1, sizeof *c->blocks);
    int rc = !c->blocks ? dray__nomem(error)
             : c->self == UINT32_MAX || !sources->cohort[c->self].endpoint[0]
                 ? dray__fail(error, DRAY_ENOENT, "this rank is not of its cohort")
                 : find_holders(c, error);
    if (rc) {
        dray__cohort_free(c);
        return rc;
    }
    *out = c;
    return DRAY_OK;
}

void dray__cohort_free(dray__cohort *c)
{
    if (!c)
        return;
    free(c->blocks);
    free(c->holders);
    free(c);
}

bool dray__cohort_shared(const dray__cohort *c, uint32_t block)
{
    return c->blocks[block].count > 1;
}

uint32_t dray__cohort_stripes(const dray__cohort *c, uint32_t block)
{
    return c->blocks[block].stripes;
}

dray__rect dray__cohort_stripe(const dray__cohort *c, uint32_t block, uint32_t stripe)
{
    dray__rect rect = dray__rect_of(c->destination->layout, block);
    int64_t rows = rect.extent[0], count = (int64_t)c->blocks[block].stripes;
    int64_t begin = rows * (int64_t)stripe / count, end = rows * ((int64_t)stripe + 1) / count;
    rect.start[0] += begin;
    rect.extent[0] = end - begin;
    return rect;
}

/* The `number`th holder on a host (or on any but the publisher's, where host is NULL); wraps. */
static const struct holder *nth(const dray__cohort *c, const struct shared *shared,
                                const uint64_t *host, uint64_t publisher_host, uint64_t number)
{
    uint32_t fit = 0;
    for (int pass = 0; pass < 2; pass++) {
        uint64_t at = 0;
        for (uint32_t i = shared->first; i < shared->first + shared->count; i++) {
            uint64_t on = c->sources->cohort[c->holders[i].member].host;
            if (on == publisher_host || (host && on != *host))
                continue;
            if (pass == 0)
                fit++;
            else if (at++ == number % fit)
                return &c->holders[i];
        }
        if (fit == 0)
            return NULL;
    }
    return NULL;
}

uint32_t dray__cohort_from(const dray__cohort *c, uint32_t block, uint32_t stripe,
                           uint64_t publisher_host, uint32_t *from_block)
{
    const struct shared *shared = &c->blocks[block];
    uint64_t number = shared->seed + stripe, here = c->destination->host;
    const struct holder *fetcher = nth(c, shared, NULL, publisher_host, number);
    if (!fetcher || fetcher->member == c->self)
        return DRAY__FROM_PUBLISHER;
    const struct holder *near = fetcher;
    if (c->sources->cohort[fetcher->member].host != here)
        near = nth(c, shared, &here, publisher_host, number);
    if (!near || near->member == c->self)
        near = fetcher;
    *from_block = near->block;
    return near->member;
}
