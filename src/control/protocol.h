/* The bytes of a coordinator's connection: frames of a fixed little-endian header and a payload in
 * base/wire.h's encoding. Descriptors travel with the frame's first byte (SCM_RIGHTS; Unix sockets
 * only). */
#pragma once

#include <stdint.h>

#define DRAY__PROTOCOL_VERSION 5u
#define DRAY__PROTOCOL_OLDEST 5u
#define DRAY__FRAME_MAGIC 0x59415244u /* "DRAY" */
#define DRAY__FRAME_HEADER 32u
#define DRAY__FRAME_MAX (64u << 20) /* payload bytes */
#define DRAY__FRAME_FDS 64u         /* descriptors with one frame */

/* Header: u32 magic, u16 type, u16 descriptor count, u64 request id, u32 payload length,
 * u32 flags (1 = reply, 2 = error reply), u64 XXH3 of the header with this field 0 and payload. */

/* The one table of messages: XX(name, value, roles that may send it). Each service has a range of
 * its own. Over TCP the role of the connection's token must be one of those (control/token.h).
 * Connections over the Unix socket, and those with the master token, may send everything.
 * docs/security.md has the same table for readers, with the effect of each message
 * (tests/control/test_roles.c compares the two). */
#define DRAY__MESSAGE_MAP(XX)                                                                      \
    /* control/session.c */                                                                        \
    XX(HELLO, 0x0001, ANY)                                                                         \
    XX(ATTACH, 0x0002, ANY)                                                                        \
    XX(PING, 0x0003, ANY)                                                                          \
    XX(BARRIER, 0x0004, WORKER)                                                                    \
    XX(STATUS, 0x0005, ANY)                                                                        \
    XX(RETURN, 0x0007, ANY)                                                                        \
    /* control/reports.c */                                                                        \
    XX(REPORT_POST, 0x0101, WORKER)                                                                \
    XX(REPORT_WATCH, 0x0102, ANY)                                                                  \
    /* weights/registry/registry.c: layouts, regions, versions, update groups */                   \
    XX(PUBLISHER_OPEN, 0x0201, TRAINER)                                                            \
    XX(REGION_PUT, 0x0202, MEMBER)                                                                 \
    XX(REGION_GET, 0x0203, ENGINE)                                                                 \
    XX(PUBLISH, 0x0204, TRAINER)                                                                   \
    XX(PUBLISHER_WAIT, 0x0205, TRAINER)                                                            \
    XX(SUBSCRIBER_OPEN, 0x0206, ENGINE)                                                            \
    XX(UPDATE_BEGIN, 0x0207, ENGINE)                                                               \
    XX(UPDATE_SOURCES, 0x0208, MEMBER)                                                             \
    XX(UPDATE_VOTE, 0x0209, ENGINE)                                                                \
    XX(CHECKSUMS_GET, 0x020A, ANY)                                                                 \
    XX(WEIGHTS_CLOSE, 0x020B, MEMBER)                                                              \
    XX(UPDATE_WRITING, 0x020C, ENGINE)                                                             \
    XX(GROUP_STATE, 0x020D, ENGINE)                                                                \
    XX(UPDATE_REPORT, 0x020E, ENGINE)                                                              \
    XX(PREFETCH_DROP, 0x020F, ENGINE)                                                              \
    XX(SUBSCRIBER_LEAVE, 0x0210, ENGINE)                                                           \
    XX(ENGINES_WATCH, 0x0211, ANY)                                                                 \
    XX(REGIONS_MOVE, 0x0212, TRAINER)                                                              \
    XX(REGIONS_RELEASE, 0x0213, TRAINER)                                                           \
    XX(REGIONS_DROP, 0x0214, ENGINE)                                                               \
    XX(REGIONS_REVOKED, 0x0215, ENGINE)                                                            \
    XX(PUBLISHER_DELIVER, 0x0216, TRAINER)                                                         \
    XX(PUBLISH_SUMS, 0x0217, TRAINER)                                                              \
    /* queue/server/controller.c */                                                                \
    XX(QUEUE_OPEN, 0x0301, WORKER)                                                                 \
    XX(QUEUE_INSERT, 0x0302, WORKER)                                                               \
    XX(QUEUE_SEAL, 0x0303, WORKER)                                                                 \
    XX(QUEUE_CLEAR, 0x0304, WORKER)                                                                \
    XX(QUEUE_WAIT, 0x0305, WORKER)                                                                 \
    XX(QUEUE_END, 0x0306, WORKER)                                                                  \
    XX(QUEUE_CLAIM, 0x0307, WORKER)                                                                \
    XX(QUEUE_COMMIT, 0x0308, WORKER)                                                               \
    XX(QUEUE_FAIL, 0x0309, WORKER)                                                                 \
    XX(QUEUE_RELEASE, 0x030A, WORKER)                                                              \
    XX(QUEUE_STATUS, 0x030B, WORKER)                                                               \
    XX(QUEUE_CHUNK, 0x030C, WORKER)                                                                \
    XX(QUEUE_CLOSE, 0x030D, WORKER)                                                                \
    XX(QUEUE_HOLD, 0x030E, WORKER)                                                                 \
    XX(QUEUE_REFILL, 0x030F, WORKER)                                                               \
    XX(QUEUE_DECLINE, 0x0310, WORKER)                                                              \
    XX(QUEUE_ADMIT, 0x0311, WORKER)                                                                \
    XX(QUEUE_VERSION, 0x0312, WORKER)                                                              \
    XX(QUEUE_CURSOR, 0x0313, WORKER)                                                               \
    XX(QUEUE_COVER, 0x0314, WORKER)                                                                \
    XX(QUEUE_RESUME, 0x0315, WORKER)                                                               \
    XX(QUEUE_LOST, 0x0318, WORKER)                                                                 \
    XX(QUEUE_NEXT, 0x0316, WORKER)                                                                 \
    XX(QUEUE_CHECKPOINT, 0x0317, WORKER)                                                           \
    XX(QUEUE_KEEPER_JOIN, 0x0319, WORKER)                                                          \
    XX(QUEUE_KEEPER_WAIT, 0x031A, WORKER)                                                          \
    XX(QUEUE_KEEPER_FIND, 0x031B, WORKER)                                                          \
    XX(QUEUE_ROOM, 0x031C, WORKER)                                                                 \
    XX(QUEUE_SPLIT, 0x031D, WORKER)                                                                \
    XX(QUEUE_PUT, 0x031E, WORKER)                                                                  \
    XX(QUEUE_GET, 0x031F, WORKER)                                                                  \
    XX(QUEUE_TAKE, 0x0320, WORKER)                                                                 \
    XX(QUEUE_DROP, 0x0321, WORKER)                                                                 \
    XX(QUEUE_RESET, 0x0322, WORKER)                                                                \
    /* queue/storage/keeper.c (on the keeper's own socket) */                                      \
    XX(KEEPER_PUT, 0x0401, USER)                                                                   \
    XX(KEEPER_GET, 0x0402, USER)                                                                   \
    XX(KEEPER_DROP, 0x0403, USER)                                                                  \
    XX(KEEPER_RESET, 0x0404, USER)                                                                 \
    /* control/leases.c */                                                                         \
    XX(LEASE_TAKE, 0x0501, WORKER)                                                                 \
    XX(LEASE_CHECK, 0x0502, WORKER)                                                                \
    XX(LEASE_GIVE, 0x0503, WORKER)                                                                 \
    /* control/relay.c: hosts that join a run */                                                   \
    XX(HOST_ASK, 0x0601, WORKER)                                                                   \
    XX(HOST_NEXT, 0x0602, USER)                                                                    \
    XX(HOST_CLOCK, 0x0603, ANY)

enum {
#define XX(name, value, who) DRAY__MSG_##name = value,
    DRAY__MESSAGE_MAP(XX)
#undef XX
};

/* The rights of a session, as bits: the table's third column. */
enum {
    DRAY__MAY_TRAINER = 1,
    DRAY__MAY_ENGINE = 2,
    DRAY__MAY_TASK = 4,
    DRAY__MAY_TOOL = 8,
    DRAY__MAY_MEMBER = DRAY__MAY_TRAINER | DRAY__MAY_ENGINE, /* holders of weights */
    DRAY__MAY_WORKER = DRAY__MAY_TRAINER | DRAY__MAY_ENGINE | DRAY__MAY_TASK,
    DRAY__MAY_ANY = DRAY__MAY_WORKER | DRAY__MAY_TOOL,
    DRAY__MAY_USER = 128, /* the right of no role */
    DRAY__MAY_ALL = 255   /* of the master token, and of all connections over the Unix socket */
};

const char *dray__message_name(uint16_t type); /* "UPDATE_BEGIN"; "?" for an unknown one */
uint32_t dray__message_senders(uint16_t type); /* as bits; DRAY__MAY_ANY for an unknown one */
