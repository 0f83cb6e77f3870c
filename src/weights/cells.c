/* Requests for ranges of bytes and their answers (cells.h). */
#include "weights/cells.h"

#include "base/error.h"
#include "base/hash.h"

#include <inttypes.h>
#include <stdlib.h>

void dray__cells_request(dray__writer *w, uint32_t id, const dray__cell *cells, uint32_t count)
{
    dray__put_u32(w, DRAY__PULL_MAGIC);
    dray__put_u16(w, DRAY__PULL_VERSION);
    dray__put_u16(w, DRAY__PULL_CELLS);
    dray__put_u32(w, id);
    dray__put_u32(w, 4 + count * 24);
    dray__put_u32(w, count);
    for (uint32_t i = 0; i < count; i++) {
        dray__put_u64(w, cells[i].number);
        dray__put_u64(w, cells[i].offset);
        dray__put_u64(w, cells[i].bytes);
    }
}

/* Reads the ranges into `data`; gone[i]: range i is not here. */
static int read_all(const dray__cells *cells, dray__reader *in, uint32_t count, uint8_t *data,
                    uint8_t *gone, uint64_t *bytes, dray_error *error)
{
    for (uint32_t i = 0; i < count; i++) {
        dray__cell cell = {.number = dray__get_u64(in)};
        cell.offset = dray__get_u64(in);
        cell.bytes = dray__get_u64(in);
        if (in->failed || cell.bytes > DRAY__PULL_DATA_MAX - *bytes)
            return dray__fail(error, DRAY_EFORMAT, "ranges of more than %d bytes at once",
                              DRAY__PULL_DATA_MAX);
        gone[i] = cells->read(cells->user, &cell, data + *bytes) != DRAY_OK;
        *bytes += gone[i] ? 0 : cell.bytes;
    }
    return dray__reader_finish(in, "a request for samples", error);
}

bool dray__cells_answer(const dray__cells *cells, const dray__pull_header *header,
                        const uint8_t *body, dray_region *staging, dray__writer *out,
                        uint64_t *data_bytes)
{
    dray_error error;
    dray__reader in = dray__reader_of(body, header->body_bytes);
    uint32_t count = dray__get_u32(&in);
    uint8_t *data = dray_region_base(staging), gone[DRAY__CELLS_MAX];
    uint64_t bytes = 0;
    int rc = DRAY_OK;
    if (!cells)
        rc = dray__fail(&error, DRAY_EUNSUPPORTED, "no samples are kept here");
    else if (in.failed || !count || count > DRAY__CELLS_MAX)
        rc = dray__fail(&error, DRAY_EFORMAT, "a request for %" PRIu32 " ranges: 1 to %d", count,
                        DRAY__CELLS_MAX);
    if (!rc)
        rc = read_all(cells, &in, count, data, gone, &bytes, &error);
    dray__writer_reset(out);
    *data_bytes = rc ? 0 : bytes;
    if (rc) {
        dray__pull_put_refusal(out, header->id, &error);
        return !out->failed;
    }
    dray__pull_put_answer(out, DRAY_OK, header->id, 8 + count, bytes);
    dray__put_u64(out, dray__hash(data, bytes));
    dray__put_bytes(out, gone, count);
    return !out->failed;
}
