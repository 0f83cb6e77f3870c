/* Movers from and to files. They read and write exactly the ranges that are needed, join reads of
 * short rows, and pack rectangles before writing. They write nothing outside a rectangle, so that
 * several writers may fill one file. */
#include "mover/move.h"

#include <string.h>

/* Rows of fewer bytes are read together with the gaps between them, unless that is more than
 * MOST_WASTE times the bytes of the rows. */
enum { SHORT_ROW = 4096, MOST_WASTE = 16 };

static int read_at(const dray_region *file, void *out, uint64_t bytes, uint64_t offset,
                   dray_error *error)
{
    int rc = dray_region_read(file, offset, out, bytes, error);
    return rc || !file->patch ? rc : file->patch(file, out, offset, bytes, error);
}

/* A rectangle in its file: its longest runs, and its strides when the runs are packed in memory. */
typedef struct packed {
    uint64_t run;                  /* adjacent bytes in the file */
    uint64_t span;                 /* from the first byte to the end of the last */
    uint32_t outer;                /* dimensions that are not part of a run, the widest first */
    int64_t count[DRAY_MAX_DIMS];  /* of the outer dimensions */
    int64_t gap[DRAY_MAX_DIMS];    /* their strides in the file */
    int64_t stride[DRAY_MAX_DIMS]; /* packed, by dimension of the rectangle */
} packed;

static packed pack(const dray__rect_copy *rect, const int64_t *stride, uint64_t size)
{
    uint32_t order[DRAY_MAX_DIMS] = {0}, n = 0;
    packed p = {.run = size, .span = size};
    for (uint32_t d = 0; d < rect->ndim; d++) {
        if (rect->extent[d] == 1) /* its stride does not matter */
            continue;
        p.span += (uint64_t)(rect->extent[d] - 1) * (uint64_t)stride[d];
        uint32_t at = n++;
        for (; at > 0 && stride[order[at - 1]] < stride[d]; at--)
            order[at] = order[at - 1];
        order[at] = d;
    }
    int64_t step = (int64_t)size;
    bool dense = true;
    while (n > 0) {
        uint32_t d = order[--n];
        p.stride[d] = step;
        dense = dense && stride[d] == step;
        step *= rect->extent[d];
        if (dense) {
            p.run = (uint64_t)step;
            continue;
        }
        memmove(p.count + 1, p.count, sizeof p.count - sizeof *p.count);
        memmove(p.gap + 1, p.gap, sizeof p.gap - sizeof *p.gap);
        p.count[0] = rect->extent[d];
        p.gap[0] = stride[d];
        p.outer++;
    }
    return p;
}

/* Reads every run from `from` into packed memory, or, where `from` is NULL, writes it to `to`. */
static int each_run(const dray_region *from, dray_region *to, const packed *p, uint64_t offset,
                    uint8_t *memory, dray_error *error)
{
    int64_t index[DRAY_MAX_DIMS] = {0};
    for (;;) {
        uint64_t at = offset;
        for (uint32_t d = 0; d < p->outer; d++)
            at += (uint64_t)index[d] * (uint64_t)p->gap[d];
        int rc = from ? read_at(from, memory, p->run, at, error)
                      : dray_region_write(to, at, memory, p->run, error);
        if (rc)
            return rc;
        memory += p->run;
        uint32_t d = p->outer;
        while (d > 0 && ++index[d - 1] == p->count[d - 1])
            index[--d] = 0;
        if (d == 0)
            return DRAY_OK;
    }
}

static uint64_t useful_bytes(const dray__rect_copy *rect)
{
    uint64_t bytes = dray_dtype_size((dray_dtype)rect->from);
    for (uint32_t d = 0; d < rect->ndim; d++)
        bytes *= (uint64_t)rect->extent[d];
    return bytes;
}

/* Short rows are read together with the gaps between them, unless almost all of it is gaps. */
static bool worth_spanning(const packed *p, uint64_t useful)
{
    return p->outer && p->run < SHORT_ROW && p->span / MOST_WASTE <= useful;
}

bool dray__file_fits(const dray__move *move, const dray__tile *tile)
{
    const dray__rect_copy *rect = &tile->rect;
    packed p = pack(rect, rect->source_stride, dray_dtype_size((dray_dtype)rect->from));
    return !worth_spanning(&p, useful_bytes(rect)) ||
           p.span <= move->options.staging_bytes / move->mover->parts;
}

int dray__file_fetch(dray__move *move, dray__tile *tile, uint8_t *staging, size_t room,
                     dray_error *error)
{
    dray__rect_copy *rect = &tile->rect;
    packed p = pack(rect, rect->source_stride, dray_dtype_size((dray_dtype)rect->from));
    rect->source = staging;
    if (worth_spanning(&p, useful_bytes(rect)) && p.span <= room)
        return read_at(move->source, staging, p.span, tile->source_offset, error);
    memcpy(rect->source_stride, p.stride, sizeof p.stride);
    return each_run(move->source, NULL, &p, tile->source_offset, staging, error);
}

int dray__file_store(dray__move *move, dray__tile *tile, uint8_t *staging, dray_error *error)
{
    dray__rect_copy *rect = &tile->rect;
    uint64_t bytes;
    if (dray__rect_is_run(rect, &bytes)) {
        dray__tile_sum(tile, rect->source, rect->source_stride);
        return dray_region_write(move->destination, tile->destination_offset, rect->source, bytes,
                                 error);
    }
    uint64_t size = dray_dtype_size((dray_dtype)rect->to);
    packed p = pack(rect, rect->destination_stride, size);
    rect->destination = staging;
    memcpy(rect->destination_stride, p.stride, sizeof p.stride);
    dray__tile_move(tile);
    return each_run(NULL, move->destination, &p, tile->destination_offset, staging, error);
}

int dray__tile_from_file(dray__move *move, dray__tile *tile, dray_error *error)
{
    dray__rect_copy *rect = &tile->rect;
    uint64_t bytes;
    int rc;
    if (dray__rect_is_run(rect, &bytes)) {
        rc = read_at(move->source, rect->destination, bytes, tile->source_offset, error);
        if (!rc)
            dray__tile_sum(tile, rect->destination, rect->destination_stride);
        return rc;
    }
    rc = dray__file_fetch(move, tile, move->options.staging, move->options.staging_bytes, error);
    if (!rc)
        dray__tile_move(tile);
    return rc;
}

int dray__tile_to_file(dray__move *move, dray__tile *tile, dray_error *error)
{
    return dray__file_store(move, tile, move->options.staging, error);
}

int dray__tile_between_files(dray__move *move, dray__tile *tile, dray_error *error)
{
    size_t half = move->options.staging_bytes / 2;
    uint8_t *staging = move->options.staging;
    int rc = dray__file_fetch(move, tile, staging, half, error);
    return rc ? rc : dray__file_store(move, tile, staging + half, error);
}
