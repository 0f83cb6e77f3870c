/* Headers of the messages between readers and data servers (messages.h). */
#include "net/messages.h"

#include "base/error.h"

#include <string.h>

const dray__fields dray__data_request_fields = DRAY__FIELDS(
    dray__data_request, DRAY__NUMBERS(dray__data_request, magic, version, type, id, body_bytes));
const dray__fields dray__answer_fields = DRAY__FIELDS(
    dray__answer, DRAY__NUMBERS(dray__answer, magic, status, id, head_bytes, data_bytes));

size_t dray__request_begin(dray__writer *w, uint16_t type, uint32_t id)
{
    const dray__data_request header = {DRAY__DATA_MAGIC, DRAY__DATA_VERSION, type, id, 0};
    dray__put_fields(w, &dray__data_request_fields, &header);
    return w->size;
}

void dray__request_end(dray__writer *w, size_t begun)
{
    if (!w->failed)
        dray__put_u32_at(w, begun - 4, (uint32_t)(w->size - begun));
}

int dray__answer_get(const uint8_t header[DRAY__ANSWER_HEADER], dray__answer *out,
                     dray_error *error)
{
    dray__reader r = dray__reader_of(header, DRAY__ANSWER_HEADER);
    dray__get_fields(&r, NULL, &dray__answer_fields, out);
    if (out->magic != DRAY__DATA_MAGIC || out->status > 0 || out->head_bytes > DRAY__HEAD_MAX ||
        out->data_bytes > DRAY__DATA_MAX)
        return dray__fail(error, DRAY_EPROTO,
                          "answer of a data server: expected its header, found other bytes");
    return DRAY_OK;
}

/* Returns 0 when there is no such message, 1 when it has neither body nor answer, 2 when it has
 * both. */
static int kind_of(uint16_t type)
{
    static const uint8_t kinds[] = {
#define XX(name, value, asks) [value] = (asks) ? 2 : 1,
        DRAY__DATA_MESSAGE_MAP(XX)
#undef XX
    };
    return type < sizeof kinds ? kinds[type] : 0;
}

bool dray__request_asks(uint16_t type)
{
    return kind_of(type) == 2;
}

int dray__request_get(const uint8_t header[DRAY__REQUEST_HEADER], dray__data_request *out,
                      dray_error *error)
{
    dray__reader r = dray__reader_of(header, DRAY__REQUEST_HEADER);
    dray__get_fields(&r, NULL, &dray__data_request_fields, out);
    if (out->magic != DRAY__DATA_MAGIC || out->body_bytes > DRAY__REQUEST_MAX)
        return dray__fail(error, DRAY_EPROTO,
                          "request to a data server: expected its header, found other bytes");
    if (out->version != DRAY__DATA_VERSION || !kind_of(out->type))
        return dray__fail(error, DRAY_EVERSION,
                          "message %u of data protocol %u; version %d is spoken here", out->type,
                          out->version, DRAY__DATA_VERSION);
    if (dray__request_asks(out->type) != (out->body_bytes > 0))
        return dray__fail(error, DRAY_EPROTO, "message %u with a body of %u bytes", out->type,
                          out->body_bytes);
    return DRAY_OK;
}

void dray__answer_put(dray__writer *w, int status, uint32_t id, uint32_t head, uint64_t data)
{
    const dray__answer header = {DRAY__DATA_MAGIC, status, id, head, data};
    dray__put_fields(w, &dray__answer_fields, &header);
}

void dray__answer_refuse(dray__writer *w, uint32_t id, const dray_error *error)
{
    dray__answer_put(w, error->code, id, (uint32_t)strlen(error->message) + 4, 0);
    dray__put_string(w, error->message);
}
