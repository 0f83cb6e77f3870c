/* The policies: the ready rows that a claim gets. Each is one function over one partition,
 * deterministic in the order of requests. The table is policies.h. */
#include "queue/policies.h"
#include "queue/table/table_inside.h"

static void fifo(const dray__table *table, const dray__partition *p, const dray__want *want,
                 uint32_t limit, dray__pick *out)
{
    (void)table;
    const dray__track *track = &p->tracks[want->task];
    for (uint32_t slot = track->head; slot != DRAY__NONE && out->count < limit;
         slot = track->rows[slot].next)
        if (!dray__is_left(p, want, slot))
            out->slots[out->count++] = slot;
    out->weight = out->count;
}

/* Picks ascending slots without a gap: stops at the first open row that is not ready. */
static void ordered(const dray__table *table, const dray__partition *p, const dray__want *want,
                    uint32_t limit, dray__pick *out)
{
    (void)table;
    const dray__track *track = &p->tracks[want->task];
    uint32_t words = (uint32_t)dray__bit_words(p->rows);
    for (uint32_t w = track->open_from / 64; w < words && out->count < limit; w++) {
        uint64_t open =
            ~(track->taken[w] | track->done[w] | p->dead[w]) & dray__bit_mask(w, 0, p->rows);
        uint64_t wait = open & ~track->ready[w];
        uint64_t take = wait ? open & ((wait & -wait) - 1) : open;
        for (; take && out->count < limit; take &= take - 1)
            out->slots[out->count++] = w * 64 + (uint32_t)__builtin_ctzll(take);
        if (wait)
            break;
    }
    out->weight = out->count;
}

static bool leaves_group(const dray__partition *p, const dray__want *want, dray__group_range range)
{
    for (uint32_t slot = range.first; slot < range.first + range.count; slot++)
        if (dray__bit_get(p->tracks[want->task].ready, slot) && dray__is_left(p, want, slot))
            return true;
    return false;
}

/* Picks whole groups, in the order in which they became complete; members in slot order. Members
 * that are settled already (committed in an earlier claim, or dead) are left out but count, so that
 * sizes stay even. */
static void group(const dray__table *table, const dray__partition *p, const dray__want *want,
                  uint32_t limit, dray__pick *out)
{
    const dray__track *track = &p->tracks[want->task];
    if (p->group_size == 1) { /* every row is a group */
        fifo(table, p, want, limit, out);
        return;
    }
    for (uint32_t g = track->group_head; g != DRAY__NONE; g = track->groups[g].next) {
        dray__group_range range = p->groups[g];
        if (range.count > limit - out->weight)
            break;
        if (leaves_group(p, want, range))
            continue;
        for (uint32_t slot = range.first; slot < range.first + range.count; slot++)
            if (dray__bit_get(track->ready, slot))
                out->slots[out->count++] = slot;
        out->weight += range.count;
    }
}

/* ---- by rank: a heap of the best rows seen, the worst of them on top ------------------------- */

typedef double (*rank_fn)(const dray__table *table, const dray__partition *p, uint32_t slot);

typedef struct ranked {
    const dray__table *table;
    const dray__partition *p;
    rank_fn rank;
} ranked;

/* Returns true when row a comes after row b. */
static bool after(const ranked *r, uint32_t a, uint32_t b)
{
    double ra = r->rank(r->table, r->p, a), rb = r->rank(r->table, r->p, b);
    return ra > rb || (!(ra < rb) && a > b);
}

static void sink(const ranked *r, uint32_t *heap, uint32_t count, uint32_t at)
{
    for (;;) {
        uint32_t worst = at, child = 2 * at + 1;
        if (child < count && after(r, heap[child], heap[worst]))
            worst = child;
        if (child + 1 < count && after(r, heap[child + 1], heap[worst]))
            worst = child + 1;
        if (worst == at)
            return;
        uint32_t slot = heap[at];
        heap[at] = heap[worst];
        heap[worst] = slot;
        at = worst;
    }
}

static void lowest(const dray__table *table, const dray__partition *p, const dray__want *want,
                   uint32_t limit, rank_fn rank, dray__pick *out)
{
    const ranked r = {table, p, rank};
    const dray__track *track = &p->tracks[want->task];
    for (uint32_t slot = track->head; slot != DRAY__NONE; slot = track->rows[slot].next) {
        if (out->count < limit) {
            out->slots[out->count++] = slot;
            for (uint32_t i = out->count / 2; out->count == limit && i-- > 0;)
                sink(&r, out->slots, limit, i);
        } else if (after(&r, out->slots[0], slot)) {
            out->slots[0] = slot;
            sink(&r, out->slots, limit, 0);
        }
    }
    for (uint32_t i = out->count / 2; out->count < limit && i-- > 0;)
        sink(&r, out->slots, out->count, i);
    for (uint32_t left = out->count; left > 1; left--) {
        uint32_t slot = out->slots[0];
        out->slots[0] = out->slots[left - 1];
        out->slots[left - 1] = slot;
        sink(&r, out->slots, left - 1, 0);
    }
    out->weight = out->count;
}

static double version_of(const dray__table *table, const dray__partition *p, uint32_t slot)
{
    (void)table;
    return p->oldest ? (double)p->oldest[slot] : 0;
}

static double urgency_of(const dray__table *table, const dray__partition *p, uint32_t slot)
{
    double priority = 0;
    dray__row_tag(table, p, slot, table->priority_key, &priority);
    return -priority;
}

static void oldest_version(const dray__table *table, const dray__partition *p,
                           const dray__want *want, uint32_t limit, dray__pick *out)
{
    if (p->oldest)
        lowest(table, p, want, limit, version_of, out);
    else
        fifo(table, p, want, limit, out);
}

static void priority(const dray__table *table, const dray__partition *p, const dray__want *want,
                     uint32_t limit, dray__pick *out)
{
    lowest(table, p, want, limit, urgency_of, out);
}

/* ---------------------------------------------------------------------------------------------- */

#define XX(number, name, pick, traits, refused) [DRAY_POLICY_##number] = pick,
static dray__policy_fn *const policies[] = {DRAY__POLICY_MAP(XX)};
#undef XX

dray__policy_fn *dray__policy_find(int32_t policy)
{
    if (policy < 0 || (size_t)policy >= sizeof policies / sizeof *policies)
        return NULL;
    return policies[policy];
}
