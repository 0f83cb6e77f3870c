/* A folder with a config.json, for the tests of a suite. */
#pragma once

#include "suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char folder[64];

static const char *config_file(const char *text)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
    return path;
}

FIXTURE(make_folder)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/dray-config-XXXXXX",
             tmp && strlen(tmp) < 30 ? tmp : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

FIXTURE(remove_folder)
{
    unlink(config_file(""));
    return rmdir(folder);
}
