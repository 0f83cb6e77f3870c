#include "queue/backend.h"

#include "base/error.h"

#include <dray/queue.h>
#include <stdlib.h>
#include <string.h>

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

int dray__backend_default(int32_t *backend, const char **address, dray_error *error)
{
    const char *text = getenv("DRAY_QUEUE_BACKEND");
    if (!text || !*text)
        return DRAY_OK;
    size_t length = strcspn(text, ":");
    for (size_t i = 1; i < sizeof backends / sizeof *backends; i++) {
        if (strlen(backends[i].name) != length || strncmp(text, backends[i].name, length) != 0)
            continue;
        *backend = (int32_t)i;
        *address = text[length] ? text + length + 1 : NULL;
        return DRAY_OK;
    }
    return dray__fail(error, DRAY_EINVALID,
                      "$DRAY_QUEUE_BACKEND: builtin or redis:ADDRESS expected, found %.100s", text);
}

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

const dray__backend_kind *dray__backend_named(const char *name, size_t length)
{
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++)
        if (backends[i].kind && strlen(backends[i].kind->name) == length &&
            strncmp(backends[i].kind->name, name, length) == 0)
            return backends[i].kind;
    return NULL;
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
