/* trace.h - records spans at little cost: a ring for each thread, no lock, and no system call but
 * the clocks.
 *
 * There are two ways to record. A thread can enter and leave spans (dray_trace_enter,
 * dray_trace_wait, dray_trace_leave). Its spans never overlap: entering a span ends the present
 * piece of the outer span, and a new piece of the outer span begins when the inner one is left. A
 * thread that keeps one span around everything has no time without a span. Each piece has the CPU
 * time of the thread (CLOCK_THREAD_CPUTIME_ID). Or a thread can record a span after it has ended
 * (dray_trace_span). Since 0.1. */
#ifndef DRAY_TRACE_H
#define DRAY_TRACE_H

#include <dray/dray.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dray_span_kind {
    DRAY_SPAN_BUSY = 0, /* computing */
    DRAY_SPAN_WAIT,     /* waiting */
    DRAY_SPAN_TRANSFER  /* moving bytes */
} dray_span_kind;

/* The cause of a span of kind DRAY_SPAN_WAIT: args.cause in the merged file. */
typedef enum dray_wait_cause {
    DRAY_CAUSE_UNKNOWN = 0, /* not said */
    DRAY_CAUSE_SAMPLES,     /* rows of another task */
    DRAY_CAUSE_WEIGHTS,     /* a version of the weights */
    DRAY_CAUSE_READERS,     /* readers of memory that is to be overwritten */
    DRAY_CAUSE_RANKS,       /* other ranks of the same instance */
    DRAY_CAUSE_ADMISSION,   /* the limit on how far ahead rows may be made */
    DRAY_CAUSE_CAPACITY,    /* room in the queue */
    DRAY_CAUSE_TOOL,        /* a program or service outside the job */
    DRAY_CAUSE_RESTART,     /* the process died and was started again */
    DRAY_CAUSE_CONTROLLER,  /* the coordinator's answer, or `dray run`'s */
    DRAY_CAUSE_LEASE        /* the lease of a shared device */
} dray_wait_cause;

/* Turns recording on for the process. Every flush appends spans to the file `path`, which is
 * created, and replaced if it exists; its name should end in .spans. process: the label of the
 * process in the timeline; NULL: the program's name. path NULL: flushes and turns recording off. A
 * forked child records nothing until it opens a file of its own. DRAY_ESYS, DRAY_ENOMEM. Threads:
 * any. Blocks for the file only. */
int dray_trace_open(const char *path, const char *process, dray_error *error);

/* Enters a span of the calling thread, which lasts until dray_trace_leave. Spans may be nested 16
 * deep; deeper ones count for the 16th. name: UTF-8 that stays valid for the life of the process.
 * step: -1 for none. Costs almost nothing while recording is off. Threads: any. Never blocks, but
 * the first span of a thread takes a lock and memory. */
void dray_trace_enter(dray_span_kind kind, const char *name, int64_t step);
/* The same for a span of kind DRAY_SPAN_WAIT. */
void dray_trace_wait(dray_wait_cause cause, const char *name, int64_t step);
/* The same for waits that are frequent and mostly short: a wait of less than 100 us becomes part of
 * the outer span. */
void dray_trace_wait_briefly(dray_wait_cause cause, const char *name, int64_t step);
/* Changes the cause of the wait that was entered last and is not left yet, where the thread learns
 * the cause only with the answer. Does nothing where that span is not a wait. */
void dray_trace_waited_for(dray_wait_cause cause);
/* Leaves the span that was entered last; does nothing where there is none. */
void dray_trace_leave(void);
/* Adds rows and tokens to the span that was entered last; its present piece gets both in its args.
 */
void dray_trace_worked(int64_t rows, int64_t tokens);
/* The span that was entered last, and those within it, also get "queued_ns" in their args: how long
 * the thread waited for a core (/proc/thread-self/schedstat). That takes a system call at both ends
 * of each piece. */
void dray_trace_queued(void);
/* Names the samples of the span that was entered last: "partition", "task" and "rows" in its args.
 * partition and task are copied and kept for the life of the process; NULL: none. rows are added;
 * -1: none. The queue's calls are spans themselves: "queue put", "queue read" (bytes), "queue
 * room", "queue insert", "queue claim", "queue commit", "queue wait", "queue refill" (for answers).
 * Threads: any. Takes a lock for a moment. */
void dray_trace_samples(const char *partition, const char *task, int64_t rows);

/* Records a span of the calling thread that has ended. It is cut out of the present piece of a span
 * that the thread has entered; a part before that piece is left out. name, step: as of
 * dray_trace_enter. begin_ns, end_ns: from dray_trace_now. A thread keeps at most 32,768 spans
 * between two flushes; more are dropped and counted in the merged file ("lost_spans"). Threads:
 * any. Never blocks, but the first span of a thread takes a lock and memory. */
void dray_trace_span(dray_span_kind kind, const char *name, int64_t begin_ns, int64_t end_ns,
                     int64_t step);

/* Records a finished response, for `dray simulate` and `dray size`. The next flush appends it to a
 * file beside the spans, whose name ends in .lengths instead of .spans. step, slot: of the row
 * (dray_row.slot, in the partition of that step). prompt_tokens, tokens: of the prompt, and of the
 * whole response. begin_ns, end_ns: from dray_trace_now; responses that an engine generates
 * together begin at the same time. Does nothing while recording is off, for a response without
 * tokens or time, and for numbers that are negative or, of tokens and steps, more than 2^32 - 1.
 * Threads: any. Takes a lock for a moment. */
void dray_trace_response(int64_t step, uint32_t slot, uint64_t prompt_tokens, uint64_t tokens,
                         int64_t begin_ns, int64_t end_ns);

/* Returns 1 while recording is on, else 0. */
int dray_trace_is_on(void);

int64_t dray_trace_now(void); /* CLOCK_MONOTONIC, ns */

/* Appends the spans of all threads to the file, where they survive if the process is killed.
 * DRAY_ESYS, DRAY_ENOMEM: recording is now off. Threads: any. Blocks for the file. */
int dray_trace_flush(dray_error *error);

/* Merges the files *.spans of `folder` into one file of Chrome's trace-event format in JSON, which
 * Perfetto and chrome://tracing open: a process for each file, and complete events with cat "busy",
 * "wait" or "transfer" and args.step. Flow events, which viewers draw as arrows, lead from the
 * commits of the task "rollout" to the commits of "actor" that trained their rows; a partition's
 * rows count as trained in the order in which they came. Times count from the first span.
 * Unfinished records of a killed process and damaged files are skipped, and the log says so.
 * out_path is replaced in one step. DRAY_ENOENT: there is no such folder. DRAY_ESYS, DRAY_ENOMEM.
 * Threads: any. Blocks for the files. */
int dray_trace_merge(const char *folder, const char *out_path, dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
