/* Claims rows, copies out their columns and commits them, with the C functions alone.
 * queue_python.py compares its own time with that. */
#include <dray/queue.h>

int claim_and_commit(dray_queue *queue, const char *task, uint32_t rows, const char *const *columns,
                     uint32_t count, void *out, size_t capacity);

int claim_and_commit(dray_queue *queue, const char *task, uint32_t rows, const char *const *columns,
                     uint32_t count, void *out, size_t capacity)
{
    dray_claim_options options = DRAY_CLAIM_OPTIONS_INIT;
    options.task = task;
    options.count = rows;
    dray_batch *batch;
    int rc = dray_queue_claim(queue, &options, &batch, NULL);
    if (rc)
        return rc;
    for (uint32_t i = 0; !rc && i < count; i++)
        rc = dray_batch_gather(batch, columns[i], out, capacity, NULL, NULL);
    if (!rc)
        rc = dray_batch_commit(batch, NULL);
    dray_batch_free(batch);
    return rc;
}
