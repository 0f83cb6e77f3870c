/* Writes a table's changes to its journal, as records (records.h). */
#include "queue/journal/ledger.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/log.h"
#include "queue/table/keyed.h"
#include "queue/table/table_inside.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#define DROP_PATIENCE (10 * DRAY__SECOND)

enum { COMPACT_BYTES = 16 << 20 }; /* fewer dead bytes are not worth compaction */

/* ---- counting -------------------------------------------------------------------------------- */

void dray__ledger_count(dray__ledger *ledger, uint32_t owner, uint64_t bytes)
{
    uintptr_t held = (uintptr_t)dray__idmap_get(&ledger->sizes, owner);
    if (owner && dray__idmap_set(&ledger->sizes, owner, (void *)(held + bytes)))
        ledger->live += bytes;
    else
        ledger->dead += bytes; /* without an owner, or without memory to count them */
}

void dray__ledger_uncount(dray__ledger *ledger, uint32_t owner)
{
    if (!ledger)
        return;
    uintptr_t held = (uintptr_t)dray__idmap_remove(&ledger->sizes, owner);
    ledger->live -= held;
    ledger->dead += held;
}

/* ---- requests that clients may repeat -------------------------------------------------------- */

static uint64_t told_key(uint64_t identity, uint32_t ticket)
{
    uint64_t pair[2] = {identity, ticket};
    return dray__hash(pair, sizeof pair) | 1;
}

const dray__told *dray__ledger_told(const dray__ledger *ledger, uint64_t identity, uint32_t ticket)
{
    return ledger ? dray__idmap_get(&ledger->told, told_key(identity, ticket)) : NULL;
}

static int remember(dray__ledger *ledger, uint64_t key, const dray__told *told, dray_error *error)
{
    if (!told->ticket || dray__idmap_get(&ledger->told, key))
        return DRAY_OK;
    dray__told *copy = malloc(sizeof *copy);
    if (!copy || !dray__idmap_set(&ledger->told, key, copy)) {
        free(copy);
        return dray__nomem(error);
    }
    *copy = *told;
    uint64_t *left = &ledger->left[ledger->left_count++ % DRAY__LEFT];
    if (*left)
        free(dray__idmap_remove(&ledger->told, *left));
    *left = key;
    return DRAY_OK;
}

int dray__ledger_remember(dray__ledger *ledger, uint64_t identity, const dray__told *told,
                          dray_error *error)
{
    return identity ? remember(ledger, told_key(identity, told->ticket), told, error) : DRAY_OK;
}

int dray__ledger_recall(dray__ledger *ledger, const dray__counted *counted, uint32_t count,
                        dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < count && !rc; i++) {
        const dray__told told = {counted[i].ticket, counted[i].first_slot, counted[i].generation};
        rc = counted[i].key ? remember(ledger, counted[i].key, &told, error) : DRAY_OK;
    }
    return rc;
}

static void tell(dray__client *client, uint32_t ticket, uint32_t first_slot, uint32_t generation)
{
    client->told[client->told_count++ % DRAY__TOLD] = (dray__told){ticket, first_slot, generation};
}

void dray__ledger_left(dray__ledger *ledger, const dray__client *client)
{
    for (uint32_t i = 0; ledger && i < DRAY__TOLD; i++)
        dray__ledger_remember(ledger, client->identity, &client->told[i], NULL);
}

uint32_t dray__ledger_number(dray__table *table)
{
    uint32_t forced = table->ledger ? table->ledger->number : 0;
    uint32_t number = forced ? forced : table->generations + 1;
    if (number > table->generations)
        table->generations = number;
    return number;
}

/* ---- records --------------------------------------------------------------------------------- */

bool dray__ledger_keeps(const dray__ledger *ledger)
{
    return ledger && !ledger->replaying;
}

void dray__ledger_lose(dray__ledger *ledger)
{
    ledger->lost = true;
    ledger->failed =
        dray__fail(&ledger->why, DRAY_ENOMEM,
                   "queue %s: there was no memory to write a change down; its journal %s "
                   "is right up to that change",
                   ledger->table->name, ledger->path);
    dray__log(DRAY_LOG_ERROR, "%s", ledger->why.message);
}

static dray__journal_entry *entry_new(dray__ledger *ledger, uint16_t kind, uint32_t owner)
{
    if (!dray__ledger_keeps(ledger) || ledger->lost)
        return NULL;
    dray__journal_entry *entry = calloc(1, sizeof *entry);
    if (entry) {
        entry->kind = kind;
        entry->owner = owner;
    } else {
        dray__ledger_lose(ledger);
    }
    return entry;
}

/* Unpins the put when no entry keeps it pinned until it is written. */
static void forget(dray__ledger *ledger, dray__put *put)
{
    if (put && dray__ledger_keeps(ledger))
        dray__put_unpin(ledger->table, put, false);
}

static void add(dray__ledger *ledger, dray__journal_entry *entry)
{
    uint64_t bytes = 56 + entry->body.size;
    if (entry->body.failed) {
        dray__ledger_lose(ledger);
        forget(ledger, entry->user);
        dray__entry_free(entry);
        return;
    }
    for (uint32_t i = 0; i < entry->piece_count; i++)
        bytes += entry->pieces[i].bytes;
    dray__ledger_count(ledger, entry->owner, bytes);
    dray__journal_add(ledger->journal, entry);
}

void dray__ledger_write(dray__ledger *ledger, uint16_t kind, uint32_t owner, const void *body)
{
    dray__journal_entry *entry = entry_new(ledger, kind, owner);
    if (!entry)
        return;
    if (dray__record_kinds[kind].fields)
        dray__put_fields(&entry->body, dray__record_kinds[kind].fields, body);
    if (dray__record_kinds[kind].asked) {
        const dray__asker asker = {ledger->asker ? ledger->asker->identity : 0, ledger->ticket};
        dray__put_fields(&entry->body, &dray__asker_fields, &asker);
        ledger->written = true;
    }
    add(ledger, entry);
}

void dray__ledger_ask(dray__ledger *ledger, dray__client *client, uint32_t ticket)
{
    if (!ledger)
        return;
    ledger->asker = client;
    ledger->ticket = ticket;
    ledger->written = false;
}

void dray__ledger_asked(dray__ledger *ledger, bool counted)
{
    if (!ledger)
        return;
    if (counted && ledger->ticket) {
        tell(ledger->asker, ledger->ticket, 0, 0);
        if (!ledger->written)
            dray__ledger_write(ledger, DRAY__RECORD_DONE, 0, NULL);
    }
    ledger->asker = NULL;
    ledger->ticket = 0;
}

/* Adds the places of the bytes that follow the body. */
static void add_pieces(const dray__ledger *ledger, dray__journal_entry *entry,
                       const dray__content *content, uint32_t items)
{
    entry->pieces = calloc(2 * (size_t)content->column_count + 1, sizeof *entry->pieces);
    entry->body.failed |= !entry->pieces;
    for (uint32_t i = 0; i < content->column_count && entry->pieces; i++) {
        const dray__extent *e = &content->columns[i].extent;
        const dray__chunk *chunk = dray__idmap_get(&ledger->table->chunks, e->chunk);
        uint32_t keeper = chunk ? chunk->keeper : 0;
        if (content->columns[i].spec.ragged)
            entry->pieces[entry->piece_count++] =
                (dray__journal_piece){e->chunk, e->offsets, ((uint64_t)items + 1) * 8, keeper};
        if (e->bytes)
            entry->pieces[entry->piece_count++] =
                (dray__journal_piece){e->chunk, e->values, e->bytes, keeper};
    }
}

/* Writes the record of a put; body has its fields. */
static void write_put(dray__ledger *ledger, dray__journal_entry *entry, const void *body,
                      const dray__content *content, uint32_t items, dray__put *put)
{
    dray__put_fields(&entry->body, dray__record_kinds[entry->kind].fields, body);
    add_pieces(ledger, entry, content, items);
    entry->user = put;
    add(ledger, entry);
    if (put)
        put->record = dray__journal_added(ledger->journal);
}

/* Returns an entry for the record of a put, or NULL when none is written. */
static dray__journal_entry *put_entry(dray__ledger *ledger, uint16_t kind, uint32_t owner,
                                      dray__put *put)
{
    dray__journal_entry *entry = entry_new(ledger, kind, owner);
    if (put && ledger && ledger->replaying)
        put->record = ledger->record;
    if (!entry)
        forget(ledger, put);
    return entry;
}

void dray__ledger_insert(dray__ledger *ledger, dray__client *client, const dray__new_rows *rows,
                         const dray__partition *p, uint32_t first, dray__put *put)
{
    dray__journal_entry *entry = put_entry(ledger, DRAY__RECORD_INSERT, p->generation, put);
    if (!entry)
        return;
    tell(client, rows->ticket, first, p->generation);
    uint32_t group = rows->group_size ? rows->group_size : 1;
    uint32_t items = rows->per_group ? (rows->refill ? 1 : rows->rows / group) : rows->rows;
    dray__insert_record body = {.identity = client->identity, .first = first, .rows = *rows};
    write_put(ledger, entry, &body, &rows->content, items, put);
}

void dray__ledger_commit(dray__ledger *ledger, const dray__claim *claim, const dray__outputs *o,
                         dray__put *put)
{
    dray__journal_entry *entry = put_entry(ledger, DRAY__RECORD_COMMIT, claim->generation, put);
    if (!entry)
        return;
    tell(claim->client, (uint32_t)claim->id, 0, claim->generation);
    dray__record_row *rows = calloc(claim->count, sizeof *rows);
    entry->body.failed |= !rows;
    for (uint32_t i = 0; i < claim->count && rows; i++) {
        uint32_t slot = claim->slots[i];
        uint32_t generation = slot == DRAY__NONE ? 0 : claim->partition->row_generations[slot];
        rows[i] = (dray__record_row){slot, generation};
    }
    dray__commit_record body = {.identity = claim->client->identity,
                                .ticket = (uint32_t)claim->id,
                                .task = claim->task,
                                .number = ledger->table->commit_seq,
                                .rows = rows,
                                .row_count = rows ? claim->count : 0,
                                .outputs = *o};
    write_put(ledger, entry, &body, &o->content, claim->count, put);
    free(rows);
}

void dray__ledger_put(dray__ledger *ledger, dray__client *client, const dray__putting *m,
                      const dray__keyed *p, uint32_t number, const dray__row_at *at, dray__put *put)
{
    dray__journal_entry *entry = put_entry(ledger, DRAY__RECORD_PUT, number, put);
    if (!entry)
        return;
    tell(client, m->ticket, 0, number);
    const char **keys = calloc(m->rows, sizeof *keys);
    entry->body.failed |= !keys;
    for (uint32_t i = 0; i < m->rows && keys; i++)
        keys[i] = p->rows[at[i].slot].key;
    dray__keyed_record body = {
        .identity = client->identity, .generation = p->generation, .put = *m};
    body.put.named = (dray__named){keys, at, keys ? m->rows : 0, m->rows};
    const dray__content content = {.columns = m->columns, .column_count = m->column_count};
    write_put(ledger, entry, &body, &content, m->rows, put);
    free(keys);
    if (!put) /* the STATE record has its rows */
        dray__ledger_uncount(ledger, number);
}

void dray__ledger_loss(dray__ledger *ledger, const dray__partition *p, const dray__death *death,
                       uint64_t demand)
{
    dray__loss_record body = {death->slot,     death->generation,      death->task,
                              death->failures, (uint32_t)death->cause, death->reason,
                              demand};
    dray__ledger_write(ledger, DRAY__RECORD_LOSS, p->generation, &body);
}

void dray__ledger_clear(dray__ledger *ledger, const dray__partition *p)
{
    dray__ledger_write(ledger, DRAY__RECORD_CLEAR, p->generation, NULL);
    dray__ledger_uncount(ledger, p->generation);
}

/* ---- compaction ------------------------------------------------------------------------------ */

/* Lists the requests that clients may still repeat. Returns NULL without memory. */
static dray__counted *list_counted(const dray__ledger *ledger, uint32_t *count)
{
    uint32_t clients = 0;
    for (const dray__client *client = ledger->table->clients; client; client = client->next)
        clients++;
    dray__counted *list = calloc((size_t)DRAY__LEFT + clients * DRAY__TOLD, sizeof *list);
    *count = 0;
    for (uint32_t i = 0; list && i < DRAY__LEFT; i++) {
        uint64_t key = ledger->left[i];
        const dray__told *told = key ? dray__idmap_get(&ledger->told, key) : NULL;
        if (told)
            list[(*count)++] =
                (dray__counted){key, told->ticket, told->first_slot, told->generation};
    }
    for (const dray__client *client = ledger->table->clients; list && client; client = client->next)
        for (uint32_t i = 0; i < DRAY__TOLD; i++) {
            const dray__told *told = &client->told[i];
            if (client->identity && told->ticket)
                list[(*count)++] =
                    (dray__counted){told_key(client->identity, told->ticket), told->ticket,
                                    told->first_slot, told->generation};
        }
    return list;
}

static void put_state(dray__writer *w, const dray__table *table)
{
    dray__state_record state = {.generations = table->generations,
                                .epoch = table->epoch,
                                .commit_seq = table->commit_seq,
                                .resumed_seq = table->resumed_seq,
                                .ended = table->ended,
                                .admission = table->admission,
                                .columns = calloc(table->defined_count + 1u, sizeof *state.columns),
                                .cleared = calloc(DRAY__FORMER, sizeof *state.cleared),
                                .space = table->space};
    dray__arena arena = {0};
    state.kept = dray__keyed_state(table, &arena, &state.kept_count);
    state.counted = list_counted(table->ledger, &state.counted_count);
    bool room = state.columns && state.cleared && state.kept && state.counted;
    w->failed |= !room;
    for (; room && state.column_count < table->defined_count; state.column_count++) {
        const dray__col *column = &table->columns[table->defined[state.column_count]];
        state.columns[state.column_count] =
            (dray__known_column){.name = column->name, .spec = column->spec};
    }
    for (uint32_t i = 0; room && i < DRAY__FORMER; i++) {
        const dray__former_partition *former =
            &table->former[(table->former_at + i) % DRAY__FORMER];
        if (former->name)
            state.cleared[state.cleared_count++] = (dray__cleared){former->name, former->finished};
    }
    dray__put_fields(w, dray__record_kinds[DRAY__RECORD_STATE].fields, &state);
    free(state.columns);
    free(state.cleared);
    free(state.counted);
    dray__arena_free(&arena);
}

/* Lists the owners whose records are needed, ascending, because partitions are in order of
 * creation. */
static uint32_t *list_owners(dray__table *table, uint32_t *count)
{
    uint32_t puts = 0, at = 0, *numbers = dray__keyed_numbers(table, &puts);
    uint32_t *keep = calloc((size_t)table->partition_count + puts + 1, sizeof *keep);
    *count = 0;
    for (uint32_t i = 0; numbers && keep && i < table->partition_count; i++) {
        while (at < puts && numbers[at] < table->partitions[i]->generation)
            keep[(*count)++] = numbers[at++];
        keep[(*count)++] = table->partitions[i]->generation;
    }
    while (numbers && keep && at < puts)
        keep[(*count)++] = numbers[at++];
    if (!numbers) {
        free(keep);
        keep = NULL;
    }
    free(numbers);
    return keep;
}

static dray__journal_entry *state_entry(dray__ledger *ledger, dray_error *error)
{
    dray__table *table = ledger->table;
    dray__journal_entry *entry = calloc(1, sizeof *entry);
    uint32_t count = 0, *keep = list_owners(table, &count);
    if (!entry || !keep) {
        free(entry);
        free(keep);
        dray__nomem(error);
        return NULL;
    }
    entry->kind = DRAY__RECORD_STATE;
    entry->compact = true;
    entry->keep = keep;
    entry->keep_count = count;
    put_state(&entry->body, table);
    return entry;
}

static void compact(dray__ledger *ledger)
{
    if (ledger->compacting || ledger->failed || ledger->dead < COMPACT_BYTES ||
        ledger->dead < ledger->live)
        return;
    dray__journal_entry *entry = state_entry(ledger, NULL);
    if (!entry)
        return;
    ledger->compacting = true;
    ledger->dead = 0;
    dray__journal_add(ledger->journal, entry);
}

int dray__ledger_copy(dray__ledger *ledger, dray__copy *copy, dray_error *error)
{
    int rc = ledger->copying
                 ? dray__fail(error, DRAY_EBUSY, "queue %s: a checkpoint is being written already",
                              ledger->table->name)
                 : DRAY_OK;
    dray__journal_entry *entry = rc ? NULL : state_entry(ledger, error);
    if (!entry) {
        dray__copy_free(copy);
        return rc ? rc : DRAY_ENOMEM;
    }
    entry->copy = copy;
    ledger->copying = true;
    dray__journal_add(ledger->journal, entry);
    return DRAY_OK;
}

/* ---- the journal ----------------------------------------------------------------------------- */

int dray__ledger_fd(const dray__ledger *ledger)
{
    return dray__journal_fd(ledger->journal);
}

static void mark_lost(const dray__put *put)
{
    for (uint32_t i = 0; i < put->column_count; i++)
        if (put->columns[i].chunk)
            put->columns[i].chunk->lost = true;
}

/* Handles entries that the journal gave back: unpins their puts, whose bytes are written. */
static void finish(dray__ledger *ledger, dray__journal_entry *entry)
{
    for (dray__journal_entry *next; entry; entry = next) {
        next = entry->next;
        if (entry->each) {
            dray__restore_done(ledger, entry);
            entry->user = NULL;
        }
        if (entry->missing && ledger->gone)
            ledger->gone(ledger->user, entry->seq);
        if (entry->missing && entry->user)
            mark_lost(entry->user);
        if (entry->user)
            dray__put_unpin(ledger->table, entry->user, false);
        if (entry->compact && !entry->copy)
            ledger->compacting = false;
        if (entry->copy) {
            ledger->copied = entry->error;
            ledger->copying = false;
        }
        dray__entry_free(entry);
    }
}

void dray__ledger_poll(dray__ledger *ledger)
{
    dray_error why;
    int code;
    finish(ledger, dray__journal_done(ledger->journal, &ledger->safe, &code, &why));
    if (!ledger->lost) {
        ledger->failed = code;
        ledger->why = why;
    }
    compact(ledger);
}

int dray__ledger_check(const dray__ledger *ledger, dray_error *error)
{
    if (!ledger || !ledger->failed)
        return DRAY_OK;
    if (error)
        *error = ledger->why;
    return ledger->failed;
}

uint64_t dray__ledger_added(const dray__ledger *ledger)
{
    return ledger ? dray__journal_added(ledger->journal) : 0;
}

uint64_t dray__ledger_pending(const dray__ledger *ledger)
{
    if (!ledger || !ledger->sync || dray__journal_added(ledger->journal) <= ledger->safe)
        return 0;
    return dray__journal_added(ledger->journal);
}

/* ---- beginning and end ----------------------------------------------------------------------- */

static int fetch(void *user, const dray__journal_piece *piece, void *out, dray_error *error)
{
    dray__ledger *ledger = user;
    dray__range range = {.object = piece->source,
                         .offset = piece->offset,
                         .bytes = piece->bytes,
                         .at = out,
                         .keeper = piece->keeper};
    int rc = dray__placer_get(&ledger->bytes, &range, error);
    /* A producer that keeps less than it said has lost these bytes, and does not stop the journal.
     */
    return rc == DRAY_EFORMAT ? (error->code = DRAY_EGONE) : rc;
}

static void ledger_free(dray__ledger *ledger)
{
    dray__placer_free(&ledger->bytes);
    dray__placer_free(&ledger->own);
    for (size_t i = 0; i < ledger->told.capacity; i++)
        if (ledger->told.entries[i].key)
            free(ledger->told.entries[i].value);
    dray__idmap_free(&ledger->told);
    dray__idmap_free(&ledger->sizes);
    free(ledger->path);
    free(ledger);
}

void dray__ledger_reach(dray__ledger *ledger, dray__keepers *keepers)
{
    dray__placer_reach(&ledger->bytes, keepers);
}

/* Drops a freed chunk at once, because the controller's list of drops does not exist while a
 * journal is read. */
static void drop_now(void *user, uint32_t keeper, uint64_t chunk, uint64_t key)
{
    const dray__ledger *ledger = user;
    dray__backend *store = ledger->own.holder.store;
    dray__object object = {.id = chunk, .size = key};
    (void)keeper;
    if (store->kind->drop(store, &object, 1, dray__deadline(DROP_PATIENCE), NULL))
        dray__log(DRAY_LOG_WARN, "queue %s: object %016llx is left in its store",
                  ledger->table->name, (unsigned long long)chunk);
}

/* Opens the holders of bytes. In a store, the bytes are in a new space. */
static int open_bytes(dray__ledger *ledger, const dray__ledger_options *o, dray_error *error)
{
    dray__table *table = ledger->table;
    const dray__settings *settings = &table->settings;
    if (table->objects && !table->space &&
        getrandom(&table->space, sizeof table->space, 0) != (ssize_t)sizeof table->space)
        return dray__fail(error, DRAY_ESYS, "getrandom");
    int rc =
        dray__placer_open(&ledger->bytes, settings, table->space, o->keeper_path, o->era, error);
    if (!rc)
        rc = dray__placer_open(&ledger->own, settings, table->space, o->keeper_path, o->era, error);
    if (!rc && table->objects) {
        table->drop = drop_now;
        table->user = ledger;
    }
    return rc;
}

static void add_space(dray__ledger *ledger)
{
    if (ledger->table->objects)
        dray__ledger_write(ledger, DRAY__RECORD_SPACE, 0, &ledger->table->space);
}

static int ledger_open(dray__table *table, const dray__ledger_options *options, dray_error *error)
{
    dray__ledger *ledger = calloc(1, sizeof *ledger);
    if (!ledger)
        return dray__nomem(error);
    ledger->table = table;
    ledger->sync = options->sync;
    ledger->path = strdup(options->path);
    int rc = ledger->path ? open_bytes(ledger, options, error) : dray__nomem(error);
    if (rc)
        ledger_free(ledger);
    else
        table->ledger = ledger;
    return rc;
}

static int start(dray__ledger *ledger, const dray__ledger_options *options, uint64_t end,
                 uint64_t last, dray_error *error)
{
    dray__journal_options o = {.path = ledger->path,
                               .sync = options->sync,
                               .fetch = fetch,
                               .user = ledger,
                               .files = options->files};
    ledger->safe = last;
    return dray__journal_start(&o, end, last, &ledger->journal, error);
}

int dray__ledger_new(dray__table *table, const dray__ledger_options *options, const void *opening,
                     size_t size, dray_error *error)
{
    int rc = ledger_open(table, options, error);
    if (!rc)
        rc = start(table->ledger, options, 0, 0, error);
    dray__journal_entry *entry = rc ? NULL : entry_new(table->ledger, DRAY__RECORD_OPEN, 0);
    if (!entry)
        return rc ? rc : dray__nomem(error);
    dray__put_bytes(&entry->body, opening, size);
    add(table->ledger, entry);
    add_space(table->ledger);
    return DRAY_OK;
}

typedef struct recovery {
    const char *path;
    const dray__ledger_options *options;
    dray__ledger_make make;
    void *user;
    dray__table *table;
    uint64_t records;
    uint16_t last; /* the kind of the last one */
} recovery;

static int where(const recovery *r, const dray__journal_record *record, int rc, dray_error *error)
{
    return rc ? dray__fail_prefix(error, rc, "journal %s, record %llu at byte %llu: ", r->path,
                                  (unsigned long long)record->seq, (unsigned long long)record->at)
              : rc;
}

static int take_record(void *user, const dray__journal_record *record, dray_error *error)
{
    recovery *r = user;
    r->records++;
    r->last = record->kind;
    if (record->kind == DRAY__RECORD_OPEN && !r->table) {
        dray__reader opening = dray__reader_of(record->body, record->size);
        int rc = r->make(r->user, &opening, &r->table, error);
        if (!rc)
            rc = ledger_open(r->table, r->options, error);
        if (!rc)
            rc = dray__replay_begin(r->table->ledger, error);
        return where(r, record, rc, error);
    }
    if (!r->table)
        return dray__fail(error, DRAY_EFORMAT,
                          "journal %s, at byte %llu: a queue's opening expected, found a record of "
                          "kind %u",
                          r->path, (unsigned long long)record->at, record->kind);
    return where(r, record, dray__replay_record(r->table->ledger, record, error), error);
}

/* Starts the journal at the end of the records that were read. */
static int go_on(dray__ledger *ledger, const dray__ledger_options *options, uint64_t end,
                 uint64_t last, dray_error *error)
{
    int rc = start(ledger, options, end, last, error);
    ledger->table->restarts++;
    if (!rc) {
        dray__ledger_write(ledger, DRAY__RECORD_START, 0, NULL);
        add_space(ledger);
    }
    return rc;
}

int dray__ledger_recover(const dray__ledger_options *options, dray__ledger_make make, void *user,
                         dray__table **out, dray_error *error)
{
    recovery r = {.path = options->path, .options = options, .make = make, .user = user};
    uint64_t end = 0, last = 0;
    int rc = options->from ? dray__journal_read_open(*options->from, r.path, take_record, &r, &end,
                                                     &last, error)
                           : dray__journal_read(r.path, take_record, &r, &end, &last, error);
    if (!rc)
        dray__log(DRAY_LOG_INFO, "queue: journal %s: %llu records read", r.path,
                  (unsigned long long)r.records);
    if (r.table && r.table->ledger)
        dray__replay_end(r.table->ledger);
    if (!rc && r.table && options->checkpoint && r.last != DRAY__RECORD_STATE)
        rc = dray__fail(error, DRAY_EFORMAT,
                        "a checkpoint that ends with its record STATE expected, found %s as the "
                        "last whole one: the file is cut off",
                        dray__record_kinds[r.last].name);
    if (!rc && r.table && options->ready)
        rc = options->ready(user, r.table, error);
    if (!rc && r.table && options->kept)
        rc = go_on(r.table->ledger, options, end, last, error);
    if (!rc && r.table) { /* CLEAR records may be missing after a COVER */
        dray__clear_covered(r.table);
        dray__table_lose_bytes(r.table);
    }
    if (r.table && (rc || !options->kept))
        dray__ledger_end_of(r.table);
    if (rc) {
        dray__table_free(r.table);
        r.table = NULL;
    }
    *out = r.table;
    return rc;
}

void dray__ledger_end_of(dray__table *table)
{
    dray__ledger *ledger = table->ledger;
    if (!ledger)
        return;
    dray__journal_entry *left = dray__journal_stop(ledger->journal);
    ledger->journal = NULL; /* no more records are added */
    finish(ledger, left);
    if (table->drop == drop_now)
        table->drop = NULL;
    table->ledger = NULL;
    ledger_free(ledger);
}
