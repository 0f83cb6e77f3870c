/* The division of bytes in a cohort (cohort.h). */
#include "weights/transfer/cohort.h"

#include "base/arena.h"
#include "base/array.h"
#include "base/error.h"
#include "base/hash.h"
#include "model/layout/layout.h"

#include <stdlib.h>
#include <string.h>

#define STRIPE_MIN ((uint64_t)64 << 10)
#define STRIPE_MAX ((uint64_t)4 << 20)

/* The most cells of a block: if there were more, each of its holders fetches it. */
enum { CELLS_MAX = 4096, CUTS_MAX = 256 };

struct holder {
    uint32_t member, block;
};

/* A part of a block of this rank that has the same holders everywhere. */
struct cell {
    dray__rect rect;
    uint32_t first, count;          /* its holders, in the cohort's order, with this rank */
    uint32_t first_stripe, stripes; /* indices among the block's stripes */
    uint64_t seed;
};

struct dray__cohort {
    const dray__sources *sources;
    const dray__destination *destination;
    dray__cohort_fn *takes_part;
    uint32_t self;
    uint32_t *block_cells; /* the first cell of each block, and the end */
    bool *shared;          /* by block */
    struct cell *cells;
    struct holder *holders;
    uint32_t cell_count, count;
    uint64_t cell_capacity, capacity;
};

/* The state while the division is computed. */
struct making {
    dray__cohort *c;
    uint32_t *tensors; /* [member]: its current tensor; UINT32_MAX when it has none */
    int64_t cuts[DRAY_MAX_DIMS][CUTS_MAX];
    uint32_t cut_count[DRAY_MAX_DIMS];
};

static bool push(dray__cohort *c, uint32_t member, uint32_t block)
{
    return DRAY__PUSH(c->holders, c->count, c->capacity, (struct holder){member, block});
}

static struct cell *push_cell(dray__cohort *c)
{
    struct cell *cell = dray__append(&c->cells, sizeof *cell, c->cell_count, &c->cell_capacity);
    c->cell_count += cell != NULL;
    return cell;
}

static bool same_quant(const dray_quant *a, const dray_quant *b)
{
    if (!a || !b)
        return a == b;
    return a->kind == b->kind && a->scale_format == b->scale_format &&
           memcmp(a->block, b->block, sizeof a->block) == 0;
}

/* Finds each member's tensor with this name, dtype, shape and scales, if the member takes part. */
static void find_tensors(struct making *m, const dray_tensor_info *wanted, const dray_quant *quant)
{
    const dray__cohort *c = m->c;
    for (uint32_t k = 0; k < c->sources->cohort_count; k++) {
        const dray__source *member = &c->sources->cohort[k];
        uint32_t *tensor = &m->tensors[k];
        if (!c->takes_part(member, c->destination) ||
            dray_layout_find(member->layout, wanted->name, tensor, NULL)) {
            *tensor = UINT32_MAX;
            continue;
        }
        const dray_tensor_info *info = dray_layout_tensor(member->layout, *tensor);
        if (!dray__tensor_like(info, wanted) ||
            !same_quant(dray_layout_quant(member->layout, *tensor), quant))
            *tensor = UINT32_MAX;
    }
}

static const dray_block *first_block(const struct making *m, uint32_t member)
{
    uint32_t tensor = m->tensors[member];
    return tensor == UINT32_MAX
               ? NULL
               : dray__layout_first_block(m->c->sources->cohort[member].layout, tensor);
}

/* Adds a cut. Returns false when there are too many. */
static bool add_cut(struct making *m, uint32_t d, int64_t at)
{
    uint32_t count = m->cut_count[d], i = 0;
    while (i < count && m->cuts[d][i] < at)
        i++;
    if (i < count && m->cuts[d][i] == at)
        return true;
    if (count == CUTS_MAX)
        return false;
    memmove(&m->cuts[d][i + 1], &m->cuts[d][i], (count - i) * sizeof m->cuts[d][0]);
    m->cuts[d][i] = at;
    m->cut_count[d]++;
    return true;
}

/* Collects the starts and ends of the members' blocks. The result is the same for all holders of
 * the tensor. */
static bool find_cuts(struct making *m, uint32_t ndim)
{
    const dray__cohort *c = m->c;
    memset(m->cut_count, 0, sizeof m->cut_count);
    for (uint32_t k = 0; k < c->sources->cohort_count; k++) {
        const dray_layout *layout = c->sources->cohort[k].layout;
        for (const dray_block *block = first_block(m, k); block;
             block = dray__layout_next_block(layout, block)) {
            dray__rect rect = dray__rect_of(layout, dray__layout_block_index(layout, block));
            for (uint32_t d = 0; d < ndim; d++)
                if (!add_cut(m, d, rect.start[d]) || !add_cut(m, d, rect.start[d] + rect.extent[d]))
                    return false;
        }
    }
    return true;
}

/* Finds the member's block that has all of the cell. A cell is either inside a block or outside. */
static bool find_block(const struct making *m, uint32_t member, const dray__rect *cell,
                       uint32_t *out)
{
    if (m->tensors[member] == UINT32_MAX)
        return false;
    dray__blocks held =
        dray__blocks_of(m->c->sources->cohort[member].layout, m->tensors[member], cell);
    bool any = dray__blocks_next(&held);
    *out = held.index;
    return any;
}

/* Returns the number of stripes of a cell. Large cells are cut into equal stripes, the same number
 * for each holder; small ones are not cut. */
static uint32_t stripes_of(const dray__rect *rect, size_t element, uint32_t holders)
{
    uint64_t bytes = dray__rect_elements(rect) * element;
    if (holders < 2 || bytes < holders * STRIPE_MIN || rect->extent[0] < (int64_t)holders)
        return 1;
    uint64_t rounds = (bytes + holders * STRIPE_MAX - 1) / (holders * STRIPE_MAX);
    uint64_t most = (uint64_t)rect->extent[0] / holders;
    return holders * (uint32_t)(rounds < most ? rounds : most);
}

/* Adds a cell. alone: with this rank as its only holder. */
static bool add_cell(const struct making *m, uint32_t block, const dray__rect *rect, bool alone,
                     uint32_t *stripes)
{
    dray__cohort *c = m->c;
    const dray_layout *own = c->destination->layout;
    const dray_tensor_info *tensor = dray_layout_tensor(own, dray_layout_block(own, block)->tensor);
    struct cell *cell = push_cell(c);
    if (!cell)
        return false;
    *cell = (struct cell){.rect = *rect, .first = c->count, .first_stripe = *stripes};
    for (uint32_t k = 0; k < c->sources->cohort_count; k++) {
        uint32_t found = block;
        if (k != c->self && (alone || !find_block(m, k, rect, &found)))
            continue;
        if (!push(c, k, found))
            return false;
    }
    cell->count = c->count - cell->first;
    cell->stripes = stripes_of(rect, dray_dtype_size((dray_dtype)tensor->dtype), cell->count);
    cell->seed = dray__hash(tensor->name, strlen(tensor->name)) ^ dray__hash(rect, sizeof *rect);
    c->shared[block] |= cell->count > 1;
    *stripes += cell->stripes;
    return true;
}

/* Cuts a block into cells, at the cuts of each dimension. */
static bool cut_block(struct making *m, uint32_t block, uint32_t ndim)
{
    dray__rect whole = dray__rect_of(m->c->destination->layout, block), cell = whole;
    uint32_t at[DRAY_MAX_DIMS] = {0}, low[DRAY_MAX_DIMS] = {0}, stripes = 0;
    uint64_t cells = 1;
    for (uint32_t d = 0; d < ndim; d++) {
        uint32_t high;
        while (m->cuts[d][low[d]] < whole.start[d])
            low[d]++;
        for (high = low[d]; m->cuts[d][high] < whole.start[d] + whole.extent[d]; high++)
            ;
        cells *= high - low[d];
        at[d] = low[d];
    }
    if (cells > CELLS_MAX)
        return add_cell(m, block, &whole, true, &stripes);
    for (bool more = true; more;) {
        for (uint32_t d = 0; d < ndim; d++) {
            cell.start[d] = m->cuts[d][at[d]];
            cell.extent[d] = m->cuts[d][at[d] + 1] - cell.start[d];
        }
        if (!add_cell(m, block, &cell, false, &stripes))
            return false;
        more = false;
        for (uint32_t d = ndim; d-- > 0 && !more;) {
            more = m->cuts[d][++at[d]] < whole.start[d] + whole.extent[d];
            if (!more)
                at[d] = low[d];
        }
    }
    return true;
}

/* Cuts all blocks into cells, and finds the holders of each. */
static bool cut_all(struct making *m)
{
    dray__cohort *c = m->c;
    const dray_layout *own = c->destination->layout;
    uint32_t looked_at = UINT32_MAX;
    bool few = true;
    for (uint32_t b = 0; b < dray_layout_block_count(own); b++) {
        uint32_t t = dray_layout_block(own, b)->tensor, stripes = 0;
        const dray_tensor_info *tensor = dray_layout_tensor(own, t);
        if (t != looked_at) {
            find_tensors(m, tensor, dray_layout_quant(own, t));
            few = find_cuts(m, tensor->ndim);
        }
        looked_at = t;
        dray__rect whole = dray__rect_of(own, b);
        c->block_cells[b] = c->cell_count;
        if (!(few ? cut_block(m, b, tensor->ndim) : add_cell(m, b, &whole, true, &stripes)))
            return false;
    }
    c->block_cells[dray_layout_block_count(own)] = c->cell_count;
    return true;
}

static int make(dray__cohort *c, dray_error *error)
{
    uint32_t members = c->sources->cohort_count;
    uint32_t blocks = dray_layout_block_count(c->destination->layout);
    struct making *m = calloc(1, sizeof *m);
    if (!m)
        return dray__nomem(error);
    m->c = c;
    m->tensors = calloc((size_t)members + 1, sizeof *m->tensors);
    c->block_cells = calloc((size_t)blocks + 1, sizeof *c->block_cells);
    c->shared = calloc((size_t)blocks + 1, sizeof *c->shared);
    bool made = m->tensors && c->block_cells && c->shared && cut_all(m);
    free(m->tensors);
    free(m);
    return made ? DRAY_OK : dray__nomem(error);
}

int dray__cohort_new(const dray__sources *sources, const dray__destination *destination,
                     dray__cohort_fn *takes_part, dray__cohort **out, dray_error *error)
{
    dray__cohort *c = calloc(1, sizeof *c);
    if (!c)
        return dray__nomem(error);
    c->sources = sources;
    c->destination = destination;
    c->takes_part = takes_part;
    c->self = UINT32_MAX;
    for (uint32_t m = 0; m < sources->cohort_count; m++)
        if (sources->cohort[m].token == destination->token)
            c->self = m;
    int rc = c->self == UINT32_MAX || !takes_part(&sources->cohort[c->self], destination)
                 ? dray__fail(error, DRAY_ENOENT, "this rank is not of its cohort")
                 : make(c, error);
    if (rc)
        dray__cohort_free(c);
    else
        *out = c;
    return rc;
}

void dray__cohort_free(dray__cohort *c)
{
    if (!c)
        return;
    free(c->block_cells);
    free(c->shared);
    free(c->cells);
    free(c->holders);
    free(c);
}

bool dray__cohort_shared(const dray__cohort *c, uint32_t block)
{
    return c->shared[block];
}

uint32_t dray__cohort_stripes(const dray__cohort *c, uint32_t block)
{
    const struct cell *last = &c->cells[c->block_cells[block + 1] - 1];
    return last->first_stripe + last->stripes;
}

static const struct cell *cell_of(const dray__cohort *c, uint32_t block, uint32_t stripe)
{
    uint32_t low = c->block_cells[block], high = c->block_cells[block + 1] - 1;
    while (low < high) { /* finds the last cell that begins at or before the stripe */
        uint32_t middle = (low + high + 1) / 2;
        bool before = c->cells[middle].first_stripe <= stripe;
        low = before ? middle : low;
        high = before ? high : middle - 1;
    }
    return &c->cells[low];
}

dray__rect dray__cohort_stripe(const dray__cohort *c, uint32_t block, uint32_t stripe)
{
    const struct cell *cell = cell_of(c, block, stripe);
    dray__rect rect = cell->rect;
    int64_t rows = rect.extent[0], count = (int64_t)cell->stripes;
    int64_t number = (int64_t)(stripe - cell->first_stripe);
    int64_t begin = rows * number / count, end = rows * (number + 1) / count;
    rect.start[0] += begin;
    rect.extent[0] = end - begin;
    return rect;
}

/* Returns holder number `number`, modulo their count, on a host, or with host NULL on all hosts but
 * the publisher's. */
static const struct holder *nth(const dray__cohort *c, const struct cell *cell,
                                const uint64_t *host, uint64_t publisher_host, uint64_t number)
{
    uint32_t fit = 0;
    for (int pass = 0; pass < 2; pass++) {
        uint64_t at = 0;
        for (uint32_t i = cell->first; i < cell->first + cell->count; i++) {
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
    const struct cell *cell = cell_of(c, block, stripe);
    uint64_t number = cell->seed + stripe - cell->first_stripe, here = c->destination->host;
    const struct holder *fetcher = nth(c, cell, NULL, publisher_host, number);
    if (!fetcher || fetcher->member == c->self)
        return DRAY__FROM_PUBLISHER;
    const struct holder *near = fetcher;
    if (c->sources->cohort[fetcher->member].host != here)
        near = nth(c, cell, &here, publisher_host, number);
    if (!near || near->member == c->self)
        near = fetcher;
    *from_block = near->block;
    return near->member;
}

uint32_t dray__cohort_turn(const dray__cohort *c, uint32_t block, uint32_t stripe, uint32_t rounds,
                           uint32_t *from_block, uint32_t *round, uint32_t *holders)
{
    const struct cell *cell = cell_of(c, block, stripe);
    uint64_t number = cell->seed % (1u << 20) + stripe - cell->first_stripe;
    const struct holder *holder = &c->holders[cell->first + number % cell->count];
    *round = (uint32_t)(number / cell->count % rounds);
    *from_block = holder->block;
    *holders = cell->count;
    return holder->member;
}

uint32_t dray__cohort_self(const dray__cohort *c)
{
    return c->self;
}
