/* The declarations that the controller's files share: controller.c (requests), waiters.c, answers.c
 * (replies), status.c (JSON), drops.c (messages to the keeper). */
#pragma once

#include "control/channel.h"
#include "queue/server/counts.h"
#include "queue/table/keyed.h"
#include "queue/table/table.h"

#include <jansson.h>

/* Chunks that the keeper must drop. The controller does not wait for the keeper: at most one
 * request is outstanding, and further chunks are collected for the next one. */
struct event;
struct event_base;

typedef struct dray__drops {
    struct event_base *base;
    char *address; /* NULL when there is no keeper */
    dray__channel *channel;
    struct event *answered;
    bool outstanding;
    int64_t retry_ns;
    dray__chunk_key *pairs;
    uint64_t capacity;
    uint32_t count;
} dray__drops;

void dray__drops_add(void *drops, uint32_t keeper, uint64_t chunk, uint64_t key);
void dray__drops_flush(dray__drops *drops);
void dray__drops_free(dray__drops *drops);

/* The beginnings of replies (messages.h). */
void dray__answer_dropped(dray__writer *w, const dray__table *table, uint64_t seen);
void dray__answer_claim(dray__writer *w, const dray__table *table, const dray__claim *claim,
                        uint32_t which, bool bounded, uint32_t columns_known, uint32_t keys_known);

/* Writes the answer to GET and TAKE, for rows with pinned puts. */
int dray__answer_rows(dray__writer *w, const dray__table *table, const dray__picked *picked,
                      dray__arena *arena, dray_error *error);
void dray__answer_demand(dray__writer *w, const dray__demand *demand);

typedef struct dray__waiting {
    uint32_t claims[DRAY__TASKS_MAX];
    uint32_t inserts, waits, refills, gets;
    const dray__waits *waited; /* so far */
} dray__waiting;

json_t *dray__table_json(dray__table *table, const dray__waiting *waiting);
