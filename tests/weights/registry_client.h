/* A client of the registry as a state machine, without sockets: the messages that its tests send,
 * and the answers that they expect. */
#pragma once

#include "control/protocol.h"
#include "suite.h"
#include "weights/registry/registry.h"
#include "weights/registry_layout.h"
#include "weights/sums.h"

#include <dray/weights.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct ticket {
    int answered, code;
    char message[DRAY_ERROR_MESSAGE_MAX];
    uint8_t data[4096];
    size_t size;
    int fd;
    int64_t deadline;
} ticket;

static dray__registry *r;

static inline void answer(void *user, void *at, const dray_error *error, dray__writer *payload,
                          int fd)
{
    (void)user;
    ticket *t = at;
    t->answered++;
    t->fd = fd;
    if (error) {
        t->code = error->code;
        memcpy(t->message, error->message, sizeof t->message);
    } else if (payload) {
        assert_true(payload->size <= sizeof t->data);
        memcpy(t->data, payload->data, payload->size);
        t->size = payload->size;
    }
}

static inline void expire_at(void *user, void *at, int64_t deadline)
{
    (void)user;
    ((ticket *)at)->deadline = deadline;
}

static inline void send_fd(uint64_t member, uint16_t type, dray__writer *w, int fd, ticket *t)
{
    memset(t, 0, sizeof *t);
    dray__party party = {member, 7, 1000 + (int64_t)member, "somebody"};
    dray__reader in = dray__reader_of(w->data, w->size);
    dray__registry_handle(r, &party, type, &in, fd, t);
    dray__writer_free(w);
}

static inline void send(uint64_t member, uint16_t type, dray__writer *w, ticket *t)
{
    send_fd(member, type, w, -1, t);
}

static inline uint64_t first_u64(const ticket *t)
{
    assert_int_equal(t->answered, 1);
    assert_int_equal(t->code, 0);
    dray__reader in = dray__reader_of(t->data, t->size);
    return dray__get_u64(&in);
}

/* Puts the layout of a rank's even part of the 20 elements. */
static inline void put_part(dray__writer *w, uint32_t rank, uint32_t world)
{
    put_layout(w, 20 * (int64_t)(rank % world) / world, 20 * ((int64_t)(rank % world) + 1) / world);
}

static inline int try_publisher(uint64_t member, uint32_t rank, uint32_t world, uint64_t *key)
{
    dray__writer w = {0};
    ticket t;
    dray__put_string(&w, "m");
    dray__put_u32(&w, rank);
    dray__put_u32(&w, world);
    dray__put_u64(&w, 1);
    dray__put_string(&w, "");
    dray__put_u32(&w, 0);
    dray__put_u32(&w, 0);
    dray__put_u64(&w, 0);
    put_part(&w, rank, world);
    send(member, DRAY__MSG_PUBLISHER_OPEN, &w, &t);
    assert_int_equal(t.answered, 1);
    if (t.code == 0)
        *key = first_u64(&t);
    return t.code;
}

static inline uint64_t publisher(uint64_t member, uint32_t rank, uint32_t world)
{
    uint64_t key = 0;
    assert_int_equal(try_publisher(member, rank, world, &key), 0);
    return key;
}

static inline void open_subscriber(uint64_t member, const char *group, uint32_t rank,
                                   uint32_t world, int64_t from, int64_t to, ticket *t)
{
    dray__writer w = {0};
    dray__put_string(&w, "m");
    dray__put_string(&w, group);
    dray__put_u32(&w, rank);
    dray__put_u32(&w, world);
    dray__put_u64(&w, 1);
    dray__put_string(&w, "");
    dray__put_u32(&w, 0);
    dray__put_u32(&w, 0);
    put_layout(&w, from, to);
    send(member, DRAY__MSG_SUBSCRIBER_OPEN, &w, t);
}

static inline uint64_t subscriber_of(uint64_t member, const char *group, uint32_t rank,
                                     uint32_t world, int64_t from, int64_t to)
{
    ticket t;
    open_subscriber(member, group, rank, world, from, to, &t);
    return first_u64(&t);
}

static inline uint64_t subscriber(uint64_t member, const char *group, uint32_t rank, uint32_t world)
{
    return subscriber_of(member, group, rank, world, 20 * (int64_t)rank / world,
                         20 * ((int64_t)rank + 1) / world);
}

static inline int publish_part(uint64_t member, uint64_t key, uint64_t version, uint64_t sum,
                               uint64_t elements)
{
    dray__writer w = {0};
    dray__sums sums = {0};
    ticket t;
    dray__sums_add(&sums, "w", DRAY_F32, elements, sum);
    dray__put_u64(&w, key);
    dray__put_u64(&w, version);
    dray__put_u8(&w, 1);
    dray__sums_put(&w, &sums);
    dray__sums_free(&sums);
    send(member, DRAY__MSG_PUBLISH, &w, &t);
    assert_int_equal(t.answered, 1);
    return t.code;
}

static inline int publish(uint64_t member, uint64_t key, uint64_t version, uint64_t sum)
{
    return publish_part(member, key, version, sum, 20);
}

static inline void begin_for(uint64_t member, uint64_t key, uint64_t min, bool verify,
                             uint8_t purpose, ticket *t)
{
    dray__writer w = {0};
    dray__put_u64(&w, key);
    dray__put_u8(&w, DRAY_MODE_TENSOR);
    dray__put_u64(&w, min);
    dray__put_string(&w, "");
    dray__put_u64(&w, 0);
    dray__put_u8(&w, verify);
    dray__put_i64(&w, 1000000);
    dray__put_u8(&w, purpose);
    dray__put_u8(&w, 0);
    dray__put_u64(&w, 0);
    dray__put_u64(&w, 0);
    send(member, DRAY__MSG_UPDATE_BEGIN, &w, t);
}

static inline void begin_verified(uint64_t member, uint64_t key, uint64_t min, bool verify,
                                  ticket *t)
{
    begin_for(member, key, min, verify, DRAY__UPDATE, t);
}

static inline void begin(uint64_t member, uint64_t key, uint64_t min, ticket *t)
{
    begin_verified(member, key, min, true, t);
}

typedef struct begun {
    uint64_t attempt, incarnation, version;
} begun;

static inline begun begun_of(const ticket *t)
{
    begun b;
    assert_int_equal(t->answered, 1);
    assert_int_equal(t->code, 0);
    dray__reader in = dray__reader_of(t->data, t->size);
    b.attempt = dray__get_u64(&in);
    dray__get_u8(&in);
    b.incarnation = dray__get_u64(&in);
    b.version = dray__get_u64(&in);
    return b;
}

static inline int writing(uint64_t member, uint64_t key, uint64_t attempt)
{
    dray__writer w = {0};
    ticket t;
    dray__put_u64(&w, key);
    dray__put_u64(&w, attempt);
    dray__put_i64(&w, 1000000);
    send(member, DRAY__MSG_UPDATE_WRITING, &w, &t);
    assert_int_equal(t.answered, 1);
    return t.code;
}

static inline void vote_for(uint64_t member, uint64_t key, uint64_t attempt, int code,
                            const char *tensor, uint64_t elements, uint64_t sum, ticket *t)
{
    dray__writer w = {0};
    dray__sums sums = {0}, none = {0};
    if (elements)
        dray__sums_add(&sums, tensor, DRAY_F32, elements, sum);
    dray__put_u64(&w, key);
    dray__put_u64(&w, attempt);
    dray__put_u32(&w, (uint32_t)code);
    dray__put_string(&w, code ? "it broke" : "");
    dray__put_i64(&w, 1000000);
    dray__sums_put(&w, &sums);
    dray__sums_put(&w, &none);
    dray__put_u8(&w, code ? DRAY__HELD_UNKNOWN : DRAY__HELD_AS_READ);
    dray__sums_put(&w, &none);
    dray__sums_free(&sums);
    send(member, DRAY__MSG_UPDATE_VOTE, &w, t);
}

/* Votes as one of two ranks. */
static inline void vote(uint64_t member, uint64_t key, uint64_t attempt, int code, uint64_t sum,
                        ticket *t)
{
    vote_for(member, key, attempt, code, "w", 10, sum, t);
}

/* Votes as the only rank. */
static inline void vote_alone(uint64_t member, uint64_t key, uint64_t attempt, int code,
                              uint64_t sum, ticket *t)
{
    vote_for(member, key, attempt, code, "w", 20, sum, t);
}

static inline void wait_for(uint64_t member, uint64_t key, uint64_t version, int64_t timeout,
                            ticket *t)
{
    dray__writer w = {0};
    dray__put_u64(&w, key);
    dray__put_u64(&w, version);
    dray__put_i64(&w, timeout);
    send(member, DRAY__MSG_PUBLISHER_WAIT, &w, t);
}

static inline int state_of(uint64_t member, uint64_t key, uint64_t *version)
{
    dray__writer w = {0};
    ticket t;
    dray__put_u64(&w, key);
    send(member, DRAY__MSG_GROUP_STATE, &w, &t);
    assert_int_equal(t.code, 0);
    dray__reader in = dray__reader_of(t.data, t.size);
    *version = dray__get_u64(&in);
    dray__get_u64(&in);
    return dray__get_u8(&in);
}

/* One publisher rank (member 1), a group of two (members 2, 3), version 5 published with sum 7. */
static uint64_t pub, sub[2];

static inline int setup(void **state)
{
    (void)state;
    dray__registry_ops ops = {answer, expire_at, NULL, NULL};
    assert_int_equal(dray__registry_new(&ops, &r, NULL), 0);
    pub = publisher(1, 0, 1);
    sub[0] = subscriber(2, "g", 0, 2);
    sub[1] = subscriber(3, "g", 1, 2);
    assert_int_equal(publish(1, pub, 5, 7), 0);
    return 0;
}

static inline int teardown(void **state)
{
    (void)state;
    dray__registry_free(r);
    return 0;
}

static inline begun both_begin(ticket t[2])
{
    begin(2, sub[0], 0, &t[0]);
    assert_int_equal(t[0].answered, 0);
    begin(3, sub[1], 0, &t[1]);
    return begun_of(&t[0]);
}
