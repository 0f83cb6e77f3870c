/* The requests of readers to data servers, and their answers. Answers come in the order of the
 * requests. A request is a header (dray__data_request) and its body. An answer is a header
 * (dray__answer), a head, which is a string with the reason when the status is not 0, and data. */
#pragma once

#include "base/wire.h"

#include <stdbool.h>

#define DRAY__DATA_MAGIC 0x4c505244u /* "DRPL" */

enum {
    DRAY__DATA_VERSION = 6,
    DRAY__REQUEST_HEADER = 16,
    DRAY__ANSWER_HEADER = 24,
    DRAY__REQUEST_MAX = 64 << 10, /* bytes of a body, */
    DRAY__HEAD_MAX = 16 << 10,    /* of a head, */
    DRAY__VALUES_MAX = 512 << 10, /* of an answer with cells or keys, */
    DRAY__DATA_MAX = 4 << 20      /* and of any answer */
};

/* The one table of messages: XX(name, value, true for a request with a body and an answer, false
 * for one with neither). Bodies and answers are described where they are answered. */
#define DRAY__DATA_MESSAGE_MAP(XX)                                                                 \
    /* weights/server/pull.h */                                                                    \
    XX(RECTS, 1, true)                                                                             \
    XX(TAKEN, 2, false)                                                                            \
    XX(REGIONS, 3, true)                                                                           \
    XX(NCCL, 4, true)                                                                              \
    /* weights/server/exports.h */                                                                 \
    XX(KEYS, 5, true)                                                                              \
    XX(KEYS_DONE, 6, false)                                                                        \
    /* net/cells.h */                                                                              \
    XX(CELLS, 7, true)

enum {
#define XX(name, value, asks) DRAY__DATA_##name = value,
    DRAY__DATA_MESSAGE_MAP(XX)
#undef XX
};

typedef struct dray__data_request { /* its header */
    uint32_t magic;
    uint16_t version, type;
    uint32_t id, body_bytes;
} dray__data_request;

typedef struct dray__answer { /* its header */
    uint32_t magic;
    int32_t status;
    uint32_t id, head_bytes;
    uint64_t data_bytes;
} dray__answer;

extern const dray__fields dray__data_request_fields, dray__answer_fields;

/* ---- the reader's side */

/* Puts the header of a request. The body follows, and then dray__request_end with the value that
 * this returned. */
size_t dray__request_begin(dray__writer *w, uint16_t type, uint32_t id);
void dray__request_end(dray__writer *w, size_t begun);
/* Returns 0, or DRAY_EPROTO when it is not an answer, or larger than allowed. */
int dray__answer_get(const uint8_t header[DRAY__ANSWER_HEADER], dray__answer *out,
                     dray_error *error);

/* ---- the server's side */

/* Returns 0, DRAY_EPROTO when it is not a request, or larger than allowed, or DRAY_EVERSION when
 * this version has no such request. */
int dray__request_get(const uint8_t header[DRAY__REQUEST_HEADER], dray__data_request *out,
                      dray_error *error);
bool dray__request_asks(uint16_t type); /* the table's third column */
void dray__answer_put(dray__writer *w, int status, uint32_t id, uint32_t head, uint64_t data);
void dray__answer_refuse(dray__writer *w, uint32_t id, const dray_error *error);
