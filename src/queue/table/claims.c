/* Claims: rows that a client holds for a task, until the client commits them, gives them back,
 * holds them too long, or dies. */
#include "queue/policies.h"
#include "queue/table/table_inside.h"

#include "base/error.h"
#include "queue/journal/ledger.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- clients --------------------------------------------------------------------------------- */

dray__client *dray__client_new(dray__table *table, uint64_t session, const char *name,
                               dray_error *error)
{
    dray__client *client = calloc(1, sizeof *client);
    char *copy = strdup(name);
    if (!client || !copy) {
        free(client);
        free(copy);
        dray__nomem(error);
        return NULL;
    }
    *client = (dray__client){
        .id = ++table->client_ids, .session = session, .name = copy, .next = table->clients};
    client->recycled_tail = &client->recycled;
    table->clients = client;
    return client;
}

/* ---- giving rows back ------------------------------------------------------------------------ */

static void untake(dray__table *table, dray__partition *p, uint32_t task, uint32_t slot)
{
    dray__track *track = &p->tracks[task];
    dray__bit_clear(track->taken, slot);
    track->taken_count--;
    track->taken_dead -= dray__bit_get(p->dead, slot);
    dray__count_cut(p, task, slot, 1);
    if (slot < track->open_from)
        track->open_from = slot;
    dray__admission_note(table, task, 0);
}

void dray__untake_row(dray__table *table, dray__partition *p, uint32_t task, uint32_t slot)
{
    untake(table, p, task, slot);
    dray__refresh(table, p, task, slot / 64, true);
}

/* Gives a row of the claim back. failed: the claim counts as a failed attempt. */
static void give_back(dray__table *table, dray__claim *claim, uint32_t item, bool failed,
                      const char *reason)
{
    dray__partition *p = claim->partition;
    dray__track *track = &p->tracks[claim->task];
    uint32_t slot = claim->slots[item];
    claim->slots[item] = DRAY__NONE;
    claim->active--;
    bool dead = dray__bit_get(p->dead, slot);
    untake(table, p, claim->task, slot);
    if (failed)
        table->tasks[claim->task].counts.failed++;
    else
        table->tasks[claim->task].counts.given_back++;
    if (failed && ++track->rows[slot].failures >= table->settings.max_attempts && !dead)
        dray__lose(table, p, claim->task, slot, DRAY_LOSS_FAILED, reason);
    else
        dray__refresh(table, p, claim->task, slot / 64, true);
}

/* Gives back all rows of the claim, in its order. Recomputes ready bits once for rows of a word. */
static void untake_all(dray__table *table, dray__claim *claim)
{
    dray__partition *p = claim->partition;
    uint32_t last = DRAY__NONE;
    for (uint32_t i = 0; i < claim->count; i++) {
        uint32_t slot = claim->slots[i];
        if (slot == DRAY__NONE)
            continue;
        if (last != DRAY__NONE && (slot / 64 != last / 64 || slot < last))
            dray__refresh(table, p, claim->task, last / 64, true);
        claim->slots[i] = DRAY__NONE;
        claim->active--;
        untake(table, p, claim->task, slot);
        table->tasks[claim->task].counts.given_back++;
        last = slot;
    }
    if (last != DRAY__NONE)
        dray__refresh(table, p, claim->task, last / 64, true);
}

static void give_back_all(dray__table *table, dray__claim *claim, bool failed, const char *reason)
{
    if (claim->state != DRAY__CLAIM_ACTIVE)
        return;
    if (!failed)
        untake_all(table, claim);
    for (uint32_t i = 0; i < claim->count; i++)
        if (claim->slots[i] != DRAY__NONE)
            give_back(table, claim, i, failed, reason);
    claim->state = DRAY__CLAIM_FAILED;
}

static void claim_free(dray__table *table, dray__claim *claim, bool retire)
{
    for (uint32_t i = 0; i < claim->pin_count; i++)
        dray__put_unpin(table, claim->pins[i], retire);
    dray__idmap_remove(&table->claim_ids, claim->id);
    table->memory -= claim->memory;
    if (claim->memory)
        dray__quota_freed(table);
    if (claim->prev)
        claim->prev->next = claim->next;
    else
        table->claims = claim->next;
    if (claim->next)
        claim->next->prev = claim->prev;
    table->claim_count--;
    free(claim->slots);
    free(claim->reads);
    free(claim->micro_ends);
    free(claim->pins);
    free(claim);
}

/* Returns true when releasing the claim ends its lockstep round: its share is not committed. */
static bool ends_round(const dray__claim *claim)
{
    return claim->lockstep && claim->state == DRAY__CLAIM_ACTIVE &&
           (claim->active || claim->follower);
}

void dray__client_end(dray__table *table, dray__client *client, bool died, const char *reason)
{
    dray__claim *next;
    for (dray__claim *claim = table->claims; claim; claim = next) {
        next = claim->next;
        if (claim->client != client)
            continue;
        dray__consumer_group *consumers = ends_round(claim) ? claim->consumers : NULL;
        give_back_all(table, claim, died, reason);
        claim_free(table, claim, died);
        if (consumers)
            dray__consumers_void(table, consumers);
    }
    dray__demands_let_go(table, client);
    dray__promise_end(table, client);
    dray__chunks_orphan(table, client);
    if (died)
        dray__ledger_left(table->ledger, client);
    dray__client **at = &table->clients;
    while (*at != client)
        at = &(*at)->next;
    *at = client->next;
    free(client->name);
    free(client);
}

/* ---- claiming -------------------------------------------------------------------------------- */

static int missing(const dray__table *table, const dray__partition *p, uint32_t task, char *out,
                   size_t size)
{
    const dray__qtask *names = &table->tasks[task];
    int at = 0;
    for (uint32_t i = 0; i < names->needs_count && at >= 0 && (size_t)at < size; i++) {
        uint32_t c = names->needs[i];
        uint32_t there = c < p->column_capacity ? p->committed[c] : 0;
        if (there < p->rows)
            at += snprintf(out + at, size - (size_t)at, ", %u with %s", there,
                           table->columns[c].name);
    }
    return at;
}

void dray__describe(const dray__table *table, const dray__want *want, char *out, size_t size)
{
    const dray__partition *p = NULL;
    if (want->partition)
        p = dray__table_partition(table, want->partition);
    for (uint32_t i = 0; !want->partition && !p && i < table->partition_count; i++)
        if (!dray__finished(table->partitions[i], want->task))
            p = table->partitions[i];
    if (!p) {
        snprintf(out, size, "%s%s%s", want->partition ? "there is no partition " : "no partition",
                 want->partition ? want->partition : " has open rows",
                 table->ended ? " and the queue has ended" : "");
        return;
    }
    const dray__track *track = &p->tracks[want->task];
    int at = snprintf(out, size,
                      "partition %s: %u rows (%s), %u ready, %u claimed, %u committed, "
                      "%u dead",
                      p->name, p->rows, p->sealed ? "sealed" : "not sealed", track->ready_count,
                      track->taken_count, track->done_count, p->dead_count);
    if (at > 0 && (size_t)at < size && want->task == table->admission.task)
        at += snprintf(out + at, size - (size_t)at, ", %lld more admitted at version %llu",
                       (long long)dray__admission_room(table),
                       (unsigned long long)table->admission.version);
    uint32_t left = dray__count_left(p, want);
    if (left && at > 0 && (size_t)at < size)
        at += snprintf(out + at, size - (size_t)at, ", %u ready but too old", left);
    if (at > 0 && (size_t)at < size)
        at += dray__describe_vacant(p, out + at, size - (size_t)at);
    if (at > 0 && (size_t)at < size)
        missing(table, p, want->task, out + at, size - (size_t)at);
}

static bool has(const dray__want *want, enum dray__policy_trait trait)
{
    return dray__policy_traits(want->policy) & trait;
}

/* Returns true when the rows that the policy picked are enough for the claim. */
static bool fills(const dray__partition *p, const dray__want *want, const dray__pick *pick)
{
    if (!pick->count)
        return false;
    bool last = p->sealed && pick->count == dray__open_rows(p, want->task);
    if (has(want, DRAY__POLICY_ROUNDS) && pick->count < want->dp_size && !last)
        return false; /* every rank gets rows, unless these are the last ones */
    return want->up_to || pick->weight == want->count || last;
}

/* Picks rows with the policy, with at most as many new ones as the admission has room for. Lowers
 * the limit until that holds: policies then pick fewer rows, but still whole groups, for which
 * settled members count, too. */
static void pick_admitted(const dray__table *table, const dray__partition *p,
                          const dray__want *want, dray__pick *pick)
{
    int64_t room = dray__admission_room(table), most = p->tracks[want->task].cut_count;
    most *= has(want, DRAY__POLICY_BY_GROUP) ? p->group_size : 1;
    int64_t limit = want->count, over;
    room = room < 0 ? 0 : room;
    if (room < limit - most)
        limit = room + most;
    do {
        pick->count = pick->weight = 0;
        if (limit > 0)
            dray__policy_find(want->policy)(table, p, want, (uint32_t)limit, pick);
        over = -room;
        for (uint32_t i = 0; i < pick->count; i++)
            over += !dray__is_partial(p, want->task, pick->slots[i]);
        limit = (int64_t)pick->weight - over;
    } while (over > 0);
}

static int pick_rows(dray__table *table, dray__partition *p, const dray__want *want,
                     dray__pick *pick, dray_error *error)
{
    if (has(want, DRAY__POLICY_BY_GROUP) && want->count % p->group_size)
        return dray__fail(error, DRAY_EINVALID,
                          "claim of %u rows by group: partition %s has groups of %u", want->count,
                          p->name, p->group_size);
    pick->count = pick->weight = 0;
    if (want->fresh == DRAY_FRESH_DROP)
        dray__drop_stale(table, p, want);
    if (table->admission.task == want->task)
        pick_admitted(table, p, want, pick);
    else
        dray__policy_find(want->policy)(table, p, want, want->count, pick);
    return fills(p, want, pick) ? DRAY_OK : DRAY_EAGAIN;
}

static int choose(dray__table *table, const dray__want *want, dray__pick *pick,
                  dray__partition **out, dray_error *error)
{
    if (want->partition) {
        dray__partition *p = dray__table_partition(table, want->partition);
        if (!p) {
            int rc = dray__table_cleared(table, want->partition, want->task, error);
            if (!rc && table->ended)
                rc = dray__fail(error, DRAY_EEND, "queue %s has ended without a partition %s",
                                table->name, want->partition);
            return rc ? rc : DRAY_EAGAIN;
        }
        if (dray__finished(p, want->task))
            return dray__fail(error, DRAY_EEND, "task %s has finished partition %s",
                              table->tasks[want->task].name, p->name);
        *out = p;
        return pick_rows(table, p, want, pick, error);
    }
    bool finished = table->ended;
    for (uint32_t i = 0; i < table->partition_count; i++) {
        dray__partition *p = table->partitions[i];
        if (dray__finished(p, want->task))
            continue;
        finished = false;
        *out = p;
        int rc = pick_rows(table, p, want, pick, error);
        if (rc != DRAY_EAGAIN)
            return rc;
        if (has(want, DRAY__POLICY_IN_ORDER) && !(p->sealed && !dray__open_rows(p, want->task)))
            return DRAY_EAGAIN;
    }
    if (finished)
        return dray__fail(error, DRAY_EEND, "queue %s has ended", table->name);
    return DRAY_EAGAIN;
}

/* Adds the bytes that the task reads of an item of the put. Returns false when it reads none. */
static bool reads_any(const dray__table *table, const dray__put *put, uint32_t task,
                      uint64_t *bytes)
{
    uint32_t columns = 0;
    *bytes = 0;
    for (uint32_t i = 0; i < put->column_count; i++) {
        const dray__put_column *column = &put->columns[i];
        if (!((table->columns[column->column].readers | put->goes_on) >> task & 1))
            continue;
        columns++;
        *bytes += column->extent.bytes;
    }
    *bytes /= put->items;
    return columns || put->goes_on >> task & 1;
}

/* Pins every put that holds a needed column of a row of the claim, once each. */
static int pin_puts(dray__table *table, dray__claim *claim, dray_error *error)
{
    dray__partition *p = claim->partition;
    uint32_t capacity = 0;
    uint64_t mark = ++table->marks, bytes = 0;
    for (uint32_t w = 0; w <= table->task_count; w++) {
        for (uint32_t i = 0; p->places[w] && i < claim->count; i++) {
            uint32_t at = DRAY__NONE;
            const dray__place *place = NULL;
            uint32_t slot = claim->reads ? claim->reads[i] : claim->slots[i];
            while (dray__next_place(p, (int)w - 1, slot, &at, &place)) {
                dray__put *put = p->puts[place->put];
                if (put->mark == mark) {
                    bytes += put->mark_bytes;
                    continue;
                }
                if (!reads_any(table, put, claim->task, &put->mark_bytes))
                    continue;
                bytes += put->mark_bytes;
                int rc = dray__grow_full(&claim->pins, claim->pin_count, &capacity,
                                         sizeof(dray__put *), error);
                if (rc)
                    return rc;
                put->mark = mark;
                put->mark_index = claim->pin_count;
                claim->pins[claim->pin_count++] = put;
            }
        }
    }
    for (uint32_t i = 0; i < claim->pin_count; i++)
        claim->pins[i]->pins++;
    table->tasks[claim->task].counts.claims++;
    table->tasks[claim->task].counts.rows += claim->count;
    table->tasks[claim->task].counts.bytes += bytes;
    return DRAY_OK;
}

void dray__take_rows(dray__table *table, dray__partition *p, uint32_t task, const uint32_t *slots,
                     uint32_t count)
{
    dray__track *track = &p->tracks[task];
    for (uint32_t i = 0; i < count; i++) {
        dray__bit_set(track->taken, slots[i]);
        dray__count_cut(p, task, slots[i], -1);
        track->rows[slots[i]].attempt++;
    }
    track->taken_count += count;
    for (uint32_t i = 0; i < count; i++)
        if (!i || slots[i] / 64 != slots[i - 1] / 64)
            dray__refresh(table, p, task, slots[i] / 64, false);
    for (uint32_t w = track->open_from / 64; (w + 1) * 64 <= p->rows; w++) {
        if (~(track->taken[w] | track->done[w] | p->dead[w]))
            break;
        track->open_from = (w + 1) * 64;
    }
    if (!dray__open_rows(p, task)) /* claims in order may go on to the next partition */
        table->dirty |= UINT64_C(1) << task;
}

static int check_want(const dray__table *table, const dray__client *client, uint32_t ticket,
                      const dray__want *want, dray_error *error)
{
    if (want->task >= table->task_count)
        return dray__fail(error, DRAY_EINVALID, "claim: queue %s has no task number %u",
                          table->name, want->task);
    if (!want->count || want->count > DRAY__ROWS_MAX)
        return dray__fail(error, DRAY_EINVALID, "claim for %s: 1 to %u rows, found %u",
                          table->tasks[want->task].name, DRAY__ROWS_MAX, want->count);
    if (!dray__policy_find(want->policy))
        return dray__fail(error, DRAY_EINVALID, "claim for %s: there is no policy number %d",
                          table->tasks[want->task].name, want->policy);
    if (want->fresh > DRAY_FRESH_LEFT)
        return dray__fail(error, DRAY_EINVALID, "claim for %s: fresh is 0, 1 or 2, found %d",
                          table->tasks[want->task].name, want->fresh);
    if (!ticket || dray__table_find_claim(table, client, ticket))
        return dray__fail(error, DRAY_EINVALID, "claim for %s: ticket %u is in use",
                          table->tasks[want->task].name, ticket);
    if (has(want, DRAY__POLICY_ROUNDS) &&
        (!want->dp_size || want->dp_size > DRAY__RANKS_MAX || want->dp_rank >= want->dp_size ||
         !want->peers || want->peers > 64 || want->peer >= want->peers))
        return dray__fail(error, DRAY_EINVALID,
                          "claim for %s: rank %u of %u (at most %u), peer %u of %u (at most 64)",
                          table->tasks[want->task].name, want->dp_rank, want->dp_size,
                          DRAY__RANKS_MAX, want->peer, want->peers);
    if (want->partition)
        return dray__name_check(want->partition, "partition", error);
    return DRAY_OK;
}

int dray__claim_add(dray__table *table, dray__client *client, uint32_t ticket,
                    const dray__claim *made, dray__claim **out, dray_error *error)
{
    uint64_t id = (uint64_t)client->id << 32 | ticket;
    dray__claim *claim = malloc(sizeof *claim);
    if (!claim || !dray__idmap_set(&table->claim_ids, id, claim)) {
        free(claim);
        return dray__nomem(error);
    }
    *claim = *made;
    claim->id = id;
    claim->client = client;
    claim->state = DRAY__CLAIM_ACTIVE;
    if (claim->read)
        claim->state = DRAY__CLAIM_GONE;
    else
        claim->generation = claim->partition->generation;
    claim->newest = UINT64_MAX;
    claim->restores = table->restores;
    claim->next = table->claims;
    if (table->claims)
        table->claims->prev = claim;
    table->claims = claim;
    table->claim_count++;
    *out = claim;
    return DRAY_OK;
}

static int add_claim(dray__table *table, dray__client *client, uint32_t ticket,
                     const dray__claim *made, dray__claim **out, dray_error *error)
{
    dray__claim *claim;
    int rc = dray__claim_add(table, client, ticket, made, &claim, error);
    if (rc)
        return rc;
    rc = pin_puts(table, claim, error);
    if (rc) {
        claim->pin_count = 0;                                   /* no put is pinned yet */
        claim->slots = claim->reads = claim->micro_ends = NULL; /* the caller owns them */
        claim_free(table, claim, false);
        return rc;
    }
    *out = claim;
    return DRAY_OK;
}

/* Returns true when all bytes that the claim reads still exist: by the time a late peer asks, some
 * may be freed or lost. */
static bool all_there(const dray__table *table, const dray__claim *claim)
{
    const dray__partition *p = claim->partition;
    const dray__qtask *task = &table->tasks[claim->task];
    for (uint32_t i = 0; i < task->needs_count; i++)
        for (uint32_t row = 0; row < claim->count; row++)
            if (!dray__bit_get(p->columns[task->needs[i]], claim->reads[row]))
                return false;
    for (uint32_t i = 0; i < claim->pin_count; i++)
        for (uint32_t c = 0; c < claim->pins[i]->column_count; c++) {
            const dray__put_column *column = &claim->pins[i]->columns[c];
            if (!column->chunk && (table->columns[column->column].readers >> claim->task & 1))
                return false;
        }
    return true;
}

static uint32_t *copy_of(const uint32_t *items, uint32_t count)
{
    uint32_t *copy = malloc((count ? count : 1) * sizeof *copy);
    return copy && count ? memcpy(copy, items, count * sizeof *copy) : copy;
}

/* Takes the rank's share of a round. Makes the round, of the rows that the policy picked, if it
 * does not exist yet. */
static int claim_share(dray__table *table, dray__client *client, uint32_t ticket,
                       const dray__want *want, dray__pick *pick, dray__claim **out,
                       dray_error *error)
{
    bool lockstep = has(want, DRAY__POLICY_LOCKSTEP);
    dray__round *round = NULL;
    dray__partition *p = NULL;
    int rc = dray__round_find(table, want, lockstep, &round, error);
    if (rc == DRAY_EAGAIN) {
        rc = choose(table, want, pick, &p, error);
        if (!rc)
            rc = dray__round_new(table, p, want, lockstep, pick->slots, pick->count, &round, error);
    }
    if (rc)
        return rc;
    const dray__share *share = &round->shares[want->dp_rank];
    if (want->peer && share->lost)
        return dray__fail(error, DRAY_ESTALE, "rank %u has lost rows since its first peer has them",
                          want->dp_rank);
    dray__claim made = {.task = want->task,
                        .partition = round->partition,
                        .count = share->count,
                        .hold_until = want->hold_until,
                        .consumers = round->consumers,
                        .lockstep = round->lockstep,
                        .follower = want->peer != 0,
                        .slots = copy_of(share->slots, share->count),
                        .reads = copy_of(share->slots, share->count),
                        .micro_ends = copy_of(share->micro_ends, share->micro_count),
                        .micro_count = share->micro_count};
    rc = made.slots && made.reads && made.micro_ends ? DRAY_OK : dray__nomem(error);
    for (uint32_t i = 0; !rc && i < share->count; i++) {
        if (i >= share->own || made.follower)
            made.slots[i] = DRAY__NONE;
        made.active += made.slots[i] != DRAY__NONE;
    }
    if (!rc)
        rc = add_claim(table, client, ticket, &made, out, error);
    if (!rc && made.follower && !all_there(table, *out)) {
        claim_free(table, *out, false);
        return dray__fail(error, DRAY_ESTALE, "rank %u has committed its rows already",
                          want->dp_rank);
    }
    if (rc) {
        free(made.slots);
        free(made.reads);
        free(made.micro_ends);
        return rc;
    }
    dray__round_given(table, round, want);
    return DRAY_OK;
}

int dray__table_claim(dray__table *table, dray__client *client, uint32_t ticket,
                      const dray__want *want, dray__claim **out, dray_error *error)
{
    int rc = check_want(table, client, ticket, want, error);
    if (rc)
        return rc;
    uint64_t most = want->count; /* limited to the number of rows */
    if (most > table->rows)
        most = table->rows ? table->rows : 1;
    dray__pick pick = {.slots = malloc(most * sizeof *pick.slots)};
    dray__partition *p = NULL;
    if (!pick.slots)
        return dray__nomem(error);
    if (has(want, DRAY__POLICY_ROUNDS)) {
        rc = claim_share(table, client, ticket, want, &pick, out, error);
        free(pick.slots);
        return rc;
    }
    rc = choose(table, want, &pick, &p, error);
    dray__claim made = {.task = want->task,
                        .partition = p,
                        .slots = pick.slots,
                        .count = pick.count,
                        .active = pick.count,
                        .hold_until = want->hold_until};
    if (!rc)
        rc = add_claim(table, client, ticket, &made, out, error);
    if (rc) {
        free(pick.slots);
        return rc;
    }
    dray__take_rows(table, p, want->task, pick.slots, pick.count);
    return DRAY_OK;
}

/* Checks that the task could have claimed the row; the row may have died since. */
static int check_claimable(const dray__table *table, const dray__partition *p, uint32_t task,
                           uint32_t slot, dray_error *error)
{
    const dray__track *track = &p->tracks[task];
    const dray__qtask *names = &table->tasks[task];
    const char *found = dray__bit_get(track->taken, slot)  ? "named twice"
                        : dray__bit_get(track->done, slot) ? "committed already"
                        : dray__bit_get(p->vacant, slot)   ? "lost"
                                                           : NULL;
    for (uint32_t i = 0; i < names->needs_count && !found; i++) {
        uint32_t c = names->needs[i];
        if (c >= p->column_capacity || !p->columns[c] || !dray__bit_get(p->columns[c], slot))
            found = "without a column that the task needs";
    }
    if (!found)
        return DRAY_OK;
    return dray__fail(error, DRAY_EFORMAT,
                      "partition %s, task %s: a row that can be committed expected, found row %u, "
                      "which is %s",
                      p->name, names->name, slot, found);
}

/* Checks all rows, and that each is named once. */
static int check_claimable_rows(const dray__table *table, const dray__partition *p, uint32_t task,
                                const uint32_t *slots, uint32_t count, dray_error *error)
{
    int rc = DRAY_OK;
    uint32_t checked = 0;
    for (; checked < count && !rc; checked++) {
        if (slots[checked] == DRAY__NONE)
            continue;
        rc = check_claimable(table, p, task, slots[checked], error);
        if (rc)
            break;
        dray__bit_set(p->tracks[task].taken, slots[checked]);
    }
    for (uint32_t i = 0; i < checked; i++)
        if (slots[i] != DRAY__NONE)
            dray__bit_clear(p->tracks[task].taken, slots[i]);
    return rc;
}

int dray__claim_again(dray__table *table, dray__client *client, uint32_t task, dray__partition *p,
                      const uint32_t *slots, uint32_t count, dray__claim **out, dray_error *error)
{
    int rc = check_claimable_rows(table, p, task, slots, count, error);
    if (rc)
        return rc;
    dray__track *track = &p->tracks[task];
    dray__claim made = {.task = task,
                        .partition = p,
                        .count = count,
                        .hold_until = INT64_MAX,
                        .slots = copy_of(slots, count),
                        .reads = copy_of(slots, count)};
    for (uint32_t i = 0; made.reads && i < count; i++)
        if (made.reads[i] == DRAY__NONE)
            made.reads[i] = 0; /* any existing row */
    rc = made.slots && made.reads ? add_claim(table, client, 1, &made, out, error)
                                  : dray__nomem(error);
    if (rc) {
        free(made.slots);
        free(made.reads);
        return rc;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (slots[i] == DRAY__NONE)
            continue;
        (*out)->active++;
        dray__take_rows(table, p, task, &slots[i], 1);
        track->taken_dead += dray__bit_get(p->dead, slots[i]);
    }
    return DRAY_OK;
}

dray__claim *dray__table_find_claim(const dray__table *table, const dray__client *client,
                                    uint32_t ticket)
{
    return dray__idmap_get(&table->claim_ids, (uint64_t)client->id << 32 | ticket);
}

/* ---- ends of a claim ------------------------------------------------------------------------- */

int dray__claim_active(const dray__table *table, const dray__client *client, uint32_t ticket,
                       dray__claim **out, dray_error *error)
{
    dray__claim *claim = dray__table_find_claim(table, client, ticket);
    *out = claim;
    if (!claim)
        return dray__fail(error, DRAY_ESTALE, "queue %s: there is no claim %u of %s", table->name,
                          ticket, client->name);
    if (claim->follower)
        return dray__fail(error, DRAY_EPERM,
                          "claim of %u rows for %s: the first of its rank's peers commits it",
                          claim->count, table->tasks[claim->task].name);
    if (claim->state == DRAY__CLAIM_STALE)
        return dray__fail(error, DRAY_ESTALE,
                          "claim of %u rows for %s was held too long, or its run went back: the "
                          "rows were taken back",
                          claim->count, table->tasks[claim->task].name);
    if (claim->state == DRAY__CLAIM_GONE)
        return dray__fail(error, DRAY_EGONE, "claim of %u rows for %s: the partition was cleared",
                          claim->count, table->tasks[claim->task].name);
    if (claim->state == DRAY__CLAIM_FAILED)
        return dray__fail(error, DRAY_ESTALE,
                          "claim of %u rows for %s: it has none of them any more", claim->count,
                          table->tasks[claim->task].name);
    return DRAY_OK;
}

static int failing(const dray__table *table, const dray__client *client, uint32_t ticket,
                   const uint32_t *items, uint32_t count, dray__claim **out, dray_error *error)
{
    int rc = dray__claim_active(table, client, ticket, out, error);
    if (rc)
        return rc;
    const dray__claim *claim = *out;
    if (claim->state == DRAY__CLAIM_COMMITTED)
        return dray__fail(error, DRAY_EINVALID, "fail: the claim of %u rows for %s is committed",
                          claim->count, table->tasks[claim->task].name);
    for (uint32_t i = 0; i < count; i++)
        if (items[i] >= claim->count)
            return dray__fail(error, DRAY_EINVALID, "fail: row %u of a claim of %u", items[i],
                              claim->count);
    return DRAY_OK;
}

int dray__claim_fail(dray__table *table, dray__client *client, uint32_t ticket,
                     const uint32_t *items, uint32_t count, const char *reason, dray_error *error)
{
    dray__claim *claim = NULL;
    int rc = failing(table, client, ticket, items, count, &claim, error);
    if (rc)
        return rc;
    if (!count && !*reason) {
        dray__consumer_group *consumers = ends_round(claim) ? claim->consumers : NULL;
        give_back_all(table, claim, false, "");
        if (consumers)
            dray__consumers_void(table, consumers);
        return DRAY_OK;
    }
    uint32_t all = count ? count : claim->count;
    for (uint32_t i = 0; i < all; i++) {
        uint32_t item = count ? items[i] : i;
        if (claim->slots[item] != DRAY__NONE)
            give_back(table, claim, item, true, reason);
    }
    if (!claim->active)
        claim->state = DRAY__CLAIM_FAILED;
    return DRAY_OK;
}

int dray__claim_lost(dray__table *table, dray__client *client, uint32_t ticket,
                     const uint32_t *items, uint32_t count, const char *reason, dray_error *error)
{
    dray__claim *claim = NULL;
    int rc = failing(table, client, ticket, items, count, &claim, error);
    for (uint32_t i = 0; !rc && i < count; i++) {
        uint32_t slot = claim->slots[items[i]];
        if (slot == DRAY__NONE)
            continue;
        claim->slots[items[i]] = DRAY__NONE;
        claim->active--;
        uint32_t task;
        bool dead = dray__bit_get(claim->partition->dead, slot);
        bool there = table->ledger && !dray__needs_lost(table, claim->partition, slot, &task);
        untake(table, claim->partition, claim->task, slot);
        if (dead || there)
            dray__refresh(table, claim->partition, claim->task, slot / 64, true);
        else
            dray__lose(table, claim->partition, claim->task, slot, DRAY_LOSS_BYTES, reason);
    }
    if (!rc && !claim->active)
        claim->state = DRAY__CLAIM_FAILED;
    return rc;
}

void dray__claim_void(dray__table *table, dray__claim *claim)
{
    if (claim->state != DRAY__CLAIM_ACTIVE)
        return;
    give_back_all(table, claim, false, "");
    claim->state = DRAY__CLAIM_STALE;
}

int dray__claim_hold(dray__table *table, dray__client *client, uint32_t ticket, int64_t until,
                     dray_error *error)
{
    dray__claim *claim = NULL;
    int rc = dray__claim_active(table, client, ticket, &claim, error);
    if (!rc)
        claim->hold_until = until;
    return rc;
}

bool dray__claim_release(dray__table *table, dray__client *client, uint32_t ticket)
{
    dray__claim *claim = dray__table_find_claim(table, client, ticket);
    if (!claim)
        return false;
    dray__consumer_group *consumers = ends_round(claim) && claim->active ? claim->consumers : NULL;
    give_back_all(table, claim, false, "");
    claim_free(table, claim, false);
    if (consumers)
        dray__consumers_void(table, consumers);
    return true;
}

int64_t dray__table_expire(dray__table *table, int64_t now)
{
    int64_t next = INT64_MAX;
    for (dray__claim *claim = table->claims; claim; claim = claim->next) {
        if (claim->state != DRAY__CLAIM_ACTIVE)
            continue;
        if (claim->hold_until > now) {
            next = claim->hold_until < next ? claim->hold_until : next;
            continue;
        }
        char reason[DRAY__REASON_MAX];
        snprintf(reason, sizeof reason, "held too long by %s", claim->client->name);
        dray__consumer_group *consumers = ends_round(claim) ? claim->consumers : NULL;
        give_back_all(table, claim, true, reason);
        claim->state = DRAY__CLAIM_STALE;
        if (consumers)
            dray__consumers_void(table, consumers);
    }
    return next;
}
