/* Data source arithmetic: "3+9-4=" is answered by the intermediate results, "12 8". A step adds or
 * subtracts a digit, and each result has one or two digits. Chains have at most `data.steps` steps;
 * short ones are more frequent, so that answers vary much in length. */
#include "run/data/data_source.h"

#include "base/random.h"

#include <stdio.h>
#include <string.h>

enum { MOST = 99 };

/* The longest prompt has a digit, a sign and a digit for each step, and "="; the longest answer has
 * two digits for each step, with blanks between them. */
static dray__data_bytes longest(int64_t steps)
{
    return (dray__data_bytes){2 * steps + 2, 3 * steps - 1};
}

static void draw(uint64_t steps, uint64_t seed, uint64_t stream, uint64_t first, char *prompt,
                 char *answer)
{
    int64_t result = 1 + (int64_t)(dray__random_u64(seed, stream, first) % 9);
    char *p = prompt + sprintf(prompt, "%lld", (long long)result), *a = answer;
    for (uint64_t i = 0; i < steps; i++) {
        uint64_t word = dray__random_u64(seed, stream, first + 1 + i);
        int64_t digit = 1 + (int64_t)((word >> 1) % 9);
        bool plus = result < digit || (word & 1 && result + digit <= MOST);
        result += plus ? digit : -digit;
        p += sprintf(p, "%c%lld", plus ? '+' : '-', (long long)digit);
        a += sprintf(a, "%s%lld", i ? " " : "", (long long)result);
    }
    strcpy(p, "=");
}

const dray__data_source dray__source_arithmetic = {.longest_chain = longest, .draw = draw};
