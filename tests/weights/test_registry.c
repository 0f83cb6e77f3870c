/* Tests the registry as a state machine: trainers, versions, the publisher's wait, bad requests. */
#include "seed.h"
#include "weights/registry_client.h"

/* ---- versions ------------------------------------------------------------------------------- */

TEST_WITHIN(test_version_needs_every_rank, setup, teardown)
{
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

TEST_WITHIN(test_versions_grow, setup, teardown)
{
    assert_int_equal(publish(1, pub, 5, 7), DRAY_EINVALID);
    assert_int_equal(publish(1, pub, 4, 7), DRAY_EINVALID);
    assert_int_equal(publish(1, pub, 6, 7), 0);
    ticket t[2];
    assert_int_equal(both_begin(t).version, 6);
}

TEST_WITHIN(test_rank_taken, setup, teardown)
{
    uint64_t key;
    assert_int_equal(try_publisher(9, 0, 1, &key), DRAY_EEXIST);
    dray__registry_member_ended(r, 1);
    assert_int_equal(try_publisher(9, 0, 2, &key), 0);
    assert_int_equal(try_publisher(8, 0, 2, &key), DRAY_EEXIST);
    assert_int_equal(try_publisher(8, 1, 3, &key), DRAY_EINVALID);
    assert_int_equal(try_publisher(8, 2, 2, &key), DRAY_EINVALID);
}

/* What is refused leaves nothing behind: no group without ranks, which nothing would end. */
TEST_WITHIN(test_refused_group_leaves_nothing, setup, teardown)
{
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

TEST_WITHIN(test_same_number_of_a_new_incarnation, setup, teardown)
{
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

/* A rank of a whole trainer dies: its version is gone, survivors must open again. */
TEST_WITHIN(test_trainer_breaks, setup, teardown)
{
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

/* ---- the publisher's wait ------------------------------------------------------------------- */

TEST_WITHIN(test_wait_without_readers_withdraws, setup, teardown)
{
    ticket w, t[2];
    wait_for(1, pub, 5, 1000000, &w);
    assert_int_equal(w.answered, 1);
    begin(2, sub[0], 0, &t[0]);
    begin(3, sub[1], 0, &t[1]);
    assert_int_equal(t[0].answered, 0);
    assert_int_equal(publish(1, pub, 6, 7), 0);
    assert_int_equal(begun_of(&t[0]).version, 6);
}

TEST_WITHIN(test_wait_for_readers, setup, teardown)
{
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

TEST_WITHIN(test_wait_drops_holdouts, setup, teardown)
{
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

/* A group that still reads an older version than the one that is waited for. */
TEST_WITHIN(test_wait_drops_readers_of_older_versions, setup, teardown)
{
    ticket t[2], w;
    both_begin(t);
    assert_int_equal(publish(1, pub, 6, 7), 0);
    for (uint64_t version = 6; version >= 5; version--) {
        wait_for(1, pub, version, version == 6 ? 1000000 : 0, &w);
        if (version == 6)
            dray__registry_expired(r, &w, 0);
        assert_int_equal(w.answered, 1);
        assert_int_equal(w.code, 0);
        dray__reader in = dray__reader_of(w.data, w.size);
        assert_int_equal(dray__get_u32(&in), 1);
        char *names = dray__get_string(&in, 100);
        assert_string_equal(names, "g");
        free(names);
    }
}

TEST_WITHIN(test_wait_of_zero_drops_at_once, setup, teardown)
{
    ticket t[2], w;
    begun b = both_begin(t);
    wait_for(1, pub, 5, 0, &w);
    assert_int_equal(w.answered, 1);
    assert_int_equal(writing(2, sub[0], b.attempt), DRAY_ESTALE);
}

/* ---- bad requests --------------------------------------------------------------------------- */

TEST_WITHIN(test_garbage_is_refused, setup, teardown)
{
    unsigned seed = (unsigned)test_seed();
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

TEST_WITHIN(test_keys_belong_to_their_member, setup, teardown)
{
    assert_int_equal(publish(2, pub, 6, 7), DRAY_ENOENT);
    assert_int_equal(publish(2, sub[0], 6, 7), DRAY_EINVALID);
}

TEST_WITHIN(test_regions_pass_on_descriptors, setup, teardown)
{
    dray__registry_member_ended(r, 1);
    dray__writer w = {0};
    ticket t, trainer;
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
    dray__put_u8(&w, DRAY__SOURCES_TRAINER);
    dray__put_i64(&w, 1000000);
    dray__put_u64(&w, 0);
    dray__put_u32(&w, 0);
    send(1, DRAY__MSG_UPDATE_SOURCES, &w, &trainer);
    assert_int_equal(trainer.answered, 0); /* region 1 is not there yet */
    int fd = open("/dev/null", O_RDONLY);
    dray__put_u64(&w, key);
    dray__put_u32(&w, 1);
    dray__put_blob(&w, "handle", 6);
    send_fd(1, DRAY__MSG_REGION_PUT, &w, fd, &t);
    assert_int_equal(t.code, 0);
    assert_int_equal(trainer.answered, 1);
    dray__reader in = dray__reader_of(trainer.data, trainer.size);
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

/* ---- members that come back ------------------------------------------------------------------ */

static uint64_t come_back(uint64_t member, const char *group)
{
    const dray__rank_claim claim = {.set = 5,
                                    .incarnation = 1,
                                    .version = 1,
                                    .state = group ? DRAY_GROUP_WHOLE : DRAY_GROUP_EMPTY};
    static uint64_t tokens;
    const dray__sums none = {0};
    dray__writer w = {0};
    ticket t;
    dray__put_string(&w, "m");
    if (group)
        dray__put_string(&w, group);
    dray__put_u32(&w, 0);
    dray__put_u32(&w, 1);
    dray__put_u64(&w,
                  group ? 77 : 77 + tokens++); /* a publisher that moves draws one at each try */
    dray__put_string(&w, "");
    dray__put_u32(&w, 1);
    dray__put_u32(&w, 1);
    if (!group)
        dray__put_u64(&w, 0);
    put_layout(&w, 0, 20);
    dray__put_fields(&w, group ? &dray__subscriber_claim_fields : &dray__publisher_claim_fields,
                     &claim);
    if (!group)
        dray__sums_put(&w, &none);
    send(member, group ? DRAY__MSG_SUBSCRIBER_OPEN : DRAY__MSG_PUBLISHER_OPEN, &w, &t);
    return first_u64(&t);
}

static int put_region(uint64_t member, uint64_t key)
{
    dray__writer w = {0};
    ticket t;
    dray__put_u64(&w, key);
    dray__put_u32(&w, 0);
    dray__put_blob(&w, "handle", 6);
    send_fd(member, DRAY__MSG_REGION_PUT, &w, open("/dev/null", O_RDONLY), &t);
    return t.code;
}

/* Whoever has not got the answer asks again, and is not taken for another one. */
TEST_WITHIN(test_back_twice, setup, teardown)
{
    static const char *const groups[] = {NULL, "g"};
    for (uint64_t member = 1; member < 4; member++)
        dray__registry_member_ended(r, member);
    dray__registry_begin(r, 3);
    uint64_t keys[2], other;
    for (uint64_t i = 0; i < 2; i++) {
        keys[i] = come_back(20 + i, groups[i]);
        assert_int_equal(come_back(20 + i, groups[i]), keys[i]);
        for (int twice = 0; twice < 2; twice++) {
            assert_int_equal(put_region(20 + i, keys[i]), 0);
            assert_int_equal(put_region(20 + i, keys[i]), i ? 0 : DRAY_EINVALID);
            assert_int_equal(come_back(20 + i, groups[i]), keys[i]);
        }
        assert_int_equal(put_region(20 + i, keys[i]), 0);
    }
    assert_int_equal(try_publisher(29, 0, 1, &other), DRAY_EEXIST);
    assert_int_equal(publish(20, keys[0], 2, 7), 0);
    ticket t;
    begin(21, keys[1], 2, &t);
    assert_int_equal(begun_of(&t).version, 2);
}

SUITE(NULL, NULL)
