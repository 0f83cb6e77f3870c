/* Tests random histories of the registry. Publishers and engine ranks open, publish, begin, write,
 * vote, prefetch, leave, die and time out in any order, also with repeated and late messages. The
 * registry itself dies with its coordinator, and the members that live return to the next one,
 * sooner or later, and report their former state. A simple model has the rules:
 *
 *  - a group is reported whole only with a version that all of its ranks voted for in one attempt,
 *    and after which none of them wrote anything else;
 *  - a request is answered exactly once;
 *  - a publisher's delivery of a version succeeds when, and only when, a group has committed it, or
 *    a newer one of the same incarnation;
 *  - when no update is under way, no member holds a lease. */
#include "control/protocol.h"
#include "seed.h"
#include "suite.h"
#include "weights/numbers.h"
#include "weights/registry/state.h"
#include "weights/registry_layout.h"

#include <dray/weights.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PUBLISHERS = 2, GROUPS = 3, RANKS = 2, TICKETS = 4096, STEPS = 400 };

typedef struct ticket {
    int answered, code, fd;
    struct rank *rank;
    uint64_t delivers, key; /* a version, of this publisher; 0: it is no delivery */
    uint8_t data[512];
    size_t size;
} ticket;

/* What the model knows of a rank: `holds` is the version in its memory, 0 when that is mixed. */
typedef struct rank {
    uint64_t member, key; /* member 0: dead */
    uint32_t group, index;
    uint64_t attempt, goal, holds, staged;
    uint8_t purpose;
    bool asked; /* to write */
    ticket *begin, *vote;
    /* What it has heard of its group, and says when it comes back (`away`: it has not yet). */
    bool away, has_staged;
    uint8_t state;
    uint64_t goal_incarnation, version, incarnation, staged_version, staged_incarnation;
} rank;

static dray__registry *r;
static ticket *tickets;
static uint32_t ticket_count;
static uint64_t next_member, version, seed_state;
static uint64_t publisher_key[PUBLISHERS], publisher_member[PUBLISHERS];
static uint64_t published[PUBLISHERS], waited[PUBLISHERS];
static uint64_t known_incarnation[PUBLISHERS]; /* of those that are away */
static bool publisher_away[PUBLISHERS];
static struct { /* by some group */
    uint64_t incarnation, version;
} committed[STEPS];
static uint32_t incarnations;
static uint64_t generation;
static bool dying; /* the registry: nobody hears what it answers */
static rank ranks[GROUPS][RANKS];

static uint32_t draw(uint32_t n)
{
    seed_state = seed_state * 6364136223846793005ULL + 1442695040888963407ULL;
    return (uint32_t)(seed_state >> 33) % n;
}

/* The newest version of the incarnation that some group had until now. */
static uint64_t newest_committed(uint64_t incarnation)
{
    uint32_t at = 0;
    while (at < incarnations && committed[at].incarnation != incarnation)
        at++;
    if (at == incarnations) {
        assert_true(incarnations++ < STEPS);
        committed[at].incarnation = incarnation;
        committed[at].version = 0;
    }
    for (const struct model *m = r->models; m; m = m->next)
        for (const struct group *g = m->groups; g; g = g->next)
            if (g->state == DRAY_GROUP_WHOLE && g->now.incarnation == incarnation &&
                g->now.version + numbers_less() > committed[at].version)
                committed[at].version = g->now.version + numbers_less();
    return committed[at].version;
}

static void check_delivered(const ticket *t)
{
    for (const struct registrant *e = r->entries; e; e = e->next)
        if (e->trainer && e->key == t->key)
            assert_true(newest_committed(e->trainer->incarnation) >= t->delivers);
}

static void answer(void *user, void *at, const dray_error *error, dray__writer *payload, int fd)
{
    (void)user;
    ticket *t = at;
    assert_int_equal(t->answered++, 0);
    if (dying)
        return;
    if (t->delivers && !error)
        check_delivered(t);
    t->fd = fd;
    if (error) {
        t->code = error->code;
        assert_true(error->message[0]);
    } else if (payload) {
        assert_true(payload->size <= sizeof t->data);
        memcpy(t->data, payload->data, payload->size);
        t->size = payload->size;
    }
}

static void expire_at(void *user, void *at, int64_t deadline)
{
    (void)user, (void)at, (void)deadline;
}

static ticket *send(uint64_t member, uint16_t type, dray__writer *w)
{
    assert_true(ticket_count < TICKETS);
    ticket *t = &tickets[ticket_count++];
    memset(t, 0, sizeof *t);
    dray__party party = {member, 7, 1000 + (int64_t)member, "somebody"};
    dray__reader in = dray__reader_of(w->data, w->size);
    dray__registry_handle(r, &party, type, &in, -1, t);
    dray__writer_free(w);
    return t;
}

static uint64_t first_u64(const ticket *t)
{
    dray__reader in = dray__reader_of(t->data, t->size);
    return dray__get_u64(&in);
}

/* ---- what members do ------------------------------------------------------------------------ */

/* What a publisher published last, to the next coordinator. */
static void put_publisher_claim(dray__writer *w, uint32_t i)
{
    dray__sums sums = {0};
    if (published[i])
        dray__sums_add(&sums, "w", DRAY_F32, 10, published[i]);
    dray__put_u64(w, 0);
    dray__put_u64(w, known_incarnation[i]);
    dray__put_u8(w, published[i] != 0);
    dray__put_u64(w, number_given(published[i]));
    dray__put_u8(w, 1);
    dray__put_u8(w, waited[i] < published[i]);
    dray__sums_put(w, &sums);
    dray__sums_free(&sums);
}

static void open_publisher(uint32_t i)
{
    dray__writer w = {0};
    dray__put_string(&w, "m");
    dray__put_u32(&w, i);
    dray__put_u32(&w, PUBLISHERS);
    dray__put_u64(&w, 1);
    dray__put_string(&w, "");
    dray__put_u32(&w, 0);
    dray__put_u32(&w, 0);
    dray__put_u64(&w, 0);
    put_layout(&w, 10 * i, 10 * i + 10);
    if (publisher_away[i])
        put_publisher_claim(&w, i);
    else
        publisher_member[i] = ++next_member;
    const ticket *t = send(publisher_member[i], DRAY__MSG_PUBLISHER_OPEN, &w);
    if (t->code == 0)
        publisher_key[i] = first_u64(t);
    else
        publisher_member[i] = 0;
    if (t->code || !publisher_away[i])
        published[i] = waited[i] = 0;
    publisher_away[i] = false;
}

static void open_rank(rank *k)
{
    char name[8];
    snprintf(name, sizeof name, "g%u", k->group);
    dray__writer w = {0};
    dray__put_string(&w, "m");
    dray__put_string(&w, name);
    dray__put_u32(&w, k->index);
    dray__put_u32(&w, RANKS);
    dray__put_u64(&w, 1);
    dray__put_string(&w, "");
    dray__put_u32(&w, 1);
    dray__put_u32(&w, 0);
    put_layout(&w, 10 * k->index, 10 * k->index + 10);
    if (k->away) {
        dray__put_u64(&w, 0);
        dray__put_u8(&w, k->state);
        dray__put_u8(&w, DRAY_MODE_TENSOR);
        dray__put_u64(&w, number_given(k->version));
        dray__put_u64(&w, k->incarnation);
        dray__put_u8(&w, k->has_staged);
        dray__put_u64(&w, k->has_staged ? number_given(k->staged_version) : 0);
        dray__put_u64(&w, k->has_staged ? k->staged_incarnation : 0);
    } else {
        *k = (rank){.member = ++next_member, .group = k->group, .index = k->index};
    }
    k->away = false;
    const ticket *t = send(k->member, DRAY__MSG_SUBSCRIBER_OPEN, &w);
    assert_int_equal(t->code, 0);
    k->key = first_u64(t);
}

static void die(uint64_t *member)
{
    uint64_t gone = *member;
    *member = 0;
    for (uint32_t i = 0; i < PUBLISHERS; i++)
        publisher_away[i] = publisher_away[i] && member != &publisher_member[i];
    for (uint32_t g = 0; g < GROUPS; g++)
        for (uint32_t i = 0; i < RANKS; i++)
            ranks[g][i].away = ranks[g][i].away && member != &ranks[g][i].member;
    for (uint32_t i = 0; i < ticket_count;
         i++) /* what it waits for first, as the coordinator does */
        if (!tickets[i].answered && tickets[i].rank && tickets[i].rank->member == 0)
            dray__registry_expired(r, &tickets[i], 1);
    dray__registry_member_ended(r, gone);
}

static void publish(uint32_t i)
{
    uint64_t number = published[i] < version && draw(3) ? version : ++version;
    dray__writer w = {0};
    dray__sums sums = {0};
    dray__sums_add(&sums, "w", DRAY_F32, 10, number);
    dray__put_u64(&w, publisher_key[i]);
    dray__put_u64(&w, number_given(number));
    dray__put_u8(&w, 1);
    dray__sums_put(&w, &sums);
    dray__sums_free(&sums);
    if (send(publisher_member[i], DRAY__MSG_PUBLISH, &w)->code == 0)
        published[i] = number;
}

static void wait_for_readers(uint32_t i)
{
    dray__writer w = {0};
    dray__put_u64(&w, publisher_key[i]);
    dray__put_u64(&w, number_given(published[i]));
    dray__put_i64(&w, draw(2) ? 0 : 1000000000);
    send(publisher_member[i], DRAY__MSG_PUBLISHER_WAIT, &w);
    waited[i] = published[i];
}

/* To any group. */
static void deliver(uint32_t i)
{
    dray__writer w = {0};
    dray__put_u64(&w, publisher_key[i]);
    dray__put_u64(&w, number_given(published[i]));
    dray__put_u32(&w, 1);
    dray__put_u32(&w, 0);
    dray__put_i64(&w, 1000000000);
    ticket *t = send(publisher_member[i], DRAY__MSG_PUBLISHER_DELIVER, &w);
    t->delivers = published[i];
    t->key = publisher_key[i];
    if (t->answered && !t->code)
        check_delivered(t);
}

static void begin(rank *k, uint8_t purpose)
{
    dray__writer w = {0};
    dray__put_u64(&w, k->key);
    dray__put_u8(&w, DRAY_MODE_TENSOR);
    dray__put_u64(&w, 0);
    dray__put_string(&w, "");
    dray__put_u64(&w, 0);
    dray__put_u8(&w, 1);
    dray__put_i64(&w, 1000000000);
    dray__put_u8(&w, purpose);
    dray__put_u8(&w, 0);
    dray__put_u64(&w, 0);
    dray__put_u64(&w, 0);
    ticket *t = &tickets[ticket_count]; /* others may be answered inside */
    k->begin = t;
    k->purpose = purpose;
    k->attempt = 0;
    k->asked = false;
    send(k->member, DRAY__MSG_UPDATE_BEGIN, &w);
    t->rank = k;
}

static void ask_to_write(rank *k)
{
    dray__writer w = {0};
    dray__put_u64(&w, k->key);
    dray__put_u64(&w, k->attempt);
    dray__put_i64(&w, 1000000000);
    const ticket *t = send(k->member, DRAY__MSG_UPDATE_WRITING, &w);
    if (t->code || !t->answered)
        return;
    k->asked = true;
    if (k->purpose == DRAY__PREFETCH) {
        k->staged = 0;
        k->has_staged = false;
    } else {
        k->holds = 0;
        k->state = DRAY_GROUP_TORN;
    }
}

static void vote(rank *k, bool ok)
{
    dray__writer w = {0};
    dray__sums sums = {0}, none = {0};
    uint64_t moved = k->purpose == DRAY__COMMIT ? k->staged : k->goal;
    /* who was not let write has moved nothing, who has not staged the goal does not commit it */
    ok = ok && (k->purpose != DRAY__COMMIT || k->staged == k->goal);
    bool full = ok && k->asked && k->purpose != DRAY__COMMIT;
    if (full)
        dray__sums_add(&sums, "w", DRAY_F32, 10, moved);
    dray__put_u64(&w, k->key);
    dray__put_u64(&w, k->attempt);
    dray__put_u32(&w, ok && k->asked ? 0 : (uint32_t)DRAY_ESYS);
    dray__put_string(&w, "it broke");
    dray__put_i64(&w, 1000000000);
    dray__sums_put(&w, &sums);
    dray__sums_put(&w, &none);
    dray__put_u8(&w, DRAY__HELD_AS_READ);
    dray__sums_put(&w, &none);
    dray__sums_free(&sums);
    if (ok && k->asked && k->purpose == DRAY__PREFETCH)
        k->staged = moved;
    if (ok && k->asked && k->purpose != DRAY__PREFETCH)
        k->holds = moved;
    ticket *t = &tickets[ticket_count];
    k->vote = t;
    send(k->member, DRAY__MSG_UPDATE_VOTE, &w);
    t->rank = k;
}

/* Takes in what was answered to the rank. */
static void hear(rank *k)
{
    if (k->begin && k->begin->answered) {
        if (k->begin->code == 0) {
            dray__reader in = dray__reader_of(k->begin->data, k->begin->size);
            k->attempt = dray__get_u64(&in);
            dray__get_u8(&in);
            k->goal_incarnation = dray__get_u64(&in);
            k->goal = dray__get_u64(&in) + numbers_less();
        }
        k->begin = NULL;
    }
    if (k->vote && k->vote->answered) {
        if (k->vote->code == 0 && k->purpose == DRAY__PREFETCH) {
            k->has_staged = true;
            k->staged_version = k->goal;
            k->staged_incarnation = k->goal_incarnation;
        } else if (k->vote->code == 0) {
            k->state = DRAY_GROUP_WHOLE;
            k->version = k->goal;
            k->incarnation = k->goal_incarnation;
            k->has_staged = k->has_staged && k->purpose != DRAY__COMMIT;
        }
        k->vote = NULL;
        k->attempt = 0;
        k->asked = false;
    }
}

/* ---- the coordinator dies -------------------------------------------------------------------- */

static void new_registry(void)
{
    dray__registry_ops ops = {answer, expire_at, NULL, NULL};
    assert_int_equal(dray__registry_new(&ops, &r, NULL), 0);
    dray__registry_begin(r, ++generation);
}

/* Publishers know their incarnation once they have published. */
static void note_incarnations(void)
{
    for (const struct registrant *e = r->entries; e; e = e->next)
        for (uint32_t i = 0; i < PUBLISHERS; i++)
            if (e->trainer && e->key == publisher_key[i] && !e->trainer->broken && published[i])
                known_incarnation[i] = e->trainer->incarnation;
}

static void restart(void)
{
    memset(known_incarnation, 0, sizeof known_incarnation);
    note_incarnations();
    for (uint32_t i = 0; i < PUBLISHERS; i++)
        if (publisher_member[i] && !publisher_away[i]) {
            publisher_away[i] = known_incarnation[i] != 0;
            if (!publisher_away[i]) /* one that cannot claim anything opens anew */
                publisher_member[i] = 0;
        }
    for (uint32_t g = 0; g < GROUPS; g++)
        for (uint32_t i = 0; i < RANKS; i++) {
            rank *k = &ranks[g][i];
            if (draw(2)) /* else even what was answered is lost on its way */
                hear(k);
            k->begin = k->vote = NULL;
            k->attempt = 0;
            k->asked = false;
            k->away = k->member != 0;
        }
    dying = true;
    dray__registry_free(r);
    dying = false;
    for (uint32_t i = 0; i < ticket_count; i++)
        tickets[i].answered = 1;
    new_registry();
}

/* ---- what must hold ------------------------------------------------------------------------- */

static void check(uint64_t seed)
{
    uint32_t readers = 0, leases = 0;
    for (const struct model *m = r->models; m; m = m->next) {
        for (const struct trainer *trainer = m->trainers; trainer; trainer = trainer->next)
            for (const struct version *v = trainer->versions; v; v = v->next)
                leases += v->readers;
        for (const struct group *g = m->groups; g; g = g->next) {
            readers += g->phase == ATTEMPT_MOVING && g->reading;
            if (g->state != DRAY_GROUP_WHOLE)
                continue;
            newest_committed(g->now.incarnation);
            for (const struct pending *d = r->pending; d; d = d->next)
                assert_false(d->kind == &dray__reg_for_groups &&
                             g->now.incarnation == d->entry->trainer->incarnation &&
                             g->now.version >= d->number);
            bool writing = false;
            for (uint32_t i = 0; i < g->set.world; i++)
                writing |= !g->set.entries[i] || g->set.entries[i]->writing;
            const rank *of = ranks[g->name[1] - '0'];
            for (uint32_t i = 0; i < RANKS && !writing; i++)
                if (!of[i].member || of[i].holds != g->now.version + numbers_less()) {
                    fprintf(stderr,
                            "seed %llu: group %s is whole with version %llu, rank %u holds %llu\n",
                            (unsigned long long)seed, g->name, (unsigned long long)g->now.version,
                            i, (unsigned long long)of[i].holds);
                    fail();
                }
        }
    }
    assert_int_equal(leases, readers);
}

static void act(void)
{
    rank *k = &ranks[draw(GROUPS)][draw(RANKS)];
    uint32_t i = draw(PUBLISHERS), what = draw(100);
    hear(k);
    if (draw(120) == 0)
        restart();
    else if (k->away && what < 60)
        open_rank(k);
    else if (publisher_away[i] && what < 80)
        open_publisher(i);
    else if (k->away || publisher_away[i])
        return;
    else if (what < 3 && k->member)
        die(&k->member);
    else if (what < 4 && publisher_member[i])
        die(&publisher_member[i]);
    else if (what < 10 && !publisher_member[i])
        open_publisher(i);
    else if (what < 25 && publisher_member[i])
        publish(i);
    else if (what < 28 && publisher_member[i])
        wait_for_readers(i);
    else if (what < 31 && publisher_member[i])
        deliver(i);
    else if (what < 36 && ticket_count && draw(2)) { /* some deadline passes */
        ticket *t = &tickets[draw(ticket_count)];
        if (!t->answered)
            dray__registry_expired(r, t, 0);
    } else if (!k->member) {
        open_rank(k);
    } else if (!k->attempt && !k->begin) {
        /* the group's ranks do the same thing mostly */
        rank *other = &ranks[k->group][1 - k->index];
        begin(k, other->begin && draw(8) ? other->purpose : (uint8_t)draw(3));
    } else if (k->attempt && !k->asked && !k->vote) {
        if (draw(6))
            ask_to_write(k);
        else
            vote(k, false);
    } else if (k->attempt && !k->vote) {
        vote(k, draw(8) != 0);
    } else if (k->attempt && draw(4) == 0) {
        ask_to_write(k); /* again, or late */
    }
}

static void run(uint64_t seed)
{
    seed_state = seed;
    ticket_count = 0;
    version = next_member = generation = incarnations = 0;
    new_registry();
    memset(publisher_member, 0, sizeof publisher_member);
    memset(publisher_away, 0, sizeof publisher_away);
    for (uint32_t g = 0; g < GROUPS; g++)
        for (uint32_t i = 0; i < RANKS; i++)
            ranks[g][i] = (rank){.group = g, .index = i};
    for (int step = 0; step < STEPS; step++) {
        act();
        check(seed);
    }
    /* all deadlines pass: nothing is left that anybody waits for */
    for (uint32_t i = 0; i < ticket_count; i++)
        if (!tickets[i].answered)
            dray__registry_expired(r, &tickets[i], 0);
    for (uint32_t i = 0; i < ticket_count; i++)
        assert_int_equal(tickets[i].answered, 1);
    for (uint32_t i = 0; i < PUBLISHERS; i++)
        if (publisher_member[i])
            die(&publisher_member[i]);
    for (uint32_t g = 0; g < GROUPS; g++)
        for (uint32_t i = 0; i < RANKS; i++)
            if (ranks[g][i].member)
                die(&ranks[g][i].member);
    assert_null(r->models);
    assert_null(r->entries);
    dray__registry_free(r);
}

TEST(test_random_histories)
{
    uint64_t first = test_seed();
    uint64_t runs = test_cases((uint64_t)test_times(10000));
    tickets = calloc(TICKETS, sizeof *tickets);
    assert_non_null(tickets);
    for (uint64_t i = 0; i < runs; i++)
        run(first + i);
    free(tickets);
}

SUITE(NULL, NULL)
