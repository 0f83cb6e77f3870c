/* The counters of a queue since its controller began, for people and Prometheus: sums that only
 * grow (the table's are in table.h, with their meanings), and how long requests waited. */
#pragma once

#include "queue/messages.h"

#include <jansson.h>

enum { DRAY__WAIT_BUCKETS = 12, DRAY__WAIT_KINDS = 3 + DRAY__TASKS_MAX, DRAY__REQUESTS = 64 };

/* Times from a request's arrival to its answer. The upper bounds of all buckets but the last are
 * dray__wait_ends_us. */
typedef struct dray__histogram {
    uint64_t buckets[DRAY__WAIT_BUCKETS];
    uint64_t count, ns;
} dray__histogram;

typedef struct dray__waits { /* of inserts, waits for partitions, refills, and claims of each task
                              */
    dray__histogram kinds[DRAY__WAIT_KINDS];
} dray__waits;

enum { DRAY__WAIT_INSERT, DRAY__WAIT_PARTITION, DRAY__WAIT_REFILL, DRAY__WAIT_CLAIM };

extern const int64_t dray__wait_ends_us[DRAY__WAIT_BUCKETS - 1];
void dray__histogram_add(dray__histogram *histogram, int64_t ns);
/* [{"request", "task" (of claims), "count", "seconds", "buckets": [...]}], for requests that
 * occurred. */
json_t *dray__waits_json(const dray__waits *waits, const char *const *tasks, uint32_t task_count);

/* Answers that were errors, by request and code. */
typedef struct dray__refusals {
    uint64_t counts[DRAY__REQUESTS][DRAY__REQUESTS];
} dray__refusals;

void dray__refusals_add(dray__refusals *refusals, uint16_t type, int code);
json_t *dray__refusals_json(const dray__refusals *refusals); /* [{"request", "error", "count"}] */
