/* The table of carriers (carrier.h). */
#include "net/carrier.h"

#include "base/error.h"

#include <stdio.h>
#include <string.h>

/* In the order in which they are tried. tests/CMakeLists.txt makes a test of each line. */
#define CARRIERS(XX)                                                                               \
    XX(ucx_reads)                                                                                  \
    XX(ucx)                                                                                        \
    XX(tcp)                                                                                        \
    XX(unix)                                                                                       \
    XX(tls)

#define XX(name) extern const dray__carrier dray__carrier_##name;
CARRIERS(XX)
#undef XX

static const dray__carrier *const carriers[] = {
#define XX(name) &dray__carrier_##name,
    CARRIERS(XX)
#undef XX
};

enum { COUNT = sizeof carriers / sizeof *carriers };
_Static_assert((int)COUNT <= (int)DRAY__CARRIERS_MAX, "a bit each");

const dray__carrier *dray__carrier_at(uint32_t index)
{
    return index < COUNT ? carriers[index] : NULL;
}

int dray__carrier_choose(const char *scheme, const dray__stream_keys *keys, bool trusted,
                         uint32_t avoid, uint32_t *index, dray_error *error)
{
    int rc = dray__fail(error, DRAY_EUNSUPPORTED, "nothing carries bytes to %s:%s%s", scheme,
                        keys->transport ? " by the transport " : "",
                        keys->transport ? keys->transport : "");
    for (uint32_t i = 0; i < COUNT; i++) {
        const dray__carrier *c = carriers[i];
        if (avoid & 1u << i || strcmp(c->scheme, scheme) != 0 ||
            (keys->transport && strcmp(c->transport, keys->transport) != 0))
            continue;
        rc = c->may(keys, trusted, error);
        if (rc == DRAY_OK) {
            *index = i;
            return rc;
        }
    }
    return rc;
}

const dray__carrier *dray__carrier_of(const char *scheme, uint8_t first)
{
    const dray__carrier *any = NULL;
    for (uint32_t i = 0; i < COUNT; i++) {
        const dray__carrier *c = carriers[i];
        if (strcmp(c->scheme, scheme) != 0)
            continue;
        if (c->first && c->first == first)
            return c;
        any = c->first ? any : c;
    }
    return any;
}

/* ---- transports, by their names for users
 * ---------------------------------------------------------- */

int dray__transport_find(const char *name, const char **out, char *detail, size_t size,
                         dray_error *error)
{
    char known[256] = "auto";
    *out = NULL;
    if (strcmp(name, "auto") == 0)
        return DRAY_OK;
    for (uint32_t i = 0; i < COUNT; i++) {
        const dray__carrier *c = carriers[i];
        size_t used = strlen(known);
        if (!strstr(known, c->transport))
            snprintf(known + used, sizeof known - used, ", %s", c->transport);
        if (strcmp(c->transport, name) != 0)
            continue;
        *out = c->transport;
        snprintf(detail, size, "%s", c->name);
        return c->find ? c->find(detail, size, error) : DRAY_OK;
    }
    return dray__fail(error, DRAY_EINVALID, "transport \"%.40s\": one of %s expected", name, known);
}

int dray_transport_find(const char *name, char *detail, size_t size, dray_error *error)
{
    const char *transport;
    snprintf(detail, size, "%s", name);
    return dray__transport_find(name, &transport, detail, size, error);
}

int dray__carriers_check(dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < COUNT && !rc; i++)
        rc = carriers[i]->check ? carriers[i]->check(error) : DRAY_OK;
    return rc;
}

bool dray__carriers_read(const dray__stream_keys *keys)
{
    bool any = false;
    for (uint32_t i = 0; i < COUNT && !any; i++)
        any = carriers[i]->get && carriers[i]->may(keys, true, NULL) == DRAY_OK;
    return any;
}
