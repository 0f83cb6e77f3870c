/* A coordinator's status in the text format of Prometheus (version 0.0.4, as the project's
 * documentation "Exposition formats" describes it): a metric's samples follow its HELP and TYPE. */
#include "cmd/prometheus.h"

#include <string.h>

/* Where a metric's samples are found in the status. */
typedef enum place { QUEUE, PARTITION, GROUP } place;

/* A number of the object, or (each: the label's name) of every member of an object in it; of
 * objects in that object, their number `inner`. */
static const struct metric {
    const char *name, *help;
    place at;
    const char *key, *each, *inner;
} metrics[] = {
    {"dray_queue_rows", "Rows alive.", QUEUE, "rows", NULL, NULL},
    {"dray_queue_capacity_rows", "Rows that may be alive at once.", QUEUE, "capacity_rows", NULL,
     NULL},
    {"dray_queue_bytes", "Bytes of committed columns.", QUEUE, "bytes", NULL, NULL},
    {"dray_queue_capacity_bytes", "Bytes that may be committed at once.", QUEUE, "capacity_bytes",
     NULL, NULL},
    {"dray_queue_chunks", "Chunks of shared memory.", QUEUE, "chunks", NULL, NULL},
    {"dray_queue_chunk_bytes", "Bytes of the chunks.", QUEUE, "chunk_bytes", NULL, NULL},
    {"dray_queue_claims", "Claims that are open.", QUEUE, "claims", NULL, NULL},
    {"dray_queue_clients", "Uses of the queue.", QUEUE, "clients", NULL, NULL},
    {"dray_queue_waiting_claims", "Claims that wait.", QUEUE, "waiters.claims", "task", NULL},
    {"dray_queue_waiting_inserts", "Inserts that wait.", QUEUE, "waiters.inserts", NULL, NULL},
    {"dray_queue_column_rows", "Rows with the column committed.", PARTITION, "columns", "column",
     NULL},
    {"dray_queue_ready_rows", "Rows that the task may claim.", PARTITION, "tasks", "task", "ready"},
    {"dray_queue_taken_rows", "Rows that the task holds.", PARTITION, "tasks", "task", "taken"},
    {"dray_queue_committed_rows", "Rows that the task has committed.", PARTITION, "tasks", "task",
     "committed"},
    {"dray_queue_lost_rows", "Rows lost in the partition.", PARTITION, "lost", "cause", NULL},
    {"dray_queue_refilled_rows", "Rows refilled in the partition.", PARTITION, "refilled", NULL,
     NULL},
    {"dray_queue_dead_rows", "Rows that are dead.", PARTITION, "dead", NULL, NULL},
    {"dray_weights_version", "Version that the group holds.", GROUP, "version", NULL, NULL},
    {"dray_weights_ranks", "Ranks of the group that are there.", GROUP, "ranks", NULL, NULL},
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
    const char *names[3], *values[3];
    int count;
} labels;

static void print_sample(FILE *out, const struct metric *m, labels l, json_t *value)
{
    if (!json_is_number(value))
        return;
    fprintf(out, "%s{", m->name);
    for (int i = 0; i < l.count; i++)
        print_label(out, i ? "," : "", l.names[i], l.values[i]);
    fprintf(out, "} %.17g\n", json_number_value(value));
}

static void add_label(labels *l, const char *name, const char *value)
{
    l->names[l->count] = name;
    l->values[l->count++] = value;
}

/* "waiters.claims": a member of a member. */
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
        print_sample(out, m, l, found);
        return;
    }
    json_object_foreach(found, key, value)
    {
        labels each = l;
        add_label(&each, m->each, key);
        print_sample(out, m, each, m->inner ? json_object_get(value, m->inner) : value);
    }
}

static const char *text_of(json_t *object, const char *key)
{
    return json_string_value(json_object_get(object, key));
}

static void print_metric(FILE *out, const struct metric *m, json_t *status)
{
    json_t *one, *partition;
    size_t i, k;
    fprintf(out, "# HELP %s %s\n# TYPE %s gauge\n", m->name, m->help, m->name);
    json_array_foreach(json_object_get(status, m->at == GROUP ? "groups" : "queues"), i, one)
    {
        labels l = {.count = 0};
        if (m->at == GROUP)
            add_label(&l, "model", text_of(one, "model"));
        add_label(&l, m->at == GROUP ? "group" : "queue", text_of(one, "name"));
        if (m->at != PARTITION) {
            print_object(out, m, l, one);
            continue;
        }
        json_array_foreach(json_object_get(one, "partitions"), k, partition)
        {
            labels of = l;
            add_label(&of, "partition", text_of(partition, "name"));
            print_object(out, m, of, partition);
        }
    }
}

void cmd_prometheus(json_t *status, FILE *out)
{
    for (size_t i = 0; i < sizeof metrics / sizeof metrics[0]; i++)
        print_metric(out, &metrics[i], status);
}
