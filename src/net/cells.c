/* Requests for ranges of bytes and their answers (cells.h). */
#include "net/cells.h"

#include "base/error.h"
#include "base/hash.h"

#include <errno.h>
#include <inttypes.h>

typedef struct cells_asked {
    const dray__cell *items;
    uint32_t count;
} cells_asked;

static const dray__fields cell_fields =
    DRAY__FIELDS(dray__cell, DRAY__NUMBERS(dray__cell, number, offset, bytes));
const dray__fields dray__cells_fields =
    DRAY__FIELDS(cells_asked, DRAY__FIELD_LIST(cells_asked, items, count, cell_fields));

void dray__cells_request(dray__writer *w, uint32_t id, const dray__cell *cells, uint32_t count)
{
    size_t begun = dray__request_begin(w, DRAY__DATA_CELLS, id);
    dray__put_fields(w, &dray__cells_fields, &(cells_asked){cells, count});
    dray__request_end(w, begun);
}

/* Reads the ranges into `data`; gone[i] is 1 when range i is not here. */
static int read_all(const dray__cells *cells, const cells_asked *asked, uint8_t *data,
                    uint8_t *gone, uint64_t *bytes, dray_error *error)
{
    if (!asked->count || asked->count > DRAY__CELLS_MAX)
        return dray__fail(error, DRAY_EFORMAT, "a request for %" PRIu32 " ranges: 1 to %d",
                          asked->count, DRAY__CELLS_MAX);
    for (uint32_t i = 0; i < asked->count; i++) {
        const dray__cell *cell = &asked->items[i];
        if (cell->bytes > DRAY__VALUES_MAX - *bytes)
            return dray__fail(error, DRAY_EFORMAT, "ranges of more than %d bytes at once",
                              DRAY__VALUES_MAX);
        int rc = cells->read(cells->user, cell, data + *bytes);
        if (rc && rc != DRAY_EGONE) /* the reader must not take it for lost */
            return dray__fail(error, rc, "a range cannot be read now, and is not gone");
        gone[i] = rc != DRAY_OK;
        *bytes += gone[i] ? 0 : cell->bytes;
    }
    return DRAY_OK;
}

void dray__cells_answer(const dray__cells *cells, const dray__data_request *request,
                        const uint8_t *body, dray_region *staging, dray__writer *out,
                        uint64_t *data_bytes)
{
    dray_error error;
    dray__reader in = dray__reader_of(body, request->body_bytes);
    uint8_t *data = dray_region_base(staging), gone[DRAY__CELLS_MAX];
    uint64_t bytes = 0;
    dray__arena items = {0};
    cells_asked asked;
    dray__get_fields(&in, &items, &dray__cells_fields, &asked);
    int rc = dray__reader_finish(&in, "a request for samples", &error);
    if (!rc)
        rc = read_all(cells, &asked, data, gone, &bytes, &error);
    dray__arena_free(&items);
    *data_bytes = rc ? 0 : bytes;
    dray__writer_reset(out);
    if (rc) {
        dray__answer_refuse(out, request->id, &error);
        return;
    }
    dray__answer_put(out, DRAY_OK, request->id, 8 + asked.count, bytes);
    dray__put_u64(out, dray__hash(data, bytes));
    dray__put_bytes(out, gone, asked.count);
}

static int answer(void *user, dray__data_reader *reader)
{
    if (reader->request.type != DRAY__DATA_CELLS)
        return -ENOTSUP;
    if (!dray__server_buffer(reader))
        return -EAGAIN;
    dray__cells_answer(user, &reader->request, reader->body, reader->data, &reader->head,
                       &reader->data_bytes);
    return 0;
}

int dray__cells_serve(const char *address, const dray__stream_keys *keys, const dray__cells *cells,
                      dray__server **out, const char **endpoint, dray_error *error)
{
    const dray__data_service service = {.user = (void *)cells, .answer = answer};
    int rc = dray__server_new(address, keys, &service, out, error);
    if (!rc)
        *endpoint = dray__server_endpoint(*out);
    return rc;
}
