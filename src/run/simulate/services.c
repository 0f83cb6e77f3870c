#include "base/array.h"
#include "base/error.h"
#include "base/io.h"
#include "base/json.h"
#include "run/job/settings.h"
#include "run/job/tasks.h"
#include "run/paths.h"
#include "run/simulate/simulate.h"
#include "run/timeline/timeline.h"

#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

const char *const dray__sim_names[DRAY__SIM_TASKS] = {"rollout",      "reward",    "reference",
                                                      "old_log_prob", "advantage", "actor"};

/* ---- least squares --------------------------------------------------------------------------- */

enum { FEATURES = 3 };

typedef struct sums {
    double xx[FEATURES][FEATURES], xy[FEATURES], y;
    uint32_t count;
} sums;

static void add_case(sums *s, const double x[FEATURES], double y)
{
    for (int i = 0; i < FEATURES; i++) {
        for (int k = 0; k < FEATURES; k++)
            s->xx[i][k] += x[i] * x[k];
        s->xy[i] += x[i] * y;
    }
    s->y += y;
    s->count++;
}

/* Solves for the features in `used`, by elimination. Returns false when the system is singular. */
static bool solve(const sums *s, unsigned used, double out[FEATURES])
{
    double a[FEATURES][FEATURES + 1];
    for (int i = 0; i < FEATURES; i++)
        for (int k = 0; k <= FEATURES; k++)
            a[i][k] = !(used >> i & 1) ? i == k
                      : k == FEATURES  ? s->xy[i]
                      : used >> k & 1  ? s->xx[i][k]
                                       : 0;
    for (int i = 0; i < FEATURES; i++) {
        double whole = used >> i & 1 ? s->xx[i][i] : 1;
        if (!(fabs(a[i][i]) > 1e-9 * whole))
            return false;
        for (int r = 0; r < FEATURES; r++)
            for (int k = FEATURES; r != i && k >= i; k--)
                a[r][k] -= a[r][i] / a[i][i] * a[i][k];
    }
    for (int i = 0; i < FEATURES; i++)
        out[i] = used >> i & 1 ? a[i][FEATURES] / a[i][i] : 0;
    return true;
}

static double error_of(const sums *s, const double w[FEATURES])
{
    double error = 0;
    for (int i = 0; i < FEATURES; i++) {
        error -= 2 * w[i] * s->xy[i];
        for (int k = 0; k < FEATURES; k++)
            error += w[i] * w[k] * s->xx[i][k];
    }
    return error;
}

/* Fits non-negative weights: of all sets of features that have only positive weights, the one with
 * the least error is taken. */
static void fit(const sums *s, double out[FEATURES])
{
    double best = DBL_MAX, w[FEATURES];
    memset(out, 0, FEATURES * sizeof(*out));
    for (unsigned used = 1; s->count && used < 1U << FEATURES; used++) {
        if (!solve(s, used, w) || w[0] < 0 || w[1] < 0 || w[2] < 0)
            continue;
        double error = error_of(s, w);
        if (error < best - 1e-12 * fabs(best)) {
            best = error;
            memcpy(out, w, sizeof(w));
        }
    }
}

/* ---- the job of a trace
 * -------------------------------------------------------------------------- */

/* The settings that determine samples and their cost. All others may differ. */
static const char *const sections[] = {"model",   "data",      "tool", "reward",
                                       "rewards", "reference", "clock"};
static const char *const keys[] = {"prompts", "samples", "temperature", "max_new_tokens"};

static int differ(const char *path, const char *key, const char *member, const json_t *is,
                  const json_t *other, dray_error *error)
{
    char *found = dray__json_text(other, JSON_ENCODE_ANY | JSON_COMPACT),
         *expected = dray__json_text(is, JSON_ENCODE_ANY | JSON_COMPACT);
    int rc = dray__fail(error, DRAY_EINVALID,
                        "%s: the trace is of another job: expected %s%s%s %.200s, found %.200s",
                        path, key, member ? "." : "", member ? member : "",
                        expected ? expected : "?", found ? found : "nothing");
    free(found);
    free(expected);
    return rc;
}

static bool equal(const json_t *a, const json_t *b)
{
    return json_equal(a, b) ||
           (json_is_number(a) && json_is_number(b) && json_number_value(a) == json_number_value(b));
}

static int check_section(const char *path, const char *key, const json_t *is, const json_t *other,
                         dray_error *error)
{
    const char *member;
    json_t *value;
    if (!json_is_object(is))
        return equal(is, other) ? DRAY_OK : differ(path, key, NULL, is, other, error);
    json_object_foreach((json_t *)(uintptr_t)is, member, value)
    {
        bool grain = strcmp(member, "micro_batch") == 0;
        if (!grain && !equal(value, json_object_get(other, member)))
            return differ(path, key, member, value, json_object_get(other, member), error);
    }
    return DRAY_OK;
}

static int check_job(const char *path, const json_t *config, const dray__job *job,
                     dray_error *error)
{
    json_t *is = dray__settings_json(job);
    int rc = is ? DRAY_OK : dray__nomem(error);
    for (size_t i = 0; i < sizeof(sections) / sizeof(sections[0]) && !rc; i++)
        rc = check_section(path, sections[i], json_object_get(is, sections[i]),
                           json_object_get(config, sections[i]), error);
    const json_t *rollout = json_object_get(is, "rollout"),
                 *other = json_object_get(config, "rollout");
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]) && !rc; i++)
        if (!equal(json_object_get(rollout, keys[i]), json_object_get(other, keys[i])))
            rc = differ(path, "rollout", keys[i], json_object_get(rollout, keys[i]),
                        json_object_get(other, keys[i]), error);
    int64_t piece = json_integer_value(json_object_get(other, "partial_tokens"));
    if (!rc && piece) /* only the time of the last piece of a response is recorded */
        rc = dray__fail(error, DRAY_EINVALID,
                        "%s: the trace does not say how long whole responses took: expected "
                        "rollout.partial_tokens 0, found %lld (run the job once without it)",
                        path, (long long)piece);
    json_decref(is);
    return rc;
}

/* ---- responses ------------------------------------------------------------------------------- */

typedef struct response {
    uint32_t engine, step, slot, prompt, tokens;
    int64_t began_ns, left_ns;
} response;

typedef struct responses {
    response *items;
    uint32_t count;
    uint64_t room;
} responses;

static int read_lengths(const char *path, uint32_t engine, responses *out, dray_error *error)
{
    FILE *file = dray__open_stream(path, "r");
    if (!file)
        return errno == ENOENT ? DRAY_OK : dray__fail_errno(error, errno, "%s", path);
    char line[256];
    int rc = DRAY_OK;
    for (int number = 1; !rc && fgets(line, sizeof(line), file); number++) {
        response r = {.engine = engine};
        int end = 0;
        int got = sscanf(
            line, "%" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNd64 " %" SCNd64 "%n",
            &r.step, &r.slot, &r.prompt, &r.tokens, &r.began_ns, &r.left_ns, &end);
        if (got != 6 || line[end] != '\n')
            rc = dray__fail(error, DRAY_EFORMAT,
                            "%s: line %d: the trace is truncated or damaged: expected step, place, "
                            "tokens of prompt and response, begin and end",
                            path, number);
        else if (r.left_ns <= r.began_ns || !r.tokens)
            rc =
                dray__fail(error, DRAY_EFORMAT,
                           "%s: line %d: expected a response with tokens and a time", path, number);
        else if (!DRAY__PUSH(out->items, out->count, out->room, r))
            rc = dray__nomem(error);
    }
    fclose(file);
    return rc;
}

static int by_group(const void *a, const void *b)
{
    const response *x = a, *y = b;
    if (x->step != y->step)
        return x->step < y->step ? -1 : 1;
    if (x->slot != y->slot)
        return x->slot < y->slot ? -1 : 1;
    return (x->left_ns > y->left_ns) - (x->left_ns < y->left_ns);
}

/* Drops all responses of a row but the last one. */
static void drop_repeated(responses *all)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < all->count; i++) {
        const response *next = i + 1 < all->count ? &all->items[i + 1] : NULL;
        if (!next || next->step != all->items[i].step || next->slot != all->items[i].slot)
            all->items[kept++] = all->items[i];
    }
    all->count = kept;
}

/* Takes whole groups of a step. Rows that were generated twice count once. */
static int take_groups(responses *all, uint32_t group, dray__services *out, dray_error *error)
{
    qsort(all->items, all->count, sizeof(*all->items), by_group);
    drop_repeated(all);
    out->group = group;
    out->lengths = calloc(all->count + (size_t)1, sizeof(*out->lengths));
    if (!out->lengths)
        return dray__nomem(error);
    for (uint32_t i = 0; i + group <= all->count;) {
        bool whole = all->items[i].slot % group == 0;
        for (uint32_t k = 1; k < group && whole; k++)
            whole = all->items[i + k].step == all->items[i].step &&
                    all->items[i + k].slot == all->items[i].slot + k;
        for (uint32_t k = 0; k < group && whole; k++)
            out->lengths[out->groups * group + k] = all->items[i + k].tokens;
        out->groups += whole;
        i += whole ? group : 1;
    }
    return DRAY_OK;
}

static int by_engine(const void *a, const void *b)
{
    const response *x = a, *y = b;
    if (x->engine != y->engine)
        return x->engine < y->engine ? -1 : 1;
    return (x->began_ns > y->began_ns) - (x->began_ns < y->began_ns);
}

/* Fits closed batches, which end with their longest response: seconds = a + b max + c sum. */
static void fit_closed(responses *all, dray__services *out)
{
    sums s = {0};
    double w[FEATURES];
    qsort(all->items, all->count, sizeof(*all->items), by_engine);
    for (uint32_t i = 0, end; i < all->count; i = end) {
        double most = 0, sum = 0;
        for (end = i; end < all->count && all->items[end].engine == all->items[i].engine &&
                      all->items[end].began_ns == all->items[i].began_ns;
             end++) {
            most = fmax(most, all->items[end].tokens);
            sum += all->items[end].tokens;
        }
        add_case(&s, (double[]){1, most, sum},
                 (double)(all->items[i].left_ns - all->items[i].began_ns) / 1e9);
    }
    fit(&s, w);
    out->tasks[DRAY__SIM_ROLLOUT].fixed = w[0];
    out->token_fixed = w[1];
    out->token_row = w[2];
}

/* Returns the number of rows under way during this one, on average over its time, and the number
 * that began meanwhile, because the engine works on the beginning and the end of each row
 * separately. */
static double beside(const responses *all, uint32_t i, double *began)
{
    const response *is = &all->items[i];
    double rows = 0, whole = (double)(is->left_ns - is->began_ns);
    *began = 0;
    for (uint32_t k = i < 512 ? 0 : i - 512; k < all->count && k < i + 512; k++) {
        const response *r = &all->items[k];
        int64_t from = r->began_ns > is->began_ns ? r->began_ns : is->began_ns,
                to = r->left_ns < is->left_ns ? r->left_ns : is->left_ns;
        if (r->engine == is->engine && to > from)
            rows += (double)(to - from) / whole;
        if (r->engine == is->engine && r->began_ns >= is->began_ns && r->began_ns < is->left_ns)
            ++*began;
    }
    return rows;
}

static void fit_continuous(responses *all, dray__services *out)
{
    sums s = {0};
    double w[FEATURES], began;
    qsort(all->items, all->count, sizeof(*all->items), by_engine);
    for (uint32_t i = 0; i < all->count; i++) {
        const response *r = &all->items[i];
        double rows = beside(all, i, &began);
        add_case(&s, (double[]){began, r->tokens, r->tokens * rows},
                 (double)(r->left_ns - r->began_ns) / 1e9);
    }
    fit(&s, w);
    out->tasks[DRAY__SIM_ROLLOUT].fixed = w[0];
    out->token_fixed = w[1];
    out->token_row = w[2];
}

/* ---- tasks ----------------------------------------------------------------------------------- */

/* The work between two commits of a rank 0, by task. */
typedef struct worked {
    sums tasks[DRAY__SIM_TASKS];
    double waits[DRAY__SIM_TASKS][DRAY__SIM_CAUSES], seconds[DRAY__SIM_TASKS];
    double overhead[DRAY__SIM_TASKS]; /* for rollout, the time around the generation */
    double ends, takes, prefetches;
    uint32_t end_count, take_count, prefetch_count;
} worked;

enum { CLAIM_MOST_NS = 600000 };

static bool is_any(const char *name, const char *const *names)
{
    while (*names && strcmp(*names, name) != 0)
        names++;
    return *names != NULL;
}

static int task_of(const char *name)
{
    for (int i = 0; i < DRAY__SIM_TASKS; i++)
        if (strcmp(dray__sim_names[i], name) == 0)
            return i;
    return -1;
}

typedef struct piece {
    double seconds, generating, waits[DRAY__SIM_CAUSES];
    int64_t tokens;
} piece;

static void end_piece(worked *w, piece *p, int task, int32_t rows)
{
    double took = p->seconds - p->generating;
    add_case(&w->tasks[task], (double[]){1, rows, p->tokens > 0 ? (double)p->tokens : 0},
             p->seconds);
    w->overhead[task] += took;
    w->seconds[task] += p->seconds;
    for (int c = 0; c < DRAY__SIM_CAUSES; c++)
        w->waits[task][c] += p->waits[c];
    *p = (piece){0};
}

/* Adds a wait to the work, if it belongs there: one for the coordinator, a tool or other ranks, or
 * one for samples that were ready, which is the claim's round trip. */
static void add_wait(piece *p, const dray__tl_span *s)
{
    bool own = s->cause == DRAY_CAUSE_CONTROLLER || s->cause == DRAY_CAUSE_TOOL ||
               s->cause == DRAY_CAUSE_RANKS;
    bool claim = s->cause == DRAY_CAUSE_SAMPLES && s->end_ns - s->begin_ns < CLAIM_MOST_NS;
    double seconds = (double)(s->end_ns - s->begin_ns) / 1e9;
    if (!own && !claim)
        return;
    p->seconds += seconds;
    if (s->cause < DRAY__SIM_CAUSES)
        p->waits[s->cause] += seconds;
}

static void walk(const dray__timeline *t, const dray__tl_track *track, worked *w)
{
    static const char *const ends[] = {"publish",     "weights publish", "optimiser",
                                       "coordinator", "checkpoint",      NULL},
                             *const takes[] = {"take weights",      "swap weights",
                                               "copy weights",      "update weights",
                                               "weights commit",    "weights update",
                                               "wait for prefetch", NULL};
    piece p = {0};
    double end = 0, take = 0;
    for (uint32_t i = 0; i < track->count; i++) {
        const dray__tl_span *s = &track->spans[i];
        const char *name = dray__tl_text(t, s->name);
        double seconds = (double)(s->end_ns - s->begin_ns) / 1e9;
        if (is_any(name, ends)) {
            end += seconds;
            continue;
        }
        if (is_any(name, takes) && s->kind != DRAY_SPAN_WAIT) {
            take += seconds;
            continue;
        }
        if (s->kind == DRAY_SPAN_WAIT)
            add_wait(&p, s);
        else
            p.seconds += seconds;
        if (strcmp(name, "rollout") == 0)
            p.generating += seconds;
        if (s->tokens > 0)
            p.tokens += s->tokens;
        if (strcmp(name, "queue commit") != 0 || s->rows <= 0)
            continue;
        int task = task_of(dray__tl_text(t, s->task));
        if (task < 0 || dray__tl_step(dray__tl_text(t, s->partition)) < 2) {
            p = (piece){0};
            end = take = 0;
            continue;
        }
        end_piece(w, &p, task, s->rows);
        if (end > 0) {
            w->ends += end;
            w->end_count++;
        }
        if (take > 0) {
            w->takes += take;
            w->take_count++;
        }
        end = take = 0;
    }
}

/* Measures prefetches. The built-in engine prefetches in a thread of that name, dray.Subscriber in
 * a span of its own. */
static void look_at_prefetches(const dray__timeline *t, worked *w)
{
    uint32_t python = dray__tl_find(t, "weights prefetch");
    for (uint32_t i = 0; i < t->track_count; i++) {
        bool own = strcmp(t->tracks[i].name, "prefetch") == 0;
        for (uint32_t k = 0; k < t->tracks[i].count; k++) {
            const dray__tl_span *s = &t->tracks[i].spans[k];
            if (s->kind == DRAY_SPAN_WAIT || s->step < 2 || s->name == DRAY__TL_NONE ||
                !(own || s->name == python))
                continue;
            w->prefetches += (double)(s->end_ns - s->begin_ns) / 1e9;
            w->prefetch_count += s->end_ns - s->begin_ns > 20000;
        }
    }
}

static double mean(double sum, uint32_t count)
{
    return count ? sum / count : 0;
}

/* Fits seconds = a + b tokens when that explains more than rows do. When all batches have the same
 * number of rows, long times are counted for each row, and short ones for the batch. */
static void settle(const worked *w, int task, dray__cost *out)
{
    const sums *s = &w->tasks[task];
    double whole[FEATURES];
    if (!s->count)
        return;
    double rows = s->xx[0][1] / s->count, took = s->y / s->count;
    fit(s, whole);
    *out = (dray__cost){.fixed = whole[0], .row = whole[1], .token = whole[2]};
    bool same_rows = s->xx[1][1] / s->count - rows * rows < 1e-9 * rows * rows;
    if (same_rows && out->fixed > 1e-3 && !(out->row > 0)) {
        out->row = out->fixed / rows;
        out->fixed = 0;
    }
    if (same_rows && took < 1e-3) {
        out->fixed = took;
        out->row = out->token = 0;
    }
    for (int c = 0; c < DRAY__SIM_CAUSES && w->seconds[task] > 0; c++)
        out->wait[c] = w->waits[task][c] / w->seconds[task];
}

/* Returns the time from the publication of a version to the insertion of the prompts that it
 * permits. */
static double insertion(const dray__timeline *t)
{
    double sum = 0;
    uint32_t count = 0;
    for (uint32_t i = 0, k = 0; i < t->inserts.count; i++) {
        const dray__tl_mark *in = &t->inserts.items[i];
        while (k + 1 < t->end_count && t->ends[k + 1].ns <= in->ns)
            k++;
        double after = t->end_count ? (double)(in->ns - t->ends[k].ns) / 1e9 : -1;
        if (t->ends[k].step >= 1 && after > 0 && after < 0.05) {
            sum += after;
            count++;
        }
    }
    return mean(sum, count);
}

static int fit_all(const dray__timeline *t, const json_t *config, responses *all,
                   dray__services *out, dray_error *error)
{
    worked w = {0};
    const char *batching = dray__json_string(json_object_get(config, "rollout"), "batching");
    for (uint32_t i = 0; i < t->process_count; i++)
        if (t->processes[i].rank == 0 && t->processes[i].track != DRAY__TL_NONE)
            walk(t, &t->tracks[t->processes[i].track], &w);
    look_at_prefetches(t, &w);
    for (int task = 0; task < DRAY__SIM_TASKS; task++)
        settle(&w, task, &out->tasks[task]);
    dray__cost around = out->tasks[DRAY__SIM_ROLLOUT];
    out->tasks[DRAY__SIM_ROLLOUT].row = out->tasks[DRAY__SIM_ROLLOUT].token = 0;
    if (batching && strcmp(batching, "continuous") == 0) {
        fit_continuous(all, out);
    } else { /* adds the time around the generation: reading, putting, claim and commit */
        fit_closed(all, out);
        out->tasks[DRAY__SIM_ROLLOUT].fixed +=
            mean(w.overhead[DRAY__SIM_ROLLOUT], w.tasks[DRAY__SIM_ROLLOUT].count);
    }
    memcpy(out->tasks[DRAY__SIM_ROLLOUT].wait, around.wait, sizeof(around.wait));
    out->step_end = mean(w.ends, w.end_count);
    out->take = mean(w.takes, w.take_count);
    out->prefetch = mean(w.prefetches, w.prefetch_count);
    out->insert = insertion(t);
    return w.tasks[DRAY__SIM_ACTOR].count
               ? DRAY_OK
               : dray__fail(error, DRAY_EFORMAT,
                            "%s: expected commits of the task actor in the trace, found none",
                            t->processes[0].file);
}

static int64_t ranks_of(const json_t *config, const char *task)
{
    size_t i, k;
    json_t *role, *has;
    json_array_foreach(json_object_get(config, "roles"), i, role)
    {
        json_array_foreach(json_object_get(role, "tasks"), k, has)
        {
            if (json_is_string(has) && strcmp(json_string_value(has), task) == 0)
                return dray__json_integer(role, "ranks");
        }
    }
    return 1;
}

static int read_responses(const dray__timeline *t, responses *all, dray_error *error)
{
    char path[PATH_MAX];
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < t->process_count && !rc; i++) {
        const char *spans = t->processes[i].file;
        snprintf(path, sizeof(path), "%.*s.lengths", (int)(strlen(spans) - strlen(".spans")),
                 spans);
        rc = read_lengths(path, i, all, error);
    }
    return rc;
}

/* Returns the seconds of a step after the third one, by the publication of versions. */
static double measured(const dray__timeline *t)
{
    uint32_t first = 0;
    while (first < t->end_count && t->ends[first].step < 3)
        first++;
    const dray__tl_end *from = t->ends + first, *to = t->ends + t->end_count - 1;
    return first + 1 < t->end_count && to->step > from->step
               ? (double)(to->ns - from->ns) / 1e9 / (double)(to->step - from->step)
               : 0;
}

/* Finds the run's folder; the user may have named its trace.json. */
static void find_run(const char *folder, char run[PATH_MAX])
{
    struct stat is;
    dray__path(run, PATH_MAX, "%s", folder);
    char *slash = strrchr(run, '/');
    if (stat(run, &is) == 0 && !S_ISDIR(is.st_mode))
        slash ? (void)(*slash = 0) : (void)strcpy(run, ".");
}

int dray__services_fit(const char *folder, const dray__job *job, dray__services *out,
                       dray_error *error)
{
    char path[PATH_MAX], run[PATH_MAX];
    json_t *config = NULL;
    dray__timeline *t = NULL;
    responses all = {0};
    find_run(folder, run);
    *out = (dray__services){0};
    dray__path(path, sizeof(path), "%s/config.json", run);
    int rc = dray__json_load(path, 1 << 24, &config, error);
    if (!rc)
        rc = check_job(path, config, job, error);
    if (!rc)
        rc = dray__timeline_read(run, true, &t, error);
    if (!rc && t->end_count < 4)
        rc = dray__fail(error, DRAY_EFORMAT,
                        "%s: the trace is too short, or truncated: expected three steps or more "
                        "whose versions were published, found %u",
                        folder, t->end_count ? t->end_count - 1 : 0);
    if (!rc)
        rc = read_responses(t, &all, error);
    if (!rc && !all.count)
        rc = dray__fail(error, DRAY_EFORMAT,
                        "%s: the trace has no tokens: expected the lengths of responses in "
                        "trace/*.lengths (dray_trace_response, role.claim), found none",
                        folder);
    if (!rc)
        rc = fit_all(t, config, &all, out, error);
    if (!rc)
        rc = take_groups(&all, (uint32_t)job->rollout.samples, out, error);
    if (!rc && !out->groups)
        rc = dray__fail(error, DRAY_EFORMAT,
                        "%s: expected whole groups of %lld responses in "
                        "trace/*.lengths, found none",
                        folder, (long long)job->rollout.samples);
    out->engine_ranks = ranks_of(config, "rollout");
    out->trainer_ranks = ranks_of(config, "actor");
    out->by_ranks = !job->clock.enabled; /* its sleeps do not depend on the ranks */
    out->measured = rc ? 0 : measured(t);
    free(all.items);
    json_decref(config);
    dray__timeline_free(t);
    if (rc)
        dray__services_free(out);
    return rc;
}

int dray__services_check(const char *folder, const dray__services *own, double *simulated,
                         dray_error *error)
{
    char run[PATH_MAX], path[PATH_MAX];
    dray__job *job = NULL;
    dray__prediction made;
    find_run(folder, run);
    dray__path(path, sizeof(path), "%s/config.yaml", run);
    int rc = own->measured > 0
                 ? dray__job_load(path, NULL, 0, &job, NULL, error)
                 : dray__fail(error, DRAY_ENOENT, "%s: expected five steps or more", folder);
    if (!rc)
        rc = dray__simulate(job, own, DRAY__SIM_RUNS, &made, error);
    if (!rc)
        *simulated = made.step_seconds.mean;
    dray__job_free(job);
    return rc;
}

static bool is_there(const dray__cost *c)
{
    return c->fixed + c->row + c->token > 0;
}

static double of_ranks(int64_t had, int64_t has)
{
    return had > 0 && has > 0 ? (double)had / (double)has : 1;
}

/* Returns the services of a run as they would be with the ranks of another one: work that is
 * divided among ranks takes the longer the fewer there are (loop.c). */
static dray__services with_ranks(const dray__services *one, const dray__services *as)
{
    dray__services made = *one;
    if (!one->by_ranks)
        return made;
    double engine = of_ranks(one->engine_ranks, as->engine_ranks),
           trainer = of_ranks(one->trainer_ranks, as->trainer_ranks);
    made.token_fixed *= engine;
    made.token_row *= engine;
    made.tasks[DRAY__SIM_ACTOR].row *= trainer;
    made.tasks[DRAY__SIM_ACTOR].token *= trainer;
    made.tasks[DRAY__SIM_OLD].row *= trainer;
    made.tasks[DRAY__SIM_OLD].token *= trainer;
    return made;
}

/* Averages services, as those of runs with the ranks of the first. For a task that not all traces
 * have, it is the mean of those that do. */
static void average(const dray__services *all, uint32_t count, dray__services *out)
{
    for (int task = 0; task < DRAY__SIM_TASKS; task++) {
        dray__cost *to = &out->tasks[task];
        double *sum = (double *)(void *)to;
        uint32_t there = 0;
        *to = (dray__cost){0};
        for (uint32_t i = 0; i < count; i++) {
            const dray__services is = with_ranks(&all[i], &all[0]);
            const double *one = (const double *)(const void *)&is.tasks[task];
            bool has = is_there(&all[i].tasks[task]);
            there += has;
            for (size_t k = 0; has && k < sizeof(*to) / sizeof(double); k++)
                sum[k] += one[k];
        }
        for (size_t k = 0; there && k < sizeof(*to) / sizeof(double); k++)
            sum[k] /= there;
    }
    static const size_t scalars[] = {
        offsetof(dray__services, token_fixed), offsetof(dray__services, token_row),
        offsetof(dray__services, step_end),    offsetof(dray__services, take),
        offsetof(dray__services, insert),      offsetof(dray__services, prefetch)};
    for (size_t k = 0; k < sizeof(scalars) / sizeof(scalars[0]); k++) {
        double sum = 0;
        uint32_t there = 0;
        for (uint32_t i = 0; i < count; i++) {
            const dray__services is = with_ranks(&all[i], &all[0]);
            double one;
            memcpy(&one, (const char *)&is + scalars[k], sizeof(one));
            sum += one;
            there += one > 0; /* nothing is prefetched in sync */
        }
        sum = there ? sum / there : 0;
        memcpy((char *)out + scalars[k], &sum, sizeof(sum));
    }
}

static int join_lengths(const dray__services *all, uint32_t count, dray__services *out,
                        dray_error *error)
{
    size_t groups = 0, at = 0;
    for (uint32_t i = 0; i < count; i++)
        groups += all[i].groups;
    out->lengths = calloc(groups * out->group, sizeof(*out->lengths));
    if (!out->lengths)
        return dray__nomem(error);
    for (uint32_t i = 0; i < count; i++) {
        size_t rows = (size_t)all[i].groups * out->group;
        memcpy(out->lengths + at, all[i].lengths, rows * sizeof(*out->lengths));
        at += rows;
    }
    out->groups = (uint32_t)groups;
    return DRAY_OK;
}

int dray__services_fit_all(const char *const *folders, uint32_t count, const dray__job *job,
                           dray__services *out, dray__services *each, dray_error *error)
{
    dray__services *all = calloc(count + (size_t)1, sizeof(*all));
    uint32_t made = 0;
    int rc = all ? DRAY_OK : dray__nomem(error);
    while (!rc && made < count) {
        rc = dray__services_fit(folders[made], job, &all[made], error);
        made += !rc;
    }
    if (!rc) {
        *out = all[0];
        average(all, count, out);
        rc = join_lengths(all, count, out, error);
    }
    for (uint32_t i = 0; i < made; i++) {
        if (!rc && each)
            each[i] = all[i];
        else
            dray__services_free(&all[i]);
    }
    free(all);
    return rc;
}

void dray__services_free(dray__services *services)
{
    free(services->lengths);
    services->lengths = NULL;
}
