/* What is one request each: sealing, clearing and waiting for partitions, admission, the cursor of
 * checkpoints, refills, status. */
#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/options.h"
#include "base/words.h"
#include "control/context.h"
#include "queue/client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- partitions ------------------------------------------------------------------------------ */

static int begin_named(dray_queue *queue, const char *partition, dray__writer **w,
                       dray_error *error)
{
    int rc = dray__name_check(partition, "partition", error);
    if (rc)
        return rc;
    *w = dray__queue_begin(queue);
    dray__put_string(*w, partition);
    return DRAY_OK;
}

int dray_queue_seal(dray_queue *queue, const char *partition, uint32_t rows, dray_error *error)
{
    dray__writer *w;
    int rc = begin_named(queue, partition, &w, error);
    if (rc)
        return rc;
    dray__put_u32(w, rows);
    return dray__queue_command(queue, DRAY__MSG_QUEUE_SEAL, NULL, error);
}

int dray_queue_clear(dray_queue *queue, const char *partition, dray_error *error)
{
    dray__writer *w;
    int rc = begin_named(queue, partition, &w, error);
    return rc ? rc : dray__queue_command(queue, DRAY__MSG_QUEUE_CLEAR, NULL, error);
}

int dray_queue_end(dray_queue *queue, dray_error *error)
{
    dray__queue_begin(queue);
    return dray__queue_command(queue, DRAY__MSG_QUEUE_END, NULL, error);
}

int dray_queue_wait(dray_queue *queue, const char *partition, const char *task, int64_t timeout_ns,
                    dray_error *error)
{
    uint32_t t = UINT32_MAX;
    dray__writer *w;
    int rc = task ? dray__queue_task(queue, task, &t, error) : DRAY_OK;
    if (!rc)
        rc = begin_named(queue, partition, &w, error);
    if (rc)
        return rc;
    int64_t deadline = dray__context_deadline(queue->context, timeout_ns);
    dray__put_u32(w, t);
    dray__put_i64(w, timeout_ns ? deadline - dray__now() : 0);
    dray_trace_wait(DRAY_CAUSE_SAMPLES, "queue wait", -1);
    rc = dray__queue_call(queue, DRAY__MSG_QUEUE_WAIT, deadline, NULL, error);
    dray_trace_samples(partition, task, -1);
    dray_trace_leave();
    return rc;
}

/* ---- asynchronous rollout -------------------------------------------------------------------- */

int dray_queue_admit(dray_queue *queue, const dray_admission *admission, dray_error *error)
{
    dray_admission o = DRAY_ADMISSION_INIT;
    uint32_t task = UINT32_MAX;
    int rc = dray__options_read(&o, sizeof o, dray__end_of(dray_admission, version), admission,
                                "dray_admission", error);
    if (!rc && o.task)
        rc = dray__queue_task(queue, o.task, &task, error);
    if (rc)
        return rc;
    dray__writer *w = dray__queue_begin(queue);
    dray__put_u32(w, task);
    dray__put_u32(w, o.batch_rows);
    dray__put_u32(w, o.staleness);
    dray__put_u32(w, o.concurrency);
    dray__put_u64(w, o.version);
    dray__put_u8(w, o.resume != 0);
    return dray__queue_command(queue, DRAY__MSG_QUEUE_ADMIT, NULL, error);
}

int dray_queue_version(dray_queue *queue, uint64_t version, dray_error *error)
{
    dray__put_u64(dray__queue_begin(queue), version);
    return dray__queue_command(queue, DRAY__MSG_QUEUE_VERSION, NULL, error);
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

#define CURSOR_MAGIC 0x52535243u /* "CRSR" */
#define CURSOR_FORMAT 1u
#define CURSOR_BYTES 44u

int dray_queue_cursor(dray_queue *queue, uint64_t version, void **out, size_t *size,
                      dray_error *error)
{
    dray__queue_begin(queue);
    dray__reply reply;
    int rc = dray__queue_command(queue, DRAY__MSG_QUEUE_CURSOR, &reply, error);
    if (rc)
        return rc;
    uint32_t epoch = dray__get_u32(&reply.payload);
    uint64_t seq = dray__get_u64(&reply.payload);
    rc = dray__reader_finish(&reply.payload, "QUEUE_CURSOR", error);
    dray__writer w = {0};
    dray__put_u32(&w, CURSOR_MAGIC);
    dray__put_u32(&w, CURSOR_FORMAT);
    dray__put_u64(&w, dray__hash(queue->name, strlen(queue->name)));
    dray__put_u32(&w, epoch);
    dray__put_u64(&w, seq);
    dray__put_u64(&w, version);
    dray__put_u64(&w, w.failed ? 0 : dray__hash(w.data, w.size));
    if (!rc)
        rc = dray__writer_check(&w, error);
    if (rc) {
        dray__writer_free(&w);
        return rc;
    }
    *out = w.data;
    *size = w.size;
    return DRAY_OK;
}

typedef struct cursor {
    uint32_t epoch;
    uint64_t seq, version;
} cursor;

static int read_cursor(const dray_queue *queue, const void *data, size_t size, cursor *out,
                       dray_error *error)
{
    dray__reader r = dray__reader_of(data, size);
    uint32_t magic = dray__get_u32(&r), format = dray__get_u32(&r);
    uint64_t name = dray__get_u64(&r);
    out->epoch = dray__get_u32(&r);
    out->seq = dray__get_u64(&r);
    out->version = dray__get_u64(&r);
    uint64_t sum = dray__get_u64(&r);
    if (size != CURSOR_BYTES || magic != CURSOR_MAGIC)
        return dray__fail(error, DRAY_EFORMAT, "cursor: these %zu bytes are none", size);
    if (format != CURSOR_FORMAT)
        return dray__fail(error, DRAY_EVERSION, "cursor: format %u expected, found %u",
                          CURSOR_FORMAT, format);
    if (sum != dray__hash(data, size - 8))
        return dray__fail(error, DRAY_ECHECKSUM, "cursor: it was altered");
    if (name != dray__hash(queue->name, strlen(queue->name)))
        return dray__fail(error, DRAY_EINVALID, "cursor: it is of another queue than %s",
                          queue->name);
    return DRAY_OK;
}

int dray_queue_covered(dray_queue *queue, const void *data, size_t size, dray_error *error)
{
    cursor c;
    int rc = read_cursor(queue, data, size, &c, error);
    if (rc)
        return rc;
    dray__writer *w = dray__queue_begin(queue);
    dray__put_u32(w, c.epoch);
    dray__put_u64(w, c.seq);
    return dray__queue_command(queue, DRAY__MSG_QUEUE_COVER, NULL, error);
}

int dray_queue_resume(dray_queue *queue, const void *data, size_t size, uint32_t *epoch,
                      dray_error *error)
{
    cursor c;
    int rc = read_cursor(queue, data, size, &c, error);
    if (rc)
        return rc;
    dray__writer *w = dray__queue_begin(queue);
    dray__put_u32(w, c.epoch);
    dray__put_u64(w, c.seq);
    dray__put_u64(w, c.version);
    dray__reply reply;
    rc = dray__queue_command(queue, DRAY__MSG_QUEUE_RESUME, &reply, error);
    if (rc)
        return rc;
    uint32_t raised = dray__get_u32(&reply.payload);
    rc = dray__reader_finish(&reply.payload, "QUEUE_RESUME", error);
    if (!rc && epoch)
        *epoch = raised;
    return rc;
}

/* ---- refills --------------------------------------------------------------------------------- */

static void read_refill(const dray_queue *queue, dray__reader *r, dray_refill *out)
{
    out->id = dray__get_u64(r);
    char *partition = dray__get_word(r);
    out->rows = dray__get_u32(r);
    out->slot = dray__get_u32(r);
    out->group = dray__get_u32(r);
    uint32_t task = dray__get_u32(r);
    out->attempts = dray__get_u32(r);
    out->cause = (int32_t)dray__get_u32(r);
    char *reason = dray__get_reason(r);
    r->failed |= task >= queue->task_count;
    if (!r->failed) {
        snprintf(out->partition, sizeof out->partition, "%s", partition);
        snprintf(out->task, sizeof out->task, "%s", queue->tasks[task].name);
        snprintf(out->reason, sizeof out->reason, "%s", reason);
    }
    free(partition);
    free(reason);
}

int dray_queue_refill_wait(dray_queue *queue, int64_t timeout_ns, dray_refill *out,
                           dray_error *error)
{
    dray_refill filled = {0};
    int rc = dray__options_check(out, dray__end_of(dray_refill, reason), "dray_refill", error);
    if (rc)
        return rc;
    int64_t deadline = dray__context_deadline(queue->context, timeout_ns);
    dray__put_i64(dray__queue_begin(queue), timeout_ns ? deadline - dray__now() : 0);
    dray__reply reply;
    dray_trace_wait(DRAY_CAUSE_SAMPLES, "queue refill", -1);
    rc = dray__queue_call(queue, DRAY__MSG_QUEUE_REFILL, deadline, &reply, error);
    if (!rc) {
        read_refill(queue, &reply.payload, &filled);
        dray_trace_samples(filled.partition, filled.task, filled.rows);
    }
    dray_trace_leave();
    if (rc)
        return rc;
    rc = dray__reader_finish(&reply.payload, "QUEUE_REFILL", error);
    if (!rc)
        dray__options_fill(out, &filled, sizeof filled);
    return rc;
}

int dray_queue_refill_decline(dray_queue *queue, uint64_t id, dray_error *error)
{
    dray__put_u64(dray__queue_begin(queue), id);
    return dray__queue_command(queue, DRAY__MSG_QUEUE_DECLINE, NULL, error);
}

int dray_queue_status(dray_queue *queue, char **out, dray_error *error)
{
    dray__queue_begin(queue);
    dray__reply reply;
    int rc = dray__queue_command(queue, DRAY__MSG_QUEUE_STATUS, &reply, error);
    if (rc)
        return rc;
    char *text = dray__get_prose(&reply.payload, DRAY__FRAME_MAX);
    rc = dray__reader_finish(&reply.payload, "QUEUE_STATUS", error);
    if (rc)
        free(text);
    else
        *out = text;
    return rc;
}
