/* Data source arithmetic: "3+9-4=" is answered by the results on the way, "12 8": what a step adds
 * or takes away is a digit, and what comes out has one or two. Chains of `data.steps` steps at
 * most; short ones are more frequent, so that answers differ much in length. */
#include "run/data_source.h"

#include "base/error.h"
#include "base/random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct arithmetic {
    uint64_t seed, steps;
} arithmetic;

enum { MOST = 99, TRIES = 1024 };

/* Bytes of the longest ones: a digit and a sign a step, and a digit more; two digits and a blank.
 */
static dray__data_bytes arithmetic_longest(const dray__job *job)
{
    return (dray__data_bytes){2 * job->data.steps + 2, 3 * job->data.steps - 1};
}

static int arithmetic_open(void *state, const dray__job *job, dray_error *error)
{
    arithmetic *data = state;
    (void)error;
    *data = (arithmetic){(uint64_t)job->seed, (uint64_t)job->data.steps};
    return DRAY_OK;
}

/* Draws one chain; words of the stream from `first` on. Returns a number that stands for it: FNV-1a
 * (Fowler, Noll and Vo) of its prompt. */
static uint64_t draw(const arithmetic *data, uint64_t seed, uint64_t stream, uint64_t first,
                     char *prompt, char *answer)
{
    uint64_t word = dray__random_u64(seed, stream, first);
    uint64_t steps = 1 + (word >> 32) % (1 + (word & UINT32_MAX) % data->steps),
             hash = 14695981039346656037u;
    int64_t result = 1 + (int64_t)(dray__random_u64(seed, stream, first + 1) % 9);
    char *p = prompt + sprintf(prompt, "%lld", (long long)result), *a = answer;
    for (uint64_t i = 0; i < steps; i++) {
        word = dray__random_u64(seed, stream, first + 2 + i);
        int64_t digit = 1 + (int64_t)((word >> 1) % 9);
        bool plus = result < digit || (word & 1 && result + digit <= MOST);
        result += plus ? digit : -digit;
        p += sprintf(p, "%c%lld", plus ? '+' : '-', (long long)digit);
        a += sprintf(a, "%s%lld", i ? " " : "", (long long)result);
    }
    strcpy(p, "=");
    for (p = prompt; *p; p++)
        hash = (hash ^ (uint8_t)*p) * 1099511628211u;
    return hash;
}

/* The first chain of the index's words that belongs to the split. */
static int arithmetic_get(const void *state, dray__split split, uint64_t index, char **prompt,
                          char **answer, dray_error *error)
{
    const arithmetic *data = state;
    bool held = split == DRAY__SPLIT_EVAL;
    *prompt = malloc(2 * data->steps + 3);
    *answer = malloc(3 * data->steps);
    if (!*prompt || !*answer) {
        free(*prompt);
        free(*answer);
        return dray__nomem(error);
    }
    for (uint64_t try = 0; try < TRIES; try++)
        if (dray__data_held_out(draw(data, held ? DRAY__SPLIT_SEED : data->seed,
                                     dray__data_stream(split) + (try << 8),
                                     index * (data->steps + 2), *prompt, *answer)) == held)
            break;
    return DRAY_OK;
}

const dray__data_source dray__source_arithmetic = {.size = sizeof(arithmetic),
                                                   .open = arithmetic_open,
                                                   .get = arithmetic_get,
                                                   .longest = arithmetic_longest};
