/* Lists of networks in CIDR form, IPv4 and IPv6: which addresses are trusted. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <sys/socket.h>

enum { DRAY__NETWORKS_MAX = 64 };

typedef struct dray__network {
    uint8_t address[16]; /* IPv4 as ::ffff:a.b.c.d */
    uint32_t bits;       /* of the 128 that count */
} dray__network;

typedef struct dray__networks {
    dray__network items[DRAY__NETWORKS_MAX];
    uint32_t count;
} dray__networks;

/* "10.1.0.0/16, fd00::/8, 192.168.1.7": separated by commas or spaces; NULL or "": none. Bits
 * beyond the prefix must be zero, which finds typing errors. DRAY_EINVALID names the piece. */
int dray__networks_parse(const char *text, dray__networks *out, dray_error *error);
/* Is an address of AF_INET or AF_INET6 in one of them? false for every other family. */
bool dray__networks_have(const dray__networks *networks, const struct sockaddr *address);
/* 127.0.0.0/8 and ::1. */
bool dray__is_loopback(const struct sockaddr *address);
