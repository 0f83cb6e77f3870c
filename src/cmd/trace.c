/* dray trace: the time of a run by state, the spans that decided how long its steps took, and the
 * waits of processes for each other. */
#include "base/json.h"
#include "cmd/cmd.h"
#include "run/timeline/timeline.h"

#include <stdlib.h>
#include <string.h>

enum { BUBBLES = 10, WHERE = 128 };

typedef struct arguments {
    cmd_list folder;
    const char *perfetto;
    int64_t from, to, bubbles;
    bool json;
} arguments;

/* Spans of one kind and rank, over the critical paths of all steps. */
typedef struct on_path {
    uint32_t process, name;
    uint8_t kind, cause;
    double seconds;
} on_path;

typedef struct report {
    const arguments *a;
    dray__timeline *t;
    int64_t begin_ns, end_ns;
    dray__tl_rank *ranks;
    uint32_t rank_count;
    on_path *path;
    uint32_t path_count, steps;
    double path_seconds;
    dray__tl_bubble *bubbles;
    uint32_t bubble_count;
} report;

static double seconds(int64_t ns)
{
    return (double)ns / (double)CMD_SECOND;
}

/* Returns the seconds since the first span. */
static double at(const report *r, int64_t ns)
{
    return seconds(ns - r->t->begin_ns);
}

static const char *label_of(const report *r, uint32_t track)
{
    return track == DRAY__TL_NONE ? "" : r->t->processes[r->t->tracks[track].process].label;
}

/* Writes "rollout" or "wait for samples"; "untold" for time without a span. */
static const char *say(const report *r, uint32_t name, uint8_t kind, uint8_t cause, char out[WHERE])
{
    if (kind == DRAY_SPAN_WAIT && name != DRAY__TL_NONE)
        snprintf(out, WHERE, "wait: %s", dray__cause_name((dray_wait_cause)cause));
    else
        snprintf(out, WHERE, "%s", name == DRAY__TL_NONE ? "untold" : dray__tl_text(r->t, name));
    return out;
}

/* ---- looking --------------------------------------------------------------------------------- */

static int choose_time(report *r, dray_error *error)
{
    const dray__timeline *t = r->t;
    const arguments *a = r->a;
    r->begin_ns = t->begin_ns;
    r->end_ns = t->end_ns;
    const dray__tl_end *from = a->from > 0 ? dray__tl_step_end(t, a->from - 1) : NULL,
                       *to = a->to > 0 ? dray__tl_step_end(t, a->to) : NULL;
    int64_t missing = a->from > 0 && !from ? a->from - 1 : a->to > 0 && !to ? a->to : -1;
    if (missing >= 0)
        return cmd_error(error, DRAY_EINVALID,
                         "%s: expected steps whose versions were published, found none of step "
                         "%lld (there are %lld to %lld)",
                         a->folder.items[0], (long long)missing,
                         (long long)(t->end_count ? t->ends[0].step : 0),
                         (long long)(t->end_count ? t->ends[t->end_count - 1].step : 0));
    if (from)
        r->begin_ns = from->ns;
    if (to)
        r->end_ns = to->ns;
    return r->begin_ns < r->end_ns
               ? DRAY_OK
               : cmd_error(error, DRAY_EINVALID, "--from, --to: expected steps in their order");
}

static int add_link(report *r, const dray__tl_link *link, dray_error *error)
{
    uint32_t process = r->t->tracks[link->track].process, i = 0;
    double took = seconds(link->end_ns - link->begin_ns);
    bool wait = link->kind == DRAY_SPAN_WAIT;
    r->path_seconds += took;
    while (i < r->path_count &&
           (r->path[i].process != process || r->path[i].kind != link->kind ||
            (wait ? r->path[i].cause != link->cause : r->path[i].name != link->name)))
        i++;
    if (i == r->path_count) {
        on_path *path = reallocarray(r->path, i + (size_t)1, sizeof(*path));
        if (!path)
            return cmd_error(error, DRAY_ENOMEM, "out of memory");
        r->path = path;
        path[r->path_count++] = (on_path){process, link->name, link->kind, link->cause, 0};
    }
    r->path[i].seconds += took;
    return DRAY_OK;
}

static void print_step(const report *r, const dray__tl_end *end, const dray__tl_link *links,
                       uint32_t count)
{
    json_t *list = json_array();
    char what[WHERE];
    for (uint32_t i = 0; i < count; i++)
        dray__json_append(
            &list, json_pack("{s:s, s:s, s:f, s:f}", "process", label_of(r, links[i].track), "what",
                             say(r, links[i].name, links[i].kind, links[i].cause, what), "at",
                             at(r, links[i].begin_ns), "seconds",
                             seconds(links[i].end_ns - links[i].begin_ns)));
    cmd_json_line(json_pack("{s:s, s:I, s:f, s:f, s:o}", "event", "step", "step",
                            (json_int_t)end->step, "end", at(r, end->ns), "seconds",
                            seconds(end->ns - links[0].begin_ns), "path", list));
}

static int by_seconds(const void *a, const void *b)
{
    const on_path *x = a, *y = b;
    return (x->seconds < y->seconds) - (x->seconds > y->seconds);
}

static int look_at_steps(report *r, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < r->t->end_count && !rc; i++) {
        dray__tl_link *links = NULL;
        uint32_t count = 0;
        const dray__tl_end *end = &r->t->ends[i];
        if (end->ns <= r->begin_ns || end->ns > r->end_ns)
            continue;
        rc = dray__tl_path(r->t, end->step, &links, &count, error);
        for (uint32_t k = 0; k < count && !rc; k++)
            rc = add_link(r, &links[k], error);
        r->steps += count > 0;
        if (!rc && count && r->a->json)
            print_step(r, end, links, count);
        free(links);
    }
    if (r->path_count)
        qsort(r->path, r->path_count, sizeof(*r->path), by_seconds);
    return rc;
}

/* ---- printing -------------------------------------------------------------------------------- */

static json_t *sums_of(const dray__tl_sums *sums)
{
    json_t *waits = json_object();
    for (int cause = 0; cause < DRAY__WAIT_CAUSES; cause++)
        if (sums->states[DRAY__STATE_WAIT + cause] > 0)
            dray__json_set(&waits, dray__cause_name((dray_wait_cause)cause),
                           json_real(sums->states[DRAY__STATE_WAIT + cause]));
    return json_pack("{s:f, s:f, s:f, s:f, s:o}", "seconds", sums->seconds, "told",
                     dray__tl_told(sums), "busy", sums->states[DRAY__STATE_BUSY], "transfer",
                     sums->states[DRAY__STATE_TRANSFER], "wait", waits);
}

static void print_json(const report *r)
{
    char what[WHERE];
    for (uint32_t i = 0; i < r->rank_count; i++) {
        const dray__tl_process *p = r->ranks[i].process;
        json_t *line = json_pack("{s:s, s:s, s:s, s:i, s:i, s:i}", "event", "process", "process",
                                 p->label, "role", p->role, "instance", (int)p->instance, "rank",
                                 (int)p->rank, "starts", (int)r->ranks[i].starts);
        json_t *sums = sums_of(&r->ranks[i].sums);
        if (!line || !sums || json_object_update(line, sums) < 0)
            line = NULL;
        json_decref(sums);
        cmd_json_line(line);
    }
    for (uint32_t i = 0; i < r->path_count; i++)
        cmd_json_line(json_pack("{s:s, s:s, s:s, s:f, s:f}", "event", "critical_path", "process",
                                r->t->processes[r->path[i].process].label, "what",
                                say(r, r->path[i].name, r->path[i].kind, r->path[i].cause, what),
                                "seconds", r->path[i].seconds, "share",
                                r->path[i].seconds / r->path_seconds));
    for (uint32_t i = 0; i < r->bubble_count; i++) {
        const dray__tl_bubble *b = &r->bubbles[i];
        const char *by = label_of(r, b->by), *partition = dray__tl_text(r->t, b->span.partition);
        bool known = b->by != DRAY__TL_NONE;
        cmd_json_line(json_pack(
            "{s:s, s:s, s:s, s:f, s:f, s:s?, s:s?, s:s?}", "event", "bubble", "process",
            label_of(r, b->track), "cause", dray__cause_name((dray_wait_cause)b->span.cause), "at",
            at(r, b->span.begin_ns), "seconds", seconds(b->span.end_ns - b->span.begin_ns),
            "partition", partition[0] ? partition : NULL, "by", known ? by : NULL, "doing",
            known ? say(r, b->doing, b->doing_kind, b->doing_cause, what) : NULL));
    }
    cmd_json_line(json_pack("{s:s, s:s, s:f, s:i, s:i}", "event", "end", "folder",
                            r->a->folder.items[0], "seconds", seconds(r->end_ns - r->begin_ns),
                            "steps", (int)r->steps, "processes", (int)r->rank_count));
}

static double share(double part, double whole)
{
    return whole > 0 ? 100 * part / whole : 0;
}

/* Writes "samples 12.3, weights 0.4": percent of the rank's time, the longest first. */
static void say_waits(const dray__tl_sums *sums, char *out, size_t capacity)
{
    bool told[DRAY__WAIT_CAUSES] = {false};
    size_t used = 0;
    out[0] = 0;
    for (int n = 0; n < DRAY__WAIT_CAUSES; n++) {
        int most = -1;
        for (int cause = 0; cause < DRAY__WAIT_CAUSES; cause++)
            if (!told[cause] && (most < 0 || sums->states[DRAY__STATE_WAIT + cause] >
                                                 sums->states[DRAY__STATE_WAIT + most]))
                most = cause;
        double part = share(sums->states[DRAY__STATE_WAIT + most], sums->seconds);
        if (part < 0.05 || used + 32 > capacity)
            return;
        told[most] = true;
        used += (size_t)snprintf(out + used, capacity - used, "%s%s %.1f", used ? ", " : "",
                                 dray__cause_name((dray_wait_cause)most), part);
    }
}

static void print_ranks(const report *r)
{
    static const char *const headings[] = {"process",    ">seconds", ">busy %", ">transfer %",
                                           ">waiting %", ">told %",  "for (%)", NULL};
    cmd_table *table = cmd_table_new(headings);
    for (uint32_t i = 0; i < r->rank_count; i++) {
        const dray__tl_sums *s = &r->ranks[i].sums;
        char waits[256];
        double busy = s->states[DRAY__STATE_BUSY], transfer = s->states[DRAY__STATE_TRANSFER],
               told = dray__tl_told(s);
        say_waits(s, waits, sizeof(waits));
        cmd_cell(table, "%s", r->ranks[i].process->label);
        cmd_cell(table, "%.2f", s->seconds);
        cmd_cell(table, "%.1f", share(busy, s->seconds));
        cmd_cell(table, "%.1f", share(transfer, s->seconds));
        cmd_cell(table, "%.1f", share(told - busy - transfer, s->seconds));
        cmd_cell(table, "%.1f", share(told, s->seconds));
        cmd_cell(table, "%s", waits);
    }
    cmd_table_print(table, stdout);
}

static void print_path(const report *r)
{
    static const char *const headings[] = {"process", "what", ">seconds a step", ">%", NULL};
    char what[WHERE];
    printf("\nCritical path of %u steps: what decided how long they took\n", r->steps);
    cmd_table *table = cmd_table_new(headings);
    for (uint32_t i = 0; i < r->path_count; i++) {
        double part = share(r->path[i].seconds, r->path_seconds);
        if (part < 0.1)
            break;
        cmd_cell(table, "%s", r->t->processes[r->path[i].process].label);
        cmd_cell(table, "%s", say(r, r->path[i].name, r->path[i].kind, r->path[i].cause, what));
        cmd_cell(table, "%.4f", r->path[i].seconds / r->steps);
        cmd_cell(table, "%.1f", part);
    }
    cmd_table_print(table, stdout);
}

static void print_bubbles(const report *r)
{
    static const char *const headings[] = {">at s", ">seconds",     "process", "waits for",
                                           "of",    "which was at", "",        NULL};
    char what[WHERE];
    printf("\nThe longest waits\n");
    cmd_table *table = cmd_table_new(headings);
    for (uint32_t i = 0; i < r->bubble_count; i++) {
        const dray__tl_bubble *b = &r->bubbles[i];
        cmd_cell(table, "%.3f", at(r, b->span.begin_ns));
        cmd_cell(table, "%.3f", seconds(b->span.end_ns - b->span.begin_ns));
        cmd_cell(table, "%s", label_of(r, b->track));
        cmd_cell(table, "%s", dray__cause_name((dray_wait_cause)b->span.cause));
        cmd_cell(table, "%s", label_of(r, b->by));
        cmd_cell(table, "%s",
                 b->by == DRAY__TL_NONE ? ""
                                        : say(r, b->doing, b->doing_kind, b->doing_cause, what));
        cmd_cell(table, "%s", dray__tl_text(r->t, b->span.partition));
    }
    cmd_table_print(table, stdout);
}

static void print_text(const report *r)
{
    printf("%s: %s, %u steps, from the first span to the last\n\n", r->a->folder.items[0],
           dray__say_seconds(seconds(r->end_ns - r->begin_ns)).s, r->steps);
    print_ranks(r);
    if (r->steps)
        print_path(r);
    if (r->bubble_count)
        print_bubbles(r);
}

static int look(report *r, dray_error *error)
{
    const arguments *a = r->a;
    int rc = dray__timeline_read(a->folder.items[0], false, &r->t, error);
    if (!rc)
        rc = choose_time(r, error);
    if (!rc && a->perfetto)
        rc = dray__tl_write_perfetto(r->t, a->perfetto, error);
    if (!rc)
        rc = dray__tl_account(r->t, r->begin_ns, r->end_ns, &r->ranks, &r->rank_count, error);
    if (!rc)
        rc = look_at_steps(r, error);
    if (!rc)
        rc = dray__tl_bubbles(r->t, r->begin_ns, r->end_ns, (uint32_t)a->bubbles, &r->bubbles,
                              &r->bubble_count, error);
    return rc;
}

int cmd_trace(int argc, char **argv)
{
    static const cmd_option options[] = {
        CMD_JSON(arguments, json),
        CMD_NUMBER(arguments, from, "from", 'f', 1, INT32_MAX, "STEP",
                   "Look at this step and those after it. Default: from the first span on"),
        CMD_NUMBER(arguments, to, "to", 't', 1, INT32_MAX, "STEP",
                   "Look at this step and those before it. Default: to the last span"),
        CMD_NUMBER(arguments, bubbles, "bubbles", 'b', 0, 1000, "N",
                   "How many of the longest waits to list. Default: 10"),
        CMD_TEXT(arguments, perfetto, "perfetto", 'p', "FILE",
                 "Also write the timeline as Perfetto's protobuf, which its tools read"),
        CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .arguments = "DIR",
        .words = "a run's folder",
        .words_at = offsetof(arguments, folder),
        .least = 1,
        .most = 1,
        .doc = "Says where the time of a run went: busy, transfer and waits by cause of every "
               "process, the critical path of its steps, and the longest waits with who waited for "
               "whom.\vDIR is the folder of a run, of one that is running or was killed, too. What "
               "is told is busy, transfer and waits together: 100 % where every moment of a "
               "process has its span."};
    arguments a = {.bubbles = BUBBLES};
    cmd_parse(&usage, argc, argv, &a);
    report r = {.a = &a};
    dray_error error;
    json_t *folder = json_string(a.folder.items[0]); /* NULL when it is no UTF-8 */
    int rc = a.json && !folder ? cmd_error(&error, DRAY_EINVALID,
                                           "%s: --json needs a path of UTF-8", a.folder.items[0])
                               : look(&r, &error);
    json_decref(folder);
    if (!rc && a.json)
        print_json(&r);
    else if (!rc)
        print_text(&r);
    free(r.ranks);
    free(r.path);
    free(r.bubbles);
    dray__timeline_free(r.t);
    return rc ? cmd_refuse("trace", &error) : CMD_OK;
}
