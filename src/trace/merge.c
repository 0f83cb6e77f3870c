/* Merges files of spans into one file of Chrome's trace-event format ("Trace Event Format", Google;
 * its JSON Object Format): a process row per file, its threads below it, complete events ("X"),
 * times in microseconds from the first span on; and flow events ("s", "f") from the commits of
 * samples to those of the step that trained them. */
#include "base/array.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/io.h"
#include "base/log.h"
#include "trace/spans.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A commit of rows, by `rollout` or `actor`. */
typedef struct moved {
    uint64_t partition; /* the hash of its name */
    int64_t ns, rows;
    size_t process;
    uint32_t thread;
    bool trained;
} moved;

typedef struct merge {
    char **paths;
    dray__accounted *accounts; /* of the files; first_ns is 0 for a file without one */
    size_t count;
    FILE *out;
    bool some; /* an event was written, so the next one needs a comma */
    int64_t origin_ns;
    uint64_t lost, left_out;
    moved *moved;
    uint64_t moved_count, moved_room;
} merge;

/* ---- events ---------------------------------------------------------------------------------- */

static __attribute__((format(printf, 2, 3))) void write_text(FILE *out, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(out, format, arguments);
    va_end(arguments);
}

static void write_string(FILE *out, const char *text)
{
    putc('"', out);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++)
        if (*c == '"' || *c == '\\')
            write_text(out, "\\%c", *c);
        else if (*c < 0x20 || *c == 0x7F)
            write_text(out, "\\u%04x", *c);
        else
            putc(*c, out);
    putc('"', out);
}

static void begin_event(merge *m, char kind, size_t process, uint32_t thread)
{
    write_text(m->out, "%s\n{\"ph\":\"%c\",\"pid\":%zu,\"tid\":%u", m->some ? "," : "", kind,
               process, thread);
    m->some = true;
}

static void write_metadata(merge *m, size_t process, uint32_t thread, const char *what,
                           const char *key, const char *value)
{
    begin_event(m, 'M', process, thread);
    write_text(m->out, ",\"ts\":0,\"name\":\"%s\",\"args\":{\"%s\":", what, key);
    write_string(m->out, value);
    fputs("}}", m->out);
}

static void write_us(FILE *out, const char *key, int64_t ns)
{
    ns = ns < 0 ? 0 : ns; /* the span was written after the search for the first one */
    write_text(out, ",\"%s\":%" PRId64 ".%03d", key, ns / 1000, (int)(ns % 1000));
}

static void write_number(FILE *out, const char *key, int64_t value, const char **comma)
{
    if (value < 0)
        return;
    write_text(out, "%s\"%s\":%" PRId64, *comma, key, value);
    *comma = ",";
}

static void write_member(FILE *out, const char *key, const char *value, const char **comma)
{
    if (!value)
        return;
    write_text(out, "%s\"%s\":", *comma, key);
    write_string(out, value);
    *comma = ",";
}

static void write_span(merge *m, size_t process, const dray__span *span)
{
    begin_event(m, 'X', process, span->thread + 1);
    write_us(m->out, "ts", span->begin_ns - m->origin_ns);
    write_us(m->out, "dur", span->end_ns - span->begin_ns);
    write_text(m->out, ",\"cat\":\"%s\",\"name\":", dray__span_kind_name(span->kind));
    write_string(m->out, span->name);
    const char *comma = "";
    fputs(",\"args\":{", m->out);
    write_number(m->out, "step", span->step, &comma);
    write_member(m->out, "partition", span->partition, &comma);
    write_member(m->out, "task", span->task, &comma);
    write_number(m->out, "rows", span->rows, &comma);
    write_number(m->out, "tokens", span->tokens, &comma);
    write_number(m->out, "cpu_ns", span->cpu_ns, &comma);
    write_number(m->out, "queued_ns", span->queued_ns, &comma);
    if (span->kind == DRAY_SPAN_WAIT && span->cause)
        write_member(m->out, "cause", dray__cause_name(span->cause), &comma);
    fputs("}}", m->out);
}

/* ---- files ----------------------------------------------------------------------------------- */

/* Opens a file of spans. A damaged or other file is left out (DRAY_EAGAIN), with a line in the log,
 * because traces of runs that ended badly are the ones that users need. */
static int open_spans(const merge *m, size_t i, dray__spans **out, dray_error *error)
{
    dray_error why;
    int status = dray__spans_open(m->paths[i], out, &why);
    if (status == DRAY_EFORMAT || status == DRAY_EVERSION) {
        dray__log(DRAY_LOG_WARN, "trace: left out: %s", why.message);
        return DRAY_EAGAIN;
    }
    if (status && error)
        *error = why;
    return status;
}

/* Notes commits, for arrows from samples to the steps that trained them. */
static bool note_moved(merge *m, size_t i, const dray__span *span)
{
    if (!span->partition || !span->task || span->rows <= 0 ||
        strcmp(span->name, "queue commit") != 0)
        return true;
    bool made = strcmp(span->task, "rollout") == 0, trained = strcmp(span->task, "actor") == 0;
    return (!made && !trained) || DRAY__PUSH(m->moved, m->moved_count, m->moved_room,
                                             (moved){.partition = dray__name_hash(span->partition),
                                                     .ns = span->begin_ns,
                                                     .rows = span->rows,
                                                     .process = i + 1,
                                                     .thread = span->thread + 1,
                                                     .trained = trained});
}

static int find_origin(merge *m, size_t i, dray_error *error)
{
    dray__spans *spans;
    dray__span span;
    int status = open_spans(m, i, &spans, error);
    if (status)
        return status == DRAY_EAGAIN ? DRAY_OK : status;
    while ((status = dray__spans_next(spans, &span, error)) == DRAY_OK) {
        if (span.begin_ns < m->origin_ns)
            m->origin_ns = span.begin_ns;
        if (!note_moved(m, i, &span)) {
            status = dray__nomem(error);
            break;
        }
    }
    dray__spans_close(spans);
    return status == DRAY_ENOMEM ? status : DRAY_OK;
}

/* Returns the account of the process that this one replaced; NULL when there is none. */
static const dray__accounted *before(const merge *m, size_t i)
{
    const dray__accounted *is = &m->accounts[i], *found = NULL;
    for (size_t k = 0; is->first_ns && k < m->count; k++) {
        const dray__accounted *was = &m->accounts[k];
        if (was->ended_ns > 0 && was->ended_ns < is->first_ns &&
            strcmp(was->label, is->label) == 0 && (!found || was->ended_ns > found->ended_ns))
            found = was;
    }
    return found;
}

/* Writes the wait from the death of a process to the start of its successor. */
static void write_restart(merge *m, size_t i)
{
    const dray__accounted *was = before(m, i);
    if (was)
        write_span(m, i + 1,
                   &(dray__span){.kind = DRAY_SPAN_WAIT,
                                 .cause = DRAY_CAUSE_RESTART,
                                 .name = "restart",
                                 .begin_ns = was->ended_ns,
                                 .end_ns = m->accounts[i].first_ns,
                                 .step = -1,
                                 .rows = -1,
                                 .tokens = -1,
                                 .cpu_ns = -1,
                                 .queued_ns = -1});
}

/* Writes the clock's difference of a joined host's process. */
static void write_clock(merge *m, size_t process, const dray__spans *spans)
{
    int64_t error_ns, clock_ns = dray__spans_clock(spans, &error_ns);
    if (!clock_ns && !error_ns)
        return;
    begin_event(m, 'M', process, 0);
    write_text(m->out,
               ",\"ts\":0,\"name\":\"clock\",\"args\":{\"added_ns\":%" PRId64
               ",\"error_ns\":%" PRId64 "}}",
               clock_ns, error_ns);
}

static void write_names(merge *m, size_t process, const dray__spans *spans)
{
    char labels[32];
    snprintf(labels, sizeof labels, "pid %u", dray__spans_pid(spans));
    write_metadata(m, process, 0, "process_name", "name", dray__spans_label(spans));
    write_metadata(m, process, 0, "process_labels", "labels", labels);
    write_clock(m, process, spans);
    for (uint32_t i = 0; i < dray__spans_thread_count(spans); i++)
        write_metadata(m, process, i + 1, "thread_name", "name", dray__spans_thread_name(spans, i));
}
static int write_file(merge *m, size_t i, dray_error *error)
{
    dray__spans *spans;
    dray__span span;
    int status = open_spans(m, i, &spans, error);
    if (status == DRAY_EAGAIN)
        m->left_out++;
    if (status)
        return status == DRAY_EAGAIN ? DRAY_OK : status;
    while ((status = dray__spans_next(spans, &span, error)) == DRAY_OK)
        write_span(m, i + 1, &span);
    write_restart(m, i);
    write_names(m, i + 1, spans);
    if (status == DRAY_EFORMAT)
        dray__log(DRAY_LOG_WARN, "trace: %s: the rest is malformed", m->paths[i]);
    if (dray__spans_unread(spans))
        dray__log(DRAY_LOG_INFO, "trace: %s: %zu bytes at its end were not finished", m->paths[i],
                  dray__spans_unread(spans));
    m->lost += dray__spans_lost(spans);
    dray__spans_close(spans);
    return status == DRAY_ENOMEM ? status : DRAY_OK;
}

/* ---- arrows ---------------------------------------------------------------------------------- */

static int by_partition(const void *a, const void *b)
{
    const moved *x = a, *y = b;
    if (x->partition != y->partition)
        return x->partition < y->partition ? -1 : 1;
    if (x->trained != y->trained)
        return x->trained ? 1 : -1;
    return (x->ns > y->ns) - (x->ns < y->ns);
}

static void write_arrow(merge *m, char kind, const moved *at, int64_t ns, uint64_t number)
{
    begin_event(m, kind, at->process, at->thread);
    write_us(m->out, "ts", ns - m->origin_ns);
    write_text(m->out, ",\"cat\":\"flow\",\"name\":\"samples\",\"id\":%" PRIu64 "%s}", number,
               kind == 'f' ? ",\"bp\":\"e\"" : "");
}

/* Writes arrows from each commit of samples to the commits of the step that trained them. A step
 * takes a partition's rows in the order in which they came. An arrow begins and ends within its
 * span. */
static void write_arrows(merge *m)
{
    uint64_t number = 0;
    if (m->moved_count)
        qsort(m->moved, m->moved_count, sizeof *m->moved, by_partition);
    for (uint64_t from = 0, to; from < m->moved_count; from++) {
        uint64_t partition = m->moved[from].partition;
        for (to = from; to < m->moved_count && !m->moved[to].trained;)
            to++;
        for (; to < m->moved_count && m->moved[to].partition == partition;) {
            moved *is = &m->moved[from], *was = &m->moved[to];
            if (is->trained || is->partition != partition)
                break;
            int64_t take = is->rows < was->rows ? is->rows : was->rows;
            if (is->ns < was->ns) {
                write_arrow(m, 's', is, is->ns, ++number);
                write_arrow(m, 'f', was, was->ns, number);
            }
            is->rows -= take;
            was->rows -= take;
            from += !is->rows;
            to += !was->rows;
        }
        while (from + 1 < m->moved_count && m->moved[from + 1].partition == partition)
            from++;
    }
}

static int write_all(merge *m, dray_error *error)
{
    int status = DRAY_OK;
    m->origin_ns = INT64_MAX;
    for (size_t i = 0; i < m->count && !status; i++)
        status = find_origin(m, i, error);
    if (m->origin_ns == INT64_MAX)
        m->origin_ns = 0;
    fputs("{\"traceEvents\":[", m->out);
    for (size_t i = 0; i < m->count && !status; i++)
        status = write_file(m, i, error);
    write_arrows(m);
    write_text(m->out,
               "\n],\"displayTimeUnit\":\"ms\",\"otherData\":{\"origin_ns\":%" PRId64
               ",\"lost_spans\":%" PRIu64 ",\"files\":%zu,\"files_left_out\":%" PRIu64 "}}\n",
               m->origin_ns, m->lost, m->count, m->left_out);
    return status;
}

/* Writes the file under another name and renames it, so that no reader opens half a trace. */
static int write_out(merge *m, const char *out_path, dray_error *error)
{
    char *temporary;
    if (asprintf(&temporary, "%s.%d.tmp", out_path, (int)getpid()) < 0)
        return dray__nomem(error);
    m->out = dray__open_stream(temporary, "w");
    int status = m->out ? write_all(m, error) : dray__fail_errno(error, errno, "%s", temporary);
    if (m->out) {
        int bad = ferror(m->out);
        if ((fclose(m->out) != 0 || bad) && !status)
            status = dray__fail_errno(error, errno, "%s", temporary);
        if (!status && rename(temporary, out_path) < 0)
            status = dray__fail_errno(error, errno, "%s", out_path);
        if (status)
            unlink(temporary);
    }
    free(temporary);
    return status;
}

static int is_spans(const struct dirent *entry)
{
    size_t length = strlen(entry->d_name);
    return length > 6 && strcmp(entry->d_name + length - 6, ".spans") == 0;
}

static int list_files(merge *m, const char *folder, dray_error *error)
{
    struct dirent **entries;
    int count = scandir(folder, &entries, is_spans, alphasort);
    if (count < 0 && errno == ENOENT)
        return dray__fail(error, DRAY_ENOENT, "%s: no such folder", folder);
    if (count < 0)
        return dray__fail_errno(error, errno, "%s", folder);
    m->paths = calloc((size_t)count + 1, sizeof(char *));
    m->accounts = calloc((size_t)count + 1, sizeof *m->accounts);
    int status = m->paths && m->accounts ? DRAY_OK : dray__nomem(error);
    for (int i = 0; i < count; i++) {
        char *path = NULL;
        if (!status && asprintf(&path, "%s/%s", folder, entries[i]->d_name) < 0)
            status = dray__nomem(error);
        if (!status) {
            dray__account_read(path, INT64_MAX, &m->accounts[m->count]);
            m->paths[m->count++] = path;
        }
        free(entries[i]);
    }
    free(entries);
    return status;
}

int dray_trace_merge(const char *folder, const char *out_path, dray_error *error)
{
    merge m = {0};
    int status = list_files(&m, folder, error);
    if (!status)
        status = write_out(&m, out_path, error);
    for (size_t i = 0; i < m.count; i++)
        free(m.paths[i]);
    free(m.paths);
    free(m.accounts);
    free(m.moved);
    return status;
}
