/* Lists of trusted networks in CIDR form, IPv4 and IPv6. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <sys/socket.h>

enum { DRAY__NETWORKS_MAX = 64 };

typedef struct dray__network {
    uint8_t address[16]; /* IPv4 as ::ffff:a.b.c.d */
    uint32_t bits;       /* length of the prefix, of 128 bits */
} dray__network;

typedef struct dray__networks {
    dray__network items[DRAY__NETWORKS_MAX];
    uint32_t count;
} dray__networks;

/* Parses "10.1.0.0/16, fd00::/8, 192.168.1.7", separated by commas or spaces; NULL or "" is an
 * empty list. Bits after the prefix must be zero, which finds typing errors. Returns 0, or
 * DRAY_EINVALID, which names the wrong part. */
int dray__networks_parse(const char *text, dray__networks *out, dray_error *error);
/* Returns whether an address of AF_INET or AF_INET6 is in one of the networks; false for every
 * other family. */
bool dray__networks_have(const dray__networks *networks, const struct sockaddr *address);
/* Returns whether the address is in 127.0.0.0/8 or is ::1. */
bool dray__is_loopback(const struct sockaddr *address);
