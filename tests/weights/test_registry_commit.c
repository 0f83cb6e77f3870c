/* Tests the registry as a state machine: groups that commit together, and events that break
 * them. */
#include "weights/registry_client.h"

/* ---- group commit --------------------------------------------------------------------------- */

TEST_WITHIN(test_commit, setup, teardown)
{
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

TEST_WITHIN(test_checksum_decides, setup, teardown)
{
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
TEST_WITHIN(test_coverage_is_not_what_ranks_say, setup, teardown)
{
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
TEST_WITHIN(test_coverage_of_parts, setup, teardown)
{
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

TEST_WITHIN(test_without_verification, setup, teardown)
{
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

TEST_WITHIN(test_layouts_are_checked_when_they_come, setup, teardown)
{
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

TEST_WITHIN(test_abort_before_writing_keeps_the_old, setup, teardown)
{
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

TEST_WITHIN(test_death_of_a_rank, setup, teardown)
{
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

TEST_WITHIN(test_death_of_the_publisher, setup, teardown)
{
    ticket t[2], v;
    begun b = both_begin(t);
    vote(2, sub[0], b.attempt, 0, 7, &v);
    dray__registry_member_ended(r, 1);
    assert_int_equal(v.code, DRAY_EDEAD);
    assert_int_equal(writing(3, sub[1], b.attempt), DRAY_EDEAD);
}

TEST_WITHIN(test_vote_deadline, setup, teardown)
{
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

TEST_WITHIN(test_begin_deadline_names_who_is_missing, setup, teardown)
{
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

SUITE(NULL, NULL)
