/* A tokenizer as a program for test_tokenizer.py: helper PATH WHOLE, then one JSON array a line on
 * stdin: ["text"], to be encoded, or [1, 2, 3], to be decoded. Answers, one a line: the tokens; the
 * bytes in hexadecimal. An error is {"error": NAME, "message": TEXT}. */
#include "engine/tokenizer.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static dray__tokenizer *tokenizer;
static dray_error error;

static int failed(int rc)
{
    json_t *answer =
        json_pack("{s:s, s:s}", "error", dray_error_name(rc), "message", error.message);
    json_dumpf(answer, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(answer);
    return 1;
}

static int encode(const char *text, size_t size, bool whole)
{
    int32_t *tokens;
    size_t count;
    int rc = dray__tokenizer_encode(tokenizer, text, size, whole, &tokens, &count, &error);
    if (rc)
        return failed(rc);
    putchar('[');
    for (size_t i = 0; i < count; i++)
        printf(i ? ",%d" : "%d", tokens[i]);
    puts("]");
    free(tokens);
    return 0;
}

static int decode(const json_t *list)
{
    size_t count = json_array_size(list), size;
    int32_t *tokens = calloc(count + 1, sizeof *tokens);
    char *text;
    for (size_t i = 0; i < count; i++)
        tokens[i] = (int32_t)json_integer_value(json_array_get(list, i));
    int rc = dray__tokenizer_decode(tokenizer, tokens, count, &text, &size, &error);
    free(tokens);
    if (rc)
        return failed(rc);
    putchar('"');
    for (size_t i = 0; i < size; i++)
        printf("%02x", (unsigned char)text[i]);
    puts("\"");
    free(text);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    int rc = dray__tokenizer_open(argv[1], &tokenizer, &error);
    if (rc)
        return failed(rc);
    printf("{\"size\": %lld, \"end\": %d}\n", (long long)dray__tokenizer_size(tokenizer),
           dray__tokenizer_end(tokenizer));
    char *line = NULL;
    size_t room = 0;
    while (getline(&line, &room, stdin) > 0) {
        json_t *request = json_loads(line, JSON_ALLOW_NUL, NULL);
        const json_t *first = json_array_get(request, 0);
        if (json_is_string(first))
            encode(json_string_value(first), json_string_length(first), argv[2][0] == '1');
        else
            decode(request);
        json_decref(request);
    }
    free(line);
    dray__tokenizer_close(tokenizer);
    return 0;
}
