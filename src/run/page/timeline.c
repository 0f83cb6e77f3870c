/* The timeline of a run in as few intervals as a page has room for. */
#include "run/timeline/timeline.h"
#include "base/array.h"
#include "base/error.h"
#include "base/json.h"
#include "run/page/page.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CLASSES = 64, BUBBLES = 40, ENDS = 4000 };

/* The class by which a moment is shown: a state, and for busy spans the name. */
typedef struct class
{
    int state;
    uint32_t name; /* NONE for waits */
} class;

typedef struct bytes {
    uint8_t *data;
    uint64_t room;
    uint32_t count;
    bool full;
} bytes;

typedef struct maker {
    const dray__timeline *t;
    class classes[CLASSES];
    uint32_t class_count;
    int64_t least_ns, unit_ns; /* intervals shorter than least_ns are joined */
    uint64_t intervals;
} maker;

static void put_byte(bytes *to, uint8_t value)
{
    to->full = to->full || !DRAY__PUSH(to->data, to->count, to->room, value);
}

static void put_varint(bytes *to, uint64_t value)
{
    for (; value >= 0x80; value >>= 7)
        put_byte(to, (uint8_t)(value | 0x80));
    put_byte(to, (uint8_t)value);
}

/* Returns the span's class. The last class is for everything that has no class of its own. */
static uint8_t class_of(maker *m, const dray__tl_span *s)
{
    int state = dray__state_of((dray_span_kind)s->kind, (dray_wait_cause)s->cause);
    uint32_t name = s->kind == DRAY_SPAN_WAIT ? DRAY__TL_NONE : s->name, i = 0;
    while (i < m->class_count && (m->classes[i].state != state || m->classes[i].name != name))
        i++;
    if (i == m->class_count && i == CLASSES)
        return CLASSES - 1;
    if (i == m->class_count)
        m->classes[m->class_count++] = (class){state, name};
    return (uint8_t)i;
}

/* One interval: its length, and the class that it has for most of the time. */
typedef struct interval {
    int64_t begin_ns, end_ns, by_class[CLASSES];
} interval;

/* Writes an interval: the time of its end in units, as the difference from the previous end, and
 * its class + 1, or 0 when nothing is known. */
static void end_interval(maker *m, interval *i, int64_t *told, bytes *out)
{
    if (i->end_ns <= i->begin_ns)
        return;
    int most = 0;
    for (int k = 1; k < CLASSES; k++)
        most = i->by_class[k] > i->by_class[most] ? k : most;
    int64_t from = (i->begin_ns - m->t->begin_ns) / m->unit_ns,
            to = (i->end_ns - m->t->begin_ns) / m->unit_ns;
    if (from > *told) {
        put_varint(out, (uint64_t)(from - *told));
        put_byte(out, 0);
        *told = from;
        m->intervals++;
    }
    if (to > *told) {
        put_varint(out, (uint64_t)(to - *told));
        put_byte(out, (uint8_t)(most + 1));
        *told = to;
        m->intervals++;
    }
}

static bool goes_on(const interval *i, uint8_t as)
{
    int64_t others = i->end_ns - i->begin_ns - i->by_class[as];
    return others == 0;
}

static void make_track(maker *m, const dray__tl_track *track, bytes *out)
{
    interval now = {0};
    int64_t told = 0;
    for (uint32_t k = 0; k < track->count; k++) {
        const dray__tl_span *s = &track->spans[k];
        uint8_t as = class_of(m, s);
        int64_t length = s->end_ns - s->begin_ns, had = now.end_ns - now.begin_ns;
        bool same = had > 0 && now.end_ns == s->begin_ns && goes_on(&now, as);
        bool apart = had > 0 && now.end_ns < s->begin_ns - m->least_ns;
        if (!same && (had >= m->least_ns || apart || (length >= m->least_ns && had > 0))) {
            end_interval(m, &now, &told, out);
            now = (interval){0};
            had = 0;
        }
        if (!had)
            now.begin_ns = now.end_ns = s->begin_ns;
        now.by_class[as] += length;
        now.end_ns = s->end_ns > now.end_ns ? s->end_ns : now.end_ns;
    }
    end_interval(m, &now, &told, out);
}

static json_t *tracks_of(maker *m)
{
    json_t *out = json_array();
    m->intervals = 0;
    for (uint32_t i = 0; i < m->t->process_count; i++) {
        const dray__tl_process *p = &m->t->processes[i];
        if (p->track == DRAY__TL_NONE)
            continue;
        bytes made = {0};
        make_track(m, &m->t->tracks[p->track], &made);
        json_t *data = made.full ? NULL : dray__page_bytes(made.data, made.count);
        dray__json_append(&out, json_pack("{s:s, s:s, s:i, s:i, s:o}", "label", p->label, "role",
                                          p->role, "instance", (int)p->instance, "rank",
                                          (int)p->rank, "data", data));
        free(made.data);
    }
    return out;
}

static json_t *classes_of(const maker *m)
{
    json_t *out = json_array();
    for (uint32_t i = 0; i < m->class_count; i++) {
        const class *c = &m->classes[i];
        const char *state = c->state == DRAY__STATE_BUSY ? "busy"
                            : c->state == DRAY__STATE_TRANSFER
                                ? "transfer"
                                : dray__cause_name((dray_wait_cause)(c->state - DRAY__STATE_WAIT));
        dray__json_append(&out, json_pack("[s, s]", state, dray__tl_text(m->t, c->name)));
    }
    return out;
}

static const char *label_of(const dray__timeline *t, uint32_t track)
{
    return track == DRAY__TL_NONE ? "" : t->processes[t->tracks[track].process].label;
}

static int add_bubbles(const dray__timeline *t, json_t **out, dray_error *error)
{
    dray__tl_bubble *list = NULL;
    uint32_t count = 0;
    int64_t from = t->begin_ns;
    /* Before the first steps' ends the run starts up. */
    for (uint32_t i = 0; i < t->end_count && i < 2; i++)
        from = t->ends[i].ns;
    int rc = dray__tl_bubbles(t, from, t->end_ns, BUBBLES, &list, &count, error);
    json_t *made = json_array();
    for (uint32_t i = 0; i < count; i++) {
        const dray__tl_bubble *b = &list[i];
        const char *doing = b->doing_kind == DRAY_SPAN_WAIT && b->doing != DRAY__TL_NONE
                                ? dray__cause_name((dray_wait_cause)b->doing_cause)
                                : dray__tl_text(t, b->doing);
        dray__json_append(&made,
                          json_pack("[s, f, f, s, s, s, s, b]", label_of(t, b->track),
                                    (double)(b->span.begin_ns - t->begin_ns) / 1e9,
                                    (double)(b->span.end_ns - b->span.begin_ns) / 1e9,
                                    dray__cause_name((dray_wait_cause)b->span.cause),
                                    label_of(t, b->by), doing, dray__tl_text(t, b->span.partition),
                                    b->doing_kind == DRAY_SPAN_WAIT));
    }
    free(list);
    dray__json_set(out, "bubbles", made);
    return rc;
}

static void add_ends(const dray__timeline *t, json_t **out)
{
    uint32_t stride = t->end_count / ENDS + 1, count = 0;
    double *steps = malloc((t->end_count + (size_t)1) * sizeof(*steps)),
           *at = malloc((t->end_count + (size_t)1) * sizeof(*at));
    for (uint32_t i = 0; i < t->end_count && steps && at; i += stride) {
        steps[count] = (double)t->ends[i].step;
        at[count++] = (double)(t->ends[i].ns - t->begin_ns) / 1e9;
    }
    dray__json_set(out, "end_steps", steps && at ? dray__page_floats(steps, count) : NULL);
    dray__json_set(out, "end_times", steps && at ? dray__page_floats(at, count) : NULL);
    dray__json_set(out, "ends", json_integer(count));
    free(steps);
    free(at);
}

int dray__page_timeline(const char *folder, uint32_t intervals, json_t **out, dray_error *error)
{
    char path[PATH_MAX];
    dray__timeline *t = NULL;
    *out = NULL;
    snprintf(path, sizeof(path), "%s/trace", folder);
    if (access(path, F_OK) < 0)
        return DRAY_OK;
    int rc = dray__timeline_read(folder, false, &t, error);
    if (rc == DRAY_ENOENT || rc == DRAY_EFORMAT) /* without spans the page has no timeline */
        return DRAY_OK;
    if (rc)
        return rc;
    maker m = {.t = t, .least_ns = 0, .unit_ns = 1000};
    json_t *tracks = tracks_of(&m), *made = json_object();
    while (m.intervals > intervals && tracks) {
        m.least_ns = m.least_ns ? m.least_ns * 2 : 20000;
        m.unit_ns = m.least_ns / 16 > 1000 ? m.least_ns / 16 : 1000;
        m.class_count = 0;
        json_decref(tracks);
        tracks = tracks_of(&m);
    }
    dray__json_set(&made, "seconds", json_real((double)(t->end_ns - t->begin_ns) / 1e9));
    dray__json_set(&made, "origin_ns", json_integer(t->begin_ns));
    dray__json_set(&made, "unit", json_real((double)m.unit_ns / 1e9));
    dray__json_set(&made, "least", json_real((double)m.least_ns / 1e9));
    dray__json_set(&made, "tracks", tracks);
    dray__json_set(&made, "classes", classes_of(&m));
    add_ends(t, &made);
    rc = add_bubbles(t, &made, error);
    dray__timeline_free(t);
    if (!rc && !made)
        rc = dray__nomem(error);
    if (rc)
        json_decref(made);
    else
        *out = made;
    return rc;
}
