/* Data source tool: "3+9+4=" is answered one sum at a time, "3+9=12+4=16". A model that asks the
 * calculator (tool.kind) for the result after each "=" must copy digits, and know when it has
 * finished. Chains have at most `data.steps` sums; short ones are more frequent. */
#include "run/data/data_source.h"

#include "base/random.h"

#include <stdio.h>
#include <string.h>

/* Returns the number of digits of the largest sum, which is that of steps + 1 nines. */
static int64_t digits(int64_t steps)
{
    int64_t count = 1;
    for (int64_t rest = 9 * (steps + 1); rest > 9; rest /= 10)
        count++;
    return count;
}

/* The longest prompt has a digit, then a sign and a digit for each sum, and "="; the longest answer
 * has a digit, then "+9=" and the result for each sum. */
static dray__data_bytes longest(int64_t steps)
{
    return (dray__data_bytes){2 * steps + 2, 1 + steps * (3 + digits(steps))};
}

static void draw(uint64_t steps, uint64_t seed, uint64_t stream, uint64_t first, char *prompt,
                 char *answer)
{
    int sum = 1 + (int)(dray__random_u64(seed, stream, first) % 9);
    char *p = prompt + sprintf(prompt, "%d", sum), *a = answer + sprintf(answer, "%d", sum);
    for (uint64_t i = 0; i < steps; i++) {
        int digit = 1 + (int)(dray__random_u64(seed, stream, first + 1 + i) % 9);
        sum += digit;
        p += sprintf(p, "+%d", digit);
        a += sprintf(a, "+%d=%d", digit, sum);
    }
    strcpy(p, "=");
}

const dray__data_source dray__source_tool = {.longest_chain = longest, .draw = draw};
