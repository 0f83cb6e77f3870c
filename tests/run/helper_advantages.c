/* Advantages as a program for tests in Python: reads one JSON object a line, {"method": NAME,
 * "group": n, "divide": bool, "rewards": [...], "lengths": [...], "excluded": [...] or null}, and
 * prints the advantages as a list a line. With "values" beside them, and "gamma" and "lambda", it
 * is GAE's, and the returns follow. */
#include "run/desk/advantage.h"

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

static void print(const float *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        printf("%s%.9g", i ? ", " : "[", (double)values[i]);
    puts("]");
}

static void answer_gae(const json_t *asked, dray__rewarded *in)
{
    const json_t *given = json_object_get(asked, "values");
    size_t count = json_array_size(given);
    float *values = calloc(3 * count + 1, sizeof *values), *advantages = values + count;
    for (size_t i = 0; i < count; i++)
        values[i] = (float)json_number_value(json_array_get(given, i));
    const json_t *mask = json_object_get(asked, "mask");
    int32_t *made = json_is_array(mask) ? calloc(count + 1, sizeof *made) : NULL;
    for (size_t i = 0; made && i < count; i++)
        made[i] = (int32_t)json_integer_value(json_array_get(mask, i));
    in->mask = made;
    in->values = values;
    in->gamma = json_number_value(json_object_get(asked, "gamma"));
    in->lambda = json_number_value(json_object_get(asked, "lambda"));
    find("gae")->compute(in, advantages, advantages + count);
    print(advantages, 2 * count);
    free(values);
    free(made);
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
    if (json_object_get(asked, "values")) {
        answer_gae(asked, &in);
    } else {
        find(json_string_value(json_object_get(asked, "method")))->compute(&in, to, NULL);
        print(to, rows);
    }
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
