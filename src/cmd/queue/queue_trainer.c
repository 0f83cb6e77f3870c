/* The parts of `dray queue` for producers that replace lost samples, and for trainers with
 * checkpoints. */
#include "cmd/queue/queue.h"

#include <dray/queue.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CURSOR_MAX = 4096 };

int cmd_queue_refill(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    static const char *const causes[] = {"failed", "stale", "rolled_back", "bytes_lost"};
    dray_refill refill = DRAY_REFILL_INIT;
    if (a->decline)
        return dray_queue_refill_decline(queue, (uint64_t)a->decline, error);
    int rc = dray_queue_refill_wait(queue, a->timeout_s * INT64_C(1000000000), &refill, error);
    if (rc == DRAY_OK)
        cmd_json_line(json_pack(
            "{s:I, s:s, s:I, s:I, s:I, s:s, s:I, s:s, s:s}", "refill", (json_int_t)refill.id,
            "partition", refill.partition, "rows", (json_int_t)refill.rows, "slot",
            (json_int_t)refill.slot, "group", (json_int_t)refill.group, "task", refill.task,
            "attempts", (json_int_t)refill.attempts, "cause",
            (size_t)refill.cause < 4 ? causes[refill.cause] : "?", "reason", refill.reason));
    return rc;
}

/* Writes a cursor to a new file. An existing file is not replaced, because it may be the cursor of
 * the last good checkpoint. */
static int write_new(const char *path, const void *data, size_t size, dray_error *error)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return cmd_error(error, errno == EEXIST ? DRAY_EEXIST : DRAY_ESYS, "%.300s: %m", path);
    bool whole = write(fd, data, size) == (ssize_t)size && fsync(fd) == 0;
    int why = errno;
    close(fd);
    if (whole)
        return DRAY_OK;
    unlink(path);
    return cmd_error(error, DRAY_ESYS, "%.300s: %s", path, strerror(why));
}

int cmd_queue_cursor(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    void *cursor = NULL;
    size_t size = 0;
    int rc = dray_queue_cursor(queue, (uint64_t)a->version, &cursor, &size, error);
    if (rc == DRAY_OK)
        rc = write_new(a->words.items[0], cursor, size, error);
    if (rc == DRAY_OK && a->json)
        cmd_json_line(
            json_pack("{s:s, s:I}", "cursor", a->words.items[0], "bytes", (json_int_t)size));
    dray_free(cursor);
    return rc;
}

static int read_cursor(const char *path, uint8_t out[CURSOR_MAX], size_t *size, dray_error *error)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, out, CURSOR_MAX);
    int rc = n < 0 ? cmd_error(error, errno == ENOENT ? DRAY_ENOENT : DRAY_ESYS, "%.300s: %m", path)
                   : DRAY_OK;
    if (fd >= 0)
        close(fd);
    *size = n < 0 ? 0 : (size_t)n;
    return rc;
}

int cmd_queue_cover(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    uint8_t cursor[CURSOR_MAX];
    size_t size;
    int rc = read_cursor(a->words.items[0], cursor, &size, error);
    if (rc == DRAY_OK)
        rc = dray_queue_covered(queue, cursor, size, error);
    return rc;
}

int cmd_queue_resume(const queue_arguments *a, dray_queue *queue, dray_error *error)
{
    uint8_t cursor[CURSOR_MAX];
    size_t size;
    uint32_t epoch = 0;
    int rc = read_cursor(a->words.items[0], cursor, &size, error);
    if (rc == DRAY_OK)
        rc = dray_queue_resume(queue, cursor, size, &epoch, error);
    if (rc == DRAY_OK && a->json)
        cmd_json_line(json_pack("{s:I}", "epoch", (json_int_t)epoch));
    return rc;
}
