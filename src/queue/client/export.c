/* A batch for other ranks: described here, opened read-only there. */
#include "queue/client/client.h"

#include "base/error.h"

#include <stdlib.h>
#include <string.h>

static const dray__envelope exported_batch = {"exported batch", 0x48435442u /* "BTCH" */, 2};

typedef struct exported {
    const char *queue;
    const uint8_t *body; /* as it was received */
    uint32_t body_size;
} exported;

static const dray__fields head_fields =
    DRAY__FIELDS(exported, DRAY__FIELD_TEXT(exported, queue, DRAY__WORD_MAX),
                 DRAY__FIELD_LIST(exported, body, body_size, dray__u8_fields));

int dray_batch_export(const dray_batch *batch, void **out, size_t *size, dray_error *error)
{
    dray__writer w = {0};
    const dray__names *names = &batch->queue->names;
    if (!batch->ticket)
        return dray__fail(error, DRAY_EPERM, "dray_batch_export: the batch was itself imported");
    if (batch->keys)
        return dray__fail(
            error, DRAY_EUNSUPPORTED,
            "dray_batch_export: of rows with keys their keys are handed on, to be got");
    dray__known_column *columns = calloc(batch->column_count + 1u, sizeof *columns);
    if (!columns || batch->body_size > UINT32_MAX) {
        free(columns);
        return dray__nomem(error);
    }
    for (uint32_t i = 0; i < batch->column_count; i++)
        columns[i] = (dray__known_column){batch->columns[i].column, batch->columns[i].name,
                                          batch->columns[i].spec};
    const exported head = {batch->queue->name, batch->body, (uint32_t)batch->body_size};
    const dray__news news = {columns, names->keys, batch->column_count, names->key_count};
    dray__envelope_begin(&exported_batch, &w);
    dray__put_fields(&w, &head_fields, &head);
    dray__put_fields(&w, &dray__news_fields, &news);
    free(columns);
    return dray__envelope_end(&w, DRAY_OK, out, size, error);
}

static int read_head(const dray_queue *queue, const void *data, size_t size, dray__reader *r,
                     dray__arena *arena, exported *out, dray_error *error)
{
    int rc = dray__envelope_open(&exported_batch, data, size, r, error);
    if (rc)
        return rc;
    dray__get_fields(r, arena, &head_fields, out);
    if (!out->queue || strcmp(out->queue, queue->name) != 0)
        return dray__fail(error, DRAY_EINVALID, "batch: it is of queue %s, this is %s",
                          out->queue ? out->queue : "?", queue->name);
    return DRAY_OK;
}

int dray_batch_import(dray_queue *queue, const void *data, size_t size, dray_batch **out,
                      dray_error *error)
{
    dray__reader r;
    dray__names names = {0};
    exported head = {0};
    int rc = read_head(queue, data, size, &r, &names.arena, &head, error);
    if (!rc)
        rc = dray__names_read(&names, &r, error);
    if (!rc)
        rc = dray__reader_finish(&r, "batch", error);
    dray__reader body = dray__reader_of(head.body, head.body_size);
    if (!rc)
        rc = dray__batch_read(queue, &names, 0, &body, out, error);
    dray__names_free(&names);
    return rc;
}
