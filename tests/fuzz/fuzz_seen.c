/* What a run leaves, as dray trace, report, simulate and size read it. The first byte says which
 * file of a small run takes the rest's place:
 *
 *  0  spans of the trainer, whose sums are put right   1  the lengths of responses
 *  2  metrics.jsonl                                    3  events.jsonl          4  config.json
 *
 * Sums of what is read add up, paths have no holes, the page has the data that it is of, and what
 * is predicted is a number. */
#include "fuzz/fuzz.h"

#include "base/hash.h"
#include "base/json.h"
#include "run/job/settings.h"
#include "run/page/page.h"
#include "run/simulate/simulate.h"
#include "run/timeline/timeline.h"

#include <dray/trace.h>
#include <math.h>
#include <string.h>

const int fuzz_rounds = 60;

enum { STEPS = 5, BATCH = 8 };

static const char rows_text[] = "{\"step\":0,\"reward_mean\":0.5}\n"
                                "{\"step\":1,\"samples\":8,\"tokens\":40,\"step_seconds\":0.25,"
                                "\"staleness_tokens\":[40,2],\"time\":{\"engine\":"
                                "{\"processes\":1,\"busy\":0.1,\"wait\":{\"samples\":0.15}}},"
                                "\"ratio_max\":1.5,\"eval_accuracy\":0.25}\n";
static const char events_text[] =
    "{\"event\":\"engine_update\",\"role\":\"engine\",\"version\":1,\"bytes\":10,\"seconds\":0.1,"
    "\"pause_seconds\":0.1,"
    "\"at\":1000,\"step\":1}\n{\"event\":\"queue\",\"columns\":{\"prompt\":8},\"at\":2000,\"step\":"
    "1}\n"
    "{\"event\":\"restart\",\"message\":\"engine rank 0 was killed\",\"at\":3000,\"step\":1}\n";

static dray__job *job;

/* ---- a run ----------------------------------------------------------------------------------- */

static void span(int kind, int cause, const char *name, int64_t step, const char *partition,
                 const char *task, int64_t rows, int64_t tokens)
{
    if (kind == DRAY_SPAN_WAIT)
        dray_trace_wait((dray_wait_cause)cause, name, step);
    else
        dray_trace_enter((dray_span_kind)kind, name, step);
    if (partition)
        dray_trace_samples(partition, task, rows);
    if (tokens >= 0)
        dray_trace_worked(0, tokens);
    usleep(100);
    dray_trace_leave();
}

static void record(const char *file, const char *label, const char *task)
{
    char partition[32];
    MUST(dray_trace_open(file, label, NULL) == DRAY_OK);
    dray_trace_enter(DRAY_SPAN_BUSY, "loop", -1);
    bool trains = strcmp(task, "actor") == 0;
    for (int step = trains ? 0 : 1; step <= STEPS; step++) {
        snprintf(partition, sizeof partition, "step-%06d", step);
        if (step) {
            span(DRAY_SPAN_WAIT, DRAY_CAUSE_SAMPLES, "queue claim", -1, partition, task, BATCH, -1);
            span(DRAY_SPAN_BUSY, 0, task, step, NULL, NULL, 0, 40);
            span(DRAY_SPAN_WAIT, DRAY_CAUSE_CONTROLLER, "queue commit", -1, partition, task, BATCH,
                 -1);
        }
        span(DRAY_SPAN_TRANSFER, 0, trains ? "publish" : "take weights", step, NULL, NULL, 0, -1);
        span(DRAY_SPAN_WAIT, trains ? DRAY_CAUSE_READERS : DRAY_CAUSE_WEIGHTS, "wait", step, NULL,
             NULL, 0, -1);
    }
    dray_trace_leave();
    MUST(dray_trace_open(NULL, NULL, NULL) == DRAY_OK);
}

static void lengths(char *out, size_t size)
{
    size_t used = 0;
    for (int step = 1; step <= STEPS; step++)
        for (int slot = 0; slot < BATCH; slot++)
            used += (size_t)snprintf(out + used, size - used, "%d %d 5 %d %d000000 %d000000\n",
                                     step, slot, 1 + slot % 5, 10 * step, 10 * step + 5);
}

static const char *const names[] = {"trainer-0-1.spans", "engine-0-1.lengths", "metrics.jsonl",
                                    "events.jsonl", "config.json"};
enum { FILES = sizeof names / sizeof names[0] };

static void write_text(const char *name, const char *text)
{
    fuzz_write(fuzz_path(name), text, strlen(text));
}

static void make_run(void)
{
    char text[4096], path[192];
    if (!job) {
        static const char *const settings[] = {"rollout.prompts=2", "rollout.samples=4",
                                               "rollout.micro_batch=8", "warmup.max_steps=0"};
        write_text("job.yaml", "steps: 6\n");
        snprintf(path, sizeof path, "%s", fuzz_path("job.yaml"));
        MUST(dray__job_load(path, settings, 4, &job, NULL, NULL) == DRAY_OK);
    }
    snprintf(path, sizeof path, "%s", fuzz_path("engine-0-1.spans"));
    record(path, "engine 0", "rollout");
    snprintf(path, sizeof path, "%s", fuzz_path(names[0]));
    record(path, "trainer 0", "actor");
    lengths(text, sizeof text);
    write_text(names[1], text);
    write_text(names[2], rows_text);
    write_text(names[3], events_text);
    json_t *config = dray__settings_json(job);
    char *all = dray__json_text(config, JSON_COMPACT);
    MUST(all);
    write_text(names[4], all);
    free(all);
    json_decref(config);
}

/* ---- reading it ------------------------------------------------------------------------------ */

static void look_at_paths(const dray__timeline *t)
{
    for (uint32_t i = 0; i < t->end_count && i < 50; i++) {
        dray__tl_link *links;
        uint32_t count;
        MUST(dray__tl_path(t, t->ends[i].step, &links, &count, NULL) == DRAY_OK);
        for (uint32_t k = 0; k < count; k++) {
            MUST(links[k].end_ns > links[k].begin_ns && links[k].track < t->track_count);
            MUST(!k || links[k].begin_ns == links[k - 1].end_ns);
        }
        MUST(!count || links[count - 1].end_ns == t->ends[i].ns);
        free(links);
    }
}

static void look_at_timeline(const char *folder)
{
    dray__timeline *t;
    dray__tl_rank *ranks;
    dray__tl_bubble *bubbles;
    uint32_t count;
    char path[192];
    if (dray__timeline_read(folder, false, &t, NULL))
        return;
    MUST(dray__tl_account(t, t->begin_ns, t->end_ns, &ranks, &count, NULL) == DRAY_OK);
    for (uint32_t i = 0; i < count; i++)
        MUST(ranks[i].sums.seconds >= 0 && dray__tl_told(&ranks[i].sums) >= 0);
    free(ranks);
    MUST(dray__tl_bubbles(t, t->begin_ns, t->end_ns, 20, &bubbles, &count, NULL) == DRAY_OK);
    for (uint32_t i = 1; i < count; i++)
        MUST(bubbles[i].span.end_ns - bubbles[i].span.begin_ns <=
             bubbles[i - 1].span.end_ns - bubbles[i - 1].span.begin_ns);
    free(bubbles);
    look_at_paths(t);
    snprintf(path, sizeof path, "%s", fuzz_path("out.pftrace"));
    MUST(dray__tl_write_perfetto(t, path, NULL) == DRAY_OK);
    unlink(path);
    dray__timeline_free(t);
}

/* What stands between the page's tags is JSON. */
static void look_at_page(const char *folder)
{
    static const char tag[] = "type=\"application/json\">";
    char *text = NULL;
    size_t size = 0;
    json_t *data;
    FILE *out = open_memstream(&text, &size);
    MUST(out);
    int rc = dray__page_write(&folder, 1, false, out, NULL);
    MUST(fclose(out) == 0);
    if (!rc) {
        const char *begin = strstr(text, tag);
        MUST(begin && (begin += strlen(tag)));
        const char *end = strstr(begin, "</script>");
        MUST(end && dray__json_parse(begin, (size_t)(end - begin), "page", &data, NULL) == DRAY_OK);
        MUST(json_array_size(json_object_get(data, "runs")) == 1);
        json_decref(data);
    }
    free(text);
}

static void look_ahead(const char *folder)
{
    dray__services services;
    dray__simulated out;
    dray_error error = {0};
    if (dray__services_fit(folder, job, &services, &error)) {
        MUST(error.message[0]);
        return;
    }
    if (dray__simulate_once(job, &services, 6, 1, &out, &error) == DRAY_OK)
        MUST(isfinite(out.step_seconds) && isfinite(out.staleness_mean) && out.step_seconds >= 0);
    else
        MUST(error.message[0]);
    dray__services_free(&services);
}

static void put_right(uint8_t *file, size_t size)
{
    dray__reader r = dray__reader_of(file, size);
    uint32_t length;
    dray__get_bytes(&r, DRAY__SPANS_HEAD);
    while (!r.failed && r.size - r.at >= 16) {
        uint8_t *at = file + r.at;
        memcpy(&length, at + 4, 4);
        length = le32toh(length);
        if (length > r.size - r.at - 16)
            return;
        uint64_t sum = htole64(dray__hash(at + 16, length));
        memcpy(at + 8, &sum, 8);
        dray__get_bytes(&r, 16 + (size_t)length);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!size)
        return 0;
    if (!job || access(fuzz_path("engine-0-1.spans"), F_OK) < 0)
        make_run();
    const char *name = names[data[0] % FILES];
    char kept[256], given[192];
    snprintf(given, sizeof given, "%s", fuzz_path(name));
    snprintf(kept, sizeof kept, "%s.kept", given);
    MUST(rename(given, kept) == 0);
    uint8_t *copy = malloc(size);
    MUST(copy);
    memcpy(copy, data + 1, size - 1);
    if (data[0] % FILES == 0)
        put_right(copy, size - 1);
    fuzz_write(given, copy, size - 1);
    free(copy);
    look_at_timeline(fuzz_folder());
    look_at_page(fuzz_folder());
    look_ahead(fuzz_folder());
    MUST(rename(kept, given) == 0);
    return 0;
}

void fuzz_seeds(fuzz_put put, void *user)
{
    make_run();
    for (uint8_t i = 0; i < FILES; i++) {
        uint8_t text[1 << 16];
        dray__writer body = {0};
        FILE *file = fopen(fuzz_path(names[i]), "re");
        MUST(file);
        dray__put_bytes(&body, text, fread(text, 1, sizeof text, file));
        fclose(file);
        fuzz_put_kind(put, user, i, &body);
        dray__writer_free(&body);
    }
}
