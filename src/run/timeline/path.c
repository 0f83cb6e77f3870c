#include "base/array.h"
#include "base/error.h"
#include "run/timeline/timeline.h"

#include <stdlib.h>
#include <string.h>

/* ---- the critical path ----------------------------------------------------------------------- */

typedef struct walk {
    const dray__timeline *t;
    dray__tl_link *links;
    uint32_t count;
    uint64_t room;
    uint32_t turns; /* changes of the track since the last link */
    bool full;      /* out of memory */
} walk;

/* Adds a link. Links are added from the end backwards; adjacent pieces of one span are joined. */
static void add(walk *w, uint32_t track, const dray__tl_span *span, int64_t begin, int64_t end)
{
    if (end <= begin)
        return;
    dray__tl_link *last = w->count ? &w->links[w->count - 1] : NULL;
    uint8_t kind = span ? span->kind : DRAY_SPAN_WAIT,
            cause = span ? span->cause : DRAY_CAUSE_UNKNOWN;
    uint32_t name = span ? span->name : DRAY__TL_NONE;
    if (last && last->track == track && last->kind == kind && last->cause == cause &&
        last->name == name && last->begin_ns == end) {
        last->begin_ns = begin;
        return;
    }
    w->full = !DRAY__PUSH(w->links, w->count, w->room,
                          (dray__tl_link){.track = track,
                                          .name = name,
                                          .kind = kind,
                                          .cause = cause,
                                          .begin_ns = begin,
                                          .end_ns = end});
}

/* Goes back one span from `*ns`, on the track or, for a wait, on the track of the process that
 * ended it. */
static void back(walk *w, uint32_t *track, int64_t *ns, int64_t begin)
{
    const dray__tl_track *on = &w->t->tracks[*track];
    uint32_t i = dray__tl_at(on, *ns - 1);
    const dray__tl_span *span = i < on->count && on->spans[i].begin_ns < *ns ? &on->spans[i] : NULL;
    if (!span) { /* this moment is in no span */
        int64_t to = i ? on->spans[i - 1].end_ns : begin;
        to = to > begin ? to : begin;
        add(w, *track, NULL, to, *ns);
        *ns = to;
        return;
    }
    int64_t from = span->begin_ns > begin ? span->begin_ns : begin;
    dray__tl_blame by = {.track = DRAY__TL_NONE};
    dray__tl_span part = *span;
    part.end_ns = *ns;
    if (span->kind == DRAY_SPAN_WAIT)
        by = dray__tl_blame_of(w->t, *track, &part);
    /* Tracks that wait for each other at one moment would be gone round without an end. */
    w->turns = by.ns == *ns ? w->turns + 1 : 0;
    if (by.track == DRAY__TL_NONE || by.ns <= from || by.ns > *ns || by.track == *track ||
        w->turns > w->t->track_count) {
        add(w, *track, span, from, *ns);
        *ns = from;
        return;
    }
    add(w, *track, span, by.ns, *ns);
    *ns = by.ns;
    *track = by.track;
}

static void turn_round(walk *w)
{
    for (uint32_t i = 0; i < w->count / 2; i++) {
        dray__tl_link link = w->links[i];
        w->links[i] = w->links[w->count - 1 - i];
        w->links[w->count - 1 - i] = link;
    }
}

int dray__tl_path(const dray__timeline *timeline, int64_t step, dray__tl_link **out,
                  uint32_t *count, dray_error *error)
{
    walk w = {.t = timeline};
    const dray__tl_end *begin = dray__tl_step_end(timeline, step - 1),
                       *end = dray__tl_step_end(timeline, step);
    *out = NULL;
    *count = 0;
    if (!begin || !end)
        return DRAY_OK;
    uint32_t track = end->track;
    for (int64_t ns = end->ns; ns > begin->ns && !w.full;)
        back(&w, &track, &ns, begin->ns);
    if (w.full) {
        free(w.links);
        return dray__nomem(error);
    }
    turn_round(&w);
    *out = w.links;
    *count = w.count;
    return DRAY_OK;
}

/* ---- bubbles --------------------------------------------------------------------------------- */

/* The state that the track had for most of the time between two moments. */
static void look_at(const dray__timeline *t, uint32_t track, int64_t begin, int64_t end,
                    dray__tl_bubble *out)
{
    enum { NAMES = 32 };
    struct {
        uint32_t name;
        uint8_t kind, cause;
        int64_t ns;
    } seen[NAMES];
    uint32_t count = 0, most = 0;
    const dray__tl_track *on = &t->tracks[track];
    for (uint32_t i = dray__tl_at(on, begin); i < on->count && on->spans[i].begin_ns < end; i++) {
        const dray__tl_span *s = &on->spans[i];
        int64_t from = s->begin_ns > begin ? s->begin_ns : begin,
                to = s->end_ns < end ? s->end_ns : end;
        uint32_t k = 0;
        while (k < count && (seen[k].name != s->name || seen[k].kind != s->kind))
            k++;
        if (k == NAMES)
            continue;
        if (k == count) {
            seen[count].name = s->name;
            seen[count].kind = s->kind;
            seen[count].cause = s->cause;
            seen[count++].ns = 0;
        }
        seen[k].ns += to - from;
        most = seen[k].ns > seen[most].ns ? k : most;
    }
    out->doing = count ? seen[most].name : DRAY__TL_NONE;
    out->doing_kind = count ? seen[most].kind : 0;
    out->doing_cause = count ? seen[most].cause : 0;
}

static int64_t length(const dray__tl_bubble *bubble)
{
    return bubble->span.end_ns - bubble->span.begin_ns;
}

/* Inserts a bubble into the list, which is sorted with the longest first. */
static void keep(dray__tl_bubble *list, uint32_t *count, uint32_t most, const dray__tl_bubble *new)
{
    uint32_t at = *count;
    if (at == most && length(&list[at - 1]) >= length(new))
        return;
    if (at == most)
        at--;
    else
        (*count)++;
    for (; at && length(&list[at - 1]) < length(new); at--)
        list[at] = list[at - 1];
    list[at] = *new;
}

/* Returns whether the process publishes weights or reads them. */
static bool holds_weights(const dray__timeline *t, const dray__tl_process *p)
{
    for (uint32_t i = 0; i < t->publications.count; i++)
        if (t->publications.items[i].track == p->track)
            return true;
    const dray__tl_track *on = &t->tracks[p->track];
    for (uint32_t i = 0; i < on->count; i++)
        if (dray__tl_reads_weights(t, &on->spans[i]))
            return true;
    return false;
}

/* Returns whether the process works for more than a tenth of its time, or holds weights. Waits of
 * others, such as a grader, do not matter, and would hide those that do. */
static bool matters(const dray__timeline *t, const dray__tl_process *p)
{
    const dray__tl_track *on = &t->tracks[p->track];
    int64_t whole = on->spans[on->count - 1].end_ns - on->spans[0].begin_ns, busy = 0;
    for (uint32_t i = 0; i < on->count; i++)
        if (on->spans[i].kind != DRAY_SPAN_WAIT)
            busy += on->spans[i].end_ns - on->spans[i].begin_ns;
    return busy > whole / 10 || holds_weights(t, p);
}

int dray__tl_bubbles(const dray__timeline *timeline, int64_t begin_ns, int64_t end_ns,
                     uint32_t most, dray__tl_bubble **out, uint32_t *count, dray_error *error)
{
    dray__tl_bubble *list = calloc(most + (size_t)1, sizeof(*list));
    if (!list)
        return dray__nomem(error);
    *count = 0;
    bool any = false;
    for (uint32_t i = 0; i < timeline->process_count; i++)
        any = any || (timeline->processes[i].track != DRAY__TL_NONE &&
                      matters(timeline, &timeline->processes[i]));
    for (uint32_t i = 0; i < timeline->process_count && most; i++) {
        uint32_t track = timeline->processes[i].track;
        bool looked_at =
            track != DRAY__TL_NONE && (!any || matters(timeline, &timeline->processes[i]));
        const dray__tl_track *on = looked_at ? &timeline->tracks[track] : NULL;
        for (uint32_t k = on ? dray__tl_at(on, begin_ns) : 0;
             on && k < on->count && on->spans[k].begin_ns < end_ns; k++) {
            dray__tl_bubble made = {.track = track, .span = on->spans[k]};
            if (made.span.kind != DRAY_SPAN_WAIT)
                continue;
            made.span.begin_ns = made.span.begin_ns > begin_ns ? made.span.begin_ns : begin_ns;
            made.span.end_ns = made.span.end_ns < end_ns ? made.span.end_ns : end_ns;
            keep(list, count, most, &made);
        }
    }
    for (uint32_t i = 0; i < *count; i++) {
        dray__tl_blame by = dray__tl_blame_of(timeline, list[i].track, &list[i].span);
        list[i].by = by.track;
        list[i].doing = DRAY__TL_NONE;
        if (by.track != DRAY__TL_NONE)
            look_at(timeline, by.track, list[i].span.begin_ns, list[i].span.end_ns, &list[i]);
    }
    *out = list;
    return DRAY_OK;
}
