#include "run/process.h"

#include "base/error.h"

#include <signal.h>
#include <sys/resource.h>

enum { DESCRIPTORS = 1 << 20 };

/* Raises the limit of descriptors as far as the kernel allows. A keeper holds one for each chunk of
 * samples, and each listener may use a share of them (base/callers.h). */
static void raise_descriptors(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= DESCRIPTORS)
        return;
    limit.rlim_cur = limit.rlim_max < DESCRIPTORS ? limit.rlim_max : DESCRIPTORS;
    setrlimit(RLIMIT_NOFILE, &limit);
}

int dray__process_may_open(unsigned least, dray_error *error)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= least)
        return DRAY_OK;
    return dray__fail(error, DRAY_ESYS,
                      "this process may open %llu files (ulimit -n), at least %u expected",
                      (unsigned long long)limit.rlim_cur, least);
}

bool dray__process_ignores_hangups(void)
{
    struct sigaction is;
    return sigaction(SIGHUP, NULL, &is) == 0 && is.sa_handler == SIG_IGN;
}

void dray__process_begin(void)
{
    signal(SIGPIPE, SIG_IGN);
    raise_descriptors();
}
