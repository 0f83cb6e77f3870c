/* Finds the process that ended a wait. A wait has a cause, and the process that removed the cause
 * is found by its own spans: the commit of the claimed rows, the publication of the version, the
 * last read of an engine, the last rank that came. */
#include "run/job/tasks.h"
#include "run/timeline/timeline.h"

#include <string.h>

static const dray__tl_blame nobody = {.track = DRAY__TL_NONE};

static const dray__tl_span *span_of(const dray__timeline *t, const dray__tl_mark *mark)
{
    return &t->tracks[mark->track].spans[mark->span];
}

static dray__tl_blame blame_mark(const dray__tl_mark *mark)
{
    return (dray__tl_blame){.track = mark->track, .ns = mark->ns};
}

/* Returns how many of the marks are not after this moment. */
static uint32_t before(const dray__tl_marks *marks, int64_t ns)
{
    uint32_t low = 0, high = marks->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (marks->items[middle].ns <= ns)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* ---- samples --------------------------------------------------------------------------------- */

static bool has(const char *const *names, size_t most, const char *name)
{
    for (size_t i = 0; i < most && names[i]; i++)
        if (strcmp(names[i], name) == 0)
            return true;
    return false;
}

/* Returns true when the task `by` writes a column that `task` needs; also when either is the user's
 * own task. */
static bool feeds(const char *by, const char *task)
{
    const dray__task_kind *from = dray__task_find(by), *to = dray__task_find(task);
    if (!from || !to)
        return strcmp(by, task) != 0;
    for (size_t i = 0; i < sizeof(from->writes) / sizeof(from->writes[0]) && from->writes[i]; i++)
        if (has(to->needs, sizeof(to->needs) / sizeof(to->needs[0]), from->writes[i]))
            return true;
    return false;
}

/* Finds the last commit of rows of the partition that the task needs, or their insertion when it
 * needs prompts alone. A wait for a task itself ("queue wait") ends with its commits. */
static dray__tl_blame of_samples(const dray__timeline *t, const dray__tl_span *wait)
{
    const char *task = dray__tl_text(t, wait->task), *name = dray__tl_text(t, wait->name);
    bool itself = strcmp(name, "queue wait") == 0;
    if (wait->partition == DRAY__TL_NONE || !task[0])
        return nobody;
    for (uint32_t i = before(&t->commits, wait->end_ns); i--;) {
        const dray__tl_span *commit = span_of(t, &t->commits.items[i]);
        if (t->commits.items[i].ns < wait->begin_ns)
            break;
        const char *by = dray__tl_text(t, commit->task);
        if (commit->partition == wait->partition &&
            (itself ? commit->task == wait->task : feeds(by, task)))
            return blame_mark(&t->commits.items[i]);
    }
    for (uint32_t i = before(&t->inserts, wait->end_ns); i--;) {
        if (t->inserts.items[i].ns < wait->begin_ns)
            break;
        if (span_of(t, &t->inserts.items[i])->partition == wait->partition)
            return blame_mark(&t->inserts.items[i]);
    }
    return nobody;
}

/* ---- versions -------------------------------------------------------------------------------- */

static dray__tl_blame of_publication(const dray__timeline *t, const dray__tl_span *wait, bool step)
{
    for (uint32_t i = before(&t->publications, wait->end_ns); i--;) {
        const dray__tl_mark *mark = &t->publications.items[i];
        if (mark->ns < wait->begin_ns)
            break;
        if (!step || span_of(t, mark)->step == wait->step)
            return blame_mark(mark);
    }
    return nobody;
}

/* Returns the end of the track's last span before `ns` that is not a wait for this cause. */
static int64_t last_end(const dray__tl_track *track, int64_t ns, int cause)
{
    uint32_t i = dray__tl_at(track, ns);
    if (i < track->count && track->spans[i].begin_ns < ns &&
        !(track->spans[i].kind == DRAY_SPAN_WAIT && track->spans[i].cause == cause))
        return ns;
    while (i--)
        if (track->spans[i].kind != DRAY_SPAN_WAIT || track->spans[i].cause != cause)
            return track->spans[i].end_ns;
    return INT64_MIN;
}

/* Finds the process's own prefetch thread when the wait is for that, else the publisher. */
static dray__tl_blame of_weights(const dray__timeline *t, uint32_t track, const dray__tl_span *wait)
{
    const char *name = dray__tl_text(t, wait->name);
    if (strcmp(name, "wait for prefetch") != 0)
        return of_publication(t, wait, wait->step >= 0);
    for (uint32_t i = 0; i < t->track_count; i++)
        if (i != track && t->tracks[i].process == t->tracks[track].process &&
            strcmp(t->tracks[i].name, "prefetch") == 0) {
            int64_t ns = last_end(&t->tracks[i], wait->end_ns, -1);
            return ns > wait->begin_ns ? (dray__tl_blame){.track = i, .ns = ns} : nobody;
        }
    return nobody;
}

bool dray__tl_reads_weights(const dray__timeline *t, const dray__tl_span *span)
{
    /* the last three are those of dray.Subscriber */
    static const char *const names[] = {"copy weights",     "update weights", "prefetch weights",
                                        "swap weights",     "take weights",   "weights update",
                                        "weights prefetch", "weights commit"};
    return span->kind == DRAY_SPAN_TRANSFER &&
           has(names, sizeof(names) / sizeof(names[0]), dray__tl_text(t, span->name));
}

/* Finds the last reader of the weights. */
static dray__tl_blame of_readers(const dray__timeline *t, uint32_t track, const dray__tl_span *wait)
{
    dray__tl_blame found = {.track = DRAY__TL_NONE, .ns = wait->begin_ns};
    for (uint32_t i = 0; i < t->track_count; i++) {
        const dray__tl_track *other = &t->tracks[i];
        if (other->process == t->tracks[track].process)
            continue;
        for (uint32_t k = dray__tl_at(other, wait->begin_ns);
             k < other->count && other->spans[k].begin_ns < wait->end_ns; k++) {
            const dray__tl_span *s = &other->spans[k];
            int64_t end = s->end_ns < wait->end_ns ? s->end_ns : wait->end_ns;
            if (end > found.ns && dray__tl_reads_weights(t, s))
                found = (dray__tl_blame){.track = i, .ns = end};
        }
    }
    return found;
}

/* ---- others of the run ----------------------------------------------------------------------- */

/* Finds, among the processes that this one may have waited for, the one that was the last to do
 * anything but wait for the same cause. */
static dray__tl_blame of_last(const dray__timeline *t, uint32_t track, const dray__tl_span *wait,
                              bool same_instance)
{
    const dray__tl_process *own = &t->processes[t->tracks[track].process];
    dray__tl_blame found = {.track = DRAY__TL_NONE, .ns = wait->begin_ns};
    for (uint32_t i = 0; i < t->process_count; i++) {
        const dray__tl_process *p = &t->processes[i];
        bool same = strcmp(p->role, own->role) == 0 && p->instance == own->instance;
        if (p == own || p->track == DRAY__TL_NONE || same != same_instance)
            continue;
        int64_t ns = last_end(&t->tracks[p->track], wait->end_ns, wait->cause);
        if (!same_instance) { /* the process that had the device was computing */
            const dray__tl_track *other = &t->tracks[p->track];
            uint32_t k = dray__tl_at(other, wait->end_ns);
            while (k && (k == other->count || other->spans[k].begin_ns >= wait->end_ns ||
                         other->spans[k].kind == DRAY_SPAN_WAIT))
                k--;
            if (other->spans[k].kind == DRAY_SPAN_WAIT || other->spans[k].begin_ns >= wait->end_ns)
                continue; /* it has done nothing but wait until then, or was not there yet */
            ns = other->spans[k].end_ns < wait->end_ns ? other->spans[k].end_ns : wait->end_ns;
        }
        if (ns > found.ns)
            found = (dray__tl_blame){.track = p->track, .ns = ns};
    }
    return found;
}

/* Finds the last commit of a task that trains during the wait, because trained steps make room. */
static dray__tl_blame of_room(const dray__timeline *t, const dray__tl_span *wait)
{
    for (uint32_t i = before(&t->commits, wait->end_ns); i--;) {
        const dray__tl_mark *mark = &t->commits.items[i];
        if (mark->ns < wait->begin_ns)
            break;
        const dray__task_kind *kind = dray__task_find(dray__tl_text(t, span_of(t, mark)->task));
        if (kind && kind->trains)
            return blame_mark(mark);
    }
    return nobody;
}

dray__tl_blame dray__tl_blame_of(const dray__timeline *timeline, uint32_t track,
                                 const dray__tl_span *wait)
{
    switch (wait->cause) {
    case DRAY_CAUSE_SAMPLES:
        return of_samples(timeline, wait);
    case DRAY_CAUSE_ADMISSION:
        return of_publication(timeline, wait, false);
    case DRAY_CAUSE_WEIGHTS:
        return of_weights(timeline, track, wait);
    case DRAY_CAUSE_READERS:
        return of_readers(timeline, track, wait);
    case DRAY_CAUSE_RANKS:
        return of_last(timeline, track, wait, true);
    case DRAY_CAUSE_LEASE:
        return of_last(timeline, track, wait, false);
    case DRAY_CAUSE_CAPACITY:
        return of_room(timeline, wait);
    default: /* the coordinator, a tool or a restart, which are no process of the run's roles */
        return nobody;
    }
}
