/* The operations that are one request each: sealing, clearing and waiting for partitions,
 * admission, the cursor of checkpoints, refills, status. */
#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/options.h"
#include "queue/client/client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- partitions ------------------------------------------------------------------------------ */

int dray_queue_seal(dray_queue *queue, const char *partition, uint32_t rows, dray_error *error)
{
    const dray__sealing message = {partition, rows};
    int rc = dray__name_check(partition, "partition", error);
    return rc ? rc
              : dray__queue_command(queue, DRAY__MSG_QUEUE_SEAL, &dray__sealing_fields, &message,
                                    NULL, error);
}

int dray_queue_clear(dray_queue *queue, const char *partition, dray_error *error)
{
    int rc = dray__name_check(partition, "partition", error);
    return rc ? rc
              : dray__queue_command(queue, DRAY__MSG_QUEUE_CLEAR, &dray__name_fields, &partition,
                                    NULL, error);
}

int dray_queue_end(dray_queue *queue, dray_error *error)
{
    return dray__queue_command(queue, DRAY__MSG_QUEUE_END, NULL, NULL, NULL, error);
}

int dray_queue_wait(dray_queue *queue, const char *partition, const char *task, int64_t timeout_ns,
                    dray_error *error)
{
    dray__awaited message = {.partition = partition, .task = UINT32_MAX};
    int rc = task ? dray__queue_task(queue, task, &message.task, error) : DRAY_OK;
    if (!rc)
        rc = dray__name_check(partition, "partition", error);
    if (rc)
        return rc;
    int64_t deadline = dray__context_deadline(queue->context, timeout_ns);
    message.timeout_ns = timeout_ns ? deadline - dray__now() : 0;
    dray__put_fields(dray__queue_begin(queue), &dray__awaited_fields, &message);
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
    dray__admitting message = {.admission.task = UINT32_MAX};
    int rc = DRAY__OPTIONS_READ(dray_admission, version, &o, admission, error);
    if (!rc && o.task)
        rc = dray__queue_task(queue, o.task, &message.admission.task, error);
    if (rc)
        return rc;
    message.admission.batch = o.batch_rows;
    message.admission.staleness = o.staleness;
    message.admission.concurrency = o.concurrency;
    message.admission.version = o.version;
    message.resume = o.resume != 0;
    return dray__queue_command(queue, DRAY__MSG_QUEUE_ADMIT, &dray__admitting_fields, &message,
                               NULL, error);
}

int dray_queue_version(dray_queue *queue, uint64_t version, dray_error *error)
{
    return dray__queue_command(queue, DRAY__MSG_QUEUE_VERSION, &dray__u64_fields, &version, NULL,
                               error);
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

static const dray__envelope cursor_form = {"cursor", 0x52535243u /* "CRSR" */, 1};

typedef struct saved_cursor {
    uint64_t name; /* hash of the queue's */
    dray__cursor cursor;
} saved_cursor;

static const dray__fields saved_fields =
    DRAY__FIELDS(saved_cursor, DRAY__NUMBERS(saved_cursor, name),
                 DRAY__FIELD_STRUCT(saved_cursor, cursor, dray__cursor_fields));

int dray_queue_cursor(dray_queue *queue, uint64_t version, void **out, size_t *size,
                      dray_error *error)
{
    dray__reply reply;
    int rc = dray__queue_command(queue, DRAY__MSG_QUEUE_CURSOR, NULL, NULL, &reply, error);
    if (rc)
        return rc;
    saved_cursor saved = {dray__hash(queue->name, strlen(queue->name)), {.version = version}};
    dray__get_fields(&reply.payload, NULL, &dray__cover_fields, &saved.cursor);
    rc = dray__reader_finish(&reply.payload, "QUEUE_CURSOR", error);
    dray__writer w = {0};
    dray__envelope_begin(&cursor_form, &w);
    dray__put_fields(&w, &saved_fields, &saved);
    return dray__envelope_end(&w, rc, out, size, error);
}

/* Sends a change of the cursor. */
static int send_cursor(dray_queue *queue, uint16_t type, const dray__fields *of, const void *data,
                       size_t size, dray__reply *reply, dray_error *error)
{
    saved_cursor saved;
    dray__reader r;
    int rc = dray__envelope_open(&cursor_form, data, size, &r, error);
    if (rc)
        return rc;
    dray__get_fields(&r, NULL, &saved_fields, &saved);
    rc = dray__reader_finish(&r, "cursor", error);
    if (rc)
        return rc;
    if (saved.name != dray__hash(queue->name, strlen(queue->name)))
        return dray__fail(error, DRAY_EINVALID, "cursor: it is of another queue than %s",
                          queue->name);
    return dray__queue_command(queue, type, of, &saved.cursor, reply, error);
}

int dray_queue_covered(dray_queue *queue, const void *data, size_t size, dray_error *error)
{
    return send_cursor(queue, DRAY__MSG_QUEUE_COVER, &dray__cover_fields, data, size, NULL, error);
}

int dray_queue_resume(dray_queue *queue, const void *data, size_t size, uint32_t *epoch,
                      dray_error *error)
{
    dray__reply reply;
    int rc =
        send_cursor(queue, DRAY__MSG_QUEUE_RESUME, &dray__cursor_fields, data, size, &reply, error);
    if (rc)
        return rc;
    uint32_t raised = dray__get_u32(&reply.payload);
    rc = dray__reader_finish(&reply.payload, "QUEUE_RESUME", error);
    if (!rc && epoch)
        *epoch = raised;
    return rc;
}

/* ---- refills --------------------------------------------------------------------------------- */

static int read_refill(const dray_queue *queue, dray__reader *r, dray_refill *out,
                       dray_error *error)
{
    dray__arena arena = {0};
    dray__refilling answer;
    dray__get_fields(r, &arena, &dray__refilling_fields, &answer);
    r->failed |= answer.task >= queue->task_count;
    int rc = dray__reader_finish(r, "QUEUE_REFILL", error);
    if (!rc) {
        *out = (dray_refill){.id = answer.id,
                             .rows = answer.rows,
                             .slot = answer.slot,
                             .group = answer.group,
                             .attempts = answer.attempts,
                             .cause = answer.cause};
        snprintf(out->partition, sizeof out->partition, "%s", answer.partition);
        snprintf(out->task, sizeof out->task, "%s", queue->tasks[answer.task].name);
        snprintf(out->reason, sizeof out->reason, "%s", answer.reason);
    }
    dray__arena_free(&arena);
    return rc;
}

int dray_queue_refill_wait(dray_queue *queue, int64_t timeout_ns, dray_refill *out,
                           dray_error *error)
{
    dray_refill filled = {0};
    int rc = DRAY__OPTIONS_CHECK(dray_refill, reason, out, error);
    if (rc)
        return rc;
    int64_t deadline = dray__context_deadline(queue->context, timeout_ns);
    dray__put_i64(dray__queue_begin(queue), timeout_ns ? deadline - dray__now() : 0);
    dray__reply reply;
    dray_trace_wait(DRAY_CAUSE_SAMPLES, "queue refill", -1);
    rc = dray__queue_call(queue, DRAY__MSG_QUEUE_REFILL, deadline, &reply, error);
    if (!rc) {
        rc = read_refill(queue, &reply.payload, &filled, error);
        dray_trace_samples(filled.partition, filled.task, filled.rows);
    }
    dray_trace_leave();
    if (!rc)
        dray__options_fill(out, &filled, sizeof filled);
    return rc;
}

int dray_queue_refill_decline(dray_queue *queue, uint64_t id, dray_error *error)
{
    return dray__queue_command(queue, DRAY__MSG_QUEUE_DECLINE, &dray__u64_fields, &id, NULL, error);
}

int dray_queue_status(dray_queue *queue, char **out, dray_error *error)
{
    dray__reply reply;
    int rc = dray__queue_command(queue, DRAY__MSG_QUEUE_STATUS, NULL, NULL, &reply, error);
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
