#include "run/report/view.h"

#include "base/clock.h"
#include "base/json.h"
#include "run/report/units.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

void dray__view_open(dray__view *view, bool json)
{
    const char *term = getenv("TERM");
    *view =
        (dray__view){.json = json,
                     .live = !json && isatty(STDOUT_FILENO) && term && strcmp(term, "dumb") != 0,
                     .began_ns = dray__now()};
}

void dray__view_event(dray__view *view, const char *event, json_t *object)
{
    if (view->json && object) {
        json_t *line = json_pack("{s:s}", "event", event);
        if (line && json_object_update(line, object) == 0) {
            json_dumpf(line, stdout, JSON_COMPACT);
            fputc('\n', stdout);
            fflush(stdout);
        }
        json_decref(line);
    }
    json_decref(object);
}

void dray__view_clear(dray__view *view)
{
    if (view->lines)
        printf("\033[%uA\r\033[J", view->lines);
    view->lines = 0;
    fflush(stdout);
}

void dray__view_say(dray__view *view, const char *event, const char *message)
{
    if (view->json) {
        dray__view_event(view, event, json_pack("{s:s}", "message", message));
        return;
    }
    dray__view_clear(view);
    printf("%s\n", message);
    fflush(stdout);
}

/* ---- lines ----------------------------------------------------------------------------------- */

/* Returns whether the row is printed when there is no terminal: about 40 rows of a run, and every
 * evaluation. */
static bool worth_a_line(const dray__rows *rows, int64_t step, bool eval)
{
    int64_t every = rows->job->steps > 40 ? rows->job->steps / 40 : 1;
    return eval || step % every == 0;
}

void dray__view_row(dray__view *view, const dray__rows *rows, const json_t *row)
{
    const json_t *accuracy = json_object_get(row, "eval_accuracy");
    int64_t step = dray__json_integer(row, "step");
    char held[48] = "";
    if (view->json) {
        dray__view_event(view, "step", json_copy((json_t *)(uintptr_t)row));
        return;
    }
    if (json_is_number(accuracy))
        snprintf(held, sizeof(held), "  held-out %.3f", json_number_value(accuracy));
    if (view->live ? !held[0] : !worth_a_line(rows, step, held[0] != 0))
        return;
    dray__view_clear(view);
    printf("step %*lld/%lld  reward %.3f  length %.1f  %5.0f tokens/s",
           (int)(rows->job->steps > 999 ? 6 : 3), (long long)step, (long long)rows->job->steps,
           dray__json_number(row, "reward_mean"), dray__json_number(row, "response_length_mean"),
           dray__json_number(row, "tokens_per_s"));
    if (!view->live) /* the picture shows updates, and the line fits 80 columns without them */
        printf("  update %s", dray__say_seconds(dray__json_number(row, "update_seconds")).s);
    printf("%s\n", held);
    fflush(stdout);
}

/* ---- the picture ----------------------------------------------------------------------------- */

typedef struct canvas {
    char text[4096];
    size_t used;
    uint32_t lines, most; /* most is the terminal's height, because a higher picture could not be
                             redrawn in place */
    int width;
} canvas;

/* Adds a line, cut to the terminal's width so that it does not wrap. */
static __attribute__((format(printf, 2, 3))) void add_line(canvas *c, const char *format, ...)
{
    char line[512];
    va_list arguments;
    if (c->lines == c->most)
        return;
    va_start(arguments, format);
    vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    int n = snprintf(c->text + c->used, sizeof(c->text) - c->used, "%.*s\033[K\n", c->width, line);
    if (n > 0 && (size_t)n < sizeof(c->text) - c->used) {
        c->used += (size_t)n;
        c->lines++;
    }
}

enum { ITEMS_MAX = 32, LABEL_WIDTH = 20 };

/* Adds a label and its items, on as many lines as they need. */
static void add_items(canvas *c, const char *label, char (*items)[64], uint32_t count)
{
    char line[512];
    int used = snprintf(line, sizeof(line), "  %-18s", label);
    for (uint32_t i = 0; i < count; i++) {
        const char *comma = i + 1 < count ? "," : "";
        int length = (int)(strlen(items[i]) + strlen(comma));
        if (used > LABEL_WIDTH && (used + 1 + length > c->width || used + length > 400)) {
            add_line(c, "%s", line);
            used = snprintf(line, sizeof(line), "%*s", LABEL_WIDTH, "");
        }
        used += snprintf(line + used, sizeof(line) - (size_t)used, "%s%s%s",
                         used > LABEL_WIDTH ? " " : "", items[i], comma);
    }
    add_line(c, "%s", line);
}

static void add_bar(canvas *c, const dray__rows *rows, int64_t step)
{
    char bar[31];
    int64_t full = rows->job->steps ? 30 * step / rows->job->steps : 0;
    for (int i = 0; i < 30; i++)
        bar[i] = i < full ? '#' : '.';
    bar[30] = 0;
    double left = rows->step_seconds * (double)(rows->job->steps - step);
    add_line(c, "%s  step %lld of %lld  [%s]%s%s%s", rows->job->name, (long long)step,
             (long long)rows->job->steps, bar, left > 0 ? "  " : "",
             left > 0 ? dray__say_seconds(left).s : "", left > 0 ? " left" : "");
}

/* Returns a phase's place in the order in which samples go through phases; others come after. */
static uint32_t place_of(const char *phase)
{
    static const char *const order[] = {"rollout",   "reward", "reference", "old_log_prob",
                                        "advantage", "actor",  "optimiser", "publish",
                                        "eval",      "score",  "checkpoint"};
    uint32_t i = 0;
    while (i < sizeof(order) / sizeof(order[0]) && strcmp(order[i], phase) != 0)
        i++;
    return i;
}

static int by_place(const void *a, const void *b)
{
    const dray__phase *x = a, *y = b;
    uint32_t p = place_of(x->name), q = place_of(y->name);
    return p != q ? (p > q) - (p < q) : strcmp(x->name, y->name);
}

static void add_phases(canvas *c, const dray__rows *rows)
{
    char items[DRAY__PHASES][64];
    dray__phase sorted[DRAY__PHASES];
    if (!rows->shown_count)
        return;
    memcpy(sorted, rows->shown, sizeof(sorted));
    qsort(sorted, rows->shown_count, sizeof(sorted[0]), by_place);
    for (uint32_t i = 0; i < rows->shown_count; i++)
        snprintf(items[i], sizeof(items[i]), "%.23s %.31s", sorted[i].name,
                 dray__say_seconds(sorted[i].seconds).s);
    add_items(c, "seconds a step", items, rows->shown_count);
}

json_t *dray__view_depths(const json_t *status)
{
    json_t *sums = json_object(), *partition, *count;
    size_t i;
    const char *name;
    json_array_foreach(json_object_get(status, "partitions"), i, partition)
    {
        json_object_foreach(json_object_get(partition, "columns"), name, count)
        {
            json_int_t before = dray__json_integer(sums, name);
            json_object_set_new(sums, name, json_integer(before + json_integer_value(count)));
        }
    }
    return sums;
}

static void add_depths(canvas *c, const json_t *status)
{
    char items[ITEMS_MAX][64] = {"empty"};
    uint32_t used = 0;
    const char *name;
    json_t *sums = dray__view_depths(status), *count;
    json_object_foreach(sums, name, count)
    {
        if (json_integer_value(count) && used < ITEMS_MAX)
            snprintf(items[used++], sizeof(items[0]), "%.40s %lld", name,
                     (long long)json_integer_value(count));
    }
    json_decref(sums);
    add_items(c, "queue", items, used ? used : 1);
}

static void add_weights(canvas *c, const dray__rows *rows)
{
    double mean = rows->update_count ? (double)rows->update_bytes / (double)rows->update_count : 0;
    if (rows->version < 0) {
        add_line(c, "  weights           no version yet");
        return;
    }
    add_line(c, "  weights           engine at version %lld; %llu updates of %s, median %s",
             (long long)rows->version, (unsigned long long)rows->update_count,
             dray__say_bytes(mean).s, dray__say_seconds(dray__rows_median_update(rows)).s);
}

static void add_accuracy(canvas *c, const dray__rows *rows)
{
    if (rows->last_accuracy_step > rows->first_accuracy_step)
        add_line(c, "  held-out          %.3f at step %lld (%.3f at step %lld)",
                 rows->last_accuracy, (long long)rows->last_accuracy_step, rows->first_accuracy,
                 (long long)rows->first_accuracy_step);
    else if (rows->last_accuracy_step >= 0)
        add_line(c, "  held-out          %.3f at step %lld", rows->last_accuracy,
                 (long long)rows->last_accuracy_step);
}

void dray__view_draw(dray__view *view, const dray__rows *rows, const json_t *status)
{
    if (!view->live)
        return;
    struct winsize size = {0};
    canvas c = {.width = 79, .most = 23};
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 20 && size.ws_row > 1) {
        c.width = size.ws_col - 1;
        c.most = size.ws_row - 1U;
    }
    int64_t step = rows->last_step > 0 ? rows->last_step : 0;
    add_bar(&c, rows, step);
    if (!rows->ready)
        add_line(&c, "  warm-up           step %lld, reward %.3f of %.3f",
                 (long long)rows->warmup_step, rows->warmup_reward, rows->job->warmup.reward);
    else
        add_line(&c, "  reward            %.3f   length %.1f   %.0f tokens/s", rows->reward,
                 rows->length, rows->tokens_per_s);
    add_accuracy(&c, rows);
    add_weights(&c, rows);
    if (rows->ready)
        add_line(&c, "  staleness         mean %.2f, most %.0f", rows->staleness_mean,
                 rows->staleness_max);
    add_phases(&c, rows);
    add_depths(&c, status);
    if (rows->checkpoint >= 0)
        add_line(&c, "  checkpoint        step %lld", (long long)rows->checkpoint);
    if (view->lines)
        printf("\033[%uA\r", view->lines);
    fwrite(c.text, 1, c.used, stdout);
    if (c.lines < view->lines)
        printf("\033[J");
    fflush(stdout);
    view->lines = c.lines;
}
