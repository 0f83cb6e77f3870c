#include "run/data/data_source.h"

#include "base/error.h"
#include "base/random.h"
#include "run/job/model.h"

#include <stdlib.h>

#define SOURCE(upper, lower) [DRAY__SOURCE_##upper] = &dray__source_##lower,
static const dray__data_source *const sources[] = {DRAY__SOURCES(SOURCE)};
#undef SOURCE

struct dray__data {
    const dray__data_source *source;
    const dray__job *job;
    max_align_t state[];
};

uint64_t dray__data_stream(dray__split split)
{
    static const uint64_t streams[] = {DRAY__STREAM_TRAIN, DRAY__STREAM_WARMUP, DRAY__STREAM_EVAL};
    return streams[split];
}

bool dray__data_held_out(uint64_t number)
{
    return dray__random_u64(DRAY__SPLIT_SEED, DRAY__STREAM_SPLIT, number) % 8 == 0;
}

/* FNV-1a (Fowler, Noll and Vo) of a prompt. The number decides to which split the prompt
 * belongs. */
static uint64_t number_of(const char *prompt)
{
    uint64_t hash = 14695981039346656037u;
    for (const char *p = prompt; *p; p++)
        hash = (hash ^ (uint8_t)*p) * 1099511628211u;
    return hash;
}

enum { TRIES = 1024 };

/* The first chain that is drawn for the index and belongs to the split. */
static int get_chain(const dray__data *data, dray__split split, uint64_t index, char **prompt,
                     char **answer, dray_error *error)
{
    bool held = split == DRAY__SPLIT_EVAL;
    uint64_t seed = held ? DRAY__SPLIT_SEED : (uint64_t)data->job->seed;
    uint64_t most = (uint64_t)data->job->data.steps, first = index * (most + 2);
    dray__data_bytes sizes = data->source->longest_chain(data->job->data.steps);
    *prompt = malloc((size_t)sizes.prompt + 1);
    *answer = malloc((size_t)sizes.answer + 1);
    if (!*prompt || !*answer) {
        free(*prompt);
        free(*answer);
        return dray__nomem(error);
    }
    for (uint64_t try = 0; try < TRIES; try++) {
        uint64_t stream = dray__data_stream(split) + (try << 8);
        uint64_t word = dray__random_u64(seed, stream, first);
        uint64_t steps = 1 + (word >> 32) % (1 + (word & UINT32_MAX) % most);
        data->source->draw(steps, seed, stream, first + 1, *prompt, *answer);
        if (dray__data_held_out(number_of(*prompt)) == held)
            break;
    }
    return DRAY_OK;
}

dray__data_bytes dray__data_longest(const dray__job *job)
{
    const dray__data_source *source = sources[job->data.source];
    return source->draw      ? source->longest_chain(job->data.steps)
           : source->longest ? source->longest(job)
                             : (dray__data_bytes){0, 0};
}

int dray__data_open(const dray__job *job, dray__data **out, dray_error *error)
{
    const dray__data_source *source = sources[job->data.source];
    dray__data *data = calloc(1, sizeof(*data) + source->size);
    if (!data)
        return dray__nomem(error);
    data->source = source;
    data->job = job;
    int rc = source->open ? source->open(data->state, job, error) : DRAY_OK;
    if (rc)
        dray__data_close(data);
    else
        *out = data;
    return rc;
}

void dray__data_close(dray__data *data)
{
    if (data && data->source->close)
        data->source->close(data->state);
    free(data);
}

int dray__data_get(const dray__data *data, dray__split split, uint64_t index, char **prompt,
                   char **answer, dray_error *error)
{
    return data->source->draw ? get_chain(data, split, index, prompt, answer, error)
                              : data->source->get(data->state, split, index, prompt, answer, error);
}

int dray__data_check(const dray__job *job, dray_error *error)
{
    dray__data *data = NULL;
    dray__tokenizer *tokenizer = NULL;
    dray_model_config config;
    dray_error inner;
    int rc = dray__job_tokenizer(job, &tokenizer, &inner);
    if (!rc)
        rc = dray__job_model_config(job, tokenizer, &config, &inner);
    if (rc) /* the message of any error names the job's data files */
        rc = dray__fail(error, DRAY_EINVALID, "model.tokenizer: %s", inner.message);
    if (!rc && sources[job->data.source]->check)
        rc = dray__data_open(job, &data, error);
    if (!rc && data)
        rc =
            data->source->check(data->state, job, tokenizer, (uint64_t)config.max_positions, error);
    dray__data_close(data);
    dray__tokenizer_close(tokenizer);
    return rc;
}
