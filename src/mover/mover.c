/* The move: checks the rectangles, cuts them into tiles, and sums the elements that were
 * written. */
#include "mover/mover.h"

#include "base/error.h"
#include "mover/cuda/cuda.h"
#include "mover/kernels/checksum.h"
#include "mover/move.h"

#include <stdlib.h>
#include <string.h>

enum { MEMORY_TILE = 256 << 10, FILE_TILE = DRAY__MOVE_STAGING };

/* The first mover of the table that accepts a pair of regions moves between them. */
#define HOST dray__kind_bit(DRAY_REGION_HOST)
#define MEMORY (HOST | dray__kind_bit(DRAY_REGION_SHARED) | dray__kind_bit(DRAY_REGION_PINNED))
#define CUDA dray__kind_bit(DRAY_REGION_CUDA)
#define A_FILE dray__kind_bit(DRAY_REGION_FILE)

/* Both sides are addressable in this process. */
static int tile_memory(dray__move *move, dray__tile *tile, dray_error *error)
{
    (void)move, (void)error;
    dray__tile_move(tile);
    return DRAY_OK;
}

static const dray__mover movers[] = {
    {HOST, HOST, "local", MEMORY_TILE, 0, tile_memory, NULL},
    {MEMORY, MEMORY, "shared", MEMORY_TILE, 0, tile_memory, NULL},
    {A_FILE, MEMORY, "file", FILE_TILE, 1, dray__tile_from_file, dray__file_fits},
    {MEMORY, A_FILE, "file", FILE_TILE, 1, dray__tile_to_file, NULL},
    {A_FILE, A_FILE, "file", FILE_TILE, 2, dray__tile_between_files, dray__file_fits},
    {CUDA, MEMORY, "cuda", FILE_TILE, 1, dray__tile_from_cuda, NULL},
    {MEMORY, CUDA, "cuda", FILE_TILE, 1, dray__tile_to_cuda, NULL},
    {CUDA, CUDA, "cuda", FILE_TILE, 2, dray__tile_between_cuda, NULL},
    {CUDA, A_FILE, "cuda", FILE_TILE, 2, dray__tile_cuda_to_file, NULL},
    {A_FILE, CUDA, "cuda", FILE_TILE, 2, dray__tile_file_to_cuda, dray__file_fits},
};

static const dray__mover *mover_of(dray_region_kind source, dray_region_kind destination)
{
    for (size_t i = 0; i < sizeof movers / sizeof *movers; i++)
        if ((movers[i].sources & dray__kind_bit(source)) &&
            (movers[i].destinations & dray__kind_bit(destination)))
            return &movers[i];
    return NULL;
}

/* ---- checks before anything is moved --------------------------------------------------------- */

static bool inside(uint64_t offset, const dray_copy *copy, const int64_t *stride, uint64_t size,
                   uint64_t bytes)
{
    uint64_t end;
    if (__builtin_add_overflow(offset, size, &end))
        return false;
    for (uint32_t d = 0; d < copy->ndim; d++) {
        uint64_t last;
        if (stride[d] < 0 ||
            __builtin_mul_overflow((uint64_t)copy->extent[d] - 1, (uint64_t)stride[d], &last) ||
            __builtin_add_overflow(end, last, &end))
            return false;
    }
    return end <= bytes;
}

/* Checks that both rectangles are inside their regions. */
static int check_copy(const dray__move *move, uint64_t number, dray_error *error)
{
    const dray_copy *copy = &move->copies[number];
    const struct {
        const char *what;
        const dray_region *region;
        uint64_t offset;
        const int64_t *stride;
        int32_t dtype;
    } sides[] = {
        {"reads", move->source, copy->source_offset, copy->source_stride, copy->source_dtype},
        {"writes", move->destination, copy->destination_offset, copy->destination_stride,
         copy->destination_dtype}};
    int rc = dray__copy_check(copy, number, error);
    for (int i = 0; i < 2 && !rc; i++)
        if (!inside(sides[i].offset, copy, sides[i].stride,
                    dray_dtype_size((dray_dtype)sides[i].dtype), sides[i].region->bytes))
            rc = dray__fail(error, DRAY_EINVALID,
                            "copy %llu: %s outside region %s of %llu bytes (from offset %llu)",
                            (unsigned long long)number, sides[i].what, sides[i].region->name,
                            (unsigned long long)sides[i].region->bytes,
                            (unsigned long long)sides[i].offset);
    return rc;
}

static int check(const dray__move *move, dray_error *error)
{
    const dray__move_options *options = &move->options;
    if (!move->mover)
        return dray__fail(error, DRAY_EUNSUPPORTED, "no mover from %s (%s) to %s (%s)",
                          dray_region_kind_name(move->source->ops->kind), move->source->name,
                          dray_region_kind_name(move->destination->ops->kind),
                          move->destination->name);
    if (!move->destination->writable)
        return dray__fail(error, DRAY_EPERM, "region %s is read-only", move->destination->name);
    if ((options->sums || options->source_sums) && !options->layout)
        return dray__fail(error, DRAY_EINVALID, "checksums need the destination's layout");
    if (options->staging && options->staging_bytes < DRAY__MOVE_STAGING_MIN)
        return dray__fail(error, DRAY_EINVALID, "staging of %zu bytes, at least %zu expected",
                          options->staging_bytes, DRAY__MOVE_STAGING_MIN);
    for (uint64_t i = 0; i < move->count; i++) {
        const dray_copy *copy = &move->copies[i];
        int rc = check_copy(move, i, error);
        if (!rc && (options->sums || options->source_sums))
            rc = dray__copy_check_place(copy, dray_layout_tensor(options->layout, copy->tensor), i,
                                        error);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

/* ---- tiles -------------------------------------------------------------------------------- */

bool dray__copy_turn_tile(const dray_copy *copy, uint64_t elements, int64_t *tile)
{
    dray__rect_copy rect = {
        .ndim = copy->ndim, .from = copy->source_dtype, .to = copy->destination_dtype};
    memcpy(rect.extent, copy->extent, sizeof rect.extent);
    memcpy(rect.source_stride, copy->source_stride, sizeof rect.source_stride);
    memcpy(rect.destination_stride, copy->destination_stride, sizeof rect.destination_stride);
    dray__rect_turn turn;
    if (!dray__rect_turns(&rect, &turn))
        return false;
    dray__turn_tile(&turn, rect.extent, rect.ndim, elements, tile);
    return true;
}

/* Returns the largest rectangle of at most `elements` elements from the cursor on. */
static void cut(const dray__move *move, uint64_t elements, dray__tile *tile)
{
    const dray_copy *copy = &move->copies[move->at];
    dray__rect_copy *rect = &tile->rect;
    *tile = (dray__tile){.source_offset = copy->source_offset,
                         .destination_offset = copy->destination_offset};
    rect->ndim = copy->ndim;
    rect->from = copy->source_dtype;
    rect->to = copy->destination_dtype;
    bool whole = true; /* All inner dimensions are whole. */
    int64_t tiles[DRAY_MAX_DIMS];
    bool memory = move->source->base && move->destination->base;
    bool turns = memory && dray__copy_turn_tile(copy, elements, tiles);
    for (uint32_t d = copy->ndim; d-- > 0;) {
        int64_t left = copy->extent[d] - move->position[d];
        uint64_t most = elements ? elements : 1;
        if (turns)
            rect->extent[d] = left < tiles[d] ? left : tiles[d];
        else
            rect->extent[d] = !whole ? 1 : (uint64_t)left < most ? left : (int64_t)most;
        whole = whole && rect->extent[d] == copy->extent[d];
        elements /= (uint64_t)rect->extent[d];
        rect->source_stride[d] = copy->source_stride[d];
        rect->destination_stride[d] = copy->destination_stride[d];
        tile->source_offset += (uint64_t)move->position[d] * (uint64_t)copy->source_stride[d];
        tile->destination_offset +=
            (uint64_t)move->position[d] * (uint64_t)copy->destination_stride[d];
    }
    if (move->source->base)
        rect->source = move->source->base + tile->source_offset;
    if (move->destination->base)
        rect->destination = move->destination->base + tile->destination_offset;
}

/* Returns the tile's position in its tensor. */
static dray__rect_place place_of(const dray__move *move)
{
    const dray_copy *copy = &move->copies[move->at];
    const dray_tensor_info *tensor = dray_layout_tensor(move->options.layout, copy->tensor);
    dray__rect_place place = {.ndim = tensor->ndim, .shape = tensor->shape};
    for (uint32_t d = 0; d < copy->ndim; d++)
        place.start[d] = copy->start[d] + move->position[d];
    return place;
}

void dray__tile_move(dray__tile *tile)
{
    if (tile->summed)
        dray__rect_move_summed(&tile->rect, &tile->place, tile->sums);
    else
        dray__rect_move(&tile->rect);
}

void dray__tile_sum(dray__tile *tile, const uint8_t *data, const int64_t *stride)
{
    if (!tile->summed)
        return;
    dray__sum_of of = {.dtype = tile->rect.to,
                       .ndim = tile->place.ndim,
                       .shape = tile->place.shape,
                       .start = tile->place.start,
                       .extent = tile->rect.extent,
                       .stride = stride,
                       .data = data};
    tile->sums[0] = tile->sums[1] = dray__sum(&of);
}

/* Moves the cursor past the tile. The tile's innermost unfinished dimension advances first. */
static void advance(dray__move *move, const int64_t *extent)
{
    const dray_copy *copy = &move->copies[move->at];
    for (uint32_t d = copy->ndim; d-- > 0;) {
        move->position[d] += extent[d];
        if (move->position[d] < copy->extent[d])
            return;
        move->position[d] = 0;
    }
    move->at++;
}

static dray__fault_fn ask;
static void *ask_user;

void dray__mover_faults(dray__fault_fn fn, void *user)
{
    ask = fn;
    ask_user = user;
}

/* Moves the tile, in tests with a fault. */
static int carry_out(dray__move *move, dray__tile *tile, dray_error *error)
{
    const dray_layout *layout = move->options.layout;
    if (!ask)
        return move->mover->tile(move, tile, error);
    dray__fault fault = ask(
        ask_user, layout ? dray_layout_tensor(layout, move->copies[move->at].tensor)->name : NULL);
    return dray__fault_tile(fault, move, tile, error);
}

static int move_tile(dray__move *move, uint64_t most, dray_error *error)
{
    const dray_copy *copy = &move->copies[move->at];
    uint64_t from = dray_dtype_size((dray_dtype)copy->source_dtype);
    uint64_t to = dray_dtype_size((dray_dtype)copy->destination_dtype);
    dray__tile tile;
    uint64_t elements = most / (from > to ? from : to);
    cut(move, elements, &tile);
    while (move->mover->fits && !move->mover->fits(move, &tile) && elements > 1)
        cut(move, elements /= 2, &tile);
    int64_t extent[DRAY_MAX_DIMS];
    memcpy(extent, tile.rect.extent, sizeof extent);
    tile.summed = move->options.sums || move->options.source_sums;
    if (tile.summed)
        tile.place = place_of(move);
    int rc = carry_out(move, &tile, error);
    if (rc)
        return rc;
    if (move->options.sums)
        move->options.sums[move->at] += tile.sums[1];
    if (move->options.source_sums)
        move->options.source_sums[move->at] += tile.sums[0];
    advance(move, extent);
    return DRAY_OK;
}

int dray__move_all(const dray_region *source, dray_region *destination, const dray_copy *copies,
                   uint64_t count, const dray__move_options *options, dray_error *error)
{
    dray__move move = {.mover = mover_of(source->ops->kind, destination->ops->kind),
                       .source = source,
                       .destination = destination,
                       .copies = copies,
                       .count = count};
    void *own = NULL;
    if (options)
        move.options = *options;
    int rc = check(&move, error);
    if (rc)
        return rc;
    if (move.mover->parts && !move.options.staging) {
        move.options.staging = own = malloc(DRAY__MOVE_STAGING);
        move.options.staging_bytes = DRAY__MOVE_STAGING;
        if (!own)
            return dray__nomem(error);
    }
    uint64_t most = move.mover->tile_bytes;
    if (move.mover->parts && most > move.options.staging_bytes / move.mover->parts)
        most = move.options.staging_bytes / move.mover->parts;
    while (rc == DRAY_OK && move.at < count)
        rc = move_tile(&move, most, error);
    free(own);
    return rc;
}

int dray__sum_region(const dray_region *region, const dray__sum_part *parts, uint32_t count,
                     uint64_t *sums, dray_error *error)
{
    if (!region->base)
        return dray__cuda_sum(region, parts, count, sums, error);
    for (uint32_t i = 0; i < count; i++) {
        dray__sum_of here = parts[i].of;
        here.data = region->base + parts[i].offset;
        sums[i] = dray__sum(&here);
    }
    return DRAY_OK;
}
