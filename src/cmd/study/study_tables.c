#include "cmd/study/study.h"

#include "base/json.h"

#include "cmd/cmd.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { COLUMNS = 12, CELL = 200, CAUSES = 16 };

typedef enum form_kind { SHARE = 0, PERCENT, NUMBER } form_kind;

/* A column: a measure, or its difference from that of the first schedule. Columns without any value
 * are not shown. */
typedef struct column {
    const char *heading; /* %s is the base of the comparison */
    const char *measure;
    const char *part; /* NULL, "difference" or "ratio" */
    form_kind form;
} column;

typedef struct section {
    const char *title;
    column columns[COLUMNS];
} section;

static const section sections[] = {
    {"Held-out accuracy",
     {{"at the start", "accuracy_start", NULL, SHARE},
      {"at the end", "accuracy_end", NULL, SHARE},
      {"difference", "accuracy_end", "difference", SHARE},
      {"at equal samples", "accuracy_at_samples", NULL, SHARE},
      {"difference", "accuracy_at_samples", "difference", SHARE},
      {"at equal wall time", "accuracy_at_seconds", NULL, SHARE},
      {"difference", "accuracy_at_seconds", "difference", SHARE}}},
    {"To the accuracy",
     {{"steps", "steps_to_accuracy", NULL, NUMBER},
      {"ratio", "steps_to_accuracy", "ratio", NUMBER},
      {"seconds", "seconds_to_accuracy", NULL, NUMBER},
      {"ratio", "seconds_to_accuracy", "ratio", NUMBER}}},
    {"Samples",
     {{"length", "response_length_mean", NULL, NUMBER},
      {"staleness", "staleness_mean", NULL, NUMBER},
      {"most", "staleness_max", NULL, NUMBER},
      {"largest ratio", "ratio_max", NULL, NUMBER},
      {"clipped", "clip_fraction", NULL, PERCENT},
      {"truncated", "truncated_fraction", NULL, PERCENT},
      {"behaviour ratio", "behaviour_ratio_mean", NULL, NUMBER},
      {"largest", "behaviour_ratio_max", NULL, NUMBER},
      {"effective share", "behaviour_ratio_ess", NULL, PERCENT}}},
    {"Speed",
     {{"samples/s", "samples_per_s", NULL, NUMBER},
      {"ratio", "samples_per_s", "ratio", NUMBER},
      {"tokens/s", "tokens_per_s", NULL, NUMBER},
      {"seconds a step", "step_seconds", NULL, NUMBER},
      {"ratio", "step_seconds", "ratio", NUMBER}}},
};

/* ---- a table, as text or as HTML ------------------------------------------------------------- */

typedef struct sheet {
    bool html;
    FILE *out;
    const char *headings[COLUMNS + 4]; /* NULL at the end */
    cmd_table *table;                  /* for text */
    unsigned columns, at;
} sheet;

static void heading(sheet *s, const char *text)
{
    s->headings[s->columns++] = text;
}

static void begin(sheet *s, const char *title)
{
    if (!s->html) {
        fprintf(s->out, "\n%s\n", title);
        s->table = cmd_table_new(s->headings);
        return;
    }
    fputs("<h2>", s->out);
    cmd_study_escape(title, s->out);
    fputs("</h2>\n<table><tr>", s->out);
    for (unsigned i = 0; i < s->columns; i++) {
        fputs("<th>", s->out);
        cmd_study_escape(s->headings[i], s->out);
        fputs("</th>", s->out);
    }
    fputs("</tr>\n", s->out);
}

static void cell(sheet *s, const char *text)
{
    if (!s->html) {
        cmd_cell(s->table, "%s", text);
        return;
    }
    fputs(s->at % s->columns == 0 ? "<tr><td>" : "<td>", s->out);
    cmd_study_escape(text, s->out);
    fputs("</td>", s->out);
    if (++s->at % s->columns == 0)
        fputs("</tr>\n", s->out);
}

static void finish(sheet *s)
{
    if (s->html)
        fputs("</table>\n", s->out);
    else
        cmd_table_print(s->table, s->out);
}

/* ---- cells ----------------------------------------------------------------------------------- */

static const char *number_text(form_kind form, bool sign, double value, char out[48])
{
    if (form == PERCENT)
        snprintf(out, 48, "%.1f", 100 * value);
    else if (form == SHARE)
        snprintf(out, 48, sign ? "%+.3f" : "%.3f", value);
    else if (fabs(value) >= 1000)
        snprintf(out, 48, "%.0f", value);
    else
        snprintf(out, 48, sign ? "%+.3g" : "%.3g", value);
    return out;
}

/* Writes "0.981 [0.975, 0.990]"; without the interval when there is only one run. */
static void interval_text(const json_t *o, form_kind form, bool sign, char out[CELL])
{
    char mean[48], low[48], high[48];
    const char *unit = form == PERCENT ? " %" : "";
    if (!o) {
        snprintf(out, CELL, "-");
        return;
    }
    number_text(form, sign, dray__json_number(o, "mean"), mean);
    if (!json_is_number(json_object_get(o, "low"))) {
        snprintf(out, CELL, "%s%s", mean, unit);
        return;
    }
    number_text(form, sign, dray__json_number(o, "low"), low);
    number_text(form, sign, dray__json_number(o, "high"), high);
    snprintf(out, CELL, "%s [%s, %s]%s", mean, low, high, unit);
}

static const json_t *value_of(const json_t *schedule, const column *c)
{
    const json_t *o = json_object_get(json_object_get(schedule, "measures"), c->measure);
    return c->part ? json_object_get(o, c->part) : o;
}

static bool any_has(const json_t *schedules, const column *c)
{
    size_t i;
    json_t *schedule;
    json_array_foreach(schedules, i, schedule)
    {
        if (value_of(schedule, c))
            return true;
    }
    return false;
}

static const char *name_of(const json_t *schedule)
{
    return dray__json_string(schedule, "schedule");
}

/* ---- sections -------------------------------------------------------------------------------- */

static void print_section(const json_t *study, const section *part, const char *title, bool html,
                          FILE *out)
{
    const json_t *schedules = json_object_get(study, "schedules");
    const column *shown[COLUMNS];
    unsigned count = 0;
    sheet s = {.html = html, .out = out};
    heading(&s, "schedule");
    for (unsigned i = 0; i < COLUMNS && part->columns[i].heading; i++)
        if (any_has(schedules, &part->columns[i])) {
            shown[count++] = &part->columns[i];
            heading(&s, part->columns[i].heading);
        }
    if (!count)
        return;
    begin(&s, title);
    size_t k;
    json_t *schedule;
    json_array_foreach(schedules, k, schedule)
    {
        cell(&s, name_of(schedule));
        for (unsigned i = 0; i < count; i++) {
            char text[CELL];
            bool sign = shown[i]->part && strcmp(shown[i]->part, "difference") == 0;
            interval_text(value_of(schedule, shown[i]), shown[i]->form, sign, text);
            cell(&s, text);
        }
    }
    finish(&s);
}

static void print_runs(const json_t *study, bool html, FILE *out)
{
    static const char *const counts[] = {"done", "diverged", "failed", "reached"};
    char title[CELL];
    sheet s = {.html = html, .out = out};
    snprintf(title, sizeof(title), "Runs (reached: held-out accuracy %g)",
             dray__json_number(study, "accuracy"));
    heading(&s, "schedule");
    for (int i = 0; i < 4; i++)
        heading(&s, counts[i]);
    begin(&s, title);
    size_t k;
    json_t *schedule;
    json_array_foreach(json_object_get(study, "schedules"), k, schedule)
    {
        cell(&s, name_of(schedule));
        for (int i = 0; i < 4; i++) {
            char text[CELL];
            snprintf(text, sizeof(text), "%lld", dray__json_integer(schedule, counts[i]));
            cell(&s, text);
        }
    }
    finish(&s);
}

/* ---- where the time went --------------------------------------------------------------------- */

typedef struct cause {
    const char *name;
    double share;
} cause;

static int by_share(const void *a, const void *b)
{
    double x = ((const cause *)a)->share, y = ((const cause *)b)->share;
    return (x < y) - (x > y);
}

/* Writes the waits of half a percent or more: "wait for samples 21.3 %, wait for weights 3.0 %". */
static void causes_text(const json_t *measures, const char *role, char out[CELL])
{
    char prefix[CELL];
    int length = snprintf(prefix, sizeof(prefix), "idle.%s.", role), used = 0;
    cause causes[CAUSES] = {0};
    size_t count = 0;
    const char *key;
    json_t *o;
    json_object_foreach((json_t *)(uintptr_t)measures, key, o)
    {
        double share = dray__json_number(o, "mean");
        if (strncmp(key, prefix, (size_t)length) == 0 && share >= 0.005 && count < CAUSES)
            causes[count++] = (cause){key + length, share};
    }
    qsort(causes, count, sizeof(causes[0]), by_share);
    snprintf(out, CELL, "-");
    for (size_t i = 0; i < count && used < CELL - 1; i++)
        used += snprintf(out + used, (size_t)(CELL - used), "%s%s %.1f %%", i ? ", " : "",
                         causes[i].name, 100 * causes[i].share);
}

static void print_role(sheet *s, const json_t *schedule, const char *role)
{
    static const char *const parts[] = {"busy", "transfer", "idle", "unaccounted"};
    const json_t *measures = json_object_get(schedule, "measures");
    char key[CELL], text[CELL];
    cell(s, name_of(schedule));
    cell(s, role);
    for (int i = 0; i < 4; i++) {
        snprintf(key, sizeof(key), "%s.%s", parts[i], role);
        interval_text(json_object_get(measures, key), PERCENT, false, text);
        cell(s, text);
    }
    causes_text(measures, role, text);
    cell(s, text);
}

static void print_idle(const json_t *study, bool html, FILE *out)
{
    static const char *const headings[] = {"schedule", "role",        "busy",    "transfer",
                                           "idle",     "unaccounted", "idle for"};
    sheet s = {.html = html, .out = out};
    bool any = false;
    for (int i = 0; i < 7; i++)
        heading(&s, headings[i]);
    size_t k;
    json_t *schedule, *o;
    const char *key;
    json_array_foreach(json_object_get(study, "schedules"), k, schedule)
    {
        json_object_foreach(json_object_get(schedule, "measures"), key, o)
        {
            if (strncmp(key, "unaccounted.", 12) != 0)
                continue;
            if (!any)
                begin(&s, "Time of a process, by role (from step 2 on)");
            any = true;
            print_role(&s, schedule, key + 12);
        }
    }
    if (any)
        finish(&s);
}

static void print_problems(const json_t *study, bool html, FILE *out)
{
    size_t i, k;
    json_t *schedule, *run;
    static const char *const kinds[] = {"error", "diverged"}, *const words[] = {"failed",
                                                                                "diverged"};
    json_array_foreach(json_object_get(study, "schedules"), i, schedule)
    {
        json_array_foreach(json_object_get(schedule, "runs"), k, run)
        {
            for (int kind = 0; kind < 2; kind++) {
                const char *why = dray__json_string(run, kinds[kind]);
                if (!why)
                    continue;
                fprintf(out, html ? "<p>%s: " : "%s: ", words[kind]);
                char text[1024];
                snprintf(text, sizeof(text), "%s seed %lld: %s", name_of(schedule),
                         dray__json_integer(run, "seed"), why);
                if (html)
                    cmd_study_escape(text, out);
                else
                    fputs(text, out);
                fputs(html ? "</p>\n" : "\n", out);
            }
        }
    }
}

/* Writes "Held-out accuracy (equal samples: 102400; equal wall time: 31.2 s)". */
static void title_of(const json_t *study, const section *part, char out[CELL])
{
    double samples = dray__json_number(study, "samples"),
           seconds = dray__json_number(study, "seconds");
    if (part == &sections[0])
        snprintf(out, CELL, "%s (equal samples: %.0f; equal wall time: %s)", part->title, samples,
                 dray__say_seconds(seconds).s);
    else if (part == &sections[1])
        snprintf(out, CELL, "%s %g (of the runs that reached it)", part->title,
                 dray__json_number(study, "accuracy"));
    else
        snprintf(out, CELL, "%s", part->title);
}

void cmd_study_tables(const json_t *study, bool html, FILE *out)
{
    char title[CELL];
    print_runs(study, html, out);
    for (size_t i = 0; i < sizeof(sections) / sizeof(sections[0]); i++) {
        title_of(study, &sections[i], title);
        print_section(study, &sections[i], title, html, out);
    }
    print_idle(study, html, out);
    fputs(html ? "" : "\n", out);
    print_problems(study, html, out);
}
