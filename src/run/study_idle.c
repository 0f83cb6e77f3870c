/* Where the time of a run's processes went, from their spans. */
#include "run/study_read.h"

#include "base/error.h"
#include "base/json.h"
#include "run/host.h"
#include "trace/spans.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Steps before are those in which the loop fills. */
enum { FIRST_STEP = 2, KINDS = 3 };

static const char *const kind_keys[KINDS] = {
    [DRAY_SPAN_BUSY] = "busy", [DRAY_SPAN_WAIT] = "idle", [DRAY_SPAN_TRANSFER] = "transfer"};

typedef struct piece {
    int64_t begin_ns, end_ns;
    dray_span_kind kind;
    dray_wait_cause cause;
} piece;

/* The spans of a process's first thread, which runs its tasks. */
typedef struct process {
    dray__spans *spans; /* NULL: a damaged file */
    piece *pieces;
    uint32_t count, room;
} process;

typedef struct timeline {
    process *processes;
    uint32_t count;
    int64_t begin_ns, end_ns; /* what is measured */
} timeline;

static int add_piece(process *p, const dray__span *span, dray_error *error)
{
    if (p->count == p->room) {
        uint32_t room = p->room ? 2 * p->room : 1024;
        piece *pieces = reallocarray(p->pieces, room, sizeof(*pieces));
        if (!pieces)
            return dray__nomem(error);
        p->pieces = pieces;
        p->room = room;
    }
    p->pieces[p->count++] = (piece){span->begin_ns, span->end_ns, span->kind, span->cause};
    return DRAY_OK;
}

/* A damaged file, or the damaged end of one, is left out, as in trace.json. */
static int read_process(timeline *t, const char *path, process *p, dray_error *error)
{
    dray__span span;
    if (dray__spans_open(path, &p->spans, NULL))
        return DRAY_OK;
    int rc = DRAY_OK;
    while (!rc && dray__spans_next(p->spans, &span, NULL) == DRAY_OK) {
        bool counts = span.kind == DRAY_SPAN_BUSY && span.step >= FIRST_STEP;
        if (counts && span.begin_ns < t->begin_ns)
            t->begin_ns = span.begin_ns;
        if (counts && span.end_ns > t->end_ns)
            t->end_ns = span.end_ns;
        if (span.thread == 0)
            rc = add_piece(p, &span, error);
    }
    return rc;
}

static int is_spans(const struct dirent *entry)
{
    const char *end = strrchr(entry->d_name, '.');
    return end && strcmp(end, ".spans") == 0;
}

static int read_all(timeline *t, const char *folder, dray_error *error)
{
    struct dirent **entries = NULL;
    char path[PATH_MAX];
    int count = scandir(folder, &entries, is_spans, alphasort);
    if (count < 0)
        return errno == ENOENT ? DRAY_OK : dray__fail_errno(error, errno, "%s", folder);
    t->processes = calloc((size_t)count + 1, sizeof(*t->processes));
    int rc = t->processes ? DRAY_OK : dray__nomem(error);
    for (int i = 0; i < count; i++) {
        dray__path(path, sizeof(path), "%s/%s", folder, entries[i]->d_name);
        if (!rc)
            rc = read_process(t, path, &t->processes[t->count++], error);
        free(entries[i]);
    }
    free(entries);
    return rc;
}

/* ---- sums ------------------------------------------------------------------------------------ */

static void add(json_t **sums, const char *key, double seconds)
{
    dray__json_set(sums, key, json_real(json_number_value(json_object_get(*sums, key)) + seconds));
}

/* By beginning, those that hold others first. */
static int by_begin(const void *a, const void *b)
{
    const piece *x = a, *y = b;
    if (x->begin_ns != y->begin_ns)
        return x->begin_ns < y->begin_ns ? -1 : 1;
    return (x->end_ns < y->end_ns) - (x->end_ns > y->end_ns);
}

/* "engine 0" is of role engine, and so is "engine.2 0", a rank of one of its instances. */
static void role_of(const char *label, char out[64])
{
    snprintf(out, 64, "%.*s", (int)strcspn(label, ". "), label);
}

/* Time that a span shares with one that began earlier is the earlier one's: no time counts twice.
 */
static void add_process(const timeline *t, process *p, json_t **sums)
{
    char role[64], key[192];
    int64_t until = t->begin_ns;
    role_of(dray__spans_label(p->spans), role);
    qsort(p->pieces, p->count, sizeof(*p->pieces), by_begin);
    for (uint32_t i = 0; i < p->count; i++) {
        const piece *s = &p->pieces[i];
        int64_t begin = s->begin_ns > until ? s->begin_ns : until,
                end = s->end_ns < t->end_ns ? s->end_ns : t->end_ns;
        if (end <= begin || (unsigned)s->kind >= KINDS)
            continue;
        until = end;
        double seconds = (double)(end - begin) * 1e-9;
        snprintf(key, sizeof(key), "%s.%s", kind_keys[s->kind], role);
        add(sums, key, seconds);
        if (s->kind == DRAY_SPAN_WAIT) {
            snprintf(key, sizeof(key), "idle.%s.%s", role, dray__cause_name(s->cause));
            add(sums, key, seconds);
        }
    }
}

/* Processes of a role, each counted once however often it was started. */
static uint32_t processes_of(const timeline *t, const char *role)
{
    uint32_t count = 0;
    char of[64];
    for (uint32_t i = 0; i < t->count; i++) {
        bool first = t->processes[i].spans;
        if (first)
            role_of(dray__spans_label(t->processes[i].spans), of);
        for (uint32_t k = 0; k < i && first; k++)
            first = !t->processes[k].spans || strcmp(dray__spans_label(t->processes[k].spans),
                                                     dray__spans_label(t->processes[i].spans)) != 0;
        count += first && strcmp(of, role) == 0;
    }
    return count;
}

/* Divides every sum by the time that the role's processes had. */
static void set_shares(const timeline *t, const json_t *sums, json_t *measures)
{
    const char *key;
    json_t *sum;
    json_object_foreach((json_t *)(uintptr_t)sums, key, sum)
    {
        char role[64], rest[80];
        const char *from = strchr(key, '.') + 1, *to = strchrnul(from, '.');
        snprintf(role, sizeof(role), "%.*s", (int)(to - from), from);
        double whole = (double)(t->end_ns - t->begin_ns) * 1e-9 * (double)processes_of(t, role);
        double share = json_number_value(sum) / whole;
        json_object_set_new(measures, key, json_real(share));
        if (*to) /* one cause: its time is in idle.ROLE already */
            continue;
        snprintf(rest, sizeof(rest), "unaccounted.%s", role);
        const json_t *before = json_object_get(measures, rest);
        double left = before ? json_number_value(before) : 1;
        json_object_set_new(measures, rest, json_real(left - share));
    }
}

int dray__study_idle(const char *folder, json_t *measures, dray_error *error)
{
    timeline t = {.begin_ns = INT64_MAX};
    char path[PATH_MAX];
    json_t *sums = json_object();
    dray__path(path, sizeof(path), "%s/trace", folder);
    int rc = read_all(&t, path, error);
    for (uint32_t i = 0; i < t.count && !rc && t.begin_ns < t.end_ns; i++)
        if (t.processes[i].spans)
            add_process(&t, &t.processes[i], &sums);
    if (!rc && !sums)
        rc = dray__nomem(error);
    if (!rc)
        set_shares(&t, sums, measures);
    json_decref(sums);
    for (uint32_t i = 0; i < t.count; i++) {
        dray__spans_close(t.processes[i].spans);
        free(t.processes[i].pieces);
    }
    free(t.processes);
    return rc;
}
