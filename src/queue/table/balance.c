/* Divides rows by their costs: pure arithmetic; the order of rows breaks ties.
 *
 * dray__balance is the largest differencing method for many bins (N. Karmarkar, R. M. Karp, The
 * Differencing Method of Set Partitioning, 1982): every item starts as a division of itself, and
 * the two divisions that are most uneven are merged, the fullest bin of one with the emptiest of
 * the other, until one is left. */
#include "queue/table/balance.h"
#include "queue/table/table.h"

#include "base/error.h"

#include <stdlib.h>

typedef struct bin {
    uint64_t sum;
    uint32_t head, tail; /* its items; NONE when it is empty */
} bin;

typedef struct differencing {
    uint32_t bins, count; /* bins of a division; divisions left */
    bin *cells;           /* [division * bins], falling sums */
    uint32_t *heap;       /* divisions, the most uneven on top */
    uint32_t *next;       /* [item] */
} differencing;

static uint64_t spread(const differencing *d, uint32_t division)
{
    const bin *b = &d->cells[(size_t)division * d->bins];
    return b[0].sum - b[d->bins - 1].sum;
}

static bool more_uneven(const differencing *d, uint32_t a, uint32_t b)
{
    uint64_t sa = spread(d, a), sb = spread(d, b);
    return sa > sb || (sa == sb && a < b);
}

static void sink(differencing *d, uint32_t at)
{
    for (;;) {
        uint32_t best = at, child = 2 * at + 1;
        if (child < d->count && more_uneven(d, d->heap[child], d->heap[best]))
            best = child;
        if (child + 1 < d->count && more_uneven(d, d->heap[child + 1], d->heap[best]))
            best = child + 1;
        if (best == at)
            return;
        uint32_t division = d->heap[at];
        d->heap[at] = d->heap[best];
        d->heap[best] = division;
        at = best;
    }
}

static int falling(const void *a, const void *b)
{
    const bin *x = a, *y = b;
    if (x->sum != y->sum)
        return x->sum < y->sum ? 1 : -1;
    return (x->head > y->head) - (x->head < y->head);
}

static void join(differencing *d, bin *to, const bin *from)
{
    to->sum += from->sum;
    if (from->head == DRAY__NONE)
        return;
    if (to->head == DRAY__NONE)
        to->head = from->head;
    else
        d->next[to->tail] = from->head;
    to->tail = from->tail;
}

static void merge_all(differencing *d)
{
    while (d->count > 1) {
        uint32_t first = d->heap[0];
        d->heap[0] = d->heap[--d->count];
        sink(d, 0);
        bin *a = &d->cells[(size_t)first * d->bins];
        const bin *b = &d->cells[(size_t)d->heap[0] * d->bins];
        for (uint32_t i = 0; i < d->bins; i++)
            join(d, &a[i], &b[d->bins - 1 - i]);
        qsort(a, d->bins, sizeof *a, falling);
        d->heap[0] = first;
        sink(d, 0);
    }
}

/* A bin without items gets the cheapest item of the bin that has most. */
static void fill_empty(const uint64_t *costs, uint32_t count, uint32_t bins, uint32_t *of,
                       uint32_t *items)
{
    for (uint32_t b = 0; b < bins; b++)
        items[b] = 0;
    for (uint32_t i = 0; i < count; i++)
        items[of[i]]++;
    for (uint32_t b = 0; b < bins; b++) {
        uint32_t from = 0, cheapest = DRAY__NONE;
        for (uint32_t k = 1; k < bins; k++)
            from = items[k] > items[from] ? k : from;
        if (items[b] || items[from] < 2)
            continue;
        for (uint32_t i = 0; i < count; i++)
            if (of[i] == from && (cheapest == DRAY__NONE || costs[i] < costs[cheapest]))
                cheapest = i;
        of[cheapest] = b;
        items[from]--;
        items[b]++;
    }
}

int dray__balance(const uint64_t *costs, uint32_t count, uint32_t bins, uint32_t *of,
                  dray_error *error)
{
    if ((uint64_t)count * bins > DRAY__BALANCE_MAX)
        return dray__fail(error, DRAY_EINVALID, "%u rows divided by %u: too many to balance", count,
                          bins);
    differencing d = {.bins = bins, .count = count};
    d.cells = malloc((size_t)count * bins * sizeof *d.cells);
    d.heap = calloc((size_t)count + bins, sizeof *d.heap);
    d.next = malloc(count * sizeof *d.next);
    if (!d.cells || !d.heap || !d.next) {
        free(d.cells);
        free(d.heap);
        free(d.next);
        return dray__nomem(error);
    }
    for (uint32_t i = 0; i < count; i++) {
        d.next[i] = DRAY__NONE;
        d.heap[i] = i;
        for (uint32_t b = 0; b < bins; b++)
            d.cells[(size_t)i * bins + b] = (bin){0, DRAY__NONE, DRAY__NONE};
        d.cells[(size_t)i * bins] = (bin){costs[i], i, i};
    }
    for (uint32_t i = count / 2; i-- > 0;)
        sink(&d, i);
    merge_all(&d);
    const bin *cells = &d.cells[(size_t)d.heap[0] * bins];
    for (uint32_t b = 0; b < bins; b++)
        for (uint32_t i = cells[b].head; i != DRAY__NONE; i = d.next[i])
            of[i] = b;
    fill_empty(costs, count, bins, of, d.heap);
    free(d.cells);
    free(d.heap);
    free(d.next);
    return DRAY_OK;
}

/* ---- packing --------------------------------------------------------------------------------- */

typedef struct cost_item {
    uint64_t cost;
    uint32_t index;
} cost_item;

static int costliest_first(const void *a, const void *b)
{
    const cost_item *x = a, *y = b;
    if (x->cost != y->cost)
        return x->cost < y->cost ? 1 : -1;
    return (x->index > y->index) - (x->index < y->index);
}

int dray__pack(const uint64_t *costs, uint32_t count, uint64_t cap, uint32_t rows, uint32_t *of,
               uint32_t *bins, dray_error *error)
{
    cost_item *items = malloc((count ? count : 1) * sizeof *items);
    uint64_t *sums = calloc(count ? count : 1, sizeof *sums);
    uint32_t *held = calloc(count ? count : 1, sizeof *held), used = 0;
    int rc = items && sums && held ? DRAY_OK : dray__nomem(error);
    for (uint32_t i = 0; !rc && i < count; i++)
        items[i] = (cost_item){costs[i], i};
    if (!rc)
        qsort(items, count, sizeof *items, costliest_first);
    for (uint32_t i = 0, open = 0; !rc && i < count; i++) {
        while (rows && open < used && held[open] == rows)
            open++; /* bins before it are full */
        uint32_t b = open;
        while (b < used && ((cap && sums[b] + items[i].cost > cap) || (rows && held[b] == rows)))
            b++;
        used += b == used;
        sums[b] += items[i].cost;
        held[b]++;
        of[items[i].index] = b;
    }
    free(items);
    free(sums);
    free(held);
    *bins = used;
    return rc;
}
