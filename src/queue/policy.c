/* The policies: which ready rows a claim gets. Each is one function over one partition,
 * deterministic in the order of requests. A new one is a function and a line of the table. */
#include "queue/table.h"

static void fifo(const dray__partition *p, const dray__track *track, uint32_t want, dray__pick *out)
{
    (void)p;
    for (uint32_t slot = track->head; slot != DRAY__NONE && out->count < want;
         slot = track->rows[slot].next)
        out->slots[out->count++] = slot;
    out->weight = out->count;
}

/* Ascending slots without a gap: stops at the first open row that is not ready. */
static void ordered(const dray__partition *p, const dray__track *track, uint32_t want,
                    dray__pick *out)
{
    uint32_t words = (uint32_t)dray__bit_words(p->rows);
    for (uint32_t w = track->open_from / 64; w < words && out->count < want; w++) {
        uint64_t open =
            ~(track->taken[w] | track->done[w] | p->dead[w]) & dray__bit_mask(w, 0, p->rows);
        uint64_t wait = open & ~track->ready[w];
        uint64_t take = wait ? open & ((wait & -wait) - 1) : open;
        for (; take && out->count < want; take &= take - 1)
            out->slots[out->count++] = w * 64 + (uint32_t)__builtin_ctzll(take);
        if (wait)
            break;
    }
    out->weight = out->count;
}

/* Whole groups, first complete first; members in slot order. Members that are settled already
 * (committed in an earlier claim, or dead) are left out but count, so that sizes stay even. */
static void group(const dray__partition *p, const dray__track *track, uint32_t want,
                  dray__pick *out)
{
    if (p->group_size == 1) { /* every row is a group */
        fifo(p, track, want, out);
        return;
    }
    for (uint32_t g = track->group_head; g != DRAY__NONE; g = track->groups[g].next) {
        dray__group_range range = p->groups[g];
        if (range.count > want - out->weight)
            break;
        for (uint32_t slot = range.first; slot < range.first + range.count; slot++)
            if (dray__bit_get(track->ready, slot))
                out->slots[out->count++] = slot;
        out->weight += range.count;
    }
}

static const dray__policy_fn policies[] = {
    [DRAY_POLICY_FIFO] = {.name = "fifo", .pick = fifo},
    [DRAY_POLICY_ORDERED] = {.name = "ordered", .pick = ordered, .in_order = true},
    [DRAY_POLICY_GROUP] = {.name = "group", .pick = group, .by_group = true},
};

const dray__policy_fn *dray__policy_find(int32_t policy)
{
    if (policy < 0 || (size_t)policy >= sizeof policies / sizeof *policies)
        return NULL;
    return &policies[policy];
}
