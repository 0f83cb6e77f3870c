/* The arguments of the programs bench/bench_*.c. */
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void usage(const char *part, FILE *out, int status)
{
    fprintf(out, "Usage: bench_%s [--json] [--strict] [--quick] [--repeat N]\n", part);
    exit(status);
}

static unsigned repeats_of(const char *part, const char *text)
{
    char *end = NULL;
    unsigned long n = text ? strtoul(text, &end, 10) : 0;
    if (!text || *end || n < 1 || n > 1000) {
        fprintf(stderr, "bench %s: --repeat: expected a number from 1 to 1000\n", part);
        exit(2);
    }
    return (unsigned)n;
}

bench *bench_open(int argc, char **argv, const char *part)
{
    bench_settings settings = {.repeats = 5};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0)
            settings.json = true;
        else if (strcmp(argv[i], "--strict") == 0)
            settings.strict = true;
        else if (strcmp(argv[i], "--quick") == 0)
            settings.quick = true;
        else if (strcmp(argv[i], "--repeat") == 0)
            settings.repeats = repeats_of(part, argv[++i]);
        else if (strcmp(argv[i], "--help") == 0)
            usage(part, stdout, 0);
        else
            usage(part, stderr, 2);
    }
    return bench_new(part, &settings);
}
