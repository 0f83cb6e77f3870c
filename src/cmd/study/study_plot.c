/* The pictures and the page of a study: SVG written by hand, for a page that needs no other file.
 */
#include "cmd/study/study.h"

#include "base/json.h"

#include <math.h>
#include <string.h>

enum { WIDTH = 760, LEFT = 56, RIGHT = 20, TOP = 16, PLOT = 300, BELOW = 44, LINE = 20 };

/* Colours of Okabe and Ito ("Color Universal Design", 2008), which colour-blind readers can
 * distinguish; further lines are dashed. */
static const char *const colours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                      "#e69f00", "#56b4e9", "#000000", "#8c6d31"};
enum { COLOURS = sizeof(colours) / sizeof(colours[0]) };

void cmd_study_escape(const char *text, FILE *out)
{
    for (; *text; text++)
        switch (*text) {
        case '<':
            fputs("&lt;", out);
            break;
        case '>':
            fputs("&gt;", out);
            break;
        case '&':
            fputs("&amp;", out);
            break;
        case '"':
            fputs("&quot;", out);
            break;
        default:
            putc(*text, out);
        }
}

typedef struct frame {
    const json_t *schedules;
    const char *axis;
    double x_most, y_least, y_most;
} frame;

/* Returns an end of the point's interval, or the mean when there is only one run. */
static double end_of(const json_t *point, const char *key)
{
    const json_t *end = json_object_get(point, key);
    return json_is_number(end) ? json_number_value(end) : dray__json_number(point, "mean");
}

static const json_t *curve_of(const frame *f, size_t i)
{
    return json_object_get(json_object_get(json_array_get(f->schedules, i), "curves"), f->axis);
}

static void find_extent(frame *f)
{
    f->x_most = 0;
    f->y_least = INFINITY;
    f->y_most = -INFINITY;
    for (size_t i = 0; i < json_array_size(f->schedules); i++) {
        size_t k;
        json_t *point;
        json_array_foreach(curve_of(f, i), k, point)
        {
            f->x_most = fmax(f->x_most, dray__json_number(point, "x"));
            f->y_least = fmin(f->y_least, end_of(point, "low"));
            f->y_most = fmax(f->y_most, end_of(point, "high"));
        }
    }
    if (f->y_least > f->y_most) {
        f->y_least = 0;
        f->y_most = 1;
    }
    f->y_least = floor(f->y_least * 10 + 1e-9) / 10;
    f->y_most = ceil(f->y_most * 10 - 1e-9) / 10;
    if (f->y_most <= f->y_least)
        f->y_most = f->y_least + 0.1;
}

static double x_of(const frame *f, double x)
{
    return LEFT + (f->x_most > 0 ? x / f->x_most : 0) * (WIDTH - LEFT - RIGHT);
}

static double y_of(const frame *f, double y)
{
    return TOP + (f->y_most - y) / (f->y_most - f->y_least) * PLOT;
}

/* Returns the distance of ticks: 1, 2 or 5 times a power of ten, so that at most `most` of them
 * fill the range. */
static double tick(double range, double most)
{
    double least = range / most, power = pow(10, floor(log10(least)));
    double times = least / power;
    return power * (times <= 1 ? 1 : times <= 2 ? 2 : times <= 5 ? 5 : 10);
}

static void print_axes(const frame *f, FILE *out)
{
    double dx = f->x_most > 0 ? tick(f->x_most, 8) : 1, dy = tick(f->y_most - f->y_least, 6);
    int first = (int)ceil(f->y_least / dy - 1e-9), last = (int)floor(f->y_most / dy + 1e-9);
    for (int i = first; i <= last; i++)
        fprintf(out,
                "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/><text x=\"%d\" "
                "y=\"%.1f\" text-anchor=\"end\">%g</text>\n",
                LEFT, WIDTH - RIGHT, y_of(f, i * dy), y_of(f, i * dy), LEFT - 6,
                y_of(f, i * dy) + 4, round(i * dy * 1e6) / 1e6);
    last = f->x_most > 0 ? (int)floor(f->x_most / dx + 1e-9) : -1;
    for (int i = 0; i <= last; i++)
        fprintf(out,
                "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\" stroke=\"#999\"/><text "
                "x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.10g</text>\n",
                x_of(f, i * dx), x_of(f, i * dx), TOP + PLOT, TOP + PLOT + 5, x_of(f, i * dx),
                TOP + PLOT + 19, i * dx);
    fprintf(out, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s</text>\n",
            LEFT + (WIDTH - LEFT - RIGHT) / 2, TOP + PLOT + 38,
            strcmp(f->axis, "samples") == 0 ? "samples" : "seconds of training");
    fprintf(out,
            "<text transform=\"translate(14 %d) rotate(-90)\" text-anchor=\"middle\">held-out "
            "accuracy</text>\n",
            TOP + PLOT / 2);
}

static void print_band(const frame *f, const json_t *curve, const char *colour, FILE *out)
{
    size_t count = json_array_size(curve);
    fputs("<polygon points=\"", out);
    for (size_t k = 0; k < 2 * count; k++) {
        const json_t *point = json_array_get(curve, k < count ? k : 2 * count - 1 - k);
        fprintf(out, "%.1f,%.1f ", x_of(f, dray__json_number(point, "x")),
                y_of(f, end_of(point, k < count ? "high" : "low")));
    }
    /* Many bands lie over each other, so they are fainter then. */
    fprintf(out, "\" fill=\"%s\" fill-opacity=\"%.3f\"/>\n", colour,
            fmin(0.15, 0.6 / (double)json_array_size(f->schedules)));
}

static void print_line(const frame *f, const json_t *curve, const char *style, FILE *out)
{
    size_t k;
    json_t *point;
    fputs("<polyline points=\"", out);
    json_array_foreach(curve, k, point)
    {
        fprintf(out, "%.1f,%.1f ", x_of(f, dray__json_number(point, "x")),
                y_of(f, dray__json_number(point, "mean")));
    }
    fprintf(out, "\" fill=\"none\" %s/>\n", style);
}

static void print_schedule(const frame *f, size_t i, FILE *out)
{
    char style[96];
    int y = TOP + PLOT + BELOW + LINE * (int)i + LINE / 2;
    snprintf(style, sizeof(style), "stroke=\"%s\" stroke-width=\"2\"%s", colours[i % COLOURS],
             i / COLOURS % 2 ? " stroke-dasharray=\"6 4\"" : "");
    print_band(f, curve_of(f, i), colours[i % COLOURS], out);
    print_line(f, curve_of(f, i), style, out);
    fprintf(out, "<line x1=\"%d\" x2=\"%d\" y1=\"%d\" y2=\"%d\" %s/><text x=\"%d\" y=\"%d\">", LEFT,
            LEFT + 28, y, y, style, LEFT + 36, y + 4);
    cmd_study_escape(dray__json_string(json_array_get(f->schedules, i), "schedule"), out);
    fputs("</text>\n", out);
}

void cmd_study_plot(const json_t *study, bool by_seconds, FILE *out)
{
    frame f = {.schedules = json_object_get(study, "schedules"),
               .axis = by_seconds ? "seconds" : "samples"};
    size_t count = json_array_size(f.schedules);
    int height = TOP + PLOT + BELOW + LINE * (int)count + 8;
    find_extent(&f);
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" "
            "height=\"%d\" font-family=\"sans-serif\" font-size=\"13\">\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
            WIDTH, height, WIDTH, height);
    print_axes(&f, out);
    for (size_t i = 0; i < count; i++)
        print_schedule(&f, i, out);
    fputs("</svg>\n", out);
}

void cmd_study_page(const json_t *study, FILE *out)
{
    const json_t *schedules = json_object_get(study, "schedules");
    fputs("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>", out);
    cmd_study_escape(dray__json_string(study, "name"), out);
    fputs(
        "</title>\n<style>body{font:15px/1.5 sans-serif;max-width:100em;margin:2em auto;padding:0 "
        "1em;color:#222;background:#fff}table{border-collapse:collapse}th,td{padding:.25em .9em "
        ".25em 0;text-align:left;white-space:nowrap;border-bottom:1px solid "
        "#ddd;font-variant-numeric:tabular-nums}th{font-weight:600}h2{font-size:1.1em;margin-top:"
        "2em}svg{max-width:100%;height:auto}</style></head>\n<body><h1>",
        out);
    cmd_study_escape(dray__json_string(study, "name"), out);
    fprintf(out,
            "</h1>\n<p>%lld steps; seeds %lld to %lld. Means with %g %% bootstrap intervals; "
            "differences and ratios are those from the first schedule, by seed.%s</p>\n",
            dray__json_integer(study, "steps"), dray__json_integer(study, "first_seed"),
            (long long)(dray__json_integer(study, "first_seed") +
                        dray__json_integer(study, "seeds") - 1),
            100 * dray__json_number(study, "confidence"),
            dray__json_true(study, "complete")
                ? ""
                : " Not all runs are done: the figures are of those that are.");
    if (json_array_size(schedules)) {
        fputs("<h2>By samples</h2>\n", out);
        cmd_study_plot(study, false, out);
        fputs("<h2>By wall time</h2>\n", out);
        cmd_study_plot(study, true, out);
    }
    cmd_study_tables(study, true, out);
    fputs("</body></html>\n", out);
}
