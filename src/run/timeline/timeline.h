/* src/run/timeline/: the spans of a run. timeline.c reads their files, account.c adds the time of
 * each process up, blame.c finds the process that ended a wait, path.c follows a step's critical
 * path backwards and finds the longest waits, and perfetto.c writes the timeline as Perfetto's
 * protobuf.
 *
 * The timeline of a run, in memory: a track for each thread of each process, with its spans in
 * order. Times are CLOCK_MONOTONIC nanoseconds. */
#pragma once

#include "base/hash.h"
#include "trace/spans.h"

#include <dray/dray.h>
#include <stdbool.h>

enum { DRAY__TL_NONE = UINT32_MAX };

typedef struct dray__tl_span {
    int64_t begin_ns, end_ns;
    int64_t tokens;                 /* -1 when not recorded */
    int32_t step, rows;             /* -1 when not recorded */
    uint32_t name, partition, task; /* of timeline.texts; NONE when it has none */
    uint8_t kind, cause;            /* dray_span_kind, dray_wait_cause */
} dray__tl_span;

typedef struct dray__tl_track {
    uint32_t process, thread; /* thread 0: the process's first one */
    char name[24];            /* of the thread */
    dray__tl_span *spans;
    uint32_t count;
    uint64_t room;
} dray__tl_track;

typedef struct dray__tl_process {
    char *file;     /* its path */
    char label[64]; /* "engine.2 0": rank 0 of the third instance of the role engine */
    char role[48];
    /* track is that of its first thread; NONE when it has no spans. */
    uint32_t instance, rank, pid, track;
    /* Of its account; 0 when not known, and ended_ns when its end was not seen. */
    int64_t first_ns, ended_ns;
    int64_t state_ns[DRAY__STATES]; /* of its account, if the process's end was seen */
    uint64_t lost;                  /* spans that were dropped for lack of room */
    size_t unread;                  /* bytes of an incomplete record at the file's end */
    bool malformed;                 /* the rest of the file could not be read */
} dray__tl_process;

/* A commit, insertion or publication that others wait for. Lists of them are sorted by time. */
typedef struct dray__tl_mark {
    int64_t ns;
    uint32_t track, span;
} dray__tl_mark;

/* The end of a step, which is when all ranks have published the version that it made. */
typedef struct dray__tl_end {
    int64_t step, ns;
    uint32_t track; /* of the rank that was last */
} dray__tl_end;

typedef struct dray__tl_marks {
    dray__tl_mark *items;
    uint32_t count;
    uint64_t room;
} dray__tl_marks;

typedef struct dray__timeline {
    dray__tl_process *processes;
    uint32_t process_count;
    uint64_t process_room;
    dray__tl_track *tracks;
    uint32_t track_count;
    uint64_t track_room;
    char **texts;
    uint32_t text_count;
    uint64_t text_room;
    dray__map text_index;
    dray__tl_marks commits, inserts, publications;
    int64_t begin_ns, end_ns; /* of the first and the last span */
    dray__tl_end *ends;       /* by step */
    uint32_t end_count;
} dray__timeline;

/* Reads the files *.spans of `folder`/trace, or of `folder` itself. With `strict`, damaged files
 * are an error that names them (DRAY_EFORMAT); else they are left out with a line in the log.
 * Returns 0, or DRAY_ENOENT when there are no files of spans. */
int dray__timeline_read(const char *folder, bool strict, dray__timeline **out, dray_error *error);
void dray__timeline_free(dray__timeline *timeline); /* NULL is fine */

/* Returns the text of a number, or ""; and the number of a text, or NONE. */
const char *dray__tl_text(const dray__timeline *timeline, uint32_t text);
uint32_t dray__tl_find(const dray__timeline *timeline, const char *text);
/* Returns the index of the track's first span that ends after `ns`; the track's count when there is
 * none. */
uint32_t dray__tl_at(const dray__tl_track *track, int64_t ns);
/* Returns the step of a partition such as "step-000012"; -1 for other partitions. */
int64_t dray__tl_step(const char *partition);
/* Returns the end of the step; NULL when it did not end. */
const dray__tl_end *dray__tl_step_end(const dray__timeline *timeline, int64_t step);

/* ---- account.c ------------------------------------------------------------------------------- */

/* Seconds of a process, or of all processes of a role. */
typedef struct dray__tl_sums {
    double seconds, states[DRAY__STATES];
} dray__tl_sums;

/* The time of a rank between two moments, by state. A process and those that replaced it are one
 * rank; the time between them counts as a wait for the restart. */
typedef struct dray__tl_rank {
    const dray__tl_process *process; /* the first of them */
    uint32_t starts;
    dray__tl_sums sums;
} dray__tl_rank;

/* *out is a new array of *count. */
int dray__tl_account(const dray__timeline *timeline, int64_t begin_ns, int64_t end_ns,
                     dray__tl_rank **out, uint32_t *count, dray_error *error);
double dray__tl_told(const dray__tl_sums *sums); /* the sum of busy, transfer and waits */

/* ---- blame.c --------------------------------------------------------------------------------- */

/* The cause of a wait's end: at `ns`, this track ended the wait. */
typedef struct dray__tl_blame {
    uint32_t track; /* NONE when the track is not known */
    int64_t ns;
} dray__tl_blame;

dray__tl_blame dray__tl_blame_of(const dray__timeline *timeline, uint32_t track,
                                 const dray__tl_span *wait);
/* Returns whether the span moves weights into an engine. */
bool dray__tl_reads_weights(const dray__timeline *timeline, const dray__tl_span *span);

/* ---- path.c ---------------------------------------------------------------------------------- */

typedef struct dray__tl_link {
    uint32_t track;
    uint32_t name; /* of the span */
    uint8_t kind, cause;
    int64_t begin_ns, end_ns;
} dray__tl_link;

/* Finds the critical path of a step: the chain of spans that determined its end, from its beginning
 * (the end of the step before) on. *out is a new array of *count. */
int dray__tl_path(const dray__timeline *timeline, int64_t step, dray__tl_link **out,
                  uint32_t *count, dray_error *error);

typedef struct dray__tl_bubble {
    uint32_t track;
    dray__tl_span span; /* the wait */
    uint32_t by;        /* the track that ended it; NONE when not known */
    uint32_t doing;     /* the name of the span in which `by` was for most of the wait; or NONE */
    uint8_t doing_kind, doing_cause;
} dray__tl_bubble;

/* Finds at most `most` of the longest waits between two moments, the longest first. Processes that
 * work for less than a tenth of their time are left out, unless there are no others, or they
 * publish or read weights: a trainer or an engine that waits most of the time costs a device. */
int dray__tl_bubbles(const dray__timeline *timeline, int64_t begin_ns, int64_t end_ns,
                     uint32_t most, dray__tl_bubble **out, uint32_t *count, dray_error *error);

/* ---- perfetto.c ------------------------------------------------------------------------------ */

/* Writes the timeline as packets of Perfetto's protobuf (perfetto.dev/docs/reference/trace-packet-
 * proto): tracks of processes and threads, slices, and flows from samples to steps. The file is
 * replaced in one step. */
int dray__tl_write_perfetto(const dray__timeline *timeline, const char *path, dray_error *error);

/* An arrow from the commit of samples to that of the step that trained them. */
typedef struct dray__tl_flow {
    dray__tl_mark from, to;
} dray__tl_flow;
int dray__tl_flows(const dray__timeline *timeline, dray__tl_flow **out, uint32_t *count,
                   dray_error *error);
