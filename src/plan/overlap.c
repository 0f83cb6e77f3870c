/* Finds out whether two blocks of a destination write the same bytes. Blocks are sets of bytes
 *
 *     offset + Σ i_k · stride_k,  0 <= i_k < extent_k,
 *
 * with the bytes of an element as the innermost dimension. All sets here are nested: the inner
 * dimensions together reach less than one step of the next outer one. That makes the test exact and
 * cheap: at each dimension only the two steps around the wanted distance can reach it.
 *
 * The pairs to test are found by sweeping over the blocks' beginnings and ends. Interleaved blocks
 * (columns of one matrix) all begin and end together; they are separated by their columns, which
 * are their positions within one step of the outermost stride. */
#include "base/array.h"
#include "base/error.h"
#include "plan/planner.h"

#include <stdlib.h>
#include <string.h>

enum { LEVELS = DRAY_MAX_DIMS + 1 };

typedef struct bytes {
    uint32_t region, block;
    uint64_t offset, end; /* end is one past the last byte */
    uint32_t levels;      /* the widest stride first */
    int64_t extent[LEVELS], stride[LEVELS];
    int64_t inner[LEVELS]; /* the reach of the levels inside each one */
    uint64_t low, high;    /* the range in the sweep: offset to end, or columns */
} bytes;

/* Returns false when the strides do not nest. Then elements of the block may overlap. */
static bool bytes_of(const dray_block *block, uint32_t index, size_t element, bytes *out)
{
    bytes b = {.region = block->region, .block = index, .offset = block->offset};
    for (int d = 0; d < DRAY_MAX_DIMS; d++) {
        if (block->extent[d] == 1)
            continue;
        uint32_t at = b.levels++;
        for (; at > 0 && b.stride[at - 1] < block->stride[d]; at--) {
            b.stride[at] = b.stride[at - 1];
            b.extent[at] = b.extent[at - 1];
        }
        b.stride[at] = block->stride[d];
        b.extent[at] = block->extent[d];
    }
    b.stride[b.levels] = 1;
    b.extent[b.levels++] = (int64_t)element;
    int64_t reach = 0; /* of the levels inside the present one */
    for (uint32_t k = b.levels; k-- > 0;) {
        if (b.stride[k] <= reach)
            return false;
        reach += (b.extent[k] - 1) * b.stride[k];
    }
    b.end = b.offset + (uint64_t)reach + 1;
    b.low = b.offset;
    b.high = b.end;
    uint32_t kept = 0; /* join levels that continue each other */
    for (uint32_t k = 1; k < b.levels; k++) {
        if (b.stride[kept] == b.stride[k] * b.extent[k])
            b.extent[k] *= b.extent[kept];
        else
            kept++;
        b.extent[kept] = b.extent[k];
        b.stride[kept] = b.stride[k];
    }
    b.levels = kept + 1;
    for (uint32_t k = b.levels - 1; k-- > 0;)
        b.inner[k] = b.inner[k + 1] + (b.extent[k + 1] - 1) * b.stride[k + 1];
    *out = b;
    return true;
}

/* For equal strides: returns whether two elements are `distance` bytes apart. */
static bool meet_on_grid(const bytes *a, const bytes *b, int64_t distance, uint32_t k)
{
    if (k == LEVELS || k == a->levels)
        return distance == 0;
    int64_t step = distance / a->stride[k] - (distance % a->stride[k] < 0);
    for (int64_t j = step; j <= step + 1; j++)
        if (j > -b->extent[k] && j < a->extent[k] &&
            meet_on_grid(a, b, distance - j * a->stride[k], k + 1))
            return true;
    return false;
}

/* Returns whether a byte of `a` is in [low, high), counted from a's offset. */
static bool meets_run(const bytes *a, int64_t low, int64_t high, uint32_t k)
{
    if (k == LEVELS || k == a->levels)
        return low <= 0 && 0 < high;
    int64_t first =
        low - a->inner[k] > 0 ? (low - a->inner[k] + a->stride[k] - 1) / a->stride[k] : 0;
    for (int64_t i = first; i < a->extent[k] && i * a->stride[k] < high; i++)
        if (meets_run(a, low - i * a->stride[k], high - i * a->stride[k], k + 1))
            return true;
    return false;
}

static uint64_t run_count(const bytes *b)
{
    uint64_t count = 1;
    for (uint32_t k = 0; k + 1 < b->levels; k++)
        count *= (uint64_t)b->extent[k];
    return count;
}

static bool any_run_meets(const bytes *runs, const bytes *a)
{
    uint64_t count = run_count(runs);
    int64_t base = (int64_t)runs->offset - (int64_t)a->offset;
    for (uint64_t i = 0; i < count; i++) {
        int64_t low = base;
        uint64_t rest = i;
        for (uint32_t k = runs->levels - 1; k-- > 0;) {
            low += (int64_t)(rest % (uint64_t)runs->extent[k]) * runs->stride[k];
            rest /= (uint64_t)runs->extent[k];
        }
        if (meets_run(a, low, low + runs->extent[runs->levels - 1], 0))
            return true;
    }
    return false;
}

static bool meet(const bytes *a, const bytes *b)
{
    if (a->end <= b->offset || b->end <= a->offset)
        return false;
    if (a->levels == b->levels && memcmp(a->stride, b->stride, a->levels * sizeof *a->stride) == 0)
        return meet_on_grid(a, b, (int64_t)b->offset - (int64_t)a->offset, 0);
    return run_count(a) <= run_count(b) ? any_run_meets(a, b) : any_run_meets(b, a);
}

static int compare_bytes(const void *x, const void *y)
{
    const bytes *a = x, *b = y;
    if (a->region != b->region)
        return a->region < b->region ? -1 : 1;
    if (a->offset != b->offset)
        return a->offset < b->offset ? -1 : 1;
    return a->block < b->block ? -1 : a->block > b->block;
}

static int written_twice(const dray_plan_member *destination, const bytes *a, const bytes *b,
                         dray_error *error)
{
    const dray_layout *layout = destination->layout;
    const dray_block *x = dray_layout_block(layout, a->block);
    const dray_block *y = dray_layout_block(layout, b->block);
    const dray_tensor_info *s = dray_layout_tensor(layout, x->tensor);
    const dray_tensor_info *t = dray_layout_tensor(layout, y->tensor);
    dray__rect p = dray__block_rect(x), q = dray__block_rect(y);
    char name[80], first[DRAY__RECT_TEXT], second[DRAY__RECT_TEXT];
    return dray__fail(error, DRAY_EOVERLAP,
                      "%s: %.120s %s and %.120s %s share bytes of region %.60s (from byte %llu)",
                      dray__member_text(destination, name, sizeof name), s->name,
                      dray__rect_text(&p, s->ndim, first), t->name,
                      dray__rect_text(&q, t->ndim, second),
                      dray_layout_region(layout, y->region)->name, (unsigned long long)y->offset);
}

static int folded(const dray_plan_member *destination, const dray_block *block, dray_error *error)
{
    const dray_tensor_info *t = dray_layout_tensor(destination->layout, block->tensor);
    dray__rect box = dray__block_rect(block);
    char name[80], text[DRAY__RECT_TEXT];
    return dray__fail(error, DRAY_EOVERLAP,
                      "%s: the strides of %.160s %s put elements onto each other",
                      dray__member_text(destination, name, sizeof name), t->name,
                      dray__rect_text(&box, t->ndim, text));
}

static int compare_low(const void *x, const void *y)
{
    const bytes *a = x, *b = y;
    return a->low != b->low ? (a->low < b->low ? -1 : 1) : compare_bytes(x, y);
}

/* Compares each block with those that begin before it and end after its beginning, which are in
 * `active`. The sets are of one region, sorted by low. */
static int sweep(const dray_plan_member *destination, const bytes *sets, uint32_t count,
                 uint32_t *active, dray_error *error)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t kept = 0;
        for (uint32_t j = 0; j < n; j++) {
            const bytes *other = &sets[active[j]];
            if (other->high <= sets[i].low)
                continue;
            active[kept++] = active[j];
            if (meet(other, &sets[i]))
                return written_twice(destination, other, &sets[i], error);
        }
        active[kept] = i;
        n = kept + 1;
    }
    return DRAY_OK;
}

/* Returns the number of pairs with overlapping [low, high): all pairs, minus those of which one
 * ends before the other begins. */
static uint64_t overlapping_pairs(uint64_t *low, uint64_t *high, uint32_t count)
{
    qsort(low, count, sizeof *low, dray__by_u64);
    qsort(high, count, sizeof *high, dray__by_u64);
    uint64_t pairs = (uint64_t)count * (count - 1) / 2;
    for (uint32_t i = 0, ended = 0; i < count; i++) {
        while (ended < count && high[ended] <= low[i])
            ended++;
        pairs -= ended;
    }
    return pairs;
}

/* Sets a run of overlapping blocks with one outermost stride to be swept by columns, if that leaves
 * fewer pairs. room has space for twice as many numbers. */
static void turn(bytes *sets, uint32_t count, uint64_t *room)
{
    uint64_t *low = room, *high = room + count;
    int64_t step = sets[0].stride[0];
    for (uint32_t i = 0; i < count; i++) {
        low[i] = sets[i].low;
        high[i] = sets[i].high;
    }
    uint64_t straight = overlapping_pairs(low, high, count);
    for (uint32_t i = 0; i < count; i++) {
        if (sets[i].levels < 2 || sets[i].stride[0] != step)
            return;
        low[i] = (sets[i].offset - sets[0].offset) % (uint64_t)step;
        high[i] = low[i] + (uint64_t)sets[i].inner[0] + 1;
        if (high[i] > (uint64_t)step)
            return;
    }
    if (overlapping_pairs(low, high, count) >= straight)
        return;
    uint64_t first = sets[0].offset;
    for (uint32_t i = 0; i < count; i++) {
        sets[i].low = (sets[i].offset - first) % (uint64_t)step;
        sets[i].high = sets[i].low + (uint64_t)sets[i].inner[0] + 1;
    }
    qsort(sets, count, sizeof *sets, compare_low);
}

/* The sets are sorted by region and offset. Checks each run of blocks whose ranges overlap. */
static int check_knots(const dray_plan_member *destination, bytes *sets, uint32_t count,
                       dray_error *error)
{
    enum { MANY = 64 }; /* for fewer it is not worth it */
    uint64_t *room = malloc(((size_t)count + 1) * 2 * sizeof *room);
    uint32_t *active = malloc(((size_t)count + 1) * sizeof *active);
    int rc = room && active ? DRAY_OK : dray__nomem(error);
    for (uint32_t i = 0, n; !rc && i < count; i += n) {
        uint64_t end = sets[i].end;
        for (n = 1;
             i + n < count && sets[i + n].region == sets[i].region && sets[i + n].offset < end; n++)
            end = sets[i + n].end > end ? sets[i + n].end : end;
        if (n >= MANY)
            turn(sets + i, n, room);
        if (n > 1)
            rc = sweep(destination, sets + i, n, active, error);
    }
    free(room);
    free(active);
    return rc;
}

int dray__plan_check_addresses(const dray_plan_member *destination, const uint64_t *addresses,
                               dray_error *error)
{
    const dray_layout *layout = destination->layout;
    uint32_t count = dray_layout_block_count(layout);
    bytes *sets = malloc(((size_t)count + 1) * sizeof *sets);
    if (!sets)
        return dray__nomem(error);
    int rc = DRAY_OK;
    bool sorted = true;
    for (uint32_t i = 0; !rc && i < count; i++) {
        const dray_block *block = dray_layout_block(layout, i);
        const dray_tensor_info *tensor = dray_layout_tensor(layout, block->tensor);
        uint64_t address = addresses ? addresses[block->region] : 0;
        dray_block at = *block;
        at.offset += address;
        at.region = address ? UINT32_MAX : block->region;
        if (!bytes_of(&at, i, dray_dtype_size((dray_dtype)tensor->dtype), &sets[i]))
            rc = folded(destination, block, error);
        else if (i > 0 && compare_bytes(&sets[i - 1], &sets[i]) > 0)
            sorted = false;
    }
    if (!rc && !sorted)
        qsort(sets, count, sizeof *sets, compare_bytes);
    if (!rc)
        rc = check_knots(destination, sets, count, error);
    free(sets);
    return rc;
}

int dray__plan_check_memory(const dray_plan_member *destination, dray_error *error)
{
    return dray__plan_check_addresses(destination, NULL, error);
}
