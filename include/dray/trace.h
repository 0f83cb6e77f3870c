/* trace.h - spans, recorded cheaply: a ring per thread, no lock, no system call but the clock. */
#ifndef DRAY_TRACE_H
#define DRAY_TRACE_H

#include <dray/dray.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dray_span_kind {
    DRAY_SPAN_BUSY = 0, /* computing */
    DRAY_SPAN_WAIT,     /* waiting for somebody */
    DRAY_SPAN_TRANSFER  /* moving bytes */
} dray_span_kind;

/* Turns recording on for the process; spans go to `path` (one file a process, rewritten whole at
 * each flush). process: the row's label. NULL path: off. */
int dray_trace_open(const char *path, const char *process, dray_error *error);
/* name: static storage or interned by the caller for the life of the process. step: -1 for none. */
void dray_trace_span(dray_span_kind kind, const char *name, int64_t begin_ns, int64_t end_ns,
                     int64_t step);
int64_t dray_trace_now(void); /* CLOCK_MONOTONIC, ns */
int dray_trace_flush(dray_error *error);
/* Merges the files of `folder` (*.spans) into one Chrome trace-event JSON, which Perfetto and
 * chrome://tracing open. */
int dray_trace_merge(const char *folder, const char *out_path, dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
