#include "run/timeline/timeline.h"

#include "base/array.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/log.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- texts ----------------------------------------------------------------------------------- */

/* Gets the number of a text, adding it if it is new. Returns false when out of memory. */
static bool number_of(dray__timeline *t, const char *text, uint32_t *out)
{
    *out = DRAY__TL_NONE;
    if (!text || dray__map_get(&t->text_index, text, out))
        return true;
    char *copy = strdup(text);
    if (!copy || !dray__map_set(&t->text_index, text, t->text_count) ||
        !DRAY__PUSH(t->texts, t->text_count, t->text_room, copy)) {
        free(copy);
        return false;
    }
    *out = t->text_count - 1;
    // cppcheck-suppress memleak
    return true; /* t->texts has the copy */
}

const char *dray__tl_text(const dray__timeline *timeline, uint32_t text)
{
    return text < timeline->text_count ? timeline->texts[text] : "";
}

uint32_t dray__tl_find(const dray__timeline *timeline, const char *text)
{
    uint32_t number = DRAY__TL_NONE;
    dray__map_get(&timeline->text_index, text, &number);
    return number;
}

int64_t dray__tl_step(const char *partition)
{
    static const char prefix[] = "step-";
    char *end;
    if (strncmp(partition, prefix, strlen(prefix)) != 0)
        return -1;
    long long step = strtoll(partition + strlen(prefix), &end, 10);
    return *end || end == partition + strlen(prefix) || step < 0 ? -1 : step;
}

/* ---- spans ----------------------------------------------------------------------------------- */

static int32_t narrow(int64_t value)
{
    return value < 0 || value > INT32_MAX ? -1 : (int32_t)value;
}

/* Finds or adds the track of a thread. Threads are numbered in the order of their first spans. */
static dray__tl_track *track_of(dray__timeline *t, uint32_t process, uint32_t first,
                                uint32_t thread)
{
    for (uint32_t i = first; i < t->track_count; i++)
        if (t->tracks[i].thread == thread)
            return &t->tracks[i];
    if (!DRAY__PUSH(t->tracks, t->track_count, t->track_room,
                    (dray__tl_track){.process = process, .thread = thread}))
        return NULL;
    return &t->tracks[t->track_count - 1];
}

static bool add_span(dray__timeline *t, dray__tl_track *track, const dray__span *span)
{
    dray__tl_span made = {.begin_ns = span->begin_ns,
                          .end_ns = span->end_ns,
                          .tokens = span->tokens,
                          .step = narrow(span->step),
                          .rows = narrow(span->rows),
                          .kind = (uint8_t)span->kind,
                          .cause = (uint8_t)span->cause};
    return number_of(t, span->name, &made.name) && number_of(t, span->partition, &made.partition) &&
           number_of(t, span->task, &made.task) &&
           DRAY__PUSH(track->spans, track->count, track->room, made);
}

static int by_begin(const void *a, const void *b)
{
    const dray__tl_span *x = a, *y = b;
    return (x->begin_ns > y->begin_ns) - (x->begin_ns < y->begin_ns);
}

/* Cuts each span where the next one begins. Spans of one thread do not overlap, but those of a
 * damaged file may. */
static void settle(dray__tl_track *track)
{
    if (track->count)
        qsort(track->spans, track->count, sizeof(*track->spans), by_begin);
    for (uint32_t i = 1; i < track->count; i++)
        if (track->spans[i - 1].end_ns > track->spans[i].begin_ns)
            track->spans[i - 1].end_ns = track->spans[i].begin_ns;
}

/* ---- files ----------------------------------------------------------------------------------- */

/* "engine.2 0" */
static void take_label(dray__tl_process *p, const char *label)
{
    snprintf(p->label, sizeof(p->label), "%s", label);
    snprintf(p->role, sizeof(p->role), "%.*s", (int)strcspn(p->label, ". "), p->label);
    const char *dot = strchr(p->label, '.'), *space = strrchr(p->label, ' ');
    p->instance = dot ? (uint32_t)strtoul(dot + 1, NULL, 10) : 0;
    p->rank = space ? (uint32_t)strtoul(space + 1, NULL, 10) : 0;
}

static int read_spans(dray__timeline *t, dray__spans *spans, uint32_t process, dray_error *error)
{
    dray__span span;
    uint32_t first = t->track_count;
    int rc;
    while ((rc = dray__spans_next(spans, &span, error)) == DRAY_OK) {
        dray__tl_track *track = track_of(t, process, first, span.thread);
        if (!track || !add_span(t, track, &span))
            return dray__nomem(error);
        t->begin_ns = span.begin_ns < t->begin_ns ? span.begin_ns : t->begin_ns;
        t->end_ns = span.end_ns > t->end_ns ? span.end_ns : t->end_ns;
    }
    dray__tl_process *p = &t->processes[process];
    p->malformed = rc == DRAY_EFORMAT;
    p->lost = dray__spans_lost(spans);
    p->unread = dray__spans_unread(spans);
    for (uint32_t i = first; i < t->track_count; i++) {
        dray__tl_track *track = &t->tracks[i];
        settle(track);
        snprintf(track->name, sizeof(track->name), "%s",
                 dray__spans_thread_name(spans, track->thread));
        if (track->thread == 0)
            p->track = i;
    }
    return rc == DRAY_EEND || rc == DRAY_EFORMAT ? DRAY_OK : rc;
}

static int refuse(const dray__tl_process *p, dray_error *error)
{
    if (p->malformed)
        return dray__fail(error, DRAY_EFORMAT,
                          "%s: expected spans to the end of the file, found a "
                          "record that is malformed",
                          p->file);
    if (p->unread)
        return dray__fail(error, DRAY_EFORMAT,
                          "%s: the file is truncated: expected whole records, found %zu bytes of "
                          "an unfinished one at its end",
                          p->file, p->unread);
    if (p->lost)
        return dray__fail(error, DRAY_EFORMAT,
                          "%s: expected all spans, found that %llu were lost while they were "
                          "recorded",
                          p->file, (unsigned long long)p->lost);
    return DRAY_OK;
}

static int read_file(dray__timeline *t, char *path, bool strict, dray_error *error)
{
    dray_error why = {0};
    dray__spans *spans = NULL;
    dray__accounted account;
    int rc = dray__spans_open(path, &spans, &why);
    if (rc && !strict && (rc == DRAY_EFORMAT || rc == DRAY_EVERSION)) {
        dray__log(DRAY_LOG_WARN, "left out: %s", why.message);
        free(path);
        return DRAY_OK;
    }
    if (!rc && !DRAY__PUSH(t->processes, t->process_count, t->process_room,
                           (dray__tl_process){.file = path, .track = DRAY__TL_NONE}))
        rc = dray__nomem(&why);
    if (rc) {
        dray__spans_close(spans);
        free(path);
        if (error)
            *error = why;
        return rc;
    }
    uint32_t process = t->process_count - 1;
    take_label(&t->processes[process], dray__spans_label(spans));
    t->processes[process].pid = dray__spans_pid(spans);
    rc = read_spans(t, spans, process, error);
    dray__spans_close(spans);
    dray__tl_process *p = &t->processes[process];
    if (dray__account_read(path, INT64_MAX, &account)) {
        p->first_ns = account.first_ns;
        p->ended_ns = account.ended_ns > account.first_ns ? account.ended_ns : 0;
        for (int i = 0; p->ended_ns && i < DRAY__STATES; i++)
            p->state_ns[i] = account.state_ns[i];
    }
    return rc || !strict ? rc : refuse(p, error);
}

static int is_spans(const struct dirent *entry)
{
    const char *end = strrchr(entry->d_name, '.');
    return end && strcmp(end, ".spans") == 0;
}

static int read_folder(dray__timeline *t, const char *folder, bool strict, dray_error *error)
{
    struct dirent **entries = NULL;
    char *inside = NULL;
    struct stat is;
    if (asprintf(&inside, "%s/trace", folder) < 0)
        return dray__nomem(error);
    const char *from = stat(inside, &is) == 0 ? inside : folder;
    int count = scandir(from, &entries, is_spans, alphasort), rc = DRAY_OK;
    if (count < 0)
        rc = errno == ENOENT ? dray__fail(error, DRAY_ENOENT, "%s: no such folder", from)
                             : dray__fail_errno(error, errno, "%s", from);
    if (!count)
        rc = dray__fail(error, DRAY_ENOENT,
                        "%s: expected a run's folder, with files *.spans in trace/, found none",
                        folder);
    for (int i = 0; i < count; i++) {
        char *path = NULL;
        if (!rc && asprintf(&path, "%s/%s", from, entries[i]->d_name) < 0)
            rc = dray__nomem(error);
        if (!rc)
            rc = read_file(t, path, strict, error);
        free(entries[i]);
    }
    free(entries);
    free(inside);
    return rc;
}

/* ---- marks ----------------------------------------------------------------------------------- */

static int by_ns(const void *a, const void *b)
{
    const dray__tl_mark *x = a, *y = b;
    return (x->ns > y->ns) - (x->ns < y->ns);
}

static int by_step(const void *a, const void *b)
{
    const dray__tl_end *x = a, *y = b;
    return (x->step > y->step) - (x->step < y->step);
}

static int by_step_and_time(const void *a, const void *b)
{
    const dray__tl_end *x = a, *y = b;
    int order = by_step(a, b);
    return order ? order : (x->ns > y->ns) - (x->ns < y->ns);
}

/* Finds the ends of steps. Ranks publish their parts one by one, and the last one ends the step. */
static int find_ends(dray__timeline *t, dray_error *error)
{
    uint32_t count = 0;
    t->ends = calloc(t->publications.count + (size_t)1, sizeof(*t->ends));
    if (!t->ends)
        return dray__nomem(error);
    for (uint32_t i = 0; i < t->publications.count; i++) {
        const dray__tl_mark *mark = &t->publications.items[i];
        int64_t step = t->tracks[mark->track].spans[mark->span].step;
        if (step >= 0)
            t->ends[count++] = (dray__tl_end){.step = step, .ns = mark->ns, .track = mark->track};
    }
    qsort(t->ends, count, sizeof(*t->ends), by_step_and_time);
    for (uint32_t i = 0; i < count; i++)
        if (i + 1 == count || t->ends[i + 1].step != t->ends[i].step)
            t->ends[t->end_count++] = t->ends[i];
    return DRAY_OK;
}

static int find_marks(dray__timeline *t, dray_error *error)
{
    uint32_t commit = dray__tl_find(t, "queue commit"), insert = dray__tl_find(t, "queue insert"),
             publish = dray__tl_find(t, "publish"),
             python = dray__tl_find(t, "weights publish"); /* of dray.Publisher */
    for (uint32_t i = 0; i < t->track_count; i++)
        for (uint32_t k = 0; k < t->tracks[i].count; k++) {
            const dray__tl_span *span = &t->tracks[i].spans[k];
            if (span->name == DRAY__TL_NONE)
                continue;
            bool published =
                (span->name == publish || span->name == python) && span->kind != DRAY_SPAN_WAIT;
            dray__tl_marks *marks = span->name == commit   ? &t->commits
                                    : span->name == insert ? &t->inserts
                                    : published            ? &t->publications
                                                           : NULL;
            int64_t ns = published ? span->end_ns : span->begin_ns;
            if (marks && !DRAY__PUSH(marks->items, marks->count, marks->room,
                                     (dray__tl_mark){.ns = ns, .track = i, .span = k}))
                return dray__nomem(error);
        }
    dray__tl_marks *const all[] = {&t->commits, &t->inserts, &t->publications};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        if (all[i]->count)
            qsort(all[i]->items, all[i]->count, sizeof(*all[i]->items), by_ns);
    return find_ends(t, error);
}

int dray__timeline_read(const char *folder, bool strict, dray__timeline **out, dray_error *error)
{
    dray__timeline *t = calloc(1, sizeof(*t));
    if (!t)
        return dray__nomem(error);
    t->begin_ns = INT64_MAX;
    t->end_ns = INT64_MIN;
    int rc = read_folder(t, folder, strict, error);
    if (!rc && t->begin_ns > t->end_ns)
        rc = dray__fail(error, DRAY_EFORMAT, "%s: expected spans, found none in %u files", folder,
                        t->process_count);
    if (!rc)
        rc = find_marks(t, error);
    if (rc)
        dray__timeline_free(t);
    else
        *out = t;
    return rc;
}

void dray__timeline_free(dray__timeline *timeline)
{
    if (!timeline)
        return;
    for (uint32_t i = 0; i < timeline->process_count; i++)
        free(timeline->processes[i].file);
    for (uint32_t i = 0; i < timeline->track_count; i++)
        free(timeline->tracks[i].spans);
    for (uint32_t i = 0; i < timeline->text_count; i++)
        free(timeline->texts[i]);
    free(timeline->processes);
    free(timeline->tracks);
    free(timeline->texts);
    free(timeline->commits.items);
    free(timeline->inserts.items);
    free(timeline->publications.items);
    free(timeline->ends);
    dray__map_free(&timeline->text_index);
    free(timeline);
}

uint32_t dray__tl_at(const dray__tl_track *track, int64_t ns)
{
    uint32_t low = 0, high = track->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (track->spans[middle].end_ns > ns)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

const dray__tl_end *dray__tl_step_end(const dray__timeline *timeline, int64_t step)
{
    const dray__tl_end key = {.step = step};
    return timeline->end_count ? bsearch(&key, timeline->ends, timeline->end_count,
                                         sizeof(*timeline->ends), by_step)
                               : NULL;
}
