/* Finds out whether a role is ready. Its `ready:` names a file (a relative path is below the run's
 * folder), and the role is ready when that was written since its start; or it is
 * http://HOST:PORT/PATH, with a numeric host or localhost, and the role is ready when GET is
 * answered with a status from 200 to 299. A probe never waits; the caller asks again. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <time.h>

typedef struct dray__probe {
    int fd; /* of the request that is under way; -1 for none */
    bool sent;
    int64_t begun_ns;
} dray__probe;

/* Returns 0, or DRAY_EINVALID when it is neither a file nor such a URL. "" is fine. */
int dray__probe_check(const char *ready, dray_error *error);
/* Returns true when the role is ready. folder is the run's; since is when the role was started. */
bool dray__probe_ask(dray__probe *probe, const char *ready, const char *folder,
                     struct timespec since);
void dray__probe_end(dray__probe *probe);
