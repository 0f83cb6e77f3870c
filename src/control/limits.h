/* The limits of a coordinator for the connections with one token: all that show a role's token;
 * this user's processes and those with the master token count as one. */
#pragma once

#include <dray/dray.h>
#include <stdint.h>

typedef struct dray__limits {
    uint64_t sessions, queues;
    uint64_t rows;        /* in queues */
    uint64_t bytes;       /* of queues' shared memory */
    uint64_t table_bytes; /* of the coordinator's own memory, for rows */
    uint64_t leases;      /* names that are held or waited for */
} dray__limits;

/* Parses "rows=1000000,bytes=64GiB". Limits that are not named have their defaults; with text NULL,
 * all have. Returns 0, or DRAY_EINVALID. */
int dray__limits_parse(const char *text, dray__limits *out, dray_error *error);
