#include "base/network.h"

#include "base/error.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

enum { BITS = 128, V4_PREFIX = 96 };

static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

/* Converts every address to IPv6; an IPv4 address becomes ::ffff:a.b.c.d (RFC 4291 section
 * 2.5.5.2). */
static bool as_v6(const struct sockaddr *address, uint8_t out[16])
{
    if (address->sa_family == AF_INET6) {
        memcpy(out, &((const struct sockaddr_in6 *)address)->sin6_addr, 16);
        return true;
    }
    if (address->sa_family != AF_INET)
        return false;
    memcpy(out, mapped, sizeof mapped);
    memcpy(out + sizeof mapped, &((const struct sockaddr_in *)address)->sin_addr, 4);
    return true;
}

static bool same_prefix(const uint8_t *a, const uint8_t *b, uint32_t bits)
{
    uint32_t whole = bits / 8, rest = bits % 8;
    if (memcmp(a, b, whole) != 0)
        return false;
    return !rest || (a[whole] ^ b[whole]) >> (8 - rest) == 0;
}

static bool parse_one(const char *text, dray__network *out)
{
    char host[64];
    const char *slash = strchr(text, '/');
    size_t length = slash ? (size_t)(slash - text) : strlen(text);
    if (length >= sizeof host)
        return false;
    memcpy(host, text, length);
    host[length] = 0;
    uint32_t first = 0;
    if (inet_pton(AF_INET, host, out->address + sizeof mapped) == 1) {
        memcpy(out->address, mapped, sizeof mapped);
        first = V4_PREFIX;
    } else if (inet_pton(AF_INET6, host, out->address) != 1) {
        return false;
    }
    out->bits = BITS;
    if (slash) {
        char *end;
        unsigned long bits =
            slash[1] >= '0' && slash[1] <= '9' ? strtoul(slash + 1, &end, 10) : ~0ul;
        if (bits > BITS - first || *end)
            return false;
        out->bits = first + (uint32_t)bits;
    }
    /* The bits after the prefix must be zero. */
    for (uint32_t i = out->bits; i < BITS; i++)
        if (out->address[i / 8] >> (7 - i % 8) & 1)
            return false;
    return true;
}

int dray__networks_parse(const char *text, dray__networks *out, dray_error *error)
{
    dray__networks networks = {.count = 0};
    while (text && *(text += strspn(text, ", \t\n"))) {
        char one[128];
        size_t length = strcspn(text, ", \t\n");
        if (networks.count == DRAY__NETWORKS_MAX)
            return dray__fail(error, DRAY_EINVALID, "trusted networks: at most %d expected",
                              DRAY__NETWORKS_MAX);
        memcpy(one, text, length < sizeof one ? length : sizeof one - 1);
        one[length < sizeof one ? length : sizeof one - 1] = 0;
        if (length >= sizeof one || !parse_one(one, &networks.items[networks.count]))
            return dray__fail(error, DRAY_EINVALID,
                              "trusted networks: an address or a network like 10.1.0.0/16 or "
                              "fd00::/8 expected, found '%s'",
                              one);
        networks.count++;
        text += length;
    }
    *out = networks;
    return DRAY_OK;
}

bool dray__networks_have(const dray__networks *networks, const struct sockaddr *address)
{
    uint8_t v6[16];
    if (!as_v6(address, v6))
        return false;
    for (uint32_t i = 0; i < networks->count; i++)
        if (same_prefix(v6, networks->items[i].address, networks->items[i].bits))
            return true;
    return false;
}

bool dray__is_loopback(const struct sockaddr *address)
{
    static const dray__networks loopback = {
        .items = {{{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127}, V4_PREFIX + 8},
                  {{[15] = 1}, BITS}},
        .count = 2};
    return dray__networks_have(&loopback, address);
}
