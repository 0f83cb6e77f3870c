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

/* Turns recording on for the process; spans go to the file `path` (made anew; name it *.spans), to
 * which every flush appends. process: the row's label; NULL: the program's name. NULL path: off,
 * with a last flush. A forked child does not record until it opens a file of its own. Returns
 * DRAY_ESYS, DRAY_ENOMEM. Threads: any. Blocks for the file only. */
int dray_trace_open(const char *path, const char *process, dray_error *error);

/* Records one span of the calling thread. name: static storage, or interned by the caller for the
 * life of the process; UTF-8. begin_ns, end_ns: of dray_trace_now. step: -1 for none. Costs next to
 * nothing when recording is off. A thread keeps at most 32,768 spans between two flushes; beyond
 * that new ones are dropped, and counted in the merged file ("lost_spans").
 * Threads: any. Never blocks (the thread's first span takes a lock and memory). */
void dray_trace_span(dray_span_kind kind, const char *name, int64_t begin_ns, int64_t end_ns,
                     int64_t step);

/* The same of work on samples: in the merged file args has "partition", "task" and "rows", too.
 * partition, task: copied, and kept for the life of the process; NULL: none. rows: -1: not said.
 * The queue records so what it does: "queue put", "queue read" (bytes), "queue insert", "queue
 * claim", "queue commit", "queue wait", "queue refill" (for answers). Threads: any. Takes a lock
 * for a moment. Since 0.1. */
void dray_trace_samples(dray_span_kind kind, const char *name, int64_t begin_ns, int64_t end_ns,
                        const char *partition, const char *task, int64_t rows);
/* 1: spans are recorded now. */
int dray_trace_is_on(void);

int64_t dray_trace_now(void); /* CLOCK_MONOTONIC, ns */

/* Appends what was recorded, by all threads, to the file, so that it survives the process being
 * killed. Nothing to do: DRAY_OK. DRAY_ESYS, DRAY_ENOMEM: recording is off from
 * here on. Threads: any. */
int dray_trace_flush(dray_error *error);

/* Merges the files of `folder` (*.spans) into one Chrome trace-event JSON, which Perfetto and
 * chrome://tracing open: a process row for each file, complete events with cat "busy", "wait" or
 * "transfer" and args.step. Times count from the first span of all. What a killed process left
 * unfinished is skipped, damaged files too; the log says so. out_path is replaced in one step.
 * Returns DRAY_ENOENT (no folder), DRAY_ESYS, DRAY_ENOMEM. Threads: any. */
int dray_trace_merge(const char *folder, const char *out_path, dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
