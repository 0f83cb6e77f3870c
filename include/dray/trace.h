/* trace.h - spans, recorded cheaply: a ring per thread, no lock, no system call but the clocks.
 *
 * Two ways. A thread that says what it does as it does it (dray_trace_enter, dray_trace_wait,
 * dray_trace_leave) gets spans that never overlap: entering one ends the running piece of the one
 * around it, which goes on in a new piece when the inner one is left. Where a thread keeps one
 * around all that it does, no time is without a span. Each piece has the CPU time of the thread
 * (CLOCK_THREAD_CPUTIME_ID; that of threads which it starts is not in it). And spans that are over
 * can be recorded afterwards (dray_trace_span). */
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

/* What a span of kind DRAY_SPAN_WAIT waits for: args.cause in the merged file. */
typedef enum dray_wait_cause {
    DRAY_CAUSE_UNKNOWN = 0, /* not said */
    DRAY_CAUSE_SAMPLES,     /* rows that another task is to make */
    DRAY_CAUSE_WEIGHTS,     /* a version that a trainer is to publish */
    DRAY_CAUSE_READERS,     /* those that still read what is to be overwritten */
    DRAY_CAUSE_RANKS,       /* the other ranks of the instance */
    DRAY_CAUSE_ADMISSION,   /* the bound on how far ahead rows may be made */
    DRAY_CAUSE_CAPACITY,    /* room in the queue */
    DRAY_CAUSE_TOOL,        /* a program or service outside the job */
    DRAY_CAUSE_RESTART,     /* the process was dead, and is started anew */
    DRAY_CAUSE_CONTROLLER,  /* the coordinator's answer, or `dray run`'s */
    DRAY_CAUSE_LEASE        /* its turn on a device that it shares */
} dray_wait_cause;

/* Turns recording on for the process; spans go to the file `path` (made anew; name it *.spans), to
 * which every flush appends. process: the row's label; NULL: the program's name. NULL path: off,
 * with a last flush. A forked child does not record until it opens a file of its own. Returns
 * DRAY_ESYS, DRAY_ENOMEM. Threads: any. Blocks for the file only. */
int dray_trace_open(const char *path, const char *process, dray_error *error);

/* Enters a span of the calling thread, which goes on until dray_trace_leave; spans may be entered
 * within it, up to 16 deep (what is deeper belongs to the 16th). name: static storage, or interned
 * by the caller for the life of the process; UTF-8. step: -1 for none. Costs next to nothing when
 * recording is off. Threads: any. Never blocks (the thread's first span takes a lock and memory).
 * Since 0.1. */
void dray_trace_enter(dray_span_kind kind, const char *name, int64_t step);
/* The same of a wait. Since 0.1. */
void dray_trace_wait(dray_wait_cause cause, const char *name, int64_t step);
/* The same of a wait of which there may be many, most of them short: one of less than 100 us is no
 * span of its own, but part of the one around it. Since 0.1. */
void dray_trace_wait_briefly(dray_wait_cause cause, const char *name, int64_t step);
/* Leaves the span that was entered last; none: does nothing. Since 0.1. */
void dray_trace_leave(void);
/* Adds to what the span that was entered last has worked on; the piece that ends next has both in
 * its args. Since 0.1. */
void dray_trace_worked(int64_t rows, int64_t tokens);
/* Says which samples the span is about that was entered last: "partition", "task" and "rows" in its
 * args. partition, task: copied, and kept for the life of the process; NULL: none. rows: added; -1:
 * none. The queue's calls are spans of their own: "queue put", "queue read" (bytes), "queue room",
 * "queue insert", "queue claim", "queue commit", "queue wait", "queue refill" (for answers).
 * Threads: any. Takes a lock for a moment. Since 0.1. */
void dray_trace_samples(const char *partition, const char *task, int64_t rows);

/* Records one span of the calling thread that is over. Within what the thread has entered, it cuts
 * the piece that runs, and what lies before that piece is left out. name: static storage, or
 * interned by the caller for the life of the process; UTF-8. begin_ns, end_ns: of dray_trace_now.
 * step: -1 for none. Costs next to nothing when recording is off. A thread keeps at most 32,768
 * spans between two flushes; beyond that new ones are dropped, and counted in the merged file
 * ("lost_spans"). Threads: any. Never blocks (the thread's first span takes a lock and memory). */
void dray_trace_span(dray_span_kind kind, const char *name, int64_t begin_ns, int64_t end_ns,
                     int64_t step);

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
