/* Data source tool: "3+9+4=" is answered a sum at a time, "3+9=12+4=16". A model that asks the
 * calculator (tool.kind) for what stands behind each "=" has to copy digits, and to know when it is
 * through. Chains of `data.steps` sums at most; short ones are more frequent. */
#include "run/data_source.h"

#include "base/random.h"

#include <stdio.h>
#include <string.h>

typedef struct sums {
    uint64_t seed, steps;
} sums;

/* Digits of the largest sum: steps + 1 nines. */
static int64_t digits(int64_t steps)
{
    int64_t count = 1;
    for (int64_t rest = 9 * (steps + 1); rest > 9; rest /= 10)
        count++;
    return count;
}

/* Bytes of the longest: a digit and a sign a sum, and one before; "+9=" and the sum. */
static dray__data_bytes longest(int64_t steps)
{
    return (dray__data_bytes){2 * steps + 2, 1 + steps * (3 + digits(steps))};
}

static dray__data_bytes tool_longest(const dray__job *job)
{
    return longest(job->data.steps);
}

static int tool_open(void *state, const dray__job *job, dray_error *error)
{
    sums *data = state;
    (void)error;
    *data = (sums){(uint64_t)job->seed, (uint64_t)job->data.steps};
    return DRAY_OK;
}

static void draw(const void *state, uint64_t seed, uint64_t stream, uint64_t first, char *prompt,
                 char *answer)
{
    const sums *data = state;
    uint64_t word = dray__random_u64(seed, stream, first);
    uint64_t steps = 1 + (word >> 32) % (1 + (word & UINT32_MAX) % data->steps);
    int sum = 1 + (int)(dray__random_u64(seed, stream, first + 1) % 9);
    char *p = prompt + sprintf(prompt, "%d", sum), *a = answer + sprintf(answer, "%d", sum);
    for (uint64_t i = 0; i < steps; i++) {
        int digit = 1 + (int)(dray__random_u64(seed, stream, first + 2 + i) % 9);
        sum += digit;
        p += sprintf(p, "+%d", digit);
        a += sprintf(a, "+%d=%d", digit, sum);
    }
    strcpy(p, "=");
}

static int tool_get(const void *state, dray__split split, uint64_t index, char **prompt,
                    char **answer, dray_error *error)
{
    const sums *data = state;
    dray__data_bytes sizes = longest((int64_t)data->steps);
    sizes.prompt++;
    sizes.answer++;
    return dray__data_find(state, draw, data->steps + 2, data->seed, split, index, sizes, prompt,
                           answer, error);
}

const dray__data_source dray__source_tool = {
    .size = sizeof(sums), .open = tool_open, .get = tool_get, .longest = tool_longest};
