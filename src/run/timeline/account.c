#include "base/array.h"
#include "base/clock.h"
#include "base/error.h"
#include "run/timeline/timeline.h"

#include <stdlib.h>
#include <string.h>

static int64_t common(int64_t a, int64_t b, int64_t begin, int64_t end)
{
    int64_t from = a > begin ? a : begin, to = b < end ? b : end;
    return to > from ? to - from : 0;
}

static void add(dray__tl_sums *sums, int state, int64_t ns)
{
    sums->states[state] += (double)ns / (double)DRAY__SECOND;
}

static bool is_there(const dray__tl_process *p)
{
    return p->track != DRAY__TL_NONE || p->ended_ns;
}

/* Gets the bounds of a process: from its first span to its last one, or to its death. */
static void bounds(const dray__timeline *t, const dray__tl_process *p, int64_t *begin, int64_t *end)
{
    const dray__tl_track *track = p->track == DRAY__TL_NONE ? NULL : &t->tracks[p->track];
    *begin = track ? track->spans[0].begin_ns : p->first_ns;
    *end = p->ended_ns ? p->ended_ns : track ? track->spans[track->count - 1].end_ns : *begin;
}

/* Adds the time of a killed process after its last written spans. Only its account has that time,
 * by state but without moments. The part between the two moments counts. */
static void add_tail(const dray__timeline *t, const dray__tl_process *p, int64_t begin, int64_t end,
                     dray__tl_sums *sums)
{
    int64_t told[DRAY__STATES] = {0}, last = p->first_ns;
    const dray__tl_track *track = p->track == DRAY__TL_NONE ? NULL : &t->tracks[p->track];
    for (uint32_t i = 0; track && i < track->count; i++) {
        const dray__tl_span *s = &track->spans[i];
        told[dray__state_of((dray_span_kind)s->kind, (dray_wait_cause)s->cause)] +=
            s->end_ns - s->begin_ns;
        last = s->end_ns;
    }
    int64_t left = p->ended_ns - last, within = common(last, p->ended_ns, begin, end);
    for (int i = 0; i < DRAY__STATES && left > 0; i++)
        if (p->state_ns[i] > told[i])
            add(sums, i,
                (int64_t)((double)(p->state_ns[i] - told[i]) * (double)within / (double)left));
}

static void add_process(const dray__timeline *t, const dray__tl_process *p, int64_t begin,
                        int64_t end, dray__tl_sums *sums)
{
    const dray__tl_track *track = p->track == DRAY__TL_NONE ? NULL : &t->tracks[p->track];
    int64_t first, last;
    bounds(t, p, &first, &last);
    sums->seconds += (double)common(first, last, begin, end) / (double)DRAY__SECOND;
    for (uint32_t i = track ? dray__tl_at(track, begin) : 0;
         track && i < track->count && track->spans[i].begin_ns < end; i++) {
        const dray__tl_span *s = &track->spans[i];
        add(sums, dray__state_of((dray_span_kind)s->kind, (dray_wait_cause)s->cause),
            common(s->begin_ns, s->end_ns, begin, end));
    }
    if (p->ended_ns)
        add_tail(t, p, begin, end, sums);
}

static int by_time(const void *a, const void *b)
{
    const dray__tl_process *x = *(const dray__tl_process *const *)a,
                           *y = *(const dray__tl_process *const *)b;
    int order = strcmp(x->role, y->role);
    if (order)
        return order;
    if (x->instance != y->instance)
        return x->instance < y->instance ? -1 : 1;
    if (x->rank != y->rank)
        return x->rank < y->rank ? -1 : 1;
    return (x->first_ns > y->first_ns) - (x->first_ns < y->first_ns);
}

/* Adds the time between the death of one process and the first span of its successor. */
static void add_restart(const dray__timeline *t, const dray__tl_process *was,
                        const dray__tl_process *is, int64_t begin, int64_t end, dray__tl_sums *sums)
{
    int64_t first, died, starts, last;
    bounds(t, was, &first, &died);
    bounds(t, is, &starts, &last);
    int64_t ns = common(died, starts, begin, end);
    sums->seconds += (double)ns / (double)DRAY__SECOND;
    add(sums, DRAY__STATE_WAIT + DRAY_CAUSE_RESTART, ns);
}

int dray__tl_account(const dray__timeline *timeline, int64_t begin_ns, int64_t end_ns,
                     dray__tl_rank **out, uint32_t *count, dray_error *error)
{
    const dray__tl_process **order = calloc(timeline->process_count + (size_t)1, sizeof(*order));
    dray__tl_rank *ranks = calloc(timeline->process_count + (size_t)1, sizeof(*ranks));
    uint32_t there = 0, made = 0;
    if (!order || !ranks) {
        free(order);
        free(ranks);
        return dray__nomem(error);
    }
    for (uint32_t i = 0; i < timeline->process_count; i++)
        if (is_there(&timeline->processes[i]))
            order[there++] = &timeline->processes[i];
    qsort(order, there, sizeof(const dray__tl_process *), by_time);
    for (uint32_t i = 0; i < there; i++) {
        bool same = i && strcmp(order[i]->label, order[i - 1]->label) == 0;
        if (!same)
            ranks[made++].process = order[i];
        else
            add_restart(timeline, order[i - 1], order[i], begin_ns, end_ns, &ranks[made - 1].sums);
        ranks[made - 1].starts++;
        add_process(timeline, order[i], begin_ns, end_ns, &ranks[made - 1].sums);
    }
    free(order);
    *out = ranks;
    *count = made;
    return DRAY_OK;
}

double dray__tl_told(const dray__tl_sums *sums)
{
    double told = 0;
    for (int i = 0; i < DRAY__STATES; i++)
        told += sums->states[i];
    return told;
}
