/* Tests the registry as a state machine: versions whose sums come after they were announced. */
#include "weights/registry_client.h"

static int announce(uint64_t member, uint64_t key, uint64_t version, uint8_t checked)
{
    dray__writer w = {0};
    dray__sums none = {0};
    ticket t;
    dray__put_u64(&w, key);
    dray__put_u64(&w, version);
    dray__put_u8(&w, checked);
    dray__sums_put(&w, &none);
    send(member, DRAY__MSG_PUBLISH, &w, &t);
    assert_int_equal(t.answered, 1);
    return t.code;
}

static int tell_sums(uint64_t member, uint64_t key, uint64_t version, int code, uint64_t elements,
                     uint64_t sum)
{
    dray__writer w = {0};
    dray__sums sums = {0};
    ticket t;
    if (elements)
        dray__sums_add(&sums, "w", DRAY_F32, elements, sum);
    dray__put_u64(&w, key);
    dray__put_u64(&w, version);
    dray__put_u32(&w, (uint32_t)code);
    dray__put_string(&w, code ? "its memory broke" : "");
    dray__sums_put(&w, &sums);
    dray__sums_free(&sums);
    send(member, DRAY__MSG_PUBLISH_SUMS, &w, &t);
    assert_int_equal(t.answered, 1);
    return t.code;
}

static int ask_sums(uint64_t *version)
{
    dray__writer w = {0};
    ticket t;
    dray__put_string(&w, "m");
    dray__put_string(&w, "");
    send(9, DRAY__MSG_CHECKSUMS_GET, &w, &t);
    if (t.code == 0)
        *version = first_u64(&t);
    return t.code;
}

/* Both ranks of the group have voted for version 6, whose sums are not there. */
static begun both_voted(uint64_t sum, ticket v[2])
{
    ticket t[2];
    assert_int_equal(announce(1, pub, 6, DRAY__CHECKED_LATER), 0);
    begun b = both_begin(t);
    assert_int_equal(b.version, 6);
    assert_int_equal(writing(2, sub[0], b.attempt), 0);
    assert_int_equal(writing(3, sub[1], b.attempt), 0);
    vote(2, sub[0], b.attempt, 0, sum / 2, &v[0]);
    vote(3, sub[1], b.attempt, 0, sum - sum / 2, &v[1]);
    assert_int_equal(v[0].answered + v[1].answered, 0);
    return b;
}

TEST_WITHIN(test_sums_decide, setup, teardown)
{
    ticket v[2];
    uint64_t version = 0;
    both_voted(11, v);
    assert_int_equal(ask_sums(&version), DRAY_EAGAIN);
    assert_int_equal(tell_sums(1, pub, 6, 0, 20, 11), 0);
    assert_int_equal(v[0].answered + v[1].answered, 2);
    assert_int_equal(v[0].code, 0);
    assert_int_equal(v[1].code, 0);
    assert_int_equal(state_of(2, sub[0], &version), DRAY_GROUP_WHOLE);
    assert_int_equal(version, 6);
    assert_int_equal(ask_sums(&version), 0);
    assert_int_equal(version, 6);
    /* said again, as after an answer that was lost: the first ones count */
    assert_int_equal(tell_sums(1, pub, 6, 0, 20, 12), 0);
    /* of a version that nobody can read any more, and of one that was never announced */
    assert_int_equal(tell_sums(1, pub, 5, 0, 20, 7), 0);
    assert_int_equal(tell_sums(1, pub, 7, 0, 20, 7), DRAY_EINVALID);
    assert_int_equal(announce(1, pub, 7, 3), DRAY_EINVALID);
}

TEST_WITHIN(test_other_sums_tear, setup, teardown)
{
    ticket v[2];
    uint64_t version;
    both_voted(11, v);
    assert_int_equal(tell_sums(1, pub, 6, 0, 20, 12), 0);
    assert_int_equal(v[0].code, DRAY_ETORN);
    assert_non_null(strstr(v[0].message, "differ from the published version"));
    assert_int_equal(state_of(3, sub[1], &version), DRAY_GROUP_TORN);
}

TEST_WITHIN(test_no_sums_tear, setup, teardown)
{
    static ticket v[2], t; /* what waits at the end is refused by the teardown */
    uint64_t version;
    both_voted(11, v);
    assert_int_equal(tell_sums(1, pub, 6, DRAY_ESYS, 0, 0), 0);
    assert_int_equal(v[0].code, DRAY_ETORN);
    assert_int_equal(v[1].code, DRAY_ETORN);
    assert_non_null(strstr(v[0].message, "publisher rank 0 (somebody)"));
    assert_non_null(strstr(v[0].message, "its memory broke"));
    assert_int_equal(ask_sums(&version), DRAY_ENOENT);
    begin(2, sub[0], 0, &t); /* nobody is given it any more */
    assert_int_equal(t.answered, 0);
    begin(3, sub[1], 0, &v[0]);
    assert_int_equal(v[0].answered, 0);
}

TEST_WITHIN(test_publisher_that_dies_tears, setup, teardown)
{
    ticket v[2];
    uint64_t version;
    both_voted(11, v);
    dray__registry_member_ended(r, 1);
    assert_int_equal(v[0].code, DRAY_ETORN);
    assert_int_equal(v[1].code, DRAY_ETORN);
    assert_int_equal(state_of(2, sub[0], &version), DRAY_GROUP_TORN);
}

TEST_WITHIN(test_deadline_names_who_has_not_summed, setup, teardown)
{
    ticket v[2];
    both_voted(11, v);
    dray__registry_expired(r, &v[1], 0);
    assert_int_equal(v[0].code, DRAY_ETORN);
    assert_int_equal(v[1].code, DRAY_ETORN);
    assert_non_null(strstr(v[0].message, "rank 0 (somebody)"));
    assert_non_null(strstr(v[0].message, "checksums of version 6"));
    assert_int_equal(tell_sums(1, pub, 6, 0, 20, 11), 0); /* too late, and no harm */
}

TEST_WITHIN(test_wait_drops_who_waits_for_sums, setup, teardown)
{
    ticket v[2], w;
    both_voted(11, v);
    wait_for(1, pub, 6, 0, &w);
    assert_int_equal(w.answered, 1);
    assert_int_equal(v[0].code, DRAY_ETORN);
    assert_non_null(strstr(v[0].message, "dropped"));
}

/* Without verification nobody waits for sums. */
TEST_WITHIN(test_unverified_does_not_wait, setup, teardown)
{
    uint64_t one = subscriber(20, "single", 0, 1), version;
    ticket t, v;
    assert_int_equal(announce(1, pub, 6, DRAY__CHECKED_LATER), 0);
    begin_verified(20, one, 0, false, &t);
    vote_alone(20, one, begun_of(&t).attempt, 0, 0, &v);
    assert_int_equal(v.answered, 1);
    assert_int_equal(v.code, 0);
    assert_int_equal(state_of(20, one, &version), DRAY_GROUP_WHOLE);
}

/* Of two ranks, in either order, one of which says its sums at once. */
TEST_WITHIN(test_sums_of_all_ranks, setup, teardown)
{
    for (int order = 0; order < 3; order++) {
        dray__registry_member_ended(r, 1);
        dray__registry_member_ended(r, 4);
        uint64_t p[2] = {publisher(1, 0, 2), publisher(4, 1, 2)}, one, version;
        ticket t, v;
        one = subscriber(20 + (uint64_t)order, "single", 0, 1);
        assert_int_equal(announce(1, p[0], 6, DRAY__CHECKED_LATER), 0);
        if (order == 2)
            assert_int_equal(publish_part(4, p[1], 6, 5, 10), 0);
        else
            assert_int_equal(announce(4, p[1], 6, DRAY__CHECKED_LATER), 0);
        begin(20 + (uint64_t)order, one, 0, &t);
        vote_alone(20 + (uint64_t)order, one, begun_of(&t).attempt, 0, 11, &v);
        assert_int_equal(v.answered, 0);
        if (order == 0) { /* twice: the first ones count */
            assert_int_equal(tell_sums(4, p[1], 6, 0, 10, 5), 0);
            assert_int_equal(tell_sums(4, p[1], 6, 0, 10, 99), 0);
        } else if (order == 1)
            assert_int_equal(tell_sums(1, p[0], 6, 0, 10, 6), 0);
        assert_int_equal(v.answered, 0);
        if (order == 1)
            assert_int_equal(tell_sums(4, p[1], 6, 0, 10, 5), 0);
        else
            assert_int_equal(tell_sums(1, p[0], 6, 0, 10, 6), 0);
        assert_int_equal(v.answered, 1);
        assert_int_equal(v.code, 0);
        assert_int_equal(state_of(20 + (uint64_t)order, one, &version), DRAY_GROUP_WHOLE);
        dray__registry_member_ended(r, 20 + (uint64_t)order);
    }
}

SUITE(NULL, NULL)
