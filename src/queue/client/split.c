/* A batch's rows in batches of their own. */
#include "queue/client/client.h"

#include "base/error.h"

#include <stdlib.h>
#include <string.h>

static int check(const dray_batch *batch, const uint32_t *rows, uint32_t row_count,
                 dray_error *error)
{
    int rc = dray__batch_check_open(batch, "dray_batch_split", error);
    if (!rc && (!row_count || batch->micro_count))
        rc = dray__fail(error, DRAY_EINVALID,
                        "dray_batch_split: rows of a batch that is no rank's share expected");
    for (uint32_t i = 0; !rc && i < row_count; i++)
        rc = dray__batch_check_rows(batch, rows[i], 1, error);
    return rc;
}

/* Copies the other batch's state of these rows that is not read from the queue. */
static bool fill(dray_batch *part, const dray_batch *batch, const uint32_t *rows)
{
    uint32_t count = part->row_count, writes = part->task->writes_count;
    part->partition = dray__arena_text(&part->arena, batch->partition);
    part->rows = dray__arena_get(&part->arena, count * sizeof *part->rows);
    part->outputs = dray__arena_get(&part->arena, (writes + 1) * sizeof *part->outputs);
    part->tag_start = dray__arena_get(&part->arena, (count + 1) * sizeof *part->tag_start);
    if (!part->partition || !part->rows || !part->outputs || !part->tag_start)
        return false;
    memset(part->outputs, 0, (writes + 1) * sizeof *part->outputs);
    memset(part->tag_start, 0, (count + 1) * sizeof *part->tag_start);
    for (uint32_t i = 0; i < count; i++)
        part->rows[i] = batch->rows[rows[i]];
    return true;
}

/* Reports the split to the controller. This message precedes all messages about the part. */
static void tell(const dray_batch *part, const dray_batch *batch, const uint32_t *rows)
{
    dray_queue *queue = batch->queue;
    const dray__splitting message = {batch->ticket, part->ticket, part->row_count, rows};
    dray__writer *w = dray__queue_begin(queue);
    dray__put_fields(w, &dray__splitting_fields, &message);
    if (dray__notify(queue->channel, DRAY__MSG_QUEUE_SPLIT, w, NULL))
        dray__storage_untell(&queue->holder.storage, false); /* the part's commit fails then */
}

int dray_batch_split(dray_batch *batch, const uint32_t *rows, uint32_t row_count, dray_batch **out,
                     dray_error *error)
{
    int rc = check(batch, rows, row_count, error);
    if (rc)
        return rc;
    dray_batch *part = calloc(1, sizeof *part);
    if (!part)
        return dray__nomem(error);
    *part = (dray_batch){.queue = batch->queue,
                         .arena = batch->queue->spare,
                         .task = batch->task,
                         .generation = batch->generation,
                         .row_count = row_count};
    batch->queue->spare = (dray__arena){0};
    if (!fill(part, batch, rows)) {
        dray_batch_free(part);
        return dray__nomem(error);
    }
    part->ticket = dray__queue_ticket(batch->queue);
    tell(part, batch, rows);
    *out = part;
    return DRAY_OK;
}
