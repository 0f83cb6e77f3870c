#include "run/turns.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/random.h"
#include "engine/tokenizer.h"
#include "run/fault.h"
#include "run/tool.h"

#include <stdlib.h>
#include <string.h>

#define STEP_NS                                                                                    \
    (DRAY__MILLISECOND) /* that a step of the sampler counts, where rows are ordered               \
                         */
#define WAIT_NS (100 * DRAY__MILLISECOND)
#define TOGETHER INT64_MAX /* due when no row goes on without an answer */

/* Numbers of a row's stream that tokens do not reach, and the clock job does not draw. */
#define FIRST_DRAW (UINT64_C(2) << 20)

/* What is known of a row; its slot is its place. */
typedef struct seat {
    int32_t *prompt, *response; /* response: as far as it is known; NULL: the seat is free */
    uint64_t prompt_count, count;
    uint64_t taken; /* of what the sampler has made of it */
    uint64_t stream, turns;
    bool waits;
    int64_t due_ns; /* by the clock of steps */
} seat;

/* Answers that come to rows now, as rank 0 tells the others. */
typedef struct news {
    uint32_t rows, go; /* go: a step of the sampler follows */
} news;

struct dray__turns {
    dray__host *host;
    dray__sampler *sampler;
    dray__tool *tool; /* rank 0's */
    bool ordered;
    int64_t now_ns; /* the clock of steps */
    seat *seats;
    uint32_t slots, waiting;
    /* of news: slots, how many tokens each gets, and the tokens */
    uint32_t *due, *counts;
    int32_t *tokens;
    uint64_t room; /* tokens of a response */
};

/* ---- opening --------------------------------------------------------------------------------- */

int dray__turns_open(dray__host *host, dray__sampler *sampler, uint32_t slots, bool ordered,
                     dray__turns **out, dray_error *error)
{
    dray__turns *t = calloc(1, sizeof(*t));
    if (!t)
        return dray__nomem(error);
    *t = (dray__turns){.host = host, .sampler = sampler, .ordered = ordered, .slots = slots};
    t->room = (uint64_t)host->job->rollout.max_new_tokens;
    t->seats = calloc((size_t)slots + 1, sizeof(*t->seats));
    t->due = calloc((size_t)slots + 1, sizeof(*t->due));
    t->counts = calloc((size_t)slots + 1, sizeof(*t->counts));
    t->tokens = calloc(slots * t->room + 1, sizeof(*t->tokens));
    int rc = t->seats && t->due && t->counts && t->tokens ? DRAY_OK : dray__nomem(error);
    if (!rc && dray__host_leads(host))
        rc = dray__tool_open(&host->job->tool, slots, &t->tool, error);
    if (rc)
        dray__turns_close(t);
    else
        *out = t;
    return rc;
}

static void seat_free(seat *s)
{
    free(s->prompt);
    free(s->response);
    *s = (seat){0};
}

void dray__turns_close(dray__turns *t)
{
    if (!t)
        return;
    for (uint32_t i = 0; t->seats && i < t->slots; i++)
        seat_free(&t->seats[i]);
    dray__tool_close(t->tool);
    free(t->seats);
    free(t->due);
    free(t->counts);
    free(t->tokens);
    free(t);
}

uint32_t dray__turns_waiting(const dray__turns *t)
{
    return t->waiting;
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* Do the tokens end with a call? As many as it has bytes can say so. */
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

static double draw_seconds(const dray__turns *t, const seat *s)
{
    const dray__job_tool *tool = &t->host->job->tool;
    return tool->min_seconds +
           (tool->max_seconds - tool->min_seconds) *
               dray__random_unit((uint64_t)t->host->job->seed, s->stream, FIRST_DRAW + s->turns);
}

static int ask(dray__turns *t, uint32_t slot, double seconds, dray_error *error)
{
    const seat *s = &t->seats[slot];
    char *prompt = NULL, *response = NULL;
    int rc = dray__prompt_text(t->host->tokenizer, s->prompt, s->prompt_count, &prompt, error);
    if (!rc)
        rc = dray__prompt_text(t->host->tokenizer, s->response, s->count, &response, error);
    if (!rc)
        rc = dray__tool_ask(t->tool, slot, prompt, response, seconds, error);
    free(prompt);
    free(response);
    return rc;
}

/* Where the row's newest token ends a call, it waits from here on. */
static int call_if_due(dray__turns *t, uint32_t slot, dray_error *error)
{
    seat *s = &t->seats[slot];
    const dray__job *job = t->host->job;
    bool called = false;
    if (!s->count || s->turns == (uint64_t)job->tool.turns ||
        dray__sampler_look(t->sampler, slot).finish != DRAY__FINISH_NOT_YET)
        return DRAY_OK;
    int rc = ends_with_call(job, t->host->tokenizer, s->response, s->count, &called, error);
    if (rc || !called)
        return rc;
    double seconds = draw_seconds(t, s);
    s->waits = true;
    s->due_ns = job->tool.max_seconds > 0 ? t->now_ns + (int64_t)(seconds * (double)DRAY__SECOND)
                                          : TOGETHER;
    t->waiting++;
    dray__sampler_hold(t->sampler, slot);
    return t->tool ? ask(t, slot, seconds, error) : DRAY_OK;
}

/* ---- rows come and go ------------------------------------------------------------------------ */

static int sit(dray__turns *t, const dray__sampler_rows *rows, uint32_t row, const int32_t *mask,
               uint32_t slot, dray_error *error)
{
    seat *s = &t->seats[slot];
    const dray__tokens *prompt = &rows->rows.prompt, *response = &rows->rows.response;
    uint64_t at = prompt->offsets[row], begun = response->offsets ? response->offsets[row] : 0;
    *s = (seat){.stream = rows->streams[row], .prompt_count = prompt->offsets[row + 1] - at};
    s->count = response->offsets ? response->offsets[row + 1] - begun : 0;
    s->prompt = malloc(s->prompt_count * sizeof(*s->prompt));
    s->response = malloc(t->room * sizeof(*s->response));
    if (!s->prompt || !s->response) {
        seat_free(s);
        return dray__nomem(error);
    }
    memcpy(s->prompt, prompt->values + at, s->prompt_count * sizeof(*s->prompt));
    if (!s->count)
        return DRAY_OK;
    memcpy(s->response, response->values + begun, s->count * sizeof(*s->response));
    s->turns = dray__mask_turns(mask + begun, s->count);
    return mask[begun + s->count - 1] ? call_if_due(t, slot, error) : DRAY_OK;
}

int dray__turns_enter(dray__turns *t, const dray__sampler_rows *rows, const int32_t *mask,
                      const uint32_t *slots, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < rows->rows.rows && !rc; i++)
        rc = sit(t, rows, i, mask, slots[i], error);
    return rc;
}

void dray__turns_leave(dray__turns *t, uint32_t slot)
{
    t->waiting -= t->seats[slot].waits;
    seat_free(&t->seats[slot]);
    if (t->tool)
        dray__tool_forget(t->tool, slot);
}

/* ---- answers --------------------------------------------------------------------------------- */

/* When the next row comes back by the clock of steps. */
static int64_t next_due(const dray__turns *t)
{
    int64_t next = TOGETHER;
    for (uint32_t i = 0; i < t->slots; i++)
        if (t->seats[i].waits && t->seats[i].due_ns < next)
            next = t->seats[i].due_ns;
    return next;
}

/* Puts rows in order of their time, those of one time by slot. */
static void put_in_order(dray__turns *t, uint32_t count)
{
    for (uint32_t i = 1; i < count; i++)
        for (uint32_t j = i; j > 0; j--) {
            uint32_t a = t->due[j - 1], b = t->due[j];
            if (t->seats[a].due_ns <= t->seats[b].due_ns)
                break;
            t->due[j - 1] = b;
            t->due[j] = a;
        }
}

/* The rows whose answers are taken now. False: one of them is not there yet. */
static bool choose(dray__turns *t, uint32_t *count)
{
    int64_t until = t->now_ns;
    *count = 0;
    if (t->ordered && !dray__sampler_running(t->sampler)) {
        until = next_due(t);
        until = until < t->now_ns ? t->now_ns : until;
    }
    for (uint32_t i = 0; i < t->slots; i++) {
        const seat *s = &t->seats[i];
        if (!s->waits || (t->ordered && s->due_ns > until))
            continue;
        if (dray__tool_answer(t->tool, i))
            t->due[(*count)++] = i;
        else if (t->ordered)
            return false;
    }
    if (t->ordered)
        put_in_order(t, *count);
    if (t->ordered && until != TOGETHER)
        t->now_ns = until;
    return *count > 0 || dray__sampler_running(t->sampler) > 0;
}

/* The answer as tokens; an end token in it would end the response. */
static int take_answer(dray__turns *t, uint32_t slot, uint32_t *count, dray_error *error)
{
    const char *text = dray__tool_answer(t->tool, slot);
    int32_t *tokens;
    size_t all;
    int rc =
        dray__tokenizer_encode(t->host->tokenizer, text, strlen(text), false, &tokens, &all, error);
    int32_t *to = t->tokens + slot * t->room;
    *count = 0;
    for (size_t i = 0; !rc && i < all && *count < t->room; i++)
        if (tokens[i] != dray__tokenizer_end(t->host->tokenizer))
            to[(*count)++] = tokens[i];
    if (!rc)
        free(tokens);
    return rc;
}

/* What comes now, on rank 0. */
static int gather(dray__turns *t, int64_t step, news *out, dray_error *error)
{
    *out = (news){0};
    if (!t->waiting) {
        out->go = 1;
        return DRAY_OK;
    }
    int rc = dray__tool_look(t->tool, error);
    out->go = !rc && choose(t, &out->rows);
    if (!rc && !out->go) {
        dray__fault_at("waiting", step);
        dray_trace_wait(DRAY_CAUSE_TOOL, "wait for tool", step);
        dray__tool_wait(t->tool, t->ordered ? -1 : dray_queue_fd(t->host->queue), WAIT_NS);
        dray_trace_leave();
        rc = dray__tool_look(t->tool, error);
        out->go = !rc && choose(t, &out->rows);
    }
    if (!out->go)
        out->rows = 0;
    for (uint32_t i = 0; i < out->rows && !rc; i++)
        rc = take_answer(t, t->due[i], &t->counts[i], error);
    return rc;
}

static uint32_t world_of(const dray__host *host)
{
    return host->group ? dray__group_world(host->group) : 1;
}

/* Tells the other ranks. */
static int share(dray__turns *t, int64_t step, news *now, dray_error *error)
{
    dray__group *group = t->host->group;
    if (world_of(t->host) == 1 || !t->waiting)
        return DRAY_OK;
    bool idle = !t->tool && !dray__sampler_running(t->sampler);
    if (idle)
        dray_trace_wait(DRAY_CAUSE_TOOL, "wait for tool", step);
    int rc = dray__group_broadcast(group, 0, now, sizeof(*now), DRAY_WAIT_DEFAULT, error);
    if (idle)
        dray_trace_leave();
    if (!rc && now->rows)
        rc = dray__group_broadcast(group, 0, t->due, now->rows * sizeof(*t->due), DRAY_WAIT_DEFAULT,
                                   error);
    if (!rc && now->rows)
        rc = dray__group_broadcast(group, 0, t->counts, now->rows * sizeof(*t->counts),
                                   DRAY_WAIT_DEFAULT, error);
    for (uint32_t i = 0; i < now->rows && !rc; i++)
        if (t->counts[i])
            rc = dray__group_broadcast(group, 0, t->tokens + t->due[i] * t->room,
                                       t->counts[i] * sizeof(*t->tokens), DRAY_WAIT_DEFAULT, error);
    return rc;
}

/* What the sampler has made of the row since the last look. */
static void take_tokens(dray__turns *t, uint32_t slot)
{
    seat *s = &t->seats[slot];
    dray__sampled made = dray__sampler_look(t->sampler, slot);
    uint64_t fresh = made.count - s->taken;
    memcpy(s->response + s->count, made.tokens + s->taken, fresh * sizeof(*s->response));
    s->count += fresh;
    s->taken = made.count;
}

static void give(dray__turns *t, uint32_t slot, uint32_t count)
{
    seat *s = &t->seats[slot];
    dray__sampler_give(t->sampler, slot, t->tokens + slot * t->room, count);
    take_tokens(t, slot);
    s->turns += count > 0;
    s->waits = false;
    t->waiting--;
    if (t->tool)
        dray__tool_forget(t->tool, slot);
}

int dray__turns_step(dray__turns *t, int64_t step, dray_error *error)
{
    news now = {.go = 1};
    int rc = t->tool ? gather(t, step, &now, error) : DRAY_OK;
    if (!rc)
        rc = share(t, step, &now, error);
    for (uint32_t i = 0; i < now.rows && !rc; i++)
        give(t, t->due[i], t->counts[i]);
    if (rc || !now.go)
        return rc;
    t->now_ns += STEP_NS;
    rc = dray__sampler_step(t->sampler, error);
    for (uint32_t i = 0; i < t->slots && !rc; i++) {
        seat *s = &t->seats[i];
        if (!s->response || s->waits || dray__sampler_look(t->sampler, i).count == s->taken)
            continue;
        take_tokens(t, i);
        rc = call_if_due(t, i, error);
    }
    return rc;
}

/* ---- whole responses ------------------------------------------------------------------------- */

int dray__turns_generate(dray__host *host, dray__generator *generator,
                         const dray__sampler_rows *rows, int64_t step, dray__generation *out,
                         dray_error *error)
{
    dray__sampler *sampler = NULL;
    dray__turns *turns = NULL;
    dray__sampler_options options = DRAY__SAMPLER_OPTIONS_INIT;
    options.slots = rows->rows.rows;
    options.seed = (uint64_t)host->job->seed;
    options.temperature = 0;
    options.eos_token = dray__tokenizer_end(host->tokenizer);
    uint32_t *slots = malloc(((size_t)options.slots + 1) * sizeof(*slots));
    int rc = slots ? dray__sampler_open(generator, &options, &sampler, error) : dray__nomem(error);
    if (!rc)
        rc = dray__turns_open(host, sampler, options.slots, true, &turns, error);
    if (!rc)
        rc = dray__sampler_add(sampler, rows, slots, error);
    if (!rc)
        rc = dray__turns_enter(turns, rows, NULL, slots, error);
    while (!rc && (dray__sampler_running(sampler) || turns->waiting))
        rc = dray__turns_step(turns, step, error);
    if (!rc)
        rc = dray__sampler_collect(sampler, slots, options.slots, out, error);
    dray__turns_close(turns);
    dray__sampler_close(sampler);
    free(slots);
    return rc;
}

/* The tokens [from, from + *count) are what the calculator answers to those before. *count 0: they
 * are not. */
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

int dray__turns_mask(const dray__job *job, const dray__tokenizer *tokenizer, const int32_t *tokens,
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
