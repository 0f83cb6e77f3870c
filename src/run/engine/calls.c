#include "run/engine/calls.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/random.h"
#include "engine/tokenizer.h"
#include "run/engine/tool.h"
#include "run/fault.h"

#include <stdlib.h>
#include <string.h>

#define STEP_NS                                                                                    \
    (DRAY__MILLISECOND) /* the time that a step of the sampler counts in `ordered` mode \  */
#define WAIT_NS (100 * DRAY__MILLISECOND)
#define TOGETHER INT64_MAX /* due when no row can go on without an answer */

/* The first number of a row's stream that neither its tokens nor the clock job use. */
#define FIRST_DRAW (UINT64_C(2) << 20)

/* The known part of a row, by slot. */
typedef struct sample {
    int32_t *prompt, *response; /* response is the part that is known; NULL when the slot is free */
    uint64_t prompt_count, count;
    uint64_t taken; /* number of tokens that were taken from the sampler */
    uint64_t stream, turns;
    uint64_t begun, begun_turns; /* count and turns when the row was added */
    bool waits, came_waiting;
    uint32_t id;    /* of its call, on rank 0 */
    int64_t due_ns; /* by the clock of steps */
} sample;

/* The answers that rows get now, as rank 0 broadcasts them. */
typedef struct news {
    uint32_t rows, go; /* go: a step of the sampler follows */
} news;

struct dray__calls {
    dray__host *host;
    dray__sampler *sampler;
    dray__tool *tool; /* rank 0's */
    bool ordered;
    int64_t now_ns; /* the clock of steps */
    sample *samples;
    uint32_t slots, waiting;
    bool again;   /* rows may be restarted, and then repeat all of their calls */
    sample *kept; /* calls that rows may repeat, the oldest first */
    uint32_t kept_count, room_kept;
    uint32_t *ids, id_count; /* numbers of calls that are free */
    /* for `news`: the slots, the number of tokens that each gets, and the tokens */
    uint32_t *due, *counts;
    int32_t *tokens;
    uint64_t room; /* tokens of a response */
};

/* ---- opening --------------------------------------------------------------------------------- */

int dray__calls_open(dray__host *host, dray__sampler *sampler, uint32_t slots, bool ordered,
                     dray__calls **out, dray_error *error)
{
    dray__calls *self = calloc(1, sizeof(*self));
    if (!self)
        return dray__nomem(error);
    *self = (dray__calls){.host = host, .sampler = sampler, .ordered = ordered, .slots = slots};
    self->room = (uint64_t)host->job->rollout.max_new_tokens;
    self->samples = calloc((size_t)slots + 1, sizeof(*self->samples));
    self->again = !ordered && host->job->update == DRAY__UPDATE_ANEW;
    self->room_kept = slots * (self->again ? (uint32_t)host->job->tool.turns + 1 : 1);
    uint32_t ids = slots + self->room_kept;
    self->kept = calloc((size_t)self->room_kept + 1, sizeof(*self->kept));
    self->ids = calloc((size_t)ids + 1, sizeof(*self->ids));
    self->due = calloc((size_t)slots + 1, sizeof(*self->due));
    self->counts = calloc((size_t)slots + 1, sizeof(*self->counts));
    self->tokens = calloc(slots * self->room + 1, sizeof(*self->tokens));
    bool whole =
        self->samples && self->kept && self->ids && self->due && self->counts && self->tokens;
    while (whole && self->id_count < ids) {
        self->ids[self->id_count] = self->id_count;
        self->id_count++;
    }
    int rc = whole ? DRAY_OK : dray__nomem(error);
    if (!rc && dray__host_leads(host))
        rc = dray__tool_open(&host->job->tool, ids, &self->tool, error);
    if (rc)
        dray__calls_close(self);
    else
        *out = self;
    return rc;
}

static void sample_free(sample *s)
{
    free(s->prompt);
    free(s->response);
    *s = (sample){0};
}

void dray__calls_close(dray__calls *self)
{
    if (!self)
        return;
    for (uint32_t i = 0; self->samples && i < self->slots; i++)
        sample_free(&self->samples[i]);
    for (uint32_t i = 0; i < self->kept_count; i++)
        sample_free(&self->kept[i]);
    dray__tool_close(self->tool);
    free(self->samples);
    free(self->kept);
    free(self->ids);
    free(self->due);
    free(self->counts);
    free(self->tokens);
    free(self);
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* Finds out whether the tokens end with a call. The last tokens decide this, as many as the call
 * has bytes. */
static int ends_with_call(const dray__job *job, const dray__tokenizer *tokenizer,
                          const int32_t *tokens, uint64_t count, bool *out, dray_error *error)
{
    uint64_t bytes = strlen(job->tool.call), last = count < bytes ? count : bytes;
    char *text;
    int rc = dray__prompt_text(tokenizer, tokens + count - last, last, &text, error);
    if (rc)
        return rc;
    *out = dray__tool_called(&job->tool, text);
    free(text);
    return DRAY_OK;
}

static double draw_seconds(const dray__calls *self, const sample *s)
{
    const dray__job_tool *tool = &self->host->job->tool;
    return tool->min_seconds +
           (tool->max_seconds - tool->min_seconds) *
               dray__random_unit((uint64_t)self->host->job->seed, s->stream, FIRST_DRAW + s->turns);
}

static void forget(dray__calls *self, const sample *s)
{
    dray__tool_forget(self->tool, s->id);
    self->ids[self->id_count++] = s->id;
}

static void kept_free(dray__calls *self, uint32_t i)
{
    sample_free(&self->kept[i]);
    memmove(self->kept + i, self->kept + i + 1, (--self->kept_count - i) * sizeof(*self->kept));
}

static int32_t *copy_of(const int32_t *tokens, uint64_t count)
{
    int32_t *copy = malloc((count + 1) * sizeof(*copy));
    return copy && count ? memcpy(copy, tokens, count * sizeof(*copy)) : copy;
}

/* Keeps the row's call, because the row may repeat it and then gets the same answer. */
static void keep(dray__calls *self, const sample *s)
{
    if (self->kept_count == self->room_kept) {
        forget(self, &self->kept[0]);
        kept_free(self, 0);
    }
    sample *k = &self->kept[self->kept_count];
    *k = *s;
    k->prompt = copy_of(s->prompt, s->prompt_count);
    k->response = copy_of(s->response, s->count);
    if (!k->prompt || !k->response) {
        sample_free(k);
        forget(self, s);
        return;
    }
    dray__tool_set_aside(self->tool, s->id, true);
    self->kept_count++;
}

/* Drops the calls that the row made before it was added, because it will not repeat them. */
static void drop_kept(dray__calls *self, uint64_t stream)
{
    for (uint32_t i = self->kept_count; i-- > 0;)
        if (self->kept[i].stream == stream) {
            forget(self, &self->kept[i]);
            kept_free(self, i);
        }
}

static bool is_same(const sample *a, const sample *b)
{
    return a->stream == b->stream && a->prompt_count == b->prompt_count && a->count == b->count &&
           memcmp(a->prompt, b->prompt, a->prompt_count * sizeof(*a->prompt)) == 0 &&
           memcmp(a->response, b->response, a->count * sizeof(*a->response)) == 0;
}

/* Continues the call that the row made before it was cut or restarted. Returns false when there is
 * none. */
static bool take_up(dray__calls *self, sample *s)
{
    uint32_t i = 0;
    while (i < self->kept_count && !is_same(&self->kept[i], s))
        i++;
    if (i == self->kept_count)
        return false;
    s->id = self->kept[i].id;
    dray__tool_set_aside(self->tool, s->id, false);
    kept_free(self, i);
    return true;
}

static int ask(dray__calls *self, sample *s, double seconds, dray_error *error)
{
    char *prompt = NULL, *response = NULL;
    int rc = dray__prompt_text(self->host->tokenizer, s->prompt, s->prompt_count, &prompt, error);
    if (!rc)
        rc = dray__prompt_text(self->host->tokenizer, s->response, s->count, &response, error);
    s->id = self->ids[--self->id_count];
    if (!rc)
        rc = dray__tool_ask(self->tool, s->id, prompt, response, seconds, error);
    free(prompt);
    free(response);
    return rc;
}

/* Makes the row wait if its newest token ends a call. */
static int call_if_due(dray__calls *self, uint32_t slot, dray_error *error)
{
    sample *s = &self->samples[slot];
    const dray__job *job = self->host->job;
    bool called = false;
    if (!s->count || s->turns == (uint64_t)job->tool.turns ||
        dray__sampler_look(self->sampler, slot).finish != DRAY__FINISH_NOT_YET)
        return DRAY_OK;
    int rc = ends_with_call(job, self->host->tokenizer, s->response, s->count, &called, error);
    if (rc || !called)
        return rc;
    double seconds = draw_seconds(self, s);
    s->waits = true;
    s->due_ns = job->tool.max_seconds > 0 ? self->now_ns + (int64_t)(seconds * (double)DRAY__SECOND)
                                          : TOGETHER;
    self->waiting++;
    dray__sampler_hold(self->sampler, slot);
    return self->tool && !take_up(self, s) ? ask(self, s, seconds, error) : DRAY_OK;
}

/* ---- rows come and go ------------------------------------------------------------------------ */

static int sit(dray__calls *self, const dray__sampler_rows *rows, uint32_t row, const int32_t *mask,
               uint32_t slot, dray_error *error)
{
    sample *s = &self->samples[slot];
    const dray__tokens *prompt = &rows->rows.prompt, *response = &rows->rows.response;
    uint64_t at = prompt->offsets[row], begun = response->offsets ? response->offsets[row] : 0;
    *s = (sample){.stream = rows->streams[row], .prompt_count = prompt->offsets[row + 1] - at};
    s->count = s->begun = response->offsets ? response->offsets[row + 1] - begun : 0;
    s->prompt = malloc(s->prompt_count * sizeof(*s->prompt));
    s->response = malloc(self->room * sizeof(*s->response));
    if (!s->prompt || !s->response) {
        sample_free(s);
        return dray__nomem(error);
    }
    memcpy(s->prompt, prompt->values + at, s->prompt_count * sizeof(*s->prompt));
    if (!s->count)
        return DRAY_OK;
    memcpy(s->response, response->values + begun, s->count * sizeof(*s->response));
    s->turns = dray__mask_turns(mask + begun, s->count);
    s->begun_turns = s->turns;
    s->came_waiting = mask[begun + s->count - 1];
    return s->came_waiting ? call_if_due(self, slot, error) : DRAY_OK;
}

int dray__calls_enter(dray__calls *self, const dray__sampler_rows *rows, const int32_t *mask,
                      const uint32_t *slots, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < rows->rows.rows && !rc; i++)
        rc = sit(self, rows, i, mask, slots[i], error);
    return rc;
}

void dray__calls_leave(dray__calls *self, uint32_t slot)
{
    sample *s = &self->samples[slot];
    self->waiting -= s->waits;
    if (self->tool)
        drop_kept(self, s->stream);
    if (self->tool && s->waits)
        keep(self, s);
    sample_free(s);
}

int dray__calls_restart(dray__calls *self, uint32_t slot, dray_error *error)
{
    sample *s = &self->samples[slot];
    self->waiting -= s->waits;
    if (self->tool && s->waits)
        keep(self, s);
    s->waits = false;
    s->count = s->begun;
    s->turns = s->begun_turns;
    s->taken = 0;
    return s->came_waiting ? call_if_due(self, slot, error) : DRAY_OK;
}

/* ---- answers --------------------------------------------------------------------------------- */

/* Returns when the next row resumes, by the clock of steps. */
static int64_t next_due(const dray__calls *self)
{
    int64_t next = TOGETHER;
    for (uint32_t i = 0; i < self->slots; i++)
        if (self->samples[i].waits && self->samples[i].due_ns < next)
            next = self->samples[i].due_ns;
    return next;
}

/* Sorts rows by time, and rows of the same time by slot. */
static void put_in_order(dray__calls *self, uint32_t count)
{
    for (uint32_t i = 1; i < count; i++)
        for (uint32_t j = i; j > 0; j--) {
            uint32_t a = self->due[j - 1], b = self->due[j];
            if (self->samples[a].due_ns <= self->samples[b].due_ns)
                break;
            self->due[j - 1] = b;
            self->due[j] = a;
        }
}

/* Chooses the rows whose answers are taken now. Returns false when one of these is not there
 * yet. */
static bool choose(dray__calls *self, uint32_t *count)
{
    int64_t until = self->now_ns;
    *count = 0;
    if (self->ordered && !dray__sampler_running(self->sampler)) {
        until = next_due(self);
        until = until < self->now_ns ? self->now_ns : until;
    }
    for (uint32_t i = 0; i < self->slots; i++) {
        const sample *s = &self->samples[i];
        if (!s->waits || (self->ordered && s->due_ns > until))
            continue;
        if (dray__tool_answer(self->tool, s->id))
            self->due[(*count)++] = i;
        else if (self->ordered)
            return false;
    }
    if (self->ordered)
        put_in_order(self, *count);
    if (self->ordered && until != TOGETHER)
        self->now_ns = until;
    return *count > 0 || dray__sampler_running(self->sampler) > 0;
}

/* Reads the answer as tokens. End tokens are left out, because they would end the response. */
static int take_answer(dray__calls *self, uint32_t slot, uint32_t *count, dray_error *error)
{
    const char *text = dray__tool_answer(self->tool, self->samples[slot].id);
    int32_t *tokens;
    size_t all;
    int rc = dray__tokenizer_encode(self->host->tokenizer, text, strlen(text), false, &tokens, &all,
                                    error);
    int32_t *to = self->tokens + slot * self->room;
    *count = 0;
    for (size_t i = 0; !rc && i < all && *count < self->room; i++)
        if (tokens[i] != dray__tokenizer_end(self->host->tokenizer))
            to[(*count)++] = tokens[i];
    if (!rc)
        free(tokens);
    return rc;
}

/* Gathers the rows that resume now and their answers, on rank 0. */
static int gather(dray__calls *self, int64_t step, news *out, dray_error *error)
{
    *out = (news){0};
    if (!self->waiting) {
        out->go = 1;
        return DRAY_OK;
    }
    int rc = dray__tool_look(self->tool, error);
    out->go = !rc && choose(self, &out->rows);
    if (!rc && !out->go) {
        dray__fault_at("waiting", step);
        dray_trace_wait(DRAY_CAUSE_TOOL, "wait for tool", step);
        dray__tool_wait(self->tool, self->ordered ? -1 : dray_queue_fd(self->host->queue), WAIT_NS);
        dray_trace_leave();
        rc = dray__tool_look(self->tool, error);
        out->go = !rc && choose(self, &out->rows);
    }
    if (!out->go)
        out->rows = 0;
    for (uint32_t i = 0; i < out->rows && !rc; i++)
        rc = take_answer(self, self->due[i], &self->counts[i], error);
    return rc;
}

static uint32_t world_of(const dray__host *host)
{
    return host->group ? dray__group_world(host->group) : 1;
}

/* Sends them to the other ranks. */
static int share(dray__calls *self, int64_t step, news *now, dray_error *error)
{
    dray__group *group = self->host->group;
    if (world_of(self->host) == 1 || !self->waiting)
        return DRAY_OK;
    bool idle = !self->tool && !dray__sampler_running(self->sampler);
    if (idle)
        dray_trace_wait(DRAY_CAUSE_TOOL, "wait for tool", step);
    int rc = dray__group_broadcast(group, 0, now, sizeof(*now), DRAY_WAIT_DEFAULT, error);
    if (idle)
        dray_trace_leave();
    if (!rc && now->rows)
        rc = dray__group_broadcast(group, 0, self->due, now->rows * sizeof(*self->due),
                                   DRAY_WAIT_DEFAULT, error);
    if (!rc && now->rows)
        rc = dray__group_broadcast(group, 0, self->counts, now->rows * sizeof(*self->counts),
                                   DRAY_WAIT_DEFAULT, error);
    for (uint32_t i = 0; i < now->rows && !rc; i++)
        if (self->counts[i])
            rc = dray__group_broadcast(group, 0, self->tokens + self->due[i] * self->room,
                                       self->counts[i] * sizeof(*self->tokens), DRAY_WAIT_DEFAULT,
                                       error);
    return rc;
}

/* Takes the tokens that the sampler has added to the row since the last look. */
static void take_tokens(dray__calls *self, uint32_t slot)
{
    sample *s = &self->samples[slot];
    dray__sampled made = dray__sampler_look(self->sampler, slot);
    uint64_t fresh = made.count - s->taken;
    memcpy(s->response + s->count, made.tokens + s->taken, fresh * sizeof(*s->response));
    s->count += fresh;
    s->taken = made.count;
}

static void give(dray__calls *self, uint32_t slot, uint32_t count)
{
    sample *s = &self->samples[slot];
    if (self->tool && self->again)
        keep(self, s);
    else if (self->tool)
        forget(self, s);
    dray__sampler_give(self->sampler, slot, self->tokens + slot * self->room, count);
    take_tokens(self, slot);
    s->turns += count > 0;
    s->waits = false;
    self->waiting--;
}

int dray__calls_step(dray__calls *self, int64_t step, dray_error *error)
{
    news now = {.go = 1};
    int rc = self->tool ? gather(self, step, &now, error) : DRAY_OK;
    if (!rc)
        rc = share(self, step, &now, error);
    for (uint32_t i = 0; i < now.rows && !rc; i++)
        give(self, self->due[i], self->counts[i]);
    if (rc || !now.go)
        return rc;
    self->now_ns += STEP_NS;
    rc = dray__sampler_step(self->sampler, error);
    for (uint32_t i = 0; i < self->slots && !rc; i++) {
        sample *s = &self->samples[i];
        if (!s->response || s->waits || dray__sampler_look(self->sampler, i).count == s->taken)
            continue;
        take_tokens(self, i);
        rc = call_if_due(self, i, error);
    }
    return rc;
}

/* ---- whole responses ------------------------------------------------------------------------- */

int dray__calls_generate(dray__host *host, dray__generator *generator,
                         const dray__sampler_options *given, const dray__sampler_rows *rows,
                         int64_t step, dray__generation *out, dray_error *error)
{
    dray__sampler *sampler = NULL;
    dray__calls *calls = NULL;
    dray__sampler_options options = *given;
    options.slots = rows->rows.rows;
    uint32_t *slots = malloc(((size_t)options.slots + 1) * sizeof(*slots));
    int rc = slots ? dray__sampler_open(generator, &options, &sampler, error) : dray__nomem(error);
    if (!rc)
        rc = dray__calls_open(host, sampler, options.slots, true, &calls, error);
    if (!rc)
        rc = dray__sampler_add(sampler, rows, slots, error);
    if (!rc)
        rc = dray__calls_enter(calls, rows, NULL, slots, error);
    while (!rc && (dray__sampler_running(sampler) || calls->waiting))
        rc = dray__calls_step(calls, step, error);
    if (!rc)
        rc = dray__sampler_collect(sampler, slots, options.slots, out, error);
    dray__calls_close(calls);
    dray__sampler_close(sampler);
    free(slots);
    return rc;
}

/* Finds the tokens [from, from + *count) that are the calculator's answer to the tokens before
 * them. *count is 0 when there is no answer. */
static int find_answer(const dray__job *job, const dray__tokenizer *tokenizer,
                       const int32_t *tokens, uint64_t all, uint64_t from, uint64_t *count,
                       dray_error *error)
{
    char *text = NULL, answer[DRAY__CALCULATED_BYTES];
    int32_t *expected = NULL;
    bool called = false;
    *count = 0;
    int rc = ends_with_call(job, tokenizer, tokens, from, &called, error);
    if (rc || !called)
        return rc;
    rc = dray__prompt_text(tokenizer, tokens, from, &text, error);
    if (rc)
        return rc;
    dray__calculate(&job->tool, text, answer);
    size_t length;
    rc =
        dray__tokenizer_encode(tokenizer, answer, strlen(answer), false, &expected, &length, error);
    if (!rc && length <= all - from &&
        memcmp(tokens + from, expected, length * sizeof(*tokens)) == 0)
        *count = length;
    free(text);
    if (!rc)
        free(expected);
    return rc;
}

int dray__calls_mask(const dray__job *job, const dray__tokenizer *tokenizer, const int32_t *tokens,
                     uint64_t count, int32_t *mask, dray_error *error)
{
    int64_t turns = job->tool.kind == DRAY__TOOL_CALCULATOR ? job->tool.turns : 0;
    for (uint64_t i = 0; i < count; i++)
        mask[i] = 1;
    for (uint64_t i = 1; i < count && turns; i++) {
        uint64_t given;
        int rc = find_answer(job, tokenizer, tokens, count, i, &given, error);
        if (rc)
            return rc;
        memset(mask + i, 0, given * sizeof(*mask));
        turns -= given > 0;
        i += given;
    }
    return DRAY_OK;
}
