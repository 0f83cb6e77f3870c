/* Data source arithmetic: "3+9-4=" is answered by the results on the way, "12 8": what a step adds
 * or takes away is a digit, and what comes out has one or two. Chains of `data.steps` steps at
 * most; short ones are more frequent, so that answers differ much in length. */
#include "run/data_source.h"

#include "base/random.h"

#include <stdio.h>
#include <string.h>

typedef struct arithmetic {
    uint64_t seed, steps;
} arithmetic;

enum { MOST = 99 };

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

static void draw(const void *state, uint64_t seed, uint64_t stream, uint64_t first, char *prompt,
                 char *answer)
{
    const arithmetic *data = state;
    uint64_t word = dray__random_u64(seed, stream, first);
    uint64_t steps = 1 + (word >> 32) % (1 + (word & UINT32_MAX) % data->steps);
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
}

static int arithmetic_get(const void *state, dray__split split, uint64_t index, char **prompt,
                          char **answer, dray_error *error)
{
    const arithmetic *data = state;
    int64_t steps = (int64_t)data->steps;
    return dray__data_find(state, draw, data->steps + 2, data->seed, split, index,
                           (dray__data_bytes){2 * steps + 3, 3 * steps}, prompt, answer, error);
}

const dray__data_source dray__source_arithmetic = {.size = sizeof(arithmetic),
                                                   .open = arithmetic_open,
                                                   .get = arithmetic_get,
                                                   .longest = arithmetic_longest};
