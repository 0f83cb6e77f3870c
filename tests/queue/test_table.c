/* Compares the controller's state machine with a plain model over random histories of inserts,
 * claims, commits, failures, clears and deaths of clients. The model keeps every fact about every
 * row in an array, and recomputes everything from all of it. */
#include "queue/table_check.h"
#include "seed.h"
#include "suite.h"

#include <time.h>

/* ---- steps ----------------------------------------------------------------------------------- */

static void make_client(world *w, int c)
{
    char name[32];
    snprintf(name, sizeof name, "client%d", c);
    w->clients[c] = dray__client_new(w->table, 100 + (uint64_t)c, name, NULL);
    w->chunks[c] = w->step * CLIENTS + (uint64_t)c + 1;
    CHECK(w->clients[c]);
    CHECK(dray__chunk_add(w->table, w->clients[c], 0, w->chunks[c], 7, 1 << 20, NULL) == DRAY_OK);
}

/* Sometimes the client's chunk is full and it takes another. */
static void change_chunk(world *w, int c)
{
    CHECK(dray__chunk_close(w->table, w->clients[c], w->chunks[c], NULL) == DRAY_OK);
    dray__chunk_wish wish = {.id = (w->step * CLIENTS + (uint64_t)c) << 20, .size = 1 << 20};
    uint64_t given, size;
    wish.least = 1 << 20;
    CHECK(dray__chunk_ask(w->table, w->clients[c], &wish, &given, &size, NULL) == DRAY_OK);
    CHECK(given ? size == 0 : size == 1 << 20);
    w->chunks[c] = given ? given : wish.id;
}

static dray__new_column make_column(world *w, int client, int column, uint32_t items)
{
    dray__new_column c = {.name = column_names[column]};
    c.spec = (dray__column_spec){.dtype = DRAY_F32, .ndim = 2, .ragged = true, .shape = {0, 8}};
    c.extent.chunk = w->chunks[client];
    c.extent.values = 64 * (uint64_t)draw(w, 100);
    c.extent.bytes = (uint64_t)items * 32;
    return c;
}

static uint64_t put_bytes(uint32_t items)
{
    return items * 32ull + (items + 1) * 8ull; /* values and offsets */
}

static model_put *add_put(world *w, const model_partition *p, int column, uint32_t items)
{
    CHECK(w->put_count < PUTS);
    model_put *put = &w->puts[w->put_count++];
    *put = (model_put){
        .generation = p->generation, .column = column, .bytes = put_bytes(items), .goes_on = -1};
    return put;
}

static void put_row(model_put *put, const model_partition *p, uint32_t slot)
{
    put->row_generations[put->rows] = p->row[slot].generation;
    put->slots[put->rows++] = slot;
}

static int expect_insert(world *w, const model_partition *p, const dray__new_rows *rows,
                         uint64_t bytes)
{
    bool was_there = false;
    for (int i = 0; i < NAMES; i++)
        was_there |= strcmp(w->former[i].name, rows->partition) == 0;
    uint32_t held = p ? p->rows : 0;
    if (rows->rows % rows->group_size)
        return DRAY_EINVALID;
    if (rows->at_slot && rows->at_slot - 1 < held)
        return DRAY_EEXIST;
    if (!p && rows->at_slot && was_there)
        return DRAY_EEXIST;
    if (p && p->sealed)
        return DRAY_EINVALID;
    if (rows->at_slot && rows->at_slot - 1 > held)
        return DRAY_EINVALID;
    if (!p && w->ended)
        return DRAY_EEND;
    uint64_t all = 0, used = 0, reserve = rows->row_bytes * rows->rows;
    for (uint32_t i = 0; i < w->partition_count; i++) {
        const dray__partition *q = w->table->partitions[i];
        bool same = w->partitions[i] == p;
        uint64_t r = q->reserved + (same ? reserve : 0), l = q->live + (same ? bytes : 0);
        all += w->partitions[i]->rows;
        used += r > l ? r : l;
    }
    if (!p)
        used += reserve > bytes ? reserve : bytes;
    if (all + rows->rows > CAPACITY_ROWS || used + w->table->hidden > CAPACITY_BYTES)
        return DRAY_EAGAIN;
    return DRAY_OK;
}

static void step_insert(world *w)
{
    char name[16];
    static const uint32_t sizes[] = {1, 1, 2, 4};
    snprintf(name, sizeof name, "p%u", draw(w, NAMES));
    model_partition *p = find(w, name);
    int client = (int)draw(w, CLIENTS);
    uint32_t size = p ? p->group : sizes[draw(w, 4)];
    dray__new_rows rows = {.partition = name, .group_size = size, .per_group = draw(w, 2)};
    rows.rows = draw(w, 20) == 0 ? size * 2 + 1 : size * (1 + draw(w, 80 / size));
    rows.at_slot = draw(w, 4) ? 0 : draw(w, 8) ? (p ? p->rows : 0) + 1 : draw(w, 30);
    rows.row_bytes = draw(w, 3) ? 0 : draw(w, 900);
    uint32_t items = rows.per_group ? rows.rows / size : rows.rows;
    dray__new_column column = make_column(w, client, 0, items);
    rows.content.columns = &column;
    rows.content.column_count = draw(w, 10) != 0;
    int expected = expect_insert(w, p, &rows, rows.content.column_count ? put_bytes(items) : 0);
    uint32_t first = 0, generation = 0;
    int rc = dray__table_insert(w->table, w->clients[client], &rows, &first, &generation, NULL);
    CHECK(rc == expected);
    if (rc)
        return;
    if (!p) {
        p = w->partitions[w->partition_count++] = calloc(1, sizeof *p);
        snprintf(p->name, sizeof p->name, "%s", name);
        p->generation = generation;
        CHECK(generation == ++w->generations);
        p->group = size;
        for (int i = 0; i < NAMES; i++)
            if (strcmp(w->former[i].name, name) == 0)
                w->former[i].name[0] = 0;
    }
    CHECK(first == p->rows && generation == p->generation);
    CHECK(p->rows + rows.rows <= ROWS);
    p->reserved += rows.row_bytes * rows.rows;
    model_put *put = rows.content.column_count ? add_put(w, p, 0, items) : NULL;
    for (uint32_t i = 0; i < rows.rows; i++) {
        p->row[p->rows + i] = (model_row){.columns = put != NULL, .generation = p->generation};
        if (put)
            put_row(put, p, p->rows + i);
    }
    p->rows += rows.rows;
}

static void step_seal(world *w)
{
    if (!w->partition_count)
        return;
    model_partition *p = w->partitions[draw(w, w->partition_count)];
    uint32_t rows = draw(w, 8) ? p->rows : p->rows + 1;
    CHECK(dray__table_seal(w->table, p->name, rows, NULL) ==
          (rows == p->rows ? DRAY_OK : DRAY_EINVALID));
    p->sealed |= rows == p->rows;
}

static int expect_rows(const model_partition *p, const dray__want *want, uint32_t *count)
{
    int t = (int)want->task;
    uint32_t weight = 0;
    *count = 0;
    if (want->policy == DRAY_POLICY_GROUP && want->count % p->group)
        return DRAY_EINVALID;
    if (want->policy == DRAY_POLICY_FIFO) {
        for (uint32_t s = 0; s < p->rows && *count < want->count; s++)
            *count += ready(&p->row[s], t);
        weight = *count;
    } else if (want->policy == DRAY_POLICY_ORDERED) {
        for (uint32_t s = 0; s < p->rows && *count < want->count; s++) {
            if (settled(&p->row[s], t) || p->row[s].task[t].state == TAKEN)
                continue;
            if (!ready(&p->row[s], t))
                break;
            ++*count;
        }
        weight = *count;
    } else { /* which groups is checked by age: their open members may differ in number */
        for (uint32_t g = 0; g < p->rows / p->group && weight < want->count; g++)
            weight += whole(p, t, g) ? p->group : 0;
        *count = weight;
    }
    if (!weight)
        return DRAY_EAGAIN;
    if (want->up_to || weight == want->count)
        return DRAY_OK;
    uint32_t all = 0;
    for (uint32_t s = 0; s < p->rows; s++)
        all += want->policy == DRAY_POLICY_GROUP ? whole(p, t, s / p->group) && ready(&p->row[s], t)
                                                 : ready(&p->row[s], t);
    uint32_t reached = want->policy == DRAY_POLICY_ORDERED ? *count : all;
    return p->sealed && reached == open_rows(p, t) ? DRAY_OK : DRAY_EAGAIN;
}

static int expect_claim(world *w, const dray__want *want, model_partition **out, uint32_t *count)
{
    int t = (int)want->task;
    if (want->partition) {
        *out = find(w, want->partition);
        for (int i = 0; !*out && i < NAMES; i++)
            if (strcmp(w->former[i].name, want->partition) == 0)
                return w->former[i].finished >> t & 1 ? DRAY_EEND : DRAY_EGONE;
        if (!*out)
            return w->ended ? DRAY_EEND : DRAY_EAGAIN;
        return finished(*out, t) ? DRAY_EEND : expect_rows(*out, want, count);
    }
    bool end = w->ended;
    for (uint32_t i = 0; i < w->partition_count; i++) {
        *out = w->partitions[i];
        if (finished(*out, t))
            continue;
        end = false;
        int rc = expect_rows(*out, want, count);
        if (rc != DRAY_EAGAIN)
            return rc;
        if (want->policy == DRAY_POLICY_ORDERED && !((*out)->sealed && !open_rows(*out, t)))
            return DRAY_EAGAIN;
    }
    return end ? DRAY_EEND : DRAY_EAGAIN;
}

/* What was left must not be older than what was taken. */
static void check_choice(world *w, const model_partition *p, const dray__want *want,
                         const dray__claim *claim, uint32_t expected)
{
    int t = (int)want->task;
    uint64_t newest = 0;
    uint32_t weight = claim->count;
    static bool taken[ROWS];
    memset(taken, 0, sizeof taken);
    for (uint32_t i = 0; i < claim->count; i++) {
        CHECK(ready(&p->row[claim->slots[i]], t) && !taken[claim->slots[i]]);
        taken[claim->slots[i]] = true;
    }
    if (want->policy == DRAY_POLICY_ORDERED) {
        for (uint32_t i = 1; i < claim->count; i++)
            CHECK(claim->slots[i] > claim->slots[i - 1]);
        for (uint32_t s = 0; s < claim->slots[claim->count - 1]; s++)
            CHECK(taken[s] || settled(&p->row[s], t) || p->row[s].task[t].state == TAKEN);
    } else if (want->policy == DRAY_POLICY_FIFO) {
        for (uint32_t i = 0; i < claim->count; i++) {
            uint64_t since = row_age(p, t, claim->slots[i]);
            CHECK(since >= newest);
            newest = since;
        }
        for (uint32_t s = 0; s < p->rows; s++)
            CHECK(taken[s] || !ready(&p->row[s], t) || row_age(p, t, s) >= newest);
    } else {
        weight = 0;
        for (uint32_t g = 0; g < p->rows / p->group; g++) {
            uint32_t here = 0, could = 0;
            for (uint32_t s = g * p->group; s < (g + 1) * p->group; s++) {
                here += taken[s];
                could += ready(&p->row[s], t);
            }
            CHECK(here == 0 || (here == could && whole(p, t, g)));
            if (here && group_age(p, t, g) > newest)
                newest = group_age(p, t, g);
            weight += here ? p->group : 0;
        }
        for (uint32_t g = 0; g < p->rows / p->group; g++) {
            bool left = whole(p, t, g), here = false;
            for (uint32_t k = g * p->group; k < (g + 1) * p->group; k++)
                here |= taken[k];
            if (left && !here)
                CHECK(weight == want->count && group_age(p, t, g) >= newest);
        }
    }
    CHECK(weight == expected);
}

static void step_claim(world *w)
{
    char name[16];
    model_claim *m = NULL;
    for (int i = 0; i < CLAIMS && !m; i++)
        m = w->claims[i].used ? NULL : &w->claims[i];
    if (!m)
        return;
    snprintf(name, sizeof name, "p%u", draw(w, NAMES));
    int client = (int)draw(w, CLIENTS);
    dray__want want = {.task = draw(w, TASKS), .count = 1 + draw(w, 40), .up_to = draw(w, 2)};
    want.policy = (int32_t)draw(w, 3);
    want.partition = draw(w, 2) ? name : NULL;
    want.hold_until = draw(w, 4) ? INT64_MAX : w->now + 1 + draw(w, 40);
    if (want.policy == DRAY_POLICY_GROUP)
        want.count = (want.count + 3) / 4 * 4;
    model_partition *p = NULL;
    uint32_t count = 0;
    int expected = expect_claim(w, &want, &p, &count);
    dray__claim *claim;
    uint32_t ticket = ++w->tickets;
    int rc = dray__table_claim(w->table, w->clients[client], ticket, &want, &claim, NULL);
    CHECK(rc == expected);
    note(w, (uint64_t)(int64_t)rc);
    if (rc)
        return;
    CHECK(claim->generation == p->generation);
    check_choice(w, p, &want, claim, count);
    *m = (model_claim){.used = true,
                       .client = client,
                       .task = (int)want.task,
                       .ticket = ticket,
                       .generation = p->generation,
                       .count = claim->count,
                       .hold = want.hold_until};
    for (uint32_t i = 0; i < claim->count; i++) {
        m->slots[i] = claim->slots[i];
        note(w, claim->slots[i]);
        p->row[claim->slots[i]].task[want.task].state = TAKEN;
        p->row[claim->slots[i]].task[want.task].attempt++;
    }
    for (uint32_t k = 0; k < w->put_count; k++) {
        model_put *put = &w->puts[k];
        if (put->generation != p->generation ||
            !(needs[want.task] >> put->column & 1 || put->goes_on == (int)want.task))
            continue;
        bool hit = false;
        for (uint32_t i = 0; i < put->rows && !hit; i++)
            for (uint32_t j = 0; j < m->count && !hit; j++)
                hit = put->slots[i] == m->slots[j] &&
                      put->row_generations[i] == p->row[m->slots[j]].generation;
        if (hit) {
            put->pins++;
            m->pinned[m->pin_count++] = k;
        }
    }
}

static model_claim *any_claim(world *w)
{
    uint32_t start = draw(w, CLAIMS);
    for (uint32_t i = 0; i < CLAIMS; i++)
        if (w->claims[(start + i) % CLAIMS].used)
            return &w->claims[(start + i) % CLAIMS];
    return NULL;
}

static int claim_error(const model_claim *m)
{
    return m->gone ? DRAY_EGONE : m->stale || m->failed ? DRAY_ESTALE : DRAY_OK;
}

static void step_commit(world *w)
{
    model_claim *m = any_claim(w);
    if (!m)
        return;
    int column = writes[m->task];
    dray__new_column c = {0};
    bool forget = column >= 0 && draw(w, 12) == 0;
    if (column >= 0)
        c = make_column(w, m->client, column, m->count);
    uint32_t generation = draw(w, 12) ? m->generation : m->generation + 1;
    int expected = claim_error(m);
    if (!expected && generation != m->generation)
        expected = DRAY_ESTALE;
    if (!expected && !m->committed && forget)
        expected = DRAY_EINVALID;
    uint32_t open[ROWS];
    dray__outputs outputs = {.content = {.columns = &c, .column_count = column >= 0 && !forget},
                             .open = open};
    bool stays[ROWS] = {false};
    for (uint32_t i = 0; column >= 0 && draw(w, 3) == 0 && i < m->count; i++)
        if ((stays[i] = draw(w, 2)))
            open[outputs.open_count++] = i;
    int rc =
        dray__claim_commit(w->table, w->clients[m->client], m->ticket, generation, &outputs, NULL);
    CHECK(rc == expected);
    if (rc || m->committed)
        return;
    m->committed = true;
    model_partition *p = find_generation(w, m->generation);
    model_put *put = column >= 0 ? add_put(w, p, column, m->count) : NULL;
    for (uint32_t i = 0; i < m->count; i++) {
        if (m->slots[i] == DRAY__NONE)
            continue;
        p->row[m->slots[i]].task[m->task].state = stays[i] ? FREE : DONE;
        p->row[m->slots[i]].task[m->task].begun = stays[i];
        if (put) {
            p->row[m->slots[i]].columns |= stays[i] ? 0 : 1u << column;
            put->goes_on = stays[i] ? m->task : put->goes_on;
            put_row(put, p, m->slots[i]);
        }
    }
}

static void model_vacate(world *w, model_partition *p, uint32_t slot)
{
    for (int i = 0; i < CLAIMS; i++) {
        model_claim *m = &w->claims[i];
        if (!m->used || m->generation != p->generation || m->committed || claim_error(m))
            continue;
        uint32_t left = 0, before = 0;
        for (uint32_t k = 0; k < m->count; k++) {
            before += m->slots[k] != DRAY__NONE;
            if (m->slots[k] == slot)
                m->slots[k] = DRAY__NONE;
            left += m->slots[k] != DRAY__NONE;
        }
        m->failed = before && !left;
    }
    p->row[slot] = (model_row){.vacant = true, .generation = p->row[slot].generation};
}

static void model_lose(world *w, model_partition *p, int task, uint32_t slot)
{
    uint32_t first = slot / p->group * p->group, count = p->group;
    if (w->on_loss == DRAY_ON_LOSS_SHRINK_GROUP)
        first = slot, count = 1;
    bool refill = w->on_loss == DRAY_ON_LOSS_REFILL;
    model_demand demand = {.generation = p->generation, .task = (uint32_t)task, .holder = -1};
    for (uint32_t s = first; s < first + count; s++) {
        if (settled(&p->row[s], task) || p->row[s].vacant)
            continue;
        demand.slots[demand.count++] = s;
        p->row[s].dead = !refill;
    }
    for (uint32_t i = 0; refill && i < demand.count; i++)
        model_vacate(w, p, demand.slots[i]);
    demand.id = refill ? ++w->generations : 0;
    if (refill)
        w->demands[w->demand_count++] = demand;
}

static void model_forget_demand(world *w, uint32_t at)
{
    memmove(&w->demands[at], &w->demands[at + 1], (--w->demand_count - at) * sizeof w->demands[0]);
}

/* A producer asks which slot wants another sample, and answers, or not, or says that it cannot. */
static void step_refill(world *w)
{
    int client = (int)draw(w, CLIENTS);
    uint32_t at = w->demand_count;
    for (uint32_t i = w->demand_count; i-- > 0;)
        at = w->demands[i].holder < 0 ? i : at;
    for (uint32_t i = w->demand_count; i-- > 0;)
        at = w->demands[i].holder == client ? i : at;
    dray__demand *demand = NULL;
    int rc = dray__table_demand(w->table, w->clients[client], &demand, NULL);
    bool over = w->ended && !w->demand_count;
    for (uint32_t i = 0; i < w->partition_count; i++)
        for (int t = 0; t < TASKS; t++)
            over = over && finished(w->partitions[i], t);
    CHECK(rc == (at < w->demand_count ? DRAY_OK : over ? DRAY_EEND : DRAY_EAGAIN));
    if (rc)
        return;
    model_demand *d = &w->demands[at];
    CHECK(demand->id == d->id && demand->count == d->count && demand->task == d->task);
    CHECK(memcmp(demand->slots, d->slots, d->count * sizeof *d->slots) == 0);
    d->holder = client;
    model_partition *p = find_generation(w, d->generation);
    uint32_t choice = draw(w, 8);
    if (choice == 0)
        return;
    if (choice == 1) {
        CHECK(dray__table_decline(w->table, d->id, NULL) == DRAY_OK);
        for (uint32_t i = 0; i < d->count; i++) {
            p->row[d->slots[i]].vacant = false;
            p->row[d->slots[i]].dead = true;
        }
        model_forget_demand(w, at);
        return;
    }
    dray__new_rows rows = {.partition = p->name, .rows = d->count, .refill = d->id};
    rows.per_group = draw(w, 2);
    rows.rows += draw(w, 10) == 0;
    uint32_t items = rows.per_group ? 1 : rows.rows, first, generation;
    dray__new_column column = make_column(w, client, 0, items);
    rows.content.columns = &column;
    rows.content.column_count = draw(w, 10) != 0;
    rc = dray__table_insert(w->table, w->clients[client], &rows, &first, &generation, NULL);
    CHECK(rc == (rows.rows == d->count ? DRAY_OK : DRAY_EINVALID));
    if (rc)
        return;
    model_put *put = rows.content.column_count ? add_put(w, p, 0, items) : NULL;
    for (uint32_t i = 0; i < d->count; i++) {
        p->row[d->slots[i]] = (model_row){.columns = put != NULL, .generation = d->id};
        if (put)
            put_row(put, p, d->slots[i]);
    }
    rows.rows = d->count;
    rc = dray__table_insert(w->table, w->clients[client], &rows, &first, &generation, NULL);
    CHECK(rc == DRAY_EEXIST);
    model_forget_demand(w, at);
}

static void model_give_back(world *w, model_claim *m, uint32_t item, bool failed)
{
    model_partition *p = find_generation(w, m->generation);
    model_row *row = &p->row[m->slots[item]];
    row->task[m->task].state = FREE;
    uint32_t slot = m->slots[item];
    m->slots[item] = DRAY__NONE;
    if (failed && ++row->task[m->task].failures >= MAX_ATTEMPTS && !row->dead)
        model_lose(w, p, m->task, slot);
}

static void model_give_back_all(world *w, model_claim *m, bool failed)
{
    if (m->committed || claim_error(m))
        return;
    for (uint32_t i = 0; i < m->count; i++)
        if (m->slots[i] != DRAY__NONE)
            model_give_back(w, m, i, failed);
}

static void model_release(world *w, model_claim *m, bool failed)
{
    model_give_back_all(w, m, failed);
    for (uint32_t i = 0; i < m->pin_count; i++)
        w->puts[m->pinned[i]].pins--;
    m->used = false;
}

static void step_fail(world *w)
{
    model_claim *m = any_claim(w);
    if (!m)
        return;
    uint32_t items[3], count = draw(w, 4);
    for (uint32_t i = 0; i < count; i++)
        items[i] = draw(w, m->count + (draw(w, 20) == 0));
    int expected = claim_error(m);
    if (!expected && m->committed)
        expected = DRAY_EINVALID;
    for (uint32_t i = 0; i < count && !expected; i++)
        expected = items[i] >= m->count ? DRAY_EINVALID : DRAY_OK;
    int rc =
        dray__claim_fail(w->table, w->clients[m->client], m->ticket, items, count, "why", NULL);
    CHECK(rc == expected);
    if (rc)
        return;
    bool left = false;
    for (uint32_t i = 0; i < (count ? count : m->count); i++)
        if (m->slots[count ? items[i] : i] != DRAY__NONE)
            model_give_back(w, m, count ? items[i] : i, true);
    for (uint32_t i = 0; i < m->count; i++)
        left |= m->slots[i] != DRAY__NONE;
    m->failed = !left;
}

static void step_release(world *w)
{
    model_claim *m = any_claim(w);
    if (!m)
        return;
    CHECK(dray__claim_release(w->table, w->clients[m->client], m->ticket));
    CHECK(!dray__claim_release(w->table, w->clients[m->client], m->ticket));
    model_release(w, m, false);
}

static void step_time(world *w)
{
    w->now += draw(w, 10);
    int64_t next = INT64_MAX;
    int64_t due = dray__table_expire(w->table, w->now);
    for (int i = 0; i < CLAIMS; i++) {
        model_claim *m = &w->claims[i];
        if (!m->used || m->committed || claim_error(m))
            continue;
        if (m->hold <= w->now) {
            model_give_back_all(w, m, true);
            m->stale = true;
        } else if (m->hold < next) {
            next = m->hold;
        }
    }
    CHECK(due == next);
}

static void step_client_ends(world *w)
{
    int c = (int)draw(w, CLIENTS);
    bool died = draw(w, 2);
    dray__client_end(w->table, w->clients[c], died, "died");
    for (int i = 0; i < CLAIMS; i++)
        if (w->claims[i].used && w->claims[i].client == c)
            model_release(w, &w->claims[i], died);
    for (uint32_t i = 0; i < w->demand_count; i++)
        if (w->demands[i].holder == c)
            w->demands[i].holder = -1;
    make_client(w, c);
}

static void step_clear(world *w)
{
    if (!w->partition_count)
        return;
    uint32_t at = draw(w, w->partition_count);
    model_partition *p = w->partitions[at];
    unsigned mask = 0;
    for (int t = 0; t < TASKS; t++)
        mask |= (unsigned)finished(p, t) << t;
    if (mask != 31 && draw(w, 3)) /* mostly those that are finished */
        return;
    CHECK(dray__table_clear(w->table, p->name, NULL) == DRAY_OK);
    CHECK(dray__table_clear(w->table, p->name, NULL) == DRAY_OK);
    for (uint32_t i = w->demand_count; i-- > 0;)
        if (w->demands[i].generation == p->generation)
            model_forget_demand(w, i);
    int former = 0;
    while (w->former[former].name[0])
        former++;
    memcpy(w->former[former].name, p->name, sizeof p->name);
    w->former[former].finished = mask;
    for (uint32_t k = 0; k < w->put_count; k++)
        w->puts[k].cleared |= w->puts[k].generation == p->generation;
    for (int i = 0; i < CLAIMS; i++) {
        model_claim *m = &w->claims[i];
        if (m->used && m->generation == p->generation && !m->committed && !claim_error(m))
            m->gone = true;
    }
    w->partitions[at] = NULL;
    memmove(&w->partitions[at], &w->partitions[at + 1],
            (--w->partition_count - at) * sizeof w->partitions[0]);
    free(p);
}

static void step_wait(world *w)
{
    char name[16];
    snprintf(name, sizeof name, "p%u", draw(w, NAMES));
    uint32_t task = draw(w, TASKS + 1);
    const model_partition *p = find(w, name);
    unsigned mask = task == TASKS ? 31u : 1u << task, done = 0;
    int expected = DRAY_EAGAIN;
    for (int t = 0; p && t < TASKS; t++)
        done |= (unsigned)finished(p, t) << t;
    if (p && (done & mask) == mask)
        expected = DRAY_OK;
    for (int i = 0; !p && i < NAMES; i++)
        if (strcmp(w->former[i].name, name) == 0)
            expected = (w->former[i].finished & mask) == mask ? DRAY_OK : DRAY_EGONE;
    CHECK(dray__table_wait(w->table, name, task == TASKS ? DRAY__NONE : task, NULL) == expected);
}

static void (*const steps[])(world *) = {
    step_insert,  step_insert,  step_insert, step_seal,        step_claim,   step_claim,
    step_claim,   step_claim,   step_claim,  step_claim,       step_commit,  step_commit,
    step_commit,  step_commit,  step_commit, step_fail,        step_release, step_release,
    step_release, step_release, step_time,   step_client_ends, step_clear,   step_clear,
    step_wait,    step_refill,  step_refill,
};

static uint64_t run_history(uint64_t seed, int length)
{
    world *w = calloc(1, sizeof *w);
    w->seed = seed;
    w->step = 1;
    w->on_loss = (int32_t)(seed % 4); /* all three, and the default */
    w->on_loss = w->on_loss ? w->on_loss : DRAY_ON_LOSS_REFILL;
    dray__settings settings = {.capacity_rows = CAPACITY_ROWS,
                               .capacity_bytes = CAPACITY_BYTES,
                               .max_attempts = MAX_ATTEMPTS,
                               .on_loss = w->on_loss};
    CHECK(dray__table_new("q", task_names, TASKS, &settings, &w->table, NULL) == DRAY_OK);
    for (int c = 0; c < CLIENTS; c++)
        make_client(w, c);
    for (int i = 0; i < length; i++) {
        w->step++;
        if (i == length * 9 / 10) {
            dray__table_end(w->table);
            w->ended = true;
        }
        if (draw(w, 40) == 0)
            change_chunk(w, (int)draw(w, CLIENTS));
        steps[draw(w, sizeof steps / sizeof *steps)](w);
        stamp(w);
        check_world(w);
    }
    for (int i = 0; i < CLAIMS; i++)
        if (w->claims[i].used)
            CHECK(dray__claim_release(w->table, w->clients[w->claims[i].client],
                                      w->claims[i].ticket));
    while (w->partition_count) {
        CHECK(dray__table_clear(w->table, w->partitions[0]->name, NULL) == DRAY_OK);
        free(w->partitions[0]);
        memmove(w->partitions, w->partitions + 1, --w->partition_count * sizeof *w->partitions);
    }
    CHECK(w->table->charged == 0 && w->table->hidden == 0 && w->table->rows == 0);
    CHECK(w->table->put_count == 0 && w->table->claim_count == 0);
    for (size_t i = 0; i < w->table->chunks.capacity; i++)
        if (w->table->chunks.entries[i].key)
            CHECK(((dray__chunk *)w->table->chunks.entries[i].value)->owner != NULL);
    dray__table_free(w->table);
    uint64_t digest = w->digest;
    free(w);
    return digest;
}

TEST(test_histories)
{
    int histories = test_times(100);
    uint64_t base = test_seed();
    for (int i = 0; i < histories; i++) {
        uint64_t digest = run_history(base + (uint64_t)i, 500);
        if (i % 20 == 0) /* the same requests give the same claims */
            assert_true(digest == run_history(base + (uint64_t)i, 500));
    }
}

SUITE(NULL, NULL)
