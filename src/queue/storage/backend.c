#include "queue/storage/backend.h"

#include "base/error.h"

#include <dray/queue.h>
#include <stdlib.h>
#include <string.h>

#define XX(number, name) [DRAY_BACKEND_##number] = &dray__backend_##name,
static const dray__backend_kind *const kinds[] = {
    [DRAY_BACKEND_DEFAULT] = NULL, [DRAY_BACKEND_BUILTIN] = NULL, DRAY__STORE_MAP(XX)};
#undef XX

enum { KINDS = sizeof kinds / sizeof *kinds };

static const char *name_of(size_t backend)
{
    return kinds[backend] ? kinds[backend]->name : "builtin";
}

int dray__backend_default(int32_t *backend, const char **address, dray_error *error)
{
    const char *text = getenv("DRAY_QUEUE_BACKEND");
    if (!text || !*text)
        return DRAY_OK;
    size_t length = strcspn(text, ":");
    for (size_t i = DRAY_BACKEND_BUILTIN; i < KINDS; i++) {
        if (strlen(name_of(i)) != length || strncmp(text, name_of(i), length) != 0)
            continue;
        *backend = (int32_t)i;
        *address = text[length] ? text + length + 1 : NULL;
        return DRAY_OK;
    }
    return dray__fail(error, DRAY_EINVALID,
                      "$DRAY_QUEUE_BACKEND: builtin or " DRAY__STORE_WORDS "expected, found %.100s",
                      text);
}

int dray_queue_backend_built(int32_t backend)
{
    const dray__backend_kind *kind;
    return dray__backend_find(backend, &kind, NULL) == DRAY_OK;
}

const char *dray__backend_name(int32_t backend)
{
    return name_of(backend > 0 && backend < KINDS ? (size_t)backend : DRAY_BACKEND_BUILTIN);
}

const dray__backend_kind *dray__backend_named(const char *name, size_t length)
{
    for (size_t i = 0; i < KINDS; i++)
        if (kinds[i] && !kinds[i]->missing && strlen(kinds[i]->name) == length &&
            strncmp(kinds[i]->name, name, length) == 0)
            return kinds[i];
    return NULL;
}

int dray__backend_find(int32_t backend, const dray__backend_kind **out, dray_error *error)
{
    if (backend < 0 || backend >= KINDS)
        return dray__fail(error, DRAY_EINVALID, "there is no backend number %d", backend);
    if (kinds[backend] && kinds[backend]->missing)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "backend %s: this libdray was built without it (%s was missing)",
                          kinds[backend]->name, kinds[backend]->missing);
    *out = kinds[backend];
    return DRAY_OK;
}
