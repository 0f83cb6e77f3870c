#include "run/data.h"

#include "base/error.h"
#include "base/json.h"
#include "base/random.h"
#include "run/host.h"

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
    uint64_t count;
} list;

struct dray__data {
    uint64_t seed;
    int32_t source;
    uint32_t digits;
    list lines[2];  /* jsonl: training, held out */
    uint64_t *held; /* reverse: held-out numbers, shuffled; NULL: too many to list */
    uint64_t held_count;
};

/* Streams of random numbers; job seeds must not change what is held out. */
enum { STREAM_TRAIN = 11, STREAM_WARMUP = 12, STREAM_EVAL = 13, STREAM_SPLIT = 14 };
enum { SPLIT_SEED = 1, LISTED_DIGITS = 6 };

/* ---- reverse: "1234=" is answered by "4321" -------------------------------------------------- */

static bool held_out(uint64_t number)
{
    return dray__random_u64(SPLIT_SEED, STREAM_SPLIT, number) % 8 == 0;
}

static uint64_t power_of_ten(uint32_t digits)
{
    uint64_t value = 1;
    for (uint32_t i = 0; i < digits; i++)
        value *= 10;
    return value;
}

static void shuffle(uint64_t *items, uint64_t count, uint64_t seed, uint64_t stream)
{
    for (uint64_t i = count; i > 1; i--) {
        uint64_t j = dray__random_u64(seed, stream, i) % i, spare = items[i - 1];
        items[i - 1] = items[j];
        items[j] = spare;
    }
}

static int list_held_out(dray__data *data, dray_error *error)
{
    if (data->digits > LISTED_DIGITS)
        return DRAY_OK;
    uint64_t all = power_of_ten(data->digits);
    data->held = malloc(all * sizeof(*data->held));
    if (!data->held)
        return dray__nomem(error);
    for (uint64_t number = 0; number < all; number++)
        if (held_out(number))
            data->held[data->held_count++] = number;
    shuffle(data->held, data->held_count, SPLIT_SEED, STREAM_EVAL);
    return DRAY_OK;
}

/* The first number of the stream, from word `index` x 64 on, that belongs to the split. */
static uint64_t draw(const dray__data *data, uint64_t stream, uint64_t index, bool held)
{
    uint64_t number = 0, all = power_of_ten(data->digits);
    for (uint64_t i = 0; i < 1024; i++) {
        number = dray__random_u64(data->seed, stream + (i << 8), index);
        number %= all;
        if (held_out(number) == held)
            break;
    }
    return number;
}

static int reverse_get(const dray__data *data, dray__split split, uint64_t index, char **prompt,
                       char **answer, dray_error *error)
{
    uint64_t number;
    if (split == DRAY__SPLIT_EVAL)
        number = data->held_count ? data->held[index % data->held_count]
                                  : draw(data, STREAM_EVAL, index, true);
    else
        number =
            draw(data, split == DRAY__SPLIT_TRAIN ? STREAM_TRAIN : STREAM_WARMUP, index, false);
    *prompt = malloc(data->digits + 2);
    *answer = malloc(data->digits + 1);
    if (!*prompt || !*answer) {
        free(*prompt);
        free(*answer);
        return dray__nomem(error);
    }
    for (uint32_t i = 0; i < data->digits; i++, number /= 10) {
        char digit = (char)('0' + number % 10);
        (*prompt)[data->digits - 1 - i] = digit;
        (*answer)[i] = digit;
    }
    strcpy(*prompt + data->digits, "=");
    (*answer)[data->digits] = 0;
    return DRAY_OK;
}

/* ---- jsonl: {"prompt": "...", "answer": "..."} a line ---------------------------------------- */

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
    return dray__fail(error, DRAY_EFORMAT,
                      "%s: expected {\"prompt\": \"...\", \"answer\": \"...\"}, the prompt "
                      "not empty; found %s",
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
    const char *prompt = json_string_value(json_object_get(object, "prompt"));
    const char *answer = json_string_value(json_object_get(object, "answer"));
    if (!prompt || !answer || !prompt[0]) {
        rc = refuse_keys(object, what, error);
        json_decref(object);
        return rc;
    }
    if ((to->count & (to->count - 1)) == 0) {
        uint64_t room = to->count ? 2 * to->count : 64;
        pair *items = realloc(to->items, room * sizeof(*items));
        if (!items) {
            json_decref(object);
            return dray__nomem(error);
        }
        to->items = items;
    }
    pair *item = &to->items[to->count];
    item->line = number;
    item->prompt = strdup(prompt);
    item->answer = strdup(answer);
    json_decref(object);
    to->count++;
    return item->prompt && item->answer ? DRAY_OK : dray__nomem(error);
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
        if (line[strspn(line, " \t\r\n")])
            rc = add_line(to, line, (size_t)length, path, number, error);
    if (!rc && ferror(file))
        rc = dray__fail_errno(error, errno, "%s", path);
    if (!rc && !to->count)
        rc = dray__fail(error, DRAY_EFORMAT, "%s: expected at least one line, found none", path);
    free(line);
    fclose(file);
    return rc;
}

/* Place `index` of the shuffled file: a new order every time through. The order is a walk by a
 * stride that is coprime to the count, from a random start: no list of places is kept. */
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

static int jsonl_get(const dray__data *data, dray__split split, uint64_t index, char **prompt,
                     char **answer, dray_error *error)
{
    const list *from = &data->lines[split == DRAY__SPLIT_EVAL];
    uint64_t at =
        split == DRAY__SPLIT_EVAL
            ? index % from->count
            : shuffled(data->seed, split == DRAY__SPLIT_TRAIN ? STREAM_TRAIN : STREAM_WARMUP, index,
                       from->count);
    *prompt = strdup(from->items[at].prompt);
    *answer = strdup(from->items[at].answer);
    if (*prompt && *answer)
        return DRAY_OK;
    free(*prompt);
    free(*answer);
    return dray__nomem(error);
}

static int check_lines(const dray__job *job, const list *lines, const char *path,
                       uint64_t positions, dray_error *error)
{
    uint64_t most = (uint64_t)job->rollout.max_new_tokens;
    bool exact = job->reward.rule == DRAY__RULE_EXACT_MATCH;
    for (uint64_t i = 0; i < lines->count; i++) {
        const pair *item = &lines->items[i];
        uint64_t prompt = 1 + strlen(item->prompt), answer = strlen(item->answer) + 1;
        if (prompt + most > positions)
            return dray__fail(
                error, DRAY_EFORMAT,
                "%s:%llu: a prompt of %llu tokens (its bytes and the begin token) and "
                "%llu new ones expected to fit model.max_positions, %llu",
                path, (unsigned long long)item->line, (unsigned long long)prompt,
                (unsigned long long)most, (unsigned long long)positions);
        if (exact && answer > most)
            return dray__fail(error, DRAY_EFORMAT,
                              "%s:%llu: an answer of %llu tokens (its bytes and the end token) "
                              "expected within rollout.max_new_tokens, %llu: no response could "
                              "match it",
                              path, (unsigned long long)item->line, (unsigned long long)answer,
                              (unsigned long long)most);
    }
    return DRAY_OK;
}

int dray__data_check(const dray__job *job, dray_error *error)
{
    dray__data *data;
    dray_model_config config;
    if (job->data.source != DRAY__SOURCE_JSONL)
        return DRAY_OK;
    int rc = dray__job_model_config(job, &config, error);
    if (!rc)
        rc = dray__data_open(job, &data, error);
    if (rc)
        return rc;
    const char *const paths[] = {job->data.path, job->data.eval_path};
    for (int i = 0; i < 2 && !rc; i++)
        rc = check_lines(job, &data->lines[i], paths[i], (uint64_t)config.max_positions, error);
    dray__data_close(data);
    return rc;
}

/* ---- both ------------------------------------------------------------------------------------ */

int dray__data_open(const dray__job *job, dray__data **out, dray_error *error)
{
    dray__data *data = calloc(1, sizeof(*data));
    if (!data)
        return dray__nomem(error);
    data->seed = (uint64_t)job->seed;
    data->source = job->data.source;
    data->digits = (uint32_t)job->data.digits;
    int rc;
    if (data->source == DRAY__SOURCE_REVERSE) {
        rc = list_held_out(data, error);
    } else {
        rc = read_lines(&data->lines[0], job->data.path, error);
        if (!rc)
            rc = read_lines(&data->lines[1], job->data.eval_path, error);
    }
    if (rc)
        dray__data_close(data);
    else
        *out = data;
    return rc;
}

void dray__data_close(dray__data *data)
{
    if (!data)
        return;
    for (int i = 0; i < 2; i++) {
        for (uint64_t n = 0; n < data->lines[i].count; n++) {
            free(data->lines[i].items[n].prompt);
            free(data->lines[i].items[n].answer);
        }
        free(data->lines[i].items);
    }
    free(data->held);
    free(data);
}

int dray__data_get(const dray__data *data, dray__split split, uint64_t index, char **prompt,
                   char **answer, dray_error *error)
{
    return data->source == DRAY__SOURCE_REVERSE
               ? reverse_get(data, split, index, prompt, answer, error)
               : jsonl_get(data, split, index, prompt, answer, error);
}

uint64_t dray__data_eval_count(const dray__data *data)
{
    return data->source == DRAY__SOURCE_JSONL ? data->lines[1].count
           : data->held                       ? data->held_count
                                              : UINT64_MAX;
}
