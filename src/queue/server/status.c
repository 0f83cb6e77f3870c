/* The queue's state as JSON: dray_queue_status and the coordinator's status. */
#include "base/json.h"
#include "queue/server/internal.h"
#include "queue/storage/backend.h"
#include "queue/table/table_inside.h"

static json_t *column_counts(const dray__table *table, const dray__partition *p)
{
    json_t *object = json_object();
    for (uint32_t i = 0; i < table->defined_count; i++) {
        uint32_t c = table->defined[i];
        uint32_t count = c < p->column_capacity ? p->committed[c] : 0;
        dray__json_set(&object, table->columns[c].name, json_integer(count));
    }
    return object;
}

static json_t *task_counts(const dray__table *table, const dray__partition *p)
{
    json_t *object = json_object();
    for (uint32_t t = 0; t < table->task_count; t++) {
        const dray__track *track = &p->tracks[t];
        dray__json_set(
            &object, table->tasks[t].name,
            json_pack("{s:I, s:I, s:I, s:I, s:b}", "ready", (json_int_t)track->ready_count, "taken",
                      (json_int_t)track->taken_count, "committed", (json_int_t)track->done_count,
                      "dead", (json_int_t)track->dead_count, "finished",
                      dray__finished(p, t) ? 1 : 0));
    }
    return object;
}

static const char *const causes[DRAY__CAUSES] = {
    [DRAY_LOSS_FAILED] = "failed",
    [DRAY_LOSS_STALE] = "stale",
    [DRAY_LOSS_ROLLED_BACK] = "rolled_back",
    [DRAY_LOSS_BYTES] = "bytes_lost",
};

static json_t *losses(const dray__partition *p)
{
    json_t *object = json_object();
    for (uint32_t i = 0; i < DRAY__CAUSES; i++)
        dray__json_set(&object, causes[i], json_integer(p->lost[i]));
    return object;
}

static json_t *deaths(const dray__table *table, const dray__partition *p)
{
    json_t *array = json_array();
    for (uint32_t i = 0; i < p->death_count; i++) {
        const dray__death *death = &p->deaths[i];
        json_t *reason = json_string(death->reason);
        dray__json_append(
            &array, json_pack("{s:I, s:I, s:s, s:s, s:I, s:b, s:o}", "slot",
                              (json_int_t)death->slot, "generation", (json_int_t)death->generation,
                              "task", table->tasks[death->task].name, "cause", causes[death->cause],
                              "attempts", (json_int_t)death->failures, "refilled", death->refilled,
                              "reason", reason ? reason : json_string("?")));
    }
    return array;
}

static json_t *partition_json(const dray__table *table, const dray__partition *p)
{
    return json_pack(
        "{s:s, s:I, s:I, s:I, s:b, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:I, s:b, s:o}", "name",
        p->name, "generation", (json_int_t)p->generation, "rows", (json_int_t)p->rows, "groups",
        (json_int_t)p->group_count, "sealed", p->sealed ? 1 : 0, "dead", (json_int_t)p->dead_count,
        "vacant", (json_int_t)p->vacant_count, "refilled", (json_int_t)p->refilled, "bytes",
        (json_int_t)p->live, "reserved_bytes", (json_int_t)p->reserved, "lost", losses(p),
        "columns", column_counts(table, p), "tasks", task_counts(table, p), "uncovered",
        (json_int_t)p->uncovered, "clearing", p->clearing ? 1 : 0, "deaths", deaths(table, p));
}

static json_t *waiter_counts(const dray__table *table, const dray__waiting *waiting)
{
    json_t *claims = json_object();
    for (uint32_t t = 0; t < table->task_count; t++)
        dray__json_set(&claims, table->tasks[t].name, json_integer(waiting->claims[t]));
    return json_pack("{s:o, s:I, s:I, s:I, s:I}", "claims", claims, "inserts",
                     (json_int_t)waiting->inserts, "waits", (json_int_t)waiting->waits, "refills",
                     (json_int_t)waiting->refills, "gets", (json_int_t)waiting->gets);
}

/* The dtype, shape and content of a column, which its first put fixed. */
static json_t *column_forms(const dray__table *table)
{
    static const char *const contents[] = {
        [DRAY_CONTENT_TENSOR] = "tensor",
        [DRAY_CONTENT_STRING] = "string",
        [DRAY_CONTENT_BYTES] = "bytes",
        [DRAY_CONTENT_OBJECT] = "object",
    };
    json_t *object = json_object();
    for (uint32_t i = 0; i < table->defined_count; i++) {
        const dray__col *column = &table->columns[table->defined[i]];
        const dray__column_spec *spec = &column->spec;
        json_t *shape = json_array();
        for (uint32_t d = 0; d < spec->ndim; d++)
            dray__json_append(&shape,
                              d == 0 && spec->ragged ? json_null() : json_integer(spec->shape[d]));
        dray__json_set(&object, column->name,
                       json_pack("{s:s, s:o, s:s}", "dtype",
                                 dray_dtype_name((dray_dtype)spec->dtype), "shape", shape,
                                 "content", contents[spec->content]));
    }
    return object;
}

/* The counts of the finished work, which only grow. */
static json_t *columns_in(const dray__table *table)
{
    json_t *object = json_object();
    for (uint32_t i = 0; i < table->defined_count; i++) {
        const dray__col *column = &table->columns[table->defined[i]];
        dray__json_set(&object, column->name,
                       json_pack("{s:I, s:I}", "rows", (json_int_t)column->rows_in, "bytes",
                                 (json_int_t)column->bytes_in));
    }
    return object;
}

static json_t *tasks_out(const dray__table *table)
{
    json_t *object = json_object();
    for (uint32_t t = 0; t < table->task_count; t++) {
        const struct dray__task_counts *c = &table->tasks[t].counts;
        dray__json_set(&object, table->tasks[t].name,
                       json_pack("{s:I, s:I, s:I, s:I, s:I, s:I}", "claims", (json_int_t)c->claims,
                                 "rows", (json_int_t)c->rows, "bytes", (json_int_t)c->bytes,
                                 "committed", (json_int_t)c->committed, "failed",
                                 (json_int_t)c->failed, "given_back", (json_int_t)c->given_back));
    }
    return object;
}

static json_t *totals(const dray__table *table)
{
    json_t *lost = json_object();
    for (uint32_t i = 0; i < DRAY__CAUSES; i++)
        dray__json_set(&lost, causes[i], json_integer((json_int_t)table->lost[i]));
    return json_pack("{s:I, s:I, s:o}", "inserted", (json_int_t)table->inserted, "refilled",
                     (json_int_t)table->refilled, "lost", lost);
}

static json_t *waits(const dray__table *table, const dray__waits *waited)
{
    const char *tasks[DRAY__TASKS_MAX];
    for (uint32_t t = 0; t < table->task_count; t++)
        tasks[t] = table->tasks[t].name;
    return dray__waits_json(waited, tasks, table->task_count);
}

static json_t *admission(const dray__table *table)
{
    const dray__admission *a = &table->admission;
    if (!a->batch)
        return json_null();
    return json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "task",
                     a->task == DRAY__NONE ? "" : table->tasks[a->task].name, "version",
                     (json_int_t)a->version, "batch_rows", (json_int_t)a->batch, "staleness",
                     (json_int_t)a->staleness, "concurrency", (json_int_t)a->concurrency, "running",
                     (json_int_t)dray__admission_running(table), "accepted",
                     (json_int_t)a->accepted, "room", (json_int_t)dray__admission_room(table));
}

/* The claims that are neither committed nor given back, and their clients. */
static json_t *holders(const dray__table *table)
{
    json_t *array = json_array();
    for (const dray__claim *c = table->claims; c; c = c->next) {
        if (c->state != DRAY__CLAIM_ACTIVE || !c->partition)
            continue;
        json_t *name = json_string(c->client->name);
        dray__json_append(
            &array, json_pack("{s:I, s:I, s:o, s:s, s:s, s:I}", "claim", (json_int_t)c->id,
                              "member", (json_int_t)c->client->session, "name",
                              name ? name : json_string("?"), "task", table->tasks[c->task].name,
                              "partition", c->partition->name, "rows", (json_int_t)c->active));
    }
    return array;
}

static json_t *keyed_json(const dray__table *table, const dray__keyed *p)
{
    json_t *columns = json_object(), *tasks = json_object();
    for (uint32_t c = 0; c < p->column_count; c++)
        if (p->column_rows[c])
            dray__json_set(&columns, table->columns[p->columns[c]].name,
                           json_integer(p->column_rows[c]));
    for (uint32_t t = 0; t < p->task_count; t++) {
        uint32_t consumed = 0;
        for (uint32_t slot = 0; slot < p->end; slot++)
            consumed += (uint32_t)(p->rows[slot].consumed >> t & 1);
        dray__json_set(&tasks, p->tasks[t], json_integer(consumed));
    }
    return json_pack("{s:s, s:I, s:I, s:o, s:o}", "name", p->name, "generation",
                     (json_int_t)p->generation, "rows", (json_int_t)p->row_count, "columns",
                     columns, "tasks", tasks);
}

static json_t *all_keyed(const dray__table *table)
{
    json_t *array = json_array();
    for (const dray__keyed *p = table->keyed; p; p = p->next)
        dray__json_append(&array, keyed_json(table, p));
    return array;
}

json_t *dray__table_json(dray__table *table, const dray__waiting *waiting)
{
    char holder[300];
    dray__describe_holder(table, holder, sizeof holder);
    json_t *partitions = json_array();
    uint64_t bytes = table->charged + table->hidden + table->kept;
    uint32_t clients = 0;
    for (uint32_t i = 0; i < table->partition_count; i++)
        dray__json_append(&partitions, partition_json(table, table->partitions[i]));
    for (const dray__client *client = table->clients; client; client = client->next)
        clients++;
    return json_pack(
        "{s:s, s:s, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, "
        "s:o, s:o, s:o, "
        "s:o, s:o, s:I, s:s, s:o, s:o, s:I, s:o}",
        "name", table->name, "backend", dray__backend_name(table->settings.backend), "ended",
        table->ended ? 1 : 0, "rows", (json_int_t)table->rows, "capacity_rows",
        (json_int_t)table->settings.capacity_rows, "bytes", (json_int_t)bytes, "hidden_bytes",
        (json_int_t)table->hidden, "capacity_bytes", (json_int_t)table->settings.capacity_bytes,
        "chunks", (json_int_t)table->chunks.count, "chunk_bytes", (json_int_t)table->chunk_bytes,
        "claims", (json_int_t)table->claim_count, "clients", (json_int_t)clients, "epoch",
        (json_int_t)table->epoch, "admission", admission(table), "waiters",
        waiter_counts(table, waiting), "partitions", partitions, "totals", totals(table),
        "columns_in", columns_in(table), "tasks_out", tasks_out(table), "waited",
        waits(table, waiting->waited), "free_chunk_bytes", (json_int_t)table->spare_bytes,
        "held_by", holder, "holders", holders(table), "keyed", all_keyed(table), "keyed_bytes",
        (json_int_t)table->kept, "columns", column_forms(table));
}
