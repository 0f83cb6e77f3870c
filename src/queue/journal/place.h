/* Where the bytes of a journal's records come from, and where they are put when it is read: chunks
 * that the keeper holds, or a store. Not bound to the table's thread: a thread has a placer of its
 * own, and who made it says what becomes of its chunks. */
#pragma once

#include "base/clock.h"
#include "queue/messages.h"
#include "queue/storage/backend.h"
#include "queue/storage/distant.h"
#include "queue/storage/homes.h"
#include "queue/storage/storage.h"

#define DRAY__KEEPER_PATIENCE (5 * DRAY__SECOND)

typedef struct dray__placer dray__placer;

typedef struct dray__placer_kind {
    /* parts: offsets, what aligns the values, values. The column's extent, but for its bytes, says
     * where they are now. */
    int (*put)(dray__placer *self, dray__new_column *column, const struct iovec parts[3],
               dray_error *error);
    int (*get)(dray__placer *self, dray__range *range, int64_t deadline_ns, dray_error *error);
} dray__placer_kind;

struct dray__placer {
    const dray__placer_kind *kind;
    dray__keeper_link link; /* chunks: of the keeper here, */
    dray__homes *homes;     /* of others; NULL: there are none */
    dray__distant *distant;
    dray__backend *store;     /* objects */
    uint32_t client, objects; /* whose they are, and how many */
    /* A chunk that the keeper has; it is filled, and nothing more is put in. NULL: nothing. */
    int (*made)(void *user, uint64_t id, uint64_t key, uint64_t size, dray_error *error);
    void (*filled)(void *user, uint64_t id);
    void *user;
    struct {
        uint64_t id, size, used;
        uint8_t *base;
    } chunk;
};

/* As the settings say, whose space is not 0 where a store holds the bytes. keeper_path: NULL: there
 * is none. To be freed in any case. */
int dray__placer_open(dray__placer *placer, const dray__settings *settings, uint64_t space,
                      const char *keeper_path, uint64_t era, dray_error *error);
void dray__placer_free(dray__placer *placer);
/* Takes the column's bytes from the record; the column's extent says where they are now. */
int dray__place_column(dray__placer *placer, dray__reader *r, dray__new_column *column,
                       uint64_t items, dray_error *error);
/* What is placed later comes into another chunk. */
void dray__place_close(dray__placer *placer);
/* DRAY_EGONE: its holder has lost it. */
int dray__placer_get(dray__placer *placer, dray__range *range, dray_error *error);
