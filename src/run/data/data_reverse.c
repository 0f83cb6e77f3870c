/* Data source reverse: "1234=" is answered by "4321". */
#include "run/data/data_source.h"

#include "base/error.h"
#include "base/random.h"

#include <stdlib.h>
#include <string.h>

typedef struct reverse {
    uint64_t seed;
    uint32_t digits;
    uint64_t *held; /* held-out numbers, shuffled; NULL when there are too many to list */
    uint64_t held_count;
} reverse;

enum { LISTED_DIGITS = 6 };

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

static int list_held_out(reverse *data, dray_error *error)
{
    if (data->digits > LISTED_DIGITS)
        return DRAY_OK;
    uint64_t all = power_of_ten(data->digits);
    data->held = malloc(all * sizeof(*data->held));
    if (!data->held)
        return dray__nomem(error);
    for (uint64_t number = 0; number < all; number++)
        if (dray__data_held_out(number))
            data->held[data->held_count++] = number;
    shuffle(data->held, data->held_count, DRAY__SPLIT_SEED, DRAY__STREAM_EVAL);
    return DRAY_OK;
}

/* Returns the first number of the stream, from word `index` x 64 on, that belongs to the split. */
static uint64_t draw(const reverse *data, uint64_t stream, uint64_t index, bool held)
{
    uint64_t number = 0, all = power_of_ten(data->digits);
    for (uint64_t i = 0; i < 1024; i++) {
        number = dray__random_u64(data->seed, stream + (i << 8), index);
        number %= all;
        if (dray__data_held_out(number) == held)
            break;
    }
    return number;
}

static int reverse_get(const void *state, dray__split split, uint64_t index, char **prompt,
                       char **answer, dray_error *error)
{
    const reverse *data = state;
    uint64_t number;
    if (split == DRAY__SPLIT_EVAL)
        number = data->held_count ? data->held[index % data->held_count]
                                  : draw(data, DRAY__STREAM_EVAL, index, true);
    else
        number = draw(data, dray__data_stream(split), index, false);
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

static int reverse_open(void *state, const dray__job *job, dray_error *error)
{
    reverse *data = state;
    data->seed = (uint64_t)job->seed;
    data->digits = (uint32_t)job->data.digits;
    return list_held_out(data, error);
}

static void reverse_close(void *state)
{
    free(((reverse *)state)->held);
}

static dray__data_bytes reverse_longest(const dray__job *job)
{
    return (dray__data_bytes){job->data.digits + 1, job->data.digits};
}

const dray__data_source dray__source_reverse = {.size = sizeof(reverse),
                                                .open = reverse_open,
                                                .close = reverse_close,
                                                .get = reverse_get,
                                                .longest = reverse_longest};
