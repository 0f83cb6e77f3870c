#include "control/limits.h"

#include "base/error.h"
#include "base/words.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NAMES = 6, WORD = 63 };

static const char *const names[NAMES] = {"sessions", "queues",      "rows",
                                         "bytes",    "table-bytes", "leases"};

/* Parses "64" or "64KiB", but not "1.5". */
static int parse_number(const char *text, uint64_t *out)
{
    static const char *const units[] = {"", "KiB", "MiB", "GiB", "TiB"};
    char *end;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    if (!isdigit((unsigned char)text[0]) || errno || !number)
        return -1;
    for (unsigned i = 0; i < sizeof units / sizeof *units; i++)
        if (strcmp(end, units[i]) == 0 &&
            !__builtin_mul_overflow((uint64_t)number, UINT64_C(1) << (10 * i), out))
            return 0;
    return -1;
}

static int parse_one(const char *word, size_t length, uint64_t *const values[NAMES],
                     dray_error *error)
{
    char text[WORD + 1], hint[200];
    if (length > WORD)
        length = WORD;
    memcpy(text, word, length);
    text[length] = 0;
    char *equals = strchr(text, '=');
    if (!equals)
        return dray__fail(error, DRAY_EINVALID, "limit '%s': NAME=NUMBER expected", text);
    *equals = 0;
    for (int i = 0; i < NAMES; i++) {
        if (strcmp(text, names[i]) != 0)
            continue;
        if (parse_number(equals + 1, values[i]) == 0)
            return DRAY_OK;
        return dray__fail(error, DRAY_EINVALID,
                          "limit %s: a whole number from 1, or with KiB, MiB, GiB, TiB, expected, "
                          "found '%s'",
                          text, equals + 1);
    }
    return dray__fail(error, DRAY_EINVALID, "there is no limit '%s'%s", text,
                      dray__word_hint_or_all(text, names, NAMES, hint, sizeof hint));
}

int dray__limits_parse(const char *text, dray__limits *out, dray_error *error)
{
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    uint64_t memory = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : UINT64_C(1) << 33;
    *out = (dray__limits){.sessions = 4096,
                          .queues = 1024,
                          .rows = UINT64_C(1) << 27,
                          .bytes = memory,
                          .table_bytes = memory / 8,
                          .leases = 1024};
    uint64_t *const values[NAMES] = {&out->sessions, &out->queues,      &out->rows,
                                     &out->bytes,    &out->table_bytes, &out->leases};
    int rc = DRAY_OK;
    for (const char *word = text; word && *word && !rc;) {
        size_t length = strcspn(word, ",");
        rc = parse_one(word, length, values, error);
        word += length + (word[length] == ',');
    }
    return rc;
}
