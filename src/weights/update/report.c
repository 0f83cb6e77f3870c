/* The reports of an update: one JSON line, and the engine's steps beside it (steps.h). */
#include "base/array.h"
#include "base/error.h"
#include "base/json.h"
#include "weights/internal.h"
#include "weights/update/subscriber.h"

#include <stdlib.h>
#include <string.h>

static const char *name_of(const char *const *names, size_t count, int32_t index)
{
    return index >= 0 && (size_t)index < count ? names[index] : "?";
}

static double seconds(int64_t ns)
{
    return (double)ns * 1e-9;
}

static json_t *links(const dray_update_report *report)
{
    json_t *object = json_object();
    for (int link = 0; link < DRAY_LINK_COUNT; link++)
        if (report->link_bytes[link])
            dray__json_set(&object, dray_link_name((dray_link)link),
                           json_integer((json_int_t)report->link_bytes[link]));
    return object;
}

json_t *dray__report_object(const dray_update_report *report)
{
    static const char *const modes[] = {"auto", "tensor", "distributed", "disk"};
    static const char *const sources[] = {"publishers", "peers", "disk", "staging"};
    static const char *const strategies[] = {"direct", "bucket", "parameter"};
    return json_pack(
        "{s:I, s:I, s:s, s:s, s:I, s:I, s:o, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:I, "
        "s:I, s:b, s:I, s:I, s:I, s:I, s:I, s:s, s:I, s:f, s:s, s:f, s:I, s:f, s:f, s:I, s:f, "
        "s:I, s:I, s:I}",
        "version", (json_int_t)report->version, "incarnation", (json_int_t)report->incarnation,
        "mode", name_of(modes, 4, report->mode), "strategy",
        name_of(strategies, 3, report->strategy), "bytes", (json_int_t)report->bytes,
        "source_bytes", (json_int_t)report->source_bytes, "link_bytes", links(report), "copies",
        (json_int_t)report->copies, "wait_seconds", seconds(report->wait_ns), "plan_seconds",
        seconds(report->plan_ns), "prepare_seconds", seconds(report->prepare_ns), "move_seconds",
        seconds(report->move_ns), "verify_seconds", seconds(report->verify_ns), "commit_seconds",
        seconds(report->commit_ns), "total_seconds", seconds(report->total_ns), "bytes_per_s",
        report->bytes_per_s, "peak_extra_bytes", (json_int_t)report->peak_extra_bytes, "retries",
        (json_int_t)report->retries, "planned", report->planned != 0, "verified_tensors",
        (json_int_t)report->verified_tensors, "verified_bytes", (json_int_t)report->verified_bytes,
        "delta_covered_bytes", (json_int_t)report->delta_covered_bytes, "delta_bytes",
        (json_int_t)report->delta_bytes, "wire_bytes", (json_int_t)report->wire_bytes, "source",
        name_of(sources, 4, report->source), "fanned_bytes", (json_int_t)report->fanned_bytes,
        "held_seconds", seconds(report->held_ns), "held_by", report->held_by, "device_seconds",
        seconds(report->device_ns), "steps", (json_int_t)report->steps, "step_seconds",
        seconds(report->step_ns), "step_before_seconds", seconds(report->step_before_ns),
        "nccl_bytes", (json_int_t)report->nccl_bytes, "pause_seconds", seconds(report->pause_ns),
        "exchanged_bytes", (json_int_t)report->exchanged_bytes, "spare_bytes",
        (json_int_t)report->spare_bytes, "spare_waste_bytes",
        (json_int_t)report->spare_waste_bytes);
}

char *dray__report_text(json_t *object)
{
    char *text = object ? dray__json_text(object, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(object);
    return text;
}

int dray_update_report_json(const dray_update_report *given, char *out, size_t capacity,
                            dray_error *error)
{
    if (!given || !out)
        return dray__fail(error, DRAY_EINVALID, "report and out must be given");
    dray_update_report own = DRAY_UPDATE_REPORT_INIT, *report = &own;
    int rc = dray__options_read(report, sizeof *report, DRAY__REPORT_FIRST, given,
                                "dray_update_report", error);
    if (rc)
        return rc;
    char *text = dray__report_text(dray__report_object(report));
    if (!text)
        return dray__nomem(error);
    size_t size = strlen(text) + 1;
    if (size <= capacity)
        memcpy(out, text, size);
    else
        rc = dray__fail(error, DRAY_EFULL, "%zu bytes of report into %zu", size, capacity);
    free(text);
    return rc;
}

/* ---- steps ----------------------------------------------------------------------------------- */

void dray__steps_init(dray__steps *s)
{
    *s = (dray__steps){0};
    pthread_mutex_init(&s->lock, NULL);
}

void dray__steps_destroy(dray__steps *s)
{
    pthread_mutex_destroy(&s->lock);
}

void dray__steps_note(dray__steps *s, int64_t took_ns, int64_t now_ns)
{
    pthread_mutex_lock(&s->lock);
    if (s->moving && now_ns - took_ns / 2 >= s->began_ns) {
        s->count++;
        s->sum_ns += took_ns;
    } else {
        s->before[s->before_count++ % DRAY__STEPS_KEPT] = took_ns;
    }
    pthread_mutex_unlock(&s->lock);
}

void dray__steps_begin(dray__steps *s, int64_t now_ns)
{
    pthread_mutex_lock(&s->lock);
    s->moving = true;
    s->began_ns = now_ns;
    s->count = 0;
    s->sum_ns = 0;
    pthread_mutex_unlock(&s->lock);
}

/* Returns the median, because the first steps after a pause take longer. */
static int64_t usual(const dray__steps *s)
{
    int64_t sorted[DRAY__STEPS_KEPT];
    uint64_t count = s->before_count < DRAY__STEPS_KEPT ? s->before_count : DRAY__STEPS_KEPT;
    memcpy(sorted, s->before, sizeof sorted);
    qsort(sorted, count, sizeof *sorted, dray__by_i64);
    return count ? sorted[count / 2] : 0;
}

void dray__steps_end(dray__steps *s, dray_update_report *report)
{
    pthread_mutex_lock(&s->lock);
    s->moving = false;
    if (report) {
        report->steps = s->count;
        report->step_ns = s->count ? s->sum_ns / s->count : 0;
        report->step_before_ns = usual(s);
    }
    pthread_mutex_unlock(&s->lock);
}
