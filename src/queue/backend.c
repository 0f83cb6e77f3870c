#include "queue/backend.h"

#include "base/error.h"

#include <dray/queue.h>

static const struct known {
    const char *name;
    const dray__backend_kind *kind;
    bool here;
} backends[] = {
    [DRAY_BACKEND_BUILTIN] = {"builtin", NULL, true},
#ifdef DRAY_HIREDIS
    [DRAY_BACKEND_REDIS] = {"redis", &dray__backend_redis, true},
#else
    [DRAY_BACKEND_REDIS] = {"redis", NULL, false},
#endif
};

int dray_queue_backend_built(int32_t backend)
{
    const dray__backend_kind *kind;
    return dray__backend_find(backend, &kind, NULL) == DRAY_OK;
}

const char *dray__backend_name(int32_t backend)
{
    bool known = backend > 0 && (size_t)backend < sizeof backends / sizeof *backends;
    return backends[known ? backend : DRAY_BACKEND_BUILTIN].name;
}

int dray__backend_find(int32_t backend, const dray__backend_kind **out, dray_error *error)
{
    if (!backend)
        backend = DRAY_BACKEND_BUILTIN;
    if (backend < 0 || (size_t)backend >= sizeof backends / sizeof *backends)
        return dray__fail(error, DRAY_EINVALID, "there is no backend number %d", backend);
    if (!backends[backend].here)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "backend %s: this libdray was built without it (hiredis was missing)",
                          backends[backend].name);
    *out = backends[backend].kind;
    return DRAY_OK;
}
