/* The kernels of deltas (weights/delta/delta.h has the format). One finds the changes of a block
 * against a copy of its earlier bits, slice by slice; the other applies them. Included by
 * cuda_kernels.cu alone. */
#ifndef DRAY_MOVER_CUDA_CUDA_DELTA_H
#define DRAY_MOVER_CUDA_CUDA_DELTA_H

#include "mover/cuda/cuda_device.h"

#define DELTA_BATCH 4
#define FULL 0xFFFFFFFFu

/* A slice of a block: its start and extent. */
typedef struct slice {
    u64 source, base, slot;
    u32 low[4], extent[4], elements;
} slice;

/* at: the slice's four coordinates in the block's grid of slices. */
INLINE slice slice_of(const dray__gpu_delta *d, const u32 *at)
{
    slice s;
    u64 number = 0;
    s.source = d->source;
    s.elements = 1;
    UNROLL
    for (int i = 0; i < 4; i++) {
        s.low[i] = at[i] * d->tile[i];
        u32 left = d->extent[i] - s.low[i];
        s.extent[i] = left < d->tile[i] ? left : d->tile[i];
        s.elements *= s.extent[i];
        s.source += s.low[i] * (u64)d->source_stride[i];
        number = number * d->slices[i] + at[i];
    }
    s.base = d->base + number * d->pitch;
    s.slot = d->table + number * DRAY__GPU_SLOT;
    return s;
}

/* Gives the four coordinates of a position in a box. */
INLINE void place_of(const u32 *extent, u32 position, u32 *at)
{
    UNROLL
    for (int i = 3; i >= 0; i--) {
        at[i] = position % extent[i];
        position /= extent[i];
    }
}

INLINE u64 address_of(u64 base, const int64_t *stride, const u32 *at)
{
    UNROLL
    for (int i = 0; i < 4; i++)
        base += at[i] * (u64)stride[i];
    return base;
}

INLINE u64 source_of(const dray__gpu_delta *d, const slice *s, u32 position)
{
    u32 at[4];
    place_of(s->extent, position, at);
    return address_of(s->source, d->source_stride, at);
}

/* Returns an element's present bits, in the dtype that is sent. */
INLINE u64 bits_of(const dray__gpu_delta *d, const slice *s, u32 position)
{
    u64 bits = load_element(source_of(d, s, position), d->in);
    return d->from == d->to ? bits : convert(bits, d->from, d->to);
}

/* Returns Σ of the values of the threads before this one; *all is that of all threads. `room` must
 * not be that of the last call. */
INLINE u64 block_before(u64 value, u64 *room, u64 *all)
{
    u64 upto = warp_upto(value), before = 0;
    if (THREAD % WARP == WARP - 1)
        room[THREAD / WARP] = upto;
    SYNC();
    *all = 0;
    for (u32 w = 0; w < THREADS / WARP; w++) {
        before += w < THREAD / WARP ? room[w] : 0;
        *all += room[w];
    }
    return before + upto - value;
}

/* Returns a mask of the elements that differ, among eight or four adjacent ones. */
INLINE u32 changed_of(const group *now, const group *kept, const u32 from, const u32 to,
                      const u32 out, const u32 each)
{
    group h = *now;
    u32 mask = 0;
    if (from != to)
        h = convert_group(now, from, to, each);
    UNROLL
    for (u32 i = 0; i < 8; i++)
        if (i < each && pick(&h, i, out) != pick(kept, i, out))
            mask |= 1u << i;
    return mask;
}

/* Appends the positions of changed elements. `masks` has a byte for each of the thread's groups of
 * `each` elements; these groups are THREADS apart. Returns the new number of positions. */
INLINE u32 enter_changed(u32 first, u32 masks, u32 each, u32 found, uint16_t *positions, u64 *room)
{
    u64 counts = 0, all, before;
    UNROLL
    for (u32 k = 0; k < DELTA_BATCH; k++)
        counts |= (u64)COUNT_BITS(masks >> 8 * k & 0xFF) << 16 * k;
    before = block_before(counts, room, &all);
    UNROLL
    for (u32 k = 0; k < DELTA_BATCH; k++) {
        u32 at = found + (u32)(before >> 16 * k & 0xFFFF);
        for (u32 left = masks >> 8 * k & 0xFF; left; left &= left - 1, at++)
            if (at < DRAY__GPU_CHANGED)
                positions[at] =
                    (uint16_t)((first + k * THREADS + THREAD) * each + LOWEST_BIT(left));
        found += (u32)(all >> 16 * k & 0xFFFF);
    }
    return found;
}

/* Finds the positions that changed. Returns their number; it stops once that exceeds `most`. */
INLINE u32 find_groups(const dray__gpu_delta *d, const slice *s, u32 most, uint16_t *positions,
                       u64 rooms[2][DRAY__GPU_THREADS], const u32 from, const u32 to, const u32 in,
                       const u32 out, const u32 each)
{
    u32 groups = s->elements / each, found = 0, turn = 0;
    for (u32 first = 0; first < groups && found <= most; first += DELTA_BATCH * THREADS) {
        group now[DELTA_BATCH], kept[DELTA_BATCH];
        u32 masks = 0;
        UNROLL
        for (u32 k = 0; k < DELTA_BATCH; k++) {
            u32 g = first + k * THREADS + THREAD;
            if (g < groups) {
                now[k] = load_group(source_of(d, s, g * each), in, each);
                kept[k] = load_group(s->base + (u64)g * each * out, out, each);
            }
        }
        UNROLL
        for (u32 k = 0; k < DELTA_BATCH; k++)
            if (first + k * THREADS + THREAD < groups)
                masks |= changed_of(&now[k], &kept[k], from, to, out, each) << 8 * k;
        found = enter_changed(first, masks, each, found, positions, rooms[turn]);
        turn ^= 1;
    }
    return found;
}

INLINE u32 find_singly(const dray__gpu_delta *d, const slice *s, u32 most, uint16_t *positions,
                       u64 rooms[2][DRAY__GPU_THREADS])
{
    u32 found = 0, turn = 0;
    for (u32 first = 0; first < s->elements && found <= most; first += DELTA_BATCH * THREADS) {
        u32 masks = 0;
        UNROLL
        for (u32 k = 0; k < DELTA_BATCH; k++) {
            u32 p = first + k * THREADS + THREAD;
            if (p < s->elements &&
                bits_of(d, s, p) != load_element(s->base + (u64)p * d->out, d->out))
                masks |= 1u << 8 * k;
        }
        found = enter_changed(first, masks, 1, found, positions, rooms[turn]);
        turn ^= 1;
    }
    return found;
}

INLINE u32 find_in(const dray__gpu_delta *d, const slice *s, u32 most, uint16_t *positions,
                   u64 rooms[2][DRAY__GPU_THREADS])
{
    if (d->word != 1 && d->from == F32 && d->to == BF16)
        return find_groups(d, s, most, positions, rooms, F32, BF16, 4, 2, 4);
    if (d->word == 8 && d->in == 2)
        return find_groups(d, s, most, positions, rooms, BF16, BF16, 2, 2, 8);
    if (d->word == 8)
        return find_groups(d, s, most, positions, rooms, E4M3, E4M3, 1, 1, 8);
    if (d->word == 4)
        return find_groups(d, s, most, positions, rooms, F32, F32, 4, 4, 4);
    return find_singly(d, s, most, positions, rooms);
}

/* Writes a slot. Slots are 8-aligned. */
INLINE void put_slot(u64 slot, u64 offset, u32 count)
{
    u32 at[2] = {(u32)offset, (u32)(offset >> 32)}, rest[2] = {count, 0};
    put8(slot, at);
    put8(slot + 8, rest);
}

INLINE void get_slot(u64 slot, u32 *v)
{
    get8(slot, v);
    get8(slot + 8, v + 2);
}

/* Updates the earlier bits of the whole slice to the present ones. */
INLINE void keep_all(const dray__gpu_delta *d, const slice *s)
{
    u32 each = d->word, count = s->elements / each;
    for (u32 g = THREAD; g < count; g += THREADS) {
        u64 to = s->base + (u64)g * each * d->out;
        if (each == 1) {
            store_element(to, bits_of(d, s, g), d->out);
        } else if (d->from != d->to) {
            group h = load_group(source_of(d, s, g * 4), 4, 4);
            h = convert_group(&h, F32, BF16, 4);
            store_group(to, &h, 2, 4);
        } else {
            words w = load(source_of(d, s, g * each), each * d->in);
            store(to, &w, each * d->in);
        }
    }
}

/* Addresses of the arrays that entries consist of (weights/delta/delta.h). */
typedef struct listing {
    u64 positions, values, steps, end;
} listing;

INLINE listing listing_of(u64 at, u32 count, u32 size)
{
    listing l;
    l.positions = at;
    l.values = at + ((2 * (u64)count + 7) & ~(u64)7);
    l.steps = l.values + (((u64)count * size + 7) & ~(u64)7);
    l.end = l.steps + count;
    return l;
}

/* Writes the entries of a slice at `offset` of the store, and updates its earlier bits. */
INLINE void put_entries(const dray__gpu_delta *d, const slice *s, const uint16_t *positions,
                        u32 count, u64 offset)
{
    listing l = listing_of(d->store + offset, count, d->out);
    for (u32 i = THREAD; i < count; i += THREADS) {
        u64 bits = bits_of(d, s, positions[i]), kept = s->base + (u64)positions[i] * d->out;
        int8_t step = step_between(load_element(kept, d->out), bits, d->out, d->to);
        store_element(l.positions + 2 * (u64)i, positions[i], 2);
        store_element(l.values + (u64)i * d->out, bits, d->out);
        store_element(l.steps + i, (uint8_t)step, 1);
        store_element(kept, bits, d->out);
    }
}

KERNEL(4) dray_delta_find(LAUNCH l)
{
    SHARED uint16_t positions[DRAY__GPU_CHANGED];
    SHARED u64 rooms[2][DRAY__GPU_THREADS];
    SHARED u64 offset;
    for (u32 i = BLOCK; i < l.count; i += BLOCKS) {
        const dray__gpu_delta *d = &l.deltas[l.tiles[i].piece];
        u32 at[4];
        place_of(d->slices, l.tiles[i].index, at);
        slice s = slice_of(d, at);
        u32 most = s.elements / DRAY__GPU_SPARSE;
        if (SYNC_OR((int)stopped(&l)))
            break;
        u32 found = find_in(d, &s, most, positions, rooms);
        if (found > most) {
            keep_all(d, &s);
            if (THREAD == 0)
                put_slot(s.slot, 0, FULL);
            continue;
        }
        if (THREAD == 0 && found) {
            u64 bytes = (listing_of(0, found, d->out).end + 7) & ~(u64)7;
            offset = d->begin + TAKE_MORE(&l.sums[d->sum], bytes);
        }
        SYNC();
        if (THREAD == 0)
            put_slot(s.slot, found ? offset : 0, found);
        put_entries(d, &s, positions, found, offset);
    }
}

/* ---- the reader's side ----------------------------------------------------------------------- */

/* The intersection of a slice and the wanted part, in the block's coordinates. */
typedef struct crossing {
    u32 low[4], extent[4], elements;
} crossing;

INLINE crossing crossing_of(const dray__gpu_delta *d, const slice *s)
{
    crossing c;
    c.elements = 1;
    UNROLL
    for (int i = 0; i < 4; i++) {
        u32 end = s->low[i] + s->extent[i], high = d->low[i] + d->wanted[i];
        c.low[i] = s->low[i] > d->low[i] ? s->low[i] : d->low[i];
        c.extent[i] = (end < high ? end : high) - c.low[i];
        c.elements *= c.extent[i];
    }
    return c;
}

/* Copies the intersection from the block, in words. */
INLINE void copy_crossing(const dray__gpu_delta *d, const crossing *c)
{
    u32 per_word = d->word / d->out,
        extent[4] = {c->extent[0], c->extent[1], c->extent[2], c->extent[3] / per_word};
    u32 count = c->elements / per_word, at[4];
    for (u32 first = THREAD; first < count; first += DELTA_BATCH * THREADS) {
        words w[DELTA_BATCH];
        u64 to[DELTA_BATCH];
        UNROLL
        for (u32 k = 0; k < DELTA_BATCH; k++) {
            if (first + k * THREADS >= count)
                break;
            u64 from = d->source;
            to[k] = d->destination;
            place_of(extent, first + k * THREADS, at);
            at[3] *= per_word;
            UNROLL
            for (int i = 0; i < 4; i++) {
                from += (c->low[i] + at[i]) * (u64)d->source_stride[i];
                to[k] += (c->low[i] + at[i] - d->low[i]) * (u64)d->destination_stride[i];
            }
            w[k] = load(from, d->word);
        }
        UNROLL
        for (u32 k = 0; k < DELTA_BATCH; k++)
            if (first + k * THREADS < count)
                store(to[k], &w[k], d->word);
    }
}

/* Applies entries. Returns how many are outside the slice: those are not written, because the
 * writer of the store is not trusted. */
INLINE u32 apply_entries(const dray__gpu_delta *d, const slice *s, const crossing *c, u64 offset,
                         u32 count)
{
    listing l = listing_of(d->store + offset, count, d->out);
    u32 bad = 0, place[4];
    for (u32 i = THREAD; i < count; i += THREADS) {
        u32 position = (u32)load_element(l.positions + 2 * (u64)i, 2), inside = 1;
        if (position >= s->elements) {
            bad++;
            continue;
        }
        u64 to = d->destination;
        place_of(s->extent, position, place);
        UNROLL
        for (int k = 0; k < 4; k++) {
            u32 here = s->low[k] + place[k];
            inside &= here >= c->low[k] && here - c->low[k] < c->extent[k];
            to += (u64)((int64_t)here - d->low[k]) * (u64)d->destination_stride[k];
        }
        if (!inside)
            continue;
        int8_t step = d->stepping ? (int8_t)load_element(l.steps + i, 1) : (int8_t)0;
        u64 bits = step ? stepped(load_element(to, d->out), step, d->out, d->to)
                        : load_element(l.values + (u64)i * d->out, d->out);
        store_element(to, bits, d->out);
    }
    return bad;
}

/* Are the entries within the store? */
INLINE u32 in_store(const dray__gpu_delta *d, const slice *s, u64 offset, u32 count)
{
    u64 bytes = listing_of(0, count, d->out).end;
    return count <= s->elements && offset % 8 == 0 && offset <= d->store_bytes &&
           bytes <= d->store_bytes - offset;
}

/* Its sums: bytes of entries read, bytes that these entries stand for, and wrong entries. */
KERNEL(4) dray_delta_apply(LAUNCH l)
{
    SHARED u32 slots[2][4];
    u32 turn = 0;
    for (u32 i = BLOCK; i < l.count; i += BLOCKS, turn ^= 1) {
        const dray__gpu_delta *d = &l.deltas[l.tiles[i].piece];
        u32 at[4];
        place_of(d->crossed, l.tiles[i].index, at);
        UNROLL
        for (int k = 0; k < 4; k++)
            at[k] += d->first[k];
        slice s = slice_of(d, at);
        crossing c = crossing_of(d, &s);
        if (THREAD == 0)
            get_slot(s.slot, slots[turn]);
        if (SYNC_OR((int)stopped(&l)))
            break;
        u64 offset = (u64)slots[turn][1] << 32 | slots[turn][0];
        u32 count = slots[turn][2], bad = 0;
        if (d->source && (count == FULL || (u64)count * DRAY__GPU_SPARSE > s.elements)) {
            copy_crossing(d, &c);
            continue;
        }
        if (!in_store(d, &s, offset, count))
            bad = 1;
        else
            bad = apply_entries(d, &s, &c, offset, count);
        if (THREAD == 0) {
            ADD_TO(&l.sums[d->sum], (u64)count * (2 + d->out));
            ADD_TO(&l.sums[l.sum_count + d->sum], (u64)c.elements * d->out);
        }
        if (bad)
            ADD_TO(&l.sums[2 * l.sum_count + d->sum], (u64)bad);
    }
}

#endif
