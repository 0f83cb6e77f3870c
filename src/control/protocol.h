/* What goes over a coordinator's connection: frames of a fixed little-endian header and a payload
 * in base/wire.h's encoding. Descriptors travel with the frame's first byte (SCM_RIGHTS; Unix
 * sockets only). */
#ifndef DRAY_CONTROL_PROTOCOL_H
#define DRAY_CONTROL_PROTOCOL_H

#include <stdint.h>

#define DRAY__PROTOCOL_VERSION 1u
#define DRAY__PROTOCOL_OLDEST 1u
#define DRAY__FRAME_MAGIC 0x59415244u /* "DRAY" */
#define DRAY__FRAME_HEADER 32u
#define DRAY__FRAME_MAX (64u << 20) /* payload bytes */
#define DRAY__FRAME_FDS 64u         /* descriptors with one frame */

/* Header: u32 magic, u16 type, u16 descriptor count, u64 request id, u32 payload length,
 * u32 flags (1 = reply, 2 = error reply), u64 XXH3 of the header with this field 0 and payload. */

/* The one table of messages: XX(name, value). Each service has a range of its own. */
#define DRAY__MESSAGE_MAP(XX)                                                                      \
    /* control/session.c */                                                                        \
    XX(HELLO, 0x0001)                                                                              \
    XX(ATTACH, 0x0002)                                                                             \
    XX(PING, 0x0003)                                                                               \
    XX(BARRIER, 0x0004)                                                                            \
    XX(STATUS, 0x0005)                                                                             \
    XX(SHUTDOWN, 0x0006)                                                                           \
    /* control/reports.c */                                                                        \
    XX(REPORT_POST, 0x0101)                                                                        \
    XX(REPORT_WATCH, 0x0102)                                                                       \
    /* control/registry.c: layouts, regions, versions, update groups */                            \
    XX(PUBLISHER_OPEN, 0x0201)                                                                     \
    XX(REGION_PUT, 0x0202)                                                                         \
    XX(REGION_GET, 0x0203)                                                                         \
    XX(PUBLISH, 0x0204)                                                                            \
    XX(PUBLISHER_WAIT, 0x0205)                                                                     \
    XX(SUBSCRIBER_OPEN, 0x0206)                                                                    \
    XX(UPDATE_BEGIN, 0x0207)                                                                       \
    XX(UPDATE_SOURCES, 0x0208)                                                                     \
    XX(UPDATE_VOTE, 0x0209)                                                                        \
    XX(CHECKSUMS_GET, 0x020A)                                                                      \
    XX(WEIGHTS_CLOSE, 0x020B)                                                                      \
    XX(UPDATE_WRITING, 0x020C)                                                                     \
    XX(GROUP_STATE, 0x020D)                                                                        \
    XX(UPDATE_REPORT, 0x020E)                                                                      \
    /* queue/controller.c */                                                                       \
    XX(QUEUE_OPEN, 0x0301)                                                                         \
    XX(QUEUE_INSERT, 0x0302)                                                                       \
    XX(QUEUE_SEAL, 0x0303)                                                                         \
    XX(QUEUE_CLEAR, 0x0304)                                                                        \
    XX(QUEUE_WAIT, 0x0305)                                                                         \
    XX(QUEUE_END, 0x0306)                                                                          \
    XX(QUEUE_CLAIM, 0x0307)                                                                        \
    XX(QUEUE_COMMIT, 0x0308)                                                                       \
    XX(QUEUE_FAIL, 0x0309)                                                                         \
    XX(QUEUE_RELEASE, 0x030A)                                                                      \
    XX(QUEUE_STATUS, 0x030B)                                                                       \
    XX(QUEUE_CHUNK, 0x030C)                                                                        \
    XX(QUEUE_CLOSE, 0x030D)                                                                        \
    XX(QUEUE_HOLD, 0x030E)                                                                         \
    XX(QUEUE_REFILL, 0x030F)                                                                       \
    XX(QUEUE_DECLINE, 0x0310)                                                                      \
    /* queue/keeper.c (on the keeper's own socket) */                                              \
    XX(KEEPER_PUT, 0x0401)                                                                         \
    XX(KEEPER_GET, 0x0402)                                                                         \
    XX(KEEPER_DROP, 0x0403)

enum {
#define XX(name, value) DRAY__MSG_##name = value,
    DRAY__MESSAGE_MAP(XX)
#undef XX
};

const char *dray__message_name(uint16_t type); /* "UPDATE_BEGIN"; "?" */

#endif
