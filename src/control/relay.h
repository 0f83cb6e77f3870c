/* The service of messages 0x0600..0x06FF. Hosts that join a run send requests (HOST_ASK), and the
 * run's supervisor takes and answers them (HOST_NEXT), so that all decisions about hosts are made
 * in one place (run/join/hosts.c). HOST_CLOCK is answered with this process's time. */
#pragma once

#include "control/coordinator.h"

enum {
    DRAY__HOST_ASK_MOST = 8 << 20, /* the most bytes of a request, */
    DRAY__HOST_JSON_MOST = 4 << 20 /* and of its JSON */
};

typedef struct dray__host_ask { /* HOST_ASK; its answer: a blob of JSON */
    const char *what;           /* "join", "pulse", "leave" */
    const void *json, *bytes;
    size_t json_size, size;
} dray__host_ask;

typedef struct dray__host_answer { /* the answer to the request of this number */
    uint64_t number;
    int32_t code; /* 0, or an error */
    const char *message;
    const void *json;
    size_t json_size;
} dray__host_answer;

typedef struct dray__host_next { /* HOST_NEXT: answers, and how long to wait for requests */
    int64_t timeout_ns;
    const dray__host_answer *answers;
    uint32_t count;
} dray__host_next;

typedef struct dray__host_asked {
    uint64_t number, member; /* number 0 means that the session of the member ended */
    const char *token;       /* the role of its token */
    dray__host_ask ask;
} dray__host_asked;

typedef struct dray__host_asks { /* the answer of HOST_NEXT */
    const dray__host_asked *items;
    uint32_t count;
} dray__host_asks;

extern const dray__fields dray__host_ask_fields, dray__host_told_fields, dray__host_next_fields,
    dray__host_asks_fields;

typedef struct dray__host_told { /* the answer of HOST_ASK */
    const void *json;
    size_t json_size;
} dray__host_told;

/* Adds the service. A run's coordinator has it, that of `dray serve` does not. */
int dray__relay_add(dray__coordinator *coordinator, dray_error *error);
