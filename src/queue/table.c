/* The table and its partitions: making, sealing, clearing. */
#include "queue/table.h"

#include "base/error.h"
#include "base/words.h"
#include "queue/ledger.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int dray__grow(void *items, size_t old_capacity, size_t capacity, size_t size, dray_error *error)
{
    if (capacity <= old_capacity)
        return DRAY_OK;
    void *old;
    size_t bytes;
    memcpy(&old, items, sizeof old);
    if (__builtin_mul_overflow(capacity, size, &bytes))
        return dray__nomem(error);
    uint8_t *grown = realloc(old, bytes);
    if (!grown)
        return dray__nomem(error);
    memset(grown + old_capacity * size, 0, (capacity - old_capacity) * size);
    memcpy(items, &grown, sizeof grown);
    // cppcheck-suppress memleak
    return DRAY_OK;
}

int dray__grow_full(void *items, uint32_t used, uint32_t *capacity, size_t size, dray_error *error)
{
    if (used < *capacity)
        return DRAY_OK;
    uint32_t more = *capacity ? *capacity * 2 : 16;
    int rc = dray__grow(items, *capacity, more, size, error);
    if (!rc)
        *capacity = more;
    return rc;
}

/* ---- the table ------------------------------------------------------------------------------- */

/* Gives `name` the number `index`; *copy is its owner's. */
static int intern(dray__map *map, const char *name, uint32_t index, char **copy, dray_error *error)
{
    *copy = strdup(name);
    if (*copy && dray__map_set(map, name, index))
        return DRAY_OK;
    free(*copy);
    return dray__nomem(error);
}

int dray__table_column(dray__table *table, const char *name, uint32_t *out, dray_error *error)
{
    if (dray__map_get(&table->column_names, name, out))
        return DRAY_OK;
    if (table->column_count == DRAY__COLUMNS_MAX)
        return dray__fail(error, DRAY_EFULL, "queue %s: column %s would be more than %u",
                          table->name, name, DRAY__COLUMNS_MAX);
    if (table->column_count == table->column_capacity) {
        uint32_t capacity = table->column_capacity ? table->column_capacity * 2 : 16;
        int rc = dray__grow(&table->columns, table->column_capacity, capacity,
                            sizeof *table->columns, error);
        if (!rc)
            rc = dray__grow(&table->defined, table->column_capacity, capacity,
                            sizeof *table->defined, error);
        if (rc)
            return rc;
        table->column_capacity = capacity;
    }
    char *copy;
    int rc = intern(&table->column_names, name, table->column_count, &copy, error);
    if (rc)
        return rc;
    table->columns[table->column_count] = (dray__col){.name = copy, .writer = -1};
    *out = table->column_count++;
    return DRAY_OK;
}

int dray__table_define(dray__table *table, const dray__new_column *column, dray_error *error)
{
    uint32_t c;
    int rc = dray__table_column(table, column->name, &c, error);
    dray__col *col = rc ? NULL : &table->columns[c];
    if (rc || col->defined)
        return rc ? rc : dray__spec_same(&col->spec, &column->spec, column->name, error);
    col->defined = true;
    col->spec = column->spec;
    table->defined[table->defined_count++] = c;
    return DRAY_OK;
}

int dray__table_key(dray__table *table, const char *key, uint32_t *out, dray_error *error)
{
    if (dray__map_get(&table->key_names, key, out))
        return DRAY_OK;
    if (table->key_count == DRAY__TAG_KEYS_MAX)
        return dray__fail(error, DRAY_EFULL, "queue %s: tag %s would be more than %u", table->name,
                          key, DRAY__TAG_KEYS_MAX);
    char *copy;
    int rc = dray__grow_full(&table->keys, table->key_count, &table->key_capacity,
                             sizeof *table->keys, error);
    if (!rc)
        rc = intern(&table->key_names, key, table->key_count, &copy, error);
    if (rc)
        return rc;
    table->keys[table->key_count] = copy;
    *out = table->key_count++;
    return DRAY_OK;
}

static int add_task_columns(dray__table *table, const char *const *names, uint32_t count,
                            uint32_t **out, dray_error *error)
{
    *out = calloc(count ? count : 1, sizeof **out);
    if (!*out)
        return dray__nomem(error);
    for (uint32_t i = 0; i < count; i++) {
        int rc = dray__name_check(names[i], "column", error);
        if (!rc)
            rc = dray__table_column(table, names[i], &(*out)[i], error);
        if (rc)
            return rc;
        for (uint32_t j = 0; j < i; j++)
            if ((*out)[j] == (*out)[i])
                return dray__fail(error, DRAY_EINVALID, "column %s is named twice", names[i]);
    }
    return DRAY_OK;
}

static int add_task(dray__table *table, const dray__task_names *names, dray_error *error)
{
    int rc = dray__name_check(names->name, "task", error);
    if (rc)
        return rc;
    for (uint32_t t = 0; t < table->task_count; t++)
        if (strcmp(table->tasks[t].name, names->name) == 0)
            return dray__fail(error, DRAY_EINVALID, "task %s is named twice", names->name);
    uint32_t t = table->task_count;
    dray__qtask *task = &table->tasks[t];
    task->name = strdup(names->name);
    if (!task->name)
        return dray__nomem(error);
    table->task_count++;
    rc = add_task_columns(table, names->needs, names->needs_count, &task->needs, error);
    if (!rc)
        rc = add_task_columns(table, names->writes, names->writes_count, &task->writes, error);
    if (rc)
        return dray__fail_prefix(error, rc, "task %s: ", names->name);
    task->needs_count = names->needs_count;
    task->writes_count = names->writes_count;
    if (!table->columns) /* no task has named one yet */
        return DRAY_OK;
    for (uint32_t i = 0; i < task->needs_count; i++)
        table->columns[task->needs[i]].readers |= UINT64_C(1) << t;
    for (uint32_t i = 0; i < task->writes_count; i++) {
        dray__col *column = &table->columns[task->writes[i]];
        if (column->writer >= 0)
            return dray__fail(error, DRAY_EINVALID, "column %s is written by tasks %s and %s",
                              column->name, table->tasks[column->writer].name, names->name);
        if (column->readers >> t & 1)
            return dray__fail(error, DRAY_EINVALID, "task %s both needs and writes column %s",
                              names->name, column->name);
        column->writer = (int)t;
    }
    return DRAY_OK;
}

int dray__table_new(const char *name, const dray__task_names *tasks, uint32_t task_count,
                    const dray__settings *settings, dray__table **out, dray_error *error)
{
    int rc = dray__name_check(name, "queue", error);
    if (rc)
        return rc;
    if (!task_count || task_count > DRAY__TASKS_MAX)
        return dray__fail(error, DRAY_EINVALID, "queue %s: 1 to %u tasks, found %u", name,
                          DRAY__TASKS_MAX, task_count);
    if (settings->capacity_rows > INT64_MAX || settings->capacity_bytes > INT64_MAX)
        return dray__fail(error, DRAY_EINVALID, "queue %s: impossible capacity", name);
    rc = dray__settings_check(name, settings, error);
    if (rc)
        return rc;
    if (settings->on_loss < 0 || settings->on_loss > DRAY_ON_LOSS_DROP_GROUP)
        return dray__fail(error, DRAY_EINVALID, "queue %s: on_loss %d is none", name,
                          settings->on_loss);
    dray__table *table = calloc(1, sizeof *table);
    if (!table)
        return dray__nomem(error);
    table->name = strdup(name);
    table->tasks = calloc(task_count, sizeof *table->tasks);
    table->graves = calloc(DRAY__GRAVES, sizeof *table->graves);
    dray__settings *s = &table->settings;
    *s = *settings;
    s->backend_address = strdup(settings->backend_address ? settings->backend_address : "");
    s->backend = s->backend ? s->backend : DRAY_BACKEND_BUILTIN;
    table->objects = s->backend != DRAY_BACKEND_BUILTIN;
    s->capacity_rows = s->capacity_rows ? s->capacity_rows : DRAY__CAPACITY_ROWS;
    s->capacity_bytes = s->capacity_bytes ? s->capacity_bytes : DRAY__CAPACITY_BYTES;
    s->max_attempts = s->max_attempts ? s->max_attempts : 3;
    s->on_loss = s->on_loss ? s->on_loss : DRAY_ON_LOSS_REFILL;
    table->demands_tail = &table->demands;
    table->admission.task = DRAY__NONE;
    rc = table->name && table->tasks && table->graves && s->backend_address ? DRAY_OK
                                                                            : dray__nomem(error);
    if (!rc)
        rc = dray__table_key(table, DRAY_TAG_VERSION, &table->version_key, error);
    if (!rc)
        rc = dray__table_key(table, DRAY_TAG_PRIORITY, &table->priority_key, error);
    for (uint32_t t = 0; !rc && t < task_count; t++)
        rc = add_task(table, &tasks[t], error);
    for (uint32_t t = 0; !rc && t < task_count; t++)
        if ((settings->provisional >> t & 1) && tasks[t].writes_count)
            rc = dray__fail(error, DRAY_EINVALID,
                            "task %s is provisional, and writes columns: they could be read before "
                            "they are undone",
                            tasks[t].name);
    if (rc) {
        dray__table_free(table);
        return dray__fail_prefix(error, rc, "queue %s: ", name);
    }
    *out = table;
    return DRAY_OK;
}

static bool same_names(const dray__table *table, const uint32_t *columns, uint32_t count,
                       const char *const *names, uint32_t name_count)
{
    if (count != name_count)
        return false;
    for (uint32_t i = 0; i < count; i++) {
        bool found = false;
        for (uint32_t j = 0; j < count && !found; j++)
            found = strcmp(table->columns[columns[i]].name, names[j]) == 0;
        if (!found)
            return false;
    }
    return true;
}

int dray__table_same(const dray__table *table, const dray__task_names *tasks, uint32_t task_count,
                     const dray__settings *settings, dray_error *error)
{
    uint64_t provisional = 0; /* in the table's order */
    for (uint32_t i = 0; i < task_count; i++) {
        uint32_t t = 0;
        if (!dray__table_task(table, tasks[i].name, &t, error))
            provisional |= (settings->provisional >> i & 1) << t;
        else
            return dray__fail_prefix(error, DRAY_EGONE,
                                     "the queue was opened without it, its samples may be freed: ");
    }
    if (task_count != table->task_count)
        return dray__fail(error, DRAY_EEXIST, "queue %s is open with %u tasks, found %u",
                          table->name, table->task_count, task_count);
    for (uint32_t i = 0; i < task_count; i++) {
        uint32_t t;
        int rc = dray__table_task(table, tasks[i].name, &t, error);
        if (rc)
            return dray__fail_prefix(error, DRAY_EEXIST, "the queue is open with other tasks: ");
        const dray__qtask *task = &table->tasks[t];
        if (!same_names(table, task->needs, task->needs_count, tasks[i].needs,
                        tasks[i].needs_count))
            return dray__fail(error, DRAY_EEXIST, "queue %s is open with other needs of task %s",
                              table->name, task->name);
        if (!same_names(table, task->writes, task->writes_count, tasks[i].writes,
                        tasks[i].writes_count))
            return dray__fail(error, DRAY_EEXIST, "queue %s is open with other writes of task %s",
                              table->name, task->name);
    }
    const dray__settings *own = &table->settings;
    const struct limit {
        const char *name;
        uint64_t own, found;
    } limits[] = {
        {"capacity_rows", own->capacity_rows, settings->capacity_rows},
        {"capacity_bytes", own->capacity_bytes, settings->capacity_bytes},
        {"max_attempts", own->max_attempts, settings->max_attempts},
        {"on_loss", (uint64_t)own->on_loss, (uint64_t)settings->on_loss},
        {"provisional tasks", own->provisional, provisional},
        {"batch_rows", own->batch_rows, settings->batch_rows},
        {"open_batches", own->open_batches, settings->open_batches},
        {"checkpoint_batches", own->checkpoint_batches, settings->checkpoint_batches},
        {"row_bytes", own->row_bytes, settings->row_bytes},
        {"durability", (uint64_t)own->durability, (uint64_t)settings->durability},
        {"backend", (uint64_t)own->backend, (uint64_t)settings->backend},
    };
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++)
        if (limits[i].found && limits[i].found != limits[i].own)
            return dray__fail(error, DRAY_EEXIST, "queue %s is open with %s %llu, found %llu",
                              table->name, limits[i].name, (unsigned long long)limits[i].own,
                              (unsigned long long)limits[i].found);
    if (settings->backend && settings->backend_address &&
        strcmp(settings->backend_address, own->backend_address) != 0)
        return dray__fail(error, DRAY_EEXIST, "queue %s is open with the backend at %s, found %s",
                          table->name, own->backend_address, settings->backend_address);
    return DRAY_OK;
}

int dray__table_task(const dray__table *table, const char *name, uint32_t *task, dray_error *error)
{
    const char *names[DRAY__TASKS_MAX];
    for (uint32_t t = 0; t < table->task_count; t++) {
        if (strcmp(table->tasks[t].name, name) == 0) {
            *task = t;
            return DRAY_OK;
        }
        names[t] = table->tasks[t].name;
    }
    char hint[300];
    return dray__fail(error, DRAY_ENOENT, "queue %s has no task %s%s", table->name, name,
                      dray__word_hint(name, names, table->task_count, hint, sizeof hint));
}

/* ---- partitions ------------------------------------------------------------------------------ */

static void partition_free(const dray__table *table, dray__partition *p)
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
        partition_free(table, p);
        return NULL;
    }
    for (uint32_t t = 0; t < table->task_count; t++) {
        dray__track *track = &p->tracks[t];
        track->floor = UINT64_MAX;
        track->head = track->tail = track->group_head = track->group_tail = DRAY__NONE;
    }
    return p;
}

void dray__table_free(dray__table *table)
{
    if (!table)
        return;
    while (table->clients)
        dray__client_end(table, table->clients, false, "");
    dray__demands_clear(table, NULL);
    dray__rounds_clear(table, NULL);
    for (uint32_t i = 0; i < table->partition_count; i++) {
        dray__puts_clear(table, table->partitions[i]);
        partition_free(table, table->partitions[i]);
    }
    for (uint32_t t = 0; table->tasks && t < table->task_count; t++) {
        free(table->tasks[t].name);
        free(table->tasks[t].needs);
        free(table->tasks[t].writes);
    }
    for (uint32_t c = 0; c < table->column_count; c++)
        free(table->columns[c].name);
    for (uint32_t k = 0; k < table->key_count; k++)
        free(table->keys[k]);
    for (uint32_t g = 0; table->graves && g < DRAY__GRAVES; g++)
        free(table->graves[g].name);
    free((void *)(uintptr_t)table->settings.backend_address);
    dray__map_free(&table->column_names);
    dray__map_free(&table->key_names);
    dray__idmap_free(&table->claim_ids);
    dray__idmap_free(&table->chunks);
    free(table->tasks);
    free(table->columns);
    free(table->defined);
    free(table->keys);
    free(table->partitions);
    free(table->graves);
    free(table->name);
    free(table);
}

dray__partition *dray__table_partition(const dray__table *table, const char *name)
{
    uint64_t hash = dray__hash(name, strlen(name));
    for (uint32_t i = 0; i < table->partition_count; i++)
        if (table->partitions[i]->hash == hash && strcmp(table->partitions[i]->name, name) == 0)
            return table->partitions[i];
    return NULL;
}

static dray__grave *find_grave(const dray__table *table, const char *name)
{
    uint64_t hash = dray__hash(name, strlen(name));
    for (uint32_t g = 0; g < DRAY__GRAVES; g++)
        if (table->graves[g].name && table->graves[g].hash == hash &&
            strcmp(table->graves[g].name, name) == 0)
            return &table->graves[g];
    return NULL;
}

/* Room for `rows` rows in every array of the partition. Arrays that grew before a failure keep
 * their size; row_capacity says what all of them have. */
static int grow_rows(const dray__table *table, dray__partition *p, uint32_t rows, dray_error *error)
{
    if (rows <= p->row_capacity)
        return DRAY_OK;
    uint32_t capacity = p->row_capacity ? p->row_capacity : 64;
    while (capacity < rows)
        capacity *= 2;
    uint32_t old = p->row_capacity;
    size_t old_words = dray__bit_words(old), words = dray__bit_words(capacity);
    int rc = dray__grow(&p->dead, old_words, words, 8, error);
    if (!rc)
        rc = dray__grow(&p->vacant, old_words, words, 8, error);
    if (!rc)
        rc = dray__grow(&p->group_of, old, capacity, sizeof *p->group_of, error);
    if (!rc)
        rc = dray__grow(&p->row_generations, old, capacity, sizeof *p->row_generations, error);
    if (!rc && p->oldest)
        rc = dray__grow(&p->oldest, old, capacity, sizeof *p->oldest, error);
    if (!rc && p->newest)
        rc = dray__grow(&p->newest, old, capacity, sizeof *p->newest, error);
    for (uint32_t t = 0; !rc && t < table->task_count; t++) {
        dray__track *track = &p->tracks[t];
        rc = dray__grow(&track->taken, old_words, words, 8, error);
        if (!rc)
            rc = dray__grow(&track->done, old_words, words, 8, error);
        if (!rc)
            rc = dray__grow(&track->ready, old_words, words, 8, error);
        if (!rc)
            rc = dray__grow(&track->rows, old, capacity, sizeof *track->rows, error);
    }
    for (uint32_t c = 0; !rc && c < p->column_capacity; c++)
        if (p->columns[c])
            rc = dray__grow(&p->columns[c], old_words, words, 8, error);
    for (uint32_t w = 0; !rc && w <= table->task_count; w++) {
        if (!p->places[w])
            continue;
        rc = dray__grow(&p->places[w], old, capacity, sizeof **p->places, error);
        if (!rc)
            memset(p->places[w] + old, 0xFF, (capacity - old) * sizeof **p->places);
    }
    for (uint32_t t = 0; !rc && t < table->task_count; t++)
        if (p->commit_seq[t])
            rc = dray__grow(&p->commit_seq[t], old, capacity, sizeof **p->commit_seq, error);
    for (uint32_t t = 0; !rc && t < table->task_count; t++) {
        if (!p->earlier[t])
            continue;
        rc = dray__grow(&p->earlier[t], old, capacity, sizeof **p->earlier, error);
        if (!rc)
            memset(p->earlier[t] + old, 0xFF, (capacity - old) * sizeof **p->earlier);
    }
    if (!rc)
        p->row_capacity = capacity;
    return rc;
}

static int grow_groups(const dray__table *table, dray__partition *p, uint32_t groups,
                       dray_error *error)
{
    if (groups <= p->group_capacity)
        return DRAY_OK;
    uint32_t capacity = p->group_capacity ? p->group_capacity : 64;
    while (capacity < groups)
        capacity *= 2;
    uint32_t old = p->group_capacity;
    int rc = dray__grow(&p->groups, old, capacity, sizeof *p->groups, error);
    for (uint32_t t = 0; !rc && t < table->task_count; t++) {
        dray__track *track = &p->tracks[t];
        rc = dray__grow(&track->whole, dray__bit_words(old), dray__bit_words(capacity), 8, error);
        if (!rc)
            rc = dray__grow(&track->groups, old, capacity, sizeof *track->groups, error);
    }
    if (!rc)
        p->group_capacity = capacity;
    return rc;
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

static int check_place(const dray__table *table, const dray__partition *p,
                       const dray__new_rows *rows, uint32_t group, dray_error *error)
{
    uint32_t held = p ? p->rows : 0;
    if (rows->at_slot && rows->at_slot - 1 < held)
        return dray__fail(error, DRAY_EEXIST,
                          "insert into %s at slot %llu: it holds slots 0 to %u already",
                          rows->partition, (unsigned long long)rows->at_slot - 1, held - 1);
    if (!p && rows->at_slot && find_grave(table, rows->partition))
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
    if (!p && table->ended)
        return dray__fail(error, DRAY_EEND, "insert into %s: queue %s has ended", rows->partition,
                          table->name);
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
    uint64_t used = table->charged + table->hidden - (p ? dray__partition_charge(p) : 0);
    if (bytes > table->settings.capacity_bytes)
        return dray__fail(error, DRAY_EFULL, "insert into %s: %llu bytes can never fit into %llu",
                          rows->partition, (unsigned long long)bytes,
                          (unsigned long long)table->settings.capacity_bytes);
    if (table->rows + rows->rows > table->settings.capacity_rows)
        return dray__fail(error, DRAY_EAGAIN, "insert into %s: %llu rows + %u > %llu",
                          rows->partition, (unsigned long long)table->rows, rows->rows,
                          (unsigned long long)table->settings.capacity_rows);
    if (table->admission.task == DRAY__NONE && rows->rows > dray__admission_room(table))
        return dray__fail(error, DRAY_EAGAIN,
                          "insert into %s: %u rows, but rollout is %lld rows from its bound of "
                          "staleness %u at version %llu",
                          rows->partition, rows->rows, (long long)dray__admission_room(table),
                          table->admission.staleness, (unsigned long long)table->admission.version);
    if (charge > table->settings.capacity_bytes || used > table->settings.capacity_bytes - charge)
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
    dray__grave *grave = find_grave(table, p->name);
    if (grave) {
        free(grave->name);
        *grave = (dray__grave){0};
    }
    return DRAY_OK;
}

static void set_groups(dray__partition *p, uint32_t first, uint32_t rows)
{
    for (uint32_t i = 0; i < rows; i++) {
        if (i % p->group_size == 0)
            p->groups[p->group_count++] = (dray__group_range){first + i, p->group_size};
        p->group_of[first + i] = p->group_count - 1;
        p->row_generations[first + i] = p->generation;
    }
}

static void add_rows(dray__table *table, dray__partition *p, const dray__new_rows *rows,
                     uint32_t group, dray__put *put)
{
    uint32_t first = p->rows;
    p->rows += rows->rows;
    table->rows += rows->rows;
    set_groups(p, first, rows->rows);
    if (put)
        dray__put_apply(table, p, -1, put, NULL, first, rows->rows, rows->per_group ? group : 1,
                        NULL);
    for (uint32_t w = first / 64; w <= (p->rows - 1) / 64; w++)
        dray__refresh_all_tasks(table, p, w, false);
}

int dray__table_insert(dray__table *table, dray__client *client, const dray__new_rows *rows,
                       uint32_t *first_slot, uint32_t *generation, dray_error *error)
{
    const dray__told *told = dray__ledger_told(table->ledger, client->identity, rows->ticket);
    if (told) { /* a controller that is gone has done it */
        *first_slot = told->first_slot;
        *generation = told->generation;
        return DRAY_OK;
    }
    if (rows->refill)
        return dray__table_refill(table, client, rows, first_slot, generation, error);
    uint32_t group = rows->group_size ? rows->group_size : 1;
    uint32_t items = rows->per_group ? rows->rows / group : rows->rows;
    uint64_t reserve = 0, bytes = 0;
    int rc = dray__name_check(rows->partition, "partition", error);
    if (!rc)
        rc = check_rows(table, rows, group, &reserve, error);
    if (rc)
        return rc;
    dray__partition *p = dray__table_partition(table, rows->partition);
    rc = check_place(table, p, rows, group, error);
    if (!rc)
        rc = dray__put_check(table, client, -1, rows->columns, rows->column_count, rows->tags,
                             rows->tag_count, items, &bytes, error);
    if (!rc && !(table->ledger && table->ledger->replaying)) /* there was room */
        rc = check_capacity(table, p, rows, reserve, bytes, error);
    if (rc)
        return rc;
    dray__partition *fresh = NULL;
    if (!p) {
        p = fresh = partition_new(table, rows->partition, group);
        if (!p)
            return dray__nomem(error);
    }
    dray__put *put = NULL;
    rc = grow_rows(table, p, p->rows + rows->rows, error);
    if (!rc)
        rc = grow_groups(table, p, p->group_count + rows->rows / group, error);
    if (!rc)
        rc = dray__put_prepare(table, p, -1, rows->columns, rows->column_count, rows->tags,
                               rows->tag_count, true, items, &put, error);
    if (!rc && fresh)
        rc = link_partition(table, fresh, error);
    if (rc) {
        dray__put_discard(table, put);
        partition_free(table, fresh);
        return rc;
    }
    table->charged -= dray__partition_charge(p);
    p->reserved += reserve;
    table->charged += dray__partition_charge(p);
    *first_slot = p->rows;
    *generation = p->generation;
    dray__admission_note(table, DRAY__NONE, rows->rows);
    add_rows(table, p, rows, group, put);
    dray__ledger_insert(table->ledger, client, rows, p, *first_slot, put);
    return DRAY_OK;
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
        dray__ledger_seal(table->ledger, p);
    p->sealed = true;
    table->dirty = ~UINT64_C(0);
    table->finished = table->freed = true; /* inserts into it must not wait on */
    return DRAY_OK;
}

static dray__grave *bury(dray__table *table, char *name)
{
    dray__grave *grave = &table->graves[table->grave_at];
    free(grave->name);
    *grave = (dray__grave){.name = name, .hash = dray__hash(name, strlen(name))};
    table->grave_at = (table->grave_at + 1) % DRAY__GRAVES;
    return grave;
}

int dray__table_bury(dray__table *table, const char *name, uint64_t finished, dray_error *error)
{
    if (dray__table_partition(table, name) || find_grave(table, name))
        return DRAY_OK;
    char *copy = strdup(name);
    if (!copy)
        return dray__nomem(error);
    dray__grave *grave = bury(table, copy);
    grave->finished = finished;
    return DRAY_OK;
}

int dray__table_clear(dray__table *table, const char *partition, dray_error *error)
{
    dray__partition *p = dray__table_partition(table, partition);
    if (!p && find_grave(table, partition))
        return DRAY_OK;
    if (!p)
        return dray__fail(error, DRAY_ENOENT, "clear: queue %s has no partition %s", table->name,
                          partition);
    bool before = p->clearing;
    p->clearing = p->uncovered != 0;
    if (!before || !p->clearing)
        dray__ledger_clear(table->ledger, p);
    if (p->clearing) /* dray__table_cover comes back to it */
        return DRAY_OK;
    dray__grave *grave = bury(table, p->name);
    p->name = NULL;
    dray__demands_clear(table, p);
    dray__rounds_clear(table, p);
    for (uint32_t t = 0; t < table->task_count; t++)
        if (dray__finished(p, t))
            grave->finished |= UINT64_C(1) << t;
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
    dray__puts_clear(table, p);
    partition_free(table, p);
    table->dirty = ~UINT64_C(0);
    table->finished = table->freed = table->demanded = true;
    return DRAY_OK;
}

void dray__table_end(dray__table *table)
{
    if (!table->ended)
        dray__ledger_end(table->ledger);
    table->ended = true;
    table->dirty = ~UINT64_C(0);
    table->finished = table->freed = table->demanded = true;
}

int dray__table_wait(const dray__table *table, const char *partition, uint32_t task,
                     dray_error *error)
{
    uint64_t all = table->task_count == 64 ? ~UINT64_C(0) : (UINT64_C(1) << table->task_count) - 1;
    uint64_t asked = task == DRAY__NONE ? all : UINT64_C(1) << task;
    const dray__partition *p = dray__table_partition(table, partition);
    if (!p) {
        const dray__grave *grave = find_grave(table, partition);
        if (grave && (grave->finished & asked) == asked)
            return DRAY_OK;
        if (grave)
            return dray__fail(error, DRAY_EGONE, "partition %s was cleared before it finished",
                              partition);
        return dray__fail(error, DRAY_EAGAIN, "there is no partition %s yet", partition);
    }
    for (uint32_t t = 0; t < table->task_count; t++)
        if ((asked >> t & 1) && !dray__finished(p, t))
            return dray__fail(error, DRAY_EAGAIN,
                              "partition %s, task %s: %u of %u rows committed or dead, %s",
                              partition, table->tasks[t].name, p->tracks[t].settled_count, p->rows,
                              p->sealed ? "sealed" : "not sealed");
    return DRAY_OK;
}

/* Named claims on a partition that was cleared: an end if the task had finished it. */
int dray__table_cleared(const dray__table *table, const char *partition, uint32_t task,
                        dray_error *error)
{
    const dray__grave *grave = find_grave(table, partition);
    if (!grave)
        return DRAY_OK;
    if (grave->finished >> task & 1)
        return dray__fail(error, DRAY_EEND, "task %s has finished partition %s",
                          table->tasks[task].name, partition);
    return dray__fail(error, DRAY_EGONE, "partition %s was cleared", partition);
}
