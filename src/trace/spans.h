/* src/trace/: how a process records the work of its threads, as spans with a beginning and an end,
 * in a file that survives the process. The files of all processes of a run are merged into one
 * timeline that trace viewers can show. account.h adds the spans up while the process runs. When
 * tracing is off, recording costs a few instructions. */

/* The format of *.spans files, and how to read them.
 *
 * A head of 8 KiB (magic "DRAYSPAN", u32 version, u32 pid, label; at byte 1984 the clock of a
 * process of another host, i64 nanoseconds that are added to its times, i64 their greatest error;
 * from byte 2048 on the account of the process, account.h), then chunks, each appended with one
 * write: u32 magic, u32 size of the body, u64 XXH3 of the body, body. A chunk that a killed process
 * left unfinished fails its checksum, and everything before it is good. A body has, in
 * base/wire.h's encoding: new names (ids count on from the last chunk's), new threads (likewise),
 * the number of spans lost so far, spans. */
#pragma once

#include "base/wire.h"
#include "trace/account.h"

#include <dray/trace.h>

#define DRAY__SPANS_VERSION 4u
#define DRAY__SPANS_CHUNK 0x4B4E4843u /* "CHNK" */
enum { DRAY__SPANS_CLOCK_AT = 1984 };
enum { DRAY__SPAN_BYTES = 2 + 4 + 4 + 3 * 8 + 4 + 4 + 4 * 8, DRAY__SPAN_NAME_MAX = 1024 };

typedef struct dray__span {
    dray_span_kind kind;
    dray_wait_cause cause; /* for a wait */
    const char *name;
    uint32_t thread; /* from 0, in the order of their first spans */
    int64_t begin_ns, end_ns, step;
    const char *partition, *task;            /* NULL when there is none */
    int64_t rows, tokens, cpu_ns, queued_ns; /* -1 when not recorded */
} dray__span;

typedef struct dray__spans dray__spans;

/* Opens a file. Fails with DRAY_EFORMAT when it is no file of spans, and with DRAY_EVERSION,
 * DRAY_ENOENT or DRAY_ESYS. */
int dray__spans_open(const char *path, dray__spans **out, dray_error *error);
void dray__spans_close(dray__spans *spans); /* NULL is fine */
/* Returns the difference that was added to the times of another host's process to get this host's
 * time, and its greatest error. Both are 0 for this host's own processes. */
int64_t dray__spans_clock(const dray__spans *spans, int64_t *error_ns);
/* Reads the next span. Its name lives as long as `spans`. Returns DRAY_EEND when there are no
 * more good spans, and DRAY_EFORMAT when a chunk with a right checksum is malformed. */
int dray__spans_next(dray__spans *spans, dray__span *out, dray_error *error);

const char *dray__spans_label(const dray__spans *spans);
uint32_t dray__spans_pid(const dray__spans *spans);
/* The values below are known after the last span. */
uint32_t dray__spans_thread_count(const dray__spans *spans);
const char *dray__spans_thread_name(const dray__spans *spans, uint32_t thread);
/* The number of spans that full rings dropped. */
uint64_t dray__spans_lost(const dray__spans *spans);
size_t dray__spans_unread(const dray__spans *spans); /* the bytes of an unfinished end */

const char *dray__span_kind_name(dray_span_kind kind); /* "busy" */
