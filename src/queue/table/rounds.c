/* Rounds: one claim of many rows, divided among the ranks of a consumer group. Rows of a share that
 * no rank has claimed yet are marked as taken, but belong to no claim. */
#include "queue/table/balance.h"
#include "queue/table/table_inside.h"

#include "base/error.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- consumer groups ------------------------------------------------------------------------- */

/* Forgets the oldest consumer group without members and without waiting rows. */
static void forget_consumers(dray__table *table)
{
    dray__consumer_group **oldest = NULL;
    for (dray__consumer_group *consumers = table->consumer_groups; consumers;
         consumers = consumers->next)
        consumers->in_use = false;
    for (const dray__round *round = table->rounds; round; round = round->next)
        round->consumers->in_use = true;
    for (const dray__claim *claim = table->claims; claim; claim = claim->next)
        if (claim->consumers)
            claim->consumers->in_use = true;
    for (dray__consumer_group **at = &table->consumer_groups; *at; at = &(*at)->next)
        if (!(*at)->in_use)
            oldest = at;
    if (!oldest)
        return;
    dray__consumer_group *consumers = *oldest;
    *oldest = consumers->next;
    free(consumers->name);
    free(consumers);
}

static int find_consumers(dray__table *table, const dray__want *want, dray__consumer_group **out,
                          dray_error *error)
{
    const char *asked = want->group ? want->group : "";
    uint32_t count = 0;
    for (dray__consumer_group *consumers = table->consumer_groups; consumers;
         consumers = consumers->next, count++)
        if (consumers->task == want->task && strcmp(consumers->name, asked) == 0) {
            *out = consumers;
            return DRAY_OK;
        }
    if (count >= DRAY__CONSUMER_GROUPS_MAX)
        forget_consumers(table);
    dray__consumer_group *consumers = calloc(1, sizeof *consumers);
    char *name = strdup(asked);
    if (!consumers || !name) {
        free(consumers);
        free(name);
        return dray__nomem(error);
    }
    *consumers = (dray__consumer_group){.name = name,
                                        .task = want->task,
                                        .epoch = want->group_epoch,
                                        .next = table->consumer_groups};
    *out = table->consumer_groups = consumers;
    return DRAY_OK;
}

static void round_free(dray__table *table, dray__round *round)
{
    for (uint32_t i = 0; i < round->pin_count; i++)
        dray__put_unpin(table, round->pins[i], false);
    free(round->pins);
    for (uint32_t r = 0; round->shares && r < round->size; r++) {
        free(round->shares[r].slots);
        free(round->shares[r].micro_ends);
    }
    free(round->shares);
    free(round);
}

static void unlink_round(dray__table *table, const dray__round *round)
{
    dray__round **at = &table->rounds;
    while (*at != round)
        at = &(*at)->next;
    *at = round->next;
}

/* Ends a round, and frees the rows of shares that no leader has claimed. */
static void dissolve(dray__table *table, dray__round *round)
{
    unlink_round(table, round);
    for (uint32_t r = 0; r < round->size; r++) {
        const dray__share *share = &round->shares[r];
        for (uint32_t i = 0; !(share->given & 1) && i < share->own; i++)
            dray__untake_row(table, round->partition, round->consumers->task, share->slots[i]);
    }
    round_free(table, round);
}

static void dissolve_all(dray__table *table, const dray__consumer_group *consumers)
{
    for (dray__round *round = table->rounds, *next; round; round = next) {
        next = round->next;
        if (round->consumers == consumers)
            dissolve(table, round);
    }
}

void dray__consumers_void(dray__table *table, dray__consumer_group *consumers)
{
    dissolve_all(table, consumers);
    for (dray__claim *claim = table->claims; claim; claim = claim->next)
        if (claim->consumers == consumers && claim->lockstep)
            dray__claim_void(table, claim);
    consumers->voided = true;
    table->dirty |=
        UINT64_C(1) << consumers->task; /* waiting claims of the next round are tried again */
}

void dray__rounds_clear(dray__table *table, const dray__partition *p)
{
    for (dray__round **at = &table->rounds; *at;) {
        dray__round *round = *at;
        if (p && round->partition != p) {
            at = &round->next;
            continue;
        }
        *at = round->next;
        round_free(table, round);
    }
    while (!p && table->consumer_groups) {
        dray__consumer_group *consumers = table->consumer_groups;
        table->consumer_groups = consumers->next;
        free(consumers->name);
        free(consumers);
    }
}

static bool has(const dray__share *share, uint32_t slot)
{
    for (uint32_t i = 0; i < share->count; i++)
        if (share->slots[i] == slot)
            return true;
    return false;
}

/* Returns true when a share that its leader has not claimed has the row. Marks claimed shares that
 * have it as lost. */
static bool holds(const dray__round *round, uint32_t slot)
{
    bool waits = false;
    for (uint32_t r = 0; r < round->size; r++) {
        dray__share *share = &round->shares[r];
        bool led = share->given & 1, lost = has(share, slot);
        share->lost |= led && lost;
        waits |= !led && lost;
    }
    return waits;
}

void dray__rounds_lose(dray__table *table, const dray__partition *p, uint32_t task, uint32_t slot)
{
    for (dray__round *round = table->rounds; round;) {
        if (round->partition != p || round->consumers->task != task || !holds(round, slot)) {
            round = round->next;
            continue;
        }
        if (round->lockstep)
            dray__consumers_void(table, round->consumers);
        else
            dissolve(table, round); /* its rows are balanced again, without this one */
        round = table->rounds;      /* the list has changed */
    }
}

/* ---- asking ---------------------------------------------------------------------------------- */

static int check_consumers(dray__table *table, dray__consumer_group *consumers,
                           const dray__want *want, bool lockstep, dray_error *error)
{
    if (want->group_epoch > consumers->epoch) { /* the group was formed again, so the rows of the
                                                 * earlier one are freed */
        dray__consumers_void(table, consumers);
        consumers->epoch = want->group_epoch;
        consumers->next_round = 0;
        consumers->voided = false;
    }
    const char *task = table->tasks[consumers->task].name;
    if (want->group_epoch < consumers->epoch)
        return dray__fail(error, DRAY_ESTALE, "group %s of task %s is in epoch %llu, found %llu",
                          consumers->name, task, (unsigned long long)consumers->epoch,
                          (unsigned long long)want->group_epoch);
    if (lockstep && consumers->voided)
        return dray__fail(error, DRAY_ESTALE,
                          "group %s of task %s lost a member or rows: its epoch, %llu, must rise",
                          consumers->name, task, (unsigned long long)consumers->epoch);
    return DRAY_OK;
}

static int check_shape(const dray__round *round, const dray__want *want, dray_error *error)
{
    if (round->size == want->dp_size && round->peers == want->peers)
        return DRAY_OK;
    return dray__fail(
        error, DRAY_EINVALID, "group %s: %u ranks of %u peers expected, found %u of %u",
        round->consumers->name, round->size, round->peers, want->dp_size, want->peers);
}

int dray__round_find(dray__table *table, const dray__want *want, bool lockstep, dray__round **out,
                     dray_error *error)
{
    dray__consumer_group *consumers = NULL;
    int rc = find_consumers(table, want, &consumers, error);
    if (!rc)
        rc = check_consumers(table, consumers, want, lockstep, error);
    if (rc)
        return rc;
    for (dray__round *round = table->rounds; round; round = round->next) {
        if (round->consumers != consumers || (lockstep && round->number != want->round))
            continue;
        rc = check_shape(round, want, error);
        if (rc || !(round->shares[want->dp_rank].given >> want->peer & 1)) {
            *out = round;
            return rc;
        }
    }
    if (lockstep && want->round < consumers->next_round)
        return dray__fail(error, DRAY_ESTALE, "group %s: round %llu is over, the next is %llu",
                          consumers->name, (unsigned long long)want->round,
                          (unsigned long long)consumers->next_round);
    return DRAY_EAGAIN;
}

void dray__round_given(dray__table *table, dray__round *round, const dray__want *want)
{
    uint64_t all = round->peers == 64 ? ~UINT64_C(0) : (UINT64_C(1) << round->peers) - 1;
    round->shares[want->dp_rank].given |= UINT64_C(1) << want->peer;
    for (uint32_t r = 0; r < round->size; r++)
        if (round->shares[r].given != all)
            return;
    unlink_round(table, round);
    round_free(table, round);
}

/* ---- dividing -------------------------------------------------------------------------------- */

typedef struct division { /* of the rows that were picked */
    const dray__want *want;
    const uint32_t *slots;
    uint64_t *costs;
    uint32_t count;
    uint32_t *rank, *micro; /* [row] */
    uint32_t *mine;         /* rows of one rank, and their costs and micro-batches */
    uint64_t *mine_costs;
    uint32_t *mine_micro;
    uint32_t micros[DRAY__RANKS_MAX];
} division;

/* Sums of DRAY__BALANCE_MAX such costs fit into 64 bits. */
#define COST_MAX 549755813888.0 /* 2^39 */

static int read_costs(const dray__table *table, const dray__partition *p, division *d,
                      dray_error *error)
{
    uint32_t key = DRAY__NONE;
    const char *cost = d->want->cost ? d->want->cost : DRAY_TAG_TOKENS;
    bool known = dray__map_get(&table->key_names, cost, &key);
    for (uint32_t i = 0; i < d->count; i++) {
        double tokens = 1;
        if (known)
            dray__row_tag(table, p, d->slots[i], key, &tokens);
        tokens = tokens > 0 ? ceil(tokens) : 0;
        d->costs[i] = tokens < COST_MAX ? (uint64_t)tokens : (uint64_t)COST_MAX;
        if (d->want->token_cap && d->costs[i] > d->want->token_cap)
            return dray__fail(error, DRAY_EFULL,
                              "partition %s: row %u has %llu %s, a micro-batch at most %llu",
                              p->name, d->slots[i], (unsigned long long)d->costs[i], cost,
                              (unsigned long long)d->want->token_cap);
    }
    return DRAY_OK;
}

/* Returns true when micro-batches that were balanced are within their limits. */
static bool within(const division *d, uint32_t count, const uint32_t *micro, uint32_t micros)
{
    for (uint32_t m = 0; m < micros; m++) {
        uint64_t sum = 0;
        uint32_t rows = 0;
        for (uint32_t i = 0; i < count; i++) {
            sum += micro[i] == m ? d->mine_costs[i] : 0;
            rows += micro[i] == m;
        }
        if ((d->want->token_cap && sum > d->want->token_cap) ||
            (d->want->micro_rows && rows > d->want->micro_rows))
            return false;
    }
    return true;
}

static uint32_t rows_of(division *d, uint32_t rank)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < d->count; i++) {
        if (d->rank[i] != rank)
            continue;
        d->mine[count] = i;
        d->mine_costs[count++] = d->costs[i];
    }
    return count;
}

/* Divides the rank's rows into `least` micro-batches, or into as few as the limits allow if these
 * are more. Balances them, unless they are so many that this takes long. */
static int divide_rank(division *d, uint32_t rank, uint32_t least, dray_error *error)
{
    uint32_t count = rows_of(d, rank), packed = 0;
    int rc = dray__pack(d->mine_costs, count, d->want->token_cap, d->want->micro_rows,
                        d->mine_micro, &packed, error);
    uint32_t micros = packed > least ? packed : least;
    micros = micros > count ? count : micros; /* further ones have only padding */
    if ((uint64_t)count * micros > DRAY__BALANCE_MAX) {
        micros = packed;
    } else if (!rc && micros > 1) {
        uint32_t *even = malloc(count * sizeof *even);
        rc = even ? dray__balance(d->mine_costs, count, micros, even, error) : dray__nomem(error);
        if (!rc && within(d, count, even, micros))
            memcpy(d->mine_micro, even, count * sizeof *even);
        else
            micros = packed;
        free(even);
    }
    for (uint32_t i = 0; !rc && i < count; i++)
        d->micro[d->mine[i]] = d->mine_micro[i];
    d->micros[rank] = micros;
    return rc;
}

static int divide(division *d, bool lockstep, dray_error *error)
{
    uint32_t size = d->want->dp_size, most = 1;
    int rc = dray__balance(d->costs, d->count, size, d->rank, error);
    for (uint32_t r = 0; !rc && r < size; r++) {
        rc = divide_rank(d, r, 1, error);
        most = d->micros[r] > most ? d->micros[r] : most;
    }
    for (uint32_t r = 0; !rc && lockstep && r < size; r++)
        if (d->micros[r] < most)
            rc = divide_rank(d, r, most, error);
    return rc;
}

static uint32_t cheapest(const division *d)
{
    uint32_t found = 0;
    for (uint32_t i = 1; i < d->count; i++)
        found = d->costs[i] < d->costs[found] ? i : found;
    return d->slots[found];
}

/* Makes the share of a rank with `micros` micro-batches. Each one that the rank lacks is one row of
 * padding, at the end. */
static int make_share(division *d, uint32_t rank, uint32_t micros, uint32_t padding,
                      dray__share *share, dray_error *error)
{
    share->own = rows_of(d, rank);
    share->slots = malloc((share->own + (size_t)micros) * sizeof *share->slots);
    uint32_t *ends = share->micro_ends = calloc(micros, sizeof *share->micro_ends);
    if (!share->slots || !ends)
        return dray__nomem(error);
    for (uint32_t i = 0; i < share->own; i++)
        ends[d->micro[d->mine[i]]]++;
    for (uint32_t m = 0; m < micros; m++) { /* converts counts of rows to start positions */
        uint32_t rows = ends[m], from = share->count;
        share->count += rows ? rows : 1;
        ends[m] = rows ? from : share->count;
        if (!rows)
            share->slots[from] = padding;
    }
    for (uint32_t i = 0; i < share->own; i++) /* converts start positions to ends */
        share->slots[ends[d->micro[d->mine[i]]]++] = d->slots[d->mine[i]];
    share->micro_count = micros;
    return DRAY_OK;
}

static int make_shares(division *d, dray__round *round, dray_error *error)
{
    uint32_t most = 1, padding = cheapest(d);
    int rc = DRAY_OK;
    for (uint32_t r = 0; r < round->size; r++)
        most = d->micros[r] > most ? d->micros[r] : most;
    for (uint32_t r = 0; !rc && r < round->size; r++) {
        uint32_t own = d->micros[r] ? d->micros[r] : 1;
        rc = make_share(d, r, round->lockstep ? most : own, padding, &round->shares[r], error);
    }
    return rc;
}

static int division_new(division *d, dray_error *error)
{
    d->costs = calloc(d->count, sizeof *d->costs);
    d->mine_costs = calloc(d->count, sizeof *d->mine_costs);
    d->rank = calloc(d->count, sizeof *d->rank);
    d->micro = calloc(d->count, sizeof *d->micro);
    d->mine = calloc(d->count, sizeof *d->mine);
    d->mine_micro = calloc(d->count, sizeof *d->mine_micro);
    bool all = d->costs && d->mine_costs && d->rank && d->micro && d->mine && d->mine_micro;
    return all ? DRAY_OK : dray__nomem(error);
}

static void division_free(division *d)
{
    free(d->costs);
    free(d->mine_costs);
    free(d->rank);
    free(d->micro);
    free(d->mine);
    free(d->mine_micro);
}

/* Pins the puts of the row that serves as padding, because its own rank may commit it, which frees
 * its columns, before another rank reads it. */
static int pin_padding(const dray__table *table, const division *d, dray__round *round,
                       dray_error *error)
{
    uint32_t slot = cheapest(d), capacity = 0, padding = 0;
    for (uint32_t r = 0; r < round->size; r++)
        padding += round->shares[r].count - round->shares[r].own;
    for (uint32_t w = 0; padding && w <= table->task_count; w++) {
        uint32_t at = DRAY__NONE;
        const dray__place *place = NULL;
        while (dray__next_place(round->partition, (int)w - 1, slot, &at, &place)) {
            int rc = dray__grow_full(&round->pins, round->pin_count, &capacity, sizeof(dray__put *),
                                     error);
            if (rc)
                return rc;
            round->pins[round->pin_count] = round->partition->puts[place->put];
            round->pins[round->pin_count++]->pins++;
        }
    }
    return DRAY_OK;
}

int dray__round_new(dray__table *table, dray__partition *p, const dray__want *want, bool lockstep,
                    const uint32_t *slots, uint32_t count, dray__round **out, dray_error *error)
{
    dray__round *round = calloc(1, sizeof *round);
    division d = {.want = want, .slots = slots, .count = count};
    int rc = round ? find_consumers(table, want, &round->consumers, error) : dray__nomem(error);
    if (!rc) {
        round->number = want->round;
        round->partition = p;
        round->size = want->dp_size;
        round->peers = want->peers;
        round->lockstep = lockstep;
        round->shares = calloc(round->size, sizeof *round->shares);
        rc = round->shares ? division_new(&d, error) : dray__nomem(error);
    }
    if (!rc)
        rc = read_costs(table, p, &d, error);
    if (!rc)
        rc = divide(&d, lockstep, error);
    if (!rc)
        rc = make_shares(&d, round, error);
    if (!rc)
        rc = pin_padding(table, &d, round, error);
    division_free(&d);
    if (rc) {
        if (round)
            round_free(table, round);
        return rc;
    }
    dray__round **at = &table->rounds;
    while (*at)
        at = &(*at)->next;
    *at = round;
    round->consumers->next_round = want->round + 1;
    dray__take_rows(table, p, want->task, slots, count);
    table->dirty |= UINT64_C(1) << want->task; /* the other ranks wait for their shares */
    *out = round;
    return DRAY_OK;
}
