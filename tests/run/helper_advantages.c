/* Advantages as a program for tests in Python: reads one JSON object a line, {"method": NAME,
 * "group": n, "divide": bool, "rewards": [...], "lengths": [...], "excluded": [...] or null}, and
 * prints the advantages as a list a line. */
#include "run/advantage.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const dray__advantage *find(const char *name)
{
    const dray__advantage *found = dray__advantages;
    while (strcmp(found->name, name) != 0)
        found++;
    return found;
}

static void answer(const json_t *asked)
{
    const json_t *rewards = json_object_get(asked, "rewards"),
                 *lengths = json_object_get(asked, "lengths"),
                 *excluded = json_object_get(asked, "excluded");
    size_t rows = json_array_size(rewards);
    float *from = calloc(rows + 1, sizeof *from), *to = calloc(rows + 1, sizeof *to);
    uint64_t *offsets = calloc(rows + 1, sizeof *offsets);
    bool *flags = calloc(rows + 1, sizeof *flags);
    for (size_t i = 0; i < rows; i++) {
        from[i] = (float)json_number_value(json_array_get(rewards, i));
        offsets[i + 1] = offsets[i] + (uint64_t)json_integer_value(json_array_get(lengths, i));
        flags[i] = json_is_true(json_array_get(excluded, i));
    }
    dray__rewarded in = {.rows = (uint32_t)rows,
                         .group = (uint32_t)json_integer_value(json_object_get(asked, "group")),
                         .rewards = from,
                         .offsets = offsets,
                         .excluded = json_is_array(excluded) ? flags : NULL,
                         .divide = json_is_true(json_object_get(asked, "divide"))};
    find(json_string_value(json_object_get(asked, "method")))->compute(&in, to);
    for (size_t i = 0; i < rows; i++)
        printf("%s%.9g", i ? ", " : "[", (double)to[i]);
    puts("]");
    free(from);
    free(to);
    free(offsets);
    free(flags);
}

int main(void)
{
    json_t *asked;
    while ((asked = json_loadf(stdin, JSON_DISABLE_EOF_CHECK, NULL))) {
        answer(asked);
        json_decref(asked);
    }
    return 0;
}
