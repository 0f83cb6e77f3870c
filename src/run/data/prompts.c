#include "run/data/prompts.h"

#include "base/error.h"
#include "run/data/samples.h"

#include <stdlib.h>
#include <string.h>

const dray__partition_kind dray__partition_of_step = {"step", "prompt", "answer",
                                                      DRAY__SPLIT_TRAIN};
const dray__partition_kind dray__partition_of_eval = {"eval", "eval_prompt", "eval_answer",
                                                      DRAY__SPLIT_EVAL};

uint64_t dray__prompt_index(const dray__job *job, const dray__partition_kind *kind, int64_t step,
                            uint32_t group)
{
    bool eval = kind == &dray__partition_of_eval;
    return (eval ? 0 : (uint64_t)(step - 1) * (uint64_t)job->rollout.prompts) + group;
}

void dray__prompts_free(dray__prompts *p)
{
    free(p->prompt_offsets);
    free(p->answer_offsets);
    free(p->prompt);
    free(p->answer);
}

static int append(void **to, const void *from, uint64_t have, uint64_t more, size_t width,
                  dray_error *error)
{
    void *grown = realloc(*to, (have + more) * width + 1);
    if (!grown)
        return dray__nomem(error);
    *to = grown;
    memcpy((char *)grown + have * width, from, more * width);
    return DRAY_OK;
}

static int add_prompt(dray__prompts *p, const dray__tokenizer *tokenizer, const char *prompt,
                      const char *answer, dray_error *error)
{
    int32_t *tokens = NULL;
    uint64_t count = 0, at = p->prompt_offsets[p->count], letters = p->answer_offsets[p->count],
             length = strlen(answer);
    int rc = dray__prompt_tokens(tokenizer, prompt, &tokens, &count, error);
    if (!rc)
        rc = append((void **)&p->prompt, tokens, at, count, sizeof(*tokens), error);
    if (!rc)
        rc = append((void **)&p->answer, answer, letters, length, 1, error);
    free(tokens);
    p->count++;
    p->prompt_offsets[p->count] = at + count;
    p->answer_offsets[p->count] = letters + length;
    if (4 * count + length > p->longest)
        p->longest = 4 * count + length;
    return rc;
}

int dray__prompts_make(const dray__data *data, const dray__tokenizer *tokenizer, dray__split split,
                       uint64_t first, const uint32_t *groups, uint32_t count, dray__prompts *out,
                       dray_error *error)
{
    *out = (dray__prompts){.prompt_offsets = calloc((size_t)count + 1, sizeof(uint64_t)),
                           .answer_offsets = calloc((size_t)count + 1, sizeof(uint64_t))};
    int rc = out->prompt_offsets && out->answer_offsets ? DRAY_OK : dray__nomem(error);
    for (uint32_t i = 0; i < count && !rc; i++) {
        char *prompt, *answer;
        rc = dray__data_get(data, split, first + (groups ? groups[i] : i), &prompt, &answer, error);
        if (rc)
            break;
        rc = add_prompt(out, tokenizer, prompt, answer, error);
        free(prompt);
        free(answer);
    }
    if (rc)
        dray__prompts_free(out);
    return rc;
}

void dray__prompts_columns(const dray__prompts *p, const dray__partition_kind *kind,
                           dray_column_data out[2])
{
    out[0] = dray__ragged_column(kind->prompt, DRAY_I32, p->prompt_offsets, p->prompt);
    out[1] = dray__ragged_column(kind->answer, DRAY_U8, p->answer_offsets, p->answer);
    out[1].content = DRAY_CONTENT_STRING;
}
