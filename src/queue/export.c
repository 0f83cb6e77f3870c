/* A batch for other ranks: described here, opened read-only there. */
#include "queue/client.h"

#include "base/error.h"
#include "base/hash.h"

#include <stdlib.h>
#include <string.h>

#define EXPORT_MAGIC 0x48435442u /* "BTCH" */
#define EXPORT_VERSION 1u

int dray_batch_export(const dray_batch *batch, void **out, size_t *size, dray_error *error)
{
    dray__writer w = {0};
    const dray__names *names = &batch->queue->names;
    if (!batch->ticket)
        return dray__fail(error, DRAY_EPERM, "dray_batch_export: the batch was itself imported");
    dray__put_u32(&w, EXPORT_MAGIC);
    dray__put_u32(&w, EXPORT_VERSION);
    dray__put_string(&w, batch->queue->name);
    dray__put_u32(&w, batch->column_count);
    for (uint32_t i = 0; i < batch->column_count; i++) {
        dray__put_u32(&w, batch->columns[i].column);
        dray__put_string(&w, batch->columns[i].name);
        dray__put_spec(&w, &batch->columns[i].spec);
    }
    dray__put_words(&w, (const char *const *)names->keys, names->key_count);
    dray__put_blob(&w, batch->body, batch->body_size);
    dray__put_u64(&w, w.failed ? 0 : dray__hash(w.data, w.size));
    int rc = dray__writer_check(&w, error);
    if (rc) {
        dray__writer_free(&w);
        return rc;
    }
    *out = w.data;
    *size = w.size;
    return DRAY_OK;
}

static int check_export(const dray_queue *queue, dray__reader *r, dray_error *error)
{
    if (r->size < 16)
        return dray__fail(error, DRAY_EFORMAT, "batch: %zu bytes are too few", r->size);
    dray__reader tail = dray__reader_of(r->data + r->size - 8, 8);
    r->size -= 8;
    if (dray__get_u32(r) != EXPORT_MAGIC)
        return dray__fail(error, DRAY_EFORMAT, "batch: these bytes are no exported batch");
    uint32_t version = dray__get_u32(r);
    if (version != EXPORT_VERSION)
        return dray__fail(error, DRAY_EVERSION, "batch: version %u expected, found %u",
                          EXPORT_VERSION, version);
    if (dray__get_u64(&tail) != dray__hash(r->data, r->size))
        return dray__fail(error, DRAY_ECHECKSUM, "batch: the exported batch was altered");
    char *name = dray__get_word(r);
    int rc = DRAY_OK;
    if (!name || strcmp(name, queue->name) != 0)
        rc = dray__fail(error, DRAY_EINVALID, "batch: it is of queue %s, this is %s",
                        name ? name : "?", queue->name);
    free(name);
    return rc;
}

int dray_batch_import(dray_queue *queue, const void *data, size_t size, dray_batch **out,
                      dray_error *error)
{
    dray__reader r = dray__reader_of(data, size);
    dray__names names = {0};
    int rc = check_export(queue, &r, error);
    if (!rc)
        rc = dray__names_read(&names, &r, error);
    if (!rc) {
        size_t body_size;
        const void *body = dray__get_blob(&r, &body_size);
        rc = dray__reader_finish(&r, "batch", error);
        dray__reader inner = dray__reader_of(body, body_size);
        if (!rc)
            rc = dray__batch_read(queue, &names, 0, &inner, out, error);
    }
    dray__names_free(&names);
    return rc;
}
