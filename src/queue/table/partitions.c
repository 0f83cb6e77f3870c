/* The table's partitions: making, sealing and clearing them, and the memory of cleared ones. */
#include "base/error.h"
#include "queue/journal/ledger.h"
#include "queue/table/keyed.h"
#include "queue/table/table_inside.h"

#include <stdlib.h>
#include <string.h>

#define REFILLS_LEFT (1u << 19) /* numbers that are left for refills, which share 32 bits */

/* ---- partitions ------------------------------------------------------------------------------ */

void dray__partition_free(const dray__table *table, dray__partition *p)
{
    if (!p)
        return;
    for (uint32_t t = 0; p->tracks && t < table->task_count; t++) {
        dray__track *track = &p->tracks[t];
        free(track->taken);
        free(track->done);
        free(track->ready);
        free(track->rows);
        free(track->whole);
        free(track->groups);
    }
    for (uint32_t w = 0; p->places && w <= table->task_count; w++)
        free(p->places[w]);
    for (uint32_t t = 0; p->earlier && t < table->task_count; t++)
        free(p->earlier[t]);
    for (uint32_t t = 0; p->commit_seq && t < table->task_count; t++)
        free(p->commit_seq[t]);
    free(p->commit_seq);
    for (uint32_t c = 0; c < p->column_capacity; c++)
        free(p->columns[c]);
    free(p->earlier);
    free(p->segments);
    free(p->name);
    free(p->dead);
    free(p->vacant);
    free(p->away);
    free(p->row_generations);
    free(p->oldest);
    free(p->newest);
    free(p->columns);
    free(p->committed);
    free(p->tracks);
    free(p->places);
    free(p->group_of);
    free(p->groups);
    free(p->puts);
    free(p->deaths);
    free(p);
}

static dray__partition *partition_new(const dray__table *table, const char *name,
                                      uint32_t group_size)
{
    dray__partition *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->name = strdup(name);
    p->hash = dray__hash(name, strlen(name));
    p->group_size = group_size;
    p->tracks = calloc(table->task_count, sizeof *p->tracks);
    p->places = calloc(table->task_count + 1, sizeof(dray__place *));
    p->earlier = calloc(table->task_count, sizeof(uint32_t *));
    p->commit_seq = calloc(table->task_count, sizeof(uint64_t *));
    if (!p->name || !p->tracks || !p->places || !p->earlier || !p->commit_seq) {
        dray__partition_free(table, p);
        return NULL;
    }
    for (uint32_t t = 0; t < table->task_count; t++) {
        dray__track *track = &p->tracks[t];
        track->floor = UINT64_MAX;
        track->head = track->tail = track->group_head = track->group_tail = DRAY__NONE;
    }
    return p;
}

dray__partition *dray__table_partition(const dray__table *table, const char *name)
{
    uint64_t hash = dray__hash(name, strlen(name));
    for (uint32_t i = 0; i < table->partition_count; i++)
        if (table->partitions[i]->hash == hash && strcmp(table->partitions[i]->name, name) == 0)
            return table->partitions[i];
    return NULL;
}

static dray__former_partition *find_former(const dray__table *table, const char *name)
{
    uint64_t hash = dray__hash(name, strlen(name));
    for (uint32_t g = 0; g < DRAY__FORMER; g++)
        if (table->former[g].name && table->former[g].hash == hash &&
            strcmp(table->former[g].name, name) == 0)
            return &table->former[g];
    return NULL;
}

/* Arrays of a partition that grow together. Those that grew before a failure keep their size. The
 * partition's capacity is that of all of them. */
typedef struct growth {
    uint32_t old, capacity;
    int rc;
    dray_error *error;
} growth;

static growth growth_to(uint32_t old, uint32_t needed, dray_error *error)
{
    growth g = {.old = old, .capacity = old ? old : 64, .error = error};
    while (g.capacity < needed)
        g.capacity *= 2;
    return g;
}

static void grow_items(growth *g, void *array, size_t size)
{
    if (!g->rc)
        g->rc = dray__grow(array, g->old, g->capacity, size, g->error);
}

static void grow_bits(growth *g, void *array)
{
    if (!g->rc)
        g->rc =
            dray__grow(array, dray__bit_words(g->old), dray__bit_words(g->capacity), 8, g->error);
}

/* Grows an array of places. All bits of new ones are set, so that they are DRAY__NONE. */
static void grow_places(growth *g, void *array, size_t size)
{
    uint8_t *places;
    grow_items(g, array, size);
    memcpy(&places, array, sizeof places);
    if (!g->rc)
        memset(places + g->old * size, 0xFF, (g->capacity - g->old) * size);
}

/* Grows the partition to `rows` rows. */
static int grow_rows(const dray__table *table, dray__partition *p, uint32_t rows, dray_error *error)
{
    if (rows <= p->row_capacity)
        return DRAY_OK;
    growth g = growth_to(p->row_capacity, rows, error);
    grow_bits(&g, &p->dead);
    grow_bits(&g, &p->vacant);
    grow_bits(&g, &p->away);
    grow_items(&g, &p->group_of, sizeof *p->group_of);
    grow_items(&g, &p->row_generations, sizeof *p->row_generations);
    if (p->oldest)
        grow_items(&g, &p->oldest, sizeof *p->oldest);
    if (p->newest)
        grow_items(&g, &p->newest, sizeof *p->newest);
    for (uint32_t c = 0; c < p->column_capacity; c++)
        if (p->columns[c])
            grow_bits(&g, &p->columns[c]);
    for (uint32_t t = 0; t < table->task_count; t++) {
        dray__track *track = &p->tracks[t];
        grow_bits(&g, &track->taken);
        grow_bits(&g, &track->done);
        grow_bits(&g, &track->ready);
        grow_items(&g, &track->rows, sizeof *track->rows);
        if (p->commit_seq[t])
            grow_items(&g, &p->commit_seq[t], sizeof **p->commit_seq);
        if (p->earlier[t])
            grow_places(&g, &p->earlier[t], sizeof **p->earlier);
    }
    for (uint32_t w = 0; w <= table->task_count; w++)
        if (p->places[w])
            grow_places(&g, &p->places[w], sizeof **p->places);
    if (!g.rc)
        p->row_capacity = g.capacity;
    return g.rc;
}

static int grow_groups(const dray__table *table, dray__partition *p, uint32_t groups,
                       dray_error *error)
{
    if (groups <= p->group_capacity)
        return DRAY_OK;
    growth g = growth_to(p->group_capacity, groups, error);
    grow_items(&g, &p->groups, sizeof *p->groups);
    for (uint32_t t = 0; t < table->task_count; t++) {
        grow_bits(&g, &p->tracks[t].whole);
        grow_items(&g, &p->tracks[t].groups, sizeof *p->tracks[t].groups);
    }
    if (!g.rc)
        p->group_capacity = g.capacity;
    return g.rc;
}

/* ---- insert, seal, clear, end ---------------------------------------------------------------- */

uint64_t dray__partition_charge(const dray__partition *p)
{
    return p->reserved > p->live ? p->reserved : p->live;
}

static int check_rows(const dray__table *table, const dray__new_rows *rows, uint32_t group,
                      uint64_t *reserve, dray_error *error)
{
    if (!rows->rows || rows->rows > DRAY__ROWS_MAX)
        return dray__fail(error, DRAY_EINVALID, "insert into %s: 1 to %u rows, found %u",
                          rows->partition, DRAY__ROWS_MAX, rows->rows);
    if (rows->rows % group)
        return dray__fail(error, DRAY_EINVALID,
                          "insert into %s: %u rows are no whole number of groups of %u",
                          rows->partition, rows->rows, group);
    if (__builtin_mul_overflow(rows->row_bytes, (uint64_t)rows->rows, reserve))
        return dray__fail(error, DRAY_EINVALID, "insert into %s: %u rows of %llu bytes overflow",
                          rows->partition, rows->rows, (unsigned long long)rows->row_bytes);
    if (rows->rows > table->settings.capacity_rows || *reserve > table->settings.capacity_bytes)
        return dray__fail(error, DRAY_EFULL,
                          "insert into %s: %u rows of %llu bytes can never fit into %llu rows, "
                          "%llu bytes",
                          rows->partition, rows->rows, (unsigned long long)rows->row_bytes,
                          (unsigned long long)table->settings.capacity_rows,
                          (unsigned long long)table->settings.capacity_bytes);
    return DRAY_OK;
}

/* Fails when the queue has ended: it takes no new partition. */
static int check_not_ended(const dray__table *table, const dray__new_rows *rows, dray_error *error)
{
    if (!table->ended)
        return DRAY_OK;
    return dray__fail(error, DRAY_EEND, "insert into %s: queue %s has ended", rows->partition,
                      table->name);
}

/* Fails when the numbers for partitions are used up. Rows that are read again have theirs. */
static int check_numbers(const dray__table *table, const dray__new_rows *rows, dray_error *error)
{
    bool again = table->ledger && table->ledger->replaying;
    if (again || table->generations < UINT32_MAX - REFILLS_LEFT)
        return DRAY_OK;
    return dray__fail(error, DRAY_EFULL,
                      "insert into %s: fewer than %u partitions, puts and refills of a queue "
                      "expected, found %u (go on with another queue)",
                      rows->partition, UINT32_MAX - REFILLS_LEFT, table->generations);
}

static int check_place(const dray__table *table, const dray__partition *p,
                       const dray__new_rows *rows, uint32_t group, dray_error *error)
{
    uint32_t held = p ? p->rows : 0;
    if (rows->at_slot && rows->at_slot - 1 < held)
        return dray__fail(error, DRAY_EEXIST,
                          "insert into %s at slot %llu: it holds slots 0 to %u already",
                          rows->partition, (unsigned long long)rows->at_slot - 1, held - 1);
    if (!p && dray__table_keyed(table, rows->partition))
        return dray__fail(error, DRAY_EINVALID,
                          "insert into %s: a partition whose rows are claimed expected, found one "
                          "of rows with keys (take another name)",
                          rows->partition);
    if (!p && rows->at_slot && find_former(table, rows->partition))
        return dray__fail(error, DRAY_EEXIST,
                          "insert into %s at slot %llu: the partition was there and is cleared",
                          rows->partition, (unsigned long long)rows->at_slot - 1);
    if (p && p->sealed)
        return dray__fail(error, DRAY_EINVALID, "insert into %s: it is sealed at %u rows",
                          rows->partition, p->rows);
    if (rows->at_slot && rows->at_slot - 1 > held)
        return dray__fail(error, DRAY_EINVALID,
                          "insert into %s at slot %llu: it holds %u rows, a gap would be left",
                          rows->partition, (unsigned long long)rows->at_slot - 1, held);
    int rc = p ? DRAY_OK : check_not_ended(table, rows, error);
    if (!rc && !p)
        rc = check_numbers(table, rows, error);
    if (rc)
        return rc;
    if (p && p->group_size != group)
        return dray__fail(error, DRAY_EINVALID, "insert into %s: groups of %u expected, found %u",
                          rows->partition, p->group_size, group);
    if (rows->rows > DRAY__ROWS_MAX - held)
        return dray__fail(error, DRAY_EINVALID, "insert into %s: more than %u rows",
                          rows->partition, DRAY__ROWS_MAX);
    return DRAY_OK;
}

static int check_capacity(const dray__table *table, const dray__partition *p,
                          const dray__new_rows *rows, uint64_t reserve, uint64_t bytes,
                          dray_error *error)
{
    uint64_t reserved = (p ? p->reserved : 0) + reserve, live = (p ? p->live : 0) + bytes;
    uint64_t charge = reserved > live ? reserved : live;
    uint64_t used =
        table->charged + table->hidden + table->kept - (p ? dray__partition_charge(p) : 0);
    if (bytes > table->settings.capacity_bytes)
        return dray__fail(error, DRAY_EFULL, "insert into %s: %llu bytes can never fit into %llu",
                          rows->partition, (unsigned long long)bytes,
                          (unsigned long long)table->settings.capacity_bytes);
    /* Rows that are read again had room when they were inserted. There may be rows of puts that
     * were dropped since. */
    bool again = table->ledger && table->ledger->replaying;
    if (!again && table->rows + rows->rows > table->settings.capacity_rows)
        return dray__fail(error, DRAY_EAGAIN, "insert into %s: %llu rows + %u > %llu",
                          rows->partition, (unsigned long long)table->rows, rows->rows,
                          (unsigned long long)table->settings.capacity_rows);
    uint64_t memory = dray__rows_memory(table, (p ? p->rows : 0) + rows->rows, rows->group_size) +
                      dray__tags_memory(&rows->content, rows->rows) -
                      (p ? p->memory - p->tag_memory : 0);
    int rc = again ? DRAY_OK : dray__quota_rows(table, rows->rows, memory, error);
    if (rc)
        return dray__fail_prefix(error, rc, "insert into %s: ", rows->partition);
    if (!again && table->admission.task == DRAY__NONE && rows->rows > dray__admission_room(table))
        return dray__fail(error, DRAY_EAGAIN,
                          "insert into %s: %u rows, but rollout is %lld rows from its bound of "
                          "staleness %u at version %llu",
                          rows->partition, rows->rows, (long long)dray__admission_room(table),
                          table->admission.staleness, (unsigned long long)table->admission.version);
    if (!again &&
        (charge > table->settings.capacity_bytes || used > table->settings.capacity_bytes - charge))
        return dray__fail(error, DRAY_EAGAIN,
                          "insert into %s: %llu bytes of others + %llu of this partition > %llu",
                          rows->partition, (unsigned long long)used, (unsigned long long)charge,
                          (unsigned long long)table->settings.capacity_bytes);
    return DRAY_OK;
}

static int link_partition(dray__table *table, dray__partition *p, dray_error *error)
{
    int rc = dray__grow_full(&table->partitions, table->partition_count, &table->partition_capacity,
                             sizeof(dray__partition *), error);
    if (rc)
        return rc;
    table->partitions[table->partition_count++] = p;
    p->generation = dray__ledger_number(table);
    dray__former_partition *former = find_former(table, p->name);
    if (former) {
        free(former->name);
        *former = (dray__former_partition){0};
    }
    return DRAY_OK;
}

/* Sets the groups of inserted rows [from, to). The first inserted row is at slot `first`. */
static void set_groups(dray__partition *p, uint32_t first, uint32_t from, uint32_t to)
{
    for (uint32_t i = from; i < to; i++) {
        if (i % p->group_size == 0)
            p->groups[p->group_count++] = (dray__group_range){first + i, p->group_size};
        p->group_of[first + i] = p->group_count - 1;
    }
}

int dray__insert_check(const dray__table *table, const dray__client *client,
                       const dray__new_rows *rows, uint64_t bytes, dray_error *error)
{
    uint32_t group = rows->group_size ? rows->group_size : 1;
    uint64_t reserve = 0;
    if (dray__ledger_told(table->ledger, client->identity, rows->ticket))
        return DRAY_OK;
    int rc = dray__name_check(rows->partition, "partition", error);
    if (!rc)
        rc = check_rows(table, rows, group, &reserve, error);
    const dray__partition *p = rc ? NULL : dray__table_partition(table, rows->partition);
    if (!rc)
        rc = check_place(table, p, rows, group, error);
    return rc ? rc : check_capacity(table, p, rows, reserve, bytes, error);
}

void dray__insert_abort(dray__table *table, dray__insertion *in)
{
    if (in->put && in->begun)
        table->put_count--;
    dray__put_discard(table, in->put);
    if (in->fresh)
        dray__partition_free(table, in->partition);
}

/* Allocates everything, so that later only linking a new partition can fail. */
static int prepare(dray__table *table, const dray__new_rows *rows, uint32_t items,
                   dray__insertion *in, dray_error *error)
{
    dray__partition *p = in->partition;
    in->fresh = !p;
    if (!p)
        in->partition = p = partition_new(table, rows->partition, in->group);
    if (!p)
        return dray__nomem(error);
    p->coming = in->fresh ? rows->rows : 0;
    in->first = p->rows;
    int rc = grow_rows(table, p, p->rows + rows->rows, error);
    if (!rc)
        rc = grow_groups(table, p, p->group_count + rows->rows / in->group, error);
    if (!rc)
        rc = dray__put_prepare(table, p, -1, &rows->content, items, &in->put, error);
    if (rc)
        dray__insert_abort(table, in);
    return rc;
}

int dray__insert_begin(dray__table *table, const dray__client *client, const dray__new_rows *rows,
                       dray__insertion *in, dray_error *error)
{
    uint64_t bytes = 0;
    *in = (dray__insertion){.rows = rows->rows, .group = rows->group_size ? rows->group_size : 1};
    uint32_t items = rows->per_group ? rows->rows / in->group : rows->rows;
    in->divisor = rows->per_group ? in->group : 1;
    int rc = dray__name_check(rows->partition, "partition", error);
    if (!rc)
        rc = check_rows(table, rows, in->group, &in->reserve, error);
    if (rc)
        return rc;
    in->partition = dray__table_partition(table, rows->partition);
    rc = check_place(table, in->partition, rows, in->group, error);
    if (!rc)
        rc = dray__put_check(table, client, -1, &rows->content, items, &bytes, error);
    if (!rc)
        rc = check_capacity(table, in->partition, rows, in->reserve, bytes, error);
    return rc ? rc : prepare(table, rows, items, in, error);
}

bool dray__insert_step(dray__table *table, dray__insertion *in, uint32_t most)
{
    dray__partition *p = in->partition;
    uint32_t left = in->rows - in->placed, words = most / 64 + 1;
    if (left) {
        uint32_t to = in->placed + (left < most ? left : most);
        set_groups(p, in->first, in->placed, to);
        if (in->put && !in->begun)
            dray__put_begin(table, p, in->put);
        in->begun = true;
        if (in->put)
            dray__put_rows(table, p, -1, in->put, NULL, in->first, in->placed, to, in->divisor,
                           NULL);
        in->placed = to;
        p->rows = in->first + in->rows;
        in->word = in->first / 64;
        return false;
    }
    for (; words && in->word <= (p->rows - 1) / 64; words--)
        dray__refresh_all_tasks(table, p, in->word++, false);
    return in->word > (p->rows - 1) / 64;
}

int dray__insert_end(dray__table *table, dray__client *client, const dray__new_rows *rows,
                     dray__insertion *in, uint32_t *first_slot, uint32_t *generation,
                     dray_error *error)
{
    dray__partition *p = in->partition;
    /* Between the steps the queue may be ended, and rows with keys be put. */
    int rc = in->fresh ? check_not_ended(table, rows, error) : DRAY_OK;
    if (!rc && in->fresh && dray__table_keyed(table, rows->partition))
        rc = dray__fail(error, DRAY_EINVALID,
                        "insert into %s: a partition whose rows are claimed expected, found one of "
                        "rows with keys (take another name)",
                        rows->partition);
    if (!rc && in->fresh)
        rc = link_partition(table, p, error);
    if (rc) {
        dray__insert_abort(table, in);
        return rc;
    }
    for (uint32_t i = 0; i < in->rows; i++)
        p->row_generations[in->first + i] = p->generation;
    p->coming = 0;
    table->charged -= dray__partition_charge(p);
    p->reserved += in->reserve;
    table->charged += dray__partition_charge(p);
    table->memory -= p->memory;
    p->tag_memory += dray__tags_memory(&rows->content, in->rows / in->divisor);
    p->memory = dray__rows_memory(table, p->rows, in->group) + p->tag_memory;
    table->memory += p->memory;
    table->rows += in->rows;
    table->inserted += in->rows;
    if (in->put)
        dray__put_finish(table, p, in->put, in->rows);
    for (uint32_t t = 0; t < table->task_count; t++) /* the rows become visible now */
        table->dirty |= (uint64_t)(p->tracks[t].ready_count != 0) << t;
    *first_slot = in->first;
    *generation = p->generation;
    dray__admission_note(table, DRAY__NONE, in->rows);
    dray__ledger_insert(table->ledger, client, rows, p, in->first, in->put);
    return DRAY_OK;
}

int dray__table_insert(dray__table *table, dray__client *client, const dray__new_rows *rows,
                       uint32_t *first_slot, uint32_t *generation, dray_error *error)
{
    const dray__told *told = dray__ledger_told(table->ledger, client->identity, rows->ticket);
    dray__insertion in;
    if (told) { /* an earlier controller has done it */
        *first_slot = told->first_slot;
        *generation = told->generation;
        return DRAY_OK;
    }
    if (rows->refill)
        return dray__table_refill(table, client, rows, first_slot, generation, error);
    int rc = dray__insert_begin(table, client, rows, &in, error);
    if (rc)
        return rc;
    while (!dray__insert_step(table, &in, DRAY__ROWS_MAX))
        ;
    return dray__insert_end(table, client, rows, &in, first_slot, generation, error);
}

int dray__table_seal(dray__table *table, const char *partition, uint32_t rows, dray_error *error)
{
    dray__partition *p = dray__table_partition(table, partition);
    if (!p)
        return dray__fail(error, DRAY_ENOENT, "seal: queue %s has no partition %s", table->name,
                          partition);
    if (p->rows != rows)
        return dray__fail(error, DRAY_EINVALID, "seal of %s at %u rows: it holds %u%s", partition,
                          rows, p->rows, p->sealed ? " and is sealed" : "");
    if (!p->sealed)
        dray__ledger_write(table->ledger, DRAY__RECORD_SEAL, p->generation, &p->rows);
    p->sealed = true;
    table->dirty = ~UINT64_C(0);
    table->finished = table->freed = true; /* waiting inserts into it must be tried */
    return DRAY_OK;
}

static dray__former_partition *add_former(dray__table *table, char *name)
{
    dray__former_partition *former = &table->former[table->former_at];
    free(former->name);
    *former = (dray__former_partition){.name = name, .hash = dray__hash(name, strlen(name))};
    table->former_at = (table->former_at + 1) % DRAY__FORMER;
    return former;
}

int dray__table_add_former(dray__table *table, const char *name, uint64_t finished,
                           dray_error *error)
{
    if (dray__table_partition(table, name) || find_former(table, name))
        return DRAY_OK;
    char *copy = strdup(name);
    if (!copy)
        return dray__nomem(error);
    dray__former_partition *former = add_former(table, copy);
    former->finished = finished;
    return DRAY_OK;
}

int dray__table_clear(dray__table *table, const char *partition, dray_error *error)
{
    dray__partition *p = dray__table_partition(table, partition);
    if (!p && dray__table_keyed(table, partition))
        return dray__keyed_drop(table, partition, &(dray__named){0}, error);
    if (!p && find_former(table, partition))
        return DRAY_OK;
    if (!p)
        return dray__fail(error, DRAY_ENOENT, "clear: queue %s has no partition %s", table->name,
                          partition);
    p->clearing = p->uncovered != 0;
    dray__ledger_clear(table->ledger, p);
    if (p->clearing) /* dray__table_cover clears it later */
        return DRAY_OK;
    dray__former_partition *former = add_former(table, p->name);
    p->name = NULL;
    dray__demands_clear(table, p);
    dray__rounds_clear(table, p);
    for (uint32_t t = 0; t < table->task_count; t++)
        if (dray__finished(p, t))
            former->finished |= UINT64_C(1) << t;
    for (dray__claim *claim = table->claims; claim; claim = claim->next) {
        if (claim->partition != p)
            continue;
        claim->partition = NULL;
        if (claim->state == DRAY__CLAIM_ACTIVE)
            claim->state = DRAY__CLAIM_GONE;
    }
    uint32_t at = 0;
    while (table->partitions[at] != p)
        at++;
    memmove(&table->partitions[at], &table->partitions[at + 1],
            (table->partition_count - at - 1) * sizeof *table->partitions);
    table->partition_count--;
    table->charged -= dray__partition_charge(p);
    table->rows -= p->rows;
    table->memory -= p->memory;
    dray__quota_freed(table);
    dray__puts_clear(table, p);
    dray__partition_free(table, p);
    table->dirty = ~UINT64_C(0);
    table->finished = table->freed = table->demanded = true;
    return DRAY_OK;
}

void dray__table_end(dray__table *table)
{
    if (!table->ended)
        dray__ledger_write(table->ledger, DRAY__RECORD_END, 0, NULL);
    table->ended = true;
    table->dirty = ~UINT64_C(0);
    table->finished = table->freed = table->demanded = table->named = true;
}

int dray__describe_vacant(const dray__partition *p, char *out, size_t size)
{
    int at = 0, named = 0;
    if (!p->vacant_count)
        return 0;
    at = snprintf(out, size, ", %u wait for another sample (refill): slots", p->vacant_count);
    for (uint32_t slot = 0; slot < p->rows && named < 8 && at >= 0 && (size_t)at < size; slot++)
        if (dray__bit_get(p->vacant, slot))
            at += snprintf(out + at, size - (size_t)at, "%s %u", named++ ? "," : "", slot);
    if (p->vacant_count > 8 && (size_t)at < size)
        at += snprintf(out + at, size - (size_t)at, ", ...");
    return at;
}

int dray__table_wait(const dray__table *table, const char *partition, uint32_t task,
                     dray_error *error)
{
    uint64_t all = table->task_count == 64 ? ~UINT64_C(0) : (UINT64_C(1) << table->task_count) - 1;
    uint64_t asked = task == DRAY__NONE ? all : UINT64_C(1) << task;
    const dray__partition *p = dray__table_partition(table, partition);
    if (!p) {
        const dray__former_partition *former = find_former(table, partition);
        if (former && (former->finished & asked) == asked)
            return DRAY_OK;
        if (former)
            return dray__fail(error, DRAY_EGONE, "partition %s was cleared before it finished",
                              partition);
        return dray__fail(error, DRAY_EAGAIN, "there is no partition %s yet", partition);
    }
    for (uint32_t t = 0; t < table->task_count; t++)
        if ((asked >> t & 1) && !dray__finished(p, t)) {
            char vacant[200] = "";
            dray__describe_vacant(p, vacant, sizeof vacant);
            return dray__fail(error, DRAY_EAGAIN,
                              "partition %s, task %s: %u of %u rows committed or dead, %s%s",
                              partition, table->tasks[t].name, p->tracks[t].settled_count, p->rows,
                              p->sealed ? "sealed" : "not sealed", vacant);
        }
    return DRAY_OK;
}

int dray__table_cleared(const dray__table *table, const char *partition, uint32_t task,
                        dray_error *error)
{
    const dray__former_partition *former = find_former(table, partition);
    if (!former)
        return DRAY_OK;
    if (former->finished >> task & 1)
        return dray__fail(error, DRAY_EEND, "task %s has finished partition %s",
                          table->tasks[task].name, partition);
    return dray__fail(error, DRAY_EGONE, "partition %s was cleared", partition);
}
