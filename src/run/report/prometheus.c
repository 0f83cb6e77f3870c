/* A coordinator's status in the text format of Prometheus (version 0.0.4, as the project's
 * documentation "Exposition formats" describes it): a metric's samples follow its HELP and TYPE. */
#include "run/report/prometheus.h"

#include "base/json.h"

#include "queue/server/counts.h"

#include <string.h>

/* Where a metric's samples are found in the status. */
typedef enum place { QUEUE, PARTITION, GROUP, WAITED, TOP } place;
typedef enum kind { GAUGE, COUNTER, HISTOGRAM } kind;

/* A metric is a number of the object or, with `each` (a label's name), one number for every member
 * of an object in it; when these members are objects, their number `inner`. */
static const struct metric {
    const char *name, *help;
    place at;
    const char *key, *each, *inner;
    kind kind;
} metrics[] = {
    {"dray_queue_rows", "Rows alive.", QUEUE, "rows", NULL, NULL, GAUGE},
    {"dray_queue_capacity_rows", "Rows that may be alive at once.", QUEUE, "capacity_rows", NULL,
     NULL, GAUGE},
    {"dray_queue_bytes", "Bytes of committed columns.", QUEUE, "bytes", NULL, NULL, GAUGE},
    {"dray_queue_capacity_bytes", "Bytes that may be committed at once.", QUEUE, "capacity_bytes",
     NULL, NULL, GAUGE},
    {"dray_queue_chunks", "Chunks of shared memory.", QUEUE, "chunks", NULL, NULL, GAUGE},
    {"dray_queue_chunk_bytes", "Bytes of the chunks.", QUEUE, "chunk_bytes", NULL, NULL, GAUGE},
    {"dray_queue_claims", "Claims that are open.", QUEUE, "claims", NULL, NULL, GAUGE},
    {"dray_queue_clients", "Uses of the queue.", QUEUE, "clients", NULL, NULL, GAUGE},
    {"dray_queue_waiting_claims", "Claims that wait.", QUEUE, "waiters.claims", "task", NULL,
     GAUGE},
    {"dray_queue_waiting_inserts", "Inserts that wait.", QUEUE, "waiters.inserts", NULL, NULL,
     GAUGE},
    {"dray_queue_column_rows", "Rows with the column committed.", PARTITION, "columns", "column",
     NULL, GAUGE},
    {"dray_queue_ready_rows", "Rows that the task may claim.", PARTITION, "tasks", "task", "ready",
     GAUGE},
    {"dray_queue_taken_rows", "Rows that the task holds.", PARTITION, "tasks", "task", "taken",
     GAUGE},
    {"dray_queue_committed_rows", "Rows that the task has committed.", PARTITION, "tasks", "task",
     "committed", GAUGE},
    {"dray_queue_lost_rows", "Rows lost in the partition.", PARTITION, "lost", "cause", NULL,
     GAUGE},
    {"dray_queue_refilled_rows", "Rows refilled in the partition.", PARTITION, "refilled", NULL,
     NULL, GAUGE},
    {"dray_queue_dead_rows", "Rows that are dead.", PARTITION, "dead", NULL, NULL, GAUGE},
    {"dray_queue_inserted_rows_total", "Rows inserted.", QUEUE, "totals.inserted", NULL, NULL,
     COUNTER},
    {"dray_queue_refilled_rows_total", "Rows refilled.", QUEUE, "totals.refilled", NULL, NULL,
     COUNTER},
    {"dray_queue_lost_rows_total", "Rows lost.", QUEUE, "totals.lost", "cause", NULL, COUNTER},
    {"dray_queue_column_in_rows_total", "Rows of the column committed.", QUEUE, "columns_in",
     "column", "rows", COUNTER},
    {"dray_queue_column_in_bytes_total", "Bytes of the column committed.", QUEUE, "columns_in",
     "column", "bytes", COUNTER},
    {"dray_queue_task_claims_total", "Claims of the task.", QUEUE, "tasks_out", "task", "claims",
     COUNTER},
    {"dray_queue_task_claimed_rows_total", "Rows claimed by the task.", QUEUE, "tasks_out", "task",
     "rows", COUNTER},
    {"dray_queue_task_claimed_bytes_total",
     "Bytes of columns that the task needs, of rows that it claimed.", QUEUE, "tasks_out", "task",
     "bytes", COUNTER},
    {"dray_queue_task_committed_rows_total", "Rows committed by the task.", QUEUE, "tasks_out",
     "task", "committed", COUNTER},
    {"dray_queue_task_failed_rows_total", "Attempts of the task that failed.", QUEUE, "tasks_out",
     "task", "failed", COUNTER},
    {"dray_queue_task_given_back_rows_total", "Rows that the task gave back, uncounted.", QUEUE,
     "tasks_out", "task", "given_back", COUNTER},
    {"dray_queue_refusals_total", "Requests answered with an error.", TOP, "queue_refusals", NULL,
     "count", COUNTER},
    {"dray_queue_wait_seconds", "From a request's arrival to its answer.", WAITED, "waited", NULL,
     NULL, HISTOGRAM},
    {"dray_weights_version", "Version that the group holds.", GROUP, "version", NULL, NULL, GAUGE},
    {"dray_weights_ranks", "Ranks of the group that are there.", GROUP, "ranks", NULL, NULL, GAUGE},
};

static void print_label(FILE *out, const char *separator, const char *name, const char *value)
{
    fprintf(out, "%s%s=\"", separator, name);
    for (const char *c = value ? value : ""; *c; c++) {
        if (*c == '\n')
            fputs("\\n", out);
        else if (*c == '"' || *c == '\\')
            fprintf(out, "\\%c", *c);
        else
            fputc(*c, out);
    }
    fputc('"', out);
}

typedef struct labels {
    const char *names[5], *values[5];
    int count;
} labels;

static void print_sample(FILE *out, const struct metric *m, const char *suffix, labels l,
                         json_t *value)
{
    if (!json_is_number(value))
        return;
    fprintf(out, "%s%s{", m->name, suffix);
    for (int i = 0; i < l.count; i++)
        print_label(out, i ? "," : "", l.names[i], l.values[i]);
    fprintf(out, "} %.17g\n", json_number_value(value));
}

static void add_label(labels *l, const char *name, const char *value)
{
    l->names[l->count] = name;
    l->values[l->count++] = value;
}

/* Finds a member of a member, such as "waiters.claims". */
static json_t *find(json_t *object, const char *key)
{
    const char *dot = strchr(key, '.');
    char outer[32];
    if (!dot)
        return json_object_get(object, key);
    snprintf(outer, sizeof outer, "%.*s", (int)(dot - key), key);
    return json_object_get(json_object_get(object, outer), dot + 1);
}

static void print_object(FILE *out, const struct metric *m, labels l, json_t *object)
{
    json_t *found = find(object, m->key), *value;
    const char *key;
    if (!m->each) {
        print_sample(out, m, "", l, found);
        return;
    }
    json_object_foreach(found, key, value)
    {
        labels each = l;
        add_label(&each, m->each, key);
        print_sample(out, m, "", each, m->inner ? json_object_get(value, m->inner) : value);
    }
}

/* Prints the refused requests of an array. */
static void print_refusals(FILE *out, const struct metric *m, json_t *status)
{
    json_t *one;
    size_t i;
    json_array_foreach(json_object_get(status, m->key), i, one)
    {
        labels l = {.count = 0};
        add_label(&l, "request", dray__json_string(one, "request"));
        add_label(&l, "error", dray__json_string(one, "error"));
        print_sample(out, m, "", l, json_object_get(one, m->inner));
    }
}

static void print_histogram(FILE *out, const struct metric *m, labels l, json_t *one)
{
    json_t *buckets = json_object_get(one, "buckets"), *count = NULL;
    json_int_t below = 0;
    add_label(&l, "request", dray__json_string(one, "request"));
    add_label(&l, "task", dray__json_string(one, "task"));
    for (size_t i = 0; i < DRAY__WAIT_BUCKETS; i++) {
        char end[32] = "+Inf";
        labels of = l;
        below += json_integer_value(json_array_get(buckets, i));
        if (i + 1 < DRAY__WAIT_BUCKETS)
            snprintf(end, sizeof end, "%g", (double)dray__wait_ends_us[i] / 1e6);
        add_label(&of, "le", end);
        count = json_integer(below);
        print_sample(out, m, "_bucket", of, count);
        json_decref(count);
    }
    print_sample(out, m, "_sum", l, json_object_get(one, "seconds"));
    print_sample(out, m, "_count", l, json_object_get(one, "count"));
}

static void print_waits(FILE *out, const struct metric *m, json_t *status)
{
    json_t *queue, *one;
    size_t i, k;
    json_array_foreach(json_object_get(status, "queues"), i, queue)
    {
        labels l = {.count = 0};
        add_label(&l, "queue", dray__json_string(queue, "name"));
        json_array_foreach(json_object_get(queue, m->key), k, one) print_histogram(out, m, l, one);
    }
}

static void print_metric(FILE *out, const struct metric *m, json_t *status)
{
    static const char *const kinds[] = {"gauge", "counter", "histogram"};
    json_t *one, *partition;
    size_t i, k;
    fprintf(out, "# HELP %s %s\n# TYPE %s %s\n", m->name, m->help, m->name, kinds[m->kind]);
    if (m->at == TOP)
        print_refusals(out, m, status);
    if (m->at == WAITED)
        print_waits(out, m, status);
    if (m->at == TOP || m->at == WAITED)
        return;
    json_array_foreach(json_object_get(status, m->at == GROUP ? "groups" : "queues"), i, one)
    {
        labels l = {.count = 0};
        if (m->at == GROUP)
            add_label(&l, "model", dray__json_string(one, "model"));
        add_label(&l, m->at == GROUP ? "group" : "queue", dray__json_string(one, "name"));
        if (m->at != PARTITION) {
            print_object(out, m, l, one);
            continue;
        }
        json_array_foreach(json_object_get(one, "partitions"), k, partition)
        {
            labels of = l;
            add_label(&of, "partition", dray__json_string(partition, "name"));
            print_object(out, m, of, partition);
        }
    }
}

void dray__prometheus(json_t *status, FILE *out)
{
    for (size_t i = 0; i < sizeof metrics / sizeof metrics[0]; i++)
        print_metric(out, &metrics[i], status);
}
