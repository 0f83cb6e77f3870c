/* The table: its columns, tags, tasks and limits. Its partitions are in partitions.c. */
#include "queue/table/keyed.h"
#include "queue/table/table_inside.h"

#include "base/error.h"
#include "base/words.h"
#include "queue/storage/backend.h"

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
    uint8_t *grown = old_capacity ? realloc(old, bytes) : calloc(capacity, size); /* zero lazily */
    if (!grown)
        return dray__nomem(error);
    if (old_capacity)
        memset(grown + old_capacity * size, 0, (capacity - old_capacity) * size);
    else
        free(old);
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

/* Gives `name` the number `index`. *copy is the copied name, which the caller owns. */
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
    if (!table->columns) /* no task has columns yet */
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
    if (task_count < DRAY__TASKS_MAX && settings->provisional >> task_count)
        return dray__fail(error, DRAY_EINVALID,
                          "queue %s: provisional ones among its %u tasks expected, found %llx",
                          name, task_count, (unsigned long long)settings->provisional);
    dray__table *table = calloc(1, sizeof *table);
    if (!table)
        return dray__nomem(error);
    table->name = strdup(name);
    table->tasks = calloc(task_count, sizeof *table->tasks);
    table->former = calloc(DRAY__FORMER, sizeof *table->former);
    dray__settings *s = &table->settings;
    *s = *settings;
    s->backend_address = strdup(settings->backend_address ? settings->backend_address : "");
    s->backend = s->backend ? s->backend : DRAY_BACKEND_BUILTIN;
    table->objects = s->backend != DRAY_BACKEND_BUILTIN;
    table->bytes = table->objects ? &dray__bytes_objects : &dray__bytes_chunks;
    s->capacity_rows = s->capacity_rows ? s->capacity_rows : DRAY__CAPACITY_ROWS;
    s->capacity_bytes = s->capacity_bytes ? s->capacity_bytes : DRAY__CAPACITY_BYTES;
    s->max_attempts = s->max_attempts ? s->max_attempts : 3;
    s->on_loss = s->on_loss ? s->on_loss : DRAY_ON_LOSS_REFILL;
    table->demands_tail = &table->demands;
    table->admission.task = DRAY__NONE;
    rc = table->name && table->tasks && table->former && s->backend_address ? DRAY_OK
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

/* Appends the name of a column to a list, "prompt, response", of which `used` bytes are written.
 * What does not fit is cut off. */
static void append_name(char *out, size_t capacity, size_t *used, const char *name)
{
    int more = snprintf(out + *used, capacity - *used, "%s%s", *used ? ", " : "", name);
    *used = more >= 0 && (size_t)more < capacity - *used ? *used + (size_t)more : capacity - 1;
}

/* Compares the columns that a task needs, or writes (`does`), with those that a caller gives. */
static int check_names(const dray__table *table, const dray__qtask *task, const char *does,
                       const uint32_t *columns, uint32_t count, const char *const *names,
                       uint32_t name_count, dray_error *error)
{
    char expected[160] = "none", found[160] = "none";
    size_t expected_used = 0, found_used = 0;
    if (same_names(table, columns, count, names, name_count))
        return DRAY_OK;
    for (uint32_t i = 0; i < count; i++)
        append_name(expected, sizeof expected, &expected_used, table->columns[columns[i]].name);
    for (uint32_t i = 0; i < name_count; i++)
        append_name(found, sizeof found, &found_used, names[i]);
    return dray__fail(error, DRAY_EEXIST,
                      "queue %s is open with other tasks: of task %s, which %s %s, found %s",
                      table->name, task->name, does, expected, found);
}

#define STORE_WORD(number, name) [DRAY_BACKEND_##number] = #name,

/* A setting of the queue, and the value that an opening request has for it; 0 when the request
 * leaves it open. */
typedef struct setting {
    const char *name;
    uint64_t own, found;
    const char *words[8]; /* the names of the values, if they have names */
} setting;

static const char *say(const setting *s, uint64_t value, char out[24])
{
    if (value < sizeof s->words / sizeof *s->words && s->words[value])
        return s->words[value];
    snprintf(out, 24, "%llu", (unsigned long long)value);
    return out;
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
        uint32_t t = 0;
        dray__table_task(table, tasks[i].name, &t, NULL); /* it exists: checked above */
        const dray__qtask *task = &table->tasks[t];
        int rc = check_names(table, task, "needs", task->needs, task->needs_count, tasks[i].needs,
                             tasks[i].needs_count, error);
        if (!rc)
            rc = check_names(table, task, "writes", task->writes, task->writes_count,
                             tasks[i].writes, tasks[i].writes_count, error);
        if (rc)
            return rc;
    }
    const dray__settings *own = &table->settings;
    const setting all[] = {
        {"capacity_rows", own->capacity_rows, settings->capacity_rows, {0}},
        {"capacity_bytes", own->capacity_bytes, settings->capacity_bytes, {0}},
        {"max_attempts", own->max_attempts, settings->max_attempts, {0}},
        {"on_loss",
         (uint64_t)own->on_loss,
         (uint64_t)settings->on_loss,
         {"refill", [DRAY_ON_LOSS_REFILL] = "refill", [DRAY_ON_LOSS_SHRINK_GROUP] = "shrink_group",
          [DRAY_ON_LOSS_DROP_GROUP] = "drop_group"}},
        {"provisional tasks", own->provisional, provisional, {0}},
        {"batch_rows", own->batch_rows, settings->batch_rows, {0}},
        {"open_batches", own->open_batches, settings->open_batches, {0}},
        {"checkpoint_batches", own->checkpoint_batches, settings->checkpoint_batches, {0}},
        {"row_bytes", own->row_bytes, settings->row_bytes, {0}},
        {"durability",
         (uint64_t)own->durability,
         (uint64_t)settings->durability,
         {"none", [DRAY_DURABILITY_NONE] = "none", [DRAY_DURABILITY_CHECKPOINT] = "checkpoint",
          [DRAY_DURABILITY_JOURNAL] = "journal"}},
        {"backend",
         (uint64_t)own->backend,
         (uint64_t)settings->backend,
         {"builtin", [DRAY_BACKEND_BUILTIN] = "builtin", DRAY__STORE_MAP(STORE_WORD)}},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        char numbers[2][24];
        if (all[i].found && all[i].found != all[i].own)
            return dray__fail(error, DRAY_EEXIST, "queue %s is open with %s %s, found %s",
                              table->name, all[i].name, say(&all[i], all[i].own, numbers[0]),
                              say(&all[i], all[i].found, numbers[1]));
    }
    if (settings->backend && settings->backend_address && settings->backend_address[0] &&
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

void dray__table_free(dray__table *table)
{
    if (!table)
        return;
    while (table->clients)
        dray__client_end(table, table->clients, false, "");
    dray__quota_leave(table);
    dray__demands_clear(table, NULL);
    dray__rounds_clear(table, NULL);
    dray__keyed_free(table);
    for (uint32_t i = 0; i < table->partition_count; i++) {
        dray__puts_clear(table, table->partitions[i]);
        dray__partition_free(table, table->partitions[i]);
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
    for (uint32_t g = 0; table->former && g < DRAY__FORMER; g++)
        free(table->former[g].name);
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
    free(table->former);
    free(table->name);
    free(table);
}

void dray__table_count_anew(dray__table *table)
{
    table->inserted = table->refilled = 0;
    memset(table->lost, 0, sizeof table->lost);
    for (uint32_t t = 0; t < table->task_count; t++)
        memset(&table->tasks[t].counts, 0, sizeof table->tasks[t].counts);
    for (uint32_t c = 0; c < table->column_count; c++)
        table->columns[c].rows_in = table->columns[c].bytes_in = 0;
}
