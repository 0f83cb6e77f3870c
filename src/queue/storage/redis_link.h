/* A connection to one Redis server. Commands are sent in a pipeline, from the memory of their
 * values. Replies are read by hiredis (RESP2). It connects when first needed, and again when it
 * broke, waiting longer after each failure, until the caller's deadline. Commands must be
 * such that sending one twice does no harm. */
#pragma once

#include "net/address.h"

#include <hiredis/hiredis.h>
#include <sys/uio.h>

enum { DRAY__REDIS_HEAD = 224, DRAY__REDIS_BODY = 4 };

typedef struct dray__redis_command {
    uint32_t head_size, body_count;
    char head[DRAY__REDIS_HEAD];         /* the command as it is sent, up to its value */
    struct iovec body[DRAY__REDIS_BODY]; /* the value, and the end of the line */
    void *at;                            /* destination of the reply's string, */
    uint64_t bytes;                      /* which must have this size; */
    bool lost;                           /* set when it is shorter */
    bool keep;                           /* the reply is left in `reply`, which the caller frees */
    redisReply *reply;
} dray__redis_command;

typedef struct dray__redis_link {
    char *text; /* the address */
    const char *password;
    dray__address address;
    int fd;
    redisReader *reader;
    uint32_t failures; /* since the last answer */
    int64_t retry_ns;
    char why[200]; /* the last failure */
} dray__redis_link;

/* password is borrowed; NULL when there is none. */
int dray__redis_link_init(dray__redis_link *link, const char *address, const char *password,
                          dray_error *error);
void dray__redis_link_free(dray__redis_link *link);
/* Begins a command of `count` words, none of them longer than 100 bytes. value_size: the last word
 * is the command's body, of that size, which the caller adds to `body`; -1 when there is no body.
 */
void dray__redis_command_begin(dray__redis_command *command, const char *const *words,
                               uint32_t count, int64_t value_size);
int dray__redis_run(dray__redis_link *link, dray__redis_command *commands, uint32_t count,
                    int64_t deadline_ns, dray_error *error);
