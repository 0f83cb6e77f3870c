#include "run/host/host.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/json.h"
#include "control/context.h"
#include "run/data/samples.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

bool dray__host_stopping(const dray__host *host)
{
    char path[4096];
    dray__host_path(host, path, sizeof(path), "stop");
    return access(path, F_OK) == 0;
}

bool dray__host_queue_ended(const dray__host *host)
{
    json_t *status = NULL;
    bool ended = dray__queue_state(host->queue, &status, NULL) == DRAY_OK &&
                 dray__json_true(status, "ended");
    json_decref(status);
    return ended;
}

int dray__host_score(dray__host *host, dray_batch *batch, const char *column, dray__score_fn *score,
                     dray_error *error)
{
    dray__ragged prompt = {0}, response = {0};
    float *scores = NULL;
    int rc = dray__ragged_read(batch, "prompt", DRAY_I32, &prompt, error);
    if (!rc)
        rc = dray__ragged_read(batch, "response", DRAY_I32, &response, error);
    if (!rc && !(scores = malloc((response.offsets[response.rows] + 1) * sizeof(*scores))))
        rc = dray__nomem(error);
    const dray__sequences sequences = {prompt.rows, dray__ragged_tokens(&prompt),
                                       dray__ragged_tokens(&response), NULL};
    if (!rc)
        rc = score(host, &sequences, scores, error);
    if (!rc && dray__host_leads(host)) {
        dray_column_data out = dray__ragged_column(column, DRAY_F32, response.offsets, scores);
        rc = dray_batch_set(batch, &out, error);
    }
    if (!rc)
        dray_trace_worked(response.rows, (int64_t)response.offsets[response.rows]);
    free(scores);
    dray__ragged_free(&prompt);
    dray__ragged_free(&response);
    return rc;
}

static int report(dray__host *host, const char *kind, json_t *object,
                  int (*post)(dray_context *, const char *, const char *, dray_error *),
                  dray_error *error)
{
    char *text = object ? json_dumps(object, JSON_COMPACT) : NULL;
    json_decref(object);
    if (!text)
        return dray__nomem(error);
    int rc = post(host->context, kind, text, error);
    free(text);
    return rc;
}

int dray__host_report(dray__host *host, const char *kind, json_t *object, dray_error *error)
{
    return report(host, kind, object, dray_report_post, error);
}

int dray__host_tell(dray__host *host, const char *kind, json_t *object, dray_error *error)
{
    return report(host, kind, object, dray__report_tell, error);
}

static void wait_for_ranks(void)
{
    dray_trace_wait_briefly(DRAY_CAUSE_RANKS, "wait for ranks", -1);
}

int dray__host_meet(dray__host *host, dray_error *error)
{
    wait_for_ranks();
    int rc = dray__group_barrier(host->group, DRAY_WAIT_DEFAULT, error);
    dray_trace_leave();
    return rc;
}

int dray__host_gather(dray__host *host, const void *in, uint64_t bytes, void *out,
                      dray_error *error)
{
    wait_for_ranks();
    int rc = dray__group_all_gather_equal(host->group, in, bytes, out, DRAY_WAIT_DEFAULT, error);
    dray_trace_leave();
    return rc;
}

int dray__host_broadcast(dray__host *host, void *data, uint64_t bytes, int64_t timeout_ns,
                         dray_error *error)
{
    wait_for_ranks();
    int rc = dray__group_broadcast(host->group, 0, data, bytes, timeout_ns, error);
    dray_trace_leave();
    return rc;
}

void dray__host_path(const dray__host *host, char *out, size_t capacity, const char *format, ...)
{
    int used = snprintf(out, capacity, "%s/", host->options.folder);
    if (used < 0 || (size_t)used >= capacity)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(out + used, capacity - (size_t)used, format, arguments);
    va_end(arguments);
}

int dray__host_wait_file(const dray__host *host, const char *path, dray_error *error)
{
    int64_t deadline = dray__deadline(host->wait_ns);
    struct stat st;
    while (stat(path, &st) < 0) {
        if (errno != ENOENT)
            return dray__fail_errno(error, errno, "%s", path);
        if (dray__now() > deadline)
            return dray__fail(error, DRAY_ETIMEDOUT, "%s: not written in %g s", path,
                              host->job->limits.wait_seconds);
        nanosleep(&(struct timespec){.tv_nsec = 5 * DRAY__MILLISECOND}, NULL);
    }
    return DRAY_OK;
}
