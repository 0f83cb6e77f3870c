/* The collectives. Each goes through the ranks' scratch in rounds: every rank writes its half of
 * the scratch, all meet, and every rank reads. The halves alternate, so one meeting in each round
 * is enough: a rank that writes half h in round n + 2 has met all readers of round n in round n +
 * 1. */
#include "base/clock.h"
#include "base/error.h"
#include "group/internal.h"

#include <inttypes.h>
#include <string.h>

static int64_t deadline_of(const dray__group *group, int64_t timeout_ns)
{
    return dray__deadline(timeout_ns == DRAY_WAIT_DEFAULT ? group->timeout_ns : timeout_ns);
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

int dray__group_barrier(dray__group *group, int64_t timeout_ns, dray_error *error)
{
    return dray__group_meet(group, DRAY__GROUP_BARRIER, 0, deadline_of(group, timeout_ns), error);
}

int dray__group_broadcast(dray__group *group, uint32_t root, void *data, uint64_t bytes,
                          int64_t timeout_ns, dray_error *error)
{
    if (root >= group->world)
        return dray__fail(error, DRAY_EINVALID,
                          "broadcast: rank %" PRIu32 " is outside the world of %" PRIu32, root,
                          group->world);
    int64_t deadline = deadline_of(group, timeout_ns);
    uint64_t done = 0;
    do {
        uint64_t piece = least(bytes - done, group->shared->half_bytes);
        unsigned char *half = dray__group_half(group, root, group->round + 1);
        if (group->rank == root && piece > 0)
            memcpy(half, (unsigned char *)data + done, piece);
        int code = dray__group_meet(group, DRAY__GROUP_BROADCAST, bytes, deadline, error);
        if (code != DRAY_OK)
            return code;
        if (group->rank != root && piece > 0)
            memcpy((unsigned char *)data + done, half, piece);
        done += piece;
    } while (done < bytes);
    return DRAY_OK;
}

/* Gets the total of an array of sizes, and the largest. Fails when the total does not fit 63
 * bits. */
static int total_of(const uint64_t *sizes, uint32_t world, uint64_t unit, uint64_t *total,
                    uint64_t *largest, dray_error *error)
{
    *total = *largest = 0;
    for (uint32_t i = 0; i < world; i++) {
        uint64_t bytes;
        if (__builtin_mul_overflow(sizes[i], unit, &bytes) ||
            __builtin_add_overflow(*total, bytes, total) || *total > INT64_MAX)
            return dray__fail(error, DRAY_EINVALID, "group: the pieces are too large");
        *largest = bytes > *largest ? bytes : *largest;
    }
    return DRAY_OK;
}

int dray__group_all_gather(dray__group *group, const void *in, const uint64_t *bytes, void *out,
                           int64_t timeout_ns, dray_error *error)
{
    uint64_t total, largest;
    int code = total_of(bytes, group->world, 1, &total, &largest, error);
    if (code != DRAY_OK)
        return code;
    int64_t deadline = deadline_of(group, timeout_ns);
    uint64_t own = bytes[group->rank], done = 0;
    do {
        uint64_t round = group->round + 1;
        if (done < own)
            memcpy(dray__group_half(group, group->rank, round), (const unsigned char *)in + done,
                   least(own - done, group->shared->half_bytes));
        code = dray__group_meet(group, DRAY__GROUP_ALL_GATHER, total, deadline, error);
        if (code != DRAY_OK)
            return code;
        unsigned char *to = out;
        for (uint32_t rank = 0; rank < group->world; to += bytes[rank], rank++)
            if (done < bytes[rank])
                memcpy(to + done, dray__group_half(group, rank, round),
                       least(bytes[rank] - done, group->shared->half_bytes));
        done += least(largest - done, group->shared->half_bytes);
    } while (done < largest);
    return DRAY_OK;
}

int dray__group_all_gather_equal(dray__group *group, const void *in, uint64_t bytes, void *out,
                                 int64_t timeout_ns, dray_error *error)
{
    uint64_t pieces[DRAY__GROUP_MAX_WORLD];
    for (uint32_t rank = 0; rank < group->world; rank++)
        pieces[rank] = bytes;
    return dray__group_all_gather(group, in, pieces, out, timeout_ns, error);
}

/* out = Σ over ranks, in rank order, of floats [from, from + count) of the ranks' halves. */
static void sum_halves(dray__group *group, uint64_t round, uint64_t from, uint64_t count,
                       float *restrict out)
{
    memcpy(out, (float *)(void *)dray__group_half(group, 0, round) + from, count * sizeof *out);
    for (uint32_t rank = 1; rank < group->world; rank++) {
        const float *half = (float *)(void *)dray__group_half(group, rank, round) + from;
        for (uint64_t i = 0; i < count; i++)
            out[i] += half[i];
    }
}

int dray__group_all_reduce_f32(dray__group *group, float *data, uint64_t count, int64_t timeout_ns,
                               dray_error *error)
{
    if (count > INT64_MAX / sizeof *data)
        return dray__fail(error, DRAY_EINVALID, "all_reduce: %" PRIu64 " floats", count);
    int64_t deadline = deadline_of(group, timeout_ns);
    uint64_t capacity = group->shared->half_bytes / sizeof *data, done = 0;
    do {
        uint64_t round = group->round + 1, piece = least(count - done, capacity);
        if (piece > 0)
            memcpy(dray__group_half(group, group->rank, round), data + done, piece * sizeof *data);
        int code = dray__group_meet(group, DRAY__GROUP_ALL_REDUCE, count, deadline, error);
        if (code != DRAY_OK)
            return code;
        if (piece > 0)
            sum_halves(group, round, 0, piece, data + done);
        done += piece;
    } while (done < count);
    return DRAY_OK;
}

int dray__group_reduce_scatter_f32(dray__group *group, const float *in, const uint64_t *counts,
                                   float *out, int64_t timeout_ns, dray_error *error)
{
    uint64_t total, largest, begin = 0, done = 0;
    int code = total_of(counts, group->world, sizeof *in, &total, &largest, error);
    if (code != DRAY_OK)
        return code;
    total /= sizeof *in;
    for (uint32_t rank = 0; rank < group->rank; rank++)
        begin += counts[rank];
    uint64_t end = begin + counts[group->rank];
    int64_t deadline = deadline_of(group, timeout_ns);
    uint64_t capacity = group->shared->half_bytes / sizeof *in;
    do {
        uint64_t round = group->round + 1, piece = least(total - done, capacity);
        if (piece > 0)
            memcpy(dray__group_half(group, group->rank, round), in + done, piece * sizeof *in);
        code = dray__group_meet(group, DRAY__GROUP_REDUCE_SCATTER, total, deadline, error);
        if (code != DRAY_OK)
            return code;
        uint64_t from = begin > done ? begin : done, to = least(end, done + piece);
        if (from < to)
            sum_halves(group, round, from - done, to - from, out + (from - begin));
        done += piece;
    } while (done < total);
    return DRAY_OK;
}
