/* The messages of sessions, barriers, reports and leases, as both ends write and read them: a
 * struct each, and a table of its fields (messages.c), which docs/wire.md lists. PING is answered
 * with its own payload, STATUS with a text of JSON. Timeouts are relative, nanoseconds. */
#pragma once

#include "base/wire.h"

enum { DRAY__NAME_MAX = 256, DRAY__ROLE_MAX = 64, DRAY__REPORT_KIND_MAX = 64 };

typedef struct dray__spoken { /* HELLO and RETURN begin with these fields, which every version
                               * understands */
    uint32_t oldest, newest;
} dray__spoken;

typedef struct dray__hello { /* then follow the fields of the member */
    const char *name, *role;
    uint32_t rank;
    uint64_t host;
    int64_t pid;
} dray__hello;

typedef struct dray__session_claim { /* RETURN: names the member's former session, with its secret;
                                        ATTACH */
    uint64_t member, epoch;
    const void *token;
    size_t token_size;
} dray__session_claim;

typedef struct dray__hello_told { /* the answer */
    uint32_t version;
    dray__session_claim claim;
    const char *keeper;   /* path of its socket */
    const char *identity; /* of the data token; "" when the role moves no weights */
    const void *key;
    size_t key_size;
    bool takes_back; /* the next coordinator will accept the session, too */
} dray__hello_told;

typedef struct dray__meeting { /* BARRIER; its answer lists the members that met */
    const char *name;
    uint32_t count, member_count;
    int64_t timeout_ns;
    const uint64_t *members; /* members that must come; empty for any members */
} dray__meeting;

typedef struct dray__posting { /* REPORT_POST */
    const char *kind;
    const void *json;
    size_t size;
} dray__posting;

typedef struct dray__report_wish { /* REPORT_WATCH */
    const char *kind;              /* "" for all */
    uint64_t cursor;
    int64_t timeout_ns;
} dray__report_wish;

typedef struct dray__report_told {
    const void *text;
    size_t size;
} dray__report_told;

typedef struct dray__reports_told { /* its answer */
    uint64_t cursor, lost;
    const dray__report_told *items;
    uint32_t count;
} dray__reports_told;

typedef struct dray__lease_wish { /* LEASE_TAKE; its answer: u64 number */
    const char *const *names;
    uint32_t count;
    int64_t timeout_ns, term_ns;
} dray__lease_wish;

typedef struct dray__lease_held { /* LEASE_CHECK, answered u32 waiting; LEASE_GIVE: the number */
    uint64_t number;
    bool back; /* an earlier coordinator granted it */
    const char *const *names;
    uint32_t count;
} dray__lease_held;

typedef struct dray__error_told { /* an error reply */
    int32_t code, origin;
    int64_t raw;
    const void *message;
    size_t size;
} dray__error_told;

extern const dray__fields dray__spoken_fields, dray__hello_fields, dray__return_fields,
    dray__attach_fields, dray__hello_told_fields, dray__meeting_fields, dray__met_fields,
    dray__posting_fields, dray__report_wish_fields, dray__reports_told_fields,
    dray__lease_wish_fields, dray__lease_held_fields, dray__error_told_fields;
