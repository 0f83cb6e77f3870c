/* Tests the registry as a state machine: its refusals to ranks that are late, early, of another
 * update, or of memory that they may not write yet. */
#include "weights/registry_client.h"

static uint64_t epoch_of(uint64_t member, uint64_t key)
{
    dray__writer w = {0};
    ticket t;
    dray__put_u64(&w, key);
    send(member, DRAY__MSG_GROUP_STATE, &w, &t);
    dray__reader in = dray__reader_of(t.data, t.size);
    dray__get_u64(&in);
    dray__get_u64(&in);
    dray__get_u8(&in);
    return dray__get_u64(&in);
}

/* ---- votes ---------------------------------------------------------------------------------- */

TEST_WITHIN(test_votes_are_of_the_update_and_final, setup, teardown)
{
    ticket t[2], v, kept;
    uint64_t version;
    begun b = both_begin(t);
    vote(2, sub[0], b.attempt, 0, 3, &kept);
    assert_int_equal(kept.answered, 0);
    vote(2, sub[0], b.attempt, 0, 3, &v);
    assert_int_equal(v.code, DRAY_EPROTO);
    assert_int_equal(writing(2, sub[0], b.attempt), DRAY_EPROTO); /* it said what lies there */
    vote(3, sub[1], b.attempt - 1, 0, 4, &v);
    assert_int_equal(v.code, DRAY_ESTALE);
    vote(3, sub[1], b.attempt + 1, 0, 4, &v);
    assert_int_equal(v.code, DRAY_ESTALE);
    assert_int_equal(state_of(3, sub[1], &version), DRAY_GROUP_EMPTY);
    vote(3, sub[1], b.attempt, 0, 4, &v);
    assert_int_equal(v.code, 0);
    assert_int_equal(kept.answered, 1);
    assert_int_equal(kept.code, 0);
    assert_int_equal(state_of(3, sub[1], &version), DRAY_GROUP_WHOLE);
    dray__registry_member_ended(r, 3); /* and its part of the version with it */
    assert_int_equal(state_of(2, sub[0], &version), DRAY_GROUP_TORN);
}

/* All that was published is right, and something is counted that nobody published. */
TEST_WITHIN(test_votes_are_on_known_tensors, setup, teardown)
{
    uint64_t one = subscriber(20, "single", 0, 1);
    ticket t, v;
    begin(20, one, 0, &t);
    dray__writer w = {0};
    dray__sums sums = {0}, none = {0};
    dray__sums_add(&sums, "w", DRAY_F32, 20, 7);
    dray__sums_add(&sums, "v", DRAY_F32, 20, 7);
    dray__put_u64(&w, one);
    dray__put_u64(&w, begun_of(&t).attempt);
    dray__put_u32(&w, 0);
    dray__put_string(&w, "");
    dray__put_i64(&w, 1000000);
    dray__sums_put(&w, &sums);
    dray__sums_put(&w, &none);
    dray__put_u8(&w, DRAY__HELD_AS_READ);
    dray__sums_put(&w, &none);
    dray__sums_free(&sums);
    send(20, DRAY__MSG_UPDATE_VOTE, &w, &v);
    assert_int_equal(v.code, DRAY_ECHECKSUM);
    assert_non_null(strstr(v.message, "no layout has it"));
}

TEST_WITHIN(test_ranks_verify_alike, setup, teardown)
{
    for (int first = 0; first < 2; first++) {
        ticket t[2];
        begin_verified(2, sub[0], 0, first, &t[0]);
        begin_verified(3, sub[1], 0, !first, &t[1]);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(t[i].answered, 1);
            assert_int_equal(t[i].code, DRAY_EINVALID);
        }
    }
}

TEST_WITHIN(test_commits_are_of_what_was_staged, setup, teardown)
{
    uint64_t one = subscriber(20, "single", 0, 1);
    ticket t, v;
    begin_for(20, one, 0, true, DRAY__COMMIT, &t);
    assert_int_equal(t.code, DRAY_ENOENT);
    begin_for(20, one, 0, true, DRAY__PREFETCH, &t);
    vote_alone(20, one, begun_of(&t).attempt, 0, 7, &v);
    assert_int_equal(v.code, 0);
    begin_for(20, one, 6, true, DRAY__COMMIT, &t); /* 5 is staged */
    assert_int_equal(t.code, DRAY_ENOENT);
    begin_for(20, one, 5, true, DRAY__COMMIT, &t);
    assert_int_equal(begun_of(&t).version, 5);
}

/* ---- publishers ----------------------------------------------------------------------------- */

/* A rank that is ahead has overwritten its part of what the others still have. */
TEST_WITHIN(test_nobody_begins_what_one_rank_overwrote, setup, teardown)
{
    dray__registry_member_ended(r, 1);
    uint64_t a = publisher(10, 0, 2), b = publisher(11, 1, 2);
    ticket t[2];
    assert_int_equal(publish_part(10, a, 5, 3, 10), 0);
    assert_int_equal(publish_part(11, b, 5, 4, 10), 0);
    assert_int_equal(publish_part(10, a, 6, 3, 10), 0);
    begin(2, sub[0], 0, &t[0]);
    begin(3, sub[1], 0, &t[1]);
    assert_int_equal(t[0].answered, 0);
    assert_int_equal(publish_part(11, b, 6, 4, 10), 0);
    assert_int_equal(begun_of(&t[0]).version, 6);
}

static int deliver(uint64_t version, ticket *t)
{
    dray__writer w = {0};
    dray__put_u64(&w, pub);
    dray__put_u64(&w, version);
    dray__put_u32(&w, 1);
    dray__put_u32(&w, 0);
    dray__put_i64(&w, 1000000);
    send(1, DRAY__MSG_PUBLISHER_DELIVER, &w, t);
    return t->code;
}

TEST_WITHIN(test_publishers_wait_for_what_they_published, setup, teardown)
{
    ticket t, w;
    assert_int_equal(deliver(6, &t), DRAY_EINVALID);
    assert_int_equal(deliver(5, &t), 0);
    assert_int_equal(t.answered, 0);
    dray__registry_expired(r, &t, 0);
    wait_for(1, pub, 6, 0, &w);
    assert_int_equal(w.code, DRAY_EINVALID);
}

TEST_WITHIN(test_released_memory_is_not_published, setup, teardown)
{
    dray__writer w = {0};
    ticket t;
    dray__put_u64(&w, pub);
    dray__put_i64(&w, 0);
    send(1, DRAY__MSG_REGIONS_RELEASE, &w, &t);
    assert_int_equal(t.code, 0);
    assert_int_equal(publish(1, pub, 6, 7), DRAY_ESTALE);
}

static int members_of(uint64_t set)
{
    dray__writer w = {0};
    ticket t;
    dray__put_u64(&w, sub[0]);
    dray__put_u8(&w, DRAY__SOURCES_MEMBERS);
    dray__put_i64(&w, 1000000);
    dray__put_u64(&w, set);
    dray__put_u32(&w, 0);
    send(2, DRAY__MSG_UPDATE_SOURCES, &w, &t);
    assert_int_equal(t.answered, 1);
    return t.code;
}

/* The survivors of a trainer that lost a rank are nobody's source any more. */
TEST_WITHIN(test_a_broken_trainer_is_no_source, setup, teardown)
{
    dray__registry_member_ended(r, 1);
    uint64_t a = publisher(10, 0, 2), b = publisher(11, 1, 2);
    ticket t[2];
    assert_int_equal(publish_part(10, a, 1, 3, 10), 0);
    assert_int_equal(publish_part(11, b, 1, 4, 10), 0);
    both_begin(t);
    dray__reader in = dray__reader_of(t[0].data, t[0].size);
    dray__get_u64(&in);
    dray__get_u8(&in);
    dray__get_u64(&in);
    dray__get_u64(&in);
    dray__get_u8(&in);
    uint64_t set = dray__get_u64(&in);
    assert_int_equal(members_of(set), 0);
    dray__registry_member_ended(r, 11);
    assert_int_equal(members_of(set), DRAY_ESTALE);
}

TEST_WITHIN(test_dropped_readers_are_in_a_new_epoch, setup, teardown)
{
    ticket t[2], w;
    uint64_t before = epoch_of(2, sub[0]);
    both_begin(t);
    assert_int_equal(epoch_of(2, sub[0]), before);
    wait_for(1, pub, 5, 0, &w);
    assert_int_equal(w.answered, 1);
    assert_int_equal(epoch_of(2, sub[0]), before + 1);
}

/* ---- leases --------------------------------------------------------------------------------- */

/* A group of one rank whose memory others can map. */
static uint64_t sharing(uint64_t member, const char *group)
{
    dray__writer w = {0};
    ticket t;
    dray__put_string(&w, "m");
    dray__put_string(&w, group);
    dray__put_u32(&w, 0);
    dray__put_u32(&w, 1);
    dray__put_u64(&w, 1);
    dray__put_string(&w, "");
    dray__put_u32(&w, 1);
    dray__put_u32(&w, 1);
    put_layout(&w, 0, 20);
    send(member, DRAY__MSG_SUBSCRIBER_OPEN, &w, &t);
    uint64_t key = first_u64(&t);
    dray__put_u64(&w, key);
    dray__put_u32(&w, 0);
    dray__put_blob(&w, "handle", 6);
    send_fd(member, DRAY__MSG_REGION_PUT, &w, open("/dev/null", O_RDONLY | O_CLOEXEC), &t);
    assert_int_equal(t.code, 0);
    return key;
}

static void ask_to_write(uint64_t member, uint64_t key, uint64_t attempt, int64_t lease, ticket *t)
{
    dray__writer w = {0};
    dray__put_u64(&w, key);
    dray__put_u64(&w, attempt);
    dray__put_i64(&w, lease);
    send(member, DRAY__MSG_UPDATE_WRITING, &w, t);
}

/* A peer is overwritten once its reader is done, or its lease ended: then the reader is in a new
 * epoch, and what it votes is refused. */
TEST_WITHIN(test_overwrites_wait_for_readers, setup, teardown)
{
    uint64_t peer = sharing(20, "peer"), reader = sharing(30, "reader");
    ticket t, v, w;
    begin(20, peer, 0, &t);
    vote_alone(20, peer, begun_of(&t).attempt, 0, 7, &v);
    assert_int_equal(v.code, 0);
    dray__registry_member_ended(r, 1);
    begin(30, reader, 0, &t);
    begun read = begun_of(&t);
    assert_int_equal(read.version, 5); /* out of the peer's memory */
    uint64_t before = epoch_of(30, reader), again = publisher(50, 0, 1);
    assert_int_equal(publish(50, again, 6, 7), 0);
    begin(20, peer, 6, &t);
    begun next = begun_of(&t);
    ask_to_write(20, peer, next.attempt, 1000000, &w);
    assert_int_equal(w.answered, 0);
    assert_true(w.deadline > 0);
    dray__registry_expired(r, &w, 0);
    assert_int_equal(w.answered, 1);
    assert_int_equal(w.code, 0);
    assert_int_equal(epoch_of(30, reader), before + 1);
    vote_alone(30, reader, read.attempt, 0, 7, &v);
    assert_int_equal(v.code, DRAY_ESTALE);
}

SUITE(NULL, NULL)
