/* weights: the registry as a state machine, without sockets: gangs, versions, group commit. */
#include "control/protocol.h"
#include "control/registry.h"
#include "control/sums.h"

#include <dray/weights.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- a client of the state machine ---------------------------------------------------------- */

typedef struct ticket {
    int answered, code;
    char message[DRAY_ERROR_MESSAGE_MAX];
    uint8_t data[4096];
    size_t size;
    int fd;
    int64_t deadline;
} ticket;

static dray__registry *r;

static void answer(void *user, void *at, const dray_error *error, dray__writer *payload, int fd)
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

static void expire_at(void *user, void *at, int64_t deadline)
{
    (void)user;
    ((ticket *)at)->deadline = deadline;
}

static void send_fd(uint64_t member, uint16_t type, dray__writer *w, int fd, ticket *t)
{
    memset(t, 0, sizeof *t);
    dray__party party = {member, 7, 1000 + (int64_t)member, "somebody"};
    dray__reader in = dray__reader_of(w->data, w->size);
    dray__registry_handle(r, &party, type, &in, fd, t);
    dray__writer_free(w);
}

static void send(uint64_t member, uint16_t type, dray__writer *w, ticket *t)
{
    send_fd(member, type, w, -1, t);
}

static uint64_t first_u64(const ticket *t)
{
    assert_int_equal(t->answered, 1);
    assert_int_equal(t->code, 0);
    dray__reader in = dray__reader_of(t->data, t->size);
    return dray__get_u64(&in);
}

/* Elements [from, to) of "w", which has 20; as a packed layout. */
static void put_layout(dray__writer *w, int64_t from, int64_t to)
{
    dray_layout *layout;
    const int64_t shape[1] = {20};
    dray_region_info region = {.kind = DRAY_REGION_HOST, .bytes = 80};
    uint32_t at, tensor;
    void *data;
    size_t size;
    assert_int_equal(dray_layout_new(&layout, NULL), 0);
    assert_int_equal(dray_layout_add_region(layout, &region, &at, NULL), 0);
    assert_int_equal(dray_layout_add_tensor(layout, "w", DRAY_F32, 1, shape, &tensor, NULL), 0);
    dray_block block = {
        .tensor = tensor, .region = at, .start = {from}, .extent = {to - from}, .stride = {4}};
    if (to > from)
        assert_int_equal(dray_layout_add_block(layout, &block, NULL), 0);
    assert_int_equal(dray_layout_pack(layout, &data, &size, NULL), 0);
    dray__put_blob(w, data, size);
    free(data);
    dray_layout_free(layout);
}

/* Rank's even part of the 20 elements. */
static void put_part(dray__writer *w, uint32_t rank, uint32_t world)
{
    put_layout(w, 20 * (int64_t)(rank % world) / world, 20 * ((int64_t)(rank % world) + 1) / world);
}

static int try_publisher(uint64_t member, uint32_t rank, uint32_t world, uint64_t *key)
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

static uint64_t publisher(uint64_t member, uint32_t rank, uint32_t world)
{
    uint64_t key = 0;
    assert_int_equal(try_publisher(member, rank, world, &key), 0);
    return key;
}

static void open_subscriber(uint64_t member, const char *group, uint32_t rank, uint32_t world,
                            int64_t from, int64_t to, ticket *t)
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

static uint64_t subscriber_of(uint64_t member, const char *group, uint32_t rank, uint32_t world,
                              int64_t from, int64_t to)
{
    ticket t;
    open_subscriber(member, group, rank, world, from, to, &t);
    return first_u64(&t);
}

static uint64_t subscriber(uint64_t member, const char *group, uint32_t rank, uint32_t world)
{
    return subscriber_of(member, group, rank, world, 20 * (int64_t)rank / world,
                         20 * ((int64_t)rank + 1) / world);
}

static int publish_part(uint64_t member, uint64_t key, uint64_t version, uint64_t sum,
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

static int publish(uint64_t member, uint64_t key, uint64_t version, uint64_t sum)
{
    return publish_part(member, key, version, sum, 20);
}

static void begin_verified(uint64_t member, uint64_t key, uint64_t min, bool verify, ticket *t)
{
    dray__writer w = {0};
    dray__put_u64(&w, key);
    dray__put_u8(&w, DRAY_MODE_TENSOR);
    dray__put_u64(&w, min);
    dray__put_string(&w, "");
    dray__put_u64(&w, 0);
    dray__put_u8(&w, verify);
    dray__put_i64(&w, 1000000);
    dray__put_u8(&w, DRAY__UPDATE);
    dray__put_u8(&w, 0);
    dray__put_u64(&w, 0);
    dray__put_u64(&w, 0);
    send(member, DRAY__MSG_UPDATE_BEGIN, &w, t);
}

static void begin(uint64_t member, uint64_t key, uint64_t min, ticket *t)
{
    begin_verified(member, key, min, true, t);
}

typedef struct begun {
    uint64_t attempt, incarnation, version;
} begun;

static begun begun_of(const ticket *t)
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

static int writing(uint64_t member, uint64_t key, uint64_t attempt)
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

static void vote_for(uint64_t member, uint64_t key, uint64_t attempt, int code, const char *tensor,
                     uint64_t elements, uint64_t sum, ticket *t)
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

/* Of a rank of two. */
static void vote(uint64_t member, uint64_t key, uint64_t attempt, int code, uint64_t sum, ticket *t)
{
    vote_for(member, key, attempt, code, "w", 10, sum, t);
}

/* Of the only rank. */
static void vote_alone(uint64_t member, uint64_t key, uint64_t attempt, int code, uint64_t sum,
                       ticket *t)
{
    vote_for(member, key, attempt, code, "w", 20, sum, t);
}

static void wait_for(uint64_t member, uint64_t key, uint64_t version, int64_t timeout, ticket *t)
{
    dray__writer w = {0};
    dray__put_u64(&w, key);
    dray__put_u64(&w, version);
    dray__put_i64(&w, timeout);
    send(member, DRAY__MSG_PUBLISHER_WAIT, &w, t);
}

static int state_of(uint64_t member, uint64_t key, uint64_t *version)
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

static int setup(void **state)
{
    (void)state;
    dray__registry_ops ops = {answer, expire_at, NULL};
    assert_int_equal(dray__registry_new(&ops, &r, NULL), 0);
    pub = publisher(1, 0, 1);
    sub[0] = subscriber(2, "g", 0, 2);
    sub[1] = subscriber(3, "g", 1, 2);
    assert_int_equal(publish(1, pub, 5, 7), 0);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    dray__registry_free(r);
    return 0;
}

static begun both_begin(ticket t[2])
{
    begin(2, sub[0], 0, &t[0]);
    assert_int_equal(t[0].answered, 0);
    begin(3, sub[1], 0, &t[1]);
    return begun_of(&t[0]);
}

/* ---- versions ------------------------------------------------------------------------------- */

static void test_version_needs_every_rank(void **state)
{
    (void)state;
    dray__registry_member_ended(r, 1);
    uint64_t a = publisher(10, 0, 2), b = publisher(11, 1, 2);
    ticket t[2];
    assert_int_equal(publish_part(10, a, 1, 3, 10), 0);
    begin(2, sub[0], 0, &t[0]);
    begin(3, sub[1], 0, &t[1]);
    assert_int_equal(t[0].answered + t[1].answered, 0);
    assert_int_equal(publish_part(11, b, 1, 4, 10), 0);
    begun got = begun_of(&t[0]);
    assert_int_equal(got.version, 1);
    assert_int_equal(got.incarnation, 2);
    assert_int_equal(begun_of(&t[1]).attempt, got.attempt);
    /* partial sums of the ranks add up, on both sides: 3 + 4 = 6 + 1 */
    ticket v[2];
    vote(2, sub[0], got.attempt, 0, 6, &v[0]);
    vote(3, sub[1], got.attempt, 0, 1, &v[1]);
    assert_int_equal(v[0].code, 0);
    assert_int_equal(v[1].answered, 1);
}

static void test_versions_grow(void **state)
{
    (void)state;
    assert_int_equal(publish(1, pub, 5, 7), DRAY_EINVALID);
    assert_int_equal(publish(1, pub, 4, 7), DRAY_EINVALID);
    assert_int_equal(publish(1, pub, 6, 7), 0);
    ticket t[2];
    assert_int_equal(both_begin(t).version, 6);
}

static void test_rank_taken(void **state)
{
    (void)state;
    uint64_t key;
    assert_int_equal(try_publisher(9, 0, 1, &key), DRAY_EEXIST);
    dray__registry_member_ended(r, 1);
    assert_int_equal(try_publisher(9, 0, 2, &key), 0);
    assert_int_equal(try_publisher(8, 0, 2, &key), DRAY_EEXIST);
    assert_int_equal(try_publisher(8, 1, 3, &key), DRAY_EINVALID);
    assert_int_equal(try_publisher(8, 2, 2, &key), DRAY_EINVALID);
}

/* What is refused leaves nothing behind: no group without ranks, which nothing would end. */
static void test_refused_group_leaves_nothing(void **state)
{
    (void)state;
    static const uint32_t wrong[][2] = {{0, 0}, {1, 1}, {0, UINT32_MAX}, {7, 2}};
    ticket t;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        open_subscriber(9, "new", wrong[i][0], wrong[i][1], 0, 20, &t);
        assert_int_equal(t.code, DRAY_EINVALID);
    }
    json_t *object = json_object();
    dray__registry_status(r, object);
    assert_int_equal(json_array_size(json_object_get(object, "groups")), 1);
    json_decref(object);
    subscriber(9, "new", 0, 1);
}

static void test_same_number_of_a_new_incarnation(void **state)
{
    (void)state;
    ticket t[2];
    begun first = both_begin(t);
    ticket v[2];
    vote(2, sub[0], first.attempt, 0, 7, &v[0]);
    vote(3, sub[1], first.attempt, 0, 0, &v[1]);
    (void)v;
    dray__registry_member_ended(r, 1);
    pub = publisher(12, 0, 1);
    assert_int_equal(publish(12, pub, 5, 9), 0);
    begun again = both_begin(t);
    assert_int_equal(again.version, 5);
    assert_true(again.incarnation > first.incarnation);
}

/* A rank of a whole gang dies: its version is gone, survivors must open again. */
static void test_gang_breaks(void **state)
{
    (void)state;
    dray__registry_member_ended(r, 1);
    uint64_t a = publisher(10, 0, 2), b = publisher(11, 1, 2);
    assert_int_equal(publish_part(10, a, 1, 3, 10), 0);
    assert_int_equal(publish_part(11, b, 1, 4, 10), 0);
    dray__registry_member_ended(r, 11);
    assert_int_equal(publish_part(10, a, 2, 3, 10), DRAY_ESTALE);
    ticket t[2];
    begin(2, sub[0], 0, &t[0]);
    begin(3, sub[1], 0, &t[1]);
    assert_int_equal(t[0].answered, 0);
    uint64_t c = publisher(13, 0, 2), d = publisher(14, 1, 2);
    assert_int_equal(publish_part(13, c, 1, 3, 10), 0);
    assert_int_equal(publish_part(14, d, 1, 4, 10), 0);
    assert_int_equal(begun_of(&t[0]).version, 1);
}

/* ---- group commit --------------------------------------------------------------------------- */

static void test_commit(void **state)
{
    (void)state;
    ticket t[2], v[2];
    uint64_t version;
    assert_int_equal(state_of(2, sub[0], &version), DRAY_GROUP_EMPTY);
    begun b = both_begin(t);
    assert_int_equal(writing(2, sub[0], b.attempt), 0);
    assert_int_equal(writing(3, sub[1], b.attempt), 0);
    vote(2, sub[0], b.attempt, 0, 7, &v[0]);
    assert_int_equal(v[0].answered, 0);
    vote(3, sub[1], b.attempt, DRAY_ESYS, 0, &v[1]);
    assert_int_equal(v[0].code, DRAY_ETORN);
    assert_int_equal(v[1].code, DRAY_ETORN);
    assert_int_equal(state_of(3, sub[1], &version), DRAY_GROUP_TORN);
}

static void test_checksum_decides(void **state)
{
    (void)state;
    uint64_t one = subscriber(20, "single", 0, 1), version;
    ticket t, v;
    begin(20, one, 0, &t);
    begun b = begun_of(&t);
    vote_alone(20, one, b.attempt, 0, 8, &v); /* 7 was announced */
    assert_int_equal(v.code, DRAY_ECHECKSUM);
    assert_non_null(strstr(v.message, "w"));
    assert_int_equal(state_of(20, one, &version), DRAY_GROUP_EMPTY);
    begin(20, one, 0, &t);
    b = begun_of(&t);
    assert_int_equal(writing(20, one, b.attempt), 0);
    vote_alone(20, one, b.attempt, 0, 7, &v);
    assert_int_equal(v.code, 0);
    assert_int_equal(state_of(20, one, &version), DRAY_GROUP_WHOLE);
    assert_int_equal(version, 5);
}

static void compared_of(const ticket *t, uint64_t *tensors, uint64_t *bytes)
{
    assert_int_equal(t->answered, 1);
    assert_int_equal(t->code, 0);
    dray__reader in = dray__reader_of(t->data, t->size);
    *tensors = dray__get_u64(&in);
    *bytes = dray__get_u64(&in);
}

/* What a group holds follows from its layouts: ranks that count fewer elements, none, too many, or
 * those of another tensor do not get out of the comparison. */
static void test_coverage_is_not_what_ranks_say(void **state)
{
    (void)state;
    static const struct {
        const char *tensor;
        uint64_t elements;
    } wrong[] = {{"w", 19}, {"w", 0}, {"w", 21}, {"v", 20}};
    uint64_t one = subscriber(20, "single", 0, 1), tensors, bytes, version;
    ticket t, v;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        begin(20, one, 0, &t);
        begun b = begun_of(&t);
        assert_int_equal(writing(20, one, b.attempt), 0);
        vote_for(20, one, b.attempt, 0, wrong[i].tensor, wrong[i].elements, 7, &v);
        assert_int_equal(v.code, DRAY_ETORN);
        assert_non_null(strstr(v.message, wrong[i].tensor));
        assert_int_equal(state_of(20, one, &version), DRAY_GROUP_TORN);
    }
    begin(20, one, 0, &t);
    vote_alone(20, one, begun_of(&t).attempt, 0, 7, &v);
    compared_of(&v, &tensors, &bytes);
    assert_int_equal(tensors, 1);
    assert_int_equal(bytes, 80);
    /* publishers that forget elements do not, either */
    assert_int_equal(publish_part(1, pub, 6, 7, 19), 0);
    begin(20, one, 0, &t);
    vote_alone(20, one, begun_of(&t).attempt, 0, 7, &v);
    assert_int_equal(v.code, DRAY_ECHECKSUM);
    assert_non_null(strstr(v.message, "19"));
}

/* Ranks whose parts overlap, and a group that holds a tensor in part. */
static void test_coverage_of_parts(void **state)
{
    (void)state;
    uint64_t a = subscriber_of(20, "overlap", 0, 2, 0, 15), b, tensors, bytes;
    b = subscriber_of(21, "overlap", 1, 2, 5, 20);
    ticket t[2], v[2];
    begin(20, a, 0, &t[0]);
    begin(21, b, 0, &t[1]);
    vote_for(20, a, begun_of(&t[0]).attempt, 0, "w", 15, 3, &v[0]);
    vote_for(21, b, begun_of(&t[1]).attempt, 0, "w", 5, 4, &v[1]);
    compared_of(&v[1], &tensors, &bytes);
    assert_int_equal(tensors, 1);
    uint64_t part = subscriber_of(22, "part", 0, 1, 4, 9);
    begin(22, part, 0, &t[0]);
    vote_for(22, part, begun_of(&t[0]).attempt, 0, "w", 5, 99, &v[0]);
    compared_of(&v[0], &tensors, &bytes);
    assert_int_equal(tensors, 0);
    assert_int_equal(bytes, 0);
    begin(22, part, 0, &t[0]);
    vote_for(22, part, begun_of(&t[0]).attempt, 0, "w", 4, 99, &v[0]);
    assert_int_equal(v[0].code, DRAY_ECHECKSUM);
}

static void test_without_verification(void **state)
{
    (void)state;
    uint64_t tensors, bytes;
    ticket t[2], v[2];
    begin_verified(2, sub[0], 0, true, &t[0]);
    begin_verified(3, sub[1], 0, false, &t[1]);
    assert_int_equal(t[0].code, DRAY_EINVALID); /* one rank cannot do without */
    assert_int_equal(t[1].code, DRAY_EINVALID);
    begin_verified(2, sub[0], 0, false, &t[0]);
    begin_verified(3, sub[1], 0, false, &t[1]);
    vote_for(2, sub[0], begun_of(&t[0]).attempt, 0, "w", 0, 0, &v[0]);
    vote_for(3, sub[1], begun_of(&t[1]).attempt, 0, "w", 0, 0, &v[1]);
    compared_of(&v[0], &tensors, &bytes);
    assert_int_equal(tensors, 0);
    /* nobody can say what the group read */
    dray__writer w = {0};
    dray__put_string(&w, "m");
    dray__put_string(&w, "g");
    send(2, DRAY__MSG_CHECKSUMS_GET, &w, &t[0]);
    assert_int_equal(t[0].code, DRAY_ENOENT);
}

static void test_layouts_are_checked_when_they_come(void **state)
{
    (void)state;
    dray__writer w = {0};
    ticket t;
    dray__put_string(&w, "m");
    dray__put_string(&w, "bad");
    dray__put_u32(&w, 0);
    dray__put_u32(&w, 1);
    dray__put_u64(&w, 1);
    dray__put_string(&w, "");
    dray__put_u32(&w, 0);
    dray__put_u32(&w, 0);
    dray__put_blob(&w, "layout", 6);
    send(20, DRAY__MSG_SUBSCRIBER_OPEN, &w, &t);
    assert_int_equal(t.answered, 1);
    assert_int_equal(t.code, DRAY_EFORMAT);
}

static void test_abort_before_writing_keeps_the_old(void **state)
{
    (void)state;
    uint64_t one = subscriber(20, "single", 0, 1), version;
    ticket t, v;
    begin(20, one, 0, &t);
    vote_alone(20, one, begun_of(&t).attempt, 0, 7, &v);
    assert_int_equal(publish(1, pub, 6, 7), 0);
    begin(20, one, 6, &t);
    vote_alone(20, one, begun_of(&t).attempt, DRAY_ENOMEM, 0, &v);
    assert_int_equal(v.code, DRAY_ENOMEM);
    assert_int_equal(state_of(20, one, &version), DRAY_GROUP_WHOLE);
    assert_int_equal(version, 5);
}

static void test_death_of_a_rank(void **state)
{
    (void)state;
    ticket t[2], v;
    uint64_t version;
    begun b = both_begin(t);
    assert_int_equal(writing(3, sub[1], b.attempt), 0);
    vote(2, sub[0], b.attempt, 0, 7, &v);
    assert_int_equal(v.answered, 0);
    dray__registry_member_ended(r, 3);
    assert_int_equal(v.code, DRAY_ETORN);
    assert_int_equal(state_of(2, sub[0], &version), DRAY_GROUP_TORN);
    /* repaired by a new rank 1 and the next update */
    sub[1] = subscriber(30, "g", 1, 2);
    begin(2, sub[0], 0, &t[0]);
    begin(30, sub[1], 0, &t[1]);
    assert_int_equal(begun_of(&t[1]).version, 5);
}

static void test_death_of_the_publisher(void **state)
{
    (void)state;
    ticket t[2], v;
    begun b = both_begin(t);
    vote(2, sub[0], b.attempt, 0, 7, &v);
    dray__registry_member_ended(r, 1);
    assert_int_equal(v.code, DRAY_EDEAD);
    assert_int_equal(writing(3, sub[1], b.attempt), DRAY_EDEAD);
}

static void test_vote_deadline(void **state)
{
    (void)state;
    ticket t[2], v;
    begun b = both_begin(t);
    assert_int_equal(writing(3, sub[1], b.attempt), 0);
    vote(2, sub[0], b.attempt, 0, 7, &v);
    assert_true(v.deadline > 0);
    dray__registry_expired(r, &v, 0);
    assert_int_equal(v.answered, 1);
    assert_int_equal(v.code, DRAY_ETORN);
    assert_non_null(strstr(v.message, "rank 1"));
    vote(3, sub[1], b.attempt, 0, 0, &v);
    assert_int_equal(v.code, DRAY_ETORN);
}

static void test_begin_deadline_names_who_is_missing(void **state)
{
    (void)state;
    ticket t;
    begin(2, sub[0], 0, &t);
    dray__registry_expired(r, &t, 0);
    assert_int_equal(t.code, DRAY_ETIMEDOUT);
    assert_non_null(strstr(t.message, "rank 1"));
    ticket both[2];
    begin(2, sub[0], 9, &both[0]);
    begin(3, sub[1], 0, &both[1]);
    assert_int_equal(both[0].answered, 0);
    dray__registry_expired(r, &both[0], 0);
    assert_non_null(strstr(both[0].message, "version >= 9"));
    assert_int_equal(both[1].answered, 0);
    dray__registry_expired(r, &both[1], 1); /* its channel is gone, and so will be the ticket */
}

/* ---- the publisher's wait ------------------------------------------------------------------- */

static void test_wait_without_readers_withdraws(void **state)
{
    (void)state;
    ticket w, t[2];
    wait_for(1, pub, 5, 1000000, &w);
    assert_int_equal(w.answered, 1);
    begin(2, sub[0], 0, &t[0]);
    begin(3, sub[1], 0, &t[1]);
    assert_int_equal(t[0].answered, 0);
    assert_int_equal(publish(1, pub, 6, 7), 0);
    assert_int_equal(begun_of(&t[0]).version, 6);
}

static void test_wait_for_readers(void **state)
{
    (void)state;
    uint64_t one = subscriber(20, "single", 0, 1);
    ticket t, w, v;
    begin(20, one, 0, &t);
    wait_for(1, pub, 5, 1000000, &w);
    assert_int_equal(w.answered, 0);
    vote_alone(20, one, begun_of(&t).attempt, 0, 7, &v);
    assert_int_equal(v.code, 0);
    assert_int_equal(w.answered, 1);
    dray__reader in = dray__reader_of(w.data, w.size);
    assert_int_equal(dray__get_u32(&in), 0);
}

static void test_wait_drops_holdouts(void **state)
{
    (void)state;
    ticket t[2], w, v;
    uint64_t version;
    begun b = both_begin(t);
    assert_int_equal(writing(2, sub[0], b.attempt), 0);
    wait_for(1, pub, 5, 1000000, &w);
    assert_true(w.deadline > 0);
    dray__registry_expired(r, &w, 0);
    assert_int_equal(w.answered, 1);
    assert_int_equal(w.code, 0);
    dray__reader in = dray__reader_of(w.data, w.size);
    assert_int_equal(dray__get_u32(&in), 1);
    char *names = dray__get_string(&in, 100);
    assert_string_equal(names, "g");
    free(names);
    vote(2, sub[0], b.attempt, 0, 7, &v); /* right or not: too late */
    assert_int_equal(v.code, DRAY_ETORN);
    assert_int_equal(state_of(2, sub[0], &version), DRAY_GROUP_TORN);
}

static void test_wait_of_zero_drops_at_once(void **state)
{
    (void)state;
    ticket t[2], w;
    begun b = both_begin(t);
    wait_for(1, pub, 5, 0, &w);
    assert_int_equal(w.answered, 1);
    assert_int_equal(writing(2, sub[0], b.attempt), DRAY_ESTALE);
}

/* ---- bad requests --------------------------------------------------------------------------- */

static void test_garbage_is_refused(void **state)
{
    (void)state;
    const char *seed_text = getenv("DRAY_TEST_SEED");
    unsigned seed = seed_text ? (unsigned)atoi(seed_text) : (unsigned)getpid();
    print_message("seed %u\n", seed);
    srandom(seed);
    for (int i = 0; i < 20000; i++) {
        dray__writer w = {0};
        ticket t;
        size_t size = (size_t)(random() % 64);
        for (size_t k = 0; k < size; k++)
            dray__put_u8(&w, (uint8_t)(random() % 3 ? random() % 8 : random() % 256));
        if (!size)
            dray__put_u8(&w, 0);
        uint16_t type = (uint16_t)(0x0201 + random() % 24);
        memset(&t, 0, sizeof t);
        dray__party party = {1 + (uint64_t)(random() % 3), 7, 1, "x"};
        dray__reader in = dray__reader_of(w.data, w.size);
        int fd = random() % 4 ? -1 : open("/dev/null", O_RDONLY);
        dray__registry_handle(r, &party, type, &in, fd, &t);
        if (!t.answered)
            dray__registry_expired(r, &t, (int)(random() % 2));
        dray__writer_free(&w);
        assert_int_equal(t.answered, 1);
    }
}

static void test_keys_belong_to_their_member(void **state)
{
    (void)state;
    assert_int_equal(publish(2, pub, 6, 7), DRAY_ENOENT);
    assert_int_equal(publish(2, sub[0], 6, 7), DRAY_EINVALID);
}

static void test_regions_pass_on_descriptors(void **state)
{
    (void)state;
    dray__registry_member_ended(r, 1);
    dray__writer w = {0};
    ticket t, gang;
    dray__put_string(&w, "m");
    dray__put_u32(&w, 0);
    dray__put_u32(&w, 1);
    dray__put_u64(&w, 1);
    dray__put_string(&w, "");
    dray__put_u32(&w, 2);
    dray__put_u32(&w, 1);
    dray__put_u64(&w, 0);
    put_layout(&w, 0, 20);
    send(1, DRAY__MSG_PUBLISHER_OPEN, &w, &t);
    uint64_t key = first_u64(&t);
    dray__put_u64(&w, key);
    dray__put_u8(&w, DRAY__SOURCES_GANG);
    dray__put_i64(&w, 1000000);
    dray__put_u64(&w, 0);
    dray__put_u32(&w, 0);
    send(1, DRAY__MSG_UPDATE_SOURCES, &w, &gang);
    assert_int_equal(gang.answered, 0); /* region 1 is not there yet */
    int fd = open("/dev/null", O_RDONLY);
    dray__put_u64(&w, key);
    dray__put_u32(&w, 1);
    dray__put_blob(&w, "handle", 6);
    send_fd(1, DRAY__MSG_REGION_PUT, &w, fd, &t);
    assert_int_equal(t.code, 0);
    assert_int_equal(gang.answered, 1);
    dray__reader in = dray__reader_of(gang.data, gang.size);
    dray__get_u64(&in);
    uint64_t set = dray__get_u64(&in);
    for (uint32_t region = 0; region < 2; region++) {
        dray__put_u64(&w, sub[0]);
        dray__put_u64(&w, set);
        dray__put_u32(&w, 0);
        dray__put_u32(&w, region);
        send(2, DRAY__MSG_REGION_GET, &w, &t);
        assert_int_equal(t.code, region == 1 ? 0 : DRAY_ENOENT);
        if (region == 1)
            assert_int_equal(t.fd, fd);
    }
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_version_needs_every_rank),
        T(test_versions_grow),
        T(test_rank_taken),
        T(test_refused_group_leaves_nothing),
        T(test_same_number_of_a_new_incarnation),
        T(test_gang_breaks),
        T(test_commit),
        T(test_checksum_decides),
        T(test_coverage_is_not_what_ranks_say),
        T(test_coverage_of_parts),
        T(test_without_verification),
        T(test_layouts_are_checked_when_they_come),
        T(test_abort_before_writing_keeps_the_old),
        T(test_death_of_a_rank),
        T(test_death_of_the_publisher),
        T(test_vote_deadline),
        T(test_begin_deadline_names_who_is_missing),
        T(test_wait_without_readers_withdraws),
        T(test_wait_for_readers),
        T(test_wait_drops_holdouts),
        T(test_wait_of_zero_drops_at_once),
        T(test_garbage_is_refused),
        T(test_keys_belong_to_their_member),
        T(test_regions_pass_on_descriptors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
