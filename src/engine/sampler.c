/* A sampler's rows in slots. A step computes the part of each row that is not in the cache (all of
 * a new row, in packed chunks, otherwise the newest token), and samples from the hidden state of
 * the row's last token. */
#include "engine/sampler.h"

#include "base/error.h"
#include "base/random.h"
#include "engine/generator_state.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct row {
    /* tokens[limit] is the sequence; [0, given) was there when the row was added. logprobs and
     * versions have the same indices. NULL when the slot is free. */
    int32_t *tokens, *versions;
    float *logprobs;
    uint64_t prompt, given, length, limit;
    uint64_t stream;
    dray__cache cache;
    uint64_t cached; /* tokens that the cache holds */
    uint8_t finish;
    bool held;
} row;

/* The token that a rank chose in its part of the vocabulary, and its z = logit / temperature. */
typedef struct pick {
    int32_t token;
    float z;
} pick;

struct dray__sampler {
    dray__generator *g;
    dray__sampler_options options;
    int32_t version;
    row *rows; /* [slots] */
    uint32_t used;
    uint32_t *active, active_count; /* slots of active rows, in the order in which they were added
                                       or given tokens */
    float *hidden;                  /* of the last token of each active row */
    float *logits, *exps;
    dray__summary *summaries; /* own, then all ranks' */
    pick *picks;              /* own, then all ranks' */
    /* batch of a forward pass */
    int32_t *ids;
    uint64_t ids_room;
    uint64_t *offsets, *past;
    dray__cache **caches;
    int64_t *last;
};

/* ---- memory ---------------------------------------------------------------------------------- */

static int allocate(dray__sampler *s, dray_error *error)
{
    const dray__model *m = &s->g->model;
    size_t slots = (size_t)s->options.slots + 1;
    size_t vocabulary = (size_t)m->vocab_rows + 1, hidden = (size_t)m->config.hidden_size;
    const struct {
        void **out;
        size_t each;
    } parts[] = {
        {(void **)&s->rows, sizeof *s->rows},
        {(void **)&s->active, sizeof *s->active},
        {(void **)&s->hidden, hidden * sizeof *s->hidden},
        {(void **)&s->logits, vocabulary * sizeof *s->logits},
        {(void **)&s->exps, vocabulary * sizeof *s->exps},
        {(void **)&s->summaries, (m->world + 1) * sizeof *s->summaries},
        {(void **)&s->picks, (m->world + 1) * sizeof *s->picks},
        {(void **)&s->offsets, sizeof *s->offsets},
        {(void **)&s->past, sizeof *s->past},
        {(void **)&s->caches, sizeof(void *)},
        {(void **)&s->last, sizeof *s->last},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (!(*parts[i].out = calloc(slots, parts[i].each)))
            return dray__nomem(error);
    return DRAY_OK;
}

int dray__sampler_open(dray__generator *g, const dray__sampler_options *options,
                       dray__sampler **out, dray_error *error)
{
    if (!(options->temperature >= 0) || isinf(options->temperature))
        return dray__fail(error, DRAY_EINVALID,
                          "sampler: expected a temperature of 0 or more, found %g",
                          options->temperature);
    dray__sampler *s = calloc(1, sizeof *s);
    if (!s)
        return dray__nomem(error);
    s->g = g;
    s->options = *options;
    int code = allocate(s, error);
    if (code == DRAY_OK)
        *out = s;
    else
        dray__sampler_close(s);
    return code;
}

static void row_free(row *r)
{
    void *const parts[] = {r->tokens, r->versions, r->logprobs, r->cache.k, r->cache.v};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        free(parts[i]);
    *r = (row){0};
}

void dray__sampler_close(dray__sampler *s)
{
    if (!s)
        return;
    for (uint32_t i = 0; s->rows && i < s->options.slots; i++)
        row_free(&s->rows[i]);
    void *const parts[] = {s->rows,  s->active, s->hidden,  s->logits, s->exps,   s->summaries,
                           s->picks, s->ids,    s->offsets, s->past,   s->caches, s->last};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        free(parts[i]);
    free(s);
}

/* ---- rows ------------------------------------------------------------------------------------ */

static uint64_t length_of(const dray__tokens *tokens, uint32_t i)
{
    return tokens->offsets ? tokens->offsets[i + 1] - tokens->offsets[i] : 0;
}

static uint64_t most_of(const dray__sampler_rows *rows, uint32_t i)
{
    return rows->row_max_new_tokens ? rows->row_max_new_tokens[i] : rows->max_new_tokens;
}

static int check_row(const dray__sampler *s, const dray__sampler_rows *rows, uint32_t i,
                     dray_error *error)
{
    const dray__tokens *response = &rows->rows.response;
    uint64_t prompt = length_of(&rows->rows.prompt, i), made = length_of(response, i);
    uint64_t positions = (uint64_t)s->g->model.config.max_positions;
    if (prompt + made >= positions)
        return dray__fail(error, DRAY_EINVALID,
                          "sampler: row %" PRIu32 " has %" PRIu64 " tokens of prompt and %" PRIu64
                          " of response and leaves no room in the model's %" PRIu64 " positions",
                          i, prompt, made, positions);
    if (made >= most_of(rows, i))
        return dray__fail(error, DRAY_EINVALID,
                          "sampler: row %" PRIu32 " has %" PRIu64
                          " response tokens and may have %" PRIu64,
                          i, made, most_of(rows, i));
    if (made && response->values[response->offsets[i + 1] - 1] == s->options.eos_token)
        return dray__fail(
            error, DRAY_EINVALID,
            "sampler: row %" PRIu32 " ends with the end token: there is nothing to add", i);
    return DRAY_OK;
}

static int check_rows(const dray__sampler *s, const dray__sampler_rows *rows, dray_error *error)
{
    const dray__sequences *q = &rows->rows;
    int64_t vocabulary = s->g->model.config.vocab_size;
    if (q->rows > dray__sampler_free_slots(s))
        return dray__fail(error, DRAY_EFULL,
                          "sampler: %" PRIu32 " rows, but %" PRIu32 " of %" PRIu32
                          " slots are free",
                          q->rows, dray__sampler_free_slots(s), s->options.slots);
    int code = dray__tokens_check(&q->prompt, q->rows, vocabulary, 1, "prompt", error);
    if (code == DRAY_OK && q->response.offsets)
        code = dray__tokens_check(&q->response, q->rows, vocabulary, 0, "response", error);
    for (uint32_t i = 0; code == DRAY_OK && i < q->rows; i++)
        code = check_row(s, rows, i, error);
    return code;
}

static int make_row(const dray__sampler *s, const dray__sampler_rows *rows, uint32_t i, row *out,
                    dray_error *error)
{
    const dray__model *m = &s->g->model;
    const dray__tokens *prompt = &rows->rows.prompt, *response = &rows->rows.response;
    uint64_t asked = length_of(prompt, i), made = length_of(response, i);
    uint64_t positions = (uint64_t)m->config.max_positions, limit = asked + most_of(rows, i);
    row r = {.prompt = asked,
             .given = asked + made,
             .length = asked + made,
             .stream = rows->streams ? rows->streams[i] : i};
    r.limit = limit < positions ? limit : positions;
    r.finish = DRAY__FINISH_NOT_YET;
    size_t cache;
    if (__builtin_mul_overflow(r.limit, (uint64_t)(m->config.layers * m->kv_width) * sizeof(float),
                               &cache))
        return dray__fail(error, DRAY_ENOMEM, "sampler: a cache of %" PRIu64 " tokens", r.limit);
    r.tokens = malloc(r.limit * sizeof *r.tokens);
    r.versions = malloc(r.limit * sizeof *r.versions);
    r.logprobs = malloc(r.limit * sizeof *r.logprobs);
    r.cache = (dray__cache){malloc(cache + 1), malloc(cache + 1), (int64_t)r.limit};
    if (!r.tokens || !r.versions || !r.logprobs || !r.cache.k || !r.cache.v) {
        row_free(&r);
        return dray__nomem(error);
    }
    memcpy(r.tokens, prompt->values + prompt->offsets[i], asked * sizeof *r.tokens);
    if (made)
        memcpy(r.tokens + asked, response->values + response->offsets[i], made * sizeof *r.tokens);
    *out = r;
    return DRAY_OK;
}

/* Makes room for a chunk's tokens, or for one longer row. */
static int reserve_ids(dray__sampler *s, uint64_t longest, dray_error *error)
{
    uint64_t room = longest > DRAY__CHUNK_TOKENS ? longest : DRAY__CHUNK_TOKENS;
    if (room <= s->ids_room)
        return DRAY_OK;
    int32_t *ids = malloc(room * sizeof *ids);
    if (!ids)
        return dray__nomem(error);
    free(s->ids);
    s->ids = ids;
    s->ids_room = room;
    return DRAY_OK;
}

int dray__sampler_add(dray__sampler *s, const dray__sampler_rows *rows, uint32_t *slots,
                      dray_error *error)
{
    int code = check_rows(s, rows, error);
    uint64_t longest = 0;
    uint32_t made = 0;
    for (uint32_t slot = 0; code == DRAY_OK && made < rows->rows.rows; slot++) {
        if (s->rows[slot].tokens)
            continue;
        code = make_row(s, rows, made, &s->rows[slot], error);
        if (code != DRAY_OK)
            break;
        longest = s->rows[slot].limit > longest ? s->rows[slot].limit : longest;
        slots[made++] = slot;
    }
    if (code == DRAY_OK)
        code = reserve_ids(s, longest, error);
    if (code == DRAY_OK)
        code = dray__model_reach(&s->g->model, (int64_t)longest, error);
    for (uint32_t i = 0; i < made; i++)
        if (code == DRAY_OK)
            s->active[s->active_count++] = slots[i];
        else
            row_free(&s->rows[slots[i]]);
    s->used += code == DRAY_OK ? made : 0;
    return code;
}

void dray__sampler_renew(dray__sampler *s, int32_t version)
{
    for (uint32_t i = 0; i < s->options.slots; i++)
        s->rows[i].cached = 0;
    s->version = version;
}

uint32_t dray__sampler_free_slots(const dray__sampler *s)
{
    return s->options.slots - s->used;
}

uint32_t dray__sampler_running(const dray__sampler *s)
{
    return s->active_count;
}

dray__sampled dray__sampler_look(const dray__sampler *s, uint32_t slot)
{
    const row *r = &s->rows[slot];
    return (dray__sampled){r->tokens + r->given, r->logprobs + r->given, r->versions + r->given,
                           r->length - r->given, r->finish};
}

static void drop_inactive(dray__sampler *s)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < s->active_count; i++) {
        const row *r = &s->rows[s->active[i]];
        if (r->finish == DRAY__FINISH_NOT_YET && !r->held)
            s->active[kept++] = s->active[i];
    }
    s->active_count = kept;
}

void dray__sampler_hold(dray__sampler *s, uint32_t slot)
{
    s->rows[slot].held = true;
    drop_inactive(s);
}

void dray__sampler_give(dray__sampler *s, uint32_t slot, const int32_t *tokens, uint64_t count)
{
    row *r = &s->rows[slot];
    for (uint64_t i = 0; i < count && r->length < r->limit; i++) {
        r->tokens[r->length] = tokens[i];
        r->logprobs[r->length] = 0;
        r->versions[r->length++] = -1;
    }
    r->held = false;
    if (r->length == r->limit)
        r->finish = DRAY__FINISH_LENGTH;
    else
        s->active[s->active_count++] = slot;
}

void dray__sampler_restart(dray__sampler *s, uint32_t slot)
{
    row *r = &s->rows[slot];
    bool active = r->finish == DRAY__FINISH_NOT_YET && !r->held;
    r->length = r->given;
    r->cached = 0;
    r->finish = DRAY__FINISH_NOT_YET;
    r->held = false;
    if (!active)
        s->active[s->active_count++] = slot;
}

void dray__sampler_remove(dray__sampler *s, uint32_t slot)
{
    s->rows[slot].finish = DRAY__FINISH_LENGTH;
    drop_inactive(s);
    row_free(&s->rows[slot]);
    s->used--;
}

int dray__sampler_collect(const dray__sampler *sampler, const uint32_t *slots, uint32_t rows,
                          dray__generation *out, dray_error *error)
{
    uint64_t total = 0;
    dray__generation r = {.rows = rows, .offsets = calloc(rows + (size_t)1, sizeof(uint64_t))};
    for (uint32_t i = 0; r.offsets && i < rows; i++)
        r.offsets[i + 1] = total += dray__sampler_look(sampler, slots[i]).count;
    r.tokens = malloc((total + 1) * sizeof *r.tokens);
    r.logprobs = malloc((total + 1) * sizeof *r.logprobs);
    r.finish = malloc(rows + (size_t)1);
    if (!r.offsets || !r.tokens || !r.logprobs || !r.finish) {
        dray__generation_free(&r);
        return dray__nomem(error);
    }
    for (uint32_t i = 0; i < rows; i++) {
        dray__sampled made = dray__sampler_look(sampler, slots[i]);
        memcpy(r.tokens + r.offsets[i], made.tokens, made.count * sizeof *r.tokens);
        memcpy(r.logprobs + r.offsets[i], made.logprobs, made.count * sizeof *r.logprobs);
        r.finish[i] = made.finish;
    }
    *out = r;
    return DRAY_OK;
}

/* ---- one token ------------------------------------------------------------------------------- */

static uint64_t missing(const dray__sampler *s, uint32_t i)
{
    const row *r = &s->rows[s->active[i]];
    return r->length - r->cached;
}

/* Computes the tokens of active rows [from, to) that are not in the cache yet, and keeps the hidden
 * state of each row's last token. */
static int advance_rows(dray__sampler *s, uint32_t from, uint32_t to, dray_error *error)
{
    dray__generator *g = s->g;
    dray__packed batch = {.rows = to - from, .ids = s->ids, .offsets = s->offsets, .past = s->past};
    for (uint32_t i = 0; i < batch.rows; i++) {
        row *r = &s->rows[s->active[from + i]];
        uint64_t fresh = missing(s, from + i);
        s->offsets[i] = (uint64_t)batch.tokens;
        s->past[i] = r->cached;
        s->caches[i] = &r->cache;
        memcpy(s->ids + batch.tokens, r->tokens + r->cached, fresh * sizeof *s->ids);
        batch.tokens += (int64_t)fresh;
        s->last[i] = batch.tokens - 1;
    }
    s->offsets[batch.rows] = (uint64_t)batch.tokens;
    int code = dray__forward(&g->model, &batch, s->caches, &g->state, error);
    int64_t d = g->model.config.hidden_size;
    if (code)
        return code; /* The caches do not hold these tokens. */
    for (uint32_t i = from; i < to; i++) {
        row *r = &s->rows[s->active[i]];
        r->cached = r->length;
    }
    dray__pick_rows(g->state.hidden, s->last, batch.rows, d, s->hidden + from * d);
    return DRAY_OK;
}

static int advance(dray__sampler *s, dray_error *error)
{
    int code = DRAY_OK;
    for (uint32_t from = 0, to; code == DRAY_OK && from < s->active_count; from = to) {
        uint64_t tokens = missing(s, from);
        for (to = from + 1; to < s->active_count; to++) {
            tokens += missing(s, to);
            if (tokens > DRAY__CHUNK_TOKENS)
                break;
        }
        code = advance_rows(s, from, to, error);
    }
    return code;
}

/* Finds the rank that has the token in its part of the vocabulary, and the probability mass (in
 * units of that rank's exps) before it. Every rank gets the same result from the same summaries. */
static uint32_t find_owner(const dray__sampler *s, const dray__summary *all, uint32_t i,
                           double *inside)
{
    uint32_t world = s->g->model.world, count = s->active_count;
    const row *r = &s->rows[s->active[i]];
    dray__summary whole = dray__summary_join(all, world, count, i);
    *inside = 0;
    if (s->options.temperature == 0) {
        uint32_t rank = 0;
        while (rank + 1 < world && all[rank * count + i].max < whole.max)
            rank++;
        return rank;
    }
    double mass = whole.sum * dray__random_unit(s->options.seed, r->stream, r->length);
    uint32_t owner = 0;
    for (uint32_t rank = 0; rank < world; rank++) {
        const dray__summary *part = &all[rank * count + i];
        double factor = exp((double)part->max - whole.max), weight = factor * part->sum;
        if (weight <= 0)
            continue;
        owner = rank; /* the last rank with any mass, in case rounding goes past the end */
        *inside = mass / factor;
        if (mass < weight)
            break;
        mass -= weight;
    }
    return owner;
}

/* Returns the token of this rank's columns at which the running sum of exps passes `inside` or, for
 * greedy sampling, the first with the greatest logit. */
static pick choose(const dray__sampler *s, uint32_t i, double inside)
{
    const dray__model *m = &s->g->model;
    const float *logits = s->logits + i * m->vocab_rows, *exps = s->exps + i * m->vocab_rows;
    double temperature = s->options.temperature;
    int64_t found = 0;
    if (temperature == 0) {
        float max = m->kernels->max(logits, m->vocab_rows);
        while (found + 1 < m->vocab_rows && logits[found] < max)
            found++;
    } else {
        double sum = 0;
        for (int64_t c = 0; c < m->vocab_rows; c++) {
            if (exps[c] <= 0)
                continue;
            found = c;
            sum += exps[c];
            if (sum > inside)
                break;
        }
    }
    float scale = temperature == 0 ? 1 : (float)(1 / temperature);
    return (pick){(int32_t)(m->vocab_start + found), scale * logits[found]};
}

static void append(dray__sampler *s, uint32_t slot, pick chosen, double logprob)
{
    row *r = &s->rows[slot];
    uint64_t at = r->length++;
    r->tokens[at] = chosen.token;
    r->logprobs[at] = (float)logprob;
    r->versions[at] = s->version;
    if (chosen.token == s->options.eos_token)
        r->finish = DRAY__FINISH_EOS;
    else if (r->length == r->limit)
        r->finish = DRAY__FINISH_LENGTH;
}

/* Samples a token for every active row, with two exchanges between the ranks of a few numbers for
 * each row. */
static int sample(dray__sampler *s, dray_error *error)
{
    const dray__model *m = &s->g->model;
    uint32_t count = s->active_count;
    double temperature = s->options.temperature;
    dray__summary *all = s->summaries + count;
    dray__head(m, s->hidden, count, s->logits);
    dray__summarise(m, s->logits, count, NULL, temperature == 0 ? 1 : 1 / temperature, s->exps,
                    s->summaries);
    int code = dray__summaries_gather(m, s->summaries, count, all, error);
    if (code != DRAY_OK)
        return code;
    for (uint32_t i = 0; i < count; i++) {
        double inside;
        s->picks[i] = (pick){-1, 0};
        if (find_owner(s, all, i, &inside) == m->rank)
            s->picks[i] = choose(s, i, inside);
    }
    pick *gathered = s->picks;
    if (m->group) {
        gathered = s->picks + count;
        code = dray__group_all_gather_equal(m->group, s->picks, count * sizeof(pick), gathered,
                                            DRAY_WAIT_DEFAULT, error);
        if (code != DRAY_OK)
            return code;
    }
    for (uint32_t i = 0; i < count; i++) {
        double inside;
        dray__summary whole = dray__summary_join(all, m->world, count, i);
        pick chosen = gathered[find_owner(s, all, i, &inside) * count + i];
        append(s, s->active[i], chosen, chosen.z - (double)whole.max - log(whole.sum));
    }
    return DRAY_OK;
}

/* Sleeps for the time of a step, and adds a digit to each row until the response has the length
 * that its stream draws. */
static void pretend(dray__sampler *s)
{
    const dray__pace *pace = s->g->model.pace;
    uint64_t prefill = 0;
    for (uint32_t i = 0; i < s->active_count; i++)
        prefill += missing(s, i) - 1;
    dray__pace_spend(pace->token_seconds + pace->prefill_seconds * (double)prefill);
    for (uint32_t i = 0; i < s->active_count; i++) {
        row *r = &s->rows[s->active[i]];
        r->cached = r->length;
        bool last = r->length - r->prompt + 1 >= dray__pace_length(pace, r->stream);
        int32_t digit = '0' + (int32_t)(r->length % 10);
        append(s, s->active[i], (pick){last ? s->options.eos_token : digit, 0}, -1);
    }
}

int dray__sampler_step(dray__sampler *s, dray_error *error)
{
    int code = DRAY_OK;
    if (s->active_count == 0)
        return DRAY_OK;
    if (s->g->model.pace) {
        pretend(s);
    } else {
        code = advance(s, error);
        if (code == DRAY_OK)
            code = sample(s, error);
    }
    drop_inactive(s);
    return code;
}

/* ---- whole responses ------------------------------------------------------------------------- */

int dray__generate(dray__generator *g, const dray__sampler_options *options,
                   const dray__sampler_rows *rows, dray__generation *out, dray_error *error)
{
    dray__sampler_options own = *options;
    dray__sampler *sampler = NULL;
    own.slots = rows->rows.rows;
    uint32_t *slots = malloc((own.slots + (size_t)1) * sizeof *slots);
    int code = slots ? dray__sampler_open(g, &own, &sampler, error) : dray__nomem(error);
    if (code == DRAY_OK)
        code = dray__sampler_add(sampler, rows, slots, error);
    while (code == DRAY_OK && dray__sampler_running(sampler) > 0)
        code = dray__sampler_step(sampler, error);
    if (code == DRAY_OK)
        code = dray__sampler_collect(sampler, slots, own.slots, out, error);
    dray__sampler_close(sampler);
    free(slots);
    return code;
}
