/* Data source jsonl: two files with an object {"prompt": "...", "answer": "..."} on each line. */
#include "run/data/data_source.h"

#include "base/arena.h"
#include "base/error.h"
#include "base/json.h"
#include "base/random.h"
#include "run/data/samples.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct pair {
    char *prompt, *answer;
    uint64_t line; /* of its file, from 1 */
} pair;

typedef struct list {
    pair *items;
    uint64_t count, capacity;
} list;

typedef struct jsonl {
    uint64_t seed;
    list lines[2]; /* training, held out */
} jsonl;

static int refuse_keys(json_t *object, const char *what, dray_error *error)
{
    char found[160] = "";
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value)
    {
        size_t used = strlen(found);
        snprintf(found + used, sizeof(found) - used, "%s\"%.32s\"%s", used ? ", " : "", key,
                 json_is_string(value) ? "" : " (no text)");
    }
    return dray__fail(
        error, DRAY_EFORMAT,
        "%s: expected {\"prompt\": \"...\", \"answer\": \"...\"}, the prompt not empty; found %s",
        what, found[0] ? found : "no keys");
}

static int add_line(list *to, const char *text, size_t size, const char *path, uint64_t number,
                    dray_error *error)
{
    char what[512];
    snprintf(what, sizeof(what), "%s:%llu", path, (unsigned long long)number);
    json_t *object = NULL;
    int rc = dray__json_parse(text, size, what, &object, error);
    if (rc)
        return rc;
    const char *prompt = dray__json_string(object, "prompt");
    const char *answer = dray__json_string(object, "answer");
    if (!prompt || !answer || !prompt[0]) {
        rc = refuse_keys(object, what, error);
        json_decref(object);
        return rc;
    }
    pair *item = dray__append(&to->items, sizeof(*item), to->count, &to->capacity);
    if (item) {
        *item = (pair){strdup(prompt), strdup(answer), number};
        to->count++;
    }
    json_decref(object);
    return item && item->prompt && item->answer ? DRAY_OK : dray__nomem(error);
}

static int read_lines(list *to, const char *path, dray_error *error)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return errno == ENOENT ? dray__fail(error, DRAY_ENOENT, "%s: no such file", path)
                               : dray__fail_errno(error, errno, "%s", path);
    char *line = NULL;
    size_t room = 0;
    ssize_t length;
    int rc = DRAY_OK;
    for (uint64_t number = 1; !rc && (length = getline(&line, &room, file)) >= 0; number++)
        if (strspn(line, " \t\r\n") < (size_t)length) /* zero bytes are no blank line */
            rc = add_line(to, line, (size_t)length, path, number, error);
    if (!rc && ferror(file))
        rc = dray__fail_errno(error, errno, "%s", path);
    if (!rc && !to->count)
        rc = dray__fail(error, DRAY_EFORMAT, "%s: expected at least one line, found none", path);
    free(line);
    fclose(file);
    return rc;
}

/* Returns the line at `index` of the shuffled file. Each pass over the file has a new order. The
 * order is a random start and a stride that is coprime to the count, so no permutation is
 * stored. */
static uint64_t shuffled(uint64_t seed, uint64_t stream, uint64_t index, uint64_t count)
{
    uint64_t round = index / count, at = index % count;
    uint64_t start = dray__random_u64(seed, stream, 2 * round) % count;
    uint64_t stride = dray__random_u64(seed, stream, 2 * round + 1) % count;
    for (;; stride = (stride + 1) % count) {
        uint64_t a = stride ? stride : count, b = count;
        while (b) {
            uint64_t rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1)
            break;
        if (count == 1)
            return 0;
    }
    return (uint64_t)(((unsigned __int128)at * stride + start) % count);
}

static int jsonl_get(const void *state, dray__split split, uint64_t index, char **prompt,
                     char **answer, dray_error *error)
{
    const jsonl *data = state;
    const list *from = &data->lines[split == DRAY__SPLIT_EVAL];
    uint64_t at = split == DRAY__SPLIT_EVAL
                      ? index % from->count
                      : shuffled(data->seed, dray__data_stream(split), index, from->count);
    *prompt = strdup(from->items[at].prompt);
    *answer = strdup(from->items[at].answer);
    if (*prompt && *answer)
        return DRAY_OK;
    free(*prompt);
    free(*answer);
    return dray__nomem(error);
}

/* Counts the tokens of a prompt or an answer. */
static int count_tokens(const dray__tokenizer *tokenizer, const char *text, bool prompt,
                        uint64_t *count, dray_error *error)
{
    int32_t *tokens;
    int rc = prompt ? dray__prompt_tokens(tokenizer, text, &tokens, count, error)
                    : dray__answer_tokens(tokenizer, text, &tokens, count, error);
    if (!rc)
        free(tokens);
    return rc;
}

/* Returns whether a reward of the job, which may have several, is for the very answer. */
static bool is_matched(const dray__job *job)
{
    bool matched = !job->reward_count && job->reward.rule == DRAY__RULE_EXACT_MATCH;
    for (uint32_t i = 0; i < job->reward_count; i++)
        matched = matched || job->rewards[i].rule == DRAY__RULE_EXACT_MATCH;
    return matched;
}

/* `warms` says that the warm-up learns from these lines. */
static int check_lines(const dray__job *job, const dray__tokenizer *tokenizer, const list *lines,
                       bool warms, const char *path, uint64_t positions, dray_error *error)
{
    uint64_t most = (uint64_t)job->rollout.max_new_tokens, prompt, answer;
    bool exact = is_matched(job);
    for (uint64_t i = 0; i < lines->count; i++) {
        const pair *item = &lines->items[i];
        int rc = count_tokens(tokenizer, item->prompt, true, &prompt, error);
        if (!rc)
            rc = count_tokens(tokenizer, item->answer, false, &answer, error);
        if (rc)
            return rc;
        if (prompt + most > positions)
            return dray__fail(error, DRAY_EFORMAT,
                              "%s:%llu: a prompt of %llu tokens (the begin token among them) and "
                              "%llu new ones expected to fit model.max_positions, %llu",
                              path, (unsigned long long)item->line, (unsigned long long)prompt,
                              (unsigned long long)most, (unsigned long long)positions);
        if (warms && prompt + answer > positions)
            return dray__fail(
                error, DRAY_EFORMAT,
                "%s:%llu: a prompt and an answer of %llu tokens (those of begin and end among "
                "them) expected to fit model.max_positions, %llu, for the warm-up "
                "(warmup.max_steps)",
                path, (unsigned long long)item->line, (unsigned long long)(prompt + answer),
                (unsigned long long)positions);
        if (exact && answer > most)
            return dray__fail(
                error, DRAY_EFORMAT,
                "%s:%llu: an answer of %llu tokens (the end token among them) expected within "
                "rollout.max_new_tokens, %llu: no response could match it",
                path, (unsigned long long)item->line, (unsigned long long)answer,
                (unsigned long long)most);
    }
    return DRAY_OK;
}

static int jsonl_check(const void *state, const dray__job *job, const dray__tokenizer *tokenizer,
                       uint64_t positions, dray_error *error)
{
    const jsonl *data = state;
    const char *const paths[] = {job->data.path, job->data.eval_path};
    const dray__job_role *trainer = dray__job_role_of(job, "actor");
    bool warms = job->warmup.max_steps > 0 && trainer && !trainer->command[0];
    int rc = DRAY_OK;
    for (int i = 0; i < 2 && !rc; i++)
        rc = check_lines(job, tokenizer, &data->lines[i], i == 0 && warms, paths[i], positions,
                         error);
    return rc;
}

static int jsonl_open(void *state, const dray__job *job, dray_error *error)
{
    jsonl *data = state;
    data->seed = (uint64_t)job->seed;
    int rc = read_lines(&data->lines[0], job->data.path, error);
    return rc ? rc : read_lines(&data->lines[1], job->data.eval_path, error);
}

static void jsonl_close(void *state)
{
    const jsonl *data = state;
    for (int i = 0; i < 2; i++) {
        for (uint64_t n = 0; n < data->lines[i].count; n++) {
            free(data->lines[i].items[n].prompt);
            free(data->lines[i].items[n].answer);
        }
        free(data->lines[i].items);
    }
}

const dray__data_source dray__source_jsonl = {.size = sizeof(jsonl),
                                              .open = jsonl_open,
                                              .close = jsonl_close,
                                              .get = jsonl_get,
                                              .check = jsonl_check};
