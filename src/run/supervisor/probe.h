/* Is a role ready? Its `ready:` is a file, below the run's folder where it is relative, that was
 * written since the role was started; or http://HOST:PORT/PATH, numeric or localhost, which answers
 * GET with a status from 200 to 299. Never waits: ask again. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <time.h>

typedef struct dray__probe {
    int fd; /* of a request that is under way; -1: none */
    bool sent;
    int64_t begun_ns;
} dray__probe;

/* Returns 0, or DRAY_EINVALID when it is neither a file nor such a URL. "" is fine. */
int dray__probe_check(const char *ready, dray_error *error);
/* folder: the run's; since: when the role was started. */
bool dray__probe_ask(dray__probe *probe, const char *ready, const char *folder,
                     struct timespec since);
void dray__probe_end(dray__probe *probe);
