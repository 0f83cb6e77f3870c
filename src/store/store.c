/* The list of stores, and the code that all of them share. */
#include "store/store.h"

#include "base/clock.h"
#include "base/error.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const dray__store *const stores[] = {&dray__store_s3};

const dray__store *dray__store_of(const char *path)
{
    for (size_t i = 0; path && i < sizeof stores / sizeof *stores; i++)
        if (strncmp(path, stores[i]->scheme, strlen(stores[i]->scheme)) == 0)
            return stores[i];
    return &dray__store_files;
}

int dray__store_text(const char *path, size_t most, char **text, size_t *size, dray_error *error)
{
    const dray__store *store = dray__store_of(path);
    dray__store_file file;
    int rc = store->open(path, &file, error);
    if (rc)
        return rc;
    char *out = NULL;
    if (file.bytes > most)
        rc = dray__fail(error, DRAY_EFORMAT, "%.300s: %" PRIu64 " bytes, at most %zu expected",
                        path, file.bytes, most);
    else if (!(out = malloc((size_t)file.bytes + 1)))
        rc = dray__nomem(error);
    else
        rc = store->read(&file, out, file.bytes, 0, NULL, error);
    if (rc) {
        free(out);
    } else {
        out[file.bytes] = 0;
        *text = out;
        *size = (size_t)file.bytes;
    }
    store->close(&file);
    return rc;
}

bool dray__store_step_parse(const char *name, uint64_t *version, unsigned *again)
{
    char rest[16] = "", text[64];
    *again = 1;
    if (sscanf(name, "step-%" SCNu64 "%15s", version, rest) < 1)
        return false;
    if (rest[0] && (sscanf(rest, ".%u", again) != 1 || *again < 2))
        return false;
    int n = snprintf(text, sizeof text, "step-%06" PRIu64, *version);
    if (rest[0])
        snprintf(text + n, sizeof text - (size_t)n, ".%u", *again);
    return strcmp(text, name) == 0;
}
