/* Finds out whether a role is ready. Its `ready:` names a file (a relative path is below the run's
 * folder), and the role is ready when that file is another one than at the role's start, or was
 * written since; its time is not compared with a clock. Or it is http://HOST:PORT/PATH, with a
 * numeric host or localhost, and the role is ready when GET is answered with a status from 200 to
 * 299. A probe never waits; the caller asks again. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <sys/stat.h>

typedef struct dray__probe {
    int fd; /* of the request that is under way; -1 for none */
    bool sent;
    int64_t begun_ns;
    bool there;         /* the file was there at the role's start, */
    struct stat before; /* and was this one */
} dray__probe;

/* Returns 0, or DRAY_EINVALID when it is neither a file nor such a URL. "" is fine. */
int dray__probe_check(const char *ready, dray_error *error);
/* Called before the role is started. folder is the run's. */
void dray__probe_begin(dray__probe *probe, const char *ready, const char *folder);
/* Returns true when the role is ready. */
bool dray__probe_ask(dray__probe *probe, const char *ready, const char *folder);
void dray__probe_end(dray__probe *probe);
