/* Sampling: prompts fill the cache in packed chunks, then all unfinished rows advance a token at a
 * time. */
#include "engine/generator.h"

#include "base/error.h"
#include "base/random.h"
#include "engine/kernels.h"
#include "engine/model.h"

#include <dray/weights.h>

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct dray__generator {
    dray_layout *layout;
    dray_region **regions;
    uint32_t region_count;
    dray__model model;
    dray__state state;
};

int dray__generator_open(const dray_model_config *config, dray__group *group, dray__generator **out,
                         dray_error *error)
{
    int code = dray__engine_config_check(config, error);
    if (code != DRAY_OK)
        return code;
    dray__generator *g = calloc(1, sizeof *g);
    if (!g)
        return dray__nomem(error);
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    spec.tp = group ? dray__group_world(group) : 1;
    spec.tp_rank = group ? dray__group_rank(group) : 0;
    spec.dtype = DRAY_F32;
    code = dray_layout_engine(config, &spec, &g->layout, error);
    if (code == DRAY_OK) {
        uint32_t count = dray_layout_region_count(g->layout);
        g->regions = calloc(count, sizeof(dray_region *));
        code = g->regions ? dray_regions_for_layout(g->layout, 1, g->regions, error)
                          : dray__nomem(error);
        g->region_count = code == DRAY_OK ? count : 0;
    }
    if (code == DRAY_OK)
        code = dray__model_open(config, group, dray_region_base(g->regions[0]), &g->model, error);
    if (code == DRAY_OK)
        *out = g;
    else
        dray__generator_close(g);
    return code;
}

void dray__generator_close(dray__generator *g)
{
    if (!g)
        return;
    dray__state_free(&g->state);
    dray__model_close(&g->model);
    for (uint32_t i = 0; i < g->region_count; i++)
        dray_region_free(g->regions[i]);
    free(g->regions);
    dray_layout_free(g->layout);
    free(g);
}

const dray_layout *dray__generator_layout(const dray__generator *g)
{
    return g->layout;
}

dray_region *const *dray__generator_regions(const dray__generator *g)
{
    return g->regions;
}

const dray_model_config *dray__generator_config(const dray__generator *g)
{
    return &g->model.config;
}

int dray__generator_load(dray__generator *g, const char *directory, dray_error *error)
{
    return dray_checkpoint_read(directory, g->layout, g->regions, error);
}

/* ---- one call of dray__generate -------------------------------------------------------------- */

/* The token that a rank found in its part of the vocabulary, and its z = logit / temperature. */
typedef struct pick {
    int32_t token;
    float z;
} pick;

typedef struct job {
    dray__generator *g;
    const dray__generate_options *options;
    /* A row's tokens lie at [base, base + limit) of `tokens`; so do its log-probs and its entries
     * in the cache. */
    uint64_t *base, *length, *limit;
    uint32_t *active, active_count; /* rows that go on, ascending */
    int32_t *tokens;
    float *logprobs;
    uint8_t *finish;
    dray__cache cache;
    float *hidden; /* of the last token of each active row */
    float *logits, *exps;
    dray__summary *summaries; /* own, then all ranks' */
    pick *picks;              /* own, then all ranks' */
    /* batch of a forward pass */
    int32_t *ids;
    uint64_t *offsets, *past, *cache_at;
    int64_t *last;
    bool stopped;
} job;

static void job_free(job *j)
{
    void *const parts[] = {j->base,      j->length,  j->limit,   j->active,  j->tokens,
                           j->logprobs,  j->finish,  j->hidden,  j->logits,  j->exps,
                           j->summaries, j->picks,   j->ids,     j->offsets, j->past,
                           j->cache_at,  j->cache.k, j->cache.v, j->last};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        free(parts[i]);
}

static int check_options(const dray_model_config *config, const dray__generate_options *o,
                         dray_error *error)
{
    if (o->size != sizeof *o)
        return dray__fail(error, DRAY_EINVALID, "generate: options of %zu bytes, expected %zu",
                          o->size, sizeof *o);
    if (!(o->temperature >= 0) || isinf(o->temperature))
        return dray__fail(error, DRAY_EINVALID, "generate: temperature %g", o->temperature);
    int code = dray__tokens_check(&o->prompt, o->rows, config->vocab_size, 1, "prompt", error);
    for (uint32_t row = 0; code == DRAY_OK && row < o->rows; row++) {
        uint64_t prompt = o->prompt.offsets[row + 1] - o->prompt.offsets[row];
        if (prompt >= (uint64_t)config->max_positions)
            code = dray__fail(error, DRAY_EINVALID,
                              "prompt of row %" PRIu32 " has %" PRIu64
                              " tokens and leaves no room in the model's %" PRId64 " positions",
                              row, prompt, config->max_positions);
        else if ((o->row_max_new_tokens ? o->row_max_new_tokens[row] : o->max_new_tokens) == 0)
            code = dray__fail(error, DRAY_EINVALID,
                              "generate: row %" PRIu32 " may have no new token", row);
    }
    return code;
}

static int allocate_rows(job *j, dray_error *error)
{
    size_t rows = j->options->rows;
    j->base = calloc(rows + 1, sizeof *j->base);
    j->length = calloc(rows + 1, sizeof *j->length);
    j->limit = calloc(rows + 1, sizeof *j->limit);
    j->active = calloc(rows + 1, sizeof *j->active);
    j->finish = calloc(rows + 1, sizeof *j->finish);
    bool whole = j->base && j->length && j->limit && j->active && j->finish;
    return whole ? DRAY_OK : dray__nomem(error);
}

static int allocate_tokens(job *j, uint64_t entries, dray_error *error)
{
    const dray__model *m = &j->g->model;
    size_t rows = j->options->rows, vocabulary = (size_t)m->vocab_rows + 1;
    size_t batch = entries > rows ? entries : rows, cache, logits;
    /* The model's own sizes are those of memory that is there; the request's are not. */
    if (__builtin_mul_overflow(entries, (uint64_t)(m->config.layers * m->kv_width) * sizeof(float),
                               &cache) ||
        __builtin_mul_overflow(rows, vocabulary * sizeof(float), &logits) ||
        entries > INT64_MAX / 8)
        return dray__fail(error, DRAY_ENOMEM, "generate: a cache of %" PRIu64 " tokens", entries);
    j->tokens = malloc((entries + 1) * sizeof *j->tokens);
    j->logprobs = malloc((entries + 1) * sizeof *j->logprobs);
    j->cache.k = malloc(cache + 1);
    j->cache.v = malloc(cache + 1);
    j->cache.entries = (int64_t)entries;
    j->hidden = malloc((rows * (size_t)m->config.hidden_size + 1) * sizeof(float));
    j->logits = malloc(logits + 1);
    j->exps = malloc(logits + 1);
    j->summaries = malloc((rows + 1) * (m->world + 1) * sizeof *j->summaries);
    j->picks = malloc((rows + 1) * (m->world + 1) * sizeof *j->picks);
    j->ids = malloc((batch + 1) * sizeof *j->ids);
    j->offsets = malloc((rows + 1) * sizeof *j->offsets);
    j->past = calloc(rows + 1, sizeof *j->past);
    j->cache_at = malloc((rows + 1) * sizeof *j->cache_at);
    j->last = malloc((rows + 1) * sizeof *j->last);
    bool whole = j->tokens && j->logprobs && j->cache.k && j->cache.v && j->hidden && j->logits &&
                 j->exps && j->summaries && j->picks && j->ids && j->offsets && j->past &&
                 j->cache_at && j->last;
    return whole ? DRAY_OK : dray__nomem(error);
}

static int job_begin(job *j, dray_error *error)
{
    const dray__generate_options *o = j->options;
    const dray_model_config *config = &j->g->model.config;
    int code = allocate_rows(j, error);
    if (code != DRAY_OK)
        return code;
    uint64_t entries = 0, longest = 0;
    for (uint32_t row = 0; row < o->rows; row++) {
        uint64_t prompt = o->prompt.offsets[row + 1] - o->prompt.offsets[row];
        uint64_t most = o->row_max_new_tokens ? o->row_max_new_tokens[row] : o->max_new_tokens;
        uint64_t limit = prompt + most;
        if (limit > (uint64_t)config->max_positions)
            limit = (uint64_t)config->max_positions;
        j->base[row] = entries;
        j->length[row] = prompt;
        j->limit[row] = limit;
        j->active[row] = row;
        entries += limit;
        longest = limit > longest ? limit : longest;
    }
    j->active_count = o->rows;
    code = allocate_tokens(j, entries, error);
    for (uint32_t row = 0; code == DRAY_OK && row < o->rows; row++)
        memcpy(j->tokens + j->base[row], o->prompt.values + o->prompt.offsets[row],
               j->length[row] * sizeof *j->tokens);
    return code == DRAY_OK ? dray__model_reach(&j->g->model, (int64_t)longest, error) : code;
}

/* Computes the tokens of active rows [from, to) that are not in the cache yet - the whole prompt at
 * first, then the newest token - and keeps the hidden state of each row's last. */
static int advance_rows(job *j, uint32_t from, uint32_t to, bool prompts, dray_error *error)
{
    dray__generator *g = j->g;
    dray__batch batch = {.rows = to - from,
                         .ids = j->ids,
                         .offsets = j->offsets,
                         .past = j->past,
                         .cache_at = j->cache_at};
    for (uint32_t i = 0; i < batch.rows; i++) {
        uint32_t row = j->active[from + i];
        uint64_t fresh = prompts ? j->length[row] : 1;
        j->offsets[i] = (uint64_t)batch.tokens;
        j->past[i] = j->length[row] - fresh;
        j->cache_at[i] = j->base[row];
        memcpy(j->ids + batch.tokens, j->tokens + j->base[row] + j->past[i],
               fresh * sizeof *j->ids);
        batch.tokens += (int64_t)fresh;
        j->last[i] = batch.tokens - 1;
    }
    j->offsets[batch.rows] = (uint64_t)batch.tokens;
    int code = dray__forward(&g->model, &batch, &j->cache, &g->state, error);
    int64_t d = g->model.config.hidden_size;
    if (code == DRAY_OK)
        dray__pick_rows(g->state.hidden, j->last, batch.rows, d, j->hidden + from * d);
    return code;
}

static int advance(job *j, bool prompts, dray_error *error)
{
    int code = DRAY_OK;
    for (uint32_t from = 0, to; code == DRAY_OK && from < j->active_count; from = to) {
        uint64_t tokens = prompts ? j->length[j->active[from]] : 1;
        for (to = from + 1; to < j->active_count; to++) {
            tokens += prompts ? j->length[j->active[to]] : 1;
            if (tokens > DRAY__CHUNK_TOKENS)
                break;
        }
        code = advance_rows(j, from, to, prompts, error);
    }
    return code;
}

/* Which rank's part of the vocabulary the token lies in, and how much probability mass (in units of
 * that rank's exps) lies before it. Every rank finds the same from the same summaries. */
static uint32_t find_owner(const job *j, const dray__summary *all, uint32_t i, double *inside)
{
    uint32_t world = j->g->model.world, row = j->active[i], count = j->active_count;
    dray__summary whole = dray__summary_join(all, world, count, i);
    *inside = 0;
    if (j->options->temperature == 0) {
        uint32_t rank = 0;
        while (rank + 1 < world && all[rank * count + i].max < whole.max)
            rank++;
        return rank;
    }
    uint64_t stream = j->options->streams ? j->options->streams[row] : row;
    double mass = whole.sum * dray__random_unit(j->options->seed, stream, j->length[row]);
    uint32_t owner = 0;
    for (uint32_t rank = 0; rank < world; rank++) {
        const dray__summary *part = &all[rank * count + i];
        double factor = exp((double)part->max - whole.max), weight = factor * part->sum;
        if (weight <= 0)
            continue;
        owner = rank; /* the last with any mass, should rounding carry us past the end */
        *inside = mass / factor;
        if (mass < weight)
            break;
        mass -= weight;
    }
    return owner;
}

/* The token of this rank's columns at which the running sum of exps passes `inside`; greedy: the
 * first greatest. */
static pick choose(const job *j, uint32_t i, double inside)
{
    const dray__model *m = &j->g->model;
    const float *logits = j->logits + i * m->vocab_rows, *exps = j->exps + i * m->vocab_rows;
    double temperature = j->options->temperature;
    int64_t found = 0;
    if (temperature == 0) {
        float max = dray__max(logits, m->vocab_rows);
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

static void append(job *j, uint32_t row, pick chosen, double logprob)
{
    uint64_t at = j->base[row] + j->length[row]++;
    j->tokens[at] = chosen.token;
    j->logprobs[at] = (float)logprob;
    j->finish[row] = DRAY__FINISH_STOPPED; /* until it is done */
    if (chosen.token == j->options->eos_token)
        j->finish[row] = DRAY__FINISH_EOS;
    else if (j->length[row] == j->limit[row])
        j->finish[row] = DRAY__FINISH_LENGTH;
}

/* One token for every active row: two exchanges between the ranks, of a few numbers a row. */
static int sample(job *j, dray_error *error)
{
    const dray__generate_options *o = j->options;
    const dray__model *m = &j->g->model;
    uint32_t count = j->active_count;
    dray__summary *all = j->summaries + count;
    dray__head(m, j->hidden, count, j->logits);
    dray__summarise(m, j->logits, count, NULL, o->temperature == 0 ? 1 : 1 / o->temperature,
                    j->exps, j->summaries);
    int code = dray__summaries_gather(m, j->summaries, count, all, error);
    if (code != DRAY_OK)
        return code;
    for (uint32_t i = 0; i < count; i++) {
        double inside;
        j->picks[i] = (pick){-1, 0};
        if (find_owner(j, all, i, &inside) == m->rank)
            j->picks[i] = choose(j, i, inside);
    }
    /* one more entry says whether this rank wants to stop */
    j->picks[count] = (pick){o->stop && o->stop(o->user), 0};
    pick *gathered = j->picks;
    if (m->group) {
        gathered = j->picks + count + 1;
        code = dray__group_all_gather_equal(m->group, j->picks, (count + 1) * sizeof(pick),
                                            gathered, DRAY_WAIT_DEFAULT, error);
        if (code != DRAY_OK)
            return code;
    }
    for (uint32_t rank = 0; rank < m->world; rank++)
        j->stopped |= gathered[rank * (count + 1) + count].token != 0;
    for (uint32_t i = 0; i < count; i++) {
        double inside;
        dray__summary whole = dray__summary_join(all, m->world, count, i);
        pick chosen = gathered[find_owner(j, all, i, &inside) * (count + 1) + i];
        append(j, j->active[i], chosen, chosen.z - (double)whole.max - log(whole.sum));
    }
    return DRAY_OK;
}

static void drop_finished(job *j)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < j->active_count; i++)
        if (j->finish[j->active[i]] == DRAY__FINISH_STOPPED)
            j->active[kept++] = j->active[i];
    j->active_count = kept;
}

/* Copies the responses out of the rows' storage. */
static int job_result(const job *j, dray__generation *out, dray_error *error)
{
    const dray__generate_options *o = j->options;
    uint64_t total = 0;
    dray__generation r = {.rows = o->rows,
                          .offsets = calloc(o->rows + (size_t)1, sizeof(uint64_t))};
    for (uint32_t row = 0; r.offsets && row < o->rows; row++) {
        uint64_t prompt = o->prompt.offsets[row + 1] - o->prompt.offsets[row];
        r.offsets[row + 1] = total += j->length[row] - prompt;
    }
    r.tokens = malloc((total + 1) * sizeof *r.tokens);
    r.logprobs = malloc((total + 1) * sizeof *r.logprobs);
    r.finish = malloc(o->rows + (size_t)1);
    if (!r.offsets || !r.tokens || !r.logprobs || !r.finish) {
        dray__generation_free(&r);
        return dray__nomem(error);
    }
    for (uint32_t row = 0; row < o->rows; row++) {
        uint64_t count = r.offsets[row + 1] - r.offsets[row];
        uint64_t from = j->base[row] + j->length[row] - count;
        memcpy(r.tokens + r.offsets[row], j->tokens + from, count * sizeof *r.tokens);
        memcpy(r.logprobs + r.offsets[row], j->logprobs + from, count * sizeof *r.logprobs);
    }
    memcpy(r.finish, j->finish, o->rows);
    *out = r;
    return DRAY_OK;
}

int dray__generate(dray__generator *g, const dray__generate_options *options, dray__generation *out,
                   dray_error *error)
{
    int code = check_options(&g->model.config, options, error);
    if (code != DRAY_OK)
        return code;
    job j = {.g = g, .options = options};
    code = job_begin(&j, error);
    for (bool prompts = true; code == DRAY_OK && j.active_count > 0 && !j.stopped;
         prompts = false) {
        code = advance(&j, prompts, error);
        if (code == DRAY_OK)
            code = sample(&j, error);
        drop_finished(&j);
    }
    if (code == DRAY_OK)
        code = job_result(&j, out, error);
    job_free(&j);
    return code;
}

void dray__generation_free(dray__generation *generation)
{
    free(generation->offsets);
    free(generation->tokens);
    free(generation->logprobs);
    free(generation->finish);
    *generation = (dray__generation){0};
}

/* ---- scores ---------------------------------------------------------------------------------- */

int dray__generator_logprobs(dray__generator *g, const dray__sequences *sequences,
                             double temperature, float *logprobs, float *entropy, dray_error *error)
{
    if (!(temperature > 0) || isinf(temperature))
        return dray__fail(error, DRAY_EINVALID, "log-probs: temperature %g", temperature);
    int code = dray__sequences_check(&g->model.config, sequences, error);
    if (code == DRAY_OK)
        code = dray__model_reach(&g->model, dray__sequences_longest(sequences), error);
    if (code != DRAY_OK)
        return code;
    return dray__score(&g->model, &g->state, sequences, 0, sequences->rows, temperature, logprobs,
                       entropy, error);
}

int dray__generator_logits(dray__generator *g, const int32_t *tokens, uint64_t count, float *out,
                           dray_error *error)
{
    const dray__model *m = &g->model;
    uint64_t offsets[2] = {0, count}, pieces[DRAY__GROUP_MAX_WORLD];
    dray__sequences sequence = {1, {tokens, offsets}, {tokens, (uint64_t[2]){0, 0}}};
    int code = dray__sequences_check(&m->config, &sequence, error);
    if (code == DRAY_OK)
        code = dray__model_reach(&g->model, (int64_t)count, error);
    dray__batch batch = {.rows = 1, .tokens = (int64_t)count, .ids = tokens, .offsets = offsets};
    if (code == DRAY_OK)
        code = dray__forward(m, &batch, NULL, &g->state, error);
    if (code != DRAY_OK)
        return code;
    if (!m->group) {
        dray__head(m, g->state.hidden, batch.tokens, out);
        return DRAY_OK;
    }
    size_t width = (size_t)m->config.vocab_size, row = (size_t)m->vocab_rows * sizeof(float);
    float *own = malloc(count * row + 1), *all = malloc(count * width * sizeof *all + 1);
    if (own && all) {
        dray__head(m, g->state.hidden, batch.tokens, own);
        dray__model_shares(m, pieces);
        for (uint32_t rank = 0; rank < m->world; rank++)
            pieces[rank] *= count * sizeof *all;
        code = dray__group_all_gather(m->group, own, pieces, all, DRAY_WAIT_DEFAULT, error);
    } else {
        code = dray__nomem(error);
    }
    size_t column = 0, at = 0;
    for (uint32_t rank = 0; code == DRAY_OK && rank < m->world; rank++) {
        size_t columns = pieces[rank] / (count * sizeof *all);
        for (uint64_t i = 0; i < count; i++, at += columns)
            memcpy(out + i * width + column, all + at, columns * sizeof *out);
        column += columns;
    }
    free(own);
    free(all);
    return code;
}
