/* What the controller's files share: controller.c (requests), waiters.c, answers.c (replies),
 * decode.c (reading), status.c (JSON), drops.c (telling the keeper). */
#ifndef DRAY_QUEUE_INTERNAL_H
#define DRAY_QUEUE_INTERNAL_H

#include "base/arena.h"
#include "control/channel.h"
#include "queue/counts.h"
#include "queue/messages.h"
#include "queue/table.h"

#include <jansson.h>

/* Chunks that the keeper is to drop. Nothing here waits for the keeper: one request is outstanding
 * at most, the rest is collected. */
struct event;
struct event_base;

typedef struct dray__drops {
    struct event_base *base;
    char *address; /* NULL: there is no keeper */
    dray__channel *channel;
    struct event *answered;
    bool outstanding;
    int64_t retry_ns;
    dray__writer pairs; /* {u64 id, u64 key} each */
    uint32_t count;
} dray__drops;

void dray__drops_add(void *drops, uint32_t home, uint64_t chunk, uint64_t key);
void dray__drops_flush(dray__drops *drops);
void dray__drops_free(dray__drops *drops);

/* Texts in the arena; NULL: the reader failed, or memory ran out. */
const char *dray__get_text(dray__reader *r, dray__arena *arena);  /* a name (dray__get_word) */
const char *dray__get_line(dray__reader *r, dray__arena *arena);  /* the same, to 4096 bytes */
const char *dray__get_lines(dray__reader *r, dray__arena *arena); /* for people, to 4096 bytes */
/* Room for the counted items that follow, each taking at least `wire` bytes in the message. */
void *dray__get_array(dray__reader *r, dray__arena *arena, size_t wire, size_t size,
                      uint32_t *count);
const dray__new_column *dray__get_columns(dray__reader *r, dray__arena *arena, uint32_t *count);
const dray__new_tag *dray__get_tags(dray__reader *r, dray__arena *arena, uint32_t *count);
void dray__get_rank(dray__reader *r, dray__arena *arena, dray__want *out);
void dray__get_outputs(dray__reader *r, dray__arena *arena, dray__outputs *out);

typedef struct dray__opening {
    const char *name;
    dray__task_names *tasks;
    uint32_t task_count;
    dray__settings settings;
    uint64_t identity;   /* of who opens, for as long as it has the queue open */
    const char *restore; /* a checkpoint (messages.h); "": none */
} dray__opening;

int dray__get_opening(dray__reader *r, dray__arena *arena, dray__opening *out, int64_t *timeout_ns,
                      dray_error *error);

/* The beginnings of replies (messages.h). */
void dray__answer_dropped(dray__writer *w, const dray__table *table, uint64_t seen);
void dray__answer_table(dray__writer *w, const dray__table *table);
void dray__answer_claim(dray__writer *w, const dray__table *table, const dray__claim *claim,
                        uint32_t which, uint32_t columns_known, uint32_t keys_known);

void dray__answer_demand(dray__writer *w, const dray__demand *demand);

typedef struct dray__waiting {
    uint32_t claims[DRAY__TASKS_MAX];
    uint32_t inserts, waits, refills;
    const dray__waits *waited; /* so far */
} dray__waiting;

json_t *dray__table_json(dray__table *table, const dray__waiting *waiting);

#endif
